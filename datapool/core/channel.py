"""One channel of the pool: what its producers and people may do, and what is asked of it.

    Channel ──► Serving ──► Limits ──► Groups        each builds on the one to its right

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

from itertools import islice
from typing import Any, Literal

from msgspec.structs import asdict

from stepwell.datapool.codec import (
    PackedStep,
    PackedTrajectory,
    chain_tokens,
    relative,
    unpack,
)
from stepwell.datapool.core.accounting import count_reason
from stepwell.datapool.core.records import Closing, GroupRecord, GroupTerms, TrajectoryRecord
from stepwell.datapool.core.rows import GroupClosed, GroupRetired, PromptStored, StepStored
from stepwell.datapool.core.serving import AT_ONCE, Serving
from stepwell.datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    GroupClosedError,
    GroupConflictError,
    InvalidStepError,
    PoolFullError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownBaseError,
)
from stepwell.datapool.ops import (
    AbortTrajectory,
    CompleteTrajectory,
    Delete,
    Deleted,
    DropGroup,
    Mark,
    OpenGroup,
    OpenTrajectory,
    Refusal,
    Resumed,
    ResumeTrajectory,
    SetReward,
    SubmitOutcome,
    SubmitSteps,
    TrajectoryOutcome,
)
from stepwell.datapool.selection import Marks

NO_STEPS = "no_steps"
GROUP_CLOSED = "group_closed"
DELETED = "deleted"
N_OLDEST_OPEN = 5


class Channel(Serving):
    """The state of one channel."""

    # -- groups ------------------------------------------------------------------------------

    def open_group(self, op: OpenGroup) -> SubmitOutcome:
        prompt_uid, terms = op.prompt_uid, GroupTerms(op.n_rollouts, op.min_rollouts, op.deadline_s)
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
        if self.counts.shut_down:
            raise ChannelShutDownError(
                f"channel {self.name!r} was shut down; group {prompt_uid!r} cannot be opened"
            )
        if group is None:
            if not self.replaying and (full := self._no_credit()) is not None:
                raise PoolFullError(
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

    def drop_group(self, op: DropGroup) -> None:
        prompt_uid = op.prompt_uid
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            gone = self._gone(prompt_uid)
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
        self._drop(group, op.reason)

    # -- trajectories ------------------------------------------------------------------------

    def open_trajectory(self, op: OpenTrajectory) -> SubmitOutcome:
        record = self._find(op.trajectory_uid, op.prompt_uid)
        outcome: SubmitOutcome = "accepted"
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
            if op.attempt <= record.attempt and not op.metadata:
                return outcome
        record.attempt = max(record.attempt, op.attempt)
        self._add_metadata(record, op.metadata)
        group = self.prompt_groups[op.prompt_uid]
        self._write(group, op)
        self._touch(group)
        return outcome

    def resume_trajectory(self, op: ResumeTrajectory) -> Resumed:
        opened = OpenTrajectory(
            op.trajectory_uid, op.prompt_uid, op.attempt, dict(op.metadata), self.name
        )
        outcome = self.open_trajectory(opened)
        record = self.trajectory_index.get(op.trajectory_uid)
        if outcome == "late" or record is None or record.closing is not None:
            return Resumed(outcome, self.name)
        return Resumed(outcome, self.name, self.packed(record))

    def knows(self, trajectory_uid: str, prompt_uid: str) -> Literal["open", "closed"] | None:
        """Whether this trajectory of this prompt is, or was, here."""
        record = self.trajectory_index.get(trajectory_uid)
        found = record if record is not None else self._closed_trajectories.get(trajectory_uid)
        if found is None or found.prompt_uid != prompt_uid:
            return None
        return "open" if record is not None and record.closing is None else "closed"

    def complete_trajectory(self, op: CompleteTrajectory) -> TrajectoryOutcome:
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
            raise TrajectoryClosedError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be completed with reward {op.reward}. "
                "Complete a trajectory once, or put its reward on the step marked is_last"
            )
        return "complete" if closing.aborted is None else "aborted"

    def abort_trajectory(self, op: AbortTrajectory) -> TrajectoryOutcome:
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
            raise TrajectoryClosedError(
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

    # -- steps -------------------------------------------------------------------------------

    def submit_steps(self, op: SubmitSteps) -> list[SubmitOutcome | Refusal]:
        counts = self.counts.steps
        self.changed = True
        answers: list[SubmitOutcome | Refusal] = []
        for packed in op.trajectories:
            for step in packed.steps:
                try:
                    outcome = self._submit(packed.trajectory_uid, packed.prompt_uid, step)
                except DataPoolError as e:
                    answers.append(Refusal.of(e))
                    if isinstance(e, UnknownBaseError):
                        continue  # not an answer yet: it comes again, whole
                    if isinstance(e, StepConflictError):
                        counts.conflict += 1
                    else:
                        counts.rejected += 1
                else:
                    answers.append(outcome)
                    if outcome == "accepted":
                        counts.accepted += 1
                    elif outcome == "duplicate":
                        counts.duplicate += 1
                    else:
                        counts.late += 1
                counts.submitted += 1
        return answers

    def _submit(self, uid: str, prompt_uid: str, step: PackedStep) -> SubmitOutcome:
        """Apply one step. Changes nothing if it contradicts another."""
        if step.is_spilled or (step.base is None) is (step.prompt is None):
            raise InvalidStepError(
                f"{self._name(uid, step)} is packed without its payload, or with base "
                f"{step.base} and {'no' if step.prompt is None else 'a'} prompt; pack it with "
                "codec.pack"
            )
        record = self._find(uid, prompt_uid)
        if record is None:
            if step.base is not None and not self._is_settled(prompt_uid):
                raise self._unknown_base(uid, step)
            record = self._begin(uid, prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        if (stored := record.step(step.step_index)) is not None:
            if self._is_same(record, stored, step):
                return "duplicate"
            raise StepConflictError(
                f"step {uid!r}[{step.step_index}] is already stored in channel {self.name!r} with "
                "other content; give every call its own step_index"
            )
        if record.closing is not None:
            return "late"
        self._check_index(record, step)
        self._check_base(record, step)
        group = self.prompt_groups[record.prompt_uid]
        self._store(group, record, self._relative(record, step))
        if self.config.max_bytes is not None:
            # Last, because it may drop the very group that the step belongs to.
            self._trim(sparing=prompt_uid)
        return "accepted"

    def _store(self, group: GroupRecord, record: TrajectoryRecord, sent: PackedStep) -> None:
        """Keep a copy, which shares its prompt with others; its trajectory may be complete now."""
        prompt, prompt_row = None, None
        if sent.prompt is not None:
            prompt, prompt_row = self._keep_prompt(group, sent.prompt)
        index, base = sent.step_index, sent.base
        step = PackedStep(
            index,
            sent.policy_version,
            sent.reward,
            sent.is_last,
            sent.parent_index,
            base,
            None,
            b"",
        )
        row = StepStored(record.trajectory_uid, record.prompt_uid, prompt_row, step)
        number = self._write(group, row, sent.payload)
        step.prompt, step.payload = prompt, sent.payload
        self._put(group, record, step, number)

    def _put(
        self, group: GroupRecord, record: TrajectoryRecord, step: PackedStep, row: int | None
    ) -> None:
        record.put(step)
        self.payloads.put(step, row)
        self.counts.tokens += step.n_tokens
        self.counts.steps.stored += 1
        self._touch(group)
        last = record.steps[-1]
        if last.is_last and len(record.steps) == last.step_index + 1:
            before = group.complete[-1].closing if group.complete else None
            closing = Closing(record.prompt_uid, "is_last")
            self._complete(record, before if before is not None and before == closing else closing)

    def _keep_prompt(self, group: GroupRecord, prompt: bytes) -> tuple[bytes, int | None]:
        """The group's own copy of a root's prompt, and the row that holds it."""
        kept = group.prompts.get(prompt)
        if kept is None:
            kept = prompt, self._write(group, PromptStored(group.prompt_uid), prompt)
            group.prompts[prompt] = kept
            self.payloads.memory_bytes += len(prompt)
        return kept

    def _relative(self, record: TrajectoryRecord, step: PackedStep) -> PackedStep:
        """A step that came with a whole prompt, relative to the stored step that it extends."""
        if step.prompt is None:
            return step
        base = step.step_index - 1 if step.parent_index is None else step.parent_index
        stored = record.step(base) if base >= 0 else None
        if stored is None or 4 * stored.n_tokens > len(step.prompt):
            return step
        known = chain_tokens(self.payloads.read(record.chain(base)))
        return relative(step, base, stored.header) if step.prompt.startswith(known) else step

    def _is_same(self, record: TrajectoryRecord, stored: PackedStep, step: PackedStep) -> bool:
        """Whether a stored step has the same content as one of its index, however it is packed."""
        self._check_base(record, step)
        ours = self.payloads.read(record.chain(step.step_index))
        if ours[0] == step:
            return True
        theirs = [] if step.base is None else self.payloads.read(record.chain(step.base))
        uids = record.trajectory_uid, record.prompt_uid
        stored_step, *_ = unpack(PackedTrajectory(*uids, ours))
        sent_step, *_ = unpack(PackedTrajectory(*uids, [step, *theirs]))
        return stored_step == sent_step

    def _check_base(self, record: TrajectoryRecord, step: PackedStep) -> None:
        """The tokens that it is relative to are those that are stored."""
        if step.base is not None:
            base = record.step(step.base)
            if base is None or base.header.crc != step.header.base_crc:
                raise self._unknown_base(record.trajectory_uid, step)

    def _check_index(self, record: TrajectoryRecord, step: PackedStep) -> None:
        last = record.last_index
        if last is None and not step.is_last:
            return
        owner = self._name(record.trajectory_uid, step)
        if last is not None and step.step_index > last:
            raise StepIndexError(f"{owner} lies beyond the step marked is_last, {last}")
        if last is not None and step.is_last:
            raise StepIndexError(f"{owner} is marked is_last, and so is step {last}; mark one")
        if step.is_last and record.max_index > step.step_index:
            raise StepIndexError(
                f"{owner} is marked is_last, but step {record.max_index} is stored; "
                "mark the step with the highest step_index"
            )

    def _unknown_base(self, uid: str, step: PackedStep) -> UnknownBaseError:
        return UnknownBaseError(
            f"{self._name(uid, step)} is packed relative to step {step.base}, which is not stored, "
            "or with other tokens; send it whole"
        )

    def _name(self, uid: str, step: PackedStep) -> str:
        return f"step {uid!r}[{step.step_index}] in channel {self.name!r}"

    # -- after a restart ---------------------------------------------------------------------

    def adopt_prompt(self, stored: PromptStored, prompt: bytes, row: int) -> None:
        """A prompt of before. Its group may begin with the very step that brought it."""
        group = self.prompt_groups.get(stored.prompt_uid) or self._begin_group(stored.prompt_uid)
        group.prompts[prompt] = prompt, row
        group.rows.append(row)
        self.payloads.memory_bytes += len(prompt)

    def adopt(self, stored: StepStored, prompt: bytes | None, payload: bytes, row: int) -> None:
        """A step of before: it was accepted then, so nothing about it is checked."""
        prompt_uid, step = stored.prompt_uid, stored.step
        group = self.prompt_groups.get(prompt_uid) or self._begin_group(prompt_uid)
        record = group.trajectories.get(stored.trajectory_uid)
        if record is None:
            record = self._new_trajectory(stored.trajectory_uid, group)
        step.prompt, step.payload = prompt, payload
        group.rows.append(row)
        self._put(group, record, step, row)

    # -- people ------------------------------------------------------------------------------

    def set_reward(self, op: SetReward) -> SubmitOutcome:
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
            raise StepIndexError(
                f"trajectory {op.trajectory_uid!r} in channel {self.name!r} has no step "
                f"{op.step_index}; it has {[step.step_index for step in record.steps]}"
            )
        self._write(group, op)
        if record.is_complete:
            self._notice_score(record)
        self._judge_again(group)
        return "accepted"

    def mark(self, op: Mark) -> Marks:
        marked: GroupRecord | TrajectoryRecord
        if op.trajectory_uid is not None:
            record = self.trajectory_index.get(op.trajectory_uid)
            if record is None:
                self._closing(op.trajectory_uid)
            if record is None or self.prompt_groups[record.prompt_uid].frozen:
                raise TrajectoryClosedError(
                    f"trajectory {op.trajectory_uid!r} in channel {self.name!r} was served "
                    "already, or closed with its group; mark it before"
                )
            marked, group = record, self.prompt_groups[record.prompt_uid]
        else:
            uid = op.prompt_uid or ""
            if uid not in self.prompt_groups:
                raise GroupClosedError(
                    f"group {uid!r} in channel {self.name!r} was {self._gone(uid)}; it cannot be "
                    "marked"
                )
            marked = group = self.prompt_groups[uid]
        marked.marks = marked.marks.merged(op.marks)
        group.is_marked = True
        tags = group.marks.tags.union(*(t.marks.tags for t in group.trajectories.values()))
        self._untag(group, group.tags - tags)
        for tag in tags - group.tags:
            self._tagged.setdefault(tag, {})[group.prompt_uid] = None
        group.tags = tags
        self._write(group, op)
        self._judge_again(group)
        return marked.marks

    def delete(self, op: Delete) -> Deleted:
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
                gone += group.trajectories
                self.retire(GroupRetired(group.prompt_uid, DELETED))
        return Deleted(tuple(gone), tuple(u for g in leased for u in g.trajectories), n >= AT_ONCE)

    # -- what is asked -----------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        oldest_version = self._ready_versions.first()
        counts = self.counts
        oldest = [self.describe(g) for g in islice(self._open.values(), N_OLDEST_OPEN)]
        return {
            "groups": {
                **asdict(counts.groups),
                "open": len(self._open),
                "ready": self.n_ready,
                "held": len(self._held),
                "leased": len(self._leased),
                "drop_reasons": dict(counts.groups.drop_reasons),
            },
            "trajectories": {
                **asdict(counts.trajectories),
                "abort_reasons": dict(counts.trajectories.abort_reasons),
            },
            "steps": asdict(counts.steps),
            "tokens": {"stored": counts.tokens},
            "memory_bytes": self.memory_bytes,
            "ready": self.n_ready - len(self._held),
            "policy_version": counts.version,
            "oldest_policy_version_ready": None if oldest_version is None else oldest_version[0],
            "oldest_open_age_s": oldest[0]["age_s"] if oldest else 0.0,
            "oldest_open": oldest,
            "shut_down": counts.shut_down,
        }

    def describe(self, group: GroupRecord) -> dict[str, Any]:
        """A group and, while it is open, why it is."""
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

    # -- inside ------------------------------------------------------------------------------

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

    def _begin(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | None:
        """A record in its (perhaps new) group; None if the group's content is settled already."""
        if self._is_settled(prompt_uid):
            # Remembered, so that the completion that follows is late too, and not unknown.
            closing = Closing(prompt_uid, "pool", aborted=GROUP_CLOSED)
            self._remember(GroupClosed(prompt_uid, None, {trajectory_uid: closing}))
            self.counts.trajectories.submitted += 1
            self.counts.trajectories.aborted += 1
            count_reason(self.counts.trajectories.abort_reasons, GROUP_CLOSED)
            return None
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            if not self.replaying and (full := self._no_room()) is not None:
                raise PoolFullError(
                    f"channel {self.name!r} {full}; trajectory {trajectory_uid!r} would begin a "
                    f"new group, {prompt_uid!r}: try again once something is leased"
                )
            group = self._begin_group(prompt_uid)
        return self._new_trajectory(trajectory_uid, group)

    def _begin_group(self, prompt_uid: str) -> GroupRecord:
        """An undeclared one."""
        group = self._new_group(prompt_uid)
        self._set_deadline(group, None)
        return group

    def _add_metadata(self, record: TrajectoryRecord, metadata: dict[str, Any]) -> None:
        if metadata:
            record.metadata = {**record.metadata, **metadata}

    def _late(self) -> Literal["late"]:
        """What is said of a trajectory after its group went on without it."""
        self.counts.trajectories.late += 1
        self.changed = True
        return "late"
