"""The pool's memory across restarts: rows of live groups in one SQLite file.

Owns durability: what is written when, what an acknowledged change survives, what a full or broken
disk looks like. Knows nothing of the pool's logic: a row is a kind, a head and a payload, all
opaque. It keeps rows of *live* groups only; the pool deletes those of a group that has left, and
their pages are used again::

    append() ──► buffer ──► one transaction ──► pool.sqlite3-wal ──► pool.sqlite3
                  │  ▲        (flush, or all waiters of committed())    (checkpoint, inside SQLite)
                  │  └─ back, in order, if the transaction failed; the next one takes them again
                  └─ deleted before its transaction: never written

What a finished transaction survives (`durability`):

- `process`: the process killed at any instant. The bytes are with the operating system; nothing
  waits for the disk, and the transaction runs on the caller's thread (0.15 ms for 16 rows of
  2 kB, less than handing it to a thread costs). A power failure may leave the file unreadable.
- `power`: the machine losing power. Only the COMMIT, which waits for the disk, runs in a thread;
  meanwhile further rows gather, and the next transaction takes them all.

A worked example: of 64 producers that append in one iteration of the loop and await `committed()`,
the first schedules a transaction behind what is ready to run, so that one takes all 64.

A byte that changed on disk is found, not served: heads and payloads carry a CRC-32, and each
transaction stores how many rows and states there should be. One thread (or loop) uses a Journal;
one process uses a folder, by a lock that the kernel releases when the process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalVersionError,
)

FILE_NAME = "pool.sqlite3"
LOCK_NAME = "pool.lock"
SCHEMA_VERSION = 1

PAGE_BYTES = 8192
"""Steps take 1 to 4 kB. At 4 kB a page holds one row and half of it is wasted; larger pages make
the deletion of single rows dearer (each rewrites its page)."""

CHECKPOINT_BYTES = {"process": 2 << 20, "power": 8 << 20}
"""The write-ahead log is moved into the file at this length: about 1 ms on the caller's thread,
or, with `power`, two waits for the disk in the worker."""

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
_SCAN = (
    "SELECT row, channel, kind, head_crc, payload_crc, head, length(payload), {} "
    "FROM rows WHERE row > ? ORDER BY row LIMIT ?"
)

_BOOKS = 0
"""Key of the journal's own state. The caller's keys are text, so this number is none of them."""
_BOOKS_FORMAT = struct.Struct("<qqq")  # next row, rows stored, states stored

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
class _Flight:
    """A transaction whose COMMIT is in the worker thread."""

    batch: _Batch
    deleted: int
    commit: Future[None]
    waiters: _Waiters


class Journal:
    """Rows and states in `folder`; created if the folder holds none. Not thread-safe.

    Args:
        folder: on a local disk; created with its parents.
        durability: what a finished transaction survives (module docstring).
        lock_timeout_s: seconds to wait for a process that is about to die.

    Raises:
        JournalLockedError: another live process has the folder open.
        JournalVersionError: another schema version wrote it.
        JournalCorruptError: the file is damaged.
        JournalFullError: no space to create it.
        JournalError: the folder cannot be created, opened or written.
    """

    def __init__(
        self,
        folder: Path,
        durability: Literal["process", "power"],
        *,
        lock_timeout_s: float = 5.0,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.path = self.folder / FILE_NAME
        self.durability = durability
        self._buffer = _Batch()
        self._flight: _Flight | None = None
        self._error: JournalError | None = None
        self._closed = False
        # Group commit: who waits for the next transaction, and the loop that will run it.
        self._waiters: _Waiters = []
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name_crcs: dict[tuple[str, str], int] = {}
        self._commits = self._failed_commits = self._rows_written = self._rows_deleted = 0
        self._last_error: str | None = None
        made = _make_folder(self.folder)
        self._lock = _lock(self.folder, lock_timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock)
            self._db = self._reading(self._connect)
            undo.callback(self._db.close)
            self._reading(self._create_or_check)
            self._next_row, self._stored, self._n_states = self._reading(self._read_books)
            self._keys = self._reading(self._read_keys)
            # Reading must not wait for a COMMIT that is under way on the writing connection.
            self._reader = self._reading(self._connect) if self.durability == "power" else self._db
            if durability == "power":
                for path in (self.folder, *made):
                    _fsync(path)
            undo.pop_all()
        self._max_row_bytes = self._db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - PAGE_BYTES
        self._worker: ThreadPoolExecutor | None = None
        if durability == "power":
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="journal-commit")

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
        commits, stored = self._commits, self._stored
        n_rows, last = 0, -1
        while True:
            chunk = self._fetch(sql, last, limit)
            for row, channel, kind, head_crc, payload_crc, head, n_bytes, payload in chunk:
                try:
                    sound = row > last and head_crc == self._head_crc(row, channel, kind, head)
                    sound = sound and (payload_crc is None) == (n_bytes is None)
                    if payloads and n_bytes is not None:
                        sound = sound and payload_crc == crc32(payload, row & 0xFFFFFFFF)
                except (TypeError, AttributeError):  # a damaged type: NULL or text for bytes
                    sound = False
                if not sound:
                    raise self._corrupt(f"row {row} does not have the content it was written with")
                last = row
                n_rows += 1
                yield Row(row, channel, kind, head, payload, n_bytes or 0)
            if len(chunk) < limit:
                break
        unchanged = commits == self._commits and self._flight is None
        if unchanged and n_rows != stored:
            raise self._corrupt(f"{n_rows} rows can be read but {stored} were written")

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
            if not _sound_state(key, crc, value):
                raise self._corrupt(f"state {key!r} does not have the content it was written with")
            states[key] = value
        if len(states) != self._n_states:
            raise self._corrupt(
                f"{len(states)} states can be read but {self._n_states} were written"
            )
        return states

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of `rows`, in this order, wherever they are: buffered, being committed or
        stored. A row without one gives b"". Deleted rows must not be asked for.

        Raises:
            JournalCorruptError: a payload is damaged, or its row is not there.
        """
        waiting = [self._buffer.rows]
        if self._flight is not None:
            waiting.append(self._flight.batch.rows)
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
    def size_bytes(self) -> int:
        """Bytes on disk: the file and its write-ahead log."""
        total = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{self.path}{suffix}").st_size
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
            "rows_stored": self._stored,
            "rows_buffered": len(self._buffer.rows),
            "rows_in_commit": len(self._flight.batch.rows) if self._flight is not None else 0,
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
            if self._worker is not None:
                self._worker.shutdown()
            self._reader.close()
            self._db.close()
            os.close(self._lock)

    # --- transactions ---

    def _commit_inline(self) -> JournalError | None:
        if not self.pending:
            return None
        batch, self._buffer = self._buffer, _Batch()
        try:
            deleted = self._write(batch)
            self._commit(bool(batch.deletes))
        except BaseException as e:  # also an interrupt: the batch must go back to the buffer
            error = self._failed(batch, e)
            if not isinstance(e, Exception):
                raise
            return error
        self._succeeded(batch, deleted)
        return None

    def _write(self, batch: _Batch) -> int:
        """Everything but the COMMIT. Returns how many rows were there to be deleted."""
        execute, executemany = self._db.execute, self._db.executemany
        execute("BEGIN IMMEDIATE")
        deleted = 0
        if batch.deletes:  # first, so that the new rows find free pages
            deleted = executemany(_DELETE, [(row,) for row in sorted(batch.deletes)]).rowcount
        if batch.rows:
            executemany(_INSERT, batch.rows.values())
        n_states = self._n_states + len(batch.states.keys() - self._keys)
        books = _BOOKS_FORMAT.pack(
            self._next_row, self._stored + len(batch.rows) - deleted, n_states
        )
        # Written by every transaction. One that failed may have left frames in the log that look
        # committed after a crash; whatever comes next has to write over them.
        executemany(
            _PUT,
            [
                (_BOOKS, _state_crc(_BOOKS, books), books),
                *((key, _state_crc(key, value), value) for key, value in batch.states.items()),
            ],
        )
        return deleted

    def _commit(self, deletes: bool) -> None:
        self._db.execute("COMMIT")
        if not deletes:
            return
        # The rows are safe; giving space back is a courtesy that the next transaction repeats.
        with contextlib.suppress(sqlite3.Error):
            (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
            if free > SLACK_PAGES:
                (pages,) = self._db.execute("PRAGMA page_count").fetchone()
                if 2 * free > pages:
                    # Not execute(): that takes one step, which is one page.
                    self._db.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")

    def _succeeded(self, batch: _Batch, deleted: int) -> None:
        self._error = None
        self._commits += 1
        self._rows_written += len(batch.rows)
        self._rows_deleted += deleted
        self._stored += len(batch.rows) - deleted
        if not batch.states.keys() <= self._keys:
            self._keys |= batch.states.keys()
            self._n_states = len(self._keys)

    def _failed(self, batch: _Batch, cause: BaseException) -> JournalError:
        """Takes the transaction back and buffers its rows again, before what came meanwhile."""
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
            return
        batch, self._buffer = self._buffer, _Batch()
        try:
            deleted = self._write(batch)
            commit = self._worker.submit(self._commit, bool(batch.deletes))
        except BaseException as e:  # as above; and its waiters must hear of it
            _answer(waiters, self._failed(batch, e))
            if not isinstance(e, Exception):
                raise
            return
        self._flight = _Flight(batch, deleted, commit, waiters)
        commit.add_done_callback(partial(self._wake, loop, self._flight))

    def _wake(self, loop: asyncio.AbstractEventLoop, flight: _Flight, _: Future[None]) -> None:
        """In the worker: the loop takes over."""
        with contextlib.suppress(RuntimeError):  # a closed loop; flush() or close() will land it
            loop.call_soon_threadsafe(self._landed, loop, flight)

    def _landed(self, loop: asyncio.AbstractEventLoop, flight: _Flight) -> None:
        if self._flight is flight:  # else flush() was faster
            self._land()
        if self._waiters and self._flight is None and not self._scheduled and self._loop is loop:
            self._group_commit(loop)

    def _land(self) -> None:
        """Waits for the COMMIT in the worker, if there is one, and draws the conclusions."""
        flight = self._flight
        if flight is None:
            return
        wait_for([flight.commit])
        self._flight = None
        cause = flight.commit.exception()
        if cause is None:
            self._succeeded(flight.batch, flight.deleted)
            _answer(flight.waiters, None)
        else:
            _answer(flight.waiters, self._failed(flight.batch, cause))

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop before this one is gone, and its waiters with it."""
        if self._flight is not None:
            self._flight.waiters.clear()
            self._land()
        self._waiters.clear()
        self._scheduled = False
        self._loop = loop

    # --- the file ---

    def _connect(self) -> sqlite3.Connection:
        # The COMMIT of `power` runs in the worker, never at the same time as another call.
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA cache_size=-1000")
            # Debian's SQLite overwrites deleted rows with zeros, which nobody needs here.
            db.execute("PRAGMA secure_delete=OFF")
            limit = CHECKPOINT_BYTES[self.durability]
            db.execute(f"PRAGMA wal_autocheckpoint={limit // PAGE_BYTES}")
            db.execute(f"PRAGMA journal_size_limit={2 * limit}")
            db.execute(f"PRAGMA synchronous={'OFF' if self.durability == 'process' else 'FULL'}")
        except BaseException:  # whatever it was: the file must not stay open
            db.close()
            raise
        return db

    def _create_or_check(self) -> None:
        db = self._db
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version != SCHEMA_VERSION and (version or tables):
            raise JournalVersionError(
                f"{self.path} has schema version {version}, this release reads and writes "
                f"{SCHEMA_VERSION}; start the release that wrote it, or move {self.folder} aside "
                "to start empty"
            )
        if not version:  # both have to come before the first page
            db.execute(f"PRAGMA page_size={PAGE_BYTES}")
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise JournalError(
                f"{self.path}: SQLite uses journal mode {mode!r} here instead of 'wal'; "
                "set data_pool.journal_dir to a folder on a local disk"
            )
        if version:
            return
        books = _BOOKS_FORMAT.pack(0, 0, 0)
        db.execute("BEGIN IMMEDIATE")
        for statement in filter(str.strip, _SCHEMA.split(";")):
            db.execute(statement)
        db.execute(_PUT, (_BOOKS, _state_crc(_BOOKS, books), books))
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _read_books(self) -> tuple[int, int, int]:
        found = self._db.execute(
            "SELECT key, crc, value FROM states WHERE key = ?", (_BOOKS,)
        ).fetchone()
        if found is None or not _sound_state(*found) or len(found[2]) != _BOOKS_FORMAT.size:
            raise self._corrupt("the journal's own state is damaged or missing")
        next_row, stored, n_states = _BOOKS_FORMAT.unpack(found[2])
        return next_row, stored, n_states

    def _read_keys(self) -> set[str]:
        return {key for (key,) in self._db.execute("SELECT key FROM states") if key != _BOOKS}

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
        except sqlite3.Error as e:
            raise self._translate(e) from e

    def _translate(self, e: BaseException) -> JournalError:
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
        if code in _CORRUPT or extended == sqlite3.SQLITE_IOERR_SHORT_READ:
            return self._corrupt(f"{name}: {e}")
        return JournalError(
            f"{self.path}: {name}: {e}; check that the folder is writable and its disk is sound"
        )

    def _corrupt(self, what: str) -> JournalCorruptError:
        return JournalCorruptError(
            f"{self.path}: {what}; restore {self.folder} from a copy, or move it aside to start "
            "empty (`sqlite3 pool.sqlite3 .recover` saves what can be read)"
        )


def _state_crc(key: str | int, value: bytes) -> int:
    return crc32(value, crc32(str(key).encode()))


def _sound_state(key: Any, crc: Any, value: Any) -> bool:
    return (
        (isinstance(key, str) or key == _BOOKS)
        and isinstance(value, bytes)
        and bool(crc == _state_crc(key, value))
    )


def _answer(waiters: _Waiters, error: JournalError | None) -> None:
    for waiter in waiters:
        if not waiter.done():  # a cancelled caller
            waiter.set_result(error)


def _make_folder(folder: Path) -> list[Path]:
    """Creates `folder`; returns the parents that got a new entry."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise JournalError(
            f"the journal's folder {folder} cannot be created ({e}); "
            "set data_pool.journal_dir to one that can be written"
        ) from e
    return [path.parent for path in missing]


def _lock(folder: Path, timeout_s: float) -> int:
    """Takes the folder for this process; the kernel lets go of it when the process dies."""
    path = folder / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise JournalError(f"{path} cannot be opened ({e}); check the folder's rights") from e
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise JournalLockedError(
                f"{folder} is in use by process {holder} (waited {timeout_s} s); stop that "
                "process, or set data_pool.journal_dir to another folder"
            ) from None
        except OSError as e:
            os.close(fd)
            raise JournalError(
                f"{path} cannot be locked ({e}); set data_pool.journal_dir to a local disk"
            ) from e
    with contextlib.suppress(OSError):  # only for the message above; the disk may be full
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _fsync(folder: Path) -> None:
    """Makes the folder's entries survive a power failure."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise JournalError(
            f"{folder} cannot be synced ({e}), so new files in it might not survive a power "
            "failure; set data_pool.journal_dir to a local disk, or durability to 'process'"
        ) from e
