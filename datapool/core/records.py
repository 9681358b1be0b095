"""The records of a channel: its live trajectories and groups, and the uids of those that are gone.

Mutable counterparts of `types.Trajectory` and `types.Group`, private to the pool: consumers only
ever see copies. A closed uid leaves a `Closing` behind, in a bounded memory, so that a late or
repeated call is answered as it would have been while the record lived.

There are many of them: they hold no reference cycles, so no collector has to walk through them, and
nothing that can be told from the steps. `Records` looks them up. Does not own when a group is ready
(`readiness.py`) nor the order in which groups are served (`orders.py`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec
from sortedcontainers import SortedDict

from stepwell.datapool.codec import Header, PackedStep
from stepwell.datapool.errors import (
    TrajectoryConflictError,
    UnknownGroupError,
    UnknownTrajectoryError,
)
from stepwell.datapool.selection import UNMARKED, Marks, TrajectoryInfo
from stepwell.datapool.types import user_of

V = TypeVar("V")

NO_METADATA: Mapping[str, Any] = MappingProxyType({})
"""One for all that have none."""
_INDEX = attrgetter("step_index")
DELETED: Final = "deleted"
"""Why a trajectory was closed, or a group dropped, whose data somebody wants gone."""
REASON_CHARS = 300
"""Characters of a reason that are counted and remembered: counts are written with every
transaction; tombstones and events stay in memory."""


def short(reason: str) -> str:
    """A reason as far as it is counted and remembered."""
    return reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 1] + "…"


class Closing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The way in which a trajectory was closed: kept with its record, then as its tombstone."""

    prompt_uid: str
    by: Literal["complete", "is_last", "abort", "pool"]
    reward: float | None = None
    """Outcome reward given to `complete_trajectory`."""
    aborted: str | None = None
    """The reason, if the trajectory will not be served."""
    will_retry: bool = False

    @property
    def is_deleted(self) -> bool:
        return self.by == "pool" and self.aborted == DELETED

    def remembered(self) -> Closing:
        """The tombstone of a trajectory that was closed so."""
        if self.aborted is None or self.aborted == (reason := short(self.aborted)):
            return self
        return msgspec.structs.replace(self, aborted=reason)

    def describe(self) -> str:
        """For messages."""
        if self.aborted is not None:
            return f"aborted ({self.aborted}{', to be retried' if self.will_retry else ''})"
        by = " by its is_last step" if self.by == "is_last" else ""
        return f"completed{by} with outcome reward {self.reward}"


class GroupTerms(NamedTuple):
    """The terms of `OpenGroup`; two declarations of one group agree if these are equal."""

    n_rollouts: int
    min_rollouts: int
    deadline_s: float | None


class TrajectoryRecord(msgspec.Struct, eq=False, gc=False):
    """One trajectory of a live group."""

    trajectory_uid: str
    prompt_uid: str
    attempt: int = 0
    metadata: Mapping[str, Any] = NO_METADATA
    """Replaced, never changed."""
    steps: list[PackedStep] = []
    """By step_index, which is their place unless some are missing; none once it is aborted."""
    n_tokens: int = 0
    """Prompt and response tokens of its steps."""
    max_index: int = -1
    """Highest step_index; -1 without steps."""
    last_index: int | None = None
    """Index of the `is_last` step, once it has arrived: nothing lies beyond it."""
    closing: Closing | None = None
    """None while open."""
    closed_at: float = 0.0
    """Pool clock, seconds; of a complete one."""
    outcome: float | None = None
    """Outcome reward: from `complete_trajectory`, or a later `set_reward`."""
    step_rewards: dict[int, float] | None = None
    """Rewards of single steps that were set later."""
    marks: Marks = UNMARKED
    pictures: dict[str, str] | None = None
    """Key of each picture that a row of its steps refers to, by digest; also once it is aborted."""

    @property
    def is_complete(self) -> bool:
        return self.closing is not None and self.closing.aborted is None

    @property
    def is_deleted(self) -> bool:
        return self.closing is not None and self.closing.is_deleted

    @property
    def has_all_steps(self) -> bool:
        """True if its steps up to the one marked `is_last` are stored."""
        return self.last_index is not None and len(self.steps) == self.last_index + 1

    def step(self, index: int) -> PackedStep | None:
        """The step of this index, if it is stored."""
        steps = self.steps
        if index > self.max_index:  # as nearly always
            return None
        if 0 <= index < len(steps) and steps[index].step_index == index:
            return steps[index]
        at = bisect_left(steps, index, key=_INDEX)
        return steps[at] if at < len(steps) and steps[at].step_index == index else None

    def put(self, step: PackedStep, header: Header) -> None:
        """A step that is not stored yet."""
        index = header.step_index
        self.n_tokens += header.n_prompt + header.n_response
        if index > self.max_index:  # as nearly always
            self.steps.append(step)
            self.max_index = index
        else:
            self.steps.insert(bisect_left(self.steps, index, key=_INDEX), step)
        if header.is_last:
            self.last_index = index

    def drop_steps(self) -> None:
        self.steps, self.n_tokens, self.max_index, self.last_index = [], 0, -1, None

    def step_reward(self, index: int) -> float | None:
        """The step's own reward, without the outcome."""
        if self.step_rewards is not None and index in self.step_rewards:
            return self.step_rewards[index]
        step = self.step(index)
        return None if step is None else step.score[1]

    def last_reward(self) -> float | None:
        """Return the reward that the last step is served with: its own reward plus the outcome."""
        own = self.step_reward(self.max_index)
        return own if self.outcome is None else (own or 0.0) + self.outcome

    def reward(self) -> float | None:
        """Sum over the steps and the outcome; None if nothing is scored."""
        late = self.step_rewards or {}
        rewards = [late.get(s.step_index, s.score[1]) if late else s.score[1] for s in self.steps]
        scored = [r for r in (*rewards, self.outcome) if r is not None]
        return sum(scored) if scored else None

    def versions(self) -> tuple[int, int]:
        """Smallest and largest policy version of its steps, of which there is one at least."""
        versions = [step.version for step in self.steps]
        return min(versions), max(versions)

    def info(self) -> TrajectoryInfo:
        """Return the trajectory as orders and filters see it, and as listings show it."""
        oldest, newest = self.versions()
        return TrajectoryInfo(
            trajectory_uid=self.trajectory_uid,
            reward=self.reward(),
            n_steps=len(self.steps),
            n_tokens=self.n_tokens,
            oldest_version=oldest,
            newest_version=newest,
            attempt=self.attempt,
            metadata=self.metadata,
            marks=self.marks,
        )

    def chain(self, index: int) -> list[PackedStep]:
        """A stored step, the one that it is packed relative to, and so on to the root."""
        chain: list[PackedStep] = []
        at: int | None = index
        while at is not None and (step := self.step(at)) is not None:
            chain.append(step)
            at = step.header.base
        return chain

    def as_served(self, steps: list[PackedStep]) -> list[PackedStep]:
        """Copies of its steps, made what a consumer gets: later rewards applied, `is_last` on the
        last one."""
        for at, step in enumerate(steps if self.step_rewards else ()):
            steps[at] = step.served(self.step_reward(step.step_index), False)
        if steps:
            steps[-1] = steps[-1].served(self.last_reward(), True)
        return steps


class Readiness(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stored decision on a group: what time and earlier trajectories made of it, which the
    group as it is now does not tell."""

    ready_for: int = 0
    """An undeclared group: the largest number of trajectories that a consumer may ask for to be
    given it."""
    is_due: bool = False
    """True for a group that is ready whatever number of trajectories a consumer asks for."""
    unscored_since: float | None = None
    """Time at which it was ready first and lacked rewards. Pool clock, seconds."""
    drop_when_returned: str | None = None
    """Reason for which it is dropped as soon as its consumer hands it back."""


OPEN: Final = Readiness()


class GroupRecord(msgspec.Struct, eq=False, gc=False):
    """One live group: open, ready or leased."""

    prompt_uid: str
    opened_at: float
    number: int
    """Counts the groups of the channel: what listings page by."""
    terms: GroupTerms | None = None
    """None while undeclared."""
    metadata: Mapping[str, Any] = NO_METADATA
    deadline: float | None = None
    trajectories: list[TrajectoryRecord] = []
    """In the order they were opened in."""
    complete: list[TrajectoryRecord] = []
    """In the order of completion, which is the order they are served in."""
    prompts: dict[bytes, tuple[bytes, int | None]] = {}
    """Prompts of its root steps, each kept once, and the rows of the log that hold them."""
    rows: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """Rows of the log that are about this group; they go with it."""
    n_bytes: int = 0
    """Bytes of their payloads, those of erased trajectories included."""
    picture_bytes: int = 0
    """Bytes of the pictures that they were the first to refer to."""
    n_open: int = 0
    n_aborted: int = 0
    n_final: int = 0
    """Aborted for good: these use up a rollout of a declared group."""
    oldest_version: int | None = None
    """Smallest policy_version of the complete trajectories."""
    touched_at: float = 0.0
    """Time at which something last came in for it. Pool clock, seconds."""
    completed_at: float = 0.0
    """Time at which a trajectory was last completed. Pool clock, seconds."""
    readiness: Readiness = OPEN
    alarm: float | None = None
    """Time of the next look at it, or an earlier one. Pool clock, seconds."""
    is_leased: bool = False
    delivery: int = 1
    n_asked: int = 0
    """n_rollouts of the fetch that it was leased to."""
    leaving: tuple[str, ...] = ()
    """Trajectories that are deleted as soon as its consumer hands it back."""
    marks: Marks = UNMARKED
    is_marked: bool = False
    """True if it, or one of its trajectories, was marked."""
    tags: frozenset[str] = frozenset()
    """Tags of these marks."""
    users: tuple[str, ...] = ()
    """`users_of` it. No set: the collector would walk through that."""

    @property
    def size(self) -> int:
        """Number of its trajectories and steps, and itself."""
        return 1 + sum(1 + len(t.steps) for t in self.trajectories)

    @property
    def is_frozen(self) -> bool:
        """True once it was leased. From then on its content never changes, so that a redelivery is
        the same, but for trajectories that are deleted."""
        return self.is_leased or self.delivery > 1

    @property
    def least(self) -> int:
        """Complete trajectories without which it is not served."""
        return self.terms.min_rollouts if self.terms else 1

    def note_oldest(self) -> None:
        """Take the oldest version anew: a complete trajectory was taken out."""
        self.oldest_version = min((t.versions()[0] for t in self.complete), default=None)

    def is_ready_for(self, n_rollouts: int) -> bool:
        """Return whether a consumer of so many could have it, were it not held or leased."""
        return self.readiness.is_due or self.readiness.ready_for >= n_rollouts


class Remembered(OrderedDict[str, V], Generic[V]):
    """The last `limit` keys with a value each; older ones are forgotten."""

    # Not a plain dict: deleting at its front again and again makes finding the front O(n).
    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self.popitem(last=False)


def users_of(group: GroupRecord) -> tuple[str, ...]:
    """The users that a group's trajectories are of; of one that has none yet, its own."""
    found = [user_of(record.metadata, group.metadata) for record in group.trajectories]
    return tuple(dict.fromkeys(filter(None, found or [user_of(group.metadata)])))


class Records:
    """The live trajectories and groups of one channel, and the uids of those that are gone.

    Args:
        channel: its name, for messages.
        remembered: how many uids of gone trajectories, and of groups, are known at most.
    """

    def __init__(self, channel: str, remembered: int) -> None:
        self.trajectories: dict[str, TrajectoryRecord] = {}
        """Trajectories of live groups, by uid."""
        self.groups: dict[str, GroupRecord] = {}
        """Live groups (open, ready or leased), by prompt uid."""
        self.by_number: SortedDict[int, GroupRecord] = SortedDict()
        """The same, in the order they were opened in."""
        self.closed_trajectories: Remembered[Closing] = Remembered(remembered)
        self.closed_groups: Remembered[str] = Remembered(remembered)
        """Outcomes of groups that are gone, by prompt uid."""
        self.tagged: dict[str, dict[str, None]] = {}
        """Prompt uids of live groups by the tags of their marks."""
        self.by_user: dict[str, dict[str, None]] = {}
        """… by the users that their trajectories are of."""
        self._channel = channel

    def known(self, trajectory_uid: str) -> TrajectoryRecord | Closing | None:
        """Return the live record, the tombstone, or None."""
        record = self.trajectories.get(trajectory_uid)
        return record if record is not None else self.closed_trajectories.get(trajectory_uid)

    def find(self, trajectory_uid: str, prompt_uid: str) -> TrajectoryRecord | Closing | None:
        """Return what is `known` of a trajectory.

        Raises:
            TrajectoryConflictError: it is of another prompt.
        """
        found: TrajectoryRecord | Closing | None = self.trajectories.get(trajectory_uid)
        if found is None:
            found = self.closed_trajectories.get(trajectory_uid)
        if found is not None and found.prompt_uid != prompt_uid:
            raise TrajectoryConflictError(
                f"trajectory {trajectory_uid!r} in channel {self._channel!r} belongs to prompt "
                f"{found.prompt_uid!r}, not {prompt_uid!r}; use a new trajectory_uid per rollout"
            )
        return found

    def closing(self, trajectory_uid: str) -> Closing:
        """Return how a trajectory that is not open was closed.

        Raises:
            UnknownTrajectoryError: it is open, or unknown.
        """
        found = self.known(trajectory_uid)
        closing = found.closing if isinstance(found, TrajectoryRecord) else found
        if closing is None:
            raise UnknownTrajectoryError(
                f"trajectory {trajectory_uid!r} is unknown in channel {self._channel!r}; "
                "submit a step or call open_trajectory first, in the same channel"
            )
        return closing

    def gone(self, prompt_uid: str) -> str:
        """Return what became of a group that is not live.

        Raises:
            UnknownGroupError: it never was.
        """
        gone = self.closed_groups.get(prompt_uid)
        if gone is None:
            raise UnknownGroupError(
                f"group {prompt_uid!r} is unknown in channel {self._channel!r}; check both names"
            )
        return gone

    def is_settled(self, prompt_uid: str) -> bool:
        """Return whether the group's content can no longer change: gone, or leased before."""
        group = self.groups.get(prompt_uid)
        return group.is_frozen if group else prompt_uid in self.closed_groups

    def group_of(self, record: Any) -> GroupRecord:
        """Return the group that a row of the log is about."""
        uid: str | None = getattr(record, "prompt_uid", None)
        return self.groups[uid or self.trajectories[record.trajectory_uid].prompt_uid]

    def add(self, group: GroupRecord) -> None:
        self.groups[group.prompt_uid] = self.by_number[group.number] = group

    def add_trajectory(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        self.trajectories[record.trajectory_uid] = record
        group.trajectories.append(record)
        if group.users and group.metadata:
            self._add_user(group, user_of(group.metadata))

    def remove(self, group: GroupRecord) -> None:
        for record in group.trajectories:
            del self.trajectories[record.trajectory_uid]
        del self.groups[group.prompt_uid]
        del self.by_number[group.number]
        _move(self.tagged, group.prompt_uid, group.tags, ())
        _move(self.by_user, group.prompt_uid, group.users, ())

    def tag(self, group: GroupRecord) -> None:
        """Note that marks of a group, or of its trajectories, changed."""
        tags = group.marks.tags.union(*(t.marks.tags for t in group.trajectories))
        _move(self.tagged, group.prompt_uid, group.tags, tags)
        group.tags = tags

    def set_group_metadata(self, group: GroupRecord, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of a group, which may name its user."""
        group.metadata = metadata
        self._set_users(group, users_of(group))

    def set_metadata(self, record: TrajectoryRecord, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of a trajectory, which may name its user."""
        group = self.groups[record.prompt_uid]
        old, record.metadata = record.metadata, metadata
        user = user_of(metadata, group.metadata)
        if len(group.users) == 1 and user in group.users:  # as nearly always
            return
        before = user_of(old, group.metadata) if group.users else None
        if before is not None and user != before:  # of whom there may be others
            self._set_users(group, users_of(group))
        else:
            self._add_user(group, user)

    def _add_user(self, group: GroupRecord, user: str | None) -> None:
        if user is not None and user not in group.users:
            self._set_users(group, (*group.users, user))

    def _set_users(self, group: GroupRecord, users: tuple[str, ...]) -> None:
        _move(self.by_user, group.prompt_uid, group.users, users)
        group.users = users


def _move(
    index: dict[str, dict[str, None]],
    prompt_uid: str,
    before: Collection[str],
    after: Collection[str],
) -> None:
    """Move a group in an index from the keys that it had to those that it has."""
    for key in before:
        if key not in after:
            del index[key][prompt_uid]
            if not index[key]:
                del index[key]
    for key in after:
        if key not in before:
            index.setdefault(key, {})[prompt_uid] = None
