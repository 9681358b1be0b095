"""An off-policy method: preset options, or a weight of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.options import Options

if TYPE_CHECKING:
    from torch import Tensor

    from stepwell.trainer.algorithms.off_policy.ratios import Ratios


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
