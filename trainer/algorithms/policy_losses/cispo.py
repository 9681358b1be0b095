"""CISPO: the ratio is a weight, which is clipped; every token keeps a gradient.

    L = -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) · A · log π

With `off_policy.method: bypass` it is REINFORCE under truncated importance sampling.

Source: CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; without a lower bound, up to 5:
arXiv:2510.13786.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.policy_losses.base import (
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor


def cispo(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The policy gradient, weighed by a clipped ratio."""
    ratio = ratio_of(log_probs, x).detach()
    weight = ratio.clamp(1 - keys.clip_ratio_low, 1 + keys.clip_ratio_high)
    flags = {"clip_frac_high": ratio > weight, "clip_frac_low": ratio < weight}
    return PolicyTerms(-weight * x["advantages"] * log_probs, ratio, flags)


CISPO = PolicyLoss(cispo, clip=(1.0, 4.0))
