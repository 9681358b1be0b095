"""How a channel stores the steps that it is sent: each once, relative to the one it extends.

    step ──► known already? late? beyond the end? ──► other tokens than its base? ──► stored
              "duplicate", "late", StepIndexError      UnknownBaseError: send it whole

A trajectory begins with its first step, and a group with its first trajectory, unless they were
opened before. Does not own the layout of a step (`codec.py`), nor where its bytes are
(`payloads.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

from stepwell.datapool import errors, ops
from stepwell.datapool.codec import (
    Header,
    PackedStep,
    PackedTrajectory,
    chain_tokens,
    relative,
    unpack,
)
from stepwell.datapool.core.accounting import count_reason
from stepwell.datapool.core.groups import MAX_BYTES, MAX_QUEUE_SIZE
from stepwell.datapool.core.records import Closing, GroupRecord, TrajectoryRecord
from stepwell.datapool.core.rows import GroupClosed, PromptStored, StepsStored
from stepwell.datapool.core.serving import Serving

GROUP_CLOSED = "group_closed"
MAX_STEP_BYTES = 1 << 30
ROW_BYTES = 64 << 10
"""Of steps, after which their row is written: it is read as a whole, also for one of them."""


class Steps(Serving):
    """See the module."""

    # -- steps -------------------------------------------------------------------------------

    def submit_steps(self, op: ops.SubmitSteps) -> list[ops.SubmitOutcome | ops.Refusal]:
        answers: list[ops.SubmitOutcome | ops.Refusal] = []
        for packed in op.trajectories:
            for step in packed.steps:
                try:
                    answers.append(self._counted(packed.trajectory_uid, packed.prompt_uid, step))
                except errors.DataPoolError as e:
                    answers.append(ops.Refusal.of(e))
                    if isinstance(e, errors.PoolFullError):
                        self._count("rejected")
        self._write_steps()
        return answers

    def append_step(self, op: ops.AppendStep) -> ops.SubmitOutcome | ops.Resumed:
        try:
            outcome = self._counted(op.trajectory_uid, op.prompt_uid, op.step)
        except errors.StepConflictError:
            record = self.trajectory_index.get(op.trajectory_uid)
            if record is None or record.closing is not None:
                return "late"
            return ops.Resumed("duplicate", self.name, self.packed(record))
        self._write_steps()
        return outcome

    def _counted(self, uid: str, prompt_uid: str, step: PackedStep) -> ops.SubmitOutcome:
        """Apply one step and count its outcome or refusal; not one after which it comes again."""
        try:
            outcome = self._submit(uid, prompt_uid, step)
        except (errors.UnknownBaseError, errors.PoolFullError):
            raise
        except errors.DataPoolError as e:
            self._count("conflict" if isinstance(e, errors.StepConflictError) else "rejected")
            raise
        self._count(outcome)
        return outcome

    def _count(self, outcome: str) -> None:
        counts = self.counts.steps
        counts.submitted += 1
        setattr(counts, outcome, getattr(counts, outcome) + 1)
        self.changed = True

    def _submit(self, uid: str, prompt_uid: str, step: PackedStep) -> ops.SubmitOutcome:
        """Apply one step. Changes nothing if it contradicts another."""
        if step.is_spilled or ((header := step.header).base_index < 0) is (step.prompt is None):
            raise errors.InvalidStepError(
                f"a step of trajectory {uid!r} in channel {self.name!r} is packed without its "
                f"payload, or with {'no' if step.prompt is None else 'a'} prompt, which its base "
                "contradicts; pack it with codec.pack"
            )
        if (n_bytes := len(step.payload) + len(step.prompt or b"")) > MAX_STEP_BYTES:
            raise errors.InvalidStepError(
                f"step {uid!r}[{header.step_index}] in channel {self.name!r} has {n_bytes} bytes; "
                f"at most {MAX_STEP_BYTES} can be stored, leave something out"
            )
        record = self._find(uid, prompt_uid)
        if record is None:
            if header.base_index >= 0 and not self._is_settled(prompt_uid):
                raise self._unknown_base(uid, header)
            record = self._begin(uid, prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        if record.step(header.step_index) is not None:
            if self._is_same(record, step, header):
                return "duplicate"
            raise errors.StepConflictError(
                f"step {uid!r}[{header.step_index}] is already stored in channel {self.name!r} "
                "with other content; give every call its own step_index"
            )
        if record.closing is not None:
            return "late"
        self._check_index(record, header)
        self._check_base(record, header)
        group = self.prompt_groups[record.prompt_uid]
        self._store(group, record, self._relative(record, step, header))
        self.counts.response_tokens += header.n_response
        if self.config.max_bytes is not None:
            # Last, because it may drop the very group that the step belongs to.
            self._trim(sparing=prompt_uid)
        return "accepted"

    def _store(self, group: GroupRecord, record: TrajectoryRecord, sent: PackedStep) -> None:
        """Keep it, with a prompt that it shares with others; its trajectory may be complete now."""
        prompt, prompt_row = None, None
        if sent.prompt is not None:
            prompt, prompt_row = self._keep_prompt(group, bytes(sent.prompt))
        step = PackedStep(prompt, sent.payload)
        if self._unwritten and self._unwritten[0][0].prompt_uid != group.prompt_uid:
            self._write_steps()
        self._unwritten.append((record, prompt_row, step))
        self._unwritten_bytes += len(step.payload)
        if self._unwritten_bytes >= ROW_BYTES:
            self._write_steps()
        self._put(group, record, step)

    def _put(self, group: GroupRecord, record: TrajectoryRecord, step: PackedStep) -> None:
        record.put(step)
        self.payloads.put(step)
        self.counts.tokens += step.n_tokens
        self.counts.steps.stored += 1
        self._touch(group)
        last = record.last_index
        if last is not None and len(record.steps) == last + 1:
            before = group.complete[-1].closing if group.complete else None
            closing = Closing(record.prompt_uid, "is_last")
            self._complete(record, before if before is not None and before == closing else closing)

    def _keep_prompt(self, group: GroupRecord, prompt: bytes) -> tuple[bytes, int | None]:
        """The group's own copy of a root's prompt, and the row that holds it."""
        kept = group.prompts.get(prompt)
        if kept is None:
            row = self._append(group, PromptStored(group.prompt_uid), prompt)
            kept = prompt, row
            group.prompts[prompt] = kept
            self.payloads.memory_bytes += len(prompt)
        return kept

    def _relative(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> PackedStep:
        """A step that came with a whole prompt, relative to the stored step that it extends."""
        if step.prompt is None:
            return step
        index = header.step_index - 1 if header.parent_index is None else header.parent_index
        stored = record.step(index) if index >= 0 else None
        if stored is None:
            return step
        base = stored.header
        known = step.prompt[: 4 * base.n_tokens]
        # Most that extend nothing are told by the sum; what is as long and has it is looked at.
        if len(known) < 4 * base.n_tokens or crc32(known) != base.crc:
            return step
        chain = self.payloads.loaded(record.chain(index))
        return relative(step, base) if known == chain_tokens(chain) else step

    def _is_same(self, record: TrajectoryRecord, step: PackedStep, header: Header) -> bool:
        """Whether a step has the content of the stored one of its index, however it is packed."""
        self._check_base(record, header)
        ours = self.payloads.read(record.chain(header.step_index))
        if ours[0] == step:
            return True
        theirs = [] if header.base is None else self.payloads.read(record.chain(header.base))
        uids = record.trajectory_uid, record.prompt_uid
        stored_step, *_ = unpack(PackedTrajectory(*uids, ours))
        sent_step, *_ = unpack(PackedTrajectory(*uids, [step, *theirs]))
        return stored_step == sent_step

    def _check_base(self, record: TrajectoryRecord, step: Header) -> None:
        """The tokens that it is relative to are those that are stored."""
        if step.base_index >= 0:
            base = record.step(step.base_index)
            if base is None or base.crc != step.base_crc:
                raise self._unknown_base(record.trajectory_uid, step)

    def _check_index(self, record: TrajectoryRecord, step: Header) -> None:
        last, highest = record.last_index, record.max_index
        if last is not None and step.step_index > last:
            why = f"lies beyond the step marked is_last, {last}"
        elif last is not None and step.is_last:
            why = f"is marked is_last, and so is step {last}; mark one"
        elif step.is_last and highest > step.step_index:
            why = f"is marked is_last, but step {highest} is stored; mark the one with the highest"
            why += " step_index"
        else:
            return
        raise errors.StepIndexError(
            f"step {record.trajectory_uid!r}[{step.step_index}] in channel {self.name!r} {why}"
        )

    def _unknown_base(self, uid: str, step: Header) -> errors.UnknownBaseError:
        return errors.UnknownBaseError(
            f"step {uid!r}[{step.step_index}] in channel {self.name!r} is packed relative to step "
            f"{step.base}, which is not stored, or with other tokens; send it whole"
        )

    # -- after a restart ---------------------------------------------------------------------

    def adopt_prompt(self, stored: PromptStored, prompt: bytes, row: int) -> None:
        """A prompt of before. Its group may begin with the very step that brought it."""
        group = self.prompt_groups.get(stored.prompt_uid) or self._begin_group(stored.prompt_uid)
        group.prompts[prompt] = prompt, row
        group.rows.append(row)
        self.payloads.memory_bytes += len(prompt)

    def adopt(
        self, stored: StepsStored, prompts: Mapping[int, bytes], payload: bytes, row: int
    ) -> None:
        """Steps of before: they were accepted then, so nothing about them is checked.

        Args:
            prompts: of roots, by row.
        """
        prompt_uid = stored.prompt_uid
        group = self.prompt_groups.get(prompt_uid) or self._begin_group(prompt_uid)
        group.rows.append(row)
        steps: list[PackedStep] = []
        at = 0
        for uid, prompt_row, n_bytes in stored.steps:
            record = self.trajectory_index.get(uid) or self._new_trajectory(uid, group)
            prompt = None if prompt_row is None else prompts[prompt_row]
            steps.append(PackedStep(prompt, payload[at : at + n_bytes]))
            self._put(group, record, steps[-1])
            at += n_bytes
        self.payloads.in_row(steps, row)

    def _find(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | Closing | None:
        """The live record, the tombstone, or None; never one of another prompt."""
        record = self.trajectory_index.get(trajectory_uid)
        found = record if record is not None else self._closed_trajectories.get(trajectory_uid)
        if found is not None and found.prompt_uid != prompt_uid:
            raise errors.TrajectoryConflictError(
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
            if not self.replaying and (full := self._full(MAX_QUEUE_SIZE, MAX_BYTES)) is not None:
                raise errors.PoolFullError(
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
