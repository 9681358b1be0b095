"""An off-policy method with a hyper-parameter of its own, in one file.

algorithm.off_policy: {method: tempered, options: {power: 0.25}}
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from stepwell.trainer.algorithms.off_policy.base import OffPolicyMethod, Ratios
from stepwell.trainer.algorithms.options import Options


class TemperedOptions(Options):
    """Options of `tempered`: how much of the ratio counts."""

    power: float = Field(default=0.5, ge=0, le=1)
    """Exponent of ρ: 0 weighs nothing, 1 is plain importance sampling."""


def tempered(x: Ratios, options: TemperedOptions) -> Tensor:
    """w = ρ^power on every token, fresh or stale."""
    return (options.power * x.log_ratio).exp()


TEMPERED = OffPolicyMethod("ρ to a power.", weigh=tempered, options=TemperedOptions)
