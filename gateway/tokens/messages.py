"""This module says when two messages are the same, so that what agents change as they send a reply
back begins no new branch.

Dialects translate their wire format to these messages; chat templates are fed with them; the turn
graph compares them. A message is a plain dict as chat templates expect it::

    {"role": "system" | "user" | "tool", "content": str, "tool_call_id"?: str, "name"?: str}
    {"role": "assistant", "content": str, "reasoning_content"?: str, "tool_calls"?: [
        {"id": str, "type": "function", "function": {"name": str, "arguments": dict | str}}]}

Canonical form (what agents change when they send a reply back, and what must not matter): arguments
compare as parsed values, assistant text without surrounding white space and without its reasoning,
and null, "", "\\n", a missing field and an empty list of parts are one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from stepwell.gateway.config import NormalizeRule

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]
Key: TypeAlias = bytes

_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


def parse_arguments(arguments: Any) -> Any:
    """Tool-call arguments as a value: a JSON object's text becomes a dict, all else stays."""
    if not isinstance(arguments, str) or holds_much(arguments):
        return arguments
    try:
        value = strict_json(arguments)
        if "\\ud" in arguments.lower():
            # Escaped half surrogates parse, but no tokenizer takes them.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


MAX_VALUES = 100_000
"""Values of arguments that are read; others stay text."""


def holds_much(text: str) -> bool:
    """Whether arguments may have more than `MAX_VALUES` values, and so stay text."""
    return len(text) > MAX_VALUES and text.count(",") + text.count("[") > MAX_VALUES


def strict_json(text: str) -> Any:
    """
    Raises:
        ValueError, RecursionError: it is no JSON, or has one of Python's NaN and Infinity.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def dumps(value: Any) -> bytes:
    """JSON of a value, keys in order."""
    try:
        return orjson.dumps(value, option=_SORTED)
    except TypeError:
        # Integers beyond 64 bits, which a sampled tool call may well hold.
        return json.dumps(value, sort_keys=True).encode()


def visible_text(content: str) -> str:
    """Assistant text as compared: reasoning and surrounding white space removed."""
    if "</think>" in content:
        content = content.rpartition("</think>")[2]
    return content.strip()


def canonical(message: Mapping[str, Any]) -> bytes:
    """Bytes that are equal for messages that mean the same."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return dumps([message["role"], content, message.get("tool_call_id"), message.get("name")])
    calls = [
        [c.get("id"), c["function"]["name"], parse_arguments(c["function"]["arguments"])]
        for c in message.get("tool_calls") or ()
    ]
    return dumps(["assistant", visible_text(content), calls])


def root_key(tools: Sequence[Tool] | None, template_args: Mapping[str, Any]) -> Key:
    """Key of the empty conversation: what shapes the prompt besides the messages."""
    return hashlib.blake2b(dumps([tools or None, template_args]), digest_size=16).digest()


def exact_key(
    messages: Sequence[Message], tools: Sequence[Tool] | None, template_args: Mapping[str, Any]
) -> Key:
    """Key of what a chat template is given: reasoning, white space and the order of fields count,
    because a template may show them all."""
    given = [messages, tools or None, template_args]
    try:
        text = orjson.dumps(given, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # as in `dumps`
        text = json.dumps(given).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def extend_key(key: Key, message: Mapping[str, Any]) -> Key:
    """Key of a conversation with one more message: a hash chain, so a turn costs what it adds."""
    return hashlib.blake2b(key + canonical(message), digest_size=16).digest()


def text_key(text: str | bytes) -> Key:
    """Key of a conversation that is plain text, or ids as bytes."""
    if isinstance(text, bytes):
        return hashlib.blake2b(text, digest_size=16, person=b"ids").digest()
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def text_prefix_keys(text: str | bytes, lengths: Iterable[int]) -> Iterator[tuple[int, Key]]:
    """`text_key` of the beginnings of `text` that have these lengths, in one pass from the shortest
    to the longest; longer ones than `text` are left out."""
    is_ids = isinstance(text, bytes)
    digest = hashlib.blake2b(digest_size=16, person=b"ids" if is_ids else b"")
    at = 0
    for length in sorted(lengths):
        if length > len(text):
            return
        part = text[at:length]
        digest.update(part if isinstance(part, bytes) else part.encode(errors="surrogatepass"))
        at = length
        yield length, digest.digest()


def in_call_order(messages: list[Message]) -> list[Message]:
    """Messages with runs of tool outputs in the order of the calls before them: templates tell
    outputs apart by their place only."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or len(message.get("tool_calls") or ()) < 2:
            continue
        start = end = at + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        order = {call["id"]: i for i, call in enumerate(message["tool_calls"])}
        messages[start:end] = sorted(
            messages[start:end], key=lambda m: order.get(m["tool_call_id"], len(order))
        )
    return messages


class AssistantTurn:
    """An assistant message that comes in pieces. Its texts are joined once, at the end: to append
    20,000 pieces of 30 MB one by one takes half a minute."""

    __slots__ = ("_pieces", "message")

    def __init__(self) -> None:
        self.message: Message = {"role": "assistant", "content": ""}
        """Complete after `end`."""
        self._pieces: dict[str, list[str]] | None = None
        """Texts of several pieces; a single one, as most turns have, is in the message."""

    def add(self, name: str, text: str) -> None:
        """A piece of `content` or `reasoning_content`."""
        if not text:
            return
        if not (first := self.message.get(name)):
            self.message[name] = text
            return
        if self._pieces is None:
            self._pieces = {}
        self._pieces.setdefault(name, [first]).append(text)

    def add_call(self, call: dict[str, Any]) -> None:
        self.message.setdefault("tool_calls", []).append(call)

    def end(self) -> None:
        """Put the texts into the message; nothing is added afterwards."""
        if self._pieces is not None:
            self.message.update((name, "".join(its)) for name, its in self._pieces.items())


class Normalizer:
    """Takes out of messages what changes from call to call and means nothing (a clock in the
    system prompt, a billing header), before they are compared and rendered: without it every call
    would be a branch. The model sees the normalised text."""

    def __init__(self, rules: Sequence[NormalizeRule]) -> None:
        self.rules = [(r.role, re.compile(r.pattern), r.replacement) for r in rules]

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        return [self._normalised(m) for m in messages]

    def _normalised(self, message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        text = content
        for role, pattern, replacement in self.rules:
            if role == message["role"]:
                text = pattern.sub(replacement, text)
        return message if text == content else {**message, "content": text}
