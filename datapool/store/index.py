"""This module knows which rows of the log are live, and where, so that each can be read, and a
segment whose rows are dead can go.

    read_log(folder) ──► Found: the index, the states, the last transaction
    Index.apply      ──► what each transaction changes

A row is dead once it was deleted, or a newer copy of it was written elsewhere. A tombstone must
outlive the row it deletes: `Segment.tombstones` has, by the segment that holds them, the tombstones
of its dead rows; before that segment goes they are written anew (`tombstones_in`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from stepwell.datapool.store.segments import (
    NO_BLOCK,
    OFFSET_BITS,
    OFFSET_MASK,
    Block,
    Placed,
    journal_of,
    segment_path,
    segments_in,
    sound_blocks,
)

SLACK_BYTES = 64 << 20
"""More dead bytes than this, and than there are live ones, are too much."""
_CHUNK_BITS = 12


@dataclass(slots=True)
class Segment:
    """The index entry of a segment file."""

    number: int
    end: int = 0
    """Its length in bytes."""
    checksum: int = 0
    """Checksum of its last block."""
    ids: array[int] = field(default_factory=lambda: array("q"))
    """Ids of its records, dead ones included."""
    live_rows: int = 0
    live_bytes: int = 0
    tombstones: dict[int, array[int]] = field(default_factory=dict)
    """Its dead rows, by the segment that says so."""

    def add_tombstone(self, row: int, said_in: int) -> None:
        if said_in not in self.tombstones:
            self.tombstones[said_in] = array("q")
        self.tombstones[said_in].append(row)


class _Chunk(NamedTuple):
    """Rows whose ids begin with the same bits: 20 bytes each, freed with the last one."""

    rows: array[int]
    places: array[int]
    """Segment and offset."""
    sizes: array[int]

    def find(self, row: int) -> int | None:
        i = bisect_left(self.rows, row)
        return i if i < len(self.rows) and self.rows[i] == row else None


class Index:
    """The place of the newest copy of each live row."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.n_rows = self.live_bytes = 0
        self.n_bytes = 0
        """Bytes of all segments."""
        self._chunks: dict[int, _Chunk] = {}

    @property
    def is_mostly_dead(self) -> bool:
        """True if so much is dead that live rows are moved to get rid of it."""
        return self.n_bytes - self.live_bytes > max(SLACK_BYTES, self.live_bytes)

    def find(self, row: int) -> tuple[int, int, int] | None:
        """Segment, offset and size; None: not stored."""
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        if chunk is None or (i := chunk.find(row)) is None:
            return None
        place = chunk.places[i]
        return place >> OFFSET_BITS, place & OFFSET_MASK, chunk.sizes[i]

    def places(self) -> Iterator[tuple[int, int]]:
        """All live rows in order of their ids, and where they are."""
        chunks = (self._chunks[key] for key in sorted(self._chunks))
        return chain.from_iterable(zip(c.rows, c.places, strict=True) for c in chunks)

    def tombstones_in(self, gone: Collection[int]) -> dict[int, list[int]]:
        """Dead rows of other segments of which only these segments say that they are."""
        others = [s for s in self.segments.values() if s.number not in gone]
        found = {s.number: sorted(r for n in gone for r in s.tombstones.get(n, ())) for s in others}
        return {number: rows for number, rows in found.items() if rows}

    # --- changes ---

    def apply(self, number: int, block: Block, records_at: int, end: int, checksum: int) -> None:
        """Apply the changes of a transaction in this segment, which is `end` bytes long with it.

        Args:
            records_at: offset of the transaction's records.
            checksum: of its block.
        """
        segment = self.segments.get(number)
        if segment is None:
            segment = self.segments[number] = Segment(number)
        self.n_bytes += end - segment.end
        segment.end, segment.checksum = end, checksum
        for other, dead in block.deleted.items():
            for row in dead:
                self._delete(row, other, number)
        segment.ids.extend(block.rows)
        at = records_at
        for row, size in zip(block.rows, block.sizes, strict=True):
            chunk = self._chunks.get(row >> _CHUNK_BITS)
            if chunk is None:
                chunk = _Chunk(array("q"), array("q"), array("I"))
                self._chunks[row >> _CHUNK_BITS] = chunk
            i = len(chunk.rows)
            if i and row <= chunk.rows[-1]:  # a row that is written anew, or was moved
                i = bisect_left(chunk.rows, row)
                if chunk.rows[i] == row:
                    self._leave(row, chunk, i, number)
            chunk.rows.insert(i, row)
            chunk.places.insert(i, number << OFFSET_BITS | at)
            chunk.sizes.insert(i, size)
            at += size
        n_bytes = at - records_at
        segment.live_rows += len(block.rows)
        segment.live_bytes += n_bytes
        self.n_rows += len(block.rows)
        self.live_bytes += n_bytes
        if block.segments is not None:
            for gone in [n for n in self.segments if n < number and n not in block.segments]:
                self.n_bytes -= self.segments.pop(gone).end
                for other_segment in self.segments.values():
                    other_segment.tombstones.pop(gone, None)

    def _delete(self, row: int, number: int, said_in: int) -> None:
        """The copy of the row in the segment `number` is dead."""
        if (segment := self.segments.get(number)) is None:
            return  # gone, and so is the row
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        i = None if chunk is None else chunk.find(row)
        if chunk is None or i is None or chunk.places[i] >> OFFSET_BITS != number:
            segment.add_tombstone(row, said_in)  # an older copy; the live one is elsewhere
            return
        self._leave(row, chunk, i, said_in)
        if not chunk.rows:
            del self._chunks[row >> _CHUNK_BITS]

    def _leave(self, row: int, chunk: _Chunk, i: int, said_in: int) -> None:
        segment, size = self.segments[chunk.places[i] >> OFFSET_BITS], chunk.sizes[i]
        segment.add_tombstone(row, said_in)
        segment.live_rows -= 1
        segment.live_bytes -= size
        self.n_rows -= 1
        self.live_bytes -= size
        for column in chunk:
            del column[i]


# --- reading a log ---


@dataclass(slots=True)
class Found:
    """The content of a log."""

    index: Index = field(default_factory=Index)
    states: dict[str, bytes] = field(default_factory=dict)
    newest: int = 0
    """The last segment; 0: there is none."""
    last: Placed = NO_BLOCK

    @property
    def sequence(self) -> int:
        """Number of the last transaction."""
        return self.last.block.sequence

    @property
    def next_row(self) -> int:
        return self.last.block.next_row

    def apply(self, number: int, placed: Placed) -> None:
        block = placed.block
        self.index.apply(number, block, placed.records_at, placed.end, placed.checksum)
        self.states |= block.states
        self.newest, self.last = number, placed


def read_log(folder: Path, journal: bytes, newest: int | None = None) -> Found:
    """Read the log of this journal, up to the first torn or damaged transaction of its newest
    segment.

    Args:
        newest: read as if there were none after this segment.

    Raises:
        ValueError: an older segment is missing or damaged, or is of another journal.
    """
    present = [n for n in segments_in(folder) if newest is None or n <= newest]
    number, tail = 0, list[Placed]()
    for number in reversed(present):
        data = segment_path(folder, number).read_bytes()
        if journal_of(data) not in (None, journal):
            raise ValueError("pool.acked belongs to another journal")
        if tail := list(sound_blocks(data, journal)):
            break  # else its process was killed when it began this one, or its beginning is damaged
    found = Found()
    others = tail[0].block.segments or {} if tail else {}
    for other, end in sorted(others.items()):
        name = segment_path(folder, other).name
        if other not in present:
            raise ValueError(f"{name} is missing")
        at = checksum = 0
        for placed in sound_blocks(segment_path(folder, other).read_bytes(), journal):
            found.apply(other, placed)
            at, checksum = placed.end, placed.checksum
        if (at, checksum) != end:
            raise ValueError(f"{name} is damaged at byte {at}")
    for placed in tail:
        found.apply(number, placed)
    return found
