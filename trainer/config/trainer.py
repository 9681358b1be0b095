"""The section `trainer`: how long, in what batches, and what is kept."""

from __future__ import annotations

from pydantic import Field

from stepwell.trainer.section import Section


class TrainerConfig(Section):
    total_steps: int | None = Field(default=100, ge=1)
    """Optimizer steps; null = until it is stopped, or the tasks are used up."""
    backend: str = "torch"
    """Training backend: a name that `stepwell backends` lists, or a dotted path `module:Class`."""
    train_batch_size: int = Field(default=8, ge=1)
    """Prompts per optimizer step, each with `rollout.n` rollouts."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints. Groups are acked with the checkpoint that holds them."""
    checkpoint_on_interrupt: bool = True
    """Ctrl-C (or SIGTERM) lets the batch that is trained end and saves a checkpoint; a second one
    ends the run at once. false: the first one does not save either."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints with the highest evaluation score kept besides; each evaluated step has one."""
    keep_weights: int = Field(default=2, ge=1)
    """Published weight versions kept on disk for the engines."""
    save_debug_rollout_data: str | None = None
    """Record every batch: a folder, or a file name with {rollout_id} in it."""
    load_debug_rollout_data: str | None = None
    """Train on a recording, without engine, gateway or pool; losses as in the recorded run."""
    starvation_timeout_s: float = Field(default=600.0, gt=0)
    """Without a ready group for this long the run stops and says what it waited for. A run whose
    agents come by themselves waits for them without end."""
