"""Debug rollout data: what was trained, batch by batch, and training on it again without engines.

    stepwell train … trainer.save_debug_rollout_data=DIR       DIR/{rollout_id}.pt per batch
    stepwell train … trainer.load_debug_rollout_data=DIR       the same batches, the same losses

The names are slime's (`--save-debug-rollout-data`, `--load-debug-rollout-data`). A replay starts no
pool, engine, gateway or Ray; it drives the same loop from the advantages on, with the versions and
counters that the recorded run had, so on the CPU its losses are equal bit for bit. It changes
nothing of the run: figures go to `run.dir`/replay, there are no checkpoints and no publications.

A recording that does not begin at step 0 needs the checkpoint that it began from (`run.resume`).
Does not own the files (`recording.py`) or the loop (`loop.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from stepwell.backends.base import TrainingBackend
from stepwell.backends.critic import Critic
from stepwell.backends.weights import WeightStore
from stepwell.config import RunConfig
from stepwell.console import Display
from stepwell.datapool.client import DataPoolClient
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.loop import Trainer
from stepwell.trainer.metrics import MetricsWriter
from stepwell.trainer.recording import load_recording, recordings
from stepwell.trainer.rollout import Producer
from stepwell.trainer.scoring import Scorer

REPLAY = "replay"
"""Folder of a replay's metrics, in the run's folder."""


class ReplayTrainer(Trainer):
    """The loop from the advantages on: batches come from recordings, and nobody is told."""

    async def replay(self, batches: Sequence[tuple[int, Path]]) -> AsyncGenerator[dict[str, Any]]:
        """Train on the recorded batches; yields the metrics of each optimizer step.

        Raises:
            CheckpointError: a batch is missing: it does not begin where the one before ended.
        """
        for rollout_id, path in batches:
            if rollout_id != self.progress.updates:
                raise CheckpointError(
                    f"{path} begins after optimizer step {rollout_id}, but the model is at "
                    f"{self.progress.updates}; set run.resume to the checkpoint step_{rollout_id}, "
                    "or restore the missing recordings"
                )
            recording = load_recording(path)
            self.progress = deepcopy(recording.progress)
            self._mark = time.monotonic()
            async for step in self._train_on(recording.groups):
                yield step
                self._mark = time.monotonic()

    async def publish(self) -> None:
        """The version table moves as it did; there are no engines."""
        self.progress.version += 1
        self.progress.published[self.progress.version] = self.progress.updates

    async def checkpoint(self) -> None:
        """A replay leaves none."""


class _NoPool:
    """The pool's place in the records of a replay."""

    async def get_statistics(self, channel: str) -> dict[str, Any]:
        return {"groups": dict.fromkeys(("ready", "open", "leased", "dropped"), 0)}


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


async def replay(
    config: RunConfig, backend: TrainingBackend, critic: Critic | None
) -> dict[str, Any]:
    """Train on `trainer.load_debug_rollout_data`; returns {"optimizer_steps", "folder"}.

    Raises:
        CheckpointError: nothing is recorded there, or not from where the model stands.
    """
    where = config.trainer.load_debug_rollout_data
    batches = recordings(where) if where is not None else []
    folder = config.run.dir / REPLAY
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    pool = cast(DataPoolClient, _NoPool())
    source = PromptSource(config.data.train, tokenizer_path=config.model.path)
    trainer = ReplayTrainer(
        config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"save_debug_rollout_data": None})}
        ),
        pool=pool,
        producer=Producer(config.rollout, source, pool, []),
        source=source,
        scorer=Scorer(None, config.model.path),
        backend=backend,
        critic=critic,
        engines=(),
        weights=WeightStore(folder),
        checkpoints=CheckpointStore(folder),
    )
    store = CheckpointStore(config.run.dir / "checkpoints")
    asked = config.run.resume
    if asked not in ("auto", "never") and (path := store.find(asked)) is not None:
        state = store.load(path)
        backend.load_state_dict(state["backend"])
        if critic is not None and state.get("critic") is not None:
            critic.load_state_dict(state["critic"])
        trainer.progress = state["progress"]
    start, until = trainer.progress.updates, config.trainer.total_steps
    batches = [batch for batch in batches if start <= batch[0] < until]
    display = Display(f"{config.run.name} replay", until, config.logging.console)
    try:
        with display, MetricsWriter(folder, config) as metrics:
            display.resume_at(start)
            display.status(f"training on {len(batches)} recorded batches")
            async with aclosing(trainer.replay(batches)) as steps:
                async for step in steps:
                    metrics.write(step)
                    display.step(step)
            display.status(f"figures are in {folder / 'metrics.jsonl'}")
    finally:
        trainer.close()
    return {"optimizer_steps": trainer.progress.updates, "folder": str(folder)}
