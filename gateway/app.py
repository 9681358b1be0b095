"""The gateway's HTTP application.

    create_app(config, wiring, pool) ── lifespan ──► Services: EngineClient, CallService, …
                                                       ▲
    routes ──────────── app.state.services ────────────┘

Everything is owned by the lifespan and closed with it; there are no globals. Routes are in
`routes.py`, one wire format per file in `dialects/`. Does not own: the socket (`server.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.addresses import Addresses
from stepwell.gateway.call_service import CallService
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.dialects.registry import error_response, make_dialects
from stepwell.gateway.engine import EngineClient
from stepwell.gateway.errors import GatewayError, PathError, RequestError
from stepwell.gateway.functions import Function, load_function
from stepwell.gateway.hosts import Hosts
from stepwell.gateway.keys import KeyRing
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.openapi import install_openapi
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.protection import Protection
from stepwell.gateway.reply.reader import ReplyFormat
from stepwell.gateway.routes import router
from stepwell.gateway.serve import IGNORED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER
from stepwell.gateway.services import Services
from stepwell.gateway.shortcut import Shortcut
from stepwell.gateway.slime_buffer.buffer import RolloutBuffer
from stepwell.gateway.slime_buffer.router import router as rollout_router
from stepwell.gateway.tokens.render import ChatRenderer
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.tokens.turn_messages import TurnMessages
from stepwell.gateway.trajectory.conversations import Conversations
from stepwell.gateway.trajectory.groups import Groups
from stepwell.gateway.trajectory.identity import Identities
from stepwell.gateway.trajectory.outcomes import Outcomes
from stepwell.gateway.trajectory.recording import Recording
from stepwell.gateway.trajectory.store import TrajectoryStore
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import invalid_body
from stepwell.gateway.wiring import Wiring

log = logging.getLogger(__name__)

PROMPT_CACHE_TOKENS = 4_000_000
"""Tokens of whole prompts kept, so that the rollouts of one prompt tokenise it once."""
RENDER_THREADS = 2


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """What is loaded before the gateway serves, so that a wrong name fails at once."""

    config: GatewayConfig
    wiring: Wiring
    pool: DataPoolClient
    tokenizer: ChatTokenizer
    turn_messages: TurnMessages
    reward: Function | None
    generator: Function | None
    keys: KeyRing
    hosts: Hosts


def _services(loaded: _Loaded, threads: ThreadPoolExecutor) -> Services:
    """The parts put together. None is told later of another one."""
    config, wiring, pool, tokenizer = loaded.config, loaded.wiring, loaded.pool, loaded.tokenizer
    engine = EngineClient(config, wiring, tokenizer.vocabulary)
    renderer = ChatRenderer(tokenizer, thinking=config.thinking, cache_tokens=PROMPT_CACHE_TOKENS)
    if renderer.turn_close_id is None:
        log.warning(
            "the chat template ends assistant turns with no special token: every later turn "
            "of a conversation becomes a branch"
        )
    conversations = Conversations()
    groups = Groups(config)
    recording = Recording(pool, config)

    def left(trajectory: LiveTrajectory) -> None:
        conversations.forget(trajectory)
        if trajectory.closed is None:
            groups.leave(trajectory.group)

    trajectories = TrajectoryStore(
        recording,
        channel_of=groups.channel,
        on_left=left,
        remembered_calls=config.remembered_calls,
    )
    outcomes = Outcomes(config, recording, trajectories)
    template = tokenizer.template_text
    responses = OpenAIResponses(config.stored_response_chars, template)
    return Services(
        config=config,
        keys=loaded.keys,
        hosts=loaded.hosts,
        addresses=Addresses(wiring, config.public_url),
        pool=pool,
        tokenizer=tokenizer,
        engine=engine,
        calls=CallService(
            engine=engine,
            prompts=Prompts(config, renderer, threads),
            format=ReplyFormat(tokenizer, config),
            limits=CallLimits(config),
            turn_messages=loaded.turn_messages,
            thinking=config.thinking,
            on_turn=conversations.note_turn,
            channel_sampling=wiring.sampling,
            replicas=config.replicas,
        ),
        trajectories=trajectories,
        groups=groups,
        outcomes=outcomes,
        recording=recording,
        identities=Identities(
            *(trajectories, conversations, groups, loaded.keys.read),
            idle_s=config.conversation_idle_s,
        ),
        dialects=make_dialects(template, responses),
        responses=responses,
        rollout_buffer=RolloutBuffer(
            *(config, wiring.engine_urls, pool, tokenizer, outcomes),
            loaded.generator,
        ),
        reward=loaded.reward,
    )


class _App(FastAPI):
    """FastAPI behind ASGI layers of ours: its own ones cost a call as much as reading its body.
    That of its telemetry, which nobody turns on, is left out of calls."""

    def __init__(self, guarded: Callable[[ASGIApp], ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._guarded = guarded

    def build_middleware_stack(self) -> ASGIApp:
        return self._guarded(super().build_middleware_stack())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            services: Services = self.state.services
            await services.engine.pace.enter()  # before any work is done for it
            if self.middleware_stack is not None:
                scope["app"] = self
                await self.middleware_stack(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(
    config: GatewayConfig,
    wiring: Wiring,
    pool: DataPoolClient,
    tokenizer: ChatTokenizer | None = None,
) -> FastAPI:
    """The application. The tokenizer is loaded here, so that a wrong path fails before it serves.

    Raises:
        GatewayConfigError: the tokenizer, `redact_messages`, `reward_fn` or `rollout_generator`
            cannot be loaded.
    """
    # Texts come one at a time: a pool of threads costs each two switches and gains it nothing.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loaded = _Loaded(
        config=config,
        wiring=wiring,
        pool=pool,
        tokenizer=tokenizer or ChatTokenizer.load(config.tokenizer_path),
        turn_messages=TurnMessages(config),
        reward=load_function(config, "reward_fn"),
        generator=load_function(config, "rollout_generator"),
        keys=KeyRing(config),
        hosts=Hosts(config, wiring.replica_urls),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ThreadPoolExecutor(RENDER_THREADS, "gateway-render") as threads:
            app.state.services = services = _services(loaded, threads)
            await services.start()
            try:
                yield
            finally:
                await services.close()

    def guarded(routes: ASGIApp) -> ASGIApp:
        protected = Protection(
            Shortcut(routes),
            error_response,
            keys=loaded.keys,
            hosts=loaded.hosts,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=config.body_timeout_s,
        )
        if not config.allowed_origins:
            return protected
        # Browsers ask before they send JSON, and need leave to read the answer.
        return CORSMiddleware(
            protected,
            config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER],
        )

    app = _App(guarded, title="Stepwell gateway", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(router)
    install_openapi(app)
    app.include_router(rollout_router)
    app.add_exception_handler(GatewayError, _gateway_error)
    app.add_exception_handler(DataPoolError, _pool_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _gateway_error(request: Request, e: Exception) -> Response:
    if not isinstance(e, GatewayError):
        raise e
    return error_response(request.url.path, e)


def _pool_error(request: Request, e: Exception) -> Response:
    """The pool refused what a client sent."""
    return error_response(request.url.path, RequestError(str(e), None))


def _validation_error(request: Request, e: Exception) -> Response:
    if not isinstance(e, RequestValidationError):
        raise e
    return error_response(request.url.path, invalid_body(e.errors()))


def _http_error(request: Request, e: Exception) -> Response:
    if not isinstance(e, HTTPException):
        raise e
    if isinstance(e.__cause__, GatewayError):  # FastAPI's, for a body that it could not read
        return error_response(request.url.path, e.__cause__)
    refused = PathError(
        f"{request.method} {request.url.path}: {e.detail}; "
        "see /openapi.json for what this gateway serves"
    )
    refused.status = e.status_code
    answer = error_response(request.url.path, refused)
    answer.headers.update(e.headers or {})
    return answer
