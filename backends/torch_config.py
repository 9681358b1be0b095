"""Config section of the torch backend. Loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchBackendConfig(BaseModel):
    """How `backends/torch_backend.py` trains the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes cuda when there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute and saved weights. Master weights and optimizer state are float32 either way."""
    attention: str = "sdpa"
    """transformers' `attn_implementation`."""
    rows: Literal["merged", "step"] = "merged"
    """`merged`: steps whose prompt extends an earlier step share its row; `step`: a row each.
    Same loss and gradient, fewer tokens."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per forward pass; bounds activation memory. A longer row goes alone."""
    lr: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly to `lr`; constant afterwards."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled (AdamW); on matrices only, norms and biases never decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Consecutive updates that are skipped, and counted, because loss or gradient is not finite;
    one more raises NonFiniteUpdateError. 0 raises at the first."""
    num_threads: int | None = Field(default=None, ge=1)
    """torch's threads in this process; null leaves them as they are."""
    seed: int = Field(default=0, ge=0)
    trust_remote_code: bool = False
