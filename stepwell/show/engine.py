"""This module compares an engine with what Stepwell asks of one: `stepwell doctor --engine URL`.

What only reads is asked for real, `/generate` with a prompt of two ids. Routes that would change
the engine are looked for with `OPTIONS`, so that one that serves others is not disturbed. The same
table, for people, is in `docs/design/engines.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

import numpy as np
from packaging.version import Version

from stepwell.backends.engines.api import GenerateRequest, Output, Sampling, version_number
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.routes import (
    NEEDED,
    OPTIONAL,
    READ,
    TESTED,
    missing_routes,
    server_name,
)
from stepwell.backends.errors import EngineError
from stepwell.gateway.engine.generation import Part
from stepwell.gateway.errors import GatewayError
from stepwell.show.doctor import Finding, State

LIMIT_S = 60.0
_N_TOKENS = 3


def check_engine(url: str) -> Iterator[Finding]:
    """A finding for each thing that is asked of an engine."""
    yield from asyncio.run(_findings(url.rstrip("/")))


async def _findings(url: str) -> list[Finding]:
    async with EngineClient(url, timeout_s=LIMIT_S) as engine:
        found = [await _finding(engine, name) for name in _READ]
        if all(finding.state == "problem" for finding in found):
            return [Finding("engine", "problem", found[0].text, "start it, or correct the URL")]
        missing = await missing_routes(engine)
        for path, lost in {**NEEDED, **OPTIONAL}.items():
            if path not in missing:
                found.append(Finding(path, "ok", "is there"))
            else:
                state: State = "problem" if path in NEEDED else "warning"
                found.append(Finding(path, state, "is missing", f"without it: {lost}"))
        return [_server(await server_name(engine), missing), *found]


async def _finding(engine: EngineClient, name: str) -> Finding:
    look, lost = _READ[name]
    try:
        told = await look(engine)
    except (EngineError, GatewayError, ConnectionError, TimeoutError, ValueError) as e:
        why = f"{e} {getattr(e, 'detail', '')}".rstrip()
        return Finding(name, "problem", why, f"without it: {lost}")
    return told if isinstance(told, Finding) else Finding(name, "ok", told)


def _server(name: str, missing: Collection[str]) -> Finding:
    """Return a finding: the server that answers there."""
    if "/generate" in missing:
        return Finding(
            "engine",
            "problem",
            f"{name or 'the server'} does not speak SGLang's API: Stepwell cannot sample from it "
            "or train it",
            f"start SGLang {TESTED} (`stepwell train … engine=sglang`), or write a plug-in that "
            "starts a server with that API (examples/plugin)",
        )
    kind, _, version = name.partition(" ")
    if kind == "sglang" and version and Version(version) < Version(TESTED):
        remedy = f"what it lacks is below; pip install 'sglang>={TESTED}'"
        return Finding("engine", "warning", f"{name}; tested is {TESTED}", remedy)
    return Finding("engine", "ok", name or "does not say what it is")


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


async def _generate(engine: EngineClient) -> str | Finding:
    return await _sampled(engine, stream=False)


async def _stream(engine: EngineClient) -> str | Finding:
    return await _sampled(engine, stream=True)


async def _sampled(engine: EngineClient, *, stream: bool) -> str | Finding:
    """Read an answer as the gateway reads it, with all that it refuses."""
    part, outputs = Part(_N_TOKENS), list[Output]()
    sampling = Sampling(_N_TOKENS, 1.0)
    prompt = np.array([1, 2], np.int32)
    request = GenerateRequest("stepwell-doctor", prompt, sampling, _N_TOKENS, stream=stream)

    def take(output: Output) -> None:
        outputs.append(output)
        part.take(output)

    async with asyncio.timeout(LIMIT_S):
        await engine.sample(request, take)
    generation = part.generation(part.finish)
    told = f"{len(generation.response_ids)} tokens of version {generation.policy_version}"
    if outputs[-1].spans is None:
        lost = "without it: tokens around a weight update get the older version"
        name = "/generate (stream)" if stream else "/generate"
        return Finding(name, "warning", f"{told}; meta_info has no weight_versions", lost)
    return told


_Look = Callable[[EngineClient], Awaitable[str | Finding]]
_READ: Mapping[str, tuple[_Look, str]] = {
    "/health": (_health, READ["/health"]),
    "/model_info": (_model_info, READ["/model_info"]),
    "/v1/models": (_models, READ["/v1/models"]),
    "/server_info": (_server_info, READ["/server_info"]),
    "/generate": (_generate, READ["/generate"]),
    "/generate (stream)": (_stream, "no streamed call is answered"),
}
NAMES = max(map(len, (*_READ, *NEEDED, *OPTIONAL)))
"""Width of the findings' names."""
