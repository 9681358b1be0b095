"""This module runs tools that were written for verl as they are.

    tools:                                          verl's file of tools
      - class_name: verl_tools.Gsm8kTool ──► cls(config=…, tool_schema=…)
        config: { type: native }
        tool_schema: { type: function, function: { name, description, parameters } }

    create      ──► "id"  or  ("id", ToolResponse)
    execute     ──► (text or ToolResponse, step reward, metrics)
    calc_reward ──► reward              release

A class is taken by its shape, so it needs no base. One that derives from
`verl.tools.base_tool.BaseTool` needs verl; `BaseTool`, `ToolResponse` and the schema of this module
have the same fields for tools that shall run without it. Sources: volcengine/verl,
`verl/tools/{base_tool,schemas,tool_registry}.py` at 76f63cf (a tool returns text, an instance lives
as long as its rollout) and 0.9.1 (it returns a `ToolResponse`; `create` gets `create_kwargs` as
one argument).

Does not own: limits, and what becomes of results (`session.py`).
"""

from __future__ import annotations

import inspect
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from stepwell.trainer.errors import ToolConfigError, ToolUnavailableError
from stepwell.trainer.tools.base import Tool, ToolResult, awaited

STAGES = ("create", "execute", "calc_reward", "release")
NATIVE = "native"
"""verl's `config.type` of a tool that is a class."""


class OpenAIFunctionPropertySchema(BaseModel):
    """One parameter."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form, as verl hands it to a tool's class."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """Result of a call: text; images and videos are refused."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """Base for tools of verl's shape that shall run without verl.

    Args:
        config: the tool's own settings.
        tool_schema: None asks `get_openai_tool_schema`, which a subclass then has.

    Raises:
        ValueError: there is no schema.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool."""
        if self.tool_schema is None:
            raise ValueError("tool_schema is missing; give it, or write get_openai_tool_schema")
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an instance; return its id."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run one call; return its result, step reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of what the instance has come to."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the instance."""


class VerlTool(Tool):
    """One tool of verl's shape, made from its entry in the file.

    Args:
        cls: has the methods of `STAGES`.
        config: passed to it.
        tool_schema: passed to it, as verl's class; None: the tool says its own.

    Raises:
        ToolConfigError: it lacks a method, or has one that cannot be called as verl's are; the
            schema is none. What the class itself raises passes through.
    """

    asked_unused = True

    def __init__(
        self, cls: type, config: Mapping[str, Any], tool_schema: Mapping[str, Any] | None
    ) -> None:
        if lacking := [stage for stage in STAGES if not callable(getattr(cls, stage, None))]:
            raise ToolConfigError(
                f"tool {cls.__name__} has `execute`, but not {', '.join(lacking)}; derive it from "
                "verl's BaseTool, or from stepwell.trainer.tools.Tool"
            )
        if (kind := config.get("type", NATIVE)) != NATIVE:
            raise ToolConfigError(
                f"tool {cls.__name__}: config.type is {kind!r}; only {NATIVE!r} is known: wrap an "
                "MCP server's tools in a class of your own"
            )
        schema = None if tool_schema is None else _schema(cls, tool_schema)
        self._tool = cls(config=dict(config), tool_schema=schema)
        self._created_by = inspect.signature(self._tool.create).parameters
        own = self._tool.get_openai_tool_schema()
        if tool_schema is None or own != schema:
            tool_schema = own.model_dump(exclude_unset=True, exclude_none=True)
        super().__init__(config, tool_schema)
        try:
            inspect.signature(self._tool.execute).bind("", {})
        except TypeError as e:
            raise ToolConfigError(
                f"tool {self.name}: execute cannot be called as execute(instance_id, parameters) "
                f"({e}); what a task gives stands in its tools_kwargs, and verl's agent_data is "
                "not to be had here: give that parameter a default"
            ) from e

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an instance. `kwargs` are passed one by one; also as `create_kwargs`, as verl
        0.9 has it, where `create` takes that.

        Raises:
            ToolUnavailableError: it returned no id.
        """
        takes = self._created_by
        takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        given: dict[str, Any] = {} if "create_kwargs" in takes else dict(kwargs)
        if "create_kwargs" in takes or takes_any:
            given["create_kwargs"] = kwargs
        if "instance_id" in takes or takes_any:
            given["instance_id"] = instance_id or uuid.uuid4().hex
        made = await awaited(self._tool.create, **given)
        made = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(made, str) or not made:
            raise ToolUnavailableError(
                f"create of tool {self.name!r} returned {made!r:.80}; return the instance's id, or "
                "(id, ToolResponse)"
            )
        return made

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> ToolResult:
        """Run one call.

        Raises:
            ToolUnavailableError: it returned an image or a video.
        """
        result = await awaited(self._tool.execute, instance_id, dict(parameters), **kwargs)
        response, *rest = result if isinstance(result, tuple) else (result,)
        return (self._text(response), *rest)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        reward: float | None = await awaited(self._tool.calc_reward, instance_id, **kwargs)
        return reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await awaited(self._tool.release, instance_id, **kwargs)

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`parameters` as they are: verl's tools check them."""
        return dict(parameters)

    def _text(self, response: Any) -> Any:
        """The text of a `ToolResponse`, verl's or ours; anything else as it is."""
        if not isinstance(response, BaseModel) or not hasattr(response, "text"):
            return response
        for kind in ("image", "video"):
            if getattr(response, kind, None):
                raise ToolUnavailableError(
                    f"tool {self.name!r} returned {kind}s, which are not trained yet; return text"
                )
        return response.text or ""


def _schema(cls: type, given: Mapping[str, Any]) -> BaseModel:
    """`given` as verl's class where verl is loaded, else as ours."""
    verl = sys.modules.get("verl.tools.schemas")
    form: type[BaseModel] = getattr(verl, "OpenAIFunctionToolSchema", OpenAIFunctionToolSchema)
    whole = given if "function" in given else {"type": "function", "function": given}
    try:
        return form.model_validate(whole)
    except ValidationError as e:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors())
        raise ToolConfigError(f"tool {cls.__name__}: tool_schema: {problems}") from e
