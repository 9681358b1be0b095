"""The tools of one rollout: calls run at once, within limits, and nothing they do ends it.

::

    async with box.session(task) as tools:
        tools.schemas                              for the request
        await tools.call(message.tool_calls)       one tool message per call, in their order
        await tools.rewards()                      calc_reward of the tools that were used

What the model asked for wrongly, what failed and what took too long comes back to it as a tool
message that begins with "error: "; every call gets its message. The one exception is
`ToolUnavailableError`, which ends the rollout. Does not own the conversation (`agent.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from stepwell.datapool.dotted import resolve
from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.types import MAX_REWARD, is_reward
from stepwell.trainer.config import ToolBoxConfig, ToolConfig
from stepwell.trainer.errors import ToolConfigError, ToolError, ToolUnavailableError, shown
from stepwell.trainer.plain import plain, plain_text
from stepwell.trainer.tools.base import FunctionTool, Tool
from stepwell.trainer.tools.verl import VerlTool

log = logging.getLogger(__name__)

CUT = "\n…({} characters left out)…\n"


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call, as it ended."""

    name: str
    text: str
    """For the model."""
    reward: float | None = None
    """Reward that `execute` gave for this step; None: none."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that it gave beside, as verl's tools do."""
    error: str | None = None
    """None, or "unknown_tool", "arguments", "refused" (a ToolError), "failed", "timeout",
    "too_many"."""


class ToolBox:
    """The tools of an agent: made once, used by any number of rollouts at the same time.

    Args:
        tools: tools, plain functions, or configurations of either.
        config: the limits; its own `tools` come first.

    Raises:
        ToolConfigError: a tool cannot be found or made, or two have one name.
    """

    def __init__(
        self,
        tools: Iterable[Tool | ToolConfig | Callable[..., Any]] = (),
        config: ToolBoxConfig | None = None,
    ) -> None:
        self.config = config or ToolBoxConfig()
        self._tools: dict[str, Tool] = {}
        self._timeouts: dict[str, float] = {}
        for given in (*self.config.tools, *tools):
            tool = build_tool(given)
            if tool.name in self._tools:
                raise ToolConfigError(f"two tools are named {tool.name!r}; rename one")
            self._tools[tool.name] = tool
            own = given.timeout_s if isinstance(given, ToolConfig) else None
            self._timeouts[tool.name] = own or self.config.timeout_s

    @classmethod
    def from_yaml(cls, path: Path | str) -> ToolBox:
        """The tools of a file (`trainer/config/tools.py`), ours or verl's `tool_config_path`.

        Raises:
            ToolConfigError: it cannot be read, or a key or value in it is wrong.
        """
        try:
            content = OmegaConf.to_container(OmegaConf.load(Path(path).expanduser()), resolve=True)
            config = ToolBoxConfig.model_validate(content)
        except (OSError, YAMLError, OmegaConfBaseException) as e:
            raise ToolConfigError(f"{path} cannot be read ({str(e).splitlines()[0]})") from e
        except ValidationError as e:
            problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors())
            raise ToolConfigError(f"{path}: {problems}") from e
        return cls(config=config)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI's `tools` of a request."""
        return [tool.tool_schema for tool in self._tools.values()]

    def session(self, task: Mapping[str, Any] | None = None) -> ToolSession:
        """The tools for one rollout of `task`: those in its `tools` (all, if it has none), with
        its `tools_kwargs` ({name: {create_kwargs, execute_kwargs, calc_reward_kwargs,
        release_kwargs}}; also under `metadata`).

        Raises:
            ToolConfigError: the task names a tool that is not in the box.
        """
        task = task or {}
        metadata = task.get("metadata") or {}
        stored = task.get("tools_kwargs") or metadata.get("tools_kwargs") or {}
        # A table gives every row the tools of all; null is how it says that a row has none of one.
        kwargs = {name: own for name, own in stored.items() if own is not None}
        schemas = self.schemas
        if task.get("tools"):
            schemas = [s if "function" in s else {"function": s} for s in task["tools"]]
        offered = [s["function"]["name"] for s in schemas]
        if unknown := sorted({*offered, *kwargs} - self._tools.keys()):
            raise ToolConfigError(
                f"the task names {', '.join(unknown)}, which the tool box does not have; it has "
                f"{', '.join(self._tools)}"
            )
        tools = {name: self._tools[name] for name in offered}
        return ToolSession(tools, schemas, self._timeouts, kwargs, self.config)


def build_tool(given: Tool | ToolConfig | Callable[..., Any]) -> Tool:
    """A tool from whatever says which.

    Raises:
        ToolConfigError: it cannot be found or made.
    """
    if isinstance(given, Tool):
        return given
    if not isinstance(given, ToolConfig):
        return FunctionTool(given)
    try:
        found = resolve(given.class_name)
    except Exception as e:  # any error of foreign code at import
        raise ToolConfigError(
            f"tool {given.class_name!r} cannot be imported ({type(e).__name__}: {e}); name it as "
            "package.module.Name"
        ) from e
    if inspect.isclass(found) and (issubclass(found, Tool) or hasattr(found, "execute")):
        try:
            if issubclass(found, Tool):
                return found(given.config, given.tool_schema)
            return VerlTool(found, given.config, given.tool_schema)
        except ToolConfigError:
            raise
        except Exception as e:  # the user's own class: it may raise anything
            raise ToolConfigError(
                f"tool {given.class_name!r} cannot be made with config {given.config} "
                f"({type(e).__name__}: {e})"
            ) from e
    if inspect.isfunction(found):
        if given.config:
            raise ToolConfigError(
                f"tool {given.class_name!r} is a function and takes no config; remove it, or write "
                "a class"
            )
        return FunctionTool(found, given.tool_schema)
    raise ToolConfigError(
        f"tool {given.class_name!r} is neither a stepwell.trainer.tools.Tool, nor a class of the "
        "shape of verl's BaseTool, nor a function"
    )


class ToolSession:
    """See the module's docstring; made by `ToolBox.session`, an async context manager."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        schemas: Sequence[Mapping[str, Any]],
        timeouts: Mapping[str, float],
        kwargs: Mapping[str, Mapping[str, Any]],
        config: ToolBoxConfig,
    ) -> None:
        self._tools = tools
        self.schemas = [{"type": "function", **s} for s in schemas]
        """OpenAI's `tools` of a request."""
        self._timeouts = timeouts
        self._kwargs = kwargs
        self._config = config
        self._instances: dict[str, asyncio.Task[str]] = {}
        self.results: list[CallResult] = []
        """Every call so far, in the order in which the model made them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Even if the rollout is being cancelled: what an instance holds must not stay.
        await asyncio.shield(self._release())

    @property
    def errors(self) -> Counter[str]:
        """Calls that came to nothing, by `CallResult.error`."""
        return Counter(r.error for r in self.results if r.error is not None)

    @property
    def step_rewards(self) -> list[float]:
        """Rewards that `execute` gave, in the order of the calls."""
        return [r.reward for r in self.results if r.reward is not None]

    @property
    def metrics(self) -> dict[str, list[Mapping[str, Any]]]:
        """Metrics of `execute`, by tool, in the order of the calls."""
        metrics: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for result in self.results:
            if result.metrics:
                metrics[result.name].append(result.metrics)
        return dict(metrics)

    async def call(self, tool_calls: Sequence[Any]) -> list[dict[str, Any]]:
        """Run the calls of one reply at once.

        Args:
            tool_calls: of an assistant message, as the `openai` SDK has them or as dicts.

        Returns:
            One {"role": "tool", "tool_call_id", "content"} per call, in order.

        Raises:
            ToolUnavailableError: a tool says that the rollout is void.
        """
        calls = [c if isinstance(c, Mapping) else c.model_dump() for c in tool_calls]
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._limited(number, call))
                    for number, call in enumerate(calls)
                ]
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        results = [task.result() for task in running]
        self.results += results
        return [
            {"role": "tool", "tool_call_id": call.get("id", ""), "content": self._cut(result.text)}
            for call, result in zip(calls, results, strict=True)
        ]

    async def rewards(self) -> dict[str, float]:
        """`calc_reward` of every tool that was used, by name; also of those that the task has
        kwargs for, if they are `asked_unused`. Those without an opinion are left out.

        Raises:
            ToolUnavailableError: one failed. The reward is missing, not 0.
        """
        rewards: dict[str, float] = {}
        made = [name for name, creating in self._instances.items() if _made(creating)]
        unused = (n for n in self._kwargs if n in self._tools and n not in self._instances)
        for name in (*made, *(n for n in unused if self._tools[n].asked_unused)):
            kwargs = self._of_stage(name, "calc_reward")
            try:
                async with asyncio.timeout(self._timeouts[name]):
                    instance_id = await self._instance(name)
                    reward = await self._tools[name].calc_reward(instance_id, **kwargs)
                    if reward is not None:
                        rewards[name] = _reward(reward)
            except ENDS:
                raise
            except BaseException as e:  # foreign code: any failure is a missing reward
                raise ToolUnavailableError(
                    f"calc_reward of tool {name!r} failed ({type(e).__name__}: {shown(e)})"
                ) from e
        return rewards

    async def _limited(self, number: int, call: Mapping[str, Any]) -> CallResult:
        function = call.get("function") or {}
        name = str(function.get("name", ""))
        limit = self._config.max_parallel_calls
        if number >= limit:
            return _error(name, "too_many", f"only {limit} calls of one reply are run")
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return _error(name, "unknown_tool", f"there is no tool {name!r}; there is {known}")
        try:
            parameters = json.loads(function.get("arguments") or "{}")
        except (ValueError, RecursionError) as e:  # thousands of digits, or of brackets, too
            return _error(name, "arguments", f"the arguments are no JSON ({e})")
        if not isinstance(parameters, dict):
            return _error(name, "arguments", "the arguments are no JSON object")
        return await self._execute(name, parameters)

    async def _execute(self, name: str, parameters: dict[str, Any]) -> CallResult:
        tool, timeout_s = self._tools[name], self._timeouts[name]
        limit = asyncio.timeout(timeout_s)
        try:
            tool.arguments(parameters)
        except ToolError as e:
            return _error(name, "arguments", str(e))
        except ToolUnavailableError:
            raise
        except Exception as e:  # noqa: BLE001 - a validator of the tool's own
            return _failed(name, e)
        try:
            async with limit:
                instance_id = await self._instance(name)
                result = await tool.execute(
                    instance_id, parameters, **self._of_stage(name, "execute")
                )
                return _result(name, result)
        except ToolUnavailableError:
            raise
        except ToolError as e:
            return _error(name, "refused", str(e))
        except ENDS:
            raise
        except BaseException as e:  # noqa: BLE001 - foreign code: the model is told
            if isinstance(e, TimeoutError) and limit.expired():
                return _error(name, "timeout", f"{name} gave no result within {timeout_s:g} s")
            return _failed(name, e)

    async def _instance(self, name: str) -> str:
        """Made at the first call; several at once share it."""
        creating = self._instances.get(name)
        if creating is None or (creating.done() and not _made(creating)):
            creating = self._instances[name] = asyncio.ensure_future(self._create(name))
        return await asyncio.shield(creating)

    async def _create(self, name: str) -> str:
        try:
            return await self._tools[name].create(**self._of_stage(name, "create"))
        except SystemExit as e:  # of a task of its own it would end the process
            raise RuntimeError(f"SystemExit: {e}") from e

    async def _release(self) -> None:
        for name, creating in self._instances.items():
            if creating.done() and not _made(creating):
                continue
            try:
                async with asyncio.timeout(self._timeouts[name]):
                    instance_id = await creating
                    await self._tools[name].release(instance_id, **self._of_stage(name, "release"))
            except ENDS:
                raise
            except BaseException as e:  # noqa: BLE001 - whatever happens here, the rollout is over
                log.warning("tool %s was not released: %s: %s", name, type(e).__name__, shown(e))

    def _of_stage(self, name: str, stage: str) -> dict[str, Any]:
        return dict(self._kwargs.get(name, {}).get(f"{stage}_kwargs") or {})

    def _cut(self, text: str) -> str:
        text = plain_text(text)  # half a character cannot be sent
        most = self._config.max_response_chars
        if len(text) <= most:
            return text
        end = most // 2
        return text[: most - end] + CUT.format(len(text) - most) + text[len(text) - end :]


def _made(creating: asyncio.Task[str]) -> bool:
    return creating.done() and not creating.cancelled() and creating.exception() is None


def _result(name: str, result: Any) -> CallResult:
    whole = result if isinstance(result, tuple) else (result,)
    response, reward, metrics, *_ = (*whole, None, None)
    text = response if isinstance(response, str) else json.dumps(response, default=str)
    measured = json.dumps(dict(metrics or {}), default=_number_or_text)
    # JSON has no NaN.
    sent: dict[str, Any] = plain(json.loads(measured, parse_constant=lambda _: None))
    return CallResult(name, text, None if reward is None else _reward(reward), sent)


def _reward(given: Any) -> float:
    """
    Raises:
        ValueError, TypeError, OverflowError: it is no reward.
    """
    reward = float(given)
    if not is_reward(reward):
        raise ValueError(f"the reward is {reward:g}; give a number within ±{MAX_REWARD:g}")
    return reward


def _number_or_text(value: Any) -> Any:
    """A number of NumPy's or torch's as a number, an array as a list, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _failed(name: str, error: BaseException) -> CallResult:
    why = ": ".join(filter(None, (type(error).__name__, shown(error))))
    log.warning("tool %s failed: %s", name, why)
    return _error(name, "failed", why)


def _error(name: str, kind: str, message: str) -> CallResult:
    return CallResult(name, f"error: {message}", error=kind)
