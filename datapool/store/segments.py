"""This module lays out rows in segment files so that each can be found, checked and told from what
is dead or damaged::

    pool-000000000007.log
    ┌─────────┬───────────────────────────────────┬─────────────────────┬────
    │ SEGMENT │ BLOCK  meta  record  record  …    │ BLOCK  meta  record │ …
    └─────────┴───────────────────────────────────┴─────────────────────┴────

    SEGMENT   id of the journal, number of the segment
    BLOCK     one transaction: its number, how long it is, CRCs of meta and records, and the CRC of
              the block before it, so that a block that is changed, removed or moved is missed
    meta      deleted rows, states, which segments were dropped; in the first block of a segment all
              states, and the list of the segments that there are with the CRC of each one's end
    record    one row: CRCs, id, names, head, payload. The same bytes wherever it is moved to

The newest copy of a row counts, and a deletion names rows of any segment. Owns the format. Does not
own which rows are where (`index.py`), nor when something is written (`journal.py`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec

MAGIC = b"swpool-4"
BLOCK_MAGIC = b"swblock4"
SEGMENT = struct.Struct("<8s16sqI")
_BLOCK = struct.Struct("<8sqqqIQIIIII")
_RECORD = struct.Struct("<IIqHII")


class Row(NamedTuple):
    """One stored event."""

    row: int
    channel: str
    kind: str
    head: bytes
    payload: bytes | None
    """None if the row has none, or was read without, or is not as it was written."""
    payload_bytes: int
    """Length of the stored payload, also when it was not read; 0 if there is none."""


# --- records ---


def encode_record(row: int, channel: str, kind: str, head: bytes, payload: bytes | None) -> bytes:
    """A record but for head and payload, which follow it."""
    names = f"{channel}\0{kind}".encode()
    n_payload = 0 if payload is None else 1 + len(payload)
    payload_crc = 0 if payload is None else crc32(payload)
    prefix = _RECORD.pack(0, payload_crc, row, len(names), len(head), n_payload) + names
    return struct.pack("<I", crc32(head, crc32(prefix[4:]))) + prefix[4:]


@lru_cache
def _names(names: bytes) -> tuple[str, str]:
    channel, _, kind = names.decode().rpartition("\0")
    return channel, kind


def read_rows(
    data: bytes, places: Iterable[tuple[int, int]], payloads: bool = True
) -> Iterator[Row]:
    """Rows by id and offset.

    Raises:
        ValueError: a row is not what was written; without `payloads`, its head is not.
    """
    unpack, prefix, make = _RECORD.unpack_from, _RECORD.size, tuple.__new__
    for row, at in places:
        crc, payload_crc, found, n_names, n_head, n_payload = unpack(data, at)
        head_at = at + prefix + n_names
        end = head_at + n_head
        if found != row or crc != crc32(data[at + 4 : end]):
            raise ValueError(f"row {row} does not have the content it was written with")
        channel, kind = _names(data[at + prefix : head_at])
        payload, n_bytes = None, 0
        if n_payload:
            n_bytes = n_payload - 1
            if payloads:
                payload = data[end : end + n_bytes]
                if payload_crc != crc32(payload):
                    raise ValueError(f"the payload of row {row} is not what was written")
        yield make(Row, (row, channel, kind, data[head_at:end], payload, n_bytes))


# --- blocks and segments ---


class Meta(msgspec.Struct, omit_defaults=True):
    """What a transaction changes."""

    rows: list[int] = []
    """Ids of its records in order, as `pack_ids` has them …"""
    sizes: list[int] = []
    """… and how many bytes each takes."""
    deleted: list[int] = []
    """Ids, too."""
    states: dict[str, bytes] = {}
    dropped: list[int] = []
    """Segments that hold nothing any more that counts."""
    segments: list[tuple[int, int, int]] = []
    """In the first block of a segment: number, length and last block's CRC of each other one."""

    def records(self, at: int) -> Iterator[tuple[int, int, int]]:
        """Id, offset and size of each row, if the first is at `at`."""
        ids = (row for first, n in runs(self.rows) for row in range(first, first + n))
        for row, size in zip(ids, self.sizes, strict=True):
            yield row, at, size
            at += size


_decode_meta = msgspec.msgpack.Decoder(Meta).decode


class Block(NamedTuple):
    """The header of one transaction."""

    sequence: int
    """Number of the transaction; the first is 1."""
    first_row: int
    """Id of the next row, before it …"""
    next_row: int
    """… and after it."""
    n_rows: int
    n_records: int
    """Bytes."""
    records_crc: int
    before: int
    """CRC of the block before it; 0 if it is the first one of the journal."""
    n_meta: int = 0
    """Bytes."""
    meta_crc: int = 0
    crc: int = 0
    """Of all this and the id of the journal."""
    at: int = 0
    """Where its records begin in the segment."""

    @property
    def end(self) -> int:
        return self.at + self.n_records

    def meta(self, data: bytes) -> Meta | None:
        """None if it is not what was written."""
        packed = data[self.at - self.n_meta : self.at]
        return _decode_meta(packed) if crc32(packed) == self.meta_crc else None

    def has_records(self, data: bytes) -> bool:
        """Whether all of them are what was written."""
        return crc32(memoryview(data)[self.at : self.end]) == self.records_crc


def encode_block(journal: bytes, block: Block, meta: Meta) -> tuple[bytes, Block]:
    """A block but for its records, which follow it; and `block` with what is known then."""
    packed = msgspec.msgpack.encode(meta)
    block = block._replace(n_meta=len(packed), meta_crc=crc32(packed))
    fields = (BLOCK_MAGIC, *block[:-2])
    crc = crc32(_BLOCK.pack(*fields, 0), crc32(journal))
    return _BLOCK.pack(*fields, crc) + packed, block._replace(crc=crc)


def block_at(data: bytes, at: int, journal: bytes) -> Block | None:
    """The block whose header is at `at`; None if it is damaged or does not end within `data`."""
    if at + _BLOCK.size > len(data):
        return None
    magic, *fields, crc = _BLOCK.unpack_from(data, at)
    if magic != BLOCK_MAGIC or crc != crc32(_BLOCK.pack(magic, *fields, 0), crc32(journal)):
        return None
    block = Block._make((*fields, crc, 0))
    block = block._replace(at=at + _BLOCK.size + block.n_meta)
    return block if block.end <= len(data) else None


def sound_blocks(data: bytes, journal: bytes) -> Iterator[tuple[Block, Meta]]:
    """The blocks of a segment and what their meta says, up to the first one that is torn or damaged
    or does not follow from the one before."""
    at, last = SEGMENT.size, None
    if journal_of(data) != journal:
        return
    while (block := block_at(data, at, journal)) is not None:
        follows = last is None or (block.before, block.sequence) == (last.crc, last.sequence + 1)
        meta = block.meta(data)
        if not follows or meta is None or not block.has_records(data):
            return
        yield block, meta
        at, last = block.end, block


def blocks_of(file: int, end: int, journal: bytes) -> Iterator[tuple[int, bytes, Block, Meta]]:
    """The blocks of a sealed segment, one at a time: where each begins, its bytes, what they say.

    Raises:
        ValueError: one is damaged.
    """
    at = SEGMENT.size
    while at < end:
        fields = _BLOCK.unpack(os.pread(file, _BLOCK.size, at))
        data = os.pread(file, _BLOCK.size + fields[5] + fields[8], at)
        block = block_at(data, 0, journal)
        if block is None or (meta := block.meta(data)) is None or not block.has_records(data):
            raise ValueError(f"the transaction at byte {at} is damaged")
        yield at, data, block, meta
        at += len(data)


def encode_segment(journal: bytes, number: int) -> bytes:
    crc = crc32(SEGMENT.pack(MAGIC, journal, number, 0))
    return SEGMENT.pack(MAGIC, journal, number, crc)


def journal_of(data: bytes) -> bytes | None:
    """The id of the journal that a segment belongs to; None if its first bytes are damaged."""
    if len(data) < SEGMENT.size:
        return None
    magic, journal, number, crc = SEGMENT.unpack_from(data)
    if magic != MAGIC or crc != crc32(SEGMENT.pack(magic, journal, number, 0)):
        return None
    return bytes(journal)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"pool-{number:012d}.log"


def segments_in(folder: Path) -> list[int]:
    """The numbers of the segments that are there, in order."""
    return sorted(
        int(digits)
        for path in folder.glob("pool-*.log")
        if (digits := path.name[5:-4]).isdecimal() and len(digits) == 12
    )


def pack_ids(rows: Sequence[int]) -> list[int]:
    """Ids in order as gaps and lengths of runs."""
    packed: list[int] = []
    following = 0
    for row in rows:
        if packed and row == following:
            packed[-1] += 1
        else:
            packed += (row - following, 1)
        following = row + 1
    return packed


def runs(packed: list[int]) -> Iterator[tuple[int, int]]:
    """The first id and the length of each run."""
    at = 0
    for gap, n in zip(packed[::2], packed[1::2], strict=True):
        yield at + gap, n
        at += gap + n
