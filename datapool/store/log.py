"""This module writes transactions at the end of a log, and holds what is in it against what was
acknowledged, so that nothing that was promised is missed in silence::

    open: lock, read, compare with `pool.acked`, cut what is torn ──► Log
    build(batch) ──► Transaction ──► write ──► apply: from now on it counts

`write` may run in another thread; everything else is the owner's. Owns the folder's files. Does
not own when a transaction is written and who waits for it (`journal.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from zlib import crc32

from stepwell.datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalFencedError,
    JournalFullError,
)
from stepwell.datapool.process import boot_id
from stepwell.datapool.store.cleaning import Cleaner
from stepwell.datapool.store.folder import (
    ACKED_NAME,
    NO_SPACE,
    Acked,
    fsync,
    lock_acked,
    lost_between,
    make_folder,
    private,
    read_acked,
    take_folder,
)
from stepwell.datapool.store.index import Found, read_log
from stepwell.datapool.store.segments import (
    Block,
    Meta,
    Row,
    encode_block,
    encode_segment,
    pack_ids,
    read_rows,
    segment_path,
    segments_in,
)

logger = logging.getLogger(__name__)

Durability: TypeAlias = Literal["process", "power"]

SEGMENT_BYTES = 16 << 20
"""A segment that is longer gets a successor."""

READ_SEGMENTS = 4
"""Kept in memory while rows are read in order: those that were moved are in later ones."""

_T = TypeVar("_T")
Entry: TypeAlias = tuple[bytes, bytes, bytes | None]
"""What comes before it in its record, head, payload."""


@dataclass(slots=True)
class Batch:
    """What a transaction changes."""

    rows: dict[int, Entry] = field(default_factory=dict)
    deletes: set[int] = field(default_factory=set)
    states: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.deletes or self.states)

    def extend(self, newer: Batch) -> None:
        """Adds what was buffered after this batch."""
        for row in newer.deletes:
            if self.rows.pop(row, None) is None:
                self.deletes.add(row)
        self.rows.update(newer.rows)
        self.states.update(newer.states)


@dataclass(slots=True)
class Transaction:
    """A batch as it goes to the disk, and what it changes there."""

    batch: Batch
    data: bytes
    acked: Acked
    """The record of it."""
    block: Block
    meta: Meta
    n_deleted: int

    @property
    def at(self) -> int:
        """Where it begins in its segment; 0: it begins the segment."""
        return self.acked.end - len(self.data)


class Log:
    """The log in `folder`; made if there is none. Arguments and errors as of `Journal`."""

    def __init__(
        self, folder: Path, durability: Durability, lock_timeout_s: float, take_over: int | None
    ) -> None:
        self.folder = folder
        self.is_fenced = False
        self._power = durability == "power"
        self._doomed: list[int] = []
        self._ends = False
        """The next transaction begins a segment."""
        made = make_folder(folder)
        self._lock, self._is_alone = take_folder(folder, lock_timeout_s, take_over)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self.reading(self._acknowledged)
            path = str(folder / ACKED_NAME)
            self._acked = self.reading(partial(private, path, os.O_RDWR))
            undo.callback(os.close, self._acked)
            # The former process writes nothing from here on. It may stand still in the middle.
            lock_acked(self._acked, folder, lock_timeout_s)
            known = self.reading(self._acknowledged)
            found = self.reading(partial(self._load, known))
            self.index, self.states = found.index, found.states
            self.last = Acked(
                journal=known.journal,
                opening=known.opening + 1,
                sequence=found.sequence,
                next_row=max(found.next_row, known.next_row),
                rows=found.index.n_rows,
                segment=found.segment,
                end=found.end,
                crc=found.crc,
                boot=boot_id() or bytes(16),
                power=self._power,
                pid=os.getpid(),
            )
            self._file = self.reading(self._begin)
            undo.callback(os.close, self._file)
            if self._power:
                for path_ in (folder / ACKED_NAME, folder, *made):
                    fsync(path_)
            fcntl.flock(self._acked, fcntl.LOCK_UN)
            undo.pop_all()
        self.cleaner = Cleaner(folder, self.last.journal, self.index)

    # --- writing ---

    def build(self, batch: Batch, next_row: int) -> Transaction:
        """The transaction that follows the last one that was applied."""
        index, last = self.index, self.last
        is_new = not last.segment or last.end >= SEGMENT_BYTES or self._ends
        number = last.segment + is_new
        deleted = {row for row in batch.deletes if index.find(row) is not None}
        records = {row: b"".join((a, b, c or b"")) for row, (a, b, c) in batch.rows.items()}
        n_written = sum(map(len, records.values())) or int(bool(batch))
        moved, dropped = self.cleaner.take(number, deleted, n_written)
        carried = [row for each in dropped for row in index.deletions_in(each)]
        records |= moved
        rows = sorted(records)
        body = b"".join([records[row] for row in rows])
        meta = Meta(
            rows=pack_ids(rows),
            sizes=[len(records[row]) for row in rows],
            deleted=pack_ids(sorted([*deleted, *carried])),
            states=self.states | batch.states if is_new else batch.states,
            dropped=dropped,
            segments=[(s.number, s.end, s.crc) for s in index.segments.values()] if is_new else [],
        )
        block = Block(
            sequence=last.sequence + 1,
            first_row=last.next_row,
            next_row=next_row,
            n_rows=len(records),
            n_records=len(body),
            records_crc=crc32(body),
            before=last.crc,
        )
        header, block = encode_block(last.journal, block, meta)
        begin = encode_segment(last.journal, number) if is_new else b""
        data = b"".join((begin, header, body))
        acked = last._replace(
            sequence=block.sequence,
            next_row=next_row,
            rows=index.n_rows + len(batch.rows) - len(deleted),
            segment=number,
            end=len(data) + (0 if is_new else last.end),
            crc=block.crc,
        )
        block = block._replace(at=acked.end - len(body))
        return Transaction(batch, data, acked, block, meta, len(deleted))

    def write(self, transaction: Transaction) -> None:
        """Writes and records it, or leaves the files as they were.

        Raises:
            JournalFencedError: a successor has taken the journal over.
            OSError: it cannot be written.
        """
        acked, at = transaction.acked, transaction.at
        path = segment_path(self.folder, acked.segment)
        with self._owning():
            file = self._file if at else private(str(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                view, to = memoryview(transaction.data), at
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

    def apply(self, transaction: Transaction) -> None:
        """It was written."""
        acked = self.last = transaction.acked
        self.states |= transaction.batch.states
        self._ends &= bool(transaction.at)
        self.index.apply(acked.segment, transaction.block, transaction.meta)
        for number in transaction.meta.dropped:
            self.index.drop(number, acked.segment)
            self.cleaner.dropped(number)
        self._doomed += transaction.meta.dropped

    def erase(self) -> None:
        """The next transactions take out all dead rows that there are now."""
        self._ends = self.cleaner.erase(self.last.segment)

    @property
    def is_cleaning(self) -> bool:
        """Whether further transactions are needed for that, or because too much is dead."""
        return self.cleaner.is_busy(self.last.segment)

    def dropped(self) -> Callable[[], None] | None:
        """What removes the segments that were dropped; waits for the disk."""
        if not self._doomed:
            return None
        doomed, self._doomed = self._doomed, []
        return partial(self._remove, doomed, self.last.segment)

    def outlive(self) -> None:
        """After a former process was fenced: once it has ended, no third one shall come in."""
        if not self._is_alone:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_alone = True

    def begin_as(self, last: Acked) -> None:
        """This log, in which nothing was written yet, goes on where another one ended."""
        self.last = self.last._replace(journal=last.journal, sequence=last.sequence)
        self.cleaner = Cleaner(self.folder, last.journal, self.index)
        with self._owning(check=False):
            os.pwrite(self._acked, self.last.pack(), 0)

    def close(self) -> None:
        # On a full disk the record only stays as it was; fenced, it is the successor's.
        with contextlib.suppress(OSError, JournalError), self._owning():
            if (remove := self.dropped()) is not None:
                remove()
            for number in self.index.segments:
                fsync(segment_path(self.folder, number))
            fsync(self.folder)
            os.pwrite(self._acked, self.last._replace(closed=True).pack(), 0)
            os.fsync(self._acked)
        for file in (self._file, self._acked, self._lock):
            os.close(file)

    # --- reading ---

    def rows(self, payloads: bool) -> Iterator[Row]:
        """The live rows in order of their ids."""
        segments: OrderedDict[int, bytes] = OrderedDict()
        for number, places in self.index.places():
            if number not in segments:
                path = segment_path(self.folder, number)
                segments[number] = self.reading(path.read_bytes)
                if len(segments) > READ_SEGMENTS:
                    segments.popitem(last=False)
            try:
                yield from read_rows(segments[number], places, payloads)
            except (ValueError, struct.error) as e:  # the second: it was cut
                raise self.corrupt(str(e)) from e

    def payloads(self, rows: Iterable[int]) -> dict[int, bytes]:
        """Of stored rows."""
        payloads: dict[int, bytes] = {}
        files: dict[int, int] = {}
        with contextlib.ExitStack() as opened:
            for row in rows:
                if (place := self.index.find(row)) is None:
                    raise self.corrupt(f"row {row} is not there: deleted before, or lost")
                number, offset, size = place
                if number not in files:
                    path = str(segment_path(self.folder, number))
                    files[number] = self.reading(partial(private, path, os.O_RDONLY))
                    opened.callback(os.close, files[number])
                data = self.reading(partial(os.pread, files[number], size, offset))
                try:
                    payloads[row] = next(read_rows(data, [(row, 0)])).payload or b""
                except (ValueError, struct.error) as e:
                    raise self.corrupt(str(e)) from e
        return payloads

    # --- errors ---

    def reading(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except OSError as e:
            raise self.translate(e) from e

    def translate(self, e: BaseException, n_kept: int = 0) -> JournalError:
        """What its caller is told, with this number of rows in memory."""
        if isinstance(e, JournalError):
            return e
        if isinstance(e, OSError) and e.errno in NO_SPACE:
            return JournalFullError(
                f"{self.folder}: the disk takes no more ({e}); free space under {self.folder}"
                + (f". {n_kept} rows are kept in memory until then" if n_kept else "")
            )
        if isinstance(e, OSError):
            return JournalError(f"{e}; check that {self.folder} is writable and its disk is sound")
        return JournalError(f"{self.folder}: the transaction failed with {type(e).__name__}: {e}")

    def corrupt(self, what: str) -> JournalCorruptError:
        return JournalCorruptError(
            f"{self.folder}: {what}. `stepwell data salvage {self.folder}` makes a usable journal "
            "of what can be read and says what is lost; or restore the folder from a copy, or move "
            "it aside to start empty"
        )

    # --- inside ---

    @contextlib.contextmanager
    def _owning(self, check: bool = True) -> Iterator[None]:
        """No other process writes meanwhile, and none has taken the journal over."""
        fcntl.flock(self._acked, fcntl.LOCK_EX)
        try:
            if check and not self.last.owns(self._acked):
                self.is_fenced = True
                raise JournalFencedError(
                    f"{self.folder}: another process has taken this journal over, after this one "
                    "was declared dead; this one can write nothing more, end it"
                )
            yield
        finally:
            fcntl.flock(self._acked, fcntl.LOCK_UN)

    def _acknowledged(self) -> Acked:
        """What `pool.acked` says; made if there is no journal yet."""
        try:
            acked = read_acked(self.folder)
        except ValueError as e:
            raise self.corrupt(
                f"{e}: it says what was acknowledged, so that lost transactions could not be told"
            ) from e
        if acked is not None:
            return acked
        if segments_in(self.folder):
            raise self.corrupt(
                f"{ACKED_NAME}, which says what was acknowledged, is missing, so that lost "
                "transactions could not be told"
            )
        acked = Acked(uuid.uuid4().bytes, opening=0)
        draft = self.folder / f"{ACKED_NAME}.new"
        with open(draft, "wb", opener=private) as file:
            file.write(acked.pack())
            if self._power:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, self.folder / ACKED_NAME)
        return acked

    def _load(self, acked: Acked) -> Found:
        """What the log holds, if everything that was acknowledged, and promised, is there. Changes
        nothing."""
        try:
            found = read_log(self.folder, acked.journal)
        except ValueError as e:
            raise self.corrupt(str(e)) from e
        if found.sequence >= acked.sequence:
            if found.crcs.get(acked.sequence, acked.crc) != acked.crc:
                raise self.corrupt(
                    f"transaction {acked.sequence} is not the one that was acknowledged"
                )
            return found
        lost = lost_between(found.sequence, found.next_row, found.index.n_rows, acked)
        if acked.power or acked.closed or acked.boot == (boot_id() or bytes(16)):
            raise self.corrupt(f"{lost} The log was damaged, cut or removed")
        logger.warning(
            "%s: %s The machine was restarted since, and durability 'process' does not "
            "survive that; set pool.durability to 'power' for one that does",
            self.folder,
            lost,
        )
        return found

    def _begin(self) -> int:
        """Cuts what was not acknowledged, and takes the record over. The newest segment, opened."""
        for number in segments_in(self.folder):
            if number not in self.index.segments:  # dropped, or begun and not finished
                segment_path(self.folder, number).unlink()
        last = self.last
        if last.segment:
            file = private(str(segment_path(self.folder, last.segment)), os.O_RDWR)
        else:
            file = os.open(self.folder, os.O_RDONLY)  # until the first transaction
        try:
            if last.segment:
                os.ftruncate(file, last.end)
            os.pwrite(self._acked, last.pack(), 0)
        except BaseException:  # as in `write`
            os.close(file)
            raise
        return file

    def _remove(self, numbers: Sequence[int], newest: int) -> None:
        """What was moved out of these segments, and that they are dropped, must be on disk before
        they are gone."""
        with contextlib.suppress(OSError, JournalError):  # the next opening does it, if not this
            if not self._power:
                fsync(segment_path(self.folder, newest))
            for number in numbers:
                segment_path(self.folder, number).unlink(missing_ok=True)
