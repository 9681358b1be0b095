"""This module makes a usable journal of a damaged one so that a pool can go on, and says what is
lost.

The log is read two ways, and the one that keeps more rows is taken:

    up to the damage    the pool at the end of some transaction; only what came later is lost
    around the damage   every sound transaction and row. No row says to which group a lost one
                        belonged, and a lost deletion would bring a group back: every group that is
                        older than the damage is dropped, and named. A row with a sound head and
                        a damaged payload costs its own group alone

A producer may issue a dropped group again; a group that lacks a reward or a step must not be
trained. The damaged folder stays beside the new one, as `NAME.damaged`. Owns none of the formats:
blocks are `segments.py`'s, heads are `replay.py`'s.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.accounting import Counts, count_reason
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.core.rows import POOL, GroupClosed, LeaseRecord, read, write
from stepwell.datapool.errors import JournalCorruptError, JournalError, ReplayError
from stepwell.datapool.store.folder import (
    ACKED_NAME,
    Acked,
    journal_exists,
    lock_folder,
    lost_between,
    read_acked,
)
from stepwell.datapool.store.index import Found, expected, read_log
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import COUNTS, restore
from stepwell.datapool.store.segments import (
    BLOCK_MAGIC,
    SEGMENT,
    Block,
    Row,
    block_at,
    journal_of,
    read_rows,
    runs,
    segment_path,
    segments_in,
    sound_blocks,
)

REASON = "damaged"
"""Why groups that were not whole were dropped."""
SHARDS = "shard-*"
LOCK_S = 5.0


@dataclass(slots=True)
class Salvaged:
    """What `salvage` did with one journal."""

    folder: Path
    damage: str = ""
    """What was wrong; empty: nothing, and nothing was done."""
    aside: Path | None = None
    """Where the damaged files are now."""
    rows: int = 0
    """Rows in the new journal."""
    lost: list[str] = field(default_factory=list)
    """What is gone, one sentence each; empty: nothing."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Channel -> prompt_uids of groups that were dropped because a row may be missing."""

    def text(self) -> str:
        if not self.damage:
            return f"{self.folder}: nothing is damaged; it was left as it is"
        lines = [
            f"{self.folder}: {self.damage}",
            f"  a usable journal of {self.rows} rows is in its place; the damaged files are in "
            f"{self.aside}",
            *(f"  lost: {line}" for line in self.lost or ["nothing that was acknowledged"]),
        ]
        for channel, uids in self.dropped.items():
            lines.append(
                f"  dropped in channel {channel!r}, as rows of them may be missing: {len(uids)} "
                f"groups: {', '.join(uids)}"
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
        JournalError: there is none.
    """
    path = path.absolute()
    if (path / "pool").is_dir():
        path /= "pool"
    shards = sorted(p for p in path.glob(SHARDS) if p.is_dir() and "." not in p.name)
    folders = [p for p in shards or [path] if journal_exists(p) or segments_in(p)]
    if not folders:
        raise JournalError(f"{path} holds no journal; give the pool's folder, e.g. runs/NAME/pool")
    return folders


def _salvage(folder: Path) -> Salvaged:
    damage = _damage(folder)
    if damage is None:
        return Salvaged(folder)
    lock = lock_folder(folder, LOCK_S)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        report = Salvaged(folder, damage)
        _rebuild(folder, scratch / "new", report)
        aside, k = folder.with_name(f"{folder.name}.damaged"), 1
        while aside.exists():
            k += 1
            aside = folder.with_name(f"{folder.name}.damaged-{k}")
        folder.rename(aside)
        (scratch / "new").rename(folder)
        report.aside = aside
        return report
    except OSError as e:
        if isinstance(e, JournalError):
            raise
        raise JournalError(f"{folder}: no usable journal could be written beside it ({e})") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _damage(folder: Path) -> str | None:
    """What is wrong with the journal; None if a pool could go on with it."""
    try:
        journal = Journal(folder, "process")
        try:
            restore(DataPool(PoolConfig()), journal, journal.rows(), journal.states(), journal.read)
        finally:
            journal.close()
    except (JournalCorruptError, ReplayError) as e:
        return str(e).partition(". `stepwell")[0].partition("; keep the folder")[0]
    return None


def _rebuild(folder: Path, target: Path, report: Salvaged) -> None:
    try:
        acked = read_acked(folder)
    except ValueError:
        acked = None
    found = (journal_of(segment_path(folder, n).read_bytes()) for n in segments_in(folder))
    identity = acked.journal if acked is not None else next(filter(None, found), None)
    if identity is None:
        raise _nothing(folder)
    before = _up_to_the_damage(folder, identity)
    around = _Scan(folder, identity)
    choice = _Choice(around)
    best: Found = around
    if before is not None and before.index.n_rows >= len(choice.kept):
        best = before
    if not best.sequence:
        raise _nothing(folder)
    if acked is None:
        report.lost.append(
            f"whether transactions after {best.sequence} were acknowledged cannot be told: "
            f"{ACKED_NAME} cannot be read"
        )
    elif best.sequence < acked.sequence:
        n_rows = best.index.n_rows
        report.lost.append(lost_between(best.sequence, best.next_row, n_rows, acked))
    if best is around:
        report.lost += around.lost
        report.dropped = choice.dropped
    elif names := choice.groups_since(before.next_row if before else 0):
        report.lost.append(f"of these, rows that can still be read are of the groups {names}")
    last = Acked(identity, 0) if acked is None else acked
    sequence = max(best.sequence, around.sequence, last.sequence)
    next_row = max(best.next_row, around.next_row, last.next_row)
    journal = Journal(target, "process")
    try:
        rows = (row for row in _load(folder, best) if best is before or row.row in choice.kept)
        journal.refill(last._replace(sequence=sequence, next_row=next_row), rows, best.states)
        if best is around:
            _settle(journal, choice)
        else:
            _restore(journal)  # to be sure
        report.rows = journal.statistics()["rows_stored"]
    finally:
        journal.close()


def _nothing(folder: Path) -> JournalError:
    return JournalError(
        f"{folder} has no readable log: nothing can be saved; move the folder aside to start empty"
    )


# --- reading ---


def _up_to_the_damage(folder: Path, identity: bytes) -> Found | None:
    """The log as it was at the end of the latest transaction whose segments are all there."""
    for newest in reversed(segments_in(folder)):
        try:
            return read_log(folder, identity, newest)
        except ValueError:
            continue  # a segment that there was then is damaged, or was dropped since
    return None


def _load(folder: Path, found: Found, payloads: bool = True) -> Iterator[Row]:
    """The rows that live, in order."""
    number, data = 0, b""
    for segment, places in found.index.places():
        if segment != number:
            number, data = segment, segment_path(folder, segment).read_bytes()
        yield from read_rows(data, places, payloads)


def _read(data: bytes, row: int, at: int, payloads: bool = True) -> Row | None:
    """None: it is not as it was written."""
    try:
        return next(read_rows(data, [(row, at)], payloads))
    except (ValueError, struct.error):
        return None


class _Scan(Found):
    """All sound transactions and rows of a damaged log."""

    def __init__(self, folder: Path, identity: bytes) -> None:
        super().__init__()
        self.folder = folder
        self.headed: dict[int, Row] = {}
        """Rows whose payload is not what was written."""
        self.begin = 0
        """Groups that began before this row may lack one, or be back …"""
        self.n_unknown = 0
        """… and so may as many that seem to begin later, but began with a row that is lost."""
        self.lost: list[str] = []
        self._gap = ""
        present = {n: segment_path(folder, n).read_bytes() for n in segments_in(folder)}
        sound = [n for n, data in present.items() if any(sound_blocks(data, identity))]
        newest = max(sound, default=0)
        known = expected(sound_blocks(present.get(newest, b""), identity))
        for number in sorted({*known, *(n for n in present if n >= newest)}):
            self._scan(number, present.get(number, b""), identity)
            if known.get(number, (self.end, self.crc)) != (self.end, self.crc) and not self._gap:
                self._gap = f"the end of {segment_path(folder, number).name}"

    def _scan(self, number: int, data: bytes, identity: bytes) -> None:
        at, name = SEGMENT.size, segment_path(self.folder, number).name
        if not data:
            self._gap = name
        while 0 < at < len(data):
            block = block_at(data, at, identity)
            if block is None:
                self._gap = self._gap or f"{name} from byte {at} on"
                at = data.find(BLOCK_MAGIC, at + 1)
            else:
                self._take(number, data, block)
                at = block.end

    def _take(self, number: int, data: bytes, block: Block) -> None:
        if self.segment == number and block.sequence != self.sequence + 1:
            self._gap = (
                self._gap or f"they were cut out of {segment_path(self.folder, number).name}"
            )
        if self._gap:
            self.lost.append(f"transactions after {self.sequence}: {self._gap}")
            self._lose(block.first_row, block.first_row - self.next_row)
            self._gap = ""
        self.sequence, self.next_row = block.sequence, block.next_row
        self.segment, self.end, self.crc = number, block.end, block.crc
        self.index.grow(number, block.end, block.crc)
        if (meta := block.meta(data)) is None:
            self.lost.append(f"transaction {block.sequence}, {block.n_rows} rows")
            self._lose(block.next_row, block.n_rows)
            return
        for row, at, size in meta.records(block.at):
            self._take_row(number, data, row, at, size)
        self.states |= meta.states
        for row in (r for first, n in runs(meta.deleted) for r in range(first, first + n)):
            self.index.delete(row, number)
            self.headed.pop(row, None)

    def _take_row(self, number: int, data: bytes, row: int, at: int, size: int) -> None:
        if _read(data, row, at) is not None:
            self.index.put(number, row, at, size)
            self.headed.pop(row, None)
            return
        self.lost.append(f"row {row}, which is not as it was written")
        if (found := _read(data, row, at, payloads=False)) is None:
            self._lose(row + 1, 1)
        elif self.index.find(row) is None:  # else there is another copy
            self.headed[row] = found

    def _lose(self, begin: int, n_rows: int) -> None:
        self.begin = max(self.begin, begin)
        self.n_unknown += n_rows

    def rows(self) -> list[Row]:
        """Those whose head is sound, in order."""
        return sorted([*_load(self.folder, self, payloads=False), *self.headed.values()])


# --- choosing ---


class _Choice:
    """Which rows around the damage are kept: groups that have all theirs for certain, and what is
    remembered of closed ones."""

    def __init__(self, scan: _Scan) -> None:
        self.dropped: dict[str, list[str]] = {}
        self.leases: list[LeaseRecord] = []
        """Leases of which a group is dropped."""
        self.kept: set[int] = set()
        self.groups: dict[tuple[str, str], list[int]] = {}
        """Rows by channel and prompt_uid."""
        owners = _Owners()
        leases: list[LeaseRecord] = []
        for row in scan.rows():
            uid = owners.of(row)
            if uid is not None:
                self.groups.setdefault((row.channel, uid), []).append(row.row)
            elif row.channel == POOL and row.kind == LeaseRecord.__name__:
                leases.append(_lease(row))
            elif row.channel == POOL or row.kind == GroupClosed.__name__:
                self.kept.add(row.row)
        later = [group for group, rows in self.groups.items() if rows[0] >= scan.begin]
        later.sort(key=lambda group: owners.numbers.get(group, -1))
        whole: set[tuple[str, str]] = set()
        for channel in {channel for channel, _ in later}:
            whole.update([group for group in later if group[0] == channel][scan.n_unknown :])
        for group, rows in self.groups.items():
            if group in whole and scan.headed.keys().isdisjoint(rows):
                self.kept.update(rows)
            else:
                self.dropped.setdefault(group[0], []).append(group[1])
        for lease in leases:
            gone = self.dropped.get(lease.channel, [])
            if any(uid in gone for uid in lease.prompt_uids):
                self.leases.append(lease)
            else:
                self.kept.add(lease.row)

    def groups_since(self, row: int) -> str:
        """Those that have this row or a later one."""
        uids = (f"{uid!r}" for (_, uid), rows in self.groups.items() if rows[-1] >= row)
        return ", ".join(sorted(uids))


# --- looking into heads ---


class _Owners:
    """Which group a row is of. To be asked in order of the rows."""

    def __init__(self) -> None:
        self._trajectories: dict[tuple[str, str], str] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        """By channel and prompt_uid: groups that began later have a higher one."""

    def of(self, row: Row) -> str | None:
        """Its prompt_uid; None: of no live group, or of one whose beginning is lost."""
        if row.channel == POOL or row.kind == GroupClosed.__name__:
            return None
        _, number, record = read(row.kind, row.head)
        trajectory_uid = getattr(record, "trajectory_uid", None)
        prompt_uid: str | None = getattr(record, "prompt_uid", None)
        if prompt_uid is None:
            return self._trajectories.get((row.channel, str(trajectory_uid)))
        if trajectory_uid is not None:
            self._trajectories[row.channel, trajectory_uid] = prompt_uid
        if number:
            self.numbers[row.channel, prompt_uid] = number
        return prompt_uid


def _lease(row: Row) -> LeaseRecord:
    _, _, record = read(row.kind, row.head)
    return replace(cast(LeaseRecord, record), row=row.row)


# --- writing ---


def _restore(journal: Journal) -> tuple[DataPool, dict[str, Counts]]:
    """The pool that the journal describes, and what its rows alone count by channel."""
    states = journal.states()
    pool = DataPool(PoolConfig())
    names = [key.removeprefix(COUNTS) for key in states if key.startswith(COUNTS)]
    for name in {*names, *(row.channel for row in journal.rows(payloads=False))} - {POOL}:
        pool.channel(name)
    others = {key: state for key, state in states.items() if not key.startswith(COUNTS)}
    restore(pool, journal, journal.rows(), others, journal.read)
    replayed = {name: channel.counts for name, channel in pool.channels.items()}
    for name in names:
        pool.channels[name].restore_counts(states[COUNTS + name])
    return pool, replayed


def _settle(journal: Journal, choice: _Choice) -> None:
    """Count what was dropped, so that every group, trajectory and step is somewhere."""
    for channel_name, uids in choice.dropped.items():
        for uid in uids:  # a late step must not begin the group anew
            closed = GroupClosed(uid, f"dropped ({REASON})", {})
            write(journal, channel_name, closed, 0.0, 0, None)
    journal.flush()
    pool, replayed = _restore(journal)
    for lease in choice.leases:
        pool.leases.restore(replace(lease, row=-1))
        pool.leases.end(lease.lease_id, "expired", pool.channels[lease.channel].now)
    for name, channel in pool.channels.items():
        counts, live = channel.counts, replayed[name]
        groups, trajectories, steps = counts.groups, counts.trajectories, counts.steps
        n_dropped = groups.submitted - len(channel.prompt_groups) - groups.acked - groups.dropped
        groups.dropped += n_dropped
        for _ in range(n_dropped):
            count_reason(groups.drop_reasons, REASON)
        complete = sum(len(group.complete) for group in channel.prompt_groups.values())
        trajectories.open, trajectories.complete = live.trajectories.open, complete
        trajectories.dropped = (
            trajectories.submitted
            - trajectories.open
            - complete
            - trajectories.acked
            - trajectories.aborted
        )
        steps.stored = live.steps.stored
        steps.dropped = steps.accepted - steps.stored - steps.acked
        counts.tokens = live.tokens
        channel.changed = True
    pool.write_counts()
    journal.flush()
