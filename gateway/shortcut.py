"""The short way to LLM calls: an ASGI layer that answers them without FastAPI's routing.

    Protection ──► Shortcut ──► FastAPI's routes
                      │ POST [/{trajectory_uid}/{prompt_uid}]/v1/{a dialect's path}
                      └──► exchange.serve

Routing, dependencies and the stacks around a handler take a tenth of a call's time in the gateway.
The same paths stay routes (`routes.py`): what this layer does not recognise exactly goes there.
Errors are worded as there. Does not own: what a call is (`exchange.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from datapool.errors import DataPoolError
from gateway.dialects.registry import DIALECTS, error_response
from gateway.errors import GatewayError, RequestError
from gateway.exchange import serve

if TYPE_CHECKING:
    from gateway.app import Gateway


class Shortcut:
    """ASGI middleware, the innermost one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        url_path: str = scope["path"]
        before, _, path = url_path.partition("/v1/")
        uids = before.split("/")[1:]
        if path not in DIALECTS or (uids and (len(uids) != 2 or not all(uids))):
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        request = Request(scope, receive)
        try:
            response = await serve(gateway, gateway.dialects[path], request, *uids)
        except GatewayError as e:
            response = error_response(url_path, e)
        except DataPoolError as e:  # the pool refused what a client sent
            response = error_response(url_path, RequestError(str(e), None))
        await response(scope, receive, send)
