"""A proxy as it is mostly written, a process of its own: an ASGI function before aiohttp's client.

    python -P library_proxy.py ENGINE_PORT     prints its port; ends when its standard input ends

uvicorn runs it, with uvloop and httptools. Headers and body of a request go to the engine, its
answer goes back. It reads no body, checks no key, stores nothing.

Imports nothing of ours.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import uvicorn

Event = MutableMapping[str, Any]
BETWEEN_TWO = (b"host", b"content-length", b"transfer-encoding", b"connection")
"""Headers of one connection, which the next has its own of."""


class Proxy:
    def __init__(self, engine_port: int) -> None:
        self._engine = f"http://127.0.0.1:{engine_port}"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(
        self,
        scope: Event,
        receive: Callable[[], Awaitable[Event]],
        send: Callable[[Event], Awaitable[None]],
    ) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        parts: list[bytes] = []
        has_more = True
        while has_more:
            event = await receive()
            parts.append(event.get("body", b""))
            has_more = event.get("more_body", False)
        headers = {k.decode(): v.decode() for k, v in scope["headers"] if k not in BETWEEN_TWO}
        method, url = scope["method"], self._engine + scope["path"]
        async with self._session.request(
            method, url, data=b"".join(parts), headers=headers
        ) as answer:
            content = await answer.read()
        length = b"%d" % len(content)
        fields = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": answer.status, "headers": fields})
        await send({"type": "http.response.body", "body": content})


def main(engine_port: int) -> None:
    config = uvicorn.Config(
        Proxy(engine_port),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    server = uvicorn.Server(config)

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True

    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listening.getsockname()[1], flush=True)
    threading.Thread(target=watch, daemon=True).start()
    gc.freeze()
    gc.set_threshold(25_000, 5, 20)  # as the gateway
    server.run(sockets=[listening])


if __name__ == "__main__":
    main(int(sys.argv[1]))
