"""Staleness-aware importance weighting: what a step is worth that an older policy sampled.

    lag d    = (updates now - updates when the step's oldest version was published)
               / updates per publication      updates that were applied: a skipped one, or one of
                                              the critic alone, leaves the policy what it was
    off-policy   d > staleness_threshold
    ρ_t      = π_prox(t) / μ(t)        fp32; π_prox before the batch, μ as sampled
    weight   off-policy: min(cap, ρ) · decay^(d - staleness_threshold), and 0 where masked:
                         by default where A > 0 and ρ > 1.28, or A < 0 and ρ < 0.8 (`clip`)
             on-policy:  1, or the same (`weigh_on_policy`)

With the default cap of 1 the weight is a down-weight whose mean tells how far the policies are
apart: E_μ[min(1, ρ)] = Σ min(μ, π) = 1 - TV(π, μ). It is a constant to autograd; PPO's own ratio
π/π_prox carries the gradient. `clip` is PPO's around the behaviour policy: without it nothing ends
the pull of data whose wish was granted versions ago (docs/design/training-math.md, "Lag"). The
other methods of the field are presets of the same options (`presets.py`); a plug-in's may bring a
weight of its own (`OffPolicyMethod.weigh`).

A step without behaviour log-probs has no ρ. On-policy it needs none; off-policy it is dropped or
decayed. It is never taken for μ = 1 (a log-prob of 0.0), and always counted.

Pure functions of flat columns and per-step lags. Does not own: the loss (`../losses.py`), eviction
of what is too old (the pool).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepwell.trainer.algorithms.off_policy.metrics import metrics_of
from stepwell.trainer.algorithms.off_policy.ratios import MAX_LOG_RATIO, Ratios, Steps
from stepwell.trainer.config import OffPolicyConfig
from stepwell.trainer.errors import ColumnError

MISSING_DECAY = 0.5
"""Base of the weight of `missing: decay`."""


@dataclass(frozen=True, slots=True)
class Correction:
    """The weights of a batch and what they say about it."""

    weights: Tensor
    """[T] float32, detached; the column `weights`."""
    metrics: dict[str, float]
    """See `metrics.py`."""


def correct(
    prox_log_probs: Tensor,
    rollout_log_probs: Tensor,
    step_lengths: Sequence[int] | Tensor,
    step_lags: Sequence[float] | Tensor,
    *,
    staleness_threshold: float,
    config: OffPolicyConfig,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
) -> Correction:
    """Importance weights and metrics of a batch.

    Args:
        prox_log_probs: log π_prox of each response token, [T].
        rollout_log_probs: log μ, [T]; a step with a value that is not finite has none.
        step_lengths: response tokens of each step, [S], adding up to T.
        step_lags: as from `lags`, [S].
        advantages: [T], for the share of |A| per bucket, `clip` and `opsm`.
        mask: [T], 0 where a token is not trained: it counts in no ratio of its step and no metric.
            All ones if None.
    """
    lengths = torch.as_tensor(step_lengths, dtype=torch.int64)
    lag = torch.as_tensor(step_lags, dtype=torch.float32)
    prox = prox_log_probs.detach().float()
    mu = rollout_log_probs.detach().float()
    n = int(lengths.sum())
    columns = {
        "prox_log_probs": prox,
        "rollout_log_probs": mu,
        "advantages": advantages,
        "mask": mask,
    }
    for name, column in columns.items():
        if column is not None and column.shape != (n,):
            raise ColumnError(f"{name} has shape {tuple(column.shape)} for {n} response tokens")
    if lag.shape != lengths.shape:
        raise ColumnError(f"step_lags has {len(lag)} values for {len(lengths)} steps")
    for name in ("clip", "opsm"):
        if getattr(config, name) is not None and advantages is None:
            raise ColumnError(f"off_policy.{name} masks by the sign of A; pass advantages")

    trained = torch.ones(n, dtype=torch.bool) if mask is None else mask != 0
    steps = Steps(lengths, trained)
    known = ~steps.spread(steps.any(~torch.isfinite(mu)))
    log_ratio = torch.where(known & trained, prox - mu, 0.0)
    x = Ratios(
        log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        steps,
        lag,
        beyond=(lag - staleness_threshold).clamp(min=0),
        off_policy=lag > staleness_threshold,
        known=known,
        advantages=advantages,
    )
    weights, masked = _weights(x, config)
    return Correction(weights, metrics_of(x, weights, masked, prox, mu))


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of the tokens of a micro-batch, where each needs its own log-probs alone
    (`OffPolicyConfig.weighs_tokens_alone`): the same as `correct` gives them in the batch."""

    config: OffPolicyConfig
    staleness_threshold: float
    use_rollout_log_probs: bool = True
    """False: μ is π_prox."""

    def __call__(self, prox_log_probs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """w of each token, [n].

        Args:
            columns: [n] each: `lag` of its step, `advantages`, and `rollout_log_probs`, NaN where
                its step has none.
        """
        lag, prox = columns["lag"], prox_log_probs.detach().float()
        mu = columns["rollout_log_probs"] if self.use_rollout_log_probs else prox
        known = torch.isfinite(mu)
        log_ratio = torch.where(known, prox - mu, 0.0)
        x = Ratios(
            log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            Steps(torch.ones_like(lag, dtype=torch.int64), torch.ones_like(known)),
            lag,
            beyond=(lag - self.staleness_threshold).clamp(min=0),
            off_policy=lag > self.staleness_threshold,
            known=known,
            advantages=columns["advantages"],
        )
        return _weights(x, self.config)[0]


def _weights(x: Ratios, config: OffPolicyConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """w after masks, [T], and where each of them strikes, [T] bool by its name."""
    own = config.chosen.weigh
    weights = _weigh(x, config) if own is None else own(x, config.options).detach()
    where = x.known if config.mask_on_policy else x.known & x.steps.spread(x.off_policy)
    masked = {name: m & where for name, m in _masks(x, config).items()}
    for m in masked.values():
        weights = torch.where(m, 0.0, weights)
    # Without μ there is no ratio: what was computed above from 0.0 must not survive.
    return torch.where(x.known, weights, x.steps.spread(_unknown(x, config))), masked


def _weigh(x: Ratios, config: OffPolicyConfig) -> Tensor:
    """w before any mask, [T]."""
    ratio = x.steps.shared(x.log_ratio, config.granularity).exp()
    one = torch.ones_like(ratio)
    if config.granularity == "none":
        stale = fresh = one
    else:
        stale = ratio if config.cap is None else ratio.clamp(max=config.cap)
        fresh = stale if config.weigh_on_policy else one
    decay = x.steps.spread(torch.pow(config.decay, x.beyond))
    return torch.where(x.steps.spread(x.off_policy), stale * decay, fresh)


def _unknown(x: Ratios, config: OffPolicyConfig) -> Tensor:
    """w of a step without behaviour log-probs, [S]."""
    stale = {
        "drop": torch.zeros_like(x.beyond),
        "decay": torch.pow(MISSING_DECAY, x.beyond),
        "keep": torch.ones_like(x.beyond),
    }[config.missing]
    return torch.where(x.off_policy, stale, 1.0)


def _masks(x: Ratios, config: OffPolicyConfig) -> dict[str, Tensor]:
    """Name -> bool [T], true where the mask strikes; those that are configured."""
    masks, steps, log_ratio, advantages = {}, x.steps, x.log_ratio, x.advantages
    if config.band is not None:
        low, high = config.band
        ratio = steps.shared(log_ratio, config.band_granularity or config.granularity).exp()
        masks["band"] = (ratio < low) | (ratio > high)
    if config.veto is not None:
        masks["veto"] = steps.spread(steps.any(log_ratio < math.log(config.veto)))
    if config.clip is not None and advantages is not None:
        low, high = config.clip
        ratio = log_ratio.exp()
        gone_up, gone_down = ratio > 1 + high, ratio < 1 - low
        masks["clip"] = ((advantages > 0) & gone_up) | ((advantages < 0) & gone_down)
    if config.opsm is not None and advantages is not None:
        drift = steps.spread(steps.mean(-log_ratio))
        masks["opsm"] = (advantages < 0) & (drift > config.opsm)
    return masks
