"""This module compares an engine with what Stepwell asks of one: `stepwell doctor --engine URL`.

What only reads is asked for real, `/generate` with a prompt of two ids. Routes that would change
the engine are looked for with `OPTIONS`, so that one that serves others is not disturbed. The same
table, for people, is in `docs/design/engines.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from packaging.version import InvalidVersion, Version

from stepwell.backends.config import EngineConfig, plain_url
from stepwell.backends.engines.api import (
    Engine,
    GenerateRequest,
    Output,
    Sampling,
    version_number,
)
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.routes import NEEDED, OPTIONAL, missing_routes, why_no_ids
from stepwell.backends.engines.vllm import GENERATE, ROUTES
from stepwell.backends.errors import EngineError
from stepwell.gateway.engine.generation import Part
from stepwell.gateway.errors import GatewayError
from stepwell.show.doctor import Finding, State
from stepwell.trainer.errors import ConfigError

LIMIT_S = 60.0
_N_TOKENS = 3


def check_engine(url: str, kind: str | None = None) -> Iterator[Finding]:
    """A finding for each thing that is asked of an engine.

    Args:
        kind: `engine.kind` of it; None: as it names itself, SGLang's API where it does not.

    Raises:
        BackendConfigError: there is no such kind here.
        ConfigError: `url` is none.
    """
    try:
        url = plain_url("--engine", url, "write http://host:port")
    except ValueError as e:
        raise ConfigError(str(e)) from e
    yield from asyncio.run(_findings(url, kind))


async def _findings(url: str, kind: str | None) -> list[Finding]:
    async with EngineClient(url, timeout_s=LIMIT_S) as unknown:
        name = await unknown.name()
    if kind is None:
        kind = "vllm" if name.startswith("vllm") else "attach"
    async with connect(EngineConfig(kind=kind, urls=(url,)), url, timeout_s=LIMIT_S) as engine:
        routes = engine.routes
        found = [await _finding(engine, name, look, lost) for name, look, lost in _looks(engine)]
        if all(finding.state == "problem" for finding in found):
            return [Finding("engine", "problem", found[0].text, "start it, or correct the URL")]
        missing = await missing_routes(engine)
        for path, lost in {**routes.needed, **routes.optional}.items():
            if path not in missing:
                found.append(Finding(path, "ok", "is there"))
            else:
                state: State = "problem" if path in routes.needed else "warning"
                found.append(Finding(path, state, "is missing", f"without it: {lost}"))
        if (why := await engine.why_not_trainable()) is not None:
            what, _, remedy = why.partition("; ")
            found.append(Finding("answers", "problem", what, remedy))
        name = await engine.name()
        if (reason := await why_no_ids(engine, name, missing)) is not None:
            what, remedy = reason
            return [Finding("engine", "problem", f"{name or 'the server'} {what}", remedy), *found]
        return [_server(engine, name), *found]


async def _finding(engine: Engine, name: str, look: _Look, lost: str) -> Finding:
    try:
        told = await look(engine)
    except (EngineError, GatewayError, ConnectionError, TimeoutError, ValueError) as e:
        why = f"{e} {getattr(e, 'detail', '')}".rstrip()
        return Finding(name, "problem", why, f"without it: {lost}")
    return told if isinstance(told, Finding) else Finding(name, "ok", told)


def _server(engine: Engine, name: str) -> Finding:
    """Return a finding: the server that answers there."""
    kind, _, version = name.partition(" ")
    tested = engine.routes.tested.partition(" ")[2]
    if kind in ("sglang", "vllm") and _is_older(version, tested):
        remedy = f"what it lacks is below; pip install '{kind}>={tested}'"
        return Finding("engine", "warning", f"{name}; tested is {tested}", remedy)
    return Finding("engine", "ok", name or "does not say what it is")


def _is_older(version: str, tested: str) -> bool:
    """Return whether a version is before the tested one; not of a name such as `dev`, which a vLLM
    of a checkout has."""
    with suppress(InvalidVersion):
        return Version(version) < Version(tested)
    return False


async def _state(engine: Engine) -> str:
    return f"weights {await engine.weight_version()}"


async def _health(engine: Engine) -> str:
    await engine.check()
    return "is well"


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


async def _models(engine: Engine) -> str:
    return f"{await engine.max_model_len()} tokens fit"


async def _generate(engine: Engine) -> str | Finding:
    return await _sampled(engine, stream=False)


async def _stream(engine: Engine) -> str | Finding:
    return await _sampled(engine, stream=True)


async def _sampled(engine: Engine, *, stream: bool) -> str | Finding:
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
        name = engine.routes.generate or "sample"
        name = f"{name} (stream)" if stream else name
        return Finding(name, "warning", f"{told}; meta_info has no weight_versions", lost)
    return told


_Look: TypeAlias = Callable[[Any], Awaitable[str | Finding]]
_LOOKS: Mapping[str, _Look] = {
    "/health": _health,
    "/model_info": _model_info,
    "/v1/models": _models,
    "/server_info": _server_info,
    "/weight_info": _state,
    "/generate": _generate,
    GENERATE: _generate,
}


def _looks(engine: Engine) -> list[tuple[str, _Look, str]]:
    """Name, look and loss of each thing that is asked for real."""
    routes = engine.routes
    if not routes.read:  # an engine with no routes to look for: its methods
        return [
            ("check", _health, "the engine gets no calls"),
            ("state", _state, "weights cannot be published"),
            ("max_model_len", _models, "gateway.context_length has to be set"),
            ("sample", _generate, "no call is answered"),
            ("sample (stream)", _stream, "no streamed call is answered"),
        ]
    found = [(p, _LOOKS[p], lost) for p, lost in routes.read.items() if p in _LOOKS]
    streams = (f"{routes.generate} (stream)", _stream, "no streamed call is answered")
    return [*found, streams]


NAMES = max(map(len, (*_LOOKS, *NEEDED, *OPTIONAL, *ROUTES.needed, f"{GENERATE} (stream)")))
"""Width of the findings' names."""
