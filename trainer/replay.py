"""This module trains on recorded batches so that a run's losses can be had again without engines.

A replay drives the same loop from the advantages on, with the versions and counters that the
recorded run had, so on the CPU its losses are equal bit for bit. It publishes nothing and leaves no
checkpoint. Does not own the files (`recording.py`) or the loop (`loop.py`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.loop import Trainer
from stepwell.trainer.recording import load_recording


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


class NoPool:
    """The pool's place in the records of a replay."""

    async def get_statistics(self, channel: str) -> dict[str, Any]:
        return {"groups": dict.fromkeys(("ready", "open", "leased", "dropped"), 0)}
