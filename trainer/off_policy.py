"""Staleness-aware importance weighting: what a step is worth that an older policy sampled.

    lag d    = (updates now - updates when the step's oldest version was published)
               / updates per publication
    off-policy   d > staleness_threshold
    ρ_t      = π_prox(t) / μ(t)        fp32; π_prox recomputed once per batch, μ as sampled
    weight   off-policy: min(cap, ρ) · decay^(d - staleness_threshold), and 0 where masked
             on-policy:  1, or min(on_policy_cap, ρ)

With the default cap of 1 the weight is a down-weight whose mean tells how far the policies are
apart: E_μ[min(1, ρ)] = Σ min(μ, π) = 1 - TV(π, μ). It is a constant to autograd; PPO's own ratio
π/π_prox carries the gradient.

A step without behaviour log-probs has no ρ. On-policy it needs none; off-policy it is dropped or
decayed. It is never taken for μ = 1 (a log-prob of 0.0), and always counted.

Sources: decoupled objective, arXiv:2110.00641; truncation, IMPALA arXiv:1802.01561 and "Your
efficient RL framework secretly brings you off-policy RL training" (TIS); band mask: IcePop,
arXiv:2510.18855; metrics as verl's rollout correction.

Pure functions of flat columns and per-step lags. Does not own: the loss (`losses.py`), eviction of
what is too old (the pool).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import ColumnError, VersionError
from trainer.loss_config import OffPolicyConfig

__all__ = ["Correction", "OffPolicyConfig", "correct", "lags"]

MAX_LOG_RATIO = 20.0
"""|log ρ| beyond this is cut off, so that ρ and ρ² stay finite in fp32."""

BUCKETS: tuple[tuple[str, float], ...] = (
    ("0", 0.0),
    ("0-1", 1.0),
    ("1-2", 2.0),
    ("2-4", 4.0),
    ("over-4", math.inf),
)
"""Lag buckets of the metrics: name and upper bound (inclusive); the first holds lag 0 exactly."""


def lags(
    policy_versions: Sequence[int],
    published_at: Mapping[int, int],
    *,
    updates_now: int,
    updates_per_sync: int,
) -> Tensor:
    """Lag of each step, [S] float32, in publications: 0 = sampled by the weights of now.

    Args:
        policy_versions: the oldest version of each step.
        published_at: version -> optimizer updates done when it was published. A version older
            than all of them (published before a resume) counts one sync per version further back.

    Raises:
        VersionError: a version that was never published; its step's origin is not what it says.
    """
    if not published_at:
        raise VersionError("published_at is empty; record version 0 at update 0 before training")
    oldest = min(published_at)

    def updates_at(version: int) -> int:
        if version in published_at:
            return published_at[version]
        if version < oldest:
            return published_at[oldest] - (oldest - version) * updates_per_sync
        raise VersionError(
            f"a step carries policy_version {version}, but the versions published are "
            f"{oldest}..{max(published_at)}; check the engine's weight_version"
        )

    return torch.tensor(
        [(updates_now - updates_at(v)) / updates_per_sync for v in policy_versions],
        dtype=torch.float32,
    )


@dataclass(frozen=True, slots=True)
class Correction:
    """The weights of a batch and what they say about it."""

    weights: Tensor
    """[T] float32, detached; the column `weights`."""
    off_policy: Tensor
    """[S] bool."""
    dropped: Tensor
    """[S] bool: no token of the step has a weight above 0."""
    metrics: dict[str, float]


def correct(
    prox_log_probs: Tensor,
    rollout_log_probs: Tensor,
    step_lengths: Sequence[int] | Tensor,
    step_lags: Sequence[float] | Tensor,
    *,
    staleness_threshold: float,
    config: OffPolicyConfig,
    advantages: Tensor | None = None,
) -> Correction:
    """Importance weights and metrics of a batch.

    Args:
        prox_log_probs: log π_prox of each response token, [T].
        rollout_log_probs: log μ, [T]; a step with a value that is not finite has none.
        step_lengths: response tokens of each step, [S], adding up to T.
        step_lags: as from `lags`, [S].
        advantages: [T], for the share of |A| per bucket.

    Metrics (a key is left out where it would be a mean over nothing):
        `staleness/mean|max`, `off_policy_share` (of steps), `off_policy/advantage_share` (of
        Σ|A|), `off_policy/weight_mean`, `off_policy/missing_steps`, `off_policy/dropped_steps`,
        `off_policy/masked_share` (of tokens), `rollout_probs_diff/mean|max|std` (|π - μ|), and for
        every lag bucket in use, `off_policy/lag_{bucket}/…`: `steps`, `tokens`, `weight_mean`,
        `ess` (of the weights, as a share of n), `kl_k1`, `kl_k3` (KL(μ‖π)), `chi2` (χ²(π‖μ)),
        `advantage_share`.
    """
    lengths = torch.as_tensor(step_lengths, dtype=torch.int64)
    lag = torch.as_tensor(step_lags, dtype=torch.float32)
    prox = prox_log_probs.detach().float()
    mu = rollout_log_probs.detach().float()
    n = int(lengths.sum())
    columns = {"prox_log_probs": prox, "rollout_log_probs": mu, "advantages": advantages}
    for name, column in columns.items():
        if column is not None and column.shape != (n,):
            raise ColumnError(f"{name} has shape {tuple(column.shape)} for {n} response tokens")
    if lag.shape != lengths.shape:
        raise ColumnError(f"step_lags has {len(lag)} values for {len(lengths)} steps")

    step = torch.repeat_interleave(lengths)
    n_steps = len(lengths)
    missing = _any_in_step(~torch.isfinite(mu), step, n_steps)
    known = ~missing[step]
    log_ratio = torch.where(known, prox - mu, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    off = lag > staleness_threshold
    weights = _weights(log_ratio, step, lengths, lag, off, missing, staleness_threshold, config)
    dropped = ~_any_in_step(weights > 0, step, n_steps)
    metrics = _metrics(log_ratio, weights, step, lag, off, known, advantages)
    metrics["off_policy/missing_steps"] = float(missing.sum())
    metrics["off_policy/dropped_steps"] = float(dropped.sum())
    if known.any():
        diff = (prox[known].exp() - mu[known].exp()).abs()
        metrics["rollout_probs_diff/mean"] = float(diff.mean())
        metrics["rollout_probs_diff/max"] = float(diff.max())
        metrics["rollout_probs_diff/std"] = float(diff.std(correction=0))
    return Correction(weights, off, dropped, metrics)


def _weights(
    log_ratio: Tensor,
    step: Tensor,
    lengths: Tensor,
    lag: Tensor,
    off: Tensor,
    missing: Tensor,
    threshold: float,
    config: OffPolicyConfig,
) -> Tensor:
    ratio = _shared(log_ratio, step, lengths, config).exp()
    off_token = off[step]

    beyond = (lag - threshold).clamp(min=0)
    weights = torch.where(
        off_token,
        _capped(ratio, config.cap) * torch.pow(config.decay, beyond)[step],
        torch.ones_like(ratio)
        if config.on_policy_cap is None
        else _capped(ratio, config.on_policy_cap),
    )

    masked = torch.zeros_like(off_token)
    if config.band is not None:
        low, high = config.band
        masked |= (ratio < low) | (ratio > high)
    if config.veto is not None:
        masked |= _any_in_step(log_ratio < math.log(config.veto), step, len(lengths))[step]
    if not config.mask_on_policy:
        masked &= off_token
    weights = torch.where(masked, 0.0, weights)

    # Without μ there is no ratio: what was computed above from 0.0 must not survive.
    unknown = torch.where(
        off,
        torch.zeros_like(lag)
        if config.missing == "drop"
        else torch.pow(config.missing_decay, beyond),
        1.0,
    )
    return torch.where(missing[step], unknown[step], weights)


def _capped(ratio: Tensor, cap: float | None) -> Tensor:
    return ratio if cap is None else ratio.clamp(max=cap)


def _shared(log_ratio: Tensor, step: Tensor, lengths: Tensor, config: OffPolicyConfig) -> Tensor:
    """log ρ at the configured granularity, spread over the tokens that share it."""
    if config.granularity == "token":
        return log_ratio
    total = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, step, log_ratio.double())
    if config.granularity == "step":
        total = total / lengths.clamp(min=1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).float()[step]


def _any_in_step(flags: Tensor, step: Tensor, n_steps: int) -> Tensor:
    return torch.zeros(n_steps, dtype=torch.int64).index_add_(0, step, flags.long()) > 0


def _metrics(
    log_ratio: Tensor,
    weights: Tensor,
    step: Tensor,
    lag: Tensor,
    off: Tensor,
    known: Tensor,
    advantages: Tensor | None,
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if len(lag) == 0:
        return metrics
    metrics["staleness/mean"] = float(lag.mean())
    metrics["staleness/max"] = float(lag.max())
    metrics["off_policy_share"] = float(off.float().mean())
    off_token = off[step]
    if off_token.any():
        metrics["off_policy/weight_mean"] = float(weights[off_token].mean())
    metrics["off_policy/masked_share"] = float((weights == 0).float().mean())
    magnitude = None if advantages is None else advantages.detach().abs().double()
    total = 0.0 if magnitude is None else float(magnitude.sum())
    if magnitude is not None and total > 0:
        metrics["off_policy/advantage_share"] = float(magnitude[off_token].sum()) / total

    bucket = torch.bucketize(lag, torch.tensor([b for _, b in BUCKETS[:-1]]))
    for index, (name, _) in enumerate(BUCKETS):
        steps_here = bucket == index
        if not steps_here.any():
            continue
        here = steps_here[step]
        prefix = f"off_policy/lag_{name}"
        w = weights[here].double()
        metrics[f"{prefix}/steps"] = float(steps_here.sum())
        metrics[f"{prefix}/tokens"] = float(len(w))
        metrics[f"{prefix}/weight_mean"] = float(w.mean())
        if float(w.sum()) > 0:
            metrics[f"{prefix}/ess"] = float(w.sum() ** 2 / (len(w) * (w * w).sum()))
        log_rho = log_ratio[here & known].double()
        if len(log_rho):
            rho = log_rho.exp()
            metrics[f"{prefix}/kl_k1"] = float(-log_rho.mean())
            metrics[f"{prefix}/kl_k3"] = float((rho - 1 - log_rho).mean())
            metrics[f"{prefix}/chi2"] = float((rho * rho).mean() - 1)
        if magnitude is not None and total > 0:
            metrics[f"{prefix}/advantage_share"] = float(magnitude[here].sum()) / total
    return metrics
