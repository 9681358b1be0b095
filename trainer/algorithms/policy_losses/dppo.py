"""DPPO: a trust region on the divergence of a token's probability in place of its ratio.

    L = -sg(min(r, clip_ratio_c)) · A · log π      where the token may still move, else 0

    dppo_tv   A > 0: π - π_prox <= clip_ratio_high      A <= 0: π_prox - π <= clip_ratio_low
    dppo_kl   the same bounds on KL(π_prox‖π) of (this token, any other), where π went A's way

A ratio punishes rare tokens, whose probability hardly moves, and lets common ones move far. With
`off_policy.method: bypass` π_prox is the rollout's policy, as the paper recommends.

Source: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879 (Binary-TV,
Binary-KL; bounds 0.15 and 0.05; § 5.4: a large clip_ratio_c).
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

EPSILON = 1e-8
"""Added to the probabilities of any other token, as verl does."""


def dppo_tv(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The policy gradient where the token's probability has moved little."""
    moved = log_probs.detach().exp() - x["prox_log_probs"].exp()
    return _within(moved <= keys.clip_ratio_high, -moved <= keys.clip_ratio_low, log_probs, x, keys)


def dppo_kl(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The policy gradient where the token's binary KL is small."""
    new, old = log_probs.detach(), x["prox_log_probs"]
    p, q = new.exp(), old.exp()
    kl = q * (old - new) + (1 - q) * ((1 - q + EPSILON) / (1 - p + EPSILON)).log()
    up = (kl <= keys.clip_ratio_high) | (p <= q)
    down = (kl <= keys.clip_ratio_low) | (p >= q)
    return _within(up, down, log_probs, x, keys)


def _within(
    up: Tensor, down: Tensor, log_probs: Tensor, x: Columns, keys: LossKeys[Any]
) -> PolicyTerms:
    """The loss of the tokens that may go up (A > 0) or down (else) from where they are."""
    advantages = x["advantages"]
    rising = advantages > 0
    live = up.where(rising, down)
    ratio = ratio_of(log_probs, x).detach()
    weight = ratio if keys.clip_ratio_c is None else ratio.clamp(max=keys.clip_ratio_c)
    flags = {
        "clip_frac_high": rising & ~live,
        "clip_frac_low": ~rising & ~live,
        "dual_clip_frac": live & (ratio > weight),
    }
    return PolicyTerms(-advantages * weight * log_probs * live, ratio, flags)


DPPO_TV = PolicyLoss(dppo_tv, clip=(0.15, 0.15), clip_c=20.0)
DPPO_KL = PolicyLoss(dppo_kl, clip=(0.05, 0.05), clip_c=20.0)
