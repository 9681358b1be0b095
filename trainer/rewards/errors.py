"""Why a score is missing.

::

    stepwell.trainer.errors.RewardError
    ├── RewardLoadError        the configured reward is no reward function
    ├── RewardCrashError       it raised
    ├── RewardTimeoutError     it took too long
    └── RewardValueError       it returned something that is no score

A missing score is never 0.0: whoever catches a `RewardError` retries, or leaves the trajectory out.
"""

from __future__ import annotations

from stepwell.trainer.errors import RewardError


class RewardLoadError(RewardError):
    """The configured reward is no reward function."""


class RewardCrashError(RewardError, RuntimeError):
    """The reward function raised."""


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function took too long."""


class RewardValueError(RewardError):
    """The reward function returned something that is no score."""
