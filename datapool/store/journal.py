"""The pool's memory across restarts: rows of live groups in one SQLite file.

Owns durability: what is written when, what an acknowledged change survives, what a full or broken
disk looks like. Knows nothing of the pool's logic: a row is a kind, a head and a payload, all
opaque. It keeps rows of *live* groups only; the pool deletes those of a group that has left, and
their pages are overwritten with zeros and used again. A deleted row is gone from the log, too, once
that is emptied: within some seconds (`CHECKPOINT_S`)::

    append() ──► buffer ──► one transaction ──► pool.sqlite3-wal ──► pool.sqlite3
                  │  ▲        (flush, or all waiters of committed())    (checkpoint, inside SQLite)
                  │  └─ back, in order, if the transaction failed; the next one takes them again
                  └─ deleted before its transaction: never written

What a finished transaction survives (`durability`):

- `process`: the process killed at any instant. The bytes are with the operating system; nothing
  waits for the disk, and the transaction runs on the caller's thread (0.15 ms for 16 rows of
  2 kB, less than handing it to a thread costs). If the machine stops, the last transactions may be
  gone, or the file may be unreadable.
- `power`: the machine losing power. Only the COMMIT, which waits for the disk, runs in a thread;
  meanwhile further rows gather, and the next transaction takes them all.

A worked example: of 64 producers that append in one iteration of the loop and await `committed()`,
the first schedules a transaction behind what is ready to run, so that one takes all 64.

Damage is found, not served, in three layers:

- a row or state that changed: heads, payloads and states carry a CRC-32;
- a row or state that is missing, or is back: each transaction stores its `Books`, which say how
  many rows and states there are, the sum of their ids and CRCs, and its own number;
- transactions that are missing, because the write-ahead log or a whole file was cut, changed or
  removed (SQLite drops such a tail without a word): `pool.acked` repeats the Books of the last
  acknowledged transaction. It is written between COMMIT and answer, so a killed process leaves it
  equal to the file or one transaction behind, never ahead.

`pool.acked` ahead of the file is damage, with one exception: at `process`, if the machine was
restarted since, the tail was never promised. Then the journal opens and logs what is gone.
`salvage.py` makes a usable journal of a damaged one.

One thread (or loop) uses a Journal; one process uses a folder, by a lock on the folder itself,
which the kernel releases when the process dies. The files are readable by their owner only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from stepwell.datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalFencedError,
    JournalFullError,
    JournalLockedError,
    JournalVersionError,
)
from stepwell.datapool.process import boot_id

logger = logging.getLogger(__name__)

FILE_NAME = "pool.sqlite3"
LOG_NAME = f"{FILE_NAME}-wal"
ACKED_NAME = "pool.acked"
SCHEMA_VERSION = 3
"""Raised with every change that a journal of before would not survive; that one is refused."""

PAGE_BYTES = 8192
"""Steps take 1 to 4 kB. At 4 kB a page holds one row and half of it is wasted; larger pages make
the deletion of single rows dearer (each rewrites its page)."""

CHECKPOINT_BYTES = {"process": 2 << 20, "power": 8 << 20}
"""The write-ahead log is moved into the file at this length: about 1 ms on the caller's thread,
or, with `power`, two waits for the disk in the worker."""

CHECKPOINT_S = 5.0
"""… and after this time, also when nothing more is written; then the log is empty."""

SLACK_PAGES = (32 << 20) // PAGE_BYTES
"""Free pages beyond this number, and beyond half of the file, go back to the file system."""

SHRINK_PAGES = 32
"""Pages given back per transaction: about 1 ms."""

_SCHEMA = """
CREATE TABLE rows (row INTEGER PRIMARY KEY, channel TEXT NOT NULL, kind TEXT NOT NULL,
    head_crc INTEGER NOT NULL, payload_crc INTEGER, head BLOB NOT NULL, payload BLOB);
CREATE TABLE states (key PRIMARY KEY NOT NULL, crc INTEGER NOT NULL, value BLOB NOT NULL)
WITHOUT ROWID;
"""
_INSERT = "INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM rows WHERE row = ?"
_PUT = "REPLACE INTO states VALUES (?, ?, ?)"
_FOLLOW = "UPDATE states SET crc = ?, value = ? WHERE key = ? AND value = ?"
"""The Books of a transaction, if those in the file are the ones of the transaction before it."""
_SCAN = (
    "SELECT row, channel, kind, head_crc, payload_crc, head, length(payload), {} "
    "FROM rows WHERE row > ? ORDER BY row LIMIT ?"
)

_BOOKS = 0
"""Key of the journal's own state. The caller's keys are text, so this number is none of them."""


class Books(NamedTuple):
    """What a transaction left in the file."""

    journal: bytes
    """16 random bytes, made with the journal."""
    sequence: int = 0
    """Number of the transaction; 0 is the creation."""
    next_row: int = 0
    rows: int = 0
    row_sum: int = 0
    """Sum of the ids of the rows, modulo 2^64."""
    states: int = 0
    state_sum: int = 0
    """Sum of the CRCs of the states."""

    def pack(self) -> bytes:
        return _BOOKS_FORMAT.pack(*self)


_BOOKS_FORMAT = struct.Struct("<16sqqqQqQ")
SUM_MASK = (1 << 64) - 1


class Acked(NamedTuple):
    """What `pool.acked` says."""

    books: Books
    """Of the last transaction that was acknowledged, or found when the journal was opened."""
    boot: bytes
    """`process.boot_id` when it was written; zeros where there is none."""
    power: bool
    """Durability `power`."""
    closed: bool
    """The journal was closed and synced; nothing can be missing, whatever the machine did."""
    pid: int
    """Who has, or had, the journal open."""


def _acked(books: bytes, boot: bytes, power: bool, closed: bool) -> bytes:
    """What `read_acked` reads."""
    body = _ACKED_FORMAT.pack(_ACKED_MAGIC, books, boot, power, closed, os.getpid())
    return body + _CRC_FORMAT.pack(crc32(body))


_ACKED_MAGIC = b"swpool-2"
_ACKED_FORMAT = struct.Struct(f"<8s{_BOOKS_FORMAT.size}s16s??q")
_CRC_FORMAT = struct.Struct("<I")


def read_acked(folder: Path) -> Acked | None:
    """What `pool.acked` in `folder` says; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        data = (folder / ACKED_NAME).read_bytes()
    except FileNotFoundError:
        return None
    size = _ACKED_FORMAT.size
    if len(data) != size + _CRC_FORMAT.size or _CRC_FORMAT.unpack(data[size:]) != (
        crc32(data[:size]),
    ):
        raise ValueError(f"{folder / ACKED_NAME} is damaged")
    magic, books, *rest = _ACKED_FORMAT.unpack(data[:size])
    if magic != _ACKED_MAGIC:
        raise ValueError(f"{folder / ACKED_NAME} is of another version")
    return Acked(Books._make(_BOOKS_FORMAT.unpack(books)), *rest)


_CORRUPT = {
    None,  # raised by Python's sqlite3 itself: text that is no UTF-8
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,  # a statement of ours that the damaged schema does not allow
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
}
"""What SQLite says of a damaged file."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

BUSY_MS = 5000
"""How long another program that reads the file may keep a transaction waiting."""

_T = TypeVar("_T")
_Entry: TypeAlias = tuple[int, str, str, int, int | None, bytes, bytes | None]  # as _INSERT has it


class Row(NamedTuple):
    """One stored event."""

    row: int
    channel: str
    kind: str
    head: bytes
    payload: bytes | None
    """None if the row has none, or was read without."""
    payload_bytes: int
    """Length of the stored payload, also when it was not read; 0 if there is none."""


@dataclass(slots=True)
class _Batch:
    """What one transaction writes."""

    rows: dict[int, _Entry] = field(default_factory=dict)
    deletes: set[int] = field(default_factory=set)
    states: dict[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.deletes or self.states)

    def extend(self, newer: _Batch) -> None:
        """Adds what was buffered after this batch."""
        for row in newer.deletes:
            if self.rows.pop(row, None) is None:
                self.deletes.add(row)
        self.rows.update(newer.rows)
        self.states.update(newer.states)


_Waiters: TypeAlias = list["asyncio.Future[JournalError | None]"]


@dataclass(slots=True)
class _Written:
    """A transaction before its COMMIT."""

    batch: _Batch
    deleted: int
    books: Books
    packed: bytes
    """The same as bytes."""
    state_crcs: dict[str, int]


@dataclass(slots=True)
class _Flight:
    """A transaction whose COMMIT is in the worker thread."""

    written: _Written | None
    """None: no transaction, a checkpoint."""
    commit: Future[None]
    waiters: _Waiters

    @property
    def rows(self) -> dict[int, _Entry]:
        return {} if self.written is None else self.written.batch.rows


class _NotRecorded(Exception):  # noqa: N818 - no failure of the transaction
    """The transaction is committed, but `pool.acked` does not say so."""


class Journal:
    """Rows and states in `folder`; created if the folder holds none. Not thread-safe.

    Args:
        folder: on a local disk; created with its parents.
        durability: what a finished transaction survives (module docstring).
        lock_timeout_s: seconds to wait for a process that is about to die.
        take_over: a process that was declared dead. If the folder is still its after that time,
            write all the same: our first transaction is the last thing that it sees
            (`JournalFencedError`).

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
        durability: Literal["process", "power"],
        *,
        lock_timeout_s: float = 5.0,
        take_over: int | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.path = self.folder / FILE_NAME
        self._acked_path = str(self.folder / ACKED_NAME)
        self.durability = durability
        self._buffer = _Batch()
        self._flight: _Flight | None = None
        self._error: JournalError | None = None
        self._closed = self._is_fenced = False
        # Group commit: who waits for the next transaction, and the loop that will run it.
        self._waiters: _Waiters = []
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checkpoint_timer: asyncio.TimerHandle | None = None
        self._checkpointed_at = time.monotonic()
        self._checkpointed_commits = 0
        self._name_crcs: dict[tuple[str, str], int] = {}
        self._commits = self._failed_commits = self._rows_written = self._rows_deleted = 0
        self._last_error: str | None = None
        made = _make_folder(self.folder)
        self._lock, self._is_alone = self._take_folder(lock_timeout_s, take_over)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self._boot = boot_id() or bytes(16)
            if self._reading(self._is_new):
                self._reading(self._create)
            if not self._is_alone:
                self._db = self._reading(self._connect)
                undo.callback(self._db.close)
                # The former process commits nothing from here to our first transaction. It may
                # stand still in the middle of one.
                self._db.execute(f"PRAGMA busy_timeout={int(1000 * lock_timeout_s)}")
                self._reading(lambda: self._db.execute("BEGIN IMMEDIATE"))
                self._db.execute(f"PRAGMA busy_timeout={BUSY_MS}")
            self._books, self._state_crcs, self._next_row = self._reading(self._verify)
            self._in_file = self._books.pack()
            if self._is_alone:
                self._db = self._reading(self._connect)
                undo.callback(self._db.close)
            # Reading must not wait for a COMMIT that is under way on the writing connection.
            self._reader = self._reading(self._connect) if durability == "power" else self._db
            undo.callback(self._reader.close)
            self._acked = self._reading(partial(_private, self._acked_path, os.O_WRONLY))
            undo.callback(os.close, self._acked)
            self._reading(lambda: self._record(self._in_file))
            if durability == "power":
                for path in (self.folder / ACKED_NAME, self.folder, *made):
                    _fsync(path)
            # For good, also if nothing is written; and to fence the former process.
            if self._next_row != self._books.next_row or not self._is_alone:
                self._commit_always()
            undo.pop_all()
        self._max_row_bytes = self._db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - PAGE_BYTES
        self._worker: ThreadPoolExecutor | None = None
        if durability == "power":
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="journal-commit")

    def _take_folder(self, timeout_s: float, take_over: int | None) -> tuple[int, bool]:
        """A descriptor of the folder, and whether the folder is locked by it."""
        try:
            return lock_folder(self.folder, timeout_s), True
        except JournalLockedError as e:
            if _pid_of_holder(self.folder) != str(take_over):
                raise
            logger.warning("%s; it was declared dead and can write nothing more from now on", e)
            return os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), False

    # --- writing ---

    def append(self, channel: str, kind: str, head: bytes, payload: bytes | None = None) -> int:
        """Buffers a row and returns its id: larger than every id before, also after a restart.

        Raises:
            JournalError: the row is larger than SQLite stores (1 GB).
        """
        n_bytes = len(head) + (len(payload) if payload is not None else 0)
        if n_bytes > self._max_row_bytes:
            raise JournalError(
                f"{self.path}: a {kind!r} row of {n_bytes} bytes; at most {self._max_row_bytes} "
                "can be stored, split it"
            )
        row = self._next_row
        payload_crc = None if payload is None else crc32(payload, row & 0xFFFFFFFF)
        head_crc = self._head_crc(row, channel, kind, head)
        self._next_row = row + 1
        self._buffer.rows[row] = (row, channel, kind, head_crc, payload_crc, head, payload)
        return row

    def delete(self, rows: Iterable[int]) -> None:
        """Buffers the deletion of these rows; ids that are not stored are passed over."""
        buffered, deletes = self._buffer.rows, self._buffer.deletes
        for row in rows:
            if buffered.pop(row, None) is None:
                deletes.add(row)

    def put_state(self, key: str, value: bytes) -> None:
        """Buffers `value` under `key`, in place of what was there."""
        key.encode()  # a key that SQLite cannot store must fail here, not in the transaction
        self._buffer.states[key] = value

    @property
    def pending(self) -> bool:
        """Whether something is not yet durable: buffered, being committed, or failed before."""
        return bool(self._buffer) or self._flight is not None or self._error is not None

    def flush(self) -> None:
        """Commits all that is buffered, in one transaction, on this thread.

        Raises:
            JournalFullError, JournalCorruptError, JournalError: nothing was written; everything
                stays buffered, and the next transaction takes it.
        """
        self._land()
        error = self._commit_inline()
        if error is not None:
            raise error

    def check(self) -> None:
        """Call before a new change: after a failed transaction, tries it again.

        Raises:
            JournalError: it still fails, so that a change could not be made durable either.
        """
        if self._error is not None:
            self.flush()

    async def committed(self) -> None:
        """Returns once all that was buffered at the time of the call is durable.

        Raises:
            JournalError: the transaction that had it failed (`flush`).
        """
        if not self.pending:
            return
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        waiter: asyncio.Future[JournalError | None] = loop.create_future()
        if self._flight is not None and not self._buffer:
            self._flight.waiters.append(waiter)
        else:
            self._waiters.append(waiter)
            if self._flight is None and not self._scheduled:
                # Behind everything that is ready to run now, so that its rows come along.
                loop.call_soon(self._group_commit, loop)
                self._scheduled = True
        error = await waiter
        if error is not None:
            raise type(error)(str(error)) from error  # each waiter its own traceback

    # --- reading ---

    def rows(self, payloads: bool = True) -> Iterator[Row]:
        """The stored rows in order of their ids; what is only buffered is not among them.

        No transaction stays open between two rows, so that the log can be checkpointed.

        Raises:
            JournalCorruptError: a row is damaged or missing.
        """
        sql = _SCAN.format("payload" if payloads else "NULL")
        limit = 32 if payloads else 1024
        self._land()
        books = self._books
        n_rows, row_sum, last = 0, 0, -1
        while True:
            chunk = self._fetch(sql, last, limit)
            for row, channel, kind, head_crc, payload_crc, head, n_bytes, payload in chunk:
                sound = row > last and is_sound_head(row, channel, kind, head, head_crc)
                sound = sound and (payload_crc is None) == (n_bytes is None)
                if not sound or (payloads and not is_sound_payload(row, payload, payload_crc)):
                    raise self._corrupt(f"row {row} does not have the content it was written with")
                last = row
                n_rows += 1
                row_sum += row
                yield Row(row, channel, kind, head, payload, n_bytes or 0)
            if len(chunk) < limit:
                break
        if books is not self._books or self._flight is not None:
            return  # it changed meanwhile
        if n_rows != books.rows:
            raise self._corrupt(f"{n_rows} rows can be read but {books.rows} were written")
        if row_sum & SUM_MASK != books.row_sum:
            raise self._corrupt("rows that were deleted are back, in place of others")

    def states(self) -> dict[str, bytes]:
        """The stored states; what is only buffered is not among them.

        Raises:
            JournalCorruptError: one is damaged or missing.
        """
        self._land()
        states: dict[str, bytes] = {}
        for key, crc, value in self._fetch("SELECT key, crc, value FROM states"):
            if key == _BOOKS:
                continue
            if not is_sound_state(key, crc, value):
                raise self._corrupt(f"state {key!r} does not have the content it was written with")
            states[key] = value
        books = self._books
        if len(states) != books.states:
            raise self._corrupt(f"{len(states)} states can be read but {books.states} were written")
        if states_sum(states) != (books.states, books.state_sum):
            raise self._corrupt("a state has the content of an earlier transaction")
        return states

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of `rows`, in this order, wherever they are: buffered, being committed or
        stored. A row without one gives b"". Deleted rows must not be asked for.

        Raises:
            JournalCorruptError: a payload is damaged, or its row is not there.
        """
        waiting = [self._buffer.rows]
        if self._flight is not None:
            waiting.append(self._flight.rows)
        found: dict[int, bytes] = {}
        for row in rows:
            for entries in waiting:
                if row in entries:
                    found[row] = entries[row][6] or b""
        stored = [row for row in rows if row not in found]
        if stored:
            found |= zip(stored, self._reading(lambda: self._select(stored)), strict=True)
        return [found[row] for row in rows]

    @property
    def identity(self) -> str:
        """32 hex digits that no other journal has; made with it, and never changed."""
        return self._books.journal.hex()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk: the file and its write-ahead log."""
        total = 0
        for name in (FILE_NAME, LOG_NAME):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(self.folder / name).st_size
        return total

    def statistics(self) -> dict[str, Any]:
        """Counts since the journal was opened, and what it holds now."""
        ((free,),) = self._fetch("PRAGMA freelist_count")
        return {
            "commits": self._commits,
            "failed_commits": self._failed_commits,
            "rows_written": self._rows_written,
            "rows_deleted": self._rows_deleted,
            "rows_per_commit": self._rows_written / self._commits if self._commits else 0.0,
            "sequence": self._books.sequence,
            "rows_stored": self._books.rows,
            "rows_buffered": len(self._buffer.rows),
            "rows_in_commit": len(self._flight.rows) if self._flight is not None else 0,
            "last_error": self._last_error,
            "file_bytes": self.size_bytes,
            "free_bytes": free * PAGE_BYTES,
        }

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
        finally:
            self._closed = True
            if self._checkpoint_timer is not None:
                self._checkpoint_timer.cancel()
            if self._worker is not None:
                self._worker.shutdown()
            self._reader.close()
            self._db.close()
            # The connections are closed: SQLite's locks, which go with any descriptor of the file,
            # are not needed any more. On a full disk the record only stays as it was.
            with contextlib.suppress(OSError, JournalError):
                if not self._is_fenced:  # else the record is the successor's
                    _fsync(self.path)
                    _fsync(self.folder)  # of which SQLite has removed the log
                    self._record(self._in_file, closed=True)
                    os.fsync(self._acked)
            os.close(self._acked)
            os.close(self._lock)

    def refill(
        self, books: Books, rows: Iterable[Row], states: Mapping[str, bytes], flush_rows: int = 256
    ) -> None:
        """Makes this empty journal the successor of another one: its identity, its numbers, these
        rows under their ids, these states.

        Raises:
            JournalError: it cannot be written.
        """
        self._books = self._books._replace(journal=books.journal, sequence=books.sequence)
        packed = self._books.pack()
        put = (_BOOKS, _state_crc(_BOOKS, packed), packed)
        self._reading(lambda: self._db.execute(_PUT, put))
        self._in_file = packed
        self._next_row = books.next_row
        for row, channel, kind, head, payload, _ in rows:
            payload_crc = None if payload is None else crc32(payload, row & 0xFFFFFFFF)
            head_crc = self._head_crc(row, channel, kind, head)
            self._buffer.rows[row] = (row, channel, kind, head_crc, payload_crc, head, payload)
            if len(self._buffer.rows) >= flush_rows:
                self.flush()
        for key, value in states.items():
            self.put_state(key, value)
        self._commit_always()

    # --- transactions ---

    def _commit_inline(self, always: bool = False) -> JournalError | None:
        if not self.pending and not always:
            return None
        batch, self._buffer = self._buffer, _Batch()
        written: _Written | None = None
        try:
            written = self._write(batch)
            self._commit(written)
        except BaseException as e:  # also an interrupt: the batch must go back to the buffer
            error = self._failed(batch, written, e)
            if not isinstance(e, Exception):
                raise
            return error
        self._succeeded(written)
        return None

    def _commit_always(self) -> None:
        error = self._commit_inline(always=True)
        if error is not None:
            raise error

    def _write(self, batch: _Batch) -> _Written:
        """Everything but the COMMIT."""
        executemany = self._db.executemany
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        deleted, deleted_sum = self._delete(batch.deletes) if batch.deletes else (0, 0)
        state_crcs = {key: _state_crc(key, value) for key, value in batch.states.items()}
        all_crcs = {**self._state_crcs, **state_crcs}
        before = self._books
        books = Books(
            before.journal,
            before.sequence + 1,
            self._next_row,
            before.rows + len(batch.rows) - deleted,
            (before.row_sum + sum(batch.rows) - deleted_sum) & SUM_MASK,
            len(all_crcs),
            sum(all_crcs.values()) & SUM_MASK,
        )
        packed = books.pack()
        # Written by every transaction. One that failed may have left frames in the log that look
        # committed after a crash; whatever comes next has to write over them.
        put = (_state_crc(_BOOKS, packed), packed, _BOOKS, self._in_file)
        if not self._db.execute(_FOLLOW, put).rowcount:
            self._is_fenced = True
            raise JournalFencedError(
                f"{self.folder}: another process has taken this journal over, after this one was "
                "declared dead; this one can write nothing more, end it"
            )
        if batch.rows:  # after the deletions, so that they find free pages
            executemany(_INSERT, batch.rows.values())
        if state_crcs:
            states = batch.states.items()
            executemany(_PUT, [(key, state_crcs[key], value) for key, value in states])
        return _Written(batch, deleted, books, packed, state_crcs)

    def _delete(self, rows: set[int]) -> tuple[int, int]:
        """How many of these rows were there to be deleted, and the sum of their ids."""
        ordered = sorted(rows)
        n: int = self._db.executemany(_DELETE, [(row,) for row in ordered]).rowcount
        if n == len(ordered):
            return n, sum(ordered)
        # Some were not stored. Again, one by one, to know which.
        self._db.execute("ROLLBACK")
        self._db.execute("BEGIN IMMEDIATE")
        found = [row for row in ordered if self._db.execute(_DELETE, (row,)).rowcount]
        return len(found), sum(found)

    def _commit(self, written: _Written) -> None:
        self._db.execute("COMMIT")
        try:
            self._record(written.packed)
        except OSError as e:
            raise _NotRecorded from e
        # The rows are safe; what follows is a courtesy that the next transaction repeats.
        with contextlib.suppress(sqlite3.Error):
            if written.batch.deletes:
                self._give_back_pages()
            if time.monotonic() - self._checkpointed_at > CHECKPOINT_S:
                self._checkpoint()

    def _record(self, books: bytes, closed: bool = False) -> None:
        """What was acknowledged, or is about to be. Not synced: see the module's docstring."""
        os.pwrite(self._acked, _acked(books, self._boot, self.durability == "power", closed), 0)

    def _give_back_pages(self) -> None:
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        if free > SLACK_PAGES:
            (pages,) = self._db.execute("PRAGMA page_count").fetchone()
            if 2 * free > pages:
                # Not execute(): that takes one step, which is one page.
                self._db.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")

    def _checkpoint(self) -> None:
        """Moves the log into the file and empties it. Does not wait for readers of others."""
        self._checkpointed_at = time.monotonic()
        self._checkpointed_commits = self._commits
        if not self._is_alone:
            # Once the former process has ended, no third one shall come in.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_alone = True
        self._db.execute("PRAGMA busy_timeout=0")
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self._db.execute(f"PRAGMA busy_timeout={BUSY_MS}")

    def _succeeded(self, written: _Written) -> None:
        self._error = None
        self._commits += 1
        self._rows_written += len(written.batch.rows)
        self._rows_deleted += written.deleted
        self._books = written.books
        self._in_file = written.packed
        self._state_crcs |= written.state_crcs

    def _failed(
        self, batch: _Batch, written: _Written | None, cause: BaseException
    ) -> JournalError:
        """Takes the transaction back and buffers its rows again, before what came meanwhile."""
        if isinstance(cause, _NotRecorded) and written is not None:
            # Its rows are stored, but a loss of them would not be noticed: an error all the same,
            # until a later transaction is recorded.
            self._succeeded(written)
            cause = cause.__cause__ or cause
        else:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back already
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            batch.extend(self._buffer)
            self._buffer = batch
        self._failed_commits += 1
        self._error = self._translate(cause)
        self._error.__cause__ = cause
        self._last_error = str(self._error)
        return self._error

    # --- group commit ---

    def _group_commit(self, loop: asyncio.AbstractEventLoop) -> None:
        """One transaction for all that is buffered; answers, or with `power` will answer, all
        that wait."""
        self._scheduled = False
        waiters, self._waiters = self._waiters, []
        if self._worker is None or not self.pending:
            _answer(waiters, self._commit_inline())
            self._checkpoint_later(loop)
            return
        batch, self._buffer = self._buffer, _Batch()
        written: _Written | None = None
        try:
            written = self._write(batch)
            commit = self._worker.submit(self._commit, written)
        except BaseException as e:  # as above; and its waiters must hear of it
            _answer(waiters, self._failed(batch, written, e))
            if not isinstance(e, Exception):
                raise
            return
        self._fly(loop, _Flight(written, commit, waiters))

    def _fly(self, loop: asyncio.AbstractEventLoop, flight: _Flight) -> None:
        self._flight = flight
        flight.commit.add_done_callback(partial(self._wake, loop, flight))

    def _wake(self, loop: asyncio.AbstractEventLoop, flight: _Flight, _: Future[None]) -> None:
        """In the worker: the loop takes over."""
        with contextlib.suppress(RuntimeError):  # a closed loop; flush() or close() will land it
            loop.call_soon_threadsafe(self._landed, loop, flight)

    def _landed(self, loop: asyncio.AbstractEventLoop, flight: _Flight) -> None:
        if self._flight is flight:  # else flush() was faster
            self._land()
        if self._loop is not loop:
            return
        if self._waiters and self._flight is None and not self._scheduled:
            self._group_commit(loop)
        else:
            self._checkpoint_later(loop)

    def _land(self) -> None:
        """Waits for the COMMIT in the worker, if there is one, and draws the conclusions."""
        flight = self._flight
        if flight is None:
            return
        wait_for([flight.commit])
        self._flight = None
        cause = flight.commit.exception()
        if flight.written is None:
            _answer(flight.waiters, self._error)  # a checkpoint, which the next one repeats
        elif cause is None:
            self._succeeded(flight.written)
            _answer(flight.waiters, None)
        else:
            _answer(flight.waiters, self._failed(flight.written.batch, flight.written, cause))

    def _checkpoint_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """The log is emptied, too, when no further transaction comes."""
        if self._checkpoint_timer is None and self._checkpointed_commits != self._commits:
            self._checkpoint_timer = loop.call_later(CHECKPOINT_S, self._checkpoint_idle, loop)

    def _checkpoint_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        self._checkpoint_timer = None
        if self._closed or self._checkpointed_commits == self._commits:
            return
        if self._flight is not None or self._scheduled:
            self._checkpoint_later(loop)
        elif self._worker is not None:
            self._fly(loop, _Flight(None, self._worker.submit(self._checkpoint), []))
        else:
            with contextlib.suppress(sqlite3.Error):  # a full disk; the next one repeats it
                self._checkpoint()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop before this one is gone, and its waiters with it."""
        if self._flight is not None:
            self._flight.waiters.clear()
            self._land()
        self._waiters.clear()
        self._scheduled = False
        self._checkpoint_timer = None
        self._loop = loop

    # --- the file ---

    def _connect(self) -> sqlite3.Connection:
        # The COMMIT of `power` runs in the worker, never at the same time as another call.
        db = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000
        )
        try:
            db.execute("PRAGMA cache_size=-1000")
            # What is deleted is somebody's text: it must not lie in free pages. Costs nothing that
            # can be measured (7.5 µs a step written and deleted, with or without).
            db.execute("PRAGMA secure_delete=ON")
            limit = CHECKPOINT_BYTES[self.durability]
            db.execute(f"PRAGMA wal_autocheckpoint={limit // PAGE_BYTES}")
            db.execute(f"PRAGMA journal_size_limit={2 * limit}")
            db.execute(f"PRAGMA synchronous={'OFF' if self.durability == 'process' else 'FULL'}")
            (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise JournalError(
                    f"{self.path}: SQLite uses journal mode {mode!r} here instead of 'wal'; "
                    "set pool.journal_dir to a folder on a local disk"
                )
        except BaseException:  # whatever it was: the file must not stay open
            db.close()
            raise
        return db

    def _is_new(self) -> bool:
        """Whether there is no journal yet. What `_create` left when it was cut short is none.

        Raises:
            JournalCorruptError: a file is there without those that belong to it.
        """
        if self.path.exists() and self.path.stat().st_size > 0:
            return False
        acked = self._read_acked()
        log = self.folder / LOG_NAME
        has_log = log.exists() and log.stat().st_size > 0
        if has_log or (acked is not None and acked.books.sequence > 0):
            lost = "" if acked is None else f" {lost_between(None, acked.books)}"
            raise self._corrupt(f"the file is missing or empty, and its content is gone.{lost}")
        return True

    def _create(self) -> None:
        """First the record, then the file, each by a rename: a file without a record is damage."""
        books = Books(uuid.uuid4().bytes)
        draft = self.folder / f"{ACKED_NAME}.new"
        with open(draft, "wb", opener=_private) as file:
            file.write(_acked(books.pack(), self._boot, self.durability == "power", False))
            if self.durability == "power":
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, self.folder / ACKED_NAME)
        new = self.folder / f"{FILE_NAME}.new"
        for suffix in ("", "-wal", "-shm", "-journal"):  # of a process that was killed here
            Path(f"{new}{suffix}").unlink(missing_ok=True)
        os.close(_private(str(new), os.O_CREAT | os.O_WRONLY))  # SQLite's own would be 0644
        self._reading(lambda: _fill(new, books))
        if self.durability == "power":
            _fsync(new)
        os.replace(new, self.path)

    def _verify(self) -> tuple[Books, dict[str, int], int]:
        """Looks whether the file has what was acknowledged, before anything is changed: the books,
        the CRCs of the states, and the id of the next row."""
        version = self._read_version()
        if version != SCHEMA_VERSION:
            raise JournalVersionError(
                f"{self.path} has schema version {version}, this release reads and writes "
                f"{SCHEMA_VERSION}; start the release that wrote it, or begin anew: set "
                f"run.resume=never, or move {self.folder} aside"
            )
        with contextlib.closing(self._connect_to_look()) as db:
            found = db.execute(
                "SELECT key, crc, value FROM states WHERE key = ?", (_BOOKS,)
            ).fetchone()
            crcs = dict(db.execute("SELECT key, crc FROM states"))
        books = read_books(found)
        if books is None:
            raise self._corrupt("the journal's own state is damaged or missing")
        crcs.pop(_BOOKS, None)
        if not all(isinstance(key, str) and isinstance(crc, int) for key, crc in crcs.items()):
            raise self._corrupt("the keys of the states are damaged")
        acked = self._read_acked()
        if acked is None:
            raise self._corrupt(
                f"{ACKED_NAME}, which says what was acknowledged, is missing, so that lost "
                "transactions could not be told"
            )
        self._compare(books, acked)
        # The ids of lost rows are not given again.
        return books, crcs, max(books.next_row, acked.books.next_row)

    def _compare(self, books: Books, acked: Acked) -> None:
        """Raises if something that was acknowledged, and promised, is not in the books."""
        if books.journal != acked.books.journal:
            raise self._corrupt(f"{ACKED_NAME} belongs to another journal")
        if books.sequence < acked.books.sequence:
            lost = lost_between(books, acked.books)
            if acked.power or acked.closed or acked.boot == self._boot:
                raise self._corrupt(
                    f"{lost} The write-ahead log, or the file, was damaged, cut or removed"
                )
            logger.warning(
                "%s: %s The machine was restarted since, and durability 'process' does not "
                "survive that; set pool.durability to 'power' for one that does",
                self.path,
                lost,
            )
        if books.sequence == acked.books.sequence and books != acked.books:
            raise self._corrupt(
                f"transaction {books.sequence} is not the one that was acknowledged"
            )

    def _read_acked(self) -> Acked | None:
        try:
            return read_acked(self.folder)
        except ValueError as e:
            raise self._corrupt(
                f"{e}: it says what was acknowledged, so that lost transactions could not be told"
            ) from e

    def _read_version(self) -> int:
        with contextlib.closing(self._connect_to_look()) as db:
            version: int = db.execute("PRAGMA user_version").fetchone()[0]
            return version

    def _connect_to_look(self) -> sqlite3.Connection:
        """A connection that leaves file and log as they are: one that may write would cut the log
        of a damaged journal when it closes."""
        return sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, isolation_level=None)

    def _select(self, rows: Sequence[int]) -> list[bytes]:
        """Payloads of stored rows, in one read transaction."""
        payloads: list[bytes] = []
        db = self._reader
        db.execute("BEGIN")
        try:
            for row in rows:
                found = db.execute(
                    "SELECT payload_crc, payload FROM rows WHERE row = ?", (row,)
                ).fetchone()
                if found is None:
                    raise self._corrupt(f"row {row} is not there: deleted before, or lost")
                crc, payload = found
                if crc is None and payload is None:
                    payloads.append(b"")
                elif isinstance(payload, bytes) and crc == crc32(payload, row & 0xFFFFFFFF):
                    payloads.append(payload)
                else:
                    raise self._corrupt(f"the payload of row {row} is not what was written")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        return payloads

    def _head_crc(self, row: int, channel: str, kind: str, head: bytes) -> int:
        names = self._name_crcs.get((channel, kind))
        if names is None:
            names = crc32(f"{channel}\0{kind}".encode())
            self._name_crcs[channel, kind] = names
        return crc32(head, names ^ (row & 0xFFFFFFFF))

    def _fetch(self, sql: str, *args: int) -> list[tuple[Any, ...]]:
        return self._reading(lambda: self._reader.execute(sql, args).fetchall())

    def _reading(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except JournalError:
            raise
        except (sqlite3.Error, OSError) as e:
            raise self._translate(e) from e

    def _translate(self, e: BaseException) -> JournalError:
        if isinstance(e, JournalError):
            return e
        if isinstance(e, OSError) and e.errno in _NO_SPACE:
            return JournalFullError(
                f"{self.folder}: the disk takes no more ({e}); free space under {self.folder}"
            )
        if isinstance(e, OSError):
            return JournalError(f"{e}; check that {self.folder} is writable and its disk is sound")
        if not isinstance(e, sqlite3.Error):
            return JournalError(f"{self.path}: the transaction failed with {type(e).__name__}: {e}")
        if isinstance(e, sqlite3.ProgrammingError):
            return JournalError(f"{self.path}: {e}; the journal was closed, open a new one")
        extended: int | None = getattr(e, "sqlite_errorcode", None)
        name: str = getattr(e, "sqlite_errorname", type(e).__name__)
        code = None if extended is None else extended & 0xFF
        if code == sqlite3.SQLITE_FULL or (
            code == sqlite3.SQLITE_IOERR
            and extended not in (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)
        ):
            kept = len(self._buffer.rows)
            return JournalFullError(
                f"{self.path}: the disk takes no more ({name}: {e}); free space under "
                f"{self.folder}" + (f". {kept} rows are kept in memory until then" if kept else "")
            )
        if code == sqlite3.SQLITE_BUSY:
            return JournalLockedError(
                f"{self.path}: another process is in the middle of a write ({name}: {e}); stop it"
            )
        if code in _CORRUPT or extended == sqlite3.SQLITE_IOERR_SHORT_READ:
            return self._corrupt(f"{name}: {e}")
        return JournalError(
            f"{self.path}: {name}: {e}; check that the folder is writable and its disk is sound"
        )

    def _corrupt(self, what: str) -> JournalCorruptError:
        return JournalCorruptError(
            f"{self.path}: {what}. `stepwell data salvage {self.folder}` makes a usable journal of "
            "what can be read and says what is lost; or restore the folder from a copy, or move "
            "it aside to start empty"
        )


def is_sound_head(row: int, channel: Any, kind: Any, head: Any, crc: Any) -> bool:
    try:
        return bool(crc == crc32(head, crc32(f"{channel}\0{kind}".encode()) ^ (row & 0xFFFFFFFF)))
    except (TypeError, AttributeError):  # a damaged type: NULL or text for bytes
        return False


def is_sound_payload(row: int, payload: Any, crc: Any) -> bool:
    try:
        return bool(crc == (None if payload is None else crc32(payload, row & 0xFFFFFFFF)))
    except TypeError:  # as above
        return False


def _state_crc(key: str | int, value: bytes) -> int:
    return crc32(value, crc32(str(key).encode()))


def states_sum(states: Mapping[str, bytes]) -> tuple[int, int]:
    """How many there are, and the sum of their CRCs, as `Books` have it."""
    return len(states), sum(_state_crc(*state) for state in states.items()) & SUM_MASK


def is_sound_state(key: Any, crc: Any, value: Any) -> bool:
    return (
        (isinstance(key, str) or key == _BOOKS)
        and isinstance(value, bytes)
        and bool(crc == _state_crc(key, value))
    )


def _answer(waiters: _Waiters, error: JournalError | None) -> None:
    for waiter in waiters:
        if not waiter.done():  # a cancelled caller
            waiter.set_result(error)


def read_books(found: tuple[Any, Any, Any] | None) -> Books | None:
    """The books in a row of `states`; None if they are damaged."""
    if found is None or not is_sound_state(*found) or len(found[2]) != _BOOKS_FORMAT.size:
        return None
    return Books._make(_BOOKS_FORMAT.unpack(found[2]))


def lost_between(found: Books | None, acked: Books) -> str:
    """What was acknowledged and is not there."""
    first = 1 if found is None else found.sequence + 1
    row = 0 if found is None else found.next_row
    rows = "no new rows" if row == acked.next_row else f"rows {row} to {acked.next_row - 1}"
    held = 0 if found is None else found.rows
    return (
        f"Acknowledged transactions {first} to {acked.sequence} are lost: {rows}, and deletions; "
        f"{held} rows are there, {acked.rows} should be."
    )


def _fill(path: Path, books: Books) -> None:
    """Makes an empty database of `path`."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        # Both have to come before the first page.
        db.execute(f"PRAGMA page_size={PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("PRAGMA synchronous=OFF")
        db.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            db.execute(statement)
        packed = books.pack()
        db.execute(_PUT, (_BOOKS, _state_crc(_BOOKS, packed), packed))
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute("COMMIT")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _make_folder(folder: Path) -> list[Path]:
    """Creates `folder`, for its owner only; returns the parents that got a new entry."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise JournalError(
            f"the journal's folder {folder} cannot be created ({e}); "
            "set pool.journal_dir to one that can be written"
        ) from e
    return [path.parent for path in missing]


def holder(folder: Path) -> str | None:
    """The process that has the journal in `folder` open; None if nobody has."""
    try:
        os.close(_take(folder))
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _pid_of_holder(folder)
    return None


def lock_folder(folder: Path, timeout_s: float) -> int:
    """Takes the folder for this process; the kernel lets go of it when the process dies.

    The lock is on the folder, not on a file in it, which somebody might remove; nor on the
    database, because closing a second descriptor of that one would drop SQLite's own locks.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _take(folder)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise JournalLockedError(
                f"{folder} is in use by process {_pid_of_holder(folder)} (waited {timeout_s} s); "
                "stop that process, or set pool.journal_dir to another folder"
            ) from None
        except OSError as e:
            raise JournalError(
                f"{folder} cannot be locked ({e}); set pool.journal_dir to a local disk"
            ) from e


def _take(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:  # whatever stops it, the descriptor is not kept
        os.close(fd)
        raise
    return fd


def _pid_of_holder(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # only for a message
        acked = read_acked(folder)
        if acked is not None:
            return str(acked.pid)
    return "unknown"


def _fsync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power failure."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise JournalError(
            f"{path} cannot be synced ({e}), so what is in it might not survive a power "
            "failure; set pool.journal_dir to a local disk, or durability to 'process'"
        ) from e
