"""This module reads tool calls as models write them, so that agents get them as JSON.

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>       any number
    qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    llama3_json   {"name": "f", "parameters": {"x": 1}}   the reply begins with it; one

Pure: a text is a call or it is none. Does not own: where a call begins in a reply (`parser.py`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import urandom
from typing import Any, Literal, TypeAlias

from stepwell.gateway.tokens.messages import MOST_LEVELS, Tool, is_deep, may_nest, strict_json

CallStyle: TypeAlias = Literal["hermes", "qwen3_coder", "llama3_json"]

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


def numbered_id(n: int) -> str:
    """The id of call `n` of a conversation whose calls are numbered."""
    return f"call_{n}"


def make_call(name: Any, arguments: Any) -> ToolCall | None:
    """A call of this name with these arguments, an object or its JSON; None: they make none."""
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
    return ToolCall(f"call_{urandom(12).hex()}", name, text)


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


class ObjectScanner:
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
