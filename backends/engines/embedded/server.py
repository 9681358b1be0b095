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
from typing import Any, Literal

import orjson
from fastapi import FastAPI, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from stepwell.backends.engines.embedded.adapters import WeightLoadError
from stepwell.backends.engines.embedded.loop import EngineStoppedError, GenerationLoop
from stepwell.backends.engines.embedded.memory import add_memory_routes
from stepwell.backends.engines.embedded.parsers import parse_tool_calls, separate_reasoning
from stepwell.backends.engines.embedded.reply import Reply, parse_generate
from stepwell.backends.engines.embedded.request import InvalidRequestError, Request
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.updates import add_update_routes

VERSION = "stepwell-embedded"
HEALTH_TIMEOUT_S = 20.0
HEALTH_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says about itself."""

    model_path: str
    tokenizer_path: str
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    stream_interval: int = 1
    seed: int = 0


class PauseBody(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortBody(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class UpdateBody(BaseModel):
    model_path: str
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True
    """Accepted; prefixes of the old weights are always dropped."""
    abort_all_requests: bool = False


class FunctionCallBody(BaseModel):
    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str | None = None


class ReasoningBody(BaseModel):
    text: str
    reasoning_parser: str | None = None


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


class Server:
    """The handlers' shared state: the loop, the tokenizer, the requests in flight."""

    def __init__(self, loop: GenerationLoop, tokenizer: Any, info: ServerInfo) -> None:
        self.loop = loop
        self.tokenizer = tokenizer
        self.info = info
        self.started = int(time.time())
        self.rids: set[str] = set()

    # -- /generate ----------------------------------------------------------------------------

    async def generate(self, http: HttpRequest) -> Response:
        try:
            body = orjson.loads(await http.body())
        except orjson.JSONDecodeError as e:
            raise InvalidRequestError(f"the body is no JSON: {e}") from e
        scheduler = self.loop.scheduler
        if scheduler.released and not scheduler.paused:
            raise HTTPException(
                503, f"{sorted(scheduler.released)} released; call /resume_memory_occupation first"
            )
        requests, batch = parse_generate(
            body, self.tokenizer, stream_interval=self.info.stream_interval
        )
        for request in requests:
            self.loop.scheduler.validate(request)
            if request.rid in self.rids:
                raise InvalidRequestError(f"Duplicate request ID detected: {request.rid}")
        adapter = self.loop.scheduler.runner.adapters.name
        if body.get("lora_path") not in (None, adapter):
            raise InvalidRequestError(
                f"lora_path is {body['lora_path']!r}, which is not loaded; {adapter!r} is"
            )
        text = bool(body.get("return_text_in_logprobs"))
        replies = [Reply(r, self.tokenizer, text_in_logprobs=text) for r in requests]
        if body.get("stream"):
            chunks = self._stream(http, replies, batch=batch)
            return StreamingResponse(chunks, media_type="text/event-stream")
        return await self._whole(http, replies, batch=batch)

    @asynccontextmanager
    async def _in_flight(
        self, http: HttpRequest, requests: list[Request]
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Submit, and yield a wait for news that ends early when the client is gone; on leaving,
        by whatever way, what has not finished is cancelled."""
        news = asyncio.Event()

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            for request in requests:
                self.loop.cancel(request)

        async def wait() -> None:
            await news.wait()
            news.clear()

        watcher = asyncio.create_task(watch())
        try:
            for request in requests:
                request.on_update = news.set
                self.rids.add(request.rid)
                self.loop.submit(request)
            yield wait
        finally:
            watcher.cancel()
            for request in requests:
                self.rids.discard(request.rid)
                if not request.finished:
                    self.loop.cancel(request)

    async def _whole(self, http: HttpRequest, replies: list[Reply], *, batch: bool) -> Response:
        requests = [r.request for r in replies]
        async with self._in_flight(http, requests) as wait:
            while not all(r.finished for r in requests):
                await wait()
        if self.loop.failure is not None:
            raise EngineStoppedError(f"the engine failed: {self.loop.failure!r}")
        version = self.loop.scheduler.weight_version
        bodies = [r.body(version) or b"" for r in replies]
        content = b"[%b]" % b",".join(bodies) if batch else bodies[0]
        return Response(content, media_type="application/json")

    async def _stream(
        self, http: HttpRequest, replies: list[Reply], *, batch: bool
    ) -> AsyncIterator[bytes]:
        open_replies = dict(enumerate(replies))
        async with self._in_flight(http, [r.request for r in replies]) as wait:
            while open_replies:
                await wait()
                for i, reply in list(open_replies.items()):
                    finished = reply.request.finished
                    if finished:  # free before the client knows: it may send the id again
                        self.rids.discard(reply.request.rid)
                    chunk = reply.body(
                        self.loop.scheduler.weight_version, stream=True, index=i if batch else None
                    )
                    if chunk is not None:
                        yield b"data: %b\n\n" % chunk
                    if finished:
                        del open_replies[i]
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

    async def update_weights(self, body: UpdateBody) -> Response:
        try:
            held = await self.loop.update_weights(
                lambda s: s.update_weights(body.model_path, body.weight_version),
                abort_all=body.abort_all_requests,
            )
        except WeightLoadError as e:
            failed = {"success": False, "message": str(e), "num_paused_requests": 0}
            return _json(failed, 400)
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        return _json({"success": True, "message": message, "num_paused_requests": held})

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
            "reasoning_parser": self.info.reasoning_parser,
            "tool_call_parser": self.info.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
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
        runner = self.loop.scheduler.runner
        return {
            "model_path": self.loop.scheduler.model_path,
            "tokenizer_path": self.info.tokenizer_path,
            "tokenizer_mode": "auto",
            "skip_tokenizer_init": False,
            "load_format": "auto",
            "trust_remote_code": False,
            "context_length": runner.context_length,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "device": str(runner.device),
            "max_running_requests": runner.cache.max_running,
            "tool_call_parser": self.info.tool_call_parser,
            "reasoning_parser": self.info.reasoning_parser,
            "stream_interval": self.info.stream_interval,
            "random_seed": self.info.seed,
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
    _add_error_handlers(app)
    # Starlette's route: FastAPI's would look for parameters on each call and find none.
    app.add_route("/generate", server.generate, methods=["POST"])
    app.get("/health_generate")(server.health_generate)

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        if not loop.alive:
            raise HTTPException(503, f"the generation loop has ended ({loop.failure!r})")
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> Response:
        return _json(server.model_info())

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        return _json(server.server_info())

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(server.models())

    @app.get("/v1/loads")
    async def loads() -> Response:
        return _json(server.loads())

    @app.post("/pause_generation")
    async def pause(body: PauseBody) -> Response:
        await loop.call(lambda s: s.pause(body.mode))
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def resume() -> Response:
        await loop.call(lambda s: s.resume())
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> Response:
        return await server.flush()

    @app.post("/parse_function_call")
    async def function_call(body: FunctionCallBody) -> Response:
        parser = body.tool_call_parser or info.tool_call_parser
        return _json(parse_tool_calls(body.text, body.tools, parser, tokenizer))

    @app.post("/separate_reasoning")
    async def reasoning(body: ReasoningBody) -> Response:
        parser = body.reasoning_parser or info.reasoning_parser
        return _json(separate_reasoning(body.text, parser))

    app.post("/abort_request")(server.abort)
    app.post("/update_weights_from_disk")(server.update_weights)
    add_update_routes(app, loop)
    add_memory_routes(app, loop)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """SGLang's error body for whatever the client got wrong."""

    def answer(status: int, message: str) -> Response:
        return _json({"error": {"message": message}}, status)

    @app.exception_handler(InvalidRequestError)
    async def invalid(_: HttpRequest, error: InvalidRequestError) -> Response:
        return answer(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: HttpRequest, error: RequestValidationError) -> Response:
        lines = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return answer(400, "; ".join(lines))

    @app.exception_handler(EngineStoppedError)
    async def stopped(_: HttpRequest, error: EngineStoppedError) -> Response:
        return answer(503, str(error))
