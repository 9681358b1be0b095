"""This module reads replies as the tokenizer's own `response_template` says, so that models whose
markup no style of ours knows have tool calls and thoughts.

transformers executes such a template. A gateway of such a model loads that part of it (50 MB, no
torch), and no other gateway does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stepwell.gateway.reply.calls import ToolCall, make_call
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import Tool

_REASONING = frozenset({"thinking", "reasoning", "reasoning_content"})
_UNREADABLE = (ValueError, RecursionError)
"""What transformers' parser raises on a tool call that it cannot read."""


class ResponseTemplateParser:
    """A `ReplyParser`.

    transformers' parser raises on a malformed, truncated or too deeply nested call; the text from
    the last delta on is then content. A prompt that it cannot read leaves nothing open for the
    reply. Where calls are not read, their markup is content.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        prefix: str,
        tools: Sequence[Tool] | None,
        ends: Sequence[str],
        *,
        reads_calls: bool,
    ) -> None:
        """
        Args:
            prefix: the end of the prompt, which may open a thought.
            ends: text of the control tokens that may end a reply.
        """
        from transformers.utils.chat_parsing import ResponseParser

        if not reads_calls:
            fields = {k: v for k, v in template["fields"].items() if k != "tool_calls"}
            template = {**template, "fields": fields}
        make = partial(ResponseParser, dict(template), tools=list(tools or ()) or None)
        try:
            self._parser = make(prefix=prefix)
        except _UNREADABLE:  # ids of a white-box agent, which need not read as a conversation
            self._parser = make(prefix="")
        self._ends = tuple(ends)
        self._raw = ""
        self._given = 0
        """How much of the raw text is in deltas already."""
        self._read = 0
        """How much of it the parser has reported, an open call included."""
        self._failed = False

    @property
    def n_held(self) -> int:
        return len(self._raw) - self._read

    def feed(self, text: str) -> list[Delta]:
        self._raw += text
        return self._advance(lambda: self._parser.feed(text))

    def finish(self) -> list[Delta]:
        deltas = self._advance(lambda: self._parser.finalize()[1])
        if self._failed:
            rest = self._raw[self._given :]
            for end in self._ends:
                rest = rest.removesuffix(end)
            deltas += [ContentDelta(rest)] if rest else []
        return deltas

    def _advance(self, step: Callable[[], list[dict[str, Any]]]) -> list[Delta]:
        deltas: list[Delta] = []
        try:
            events = [] if self._failed else step()
        except _UNREADABLE:
            self._failed = True
            return deltas
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk":
                text = event["text"]
                self._read = max(self._read, self._raw.find(text, self._read) + len(text))
                if name != "content" and name not in _REASONING:
                    continue
                deltas.append(ContentDelta(text) if name == "content" else ReasoningDelta(text))
                self._given = self._read
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                calls = [_call(v) for v in (value if isinstance(value, list) else [value])]
                if None in calls:
                    self._failed = True
                    return deltas
                deltas += filter(None, calls)
                self._given = self._read
        return deltas


def _call(value: Any) -> ToolCall | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    return make_call(function.get("name"), function.get("arguments", {}))
