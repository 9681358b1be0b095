"""This module sends HTTP/1.1 requests over connections that it keeps, so that a call to an engine
costs one write and one wake-up, however many calls are under way and however long their prompts.

    request ──► an idle connection, the one used last, or a new one ──► Response
                    ▲                                       └─ on_data ─► pieces of the body as
                    └──────────── the answer is complete ◄──────────────  they come, in no task

A bare protocol with llhttp's parser, without what no engine needs: redirects, cookies, compression,
proxies. With aiohttp in its place the gateway does 6 % fewer requests at 64 connections
(docs/design/engines.md). Short requests of one turn of the event loop go out at its end, with the
gateway's answers (`LateWrites`). It does not own retries, the time an answer may take, or what is
asked (`client.py`).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import httptools
import orjson

from stepwell.datapool.types import TokenIds

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 4.0
"""SGLang closes a connection that is idle for 5 s; the last to leave would race with it."""
REST_S = 1.0
"""Seconds that the end of an answer may take if nobody reads it."""

LARGE_BODY = 32_768
"""Bytes of a request whose parts are not joined."""

MAX_IDS_BYTES = 64 * 1024 * 1024
"""Bytes kept of the JSON of ids: 10 million ids, or 150 conversations of 60,000."""
PART_BYTES = 16_384
"""Bytes from which on a part of a prompt's JSON is not joined with what follows it."""

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
"""Headers that say where a body ends."""

OnData: TypeAlias = Callable[[bytes], bool]
"""Takes a piece of a body. True: the rest is of no interest. What it raises ends the request and
comes out of it."""


Response: TypeAlias = tuple[int, bytes]
"""Status and body; the body is empty if it went to `on_data`."""


class _Place(NamedTuple):
    host: str
    port: int
    has_tls: bool


class LateWrites:
    """Writes of one event loop, which go out together at the end of its turn. Each wakes a reader,
    which takes the core where cores are few: with two writes in the middle of each call, a
    gateway finds its caches cold again and again, which costs it a tenth of its CPU time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, bytes]] = []

    def add(self, transport: Any, data: bytes) -> None:
        """Write `data` when the turn ends, before any task that begins from now on."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append((transport, data))

    def flush(self) -> None:
        """Write all of it now. What lost connections were to carry is dropped."""
        waiting, self._waiting = self._waiting, []
        for transport, data in waiting:
            if not transport.is_closing():
                transport.write(data)

    def has(self, transport: Any) -> bool:
        """True if something is still to be written to it."""
        return any(each is transport for each, _ in self._waiting)


class ConnectionPool:
    """Connections of one event loop to any number of engines. `close` ends those that are idle."""

    def __init__(self, turn: Callable[[], Awaitable[None] | None] | None = None) -> None:
        """
        Args:
            turn: what it returns is waited for before a whole answer is handed on, so that many
                that come at once are not read in one turn of the event loop.
        """
        self._idle: defaultdict[_Place, list[_Connection]] = defaultdict(list)
        self._turn = turn
        self.writes = LateWrites()
        self.ids_json = IdsJson()
        """JSON of ids that come again, whichever engine they are sent to."""

    async def request(
        self,
        method: str,
        url: str,
        body: Sequence[bytes] = (),
        headers: bytes = b"",
        on_data: OnData | None = None,
    ) -> Response:
        """The answer to a request with a JSON body. If this is cancelled, or `on_data` raises, the
        connection is closed.

        Args:
            body: in parts, which are sent one behind another.
            headers: further ones as they are sent, each with its line end.
            on_data: gets the body of a 200 as it comes.

        Raises:
            ConnectionError: there is no connection, or it breaks while the answer is read;
                ConnectionRefusedError: nobody listens there.
        """
        place, head = _head(method, url)
        idle, now = self._idle[place], time.monotonic()
        while idle:
            connection = idle.pop()
            if not connection.is_closed and now - connection.idle_since < IDLE_S:
                break
            connection.close()
        else:
            connection = await _connect(place, idle, self.writes)
        n_bytes = sum(map(len, body))
        parts = [b"%b%bcontent-length: %d\r\n\r\n" % (head, headers, n_bytes), *body]
        if n_bytes < LARGE_BODY:
            parts = [b"".join(parts)]
        answered = connection.send(parts, on_data)
        del body, parts  # sent; the answer may take minutes
        try:
            response = await answered
        except BaseException:  # the rest would be read as the next answer
            connection.close()
            raise
        if self._turn is not None and on_data is None and (turn := self._turn()) is not None:
            await turn
        return response

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
            connections.clear()


class _Connection(asyncio.Protocol):
    """A connection, and the answer that it is about to give."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, idle: list[_Connection], writes: LateWrites
    ) -> None:
        """`idle`: where it goes when an answer is complete."""
        self.is_closed = False
        self._loop = loop
        self._idle, self._writes = idle, writes
        self._transport: Any = None
        self._body: list[bytes] = []
        self.on_body = self._body.append
        """Called by the parser, for each chunk."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[Response] | None = None
        self._on_data: OnData | None = None
        self._status = 0
        self._is_complete = True
        self._ends_with_connection = True
        self.idle_since = 0.0

    def send(self, parts: list[bytes], on_data: OnData | None) -> asyncio.Future[Response]:
        """The answer to a request, when it is complete or `on_data` has all that it needs."""
        self._on_data = on_data
        self._status, self._is_complete, self._ends_with_connection = 0, False, True
        self._answered = answered = self._loop.create_future()
        if len(parts) == 1:
            self._writes.add(self._transport, parts[0])
        else:  # uvloop sends them without a copy
            self._transport.writelines(parts)
        return answered

    def close(self) -> None:
        self.is_closed = True
        self._transport.close()

    # -- called by the event loop and the parser -------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(ConnectionError(f"the answer is no HTTP ({e})"))
            return
        if self._on_data is not None and self._body and not self._is_complete:
            self._pass_on()

    def eof_received(self) -> None:
        if self._status and not self._is_complete and self._ends_with_connection:
            self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError(str(exc or "the connection was closed")))
        # The parser refers to this: without it, both wait for the garbage collector.
        self._parser = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _LENGTHS:
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if self._is_complete:
            self.close()  # it answers what nobody asked
            return
        self._is_complete = True
        if self._on_data is not None and self._body:
            self._pass_on()
        if self._parser.should_keep_alive() and not self.is_closed:
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self.close()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result((self._status, body))

    def _pass_on(self) -> None:
        """Hand on what came of a body."""
        if self._on_data is None or self._status != 200:
            return
        body = b"".join(self._body)
        self._body.clear()
        try:
            has_all = self._on_data(body)
        except Exception as e:  # noqa: BLE001 - raised in the request
            self._fail(e)
            return
        if has_all:
            self._on_data = _ignore
            if self._answered is not None and not self._answered.done():
                self._answered.set_result((200, b""))
            if not self._is_complete:
                self._loop.call_later(REST_S, self._close_unless_complete)

    def _close_unless_complete(self) -> None:
        if self._on_data is _ignore and not self._is_complete:
            self.close()

    def _fail(self, why: Exception) -> None:
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(why)


def _ignore(data: bytes) -> bool:
    """Discard a piece of a body whose rest is of no interest."""
    return False


async def _connect(place: _Place, idle: list[_Connection], writes: LateWrites) -> _Connection:
    loop = asyncio.get_running_loop()
    name, tls = place.host if place.has_tls else None, place.has_tls or None
    at, refused = f"{place.host}:{place.port}", True
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            for *_, address in found:
                try:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(loop, idle, writes),
                        *address[:2],
                        ssl=tls,
                        server_hostname=name,
                    )
                except OSError as e:
                    why = e
                    refused = refused and isinstance(e, ConnectionRefusedError)
                else:
                    return connection
    except TimeoutError as e:
        raise ConnectionError(f"no connection to {at} within {CONNECT_TIMEOUT_S:g} s") from e
    except OSError as e:  # a name that does not resolve
        raise ConnectionError(f"cannot connect to {at}: {e}") from e
    kind = ConnectionRefusedError if refused else ConnectionError
    raise kind(f"cannot connect to {at}: {why}") from why


@lru_cache(maxsize=256)
def _head(method: str, url: str) -> tuple[_Place, bytes]:
    """Server that a request to `url` goes to, and the first lines of that request."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    return _Place(parts.hostname or "", port, tls), head.encode()


class IdsJson:
    """JSON of token ids, so that those of a long conversation are written once::

        prompt   [first prompt | reply | new | reply | new]      arrays of the turns, and the new
        JSON     [ of the request before     | reply | new]

    Kept is the text of each prompt, under the array that ends it: no other prompt ends with that. A
    prompt that goes on takes the place of the one before; a first prompt begins many conversations
    and stays. Those not used for longest go first."""

    def __init__(self, max_bytes: int = MAX_IDS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._texts: OrderedDict[int, tuple[TokenIds, list[bytes], int]] = OrderedDict()
        """The array that ends a prompt, the JSON without brackets, in parts, and its bytes; by the
        array's id, which is its own as long as it is here."""

    def parts(self, pieces: Sequence[TokenIds]) -> list[bytes]:
        """Parts of one JSON list of all these ids."""
        n, known = len(pieces), None
        while n and (known := self._texts.get(id(pieces[n - 1]))) is None:
            n -= 1
        if known is not None and n == len(pieces):
            self._texts.move_to_end(id(pieces[-1]))
            return [b"[", *known[1], b"]"]
        parts = [] if known is None else [*known[1]]
        for ids in pieces[n:]:
            if not len(ids):
                continue
            text = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            if not parts:
                parts.append(text)
            elif len(parts[-1]) < PART_BYTES:
                parts[-1] = b"%b,%b" % (parts[-1], text)
            else:
                parts.append(b"," + text)
        if n > 1:
            self._drop(id(pieces[n - 1]))
        if pieces and len(pieces[-1]):
            self._keep(pieces[-1], parts)
        return [b"[", *parts, b"]"]

    def clear(self) -> None:
        self._texts.clear()
        self._n_bytes = 0

    def _keep(self, ids: TokenIds, parts: list[bytes]) -> None:
        n_bytes = sum(map(len, parts))
        self._texts[id(ids)] = ids, parts, n_bytes
        self._n_bytes += n_bytes
        while self._n_bytes > self._max_bytes and self._texts:
            self._drop(next(iter(self._texts)))

    def _drop(self, key: int) -> None:
        self._n_bytes -= self._texts.pop(key)[2]
