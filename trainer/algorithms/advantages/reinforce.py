"""REINFORCE++: the batch is the baseline.

    reinforce_plus_plus             A = G, whitened
    reinforce_plus_plus_baseline    A = G - mean of the group, whitened

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from stepwell.trainer.algorithms.advantages.base import Batch, Estimate, Estimator
from stepwell.trainer.algorithms.advantages.group import dr_grpo
from stepwell.trainer.algorithms.options import Options


def plain(b: Batch, options: Options) -> Estimate:
    """The batch's mean and spread alone."""
    return Estimate(b.whitened(b.returns))


def with_baseline(b: Batch, options: Options) -> Estimate:
    """The group's mean, and the batch's spread."""
    return Estimate(b.whitened(b.by_group(dr_grpo)))


PLAIN = Estimator(plain)
WITH_BASELINE = Estimator(with_baseline, group_baseline=True)
