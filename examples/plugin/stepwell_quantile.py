"""An advantage with a hyper-parameter of its own, in one file.

algorithm: {adv_estimator: quantile, adv_options: {at: 0.75}}
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stepwell.trainer.algorithms.advantages.base import (
    Array,
    Batch,
    Estimate,
    Estimator,
    Returns,
)
from stepwell.trainer.algorithms.options import Options


class QuantileOptions(Options):
    """Options of `quantile`: the return of its group that a rollout is compared with."""

    at: float = Field(default=0.5, ge=0, le=1)
    """The quantile of the group's returns that is the baseline; 0.5 is the median."""


def quantile(b: Batch, options: QuantileOptions) -> Estimate:
    """A = G - a quantile of the group's returns."""

    def above(r: Returns) -> Array:
        return np.asarray(r.values - np.quantile(r.means, options.at))

    return Estimate(b.by_group(above))


QUANTILE = Estimator(quantile, options=QuantileOptions, group_baseline=True)
