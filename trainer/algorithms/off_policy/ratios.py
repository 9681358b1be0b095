"""Ratios of the policy of now to the one that sampled, and reductions over their steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""|log ρ| beyond this is cut off, so that ρ and ρ² stay finite in fp32."""


@dataclass(frozen=True, slots=True)
class Steps:
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

    def any(self, flags: Tensor) -> Tensor:
        return self.sum(flags.float()) > 0

    def shared(self, values: Tensor, granularity: str) -> Tensor:
        """log ρ at the granularity, spread over the tokens that share it: [T] -> [T]."""
        if granularity in ("token", "none"):
            return values
        total = self.mean(values) if granularity == "step" else self.sum(values)
        return self.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).float())


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios and lags that a method weighs the tokens of a batch by."""

    log_ratio: Tensor
    """log ρ = log π_prox - log μ, [T] fp32; 0 where μ is unknown or the token is not trained."""
    steps: Steps
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
