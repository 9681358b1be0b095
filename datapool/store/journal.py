"""This module keeps rows of live groups in a log so that what the pool acknowledged outlives it.

Owns durability: what is written when, what an acknowledged change survives, what a full or broken
disk looks like. Knows nothing of the pool's logic: a row is a kind, a head and a payload, all
opaque::

    append() ──► buffer ──flush: one transaction──► end of the newest segment ──► pool.acked
                  │  ▲
                  │  └─ back, in order, if the transaction failed; the next one takes them again
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stepwell.datapool.errors import JournalError, JournalFencedError
from stepwell.datapool.store.log import Batch, Durability, Log
from stepwell.datapool.store.segments import Row, encode_record, head_of

ERASE_S = 3000.0
"""Seconds after which a dead row's segment is cleaned, whatever else is in it."""
SCRUB_S = 1.0
"""… after `scrub`: what dies meanwhile goes with it."""
PAUSE_S = 0.005
"""Between two slices when nothing else is written; others go on."""
RETRY_S = 1.0
"""… while the disk takes nothing."""


class Journal:
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
        self._log = Log(self.folder, durability, lock_timeout_s, take_over)
        self._next_row = self._log.last.next_row
        self._buffer = Batch()
        self.about_to_commit: Callable[[], None] = lambda: None
        """Called before each transaction: what it puts is in it."""
        self._error: JournalError | None = None
        self._closed = False
        self._commits = self._failed_commits = self._rows_written = self._rows_deleted = 0
        self._last_error: str | None = None
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="journal")
        # Erasing: what died is erased with the first transaction after this time.
        self._erase_at = time.monotonic() + SCRUB_S if self._log.has_dead else None
        self._is_asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the timer."""

    # --- writing ---

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        """Buffers a row and returns its id: larger than every id before, also after a restart.

        Args:
            payload: in pieces.
        """
        row = self._next_row
        self._buffer.rows[row] = encode_record(row, channel, kind, head, *payload)
        self._next_row = row + 1
        return row

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None:
        """Buffers a row under an id that it has here already, with other content, or had in another
        journal."""
        self._buffer.put(row, encode_record(row, channel, kind, head, *payload))

    def delete(self, rows: Iterable[int]) -> None:
        """Buffers the deletion of these rows; ids that are not stored are passed over."""
        for row in rows:
            self._buffer.delete(row)

    def put_state(self, key: str, value: bytes) -> None:
        """Buffers `value` under `key`, in place of what was there."""
        key.encode()  # a key that is no Unicode must fail here, not in the transaction
        self._buffer.states[key] = value

    def scrub(self) -> None:
        """Some seconds from now no file has a byte of a row that was deleted by now; at the latest
        when `close` returns."""
        self._is_asked = True
        self._erase_in(SCRUB_S)
        self._go_on()

    @property
    def pending(self) -> bool:
        """True if something is not yet durable: buffered, or failed before."""
        return bool(self._buffer) or self._error is not None

    def flush(self) -> None:
        """Commits all that is buffered, in one transaction.

        Raises:
            JournalFullError, JournalCorruptError, JournalError: nothing was written; everything
                stays buffered, and the next transaction takes it.
        """
        if self.pending:
            self._commit()
        self._go_on()

    def check(self) -> None:
        """Call before a new change: after a failed transaction, tries it again.

        Raises:
            JournalError: it still fails, so that a change could not be made durable either.
        """
        if self._error is not None:
            self.flush()

    # --- reading ---

    def rows(self) -> Iterator[Row]:
        """The stored rows in order of their ids; what is only buffered is not among them. Nothing
        may be written before the last one was taken.

        Raises:
            JournalCorruptError: a row is damaged or missing.
        """
        return self._log.rows()

    def states(self) -> dict[str, bytes]:
        """The stored states; what is only buffered is not among them."""
        return dict(self._log.states)

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of `rows`, in this order, buffered or stored. A row without one gives b"".
        Deleted rows must not be asked for.

        Raises:
            JournalCorruptError: a payload is damaged, or its row is not there.
        """
        records = self._buffer.rows
        stored = self._log.payloads([row for row in rows if row not in records])
        return [b"".join(records[row][1:]) if row in records else stored[row] for row in rows]

    def heads(self, rows: Sequence[int]) -> list[tuple[str, bytes]]:
        """Kinds and heads of `rows`. Otherwise as `read`."""
        records = self._buffer.rows
        stored = self._log.stored_heads([row for row in rows if row not in records])
        return [head_of(records[row][0]) if row in records else stored[row] for row in rows]

    def places(self, rows: Iterable[int]) -> list[tuple[int, int, int, int]] | None:
        """Row, segment, offset and size of stored rows; None if one of them is only buffered."""
        return self._log.places(rows)

    @property
    def identity(self) -> str:
        """32 hex digits that no other journal has; made with it, and never changed."""
        return self._log.last.journal.hex()

    @property
    def opening(self) -> int:
        """Number of times that it was opened, this time included."""
        return self._log.last.opening

    def statistics(self) -> dict[str, Any]:
        """Counts since the journal was opened, and what it holds now."""
        return {
            "commits": self._commits,
            "failed_commits": self._failed_commits,
            "rows_written": self._rows_written,
            "rows_deleted": self._rows_deleted,
            "rows_per_commit": self._rows_written / self._commits if self._commits else 0.0,
            "sequence": self._log.last.sequence,
            "rows_stored": self._log.index.n_rows,
            "rows_buffered": len(self._buffer.rows),
            "last_error": self._last_error,
            "file_bytes": self._log.index.n_bytes,
            "free_bytes": self._log.index.n_bytes - self._log.index.live_bytes,
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
            if self._is_asked or self._log.cleaner.is_erasing:
                self.erase()
        finally:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            self._remover.shutdown()
            self._log.close()

    # --- transactions ---

    def _commit(self) -> None:
        self.about_to_commit()
        batch, self._buffer = self._buffer, Batch()
        try:
            if self._closed:
                raise JournalError(f"{self.folder}: the journal was closed, open a new one")
            n_deleted = self._log.commit(batch, self._next_row)
        except BaseException as e:  # also an interrupt: the batch must go back to the buffer
            error = self._failed(batch, e)
            if not isinstance(e, Exception):
                raise
            raise error from e
        self._error = None
        self._commits += 1
        self._rows_written += len(batch.rows)
        self._rows_deleted += n_deleted
        if n_deleted:
            self._erase_in(ERASE_S)
        if self._erase_at is not None and self._erase_at <= time.monotonic():
            self._begin_to_erase()

    def _failed(self, batch: Batch, cause: BaseException) -> JournalError:
        """Buffers the rows again, before what came meanwhile."""
        batch.extend(self._buffer)
        self._buffer = batch
        self._log.cleaner.again()
        self._failed_commits += 1
        self._error = self._log.translate(cause, len(batch.rows))
        self._last_error = str(self._error)
        return self._error

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
        while self._log.cleaner.is_erasing:
            self._commit()
        if self._log.cleaner.unreadable:
            raise self._log.corrupt("a segment cannot be read, so what was deleted is still there")
        if (remove := self._log.removal()) is not None:
            remove()

    def _begin_to_erase(self) -> None:
        self._erase_at, self._is_asked = None, False
        self._log.erase()

    def _erase_in(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._erase_at = at if self._erase_at is None else min(at, self._erase_at)

    def _go_on(self) -> None:
        """Removes what counts no longer, and sees to it that what is left to be cleaned is, also
        when nothing more is written: on the loop, if there is one; without, `close` does it."""
        remove = self._log.removal()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if remove is not None:
                remove()
            return
        if remove is not None:
            self._remover.submit(remove)
        if self._closed or isinstance(self._error, JournalFencedError):
            return
        if self._log.is_cleaning:
            when = loop.time() + (PAUSE_S if self._error is None else RETRY_S)
        elif self._erase_at is not None:
            when = loop.time() + max(0.0, self._erase_at - time.monotonic())
        else:
            return
        if self._timer is not None and loop is self._loop:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._loop, self._timer = loop, loop.call_at(when, self._tidy)

    def _tidy(self) -> None:
        """Erases what is due, unless a flush was faster."""
        self._timer = None
        is_due = self._erase_at is not None and self._erase_at <= time.monotonic()
        if self._closed:
            return
        if self.pending or is_due or self._log.is_cleaning:
            with contextlib.suppress(JournalError):  # it is tried again, and `check` tells of it
                self._commit()
        self._go_on()
