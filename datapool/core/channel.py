"""One channel of the pool: its trajectories, its groups and the order they are served in.

Life of a trajectory: opened by `open_trajectory` or its first step, closed by
`complete_trajectory`, by an `is_last` step with all steps before it present, by
`abort_trajectory`, or by the pool when its group is served or dropped without it.

Life of a group (`GroupRecord`)::

    open ──enough complete──► ready ──take──► leased ──ack──► acked
      │                        │ ▲              │
      │                        │ └──give_back───┘
      └──────deadline, abort───┴──limits, filters, staleness, drop──► dropped(reason)

A ready group still takes steps and completions of its open trajectories: whatever is complete
when it is first leased is served, and from then on its content is frozen. A ready group can be
*held* (people's marks say so): it stays, and is not served until they say otherwise.

With a log, every change of a live group is a row there, written before anything that follows from
it; when the group is gone, so are its rows. `replay.py` reads them back.

Owns no lease and no clock (`now` is set before each change); knows nothing of other channels.
Every operation is O(log n) or better in whatever is stored.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from sortedcontainers import SortedDict

from stepwell.datapool.codec import PackedGroup, PackedStep, PackedTrajectory, StoredStep, unpack
from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.core.accounting import Counts
from stepwell.datapool.core.heap import KeyedHeap
from stepwell.datapool.core.ready import ReadyOrder
from stepwell.datapool.core.records import (
    Closing,
    Deleted,
    GroupRecord,
    GroupTerms,
    Log,
    Remembered,
    SubmitOutcome,
    TrajectoryOutcome,
    TrajectoryRecord,
)
from stepwell.datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    GroupClosedError,
    GroupConflictError,
    JournalError,
    PoolFullError,
    SelectionError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownBaseError,
    UnknownGroupError,
    UnknownTrajectoryError,
)
from stepwell.datapool.selection import (
    NOT_TRAINABLE,
    STALE,
    UNSCORED,
    Drop,
    DryRun,
    GroupInfo,
    Hold,
    Marks,
    Selection,
    TrajectoryInfo,
    Verdict,
    dry_run,
)

NO_STEPS = "no_steps"
GROUP_SERVED = "group_served"
GROUP_DROPPED = "group_dropped"
GROUP_CLOSED = "group_closed"
DELETED = "deleted"
DEADLINE: Final = "deadline"
IDLE: Final = "idle"
REWARD_WAIT: Final = "reward_wait"
RETENTION: Final = "retention"
Timer: TypeAlias = Literal["deadline", "idle", "reward_wait", "retention"]
"""What a group is due for at some time; the first two and the last are reasons of a drop, too."""
AWAITS_REWARDS: Final = Hold(UNSCORED)
"""What a group is that lacks rewards which may still come; a filter's equal verdict is another
object, and for good."""
TOO_FEW_ROLLOUTS = "too_few_rollouts"
MAX_QUEUE_SIZE = "max_queue_size"
MAX_BYTES = "max_bytes"

N_OLDEST_OPEN = 5
AT_ONCE = 300
"""Steps, trajectories and groups that one change deletes, or drops for their age: 3 ms of work."""

Load: TypeAlias = Callable[[Sequence[int]], Sequence[bytes]]
"""Payloads by row of the log."""
Notice: TypeAlias = Callable[..., None]
"""`(channel, kind, prompt_uid, [trajectory_uid], **data)`: something that people may watch for."""


class Channel:
    """The state of one channel. See the module for the life cycles.

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
        self.trajectory_complete: set[str] = set()
        """Those of them that are complete."""
        self.prompt_groups: dict[str, GroupRecord] = {}
        """Live groups (open, ready or leased), by prompt uid."""
        self.groups_by_number: SortedDict[int, GroupRecord] = SortedDict()
        """The same, in the order they were opened in."""
        self.timers: KeyedHeap[tuple[Timer, str]] = KeyedHeap()
        """When which group is due for what."""
        self.shut_down = False
        self.version = 0
        """The policy version that generation uses now."""
        self.counts = Counts()
        self.memory_bytes = 0
        """Payloads and prompts in memory."""
        self.log: Log | None = None
        """Where changes are written down; None: nowhere."""
        self.load: Load | None = None
        """Reads payloads back that are in the log only."""
        self.changed = False
        """The counts changed since they were last written down."""
        self.replaying = False
        self.selection = Selection(config.selection)
        self._tell = notice
        self._open: OrderedDict[str, GroupRecord] = OrderedDict()
        self._order = ReadyOrder()
        self._ready: OrderedDict[str, GroupRecord] = OrderedDict()
        """Groups that are ready for the channel's own n_rollouts, or held, the oldest first."""
        self._held: dict[str, str] = {}
        """Ready groups that are not served for now, and why."""
        self._withheld: set[str] = set()
        """Undeclared groups that are not ready yet, nor served to consumers of fewer."""
        self._leased: dict[str, GroupRecord] = {}
        self._ready_versions: KeyedHeap[str] = KeyedHeap()
        """Oldest policy version of each ready group."""
        self._closed_trajectories: Remembered[Closing] = Remembered(remembered_uids)
        self._closed_groups: Remembered[str] = Remembered(remembered_uids)
        self._closed_rows: deque[int] = deque()
        self._tagged: dict[str, dict[str, None]] = {}
        """Live groups by the tags of their marks."""
        self._remembered_uids = remembered_uids
        self._retention_s = retention_s
        self.first_version: int | None = None
        self._n_numbers = 0
        self._unwritten: list[StoredStep] = []
        """Steps that came in since the log was last flushed."""

    # -- producers: groups -------------------------------------------------------------------

    def open_group(
        self, prompt_uid: str, terms: GroupTerms, metadata: dict[str, Any]
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
        group.metadata = dict(metadata)
        about = prompt_uid, tuple(terms), group.metadata, self.now, group.number
        self._write(group, "group", *about)
        self._set_deadline(group, terms.deadline_s)
        self._touch(group)
        self._settle(group)
        return "accepted"

    def _no_credit(self, freed: int = 0) -> str | None:
        """Why `open_group` has to wait; None if it would be admitted now, or once so many more
        groups are dropped."""
        limit = self.config.max_outstanding_groups
        if limit is not None and len(self._open) + self.n_ready - len(self._held) - freed >= limit:
            return f"holds max_outstanding_groups={limit} open and ready groups"
        ahead, per_version = self.config.max_ahead_versions, self.config.groups_per_version
        if ahead is not None and per_version is not None:
            versions = self.version - (self.first_version or 0) + 1 + ahead
            started = self.counts.groups.submitted - self.counts.groups.dropped - freed
            if started >= versions * per_version:
                return (
                    f"has started all groups that policy version {self.version} allows "
                    f"(max_ahead_versions={ahead}, groups_per_version={per_version})"
                )
        return self._no_room(freed)

    def _no_room(self, freed: int = 0) -> str | None:
        """Why no group can begin at all, opened or with a first step; None if one can."""
        config = self.config
        if config.overflow != "block":
            return None
        if config.max_queue_size is not None and self.n_ready - freed >= config.max_queue_size:
            return f"holds max_queue_size={config.max_queue_size} ready groups and blocks"
        if config.max_bytes is not None and self.memory_bytes >= config.max_bytes:
            return f"holds {self.memory_bytes} bytes, max_bytes={config.max_bytes}, and blocks"
        return None

    def check_room(self) -> None:
        """Raises PoolFullError if a step of a new group would be refused now."""
        if (full := self._no_room()) is not None:
            raise PoolFullError(f"channel {self.name!r} {full}; try again once something is leased")

    @property
    def n_ready(self) -> int:
        return len(self._ready)

    def drop_group(self, prompt_uid: str, reason: str) -> None:
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            gone = self._closed_groups.get(prompt_uid)
            if gone is None:
                raise self._unknown_group(prompt_uid)
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

    def advance_version(self, version: int) -> None:
        """Generation uses policy `version` from now on; versions never go back."""
        if self.first_version is None:
            # A pool that starts with a later version owes nothing for those before.
            self.first_version = 0 if self.counts.groups.submitted else version
        self.version = max(self.version, version)
        self.changed = True

    # -- producers: trajectories and steps ---------------------------------------------------

    def open_trajectory(
        self, trajectory_uid: str, prompt_uid: str, attempt: int, metadata: dict[str, Any]
    ) -> SubmitOutcome:
        record = self._find(trajectory_uid, prompt_uid)
        outcome: SubmitOutcome = "accepted"
        if record is None:
            record = self._new_trajectory(trajectory_uid, prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        elif record.closing is not None:
            return "duplicate" if record.closing.aborted is None else "late"
        else:
            outcome = "duplicate"
            if attempt <= record.attempt and not metadata:
                return outcome
        record.attempt = max(record.attempt, attempt)
        record.metadata.update(metadata)
        group = self.prompt_groups[prompt_uid]
        about = trajectory_uid, prompt_uid, attempt, metadata, self.now, group.number
        self._write(group, "trajectory", *about)
        self._touch(group)
        return outcome

    def knows(self, trajectory_uid: str, prompt_uid: str) -> Literal["open", "closed"] | None:
        """Whether this trajectory of this prompt is, or was, here."""
        record = self.trajectory_index.get(trajectory_uid)
        found = record if record is not None else self._closed_trajectories.get(trajectory_uid)
        if found is None or found.prompt_uid != prompt_uid:
            return None
        return "open" if record is not None and record.closing is None else "closed"

    def submit(self, step: PackedStep) -> SubmitOutcome:
        """Apply one step. Raises a DataPoolError and changes nothing if it contradicts another."""
        counts = self.counts.steps
        try:
            outcome = self._submit(step)
        except UnknownBaseError:
            raise  # not an answer yet: it comes again, whole
        except StepConflictError:
            counts.submitted += 1
            counts.conflict += 1
            self.changed = True
            raise
        except DataPoolError:
            counts.submitted += 1
            counts.rejected += 1
            self.changed = True
            raise
        counts.submitted += 1
        self.changed = True
        if outcome == "accepted":
            counts.accepted += 1
        elif outcome == "duplicate":
            counts.duplicate += 1
        else:
            counts.late += 1
        return outcome

    def _submit(self, step: PackedStep) -> SubmitOutcome:
        index = step.step_index
        record = self._find(step.trajectory_uid, step.prompt_uid)
        if record is None:
            if step.base is not None and not self._is_settled(step.prompt_uid):
                raise _unknown_base(step)
            record = self._new_trajectory(step.trajectory_uid, step.prompt_uid)
            if record is None:
                return "late"
        elif isinstance(record, Closing):
            return "late"
        if index in record.steps:
            if self._is_stored(record, step):
                return "duplicate"
            raise StepConflictError(
                f"step {step.trajectory_uid!r}[{index}] is already stored in channel "
                f"{self.name!r} with other content; give every call its own step_index"
            )
        if record.closing is not None:
            return "late"
        self._check_index(record, step)
        self._store(record, step)
        if step.is_last:
            record.last_index = index
        if record.last_index is not None and len(record.steps) == record.last_index + 1:
            self._complete(record, Closing(record.prompt_uid, "is_last"))
        if self.config.max_bytes is not None:
            # Last, because it may drop the very group that the step belongs to.
            self._trim(sparing=step.prompt_uid)
        return "accepted"

    def _store(self, record: TrajectoryRecord, step: PackedStep) -> None:
        if step.base is not None and step.base not in record.steps:
            raise _unknown_base(step)
        group = self.prompt_groups[record.prompt_uid]
        step = self._relative(record, step)
        prompt, prompt_row = None, None
        if step.prompt is not None:
            prompt, prompt_row = self._keep_prompt(group, step.prompt)
        stored = StoredStep(step, prompt)
        if self.log is not None:
            head = (*step[:12], prompt_row, self.now, group.number)
            stored.row = self._append(group, "step", head, step.payload)
            self._unwritten.append(stored)
        record.steps[step.step_index] = stored
        record.max_index = max(record.max_index, step.step_index)
        self.memory_bytes += stored.n_bytes
        self.counts.tokens += stored.n_tokens
        self.counts.steps.stored += 1
        self._touch(group)

    def _keep_prompt(self, group: GroupRecord, prompt: bytes) -> tuple[bytes, int]:
        """The group's own copy of a root's prompt, and the row that holds it."""
        kept = group.prompts.get(prompt)
        if kept is None:
            kept = prompt, self._append(group, "prompt", (group.prompt_uid,), prompt)
            group.prompts[prompt] = kept
            self.memory_bytes += len(prompt)
        return kept

    def _relative(self, record: TrajectoryRecord, step: PackedStep) -> PackedStep:
        """A step that came with a whole prompt, relative to the stored step that it extends."""
        if step.prompt is None or self.replaying:
            return step
        base = step.step_index - 1 if step.parent_index is None else step.parent_index
        if base not in record.steps or 4 * record.steps[base].n_tokens > len(step.prompt):
            return step
        known = self._tokens(record, base)
        if not step.prompt.startswith(known):
            return step
        new = step.prompt[len(known) :]
        return step._replace(
            base=base, n_new=len(new) // 4, prompt=None, payload=new + step.payload
        )

    def _tokens(self, record: TrajectoryRecord, index: int) -> bytes:
        """Prompt and response of a stored step; what is on disk is read, and stays there."""
        chain = [record.steps[i] for i in record.chain(index)]
        spilled = self._read_back(chain)
        parts = [(s.payload or b"")[: 4 * (s.n_new + s.n_response)] for s in reversed(chain)]
        for stored in spilled:
            self._forget_payload(stored)
        return b"".join((chain[-1].prompt or b"", *parts))

    def _is_stored(self, record: TrajectoryRecord, step: PackedStep) -> bool:
        """Whether the stored step of this index has the same content, however it is packed."""
        base = step.base
        if base is not None and base not in record.steps:
            raise _unknown_base(step)
        ours = record.chain(step.step_index)
        theirs = [] if base is None else record.chain(base)
        spilled = self._read_back(record.steps[i] for i in {*ours, *theirs})
        stored = [record.packed(i) for i in ours]
        sent = [step, *map(record.packed, theirs)]
        for read in spilled:
            self._forget_payload(read)
        return stored[0] == step or unpack(stored)[0] == unpack(sent)[0]

    def _check_index(self, record: TrajectoryRecord, step: PackedStep) -> None:
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
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, "complete", trajectory_uid, reward, metadata)
            if record.steps:
                self._complete(record, Closing(record.prompt_uid, "complete", reward))
                return "complete"
            self._abort(record, Closing(record.prompt_uid, "complete", reward, NO_STEPS))
            self._settle(group)
            return "aborted"
        closing = self._closing(trajectory_uid)
        if closing.by == "pool":
            return self._late()
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
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, "abort", trajectory_uid, reason, will_retry)
            self._abort(record, Closing(record.prompt_uid, "abort", None, reason, will_retry))
            self._settle(group)
            return "aborted"
        closing = self._closing(trajectory_uid)
        if closing.by == "pool":
            return self._late()
        if closing.aborted is None or (will_retry and not closing.will_retry):
            raise TrajectoryClosedError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} was already "
                f"{closing.describe()}; it cannot be aborted with will_retry={will_retry}"
            )
        if record is not None and closing.will_retry and not will_retry:
            # The producer gave up on the retry that it had announced.
            group = self.prompt_groups[record.prompt_uid]
            self._write(group, "abort", trajectory_uid, reason, will_retry)
            record.closing = closing._replace(will_retry=False)
            group.n_final += 1
            self._settle(group)
        return "aborted"

    def set_reward(
        self, trajectory_uid: str, reward: float, step_index: int | None
    ) -> SubmitOutcome:
        """The outcome reward, or that of one step, from now on; "late" once it was leased."""
        record = self.trajectory_index.get(trajectory_uid)
        if record is None:
            self._closing(trajectory_uid)
            return self._late()
        group = self.prompt_groups[record.prompt_uid]
        if group.frozen or (record.closing is not None and record.closing.aborted is not None):
            return self._late()
        if step_index is None:
            record.outcome = reward
        elif step_index in record.steps:
            record.step_rewards = {**(record.step_rewards or {}), step_index: reward}
        else:
            raise StepIndexError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} has no step {step_index}; "
                f"it has {sorted(record.steps)}"
            )
        self._write(group, "reward", trajectory_uid, reward, step_index)
        if record.is_complete:
            self._notice_score(record)
        self._judge_again(group)
        return "accepted"

    def mark_group(self, prompt_uid: str, marks: dict[str, Any]) -> Marks:
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            gone = self._closed_groups.get(prompt_uid)
            if gone is None:
                raise self._unknown_group(prompt_uid)
            raise GroupClosedError(
                f"group {prompt_uid!r} in channel {self.name!r} was {gone}; it cannot be marked"
            )
        self.put_marks(group, None, group.marks.merged(marks))
        self._write(group, "mark", prompt_uid, None, group.marks)
        self._judge_again(group)
        return group.marks

    def mark_trajectory(self, trajectory_uid: str, marks: dict[str, Any]) -> Marks:
        record = self.trajectory_index.get(trajectory_uid)
        if record is None:
            self._closing(trajectory_uid)
        if record is None or self.prompt_groups[record.prompt_uid].frozen:
            raise TrajectoryClosedError(
                f"trajectory {trajectory_uid!r} in channel {self.name!r} was served already, or "
                "closed with its group; mark it before"
            )
        group = self.prompt_groups[record.prompt_uid]
        self.put_marks(group, record, record.marks.merged(marks))
        self._write(group, "mark", group.prompt_uid, trajectory_uid, record.marks)
        self._judge_again(group)
        return record.marks

    def put_marks(self, group: GroupRecord, record: TrajectoryRecord | None, marks: Marks) -> None:
        """These are the marks of the group, or of one of its trajectories."""
        (group if record is None else record).marks = marks
        group.is_marked = True
        tags = group.marks.tags.union(*(t.marks.tags for t in group.trajectories.values()))
        self._untag(group, group.tags - tags)
        for tag in tags - group.tags:
            self._tagged.setdefault(tag, {})[group.prompt_uid] = None
        group.tags = tags

    def _untag(self, group: GroupRecord, tags: Iterable[str]) -> None:
        for tag in tags:
            del self._tagged[tag][group.prompt_uid]
            if not self._tagged[tag]:
                del self._tagged[tag]

    def delete(self, trajectory_uid: str | None, tag: str | None) -> Deleted:
        """Drop the groups of this trajectory, or with this tag; about `AT_ONCE`."""
        if tag is not None:
            uids = list(islice(self._tagged.get(tag, ()), AT_ONCE + len(self._leased)))
        else:
            record = self.trajectory_index.get(trajectory_uid or "")
            uids = [] if record is None else [record.prompt_uid]
        groups = [self.prompt_groups[uid] for uid in uids]
        leased = [group for group in groups if group.prompt_uid in self._leased]
        for group in leased:
            self._retire(group, DELETED)
        gone: list[str] = []
        n = 0
        for group in groups:
            if n >= AT_ONCE:
                break
            if group.prompt_uid not in self._leased:
                n += group.size
                gone += group.trajectories
                self._retire(group, DELETED)
        return Deleted(tuple(gone), tuple(u for g in leased for u in g.trajectories), n >= AT_ONCE)

    def _retire(self, group: GroupRecord, reason: str) -> None:
        """Drop a group; one that a consumer has, once it is handed back."""
        if group.prompt_uid not in self._leased:
            group.retired = reason
            self._drop(group, reason)
        elif group.retired is None:
            group.retired = reason
            self._write(group, "retire", group.prompt_uid, reason)

    # -- consumers ---------------------------------------------------------------------------

    def n_available(self, n_rollouts: int | None) -> int:
        return self._order.count(n_rollouts or self.config.n_rollouts)

    def choose(self, n_rollouts: int | None, batch_size: int) -> list[str]:
        """The groups that a consumer gets next, if there are `batch_size` of them; else none.
        Drops those on the way that are too old or that a filter objects to."""
        self._drop_stale()
        ready = _Ready(self, n_rollouts or self.config.n_rollouts)
        return list(self.selection.next_batch(ready, batch_size))

    def more_may_come(self, n_dropped: int = 0) -> bool:
        """Whether another group may still become ready, or could after so many drops."""
        return bool(self._open) or not (self.shut_down or self._no_credit(n_dropped))

    def first(self, n_wanted: int, limit: int) -> list[str]:
        """The groups that a consumer who asks for `n_wanted` gets next, at most `limit`."""
        if n_wanted != self.config.n_rollouts:
            self._judge_first(n_wanted, limit)
        return self._order.first(n_wanted, limit)

    def _judge_first(self, n_wanted: int, n_seen: int) -> None:
        """Judge undeclared groups that are ready for this consumer only."""
        while True:
            unjudged = [
                self.prompt_groups[uid]
                for uid in self._order.first(n_wanted, n_seen)
                if uid not in self._ready
            ]
            n_refused = sum(
                not (self._is_fresh(group) and self._judge(group)) for group in unjudged
            )
            if n_refused == 0:
                return

    def take(self, prompt_uids: Sequence[str], n_rollouts: int | None) -> tuple[PackedGroup, ...]:
        """Lease these ready groups. Their open trajectories end here.

        Raises:
            DataPoolError: a payload cannot be read back; nothing is leased.
        """
        groups = [self.prompt_groups[uid] for uid in prompt_uids]
        # Before anything is changed, because it may fail.
        packed = {r.trajectory_uid: self.packed(r) for g in groups for r in g.complete}
        for group in groups:
            excluded = self._excluded(group)
            group.n_asked = n_rollouts or self.config.n_rollouts
            self._write(group, "lease", group.prompt_uid, tuple(excluded), group.n_asked)
            self.begin_lease(group, excluded)
            self._notice("leased", group.prompt_uid, delivery=group.delivery)
        return tuple(
            self._served(g, [packed[r.trajectory_uid] for r in g.complete]) for g in groups
        )

    def leased(self, prompt_uid: str) -> PackedGroup:
        """A leased group as its consumer gets it."""
        group = self._leased[prompt_uid]
        return self._served(group, list(map(self.packed, group.complete)))

    def _served(self, group: GroupRecord, trajectories: list[PackedTrajectory]) -> PackedGroup:
        return PackedGroup(
            group.prompt_uid,
            trajectories,
            group.n_asked if group.terms is None else group.terms.n_rollouts,
            dict(group.metadata),
            group.delivery,
        )

    def begin_lease(self, group: GroupRecord, excluded: Collection[str]) -> None:
        """A consumer has it; the first time, what is served is settled: all complete
        trajectories that are not excluded."""
        self._unqueue(group)
        self._leased[group.prompt_uid] = group
        self.changed = True
        if group.frozen:
            return
        group.frozen = True
        for record in group.trajectories.values():
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_SERVED))
        for uid in excluded:
            record = group.trajectories[uid]
            group.complete.remove(record)
            self.trajectory_complete.discard(uid)
            self._release(record)
            record.closing = Closing(group.prompt_uid, "pool", aborted=NOT_TRAINABLE)
            group.n_aborted += 1
            self.counts.trajectories.aborted += 1
            self.counts.abort_reasons.add(NOT_TRAINABLE)

    def packed(self, record: TrajectoryRecord) -> PackedTrajectory:
        """A trajectory as consumers get it; what is on disk is read, and stays there."""
        spilled = self._read_back(record.steps.values())
        steps = record.served()
        for stored in spilled:
            self._forget_payload(stored)
        return PackedTrajectory(
            record.trajectory_uid, record.prompt_uid, steps, dict(record.metadata), record.attempt
        )

    def ack(self, prompt_uid: str) -> None:
        group = self._leased.pop(prompt_uid)
        self.counts.groups.acked += 1
        self.counts.steps.acked += self._close(group, "acked")
        self.counts.trajectories.acked += len(group.complete)
        self._notice("acked", prompt_uid)

    def give_back(self, prompt_uid: str) -> None:
        """Return a leased group to the front. Call in reverse order for the groups of one lease."""
        group = self._leased.pop(prompt_uid)
        if group.retired is not None:
            self._drop(group, group.retired)
            return
        group.delivery += 1
        group.due = True
        self._write(group, "return", prompt_uid)
        self._order.give_back(prompt_uid)
        self._ready[prompt_uid] = group
        self._ready.move_to_end(prompt_uid, last=False)
        self._note_version(group)
        self._notice("returned", prompt_uid, delivery=group.delivery)
        self._judge(group)
        self._trim()

    # -- time and memory ---------------------------------------------------------------------

    def expire(self) -> None:
        """Do what is due; of what is too old about `AT_ONCE`: nobody waits for thousands."""
        n = 0
        while n < AT_ONCE and (due := self.timers.pop_until(self.now)) is not None:
            timer, group = due[0], self.prompt_groups[due[1]]
            if timer == RETENTION:
                n += group.size
                self._retire(group, RETENTION)
            elif timer == REWARD_WAIT:
                group.reward_due = -math.inf
                self._write(group, "wait", group.prompt_uid, group.reward_due)
                self._judge(group)
            else:
                self.close_by_deadline(group, timer)

    def close_by_deadline(self, group: GroupRecord, reason: str = DEADLINE) -> None:
        """Serve it with what is complete, or drop it."""
        if len(group.complete) >= (group.terms.min_rollouts if group.terms else 1):
            self._write(group, "due", group.prompt_uid)
            self._make_due(group, reason)
        else:
            self._drop(group, reason)

    def written(self, limit: int | None) -> None:
        """The log was flushed: payloads that came since may leave memory, beyond the limits.

        Args:
            limit: bytes that this channel may keep in memory by the pool's account; None: any.
        """
        steps, self._unwritten = self._unwritten, []
        if self.config.overflow == "spill" and self.config.max_bytes is not None:
            limit = min(self.config.max_bytes, self.config.max_bytes if limit is None else limit)
        if limit is None:
            return
        for stored in reversed(steps):
            if self.memory_bytes <= limit:
                return
            if stored.payload is not None and stored.row:
                self._forget_payload(stored)

    def _forget_payload(self, stored: StoredStep) -> None:
        stored.spill()
        self.memory_bytes -= stored.n_bytes

    def load_payload(self, stored: StoredStep) -> bytes:
        """One payload that is on disk; it stays there."""
        if self.load is None:
            raise JournalError(f"row {stored.row} cannot be read: the pool has no journal")
        return self.load([stored.row])[0]

    def _read_back(self, steps: Iterable[StoredStep]) -> list[StoredStep]:
        """Bring payloads into memory; those that were not."""
        spilled = [stored for stored in steps if stored.payload is None]
        if spilled and self.load is not None:
            for stored, payload in zip(
                spilled, self.load([stored.row for stored in spilled]), strict=True
            ):
                stored.payload = payload
                self.memory_bytes += stored.n_bytes
        return spilled

    # -- statistics --------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        oldest_version = self._ready_versions.first()
        counts = self.counts
        return {
            "groups": {
                **asdict(counts.groups),
                "open": len(self._open),
                "ready": self.n_ready,
                "held": len(self._held),
                "leased": len(self._leased),
                "drop_reasons": dict(counts.drop_reasons.counts),
            },
            "trajectories": {
                **asdict(counts.trajectories),
                "complete": len(self.trajectory_complete),
                "abort_reasons": dict(counts.abort_reasons.counts),
            },
            "steps": asdict(counts.steps),
            "tokens": {"stored": counts.tokens},
            "memory_bytes": self.memory_bytes,
            "ready": self.n_ready - len(self._held),
            "policy_version": self.version,
            "oldest_policy_version_ready": None if oldest_version is None else oldest_version[0],
            "oldest_open_age_s": (
                self.now - next(iter(self._open.values())).opened_at if self._open else 0.0
            ),
            "oldest_open": [
                self.describe(group)
                for _, group in zip(range(N_OLDEST_OPEN), self._open.values(), strict=False)
            ],
            "shut_down": self.shut_down,
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

    # -- selection ---------------------------------------------------------------------------

    def info(self, group: GroupRecord) -> GroupInfo:
        """What orders and filters see of a group: its complete trajectories."""
        return GroupInfo(
            prompt_uid=group.prompt_uid,
            channel=self.name,
            n_rollouts=self.config.n_rollouts if group.terms is None else group.terms.n_rollouts,
            trajectories=tuple(map(_trajectory_info, group.complete)),
            sequence=self._order.sequence(group.prompt_uid, self.config.n_rollouts),
            opened_at=group.opened_at,
            delivery=group.delivery,
            metadata=group.metadata,
            marks=group.marks,
        )

    def ready_groups(self) -> Iterable[GroupRecord]:
        """All that are ready or held, the oldest first."""
        return self._ready.values()

    def _judge(self, group: GroupRecord) -> bool:
        """Whether a ready group may be served. Otherwise it is held, or dropped."""
        waits = self.config.reward_wait_s is not None
        if self.replaying or (self.selection.is_trivial and not group.is_marked and not waits):
            return True
        uid = group.prompt_uid
        verdict, key = self.verdict(self.info(group), self.selection)
        if verdict is not AWAITS_REWARDS:
            self._stop_timers(group, REWARD_WAIT)
        elif uid in self._ready and self.config.reward_wait_s is not None:
            if group.reward_due is None:
                group.reward_due = self.now + self.config.reward_wait_s
                self._write(group, "wait", uid, group.reward_due)
            self.timers.set((REWARD_WAIT, uid), group.reward_due)
        if isinstance(verdict, Drop):
            self._drop(group, verdict.reason)
            return False
        if verdict is not None:
            self._order.hold(uid)
            if uid in self._ready:
                self._held[uid] = verdict.reason
            else:
                self._withheld.add(uid)
            return False
        self._order.release(uid)
        self._held.pop(uid, None)
        # Equal keys stand by readiness for the very n that a consumer asks for.
        self._order.rekey(uid, 0.0 if self.config.selection.order == "fifo" else key)
        return True

    def verdict(self, info: GroupInfo, rules: Selection) -> tuple[Verdict | None, float]:
        """What these rules say of a ready group, and its key in the order. Changes nothing."""
        try:
            verdict, key = rules.judge(info), rules.key(info)
        except SelectionError as e:
            # Somebody's function failed; whoever submitted a step cannot help that.
            return Hold(f"selection: {e}"), 0.0
        group = self.prompt_groups[info.prompt_uid]
        served, refusal = rules.gate(info)
        settled = refusal or isinstance(verdict, Drop) or served.is_scored or group.frozen
        if settled or self.config.reward_wait_s is None:
            return verdict, key
        if info.prompt_uid in self._ready and group.reward_due == -math.inf:
            return Drop(UNSCORED) if verdict == AWAITS_REWARDS else verdict, key
        return AWAITS_REWARDS, key

    def dry_run(self, rules: Selection, batch_size: int) -> DryRun:
        """What a lease of `batch_size` groups would be given out of what is ready now."""

        def judge(info: GroupInfo) -> tuple[Verdict | None, float]:
            verdict, key = self.verdict(info, rules)
            stale = self.is_stale(self.prompt_groups[info.prompt_uid])
            return Drop(STALE) if stale else verdict, key

        infos = map(self.info, self._ready.values())
        return dry_run(rules, infos, batch_size, judge=judge, more_may_come=self.more_may_come)

    def _judge_again(self, group: GroupRecord) -> None:
        """Its marks, rewards or trajectories changed."""
        if group.prompt_uid in self._ready:
            self._judge(group)
        elif self._order.holds(group.prompt_uid, 1):
            # Not ready yet: a consumer that wants it with what it has will have it judged.
            self._withheld.discard(group.prompt_uid)
            self._order.release(group.prompt_uid)
            if self.config.selection.order != "fifo" and not self.replaying:
                with contextlib.suppress(SelectionError):
                    self._order.rekey(group.prompt_uid, self.selection.key(self.info(group)))

    def judge_all(self) -> None:
        """After a restart: the limits and filters of today apply to what is there."""
        for group in (*self._ready.values(), *self._open.values()):
            self._judge_again(group)
        self._trim()

    def _excluded(self, group: GroupRecord) -> list[str]:
        """Complete trajectories that marks keep from being served."""
        if group.frozen or (self.selection.is_trivial and not group.is_marked):
            return []
        served, _ = self.selection.gate(self.info(group))
        kept = {t.trajectory_uid for t in served.trajectories}
        return [r.trajectory_uid for r in group.complete if r.trajectory_uid not in kept]

    def _drop_stale(self) -> None:
        while (oldest := self._ready_versions.first()) is not None:
            if self._is_fresh(self.prompt_groups[oldest[1]]):
                return

    def _is_fresh(self, group: GroupRecord) -> bool:
        """Whether its oldest token is young enough. Otherwise it is dropped."""
        if not self.is_stale(group):
            return True
        self._drop(group, STALE, returned=self.config.on_stale == "return")
        return False

    def is_stale(self, group: GroupRecord) -> bool:
        """Whether its oldest token is too old for it to be served."""
        limit, oldest = self.config.max_staleness, group.oldest_version
        return limit is not None and oldest is not None and oldest < self.version - limit

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

    def _unknown_group(self, prompt_uid: str) -> UnknownGroupError:
        return UnknownGroupError(
            f"group {prompt_uid!r} is unknown in channel {self.name!r}; check both names"
        )

    def _late(self) -> Literal["late"]:
        """What is said of a trajectory after its group went on without it."""
        self.counts.trajectories.late += 1
        self.changed = True
        return "late"

    def _is_settled(self, prompt_uid: str) -> bool:
        """Whether the group's content can no longer change: gone, or served before."""
        group = self.prompt_groups.get(prompt_uid)
        return group.frozen if group else self._closed_groups.get(prompt_uid) is not None

    # -- inside: the log ---------------------------------------------------------------------

    def _write(self, group: GroupRecord, kind: str, *head: Any) -> None:
        self.changed = True
        if self.log is not None:
            self._append(group, kind, head)

    def _append(
        self, group: GroupRecord, kind: str, head: tuple[Any, ...], payload: bytes | None = None
    ) -> int:
        if self.log is None:
            return 0
        row = self.log.append(self.name, kind, pickle.dumps(head, protocol=5), payload)
        group.rows.append(row)
        return row

    def _notice(self, kind: str, *uids: str, **data: Any) -> None:
        if self._tell is not None:
            self._tell(self, kind, *uids, **data)

    def _notice_score(self, record: TrajectoryRecord) -> None:
        if (reward := record.reward()) is not None:
            versions = [step.policy_version for step in record.steps.values()]
            scored = {"reward": reward, "oldest": min(versions), "newest": max(versions)}
            self._notice("scored", record.prompt_uid, record.trajectory_uid, **scored)

    # -- inside: births ----------------------------------------------------------------------

    def _new_group(self, prompt_uid: str) -> GroupRecord:
        self._n_numbers += 1
        group = GroupRecord(prompt_uid, self.now, self._n_numbers)
        self.prompt_groups[prompt_uid] = group
        self.groups_by_number[group.number] = group
        self._open[prompt_uid] = group
        if self._retention_s is not None:
            self.timers.set((RETENTION, prompt_uid), self.now + self._retention_s)
        self.counts.groups.submitted += 1
        return group

    def _new_trajectory(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | None:
        """A record in its (perhaps new) group; None if the group's content is settled already."""
        self.changed = True
        if self._is_settled(prompt_uid):
            # Remembered, so that the completion that follows is late too, and not unknown.
            closing = Closing(prompt_uid, "pool", aborted=GROUP_CLOSED)
            self._remember(prompt_uid, None, {trajectory_uid: closing})
            self.counts.trajectories.submitted += 1
            self.counts.trajectories.aborted += 1
            self.counts.abort_reasons.add(GROUP_CLOSED)
            return None
        group = self.prompt_groups.get(prompt_uid)
        if group is None:
            if not self.replaying and (full := self._no_room()) is not None:
                raise PoolFullError(
                    f"channel {self.name!r} {full}; trajectory {trajectory_uid!r} would begin a "
                    f"new group, {prompt_uid!r}: try again once something is leased"
                )
            group = self._new_group(prompt_uid)
            self._set_deadline(group, None)
        self.counts.trajectories.submitted += 1
        record = TrajectoryRecord(trajectory_uid, prompt_uid)
        self.trajectory_index[trajectory_uid] = record
        group.trajectories[trajectory_uid] = record
        group.n_open += 1
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

    # -- inside: trajectories close ----------------------------------------------------------

    def _complete(self, record: TrajectoryRecord, closing: Closing) -> None:
        record.closing = closing
        if closing.reward is not None:
            record.outcome = closing.reward
        self.counts.steps.missing += record.max_index + 1 - len(record.steps)
        self.counts.trajectories.open -= 1
        self.trajectory_complete.add(record.trajectory_uid)
        group = self.prompt_groups[record.prompt_uid]
        group.n_open -= 1
        group.complete.append(record)
        oldest = min(step.policy_version for step in record.steps.values())
        if group.oldest_version is None or oldest < group.oldest_version:
            group.oldest_version = oldest
        self._notice_score(record)
        if group.terms is None and not group.due:
            self._order.reach(group.prompt_uid)
        self._settle(group)

    def _abort(self, record: TrajectoryRecord, closing: Closing) -> None:
        """Close without serving and release the steps. The caller settles the group."""
        self.changed = True
        record.closing = closing
        self._release(record)
        group = self.prompt_groups[record.prompt_uid]
        group.n_open -= 1
        group.n_aborted += 1
        if closing.by != "pool" and not closing.will_retry:
            group.n_final += 1
        self.counts.trajectories.open -= 1
        self.counts.trajectories.aborted += 1
        self.counts.abort_reasons.add(closing.aborted or "")
        self._notice("aborted", record.prompt_uid, record.trajectory_uid, reason=closing.aborted)

    def _release(self, record: TrajectoryRecord) -> None:
        """Its steps are dropped; their rows go with the group's."""
        self.counts.steps.dropped += self._forget_steps(record)
        record.steps = {}

    def _forget_steps(self, record: TrajectoryRecord) -> int:
        n_bytes = n_tokens = 0
        for step in record.steps.values():
            n_tokens += step.n_tokens
            if step.payload is not None:
                n_bytes += step.n_bytes
            step.row = 0  # it may still be among the unwritten, and must not be released again
        self.memory_bytes -= n_bytes
        self.counts.tokens -= n_tokens
        self.counts.steps.stored -= len(record.steps)
        return len(record.steps)

    # -- inside: groups move -----------------------------------------------------------------

    def _settle(self, group: GroupRecord) -> None:
        """Move a group on if a trajectory that just closed, or its new terms, decide it."""
        if group.frozen:
            return
        n_complete = len(group.complete)
        if group.prompt_uid in self._ready:
            self._note_version(group)
            self._judge(group)
        elif group.terms is None:
            if self._order.holds(group.prompt_uid, self.config.n_rollouts):
                self._make_ready(group, "complete")
            else:
                self._judge_again(group)
        elif n_complete >= group.terms.n_rollouts:
            self._make_due(group, "complete")
        elif group.n_open == 0 and n_complete + group.n_final >= group.terms.n_rollouts:
            if n_complete >= group.terms.min_rollouts:
                self._make_due(group, "aborted")
            else:
                self._drop(group, TOO_FEW_ROLLOUTS)

    def _make_due(self, group: GroupRecord, why: str) -> None:
        self._stop_timers(group, DEADLINE, IDLE)
        group.due = True
        if group.prompt_uid in self._ready:
            # It was, for the channel's own n: now it is for any, in the same place.
            self._order.make_due_in_place(group.prompt_uid, self.config.n_rollouts)
            self._judge(group)
            return
        self._order.make_due(group.prompt_uid)
        self._make_ready(group, why)

    def _make_ready(self, group: GroupRecord, why: str) -> None:
        self._open.pop(group.prompt_uid, None)
        self._withheld.discard(group.prompt_uid)
        self._ready[group.prompt_uid] = group
        self._note_version(group)
        self._notice("ready", group.prompt_uid, size=len(group.complete), why=why)
        self._judge(group)
        self._trim()

    def _note_version(self, group: GroupRecord) -> None:
        if group.oldest_version is not None:
            self._ready_versions.set(group.prompt_uid, group.oldest_version)

    def _trim(self, sparing: str = "") -> None:
        """Drop the oldest groups while the channel holds more than it may: ready ones, and where
        none is left and only bytes matter, open ones."""
        config = self.config
        if config.overflow == "block" or self.replaying:
            return
        while config.max_queue_size is not None and self.n_ready > config.max_queue_size:
            self._drop(next(iter(self._ready.values())), MAX_QUEUE_SIZE)
        if config.max_bytes is None or config.overflow == "spill":
            return
        while self.memory_bytes > config.max_bytes:
            others = (g for g in islice(self._open.values(), 2) if g.prompt_uid != sparing)
            oldest = next(iter(self._ready.values()), None) or next(others, None)
            if oldest is None:
                return
            self._drop(oldest, MAX_BYTES)

    def _unready(self, group: GroupRecord) -> None:
        """Out of what is ready."""
        self._order.discard(group.prompt_uid)
        self._ready.pop(group.prompt_uid, None)
        self._held.pop(group.prompt_uid, None)
        self._withheld.discard(group.prompt_uid)
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
        self.counts.groups.dropped += 1
        self.counts.groups.returned += returned
        self.counts.drop_reasons.add(reason)
        self.counts.steps.dropped += self._close(group, f"dropped ({reason})")
        self.counts.trajectories.dropped += len(group.complete)
        self._notice(
            "dropped",
            group.prompt_uid,
            reason=reason,
            returned=returned,
            complete=len(group.complete),
            metadata=group.metadata if returned else {},  # what nobody needs is not kept
        )

    def _close(self, group: GroupRecord, how: str) -> int:
        """Forget the group's content, remember its uids; how many steps that released."""
        n_steps = 0
        closings: dict[str, Closing] = {}
        for uid, record in group.trajectories.items():
            del self.trajectory_index[uid]
            self.trajectory_complete.discard(uid)
            if record.closing is not None:
                closings[uid] = record.closing
            n_steps += self._forget_steps(record)
        self.memory_bytes -= sum(map(len, group.prompts))
        del self.prompt_groups[group.prompt_uid]
        del self.groups_by_number[group.number]
        self._untag(group, group.tags)
        self._stop_timers(group, RETENTION)
        if self.log is not None:
            self.log.delete(group.rows)
            if group.retired is not None:
                self.log.scrub()
        self._remember(group.prompt_uid, how, closings)
        return n_steps

    def _remember(self, prompt_uid: str, how: str | None, closings: dict[str, Closing]) -> None:
        """Leave behind how a group and its trajectories were closed."""
        self.changed = True
        self.recall(prompt_uid, how, closings)
        if self.log is not None:
            head = (prompt_uid, how, {uid: tuple(c) for uid, c in closings.items()})
            row = self.log.append(self.name, "closed", pickle.dumps(head, protocol=5))
            self.keep_closed_row(row)

    def dump_counts(self) -> bytes:
        """What is counted, and the little else that no row tells."""
        state = (self.counts, self.version, self.first_version, self.shut_down, self._n_numbers)
        return pickle.dumps(state, protocol=5)

    def restore_counts(self, state: bytes) -> None:
        self.counts, self.version, self.first_version, self.shut_down, self._n_numbers = (
            pickle.loads(state)
        )

    def replay_at(self, now: float, number: int) -> None:
        """The next row to be replayed was written at `now`; its group has this number."""
        self.now = now
        self._n_numbers = number - 1  # taken if the row begins the group

    def adopt(self, step: PackedStep, row: int, prompt_row: int | None) -> None:
        """A replayed step is in this row, and its prompt in that one."""
        group = self.prompt_groups[step.prompt_uid]
        stored = group.trajectories[step.trajectory_uid].steps[step.step_index]
        stored.row = row
        self._unwritten.append(stored)
        if stored.prompt is not None and prompt_row is not None:
            _, known = group.prompts[stored.prompt]
            if known == 0:
                group.prompts[stored.prompt] = stored.prompt, prompt_row
                group.rows.append(prompt_row)

    def recall(self, prompt_uid: str, how: str | None, closings: dict[str, Closing]) -> None:
        """Remember closed uids, as far as the memory for them reaches."""
        for uid, closing in closings.items():
            self._closed_trajectories.put(uid, closing)
        if how is not None:
            self._closed_groups.put(prompt_uid, how)

    def keep_closed_row(self, row: int) -> None:
        """A row that tells of closed uids; the oldest ones go beyond `remembered_uids`."""
        self._closed_rows.append(row)
        if self.log is not None and len(self._closed_rows) > self._remembered_uids:
            self.log.delete([self._closed_rows.popleft()])


class _Ready:
    """What a consumer that asks for `n_rollouts` can be served from."""

    def __init__(self, channel: Channel, n_rollouts: int) -> None:
        self._channel = channel
        self._n_rollouts = n_rollouts

    def __len__(self) -> int:
        return self._channel.n_available(self._n_rollouts)

    def first(self, limit: int) -> list[str]:
        return self._channel.first(self._n_rollouts, limit)

    def info(self, prompt_uid: str) -> GroupInfo:
        return self._channel.info(self._channel.prompt_groups[prompt_uid])

    def drop(self, prompt_uid: str, reason: str) -> None:
        self._channel.drop_group(prompt_uid, reason)

    def more_may_come(self) -> bool:
        return self._channel.more_may_come()


def _unknown_base(step: PackedStep) -> UnknownBaseError:
    return UnknownBaseError(
        f"step {step.trajectory_uid!r}[{step.step_index}] is packed relative to step {step.base}, "
        "which is not stored; send it whole"
    )


def _trajectory_info(record: TrajectoryRecord) -> TrajectoryInfo:
    versions = [step.policy_version for step in record.steps.values()]
    return TrajectoryInfo(
        trajectory_uid=record.trajectory_uid,
        reward=record.reward(),
        n_steps=len(record.steps),
        n_tokens=sum(step.n_tokens for step in record.steps.values()),
        oldest_version=min(versions),
        newest_version=max(versions),
        attempt=record.attempt,
        metadata=record.metadata,
        marks=record.marks,
    )
