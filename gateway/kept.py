"""POST over kept HTTP/1.1 connections, at a cost that does not grow with their number.

    post ──► an idle connection, the one used last, or a new one ──► status, then the body as it
                                                  comes ──► idle again, or closed if it was left

A bare protocol with llhttp's parser: a request and its answer are one write and one wake-up. What a
client of engines does not need is not here: redirects, cookies, compression, proxies, TLS
(`https://` goes through aiohttp, see `engine.py`). Does not own: retries, timeouts of answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

IDLE_S = 4.0
"""SGLang closes a connection that is idle for 5 s; the last to leave would race with it."""
REST_S = 1.0
"""How long the end of an answer may take that nobody waits for."""


class _Place(NamedTuple):
    host: str
    port: int


class KeptConnections:
    """Connections of one event loop. `close` ends those that are idle."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: defaultdict[_Place, list[Answer]] = defaultdict(list)

    @asynccontextmanager
    async def post(self, url: str, body: bytes) -> AsyncIterator[Answer]:
        """The answer to a POST of JSON, from its headers on.

        An exception in the body of the `async with` closes the connection; what is left of an
        answer that was not read to its end may still come for a second.

        Raises:
            ConnectionError: there is no connection, or it breaks while the answer is read.
        """
        place, head = _request(url)
        answer = self._take(place) or await self._connect(place)
        try:
            answer.send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
            del body  # sent; the answer may take minutes
            await answer.begun()
            yield answer
        except BaseException:  # also a cancellation: the rest would be read as the next answer
            answer.close()
            raise
        answer.keep_in(self._idle[place])

    def close(self) -> None:
        for answers in self._idle.values():
            for answer in answers:
                answer.close()
        self._idle.clear()

    def _take(self, place: _Place) -> Answer | None:
        idle = self._idle[place]
        if idle and not idle[-1].is_fresh():
            for answer in idle:  # the others were left before
                answer.close()
            idle.clear()
        while idle:
            if not (answer := idle.pop()).is_closed:
                return answer
        return None

    async def _connect(self, place: _Place) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, answer = await loop.create_connection(lambda: Answer(loop), *place)
        except TimeoutError as e:
            raise ConnectionError(
                f"no connection to {place.host}:{place.port} within {self._connect_timeout_s:g} s"
            ) from e
        except OSError as e:  # a name that does not resolve, a network that is not there
            raise ConnectionError(f"cannot connect to {place.host}:{place.port}: {e}") from e
        return answer


class Answer(asyncio.Protocol):
    """A connection and the answer that it is about to give."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.is_closed = False
        self._loop = loop
        self._transport: Any = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._complete = False
        self._keep = False
        self._ends_with_connection = True
        self._error: ConnectionError | None = None
        self._idle_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._home: list[Answer] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read(self) -> bytes:
        """The whole body, or the rest of it."""
        while not self._complete:
            await self._news()
        return self._taken()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, to its end."""
        while True:
            if self._body:
                yield self._taken()
            elif self._complete:
                return
            else:
                await self._news()

    # -- for `KeptConnections` -----------------------------------------------------------------

    def keep_in(self, idle: list[Answer]) -> None:
        """Go there when the answer is complete; close if it does not come to its end."""
        if self.is_closed:
            return
        if not self._complete:
            self._home = idle
            self._timer = self._loop.call_later(REST_S, self.close)
        elif self._keep:
            idle.append(self)
        else:
            self.close()

    def is_fresh(self) -> bool:
        return self._loop.time() - self._idle_since < IDLE_S

    def send(self, request: bytes) -> None:
        self.status, self._complete, self._ends_with_connection = 0, False, True
        self._body.clear()
        self._transport.write(request)

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
        if self.status and not self._complete and self._ends_with_connection:
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
        self._complete = True
        self._keep = self._parser.should_keep_alive()
        self._idle_since = self._loop.time()
        if self._timer is not None and self._home is not None:
            self._timer.cancel()
            self._body.clear()
            self.keep_in(self._home)
            self._timer = self._home = None
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


@lru_cache(maxsize=256)
def _request(url: str) -> tuple[_Place, bytes]:
    """Where a request to `url` goes and how it begins."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    head = f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    return _Place(host, port), head.encode()
