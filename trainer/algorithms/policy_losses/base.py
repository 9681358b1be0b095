"""The interface of policy losses: the cost of each token as a pure function of flat tensors.

    log π, columns of the live tokens ──► compute ──► loss [n], ratio, flags
                                                       └─► Σ coef · w · loss (`../losses.py`)

Files beside this one hold a loss or a small family each: its hyper-parameters, its formula and its
entry, a `PolicyLoss`. They compute with the methods of tensors alone, so that a configuration is
read without loading torch. All read r = π/π_prox, cut off at |log r| = 20.

Does not own weights, coefficients, KL and entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from stepwell.trainer.algorithms.options import Options

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log r| beyond this is cut off (verl's bound), so that r stays finite in fp32."""

Columns: TypeAlias = "Mapping[str, Tensor]"
O_co = TypeVar("O_co", bound=Options, covariant=True)


class LossKeys(Protocol[O_co]):
    """Keys of `algorithm.loss` that formulas read (`LossConfig`)."""

    @property
    def clip_ratio_low(self) -> float: ...
    @property
    def clip_ratio_high(self) -> float: ...
    @property
    def clip_ratio_c(self) -> float | None: ...
    @property
    def options(self) -> O_co:
        """The loss's own."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per-token results, each of shape [n]."""

    loss: Tensor
    ratio: Tensor | None = None
    """π/π_prox as the loss used it; None if it uses none."""
    flags: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> bool or float per token, reported as its mean."""


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """All tokens of a batch, before it is cut into micro-batches; each of shape [T]."""

    columns: Columns
    step: Tensor
    """The number of its step, int64."""
    mini_batch: Tensor
    """The mini-batch (one optimizer step) of its step, int64."""
    trained: Tensor
    """bool; other tokens have no loss."""
    shuffled: Callable[[int], Tensor]
    """The numbers below n in random order, seeded by the run and the update."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One policy loss. A plug-in's is named by a dotted path, or by an entry point of the group
    `stepwell.policy_losses`.

    `compute` gets the trained tokens of one micro-batch. It must not reduce over them, except over
    whole steps (`gspo.step_mean`), or the loss depends on how the batch is cut. What needs the
    whole batch is a column that `prepare` makes once, beforehand.
    """

    compute: Callable[[Tensor, Columns, LossKeys[Any]], PolicyTerms]
    """(log π, columns, keys)"""
    columns: tuple[str, ...] = ("prox_log_probs", "advantages")
    """Names of the columns that it reads."""
    options: type[Options] = Options
    """Its own hyper-parameters, the section `algorithm.loss.options`."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Defaults of clip_ratio_low and clip_ratio_high."""
    clip_c: float = 3.0
    """Default of clip_ratio_c."""
    prepare: Callable[[BatchTokens, LossKeys[Any]], dict[str, Tensor]] | None = None
    """Further columns, [T] float32 each, among them any in `columns` that nobody else writes."""
    selects: bool = True
    """`prepare` reads `prox_log_probs` or `weights`, so they must be known before the optimizer
    step."""


def ratio_of(log_probs: Tensor, x: Columns) -> Tensor:
    """r = π/π_prox, [n]."""
    return (log_probs - x["prox_log_probs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped(
    ratio: Tensor, advantages: Tensor, keys: LossKeys[Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), and where the clip is what
    counts (the gradient is 0 there)."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1 - keys.clip_ratio_low, 1 + keys.clip_ratio_high)
    active = bound > free
    flags = {
        "clip_frac_high": active & (advantages > 0),
        "clip_frac_low": active & (advantages < 0),
    }
    return free.maximum(bound), flags
