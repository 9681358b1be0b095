"""Losses without a ratio.

gpg   L = -A log π      the plain policy gradient; GPG, arXiv:2504.02546
sft   L = -log π        imitation, whatever the reward
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.policy_losses.base import (
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
)

if TYPE_CHECKING:
    from torch import Tensor


def gpg(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The plain policy gradient."""
    return PolicyTerms(-x["advantages"] * log_probs)


def sft(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The likelihood of what was sampled."""
    return PolicyTerms(-log_probs)


GPG = PolicyLoss(gpg, ("advantages",))
SFT = PolicyLoss(sft, ())
