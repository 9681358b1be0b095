"""The section `trainer`: how long, in what batches, and what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stepwell.datapool.config import Section, TextPath

SLIME_FORM = ".slime.pt"
"""Ending of `save_debug_rollout_data`: files are of slime's form."""


class TrainerConfig(Section):
    total_steps: int | None = Field(default=100, ge=1)
    """Optimizer steps; null = until it is stopped, or the tasks are used up."""
    backend: str = "torch"
    """Training backend: a name that `stepwell backends` lists, or a dotted path `module:Class`."""
    train_batch_size: int = Field(default=8, ge=1)
    """Prompts per optimizer step, each with `rollout.n` rollouts."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Optimizer steps between checkpoints. Groups are acked with the checkpoint that holds them.
    Ctrl-C (or SIGTERM, or a terminal that closes) lets the batch that is trained end and saves one,
    too; a second one ends the run at once."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    keep_best: int = Field(default=0, ge=0)
    """Checkpoints with the highest evaluation score kept besides; each evaluated step has one."""
    keep_weights: Annotated[int, Field(ge=1)] | Literal["history"] = 2
    """Published weight versions kept on disk for the engines and `stepwell rollback`. `history`:
    the last 10, one an hour for a day and one a day for a week, some 40 in all."""
    rollout_samples: int | None = Field(default=8, ge=0)
    """Trajectories of every optimizer step that are written, as text, to `rollouts.jsonl` in the
    run's folder (and, unless all are, with their tokens to `trained`), at most 20,000 characters of
    a text and 128 MiB; null = all, whole and without an end (verl's `rollout_data_dir`), 0 =
    none."""
    profile_steps: tuple[int, ...] = ()
    """Optimizer steps of which PyTorch's profiler writes a trace to the run's folder, below
    `profile`: of the step, and of what is computed before its batch. For one rank."""
    debug_rollout_only: bool = False
    """Generate, score and record batches, and train on none: the weights stay as they are, there is
    no evaluation and no checkpoint, and groups are acked once they are recorded."""
    save_debug_rollout_data: TextPath | None = None
    """Record every batch: a folder, or a file name with {rollout_id} in it; one that ends in
    .slime.pt holds slime's samples (`{rollout_id, samples}`), by the number of the batch."""
    load_debug_rollout_data: TextPath | None = None
    """Train on a recording, without engine, gateway or pool; losses as in the recorded run. slime's
    debug files are recordings, too: DIR/{rollout_id}.pt."""
    sample_groups: int = Field(default=1, ge=0)
    """Groups of each optimizer step whose tokens are written with their advantages, weights and
    log-probs into the run's folder `trained`, for the dashboard; 0 writes none."""
    sample_mb: int = Field(default=256, ge=1)
    """MiB of that folder; the oldest files go first."""
    starvation_timeout_s: float | None = Field(default=None, gt=0)
    """Without a further ready group for this long the run stops and says what it waited for. null:
    600, or `rollout.group_deadline_s` if that is more. A run whose agents come by themselves waits
    for them without end."""
