"""One LLM call from its prompt to its stored Step, in whatever dialect it came.

    request ──► prompts made, fit ──► trajectories open ──► each sample: joined │ recalled │ begun
                     └──► refused: the pool hears nothing of it

    generating ──► committing ──► done        (the Step is in the pool, the reply is a turn)
        │              └────────► unstored    (the pool failed; a retry commits the same Step again)
        └──► failed                           (the engine failed, refused, aborted)

`start` finds or makes the calls of a request: all of them, or none. A prompt is made again if
another gateway turns out to have turns of its trajectory. `run` is the straight way of one call:
generate, commit, make a turn of it, answer. It runs in the task of its request; only several
samples have tasks of their own. The terminal event of a reply exists only once the call is
done.

A call that nobody reads any more (every client went away) is aborted unless it is committing.
Retries: a request with a retry mark (`RetryKey.is_retry`) and the bytes of an earlier one is that
call: it joins it while in flight and gets its recorded reply afterwards. The same bytes without the
mark are another sample. A client may try again at another gateway while its first try is still
generated here: of the two calls, the one that is to be stored later adopts the result of the other.

Owns: this life cycle, how a call is sampled, its Step. Does not own: wire formats (`dialects/`),
whose a call is (`trajectory/identity.py`), order and closing (`trajectory/trajectory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import urandom
from typing import Any, TypeAlias

import numpy as np

from stepwell.backends.engines.api import PromptPictures, Sampling
from stepwell.datapool.errors import (
    DamagedFileError,
    DataPoolError,
    InvalidStepError,
    JournalError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownPictureError,
)
from stepwell.datapool.types import (
    DUPLICATE_OF,
    SUPERSEDES,
    UNSEEN,
    Step,
    TokenIds,
    VersionSpan,
    trusted_step,
)
from stepwell.gateway.access import Principal
from stepwell.gateway.config import ChannelSampling, Thinking
from stepwell.gateway.engine import Generation, Sampler
from stepwell.gateway.errors import (
    UNAVAILABLE,
    EngineError,
    GatewayError,
    RequestError,
    TrajectoryLimitError,
    from_pool,
)
from stepwell.gateway.limits import CallLimits
from stepwell.gateway.pictures import PictureReader
from stepwell.gateway.prompt import ChatRequest, Prompts
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.reader import ReplyFormat, ReplyText
from stepwell.gateway.tokens.graph import Turn, join
from stepwell.gateway.tokens.messages import MESSAGES, TurnMessages, text_key
from stepwell.gateway.trajectory.calls import (
    NOTE,
    Call,
    LiveCall,
    RetryKey,
    SampledToken,
    TurnNote,
    completed_at,
)
from stepwell.gateway.trajectory.trajectory import LiveTrajectory

log = logging.getLogger(__name__)

MAX_BEGINNINGS = 1000
"""Trajectories that a conversation may find closed as it begins, one after the other: a session has
one more after each pause, and a gateway that was not there asks the pool for each."""
GREEDY_BELOW = 1e-6
"""Temperature below which engines take the likeliest token, with its log-prob at temperature 1."""
REMEMBERED_TIMES = 4096
_NO_LOG_PROBS = np.empty(0, np.float32)

BeginAgain: TypeAlias = Callable[[LiveTrajectory, ChatRequest, int], LiveTrajectory]
"""Gives the conversation of prompt `i` another trajectory, because its own takes no more calls."""

_Sample: TypeAlias = tuple[LiveTrajectory, ChatRequest, RetryKey, Call | None]
"""One sample that a request asks for; its call, if it repeats one."""


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
    pictures: PictureReader | None = None
    """None: the model takes none."""
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
        requests: Sequence[ChatRequest],
        trajectories: list[LiveTrajectory],
        retry: RetryKey,
        dialect: str,
        *,
        n: int = 1,
        caller: Principal,
        begin_again: BeginAgain | None = None,
    ) -> list[LiveCall]:
        """Begin the calls of a request, or find those that it repeats: the samples of its first
        prompt, then those of the next one. Whoever reads them joins their `readers` before the
        event loop goes on.

        Args:
            requests: one for each prompt.
            trajectories: one for each prompt; those that are begun again are replaced.
            n: samples of each prompt.

        Raises:
            RequestError: the model's template or parser cannot do what is asked.
            ContextLengthError: a prompt leaves no room for one token.
            TrajectoryLimitError: a trajectory's turns or tokens are used up.
            TrajectoryClosedError, TrajectoryConflictError; one of UNAVAILABLE
        """
        used = [*trajectories]
        for trajectory in used:
            trajectory.users += 1
        try:
            context = await self.engine.context_length()
            for request, trajectory in zip(requests, trajectories, strict=True):
                await self._prepare(trajectory, request, context)
                if len(requests) > 1:
                    await asyncio.sleep(0)  # others go on between two prompts
            asked: list[tuple[LiveTrajectory, ChatRequest, list[RetryKey]]] = []
            for i, request in enumerate(requests):
                keys = retry.of_prompt(i).samples(n)
                for left in range(MAX_BEGINNINGS - 1, -1, -1):
                    trajectory = trajectories[i]
                    try:
                        await self._open(trajectory, request, keys, context, caller)
                        break
                    except (TrajectoryClosedError, TrajectoryConflictError):
                        # A conversation has no address that its agent could be told is over.
                        is_over = not trajectory.is_conversation or trajectory.is_deleted
                        if begin_again is None or not left or is_over:
                            raise
                        trajectories[i] = trajectory = begin_again(trajectory, request, i)
                        used.append(trajectory)
                        trajectory.users += 1
                        await self._prepare(trajectory, request, context)
                asked.append((trajectory, request, keys))
            # No turn of the loop from here on: of two tries at once the second finds the first.
            samples: list[_Sample] = []
            for trajectory, request, keys in asked:
                request.sampling = self._sampling(trajectory, request, context)
                for key in keys:
                    if (known := trajectory.calls.find(key)) is not None:
                        self.counts["retries"] += 1
                    samples.append((trajectory, request, key, known))
            if self.limits.max_turns is not None:
                self._check_turns(samples)
            begun = [self._begin(*sample, dialect) for sample in samples]
            if n > 1:
                for i, live in enumerate(begun):
                    live.number = i % n
            return begun
        finally:
            for trajectory in used:
                trajectory.users -= 1
                trajectory.forget_if_unused()

    def _prepare(
        self, trajectory: LiveTrajectory, request: ChatRequest, context: int
    ) -> Awaitable[None]:
        """Make a prompt that fits; the pool is not asked."""
        if request.tools or request.forced_tool is not None:
            self._check_tools(request)
        if trajectory.unrecorded == "asked":
            request.is_kept = False
        return self.prompts.prepare(trajectory.graph, request, context)

    async def _open(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        keys: Sequence[RetryKey],
        context: int,
        caller: Principal,
    ) -> None:
        """Open the trajectory, and make the prompt again if it has other turns than were known."""
        was_new, n_steps = trajectory.is_new, trajectory.steps
        if was_new or trajectory.n_ending:
            await trajectory.open(caller)
        else:
            trajectory.check_owner(caller)
            trajectory.check_open()  # it may have been closed while the prompt was made
        if not was_new and (self.replicas > 1 or keys[0].is_retry):
            await self._catch_up(trajectory, request, keys)
        if trajectory.steps > n_steps:
            await self.prompts.prepare(trajectory.graph, request, context)
        trajectory.last_used = time.monotonic()
        if trajectory.in_flight and request.parent is not None:
            trajectory.calls.go_on(request.parent)

    async def _catch_up(
        self, trajectory: LiveTrajectory, request: ChatRequest, keys: Sequence[RetryKey]
    ) -> None:
        """Read what other gateways stored, if one of them may have stored what the request is
        about: the first try of a retry, whose answer may have been lost, or a reply in the
        conversation."""
        # Clients that always send Idempotency-Key rarely retry, so a pool read for each would be
        # wasted.
        is_looked_for = keys[0].is_retry and (self.replicas > 1 or not keys[0].is_named)
        if not is_looked_for or all(map(trajectory.calls.knows, keys)):
            new = request.messages[request.n_known :]
            if self.replicas == 1 or not any(m["role"] == "assistant" for m in new):
                return
        await trajectory.catch_up()

    def _check_turns(self, samples: Sequence[_Sample]) -> None:
        """Check that the trajectories may have what is new."""
        n_new = Counter(trajectory for trajectory, _, _, known in samples if known is None)
        for trajectory, n in n_new.items():
            self.limits.check_turns(trajectory.steps + len(trajectory.in_flight), n)

    def _check_tools(self, request: ChatRequest) -> None:
        renderer, replies = self.prompts.renderer, self.format
        if request.tools and request.parse_tools and not renderer.shows_tools:
            raise RequestError(
                "the model's chat template does not show tools to the model; leave them out",
                "tools",
            )
        if request.forced_tool is not None and (
            not replies.reads_calls
            or renderer.call_opening(request.forced_tool or None, request.tools) is None
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

    def _sampling(self, trajectory: LiveTrajectory, request: ChatRequest, context: int) -> Sampling:
        """Parameters as they will be used: the channel's over the request's, and temperature 0 over
        all in a greedy trajectory. The request ends, too, where the calls of its channel do.

        Raises:
            TrajectoryLimitError: its conversation has no tokens left.
        """
        n_prompt = len(request.ids)
        limit = max(context - n_prompt - 1, 1)
        temperature, top_p, top_k = request.temperature, request.top_p, request.top_k
        if (forced := self.channel_sampling.get(trajectory.channel)) is not None:
            request.stop += forced.stop or ()
            request.stop_token_ids += forced.stop_token_ids or ()
            if (most := forced.max_response_tokens) is not None:
                used = n_prompt - request.n_first
                if used >= most:
                    raise TrajectoryLimitError(
                        f"this conversation has {used} tokens behind its first prompt and may have "
                        f"{most} (rollout.max_response_tokens); complete the trajectory",
                        None,
                    )
                limit = min(limit, most - used)
            limit = min(forced.max_tokens or limit, limit)
            temperature = temperature if forced.temperature is None else forced.temperature
            top_p = top_p if forced.top_p is None else forced.top_p
            top_k = top_k if forced.top_k is None else forced.top_k
        stop = request.stop
        if request.tools and request.parse_tools and not request.parallel_tool_calls:
            stop += () if self.format.call_close is None else (self.format.call_close,)
        if trajectory.greedy or (temperature is not None and temperature < GREEDY_BELOW):
            temperature = 0.0
        return Sampling(
            max_new_tokens=min(request.max_tokens or limit, limit),
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k or -1,  # 0 is no limit to vLLM and its clients, and SGLang refuses it
            min_p=request.min_p or 0.0,
            stop=stop,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed,
            n_top_logprobs=request.n_logprobs or 0,
            constraint=request.constraint,
        )

    def _begin(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        key: RetryKey,
        known: Call | None,
        dialect: str,
    ) -> LiveCall:
        """Begin a new call, join one that is in flight, commit one again that is not stored, or
        read one again that is remembered."""
        live = None if known is None else known.live
        if live is not None and live.state == "unstored" and live.call.turn is None:
            live.state, live.error = "committing", None
            trajectory.in_flight.add(live)
        if live is not None and live.state != "unstored":
            return live
        ids = request.ids
        if request.n_forced:
            ids = ids[: -request.n_forced]
        text = self._text(request, ids)
        if known is not None:
            live = LiveCall(known, request, dialect, text)
            self._recall(live)
            return live
        call = Call(
            uid=urandom(16).hex(),
            created=int(time.time()),
            retry=key.digest,
            body=key.body_digest,
            is_retry=key.is_retry,
            n_forced=request.n_forced,
        )
        call.live = live = LiveCall(call, request, dialect, text)
        self.counts["calls"] += 1
        trajectory.calls.add(call, replaces_failed=key.is_retry)
        trajectory.in_flight.add(live)
        return live

    def _text(self, request: ChatRequest, prompt_ids: TokenIds) -> ReplyText:
        """Reads the reply that follows this prompt, in which nothing of it is forced yet."""
        return self.format.reader(
            prompt_ids,
            tools=request.tools,
            parse_tools=request.parse_tools and bool(request.tools),
            stop=request.stop,
            raw=request.is_completion,
            counts=request.n_logprobs is not None,
            first_call=request.first_call,
            constraint=request.constraint,
        )

    # -- the way of one call -----------------------------------------------------------------

    async def run(self, trajectory: LiveTrajectory, live: LiveCall) -> None:
        """Generate a call, commit its Step, make a turn of it; or only commit again what the pool
        did not acknowledge: the very same Step. Its failure is `live.error`; only a cancellation
        that is not `live.cancel` is raised."""
        live.task, live.is_running = asyncio.current_task(), True
        request = live.request
        try:
            if live.why_cancelled is not None:
                raise live.why_cancelled
            if not live.is_generated:
                if (place := self.limits.enter()) is not None:
                    await place
                try:
                    if request.forced:
                        live.publish(live.text.begin(request.forced))
                    sampling = request.sampling
                    if live.number:
                        sampling = sampling.of_sample(live.number)
                    asked_at = time.perf_counter()
                    generation = await self.engine.generate(
                        live.prompt_ids,
                        sampling,
                        affinity=trajectory.uid,
                        on_tokens=live.on_tokens if request.stream else None,
                        pieces=request.pieces if request.is_kept else (),
                        pictures=self._shown(trajectory, request) if request.pictures else None,
                    )
                finally:
                    self.limits.leave()
                self._generated(live, generation, asked_at)
            live.state = "committing"
            stored = None
            if request.stores_step:
                step = partial(self._step, trajectory, live)
                sources = partial(self._brought, request) if request.pictures else None
                stored = await trajectory.append(live, step, sources)
            if isinstance(stored, Call):
                # Another gateway stored another try of the request: its result is this one's.
                trajectory.calls.discard(live.call)
                live.call = stored
                self._recall(live)
            else:
                self._answered(trajectory, live, stored or trajectory.add_turn(live))
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
                if live.watchers:
                    live.publish()  # the end
                if not live.readers and live.state != "unstored":
                    live.call.live = None
                trajectory.forget_if_unused()

    async def result(self, trajectory: LiveTrajectory, live: LiveCall) -> LiveCall:
        """The call when it is done. One that nothing generates yet is generated here.

        Raises:
            GatewayError: it failed.
        """
        while live.error is None and live.state != "done":
            if live.is_due:
                await self.run(trajectory, live)
            else:
                await live.wait()
        if live.error is not None:
            raise live.error
        return live

    def go_on(self, trajectory: LiveTrajectory, live: LiveCall) -> None:
        """Let a call go on beside its request, if nothing does yet."""
        if live.is_due:
            live.task = asyncio.create_task(self.run(trajectory, live))

    def _generated(self, live: LiveCall, generation: Generation, asked_at: float) -> None:
        """Set what was sampled, and where its turn belongs.

        Args:
            asked_at: time (`time.perf_counter()`) when the engine was asked.
        """
        request, text = live.request, live.text
        now = time.perf_counter()
        live.engine_s = now - asked_at
        live.timing = {
            "began": round(time.time() - (now - request.began_at), 3),
            "waited_s": round(asked_at - request.began_at, 4),
            "engine_s": round(live.engine_s, 4),
        }
        live.call.completed = completed_at(live.timing, live.call.created)
        ids: list[int] = generation.response_ids.tolist()
        if request.n_logprobs is not None and not request.stream:
            live.on_tokens(ids, generation.log_probs.tolist(), generation.top_log_probs)
        is_read = request.stream or request.n_logprobs is not None
        deltas = text.finish(() if is_read else ids)
        if text.stop_sequence is not None:
            n = text.n_until_stop(ids)
            del live.tokens[n:]  # before the last deltas tell them
            generation = generation.cut(n)
        if deltas:
            live.publish(deltas)
        live.generation, live.is_generated = generation, True
        parent, keys, live.message = request.parent, request.keys, text.message()
        live.has_reasoning = text.has_reasoning or (parent is not None and parent.has_reasoning)
        if (plain := request.plain) is None:
            live.keys = keys.root, keys.prompt, keys.reply(live.message), None
        else:
            if isinstance(plain, bytes):
                said: str | bytes = plain + generation.response_ids.tobytes()
            else:
                response = generation.response_ids.tolist()
                said = plain + self.prompts.renderer.tokenizer.decode(response)
            live.keys = keys.root, text_key(plain), text_key(said), len(said)

    def _shown(self, trajectory: LiveTrajectory, request: ChatRequest) -> PromptPictures | None:
        """The pictures of a prompt, for an engine."""
        if self.pictures is None:
            return None
        read = partial(self._read_pictures, trajectory, request)
        placeholder_id = self.pictures.processor.placeholder_id
        return PromptPictures(request.pictures, read, placeholder_id, trajectory.owner or "")

    async def _read_pictures(
        self, trajectory: LiveTrajectory, request: ChatRequest, digests: Sequence[str]
    ) -> dict[str, bytes]:
        """The PNGs of pictures of a prompt: those that the request was the first to bring; of its
        earlier turns from the pool; else from the request's body once more.

        Raises:
            RequestError: nobody has one any more.
            DataPoolError: the body has not all of them, and the pool cannot read its own.
        """
        new = () if request.sources is None else request.sources.pngs
        # Of other branches, too, from which a request may go on by the id of a response.
        turns = trajectory.graph.steps.values()
        stored = {picture.digest for turn in turns for picture in turn.pictures}
        found: dict[str, bytes] = {}
        why: DataPoolError | None = None
        if asked := [digest for digest in digests if digest in stored and digest not in new]:
            try:
                found = await trajectory.read_pictures(asked)
            except (UnknownPictureError, TrajectoryClosedError):
                pass  # it has them no more: the agent may
            except UNAVAILABLE as e:
                why = e
            except DamagedFileError as e:
                log.error("a stored picture cannot be read: %s", e)
                why = JournalError(str(e))
        found |= await self._brought(request, [d for d in digests if d not in found])
        if gone := [digest for digest in digests if digest not in found]:
            if why is not None:
                raise why
            raise RequestError(
                f"{len(gone)} pictures of earlier turns are not held here any more; send the whole "
                "conversation with its pictures",
                "messages",
            )
        return found

    async def _brought(self, request: ChatRequest, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the pictures that the request's own body has, by digest."""
        if request.sources is None or self.pictures is None:
            return {}
        return await self.pictures.pngs(request.sources, digests)

    def _step(self, trajectory: LiveTrajectory, live: LiveCall, index: int) -> Step:
        """The Step of a generated call with this index."""
        request, call, generation = live.request, live.call, live.generation
        parent, reply, sampling = request.parent, live.text, request.sampling
        if index > 0 and parent is None and request.cause is None:
            # Calls that begin together all see an empty graph; only the first to be stored is not a
            # branch (samples of one request are that).
            said = request.keys if (plain := request.plain) is None else plain
            _, _, request.cause = trajectory.graph.attach(request.keys.root, said)
        messages = None
        if request.messages:
            new = request.messages[request.n_known if parent is not None else 0 :]
            messages = self.turn_messages.of(new, live.message)
        superseded = trajectory.calls.superseded(call, index, parent, trajectory.graph)
        note = TurnNote(
            keys=live.keys,
            retry=call.retry,
            created=call.created,
            body=call.body,
            is_retry=call.is_retry,
            n_forced=call.n_forced,
            calls=live.tool_calls,
            has_reasoning=live.has_reasoning,
        )
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        if sampling.min_p > 0:
            params["min_p"] = sampling.min_p
        metadata: dict[str, Any] = {
            "call_id": call.uid,
            "dialect": live.dialect,
            NOTE: note.as_json(),
        }
        if messages is not None:
            metadata[MESSAGES] = messages
        if live.duplicate_of is not None:
            metadata[DUPLICATE_OF] = live.duplicate_of
        if superseded:
            metadata[SUPERSEDES] = superseded
        if call.is_unseen:
            metadata[UNSEEN] = True
        if live.timing is not None:
            metadata["timing"] = live.timing
        if live.has_reasoning:
            metadata["thinking"] = self.thinking
        if request.tools and request.parse_tools:
            metadata["tool_calls"] = len(reply.tool_calls)  # 0: it might have called one
        metadata["sampling_params"] = params
        if request.constraint is not None:
            # Log-probs are those of the unconstrained policy; the samples are not its own.
            metadata["constraint"] = request.constraint[0]
        if request.forced_tool is not None:
            metadata["forced_tool"] = request.forced_tool
        if request.prefill:
            metadata["prefilled"] = True
        if request.cause is not None:
            metadata["branch"] = request.cause
        extended = None if parent is None else parent.nearest()
        # Not checked again: ids are the tokenizer's or the request's, which were read as int32, and
        # what was sampled is checked as it is read (`engine/generation.py`).
        return trusted_step(
            live.prompt_ids,
            generation.response_ids,
            None,  # reward
            trajectory.uid,
            trajectory.prompt_uid,
            index,
            generation.policy_version,
            False,  # is_last
            metadata,
            generation.log_probs,
            generation.finish_reason,
            None if extended is None else extended.step_index,
            generation.spans if len(generation.spans) > 1 else (),
            None,  # multi_modal_data
            None,  # routed_experts
            request.pictures,
        )

    def _answered(self, trajectory: LiveTrajectory, live: LiveCall, turn: Turn) -> None:
        """The reply is final, and a turn of the graph."""
        call, request, generation = live.call, live.request, live.generation
        self.added_s.append(time.perf_counter() - request.began_at - live.engine_s)
        call.turn, call.finish_reason = turn, generation.finish_reason
        call.spans = tuple([(s.version, s.start, s.end) for s in generation.spans])
        shows_log_probs = request.n_logprobs is not None or not request.stores_step
        call.log_probs = generation.log_probs if shows_log_probs else None
        call.alternatives = generation.top_log_probs
        if turn.step_index is not None:
            self.counts["stored"] += 1
            self.counts["response_tokens"] += live.n_response
            if request.cause is not None:
                self.branches[request.cause] += 1
        live.state = "done"
        if not live.readers:
            trajectory.set_unseen(call, live.is_given_up or not call.delivered)

    def _failed(self, trajectory: LiveTrajectory, live: LiveCall, error: BaseException) -> None:
        if isinstance(error, (EngineError, *UNAVAILABLE)):
            self.failed_at = time.monotonic()
        is_kept = isinstance(error, UNAVAILABLE) and live.is_generated
        live.state = "unstored" if is_kept else "failed"
        live.call.failed = not is_kept
        live.error = _shown(error, trajectory, live)
        self.counts["failed"] += 1

    # -- a call that was made before ---------------------------------------------------------

    def _recall(self, live: LiveCall) -> None:
        """Be the call that `live.call` remembers, made here or at another gateway for the same
        request: its reply is read from the sampled ids."""
        call, request, turn = live.call, live.request, live.call.turn
        if turn is None:
            raise RuntimeError("the call has not been answered")
        *before, response = turn.arrays()
        live.prompt_ids, ids = join(before), response.tolist()
        prompt_ids = live.prompt_ids[: live.n_prompt - call.n_forced]
        forced = self.prompts.forced_text(request, prompt_ids)
        live.text = text = self._text(request, prompt_ids)
        log_probs = _NO_LOG_PROBS if call.log_probs is None else call.log_probs
        if request.n_logprobs is not None and call.log_probs is not None:
            tops = call.alternatives or [()] * len(ids)
            live.tokens = [*map(SampledToken, ids, log_probs.tolist(), tops)]
        deltas = [*text.begin(forced), *text.feed(ids), *text.finish()]
        # Ids of tool calls are made up when they are read, and the client knows the first ones.
        known = [ToolCall(*told) for told in turn.calls]
        calls = iter(known)
        live.deltas = [next(calls, d) if isinstance(d, ToolCall) else d for d in deltas]
        text.tool_calls[:] = known
        spans = tuple(VersionSpan(*span) for span in call.spans)
        live.generation = Generation(response, log_probs, spans, call.finish_reason, None, 0)
        live.is_generated = True
        live.state, live.error, call.live = "done", None, live
        self.counts["recalled"] += 1

    # -- its clients ---------------------------------------------------------------------------

    def leave(
        self,
        trajectory: LiveTrajectory,
        live: LiveCall,
        reader: object,
        why: GatewayError | None = None,
    ) -> None:
        """A client is served or gone; a call that nobody else reads is aborted."""
        live.readers.discard(reader)
        if live.readers:
            return
        if live.state == "generating":
            self.counts["disconnected"] += why is None
            why = why or GatewayError("the client went away")
            live.cancel(why)
            if live.task is None:  # nothing ever began it
                self._failed(trajectory, live, why)
                trajectory.in_flight.discard(live)
                trajectory.forget_if_unused()
        if live.state == "done":
            trajectory.set_unseen(live.call, live.is_given_up or not live.call.delivered)
        if live.state in ("done", "failed"):  # only what a retry needs is remembered
            live.call.live = None

    def added_latency(self) -> dict[str, float | int | None]:
        """Milliseconds that the gateway itself added to the last calls."""
        ms = np.asarray(self.added_s) * 1000
        p50, p99 = np.percentile(ms, (50, 99)).round(3).tolist() if len(ms) else (None, None)
        return {"calls": len(ms), "p50_ms": p50, "p99_ms": p99}


def _shown(error: BaseException, trajectory: LiveTrajectory, live: LiveCall) -> GatewayError:
    """An error as clients are told it."""
    is_constrained = live.request.constraint is not None and not live.is_generated
    if is_constrained and isinstance(error, RequestError) and error.param is None:
        field = live.request.constraint_field  # mostly what an engine refuses
        return RequestError(
            f"{field}: {error}; leave it out, or start the engine with a grammar backend that "
            "takes it",
            field,
        )
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, InvalidStepError):
        return EngineError(f"the engine's answer makes no Step: {error}")
    if isinstance(error, DataPoolError):
        told = from_pool(error)
        if told.status != 400:
            return told
        return from_pool(TrajectoryConflictError(f"the DataPool refuses the Step: {error}"))
    where = live.call.uid, trajectory.uid  # a bug of ours
    log.error("call %s on trajectory %s failed", *where, exc_info=error)
    return GatewayError(f"the gateway failed ({type(error).__name__}); see its log")
