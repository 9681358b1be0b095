"""`prefix`, and the families that are it with their markup checked: `qwen`, `chatml`, `llama3`.

Works with any chat template: message i of the assistant is what the conversation's text gains from
`messages[:i]` with the generation prompt to `messages[:i + 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stepwell.trainer.errors import MaskError
from stepwell.trainer.masks.base import Message, Thinking, Tool, reasoning_of
from stepwell.trainer.masks.turnwise import TurnwiseMasks


class PrefixMasks(TurnwiseMasks):
    """By the difference that a message makes."""

    def _turn(
        self, messages: Sequence[Message], index: int, tools: list[Tool] | None
    ) -> tuple[str, str]:
        prompt = self._render(messages[:index], tools, prompt=True)
        text = self._render(messages[: index + 1], tools)
        if not text.startswith(prompt):
            raise MaskError(
                f"messages[{index}]: the chat template's generation prompt "
                f"({prompt[-40:]!r}) does not begin the turn as it is shown afterwards "
                f"({text[max(0, len(prompt) - 40) :][:80]!r}); use a generator made for this "
                "template"
            )
        response = text[len(prompt) :]
        thought = reasoning_of(messages[index]).strip()
        if thought and thought not in response:
            raise MaskError(
                f"messages[{index}]: the chat template does not show its reasoning "
                f"({thought!r:.60}), though it is the last message; take the reasoning out, or use "
                "a generator made for this template"
            )
        end = self._close_end(response)
        if not response[:end].strip():
            raise MaskError(f"messages[{index}] renders to nothing; take the message out")
        return prompt, response[:end]


class _MarkupMasks(PrefixMasks):
    """`PrefixMasks` for a template that opens and closes turns as `_OPEN` and `_CLOSE` say."""

    _OPEN: ClassVar[str]
    _CLOSE: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        tokenizer: Any,
        *,
        thinking: Thinking = "preserve",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, thinking=thinking, chat_template_kwargs=chat_template_kwargs)
        if not fits(tokenizer, self._OPEN, self._CLOSE):
            raise MaskError(
                f"{type(self).__name__} is for templates with {self._OPEN!r} and "
                f"{' or '.join(map(repr, self._CLOSE))}, which this tokenizer has not; use 'prefix'"
            )

    def _turn(
        self, messages: Sequence[Message], index: int, tools: list[Tool] | None
    ) -> tuple[str, str]:
        prompt, response = super()._turn(messages, index, tools)
        if not response.endswith(self._CLOSE):
            raise MaskError(
                f"messages[{index}]: the turn is not closed with "
                f"{' or '.join(map(repr, self._CLOSE))} but ends {response[-40:]!r}; use 'prefix'"
            )
        return prompt, response


class QwenMasks(_MarkupMasks):
    """Qwen 2 to 3, SmolLM2 and others that write ChatML."""

    _OPEN = "<|im_start|>"
    _CLOSE = ("<|im_end|>",)


class Llama3Masks(_MarkupMasks):
    """Llama 3.x; a call of a built-in tool ends with <|eom_id|>."""

    _OPEN = "<|start_header_id|>"
    _CLOSE = ("<|eot_id|>", "<|eom_id|>")


def fits(tokenizer: Any, opening: str, closing: Sequence[str]) -> bool:
    """Whether the template writes `opening`, and the tokenizer knows a token of `closing`."""
    special = {t.content for t in tokenizer.added_tokens_decoder.values()}
    return opening in str(tokenizer.chat_template) and any(c in special for c in closing)
