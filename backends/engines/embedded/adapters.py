"""One LoRA adapter, merged into the engine's weights: W' = W + s B A.

    base W ──load(a)──► W + s B_a A_a ──load(b)──► W + s B_b A_b ──unload──► W

Always from the base, which is kept for the weights that an adapter touches: nothing accumulates.
SGLang serves many adapters beside the base model and a request names one; here there is one, and a
request may name it or, without an adapter, none.

Owns reading peft's adapter directories. Does not own when (`scheduler.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from stepwell.backends.weights.digest import tensor_hash

PREFIX = "base_model.model."
"""Prefix that peft puts before the model's own names."""


class WeightLoadError(ValueError):
    """A checkpoint cannot replace the present weights; they are unchanged."""


class Adapters:
    """The adapter of one model."""

    def __init__(self, model: Any) -> None:
        self.name: str | None = None
        self.path: str | None = None
        self.hashes: dict[str, str] = {}
        """Hash of each tensor of the loaded adapter, as it came."""
        self._model = model
        self._base: dict[str, Tensor] = {}
        """Weights without the adapter, of those that it changes."""

    @torch.no_grad()
    def load(self, name: str, path: str) -> None:
        """Merge the adapter in directory `path` in place of any other.

        Raises:
            WeightLoadError: unreadable, or not of this model. Nothing has changed.
        """
        own = dict(self._model.named_parameters())
        try:
            tensors, base, merged = self._merged(Path(path), own)
        except WeightLoadError:
            raise
        except Exception as e:  # whatever the files hold
            raise WeightLoadError(f"Failed to load LoRA adapter from {path!r}: {e!r}") from e
        self._restore()
        for weight, value in merged.items():
            own[weight].copy_(value)
        self._base, self.name, self.path = base, name, path
        self.hashes = {f"{name}:{key}": tensor_hash(t) for key, t in tensors.items()}

    def _merged(
        self, folder: Path, own: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """The tensors of an adapter, and of the weights that it changes, by name, those without and
        with it.

        Args:
            own: the model's parameters.

        Raises:
            WeightLoadError: it is not of this model. Others: it cannot be read.
        """
        scale, tensors = _read(folder)
        merged: dict[str, Tensor] = {}
        base: dict[str, Tensor] = {}
        for key in tensors:
            module, found, _ = key.partition(".lora_A.weight")
            weight = f"{module.removeprefix(PREFIX)}.weight"
            up = tensors.get(f"{module}.lora_B.weight")
            if not found:
                if f"{key.partition('.lora_B.weight')[0]}.lora_A.weight" not in tensors:
                    raise WeightLoadError(f"Failed to load LoRA adapter: {key} is not supported")
                continue
            if up is None or weight not in own:
                raise WeightLoadError(f"Failed to load LoRA adapter: the model has no {weight}")
            known = self._base.get(weight)
            base[weight] = own[weight].detach().clone() if known is None else known
            delta = scale * (up.float() @ tensors[key].float())
            if delta.shape != base[weight].shape or not torch.isfinite(delta).all():
                raise WeightLoadError(
                    f"Failed to load LoRA adapter: {module} gives {tuple(delta.shape)} for "
                    f"{weight} {tuple(base[weight].shape)}, or is not finite"
                )
            merged[weight] = base[weight].float() + delta.to(base[weight].device)
        return tensors, base, merged

    def unload(self, name: str) -> None:
        """Back to the weights without it.

        Raises:
            WeightLoadError: another one or none is loaded.
        """
        if name != self.name:
            raise WeightLoadError(f"LoRA adapter {name!r} is not loaded; {self.name!r} is")
        self._restore()
        self.forget()

    def forget(self) -> None:
        """The weights as they are have no adapter; what was before it is not kept."""
        self._base, self.name, self.path, self.hashes = {}, None, None, {}

    @torch.no_grad()
    def _restore(self) -> None:
        own = dict(self._model.named_parameters())
        for weight, value in self._base.items():
            own[weight].copy_(value)


def _read(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """(scale, tensors) of an adapter directory as peft writes it."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return scale, load_file(folder / "adapter_model.safetensors")
