"""DRO: the policy gradient, held to π_prox by the square of the log-ratio.

    L = -(A log π - ½ beta (log π - log π_prox)²)

Source: Direct Reward Optimisation, arXiv:2405.19107, with the advantage in place of reward - value;
the form is verl's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.algorithms.policy_losses.base import (
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor


class DroOptions(Options):
    """Strength of the hold on the policy."""

    beta: float = Field(default=1.0, gt=0)
    """Weight of ½ (log π - log π_prox)²."""


def dro(log_probs: Tensor, x: Columns, keys: LossKeys[DroOptions]) -> PolicyTerms:
    """The policy gradient with a quadratic penalty on the log-ratio."""
    penalty = keys.options.beta / 2 * (log_probs - x["prox_log_probs"]).square()
    return PolicyTerms(penalty - x["advantages"] * log_probs, ratio_of(log_probs, x).detach())


DRO = PolicyLoss(dro, options=DroOptions)
