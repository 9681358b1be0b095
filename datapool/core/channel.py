"""One channel of the pool: what producers, consumers and people may do, and what is asked of it.

    Channel ──► Records      trajectories and groups, the uids of those that are gone
            ├─► StepStore    checks and packs steps, and has their bytes
            ├─► decide       when a group is ready, held or dropped (`readiness.py`, pure)
            ├─► ReadyQueue   the order in which ready groups are served
            ├─► limits       how many groups there may be
            └─► GroupLog     a row per change, written before anything that follows from it

Life of a trajectory: opened by `OpenTrajectory` or its first step, closed by `CompleteTrajectory`,
by an `is_last` step with all steps before it present, by `AbortTrajectory`, or by the pool when its
group is served or dropped without it. Life of a group: `readiness.py`. Each change of a group ends
in `_decide`, which acts on what `decide` says of it now and sets its alarm: the one time at which
it is looked at again.

A replay (`store/replay.py`) reads the rows back through the methods that wrote them. It takes
decisions as they were written and makes none, but for what is `implied` by the trajectories alone;
`end_replay` applies the limits and filters of today.

Owns no lease and no clock (`now` is set before each change); knows nothing of other channels.
Every operation is O(log n) or better in whatever is stored.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal

from msgspec.structs import asdict, replace
from sortedcontainers import SortedDict, SortedList

from stepwell.datapool import errors, ops, questions
from stepwell.datapool.codec import PICTURES, Header, PackedGroup, PackedStep, PackedTrajectory
from stepwell.datapool.config import ChannelConfig, SelectionConfig
from stepwell.datapool.core import limits
from stepwell.datapool.core import log_rows as rows
from stepwell.datapool.core.accounting import Counts, count_reason
from stepwell.datapool.core.erasure import only_owner
from stepwell.datapool.core.group_log import Departures, GroupLog
from stepwell.datapool.core.orders import KeyedOrder, NextTick, ReadyQueue
from stepwell.datapool.core.pictures import GRACE_S, PictureReferences, keys_of, references
from stepwell.datapool.core.readiness import (
    RETENTION,
    TOO_FEW_ROLLOUTS,
    Rules,
    decide,
    implied,
    is_stale,
    judge,
    without,
)
from stepwell.datapool.core.records import (
    DELETED,
    Closing,
    GroupRecord,
    GroupTerms,
    Readiness,
    Records,
    TrajectoryRecord,
    short,
)
from stepwell.datapool.core.steps import StepStore
from stepwell.datapool.inspect.events import EventLog
from stepwell.datapool.pictures import malformed
from stepwell.datapool.selection import (
    DOUBTFUL,
    NOT_TRAINABLE,
    STALE,
    UNMARKED,
    Drop,
    DryRun,
    GroupInfo,
    Marks,
    Selection,
    Verdict,
    dry_run,
)
from stepwell.datapool.types import OWNER

logger = logging.getLogger(__name__)

NO_STEPS = "no_steps"
GROUP_CLOSED = "group_closed"
GROUP_DROPPED = "group_dropped"
GROUP_SERVED = "group_served"
N_OLDEST_OPEN = 5
AT_ONCE: Final = 300
"""Steps, trajectories and groups that one change deletes, or drops for their age: 3 ms of work."""


class Channel:
    """The state of one channel.

    Args:
        remembered: uids of what is gone that it knows at most, of each kind.
        events: are told what happened to groups and trajectories.
        retention_s: from its opening on, after which a group goes whatever became of it.
        next_tick: time at which `expire` is called.
        may_spill: payloads may leave memory.
    """

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        remembered: int,
        events: EventLog,
        retention_s: float | None,
        next_tick: NextTick,
        may_spill: bool,
        departures: Departures,
        pictures: PictureReferences,
    ) -> None:
        self.name = name
        self.config = config
        self.now = 0.0
        """Time of the change under way."""
        self.counts = Counts()
        self.replaying = False
        """True while nothing is decided, refused, dropped or told of."""
        self.records = Records(name, remembered)
        self.log = GroupLog(name, remembered, may_spill, departures, pictures)
        self.pictures = pictures
        self.steps = StepStore(name, self.log)
        self.queue = ReadyQueue()
        self.rules = Rules.of(name, config, retention_s, self._sequence)
        self._events = events
        self._departures = departures
        self._open: SortedDict[int, GroupRecord] = SortedDict()
        """Open groups by number: a group that opens again has its place by age."""
        self._ready: OrderedDict[str, GroupRecord] = OrderedDict()
        """Groups that are ready for the channel's own n_rollouts, or held, the oldest first."""
        self._held: dict[str, str] = {}
        """Ready groups that are not served for now, and why."""
        self._leased: dict[str, GroupRecord] = {}
        self._ready_versions: KeyedOrder[str] = KeyedOrder()
        """Oldest policy version of each ready group."""
        self._alarms: SortedList[tuple[float, int]] = SortedList()
        """Next look at each group: (time, group number), the soonest first."""
        self._next_tick = next_tick
        self._is_limited = limits.is_limited(config)

    @property
    def memory_bytes(self) -> int:
        """Payloads and prompts in memory; pictures, too, if there is no journal."""
        own = self.pictures.n_bytes[self.name] if self.pictures.store.in_memory else 0
        return self.steps.memory_bytes + own

    @property
    def n_bytes(self) -> int:
        """Payloads and prompts in memory, and pictures, each once, but for those of groups that
        left and wait to be archived: no group that is dropped would take these along."""
        waiting = self._departures.picture_bytes[self.name]
        return self.steps.memory_bytes + max(0, self.pictures.n_bytes[self.name] - waiting)

    @property
    def has_consumer(self) -> bool:
        """True once somebody took groups of it, or announced a policy version."""
        counts = self.counts
        return counts.first_version is not None or counts.groups.acked > 0 or bool(self._leased)

    def _sequence(self, group: GroupRecord) -> int:
        return self.queue.sequence(group.prompt_uid, self.config.n_rollouts)

    def _notice(self, kind: str, *uids: str, **data: Any) -> None:
        if not self.replaying:
            self._events.add(self.now, kind, self.name, *uids, **data)

    # -- a group's decision ------------------------------------------------------------------

    def _decide(self, group: GroupRecord, at: float | None = None) -> None:
        """Act on what becomes of a group that has changed, or whose alarm rings.

        Args:
            at: when the alarm was to ring; None: no alarm, it is decided as of now.
        """
        uid = group.prompt_uid
        was_ready = uid in self._ready
        if (readiness := implied(group)) is not group.readiness:
            self._become(group, readiness)
        if self.replaying:
            return
        decision = decide(group, self.rules, self.now if at is None else at)
        verdict = decision.verdict
        if not isinstance(verdict, Drop):
            reason = None if verdict is None else verdict.reason
            # Where time alone changed it, the row's time tells a replay what was over.
            is_over = at is not None and was_ready and reason != self._held.get(uid)
            if decision.readiness != group.readiness or is_over:
                self.log.write(group, rows.GroupDecided(uid, decision.readiness), self.now)
        if decision.readiness != group.readiness:
            self._become(group, decision.readiness)
        is_ready = uid in self._ready
        if is_ready and not was_ready:
            self._notice("ready", uid, size=len(group.complete), why=decision.why)
        if isinstance(verdict, Drop):
            self._drop(group, verdict.reason)
        else:
            self._judged(group, verdict, decision.key)
            self._set_alarm(group, decision.look_again_at)
        if is_ready and not was_ready:
            self._trim()

    def decided(self, decided: rows.GroupDecided) -> None:
        """Take a decision as it was written."""
        self._become(self.records.groups[decided.prompt_uid], decided.readiness)

    def _become(self, group: GroupRecord, readiness: Readiness) -> None:
        """Move a group that nobody has leased to where this decision puts it."""
        uid, before, group.readiness = group.prompt_uid, group.readiness, readiness
        if group.is_leased:
            return
        if readiness.is_due:
            self.queue.make_due(uid, self.config.n_rollouts)
        else:
            if before.is_due:
                self.queue.discard(uid)
            self.queue.reach(uid, readiness.ready_for)
        if not group.is_ready_for(self.config.n_rollouts):
            if group.number not in self._open:
                self._leave_ready(group)
                self._open[group.number] = group
        elif uid not in self._ready:
            del self._open[group.number]
            self._ready[uid] = group
            self._note_version(group)

    def _judged(self, group: GroupRecord, verdict: Verdict | None, key: float) -> None:
        """Hold a group that could be served, or let go of it. One that is not ready yet will be
        judged by the consumer that wants it with what it has."""
        uid = group.prompt_uid
        self.queue.judged(uid, key, verdict is not None)
        if uid in self._ready:
            self._note_version(group)
            if verdict is None:
                self._held.pop(uid, None)
            else:
                self._held[uid] = verdict.reason

    def _note_version(self, group: GroupRecord) -> None:
        if group.oldest_version is not None:
            self._ready_versions.set(group.prompt_uid, group.oldest_version)

    def _leave_ready(self, group: GroupRecord) -> None:
        self._ready.pop(group.prompt_uid, None)
        self._held.pop(group.prompt_uid, None)
        self._ready_versions.discard(group.prompt_uid)

    def _unqueue(self, group: GroupRecord) -> None:
        """Take a group out of every order that live groups stand in."""
        self.queue.discard(group.prompt_uid)
        self._leave_ready(group)
        self._open.pop(group.number, None)
        self._set_alarm(group, None)

    # -- time --------------------------------------------------------------------------------

    def _set_alarm(self, group: GroupRecord, at: float | None) -> None:
        """Look at a group again at that time, or before: an alarm that has become too early is not
        moved, as most groups are closed before it rings."""
        alarm = group.alarm
        if alarm == at or (alarm is not None and at is not None and alarm < at):
            return
        if alarm is not None:
            self._alarms.remove((alarm, group.number))
        group.alarm = at
        if at is not None:
            self._alarms.add((at, group.number))
            self._next_tick.no_later_than(at)

    @property
    def next_alarm(self) -> float | None:
        """Time at which `expire` may next have something to do; None: never."""
        first: tuple[float, int] | None = self._alarms[0] if self._alarms else None
        return None if first is None else first[0]

    def expire(self) -> None:
        """Look again at groups whose alarm rings, each as of its time; at about `AT_ONCE`: nobody
        waits for thousands."""
        n = 0
        while n < AT_ONCE and (at := self.next_alarm) is not None and at <= self.now:
            group = self.records.by_number[self._alarms.pop(0)[1]]
            group.alarm = None
            self._decide(group, at)
            n += 1 if group.prompt_uid in self.records.groups else group.size

    def end_replay(self) -> None:
        """Apply the limits and filters of today to what is there after a restart."""
        self.replaying = False
        for group in (*self._ready.values(), *self._open.values()):
            if group.prompt_uid in self.records.groups:  # one that got ready may cost others theirs
                self._decide(group)
        self._trim()

    # -- groups ------------------------------------------------------------------------------

    def open_group(self, op: ops.OpenGroup) -> ops.SubmitOutcome:
        prompt_uid, terms = op.prompt_uid, GroupTerms(op.n_rollouts, op.min_rollouts, op.deadline_s)
        gone = self.records.closed_groups.get(prompt_uid)
        self.check_group_owner(op)
        if gone is not None:
            raise errors.GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was {gone}; "
                "open a new prompt_uid for another pass over the prompt"
            )
        group = self.records.groups.get(prompt_uid)
        if group is not None and group.terms is not None:
            if group.terms != terms:
                raise errors.GroupConflictError(
                    f"group {prompt_uid!r} in channel {self.name!r} is declared with "
                    f"{group.terms._asdict()}, not {terms._asdict()}; declare it once"
                )
            return "duplicate"
        if group is not None and group.is_frozen:
            raise errors.GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was served undeclared; "
                "open a group before its first step"
            )
        if self.counts.shut_down:
            raise errors.ChannelShutDownError(
                f"channel {self.name!r} was shut down; group {prompt_uid!r} cannot be opened"
            )
        if group is None:
            if (full := self._full()) is not None:
                raise errors.PoolFullError(
                    f"channel {self.name!r} {full}; group {prompt_uid!r} waits until one is "
                    "leased: raise the limit or timeout_s"
                )
            group = self._new_group(prompt_uid)
        self._leave_to_terms(group)
        group.terms = terms
        self.records.set_group_metadata(group, dict(op.metadata))
        self.log.write(group, op, self.now)
        self._set_deadline(group, terms.deadline_s)
        group.touched_at = self.now
        self._decide(group)
        return "accepted"

    def _leave_to_terms(self, group: GroupRecord) -> None:
        """Open a group again whose steps came before its declaration, unless its deadline is over:
        undeclared it counted as ready, or idled."""
        readiness = group.readiness
        undecided = replace(readiness, ready_for=0, is_due=False)
        if readiness.is_due:
            if self.replaying or _is_past(group.deadline, self.now):
                return
            # A replay with another deadline is told.
            decided = rows.GroupDecided(group.prompt_uid, undecided)
            self.log.write(group, decided, self.now)
        if undecided != readiness:
            self._become(group, undecided)

    def drop_group(self, op: ops.DropGroup) -> None:
        prompt_uid = op.prompt_uid
        group = self.records.groups.get(prompt_uid)
        if group is None:
            gone = self.records.gone(prompt_uid)
            if not gone.startswith("dropped"):
                raise errors.GroupClosedError(
                    f"group {prompt_uid!r} in channel {self.name!r} was {gone}; "
                    "it can no longer be dropped"
                )
            return
        if prompt_uid in self._leased:
            raise errors.GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} is leased; nack its lease first"
            )
        self._drop(group, op.reason)

    def _new_group(self, prompt_uid: str) -> GroupRecord:
        self.counts.numbered += 1
        group = GroupRecord(prompt_uid, self.now, self.counts.numbered, touched_at=self.now)
        self.records.add(group)
        self._open[group.number] = group
        self.counts.groups.submitted += 1
        return group

    def _begin_group(self, prompt_uid: str) -> GroupRecord:
        """Begin an undeclared group."""
        group = self._new_group(prompt_uid)
        self._set_deadline(group, None)
        self._decide(group)
        return group

    def _set_deadline(self, group: GroupRecord, deadline_s: float | None) -> None:
        seconds = self.config.group_deadline_s if deadline_s is None else deadline_s
        if seconds is not None and not group.readiness.is_due:
            group.deadline = self.now + seconds

    # -- trajectories ------------------------------------------------------------------------

    def open_trajectory(self, op: ops.OpenTrajectory) -> ops.SubmitOutcome:
        self._check_owner(op.metadata.get(OWNER), op.trajectory_uid, op.prompt_uid)
        record = self.records.find(op.trajectory_uid, op.prompt_uid)
        if record is not None and OWNER in op.metadata:  # it has one, or is everybody's
            metadata = {name: v for name, v in op.metadata.items() if name != OWNER}
            op = replace(op, metadata=metadata)
        outcome: ops.SubmitOutcome = "accepted"
        if record is None:
            record = self._begin(op.trajectory_uid, op.prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        elif record.closing is not None:
            return "duplicate" if record.closing.aborted is None else "late"
        else:
            outcome = "duplicate"
            if op.attempt <= record.attempt and not op.metadata and not self.replaying:
                return outcome  # in a replay it had metadata, which was erased
        record.attempt = max(record.attempt, op.attempt)
        self._add_metadata(record, op.metadata)
        group = self.records.groups[op.prompt_uid]
        self.log.write(group, op, self.now)
        group.touched_at = self.now
        return outcome

    def resume_trajectory(self, op: ops.ResumeTrajectory) -> ops.Resumed:
        opened = ops.OpenTrajectory(
            op.trajectory_uid, op.prompt_uid, op.attempt, dict(op.metadata), self.name
        )
        outcome = self.open_trajectory(opened)
        record = self.records.trajectories.get(op.trajectory_uid)
        if outcome == "late" or record is None or record.closing is not None:
            return ops.Resumed(outcome, self.name)
        return ops.Resumed(outcome, self.name, self.packed(record))

    def knows(self, trajectory_uid: str, prompt_uid: str) -> Literal["open", "closed"] | None:
        """Return whether this trajectory of this prompt is open or closed here; None if it is
        unknown."""
        found = self.records.known(trajectory_uid)
        if found is None or found.prompt_uid != prompt_uid:
            return None
        is_open = isinstance(found, TrajectoryRecord) and found.closing is None
        return "open" if is_open else "closed"

    def complete_trajectory(self, op: ops.CompleteTrajectory) -> ops.TrajectoryOutcome:
        self._check_owner(op.owner, op.trajectory_uid)
        record = self.records.trajectories.get(op.trajectory_uid)
        if record is not None and record.closing is None:
            self._add_metadata(record, op.metadata)
            group = self.records.groups[record.prompt_uid]
            self.log.write(group, op, self.now)
            if record.steps:
                self._complete(record, Closing(record.prompt_uid, "complete", op.reward))
                return "complete"
            self._abort(record, Closing(record.prompt_uid, "complete", op.reward, NO_STEPS))
            self._decide(group)
            return "aborted"
        closing = self.records.closing(op.trajectory_uid)
        if closing.by == "pool":
            return self._late(op.trajectory_uid, closing, op.reward)
        if closing.by == "abort" or closing.reward != op.reward:
            self._keep_late_reward(op.trajectory_uid, closing, op.reward)
            raise _ended_by(closing)(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be completed with reward {op.reward}. "
                "Complete a trajectory once; set_reward changes its reward until it is leased"
            )
        return "complete" if closing.aborted is None else "aborted"

    def abort_trajectory(self, op: ops.AbortTrajectory) -> ops.TrajectoryOutcome:
        record = self.records.trajectories.get(op.trajectory_uid)
        if record is not None and record.closing is None:
            group = self.records.groups[record.prompt_uid]
            self.log.write(group, op, self.now)
            closing = Closing(record.prompt_uid, "abort", None, op.reason, op.will_retry)
            self._abort(record, closing)
            self._decide(group)
            return "aborted"
        closing = self.records.closing(op.trajectory_uid)
        gives_up = record is not None and closing.will_retry and not op.will_retry
        if closing.by == "pool" and not gives_up:
            return self._late(op.trajectory_uid, closing)
        if closing.aborted is None or (op.will_retry and not closing.will_retry):
            raise _ended_by(closing)(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be aborted with will_retry={op.will_retry}"
            )
        if record is not None and gives_up:
            # The producer gave up on the retry that it had announced: also of what was deleted.
            group = self.records.groups[record.prompt_uid]
            self.log.write(group, op, self.now)
            record.closing = Closing(record.prompt_uid, closing.by, None, closing.aborted)
            group.n_final += 1
            self._decide(group)
        return "aborted"

    def _begin(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | None:
        """A record in its (perhaps new) group; None if the group's content is settled already."""
        if self.records.is_settled(prompt_uid):
            # Remembered, so that the completion that follows is late too, and not unknown.
            closing = Closing(prompt_uid, "pool", aborted=GROUP_CLOSED)
            self._remember(rows.GroupClosed(prompt_uid, None, {trajectory_uid: closing}))
            self.counts.trajectories.submitted += 1
            self.counts.trajectories.aborted += 1
            count_reason(self.counts.trajectories.abort_reasons, GROUP_CLOSED)
            return None
        group = self.records.groups.get(prompt_uid)
        if group is None:
            names = limits.MAX_QUEUE_SIZE, limits.MAX_BYTES
            if (full := self._full(*names)) is not None:
                raise errors.PoolFullError(
                    f"channel {self.name!r} {full}; trajectory {trajectory_uid!r} would begin a "
                    f"new group, {prompt_uid!r}: try again once something is leased"
                )
            group = self._begin_group(prompt_uid)
        return self._new_trajectory(trajectory_uid, group)

    def _new_trajectory(self, trajectory_uid: str, group: GroupRecord) -> TrajectoryRecord:
        record = TrajectoryRecord(trajectory_uid, group.prompt_uid)
        self.records.add_trajectory(group, record)
        group.n_open += 1
        self.counts.trajectories.submitted += 1
        self.counts.trajectories.open += 1
        return record

    def _complete(self, record: TrajectoryRecord, closing: Closing) -> None:
        group = self.records.groups[record.prompt_uid]
        record.closing, record.closed_at = closing, self.now
        if closing.reward is not None:
            record.outcome = closing.reward
        self.counts.steps.missing += record.max_index + 1 - len(record.steps)
        self.counts.trajectories.open -= 1
        self.counts.trajectories.complete += 1
        group.n_open -= 1
        group.complete.append(record)
        group.completed_at = self.now
        oldest, _ = record.versions()
        if group.oldest_version is None or oldest < group.oldest_version:
            group.oldest_version = oldest
        self._notice_score(record)
        self._decide(group)

    def _notice_score(self, record: TrajectoryRecord) -> None:
        if not self.replaying and (reward := record.reward()) is not None:
            oldest, newest = record.versions()
            scored = {"reward": reward, "oldest": oldest, "newest": newest}
            self._notice("scored", record.prompt_uid, record.trajectory_uid, **scored)

    def _abort(self, record: TrajectoryRecord, closing: Closing) -> None:
        """Close without serving and release the steps. The caller decides on the group."""
        self.log.is_changed = True
        group = self.records.groups[record.prompt_uid]
        group.n_open -= 1
        if closing.by != "pool" and not closing.will_retry:
            group.n_final += 1
        self.counts.trajectories.open -= 1
        self._set_aside(group, record, closing)
        reason = short(closing.aborted or "")
        self._notice("aborted", record.prompt_uid, record.trajectory_uid, reason=reason)

    def _set_aside(self, group: GroupRecord, record: TrajectoryRecord, closing: Closing) -> None:
        """Exclude a trajectory. Its steps are dropped; their rows go with the group's."""
        record.closing = closing
        self.counts.steps.dropped += self._forget_steps(record)
        record.drop_steps()
        group.n_aborted += 1
        self.counts.trajectories.aborted += 1
        count_reason(self.counts.trajectories.abort_reasons, closing.aborted or "")

    def _forget_steps(self, record: TrajectoryRecord) -> int:
        steps = record.steps
        self.counts.tokens -= record.n_tokens
        self.counts.steps.stored -= len(steps)
        self.steps.release(steps)
        return len(steps)

    # -- steps -------------------------------------------------------------------------------

    def submit_steps(self, op: ops.SubmitSteps) -> list[ops.SubmitOutcome | ops.Refusal]:
        answers: list[ops.SubmitOutcome | ops.Refusal] = []
        for packed in op.trajectories:
            for step in packed.steps:
                try:
                    answers.append(self._submit(packed.trajectory_uid, packed.prompt_uid, step))
                except errors.DataPoolError as e:
                    answers.append(ops.Refusal.of(e))
                    if isinstance(e, errors.PoolFullError):
                        self._count_refusal(e)
        self.log.write_steps(self.now)
        return answers

    def append_step(self, op: ops.AppendStep) -> ops.SubmitOutcome | ops.Resumed:
        try:
            outcome = self._submit(op.trajectory_uid, op.prompt_uid, op.step)
        except errors.StepConflictError:
            record = self.records.trajectories.get(op.trajectory_uid)
            if record is None or record.closing is not None:
                self._keep_late_step(op.trajectory_uid, op.prompt_uid, op.step)
                return "late"
            return ops.Resumed("duplicate", self.name, self.packed(record))
        self.log.write_steps(self.now)
        return outcome

    def _submit(self, uid: str, prompt_uid: str, step: PackedStep) -> ops.SubmitOutcome:
        """Apply one step and count its outcome or refusal; not one after which it comes again.
        Changes nothing if the step contradicts another."""
        counts = self.counts.steps
        try:
            outcome = self._accept(uid, prompt_uid, step)
        except (errors.UnknownBaseError, errors.UnknownPictureError, errors.PoolFullError):
            raise
        except errors.DataPoolError as e:
            self._count_refusal(e)
            raise
        counts.submitted += 1
        if outcome == "accepted":
            counts.accepted += 1
        elif outcome == "duplicate":
            counts.duplicate += 1
        else:
            counts.late += 1
            self._keep_late_step(uid, prompt_uid, step)
        self.log.is_changed = True
        return outcome

    def _keep_late_step(self, uid: str, prompt_uid: str, step: PackedStep) -> None:
        """Keep a step that its agent has seen and nobody trains on, for the archive."""
        known = self.records.known(uid)
        closing = known.closing if isinstance(known, TrajectoryRecord) else known
        if closing is not None and not closing.is_deleted:
            prompt = bytes(step.prompt or b"")
            late = rows.StepCameLate(
                prompt_uid, uid, len(prompt), pictures=self._stored_of(known, step)
            )
            if isinstance(known, TrajectoryRecord):  # by which it can be deleted
                group = self.records.groups[prompt_uid]
                late = replace(
                    late,
                    metadata={**group.metadata, **known.metadata},
                    tags=tuple(sorted(group.marks.tags | known.marks.tags)),
                )
            self.log.keep_late(late, self.now, prompt + bytes(step.payload))

    def _count_refusal(self, error: errors.DataPoolError) -> None:
        counts, is_conflict = self.counts.steps, isinstance(error, errors.StepConflictError)
        counts.submitted += 1
        counts.conflict += is_conflict
        counts.rejected += not is_conflict
        self.log.is_changed = True

    def _accept(self, uid: str, prompt_uid: str, step: PackedStep) -> ops.SubmitOutcome:
        """Check a step and keep it, with a prompt that it shares with others."""
        header = self.steps.header_of(uid, step)
        record = self.records.find(uid, prompt_uid)
        if record is None:
            if header.base_index >= 0 and not self.records.is_settled(prompt_uid):
                raise self.steps.unknown_base(uid, header)
            if header.flags & PICTURES and not self.records.is_settled(prompt_uid):
                self._keys_of(uid, None, prompt_uid, step)  # before anything begins
            record = self._begin(uid, prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        if header.step_index <= record.max_index and record.step(header.step_index) is not None:
            if self.steps.is_same(record, step, header):
                return "duplicate"
            raise errors.StepConflictError(
                f"step {uid!r}[{header.step_index}] is already stored in channel {self.name!r} "
                "with other content; give every call its own step_index"
            )
        if record.closing is not None:
            return "late"
        sent = self.steps.fit(record, step, header)
        pictures: tuple[str, ...] = ()
        if header.flags & PICTURES:
            keys = self._keys_of(uid, record, prompt_uid, sent)
            record.pictures = (record.pictures or {}) | keys
            pictures = references(keys)
        group = self.records.groups[prompt_uid]
        prompt, prompt_row = None, None
        if sent.prompt is not None:
            prompt, prompt_row = self._keep_prompt(group, bytes(sent.prompt))
        step = PackedStep(prompt, sent.payload)
        self.log.add_step(group, record, prompt_row, step, pictures, self.now)
        self._put(group, record, step, header)
        self.counts.response_tokens += header.n_response
        if self.config.max_bytes is not None:
            # Last, because it may drop the very group that the step belongs to.
            self._trim(sparing=prompt_uid)
        return "accepted"

    def _keys_of(
        self, uid: str, record: TrajectoryRecord | None, prompt_uid: str, step: PackedStep
    ) -> dict[str, str]:
        """Return the key of each picture of a step's new tokens, by digest.

        Raises:
            InvalidStepError: a reference is malformed.
            UnknownPictureError: one is not stored.
        """
        name = f"step {uid!r}[{step.step_index}] in channel {self.name!r}"
        own, header = step.pictures, step.header
        why = malformed(own, header.n_prompt)
        start = 0 if header.base_index < 0 else header.n_prompt - header.n_new
        if why is None and own and own[0].at < start:
            why = f"pictures[0] is {own[0]!r:.240}; it lies before the new tokens"
        if why is not None:
            raise errors.InvalidStepError(f"{name}: {why}")
        owner = self._owner_of(record, prompt_uid)
        keys = {p.digest: self.pictures.key(self.name, owner, p.digest) for p in own}
        if missing := set(self.pictures.missing(keys.values())):
            lacking = ", ".join(digest for digest, key in keys.items() if key in missing)
            raise errors.UnknownPictureError(
                f"{name} refers to pictures {errors.LACKS}{lacking}; put them and send it again"
            )
        return keys

    def _stored_of(
        self, known: TrajectoryRecord | Closing | None, step: PackedStep
    ) -> tuple[str, ...]:
        """References to those pictures of a late step that its trajectory has already."""
        if not step.header.flags & PICTURES or not isinstance(known, TrajectoryRecord):
            return ()
        digests = {p.digest for p in step.pictures}
        return references({d: k for d, k in (known.pictures or {}).items() if d in digests})

    def _put(
        self, group: GroupRecord, record: TrajectoryRecord, step: PackedStep, header: Header
    ) -> None:
        """Keep a step. Its trajectory may be complete now."""
        record.put(step, header)
        self._count_stored(group, 1, len(step.payload), header.n_prompt + header.n_response)
        if record.has_all_steps:
            self._complete_by_last(group, record)

    def _count_stored(self, group: GroupRecord, n_steps: int, n_bytes: int, n_tokens: int) -> None:
        self.steps.memory_bytes += n_bytes
        self.counts.tokens += n_tokens
        self.counts.steps.stored += n_steps
        group.touched_at = self.now

    def _complete_by_last(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        """Complete a trajectory whose steps up to the one marked `is_last` have come."""
        before = group.complete[-1].closing if group.complete else None
        closing = Closing(record.prompt_uid, "is_last")  # one object for all of a group
        self._complete(record, before if before is not None and before == closing else closing)

    def _keep_prompt(self, group: GroupRecord, prompt: bytes) -> tuple[bytes, int | None]:
        """The group's own copy of a root's prompt, and the row that holds it."""
        kept = group.prompts.get(prompt)
        if kept is None:
            kept = prompt, self.log.write_prompt(group, prompt, self.now)
            group.prompts[prompt] = kept
            self.steps.memory_bytes += len(prompt)
        return kept

    def adopt_prompt(self, stored: rows.PromptStored, prompt: bytes, row: int) -> None:
        """A prompt of before. Its group may begin with the very step that brought it."""
        uid = stored.prompt_uid
        group = self.records.groups.get(uid) or self._begin_group(uid)
        group.prompts[prompt] = prompt, row
        group.rows.append(row)
        group.n_bytes += len(prompt)
        self.steps.memory_bytes += len(prompt)

    def adopt(
        self, stored: rows.StepsStored, prompts: Mapping[int, bytes], payload: bytes, row: int
    ) -> None:
        """Steps of before: they were accepted then, so nothing about them is checked.

        Args:
            prompts: of roots, by row.
        """
        prompt_uid, trajectories = stored.prompt_uid, self.records.trajectories
        group = self.records.groups.get(prompt_uid) or self._begin_group(prompt_uid)
        group.rows.append(row)
        group.n_bytes += len(payload)
        steps: list[PackedStep] = []
        at = n_tokens = 0
        for uid, prompt_row, n_bytes in stored.steps:
            record = trajectories.get(uid) or self._new_trajectory(uid, group)
            prompt = None if prompt_row is None else prompts[prompt_row]
            step = PackedStep(prompt, payload[at : at + n_bytes])
            steps.append(step)
            before = record.n_tokens
            record.put(step, step.header)
            n_tokens += record.n_tokens - before
            at += n_bytes
            if record.has_all_steps:
                self._complete_by_last(group, record)
        self._count_stored(group, len(steps), at, n_tokens)
        if stored.pictures:
            self.log.hold_steps(group, row, stored.steps, stored.pictures)
            for position, own in stored.pictures.items():
                record = trajectories[stored.steps[position][0]]
                record.pictures = (record.pictures or {}) | keys_of(own)
        if self.log.may_spill:
            self.log.note_spillable(steps, row)

    # -- pictures ----------------------------------------------------------------------------

    def put_pictures(self, op: ops.PutPictures) -> None:
        record = self.records.trajectories.get(op.trajectory_uid)
        if record is None and op.prompt_uid is None:
            self.records.closing(op.trajectory_uid)  # or it is unknown
            return  # its steps come too late
        prompt_uid = op.prompt_uid or ("" if record is None else record.prompt_uid)
        self._check_owner(op.owner, op.trajectory_uid, prompt_uid)
        owner = self._owner_of(record, prompt_uid)
        for digest, data in op.pictures.items():
            key = self.pictures.key(self.name, owner, digest)
            self.pictures.put(key, data, op.trajectory_uid, self.now)
        self._next_tick.no_later_than(self.now + GRACE_S)

    def read_pictures(self, op: questions.ReadPictures) -> dict[str, bytes]:
        self._check_owner(op.owner, op.trajectory_uid)
        record = self.records.trajectories.get(op.trajectory_uid)
        if record is None:
            self.records.closing(op.trajectory_uid)
            raise errors.TrajectoryClosedError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} has left the pool; the "
                "archive has its pictures, if there is one"
            )
        keys = record.pictures or {}
        if missing := [digest for digest in op.digests if digest not in keys]:
            raise errors.UnknownPictureError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} has no step with "
                f"pictures {errors.LACKS}{', '.join(missing)}"
            )
        found: dict[str, bytes] = {}
        n_bytes = 0
        for digest in op.digests:
            n_bytes += self.pictures.store.size(keys[digest])
            if found and n_bytes > op.max_bytes:
                break
            found[digest] = self.pictures.store.read(keys[digest])
        return found

    def _owner_of(self, record: TrajectoryRecord | None, prompt_uid: str) -> str:
        """Return the owner of a trajectory, or of the group that it is to be of; "" if it has
        none."""
        group = self.records.groups.get(prompt_uid)
        for metadata in (record and record.metadata, group and group.metadata):
            if metadata and isinstance(owner := metadata.get(OWNER), str):
                return owner
        return ""

    # -- people ------------------------------------------------------------------------------

    def set_reward(self, op: ops.SetReward) -> ops.SubmitOutcome:
        self._check_owner(op.owner, op.trajectory_uid)
        record = self.records.trajectories.get(op.trajectory_uid)
        if record is None:
            closing = self.records.closing(op.trajectory_uid)
            return self._late(op.trajectory_uid, closing, op.reward, op.step_index)
        group = self.records.groups[record.prompt_uid]
        if group.is_frozen or (record.closing is not None and record.closing.aborted is not None):
            return self._late(op.trajectory_uid, record.closing, op.reward, op.step_index)
        if op.step_index is None:
            record.outcome = op.reward
        elif record.step(op.step_index) is not None:
            record.step_rewards = {**(record.step_rewards or {}), op.step_index: op.reward}
        else:
            raise errors.StepIndexError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} has no step "
                f"{op.step_index}; it has {[step.step_index for step in record.steps]}"
            )
        self.log.write(group, op, self.now)
        if record.is_complete:
            self._notice_score(record)
        self._decide(group)
        return "accepted"

    def why_closed(self, op: questions.WhyClosed) -> str:
        return self._why_closed(self.records.closing(op.trajectory_uid))

    def _why_closed(self, closing: Closing) -> str:
        if closing.is_deleted:
            return "it was deleted"
        if closing.by != "pool" and closing.aborted is not None:
            return f"it was {closing.describe()}"
        if (group := self.records.groups.get(closing.prompt_uid)) is not None:
            if group.is_frozen:
                return "its group was leased by a trainer before"
            return f"it was {closing.describe()}"
        gone = self.records.closed_groups.get(closing.prompt_uid) or "closed"
        said = {"acked": "its group was trained", f"dropped ({DELETED})": "it was deleted"}
        return said.get(gone, f"its group was {gone}")

    def mark(self, op: ops.Mark) -> Marks:
        marked: GroupRecord | TrajectoryRecord
        if op.trajectory_uid is not None:
            self._check_owner(op.owner, op.trajectory_uid)
            record = self.records.trajectories.get(op.trajectory_uid)
            if record is None:
                self.records.closing(op.trajectory_uid)
            if (
                record is None
                or record.is_deleted
                or self.records.groups[record.prompt_uid].is_frozen
            ):
                raise errors.TrajectoryClosedError(
                    f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was served "
                    "already, deleted, or closed with its group; mark it before"
                )
            marked, group = record, self.records.groups[record.prompt_uid]
        else:
            uid = op.prompt_uid or ""
            if uid not in self.records.groups:
                raise errors.GroupClosedError(
                    f"group {uid!r} in channel {self.name!r} was {self.records.gone(uid)}; "
                    "it cannot be marked"
                )
            marked = group = self.records.groups[uid]
        marked.marks = marked.marks.merged(op.marks)
        group.is_marked = True
        self.records.tag(group)
        self.log.write(group, op, self.now)
        self._decide(group)
        return marked.marks

    # -- deletion ----------------------------------------------------------------------------

    def delete(self, op: ops.Delete) -> ops.Deleted:
        """Delete about `AT_ONCE` of what is meant; `more` if others are left."""
        found: Iterable[str]
        if op.tag is not None:
            found = self.records.tagged.get(op.tag, ())
        elif op.user is not None:
            found = self.records.by_user.get(op.user, ())
        else:
            record = self.records.trajectories.get(op.trajectory_uid or "")
            found = () if record is None else (record.prompt_uid,)
        groups = [self.records.groups[uid] for uid in islice(found, AT_ONCE + len(self._leased))]
        leased = [group for group in groups if group.is_leased]
        for group in leased:
            self._delete_group(group)
        gone: list[str] = []
        n = 0
        for group in groups:
            if n >= AT_ONCE:
                break
            if not group.is_leased:
                n += group.size
                gone += [t.trajectory_uid for t in group.trajectories]
                self._delete_group(group)
        kept = tuple(t.trajectory_uid for group in leased for t in group.trajectories)
        return ops.Deleted(tuple(gone), kept, n >= AT_ONCE)

    def _delete_group(self, group: GroupRecord) -> None:
        """Drop a group; one that a consumer has, once it is handed back."""
        if not group.is_leased:
            self._drop(group, DELETED)
        elif group.readiness.drop_when_returned is None:
            group.readiness = replace(group.readiness, drop_when_returned=DELETED)
            decided = rows.GroupDecided(group.prompt_uid, group.readiness)
            self.log.write(group, decided, self.now)

    def delete_trajectory(self, op: ops.DeleteTrajectory) -> ops.Deleted:
        uid = op.trajectory_uid
        record = self.records.trajectories.get(uid)
        if record is None or record.is_deleted:
            return ops.Deleted()
        group = self.records.groups[record.prompt_uid]
        is_leased = group.is_leased
        if not self._is_more(group, record):
            self._delete_group(group)
        elif uid not in group.leaving:
            deleted = rows.TrajectoryDeleted(group.prompt_uid, uid)
            erasure = None if is_leased else self.log.erasure(group, uid)  # first, as it may fail
            self.log.write(group, deleted, self.now)
            self.remove(deleted)
            if erasure is not None and group.prompt_uid in self.records.groups:
                self.log.erase(group, erasure)
        return ops.Deleted((), (uid,)) if is_leased else ops.Deleted((uid,))

    def _is_more(self, group: GroupRecord, record: TrajectoryRecord) -> bool:
        """True if another trajectory of the group is open or complete, or is to come."""
        stays = (t for t in group.trajectories if t.trajectory_uid not in group.leaving)
        if any(t is not record and (t.closing is None or t.is_complete) for t in stays):
            return True
        if group.terms is None or group.is_frozen:
            return False
        return group.terms.n_rollouts > len(group.complete) + group.n_open + group.n_final

    def remove(self, deleted: rows.TrajectoryDeleted) -> None:
        """Go on without a trajectory, as if it had been aborted for good."""
        group = self.records.groups[deleted.prompt_uid]
        record = self.records.trajectories[deleted.trajectory_uid]
        if group.is_leased:
            group.leaving = (*group.leaving, record.trajectory_uid)
            return
        counts = record.closing is None or record.is_complete
        was_due = group.readiness.is_due
        self._take_out(group, record)
        if not counts:
            return
        is_over = group.is_frozen or (was_due and _is_past(group.deadline, self.now))
        if is_over and len(group.complete) < group.least and not self.replaying:
            self._drop(group, TOO_FEW_ROLLOUTS)
        else:
            group.touched_at = self.now
            self._decide(group)

    def _take_out(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        """Delete what is known of a trajectory; its uid, owner and end stay with the group."""
        closing = Closing(group.prompt_uid, "pool", aborted=DELETED)
        self.log.is_changed = True
        if record.closing is not None and not record.is_complete:
            record.closing = replace(closing, will_retry=record.closing.will_retry)
        else:
            if record.is_complete:
                at = group.complete.index(record)
                del group.complete[at]
                self.counts.trajectories.complete -= 1
                group.note_oldest()
                if not group.is_leased:
                    self._become(group, without(group, at))
            else:
                group.n_open -= 1
                self.counts.trajectories.open -= 1
            group.n_final += 1
            self._set_aside(group, record, closing)
            self._notice("aborted", record.prompt_uid, record.trajectory_uid, reason=DELETED)
        self.records.set_metadata(record, only_owner(record.metadata))
        record.outcome, record.step_rewards, record.marks = None, None, UNMARKED
        record.pictures = None
        self.log.release_unlogged(record.trajectory_uid)
        self.records.tag(group)
        used = {step.prompt for t in group.trajectories for step in t.steps if step.prompt}
        for prompt in [prompt for prompt in group.prompts if prompt not in used]:
            del group.prompts[prompt]
            self.steps.memory_bytes -= len(prompt)

    def erase_deleted(self) -> None:
        """Erase once more what was deleted of groups that went on."""
        for group in self.records.groups.values():
            uids = [t.trajectory_uid for t in group.trajectories if t.is_deleted]
            if uids:
                self.log.erase(group, self.log.erasure(group, *uids))
                self.log.scrub()

    @property
    def has_hollow(self) -> bool:
        """True if a trajectory is erased and no row says that it was deleted."""
        groups = self.records.groups.values()
        return any(step.is_hollow for g in groups for t in g.trajectories for step in t.steps)

    # -- limits ------------------------------------------------------------------------------

    def credit(self, op: questions.WaitCredit) -> questions.Credit:
        """Return how much of each limit that `OpenGroup` waits for is used."""
        used = limits.used(self.config, self.counts, self._load())
        return questions.Credit(used, op.prompt_uid in self.records.groups, self.counts.shut_down)

    def _load(self) -> limits.Load:
        n_groups = len(self._open), len(self._ready), len(self._held)
        return limits.Load(*n_groups, self.n_bytes, self.has_consumer)

    def _full(self, *names: str) -> str | None:
        """Return why a new group has to wait, by these limits or (none named) all."""
        if self.replaying or not self._is_limited:
            return None
        return limits.why_full(self.config, self.counts, self._load(), *names)

    def advance_version(self, op: ops.AdvanceVersion) -> None:
        """Versions never go back."""
        counts = self.counts
        if counts.first_version is None:
            # A pool that starts with a later version owes nothing for those before.
            counts.first_version = 0 if counts.groups.submitted else op.version
        counts.version = max(counts.version, op.version)
        self.log.is_changed = True

    def _trim(self, sparing: str = "") -> None:
        """Drop the oldest groups while the channel holds more than it may: ready ones, and where
        none is left and only bytes matter, open ones."""
        config = self.config
        if config.overflow == "block" or self.replaying:
            return
        while config.max_queue_size is not None and len(self._ready) > config.max_queue_size:
            self._drop(next(iter(self._ready.values())), limits.MAX_QUEUE_SIZE)
        if config.max_bytes is None or config.overflow == "spill":
            return
        while self.n_bytes > config.max_bytes:
            others = (g for g in islice(self._open.values(), 2) if g.prompt_uid != sparing)
            oldest = next(iter(self._ready.values()), None) or next(others, None)
            if oldest is None:
                return
            self._drop(oldest, limits.MAX_BYTES)

    def spill(self, limit: int | None) -> None:
        """Let payloads that the log has leave memory, beyond the limits.

        Args:
            limit: bytes that this channel may keep in memory by the pool's account; None: any.
        """
        config = self.config
        if config.overflow == "spill" and config.max_bytes is not None:
            limit = min(config.max_bytes, config.max_bytes if limit is None else limit)
        self.steps.spill(limit)

    # -- consumers ---------------------------------------------------------------------------

    def available(self, op: questions.WaitAvailable) -> questions.Available:
        n_wanted = op.n_rollouts or self.config.n_rollouts
        return questions.Available(self.queue.count(n_wanted), self.counts.shut_down)

    def choose(self, n_rollouts: int | None, batch_size: int) -> list[str]:
        """The groups that a consumer gets next, if there are `batch_size` of them; else none. Drops
        those on the way that are too old or that a filter objects to."""
        if self.config.max_staleness is not None:
            while (oldest := self._ready_versions.first()) is not None:
                if self._is_fresh(self.records.groups[oldest[1]]):
                    break
        n_wanted = n_rollouts or self.config.n_rollouts
        if self.queue.count(n_wanted) < batch_size:
            return []
        if n_wanted != self.config.n_rollouts:
            self._judge_first(n_wanted, batch_size)
        first = self.queue.first(n_wanted, batch_size)
        return first if len(first) == batch_size else []

    def _is_fresh(self, group: GroupRecord) -> bool:
        """True if the group's oldest token is young enough. Otherwise the group is dropped."""
        if not is_stale(group, self.config, self.counts.version):
            return True
        self._drop(group, STALE, returned=self.config.on_stale == "return")
        return False

    def _judge_first(self, n_wanted: int, n_seen: int) -> None:
        """Judge undeclared groups that are ready for this consumer only, until all of the first are
        judged: one that is refused, or whose key changes, lets another one forward."""
        judged: set[str] = set()
        while True:
            first = self.queue.first(n_wanted, n_seen)
            unjudged = [uid for uid in first if uid not in self._ready and uid not in judged]
            if not unjudged:
                return
            judged.update(unjudged)
            for uid in unjudged:
                self._judge(self.records.groups[uid])

    def _judge(self, group: GroupRecord) -> None:
        """Hold a group that is ready for a consumer of fewer until it changes, or drop it, unless
        it may be served."""
        if not self._is_fresh(group) or not (group.is_marked or self.rules.examines_all):
            return
        verdict, key = judge(group, self.rules, self.now, self.rules.selection)
        if isinstance(verdict, Drop):
            self._drop(group, verdict.reason)
        else:
            self._judged(group, verdict, key)

    def take(self, prompt_uids: Sequence[str], n_rollouts: int | None) -> list[PackedGroup]:
        """Lease these ready groups. Their open trajectories end here.

        Raises:
            DataPoolError: a payload cannot be read back; nothing is leased.
        """
        groups = [self.records.groups[uid] for uid in prompt_uids]
        # Before anything is changed, because it may fail.
        packed = {r.trajectory_uid: self.packed(r) for g in groups for r in g.complete}
        for group in groups:
            excluded, n_asked = self._excluded(group), n_rollouts or self.config.n_rollouts
            leased = rows.GroupLeased(group.prompt_uid, excluded, n_asked)
            self.log.write(group, leased, self.now)
            self.begin_lease(leased)
            self._notice("leased", group.prompt_uid, delivery=group.delivery)
        return [self._served(g, [packed[r.trajectory_uid] for r in g.complete]) for g in groups]

    def leased(self, prompt_uid: str) -> PackedGroup:
        """A leased group as its consumer gets it."""
        group = self._leased[prompt_uid]
        return self._served(group, [self.packed(record) for record in group.complete])

    def _served(self, group: GroupRecord, trajectories: list[PackedTrajectory]) -> PackedGroup:
        return PackedGroup(
            group.prompt_uid,
            trajectories,
            group.n_asked if group.terms is None else group.terms.n_rollouts,
            dict(group.metadata),
            group.delivery,
        )

    def packed(self, record: TrajectoryRecord) -> PackedTrajectory:
        """A trajectory as consumers get it, if it is complete; else with its steps so far."""
        steps = record.as_served(self.steps.read(record.steps))
        return PackedTrajectory(
            record.trajectory_uid, record.prompt_uid, steps, dict(record.metadata), record.attempt
        )

    def _excluded(self, group: GroupRecord) -> tuple[str, ...]:
        """Complete trajectories that marks keep from being served."""
        selection = self.rules.selection
        if group.is_frozen or (selection.is_trivial and not group.is_marked):
            return ()
        served, _ = selection.gate(self.rules.info(group))
        kept = {t.trajectory_uid for t in served.trajectories}
        return tuple(r.trajectory_uid for r in group.complete if r.trajectory_uid not in kept)

    def begin_lease(self, leased: rows.GroupLeased) -> None:
        """A consumer has it; the first time, what is served is settled: all complete
        trajectories that are not excluded."""
        group = self.records.groups[leased.prompt_uid]
        is_first = not group.is_frozen
        group.n_asked, group.is_leased = leased.n_asked, True
        self._unqueue(group)
        self._leased[group.prompt_uid] = group
        self.log.is_changed = True
        if not is_first:
            return
        for record in group.trajectories:
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_SERVED))
        for uid in leased.excluded:
            record = self.records.trajectories[uid]
            group.complete.remove(record)
            self.counts.trajectories.complete -= 1
            closing = Closing(group.prompt_uid, "pool", aborted=NOT_TRAINABLE)
            self._set_aside(group, record, closing)
        if leased.excluded:
            group.note_oldest()

    def ack(self, prompt_uid: str) -> None:
        group = self._leased.pop(prompt_uid)
        erased = group.readiness.drop_when_returned is not None or self._is_over(group)
        erased = erased or not self._take_out_leaving(group)
        self.counts.groups.acked += 1
        self.counts.steps.acked += self._close(group, "acked", erased=erased)
        self.counts.trajectories.acked += len(group.complete)
        self._notice("acked", prompt_uid)

    def give_back(self, returned: rows.GroupReturned) -> None:
        """Return a leased group to the front. Call in reverse order for the groups of one lease."""
        group = self._leased.pop(returned.prompt_uid)
        reason = group.readiness.drop_when_returned
        if reason is None and self._is_over(group):
            reason = RETENTION
        if reason is None and group.leaving:
            is_clean = self._take_out_leaving(group)
            if not is_clean or len(group.complete) < group.least:
                reason = TOO_FEW_ROLLOUTS
        if reason is not None:
            self._drop(group, reason)
            return
        group.is_leased, group.delivery = False, group.delivery + 1
        self.log.write(group, returned, self.now)
        uid = group.prompt_uid
        group.readiness = replace(group.readiness, is_due=True)
        self.queue.give_back(uid)
        self._ready[uid] = group
        self._ready.move_to_end(uid, last=False)
        self._note_version(group)
        self._notice("returned", uid, delivery=group.delivery)
        self._decide(group)
        self._trim()

    def _take_out_leaving(self, group: GroupRecord) -> bool:
        """Take out and erase the trajectories deleted while a consumer had the group; False if
        their rows cannot be read, so that the whole group has to be erased."""
        if not group.leaving:
            return True
        try:
            erasure = self.log.erasure(group, *group.leaving)
        except errors.JournalError as e:
            logger.error(
                "%s; group %r in channel %r is erased with what is deleted of it",
                e,
                group.prompt_uid,
                self.name,
            )
            return False
        for uid in group.leaving:
            self._take_out(group, self.records.trajectories[uid])
        self.log.erase(group, erasure)
        self.log.scrub()
        group.leaving = ()
        return True

    def _is_over(self, group: GroupRecord) -> bool:
        """True if the group has reached its retention age. A replay drops nothing: what has rows
        was there."""
        if self.replaying or self.rules.retention_s is None:
            return False
        return group.opened_at + self.rules.retention_s <= self.now

    # -- a group leaves ----------------------------------------------------------------------

    def _drop(self, group: GroupRecord, reason: str, returned: bool = False) -> None:
        self._unqueue(group)
        for record in group.trajectories:
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_DROPPED))
        counts = self.counts
        counts.groups.dropped += 1
        counts.groups.returned += returned
        count_reason(counts.groups.drop_reasons, reason)
        erased = reason in (DELETED, RETENTION) or bool(group.leaving)
        counts.steps.dropped += self._close(group, f"dropped ({reason})", erased=erased)
        counts.trajectories.dropped += len(group.complete)
        self._notice(
            "dropped",
            group.prompt_uid,
            reason=short(reason),
            returned=returned,
            complete=len(group.complete),
            metadata=dict(group.metadata) if returned else {},  # what nobody needs is not kept
        )

    def _close(self, group: GroupRecord, how: str, *, erased: bool) -> int:
        """Forget the group's content, remember its uids; how many steps that released."""
        closings = {t.trajectory_uid: t.closing for t in group.trajectories if t.closing}
        left = rows.GroupLeft(group.prompt_uid, how, closings)
        self.log.close(group, left, self.now, erased=erased)
        n_steps = self._forget(group)
        kept = {uid: closing.remembered() for uid, closing in closings.items()}
        self._remember(rows.GroupClosed(group.prompt_uid, short(how), kept))
        return n_steps

    def _forget(self, group: GroupRecord) -> int:
        """Forget the group's content; how many steps that released."""
        n_steps = sum(self._forget_steps(record) for record in group.trajectories)
        self.records.remove(group)
        self.counts.trajectories.complete -= len(group.complete)
        self.steps.memory_bytes -= sum(map(len, group.prompts))
        return n_steps

    def leave(self, left: rows.GroupLeft, row: int) -> None:
        """Let a group of before leave, whose rows are not archived yet."""
        group = self.records.groups[left.prompt_uid]
        group.rows.append(row)
        self._leased.pop(group.prompt_uid, None)
        self._unqueue(group)
        self.log.depart(group, left)
        self._forget(group)

    def _remember(self, closed: rows.GroupClosed) -> None:
        """Leave behind how a group and its trajectories were closed."""
        self._recall(closed)
        self.log.write_tombstone(closed, self.now)

    def recall(self, closed: rows.GroupClosed, row: int) -> None:
        """Remember closed uids of before, as far as the memory for them reaches."""
        self._recall(closed)
        self.log.keep_tombstone(closed, row)

    def _recall(self, closed: rows.GroupClosed) -> None:
        for uid, closing in closed.closings.items():
            self.records.closed_trajectories[uid] = closing
        if closed.how is not None:
            self.records.closed_groups[closed.prompt_uid] = closed.how

    # -- what is asked -----------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        oldest_version = self._ready_versions.first()
        counts = self.counts
        oldest = [self.describe(g) for g in islice(self._open.values(), N_OLDEST_OPEN)]
        return {
            "groups": {
                **asdict(counts.groups),
                "open": len(self._open),
                "ready": len(self._ready),
                "held": len(self._held),
                "leased": len(self._leased),
                "drop_reasons": dict(counts.groups.drop_reasons),
            },
            "trajectories": {
                **asdict(counts.trajectories),
                "abort_reasons": dict(counts.trajectories.abort_reasons),
            },
            "steps": asdict(counts.steps),
            "tokens": {"stored": counts.tokens, "responses": counts.response_tokens},
            "memory_bytes": self.memory_bytes,
            "pictures": {
                "stored": self.pictures.n_held[self.name],
                "bytes": self.pictures.n_bytes[self.name],
            },
            "ready": len(self._ready) - len(self._held),
            "policy_version": counts.version,
            "oldest_policy_version_ready": None if oldest_version is None else oldest_version[0],
            "oldest_open_age_s": oldest[0]["age_s"] if oldest else 0.0,
            "oldest_open": oldest,
            "shut_down": counts.shut_down,
            "has_consumer": self.has_consumer,
        }

    def describe(self, group: GroupRecord) -> dict[str, Any]:
        """A group and, while it is open, why it is."""
        wanted = group.terms.n_rollouts if group.terms else self.config.n_rollouts
        missing = wanted - len(group.complete) - group.n_final
        if group.n_open:
            why = f"{group.n_open} still open"
        elif missing > 0:
            why = f"{missing} trajectories were not started"
        else:
            why = "all trajectories were aborted"
        return {
            "prompt_uid": group.prompt_uid,
            "age_s": self.now - group.opened_at,
            "declared": group.terms is not None,
            "n_rollouts": wanted,
            "complete": len(group.complete),
            "running": group.n_open,
            "aborted": group.n_aborted,
            "deadline_in_s": None if group.deadline is None else group.deadline - self.now,
            "why": f"{len(group.complete)} of {wanted} complete; {why}",
        }

    def state(self, group: GroupRecord) -> tuple[str, str | None]:
        """`open`, `ready`, `held` or `leased`; and why it is held."""
        if group.prompt_uid in self._leased:
            return "leased", None
        if group.prompt_uid in self._held:
            return "held", self._held[group.prompt_uid]
        return ("ready" if group.prompt_uid in self._ready else "open"), None

    def is_leased(self, prompt_uid: str) -> bool:
        return prompt_uid in self._leased

    def doubtful(self) -> list[str]:
        """prompt_uids of groups that a salvage holds, and nobody has released."""
        tagged = self.records.tagged.get(DOUBTFUL, ())
        return [uid for uid in tagged if self.records.groups[uid].marks.trainable is False]

    def is_declared(self, prompt_uid: str) -> bool:
        """True if a live group of this name was declared here."""
        group = self.records.groups.get(prompt_uid)
        return group is not None and group.terms is not None

    def info(self, group: GroupRecord) -> GroupInfo:
        """Return the group as orders and filters see it: its complete trajectories."""
        return self.rules.info(group)

    def ready_groups(self) -> Iterable[GroupRecord]:
        """All that are ready or held, the oldest first."""
        return self._ready.values()

    def dry_run(self, op: questions.DryRunOf) -> DryRun:
        """Return what a fetch would be given (`DryRunOf`)."""
        given = op.selection
        selection = self.rules.selection if given is None else Selection(SelectionConfig(**given))

        def judged(info: GroupInfo) -> tuple[Verdict | None, float]:
            group = self.records.groups[info.prompt_uid]
            verdict, key = judge(group, self.rules, self.now, selection)
            stale = is_stale(group, self.config, self.counts.version)
            return Drop(STALE) if stale else verdict, key

        infos = map(self.info, self.ready_groups())
        return dry_run(selection, infos, op.batch_size, judged)

    # -- owners ------------------------------------------------------------------------------

    def check_group_owner(self, op: ops.OpenGroup) -> None:
        """Check who declares a group.

        Raises:
            NotOwnerError: the group is here, and has another owner than `op` names.
        """
        self._check_owner(op.metadata.get(OWNER), None, op.prompt_uid)

    def check_owner(self, op: ops.ResumeTrajectory) -> None:
        """Check who goes on with a trajectory.

        Raises:
            NotOwnerError: the trajectory is here, and has another owner than `op` names.
        """
        if op.trajectory_uid in self.records.trajectories:
            self._check_owner(op.metadata.get(OWNER), op.trajectory_uid, op.prompt_uid)

    def _check_owner(
        self, owner: str | None, trajectory_uid: str | None, prompt_uid: str = ""
    ) -> None:
        """Check who asks for a trajectory or a group.

        Args:
            owner: who asks; None: one who may do everything.
            trajectory_uid: what it asks for; None, or not here: the group.

        Raises:
            NotOwnerError: that has another owner.
        """
        if owner is None or self.replaying:
            return
        what, group = f"group {prompt_uid!r}", self.records.groups.get(prompt_uid)
        metadata: Mapping[str, Any] = {}
        if trajectory_uid is not None and trajectory_uid in self.records.trajectories:
            what = f"trajectory {trajectory_uid!r}"
            metadata = self.records.trajectories[trajectory_uid].metadata
        elif group is not None and group.terms is not None:
            metadata = group.metadata
        elif group is not None and group.trajectories:  # undeclared: whoever came first
            metadata = group.trajectories[0].metadata
        if metadata.get(OWNER) not in (None, owner):
            raise errors.NotOwnerError(f"{what} has another owner; use the key that opened it")

    def _add_metadata(self, record: TrajectoryRecord, metadata: dict[str, Any]) -> None:
        if metadata:
            self.records.set_metadata(record, {**record.metadata, **metadata})

    def _late(
        self,
        uid: str,
        closing: Closing | None,
        reward: float | None = None,
        step_index: int | None = None,
    ) -> Literal["late"]:
        """Count a call about a trajectory whose group went on without it; "late" is its answer."""
        self.counts.trajectories.late += 1
        self.log.is_changed = True
        if closing is not None:
            self._keep_late_reward(uid, closing, reward, step_index)
        return "late"

    def _keep_late_reward(
        self, uid: str, closing: Closing, reward: float | None, step_index: int | None = None
    ) -> None:
        """Keep a reward that changes nothing any more, for the archive."""
        if reward is not None and not closing.is_deleted:
            why = self._why_closed(closing)
            late = rows.RewardCameLate(closing.prompt_uid, uid, reward, step_index, why)
            self.log.keep_late(late, self.now, b"")


def _ended_by(closing: Closing) -> type[errors.TrajectoryClosedError]:
    """Error of an end that contradicts this one."""
    completed = errors.TrajectoryCompletedError
    return completed if closing.aborted is None else errors.TrajectoryClosedError


def _is_past(time: float | None, now: float) -> bool:
    return time is not None and time <= now


METHODS: Final[Mapping[type, Callable[[Channel, Any], Any]]] = {
    ops.OpenGroup: Channel.open_group,
    ops.OpenTrajectory: Channel.open_trajectory,
    ops.SubmitSteps: Channel.submit_steps,
    ops.AppendStep: Channel.append_step,
    ops.PutPictures: Channel.put_pictures,
    ops.CompleteTrajectory: Channel.complete_trajectory,
    ops.AbortTrajectory: Channel.abort_trajectory,
    ops.DropGroup: Channel.drop_group,
    ops.SetReward: Channel.set_reward,
    ops.Mark: Channel.mark,
    ops.AdvanceVersion: Channel.advance_version,
    questions.DryRunOf: Channel.dry_run,
    questions.WhyClosed: Channel.why_closed,
    questions.ReadPictures: Channel.read_pictures,
    questions.WaitAvailable: Channel.available,
    questions.WaitCredit: Channel.credit,
    rows.GroupDecided: Channel.decided,
    rows.TrajectoryDeleted: Channel.remove,
    rows.GroupLeased: Channel.begin_lease,
    rows.GroupReturned: Channel.give_back,
}
"""Method for each operation or question that names a channel, and for each row of the pool's own
decisions, which a replay applies."""
