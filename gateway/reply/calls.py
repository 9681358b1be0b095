r"""This module reads tool calls as models write them, so that agents get them as JSON.

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    glm45         <tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>
    deepseekv3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```
                  <｜tool▁call▁end｜>
    deepseekv31   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}
                  <|tool_call_end|>
    minimax-m2    <invoke name="f"><parameter name="x">1</parameter></invoke>
    mistral       [TOOL_CALLS]f[ARGS]{"x": 1}  or  [TOOL_CALLS] [{"name": "f", "arguments": {…}}]
    llama3_json   {"name": "f", "parameters": {"x": 1}}   the reply begins with it; one

The calls of DeepSeek, Kimi and MiniMax stand in a section with a beginning and an end of its own.
Names are those of SGLang's `--tool-call-parser`.

Pure: a text is a call or it is none. Does not own: where a call begins in a reply (`parser.py`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import urandom
from typing import Any

from stepwell.gateway.config import CallStyle
from stepwell.gateway.tokens.messages import MOST_LEVELS, Tool, is_deep, may_nest, strict_json

_arguments = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_UNREADABLE = (ValueError, RecursionError)
"""Errors that are raised for text that is no JSON."""
_MOST_LEVELS = MOST_LEVELS - 16
"""Levels of a call's arguments: the answer that has it, and the body that sends it back, nest them
in a few of their own."""


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


def numbered_id(n: int, name: str) -> str:
    """Id of call `n` of a conversation whose calls are numbered; most chat templates take any."""
    return f"call_{n}"


def make_call(name: Any, arguments: Any, uid: str | None = None) -> ToolCall | None:
    """A call of this name with these arguments, an object or its JSON; None: they make none.

    Args:
        uid: its id, of characters that can be sent; None: a random one.
    """
    try:
        if isinstance(arguments, str):
            arguments = strict_json(arguments)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        text = _arguments.encode(arguments)
        (name + text).encode()
        if may_nest(text, _MOST_LEVELS) and is_deep(arguments, _MOST_LEVELS):
            return None
    except _UNREADABLE:  # 1e999 is no JSON number, and half a surrogate pair cannot be sent on
        return None
    return ToolCall(uid or f"call_{urandom(12).hex()}", name, text)


def next_id(uid: str) -> str:
    """An id in place of `uid`, which another call of the reply has: Kimi's with the next number."""
    head, colon, number = uid.rpartition(":")
    return f"{head}:{int(number) + 1}" if colon else _mistral_id()


def parse_call(body: str, *, bare: bool = False) -> ToolCall | None:
    """The call in `{"name": …, "arguments": {…}}`, or None if it is none.

    Args:
        bare: no markup says that it is a call, so it must have arguments to be one.
    """
    try:
        call = strict_json(body)
    except _UNREADABLE:
        return None
    if not isinstance(call, dict):
        return None
    arguments = call.get("arguments", call.get("parameters", None if bare else {}))
    return make_call(call.get("name"), arguments)


_NAME = r"[^\s<>{}\[\]\"`]{1,128}"
_CODER = (
    re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL),
    # The line breaks behind the opening and before the closing tag are markup.
    re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
)
_GLM = (
    re.compile(rf"\s*({_NAME})(.*)", re.DOTALL),
    re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
)
_MINIMAX = (
    re.compile(r'"([^">\n]+)">(.*)', re.DOTALL),
    re.compile(r'\s*<parameter name="([^">\n]+)">(.*?)</parameter>', re.DOTALL),
)


def parse_xml_call(
    body: str,
    tools: Sequence[Tool] | None,
    tags: tuple[re.Pattern[str], re.Pattern[str]] = _CODER,
) -> ToolCall | None:
    """The call in `<function=…><parameter=…>…</parameter></function>`, or None if it is none.

    Values are written without quotes; what they are, the tool's schema says.

    Args:
        tags: patterns of a call (its name, its parameters) and of a parameter (its name, its
            value).
    """
    function_tag, parameter_tag = tags
    if (function := function_tag.fullmatch(body)) is None:
        return None
    name, rest = function[1].strip(), function[2]
    schema = _parameters(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while (parameter := parameter_tag.match(rest, at)) is not None:
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2], schema.get(key))
        at = parameter.end()
    return make_call(name, arguments) if not rest[at:].strip() else None


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
    kinds = _kinds(schema) if isinstance(schema, dict) else {"string"}
    if kinds == {"string"}:
        return text
    try:
        value = strict_json(text)
    except _UNREADABLE:
        try:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
        except (*_UNREADABLE, TypeError, SyntaxError, MemoryError):
            return text
    if kinds is None:
        return text if isinstance(value, str) else value
    # A string may read as a value of another kind: text of a JSON file.
    return value if "string" not in kinds or kinds & _KINDS[type(value)] - {"string"} else text


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """JSON types that a schema allows; None: not known."""
    if isinstance(named := schema.get("type"), str | list):
        return {named} if isinstance(named, str) else {*map(str, named)}
    if isinstance(values := schema.get("enum"), list):
        return {kind for value in values for kind in _KINDS[type(value)]}
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            found = [_kinds(each) if isinstance(each, dict) else None for each in options]
            return None if None in found else {kind for each in found for kind in each or ()}
    return None


_KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset(("boolean",)),
    int: frozenset(("integer", "number")),
    float: frozenset(("number",)),
    str: frozenset(("string",)),
    type(None): frozenset(("null",)),
    list: frozenset(("array",)),
    tuple: frozenset(("array",)),
    dict: frozenset(("object",)),
}
"""JSON types of the values that JSON and Python's literals make."""


_SEPARATOR = "<｜tool▁sep｜>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


def _parse_fenced_call(body: str) -> ToolCall | None:
    """The call in `function<｜tool▁sep｜>NAME`, behind which a code block holds the arguments."""
    _, _, rest = body.partition(_SEPARATOR)
    name, _, arguments = rest.partition("```json")
    return _named(name, arguments.rstrip().removesuffix("```"))


def _parse_separated_call(body: str) -> ToolCall | None:
    name, _, arguments = body.partition(_SEPARATOR)
    return _named(name, arguments)


def _parse_numbered_call(body: str) -> ToolCall | None:
    """The call in `functions.NAME:0<|tool_call_argument_begin|>{…}`: the id that the model gave it
    is what its chat template shows."""
    uid, _, arguments = body.partition(_ARGUMENTS)
    name, _, number = uid.rpartition(":")
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", number) is None:
        return None
    return _named(name.strip().removeprefix("functions."), arguments, uid.strip())


def _named(name: str, arguments: str, uid: str | None = None) -> ToolCall | None:
    name = name.strip()
    return make_call(name, arguments, uid) if re.fullmatch(_NAME, name) else None


MISTRAL_HEAD = re.compile(
    rf"\s*(?:({_NAME})(?:\[CALL_ID\]({_NAME}))?\[ARGS\]\s*(?=\{{)|(?=[\[{{]))"
)
"""Text before the JSON of a Mistral model's calls: a name, or nothing."""
_REST_OF_HEAD = "x[CALL_ID]x[ARGS]{"


def may_begin_head(text: str) -> bool:
    """True if `text` may still become a `MISTRAL_HEAD`."""
    text = text.lstrip()[:300]  # two names and the markup
    rest = _REST_OF_HEAD
    return any(MISTRAL_HEAD.match(text + rest[at:]) for at in range(len(rest)))


_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")


def _mistral_id() -> str:
    return urandom(5).hex()[:9]


def _parse_mistral_calls(body: str) -> list[ToolCall]:
    """The calls in `NAME[ARGS]{…}` or `[{"name": …, "arguments": {…}}, …]`. Chat templates take no
    ids but those of nine letters and digits."""
    if (head := MISTRAL_HEAD.match(body)) is None:
        return []
    sent: Any = [{"name": head[1], "arguments": body[head.end() :], "id": head[2]}]
    if head[1] is None:
        try:
            sent = strict_json(body)
        except _UNREADABLE:
            return []
    calls = []
    for each in sent if isinstance(sent, list) else [sent]:
        if not isinstance(each, dict):
            return []
        uid = each.get("id")
        is_given = isinstance(uid, str) and _MISTRAL_ID.fullmatch(uid)
        uid = uid if is_given else _mistral_id()
        if (call := make_call(each.get("name"), each.get("arguments", {}), uid)) is None:
            return []
        calls.append(call)
    return calls


def _one(call: ToolCall | None) -> Sequence[ToolCall]:
    return () if call is None else (call,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Markup of a model's calls."""

    opening: str
    """Text that a call begins with; "": the reply is one."""
    closing: str
    """Text that a call ends with; "": its JSON ends it."""
    read: Callable[[str, Sequence[Tool] | None], Sequence[ToolCall]]
    """The calls in the text between, for tools with their schemas; none: it is no call."""
    section: tuple[str, str] = ("", "")
    """Texts that all calls of a reply stand between; it may lack them."""
    inner: tuple[str, ...] = ()
    """Further markup of a call that may be tokens."""
    numbered: Callable[[int, str], str] = numbered_id
    """Id that chat templates take for call n of a conversation, by n and the tool's name."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts that a call may begin with; all have the same first character."""
        return tuple(filter(None, (self.section[0], self.opening)))

    @property
    def markup(self) -> frozenset[str]:
        return frozenset((self.opening, self.closing, *self.section, *self.inner))


_TAGGED = partial(CallForm, opening="<tool_call>", closing="</tool_call>")
_DEEPSEEK = partial(
    CallForm,
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=(_SEPARATOR,),
)
CALL_FORMS: Mapping[CallStyle, CallForm] = {
    "hermes": _TAGGED(read=lambda body, _: _one(parse_call(body))),
    "qwen3_coder": _TAGGED(
        read=lambda body, tools: _one(parse_xml_call(body, tools)),
    ),
    "glm45": _TAGGED(
        read=lambda body, tools: _one(parse_xml_call(body, tools, _GLM)),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseekv3": _DEEPSEEK(read=lambda body, _: _one(_parse_fenced_call(body))),
    "deepseekv31": _DEEPSEEK(read=lambda body, _: _one(_parse_separated_call(body))),
    "kimi_k2": CallForm(
        opening="<|tool_call_begin|>",
        closing="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=(_ARGUMENTS,),
        read=lambda body, _: _one(_parse_numbered_call(body)),
        numbered=lambda n, name: f"functions.{name}:{n}",
    ),
    "minimax-m2": CallForm(
        opening="<invoke name=",
        closing="</invoke>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        read=lambda body, tools: _one(parse_xml_call(body, tools, _MINIMAX)),
    ),
    "mistral": CallForm(
        opening="[TOOL_CALLS]",
        closing="",
        inner=("[ARGS]", "[CALL_ID]"),
        read=lambda body, _: _parse_mistral_calls(body),
        numbered=lambda n, _: f"call{n:05}",
    ),
    "llama3_json": CallForm(
        opening="",
        closing="",
        inner=("<|python_tag|>",),
        read=lambda body, _: _one(parse_call(body, bare=True)),
    ),
}


class JsonScanner:
    """Finds where the JSON object or array ends that a text holds; reads every character once."""

    def __init__(self, at: int = 0) -> None:
        """`at`: where it begins."""
        self._at, self._depth = at, 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int:
        """Behind the closing bracket; -1: it is not there yet. `text` has grown since."""
        while self._at < len(text):
            c = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif c == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = c == "\\"
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        return -1
