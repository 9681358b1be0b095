"""KL to the reference policy: estimators, the penalty in the rewards, the coefficient.

    place: loss      loss   += coef · Σ coef_t · KL_t           (`losses.py`; no importance weight)
    place: reward    reward -= coef · KL_t, token by token, before advantages are taken

Either way the reference is the frozen start model, scored at each step's temperature (column
`ref_log_probs`). With `target` the coefficient follows the measured KL; its value is part of
`Progress` and so of the checkpoint. Pure functions, of the methods of tensors alone (a
configuration is read without torch); owns no model and no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field, model_validator

from stepwell.datapool.config import Section
from stepwell.datapool.types import Group
from stepwell.trainer.errors import ColumnError

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
"""Bounds of k3 (verl's): one hopeless token must not outweigh the batch."""


KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


class KlConfig(Section):
    """Penalty for leaving the reference policy, the frozen start model."""

    place: Literal["none", "loss", "reward"] = "none"
    """`loss` adds coef · KL to the loss of every token; `reward` takes it off the rewards."""
    estimator: KlEstimator = "k3"
    """k1, k2, k3 (low variance, never negative), abs; with `+` the value of that estimator and
    the gradient of k2, which is the unbiased one."""
    kl_coef: float = Field(default=1e-3, gt=0)
    """Weight of the penalty; where it starts, with `target_kl`."""
    target_kl: float | None = Field(default=None, gt=0)
    """Adapt the coefficient so that the measured KL stays near this; null = fixed."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Trajectories in which an error of 20 % or more moves the coefficient by 20 %."""

    @model_validator(mode="after")
    def _has_its_place(self) -> KlConfig:
        if self.place == "none" and "place" not in self.model_fields_set:  # else it is turned off
            for name in ("kl_coef", "target_kl", "estimator", "horizon"):
                if (given := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} is {given!r}, but place is not set, and no reference holds the "
                        "policy; set place to 'loss' or 'reward' (or to 'none', to turn it off)"
                    )
        if self.place == "reward" and self.estimator.endswith("+"):
            raise ValueError(
                f"estimator is {self.estimator!r} with place 'reward', where nothing is "
                f"differentiated; write {self.estimator.removesuffix('+')!r}"
            )
        return self


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(π‖π_ref) from samples of π, per token; inputs and result [n].

        k1   log π - log π_ref                     unbiased
        k2   ½ (log π - log π_ref)²                biased, its gradient is not
        k3   r - 1 - log r,  r = π_ref/π           unbiased, ≥ 0; cut off at 10
        abs  |log π - log π_ref|

    With `+` the value is that estimator's and the gradient k2's: E[∇k1] = 0 and E[∇k3] is the
    gradient of KL(π_ref‖π), whereas E[∇k2] = ∇KL(π‖π_ref).

    Sources: Schulman, http://joschu.net/blog/kl-approx.html; on the gradients arXiv:2512.21852.
    """
    log_ratio = log_probs - ref_log_probs
    if estimator.endswith("+"):
        k2 = 0.5 * log_ratio.square()
        return k2 - k2.detach() + _estimate(log_ratio.detach(), estimator.removesuffix("+"))
    return _estimate(log_ratio, estimator)


def _estimate(log_ratio: Tensor, name: str) -> Tensor:
    if name == "k1":
        return log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "abs":
        return log_ratio.abs()
    inverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (inverse.exp() - inverse - 1).clamp(max=MAX_K3)


def next_coef(coef: float, kl: float, trajectories: int, config: KlConfig) -> float:
    """The coefficient after `trajectories` were trained on at a measured KL of `kl`.

        coef · (1 + clip(kl / target - 1, -0.2, 0.2) · trajectories / horizon)

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593 §2.2. Without a
    target it stays what the configuration says; a KL that is not finite moves nothing.
    """
    if config.target_kl is None:
        return config.kl_coef
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / config.target_kl - 1, -0.2), 0.2)
    return coef * (1 + error * trajectories / config.horizon)


def kl_in_reward(
    groups: Sequence[Group],
    lengths: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    config: KlConfig,
    coef: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, float]:
    """-coef · KL_t, the reward that each token earns besides its step's, and the KL measured.

    Args:
        lengths: response tokens of each step, in the order of the groups' `steps`.
        log_probs: log π_prox, [T]; ref_log_probs: [T].
        mask: 0 on tokens that are not trained, [T]: they have no KL. None: all are.

    Returns:
        [T] float64, and the mean over trajectories of their mean KL per token (verl's
        `reward_kl_penalty`).
    """
    sizes = lengths.new_tensor([len(t.steps) for g in groups for t in g.trajectories])
    kl = kl_estimate(log_probs, ref_log_probs, config.estimator).double()
    if len(lengths) != int(sizes.sum()) or len(kl) != int(lengths.sum()):
        raise ColumnError(
            f"{len(kl)} log-probs and {len(lengths)} lengths for {int(sizes.sum())} steps; pass "
            "those of these groups"
        )
    number = sizes.new_tensor(range(len(sizes)))
    trajectory = number.repeat_interleave(sizes).repeat_interleave(lengths)
    if mask is None:
        counts = trajectory.bincount()
    else:
        kl, counts = kl * mask, trajectory.bincount(mask)
    means = (trajectory.bincount(kl) / counts)[counts > 0]
    return -coef * kl, float(means.mean()) if len(means) else 0.0
