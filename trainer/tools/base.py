"""Tools: functions that the model may call, with a life cycle for those that keep state.

::

    create(instance_id, **create_kwargs) ──► execute(instance_id, parameters) … ──► release
                                                        └──► calc_reward(instance_id)

One instance per rollout and tool, made at its first call; the kwargs of each stage are the task's
(`tools_kwargs`). The names are those of verl's `BaseTool`. Two ways to write one:

- a plain function, sync or async: its types and docstring are the schema (`FunctionTool`)
- a `Tool` with a typed method `call(self, instance_id, …)`, or, with a `tool_schema` given, with
  an `execute` of its own

Owns the schema and the arguments. Does not own time limits, parallel calls and what the model is
told of a failure (`session.py`).
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from stepwell.trainer.errors import ToolConfigError, ToolError
from stepwell.trainer.threads import in_thread

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Pattern of the function names that OpenAI's API takes."""


ToolResult: TypeAlias = Any
"""Result of a call, for the model: text, or data that becomes JSON. Or a tuple of that, a step
reward (None: none) and a dict of metrics, as verl's tools have it."""


class Tool:
    """Base of the tools that keep state or need configuration.

    Args:
        config: the tool's own settings.
        tool_schema: an OpenAI function schema; None derives it from `call`.

    Raises:
        ToolConfigError: the schema is none, or cannot be derived.
    """

    name: str = ""
    """The function's name; the class's in lower case if empty. A `tool_schema` names it itself."""
    asked_unused: bool = False
    """`calc_reward` is asked also in rollouts that did not call the tool, if their task has kwargs
    for it: an instance is made for that."""

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = dict(config or {})
        self._model: type[BaseModel] | None = None
        if tool_schema is None:
            function, skip = self._signed
            name = self.name or type(self).__name__.lower()
            self._model = _parameters(function, name, skip)
            tool_schema = _schema(function, name, self._model)
        self.tool_schema = _checked(tool_schema, self.name or type(self).__name__)
        """The OpenAI function schema: {"type": "function", "function": {name, description,
        parameters}}."""
        self.name = self.tool_schema["function"]["name"]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an instance, with the task's `create_kwargs`; returns its id."""
        return instance_id or uuid.uuid4().hex

    async def execute(
        self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any
    ) -> ToolResult:
        """One call, with the task's `execute_kwargs`. Unless overridden: `call`, with `parameters`
        checked and converted to the types of its signature.

        Raises:
            ToolError: what the model is to be told; any other error is told with its type.
            ToolUnavailableError: the rollout is to be aborted.
        """
        function, skip = self._signed
        arguments = self.arguments(parameters) | kwargs
        return await awaited(function, *[instance_id][:skip], **arguments)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of what the instance has come to, with the task's `calc_reward_kwargs`; None:
        the tool has no opinion."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the instance and give back what it holds, with the task's `release_kwargs`."""

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """`parameters` as the tool's code gets them.

        Raises:
            ToolError: they do not fit the schema; says how, for the model to read.
        """
        if self._model is None:
            return _validate_json(parameters, self.tool_schema)
        return _validate_model(parameters, self._model)

    @property
    def _signed(self) -> tuple[Callable[..., Any], int]:
        """The function whose signature is the schema, and how many leading parameters are not."""
        call = getattr(self, "call", None)
        if call is None:
            raise ToolConfigError(
                f"tool {type(self).__name__} has neither a method `call` nor a tool_schema; "
                "write `async def call(self, instance_id, …) -> str`, or give it a schema and an "
                "`execute`"
            )
        return call, 1


class FunctionTool(Tool):
    """A plain function as a tool without state. A sync one runs in a thread.

    Args:
        function: typed; its docstring's first paragraph is the description, and
        `Annotated[T, pydantic.Field(description=…)]` describes a parameter.
        tool_schema: in place of the derived one.
    """

    def __init__(
        self, function: Callable[..., Any], tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._plain = function
        super().__init__({}, tool_schema)

    @property
    def _signed(self) -> tuple[Callable[..., Any], int]:
        return self._plain, 0


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────


def _schema(function: Callable[..., Any], name: str, model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAI function schema of `function`, whose parameters are those of `model`."""
    try:
        parameters = model.model_json_schema()
    except Exception as e:  # pydantic has one error per way a type can be unfit
        raise ToolConfigError(f"tool {name}: its signature gives no JSON schema ({e})") from e
    parameters.pop("title", None)
    for parameter in parameters.get("properties", {}).values():
        parameter.pop("title", None)
    summary = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return {"name": name, "description": summary, "parameters": parameters}


def _parameters(function: Callable[..., Any], name: str, skip: int) -> type[BaseModel]:
    """The parameters of `function` that the model gives, as a model of pydantic's.

    Raises:
        ToolConfigError: one has no type, or one that JSON cannot express.
    """
    fields: dict[str, Any] = {}
    signature = inspect.signature(function, eval_str=True)
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue  # execute_kwargs
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise ToolConfigError(
                f"tool {name}: parameter {parameter.name} is positional only; a model names its "
                "arguments"
            )
        if parameter.annotation is parameter.empty:
            raise ToolConfigError(f"tool {name}: parameter {parameter.name} has no type; add one")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    config = ConfigDict(extra="forbid", protected_namespaces=())
    try:
        model: type[BaseModel] = create_model(name, __config__=config, **fields)
    except Exception as e:  # pydantic has one error per way a type can be unfit
        raise ToolConfigError(f"tool {name}: its signature gives no JSON schema ({e})") from e
    return model


def _checked(schema: Mapping[str, Any], owner: str) -> dict[str, Any]:
    function = schema.get("function", schema)
    if not isinstance(function, Mapping) or not NAME.fullmatch(str(function.get("name", ""))):
        raise ToolConfigError(
            f"tool {owner}: tool_schema is {schema!r:.120}; it should be {{type: function, "
            "function: {name, description, parameters}} with a name of at most 64 letters, "
            "digits, - and _"
        )
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"parameters": parameters, **function}}


def _validate_model(parameters: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    try:
        parsed = model.model_validate(dict(parameters))
    except ValidationError as e:
        problems = "; ".join(
            f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in e.errors(include_url=False)
        )
        raise ToolError(f"wrong arguments: {problems}") from e
    return {name: getattr(parsed, name) for name in type(parsed).model_fields}


def _validate_json(parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    import jsonschema  # only for schemas that were written by hand

    validator = jsonschema.Draft202012Validator(schema["function"]["parameters"])
    problems = [
        f"{'.'.join(map(str, e.absolute_path))}: {e.message}".removeprefix(": ")
        for e in validator.iter_errors(dict(parameters))
    ]
    if problems:
        raise ToolError(f"wrong arguments: {'; '.join(sorted(problems))}")
    return dict(parameters)


async def awaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result of `function`; one that is no coroutine function runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
