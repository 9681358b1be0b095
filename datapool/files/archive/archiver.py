"""The archiver of a shard: a process that moves what left the pool into files, in a thread at idle
priority; in one that is not, for so long as too much waits.

    ListDeparted ──► places ──► rows, read from the journal's files ──► conversations
         ▲                                                                  │
         └── ReleaseDeparted: the pool deletes the rows ◄── a file, synced ◄┘──► catalogue

The pool's process starts it and is its parent: it ends when that does. A crash at any point writes
the same rows again, under the same name or that of a longer range. Small files are merged; the
oldest go beyond the bounds. It never takes the last space of the disk, which the journal needs:
then it says so, and the pool lets what waits go unarchived. Training waits for nothing of this.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
from xxhash import xxh3_128_hexdigest

from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.errors import DamagedFileError, DataPoolError, ExportError
from stepwell.datapool.files.archive import parquet
from stepwell.datapool.files.archive.catalogue import Catalogue, is_outdated
from stepwell.datapool.files.archive.conversations import Conversation, Feedback, conversations
from stepwell.datapool.files.archive.folder import (
    FEEDBACK,
    TRAJECTORIES,
    ArchiveFolder,
    FileName,
)
from stepwell.datapool.files.archive.launch import Settings
from stepwell.datapool.files.tombstones import Deletions, Kind, Tombstone, tombstone
from stepwell.datapool.heap import growing_heap, settle_heap
from stepwell.datapool.log_files import log_to_file
from stepwell.datapool.ops import ReleaseDeparted
from stepwell.datapool.questions import Departed, DepartedPage, ListDeparted
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.shard import Caller, RemoteShard
from stepwell.datapool.remote.stopped import StoppedShard
from stepwell.datapool.remote.wire import PoolAddress
from stepwell.datapool.selection import Marks
from stepwell.datapool.store.picture_folder import PICTURES as STORE
from stepwell.datapool.store.reading import rows_at_places, states_of
from stepwell.datapool.store.segments import Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_S: Final = 2.0
"""Seconds between two looks at what waits, if nothing did."""
REST_S: Final = 4.0
"""Seconds after a file, if no whole further one waits: larger files take less for each row."""
INDEX_S: Final = 1800.0
"""Seconds after which words of files that were removed go from the index's older parts, too: it is
written anew as a whole."""
BATCH_BYTES: Final = 16 << 20
"""Bytes of rows in one file, about."""
TURN_BYTES: Final = 1 << 20
"""Bytes of rows that the pool lists, or lets go, in one call, about: nobody else is answered
meanwhile."""
MERGED: Final = 16
"""Neighbouring small files that become one."""
SMALL_BYTES: Final = 32 << 20
LATE_NICE: Final = 5
"""Niceness beside the pool's of the thread that archives once too much waits: a quarter of a core
that somebody else wants."""
KEYS: Final = ("trajectory_uid", "user", "tags", "opened_at")
"""Columns by which trajectories are deleted; feedback has the first alone."""
_NAMED: Final[dict[str, str]] = {
    "trajectory": "uid = ?",
    "user": "user = ?",
    "tag": "id IN (SELECT id FROM tags WHERE tag = ?)",
}
"""Conditions of what a deletion names in the catalogue."""
UNREADABLE: Final = (FileNotFoundError, ValueError, LookupError, msgspec.MsgspecError)
"""Errors of rows that are not what this release wrote, or are gone."""
TRIES: Final = 5
"""Tries to read rows that the journal moves meanwhile."""


class NoSpaceError(Exception):
    """The disk has no space for the archive."""


class UnfitError(Exception):
    """A file of the archive cannot hold what left, as an attempt beyond 2**31."""


class Archive:
    """The files and the catalogue of one shard, for a writer that holds its lock."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = ArchiveFolder(Path(settings.folder))
        self.folder.make()
        self.catalogue = Catalogue(self.folder.catalogue(settings.shard), writes=True)

    def close(self) -> None:
        self.catalogue.close()

    # -- writing -----------------------------------------------------------------------------

    def archived_through(self) -> int:
        """The last row of this journal that is in a file; 0: none is. A file of feedback is written
        before that of the trajectories, so that it says nothing of them."""
        return self._through().get(self.settings.journal_id, 0)

    def _through(self) -> dict[str, int]:
        """The last archived row of each journal."""
        through: dict[str, int] = {}
        for name in self.folder.names(TRAJECTORIES, self.settings.shard):
            through[name.journal] = max(name.last, through.get(name.journal, 0))
        return through

    def write(self, first: int, last: int, found: Sequence[Conversation | Feedback]) -> None:
        """Write what left with rows first … last to files, durably, and into the catalogue.

        Raises:
            NoSpaceError: the disk is nearly full; nothing was written.
            UnfitError: no file can hold it; nothing was written.
            OSError: a file cannot be written.
        """
        self._remove_unfinished()
        name = FileName(self.settings.shard, self.settings.journal_id, first, last)
        said = [each for each in found if isinstance(each, Conversation)]
        self._name_users(said)
        late = [each for each in found if isinstance(each, Feedback)]
        try:
            tables = {TRAJECTORIES: parquet.trajectory_table(said)}
            if late:
                tables[FEEDBACK] = parquet.feedback_table(late)
        except (ExportError, pa.ArrowException, TypeError, ValueError, OverflowError) as e:
            raise UnfitError(str(e)) from e
        deletions = self.folder.deletions()
        written = {kind: _kept(table, deletions) for kind, table in tables.items()}
        files = {kind: parquet.file_bytes(table) for kind, table in written.items()}
        pictures = parquet.all_picture_keys(written[TRAJECTORIES])
        source = Path(self.settings.journal) / STORE
        n_bytes = sum(map(len, files.values())) + sum(_size(source / key) for key in pictures)
        if not self.folder.has_space(n_bytes):
            raise NoSpaceError(str(self.folder.path))
        if missing := self.folder.add_pictures(name, source, pictures):
            logger.error(
                "archive: %d pictures of %s are not in %s", len(missing), name.text, source
            )
        for kind in (FEEDBACK, TRAJECTORIES):  # the second one says that all is there
            if kind in files:
                self.folder.write(kind, name, files[kind])
                self._add(kind, name, written[kind], files[kind])

    def _name_users(self, said: Sequence[Conversation]) -> None:
        """Give steps that came after their group had left the user and the tags of their
        trajectory, which was archived before: they are deleted by these."""
        written = {(each.channel, each.trajectory_uid): each for each in said if not each.part}
        for late in said:
            if not late.part or late.metadata or late.marks.tags:
                continue
            of = late.channel, late.trajectory_uid
            if (whole := written.get(of)) is not None:
                late.metadata, late.marks = whole.metadata, whole.marks
                late.group_metadata, late.group_marks = whole.group_metadata, whole.group_marks
                continue
            sql = "SELECT user, tags, data_source FROM trajectories WHERE channel = ? AND uid = ?"
            for row in self.catalogue.query(f"{sql} ORDER BY part LIMIT 1", of):
                known = {"user": row["user"], "data_source": row["data_source"]}
                late.metadata = {name: value for name, value in known.items() if value is not None}
                late.marks = Marks(tags=frozenset(json.loads(row["tags"])))

    def _add(self, kind: str, name: FileName, table: Any, content: bytes) -> None:
        digest, size = xxh3_128_hexdigest(content), len(content)
        if kind == FEEDBACK:
            self.catalogue.add_feedback(name.text, table, digest, size)
        else:
            groups = parquet.row_groups(self.folder.file(kind, name))
            self.catalogue.add(name.text, table, groups, digest, size)

    # -- looking after -----------------------------------------------------------------------

    def reconcile(self) -> list[str]:
        """Make the catalogue that of the files that are there; what is damaged, a line each. A file
        that was written anew by one who died before the catalogue knew has another size. Files of
        which a longer one was made by one who died before they were removed go now."""
        self.folder.remove_drafts(self.settings.shard)
        self._remove_unfinished()
        told: list[str] = []
        deletions = self.folder.deletions()
        known = self.catalogue.files()
        there: set[tuple[str, str]] = set()
        for kind in (TRAJECTORIES, FEEDBACK):
            ends: dict[str, int] = {}
            names = self.folder.names(kind, self.settings.shard)
            for name in sorted(names, key=lambda n: (n.journal, n.first, -n.last)):
                path, row = self.folder.file(kind, name), known.get((kind, name.text))
                if name.last <= ends.get(name.journal, 0):
                    path.unlink()
                    continue
                there.add((kind, name.text))
                if row is not None and row["n_bytes"] == path.stat().st_size:
                    ends[name.journal] = name.last
                    continue
                try:
                    table = parquet.read_table(path)
                    if gone := len(table) - len(kept := _kept(table, deletions)):
                        logger.warning("archive: %s still had %d deleted rows", path, gone)
                        self._put(kind, name, kept)
                    else:
                        if kind == TRAJECTORIES:
                            self.folder.keep_pictures(name, parquet.all_picture_keys(table))
                        self._add(kind, name, table, path.read_bytes())
                    ends[name.journal] = name.last
                except (DamagedFileError, OSError) as e:
                    told.append(str(e))
        for removed in known.keys() - there:
            self.catalogue.forget_file(*removed)
        for text in self.folder.names_of_pictures(self.settings.shard):
            if (TRAJECTORIES, text) not in there:  # of a file that was not written, or was removed
                self.folder.keep_pictures(text, ())
        return told

    def _remove_unfinished(self) -> None:
        """Remove feedback whose trajectories were not written with it, by one who died or a full
        disk: the pool still holds all of it, and what is deleted there must not stay here."""
        through = self._through()
        for name in self.folder.names(FEEDBACK, self.settings.shard):
            if name.last > through.get(name.journal, 0):
                self.folder.file(FEEDBACK, name).unlink()
                self.catalogue.forget_file(FEEDBACK, name.text)

    def _put(self, kind: str, name: FileName, table: Any) -> None:
        """Write a file in place of what it was, with fewer rows."""
        content = parquet.file_bytes(table)
        self.folder.write(kind, name, content)
        if kind == TRAJECTORIES:  # before the catalogue says that the file is as it should be
            self.folder.keep_pictures(name, parquet.all_picture_keys(table))
        self._add(kind, name, table, content)

    def merge(self) -> None:
        """Make one file of neighbouring small ones."""
        names = [
            name
            for name in self.folder.names(TRAJECTORIES, self.settings.shard)
            if name.journal == self.settings.journal_id
        ]
        run: list[FileName] = []
        n_bytes = 0
        for name in reversed(names):
            size = self.folder.file(TRAJECTORIES, name).stat().st_size
            if size > SMALL_BYTES // 4 or n_bytes + size > SMALL_BYTES:
                break
            run.append(name)
            n_bytes += size
        if len(run) >= MERGED:
            self._merge(run[::-1])

    def _merge(self, run: Sequence[FileName]) -> None:
        merged = FileName(run[0].shard, run[0].journal, run[0].first, run[-1].last)
        parts: dict[str, list[Path]] = {}
        tables: dict[str, Any] = {}
        for kind in (FEEDBACK, TRAJECTORIES):
            # By rows: a merge that was cut short left the feedback of several of these in one file.
            names = self.folder.names(kind, merged.shard)
            within = [name for name in names if merged.covers(name)]
            if within and within != [merged]:
                parts[kind] = [self.folder.file(kind, name) for name in within]
                # What an earlier merge has read is in its file, too, until it is removed.
                longest = [n for n in within if not any(o != n and o.covers(n) for o in within)]
                read = [parquet.read_table(self.folder.file(kind, name)) for name in longest]
                tables[kind] = pa.concat_tables(read).combine_chunks()
        contents = {kind: parquet.file_bytes(table) for kind, table in tables.items()}
        if not self.folder.has_space(sum(map(len, contents.values()))):
            return
        for kind, content in contents.items():
            if kind == TRAJECTORIES:
                for name in run:
                    source = self.folder.pictures(name)
                    keys = os.listdir(source) if source.is_dir() else ()
                    self.folder.add_pictures(merged, source, keys)
            self.folder.write(kind, merged, content)
            self._add(kind, merged, tables[kind], content)
            for path in parts[kind]:
                if path.name != merged.text:
                    self.catalogue.replace_file(kind, path.name, merged.text)
                    path.unlink()
                    if kind == TRAJECTORIES:
                        self.folder.keep_pictures(path.name, ())

    def trim(self, now: float) -> list[str]:
        """Remove the files that are too old, and the oldest of too many bytes; their names."""
        gone: list[str] = []
        newest: dict[str, float] = {}  # of both files of a name: one that has no row goes with it
        for row in (files := self.catalogue.files()).values():
            newest[row["name"]] = max(row["newest"], newest.get(row["name"], 0.0))
        late = [n for n in self.folder.names(FEEDBACK, self.settings.shard) if n.text in newest]
        for name in self.folder.names(TRAJECTORIES, self.settings.shard):
            if not newest.get(name.text):  # its feedback is in a longer file: a merge was cut short
                covering = (newest[each.text] for each in late if each.covers(name))
                newest[name.text] = max(covering, default=0.0)
        known = sorted(files.values(), key=lambda row: (newest[row["name"]], row["kind"]))
        beside = {
            row["name"]: self.folder.picture_bytes(row["name"])
            for row in known
            if row["kind"] == TRAJECTORIES
        }
        total = sum(row["n_bytes"] for row in known) + sum(beside.values())
        for row in known[:-1]:  # the newest stays: its name says what is archived
            is_young = newest[row["name"]] > now - self.settings.keep_s
            if is_young and total + self.catalogue.used_bytes() <= self.settings.max_bytes:
                break
            total -= row["n_bytes"]
            self.folder.file(row["kind"], row["name"]).unlink(missing_ok=True)
            if row["kind"] == TRAJECTORIES:
                total -= beside[row["name"]]
                self.folder.keep_pictures(row["name"], ())
            self.catalogue.forget_file(row["kind"], row["name"])
            gone.append(row["name"])
        return gone

    def siblings(self, kind: Kind, values: Sequence[str]) -> list[str]:
        """Other trajectories of the groups of those that a deletion means, by uid."""
        self.reconcile()
        deletions = self.folder.deletions()
        meant = f"SELECT channel, prompt_uid FROM trajectories WHERE {_NAMED[kind]}"
        sql = f"SELECT uid FROM trajectories WHERE (channel, prompt_uid) IN ({meant})"
        found = {row["uid"] for value in values for row in self.catalogue.query(sql, (value,))}
        return sorted(found - deletions.uids)

    def hide(self, tombstones: Iterable[Tombstone]) -> None:
        """Take what these name out of the catalogue, at once: the files take longer (`erase`)."""
        found: set[str] = set()
        for kind, value, at in tombstones:
            sql = f"SELECT uid, time FROM trajectories WHERE {_NAMED[kind]}"
            rows = self.catalogue.query(sql, (value,))
            found |= {r["uid"] for r in rows if kind == "trajectory" or (r["time"] or 0.0) <= at}
        self.catalogue.remove(found)

    def erase(self) -> list[str]:
        """Take what tombstones name out of files and catalogue; the uids of trajectories.

        Raises:
            DamagedFileError: a file cannot be read, so that it could still hold what is deleted.
            DataPoolError: somebody reads the catalogue all the time.
        """
        self.reconcile()
        deletions = self.folder.deletions()
        gone: dict[str, None] = {}
        uids: dict[FileName, list[str]] = {}
        left, emptied = set[str](), dict[str, None]()
        for name in self.folder.names(TRAJECTORIES, self.settings.shard):
            path = self.folder.file(TRAJECTORIES, name)
            rows = parquet.read_table(path, [*KEYS, "prompt_uid"]).to_pylist()
            uids[name] = [row["trajectory_uid"] for row in rows]
            for row in rows:
                if deletions.meets(row):
                    gone[row["trajectory_uid"]] = emptied[row["prompt_uid"]] = None
                else:
                    left.add(row["prompt_uid"])
        named = deletions.uids
        # Before the rows that say whose they were: their uids lead somewhere, and after a crash
        # what else is known of them still goes.
        self.folder.add_tombstones(
            [
                *(tombstone("trajectory", uid) for uid in gone if uid not in named),
                *(tombstone("group", uid) for uid in emptied if uid not in left),
            ]
        )
        named |= gone.keys()
        # Also steps of these that came late, whatever is known of them.
        for name, of in uids.items():
            if found := [i for i, uid in enumerate(of) if uid in named]:
                self._rewrite(TRAJECTORIES, name, found)
        for name in self.folder.names(FEEDBACK, self.settings.shard):
            late = parquet.read_table(self.folder.file(FEEDBACK, name), ["trajectory_uid"])
            if found := [i for i, uid in enumerate(late[0].to_pylist()) if uid in named]:
                self._rewrite(FEEDBACK, name, found)
        self.catalogue.forget(named)
        return list(gone)

    def _rewrite(self, kind: str, name: FileName, gone: Sequence[int]) -> None:
        path = self.folder.file(kind, name)
        self._put(kind, name, parquet.without(parquet.read_table(path), gone))


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _kept(table: Any, deletions: Deletions) -> Any:
    """The rows that are not deleted."""
    if not deletions or not len(table):
        return table
    names = [name for name in KEYS if name in table.column_names]
    gone = [i for i, row in enumerate(table.select(names).to_pylist()) if deletions.meets(row)]
    return parquet.without(table, gone) if gone else table


async def archive_stopped(pool: DataPoolClient, config: PoolConfig) -> None:
    """Archive what waited when a pool ended, of which only the journals are left
    (`stopped_pool`). What they hold stays; a later start of the pool deletes it. A catalogue of
    another release is made anew.

    Args:
        config: what the pool ran with.
    """
    for k, shard in enumerate(pool.shards):
        if not isinstance(shard, StoppedShard):
            continue
        if (settings := Settings.of(config, shard.folder, shard.journal_id, k)) is None:
            return
        path = ArchiveFolder(Path(settings.folder)).catalogue(k)
        if not shard.backlog["waiting"] and not is_outdated(path):
            continue
        archive = await asyncio.to_thread(open_sound, settings)
        try:
            while await archive_waiting(archive, shard):
                pass
        finally:
            archive.close()


# -- the process -------------------------------------------------------------------------------


class _RunningShard(RemoteShard):
    """The way to the pool that started this process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._address = PoolAddress("here", 1, settings.unix, None, settings.secret)

    async def find(self) -> tuple[PoolAddress, str]:
        return self._address, "here"


class Run(Protocol):
    """A thread that works."""

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`, done there."""


async def _here(work: Callable[..., T], *args: Any) -> T:
    return work(*args)


def _thread(initializer: Callable[..., Any], *arguments: Any) -> Run:
    """A thread of its own, which begins with this call."""
    executor = ThreadPoolExecutor(1, initializer=initializer, initargs=arguments)

    async def run(work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)

    return run


async def archive_waiting(
    archive: Archive, pool: Caller, run: Run = _here, max_bytes: int = BATCH_BYTES
) -> int:
    """Archive the first of what waits; how many groups and late rows that were. One whose rows
    nobody can read, or no file can hold, leaves unarchived, so that what is behind it does not."""
    waiting = await _waiting(pool, max_bytes)
    if not waiting:
        return 0
    folder, through = Path(archive.settings.journal), archive.archived_through()
    new = [each for each in waiting if each.row > through]
    if new:
        try:
            with growing_heap():
                found = await _read(folder, new, pool, run)
        except UNREADABLE as e:
            return await _leave_out(archive, pool, run, new, f"its rows cannot be read: {e}")
        try:
            with archive.folder.locked(archive.settings.shard), growing_heap():
                await run(archive.write, new[0].row, new[-1].row, found)
        except UnfitError as e:
            return await _leave_out(archive, pool, run, new, f"no file can hold it: {e}")
        except NoSpaceError:
            why = f"the disk of {archive.folder.path} is nearly full; free space on it"
            await pool.call(ReleaseDeparted(waiting[-1].row, why))
            return len(waiting)
    n_bytes = 0
    for each in waiting:
        n_bytes += _bytes(each)
        if n_bytes >= TURN_BYTES or each is waiting[-1]:
            await pool.call(ReleaseDeparted(each.row))
            n_bytes = 0
    return len(waiting)


async def _leave_out(
    archive: Archive, pool: Caller, run: Run, new: Sequence[Departed], why: str
) -> int:
    """Let a group leave unarchived; of several, find out which one it is first."""
    if len(new) > 1:
        return await archive_waiting(archive, pool, run, max_bytes=1)
    await pool.call(ReleaseDeparted(new[0].row, why))
    return 1


async def _waiting(pool: Caller, max_bytes: int) -> list[Departed]:
    """The first of what waits, of so many bytes, about; at least one, if any waits."""
    found: list[Departed] = []
    n_bytes, after = 0, 0
    while n_bytes < max_bytes:
        page: DepartedPage = await pool.call(ListDeparted(after, min(max_bytes, TURN_BYTES)))
        if not page.items:
            break
        found += page.items
        n_bytes += sum(map(_bytes, page.items))
        after = found[-1].row
    return found


def _bytes(departed: Departed) -> int:
    """Bytes of its rows in the journal."""
    return sum(size for _, _, _, size in departed.places)


async def _read(
    folder: Path, groups: Sequence[Departed], pool: Caller, run: Run
) -> list[Conversation | Feedback]:
    """Read the rows of groups; those that the journal has moved meanwhile are looked for again.

    Raises:
        UNREADABLE: they are damaged, or another release wrote them.
    """
    try:
        rows = await run(rows_at_places, folder, [at for group in groups for at in group.places])
    except (OSError, ValueError):  # which ones are not where they were
        again = [(group.channel, await _rows(folder, group, pool)) for group in groups]
        return await run(_conversations, [(name, own) for name, own in again if own is not None])
    each = iter(rows)
    by_group = [(group.channel, list(islice(each, len(group.places)))) for group in groups]
    return await run(_conversations, by_group)


def _conversations(groups: Iterable[tuple[str, list[Row]]]) -> list[Conversation | Feedback]:
    return [each for channel, rows in groups for each in conversations(channel, rows)]


async def _rows(folder: Path, group: Departed, pool: Caller) -> list[Row] | None:
    """The rows of a group; None if it was deleted."""
    for tried in range(TRIES):
        try:
            return rows_at_places(folder, group.places)
        except (OSError, ValueError):
            if tried + 1 == TRIES:
                raise
            again: DepartedPage = await pool.call(ListDeparted(group.row - 1, 1))
            if not again.items or again.items[0].row != group.row:
                return None
            group = again.items[0]
    return None


def open_sound(settings: Settings, *, is_damaged: bool = False) -> Archive:
    """The archive, its catalogue that of its files. A damaged one is made anew of them.

    Args:
        is_damaged: it is known to be.
    """
    folder = ArchiveFolder(Path(settings.folder))
    folder.make()
    with folder.locked(settings.shard):
        if is_damaged:
            folder.remove_catalogue(settings.shard)
            logger.error("archive: the catalogue of shard %d is made anew", settings.shard)
        archive = None
        try:
            archive = Archive(settings)
            for line in archive.reconcile():
                logger.error("archive: %s", line)
            return archive
        except sqlite3.DatabaseError as e:
            if archive is not None:
                archive.close()
            if is_damaged or isinstance(e, sqlite3.OperationalError):
                raise
            logger.error("archive: the catalogue is damaged (%s)", e)
    return open_sound(settings, is_damaged=True)


async def run(settings: Settings) -> None:
    """Archive what waits until the pool is gone."""
    idle, late = _thread(_be_idle), _thread(os.nice, LATE_NICE)
    archive, pool = await idle(open_sound, settings), _RunningShard(settings)
    # What left says when by the pool's clock, which does not count a machine's suspension.
    clock = Clock.resume(states_of(Path(settings.journal)).get(CLOCK), 0.0)
    words_left_at: float | None = time.monotonic()  # of one that was killed before
    while True:
        began = time.monotonic()
        try:
            backlog: DepartedPage = await pool.call(ListDeparted(max_bytes=0))
            run = late if backlog.n_bytes > settings.patience_bytes else idle
            rest_s = 0.0 if backlog.n_bytes > BATCH_BYTES else REST_S
            if words_left_at is not None and began > words_left_at + INDEX_S:
                with archive.folder.locked(settings.shard):
                    await run(archive.catalogue.forget, ())
                words_left_at = None
            if not await archive_waiting(archive, pool, run):
                rest_s = INTERVAL_S
            with archive.folder.locked(settings.shard):
                for name in await run(archive.trim, clock.now()):  # first: none damaged is merged
                    logger.info("archive: %s is beyond pool.archive's bounds and was removed", name)
                    words_left_at = words_left_at or began
                await run(archive.merge)
        except (DataPoolError, OSError) as e:
            logger.error("archive: %s", e)
            rest_s = INTERVAL_S
        except sqlite3.OperationalError:  # a full disk, or a lock: the next process tries again
            raise
        except sqlite3.DatabaseError as e:
            logger.error("archive: the catalogue is damaged (%s)", e)
            archive.close()
            archive = await idle(partial(open_sound, settings, is_damaged=True))
            rest_s = INTERVAL_S
        await asyncio.sleep(rest_s)


def _be_idle() -> None:
    """Let this thread run when nobody else wants the processor or the disk. It stays so: only root
    may take it back."""
    with suppress(OSError):
        os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    length = int.from_bytes(sys.stdin.buffer.read(4), "little")
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=Settings)
    log_to_file(None if settings.log_file is None else Path(settings.log_file))
    settle_heap()
    # No threads of its own: Arrow would use all cores.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)

    def end_with_the_pool() -> None:
        sys.stdin.buffer.read()
        os._exit(0)  # at any point: what is half done is done again

    threading.Thread(target=end_with_the_pool, daemon=True).start()
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
