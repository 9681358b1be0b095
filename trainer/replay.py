"""This module trains on recorded batches so that a run's losses can be had again without engines.

A replay gives the updater what the recorded run gave it, with the versions and counters of then, so
on the CPU its losses are equal bit for bit. It publishes nothing and leaves no checkpoint. Does not
own the files (`recording.py`) or the mathematics (`updater.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.recording import load_recording
from stepwell.trainer.updater import Updater, record_of


def replay(
    updater: Updater, batches: Sequence[tuple[int, Path]], updates_per_sync: int
) -> Iterator[dict[str, Any]]:
    """Train on the recorded batches; yields the metrics of each optimizer step.

    Args:
        updates_per_sync: optimizer steps between two publications of the recorded run.

    Raises:
        CheckpointError: a batch is missing: it does not begin where the one before ended.
    """
    progress, phases = updater.progress, Phases()
    for rollout_id, path in batches:
        if rollout_id != progress.updates:
            raise CheckpointError(
                f"{path} begins after optimizer step {rollout_id}, but the model is at "
                f"{progress.updates}; set run.resume to the checkpoint step_{rollout_id}, "
                "or restore the missing recordings"
            )
        recording = load_recording(path)
        progress.become(recording.progress)
        mark = time.monotonic()
        with phases("prepare"):
            prepared = updater.prepare(recording.groups)
        for indices, groups in prepared.mini_batches:
            with phases("train"):
                update = updater.step(prepared.batch, indices)
            if progress.updates % updates_per_sync == 0:  # the table moves as it did
                progress.version += 1
                progress.published[progress.version] = progress.updates
            times = phases.take(time.monotonic() - mark)
            progress.train_s += times["time/step_s"]
            told = record_of(progress, groups, times["time/step_s"])
            yield {**told, **prepared.metrics, **update, **times}
            mark = time.monotonic()
