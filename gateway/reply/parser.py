"""This module turns response text into content, reasoning and tool calls while it arrives, so that
streams tell what is certain and never take it back.

    text ──► stop strings cut ──► <think>…</think> ──► tool calls ──► ContentDelta | ReasoningDelta
                                                                      | ToolCall
    call     [begin of the section] opening … closing   opening … closing [end of the section]

Text that may still become a marker is held back until it is decided. What begins as a tool call and
cannot be read as one, or is cut off, becomes content, character for character. Replies without
streaming go through the same parser, so that both agree. A reply without markup needs none. Does
not own: how a call is written (`calls.py`), ids, which markup a model writes (`reader.py`), what a
dialect makes of deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeAlias

import msgspec

from stepwell.gateway.config import CallStyle
from stepwell.gateway.reply.calls import (
    CALL_FORMS,
    MISTRAL_HEAD,
    JsonScanner,
    ToolCall,
    may_begin_head,
    next_id,
)
from stepwell.gateway.tokens.messages import Tool

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
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
        self._form = form = CALL_FORMS[style]
        self._openings = form.openings if tools else ()
        bare = tools and not form.opening
        self._visible: _State = ReplyParser._bare_call if bare else ReplyParser._content
        self._offered = offered
        self._numbers = None if first_call is None else count(first_call)
        self._ids: set[str] = set()
        """Ids of the calls so far: results are told apart by them."""
        self._opened = ""
        """Markup that the call being read begins with."""
        self._scanner: JsonScanner | None = None
        self._state: _State = ReplyParser._start if reasoning else self._visible
        if reasoning and starts_in_reasoning:
            self._state = ReplyParser._json_or_reasoning if is_json else ReplyParser._reasoning
        self._buffer = ""
        self._deltas: list[Delta] = []
        self._waits = bool(self._openings)
        """White space at the end of the text is markup if a call follows: nothing is visible yet,
        or only white space since a call."""
        self._after_call = False

    @property
    def n_held(self) -> int:
        """Characters at the end of the text that wait for what follows them."""
        return len(self._buffer) + len(self._opened)

    def feed(self, text: str) -> list[Delta]:
        if (
            self._state is ReplyParser._content
            and not (self._buffer or self._waits)
            and not (self._openings and self._openings[0][0] in text)
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
            self._scanner = self._scanner or JsonScanner()
            end = self._scanner.end(body)
            if end < 0 and not final:
                return False
            if end >= 0 and self._put_calls(body[:end]):
                self._buffer = body[end:]
        self._state = ReplyParser._content
        return True

    def _content(self, final: bool) -> bool:
        at, opening = 0, ""
        for each in self._openings:
            found = self._buffer.find(each)
            if found >= 0 and (not opening or found < at):
                at, opening = found, each
        if opening:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(opening) :]
            in_section = opening == self._form.section[0]
            self._state = ReplyParser._section if in_section else ReplyParser._call
        else:
            text = self._take(() if final else self._openings)
        if self._waits:
            # So is the end of a section behind a call. What follows tells; the end of the reply
            # is as good as a call behind one.
            end = self._form.section[1] if self._after_call else ""
            while end and (body := text.lstrip()).startswith(end):
                text = text[: -len(body)] + body[len(end) :]
            body = text.lstrip()
            if end.startswith(body) and not (opening or final):
                self._buffer = text + self._buffer
                return False
            if not body and opening:
                text, opening = "", text + opening
            elif not body and self._after_call:
                text = ""
        self._put(ContentDelta(text))
        self._opened = opening
        return bool(opening)

    def _section(self, final: bool) -> bool:
        """Decide whether a call follows the beginning of a section."""
        body, opening = self._buffer.lstrip(), self._form.opening
        if not final and opening.startswith(body):
            return False
        before, found, after = self._buffer.partition(opening)
        if found and not before.strip():
            self._opened += before + found
            self._buffer, self._state = after, ReplyParser._call
            return True
        opened, self._opened, self._state = self._opened, "", ReplyParser._content
        self._put(ContentDelta(opened))
        return True

    def _call(self, final: bool) -> bool:
        closing = self._form.closing
        end = self._buffer.find(closing) if closing else self._json_end()
        if not closing and self._scanner is None and not may_begin_head(self._buffer):
            self._put(ContentDelta(self._opened))
            self._opened, self._state = "", ReplyParser._content
            return True
        if end < 0 and not final:
            return False
        n = len(self._buffer) if end < 0 else end + len(closing)
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        opened, self._opened, self._state = self._opened, "", ReplyParser._content
        self._scanner = None
        if end < 0 or not self._put_calls(text[:end]):
            self._put(ContentDelta(opened + text))
        return end >= 0

    def _json_end(self) -> int:
        """End of the JSON that ends a call; -1: it is not there yet."""
        if self._scanner is None:
            if (head := MISTRAL_HEAD.match(self._buffer)) is None:
                return -1
            self._scanner = JsonScanner(head.end())
        return self._scanner.end(self._buffer)

    def _take(self, markers: Sequence[str]) -> str:
        """The buffer, but for its end if that may begin a marker."""
        n = len(self._buffer) - held_back(self._buffer, markers)
        text, self._buffer = self._buffer[:n], self._buffer[n:]
        return text

    def _put_calls(self, body: str) -> bool:
        """Put the calls that `body` makes, if any."""
        calls = self._form.read(body, self._offered)
        if self._numbers is not None:
            given = self._form.numbered
            calls = [replace(c, id=given(next(self._numbers), c.name)) for c in calls]
        for call in calls:
            uid = call.id
            while uid in self._ids:  # the model may give one id twice
                uid = next_id(uid)
            self._ids.add(uid)
            self._deltas.append(call if uid == call.id else replace(call, id=uid))
        if calls:
            self._waits = self._after_call = True
        return bool(calls)

    def _put(self, delta: ContentDelta | ReasoningDelta) -> None:
        if delta.text:
            self._deltas.append(delta)
            if isinstance(delta, ContentDelta):
                self._waits = self._after_call = False


_State: TypeAlias = Callable[[ReplyParser, bool], bool]
