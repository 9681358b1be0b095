"""The gateway's HTTP application.

    Protection ──► FastAPI's router ──► routes.py (plain: every call passes them)
                                   └──► lifecycle.py, slime_buffer/ (bodies by FastAPI)

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
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway import lifecycle
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.dialects.params import refusal
from stepwell.gateway.dialects.registry import PATHS, error_response
from stepwell.gateway.errors import GatewayError, PathError, RequestError
from stepwell.gateway.lifecycle import RECORDED_HEADER
from stepwell.gateway.openapi import described
from stepwell.gateway.paths import is_gemini
from stepwell.gateway.protection import Protection
from stepwell.gateway.routes import (
    IGNORED_HEADER,
    PROBES,
    ROUTES,
    TRAJECTORY_HEADER,
    VERSION_HEADER,
)
from stepwell.gateway.services import Services
from stepwell.gateway.slime_buffer.router import router as rollout_router
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.ui.router import UI_ROUTES
from stepwell.gateway.wiring import Wiring

log = logging.getLogger(__name__)

CALLS = tuple(f"/{path}" for path in PATHS)


class _App(FastAPI):
    """FastAPI with the layers that it has for telemetry, uploads and debugging left out: they cost
    a call as much as all else that is done before it."""

    def build_middleware_stack(self) -> ASGIApp:
        stack: ASGIApp = AsyncExitStackMiddleware(self.router)
        stack = ExceptionMiddleware(stack, handlers=self.exception_handlers)
        for layer in reversed(self.user_middleware):
            stack = layer.cls(stack, *layer.args, **layer.kwargs)
        return stack

    def openapi(self) -> dict[str, Any]:
        self.openapi_schema = self.openapi_schema or described(self)
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.middleware_stack is None or scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)


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

    handlers: dict[Any, Any] = {
        **dict.fromkeys((GatewayError, DataPoolError, RequestValidationError), _refused),
        HTTPException: _http_error,
        Exception: _bug,
    }
    layers = [Middleware(Protection, services=services)]
    if config.allowed_origins:
        # Browsers ask before they send JSON, and need leave to read the answer.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, RECORDED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER],
        )
        layers.insert(0, cors)
    app = _App(
        middleware=layers,
        title="Stepwell gateway",
        routes=[*ROUTES, *UI_ROUTES, *PROBES],
        lifespan=lifespan,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    app.include_router(lifecycle.router)
    app.include_router(rollout_router)
    return app


def _refused(
    request: Request, e: GatewayError | DataPoolError | RequestValidationError
) -> Response:
    if isinstance(e, RequestValidationError):
        e = refusal(e.errors())
    elif isinstance(e, DataPoolError):  # the pool refused what a client sent
        e = RequestError(str(e), None)
    return error_response(request.url.path, e)


def _http_error(request: Request, e: HTTPException) -> Response:
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
    answer.headers.update(e.headers or {})
    return answer


def _bug(request: Request, e: Exception) -> Response:
    """A bug of ours: logged, and the client is told in its own shape."""
    log.error("%s failed", request.url.path, exc_info=e)
    why = GatewayError(f"the gateway failed ({type(e).__name__}); see its log")
    return error_response(request.url.path, why)
