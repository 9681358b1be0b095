"""This module says when two messages are the same, so that what agents change as they send a reply
back begins no new branch.

Dialects translate their wire format to these messages; chat templates are fed with them; the turn
graph compares them. A message is a plain dict as chat templates expect it::

    {"role": "system" | "user" | "tool", "content": Content, "tool_call_id"?: str, "name"?: str}
    {"role": "assistant", "content": str, "reasoning_content"?: str, "tool_calls"?: [
        {"id": str, "type": "function", "function": {"name": str, "arguments": dict | str}}]}

`Content` is a text; where a user or a tool shows pictures it is a list of parts, and a picture is
there by its digest, so two that look the same are the same whatever file they came in::

    [{"type": "text", "text": str},
     {"type": "image", "digest": str, "width": int, "height": int, "n_tokens": int}]

Canonical form (what agents change when they send a reply back, and what must not matter): arguments
compare as parsed values, their numbers as doubles (agents in JavaScript write 1.0 as 1), assistant
text without surrounding white space and without its reasoning, and null, "", "\\n", a missing field
and an empty list of parts are one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias, overload

import orjson

from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.types import MAX_LEVELS
from stepwell.gateway.config import TUNING, GatewayConfig, NormalizeRule, Tuning

log = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]
Key: TypeAlias = bytes

MESSAGES: Final = "messages"
"""Key of a Step's metadata."""
_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


def parse_arguments(arguments: Any) -> Any:
    """Tool-call arguments as a value: a JSON object's text becomes a dict, blank text an empty one,
    all else stays."""
    if not isinstance(arguments, str) or holds_much(arguments):
        return arguments
    try:
        value = strict_json(arguments)
        if "\\ud" in arguments.lower():
            # Escaped half surrogates parse, but no tokenizer takes them.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments if arguments.strip() else {}
    if not isinstance(value, dict) or (may_nest(arguments) and is_deep(value)):
        return arguments
    return value


MOST_LEVELS: Final = MAX_LEVELS - 10
"""Levels of an object's containers. Deeper ones can be read, but neither rendered nor written
again: a Step nests them in a few of its own."""


def may_nest(text: str, most: int = MOST_LEVELS) -> bool:
    """True if the JSON `text` has as many containers as `is_deep` asks levels for."""
    return len(text) > 2 * most and text.count("{") + text.count("[") > most


def is_deep(value: Any, most: int = MOST_LEVELS) -> bool:
    """True if objects and lists nest in `value` more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        members = (m for c in level for m in (c.values() if type(c) is dict else c))
        level = [m for m in members if type(m) in (dict, list)]
        if not level:
            return False
    return True


MAX_VALUES = 100_000
"""Values of arguments that are read; others stay text."""


def holds_much(text: str) -> bool:
    """True if arguments may have more than `MAX_VALUES` values, and so stay text."""
    return len(text) > MAX_VALUES and text.count(",") + text.count("[") > MAX_VALUES


def strict_json(text: str) -> Any:
    """
    Raises:
        ValueError, RecursionError: it is no JSON, or has one of Python's NaN and Infinity.
    """
    return _strict.decode(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_strict = json.JSONDecoder(parse_constant=_refuse)


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
        [
            c.get("id"),
            c["function"]["name"],
            _comparable(parse_arguments(c["function"]["arguments"])),
        ]
        for c in message.get("tool_calls") or ()
    ]
    return dumps(["assistant", visible_text(content), calls])


MAX_EXACT: Final = 2**53
"""Integers up to which all are doubles."""


def _comparable(value: Any) -> Any:
    """A value with each number as the double that RFC 8785 takes it for, integers as such. Null
    members are left out: clients add them, and drop them."""
    kind = type(value)
    if kind is dict:
        return {key: _comparable(each) for key, each in value.items() if each is not None}
    if kind is list:
        return [_comparable(each) for each in value]
    if kind is float and value.is_integer() and -MAX_EXACT <= value <= MAX_EXACT:
        return int(value)
    if kind is int and not -MAX_EXACT <= value <= MAX_EXACT:
        with suppress(OverflowError):  # beyond all doubles
            return float(value)
    return value


def content_of(parts: Sequence[str | Message]) -> str | list[Message]:
    """Content of texts and parts of pictures, in their order. Texts that stand together are lines
    of one; without a picture the content is that text."""
    made: list[Message] = []
    for part in parts:
        if not isinstance(part, str):
            made.append(part)
        elif made and made[-1]["type"] == "text":
            made[-1]["text"] += f"\n{part}"
        else:
            made.append({"type": "text", "text": part})
    if not made or (len(made) == 1 and made[0]["type"] == "text"):
        return "".join(part["text"] for part in made)
    return [part for part in made if part["type"] != "text" or part["text"]]


def n_chars_of(content: Any) -> int:
    """Characters of a message's content; a picture counts as its tokens."""
    if not isinstance(content, list):
        return len(content or "")
    return sum(len(p["text"]) if p["type"] == "text" else p["n_tokens"] for p in content)


def pictures_in(messages: Iterable[Message]) -> list[Message]:
    """The parts that are pictures, in the order in which a template shows them."""
    found: list[Message] = []
    for message in messages:
        if isinstance(content := message.get("content"), list):
            found += [part for part in content if part["type"] == "image"]
    return found


class ToolPart(dict[str, Any]):
    """A tool, its function, or that one's parameters. Nothing of it changes."""

    __slots__ = ("json_texts",)

    def __init__(self, part: Mapping[str, Any]) -> None:
        super().__init__(part)
        self.json_texts: dict[Any, str] = {}
        """Its JSON, by the way that templates write it."""
        for name in ("function", "parameters"):
            if isinstance(inner := part.get(name), dict):
                self[name] = ToolPart(inner)


class Tools(list[Tool]):
    """Tools that many requests bring, of which nothing changes: their JSON, which root keys and
    chat templates hold, is made once."""

    __slots__ = ("_begun", "json_texts", "n_chars")

    def __init__(self, tools: Iterable[Tool]) -> None:
        super().__init__(map(ToolPart, tools))
        self.json_texts: dict[Any, str] = {}
        """JSON of all tools, by the way that templates write it."""
        self.n_chars = 0
        """Characters of the JSON, about."""
        self._begun: hashlib.blake2b | None = None
        try:
            text = orjson.dumps(self, option=_SORTED)
        except TypeError:  # as in `dumps`
            return
        self.n_chars = len(text)
        self._begun = hashlib.blake2b(b"[" + text + b",", digest_size=16)

    @property
    def is_written(self) -> bool:
        """True once a template has made its JSON, so that it costs little to render them again."""
        if self.json_texts or not self:
            return True
        function = self[0].get("function")
        return any(isinstance(p, ToolPart) and p.json_texts for p in (self[0], function))

    def root_key(self, template_args: Mapping[str, Any]) -> Key | None:
        """`root_key` of these tools; None: it is to be made of all of them."""
        if self._begun is None or not self:
            return None
        try:
            text = orjson.dumps(template_args, option=_SORTED)
        except TypeError:
            return None
        digest = self._begun.copy()
        digest.update(text + b"]")
        return digest.digest()


NO_TOOLS = Tools(())


def root_key(tools: Sequence[Tool] | None, template_args: Mapping[str, Any]) -> Key:
    """Key of the empty conversation: what shapes the prompt besides the messages."""
    if not tools and not template_args:
        return _EMPTY_ROOT
    if isinstance(tools, Tools) and (key := tools.root_key(template_args)) is not None:
        return key
    return hashlib.blake2b(dumps([tools or None, template_args]), digest_size=16).digest()


_EMPTY_ROOT: Final[Key] = hashlib.blake2b(dumps([None, {}]), digest_size=16).digest()


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


class Prefix(NamedTuple):
    """The beginning of a conversation, by its keys: an earlier request had it."""

    n_messages: int
    begin: Key
    """Key of the first messages, which are read again: a system message, or none."""
    key: Key
    """Key of the whole prefix."""


class KnownMessages(Sequence[Message]):
    """The messages of a conversation that begins with a known prefix: what follows it, and the
    system message, are read. If any other message is asked for, the whole conversation is.

    Args:
        begin: the first messages of the prefix.
        new: what follows the prefix; an assistant's message first.
        read: makes the whole conversation.
        n_chars: of its text, about.
    """

    def __init__(
        self,
        prefix: Prefix,
        begin: Sequence[Message],
        new: Sequence[Message],
        read: Callable[[], Sequence[Message]],
        n_chars: int = 0,
    ) -> None:
        self.prefix, self.begin, self.new, self.n_chars = prefix, begin, new, n_chars
        self._read: Callable[[], Sequence[Message]] | None = read
        self._all: Sequence[Message] = ()

    def __len__(self) -> int:
        return self.prefix.n_messages + len(self.new)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | Sequence[Message]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            n = self.prefix.n_messages
            if n <= start and step == 1:
                return self.new[start - n : max(stop - n, 0)]
        return self.whole()[at]

    def __iter__(self) -> Iterator[Message]:
        return iter(self.whole())

    def whole(self) -> Sequence[Message]:
        """All messages, read now if they were not before."""
        if self._read is not None:
            self._all, self._read = self._read(), None
        return self._all

    def changed(self, change: Callable[[Sequence[Message]], Sequence[Message]]) -> KnownMessages:
        """The same conversation with `change` applied to its messages, as it was to the prefix."""
        changed = change(self.begin), change(self.new)
        return KnownMessages(self.prefix, *changed, lambda: change(self.whole()), self.n_chars)


def continued(messages: Sequence[Message], n_left_out: int, reply: Message) -> Sequence[Message]:
    """The conversation with `reply` and without its first `n_left_out` messages, which are read
    even if it begins with a known prefix."""
    if not isinstance(messages, KnownMessages):
        return (*messages[n_left_out:], reply)
    prefix = messages.prefix._replace(n_messages=messages.prefix.n_messages - n_left_out)
    return KnownMessages(
        prefix,
        messages.begin[n_left_out:],
        [*messages.new, reply],
        lambda: (*messages.whole()[n_left_out:], reply),
        messages.n_chars,
    )


def system_of(messages: Sequence[Message]) -> Sequence[Message]:
    """The system message that a conversation begins with, if it does."""
    first = messages.begin if type(messages) is KnownMessages else messages
    return first[:1] if first and first[0]["role"] == "system" else ()


class Keys:
    """Keys of the beginnings of a conversation under one root."""

    _n_before = 0
    """Messages of the known prefix."""
    has_calls = False
    """Messages that were not there before hold calls of tools, of whose arguments Python takes 1,
    1.0 and true for equal."""
    _reply: Message | None = None
    replied: Key = b""
    """Key of the conversation with its reply, once there is one."""

    def __init__(self, root: Key, messages: Sequence[Message], before: Keys | None = None) -> None:
        """`before`: those of a conversation that this one may go on from, which are not made again
        then; it has no calls."""
        self.root, self.messages = root, messages
        rest = messages
        keys = [root]
        if type(messages) is KnownMessages:  # of a class with ABCMeta isinstance runs Python
            prefix, begin = messages.prefix, root
            for message in messages.begin:
                begin = extend_key(begin, message)
            if begin == prefix.begin:
                self._n_before, rest, keys = prefix.n_messages, messages.new, [prefix.key]
        self._rest = [*rest]
        if (
            before is not None
            and before.root == root
            and not (self._n_before or before._n_before)
            and self._rest[: len(before._rest)] == before._rest
        ):
            keys = [*before._keys]
            n = len(before._rest)
            if (
                n < len(self._rest) and self._rest[n] == before._reply
            ):  # most clients send it back as it was
                keys.append(before.replied)
        key = keys[-1]
        for message in self._rest[len(keys) - 1 :]:
            key = extend_key(key, message)
            keys.append(key)
            if "tool_calls" in message:
                self.has_calls = True
        self._keys: list[Key] = keys
        self.prompt: Key = key
        """Key of the whole conversation."""

    def reply(self, message: Message) -> Key:
        """Key of the conversation with its reply, which the next one mostly goes on with."""
        self._reply, self.replied = message, extend_key(self.prompt, message)
        return self.replied

    def after(self, n: int) -> Key | None:
        """Key of the first `n` messages; None: of a known prefix's parts it is not known."""
        return self._keys[n - self._n_before] if n >= self._n_before else None

    def __iter__(self) -> Iterator[Key]:
        """One behind each message that was read."""
        return iter(self._keys[1:])

    def ends(self) -> Iterator[tuple[int, Key]]:
        """Lengths and keys of the beginnings that end with an assistant's message, the longest one
        first. Those within a known prefix come last and are read only if they are asked for."""
        n = self._n_before
        for i in range(len(self._rest) - 1, -1, -1):
            if self._rest[i]["role"] == "assistant":
                yield n + i + 1, self._keys[i + 1]
        if n:
            yield from Keys(self.root, [*self.messages[:n]]).ends()


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

    def __call__(self, messages: Sequence[Message]) -> Sequence[Message]:
        if isinstance(messages, KnownMessages):
            return messages.changed(self)
        return [self._normalised(m) for m in messages]

    def _normalised(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {**part, "text": self._text(message, part["text"])} if "text" in part else part
                for part in content
            ]
            return {**message, "content": parts}
        if not isinstance(content, str):
            return message
        text = self._text(message, content)
        return message if text == content else {**message, "content": text}

    def _text(self, message: Message, text: str) -> str:
        for role, pattern, replacement in self.rules:
            if role == message["role"]:
                text = pattern.sub(replacement, text)
        return text


class TurnMessages:
    """Keeps the messages of a turn with its Step as `gateway.keep_messages` and the keys below it
    say, so that people read trajectories as text and exports of text need no tokenizer.

        Step.metadata["messages"]   [what the agent said since the turn that this one extends …,
                                     reply]

    Along a branch, from its root on, these lists are the conversation. Training reads ids only.
    """

    def __init__(self, config: GatewayConfig, tuning: Tuning = TUNING) -> None:
        """
        Raises:
            GatewayConfigError: `gateway.redact_messages` names no function.
        """
        self._limit = tuning.max_message_bytes if config.keep_messages else 0
        self._redact = config.function("redact_messages")

    def of(self, new: Sequence[Message], reply: Message) -> list[Message] | None:
        """The turn's messages as its Step keeps them; None: it keeps none."""
        if not self._limit:
            return None
        said = [*new, reply]
        most = self._limit // (8 * len(said)) - 64  # a character is six bytes at most, as \u0000
        if self._redact is None:
            for m in said:
                if len(m) != 2 or type(m["content"]) is not str or len(m["content"]) >= most:
                    break
            else:
                return said
        try:
            text = orjson.dumps(said)
            if self._redact is not None:
                text = orjson.dumps(self._redact(orjson.loads(text)))
                said = orjson.loads(text)
        except TypeError:  # an integer beyond 64 bits or half a surrogate: no Step can carry it
            return None
        except ENDS:
            raise
        except BaseException:  # foreign code: what it did not redact is not kept
            log.exception("gateway.redact_messages failed; the turn's messages are not kept")
            return None
        return said if len(text) <= self._limit else None
