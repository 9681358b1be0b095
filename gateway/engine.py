"""Client of the engines' `/generate` (SGLang's HTTP API, exact ids in, exact ids out).

One call, as the caller sees it, may be several requests::

    generate ──► tokens ──► stop | length                                        Generation
                    ├─► abort, not ours (a weight update) ──► generate(prompt + tokens so far,
                    │                                         max_new_tokens − so far) ──► …
                    └─► the engine is lost ──► the same on another engine

Ids, log-probs and version spans of the requests are joined; nothing is sampled twice. What a lost
engine had streamed is kept if its version is certain, else the call fails, because a client may
have it already. Without a stream there is nothing to keep, and the request is made again. A call
fails over `engine_retries` times in all, with back-off where there is no other engine. Cancelling
the call aborts it in the engine.

Agents read errors: they name no address and no path. Those, and the engine's own words, go to the
log.

Does not own: prompts, text, tool calls; which engine (`fleet.py`) and whether it is well
(`engine_checks.py`); starting or updating engines (`backends/engines`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

import aiohttp
import numpy as np
import orjson

from stepwell.datapool.types import LogProbs, TokenIds, VersionSpan
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.engine_checks import EngineChecks, is_canary, version_number
from stepwell.gateway.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
)
from stepwell.gateway.fleet import Engine, Fleet, backoff_s
from stepwell.gateway.kept import KeptConnections
from stepwell.gateway.pace import Pace
from stepwell.gateway.wiring import Wiring

log = logging.getLogger(__name__)

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs, best first."""
OnTokens: TypeAlias = Callable[
    [Sequence[int], Sequence[float], Sequence[TopLogProbs], int | None], None
]
"""Called with new ids, their log-probs, their alternatives (empty unless asked for), and the weight
version that the engine has now (None: it does not say)."""

_JSON = {"content-type": "application/json"}
_RETRIED = frozenset({429, 502, 503, 504})
_DROPPED_BY_ROUTERS = frozenset({"structural_tag"})
"""Constraints that sglang-router 0.3.2 leaves out of what it forwards, without a word."""
_ADDRESSES = re.compile(
    r"\w+://[^\s\"']+|(?<![\w/])(?:/[\w.@+-]+){2,}|\b\d+(?:\.\d+){3}(?::\d+)?\b"
)
"""URLs, files and IP addresses in an engine's own words."""
CONNECT_TIMEOUT_S = 10.0
"""A connection to an engine must be there within this."""
MOST_TOKENS = 2**31
LEAST_LOG_PROB = -3e38
"""What float32 holds."""
_EMPTY_ABORTS = 1000
"""Aborts in a row without one token before an engine counts as broken."""


@dataclass(slots=True)
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


@dataclass(slots=True, eq=False)
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

    most: int = MOST_TOKENS
    """Tokens that the engine may return."""
    vocabulary: int = MOST_TOKENS
    """Ids lie in [0, this)."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    cached_tokens: int = 0
    version: int | None = None
    """What the engine had when it was asked; None: not known."""
    canary: bool = False
    """It is not committed."""
    is_certain: bool = True
    """And at every event since."""
    reported: int | None = None
    """What the engine said last that it has."""

    def certain_spans(self) -> list[VersionSpan] | None:
        """The spans of a part without an end; None: they are not known."""
        if self.version is None or not self.is_certain or len(self.log_probs) != len(self.ids):
            return None
        return [VersionSpan(self.version, 0, len(self.ids))]

    def add(self, part: _Part) -> None:
        start = len(self.ids)
        self.ids += part.ids
        self.log_probs += part.log_probs
        self.tops += part.tops
        self.spans += [VersionSpan(s.version, s.start + start, s.end + start) for s in part.spans]


class _LostError(Exception):
    """A request found no engine, or its engine did not answer to the end."""


class _BusyError(_LostError):
    """The engine answered that it cannot, for the moment."""


class EngineClient:
    """All engines of one gateway. Owned by the app's lifespan; `session` is not closed here."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: GatewayConfig,
        wiring: Wiring,
        vocabulary: int = MOST_TOKENS,
    ) -> None:
        """`vocabulary`: of the served model; the engines' token ids lie in [0, this)."""
        self._session = session
        self._config = config
        self._wiring = wiring
        self._vocabulary = vocabulary
        self._fleet = Fleet(
            wiring.engine_urls,
            circuit_failures=config.engine_circuit_failures,
            circuit_open_s=config.engine_circuit_open_s,
            version_grace_s=config.engine_version_grace_s,
            remembered=REMEMBERED,
            canary_share=wiring.canary_share,
        )
        self._checks = EngineChecks(session, config, self._fleet, via_router=wiring.via_router)
        self._kept = KeptConnections(CONNECT_TIMEOUT_S)
        self.pace = Pace()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._context_length = config.context_length
        self._aborts: set[asyncio.Task[None]] = set()
        self.resumes = 0
        """Weight updates that cut a call."""
        self.recoveries = 0
        """Calls that went on, on another engine, from what a lost one had streamed."""
        self.retries = 0
        """Tries after one that failed, on whichever engine."""
        self.lost_at = float("-inf")
        """When a call last found no engine, or lost the one it had (`time.monotonic()`)."""

    async def start(self) -> None:
        """Begin to watch the engines. Idempotent."""
        await self._checks.start()

    async def context_length(self) -> int:
        """Tokens that fit, prompt and response; asked of an engine once. Waits for an engine as
        long as `generate` does.

        Raises:
            EngineUnavailableError: none says it.
        """
        failures = 0
        while self._context_length is None:
            try:
                self._context_length = await self._checks.context_length()
            except EngineUnavailableError:
                self.lost_at = time.monotonic()
                failures += 1
                if failures > self._config.engine_retries:
                    raise
                await self._back_off(failures, set())
        return self._context_length

    @property
    def version(self) -> int | None:
        """The newest weight version that an engine was seen to have."""
        return self._fleet.version

    async def ready(self) -> None:
        """Raises EngineUnavailableError unless some engine is healthy."""
        await self._checks.first_healthy()

    def statistics(self) -> dict[str, Any]:
        return {
            "resumes": self.resumes,
            "recoveries": self.recoveries,
            "retries": self.retries,
            **self._fleet.statistics(),
        }

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
        kind = sampling.constraint[0] if sampling.constraint is not None else ""
        if self._wiring.via_router and kind in _DROPPED_BY_ROUTERS:
            raise RequestError(
                f"a {kind} does not get through the SGLang router that this gateway generates "
                "through; use a JSON schema, regex or EBNF grammar, or engine.router=none",
                None,
            )
        whole = _Part()
        resumes = empty = failures = 0
        tried: set[Engine] = set()
        deadline = _now() + self._config.request_timeout_s
        while True:
            part = _Part(sampling.max_new_tokens - len(whole.ids), self._vocabulary)
            try:
                if _now() >= deadline:
                    raise self._too_late()
                engine = self._fleet.pick(affinity, _now(), tried)
                if engine is None:
                    raise _LostError(self._fleet.why_none())
                tried.add(engine)
                await self._send(engine, prompt_ids, whole.ids, sampling, part, on_tokens, deadline)
            except _LostError as e:
                if not isinstance(e, _BusyError):
                    self.lost_at = time.monotonic()
                failures += 1
                if part.ids:
                    self._keep(whole, part, e)
                    if len(whole.ids) >= sampling.max_new_tokens:
                        return _generation(whole, {"type": "length"}, resumes)
                if failures > self._config.engine_retries:
                    log.warning("no engine answered in %d tries; last: %s", failures, e)
                    raise EngineUnavailableError(
                        f"no engine answered in {failures} tries; see the gateway's log and "
                        "gateway.engine_retries"
                    ) from e
                self.retries += 1
                await self._back_off(failures, tried)
                continue
            tried.clear()
            if not whole.ids:
                whole.cached_tokens = part.cached_tokens
            whole.add(part)
            finish = part.finish or {}
            if finish.get("type") != "abort":
                return _generation(whole, finish, resumes)
            resumes += 1
            self.resumes += 1
            if len(whole.ids) >= sampling.max_new_tokens:
                return _generation(whole, {"type": "length"}, resumes)
            empty = 0 if part.ids else empty + 1
            if empty >= _EMPTY_ABORTS:
                raise EngineError(
                    f"the engine aborted a call {empty} times in a row before its first token; "
                    "see the engine's log"
                )
            if empty:
                await asyncio.sleep(min(0.01 * empty, 1.0))

    async def close(self) -> None:
        """Stop watching; wait for aborts under way. Idempotent."""
        await self._checks.close()
        self._kept.close()
        if self._aborts:
            await asyncio.gather(*self._aborts, return_exceptions=True)

    def _too_late(self) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"the engine did not finish within {self._config.request_timeout_s:g} s "
            "(gateway.request_timeout_s)"
        )

    def _keep(self, whole: _Part, part: _Part, why: _LostError) -> None:
        """Go on from what a lost engine streamed."""
        spans = part.certain_spans()
        if spans is None:
            log.warning("a stream broke off: %s", why)
            raise EngineUnavailableError(
                f"the engine's answer broke off after {len(part.ids)} streamed tokens, and the "
                "weight version that sampled them is not certain"
            ) from why
        part.spans = spans
        whole.add(part)
        self.recoveries += 1

    async def _back_off(self, failures: int, tried: set[Engine]) -> None:
        if self._fleet.has_candidate(_now(), tried):
            return  # another engine has not failed this call
        tried.clear()
        delay = backoff_s(failures, self._config.retry_backoff_s)
        if self._fleet.has_candidate(_now()):
            await asyncio.sleep(delay)
        else:
            await self._checks.wait_for_candidate(delay)

    async def _send(
        self,
        engine: Engine,
        prompt_ids: TokenIds,
        so_far: list[int],
        sampling: Sampling,
        part: _Part,
        on_tokens: OnTokens | None,
        deadline: float,
    ) -> None:
        """One request; `part` is brought up to date as it is answered.

        Raises:
            _LostError: it may be made again, after what `part` holds.
            EngineTimeoutError: `deadline` has passed.
        """
        rid = f"{random.getrandbits(128):032x}"
        ids = prompt_ids
        if so_far:
            ids = np.concatenate((prompt_ids, np.asarray(so_far, np.int32)))
        fields: dict[str, Any] = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(ids),
            "sampling_params": sampling.wire(sampling.max_new_tokens - len(so_far)),
            "return_logprob": True,
            "stream": on_tokens is not None,
        }
        if sampling.n_top_logprobs:
            fields["top_logprobs_num"] = sampling.n_top_logprobs
        if self._wiring.lora_path is not None:
            fields["lora_path"] = self._wiring.lora_path
        # A router's workers may differ: what one of them said last is not known of the next.
        via_router = self._wiring.via_router
        part.version = None if via_router else engine.version
        fleet = self._fleet
        # The fleet ends it before, when the engine is gone without a word.
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                engine.in_flight.add(scope)
                await self._post(engine.url, fields, part, on_tokens)
        except asyncio.CancelledError:
            self._abort(engine.url, rid)
            raise
        except (aiohttp.ClientError, ConnectionError) as e:
            self._broke(engine, _words(e))
            raise _LostError(f"{engine.url} ({_words(e)})") from e
        except TimeoutError as e:
            if not scope.expired():
                raise
            if scope.when() == deadline:
                self._abort(engine.url, rid)
                raise self._too_late() from e
            raise _LostError(f"{engine.url} (it answers no checks)") from e
        except (_BusyError, EngineError) as e:
            why = str(e)
            if isinstance(e, EngineError):
                why = f"{e} {e.detail}".rstrip()
                log.warning("engine %s: %s", engine.url, why)
            fleet.answered_badly(engine, _now(), why)
            if engine.circuit.state != "closed":
                self._checks.look_at(engine)
            raise
        except RequestError:
            fleet.succeeded(engine, None)
            raise
        finally:
            engine.in_flight.discard(scope)
        version = part.spans[-1].version if part.spans and not via_router else None
        if version is not None and engine.version is not None and version < engine.version:
            self._checks.look_at(engine)  # it may have restarted between two checks
        fleet.succeeded(engine, version, canary=part.canary)

    def _broke(self, engine: Engine, why: str) -> None:
        self._fleet.broke(engine, _now(), why)
        self._checks.look_at(engine)

    async def _post(
        self, url: str, fields: dict[str, Any], part: _Part, on_tokens: OnTokens | None
    ) -> None:
        # Nothing here holds the request while it is answered: ids as text are larger than the call.
        if url.startswith("http://"):
            async with self._kept.post(f"{url}/generate", _json(fields)) as answer:
                if answer.status != 200:
                    _refuse(answer.status, await answer.read())
                if on_tokens is None:
                    whole = await answer.read()
                    await self.pace.keep()
                    _take(part, _loads(whole), incremental=False)
                else:
                    await _follow(answer.chunks(), part, on_tokens)
            return
        async with self._session.post(
            f"{url}/generate", data=_json(fields), headers=_JSON, timeout=self._timeout
        ) as response:
            if response.status != 200:
                _refuse(response.status, await response.read())
            if on_tokens is None:
                _take(part, _loads(await response.read()), incremental=False)
            else:
                await _follow(response.content.iter_any(), part, on_tokens)

    def _abort(self, url: str, rid: str) -> None:
        # A router forwards no aborts; its workers know whose id it is.
        for engine in self._checks.workers if self._wiring.via_router else (url,):
            task = asyncio.create_task(self._post_abort(engine, rid))
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


async def _follow(body: AsyncIterator[bytes], part: _Part, on_tokens: OnTokens) -> None:
    """Read an SSE answer. SGLang's events are cumulative unless it was started otherwise, so of
    several that are already here only the last needs parsing."""
    incremental: bool | None = None
    async for events in _events(body):
        for event in events if incremental is not False else events[-1:]:
            chunk = _loads(event)
            n_before = len(part.ids)
            ids, meta = chunk.get("output_ids"), chunk.get("meta_info")
            n_here = len(ids) if isinstance(ids, list) else 0
            n_total = meta.get("completion_tokens", n_here) if isinstance(meta, dict) else n_here
            if incremental is None and n_before and n_here:
                incremental = n_here != n_total
            _take(part, chunk, incremental=bool(incremental))
            if len(part.ids) > n_before:
                on_tokens(
                    *(part.ids[n_before:], part.log_probs[n_before:], part.tops[n_before:]),
                    part.reported,
                )
            if part.finish is not None:
                return
    raise aiohttp.ServerDisconnectedError("the stream ended without a finish reason")


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Payloads of the SSE events that arrived together."""
    buffer = b""
    async for data in body:
        *whole, buffer = (buffer + data).split(b"\n\n")
        payloads = [e[5:].strip() for e in whole if e.startswith(b"data:")]
        payloads = [p for p in payloads if p != b"[DONE]"]
        if payloads:
            yield payloads


def _take(part: _Part, chunk: Mapping[str, Any], *, incremental: bool) -> None:
    """Bring `part` up to date with an answer or stream event.

    Raises:
        EngineError: it is none of SGLang's.
    """
    if "error" in chunk:
        raise EngineError("the engine failed; see the gateway's log", f"{chunk['error']!s:.300}")
    try:
        _read(part, chunk, incremental=incremental)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        raise EngineError(
            "the engine answered in another shape than SGLang's /generate; is it SGLang?",
            f"({type(e).__name__}: {e!s:.200})",
        ) from e


def _read(part: _Part, chunk: Mapping[str, Any], *, incremental: bool) -> None:
    meta, ids = chunk["meta_info"], chunk["output_ids"]
    entries = meta.get("output_token_logprobs") or []
    have = 0 if incremental else len(part.ids)
    new = ids[have:]
    _check_ids(new, part.vocabulary)
    n = len(part.ids) + len(new)
    if n > part.most:
        raise EngineError(f"the engine returned {n} tokens for max_new_tokens {part.most}")
    part.ids += new
    _note_version(part, meta.get("weight_version"))
    # Events of an incremental stream may carry log-probs of all tokens or of the new ones.
    entries = entries[have:] if len(entries) == len(ids) else entries[len(part.log_probs) :]
    if [e[1] for e in entries] != part.ids[len(part.log_probs) :]:
        raise EngineError(
            "the engine returned log-probs of other tokens than output_ids; is return_logprob "
            "honoured?"
        )
    n_before = len(part.log_probs)
    log_probs = [e[0] for e in entries]
    _check_log_probs(log_probs)
    part.log_probs += log_probs
    if tops := meta.get("output_top_logprobs"):
        tops = tops[n_before:] if len(tops) == len(part.ids) else tops[len(tops) - len(entries) :]
        for top in tops:
            _check_ids([e[1] for e in top or ()], part.vocabulary)
            _check_log_probs([e[0] for e in top or ()])
            part.tops.append(tuple((e[1], e[0]) for e in top or ()))
    finish = meta.get("finish_reason")
    if finish is None:
        return
    if finish.get("type") == "abort" and (status := finish.get("status_code")):
        _raise_for(status, "aborted the call", f"{finish.get('message')!s:.300}")
    part.finish = finish
    part.cached_tokens = meta.get("cached_tokens") or 0
    if type(part.cached_tokens) is not int:
        raise EngineError("the engine's cached_tokens is no count", f"{part.cached_tokens!r:.200}")
    part.spans = _spans(meta, len(part.ids))


def _check_ids(ids: list[Any], vocabulary: int) -> None:
    if {*map(type, ids)} <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocabulary)):
        return
    bad = next(i for i in ids if type(i) is not int or not 0 <= i < vocabulary)
    raise EngineError(
        f"the engine returned a token id that is no integer in [0, {vocabulary}), the vocabulary "
        "of gateway.tokenizer_path; does it serve that model?",
        f"It is {bad!r:.200}.",
    )


def _check_log_probs(log_probs: list[Any]) -> None:
    """Numbers, as a Step takes them."""
    if {*map(type, log_probs)} <= {float, int} and (
        not log_probs or (min(log_probs) > LEAST_LOG_PROB and max(log_probs) <= 1e-3)
    ):
        return
    raise EngineError(
        "the engine returned a log-prob that is no number <= 0", f"{log_probs!r:.200}"
    )


def _note_version(part: _Part, reported: Any) -> None:
    """What was sampled between two moments at which the engine had one version is that version's.
    Around a change, an event does not tell which of its tokens are whose."""
    try:
        version = version_number(reported)
    except (TypeError, ValueError):
        version = None
    part.reported, part.canary = version, is_canary(reported)
    if version is None or version != part.version:
        part.is_certain = False


def _spans(meta: Mapping[str, Any], n: int) -> list[VersionSpan]:
    if n == 0:
        return []
    reported = meta.get("weight_versions")
    if reported:
        spans = [VersionSpan(_version(s["version"]), s["start"], s["end"]) for s in reported]
        spans = [s for s in spans if s.end > s.start]
        edges = {type(edge) for s in spans for edge in (s.start, s.end)}
        if (
            edges != {int}
            or [s.start for s in spans] != [0, *(s.end for s in spans[:-1])]
            or spans[-1].end != n
        ):
            raise EngineError(
                f"the engine's weight_versions do not cover its {n} tokens",
                f"but {reported!r:.200}",
            )
        return spans
    return [VersionSpan(_version(meta.get("weight_version")), 0, n)]


def _version(version: Any) -> int:
    try:
        return version_number(version)
    except (TypeError, ValueError) as e:
        raise EngineError(
            "the engine's weight_version is no number; publish decimal integers ('0', '1', …)",
            f"but {version!r:.200}",
        ) from e


def _generation(whole: _Part, finish: Mapping[str, Any], resumes: int) -> Generation:
    if not whole.ids:
        raise EngineError("the engine returned no token")
    kind = finish.get("type")
    if kind not in ("stop", "length"):
        log.warning("an engine finished with %.200r", finish)
        raise EngineError("the engine's answer ended with neither stop nor length")
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


def _json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def _loads(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise EngineError("the engine answered no JSON", f"but {data[:200]!r}") from e
    if not isinstance(value, dict):
        raise EngineError("the engine answered something else than one object", f"{value!r:.200}")
    return value


def _refuse(status: int, body: bytes) -> NoReturn:
    _raise_for(status, f"answered {status}", body.decode(errors="replace")[:300])


def _raise_for(status: int, what: str, why: str) -> NoReturn:
    """
    Args:
        why: the engine's own words: for the log, and for the agent that sent what it refuses.
    """
    if status == 400:
        words = _ADDRESSES.sub("…", why)
        raise RequestError(f"the engine refuses the request: {what}: {words}", None)
    if status in _RETRIED:
        raise _BusyError(f"the engine {what}: {why}")
    raise EngineError(f"the engine {what}; see the gateway's log", why)


def _words(e: BaseException) -> str:
    return str(e) or type(e).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
