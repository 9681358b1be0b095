"""This module finds a reward function by its name and makes it callable in one form, whichever
framework it was written for.

    load_reward(path) ──► function(data_source, solution_str, ground_truth, extra_info)
                            └─ or, of slime's signature, `SlimeReward`, called with samples

Sources of the forms: verl 0.9, `docs/preparation/reward_function.rst`, `NaiveRewardManager` and
`BatchRewardManager`, which pass arguments by name; slime 0.3.1, `slime/rollout/rm_hub`.

Owns names and signatures. Does not own the calls (`manager.py`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, cast

from stepwell.datapool.dotted import module_of
from stepwell.datapool.own_loop import ENDS
from stepwell.trainer.errors import RewardLoadError
from stepwell.trainer.rewards.base import RewardFn, Score, close, last_boxed
from stepwell.trainer.rewards.slime import SlimeReward
from stepwell.trainer.threads import function_name

_HERE = "stepwell.trainer.rewards."
BUILT_IN = {
    "code": f"{_HERE}code:CodeReward",
    "dapo": f"{_HERE}maths:dapo",
    "deepscaler": f"{_HERE}maths:deepscaler",
    "exact_match": f"{_HERE}text:exact_match",
    "f1": f"{_HERE}text:f1",
    "geo3k": f"{_HERE}maths:geo3k",
    "gpqa": f"{_HERE}text:gpqa",
    "gsm8k": f"{_HERE}text:gsm8k",
    "llm_judge": f"{_HERE}judge:LLMJudge",
    "math": f"{_HERE}maths:score",
    "random": f"{_HERE}text:coin",
    "reasoning_gym": f"{_HERE}reasoning_gym:score",
    "remote": f"{_HERE}remote:RemoteReward",
    "remote_rm": f"{_HERE}remote:RemoteRM",
    "reward_model": f"{_HERE}reward_model:RewardModel",
    "search_r1": f"{_HERE}text:search_r1",
}
NOT_OURS = {
    "ifbench": "it is computed by allenai/IFBench's own code; install that, and name a function "
    "that calls its evaluation_lib",
}
"""Names that slime's `--rm-type` has, and what to do instead."""
BOXED = "boxed_"
BOXED_FORM = {
    "dapo": "Answer: %s",
    "deepscaler": "</think>\\boxed{%s}",
    "math": "\\boxed{%s}",
}
"""Forms in which these functions look for the answer by themselves."""
DEFAULT_NAME = "compute_score"
"""Name of a file's function if none is given, as in verl."""
TOKENIZER = "reward_model_tokenizer"
"""A parameter that verl's functions of generative reward models have: kwargs name its folder."""
_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
_MANY = tuple(f"{name}s" for name in _ONE)
"""The names that verl passes these arguments by; the second, of its batch manager."""


def load_reward(path: str, kwargs: Mapping[str, Any] | None = None) -> RewardFn:
    """The reward function named by `path` (see the package's docstring for the forms).

    Args:
        kwargs: passed on with every call. Of a class, `path` gives an instance made with them.

    Raises:
        RewardLoadError: it cannot be found, imported or called like one.
    """
    boxed = path.startswith(BOXED) and path.removeprefix(BOXED) in {**BUILT_IN, **NOT_OURS}
    plain = path.removeprefix(BOXED) if boxed else path
    if plain in NOT_OURS:
        raise RewardLoadError(f"reward is {path!r}, which is not built in: {NOT_OURS[plain]}")
    target = BUILT_IN.get(plain, plain)
    if target.endswith(".py"):
        target = f"{target}:{DEFAULT_NAME}"
    module_name, _, name = target.rpartition(":" if ":" in target else ".")
    if not module_name or not name:
        raise RewardLoadError(
            f"reward is {path!r}; name a built-in ({', '.join(sorted(BUILT_IN))}), "
            "package.module:function or path/to/file.py:function"
        )
    module = _import(path, module_name)
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
        except ENDS:
            raise
        except BaseException as e:  # foreign code, or our own refusing its arguments
            raise RewardLoadError(
                # Their names: the values may hold a key (`headers`).
                f"reward is {path!r}, which cannot be made with kwargs "
                f"{', '.join(kwargs or ()) or '(none)'} ({type(e).__name__}: {e})"
            ) from e
        kwargs = None
    reward = _in_our_form(path, name, function, kwargs or {})
    return _Boxed(reward, BOXED_FORM.get(plain, "%s")) if boxed else reward


def _in_our_form(path: str, name: str, function: Any, kwargs: Mapping[str, Any]) -> RewardFn:
    """`function`, to be called with our four arguments in order; or as `SlimeReward` is.

    Raises:
        RewardLoadError: it takes others.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters)
    if isinstance(path_of_one := kwargs.get(TOKENIZER), str):
        kwargs = {**kwargs, TOKENIZER: _tokenizer(path, path_of_one)}
    bound = partial(function, **kwargs) if kwargs else function

    def binds(*args: Any, **named: Any) -> bool:
        try:
            signature.bind(*args, **named, **kwargs)
        except TypeError:
            return False
        return True

    for names in (_ONE, _MANY):
        if any(name in parameters for name in names):
            if binds(*names) and all(
                names.index(p) == at for at, p in enumerate(parameters) if p in names
            ):
                return cast(RewardFn, bound)
            if binds(**dict.fromkeys(names)):
                return cast(RewardFn, _ByName(bound, names))
            break
    else:
        if binds(*_ONE):
            return cast(RewardFn, bound)
        if _takes_two(signature):
            return cast(RewardFn, SlimeReward(function, kwargs))
    raise RewardLoadError(
        f"reward is {path!r}, which cannot be called as {name}({', '.join(_ONE)}), by these names "
        f"or as {name}(args, sample): its parameters are {signature}, and the kwargs "
        f"{', '.join(kwargs) or '(none)'}"
    )


def _tokenizer(path: str, folder: str) -> Any:
    try:
        # Seconds to import: only for those who use it.
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as e:
        raise RewardLoadError(
            f"reward is {path!r}, whose kwargs say {TOKENIZER}={folder!r}, which cannot be loaded "
            f"({e!s:.200})"
        ) from e


def _takes_two(signature: inspect.Signature) -> bool:
    try:
        signature.bind("args", "sample")
    except TypeError:
        return False
    return True


class _Wrapped:
    """A reward that is called otherwise; errors name the function itself."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward
        self.__qualname__ = function_name(reward.func if isinstance(reward, partial) else reward)

    async def aclose(self) -> None:
        await close(self._reward)


class _ByName(_Wrapped):
    """Passes the arguments by name, as verl does: in whatever order the function has them."""

    def __init__(self, reward: Any, names: tuple[str, ...]) -> None:
        super().__init__(reward)
        self._names = names

    def __call__(self, *args: Any) -> Score | Awaitable[Score]:
        result: Score | Awaitable[Score] = self._reward(**dict(zip(self._names, args, strict=True)))
        return result


class _Boxed(_Wrapped):
    """Scores what stands in the answer's last \\boxed{}; an answer without one is empty."""

    def __init__(self, reward: RewardFn, form: str) -> None:
        super().__init__(reward)
        self._form = form

    def __call__(
        self, data_source: str, solution_str: str, *args: Any, **kwargs: Any
    ) -> Score | Awaitable[Score]:
        answer = self._form % (last_boxed(solution_str) or "")
        result: Score | Awaitable[Score] = self._reward(data_source, answer, *args, **kwargs)
        return result


def _import(path: str, module_name: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            return module_of(module_name)
        return importlib.import_module(module_name)
    except ENDS:
        raise
    except BaseException as e:  # any error of foreign code at import
        raise RewardLoadError(
            f"reward is {path!r}, whose module {module_name} cannot be imported "
            f"({type(e).__name__}: {e})"
        ) from e
