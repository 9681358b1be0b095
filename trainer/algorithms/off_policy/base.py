"""An off-policy method, preset options or a weight of its own, and the ratios that it weighs by.

Computes with the methods of tensors alone, so that a configuration is read without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.options import Options

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0
"""|log ρ| beyond this is cut off, so that ρ and ρ² stay finite in fp32."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of the policy of now to the one that sampled, and lags, by which a method weighs the
    tokens of a batch; reductions over the trained tokens of each step.
    """

    log_ratio: Tensor
    """log ρ = log π_prox - log μ, [T] fp32; 0 where μ is unknown or the token is not trained."""
    lengths: Tensor
    """Response tokens of each step, int64, [S]."""
    trained: Tensor
    """bool, [T]."""
    lag: Tensor
    """Lag in publications, [S]."""
    beyond: Tensor
    """Lag beyond the threshold, at least 0, [S]."""
    off_policy: Tensor
    """bool, [S]: the lag is beyond the threshold."""
    known: Tensor
    """bool, [T]: μ is known, of the whole step."""
    advantages: Tensor | None
    """[T]; None if nobody gave them."""

    @classmethod
    def of(
        cls,
        prox: Tensor,
        mu: Tensor,
        lengths: Tensor,
        lag: Tensor,
        staleness_threshold: float,
        advantages: Tensor | None,
        trained: Tensor,
    ) -> Ratios:
        """Ratios of log-probs [T], which may be those of single tokens as well as of a batch."""
        lost = _per_step((~mu.isfinite() & trained).double(), lengths) > 0
        known = ~lost.repeat_interleave(lengths, output_size=len(mu))
        log_ratio = (prox - mu).where(known & trained, 0.0)
        return cls(
            log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            lengths,
            trained,
            lag,
            beyond=(lag - staleness_threshold).clamp(min=0),
            off_policy=lag > staleness_threshold,
            known=known,
            advantages=advantages,
        )

    @property
    def count(self) -> Tensor:
        """Trained tokens of each step, float64, [S]."""
        return self.sum(self.trained)

    def spread(self, per_step: Tensor) -> Tensor:
        """[S] -> [T]."""
        return per_step.repeat_interleave(self.lengths, output_size=len(self.log_ratio))

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [S], float64."""
        return _per_step(values.double().where(self.trained, 0.0), self.lengths)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [S], float64; 0 without a trained token."""
        return self.sum(values) / self.count.clamp(min=1)

    def any(self, flags: Tensor) -> Tensor:
        """[T] -> bool [S]."""
        return self.sum(flags) > 0

    def shared(self, granularity: str) -> Tensor:
        """log ρ at the granularity, spread over the tokens that share it, [T]."""
        x = self.log_ratio
        if granularity in ("token", "none"):
            return x
        total = self.mean(x) if granularity == "step" else self.sum(x)
        return self.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).float())


def _per_step(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums of float64 `values` [T] over each step, [S]. T is given to each `repeat_interleave`:
    else a GPU is waited for."""
    numbers = lengths.new_ones(len(lengths)).cumsum(0) - 1
    total = values.new_zeros(len(lengths))
    step = numbers.repeat_interleave(lengths, output_size=len(values))
    return total.index_add_(0, step, values)


@dataclass(frozen=True, slots=True)
class OffPolicyMethod:
    """One method. A plug-in's is named by a dotted path, or by an entry point of the group
    `stepwell.off_policy`.
    """

    about: str
    """One-line description."""
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `algorithm.off_policy` that it sets; what is given beside it wins."""
    weigh: Callable[[Ratios, Any], Tensor] | None = None
    """(ratios, options): the weight of every token, [T], in place of `granularity`, `cap` and
    `decay`. Masks that are set hold beside it, and a step without behaviour log-probs is
    weighed by `missing`."""
    options: type[Options] = Options
    """Hyper-parameters of `weigh`, the section `algorithm.off_policy.options`."""
