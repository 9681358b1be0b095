"""This module keeps rows of live groups in a log so that what the pool acknowledged outlives it.

Owns durability: what is written when, what an acknowledged change survives, what a full or broken
disk looks like. Knows nothing of the pool's logic: a row is a kind, a head and a payload, all
opaque::

    append() ──► buffer ──flush: one transaction──► end of the newest segment ──► pool.acked
                  │  │                                                       └──► index
                  │  └─ kept, if the transaction failed: the next one takes them
                  └─ deleted before its transaction: never written

    delete() ──► a few bytes in the next transaction ──► the segment goes, once all of it is dead

What a finished transaction survives (`durability`):

- `process`: the process killed at any instant. The bytes are with the operating system; nothing
  waits for the disk. If the machine stops, the last transactions may be gone.
- `power`: the machine losing power. The transaction waits for the disk.

Damage is found when the journal is opened, and nothing on disk is changed then: every byte of a
segment is under a checksum, every transaction names the one before it, every segment lists the
others (`segments.py`). `pool.acked` names the last acknowledged transaction. It is written between
log and answer, so a killed process leaves it equal to the log or one transaction behind, never
ahead; what is torn behind it is cut. Ahead of the log is damage, with one exception: at `process`,
if the machine was restarted since, the tail was never promised. `salvage.py` makes a usable journal
of a damaged one.

Dead rows leave the disk an hour after at the latest, and some seconds after `scrub()`: live rows
around them are written anew and their segment is removed (`cleaning.py`), a slice per transaction.

One thread (or loop) uses a Journal; one process uses a folder (`folder.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stepwell.datapool.clock import boot_id
from stepwell.datapool.errors import JournalError, JournalFencedError
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
    Row,
    encode_block,
    encode_record,
    head_of,
    row_at,
    segment_path,
    segments_in,
)

logger = logging.getLogger(__name__)

Durability: TypeAlias = Literal["process", "power"]

SEGMENT_BYTES = 16 << 20
"""A segment that is longer gets a successor."""
ERASE_S = 3000.0
"""Seconds after which a dead row's segment is cleaned, whatever else is in it."""
SCRUB_S = 1.0
"""… after `scrub`: what dies meanwhile goes with it."""
PAUSE_S = 0.005
"""Between two slices when nothing else is written; others go on."""
RETRY_S = 1.0
"""… while the disk takes nothing."""


class Journal(LogReader):
    """Rows and states in `folder`; created if the folder holds none. Not thread-safe.

    Args:
        folder: on a local disk; created with its parents.
        durability: what a finished transaction survives (module docstring).
        lock_timeout_s: seconds to wait for a process that is about to die.
        take_over: a process that was declared dead. If the folder is still its after that time,
            write all the same: it can write nothing more (`JournalFencedError`).

    Raises:
        JournalLockedError: another live process has the folder open.
        JournalVersionError: another schema version wrote it.
        JournalCorruptError: a file is damaged, cut or missing; the files stay as they are.
        JournalFullError: no space to create it.
        JournalError: the folder cannot be created, opened or written.
    """

    def __init__(
        self,
        folder: Path,
        durability: Durability,
        *,
        lock_timeout_s: float = 5.0,
        take_over: int | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.durability = durability
        self._power = durability == "power"
        self._doomed: list[int] = []
        """Segments that count no longer, and are there."""
        self._open(lock_timeout_s, take_over)
        self._next_row = self.last.next_row
        self._rows: dict[int, Record] = {}
        """Buffered rows."""
        self._again: set[int] = set()
        """Rows among these that may be stored already, with other content."""
        self._deletes: set[int] = set()
        self._states: dict[str, bytes] = {}
        self.about_to_commit: Callable[[], None] | None = None
        """Called before each transaction: what it puts is in it."""
        self.error: JournalError | None = None
        """Error of the last transaction; None if it was written."""
        self._closed = False
        self._commits = self._failed_commits = self._rows_written = self._rows_deleted = 0
        self._last_error: str | None = None
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="journal")
        # Erasing: what died is erased with the first transaction after this time.
        self._erase_at = time.monotonic() + SCRUB_S if self.has_dead else None
        self._is_asked = False
        self._cleaner = Cleaner(self.index)
        self._must_clean = self.index.is_mostly_dead
        """True if the next transactions move rows, so that dead ones beside them can go."""
        self._timer: asyncio.TimerHandle | None = None

    def _open(self, lock_timeout_s: float, take_over: int | None) -> None:
        """Take the folder, read its log, compare that with `pool.acked`, and cut what is torn."""
        folder = self.folder
        made = make_folder(folder)
        self._lock, self._is_alone = take_folder(folder, lock_timeout_s, take_over)
        with contextlib.ExitStack() as undo, self._telling():
            undo.callback(os.close, self._lock)
            self._acknowledged()
            # The previous process writes nothing from here on.
            self._acked = take_acked(folder, lock_timeout_s)
            undo.callback(os.close, self._acked)
            known = self._acknowledged()
            found = self._load(known)
            self.index, self._stored_states = found.index, found.states
            self._newest = found.newest
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
            self._owner = self.last.owner
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

    # --- writing ---

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        """Buffers a row and returns its id: larger than every id before, also after a restart.

        Args:
            payload: in pieces.
        """
        row = self._next_row
        self._rows[row] = encode_record(row, channel, kind, head, *payload)
        self._next_row = row + 1
        return row

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None:
        """Buffers a row under an id that it has here already, with other content, or had in another
        journal."""
        self._rows[row] = encode_record(row, channel, kind, head, *payload)
        self._again.add(row)

    def delete(self, rows: Iterable[int]) -> None:
        """Buffers the deletion of these rows; ids that are not stored are passed over."""
        for row in rows:
            if self._rows.pop(row, None) is None or row in self._again:
                self._deletes.add(row)

    def put_state(self, key: str, value: bytes) -> None:
        """Buffers `value` under `key`, in place of what was there."""
        key.encode()  # a key that is no Unicode must fail here, not in the transaction
        self._states[key] = value

    def scrub(self) -> None:
        """Some seconds from now no file has a byte of a row that was deleted by now; at the latest
        when `close` returns."""
        self._is_asked = True
        self._erase_in(SCRUB_S)
        self._go_on()

    @property
    def pending(self) -> bool:
        """True if something is not yet durable: buffered, or failed before."""
        return bool(self._rows or self._deletes or self._states) or self.error is not None

    def flush(self) -> None:
        """Commits all that is buffered, in one transaction.

        Raises:
            JournalFullError, JournalCorruptError, JournalError: nothing was written; everything
                stays buffered, and the next transaction takes it.
        """
        if self.about_to_commit is not None:
            self.about_to_commit()
        if self.pending:
            self._commit()
        if self._doomed or self._must_clean or (self._erase_at and self._timer is None):
            self._go_on()

    # --- reading ---

    def rows(self) -> Iterator[Row]:
        """The stored rows in order of their ids; what is only buffered is not among them. Nothing
        may be written before the last one was taken.

        Raises:
            JournalCorruptError: a row is damaged or missing.
        """
        return super().rows()

    def states(self) -> dict[str, bytes]:
        """The stored states; what is only buffered is not among them."""
        return dict(self._stored_states)

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of `rows`, in this order, buffered or stored. A row without one gives b"".
        Deleted rows must not be asked for.

        Raises:
            JournalCorruptError: a payload is damaged, or its row is not there.
        """
        records = self._rows
        stored = self.payloads([row for row in rows if row not in records])
        return [b"".join(records[row][1:]) if row in records else stored[row] for row in rows]

    def heads(self, rows: Sequence[int]) -> list[tuple[str, bytes]]:
        """Kinds and heads of `rows`. Otherwise as `read`."""
        records = self._rows
        stored = self.stored_heads([row for row in rows if row not in records])
        return [head_of(records[row][0]) if row in records else stored[row] for row in rows]

    @property
    def identity(self) -> str:
        """32 hex digits that no other journal has; made with it, and never changed."""
        return self.last.journal.hex()

    @property
    def opening(self) -> int:
        """Number of times that it was opened, this time included."""
        return self.last.opening

    def statistics(self) -> dict[str, Any]:
        """Counts since the journal was opened, and what it holds now."""
        return {
            "commits": self._commits,
            "failed_commits": self._failed_commits,
            "rows_written": self._rows_written,
            "rows_deleted": self._rows_deleted,
            "rows_per_commit": self._rows_written / self._commits if self._commits else 0.0,
            "sequence": self.last.sequence,
            "rows_stored": self.index.n_rows,
            "rows_buffered": len(self._rows),
            "last_error": self._last_error,
            "file_bytes": self.index.n_bytes,
            "free_bytes": self.index.n_bytes - self.index.live_bytes,
        }

    @property
    def has_dead(self) -> bool:
        """True if a row is on disk that does not count."""
        return any(len(s.ids) > s.live_rows for s in self.index.segments.values())

    @property
    def is_cleaning(self) -> bool:
        """True if further transactions are needed to erase dead rows, or because too much is
        dead."""
        return self._must_clean and bool(self._cleaner.left())

    def close(self) -> None:
        """Commits what is buffered and lets go of the folder. Harmless when repeated.

        Raises:
            JournalError: the last transaction failed; what was buffered is lost.
        """
        if self._closed:
            return
        try:
            if self.pending:
                self.flush()
            if self._is_asked or self._cleaner.is_erasing:
                self.erase()
        finally:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._remover.shutdown()
            self._release()

    def _release(self) -> None:
        # On a full disk the record only stays as it was; fenced, it is the successor's.
        with contextlib.suppress(OSError, JournalError):
            fcntl.flock(self._acked, fcntl.LOCK_EX)
            self._check_owner()
            if (remove := self._removal()) is not None:
                remove()
            for number in self.index.segments:
                fsync(segment_path(self.folder, number))
            fsync(self.folder)
            os.pwrite(self._acked, self.last._replace(boot=SYNCED).pack(), 0)
            os.fsync(self._acked)
        for file in (self._file, self._acked, self._lock):  # which unlocks them
            os.close(file)

    # --- transactions ---

    def _commit(self) -> None:
        """Write what is buffered as one transaction, or leave files and buffer as they were."""
        try:
            if self._closed:
                raise JournalError(f"{self.folder}: the journal was closed, open a new one")
            n_deleted = self._transact()
        except BaseException as e:  # also an interrupt: what was not written is tried again
            self._cleaner.again()
            self._failed_commits += 1
            self.error = self.translate(e, len(self._rows))
            self._last_error = str(self.error)
            if not isinstance(e, Exception):
                raise
            raise self.error from e
        self.error = None
        self._commits += 1
        self._rows_written += len(self._rows)
        self._rows_deleted += n_deleted
        self._rows, self._again, self._deletes, self._states = {}, set(), set(), {}
        if n_deleted:
            self._erase_in(ERASE_S)
        if self._erase_at is not None and self._erase_at <= time.monotonic():
            self._begin_to_erase()

    def _transact(self) -> int:
        """Write a transaction and acknowledge it; how many stored rows it deleted.

        Raises:
            JournalFencedError: a successor has taken the journal over.
            OSError: it cannot be written.
        """
        index, last, newest, records = self.index, self.last, self._newest, self._rows
        deleted: dict[int, list[int]] = {}
        n_bytes = n_deleted = 0
        for row in sorted(self._deletes):
            if (place := index.find(row)) is not None:
                deleted.setdefault(place[0], []).append(row)
                n_bytes += place[2]
                n_deleted += 1
        n_again = sum(row in records and index.find(row) is not None for row in self._again)
        n_rows = index.n_rows + len(records) - n_again - n_deleted
        moving: list[int] | None = None
        if self._must_clean:
            n_bytes += sum(sum(map(len, record)) for record in records.values())
            stays = self._deletes | self._again
            moving = self._cleaner.next_rows(newest, stays, n_bytes or self.pending)
        if moving:
            records = records | {row: (moved,) for row, moved in self._moved(moving).items()}
        begins = not newest or index.segments[newest].end >= SEGMENT_BYTES
        gone, segments, states = set[int](), None, self._states
        if begins or (self._must_clean and moving is None and self._cleaner.left()):
            begins, states = True, self._stored_states | states
            gone = {s.number for s in index.segments.values() if not s.live_rows}
            others = [s for s in index.segments.values() if s.number not in gone]
            segments = {s.number: (s.end, s.checksum) for s in others}
            for number, dead in index.tombstones_in(gone).items():
                deleted[number] = sorted([*deleted.get(number, ()), *dead])
        rows = sorted(records)
        sizes = [sum(map(len, records[row])) for row in rows]
        block = Block(
            last.sequence + 1,
            last.checksum,
            last.next_row,
            self._next_row,
            rows,
            sizes,
            deleted,
            states,
            segments,
        )
        at = 0 if begins else index.segments[newest].end
        data, n_block, checksum = encode_block(last.journal, block, [records[row] for row in rows])
        acked = LastCommit(
            last.journal,
            last.opening,
            last.pid,
            block.sequence,
            self._next_row,
            n_rows,
            checksum,
            last.boot,
        )
        self._write(newest + begins, at, data, acked)
        self.last, self._newest = acked, newest + begins
        self._stored_states |= self._states
        index.apply(self._newest, block, at + n_block, at + len(data), checksum)
        self._must_clean = self._cleaner.erase_to > 0 or index.is_mostly_dead
        if begins:
            self._doomed += gone
            self._unsynced.append(self._newest)
        if not self._is_alone:
            # A previous process was fenced. Once it has ended, no third one shall come in.
            self._is_alone = lock(self._lock)
        return n_deleted

    def _write(self, number: int, at: int, data: bytearray, acked: LastCommit) -> None:
        """Write a transaction there in a segment, and then `pool.acked`."""
        file = self._file
        fcntl.flock(self._acked, fcntl.LOCK_EX)
        try:
            self._check_owner()
            if not at:
                path = segment_path(self.folder, number)
                file = private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                n = os.pwrite(file, data, at)
                while n < len(data):
                    n += os.pwrite(file, memoryview(data)[n:], at + n)
                if self._power:
                    os.fdatasync(file) if at else os.fsync(file)
                    if not at:
                        fsync(self.folder)
                os.pwrite(self._acked, acked.pack(), 0)
            except BaseException:  # whatever it was, nothing of it shall be found
                with contextlib.suppress(OSError):  # an interrupt may come after it was written
                    os.pwrite(self._acked, self.last.pack(), 0)
                with contextlib.suppress(OSError):  # then the next transaction writes over it
                    os.ftruncate(file, at)
                if not at:
                    os.close(file)
                    path.unlink()
                raise
        finally:
            fcntl.flock(self._acked, fcntl.LOCK_UN)
        if not at:
            os.close(self._file)
            self._file = file

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """A block in which no other process takes the folder over.

        Raises:
            JournalFencedError: one has.
        """
        fcntl.flock(self._acked, fcntl.LOCK_EX)
        try:
            self._check_owner()
            yield
        finally:
            fcntl.flock(self._acked, fcntl.LOCK_UN)

    def _check_owner(self) -> None:
        """Call while `pool.acked` is locked.

        Raises:
            JournalFencedError: a successor has taken the journal over.
        """
        if os.pread(self._acked, len(self._owner), 0) != self._owner:
            raise JournalFencedError(
                f"{self.folder}: another process has taken this journal over, after this one was "
                "declared dead; this one can write nothing more, end it"
            )

    # --- erasing ---

    def erase(self) -> None:
        """Takes every dead row out of the files, on this thread.

        Raises:
            JournalCorruptError: a segment cannot be read.
            JournalError: nothing can be written.
        """
        if self.pending:
            self._commit()
        self._begin_to_erase()
        while self._cleaner.is_erasing:
            self._commit()
        if self._cleaner.unreadable:
            raise self.corrupt("a segment cannot be read, so what was deleted is still there")
        if (remove := self._removal()) is not None:
            remove()

    def _begin_to_erase(self) -> None:
        """Let the next transactions take out all dead rows that there are now."""
        self._erase_at, self._is_asked = None, False
        self._cleaner.erase_to = self._newest
        self._must_clean = True

    def _erase_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._erase_at = at if self._erase_at is None else min(at, self._erase_at)

    def _go_on(self) -> None:
        """Removes what counts no longer, and sees to it that what is left to be cleaned is, also
        when nothing more is written: on the loop, if there is one; without, `close` does it."""
        remove = self._removal()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if remove is not None:
                remove()
            return
        if remove is not None:
            self._remover.submit(remove)
        if self._closed or isinstance(self.error, JournalFencedError):
            return
        if self.is_cleaning:
            when = loop.time() + (PAUSE_S if self.error is None else RETRY_S)
        elif self._erase_at is not None:
            when = loop.time() + max(0.0, self._erase_at - time.monotonic())
        else:
            return
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._tidy)

    def _tidy(self) -> None:
        """Erases what is due, unless a flush was faster."""
        self._timer = None
        is_due = self._erase_at is not None and self._erase_at <= time.monotonic()
        if self._closed:
            return
        if self.about_to_commit is not None:
            self.about_to_commit()
        if self.pending or is_due or self.is_cleaning:
            with contextlib.suppress(JournalError):  # it is tried again with the next change
                self._commit()
        self._go_on()

    def _moved(self, rows: Iterable[int]) -> dict[int, bytes]:
        """Rows to be written anew. Without them, if their segment cannot be read."""
        try:
            records = dict(self._records(rows))
            for row, record in records.items():
                row_at(record, row, 0)
        except (OSError, ValueError) as e:
            self._cleaner.again(failed=True)
            logger.error(
                "%s: what is dead in a segment stays on disk, as the rest of it cannot be read "
                "(%s). Stop the pool and run `stepwell data salvage %s`",
                self.folder,
                e,
                self.folder,
            )
            return {}
        return records

    def _removal(self) -> Callable[[], None] | None:
        """Return the function that removes the segments that count no longer, and waits for the
        disk; None: there are none."""
        if not self._doomed:
            return None
        doomed, self._doomed = self._doomed, []
        unsynced = [] if self._power else [n for n in self._unsynced if n in self.index.segments]
        self._unsynced = [self._newest]
        return partial(self._remove, doomed, unsynced)

    def _remove(self, doomed: Iterable[int], unsynced: Iterable[int]) -> None:
        """Remove these segments once it is on disk that they count no longer, and all that was
        moved out of them."""
        with contextlib.suppress(OSError, JournalError):  # the next opening does it, if not this
            for number in unsynced:
                fsync(segment_path(self.folder, number))
            for number in doomed:
                segment_path(self.folder, number).unlink(missing_ok=True)
