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
blocks are `segments.py`'s, heads are `core/rows.py`'s.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.accounting import count_reason
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.core.rows import (
    GroupClosed,
    GroupReturned,
    LeaseEnded,
    LeaseRecord,
    StepsStored,
    Writer,
    read,
)
from stepwell.datapool.errors import JournalCorruptError, JournalError, ReplayError
from stepwell.datapool.store.folder import (
    ACKED_NAME,
    Acked,
    journal_exists,
    lost_between,
    make_folder,
    read_acked,
    take_folder,
    write_acked,
)
from stepwell.datapool.store.index import Found, read_log
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.segments import (
    OFFSET_BITS,
    OFFSET_MASK,
    PayloadDamagedError,
    Placed,
    Row,
    blocks_in,
    journal_of,
    row_at,
    segment_path,
    segments_in,
)

REASON = "damaged"
"""Why groups that were not whole were dropped."""
SHARDS = "shard-*"
LOCK_S = 5.0
ROWS_AT_ONCE = 256

_Group: TypeAlias = tuple[str, str]
"""Channel and prompt_uid."""


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
    found = (p for p in path.glob(SHARDS) if p.is_dir() and "." not in p.name)
    shards = sorted(found, key=lambda p: (len(p.name), p.name))
    folders = [p for p in shards or [path] if journal_exists(p) or segments_in(p)]
    if not folders:
        raise JournalError(f"{path} holds no journal; give the pool's folder, e.g. runs/NAME/pool")
    return folders


def _salvage(folder: Path) -> Salvaged:
    damage = _damage(folder)
    if damage is None:
        return Salvaged(folder)
    lock, _ = take_folder(folder, LOCK_S)
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
            restore(DataPool(PoolConfig()), journal)
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
    before = None if identity is None else _up_to_the_damage(folder, identity)
    around = _Around(folder, identity or b"")
    groups = _Groups(around)
    best = before if before and before.index.n_rows >= len(groups.kept) else around
    if identity is None or not best.sequence:
        raise JournalError(
            f"{folder} has no readable log: nothing can be saved; move the folder aside to start "
            "empty"
        )
    last = acked or Acked(identity, 0, sequence=best.sequence)
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
        report.dropped = groups.dropped
    elif names := groups.since(best.next_row):
        report.lost.append(f"of these, rows that can still be read are of the groups {names}")
    make_folder(target)
    next_row = max(best.next_row, around.next_row, last.next_row)
    write_acked(target, Acked(identity, last.opening, next_row=next_row))
    journal = Journal(target, "process")
    try:
        kept = (row for row in _rows(folder, best) if best is before or row.row in groups.kept)
        for n, row in enumerate(kept, start=1):
            journal.put(row)
            if n % ROWS_AT_ONCE == 0:
                journal.flush()
        for key, value in best.states.items():
            journal.put_state(key, value)
        journal.flush()
        pool = DataPool(PoolConfig())
        for channel, _ in groups.rows:  # whose counts may be lost
            pool.channel(channel)
        restore(pool, journal)
        if best is around:
            _settle(pool, journal, groups)
        report.rows = journal.statistics()["rows_stored"]
    finally:
        journal.close()


# --- reading ---


def _up_to_the_damage(folder: Path, identity: bytes) -> Found | None:
    """The log as it was at the end of the latest transaction whose segments are all there."""
    for newest in reversed(segments_in(folder)):
        try:
            return read_log(folder, identity, newest)
        except ValueError:
            continue  # a segment that there was then is damaged, or was dropped since
    return None


def _rows(folder: Path, found: Found) -> Iterator[Row]:
    """The rows that live, in order; one with a damaged payload is without."""
    number, data = 0, b""
    for row, place in found.index.places():
        if place >> OFFSET_BITS != number:
            number = place >> OFFSET_BITS
            data = segment_path(folder, number).read_bytes()
        try:
            yield row_at(data, row, place & OFFSET_MASK)
        except PayloadDamagedError as e:
            yield e.row


class _Around(Found):
    """All sound transactions and rows of a damaged log."""

    def __init__(self, folder: Path, identity: bytes) -> None:
        super().__init__()
        self.folder = folder
        self.damaged: set[int] = set()
        """Rows whose payload is not what was written."""
        self.begin = 0
        """Groups that began before this row may lack one, or be back …"""
        self.n_unknown = 0
        """… and so may as many that seem to begin later, but began with a row that is lost."""
        self.lost: list[str] = []
        missed: set[int] = set()
        for number in segments_in(folder):
            path = segment_path(folder, number)
            data, last = path.read_bytes(), None
            for placed in blocks_in(data, identity):
                if not placed.follows(last):
                    at = 0 if last is None else last.end
                    self._lose_up_to(placed, f"{path.name} from byte {at} on")
                for other, end in sorted((placed.block.segments or {}).items()):
                    known = self.index.segments.get(other)
                    if other not in missed and (
                        known is None or (known.end, known.checksum) != end
                    ):
                        missed.add(other)
                        self._lose_up_to(placed, segment_path(folder, other).name)
                self._take(number, data, placed)
                last = placed

    def _take(self, number: int, data: bytes, placed: Placed) -> None:
        if placed.is_whole(data):
            self.apply(number, placed)
            return
        self.apply(number, placed._replace(block=replace(placed.block, rows=[], sizes=[])))
        for row, at, size in placed.records():
            try:
                row_at(data, row, at)
            except PayloadDamagedError as e:
                self.lost.append(str(e))
                if self.index.find(row) is not None:
                    continue  # there is another copy
                self.damaged.add(row)
            except ValueError as e:
                self.lost.append(str(e))
                self._lose(row + 1, 1)
                continue
            self.index.put(self.index.segments[number], row, at, size)

    def _lose_up_to(self, placed: Placed, where: str) -> None:
        self.lost.append(f"transactions after {self.sequence}: {where}")
        first_row = placed.block.first_row
        self._lose(first_row, max(0, first_row - self.next_row))

    def _lose(self, begin: int, n_rows: int) -> None:
        self.begin = max(self.begin, begin)
        self.n_unknown += n_rows


# --- choosing ---


class _Groups:
    """Which rows around the damage are kept: those of groups that have all theirs for certain, and
    what is remembered of closed ones."""

    def __init__(self, around: _Around) -> None:
        self.rows: dict[_Group, list[int]] = {}
        """Of each live group."""
        self.kept: set[int] = set()
        self.dropped: dict[str, list[str]] = {}
        """prompt_uids by channel."""
        self.leases: list[LeaseRecord] = []
        """Leases of which a group is dropped."""
        self._uids: dict[tuple[str, str], str] = {}
        """prompt_uid by channel and trajectory_uid."""
        numbers: dict[_Group, int] = {}
        leases: list[LeaseRecord] = []
        for row in _rows(around.folder, around):
            _, number, record = read(row.kind, row.head)
            if isinstance(record, LeaseRecord):
                leases.append(replace(record, row=row.row))
            elif isinstance(record, LeaseEnded | GroupClosed):
                self.kept.add(row.row)
            elif (uid := self._owner(row.channel, record)) is not None:
                self.rows.setdefault((row.channel, uid), []).append(row.row)
                numbers[row.channel, uid] = number
        later = [group for group, rows in self.rows.items() if rows[0] >= around.begin]
        later.sort(key=lambda group: numbers[group])
        whole: set[_Group] = set()
        for channel in {channel for channel, _ in later}:
            whole.update([group for group in later if group[0] == channel][around.n_unknown :])
        for group, rows in self.rows.items():
            if group in whole and around.damaged.isdisjoint(rows):
                self.kept.update(rows)
            else:
                self.dropped.setdefault(group[0], []).append(group[1])
        for lease in leases:
            if set(lease.prompt_uids).isdisjoint(self.dropped.get(lease.channel, ())):
                self.kept.add(lease.row)
            else:
                self.leases.append(lease)

    def _owner(self, channel: str, record: object) -> str | None:
        """The prompt_uid of a row, of which those before it were asked for; None: its group's
        beginning is lost."""
        if isinstance(record, StepsStored):
            self._uids |= {(channel, t): record.prompt_uid for t, *_ in record.steps}
        trajectory_uid: str | None = getattr(record, "trajectory_uid", None)
        uid: str | None = getattr(record, "prompt_uid", None)
        if trajectory_uid is None:
            return uid
        if uid is not None:
            self._uids[channel, trajectory_uid] = uid
        return self._uids.get((channel, trajectory_uid))

    def since(self, row: int) -> str:
        """Those that have this row or a later one."""
        uids = (f"{uid!r}" for (_, uid), rows in self.rows.items() if rows[-1] >= row)
        return ", ".join(sorted(uids))


def _settle(pool: DataPool, journal: Journal, groups: _Groups) -> None:
    """Count what was dropped, so that every group, trajectory and step is somewhere."""
    writer = Writer(remembered=0)
    writer.log = journal
    for channel_name, uids in groups.dropped.items():
        for uid in uids:  # a late step must not begin the group anew
            closed = GroupClosed(uid, f"dropped ({REASON})", {})
            writer.write(channel_name, closed, 0.0)
    for lease in groups.leases:
        channel = pool.channels[lease.channel]
        pool.leases.restore(lease)
        pool.leases.end(lease.lease_id, "expired", channel.now)
        for uid in lease.prompt_uids[::-1]:
            if uid in channel.prompt_groups:
                channel.give_back(GroupReturned(uid))
    for channel in pool.channels.values():
        counts, live = channel.counts, channel.prompt_groups.values()
        n_dropped = (
            counts.groups.submitted - len(live) - counts.groups.acked - counts.groups.dropped
        )
        counts.groups.dropped += n_dropped
        for _ in range(n_dropped):
            count_reason(counts.groups.drop_reasons, REASON)
        trajectories, steps = counts.trajectories, counts.steps
        trajectories.open = sum(group.n_open for group in live)
        trajectories.complete = sum(len(group.complete) for group in live)
        somewhere = trajectories.open + trajectories.complete
        somewhere += trajectories.acked + trajectories.aborted
        trajectories.dropped = trajectories.submitted - somewhere
        stored = [step for g in live for t in g.trajectories for step in t.steps]
        steps.stored, counts.tokens = len(stored), sum(step.n_tokens for step in stored)
        steps.dropped = steps.accepted - steps.stored - steps.acked
        channel.changed = True
    pool.write_counts()
    journal.flush()
