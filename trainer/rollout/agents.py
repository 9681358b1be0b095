"""This module finds the agent that `rollout.agent` names, so that one that cannot be run is refused
before anything is started.

Owns what an agent is and the errors of one that is none. Does not own running it (`worker.py`).
Loads neither torch nor Ray, unless the agent's own module does.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

from stepwell.datapool import dotted
from stepwell.datapool.own_loop import ENDS
from stepwell.trainer.config.environment import OpenEnvConfig
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.errors import RolloutError, ToolConfigError
from stepwell.trainer.rollout.harness import Harness

Agent: TypeAlias = Callable[
    [Mapping[str, Any], str, str], Awaitable[float | list[float | None] | None]
]

WHERE = "package.module:function or path/to/file.py:function"
FORM = "async def agent(task, base_url, api_key) -> float | None"
GENERATE_FORM = "async def generate(args, sample, sampling_params) -> Sample"
"""slime's `--custom-generate-function-path`."""


def load_agent(
    path: str,
    agent_args: Mapping[str, Any] | None = None,
    harness: HarnessConfig | None = None,
    environment: OpenEnvConfig | None = None,
) -> Agent:
    """The coroutine function, or object with an `async def __call__`, at `package.module:name` (or
    `package.module.name`) or `path/to/file.py:name`, in the form of an agent or of slime's generate
    functions (`is_generate`); of a file of tools (`.yaml`), the agent that uses them; with a
    harness or environment, the agent that runs it.

    Args:
        agent_args: `rollout.agent_args`.
        harness, environment: `rollout.harness`, `rollout.environment`.

    Raises:
        RolloutError: it cannot be imported, or is neither; the arguments are for nobody; or a tool
            cannot be made.
    """
    whose = f"rollout.agent is {path!r}"
    if agent_args and (harness is not None or environment is not None or path.endswith(_TOOLS)):
        raise RolloutError(f"{whose}, but rollout.agent_args is {dict(agent_args)}{_NO_ARGS}")
    if harness is not None:
        return Harness(harness)
    if environment is not None:
        from stepwell.trainer.environments.openenv import OpenEnvAgent

        return OpenEnvAgent(environment)
    if path.endswith(_TOOLS):
        return _with_tools(whose, path)
    if path.endswith(".py"):
        raise RolloutError(f"{whose}, a file; name the async function in it: {path}:FUNCTION")
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if not module_name or not name or ("/" in path and not module_name.endswith(".py")):
        raise RolloutError(f"{whose}; name an async function as {WHERE}")
    module = _import(whose, module_name)
    try:
        agent = getattr(module, name)
    except AttributeError:
        raise RolloutError(f"{whose}, but {_has_not(module, module_name, name)}") from None
    called = type(agent).__call__ if callable(agent) else None
    names = _parameters(agent)
    if "rollout_id" in names[:2]:
        raise RolloutError(
            f"{whose}, a function for slime's --rollout-function-path: those draw prompts and fill "
            "a whole batch by themselves, which the run and its pool do here; name what it calls "
            f"for one sample, {GENERATE_FORM}"
        )
    form, needs = (GENERATE_FORM, _GENERATE) if is_generate(agent) else (FORM, _AGENT)
    if not (inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(called)):
        raise RolloutError(f"{whose}, which is no coroutine function; write it as {form}")
    try:
        inspect.signature(agent).bind(*needs)
    except TypeError as e:
        raise RolloutError(
            f"{whose}, which cannot be called as {name}({', '.join(needs)}): {e}; write it as "
            f"{form}"
        ) from e
    if agent_args and form is FORM:
        raise RolloutError(
            f"{whose}, an agent, but rollout.agent_args is {dict(agent_args)}{_NO_ARGS}"
        )
    return cast(Agent, agent)


def agent_of_workers(path: str) -> str:
    """Return `rollout.agent` for a process that runs in another folder: a file's path begins at the
    root; or in the project, if that travels to all nodes (`working_dir` of this process's Ray)."""
    file, sep, name = (path, "", "") if path.endswith(_TOOLS) else path.rpartition(":")
    if not file.endswith((".py", *_TOOLS)):
        return path
    whole, here = Path(file).expanduser().absolute(), Path.cwd()
    if _project_travels() and whole.is_relative_to(here):
        return f"{whole.relative_to(here)}{sep}{name}"
    return f"{whole}{sep}{name}"


def _project_travels() -> bool:
    import ray

    return ray.is_initialized() and bool(ray.get_runtime_context().runtime_env.working_dir())


_NO_ARGS = ": only functions of slime's form are given args; leave rollout.agent_args out"
_TOOLS = (".yaml", ".yml")
_AGENT = ("task", "base_url", "api_key")
_GENERATE = ("args", "sample", "sampling_params")


def is_generate(agent: object) -> bool:
    """Return true if it names its parameters as slime's generate functions do."""
    names = _parameters(agent)
    return names[1:2] == ["sample"] or names[2:3] == ["sampling_params"]


def _parameters(agent: object) -> list[str]:
    try:
        return list(inspect.signature(agent).parameters) if callable(agent) else []
    except ValueError:  # of a builtin
        return []


def _with_tools(whose: str, path: str) -> Agent:
    from stepwell.trainer.tools import ToolAgent, ToolBox  # 1 s to import: only for those with one

    try:
        return ToolAgent(ToolBox.from_yaml(path))
    except ToolConfigError as e:
        raise RolloutError(f"{whose}: {e}") from e


def _import(whose: str, name: str) -> ModuleType:
    try:
        return dotted.module_of(name) if name.endswith(".py") else importlib.import_module(name)
    except ENDS:
        raise
    except BaseException as e:  # the user's own module: it may raise anything
        missing = e.name if isinstance(e, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            why = (
                f"there is no module {missing!r} in {Path.cwd()} or among the installed packages; "
                f"name an async function as {WHERE}"
            )
        elif name.endswith(".py") and not Path(name).expanduser().is_file():
            why = f"there is no file {Path(name).expanduser().absolute()}; name an existing one"
        else:
            reason = e.msg if isinstance(e, SyntaxError) else e
            why = f"importing {name} fails{_at(e)}: {type(e).__name__}: {reason}; mend it"
        raise RolloutError(f"{whose}, but {why}") from e


def _at(error: BaseException) -> str:
    """` (agents.py, line 3)`: the last line of the user's own that ran."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    ran = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    ours = (__file__, dotted.__file__, importlib.__file__)
    own = [at for at in ran if at[0][0] != "<" and at[0] not in ours]
    return f" ({own[-1][0]}, line {own[-1][1]})" if own else ""


def _has_not(module: ModuleType, module_name: str, name: str) -> str:
    agents = sorted(
        n
        for n, f in vars(module).items()
        if inspect.iscoroutinefunction(f) and f.__module__ == module.__name__
    )
    near = get_close_matches(name, agents, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    has = f"; its async functions: {', '.join(agents)}" if agents else "; it has no async function"
    return f"{module_name} has no {name!r}{guess}{has}"
