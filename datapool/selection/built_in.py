"""The orders, filters and batch filters that have names, and what a name stands for."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.selection.groups import Choice, Drop, GroupInfo, Hold, Verdict

ZERO_STD: Final = 1e-6
"""Rewards whose standard deviation is not above this are all equal: slime's threshold. An exact
zero would miss sums that differ in their last bit."""

STALE: Final = "stale"
NOT_TRAINABLE: Final = "not_trainable"
UNSCORED: Final = "unscored"


# -- orders ------------------------------------------------------------------------------------


def fifo(info: GroupInfo) -> float:
    """By readiness; what was handed back first."""
    return float(info.sequence)


def freshest(info: GroupInfo) -> float:
    """The group whose oldest token is newest first. The oldest may wait for ever while fresher
    ones keep coming: bound it with the channel's `max_staleness`."""
    version = info.oldest_version
    return math.inf if version is None else -float(version)


def highest_reward_std(info: GroupInfo) -> float:
    """The group whose rewards spread most first; those that cannot be judged yet come last."""
    std = info.reward_std
    return math.inf if std is None else -std


# -- filters -----------------------------------------------------------------------------------


def zero_variance(info: GroupInfo) -> Verdict | None:
    """Drop a group whose rewards are all equal: its GRPO advantages are all zero.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). As in verl, a group of one is kept:
    whether it teaches anything is up to the advantage estimator. So is a group with an unscored
    trajectory, which cannot be judged yet; put `scored` before this filter to wait for it.
    """
    std = info.reward_std
    if std is None or std > ZERO_STD or not info.is_scored:
        return None
    return Drop("zero_variance")


def scored(info: GroupInfo) -> Verdict | None:
    """Hold a group until every trajectory has a reward (`set_reward`). Not for a run that scores
    what it has leased: such groups would never be served."""
    return None if info.is_scored else Hold(UNSCORED)


@dataclass(frozen=True, slots=True)
class AllCorrect:
    """Drop a group of scored trajectories that all earn `threshold` or more: too easy."""

    threshold: float = 1.0

    def __call__(self, info: GroupInfo) -> Verdict | None:
        too_easy = info.is_scored and min(info.rewards) >= self.threshold
        return Drop("all_correct") if too_easy else None


@dataclass(frozen=True, slots=True)
class AllWrong:
    """Drop a group of scored trajectories that all earn `threshold` or less: too hard."""

    threshold: float = 0.0

    def __call__(self, info: GroupInfo) -> Verdict | None:
        too_hard = info.is_scored and max(info.rewards) <= self.threshold
        return Drop("all_wrong") if too_hard else None


# -- batch filters -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OverSampling:
    """Of `factor` x batch_size candidates, serve those whose rewards spread most; drop the rest.

    slime's over-sampling filter (`sort_by_reward_std`, removed there in 2025-09): it collects
    `over_sampling_batch_size` groups, keeps the best `rollout_batch_size` and discards the others.
    Discarding is the point: kept, the losers would fill the next round's places and nothing new
    would compete. A group that cannot be ranked (unscored, or one trajectory only) comes after
    those that can, fills up the batch if they are too few, and is never dropped.
    """

    factor: float = 2.0

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"{self.factor:g} is out of range, pass a number >= 1")

    def n_candidates(self, batch_size: int) -> int:
        """How many groups compete for a batch."""
        # Rounded first: ceil(1.1 * 100) is 111 in floating point.
        return math.ceil(round(self.factor * batch_size, 6))

    def __call__(self, infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        n = self.n_candidates(batch_size)
        return self.best(infos[:n], batch_size) if len(infos) >= n else Choice()

    def best(self, infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        """The best `batch_size` of all that are given, in the order given."""
        if len(infos) < batch_size:
            return Choice()
        # Stable: the order of equals is the channel's.
        ranked = sorted(infos, key=highest_reward_std)
        chosen = {i.prompt_uid for i in ranked[:batch_size]}
        losers = [i for i in ranked[batch_size:] if i.is_scored and i.reward_std is not None]
        return Choice(
            serve=tuple(i.prompt_uid for i in infos if i.prompt_uid in chosen),
            drop={i.prompt_uid: "over_sampled" for i in losers},
        )


# -- names to functions ------------------------------------------------------------------------

Rules: TypeAlias = Mapping[str, Callable[..., Any] | type | str]
"""By name: a function; a class, whose instances are made from a number in brackets; or the dotted
path of an adapter, which makes a rule of the function whose path is in brackets. That one lies in
another room, of which this package imports nothing: it is imported when a configuration names it.
"""

ORDERS: Final[Rules] = {
    "fifo": fifo,
    "freshest": freshest,
    "highest_reward_std": highest_reward_std,
}
FILTERS: Final[Rules] = {
    "zero_variance": zero_variance,
    "scored": scored,
    "all_correct": AllCorrect,
    "all_wrong": AllWrong,
    "slime_filter": "stepwell.trainer.slime_filters:slime_filter",
}
BATCH_FILTERS: Final[Rules] = {
    "over_sampling": OverSampling,
    "slime_buffer_filter": "stepwell.trainer.slime_filters:slime_buffer_filter",
}

_NAME: Final = re.compile(r"([A-Za-z_]\w*)(?:\((.*)\))?")


def build(config_field: str, spec: str, known: Rules) -> Callable[..., Any]:
    """The function that `spec` names: built in, `name(argument)`, or a dotted path."""
    built_in = _NAME.fullmatch(spec.strip())
    remedy = f"use {', '.join(known)} or the dotted path of a function, package.module:name"
    if built_in is not None and built_in[1] not in known:
        near = get_close_matches(built_in[1], known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SelectionError(f"{config_field} is {spec!r}, which is not built in{hint}; {remedy}")
    try:
        return _made(known[built_in[1]], built_in[2] or None) if built_in else _load(spec)
    except Exception as e:  # importing the module of a dotted path runs foreign code
        reason = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
        raise SelectionError(f"{config_field} is {spec!r}: {reason}; {remedy}") from e


def _made(rule: Callable[..., Any] | str, argument: str | None) -> Callable[..., Any]:
    if isinstance(rule, str):
        if argument is None:
            raise ValueError("it needs the dotted path of a function in brackets")
        return _load(rule)(_load(argument))  # type: ignore[no-any-return]
    if isinstance(rule, type):
        number = () if argument is None else (float(argument),)
        if not all(map(math.isfinite, number)):
            raise ValueError(f"{argument} is out of range, pass a finite number")
        return rule(*number)  # type: ignore[no-any-return]
    if argument is not None:
        raise ValueError("it takes no argument")
    return rule


def _load(path: str) -> Callable[..., Any]:
    found = resolve(path.strip())
    if not callable(found):
        raise ValueError(f"{path} is {found!r:.80}, not a function")
    return found  # type: ignore[no-any-return]  # a dotted path names anything
