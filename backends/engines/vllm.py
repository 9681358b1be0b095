"""vLLM as an engine: its token-in-token-out API as `api.Engine`, and its command line.

    sample    /inference/v1/generate             ids, processed log-probs; spans in the last event
    abort     /inference/v1/abort_requests · all: /abort_requests
    pause     /pause?mode=abort|keep, and of `retract` /reset_prefix_cache?reset_running_requests
    update    (pause?mode=wait ─►) /collective_rpc reload_weights ─► /update_weight_version
              ─► /reset_prefix_cache (─► resume)
              by NCCL: /init_weight_transfer_engine · /start_weight_update ─► /update_weights, a
              bucket each ─► /finish_weight_update with the version
    state     /weight_info

    engine.kind=vllm                            started and supervised, at `engine.model_path`
    engine.kind=vllm engine.urls=[http://…]     attached: started with `FLAGS` and `ENV`

Log-probs are those of the distribution that was sampled from: after the temperature, and after
top-p, top-k and min-p where a request has them (SGLang's are before these three). An update that
vLLM cannot load ends its engine core, so a directory is looked at before it is sent.

Tested against vLLM 0.32.0 by `make test-vllm`. Does not own running the process (`supervisor.py`),
or which version goes where (`weights/`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import orjson

from stepwell.backends.config import EngineConfig, PauseMode
from stepwell.backends.engines.api import (
    LOAD_TIMEOUT_S,
    Bucket,
    EngineState,
    GenerateRequest,
    HttpEngine,
    Meeting,
    OnOutput,
    Output,
    Routes,
    TopLogProbs,
    is_canary,
    is_missing,
    refusal,
    unavailable,
    version_number,
)
from stepwell.backends.engines.commands import CommandLine, Launch, interpreter
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineUnavailableError,
)
from stepwell.datapool.types import VersionSpan

TESTED = "0.32.0"
"""vLLM's version that `make test-vllm` runs."""
GENERATE: Final = "/inference/v1/generate"
_NO_PUBLISHING = "weights cannot be published"
_NO_CLEAN_ABORT = "calls that nobody waits for are sampled to their end"
_NCCL = (
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
ROUTES = Routes(
    read=MappingProxyType(
        {
            "/health": "the engine gets no calls",
            "/v1/models": "gateway.context_length and engine.context_length have to be set",
            "/weight_info": "its weight version is not known (VLLM_SERVER_DEV_MODE=1)",
            GENERATE: "no call is answered (--enable-scale-out)",
        }
    ),
    needed=MappingProxyType(
        {
            "/inference/v1/abort_requests": _NO_CLEAN_ABORT,
            "/abort_requests": _NO_CLEAN_ABORT,
            **dict.fromkeys(
                (
                    "/pause",
                    "/resume",
                    "/is_paused",
                    "/collective_rpc",
                    "/update_weight_version",
                    "/reset_prefix_cache",
                ),
                f"{_NO_PUBLISHING} (VLLM_SERVER_DEV_MODE=1)",
            ),
        }
    ),
    optional=MappingProxyType(
        {
            "/weight_checker": "publications do not verify the weights that an engine has",
            **dict.fromkeys(_NCCL, "no engine.weight_transport=nccl (VLLM_SERVER_DEV_MODE=1)"),
        }
    ),
    features=MappingProxyType({"engine.weight_transport=nccl": _NCCL}),
    tested=f"vLLM {TESTED}",
    generate=GENERATE,
)

MASKED = -100.0
"""Bias that leaves a token no probability; vLLM takes none below."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, but for 0: another policy than is recorded."""
PROCESSED = "processed_logprobs"
MOST_TOPS = 20
"""Alternatives per token that agents may ask for."""
FLAGS = (
    "--enable-scale-out",  # the route that takes and gives token ids
    "--enable-prompt-tokens-details",  # cached tokens of a prompt
    "--logprobs-mode",
    PROCESSED,
    "--max-logprobs",
    str(MOST_TOPS + 1),
)
"""Flags without which a server does not answer as a run needs it."""
ENV: Mapping[str, str] = MappingProxyType({"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"})
"""Environment likewise: the routes of weights and pauses are there in this mode alone."""
CPU_ENV: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine is not vLLM's alone
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(Path(__file__).resolve().parent / "vllm_cpu"),
    }
)
_EMPTY_HASH = hashlib.sha256().hexdigest()


WHOLE_BUCKET = 1 << 40
"""Bytes after which vLLM would cut what it receives: each of our buckets is one of its own."""


class VllmEngine(HttpEngine):
    """A real vLLM server."""

    transports = ("disk", "nccl")
    why_not = MappingProxyType(
        {
            "ipc": " (vLLM takes handles over HTTP as a pickle alone, with "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1: whoever reaches its port then runs code there)"
        }
    )
    group_backend = "raw_nccl"
    routes = ROUTES
    _waits = False
    """An update has paused it, to name its version before anything is sampled."""

    @classmethod
    def command_line(cls, config: EngineConfig, launch: Launch) -> CommandLine:
        """vLLM's OpenAI server with its token-in-token-out route, on GPUs or without."""
        on_cpu = launch.on_cpu
        dtype = "float32" if on_cpu and config.dtype == "auto" else config.dtype
        python = interpreter(config, "vllm", "pip install vllm")
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", launch.model_path, "--tokenizer", str(config.model_path)]
        argv += ["--host", config.host, "--port", str(launch.port), "--dtype", dtype]
        argv += ["--max-num-seqs", str(config.max_running_requests), "--seed", str(config.seed)]
        argv += ["--stream-interval", str(config.stream_interval), *FLAGS]
        # A line per request in the log would push out what an error shows of it.
        argv += ["--uvicorn-log-level", "warning"]
        if config.context_length is not None:
            argv += ["--max-model-len", str(config.context_length)]
        if config.weight_transport == "nccl":
            argv += ["--weight-transfer-config", '{"backend": "nccl"}']
        if on_cpu:
            argv.append("--enforce-eager")
        env = {**ENV, **(CPU_ENV if on_cpu else {})}
        return CommandLine([*argv, *launch.extra_args, *config.extra_args], env)

    # -- generation ---------------------------------------------------------------------------

    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        url = f"{self.url}{GENERATE}"
        if request.pictures is not None:
            words = "serve the model with SGLang, or with the embedded engine (engine.kind)"
            raise refusal(url, 400, "takes no pictures: it is vLLM", words)
        if 0 < request.sampling.temperature < LEAST_TEMPERATURE:
            words = f"temperature is {request.sampling.temperature:g}; send 0, or 0.01 or more"
            raise refusal(url, 400, "takes no temperature between 0 and 0.01: it is vLLM", words)
        reader = _Reader(url, request, on_output)
        try:
            status, content = await self.connections.request(
                "POST", url, self._body(request), on_data=reader.feed if request.stream else None
            )
        except ConnectionError as e:
            raise unavailable(url, e) from e
        if status != 200:
            words = content.decode(errors="replace")[:300]
            raise refusal(url, status, f"answered {status}", words)
        if not request.stream:
            reader.take(content)
            reader.end()
        elif not reader.has_ended:
            raise EngineUnavailableError(f"{url}: the stream ended without a finish reason")

    def _body(self, request: GenerateRequest) -> Sequence[bytes]:
        fields: dict[str, Any] = {
            "request_id": request.rid,
            "sampling_params": _params(request),
            "stream": request.stream,
        }
        if request.stream:
            fields["stream_options"] = {"include_usage": True}
        if request.adapter is not None:
            fields["model"] = request.adapter
        if request.pieces:
            ids = self.connections.ids_json.parts(request.pieces)
        else:
            array = np.ascontiguousarray(request.input_ids)
            ids = [orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)]
        return [b'%b,"token_ids":' % orjson.dumps(fields)[:-1], *ids, b"}"]

    async def abort(self, rid: str | None = None) -> None:
        if rid is None:
            await self._ask("/abort_requests", {})
        else:
            ids = [f"generate-tokens-{rid}"]  # as its route names them
            await self._ask("/inference/v1/abort_requests", {"request_ids": ids})

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        limit = timeout_s or self.timeout_s
        its = "abort" if mode == "abort" else "keep"
        await self._ask(f"/pause?mode={its}", {}, timeout_s=limit)
        if mode == "retract":
            await self._drop_cache(limit)

    async def continue_(self) -> None:
        await self._ask("/resume", {})

    # -- weights ------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self,
        path: str,
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Load weights from a directory that the engine's machine and this one can read.

        Raises:
            EngineRequestError: they do not fit what it serves, or are not whole; nothing changed.
            EngineInternalError: it could not load them. Its core has ended then.
        """
        await asyncio.to_thread(_check_loadable, str(path), await self._root())
        # Its version is set by a request of its own: what is sampled between the two would be
        # named wrongly, so nothing is.
        try:
            await self._pause_to_load(timeout_s)
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            await self._ask("/collective_rpc", load, timeout_s=timeout_s)
            await self._ask("/update_weight_version", {"new_version": str(version)})
            if flush_cache:
                await self._drop_cache(self.timeout_s)
        except BaseException:  # also a cancellation: it must not stay paused
            with suppress(EngineError):  # the first error is the reason
                await self._continue_loaded()
            raise
        await self._continue_loaded()

    async def _pause_to_load(self, timeout_s: float) -> None:
        """Let it finish what runs, unless somebody paused it."""
        self._waits = not (await self._object("/is_paused", has=("is_paused",)))["is_paused"]
        if self._waits:  # from now on, also if it does not answer: it may be paused
            await self._ask("/pause?mode=wait", {}, timeout_s=timeout_s)

    async def _continue_loaded(self) -> None:
        waits, self._waits = self._waits, False
        if waits:
            await self.continue_()

    async def init_weights_update_group(self, meeting: Meeting, rank: int) -> None:
        """Join by NCCL's unique id; answers when all have joined."""
        info = {
            "nccl_unique_id_b64": meeting.unique_id,
            "rank_offset": rank,
            "world_size": meeting.world_size,
            "packed": True,
            "packed_buffer_size_bytes": WHOLE_BUCKET,
            "packed_num_buffers": 1,
        }
        path = "/init_weight_transfer_engine"
        await self._ask(path, {"init_info": info}, timeout_s=meeting.timeout_s)

    async def destroy_weights_update_group(self, name: str) -> None:
        await self._ask("/shutdown_weight_transfer_engine", {})

    async def begin_weight_update(self) -> None:
        """Open a session; nothing is sampled until it is closed."""
        try:
            await self._pause_to_load(LOAD_TIMEOUT_S)
            await self._ask("/start_weight_update", {}, timeout_s=LOAD_TIMEOUT_S)
        except BaseException:  # also a cancellation: it must not stay paused
            with suppress(EngineError):  # the first error is the reason
                await self._continue_loaded()
            raise

    async def update_weights_from_distributed(
        self, bucket: Bucket, group: str, *, version: int | str | None, flush_cache: bool = True
    ) -> None:
        """Take a bucket. The cache is dropped with the last one."""
        info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        await self._ask("/update_weights", {"update_info": info}, timeout_s=LOAD_TIMEOUT_S)
        if flush_cache:
            await self._drop_cache(self.timeout_s)

    async def end_weight_update(self, version: int | str | None = None) -> None:
        """Close the session; what was loaded is named `version`."""
        body = {} if version is None else {"weight_version": str(version)}
        try:
            await self._ask("/finish_weight_update", body, timeout_s=LOAD_TIMEOUT_S)
        finally:
            await self._continue_loaded()

    async def _drop_cache(self, timeout_s: float) -> None:
        """Forget all prefixes; requests that are held compute theirs again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        answer = await self._object(path, {}, has=("success",), timeout_s=timeout_s)
        if not answer["success"]:
            raise EngineInternalError(f"{self.url}{path} did not drop the cache: {answer!r:.200}")

    async def state(self) -> EngineState:
        info = await self._object("/weight_info", has=("weight_version",))
        return EngineState.of(info["weight_version"])

    async def about(self) -> EngineState:
        state = await self.state()
        try:
            size = (await self._object("/get_world_size", has=("world_size",)))["world_size"]
            state = state._replace(ranks=int(size))
        except EngineError as e:
            if not is_missing(e):
                raise
        if state.version:
            return state  # which directory its last update named, it does not say
        return state._replace(model_path=await self._root())

    async def _root(self) -> str:
        """Directory of the weights that it was started with."""
        return str((await self.served_model()).get("root") or "")

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        try:
            answer = await self._object(
                "/weight_checker",
                {"action": "checksum"},
                has=("checksums",),
                timeout_s=LOAD_TIMEOUT_S,
            )
        except EngineError as e:
            if is_missing(e):
                return None
            raise
        hashes: dict[str, str] = answer["checksums"]
        # On a CPU it packs weights for its kernels and hashes the tensors that are left empty.
        if _EMPTY_HASH in hashes.values():
            return None
        return [{"checksums": hashes, "parallelism_info": []}]

    # -- information --------------------------------------------------------------------------

    async def check(self) -> None:
        await self._ask("/health")

    async def why_not_trainable(self) -> str | None:
        path = "/server_info?config_format=json"
        try:
            info = await self._object(path, has=("vllm_config",), timeout_s=LOAD_TIMEOUT_S)
            mode = info["vllm_config"]["model_config"]["logprobs_mode"]
        except (EngineError, LookupError, TypeError):
            return None  # it does not say
        if mode == PROCESSED:
            return None
        return (
            f"gives {mode}, which are not of the distribution that is sampled from; start vLLM "
            f"with --logprobs-mode {PROCESSED} (docs/engines.md)"
        )

    async def name(self) -> str:
        words: list[object] = []
        with suppress(EngineError):
            words.append((await self.served_model()).get("owned_by"))
        with suppress(EngineError):
            words.append((await self._object("/version")).get("version"))
        return " ".join(word for word in words if isinstance(word, str))


def _params(request: GenerateRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # The sampled token is listed first, whatever its rank, and counts.
        "logprobs": sampling.n_top_logprobs + 1 if sampling.n_top_logprobs else 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        params["stop"] = sampling.stop
        params["skip_special_tokens"] = False  # they are looked for in the whole text
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if (seed := request.drawing_seed) is not None:
        params["seed"] = seed
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    if sampling.constraint is not None:
        kind, text = sampling.constraint
        params["structured_outputs"] = {_CONSTRAINTS[kind]: text}
    if request.masked_ids:
        params["logit_bias"] = dict.fromkeys(map(str, request.masked_ids), MASKED)
    return params


_CONSTRAINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json_schema": "json",
        "regex": "regex",
        "ebnf": "grammar",
        "structural_tag": "structural_tag",
    }
)
"""Our name of a constraint -> vLLM's."""


# -- what the route answers -----------------------------------------------------------------------


class _TopEntry(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_TopEntry] = msgspec.field(default_factory=list)


class _LogProbs(msgspec.Struct):
    content: list[_Entry] = msgspec.field(default_factory=list)


class _Span(msgspec.Struct):
    version: Any
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Answer(msgspec.Struct):
    """An answer, whole or an event: the choices hold what is new."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_answers = msgspec.json.Decoder(_Answer)


class _Reader:
    """Answers of the route → outputs. The last one waits for the usage, which comes behind it."""

    def __init__(self, url: str, request: GenerateRequest, on_output: OnOutput) -> None:
        self.has_ended = False
        self._url = url
        self._n_tops = request.sampling.n_top_logprobs
        self._on_output = on_output
        self._rest = b""
        self._n = 0
        """Tokens so far."""
        self._last_id: int | None = None
        self._last: Output | None = None
        self._cached = 0

    def feed(self, data: bytes) -> bool:
        """Take a piece of a stream; return true when it has ended."""
        *events, self._rest = (self._rest + data).replace(b"\r", b"").split(b"\n\n")
        for event in events:
            payload = event[5:].strip() if event.startswith(b"data:") else b""
            if payload == b"[DONE]":
                self.end()
            elif payload:
                self.take(payload)
        return self.has_ended

    def end(self) -> None:
        """Hand on the output with the finish reason, if there was one."""
        if self._last is not None:
            self.has_ended = True
            self._on_output(self._last._replace(cached_tokens=self._cached))

    def take(self, payload: bytes) -> None:
        """Read an answer, whole or an event."""
        try:
            answer = _answers.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            what = f"the engine answered in another shape than vLLM's {GENERATE} ({e})"
            raise self._nonsense(what, f"{payload[:200]!r}") from e
        if answer.error is not None:
            words = f"{answer.error!s:.300}"
            raise EngineInternalError(
                f"{self._url} failed: {words}", what="the engine failed", words=words
            )
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            self._cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        for choice in answer.choices:
            output = self._output(choice)
            if choice.finish_reason is None:
                self._on_output(output)
            else:
                self._last = output

    def _output(self, choice: _Choice) -> Output:
        ids = choice.token_ids
        entries = [] if choice.logprobs is None else choice.logprobs.content
        if [e.token_id for e in entries] != ids:
            raise self._nonsense("the engine returned log-probs of other tokens than token_ids")
        tops: list[TopLogProbs] = []
        if self._n_tops:
            tops = [_tops(e.top_logprobs, self._n_tops) for e in entries]
        self._n += len(ids)
        if ids:
            self._last_id = ids[-1]
        log_probs = [e.logprob for e in entries]
        if choice.finish_reason is None:
            return Output(ids, log_probs, tops)
        matched = choice.stop_reason
        if matched is None and choice.finish_reason == "stop":
            matched = self._last_id  # the model's own end: vLLM names others only
        version, canary, spans = self._versions(choice.weight_versions)
        return Output(
            ids, log_probs, tops, version, canary, choice.finish_reason, matched, 0, spans
        )

    def _versions(
        self, reported: Sequence[_Span] | None
    ) -> tuple[int | None, bool, Sequence[VersionSpan] | None]:
        """The version that sampled last, true if it is a canary's, and the spans of all tokens."""
        if not reported:
            if self._n:
                raise self._nonsense(
                    "the engine's answer has no weight_versions: it is older than vLLM "
                    f"{TESTED}; see `stepwell doctor --engine URL`"
                )
            return None, False, None
        try:
            spans = [VersionSpan(version_number(s.version), s.start, s.end) for s in reported]
        except ValueError as e:
            what = "the engine's weight_version is no number; publish decimal integers"
            raise self._nonsense(what, f"but {[s.version for s in reported]!r:.200}") from e
        return spans[-1].version, is_canary(reported[-1].version), spans

    def _nonsense(self, what: str, words: str = "") -> EngineInternalError:
        return EngineInternalError(
            f"{self._url}: {what} {words}".rstrip(), status=200, what=what, words=words
        )


def _tops(entries: list[_TopEntry], n: int) -> TopLogProbs:
    """The n likeliest: the sampled token is listed even if it is none of them."""
    best = sorted(entries, key=lambda e: e.rank or n + 1)
    return tuple((e.token_id, e.logprob) for e in best[:n] if (e.rank or n + 1) <= n)


# -- weights that would end the engine ------------------------------------------------------------


def _check_loadable(path: str, base: str) -> None:
    """Look at a directory of weights as vLLM will read it.

    Args:
        base: directory of the weights that it was started with; not readable here, shapes are not
            compared.

    Raises:
        EngineRequestError: it lacks files, one is cut short, or a tensor has another shape.
    """
    shapes = _shapes(Path(path))
    try:
        wanted = _shapes(Path(base))
    except EngineRequestError:
        wanted = {}
    for name in shapes.keys() & wanted.keys():
        if shapes[name] != wanted[name]:
            raise _not_loadable(
                path, f"{name} has the shape {shapes[name]}, and the engine's {wanted[name]}"
            )
    if wanted and not shapes.keys() & wanted.keys():
        raise _not_loadable(path, f"it has no tensor of the engine's, but {sorted(shapes)[:3]}")


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor in the folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _not_loadable(str(folder), "there are no safetensors files on this machine")
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header: dict[str, Any] = json.loads(stream.read(size))
            tensors = {n: t for n, t in header.items() if n != "__metadata__"}
            end = 8 + size + max((t["data_offsets"][1] for t in tensors.values()), default=0)
            if file.stat().st_size != end:
                raise ValueError(f"it has {file.stat().st_size} bytes instead of {end}")
            shapes |= {name: t["shape"] for name, t in tensors.items()}
        except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as e:
            raise _not_loadable(str(folder), f"{file.name} is damaged: {e}") from e
    return shapes


def _not_loadable(path: str, why: str) -> EngineRequestError:
    words = f"Failed to load {path}: {why}"
    return EngineRequestError(words, status=400, what="the engine was not given it", words=words)
