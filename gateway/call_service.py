"""This module begins the calls of a request, or finds those that it repeats.

    request ──► prompts made, fit ──► trajectories open ──► each sample: joined │ recalled │ begun
                     └──► refused: the pool hears nothing of it

A prompt is made again if another gateway turns out to have turns of its trajectory. All calls of a
request begin, or none does. Does not own: what becomes of a call (`call.py`), whose it is
(`trajectory/identity.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from stepwell.gateway.access import Principal
from stepwell.gateway.call import Call, CallParts, Listener
from stepwell.gateway.engine import Sampling
from stepwell.gateway.errors import (
    ContextLengthError,
    RequestError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    TrajectoryLimitError,
)
from stepwell.gateway.prompt import ChatRequest, Prompt
from stepwell.gateway.trajectory.note import FinishedCall
from stepwell.gateway.trajectory.retries import LiveCall, RetryKey
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.wiring import ChannelSampling

T = TypeVar("T")

MAX_BEGINNINGS = 4
"""Trajectories that a conversation may find closed as it begins, one after the other."""


@dataclass(slots=True)
class Asked:
    """One prompt of a request, for `n` samples in one trajectory."""

    trajectory: LiveTrajectory
    request: ChatRequest
    retry: RetryKey
    n: int = 1

    @property
    def keys(self) -> list[RetryKey]:
        """One for each sample."""
        return self.retry.samples(self.n)


BeginAgain: TypeAlias = Callable[[Asked], LiveTrajectory]
"""Gives a conversation another trajectory, because its own takes no more calls."""


@dataclass(kw_only=True)
class CallService(CallParts):
    """Owned by the app's lifespan."""

    channel_sampling: Mapping[str, ChannelSampling]
    """By channel."""
    replicas: int
    """Gateways that may serve a trajectory."""

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
        with ExitStack() as used:
            prompts = []
            for each in asked:
                used.enter_context(each.trajectory.in_use())
                prompts.append(await self._prepare(each))
                if len(asked) > 1:
                    await asyncio.sleep(0)  # others go on between two prompts
            for i, each in enumerate(asked):
                prompts[i] = await self._open(each, prompts[i], used, caller, begin_again)
            context = await self.engine.context_length()
            # No turn of the loop from here on: of two tries at once the second finds the first.
            found = [[each.trajectory.calls.find(key) for key in each.keys] for each in asked]
            self._check_turns(asked, found)
            rooms = [
                self._room(each.trajectory, prompt, context)
                for each, prompt in zip(asked, prompts, strict=True)
            ]
            listeners = []
            for each, prompt, calls, room in zip(asked, prompts, found, rooms, strict=True):
                self._add_stops(each)
                sampling = self._sampling(each.trajectory, each.request, room)
                for key, call in zip(each.keys, calls, strict=True):
                    if not isinstance(call, Call):
                        finished = call
                        call = Call(
                            *(self, each.trajectory, each.request, key, dialect, prompt, sampling)
                        )
                        if isinstance(finished, FinishedCall):
                            call.recall(finished)
                        else:
                            self.counts["calls"] += 1
                            each.trajectory.calls.add(key.digest, call, is_retry=key.is_retry)
                            call.begin()
                    elif call.state == "unstored":
                        call.begin()
                    listeners.append(call.listen())
            return listeners

    async def _prepare(self, asked: Asked) -> Prompt:
        """A prompt that fits; the pool is not asked."""
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
        return prompt

    async def _open(
        self,
        asked: Asked,
        prompt: Prompt,
        used: ExitStack,
        caller: Principal,
        begin_again: BeginAgain | None,
    ) -> Prompt:
        """Open the trajectory, or the one that a conversation begins in its place; the prompt as it
        is then."""
        for attempt in range(1, MAX_BEGINNINGS + 1):
            trajectory, request = asked.trajectory, asked.request
            was_new, n_steps = trajectory.is_new, trajectory.steps
            try:
                await trajectory.open(caller)
                if not was_new and self._is_elsewhere(trajectory, request, prompt, asked.keys):
                    await trajectory.catch_up()
                break
            except (TrajectoryClosedError, TrajectoryConflictError):
                # A conversation has no address that its agent could be told is over.
                is_last = attempt == MAX_BEGINNINGS
                if begin_again is None or is_last or not trajectory.is_conversation:
                    raise
                asked.trajectory = begin_again(asked)
                used.enter_context(asked.trajectory.in_use())
                prompt = await self._prepare(asked)
        if trajectory.steps > n_steps:
            context = await self.engine.context_length()
            prompt = await self.prompts.prepare(trajectory.graph, request, context)
        trajectory.touch()
        if trajectory.in_flight and prompt.parent is not None:
            trajectory.calls.go_on(prompt.parent)
        return prompt

    def _check_turns(
        self, asked: Sequence[Asked], found: Sequence[Sequence[LiveCall | FinishedCall | None]]
    ) -> None:
        n_new: Counter[LiveTrajectory] = Counter()
        for each, calls in zip(asked, found, strict=True):
            self.counts["retries"] += len(calls) - calls.count(None)
            n_new[each.trajectory] += calls.count(None)
        for trajectory, n in n_new.items():
            self.limits.check_turns(trajectory.steps + len(trajectory.in_flight), n)

    def _is_elsewhere(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        prompt: Prompt,
        keys: Sequence[RetryKey],
    ) -> bool:
        """Whether another gateway may have stored what the request is about: the first try of a
        retry, whose answer may have been lost, or a reply in the conversation."""
        is_one_of_many = self.replicas > 1
        # Those who name all their requests retry few of them.
        is_looked_for = keys[0].is_retry and (is_one_of_many or not keys[0].is_named)
        if is_looked_for and not all(map(trajectory.calls.knows, keys)):
            return True
        new = request.messages[prompt.attachment.n_known :]
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

    def _add_stops(self, asked: Asked) -> None:
        """Let a request end, too, where the calls of its channel do."""
        forced = self.channel_sampling.get(asked.trajectory.channel)
        if forced is not None and (forced.stop or forced.stop_token_ids):
            asked.request = replace(
                asked.request,
                stop=asked.request.stop + (forced.stop or ()),
                stop_token_ids=asked.request.stop_token_ids + (forced.stop_token_ids or ()),
            )

    def _room(self, trajectory: LiveTrajectory, prompt: Prompt, context: int) -> int:
        """Tokens that the reply may have: what fits, and what its conversation has left.

        Raises:
            TrajectoryLimitError: it has none left.
        """
        room = max(context - len(prompt.ids) - 1, 1)
        forced = self.channel_sampling.get(trajectory.channel)
        if forced is None or (most := forced.max_response_tokens) is None:
            return room
        used = len(prompt.ids) - prompt.n_first
        if used >= most:
            raise TrajectoryLimitError(
                f"this conversation has {used} tokens behind its first prompt and may have {most} "
                "(rollout.max_response_tokens); complete the trajectory",
                None,
            )
        return min(room, most - used)

    def _sampling(self, trajectory: LiveTrajectory, request: ChatRequest, room: int) -> Sampling:
        """Parameters as they will be used: the channel's over the request's, and temperature 0 over
        all in a greedy trajectory."""
        forced = self.channel_sampling.get(trajectory.channel, ChannelSampling())
        limit = min(forced.max_tokens or room, room)
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

    def added_latency(self) -> dict[str, float | int | None]:
        """What the gateway itself added to the last calls, in milliseconds."""
        ms = np.asarray(self.added_s) * 1000
        p50, p99 = np.percentile(ms, (50, 99)).round(3).tolist() if len(ms) else (None, None)
        return {"calls": len(ms), "p50_ms": p50, "p99_ms": p99}


def _first(*choices: T | None) -> T:
    return next(c for c in choices if c is not None)
