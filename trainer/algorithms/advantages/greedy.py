"""ReMax: the reward of one greedy rollout of the prompt is the baseline.

    A = G - reward of the greedy rollout

A group of one has its baseline, unlike elsewhere. verl's is that of credit "step": process rewards
to go, minus the whole greedy reward.

Source: ReMax, arXiv:2310.10505.
"""

from __future__ import annotations

from stepwell.trainer.algorithms.advantages.base import Array, Returns, of_group
from stepwell.trainer.errors import RewardError


def remax(r: Returns) -> Array:
    """The greedy rollout's reward as the baseline."""
    if r.greedy is None:
        raise RewardError("a group has no greedy reward; pass groups through baselined() first")
    return r.values - r.greedy


REMAX = of_group(remax, greedy=True)
