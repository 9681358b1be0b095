"""Lookup of one trajectory, wherever it is: for `stepwell show` and the dashboard.

    uid ──► live in the pool ──► the archive ──► waits for it ──► aborted in a live group
                                                 └── its steps too, where there is a journal

Loads Arrow for what is not live, and only then. Owns the order of the places. Does not own what
they hold (`inspect/pages.py`, `reader.py`), nor samples of a trainer (`files/trained.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.datapool.errors import UnknownTrajectoryError
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.questions import DepartedRows, ReadDeparted
from stepwell.datapool.remote.client import DataPoolClient


class Located(NamedTuple):
    """A trajectory, and the place where it was found."""

    exported: ExportedTrajectory
    channel: str | None = None
    """Channel of the pool, of one that is in a live group; an aborted one has no steps there."""
    row: dict[str, Any] | None = None
    """Its row as lists have it, with late `feedback`, of one that left the pool or waits."""

    @property
    def is_live(self) -> bool:
        return self.channel is not None and self.exported.state != "aborted"


async def locate(
    uid: str, pool: DataPoolClient, channels: Iterable[str], archive: Path | None
) -> Located | None:
    """Find a trajectory by its whole uid; None: neither pool nor archive has it.

    Args:
        channels: of the pool, those that are looked through.
        archive: folder of what left the pool; None: there is none.

    Raises:
        DamagedFileError: its file in the archive is not what was written.
    """
    in_pool = await locate_in_pool(uid, pool, channels)
    if in_pool is not None and in_pool.is_live:
        return in_pool
    waits = await pool.call(ReadDeparted(uid))
    return await asyncio.to_thread(_departed, uid, archive, waits) or in_pool


async def locate_in_pool(uid: str, pool: DataPoolClient, channels: Iterable[str]) -> Located | None:
    """Find a trajectory of a live group, one that goes on or is complete before an aborted one."""
    aborted = None
    for channel in channels:
        page = await pool.read_trajectories(channel, None, 1, trajectory_uid=uid)
        for exported in await asyncio.to_thread(list, page.unpack()):
            found = Located(exported, channel)
            if found.is_live:
                return found
            aborted = found
    return aborted


def _departed(uid: str, archive: Path | None, waits: list[DepartedRows]) -> Located | None:
    """One of the archive, or of the rows that wait for it."""
    if archive is None and not waits:
        return None
    from stepwell.datapool.files.archive.reader import ArchiveReader, waiting

    if archive is not None:
        reader = ArchiveReader(archive)
        if (exported := reader.read(uid)) is not None:
            of = exported.channel, exported.trajectory.attempt
            rows = [row for row in reader.find(uid) if (row["channel"], row["attempt"]) == of]
            if rows:  # else it was deleted in this moment
                return Located(exported, None, rows[0] | {"feedback": reader.feedback(uid)})
    for exported, row in waiting(waits):
        if row["uid"] == uid:
            return Located(exported, None, row | {"feedback": []})
    return None


async def why_closed(uid: str, pool: DataPoolClient, channels: Iterable[str]) -> str | None:
    """Return why a trajectory is closed of which nothing is kept; None: the pool remembers none."""
    for channel in channels:
        with suppress(UnknownTrajectoryError):
            return await pool.why_closed(uid, channel)
    return None
