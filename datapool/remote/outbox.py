"""This module sends steps to the pool so that a prompt travels once: packed relative to those sent
before them, and asked again for room.

    submit ──► packed, relative to its base where that was sent lately ──► its shard ──► outcomes
                  ▲                                                           │
                  ├─ the pool does not hold the base: once more, whole ───────┤
                  └─ the channel blocks: wait until the trajectory is open ───┘

Owns what is sent, and how often. Does not own the layout (`codec.py`), nor the connection
(`link.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from stepwell.datapool.codec import Base, PackedStep, in_trajectories, pack
from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.ops import OpenTrajectory, Refusal, SubmitOutcome, SubmitSteps
from stepwell.datapool.remote.link import Caller
from stepwell.datapool.types import Step

MAX_TIPS = 200_000
"""Recent steps that are remembered, some 300 bytes each; the trajectories added to longest ago go
first."""
Results: TypeAlias = list[SubmitOutcome | Refusal]


class Outbox:
    """The steps that producers send through one client.

    Args:
        pool: the way there, to all of its shards.
    """

    def __init__(self, pool: Caller) -> None:
        self._pool = pool
        self.tips = Tips()

    async def submit(self, steps: Sequence[Step], channel: str, timeout_s: float | None) -> Results:
        """Each step's outcome or refusal; waits up to `timeout_s` (None: for ever) for room."""
        results: list[Any] = [None] * len(steps)
        await self._send(steps, channel, range(len(steps)), results)
        blocked = [i for i, result in enumerate(results) if _is(result, "PoolFullError")]
        if blocked and timeout_s != 0:
            # The channel blocks: steps of new groups wait here, in their producer.
            new = {steps[i].trajectory_uid: steps[i].prompt_uid for i in blocked}
            opening = (OpenTrajectory(t, p, channel=channel) for t, p in new.items())
            calls = (self._pool.call(op, timeout_s) for op in opening)
            # Whatever refuses one of them refuses its steps, too.
            await asyncio.gather(*calls, return_exceptions=True)
            await self._send(steps, channel, blocked, results)
        return results

    async def _send(
        self, steps: Sequence[Step], channel: str, which: Collection[int], results: list[Any]
    ) -> None:
        await self._send_once(steps, channel, which, results)
        if unknown := [i for i in which if _is(results[i], "UnknownBaseError")]:
            self.tips.clear()
            await self._send_once(steps, channel, unknown, results)

    async def _send_once(
        self, steps: Sequence[Step], channel: str, which: Collection[int], results: list[Any]
    ) -> None:
        """Each step relative to the parent that it names, if that was sent before; in one call."""
        sent: list[int] = []
        packed: list[tuple[str, str, PackedStep]] = []
        for i in which:
            step = steps[i]
            try:
                packed.append((step.trajectory_uid, step.prompt_uid, self.tips.pack(step, channel)))
            except InvalidStepError as e:
                results[i] = Refusal.of(e)
            else:
                sent.append(i)
        if not sent:
            return
        answers: Results
        try:
            answers = await self._pool.call(SubmitSteps(in_trajectories(packed), channel))
        except DataPoolError as e:  # of the call: nothing was acknowledged
            answers = [Refusal.of(e)] * len(sent)
        for i, answer in zip(sent, answers, strict=True):
            results[i] = answer


class Tips:
    """Recent steps by trajectory."""

    def __init__(self, limit: int = MAX_TIPS) -> None:
        self._limit = limit
        self._steps: OrderedDict[tuple[str, str], dict[int, Base]] = OrderedDict()
        """(trajectory_uid, channel) -> step_index -> step"""
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def pack(self, step: Step, channel: str) -> PackedStep:
        key = step.trajectory_uid, channel
        known = self._steps.get(key, {})
        packed = pack(step, None if step.parent_index is None else known.get(step.parent_index))
        if step.is_last:
            self.end(*key)
            return packed
        self._n += step.step_index not in known
        known[step.step_index] = Base.of(step, packed.crc)
        self._steps[key] = known
        self._steps.move_to_end(key)
        while self._n > self._limit and len(self._steps) > 1:
            self.end(*next(iter(self._steps)))
        return packed

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        self._n -= len(self._steps.pop((trajectory_uid, channel), ()))

    def clear(self) -> None:
        self._steps.clear()
        self._n = 0


def _is(result: object, kind: str) -> bool:
    return isinstance(result, Refusal) and result.kind == kind
