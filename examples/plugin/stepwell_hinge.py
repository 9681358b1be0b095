"""A policy loss with a hyper-parameter of its own, in one file.

algorithm.loss: {policy: hinge, options: {margin: 0.1}}
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.algorithms.policy_losses.base import (
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    ratio_of,
)


class HingeOptions(Options):
    """Options of `hinge`: how far the policy goes for a token."""

    margin: float = Field(default=0.2, gt=0)
    """Beyond 1 ± margin, on the side of A, a token earns nothing more."""


def hinge(log_probs: Tensor, x: Columns, keys: LossKeys[HingeOptions]) -> PolicyTerms:
    """L = |A| · max(0, margin - sign(A) (r - 1))."""
    ratio, advantages = ratio_of(log_probs, x), x["advantages"]
    gap = keys.options.margin - advantages.sign() * (ratio - 1)
    return PolicyTerms(advantages.abs() * gap.clamp(min=0), ratio, {"hinge_frac": gap <= 0})


HINGE = PolicyLoss(hinge, options=HingeOptions)
