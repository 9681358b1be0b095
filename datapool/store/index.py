"""This module knows which rows of the log are live, and where, so that each can be read, and a
segment whose rows are dead can go.

    read_log(folder) ──► Found: the index, the states, the last transaction
    Index.put, delete ──► what each transaction changes

A deletion must be on disk as long as the row is. `Segment.graves` says of each dead row which
segment has its deletion; if that one goes first, the deletion is written anew (`deletions_in`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import NamedTuple

from stepwell.datapool.store.segments import (
    Block,
    Meta,
    journal_of,
    runs,
    segment_path,
    segments_in,
    sound_blocks,
)

_OFFSET_BITS = 36
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_CHUNK_BITS = 12


@dataclass(slots=True)
class Segment:
    """What is known of a segment file."""

    number: int
    end: int = 0
    """Its length in bytes."""
    crc: int = 0
    """Of its last block."""
    rows: int = 0
    """Records in it, those of dead rows and older copies included."""
    live_rows: int = 0
    live_bytes: int = 0
    graves: dict[int, array[int]] = field(default_factory=dict)
    """Its deleted rows, by the segment that has the deletion."""

    @property
    def has_copies(self) -> bool:
        """Whether rows of it were moved elsewhere."""
        return self.rows > self.live_rows + sum(map(len, self.graves.values()))


class _Chunk(NamedTuple):
    """Rows whose ids begin with the same bits: 20 bytes each, freed with the last one."""

    rows: array[int]
    places: array[int]
    """Segment and offset."""
    sizes: array[int]


class Index:
    """Where the newest copy of each live row is."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.n_rows = self.live_bytes = 0
        self.n_bytes = 0
        """Of all segments."""
        self.empty: set[int] = set()
        """Segments without a live row."""
        self._chunks: dict[int, _Chunk] = {}

    def grow(self, number: int, end: int, crc: int) -> None:
        """The segment ends there now, with a block of this CRC."""
        segment = self.segments.get(number)
        if segment is None:
            segment = self.segments[number] = Segment(number)
            self.empty.add(number)
        self.n_bytes += end - segment.end
        segment.end, segment.crc = end, crc

    def find(self, row: int) -> tuple[int, int, int] | None:
        """Segment, offset and size; None: not stored."""
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        if chunk is None:
            return None
        i = bisect_left(chunk.rows, row)
        if i == len(chunk.rows) or chunk.rows[i] != row:
            return None
        place = chunk.places[i]
        return place >> _OFFSET_BITS, place & _OFFSET_MASK, chunk.sizes[i]

    def put(self, number: int, row: int, offset: int, size: int) -> None:
        """A copy of the row was written into this segment, which counts from now on."""
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        if chunk is None:
            chunk = self._chunks[row >> _CHUNK_BITS] = _Chunk(array("q"), array("q"), array("I"))
        rows, places, sizes = chunk
        place = number << _OFFSET_BITS | offset
        if not rows or rows[-1] < row:
            rows.append(row)
            places.append(place)
            sizes.append(size)
        else:
            i = bisect_left(rows, row)
            if rows[i] == row:
                self._leave(places[i] >> _OFFSET_BITS, sizes[i])
                places[i], sizes[i] = place, size
            else:
                rows.insert(i, row)
                places.insert(i, place)
                sizes.insert(i, size)
        self._enter(number, 1, size)

    def delete(self, row: int, said_in: int) -> None:
        """The row is dead, says the segment `said_in`. Unknown rows are passed over."""
        chunk = self._chunks.get(row >> _CHUNK_BITS)
        if chunk is None:
            return
        rows, places, sizes = chunk
        i = bisect_left(rows, row)
        if i == len(rows) or rows[i] != row:
            return
        number = places[i] >> _OFFSET_BITS
        self._leave(number, sizes[i])
        graves = self.segments[number].graves
        if said_in not in graves:
            graves[said_in] = array("q")
        graves[said_in].append(row)
        for column in chunk:
            del column[i]
        if not rows:
            del self._chunks[row >> _CHUNK_BITS]

    def deletions_in(self, number: int) -> list[int]:
        """Dead rows that other segments still have, and whose deletion only this one has."""
        return [
            row
            for segment in self.segments.values()
            if segment.number != number
            for row in segment.graves.get(number, ())
        ]

    def drop(self, number: int, into: int) -> None:
        """The segment is gone; its deletions were written anew in the segment `into`."""
        self.n_bytes -= self.segments.pop(number).end
        self.empty.discard(number)
        for segment in self.segments.values():
            if (rows := segment.graves.pop(number, None)) is not None:
                segment.graves.setdefault(into, array("q")).extend(rows)

    def places(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """All live rows in order of their ids: the segment and (id, offset) of some that follow
        each other in it."""
        for key in sorted(self._chunks):
            chunk = self._chunks[key]
            each = zip(chunk.rows[:], chunk.places[:], strict=True)
            for number, found in groupby(each, lambda row: row[1] >> _OFFSET_BITS):
                yield number, [(row, place & _OFFSET_MASK) for row, place in found]

    def apply(self, number: int, block: Block, meta: Meta) -> None:
        """What a transaction in this segment changes."""
        self.grow(number, block.end, block.crc)
        at, i = block.at, 0
        for first, n in runs(meta.rows):
            sizes = meta.sizes[i : i + n]
            self._put(number, first, sizes, at)
            at += sum(sizes)
            i += n
        for first, n in runs(meta.deleted):
            for row in range(first, first + n):
                self.delete(row, number)

    def _put(self, number: int, first: int, sizes: list[int], at: int) -> None:
        """Rows that follow each other, also in the segment."""
        last = first + len(sizes) - 1
        chunk = self._chunks.get(first >> _CHUNK_BITS)
        is_last = chunk is None or chunk.rows[-1] < first
        if chunk is None or not is_last or last >> _CHUNK_BITS != first >> _CHUNK_BITS:
            for row, size in enumerate(sizes, first):
                self.put(number, row, at, size)
                at += size
            return
        chunk.rows.extend(range(first, last + 1))
        chunk.sizes.extend(sizes)
        *places, end = accumulate(sizes, initial=number << _OFFSET_BITS | at)
        chunk.places.extend(places)
        self._enter(number, len(sizes), end - places[0])

    def _enter(self, number: int, n_rows: int, n_bytes: int) -> None:
        segment = self.segments[number]
        segment.rows += n_rows
        segment.live_rows += n_rows
        segment.live_bytes += n_bytes
        self.empty.discard(number)
        self.n_rows += n_rows
        self.live_bytes += n_bytes

    def _leave(self, number: int, size: int) -> None:
        segment = self.segments[number]
        segment.live_rows -= 1
        segment.live_bytes -= size
        if not segment.live_rows:
            self.empty.add(number)
        self.n_rows -= 1
        self.live_bytes -= size


# --- reading a log ---


@dataclass(slots=True)
class Found:
    """What a log holds."""

    index: Index = field(default_factory=Index)
    states: dict[str, bytes] = field(default_factory=dict)
    sequence: int = 0
    """Of its last transaction …"""
    next_row: int = 0
    segment: int = 0
    end: int = 0
    crc: int = 0
    """… and of its block."""
    crcs: dict[int, int] = field(default_factory=dict)
    """Of the blocks of the newest two segments, by transaction."""

    def apply(self, number: int, block: Block, meta: Meta) -> None:
        self.index.apply(number, block, meta)
        self.states |= meta.states
        self.sequence, self.next_row = block.sequence, block.next_row
        self.segment, self.end, self.crc = number, block.end, block.crc


def read_log(folder: Path, journal: bytes, newest: int | None = None) -> Found:
    """What the log of this journal holds, up to the first torn or damaged transaction of its newest
    segment.

    Args:
        newest: read as if there were none after this segment.

    Raises:
        ValueError: an older segment is missing or damaged, or is of another journal.
    """
    present = [n for n in segments_in(folder) if newest is None or n <= newest]
    tail: list[tuple[Block, Meta]] = []
    number, data = 0, b""
    for number in reversed(present):
        data = segment_path(folder, number).read_bytes()
        if journal_of(data) not in (None, journal):
            raise ValueError("pool.acked belongs to another journal")
        if tail := list(sound_blocks(data, journal)):
            break  # else its process was killed when it began this one, or its beginning is damaged
    found = Found()
    others = expected(tail)
    for other, (end, crc) in sorted(others.items()):
        name = segment_path(folder, other).name
        if other not in present:
            raise ValueError(f"{name} is missing")
        sealed = segment_path(folder, other).read_bytes()
        for block, meta in sound_blocks(sealed, journal):
            found.apply(other, block, meta)
        if (found.segment, found.end, found.crc) != (other, end, crc):
            at = found.end if found.segment == other else 0
            raise ValueError(f"{name} is damaged at byte {at}")
        found.crcs = {found.sequence: found.crc}
    for block, meta in tail:
        found.apply(number, block, meta)
        found.crcs[block.sequence] = block.crc
    return found


def expected(tail: Iterable[tuple[Block, Meta]]) -> dict[int, tuple[int, int]]:
    """Which segments there are beside the newest, whose blocks these are: number -> length and CRC
    of the last block."""
    segments: dict[int, tuple[int, int]] = {}
    for _, meta in tail:
        segments |= {number: (end, crc) for number, end, crc in meta.segments}
        for number in meta.dropped:
            segments.pop(number, None)
    return segments
