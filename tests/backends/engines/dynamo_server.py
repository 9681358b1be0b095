"""A Dynamo of one worker, written from the source of 1.6.1, whose SGLang is an embedded engine.

    async with dynamo(sglang) as (frontend, worker): …
    with in_a_thread(dynamo(sglang)) as (frontend, worker): …

What is Dynamo's own is here: `lib/llm/src/http/service/sglang_generate.rs` (the frontend's
`/generate`), `lib/runtime/src/system_status_server.rs` (`/health`, `/engine/…` of a worker),
`components/src/dynamo/sglang/engine_routes.py` and `request_handlers/handler_base.py` (what stands
below `/engine/`, and the form of its results).
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, TypeVar

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stepwell.backends.engines.dynamo import EXPOSED
from tests.gateway.conftest import serving

T = TypeVar("T")

ALL_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
FIXED = frozenset(
    {
        "control/update_weights_from_disk",
        "control/update_weight_version",
        "pause_generation",
        "continue_generation",
    }
)
"""Routes of every worker; those that an embedded engine has."""


class Dynamo:
    """The frontend and the worker as two apps."""

    def __init__(self, sglang: str, http: aiohttp.ClientSession, exposed: str = EXPOSED) -> None:
        self._sglang = sglang
        self._http = http
        self._exposed = {d.partition("=")[0].partition(":")[0] for d in exposed.split()}
        self._is_paused = False
        """The worker is, and has left the frontend's list."""
        self.frontend = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._none, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST", "PUT"]),
            ]
        )
        self.worker = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/engine/{path:path}", self._engine, methods=ALL_METHODS),
            ]
        )

    # -- the frontend --------------------------------------------------------------------------

    async def _none(self, request: Request) -> Response:
        return JSONResponse({"error": "not in this test"}, 500)

    async def _models(self, request: Request) -> Response:
        async with self._http.get(f"{self._sglang}/v1/models") as answer:
            [model] = (await answer.json())["data"]
        shown = {"id": model["id"], "object": "model", "created": 1, "owned_by": "nvidia"}
        shown["context_window"] = model["max_model_len"]
        return JSONResponse({"object": "list", "data": [shown]})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            words = "non-streaming SGLang generate requests are not implemented; set stream=true"
            return JSONResponse({"error": {"message": words}}, 501)
        if self._is_paused:
            words = "Model `m` is not ready to serve requests yet. Please retry shortly."
            return JSONResponse({"error": {"message": words}}, 503)
        public = body.get("rid")
        body["rid"] = uuid.uuid4().hex  # the worker's own, which no caller can name
        answer = await self._http.post(f"{self._sglang}/generate", json=body)

        async def events() -> AsyncIterator[bytes]:
            refused = answer.status != 200  # the stream has begun when the worker looks at it
            lines = _lines(f"ValueError: {await answer.text()}") if refused else answer.content
            try:
                async for line in lines:
                    data = line.strip().removeprefix(b"data: ")
                    if not data or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    event.get("meta_info", {})["id"] = public
                    yield b"data: %s\n\n" % json.dumps(event).encode()
                yield b"data: [DONE]\n\n"
            finally:
                answer.close()  # of a caller who has gone: the request ends

        return StreamingResponse(events(), media_type="text/event-stream")

    # -- the worker ----------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ready", "endpoints": {"generate": "ready"}})

    async def _engine(self, request: Request) -> Response:
        """Any method calls what is there, with the body as it came."""
        path = request.path_params["path"]
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        if path not in FIXED | self._exposed:
            words = f"Route /engine/{path} not found"
            return _text({"error": "Route not found", "message": words}, 404)
        if not isinstance(body, dict):
            words = f"ValueError: /engine/{path} requires a JSON object body"
            return _text({"error": "Handler error", "message": words}, 500)
        name = path.removeprefix("control/")
        if body.get("abort_all_requests"):
            await self._http.post(f"{self._sglang}/abort_request", json={"abort_all": True})
        how = "GET" if name.endswith("_info") else "POST"
        sent = {} if how == "GET" else {"json": body}
        async with self._http.request(how, f"{self._sglang}/{name}", **sent) as answer:
            try:
                told = await answer.json(content_type=None)
            except json.JSONDecodeError:
                told = None
        if how == "GET":
            return _text(told)
        if name.startswith("update"):
            told = told if "success" in (told or {}) else {"success": False, "message": str(told)}
            return _text({"num_paused_requests": 0, **told})
        self._is_paused = name == "pause_generation"
        return _text({"status": "ok"})  # of a method that returns None


async def _lines(error: str) -> AsyncIterator[bytes]:
    yield json.dumps({"error": {"message": error}}).encode()


def _text(answer: Any, status: int = 200) -> Response:
    return PlainTextResponse(json.dumps(answer), status)


@asynccontextmanager
async def dynamo(sglang: str, exposed: str = EXPOSED) -> AsyncIterator[tuple[str, str]]:
    """Urls of a frontend and of its worker's system server, with the engine at `sglang`."""
    async with AsyncExitStack() as stack:
        free = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=free, timeout=aiohttp.ClientTimeout(None))
        )
        both = Dynamo(sglang, http, exposed)
        frontend = await stack.enter_async_context(serving(both.frontend))
        yield frontend, await stack.enter_async_context(serving(both.worker))


@contextmanager
def in_a_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """The addresses of a server in a thread, for tests that each have an event loop of their own,
    or none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
