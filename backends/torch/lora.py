"""Low-rank adapters (LoRA, arXiv:2106.09685) by peft, inside the Hugging Face model itself.

    W' = W + s B A        A [r, in], B [out, r] = 0 at the start, s = alpha / r (or alpha / √r)

The model stays a plain causal LM whose linear layers carry an adapter, so every other module works
on it as it is. W is frozen and needs no float32 master copy. What the engines get is W' under W's
names; it is computed beside the model, which merging in place and back would change by rounding.

Does not own: which parameters the optimizer gets (those that require a gradient: the adapters).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from stepwell.backends.config import LoraConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.model_folder import fingerprint

ADAPTER = "default"
"""peft's name of the one adapter."""
FILE = "adapter_model.safetensors"
BESIDE_MERGED = "adapters"
"""File of the adapters beside merged weights, which do not tell them; no engine reads it."""
_START = "start"
"""Key of the file's metadata."""


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze `model` and give its target modules adapters in float32, drawn from torch's RNG.

    Raises:
        BackendConfigError: peft is not installed, no module matches `target_modules`, or some are
            no linear layers.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import Linear
    except ImportError as e:
        raise BackendConfigError(
            "backend.lora is set, which needs peft; pip install 'peft>=0.17' or remove it"
        ) from e
    target = config.target_modules
    try:
        inject_adapter_in_model(
            PeftConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                target_modules=target if isinstance(target, str) else list(target),
                # A vision tower is frozen, whatever the names in it.
                exclude_modules=r"(.*\.)?visual\..*",
                use_rslora=config.rslora,
            ),
            model,
            adapter_name=ADAPTER,
        )
    except ValueError as e:
        raise BackendConfigError(
            f"backend.lora.target_modules is {target!r}: {str(e).strip().splitlines()[0]}"
        ) from e
    layers = _layers(model)
    tied = (model.get_output_embeddings(), model.get_input_embeddings())
    ties = (model.config, model.config.get_text_config())
    if any(getattr(c, "tie_word_embeddings", False) for c in ties) and any(
        m in tied for _, m in layers
    ):
        raise BackendConfigError(
            f"backend.lora.target_modules is {target!r}, which adapts the LM head or the "
            "embedding, but the model ties the two; leave them out"
        )
    if others := [name for name, m in layers if not isinstance(m, Linear)]:
        linear = {n.rpartition(".")[2] for n, m in layers if isinstance(m, Linear)}
        raise BackendConfigError(
            f"backend.lora.target_modules is {target!r}, with which peft adapts experts, routers "
            f"or an embedding ({others[0]}), and only linear layers can be merged for engines; "
            f"name those: [{', '.join(sorted(linear)) or 'q_proj, …'}]"
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model as it was before training: its adapters add nothing."""
    layers = [module for _, module in _layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters' weights among a model's, by name."""
    return {name: tensor for name, tensor in weights.items() if _is_adapter(name)}


class UpdateSize:
    """Measures |s·B·A| / |W|, the size of the update against the weights it changes, in Frobenius
    norms. s·B·A is never made: |BA|² = ⟨BᵀB, AAᵀ⟩, two r × r matrices.

    Args:
        full: Makes a whole tensor of one that may be sharded over ranks.
    """

    def __init__(self, model: Any, full: Callable[[Tensor], Tensor]) -> None:
        self._full = full
        self._layers = [layer for _, layer in _layers(model) if ADAPTER in layer.lora_A]
        self._scales = torch.tensor([float(layer.scaling[ADAPTER]) for layer in self._layers])
        self._norms: Tensor | None = None
        """|W| per layer. W is frozen, so it is computed once."""

    @torch.no_grad()
    def median(self) -> float:
        """Return the median over the adapted layers."""
        full = self._full
        if self._norms is None:
            weights = (layer.get_base_layer().weight for layer in self._layers)
            self._norms = _on_cpu([full(torch.linalg.vector_norm(w.float())) for w in weights])
        squares = []
        for layer in self._layers:
            a, b = full(layer.lora_A[ADAPTER].weight), full(layer.lora_B[ADAPTER].weight)
            a, b = a.flatten(1).float(), b.flatten(1).float()
            squares.append(((b.T @ b) * (a @ a.T)).sum())
        sizes = self._scales * _on_cpu(squares).clamp(min=0).sqrt() / self._norms
        return float(sizes.median())


def _on_cpu(scalars: list[Tensor]) -> Tensor:
    """The scalars of one device as one tensor: one transfer."""
    return torch.stack(scalars).cpu()


def merged_weights(model: Any, full: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name in the original model, W' or the untouched tensor) of every weight.

    Args:
        full: makes a whole tensor of one that may be sharded over ranks.
    """
    layers = {f"{name}.base_layer.weight": module for name, module in _layers(model)}
    for name, tensor in model.state_dict().items():
        if _is_adapter(name):
            continue
        weight = full(tensor)
        if name in layers:
            with torch.no_grad():
                delta = full(layers[name].get_delta_weight(ADAPTER))
                weight = weight.float() + delta.float()
        yield name.replace(".base_layer.", "."), weight


def save_adapters(model: Any, path: Path, base_model: str, weights: Mapping[str, Tensor]) -> None:
    """Write `weights`, whole tensors as of `adapter_weights`, as a directory that peft loads."""
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(path / FILE, weights)
    config = model.peft_config[ADAPTER].to_dict()
    config |= {"base_model_name_or_path": base_model, "inference_mode": True}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2, default=list) + "\n")


def save_tensors(file: Path, weights: Mapping[str, Tensor], start: str | None = None) -> None:
    """Write `weights`, whole tensors as of `adapter_weights`, under peft's names.

    Args:
        start: fingerprint of the weights that they are trained on, where they lie beside merged
            ones.
    """
    named = {_peft_name(name): tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, file, metadata={"format": "pt", **({} if start is None else {_START: start})})


def load_adapters(folder: Path, weights: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """The adapters in `folder`, by the names of `weights`; of the model that the run began with,
    those of the start, that add nothing (B = 0). That may be a version of another run, which has
    adapters beside it: they are in its weights already.

    Args:
        start: as of `save_tensors`, of this run.

    Raises:
        RuntimeError: they are of other modules, or shapes, or on other weights.
    """
    files = [file for name in (FILE, BESIDE_MERGED) if (file := folder / name).is_file()]
    if files and _start_of(files[0]) not in (None, start):
        if fingerprint(folder) != start:
            raise RuntimeError("its adapters are on other weights than the run began with")
        files = []
    if not files:
        return {name: torch.zeros(w.shape) for name, w in weights.items() if ".lora_B." in name}
    found = load_file(files[0])
    named = {_peft_name(name): name for name in weights}
    if found.keys() != named.keys():
        raise RuntimeError("its adapters are not on the modules that backend.lora names")
    return {named[name]: tensor for name, tensor in found.items()}


def _start_of(file: Path) -> str | None:
    with safe_open(file, framework="pt") as tensors:
        start: str | None = (tensors.metadata() or {}).get(_START)
    return start


def _peft_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def _layers(model: Any) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]


def _is_adapter(name: str) -> bool:
    return ".lora_" in name
