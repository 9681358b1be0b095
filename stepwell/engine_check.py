"""This module compares an engine with what Stepwell asks of one: `stepwell doctor --engine URL`.

What only reads is asked for real, `/generate` with a prompt of two ids. Routes that would change
the engine are looked for with `OPTIONS`, so that one that serves others is not disturbed. The same
table, for people, is in `docs/design/engines.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import orjson

from stepwell.backends.engines.client import EngineClient, version_number
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.errors import EngineError
from stepwell.doctor import Finding, State
from stepwell.gateway.engine.answers import Part, events, read_answer
from stepwell.gateway.errors import GatewayError

LIMIT_S = 60.0
_N_TOKENS = 3
_MISSING = frozenset({404, 501})
NEEDED: Mapping[str, str] = {
    "/abort_request": "calls that nobody waits for are sampled to their end",
    "/pause_generation": "weights cannot be published",
    "/continue_generation": "weights cannot be published",
    "/update_weights_from_disk": "weights cannot be published",
}
"""Routes without which a run does not train, and what is lost."""
OPTIONAL: Mapping[str, str] = {
    "/flush_cache": "the prefix cache cannot be dropped",
    "/weights_checker": "publications do not verify the weights that an engine has",
    "/update_weight_version": "no weight_transport but disk, no restart on committed weights",
    "/init_weights_update_group": "no engine.weight_transport=distributed",
    "/destroy_weights_update_group": "no engine.weight_transport=distributed",
    "/update_weights_from_distributed": "no engine.weight_transport=distributed",
    "/load_lora_adapter": "no engine.weight_transport=lora",
    "/unload_lora_adapter": "no engine.weight_transport=lora",
    "/release_memory_occupation": "no engine.release_memory",
    "/resume_memory_occupation": "no engine.release_memory",
    "/v1/loads": "`stepwell top` shows no load",
}
"""Routes of single features, and what is lost without each."""


def check_engine(url: str) -> Iterator[Finding]:
    """A finding for each thing that is asked of an engine."""
    yield from asyncio.run(_findings(url.rstrip("/")))


async def _findings(url: str) -> list[Finding]:
    found = []
    async with EngineClient(url, timeout_s=LIMIT_S) as engine:
        for name, (look, lost) in _READ.items():
            try:
                told = await look(engine)
            except (EngineError, GatewayError, ConnectionError, TimeoutError, ValueError) as e:
                why = f"{e} {getattr(e, 'detail', '')}".rstrip()
                found.append(Finding(name, "problem", why, lost))
            else:
                found.append(told if isinstance(told, Finding) else Finding(name, "ok", told))
        if all(finding.state == "problem" for finding in found):
            return [Finding("engine", "problem", found[0].text, "start it, or correct the URL")]
        lacking: tuple[tuple[Mapping[str, str], State], ...] = (
            (NEEDED, "problem"),
            (OPTIONAL, "warning"),
        )
        for routes, state in lacking:
            for path, lost in routes.items():
                if await _is_there(engine, path):
                    found.append(Finding(path, "ok", "is there"))
                else:
                    found.append(Finding(path, state, "is missing", f"without it: {lost}"))
    return found


async def _is_there(engine: EngineClient, path: str) -> bool:
    async with (
        asyncio.timeout(LIMIT_S),
        engine.connections.request("OPTIONS", f"{engine.url}{path}", b"") as answer,
    ):
        await answer.read()
        return answer.status not in _MISSING


async def _health(engine: EngineClient) -> str:
    await engine.check()
    return "answers 200"


async def _model_info(engine: EngineClient) -> str:
    info = await engine.model_info()
    if not isinstance(info.get("model_path"), str):
        raise ValueError(f"model_path is {info.get('model_path')!r:.80}, no text")
    version = version_number(info.get("weight_version"))
    return f"{info['model_path']}, weights {version}"


async def _server_info(engine: EngineClient) -> str | Finding:
    info = await engine.server_info()
    missing = [name for name in ("device", "dtype") if not info.get(name)]
    if not missing:
        return f"device {info['device']}, dtype {info['dtype']}"
    taken = {"device": "cuda (NCCL for weights, no exact comparison)", "dtype": "auto"}
    told = "; ".join(f"{name} is missing, taken as {taken[name]}" for name in missing)
    return Finding("/server_info", "warning", told, "an engine on CPUs has to say device: cpu")


async def _models(engine: EngineClient) -> str:
    return f"{await engine.max_model_len()} tokens fit"


def _request(*, stream: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": _N_TOKENS, "temperature": 1.0}
    asked = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
    return {**asked, "stream": stream, "rid": "stepwell-doctor"}


async def _generate(engine: EngineClient) -> str:
    return await _sampled(engine.connections, engine.url, stream=False)


async def _stream(engine: EngineClient) -> str:
    return await _sampled(engine.connections, engine.url, stream=True)


async def _sampled(connections: ConnectionPool, url: str, *, stream: bool) -> str:
    """Read an answer as the gateway reads it, with all that it refuses."""
    part = Part(_N_TOKENS)
    body = orjson.dumps(_request(stream=stream))
    async with (
        asyncio.timeout(LIMIT_S),
        connections.request("POST", f"{url}/generate", body) as answer,
    ):
        if answer.status != 200:
            words = (await answer.read()).decode(errors="replace")
            raise ValueError(f"answered {answer.status}: {words:.200}")
        if stream:
            async for payloads in events(answer.chunks()):
                for payload in payloads:
                    part.take(read_answer(payload), is_event=True)
        else:
            part.take(read_answer(await answer.read()))
    generation = part.generation(part.finish)
    return f"{len(generation.response_ids)} tokens of version {generation.policy_version}"


_Look = Callable[[EngineClient], Awaitable[str | Finding]]
_READ: Mapping[str, tuple[_Look, str]] = {
    "/health": (_health, "without it: the engine gets no calls"),
    "/model_info": (_model_info, "without it: weights cannot be published"),
    "/v1/models": (_models, "without it: set gateway.context_length and engine.context_length"),
    "/server_info": (_server_info, "without it: weights cannot be published"),
    "/generate": (_generate, "without it: no call is answered"),
    "/generate (stream)": (_stream, "without it: no streamed call is answered"),
}
