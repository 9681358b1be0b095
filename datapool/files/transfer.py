"""This module exports a channel to a file, and imports a file into a channel.

    export    pages of the channel ──► a thread that writes them        (one page ahead)
    import    a thread that reads ──► open groups ─► mark ─► steps ─► complete ─► close groups

What is exported is what a consumer would get: later rewards applied, `is_last` on the last step;
of running trajectories the steps so far. It changes nothing in the pool. Pages are taken one after
the other: what is submitted, served or acked meanwhile may be in the file or not.

An import is what producers do, in the order that keeps a group from being served half: groups with
the number of rollouts they were declared with, marks, trajectories with attempt and metadata,
steps with the rewards they were served with (so none is added again), completions. Repeated, it
changes nothing. Trajectories that were open are left out. A declared group is then *closed*:
rollouts that it lacks count as aborted, for nobody is going to run them, so that it is served with
those there are.

Owns the two ways. Does not own the file (`export.py`) nor what is in a page (`inspect/listing.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from stepwell.datapool import errors
from stepwell.datapool.files.export import ExportFormat, ExportSummary, read, write
from stepwell.datapool.files.rows import ExportedTrajectory
from stepwell.datapool.inspect.rows import ExportedPage
from stepwell.datapool.ops import SubmitOutcome
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN, Step, Trajectory

NOT_IMPORTED = "not_imported"
EXPORT_PAGE = 256
"""Trajectories of an export that travel together, if they are small."""

T = TypeVar("T")


@dataclass(slots=True)
class ImportSummary:
    """What `import_channel` did."""

    path: Path
    channel: str
    n_groups: int = 0
    n_trajectories: int = 0
    """Imported, those included that were there already."""
    n_steps: int = 0
    n_duplicates: int = 0
    """Steps that were there already."""
    n_left_out: int = 0
    """Trajectories that were open when they were exported."""
    n_closed: int = 0
    """Rollouts that count as aborted because the file does not have them."""


# -- out ---------------------------------------------------------------------------------------


async def export_channel(
    client: DataPoolClient,
    path: Path | str,
    channel: str = TRAIN,
    format: ExportFormat | None = None,
    *,
    overwrite: bool = False,
    **filters: Any,
) -> ExportSummary:
    """Write the trajectories of the channel's live groups to `path`, Parquet or JSONL (by its
    suffix, or `format`). Holds two pages of about 8 MiB; changes nothing in the pool.

    Args:
        filters: as `list_trajectories`: `state=["complete"]`, `min_reward=0.5`, ….

    Raises:
        ExportError: `path` exists, an unknown format, a value that no row can carry.
        InvalidRequestError: an unknown filter, or a malformed value of one.
        OSError: the disk is full, the folder not writable, …
    """
    loop = asyncio.get_running_loop()
    left = threading.Event()

    def ask(cursor: str | None) -> Future[ExportedPage]:
        page = client.read_trajectories(channel, cursor, EXPORT_PAGE, **filters)
        return asyncio.run_coroutine_threadsafe(page, loop)

    def trajectories() -> Iterator[ExportedTrajectory]:
        """In the writing thread, while the next page is on its way."""
        coming: Future[ExportedPage] | None = ask(None)
        while coming is not None:
            page = coming.result()
            coming = None if page.cursor is None else ask(page.cursor)
            for exported in page.unpack():
                if left.is_set():
                    raise RuntimeError("whoever asked for the export has left")
                yield exported

    chosen = "".join(f", {name}={value!r}" for name, value in sorted(filters.items()))
    try:
        return await asyncio.to_thread(
            write,
            path,
            trajectories(),
            format,
            source=f"channel {channel!r}{chosen}",
            overwrite=overwrite,
        )
    finally:
        left.set()  # the thread, if it still writes, removes what it has written


# -- in ----------------------------------------------------------------------------------------


async def import_channel(
    client: DataPoolClient,
    path: Path | str,
    channel: str,
    *,
    uid_suffix: str = "",
    timeout_s: float | None = None,
) -> ImportSummary:
    """Put the trajectories of an exported file into `channel`. What is fetched there is what
    would have been fetched where they come from. Once more: no-op while they are there.

    Args:
        uid_suffix: appended to all uids, for a channel that has seen them before.
        timeout_s: to wait for admission credit, per group; None: for ever.

    Raises:
        ExportError: not an exported file, or a damaged one.
        GroupClosedError, GroupConflictError, StepConflictError, TrajectoryClosedError, …: the
            channel has, or had, other content under these uids. What came before is imported.
        PoolFullError: no credit within `timeout_s`.
    """
    run = _Import(client, ImportSummary(Path(path), channel), timeout_s)
    groups = groupby(read(path), key=lambda exported: exported.trajectory.prompt_uid)
    try:
        while group := await asyncio.to_thread(lambda: list(next(groups, (None, ()))[1])):
            chosen = [_renamed(e, uid_suffix) for e in group if e.state == "complete"]
            run.summary.n_left_out += len(group) - len(chosen)
            if chosen:
                await run.add(chosen)
        await run.close_groups()
    except _CONTRADICTIONS as e:
        raise type(e)(
            f"{path}: {e}. To import it under uids of its own, pass "
            f"{'another' if uid_suffix else 'a'} uid_suffix (for instance '-again'), or import it "
            "into another channel"
        ) from e
    return run.summary


_CONTRADICTIONS = (
    errors.GroupClosedError,
    errors.GroupConflictError,
    errors.StepConflictError,
    errors.StepIndexError,
    errors.TrajectoryClosedError,
    errors.TrajectoryConflictError,
)


def _renamed(exported: ExportedTrajectory, suffix: str) -> ExportedTrajectory:
    if not suffix:
        return exported
    old = exported.trajectory
    uid, prompt_uid = old.trajectory_uid + suffix, old.prompt_uid + suffix
    steps = tuple(replace(s, trajectory_uid=uid, prompt_uid=prompt_uid) for s in old.steps)
    renamed = replace(old, trajectory_uid=uid, prompt_uid=prompt_uid, steps=steps)
    return replace(exported, trajectory=renamed)


def _completes_itself(exported: ExportedTrajectory) -> bool:
    steps = exported.trajectory.steps
    return steps[-1].is_last and [s.step_index for s in steps] == list(range(len(steps)))


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """At once, so that they travel together; the first error once all are back."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast(list[T], answers)


@dataclass(slots=True)
class _Import:
    """One import on its way. Each group is filled before the next one is opened: what that waits
    for may be that this one is served."""

    client: DataPoolClient
    summary: ImportSummary
    timeout_s: float | None
    missing: dict[str, int] = field(default_factory=dict)
    """Rollouts that a group was declared with and that the file did not have so far."""

    @property
    def channel(self) -> str:
        return self.summary.channel

    async def add(self, group: list[ExportedTrajectory]) -> None:
        """Its trajectories, or some of them if the file has them in several places."""
        first = group[0]
        uid = first.trajectory.prompt_uid
        if uid not in self.missing:
            if first.n_rollouts is not None:
                await self.client.open_group(
                    uid,
                    first.n_rollouts,
                    metadata=first.group_metadata,
                    channel=self.channel,
                    timeout_s=self.timeout_s,
                )
            self.missing[uid] = first.n_rollouts or 0
            self.summary.n_groups += 1
        self.missing[uid] -= len(group)
        # Marks first, so that the group is not served without them.
        outcomes = await _all(self._open(e.trajectory) for e in group)
        if first.group_marks is not None:
            await self.client.mark(uid, channel=self.channel, **first.group_marks)
        for exported, outcome in zip(group, outcomes, strict=True):
            await self._mark(exported, outcome)
        # Most complete themselves, all at once, with their `is_last` steps. Those that do not come
        # first, because what is complete may be served.
        slower = [e for e in group if not _completes_itself(e)]
        await self._submit(slower)
        await _all(self._complete(e.trajectory) for e in slower)
        await self._submit([e for e in group if _completes_itself(e)])
        self.summary.n_trajectories += len(group)

    async def _open(self, t: Trajectory) -> SubmitOutcome:
        outcome = await self.client.open_trajectory(
            t.trajectory_uid, t.prompt_uid, t.attempt, t.metadata, self.channel
        )
        self._refuse_late(outcome, t)
        return outcome

    async def _mark(self, exported: ExportedTrajectory, outcome: SubmitOutcome) -> None:
        if exported.marks is None:
            return
        uid = exported.trajectory.trajectory_uid
        try:
            await self.client.mark(trajectory_uid=uid, channel=self.channel, **exported.marks)
        except errors.TrajectoryClosedError:
            if outcome != "duplicate":  # imported before, and served with its marks
                raise

    async def _submit(self, batch: list[ExportedTrajectory]) -> None:
        steps = [step for e in batch for step in e.trajectory.steps]
        outcomes = await self.client.submit_steps(steps, self.channel)
        for step, outcome in zip(steps, outcomes, strict=True):
            self._refuse_late(outcome, step)
        self.summary.n_steps += len(steps)
        self.summary.n_duplicates += outcomes.count("duplicate")

    async def _complete(self, t: Trajectory) -> None:
        outcome = await self.client.complete_trajectory(t.trajectory_uid, channel=self.channel)
        self._refuse_late(outcome, t)

    def _refuse_late(self, outcome: str, what: Trajectory | Step) -> None:
        if outcome == "late":
            raise errors.GroupClosedError(
                f"trajectory {what.trajectory_uid!r} of group {what.prompt_uid!r} was already "
                f"served, dropped or aborted in channel {self.channel!r}"
            )

    async def close_groups(self) -> None:
        """Declared groups that lack rollouts: abort those that nobody runs."""
        missing = [
            # The same uids each time, so that a second import finds them closed.
            (f"{prompt_uid}/{NOT_IMPORTED}/{i}", prompt_uid)
            for prompt_uid, n in self.missing.items()
            for i in range(n)
        ]
        await _all(self._abort(*uids) for uids in missing)
        self.summary.n_closed = len(missing)

    async def _abort(self, trajectory_uid: str, prompt_uid: str) -> None:
        await self.client.open_trajectory(trajectory_uid, prompt_uid, channel=self.channel)
        await self.client.abort_trajectory(trajectory_uid, NOT_IMPORTED, channel=self.channel)
