"""Options of the verl backend. Loads no torch and no verl."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VerlConfig(BaseModel):
    """How `backends/verl_backend.py` lays Steps out for verl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: Literal["merged", "step"] = "merged"
    """`merged`: one row per branch of a trajectory, what tools wrote between its turns masked.
    `step`: one row per LLM call."""
    prompt_length: int | None = Field(default=None, ge=1)
    """Width that prompts are padded to, verl's `rollout.prompt_length`; null = the batch's longest.
    A longer one is an error: nothing is cut."""
    response_length: int | None = Field(default=None, ge=1)
    """Likewise of responses, what tools wrote between turns included."""
    pad_token_id: int = Field(default=0, ge=0)
    """Id that fills the padding; no mask lets it through."""
