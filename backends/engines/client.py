"""This module asks one engine (embedded, SGLang) or an SGLang router over HTTP so that the gateway,
publications and supervisors ask in the same words: one method per endpoint, typed errors.

    EngineClient(url) ── method ──► `connections.py` ──► a 2xx answer, parsed, or an `EngineError`

It is the only module of this room that the gateway sees. The gateway sends its own `/generate`
requests over the same connections, since it reads answers as they come (`gateway/engine/`). It does
not own retries, or which engine is asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import orjson

from stepwell.backends.config import PauseMode
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.datapool.types import CANARY

CONTROL_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
NOT_THERE = frozenset({404, 405, 501})
"""What a server answers that has no such endpoint."""
_NO_ROUTE = frozenset({404, 501})
"""The same to `OPTIONS`, which few endpoints take."""


def version_number(weight_version: Any) -> int:
    """Stepwell publishes decimal integers, a canary's with a suffix; SGLang's initial "default" is
    version 0.

    Raises:
        ValueError: another version scheme; somebody else publishes to this engine.
    """
    if weight_version == "default":
        return 0
    digits = weight_version.removesuffix(CANARY) if isinstance(weight_version, str) else ""
    number = int(digits) if digits.isdecimal() else weight_version
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(
            f"weight_version is {weight_version!r:.80}; Stepwell publishes decimal integers. "
            "Does something else publish weights to this engine?"
        )
    return number


def is_canary(weight_version: Any) -> bool:
    """Whether an engine has a version that is not committed (`publish.canary_share`)."""
    return isinstance(weight_version, str) and weight_version.endswith(CANARY)


def is_missing(error: EngineError) -> bool:
    """The server has no such endpoint."""
    return getattr(error, "status", None) in NOT_THERE


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Answer to a weight update. A real SGLang says `success=False` after an update without a
    pause although the weights are in force; only `/model_info` tells."""

    success: bool
    message: str


class Worker(NamedTuple):
    """An engine behind an SGLang router."""

    url: str
    kind: str = "regular"
    """`prefill` or `decode`: half an engine."""


class EngineClient:
    """Asks the engine at `url`; pickles as its url. Use as `async with`, or call `close()`, unless
    it was given the `connections` of somebody else.

    Raises (every method):
        EngineUnavailableError: nobody answers there.
        EngineTimeoutError: no answer in time.
        EngineRequestError: the engine refused (4xx).
        EngineInternalError: the engine failed (5xx), or its answer has another shape.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        connections: ConnectionPool | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.connections = ConnectionPool() if connections is None else connections

    def __repr__(self) -> str:
        return f"EngineClient({self.url!r})"

    def __reduce__(self) -> tuple[type[EngineClient], tuple[str]]:
        return EngineClient, (self.url,)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections. Idempotent."""
        self.connections.close()

    # -- generation ---------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """`/generate`. Waits without limit by default: a paused engine answers when it is
        continued."""
        body = {"input_ids": input_ids, "sampling_params": dict(sampling_params or {}), **fields}
        return await self._object("/generate", body, timeout_s=timeout_s)

    async def abort(self, rid: str | None = None) -> None:
        """Abort the request `rid`, with it those whose id starts with that; all if it is None."""
        await self._ask("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        await self._ask("/pause_generation", {"mode": mode}, timeout_s=timeout_s or self.timeout_s)

    async def continue_(self) -> None:
        await self._ask("/continue_generation", {})

    async def flush(self) -> None:
        """Drop the prefix cache; refused (EngineRequestError) while requests are in flight."""
        await self._ask("/flush_cache", {})

    # -- weights ------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self,
        path: str,
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> UpdateResult:
        """Load weights from a directory that the engine's machine can read.

        Raises:
            EngineRequestError: the engine could not load them and keeps the old ones.
        """
        body = {"model_path": str(path), "abort_all_requests": False}
        return await self._update("from_disk", body, version, flush_cache, timeout_s)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        version: int | str,
        *,
        group_name: str,
        flush_cache: bool = True,
    ) -> UpdateResult:
        """Load tensors that rank 0 of a group broadcasts in this order; within a session.

        Raises:
            EngineRequestError: the engine could not receive or load them; some may be in force.
        """
        shapes = [list(shape) for shape in shapes]
        body = {"names": list(names), "dtypes": list(dtypes), "shapes": shapes}
        body |= {"group_name": group_name}
        return await self._update("from_distributed", body, version, flush_cache, LOAD_TIMEOUT_S)

    async def init_weights_update_group(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Join a process group whose rank 0 is the sender; answers when all have joined."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._ask("/init_weights_update_group", body, timeout_s=timeout_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._ask("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_weight_update(self) -> None:
        """Open a session, outside which no tensors are taken."""
        await self._ask("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._ask("/end_weight_update", {})

    async def load_lora_adapter(self, name: str, path: str) -> dict[str, str]:
        """Load an adapter that the engine's machine can read; the loaded ones, name -> path."""
        body = {"lora_name": name, "lora_path": path}
        answer = await self._ask("/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)
        return dict(answer["loaded_adapters"] or {})

    async def unload_lora_adapter(self, name: str) -> None:
        """A real SGLang answers when no request uses it any more."""
        await self._ask("/unload_lora_adapter", {"lora_name": name})

    async def update_weight_version(self, version: int | str) -> None:
        """Rename the version in force; requests in flight stay."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._ask("/update_weight_version", body)

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        """`/weights_checker`: per rank `checksums` (parameter -> hash) and `parallelism_info`; None
        if the engine has no such endpoint."""
        body = {"action": "checksum"}
        try:
            answer = await self._ask("/weights_checker", body, timeout_s=LOAD_TIMEOUT_S)
        except EngineError as e:
            if is_missing(e):
                return None
            raise
        ranks: list[dict[str, Any]] = answer["ranks"]
        return ranks

    async def release_memory(self) -> None:
        """Free the memory of an idle, best a paused engine. A launched SGLang needs
        `--enable-memory-saver`, and weights come back only with `--enable-weights-cpu-backup`:
        `engine.release_memory` sets both."""
        await self._ask("/release_memory_occupation", {}, timeout_s=LOAD_TIMEOUT_S)

    async def resume_memory(self) -> None:
        """Take the memory back. SGLang 0.5.23 dies of it if it was not released."""
        await self._ask("/resume_memory_occupation", {}, timeout_s=LOAD_TIMEOUT_S)

    # -- information --------------------------------------------------------------------------

    async def check(self, path: str = "/health") -> None:
        """Raises unless it is well: `/health`; `/health_generate`, it generates."""
        await self._ask(path)

    async def health(self) -> bool:
        """Whether the engine answers `/health` with 200. Does not raise."""
        try:
            await self.check()
        except EngineError:
            return False
        return True

    async def has_route(self, path: str) -> bool:
        """Return true if the server has the endpoint `path`. Asks by `OPTIONS`: nothing happens."""
        try:
            await self._ask(path, method="OPTIONS")
        except (EngineRequestError, EngineInternalError) as e:
            return e.status not in _NO_ROUTE
        return True

    async def model_info(self) -> dict[str, Any]:
        return await self._object("/model_info")

    async def weight_version(self) -> int:
        return version_number((await self.model_info())["weight_version"])

    async def server_info(self) -> dict[str, Any]:
        return await self._object("/server_info")

    async def loads(self) -> dict[str, Any]:
        return await self._object("/v1/loads")

    async def served_model(self) -> dict[str, Any]:
        """The first entry of `/v1/models`: `id`, `owned_by` (the server's kind), `max_model_len`;
        empty if there is none."""
        try:
            entry = (await self._ask("/v1/models"))["data"][0]
        except (LookupError, TypeError):
            return {}
        return entry if isinstance(entry, dict) else {}

    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""
        length = (await self.served_model()).get("max_model_len")
        if type(length) is not int or length < 2:
            raise EngineInternalError(f"{self.url}/v1/models names no max_model_len")
        return length

    async def workers(self) -> list[Worker]:
        """The workers of an SGLang router: `/workers`, or `/list_workers` of one before 0.2."""
        try:
            listed = await self._ask("/workers")
        except EngineError as e:
            if not is_missing(e):
                raise
            listed = await self._ask("/list_workers")
        try:
            if "urls" in listed:
                found = [Worker(_plain(url)) for url in listed["urls"]]
            else:
                found = [
                    Worker(_plain(w["url"]), str(w.get("worker_type", "regular")))
                    for w in listed["workers"]
                ]
        except (LookupError, TypeError, AttributeError) as e:
            raise EngineInternalError(
                f"{self.url} lists no workers, but {listed!r:.200}; is it an SGLang router?"
            ) from e
        return list(dict.fromkeys(found))

    # -- transport ----------------------------------------------------------------------------

    async def _update(
        self, way: str, body: dict[str, Any], version: int | str, flush: bool, timeout_s: float
    ) -> UpdateResult:
        body |= {"weight_version": str(version), "flush_cache": flush}
        answer = await self._ask(f"/update_weights_{way}", body, timeout_s=timeout_s)
        return UpdateResult(bool(answer["success"]), str(answer["message"]))

    async def _object(self, path: str, body: Any = None, **how: Any) -> dict[str, Any]:
        answer = await self._ask(path, body, **how)
        if not isinstance(answer, dict):
            raise EngineInternalError(f"{self.url}{path} answered no object, but {answer!r:.200}")
        return answer

    async def _ask(
        self, path: str, body: Any = None, *, method: str = "", timeout_s: float | None = -1.0
    ) -> Any:
        """The answer, parsed if it is JSON; POST if there is a body. `timeout_s`: None waits
        without limit, negative is the client's default."""
        limit = self.timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        method, url = method or ("GET" if body is None else "POST"), self.url + path
        data = b"" if body is None else orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(limit),
                self.connections.request(method, url, data) as answer,
            ):
                status, content = answer.status, await answer.read()
        except TimeoutError as e:
            raise EngineTimeoutError(f"{url} did not answer within {limit:g} s") from e
        except ConnectionError as e:
            raise EngineUnavailableError(
                f"no engine answers at {url} ({e}); is it running, is the url right?",
                refused=isinstance(e, ConnectionRefusedError),
            ) from e
        _check(url, status, content)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content


def _plain(url: str) -> str:
    """A worker's url without the data-parallel rank that a router adds (`http://host:port@0`)."""
    return re.sub(r"@\d+$", "", url).rstrip("/")


def _check(url: str, status: int, content: bytes) -> None:
    if status < 400:
        return
    message = f"{url} answered {status}: {_words(content)}"
    if status < 500:
        raise EngineRequestError(message, status=status)
    raise EngineInternalError(message, status=status)


def _words(content: bytes) -> str:
    """The human part of an error's body."""
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace").strip()
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
