"""This module bounds what a connection may cost before its request is known, so that no stranger
holds up the others.

    connected ──► head ──► body ──► answered ──► head …
                   │ header_timeout_s: 408       │ what is left of the body is thrown away,
                   │ max_header_bytes: 431       │ for header_timeout_s, then closed
                   └ one of too many of this peer without a key: 503

uvicorn bounds none of that with httptools, whose parser joins the pieces of a header anew for each
piece that arrives: one without an end costs its square. A connection counts for its peer until a
request on it was authorised (`protection.py`).

Owns: one connection, from its bytes to requests. Does not own: bodies that are read, and keys
(`protection.py`); the listening socket (`server.py`).
"""

from __future__ import annotations

import asyncio
import http
import logging
import math
from collections import Counter
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import (
    GatewayError,
    HeaderTimeoutError,
    HeaderTooLargeError,
    TooManyConnectionsError,
)
from stepwell.gateway.web import CONNECTION, Connection, error_body

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Between a refusal and the end of its connection, so that the client can read it."""
_UPGRADE, _NO_UPGRADE = b"\r\nUpgrade: h2c\r\n", b"\r\nIgnored: h2c\r\n"
"""An offer to go on in HTTP/2, as Java's client makes it. A server may ignore it; httptools takes
the body that follows for HTTP/2 and drops it."""


class ConnectionLimits:
    """What the connections of one server have in common."""

    def __init__(self, config: GatewayConfig) -> None:
        self.max_header_bytes = config.max_header_bytes
        self.header_timeout_s = config.header_timeout_s
        has_keys = bool(config.admin_keys or config.agent_keys)
        self._most: float = config.max_unauthenticated_connections if has_keys else math.inf
        """Without keys nobody is a stranger, and a thousand agents may connect at once."""
        self._strangers: Counter[str] = Counter()
        """Connections by peer, of which no request was authorised yet."""

    def enter(self, peer: str) -> bool:
        """A new connection; false: its peer has too many."""
        if self._strangers[peer] >= self._most:
            return False
        self._strangers[peer] += 1
        if self._strangers[peer] == self._most:
            log.warning("%s has %d connections without a key; more are refused", peer, self._most)
        return True

    def leave(self, peer: str) -> None:
        """It was authorised, or is gone."""
        self._strangers[peer] -= 1
        if not self._strangers[peer]:
            del self._strangers[peer]


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with these limits, with `_OneWrite`, and with a `Connection` in every request's
    scope: to wait for the end of one in `receive` takes a task for each call."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._raw: Any = None
        """The transport, without `_OneWrite`."""
        self._peer: str | None = None
        """None: not counted any more."""
        self._is_refused = False
        self._n_read = 0
        """Bytes that arrived last."""
        self._has_moved = False
        """A part of a message ended or began in them, or a piece of its body was among them."""
        self._n_loose = 0
        """Bytes since that happened last: of a head, of trailers, of nothing."""
        self._is_resting = True
        """Between two messages."""
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = raw = cast("asyncio.Transport", transport)
        super().connection_made(_OneWrite(transport, self.loop))  # type: ignore[arg-type]
        self._connection = Connection(self._uncount)
        peer = self.client[0] if self.client else ""
        if not self._limits.enter(peer):
            self._is_refused = True
            raw.write(
                _answer(
                    TooManyConnectionsError(
                        "this address has too many connections without a valid key "
                        "(gateway.max_unauthenticated_connections)"
                    )
                )
            )
            raw.close()  # at once: those that linger would be too many, too
            return
        self._peer = peer
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        self._stop_timer()
        super().connection_lost(exc)
        self._connection.lost()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._is_resting:
            data = data.replace(_UPGRADE, _NO_UPGRADE, 1)
        self._n_read = len(data)
        self._has_moved = False
        super().data_received(data)
        self._check_progress()

    def _check_progress(self) -> None:
        """Is what arrived last a head or trailers without end?"""
        if self._is_refused:
            return
        self._n_loose = 0 if self._has_moved else self._n_loose + self._n_read
        if self._n_loose > self._limits.max_header_bytes:
            self._refuse_header()
            return
        is_idle = self._is_resting and self._has_moved
        if self._timer is None and not is_idle and not self._is_served:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_moved, self._is_resting, self._is_in_body = True, False, False
        self._connection.has_body = False
        extensions: dict[str, Any] = {CONNECTION: self._connection}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        if self._is_refused:  # a request behind the one that was refused
            return
        if self._n_loose + self._n_read > self._limits.max_header_bytes:
            n = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if n > self._limits.max_header_bytes:
                self._refuse_header()
                return
        self._has_moved = self._is_in_body = True
        self._stop_timer()
        super().on_headers_complete()
        self.headers = []  # those of the scope are complete: trailers are none of them

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            self._has_moved = True
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        super().on_message_complete()
        self._has_moved = self._is_resting = self._connection.has_body = True
        if self._timer is not None:  # the rest of a body that nobody read
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_served(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _uncount(self) -> None:
        if self._peer is not None:
            peer, self._peer = self._peer, None
            self._limits.leave(peer)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._is_resting or self._is_in_body:
            self._raw.close()  # nothing was asked, or it was answered
            return
        self._refuse(
            HeaderTimeoutError(
                "the request's headers did not arrive within "
                f"{self._limits.header_timeout_s:g} s (gateway.header_timeout_s)"
            )
        )

    def _refuse_header(self) -> None:
        self._refuse(
            HeaderTooLargeError(
                f"the request's headers exceed {self._limits.max_header_bytes} bytes "
                "(gateway.max_header_bytes)",
                None,
            )
        )

    def _refuse(self, e: GatewayError) -> None:
        self._is_refused = True
        self._stop_timer()
        self._raw.pause_reading()
        if self._is_served:  # an answer to what came before is on its way
            self._raw.close()
            return
        self._raw.write(_answer(e))
        self._raw.write_eof()
        self.loop.call_later(LINGER_S, self._raw.close)


def _answer(e: GatewayError) -> bytes:
    body = orjson.dumps(error_body(e))
    head = (
        f"HTTP/1.1 {e.status} {http.HTTPStatus(e.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    more = "".join(f"{name}: {value}\r\n" for name, value in e.headers().items())
    return f"{head}{more}\r\n".encode() + body


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
