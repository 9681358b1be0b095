"""One LLM call from its prompt to its stored Step, in whatever dialect it came.

    request ──► prompts made, fit ──► trajectories open ──► each sample: joined │ recalled │ begun
                     └──► refused: the pool hears nothing of it

    generating ──► committing ──► done        (the Step is in the pool, the reply is a turn)
        │              └────────► unstored    (the pool failed; a retry commits the same Step again)
        └──► failed                           (the engine failed, refused, aborted)

`start` finds or makes the calls of a request: all of them, or none. A prompt is made again if
another gateway turns out to have turns of its trajectory. `run` is the straight way of one call:
generate, commit, make a turn of it, answer. It runs in the task of its request; only streams and
several samples have tasks of their own. The terminal event of a reply exists only once the call is
done.

A call that nobody reads any more (every client went away) is aborted unless it is committing.
Retries: a request with a retry mark (`RetryKey.is_retry`) and the bytes of an earlier one is that
call: it joins it while in flight and gets its recorded reply afterwards. The same bytes without the
mark are another sample. A client may try again at another gateway while its first try is still
generated here: of the two calls, the one that is to be stored later adopts the result of the other.

Owns: this life cycle, how a call is sampled. Does not own: wire formats (`dialects/`), whose a call
is (`trajectory/identity.py`), order and closing (`trajectory/trajectory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from stepwell.backends.engines.api import Sampling
from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.types import DUPLICATE_OF, SUPERSEDES, UNSEEN, Step, VersionSpan
from stepwell.gateway.access import Principal
from stepwell.gateway.config import ChannelSampling, Thinking
from stepwell.gateway.engine import Generation, Sampler
from stepwell.gateway.errors import (
    ContextLengthError,
    EngineError,
    GatewayError,
    PoolUnavailableError,
    RequestError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    TrajectoryLimitError,
)
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.prompt import ChatRequest, Prompt, Prompts
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.reply.reader import ReplyFormat, ReplyReader
from stepwell.gateway.tokens.graph import Turn, join
from stepwell.gateway.tokens.turn_messages import MESSAGES, TurnMessages
from stepwell.gateway.trajectory.calls import Call, LiveCall, RetryKey
from stepwell.gateway.trajectory.reply import NOTE, Reply, SampledToken
from stepwell.gateway.trajectory.trajectory import LiveTrajectory

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BEGINNINGS = 4
"""Trajectories that a conversation may find closed as it begins, one after the other."""
REMEMBERED_TIMES = 4096
_FREE = ChannelSampling()
_NO_IDS = np.empty(0, np.int32)
_NO_LOG_PROBS = np.empty(0, np.float32)


@dataclass(slots=True)
class Asked:
    """One prompt of a request, for `n` samples in one trajectory."""

    trajectory: LiveTrajectory
    request: ChatRequest
    retry: RetryKey
    n: int = 1
    prompt: Prompt = field(init=False)

    @property
    def keys(self) -> list[RetryKey]:
        """One for each sample."""
        return self.retry.samples(self.n)


BeginAgain: TypeAlias = Callable[[Asked], LiveTrajectory]
"""Gives a conversation another trajectory, because its own takes no more calls."""


@dataclass(kw_only=True)
class Calls:
    """All calls of a gateway, and their figures. Owned by the app's lifespan."""

    engine: Sampler
    prompts: Prompts
    format: ReplyFormat
    limits: CallLimits
    turn_messages: TurnMessages
    thinking: Thinking
    channel_sampling: Mapping[str, ChannelSampling]
    """Sampling by channel, over what agents ask for."""
    replicas: int
    """Gateways that may serve a trajectory."""
    counts: Counter[str] = field(default_factory=Counter)
    branches: Counter[str] = field(default_factory=Counter)
    added_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TIMES))
    """Seconds of the last calls from the request read to the Step stored, without the engine's."""
    failed_at: float = float("-inf")
    """Time (`time.monotonic()`) when engine or pool last failed a call."""
    is_closing: bool = False
    """The gateway stops: what it cuts off now is given up."""

    # -- which calls a request has -----------------------------------------------------------

    async def start(
        self,
        asked: Sequence[Asked],
        dialect: str,
        *,
        caller: Principal,
        begin_again: BeginAgain | None = None,
    ) -> list[Listener]:
        """Begin the calls of a request, or find those that it repeats: the samples of its first
        prompt, then those of the next one.

        Raises:
            RequestError: the model's template or parser cannot do what is asked.
            ContextLengthError: a prompt leaves no room for one token.
            TrajectoryLimitError: a trajectory's turns or tokens are used up.
            TrajectoryClosedError, TrajectoryConflictError, PoolUnavailableError
        """
        used: list[LiveTrajectory] = []
        try:
            for each in asked:
                used.append(each.trajectory.hold())
                await self._prepare(each)
                if len(asked) > 1:
                    await asyncio.sleep(0)  # others go on between two prompts
            for each in asked:
                await self._open(each, used, caller, begin_again)
            context = await self.engine.context_length()
            # No turn of the loop from here on: of two tries at once the second finds the first.
            found = [[each.trajectory.calls.find(key) for key in each.keys] for each in asked]
            self._check_turns(asked, found)
            samplings = [self._sampling(each, context) for each in asked]
            return [
                Listener(self, each.trajectory, live)
                for each, calls, sampling in zip(asked, found, samplings, strict=True)
                for live in self._begun(each, calls, sampling, dialect)
            ]
        finally:
            for trajectory in used:
                trajectory.release()

    def _begun(
        self, asked: Asked, found: Sequence[Call | None], sampling: Sampling, dialect: str
    ) -> list[LiveCall]:
        """The calls of one prompt, new ones and those that it repeats."""
        trajectory = asked.trajectory
        begun = []
        for key, call in zip(asked.keys, found, strict=True):
            live = None if call is None else call.live
            if live is None or (live.state == "unstored" and live.call.turn is not None):
                known = call
                call = call or Call(
                    uid=f"{random.getrandbits(128):032x}",
                    created=int(time.time()),
                    retry=key.digest,
                    body=key.body_digest,
                    is_retry=key.is_retry,
                )
                live = LiveCall(call, asked.request, asked.prompt, sampling, dialect)
                if known is not None:
                    self._recall(live)
                else:
                    call.live = live
                    live.reader = self._reader(live)
                    self.counts["calls"] += 1
                    trajectory.calls.add(call, replaces_failed=key.is_retry)
                    trajectory.in_flight.add(live)
            elif live.state == "unstored":
                live.state, live.error = "committing", None
                trajectory.in_flight.add(live)
            begun.append(live)
        return begun

    async def _prepare(self, asked: Asked) -> None:
        """Make a prompt that fits; the pool is not asked."""
        self._check(asked.request)
        if asked.trajectory.unrecorded == "asked":
            asked.request = replace(asked.request, is_kept=False)
        context = await self.engine.context_length()
        if asked.request.is_big:
            await asyncio.sleep(0)
        prompt = await self.prompts.prepare(asked.trajectory.graph, asked.request, context)
        # Engines refuse a request whose prompt and response reach the context length.
        if context - len(prompt.ids) - 1 < 1:
            raise ContextLengthError.of(len(prompt.ids), context)
        asked.prompt = prompt

    async def _open(
        self,
        asked: Asked,
        used: list[LiveTrajectory],
        caller: Principal,
        begin_again: BeginAgain | None,
    ) -> None:
        """Open the trajectory, or the one that a conversation begins in its place, and make the
        prompt again if it has other turns than were known."""
        for attempt in range(1, MAX_BEGINNINGS + 1):
            trajectory, request = asked.trajectory, asked.request
            was_new, n_steps = trajectory.is_new, trajectory.steps
            try:
                await trajectory.open(caller)
                if not was_new and self._is_elsewhere(asked):
                    await trajectory.catch_up()
                break
            except (TrajectoryClosedError, TrajectoryConflictError):
                # A conversation has no address that its agent could be told is over.
                is_last = attempt == MAX_BEGINNINGS
                if begin_again is None or is_last or not trajectory.is_conversation:
                    raise
                asked.trajectory = begin_again(asked)
                used.append(asked.trajectory.hold())
                await self._prepare(asked)
        if trajectory.steps > n_steps:
            context = await self.engine.context_length()
            asked.prompt = await self.prompts.prepare(trajectory.graph, request, context)
        trajectory.touch()
        if trajectory.in_flight and asked.prompt.parent is not None:
            trajectory.calls.go_on(asked.prompt.parent)

    def _check_turns(self, asked: Sequence[Asked], found: Sequence[Sequence[Call | None]]) -> None:
        n_new: Counter[LiveTrajectory] = Counter()
        for each, calls in zip(asked, found, strict=True):
            self.counts["retries"] += len(calls) - calls.count(None)
            n_new[each.trajectory] += calls.count(None)
        for trajectory, n in n_new.items():
            self.limits.check_turns(trajectory.steps + len(trajectory.in_flight), n)

    def _is_elsewhere(self, asked: Asked) -> bool:
        """True if another gateway may have stored what the request is about: the first try of a
        retry, whose answer may have been lost, or a reply in the conversation."""
        is_one_of_many, retry = self.replicas > 1, asked.retry
        # Clients that always send Idempotency-Key rarely retry, so a pool read for each would be
        # wasted.
        is_looked_for = retry.is_retry and (is_one_of_many or not retry.is_named)
        if is_looked_for and not all(map(asked.trajectory.calls.knows, asked.keys)):
            return True
        new = asked.request.messages[asked.prompt.attachment.n_known :]
        return is_one_of_many and any(m["role"] == "assistant" for m in new)

    def _check(self, request: ChatRequest) -> None:
        renderer, replies = self.prompts.renderer, self.format
        if request.tools and request.parse_tools and not renderer.shows_tools:
            raise RequestError(
                "the model's chat template does not show tools to the model; leave them out",
                "tools",
            )
        if request.forced_tool is not None and (
            not replies.reads_calls or renderer.call_opening(request.forced_tool) is None
        ):
            raise RequestError(
                "tool_choice asks for a call, but the model's chat template does not show how a "
                "call begins that gateway.tool_parser reads; send 'auto' or 'none'",
                "tool_choice",
            )
        if (
            not request.parallel_tool_calls
            and request.tools
            and replies.call_close is None
            and not replies.calls_once
        ):
            raise RequestError(
                "parallel_tool_calls is false, but this model's tool calls have no known end to "
                "stop at; leave it out",
                "parallel_tool_calls",
            )

    def _sampling(self, asked: Asked, context: int) -> Sampling:
        """Parameters as they will be used: the channel's over the request's, and temperature 0 over
        all in a greedy trajectory. The request ends, too, where the calls of its channel do.

        Raises:
            TrajectoryLimitError: its conversation has no tokens left.
        """
        trajectory, prompt = asked.trajectory, asked.prompt
        forced = self.channel_sampling.get(trajectory.channel, _FREE)
        if forced.stop or forced.stop_token_ids:
            asked.request = replace(
                asked.request,
                stop=asked.request.stop + (forced.stop or ()),
                stop_token_ids=asked.request.stop_token_ids + (forced.stop_token_ids or ()),
            )
        request = asked.request
        limit = max(context - len(prompt.ids) - 1, 1)
        if (most := forced.max_response_tokens) is not None:
            used = len(prompt.ids) - prompt.n_first
            if used >= most:
                raise TrajectoryLimitError(
                    f"this conversation has {used} tokens behind its first prompt and may have "
                    f"{most} (rollout.max_response_tokens); complete the trajectory",
                    None,
                )
            limit = min(limit, most - used)
        limit = min(forced.max_tokens or limit, limit)
        temperature = _first(forced.temperature, request.temperature, 1.0)
        stop = request.stop
        if request.tools and request.parse_tools and not request.parallel_tool_calls:
            stop += () if self.format.call_close is None else (self.format.call_close,)
        return Sampling(
            max_new_tokens=min(request.max_tokens or limit, limit),
            temperature=0.0 if trajectory.greedy else temperature,
            top_p=_first(forced.top_p, request.top_p, 1.0),
            top_k=_first(forced.top_k, request.top_k, -1),
            min_p=request.min_p or 0.0,
            stop=stop,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed,
            n_top_logprobs=request.n_logprobs or 0,
            constraint=request.constraint,
        )

    # -- the way of one call -----------------------------------------------------------------

    async def run(self, trajectory: LiveTrajectory, live: LiveCall) -> None:
        """Generate a call, commit its Step, make a turn of it; or only commit again what the pool
        did not acknowledge: the very same Step. Its failure is `live.error`; only a cancellation
        that is not `live.cancel` is raised."""
        live.task, live.is_running = asyncio.current_task(), True
        try:
            if live.why_cancelled is not None:
                raise live.why_cancelled
            if live.reply is None:
                async with self.limits:
                    await self._generate(trajectory, live)
            live.state = "committing"
            stored = None
            if live.request.stores_step:
                stored = await trajectory.append(live, partial(self._step, trajectory, live))
            if isinstance(stored, Call):
                self._become(trajectory, live, stored)
            else:
                turn = trajectory.add_turn(live) if stored is None else stored
                self._answered(trajectory, live, turn)
        except asyncio.CancelledError:
            if live.why_cancelled is not None and live.task is not None:
                live.task.uncancel()
                self._failed(trajectory, live, live.why_cancelled)
            elif live.state == "committing" and not self.is_closing:
                # Its request was given up, its Step is not: commits go on.
                live.task = asyncio.create_task(self.run(trajectory, live))
                raise
            else:
                self._failed(trajectory, live, GatewayError("the gateway is shutting down"))
                raise
        except Exception as e:  # noqa: BLE001 - whatever it is, its clients are told
            self._failed(trajectory, live, e)
        finally:
            if live.state != "committing":
                trajectory.in_flight.discard(live)
                live.task, live.is_running = None, False
                live.announce()
                self._settle(live)
                trajectory.forget_if_unused()

    async def _generate(self, trajectory: LiveTrajectory, live: LiveCall) -> None:
        """Set `live.reply`."""
        request, prompt, reader = live.request, live.prompt, live.reader
        live.publish(reader.begin(prompt.forced))
        asked_at = time.perf_counter()
        try:
            generation = await self.engine.generate(
                prompt.ids,
                live.sampling,
                affinity=trajectory.uid,
                on_tokens=live.on_tokens if request.stream else None,
                pieces=prompt.pieces if request.is_kept else (),
            )
        except RequestError as e:
            if request.constraint is None:
                raise
            raise RequestError(
                f"{request.constraint_field}: {e}; leave it out, or start the engine with a "
                "grammar backend that takes it",
                request.constraint_field,
            ) from e
        now = time.perf_counter()
        live.engine_s = now - asked_at
        live.timing = {
            "began": round(time.time() - (now - request.began_at), 3),
            "waited_s": round(asked_at - request.began_at, 4),
            "engine_s": round(live.engine_s, 4),
        }
        ids: list[int] = generation.response_ids.tolist()
        if not request.stream:
            log_probs = generation.log_probs.tolist() if request.n_logprobs is not None else ()
            live.on_tokens(ids, log_probs, generation.top_log_probs)
        live.publish(reader.finish())
        n = None if isinstance(generation.matched, str) else reader.n_until_stop(ids)
        if n is not None:
            del live.tokens[n:]
            generation = generation.cut(n)
        call, live.reply = live.call, _reply(live, generation)
        live.note = live.reply.note(
            self.prompts.renderer.tokenizer,
            retry=call.retry,
            body=call.body,
            is_retry=call.is_retry,
            created=call.created,
        )

    def _step(self, trajectory: LiveTrajectory, live: LiveCall, index: int) -> Step:
        """The Step of a generated call with this index."""
        reply, note, call = live.reply, live.note, live.call
        request, prompt = live.request, live.prompt
        if reply is None or note is None:
            raise RuntimeError("the call has not been generated")
        attached = prompt.attachment
        if index > 0 and prompt.parent is None and prompt.cause is None:
            # Calls that begin together all see an empty graph; only the first to be stored is not a
            # branch (samples of one request are that).
            prompt.cause = trajectory.graph.attach(attached.root, request.said).cause
        said = None
        if request.messages:
            new = request.messages[attached.n_known if prompt.parent is not None else 0 :]
            said = self.turn_messages.of(new, reply.text.message())
        superseded = trajectory.calls.superseded(call, index, prompt.parent, trajectory.graph)
        metadata = {
            "call_id": call.uid,
            "dialect": live.dialect,
            NOTE: note.as_json(),
            MESSAGES: said,
            DUPLICATE_OF: live.duplicate_of,
            SUPERSEDES: superseded or None,
            UNSEEN: call.is_unseen or None,
            "timing": live.timing,
            "thinking": self.thinking if note.has_reasoning else None,
            # 0: it might have called one.
            "tool_calls": len(note.calls) if request.tools and request.parse_tools else None,
        }
        return reply.step(trajectory.uid, trajectory.prompt_uid, index, metadata)

    def _answered(self, trajectory: LiveTrajectory, live: LiveCall, turn: Turn) -> None:
        """The reply is final, and a turn of the graph."""
        reply, note, call, request = live.reply, live.note, live.call, live.request
        if reply is None:
            raise RuntimeError("the call has not been generated")
        generation = reply.generation
        self.added_s.append(time.perf_counter() - request.began_at - live.engine_s)
        call.turn, call.note, call.finish_reason = turn, note, generation.finish_reason
        call.spans = tuple((s.version, s.start, s.end) for s in generation.spans)
        shows_log_probs = request.n_logprobs is not None or not request.stores_step
        call.log_probs = generation.log_probs if shows_log_probs else None
        call.alternatives = generation.top_log_probs
        if turn.step_index is not None:
            self.counts["stored"] += 1
            self.counts["response_tokens"] += reply.n_response
            if reply.prompt.cause is not None:
                self.branches[reply.prompt.cause] += 1
        live.state = "done"
        self._note_delivery(trajectory, live)

    def _failed(self, trajectory: LiveTrajectory, live: LiveCall, error: BaseException) -> None:
        if isinstance(error, EngineError | PoolUnavailableError):
            self.failed_at = time.monotonic()
        is_kept = isinstance(error, PoolUnavailableError) and live.reply is not None
        live.state = "unstored" if is_kept else "failed"
        live.call.failed = not is_kept
        live.error = _shown(error, trajectory, live)
        self.counts["failed"] += 1

    # -- a call that was made before ---------------------------------------------------------

    def _recall(self, live: LiveCall) -> None:
        """Be the call that `live.call` remembers, made here or at another gateway for the same
        request: its reply is read from the sampled ids."""
        call, request = live.call, live.request
        turn, note = call.turn, call.note
        if turn is None or note is None:
            raise RuntimeError("the call has not been answered")
        *before, response = turn.arrays()
        prompt_ids, ids = join(before), response.tolist()
        forced = self.prompts.forced_text(request, prompt_ids[: len(prompt_ids) - note.n_forced])
        live.prompt = Prompt(
            prompt_ids, _NO_IDS, None, live.prompt.attachment, None, forced, note.n_forced
        )
        live.reader = reader = self._reader(live)
        log_probs = _NO_LOG_PROBS if call.log_probs is None else call.log_probs
        if request.n_logprobs is not None and call.log_probs is not None:
            tops = call.alternatives or [()] * len(ids)
            live.tokens = [*map(SampledToken, ids, log_probs.tolist(), tops)]
        deltas = [*reader.begin(forced), *reader.feed(ids), *reader.finish()]
        # Ids of tool calls are made up when they are read, and the client knows the first ones.
        known = [ToolCall(*told) for told in note.calls]
        calls = iter(known)
        live.deltas = [next(calls, d) if isinstance(d, ToolCall) else d for d in deltas]
        reader.text.tool_calls[:] = known
        spans = tuple(VersionSpan(*span) for span in call.spans)
        live.reply = _reply(
            live, Generation(response, log_probs, spans, call.finish_reason, None, 0)
        )
        live.state, live.error, call.live = "done", None, live
        self.counts["recalled"] += 1

    def _become(self, trajectory: LiveTrajectory, live: LiveCall, other: Call) -> None:
        """Adopt the result of another try of the request, which another gateway stored."""
        trajectory.calls.discard(live.call)
        live.call = other
        self._recall(live)

    # -- its clients ---------------------------------------------------------------------------

    def leave(self, listener: Listener, why: GatewayError | None) -> None:
        """A client is served or gone; a call that nobody else reads is aborted."""
        trajectory, live = listener.trajectory, listener.call
        live.readers.discard(listener)
        self._settle(live)
        self._note_delivery(trajectory, live)
        if not live.readers and live.state == "generating":
            self.counts["disconnected"] += why is None
            why = why or GatewayError("the client went away")
            live.cancel(why)
            if live.task is None:  # nothing ever began it
                self._failed(trajectory, live, why)
                trajectory.in_flight.discard(live)
                self._settle(live)

    def _settle(self, live: LiveCall) -> None:
        """Once a call has ended and its clients have left, remember only what a retry needs."""
        if live.state in ("done", "failed") and not live.readers:
            live.call.live = None

    def _note_delivery(self, trajectory: LiveTrajectory, live: LiveCall) -> None:
        """Once its clients have left, note whether one of them got the end."""
        call = live.call
        if live.state == "done" and not live.readers:
            trajectory.set_unseen(call, live.is_given_up or not call.delivered)

    def _reader(self, live: LiveCall) -> ReplyReader:
        request, prompt = live.request, live.prompt
        return self.format.reader(
            prompt.ids[: len(prompt.ids) - prompt.n_forced],
            tools=request.tools,
            parse_tools=request.parse_tools and bool(request.tools),
            stop=request.stop,
            raw=request.is_completion,
            counts=request.n_logprobs is not None,
            first_call=request.first_call,
        )

    def added_latency(self) -> dict[str, float | int | None]:
        """Milliseconds that the gateway itself added to the last calls."""
        ms = np.asarray(self.added_s) * 1000
        p50, p99 = np.percentile(ms, (50, 99)).round(3).tolist() if len(ms) else (None, None)
        return {"calls": len(ms), "p50_ms": p50, "p99_ms": p99}


def _reply(live: LiveCall, generation: Generation) -> Reply:
    read = live.reader
    return Reply(
        live.request,
        live.prompt,
        live.sampling,
        generation,
        read.text,
        read.has_reasoning,
        read.stop_sequence,
    )


def _shown(error: BaseException, trajectory: LiveTrajectory, live: LiveCall) -> GatewayError:
    """An error as clients are told it."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, InvalidStepError):
        return EngineError(f"the engine's answer makes no Step: {error}")
    if isinstance(error, DataPoolError):
        return TrajectoryConflictError(f"the DataPool refuses the Step: {error}")
    where = live.call.uid, trajectory.uid  # a bug of ours
    log.error("call %s on trajectory %s failed", *where, exc_info=error)
    return GatewayError(f"the gateway failed ({type(error).__name__}); see its log")


class Listener:
    """One client's view of a call: every delta from the first on, then the reply or the error."""

    def __init__(self, calls: Calls, trajectory: LiveTrajectory, live: LiveCall) -> None:
        self.trajectory, self.call = trajectory, live
        self.told: Sequence[SampledToken] = ()
        """Tokens of the call that the last delta tells; of the reply, the rest."""
        self._calls = calls
        self._n_told = self._read = 0
        self._has_ended = False
        live.readers.add(self)

    @property
    def has_news(self) -> bool:
        """`next` has something, or raises."""
        live = self.call
        return self._read < len(live.deltas) or live.error is not None or live.state == "done"

    def begin(self) -> None:
        """Let the call go on beside its request, if nothing does yet."""
        live = self.call
        if live.is_due:
            live.task = asyncio.create_task(self._calls.run(self.trajectory, live))

    def next(self) -> Delta | Reply | None:
        """The next delta, or once the reply when its Step is stored; None: nothing yet, or no more.

        Raises:
            GatewayError: the call failed.
        """
        live = self.call
        if self._read < len(live.deltas):
            self._read += 1
            if live.request.n_logprobs is not None:
                self._tell(live.n_told(self._read))
            return live.deltas[self._read - 1]
        if self._has_ended or (ended := live.end()) is None:
            return None
        self._has_ended = True
        self._tell(len(live.tokens))
        return ended

    def check(self) -> None:
        """Raise the error of a call that failed before its first delta."""
        if not self.call.deltas:
            self.call.end()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have `watcher` called when `next` may have something more, until `unwatch`."""
        self.call.watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        self.call.watchers.remove(watcher)

    async def result(self) -> Reply:
        """The reply, deltas skipped. A call that nothing generates yet is generated here.

        Raises:
            GatewayError: the call failed.
        """
        live = self.call
        if live.is_due:
            await self._calls.run(self.trajectory, live)
        while (ended := live.end()) is None:
            await live.changed()
        return ended

    def close(self, why: GatewayError | None = None) -> None:
        """Listen no more, because the client went away or for another reason."""
        self._calls.leave(self, why)

    def _tell(self, n: int) -> None:
        self.told, self._n_told = self.call.tokens[self._n_told : n], max(self._n_told, n)


def _first(first: T | None, second: T | None, default: T) -> T:
    """The first of these that is given."""
    return first if first is not None else second if second is not None else default
