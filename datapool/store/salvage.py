"""This module makes a usable journal of a damaged one so that a pool can go on, and says what is
lost.

The database is read three ways, and the best reading is taken:

    as SQLite does      file, and log up to the first damaged frame
    the file alone      if the log was checkpointed, this has everything
    all sound frames    file, and every frame of the log that follows from the checksum before it;
                        a page whose newest frame is damaged is left empty

A reading is *whole* if it has exactly the rows and states that its own books name: it is the pool
at the end of some transaction, and only what came later is lost. The whole reading with the highest
transaction wins. If none is whole, the one with most sound rows is taken, and groups are kept only
if all their rows are there for certain: no row says to which group a lost row belonged, so every
group that is older than the newest lost row is dropped, and named. A producer may issue it again; a
group that lacks a reward or a step must not be trained.

The damaged folder stays beside the new one, as `NAME.damaged`. Owns none of the formats: rows are
`journal.py`'s, heads are `replay.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import sqlite3
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.accounting import Counts
from stepwell.datapool.core.leases import POOL, LeaseRecord
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import JournalCorruptError, JournalError, ReplayError
from stepwell.datapool.store.journal import (
    ACKED_NAME,
    FILE_NAME,
    LOG_NAME,
    PAGE_BYTES,
    SCHEMA_VERSION,
    SUM_MASK,
    Books,
    Journal,
    Row,
    is_sound_head,
    is_sound_payload,
    is_sound_state,
    lock_folder,
    lost_between,
    read_acked,
    read_books,
    states_sum,
)
from stepwell.datapool.store.replay import COUNTS, restore

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
    folders = [p for p in shards or [path] if _names(p)]
    if not folders:
        raise JournalError(f"{path} holds no journal; give the pool's folder, e.g. runs/NAME/pool")
    return folders


def _names(folder: Path) -> list[str]:
    return [n for n in (FILE_NAME, LOG_NAME, ACKED_NAME) if (folder / n).is_file()]


def _salvage(folder: Path) -> Salvaged:
    damage = _damage(folder)
    if damage is None:
        return Salvaged(folder)
    lock = lock_folder(folder, LOCK_S)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        report = Salvaged(folder, damage)
        _rebuild(folder, scratch, report)
        aside = _free_name(folder)
        folder.rename(aside)
        (scratch / "new").rename(folder)
        report.aside = aside
        return report
    except (OSError, sqlite3.Error) as e:
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
            restore(
                DataPool(PoolConfig()), _Nowhere(), journal.rows(), journal.states(), journal.read
            )
        finally:
            journal.close()
    except (JournalCorruptError, ReplayError) as e:
        return str(e).partition(". `stepwell")[0].partition("; keep the folder")[0]
    return None


class _Nowhere:
    """A log for a pool that is only looked at."""

    def append(self, channel: str, kind: str, head: bytes, payload: bytes | None = None) -> int:
        return -1

    def delete(self, rows: Iterable[int]) -> None: ...

    def put_state(self, key: str, value: bytes) -> None: ...


def _free_name(folder: Path) -> Path:
    k = 1
    while (name := folder.with_name(f"{folder.name}.damaged{'' if k == 1 else f'-{k}'}")).exists():
        k += 1
    return name


def _rebuild(folder: Path, scratch: Path, report: Salvaged) -> None:
    try:
        acked = read_acked(folder)
    except ValueError:
        acked = None
    known = None if acked is None else acked.books
    readings = [
        _Reading(scratch / name, known)
        for name, make in _WAYS.items()
        if make(folder, scratch / name)
    ]
    whole = [r for r in readings if r.is_whole]
    best = max(
        whole or readings,
        key=lambda r: (r.number, len(r.rows)) if whole else (len(r.rows),),
        default=None,
    )
    if best is None:
        raise JournalError(
            f"{folder} has neither {FILE_NAME} nor a readable log: nothing can be saved; move the "
            "folder aside to start empty"
        )
    choice = None if whole else _Choice(best)
    if known is None:
        report.lost.append(
            f"whether transactions after {best.number} were acknowledged cannot be told: "
            f"{ACKED_NAME} cannot be read"
        )
    elif best.books is None or best.number < known.sequence:
        report.lost.append(lost_between(best.books, known))
        report.lost += _named_elsewhere(readings, best.books)
    if choice is not None:
        report.lost += best.missing()
        report.dropped = choice.dropped
    bases = [books for books in (known, best.books) if books is not None]
    base = max(bases, key=lambda books: books.sequence, default=Books(os.urandom(16)))
    next_row = max(best.end, *(books.next_row for books in bases), 0)
    journal = Journal(scratch / "new", "process")
    try:
        rows = (row for row in best.load() if choice is None or row in choice)
        journal.refill(base._replace(next_row=next_row), rows, best.states)
        if choice is None:
            _restore(journal)  # to be sure
        else:
            _settle(journal, choice)
        report.rows = journal.statistics()["rows_stored"]
    finally:
        journal.close()


def _named_elsewhere(readings: Iterable[_Reading], found: Books | None) -> list[str]:
    """Groups of lost rows, as far as another reading still has them."""
    first = 0 if found is None else found.next_row
    groups: dict[str, set[str]] = {}
    for reading in readings:
        owners = _Owners()
        for row in reading.load(payloads=False):
            uid = owners.of(row)
            if row.row >= first and uid is not None:
                groups.setdefault(row.channel, set()).add(uid)
    return [
        f"of these, rows that can still be read are of the groups {', '.join(sorted(uids))} in "
        f"channel {channel!r}; there may be others"
        for channel, uids in groups.items()
    ]


# --- reading ---


def _as_sqlite_does(folder: Path, target: Path) -> bool:
    if not _copy_file(folder, target):
        return False
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(folder / LOG_NAME, f"{target}-wal")
    return True


def _copy_file(folder: Path, target: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(folder / FILE_NAME, target)
        return target.stat().st_size > 0
    return False


def _all_sound_frames(folder: Path, target: Path) -> bool:
    try:
        log = (folder / LOG_NAME).read_bytes()
    except FileNotFoundError:
        return False
    if not _copy_file(folder, target):
        target.touch()
    pages, n_pages = _frames(log)
    if not pages:
        return False
    with target.open("r+b") as file:
        for number, page in pages.items():
            file.seek((number - 1) * PAGE_BYTES)
            file.write(page)
        file.truncate(n_pages * PAGE_BYTES)
    return True


_WAYS: dict[str, Callable[[Path, Path], bool]] = {
    "sqlite": _as_sqlite_does,
    "file": _copy_file,
    "frames": _all_sound_frames,
}

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")


def _frames(log: bytes) -> tuple[dict[int, bytes], int]:
    """The newest committed content of each page in a write-ahead log, and how many pages the file
    has then (https://sqlite.org/fileformat.html#walformat). Zeros for a page whose newest frame is
    damaged."""
    step = _FRAME.size + PAGE_BYTES
    starts = range(_HEADER.size, len(log) - step + 1, step)
    heads = [_FRAME.unpack_from(log, at) for at in starts]
    if not heads:
        return {}, 0
    magic, *_, sum_1, sum_2 = _HEADER.unpack_from(log)
    order = ">" if magic & 1 else "<"
    # Not the header's, which may be damaged. Frames of an earlier round follow the newest ones.
    [(salts, _)] = Counter(head[2:4] for head in heads).most_common(1)
    before = sum_1, sum_2
    pages: dict[int, bytes] = {}
    uncommitted: dict[int, bytes] = {}
    n_pages = 0
    for at, (number, n_after, *found_salts, frame_1, frame_2) in zip(starts, heads, strict=True):
        if tuple(found_salts) != salts:
            continue
        page = log[at + _FRAME.size : at + step]
        is_sound = _checksum(before, log[at : at + 8] + page, order) == (frame_1, frame_2)
        before = frame_1, frame_2
        uncommitted[number] = page if is_sound else bytes(PAGE_BYTES)
        if is_sound and n_after:
            pages |= uncommitted
            uncommitted, n_pages = {}, n_after
    return {number: page for number, page in pages.items() if 0 < number <= n_pages}, n_pages


def _checksum(before: tuple[int, int], data: bytes, order: str) -> tuple[int, int]:
    one, two = before
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for word in words:
        one = (one + word + two) & 0xFFFFFFFF
        two = (two + next(words) + one) & 0xFFFFFFFF
    return one, two


class _Reading:
    """What can be read of one database, each row held against its CRCs."""

    def __init__(self, path: Path, acked: Books | None) -> None:
        self.path = path
        self.books: Books | None = None
        self.states: dict[str, bytes] = {}
        self.lost_states: list[str] = []
        self.rows: set[int] = set()
        """Sound ones."""
        self.unsound: set[int] = set()
        """Read, but not as written."""
        self.headed: list[Row] = []
        """Those of the unsound ones whose head is sound, so that their group is known."""
        self.error: str | None = None
        """SQLite could not read everything."""
        with contextlib.suppress(sqlite3.Error), self._open() as db:
            [(version,)] = db.execute("PRAGMA user_version")
            if version == SCHEMA_VERSION:
                self._read_states(db)
                bounds = [b.next_row for b in (self.books, acked) if b is not None]
                self._read_rows(db, max(bounds, default=None))

    def _open(self) -> contextlib.closing[sqlite3.Connection]:
        return contextlib.closing(sqlite3.connect(self.path, isolation_level=None))

    def _read_states(self, db: sqlite3.Connection) -> None:
        try:
            for key, crc, value in db.execute("SELECT key, crc, value FROM states"):
                if not is_sound_state(key, crc, value):
                    self.lost_states.append(str(key))
                elif isinstance(key, str):
                    self.states[key] = value
                else:
                    self.books = read_books((key, crc, value))
        except sqlite3.Error as e:
            self.error = str(e)

    def _read_rows(self, db: sqlite3.Connection, end: int | None) -> None:
        try:
            for found in db.execute(f"SELECT {_COLUMNS} FROM rows"):
                self._take(found)
            return
        except sqlite3.Error as e:
            self.error = str(e)
        if end is None:
            return
        for row in range(end):  # one by one: a page that cannot be read costs only its own rows
            if row not in self.rows and row not in self.unsound:
                with contextlib.suppress(sqlite3.Error):
                    for found in db.execute(f"SELECT {_COLUMNS} FROM rows WHERE row = ?", (row,)):
                        self._take(found)

    def _take(self, found: tuple[Any, ...]) -> None:
        row, channel, kind, head_crc, payload_crc, head, payload = found
        has_head = is_sound_head(row, channel, kind, head, head_crc)
        if has_head and is_sound_payload(row, payload, payload_crc):
            self.rows.add(row)
            return
        self.unsound.add(row)
        if has_head:
            self.headed.append(Row(row, channel, kind, head, None, 0))

    @property
    def n_missing(self) -> int | None:
        """Rows that are gone without a trace; None: unknown."""
        if self.books is None:
            return None
        return self.books.rows - len(self.rows) - len(self.unsound)

    @property
    def is_exact(self) -> bool:
        """Nothing is wrong but the rows in `unsound`."""
        return (
            self.books is not None
            and self.n_missing == 0
            and sum(self.rows | self.unsound) & SUM_MASK == self.books.row_sum
        )

    @property
    def is_whole(self) -> bool:
        return (
            self.is_exact
            and not self.unsound
            and self.books is not None
            and states_sum(self.states) == (self.books.states, self.books.state_sum)
        )

    @property
    def number(self) -> int:
        """Of its last transaction; -1: unknown."""
        return -1 if self.books is None else self.books.sequence

    @property
    def end(self) -> int:
        """Beyond the last row."""
        return max(self.rows | self.unsound, default=-1) + 1

    def load(self, payloads: bool = True) -> Iterator[Row]:
        """The sound rows, in order."""
        payload_column = "payload" if payloads else "NULL"
        with self._open() as db:
            for row in sorted(self.rows):
                for channel, kind, head, payload in db.execute(
                    f"SELECT channel, kind, head, {payload_column} FROM rows WHERE row = ?", (row,)
                ):
                    yield Row(row, channel, kind, head, payload, len(payload or b""))

    def missing(self) -> Iterator[str]:
        """What is known of the loss, beyond whole transactions."""
        if self.unsound:
            rows = ", ".join(map(str, sorted(self.unsound)))
            yield f"rows that are not as they were written: {rows}"
        if self.n_missing is None:
            yield "an unknown number of rows: the journal's own state cannot be read"
        elif self.n_missing > 0:
            yield f"{self.n_missing} rows that cannot be found ({self.error or 'no error'})"
        elif not self.is_exact:
            yield "some rows: deleted ones are back in their place"
        if self.lost_states:
            yield f"states: {', '.join(self.lost_states)}"


_COLUMNS = "row, channel, kind, head_crc, payload_crc, head, payload"


# --- choosing ---


class _Owners:
    """Which group a row is of. To be asked in order of the rows."""

    def __init__(self) -> None:
        self._trajectories: dict[tuple[str, str], str] = {}

    def of(self, row: Row) -> str | None:
        """Its prompt_uid; None: of no live group, or of one whose beginning is lost."""
        if row.channel == POOL or row.kind == "closed":
            return None
        head: tuple[Any, ...] = pickle.loads(row.head)
        first = str(head[0])
        if row.kind == "step":
            fields = PackedStep._fields.index
            uid, prompt_uid = head[fields("trajectory_uid")], head[fields("prompt_uid")]
            self._trajectories[row.channel, uid] = prompt_uid
            return str(prompt_uid)
        if row.kind == "trajectory":
            self._trajectories[row.channel, first] = head[1]
            return str(head[1])
        if row.kind in ("complete", "abort", "reward"):
            return self._trajectories.get((row.channel, first))
        return first


class _Choice:
    """Which rows of a reading that is not whole are kept: groups that have all theirs for certain,
    and what is remembered of closed ones."""

    def __init__(self, reading: _Reading) -> None:
        self.dropped: dict[str, list[str]] = {}
        self.leases: list[LeaseRecord] = []
        """Leases of which a group is dropped."""
        self._kept: set[int] = set()
        owners = _Owners()
        rows_of: dict[tuple[str, str], list[int]] = {}
        numbers: dict[tuple[str, str], int] = {}
        leases: list[tuple[int, LeaseRecord]] = []
        ordered = sorted([*reading.load(payloads=False), *reading.headed])
        for row in ordered:
            uid = owners.of(row)
            if uid is not None:
                rows_of.setdefault((row.channel, uid), []).append(row.row)
                if row.kind in ("group", "trajectory", "step"):  # they end with the group's number
                    numbers[row.channel, uid] = pickle.loads(row.head)[-1]
            elif row.channel == POOL and row.kind == "lease":
                lease_id, channel, prompt_uids, expires_at, request_id = pickle.loads(row.head)
                lease = LeaseRecord(lease_id, channel, prompt_uids, expires_at, request_id, row.row)
                leases.append((row.row, lease))
            elif row.channel == POOL or row.kind == "closed":
                self._kept.add(row.row)
        headed = {row.row for row in reading.headed}
        unknown = reading.unsound - headed
        last_unknown = max(unknown, default=-1) if reading.is_exact else reading.end
        # A group that began after the last row of an unknown group has lost none; but each of those
        # may have begun one, which then has a lower number than all that began later.
        later = sorted(
            (group for group, rows in rows_of.items() if rows[0] > last_unknown),
            key=lambda group: numbers.get(group, -1),
        )
        whole: set[tuple[str, str]] = set()
        for channel in {channel for channel, _ in later}:
            whole.update([g for g in later if g[0] == channel][len(unknown) :])
        for group, rows in rows_of.items():
            if group in whole and headed.isdisjoint(rows):
                self._kept.update(rows)
            else:
                self.dropped.setdefault(group[0], []).append(group[1])
        for number, lease in leases:
            gone = self.dropped.get(lease.channel, [])
            if any(uid in gone for uid in lease.prompt_uids):
                self.leases.append(lease)
            else:
                self._kept.add(number)

    def __contains__(self, row: Row) -> bool:
        return row.row in self._kept


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
            head: tuple[Any, ...] = (uid, f"dropped ({REASON})", {})
            journal.append(channel_name, "closed", pickle.dumps(head, protocol=5))
    journal.flush()
    pool, replayed = _restore(journal)
    for lease in choice.leases:
        pool.leases.restore(replace(lease, row=-1))
        pool.leases.end(lease.lease_id, "expired")
    for name, channel in pool.channels.items():
        counts, live = channel.counts, replayed[name]
        groups, trajectories, steps = counts.groups, counts.trajectories, counts.steps
        n_dropped = groups.submitted - len(channel.prompt_groups) - groups.acked - groups.dropped
        groups.dropped += n_dropped
        for _ in range(n_dropped):
            counts.drop_reasons.add(REASON)
        complete = sum(len(group.complete) for group in channel.prompt_groups.values())
        trajectories.open = live.trajectories.open
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
