"""This module turns response text into content, reasoning and tool calls while it arrives, so that
streams tell what is certain and never take it back.

    text ──► stop strings cut ──► <think>…</think> ──► tool calls ──► ContentDelta | ReasoningDelta
                                                                      | ToolCall

Text that may still become a marker is held back until it is decided. What begins as a tool call and
cannot be read as one, or is cut off, becomes content, character for character. Replies without
streaming go through the same parser, so that both agree. A reply without markup needs none. Does
not own: how a call is written (`calls.py`), ids, which markup a model writes (`reader.py`), what a
dialect makes of deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeAlias

import msgspec

from stepwell.gateway.reply.calls import (
    CallStyle,
    ObjectScanner,
    ToolCall,
    numbered_id,
    parse_call,
    parse_xml_call,
)
from stepwell.gateway.tokens.messages import Tool

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCall


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(marker[0], at + 1)
    return longest


class StopCutter:
    """Drops a stop string and all after it; it may arrive in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; the text ends before it."""

    @property
    def n_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        found = min(((at, s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            at, self.matched = found
            self._held = ""
            return text[:at]
        n = held_back(text, self._stops)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _numbered(
    read: Callable[[str], ToolCall | None], first: int
) -> Callable[[str], ToolCall | None]:
    numbers = count(first)

    def numbered(text: str) -> ToolCall | None:
        call = read(text)
        return None if call is None else replace(call, id=numbered_id(next(numbers)))

    return numbered


class ReplyParser:
    """Reads `<think>` markup and tool calls, each if wanted.

    A state reads what it can of the buffer; true: it has left the rest to another state.
    """

    def __init__(
        self,
        *,
        tools: bool,
        reasoning: bool,
        starts_in_reasoning: bool = False,
        is_json: bool = False,
        style: CallStyle = "hermes",
        offered: Sequence[Tool] | None = None,
        first_call: int | None = None,
    ) -> None:
        """
        Args:
            is_json: what is visible is JSON by an engine's grammar, most of which begin at once, in
                the thought that the prompt has opened.
            offered: the tools, for what their schemas say of arguments.
            first_call: number of the first call; None: calls have random ids.
        """
        bare = tools and style == "llama3_json"
        self._tools = tools and not bare
        self._visible: _State = ReplyParser._bare_call if bare else ReplyParser._content
        self._scanner: ObjectScanner | None = None
        self._read_call: Callable[[str], ToolCall | None] = partial(parse_call, bare=bare)
        if style == "qwen3_coder":
            self._read_call = partial(parse_xml_call, tools=offered)
        if first_call is not None:
            self._read_call = _numbered(self._read_call, first_call)
        self._state: _State = ReplyParser._start if reasoning else self._visible
        if reasoning and starts_in_reasoning:
            self._state = ReplyParser._json_or_reasoning if is_json else ReplyParser._reasoning
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._after_call = False

    @property
    def n_held(self) -> int:
        """Characters at the end of the text that wait for what follows them."""
        in_call = self._state is ReplyParser._call
        return len(self._buffer) + (len(CALL_OPEN) if in_call else 0)

    def feed(self, text: str) -> list[Delta]:
        if (
            self._state is ReplyParser._content
            and not (self._buffer or self._after_call)
            and not (self._tools and CALL_OPEN[0] in text)
        ):
            return [ContentDelta(text)] if text else []  # as most of what models say
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Delta]:
        while self._state(self, final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _start(self, final: bool) -> bool:
        """Decide whether the reply opens with a thought; leading white space may precede it."""
        body = self._buffer.lstrip()
        if body.startswith(THINK_OPEN):
            self._buffer = body[len(THINK_OPEN) :]
            self._state = ReplyParser._reasoning
            return True
        if not final and THINK_OPEN.startswith(body):
            return False
        self._state = self._visible
        return True

    def _json_or_reasoning(self, final: bool) -> bool:
        body = self._buffer.lstrip()
        if not body and not final:
            return False
        self._state = self._visible if body.startswith(("{", "[")) else ReplyParser._reasoning
        return True

    def _reasoning(self, final: bool) -> bool:
        before, close, after = self._buffer.partition(THINK_CLOSE)
        if close:
            self._put(ReasoningDelta(before))
            self._buffer, self._state = after, ReplyParser._after_reasoning
            return True
        self._put(ReasoningDelta(self._take(() if final else (THINK_CLOSE,))))
        return False

    def _after_reasoning(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer and not final:
            return False
        self._state = self._visible
        return True

    def _bare_call(self, final: bool) -> bool:
        """Decide whether the reply is a call without markup; a tag may precede it."""
        body = self._buffer.lstrip()
        if body.startswith(PYTHON_TAG):
            body = body.removeprefix(PYTHON_TAG).lstrip()
        elif not final and PYTHON_TAG.startswith(body):
            return False
        if not final and not body:
            return False
        if body.startswith("{"):
            self._scanner = self._scanner or ObjectScanner()
            end = self._scanner.end(body)
            if end is None and not final:
                return False
            if end is not None and (call := self._read_call(body[:end])) is not None:
                self._deltas.append(call)
                self._after_call = True
                self._buffer = body[end:]
        self._state = ReplyParser._content
        return True

    def _content(self, final: bool) -> bool:
        before, opened, after = self._buffer.partition(CALL_OPEN) if self._tools else ("", "", "")
        if opened:
            self._buffer, self._state = after, ReplyParser._call
            text = before
        else:
            text = self._take((CALL_OPEN,) if self._tools and not final else ())
        if self._after_call and not text.strip():
            # White space between calls is markup; what follows it tells, and at the end it is, too.
            if not opened and not final:
                self._buffer = text + self._buffer
        else:
            self._put(ContentDelta(text))
        return bool(opened)

    def _call(self, final: bool) -> bool:
        body, closed, after = self._buffer.partition(CALL_CLOSE)
        if not closed and not final:
            return False
        call = self._read_call(body) if closed else None
        if call is None:
            self._put(ContentDelta(CALL_OPEN + body + closed))
        else:
            self._deltas.append(call)
            self._after_call = True
        self._buffer, self._state = after, ReplyParser._content
        return bool(closed)

    def _take(self, markers: Sequence[str]) -> str:
        """The buffer, but for its end if that may begin a marker."""
        n = len(self._buffer) - held_back(self._buffer, markers)
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        return text

    def _put(self, delta: ContentDelta | ReasoningDelta) -> None:
        if delta.text:
            self._deltas.append(delta)
            self._after_call = False


_State: TypeAlias = Callable[[ReplyParser, bool], bool]
