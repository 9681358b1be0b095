"""REINFORCE with a running baseline: for groups of one, of which no other rollout tells what reward
was to be expected.

    A = (G - m) / √(s² + 1e-8)        s² = max(mean of (G - m)², mean of v), over tokens

m and v are mean and variance of the source's rewards before this batch; of a source that is new, m
is its mean in this batch and v 0. Divided, not centred again: the mean of a batch of one source
would cancel m. With s² no less than v, a batch whose rewards are all alike, and near m, is not
blown up to size 1.

Source: REINFORCE with a running baseline (Williams 1992, reinforcement comparison), scaled over the
batch as in REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stepwell.trainer.algorithms.advantages.base import (
    WHITEN_EPSILON,
    Array,
    Batch,
    Estimate,
    Estimator,
)
from stepwell.trainer.algorithms.options import Options

WINDOW = 256
"""Trajectories that a baseline remembers: the plain mean up to here, then each new reward counts
1/256, so that the baseline follows the policy."""


class RunningBaseline(NamedTuple):
    """Rewards of one data source lately."""

    n: int = 0
    """Trajectories, at most `WINDOW`."""
    mean: float = 0.0
    variance: float = 0.0

    def followed_by(self, rewards: Array) -> RunningBaseline:
        """Baseline after these rewards: m' = m + (R - m)/n, v' = v + ((R - m)(R - m') - v)/n."""
        n, mean, variance = self
        for reward in map(float, rewards):
            n = min(n + 1, WINDOW)
            before, mean = mean, mean + (reward - mean) / n
            variance += ((reward - before) * (reward - mean) - variance) / n
        return RunningBaseline(n, mean, variance)


def reinforce_running(b: Batch, options: Options) -> Estimate:
    """The mean reward of each data source lately as its baseline."""
    totals = b.totals
    means, variances = np.zeros(len(totals)), np.zeros(len(totals))
    following = dict(b.baselines)
    for source in dict.fromkeys(b.sources):
        own = np.array([s == source for s in b.sources])
        rewards = totals[own]
        before = b.baselines.get(source, RunningBaseline(0, float(rewards.mean())))
        means[own], variances[own] = before.mean, before.variance
        following[source] = b.baselines.get(source, RunningBaseline()).followed_by(rewards)
    advantages = b.returns - means[b.trajectory]
    if b.scaled:
        square = max((b.tokens * x).sum() for x in (advantages**2, variances[b.trajectory]))
        advantages = advantages / math.sqrt(square / max(b.tokens.sum(), 1) + WHITEN_EPSILON)
    mean = sum(following[s].mean for s in b.sources) / len(b.sources)
    return Estimate(advantages, baselines=following, metrics={"advantage/baseline": mean})


REINFORCE_RUNNING = Estimator(reinforce_running)
