"""Metrics of a batch that follow from its weights.

A key is left out where it would be a mean over nothing:
`staleness/mean|max`, `off_policy_share` (of steps), `off_policy/advantage_share` (of Σ|A|),
`off_policy/weight_mean`, `off_policy/missing_steps`, `off_policy/dropped_steps`,
`off_policy/masked_share` (of tokens; weight 0 for any reason) and for each mask in use
`off_policy/band_share|veto_share|clip_share|opsm_share`,
`rollout_probs_diff/mean|max|std` (|π - μ|), `off_policy/chi2_step` (χ² of whole replies: ρ
multiplied over a step), and, over all tokens as `off_policy/…` and for every lag bucket in use as
`off_policy/lag_{bucket}/…`: `ess` (of the weights, as a share of n), `kl_k1`, `kl_k3` (KL(μ‖π)),
`chi2` (χ²(π‖μ)). Buckets also have `steps`, `tokens`, `weight_mean` and `advantage_share`. As
verl's rollout correction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stepwell.trainer.algorithms.off_policy.ratios import MAX_LOG_RATIO, Ratios

BUCKETS: tuple[tuple[str, float], ...] = (
    ("0", 0.0),
    ("0-1", 1.0),
    ("1-2", 2.0),
    ("2-4", 4.0),
    ("over-4", math.inf),
)
"""Lag buckets of the metrics: name and upper bound (inclusive); the first holds lag 0 exactly."""


def metrics_of(
    x: Ratios, weights: Tensor, masked: Mapping[str, Tensor], prox: Tensor, mu: Tensor
) -> dict[str, float]:
    """The metrics of a batch.

    Args:
        masked: by name, where each mask in use strikes, bool [T].
        prox, mu: log-probs, [T]; mu is NaN where it is unknown.
    """
    steps, trained, lag = x.steps, x.steps.trained, x.lag
    live = steps.count > 0
    metrics = {
        "off_policy/missing_steps": float(steps.any(~x.known).sum()),
        "off_policy/dropped_steps": float((live & ~steps.any(weights > 0)).sum()),
    }
    if len(lag) == 0 or not trained.any():
        return metrics
    for name, m in masked.items():
        metrics[f"off_policy/{name}_share"] = float(m[trained].float().mean())
    metrics["staleness/mean"] = float(lag.mean())
    metrics["staleness/max"] = float(lag.max())
    metrics["off_policy_share"] = float(x.off_policy.float().mean())
    off_token = steps.spread(x.off_policy) & trained
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
        log_rho = steps.sum(x.log_ratio)[steps.any(known)].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics["off_policy/chi2_step"] = float((2 * log_rho).exp().mean() - 1)
        diff = (prox[known].exp() - mu[known].exp()).abs()
        metrics["rollout_probs_diff/mean"] = float(diff.mean())
        metrics["rollout_probs_diff/max"] = float(diff.max())
        metrics["rollout_probs_diff/std"] = float(diff.std()) if len(diff) > 1 else 0.0

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
        metrics |= _divergences(prefix, x.log_ratio[here & known], weights[here])
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
