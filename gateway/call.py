"""One LLM call from request to stored Step, in whatever dialect it came.

Life cycle of a `Call`; it runs as its own task, so that a client's retry can join it::

    preparing ──► generating ──► committing ──► done        (the Step is in the pool)
        │             │              └────────► unstored    (pool failed; a retry commits again)
        └─────────────┴──► failed                           (refused, engine failed, aborted)

- A trajectory that is new here is opened in the pool meanwhile; no client hears of the call before.
- preparing: attach to the turn graph, render and tokenise what is new, check that it fits.
- generating: ids from the engine become deltas for whoever listens.
- committing: the Step takes the next `step_index`. No longer cancelled.
- The terminal event of the reply exists only once the call is done.

A call without listeners (every client went away) is aborted unless it is committing. Retries: a
request with a retry mark (`RetryKey.is_retry`) and the bytes of an earlier one is that call: it
joins it while in flight and gets its recorded reply afterwards. The same bytes without the mark are
another sample. A call whose last client has left is kept as a `FinishedCall`, as is one that
another gateway stored. For a retry it is a `Call` again, which begins as `committing` and reads its
reply from the sampled ids. A client may try again at another gateway while its first try is still
generated here: of the two calls, the one that is to be stored later becomes the other one.

Owns: this life cycle. Does not own: wire formats (`dialects/`), order and closing
(`trajectory/trajectory.py`), which call a retry is for (`trajectory/retries.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.types import Step, TokenIds, VersionSpan
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.engine import EngineClient, Generation, Sampling, TopLogProbs
from stepwell.gateway.errors import (
    ChannelFullError,
    ContextLengthError,
    EngineError,
    GatewayError,
    PoolUnavailableError,
    RequestError,
    TrajectoryConflictError,
)
from stepwell.gateway.latency import AddedLatency
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.prompt import ChatRequest, Prompt, Prompts
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import Delta, ReplyText
from stepwell.gateway.reply.reader import ReplyFormat, ReplyReader
from stepwell.gateway.tokens.graph import join
from stepwell.gateway.tokens.messages import (
    Key,
    extend_key,
    text_key,
)
from stepwell.gateway.tokens.turn_messages import MESSAGES, TurnMessages
from stepwell.gateway.trajectory.note import NOTE, TurnKeys, TurnNote
from stepwell.gateway.trajectory.recording import Recording
from stepwell.gateway.trajectory.retries import (
    FinishedCall,
    Remembered,
    RetryKey,
    pack,
    retry_digest,
    unpack,
)
from stepwell.gateway.trajectory.trajectory import Commit, LiveTrajectory
from stepwell.gateway.wiring import ChannelSampling

log = logging.getLogger(__name__)

T = TypeVar("T")
_NO_IDS = np.empty(0, np.int32)
_NO_IDS.flags.writeable = False
_NO_LOG_PROBS = np.empty(0, np.float32)
State: TypeAlias = Literal["preparing", "generating", "committing", "done", "unstored", "failed"]


class SampledToken(NamedTuple):
    """A token as an answer with log-probs shows it."""

    token_id: int
    log_prob: float
    alternatives: TopLogProbs
    """(token id, log-prob), best first."""


@dataclass(slots=True)
class Reply:
    """A finished call."""

    text: ReplyText
    has_reasoning: bool
    prompt: Prompt
    generation: Generation
    sampling: Sampling
    n_prompt: int
    stop_sequence: str | None = None
    """The request's stop string that ended the text."""

    @property
    def n_response(self) -> int:
        return len(self.generation.response_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.generation.finish_reason == "stop" and self.text.tool_calls:
            return "tool_calls"
        return self.generation.finish_reason


class Call:
    """See the module's life cycle. Made by `CallService.start`."""

    def __init__(
        self,
        service: CallService,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        retry: RetryKey,
        dialect: str,
        finished: FinishedCall | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.uid = uuid.uuid4().hex if finished is None else finished.call_id
        self.created = int(time.time()) if finished is None else finished.created
        self.request = request
        self.key = retry_digest(retry.key)
        self.body = None if retry.body in retry.key else retry_digest(retry.body)
        """Digest of the request's bytes, where its key does not hold that."""
        self.is_retry = retry.is_retry
        self.dialect = dialect
        self.state: State = "preparing" if finished is None else "committing"
        self.deltas: list[Delta] = []
        self.tokens: list[SampledToken] = []
        """What was sampled so far, if the request asks for log-probs."""
        self.n_prompt: int | None = None
        """Tokens of the prompt, once it is rendered."""
        self.reply: Reply | None = None
        """Set once generated; final (its Step stored) when the state is `done`."""
        self.step_index: int | None = None
        self.error: GatewayError | None = None
        self.delivered = finished is not None and finished.delivered
        """The terminal event was handed to some client's connection."""
        self._service = service
        self._trajectory = trajectory
        self._listeners: set[Listener] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._why_cancelled: GatewayError | None = None
        self._begun = False
        self._engine_s = 0.0
        self._reader: ReplyReader | None = None
        self._streamed_version: int | None = None
        self._finished = finished
        self._known = asyncio.Event() if ahead else None
        """Set when the pool has said that the trajectory is what the call takes it for."""
        self._fits = asyncio.Event()
        """Set when the prompt is made and fits, or the call waits its turn or has failed."""
        self._note: TurnNote | None = None
        self._turn: int | None = None
        """Number of its turn in the graph, once stored there."""
        self._task = self._start()

    def n_told(self, n_deltas: int) -> int:
        """How many of `tokens` the first `n_deltas` deltas tell, if log-probs are asked for."""
        return self._reader.told[n_deltas - 1] if self._reader is not None and n_deltas else 0

    def listen(self) -> Listener:
        listener = Listener(self)
        self._listeners.add(listener)
        return listener

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled of it so far; None: nothing is sampled yet."""
        if self.reply is None:
            return self._streamed_version
        return max(span.version for span in self.reply.generation.spans)

    @property
    def has_failed(self) -> bool:
        return self.state == "failed"

    @property
    def is_unclaimed(self) -> bool:
        """A reply exists, no client has its end, and none waits for it."""
        has_reply = self.state in ("committing", "done", "unstored")
        return has_reply and not self.delivered and not self._listeners

    def commit_again(self) -> None:
        """A retry of a call whose Step could not be stored: submit the very same Step."""
        self.error = None
        self.state = "committing"
        self._task = self._start()

    def was_stored_elsewhere(self, key: bytes, other: FinishedCall) -> bool:
        """This call and `other`, which another gateway stored for a request of this key, are one
        call of one client: then the reply is that one's."""
        if (
            key != self.key
            or self.body != other.body
            or self._finished is not None
            or self.state not in ("preparing", "generating", "committing")
            or (self._known is not None and not self._known.is_set())  # it may be abandoned
            or not (self.is_retry or other.is_retry or not self._listeners)
            or (self.request.stream and self._listeners and self.deltas)  # it was told otherwise
        ):
            return False
        self._finished, self.delivered = other, other.delivered
        self.uid, self.created = other.call_id, other.created
        return True

    def confirm(self) -> None:
        """Its trajectory is known now: it may be committed."""
        if self._known is not None:
            self._known.set()

    def abandon(self) -> None:
        """Instead of `confirm`: it should not have begun, and no retry finds it."""
        self._trajectory.calls.forget(self.key, self)
        self.cancel(GatewayError("the call began before its trajectory was known"))

    async def prepared(self) -> bool:
        """Wait for the prompt, or for a place in the queue; false: the call has failed."""
        await self._fits.wait()
        return self.error is None

    async def wait(self) -> None:
        await asyncio.wait([self._task])

    def _start(self) -> asyncio.Task[None]:
        self._trajectory.in_flight.add(self)
        return asyncio.create_task(self._run())

    def cancel(self, why: GatewayError) -> None:
        """End it with this error, unless its Step is being stored."""
        if self.state in ("preparing", "generating"):
            self._why_cancelled = why
            self._task.cancel()
            if not self._begun:  # then the task never runs, and `_run` cannot say so
                self._trajectory.in_flight.discard(self)
                self._fail(why)
                self._trajectory.forget_if_unused()

    async def _run(self) -> None:
        self._begun = True
        try:
            if self._finished is not None:
                await self._recall(self._finished)
                return
            if self.reply is None:
                if not self._service.limits.has_room(self._trajectory.uid):
                    self._fits.set()  # not known yet, but its client is kept alive in the queue
                async with self._service.limits.admit(self._trajectory.uid):
                    self.reply = await self._generate()
            if self._known is not None:
                await self._known.wait()
            self.state = "committing"
            if self.request.stores_step:
                await self._commit()
            else:
                self._answered(None)
        except asyncio.CancelledError:
            self._fail(self._why_cancelled or GatewayError("the gateway is shutting down"))
        except PoolUnavailableError as e:
            self._service.failed_at = time.monotonic()
            self._fail(e, "unstored" if self.reply is not None else "failed")
        except GatewayError as e:
            if isinstance(e, EngineError):
                self._service.failed_at = time.monotonic()
            self._fail(e)
        except InvalidStepError as e:
            self._fail(EngineError(f"the engine's answer makes no Step: {e}"))
        except DataPoolError as e:
            self._fail(TrajectoryConflictError(f"the DataPool refuses the Step: {e}"))
        except Exception as e:  # a bug of ours: logged, and whoever waits for the call is told
            log.exception("call %s on trajectory %s failed", self.uid, self._trajectory.uid)
            self._fail(GatewayError(f"the gateway failed ({type(e).__name__}); see its log"))
        finally:
            self._trajectory.in_flight.discard(self)
            self._trajectory.forget_if_unused()

    async def _commit(self) -> None:
        why = await self._trajectory.record(Commit(self._step, self._stored))
        if why is not None:
            self._service.recording.unrecorded[why] += 1
            self._answered(None)
        elif self._finished is not None:
            await self._recall(self._finished)

    async def _generate(self) -> Reply:
        service, request = self._service, self.request
        prompt = await service.prompts.prepare(
            self._trajectory.graph,
            request,
            await service.engine.context_length(),
            self._trajectory.catch_up if service.config.replicas > 1 else None,
        )
        self.n_prompt = len(prompt.ids)
        sampling = await service.sampling(request, self.n_prompt, self._trajectory)
        self._fits.set()
        self._reader = reader = self._open_reader(prompt.ids, prompt.n_forced)
        self._publish(reader.begin(prompt.forced))
        self.state = "generating"
        asked_at = time.perf_counter()
        try:
            generation = await service.engine.generate(
                prompt.ids,
                sampling,
                affinity=self._trajectory.uid,
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
        self._engine_s = time.perf_counter() - asked_at
        if not request.stream:
            self._on_tokens(
                generation.response_ids.tolist(),
                generation.log_probs.tolist() if request.n_logprobs is not None else (),
                generation.top_log_probs,
            )
        self._publish(reader.finish())
        if not isinstance(generation.matched, str):
            n = reader.n_until_stop(generation.response_ids.tolist())
            if n is not None:
                generation = generation.cut(n)
                del self.tokens[n:]
        return Reply(
            reader.text,
            reader.has_reasoning,
            prompt,
            generation,
            sampling,
            self.n_prompt,
            reader.stop_sequence,
        )

    def _open_reader(self, prompt_ids: TokenIds, n_forced: int) -> ReplyReader:
        request = self.request
        return self._service.format.reader(
            prompt_ids[: len(prompt_ids) - n_forced],
            tools=request.tools,
            parse_tools=request.parse_tools and bool(request.tools),
            stop=request.stop,
            raw=request.is_completion,
            counts=request.n_logprobs is not None,
        )

    async def _recall(self, finished: FinishedCall) -> None:
        """Be a call that was finished before, here or at another gateway, for the same request."""
        service, request = self._service, self.request
        turn = None if finished.turn is None else self._trajectory.graph.turn(finished.turn)
        if turn is not None:
            prompt_ids = join(turn.prompt())
        elif request.prompt_ids is not None:
            prompt_ids = request.prompt_ids
        else:
            raise GatewayError("the call's prompt is neither in the turn graph nor in the request")
        self.n_prompt = len(prompt_ids)
        forced = service.prompts.forced_text(
            request, prompt_ids[: self.n_prompt - finished.n_forced]
        )
        self._reader = reader = self._open_reader(prompt_ids, finished.n_forced)
        self.deltas.clear()
        ids = finished.response_ids.tolist()
        if request.n_logprobs is not None and finished.log_probs is not None:
            tops = unpack(finished.alternatives) or [()] * len(ids)
            self.tokens = [*map(SampledToken, ids, finished.log_probs.tolist(), tops)]
        deltas = [*reader.begin(forced), *reader.feed(ids), *reader.finish()]
        # Ids of tool calls are made up when they are read, and the client knows the first ones.
        known = [ToolCall(*call) for call in finished.calls]
        calls = iter(known)
        deltas = [next(calls, d) if isinstance(d, ToolCall) else d for d in deltas]
        reader.text.tool_calls[:] = known
        spans = finished.spans or ((finished.version, 0, len(ids)),)
        self.reply = Reply(
            reader.text,
            reader.has_reasoning,
            Prompt(prompt_ids, _NO_IDS, None, None, b"", None, forced, finished.n_forced),
            Generation(
                response_ids=finished.response_ids,
                log_probs=_NO_LOG_PROBS if finished.log_probs is None else finished.log_probs,
                spans=tuple(VersionSpan(*span) for span in spans),
                finish_reason=finished.finish_reason,
                matched=None,
                cached_tokens=finished.cached_tokens,
                resumes=0,
            ),
            await service.sampling(request, self.n_prompt, self._trajectory),
            self.n_prompt,
            reader.stop_sequence,
        )
        self.step_index, self.state = finished.step_index, "done"
        self._turn = finished.turn
        service.counts["recalled"] += 1
        self._publish(deltas)
        self._ended()

    def _on_tokens(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float] = (),
        alternatives: Sequence[TopLogProbs] = (),
        version: int | None = None,
    ) -> None:
        self._streamed_version = version
        if self.request.n_logprobs is not None:
            tops = alternatives or [()] * len(ids)
            self.tokens += map(SampledToken, ids, log_probs, tops)
        if self._reader is None:
            return
        if self.request.stream or self.request.n_logprobs is not None:
            self._publish(self._reader.feed(ids))
        else:
            self._reader.take(ids)

    def _make_note(self, reply: Reply) -> TurnNote:
        """What the Step's ids do not say of this call."""
        prompt, plain = reply.prompt, self.request.plain
        response_ids = reply.generation.response_ids
        keys = text_length = None
        if prompt.attachment is not None:
            prompt_key = prompt.attachment.prompt_key
            if plain is None:
                whole = extend_key(prompt_key, reply.text.message())
            else:
                if isinstance(plain, bytes):
                    plain += response_ids.tobytes()
                else:
                    plain += self._service.renderer.tokenizer.decode(response_ids.tolist())
                whole, text_length = text_key(plain), len(plain)
            keys = TurnKeys(prompt.root, prompt_key, whole)
        return TurnNote(
            self.key,
            self.created,
            keys,
            reply.has_reasoning or (prompt.parent is not None and prompt.parent.has_reasoning),
            prompt.n_forced,
            text_length,
            self.body,
            tuple(reply.text.tool_calls),
            self.is_retry,
        )

    def _step(self, index: int) -> Step | None:
        """None: it is stored. Another gateway did that, or another call's commit found that the
        pool had it, while a retry waited to commit it again."""
        if self.reply is None:
            raise RuntimeError("a call is committed only after its generation")
        if self._finished is not None or self.state == "done":
            return None
        if self._note is None:
            self._note = self._make_note(self.reply)
        if index > 0:
            self._settle_cause(self.reply)
        prompt, generation = self.reply.prompt, self.reply.generation
        metadata: dict[str, Any] = {
            "sampling_params": {
                "temperature": self.reply.sampling.temperature,
                "top_p": self.reply.sampling.top_p,
                "top_k": self.reply.sampling.top_k,
            },
            "call_id": self.uid,
            "dialect": self.dialect,
            NOTE: self._note.text(),
        }
        if self.reply.sampling.min_p > 0:
            metadata["sampling_params"]["min_p"] = self.reply.sampling.min_p
        if self.request.messages:
            attached = prompt.attachment if prompt.parent is not None else None
            new = self.request.messages[attached.n_known if attached is not None else 0 :]
            said = self._service.turn_messages.of(new, self.reply.text.message())
            if said is not None:
                metadata[MESSAGES] = said
        if self.request.constraint is not None:
            # Log-probs are those of the unconstrained policy; the samples are not its own.
            metadata["constraint"] = self.request.constraint[0]
        if self.request.forced_tool is not None:
            metadata["forced_tool"] = self.request.forced_tool
        if self.request.prefill:
            metadata["prefilled"] = True
        if self.request.tools and self.request.parse_tools:  # 0: it might have called one
            metadata["tool_calls"] = len(self.reply.text.tool_calls)
        if prompt.cause is not None:
            metadata["branch"] = prompt.cause
        if self.reply.has_reasoning or (prompt.parent is not None and prompt.parent.has_reasoning):
            metadata["thinking"] = self._service.config.thinking
        return Step(
            prompt_ids=prompt.ids,
            response_ids=generation.response_ids,
            trajectory_uid=self._trajectory.uid,
            prompt_uid=self._trajectory.prompt_uid,
            step_index=index,
            policy_version=generation.policy_version,
            metadata=metadata,
            rollout_log_probs=generation.log_probs,
            finish_reason=generation.finish_reason,
            parent_index=prompt.parent.nearest_step() if prompt.parent is not None else None,
            version_spans=generation.spans if len(generation.spans) > 1 else (),
        )

    def _settle_cause(self, reply: Reply) -> None:
        """Calls that begin together all see an empty graph; only the first to be stored is not a
        branch (samples of one request are that)."""
        prompt = reply.prompt
        if prompt.parent is not None or prompt.cause is not None or prompt.attachment is None:
            return
        graph, plain = self._trajectory.graph, self.request.plain
        if plain is not None:
            cause = graph.attach_text(plain).cause
        else:
            cause = graph.attach(prompt.root, self.request.messages).cause
        prompt.cause = cause

    def _stored(self, index: int) -> None:
        """Runs under the trajectory's lock, in the same loop turn as the pool's answer."""
        self._answered(index)
        if self.reply is not None:
            self._service.count_stored(self.reply)

    def _answered(self, index: int | None) -> None:
        """The reply is final and a turn of the graph.

        Args:
            index: of its Step; None: it has none here.
        """
        reply = self.reply
        if reply is None:
            raise RuntimeError("a call is answered only after its generation")
        note = self._note or self._make_note(reply)
        if reply.prompt.attachment is not None and note.keys is not None:
            turn = self._trajectory.graph.add(
                reply.prompt.root,
                reply.prompt.attachment,
                parent=reply.prompt.parent,
                new_prompt_ids=reply.prompt.new_ids,
                response_ids=reply.generation.response_ids,
                key=note.keys.whole,
                reply=reply.text.message(),
                has_reasoning=reply.has_reasoning,
                step_index=index,
                text_length=note.text_length,
            )
            self._turn = turn.number
            self._service.on_turn(self._trajectory, turn.key, note.text_length)
            if isinstance(plain := self.request.plain, str):
                # The client goes on from what it was told, without the token that ended it.
                told = plain + reply.text.content
                self._service.on_turn(self._trajectory, text_key(told), len(told))
        self.step_index = index
        self.state, self.error = "done", None
        self._service.latency.note(time.perf_counter() - self.request.began_at - self._engine_s)
        self._ended()

    def _fail(self, error: GatewayError, state: State = "failed") -> None:
        if self.state != "done":
            self.state, self.error = state, error
            self._service.counts["failed"] += 1
        self._ended()

    def _ended(self) -> None:
        self._fits.set()
        self._announce()
        self._retire()

    def _retire(self) -> None:
        """Once the call has ended and its clients have left, remember only what a retry needs."""
        if self.state in ("done", "failed") and not self._listeners:
            self._trajectory.calls.replace(self.key, self, self._kept())

    def _kept(self) -> Remembered:
        if self._finished is not None:  # a retry was answered, or could not be
            delivered = self.delivered
            return tuple(self._finished._replace(delivered=delivered))
        if self.reply is None or self.state != "done":
            return None
        prompt, generation = self.reply.prompt, self.reply.generation
        shows_log_probs = self.request.n_logprobs is not None or not self.request.stores_step
        spans = tuple((s.version, s.start, s.end) for s in generation.spans)
        graph = self._trajectory.graph
        return tuple(
            FinishedCall(
                call_id=self.uid,
                created=self.created,
                body=self.body,
                is_retry=self.is_retry,
                delivered=self.delivered,
                step_index=self.step_index,
                turn=self._turn,
                response_ids=generation.response_ids,
                n_forced=prompt.n_forced,
                calls=() if self._turn is None else graph.turn(self._turn).calls,
                finish_reason=generation.finish_reason,
                spans=spans if len(spans) > 1 else (),
                version=generation.policy_version,
                cached_tokens=generation.cached_tokens,
                log_probs=generation.log_probs if shows_log_probs else None,
                alternatives=pack(generation.top_log_probs),
            )
        )

    def _publish(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._announce()

    async def news(self) -> None:
        """Return when there is a delta more, or the end."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _announce(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():  # its client left
                waiter.set_result(None)
        self._waiting.clear()

    def _left(self, listener: Listener, why: GatewayError | None) -> None:
        self._listeners.discard(listener)
        self._retire()
        if not self._listeners and self.state in ("preparing", "generating"):
            self._service.counts["disconnected"] += why is None
            self.cancel(why or GatewayError("the client went away"))


class Listener:
    """One client's view of a call: every delta from the first on, then the reply or the error."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.n_told = 0
        """How many of the call's `tokens` the deltas so far tell; all, with the reply."""
        self._read = 0

    async def next(self) -> Delta | Reply:
        """The next delta, or the reply when its Step is stored.

        Raises:
            GatewayError: the call failed.
        """
        call = self.call
        while True:
            if self._read < len(call.deltas):
                self._read += 1
                self.n_told = call.n_told(self._read)
                return call.deltas[self._read - 1]
            if (ended := self._end()) is not None:
                self.n_told = len(call.tokens)
                return ended
            await call.news()

    async def result(self) -> Reply:
        """The reply, deltas skipped."""
        while (ended := self._end()) is None:
            await self.call.news()
        return ended

    def close(self, why: GatewayError | None = None) -> None:
        """Listen no more, because the client went away or for another reason."""
        self.call._left(self, why)

    def _end(self) -> Reply | None:
        if self.call.error is not None:
            raise self.call.error
        return self.call.reply if self.call.state == "done" else None


class CallService:
    """Makes calls. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        prompts: Prompts,
        reply_format: ReplyFormat,
        engine: EngineClient,
        limits: CallLimits,
        sampling: Mapping[str, ChannelSampling],
        recording: Recording,
        turn_messages: TurnMessages,
        on_turn: Callable[[LiveTrajectory, Key, int | None], None],
    ) -> None:
        """`sampling`: by channel. `on_turn`: told of every turn that enters a graph, with the key
        of its conversation and, of a plain text, its length."""
        self.config = config
        self.limits = limits
        self._sampling = sampling
        self.recording = recording
        self.turn_messages = turn_messages
        self.latency = AddedLatency()
        self.prompts = prompts
        self.renderer = prompts.renderer
        self.format = reply_format
        self.engine = engine
        self.failed_at = float("-inf")
        """When engine or pool last failed a call (`time.monotonic()`)."""
        self.counts: Counter[str] = Counter()
        self.branches: Counter[str] = Counter()
        self.pace = engine.pace
        """One for requests, the engines' answers and the pool's: they share the turns."""
        self._blocking: set[str] = set()
        """Channels that were full once: they are asked for room before anything is generated."""
        self.on_turn = on_turn

    async def start(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        retry: RetryKey,
        dialect: str,
        n: int = 1,
    ) -> list[Listener]:
        """Begin `n` calls, or find those that this request repeats.

        Raises:
            RequestError: the model's template or parser cannot do what is asked.
            TrajectoryLimitError: the trajectory's turns or tokens are used up.
            TrajectoryClosedError, TrajectoryConflictError, PoolUnavailableError
        """
        keys = [retry] if n == 1 else [replace(retry, key=f"{retry.key}/{i}") for i in range(n)]
        with trajectory.in_use():
            self._check(request)
            if trajectory.unrecorded == "asked":
                request = replace(request, is_kept=False)
            begin = partial(self._start_each, trajectory, request, keys, dialect)
            if trajectory.is_new and trajectory.channel not in self._blocking:
                goes_on = any(m["role"] == "assistant" for m in request.messages)
                if not (goes_on and await trajectory.is_stored()):
                    listeners = await self._start_ahead(trajectory, begin)
                    if listeners is not None:
                        return listeners
            was_new = trajectory.is_new
            await trajectory.open()
            if not was_new:
                await self._look_elsewhere(trajectory, keys)
            trajectory.touch()
            return begin(ahead=False)

    async def _look_elsewhere(self, trajectory: LiveTrajectory, keys: Sequence[RetryKey]) -> None:
        """Find what another gateway stored of a retry whose first try is not known here: its
        answer may have been lost."""
        # Those who name all their requests retry few of them.
        if keys[0].is_retry and (self.config.replicas > 1 or not keys[0].is_named):
            known = (trajectory.calls.knows(retry_digest(key.key)) for key in keys)
            if not all(known):
                await trajectory.catch_up()

    async def _start_ahead(
        self, trajectory: LiveTrajectory, begin: Callable[..., list[Listener]]
    ) -> list[Listener] | None:
        """Generate while the pool is asked about the trajectory: nearly always that knows nothing.
        It is not asked about calls that are refused, which so open nothing.
        None: it knows something, or has no room, and the calls were given up."""
        as_begun = trajectory.greedy, self._forced(trajectory)
        listeners = begin(ahead=True)
        try:
            if not any([await listener.call.prepared() for listener in listeners]):
                return listeners
            await trajectory.open(waits=False)
            as_known = trajectory.greedy, self._forced(trajectory)
            if trajectory.steps == 0 and as_begun == as_known:
                for listener in listeners:
                    listener.call.confirm()
                trajectory.touch()
                return listeners
            # Another gateway stored turns of it, of which this may be one, or was told that it is
            # greedy or in a channel that is sampled otherwise.
        except ChannelFullError:
            self._blocking.add(trajectory.channel)
        except BaseException as e:  # a refusal, or a cancellation: nobody is going to listen
            for listener in listeners:
                listener.close(e if isinstance(e, GatewayError) else None)
            raise
        for listener in listeners:
            listener.call.abandon()
        for listener in listeners:
            await listener.call.wait()
        return None

    def _start_each(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        keys: Sequence[RetryKey],
        dialect: str,
        *,
        ahead: bool,
    ) -> list[Listener]:
        listeners: list[Listener] = []
        try:
            for key in keys:
                listeners.append(self._start(trajectory, request, key, dialect, ahead))
        except GatewayError:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def _check(self, request: ChatRequest) -> None:
        if request.tools and request.parse_tools and not self.renderer.shows_tools:
            raise RequestError(
                "the model's chat template does not show tools to the model; leave them out",
                "tools",
            )
        if request.forced_tool is not None and (
            not self.format.reads_calls or self.renderer.call_opening(request.forced_tool) is None
        ):
            raise RequestError(
                "tool_choice asks for a call, but the model's chat template does not show how a "
                "call begins that gateway.tool_parser reads; send 'auto' or 'none'",
                "tool_choice",
            )
        if (
            not request.parallel_tool_calls
            and request.tools
            and self.format.call_close is None
            and not self.format.calls_once
        ):
            raise RequestError(
                "parallel_tool_calls is false, but this model's tool calls have no known end to "
                "stop at; leave it out",
                "parallel_tool_calls",
            )

    def _start(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        retry: RetryKey,
        dialect: str,
        ahead: bool,
    ) -> Listener:
        memory, key = trajectory.calls, retry_digest(retry.key)
        found = memory.find(key, retry)
        if found is not None:
            self.counts["retries"] += 1
        if isinstance(found, Call):
            if found.state == "unstored":
                found.commit_again()
            return found.listen()
        if isinstance(found, tuple):
            finished = FinishedCall(*found)
            call = Call(self, trajectory, request, retry, dialect, finished)
            memory.replace(key, found, call)
            return call.listen()
        n_turns = trajectory.steps + len(trajectory.in_flight)
        self.limits.check_trajectory(n_turns, trajectory.graph.n_tokens)
        self.counts["calls"] += 1
        call = Call(self, trajectory, request, retry, dialect, ahead=ahead)
        memory.add(key, call, self.config.remembered_calls)
        return call.listen()

    async def sampling(
        self, request: ChatRequest, n_prompt: int, trajectory: LiveTrajectory
    ) -> Sampling:
        """Parameters as they will be used: the channel's over the request's, and temperature 0 over
        all in a greedy trajectory.

        Raises:
            ContextLengthError: the prompt leaves no room for one token.
        """
        forced = self._forced(trajectory)
        context = await self.engine.context_length()
        # Engines refuse a request whose prompt and response reach the context length.
        room = context - n_prompt - 1
        if room < 1:
            raise ContextLengthError.of(n_prompt, context)
        one_call = None
        if request.tools and request.parse_tools and not request.parallel_tool_calls:
            one_call = self.format.call_close
        limit = min(forced.max_tokens or room, room)
        temperature = _first(forced.temperature, request.temperature, 1.0)
        return Sampling(
            max_new_tokens=min(request.max_tokens or limit, limit),
            temperature=0.0 if trajectory.greedy else temperature,
            top_p=_first(forced.top_p, request.top_p, 1.0),
            top_k=_first(forced.top_k, request.top_k, -1),
            min_p=request.min_p or 0.0,
            stop=request.stop if one_call is None else (*request.stop, one_call),
            seed=request.seed,
            n_top_logprobs=request.n_logprobs or 0,
            constraint=request.constraint,
        )

    def _forced(self, trajectory: LiveTrajectory) -> ChannelSampling:
        return self._sampling.get(trajectory.channel, ChannelSampling())

    def count_stored(self, reply: Reply) -> None:
        self.counts["stored"] += 1
        self.counts["response_tokens"] += len(reply.generation.response_ids)
        if reply.prompt.cause is not None:
            self.branches[reply.prompt.cause] += 1


def _first(*choices: T | None) -> T:
    return next(c for c in choices if c is not None)
