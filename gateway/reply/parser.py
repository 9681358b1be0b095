"""Response text → assistant message: visible content, reasoning, tool calls. Incremental.

A `ReplyParser` is fed the text as it arrives and returns deltas that are never taken back::

    text ──► stop strings cut ──► <think>…</think> ──► tool calls ──► ContentDelta | ReasoningDelta
                                                                      | ToolCall

Text that may still become a marker is held back until it is decided. What begins as a tool call and
cannot be read as one, or is cut off, becomes content, character for character. Replies without
streaming go through the same parser, so that both agree. Three ways to write a call are known::

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>       any number
    qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    llama3_json   {"name": "f", "parameters": {"x": 1}}   the reply begins with it; one

Does not own: ids, which of them a model writes (`reader.py`), or what a dialect makes of it.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from stepwell.gateway.tokens.messages import Message, Tool

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

CallStyle: TypeAlias = Literal["hermes", "qwen3_coder", "llama3_json"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text of an object."""

    def entry(self) -> dict[str, Any]:
        """Its entry in the `tool_calls` of a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCall


@dataclass(slots=True)
class ReplyText:
    """What the deltas of a reply add up to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ContentDelta):
            self.content += delta.text
        elif isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
        else:
            self.tool_calls.append(delta)

    def message(self) -> Message:
        """The reply as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [c.entry() for c in self.tool_calls]
        return message


class ReplyParser(Protocol):
    @property
    def n_held(self) -> int:
        """Characters at the end of the text that wait for what follows them."""

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self) -> list[Delta]: ...


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for n in range(longest, 0, -1):
        if any(m.startswith(text[-n:]) for m in markers if len(m) > n):
            return n
    return 0


def parse_call(body: str, *, bare: bool = False) -> ToolCall | None:
    """The call in `{"name": …, "arguments": {…}}`, or None if it is none.

    Args:
        bare: no markup says that it is a call, so it must have arguments to be one.
    """
    try:
        call = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    arguments = call.get("arguments", call.get("parameters", None if bare else {}))
    return _as_call(call.get("name"), arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def parse_xml_call(body: str, tools: Sequence[Tool] | None) -> ToolCall | None:
    """The call in `<function=…><parameter=…>…</parameter></function>`, or None if it is none.

    Values are written without quotes; what they are, the tool's schema says.
    """
    if (function := _FUNCTION.fullmatch(body)) is None:
        return None
    name, rest = function[1].strip(), function[2]
    schema = _parameters(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while (parameter := _PARAMETER.match(rest, at)) is not None:
        key = parameter[1].strip()
        # The line breaks behind the opening and before the closing tag are markup.
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, schema.get(key))
        at = parameter.end()
    return _as_call(name, arguments) if not rest[at:].strip() else None


def _parameters(name: str, tools: Sequence[Tool] | None) -> Mapping[str, Any]:
    for tool in tools or ():
        function = tool.get("function", {})
        if function.get("name") == name and isinstance(function.get("parameters"), dict):
            properties = function["parameters"].get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """`text` as its schema wants it: a string unless it says otherwise. Templates write other
    values as JSON or as Python does (True, None)."""
    kind = schema.get("type") if isinstance(schema, dict) else "string"
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None:  # anyOf and the like
        kinds = ["string", "other"]
    if kinds == ["string"]:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return text
    return text if isinstance(value, str) and "string" in kinds else value


class _ObjectScanner:
    """Finds where the JSON object ends that a text begins with; reads every character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Behind the closing brace; None: it is not there yet. `text` has grown since."""
        while self._at < len(text):
            c = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif c == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = c == "\\"
            elif c == "{":
                self._depth += 1
            elif c == "}":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _as_call(name: Any, arguments: Any) -> ToolCall | None:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except ValueError:  # 1e999 is no JSON number, and half a surrogate pair cannot be sent on
        return None
    return ToolCall(new_call_id(), name, text)


class StopCutter:
    """Drops a stop string and all after it; it may arrive in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; the text ends before it."""

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    @property
    def n_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        if not self._stops or self.stopped:
            return "" if self.stopped else text
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


class MarkupParser:
    """`<think>` markup and tool calls, each if wanted."""

    def __init__(
        self,
        *,
        tools: bool,
        reasoning: bool,
        starts_in_reasoning: bool = False,
        style: CallStyle = "hermes",
        offered: Sequence[Tool] | None = None,
    ) -> None:
        """`offered`: the tools, for what their schemas say of arguments."""
        self._tools = tools and style != "llama3_json"
        self._visible = "bare_call" if tools and style == "llama3_json" else "content"
        self._scanner = _ObjectScanner()
        self._read_call: Callable[[str], ToolCall | None] = parse_call
        if style == "qwen3_coder":
            self._read_call = partial(parse_xml_call, tools=offered)
        elif style == "llama3_json":
            self._read_call = partial(parse_call, bare=True)
        self._reasoning = reasoning
        self._state = "reasoning" if reasoning and starts_in_reasoning else "start"
        self._buffer = ""
        self._after_call = False

    @property
    def n_held(self) -> int:
        return len(self._buffer) + (len(CALL_OPEN) if self._state == "call" else 0)

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        steps: dict[str, Callable[[list[Delta], bool], bool]] = {
            "start": self._start,
            "reasoning": self._in_reasoning,
            "after_reasoning": self._after_reasoning,
            "bare_call": self._bare_call,
            "content": self._in_content,
            "call": self._in_call,
        }
        while steps[self._state](deltas, final):
            pass
        return deltas

    def _start(self, deltas: list[Delta], final: bool) -> bool:
        """Decide whether the reply opens with a thought; leading white space may precede it."""
        if not self._reasoning:
            self._state = self._visible
            return True
        body = self._buffer.lstrip()
        if body.startswith(THINK_OPEN):
            self._buffer = body[len(THINK_OPEN) :]
            self._state = "reasoning"
            return True
        if not final and (not body or THINK_OPEN.startswith(body)):
            return False
        self._state = self._visible
        return True

    def _in_reasoning(self, deltas: list[Delta], final: bool) -> bool:
        before, close, after = self._buffer.partition(THINK_CLOSE)
        if close:
            self._put(deltas, ReasoningDelta(before))
            self._buffer, self._state = after, "after_reasoning"
            return True
        n = 0 if final else held_back(self._buffer, (THINK_CLOSE,))
        self._put(deltas, ReasoningDelta(self._buffer[: len(self._buffer) - n]))
        self._buffer = self._buffer[len(self._buffer) - n :]
        return False

    def _after_reasoning(self, deltas: list[Delta], final: bool) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer and not final:
            return False
        self._state = self._visible
        return True

    def _bare_call(self, deltas: list[Delta], final: bool) -> bool:
        """Decide whether the reply is a call without markup; a tag may precede it."""
        body = self._buffer.lstrip()
        if body.startswith(PYTHON_TAG):
            body = body.removeprefix(PYTHON_TAG).lstrip()
        elif not final and body and PYTHON_TAG.startswith(body):
            return False
        if not final and not body:
            return False
        self._state = "content"
        if not body.startswith("{"):
            return True
        end = self._scanner.end(body)
        if end is None and not final:
            self._state = "bare_call"
            return False
        if end is not None and (call := self._read_call(body[:end])) is not None:
            deltas.append(call)
            self._after_call = True
            self._buffer = body[end:]
        return True

    def _in_content(self, deltas: list[Delta], final: bool) -> bool:
        if self._tools:
            before, opened, after = self._buffer.partition(CALL_OPEN)
            if opened:
                self._content(deltas, before)
                self._buffer, self._state = after, "call"
                return True
        n = held_back(self._buffer, (CALL_OPEN,)) if self._tools and not final else 0
        text = self._buffer[: len(self._buffer) - n]
        if self._after_call and not final and not text.strip():
            return False  # white space between calls is markup, at the end it is dropped
        self._content(deltas, text)
        self._buffer = self._buffer[len(self._buffer) - n :]
        return False

    def _in_call(self, deltas: list[Delta], final: bool) -> bool:
        body, closed, after = self._buffer.partition(CALL_CLOSE)
        if not closed:
            if not final:
                return False
            self._put(deltas, ContentDelta(CALL_OPEN + body))
            self._buffer = ""
            return False
        call = self._read_call(body)
        if call is None:
            self._put(deltas, ContentDelta(CALL_OPEN + body + CALL_CLOSE))
        else:
            deltas.append(call)
            self._after_call = True
        self._buffer, self._state = after, "content"
        return True

    def _content(self, deltas: list[Delta], text: str) -> None:
        if not (self._after_call and not text.strip()):
            self._put(deltas, ContentDelta(text))

    def _put(self, deltas: list[Delta], delta: ContentDelta | ReasoningDelta) -> None:
        if delta.text:
            deltas.append(delta)
            self._after_call = False


_UNREADABLE = (ValueError, RecursionError)
"""What transformers' parser raises on a tool call that it cannot read."""


class ResponseTemplateParser:
    """The tokenizer's own `response_template`, through transformers' streaming parser.

    That parser raises on a malformed, truncated or too deeply nested call; the text from the last
    delta on is then content. A prompt that it cannot read leaves nothing open for the reply. Where
    calls are not read, their markup is content.
    """

    _REASONING = frozenset({"thinking", "reasoning", "reasoning_content"})

    def __init__(
        self,
        hf_tokenizer: Any,
        prefix: str,
        tools: Sequence[Tool] | None,
        ends: Sequence[str],
        *,
        reads_calls: bool = True,
    ) -> None:
        template = hf_tokenizer.response_template
        if not reads_calls:
            fields = {k: v for k, v in template["fields"].items() if k != "tool_calls"}
            template = {**template, "fields": fields}
        make = partial(hf_tokenizer.get_response_parser, template, tools=list(tools or ()) or None)
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
        if self._failed:
            return []
        return self._advance(lambda: self._parser.feed(text))

    def finish(self) -> list[Delta]:
        deltas = [] if self._failed else self._advance(lambda: self._parser.finalize()[1])
        if self._failed:
            rest = self._raw[self._given :]
            for end in self._ends:
                rest = rest.removesuffix(end)
            deltas += [ContentDelta(rest)] if rest else []
        return deltas

    def _advance(self, step: Callable[[], list[dict[str, Any]]]) -> list[Delta]:
        try:
            events = step()
        except _UNREADABLE:
            self._failed = True
            return []
        deltas: list[Delta] = []
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_chunk":
                at = self._raw.find(event["text"], self._read)
                self._read = max(self._read, at + len(event["text"]))
                if name == "content":
                    deltas.append(ContentDelta(event["text"]))
                elif name in self._REASONING:
                    deltas.append(ReasoningDelta(event["text"]))
                else:
                    continue
                self._given = self._read
            elif kind == "region_close" and name == "tool_calls":
                value = event["value"]
                calls = [_template_call(v) for v in (value if isinstance(value, list) else [value])]
                if None in calls:
                    self._failed = True
                    return deltas
                deltas += [c for c in calls if c is not None]
                self._given = self._read
        return deltas


def _template_call(value: Any) -> ToolCall | None:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    return _as_call(function.get("name"), function.get("arguments", {}))
