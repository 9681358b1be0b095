"""This module gives users a DataPool as typed methods so that they see neither shards nor
connections.

    await client.submit_step(step) ──► SubmitSteps ──► the shard it is about, or all ──► its answer

A step is acknowledged once the pool applied it and its journal has it. Every call may be repeated
without harm, so calls that were on their way when a pool's process died are made again. What is
called without waiting takes effect in the order it was called, as far as it is about one group.
Not thread-safe: one client per event loop.

What each call does and raises is said where the operation is (`ops.py`, `questions.py`); here is
what a user types. Which shards are asked is in `shards.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

from stepwell.datapool import ops
from stepwell.datapool import questions as asked
from stepwell.datapool.codec import Base, PackedLease, pack
from stepwell.datapool.config import PoolConfig, SelectionConfig
from stepwell.datapool.errors import (
    InvalidStepError,
    JournalFullError,
    UnknownBaseError,
    UnknownPictureError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.inspect.pages import (
    ExportedPage,
    GroupRow,
    IndexRow,
    Page,
    PromptGroup,
    TrajectoryRow,
)
from stepwell.datapool.ops import Op, R, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.remote.outbox import Outbox, PictureSource
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import Caller, LocalShard, Shard
from stepwell.datapool.remote.shards import Shards
from stepwell.datapool.selection import DryRun, Marks
from stepwell.datapool.types import TRAIN, Group, Lease, Step

log = logging.getLogger(__name__)

P = ParamSpec("P")

APPEND_TRIES = 4
"""Tries of a step: as it is, whole, and after its pictures."""
FULL_S = 5.0
"""Seconds between two tries to lease from a pool whose disk is full."""


def _makes(
    op: Callable[P, Op[R]],
) -> Callable[Concatenate[DataPoolClient, P], Coroutine[Any, Any, R]]:
    """A method with the arguments, the documentation and the answer of an operation."""

    async def method(self: DataPoolClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.call(op(*args, **kwargs))

    return wraps(op, updated=())(method)  # type: ignore[return-value]


class DataPoolClient:
    """A pool, to be called. `connect(name)` gives one for a pool of a cluster, `local` one for a
    pool of this process.

    Args:
        shards: in their order.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._pool: Caller = self.shards[0] if len(self.shards) == 1 else Shards(self.shards)
        self._outbox = Outbox(self._pool)
        self._sending: set[asyncio.Future[None]] = set()
        """Calls whose answers nobody waits for."""

    def __reduce__(self) -> tuple[type[DataPoolClient], tuple[Sequence[Shard]]]:
        return (type(self), (self.shards,))

    async def close(self) -> None:
        """Hang up. A later call connects again."""
        await asyncio.gather(*self._sending, return_exceptions=True)
        for shard in self.shards:
            shard.close()

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
        client = cls([LocalShard(service)])
        try:
            yield client
        finally:
            await client.close()
            service.close()

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """Return the pool's answer to any operation; waits up to `timeout_s` (None: for ever) for
        an answer to one that may have none yet.

        Raises:
            DataPoolError: its refusal.
            PoolUnavailableError: the pool is gone, or does not come back in time.
        """
        if isinstance(op, ops.CompleteTrajectory | ops.AbortTrajectory):
            self._outbox.recent.end(op.trajectory_uid, op.channel)
        return await self._pool.call(op, timeout_s)

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
        everywhere: bool = False,
    ) -> SubmitOutcome:
        """Declare a group (`ops.OpenGroup`). Waits up to `timeout_s` (None: for ever) for
        credit."""
        known = ops.metadata_of(metadata)
        terms = n_rollouts, min_rollouts, deadline_s
        return await self.call(
            ops.OpenGroup(prompt_uid, *terms, known, channel, everywhere), timeout_s
        )

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
        known = ops.metadata_of(metadata)
        op = ops.OpenTrajectory(trajectory_uid, prompt_uid, attempt, known, channel)
        return await self.call(op, timeout_s)

    async def resume_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> ops.Resumed:
        """Open a trajectory, or find it with its steps (`ops.ResumeTrajectory`). Waits as
        `open_trajectory`."""
        known = ops.metadata_of(metadata)
        op = ops.ResumeTrajectory(trajectory_uid, prompt_uid, attempt, known, channel, elsewhere)
        return await self.call(op, timeout_s)

    async def submit_step(
        self,
        step: Step,
        channel: str = TRAIN,
        timeout_s: float | None = None,
        pictures: PictureSource | None = None,
    ) -> SubmitOutcome:
        """Store one step, as `submit_steps`."""
        return (await self.submit_steps([step], channel, timeout_s, pictures))[0]

    async def put_pictures(
        self,
        trajectory_uid: str,
        pictures: Mapping[str, bytes],
        channel: str = TRAIN,
        prompt_uid: str | None = None,
        owner: str | None = None,
    ) -> None:
        """Store pictures, PNG by digest, for steps that are about to come (`ops.PutPictures`)."""
        await self._outbox.put(trajectory_uid, pictures, channel, prompt_uid, owner)

    async def append_step(
        self,
        step: Step,
        base: Base | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
        pictures: PictureSource | None = None,
        *,
        is_json: bool = False,
    ) -> Base | ops.Resumed | Literal["late"]:
        """Store the next step of a trajectory that several producers may go on with
        (`ops.AppendStep`). Waits up to `timeout_s` (None: for ever) for room.

        Args:
            base: the step whose tokens the prompt begins with, which travel no second time.
            pictures: as `submit_steps`.
            is_json: its metadata certainly holds JSON values alone, and is not looked through.

        Returns:
            The step as the base of others, once it is stored; or, if another step has its index,
            the trajectory as it is.
        """
        uids = step.trajectory_uid, step.prompt_uid
        packed, tries_left = pack(step, base, is_json=is_json), APPEND_TRIES
        while True:
            tries_left -= 1
            try:
                answer = await self._pool.call(ops.AppendStep(*uids, packed, channel), timeout_s)
                break
            except UnknownBaseError:
                if not tries_left:
                    raise
                packed = pack(step)
            except UnknownPictureError as e:
                put = self._outbox.put_missing
                if not tries_left or pictures is None:
                    raise
                if not await put([step], e.digests, channel, pictures):
                    raise
        if answer == "late" or isinstance(answer, ops.Resumed):
            return answer
        return Base(step.step_index, 4 * step.n_tokens, packed.crc)

    async def submit_steps(
        self,
        steps: Sequence[Step],
        channel: str = TRAIN,
        timeout_s: float | None = None,
        pictures: PictureSource | None = None,
    ) -> list[SubmitOutcome]:
        """Store steps, in order; one outcome each. Waits up to `timeout_s` (None: for ever) for
        room.

        Args:
            pictures: PNG by digest, or a function that gives it: sent when the pool lacks it.

        Raises:
            UnknownPictureError: a step refers to pictures that neither the pool nor `pictures` has.

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
        sent = await self._outbox.submit(steps, channel, timeout_s, pictures)
        return ops.outcomes_or_raise(sent)

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        channel: str = TRAIN,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> TrajectoryOutcome:
        """Close a trajectory with its outcome reward (`ops.CompleteTrajectory`)."""
        known = ops.metadata_of(metadata)
        return await self.call(
            ops.CompleteTrajectory(trajectory_uid, reward, known, channel, owner)
        )

    abort_trajectory = _makes(ops.AbortTrajectory)
    drop_group = _makes(ops.DropGroup)

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
        op = ops.LeaseBatch(n_rollouts, channel, batch_size, lease_s, uuid.uuid4().hex)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                answer = await self.call(op, left)
            except JournalFullError as e:
                if left == 0:
                    raise
                log.warning("no lease yet: %s", e)
                await asyncio.sleep(FULL_S if left is None else min(FULL_S, left))
            else:
                return await self._unpacked(answer) if isinstance(answer, PackedLease) else None

    async def _unpacked(self, packed: PackedLease) -> Lease:
        """Unpack a lease, some 7 µs a step, and let others go on after each group: a producer of
        this loop keeps the pool at work meanwhile."""
        groups: list[Group] = []
        try:
            for group in packed.groups:
                if groups:
                    await _others()
                groups.append(group.unpack())
        except asyncio.CancelledError:
            self._send(ops.Nack(packed.lease_id, ops.LEFT))
            raise
        return packed.with_groups(groups)

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
        self._send(ops.Ack(lease.lease_id))
        return lease.steps

    def _send(self, op: ops.Ack | ops.Nack) -> None:
        """End a lease, and wait for no answer."""

        def ended(sending: asyncio.Future[None]) -> None:
            self._sending.discard(sending)
            if not sending.cancelled() and (error := sending.exception()) is not None:
                log.error("the %s of a batch failed: %s", type(op).__name__.lower(), error)

        sending = asyncio.ensure_future(self._pool.call(op))
        self._sending.add(sending)
        sending.add_done_callback(ended)

    ack = _makes(ops.Ack)
    nack = _makes(ops.Nack)
    renew = _makes(ops.Renew)
    release_leases = _makes(ops.ReleaseLeases)

    # -- people and sources ------------------------------------------------------------------

    set_reward = _makes(ops.SetReward)
    why_closed = _makes(asked.WhyClosed)
    advance_version = _makes(ops.AdvanceVersion)

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        owner: str | None = None,
        **marks: Any,
    ) -> Marks:
        """Mark a group or trajectory (`ops.Mark`); returns all of its marks."""
        return await self.call(ops.Mark(prompt_uid, trajectory_uid, marks, channel, owner))

    async def delete(
        self,
        trajectory_uid: str | None = None,
        tag: str | None = None,
        user: str | None = None,
    ) -> ops.Deleted:
        """Delete data with its groups (`ops.Delete`), all there is. Erased from the journal's files
        within seconds."""
        found = ops.Deleted(more=True)
        while found.more:
            found += await self.call(ops.Delete(trajectory_uid, tag, user))
        return found

    delete_trajectory = _makes(ops.DeleteTrajectory)

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """Return what a fetch would be given (`questions.DryRunOf`)."""
        rules = None if selection is None else selection.model_dump()
        return await self.call(asked.DryRunOf(rules, channel, batch_size))

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """Return the events after `cursor` (`questions.GetEvents`), waiting up to `timeout_s` for
        the first. Those of several shards are in order of time."""
        named = None if kinds is None else tuple(kinds)
        end = time.monotonic() + timeout_s
        lost = False
        while True:
            left = max(0.0, end - time.monotonic())
            page = await self.call(asked.GetEvents(cursor, channel, named, limit), left)
            lost = lost or page.lost
            if page.events or left == 0:
                return replace(page, lost=lost)
            cursor = page.cursor  # what was looked at is not again

    # -- reading -----------------------------------------------------------------------------

    async def list_groups(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest_first: bool = False,
        **filters: Any,
    ) -> Page[GroupRow]:
        """Live groups; filters and errors: `inspect/listing.py`. Shard by shard."""
        return await self.call(asked.ListGroups(channel, cursor, limit, filters, newest_first))

    async def list_trajectories(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest_first: bool = False,
        **filters: Any,
    ) -> Page[TrajectoryRow]:
        """Trajectories of live groups, as `list_groups`."""
        op = asked.ListTrajectories(channel, cursor, limit, filters, newest_first)
        return await self.call(op)

    async def read_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> ExportedPage:
        """Whole trajectories, as they are exported, as `list_groups`."""
        return await self.call(asked.ReadTrajectories(channel, cursor, limit, filters))

    async def read_pictures(
        self,
        trajectory_uid: str,
        digests: Iterable[str],
        channel: str = TRAIN,
        owner: str | None = None,
    ) -> dict[str, bytes]:
        """Return pictures of a live trajectory by digest, as PNG (`questions.ReadPictures`). Some
        MB travel at once; all are in memory in the end."""
        left = dict.fromkeys(digests)
        found: dict[str, bytes] = {}
        while left:
            asking = asked.ReadPictures(trajectory_uid, tuple(left), channel, owner)
            part = await self.call(asking)
            found |= part
            for digest in part:
                del left[digest]
        return found

    async def trajectory_index(self, channel: str = TRAIN) -> dict[str, list[int]]:
        """Return the `step_index` of each stored step, by trajectory of a live group. Made when it
        is asked for, page by page, as are the other two: what comes or goes meanwhile may be in it
        or not."""
        return {row.trajectory_uid: list(row.steps) async for row in self._index(channel)}

    async def trajectory_complete(self, channel: str = TRAIN) -> dict[str, bool]:
        """Return whether each trajectory of a live group is complete: closed, with all its steps
        up to the last; an aborted one never is."""
        return {row.trajectory_uid: row.is_complete async for row in self._index(channel)}

    async def prompt_groups(self, channel: str = TRAIN) -> dict[str, PromptGroup]:
        """Return the live groups that have trajectories, by `prompt_uid`."""
        members: dict[str, list[IndexRow]] = {}
        async for row in self._index(channel):
            members.setdefault(row.prompt_uid, []).append(row)
        return {
            uid: PromptGroup(
                uid,
                tuple(row.trajectory_uid for row in own),
                frozenset(row.trajectory_uid for row in own if row.is_complete),
            )
            for uid, own in members.items()
        }

    async def _index(self, channel: str) -> AsyncIterator[IndexRow]:
        cursor = None
        while True:
            page = await self.call(asked.IndexTrajectories(channel, cursor, 1000))
            for row in page.items:
                yield row
            if (cursor := page.cursor) is None:
                return

    # -- end and statistics ------------------------------------------------------------------

    get_statistics = _makes(asked.GetStatistics)
    describe = _makes(asked.Describe)
    shutdown = _makes(ops.Shutdown)


async def _others() -> None:
    """Let the loop read what came (its first turn) and let those go on who waited for that (its
    second); this coroutine is before them in each."""
    for _ in range(3):
        await asyncio.sleep(0)
