"""This module makes a usable journal of a damaged one so that a pool can go on, and says what is
lost.

Every sound row is read, also those of a transaction whose own header is damaged. What cannot be
read is a gap: between two sound transactions, after the last one, or a single row. A deletion that
is lost is derived: a readable `GroupClosed` or `LeaseEnded` ends what it names. With respect to a
gap, a group is

    served     it began later, or no row is missing: it is as it was
    doubtful   all its rows are older: its closing may be in the gap. It is kept, marked
               `trainable=False` with the tag `doubtful`, so that no consumer gets it until somebody
               releases or drops it (`settle_doubtful`, `DataPoolClient.mark`, `drop_group`)
    dropped    it has rows on both sides and may lack one between, or a payload of it is damaged, or
               a picture that its steps refer to is damaged or gone

A group that had left and waits to be archived goes on waiting, unless it would be dropped. A group
of which no row is left cannot be named; its number is. The damaged folder stays beside the new one,
as `NAME.damaged`. Owns none of the formats: blocks are `segments.py`'s, heads are
`core/log_rows.py`'s.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from stepwell.datapool import ops
from stepwell.datapool.core.accounting import Counts, count_reason
from stepwell.datapool.core.group_log import RowLog
from stepwell.datapool.core.log_rows import (
    KIND_NAMES,
    GroupClosed,
    GroupLeft,
    GroupReturned,
    LeaseEnded,
    LeaseRecord,
    StepsStored,
    read,
)
from stepwell.datapool.core.pictures import keys_of
from stepwell.datapool.core.pool import COUNTS, DataPool
from stepwell.datapool.errors import (
    DamagedFileError,
    InvalidRequestError,
    JournalCorruptError,
    JournalError,
    NoJournalError,
    ReplayError,
)
from stepwell.datapool.selection import DOUBTFUL
from stepwell.datapool.store.folder import (
    ACKED_NAME,
    BEFORE_NAME,
    SALVAGED,
    LastCommit,
    finish_salvages,
    journal_exists,
    make_folder,
    read_last_commit,
    take_folder,
    write_last_commit,
)
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.picture_folder import PICTURES, read_picture
from stepwell.datapool.store.replay import UNKNOWN, restore
from stepwell.datapool.store.segments import (
    PayloadDamagedError,
    Placed,
    Row,
    block_at,
    blocks_in,
    journal_of,
    records_are_whole,
    records_in,
    row_at,
    segment_path,
    segments_in,
)

REASON = "damaged"
"""Why groups that were not whole were dropped."""
BEGUN = "new"
"""Folder of the new journal in salvage's own, until it is whole."""
SHARDS = "shard-*"
LOCK_S = 5.0
ROWS_AT_ONCE = 256

_Number: TypeAlias = tuple[str, int]
"""Channel and the group's number there."""


@dataclass(slots=True)
class Salvaged:
    """Report on the salvage of one journal."""

    folder: Path
    damage: str = ""
    """Damage that was found; empty: none, and nothing was done."""
    aside: Path | None = None
    """Folder of the damaged files now."""
    rows: int = 0
    """Rows in the new journal."""
    lost: list[str] = field(default_factory=list)
    """Losses, one sentence each; empty: none."""
    n_served: dict[str, int] = field(default_factory=dict)
    """Channel -> live groups that go on as they were."""
    doubtful: dict[str, list[str]] = field(default_factory=dict)
    """Channel -> prompt_uids of groups that may have been closed, or changed, in what is lost."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Channel -> prompt_uids of groups that were dropped because a row may be missing."""
    nameless: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Channel -> numbers, first and last, of groups that may be lost with all their rows."""

    def text(self) -> str:
        if not self.damage:
            return f"{self.folder}: nothing is damaged; it was left as it is"
        lines = [
            f"{self.folder}: no pool could open it: {self.damage}",
            f"  a usable journal of {self.rows} rows is in its place; the damaged files are in "
            f"{self.aside}",
            *(f"  lost: {line}" for line in self.lost or ["nothing that was acknowledged"]),
        ]
        for channel, n in self.n_served.items():
            lines.append(f"  as they were in channel {channel!r}: {n} groups")
        for channel, uids in self.doubtful.items():
            lines.append(
                f"  doubtful in channel {channel!r}, as their closing or a later row may be lost: "
                f"{len(uids)} groups, held until `--release` or `--drop`: {', '.join(uids)}"
            )
        for channel, uids in self.dropped.items():
            lines.append(
                f"  dropped in channel {channel!r}, as rows of them may be missing: {len(uids)} "
                f"groups: {', '.join(uids)}"
            )
        for channel, ranges in self.nameless.items():
            numbers = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges)
            lines.append(
                f"  without a name in channel {channel!r}: groups that may have begun in what is "
                f"lost, of which no row is left: number {numbers}, counted from the first group"
            )
        return "\n".join(lines)


def salvage(path: Path) -> list[Salvaged]:
    """Make usable journals of the damaged ones in `path`: a journal's folder, or the folder of
    several shards, or a run's folder.

    Raises:
        JournalLockedError: a live process uses it.
        JournalError: there is no journal, another version wrote it, or nothing can be written.
    """
    return [_salvage(folder) for folder in journals_in(path)]


def journals_in(path: Path) -> list[Path]:
    """Folders with a journal each: `path` itself, a run's pool, or the shards of one.

    Raises:
        NoJournalError: there is none.
    """
    path = path.absolute()
    for folder in (path.parent, path, path / "pool"):
        finish_salvages(folder)
    if (path / "pool").is_dir():
        path /= "pool"
    found = (p for p in path.glob(SHARDS) if p.is_dir() and "." not in p.name)
    shards = sorted(found, key=lambda p: (len(p.name), p.name))
    folders = [p for p in shards or [path] if journal_exists(p) or segments_in(p)]
    if not folders:
        raise NoJournalError(
            f"{path} holds no journal; give the pool's folder, e.g. runs/NAME/pool"
        )
    return folders


def remove_journals(path: Path) -> None:
    """Remove the journals of a stopped pool from its folder, and nothing else that is there."""
    for folder in (*path.glob(SHARDS), path):
        if not (journal_exists(folder) or segments_in(folder)):
            continue
        for number in segments_in(folder):
            segment_path(folder, number).unlink()
        shutil.rmtree(folder / PICTURES, ignore_errors=True)
        for name in (ACKED_NAME, BEFORE_NAME):
            (folder / name).unlink(missing_ok=True)
        if folder != path:
            with suppress(OSError):  # somebody has something of their own there
                folder.rmdir()


def _salvage(folder: Path) -> Salvaged:
    damage = _damage(folder)
    if damage is None:
        return Salvaged(folder)
    lock, _ = take_folder(folder, LOCK_S)
    for left in _left_of(folder):  # nobody else salvages a folder that is locked
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        report = Salvaged(folder, damage)
        _rebuild(folder, scratch / BEGUN, report)
        made = (scratch / BEGUN).rename(scratch / SALVAGED)
        aside, k = folder.with_name(f"{folder.name}.damaged"), 1
        while aside.exists():
            k += 1
            aside = folder.with_name(f"{folder.name}.damaged-{k}")
        folder.rename(aside)
        made.rename(folder)
        report.aside = aside
        return report
    except OSError as e:
        if isinstance(e, JournalError):
            raise
        raise JournalError(f"{folder}: no usable journal could be written beside it ({e})") from e
    finally:
        if folder.exists():  # else the next one finishes it
            shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _left_of(folder: Path) -> list[Path]:
    """Folders with copies of a journal that salvages of it left when they were killed."""
    return [
        acked.parents[1]
        for name in (BEGUN, SALVAGED)
        for acked in folder.parent.glob(f".*-*/{name}/{ACKED_NAME}")
        if acked.parents[1].name[1:].rpartition("-")[0] == folder.name
    ]


def _damage(folder: Path) -> str | None:
    """Return the damage of the journal; None if a pool could go on with it."""
    try:
        journal = Journal(folder, "process")
        try:
            restore(DataPool(UNKNOWN), journal)
        finally:
            journal.close()
    except (JournalCorruptError, ReplayError) as e:
        why = str(e).partition(". `stepwell")[0].partition("; keep the folder")[0]
        return why.removeprefix(f"{folder}: ")
    acked = read_last_commit(folder)
    if acked is None or not (folder / PICTURES).is_dir():
        return None
    return _Survey(folder, acked.journal, acked).lost_pictures()


def _rebuild(folder: Path, target: Path, report: Salvaged) -> None:
    try:
        acked = read_last_commit(folder)
    except ValueError:
        acked = None
    found = (journal_of(segment_path(folder, n).read_bytes()) for n in segments_in(folder))
    identity = acked.journal if acked is not None else next(filter(None, found), None)
    log = None if identity is None else _Survey(folder, identity, acked)
    if identity is None or log is None or not log.sequence:
        raise JournalError(
            f"{folder} has no readable log: nothing can be saved; move the folder aside to start "
            "empty"
        )
    if acked is None:
        report.lost.append(
            f"whether transactions after {log.sequence} were acknowledged cannot be told: "
            f"{ACKED_NAME} cannot be read"
        )
    report.lost += log.lost
    if told := log.lost_pictures():
        report.lost.append(told)
    groups = _Groups(log)
    if groups.unarchived:
        report.lost.append(
            f"{len(groups.unarchived)} groups that had left the pool and waited to be archived, as "
            f"rows of them may be missing: {', '.join(groups.unarchived)}"
        )
    make_folder(target)
    opening, next_row = (0, 0) if acked is None else (acked.opening, acked.next_row)
    write_last_commit(target, LastCommit(identity, opening, next_row=max(log.next_row, next_row)))
    journal = Journal(target, "process")
    try:
        for n, row in enumerate(log.rows(groups.kept), start=1):
            journal.put(*row)
            if n % ROWS_AT_ONCE == 0:
                journal.flush()
        for key, value in log.states.items():
            journal.put_state(key, value)
        journal.flush()
        pool = DataPool(UNKNOWN)
        for channel in {*groups.dropped, *groups.doubtful}:  # whose counts may be lost
            pool.channel(channel)
        restore(pool, journal)
        _settle(pool, journal, groups)
        report.rows = journal.statistics()["rows_stored"]
    finally:
        journal.close()
    log.link_pictures(target)
    report.dropped, report.doubtful, report.nameless = (
        groups.dropped,
        groups.doubtful,
        groups.nameless,
    )
    for name, channel_ in pool.channels.items():
        held = set(groups.doubtful.get(name, ()))
        if n_served := sum(uid not in held for uid in channel_.records.groups):
            report.n_served[name] = n_served


# --- reading ---


@dataclass(slots=True)
class _Gap:
    """A stretch of the log that cannot be read."""

    segment: int
    after: int
    """The last sound transaction before it."""
    first_row: int
    """Ids of the rows that were written in it …"""
    next_row: int
    """… end before this one."""
    known: dict[str, bytes]
    """States before it."""
    before: float = math.inf
    """The first sound transaction after it."""
    is_whole: bool = False
    """Only the header of a transaction is lost, and none of its rows."""
    is_row: bool = False
    """A single row is lost, and the deletions of its transaction are not."""
    lost: set[int] = field(default_factory=set)
    """Ids of its rows that no copy can be read of …"""
    live: set[int] = field(default_factory=set)
    """… and that were not deleted later."""
    n_lost: int = 0
    """Number of rows lost in this gap and those before it."""
    numbered: dict[str, int] = field(default_factory=dict)
    """By channel, the number of groups when the first transaction after it was written."""
    moved: dict[str, int] = field(default_factory=dict)
    """By channel, the last number of the groups of which it may have had the only copy of a row."""

    def numbers(self, channel: str) -> tuple[int, int | None]:
        """Groups that may have begun in it: numbers above the first, up to the second; None: any
        number. Each of them began with a row."""
        state = self.known.get(COUNTS + channel)
        last = self.numbered.get(channel)
        begin = _numbered(state)
        if state is None and self.after:
            return begin, last
        most = begin + self.n_lost
        return begin, most if last is None else min(last, most)


def _numbered(state: bytes | None) -> int:
    return 0 if state is None else msgspec.msgpack.decode(state, type=Counts).numbered


class _Survey:
    """All that can be read of a damaged log."""

    def __init__(self, folder: Path, identity: bytes, acked: LastCommit | None) -> None:
        self.folder, self.identity = folder, identity
        self.live: dict[int, tuple[int, int]] = {}
        """Segment and offset of each row that was not deleted."""
        self.written: dict[int, int] = {}
        """The last transaction that wrote a copy of the row."""
        self.heads: dict[int, tuple[str, int, Any]] = {}
        """Channel, number and record of every row that can be read, of deleted ones too."""
        self.damaged: set[int] = set()
        """Rows whose payload is not what was written."""
        self.states: dict[str, bytes] = {}
        self.sequence = self.next_row = 0
        self.gaps: list[_Gap] = []
        self.lost: list[str] = []
        self.waiting: set[_Number] = set()
        """Groups that left and are not archived."""
        self._deleted: set[int] = set()
        self._pictures: dict[str, bool] = {}
        """Pictures that were looked at: true if it can be read."""
        self._open: _Gap | None = None
        present = segments_in(folder)
        listed: dict[int, tuple[int, int]] = {}
        newest = 0
        for number in reversed(present):
            first = block_at(segment_path(folder, number).read_bytes(), 0, identity)
            if first is not None:
                listed, newest = first.block.segments or {}, number
                break
        wanted = sorted({*listed, *(n for n in present if n >= newest)})
        began: dict[int, dict[str, bytes]] = {}
        """States after the first transaction of a segment."""
        for number in wanted:
            path = segment_path(folder, number)
            if number not in present:
                self._lose(number, path.name)
                continue
            data, last = path.read_bytes(), None
            for placed in blocks_in(data, identity):
                if not placed.follows(last):
                    begin = 0 if last is None else last.end
                    self._lose(number, f"{path.name} from byte {begin} on")
                    self._find(number, data, begin, placed.at)
                self._take(number, data, placed)
                began.setdefault(number, dict(self.states))
                last = placed
            end, checksum = (0, 0) if last is None else (last.end, last.checksum)
            if number in listed and (end, checksum) != listed[number]:
                self._lose(number, f"{path.name} from byte {end} on")
                self._find(number, data, end, len(data))
            elif number == wanted[-1] and acked is not None and self.sequence < acked.sequence:
                self._lose(number, f"{path.name} from byte {end} on")
                self._find(number, data, end, len(data), acked.next_row)
        if acked is not None and self.sequence < acked.sequence:
            rows = f"rows {self.next_row} to {acked.next_row - 1}"
            self.lost.append(
                f"Acknowledged transactions {self.sequence + 1} to {acked.sequence} are lost: "
                f"{rows if self.next_row < acked.next_row else 'no new rows'}, and deletions"
            )
        self._end_of_log(acked, newest)
        n_lost = 0
        released = set(range(1, newest)).difference(wanted)
        for gap in self.gaps:
            gone = [n for n in released if n < gap.segment]
            if gone and gap.segment < newest and not (gap.is_row or gap.is_whole):
                after = min((n for n in wanted if n > max(gone)), default=0)
                states = began.get(after, self.states)
                names = [key for key in states if key.startswith(COUNTS)]
                gap.moved = {k.removeprefix(COUNTS): _numbered(states[k]) for k in names}
            gap.lost = set(range(gap.first_row, gap.next_row)) - self.heads.keys()
            gap.live = gap.lost - self._deleted
            n_lost += len(gap.lost)
            gap.n_lost = n_lost
        self.gaps = [gap for gap in self.gaps if gap.lost or gap.moved]
        self._end()

    def rows(self, kept: set[int]) -> Iterator[Row]:
        """These rows, in order; one with a damaged payload is without."""
        number, data = 0, b""
        for row in sorted(kept):
            segment, at = self.live[row]
            if segment != number:
                number, data = segment, segment_path(self.folder, segment).read_bytes()
            try:
                yield row_at(data, row, at)
            except PayloadDamagedError as e:
                yield e.row

    def lost_pictures(self) -> str | None:
        """Count the rows of live groups that refer to pictures which cannot be read as damaged;
        returns a sentence about these pictures, None if there are none."""
        for row in self.live:
            channel, number, record = self.heads[row]
            if isinstance(record, StepsStored) and (channel, number) not in self.waiting:
                for key in {
                    key for own in record.pictures.values() for key in keys_of(own).values()
                }:
                    if not self._has_picture(key):
                        self.damaged.add(row)
        lost = [key for key, is_sound in self._pictures.items() if not is_sound]
        return f"{len(lost)} pictures cannot be read: {', '.join(lost[:8])}" if lost else None

    def _has_picture(self, key: str) -> bool:
        if key not in self._pictures:
            try:
                self._pictures[key] = bool(read_picture(self.folder / PICTURES / key))
            except DamagedFileError:
                self._pictures[key] = False
        return self._pictures[key]

    def link_pictures(self, target: Path) -> None:
        """Let the new journal have the pictures, too, without damaged ones."""
        source = self.folder / PICTURES
        if not source.is_dir():
            return
        (target / PICTURES).mkdir(mode=0o700)
        for picture in source.iterdir():
            if self._pictures.get(picture.name, True):
                os.link(picture, target / PICTURES / picture.name)

    def _take(self, number: int, data: bytes, placed: Placed) -> None:
        block = placed.block
        if self._open is not None:
            self._open.next_row = max(block.first_row, self._open.first_row)
            self._open.before = block.sequence
            self._close()
        known = dict(self.states) if not placed.is_whole(data) else {}
        for other, dead in block.deleted.items():
            for row in dead:
                self._deleted.add(row)
                # Copies are only ever moved to later segments: one that is older is dead, too.
                if row in self.live and self.live[row][0] <= other:
                    del self.live[row]
        self.states |= block.states
        for key, state in block.states.items():
            if key.startswith(COUNTS):
                for gap in self.gaps:
                    gap.numbered.setdefault(key.removeprefix(COUNTS), _numbered(state))
        for row, at, _ in placed.records():
            self._put(number, data, row, at, block.sequence, known)
        if block.segments is not None:
            counting = {*block.segments, number}
            for row in [r for r, (n, _) in self.live.items() if n not in counting]:
                del self.live[row]
        self.sequence, self.next_row = block.sequence, block.next_row

    def _put(
        self, number: int, data: bytes, row: int, at: int, sequence: int, known: dict[str, bytes]
    ) -> None:
        try:
            found = row_at(data, row, at)
        except PayloadDamagedError as e:
            self.lost.append(str(e))
            if row in self.live:
                return  # there is another copy
            self.damaged.add(row)
            found = e.row
        except ValueError as e:
            self.lost.append(str(e))
            gap = _Gap(number, sequence - 1, row, row + 1, known, sequence, is_row=True)
            names = [key for key in self.states if key.startswith(COUNTS)]
            gap.numbered = {k.removeprefix(COUNTS): _numbered(self.states[k]) for k in names}
            self.gaps.append(gap)
            return
        else:
            self.damaged.discard(row)
        try:
            _, group, record = read(found.kind, found.head)
        except (LookupError, msgspec.DecodeError):
            group, record = 0, None  # if it is live, the restore says which release wrote it
        self.heads[row] = found.channel, group, record
        self.live[row] = number, at
        self.written[row] = sequence

    def _find(
        self, number: int, data: bytes, begin: int, end: int, next_row: int | None = None
    ) -> None:
        """Sound rows of transactions that are damaged themselves."""
        if self._open is not None and self._open.segment == number:
            self._open.is_whole = records_are_whole(data, begin, end)
        for row, at in records_in(data, begin, end, KIND_NAMES):
            if row not in self._deleted and (next_row is None or row < next_row):
                self._put(number, data, row, at, self.sequence + 1, {})

    def _lose(self, number: int, where: str) -> None:
        self.lost.append(f"transactions after {self.sequence}: {where}")
        if self._open is None:
            known = dict(self.states)
            self._open = _Gap(number, self.sequence, self.next_row, self.next_row, known)

    def _end_of_log(self, acked: LastCommit | None, newest: int) -> None:
        if acked is not None and self.sequence < acked.sequence and self._open is None:
            self._lose(newest, "the end of the log")
        if self._open is not None:
            end = self.next_row if acked is None else acked.next_row
            self._open.next_row = max(end, self._open.first_row)
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self.gaps.append(self._open)
            self._open = None

    def _end(self) -> None:
        """Take out what the readable closings end: it is dead, whether its deletion can be read or
        not."""
        closed: dict[tuple[str, str], int] = {}
        leases: dict[str, int] = {}
        over: set[str] = set()
        for row, (channel, _, record) in sorted(self.heads.items()):
            if isinstance(record, GroupClosed) and record.how is not None:
                closed[channel, record.prompt_uid] = row
            elif isinstance(record, LeaseEnded):
                over.add(record.lease_id)
            elif isinstance(record, LeaseRecord):
                leases[record.lease_id] = row
        uids = uids_of(self.heads)
        for channel, number, record in map(self.heads.__getitem__, self.live):
            if isinstance(record, GroupLeft):
                self.waiting.add((channel, number))
        for row in list(self.live):
            channel, number, record = self.heads[row]
            if isinstance(record, LeaseRecord):
                is_dead = record.lease_id in over or leases[record.lease_id] != row
            elif (channel, number) in self.waiting:
                is_dead = False
            else:
                is_dead = row < closed.get((channel, uids.get((channel, number), "")), 0)
            if is_dead:
                del self.live[row]


def uids_of(heads: Mapping[int, tuple[str, int, Any]]) -> dict[_Number, str]:
    """The prompt_uid of each group of which a row has it."""
    found: dict[_Number, str] = {}
    for channel, number, record in heads.values():
        uid = getattr(record, "prompt_uid", None)
        if number and uid is not None:
            found[channel, number] = uid
    return found


# --- choosing ---


class _Rows:
    """Rows of a group, as a pool is restored from."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def rows(self) -> Iterator[Row]:
        return iter(self._rows)

    def states(self) -> dict[str, bytes]:
        return {}

    def read(self, rows: Sequence[int]) -> list[bytes]:
        found = {row.row: row.payload for row in self._rows}
        return [found[row] for row in rows]

    def heads(self, rows: Sequence[int]) -> list[tuple[str, bytes]]:
        found = {row.row: (row.kind, row.head) for row in self._rows}
        return [found[row] for row in rows]

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        return 0

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None: ...

    def delete(self, rows: Iterable[int]) -> None: ...

    def put_state(self, key: str, value: bytes) -> None: ...

    def places(self, rows: Iterable[int]) -> None: ...

    def scrub(self) -> None: ...


class _Groups:
    """Rows that are kept, and groups that are doubtful, dropped or without a name."""

    def __init__(self, log: _Survey) -> None:
        self.kept: set[int] = set()
        self.doubtful: dict[str, list[str]] = {}
        self.dropped: dict[str, list[str]] = {}
        self.nameless: dict[str, list[tuple[int, int]]] = {}
        self.unarchived: list[str] = []
        """Groups that left before, and will not be archived."""
        self.last: dict[str, int] = {}
        """The highest number by channel."""
        self._log = log
        leases = (r for *_, r in log.heads.values() if isinstance(r, LeaseRecord | LeaseEnded))
        numbers = (int(lease.lease_id.rpartition("-")[2]) for lease in leases)
        self.last_lease = max(numbers, default=0)
        """The highest number in the id of a lease."""
        self.n_lost = sum(len(gap.lost) for gap in log.gaps)
        """Rows that are lost."""
        uids = uids_of(log.heads)
        rows: dict[_Number, list[int]] = {}
        for row in sorted(log.live):
            channel, number, _ = log.heads[row]
            if number:
                rows.setdefault((channel, number), []).append(row)
                self.last[channel] = max(number, self.last.get(channel, 0))
            elif row not in log.damaged:  # a step that came late
                self.kept.add(row)
        newest = {(key[0], uids.get(key)): key[1] for key in sorted(rows)}
        for (channel, number), own in sorted(rows.items()):
            uid = uids.get((channel, number))
            if uid is None:
                self.nameless.setdefault(channel, []).append((number, number))
                continue
            is_waiting = (channel, number) in log.waiting
            if newest[channel, uid] != number and not is_waiting:
                continue  # its uid was used anew, so it was closed
            fate = self._fate(channel, number, own)
            if is_waiting and fate is self.dropped:
                self.unarchived.append(uid)
            elif fate is not None and not is_waiting:
                fate.setdefault(channel, []).append(uid)
            if fate is not self.dropped:
                self.kept.update(own)
        self._count_nameless()

    def _fate(self, channel: str, number: int, rows: list[int]) -> dict[str, list[str]] | None:
        """Return the mapping that lists the group, `dropped` or `doubtful`; None: it is as it
        was."""
        log = self._log
        if not log.damaged.isdisjoint(rows):
            return self.dropped
        is_doubtful = is_old = False
        for gap in log.gaps:
            _, last = gap.numbers(channel)
            if number <= gap.moved.get(channel, 0):
                return self.dropped
            if last is not None and number > last:
                continue
            is_old = True
            if gap.is_row:
                is_later = any(r >= gap.first_row or log.written[r] > gap.before for r in rows)
            else:
                is_later = any(log.written[r] >= gap.before for r in rows)
            if is_later and gap.live:
                return self.dropped
            if not is_later and (gap.live if gap.is_row else gap.lost):
                is_doubtful = True
        if is_old and not self._follows(rows):
            return self.dropped
        return self.doubtful if is_doubtful else None

    def _follows(self, rows: list[int]) -> bool:
        """True if a pool can be restored from these rows."""
        pool = DataPool(UNKNOWN)
        try:
            restore(pool, _Rows(list(self._log.rows(set(rows)))))
        except ReplayError:
            return False
        return not any(channel.has_hollow for channel in pool.channels.values())

    def _count_nameless(self) -> None:
        seen: dict[str, set[int]] = {}
        for channel, number, _ in self._log.heads.values():
            seen.setdefault(channel, set()).add(number)
        for gap in self._log.gaps:
            names = {k.removeprefix(COUNTS) for k in self._log.states if k.startswith(COUNTS)}
            for channel in names:
                first, last = gap.numbers(channel)
                last = first + gap.n_lost if last is None else last
                if not gap.lost:
                    last = first
                may = {*range(first + 1, last + 1), *range(1, gap.moved.get(channel, 0) + 1)}
                for number in sorted(may - seen.get(channel, set())):
                    self.nameless.setdefault(channel, []).append((number, number))
        for channel, numbers in self.nameless.items():
            merged: list[tuple[int, int]] = []
            for number, _ in sorted(set(numbers)):
                if merged and merged[-1][1] == number - 1:
                    merged[-1] = merged[-1][0], number
                else:
                    merged.append((number, number))
            self.nameless[channel] = merged


def _settle(pool: DataPool, journal: Journal, groups: _Groups) -> None:
    """Hold what is doubtful and count what was dropped, so that every group, trajectory and step is
    somewhere."""
    for channel_name, uids in groups.dropped.items():
        log = RowLog(channel_name, 0, pool.pictures)
        log.journal = journal
        for uid in uids:  # a late step must not begin the group anew
            closed = GroupClosed(uid, f"dropped ({REASON})", {})
            log.append(closed, 0.0, None)
    _end_leases(pool, groups)
    pool.leases.recount(groups.last_lease, groups.n_lost)
    for channel_name, uids in groups.doubtful.items():
        channel = pool.channels[channel_name]
        for uid in uids:
            marks = {"trainable": False, "add_tags": [DOUBTFUL]}
            channel.mark(ops.Mark(uid, None, marks, channel_name))
    for channel in pool.channels.values():
        channel.erase_deleted()  # earlier copies of their rows may be back
        counts, live = channel.counts, channel.records.groups.values()
        counts.numbered = max(counts.numbered, groups.last.get(channel.name, 0))
        n_dropped = (
            counts.groups.submitted - len(live) - counts.groups.acked - counts.groups.dropped
        )
        # Fewer than none: what was counted as closed is back, doubtful, and is counted anew.
        counts.groups.submitted += max(0, -n_dropped)
        counts.groups.dropped += max(0, n_dropped)
        for _ in range(n_dropped):
            count_reason(counts.groups.drop_reasons, REASON)
        trajectories, steps = counts.trajectories, counts.steps
        trajectories.open = sum(group.n_open for group in live)
        trajectories.complete = sum(len(group.complete) for group in live)
        somewhere = trajectories.open + trajectories.complete
        somewhere += trajectories.acked + trajectories.aborted
        trajectories.submitted = max(trajectories.submitted, somewhere)
        trajectories.dropped = trajectories.submitted - somewhere
        stored = [step for g in live for t in g.trajectories for step in t.steps]
        steps.stored, counts.tokens = len(stored), sum(step.n_tokens for step in stored)
        n_more = max(0, steps.stored + steps.acked - steps.accepted)
        steps.accepted, steps.submitted = steps.accepted + n_more, steps.submitted + n_more
        steps.dropped = steps.accepted - steps.stored - steps.acked
        channel.log.is_changed = True
    pool.write_counts()
    journal.flush()


def _end_leases(pool: DataPool, groups: _Groups) -> None:
    """Leases with a group that is dropped or doubtful are over; what else they held is ready
    again."""
    held: dict[str, set[str]] = {name: set() for name in pool.channels}
    for lease in pool.leases.active():
        channel = pool.channel(lease.channel)
        leased = {uid for uid in lease.prompt_uids if channel.is_leased(uid)}
        if leased == set(lease.prompt_uids).difference(groups.doubtful.get(lease.channel, ())):
            held.setdefault(lease.channel, set()).update(leased)
        else:
            pool.leases.end(lease.lease_id, "expired", channel.now)
    for channel in pool.channels.values():
        rest = [g for g in channel.records.groups if channel.is_leased(g)]
        for uid in reversed([uid for uid in rest if uid not in held[channel.name]]):
            channel.give_back(GroupReturned(uid))


# --- what people decide ---


def settle_doubtful(path: Path, uids: Iterable[str], *, release: bool) -> dict[str, list[str]]:
    """Release or drop doubtful groups of a pool that nobody runs.

    Args:
        path: as `salvage`.
        uids: prompt_uids; none: all that are doubtful.
        release: serve them from now on; else drop them.

    Returns:
        Channel -> prompt_uids that it was done with.

    Raises:
        InvalidRequestError: one of them is not doubtful here.
        JournalError: as `salvage`; or the journal is damaged.
    """
    wanted, done = set(uids), dict[str, list[str]]()
    for folder in journals_in(path):
        journal = Journal(folder, "process", lock_timeout_s=LOCK_S)
        try:
            pool = DataPool(UNKNOWN)
            restore(pool, journal)
            for name, channel in pool.channels.items():
                for uid in channel.doubtful():
                    if wanted and uid not in wanted:
                        continue
                    done.setdefault(name, []).append(uid)
                    op: ops.Op[Any] = ops.DropGroup(uid, DOUBTFUL, name)
                    if release:
                        tags = sorted(channel.records.groups[uid].marks.tags - {DOUBTFUL})
                        marks = {"trainable": None, "tags": tags}
                        op = ops.Mark(uid, None, marks, name)
                    pool.apply(op, channel.now)
            pool.write_counts()
            journal.flush()
        finally:
            journal.close()
    if unknown := wanted.difference(*done.values()):
        raise InvalidRequestError(
            f"no doubtful group is called {', '.join(sorted(unknown))}; `stepwell groups` lists "
            f"what is held, with the tag {DOUBTFUL!r}"
        )
    return done
