"""The keys of how LLM calls are sampled, for `rollout` and `validation`."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeInt

from stepwell.datapool.config import Section


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str | int) else value


StopText: TypeAlias = Annotated[str, Field(min_length=1)]


class CallSampling(Section):
    """Sampling of each LLM call of a rollout, whatever agent makes it."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """Temperature of every call, whatever the agent asks; null = as the agent asks, 1.0 if it asks
    nothing."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Probability mass that every call samples from (nucleus); null = as the agent asks."""
    top_k: int | None = Field(default=None, ge=-1)
    """Number of likeliest tokens that every call samples from, -1 is no limit; null = as the agent
    asks."""
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
