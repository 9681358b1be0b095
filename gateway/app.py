"""The gateway's HTTP application.

    request ──► find (`endpoints.py`) ──► admit (`access.py`) ──► body ──► handler ──► answer
                                              └── refused ──► the error, in the path's dialect

A call of a dialect comes from its connection (`answer_call`), every other request by ASGI.

Everything is owned by the lifespan and closed with it; there are no globals. Does not own: the
parts (`services.py`), one wire format each (`dialects/`), the socket (`server.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.access import is_gemini, keep, routing_path, take_keys
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.dialects.registry import PATHS, error_response
from stepwell.gateway.endpoints import ENDPOINTS, Finder, Found
from stepwell.gateway.errors import GatewayError, PathError, from_pool
from stepwell.gateway.http_protocol import CALL, DirectCall
from stepwell.gateway.openapi_process import read_document
from stepwell.gateway.routes import ANSWER_HEADERS
from stepwell.gateway.services import Services
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.web import RequestHeaders, connection_of

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
        self.writes = services.engine.connections.writes
        self._finder = Finder(ENDPOINTS)
        self._document: asyncio.Task[bytes] | None = None
        self._entry: ASGIApp = self._answer
        self._cors: CORSMiddleware | None = None
        if services.config.allowed_origins:
            # Browsers ask before they send JSON, and need leave to read the answer.
            self._entry = self._cors = CORSMiddleware(
                self._answer,
                allow_origins=services.config.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=ANSWER_HEADERS,
            )

    async def document(self) -> bytes:
        """`/openapi.json`, made once and for all who ask at the same time."""
        made = self._document
        if made is None or (made.done() and (made.cancelled() or made.exception())):
            self._document = made = asyncio.create_task(read_document())
        return await asyncio.shield(made)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        elif (call := scope["extensions"].get(CALL)) is not None:
            call.client, call.scheme = scope["client"], scope["scheme"]
            await self.answer_call(call)
        else:
            await self._entry(scope, receive, send)

    def find_call(self, path: str) -> Found | None:
        found = self._finder.find("POST", path)
        return found if found[0] is not None and found[0].is_call else None

    async def answer_call(self, call: DirectCall) -> None:
        """Answer a call of a dialect; errors are answers in its shape."""
        services, headers = self._services, call.headers
        endpoint, _, needed, call.url = call.target.found
        try:
            if (turn := services.engine.pace.turn(is_new=True)) is not None:
                await turn  # before any work is done for it
            if self._cors is not None:
                call.common_headers = await _cors_headers(self._cors, headers)
            access = services.access
            call.caller = access.admit(headers, call.scheme, call.connection, needed, call.url)
            if not call.more_body and access.is_read_at_once(headers, call.n_waiting):
                body = call.take_pieces()
            else:
                body = await access.read_body(
                    headers,
                    call.target.path,
                    call.receive,
                    needed,
                    is_complete=not call.more_body,
                    is_call=isinstance(endpoint.body, str),
                )
            call.content = body
            await endpoint.handler(services, call)
        except ConnectionResetError:  # nobody is left to answer
            return
        except Exception as e:  # noqa: BLE001 - told in the dialect's shape
            refused = _refusal(call.target.path, headers, e)
            if not call.response_started:
                await call.connection.drain()  # of a client that asks on and reads nothing
                call.respond(refused)
        finally:
            call.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        if scope["method"] == "POST":
            await services.engine.pace.enter()  # before any work is done for it
        scope["app"] = self
        scope["path"] = path = routing_path(scope["raw_path"])
        endpoint, params, needed, url = self._finder.find(scope["method"], path)
        try:
            connection, access = connection_of(scope), services.access
            keys, scope["query_string"] = take_keys(path, scope["query_string"])
            scope["headers"] = [*scope["headers"], *keys]
            headers = RequestHeaders(scope["headers"])
            caller = access.admit(headers, scope["scheme"], connection, needed, url)
            is_complete = connection.is_complete
            body = await access.read_body(headers, path, receive, needed, is_complete=is_complete)
            keep(scope, caller, body)
            if endpoint is None:
                services.hosts.name_own(scope)  # a redirect goes there
                await super().__call__(scope, receive, send)
                return
            scope["path_params"] = params
            response = await endpoint.answer(Request(scope, receive, send))
        except ConnectionResetError:
            return
        except Exception as e:  # noqa: BLE001 - whatever it is, its client is answered
            response = _refusal(path, Headers(scope=scope), e)
        await response(scope, receive, send)


def _refusal(path: str, headers: Headers, e: Exception) -> Response:
    """The answer to a request that failed, in the shape of its dialect."""
    if isinstance(e, DataPoolError):  # the pool refused what a client sent
        e = from_pool(e)
    elif not isinstance(e, GatewayError):  # a bug of ours: logged, and the client is told
        log.error("%s failed", path, exc_info=e)
        e = GatewayError(f"the gateway failed ({type(e).__name__}); see its log")
    return error_response(path, headers, e)


async def _cors_headers(cors: CORSMiddleware, headers: Headers) -> bytes:
    """Header lines that let a page read an answer, if it may."""
    if "origin" not in headers:  # no page asks, and older Starlettes look for one all the same
        return b"vary: Origin\r\n"
    lines: list[bytes] = []

    async def take(head: Message) -> None:
        lines.extend(b"%b: %b\r\n" % each for each in head["headers"])

    await cors.send({"type": "http.response.start", "headers": []}, take, headers)
    return b"".join(lines)


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
    if request.method == "POST" and ":" in path.rpartition("/models/")[2]:
        e = HTTPException(404)  # the path of a method is that of a model, too, which may be read
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
    answer = error_response(request.url.path, request.headers, refused)
    headers = e.headers or {}
    if headers.get("Allow") == "GET":
        headers = {"Allow": "GET, HEAD"}
    answer.headers.update(headers)
    return answer
