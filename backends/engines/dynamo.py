"""NVIDIA Dynamo with SGLang workers as engines: SGLang's API, of which Dynamo's frontend has the
part that samples, and each worker's system server the rest.

    engine.kind=dynamo 'engine.urls=[http://worker:8081]' engine.options.frontend=http://front:8000

    sample          frontend  /generate, which streams only: of a call that does not, one output
    length          frontend  /v1/models
    update, abort   worker    /engine/control/update_weights_from_disk, …/update_weight_version
    all else        worker    /engine/NAME, SGLang's methods, two of which it has to be told to
                              expose (`EXPOSED`)

An engine of the run is a worker: weights and pauses go to each. The frontend chooses the worker of
a call, so a call may be answered by another engine than the gateway thinks; what it samples has its
true version all the same. A paused worker takes no calls; if all are paused the frontend refuses,
and the call is sent again until one goes on. Dynamo gives requests names of its own and ends one
whose connection is closed: so is a single one aborted.

Tested against Dynamo 1.6.1 (docs/engines.md). Does not own starting it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, cast

from pydantic import field_validator

from stepwell.backends.config import plain_url
from stepwell.backends.engines.api import (
    GenerateRequest,
    OnOutput,
    Output,
    Routes,
    refusal,
)
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineInternalError, EngineRequestError
from stepwell.datapool.config import Section
from stepwell.datapool.types import VersionSpan

TESTED = "1.6.1"
EXPOSED: Final = "model_info=get_model_info server_info=get_server_info"
"""`DYN_SGLANG_ENGINE_ROUTES` of each worker."""
_UPDATE, _RENAME = "/update_weights_from_disk", "/update_weight_version"
_OF_FRONTEND = ("/generate", "/v1/models", "/v1/chat/completions")
_REFUSES = "ValueError: "
"""SGLang's exception for a request that cannot be served; Dynamo hides the words of others."""
_IN_FORCE = "Weights were updated"
"""SGLang's words for an update without a pause that left prefixes in the cache: its version is the
old one still, which tells (docs/design/engines.md)."""
_PAUSED = "not ready to serve requests"
"""The frontend's words, with 503, while no worker takes calls."""
_LOOKS_S = 0.1
"""Seconds until such a call is sent again."""
_UNEXPOSED = "weights cannot be published (DYN_SGLANG_ENGINE_ROUTES of the worker)"
ROUTES = Routes(
    read=MappingProxyType(
        {
            "/health": "the engine gets no calls",
            "/model_info": _UNEXPOSED,
            "/server_info": _UNEXPOSED,
            "/v1/models": "calls name no length that fits",
            "/generate": "no call is answered (DYN_SGLANG_ENABLE_GENERATE=1 of the frontend)",
        }
    ),
    needed=MappingProxyType(
        dict.fromkeys(
            ("/pause_generation", "/continue_generation", _UPDATE, _RENAME),
            "weights cannot be published",
        )
    ),
    tested=f"Dynamo {TESTED}",
    generate="/generate",
)


class DynamoOptions(Section):
    """`engine.options` of `engine.kind=dynamo`."""

    frontend: str
    """Base url of Dynamo's frontend, which takes the calls; `engine.urls` are the system servers of
    its workers (`DYN_SYSTEM_PORT`)."""

    @field_validator("frontend")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        return plain_url("frontend", url, "write http://host:port")


class DynamoEngine(EngineClient):
    """An SGLang worker of Dynamo's, at the address of its system server."""

    options = DynamoOptions
    transports = ("disk",)
    lends_memory = False
    is_behind_router = True
    routes = ROUTES

    def _at(self, path: str) -> str:
        if path in _OF_FRONTEND:
            return cast(DynamoOptions, self.own).frontend + path
        if path == "/health":
            return self.url + path
        return f"{self.url}/engine{'/control' * (path in (_UPDATE, _RENAME))}{path}"

    async def _ask(
        self, path: str, body: Any = None, *, method: str = "", timeout_s: float | None = -1.0
    ) -> Any:
        """The answer, as `HttpEngine` says. A worker answers 200 to what failed."""
        answer = await super()._ask(path, body, method=method, timeout_s=timeout_s)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            words = str(answer.get("message"))
            if not words.startswith(_IN_FORCE):
                raise refusal(self._at(path), 400, "answered that it failed", words)
        return answer

    async def has_route(self, path: str) -> bool:
        """Return true if there is the endpoint `path`. A worker calls a method whatever way it is
        asked, so it is sent a list, which none of them takes: nothing happens."""
        if not self._at(path).startswith(f"{self.url}/engine/"):
            return await super().has_route(path)
        try:
            await self._ask(path, [])
        except (EngineRequestError, EngineInternalError) as e:
            return e.status != 404
        return True

    # -- generation ---------------------------------------------------------------------------

    @cached_property
    def _calls(self) -> dict[str, asyncio.Timeout]:
        """Calls under way by their names here."""
        return {}

    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        """Sample a response by the frontend's `/generate`."""
        if request.pictures is not None:
            words = "serve the model with SGLang, or with the embedded engine (engine.kind)"
            raise refusal(self._generate_url, 400, "takes no pictures: it is Dynamo", words)
        outputs: list[Output] = []

        def take(output: Output) -> None:
            outputs.append(output)
            if request.stream:
                on_output(output)

        call = asyncio.timeout(None)
        self._calls[request.rid] = call
        try:
            async with call:
                await self._stream(request._replace(stream=True), take)
        except TimeoutError:
            if not call.expired():
                raise
            take(_aborted(outputs))
        except EngineInternalError as e:  # a stream has begun when the worker looks at the call
            if _REFUSES not in e.words:
                raise
            words = e.words.partition(_REFUSES)[2]
            raise refusal(self._generate_url, 400, "refused the call", words) from e
        finally:
            self._calls.pop(request.rid, None)
        if not request.stream:
            whole = outputs[-1]._replace(
                ids=[*chain.from_iterable(o.ids for o in outputs)],
                log_probs=[*chain.from_iterable(o.log_probs for o in outputs)],
                top_log_probs=[*chain.from_iterable(o.top_log_probs for o in outputs)],
            )
            on_output(whole)

    async def _stream(self, request: GenerateRequest, on_output: OnOutput) -> None:
        """Stream a response, once a worker takes the call."""
        while True:
            try:
                return await super().sample(request, on_output)
            except EngineInternalError as e:
                if e.status != 503 or _PAUSED not in e.words:
                    raise
            await self.check()  # of one that is gone nobody says so
            await asyncio.sleep(_LOOKS_S)

    async def abort(self, rid: str | None = None) -> None:
        """End all requests of this worker, or the one of this object's: its connection is
        closed."""
        if rid is None:
            name = (await self.state()).name
            await self._ask(_RENAME, {"new_version": name, "abort_all_requests": True})
        elif (call := self._calls.get(rid)) is not None and not call.expired():
            call.reschedule(asyncio.get_running_loop().time())

    # -- information --------------------------------------------------------------------------

    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""
        length = (await self.served_model()).get("context_window")
        if type(length) is not int or length < 2:
            raise EngineInternalError(f"{self._at('/v1/models')} names no context_window")
        return length

    async def weight_hashes(self) -> None:
        """None: a worker has no route whose answer names its ranks."""


def _aborted(outputs: Sequence[Output]) -> Output:
    """The end of a call whose connection was closed. Nobody says its spans, but each output the
    version that the worker had then."""
    spans: list[VersionSpan] = []
    n = 0
    for version, ids in ((output.version or 0, output.ids) for output in outputs):
        start = spans[-1].end if spans else 0
        if spans and spans[-1].version == version:
            start = spans.pop().start
        n += len(ids)
        spans.append(VersionSpan(version, start, n))
    last = outputs[-1] if outputs else Output([], [])
    return Output([], [], (), last.version, last.is_canary, "abort", spans=spans or None)
