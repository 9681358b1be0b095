"""The bare proxy, a process of its own: bytes of a request to the engine, bytes of its answer back.

    python -P proxy.py ENGINE_PORT         prints its port; ends when its standard input ends

HTTP is parsed on both sides, each request is a task, connections to the engine are kept. It reads
no body, checks no key, stores nothing: the least that a gateway in Python can cost.

Imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from typing import Any

import httptools
import uvloop


class Upstream(asyncio.Protocol):
    """A connection to the engine, which answers one request at a time."""

    def __init__(self, idle: list[Upstream]) -> None:
        self._idle = idle
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answered: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionResetError("the engine hung up"))

    def send(self, data: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """The status and the body of the answer to a request."""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        self._idle.append(self)
        if self._answered is not None:
            self._answered.set_result((self._parser.get_status_code(), body))


class Connection(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, engine_port: int, idle: list[Upstream], tasks: set[Any]) -> None:
        self._engine_port, self._idle, self._tasks = engine_port, idle, tasks
        self._transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method, body = self._parser.get_method(), b"".join(self._body)
        task = asyncio.create_task(self._pass_on(method, self._url, self._headers, body))
        self._headers, self._body = [], []
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        lines = [
            b"%b: %b\r\n" % header
            for header in headers
            if header[0] not in (b"content-length", b"transfer-encoding", b"connection")
        ]
        head = b"%b %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n"
        try:
            upstream = self._idle.pop() if self._idle else await self._connect()
            request = head % (method, url, b"".join(lines), len(body))
            status, content = await upstream.send(request + body)
        except OSError:
            status, content = 502, b"{}"
        if not self._transport.is_closing():
            self._transport.write(
                b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(content), content)
            )

    async def _connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(
            lambda: Upstream(self._idle), "127.0.0.1", self._engine_port
        )
        return upstream


async def main(engine_port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    idle: list[Upstream] = []
    tasks: set[Any] = set()
    listening = await loop.create_server(
        lambda: Connection(engine_port, idle, tasks), "127.0.0.1", 0, backlog=2048
    )
    print(listening.sockets[0].getsockname()[1], flush=True)

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    gc.freeze()
    gc.set_threshold(25_000, 5, 20)  # as the gateway
    await ended.wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
