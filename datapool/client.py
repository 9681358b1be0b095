"""The typed async handle of the DataPool: what gateway, rollouts and trainer hold.

Same methods as `DataPoolActor`. It adds to a bare Ray handle: errors arrive as themselves, with a
one-line message; a pool that restarts is waited for, and asked again; and what producers send at
the same time travels together, in order, as bytes::

    open_trajectory ─────┐                        ┌─► its own outcome or error
    submit_step(s) ──────┼─► one call in flight ──┼─► …
    complete_trajectory ─┘   (the next one fills  └─►
                              while it is away)

A step is acknowledged once the pool applied it and its journal has it. Every call may be repeated
without harm (a second submit is a duplicate, a lease request carries an id), so calls that were on
their way when the pool's process died are. Not thread-safe: one client per event loop.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import ray

from datapool.actor import (
    APPLY_STEPS,
    DEFAULT_NAME,
    DataPoolHandle,
)
from datapool.config import SelectionConfig
from datapool.errors import (
    DataPoolError,
    InvalidStepError,
    PoolFullError,
    PoolUnavailableError,
)
from datapool.events import Events
from datapool.outbox import Outbox, call
from datapool.pool import outcomes_or_raise
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.selection import DryRun, Marks
from datapool.types import TRAIN, Lease, Step

SLICE_S = 10.0

Results: TypeAlias = list[SubmitOutcome | DataPoolError]


class DataPoolClient:
    """Async access to the pool of `start_data_pool`. Cheap to make; pickles as its actor handle.

    Args:
        actor: handle of a `DataPoolActor`.
    """

    def __init__(self, actor: DataPoolHandle) -> None:
        self.actor = actor
        self._outbox = Outbox(actor)

    @classmethod
    def connect(cls, name: str = DEFAULT_NAME, namespace: str | None = None) -> DataPoolClient:
        """A client of the pool that was started under this name.

        Raises:
            PoolUnavailableError: there is none.
        """
        try:
            return cls(ray.get_actor(name, namespace))
        except ValueError as e:
            where = "this namespace" if namespace is None else f"namespace {namespace!r}"
            raise PoolUnavailableError(
                f"no DataPool named {name!r} in {where}; start one with start_data_pool(name=…)"
            ) from e

    def __reduce__(self) -> tuple[type[DataPoolClient], tuple[Any]]:
        return (type(self), (self.actor,))

    # -- producers ---------------------------------------------------------------------------

    async def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        """`DataPoolActor.open_group`: waits up to `timeout_s` (None: for ever) for credit."""
        wait = _Wait(timeout_s)
        while True:
            try:
                outcome: SubmitOutcome = await call(
                    self.actor.open_group,
                    prompt_uid,
                    n_rollouts,
                    deadline_s,
                    min_rollouts,
                    metadata,
                    channel,
                    wait.next_slice(),
                )
                return outcome
            except PoolFullError:
                if wait.is_over():
                    raise

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.open_trajectory`."""
        while True:
            try:
                outcome: SubmitOutcome = await self._outbox.send(
                    "open_trajectory",
                    trajectory_uid,
                    prompt_uid,
                    attempt,
                    metadata,
                    channel,
                    subjects=[trajectory_uid],
                )
                return outcome
            except PoolFullError:
                await self._wait_for_room(channel)

    async def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """`DataPool.submit_step`."""
        return (await self.submit_steps([step], channel))[0]

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`."""
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidStepError(
                    f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                )
        if not steps:
            return []
        results = await self._apply_steps(steps, channel)
        while blocked := [i for i, r in enumerate(results) if isinstance(r, PoolFullError)]:
            # The channel blocks: steps of new groups wait here, in their producer.
            await self._wait_for_room(channel)
            answers = await self._apply_steps([steps[i] for i in blocked], channel)
            for i, answer in zip(blocked, answers, strict=True):
                results[i] = answer
        return outcomes_or_raise(results)

    async def _apply_steps(self, steps: Sequence[Step], channel: str) -> Results:
        results: Results = await self._outbox.send(
            APPLY_STEPS,
            steps,
            channel,
            subjects=(step.trajectory_uid for step in steps),
            n_steps=len(steps),
        )
        return results

    async def _wait_for_room(self, channel: str) -> None:
        while True:
            try:
                await call(self.actor.wait_for_room, channel, SLICE_S)
                return
            except PoolFullError:
                continue

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.complete_trajectory`."""
        outcome: TrajectoryOutcome = await self._outbox.send(
            "complete_trajectory",
            trajectory_uid,
            reward,
            metadata,
            channel,
            subjects=[trajectory_uid],
        )
        return outcome

    async def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.abort_trajectory`."""
        outcome: TrajectoryOutcome = await self._outbox.send(
            "abort_trajectory",
            trajectory_uid,
            reason,
            will_retry,
            channel,
            subjects=[trajectory_uid],
        )
        return outcome

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        """`DataPool.drop_group`."""
        await call(self.actor.drop_group, prompt_uid, reason, channel)

    # -- consumers ---------------------------------------------------------------------------

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        """The steps of the next ready groups, or None: a lease that is acked once it is here.
        Waits up to `timeout_s` (None: for ever)."""
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if lease is None:
            return None
        await self.ack(lease.lease_id)
        return lease.steps

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """`DataPoolActor.lease_batch`: waits up to `timeout_s` (None: for ever)."""
        wait = _Wait(timeout_s)
        request_id = uuid.uuid4().hex
        while True:
            lease: Lease | None = await call(
                self.actor.lease_batch,
                n_rollouts,
                channel,
                batch_size,
                wait.next_slice(),
                lease_s,
                request_id,
            )
            if lease is not None or wait.is_over() or wait.was_cut_short():
                return lease

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        await self._outbox.send("ack", lease_id, subjects=[lease_id])

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        await self._outbox.send("nack", lease_id, reason, subjects=[lease_id])

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        expires_at: float = await call(self.actor.renew, lease_id, lease_s)
        return expires_at

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        """`DataPool.release_leases`."""
        n: int = await call(self.actor.release_leases, channel, reason)
        return n

    # -- people and sources ------------------------------------------------------------------

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.set_reward`."""
        outcome: SubmitOutcome = await call(
            self.actor.set_reward, trajectory_uid, reward, step_index, channel
        )
        return outcome

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        **marks: Any,
    ) -> Marks:
        """`DataPool.mark`."""
        result: Marks = await call(self.actor.mark, prompt_uid, trajectory_uid, channel, marks)
        return result

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        """`DataPool.advance_version`."""
        await call(self.actor.advance_version, version, channel)

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """`DataPool.dry_run`."""
        result: DryRun = await call(self.actor.dry_run, selection, channel, batch_size)
        return result

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """`DataPoolActor.get_events`: what happened after `cursor`, waiting for the first."""
        wait = _Wait(timeout_s)
        while True:
            page: Events = await call(
                self.actor.get_events, cursor, channel, kinds, limit, wait.next_slice()
            )
            if page.events or wait.is_over():
                return page

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`."""
        stats: dict[str, Any] = await call(self.actor.get_statistics, channel)
        return stats

    async def describe(self) -> dict[str, Any]:
        """`DataPoolActor.describe`."""
        described: dict[str, Any] = await call(self.actor.describe)
        return described

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPoolActor.shutdown`: wakes up whoever waits. The actor itself goes on."""
        await call(self.actor.shutdown, channel)


class _Wait:
    """A long wait, asked for in slices.

    Ray does not tell an actor that a caller's process died. Its waiter would stand in the queue
    until its timeout and then be served; asked for in slices, it is gone within one.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._asked_at = 0.0
        self._slice = 0.0

    def next_slice(self) -> float:
        """Seconds to ask for now."""
        self._asked_at = time.monotonic()
        left = math.inf if self._end is None else max(0.0, self._end - self._asked_at)
        self._slice = min(left, SLICE_S)
        return self._slice

    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def was_cut_short(self) -> bool:
        """The last slice came back empty before its time: the channel was shut down."""
        return time.monotonic() - self._asked_at < self._slice
