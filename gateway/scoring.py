"""This module calls `gateway.reward_fn` where a call that never ends holds up nobody else: symbolic
mathematics takes for ever on 9^(9^(9^9)), and lets no other thread run meanwhile.

    score ──► a reward of Stepwell's own ──► a process that is idle, or another one ──► the answer
                  │                             └── SCORE_S over, or nobody waits: killed
                  └── one of the user's: called here, as it may hold a model or a connection

Owns these processes. Does not own what a function may return (`reward.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from stepwell.backends.function_process import START_S, FunctionProcess, StartTimeoutError
from stepwell.datapool.dotted import resolve
from stepwell.gateway.reward import RewardError, compute_reward

SCORE_S = 60.0
"""Seconds of one call, as those of `rollout.reward` by default."""
MOST = min(32, (os.cpu_count() or 1) + 4)
"""Processes at once."""
OWN = "stepwell."
"""Package of the functions that are called in processes."""


class Scoring:
    """Calls the function that `path` leads to. Used in one event loop."""

    def __init__(self, path: str, function: Callable[..., Any]) -> None:
        self._function = function
        module = str(getattr(function, "__module__", ""))
        in_process = module.startswith(OWN) and not inspect.iscoroutinefunction(function)
        n = MOST if in_process else 0
        self._all = [FunctionProcess(f"{__name__}:scorer", path) for _ in range(n)]
        # The one used last comes first: it is warm, and the others need not start at all.
        self._free: asyncio.LifoQueue[FunctionProcess] = asyncio.LifoQueue()
        for process in self._all:
            self._free.put_nowait(process)
        # Of its own: calls that never end would take the event loop's from everything else.
        self._threads = ThreadPoolExecutor(MOST, "gateway-reward")

    async def score(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`compute_reward`'s answer.

        Raises:
            RequestError: the fields do not fit the function.
            RewardError: it failed, or took too long.
        """
        if not self._all:
            return await compute_reward(self._function, fields)
        process = await self._free.get()
        try:
            run = asyncio.get_running_loop().run_in_executor
            answer = await run(self._threads, process.call, SCORE_S, fields)
        except asyncio.CancelledError:  # nobody waits for the call any more
            process.kill()
            raise
        except StartTimeoutError as e:
            raise RewardError(f"gateway.reward_fn was not loaded within {START_S:g} s") from e
        except TimeoutError as e:
            raise RewardError(f"gateway.reward_fn gave no reward within {SCORE_S:g} s") from e
        except (EOFError, OSError) as e:
            raise RewardError("the process of gateway.reward_fn died") from e
        finally:
            self._free.put_nowait(process)
        scored: dict[str, Any] = orjson.loads(answer)
        return scored

    def close(self) -> None:
        """End the processes, and with them the calls under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.close()


def scorer(path: str) -> Callable[[Mapping[str, Any]], bytes]:
    """Return the function of a process: `compute_reward`'s answer as JSON."""
    function = resolve(path)
    return lambda fields: orjson.dumps(asyncio.run(compute_reward(function, fields)))
