"""An engine of another kind, whole in one file: JSON lines over TCP instead of HTTP.

    stepwell train --config quickstart engine.kind=lines engine.options.tokens_per_line=8

`Lines` is what Stepwell asks of an engine (`stepwell.backends.engines.api`): sample, abort, pause,
continue, update, version. Below it is the server that `command_line` starts, which computes with
Stepwell's own generation loop; yours would be a server that exists. Both sides speak::

    {"call": "sample", "rid": …, "ids": […], …}  ──►  {"ids": [3, 5], "log_probs": [-0.2, -1.3]}
                                                 ◄──  {"ids": [], …, "finish": "stop", "spans": […]}
    {"call": "pause", "mode": "retract"}         ──►  {}
    anything that fails                          ──►  {"error": "why", "refused": true}
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field

from stepwell import CommandLine, EngineConfig, Launch
from stepwell.backends.config import PauseMode
from stepwell.backends.engines.api import (
    LOAD_TIMEOUT_S,
    Engine,
    EngineState,
    GenerateRequest,
    OnOutput,
    Output,
    is_canary,
    version_number,
)
from stepwell.backends.errors import (
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.datapool.config import Section
from stepwell.datapool.types import VersionSpan

LINE_LIMIT = 1 << 26
"""Bytes of a line; a prompt of ids is one."""


class LinesOptions(Section):
    """`engine.options` of this engine."""

    tokens_per_line: int = Field(default=4, ge=1)
    """Tokens in a line of a stream."""


class Lines(Engine):
    """JSON lines over TCP."""

    options = LinesOptions

    @classmethod
    def command_line(cls, config: EngineConfig, launch: Launch) -> CommandLine:
        """This file as a program."""
        own = cls.own_options(config.options)
        settings = {
            "model": launch.model_path,
            "tokenizer": str(config.model_path),
            "version": launch.weight_version,
            "host": config.host,
            "port": launch.port,
            "most": config.max_running_requests,
            "dtype": config.dtype,
            "context": config.context_length,
            "threads": config.threads,
            "seed": config.seed,
            **own.model_dump(),
        }
        return CommandLine([config.python or sys.executable, __file__, json.dumps(settings)])

    # -- what every call does -----------------------------------------------------------------

    async def _ask(self, call: str, timeout_s: float | None = None, **fields: Any) -> Any:
        """One line there, one back."""
        limit = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit):
                async for answer in self._lines(call, **fields):
                    return answer
        except TimeoutError as e:
            raise EngineTimeoutError(f"{self} did not answer {call} within {limit:g} s") from e
        raise EngineUnavailableError(f"{self} closed the connection at {call}")

    async def _lines(self, call: str, **fields: Any) -> Any:
        """One line there, all that come back."""
        place = urlsplit(self.url)
        try:
            reader, writer = await asyncio.open_connection(
                place.hostname, place.port, limit=LINE_LIMIT
            )
        except OSError as e:
            refused = isinstance(e, ConnectionRefusedError)
            raise EngineUnavailableError(f"nobody answers at {self.url}", refused=refused) from e
        try:
            writer.write(json.dumps({"call": call, **fields}).encode() + b"\n")
            while line := await reader.readline():
                answer = json.loads(line)
                if "error" in answer:
                    kind = EngineRequestError if answer["refused"] else EngineInternalError
                    words = answer["error"]
                    raise kind(f"{self}: {words}", what=f"the engine failed at {call}", words=words)
                yield answer
        except OSError as e:
            raise EngineUnavailableError(f"{self} went away at {call}: {e}") from e
        finally:
            writer.close()  # the server ends what it samples for a client that is gone

    # -- what Stepwell asks -------------------------------------------------------------------

    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        sampling = request.sampling
        if sampling.constraint is not None:
            raise EngineRequestError(f"{self} has no grammars", what="the engine has no grammars")
        if request.pictures is not None:
            what = "the engine takes no pictures"
            raise EngineRequestError(f"{self}: {what}", what=what)
        answers = self._lines(
            "sample",
            rid=request.rid,
            ids=np.asarray(request.input_ids).tolist(),
            stream=request.stream,
            tops=sampling.n_top_logprobs,
            params={
                "max_new_tokens": request.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed,
            },
        )
        async for answer in answers:
            name = answer["version"]
            tops = [tuple((i, p) for p, i in top) for top in answer["tops"]]
            output = Output(
                answer["ids"], answer["log_probs"], tops, version_number(name), is_canary(name)
            )
            if answer["finish"] is None:
                on_output(output)
                continue
            spans = [VersionSpan(version_number(v), a, b) for v, a, b in answer["spans"]]
            on_output(
                output._replace(
                    finish=answer["finish"],
                    matched=answer["matched"],
                    cached_tokens=answer["cached"],
                    spans=spans,
                )
            )
            return
        raise EngineUnavailableError(f"{self} went away in the middle of an answer")

    async def abort(self, rid: str | None = None) -> None:
        await self._ask("abort", rid=rid)

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        await self._ask("pause", timeout_s, mode=mode)

    async def continue_(self) -> None:
        await self._ask("continue")

    async def update_weights_from_disk(
        self,
        path: str,
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        await self._ask("update", timeout_s, path=str(path), version=str(version))

    async def state(self) -> EngineState:
        return EngineState.of((await self._ask("about"))["version"])

    async def about(self) -> EngineState:
        about = await self._ask("about")
        return EngineState.of(about["version"])._replace(model_path=about["path"])

    async def check(self) -> None:
        await self._ask("about")

    async def max_model_len(self) -> int:
        return int((await self._ask("about"))["context"])


# -- the server -----------------------------------------------------------------------------------


async def serve(settings: dict[str, Any]) -> None:
    """Answer at the port of `settings` until the process is stopped."""
    import torch
    from transformers import AutoTokenizer

    from stepwell.backends.engines.embedded.adapters import WeightLoadError
    from stepwell.backends.engines.embedded.loop import GenerationLoop
    from stepwell.backends.engines.embedded.model import ModelRunner
    from stepwell.backends.engines.embedded.reply import StopStrings
    from stepwell.backends.engines.embedded.request import (
        InvalidRequestError,
        Request,
        SamplingParams,
    )
    from stepwell.backends.engines.embedded.scheduler import Scheduler

    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    runner = ModelRunner(
        settings["model"],
        dtype=settings["dtype"],
        device="auto",
        context_length=settings["context"],
        max_running=settings["most"],
        n_retained=settings["most"],
    )
    scheduler = Scheduler(
        runner,
        stop_strings=StopStrings(tokenizer),
        weight_version=settings["version"],
        model_path=settings["model"],
        extra_eos_ids=(tokenizer.eos_token_id,),
        seed=settings["seed"],
    )
    loop = GenerationLoop(scheduler, threads=settings["threads"])

    async def sample(asked: dict[str, Any], reader: Any, writer: Any) -> None:
        request = Request(
            rid=asked["rid"],
            prompt_ids=asked["ids"],
            params=SamplingParams.model_validate(asked["params"]),
            return_logprob=True,
            top_logprobs_num=asked["tops"],
            stream=asked["stream"],
            stream_interval=settings["tokens_per_line"],
        )
        scheduler.validate(request)
        news = asyncio.Event()
        request.on_update = news.set
        loop.submit(request)
        gone = asyncio.create_task(reader.read(1))  # nothing comes: it ends with the connection
        gone.add_done_callback(lambda _: news.set())
        n, finished = 0, False
        try:
            while not finished:
                await news.wait()
                news.clear()
                if gone.done():
                    return
                finished = request.finished  # before the length: it is set after the last token
                upto = len(request.output_ids)
                if not finished and (not asked["stream"] or upto == n):
                    continue
                reason = request.finish_reason or {}
                answer = {
                    "ids": request.output_ids[n:upto],
                    "log_probs": request.output_log_probs[n:upto],
                    "tops": request.output_top[n:upto] if asked["tops"] else [],
                    "version": scheduler.weight_version,
                    "finish": reason.get("type") if finished else None,
                    "matched": reason.get("matched"),
                    "cached": request.cached_tokens,
                    "spans": [(s.version, s.start, s.end) for s in request.spans],
                }
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
                n = upto
        finally:
            gone.cancel()
            loop.cancel(request)

    async def obey(asked: dict[str, Any]) -> dict[str, Any]:
        match asked["call"]:
            case "abort":
                await loop.call(lambda s: s.abort(asked["rid"]))
            case "pause":
                await loop.call(lambda s: s.pause(asked["mode"]))
            case "continue":
                await loop.call(lambda s: s.resume())
            case "update":
                path, version = asked["path"], asked["version"]
                await loop.call(lambda s: s.update_weights(path, version), is_update=True)
            case "about":
                return {
                    "version": scheduler.weight_version,
                    "path": scheduler.model_path,
                    "context": runner.context_length,
                }
            case other:
                raise InvalidRequestError(f"there is no call {other!r}")
        return {}

    async def answer(reader: Any, writer: Any) -> None:
        try:
            asked = json.loads(await reader.readline())
            if asked["call"] == "sample":
                await sample(asked, reader, writer)
            else:
                writer.write(json.dumps(await obey(asked)).encode() + b"\n")
        except (InvalidRequestError, WeightLoadError, ValueError) as e:
            writer.write(json.dumps({"error": str(e), "refused": True}).encode() + b"\n")
        except Exception as e:  # the client is told, and it is raised
            writer.write(json.dumps({"error": repr(e), "refused": False}).encode() + b"\n")
            raise
        finally:
            with suppress(OSError):
                await writer.drain()
            writer.close()

    loop.start(asyncio.get_running_loop())
    place = settings["host"], settings["port"]
    server = await asyncio.start_server(answer, *place, limit=LINE_LIMIT)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
