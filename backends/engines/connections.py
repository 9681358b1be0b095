"""This module sends HTTP/1.1 requests over connections that it keeps, so that a call to an engine
costs one write and one wake-up, however many calls are under way.

    request ──► an idle connection, the one used last, or a new one ──► status, then the body as it
                                                     comes ──► idle again, or closed if it was left

A bare protocol with llhttp's parser, without what no engine needs: redirects, cookies, compression,
proxies. With aiohttp in its place the gateway does 6 % fewer requests at 64 connections and takes
16 % more CPU at one (docs/design/engines.md). It does not own retries, the time an answer may take,
or what is asked (`client.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 4.0
"""SGLang closes a connection that is idle for 5 s; the last to leave would race with it."""
REST_S = 1.0
"""How long the end of an answer may take that nobody reads."""
LARGE_BODY = 32_768
"""Bytes of a request that are not joined with its head."""


class _Place(NamedTuple):
    host: str
    port: int
    has_tls: bool


class ConnectionPool:
    """Connections of one event loop. `close` ends those that are idle."""

    def __init__(self) -> None:
        self._idle: defaultdict[_Place, list[Answer]] = defaultdict(list)

    @asynccontextmanager
    async def request(
        self, method: str, url: str, body: bytes = b"", headers: bytes = b""
    ) -> AsyncIterator[Answer]:
        """The answer to a request with a JSON body, from its headers on.

        An exception in the body of the `async with` closes the connection.

        Args:
            headers: further ones as they are sent, each with its line end.

        Raises:
            ConnectionError: there is no connection, or it breaks while the answer is read;
                ConnectionRefusedError: nobody listens there.
        """
        place, head = _head(method, url)
        answer = self._idle_one(place) or await _connect(place)
        is_kept = False
        try:
            answer.send(b"%b%bcontent-length: %d\r\n\r\n" % (head, headers, len(body)), body)
            del body  # sent; the answer may take minutes
            await answer.begun()
            yield answer
            if not answer.is_complete:
                with suppress(TimeoutError, ConnectionError):  # nobody reads it
                    async with asyncio.timeout(REST_S):
                        await answer.read()
            is_kept = answer.is_complete and answer.keeps_alive
        finally:  # unless it is complete, the rest would be read as the next answer
            if is_kept:
                self._idle[place].append(answer)
            else:
                answer.close()

    def close(self) -> None:
        for answers in self._idle.values():
            for answer in answers:
                answer.close()
        self._idle.clear()

    def _idle_one(self, place: _Place) -> Answer | None:
        idle = self._idle[place]
        if idle and not idle[-1].is_fresh():
            for answer in idle:  # the others were left before
                answer.close()
            idle.clear()
        while idle:
            if not (answer := idle.pop()).is_closed:
                return answer
        return None


class Answer(asyncio.Protocol):
    """A connection and the answer that it is about to give."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.is_complete = False
        self.is_closed = False
        self.keeps_alive = False
        self._loop = loop
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._ends_with_connection = True
        self._error: ConnectionError | None = None
        self._idle_since = 0.0
        self._waiter: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """The whole body, or the rest of it."""
        while not self.is_complete:
            await self._news()
        return self._taken()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, to its end."""
        while True:
            if self._body:
                yield self._taken()
            elif self.is_complete:
                return
            else:
                await self._news()

    # -- for the pool ----------------------------------------------------------------------------

    def is_fresh(self) -> bool:
        return self._loop.time() - self._idle_since < IDLE_S

    def send(self, head: bytes, body: bytes) -> None:
        self.status, self.is_complete, self._ends_with_connection = 0, False, True
        self._body.clear()
        if len(body) < LARGE_BODY:
            self._transport.write(head + body)
        else:  # uvloop sends both without a copy
            self._transport.writelines((head, body))

    async def begun(self) -> None:
        """The status is known."""
        while not self.status:
            await self._news()

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
            self._break(ConnectionError(f"the answer is no HTTP ({e})"))

    def eof_received(self) -> None:
        if self.status and not self.is_complete and self._ends_with_connection:
            self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(ConnectionResetError(str(exc or "the connection was closed")))
        # The parser refers to this: without it, both wait for the garbage collector.
        self._parser = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._wake()

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.keeps_alive = self._parser.should_keep_alive()
        self._idle_since = self._loop.time()
        self._wake()

    def _break(self, why: ConnectionError) -> None:
        self._error = why
        self.close()
        self._wake()

    def _taken(self) -> bytes:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    async def _news(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _connect(place: _Place) -> Answer:
    loop = asyncio.get_running_loop()
    name, tls = place.host if place.has_tls else None, place.has_tls or None
    at, refused = f"{place.host}:{place.port}", True
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            for *_, address in found:
                try:
                    _, answer = await loop.create_connection(
                        lambda: Answer(loop), *address[:2], ssl=tls, server_hostname=name
                    )
                except OSError as e:
                    why = e
                    refused = refused and isinstance(e, ConnectionRefusedError)
                else:
                    return answer
    except TimeoutError as e:
        raise ConnectionError(f"no connection to {at} within {CONNECT_TIMEOUT_S:g} s") from e
    except OSError as e:  # a name that does not resolve
        raise ConnectionError(f"cannot connect to {at}: {e}") from e
    kind = ConnectionRefusedError if refused else ConnectionError
    raise kind(f"cannot connect to {at}: {why}") from why


@lru_cache(maxsize=256)
def _head(method: str, url: str) -> tuple[_Place, bytes]:
    """Where a request to `url` goes and how it begins."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    return _Place(parts.hostname or "", port, tls), head.encode()
