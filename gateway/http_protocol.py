"""This module bounds what a connection may cost before its request is known, so that no stranger
holds up the others.

    connected ──► head ──► body ──► answered ──► head …
                   │ header_timeout_s: 408       └ before the body was there: closed
                   │ max_header_bytes: 431
                   └ the oldest of too many of this peer without a key: 503

uvicorn bounds none of that with httptools, whose parser joins the pieces of a header anew for each
piece that arrives: one without an end costs its square. A connection counts for its peer until a
request on it was authorised (`access.py`).

Owns: one connection, from its bytes to requests. Does not own: bodies that are read, and keys
(`access.py`); the listening socket (`server.py`).
"""

from __future__ import annotations

import asyncio
import http
import logging
import math
from collections.abc import Sequence
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stepwell.gateway.config import GatewayConfig, Tuning
from stepwell.gateway.errors import (
    ClientTimeoutError,
    GatewayError,
    HeaderTooLargeError,
    TooManyConnectionsError,
)
from stepwell.gateway.web import CONNECTION, Closing, Losing, error_body

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Between a last answer and the end of its connection, so that the client can read it."""


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


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with these limits and `_OneWrite`. It is the `web.Connection` of its requests: to
    wait for the end of one in `receive` takes a task for each call."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_lost = False
        self.listeners: set[Closing] = set()
        self.handed: Sequence[Losing] = ()
        self._limits = limits
        self._raw: Any = None
        """The transport, without `_OneWrite`."""
        self._peer: str | None = None
        """None: not counted any more."""
        self._is_refused = False
        self._is_in_head = False
        self._has_moved = False
        """A part of a message ended or began in what arrived last, or a piece of a body did."""
        self._n_loose = 0
        """Bytes since that happened last: of a head, of trailers, of nothing."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        peer = self.client[0] if self.client else ""
        self._peer = peer
        self._limits.enter(peer, self)
        self._wait_for_head()

    def make_room(self) -> None:
        """Close it: its peer has too many connections without a key."""
        self.authenticated()
        self._stop_timer()
        self._is_refused = True
        if not self._is_served:
            self._raw.write(
                _answer(
                    TooManyConnectionsError(
                        "this address has too many connections without a valid key; send one"
                    )
                )
            )
        self._raw.close()  # at once: those that linger would be too many, too

    def connection_lost(self, exc: Exception | None) -> None:
        self.authenticated()
        self._stop_timer()
        is_broken = exc is not None or self._raw.get_write_buffer_size() > 0
        super().connection_lost(exc)
        self.is_lost = True
        if is_broken:  # a client that has read all it was sent closes in order
            for reply in self.handed:
                reply.lose()
        for listener in tuple(self.listeners):
            listener.close()

    @property
    def is_full(self) -> bool:
        full: bool = self.flow.write_paused
        return full

    async def drain(self) -> None:
        if self.flow.write_paused and not self.is_lost:
            await self.flow.drain()

    def write_piece(self, data: bytes) -> None:
        if not self.is_lost and data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def authenticated(self) -> None:
        if self._peer is not None:
            self._limits.leave(self._peer, self)
            self._peer = None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_moved = False
        self._read(data)
        self._n_loose = 0 if self._has_moved else self._n_loose + len(data)
        if self._n_loose > self._limits.max_header_bytes:
            self._refuse(self._too_large())  # a head or trailers without end
        elif self._is_in_head and self._timer is None and not self._is_served:
            self._wait_for_head()

    def _read(self, data: bytes) -> None:
        """uvicorn's `data_received`, but an offer of another protocol is ignored (RFC 9110, 7.8).
        httptools takes what follows the head for that protocol's, so the request is read again
        without the offer."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                if not self._is_upgrade:
                    return  # CONNECT, which was answered
                data = self._without_upgrade() + data[e.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    @property
    def _is_upgrade(self) -> bool:
        """The request that is read offers another protocol."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _without_upgrade(self) -> bytes:
        """The head of the request that is read, without `Upgrade`."""
        version = self.parser.get_http_version().encode()
        lines = [b" ".join([self.parser.get_method(), self.url, b"HTTP/" + version])]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_moved = self._is_in_head = True
        self.handed = ()
        extensions: dict[str, Any] = {CONNECTION: self}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        n = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if n > self._limits.max_header_bytes:
            refused = self._too_large()
            self._refuse(refused)
            raise refused  # the parser is to read no further
        if self._is_upgrade:
            return
        self._has_moved, self._is_in_head = True, False
        self._stop_timer()
        super().on_headers_complete()
        self.headers = []  # those of the scope are complete: trailers are none of them

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._has_moved = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._end()

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
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
            self._raw.close()  # nothing was asked
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
        if self._is_served:  # an answer to what came before is on its way
            self._raw.close()
        else:
            self._raw.write(_answer(e))
            self._end()

    def _end(self) -> None:
        """Close it, once the client had time to read the last answer."""
        self._is_refused = True
        self._stop_timer()
        if not self._raw.is_closing():
            self._raw.pause_reading()
            self._raw.write_eof()
            self.loop.call_later(LINGER_S, self._raw.close)


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


class _OneWrite:
    """A transport that sends the head of an answer with what follows it: uvicorn writes them apart,
    and each write is a system call here and a wake-up there."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head or not data.startswith(b"HTTP/"):
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._head = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._head:
            self.write(b"")
