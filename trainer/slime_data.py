"""slime's data source: prompts, and the groups that slime has from the pool.

    slime's prompts      get_samples ──► rolled out by slime ──┬─► trained
                              ▲                                │
                              └───────── buffer ◄─ add_samples ┘ (interrupted)

    the pool's groups    take ──► leased ──► save ──► acked;   load: all that the checkpoint lacks
                                                               is served again (`slime_pool.py`)

Its state, `rollout/stepwell_state_N.pt`, lies beside slime's checkpoint N: the position in the
data, and what was added with the tokens it has.

Owns: slime's interface `DataSource`, and what slime's arguments say to Stepwell. Does not own:
leases (`slime_pool.py`), the order of prompts (`data/`). Lives in `trainer` since it needs the
pool and the prompt source; backends see neither.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepwell.backends.slime.samples import sample_class
from stepwell.datapool.dotted import resolve
from stepwell.datapool.remote.start import connect
from stepwell.datapool.types import TRAIN, VAL, Group
from stepwell.trainer.config import JsonlSource, ParquetSource
from stepwell.trainer.data import PromptSource, Task
from stepwell.trainer.errors import CheckpointError, ConfigError, DataError
from stepwell.trainer.slime_pool import SlimePool, write_durably

PREFIX = "stepwell_"


class SlimeConfig(BaseModel):
    """What slime's `--custom-config-path` says to us, each name with `stepwell_` before it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: str = "data_pool"
    """Name of the pool's actor."""
    namespace: str | None = None
    """Its Ray namespace: `stepwell-NAME` for the pool of `run.name=NAME`; null = slime's own."""
    channel: str = TRAIN
    """To train on. This run is its only consumer: leases left by an earlier one are taken back."""
    val_channel: str = VAL
    """To evaluate on."""
    val_groups: int | None = Field(default=None, ge=1)
    """Groups of an evaluation, waited for; null = those that are ready when it begins."""
    lease_s: float = Field(default=600.0, gt=0)
    """How long groups stay leased after the rollout manager's process died; renewed while it
    lives. A restart gives them back at once."""

    @classmethod
    def of(cls, args: Any) -> SlimeConfig:
        """Reads slime's arguments.

        Raises:
            ConfigError: a `stepwell_` name that is unknown, or a wrong value.
        """
        given = {
            name.removeprefix(PREFIX): value
            for name, value in vars(args).items()
            if name.startswith(PREFIX)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as e:
            problems = "\n".join(
                f"{PREFIX}{'.'.join(map(str, p['loc']))} is {p['input']!r:.80}: {p['msg']}"
                for p in e.errors()
            )
            known = ", ".join(PREFIX + name for name in cls.model_fields)
            raise ConfigError(f"{problems} (known: {known})") from e


class PoolDataSource:
    """For slime's `--data-source-path`: prompts, and the groups that slime has from the pool.

    `get_samples` hands out prompts as they are in the data (`--prompt-data`), for rollout functions
    that generate; `generate_rollout` needs none.

    Args:
        args: slime's.

    Raises:
        ConfigError, DataError: as `SlimeConfig.of` and `PromptSource`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.config = SlimeConfig.of(args)
        self.buffer: list[list[Any]] = []
        """Groups of samples that were added, which go out before anything new."""
        self._prompts = _prompt_source(args)
        self._n_groups = 0
        self._saved = -1
        """The last rollout that slime saved."""
        self._resumes: int | None = -1
        """Checkpoint that the run starts from, until the pool was told."""

    @cached_property
    def pool(self) -> SlimePool:
        """Connected to when it is first needed."""
        save, load = (_folder(self.args, name) for name in ("save", "load"))
        return SlimePool(
            connect(self.config.pool, self.config.namespace),
            self.config.channel,
            self.config.lease_s,
            save if self._saves else None,
            load if self._saves else None,
        )

    @property
    def _saves(self) -> bool:
        """Whether slime calls `save` after its checkpoints."""
        return bool(self.args.rollout_global_dataset and self.args.save_interval is not None)

    def take(self, rollout_id: int) -> list[Group]:
        """The groups of a rollout, leased until `save`."""
        if self._resumes is not None:
            self.pool.resume(self._resumes)
            self._resumes = None
        if not self._saves:
            self.pool.settle(rollout_id - 1)
        return self.pool.take(
            rollout_id, self.args.rollout_batch_size, self.args.n_samples_per_prompt
        )

    def look(self) -> list[Group]:
        """The groups of an evaluation."""
        return self.pool.look(self.config.val_groups, self.config.val_channel)

    # -- slime's interface -------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups of `n_samples_per_prompt` samples to roll out: first what was added.

        Raises:
            DataError: there are no prompts.
            DataExhaustedError: all their epochs are done.
        """
        groups = self._from_buffer(num_samples)
        while len(groups) < num_samples:
            groups.append(self._next_group())
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Groups that are not finished; `get_samples` hands them out again as they are."""
        self.buffer += samples

    def save(self, rollout_id: int) -> None:
        """slime has saved its checkpoint of `rollout_id`. With `--async-save` that one is being
        written still, and the one before it is durable."""
        if (folder := _folder(self.args, "save")) is not None:
            path = _state_path(folder, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            state = io.BytesIO()
            torch.save(self.state_dict(), state)
            write_durably(path, state.getvalue())
        last = rollout_id == self.args.num_rollout - 1
        late = getattr(self.args, "async_save", False) and not last
        durable, self._saved = self._saved if late else rollout_id, rollout_id
        if self._resumes is None:  # else nothing was taken
            self.pool.settle(durable)

    def load(self, rollout_id: int | None = None) -> None:
        """slime has loaded its checkpoint of `rollout_id` (-1: none) and starts after it."""
        done = -1 if rollout_id is None else rollout_id
        folder = _folder(self.args, "load")
        if folder is not None and (path := _state_path(folder, done)).exists():
            try:
                state = torch.load(path, weights_only=False)  # our own file; samples are no tensors
            except Exception as e:  # what is damaged fails in many ways
                raise CheckpointError(
                    f"{path} cannot be read ({type(e).__name__}: {e}); remove it to start with the "
                    "data from the beginning"
                ) from e
            self.load_state_dict(state)
        self._saved = self._resumes = done

    def __len__(self) -> int:
        """Prompts of an epoch; 0 if there are none here."""
        return 0 if self._prompts is None else len(self._prompts)

    # -- inside ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and what was added."""
        return {
            "prompts": None if self._prompts is None else self._prompts.state_dict(),
            "n_groups": self._n_groups,
            "buffer": [[sample.to_dict() for sample in group] for group in self.buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: it is of other data.
        """
        if self._prompts is not None and state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])
        self._n_groups = state["n_groups"]
        make = sample_class().from_dict
        self.buffer = [[make(sample) for sample in group] for group in state["buffer"]]

    def _from_buffer(self, n: int) -> list[list[Any]]:
        if not self.buffer or not n:
            return []
        if path := getattr(self.args, "buffer_filter_path", None):
            taken: list[list[Any]] = resolve(path)(self.args, None, self.buffer, n)
            return taken
        taken, self.buffer = self.buffer[:n], self.buffer[n:]
        return taken

    def _next_group(self) -> list[Any]:
        if self._prompts is None:
            raise DataError(
                "there are no prompts to hand out; set --prompt-data (agents that call the "
                "gateway bring their own)"
            )
        task = self._prompts.next()
        n = self.args.n_samples_per_prompt
        first = self._n_groups * n
        made = sample_class()
        group = [
            made(
                group_index=self._n_groups,
                index=first + i,
                prompt=task["question"] if "question" in task else task["messages"],
                label=task["answer"],
                metadata=_metadata(task),
            )
            for i in range(n)
        ]
        self._n_groups += 1
        return group


def _metadata(task: Task) -> dict[str, Any]:
    own = {"instance_id": task["instance_id"], "source_name": task["data_source"]}
    tools = {"tools": task["tools"]} if "tools" in task else {}
    return {**task["metadata"], **own, **tools}


def _folder(args: Any, name: str) -> Path | None:
    value = getattr(args, name, None)
    return None if value is None else Path(value)


def _state_path(folder: Path, rollout_id: int) -> Path:
    return folder / "rollout" / f"stepwell_state_{rollout_id}.pt"


def _prompt_source(args: Any) -> PromptSource | None:
    if getattr(args, "prompt_data", None) is None:
        return None
    if args.apply_chat_template:
        raise ConfigError(
            "apply_chat_template is set, but PoolDataSource hands prompts out as messages: agents "
            "send them to the gateway, which renders them; leave --apply-chat-template out"
        )
    kind = ParquetSource if str(args.prompt_data).endswith(".parquet") else JsonlSource
    return PromptSource(
        kind(
            kind="parquet" if kind is ParquetSource else "jsonl",
            path=Path(args.prompt_data),
            prompt_key=args.input_key,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            max_prompt_tokens=args.rollout_max_prompt_len,
            shuffle=args.rollout_shuffle,
            shuffle_seed=args.rollout_seed,
        ),
        tokenizer_path=_folder(args, "hf_checkpoint"),
    )
