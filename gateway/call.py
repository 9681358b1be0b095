"""One LLM call from its prompt to its stored Step, in whatever dialect it came.

Life cycle of a `Call`; it runs as its own task, so that a client's retry can join it::

    generating ──► committing ──► done        (the Step is in the pool, the reply is a turn)
        │              └────────► unstored    (the pool failed; a retry commits the same Step again)
        └──► failed                           (the engine failed, refused, aborted)

- generating: it waits for a place, then ids from the engine become deltas for whoever listens.
- committing: the Step takes the next `step_index`. No longer cancelled.
- The terminal event of the reply exists only once the call is done.

A call without listeners (every client went away) is aborted unless it is committing. Retries: a
request with a retry mark (`RetryKey.is_retry`) and the bytes of an earlier one is that call: it
joins it while in flight and gets its recorded reply afterwards. The same bytes without the mark are
another sample. A call whose last client has left is kept as a `FinishedCall`, as is one that
another gateway stored. For a retry it is a `Call` again, which reads its reply from the sampled
ids. A client may try again at another gateway while its first try is still generated here: of the
two calls, the one that is to be stored later becomes the other one.

Owns: this life cycle. Does not own: which calls begin (`call_service.py`), wire formats
(`dialects/`), order and closing (`trajectory/trajectory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from stepwell.backends.engines.api import Sampling, TopLogProbs
from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.types import DUPLICATE_OF, SUPERSEDES, UNSEEN, Step, VersionSpan
from stepwell.gateway.config import Thinking
from stepwell.gateway.engine import Generation, Sampler
from stepwell.gateway.errors import (
    EngineError,
    GatewayError,
    PoolUnavailableError,
    RequestError,
    TrajectoryConflictError,
)
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.prompt import ChatRequest, Prompt, Prompts
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.reply.reader import ReplyFormat, ReplyReader
from stepwell.gateway.tokens.graph import Turn, join
from stepwell.gateway.tokens.messages import Key, text_key
from stepwell.gateway.tokens.turn_messages import MESSAGES, TurnMessages
from stepwell.gateway.trajectory.note import NOTE, FinishedCall, TurnNote
from stepwell.gateway.trajectory.reply import Reply, SampledToken
from stepwell.gateway.trajectory.retries import RetryKey
from stepwell.gateway.trajectory.trajectory import LiveTrajectory

log = logging.getLogger(__name__)

_NO_IDS = np.empty(0, np.int32)
_NO_LOG_PROBS = np.empty(0, np.float32)
REMEMBERED_TIMES = 4096
State: TypeAlias = Literal["generating", "committing", "done", "unstored", "failed"]


@dataclass(kw_only=True)
class CallParts:
    """What all calls of a gateway are made with, and their figures."""

    engine: Sampler
    prompts: Prompts
    format: ReplyFormat
    limits: CallLimits
    turn_messages: TurnMessages
    thinking: Thinking
    on_turn: Callable[[LiveTrajectory, Key, int | None], None]
    """Told of every turn that enters a graph, with the key of its conversation and, of one that is
    no messages, its length."""
    counts: Counter[str] = field(default_factory=Counter)
    branches: Counter[str] = field(default_factory=Counter)
    added_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TIMES))
    """Of the last calls: from the request read to the Step stored, without the engine's time."""
    failed_at: float = float("-inf")
    """When engine or pool last failed a call (`time.monotonic()`)."""


class Call:
    """See the module's life cycle. It begins with `begin`, or is there at once with `recall`."""

    def __init__(
        self,
        parts: CallParts,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        retry: RetryKey,
        dialect: str,
        prompt: Prompt,
        sampling: Sampling,
    ) -> None:
        self.uid = uuid.uuid4().hex
        self.created = int(time.time())
        self.request = request
        self.retry = retry
        self.state: State = "generating"
        self.deltas: list[Delta] = []
        self.tokens: list[SampledToken] = []
        """What was sampled so far, if the request asks for log-probs."""
        self.reply: Reply | None = None
        """Set once generated; final when the state is `done`."""
        self.finished: FinishedCall | None = None
        """Set when the state is `done`."""
        self.error: GatewayError | None = None
        self.delivered = False
        """The terminal event was handed to some client's connection."""
        self.is_unseen = False
        """Its client sent the request again, or went on from another try, and waits no more."""
        self._parts = parts
        self.trajectory = trajectory
        self._dialect = dialect
        self._prompt = prompt
        self._sampling = sampling
        self._reader = self._open_reader()
        self._listeners: set[Listener] = set()
        self._waiting: list[asyncio.Future[bool]] = []
        self._why_cancelled = GatewayError("the gateway is shutting down")
        self._engine_s = 0.0
        self._timing: dict[str, float] | None = None
        self._streamed_version: int | None = None
        self._note: TurnNote | None = None
        self._duplicate_of: int | None = None
        """Step that another try of this request became, at another gateway."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Generate and commit; or commit again, if the pool had failed: the very same Step."""
        self.error = None
        self.state = "generating" if self.reply is None else "committing"
        self.trajectory.in_flight.add(self)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def recall(self, finished: FinishedCall) -> None:
        """Be a call that was finished before, here or at another gateway, for the same request."""
        note, request, parts = finished.note, self.request, self._parts
        self.uid, self.created, self.delivered = finished.uid, note.created, finished.delivered
        *prompt, response = finished.turn.arrays()
        prompt_ids, ids = join(prompt), response.tolist()
        forced = parts.prompts.forced_text(request, prompt_ids[: len(prompt_ids) - note.n_forced])
        self._prompt = Prompt(
            prompt_ids, _NO_IDS, None, self._prompt.attachment, None, forced, note.n_forced
        )
        self._reader = reader = self._open_reader()
        log_probs = _NO_LOG_PROBS if finished.log_probs is None else finished.log_probs
        if request.n_logprobs is not None and finished.log_probs is not None:
            tops = finished.alternatives or [()] * len(ids)
            self.tokens = [*map(SampledToken, ids, log_probs.tolist(), tops)]
        deltas = [*reader.begin(forced), *reader.feed(ids), *reader.finish()]
        # Ids of tool calls are made up when they are read, and the client knows the first ones.
        known = [ToolCall(*call) for call in note.calls]
        calls = iter(known)
        self.deltas = [next(calls, d) if isinstance(d, ToolCall) else d for d in deltas]
        reader.text.tool_calls[:] = known
        spans = tuple(VersionSpan(*span) for span in finished.spans)
        self.reply = self._replied(
            Generation(response, log_probs, spans, finished.finish_reason, None, 0)
        )
        parts.counts["recalled"] += 1
        self._done(finished)

    def becomes(self, other: FinishedCall) -> bool:
        """Whether this call and `other`, which another gateway stored, are two tries of one client:
        then the reply is that one's."""
        if (
            (self.retry.digest, self.retry.body_digest) != (other.note.retry, other.note.body)
            or self.state not in ("generating", "committing")
            or not (self.retry.is_retry or other.note.is_retry or not self._listeners)
        ):
            return False
        if self.request.stream and self._listeners and self.deltas:  # it was told otherwise
            self._duplicate_of = other.turn.step_index
            return False
        if self.state == "generating" and self._task is not None:
            self._task.cancel()
        self.recall(other)
        return True

    def listen(self) -> Listener:
        listener = Listener(self)
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener, why: GatewayError | None) -> None:
        self._listeners.discard(listener)
        self._settle()
        self._note_delivery()
        if not self._listeners and self.state == "generating":
            self._parts.counts["disconnected"] += why is None
            self.cancel(why or GatewayError("the client went away"))

    def cancel(self, why: GatewayError) -> None:
        """End it with this error, unless its Step is being stored."""
        if self.state == "generating" and self._task is not None:
            self._why_cancelled = why
            self._task.cancel()

    async def wait(self) -> None:
        """Return when it has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def notify(self, waiter: asyncio.Future[bool]) -> None:
        """Set `waiter` to true when there is a delta more, or the end."""
        self._waiting.append(waiter)

    def n_told(self, n_deltas: int) -> int:
        """How many of `tokens` the first `n_deltas` deltas tell, if log-probs are asked for."""
        return self._reader.told[n_deltas - 1] if n_deltas else 0

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self._prompt.ids)

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled of it so far; None: nothing is sampled yet."""
        if self.reply is None:
            return self._streamed_version
        return max(span.version for span in self.reply.generation.spans)

    @property
    def turn(self) -> Turn | None:
        """Its reply in the graph; None: not yet."""
        return None if self.finished is None else self.finished.turn

    @property
    def has_failed(self) -> bool:
        return self.state == "failed"

    @property
    def is_unclaimed(self) -> bool:
        """A reply exists, no client has its end, and none waits for it."""
        has_reply = self.state in ("committing", "done", "unstored")
        return has_reply and not self.delivered and not self._listeners

    # -- generating --------------------------------------------------------------------------

    async def _run(self) -> None:
        if self.reply is None:
            async with self._parts.limits:
                generation = await self._generate()
            self.reply = self._replied(generation)
        self.state = "committing"
        if self.request.stores_step:
            await self.trajectory.commit(self)
        if self.finished is None:  # answered without a Step
            self._answer(None)

    async def _generate(self) -> Generation:
        request, prompt, reader = self.request, self._prompt, self._reader
        self._publish(reader.begin(prompt.forced))
        asked_at = time.perf_counter()
        try:
            generation = await self._parts.engine.generate(
                prompt.ids,
                self._sampling,
                affinity=self.trajectory.uid,
                on_tokens=self._on_tokens if request.stream else None,
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
        self._engine_s = now - asked_at
        self._timing = {
            "began": round(time.time() - (now - request.began_at), 3),
            "waited_s": round(asked_at - request.began_at, 4),
            "engine_s": round(self._engine_s, 4),
        }
        ids: list[int] = generation.response_ids.tolist()
        if not request.stream:
            log_probs = generation.log_probs.tolist() if request.n_logprobs is not None else ()
            self._on_tokens(ids, log_probs, generation.top_log_probs)
        self._publish(reader.finish())
        n = None if isinstance(generation.matched, str) else reader.n_until_stop(ids)
        if n is None:
            return generation
        del self.tokens[n:]
        return generation.cut(n)

    def _on_tokens(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float] = (),
        alternatives: Sequence[TopLogProbs] = (),
        version: int | None = None,
    ) -> None:
        self._streamed_version = version
        if self.request.n_logprobs is not None:
            self.tokens += map(SampledToken, ids, log_probs, alternatives or [()] * len(ids))
        if self.request.stream or self.request.n_logprobs is not None:
            self._publish(self._reader.feed(ids))
        else:
            self._reader.take(ids)

    def _open_reader(self) -> ReplyReader:
        request, prompt = self.request, self._prompt
        return self._parts.format.reader(
            prompt.ids[: len(prompt.ids) - prompt.n_forced],
            tools=request.tools,
            parse_tools=request.parse_tools and bool(request.tools),
            stop=request.stop,
            raw=request.is_completion,
            counts=request.n_logprobs is not None,
            first_call=request.first_call,
        )

    def _replied(self, generation: Generation) -> Reply:
        read = self._reader
        return Reply(
            *(self.request, self._prompt, self._sampling, generation),
            *(read.text, read.has_reasoning, read.stop_sequence),
        )

    # -- committing --------------------------------------------------------------------------

    def step(self, index: int) -> Step | None:
        """Its Step with this index. None: it is stored. Another gateway did that, or another call's
        commit found that the pool had it, while a retry waited to commit it again."""
        if self.finished is not None:
            return None
        (reply, note), request, prompt = self._generated(), self.request, self._prompt
        attached = prompt.attachment
        if index > 0 and prompt.parent is None and prompt.cause is None:
            # Calls that begin together all see an empty graph; only the first to be stored is not a
            # branch (samples of one request are that).
            prompt.cause = self.trajectory.graph.attach(attached.root, request.said).cause
        said = None
        if request.messages:
            new = request.messages[attached.n_known if prompt.parent is not None else 0 :]
            said = self._parts.turn_messages.of(new, reply.text.message())
        metadata = {
            "call_id": self.uid,
            "dialect": self._dialect,
            NOTE: note.as_json(),
            MESSAGES: said,
            DUPLICATE_OF: self._duplicate_of,
            SUPERSEDES: self.trajectory.calls.superseded(
                self, index, prompt.parent, self.trajectory.graph
            )
            or None,
            UNSEEN: self.is_unseen or None,
            "timing": self._timing,
            "thinking": self._parts.thinking if note.has_reasoning else None,
            # 0: it might have called one.
            "tool_calls": len(note.calls) if request.tools and request.parse_tools else None,
        }
        return reply.step(self.trajectory.uid, self.trajectory.prompt_uid, index, metadata)

    def stored(self, index: int) -> None:
        """The pool has its Step. Runs in the same loop turn as the pool's answer."""
        reply = self._answer(index)
        self._parts.counts["stored"] += 1
        self._parts.counts["response_tokens"] += reply.n_response
        if reply.prompt.cause is not None:
            self._parts.branches[reply.prompt.cause] += 1

    def _generated(self) -> tuple[Reply, TurnNote]:
        reply = self.reply
        if reply is None:
            raise RuntimeError("the call has not been generated")
        if self._note is None:
            tokenizer = self._parts.prompts.renderer.tokenizer
            self._note = reply.note(self.retry, self.created, tokenizer)
        return reply, self._note

    def _answer(self, index: int | None) -> Reply:
        """The reply is final and a turn of the graph.

        Args:
            index: of its Step; None: it has none here.
        """
        (reply, note), parts, request = self._generated(), self._parts, self.request
        generation = reply.generation
        turn = self.trajectory.graph.add(
            note.keys,
            parent=reply.prompt.parent,
            new_prompt_ids=reply.prompt.new_ids,
            response_ids=generation.response_ids,
            calls=note.calls,
            has_reasoning=note.has_reasoning,
            step_index=index,
        )
        parts.on_turn(self.trajectory, note.keys.whole, note.keys.length)
        if request.prompt_text is not None:
            # The client goes on from what it was told, without the token that ended it.
            told = request.prompt_text + reply.text.content
            parts.on_turn(self.trajectory, text_key(told), len(told))
        parts.added_s.append(time.perf_counter() - request.began_at - self._engine_s)
        shows_log_probs = request.n_logprobs is not None or not request.stores_step
        self._done(
            FinishedCall(
                self.uid,
                note,
                turn,
                generation.finish_reason,
                tuple((s.version, s.start, s.end) for s in generation.spans),
                generation.log_probs if shows_log_probs else None,
                generation.top_log_probs,
                is_unseen=self.is_unseen,
            )
        )
        self._note_delivery()
        return reply

    # -- the end -----------------------------------------------------------------------------

    def _done(self, finished: FinishedCall) -> None:
        self.finished, self.state, self.error = finished, "done", None
        self._announce()
        self._settle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.trajectory.in_flight.discard(self)
        error = self._why_cancelled if task.cancelled() else task.exception()
        if error is not None and self.finished is None:
            if isinstance(error, EngineError | PoolUnavailableError):
                self._parts.failed_at = time.monotonic()
            is_kept = isinstance(error, PoolUnavailableError) and self.reply is not None
            self.state = "unstored" if is_kept else "failed"
            self.error = self._told(error)
            self._parts.counts["failed"] += 1
            self._announce()
            self._settle()
        self.trajectory.forget_if_unused()

    def _told(self, error: BaseException) -> GatewayError:
        """As its clients are told."""
        if isinstance(error, GatewayError):
            return error
        if isinstance(error, InvalidStepError):
            return EngineError(f"the engine's answer makes no Step: {error}")
        if isinstance(error, DataPoolError):
            return TrajectoryConflictError(f"the DataPool refuses the Step: {error}")
        uid = self.trajectory.uid  # a bug of ours
        log.error("call %s on trajectory %s failed", self.uid, uid, exc_info=error)
        return GatewayError(f"the gateway failed ({type(error).__name__}); see its log")

    def _settle(self) -> None:
        """Once the call has ended and its clients have left, remember only what a retry needs."""
        if self.state in ("done", "failed") and not self._listeners:
            if self.finished is not None:
                self.finished.delivered |= self.delivered
            self.trajectory.calls.settle(self, self.finished)

    def _note_delivery(self) -> None:
        """Once its clients have left, note whether one of them got the end."""
        if (finished := self.finished) is not None and not self._listeners:
            self.trajectory.set_unseen(finished, self.is_unseen or not finished.delivered)

    def _publish(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._announce()

    def _announce(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():  # its client left
                waiter.set_result(True)
        self._waiting.clear()


class Listener:
    """One client's view of a call: every delta from the first on, then the reply or the error."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.told: Sequence[SampledToken] = ()
        """Of the call's `tokens`, those that the last delta tells, or the reply: the rest."""
        self._n_told = self._read = 0
        self._has_ended = False

    @property
    def has_news(self) -> bool:
        """`next` has something, or raises."""
        call = self.call
        return self._read < len(call.deltas) or call.error is not None or call.state == "done"

    def next(self) -> Delta | Reply | None:
        """The next delta, or once the reply when its Step is stored; None: nothing yet, or no more.

        Raises:
            GatewayError: the call failed.
        """
        call = self.call
        if self._read < len(call.deltas):
            self._read += 1
            if call.request.n_logprobs is not None:
                self._tell(call.n_told(self._read))
            return call.deltas[self._read - 1]
        if self._has_ended or (ended := self._end()) is None:
            return None
        self._has_ended = True
        self._tell(len(call.tokens))
        return ended

    def check(self) -> None:
        """Raise the error of a call that failed before its first delta."""
        if not self.call.deltas:
            self._end()

    def notify(self, waiter: asyncio.Future[bool]) -> None:
        """Set `waiter` to true when `next` may have something more."""
        self.call.notify(waiter)

    async def result(self) -> Reply:
        """The reply, deltas skipped."""
        while (ended := self._end()) is None:
            news = asyncio.get_running_loop().create_future()
            self.call.notify(news)
            await news
        return ended

    def close(self, why: GatewayError | None = None) -> None:
        """Listen no more, because the client went away or for another reason."""
        self.call.leave(self, why)

    def _tell(self, n: int) -> None:
        self.told, self._n_told = self.call.tokens[self._n_told : n], max(self._n_told, n)

    def _end(self) -> Reply | None:
        if self.call.error is not None:
            raise self.call.error
        return self.call.reply if self.call.state == "done" else None
