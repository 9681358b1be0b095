"""This module asks one engine that speaks SGLang's API (embedded, SGLang) or an SGLang router over
HTTP so that the gateway, publications and supervisors ask in the same words: `api.Engine`, and one
method for each other endpoint, with typed errors.

    EngineClient(url) ── method ──► `connections.py` ──► a 2xx answer, parsed, or an `EngineError`
                └────── sample ───► bytes ──► _Answer (types) ──► Output, as they come

A stream's events hold all tokens so far, or those that are new (`--incremental-streaming-output`).
Of cumulative ones only what is new is parsed: what was there before is compared as bytes. It does
not own retries, or which engine is asked.
"""

from __future__ import annotations

import asyncio
import re
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import orjson
from cachetools import LRUCache

from stepwell.backends.config import PauseMode, WeightTransport
from stepwell.backends.engines.api import (
    LOAD_TIMEOUT_S,
    Bucket,
    EngineState,
    GenerateRequest,
    HttpEngine,
    Meeting,
    OnOutput,
    Output,
    PromptPictures,
    TopLogProbs,
    is_canary,
    is_missing,
    refusal,
    unavailable,
    version_number,
)
from stepwell.backends.engines.connections import IdsJson
from stepwell.backends.engines.routes import SGLANG
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineUnavailableError,
)
from stepwell.datapool.types import TokenIds, VersionSpan

T = TypeVar("T")

UNKNOWN_PICTURES: Final = 409
"""Status of an engine that is sent the digest of a picture that it has not."""
HELD_PICTURES = 4096
MASKED = -1e9
"""Added to the logits of ids that a model may not sample."""
EMBEDDED: Final = "stepwell-embedded"
"""`version` in `/server_info` of the engine whose hashes follow from the checkpoint."""


class Worker(NamedTuple):
    """An engine behind an SGLang router."""

    url: str
    kind: str = "regular"
    """`prefill` or `decode`: half an engine."""


class EngineClient(HttpEngine):
    """Asks the engine at `url` (`api.Engine`) that speaks SGLang's API.

    Raises (every method): as `api.Engine` says.
    """

    transports: ClassVar[tuple[WeightTransport, ...]] = ("disk", "delta", "nccl", "ipc", "lora")
    lends_memory = True
    routes = SGLANG
    _is_embedded: bool | None = None
    """None: it was not asked yet."""

    @cached_property
    def _held(self) -> LRUCache[tuple[str, str], bool]:
        """Pictures that the engine has, if it is one that keeps them: owners and digests."""
        return LRUCache(HELD_PICTURES)

    # -- generation ---------------------------------------------------------------------------

    @cached_property
    def _generate_url(self) -> str:
        return self._at("/generate")

    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        """Sample a response by `/generate`, as `api.Engine.sample` says."""
        url, pictures = self._generate_url, request.pictures
        n_prompt = None if pictures is None else len(request.input_ids)
        reader = None
        if request.stream:
            reader = _StreamReader(url, on_output, n_prompt, request.known_version)
        more = b""
        if request.masked_ids:
            if await self._masks_by_itself():
                request = request._replace(masked_ids=())
            if pictures is not None:
                more = await self._picture_fields(pictures)
        try:
            status, content = await self.connections.request(
                "POST",
                url,
                _body(request, self.connections.ids_json, more),
                on_data=None if reader is None else reader.feed,
            )
            if status == UNKNOWN_PICTURES and pictures is not None:
                # It was restarted, or keeps others now.
                for picture in pictures.places:
                    self._held.pop((pictures.owner, picture.digest), None)
                more = await self._picture_fields(pictures)
                status, content = await self.connections.request(
                    "POST",
                    url,
                    _body(request, self.connections.ids_json, more),
                    on_data=None if reader is None else reader.feed,
                )
        except ConnectionError as e:
            raise unavailable(url, e) from e
        if status != 200:
            words = content.decode(errors="replace")[:300]
            raise refusal(url, status, f"answered {status}", words)
        if pictures is not None and self._is_embedded:
            self._held.update(
                ((pictures.owner, picture.digest), True) for picture in pictures.places
            )
        if reader is None:
            on_output(_read_whole(url, content, n_prompt))
        elif not reader.has_ended:
            raise EngineUnavailableError(f"{url}: the stream ended without a finish reason")

    async def _masks_by_itself(self) -> bool:
        """It is the embedded engine, which knows the ids of its model's vision tokens, and keeps
        the pictures that it has seen."""
        if self._is_embedded is None:
            try:
                version = (await self.server_info()).get("version")
            except EngineError as e:
                if not is_missing(e):
                    raise
                version = None
            self._is_embedded = version == EMBEDDED
        return self._is_embedded

    async def _picture_fields(self, pictures: PromptPictures) -> bytes:
        """Fields of a prompt with pictures, as JSON behind others."""
        fields = {"extra_key": pictures.owner} if pictures.owner else {}
        digests = [picture.digest for picture in pictures.places]
        needed = dict.fromkeys(digests)
        if self._is_embedded:
            needed = {d: None for d in needed if (pictures.owner, d) not in self._held}
        pngs = await pictures.read([*needed]) if needed else {}
        return await asyncio.to_thread(_image_fields, fields, digests, pngs)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """`/generate` as it answers, whatever is asked. Waits without limit by default: a paused
        engine answers when it is continued."""
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
    ) -> None:
        """Load weights from a directory that the engine's machine can read.

        Raises:
            EngineRequestError: the engine could not load them and keeps the old ones.
        """
        body = {"model_path": str(path), "abort_all_requests": False}
        await self._update("from_disk", body, version, flush_cache, timeout_s)

    async def update_weights_from_distributed(
        self, bucket: Bucket, group: str, *, version: int | str | None, flush_cache: bool = True
    ) -> None:
        """Take a bucket that rank 0 of the group broadcasts; within a session.

        Raises:
            EngineRequestError: the engine could not receive or load it; some may be in force.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        await self._update("from_distributed", body, version, flush_cache, LOAD_TIMEOUT_S)

    async def update_weights_from_tensor(
        self, handles: Sequence[str], *, version: int | str | None, flush_cache: bool = True
    ) -> None:
        """Take tensors from memory that is shared with the sender; likewise."""
        body = {"serialized_named_tensors": list(handles)}
        await self._update("from_tensor", body, version, flush_cache, LOAD_TIMEOUT_S)

    async def init_weights_update_group(self, meeting: Meeting, rank: int) -> None:
        """Join a process group whose rank 0 is the sender; answers when all have joined."""
        body = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": rank,
            "world_size": meeting.world_size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._ask("/init_weights_update_group", body, timeout_s=meeting.timeout_s)

    async def destroy_weights_update_group(self, name: str) -> None:
        await self._ask("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        """Open a session; one that a former publisher left open is closed first."""
        try:
            await self._ask("/begin_weight_update", {})
        except EngineRequestError:
            await self.end_weight_update()
            await self._ask("/begin_weight_update", {})

    async def end_weight_update(self, version: int | str | None = None) -> None:
        """Close the session. The embedded engine loads now what it brought, if `version` names it;
        SGLang loaded it as it came, and does not read the field."""
        body = {} if version is None else {"weight_version": str(version)}
        await self._ask("/end_weight_update", body, timeout_s=LOAD_TIMEOUT_S)

    async def load_lora_adapter(self, name: str, path: str) -> dict[str, str]:
        """Load an adapter that the engine's machine can read; the loaded ones, name -> path."""
        body = {"lora_name": name, "lora_path": path}
        answer = await self._object(
            "/load_lora_adapter", body, has=("loaded_adapters",), timeout_s=LOAD_TIMEOUT_S
        )
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
            answer = await self._object(
                "/weights_checker", body, has=("ranks",), timeout_s=LOAD_TIMEOUT_S
            )
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

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Take the memory back. SGLang 0.5.23 dies of it if it was not released."""
        body = {"tags": list(tags)} if tags else {}
        await self._ask("/resume_memory_occupation", body, timeout_s=LOAD_TIMEOUT_S)

    # -- information --------------------------------------------------------------------------

    async def check(self) -> None:
        """Raise unless `/health` is 200."""
        await self._ask("/health")

    async def check_generates(self) -> None:
        """Raise unless it generates a token; an engine of a plug-in may have no such endpoint."""
        try:
            await self._ask("/health_generate")
        except EngineError as e:
            if not is_missing(e):
                raise

    async def model_info(self) -> dict[str, Any]:
        return await self._object("/model_info")

    async def state(self) -> EngineState:
        """Return the weight version, as `api.Engine.state` says. An engine without `/model_info`
        does not say."""
        try:
            return EngineState.of((await self.model_info()).get("weight_version"))
        except EngineError as e:
            if not is_missing(e):
                raise
            return EngineState()

    async def weight_version(self) -> int:
        answer = await self._object("/model_info", has=("weight_version",))
        return version_number(answer["weight_version"])

    async def about(self) -> EngineState:
        info = await self._object("/model_info", has=("model_path",))
        server = await self.server_info()
        sizes = [int(server.get(f"{kind}_size") or 1) for kind in ("tp", "pp")]
        return EngineState.of(info.get("weight_version"))._replace(
            model_path=info["model_path"],
            dtype=str(server.get("dtype") or "auto"),
            device=str(server.get("device") or "cuda").partition(":")[0],
            ranks=sizes[0] * sizes[1],
            is_embedded=server.get("version") == EMBEDDED,
        )

    async def name(self) -> str:
        words: list[object] = []
        with suppress(EngineError):
            words.append((await self.served_model()).get("owned_by"))
        with suppress(EngineError):
            words.append((await self.server_info()).get("version"))
        return " ".join(word for word in words if isinstance(word, str))

    async def server_info(self) -> dict[str, Any]:
        return await self._object("/server_info")

    async def loads(self) -> dict[str, Any]:
        return await self._object("/v1/loads")

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

    async def _update(
        self,
        way: str,
        body: dict[str, Any],
        version: int | str | None,
        flush: bool,
        timeout_s: float,
    ) -> None:
        if version is not None:
            body |= {"weight_version": str(version)}
        body |= {"flush_cache": flush}
        # Its `success` is not read: a real SGLang says false after an update without a pause
        # although the weights are in force. Only its version tells.
        await self._object(
            f"/update_weights_{way}", body, has=("success", "message"), timeout_s=timeout_s
        )


def _plain(url: str) -> str:
    """A worker's url without the data-parallel rank that a router adds (`http://host:port@0`)."""
    return re.sub(r"@\d+$", "", url).rstrip("/")


# -- /generate as SGLang words it --------------------------------------------------------------


def _image_fields(
    fields: Mapping[str, Any], digests: Sequence[str], pngs: Mapping[str, bytes]
) -> bytes:
    """The fields with `image_data`: a picture for each digest in base64, or the digest of one that
    the engine has. Long; run it in a thread."""
    data = [
        b2a_base64(pngs[digest], newline=False) if digest in pngs else f"sha256:{digest}".encode()
        for digest in digests
    ]
    inner = orjson.dumps(fields)[1:-1]
    return b'%b%b,"image_data":["%b"]' % (b"," * bool(inner), inner, b'","'.join(data))


def _one_placeholder_each(ids: TokenIds, pictures: PromptPictures) -> TokenIds:
    """Ids in which each picture has one placeholder: the engine expands it."""
    is_kept = np.ones(len(ids), bool)
    for picture in pictures.places:
        is_kept[picture.at + 1 : picture.end] = False
    return ids[is_kept]


def _body(request: GenerateRequest, ids_json: IdsJson, more: bytes = b"") -> Sequence[bytes]:
    """Parts of the JSON of a request; `more`: further fields."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    if sampling.constraint is not None:
        kind, text = sampling.constraint
        params[kind] = text
    if request.masked_ids:
        params["logit_bias"] = {str(i): MASKED for i in request.masked_ids}
    fields: dict[str, Any] = {
        "rid": request.rid,
        "sampling_params": params,
        "return_logprob": True,
        "stream": request.stream,
    }
    if sampling.n_top_logprobs:
        fields["top_logprobs_num"] = sampling.n_top_logprobs
    if request.adapter is not None:
        fields["lora_path"] = request.adapter
    if request.pictures is not None:
        array = _one_placeholder_each(request.input_ids, request.pictures)
        ids = [orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)]
    elif request.pieces:
        ids = ids_json.parts(request.pieces)
    else:
        array = np.ascontiguousarray(request.input_ids)
        ids = [orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)]
    return [b'%b%b,"input_ids":' % (orjson.dumps(fields)[:-1], more), *ids, b"}"]


_Entry: TypeAlias = tuple[float, int, Any]
"""Log-prob, id and text of a token."""
_ENTRY_LOG_PROB, _ENTRY_ID = itemgetter(0), itemgetter(1)
_Raw: TypeAlias = msgspec.Raw


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    status_code: int | None = None
    message: Any = None


class _Span(msgspec.Struct):
    version: Any
    start: int
    end: int


class _About(msgspec.Struct):
    """`meta_info`, but for log-probs."""

    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: Any = None
    """Weight version that the engine has now."""
    weight_versions: list[_Span] | None = None
    """Weight version that sampled each span of tokens; known once the request has ended."""
    output_top_logprobs: list[list[_Entry] | None] | None = None


class _Meta(_About):
    output_token_logprobs: list[_Entry] | None = None


class _Answer(msgspec.Struct):
    """An answer of `/generate`."""

    output_ids: list[int] = msgspec.field(default_factory=list)
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class _EventMeta(_About):
    output_token_logprobs: _Raw = msgspec.field(default_factory=lambda: _Raw(b"[]"))


class _Event(msgspec.Struct):
    """The same as an event of a stream, with what may be long unparsed."""

    output_ids: _Raw = msgspec.field(default_factory=lambda: _Raw(b"[]"))
    meta_info: _EventMeta = msgspec.field(default_factory=_EventMeta)
    error: Any = None


_answers = msgspec.json.Decoder(_Answer)
_events = msgspec.json.Decoder(_Event)
_ids = msgspec.json.Decoder(list[int])
_entries = msgspec.json.Decoder(list[_Entry] | None)


def _check_prompt(url: str, meta: _About, n_prompt: int) -> None:
    """
    Raises:
        EngineInternalError: the prompt that the engine made of placeholders and pictures has
            another length than ours, so it saw other pictures, or tokenised the prompt again.
    """
    if meta.prompt_tokens != n_prompt:
        what = (
            f"the engine's prompt has {meta.prompt_tokens} tokens and the one that was sent "
            f"{n_prompt} with its pictures; do engine and gateway serve the same model folder?"
        )
        raise _nonsense(url, what)


def _read_whole(url: str, data: bytes, n_prompt: int | None = None) -> Output:
    try:
        answer = _answers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise _shape_error(url, e, data) from e
    meta, ids = answer.meta_info, answer.output_ids
    if answer.error is not None or meta.finish_reason is None or meta.finish_reason.type == "abort":
        _check_error(url, answer.error, meta)
    if n_prompt is not None:
        _check_prompt(url, meta, n_prompt)
    entries = meta.output_token_logprobs or []
    return _output(url, ids, entries, meta, len(ids))


class _StreamReader:
    """Server-sent events of `/generate` → outputs.

    Of cumulative events that are here at once only the last is looked at, unless the engine's
    version changed among them.
    """

    def __init__(
        self,
        url: str,
        on_output: OnOutput,
        n_prompt: int | None = None,
        known_version: int | None = None,
    ) -> None:
        """
        Args:
            n_prompt: tokens of a prompt with pictures, which the engine makes itself.
            known_version: see `GenerateRequest`.
        """
        self.has_ended = False
        self._n_prompt = n_prompt
        self._known_version = known_version
        self._url = url
        self._on_output = on_output
        self._rest = b""
        self._n = 0
        """Tokens so far."""
        self._ids_json = self._entries_json = b""
        """Their JSON in the event before, without the closing bracket."""
        self._version: bytes | None = None

    def feed(self, data: bytes) -> bool:
        """Return true when the answer has ended."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # servers end lines in either way, and JSON has none within
            data = data.replace(b"\r", b"")
        # A line is an event, as JSON has no line end: to look for two takes ten times as long.
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        at = _last_event(data, end)
        if at >= 0 and data[at + 5 : at + 16].strip() == b"[DONE]":
            end, at = at, _last_event(data, at)
        if at < 0:
            return False
        line = _line(data, at)
        last = self._read(line)
        new = self._new_ids(last)
        first_at = 0 if data.startswith(b"data:") else data.find(b"\ndata:") + 1
        if first_at == at and self._version is not None:
            return self._take(last, new)
        is_first = self._version is None
        if self._version is None:
            self._version = _version_field(_line(data, first_at))
        if new is None or not _have_version(data, first_at, end, self._version):
            self._version = _version_field(line)
            lines = data[first_at:end].split(b"\n")
            events = [self._read(line) for line in lines if line.startswith(b"data:")]
        elif is_first and first_at < at and _version_number(last) != self._known_version:
            # The first tokens may be of the version that it was known for.
            events = [self._read(_line(data, first_at)), last]
        else:
            return self._take(last, new)
        return any(self._take(event, self._new_ids(event)) for event in events)

    def _read(self, line: bytes) -> _Event:
        payload = memoryview(line)[5:]  # behind `data:`
        try:
            event = _events.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise _shape_error(self._url, e, bytes(payload).strip()) from e
        if event.error is not None or event.meta_info.finish_reason is not None:
            _check_error(self._url, event.error, event.meta_info)
        return event

    def _new_ids(self, event: _Event) -> list[int] | None:
        """Ids of an event that were not there before; None: it begins behind some that are missing,
        as of an engine that was started to stream only what is new."""
        n = event.meta_info.completion_tokens or 0
        new = self._behind(_ids, bytes(event.output_ids), self._ids_json)
        if new is not None and self._n + len(new) == n:
            return new
        ids = self._parsed(_ids, event.output_ids)
        begins = max(n - len(ids), 0)
        return None if begins > self._n else ids[self._n - begins :]

    def _take(self, event: _Event, new: list[int] | None) -> bool:
        """Hand on what is `new` of an event; true: it is the last one."""
        meta = event.meta_info
        if self._n_prompt is not None:
            _check_prompt(self._url, meta, self._n_prompt)
        ids_json = bytes(event.output_ids)
        entries_json = bytes(meta.output_token_logprobs)
        if new is None:
            begins = (meta.completion_tokens or 0) - len(self._parsed(_ids, ids_json))
            missing = begins - self._n
            raise _nonsense(self._url, f"the engine's stream leaves out {missing} tokens")
        n = self._n + len(new)
        entries = self._behind(_entries, entries_json, self._entries_json)
        if entries is None or len(entries) != len(new):
            entries = _of_new(self._parsed(_entries, meta.output_token_logprobs) or [], new, n)
        output = _output(self._url, new, entries, meta, n)
        self._n = n
        self._ids_json, self._entries_json = ids_json[:-1], entries_json[:-1]
        if new or output.finish is not None:
            self._on_output(output)
        self.has_ended = output.finish is not None
        return self.has_ended

    def _behind(self, decoder: msgspec.json.Decoder[T], json: bytes, known: bytes) -> T | None:
        """Items of a list behind the `known` ones; None: it does not begin with those."""
        n = len(known)
        if n < 2 or not json.startswith(known) or json[n : n + 1] not in (b",", b"]"):
            return None
        return self._parsed(decoder, b"[" + json[n:].removeprefix(b","))

    def _parsed(self, decoder: msgspec.json.Decoder[T], json: bytes | _Raw) -> T:
        try:
            return decoder.decode(json)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            field = "output_ids" if decoder is _ids else "output_token_logprobs"
            raise _shape_error(self._url, f"{field}: {e}", bytes(json)) from e


def _last_event(data: bytes, end: int) -> int:
    """Byte at which the last line of `data[:end]` begins that is an event; -1: there is none."""
    if (before := data.rfind(b"\ndata:", 0, end)) >= 0:
        return before + 1
    return 0 if data.startswith(b"data:", 0, end) else -1


def _line(data: bytes, at: int) -> bytes:
    """The line that begins at this byte."""
    return data[at : data.find(b"\n", at)]


def _have_version(data: bytes, start: int, end: int, version: bytes) -> bool:
    """Return true if every event of `data[start:end]` names this version. An event is a line and an
    empty one; of other streams it is not known."""
    codes = np.frombuffer(data, np.uint8, end - start, start)
    n_ends = int(np.count_nonzero(codes == _LINE_END))
    return bool(version) and 2 * data.count(version, start, end) == n_ends


def _version_number(event: _Event) -> int | None:
    """Weight version that an event names; None: it names none, or no number."""
    try:
        return _version_of(event.meta_info.weight_version)[0]
    except (ValueError, TypeError):
        return None


def _output(url: str, ids: list[int], entries: list[_Entry], meta: _About, n: int) -> Output:
    """
    Args:
        ids: the new ones, of which `entries` are the log-probs.
        n: tokens of the request so far.
    """
    if [*map(_ENTRY_ID, entries)] != ids:
        what = "the engine returned log-probs of other tokens than output_ids; is return_logprob "
        raise _nonsense(url, f"{what}honoured?")
    tops: list[TopLogProbs] = []
    if meta.output_top_logprobs:
        tops = [
            tuple((e[1], e[0]) for e in top or ())
            for top in _of_new(meta.output_top_logprobs, ids, n)
        ]
        if len(tops) != len(ids):
            what = f"the engine returned {len(tops)} top log-probs of {len(ids)} tokens"
            raise _nonsense(url, what)
    version: int | None = None
    try:
        version, canary = _version_of(meta.weight_version)
    except (ValueError, TypeError):
        canary = is_canary(meta.weight_version)
        if meta.finish_reason is not None and n and meta.weight_versions is None:
            raise _version_error(url, meta.weight_version) from None
    log_probs = [*map(_ENTRY_LOG_PROB, entries)]
    finish = meta.finish_reason
    if finish is None:
        return Output(ids, log_probs, tops, version, canary)
    return Output(
        ids,
        log_probs,
        tops,
        version,
        canary,
        finish.type,
        finish.matched,
        meta.cached_tokens or 0,
        _spans(url, meta.weight_versions) if meta.weight_versions else None,
    )


@lru_cache(maxsize=64, typed=True)
def _version_of(weight_version: Any) -> tuple[int, bool]:
    """Its number, and true for a canary's.

    Raises:
        ValueError, TypeError: it is none that Stepwell publishes.
    """
    return version_number(weight_version), is_canary(weight_version)


def _spans(url: str, reported: list[_Span]) -> list[VersionSpan]:
    try:
        return [VersionSpan(_version_of(s.version)[0], s.start, s.end) for s in reported]
    except (ValueError, TypeError) as e:
        raise _version_error(url, reported) from e


def _of_new(entries: list[T], new: Sequence[int], n: int) -> list[T]:
    """Entries of the `new` tokens: an event has those of all `n` tokens or of the new ones."""
    return entries[len(entries) - len(new) :] if len(entries) in (len(new), n) else entries


_LINE_END: Final = 0x0A
_VERSION_FIELD: Final = re.compile(rb'"weight_version"\s*:\s*(?:"[^"]*"|[^\s,}"]+[\s,}])')
"""No text of a reply matches: its quotation marks are escaped."""


def _version_field(event: bytes) -> bytes:
    """The bytes of an event that name the engine's version; empty if it names none."""
    found = _VERSION_FIELD.search(event)
    return b"" if found is None else found[0]


def _check_error(url: str, error: Any, meta: _About) -> None:
    """
    Raises:
        EngineError: the answer says that the engine failed, or refuses the request.
    """
    if error is not None:
        words = f"{error!s:.300}"
        raise EngineInternalError(f"{url} failed: {words}", what="the engine failed", words=words)
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code:
        words = f"{finish.message!s:.300}"
        raise refusal(url, finish.status_code, "aborted the call", words)


def _nonsense(url: str, what: str, words: str = "") -> EngineInternalError:
    return EngineInternalError(
        f"{url}: {what} {words}".rstrip(), status=200, what=what, words=words
    )


def _shape_error(url: str, e: object, data: bytes) -> EngineInternalError:
    what = f"the engine answered in another shape than SGLang's /generate ({e}); is it SGLang?"
    return _nonsense(url, what, f"{data[:200]!r}")


def _version_error(url: str, reported: Any) -> EngineInternalError:
    if reported is None:
        what = (
            "the engine's answer has no weight_version: its server is too old, or not SGLang; see "
            "`stepwell doctor --engine URL`"
        )
        return _nonsense(url, what)
    what = "the engine's weight_version is no number; publish decimal integers ('0', '1', …)"
    return _nonsense(url, what, f"but {reported!r:.200}")
