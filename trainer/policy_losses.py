"""Policy losses: what one token costs, as pure functions of flat tensors.

    log π, columns of the live tokens ──► Policy.compute ──► loss [n], ratio, flags
                                                              └─► Σ coef · w · loss (`losses.py`)

All read r = π/π_prox, cut off at |log r| = 20. Two need more than their own token:

- `gspo`'s ratio belongs to a sequence, the response of one step. It needs all of a step's tokens in
  one micro-batch. Row forms keep a response in one row, and rows are never cut: so it is. The
  columns `step` and `step_tokens` say what belongs together, and a step in parts is an error.
- `clip_cov` and `kl_cov` select tokens by rank within a mini-batch. `select_by_covariance` does so
  once, beforehand, from π_prox, and the loss reads the column `selected`: the same for any
  micro-batches, where verl selects within each micro-batch anew.

Owns the formulas and the registry `POLICIES`. Does not own: weights, coefficients, KL and entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from stepwell.datapool.dotted import resolve
from stepwell.trainer.config import CovConfig, LossConfig
from stepwell.trainer.errors import ColumnError, UnknownNameError

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is cut off (verl's bound), so that r stays finite in fp32."""

MAX_LOG_SEQUENCE_RATIO = 10.0
"""The same for GSPO's ratio, from above (verl's bound)."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per-token results, each of shape [n]."""

    loss: Tensor
    ratio: Tensor | None = None
    """π/π_prox as the loss used it; None if it uses none."""
    flags: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> bool or float per token, reported as its mean."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy loss: `compute(log π, columns, config)` and the columns it reads.

    A plug-in is an instance of this, named by its dotted path. `compute` gets the trained tokens of
    one micro-batch. It must not reduce over them, except over whole steps (`step_mean`), or the
    loss depends on how the batch is cut.
    """

    compute: Callable[[Tensor, Mapping[str, Tensor], LossConfig], PolicyTerms]
    columns: tuple[str, ...] = ("prox_log_probs", "advantages")


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return torch.clamp(log_probs - old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(
    ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r)), and where the clip is what counts (the gradient is 0 there)."""
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    active = clipped > unclipped
    flags = {
        "clip_frac_high": active & (advantages > 0),
        "clip_frac_low": active & (advantages < 0),
    }
    return torch.maximum(unclipped, clipped), flags


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float | None = 3.0,
) -> PolicyTerms:
    """Clipped surrogate with separate bounds and dual clip; inputs [n], fp32.

        r = exp(log π - log π_old)
        L = max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high))
        L = min(L, -A clip_ratio_c)  where A < 0

    Sources: PPO, arXiv:1707.06347 eq. 7; clip-higher: DAPO, arXiv:2503.14476 eq. 10; dual clip:
    arXiv:1912.09729 eq. 5.
    """
    ratio = torch.exp(_log_ratio(log_probs, old_log_probs))
    loss, flags = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    negative = advantages < 0
    flags["dual_clip_frac"] = torch.zeros_like(negative)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        flags["dual_clip_frac"] = negative & (loss > bound)
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return PolicyTerms(loss, ratio, flags)


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    columns: Mapping[str, Tensor],
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> PolicyTerms:
    """Clipped surrogate of the sequence's ratio, with a gradient per token.

        s   = exp(mean over the step's trained tokens of log π - log π_old)
        s_t = sg(s) · π_t / sg(π_t)
        L   = max(-A s_t, -A clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

    Source: GSPO, arXiv:2507.18071 eq. 7 and 14 (GSPO-token, whose gradient is GSPO's when A is
    constant over the sequence). A sequence is the response of one step, also in a trajectory of
    several: each call to the model is one action.
    """
    log_sequence = step_mean((log_probs - old_log_probs).detach(), columns)
    log_ratio = log_probs - log_probs.detach() + log_sequence
    ratio = torch.exp(torch.clamp(log_ratio, max=MAX_LOG_SEQUENCE_RATIO))
    loss, flags = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return PolicyTerms(loss, ratio, flags)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 4.0,
) -> PolicyTerms:
    """L = -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) · A · log π: every token keeps a
    gradient.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4 and 5. With `off_policy.method: bypass` it is
    REINFORCE under truncated importance sampling.
    """
    ratio = torch.exp(_log_ratio(log_probs, old_log_probs)).detach()
    clipped = torch.clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    flags = {"clip_frac_high": ratio > clipped, "clip_frac_low": ratio < clipped}
    return PolicyTerms(-clipped * advantages * log_probs, ratio, flags)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyTerms:
    """L = -A · 4/τ · sigmoid(τ (r - 1)): a smooth gate instead of a clip.

    τ is tau_positive where A > 0, else tau_negative. At r = 1 the gradient is PPO's.
    Source: SAPO, arXiv:2511.20347.
    """
    ratio = torch.exp(_log_ratio(log_probs, old_log_probs))
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return PolicyTerms(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio)


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
) -> PolicyTerms:
    """PPO's clipped surrogate, and no loss on the selected tokens, whose gradient would cost the
    most entropy. Source: The Entropy Mechanism, arXiv:2505.22617.
    """
    ratio = torch.exp(_log_ratio(log_probs, old_log_probs))
    loss, flags = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    flags["cov_selected_frac"] = selected != 0
    return PolicyTerms(torch.where(selected != 0, 0.0, loss), ratio, flags)


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    kl_coef: float = 1.0,
) -> PolicyTerms:
    """L = -A r, and + kl_coef · |log π - log π_old| on the selected tokens.

    Source: The Entropy Mechanism, arXiv:2505.22617.
    """
    ratio = torch.exp(_log_ratio(log_probs, old_log_probs))
    # Not of the clamped ratio: a token that is far away is pulled back most of all.
    penalty = torch.where(selected != 0, kl_coef * (log_probs - old_log_probs).abs(), 0.0)
    return PolicyTerms(-advantages * ratio + penalty, ratio, {"cov_selected_frac": selected != 0})


def gpg(log_probs: Tensor, advantages: Tensor) -> PolicyTerms:
    """L = -A log π: the plain policy gradient, without a ratio. Source: GPG, arXiv:2504.02546."""
    return PolicyTerms(-advantages * log_probs)


def sft(log_probs: Tensor) -> PolicyTerms:
    """L = -log π: imitation, whatever the reward."""
    return PolicyTerms(-log_probs)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "ppo": Policy(
            lambda p, x, c: ppo_clip(
                p,
                x["prox_log_probs"],
                x["advantages"],
                clip_ratio_low=c.clip_ratio_low,
                clip_ratio_high=c.clip_ratio_high,
                clip_ratio_c=c.clip_ratio_c,
            )
        ),
        "gspo": Policy(
            lambda p, x, c: gspo(
                p,
                x["prox_log_probs"],
                x["advantages"],
                x,
                clip_ratio_low=c.clip_ratio_low,
                clip_ratio_high=c.clip_ratio_high,
            ),
            ("prox_log_probs", "advantages", "step", "step_tokens"),
        ),
        "cispo": Policy(
            lambda p, x, c: cispo(
                p,
                x["prox_log_probs"],
                x["advantages"],
                clip_ratio_low=c.clip_ratio_low,
                clip_ratio_high=c.clip_ratio_high,
            )
        ),
        "sapo": Policy(
            lambda p, x, c: sapo(
                p,
                x["prox_log_probs"],
                x["advantages"],
                tau_positive=c.sapo.tau_positive,
                tau_negative=c.sapo.tau_negative,
            )
        ),
        "clip_cov": Policy(
            lambda p, x, c: clip_cov(
                p,
                x["prox_log_probs"],
                x["advantages"],
                x["selected"],
                clip_ratio_low=c.clip_ratio_low,
                clip_ratio_high=c.clip_ratio_high,
            ),
            ("prox_log_probs", "advantages", "selected"),
        ),
        "kl_cov": Policy(
            lambda p, x, c: kl_cov(
                p, x["prox_log_probs"], x["advantages"], x["selected"], kl_coef=c.cov.kl_coef
            ),
            ("prox_log_probs", "advantages", "selected"),
        ),
        "gpg": Policy(lambda p, x, c: gpg(p, x["advantages"]), ("advantages",)),
        "sft": Policy(lambda p, x, c: sft(p), ()),
    }
)


def policy_loss(name: str) -> Policy:
    """The loss registered under `name`, or found at the dotted path `module:NAME`.

    Raises:
        UnknownNameError: neither.
    """
    if name in POLICIES:
        return POLICIES[name]
    hint = f"choose one of {', '.join(POLICIES)} or give the dotted path module:NAME of a Policy"
    try:
        found = resolve(name)
    except ImportError as e:
        raise UnknownNameError(
            f"algorithm.loss.policy is {name!r}, which cannot be imported ({e}); {hint}"
        ) from e
    if not isinstance(found, Policy):
        raise UnknownNameError(
            f"algorithm.loss.policy is {name!r}, a {type(found).__name__}; {hint}"
        )
    return found


def step_mean(values: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """The mean of `values` over the trained tokens of each step, spread over these: [n].

    Args:
        columns: `step`, an id that a step's tokens share, and `step_tokens`, their number.

    Raises:
        ColumnError: not all tokens of a step are here.
    """
    steps, index = torch.unique(columns["step"], return_inverse=True)
    count = torch.bincount(index, minlength=len(steps))
    if (short := count[index] != columns["step_tokens"]).any():
        at = int(short.nonzero()[0])
        raise ColumnError(
            f"a micro-batch holds {int(count[index[at]])} of the "
            f"{int(columns['step_tokens'][at])} tokens of step {int(columns['step'][at])}; a ratio "
            "per sequence needs them all, so the backend must not cut a row in two"
        )
    total = torch.zeros(len(steps), dtype=values.dtype, device=values.device)
    return (total.index_add_(0, index, values) / count)[index]


def select_by_covariance(
    log_probs: Tensor,
    advantages: Tensor,
    mini_batch: Tensor,
    trained: Tensor,
    *,
    how: str,
    config: CovConfig,
    seed: int = 0,
) -> Tensor:
    """Which tokens `clip_cov` or `kl_cov` acts on, [T] float32 of 0 and 1.

        cov_t = (A_t - mean A) · (log π_t - mean log π)     means over the mini-batch's tokens

    `kl_cov`: the `share` highest. `clip_cov`: as many, drawn from those with low < cov < high.
    Source: arXiv:2505.22617. `log_probs` are those of π_prox, at which no ratio is clipped
    yet; the paper takes the π of each step, which is the same for the first mini-batch of a batch.

    Args:
        mini_batch: the mini-batch of each token, int64 [T].
        trained: bool [T]; other tokens are neither counted nor selected.
        seed: of the draw.
    """
    selected = torch.zeros(len(log_probs))
    generator = torch.Generator().manual_seed(seed)
    for number in torch.unique(mini_batch):
        here = ((mini_batch == number) & trained).nonzero().squeeze(-1)
        if not len(here):
            continue
        a, p = advantages[here], log_probs[here]
        cov = (a - a.mean()) * (p - p.mean())
        n = max(1, int(config.share * len(here)))
        if how == "kl_cov":
            chosen = torch.topk(cov, n).indices
        else:
            candidates = ((cov > config.low) & (cov < config.high)).nonzero().squeeze(-1)
            chosen = candidates[torch.randperm(len(candidates), generator=generator)[:n]]
        selected[here[chosen]] = 1.0
    return selected
