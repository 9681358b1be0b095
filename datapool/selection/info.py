"""The group as rules see it, people's marks included, and the rules' verdicts on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Final, TypeAlias, cast

from stepwell.datapool.errors import InvalidRequestError

# -- what people say ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """People's marks on a group or a trajectory. The default says nothing. `trainable` decides what
    is served; the rest is for people, listings and filters of your own.

    Raises:
        InvalidRequestError: a field is of another type, or `quality` is not finite.
    """

    trainable: bool | None = None
    """False: not served until this changes. None: nobody has said."""
    quality: float | None = None
    """Any finite scale."""
    tags: frozenset[str] = frozenset()
    note: str = ""
    """For people."""
    corrections: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Text that the model should have answered, by `step_index` in digits, or `last`: for SFT,
    pairs."""

    def __post_init__(self) -> None:
        quality, tags = self.quality, cast(Any, self.tags)
        if not isinstance(self.trainable, bool | None):
            raise _malformed("trainable", self.trainable, "True, False, or None for not marked")
        if quality is not None:
            number = isinstance(quality, int | float) and not isinstance(quality, bool)
            if not number or not abs(quality) <= sys.float_info.max:  # nor is NaN
                raise _malformed("quality", quality, "a finite number, or None for not marked")
            object.__setattr__(self, "quality", float(quality))
        if isinstance(tags, str) or not isinstance(tags, Iterable):
            raise _malformed("tags", tags, "a list of strings")
        tags = list(tags)
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise InvalidRequestError(
                    f"tags holds {tag!r:.80}; pass strings that are not empty"
                )
        object.__setattr__(self, "tags", frozenset(tags))
        if not isinstance(self.note, str):
            raise _malformed("note", self.note, "a string")
        items = self.corrections.items() if isinstance(self.corrections, Mapping) else [(0, 0)]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in items):
            raise _malformed("corrections", self.corrections, "a mapping from step to text")

    def merged(self, update: Mapping[str, Any]) -> Marks:
        """These marks with the fields in `update` replaced; None clears one (RFC 7396: so
        `corrections` are replaced one by one). `add_tags` keeps the tags that there are.

        Raises:
            InvalidRequestError: no such field, or a malformed value.
        """
        known = [*(f.name for f in fields(self)), "add_tags"]
        for name in update:
            if name not in known:
                near = get_close_matches(str(name), known, 1, 0.0)[0]
                raise InvalidRequestError(
                    f"marks have no field {name!r} (did you mean {near!r}?); "
                    f"they have {', '.join(known)}"
                )
        values: dict[str, Any] = {
            k: getattr(UNMARKED, k, ()) if v is None else v for k, v in update.items()
        }
        if isinstance(changed := update.get("corrections"), Mapping):
            merged = {**self.corrections, **changed}
            values["corrections"] = {k: v for k, v in merged.items() if v is not None}
        if "add_tags" in values:
            added = Marks(tags=values.pop("add_tags")).tags
            values["tags"] = Marks(tags=values.get("tags", self.tags)).tags | added
        return replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        """JSON values only; `UNMARKED.merged` of it gives the same marks."""
        return asdict(self) | {"tags": sorted(self.tags)}


def _malformed(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r:.80}; pass {wanted}")


UNMARKED: Final = Marks()


# -- what rules see ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """A complete trajectory without its tokens."""

    trajectory_uid: str
    reward: float | None
    """Sum of its step rewards; None if not scored."""
    n_steps: int
    n_tokens: int
    oldest_version: int
    newest_version: int
    """Smallest and largest policy version that generated a token of it."""
    attempt: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = UNMARKED


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A ready group without its tokens. Read-only, `metadata` too: it is the pool's own."""

    prompt_uid: str
    channel: str
    n_rollouts: int | None
    """Rollouts that were asked for; the real size is `len(trajectories)`."""
    trajectories: tuple[TrajectoryInfo, ...]
    """The complete ones, in the order of completion."""
    sequence: int
    """Order of readiness; negative if handed back by a consumer."""
    opened_at: float
    """Pool clock, seconds."""
    delivery: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = UNMARKED

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the scored trajectories only."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    @property
    def is_scored(self) -> bool:
        """True if every trajectory has a reward (and there is one)."""
        return bool(self.trajectories) and all(t.reward is not None for t in self.trajectories)

    @property
    def reward_mean(self) -> float | None:
        """Over the scored trajectories; None if there is none."""
        rewards = self.rewards
        return math.fsum(r / len(rewards) for r in rewards) if rewards else None

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation over the scored trajectories; None for fewer than two,
        because one reward says nothing of how the group spreads. Equal rewards give exactly 0."""
        rewards = self.rewards
        n = len(rewards)
        if n < 2:
            return None
        # Shifted by the first reward: the mean of equal numbers need not be that number exactly.
        shifted = [r - rewards[0] for r in rewards]
        mean = math.fsum(d / n for d in shifted)
        return math.hypot(*(d - mean for d in shifted)) / math.sqrt(n)

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version in the group; None without trajectories."""
        return min((t.oldest_version for t in self.trajectories), default=None)

    @property
    def newest_version(self) -> int | None:
        """Largest policy version in the group; None without trajectories."""
        return max((t.newest_version for t in self.trajectories), default=None)

    @property
    def n_steps(self) -> int:
        return sum(t.n_steps for t in self.trajectories)

    @property
    def n_tokens(self) -> int:
        return sum(t.n_tokens for t in self.trajectories)


# -- what they answer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drop:
    """The group leaves the pool, counted under `reason`, and its credit is free again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The group stays and is not served until its marks or rewards change."""

    reason: str


Verdict: TypeAlias = Drop | Hold
"""Verdict of a filter on a group; None serves it. Keep reasons few: they are counted by name."""


Order: TypeAlias = Callable[[GroupInfo], float]
Filter: TypeAlias = Callable[[GroupInfo], Verdict | None]
