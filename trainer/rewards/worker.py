"""A process of its own for reward functions, so that one that hangs can be killed.

Owns what a call's end means for its score; `manager.py` decides what is called. The process imports
the function as the trainer did (`load_reward`). Does not own the process
(`backends/function_process.py`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from stepwell.backends.function_process import START_S, FunctionProcess, StartTimeoutError
from stepwell.trainer.errors import RewardCrashError, RewardError, RewardLoadError
from stepwell.trainer.rewards.base import crashed, timed_out
from stepwell.trainer.rewards.loading import load_reward


class RewardProcess(FunctionProcess):
    """Runs calls of one reward function, one at a time; threads may share it.

    Args:
        path: as for `load_reward`, and so is `kwargs`.
    """

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        super().__init__(f"{__name__}:scorer", path, dict(kwargs))
        self._path = path

    def score(self, timeout_s: float, call: str, *args: Any) -> Any:
        """Return what the function returns for `args`; blocks.

        Raises:
            RewardLoadError, RewardCrashError, RewardTimeoutError
        """
        try:
            return self.call(timeout_s, call, *args)
        except RewardError:
            raise
        except StartTimeoutError as e:
            raise RewardLoadError(
                f"reward {self._path!r} was not loaded within {START_S:g} s"
            ) from e
        except TimeoutError as e:
            raise timed_out(call, timeout_s) from e
        except (EOFError, OSError) as e:
            raise RewardCrashError(f"{call}: its process died") from e
        except Exception as e:  # what cannot be pickled fails in many ways
            raise crashed(call, e) from e


def scorer(path: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of the process.

    Raises:
        RewardLoadError
    """
    reward = load_reward(path, kwargs)
    loop = asyncio.Runner()
    loop.get_loop()  # a sync function may run it, too

    def score(call: str, *args: Any) -> Any:
        try:
            result = reward(*args)
            return loop.run(_wait(result)) if inspect.isawaitable(result) else result
        except Exception as e:  # foreign code: any failure is a missing score
            raise crashed(call, e) from e

    return score


async def _wait(result: Any) -> Any:
    return await result
