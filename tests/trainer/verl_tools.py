"""Tools as verl's users write them, of the shape of its `BaseTool`, which run with verl and
without."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from stepwell.trainer.tools.verl import BaseTool, ToolResponse


class Counter:
    """The state of a tool by instance. verl of June 2025: text comes back."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.values: dict[str, int] = {}
        self.log: list[Any] = []

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, start: int | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self.values[instance_id] = start or 0
        self.log.append(("create", kwargs))
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, Any]]:
        self.log.append(("execute", parameters, kwargs))
        by = int(parameters["by"])
        self.values[instance_id] += by * kwargs.get("factor", 1)
        return f"now {self.values[instance_id]}", by / 10, {"by": by}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.values[instance_id] == kwargs.get("target"))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", kwargs))
        del self.values[instance_id]


class Newer(BaseTool):
    """verl 0.9: (id, ToolResponse) from `create`, `create_kwargs` as one argument."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.values: dict[str, int] = {}

    async def create(
        self,
        instance_id: str | None = None,
        create_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[str, ToolResponse]:
        made, response = await super().create(instance_id)
        self.values[made] = (create_kwargs or {}).get("start", 0)
        return made, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if "show" in parameters:
            return ToolResponse(image=[object()]), 0.0, {}
        self.values[instance_id] += int(parameters.get("by", 0))
        return ToolResponse(text=f"now {self.values[instance_id]}"), 0.5, {}


class Base(BaseTool):
    """The base's behaviour, with a schema of its own."""

    def get_openai_tool_schema(self) -> Any:
        from stepwell.trainer.tools.verl import OpenAIFunctionToolSchema

        function = {"name": "base", "description": "Does nothing."}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class NoId(Counter):
    async def create(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Needs(Counter):
    async def execute(  # type: ignore[override]
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any
    ) -> tuple[str, float, dict[str, Any]]:
        return "", 0.0, {}


class Half:
    def __init__(self, config: Any, tool_schema: Any) -> None: ...

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return ""
