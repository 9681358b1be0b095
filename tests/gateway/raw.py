"""A call over a connection that is read, and left, by hand."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

from tests.builders import until
from tests.gateway.conftest import World

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": HI},
    "completions": {"prompt": "hi", "max_tokens": 9},
    "responses": {"input": "hi"},
    "messages": {"messages": HI, "max_tokens": 9},
    "models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}
ENDS = {
    "chat/completions": (b'"total_tokens"', b"[DONE]"),
    "completions": (b'"total_tokens"', b"[DONE]"),
    "responses": (b'"completed"', b"event: response.completed"),
    "messages": (b'"output_tokens"', b"event: message_stop"),
    "models/m:generateContent": (b'"responseId"', b'"usageMetadata"'),
}
"""Bytes that the end of an answer has in it, whole and as a stream."""


class Raw:
    """One call on t1 over a connection that is read, and left, by hand."""

    def __init__(self, path: str, connection: socket.socket) -> None:
        self.path, self.connection = path, connection
        self.seen = b""

    @classmethod
    async def send(
        cls,
        world: World,
        path: str = "chat/completions",
        stream: bool = False,
        receive_bytes: int | None = None,
        **body: Any,
    ) -> Raw:
        """`receive_bytes`: the system keeps about so many that are not read."""
        streamed = {"stream": True} if stream else {}
        at = path
        if stream and path.endswith(":generateContent"):
            streamed, at = {}, path.replace(":generate", ":streamGenerate") + "?alt=sse"
        data = json.dumps({"model": "m", **BODIES[path], **streamed, **body}).encode()
        url = urlsplit(world.base_url())
        head = [
            f"POST {url.path}/v1/{at} HTTP/1.1",
            f"host: {url.netloc}",
            "content-type: application/json",
            f"content-length: {len(data)}",
        ]
        loop, connection = asyncio.get_running_loop(), socket.socket()
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await loop.sock_connect(connection, (url.hostname, url.port))
        await loop.sock_sendall(connection, "\r\n".join([*head, "", ""]).encode() + data)
        return cls(path, connection)

    async def read(self, until: bytes) -> bytes:
        async with asyncio.timeout(20):
            while until not in self.seen:
                more = await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16)
                assert more, self.seen
                self.seen += more
        return self.seen

    async def read_all(self, stream: bool) -> bytes:
        if stream:
            await self.read(ENDS[self.path][True])
            return await self.read(b"\r\n0\r\n\r\n")
        head, _, _ = (await self.read(b"\r\n\r\n")).partition(b"\r\n\r\n")
        n = len(head) + 4 + int(head.lower().partition(b"content-length: ")[2].split()[0])
        while len(self.seen) < n:
            self.seen += await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16)
        return self.seen

    async def unread(self) -> None:
        """Return when something has arrived, without taking it."""
        await until(lambda: bool(self._peek()))

    def _peek(self) -> bytes:
        try:
            return self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    def reset(self) -> None:
        """End the connection with RST."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def close(self) -> None:
        """End it in order, with FIN; the kernel makes RST of it where something is unread."""
        self.connection.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and stay to read."""
        self.connection.shutdown(socket.SHUT_WR)
