"""The section `data`: where prompts come from.

A source is a procedural data set (`reasoning_gym`) or rows of a table (`jsonl`, `parquet`,
`huggingface`), whose columns the `*_key` fields name. `rollout.n` says how often a prompt is tried.
Text alone is a source, and a source alone is what is trained on:

    data: tasks.jsonl      is      data: { train: { kind: jsonl, path: tasks.jsonl } }
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from stepwell.trainer.section import Section


def source_of(text: str) -> dict[str, str]:
    """What text alone stands for: a file, by how it ends; else what `datasets` loads, if it has a
    `/` or a `.` as files, folders and names on the hub have; else a kind."""
    for suffix in ("jsonl", "parquet"):
        if text.endswith(f".{suffix}"):
            return {"kind": suffix, "path": text}
    return {"kind": "huggingface", "path": text} if {"/", "."} & set(text) else {"kind": text}


class _Source(Section):
    spelled_out = source_of

    shuffle: bool = True
    """A new order each epoch, drawn from `shuffle_seed`; false keeps the source's order."""
    shuffle_seed: int = 0
    """Seed of `shuffle`. Default `run.seed`."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data before it is exhausted; null = as many as training asks for."""
    skip_instance_ids: tuple[str, ...] | Path = ()
    """Tasks never to hand out: a list of ids, or a text file with one id a line."""

    @field_validator("skip_instance_ids", mode="before")
    @classmethod
    def _ids_are_text(cls, value: Any) -> Any:
        return [str(v) for v in value] if isinstance(value, list | tuple) else value


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


class RowSource(_Source):
    """Rows of a table; a key with dots reaches into objects (`reward_model.ground_truth`)."""

    prompt_key: str = Field(default="question", min_length=1)
    """Holds the question (a string) or the conversation so far (a list of messages)."""
    label_key: str | None = "answer"
    """Holds the right answer, for the reward; null if there is none."""
    metadata_key: str | None = "metadata"
    """Holds an object, or its JSON text, that is passed to agent and reward as it is; null if there
    is none."""
    tool_key: str | None = None
    """Holds the list of tools (OpenAI's form), or its JSON text, for `task["tools"]`."""
    data_source: str | None = None
    """Name given to the reward; null takes each row's own `data_source`, else the data's name."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, as the model's chat template writes it with its tools; null = any
    length."""
    filter_overlong_prompts: bool = True
    """Leave longer prompts out; false refuses the data."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For the chat template that prompts are measured with, e.g. {enable_thinking: false}."""


class JsonlSource(RowSource):
    """Files with one JSON object per line."""

    kind: Literal["jsonl"]
    path: Path | tuple[Path, ...]
    """A file, a folder of `*.jsonl`, a glob pattern, or a list of these."""


class ParquetSource(RowSource):
    """Parquet files."""

    kind: Literal["parquet"]
    path: Path | tuple[Path, ...]
    """A file, a folder of `*.parquet`, a glob pattern, or a list of these."""


class HuggingFaceSource(RowSource):
    """A data set that the `datasets` library loads."""

    kind: Literal["huggingface"]
    path: str = Field(min_length=1)
    """A name on the hub, a folder or file of data, or a folder written by `save_to_disk`."""
    name: str | None = None
    """The configuration (subset) of a data set that has several."""
    split: str = Field(default="train", min_length=1)
    """May be a slice, e.g. `train[:1000]`."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""


TableConfig: TypeAlias = JsonlSource | ParquetSource | HuggingFaceSource
SourceConfig: TypeAlias = Annotated[
    Annotated[ReasoningGymSource | TableConfig, Field(discriminator="kind")],
    BeforeValidator(lambda value: source_of(value) if isinstance(value, str) else value),
]


class DataConfig(Section):
    """Prompts to train on and to evaluate on; a path or a source alone is `train`."""

    named_by = "train"

    train: SourceConfig
    val: SourceConfig | None = None
    """null: a tenth of `train` is held out of training, at most 128 tasks."""

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
                f"set data.val.seed to {a.seeds.stop} or more"
            )
        return self
