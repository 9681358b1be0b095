"""PPO: the clipped surrogate with separate bounds and dual clip.

    L = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
    L = min(L, -A clip_ratio_c)  where A < 0

Sources: PPO, arXiv:1707.06347 eq. 7; clip-higher: DAPO, arXiv:2503.14476 eq. 10; dual clip:
arXiv:1912.09729 eq. 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.policy_losses.base import (
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    clipped,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor


def ppo(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The clipped surrogate, with bounds of its own above, below and where A < 0."""
    ratio, advantages = ratio_of(log_probs, x), x["advantages"]
    loss, flags = clipped(ratio, advantages, keys)
    if keys.clip_ratio_c is not None:
        negative, bound = advantages < 0, -advantages * keys.clip_ratio_c
        flags["dual_clip_frac"] = negative & (loss > bound)
        loss = loss.minimum(bound).where(negative, loss)
    return PolicyTerms(loss, ratio, flags)


PPO = PolicyLoss(ppo)
