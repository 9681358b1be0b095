"""The function behind `/compute_reward`, and what it may return.

`gateway.reward_fn` is for white-box agents that score themselves. It is called with the request's
fields (by convention `data_source, solution_str, ground_truth, extra_info`), may be async, and
returns a number, None (not scored), or a dict with the number under "score" and details beside it.
A function that raises gives an error and no reward: missing is not zero.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import orjson

from stepwell.datapool.own_loop import ENDS, with_own_loop
from stepwell.datapool.types import MAX_REWARD, is_reward
from stepwell.gateway.errors import GatewayError, RequestError

Function: TypeAlias = Callable[..., Any]


class RewardError(GatewayError, RuntimeError, code="reward_failed"):
    """The reward function failed or returned no reward."""


async def compute_reward(function: Function, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`{"reward": number | None, "details": {…}}`. Details, NumPy's too, are JSON.

    Raises:
        RequestError: the fields do not fit the function.
        RewardError: it failed.
    """
    try:
        inspect.signature(function).bind(**fields)
    except TypeError as e:
        raise RequestError(f"the body does not fit gateway.reward_fn: {e}", None) from e
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(**fields)
        else:
            result = await asyncio.to_thread(with_own_loop, lambda: function(**fields))
            if inspect.isawaitable(result):  # of an object, or a partial, that is async
                result = await result
    except ENDS:
        raise
    except BaseException as e:  # foreign code: any failure is a missing score, never 0
        raise RewardError(f"gateway.reward_fn failed ({type(e).__name__}: {e!s:.200})") from e
    details: dict[str, Any] = {}
    reward = result
    if isinstance(result, Mapping):
        details = {str(k): _detail(v) for k, v in result.items() if k != "score"}
        reward = result.get("score")
    if reward is not None:
        if not is_reward(reward):
            raise RewardError(
                f"gateway.reward_fn returned {result!r:.80}; return a number within "
                f"±{MAX_REWARD:g}, None, or a dict with the number under 'score'"
            )
        reward = float(reward)
    return {"reward": reward, "details": details}


def _detail(value: Any) -> Any:
    """A detail as JSON; as text where it is none: what is said beside a score does not cost it."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.Fragment(orjson.dumps(value, option=options))
    except TypeError:
        return ascii(value)
