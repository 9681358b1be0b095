"""Pass@k: only the best rollout of a group is taught, by how much better it was than the second.

    A = (max G - second G) / (std + ε)      of the best trajectory; 0 of all others

What n rollouts together reach depends on their best alone; a group whose two best are equal would
have reached it without either, so it teaches nothing. With several units of credit a trajectory's
G is their mean, and all its units share its A.

Source: Pass@k training, arXiv:2503.19595, in verl's form; std is unbiased, ε as in GRPO.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from stepwell.trainer.algorithms.advantages.base import Array, Batch, Estimate, Estimator, Returns
from stepwell.trainer.algorithms.advantages.group import EPSILON
from stepwell.trainer.algorithms.options import Options


class PassAtKOptions(Options):
    """Scale of the lead of the best."""

    norm_adv_by_std: bool = Field(default=True)
    """Divide by the std of the group's returns (verl's `norm_adv_by_std_in_grpo`)."""


def grpo_passk(b: Batch, options: PassAtKOptions) -> Estimate:
    """The lead of the group's best rollout over the second; 0 for the others."""

    def lead(r: Returns) -> Array:
        if r.settled is not None:
            return r.settled
        best = int(np.argmax(r.means))
        second, first = np.partition(r.means, -2)[-2:]
        scale = float(np.std(r.means, ddof=1)) + EPSILON if options.norm_adv_by_std else 1.0
        return np.where(r.trajectory == best, (first - second) / scale, 0.0)

    return Estimate(b.by_group(lead))


GRPO_PASSK = Estimator(grpo_passk, options=PassAtKOptions, group_baseline=True)
