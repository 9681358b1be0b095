"""What stands before every route: keys, and bounds on bodies.

    socket ──► Protection ──► routes
                  │ 401, 403        │ reads the body: 408, 413
                  └──► the error, worded by the path's dialect

A pure ASGI layer: one function call per request, and no route can forget it. Paths that do not
exist need a key as well, so they tell nothing. Own: this order. Does not own: who may what
(`keys.py`), calls at once (`limits.py`); the size of headers and idle connections are uvicorn's.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.dialects.registry import error_response
from gateway.errors import BodyTimeoutError, BodyTooLargeError, GatewayError
from gateway.keys import KeyRing, needed_by
from gateway.web import CONNECTION, Connection


class Protection:
    """ASGI middleware. Handlers find the caller in `request.state.principal`."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyRing, max_body_bytes: int, body_timeout_s: float
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        needed, url = needed_by(scope.get("method", "GET"), scope["path"])
        try:
            principal = self._keys.authorize(Headers(scope=scope), needed, url)
        except GatewayError as e:
            await error_response(scope["path"], e)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        if scope["type"] == "http":
            receive = _Body(scope, receive, self._max_body_bytes, self._body_timeout_s)
        await self._app(scope, receive, send)


class _Body:
    """`receive` of one request, bounded until the body has arrived."""

    __slots__ = (
        "_arrived",
        "_connection",
        "_deadline",
        "_max_bytes",
        "_receive",
        "_size",
        "_timeout_s",
    )

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._size = 0
        self._arrived = False

    async def __call__(self) -> Message:
        """
        Raises:
            BodyTimeoutError, BodyTooLargeError: the rest of the body is not read.
        """
        if self._arrived:
            return await self._receive()
        if self._connection is not None and self._connection.has_body:
            message = await self._receive()  # at once: no timer is needed
        else:
            message = await self._wait()
        self._size += len(message.get("body", b""))
        self._arrived = not message.get("more_body", False)
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
