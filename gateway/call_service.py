"""This module begins the calls of a request, or finds those that it repeats.

    request ──► prompt made, fits ──► trajectory open ──► each sample: joined │ recalled │ begun
                     └──► refused: the pool hears nothing of it

The prompt is made again if another gateway turns out to have turns of the trajectory. Does not own:
what becomes of a call (`call.py`), whose it is (`trajectory/identity.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from stepwell.gateway.call import Call, CallParts, Listener
from stepwell.gateway.engine import Sampling
from stepwell.gateway.errors import ContextLengthError, RequestError
from stepwell.gateway.keys import Principal
from stepwell.gateway.prompt import ChatRequest, Prompt
from stepwell.gateway.trajectory.note import FinishedCall
from stepwell.gateway.trajectory.retries import RetryKey
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.wiring import ChannelSampling

T = TypeVar("T")


@dataclass(kw_only=True)
class CallService(CallParts):
    """Owned by the app's lifespan."""

    channel_sampling: Mapping[str, ChannelSampling]
    """By channel."""
    replicas: int
    """Gateways that may serve a trajectory."""

    async def start(
        self,
        trajectory: LiveTrajectory,
        request: ChatRequest,
        retry: RetryKey,
        dialect: str,
        n: int = 1,
        *,
        caller: Principal,
    ) -> list[Listener]:
        """Begin `n` calls, or find those that this request repeats.

        Raises:
            RequestError: the model's template or parser cannot do what is asked.
            ContextLengthError: the prompt leaves no room for one token.
            TrajectoryLimitError: the trajectory's turns are used up.
            TrajectoryClosedError, TrajectoryConflictError, PoolUnavailableError
        """
        keys = retry.samples(n)
        graph = trajectory.graph
        with trajectory.in_use():
            self._check(request)
            if trajectory.unrecorded == "asked":
                request = replace(request, is_kept=False)
            context = await self.engine.context_length()
            if request.is_big:
                await asyncio.sleep(0)
            prompt = await self.prompts.prepare(graph, request, context)
            # Engines refuse a request whose prompt and response reach the context length.
            room = context - len(prompt.ids) - 1
            if room < 1:
                raise ContextLengthError.of(len(prompt.ids), context)
            was_new, n_steps = trajectory.is_new, trajectory.steps
            await trajectory.open(caller)
            if not was_new and self._is_elsewhere(trajectory, request, prompt, keys):
                await trajectory.catch_up()
            if trajectory.steps > n_steps:
                prompt = await self.prompts.prepare(graph, request, context)
                room = max(context - len(prompt.ids) - 1, 1)
            trajectory.touch()
            if trajectory.in_flight and prompt.parent is not None:
                trajectory.calls.go_on(prompt.parent)
            # No turn of the loop from here on: of two tries at once the second finds the first.
            found = [trajectory.calls.find(key) for key in keys]
            self.counts["retries"] += len(found) - found.count(None)
            n_turns = trajectory.steps + len(trajectory.in_flight)
            self.limits.check_turns(n_turns, found.count(None))
            sampling = self._sampling(trajectory, request, room)
            listeners = []
            for key, call in zip(keys, found, strict=True):
                if not isinstance(call, Call):
                    finished = call
                    call = Call(self, trajectory, request, key, dialect, prompt, sampling)
                    if isinstance(finished, FinishedCall):
                        call.recall(finished)
                    else:
                        self.counts["calls"] += 1
                        trajectory.calls.add(key.digest, call, is_retry=key.is_retry)
                        call.begin()
                elif call.state == "unstored":
                    call.begin()
                listeners.append(call.listen())
            return listeners

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
