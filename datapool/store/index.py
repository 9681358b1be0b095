"""This module knows which rows of the log are live, and where, so that each can be read, and a
segment whose rows are dead can go.

    read_log(folder) ──► Found: the index, the states, the last transaction
    Index.apply      ──► what each transaction changes

A row is dead once it was deleted, or a newer copy of it was written elsewhere. A tombstone must
outlive the row it deletes: `Segment.tombstones` has, by the segment that holds them, the tombstones
of its dead rows; before that segment goes they are written anew (`deletions_in`).
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
    Placed,
    journal_of,
    segment_path,
    segments_in,
    sound_blocks,
)

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

    def deletions_in(self, gone: Collection[int]) -> dict[int, list[int]]:
        """Dead rows of other segments of which only these segments say that they are."""
        others = [s for s in self.segments.values() if s.number not in gone]
        found = {s.number: sorted(r for n in gone for r in s.tombstones.get(n, ())) for s in others}
        return {number: rows for number, rows in found.items() if rows}

    # --- changes ---

    def apply(self, number: int, placed: Placed) -> None:
        """Apply the changes of a transaction in this segment."""
        block = placed.block
        segment = self.segments.get(number)
        if segment is None:
            segment = self.segments[number] = Segment(number)
        self.n_bytes += placed.end - segment.end
        segment.end, segment.checksum = placed.end, placed.checksum
        for other, dead in block.deleted.items():
            for row in dead:
                self._delete(row, other, number)
        segment.ids.extend(block.rows)
        for row, at, size in placed.records():
            self.put(segment, row, at, size)
        if block.segments is not None:
            for gone in [n for n in self.segments if n < number and n not in block.segments]:
                self.n_bytes -= self.segments.pop(gone).end
                for other_segment in self.segments.values():
                    other_segment.tombstones.pop(gone, None)

    def put(self, segment: Segment, row: int, offset: int, size: int) -> None:
        """A copy of the row was written into this segment, which counts from now on."""
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        if chunk is None:
            chunk = self._chunks[row >> _CHUNK_BITS] = _Chunk(array("q"), array("q"), array("I"))
        elif (i := chunk.find(row)) is not None:
            self._leave(row, chunk, i, segment.number)
        i = bisect_left(chunk.rows, row)
        chunk.rows.insert(i, row)
        chunk.places.insert(i, segment.number << OFFSET_BITS | offset)
        chunk.sizes.insert(i, size)
        segment.live_rows += 1
        segment.live_bytes += size
        self.n_rows += 1
        self.live_bytes += size

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
        self.index.apply(number, placed)
        self.states |= placed.block.states
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
