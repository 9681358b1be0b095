"""slime's data sources: prompts by group, what comes back, and the groups that slime has from the
pool.

    --data-source-path stepwell.trainer.slime.data_source.NAME

    RolloutDataSource              prompts (`--prompt-data`), or empty samples where there are none
      RolloutDataSourceWithBuffer  and groups that were interrupted, which go out again first
        PoolDataSource             and groups that slime trains from the pool, until it has saved

    prompts      get_samples ──► rolled out by slime ──┬─► trained
                      ▲                                │
                      └───────── buffer ◄─ add_samples ┘ (interrupted)

    groups       take ──► leased ──► save ──► acked;   load: all that the checkpoint lacks is
                                                       served again (`pool.py`)

The state, `rollout/stepwell_state_N.pt`, lies beside slime's checkpoint N: the position in the
data, `metadata`, and what was added with the tokens it has. Names and methods are slime's
(THUDM/slime 0.3.1, `slime/rollout/data_source.py`), so its rollout functions run on each of them.
Differences: the order of an epoch is `PromptSource`'s; the buffer is saved, too.

Does not own: leases (`pool.py`), the order of prompts (`trainer/data/`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stepwell.backends.slime.sample import sample_class
from stepwell.datapool.dotted import resolve
from stepwell.datapool.remote.start import connect
from stepwell.datapool.sealed import damaged, sealed, unsealed, write_durably
from stepwell.datapool.types import Group
from stepwell.trainer.data import PromptSource, Task
from stepwell.trainer.data.prompt_length import PromptMeter
from stepwell.trainer.errors import CheckpointError, ConfigError, DataError
from stepwell.trainer.slime.config import SlimeConfig, folder, prompt_data
from stepwell.trainer.slime.pool import SlimePool


class RolloutDataSource:
    """Prompts, `n_samples_per_prompt` samples each; read-only.

    Without prompts (`--disable-rollout-global-dataset`) the samples are empty but for their
    numbers: the rollout function brings its own data.

    Args:
        args: slime's.

    Raises:
        DataError: as `PromptSource`.
        ConfigError: `--apply-chat-template` without `--hf-checkpoint`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.sample_group_index = 0
        """Groups handed out so far."""
        self.sample_index = 0
        """Samples handed out so far."""
        self.metadata: dict[str, Any] = {}
        """What a rollout function wants to have kept with the position; saved with it."""
        config, model = prompt_data(args), folder(args, "hf_checkpoint")
        self._prompts = None if config is None else PromptSource(config, tokenizer_path=model)
        self._template: PromptMeter | None = None
        if config is not None and args.apply_chat_template:
            if model is None:
                raise ConfigError(
                    "apply_chat_template is set, but there is no model to take the template from; "
                    "set --hf-checkpoint, or leave --apply-chat-template out"
                )
            self._template = PromptMeter(model, config.apply_chat_template_kwargs)

    @property
    def epoch_id(self) -> int:
        """Passes over the prompts completed so far."""
        return 0 if self._prompts is None else self._prompts.epoch

    def __len__(self) -> int:
        """Prompts of an epoch; 0 if there are none here."""
        return 0 if self._prompts is None else len(self._prompts)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups to roll out. Samples share nothing that they may change."""
        return [self._next_group() for _ in range(num_samples)]

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Refused: this source is read-only.

        Raises:
            DataError: always.
        """
        raise DataError(
            f"add_samples was given {len(samples)} groups, but a {type(self).__name__} is "
            "read-only; set --data-source-path to "
            "stepwell.trainer.slime.data_source.RolloutDataSourceWithBuffer"
        )

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to `metadata`."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """`metadata` itself."""
        return self.metadata

    def save(self, rollout_id: int) -> None:
        """slime has saved its checkpoint of `rollout_id`."""
        where = folder(self.args, "save")
        if where is None or not self.args.rollout_global_dataset:
            return
        path = _state_path(where, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = io.BytesIO()
        torch.save(self.state_dict(), state)
        write_durably(path, sealed(state.getvalue()))

    def load(self, rollout_id: int | None = None) -> None:
        """slime has loaded its checkpoint of `rollout_id` (-1 or None: none) and starts after it.

        Raises:
            CheckpointError: the state cannot be read.
            DamagedFileError: it is not what was written.
            DataError: it is of other data.
        """
        where = folder(self.args, "load")
        if where is None or not self.args.rollout_global_dataset:
            return
        path = _state_path(where, -1 if rollout_id is None else rollout_id)
        if not path.exists():
            return
        remedy = "remove it to start with the data from the beginning"
        try:
            content = io.BytesIO(unsealed(path.read_bytes()))
        except ValueError as e:
            raise damaged(path, str(e), remedy) from e
        try:
            state = torch.load(content, weights_only=False)  # our own; samples are no tensors
        except Exception as e:  # what is damaged fails in many ways
            raise CheckpointError(
                f"{path} cannot be read ({type(e).__name__}: {e}); {remedy}"
            ) from e
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and `metadata`."""
        return {
            "prompts": None if self._prompts is None else self._prompts.state_dict(),
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: it is of other data.
        """
        if self._prompts is not None and state["prompts"] is not None:
            self._prompts.load_state_dict(state["prompts"])
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = state["metadata"]

    def _next_group(self) -> list[Any]:
        like = sample_class()(
            **({} if self._prompts is None else self._fields(self._prompts.next()))
        )
        group = [deepcopy(like) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def _fields(self, task: Task) -> dict[str, Any]:
        prompt = task["question"] if "question" in task else task["messages"]
        own = {"instance_id": task["instance_id"], "source_name": task["data_source"]}
        tools = {"tools": task["tools"]} if "tools" in task else {}
        return {
            "prompt": prompt if self._template is None else self._template.render(task),
            "label": task["answer"],
            "metadata": {**task["metadata"], **own, **tools},
        }


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Prompts, and groups that were added: they go out again before anything new, as
    `--buffer-filter-path` chooses (default: the oldest first)."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[Any]] = []
        """Groups that were added."""
        path = getattr(args, "buffer_filter_path", None)
        self.buffer_filter = pop_first if path is None else resolve(path)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups to roll out: first what was added, as it is."""
        taken: list[list[Any]] = []
        if self.buffer and num_samples:
            taken = self.buffer_filter(self.args, None, self.buffer, num_samples)
        return taken + super().get_samples(num_samples - len(taken))

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Groups that are not finished; `get_samples` hands them out again.

        Raises:
            DataError: a group is no list of `n_samples_per_prompt` samples; none is added.
        """
        _check_groups(samples, self.args.n_samples_per_prompt)
        self.buffer += samples

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, `metadata`, and what was added."""
        buffer = [[sample.to_dict() for sample in group] for group in self.buffer]
        return super().state_dict() | {"buffer": buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        make = sample_class().from_dict
        self.buffer = [[make(sample) for sample in group] for group in state["buffer"]]


class PoolDataSource(RolloutDataSourceWithBuffer):
    """Prompts, and the groups that slime has from the pool: `generate_rollout` takes them, and
    needs no prompts.

    Raises:
        ConfigError: as `SlimeConfig.of`.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.config = SlimeConfig.of(args)
        self._saved = -1
        """The last rollout that slime saved."""
        self._resumes: int | None = -1
        """Checkpoint that the run starts from, until the pool was told."""

    @cached_property
    def pool(self) -> SlimePool:
        """Connected to when it is first needed."""
        save, load = (folder(self.args, name) for name in ("save", "load"))
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

    def save(self, rollout_id: int) -> None:
        """slime has saved its checkpoint of `rollout_id`. With `--async-save` that one is being
        written still, and the one before it is durable."""
        super().save(rollout_id)
        last = rollout_id == self.args.num_rollout - 1
        late = getattr(self.args, "async_save", False) and not last
        durable, self._saved = self._saved if late else rollout_id, rollout_id
        if self._resumes is None:  # else nothing was taken
            self.pool.settle(durable)

    def load(self, rollout_id: int | None = None) -> None:
        super().load(rollout_id)
        self._saved = self._resumes = -1 if rollout_id is None else rollout_id


def pop_first(
    args: Any, rollout_id: int | None, buffer: list[list[Any]], num_samples: int
) -> list[list[Any]]:
    """The oldest groups, at most `num_samples`; slime's signature of `--buffer-filter-path`."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _check_groups(samples: Any, size: int) -> None:
    if not isinstance(samples, list):
        raise DataError(
            f"samples is a {type(samples).__name__}; add_samples takes a list of groups, each a "
            "list of samples"
        )
    wanted = sample_class()
    for number, group in enumerate(samples):
        if not isinstance(group, list):
            raise DataError(
                f"samples[{number}] is a {type(group).__name__}; a group is a list of {size} "
                "samples: add [group], not group"
            )
        if len(group) != size:
            raise DataError(
                f"samples[{number}] has {len(group)} samples, but n_samples_per_prompt is {size}; "
                "add whole groups, as get_samples gave them"
            )
        if strangers := [type(s).__name__ for s in group if not isinstance(s, wanted)]:
            raise DataError(
                f"samples[{number}] holds a {strangers[0]}; a group holds {wanted.__name__}s "
                f"({wanted.__module__})"
            )


def _state_path(where: Path, rollout_id: int) -> Path:
    return where / "rollout" / f"stepwell_state_{rollout_id}.pt"
