"""The section `data`: where prompts come from.

A source is a procedural data set (`reasoning_gym`) or rows of a table (`jsonl`, `parquet`,
`huggingface`, or `custom`: a class of yours), whose columns the `*_key` fields name. `rollout.n`
says how often a prompt is tried. Text alone is a source, and a source alone is what is trained on:

    data: tasks.jsonl      is      data: { train: { kind: jsonl, path: tasks.jsonl } }
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from stepwell.datapool.config import Section, TextPath
from stepwell.trainer.environments import verifiers_episode

Location: TypeAlias = Annotated[
    Path | str,
    BeforeValidator(lambda v: v if "://" in str(v) or not isinstance(v, str) else Path(v)),
]
"""A path here, or an address such as s3://bucket/file, which stays text."""

Truncation: TypeAlias = Literal["left", "right", "middle", "error"]


def source_of(text: str) -> dict[str, str]:
    """Return the source that text alone stands for: a file, by how it ends; a class in a file; else
    what `datasets` loads, if it has a `/` or a `.` as files, folders and names on the hub have;
    else a kind."""
    if ".py:" in text:
        return {"kind": "custom", "cls": text}
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


class HarborSource(_Source):
    """Harbor task folders, which `rollout.harness` works on and their own tests score."""

    kind: Literal["harbor"]
    path: Path
    """Folder of task folders, or one task's own."""


class VerifiersSource(_Source):
    """Tasks of a `verifiers` environment (0.4), in a Python of its own. Its episodes are the
    rollouts: `rollout.harness` plays them, whose keys can be given, and its own rewards score."""

    kind: Literal["verifiers"]
    taskset: str = Field(min_length=1)
    """Its id: the package that has it."""
    python: Path
    """The Python that has verifiers and the package, e.g. `vf/bin/python`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Its `EnvConfig`, e.g. {agent: {harness: {id: "null"}}}. By default agents run on this
    machine, in the rollout's folder."""
    client: Literal["eval", "train"] = "eval"
    """The client of verifiers that asks the policy: `eval` by chat; `train` renders prompts with
    the template of `model.path` and calls `/inference/v1/generate`."""
    size: int | None = Field(default=None, ge=1)
    """Tasks, at most; null: all."""

    @property
    def argv(self) -> list[str]:
        """Beginning of the command lines that list its tasks and play one."""
        return [str(self.python.absolute()), verifiers_episode.__file__]

    @property
    def metadata(self) -> dict[str, str]:
        """Keys that a task has for its episode, besides its index."""
        return {"taskset": self.taskset, "env_config": json.dumps(self.config)}

    def harness(self, model: Path | str | None) -> dict[str, Any]:
        """The keys of `rollout.harness` that play an episode.

        Args:
            model: folder whose tokenizer the `train` client renders with.
        """
        command = [*self.argv, "episode", "{task.metadata.taskset}"]
        command += ["--index", "{task.metadata.index}", "--config", "{task.metadata.env_config}"]
        command += ["--base-url", "{base_url}", "--model", "{model}", "--out", "{home}/reward.txt"]
        if self.client == "train" and model is not None:
            command += ["--client", "train", "--tokenizer", str(Path(model).absolute())]
        return {
            "command": command,
            "env": {"STEPWELL_API_KEY": "{api_key}"},
            "infrastructure": [verifiers_episode.INFRASTRUCTURE],
            "grade": {"command": ["cp", "{home}/reward.txt", "reward"], "file": "reward"},
        }


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
    image_key: str | None = Field(default=None, min_length=1)
    """Holds the prompt's pictures, one for each `<image>` in it: paths, data URLs, bytes or objects
    with `bytes` or `path`, as `datasets` stores images. null: a row with pictures is refused."""
    data_source: str | None = None
    """Name given to the reward; null takes each row's own `data_source`, else the data's name."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, as the model's chat template writes it with its tools; null = any
    length."""
    filter_overlong_prompts: bool = True
    """Leave longer prompts out; false does with them what `truncation` says."""
    truncation: Truncation = "error"
    """Treatment of longer prompts that are not left out: cut their text at the `left` (the
    oldest), the `right` or in the `middle`, never in system messages; or refuse the data (`error`).
    """
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For the chat template that prompts are measured with, e.g. {enable_thinking: false}."""

    @model_validator(mode="after")
    def _truncation_has_a_use(self) -> RowSource:
        if self.truncation != "error" and self.filter_overlong_prompts:
            raise ValueError(
                f"truncation is {self.truncation!r} but filter_overlong_prompts leaves nothing to "
                "truncate; set filter_overlong_prompts to false, or remove truncation"
            )
        if self.truncation != "error" and self.max_prompt_tokens is None:
            raise ValueError(
                f"truncation is {self.truncation!r} without a length; set max_prompt_tokens"
            )
        return self


class JsonlSource(RowSource):
    """Files with one JSON object per line."""

    kind: Literal["jsonl"]
    path: Location | tuple[Location, ...]
    """A file, a folder of `*.jsonl`, a glob pattern, or a list of these; each here or at an address
    that fsspec knows (`s3://`, `gs://`, `hf://`, …)."""


class ParquetSource(RowSource):
    """Parquet files."""

    kind: Literal["parquet"]
    path: Location | tuple[Location, ...]
    """A file, a folder of `*.parquet`, a glob pattern, or a list of these; each here or at an
    address that fsspec knows (`s3://`, `gs://`, `hf://`, …)."""


class HuggingFaceSource(RowSource):
    """A data set that the `datasets` library loads."""

    kind: Literal["huggingface"]
    path: TextPath = Field(min_length=1)
    """A name on the hub, a folder of data, a file (`.csv` and `.tsv`, whose cells are text,
    `.json`, `.jsonl`, `.parquet`, `.arrow`, `.txt`, or one of these in `.gz`, `.bz2`, `.xz` or
    `.zst`), or a folder written by `save_to_disk` (here or at an address such as
    `s3://bucket/folder`)."""
    name: str | None = None
    """The configuration (subset) of a data set that has several."""
    split: str = Field(default="train", min_length=1)
    """May be a slice, e.g. `train[:1000]`."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""


class CustomSource(RowSource):
    """Rows that a class of yours gives, as verl's `data.custom_cls`: a map-style
    `torch.utils.data.Dataset`, or whatever has a length and gives rows by index. The defaults are
    the keys of verl's rows."""

    kind: Literal["custom"]
    cls: str = Field(min_length=1)
    """`path/to/file.py:Name` or `package.module:Name`. Of `data_files`, `tokenizer`, `processor`
    (None), `config` and `max_samples` (-1) it is given those that it takes."""
    path: Location | tuple[Location, ...] = ()
    """Passed as `data_files`, a list; what is at an address is brought here first."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keys of `config`, such as `return_full_prompt` or `cache_dir`. It has of verl's:
    `prompt_key`, `max_prompt_length` where `max_prompt_tokens` says it, `filter_overlong_prompts`,
    `truncation`, `return_raw_chat` (true), `apply_chat_template_kwargs`, `shuffle`, `seed`."""
    prompt_key: str = Field(default="prompt", min_length=1)
    """Column of the files that holds the prompt, for the class (`config.prompt_key`)."""
    returned_prompt_key: str | None = Field(default=None, min_length=1)
    """Key of the class's rows that holds the conversation so far (a list of messages) or the
    question (a string). null: `raw_prompt`, which verl's class returns, where a row has it, else
    `prompt_key`."""
    label_key: str | None = "reward_model.ground_truth"
    """Holds the right answer, for the reward; null if there is none."""
    metadata_key: str | None = "extra_info"
    """Holds an object, or its JSON text, that is passed to agent and reward as it is; null if there
    is none."""


TableConfig: TypeAlias = JsonlSource | ParquetSource | HuggingFaceSource | CustomSource
SourceConfig: TypeAlias = Annotated[
    Annotated[
        ReasoningGymSource | TableConfig | HarborSource | VerifiersSource,
        Field(discriminator="kind"),
    ],
    BeforeValidator(lambda value: source_of(value) if isinstance(value, str) else value),
]


class DataConfig(Section):
    """Prompts to train on and to evaluate on; a path or a source alone is `train`."""

    named_by = "train"

    train: SourceConfig | None = None
    """Prompts that are rolled out."""
    val: SourceConfig | None = None
    """null: a tenth of `train` is held out of training, at most 128 tasks."""
    sft: TableConfig | None = Field(default=None, discriminator="kind")
    """Conversations that are trained as they are (`algorithm.sft`). `prompt_key` is `messages` by
    default, a list of messages in OpenAI's form, `tool_key` `tools`, `image_key` `images` and
    `label_key` null; `max_prompt_tokens` counts the whole conversation."""

    @field_validator("sft", mode="before")
    @classmethod
    def _of_conversations(cls, value: Any) -> Any:
        given = source_of(value) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            return given
        usual = {"prompt_key": "messages", "tool_key": "tools", "image_key": "images"}
        return {**usual, "label_key": None, **given}

    @model_validator(mode="after")
    def _conversations_are_whole(self) -> DataConfig:
        if self.sft is not None and self.sft.truncation != "error":
            raise ValueError(
                f"sft.truncation is {self.sft.truncation!r}: a conversation that is trained as it "
                "is is never cut; set filter_overlong_prompts, or shorten it yourself"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_no_epochs(self) -> DataConfig:
        if self.val is not None and self.val.epochs is not None:
            raise ValueError(
                f"val.epochs is {self.val.epochs}, but each evaluation tries each task of val as "
                "often as validation.n says; leave it out, and set validation.n"
            )
        return self

    @model_validator(mode="after")
    def _episodes_of_one_kind(self) -> DataConfig:
        sources = [each for each in (self.train, self.val) if each is not None]
        played = [each for each in sources if isinstance(each, VerifiersSource)]
        if len({(each.python, each.client) for each in played}) > 1:
            one, other = played
            raise ValueError(
                f"one harness plays the episodes of both, but data.train.python is {one.python} "
                f"({one.client}) and data.val.python {other.python} ({other.client}); give both "
                "the same python and client"
            )
        if played and len(played) < len(sources):
            raise ValueError(
                f"train is of kind {sources[0].kind!r} and val of {sources[1].kind!r}: episodes of "
                "verifiers need tasks of verifiers; give both, or leave val out"
            )
        return self

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


def episodes_of(raw: Any) -> VerifiersSource | None:
    """The source among those of a `data` section, as it was given, whose episodes are rollouts."""
    try:
        data = DataConfig.model_validate(raw)
    except ValidationError:  # is said where it is read
        return None
    sources = (data.train, data.val)
    return next((each for each in sources if isinstance(each, VerifiersSource)), None)
