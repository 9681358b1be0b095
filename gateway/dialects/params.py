"""This module reads the fields of request bodies, so that what is wrong with one is told with its
name, its value and the remedy.

A dialect's fields are a `Params` model. Conversations and tools are JSON as it was sent, read by
hand (`need`): their unknown keys reach the chat template. Does not own: which fields there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from stepwell.gateway.errors import RequestError
from stepwell.gateway.tokens.messages import Tool

T = TypeVar("T")
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Temperature: TypeAlias = Annotated[float, Field(ge=0, le=2)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, lt=2**31)]
Seed: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
NoPenalty: TypeAlias = Literal[0]
"""A penalty that asks for nothing."""
OTHER_POLICY = "it would make the log-probs those of another policy"
"""Why a field that reshapes the distribution is refused."""
MaxTokens: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=20)]
Texts: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(fail_fast=True),
    BeforeValidator(lambda v: tuple(v) if type(v) is list else (v,) if v else ()),
]
"""A text or a list of them; an empty one is none."""
StopIds: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    Field(fail_fast=True),
    BeforeValidator(lambda v: tuple(v) if type(v) is list else v),
]
"""Token ids that end a reply, as vLLM and SGLang take them."""


def kind(of: type | tuple[type, ...], wanted: str) -> BeforeValidator:
    """A field of this type, if it is there; else the remedy is to send what is `wanted`."""

    def check(value: Any) -> Any:
        # A JSON true is a Python int.
        if not isinstance(value, of) or (isinstance(value, bool) and of is not bool):
            raise ValueError(f"send {wanted}")
        return value

    return BeforeValidator(check)


def _few(sent: Any) -> Any:
    if isinstance(sent, dict) and len(sent) > MAX_METADATA:
        raise ValueError(f"it has {len(sent)} keys and may have {MAX_METADATA}")
    return sent


MAX_METADATA = 1024
Metadata: TypeAlias = Annotated[dict[str, str], BeforeValidator(_few)]


def _without_nulls(sent: Any) -> Any:
    """An object without the fields that are null."""
    if isinstance(sent, dict) and None in sent.values():
        return {name: value for name, value in sent.items() if value is not None}
    return sent


class Part(BaseModel):
    """An object within a body. Null asks for nothing; of keys that are not its own nothing is
    known, or asked."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, sent: Any) -> Any:
        return _without_nulls(sent)


class Params(BaseModel):
    """The fields of a body, or of an object in it. Null asks for nothing; an unknown field is
    refused. Defaults are immutable: pydantic copies others for each body."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that say nothing about the reply."""
    remedies: ClassVar[Mapping[str, str]] = {}
    """For fields that are refused, in place of "leave it out"."""

    @model_validator(mode="before")
    @classmethod
    def with_first_unknown(cls, sent: Any) -> Any:
        """Drop nulls, and all but the first of the sent keys that are no fields: one is refused by
        name, and pydantic would make an error of each."""
        sent = _without_nulls(sent)
        fields = cls.model_fields
        takes_all = cls.model_config.get("extra") == "allow"
        if not isinstance(sent, dict) or len(sent) <= len(fields) or takes_all:
            return sent
        names = {about.alias or name for name, about in fields.items()}
        known = {name: value for name, value in sent.items() if name in names}
        unknown = next(name for name in sent if name not in names)
        return {**known, unknown: sent[unknown]}

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """
        Raises:
            RequestError: names the first field that is wrong.
        """
        skipped = cls.ignored
        asked = {k: v for k, v in body.items() if k not in skipped}
        try:
            return cls.model_validate(asked)
        except ValidationError as e:
            raise refusal(e.errors(include_url=False), cls.remedies) from e


_KINDS = {
    "dict_type": "it should be an object",
    "model_type": "it should be an object",
    "model_attributes_type": "it should be an object",
    "list_type": "it should be a list",
    "tuple_type": "it should be a list",
    "bool_type": "it should be true or false",
    "string_type": "it should be text",
}
"""pydantic's words are Python's for these."""


def refusal(
    errors: Sequence[Mapping[str, Any]], remedies: Mapping[str, str] | None = None
) -> RequestError:
    """Refusal of a body, with pydantic's first error in one line."""
    first = errors[0]
    name = ""
    for part in first["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    remedy = (remedies or {}).get(name)
    shown = brief(first.get("input"))
    if first["type"] == "extra_forbidden":
        remedy = remedy or "leave it out"
        problem = f"{name:.80} is {shown}, which this gateway does not support; {remedy}"
    elif first["type"] == "missing":
        problem = f"{name} is missing; {remedy or 'send it'}"
    else:
        said = str(first["msg"]).removeprefix("Value error, ").replace("Input", "it", 1)
        said = _KINDS.get(first["type"]) or said[:1].lower() + said[1:]
        if first["type"] == "too_long":
            most = first["ctx"]["max_length"]
            said = f"it should have at most {most} items" if most else "it should be empty"
        problem = f"{name or 'the body'} is {shown}; {said}" + (f": {remedy}" if remedy else "")
    return RequestError(problem, name[:80] or None)


def need(
    holder: Mapping[str, Any], name: str, kind: type[T], where: str, wanted: str = "send text"
) -> T:
    """`holder[name]`, which has to be there.

    Args:
        where: the path of `holder`.

    Raises:
        RequestError
    """
    value = holder.get(name)
    if not isinstance(value, kind):
        raise wrong(f"{where}.{name}", value, wanted)
    return value


def optional(holder: Mapping[str, Any], name: str, where: str) -> str | None:
    """The text `holder[name]`, if there is any."""
    return None if holder.get(name) is None else need(holder, name, str, where)


def wrong(where: str, value: Any, remedy: str) -> RequestError:
    return RequestError(f"{where} is {brief(value)}; {remedy}", where)


def brief(value: Any) -> str:
    """The first 80 characters of a value's `repr`, without the rest, which may be megabytes."""
    return _brief(value, 16)[:80]


def _brief(value: Any, levels: int) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if not value or not levels or type(value) not in (dict, list, tuple):
        return "…" if not levels else repr(value)
    if isinstance(value, dict):
        items = [
            f"{_brief(k, levels - 1)}: {_brief(v, levels - 1)}"
            for k, v in islice(value.items(), 20)
        ]
        return "{" + ", ".join(items) + "}"
    return "[" + ", ".join(_brief(each, levels - 1) for each in islice(value, 80)) + "]"


def json_constraint(
    kind: str, schema: Mapping[str, Any] | None, where: str
) -> tuple[str, str] | None:
    """Constraint that a response format of this type puts on the engine; None: none.

    Args:
        where: the path of `schema`.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        schema = {"type": "object"}
    if schema is None:
        raise RequestError(f"{where} is missing; send a schema", where)
    return "json_schema", json.dumps(schema)


def must_call(tools: Sequence[Tool], name: str | None = None, where: str = "tool_choice") -> str:
    """The tool that the reply has to call ("" is any).

    Args:
        name: None: any.
        where: the path of `name`.

    Raises:
        RequestError: it is none of them.
    """
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and (not name or name not in names):
        raise wrong(where, name, f"name one of the tools that the model can call: {names!s:.300}")
    if not names:
        raise RequestError(
            f"{where} asks for a call, but there is no tool that the model can call; send some",
            where,
        )
    return name or ""


def effort_args(
    effort: str | None, chat_template: str, field: str, ignored: list[str]
) -> dict[str, Any]:
    """Arguments that tell the chat template an effort, if it takes one; else `ignored` notes it."""
    if effort is None:
        return {}
    if "reasoning_effort" in chat_template:
        return {"reasoning_effort": effort}
    if effort in ("none", "minimal") and "enable_thinking" in chat_template:
        return {"enable_thinking": False}
    ignored.append(f"{field}={effort}")
    return {}


def verbosity_args(verbosity: str | None, chat_template: str) -> dict[str, Any]:
    """Arguments that tell the chat template how much to say, if it takes that."""
    is_told = verbosity is not None and "verbosity" in chat_template
    return {"verbosity": verbosity} if is_told else {}
