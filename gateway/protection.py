"""What stands before every route: hosts and keys, and bounds on bodies.

    socket ──► host, origin, key ──► body ──► routes
                    │ 401, 403         │ 408, 413, 415
                    └──────────────────┴──► the error, worded by the path's dialect

A pure ASGI layer: one function call per request, and no route can forget it. Paths that do not
exist need a key as well, so they tell nothing. No byte of a body is read before; routes find it
whole. Owns: this order.
Does not own: whose page and for which host (`hosts.py`), who may what (`keys.py`), what a body may
hold (`bodies.py`), calls at once (`limits.py`), headers and connections (`http_protocol.py`).
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.gateway.bodies import check_holdings
from stepwell.gateway.dialects.registry import error_response
from stepwell.gateway.errors import (
    BodyTooLargeError,
    ClientTimeoutError,
    GatewayError,
    MediaTypeError,
)
from stepwell.gateway.keys import needed_by
from stepwell.gateway.paths import is_gemini, routing_path
from stepwell.gateway.services import Services
from stepwell.gateway.web import connection_of

MAX_OPEN_BODY = 8192
"""Bytes of a body that comes without a key: a dashboard's login has one."""


class Protection:
    """ASGI middleware. Handlers find the caller in `request.state.principal`."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST":
            await self._services.engine.pace.enter()  # before any work is done for it
        scope["path"] = path = routing_path(scope)
        if scope["query_string"] and is_gemini(path):
            _take_key(scope)
        headers = dict(scope["headers"])
        needed, url = needed_by(scope["method"], path)
        try:
            self._services.hosts.check(scope, headers.get(b"host"), headers.get(b"origin"))
            principal = self._services.keys.authorize(Headers(scope=scope), needed, url)
            if needed != "open":
                connection_of(scope).authenticated()
            if b"content-length" in headers or b"transfer-encoding" in headers:
                most = self._services.config.max_body_bytes
                most = min(most, MAX_OPEN_BODY) if needed == "open" else most
                receive = await self._arrived(
                    path, receive, headers.get(b"content-type", b""), most
                )
        except ConnectionResetError:  # nobody is left to answer
            return
        except GatewayError as e:
            await error_response(path, e)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)

    async def _arrived(self, path: str, receive: Receive, kind: bytes, most: int) -> Receive:
        """`receive` with the whole body as its first message, which it does not keep.

        Raises:
            ClientTimeoutError, BodyTooLargeError, MediaTypeError: the rest of the body is not read,
                or it holds too much.
            ConnectionResetError: the client left in the middle of it.
        """
        pieces: list[bytes] = []
        size, has_more = 0, True
        timeout_s = self._services.config.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    has_more = message.get("more_body", False)
                    if size and not _is_json(kind):
                        raise MediaTypeError(
                            f"the body came as {kind.decode('latin-1') or 'nothing'!r:.80}; send "
                            "it with the header content-type: application/json (curl --json does)",
                            None,
                        )
                    if size > most:
                        limit = "gateway.max_body_bytes"
                        if most < self._services.config.max_body_bytes:
                            limit = "the most where no key is asked for"
                        raise BodyTooLargeError(
                            f"the request's body exceeds {most} bytes ({limit})", None
                        )
        except TimeoutError as e:
            raise ClientTimeoutError(
                f"the request's body did not arrive within {timeout_s:g} s (gateway.body_timeout_s)"
            ) from e
        whole = [b"".join(pieces)]
        del pieces
        await check_holdings(path, whole[0], self._services.threads)

        async def arrived() -> Message:
            return {"type": "http.request", "body": whole.pop()} if whole else await receive()

        return arrived


def _take_key(scope: Scope) -> None:
    """Make the key in a URL of Gemini's API (`?key=`) a header, as which all else reads keys."""
    named = parse_qsl(scope["query_string"].decode("latin-1"))
    keys = [(b"x-goog-api-key", key.encode()) for name, key in named if name == "key"]
    if keys:
        scope["headers"] = [*scope["headers"], *keys]
        rest = [(name, value) for name, value in named if name != "key"]
        scope["query_string"] = urlencode(rest).encode()


@lru_cache(maxsize=256)
def _is_json(kind: bytes) -> bool:
    media = kind.partition(b";")[0].strip().lower()
    return media == b"application/json" or (
        media.startswith(b"application/") and media.endswith(b"+json")
    )
