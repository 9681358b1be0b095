"""Reward functions: their signature, the call of one and the reading of its result."""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.types import MAX_REWARD, Trajectory, is_reward
from stepwell.trainer.errors import (
    RewardCrashError,
    RewardError,
    RewardTimeoutError,
    RewardValueError,
    shown,
)
from stepwell.trainer.threads import function_name, in_thread

Score: TypeAlias = float | Mapping[str, Any]


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
    trajectory: Trajectory | None = None
    """Trajectory as sampled, for functions that want tokens, and for the number of steps."""
    answer: int = -1
    """Place of the step whose response is `solution_str`."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score and what the function said beside it."""

    score: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a dict result: metrics, where they are numbers."""
    steps: tuple[float | None, ...] | None = None
    """A reward for each step, of which `score` is the sum; None: the score is the outcome's."""


def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{…}` (or `\\fbox{…}`) of `text`; None: there is none,
    or its braces never close."""
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


def question_of(task: Mapping[str, Any]) -> str:
    """The task's question, or its conversation as lines."""
    if "question" in task:
        return str(task["question"])
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in task.get("messages") or ())


async def close(reward: RewardFn) -> None:
    """Give back what a reward object holds (connections)."""
    aclose = getattr(reward, "aclose", None)
    if aclose is not None:
        await aclose()


async def call_within(timeout_s: float, call: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `function`, sync or async, and return its result; `call` describes the call in errors.

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
    except ENDS:
        raise
    except BaseException as e:  # foreign code: any failure is a missing score, never 0
        if isinstance(e, TimeoutError) and limit.expired():
            # Notes of the cancellation: what the function waited for (`remote.py`).
            raise timed_out(call, timeout_s, getattr(e.__cause__, "__notes__", ())) from e
        raise crashed(call, e) from e


def is_async(function: Any) -> bool:
    function = function.func if isinstance(function, partial) else function
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def read_result(
    result: Any, call: str, key: str = "score", n_steps: int | None = None
) -> RewardResult:
    """`result` of a reward function as a score.

    Args:
        n_steps: of the trajectory; None: not known.

    Raises:
        RewardValueError: it is none, or has not one for each step.
    """
    value: Any = result.get(key) if isinstance(result, Mapping) else result
    if hasattr(value, "tolist"):  # NumPy's and torch's
        value = value.tolist()
    extra = {k: v for k, v in result.items() if k != key} if isinstance(result, Mapping) else {}
    if is_reward(value):
        return RewardResult(float(value), extra)
    steps = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    scored = [r for r in steps if r is not None]
    if not scored or not all(map(is_reward, scored)) or not is_reward(sum(scored)):
        raise RewardValueError(
            f"{call} returned {_named(result)}; return a number within ±{MAX_REWARD:g}, or a dict "
            f"with one under {key!r}; or a list of one per step, None where a step has none"
        )
    if n_steps not in (None, len(steps)):
        raise RewardValueError(
            f"{call} returned {len(steps)} rewards for {n_steps} steps; return one per step (per "
            "item of extra_info['responses']), None where a step has none, or one number"
        )
    return RewardResult(
        float(sum(scored)), extra, tuple(None if r is None else float(r) for r in steps)
    )


def read_results(
    results: Any, n_steps: Sequence[int | None], call: str, key: str
) -> list[RewardResult | RewardError]:
    """Read the return value of a function that scores lists: one result each, an error where one is
    missing.

    Args:
        n_steps: of each trajectory.

    Raises:
        RewardValueError: it is no sequence of as many.
    """
    n = len(n_steps)
    if hasattr(results, "tolist"):
        results = results.tolist()
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != n:
        raise RewardValueError(
            f"{call} returned {_named(results)} for {n} answers; return a list of {n} scores"
        )
    read: list[RewardResult | RewardError] = []
    for result, steps in zip(results, n_steps, strict=True):
        try:
            read.append(read_result(result, call, key, steps))
        except RewardValueError as e:
            read.append(e)
    return read


def _named(result: Any) -> str:
    """What a function returned, for a message."""
    try:
        return f"{result!r:.80}"
    except Exception:  # noqa: BLE001 - a foreign object, or an integer of thousands of digits
        return f"a value of type {type(result).__name__}"


def describe(reward: Any, data_source: str) -> str:
    function = reward.func if isinstance(reward, partial) else reward
    return f"reward {function_name(function)} on {data_source!r}"


def crashed(call: str, error: BaseException) -> RewardError:
    """`error` of a reward function, as ours."""
    if isinstance(error, RewardError):
        return error
    why = f": {text:.200}" if (text := shown(error)) else ""
    return RewardCrashError(f"{call} raised {type(error).__name__}{_place(error)}{why}")


def _place(error: BaseException) -> str:
    """The last line of the user's own code that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = ("site-packages", sysconfig.get_path("stdlib"))
    own = [f for f in frames if not any(folder in f.filename for folder in libraries)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def timed_out(call: str, timeout_s: float, why: Sequence[str] = ()) -> RewardTimeoutError:
    because = f" ({'; '.join(why)})" if why else ""
    return RewardTimeoutError(
        f"{call} gave no score within {timeout_s:g} s{because}; make it faster or raise the limit"
    )
