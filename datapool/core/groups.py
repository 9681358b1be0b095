"""The live groups of a channel: how they begin, what is written of them, and how they leave.

    begin ──► live: in `prompt_groups`, its trajectories in `trajectory_index` ──► close
                 │ _write: each change is a row of the log, before anything follows from it
                 └ _drop, acked: its steps released, its rows deleted, its uids remembered

Owns the records, the timers and orders in which live groups stand, the counts and the log of one
channel. Does not decide when a group is ready (`serving.py`), what producers may do (`channel.py`)
or how much a channel holds (`limits.py`), which build on it in this order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sortedcontainers import SortedDict

from stepwell.datapool.codec import decoder, encoder
from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.core import rows
from stepwell.datapool.core.accounting import Counts, count_reason
from stepwell.datapool.core.heap import KeyedHeap
from stepwell.datapool.core.payloads import Payloads
from stepwell.datapool.core.ready import ReadyOrder
from stepwell.datapool.core.records import Closing, GroupRecord, Remembered, TrajectoryRecord
from stepwell.datapool.core.rows import GroupClosed, GroupRetired, Log
from stepwell.datapool.errors import UnknownGroupError, UnknownTrajectoryError
from stepwell.datapool.selection import Selection

GROUP_DROPPED = "group_dropped"
DEADLINE: Final = "deadline"
IDLE: Final = "idle"
REWARD_WAIT: Final = "reward_wait"
RETENTION: Final = "retention"
Timer: TypeAlias = Literal["deadline", "idle", "reward_wait", "retention"]
"""What a group is due for at some time; the first two and the last are reasons of a drop, too."""

Notice: TypeAlias = Callable[..., None]
"""`(channel, kind, prompt_uid, [trajectory_uid], **data)`: something that people may watch for."""

_counts_decoder = decoder(Counts)


class Groups:
    """See the module.

    Args:
        notice: is told what happened to groups and trajectories.
        retention_s: from its opening on, after which a group goes whatever became of it.
    """

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        remembered_uids: int,
        notice: Notice | None = None,
        retention_s: float | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.now = 0.0
        """Time of the change under way."""
        self.trajectory_index: dict[str, TrajectoryRecord] = {}
        """Trajectories of live groups, by uid."""
        self.prompt_groups: dict[str, GroupRecord] = {}
        """Live groups (open, ready or leased), by prompt uid."""
        self.groups_by_number: SortedDict[int, GroupRecord] = SortedDict()
        """The same, in the order they were opened in."""
        self.timers: KeyedHeap[tuple[Timer, str]] = KeyedHeap()
        """When which group is due for what."""
        self.counts = Counts()
        self.payloads = Payloads()
        self.log: Log | None = None
        """Where changes are written down; None: nowhere."""
        self.changed = False
        """The counts changed since they were last written down."""
        self.replaying = False
        """Nothing is judged, refused, dropped or told of."""
        self.selection = Selection(config.selection)
        self._tell = notice
        self._open: OrderedDict[str, GroupRecord] = OrderedDict()
        self._order = ReadyOrder()
        self._ready: OrderedDict[str, GroupRecord] = OrderedDict()
        """Groups that are ready for the channel's own n_rollouts, or held, the oldest first."""
        self._held: dict[str, str] = {}
        """Ready groups that are not served for now, and why."""
        self._leased: dict[str, GroupRecord] = {}
        self._ready_versions: KeyedHeap[str] = KeyedHeap()
        """Oldest policy version of each ready group."""
        self._tagged: dict[str, dict[str, None]] = {}
        """Live groups by the tags of their marks."""
        self._closed_trajectories: Remembered[Closing] = Remembered(remembered_uids)
        self._closed_groups: Remembered[str] = Remembered(remembered_uids)
        self._closed_rows: deque[int] = deque()
        self._remembered_uids = remembered_uids
        self._retention_s = retention_s

    @property
    def memory_bytes(self) -> int:
        """Payloads and prompts in memory."""
        return self.payloads.memory_bytes

    @property
    def n_ready(self) -> int:
        """Held ones, too."""
        return len(self._ready)

    # -- lookup ------------------------------------------------------------------------------

    def _closing(self, trajectory_uid: str) -> Closing:
        """How a trajectory that is not open was closed."""
        record = self.trajectory_index.get(trajectory_uid)
        closing = record.closing if record else self._closed_trajectories.get(trajectory_uid)
        if closing is None:
            raise UnknownTrajectoryError(
                f"trajectory {trajectory_uid!r} is unknown in channel {self.name!r}; "
                "submit a step or call open_trajectory first, in the same channel"
            )
        return closing

    def _gone(self, prompt_uid: str) -> str:
        """What became of a group that is not live."""
        gone = self._closed_groups.get(prompt_uid)
        if gone is None:
            raise UnknownGroupError(
                f"group {prompt_uid!r} is unknown in channel {self.name!r}; check both names"
            )
        return gone

    def _is_settled(self, prompt_uid: str) -> bool:
        """Whether the group's content can no longer change: gone, or served before."""
        group = self.prompt_groups.get(prompt_uid)
        return group.frozen if group else self._closed_groups.get(prompt_uid) is not None

    # -- the log -----------------------------------------------------------------------------

    def _write(
        self, group: GroupRecord, record: msgspec.Struct, payload: bytes | None = None
    ) -> int | None:
        """A change of a live group; its row."""
        self.changed = True
        if self.log is None:
            return None
        row = rows.write(self.log, self.name, record, self.now, group.number, payload)
        group.rows.append(row)
        return row

    def group_of(self, record: Any) -> GroupRecord:
        """The group that a row is about."""
        uid: str | None = getattr(record, "prompt_uid", None)
        return self.prompt_groups[uid or self.trajectory_index[record.trajectory_uid].prompt_uid]

    def dump_counts(self) -> bytes:
        return encoder.encode(self.counts)

    def restore_counts(self, state: bytes) -> None:
        self.counts = _counts_decoder.decode(state)

    def _notice(self, kind: str, *uids: str, **data: Any) -> None:
        if self._tell is not None and not self.replaying:
            self._tell(self, kind, *uids, **data)

    # -- groups begin ------------------------------------------------------------------------

    def _new_group(self, prompt_uid: str) -> GroupRecord:
        self.counts.numbered += 1
        group = GroupRecord(prompt_uid, self.now, self.counts.numbered)
        self.prompt_groups[prompt_uid] = group
        self.groups_by_number[group.number] = group
        self._open[prompt_uid] = group
        if self._retention_s is not None:
            self.timers.set((RETENTION, prompt_uid), self.now + self._retention_s)
        self.counts.groups.submitted += 1
        return group

    def _new_trajectory(self, trajectory_uid: str, group: GroupRecord) -> TrajectoryRecord:
        record = TrajectoryRecord(trajectory_uid, group.prompt_uid)
        self.trajectory_index[trajectory_uid] = record
        group.trajectories[trajectory_uid] = record
        group.n_open += 1
        self.counts.trajectories.submitted += 1
        self.counts.trajectories.open += 1
        return record

    def _set_deadline(self, group: GroupRecord, deadline_s: float | None) -> None:
        seconds = self.config.group_deadline_s if deadline_s is None else deadline_s
        if seconds is not None and not group.due:
            group.deadline = self.now + seconds
            self.timers.set((DEADLINE, group.prompt_uid), group.deadline)

    def _touch(self, group: GroupRecord) -> None:
        """Something came in for it: it is not idle."""
        if self.config.group_idle_s is not None and not group.due:
            self.timers.set((IDLE, group.prompt_uid), self.now + self.config.group_idle_s)

    def _stop_timers(self, group: GroupRecord, *timers: Timer) -> None:
        for timer in timers:
            self.timers.discard((timer, group.prompt_uid))

    # -- groups leave ------------------------------------------------------------------------

    def _abort(self, record: TrajectoryRecord, closing: Closing) -> None:
        """Close without serving and release the steps. The caller settles the group."""
        self.changed = True
        group = self.prompt_groups[record.prompt_uid]
        group.n_open -= 1
        if closing.by != "pool" and not closing.will_retry:
            group.n_final += 1
        self.counts.trajectories.open -= 1
        self._set_aside(group, record, closing)
        self._notice("aborted", record.prompt_uid, record.trajectory_uid, reason=closing.aborted)

    def _set_aside(self, group: GroupRecord, record: TrajectoryRecord, closing: Closing) -> None:
        """Not to be served. Its steps are dropped; their rows go with the group's."""
        record.closing = closing
        self.counts.steps.dropped += self._forget_steps(record)
        record.steps = []
        group.n_aborted += 1
        self.counts.trajectories.aborted += 1
        count_reason(self.counts.trajectories.abort_reasons, closing.aborted or "")

    def _forget_steps(self, record: TrajectoryRecord) -> int:
        steps = record.steps
        self.counts.tokens -= sum(step.n_tokens for step in steps)
        self.counts.steps.stored -= len(steps)
        self.payloads.release(steps)
        return len(steps)

    def _unready(self, group: GroupRecord) -> None:
        """Out of what is ready."""
        self._order.discard(group.prompt_uid)
        self._ready.pop(group.prompt_uid, None)
        self._held.pop(group.prompt_uid, None)
        self._ready_versions.discard(group.prompt_uid)
        self._stop_timers(group, REWARD_WAIT)

    def _unqueue(self, group: GroupRecord) -> None:
        """Out of every order that holds live groups."""
        self._unready(group)
        self._open.pop(group.prompt_uid, None)
        self._stop_timers(group, DEADLINE, IDLE)

    def _drop(self, group: GroupRecord, reason: str, returned: bool = False) -> None:
        self._unqueue(group)
        for record in group.trajectories.values():
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_DROPPED))
        counts = self.counts
        counts.groups.dropped += 1
        counts.groups.returned += returned
        count_reason(counts.groups.drop_reasons, reason)
        counts.steps.dropped += self._close(group, f"dropped ({reason})")
        counts.trajectories.dropped += len(group.complete)
        self._notice(
            "dropped",
            group.prompt_uid,
            reason=reason,
            returned=returned,
            complete=len(group.complete),
            metadata=dict(group.metadata) if returned else {},  # what nobody needs is not kept
        )

    def retire(self, retired: GroupRetired) -> None:
        """Drop a group; one that a consumer has, once it is handed back."""
        group = self.prompt_groups[retired.prompt_uid]
        if group.prompt_uid not in self._leased:
            group.retired = retired.reason
            self._drop(group, retired.reason)
        elif group.retired is None:
            group.retired = retired.reason
            self._write(group, retired)

    def _close(self, group: GroupRecord, how: str) -> int:
        """Forget the group's content, remember its uids; how many steps that released."""
        n_steps = 0
        closings: dict[str, Closing] = {}
        for uid, record in group.trajectories.items():
            del self.trajectory_index[uid]
            if record.closing is not None:
                closings[uid] = record.closing
            n_steps += self._forget_steps(record)
        self.counts.trajectories.complete -= len(group.complete)
        self.payloads.memory_bytes -= sum(map(len, group.prompts))
        del self.prompt_groups[group.prompt_uid]
        del self.groups_by_number[group.number]
        self._untag(group, group.tags)
        self._stop_timers(group, RETENTION)
        if self.log is not None:
            self.log.delete(group.rows)
            if group.retired is not None:
                self.log.scrub()
        self._remember(GroupClosed(group.prompt_uid, how, closings))
        return n_steps

    def _untag(self, group: GroupRecord, tags: Iterable[str]) -> None:
        for tag in tags:
            del self._tagged[tag][group.prompt_uid]
            if not self._tagged[tag]:
                del self._tagged[tag]

    # -- what is gone ------------------------------------------------------------------------

    def _remember(self, closed: GroupClosed) -> None:
        """Leave behind how a group and its trajectories were closed."""
        self.changed = True
        row = None
        if self.log is not None:
            row = rows.write(self.log, self.name, closed, self.now)
        self.recall(closed, row)

    def recall(self, closed: GroupClosed, row: int | None) -> None:
        """Remember closed uids, as far as the memory for them reaches."""
        for uid, closing in closed.closings.items():
            self._closed_trajectories.put(uid, closing)
        if closed.how is not None:
            self._closed_groups.put(closed.prompt_uid, closed.how)
        if row is not None:
            self._closed_rows.append(row)
        if self.log is not None and len(self._closed_rows) > self._remembered_uids:
            self.log.delete([self._closed_rows.popleft()])
