"""A channel's rows in the pool's log, about its groups: a row per change, the steps of a call in
one; and the deletion of these rows.

    change of a live group ──write──► row, before anything that follows from it
    steps ──add_step──► buffered ──write_steps──► one row of a group's steps
    group gone ──close──► its rows deleted, or kept until they are archived; a tombstone written
    trajectory deleted ──erase──► the group's rows written anew without it

Before there is a log nothing is written. Owns the rows' numbers and the order in which they are
written. Does not own their form (`log_rows.py`) nor where bytes are kept (`payloads.py`).
"""

from __future__ import annotations

from array import array
from collections import deque

import msgspec

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.core.departures import Departure
from stepwell.datapool.core.erasure import Erasure
from stepwell.datapool.core.log_rows import (
    GroupClosed,
    GroupLeft,
    PromptStored,
    RewardCameLate,
    StepCameLate,
    StepsStored,
    Writer,
)
from stepwell.datapool.core.payloads import Payloads
from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord

ROW_BYTES = 64 << 10
"""Bytes of steps after which their row is written: it is read as a whole, also for one of them."""

ROW_COST = 100
"""Bytes of a row besides its payload, about."""


class GroupLog:
    """The rows of one channel."""

    def __init__(self, channel: str, writer: Writer, payloads: Payloads) -> None:
        self.is_changed = False
        """The channel's counts changed since they were last written down."""
        self._channel = channel
        self._writer = writer
        self._payloads = payloads
        self._tombstones: deque[int] = deque()
        self._steps: list[tuple[TrajectoryRecord, int | None, PackedStep]] = []
        """Steps of `_group` that have no row yet, and the rows of their prompts."""
        self._group: GroupRecord | None = None
        self._n_bytes = 0

    def write(self, group: GroupRecord, record: msgspec.Struct, now: float) -> None:
        """Write a change of a live group."""
        if self._steps:
            self.write_steps(now)
        self._append(group, record, now)

    def write_prompt(self, group: GroupRecord, prompt: bytes, now: float) -> int | None:
        """Write the prompt of roots; its row."""
        return self._append(group, PromptStored(group.prompt_uid), now, prompt)

    def add_step(
        self,
        group: GroupRecord,
        record: TrajectoryRecord,
        prompt_row: int | None,
        step: PackedStep,
        now: float,
    ) -> None:
        """Write a step with the next `write` or `write_steps`."""
        if self._group is not group:
            self.write_steps(now)
            self._group = group
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
        self._steps, self._n_bytes = [], 0
        stored = [(record.trajectory_uid, row, len(step.payload)) for record, row, step in steps]
        packed = [step for _, _, step in steps]
        payload = [step.payload for step in packed]
        row = self._append(group, StepsStored(group.prompt_uid, stored), now, *payload)
        if row is not None:
            self._payloads.in_row(packed, row)

    def _append(
        self, group: GroupRecord, record: msgspec.Struct, now: float, *payload: bytes
    ) -> int | None:
        self.is_changed = True
        row = self._writer.write(self._channel, record, now, group.number, *payload)
        if row is not None:
            group.rows.append(row)
            group.n_bytes += sum(map(len, payload))
        return row

    # -- what is gone ------------------------------------------------------------------------

    def close(self, group: GroupRecord, left: GroupLeft, now: float, *, erased: bool) -> None:
        """Delete the rows of a group, or leave them to the archive.

        Args:
            erased: nobody may read them any more, within seconds.
        """
        self.write_steps(now)
        departures = self._writer.departures
        if not erased and group.rows and departures.has_room(_cost(group)):
            self._append(group, left, now)
            self.depart(group, left)
            return
        self._writer.delete(group.rows)
        if erased:
            self._writer.scrub()

    def depart(self, group: GroupRecord, left: GroupLeft) -> None:
        """Leave the rows of a group, of which the last one says that it left, to the archive."""
        uids = tuple(record.trajectory_uid for record in group.trajectories)
        of = self._channel, left.prompt_uid, uids
        self._writer.departures.add(Departure(group.rows[-1], *of, group.rows, _cost(group)))

    def keep_late(self, late: StepCameLate | RewardCameLate, now: float, payload: bytes) -> None:
        """Write what came too late, for the archive alone; nothing without one."""
        n_bytes = ROW_COST + len(payload)
        if self._writer.departures.has_archive and self._writer.departures.has_room(n_bytes):
            row = self._writer.write(self._channel, late, now, 0, payload)
            if row is not None:
                self.depart_late(late, row, n_bytes)

    def depart_late(self, late: StepCameLate | RewardCameLate, row: int, n_bytes: int) -> None:
        """Leave a row of what came too late to the archive."""
        of = self._channel, late.prompt_uid, (late.trajectory_uid,)
        self._writer.departures.add(Departure(row, *of, array("q", [row]), n_bytes))

    def write_tombstone(self, closed: GroupClosed, now: float) -> None:
        self.is_changed = True
        self.keep_tombstone(self._writer.write(self._channel, closed, now))

    def keep_tombstone(self, row: int | None) -> None:
        self._writer.keep_tombstone(row, self._tombstones)

    def erasure(self, group: GroupRecord, *uids: str) -> Erasure:
        """Return the changes of the group's rows that erase these trajectories.

        Raises:
            JournalError: a row cannot be read.
        """
        log = self._writer.log
        return Erasure() if log is None else Erasure.of(log, group, uids)

    def erase(self, group: GroupRecord, erasure: Erasure) -> None:
        """Write the rows of a group anew, as an erasure says.

        Args:
            erasure: made before the trajectories were taken out.
        """
        log = self._writer.log
        if log is None:
            return
        log.delete(erasure.deleted)
        for row, kind, head, payload in erasure.written:
            log.put(row, self._channel, kind, head, payload)
        gone = set(erasure.deleted)
        group.rows = array("q", (row for row in group.rows if row not in gone))

    def scrub(self) -> None:
        self._writer.scrub()


def _cost(group: GroupRecord) -> int:
    """About the bytes that the group's rows take in the log."""
    return group.n_bytes + ROW_COST * len(group.rows)
