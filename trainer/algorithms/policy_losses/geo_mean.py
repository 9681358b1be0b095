"""GMPO: the clipped surrogate of the geometric mean of a response's ratios.

    l_t = sign(A) · min(sign(A) log r_t, sign(A) clip(log r_t, -clip_ratio_low, clip_ratio_high))
    L   = -A exp(mean over the step's trained tokens of l_t)

Each token is clipped by itself, in log space, before the mean: one outlier neither moves the
sequence's ratio far nor silences its other tokens. Every token of a step has the loss of the step,
so that `sequence-mean-token-mean` is the paper's mean over sequences. Needs whole steps in a
micro-batch (`gspo.py`).

Source: Geometric-Mean Policy Optimization, arXiv:2507.20673 eq. 4; the bounds are the paper's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.policy_losses.base import (
    MAX_LOG_RATIO,
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
)
from stepwell.trainer.algorithms.policy_losses.gspo import GSPO, step_columns, step_mean

if TYPE_CHECKING:
    from torch import Tensor


def geo_mean(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The geometric mean of a response's ratios, each clipped by itself."""
    advantages = x["advantages"]
    log_ratio = (log_probs - x["prox_log_probs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bound = log_ratio.clamp(-keys.clip_ratio_low, keys.clip_ratio_high)
    sign = advantages.sign()
    ratio = step_mean(sign * (sign * log_ratio).minimum(sign * bound), x).exp()
    flags = {
        "clip_frac_high": (advantages > 0) & (log_ratio > bound),
        "clip_frac_low": (advantages < 0) & (log_ratio < bound),
    }
    return PolicyTerms(-step_mean(advantages, x) * ratio, ratio, flags)


GEO_MEAN = PolicyLoss(geo_mean, GSPO.columns, clip=(0.4, 0.4), prepare=step_columns, selects=False)
