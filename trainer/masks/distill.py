"""`distill_qwen`: DeepSeek-R1's distilled models, whose template cannot show a turn as it was.

The generation prompt opens the thought (`<｜Assistant｜><think>\\n`), and the template cuts the
reasoning out of every assistant message it shows, the last one too. So the response is not
rendered; it is written as the model writes it::

    prompt     …<｜User｜>2 + 2?<｜Assistant｜><think>\\n
    response   Easy.\\n</think>\\n\\n4<｜end▁of▁sentence｜>

A message without reasoning closes the empty thought, as DeepSeek recommends to skip it. Calls of
tools are refused: only the template knows their form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.trainer.errors import MaskError
from stepwell.trainer.masks.base import Message, Thinking, Tool, reasoning_of
from stepwell.trainer.masks.turnwise import TurnwiseMasks

ASSISTANT = "<｜Assistant｜>"


class DistillQwenMasks(TurnwiseMasks):
    def __init__(
        self,
        tokenizer: Any,
        *,
        thinking: Thinking = "preserve",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, thinking=thinking, chat_template_kwargs=chat_template_kwargs)
        if ASSISTANT not in str(tokenizer.chat_template) or not tokenizer.eos_token:
            raise MaskError(
                f"DistillQwenMasks is for templates with {ASSISTANT!r} and a tokenizer with an EOS "
                "token; use 'prefix'"
            )

    def _turn(
        self, messages: Sequence[Message], index: int, tools: list[Tool] | None
    ) -> tuple[str, str]:
        message = messages[index]
        if message.get("tool_calls"):
            raise MaskError(
                f"messages[{index}] calls tools, which distill_qwen cannot write; use 'prefix' if "
                "the template shows them after the generation prompt"
            )
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise MaskError(f"messages[{index}]: content is {content!r:.80}; it is a string")
        prompt = self._render(messages[:index], tools, prompt=True)
        thought = reasoning_of(message).strip("\n")
        answer = content.partition("</think>")[2] if "</think>" in content else content
        answer = answer.lstrip("\n")
        if not thought.strip() and not answer.strip():
            raise MaskError(f"messages[{index}] is empty; take the message out")
        if prompt.rstrip().endswith("<think>"):
            # Opened with or without its line break; the thought begins on a line of its own.
            begin = "" if prompt.endswith("\n") else "\n"
            said = f"{begin}{thought}\n</think>\n\n{answer}"
        elif thought:
            said = f"<think>\n{thought}\n</think>\n\n{answer}"
        else:
            said = answer
        return prompt, said + str(self.tokenizer.eos_token)
