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

The state, `rollout/global_dataset_state_dict_N.pt`, lies beside slime's checkpoint N and has
slime's name and keys: `sample_offset`, `epoch_id`, `sample_group_index`, `sample_index`,
`metadata`. What slime wrote is read, and slime reads what is written here. Behind them stand keys
of ours: the data that the position is one of, and what was added, with the tokens it has.

Names, methods and the order of an epoch are slime's (THUDM/slime 0.3.1,
`slime/rollout/data_source.py`), so its rollout functions run on each of them. Differences: the
buffer is saved, too; malformed groups are refused before any is added; where an epoch has fewer
prompts than are asked for, the next ones are gone through.

Does not own: leases (`pool.py`), prompts and their order (`dataset.py`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from stepwell.backends.slime.sample import sample_class
from stepwell.datapool.dotted import resolve
from stepwell.datapool.remote.start import connect
from stepwell.datapool.sealed import damaged, is_sealed, sealed, unsealed, write_durably
from stepwell.datapool.types import Group
from stepwell.trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GroupShapeError,
    ReadOnlyDataError,
)
from stepwell.trainer.slime.config import SlimeConfig, folder
from stepwell.trainer.slime.dataset import open_dataset
from stepwell.trainer.slime.pool import SlimePool
from stepwell.trainer.slime.torch_file import load_torch

log = logging.getLogger(__name__)

REMEDY = "remove it to start with the data from the beginning"
DATA = "stepwell_data"
"""Key of a state: the data that its position is one of. Absent in what slime wrote."""


class RolloutDataSource:
    """Prompts, `n_samples_per_prompt` samples each; read-only.

    Without prompts (`--disable-rollout-global-dataset`) the samples are empty but for their
    numbers: the rollout function brings its own data.

    Args:
        args: slime's.

    Raises:
        DataError, ConfigError: as `open_dataset`.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = 0
        """Epoch that is gone through."""
        self.sample_group_index = 0
        """Groups handed out so far."""
        self.sample_index = 0
        """Samples handed out so far."""
        self.sample_offset = 0
        """Prompts of the epoch handed out so far."""
        self.metadata: dict[str, Any] = {}
        """State that a rollout function wants to have kept with the position; saved with it."""
        self.dataset = open_dataset(args)
        """Prompts; None: samples are empty."""
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def __len__(self) -> int:
        """Prompts of an epoch; 0 if there are none here."""
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups to roll out. Samples share nothing that they may change."""
        return [self._group(prompt) for prompt in self._next_prompts(num_samples)]

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Refused: this source is read-only.

        Raises:
            ReadOnlyDataError: always; a RuntimeError, as slime's.
        """
        raise ReadOnlyDataError(
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
        """slime has saved its checkpoint of `rollout_id`.

        Raises:
            CheckpointError: `load` would refuse the state, for what somebody put into metadata.
        """
        where = folder(self.args, "save")
        if where is None or not self.args.rollout_global_dataset:
            return
        path = _state_path(where, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = io.BytesIO()
        torch.save(self.state_dict(), state)
        try:
            load_torch(state.getvalue())
        except ValueError as e:
            raise CheckpointError(
                f"{path} is not written, since it could not be read again ({e}); keep numbers, "
                "text, lists, dicts and arrays in the metadata of the data source and of samples"
            ) from e
        write_durably(path, sealed(state.getvalue()))

    def load(self, rollout_id: int | None = None) -> None:
        """slime has loaded its checkpoint of `rollout_id` (-1 or None: none) and starts after it.
        Where that has no state the data begin at their start, and the log says so.

        Raises:
            CheckpointError: the state cannot be read.
            DamagedFileError: it is not what was written.
            DataError: it is of other data.
        """
        where = folder(self.args, "load")
        if where is None or not self.args.rollout_global_dataset:
            return
        path = _state_path(where, rollout_id)
        if path.exists():
            self.load_state_dict(_read(path))
            return
        # A run that begins has none; one that goes on begins its data anew.
        level = logging.INFO if rollout_id in (None, -1) else logging.WARNING
        log.log(level, "%s does not exist: the data begin at their start", path)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and `metadata`."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": self.metadata,
            DATA: self._data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state`, of this class or of slime's, was taken.

        Raises:
            DataError: it is of other data.
        """
        theirs = state.get(DATA) or {}
        changed = [
            f"{name} {theirs[name]!r} (now {now!r})"
            for name, now in self._data.items()
            if theirs.get(name, now) != now
        ]
        if changed:
            raise DataError(
                f"the saved state belongs to other data: {', '.join(changed)}; give slime the "
                "arguments of before, or start a new run"
            )
        offset = state.get("sample_offset", 0)
        if self.dataset is not None and offset > len(self):
            raise DataError(
                f"the saved state has sample_offset {offset}, and an epoch of prompt_data "
                f"{str(self.args.prompt_data)!r} has {len(self)} prompts; give slime the arguments "
                "of before, or start a new run"
            )
        self.sample_offset = offset
        self.epoch_id = state.get("epoch_id", 0)
        self.sample_index = state.get("sample_index", 0)
        # slime wrote none before it had `Sample.group_index`.
        groups = self.sample_index // self.args.n_samples_per_prompt
        self.sample_group_index = state.get("sample_group_index", groups)
        self.metadata = state.get("metadata", {})
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    @property
    def _data(self) -> dict[str, Any]:
        """Data that a position is one of: they must not change between saving and loading."""
        if self.dataset is None:
            return {}
        shuffled = self.args.rollout_shuffle
        return {"prompts": len(self), "order": self.args.rollout_seed if shuffled else "the file's"}

    def _next_prompts(self, wanted: int) -> list[Any]:
        if self.dataset is None:
            return [sample_class()() for _ in range(wanted)]
        prompts: list[Any] = []
        while (missing := wanted - len(prompts)) > 0:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            part = self.dataset.samples[self.sample_offset : self.sample_offset + missing]
            self.sample_offset += len(part)
            prompts += part
        return prompts

    def _group(self, prompt: Any) -> list[Any]:
        group = [deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Prompts, and groups that were added: they go out again before anything new, as
    `--buffer-filter-path` chooses (default: the oldest first). Such a function takes what it
    returns out of `buffer` itself, or it goes out again.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[Any]] = []
        """Groups that were added."""
        path = getattr(args, "buffer_filter_path", None)
        try:
            self.buffer_filter = pop_first if path is None else resolve(path)
        except ImportError as e:
            raise ConfigError(
                f"buffer_filter_path is {path!r} ({e}); name a function (args, rollout_id, buffer, "
                "num_samples) by a dotted path that Python can import"
            ) from e

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """`num_samples` groups to roll out: first what was added, as it is."""
        taken = self._get_samples_from_buffer(num_samples)
        return taken + super().get_samples(num_samples - len(taken))

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Groups that are not finished; `get_samples` hands them out again.

        Raises:
            GroupShapeError: a group is no list of `n_samples_per_prompt` samples; none is added.
                An AssertionError, as slime's.
        """
        if not samples:
            return
        _check_groups(samples, self.args.n_samples_per_prompt)
        self.buffer += samples

    def get_buffer_length(self) -> int:
        """Groups in the buffer."""
        return len(self.buffer)

    def _get_samples_from_buffer(self, num_samples: int) -> list[list[Any]]:
        """Take at most `num_samples` groups of the buffer, as `buffer_filter` chooses. The name is
        slime's: classes of one's own override it."""
        if not self.buffer or num_samples == 0:
            return []
        taken: list[list[Any]] = self.buffer_filter(self.args, None, self.buffer, num_samples)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, `metadata`, and what was added."""
        buffer = [[sample.to_dict() for sample in group] for group in self.buffer]
        return super().state_dict() | {"buffer": buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        make = sample_class().from_dict
        self.buffer = [[make(sample) for sample in group] for group in state.get("buffer", ())]


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
        """True if slime calls `save` after its checkpoints."""
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
        raise GroupShapeError(
            f"samples is a {type(samples).__name__}; add_samples takes a list of groups, each a "
            "list of samples"
        )
    wanted = sample_class()
    for number, group in enumerate(samples):
        if not isinstance(group, list):
            raise GroupShapeError(
                f"samples[{number}] is a {type(group).__name__}; a group is a list of {size} "
                "samples: add [group], not group"
            )
        if len(group) != size:
            raise GroupShapeError(
                f"samples[{number}] has {len(group)} samples, but n_samples_per_prompt is {size}; "
                "add whole groups, as get_samples gave them"
            )
        if strangers := [type(s).__name__ for s in group if not isinstance(s, wanted)]:
            raise GroupShapeError(
                f"samples[{number}] holds a {strangers[0]}; a group holds {wanted.__name__}s "
                f"({wanted.__module__})"
            )


def _state_path(where: Path, rollout_id: int | None) -> Path:
    return where / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def _read(path: Path) -> dict[str, Any]:
    """Return a state, of this module or of slime's."""
    data = path.read_bytes()
    try:
        content = unsealed(data) if is_sealed(data) else data
    except ValueError as e:
        raise damaged(path, str(e), REMEDY) from e
    try:
        state = load_torch(content)
    except ValueError as e:
        raise CheckpointError(f"{path} cannot be read ({e}); {REMEDY}") from e
    if not isinstance(state, dict) or "sample_index" not in state:
        raise CheckpointError(f"{path} holds no position in the data; {REMEDY}")
    if DATA in state and not is_sealed(data):
        raise damaged(path, "its digest is gone", REMEDY)
    return state
