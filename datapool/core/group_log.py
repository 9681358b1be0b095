"""Rows in the pool's log. A channel has a row per change of a group, the steps of a call in one;
they are deleted with the group.

    change of a live group ──write──► row, before anything that follows from it
    steps ──add_step──► buffered ──write_steps──► one row of a group's steps
    group gone ──close──► its rows wait for the archiver, or are deleted; a tombstone written
    trajectory deleted ──erase──► the group's rows written anew without it

    rows that wait (`Departures`) ──in a file──► deleted
                                  └─no room, no space, or somebody wants them gone──► the same

Before there is a log nothing is written. Of what waits, memory has the numbers of the rows and no
content. Owns the rows' numbers, the order in which they are written, and the bound of what waits.
Does not own their form (`log_rows.py`), what is in memory (`steps.py`) nor files of the archive
(`files/archive/`).
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from stepwell.datapool.codec import PackedStep, Place, encoder
from stepwell.datapool.core.erasure import Erasure
from stepwell.datapool.core.log_rows import (
    GroupClosed,
    GroupLeft,
    LeaseEnded,
    Log,
    PromptStored,
    RewardCameLate,
    StepCameLate,
    StepsStored,
    read,
)
from stepwell.datapool.core.pictures import PictureReferences, keys_of
from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord
from stepwell.datapool.types import user_of

logger = logging.getLogger(__name__)

ROW_BYTES = 64 << 10
"""Bytes of steps after which their row is written: it is read as a whole, also for one of them."""

ROW_COST = 100
"""Bytes of a row besides its payload, about."""


# -- what waits for the archiver -----------------------------------------------------------------


class Departure(NamedTuple):
    """A group that left, or one late row about a group that had left before."""

    row: int
    """Last of its rows, which says how it left: what files and the archiver count by."""
    channel: str
    prompt_uid: str
    trajectory_uids: tuple[str, ...]
    """Deleted ones left out."""
    rows: array[int]
    """All of its rows in the log, in the order they were written in."""
    n_bytes: int
    """About the bytes that they take there."""
    tags: frozenset[str] = frozenset()
    """Tags of the group and its trajectories."""
    users: frozenset[str] = frozenset()
    """Users that its trajectories are of."""
    picture_bytes: int = 0
    """Bytes of the pictures that stay for it."""


class Departures:
    """Groups that left and wait to be archived, the oldest first.

    Args:
        limit_bytes: most bytes of rows that wait; 0: there is no archive.
        picture_limit_bytes: most bytes of their pictures: the archive's own bound, as the archiver
            links them and copies none.
    """

    def __init__(self, limit_bytes: int, picture_limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._picture_limit_bytes = picture_limit_bytes
        self.n_bytes = 0
        self.picture_bytes: Counter[str] = Counter()
        """By channel: bytes of the pictures that stay for what waits."""
        self.n_unarchived = 0
        """Groups and late rows that left without being archived, since the pool was started."""
        self._waiting: OrderedDict[int, Departure] = OrderedDict()
        self._by_trajectory: defaultdict[str, list[Departure]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Departure]:
        return iter(self._waiting.values())

    @property
    def has_archive(self) -> bool:
        return self.limit_bytes > 0

    def has_room(self, n_bytes: int, picture_bytes: int = 0) -> bool:
        """Return whether rows of so many bytes may wait, and their pictures; counts them as
        unarchived if not."""
        if (
            self.n_bytes + n_bytes <= self.limit_bytes
            and self.picture_bytes.total() + picture_bytes <= self._picture_limit_bytes
        ):
            return True
        if self.has_archive:
            self._count(1, f"{self.n_bytes:,} bytes wait for the archiver, which is the most")
        return False

    def add(self, departure: Departure) -> None:
        self._waiting[departure.row] = departure
        for uid in departure.trajectory_uids:
            self._by_trajectory[uid].append(departure)
        self.n_bytes += departure.n_bytes
        self.picture_bytes[departure.channel] += departure.picture_bytes

    def release(self, through: int, *, unarchived: str | None = None) -> list[int]:
        """Forget all departures up to a row; return the rows of the log that may be deleted.

        Args:
            unarchived: why they are in no file; None: they are.
        """
        gone = [*takewhile(lambda departure: departure.row <= through, self)]
        if unarchived is not None and gone:
            self._count(len(gone), unarchived)
        return self._forget(gone)

    def delete(
        self, uids: Collection[str], tag: str | None = None, user: str | None = None
    ) -> tuple[list[str], list[int]]:
        """Forget the departures of trajectories, with a tag, or of a user, which somebody wants
        gone, and what came late for them, which may not say whose it is; the trajectories of their
        groups, of which the others are not archived either, and the rows to be deleted."""
        named = [d for uid in uids for d in self._by_trajectory.get(uid, ())]
        if tag is not None or user is not None:
            named += [d for d in self if tag in d.tags or user in d.users]
        found = dict.fromkeys(uid for d in named for uid in d.trajectory_uids)
        gone = {d.row: d for uid in found for d in self._by_trajectory[uid]}
        return list(found), self._forget(gone.values())

    def of(self, uid: str) -> list[Departure]:
        """The departures of a trajectory or a group."""
        return [d for d in self if uid == d.prompt_uid or uid in d.trajectory_uids]

    def _forget(self, gone: Collection[Departure]) -> list[int]:
        self.n_bytes -= sum(d.n_bytes for d in gone)
        for departure in gone:
            del self._waiting[departure.row]
            for uid in departure.trajectory_uids:
                self._by_trajectory[uid].remove(departure)
                if not self._by_trajectory[uid]:
                    del self._by_trajectory[uid]
            self.picture_bytes[departure.channel] -= departure.picture_bytes
        return [row for d in gone for row in d.rows]

    def _count(self, n: int, why: str) -> None:
        if not self.n_unarchived:
            logger.warning(
                "DataPool: what leaves the pool is not archived for now: %s; it is counted as "
                "`unarchived` in the pool's description",
                why,
            )
        self.n_unarchived += n


# -- rows ----------------------------------------------------------------------------------------


class RowLog:
    """The rows of one channel, or of `log_rows.POOL`.

    Args:
        remembered: tombstones of groups or leases that it keeps, and as many of late trajectories.
        pictures: of the pool: what rows refer to.
    """

    def __init__(self, channel: str, remembered: int, pictures: PictureReferences) -> None:
        self.pictures = pictures
        self.journal: Log | None = None
        """Log of the pool; None: nothing is written."""
        self.is_changed = False
        """The counts changed since they were last written down."""
        self._channel = channel
        self._remembered = remembered
        self._tombstones: deque[int] = deque()
        self._late: deque[int] = deque()
        """Tombstones of late trajectories: many of them displace no group."""

    def append(
        self, record: msgspec.Struct, now: float, group: GroupRecord | None, *payload: bytes
    ) -> int | None:
        """Append a row, which is a group's or nobody's; its number."""
        self.is_changed = True
        if self.journal is None:
            return None
        number = 0 if group is None else group.number
        head = encoder.encode((now, number, record))
        row = self.journal.append(self._channel, type(record).__name__, head, *payload)
        if group is not None:
            group.rows.append(row)
            group.n_bytes += sum(map(len, payload))
        return row

    def delete(self, rows: Sequence[int]) -> None:
        if self.journal is not None:
            self.journal.delete(rows)
            if self.pictures.rows:  # most pools have no row with one
                self.pictures.release(rows)

    def scrub(self) -> None:
        if self.journal is not None:
            self.journal.scrub()

    def write_tombstone(self, record: GroupClosed | LeaseEnded, now: float) -> None:
        self.keep_tombstone(record, self.append(record, now, None))

    def keep_tombstone(self, record: GroupClosed | LeaseEnded, row: int | None) -> None:
        """Add a tombstone; the oldest of its kind goes beyond the number remembered."""
        tombstones = self._late if record.how is None else self._tombstones
        if row is not None:
            tombstones.append(row)
        if self.journal is not None and len(tombstones) > self._remembered:
            self.journal.delete([tombstones.popleft()])


class GroupLog(RowLog):
    """The rows of one channel, with those of its groups.

    Args:
        may_spill: payloads may leave memory.
        departures: of the pool: take the rows of groups that leave.
    """

    def __init__(
        self,
        channel: str,
        remembered: int,
        may_spill: bool,
        departures: Departures,
        pictures: PictureReferences,
    ) -> None:
        super().__init__(channel, remembered, pictures)
        self.may_spill = may_spill
        self._departures = departures
        self.spillable: list[tuple[PackedStep, Place]] = []
        """Steps of rows that were written since this list was last taken, if they may spill."""
        self._steps: list[tuple[TrajectoryRecord, int | None, PackedStep]] = []
        """Steps of `_group` that have no row yet, and the rows of their prompts."""
        self._pictures: dict[int, tuple[str, ...]] = {}
        """References to their pictures, by position."""
        self._group: GroupRecord | None = None
        self._n_bytes = 0

    def write(self, group: GroupRecord, record: msgspec.Struct, now: float) -> None:
        """Write a change of a live group."""
        if self._steps:
            self.write_steps(now)
        self.append(record, now, group)

    def write_prompt(self, group: GroupRecord, prompt: bytes, now: float) -> int | None:
        """Write the prompt of roots; its row."""
        return self.append(PromptStored(group.prompt_uid), now, group, prompt)

    def add_step(
        self,
        group: GroupRecord,
        record: TrajectoryRecord,
        prompt_row: int | None,
        step: PackedStep,
        pictures: tuple[str, ...],
        now: float,
    ) -> None:
        """Write a step with the next `write` or `write_steps`."""
        if self._group is not group:
            self.write_steps(now)
            self._group = group
        if pictures:
            self._pictures[len(self._steps)] = pictures
        self._steps.append((record, prompt_row, step))
        self._n_bytes += len(step.payload)
        if self._n_bytes >= ROW_BYTES:
            self.write_steps(now)
            self._group = group

    def write_steps(self, now: float) -> None:
        """Write the steps that were added since the last row of their group."""
        group, steps = self._group, self._steps
        self._group = None
        if group is None or not steps:
            return
        pictures = self._pictures
        self._steps, self._pictures, self._n_bytes = [], {}, 0
        stored = [(record.trajectory_uid, row, len(step.payload)) for record, row, step in steps]
        payload = [step.payload for _, _, step in steps]
        row = self.append(StepsStored(group.prompt_uid, stored, pictures), now, group, *payload)
        if pictures:
            self.hold_steps(group, row, stored, pictures)
        if row is not None and self.may_spill:
            self.note_spillable([step for _, _, step in steps], row)

    def hold_steps(
        self,
        group: GroupRecord,
        row: int | None,
        steps: Sequence[tuple[str, int | None, int]],
        pictures: Mapping[int, tuple[str, ...]],
    ) -> None:
        """Hold the pictures of a row of steps. Without a log their trajectories do."""
        if row is not None:
            keys = [key for own in pictures.values() for key in keys_of(own).values()]
            group.picture_bytes += self.pictures.hold(self._channel, row, keys)
            return
        for position, own in pictures.items():
            holder = self._channel, steps[position][0]
            keys = [*self.pictures.held_by(holder), *keys_of(own).values()]
            self.pictures.hold(self._channel, holder, keys)

    def release_unlogged(self, *uids: str) -> None:
        """Release the pictures of trajectories, if there is no log that has rows of them."""
        if self.journal is None:
            self.pictures.release((self._channel, uid) for uid in uids)

    def note_spillable(self, steps: Iterable[PackedStep], row: int) -> None:
        """The payloads of these steps, one after the other, are this row."""
        at = 0
        for step in steps:
            self.spillable.append((step, (row, at, len(step.payload))))
            at += len(step.payload)

    # -- what is gone ------------------------------------------------------------------------

    def close(self, group: GroupRecord, left: GroupLeft, now: float, *, erased: bool) -> None:
        """Delete the rows of a group, or leave them to the archive.

        Args:
            erased: nobody may read them any more, within seconds.
        """
        self.write_steps(now)
        cost = _cost(group) + ROW_COST
        if not erased and group.rows and self._departures.has_room(cost, group.picture_bytes):
            self.append(left, now, group)
            self.depart(group, left)
            return
        self.delete(group.rows)
        self.release_unlogged(*(record.trajectory_uid for record in group.trajectories))
        if erased:
            self.scrub()

    def depart(self, group: GroupRecord, left: GroupLeft) -> None:
        """Leave the rows of a group, of which the last one says that it left, to the archive. They
        have nothing of its deleted trajectories."""
        uids = tuple(uid for uid, closing in left.closings.items() if not closing.is_deleted)
        tags = group.marks.tags.union(*(record.marks.tags for record in group.trajectories))
        of = self._channel, left.prompt_uid, uids
        cost, beside = _cost(group), group.picture_bytes
        users = frozenset(group.users)
        self._departures.add(Departure(group.rows[-1], *of, group.rows, cost, tags, users, beside))

    def keep_late(self, late: StepCameLate | RewardCameLate, now: float, payload: bytes) -> None:
        """Write what came too late, for the archive alone; nothing without one."""
        departures = self._departures
        if departures.has_archive and departures.has_room(ROW_COST + len(payload)):
            row = self.append(late, now, None, payload)
            if row is not None:
                self.depart_late(late, row, len(payload))

    def depart_late(self, late: StepCameLate | RewardCameLate, row: int, n_payload: int) -> None:
        """Leave a row of what came too late, with so many bytes of payload, to the archive."""
        tags, users = frozenset[str](), frozenset[str]()
        if isinstance(late, StepCameLate):
            tags, users = frozenset(late.tags), frozenset(filter(None, [user_of(late.metadata)]))
            if late.pictures:
                self.pictures.hold(self._channel, row, [*keys_of(late.pictures).values()])
        of = self._channel, late.prompt_uid, (late.trajectory_uid,)
        cost = ROW_COST + n_payload
        self._departures.add(Departure(row, *of, array("q", [row]), cost, tags, users))

    def erasure(self, group: GroupRecord, *uids: str) -> Erasure:
        """Return the changes of the group's rows that erase these trajectories.

        Raises:
            JournalError: a row cannot be read.
        """
        return Erasure() if self.journal is None else Erasure.of(self.journal, group, uids)

    def erase(self, group: GroupRecord, erasure: Erasure) -> None:
        """Write the rows of a group anew, as an erasure says.

        Args:
            erasure: made before the trajectories were taken out.
        """
        log = self.journal
        if log is None:
            return
        log.delete(erasure.deleted)
        for row, kind, head, payload in erasure.written:
            log.put(row, self._channel, kind, head, payload)
            if self.pictures.holds(row):
                *_, stored = read(kind, head)
                own = [key for each in stored.pictures.values() for key in keys_of(each).values()]
                self.pictures.hold(self._channel, row, own)
        gone = set(erasure.deleted)
        group.rows = array("q", (row for row in group.rows if row not in gone))


def _cost(group: GroupRecord) -> int:
    """About the bytes that the group's rows take in the log."""
    return group.n_bytes + ROW_COST * len(group.rows)
