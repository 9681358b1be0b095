"""Builders and waits for the tests of all rooms, one of each.

step      a Step whose values matter only where a test gives them
group     a Group of trajectories: of Steps, or of rewards alone
until     the wait for what another task or process does
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from stepwell.datapool.types import Group, Step, Trajectory

T = TypeVar("T")


def step(
    prompt_ids: Sequence[int] = (1, 2, 3),
    response_ids: Sequence[int] = (4, 5),
    uid: str = "t",
    index: int = 0,
    *,
    prompt_uid: str = "p",
    **fields: Any,
) -> Step:
    """Return a Step of trajectory `uid`. Log-probs are -0.5 unless the fields say otherwise."""
    known: dict[str, Any] = {
        "prompt_ids": list(prompt_ids),
        "response_ids": list(response_ids),
        "rollout_log_probs": [-0.5] * len(response_ids),
        "trajectory_uid": uid,
        "prompt_uid": prompt_uid,
        "step_index": index,
    }
    return Step(**known | fields)


def step_of(uid: str = "t", prompt_uid: str = "p", index: int = 0, **fields: Any) -> Step:
    """Return a Step of trajectory `uid` of group `prompt_uid`."""
    return step(uid=uid, prompt_uid=prompt_uid, index=index, **fields)


def group(
    *trajectories: Sequence[Step] | Trajectory | Sequence[float | None] | float | None,
    uid: str = "p",
    n_rollouts: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Group:
    """Return a Group of these trajectories.

    Args:
        trajectories: Steps, or the reward of a trajectory's only Step, or the rewards of its Steps.
        fields: of every Step that is made here of a reward.
    """
    made = []
    for k, each in enumerate(trajectories):
        if isinstance(each, Trajectory):
            made.append(each)
            continue
        parts = each if isinstance(each, Sequence) else [each]
        steps = tuple(
            part
            if isinstance(part, Step)
            else step(
                **{"uid": f"{uid}{k}", "prompt_uid": uid, "index": i, "reward": part} | fields
            )
            for i, part in enumerate(parts)
        )
        made.append(Trajectory(steps[0].trajectory_uid, uid, tuple(steps)))
    return Group(uid, tuple(made), n_rollouts, dict(metadata or {}))


async def until(condition: Callable[[], T | Awaitable[T]], timeout_s: float = 60.0) -> T:
    """Return what `condition`, a function or coroutine function, says as soon as that is true.

    It is asked after 5 ms, later each time that another 2 % of the wait have passed, and at least
    ten times a second.

    Raises:
        TimeoutError: it was not within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        began = time.monotonic()
        while True:
            said = condition()
            found: T = await said if inspect.isawaitable(said) else said
            if found:
                return found
            await asyncio.sleep(min(max(0.005, 0.02 * (time.monotonic() - began)), 0.1))
