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

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.core.pool import outcomes_or_raise
from stepwell.datapool.core.records import Deleted, Resumed, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidStepError,
    JournalFullError,
    PoolFullError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.inspect.rows import ExportedPage, GroupRow, Page, StepRow, TrajectoryRow
from stepwell.datapool.remote.actor import (
    APPLY_STEPS,
    DataPoolHandle,
    Unserved,
)
from stepwell.datapool.remote.incarnation import Known, KnownPool
from stepwell.datapool.remote.line import Line
from stepwell.datapool.remote.outbox import PART_BYTES, Outbox, begin, call
from stepwell.datapool.selection import DryRun, Marks
from stepwell.datapool.types import TRAIN, Group, Lease, Step

log = logging.getLogger(__name__)

SLICE_S = 10.0
FULL_S = 5.0
"""Between two tries to lease from a pool whose disk is full."""
MAX_PARTS = 16

Results: TypeAlias = list[SubmitOutcome | DataPoolError]


class DataPoolClient:
    """Async access to the pool of `start_data_pool`. Cheap to make; pickles as its actor handle and
    the pool that it met.

    Args:
        actor: handle of a `DataPoolActor`.
        met: the pool that this client follows, if it knows; any other one is refused
            (`PoolReplacedError`), and an earlier opening of its journal.
    """

    def __init__(self, actor: DataPoolHandle, met: Known = None) -> None:
        self.actor = actor
        self._pool = KnownPool(actor, met)
        self._line = Line(self._pool)
        self._outbox = Outbox(self._pool, self._line)
        self._group_bytes: dict[str, int] = {}
        """How large the groups of a channel are on their way here, roughly."""

    def __reduce__(self) -> tuple[type[DataPoolClient], tuple[Any, ...]]:
        return (type(self), (self.actor, self._pool.met))

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
                    self._pool.open_group,
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
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        """`DataPool.open_trajectory`: waits up to `timeout_s` (None: for ever) for room."""
        wait = _Wait(timeout_s)
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
                await self._wait_for_room(channel, wait)

    async def resume_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> Resumed:
        """`DataPool.resume_trajectory`: opened, or found open with its steps, in one trip. Waits
        up to `timeout_s` (None: for ever) for room."""
        wait = _Wait(timeout_s)
        while True:
            try:
                resumed: Resumed = await self._outbox.send(
                    "resume_trajectory",
                    *(trajectory_uid, prompt_uid, attempt, metadata, channel, elsewhere),
                    subjects=[trajectory_uid],
                )
                return resumed
            except PoolFullError:
                await self._wait_for_room(channel, wait)

    async def submit_step(
        self, step: Step, channel: str = TRAIN, timeout_s: float | None = None
    ) -> SubmitOutcome:
        """`DataPool.submit_step`: waits up to `timeout_s` (None: for ever) for room."""
        return (await self.submit_steps([step], channel, timeout_s))[0]

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN, timeout_s: float | None = None
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`: waits up to `timeout_s` (None: for ever) for room."""
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidStepError(
                    f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                )
        return outcomes_or_raise(await self._submit(steps, channel, timeout_s))

    async def _submit(
        self, steps: Sequence[Step], channel: str, timeout_s: float | None
    ) -> Results:
        """Each step's outcome or refusal."""
        if not steps:
            return []
        wait = _Wait(timeout_s)
        results = await self._apply_steps(steps, channel)
        while blocked := [i for i, r in enumerate(results) if isinstance(r, PoolFullError)]:
            # The channel blocks: steps of new groups wait here, in their producer.
            try:
                await self._wait_for_room(channel, wait)
            except PoolFullError:
                return results
            answers = await self._apply_steps([steps[i] for i in blocked], channel)
            for i, answer in zip(blocked, answers, strict=True):
                results[i] = answer
        return results

    async def _apply_steps(self, steps: Sequence[Step], channel: str) -> Results:
        results: Results = await self._outbox.send(
            APPLY_STEPS,
            steps,
            channel,
            subjects=(step.trajectory_uid for step in steps),
            n_steps=len(steps),
        )
        return results

    async def _wait_for_room(self, channel: str, wait: _Wait) -> None:
        """
        Raises:
            PoolFullError: the wait is over.
        """
        while True:
            try:
                await call(self._pool.wait_for_room, channel, wait.next_slice())
                return
            except PoolFullError:
                if wait.is_over():
                    raise

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
        await call(self._pool.drop_group, prompt_uid, reason, channel)

    # -- consumers ---------------------------------------------------------------------------

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        """The steps of the next ready groups, or None: a lease that is acked once it is here.
        Waits up to `timeout_s` (None: for ever).

        The ack is sent and not waited for. If this process dies before it arrives, the groups
        are served again when the lease expires; who cannot have that leases and acks.
        """
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if lease is None:
            return None
        self._outbox.post("ack", lease.lease_id, subjects=[lease.lease_id])
        return lease.steps

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """`DataPoolActor.lease_batch`: waits up to `timeout_s` (None: for ever). None once that is
        over, or as soon as the channel is shut down without enough groups.

        A pool whose disk is full leases nothing; it is waited for as for groups.

        Raises:
            JournalFullError: the disk is still full after `timeout_s`.
        """
        wait = _Wait(timeout_s)
        request_id = uuid.uuid4().hex
        while True:
            try:
                answer = await self._lease(
                    n_rollouts, channel, batch_size, wait.next_slice(), lease_s, request_id
                )
            except JournalFullError as e:
                if wait.is_over():
                    raise
                log.warning("no lease yet: %s", e)
                await asyncio.sleep(min(FULL_S, wait.left()))
                continue
            if isinstance(answer, Lease):
                return answer
            if answer == "shut_down" or wait.is_over():
                return None

    async def _lease(
        self,
        n_rollouts: int | None,
        channel: str,
        batch_size: int,
        *rest: Any,
        ask: Callable[..., Awaitable[Any]] = call,
    ) -> Lease | Unserved:
        """One answer of `DataPoolActor.lease_batch`; through Ray in as many parts as the last lease
        of the channel makes seem right."""
        arguments = (n_rollouts, channel, batch_size, *rest)
        answer: Lease | Unserved
        if ask is call and self._line.connection() is not None:
            answer = await begin(self._line, self._pool, "lease_batch", *arguments).answer()
            return answer
        n_bytes = self._group_bytes.get(channel, 0) * batch_size
        n_parts = min(batch_size, MAX_PARTS, 1 + n_bytes // PART_BYTES)
        if n_parts == 1:
            answer = await ask(self._pool.lease_batch, *arguments)
        else:
            method = self._pool.lease_parts.options(num_returns=n_parts)
            parts = await ask(method, n_parts, *arguments)
            answer = parts[0]
            if isinstance(answer, Lease):
                answer = replace(answer, groups=tuple(g for p in parts for g in p.groups))
        if isinstance(answer, Lease):
            self._group_bytes[channel] = _n_bytes(answer.groups[0])
        return answer

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        await self._outbox.send("ack", lease_id, subjects=[lease_id])

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        await self._outbox.send("nack", lease_id, reason, subjects=[lease_id])

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        expires_at: float = await call(self._pool.renew, lease_id, lease_s)
        return expires_at

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        """`DataPool.release_leases`."""
        n: int = await call(self._pool.release_leases, channel, reason)
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
            self._pool.set_reward, trajectory_uid, reward, step_index, channel
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
        result: Marks = await call(self._pool.mark, prompt_uid, trajectory_uid, channel, marks)
        return result

    async def delete(self, trajectory_uid: str | None = None, tag: str | None = None) -> Deleted:
        """`DataPool.delete` of all there is. Erased from the journal's files within seconds."""
        await self._outbox.settled()
        found = Deleted(more=True)
        while found.more:
            found += await call(self._pool.delete, trajectory_uid, tag)
        return found

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        """`DataPool.advance_version`."""
        await call(self._pool.advance_version, version, channel)

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """`DataPool.dry_run`."""
        result: DryRun = await call(self._pool.dry_run, selection, channel, batch_size)
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
                self._pool.get_events, cursor, channel, kinds, limit, wait.next_slice()
            )
            if page.events or wait.is_over():
                return page

    # -- reading -----------------------------------------------------------------------------

    async def list_groups(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[GroupRow]:
        """`DataPool.list_groups`."""
        page: Page[GroupRow] = await call(self._pool.list_groups, channel, cursor, limit, filters)
        return page

    async def list_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[TrajectoryRow]:
        """`DataPool.list_trajectories`."""
        page: Page[TrajectoryRow] = await call(
            self._pool.list_trajectories, channel, cursor, limit, filters
        )
        return page

    async def list_steps(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        include_tokens: bool = False,
        **filters: Any,
    ) -> Page[StepRow]:
        """`DataPool.list_steps`."""
        page: Page[StepRow] = await call(
            self._pool.list_steps, channel, cursor, limit, include_tokens, filters
        )
        return page

    async def read_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> ExportedPage:
        """`DataPool.read_trajectories`: a page of whole trajectories, as they are exported."""
        page: ExportedPage = await call(
            self._pool.read_trajectories, channel, cursor, limit, filters
        )
        return page

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`."""
        await self._outbox.settled()
        stats: dict[str, Any] = await call(self._pool.get_statistics, channel)
        return stats

    async def describe(self) -> dict[str, Any]:
        """`DataPoolActor.describe`."""
        described: dict[str, Any] = await call(self._pool.describe)
        return described

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPoolActor.shutdown`: wakes up whoever waits. The actor itself goes on."""
        await self._outbox.settled()
        await call(self._pool.shutdown, channel)


def _n_bytes(group: Group) -> int:
    """Roughly what a group takes on its way: each trajectory's tokens once, and the log-probs."""
    return sum(
        4 * t.steps[-1].n_tokens + sum(4 * len(s.response_ids) + 160 for s in t.steps)
        for t in group.trajectories
    )


class _Wait:
    """A long wait, asked for in slices.

    Ray does not tell an actor that a caller's process died. Its waiter would stand in the queue
    until its timeout and then be served; asked for in slices, it is gone within one.
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
