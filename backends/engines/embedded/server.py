"""SGLang's HTTP API over the embedded engine.

Owns the wire: routes, JSON, SSE, disconnects. Decides nothing about generation; a handler posts to
the generation loop and reads the request's record when told that there is news. A client that
disconnects frees its row.

Where this differs from a real server is listed in `docs/design/engines.md`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from stepwell.backends.config import PauseMode
from stepwell.backends.engines.client import EMBEDDED
from stepwell.backends.engines.embedded.loop import EngineStoppedError, GenerationLoop
from stepwell.backends.engines.embedded.reply import Reply
from stepwell.backends.engines.embedded.request import (
    GenerateBody,
    InvalidRequestError,
    Request,
    words,
)
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.updates import add_update_routes
from stepwell.backends.engines.embedded.vision import (
    MissingPicturesError,
    PictureStore,
    Vision,
)
from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import no_pictures

VERSION = EMBEDDED
HEALTH_TIMEOUT_S = 20.0
HEALTH_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Settings that the server reports."""

    model_path: str
    tokenizer_path: str
    stream_interval: int = 1


class PauseBody(BaseModel):
    mode: PauseMode = "abort"


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class ResumeBody(BaseModel):
    tags: list[str] | None = None


def answer(content: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


class Server:
    """The handlers' shared state: the loop, the tokenizer, the requests in flight."""

    def __init__(self, loop: GenerationLoop, tokenizer: Any, info: ServerInfo) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self.info = info
        self.started = int(time.time())
        processor = loop.scheduler.runner.pictures
        self.pictures = None if processor is None else PictureStore(processor)
        self.rids: set[str] = set()

    # -- /generate ----------------------------------------------------------------------------

    async def generate(self, http: HttpRequest) -> Response:
        body = GenerateBody.parse(await http.body())
        scheduler = self.loop.scheduler
        vision = await self._vision(body)
        if scheduler.released and not scheduler.paused:
            raise HTTPException(503, "its memory is released; call /resume_memory_occupation first")
        request = body.request(self.info.stream_interval, vision)
        scheduler.validate(request)
        if request.rid in self.rids:
            raise InvalidRequestError(f"Duplicate request ID detected: {request.rid}")
        reply = Reply(request, self.tokenizer)
        if request.stream:
            return StreamingResponse(self._stream(http, reply), media_type="text/event-stream")
        async with self._in_flight(http, request) as wait:
            while not request.finished:
                await wait()
        if self.loop.failure is not None:
            raise EngineStoppedError(f"the engine failed: {self.loop.failure!r}")
        if (ended := request.finish_reason) is not None and ended.get("status_code") == 400:
            raise InvalidRequestError(str(ended["message"]))
        return Response(reply.body(scheduler.weight_version), media_type="application/json")

    async def _vision(self, body: GenerateBody) -> Vision | None:
        if self.pictures is None:
            if body.image_data:
                raise InvalidRequestError(
                    f"image_data: {no_pictures(self.loop.scheduler.model_path)}"
                )
            return None
        processor = self.pictures.processor
        if not body.image_data and processor.placeholder_id not in (body.input_ids or ()):
            return None
        pictures = await asyncio.to_thread(self.pictures.take, body.image_data, body.extra_key)
        return Vision(processor, body.input_ids or (), pictures)

    @asynccontextmanager
    async def _in_flight(
        self, http: HttpRequest, request: Request
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Submit, and yield a wait for news that ends early when the client is gone; on leaving,
        by whatever way, what has not finished is cancelled."""
        news = asyncio.Event()

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self.loop.cancel(request)

        async def wait() -> None:
            await news.wait()
            news.clear()

        watcher = asyncio.create_task(watch())
        try:
            request.on_update = news.set
            self.rids.add(request.rid)
            self.loop.submit(request)
            yield wait
        finally:
            watcher.cancel()
            self.rids.discard(request.rid)
            if not request.finished:
                self.loop.cancel(request)

    async def _stream(self, http: HttpRequest, reply: Reply) -> AsyncIterator[bytes]:
        request, finished = reply.request, False
        async with self._in_flight(http, request) as wait:
            while not finished:
                await wait()
                finished = request.finished
                if finished:  # free before the client knows: it may send the id again
                    self.rids.discard(request.rid)
                chunk = reply.body(self.loop.scheduler.weight_version, stream=True)
                if chunk is not None:
                    yield b"data: %b\n\n" % chunk
        yield b"data: [DONE]\n\n"

    async def health_generate(self) -> Response:
        """200 as soon as a token of any request is computed, or the loop says that none has to be:
        nothing waits, or it is paused. Generates none itself, which would draw from the seed."""
        scheduler = self.loop.scheduler

        def computed() -> int:
            return scheduler.generated_tokens + scheduler.prefilled_tokens

        before = computed()

        async def probe() -> None:
            def waits(_: Scheduler) -> bool:
                return scheduler.has_work and computed() == before

            while await self.loop.call(waits):  # noqa: ASYNC110 - another thread's counters
                await asyncio.sleep(HEALTH_LOOK_S)

        try:
            await asyncio.wait_for(probe(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=200)

    # -- control ------------------------------------------------------------------------------

    async def abort(self, body: AbortBody) -> Response:
        if body.abort_all or body.rid:
            rid = None if body.abort_all else body.rid
            await self.loop.call(lambda s: s.abort(rid))
        return Response(status_code=200)

    async def flush(self) -> Response:
        done = await self.loop.call(lambda s: s.flush())
        text = (
            "Cache flushed.\nPlease check backend logs for more details. "
            "(When there are running or waiting requests, the operation will not be performed.)\n"
        )
        return Response(text, status_code=200 if done else 400, media_type="text/plain")

    # -- information --------------------------------------------------------------------------

    def model_info(self) -> dict[str, Any]:
        scheduler = self.loop.scheduler
        config = scheduler.runner.config
        return {
            "model_path": scheduler.model_path,
            "served_model_name": self.info.model_path,
            "tokenizer_path": self.info.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": scheduler.weight_version,
            "load_format": "auto",
            "disaggregation_mode": "null",
            "has_image_understanding": self.pictures is not None,
            "has_audio_understanding": False,
            "model_type": config.model_type,
            "architectures": config.architectures or [],
            "cache": {
                "kv_cache_disabled": False,
                "radix_cache_disabled": False,
                "chunked_prefill_disabled": False,
            },
        }

    def server_info(self) -> dict[str, Any]:
        """Body of `/server_info`: facts that a weight publication checks and people look for."""
        runner = self.loop.scheduler.runner
        return {
            "model_path": self.loop.scheduler.model_path,
            "tokenizer_path": self.info.tokenizer_path,
            "context_length": runner.context_length,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "max_running_requests": runner.cache.max_running,
            "stream_interval": self.info.stream_interval,
            "version": VERSION,
        }

    def models(self) -> dict[str, Any]:
        model = {
            "id": self.info.model_path,
            "object": "model",
            "created": self.started,
            "owned_by": "stepwell",
            "root": self.info.model_path,
            "parent": None,
            "max_model_len": self.loop.scheduler.runner.context_length,
        }
        return {"object": "list", "data": [model]}

    def loads(self) -> dict[str, Any]:
        scheduler = self.loop.scheduler
        cache = scheduler.cache
        used = int(cache.kv_len.sum())
        capacity = cache.n_rows * cache.capacity
        prompt_tokens = scheduler.prefilled_tokens + scheduler.reused_tokens
        running = len(scheduler.running)
        load = {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": capacity,
            "max_running_requests": cache.max_running,
            "token_usage": used / capacity,
            "cache_hit_rate": scheduler.reused_tokens / prompt_tokens if prompt_tokens else 0.0,
            "utilization": running / cache.max_running,
            "total_prefill_uncached_tokens": scheduler.prefilled_tokens,
            "total_generated_tokens": scheduler.generated_tokens,
        }
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [load],
        }


def create_app(
    loop: GenerationLoop,
    tokenizer: Any,
    info: ServerInfo,
    on_failure: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The app; its lifespan runs the generation loop. `on_failure` is called if a step fails."""
    server = Server(loop, tokenizer, info)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start(asyncio.get_running_loop(), on_failure)
        yield
        await asyncio.to_thread(loop.stop)

    app = FastAPI(title="Stepwell embedded engine", lifespan=lifespan)
    add_error_handlers(app)
    # Starlette's route: FastAPI's would look for parameters on each call and find none.
    app.add_route("/generate", server.generate, methods=["POST"])
    app.get("/health_generate")(server.health_generate)

    @app.get("/health")
    async def health() -> Response:
        if not loop.alive:
            raise HTTPException(503, f"the generation loop has ended ({loop.failure!r})")
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return answer(server.model_info())

    @app.get("/server_info")
    async def server_info() -> Response:
        return answer(server.server_info())

    @app.get("/v1/models")
    async def models() -> Response:
        return answer(server.models())

    @app.get("/v1/loads")
    async def loads() -> Response:
        return answer(server.loads())

    @app.post("/pause_generation")
    async def pause(body: PauseBody) -> Response:
        await loop.call(lambda s: s.pause(body.mode))
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def resume() -> Response:
        await loop.call(lambda s: s.resume())
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    @app.post("/flush_cache")
    async def flush() -> Response:
        return await server.flush()

    app.post("/abort_request")(server.abort)
    add_update_routes(app, loop)

    @app.post("/release_memory_occupation")
    async def release() -> Response:
        await loop.call(Scheduler.release)
        return answer(None)

    @app.post("/resume_memory_occupation")
    async def take_back(body: ResumeBody) -> Response:
        await loop.call(lambda s: s.take_back(body.tags or ()))
        return answer(None)

    return app


def add_error_handlers(app: FastAPI) -> None:
    """SGLang's error body for whatever the client got wrong."""

    def refusal(status: int, message: str) -> Response:
        return answer({"error": {"message": message}}, status)

    @app.exception_handler(InvalidRequestError)
    async def invalid(_: HttpRequest, error: InvalidRequestError) -> Response:
        return refusal(400, str(error))

    @app.exception_handler(PictureError)
    async def unreadable(_: HttpRequest, error: PictureError) -> Response:
        return refusal(400, str(error))

    @app.exception_handler(MissingPicturesError)
    async def missing(_: HttpRequest, error: MissingPicturesError) -> Response:
        return answer({"error": {"message": str(error), "missing": error.digests}}, 409)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: HttpRequest, error: RequestValidationError) -> Response:
        return refusal(400, words(error.errors()))

    @app.exception_handler(EngineStoppedError)
    async def stopped(_: HttpRequest, error: EngineStoppedError) -> Response:
        return refusal(503, str(error))
