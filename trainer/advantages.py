"""Advantages: from the rewards of a group's trajectories to one number per trajectory.

The trajectory is the unit: its reward is the sum of its step rewards, and its one advantage
holds for every token of every step. Groups may differ in size; each is normalised within itself.
A group of one has no baseline: its trajectory keeps its raw score (verl's convention).
A group whose rewards are all equal carries no signal: exactly 0.

Pure functions of floats in float64. Nothing here knows tokens, tensors or the pool.

Worked example, rewards [1, 0, 0, 1]: mean 0.5, unbiased std 0.577, GRPO advantages ±0.866.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from datapool.types import Group
from trainer.errors import RewardError, UnknownNameError

Estimator: TypeAlias = Callable[[Sequence[float]], list[float]]
"""Rewards of one group's trajectories -> their advantages."""


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def _no_baseline(rewards: Sequence[float]) -> list[float] | None:
    """The advantages of a group that needs no arithmetic: empty, single, or all equal."""
    if len(rewards) <= 1:
        return [float(r) for r in rewards]
    # Rounding leaves equal rewards 1e-17 off their mean; divided by a std as small it is noise.
    return [0.0] * len(rewards) if min(rewards) == max(rewards) else None


def grpo(
    rewards: Sequence[float], *, norm_by_std: bool = True, epsilon: float = 1e-6
) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + ε), std unbiased (n - 1).

    Source: DeepSeekMath, arXiv:2402.03300, eq. 4; ε and the unbiased std as in verl.
    `norm_by_std=False` is Dr.GRPO.
    """
    if (plain := _no_baseline(rewards)) is not None:
        return plain
    centred = _centred(rewards)
    if not norm_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + epsilon) for c in centred]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r): no division by the std, which favours too easy and too hard prompts.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783. The other half of Dr.GRPO is
    the aggregation `trajectory-sum-norm`.
    """
    return grpo(rewards, norm_by_std=False)


def rloo(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i - mean of the others = n/(n-1) · (r_i - mean(r)).

    Source: Back to Basics, arXiv:2402.14740 (leave-one-out baseline, unbiased).
    """
    if (plain := _no_baseline(rewards)) is not None:
        return plain
    n = len(rewards)
    return [c * n / (n - 1) for c in _centred(rewards)]


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
)


def estimator(name: str) -> Estimator:
    """The estimator registered under `name`."""
    if name not in ESTIMATORS:
        raise UnknownNameError(
            f"algorithm.advantage is {name!r}; choose one of {', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]


def step_advantages(groups: Sequence[Group], estimate: Estimator = grpo) -> list[float]:
    """One advantage per step, in the order of `[s for g in groups for s in g.steps]`.

    Raises:
        RewardError: a trajectory has no reward. Missing is not zero, so it cannot be trained on;
            abort it before.
    """
    advantages: list[float] = []
    for group in groups:
        rewards: list[float] = []
        for trajectory in group.trajectories:
            reward = trajectory.reward
            if reward is None or not math.isfinite(reward):
                raise RewardError(
                    f"trajectory {trajectory.trajectory_uid!r} of prompt {group.prompt_uid!r} has "
                    f"reward {reward}; score it or abort it before it is trained on"
                )
            rewards.append(reward)
        for trajectory, advantage in zip(group.trajectories, estimate(rewards), strict=True):
            advantages.extend([advantage] * len(trajectory.steps))
    return advantages
