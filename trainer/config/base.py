"""The base of every section: unknown keys are refused, and nothing changes."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    named_by: ClassVar[str | None] = None
    """The key that text alone stands for: `reward: math` is `reward: {function: math}`."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {cls.named_by: value} if cls.named_by and isinstance(value, str) else value
