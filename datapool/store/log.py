"""This module writes transactions at the end of a log, so that what was acknowledged is in it::

    open: lock, read, compare with `pool.acked`, cut what is torn ──► Log
    commit(batch) ──► end of the newest segment ──► `pool.acked` ──► index: from now on it counts

Owns the folder's files. Does not own when a transaction is written (`journal.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from stepwell.datapool.errors import JournalError, JournalFencedError
from stepwell.datapool.process import boot_id
from stepwell.datapool.store.cleaning import Cleaner
from stepwell.datapool.store.folder import (
    ACKED_NAME,
    SYNCED,
    LastCommit,
    fsync,
    lock,
    make_folder,
    private,
    read_last_commit,
    take_acked,
    take_folder,
    write_last_commit,
)
from stepwell.datapool.store.reading import LogReader
from stepwell.datapool.store.segments import (
    Block,
    Record,
    encode_block,
    row_at,
    segment_path,
    segments_in,
)

logger = logging.getLogger(__name__)

Durability: TypeAlias = Literal["process", "power"]

SEGMENT_BYTES = 16 << 20
"""A segment that is longer gets a successor."""


@dataclass(slots=True)
class Batch:
    """The changes of a transaction."""

    rows: dict[int, Record] = field(default_factory=dict)
    """Records."""
    again: set[int] = field(default_factory=set)
    """Rows among these that may be stored already, with other content."""
    deletes: set[int] = field(default_factory=set)
    states: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.deletes or self.states)

    def extend(self, newer: Batch) -> None:
        """Adds what was buffered after this batch."""
        self.rows.update(newer.rows)
        self.again |= newer.again
        for row in newer.deletes:
            self.delete(row)
        self.states.update(newer.states)

    def put(self, row: int, record: Record) -> None:
        self.rows[row] = record
        self.again.add(row)

    def delete(self, row: int) -> None:
        if self.rows.pop(row, None) is None or row in self.again:
            self.deletes.add(row)


class Log(LogReader):
    """The log in `folder`; made if there is none. Arguments and errors as of `Journal`."""

    def __init__(
        self, folder: Path, durability: Durability, lock_timeout_s: float, take_over: int | None
    ) -> None:
        self.folder = folder
        self._power = durability == "power"
        self._doomed: list[int] = []
        """Segments that count no longer, and are there."""
        made = make_folder(folder)
        self._lock, self._is_alone = take_folder(folder, lock_timeout_s, take_over)
        with contextlib.ExitStack() as undo, self._telling():
            undo.callback(os.close, self._lock)
            self._acknowledged()
            # The former process writes nothing from here on.
            self._acked = take_acked(folder, lock_timeout_s)
            undo.callback(os.close, self._acked)
            known = self._acknowledged()
            found = self._load(known)
            self.index, self.states, self._newest = found.index, found.states, found.newest
            self.last = LastCommit(
                journal=known.journal,
                opening=known.opening + 1,
                pid=os.getpid(),
                sequence=found.sequence,
                next_row=max(found.next_row, known.next_row),
                rows=found.index.n_rows,
                checksum=found.last.checksum,
                boot=SYNCED if self._power else boot_id() or SYNCED,
            )
            for number in segments_in(folder):
                if number > self._newest:  # it was begun, and not finished
                    segment_path(folder, number).unlink()
                elif number not in self.index.segments:
                    self._doomed.append(number)
            self._unsynced = list(self.index.segments)
            # Until the first transaction there is no file to be written to.
            newest = segment_path(folder, self._newest)
            self._file = private(newest if self._newest else folder / ACKED_NAME, os.O_RDWR)
            undo.callback(os.close, self._file)
            if self._newest:
                os.ftruncate(self._file, self.index.segments[self._newest].end)
            os.pwrite(self._acked, self.last.pack(), 0)
            if self._power:
                for path in (folder / ACKED_NAME, folder, *made):
                    fsync(path)
            fcntl.flock(self._acked, fcntl.LOCK_UN)
            undo.pop_all()
        self.cleaner = Cleaner(self.index)

    # --- writing ---

    def commit(self, batch: Batch, next_row: int) -> int:
        """Writes a transaction and records it, or leaves the files as they were; how many stored
        rows it deleted.

        Raises:
            JournalFencedError: a successor has taken the journal over.
            OSError: it cannot be written.
        """
        index, last, newest = self.index, self.last, self._newest
        deleted: dict[int, list[int]] = {}
        n_bytes = sum(sum(map(len, record)) for record in batch.rows.values())
        for row in sorted(batch.deletes):
            if (place := index.find(row)) is not None:
                deleted.setdefault(place[0], []).append(row)
                n_bytes += place[2]
        n_deleted = sum(map(len, deleted.values()))
        records, gone, segments = batch.rows, set[int](), None
        n_again = sum(row in batch.rows and index.find(row) is not None for row in batch.again)
        stays = batch.deletes | batch.again if batch.again else batch.deletes
        moving = self.cleaner.next_rows(newest, stays, n_bytes or bool(batch))
        if moving:
            records = records | {row: (moved,) for row, moved in self._moved(moving).items()}
        begins = not newest or index.segments[newest].end >= SEGMENT_BYTES
        if begins or (moving is None and self.cleaner.left()):
            begins = True
            gone = {s.number for s in index.segments.values() if not s.live_rows}
            others = [s for s in index.segments.values() if s.number not in gone]
            segments = {s.number: (s.end, s.checksum) for s in others}
            for number, dead in index.deletions_in(gone).items():
                deleted[number] = sorted([*deleted.get(number, ()), *dead])
        rows = sorted(records)
        block = Block(
            sequence=last.sequence + 1,
            before=last.checksum,
            first_row=last.next_row,
            next_row=next_row,
            rows=rows,
            sizes=[sum(map(len, records[row])) for row in rows],
            deleted=deleted,
            states=self.states | batch.states if begins else batch.states,
            segments=segments,
        )
        at = 0 if begins else index.segments[newest].end
        data, placed = encode_block(last.journal, block, [records[row] for row in rows], at)
        acked = last._replace(
            sequence=block.sequence,
            next_row=next_row,
            rows=index.n_rows + len(batch.rows) - n_again - n_deleted,
            checksum=placed.checksum,
        )
        self._write(newest + begins, at, data, acked)
        self.last, self._newest = acked, newest + begins
        self.states |= batch.states
        index.apply(self._newest, placed)
        self._doomed += gone
        if begins:
            self._unsynced.append(self._newest)
        if not self._is_alone:
            # A former process was fenced. Once it has ended, no third one shall come in.
            self._is_alone = lock(self._lock)
        return n_deleted

    def _write(self, number: int, at: int, data: bytes, acked: LastCommit) -> None:
        path = segment_path(self.folder, number)
        with self._owning():
            file = self._file if at else private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                view, to = memoryview(data), at
                while view:
                    n = os.pwrite(file, view, to)
                    view, to = view[n:], to + n
                if self._power:
                    os.fdatasync(file) if at else os.fsync(file)
                    if not at:
                        fsync(self.folder)
                os.pwrite(self._acked, acked.pack(), 0)
            except BaseException:  # whatever it was, nothing of it shall be found
                with contextlib.suppress(OSError):  # then the next transaction writes over it
                    os.ftruncate(file, at)
                if not at:
                    os.close(file)
                    path.unlink()
                raise
            if not at:
                os.close(self._file)
                self._file = file

    def erase(self) -> None:
        """The next transactions take out all dead rows that there are now."""
        self.cleaner.erase(self._newest)

    @property
    def has_dead(self) -> bool:
        """True if a row is on disk that does not count."""
        return any(len(s.ids) > s.live_rows for s in self.index.segments.values())

    @property
    def is_cleaning(self) -> bool:
        """True if further transactions are needed to erase dead rows, or because too much is
        dead."""
        return bool(self.cleaner.left())

    def removal(self) -> Callable[[], None] | None:
        """Return the function that removes the segments that count no longer, and waits for the
        disk; None: there are none."""
        if not self._doomed:
            return None
        doomed, self._doomed = self._doomed, []
        unsynced = [] if self._power else [n for n in self._unsynced if n in self.index.segments]
        self._unsynced = [self._newest]
        return partial(self._remove, doomed, unsynced)

    def close(self) -> None:
        # On a full disk the record only stays as it was; fenced, it is the successor's.
        with contextlib.suppress(OSError, JournalError), self._owning():
            if (remove := self.removal()) is not None:
                remove()
            for number in self.index.segments:
                fsync(segment_path(self.folder, number))
            fsync(self.folder)
            os.pwrite(self._acked, self.last._replace(boot=SYNCED).pack(), 0)
            os.fsync(self._acked)
        for file in (self._file, self._acked, self._lock):
            os.close(file)

    def _moved(self, rows: Iterable[int]) -> dict[int, bytes]:
        """Rows to be written anew. Without them, if their segment cannot be read."""
        try:
            records = dict(self._records(rows))
            for row, record in records.items():
                row_at(record, row, 0)
        except (OSError, ValueError) as e:
            self.cleaner.again(failed=True)
            logger.error(
                "%s: what is dead in a segment stays on disk, as the rest of it cannot be read "
                "(%s). Stop the pool and run `stepwell data salvage %s`",
                self.folder,
                e,
                self.folder,
            )
            return {}
        return records

    # --- inside ---

    @contextlib.contextmanager
    def _owning(self) -> Iterator[None]:
        """No other process writes meanwhile, and none has taken the journal over."""
        fcntl.flock(self._acked, fcntl.LOCK_EX)
        try:
            if not self.last.owns(self._acked):
                raise JournalFencedError(
                    f"{self.folder}: another process has taken this journal over, after this one "
                    "was declared dead; this one can write nothing more, end it"
                )
            yield
        finally:
            fcntl.flock(self._acked, fcntl.LOCK_UN)

    def _acknowledged(self) -> LastCommit:
        """Return the content of `pool.acked`; it is made if there is no journal yet."""
        what = "what was acknowledged, so that lost transactions could not be told"
        try:
            acked = read_last_commit(self.folder)
        except ValueError as e:
            raise ValueError(f"{e}: it says {what}") from e
        if acked is not None:
            return acked
        if segments_in(self.folder):
            raise ValueError(f"{ACKED_NAME} is missing, which says {what}")
        acked = LastCommit(uuid.uuid4().bytes, opening=0)
        write_last_commit(self.folder, acked)
        return acked

    def _remove(self, doomed: Iterable[int], unsynced: Iterable[int]) -> None:
        """Remove these segments once it is on disk that they count no longer, and all that was
        moved out of them."""
        with contextlib.suppress(OSError, JournalError):  # the next opening does it, if not this
            for number in unsynced:
                fsync(segment_path(self.folder, number))
            for number in doomed:
                segment_path(self.folder, number).unlink(missing_ok=True)
