"""The `data` section: where prompts come from. Loads no torch and no data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Source(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    shuffle: bool = True
    """A new order each epoch, drawn from `shuffle_seed`; false keeps the source's order."""
    shuffle_seed: int = 0
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data before it is exhausted; null = as many as training asks for."""


class ReasoningGymSource(_Source):
    """A procedural data set of the `reasoning_gym` package, with its own verifier."""

    kind: Literal["reasoning_gym"]
    dataset: str = Field(min_length=1)
    """Name in reasoning_gym, e.g. `chain_sum`."""
    size: int = Field(ge=1)
    """Number of problems."""
    seed: int = Field(default=0, ge=0)
    """reasoning_gym draws problem i from `seed + i`: sources whose [seed, seed + size) overlap
    share problems."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the data set, e.g. {min_terms: 2, max_terms: 3}."""

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.size)


class JsonlSource(_Source):
    """A file with one JSON object per line."""

    kind: Literal["jsonl"]
    path: Path
    prompt_key: str = Field(default="question", min_length=1)
    """Holds the question (a string) or the conversation so far (a list of messages)."""
    label_key: str | None = "answer"
    """Holds the right answer, for the reward; null if there is none."""
    metadata_key: str | None = "metadata"
    """Holds an object that is passed to agent and reward as it is; null if there is none."""
    data_source: str | None = None
    """Name given to the reward; null takes each line's own `data_source`, else the file's name."""


SourceConfig: TypeAlias = Annotated[ReasoningGymSource | JsonlSource, Field(discriminator="kind")]


class DataConfig(BaseModel):
    """Prompts to train on and to evaluate on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: SourceConfig
    val: SourceConfig

    @model_validator(mode="after")
    def _disjoint(self) -> DataConfig:
        a, b = self.train, self.val
        if (
            isinstance(a, ReasoningGymSource)
            and isinstance(b, ReasoningGymSource)
            and (a.dataset, a.params) == (b.dataset, b.params)
            and a.seeds.start < b.seeds.stop
            and b.seeds.start < a.seeds.stop
        ):
            raise ValueError(
                f"train draws seeds [{a.seeds.start}, {a.seeds.stop}) and val "
                f"[{b.seeds.start}, {b.seeds.stop}) of {a.dataset}: they share problems; "
                f"set val.seed to {a.seeds.stop} or more"
            )
        return self
