"""The boundary between Stepwell's data and whatever trains on it.

A `TrainingBackend` turns Steps into the trainer's own batch. `convert` is all that a plug-in needs
whose trainer owns its loop; a backend that Stepwell's loop drives implements the rest too::

    steps ──convert──► TokenBatch ──compute_log_probs──► prox_log_probs ─┐
                            ▲   columns: advantages, weights, coef, … ◄──┘ (the trainer writes them)
                            └── train_step(batch, loss_fn) × n ──► save_weights ──► state_dict

Owns: the interface, the batch and loss types that cross it, and the registry of names.
Does not own: any model (`torch_backend.py`), any formula (`trainer/losses.py`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from backends.errors import BackendConfigError, BatchError, UnsupportedByBackendError
from datapool.types import Step


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
    def of(cls, steps: Sequence[Step]) -> TokenBatch:
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
    """What a loss function says of one micro-batch."""

    loss: Tensor
    """Scalar with gradient; the losses of all micro-batches add up to the loss of the update."""
    metrics: dict[str, Mean]


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

    @abstractmethod
    def convert(self, steps: list[Step]) -> Any:
        """The trainer's own batch made of `steps`; a `TokenBatch` if Stepwell's loop drives it."""

    def compute_log_probs(self, batch: Any) -> Tensor:
        """log π of every response token at its step's temperature: [T] fp32 on the CPU, no grad."""
        raise self._unsupported("compute_log_probs")

    def train_step(
        self, batch: Any, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step over the steps `indices` of the batch (all if None); its metrics."""
        raise self._unsupported("train_step")

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory that an engine can load."""
        raise self._unsupported("save_weights")

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on exactly where it was."""
        raise self._unsupported("state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        raise self._unsupported("load_state_dict")

    def close(self) -> None:
        """Free what the backend holds. Idempotent."""
        return

    def _unsupported(self, method: str) -> UnsupportedByBackendError:
        return UnsupportedByBackendError(
            f"{type(self).__name__} does not implement {method}(); Stepwell's loop needs it. "
            "Implement it, or let the backend's own trainer run the loop"
        )


BACKENDS: Mapping[str, str] = MappingProxyType({"torch": "backends.torch_backend:TorchBackend"})
"""Name -> `module:Class`, imported on use."""


def backend_class(name: str) -> type[TrainingBackend]:
    """The class registered under `name`, or found at the dotted path `module:Class`.

    Raises:
        BackendConfigError: neither; the message says which part failed.
    """
    path = BACKENDS.get(name, name)
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    hint = f"choose {', '.join(BACKENDS)} or give a dotted path module:Class"
    if not module_name:
        raise BackendConfigError(f"backend is {name!r}; {hint}")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as e:
        raise BackendConfigError(
            f"backend is {name!r}, which cannot be imported ({e}); {hint}"
        ) from e
    if not (isinstance(found, type) and issubclass(found, TrainingBackend)):
        raise BackendConfigError(f"backend is {name!r}, which is no TrainingBackend; {hint}")
    return found


def build_backend(name: str, *args: Any, **kwargs: Any) -> TrainingBackend:
    """`backend_class(name)(*args, **kwargs)`."""
    return backend_class(name)(*args, **kwargs)
