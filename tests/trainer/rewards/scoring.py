"""One answer scored by one function, without a manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.trainer.rewards.base import RewardFn, call_within, describe, read_result


async def score_with(
    reward: RewardFn,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> float:
    """The score that `reward` gives to one answer. `kwargs` are passed on.

    A sync function that times out cannot be stopped: its thread runs on, its result is ignored.

    Raises:
        RewardCrashError, RewardTimeoutError, RewardValueError: there is no score.
    """
    call = describe(reward, data_source)
    args = (data_source, solution_str, ground_truth, extra_info or {})
    return read_result(await call_within(timeout_s, call, reward, *args, **kwargs), call).score
