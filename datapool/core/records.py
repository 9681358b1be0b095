"""What a channel keeps about a trajectory and a group while it lives, and after it is gone.

Mutable counterparts of `types.Trajectory` and `types.Group`, private to the pool: consumers only
ever see the frozen ones. A closed uid leaves a `Closing` behind, in a bounded memory, so that a
late or repeated call is answered as it would have been while the record lived.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from stepwell.datapool.branches import path_to_root
from stepwell.datapool.codec import PackedStep, StoredStep, unpack
from stepwell.datapool.selection import UNMARKED, Marks
from stepwell.datapool.types import Step

SubmitOutcome: TypeAlias = Literal["accepted", "duplicate", "late"]
"""What became of a submitted step: stored; known already (a no-op); or too late to be served."""

TrajectoryOutcome: TypeAlias = Literal["complete", "aborted", "late"]
"""What became of a trajectory; "late": the pool had closed it before the producer did."""

V = TypeVar("V")

OTHER_REASONS = "other"
MAX_REASONS = 64


class Closing(NamedTuple):
    """How a trajectory was closed: kept with its record, then as its tombstone."""

    prompt_uid: str
    by: Literal["complete", "is_last", "abort", "pool"]
    reward: float | None = None
    """Outcome reward given to `complete_trajectory`."""
    aborted: str | None = None
    """The reason, if the trajectory will not be served."""
    will_retry: bool = False

    def describe(self) -> str:
        """For messages."""
        if self.aborted is not None:
            return f"aborted ({self.aborted}{', to be retried' if self.will_retry else ''})"
        by = " by its is_last step" if self.by == "is_last" else ""
        return f"completed{by} with outcome reward {self.reward}"


class Resumed(NamedTuple):
    """A trajectory as a producer finds it that goes on with it."""

    outcome: SubmitOutcome
    """As of `open_trajectory`."""
    channel: str
    """Where it is."""
    is_open: bool
    packed: Sequence[tuple[Any, ...]] = ()
    """The steps of an open one, packed."""
    metadata: Mapping[str, Any] = {}
    """Of an open one."""

    @property
    def steps(self) -> list[Step]:
        """The steps so far of an open trajectory, by `step_index`. Unpacked anew each time."""
        return unpack(list(map(PackedStep._make, self.packed)))


@dataclass(frozen=True, slots=True)
class Deleted:
    """What `delete` did."""

    trajectories: tuple[str, ...] = ()
    """Gone, with all of their groups."""
    leased: tuple[str, ...] = ()
    """Of groups that a consumer has: nobody else gets them, and they go at its ack or nack."""
    more: bool = False
    """Others are left: call it again."""

    def __add__(self, later: Deleted) -> Deleted:
        leased = dict.fromkeys(self.leased + later.leased)
        return Deleted(self.trajectories + later.trajectories, tuple(leased), later.more)


class GroupTerms(NamedTuple):
    """What `open_group` asked for; two declarations of one group agree if these are equal."""

    n_rollouts: int
    min_rollouts: int
    deadline_s: float | None


class Log(Protocol):
    """Where a channel writes down what it did; `journal.Journal` is one."""

    def append(self, channel: str, kind: str, head: bytes, payload: bytes | None = None) -> int:
        """Write a row; its number."""

    def delete(self, rows: Iterable[int]) -> None:
        """Forget rows."""

    def put_state(self, key: str, value: bytes) -> None:
        """Remember the last value of `key`."""

    def scrub(self) -> None:
        """Erase the rows that were forgotten, so that nobody can read them any more."""


@dataclass(slots=True, eq=False)
class TrajectoryRecord:
    """One trajectory of a live group."""

    trajectory_uid: str
    prompt_uid: str
    attempt: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, StoredStep] = field(default_factory=dict)
    """By step_index; emptied when the trajectory is aborted."""
    max_index: int = -1
    last_index: int | None = None
    """Index of the `is_last` step, once it has arrived."""
    closing: Closing | None = None
    """None while open."""
    outcome: float | None = None
    """Outcome reward: from `complete_trajectory`, or a later `set_reward`."""
    step_rewards: dict[int, float] | None = None
    """Rewards of single steps that were set later."""
    marks: Marks = UNMARKED

    @property
    def is_complete(self) -> bool:
        return self.closing is not None and self.closing.aborted is None

    def step_reward(self, index: int) -> float | None:
        """The step's own reward, without the outcome."""
        if self.step_rewards is not None and index in self.step_rewards:
            return self.step_rewards[index]
        return self.steps[index].reward

    def last_reward(self) -> float | None:
        """What the last step is served with: its own reward plus the outcome."""
        own = self.step_reward(self.max_index)
        return own if self.outcome is None else (own or 0.0) + self.outcome

    def reward(self) -> float | None:
        """Sum over the steps and the outcome; None if nothing is scored."""
        scored = [r for i in self.steps if (r := self.step_reward(i)) is not None]
        if self.outcome is not None:
            scored.append(self.outcome)
        return sum(scored) if scored else None

    def chain(self, index: int) -> list[int]:
        """A stored step, the one that it is packed relative to, and so on to the root."""
        return path_to_root(index, lambda i: self.steps[i].base)

    def packed(self, index: int) -> PackedStep:
        """One step as it was submitted. Its payload must be in memory."""
        return self.steps[index].packed(self.trajectory_uid, self.prompt_uid, index)

    def served(self) -> list[PackedStep]:
        """Its steps as a consumer gets them: later rewards applied, `is_last` on the last one."""
        packed = [self.packed(i) for i in sorted(self.steps)]
        if self.step_rewards is not None:
            packed = [p._replace(reward=self.step_reward(p.step_index)) for p in packed]
        last = packed[-1]
        reward = self.last_reward()
        if reward != last.reward or not last.is_last:
            packed[-1] = last._replace(reward=reward, is_last=True)
        return packed


@dataclass(slots=True, eq=False)
class GroupRecord:
    """One live group: open, ready or leased."""

    prompt_uid: str
    opened_at: float
    number: int
    """Counts the groups of the channel: what listings page by."""
    terms: GroupTerms | None = None
    """None while undeclared."""
    metadata: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    trajectories: dict[str, TrajectoryRecord] = field(default_factory=dict)
    complete: list[TrajectoryRecord] = field(default_factory=list)
    """In the order of completion, which is the order they are served in."""
    prompts: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """Prompts of its root steps, each kept once, and the rows of the log that hold them."""
    rows: array[int] = field(default_factory=lambda: array("q"))
    """Rows of the log that are about this group; they go with it."""
    n_open: int = 0
    n_aborted: int = 0
    n_final: int = 0
    """Aborted for good: these use up a rollout of a declared group."""
    oldest_version: int | None = None
    """Smallest policy_version of the complete trajectories."""
    due: bool = False
    """Ready whatever number of trajectories a consumer asks for."""
    frozen: bool = False
    """Was leased once. From then on its content never changes, so a redelivery is the same."""
    delivery: int = 1
    n_asked: int = 0
    """n_rollouts of the fetch that it was leased to."""
    reward_due: float | None = None
    """When it is served without the rewards that it lacks; -inf: that time has come."""
    retired: str | None = None
    """Why it is dropped as soon as its consumer hands it back."""
    marks: Marks = UNMARKED
    is_marked: bool = False
    """It, or one of its trajectories, was marked."""
    tags: frozenset[str] = frozenset()
    """Of these marks."""

    @property
    def size(self) -> int:
        """Itself, its trajectories and their steps."""
        return 1 + sum(1 + len(t.steps) for t in self.trajectories.values())


class Remembered(Generic[V]):
    """The last `limit` keys with a value each; older ones are forgotten."""

    __slots__ = ("_limit", "_values")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Not a plain dict: deleting at its front again and again makes finding the front O(n).
        self._values: OrderedDict[str, V] = OrderedDict()

    def put(self, key: str, value: V) -> None:
        self._values[key] = value
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def get(self, key: str) -> V | None:
        return self._values.get(key)

    def __len__(self) -> int:
        return len(self._values)


class Reasons:
    """Counts by reason. Producers choose the words, so the number of them is bounded."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, reason: str) -> None:
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = OTHER_REASONS
        self.counts[reason] = self.counts.get(reason, 0) + 1
