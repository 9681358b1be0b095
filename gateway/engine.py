"""Client of the engines' `/generate` (SGLang's HTTP API, exact ids in, exact ids out).

One call, as the caller sees it, may be several requests::

    generate ──► tokens ──► stop | length                                        Generation
                    └─► abort, not ours (a weight update) ──► generate(prompt + tokens so far,
                                                              max_new_tokens − so far) ──► …

Ids, log-probs and version spans of the requests are joined; nothing is sampled twice. A request
that fails before its first token is repeated with back-off, on the next engine if there are
several; a trajectory otherwise stays on its engine, where its prefix is cached. Cancelling the call
aborts it in the engine.

Does not own: prompts, text, tool calls; starting or updating engines (`backends/engines`).
"""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import aiohttp
import numpy as np
import orjson

from datapool.types import LogProbs, TokenIds, VersionSpan
from gateway.config import GatewayConfig
from gateway.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
)

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs, best first."""
OnTokens: TypeAlias = Callable[[Sequence[int], Sequence[float], Sequence[TopLogProbs]], None]
"""Called with new ids, their log-probs, and their alternatives (empty unless asked for)."""

_RETRIED = frozenset({429, 502, 503, 504})
_EMPTY_ABORTS = 1000
"""Aborts in a row without one token before an engine counts as broken."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as really used; `top_k` -1 is no limit."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    n_top_logprobs: int = 0
    """Alternatives returned per token."""
    constraint: tuple[str, str] | None = None
    """(kind, text): "json_schema", "regex", "ebnf" or "structural_tag"."""
    no_stop_trim: bool = False

    def wire(self, max_new_tokens: int) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.stop:
            params["stop"] = list(self.stop)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.min_p > 0:
            params["min_p"] = self.min_p
        if self.constraint is not None:
            kind, text = self.constraint
            params[kind] = text
        if self.no_stop_trim:
            params["no_stop_trim"] = True
        return params


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one call sampled. Arrays are read-only and equally long."""

    response_ids: TokenIds
    log_probs: LogProbs
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    matched: int | str | None
    """Token id or stop string that ended a `stop`."""
    cached_tokens: int
    resumes: int
    """Weight updates that cut this call."""
    top_log_probs: tuple[TopLogProbs, ...] = ()
    """One per token if `Sampling.n_top_logprobs`, else empty."""

    def cut(self, n: int) -> Generation:
        """The first `n` tokens, as if a stop string had ended them."""
        spans = tuple(
            VersionSpan(s.version, s.start, min(s.end, n)) for s in self.spans if s.start < n
        )
        return replace(
            self,
            response_ids=self.response_ids[:n],
            log_probs=self.log_probs[:n],
            top_log_probs=self.top_log_probs[:n],
            spans=spans,
            finish_reason="stop",
        )

    @property
    def policy_version(self) -> int:
        return min(s.version for s in self.spans)


@dataclass(slots=True)
class _Part:
    """One request's share of a call."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    cached_tokens: int = 0


class EngineClient:
    """All engines of one gateway. Owned by the app's lifespan; `session` is not closed here."""

    def __init__(self, session: aiohttp.ClientSession, config: GatewayConfig) -> None:
        self._session = session
        self._config = config
        self._urls = config.engine_urls
        self._down_until: dict[str, float] = {}
        self._context_length = config.context_length
        self._aborts: set[asyncio.Task[None]] = set()
        self.resumes = 0
        self.retries = 0

    async def context_length(self) -> int:
        """Tokens that fit, prompt and response; asked of an engine once."""
        if self._context_length is None:
            self._context_length = await self._ask_context_length()
        return self._context_length

    async def ready(self) -> None:
        """Raises EngineUnavailableError unless some engine is healthy."""
        failures = []
        for url in self._urls:
            try:
                async with self._session.get(
                    f"{url}/health", timeout=aiohttp.ClientTimeout(total=5)
                ) as response:
                    if response.status == 200:
                        return
                    failures.append(f"{url} answered {response.status}")
            except (aiohttp.ClientError, TimeoutError) as e:
                failures.append(f"{url}: {_words(e)}")
        raise EngineUnavailableError("no engine is healthy: " + "; ".join(failures))

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling,
        *,
        affinity: str,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample a response to `prompt_ids`.

        Args:
            affinity: calls with the same one go to the same engine (its cache holds their prefix).
            on_tokens: called with new ids as they arrive; None asks the engine for one answer.

        Raises:
            RequestError: the engine refuses the request (400).
            EngineUnavailableError, EngineTimeoutError, EngineError
        """
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                return await self._generate(prompt_ids, sampling, affinity, on_tokens)
        except TimeoutError as e:
            raise EngineTimeoutError(
                f"the engine did not finish within {self._config.request_timeout_s:g} s "
                "(gateway.request_timeout_s)"
            ) from e

    async def close(self) -> None:
        """Wait for aborts under way."""
        if self._aborts:
            await asyncio.gather(*self._aborts, return_exceptions=True)

    async def _generate(
        self, prompt_ids: TokenIds, sampling: Sampling, affinity: str, on_tokens: OnTokens | None
    ) -> Generation:
        whole = _Part()
        resumes = empty = 0
        while True:
            left = sampling.max_new_tokens - len(whole.ids)
            ids = (
                np.concatenate((prompt_ids, np.asarray(whole.ids, np.int32)))
                if whole.ids
                else prompt_ids
            )
            part = await self._request(ids, sampling, left, affinity, on_tokens)
            start = len(whole.ids)
            whole.ids += part.ids
            whole.log_probs += part.log_probs
            whole.tops += part.tops
            whole.spans += [
                VersionSpan(s.version, s.start + start, s.end + start) for s in part.spans
            ]
            if not resumes:
                whole.cached_tokens = part.cached_tokens
            finish = part.finish or {}
            if finish.get("type") != "abort":
                break
            resumes += 1
            self.resumes += 1
            if len(whole.ids) >= sampling.max_new_tokens:
                finish = {"type": "length"}
                break
            empty = 0 if part.ids else empty + 1
            if empty >= _EMPTY_ABORTS:
                raise EngineError(
                    f"the engine aborted a call {empty} times in a row before its first token; "
                    "see the engine's log"
                )
            if empty:
                await asyncio.sleep(min(0.01 * empty, 1.0))
        return _generation(whole, finish, resumes)

    async def _request(
        self,
        ids: TokenIds,
        sampling: Sampling,
        max_new_tokens: int,
        affinity: str,
        on_tokens: OnTokens | None,
    ) -> _Part:
        """One request, repeated while it fails before its first token."""
        for attempt in range(self._config.engine_retries + 1):
            url = self._pick(affinity, attempt)
            rid = uuid.uuid4().hex
            part = _Part()
            try:
                await self._send(url, rid, ids, sampling, max_new_tokens, part, on_tokens)
            except asyncio.CancelledError:
                self._abort(url, rid)
                raise
            except (aiohttp.ClientError, ConnectionError) as e:
                self._down_until[url] = _now() + 1.0
                if part.ids:
                    raise EngineUnavailableError(
                        f"{url} broke off after {len(part.ids)} tokens ({_words(e)})"
                    ) from e
                if attempt == self._config.engine_retries:
                    raise EngineUnavailableError(
                        f"no engine answered in {attempt + 1} tries; the last was {url} "
                        f"({_words(e)}). See gateway.engine_urls"
                    ) from e
                self.retries += 1
                await asyncio.sleep(min(self._config.retry_backoff_s * 2**attempt, 5.0))
            else:
                return part
        raise AssertionError("unreachable: the last try returns or raises")

    async def _send(
        self,
        url: str,
        rid: str,
        ids: TokenIds,
        sampling: Sampling,
        max_new_tokens: int,
        part: _Part,
        on_tokens: OnTokens | None,
    ) -> None:
        fields: dict[str, Any] = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(ids),
            "sampling_params": sampling.wire(max_new_tokens),
            "return_logprob": True,
            "stream": on_tokens is not None,
        }
        if sampling.n_top_logprobs:
            fields["top_logprobs_num"] = sampling.n_top_logprobs
        body = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._session.post(
            f"{url}/generate",
            data=body,
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._config.engine_connect_timeout_s
            ),
        ) as response:
            if response.status != 200:
                await _raise_refusal(url, response)
            if on_tokens is None:
                _take(url, part, _loads(url, await response.read()), incremental=False)
            else:
                await _follow(url, response, part, on_tokens)

    def _pick(self, affinity: str, attempt: int) -> str:
        """The trajectory's engine, or the next one that is not known to be down."""
        n = len(self._urls)
        if n == 0:
            raise EngineUnavailableError("gateway.engine_urls is empty; name at least one engine")
        home = zlib.crc32(affinity.encode()) % n
        ring = [self._urls[(home + i) % n] for i in range(n)]
        now = _now()
        up = [u for u in ring if self._down_until.get(u, 0.0) <= now]
        return up[0] if up else ring[attempt % n]

    def _abort(self, url: str, rid: str) -> None:
        task = asyncio.create_task(self._post_abort(url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post_abort(self, url: str, rid: str) -> None:
        try:
            async with self._session.post(
                f"{url}/abort_request", json={"rid": rid}, timeout=aiohttp.ClientTimeout(total=10)
            ):
                pass
        except (aiohttp.ClientError, TimeoutError):
            # The connection was closed with the cancellation: engines abort on that as well.
            return

    async def _ask_context_length(self) -> int:
        failures = []
        for url in self._urls:
            try:
                async with self._session.get(
                    f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)
                ) as response:
                    models = (await response.json()).get("data") or [{}]
                    length = models[0].get("max_model_len")
                    if isinstance(length, int) and length > 1:
                        return length
                    failures.append(f"{url}/v1/models names no max_model_len")
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                failures.append(f"{url}: {_words(e)}")
        raise EngineUnavailableError(
            "the context length is unknown: "
            + "; ".join(failures or ["no gateway.engine_urls"])
            + ". Start the engine or set gateway.context_length"
        )


async def _follow(
    url: str, response: aiohttp.ClientResponse, part: _Part, on_tokens: OnTokens
) -> None:
    """Read an SSE answer. SGLang's events are cumulative unless it was started otherwise, so of
    several that are already here only the last needs parsing."""
    incremental: bool | None = None
    async for events in _events(response):
        for event in events if incremental is not False else events[-1:]:
            chunk = _loads(url, event)
            n_before, n_here = len(part.ids), len(chunk.get("output_ids") or ())
            n_total = (chunk.get("meta_info") or {}).get("completion_tokens", n_here)
            if incremental is None and n_before and n_here:
                incremental = n_here != n_total
            _take(url, part, chunk, incremental=bool(incremental))
            if len(part.ids) > n_before:
                on_tokens(part.ids[n_before:], part.log_probs[n_before:], part.tops[n_before:])
            if part.finish is not None:
                return
    raise aiohttp.ServerDisconnectedError("the stream ended without a finish reason")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Payloads of the SSE events that arrived together."""
    buffer = b""
    async for data in response.content.iter_any():
        *whole, buffer = (buffer + data).split(b"\n\n")
        payloads = [e[5:].strip() for e in whole if e.startswith(b"data:")]
        payloads = [p for p in payloads if p != b"[DONE]"]
        if payloads:
            yield payloads


def _take(url: str, part: _Part, chunk: Mapping[str, Any], *, incremental: bool) -> None:
    """Bring `part` up to date with an answer or stream event."""
    if "error" in chunk:
        raise EngineError(f"{url} failed: {chunk['error']!s:.300}")
    try:
        meta = chunk["meta_info"]
        ids = chunk["output_ids"]
        entries = meta.get("output_token_logprobs") or []
    except (KeyError, TypeError) as e:
        raise EngineError(f"{url} answered without {e}; is it SGLang's /generate?") from e
    have = 0 if incremental else len(part.ids)
    part.ids += ids[have:]
    # Events of an incremental stream may carry log-probs of all tokens or of the new ones.
    entries = entries[have:] if len(entries) == len(ids) else entries[len(part.log_probs) :]
    if [e[1] for e in entries] != part.ids[len(part.log_probs) :]:
        raise EngineError(
            f"{url} returned log-probs of other tokens than output_ids; is return_logprob honoured?"
        )
    n_before = len(part.log_probs)
    part.log_probs += [e[0] for e in entries]
    if tops := meta.get("output_top_logprobs"):
        tops = tops[n_before:] if len(tops) == len(part.ids) else tops[len(tops) - len(entries) :]
        part.tops += [tuple((e[1], e[0]) for e in top or ()) for top in tops]
    finish = meta.get("finish_reason")
    if finish is None:
        return
    if finish.get("type") == "abort" and finish.get("status_code"):
        raise EngineError(f"{url} aborted the call: {finish.get('message')!s:.300}")
    part.finish = finish
    part.cached_tokens = meta.get("cached_tokens") or 0
    part.spans = _spans(url, meta, len(part.ids))


def _spans(url: str, meta: Mapping[str, Any], n: int) -> list[VersionSpan]:
    if n == 0:
        return []
    reported = meta.get("weight_versions")
    if reported:
        spans = [VersionSpan(_version(url, s["version"]), s["start"], s["end"]) for s in reported]
        spans = [s for s in spans if s.end > s.start]
        if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or spans[-1].end != n:
            raise EngineError(f"{url} reported weight_versions {reported} for {n} tokens")
        return spans
    return [VersionSpan(_version(url, meta.get("weight_version")), 0, n)]


def _version(url: str, version: Any) -> int:
    """SGLang's version strings; Stepwell publishes decimal integers, an unpublished engine says
    "default"."""
    if version == "default":
        return 0
    try:
        return int(version)
    except (TypeError, ValueError) as e:
        raise EngineError(
            f"{url} runs weight_version {version!r}; publish decimal integers ('0', '1', …)"
        ) from e


def _generation(whole: _Part, finish: Mapping[str, Any], resumes: int) -> Generation:
    if not whole.ids:
        raise EngineError("the engine returned no token")
    kind = finish.get("type")
    if kind not in ("stop", "length"):
        raise EngineError(f"the engine finished with {finish!r:.200}; expected stop or length")
    spans: list[VersionSpan] = []
    for s in whole.spans:
        if spans and spans[-1].version == s.version:
            spans[-1] = VersionSpan(s.version, spans[-1].start, s.end)
        else:
            spans.append(s)
    ids = np.asarray(whole.ids, np.int32)
    log_probs = np.asarray(whole.log_probs, np.float32)
    for array in (ids, log_probs):
        array.flags.writeable = False
    return Generation(
        response_ids=ids,
        log_probs=log_probs,
        spans=tuple(spans),
        finish_reason=kind,
        matched=finish.get("matched"),
        cached_tokens=whole.cached_tokens,
        resumes=resumes,
        top_log_probs=tuple(whole.tops),
    )


def _loads(url: str, data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise EngineError(f"{url} answered no JSON: {data[:200]!r}") from e
    if not isinstance(value, dict):
        raise EngineError(f"{url} answered {value!r:.200}; expected one object")
    return value


async def _raise_refusal(url: str, response: aiohttp.ClientResponse) -> None:
    text = (await response.text())[:300]
    if response.status == 400:
        raise RequestError(f"the engine refuses the request: {text}", None)
    if response.status in _RETRIED:
        raise aiohttp.ClientConnectionError(f"answered {response.status}: {text}")
    raise EngineError(f"{url} answered {response.status}: {text}")


def _words(e: BaseException) -> str:
    return str(e) or type(e).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
