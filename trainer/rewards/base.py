"""What a reward function is, how one is found and how one is called."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from stepwell.datapool.types import MAX_REWARD, is_reward
from stepwell.trainer.errors import (
    RewardCrashError,
    RewardError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)
from stepwell.trainer.threads import function_name, in_thread

Score: TypeAlias = float | Mapping[str, Any]

BUILT_IN = {
    "dapo": "stepwell.trainer.rewards.maths:dapo",
    "deepscaler": "stepwell.trainer.rewards.maths:deepscaler",
    "exact_match": "stepwell.trainer.rewards.text:exact_match",
    "f1": "stepwell.trainer.rewards.text:f1",
    "gpqa": "stepwell.trainer.rewards.text:gpqa",
    "llm_judge": "stepwell.trainer.rewards.judge:LLMJudge",
    "math": "stepwell.trainer.rewards.maths:score",
    "reasoning_gym": "stepwell.trainer.rewards.reasoning_gym:score",
    "remote": "stepwell.trainer.rewards.remote:RemoteReward",
}
BOXED = "boxed_"
BOXED_FORM = {
    "dapo": "Answer: %s",
    "deepscaler": "</think>\\boxed{%s}",
    "math": "\\boxed{%s}",
}
"""Where these look for the answer by themselves."""


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


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One answer to be scored."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    group: str = ""
    """Samples of one group are told by it: the prompt_uid."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score and what the function said beside it."""

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a dict result: metrics, where they are numbers."""


def load_reward(path: str, kwargs: Mapping[str, Any] | None = None) -> RewardFn:
    """The reward function named by `path` (see the package's docstring for the forms).

    Args:
        kwargs: passed on with every call. Of a class, `path` gives an instance made with them.

    Raises:
        RewardLoadError: it cannot be found, imported or called like one.
    """
    boxed = path.startswith(BOXED) and path.removeprefix(BOXED) in BUILT_IN
    plain = path.removeprefix(BOXED) if boxed else path
    target = BUILT_IN.get(plain, plain)
    module_name, _, name = target.rpartition(":" if ":" in target else ".")
    if not module_name or not name:
        raise RewardLoadError(
            f"reward is {path!r}; name a built-in ({', '.join(sorted(BUILT_IN))}), "
            "package.module:function or path/to/file.py:function"
        )
    find = _import_file if module_name.endswith(".py") else _import
    module = find(path, module_name)
    function: Any = getattr(module, name, None)
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
    if inspect.isclass(function):
        try:
            function = function(**(kwargs or {}))
        except Exception as e:  # foreign code, or our own refusing its arguments
            raise RewardLoadError(
                # Their names: the values may hold a key (`headers`).
                f"reward is {path!r}, which cannot be made with kwargs "
                f"{', '.join(kwargs or ()) or '(none)'} ({type(e).__name__}: {e})"
            ) from e
    elif kwargs:
        function = partial(function, **kwargs)
    try:
        inspect.signature(function).bind("data_source", "solution", "answer", {})
    except TypeError as e:
        raise RewardLoadError(
            f"reward is {path!r}, which cannot be called as "
            f"{name}(data_source, solution_str, ground_truth, extra_info): {e}"
        ) from e
    reward = cast(RewardFn, function)
    return _Boxed(reward, BOXED_FORM.get(plain, "%s")) if boxed else reward


class _Boxed:
    """Scores what stands in the answer's last \\boxed{}; an answer without one is empty."""

    def __init__(self, reward: RewardFn, form: str) -> None:
        self._reward = reward
        self._form = form

    def __call__(
        self, data_source: str, solution_str: str, *args: Any, **kwargs: Any
    ) -> Score | Awaitable[Score]:
        answer = self._form % (last_boxed(solution_str) or "")
        return self._reward(data_source, answer, *args, **kwargs)

    async def aclose(self) -> None:
        await close(self._reward)


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` (or `\\fbox{…}`) of `text`; None: there is none, or its
    braces never close."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


async def close(reward: RewardFn) -> None:
    """Give back what a reward object holds (connections)."""
    aclose = getattr(reward, "aclose", None)
    if aclose is not None:
        await aclose()


async def call_within(timeout_s: float, call: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """What `function`, sync or async, returns; `call` describes the call in errors.

    Raises:
        RewardCrashError, RewardTimeoutError
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if is_async(function):
                return await function(*args, **kwargs)
            result = await in_thread(function, *args, **kwargs)
            return await result if inspect.isawaitable(result) else result
    except Exception as e:  # foreign code: any failure is a missing score, never 0
        if isinstance(e, TimeoutError) and limit.expired():
            # Notes of the cancellation: what the function waited for (`remote.py`).
            raise timed_out(call, timeout_s, getattr(e.__cause__, "__notes__", ())) from e
        raise crashed(call, e) from e


def is_async(function: Any) -> bool:
    function = function.func if isinstance(function, partial) else function
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def read_result(result: Any, call: str, key: str = "score") -> RewardResult:
    """`result` of a reward function as a score.

    Raises:
        RewardValueError: it is none.
    """
    value = result.get(key) if isinstance(result, Mapping) else result
    if isinstance(value, np.generic):
        value = value.item()
    if not is_reward(value):
        raise RewardValueError(
            f"{call} returned {result!r:.80}; return a number within ±{MAX_REWARD:g}, or a dict "
            f"with one under {key!r}"
        )
    extra = {k: v for k, v in result.items() if k != key} if isinstance(result, Mapping) else {}
    return RewardResult(float(value), extra)


def read_results(results: Any, n: int, call: str, key: str) -> list[RewardResult | RewardError]:
    """What a function that scores lists returned: one result each, None where one is missing.

    Raises:
        RewardValueError: it is no sequence of `n`.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != n:
        raise RewardValueError(
            f"{call} returned {results!r:.80} for {n} answers; return a list of {n} scores"
        )
    read: list[RewardResult | RewardError] = []
    for result in results:
        try:
            read.append(read_result(result, call, key))
        except RewardValueError as e:
            read.append(e)
    return read


def describe(reward: Any, data_source: str) -> str:
    function = reward.func if isinstance(reward, partial) else reward
    return f"reward {function_name(function)} on {data_source!r}"


def crashed(call: str, error: BaseException) -> RewardError:
    """`error` of a reward function, as ours."""
    if isinstance(error, RewardError):
        return error
    return RewardCrashError(f"{call} raised {type(error).__name__}: {error!s:.200}")


def timed_out(call: str, timeout_s: float, why: Sequence[str] = ()) -> RewardTimeoutError:
    because = f" ({'; '.join(why)})" if why else ""
    return RewardTimeoutError(
        f"{call} gave no score within {timeout_s:g} s{because}; make it faster or raise the limit"
    )


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
    except Exception as e:  # the user's own file: it may raise anything
        del sys.modules[spec.name]
        raise RewardLoadError(
            f"reward is {path!r}, but {where} cannot be imported ({type(e).__name__}: {e})"
        ) from e
    return module
