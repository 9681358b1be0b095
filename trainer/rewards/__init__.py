"""Rewards: functions that score an answer.

A reward function takes `(data_source, solution_str, ground_truth, extra_info, **kwargs)` and
returns a number, or a dict with the number under "score"; it may be async. It is named by

- a built-in's name: `reasoning_gym`, `exact_match`
- a dotted path: `package.module:function`
- a file: `path/to/file.py:function`

Owns: finding the function, running it under a time limit, telling a score from a failure. Does not
own: what happens to a trajectory without a score (`trainer/scoring.py`).
"""

from trainer.errors import RewardError
from trainer.rewards.base import BUILT_IN, RewardFn, load_reward, score_with
from trainer.rewards.errors import (
    RewardCrashError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)

__all__ = [
    "BUILT_IN",
    "RewardCrashError",
    "RewardError",
    "RewardFn",
    "RewardLoadError",
    "RewardTimeoutError",
    "RewardValueError",
    "load_reward",
    "score_with",
]
