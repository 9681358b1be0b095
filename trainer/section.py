"""The base of every section: what `backends/config.py` refuses, and text alone for a section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from stepwell.backends.config import Section as Refusing


class Section(Refusing):
    named_by: ClassVar[str | None] = None
    """The key that text alone stands for: `reward: math` is `reward: {function: math}`."""
    spelled_out: ClassVar[Callable[[str], dict[str, str]] | None] = None
    """What text alone stands for where sections differ by `kind`; None: for the kind."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {cls.named_by: value} if cls.named_by and isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | int) else value


StopText: TypeAlias = Annotated[str, Field(min_length=1)]


class CallSampling(Section):
    """How each LLM call of a rollout is sampled, whatever agent makes it."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Of every call, whatever the agent asks; null = as the agent asks, 1.0 if it asks nothing."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Of every call; null = as the agent asks."""
    top_k: int | None = Field(default=None, ge=-1)
    """Of every call, -1 is no limit; null = as the agent asks."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest response of one call; a call that asks for less gets less. null = what fits."""
    stop: Annotated[tuple[StopText, ...], BeforeValidator(_listed)] | None = None
    """Texts that end the response of every call, as if the agent asked for them, too: they are in
    its Step and not in the reply's text. One alone needs no list."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_listed)] | None = None
    """Token ids that do, beside the model's own."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest conversation behind its first prompt: what the policy wrote in all its calls and what
    tools and users said between. A call gets what is left; one for which nothing is left gets a
    400, `trajectory_limit_exceeded`. null = what fits."""
