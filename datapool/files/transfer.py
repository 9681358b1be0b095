"""A channel into a file, and a file into a channel.

    export    pages of the channel ──► a thread that writes them        (one page ahead)
    import    a thread that reads ──► open groups ─► mark ─► steps ─► complete ─► close groups

What is exported is what a consumer would get: later rewards applied, `is_last` on the last step;
of running trajectories the steps so far. It changes nothing in the pool. Pages are taken one after
the other: what is submitted, served or acked meanwhile may be in the file or not.

An import is what producers do, in the order that keeps a group from being served half: groups with
the number of rollouts they were declared with, marks, trajectories with attempt and metadata,
steps with the rewards they were served with (so none is added again), completions. Repeated, it
changes nothing. A declared group is then *closed*: rollouts that the file does not have count as
aborted, for nobody is going to run them, so that it is served with those there are.

Owns the two ways. Does not own the file (`export.py`) nor what is in a page (`inspect/listing.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stepwell.datapool.core.records import SubmitOutcome
from stepwell.datapool.errors import (
    GroupClosedError,
    GroupConflictError,
    PoolFullError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
from stepwell.datapool.files.export import ExportFormat, ExportSummary, read, write
from stepwell.datapool.files.rows import ExportedTrajectory
from stepwell.datapool.inspect.rows import ExportedPage
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN, Trajectory

NOT_IMPORTED = "not_imported"
EXPORT_PAGE = 256
"""Trajectories of an export that travel together, if they are small."""
BATCH_TRAJECTORIES = 64
BATCH_TOKENS = 1 << 20
MAX_BATCH_TOKENS = 1 << 24
"""A group that is larger is imported in parts."""

ReadPage = Callable[[str | None], Awaitable[ExportedPage]]
"""The page at a cursor."""

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
    """Trajectories that were open (or aborted) when they were exported."""
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

    async def read_page(cursor: str | None) -> ExportedPage:
        return await client.read_trajectories(channel, cursor, EXPORT_PAGE, **filters)

    chosen = "".join(f", {name}={value!r}" for name, value in sorted(filters.items()))
    source = f"channel {channel!r}{chosen}"
    pages = _Pages(read_page, asyncio.get_running_loop())
    try:
        return await asyncio.to_thread(
            write, path, pages.trajectories(), format, source=source, overwrite=overwrite
        )
    finally:
        pages.stop()  # if the caller left, the thread removes what it has written


class _StoppedError(Exception):
    """Whoever asked for the export has left."""


class _Pages:
    """Pages of the event loop, read in another thread."""

    def __init__(self, read_page: ReadPage, loop: asyncio.AbstractEventLoop) -> None:
        self._read_page = read_page
        self._loop = loop
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def trajectories(self) -> Iterator[ExportedTrajectory]:
        """In the writing thread, while the next page is on its way."""
        coming: Future[ExportedPage] | None = self._ask(None)
        while coming is not None:
            page = coming.result()
            coming = None if page.cursor is None else self._ask(page.cursor)
            for exported in page.unpack():
                if self._stopped.is_set():
                    raise _StoppedError
                yield exported

    def _ask(self, cursor: str | None) -> Future[ExportedPage]:
        async def ask() -> ExportedPage:
            return await self._read_page(cursor)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)


# -- in ----------------------------------------------------------------------------------------


async def import_channel(
    client: DataPoolClient,
    path: Path | str,
    channel: str,
    *,
    uid_suffix: str = "",
    include_open: bool = False,
    close_groups: bool = True,
    timeout_s: float | None = None,
) -> ImportSummary:
    """Put the trajectories of an exported file into `channel`. What is fetched there is what
    would have been fetched where they come from. Once more: no-op while they are there.

    Args:
        uid_suffix: appended to all uids, for a channel that has seen them before.
        include_open: also those that were running; somebody will go on with them.
        close_groups: declared groups that have fewer trajectories in the file than they were
            declared with are served with those. False: they stay open.
        timeout_s: to wait for admission credit, per group; None: for ever.

    Raises:
        ExportError: not an exported file, or a damaged one.
        GroupClosedError, GroupConflictError, StepConflictError, TrajectoryClosedError, …: the
            channel has, or had, other content under these uids. What came before is imported.
        PoolFullError: no credit within `timeout_s`.
    """
    run = _Import(client, Path(path), channel, uid_suffix, timeout_s)
    batches = _batches(read(path))
    while batch := await asyncio.to_thread(next, batches, None):
        chosen = [e for e in batch if _is_wanted(e, include_open)]
        run.summary.n_left_out += len(batch) - len(chosen)
        if chosen:
            await run.add([_renamed(e, uid_suffix) for e in chosen])
    if close_groups:
        await run.close_groups()
    return run.summary


def _batches(source: Iterable[ExportedTrajectory]) -> Iterator[list[ExportedTrajectory]]:
    """Whole groups, so that none is served before all of it is there."""
    batch: list[ExportedTrajectory] = []
    n_tokens = 0
    for exported in source:
        full = n_tokens >= BATCH_TOKENS or len(batch) >= BATCH_TRAJECTORIES
        ends = batch and exported.trajectory.prompt_uid != batch[-1].trajectory.prompt_uid
        if (full and ends) or n_tokens >= MAX_BATCH_TOKENS:
            yield batch
            batch, n_tokens = [], 0
        batch.append(exported)
        n_tokens += sum(step.n_tokens for step in exported.trajectory.steps)
    if batch:
        yield batch


def _is_wanted(exported: ExportedTrajectory, include_open: bool) -> bool:
    return exported.state != "aborted" and (include_open or exported.state != "open")


def _completes_itself(exported: ExportedTrajectory) -> bool:
    steps = exported.trajectory.steps
    whole = [step.step_index for step in steps] == list(range(len(steps)))
    return exported.state != "open" and whole and steps[-1].is_last


def _renamed(exported: ExportedTrajectory, suffix: str) -> ExportedTrajectory:
    if not suffix:
        return exported
    old = exported.trajectory
    uid, prompt_uid = old.trajectory_uid + suffix, old.prompt_uid + suffix
    steps = tuple(replace(s, trajectory_uid=uid, prompt_uid=prompt_uid) for s in old.steps)
    return replace(
        exported, trajectory=Trajectory(uid, prompt_uid, steps, old.metadata, old.attempt)
    )


@dataclass(slots=True)
class _Group:
    """A group of the file, as far as it was read."""

    n_rollouts: int | None
    trajectory_uids: set[str] = field(default_factory=set)


class _Import:
    """One import on its way."""

    def __init__(
        self,
        client: DataPoolClient,
        path: Path,
        channel: str,
        uid_suffix: str,
        timeout_s: float | None,
    ) -> None:
        self.summary = ImportSummary(path, channel)
        self._client = client
        self._channel = channel
        self._uid_suffix = uid_suffix
        self._timeout_s = timeout_s
        self._groups: dict[str, _Group] = {}

    async def add(self, batch: list[ExportedTrajectory]) -> None:
        """Open groups as long as there is credit for them; what is open is submitted before the
        next one is waited for, because that may be what it waits for."""
        part: list[ExportedTrajectory] = []
        for exported in batch:
            uid = exported.trajectory.prompt_uid
            if uid not in self._groups:
                try:
                    await self._explained(self._open_group(exported, 0))
                except PoolFullError:
                    await self._put(part)
                    part = []
                    await self._explained(self._open_group(exported, self._timeout_s))
                self._groups[uid] = _Group(exported.n_rollouts)
                self.summary.n_groups += 1
            part.append(exported)
        await self._put(part)

    async def _put(self, batch: list[ExportedTrajectory]) -> None:
        """Each stage for all before the next, so that no group is ready before its marks are
        set."""
        outcomes = await self._all(self._open_trajectory(e) for e in batch)
        for exported in {e.trajectory.prompt_uid: e for e in batch}.values():
            await self._explained(self._mark_group(exported))
        for exported, outcome in zip(batch, outcomes, strict=True):
            await self._explained(self._mark_trajectory(exported, outcome))
        # Most complete themselves, all at once, with their `is_last` steps. Those that do not come
        # first, because what is complete may be served.
        first = [e for e in batch if not _completes_itself(e)]
        await self._explained(self._submit(first))
        await self._all(self._finish(e) for e in first)
        await self._explained(self._submit([e for e in batch if _completes_itself(e)]))
        self.summary.n_trajectories += len(batch)

    async def close_groups(self) -> None:
        """Declared groups that lack rollouts: abort those that nobody runs."""
        missing = [
            # The same uids each time, so that a second import finds them closed.
            (f"{prompt_uid}/{NOT_IMPORTED}/{i}", prompt_uid)
            for prompt_uid, group in self._groups.items()
            for i in range((group.n_rollouts or 0) - len(group.trajectory_uids))
        ]
        for i in range(0, len(missing), BATCH_TRAJECTORIES):
            await self._all(self._close(*uids) for uids in missing[i : i + BATCH_TRAJECTORIES])
        self.summary.n_closed = len(missing)

    async def _close(self, trajectory_uid: str, prompt_uid: str) -> None:
        await self._client.open_trajectory(trajectory_uid, prompt_uid, channel=self._channel)
        await self._client.abort_trajectory(trajectory_uid, NOT_IMPORTED, channel=self._channel)

    async def _open_group(self, exported: ExportedTrajectory, timeout_s: float | None) -> None:
        if exported.n_rollouts is not None:
            await self._client.open_group(
                exported.trajectory.prompt_uid,
                exported.n_rollouts,
                metadata=exported.group_metadata,
                channel=self._channel,
                timeout_s=timeout_s,
            )

    async def _open_trajectory(self, exported: ExportedTrajectory) -> SubmitOutcome:
        t = exported.trajectory
        outcome = await self._client.open_trajectory(
            t.trajectory_uid, t.prompt_uid, t.attempt, t.metadata, self._channel
        )
        if outcome == "late":
            raise self._closed(t)
        self._groups[t.prompt_uid].trajectory_uids.add(t.trajectory_uid)
        return outcome

    async def _mark_group(self, exported: ExportedTrajectory) -> None:
        if exported.group_marks is not None:
            uid = exported.trajectory.prompt_uid
            await self._client.mark(uid, channel=self._channel, **exported.group_marks)

    async def _mark_trajectory(self, exported: ExportedTrajectory, outcome: SubmitOutcome) -> None:
        if exported.marks is None:
            return
        uid = exported.trajectory.trajectory_uid
        try:
            await self._client.mark(trajectory_uid=uid, channel=self._channel, **exported.marks)
        except TrajectoryClosedError:
            if outcome != "duplicate":  # imported before, and served with its marks
                raise

    async def _submit(self, batch: list[ExportedTrajectory]) -> None:
        steps = [step for e in batch for step in e.trajectory.steps]
        outcomes = await self._client.submit_steps(steps, self._channel)
        if "late" in outcomes:
            late = steps[outcomes.index("late")].trajectory_uid
            raise self._closed(
                next(e.trajectory for e in batch if e.trajectory.trajectory_uid == late)
            )
        self.summary.n_steps += len(steps)
        self.summary.n_duplicates += outcomes.count("duplicate")

    async def _finish(self, exported: ExportedTrajectory) -> None:
        t = exported.trajectory
        if exported.state == "open":
            if exported.outcome is not None:
                await self._client.set_reward(
                    t.trajectory_uid, exported.outcome, channel=self._channel
                )
        elif (
            await self._client.complete_trajectory(t.trajectory_uid, channel=self._channel)
            == "late"
        ):
            raise self._closed(t)

    async def _all(self, calls: Iterator[Awaitable[T]]) -> list[T]:
        """At once, so that they travel together; the first error once all are back."""
        answers = await asyncio.gather(*map(self._explained, calls), return_exceptions=True)
        results: list[T] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            results.append(answer)
        return results

    async def _explained(self, call: Awaitable[T]) -> T:
        """The call, with the file and the remedy in what it raises."""
        try:
            return await call
        except _CONTRADICTIONS as e:
            raise type(e)(f"{self.summary.path}: {e}. {self._remedy}") from e

    def _closed(self, t: Trajectory) -> GroupClosedError:
        return GroupClosedError(
            f"trajectory {t.trajectory_uid!r} of group {t.prompt_uid!r} was already served, "
            f"dropped or aborted in channel {self._channel!r}"
        )

    @property
    def _remedy(self) -> str:
        other = "another" if self._uid_suffix else "a"
        return (
            f"To import it under uids of its own, pass {other} uid_suffix "
            "(for instance '-again'), or import it into another channel"
        )


_CONTRADICTIONS = (
    GroupClosedError,
    GroupConflictError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
