"""The boundary between Stepwell's data and whatever trains on it.

A `TrainingBackend` turns Steps into the trainer's own batch. `convert` is all that a plug-in needs
whose trainer owns its loop; a backend that Stepwell's loop drives implements the rest too::

    steps ──convert──► TokenBatch ──compute_log_probs──► prox_log_probs ─┐
                            ▲   columns: advantages, weights, coef, … ◄──┘ (the trainer writes them)
                            └── train_step(batch, loss_fn) × n ──► save_weights ──► state_dict

Owns: the interface, the batch and loss types that cross it, and backends by name (`BACKENDS`).
Does not own: the list of names (`registry.py`), any model (`torch/backend.py`), any formula
(`trainer/algorithms/`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from stepwell.backends.config import LoraConfig, TorchBackendConfig
from stepwell.backends.errors import (
    BackendConfigError,
    BatchError,
    UnsupportedByBackendError,
    checkpoint_remedy,
)
from stepwell.backends.registry import BACKEND_NAMES, Registry, first_line
from stepwell.datapool.config import Section
from stepwell.datapool.sealed import check, fsync, seal
from stepwell.datapool.types import Step

NO_PICTURES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class TokenBatch:
    """Steps as flat columns over all their response tokens, concatenated in step order.

    Step i owns tokens `offsets[i]:offsets[i + 1]`. Every column is float32 of shape [T], on the
    CPU. `rollout_log_probs` is there from the start, NaN where a step brought none: used by
    mistake it spoils the loss loudly, as 0.0 would not.
    """

    steps: tuple[Step, ...]
    offsets: Tensor
    """int64, [S + 1]."""
    columns: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Self:
        """The flat columns of `steps`."""
        if not steps:
            raise BatchError("convert was given no steps; a batch has at least one")
        lengths = torch.tensor([len(s.response_ids) for s in steps], dtype=torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        log_probs = torch.cat(
            [
                torch.full((len(s.response_ids),), torch.nan)
                if s.rollout_log_probs is None
                else torch.tensor(s.rollout_log_probs, dtype=torch.float32)
                for s in steps
            ]
        )
        return cls(tuple(steps), offsets, {"rollout_log_probs": log_probs})

    @property
    def n_tokens(self) -> int:
        """T, the number of response tokens."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """int64, [S]: response tokens of each step."""
        return self.offsets.diff()

    def expand(self, per_step: Sequence[float] | Tensor) -> Tensor:
        """[S] values -> [T] float32, each step's value on all its tokens."""
        values = torch.as_tensor(per_step, dtype=torch.float32)
        if values.shape != (len(self.steps),):
            raise BatchError(
                f"expand was given shape {tuple(values.shape)} for {len(self.steps)} steps"
            )
        return torch.repeat_interleave(values, self.lengths)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as its two sums, so that micro-batches combine exactly: Σ total / Σ count."""

    total: Tensor
    count: Tensor

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


class LossOutput(NamedTuple):
    """Result of a loss function for one micro-batch."""

    loss: Tensor
    """Scalar with gradient; the losses of all micro-batches add up to the loss of the update."""
    metrics: dict[str, Mean]
    columns: Mapping[str, Tensor] = MappingProxyType({})
    """Columns found by this forward pass, [n] each, without gradient: the backend writes them into
    the batch's (`TrainingBackend.returns_columns`)."""


class LossFn(Protocol):
    """Pure function of one micro-batch: any subset of the batch's tokens, in any order.

    It may have an attribute `entropy` ("none" | "value" | "gradient", default "none"): whether it
    wants the policy's entropy, and whether with gradient.
    """

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        """`log_probs`, `entropy` and every column have shape [n]."""
        ...


class TrainingBackend(ABC):
    """Adapter to one trainer. Only `convert` is abstract; see the module's docstring."""

    options: ClassVar[type[BaseModel]] = Section
    """The model of `backend.options`: fields with a type, a default and a docstring."""
    is_remote: ClassVar[bool] = False
    """The model is trained by a service, in no memory of these machines."""
    saves_beside: ClassVar[bool] = False
    """`save_state` returns long before the folder is whole: training goes on meanwhile."""
    returns_columns: ClassVar[bool] = False
    """`train_step` writes `LossOutput.columns` into the batch's columns, NaN where nothing was
    computed. Without it the loop recomputes log π of every batch before its optimizer step."""

    @classmethod
    def own_options(cls, given: Mapping[str, Any]) -> BaseModel:
        """`backend.options` as this backend's own model, for its `__init__` or `build`.

        Raises:
            BackendConfigError: a key is not the model's, or a value is wrong.
        """
        try:
            return cls.options.model_validate(given)
        except ValidationError as e:
            wrong = e.errors()[0]
            key = ".".join(map(str, ("backend.options", *wrong["loc"])))
            raise BackendConfigError(
                f"{key} is {wrong['input']!r:.80}: {wrong['msg']}; the options of {cls.__name__} "
                f"are {', '.join(cls.options.model_fields) or 'none'}"
            ) from e

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> TrainingBackend:
        """Build what `build_backend` returns: an instance, or what stands for many of them.

        `stepwell train` calls `build(config, model_path, **placement)`: the section `backend`, the
        model's folder, and `options`, the Ray actor options of each rank, if there are ranks beside
        the trainer's process.
        """
        return cls(*args, **kwargs)

    @classmethod
    def adapters(cls, config: TorchBackendConfig) -> LoraConfig | None:
        """Return the adapters that it trains under the section `backend`, which engines are told
        of (`engine.weight_transport: lora`); None: it trains whole weights.

        Raises:
            BackendConfigError: `backend.options` has a key or a value that is not its own.
        """
        return config.lora

    @classmethod
    def missing(cls) -> str | None:
        """Return what this machine lacks for it (an optional package), with the remedy, or None."""
        return None

    @classmethod
    def lacks(cls, method: str) -> bool:
        """Return whether this class does not implement `method`."""
        return bool(getattr(cls, method) == getattr(TrainingBackend, method))

    @classmethod
    def loop_lacks(cls) -> list[str]:
        """Methods that Stepwell's loop calls and this class has not; none: it can drive it."""
        return [method for method in _OF_THE_LOOP if cls.lacks(method)]

    @abstractmethod
    def convert(self, steps: list[Step]) -> Any:
        """The trainer's own batch made of `steps`; a `TokenBatch` if Stepwell's loop drives it."""

    def convert_with_pictures(self, steps: list[Step], pictures: Mapping[str, bytes]) -> Any:
        """`convert` of steps that name pictures, where `pictures` has their PNGs by digest."""
        raise UnsupportedByBackendError(
            f"{type(self).__name__} trains on text only, and the steps have pictures; set "
            "trainer.backend to 'torch'"
        )

    def compute_log_probs(self, batch: Any) -> Tensor:
        """log π of every response token at its step's temperature: [T] fp32 on the CPU, no grad."""
        raise self._unsupported("compute_log_probs")

    def compute_ref_log_probs(self, batch: Any) -> Tensor:
        """log π_ref, likewise: of the frozen start model (with LoRA, its base), which a KL penalty
        holds the policy to. Only asked for if `algorithm.kl.place` is not `none`."""
        raise self._unsupported("compute_ref_log_probs")

    def train_step(
        self, batch: Any, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step over the steps `indices` of the batch (all if None); its metrics.
        `skipped` is 1 among them if the step was not taken (a gradient that is not finite): it
        makes no data staler."""
        raise self._unsupported("train_step")

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory that an engine can load."""
        raise self._unsupported("save_weights")

    def save_adapters(self, path: str | Path) -> None:
        """Write a LoRA adapter alone, as a directory that peft and SGLang load. Only asked for if
        `engine.weight_transport` is `lora`."""
        raise self._unsupported("save_adapters")

    def load_weights(self, path: str | Path) -> None:
        """Train on from the weights in `path`, which `save_weights` or `save_adapters` wrote, or
        from those of the start. Only asked for by a roll-back (`publish.guard`,
        `stepwell rollback`); what the optimizer has gathered under other weights is forgotten."""
        raise self._unsupported("load_weights")

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on exactly where it was."""
        raise self._unsupported("state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        raise self._unsupported("load_state_dict")

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Begin to write all that training needs to go on exactly where it was into `folder`, and
        return what is small enough to travel to the trainer: counters and their like. Training may
        go on; the folder counts when `wait_saved` has returned.

        Here: `state_dict` at once, in one file.
        """
        folder.mkdir(parents=True)
        torch.save(self.state_dict(), folder / "state.pt")
        fsync(folder / "state.pt")
        seal(folder)
        return {}

    def wait_saved(self) -> None:
        """Return when what `save_state` began is on disk. Called beside the other methods, in a
        thread of its own.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        return

    def load_state(
        self, folder: Path, state: Mapping[str, Any], *, weights_only: bool = False
    ) -> None:
        """Go on from a folder of `save_state` and what that returned.

        Args:
            weights_only: nobody trains on: the optimizer's state need not be read.

        Raises:
            DamagedFileError: a file is not what was written.
        """
        check(folder, checkpoint_remedy(folder.parent))
        # Our own file, and what was written: the weights-only reader refuses RNG states.
        self.load_state_dict(torch.load(folder / "state.pt", weights_only=False))

    def lead(self, method: str, *args: Any) -> Any:
        """Call a method of the `Sender` (`backends/weights/sender.py`) in the process that has the
        whole weights when they are saved; also beside a running `train_step`. A backend without it
        sends what it has written."""
        raise self._unsupported("lead")

    def free_cache(self) -> None:
        """Give memory that is cached between two calls back to the device, for engines on it."""
        return

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        return

    def _unsupported(self, method: str) -> UnsupportedByBackendError:
        return UnsupportedByBackendError(
            f"{type(self).__name__} does not implement {method}(); Stepwell's loop needs it. "
            "Implement it, or let the backend's own trainer run the loop"
        )


_OF_THE_LOOP = ("compute_log_probs", "train_step", "save_weights", "state_dict", "load_state_dict")


def _is_backend(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, TrainingBackend)


def _about(backend: type[TrainingBackend]) -> str:
    return first_line(backend) + (" (convert only)" if backend.loop_lacks() else "")


BACKENDS: Registry[type[TrainingBackend]] = Registry(
    BACKEND_NAMES,
    wanted="TrainingBackend",
    fits=_is_backend,
    lacks=lambda name, backend: backend.missing(),
    about=_about,
)


def loop_backend(name: str, options: Mapping[str, Any]) -> type[TrainingBackend]:
    """`BACKENDS.load(name)`, if Stepwell's loop can drive it on this machine.

    Args:
        options: `backend.options`.

    Raises:
        BackendConfigError: it cannot be used, lacks a package, has not all methods, or takes no
            such options.
    """
    found = BACKENDS.load(name)
    if lacking := found.loop_lacks():
        raise BackendConfigError(
            f"trainer.backend is {name!r}, which does not implement {', '.join(lacking)}; its own "
            "trainer runs the loop, fed from the pool (docs/design/backends.md). `stepwell train` "
            "runs on trainer.backend=torch"
        )
    if (missing := found.missing()) is not None:
        raise BackendConfigError(f"trainer.backend is {name!r}: {missing}")
    found.own_options(options)
    return found


def build_backend(name: str, *args: Any, **kwargs: Any) -> TrainingBackend:
    """`BACKENDS.load(name).build(*args, **kwargs)`."""
    return BACKENDS.load(name).build(*args, **kwargs)
