"""Staleness-aware importance weighting: what a step is worth that an older policy sampled.

    lag d    = (updates now - updates when the step's oldest version was published)
               / updates per publication      updates that were applied: a skipped one, or one of
                                              the critic alone, leaves the policy what it was
    off-policy   d > staleness_threshold
    ρ_t      = π_prox(t) / μ(t)        fp32; π_prox recomputed once per batch, μ as sampled
    weight   off-policy: min(cap, ρ) · decay^(d - staleness_threshold), and 0 where masked:
                         by default where A > 0 and ρ > 1.28, or A < 0 and ρ < 0.8 (`clip`)
             on-policy:  1, or min(on_policy_cap, ρ)

With the default cap of 1 the weight is a down-weight whose mean tells how far the policies are
apart: E_μ[min(1, ρ)] = Σ min(μ, π) = 1 - TV(π, μ). It is a constant to autograd; PPO's own ratio
π/π_prox carries the gradient. `clip` is PPO's around the behaviour policy: without it nothing ends
the pull of data whose wish was granted versions ago (docs/design/training-math.md, "Lag"). The
other methods of the field are presets of the same options (`config/algorithm.py`, `PRESETS`).

A step without behaviour log-probs has no ρ. On-policy it needs none; off-policy it is dropped or
decayed. It is never taken for μ = 1 (a log-prob of 0.0), and always counted.

Sources: decoupled objective, arXiv:2110.00641; truncation, IMPALA arXiv:1802.01561 and "Your
efficient RL framework secretly brings you off-policy RL training" (TIS); masked and geometric
variants, "When Speed Kills Stability" (https://richardli.xyz/rl-collapse); band mask: IcePop,
arXiv:2510.18855; OPSM, DeepSeek-V3.2, arXiv:2512.02556; metrics as verl's rollout correction.

Pure functions of flat columns and per-step lags. Does not own: the loss (`losses.py`), eviction of
what is too old (the pool).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepwell.trainer.config import OffPolicyConfig
from stepwell.trainer.errors import ColumnError, VersionError

__all__ = ["Correction", "OffPolicyConfig", "correct", "lags", "proximal_log_probs"]

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
        published_at: version -> updates applied when it was published. A version older
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


def proximal_log_probs(
    recompute: Callable[[], Tensor], rollout_log_probs: Tensor, config: OffPolicyConfig
) -> Tensor:
    """log π_prox, the centre of the trust region, [T].

    With `proximal: rollout` it is the behaviour policy, recomputed only for want of log-probs.

    Args:
        recompute: log π of every response token under the weights of now.
        rollout_log_probs: log μ, NaN where a step brought none.
    """
    if config.proximal == "recompute":
        return recompute()
    known = torch.isfinite(rollout_log_probs)
    if known.all():
        return rollout_log_probs.clone()
    return torch.where(known, rollout_log_probs, recompute())


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

    Metrics (a key is left out where it would be a mean over nothing):
        `staleness/mean|max`, `off_policy_share` (of steps), `off_policy/advantage_share` (of
        Σ|A|), `off_policy/weight_mean`, `off_policy/missing_steps`, `off_policy/dropped_steps`,
        `off_policy/masked_share` (of tokens; weight 0 for any reason) and for each mask in use
        `off_policy/band_share|divergence_share|veto_share|clip_share|opsm_share`,
        `rollout_probs_diff/mean|max|std` (|π - μ|), `off_policy/chi2_step` (χ² of whole replies:
        ρ multiplied over a step), and, over all tokens as `off_policy/…` and for every lag bucket
        in use as `off_policy/lag_{bucket}/…`: `ess` (of the weights, as a share of n), `kl_k1`,
        `kl_k3` (KL(μ‖π)), `chi2` (χ²(π‖μ)). Buckets also have `steps`, `tokens`, `weight_mean`
        and `advantage_share`.
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
    steps = _Steps(lengths, trained)
    missing = steps.any(~torch.isfinite(mu))
    known = ~steps.spread(missing)
    log_ratio = torch.where(known & trained, prox - mu, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    off = lag > staleness_threshold
    off_token = steps.spread(off)
    masked = _masks(log_ratio, steps, config, advantages)
    if not config.mask_on_policy:
        masked = {name: m & off_token for name, m in masked.items()}
    masked = {name: m & known for name, m in masked.items()}
    beyond = (lag - staleness_threshold).clamp(min=0)
    weights = _weights(log_ratio, steps, beyond, off, config)
    for m in masked.values():
        weights = torch.where(m, 0.0, weights)
    # Without μ there is no ratio: what was computed above from 0.0 must not survive.
    weights = torch.where(known, weights, steps.spread(_unknown(beyond, off, config)))
    if config.normalize:
        weights = _normalized(weights, steps, config)

    dropped = ~steps.any(weights > 0)
    metrics = _metrics(log_ratio, weights, steps, lag, off, known & trained, advantages)
    for name, m in masked.items():
        if trained.any():
            metrics[f"off_policy/{name}_share"] = float(m[trained].float().mean())
    metrics["off_policy/missing_steps"] = float(missing.sum())
    metrics["off_policy/dropped_steps"] = float(dropped.sum())
    if (told := known & trained).any():
        diff = (prox[told].exp() - mu[told].exp()).abs()
        metrics["rollout_probs_diff/mean"] = float(diff.mean())
        metrics["rollout_probs_diff/max"] = float(diff.max())
        metrics["rollout_probs_diff/std"] = float(diff.std()) if len(diff) > 1 else 0.0
    return Correction(weights, off, dropped, metrics)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Reductions over the trained tokens of each step: [T] -> [S]."""

    lengths: Tensor
    trained: Tensor

    @property
    def index(self) -> Tensor:
        return torch.repeat_interleave(self.lengths)

    @property
    def count(self) -> Tensor:
        return self.sum(torch.ones(len(self.trained)))

    def spread(self, per_step: Tensor) -> Tensor:
        """[S] -> [T]."""
        return torch.repeat_interleave(per_step, self.lengths)

    def sum(self, values: Tensor) -> Tensor:
        total = torch.zeros(len(self.lengths), dtype=torch.float64)
        return total.index_add_(0, self.index, torch.where(self.trained, values, 0).double())

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.count.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """Of values >= 0; 0 for a step without a trained token."""
        largest = torch.zeros(len(self.lengths))
        return largest.scatter_reduce_(
            0, self.index, torch.where(self.trained, values, 0.0), reduce="amax"
        )

    def any(self, flags: Tensor) -> Tensor:
        return self.sum(flags.float()) > 0

    def shared(self, log_ratio: Tensor, granularity: str) -> Tensor:
        """log ρ at the granularity, spread over the tokens that share it: [T] -> [T]."""
        if granularity in ("token", "none"):
            return log_ratio
        total = self.mean(log_ratio) if granularity == "step" else self.sum(log_ratio)
        return self.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).float())


def _weights(
    log_ratio: Tensor, steps: _Steps, beyond: Tensor, off: Tensor, config: OffPolicyConfig
) -> Tensor:
    """w before any mask, [T]. `beyond`: lag beyond the threshold, [S]."""
    ratio = steps.shared(log_ratio, config.granularity).exp()
    one = torch.ones_like(ratio)
    if config.granularity == "none":
        stale = fresh = one
    else:
        stale = ratio.clamp(min=config.floor, max=config.cap)
        fresh = one
        if config.on_policy_cap is not None:
            fresh = ratio.clamp(max=config.on_policy_cap)
        elif config.weigh_on_policy:
            fresh = stale
    decay = steps.spread(torch.pow(config.decay, beyond))
    return torch.where(steps.spread(off), stale * decay, fresh)


def _unknown(beyond: Tensor, off: Tensor, config: OffPolicyConfig) -> Tensor:
    """w of a step without behaviour log-probs, [S]."""
    stale = {
        "drop": torch.zeros_like(beyond),
        "decay": torch.pow(config.missing_decay, beyond),
        "keep": torch.ones_like(beyond),
    }[config.missing]
    return torch.where(off, stale, 1.0)


def _masks(
    log_ratio: Tensor, steps: _Steps, config: OffPolicyConfig, advantages: Tensor | None
) -> dict[str, Tensor]:
    """Name -> bool [T], true where the mask strikes; those that are configured."""
    masks = {}
    if config.band is not None:
        low, high = config.band
        ratio = steps.shared(log_ratio, config.band_granularity or config.granularity).exp()
        masks["band"] = (ratio < low) | (ratio > high)
    if config.max_divergence is not None:
        k = 0.5 * log_ratio**2 if config.divergence == "k2" else log_ratio.exp() - 1 - log_ratio
        if config.divergence_over != "token":
            over = {"mean": steps.mean, "sum": steps.sum, "max": steps.max}
            k = steps.spread(over[config.divergence_over](k))
        masks["divergence"] = k > config.max_divergence
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


def _normalized(weights: Tensor, steps: _Steps, config: OffPolicyConfig) -> Tensor:
    """`weights` divided by their mean, over tokens or, where a step shares one, over steps."""
    if config.granularity in ("step", "sequence"):
        mean = steps.mean(weights)[steps.count > 0].mean()
    else:
        mean = weights[steps.trained].double().mean()
    return weights if not mean > 1e-8 else (weights / mean).float()


def _metrics(
    log_ratio: Tensor,
    weights: Tensor,
    steps: _Steps,
    lag: Tensor,
    off: Tensor,
    known: Tensor,
    advantages: Tensor | None,
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    trained = steps.trained
    if len(lag) == 0 or not trained.any():
        return metrics
    metrics["staleness/mean"] = float(lag.mean())
    metrics["staleness/max"] = float(lag.max())
    metrics["off_policy_share"] = float(off.float().mean())
    off_token = steps.spread(off) & trained
    if off_token.any():
        metrics["off_policy/weight_mean"] = float(weights[off_token].mean())
    metrics["off_policy/masked_share"] = float((weights[trained] == 0).float().mean())
    magnitude = None if advantages is None else advantages.detach().abs().double() * trained
    total = 0.0 if magnitude is None else float(magnitude.sum())
    if magnitude is not None and total > 0:
        metrics["off_policy/advantage_share"] = float(magnitude[off_token].sum()) / total
    metrics |= _divergences("off_policy", log_ratio[known], weights[trained])
    replies = steps.any(known)
    if replies.any():
        log_rho = steps.sum(log_ratio)[replies].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics["off_policy/chi2_step"] = float((2 * log_rho).exp().mean() - 1)

    bucket = torch.bucketize(lag, torch.tensor([b for _, b in BUCKETS[:-1]]))
    for index, (name, _) in enumerate(BUCKETS):
        steps_here = bucket == index
        here = steps.spread(steps_here) & trained
        if not here.any():
            continue
        prefix = f"off_policy/lag_{name}"
        metrics[f"{prefix}/steps"] = float(steps_here.sum())
        metrics[f"{prefix}/tokens"] = float(here.sum())
        metrics[f"{prefix}/weight_mean"] = float(weights[here].mean())
        metrics |= _divergences(prefix, log_ratio[here & known], weights[here])
        if magnitude is not None and total > 0:
            metrics[f"{prefix}/advantage_share"] = float(magnitude[here].sum()) / total
    return metrics


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
