"""Steps on their way to the pool: packed relative to those sent before them, asked again for room.

    submit ──► packed, relative to its base where that was sent lately ──► its shard ──► outcomes
                  ▲                                                           │
                  ├─ the pool does not hold the base: once more, whole ───────┤
                  └─ the channel blocks: wait for room ───────────────────────┘

Owns what is sent, and how often. Does not own the layout (`codec.py`), nor the connection
(`link.py`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from stepwell.datapool.codec import PackedStep, Tokens, as_bytes, in_trajectories, pack
from stepwell.datapool.errors import InvalidStepError, PoolFullError
from stepwell.datapool.ops import Op, R, Refusal, SubmitOutcome, SubmitSteps
from stepwell.datapool.questions import WaitForRoom
from stepwell.datapool.remote.credit import SLICE_S
from stepwell.datapool.remote.fanout import Shards
from stepwell.datapool.types import Step

TIP_BYTES = 64 << 20
"""Tokens of recent steps that are kept; the trajectories that were added to longest ago go
first."""
Results: TypeAlias = list[SubmitOutcome | Refusal]


class Outbox:
    """What producers send through one client."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._tips = Tips()

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        self._tips.end(trajectory_uid, channel)

    async def submit(self, steps: Sequence[Step], channel: str, timeout_s: float | None) -> Results:
        """Each step's outcome or refusal; waits for room."""
        wait = Wait(timeout_s)
        results = await self._submit(steps, channel)
        while blocked := [i for i, r in enumerate(results) if _is(r, "PoolFullError")]:
            # The channel blocks: steps of new groups wait here, in their producer.
            try:
                await self._wait_for_room([steps[i].prompt_uid for i in blocked], channel, wait)
            except PoolFullError:
                break
            again = await self._submit([steps[i] for i in blocked], channel)
            for i, result in zip(blocked, again, strict=True):
                results[i] = result
        return results

    async def _submit(self, steps: Sequence[Step], channel: str) -> Results:
        """Each step's outcome or refusal. Steps go relative to those sent before them; once more,
        whole, if the pool does not hold those."""
        results: list[Any] = [None] * len(steps)
        sent = self._pack(steps, channel, range(len(steps)), results)
        await self._send(sent, channel, results)
        unknown = [i for i, *_ in sent if _is(results[i], "UnknownBaseError")]
        if unknown:
            self._tips.clear()
            await self._send(self._pack(steps, channel, unknown, results), channel, results)
        return results

    def _pack(
        self, steps: Sequence[Step], channel: str, which: Collection[int], results: list[Any]
    ) -> list[tuple[int, Step, PackedStep]]:
        packed: list[tuple[int, Step, PackedStep]] = []
        for i in which:
            try:
                packed.append((i, steps[i], self._tips.pack(steps[i], channel)))
            except InvalidStepError as e:
                results[i] = Refusal.of(e)
        return packed

    async def _send(
        self, sent: list[tuple[int, Step, PackedStep]], channel: str, results: list[Any]
    ) -> None:
        if not sent:
            return
        ordered = self._shards.by_home(sent)
        answers = await self._shards.submit(
            {
                home: SubmitSteps(
                    in_trajectories((s.trajectory_uid, s.prompt_uid, p) for _, s, p in part),
                    channel,
                )
                for home, part in ordered.items()
            }
        )
        for home, part in ordered.items():
            for (i, *_), answer in zip(part, answers[home], strict=True):
                results[i] = answer

    async def with_room(
        self, op: Op[R], prompt_uid: str, channel: str, timeout_s: float | None
    ) -> R:
        """The answer to an operation that may begin a new group; waits for room."""
        wait = Wait(timeout_s)
        while True:
            try:
                return await self._shards.call(op)
            except PoolFullError:
                await self._wait_for_room([prompt_uid], channel, wait)

    async def _wait_for_room(self, prompt_uids: Collection[str], channel: str, wait: Wait) -> None:
        """Return once the shard of one of these groups has room for it.

        Raises:
            PoolFullError: the wait is over.
        """
        while True:
            try:
                await self._shards.any(WaitForRoom(channel), prompt_uids, wait.next_slice())
                return
            except PoolFullError:
                if wait.is_over():
                    raise


class Tips:
    """Tokens of recent steps by trajectory."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], dict[int, Tokens]] = OrderedDict()
        """(channel, trajectory_uid) -> step_index -> tokens"""
        self._n_bytes = 0

    def pack(self, step: Step, channel: str) -> PackedStep:
        key = channel, step.trajectory_uid
        known = self._tokens.get(key, {})
        base = step.step_index - 1 if step.parent_index is None else step.parent_index
        packed = pack(step, known.get(base))
        if step.is_last:
            self._end(key)
            return packed
        tokens = Tokens(
            step.step_index,
            as_bytes(step.prompt_ids),
            as_bytes(step.response_ids),
            packed.header.crc,
        )
        self._n_bytes += _size(tokens) - _size(known.get(step.step_index))
        self._tokens.setdefault(key, known)[step.step_index] = tokens
        self._tokens.move_to_end(key)
        while self._n_bytes > TIP_BYTES and len(self._tokens) > 1:
            self._end(next(iter(self._tokens)))
        return packed

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        self._end((channel, trajectory_uid))

    def clear(self) -> None:
        self._tokens.clear()
        self._n_bytes = 0

    def _end(self, key: tuple[str, str]) -> None:
        self._n_bytes -= sum(map(_size, self._tokens.pop(key, {}).values()))


def _size(tokens: Tokens | None) -> int:
    return 0 if tokens is None else len(tokens.prompt) + len(tokens.response)


def _is(result: object, kind: str) -> bool:
    return isinstance(result, Refusal) and result.kind == kind


class Wait:
    """A long wait, asked for in slices.

    A pool is not told that a caller's machine died. Its waiter would stand in the queue until its
    timeout and then be served; asked for in slices, it is gone within one.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._end = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def next_slice(self) -> float:
        """Seconds to ask for now."""
        return min(self.left(), SLICE_S)

    def is_over(self) -> bool:
        return self.left() == 0
