"""This module reads a log and holds it against what was acknowledged, so that nothing that was
promised is missed in silence, and a stopped pool can be looked at without changing a byte::

    LogReader ──► Journal: writes, too (`journal.py`)
             └──► StoppedJournal: of a pool that nobody runs, e.g. of a finished run

Owns what is said of a damaged log. Does not own the format (`segments.py`, `index.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from stepwell.datapool.errors import (
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
)
from stepwell.datapool.store.folder import (
    NO_SPACE,
    LastCommit,
    holder,
    lost_between,
    private,
    read_last_commit,
)
from stepwell.datapool.store.index import Found, Index, read_log
from stepwell.datapool.store.segments import (
    OFFSET_BITS,
    Row,
    front_bytes,
    head_of,
    journal_of,
    row_at,
    rows_at,
    segment_path,
    segments_in,
    sound_blocks,
)

logger = logging.getLogger(__name__)

HEAD_BYTES = 1 << 10
"""Heads are mostly shorter."""
GAP_BYTES = 16 << 10
"""Bytes between two rows that are read with them: that takes less than another read."""
READ_SEGMENTS = 4
"""Kept in memory while rows are read in order: those that were moved are in later ones."""


class LogReader:
    """The rows of the log in `folder`."""

    folder: Path
    index: Index

    def rows(self) -> Iterator[Row]:
        """The live rows in order of their ids."""

        @lru_cache(READ_SEGMENTS)
        def segment(number: int) -> bytes:
            return segment_path(self.folder, number).read_bytes()

        with self._telling():
            yield from rows_at(segment, self.index.places())

    def payloads(self, rows: Iterable[int]) -> dict[int, bytes]:
        """Return the payloads of stored rows."""
        with self._telling():
            found = self._records(rows)
            return {row: row_at(record, row, 0).payload for row, record in found}

    def stored_heads(self, rows: Iterable[int]) -> dict[int, tuple[str, bytes]]:
        """Kinds and heads of stored rows; their payloads are not read."""
        with self._telling():
            fronts = dict(self._records(rows, HEAD_BYTES))
            long = [row for row, front in fronts.items() if front_bytes(front) > len(front)]
            fronts |= dict(self._records(long))
            return {row: head_of(front) for row, front in fronts.items()}

    def places(self, rows: Iterable[int]) -> list[tuple[int, int, int, int]] | None:
        """Row, segment, offset and size of stored rows; None if one of them is not stored."""
        found = []
        for row in rows:
            if (place := self.index.find(row)) is None:
                return None
            found.append((row, *place))
        return found

    def _records(self, rows: Iterable[int], most: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Records of these rows, or at most `most` first bytes of each."""
        files: dict[int, int] = {}
        with contextlib.ExitStack() as opened:
            for row in rows:
                if (place := self.index.find(row)) is None:
                    raise ValueError(f"row {row} is not there: deleted before, or lost")
                number, offset, size = place
                if number not in files:
                    files[number] = private(segment_path(self.folder, number), os.O_RDONLY)
                    opened.callback(os.close, files[number])
                n_bytes = size if most is None else min(size, most)
                yield row, os.pread(files[number], n_bytes, offset)

    def _load(self, acked: LastCommit) -> Found:
        """Return the content of the log, if everything that was acknowledged, and promised, is
        there. Changes nothing."""
        found = read_log(self.folder, acked.journal)
        # A process that is killed leaves one transaction that is not recorded, at most.
        there = {found.sequence: found.last.checksum, found.sequence - 1: found.last.block.before}
        if there.get(acked.sequence, acked.checksum) != acked.checksum:
            raise ValueError(f"transaction {acked.sequence} is not the one that was acknowledged")
        if found.sequence < acked.sequence:
            lost = lost_between(found.sequence, found.next_row, found.index.n_rows, acked)
            if acked.is_promised:
                raise ValueError(f"{lost} The log was damaged, cut or removed")
            logger.warning(
                "%s: %s The machine was restarted since, and durability 'process' does not "
                "survive that; set pool.durability to 'power' for one that does",
                self.folder,
                lost,
            )
        return found

    # --- errors ---

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Raise errors of the files inside the block as the `JournalError` that the caller gets."""
        try:
            yield
        except JournalError:
            raise
        except OSError as e:
            raise self.translate(e) from e
        except ValueError as e:
            raise self.corrupt(str(e)) from e

    def translate(self, e: BaseException, n_kept: int = 0) -> JournalError:
        """Return the error that the caller gets, with this number of rows in memory."""
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


def rows_at_places(folder: Path, places: Sequence[tuple[int, int, int, int]]) -> list[Row]:
    """Rows of a journal that another process may be writing, by their places (`LogReader.places`),
    in this order. Neighbours in a file are read together.

    Raises:
        OSError, ValueError: a row is not there any more: ask for its place again.
    """
    order = sorted(range(len(places)), key=lambda i: places[i][1:3])
    chunks: list[bytes] = []
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(order):
        _, number, begin, size = places[order[at]]
        chunk, end = len(chunks), begin + size
        while at < len(order) and places[order[at]][1] == number:
            row, _, offset, size = places[order[at]]
            if offset > end + GAP_BYTES:
                break
            found.append((row, chunk << OFFSET_BITS | offset - begin))
            end, at = offset + size, at + 1
        file = private(segment_path(folder, number), os.O_RDONLY)
        try:
            chunks.append(os.pread(file, end - begin, begin))
        finally:
            os.close(file)
    rows = list(rows_at(chunks.__getitem__, found))
    return [row for _, row in sorted(zip(order, rows, strict=True))]


def states_of(folder: Path) -> dict[str, bytes]:
    """The states of a journal that another process may be writing; none where there is no journal,
    or one that cannot be read."""
    for number in reversed(segments_in(folder)):
        with contextlib.suppress(OSError, ValueError):
            data = segment_path(folder, number).read_bytes()
            states: dict[str, bytes] = {}
            for placed in sound_blocks(data, journal_of(data) or b""):  # the first has them all
                states |= placed.block.states
            if states:
                return states
    return {}


class StoppedJournal(LogReader):
    """The journal of a pool that nobody runs: what a `DataPool` is restored from, and looked at.
    Nothing is written, whatever is put into it, and nothing is locked: its run may begin again.

    Raises:
        JournalLockedError: a pool runs on it.
        JournalVersionError, JournalCorruptError, JournalError: as `Journal`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        if (pid := holder(self.folder)) is not None:
            raise JournalLockedError(
                f"{self.folder} is in use by process {pid}; ask that run, or stop it"
            )
        with self._telling():
            if (acked := read_last_commit(self.folder)) is None:
                raise JournalError(f"{self.folder} holds no journal")
            found = self._load(acked)
        self.index, self._states = found.index, found.states
        self.identity = acked.journal.hex()
        """Identity of the journal, as `Journal` has it."""

    def states(self) -> dict[str, bytes]:
        return self._states

    def read(self, rows: Sequence[int]) -> list[bytes]:
        """The payloads of `rows`, in this order."""
        stored = self.payloads(rows)
        return [stored[row] for row in rows]

    def heads(self, rows: Sequence[int]) -> list[tuple[str, bytes]]:
        """Kinds and heads of `rows`, in this order."""
        stored = self.stored_heads(rows)
        return [stored[row] for row in rows]

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        return 0

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None: ...

    def delete(self, rows: Iterable[int]) -> None: ...

    def put_state(self, key: str, value: bytes) -> None: ...

    def scrub(self) -> None: ...
