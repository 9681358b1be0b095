"""Clip-Cov and KL-Cov: the few tokens whose gradient would cost the most entropy are held back.

    cov_t = (A_t - mean A) · (log π_t - mean log π)     means over the mini-batch's trained tokens

    clip_cov   PPO's surrogate without dual clip; no loss on tokens drawn from low < cov < high
    kl_cov     L = -A r, and + kl_coef · |log π - log π_prox| on the tokens of the highest cov

Tokens are selected once per mini-batch, before training, at π_prox, where no ratio is clipped yet:
the same for any micro-batches, where verl selects within each micro-batch anew. The paper takes the
π of each step, which is the same for the first mini-batch of a batch.

Source: The Entropy Mechanism, arXiv:2505.22617.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.algorithms.policy_losses.base import (
    BatchTokens,
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    clipped,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor


class KlCovOptions(Options):
    """Selection of the tokens that are held back, and the weight of their penalty."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens of a mini-batch that is selected; one at the least."""
    kl_coef: float = Field(default=1.0, ge=0)
    """Weight of |log π - log π_prox| on the selected tokens."""


class ClipCovOptions(Options):
    """Selection of the tokens that get no loss."""

    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens of a mini-batch that is selected; one at the least."""
    low: float = 1.0
    """Tokens are drawn among those with low < cov < high."""
    high: float = 5.0
    """See `low`."""

    @model_validator(mode="after")
    def _in_order(self) -> ClipCovOptions:
        if not self.low < self.high:
            raise ValueError(f"low is {self.low}, high {self.high}; low is the smaller")
        return self


def clip_cov(log_probs: Tensor, x: Columns, keys: LossKeys[ClipCovOptions]) -> PolicyTerms:
    """PPO's clipped surrogate, and no loss on the selected tokens."""
    ratio, selected = ratio_of(log_probs, x), x["selected"] != 0
    loss, flags = clipped(ratio, x["advantages"], keys)
    flags["cov_selected_frac"] = selected
    return PolicyTerms(loss.where(~selected, 0.0), ratio, flags)


def kl_cov(log_probs: Tensor, x: Columns, keys: LossKeys[KlCovOptions]) -> PolicyTerms:
    """The plain surrogate, and a KL penalty on the selected tokens."""
    ratio, selected = ratio_of(log_probs, x), x["selected"] != 0
    # Not of the clamped ratio: a token that is far away is pulled back most of all.
    penalty = keys.options.kl_coef * (log_probs - x["prox_log_probs"]).abs()
    loss = -x["advantages"] * ratio + penalty.where(selected, 0.0)
    return PolicyTerms(loss, ratio, {"cov_selected_frac": selected})


def select(tokens: BatchTokens, keys: LossKeys[ClipCovOptions | KlCovOptions]) -> dict[str, Tensor]:
    """The column `selected`: 1 for a token that is held back, else 0. One without weight is not."""
    options, columns = keys.options, tokens.columns
    log_probs, advantages = columns["prox_log_probs"], columns["advantages"]
    trained = tokens.trained & (columns.get("weights", tokens.trained) != 0)
    selected = log_probs.new_zeros(len(log_probs))
    for number in range(int(tokens.mini_batch.max()) + 1):
        here = ((tokens.mini_batch == number) & trained).nonzero().squeeze(-1)
        if not len(here):
            continue
        a, p = advantages[here], log_probs[here]
        cov = (a - a.mean()) * (p - p.mean())
        n = max(1, int(options.share * len(here)))
        if isinstance(options, ClipCovOptions):
            between = ((cov > options.low) & (cov < options.high)).nonzero().squeeze(-1)
            chosen = between[tokens.shuffled(len(between))[:n]]
        else:
            chosen = cov.topk(n).indices
        selected[here[chosen]] = 1.0
    return {"selected": selected}


_with_selection = partial(
    PolicyLoss, columns=("prox_log_probs", "advantages", "selected"), prepare=select
)
CLIP_COV = _with_selection(clip_cov, options=ClipCovOptions)
KL_COV = _with_selection(kl_cov, options=KlCovOptions)
