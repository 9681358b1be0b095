"""This module reads the bodies of a dialect's calls so that what an earlier request had, byte for
byte, is not read again: the beginning of a conversation, and tools.

    body   {"messages":[ … 60,000 tokens … ,{reply},{new message}],"tools":[ … ],"max_tokens":64}
           └── as before: one digest ───┘ └─ read ─────────────┘└ as before: a frame's end ────┘
    call   KnownMessages(prefix, [system], [reply, new message]), Tools

Each request leaves marks where an assistant's turn may follow (`dialects.base.Cut`): a digest of
its bytes up to there, and the conversation's keys. A body that begins with the bytes of a mark goes
through its dialect without them. What surrounds the list is the request's frame. If it is that of
the request which left the mark, its fields are known as well, and the new items are all that is
parsed; else so are the fields, but for tools that some other request had. If anything stands in the
way, all of a body goes through its dialect, so what is wrong is always told of the whole.

Marks hold no text, and serve only the trajectory, or the caller, whose request left them. Their
digests are XXH3 with a secret seed, so nobody can make two texts that have the same one. What is
stored and what tells callers apart is cryptographic (the body's digest is SHA-256, whose state a
mark holds, so that of a long body, too, it costs what is new).

Owns: marks, the memory of frames and of tools, a body's digest. Does not own: fields
(`dialects/`), which turn is extended (`tokens/graph.py`).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from cachetools import LRUCache
from xxhash import xxh3_128

from stepwell.gateway.access import Named, Principal
from stepwell.gateway.bodies import Signs, signs_in
from stepwell.gateway.dialects.base import KEPT_CUTS, Cut, Dialect, Known, Parsed
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.pictures import RequestPictures
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import KnownMessages, Message, Prefix
from stepwell.gateway.web import body_hash, parse_object

LEAST_BYTES = 8192
"""Shorter bodies without tools are read as fast as they are compared."""
MAX_PLACES, MAX_MARKS = 4096, 32
"""Trajectories (or callers and beginnings of a body), and marks of each: half a kilobyte a mark."""
BEGINNING_BYTES = 1024
MAX_TRIES = 2
"""Marks that are tried, the longest first, before the whole body is read."""
MAX_TOOL_BYTES = 4 * 1024 * 1024
"""Texts of known tools; what is made of them takes some five times as much."""
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Ends of known frames, each with `FRAME_BYTES` for the fields."""
FRAME_BYTES = 2048
_SEED = secrets.randbits(64)
_NEW = f"new-{secrets.token_hex(8)}"
"""Name of the list in a body without its known items. Nobody can guess it, so a body with a second
list under the dialect's own name shows."""
_BLANK = b" \t\r\n"


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a body, up to a cut."""

    n_bytes: int
    digest: bytes
    name_at: int
    """Byte at which the name of the list begins."""
    list_at: int
    """Byte at which the first item begins."""
    kept_to: int
    """Byte at which the first item ends, if it is a system message, which is always read; else at
    which it begins."""
    cut: Cut
    n_begin: int
    """Messages that are always read: a system message, or none."""
    prefix: Prefix
    tools: bytes
    """Digest of the tools that came with it."""
    frame: bytes
    """Digest of its frame."""
    signs: Signs
    """Counts of its bytes up to there."""
    body: Any
    """State of the body's digest there (`body_hash`)."""


class _KnownTools(NamedTuple):
    text: bytes
    read: Any
    """`Parsed.tools`."""


class _Frame(NamedTuple):
    """A body without the items of its list."""

    end: bytes
    """Bytes behind the last item."""
    signs: Signs
    """Counts of `end`."""
    fields: dict[str, Any]
    """All but the list and the tools, as they were sent."""
    params: Any
    """`Known.params`, without both."""
    tools: Any
    """`Parsed.tools`."""


class _Spans(NamedTuple):
    items: list[msgspec.Raw]
    tools: msgspec.Raw | msgspec.UnsetType


class _Read(NamedTuple):
    """A text as it was parsed, and where its parts are."""

    parsed: Parsed
    cuts: tuple[Cut, ...]
    spans: _Spans
    tools: bytes
    """Digest of its tools."""
    fields: dict[str, Any]
    """Fields as they were sent, the list among them."""
    params: Any
    """`Known.params`."""


@dataclass(slots=True)
class _Text:
    """A body, or what is left of it without the items before a mark."""

    text: bytes
    mark: _Mark | None
    state: Any
    """State of the marks' digest at the mark."""
    missing: int = 0
    """Bytes of the body that are missing before the new items."""
    frame: _Frame | None = None
    """Frame of the body; `text` is the list alone then."""

    @property
    def n_kept(self) -> int:
        """Items before the mark that are left."""
        return 0 if self.mark is None else int(self.mark.kept_to > self.mark.list_at)

    @property
    def start(self) -> Cut:
        return Cut() if self.mark is None else self.mark.cut


def is_worth_comparing(body: bytes) -> bool:
    """True if a body may take longer to read than to be compared with earlier ones."""
    return len(body) >= LEAST_BYTES or body.rfind(b'"tools"') >= 0  # twice as fast as `in`


class KnownBodies:
    """Marks and tools of earlier bodies. Owned by the app's lifespan."""

    def __init__(self) -> None:
        self._marks: LRUCache[Hashable, list[_Mark]] = LRUCache(MAX_PLACES)
        """By the trajectory of a URL, or by caller and beginning; the newest ones at the end."""
        self._tools: LRUCache[Hashable, _KnownTools] = LRUCache(
            MAX_TOOL_BYTES, lambda known: len(known.text)
        )
        """By dialect and digest."""
        self._frames: LRUCache[Hashable, _Frame] = LRUCache(
            MAX_FRAME_BYTES, lambda frame: FRAME_BYTES + len(frame.end)
        )
        """By dialect and digest."""
        self.n_known = 0
        """Requests whose beginning was known."""
        self.n_framed = 0
        """Requests whose frame was known as well."""

    def forget(self) -> None:
        """Let go of all text."""
        self._tools.clear()
        self._frames.clear()

    def read(
        self,
        dialect: Dialect,
        body: bytes,
        path: str,
        reader: Principal,
        url: Named | None,
        pictures: RequestPictures | None = None,
    ) -> Parsed | None:
        """Parse a body of `LEAST_BYTES` or more whose beginning is known; None: it is none.

        Args:
            path: of the request, which says how much its body may hold (`bodies.py`).
            url: the trajectory that the request's URL names.
            pictures: those that were taken out of the body.
        """
        passed = _passed(self._marks.get(_place(dialect, body, reader, url), ()), body)
        for mark, state in passed[: -1 - MAX_TRIES : -1]:
            text = self._behind(dialect, body, mark, state, path)
            if text is not None and (read := self._read(dialect, body, text, reader, pictures)):
                self.n_known += 1
                self.n_framed += text.frame is not None
                older = [each for each, _ in passed if each is not mark]
                return self._reading(dialect, body, text, read, reader, url, older)
        return None

    def read_new(
        self,
        dialect: Dialect,
        body: bytes,
        path: str,
        reader: Principal,
        url: Named | None,
        pictures: RequestPictures | None = None,
    ) -> Parsed | None:
        """Parse a body whose beginning is not known and which holds no more than one may; None: the
        dialect is to read all of it, and to say what is wrong with it. Arguments as of `read`."""
        text = _Text(body, None, xxh3_128(seed=_SEED))
        if (read := self._read(dialect, body, text, reader, pictures)) is None:
            return None
        return self._reading(dialect, body, text, read, reader, url, ())

    def _behind(
        self, dialect: Dialect, body: bytes, mark: _Mark, state: Any, path: str
    ) -> _Text | None:
        """The rest of a body that begins with the bytes of a mark; None: nothing follows them, or
        the whole may hold too much."""
        frame = self._frames.get((dialect.name, mark.frame))
        if frame is not None and not body.endswith(frame.end):
            frame = None
        end = len(body) - (0 if frame is None else len(frame.end))
        rest = body[mark.n_bytes : end]
        signs = mark.signs if frame is None else mark.signs + frame.signs
        n = len(rest)  # more signs than bytes it has not
        if not (signs + Signs(n, n, n)).fit(path) and not (signs + signs_in(rest)).fit(path):
            return None
        rest = rest.lstrip(_BLANK)
        if not rest.startswith(b","):
            return None
        kept = body[mark.list_at : mark.kept_to]
        kept += b"," * bool(kept)
        if frame is None:
            begin = b'%b"%b":[%b' % (body[: mark.name_at], _NEW.encode(), kept)
            text = begin + rest[1:]
        else:
            text = b"[%b%b]" % (kept, rest[1:])
        missing = end - len(text) + (frame is not None)
        return _Text(text, mark, state, missing, frame)

    def _read(
        self,
        dialect: Dialect,
        body: bytes,
        text: _Text,
        reader: Principal,
        pictures: RequestPictures | None,
    ) -> _Read | None:
        """Parse `text`, and find its parts; None: the whole body is to be read."""
        mark, frame = text.mark, text.frame
        name = dialect.list_name or ""
        cuts = deque[Cut](maxlen=KEPT_CUTS)
        known = Known(text.start, text.n_kept, cuts=cuts, pictures=pictures)
        try:
            if mark is not None and frame is not None:
                spans, tools_digest = _Spans(_items.decode(text.text), msgspec.UNSET), mark.tools
                items = parse_object(b'{"":%b}' % text.text)[""]
                said = {**frame.fields, name: items}
                known.tools, known.params = frame.tools, frame.params
            else:
                found = _spans(text.text, name if mark is None else _NEW)
                if found is None:
                    return None
                spans, rest, tools_digest = found, text.text, b""
                if spans.tools is not msgspec.UNSET:
                    sent = bytes(spans.tools)
                    tools_digest = xxh3_128(sent, seed=_SEED).digest()
                    known_tools = self._tools.get((dialect.name, tools_digest))
                    if known_tools is not None and known_tools.text == sent:
                        at, known.tools = _offset(spans.tools, rest), known_tools.read
                        rest = b"%bnull%b" % (rest[:at], rest[at + len(sent) :])
                if mark is not None and mark.tools != tools_digest:
                    return None
                said = parse_object(rest)
                if mark is not None:
                    if name in said:  # a second list, which would be the one that counts
                        return None
                    said[name] = said.pop(_NEW)
            parsed = dialect.parse(said, reader, known)
        except (GatewayError, msgspec.MsgspecError, RecursionError):
            return None
        if mark is not None:
            n_begin = parsed.n_outside + text.n_kept
            begin, new = parsed.call.messages[:n_begin], parsed.call.messages[n_begin:]
            if (
                not cuts  # read from other answers, too, which may be gone when `whole` is called
                or n_begin != mark.n_begin
                or not new
                or new[0]["role"] != "assistant"
            ):
                return None

            names = None if pictures is None else pictures.without_bytes()

            def whole() -> Sequence[Message]:
                known = Known(pictures=names)
                return dialect.parse(parse_object(body), reader, known).call.messages

            parsed.call.messages = KnownMessages(mark.prefix, begin, new, whole, len(body))
        return _Read(parsed, tuple(cuts), spans, tools_digest, said, known.params)

    def _reading(
        self,
        dialect: Dialect,
        body: bytes,
        text: _Text,
        read: _Read,
        reader: Principal,
        url: Named | None,
        older: Sequence[_Mark],
    ) -> Parsed:
        parsed, cuts, spans, tools_digest = read[:4]
        mark, state = text.mark, text.state
        ends = [*_ends(text, spans, cuts)]
        at, view = 0 if mark is None else mark.n_bytes, memoryview(body)
        whole = body_hash() if mark is None else mark.body.copy()
        signs = Signs() if mark is None else mark.signs
        digests = []
        for end, cut in ends:
            state.update(view[at:end])
            whole.update(view[at:end])
            signs += signs_in(view[at:end])
            digests.append((end, state.digest(), cut, signs, whole.copy()))
            at = end
        whole.update(view[at:])
        if mark is None:
            shape = _shape(dialect, body, spans, parsed)
        else:
            shape = mark.name_at, mark.list_at, mark.kept_to
        n_begin = parsed.n_outside + int(shape is not None and shape[2] > shape[1])

        def remember(call: ChatRequest) -> None:
            if spans.tools is not msgspec.UNSET and parsed.tools is not None:
                known = _KnownTools(bytes(spans.tools), parsed.tools)
                with suppress(ValueError):  # larger alone than all that is kept
                    self._tools[dialect.name, tools_digest] = known
            if shape is None:
                return
            frame = b"" if mark is None else mark.frame
            if text.frame is None:
                frame = self._keep_frame(dialect, body, text, read, shape[1])
            keys = call.keys
            begin = keys.after(n_begin) or (mark.prefix.begin if mark is not None else keys.root)
            new = [
                _Mark(
                    end,
                    digest,
                    *shape,
                    cut,
                    n_begin,
                    Prefix(n, begin, key),
                    tools_digest,
                    frame,
                    signs,
                    state,
                )
                for end, digest, cut, signs, state in digests
                if (key := keys.after(n := parsed.n_outside + cut.n_messages)) is not None
            ]
            gone = {each.digest for each in (*older, *new)}
            place = _place(dialect, body, reader, url)
            others = [each for each in self._marks.get(place, ()) if each.digest not in gone]
            self._marks[place] = [*others, *new][-MAX_MARKS:]

        parsed.digest, parsed.remember = whole.hexdigest(), remember
        return parsed

    def _keep_frame(
        self, dialect: Dialect, body: bytes, text: _Text, read: _Read, list_at: int
    ) -> bytes:
        """Remember the frame of a body whose list begins at this byte; its digest."""
        last = read.spans.items[-1]
        end = body[_offset(last, text.text) + len(bytes(last)) + text.missing :]
        digest: bytes = xxh3_128(body[:list_at] + end, seed=_SEED).digest()
        if read.params is not None and (dialect.name, digest) not in self._frames:
            left_out: dict[str, Any] = {dialect.list_name or "": [], "tools": None}
            fields = {k: None if k == "tools" else v for k, v in read.fields.items()}
            del fields[dialect.list_name or ""]
            params = read.params.model_copy(update=left_out)
            frame = _Frame(end, signs_in(end), fields, params, read.parsed.tools)
            with suppress(ValueError):
                self._frames[dialect.name, digest] = frame
        return digest


def _place(dialect: Dialect, body: bytes, reader: Principal, url: Named | None) -> Hashable:
    return dialect.name, url or (reader, body[:BEGINNING_BYTES])


def _passed(marks: Iterable[_Mark], body: bytes) -> list[tuple[_Mark, Any]]:
    """The marks whose bytes the body begins with, the longest at the end; each with the state of
    its digest."""
    state, view, at = xxh3_128(seed=_SEED), memoryview(body), 0
    passed = []
    for mark in sorted(marks, key=lambda mark: mark.n_bytes):
        if mark.n_bytes >= len(body):
            break
        state.update(view[at : mark.n_bytes])
        at = mark.n_bytes
        if state.digest() == mark.digest:
            passed.append((mark, state.copy()))
    return passed


def _spans(text: bytes, list_name: str) -> _Spans | None:
    """Items of the list and tools, as they stand in `text`; None: there is no such list."""
    try:
        found = _decoder(list_name).decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Spans(found.items, found.tools)


_items = msgspec.json.Decoder(list[msgspec.Raw])


@cache
def _decoder(list_name: str) -> msgspec.json.Decoder[Any]:
    fields: list[Any] = [
        ("items", list[msgspec.Raw]),
        ("tools", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET),
    ]
    kind = msgspec.defstruct("_Found", fields, rename={"items": list_name})
    return msgspec.json.Decoder(kind)


def _offset(part: msgspec.Raw, text: bytes) -> int:
    """Byte at which `part` begins in `text`; it is a view into it, no copy."""
    return _address(part) - _address(text)


def _address(buffer: Any) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _ends(text: _Text, spans: _Spans, cuts: Iterable[Cut]) -> Iterable[tuple[int, Cut]]:
    """Cuts behind the mark, each with its place in the body."""
    for cut in cuts:
        last = cut.n_items - 1
        if text.mark is not None:
            last += text.n_kept - text.mark.cut.n_items
        if last >= text.n_kept:
            item = spans.items[last]
            yield _offset(item, text.text) + len(bytes(item)) + text.missing, cut


def _shape(
    dialect: Dialect, body: bytes, spans: _Spans, parsed: Parsed
) -> tuple[int, int, int] | None:
    """`name_at`, `list_at` and `kept_to` of the body's marks; None: its list is not named plainly,
    or has no item."""
    if not spans.items:
        return None
    list_at = kept_to = _offset(spans.items[0], body)
    before = body[:list_at].rstrip(_BLANK).removesuffix(b"[").rstrip(_BLANK).removesuffix(b":")
    before, name = before.rstrip(_BLANK), f'"{dialect.list_name}"'.encode()
    if not before.endswith(name):
        return None
    if not parsed.n_outside and parsed.call.messages[0]["role"] == "system":
        kept_to += len(bytes(spans.items[0]))
    return len(before) - len(name), list_at, kept_to
