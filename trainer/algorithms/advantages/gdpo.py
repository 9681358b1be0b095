"""GDPO: each part of the reward is normalised by itself before they are added.

    A = whiten(Σ_k w_k (r_k - mean) / (std + ε))      moments of each group, as in GRPO

Added first, a part that varies much would drown the others in the group's std. The parts are what
the reward function returned beside the score, by name; without names the reward is the one part.

Source: Group reward-Decoupled Normalization, arXiv:2601.05242, in verl's form.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import model_validator

from stepwell.datapool.types import MAX_REWARD, is_reward
from stepwell.trainer.algorithms.advantages.base import Array, Batch, Estimate, Estimator
from stepwell.trainer.algorithms.advantages.group import grpo
from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.errors import RewardError


class GdpoOptions(Options):
    """The parts of the reward."""

    reward_keys: tuple[str, ...] = ()
    """Keys of the reward function's result, numbers in every one (verl's `gdpo_reward_keys`). They
    are trained in place of the reward: `overlong_reward` is the part of
    `rollout.overlong_buffer`."""
    reward_weights: tuple[float, ...] | None = None
    """w, one for each of `reward_keys`; null = 1."""

    @model_validator(mode="after")
    def _one_each(self) -> GdpoOptions:
        weights = self.reward_weights
        if weights is not None and len(weights) != len(self.reward_keys):
            raise ValueError(
                f"reward_weights has {len(weights)} numbers for {len(self.reward_keys)} "
                "reward_keys; give one for each"
            )
        return self


def gdpo(b: Batch, options: GdpoOptions) -> Estimate:
    """The parts of the reward, each normalised within the group, then the batch's spread."""
    if not options.reward_keys:
        return Estimate(b.whitened(b.by_group(grpo)))
    total = np.zeros_like(b.returns)
    weights = options.reward_weights or (1.0,) * len(options.reward_keys)
    for key, weight in zip(options.reward_keys, weights, strict=True):
        returns = _part(b, key)[b.trajectory]
        total += weight * replace(b, returns=returns).by_group(grpo)
    return Estimate(b.whitened(total))


def _part(b: Batch, key: str) -> Array:
    """The part of each trajectory's reward that is called `key`, [N]."""
    missing = [part for part in b.parts if not is_reward(part.get(key))]
    if missing or not b.parts:
        has = ", ".join(map(repr, missing[0])) if missing else ""
        raise RewardError(
            f"algorithm.adv_options.reward_keys names {key!r}, which is no number within "
            f"±{MAX_REWARD:g} in the reward of {len(missing)} of {len(b.parts)} trajectories (one "
            f"has: {has or 'none'}); return it beside the score, in a dict, for all of them"
        )
    return np.array([float(part[key]) for part in b.parts])


GDPO = Estimator(gdpo, options=GdpoOptions)
