"""One channel of the pool: what its producers and people may do, and what is asked of it.

    Channel ──► Steps ──► Serving ──► Groups      each builds on the one to its right

Life of a trajectory: opened by `OpenTrajectory` or its first step, closed by `CompleteTrajectory`,
by an `is_last` step with all steps before it present, by `AbortTrajectory`, or by the pool when its
group is served or dropped without it. Life of a group: `serving.py`.

With a log, every change of a live group is a row there, written before anything that follows from
it; when the group is gone, so are its rows. `store/replay.py` reads them back, through the methods
that wrote them.

Owns no lease and no clock (`now` is set before each change); knows nothing of other channels.
Every operation is O(log n) or better in whatever is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, Literal

from msgspec.structs import asdict, replace

from stepwell.datapool import errors, ops, questions
from stepwell.datapool.core import rows
from stepwell.datapool.core.records import (
    DELETED,
    Closing,
    GroupRecord,
    GroupTerms,
    TrajectoryRecord,
)
from stepwell.datapool.core.rows import GroupRetired, TrajectoryDeleted
from stepwell.datapool.core.serving import AT_ONCE
from stepwell.datapool.core.steps import Steps
from stepwell.datapool.selection import DOUBTFUL, Marks
from stepwell.datapool.types import OWNER

NO_STEPS = "no_steps"
N_OLDEST_OPEN = 5


class Channel(Steps):
    """The state of one channel."""

    # -- groups ------------------------------------------------------------------------------

    def open_group(self, op: ops.OpenGroup) -> ops.SubmitOutcome:
        prompt_uid, terms = op.prompt_uid, GroupTerms(op.n_rollouts, op.min_rollouts, op.deadline_s)
        gone = self._closed_groups.get(prompt_uid)
        self.check_group_owner(op)
        if gone is not None:
            raise errors.GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was {gone}; "
                "open a new prompt_uid for another pass over the prompt"
            )
        group = self.prompt_groups.get(prompt_uid)
        if group is not None and group.terms is not None:
            if group.terms != terms:
                raise errors.GroupConflictError(
                    f"group {prompt_uid!r} in channel {self.name!r} is declared with "
                    f"{group.terms._asdict()}, not {terms._asdict()}; declare it once"
                )
            return "duplicate"
        if group is not None and group.frozen:
            raise errors.GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was served undeclared; "
                "open a group before its first step"
            )
        if self.counts.shut_down:
            raise errors.ChannelShutDownError(
                f"channel {self.name!r} was shut down; group {prompt_uid!r} cannot be opened"
            )
        if group is None:
            if not self.replaying and (full := self._full()) is not None:
                raise errors.PoolFullError(
                    f"channel {self.name!r} {full}; group {prompt_uid!r} waits until one is "
                    "leased: raise the limit or timeout_s"
                )
            group = self._new_group(prompt_uid)
        elif not group.due:
            # Steps came first. It may have counted as ready undeclared; now its own terms decide.
            self._unready(group)
            self._open[prompt_uid] = group
        group.terms = terms
        group.metadata = dict(op.metadata)
        self._write(group, op)
        self._set_deadline(group, terms.deadline_s)
        self._touch(group)
        self._settle(group)
        return "accepted"

    def drop_group(self, op: ops.DropGroup) -> None:
        prompt_uid = op.prompt_uid
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            gone = self._gone(prompt_uid)
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

    # -- trajectories ------------------------------------------------------------------------

    def open_trajectory(self, op: ops.OpenTrajectory) -> ops.SubmitOutcome:
        self._check_owner(op.metadata.get(OWNER), op.trajectory_uid, op.prompt_uid)
        record = self._find(op.trajectory_uid, op.prompt_uid)
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
        group = self.prompt_groups[op.prompt_uid]
        self._write(group, op)
        self._touch(group)
        return outcome

    def resume_trajectory(self, op: ops.ResumeTrajectory) -> ops.Resumed:
        opened = ops.OpenTrajectory(
            op.trajectory_uid, op.prompt_uid, op.attempt, dict(op.metadata), self.name
        )
        outcome = self.open_trajectory(opened)
        record = self.trajectory_index.get(op.trajectory_uid)
        if outcome == "late" or record is None or record.closing is not None:
            return ops.Resumed(outcome, self.name)
        return ops.Resumed(outcome, self.name, self.packed(record))

    def knows(self, trajectory_uid: str, prompt_uid: str) -> Literal["open", "closed"] | None:
        """Whether this trajectory of this prompt is, or was, here."""
        record = self.trajectory_index.get(trajectory_uid)
        found = record if record is not None else self._closed_trajectories.get(trajectory_uid)
        if found is None or found.prompt_uid != prompt_uid:
            return None
        return "open" if record is not None and record.closing is None else "closed"

    def complete_trajectory(self, op: ops.CompleteTrajectory) -> ops.TrajectoryOutcome:
        self._check_owner(op.owner, op.trajectory_uid)
        record = self.trajectory_index.get(op.trajectory_uid)
        if record is not None and record.closing is None:
            self._add_metadata(record, op.metadata)
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, op)
            if record.steps:
                self._complete(record, Closing(record.prompt_uid, "complete", op.reward))
                return "complete"
            self._abort(record, Closing(record.prompt_uid, "complete", op.reward, NO_STEPS))
            self._settle(group)
            return "aborted"
        closing = self._closing(op.trajectory_uid)
        if closing.by == "pool":
            return self._late()
        if closing.by == "abort" or closing.reward != op.reward:
            raise errors.TrajectoryClosedError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be completed with reward {op.reward}. "
                "Complete a trajectory once; set_reward changes its reward until it is leased"
            )
        return "complete" if closing.aborted is None else "aborted"

    def abort_trajectory(self, op: ops.AbortTrajectory) -> ops.TrajectoryOutcome:
        record = self.trajectory_index.get(op.trajectory_uid)
        if record is not None and record.closing is None:
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, op)
            closing = Closing(record.prompt_uid, "abort", None, op.reason, op.will_retry)
            self._abort(record, closing)
            self._settle(group)
            return "aborted"
        closing = self._closing(op.trajectory_uid)
        if closing.by == "pool":
            return self._late()
        if closing.aborted is None or (op.will_retry and not closing.will_retry):
            raise errors.TrajectoryClosedError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be aborted with will_retry={op.will_retry}"
            )
        if record is not None and closing.will_retry and not op.will_retry:
            # The producer gave up on the retry that it had announced.
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, op)
            record.closing = Closing(record.prompt_uid, closing.by, None, closing.aborted)
            group.n_final += 1
            self._settle(group)
        return "aborted"

    # -- people ------------------------------------------------------------------------------

    def set_reward(self, op: ops.SetReward) -> ops.SubmitOutcome:
        self._check_owner(op.owner, op.trajectory_uid)
        record = self.trajectory_index.get(op.trajectory_uid)
        if record is None:
            self._closing(op.trajectory_uid)
            return self._late()
        group = self.prompt_groups[record.prompt_uid]
        if group.frozen or (record.closing is not None and record.closing.aborted is not None):
            return self._late()
        if op.step_index is None:
            record.outcome = op.reward
        elif record.step(op.step_index) is not None:
            record.step_rewards = {**(record.step_rewards or {}), op.step_index: op.reward}
        else:
            raise errors.StepIndexError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} has no step "
                f"{op.step_index}; it has {[step.step_index for step in record.steps]}"
            )
        self._write(group, op)
        if record.is_complete:
            self._notice_score(record)
        self._judge_again(group)
        return "accepted"

    def why_closed(self, op: questions.WhyClosed) -> str:
        closing = self._closing(op.trajectory_uid)
        if closing.is_deleted:
            return "it was deleted"
        if closing.by != "pool" and closing.aborted is not None:
            return f"it was {closing.describe()}"
        if (group := self.prompt_groups.get(closing.prompt_uid)) is not None:
            if group.frozen:
                return "its group was leased by a trainer before"
            return f"it was {closing.describe()}"
        gone = self._closed_groups.get(closing.prompt_uid) or "closed"
        said = {"acked": "its group was trained", f"dropped ({DELETED})": "it was deleted"}
        return said.get(gone, f"its group was {gone}")

    def mark(self, op: ops.Mark) -> Marks:
        marked: GroupRecord | TrajectoryRecord
        if op.trajectory_uid is not None:
            self._check_owner(op.owner, op.trajectory_uid)
            record = self.trajectory_index.get(op.trajectory_uid)
            if record is None:
                self._closing(op.trajectory_uid)
            if record is None or record.is_deleted or self.prompt_groups[record.prompt_uid].frozen:
                raise errors.TrajectoryClosedError(
                    f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was served "
                    "already, deleted, or closed with its group; mark it before"
                )
            marked, group = record, self.prompt_groups[record.prompt_uid]
        else:
            uid = op.prompt_uid or ""
            if uid not in self.prompt_groups:
                raise errors.GroupClosedError(
                    f"group {uid!r} in channel {self.name!r} was {self._gone(uid)}; it cannot be "
                    "marked"
                )
            marked = group = self.prompt_groups[uid]
        marked.marks = marked.marks.merged(op.marks)
        group.is_marked = True
        self._tag(group)
        self._write(group, op)
        self._judge_again(group)
        return marked.marks

    def delete(self, op: ops.Delete) -> ops.Deleted:
        """About `AT_ONCE`."""
        if op.tag is not None:
            uids = list(islice(self._tagged.get(op.tag, ()), AT_ONCE + len(self._leased)))
        else:
            record = self.trajectory_index.get(op.trajectory_uid or "")
            uids = [] if record is None else [record.prompt_uid]
        groups = [self.prompt_groups[uid] for uid in uids]
        leased = [group for group in groups if group.prompt_uid in self._leased]
        for group in leased:
            self.retire(GroupRetired(group.prompt_uid, DELETED))
        gone: list[str] = []
        n = 0
        for group in groups:
            if n >= AT_ONCE:
                break
            if group.prompt_uid not in self._leased:
                n += group.size
                gone += [t.trajectory_uid for t in group.trajectories]
                self.retire(GroupRetired(group.prompt_uid, DELETED))
        kept = tuple(t.trajectory_uid for group in leased for t in group.trajectories)
        return ops.Deleted(tuple(gone), kept, n >= AT_ONCE)

    def delete_trajectory(self, op: ops.DeleteTrajectory) -> ops.Deleted:
        uid = op.trajectory_uid
        record = self.trajectory_index.get(uid)
        if record is None or record.is_deleted:
            return ops.Deleted()
        group = self.prompt_groups[record.prompt_uid]
        is_leased = self.is_leased(group.prompt_uid)
        if not self._is_more(group, record):
            self.retire(GroupRetired(group.prompt_uid, DELETED))
        elif uid not in group.leaving:
            deleted = TrajectoryDeleted(group.prompt_uid, uid)
            erasure = None if is_leased else self._erasure(group, uid)  # first, as it may fail
            self._write(group, deleted)
            self.remove(deleted)
            if erasure is not None and group.prompt_uid in self.prompt_groups:
                self._erase(group, erasure)
        return ops.Deleted((), (uid,)) if is_leased else ops.Deleted((uid,))

    def _is_more(self, group: GroupRecord, record: TrajectoryRecord) -> bool:
        """True if another trajectory of the group is open or complete, or is to come."""
        stays = (t for t in group.trajectories if t.trajectory_uid not in group.leaving)
        if any(t is not record and (t.closing is None or t.is_complete) for t in stays):
            return True
        if group.terms is None or group.frozen:
            return False
        return group.terms.n_rollouts > len(group.complete) + group.n_open + group.n_final

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
        tagged = self._tagged.get(DOUBTFUL, ())
        return [uid for uid in tagged if self.prompt_groups[uid].marks.trainable is False]

    def is_declared(self, prompt_uid: str) -> bool:
        """True if a live group of this name was declared here."""
        group = self.prompt_groups.get(prompt_uid)
        return group is not None and group.terms is not None

    # -- inside ------------------------------------------------------------------------------

    def check_group_owner(self, op: ops.OpenGroup) -> None:
        """
        Raises:
            NotOwnerError: the group is here, and has another owner than `op` names.
        """
        self._check_owner(op.metadata.get(OWNER), None, op.prompt_uid)

    def check_owner(self, op: ops.ResumeTrajectory) -> None:
        """
        Raises:
            NotOwnerError: the trajectory is here, and has another owner than `op` names.
        """
        if op.trajectory_uid in self.trajectory_index:
            self._check_owner(op.metadata.get(OWNER), op.trajectory_uid, op.prompt_uid)

    def _check_owner(
        self, owner: str | None, trajectory_uid: str | None, prompt_uid: str = ""
    ) -> None:
        """
        Args:
            owner: who asks; None: one who may do everything.
            trajectory_uid: what it asks for; None, or not here: the group.

        Raises:
            NotOwnerError: that has another owner.
        """
        if owner is None or self.replaying:
            return
        what, group = f"group {prompt_uid!r}", self.prompt_groups.get(prompt_uid)
        metadata: Mapping[str, Any] = {}
        if trajectory_uid is not None and trajectory_uid in self.trajectory_index:
            what = f"trajectory {trajectory_uid!r}"
            metadata = self.trajectory_index[trajectory_uid].metadata
        elif group is not None and group.terms is not None:
            metadata = group.metadata
        elif group is not None and group.trajectories:  # undeclared: whoever came first
            metadata = group.trajectories[0].metadata
        if metadata.get(OWNER) not in (None, owner):
            raise errors.NotOwnerError(f"{what} has another owner; use the key that opened it")

    def _add_metadata(self, record: TrajectoryRecord, metadata: dict[str, Any]) -> None:
        if metadata:
            record.metadata = {**record.metadata, **metadata}

    def _late(self) -> Literal["late"]:
        """What is said of a trajectory after its group went on without it."""
        self.counts.trajectories.late += 1
        self.changed = True
        return "late"


METHODS: Final[Mapping[type, Callable[[Channel, Any], Any]]] = {
    ops.OpenGroup: Channel.open_group,
    ops.OpenTrajectory: Channel.open_trajectory,
    ops.SubmitSteps: Channel.submit_steps,
    ops.AppendStep: Channel.append_step,
    ops.CompleteTrajectory: Channel.complete_trajectory,
    ops.AbortTrajectory: Channel.abort_trajectory,
    ops.DropGroup: Channel.drop_group,
    ops.SetReward: Channel.set_reward,
    ops.Mark: Channel.mark,
    ops.AdvanceVersion: Channel.advance_version,
    questions.DryRunOf: Channel.dry_run,
    questions.WhyClosed: Channel.why_closed,
    questions.WaitAvailable: Channel.available,
    questions.WaitCredit: Channel.credit,
    rows.GroupDue: Channel.close_by_deadline,
    rows.SiblingsAwaited: Channel.end_wait,
    rows.RewardsAwaited: Channel.await_rewards,
    rows.HoldEnded: Channel.end_hold,
    rows.GroupRetired: Channel.retire,
    rows.TrajectoryDeleted: Channel.remove,
    rows.GroupLeased: Channel.begin_lease,
    rows.GroupReturned: Channel.give_back,
}
"""What answers an operation or question that names a channel; and what applies, in a replay, that
which the pool decided by itself."""
