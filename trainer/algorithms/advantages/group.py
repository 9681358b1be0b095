"""Estimators whose baseline is the group: GRPO, Dr.GRPO, RLOO, OPO, GPG."""

from __future__ import annotations

import math

import numpy as np

from stepwell.trainer.algorithms.advantages.base import (
    Array,
    Batch,
    Estimate,
    Estimator,
    Returns,
    of_group,
)
from stepwell.trainer.algorithms.options import Options

EPSILON = 1e-6
"""Added to GRPO's std, as verl does."""


def grpo(r: Returns, *, epsilon: float = EPSILON) -> Array:
    """A = (G - mean) / (std + ε), std unbiased (n - 1).

    With several units per trajectory each counts 1/units in both moments, so that a trajectory
    counts once. Source: DeepSeekMath, arXiv:2402.03300, eq. 4; ε and the unbiased std as in verl.
    """
    if r.settled is not None:
        return r.settled
    centred = dr_grpo(r)
    share = 1 / np.bincount(r.trajectory)[r.trajectory]
    std = math.sqrt(float((share * centred**2).sum()) / (r.n - 1))
    return centred / (std + epsilon)


def dr_grpo(r: Returns) -> Array:
    """A = G - mean: no division by the std, which favours too easy and too hard prompts.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783. The other half of Dr.GRPO is
    the aggregation with a constant norm.
    """
    return np.asarray(r.values - r.means.mean()) if r.settled is None else r.settled


def rloo(r: Returns) -> Array:
    """A = G - mean of the other trajectories; with one unit each, n/(n-1) · (G - mean).

    Source: Back to Basics, arXiv:2402.14740 (leave-one-out baseline, unbiased).
    """
    if r.settled is not None:
        return r.settled
    others = (r.means.sum() - r.means) / (r.n - 1)
    return np.asarray(r.values - others[r.trajectory])


def opo(r: Returns) -> Array:
    """A = G - Σ l G / Σ l, l the trained tokens: the variance-optimal baseline, if the squared
    gradient norm grows with the length.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    if r.settled is not None:
        return r.settled
    lengths = r.tokens if r.tokens.any() else np.ones_like(r.tokens)  # nothing of it is trained
    return r.values - float((lengths * r.values).sum() / lengths.sum())


def gpg(b: Batch, options: Options) -> Estimate:
    """A = α (G - mean), α = trajectories / trajectories of non-zero reward (at least 1).

    Source: GPG, arXiv:2504.02546, in verl's form: the paper's α counts groups with a signal.
    """
    scored = int(np.count_nonzero(b.totals))
    return Estimate(b.by_group(dr_grpo) * (len(b.totals) / max(1, scored)))


GRPO = of_group(grpo)
DR_GRPO = of_group(dr_grpo)
RLOO = of_group(rloo)
OPO = of_group(opo)
GPG = Estimator(gpg, group_baseline=True)
