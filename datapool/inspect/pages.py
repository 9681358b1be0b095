"""The items of listings: rows of groups and trajectories, whole trajectories, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from stepwell.datapool.codec import PackedTrajectory
from stepwell.datapool.selection import Marks
from stepwell.datapool.types import TRAIN, Trajectory

T = TypeVar("T")

GroupState: TypeAlias = Literal["open", "ready", "held", "leased"]
TrajectoryState: TypeAlias = Literal["open", "complete", "aborted"]


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of the items, in order."""

    items: tuple[T, ...]
    cursor: str | None
    """Cursor of the next page; None: there is nothing more."""


# -- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A live group. Rewards and versions are those of its complete trajectories."""

    prompt_uid: str
    state: GroupState
    reason: str | None
    """Why it is open, or held."""
    n_rollouts: int | None
    """Rollouts that it was declared with; None if it was not declared."""
    n_complete: int
    n_running: int
    n_aborted: int
    n_steps: int
    """Stored steps, those of running trajectories too."""
    n_tokens: int
    """Their prompts and responses, each counted in full."""
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    newest_version: int | None
    opened_at: float
    """Pool clock, seconds."""
    deadline: float | None
    """Pool clock, seconds."""
    delivery: int
    """1 until it was delivered once and came back."""
    metadata: dict[str, Any]
    marks: Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory of a live group."""

    trajectory_uid: str
    prompt_uid: str
    state: TrajectoryState
    group_state: GroupState
    reason: str | None
    """Why it was aborted."""
    reward: float | None
    """Sum over its steps and the outcome; None if nothing is scored."""
    outcome: float | None
    """The part of it that `set_reward` sets for the whole trajectory."""
    n_steps: int
    n_missing: int
    """Steps that have not arrived, below the highest index that has."""
    n_tokens: int
    """Tokens of its calls, prompts and responses, each call counted in full."""
    n_unique_tokens: int
    """Tokens without those that a step begins with and another one has."""
    oldest_version: int | None
    newest_version: int | None
    attempt: int
    opened_at: float
    """Time at which its group was opened. Pool clock, seconds."""
    closed_at: float | None
    """Time at which it was completed; None: it is open, or aborted."""
    metadata: dict[str, Any]
    marks: Marks
    """Its own; those of its group count for it too."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Indices of the stored steps of a trajectory of a live group."""

    trajectory_uid: str
    prompt_uid: str
    is_complete: bool
    steps: tuple[int, ...]
    """Their `step_index`, in order; none once it is aborted."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The trajectories of a live group, as they came, and which of them are complete."""

    prompt_uid: str
    trajectory_uids: tuple[str, ...]
    complete_trajectories: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTrajectory:
    """A whole trajectory with its tokens, as it goes into a file and comes out of one."""

    trajectory: Trajectory
    channel: str = TRAIN
    state: str = "complete"
    """`complete`; `open` (its steps so far); or `aborted`, which has no steps, hence no row."""
    reason: str | None = None
    """Why it was aborted."""
    group_state: str | None = None
    """`open`, `ready`, `held` or `leased` at that moment; None if it is not from a pool."""
    outcome: float | None = None
    """Outcome reward of an open trajectory, which no step has yet; that of a complete one is in
    the reward of its last step."""
    n_rollouts: int | None = None
    """Rollouts that its group was declared with; None if it was not declared."""
    marks: dict[str, Any] | None = None
    """Curation marks (`selection.Marks.as_dict`); None: nobody has marked it."""
    group_metadata: dict[str, Any] = field(default_factory=dict)
    group_marks: dict[str, Any] | None = None
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG of the pictures of its steps, by digest; only on the way into a file, or out of one."""


@dataclass(frozen=True, slots=True)
class ExportedPage:
    """`Page[ExportedTrajectory]` on its way: packed, so that it is unpacked where it is used."""

    items: tuple[ExportedTrajectory, ...]
    """Each without its steps."""
    packed: tuple[PackedTrajectory, ...]
    cursor: str | None

    def unpack(self) -> Iterator[ExportedTrajectory]:
        """One by one."""
        for head, packed in zip(self.items, self.packed, strict=True):
            yield replace(head, trajectory=packed.unpack())
