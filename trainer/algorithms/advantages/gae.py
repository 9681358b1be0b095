"""Generalized Advantage Estimation, with a critic (`backends/torch/critic.py`).

    δ_k = r_k + γ V_{k+1} - V_k        A_k = δ_k + γ λ A_{k+1}        0 behind the last

V_k is the value of the state before unit k; units of a trajectory follow each other. A is whitened
then, and the critic is to predict A + V from before that.

Source: arXiv:1506.02438, eq. 16.
"""

from __future__ import annotations

import numpy as np

from stepwell.trainer.algorithms.advantages.base import (
    Array,
    Batch,
    Estimate,
    Estimator,
    Index,
    to_go,
)
from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.errors import ColumnError


def gae(
    rewards: Array, values: Array, trajectory: Index, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Array, Array]:
    """(A, A + V) of every unit, [U] each, before whitening."""
    following = np.append(values[1:], 0.0)
    following[np.append(trajectory[1:] != trajectory[:-1], True)] = 0.0
    advantages = to_go(rewards + gamma * following - values, trajectory, gamma * lam)
    return advantages, advantages + values


def estimate(b: Batch, options: Options) -> Estimate:
    """A critic's values as the baseline."""
    if b.values is None:
        raise ColumnError("gae has no values; compute the critic's before the advantages")
    advantages, targets = gae(b.rewards, b.values, b.trajectory, gamma=b.gamma, lam=b.lam)
    return Estimate(b.whitened(advantages), targets)


GAE = Estimator(estimate, credit="token", critic=True)
