"""REINFORCE++: the batch is the baseline.

    reinforce_plus_plus             A = G, whitened
    reinforce_plus_plus_baseline    A = G - mean of the group, whitened

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from typing import Any

from stepwell.trainer.algorithms.advantages.base import (
    AdvantageKeys,
    Array,
    Batch,
    Estimate,
    Estimator,
    whiten,
)
from stepwell.trainer.algorithms.advantages.group import dr_grpo


def _over_batch(advantages: Array, b: Batch, keys: AdvantageKeys[Any]) -> Estimate:
    return Estimate(whiten(advantages, b.tokens) if keys.whiten else advantages)


def plain(b: Batch, keys: AdvantageKeys[Any]) -> Estimate:
    """The batch's mean and spread alone."""
    return _over_batch(b.returns, b, keys)


def with_baseline(b: Batch, keys: AdvantageKeys[Any]) -> Estimate:
    """The group's mean, and the batch's spread."""
    return _over_batch(b.by_group(dr_grpo), b, keys)


REINFORCE_PLUS_PLUS = Estimator(plain)
REINFORCE_PLUS_PLUS_BASELINE = Estimator(with_baseline, group_baseline=True)
