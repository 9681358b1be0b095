"""This module loads a Hugging Face causal LM so that the torch backend can train it: where it runs,
in which type, with which attention, and how its rows are scored.

Does not own: updates, checkpoints, saved weights (`torch/backend.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from stepwell.backends.base import TokenBatch
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.rows import Row
from stepwell.backends.torch import tree
from stepwell.backends.torch.chunked_head import chunk_tokens
from stepwell.backends.torch.forward import forward


class Policy(torch.nn.Module):
    """The model and how its rows are scored, as one module: the root that FSDP2 shards. What
    belongs to no layer (embedding, LM head) is therefore whole until the end of the backward
    pass, where the chunked head is computed again."""

    def __init__(self, model: Any, config: TorchBackendConfig, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._device = device
        vocab = model.get_input_embeddings().num_embeddings
        self._chunk = chunk_tokens(config.logits_mb, vocab)

    def forward(
        self, batch: TokenBatch, rows: Sequence[Row], *, entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(log π, entropy | None, token index): [n] each, of the response tokens in `rows`."""
        return forward(
            self.model, batch, rows, device=self._device, entropy=entropy, chunk=self._chunk
        )


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendConfigError("backend.device is 'cuda', but torch sees no GPU; use 'auto'")
    return torch.device(name)


def load_model(path: Path, config: TorchBackendConfig, *, frozen: bool) -> Any:
    """The model on the CPU, in eval mode; in float32 unless `frozen`, which no update rounds."""
    try:
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, config.dtype) if frozen else torch.float32,
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError) as e:
        raise BackendConfigError(
            f"the model in {str(path)!r} cannot be loaded: {str(e).strip().splitlines()[0]}"
        ) from e
    if config.rows == "tree":
        tree.enable(model, getattr(torch, config.dtype))
    model.eval()
    return model


def model_dir(path: Path, key: str) -> Path:
    if not (path / "config.json").is_file():
        raise BackendConfigError(
            f"{key} is {str(path)!r}, which has no config.json; "
            "point it at a Hugging Face model directory"
        )
    return path


def checkpoint_layers(model: Any) -> None:
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise BackendConfigError(
            f"backend.gradient_checkpointing is on, but {type(model).__name__} has no layers that "
            "support it; turn it off and lower micro_batch_tokens instead"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        # Layers checkpoint in training mode only; what is in them (dropout) stays in eval mode.
        layer.training = True


def aliases_of(model: Any) -> dict[str, str]:
    """Name of a tied weight -> the first name of the same weight."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer.", ".")
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A bar per published version would tear the live display apart."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
