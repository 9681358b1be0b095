"""One channel of the pool: its trajectories, its groups and the order they are served in.

Life of a trajectory: opened by `open_trajectory` or its first step, closed by
`complete_trajectory`, by an `is_last` step with all steps before it present, by
`abort_trajectory`, or by the pool when its group is served or dropped without it.

Life of a group (`GroupRecord`)::

    open ──enough complete──► ready ──take──► leased ──ack──► acked
      │                        │ ▲              │
      │                        │ └──give_back───┘
      └──────deadline, abort───┴──max_queue_size, drop──► dropped(reason)

A ready group still takes steps and completions of its open trajectories: whatever is complete
when it is first leased is served, and from then on its content is frozen.

Owns no lease and no clock (`now` is passed in); knows nothing of other channels. Every operation
is O(log n) or better in whatever is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from typing import Any

from datapool.config import ChannelConfig
from datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    GroupClosedError,
    GroupConflictError,
    PoolFullError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownGroupError,
    UnknownTrajectoryError,
)
from datapool.heap import KeyedHeap
from datapool.ready import ReadyOrder
from datapool.records import (
    Closing,
    GroupRecord,
    GroupTerms,
    Reasons,
    Remembered,
    SubmitOutcome,
    TrajectoryOutcome,
    TrajectoryRecord,
)
from datapool.types import Group, Step, Trajectory

NO_STEPS = "no_steps"
GROUP_SERVED = "group_served"
GROUP_DROPPED = "group_dropped"
GROUP_CLOSED = "group_closed"
DEADLINE = "deadline"
TOO_FEW_ROLLOUTS = "too_few_rollouts"
MAX_QUEUE_SIZE = "max_queue_size"

N_OLDEST_OPEN = 5


@dataclass(slots=True)
class GroupCounts:
    submitted: int = 0
    acked: int = 0
    dropped: int = 0


@dataclass(slots=True)
class TrajectoryCounts:
    submitted: int = 0
    open: int = 0
    acked: int = 0
    dropped: int = 0
    aborted: int = 0
    late: int = 0


@dataclass(slots=True)
class StepCounts:
    submitted: int = 0
    accepted: int = 0
    duplicate: int = 0
    late: int = 0
    conflict: int = 0
    rejected: int = 0
    stored: int = 0
    acked: int = 0
    dropped: int = 0
    missing: int = 0


class Channel:
    """The state of one channel. See the module for the life cycles."""

    def __init__(self, name: str, config: ChannelConfig, remembered_uids: int) -> None:
        self.name = name
        self.config = config
        self.trajectory_index: dict[str, TrajectoryRecord] = {}
        """Trajectories of live groups, by uid."""
        self.trajectory_complete: set[str] = set()
        """Those of them that are complete."""
        self.prompt_groups: dict[str, GroupRecord] = {}
        """Live groups (open, ready or leased), by prompt uid."""
        self.deadlines = KeyedHeap()
        self.shut_down = False
        self._open: OrderedDict[str, GroupRecord] = OrderedDict()
        self._ready = ReadyOrder()
        self._leased: dict[str, GroupRecord] = {}
        self._ready_versions = KeyedHeap()
        self._closed_trajectories: Remembered[Closing] = Remembered(remembered_uids)
        self._closed_groups: Remembered[str] = Remembered(remembered_uids)
        self._groups = GroupCounts()
        self._trajectories = TrajectoryCounts()
        self._steps = StepCounts()
        self._tokens = 0
        self._drop_reasons = Reasons()
        self._abort_reasons = Reasons()

    # -- producers: groups -------------------------------------------------------------------

    def open_group(
        self, prompt_uid: str, terms: GroupTerms, metadata: dict[str, Any], now: float
    ) -> SubmitOutcome:
        gone = self._closed_groups.get(prompt_uid)
        if gone is not None:
            raise GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was {gone}; "
                "open a new prompt_uid for another pass over the prompt"
            )
        group = self.prompt_groups.get(prompt_uid)
        if group is not None and group.terms is not None:
            if group.terms != terms:
                raise GroupConflictError(
                    f"group {prompt_uid!r} in channel {self.name!r} is declared with "
                    f"{group.terms._asdict()}, not {terms._asdict()}; declare it once"
                )
            return "duplicate"
        if group is not None and group.frozen:
            raise GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was served undeclared; "
                "open a group before its first step"
            )
        if self.shut_down:
            raise ChannelShutDownError(
                f"channel {self.name!r} was shut down; group {prompt_uid!r} cannot be opened"
            )
        if group is None:
            if not self.has_credit:
                raise PoolFullError(
                    f"channel {self.name!r} holds max_outstanding_groups="
                    f"{self.config.max_outstanding_groups} open and ready groups; "
                    f"group {prompt_uid!r} waits until one is leased: raise the limit or timeout_s"
                )
            group = self._new_group(prompt_uid, now)
        elif not group.due:
            # Steps came first. It may have counted as ready undeclared; now its own terms decide.
            self._ready.discard(prompt_uid)
            self._ready_versions.discard(prompt_uid)
            self._open[prompt_uid] = group
        group.terms = terms
        group.metadata = dict(metadata)
        self._set_deadline(group, terms.deadline_s, now)
        self._settle(group)
        return "accepted"

    @property
    def has_credit(self) -> bool:
        """Whether `open_group` would be admitted now."""
        limit = self.config.max_outstanding_groups
        return limit is None or len(self._open) + self.n_ready < limit

    @property
    def n_ready(self) -> int:
        return self._ready.count(self.config.n_rollouts)

    def drop_group(self, prompt_uid: str, reason: str) -> None:
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            gone = self._closed_groups.get(prompt_uid)
            if gone is None:
                raise UnknownGroupError(
                    f"group {prompt_uid!r} is unknown in channel {self.name!r}; check both names"
                )
            if not gone.startswith("dropped"):
                raise GroupClosedError(
                    f"group {prompt_uid!r} in channel {self.name!r} was {gone}; "
                    "it can no longer be dropped"
                )
            return
        if prompt_uid in self._leased:
            raise GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} is leased; nack its lease first"
            )
        self._drop(group, reason)

    # -- producers: trajectories and steps ---------------------------------------------------

    def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int,
        metadata: dict[str, Any],
        now: float,
    ) -> SubmitOutcome:
        record = self._find(trajectory_uid, prompt_uid)
        if record is None:
            record = self._new_trajectory(trajectory_uid, prompt_uid, now)
            if record is None:
                return "late"
            outcome: SubmitOutcome = "accepted"
        elif isinstance(record, Closing):
            return "late"
        elif record.closing is not None:
            return "duplicate" if record.closing.aborted is None else "late"
        else:
            outcome = "duplicate"
        record.attempt = max(record.attempt, attempt)
        record.metadata.update(metadata)
        return outcome

    def submit(self, step: Step, now: float) -> SubmitOutcome:
        """Apply one step. Raises a DataPoolError and changes nothing if it contradicts another."""
        counts = self._steps
        counts.submitted += 1
        try:
            outcome = self._submit(step, now)
        except StepConflictError:
            counts.conflict += 1
            raise
        except DataPoolError:
            counts.rejected += 1
            raise
        if outcome == "accepted":
            counts.accepted += 1
        elif outcome == "duplicate":
            counts.duplicate += 1
        else:
            counts.late += 1
        return outcome

    def _submit(self, step: Step, now: float) -> SubmitOutcome:
        index = step.step_index
        record = self._find(step.trajectory_uid, step.prompt_uid)
        if record is None:
            record = self._new_trajectory(step.trajectory_uid, step.prompt_uid, now)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        stored = record.steps.get(index)
        if stored is not None:
            if stored == step:
                return "duplicate"
            raise StepConflictError(
                f"step {step.trajectory_uid!r}[{index}] is already stored in channel "
                f"{self.name!r} with other content; give every call its own step_index"
            )
        if record.closing is not None:
            return "late"
        self._check_index(record, step)
        record.steps[index] = step
        record.max_index = max(record.max_index, index)
        record.n_tokens += step.n_tokens
        self._tokens += step.n_tokens
        self._steps.stored += 1
        if step.is_last:
            record.last_index = index
        if record.last_index is not None and len(record.steps) == record.last_index + 1:
            self._complete(record, Closing(record.prompt_uid, "is_last"))
        return "accepted"

    def _check_index(self, record: TrajectoryRecord, step: Step) -> None:
        owner = f"step {step.trajectory_uid!r}[{step.step_index}] in channel {self.name!r}"
        last = record.last_index
        if last is not None and step.step_index > last:
            raise StepIndexError(f"{owner} lies beyond the step marked is_last, {last}")
        if last is not None and step.is_last:
            raise StepIndexError(f"{owner} is marked is_last, and so is step {last}; mark one")
        if step.is_last and record.max_index > step.step_index:
            raise StepIndexError(
                f"{owner} is marked is_last, but step {record.max_index} is stored; "
                "mark the step with the highest step_index"
            )

    def complete_trajectory(
        self, trajectory_uid: str, reward: float | None, metadata: dict[str, Any]
    ) -> TrajectoryOutcome:
        record = self.trajectory_index.get(trajectory_uid)
        if record is not None and record.closing is None:
            record.metadata.update(metadata)
            if record.steps:
                self._complete(record, Closing(record.prompt_uid, "complete", reward))
                return "complete"
            self._abort(record, Closing(record.prompt_uid, "complete", reward, NO_STEPS))
            self._settle(self.prompt_groups[record.prompt_uid])
            return "aborted"
        closing = self._closing(trajectory_uid)
        if closing.by == "pool":
            self._trajectories.late += 1
            return "late"
        if closing.by == "abort" or closing.reward != reward:
            raise TrajectoryClosedError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be completed with reward {reward}. "
                "Complete a trajectory once, or put its reward on the step marked is_last"
            )
        return "complete" if closing.aborted is None else "aborted"

    def abort_trajectory(
        self, trajectory_uid: str, reason: str, will_retry: bool
    ) -> TrajectoryOutcome:
        record = self.trajectory_index.get(trajectory_uid)
        if record is not None and record.closing is None:
            self._abort(record, Closing(record.prompt_uid, "abort", None, reason, will_retry))
            self._settle(self.prompt_groups[record.prompt_uid])
            return "aborted"
        closing = self._closing(trajectory_uid)
        if closing.by == "pool":
            self._trajectories.late += 1
            return "late"
        if closing.aborted is None or (will_retry and not closing.will_retry):
            raise TrajectoryClosedError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be aborted with will_retry={will_retry}"
            )
        if record is not None and closing.will_retry and not will_retry:
            # The producer gave up on the retry that it had announced.
            record.closing = closing._replace(will_retry=False)
            group = self.prompt_groups[record.prompt_uid]
            group.n_final += 1
            self._settle(group)
        return "aborted"

    # -- consumers ---------------------------------------------------------------------------

    def n_available(self, n_rollouts: int | None) -> int:
        return self._ready.count(n_rollouts or self.config.n_rollouts)

    def take(self, n_rollouts: int | None) -> Group | None:
        """Lease the group that is ready first, or None. Its open trajectories end here."""
        n_wanted = n_rollouts or self.config.n_rollouts
        prompt_uid = self._ready.first(n_wanted)
        if prompt_uid is None:
            return None
        group = self.prompt_groups[prompt_uid]
        self._unqueue(group)
        group.frozen = True
        for record in group.trajectories.values():
            if record.closing is None:
                self._abort(record, Closing(prompt_uid, "pool", aborted=GROUP_SERVED))
        self._leased[prompt_uid] = group
        return Group(
            prompt_uid=prompt_uid,
            trajectories=tuple(r.served for r in group.complete if r.served is not None),
            n_rollouts=n_wanted if group.terms is None else group.terms.n_rollouts,
            metadata=dict(group.metadata),
            delivery=group.delivery,
        )

    def ack(self, prompt_uid: str) -> None:
        group = self._leased.pop(prompt_uid)
        self._groups.acked += 1
        self._steps.acked += self._close(group, "acked")
        self._trajectories.acked += len(group.complete)

    def give_back(self, prompt_uid: str) -> None:
        """Return a leased group to the front. Call in reverse order for the groups of one lease."""
        group = self._leased.pop(prompt_uid)
        group.delivery += 1
        group.due = True
        self._ready.give_back(prompt_uid)
        self._note_version(group)
        self._trim_queue()

    # -- time --------------------------------------------------------------------------------

    def expire_deadlines(self, now: float) -> None:
        """Serve or drop every group whose deadline has passed."""
        while (prompt_uid := self.deadlines.pop_until(now)) is not None:
            group = self.prompt_groups[prompt_uid]
            if len(group.complete) >= (group.terms.min_rollouts if group.terms else 1):
                self._make_due(group)
            else:
                self._drop(group, DEADLINE)

    # -- statistics --------------------------------------------------------------------------

    def statistics(self, now: float) -> dict[str, Any]:
        oldest_version = self._ready_versions.first()
        return {
            "groups": {
                "submitted": self._groups.submitted,
                "open": len(self._open),
                "ready": self.n_ready,
                "leased": len(self._leased),
                "acked": self._groups.acked,
                "dropped": self._groups.dropped,
                "drop_reasons": dict(self._drop_reasons.counts),
            },
            "trajectories": {
                **asdict(self._trajectories),
                "complete": len(self.trajectory_complete),
                "abort_reasons": dict(self._abort_reasons.counts),
            },
            "steps": asdict(self._steps),
            "tokens": {"stored": self._tokens},
            "ready": self.n_ready,
            "oldest_policy_version_ready": None if oldest_version is None else oldest_version[0],
            "oldest_open": [
                self._describe(group, now)
                for _, group in zip(range(N_OLDEST_OPEN), self._open.values(), strict=False)
            ],
            "shut_down": self.shut_down,
        }

    def _describe(self, group: GroupRecord, now: float) -> dict[str, Any]:
        """An open group and why it is open."""
        wanted = group.terms.n_rollouts if group.terms else self.config.n_rollouts
        missing = wanted - len(group.complete) - group.n_final
        if group.n_open:
            why = f"{group.n_open} trajectories are running"
        elif missing > 0:
            why = f"{missing} trajectories were not started"
        else:
            why = "all trajectories were aborted"
        return {
            "prompt_uid": group.prompt_uid,
            "age_s": now - group.opened_at,
            "declared": group.terms is not None,
            "n_rollouts": wanted,
            "complete": len(group.complete),
            "running": group.n_open,
            "aborted": group.n_aborted,
            "deadline_in_s": None if group.deadline is None else group.deadline - now,
            "why": f"{len(group.complete)} of {wanted} complete; {why}",
        }

    # -- inside: lookup ----------------------------------------------------------------------

    def _find(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | Closing | None:
        """The live record, the tombstone, or None; never one of another prompt."""
        record = self.trajectory_index.get(trajectory_uid)
        found = record if record is not None else self._closed_trajectories.get(trajectory_uid)
        if found is not None and found.prompt_uid != prompt_uid:
            raise TrajectoryConflictError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} belongs to prompt "
                f"{found.prompt_uid!r}, not {prompt_uid!r}; use a new trajectory_uid per rollout"
            )
        return found

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

    # -- inside: births ----------------------------------------------------------------------

    def _new_group(self, prompt_uid: str, now: float) -> GroupRecord:
        group = GroupRecord(prompt_uid, now)
        self.prompt_groups[prompt_uid] = group
        self._open[prompt_uid] = group
        self._groups.submitted += 1
        return group

    def _new_trajectory(
        self, trajectory_uid: str, prompt_uid: str, now: float
    ) -> TrajectoryRecord | None:
        """A record in its (perhaps new) group; None if the group's content is settled already."""
        group = self.prompt_groups.get(prompt_uid)
        self._trajectories.submitted += 1
        if self._closed_groups.get(prompt_uid) is not None or (group and group.frozen):
            # Remembered, so that the completion that follows is late too, and not unknown.
            self._closed_trajectories.put(
                trajectory_uid, Closing(prompt_uid, "pool", aborted=GROUP_CLOSED)
            )
            self._trajectories.aborted += 1
            self._abort_reasons.add(GROUP_CLOSED)
            return None
        if group is None:
            group = self._new_group(prompt_uid, now)
            self._set_deadline(group, None, now)
        record = TrajectoryRecord(trajectory_uid, prompt_uid)
        self.trajectory_index[trajectory_uid] = record
        group.trajectories[trajectory_uid] = record
        group.n_open += 1
        self._trajectories.open += 1
        return record

    def _set_deadline(self, group: GroupRecord, deadline_s: float | None, now: float) -> None:
        seconds = self.config.group_deadline_s if deadline_s is None else deadline_s
        if seconds is not None and not group.due:
            group.deadline = now + seconds
            self.deadlines.set(group.prompt_uid, group.deadline)

    # -- inside: trajectories close ----------------------------------------------------------

    def _complete(self, record: TrajectoryRecord, closing: Closing) -> None:
        steps = [record.steps[i] for i in sorted(record.steps)]
        last, outcome = steps[-1], closing.reward
        reward = last.reward if outcome is None else (last.reward or 0.0) + outcome
        if reward != last.reward or not last.is_last:
            steps[-1] = replace(last, reward=reward, is_last=True)
        record.closing = closing
        record.served = Trajectory(
            record.trajectory_uid,
            record.prompt_uid,
            tuple(steps),
            dict(record.metadata),
            record.attempt,
        )
        self._steps.missing += record.max_index + 1 - len(steps)
        self._trajectories.open -= 1
        self.trajectory_complete.add(record.trajectory_uid)
        group = self.prompt_groups[record.prompt_uid]
        group.n_open -= 1
        group.complete.append(record)
        oldest = min(step.policy_version for step in steps)
        if group.oldest_version is None or oldest < group.oldest_version:
            group.oldest_version = oldest
        if group.terms is None and not group.due:
            self._ready.reach(group.prompt_uid, len(group.complete))
        self._settle(group)

    def _abort(self, record: TrajectoryRecord, closing: Closing) -> None:
        """Close without serving and release the steps. The caller settles the group."""
        record.closing = closing
        self._steps.stored -= len(record.steps)
        self._steps.dropped += len(record.steps)
        self._tokens -= record.n_tokens
        record.steps = {}
        record.n_tokens = 0
        group = self.prompt_groups[record.prompt_uid]
        group.n_open -= 1
        group.n_aborted += 1
        if closing.by != "pool" and not closing.will_retry:
            group.n_final += 1
        self._trajectories.open -= 1
        self._trajectories.aborted += 1
        self._abort_reasons.add(closing.aborted or "")

    # -- inside: groups move -----------------------------------------------------------------

    def _settle(self, group: GroupRecord) -> None:
        """Move a group on if a trajectory that just closed, or its new terms, decide it."""
        n_complete = len(group.complete)
        if group.frozen:
            return
        if group.due:
            self._note_version(group)
        elif group.terms is None:
            if self._ready.holds(group.prompt_uid, self.config.n_rollouts):
                self._open.pop(group.prompt_uid, None)
                self._note_version(group)
                self._trim_queue()
        elif n_complete >= group.terms.n_rollouts:
            self._make_due(group)
        elif group.n_open == 0 and n_complete + group.n_final >= group.terms.n_rollouts:
            if n_complete >= group.terms.min_rollouts:
                self._make_due(group)
            else:
                self._drop(group, TOO_FEW_ROLLOUTS)

    def _make_due(self, group: GroupRecord) -> None:
        self._open.pop(group.prompt_uid, None)
        self.deadlines.discard(group.prompt_uid)
        group.due = True
        self._ready.make_due(group.prompt_uid)
        self._note_version(group)
        self._trim_queue()

    def _note_version(self, group: GroupRecord) -> None:
        if group.oldest_version is not None:
            self._ready_versions.set(group.prompt_uid, group.oldest_version)

    def _trim_queue(self) -> None:
        limit = self.config.max_queue_size
        while limit is not None and self.n_ready > limit:
            oldest = self._ready.first(self.config.n_rollouts)
            if oldest is None:
                return
            self._drop(self.prompt_groups[oldest], MAX_QUEUE_SIZE)

    def _unqueue(self, group: GroupRecord) -> None:
        """Out of every order that holds live groups."""
        self._open.pop(group.prompt_uid, None)
        self._ready.discard(group.prompt_uid)
        self._ready_versions.discard(group.prompt_uid)
        self.deadlines.discard(group.prompt_uid)

    def _drop(self, group: GroupRecord, reason: str) -> None:
        self._unqueue(group)
        for record in group.trajectories.values():
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_DROPPED))
        self._groups.dropped += 1
        self._drop_reasons.add(reason)
        self._steps.dropped += self._close(group, f"dropped ({reason})")
        self._trajectories.dropped += len(group.complete)

    def _close(self, group: GroupRecord, how: str) -> int:
        """Forget the group's content, remember its uids; how many steps that released."""
        n_steps = 0
        for uid, record in group.trajectories.items():
            del self.trajectory_index[uid]
            self.trajectory_complete.discard(uid)
            if record.closing is not None:
                self._closed_trajectories.put(uid, record.closing)
            n_steps += len(record.steps)
            self._tokens -= record.n_tokens
        self._steps.stored -= n_steps
        del self.prompt_groups[group.prompt_uid]
        self._closed_groups.put(group.prompt_uid, how)
        return n_steps
