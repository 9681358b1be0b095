"""Deltas of a reply as Anthropic's content blocks, as events and as whole blocks: both agree.

    deltas ──► BlockWriter ──► content_block_* events ──► `whole`: the blocks of a `Message`

Thinking is shown to those who asked for it, and none is needed back: a turn is found by its text
and calls. Does not own: the request, and the message around the blocks (`anthropic_messages.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, TypeGuard

import orjson

from stepwell.gateway.dialects.base import signature_of
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta

Event: TypeAlias = dict[str, Any]
Thinking: TypeAlias = Literal["hidden", "shown", "omitted"]


class BlockWriter:
    """Deltas of one reply → `content_block_*` events.

    A block of text or thinking begins with its first visible character: the API has no blank
    blocks, and some clients fail on them.
    """

    def __init__(self, thinking: Thinking, prefill: str) -> None:
        """`prefill`: the core's text begins with it; the API's does not."""
        self._thinking = thinking
        self._prefill = prefill
        self._index = -1
        self._open = False
        self._kind = ""
        """Kind of the text that comes, "text" or "thinking"; a block opens when some is visible."""
        self._blank = ""
        self._thought: list[str] = []
        """Text of the open thinking block, for its signature."""

    def events(self, deltas: Iterable[Delta]) -> Iterator[Event]:
        """Yield the events of a whole reply."""
        for delta in deltas:
            yield from self.write(delta)
        yield from self.finish()

    def write(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ToolCall):
            yield from self.finish()
            yield self._start(type="tool_use", id=delta.id, name=delta.name, input={})
            yield self._delta(type="input_json_delta", partial_json=delta.arguments)
            yield self._stop()
        elif isinstance(delta, ReasoningDelta):
            if self._thinking != "hidden":
                yield from self._say("thinking", delta.text)
        else:
            yield from self._say("text", self._without_prefill(delta.text))

    def goes_on(self, delta: Delta) -> TypeGuard[ContentDelta | ReasoningDelta]:
        """Return true if `delta` is more text of the open block, of which `text` is the event; it
        counts as written then."""
        if not self._open or isinstance(delta, ToolCall) or not delta.text:
            return False
        if isinstance(delta, ReasoningDelta):
            if self._kind != "thinking" or self._thinking != "shown":
                return False
            self._thought.append(delta.text)
            return True
        return self._kind == "text" and not self._prefill

    def text(self, text: str) -> Event:
        """More text of the open block."""
        if self._kind == "text":
            return self._delta(type="text_delta", text=text)
        return self._delta(type="thinking_delta", thinking=text)

    def finish(self) -> Iterator[Event]:
        """End the open block, if one is."""
        if self._open and self._kind == "thinking":
            signature = signature_of("".join(self._thought))
            yield self._delta(type="signature_delta", signature=signature)
        if self._open:
            yield self._stop()
        self._open, self._kind, self._blank = False, "", ""
        self._thought.clear()

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self.finish()
            self._kind = kind
        if not self._open:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank, self._open = "", True
            yield self._start(type=kind, **{kind: ""}, **_UNSIGNED if kind == "thinking" else {})
        if kind == "text":
            if text:
                yield self.text(text)
            return
        self._thought.append(text)
        if self._thinking == "shown":
            yield self.text(text)

    def _without_prefill(self, text: str) -> str:
        n = min(len(text), len(self._prefill))
        if not self._prefill.startswith(text[:n]):  # read as something else than text
            n, self._prefill = 0, ""
        self._prefill = self._prefill[n:]
        return text[n:]

    def _start(self, **block: Any) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, **delta: Any) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._index}


_UNSIGNED = {"signature": ""}


def whole(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content blocks that the events of a reply add up to."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                if name == "partial_json":
                    # As text, so that numbers of any size come through.
                    blocks[-1]["input"] = orjson.Fragment(text)
                elif name != "type":
                    blocks[-1][name] += text
    return blocks
