"""This module trains on recorded batches, without engines: what `stepwell train` does if told so.

    stepwell train … trainer.save_debug_rollout_data=DIR       DIR/{rollout_id}.pt per batch
    stepwell train … trainer.load_debug_rollout_data=DIR       the same batches, the same losses

The names are slime's (`--save-debug-rollout-data`, `--load-debug-rollout-data`). A replay starts no
pool, engine, gateway or Ray. It changes nothing of the run: figures go to `run.dir`/replay.

A recording that does not begin at step 0 needs the checkpoint that it began from (`run.resume`).
slime's own debug files are trained on, too (`trainer/slime/debug_data.py`).
Does not own the training on a recording (`trainer/recording.py`).
"""

from __future__ import annotations

from typing import Any

from stepwell.backends.base import TrainingBackend
from stepwell.config.run import RunConfig
from stepwell.layout import CHECKPOINTS, REPLAY
from stepwell.run.trainer import build_updater
from stepwell.track.console import Display
from stepwell.track.trackers import build_trackers
from stepwell.trainer import recording
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.metrics import MetricsWriter
from stepwell.trainer.slime.debug_data import SlimeForm


def replay(config: RunConfig, backend: TrainingBackend) -> dict[str, Any]:
    """Train on `trainer.load_debug_rollout_data`; returns {"optimizer_steps", "folder"}.

    Raises:
        CheckpointError: nothing is recorded there, or not from where the model stands.
    """
    where = config.trainer.load_debug_rollout_data
    form = _slime_form(config)
    batches = recording.recordings(where, form.updates_per_rollout) if where is not None else []
    config.run.dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # as a run makes it
    folder = config.run.dir / REPLAY
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    updater = build_updater(config, backend)
    try:
        store = CheckpointStore(config.run.dir / CHECKPOINTS)
        asked = config.run.resume
        if asked not in ("auto", "never") and (path := store.find(asked)) is not None:
            updater.load_state(path, store.load(path))
        start, until = updater.progress.updates, config.trainer.total_steps
        batches = [b for b in batches if start <= b[0] and (until is None or b[0] < until)]
        display = Display(f"{config.run.name} replay", config.logging.console)
        with MetricsWriter(folder, build_trackers(folder, config)) as metrics:
            display.status(f"training on {len(batches)} recorded batches")
            per_sync = config.async_training.trigger_parameter_sync_step
            for step in recording.replay(updater, batches, per_sync, form):
                metrics.write(step)
                display.step(step)
            display.status(f"figures are in {folder / 'metrics.jsonl'}")
        return {"optimizer_steps": updater.progress.updates, "folder": str(folder)}
    finally:
        updater.close()


def _slime_form(config: RunConfig) -> SlimeForm:
    """Return this run's values of what slime's samples do not say of theirs."""
    rollout = config.rollout
    return SlimeForm(
        group_size=rollout.n,
        temperature=1.0 if rollout.temperature is None else rollout.temperature,
        **({} if rollout.reward is None else {"reward_key": rollout.reward.reward_key}),
        updates_per_rollout=config.async_training.updates_per_batch,
    )
