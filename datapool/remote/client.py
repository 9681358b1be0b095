"""The DataPool as its users have it: typed methods, whatever the number of shards and wherever they
are.

    await client.submit_step(step) ──► SubmitSteps ──► `fanout.py`: which shard ──► `link.py`

A step is acknowledged once the pool applied it and its journal has it. Every call may be repeated
without harm, so calls that were on their way when a pool's process died are made again. What is
called without waiting takes effect in the order it was called, as far as it is about one group.
Not thread-safe: one client per event loop.

What each call does and raises is said where the operation is (`ops.py`, `questions.py`); here is
what a user types.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell.datapool.codec import (
    PackedLease,
)
from stepwell.datapool.config import PoolConfig, SelectionConfig
from stepwell.datapool.errors import (
    InvalidStepError,
    JournalFullError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.inspect.rows import ExportedPage, GroupRow, Page, StepRow, TrajectoryRow
from stepwell.datapool.ops import (
    AbortTrajectory,
    AdvanceVersion,
    CompleteTrajectory,
    Delete,
    Deleted,
    DropGroup,
    LeaseBatch,
    Mark,
    Op,
    OpenGroup,
    OpenTrajectory,
    R,
    ReleaseLeases,
    Resumed,
    ResumeTrajectory,
    SetReward,
    Shutdown,
    SubmitOutcome,
    TrajectoryOutcome,
    metadata_of,
    outcomes_or_raise,
)
from stepwell.datapool.questions import (
    Describe,
    DryRunOf,
    GetEvents,
    GetStatistics,
    ListGroups,
    ListSteps,
    ListTrajectories,
    ReadTrajectories,
)
from stepwell.datapool.remote.batches import Batches
from stepwell.datapool.remote.credit import CreditLines
from stepwell.datapool.remote.fanout import Shards
from stepwell.datapool.remote.link import LocalPort, Port
from stepwell.datapool.remote.outbox import Outbox, Wait
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.selection import DryRun, Marks
from stepwell.datapool.types import TRAIN, Lease, Step

log = logging.getLogger(__name__)

FULL_S = 5.0
"""Between two tries to lease from a pool whose disk is full."""


class DataPoolClient:
    """A pool, to be called. `connect(name)` gives one for a pool of a cluster, `local` one for a
    pool of this process.

    Args:
        ports: the ways to its shards, in their order.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self._shards = Shards(ports)
        self._batches = Batches(self._shards)
        self._credit = CreditLines(self._shards)
        self._outbox = Outbox(self._shards)
        self._background: set[asyncio.Task[Any]] = set()

    def __reduce__(self) -> tuple[type[DataPoolClient], tuple[Sequence[Port]]]:
        return (type(self), (self._shards.ports,))

    @property
    def ports(self) -> Sequence[Port]:
        """The ways to its shards."""
        return self._shards.ports

    async def close(self) -> None:
        """Hang up. A later call connects again."""
        await self._settled()
        for port in self.ports:
            port.close()

    @classmethod
    @asynccontextmanager
    async def local(
        cls, config: PoolConfig | None = None, folder: Path | None = None
    ) -> AsyncIterator[DataPoolClient]:
        """A pool in this process, without Ray, on this event loop: for tests, and for programs that
        need no other process to see it. With the journal of `folder`, or none.

        Raises:
            JournalError, ReplayError: the journal cannot be opened.
        """
        service = PoolService(config, folder)
        client = cls([LocalPort(service)])
        try:
            yield client
        finally:
            await client.close()
            service.close()

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """What the pool answers to any operation.

        Raises:
            DataPoolError: its refusal.
            PoolUnavailableError: the pool is gone, or does not come back in time.
        """
        return await self._shards.call(op, timeout_s)

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
        """Declare a group (`ops.OpenGroup`). Waits up to `timeout_s` (None: for ever) for
        credit."""
        known = metadata_of(metadata)
        op = OpenGroup(prompt_uid, n_rollouts, min_rollouts, deadline_s, known, channel)
        return await self._credit.open_group(op, timeout_s)

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        """Register a trajectory (`ops.OpenTrajectory`). Waits up to `timeout_s` (None: for ever)
        for room."""
        known = metadata_of(metadata)
        op = OpenTrajectory(trajectory_uid, prompt_uid, attempt, known, channel)
        return await self._outbox.with_room(op, prompt_uid, channel, timeout_s)

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
        """Open a trajectory, or find it with its steps (`ops.ResumeTrajectory`). Waits as
        `open_trajectory`."""
        known = metadata_of(metadata)
        op = ResumeTrajectory(trajectory_uid, prompt_uid, attempt, known, channel, elsewhere)
        return await self._outbox.with_room(op, prompt_uid, channel, timeout_s)

    async def submit_step(
        self, step: Step, channel: str = TRAIN, timeout_s: float | None = None
    ) -> SubmitOutcome:
        """Store one step, as `submit_steps`."""
        return (await self.submit_steps([step], channel, timeout_s))[0]

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN, timeout_s: float | None = None
    ) -> list[SubmitOutcome]:
        """Store steps, in order; one outcome each. Waits up to `timeout_s` (None: for ever) for
        room.

        Raises:
            StepConflictError, StepIndexError, TrajectoryConflictError, InvalidStepError: the first
                refusal, after every other step was applied.
            PoolFullError: the channel blocks, and a step would begin a new group.
        """
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidStepError(
                    f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                )
        if not steps:
            return []
        return outcomes_or_raise(await self._outbox.submit(steps, channel, timeout_s))

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """Close a trajectory with its outcome reward (`ops.CompleteTrajectory`)."""
        self._outbox.end(trajectory_uid, channel)
        known = metadata_of(metadata)
        return await self.call(CompleteTrajectory(trajectory_uid, reward, known, channel))

    async def abort_trajectory(
        self, trajectory_uid: str, reason: str, will_retry: bool = False, channel: str = TRAIN
    ) -> TrajectoryOutcome:
        """Close a trajectory without serving it (`ops.AbortTrajectory`)."""
        self._outbox.end(trajectory_uid, channel)
        return await self.call(AbortTrajectory(trajectory_uid, reason, will_retry, channel))

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        """Take an open or ready group out (`ops.DropGroup`)."""
        await self.call(DropGroup(prompt_uid, reason, channel))

    # -- consumers ---------------------------------------------------------------------------

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """The next `batch_size` ready groups (`ops.LeaseBatch`). Waits up to `timeout_s` (None: for
        ever). None once that is over, or as soon as the channel is shut down without enough groups.

        A pool whose disk is full leases nothing; it is waited for as for groups.

        Raises:
            JournalFullError: the disk is still full after `timeout_s`.
        """
        wait = Wait(timeout_s)
        op = LeaseBatch(n_rollouts, channel, batch_size, lease_s, uuid.uuid4().hex)
        while True:
            try:
                answer = await self._batches.lease(op, wait.next_slice())
            except JournalFullError as e:
                if wait.is_over():
                    raise
                log.warning("no lease yet: %s", e)
                await asyncio.sleep(min(FULL_S, wait.left()))
                continue
            if isinstance(answer, PackedLease):
                return answer.unpack()
            if answer == "shut_down" or wait.is_over():
                return None

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
        task = asyncio.ensure_future(self._batches.ack(lease.lease_id))
        self._background.add(task)
        task.add_done_callback(self._acked)
        return lease.steps

    def _acked(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the ack of a fetched batch failed: %s", error)

    async def ack(self, lease_id: str) -> None:
        """The groups are consumed for good (`ops.Ack`): in every shard that the lease is from,
        whatever becomes of the others."""
        await self._batches.ack(lease_id)

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """The groups go back, to be delivered again (`ops.Nack`)."""
        await self._batches.nack(lease_id, reason)

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """Hold a lease for longer (`ops.Renew`); when it expires."""
        return await self._batches.renew(lease_id, lease_s)

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        """Give every lease of the channel back (`ops.ReleaseLeases`); how many."""
        return sum(await self._shards.all(ReleaseLeases(channel, reason)))

    # -- people and sources ------------------------------------------------------------------

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """Score a trajectory, or one step, until its group is leased (`ops.SetReward`)."""
        return await self.call(SetReward(trajectory_uid, reward, step_index, channel))

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        **marks: Any,
    ) -> Marks:
        """What people say of a group or trajectory (`ops.Mark`)."""
        return await self.call(Mark(prompt_uid, trajectory_uid, marks, channel))

    async def delete(self, trajectory_uid: str | None = None, tag: str | None = None) -> Deleted:
        """Delete data (`ops.Delete`), all there is. Erased from the journal's files within
        seconds."""
        await self._settled()
        found = Deleted(more=True)
        while found.more:
            answers = await self._shards.all(Delete(trajectory_uid, tag))
            more = any(answer.more for answer in answers)
            found = sum(answers, found)
            found = Deleted(found.trajectories, found.leased, more)
        return found

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        """Generation uses policy `version` from now on (`ops.AdvanceVersion`)."""
        await self._shards.all(AdvanceVersion(version, channel))

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """What a fetch would be given (`questions.DryRunOf`); of several shards one after the
        other: a fetch gets its part of the first ones of each."""
        rules = None if selection is None else selection.model_dump()
        runs = await self._shards.all(DryRunOf(rules, channel, batch_size))
        return DryRun(batch_size, tuple(d for run in runs for d in run.decisions))

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """What happened after `cursor` (`questions.GetEvents`), waiting up to `timeout_s` for the
        first. Of several shards by time; one that is down is left out until it is back."""
        wait = Wait(timeout_s)
        named = None if kinds is None else tuple(kinds)
        lost = False
        while True:
            op = GetEvents(cursor, channel, named, limit)
            page = await self._shards.events(op, wait.next_slice())
            lost = lost or page.lost
            if page.events or wait.is_over():
                return replace(page, lost=lost)
            cursor = page.cursor  # what was looked at is not again

    # -- reading -----------------------------------------------------------------------------

    async def list_groups(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[GroupRow]:
        """Live groups; filters and errors: `inspect/listing.py`. Shard by shard."""
        return await self._shards.page(ListGroups(channel, cursor, limit, filters))

    async def list_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[TrajectoryRow]:
        """Trajectories of live groups, as `list_groups`."""
        return await self._shards.page(ListTrajectories(channel, cursor, limit, filters))

    async def list_steps(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        include_tokens: bool = False,
        **filters: Any,
    ) -> Page[StepRow]:
        """Stored steps, as `list_groups`."""
        return await self._shards.page(ListSteps(channel, cursor, limit, filters, include_tokens))

    async def read_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> ExportedPage:
        """Whole trajectories, as they are exported, as `list_groups`."""
        return await self._shards.page(ReadTrajectories(channel, cursor, limit, filters))

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """Counts (`questions.GetStatistics`) of the whole pool. Of a shard that is down, what it
        answered last; `shards` says which those are."""
        await self._settled()
        return await self._shards.statistics(GetStatistics(channel))

    async def describe(self) -> dict[str, Any]:
        """The pool's process, durability, memory and journal; of several shards, `shards`."""
        return await self._shards.describe(Describe())

    async def shutdown(self, channel: str | None = None) -> None:
        """No group is opened any more (`ops.Shutdown`)."""
        await self._settled()
        await self._shards.all(Shutdown(channel))

    async def _settled(self) -> None:
        """Return once every ack that nobody waited for has its answer."""
        while self._background:
            await asyncio.wait(self._background)
