"""This module deletes trajectories, all with a tag, or all of a user, where no pool runs: from the
journal of a stopped pool, and from exported files.

    delete_from_journals   journal ──replay──► DataPool.delete ──► journal
    delete_from_export     rows ──those that stay──► a new file in its place

A running pool does it itself (`DataPoolClient.delete`). Nobody consumes from a stopped one: leases
on what is deleted end, their other groups are ready again. What is deleted from a journal goes with
its group, which is trained as a whole; from a file, only the rows of the trajectory go.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import ExportError, NoJournalError
from stepwell.datapool.files.columns import MALFORMED, Row, loads, malformed
from stepwell.datapool.files.export import (
    PICTURES_END,
    pictures_of,
    read_rows,
    remove_unnamed,
    write_rows,
)
from stepwell.datapool.ops import Delete, Deleted, Nack
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.store.reading import states_of
from stepwell.datapool.store.replay import UNKNOWN, restore
from stepwell.datapool.store.salvage import journals_in
from stepwell.datapool.types import user_of

MEMORY_BYTES = 256 << 20
"""Bytes of payloads kept in memory while a journal is replayed."""


def delete_from_journals(path: Path, *asked: Delete) -> Deleted:
    """Delete from the stopped pool in `path`: a journal's folder, that of several shards, or a
    run's. When it returns, the files have no byte of what is deleted.

    Raises:
        JournalLockedError: the pool is running.
        JournalError: there is no journal, it is damaged, or it cannot be written.
    """
    found = Deleted()
    for folder in journals_in(path):
        journal = Journal(folder, "process")
        try:
            pool = DataPool(UNKNOWN.model_copy(update={"memory_limit_bytes": MEMORY_BYTES}))
            pool.pictures.store = PictureFolder(folder / PICTURES, power=False)
            restore(pool, journal)
            for each in asked:
                found += _delete(pool, each)
            pool.write_counts()
            journal.flush()
            pool.pictures.find_orphans(-math.inf)  # nobody is about to send their steps
            pool.pictures.expire(0.0)
            pool.pictures.sweep(None)
        finally:
            journal.close()  # which erases it
    return found


def _delete(pool: DataPool, asked: Delete) -> Deleted:
    now = max(channel.now for channel in pool.channels.values())
    found = Deleted(more=True)
    while found.more:
        found += pool.apply(asked, now)
    for lease in pool.leases.active():
        groups = pool.channels[lease.channel].records.groups
        if any(groups[uid].readiness.drop_when_returned is not None for uid in lease.prompt_uids):
            pool.apply(Nack(lease.lease_id, "deleted"), now)
    return Deleted(found.trajectories + found.leased)


def pool_time(path: Path) -> float:
    """Time by the clock of the pool in `path`, running or stopped, whose folders are as in
    `delete_from_journals`: that of this machine where there is none. A pool does not follow a wall
    clock that was set, nor does it count the time in which its machine was suspended."""
    try:
        found = [states_of(folder).get(CLOCK) for folder in journals_in(path)]
    except NoJournalError:
        found = []
    return max((Clock.resume(state, 0.0).now() for state in found), default=time.time())


def delete_from_export(path: Path, asked: Delete) -> list[str]:
    """Take trajectories out of an exported file; their uids. A file without them stays as it is.

    Raises:
        ExportError: no file of ours, a damaged one, or one that names its pictures by the name that
            it had before.
        OSError: it cannot be read or written.
    """

    def is_meant(row: Row) -> bool:
        if asked.trajectory_uid is not None:
            return bool(row["trajectory_uid"] == asked.trajectory_uid)
        if asked.user is not None:
            metadata = (loads(row[name]) or {} for name in ("metadata", "group_metadata"))
            return user_of(*metadata) == asked.user
        marks = (loads(row[name]) or {} for name in ("marks", "group_marks"))
        return any(asked.tag in each.get("tags", ()) for each in marks)

    gone: dict[str, None] = {}
    folders: set[str] = set()
    for where, row in read_rows(path):
        try:
            meant = is_meant(row)
        except MALFORMED as e:
            raise malformed(where, e) from e
        if meant:
            gone[row["trajectory_uid"]] = None
            paths = (Path(image["path"]) for image in row["images"] or () if not image["bytes"])
            folders |= {str(picture.parent) for picture in paths}
    if others := folders - {pictures_of(path).name}:
        (folder, *_) = sorted(others)
        name = folder.removesuffix(PICTURES_END)
        raise ExportError(
            f"{path} was renamed: its pictures are in {folder}; rename it to {name}, and a folder "
            f"{pictures_of(path).name} to {folder}, then delete again"
        )
    if gone:
        kept = (row for _, row in read_rows(path) if not is_meant(row))
        write_rows(path, kept, overwrite=True)
        images = (image for _, row in read_rows(path) for image in row["images"] or ())
        remove_unnamed(path, {Path(image["path"]).name for image in images})
    return list(gone)
