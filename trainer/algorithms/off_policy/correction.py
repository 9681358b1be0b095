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

**Metrics.** A key is left out where it would be a mean over nothing:
`staleness/mean|max`, `off_policy_share` (of steps), `off_policy/advantage_share` (of Σ|A|),
`off_policy/weight_mean`, `off_policy/missing_steps`, `off_policy/dropped_steps`,
`off_policy/masked_share` (of tokens; weight 0 for any reason) and for each mask in use
`off_policy/band_share|veto_share|clip_share|opsm_share`,
`rollout_probs_diff/mean|max|std` (|π - μ|), `off_policy/chi2_step` (χ² of whole replies: ρ
multiplied over a step), and, over all tokens as `off_policy/…` and for every lag bucket in use as
`off_policy/lag_{bucket}/…`: `ess` (of the weights, as a share of n), `kl_k1`, `kl_k3` (KL(μ‖π)),
`chi2` (χ²(π‖μ)). Buckets also have `steps`, `tokens`, `weight_mean` and `advantage_share`. As
verl's rollout correction.

Pure functions of flat columns and per-step lags. Does not own: the loss (`../losses.py`), where
π_prox comes from (`proximal.py`), eviction of what is too old (the pool).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepwell.backends.errors import take_out
from stepwell.datapool.types import Step
from stepwell.trainer.algorithms.off_policy.base import MAX_LOG_RATIO, Ratios
from stepwell.trainer.config import OffPolicyConfig
from stepwell.trainer.errors import ColumnError, VersionError

MISSING_DECAY = 0.5
"""Base of the weight of `missing: decay`."""
BUCKETS: tuple[tuple[str, float], ...] = (
    ("0", 0.0),
    ("0-1", 1.0),
    ("1-2", 2.0),
    ("2-4", 4.0),
    ("over-4", math.inf),
)
"""Lag buckets of the metrics: name and upper bound (inclusive); the first holds lag 0 exactly."""
PROBS_DIFF = "rollout_probs_diff/"
"""Begins the names of `probs_diff`."""


# ── lag ──────────────────────────────────────────────────────────────────────────────────────────


def lags(
    steps: Sequence[Step],
    published_at: Mapping[int, int],
    *,
    updates_now: int,
    updates_per_sync: int,
) -> Tensor:
    """Lag of each step, [S] float32, in publications: 0 = sampled by the weights of now.

    Args:
        steps: their `policy_version` is the oldest one that sampled of them.
        published_at: version -> updates applied when it was published. A version older
            than all of them (published before a resume) counts one sync per version further back.

    Raises:
        VersionError: a version that was never published; its step's origin is not what it says.
    """
    if not published_at:
        raise VersionError("published_at is empty; record version 0 at update 0 before training")
    oldest = min(published_at)

    def updates_at(step: Step) -> int:
        version = step.policy_version
        if version in published_at:
            return published_at[version]
        if version < oldest:
            return published_at[oldest] - (oldest - version) * updates_per_sync
        raise VersionError(
            f"{step.label} has policy_version {version}, but the versions published are "
            f"{oldest}..{max(published_at)}; check the engine's weight_version. "
            f"{take_out(step.trajectory_uid)}"
        )

    return torch.tensor(
        [(updates_now - updates_at(step)) / updates_per_sync for step in steps],
        dtype=torch.float32,
    )


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


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
) -> tuple[Tensor, dict[str, float]]:
    """Importance weights of a batch, [T] float32, detached, and its metrics (see the module's
    docstring).

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
    x = Ratios.of(prox, mu, lengths, lag, staleness_threshold, advantages, trained)
    weights, masked = _weights(x, config)
    return weights, metrics_of(x, weights, masked, prox, mu)


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
        alone, trained = torch.ones_like(lag, dtype=torch.int64), torch.ones_like(lag).bool()
        advantages = columns["advantages"]
        x = Ratios.of(prox, mu, alone, lag, self.staleness_threshold, advantages, trained)
        return _weights(x, self.config)[0]


def _weights(x: Ratios, config: OffPolicyConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """w after masks, [T], and where each of them strikes, [T] bool by its name."""
    own = config.chosen.weigh
    weights = _weigh(x, config) if own is None else own(x, config.options).detach()
    where = x.known if config.mask_on_policy else x.known & x.spread(x.off_policy)
    masked = {name: m & where for name, m in _masks(x, config).items()}
    for m in masked.values():
        weights = torch.where(m, 0.0, weights)
    # Without μ there is no ratio: what was computed above from 0.0 must not survive.
    return torch.where(x.known, weights, x.spread(_unknown(x, config))), masked


def _weigh(x: Ratios, config: OffPolicyConfig) -> Tensor:
    """w before any mask, [T]."""
    ratio = x.shared(config.granularity).exp()
    one = torch.ones_like(ratio)
    if config.granularity == "none":
        stale = fresh = one
    else:
        stale = ratio if config.cap is None else ratio.clamp(max=config.cap)
        fresh = stale if config.weigh_on_policy else one
    decay = x.spread(torch.pow(config.decay, x.beyond))
    return torch.where(x.spread(x.off_policy), stale * decay, fresh)


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
    masks, log_ratio, advantages = {}, x.log_ratio, x.advantages
    if config.band is not None:
        low, high = config.band
        ratio = x.shared(config.band_granularity or config.granularity).exp()
        masks["band"] = (ratio < low) | (ratio > high)
    if config.veto is not None:
        masks["veto"] = x.spread(x.any(log_ratio < math.log(config.veto)))
    if config.clip is not None and advantages is not None:
        low, high = config.clip
        ratio = log_ratio.exp()
        gone_up, gone_down = ratio > 1 + high, ratio < 1 - low
        masks["clip"] = ((advantages > 0) & gone_up) | ((advantages < 0) & gone_down)
    if config.opsm is not None and advantages is not None:
        drift = x.spread(x.mean(-log_ratio))
        masks["opsm"] = (advantages < 0) & (drift > config.opsm)
    return masks


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────


def metrics_of(
    x: Ratios, weights: Tensor, masked: Mapping[str, Tensor], prox: Tensor, mu: Tensor
) -> dict[str, float]:
    """The metrics of a batch.

    Args:
        masked: by name, where each mask in use strikes, bool [T].
        prox, mu: log-probs, [T]; mu is NaN where it is unknown.
    """
    trained, lag = x.trained, x.lag
    live = x.count > 0
    metrics = {
        "off_policy/missing_steps": float(x.any(~x.known).sum()),
        "off_policy/dropped_steps": float((live & ~x.any(weights > 0)).sum()),
    }
    if len(lag) == 0 or not trained.any():
        return metrics
    for name, m in masked.items():
        metrics[f"off_policy/{name}_share"] = float(m[trained].float().mean())
    metrics["staleness/mean"] = float(lag.mean())
    metrics["staleness/max"] = float(lag.max())
    metrics["off_policy_share"] = float(x.off_policy.float().mean())
    off_token = x.spread(x.off_policy) & trained
    if off_token.any():
        metrics["off_policy/weight_mean"] = float(weights[off_token].mean())
    metrics["off_policy/masked_share"] = float((weights[trained] == 0).float().mean())
    magnitude = None if x.advantages is None else x.advantages.detach().abs().double() * trained
    total = 0.0 if magnitude is None else float(magnitude.sum())
    if magnitude is not None and total > 0:
        metrics["off_policy/advantage_share"] = float(magnitude[off_token].sum()) / total
    known = x.known & trained
    metrics |= _divergences("off_policy", x.log_ratio[known], weights[trained])
    if known.any():
        log_rho = x.sum(x.log_ratio)[x.any(known)].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics["off_policy/chi2_step"] = float((2 * log_rho).exp().mean() - 1)
        metrics |= probs_diff(prox[known], mu[known])

    bucket = torch.bucketize(lag, torch.tensor([b for _, b in BUCKETS[:-1]]))
    for index, (name, _) in enumerate(BUCKETS):
        steps_here = bucket == index
        here = x.spread(steps_here) & trained
        if not here.any():
            continue
        prefix = f"off_policy/lag_{name}"
        metrics[f"{prefix}/steps"] = float(steps_here.sum())
        metrics[f"{prefix}/tokens"] = float(here.sum())
        metrics[f"{prefix}/weight_mean"] = float(weights[here].mean())
        metrics |= _divergences(prefix, x.log_ratio[here & known], weights[here])
        if magnitude is not None and total > 0:
            metrics[f"{prefix}/advantage_share"] = float(magnitude[here].sum()) / total
    return metrics


def probs_diff(prox: Tensor, mu: Tensor) -> dict[str, float]:
    """`rollout_probs_diff/mean|max|std`: |π - μ| over tokens, whose log-probs these are, [n]."""
    diff = (prox.exp() - mu.exp()).abs()
    return {
        f"{PROBS_DIFF}mean": float(diff.mean()),
        f"{PROBS_DIFF}max": float(diff.max()),
        f"{PROBS_DIFF}std": float(diff.std()) if len(diff) > 1 else 0.0,
    }


def _divergences(prefix: str, log_ratio: Tensor, weights: Tensor) -> dict[str, float]:
    """ESS of the weights; k1, k3 and χ² of the tokens whose ρ is known."""
    metrics = {}
    w = weights.double()
    if float(w.sum()) > 0:
        metrics[f"{prefix}/ess"] = float(w.sum() ** 2 / (len(w) * (w * w).sum()))
    log_rho = log_ratio.double()
    if len(log_rho):
        rho = log_rho.exp()
        metrics[f"{prefix}/kl_k1"] = float(-log_rho.mean())
        metrics[f"{prefix}/kl_k3"] = float((rho - 1 - log_rho).mean())
        metrics[f"{prefix}/chi2"] = float((rho * rho).mean() - 1)
    return metrics
