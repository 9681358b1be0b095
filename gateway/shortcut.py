"""The short way to what agents do all the time: an ASGI layer that answers it without FastAPI.

    Protection ──► Shortcut ──► FastAPI's routes
                      │ POST [/{trajectory_uid}/{prompt_uid}]/v1/{a dialect's path}
                      │   └──► serve.serve
                      │ POST /{trajectory_uid}/{prompt_uid}/v1/complete_trajectory
                      └───┴──► routes.complete

Routing, dependencies and the stacks around a handler take a tenth of a call's time in the gateway,
and twice as much as completing a trajectory does.
The same paths stay routes (`routes.py`): what this layer does not recognise exactly goes there.
Errors are worded as there. Does not own: what a call is (`serve.py`).
"""

from __future__ import annotations

import logging

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.datapool.errors import DataPoolError
from stepwell.gateway.dialects.registry import PATHS, error_response
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.paths import uid_of
from stepwell.gateway.routes import CompleteTrajectory, complete
from stepwell.gateway.serve import serve
from stepwell.gateway.services import Services
from stepwell.gateway.web import invalid_body, read_body

log = logging.getLogger(__name__)

_COMPLETE: TypeAdapter[CompleteTrajectory | None] = TypeAdapter(CompleteTrajectory | None)


class Shortcut:
    """ASGI layer between `Protection` and FastAPI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            await self._app(scope, receive, send)
            return
        url_path: str = scope["path"]
        before, _, path = url_path.partition("/v1/")
        uids = [uid_of(segment) for segment in before.split("/")[1:]]
        request = Request(scope, receive)
        has_url = len(uids) == 2 and all(uids)
        completes = path == "complete_trajectory" and has_url
        if not completes and (path not in PATHS or (uids and not has_url)):
            await self._app(scope, receive, send)
            return
        services: Services = scope["app"].state.services
        try:
            if completes:
                response = await _complete(services, request, *uids)
            else:
                url = (uids[0], uids[1]) if has_url else None
                response = await serve(services, services.dialects[path], request, url)
        except GatewayError as e:
            response = error_response(url_path, e)
        except DataPoolError as e:  # the pool refused what a client sent
            response = error_response(url_path, RequestError(str(e), None))
        except Exception as e:  # a bug of ours: logged, and the client is told in its own shape
            log.exception("%s failed", url_path)
            response = error_response(
                url_path, GatewayError(f"the gateway failed ({type(e).__name__}); see its log")
            )
        await response(scope, receive, send)


async def _complete(
    services: Services, request: Request, trajectory_uid: str, prompt_uid: str
) -> Response:
    raw = await read_body(request)
    try:
        body = _COMPLETE.validate_json(raw or b"{}") or CompleteTrajectory()
    except ValidationError as e:
        raise invalid_body(e.errors(include_url=False)) from e
    return await complete(services, trajectory_uid, prompt_uid, body)
