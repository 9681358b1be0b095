"""Policy losses: pure functions of per-token tensors, and the coefficients that make them a sum.

    loss = Σ_trajectories α Σ_tokens mask · w · policy_loss(r, A) / N

`coefficients` folds mask · α / N into one number per token, from counts taken before the
importance weights w: what is left is a plain sum, so any split into micro-batches and any row
form (a row per step, per branch, a prefix tree) gives the same loss and gradient. One trajectory
is one sample, however many steps its tokens are spread over.

Owns the loss formulas and their diagnostics. Does not own: w (`off_policy.py`), A
(`advantages.py`), rows and micro-batches (`backends/`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from backends.base import LossFn, LossOutput, Mean
from trainer.errors import ColumnError
from trainer.loss_config import LossConfig

__all__ = ["LossConfig", "PolicyLoss", "PolicyTerms", "coefficients", "make_loss_fn", "ppo_clip"]

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is cut off (verl's bound), so that r stays finite in fp32."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per-token results, each of shape [T]."""

    loss: Tensor
    ratio: Tensor
    """π/π_prox."""
    clipped_high: Tensor
    """bool: A > 0 and the ratio is above 1 + clip_high; the gradient is 0."""
    clipped_low: Tensor
    """bool: A < 0 and the ratio is below 1 - clip_low; the gradient is 0."""
    dual_clipped: Tensor
    """bool: A < 0 and the ratio is above dual_clip; the gradient is 0."""


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> PolicyTerms:
    """Clipped surrogate with separate bounds and dual clip; inputs [T], fp32.

        r = exp(log π - log π_old)
        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
        L = min(L, -A dual_clip)  where A < 0

    Sources: PPO, arXiv:1707.06347 eq. 7; clip-higher: DAPO, arXiv:2503.14476 eq. 10; dual clip:
    arXiv:1912.09729 eq. 5.
    """
    log_ratio = torch.clamp(log_probs - old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    negative = advantages < 0
    dual_clipped = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = negative & (loss > bound)
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    active = clipped > unclipped
    return PolicyTerms(loss, ratio, active & ~negative, active & negative, dual_clipped)


def coefficients(
    step_lengths: Sequence[int],
    trajectories: Sequence[Hashable],
    config: LossConfig,
    *,
    mask: Tensor | None = None,
    mini_batches: Sequence[int] | None = None,
) -> Tensor:
    """mask · α / N for every response token, [T] float32.

    Args:
        step_lengths: response tokens of each step, S values.
        trajectories: which trajectory each step belongs to, S values.
        mask: [T], 0 where a token is not to be trained; all ones if None.
        mini_batches: the mini-batch (one optimizer step) of each step, S values; N is counted
            within each. One for all if None.

    A trajectory without a trained token counts nowhere. Sums to 1 over a mini-batch under both
    means.
    """
    lengths = torch.as_tensor(step_lengths, dtype=torch.int64)
    n_tokens = int(lengths.sum())
    for name, values in (("trajectories", trajectories), ("mini_batches", mini_batches)):
        if values is not None and len(values) != len(lengths):
            raise ColumnError(f"{name} has {len(values)} values for {len(lengths)} steps")
    if mask is not None and mask.shape != (n_tokens,):
        raise ColumnError(f"mask has shape {tuple(mask.shape)} for {n_tokens} response tokens")
    trained = torch.ones(n_tokens) if mask is None else (mask != 0).to("cpu", torch.float32)

    batch_of_step = _codes(mini_batches) if mini_batches is not None else torch.zeros_like(lengths)
    # A trajectory split over mini-batches is a sample of each of them.
    sample_of_step = _codes(list(zip(trajectories, batch_of_step.tolist(), strict=True)))
    sample = torch.repeat_interleave(sample_of_step, lengths)
    batch = torch.repeat_interleave(batch_of_step, lengths)

    tokens_in_sample = _count(sample, trained)
    if config.aggregation == "token-mean":
        alpha = torch.ones(n_tokens, dtype=torch.float64)
        n = _count(batch, trained)[batch]
    else:
        batch_of_sample = torch.zeros(len(tokens_in_sample), dtype=torch.int64)
        batch_of_sample[sample_of_step] = batch_of_step
        n = _count(batch_of_sample, (tokens_in_sample > 0).float())[batch]
        if config.aggregation == "trajectory-mean":
            alpha = 1 / tokens_in_sample[sample].clamp(min=1)
        else:
            alpha = torch.full((n_tokens,), 1 / (config.sum_norm or 1.0), dtype=torch.float64)
    return (trained * alpha / n.clamp(min=1)).float()


def _codes(values: Sequence[Hashable]) -> Tensor:
    """Equal values get equal integers, from 0 in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return torch.tensor([seen.setdefault(v, len(seen)) for v in values], dtype=torch.int64)


def _count(index: Tensor, weights: Tensor) -> Tensor:
    """Sum of `weights` by `index`, in float64: exact for any count a batch can hold."""
    return torch.bincount(index, weights=weights.double())


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The `LossFn` of a `LossConfig`. Callable, stateless, picklable."""

    config: LossConfig

    @property
    def entropy(self) -> Literal["none", "value", "gradient"]:
        """What the backend has to compute of the policy's entropy."""
        if self.config.entropy_coef > 0:
            return "gradient"
        return "value" if self.config.report_entropy else "none"

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        """Σ coef · (w · policy_loss(r, A) - entropy_coef · H) over the tokens of a micro-batch.

        The entropy bonus carries no importance weight: it asks nothing of the behaviour policy.
        """
        c = self.config
        coef, weights, advantages, prox = _require(
            columns, "coef", "weights", "advantages", "prox_log_probs"
        )
        # A masked token must not leak a NaN through 0 · NaN, in the value or in the gradient.
        live = coef != 0
        log_probs, prox = log_probs[live], prox[live]
        coef, weights, advantages = coef[live], weights[live], advantages[live]
        terms = ppo_clip(
            log_probs,
            prox,
            advantages,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            dual_clip=c.dual_clip,
        )
        loss = (coef * weights * terms.loss).sum()
        if entropy is not None:
            entropy = entropy[live]
            if c.entropy_coef > 0:
                loss = loss - c.entropy_coef * (coef * entropy).sum()
        with torch.no_grad():
            log_ratio = log_probs - prox
            columns_of_metrics = {
                "policy/ratio": terms.ratio,
                "policy/clip_frac_high": terms.clipped_high,
                "policy/clip_frac_low": terms.clipped_low,
                "policy/dual_clip_frac": terms.dual_clipped,
                "policy/kl_k1": -log_ratio,
                "policy/kl_k3": terms.ratio - 1 - log_ratio,
            }
            if entropy is not None:
                columns_of_metrics["policy/entropy"] = entropy
            count = live.sum().double()
            metrics = {
                name: Mean(column.double().sum(), count)
                for name, column in columns_of_metrics.items()
            }
        return LossOutput(loss, metrics)


def _require(columns: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    if missing := [name for name in names if name not in columns]:
        raise ColumnError(
            f"the batch has no column {', '.join(map(repr, missing))} (it has "
            f"{', '.join(map(repr, columns)) or 'none'}); write it before train_step"
        )
    return [columns[name] for name in names]


def make_loss_fn(config: LossConfig) -> LossFn:
    """The loss function that a backend's `train_step` takes."""
    return PolicyLoss(config)
