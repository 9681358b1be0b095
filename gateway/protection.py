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
from collections.abc import Callable
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.gateway.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    GatewayError,
    MediaTypeError,
)
from stepwell.gateway.hosts import Hosts
from stepwell.gateway.keys import KeyRing, needed_by
from stepwell.gateway.paths import routing_path
from stepwell.gateway.web import CONNECTION, Connection


class Protection:
    """ASGI middleware. Handlers find the caller in `request.state.principal`."""

    def __init__(
        self,
        app: ASGIApp,
        answer_of: Callable[[str, GatewayError], Response],
        *,
        keys: KeyRing,
        hosts: Hosts,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        """`answer_of`: a path and what is wrong, in the shape that the path's clients read."""
        self._app = app
        self._answer_of = answer_of
        self._hosts = hosts
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["path"] = path = routing_path(scope)
        headers = dict(scope["headers"])
        needed, url = needed_by(scope.get("method", "GET"), path)
        try:
            self._hosts.check(scope, headers.get(b"host"), headers.get(b"origin"))
            principal = self._keys.authorize(Headers(scope=scope), needed, url)
        except GatewayError as e:
            await self._answer_of(path, e)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        if scope["type"] == "http":
            kind = headers.get(b"content-type", b"")
            body = _Body(scope, receive, kind, self._max_body_bytes, self._body_timeout_s)
            if needed != "open" and body.connection is not None:
                body.connection.authenticated()
            receive = body
        await self._app(scope, receive, send)


class _Body:
    """`receive` of one request, bounded until the body has arrived."""

    __slots__ = (
        "_arrived",
        "_deadline",
        "_kind",
        "_max_bytes",
        "_receive",
        "_size",
        "_timeout_s",
        "connection",
    )

    def __init__(
        self, scope: Scope, receive: Receive, kind: bytes, max_bytes: int, timeout_s: float
    ) -> None:
        self.connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        self._kind = kind
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
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
        if self.connection is not None and self.connection.has_body:
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
        if self._size > self._max_bytes:
            self._arrived = True
            raise BodyTooLargeError(
                f"the request's body exceeds {self._max_bytes} bytes (gateway.max_body_bytes)", None
            )
        return message

    async def _wait(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError as e:
            self._arrived = True
            raise BodyTimeoutError(
                f"the request's body did not arrive within {self._timeout_s:g} s "
                "(gateway.body_timeout_s)"
            ) from e


@lru_cache(maxsize=256)
def _is_json(kind: bytes) -> bool:
    media = kind.partition(b";")[0].strip().lower()
    return media == b"application/json" or (
        media.startswith(b"application/") and media.endswith(b"+json")
    )
