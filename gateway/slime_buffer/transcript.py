"""Token ids → messages, for consumers that read text: the inverse of a chat template, as far as
there is one.

The template is rendered with nonces once; what stands around them are the marks of each role::

    render([user NONCE, assistant NONCE, user NONCE])
    <|im_start|>user\\n·<|im_end|>\\n<|im_start|>assistant\\n·<|im_end|>\\n<|im_start|>user\\n·…
    └── header ─────┘ └── end ────┘└── header ──────────┘

    ids of a branch   prompt │ sampled │ what the next prompt added │ sampled
    messages          system, user │ assistant │ tool, user │ assistant

Control tokens are told from the same text by their ids, so no message can forge a mark. Text that
does not parse becomes one user message as it stands: nothing is lost, and nothing raises. Sampled
text is always one assistant message, its reasoning and tool-call markup as sampled.

Messages are a view. Rendering and tokenising them again need not give the sampled ids; whoever
trains takes the ids.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from stepwell.datapool.types import TokenIds
from stepwell.gateway.tokens.messages import Message
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

_REFUSALS = (jinja2.TemplateError, LookupError, TypeError, ValueError, AttributeError)
"""What a template raises for a conversation that it does not like."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a template writes before and after a message's text."""

    role: str
    header: str
    end: str


class Transcript:
    """The messages of a branch. Safe to use from threads."""

    def __init__(
        self, tokenizer: ChatTokenizer, template_args: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._args = dict(template_args or {})
        self._special = {i: text for text, i in tokenizer.special.items()}
        self._special_ids = np.asarray(sorted(self._special), np.int32)
        secret = secrets.token_hex(6)
        self._open, self._shut = f"\ue0f4{secret}\ue0f5", f"\ue0f6{secret}\ue0f7"
        self._nonces = [f"nonce{i}x{secret}" for i in range(3)]
        self._head = self._generation = self._close = ""
        self._patterns: list[tuple[_Mark, re.Pattern[str]]] = []
        try:
            self._learn()
        except _REFUSALS:
            self._patterns = []

    def messages(self, pieces: Sequence[TokenIds]) -> list[Message]:
        """Messages of `[prompt, sampled, what the next prompt added, sampled, …]`.

        Assistant messages that were not sampled carry `step_loss_mask: 0`, which slime's mask
        generators read.
        """
        messages: list[Message] = []
        rest_of_close = ""
        for i, ids in enumerate(pieces):
            text = self._marked(ids)
            if i % 2 == 0:
                messages += self._parse(text, rest_of_close, first=i == 0)
                continue
            n = overlap(text, self._close)
            rest_of_close = self._close[n:]
            content = self._plain(text[: len(text) - n])
            messages.append({"role": "assistant", "content": content})
        return messages

    # -- parsing -----------------------------------------------------------------------------

    def _parse(self, text: str, rest_of_close: str, *, first: bool) -> list[Message]:
        body = text.removesuffix(self._generation)
        # What the template adds to a conversation by itself (a default system message) is no
        # message, if the rest is whole without it.
        added = self._head if first else rest_of_close
        for candidate in (body.removeprefix(added), body):
            if (messages := self._parse_all(candidate)) is not None:
                return messages
        return [{"role": "user", "content": self._plain(text)}]

    def _parse_all(self, text: str) -> list[Message] | None:
        messages: list[Message] = []
        at = 0
        while at < len(text):
            matched = self._match(text, at)
            if matched is None:
                return None
            mark, found = matched
            message: Message = {"role": mark.role, "content": self._plain(found[1])}
            if mark.role == "assistant":
                message["step_loss_mask"] = 0
            messages.append(message)
            at = found.end()
        return messages or None

    def _match(self, text: str, at: int) -> tuple[_Mark, re.Match[str]] | None:
        for mark, pattern in self._patterns:
            if (found := pattern.match(text, at)) is not None:
                return mark, found
        return None

    def _marked(self, ids: TokenIds) -> str:
        """Text with control tokens between unguessable characters."""
        pieces: list[str] = []
        start = 0
        for at in np.flatnonzero(np.isin(ids, self._special_ids)).tolist():
            pieces.append(self._decode(ids[start:at]))
            pieces.append(f"{self._open}{self._special[int(ids[at])]}{self._shut}")
            start = at + 1
        pieces.append(self._decode(ids[start:]))
        return "".join(pieces)

    def _decode(self, ids: TokenIds) -> str:
        return self._tokenizer.decode(ids.tolist()) if len(ids) else ""

    def _plain(self, text: str) -> str:
        return text.replace(self._open, "").replace(self._shut, "")

    # -- the template's marks ----------------------------------------------------------------

    def _learn(self) -> None:
        a, b, c = self._nonces
        user, reply = {"role": "user", "content": a}, {"role": "assistant", "content": b}
        again = {"role": "user", "content": c}
        before, end = self._around([user], a)
        _, after = self._around([user], a, generate=True)
        if not after.startswith(end):
            return
        generation = after[len(end) :]
        _, between, tail = self._around([user, reply, again], a, b, c)[:3]
        if tail.startswith(end):
            close, header = end, tail[len(end) :]
        else:
            n = _common_end(before, tail)
            close, header = tail[: len(tail) - n], tail[len(tail) - n :]
        if not header or not before.endswith(header):
            return
        marks = [_Mark("user", header, end)]
        if between.startswith(end) and between != end:
            marks.append(_Mark("assistant", between[len(end) :], close))
        for find in (self._system_first, self._system_later, self._tool):
            try:
                marks += find(header, close, generation)
            except _REFUSALS:
                continue  # a template need not know the role
        self._head = before[: len(before) - len(header)]
        self._generation, self._close = generation, close
        # What begins alike is tried longest first: a tool's result inside a user turn.
        marks = sorted(dict.fromkeys(marks), key=lambda m: len(m.header), reverse=True)
        starts = "|".join(re.escape(m.header) for m in marks)
        self._patterns = [
            (
                m,
                re.compile(
                    f"{re.escape(m.header)}(.*?){re.escape(m.end)}(?=\\Z|{starts})", re.DOTALL
                ),
            )
            for m in marks
        ]

    def _system_first(self, header: str, close: str, generation: str) -> list[_Mark]:
        a, b, _ = self._nonces
        said = [{"role": "system", "content": a}, {"role": "user", "content": b}]
        before, between = self._around(said, a, b)[:2]
        if not before or not between.endswith(header) or between == header:
            return []
        return [_Mark("system", before, between[: -len(header)])]

    def _system_later(self, header: str, close: str, generation: str) -> list[_Mark]:
        a, b, c = self._nonces
        said = [
            {"role": "user", "content": a},
            {"role": "assistant", "content": b},
            {"role": "system", "content": c},
        ]
        _, _, between, end = self._around(said, a, b, c)
        if not between.startswith(close) or between == close or not end:
            return []
        return [_Mark("system", between[len(close) :], end)]

    def _tool(self, header: str, close: str, generation: str) -> list[_Mark]:
        a, _, c = self._nonces
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        said: list[Message] = [
            {"role": "user", "content": a},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": c, "tool_call_id": "call00000", "name": "f"},
        ]
        before, after = self._around(said, c, generate=True)
        header = before[before.rindex(close) + len(close) :]
        if not close or not header or not generation or not after.endswith(generation):
            return []
        return [_Mark("tool", header, after[: -len(generation)])]

    def _around(
        self, messages: list[Message], *nonces: str, generate: bool = False
    ) -> tuple[str, ...]:
        """The rendered text before, between and after the nonces.

        Raises:
            ValueError: one of them is not there.
        """
        text = self._tokenizer.render(messages, None, self._args, add_generation_prompt=generate)
        rest = self._marked(self._tokenizer.encode(text))
        parts: list[str] = []
        for nonce in nonces:
            before, found, rest = rest.partition(nonce)
            if not found:
                raise ValueError(f"the template leaves out {nonce}")
            parts.append(before)
        return (*parts, rest)


def _common_end(one: str, other: str) -> int:
    """Length of the longest text that both end with."""
    n = 0
    while n < min(len(one), len(other)) and one[-n - 1] == other[-n - 1]:
        n += 1
    return n


def overlap(text: str, following: str) -> int:
    """Length of the longest end of `text` that `following` begins with."""
    return next((n for n in range(len(following), 0, -1) if text.endswith(following[:n])), 0)
