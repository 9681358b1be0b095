"""This module generates tokens for calls so that neither a weight update nor a lost engine is seen
by the agent, or changes what is recorded.

One call, as the caller sees it, may be several requests::

    generate ──► tokens ──► stop | length                                        Generation
                    ├─► abort, not ours (a weight update) ──► generate(prompt + tokens so far,
                    │                                         max_new_tokens − so far) ──► …
                    └─► the engine is lost ──► the same on another engine

Ids, log-probs and version spans of the requests are joined; nothing is sampled twice. Only what a
constraint shaped (a JSON schema, a regex) cannot go on, since an engine matches each request from
its first token on: that call begins anew, and fails if it has streamed. What a lost engine had
streamed is kept if its version is certain, else the call fails, because a client may have it
already. Without a stream there is nothing to keep, and the request is made again. A call
fails over `engine_retries` times in all, with back-off where there is no other engine. Cancelling
the call aborts it in the engine.

Agents read errors: they name no address and no path. Those, and the engine's own words, go to the
log.

It does not own prompts, text or tool calls; what an answer has to be (`generation.py`); which
engine is asked (`fleet.py`) and whether it is well (`checks.py`); an engine's API, starting or
updating engines (`backends/engines`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from os import urandom
from typing import Any

import numpy as np

from stepwell.backends.engines.api import GenerateRequest, Output, PromptPictures, Sampling
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.engines.kinds import connect
from stepwell.backends.errors import EngineError as AskingError
from stepwell.backends.errors import (
    EngineInternalError,
    EngineRequestError,
)
from stepwell.backends.errors import EngineUnavailableError as NotThereError
from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.engine.checks import EngineChecks
from stepwell.gateway.engine.fleet import Engine, Fleet, backoff_s
from stepwell.gateway.engine.generation import MOST_TOKENS, Generation, OnTokens, Part
from stepwell.gateway.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
)
from stepwell.gateway.limits import Deadline, Deadlines, Pace

log = logging.getLogger(__name__)

_EMPTY_ABORTS = 1000
"""Aborts in a row without one token before an engine counts as broken."""
_ABORT_TIMEOUT_S = 10.0
_RETRIED = frozenset({429, 502, 503, 504})
_ADDRESSES = re.compile(
    r"\w+://[^\s\"']+|(?<![\w/])(?:/[\w.@+-]+){2,}|\b\d+(?:\.\d+){3}(?::\d+)?\b"
)
"""URLs, files and IP addresses in an engine's own words."""


class LostError(Exception):
    """A request found no engine, or its engine did not answer to the end: it may be made again."""


class BusyError(LostError):
    """The engine answered that it cannot, for the moment."""


class Sampler:
    """Samples from all engines of one gateway. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        wiring: Wiring,
        vocabulary: int = MOST_TOKENS,
        masked_ids: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            vocabulary: of the served model; the engines' token ids lie in [0, this).
            masked_ids: ids that it may not sample.
        """
        self._masked_ids = masked_ids
        self._masked = frozenset(masked_ids)
        self._config = config
        self._backoff_s = wiring.tuning.retry_backoff_s
        self._wiring = wiring
        self._vocabulary = vocabulary
        self._fleet = Fleet(wiring.engine_urls, wiring.tuning, canary_share=wiring.canary_share)
        self.pace = Pace()
        self.connections = ConnectionPool(self.pace.turn)
        self._deadlines = Deadlines()
        self._clients = {
            engine: connect(wiring.engine, engine.url, connections=self.connections)
            for engine in self._fleet
        }
        self._checks = EngineChecks(wiring, self._fleet)
        self._context_length = config.context_length
        self._aborts: set[asyncio.Task[None]] = set()
        self._mark, self._n_sent = urandom(8).hex(), count()
        """Begin and end of the ids of requests; engines abort all whose ids begin with what they
        are told, so each has the same length."""
        self.resumes = 0
        """Weight updates that cut a call."""
        self.recoveries = 0
        """Calls that went on, on another engine, from what a lost one had streamed."""
        self.retries = 0
        """Tries after one that failed, on whichever engine."""
        self.lost_at = float("-inf")
        """Time (`time.monotonic()`) when a call last found no engine, or lost the one it had."""

    async def start(self) -> None:
        """Begin to watch the engines. Idempotent."""
        await self._checks.start()

    async def close(self) -> None:
        """Stop watching; wait for aborts under way. Idempotent."""
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._checks.close()
        self.connections.close()

    @property
    def version(self) -> int | None:
        """The newest weight version that an engine was seen to have."""
        return self._fleet.version

    async def ready(self) -> None:
        """Raises EngineUnavailableError unless some engine is healthy; the log says why."""
        if not any(self._fleet.state(engine) == "up" for engine in self._fleet):
            raise EngineUnavailableError("no engine is healthy: see the gateway's log")

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
            except AskingError as e:
                self.lost_at = time.monotonic()
                failures += 1
                if failures > self._config.engine_retries:
                    log.warning("no engine says its context length: %s", e)
                    raise EngineUnavailableError(
                        "the context length is unknown: see the gateway's log, start the engine, "
                        "or set gateway.context_length"
                    ) from e
                await self._back_off(failures, set(self._fleet))
        return self._context_length

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
        pieces: Sequence[TokenIds] = (),
        pictures: PromptPictures | None = None,
    ) -> Generation:
        """Sample a response to `prompt_ids`.

        Args:
            pictures: those of the prompt; None: it has none.
            pieces: arrays that make up the prompt, the same objects in each call that has them.
            affinity: calls with the same one go to the same engine (its cache holds their prefix).
            on_tokens: called with new ids as they arrive; None asks the engine for one answer.

        Raises:
            RequestError: the engine refuses the request (400).
            EngineUnavailableError, EngineTimeoutError, EngineError
        """
        whole: Part | None = None
        empty = failures = 0
        tried: set[Engine] = set()
        deadline = time.monotonic() + self._config.request_timeout_s
        while True:
            ids, most = prompt_ids, sampling.max_new_tokens
            if whole is not None and whole.ids:
                ids, pieces = np.concatenate((prompt_ids, np.asarray(whole.ids, np.int32))), ()
                most -= len(whole.ids)
            part = Part(most, self._vocabulary, self._masked)
            try:
                if (now := time.monotonic()) >= deadline:
                    raise self._too_late()
                engine = self._fleet.pick(affinity, now, tried)
                if engine is None:
                    raise LostError(self._fleet.why_none())
                tried.add(engine)
                request = GenerateRequest(
                    f"{self._mark}{next(self._n_sent):016x}",
                    ids,
                    sampling,
                    most,
                    on_tokens is not None,
                    self._wiring.lora_path,
                    pieces,
                    pictures,
                    self._masked_ids,
                    engine.version,
                )
                await self._send(engine, request, part, on_tokens, deadline)
            except LostError as e:
                if not isinstance(e, BusyError):
                    self.lost_at = time.monotonic()
                failures += 1
                if part.ids:
                    _check_goes_on(sampling, part)
                    self._keep(part, e)
                    whole = _joined(whole, part)
                    if len(whole.ids) >= sampling.max_new_tokens:
                        return whole.generation("length")
                if failures > self._config.engine_retries:
                    log.warning("no engine answered in %d tries; last: %s", failures, e)
                    raise EngineUnavailableError(
                        f"no engine answered in {failures} tries; see the gateway's log and "
                        "gateway.engine_retries"
                    ) from e
                self.retries += 1
                await self._back_off(failures, tried)
                continue
            if part.finish != "abort":
                whole = part if whole is None else _joined(whole, part)
                return whole.generation(part.finish)
            tried.clear()
            self.resumes += 1
            if on_tokens is not None:
                _check_goes_on(sampling, part)
            if sampling.constraint is None:
                whole = _joined(whole, part)
                if len(whole.ids) >= sampling.max_new_tokens:
                    return whole.generation("length")
            empty = 0 if part.ids else empty + 1
            if empty >= _EMPTY_ABORTS:
                raise EngineError(
                    f"the engine aborted a call {empty} times in a row before its first token; "
                    "see the engine's log"
                )
            if empty:
                await asyncio.sleep(min(0.01 * empty, 1.0))

    def _too_late(self) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"the engine did not finish within {self._config.request_timeout_s:g} s "
            "(gateway.request_timeout_s)"
        )

    def _keep(self, part: Part, why: LostError) -> None:
        """Go on from what a lost engine streamed.

        Raises:
            EngineUnavailableError: it is not known which version sampled that.
        """
        spans = part.certain_spans()
        if spans is None:
            log.warning("a stream broke off: %s", why)
            raise EngineUnavailableError(
                f"the engine's answer broke off after {len(part.ids)} streamed tokens, and the "
                "weight version that sampled them is not certain"
            ) from why
        part.spans = spans
        self.recoveries += 1

    async def _back_off(self, failures: int, tried: set[Engine]) -> None:
        if self._fleet.has_candidate(time.monotonic(), tried):
            return  # another engine has not failed this call
        tried.clear()
        delay = backoff_s(failures, self._backoff_s)
        if self._fleet.has_candidate(time.monotonic()):
            await asyncio.sleep(delay)
        else:
            await self._checks.wait_for_candidate(delay)

    async def _send(
        self,
        engine: Engine,
        request: GenerateRequest,
        part: Part,
        on_tokens: OnTokens | None,
        deadline: float,
    ) -> None:
        """One request; `part` is brought up to date as it is answered.

        Raises:
            LostError: it may be made again, after what `part` holds.
            EngineTimeoutError: `deadline` has passed.
        """
        part.version = engine.version
        # The fleet ends it before, when the engine is gone without a word.
        scope = Deadline(self._deadlines, deadline)
        try:
            with scope:
                engine.in_flight.add(scope)
                await self._clients[engine].sample(
                    request, part.take if on_tokens is None else partial(_show, part, on_tokens)
                )
        except asyncio.CancelledError:
            self._abort(engine.url, request.rid)
            raise
        except NotThereError as e:
            self._fleet.broke(engine, time.monotonic(), str(e))
            self._checks.look_at(engine)
            raise LostError(f"{engine.url} ({e})") from e
        except TimeoutError as e:
            if not scope.expired:
                raise
            if scope.when == deadline:
                self._abort(engine.url, request.rid)
                raise self._too_late() from e
            raise LostError(f"{engine.url} (it answers no checks)") from e
        except (EngineRequestError, EngineInternalError, EngineError) as e:
            refused = e if isinstance(e, EngineError) else _refusal(e)
            if isinstance(refused, RequestError):
                self._fleet.succeeded(engine, None)
            else:
                why = str(refused)
                if isinstance(refused, EngineError):
                    why = f"{refused} {refused.detail}".rstrip()
                    log.warning("engine %s: %s", engine.url, why)
                self._fleet.answered_badly(engine, time.monotonic(), why)
                if self._fleet.is_open(engine):
                    self._checks.look_at(engine)
            raise refused from e
        finally:
            engine.in_flight.discard(scope)
        version = part.reported if part.spans else None
        if version is not None and engine.version is not None and version < engine.version:
            self._checks.look_at(engine)  # it may have restarted between two checks
        self._fleet.succeeded(engine, version, canary=part.canary)

    def _abort(self, url: str, rid: str) -> None:
        task = asyncio.create_task(self._post_abort(url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post_abort(self, url: str, rid: str) -> None:
        try:
            await self._checks.asking(url, _ABORT_TIMEOUT_S).abort(rid)
        except AskingError:
            # The connection was closed with the cancellation: engines abort on that as well.
            return


def _check_goes_on(sampling: Sampling, part: Part) -> None:
    """Check that another request can go on from what was streamed.

    Raises:
        EngineUnavailableError: it was sampled under a constraint.
    """
    if sampling.constraint is not None and part.ids:
        raise EngineUnavailableError(
            f"the engine's answer was cut after {len(part.ids)} streamed tokens, and "
            f"{sampling.constraint[0]} cannot be matched on from there; send the request again"
        )


def _show(part: Part, on_tokens: OnTokens, output: Output) -> None:
    """Add an output of a stream to `part`, and hand it on."""
    part.take(output)
    if output.ids:
        on_tokens(output.ids, output.log_probs, output.top_log_probs, part.reported)


def _joined(whole: Part | None, part: Part) -> Part:
    """Join a part to the one before, if there is one."""
    if whole is None:
        return part
    whole.add(part)
    return whole


def _refusal(
    e: EngineRequestError | EngineInternalError,
) -> RequestError | BusyError | EngineError:
    """Error that the client is sent. The engine's own words are for the log, and for the agent
    that sent what it refuses."""
    words = e.words[:300]
    if e.status == 400:
        told = _ADDRESSES.sub("…", words)
        what = e.what.removeprefix("the engine ")
        return RequestError(f"the engine refuses the request: {what}: {told}", None)
    if e.status in _RETRIED:
        return BusyError(f"{e.what}: {words}")
    is_nonsense = e.status == 200
    return EngineError(e.what if is_nonsense else f"{e.what}; see the gateway's log", words)
