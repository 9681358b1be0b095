"""Config section `algorithm.critic`. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from stepwell.backends.torch_config import TorchBackendConfig


class CriticConfig(BaseModel):
    """The value model that `advantage: gae` trains (`backends/critic.py`). How it computes (device,
    dtype, rows, micro-batches, optimizer, ranks) is the `backend` section's; it has no LoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    """Hugging Face directory of its backbone, with the policy's vocabulary; null = `model.path`."""
    lr: float = Field(default=1e-5, gt=0)
    """Constant, and usually above the policy's: the head starts at 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """A value earns nothing by moving further than this from the batch's old one, within one
    batch; in units of the return. null = no clipping."""
    warmup_updates: int = Field(default=0, ge=0)
    """The first updates train the critic alone: the policy would follow its noise. They count as
    optimizer steps of the run."""

    def model_config_of(self, backend: TorchBackendConfig) -> TorchBackendConfig:
        """`backend` with the critic's own optimizer settings."""
        own = {
            "lr": self.lr,
            "max_grad_norm": self.max_grad_norm,
            "scheduler": "constant",
            "scheduler_steps": None,
            "min_lr_ratio": 0.0,
            "warmup_steps": 0,
            "lora": None,
            "reference_path": None,
        }
        return TorchBackendConfig.model_validate(backend.model_dump() | own)
