"""This module exports a channel to a file, and imports a file into a channel.

    export    pages of the channel ──► a thread that writes them        (one page ahead)
    import    a thread that reads ──► whole groups ──► open ─► mark ─► steps ─► complete

What is exported is what a consumer would get: later rewards applied, `is_last` on the last step;
of running trajectories the steps so far. It changes nothing in the pool. Pages are taken one after
the other: what is submitted, served or acked meanwhile may be in the file or not.

An import is what producers do: open the group, its trajectories, marks, steps with the rewards they
were served with (so none is added again), completions. A group is declared with as many rollouts as
the file has complete trajectories of it, so it is served when all of them are there, marks and all,
and waits for no rollout that nobody runs. Trajectories may stand in any order, as of a file that
was sorted or shuffled: a group is held until the last of it has been read. Repeated, an import
changes nothing. Trajectories that were open are left out.

Owns the two ways. Does not own the file (`export.py`) nor what is in a page (`inspect/listing.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepwell.datapool.errors import TrajectoryClosedError, UnknownTrajectoryError
from stepwell.datapool.files.columns import by_trajectory
from stepwell.datapool.files.export import ExportSummary, PictureForm, read, read_rows, write
from stepwell.datapool.inspect.pages import ExportedPage, ExportedTrajectory
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN

EXPORT_PAGE = 256
"""Trajectories of an export that travel together, if they are small."""


@dataclass(slots=True)
class ImportSummary:
    """Summary of `import_channel`; what was there already counts, too."""

    n_groups: int = 0
    n_trajectories: int = 0
    n_steps: int = 0
    n_left_out: int = 0
    """Trajectories that were open when they were exported."""


# -- out ---------------------------------------------------------------------------------------


async def export_channel(
    client: DataPoolClient,
    path: Path | str,
    channel: str = TRAIN,
    *,
    overwrite: bool = False,
    pictures: PictureForm = "files",
    **filters: Any,
) -> ExportSummary:
    """Write the trajectories of the channel's live groups to `path`, Parquet or JSONL by its
    suffix. Holds two pages of about 8 MiB; changes nothing in the pool.

    Args:
        pictures: `files` beside it, in `NAME.parquet.pictures`, or `embedded` in its rows.
        filters: as `list_trajectories`: `state=["complete"]`, `min_reward=0.5`, ….

    Raises:
        ExportError: `path` exists, an unknown suffix, a value that no row can carry.
        InvalidRequestError: an unknown filter, or a malformed value of one.
        OSError: the disk is full, the folder not writable, …
    """
    loop = asyncio.get_running_loop()
    left = threading.Event()

    def ask(cursor: str | None) -> Future[ExportedPage]:
        page = client.read_trajectories(channel, cursor, EXPORT_PAGE, **filters)
        return asyncio.run_coroutine_threadsafe(page, loop)

    def trajectories() -> Iterator[ExportedTrajectory]:
        """Yield the trajectories of a page, in the writing thread, while the next is on its way."""
        coming: Future[ExportedPage] | None = ask(None)
        while coming is not None:
            page = coming.result()
            coming = None if page.cursor is None else ask(page.cursor)
            for exported in page.unpack():
                if left.is_set():
                    raise RuntimeError("whoever asked for the export has left")
                digests = {p.digest for step in exported.trajectory.steps for p in step.pictures}
                if digests:
                    uid = exported.trajectory.trajectory_uid
                    reading = client.read_pictures(uid, sorted(digests), channel)
                    try:
                        own = asyncio.run_coroutine_threadsafe(reading, loop).result()
                    except (TrajectoryClosedError, UnknownTrajectoryError):
                        continue  # it was acked meanwhile
                    exported = replace(exported, pictures=own)
                yield exported

    chosen = "".join(f", {name}={value!r}" for name, value in sorted(filters.items()))
    try:
        return await asyncio.to_thread(
            write,
            path,
            trajectories(),
            source=f"channel {channel!r}{chosen}",
            overwrite=overwrite,
            pictures=pictures,
        )
    finally:
        left.set()  # the thread, if it still writes, removes what it has written


# -- in ----------------------------------------------------------------------------------------


async def import_channel(
    client: DataPoolClient, path: Path | str, channel: str, *, timeout_s: float | None = None
) -> ImportSummary:
    """Put the complete trajectories of an exported file into `channel`, group by group. Once more:
    no-op while they are there. Holds one group, and what has been read of those whose trajectories
    do not follow each other in the file.

    Args:
        timeout_s: to wait for admission credit, per group; None: for ever.

    Raises:
        ExportError: not an exported file, or a damaged one.
        GroupClosedError, GroupConflictError, StepConflictError, TrajectoryClosedError, …: the
            channel has, or had, other content under these uids; import into another channel. What
            came before is imported.
        PoolFullError: no credit within `timeout_s`.
    """
    summary = ImportSummary()
    groups = _groups(Path(path))
    while group := await asyncio.to_thread(next, groups, None):
        complete = [exported for exported in group if exported.state == "complete"]
        summary.n_left_out += len(group) - len(complete)
        if complete:
            # Filled before the next one is opened: what that waits for may be that this one is
            # served.
            summary.n_steps += await _import_group(client, complete, channel, timeout_s)
            summary.n_groups += 1
            summary.n_trajectories += len(complete)
    return summary


def _groups(path: Path) -> Iterator[list[ExportedTrajectory]]:
    """Groups of a file, each whole, in the order of their last trajectories; raises as `read`."""
    missing = Counter(rows[0][1]["prompt_uid"] for rows in by_trajectory(read_rows(path)))
    held: dict[str, list[ExportedTrajectory]] = {}
    for exported in read(path):
        uid = exported.trajectory.prompt_uid
        held.setdefault(uid, []).append(exported)
        missing[uid] -= 1
        if not missing[uid]:
            yield held.pop(uid)


async def _import_group(
    client: DataPoolClient,
    group: Sequence[ExportedTrajectory],
    channel: str,
    timeout_s: float | None,
) -> int:
    """Its number of steps."""
    first, uid = group[0], group[0].trajectory.prompt_uid
    trajectories = [exported.trajectory for exported in group]
    n = len({t.trajectory_uid for t in trajectories})  # two files in one may have some twice
    await client.open_group(
        uid, n, metadata=first.group_metadata, channel=channel, timeout_s=timeout_s
    )
    await _all(
        client.open_trajectory(t.trajectory_uid, uid, t.attempt, t.metadata, channel)
        for t in trajectories
    )
    if first.group_marks is not None:
        await client.mark(uid, channel=channel, **first.group_marks)
    for exported in group:
        if exported.marks is not None:
            own = exported.trajectory.trajectory_uid
            await client.mark(trajectory_uid=own, channel=channel, **exported.marks)
    steps = [step for t in trajectories for step in t.steps]
    known = {digest: each.pictures for each in group for digest in each.pictures}

    def pictures(digests: Collection[str]) -> dict[str, bytes]:
        return {digest: known[digest][digest] for digest in digests if digest in known}

    await client.submit_steps(steps, channel, pictures=pictures)
    await _all(client.complete_trajectory(t.trajectory_uid, channel=channel) for t in trajectories)
    return len(steps)


async def _all(calls: Iterable[Awaitable[object]]) -> None:
    """Make calls at once, so that they travel together; the first error once all are back."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
