"""The gateway's HTTP application.

    Protection ──► FastAPI's router ──► routes.py (plain: every call passes them)
                                   └──► lifecycle.py, slime_buffer/ (bodies by FastAPI)

Everything is owned by the lifespan and closed with it; there are no globals. Does not own: the
parts (`services.py`), one wire format each (`dialects/`), the socket (`server.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
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
from stepwell.gateway.dialects.registry import error_response
from stepwell.gateway.errors import GatewayError, PathError, RequestError
from stepwell.gateway.functions import load_function
from stepwell.gateway.hosts import Hosts
from stepwell.gateway.keys import KeyRing
from stepwell.gateway.openapi import install_openapi
from stepwell.gateway.protection import Protection
from stepwell.gateway.routes import ROUTES
from stepwell.gateway.serve import IGNORED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER
from stepwell.gateway.services import Services
from stepwell.gateway.slime_buffer.router import router as rollout_router
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.tokens.turn_messages import TurnMessages
from stepwell.gateway.wiring import Wiring

log = logging.getLogger(__name__)

RENDER_THREADS = 2


class _App(FastAPI):
    """FastAPI with the layers that it has for telemetry, uploads and debugging left out: they cost
    a call as much as all else that is done before it."""

    def __init__(self, layers: Sequence[Middleware], **settings: Any) -> None:
        super().__init__(**settings)
        self._layers = layers

    def build_middleware_stack(self) -> ASGIApp:
        stack: ASGIApp = AsyncExitStackMiddleware(self.router)
        stack = ExceptionMiddleware(stack, handlers=self.exception_handlers)
        for layer in self._layers:
            stack = layer.cls(stack, *layer.args, **layer.kwargs)
        return stack

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
        GatewayConfigError: the tokenizer, `redact_messages`, `reward_fn` or `rollout_generator`
            cannot be loaded.
    """
    # Texts come one at a time: a pool of threads costs each two switches and gains it nothing.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keys, hosts = KeyRing(config), Hosts(config, wiring.replica_urls)
    make_services = partial(
        Services,
        config=config,
        wiring=wiring,
        pool=pool,
        tokenizer=tokenizer or ChatTokenizer.load(config.tokenizer_path),
        turn_messages=TurnMessages(config),
        keys=keys,
        hosts=hosts,
        reward=load_function(config, "reward_fn"),
        generator=load_function(config, "rollout_generator"),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ThreadPoolExecutor(RENDER_THREADS, "gateway-render") as threads:
            app.state.services = services = make_services(threads)
            await services.start()
            try:
                yield
            finally:
                await services.close()

    handlers: dict[Any, Any] = {
        GatewayError: _gateway_error,
        DataPoolError: _pool_error,
        RequestValidationError: _validation_error,
        HTTPException: _http_error,
        Exception: _bug,
    }
    layers = [Middleware(Protection, keys=keys, hosts=hosts, config=config)]
    if config.allowed_origins:
        # Browsers ask before they send JSON, and need leave to read the answer.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER],
        )
        layers.append(cors)
    app = _App(
        layers,
        title="Stepwell gateway",
        routes=[*ROUTES],
        lifespan=lifespan,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(lifecycle.router)
    install_openapi(app)
    app.include_router(rollout_router)
    return app


def _gateway_error(request: Request, e: GatewayError) -> Response:
    return error_response(request.url.path, e)


def _pool_error(request: Request, e: DataPoolError) -> Response:
    """The pool refused what a client sent."""
    return error_response(request.url.path, RequestError(str(e), None))


def _validation_error(request: Request, e: RequestValidationError) -> Response:
    return error_response(request.url.path, refusal(e.errors()))


def _http_error(request: Request, e: HTTPException) -> Response:
    refused = PathError(
        f"{request.method} {request.url.path}: {e.detail}; "
        "see /openapi.json for what this gateway serves"
    )
    refused.status = e.status_code
    answer = error_response(request.url.path, refused)
    answer.headers.update(e.headers or {})
    return answer


def _bug(request: Request, e: Exception) -> Response:
    """A bug of ours: logged, and the client is told in its own shape."""
    log.error("%s failed", request.url.path, exc_info=e)
    why = GatewayError(f"the gateway failed ({type(e).__name__}); see its log")
    return error_response(request.url.path, why)
