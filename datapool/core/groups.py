"""The live groups of a channel: how they begin, how many there may be, what is written of them, and
how they leave.

    begin ──► live: in `prompt_groups`, its trajectories in `trajectory_index` ──► close
                 │ _write: each change is a row of the log, before anything follows from it
                 └ _drop, acked: its steps released, its rows deleted, its uids remembered

    max_outstanding_groups, max_ahead_versions   a declared group waits for credit
    max_queue_size, max_bytes   block            any new group waits for room
                                drop_oldest      the oldest group goes
    memory_limit_bytes, spill                    payloads leave memory
    max_staleness                                a group is dropped when somebody would take it

Owns the records, the timers and orders in which live groups stand, the counts and the log of one
channel. Refuses and drops; waiting is the caller's. Does not decide when a group is ready
(`serving.py`) nor what producers may do (`steps.py`, `channel.py`), which build on it in turn.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sortedcontainers import SortedDict

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.core.accounting import Counts, count_reason
from stepwell.datapool.core.erasure import Erasure, only_owner
from stepwell.datapool.core.orders import KeyedOrder, ReadyOrder
from stepwell.datapool.core.payloads import Payloads
from stepwell.datapool.core.records import (
    DELETED,
    Closing,
    GroupRecord,
    Remembered,
    TrajectoryRecord,
)
from stepwell.datapool.core.rows import GroupClosed, GroupRetired, StepsStored, Writer
from stepwell.datapool.errors import UnknownGroupError, UnknownTrajectoryError
from stepwell.datapool.inspect.events import EventLog
from stepwell.datapool.ops import AdvanceVersion
from stepwell.datapool.questions import Credit, WaitCredit
from stepwell.datapool.selection import STALE, UNMARKED, Selection

GROUP_DROPPED = "group_dropped"
MAX_QUEUE_SIZE = "max_queue_size"
MAX_BYTES = "max_bytes"
NO_LIMIT: Final = 2**63 - 1
"""A limit that holds later; one that a channel never has is left out."""
DEADLINE: Final = "deadline"
IDLE: Final = "idle"
SIBLINGS: Final = "siblings"
REWARD_WAIT: Final = "reward_wait"
HOLD: Final = "hold"
RETENTION: Final = "retention"
Timer: TypeAlias = Literal["deadline", "idle", "siblings", "reward_wait", "hold", "retention"]
"""What a group is due for at some time; of these `deadline`, `idle` and `retention` are reasons of
a drop, too."""

_FULL: Final = {
    "max_outstanding_groups": "holds max_outstanding_groups={limit} open and ready groups",
    "max_ahead_versions": "has started all groups that policy version {version} allows "
    "(max_ahead_versions={config.max_ahead_versions}, "
    "groups_per_version={config.groups_per_version})",
    MAX_QUEUE_SIZE: "holds max_queue_size={limit} ready groups and blocks",
    MAX_BYTES: "holds {used} bytes, max_bytes={limit}, and blocks",
}


class Groups:
    """See the module.

    Args:
        events: are told what happened to groups and trajectories.
        retention_s: from its opening on, after which a group goes whatever became of it.
    """

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        writer: Writer,
        events: EventLog,
        retention_s: float | None,
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
        self.timers: KeyedOrder[tuple[Timer, str]] = KeyedOrder()
        """When which group is due for what."""
        self.counts = Counts()
        self.payloads = Payloads(writer)
        self.changed = False
        """The counts changed since they were last written down."""
        self.replaying = False
        """Nothing is judged, refused, dropped or told of."""
        self.selection = Selection(config.selection)
        self._events = events
        self._open: OrderedDict[str, GroupRecord] = OrderedDict()
        self._order = ReadyOrder(self.prompt_groups)
        self._ready: OrderedDict[str, GroupRecord] = OrderedDict()
        """Groups that are ready for the channel's own n_rollouts, or held, the oldest first."""
        self._held: dict[str, str] = {}
        """Ready groups that are not served for now, and why."""
        self._leased: dict[str, GroupRecord] = {}
        self._ready_versions: KeyedOrder[str] = KeyedOrder()
        """Oldest policy version of each ready group."""
        self._tagged: dict[str, dict[str, None]] = {}
        """Live groups by the tags of their marks."""
        self._closed_trajectories: Remembered[Closing] = Remembered(writer.remembered)
        self._closed_groups: Remembered[str] = Remembered(writer.remembered)
        self._closed_rows: deque[int] = deque()
        self._writer = writer
        self._unwritten: list[tuple[TrajectoryRecord, int | None, PackedStep]] = []
        """Stored steps of one group that have no row yet, and the rows of their prompts."""
        self._unwritten_bytes = 0
        self._retention_s = retention_s

    @property
    def memory_bytes(self) -> int:
        """Payloads and prompts in memory."""
        return self.payloads.memory_bytes

    @property
    def has_consumer(self) -> bool:
        """Somebody took groups of it, or announced a policy version, at any time."""
        counts = self.counts
        return counts.first_version is not None or counts.groups.acked > 0 or bool(self._leased)

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
        return group.frozen if group else prompt_uid in self._closed_groups

    # -- the log -----------------------------------------------------------------------------

    def _write(self, group: GroupRecord, record: msgspec.Struct) -> None:
        """A change of a live group."""
        self._write_steps()
        self._append(group, record)

    def _write_steps(self) -> None:
        """The steps that were stored since the last row of their group."""
        steps, self._unwritten = self._unwritten, []
        if not steps:
            return
        group, self._unwritten_bytes = self.prompt_groups[steps[0][0].prompt_uid], 0
        stored = [(record.trajectory_uid, row, len(step.payload)) for record, row, step in steps]
        packed = [step for _, _, step in steps]
        payload = [step.payload for step in packed]
        row = self._append(group, StepsStored(group.prompt_uid, stored), *payload)
        if row is not None:
            self.payloads.in_row(packed, row)

    def _append(self, group: GroupRecord, record: msgspec.Struct, *payload: bytes) -> int | None:
        self.changed = True
        row = self._writer.write(self.name, record, self.now, group.number, *payload)
        if row is not None:
            group.rows.append(row)
        return row

    def group_of(self, record: Any) -> GroupRecord:
        """The group that a row is about."""
        uid: str | None = getattr(record, "prompt_uid", None)
        return self.prompt_groups[uid or self.trajectory_index[record.trajectory_uid].prompt_uid]

    def _notice(self, kind: str, *uids: str, **data: Any) -> None:
        if not self.replaying:
            self._events.add(self.now, kind, self.name, *uids, **data)

    # -- groups begin ------------------------------------------------------------------------

    def _new_group(self, prompt_uid: str) -> GroupRecord:
        self.counts.numbered += 1
        group = GroupRecord(prompt_uid, self.now, self.counts.numbered)
        self.prompt_groups[prompt_uid] = group
        self.groups_by_number[group.number] = group
        self._open[prompt_uid] = group
        self._set_timer(group, RETENTION, self._retention_s)
        self.counts.groups.submitted += 1
        return group

    def _new_trajectory(self, trajectory_uid: str, group: GroupRecord) -> TrajectoryRecord:
        record = TrajectoryRecord(trajectory_uid, group.prompt_uid)
        self.trajectory_index[trajectory_uid] = record
        group.trajectories.append(record)
        group.n_open += 1
        self.counts.trajectories.submitted += 1
        self.counts.trajectories.open += 1
        return record

    def _await_siblings(self, group: GroupRecord) -> None:
        """Until the first time that is over."""
        if group.waits:
            self.timers.set((SIBLINGS, group.prompt_uid), group.waits[0])
        else:
            self._stop_timers(group, SIBLINGS)

    def _set_timer(self, group: GroupRecord, timer: Timer, seconds: float | None) -> None:
        if seconds is not None:
            self.timers.set((timer, group.prompt_uid), self.now + seconds)

    def _stop_timers(self, group: GroupRecord, *timers: Timer) -> None:
        for timer in timers:
            self.timers.discard((timer, group.prompt_uid))

    def _set_deadline(self, group: GroupRecord, deadline_s: float | None) -> None:
        seconds = self.config.group_deadline_s if deadline_s is None else deadline_s
        if seconds is not None and not group.due:
            group.deadline = self.now + seconds
            self._set_timer(group, DEADLINE, seconds)

    def _touch(self, group: GroupRecord) -> None:
        """Something came in for it: it is not idle."""
        if not group.due:
            self._set_timer(group, IDLE, self.config.group_idle_s)

    # -- how many there may be ---------------------------------------------------------------

    def credit(self, op: WaitCredit) -> Credit:
        """How much of each limit that `OpenGroup` waits for is used."""
        return Credit(self._used(), op.prompt_uid in self.prompt_groups, self.counts.shut_down)

    def _used(self) -> dict[str, tuple[int, int]]:
        """By limit, in the order in which they are looked at: how much of it is used, and what it
        is. What is not limited is missing."""
        config, counts, n_ready = self.config, self.counts, len(self._ready)
        used: dict[str, tuple[int, int]] = {}
        if (most := config.max_outstanding_groups) is not None:
            if not (config.limit_without_consumer or self.has_consumer):
                most = NO_LIMIT
            used["max_outstanding_groups"] = len(self._open) + n_ready - len(self._held), most
        if config.max_ahead_versions is not None and config.groups_per_version is not None:
            versions = counts.version - (counts.first_version or 0) + 1 + config.max_ahead_versions
            started = counts.groups.submitted - counts.groups.dropped
            used["max_ahead_versions"] = started, versions * config.groups_per_version
        if config.overflow == "block" and config.max_queue_size is not None:
            used[MAX_QUEUE_SIZE] = n_ready, config.max_queue_size
        if config.overflow == "block" and config.max_bytes is not None:
            used[MAX_BYTES] = self.memory_bytes, config.max_bytes
        return used

    def _full(self, *names: str) -> str | None:
        """Which of these limits (none named: of all) is reached, so that a new group waits."""
        for name, (used, limit) in self._used().items():
            if used >= limit and (not names or name in names):
                known = {"version": self.counts.version, "config": self.config}
                return _FULL[name].format(used=used, limit=limit, **known)
        return None

    def advance_version(self, op: AdvanceVersion) -> None:
        """Versions never go back."""
        counts = self.counts
        if counts.first_version is None:
            # A pool that starts with a later version owes nothing for those before.
            counts.first_version = 0 if counts.groups.submitted else op.version
        counts.version = max(counts.version, op.version)
        self.changed = True

    def _trim(self, sparing: str = "") -> None:
        """Drop the oldest groups while the channel holds more than it may: ready ones, and where
        none is left and only bytes matter, open ones."""
        config = self.config
        if config.overflow == "block" or self.replaying:
            return
        while config.max_queue_size is not None and len(self._ready) > config.max_queue_size:
            self._drop(next(iter(self._ready.values())), MAX_QUEUE_SIZE)
        if config.max_bytes is None or config.overflow == "spill":
            return
        while self.memory_bytes > config.max_bytes:
            others = (g for g in islice(self._open.values(), 2) if g.prompt_uid != sparing)
            oldest = next(iter(self._ready.values()), None) or next(others, None)
            if oldest is None:
                return
            self._drop(oldest, MAX_BYTES)

    def written(self, limit: int | None) -> None:
        """The log was flushed: payloads that came since may leave memory, beyond the limits.

        Args:
            limit: bytes that this channel may keep in memory by the pool's account; None: any.
        """
        config = self.config
        if config.overflow == "spill" and config.max_bytes is not None:
            limit = min(config.max_bytes, config.max_bytes if limit is None else limit)
        self.payloads.written(limit)

    def is_stale(self, group: GroupRecord) -> bool:
        """Whether its oldest token is too old for it to be served."""
        limit, oldest = self.config.max_staleness, group.oldest_version
        return limit is not None and oldest is not None and oldest < self.counts.version - limit

    def _is_fresh(self, group: GroupRecord) -> bool:
        """Whether its oldest token is young enough. Otherwise it is dropped."""
        if not self.is_stale(group):
            return True
        self._drop(group, STALE, returned=self.config.on_stale == "return")
        return False

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

    def _take_out(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        """Delete what is known of a trajectory; its uid, owner and end stay with the group."""
        closing = Closing(group.prompt_uid, "pool", aborted=DELETED)
        self.changed = True
        if record.closing is not None and not record.is_complete:
            record.closing = closing
        else:
            if record.is_complete:
                self._uncount_complete(group, record)
            else:
                group.n_open -= 1
                self.counts.trajectories.open -= 1
            group.n_final += 1
            self._set_aside(group, record, closing)
            self._notice("aborted", record.prompt_uid, record.trajectory_uid, reason=DELETED)
        record.metadata = only_owner(record.metadata)
        record.outcome, record.step_rewards, record.marks = None, None, UNMARKED
        self._tag(group)
        used = {step.prompt for t in group.trajectories for step in t.steps if step.prompt}
        for prompt in [prompt for prompt in group.prompts if prompt not in used]:
            del group.prompts[prompt]
            self.payloads.memory_bytes -= len(prompt)

    def _erasure(self, group: GroupRecord, *uids: str) -> Erasure:
        """The changes of the group's rows that erase these trajectories.

        Raises:
            JournalError: a row cannot be read.
        """
        log = self._writer.log
        return Erasure() if log is None else Erasure.of(log, group, uids)

    def _erase(self, group: GroupRecord, erasure: Erasure) -> None:
        """
        Args:
            erasure: made before the trajectories were taken out.
        """
        log = self._writer.log
        if log is None:
            return
        log.delete(erasure.deleted)
        for row, kind, head, payload in erasure.written:
            log.put(row, self.name, kind, head, payload)
        gone = set(erasure.deleted)
        group.rows = array("q", (row for row in group.rows if row not in gone))

    def erase_deleted(self) -> None:
        """Erase once more what was deleted of groups that went on."""
        for group in self.prompt_groups.values():
            uids = [t.trajectory_uid for t in group.trajectories if t.is_deleted]
            if uids:
                self._erase(group, self._erasure(group, *uids))
                self._writer.scrub()

    @property
    def has_hollow(self) -> bool:
        """True if a trajectory is erased and no row says that it was deleted."""
        groups = self.prompt_groups.values()
        return any(step.is_hollow for g in groups for t in g.trajectories for step in t.steps)

    def _uncount_complete(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        at = group.complete.index(record)
        n_counted = len(group.complete) - len(group.waits)
        if group.terms is None and not group.due and not group.frozen:
            if at < n_counted:
                self._order.fall_back(group)
            else:
                del group.waits[at - n_counted]
                self._await_siblings(group)
        del group.complete[at]
        self.counts.trajectories.complete -= 1
        group.oldest_version = min((t.versions()[0] for t in group.complete), default=None)

    def _forget_steps(self, record: TrajectoryRecord) -> int:
        steps = record.steps
        self.counts.tokens -= sum(step.n_tokens for step in steps)
        self.counts.steps.stored -= len(steps)
        self.payloads.release(steps)
        return len(steps)

    def _unready(self, group: GroupRecord) -> None:
        """Out of what is ready, for any consumer."""
        self._order.discard(group)
        self._stop_timers(group, SIBLINGS)
        self._leave_ready(group)

    def _leave_ready(self, group: GroupRecord) -> None:
        """Out of what is ready for the channel's own n_rollouts."""
        self._ready.pop(group.prompt_uid, None)
        self._held.pop(group.prompt_uid, None)
        self._ready_versions.discard(group.prompt_uid)
        self._stop_timers(group, REWARD_WAIT)

    def _unqueue(self, group: GroupRecord) -> None:
        """Out of every order that holds live groups."""
        self._unready(group)
        self._open.pop(group.prompt_uid, None)
        self._stop_timers(group, DEADLINE, IDLE, HOLD)

    def _drop(self, group: GroupRecord, reason: str, returned: bool = False) -> None:
        self._unqueue(group)
        for record in group.trajectories:
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
        self._write_steps()
        n_steps = 0
        closings: dict[str, Closing] = {}
        for record in group.trajectories:
            del self.trajectory_index[record.trajectory_uid]
            if record.closing is not None:
                closings[record.trajectory_uid] = record.closing
            n_steps += self._forget_steps(record)
        self.counts.trajectories.complete -= len(group.complete)
        self.payloads.memory_bytes -= sum(map(len, group.prompts))
        del self.prompt_groups[group.prompt_uid]
        del self.groups_by_number[group.number]
        self._untag(group, group.tags)
        self._stop_timers(group, RETENTION)
        self._writer.delete(group.rows)
        if group.retired is not None or group.leaving:
            self._writer.scrub()
        self._remember(GroupClosed(group.prompt_uid, how, closings))
        return n_steps

    def _tag(self, group: GroupRecord) -> None:
        """Its marks, or those of its trajectories, changed."""
        tags = group.marks.tags.union(*(t.marks.tags for t in group.trajectories))
        self._untag(group, group.tags - tags)
        for tag in tags - group.tags:
            self._tagged.setdefault(tag, {})[group.prompt_uid] = None
        group.tags = tags

    def _untag(self, group: GroupRecord, tags: Iterable[str]) -> None:
        for tag in tags:
            del self._tagged[tag][group.prompt_uid]
            if not self._tagged[tag]:
                del self._tagged[tag]

    def _remember(self, closed: GroupClosed) -> None:
        """Leave behind how a group and its trajectories were closed."""
        self.changed = True
        self.recall(closed, self._writer.write(self.name, closed, self.now))

    def recall(self, closed: GroupClosed, row: int | None) -> None:
        """Remember closed uids, as far as the memory for them reaches."""
        for uid, closing in closed.closings.items():
            self._closed_trajectories[uid] = closing
        if closed.how is not None:
            self._closed_groups[closed.prompt_uid] = closed.how
        self._writer.bury(row, self._closed_rows)
