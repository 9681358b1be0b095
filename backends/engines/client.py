"""Control client of one engine (embedded or SGLang): one method per endpoint, typed errors.

Rollouts do not go through it: the gateway speaks `/generate` itself. Holds one HTTP session per
client, made on first use within the running event loop; pickles as its url.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import aiohttp
import orjson

from stepwell.backends.config import PauseMode
from stepwell.backends.errors import (
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.datapool.types import CANARY

MemoryTag: TypeAlias = Literal["weights", "kv_cache", "cuda_graph"]

CONTROL_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0


def version_number(weight_version: str) -> int:
    """Stepwell publishes decimal integers, a canary's with a suffix; SGLang's initial "default" is
    version 0.

    Raises:
        ValueError: another version scheme; somebody else publishes to this engine.
    """
    if weight_version == "default":
        return 0
    try:
        return int(weight_version.removesuffix(CANARY))
    except ValueError:
        raise ValueError(
            f"weight_version is {weight_version!r}; Stepwell publishes decimal integers. "
            "Does something else publish weights to this engine?"
        ) from None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Answer to a weight update. A real SGLang says `success=False` after an update without a
    pause although the weights are in force; only `/model_info` tells."""

    success: bool
    message: str


class EngineClient:
    """Talks to the engine at `url`. Use as `async with`, or call `close()`.

    Raises (every method):
        EngineUnavailableError: nobody answers there.
        EngineTimeoutError: no answer in time.
        EngineRequestError: the engine refused (4xx).
        EngineInternalError: the engine failed (5xx).
    """

    def __init__(self, url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

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
        """Close the session. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- generation ---------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Any:
        """`/generate`; a dict, or a list of them for a batch. Waits without limit by default: a
        paused engine answers when it is continued."""
        body = _generate_body(input_ids, sampling_params, fields)
        return await self._json("POST", "/generate", body, timeout_s=timeout_s)

    async def generate_stream(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """The cumulative chunks of a streamed `/generate`. Leaving early aborts the request."""
        body = {**_generate_body(input_ids, sampling_params, fields), "stream": True}
        try:
            async with self._http().post(
                f"{self.url}/generate", data=orjson.dumps(body), timeout=_timeout(None)
            ) as response:
                await self._raise_for_status(response, "/generate")
                async for line in response.content:
                    payload = line.strip().removeprefix(b"data: ")
                    if payload == b"[DONE]":
                        return
                    if payload:
                        yield orjson.loads(payload)
        except aiohttp.ClientError as e:
            raise EngineUnavailableError(f"{self.url}/generate broke off: {e!r}") from e

    async def abort(self, rid: str | None = None) -> None:
        """Abort the request `rid`, with it those whose id starts with that; all if it is None."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._raw("POST", "/abort_request", body)

    # -- weights ------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = -1.0) -> None:
        await self._raw("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def continue_(self) -> None:
        await self._raw("POST", "/continue_generation", {})

    async def update_weights_from_disk(
        self,
        path: str,
        version: int | str,
        *,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> UpdateResult:
        """Load weights from a directory that the engine's machine can read.

        Raises:
            EngineRequestError: the engine could not load them and keeps the old ones.
        """
        body = {
            "model_path": str(path),
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
        }
        return await self._update("/update_weights_from_disk", body, timeout_s)

    async def update_weights_from_tensor(
        self,
        payloads: Sequence[str],
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> UpdateResult:
        """Load serialised named tensors, one payload (base64) per tensor-parallel rank; within a
        session (`begin_weight_update`).

        Raises:
            EngineRequestError: the engine could not load them; some may be in force.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        return await self._update("/update_weights_from_tensor", body, timeout_s)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        version: int | str,
        *,
        group_name: str,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> UpdateResult:
        """Load tensors that rank 0 of a group broadcasts in this order; within a session.

        Raises:
            EngineRequestError: the engine could not receive or load them; some may be in force.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "weight_version": str(version),
            "flush_cache": flush_cache,
        }
        return await self._update("/update_weights_from_distributed", body, timeout_s)

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
        await self._raw("POST", "/init_weights_update_group", body, timeout_s=timeout_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._raw("POST", "/destroy_weights_update_group", {"group_name": group_name})

    async def begin_weight_update(self) -> None:
        """Open a session, outside which no tensors are taken."""
        await self._raw("POST", "/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        await self._raw("POST", "/end_weight_update", {})

    async def load_lora_adapter(self, name: str, path: str) -> dict[str, str]:
        """Load an adapter that the engine's machine can read; the loaded ones, name -> path."""
        body = {"lora_name": name, "lora_path": path}
        answer = await self._json("POST", "/load_lora_adapter", body, timeout_s=LOAD_TIMEOUT_S)
        return dict(answer["loaded_adapters"] or {})

    async def unload_lora_adapter(self, name: str) -> None:
        """A real SGLang answers when no request uses it any more."""
        await self._raw("POST", "/unload_lora_adapter", {"lora_name": name})

    async def update_weight_version(self, version: int | str) -> None:
        """Rename the version in force; requests in flight stay."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._raw("POST", "/update_weight_version", body)

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        """`/weights_checker`: per rank `checksums` (parameter -> hash) and `parallelism_info`; None
        if the engine has no such endpoint."""
        try:
            answer = await self._json(
                "POST", "/weights_checker", {"action": "checksum"}, timeout_s=LOAD_TIMEOUT_S
            )
        except EngineRequestError as e:
            if e.status in (404, 405, 501):
                return None
            raise
        ranks: list[dict[str, Any]] = answer["ranks"]
        return ranks

    async def flush(self) -> None:
        """Drop the prefix cache; refused (EngineRequestError) while requests are in flight."""
        await self._raw("POST", "/flush_cache", {})

    async def release_memory(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Free the memory of `tags` (None: all) of an idle, best a paused engine. A launched SGLang
        needs `--enable-memory-saver`, and weights come back only with
        `--enable-weights-cpu-backup`: `engine.release_memory` sets both."""
        body = {} if tags is None else {"tags": list(tags)}
        await self._raw("POST", "/release_memory_occupation", body, timeout_s=LOAD_TIMEOUT_S)

    async def resume_memory(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take memory back that was released. SGLang 0.5.23 dies of a tag that was not."""
        body = {} if tags is None else {"tags": list(tags)}
        await self._raw("POST", "/resume_memory_occupation", body, timeout_s=LOAD_TIMEOUT_S)

    async def weight_version(self) -> int:
        return version_number((await self.model_info())["weight_version"])

    # -- information --------------------------------------------------------------------------

    async def health(self, timeout_s: float = 5.0) -> bool:
        """Whether the engine answers `/health` with 200. Does not raise."""
        try:
            await self._raw("GET", "/health", timeout_s=timeout_s)
        except (EngineUnavailableError, EngineTimeoutError, EngineInternalError):
            return False
        return True

    async def model_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._json("GET", "/model_info")
        return info

    async def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = await self._json("GET", "/server_info")
        return info

    async def loads(self) -> dict[str, Any]:
        loads: dict[str, Any] = await self._json("GET", "/v1/loads")
        return loads

    async def max_model_len(self) -> int:
        models = await self._json("GET", "/v1/models")
        return int(models["data"][0]["max_model_len"])

    # -- parsing ------------------------------------------------------------------------------

    async def parse_function_call(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str | None = None
    ) -> dict[str, Any]:
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        parsed: dict[str, Any] = await self._json("POST", "/parse_function_call", body)
        return parsed

    async def separate_reasoning(self, text: str, parser: str | None = None) -> dict[str, Any]:
        body = {"text": text, "reasoning_parser": parser}
        parsed: dict[str, Any] = await self._json("POST", "/separate_reasoning", body)
        return parsed

    # -- transport ----------------------------------------------------------------------------

    async def _update(self, path: str, body: Mapping[str, Any], timeout_s: float) -> UpdateResult:
        answer = await self._json("POST", path, body, timeout_s=timeout_s)
        return UpdateResult(bool(answer["success"]), str(answer["message"]))

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers={"content-type": "application/json"},
                read_bufsize=1 << 22,
            )
        return self._session

    async def _json(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = -1.0
    ) -> Any:
        return orjson.loads(await self._raw(method, path, body, timeout_s=timeout_s))

    async def _raw(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = -1.0
    ) -> bytes:
        """`timeout_s`: None waits without limit, negative is the client's default."""
        limit = self.timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._http().request(
                method, f"{self.url}{path}", data=data, timeout=_timeout(limit)
            ) as response:
                await self._raise_for_status(response, path)
                return await response.read()
        except TimeoutError as e:
            raise EngineTimeoutError(f"{self.url}{path} did not answer within {limit:g} s") from e
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as e:
            raise EngineUnavailableError(
                f"no engine answers at {self.url}{path} ({e!r}); is it running, is the url right?",
                refused=isinstance(getattr(e, "os_error", None), ConnectionRefusedError),
            ) from e

    async def _raise_for_status(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status < 400:
            return
        message = f"{self.url}{path} answered {response.status}: {_message(await response.read())}"
        if response.status < 500:
            raise EngineRequestError(message, status=response.status)
        raise EngineInternalError(message, status=response.status)


def _timeout(limit: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=limit, sock_connect=10)


def _generate_body(
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    sampling_params: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    body: dict[str, Any] = {"sampling_params": dict(sampling_params or {}), **fields}
    if input_ids is not None:
        body["input_ids"] = input_ids
    return body


def _message(body: bytes) -> str:
    """The human part of an error body."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()
    if isinstance(parsed, dict):
        inner = parsed.get("error", parsed)
        inner = inner.get("message", inner) if isinstance(inner, dict) else inner
        return str(inner)
    return str(parsed)
