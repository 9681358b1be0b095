"""This module bounds what a connection may cost before its request is known, so that no stranger
holds up the others.

    connected ──► head ──► body ──► answered ──► head …
                   │ header_timeout_s: 408       └ before the body was there: closed
                   │ max_header_bytes: 431
                   └ the oldest of too many of this peer without a key: 503

uvicorn bounds none of that with httptools, whose parser joins the pieces of a header anew for each
piece that arrives: one without an end costs its square. A connection counts for its peer until a
request on it was authorised (`access.py`).

An LLM call is a `DirectCall`, whose coroutine writes the answer to the connection itself; every
other request passes ASGI's messages, as uvicorn makes them.

Owns: one connection, from its bytes to requests, and the bytes of an answer. Does not own: bodies
that are read, and keys (`access.py`); the listening socket (`server.py`).
"""

from __future__ import annotations

import asyncio
import http
import logging
import math
from collections.abc import Coroutine, Mapping, Sized
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Protocol

import httptools
import orjson
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from stepwell.backends.engines.connections import LateWrites
from stepwell.gateway.access import Named, Principal, routing_path, take_keys
from stepwell.gateway.bodies import BIG
from stepwell.gateway.config import GatewayConfig, Tuning
from stepwell.gateway.errors import (
    ClientTimeoutError,
    GatewayError,
    HeaderTooLargeError,
    TooManyConnectionsError,
)
from stepwell.gateway.web import CONNECTION, Closing, Losing, RequestHeaders, error_body

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Between a last answer and the end of its connection, so that the client can read it."""
MOST_QUEUED = 16
"""Pipelined requests of a connection behind the one that is answered, with which no more is read.
What was read at once may hold more of them."""


class ConnectionLimits:
    """Limits and counts that the connections of one server share."""

    def __init__(self, config: GatewayConfig, tuning: Tuning) -> None:
        self.max_header_bytes = tuning.max_header_bytes
        self.header_timeout_s = tuning.header_timeout_s
        has_keys = bool(config.admin_keys or config.agent_keys)
        self._most: float = tuning.max_unauthenticated_connections if has_keys else math.inf
        """Without keys nobody is a stranger, and a thousand agents may connect at once."""
        self._strangers: dict[str, dict[HttpProtocol, None]] = {}
        """By peer, the oldest first: its connections of which no request was authorised yet."""

    def enter(self, peer: str, connection: HttpProtocol) -> None:
        """Count a new connection. Of too many the oldest is closed: a newcomer has had no time yet
        to show its key."""
        strangers = self._strangers.setdefault(peer, {})
        strangers[connection] = None
        if len(strangers) > self._most:
            next(iter(strangers)).make_room()
        elif len(strangers) == self._most:
            log.warning(
                "%s has %d connections without a key; the oldest make room for more",
                peer,
                self._most,
            )

    def leave(self, peer: str, connection: HttpProtocol) -> None:
        """Count it no longer: it was authorised, or is gone."""
        strangers = self._strangers[peer]
        del strangers[connection]
        if not strangers:
            del self._strangers[peer]


_FORWARDED = frozenset((b"x-forwarded-for", b"x-forwarded-proto"))
"""Headers that uvicorn's `app` reads."""
CALL = "stepwell.call"
"""Extension of a scope: its `DirectCall`."""


class CallApp(Protocol):
    """The application, as far as it answers LLM calls."""

    writes: LateWrites
    """Writes of its event loop. Answers to calls are among them: whatever else is written to a
    connection outside a task, and whatever closes it, flushes them before."""

    def find_call(self, path: str) -> Any:
        """Find the endpoint of a POST to this path; None: it is no call."""

    async def answer_call(self, call: DirectCall) -> None:
        """Answer a call, and `end` it; errors are answers, too."""


class _Target(NamedTuple):
    """The address of calls, as it was found."""

    found: Any
    """The application's `find_call` of `path`."""
    path: str
    query: bytes
    keys: list[tuple[bytes, bytes]]
    """Keys of the URL, as headers."""


class DirectCall(RequestResponseCycle):
    """An LLM call and its answer, which is written without ASGI's messages. uvicorn queues, starts
    and ends it as it does its own."""

    client: Any
    """Host and port of its client, as a proxy says if it came over one; likewise `scheme`."""
    scheme: Any
    caller: Principal
    url: Named | None
    """The trajectory that its URL names."""
    task: asyncio.Task[None]
    """The task that answers it."""
    content: bytes
    """The body, until its handler takes it."""
    is_chunked = True
    """A stream is sent in chunks; HTTP/1.0 has none, and the end of the connection ends it."""
    awaited: asyncio.Event | None = None
    """`message_event`, if somebody waits for the body."""
    common_headers = b""
    """Headers of every answer to it, as lines."""
    # uvicorn's own, as they are at first.
    access_log = disconnected = False
    more_body = True
    response_started = response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    logger = access_logger = log
    default_headers: list[tuple[bytes, bytes]] = []  # noqa: RUF012 - nobody adds to it

    def __init__(
        self,
        connection: HttpProtocol,
        target: _Target,
        headers: RequestHeaders,
        keep_alive: bool,
    ) -> None:
        self.connection, self.target, self.headers = connection, target, headers
        self.client, self.scheme = connection.client, connection.scheme
        self.transport, self.flow = connection.transport, connection.flow
        self.waiting_for_100_continue = connection.expect_100_continue
        self.keep_alive = keep_alive
        self.pieces: list[bytes] = []
        """Parts of the body that have come and were not taken yet."""
        self.n_waiting = 0
        """Their bytes."""

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """Set when more of the body has come; made when somebody waits for it, who reads first what
        is there already."""
        if self.awaited is None:
            self.awaited = asyncio.Event()
            self.awaited.set()
        return self.awaited

    async def receive(self) -> Any:
        """Receive a message like uvicorn, without copying each byte of the body twice more."""
        self.body = bytearray()
        message = await super().receive()
        if message["type"] == "http.request":
            message["body"] = self.take_pieces()
        return message

    def take_pieces(self) -> bytes:
        """The part of the body that has come and was not taken yet."""
        pieces, self.pieces, self.n_waiting = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def begin(self, app: Any) -> None:
        """Answer it in a task, which the server waits for as it shuts down."""
        connection = self.connection
        self.task = connection.loop.create_task(self.run_asgi(app))
        connection.tasks.add(self.task)

    def run_asgi(self, app: Any) -> Coroutine[Any, Any, None]:
        """Answer it. uvicorn's `app` rewrites what a proxy says of its client, and comes back to
        `answer_call`."""
        if _FORWARDED.isdisjoint(self.headers.first):
            return self.connection.app_of_calls.answer_call(self)
        scope = {
            "type": "http",
            "scheme": self.scheme,
            "client": self.client,
            "headers": self.headers.raw,
            "extensions": {CALL: self},
        }
        forwarded: Coroutine[Any, Any, None] = app(scope, self.receive, self.send)
        return forwarded

    def end(self) -> None:
        """It is answered, or nobody is left to be."""
        if not self.response_complete:
            self.transport.close()
        self.connection.tasks.discard(self.task)
        del self.connection, self.task  # which refer to this

    def answer(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        """Write the whole answer."""
        head = self._head(status, headers)
        self._write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    def respond(self, response: Response) -> None:
        """Write an answer that another layer made."""
        headers = {k: v for k, v in response.headers.items() if k != "content-length"}
        self.answer(bytes(response.body), headers, response.status_code)

    def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Begin an answer of pieces, as `HttpProtocol.write_piece` writes them: the head goes out
        with the first one."""
        self.response_started = True
        self.connection.is_chunked = self.is_chunked
        coding = b"transfer-encoding: chunked\r\n" if self.is_chunked else b""
        self.connection.head = b"%b%b\r\n" % (self._head(200, headers), coding)

    def end_stream(self, piece: bytes) -> None:
        """Write the last piece, and the end."""
        head, self.connection.head = self.connection.head, b""
        if self.is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
            self._write(b"%b%b0\r\n\r\n" % (head, chunk))
        else:
            self._write(head + piece)

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        lines = _lines(tuple(headers.items()))
        return b"%b%b%b%b" % (STATUS_LINE[status], lines, self.common_headers, closing)

    def _write(self, data: bytes) -> None:
        """Write the end of the answer."""
        if self.disconnected:
            return
        self.response_started = self.response_complete = True
        if self.keep_alive:
            self.connection.writes.add(self.transport, data)
        else:
            self.transport.write(data)
            self.transport.close()
        self.connection.on_response_complete()


@lru_cache(maxsize=4096)
def _lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Lines of headers. Those of a trajectory's answers are mostly the same."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if lines.count("\r") + lines.count("\n") != 2 * len(headers):
        raise ValueError(f"a header of the answer has a line break: {lines!r:.200}")
    return lines.encode("latin-1")


class _Flow(FlowControl):
    """uvicorn's reads on with each request, so that a client that sends them faster than they are
    answered fills the memory with them."""

    def __init__(self, transport: asyncio.Transport, queued: Sized) -> None:
        super().__init__(transport)
        self._queued = queued

    def resume_reading(self) -> None:
        if len(self._queued) < MOST_QUEUED:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with these limits, and with calls that are answered directly. It is the
    `web.Connection` of its requests: to wait for the end of one in `receive` takes a task for each
    call."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app_of_calls: CallApp = self.config.app  # type: ignore[assignment]
        self.writes = self.app_of_calls.writes
        self.is_lost = False
        self.listeners: set[Closing] = set()
        self.handed: Losing | None = None
        self.head = b""
        """Head of a stream's answer, until its first piece is written."""
        self.is_chunked = True
        """`DirectCall.is_chunked` of the stream that is being written."""
        self._limits = limits
        self._peer: str | None = None
        """None: not counted any more."""
        self._is_refused = False
        self._is_in_head = False
        self._has_moved = False
        """A part of a message ended or began in what arrived last, or a piece of a body did."""
        self._n_loose = 0
        """Bytes since that happened last: of a head, of trailers, of nothing."""
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        """Time at which the last answer was complete."""
        self._asked_for = b"", b""
        """Method and URL of the last request: agents ask at one address again and again."""
        self._target: _Target | None = None
        """The call that these are of; None: it is no call."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        peer = self.client[0] if self.client else ""
        self._peer = peer
        self._limits.enter(peer, self)
        self._wait_for_head()

    def make_room(self) -> None:
        """Close it: its peer has too many connections without a key."""
        self.writes.flush()
        self.authenticated()
        self._stop_timer()
        self._is_refused = True
        if not self._is_served:
            self.transport.write(
                _answer(
                    TooManyConnectionsError(
                        "this address has too many connections without a valid key; send one"
                    )
                )
            )
        self.transport.close()  # at once: those that linger would be too many, too

    def eof_received(self) -> None:
        self.writes.flush()  # the connection is closed behind it

    def shutdown(self) -> None:
        self.writes.flush()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self.authenticated()
        self._stop_timer()
        is_broken = exc is not None or self.transport.get_write_buffer_size() > 0
        is_broken = is_broken or self.writes.has(self.transport)
        super().connection_lost(exc)
        self.is_lost = True
        if (
            is_broken and self.handed is not None
        ):  # a client that has read all it was sent closes in order
            self.handed.lose()
        self.handed = None
        for listener in tuple(self.listeners):
            listener.close()
        if not self._is_served:  # they refer to this: without it, all wait for garbage collection
            self.cycle = self.scope = None  # type: ignore[assignment]

    @property
    def is_full(self) -> bool:
        full: bool = self.flow.write_paused
        return full

    async def drain(self) -> None:
        if self.flow.write_paused and not self.is_lost:
            await self.flow.drain()

    def write_piece(self, data: bytes) -> None:
        if not self.is_lost and data:
            head, self.head = self.head, b""
            if self.is_chunked:
                self.transport.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
            else:
                self.transport.write(head + data)

    def authenticated(self) -> None:
        if self._peer is not None:
            self._limits.leave(self._peer, self)
            self._peer = None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_moved = False
        unread: bytes | None = data
        while unread is not None:
            try:
                self.parser.feed_data(unread)
                break
            except httptools.HttpParserUpgrade as e:
                unread = self._without_upgrade(unread[e.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                break
        self._n_loose = 0 if self._has_moved else self._n_loose + len(data)
        if self._n_loose > self._limits.max_header_bytes:
            self._refuse(self._too_large())  # a head or trailers without end
        elif self._is_in_head and self._timer is None and not self._is_served:
            self._wait_for_head()

    @property
    def _is_upgrade(self) -> bool:
        """The request that is read offers another protocol."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """The request again without its offer of another protocol, which is ignored (RFC 9110,
        7.8), and the `rest`: httptools takes what follows the head for that protocol's. None: it is
        CONNECT, which was answered."""
        if not self._is_upgrade:
            return None
        version = self.parser.get_http_version().encode()
        lines = [b" ".join([self.parser.get_method(), self.url, b"HTTP/" + version])]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", rest])

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._has_moved = self._is_in_head = True
        self.handed = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        raw = self.headers
        headers = RequestHeaders(raw)
        n = len(self.url) + sum(map(len, chain.from_iterable(raw))) + 4 * len(raw)
        if b"expect" in headers.first:
            expected = [value.lower() for name, value in raw if name == b"expect"]
            self.expect_100_continue = b"100-continue" in expected
        if n > self._limits.max_header_bytes:
            refused = self._too_large()
            self._refuse(refused)
            raise refused  # the parser is to read no further
        if self.parser.should_upgrade() and self._is_upgrade:
            return
        self._has_moved, self._is_in_head = True, False
        if self._timer is not None:
            self._stop_timer()
        asked_for = self.parser.get_method(), self.url
        if asked_for != self._asked_for:
            self._asked_for, self._target = asked_for, self._find(*asked_for)
        target = self._target
        if target is None:
            asked = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()  # makes the scope
            self.url, self.headers, self.expect_100_continue = asked
            extensions: dict[str, Any] = {CONNECTION: self}
            self.scope |= {"headers": self.headers, "extensions": extensions}
            super().on_headers_complete()
        else:
            self._take_call(target, headers)
        self.headers = []  # those of the scope are complete: trailers are none of them

    def _find(self, method: bytes, url: bytes) -> _Target | None:
        """The call that a request asks for; None: it is no call."""
        parts = httptools.parse_url(url)
        path = routing_path(parts.path)
        found = self.app_of_calls.find_call(path) if method == b"POST" else None
        if found is None:
            return None
        keys, query = take_keys(path, parts.query or b"")
        return _Target(found, path, query, keys)

    def _take_call(self, target: _Target, headers: RequestHeaders) -> None:
        """Start a call, or queue it behind the request that is being answered."""
        if target.keys:
            headers = RequestHeaders([*headers.raw, *target.keys])
        is_old = self.parser.get_http_version() == "1.0"
        keep_alive = not is_old and self.parser.should_keep_alive()
        before = self.cycle
        self.cycle = call = DirectCall(self, target, headers, keep_alive)
        if is_old:
            call.is_chunked = False
        if before is None or before.response_complete:
            call.begin(self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((call, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if type(cycle) is DirectCall:
            cycle.begin(app)
        else:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        call = self.cycle
        if type(call) is not DirectCall:
            super().on_body(body)
        elif not call.response_complete:
            call.pieces.append(body)
            call.n_waiting += len(body)
            if call.n_waiting > BIG:  # what is read at once comes without a pause
                self.flow.pause_reading()
            if call.awaited is not None:
                call.awaited.set()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._is_upgrade:
            return
        self._has_moved = True
        call = self.cycle
        if type(call) is not DirectCall:
            super().on_message_complete()
        elif not call.response_complete:
            call.more_body = False
            if call.awaited is not None:
                call.awaited.set()
        if self.flow.read_paused and not self.pipeline:
            # A long body paused it, and a client that leaves is to be noticed.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            if self.flow.read_paused:
                self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._idle_since = self.loop.time()
                if self.timeout_keep_alive_task is None:
                    self._close_idle_in(self.timeout_keep_alive)
        if self.cycle.response_complete and self.cycle.more_body:
            self._end()

    def _close_idle_in(self, seconds: float) -> None:
        # It runs on while requests come: one for each of them would cost as much as its head.
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._is_served or self._timer is not None:
            return  # the end of the next answer sets it again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._close_idle_in(left)
        else:
            self.writes.flush()
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            self.writes.flush()
            super().send_400_response(msg)

    @property
    def is_complete(self) -> bool:
        """The request that is served has arrived whole."""
        return not self.cycle.more_body

    @property
    def _is_served(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if not self._is_in_head:
            self.transport.close()  # nothing was asked
            return
        self._refuse(
            ClientTimeoutError(
                "the request's headers did not arrive within "
                f"{self._limits.header_timeout_s:g} s; send them at once"
            )
        )

    def _too_large(self) -> HeaderTooLargeError:
        return HeaderTooLargeError(
            f"the request's headers exceed {self._limits.max_header_bytes} bytes; send fewer",
            None,
        )

    def _refuse(self, e: GatewayError) -> None:
        self.writes.flush()
        if self._is_served:  # an answer to what came before is on its way
            self.transport.close()
        else:
            self.transport.write(_answer(e))
            self._end()

    def _end(self) -> None:
        """Close it, once the client had time to read the last answer."""
        self.writes.flush()
        self._is_refused = True
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)


def _answer(e: GatewayError) -> bytes:
    body = orjson.dumps(error_body(e, None))
    headers = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **e.headers(),
    }
    lines = [
        f"HTTP/1.1 {e.status} {http.HTTPStatus(e.status).phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
