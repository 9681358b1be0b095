"""This module keeps float32 masters of the trained weights of a model that computes in bfloat16.

    master (float32) ──rounded after each update──► weight (bfloat16) ──► forward, backward
        ▲                                                                      │
        └── optimizer step ◄── sum of gradients (float32) ◄── gradient ────────┘

The weights of the model are then exactly those that are published, and every operation of the
forward pass runs in the type in which an engine runs it. This is what FSDP2's mixed precision does
for sharded weights (`fsdp.py`). Autocast is another policy: it leaves the residual stream, the
norms and the embedding in float32.

Owns: masters, rounding, the sum of gradients over micro-batches. Does not own: the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


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
            weight.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]  # torch leaves it untyped
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

    def _collect(self, weight: Tensor) -> None:
        """Add the gradient of a backward pass to the master's, and free it."""
        master, grad = self._masters[weight], weight.grad  # type: ignore[index]  # a parameter
        if grad is not None:
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        weight.grad = None
