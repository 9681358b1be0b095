"""This module lays out rows in segment files so that each can be found, checked and told from what
is dead or damaged::

    pool-000000000007.log
    ┌─────────────────────────────────┬────────────────────────┬────
    │ HEADER  Block  record  record … │ HEADER  Block  record  │ …        a transaction each
    └─────────────────────────────────┴────────────────────────┴────

    HEADER    checksum of itself and the Block, id of the journal, two lengths, checksum of the
              records
    Block     what the transaction changes, and the checksum of the block before it, so that one
              that is changed, removed or moved is missed. The first one of a segment has all
              states, and lists the other segments that count, each with the checksum of its end
    record    one row: checksums, id, names, head, payload. The same bytes wherever it is moved to;
              other ones where the row is written anew

The newest copy of a row counts, and a deletion names the segment that has the dead copy. Owns the
format. Does not own which rows are where (`index.py`), nor when they are written (`journal.py`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from xxhash import xxh3_64
from xxhash import xxh3_64_intdigest as xxh3

from stepwell.datapool.types import CHANNEL_BYTES

_HEADER = struct.Struct("<Q16sIIQ")
_SUM_BYTES = 8
_RECORD = struct.Struct("<QQqHII")

Record: TypeAlias = tuple[bytes, ...]
"""A row as bytes, in pieces, which are put together when they are written."""

OFFSET_BITS = 36
OFFSET_MASK = (1 << OFFSET_BITS) - 1
"""A place is the number of a segment, and an offset in it."""


# --- records ---


class Row(NamedTuple):
    """One stored event."""

    row: int
    channel: str
    kind: str
    head: bytes
    payload: bytes = b""


class PayloadDamagedError(ValueError):
    """A row is what was written, but for its payload."""

    def __init__(self, row: Row) -> None:
        super().__init__(f"the payload of row {row.row} is not what was written")
        self.row = row


def encode_record(row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> Record:
    """A row as it is stored; its payload in pieces."""
    names = _encoded_names(channel, kind)
    n_payload, payload_sum = 0, _NOTHING
    if payload:
        summed = xxh3_64(payload[0])
        for piece in payload[1:]:
            summed.update(piece)
        n_payload, payload_sum = sum(map(len, payload)), summed.intdigest()
    lengths = len(names), len(head), n_payload
    front = _RECORD.pack(0, payload_sum, row, *lengths)[_SUM_BYTES:] + names + head
    return xxh3(front).to_bytes(_SUM_BYTES, "little") + front, *payload


_NOTHING = xxh3(b"")


@lru_cache
def _encoded_names(channel: str, kind: str) -> bytes:
    return f"{channel}\0{kind}".encode()


@lru_cache
def _names(names: bytes) -> tuple[str, str]:
    channel, _, kind = names.decode().rpartition("\0")
    return channel, kind


def rows_at(segment: Callable[[int], bytes], places: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Rows by id and place, of segments that are read when the first is needed.

    Raises:
        PayloadDamagedError: a payload is not what was written.
        ValueError: nor is the rest of the row.
    """
    unpack, prefix_bytes, make = _RECORD.unpack_from, _RECORD.size, tuple.__new__
    number, data = -1, b""
    for row, place in places:
        if place >> OFFSET_BITS != number:
            number = place >> OFFSET_BITS
            data = segment(number)
        at = place & OFFSET_MASK
        if len(data) < at + prefix_bytes:
            raise ValueError(f"row {row} was cut off")
        checksum, payload_sum, found, n_names, n_head, n_payload = unpack(data, at)
        head_at = at + prefix_bytes + n_names
        end = head_at + n_head
        if found != row or checksum != xxh3(data[at + _SUM_BYTES : end]):
            raise ValueError(f"row {row} does not have the content it was written with")
        channel, kind = _names(data[at + prefix_bytes : head_at])
        payload = data[end : end + n_payload]
        if payload_sum != xxh3(payload):
            raise PayloadDamagedError(Row(row, channel, kind, data[head_at:end]))
        yield make(Row, (row, channel, kind, data[head_at:end], payload))


def row_at(data: bytes, row: int, at: int) -> Row:
    """The row of this id whose record is at `at`. Raises as `rows_at`."""
    return next(rows_at(lambda _: data, [(row, at)]))


def front_bytes(front: bytes) -> int:
    """Bytes of a record before its payload."""
    if len(front) < _RECORD.size:
        raise ValueError("a row was cut off")
    *_, n_names, n_head, _ = _RECORD.unpack_from(front)
    return int(_RECORD.size + n_names + n_head)


def head_of(front: bytes) -> tuple[str, bytes]:
    """Kind and head of the row whose record begins with these bytes.

    Raises:
        ValueError: they are not what was written.
    """
    checksum, _, row, n_names, _, _ = _RECORD.unpack_from(front)
    end = front_bytes(front)
    if len(front) < end or checksum != xxh3(front[_SUM_BYTES:end]):
        raise ValueError(f"row {row} does not have the content it was written with")
    head_at = _RECORD.size + n_names
    return _names(front[_RECORD.size : head_at])[1], front[head_at:end]


# --- blocks ---


class Block(msgspec.Struct, array_like=True):
    """The changes of a transaction."""

    sequence: int
    """Number of the transaction; the first is 1."""
    before: int
    """Checksum of the block before it; 0 if it is the first one of the journal."""
    first_row: int
    """Id of the next row, before it …"""
    next_row: int
    """… and after it."""
    rows: list[int]
    """Ids of its records in order …"""
    sizes: list[int]
    """… and how many bytes each takes."""
    deleted: dict[int, list[int]]
    """Ids in order, by the segment that has the dead row."""
    states: dict[str, bytes]
    segments: dict[int, tuple[int, int]] | None = None
    """In the first block of a segment: number -> length and last block's checksum of each other
    one that counts. Those that it leaves out hold nothing any more."""


_decode = msgspec.msgpack.Decoder(Block).decode


class Placed(NamedTuple):
    """A block, and where it is in its segment."""

    block: Block
    at: int
    records_at: int
    end: int
    checksum: int
    """Checksum of the block, which stands for all before it."""
    records_sum: int

    def is_whole(self, data: bytes) -> bool:
        """True if its records are what was written."""
        return xxh3(memoryview(data)[self.records_at : self.end]) == self.records_sum

    def follows(self, last: Placed | None) -> bool:
        """True if nothing is missing between `last` and this block; None: the start of the
        segment."""
        if last is None:
            return self.at == 0
        expected = last.end, last.checksum, last.block.sequence + 1
        return expected == (self.at, self.block.before, self.block.sequence)

    def records(self) -> Iterator[tuple[int, int, int]]:
        """Id, offset and size of each row."""
        at = self.records_at
        for row, size in zip(self.block.rows, self.block.sizes, strict=True):
            yield row, at, size
            at += size


NO_BLOCK = Placed(Block(0, 0, 0, 0, [], [], {}, {}), 0, 0, 0, 0, 0)
"""Before the first."""


def encode_block(
    journal: bytes, block: Block, records: Iterable[Record]
) -> tuple[bytearray, int, int]:
    """The bytes of a transaction; those before its records; the checksum of its block."""
    packed = msgspec.msgpack.encode(block)
    n_block = _HEADER.size + len(packed)
    data = bytearray().join((bytes(_HEADER.size), packed, *chain.from_iterable(records)))
    view = memoryview(data)
    n_records, records_sum = len(data) - n_block, xxh3(view[n_block:])
    _HEADER.pack_into(data, 0, 0, journal, len(packed), n_records, records_sum)
    checksum = xxh3(view[_SUM_BYTES:n_block])
    view[:_SUM_BYTES] = checksum.to_bytes(_SUM_BYTES, "little")
    return data, n_block, checksum


def block_at(data: bytes, at: int, journal: bytes) -> Placed | None:
    """The block that begins there; None if it is damaged or does not end within `data`."""
    begin = at + _HEADER.size
    if begin > len(data):
        return None
    checksum, owner, n_block, n_records, records_sum = _HEADER.unpack_from(data, at)
    records_at = begin + n_block
    end = records_at + n_records
    if owner != journal or end > len(data) or checksum != xxh3(data[at + _SUM_BYTES : records_at]):
        return None
    return Placed(_decode(data[begin:records_at]), at, records_at, end, checksum, records_sum)


def blocks_in(data: bytes, journal: bytes) -> Iterator[Placed]:
    """The blocks of a segment, in order. One that is damaged is passed over: the next does not
    follow from the last. Records are not looked at."""
    at = 0
    while 0 <= at < len(data):
        placed = block_at(data, at, journal)
        if placed is not None:
            yield placed
            at = placed.end
        else:  # each begins with a checksum and this id
            at = data.find(journal, at + _SUM_BYTES + 1) - _SUM_BYTES


def records_are_whole(data: bytes, begin: int, end: int) -> bool:
    """True if one transaction takes these bytes, and all its records are what was written, though
    its block is not."""
    records_at = begin + _HEADER.size
    if records_at > end:
        return False
    _, _, n_block, n_records, records_sum = _HEADER.unpack_from(data, begin)
    records_at += n_block
    if records_at + n_records != end:
        return False
    whole: bool = xxh3(memoryview(data)[records_at:end]) == records_sum
    return whole


def records_in(
    data: bytes, begin: int, end: int, kinds: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Id and offset of each record of these kinds between two offsets whose names and head are
    what was written, without the help of a block."""
    names = re.compile(b"\\0(?:%s)" % b"|".join(re.escape(kind.encode()) for kind in kinds))
    for match in names.finditer(data, begin, end):
        for n_channel in range(min(match.start() - begin, CHANNEL_BYTES) + 1):
            at = match.start() - n_channel - _RECORD.size
            if at < begin:
                break
            checksum, _, row, n_names, n_head, _ = _RECORD.unpack_from(data, at)
            front = at + _RECORD.size + n_names + n_head
            if (
                n_names == match.end() - match.start() + n_channel
                and front <= end
                and checksum == xxh3(data[at + _SUM_BYTES : front])
            ):
                yield row, at
                break


def sound_blocks(data: bytes, journal: bytes) -> Iterator[Placed]:
    """The blocks of a segment up to the first that is torn or damaged, records included."""
    last = None
    for placed in blocks_in(data, journal):
        if not placed.follows(last) or not placed.is_whole(data):
            return
        yield placed
        last = placed


def journal_of(data: bytes) -> bytes | None:
    """The id of the journal that a segment belongs to; None if its first block is damaged."""
    owner = data[_SUM_BYTES : _SUM_BYTES + 16]
    return None if block_at(data, 0, owner) is None else owner


# --- files ---


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"pool-{number:012d}.log"


def segments_in(folder: Path) -> list[int]:
    """The numbers of the segments that are there, in order."""
    return sorted(
        int(digits)
        for path in folder.glob("pool-*.log")
        if (digits := path.name[5:-4]).isdecimal() and len(digits) == 12
    )
