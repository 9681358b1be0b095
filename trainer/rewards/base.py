"""What a reward function is, how one is found and how one is called."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

from trainer.errors import RewardError
from trainer.rewards.errors import (
    RewardCrashError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)

Score: TypeAlias = float | Mapping[str, Any]

BUILT_IN = {
    "exact_match": "trainer.rewards.exact_match:score",
    "reasoning_gym": "trainer.rewards.reasoning_gym:score",
}


class RewardFn(Protocol):
    """Scores one answer. Sync functions run in a thread, so they must not share state unguarded."""

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any],
        **kwargs: Any,
    ) -> Score | Awaitable[Score]: ...


def load_reward(path: str) -> RewardFn:
    """The reward function named by `path` (see the package's docstring for the forms).

    Raises:
        RewardLoadError: it cannot be found, imported or called like one.
    """
    target = BUILT_IN.get(path, path)
    module_name, _, name = target.rpartition(":" if ":" in target else ".")
    if not module_name or not name:
        raise RewardLoadError(
            f"reward is {path!r}; name a built-in ({', '.join(sorted(BUILT_IN))}), "
            "package.module:function or path/to/file.py:function"
        )
    find = _import_file if module_name.endswith(".py") else _import
    module = find(path, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and f.__module__ == module.__name__ and n[0] != "_"
        )
        raise RewardLoadError(
            f"reward is {path!r}, but {module_name} has no function {name!r}; "
            f"it has {', '.join(functions) or 'none'}"
        )
    try:
        inspect.signature(function).bind("data_source", "solution", "answer", {})
    except TypeError as e:
        raise RewardLoadError(
            f"reward is {path!r}, which cannot be called as "
            f"{name}(data_source, solution_str, ground_truth, extra_info): {e}"
        ) from e
    return cast(RewardFn, function)


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
    """The score that `reward` gives. `kwargs` are passed on.

    A sync function that times out cannot be stopped: its thread runs on, its result is ignored.

    Raises:
        RewardCrashError, RewardTimeoutError, RewardValueError: there is no score.
    """
    call = f"reward {_name(reward)} on {data_source!r}"
    args = (data_source, solution_str, ground_truth, extra_info or {})
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result: Any
            if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
                getattr(reward, "__call__", None)  # noqa: B004 - an object with async __call__
            ):
                result = await cast(Awaitable[Score], reward(*args, **kwargs))
            else:
                result = await asyncio.to_thread(reward, *args, **kwargs)
                if inspect.isawaitable(result):
                    result = await result
    except RewardError:
        raise
    except Exception as e:  # foreign code: any failure is a missing score, never 0
        if isinstance(e, TimeoutError) and limit.expired():
            raise RewardTimeoutError(
                f"{call} gave no score within {timeout_s:g} s; make it faster or raise the limit"
            ) from e
        raise RewardCrashError(f"{call} raised {type(e).__name__}: {e!s:.200}") from e
    return _number(result, call)


def _number(result: Any, call: str) -> float:
    value = result.get("score") if isinstance(result, Mapping) else result
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardValueError(
            f"{call} returned {result!r:.80}; return a finite number, or a dict with one under "
            "'score'"
        )
    return float(value)


def _name(reward: RewardFn) -> str:
    return getattr(reward, "__qualname__", type(reward).__qualname__)


def _import(path: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as e:  # any error of foreign code at import
        raise RewardLoadError(
            f"reward is {path!r}, whose module {module_name} cannot be imported "
            f"({type(e).__name__}: {e})"
        ) from e


def _import_file(path: str, file: str) -> ModuleType:
    where = Path(file).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"stepwell_reward_{where.stem}", where)
    if spec is None or spec.loader is None or not where.is_file():
        raise RewardLoadError(f"reward is {path!r}, but there is no file {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        del sys.modules[spec.name]
        raise RewardLoadError(
            f"reward is {path!r}, but {where} cannot be imported ({type(e).__name__}: {e})"
        ) from e
    return module
