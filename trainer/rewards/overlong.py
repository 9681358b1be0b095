"""DAPO's soft over-long punishment, whoever scored the trajectory; arXiv:2503.14476 §3.4."""

from __future__ import annotations

from dataclasses import replace

from stepwell.datapool.types import Trajectory, mapping_in, superseded
from stepwell.trainer.config import OverlongBufferConfig

OVERLONG = "overlong_reward"
"""Key under which a trajectory's metadata has its penalty."""


def overlong_penalty(length: int, config: OverlongBufferConfig) -> float:
    """For a response of |y| tokens, times `penalty_factor`::

        R(y) = 0                                      |y| ≤ L_max − L_cache
             = ((L_max − L_cache) − |y|) / L_cache    L_max − L_cache < |y| ≤ L_max
             = −1                                     L_max < |y|

    Args:
        length: |y|, sampled tokens of the trajectory, all its steps together but for replies that
            nobody saw.
        config: L_max is `max_resp_len`, L_cache is `len`.
    """
    excess = length - (config.max_resp_len - config.len)
    return -config.penalty_factor * min(max(excess / config.len, 0.0), 1.0)


def punished(trajectory: Trajectory, config: OverlongBufferConfig, extra: str) -> Trajectory:
    """A scored trajectory with the penalty on its last step and under `extra`."""
    *earlier, last = trajectory.steps
    unseen = superseded(trajectory.steps)
    seen = (len(s.response_ids) for s in trajectory.steps if s.step_index not in unseen)
    penalty = overlong_penalty(sum(seen), config)
    penalties = {OVERLONG: penalty, "overlong": penalty < 0}
    known = mapping_in(trajectory.metadata, extra)
    metadata = {**trajectory.metadata, extra: {**known, **penalties}}
    steps = (*earlier, replace(last, reward=(last.reward or 0.0) + penalty))
    return replace(trajectory, steps=steps, metadata=metadata)
