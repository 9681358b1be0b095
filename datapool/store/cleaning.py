"""This module chooses the segments whose dead rows shall leave the disk, and takes their live rows
out so that each goes into a later transaction::

    no live row                          ──────────────────────────────► dropped
    dead rows, and erasing was asked for ─┐ its live rows, a slice in
    deadest one, if too much is dead     ─┘ each transaction ──────────► dropped

One segment at a time, and one with older copies of rows that were moved before a crash comes first:
as long as those are there, no other segment may go. Groups that live a short time are never moved:
their segments die whole. Owns what is moved and when; writes nothing.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from stepwell.datapool.store.index import Index, Segment
from stepwell.datapool.store.segments import blocks_of, segment_path

logger = logging.getLogger(__name__)

SLACK_BYTES = 64 << 20
"""More dead bytes than this, and than there are live ones, are too much."""

SLICE_BYTES = 256 << 10
"""Of one transaction: 1 to 2 ms."""
SLICE_ROWS = 1024


class Cleaner:
    """Chooses and reads; told what became of it with `dropped` or `again`."""

    def __init__(self, folder: Path, journal: bytes, index: Index) -> None:
        self._folder = folder
        self._journal = journal
        self._index = index
        self._queue: dict[int, None] = {}
        """Segments to be erased, in order."""
        self._victim: int | None = None
        self._records: Iterator[tuple[int, bytes | None]] | None = None
        self._rests_until = 0.0
        self.is_stopped = False

    def begin(self) -> None:
        """After a start."""
        self._queue = {s.number: None for s in self._index.segments.values() if s.has_copies}

    @property
    def has_dead(self) -> bool:
        """Whether a row is on disk that does not count."""
        return any(s.rows > s.live_rows for s in self._index.segments.values())

    def erase(self, active: int) -> bool:
        """Every dead row that there is now shall go. Whether `active`, which must end, has some."""
        dead = [s.number for s in self._index.segments.values() if s.rows > s.live_rows]
        self._queue |= dict.fromkeys(dead)
        return active in dead

    def dropped(self, number: int) -> None:
        self._victim = self._records = None
        self._queue.pop(number, None)

    def again(self) -> None:
        """The transaction of the last slice failed. What others before it moved is not live any
        more in the segment under way."""
        self._records = None

    @property
    def is_erasing(self) -> bool:
        return bool(self._queue) and not self.is_stopped

    def is_busy(self, active: int) -> bool:
        return self.is_erasing or self._choose(active) is not None

    def take(
        self, active: int, deleted: Collection[int], n_written: int
    ) -> tuple[dict[int, bytes], list[int]]:
        """The next slice: rows to be written anew, as records; and segments to be dropped.

        Args:
            active: where the transaction is written.
            deleted: rows that it deletes.
            n_written: bytes of new rows in it; as many may be moved, so that the cleaning keeps up.
                0: it is made for the cleaning. Others do without, if the last slice was a moment
                ago: two thirds of the time are theirs, unless twice of what is too much is dead.
        """
        victim, began = self._choose(active), time.monotonic()
        rests = n_written and began < self._rests_until and self._dead_share() <= 2
        if victim is None or rests:
            return {}, []
        slice_ = self._slice(victim, deleted, max(1.0, n_written / SLICE_BYTES))
        self._rests_until = began + 3 * (time.monotonic() - began)
        return slice_

    def _slice(
        self, victim: int, deleted: Collection[int], larger: float
    ) -> tuple[dict[int, bytes], list[int]]:
        if self._records is None:
            self._victim = victim
            self._records = self._live_records(self._index.segments[victim])
        moved: dict[int, bytes] = {}
        n_bytes = n_seen = 0
        try:
            for n_seen, (row, record) in enumerate(self._records, start=1):
                if record is not None and row not in deleted:
                    moved[row] = record
                    n_bytes += len(record)
                if n_bytes >= SLICE_BYTES * larger or n_seen >= SLICE_ROWS * larger:
                    return moved, []
        except (OSError, ValueError, struct.error) as e:
            # Copies that were moved are still in it, so no other segment may go either.
            self.is_stopped = True
            logger.error(
                "%s cannot be read (%s): what is dead stays on disk, and grows. Stop the pool and "
                "run `stepwell data salvage %s`",
                segment_path(self._folder, victim),
                e,
                self._folder,
            )
            return moved, []
        return moved, [victim]

    def _choose(self, active: int) -> int | None:
        if self.is_stopped or self._victim is not None:
            return None if self.is_stopped else self._victim
        segments = self._index.segments
        for number in self._queue:
            if number != active:
                return number
        if ready := self._index.empty - {active}:
            return min(ready)
        if self._dead_share() <= 1:
            return None
        sealed = [segment for segment in segments.values() if segment.number != active]
        # By its share, not its bytes: rows that were moved once are not moved with every choice.
        deadest = min(sealed, key=lambda s: s.live_bytes / s.end, default=None)
        return None if deadest is None else deadest.number

    def _dead_share(self) -> float:
        """Dead bytes; 1.0: as many as may be."""
        n_dead = self._index.n_bytes - self._index.live_bytes
        return n_dead / max(SLACK_BYTES, self._index.live_bytes)

    def _live_records(self, segment: Segment) -> Iterator[tuple[int, bytes | None]]:
        """Its rows; None for those that do not count. Read a transaction at a time: a segment that
        the system does not have in memory would keep everybody waiting."""
        if not segment.live_rows:
            return
        with segment_path(self._folder, segment.number).open("rb", buffering=0) as file:
            for start, data, block, meta in blocks_of(file.fileno(), segment.end, self._journal):
                for row, at, size in meta.records(block.at):
                    found = self._index.find(row)
                    is_live = found is not None and found[:2] == (segment.number, start + at)
                    yield row, data[at : at + size] if is_live else None
