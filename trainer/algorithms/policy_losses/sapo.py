"""SAPO: a smooth gate instead of a clip.

    L = -A · 4/τ · sigmoid(τ (r - 1))        τ: tau_positive where A > 0, else tau_negative

At r = 1 the gradient is PPO's. Source: SAPO, arXiv:2511.20347.
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


class SapoOptions(Options):
    """Temperatures of the gate; the higher, the narrower the trust region."""

    tau_positive: float = Field(default=1.0, gt=0)
    """τ where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """τ where A <= 0; above tau_positive, since pushing tokens down is what destabilises."""


def sapo(log_probs: Tensor, x: Columns, keys: LossKeys[SapoOptions]) -> PolicyTerms:
    """A sigmoid of the ratio in place of PPO's clip."""
    ratio, advantages = ratio_of(log_probs, x), x["advantages"]
    positive = advantages.new_tensor(keys.options.tau_positive)
    tau = positive.where(advantages > 0, keys.options.tau_negative)
    return PolicyTerms(-advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau, ratio)


SAPO = PolicyLoss(sapo, options=SapoOptions)
