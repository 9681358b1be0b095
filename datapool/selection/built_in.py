"""The orders, filters and batch filters that have names, and the reasons they give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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


def all_correct(info: GroupInfo, threshold: float = 1.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or more: too easy."""
    if info.is_scored and all(r >= threshold for r in info.rewards):
        return Drop("all_correct")
    return None


def all_wrong(info: GroupInfo, threshold: float = 0.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or less: too hard."""
    if info.is_scored and all(r <= threshold for r in info.rewards):
        return Drop("all_wrong")
    return None


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
