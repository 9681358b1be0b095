"""What stands before every route: hosts and keys, and bounds on bodies.

    socket ──► Protection ──► routes
                  │ 401, 403        │ reads the body: 408, 413, 415
                  └──► the error, worded by the path's dialect

A pure ASGI layer: one function call per request, and no route can forget it. Paths that do not
exist need a key as well, so they tell nothing. No byte of a body is read before. Owns: this order.
Does not own: whose page and for which host (`hosts.py`), who may what (`keys.py`), calls at once
(`limits.py`), headers and connections (`http_protocol.py`).
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.dialects.registry import error_response
from stepwell.gateway.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    GatewayError,
    MediaTypeError,
)
from stepwell.gateway.hosts import Hosts
from stepwell.gateway.keys import KeyRing, needed_by
from stepwell.gateway.paths import routing_path
from stepwell.gateway.web import connection_of


class Protection:
    """ASGI middleware. Handlers find the caller in `request.state.principal`."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, hosts: Hosts, config: GatewayConfig) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http" and scope["method"] == "POST":
            await scope["app"].state.services.engine.pace.enter()  # before any work is done for it
        scope["path"] = path = routing_path(scope)
        headers = dict(scope["headers"])
        needed, url = needed_by(scope.get("method", "GET"), path)
        try:
            self._hosts.check(scope, headers.get(b"host"), headers.get(b"origin"))
            principal = self._keys.authorize(Headers(scope=scope), needed, url)
        except GatewayError as e:
            await error_response(path, e)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        if scope["type"] == "http":
            receive = _Body(scope, receive, headers.get(b"content-type", b""), self._config)
            if needed != "open":
                receive.connection.authenticated()
        await self._app(scope, receive, send)


class _Body:
    """`receive` of one request, bounded until the body has arrived."""

    def __init__(self, scope: Scope, receive: Receive, kind: bytes, config: GatewayConfig) -> None:
        self.connection = connection_of(scope)
        self._kind = kind
        self._receive = receive
        self._config = config
        self._deadline: float | None = None
        self._size = 0
        self._arrived = False

    async def __call__(self) -> Message:
        """
        Raises:
            BodyTimeoutError, BodyTooLargeError, MediaTypeError: the rest of the body is not read.
        """
        if self._arrived:
            return await self._receive()
        if self.connection.has_body:
            message = await self._receive()  # at once: no timer is needed
        else:
            message = await self._wait()
        self._size += len(message.get("body", b""))
        self._arrived = not message.get("more_body", False)
        if self._size and not _is_json(self._kind):
            self._arrived = True
            raise MediaTypeError(
                f"the body came as {self._kind.decode('latin-1') or 'nothing'!r:.80}; send it with "
                "the header content-type: application/json (curl --json does)",
                None,
            )
        if self._size > self._config.max_body_bytes:
            self._arrived = True
            raise BodyTooLargeError(
                f"the request's body exceeds {self._config.max_body_bytes} bytes "
                "(gateway.max_body_bytes)",
                None,
            )
        return message

    async def _wait(self) -> Message:
        timeout_s = self._config.body_timeout_s
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError as e:
            self._arrived = True
            raise BodyTimeoutError(
                f"the request's body did not arrive within {timeout_s:g} s (gateway.body_timeout_s)"
            ) from e


@lru_cache(maxsize=256)
def _is_json(kind: bytes) -> bool:
    media = kind.partition(b";")[0].strip().lower()
    return media == b"application/json" or (
        media.startswith(b"application/") and media.endswith(b"+json")
    )
