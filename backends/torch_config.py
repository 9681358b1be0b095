"""Config section of the torch backend. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "adamw_8bit": ("betas", "eps"),
    "adafactor": (),
    "sgd": ("momentum",),
}
"""Which of the options that not every optimizer has, each has."""


class LoraConfig(BaseModel):
    """Low-rank adapters (`backends/lora.py`) instead of training every weight."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    """Width r of the update B·A."""
    alpha: int = Field(default=32, ge=1)
    """The update is scaled by alpha / rank (by alpha / √rank with `rslora`)."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """peft's: the ends of module names, one regular expression over whole names, or `all-linear`
    (every linear layer but the LM head)."""
    rslora: bool = False
    """Rank-stabilised scaling, arXiv:2312.03732."""


class TorchBackendConfig(BaseModel):
    """How `backends/torch_backend.py` trains the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes cuda when there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute and saved weights. Master weights and optimizer state are float32 either way."""
    attention: str = "sdpa"
    """transformers' `attn_implementation`."""
    rows: Literal["step", "merged", "tree"] = "merged"
    """`step`: a row for each step; `merged`: steps whose prompt extends an earlier step share its
    row; `tree`: rows share what they begin with, the prompt of a group above all. Same loss and
    gradient, fewer tokens. `tree` brings its own attention in place of `attention`, and refuses a
    model that cannot take it when the model is loaded."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per forward pass (of each rank); bounds activation memory. A longer row goes
    alone."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: activations
    of one layer at a time for a third more compute."""
    logits_mb: int = Field(default=256, ge=1)
    """float32 logits that exist at once, in MB. Beyond it the LM head goes over the response
    positions in chunks and again in the backward pass (`backends/chunked_head.py`)."""
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """`adamw_8bit`: bitsandbytes, moments in a quarter of the memory; `adafactor`: factored second
    moments, no first (arXiv:1804.04235), `lr` is relative to each tensor's RMS; `sgd`: no
    state at all without `momentum`."""
    lr: float = Field(default=1e-6, gt=0)
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes on after the warm-up: down to `min_lr_ratio` × `lr` at `scheduler_steps`,
    and constant there."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly to `lr`."""
    scheduler_steps: int | None = Field(default=None, ge=1)
    """Updates until the rate has decayed, warm-up included, e.g. ${trainer.total_steps}; needed
    by `linear` and `cosine`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, in units of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of `sgd`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices only, norms and biases never decay. Decoupled (AdamW), but for `sgd`, which adds
    it to the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Consecutive updates that are skipped, and counted, because loss or gradient is not finite;
    one more raises NonFiniteUpdateError. 0 raises at the first."""
    lora: LoraConfig | None = None
    """Train adapters only; null trains every weight. Engines get merged weights either way."""
    reference_path: Path | None = None
    """Hugging Face directory of the reference policy of a KL term; null = the model that the run
    started from, which under LoRA costs nothing: the model with its adapters off."""
    ranks: int = Field(default=1, ge=1)
    """Processes that shard weights, gradients and optimizer state (FSDP2) and share the
    micro-batches: Ray actors with a GPU each, or those of `torchrun` if it started us."""
    num_threads: int | None = Field(default=None, ge=1)
    """torch's threads in this process; null leaves them as they are."""
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    """CUDA kernels that give the same bits in every run, slower; the CPU's always do."""
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _scheduler_fits(self) -> TorchBackendConfig:
        if self.scheduler == "constant":
            for name in ("scheduler_steps", "min_lr_ratio"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)} with scheduler 'constant', which never "
                        "decays; choose 'linear' or 'cosine', or remove it"
                    )
        elif self.scheduler_steps is None:
            raise ValueError(
                f"scheduler is {self.scheduler!r} but scheduler_steps is not set; give the "
                "updates of the whole run, e.g. ${trainer.total_steps}"
            )
        elif self.scheduler_steps <= self.warmup_steps:
            raise ValueError(
                f"scheduler_steps ({self.scheduler_steps}) does not exceed warmup_steps "
                f"({self.warmup_steps}); nothing would be left to decay"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits(self) -> TorchBackendConfig:
        known = {option for options in OPTIMIZER_OPTIONS.values() for option in options}
        for name in sorted(known - set(OPTIMIZER_OPTIONS[self.optimizer])):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but optimizer {self.optimizer!r} has no "
                    f"{name}; remove it"
                )
        if self.optimizer in ("adamw_8bit", "adafactor") and self.ranks > 1:
            raise ValueError(
                f"optimizer {self.optimizer!r} does not work on weights sharded over ranks "
                f"({self.ranks}); take 'adamw', whose state the ranks share, or 'sgd'"
            )
        return self
