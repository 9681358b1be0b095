"""From one turn at a time to rows.

A *turn* is one assistant message as the model would have produced it: the text it was given
(everything before, and the generation prompt) and the text it wrote, the token that closes the turn
included. A generator says what these texts are (`_turn`); here they become rows::

    turn 1   prompt₁ + response₁
    turn 2   prompt₂ + response₂      prompt₂ begins with prompt₁ + response₁: the same row goes on
             ────────                 it does not: the template rewrote the past (below)
    row      [prompt₁][response₁][what prompt₂ adds][response₂] …
    mask      0 0 0 0  1 1 1 1 1   0 0 0 0 0 0 0 0   1 1 1 1 1

Thinking templates (Qwen3's, DeepSeek's) show the reasoning of a past turn no more, so what the
model wrote is not what it is given back. The reasoning stays in the context, as the gateway keeps
it: what the template writes after the turn is found by rendering a nonce in the turn's place. Where
that cannot be told a new row begins, with loss on its new turns only.

    prefix         any template: what a conversation gains by one more message
    distill_qwen   DeepSeek-R1's distilled models, whose template cannot show a turn as it was

Each part of a row is tokenised on its own, as it is in a rollout, where the prompt ends before the
response is sampled; so no token ever lies on both sides of a border.
"""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.backends.errors import MaskError
from stepwell.backends.masks.base import (
    ASSISTANT,
    LossMaskGenerator,
    MaskedRow,
    Message,
    Tool,
    Turn,
    check_messages,
    for_template,
    reasoning_of,
)


@dataclass(frozen=True, slots=True)
class RowText:
    """Text of a row; `message_index` of the assistant message that it is, None for context."""

    text: str
    message_index: int | None = None


class TurnwiseMasks(LossMaskGenerator):
    """Generator that makes rows of turns. Subclass it and implement `_turn`.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        chat_template_kwargs: for the template, e.g. {"enable_thinking": False}.

    Raises:
        MaskError: the tokenizer has no chat template, or not the one this generator is for.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise MaskError(
                f"the tokenizer ({type(tokenizer).__name__}) has no chat template, without which "
                "messages have no text; add a chat_template.jinja to the model's folder"
            )
        self.tokenizer = tokenizer
        self._template_args = dict(chat_template_kwargs or {})
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        any_special = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        self._closed = re.compile(f"(?:{any_special})(?=\\s*\\Z)")
        self._anchor = self._find_anchor(special)

    def rows(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[MaskedRow]:
        """The conversation as few rows as are exact; every assistant message has loss in one.

        What follows the last assistant message is left out: no loss depends on it.

        Raises:
            MaskError: there is no assistant message, the chat template refuses the conversation,
            or this generator cannot tell which tokens are the assistant's.
        """
        with_loss = check_messages(messages)
        shown = [for_template(m) for m in messages]
        return [
            self._encode(parts, with_loss)
            for parts in self._rows_of_parts(shown, list(tools) if tools else None)
        ]

    @abstractmethod
    def _turn(
        self, messages: Sequence[Message], index: int, tools: list[Tool] | None
    ) -> tuple[str, str]:
        """Assistant message `index` as the model would produce it: (prompt, response), the closing
        token in the response and nothing after it."""

    def _rows_of_parts(
        self, messages: Sequence[Message], tools: list[Tool] | None
    ) -> list[list[RowText]]:
        rows: list[list[RowText]] = []
        text, last = "", -1
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, response = self._turn(messages, index, tools)
            new: str | None = None
            if rows and prompt.startswith(text):
                new = prompt[len(text) :]
            elif rows:
                new = self._after_turn(messages, last, index, tools)
            if new is None:
                rows.append([RowText(prompt)])
                text = prompt
            else:
                rows[-1].append(RowText(new))
                text += new
            rows[-1].append(RowText(response, index))
            text += response
            last = index
        return rows

    def _after_turn(
        self, messages: Sequence[Message], turn: int, until: int, tools: list[Tool] | None
    ) -> str | None:
        """Text that the template writes between the close of the assistant message `turn` and the
        generation prompt of message `until`; None if that cannot be told.

        The turn is rendered with a nonce for its content, once as the last message and once with
        those that follow: what comes after the close in the second, and not in the first.
        """
        nonce = f"nonce{secrets.token_hex(8)}"
        before = [*messages[:turn], {**messages[turn], "content": nonce}]
        _, found, alone = self._render(before, tools).rpartition(nonce)
        follow = self._render([*before, *messages[turn + 1 : until]], tools, prompt=True)
        _, found_too, followed = follow.rpartition(nonce)
        close = alone[: self._close_end(alone)]
        if not (found and found_too and followed.startswith(close)):
            return None
        return followed[len(close) :]

    def _render(
        self, messages: Sequence[Message], tools: list[Tool] | None, *, prompt: bool = False
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._template_args,
            )
        except Exception as e:  # a template is a program of its own: it may raise anything
            raise MaskError(
                f"the chat template refuses messages[:{len(messages)}] ({type(e).__name__}: "
                f"{e!s:.200}); a conversation begins with what the assistant answers to"
            ) from e
        return str(text)

    def _close_end(self, text: str) -> int:
        """End of the turn that `text` ends with: after its last special token, without the white
        space that templates write behind it; the end of `text` if there is no such token."""
        close = self._closed.search(text)
        return close.end() if close is not None else len(text)

    def _find_anchor(self, special: Sequence[str]) -> str:
        """A special token to encode before a part that would else be encoded as if it began the
        sequence (SentencePiece adds a space there); "" where it makes no difference."""
        for text in special:
            ids = self._ids(text + "a")
            if len(ids) > 1 and ids[0] == self.tokenizer.convert_tokens_to_ids(text):
                return "" if ids[1:] == self._ids("a") else text
        return ""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode(self, parts: Sequence[RowText], with_loss: Mapping[int, bool]) -> MaskedRow:
        ids: list[int] = []
        mask: list[int] = []
        turns: list[Turn] = []
        before = ""
        for part in parts:
            new = self._ids(before + part.text)[1 if before else 0 :]
            if part.message_index is None:
                before = self._anchor
            else:
                # Some close tokens swallow the white space behind them: they must be seen there.
                close = self._closed.search(part.text)
                before = close[0] if close is not None else self._anchor
            loss = part.message_index is not None and with_loss[part.message_index]
            if part.message_index is not None:
                turns.append(Turn(part.message_index, len(ids), len(ids) + len(new), loss))
            ids += new
            mask += [int(loss)] * len(new)
        return MaskedRow(np.asarray(ids, np.int32), np.asarray(mask, np.int8), tuple(turns))


class PrefixMasks(TurnwiseMasks):
    """By the difference that a message makes: message i of the assistant is what the text gains
    from `messages[:i]` with the generation prompt to `messages[:i + 1]`."""

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


class DistillQwenMasks(TurnwiseMasks):
    """The generation prompt opens the thought (`<｜Assistant｜><think>`), and the template cuts the
    reasoning out of every assistant message that it shows. So the response is not rendered; it is
    written as the model writes it::

        prompt     …<｜User｜>2 + 2?<｜Assistant｜><think>\\n
        response   Easy.\\n</think>\\n\\n4<｜end▁of▁sentence｜>

    A message without reasoning closes the empty thought, as DeepSeek recommends to skip it. Calls
    of tools are refused: only the template knows their form.
    """

    def __init__(
        self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(tokenizer, chat_template_kwargs)
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
            text = f"{begin}{thought}\n</think>\n\n{answer}"
        elif thought:
            text = f"<think>\n{thought}\n</think>\n\n{answer}"
        else:
            text = answer
        return prompt, text + str(self.tokenizer.eos_token)
