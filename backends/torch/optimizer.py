"""The optimizer's side of an update: the weights that it moves, its rule and its learning rate.

    master (float32) ──rounded after each update──► weight (bfloat16) ──► forward, backward
        ▲                                                                      │
        └── optimizer step ◄── sum of gradients (float32) ◄── gradient ────────┘

Of a model that computes in bfloat16 the weights are then exactly those that are published, and
every operation of the forward pass runs in the type in which an engine runs it. FSDP2's mixed
precision does the same for sharded weights (`fsdp.py`). Autocast is another policy: it leaves the
residual stream, the norms and the embedding in float32.

The rate is a pure function of the number of updates applied: a resumed run needs no scheduler
state, a skipped update does not advance it, and a changed `lr` holds from the resume on.

Owns: masters, rounding, the sum of gradients over micro-batches; which class and which parameters
decay; the count of updates. Does not own: gradient clipping (`torch/backend.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError, NonFiniteUpdateError

MAX_SKIPPED = 3
"""Updates in a row that are skipped. One bad batch must not end a long run; four in a row are no
batch's fault."""


@dataclass(slots=True)
class Updates:
    """Count of a run's updates: one whose loss or gradient is not finite is skipped."""

    config: TorchBackendConfig
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.config, self.applied)

    def apply(self) -> None:
        """Count one that was applied."""
        self.applied += 1
        self.skipped_in_a_row = 0

    def skip(self, found: str) -> None:
        """Count one that was not, because of what was `found` ("loss is nan").

        Raises:
            NonFiniteUpdateError: more than `MAX_SKIPPED` in a row were not.
        """
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > MAX_SKIPPED:
            raise NonFiniteUpdateError(
                f"{found} at update {self.applied}, {self.skipped_in_a_row} in a row "
                f"(at most {MAX_SKIPPED} are skipped); the weights are untouched. Lower lr "
                f"({self.config.lr:g}) or look at the batch"
            )

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {
            "updates": self.applied,
            "skipped_updates": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's."""
        self.applied = state["updates"]
        self.skipped = state["skipped_updates"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


class MasterWeights:
    """The trained weights of `model` as the optimizer sees them.

    In float32, and for sharded weights, these are the model's own parameters.

    Args:
        model: its trained parameters are float32; in bfloat16 they are rounded in place.
        dtype: of the forward pass.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self.parameters = trained
        """Tensors that the optimizer updates."""
        if dtype == torch.float32:
            return
        for weight in trained:
            master = nn.Parameter(weight.detach())
            weight.data = weight.detach().to(dtype)
            # A hook that knew `self` would keep both alive: Python sees no circle through a hook.
            weight.register_post_accumulate_grad_hook(partial(_collect, master))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._masters[weight] = master
        self.parameters = list(self._masters.values())

    def round(self) -> None:
        """Give the model the masters' values."""
        with torch.no_grad():
            for weight, master in self._masters.items():
                weight.copy_(master)

    def named(self) -> dict[str, Tensor]:
        """The model's `state_dict` with the masters in place of the weights; live."""
        weights = self._model.state_dict(keep_vars=True)
        return {name: self._masters.get(w, w).detach() for name, w in weights.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the masters' values from `weights`, by the model's names."""
        if self._masters:
            for name, master in self.named().items():
                if name in weights:
                    master.copy_(weights[name])


def _collect(master: nn.Parameter, weight: Tensor) -> None:
    """Add the gradient of a backward pass to the master's, and free it."""
    if (grad := weight.grad) is not None:
        master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
    weight.grad = None


def learning_rate(config: TorchBackendConfig, updates: int) -> float:
    """The rate of the update after `updates` applied ones.

        u < w:  lr (u + 1) / w                          w = warmup_steps
        else:   lr (m + (1 - m) f(x))                   m = min_lr_ratio
                x = min(1, (u - w) / (s - w))           s = scheduler_steps
                f = 1 | 1 - x | (1 + cos πx) / 2        constant | linear | cosine

    From the warm-up on these are the values of transformers' `get_scheduler`; its warm-up begins
    with an update at rate 0, which would train on a batch for nothing.
    """
    if updates < config.warmup_steps:
        return config.lr * (updates + 1) / config.warmup_steps
    if config.scheduler == "constant" or config.scheduler_steps is None:
        return config.lr
    decay_steps = config.scheduler_steps - config.warmup_steps
    x = min(1.0, (updates - config.warmup_steps) / decay_steps)
    left = 1 - x if config.scheduler == "linear" else (1 + math.cos(math.pi * x)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def build_optimizer(
    config: TorchBackendConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer named by `config.optimizer`; matrices decay, norms and biases do not.

    Raises:
        BackendConfigError: it needs a package that is not installed.
    """
    trained = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for group, decay in (
            ([p for p in trained if p.ndim >= 2], config.weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        )
        if group
    ]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return _adamw_8bit(config, groups)


def _adamw_8bit(config: TorchBackendConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        from bitsandbytes import optim
    except ImportError as e:
        raise BackendConfigError(
            "backend.optimizer is 'adamw_8bit', which needs bitsandbytes; "
            "pip install 'bitsandbytes>=0.46' or take 'adamw'"
        ) from e
    # bitsandbytes leaves its constructors untyped.
    make: Callable[..., torch.optim.Optimizer] = vars(optim)["AdamW8bit"]
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Moments and step counts from `state`; rates, decay and their like stay the config's."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**state, "param_groups": groups})
