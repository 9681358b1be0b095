"""The gateway's HTTP application.

    request ──► find (`endpoints.py`) ──► admit (`access.py`) ──► body ──► handler ──► answer
                                              └── refused ──► the error, in the path's dialect

Everything is owned by the lifespan and closed with it; there are no globals. Does not own: the
parts (`services.py`), one wire format each (`dialects/`), the socket (`server.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.access import is_gemini, routing_path
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.dialects.registry import PATHS, error_response
from stepwell.gateway.endpoints import ENDPOINTS, SDK_BODIES, Finder
from stepwell.gateway.errors import GatewayError, PathError, from_pool
from stepwell.gateway.lifecycle import RECORDED_HEADER
from stepwell.gateway.openapi import described
from stepwell.gateway.routes import IGNORED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER
from stepwell.gateway.services import Services
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)

CALLS = tuple(f"/{path}" for path in PATHS)


class _App(FastAPI):
    """One way for every request: find its endpoint, admit it, answer it. FastAPI describes the
    endpoints, answers where there is none, and holds the lifespan."""

    def __init__(self, services: Services, **options: Any) -> None:
        super().__init__(
            routes=list(ENDPOINTS),
            exception_handlers={HTTPException: _no_endpoint},
            openapi_url=None,  # an endpoint as the others
            docs_url=None,
            redoc_url=None,
            **options,
        )
        self.state.services = self._services = services
        self._finder = Finder(ENDPOINTS)
        self._entry: ASGIApp = self._answer
        if services.config.allowed_origins:
            # Browsers ask before they send JSON, and need leave to read the answer.
            self._entry = CORSMiddleware(
                self._answer,
                allow_origins=services.config.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[IGNORED_HEADER, RECORDED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER],
            )

    def openapi(self) -> dict[str, Any]:
        self.openapi_schema = self.openapi_schema or described(ENDPOINTS, SDK_BODIES)
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            await self._entry(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._services.engine.pace.enter()  # before any work is done for it
        scope["app"] = self
        scope["path"] = path = routing_path(scope)
        endpoint, params, needed, url = self._finder.find(scope["method"], path)
        try:
            try:
                await self._services.access.admit(scope, receive, needed, url)
            except ConnectionResetError:  # nobody is left to answer
                return
            if endpoint is None:
                self._services.hosts.name_own(scope)  # a redirect goes there
                await super().__call__(scope, receive, send)
                return
            scope["path_params"] = params
            response = await endpoint.answer(Request(scope, receive, send))
        except GatewayError as e:
            response = error_response(path, e)
        except DataPoolError as e:  # the pool refused what a client sent
            response = error_response(path, from_pool(e))
        except Exception as e:  # a bug of ours: logged, and the client is told in its own shape
            log.exception("%s failed", path)
            why = GatewayError(f"the gateway failed ({type(e).__name__}); see its log")
            response = error_response(path, why)
        await response(scope, receive, send)


def create_app(
    config: GatewayConfig,
    wiring: Wiring,
    pool: DataPoolClient,
    tokenizer: ChatTokenizer | None = None,
) -> FastAPI:
    """The application. What the configuration names is loaded here, so that a wrong path fails
    before it serves.

    Raises:
        GatewayConfigError: the tokenizer, `redact_messages`, `reward_fn` or one of
            `rollout_generators` cannot be loaded.
    """
    # Texts come one at a time: a pool of threads costs each two switches and gains it nothing.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = tokenizer or ChatTokenizer.load(config.tokenizer_path)
    services = Services(config, wiring, pool, tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with services.threads:
            await services.start()
            try:
                yield
            finally:
                await services.close()

    return _App(services, lifespan=lifespan)


async def _no_endpoint(request: Request, e: Any) -> Response:
    path = request.url.path
    remedy = "see /openapi.json for what this gateway serves"
    if "/v1/v1/" in path:
        remedy = "/v1 is there twice: leave it out of the client's base URL"
    elif path.endswith(CALLS) and "/v1/" not in path:
        remedy = "/v1 is missing: add it to the end of the client's base URL"
    elif is_gemini(path) and ("/v1/v1beta/" in path or "/v1beta/v1beta/" in path):
        remedy = "its client adds /v1beta by itself: leave the version out of its base URL"
    elif is_gemini(path) and "/v1/" not in path and "/v1beta/" not in path:
        remedy = "/v1beta is missing before /models"
    refused = PathError(f"{request.method} {path}: {e.detail}; {remedy}")
    refused.status = e.status_code
    answer = error_response(request.url.path, refused)
    headers = e.headers or {}
    if headers.get("Allow") == "GET":
        headers = {"Allow": "GET, HEAD"}
    answer.headers.update(headers)
    return answer
