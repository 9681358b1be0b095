"""What a channel keeps about a trajectory and a group while it lives, and after it is gone.

Mutable counterparts of `types.Trajectory` and `types.Group`, private to the pool: consumers only
ever see the frozen ones. A closed uid leaves a `Closing` behind, in a bounded memory, so that a
late or repeated call is answered as it would have been while the record lived.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from datapool.types import Step, Trajectory

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


class GroupTerms(NamedTuple):
    """What `open_group` asked for; two declarations of one group agree if these are equal."""

    n_rollouts: int
    min_rollouts: int
    deadline_s: float | None


@dataclass(slots=True, eq=False)
class TrajectoryRecord:
    """One trajectory of a live group."""

    trajectory_uid: str
    prompt_uid: str
    attempt: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    """As submitted, by step_index; emptied when the trajectory is aborted."""
    max_index: int = -1
    last_index: int | None = None
    """Index of the `is_last` step, once it has arrived."""
    n_tokens: int = 0
    closing: Closing | None = None
    """None while open."""
    served: Trajectory | None = None
    """What consumers get; set on completion."""


@dataclass(slots=True, eq=False)
class GroupRecord:
    """One live group: open, ready or leased."""

    prompt_uid: str
    opened_at: float
    terms: GroupTerms | None = None
    """None while undeclared."""
    metadata: dict[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    trajectories: dict[str, TrajectoryRecord] = field(default_factory=dict)
    complete: list[TrajectoryRecord] = field(default_factory=list)
    """In the order of completion, which is the order they are served in."""
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
