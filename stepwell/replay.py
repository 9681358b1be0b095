"""This module trains on recorded batches, without engines: what `stepwell train` does if told so.

    stepwell train … trainer.save_debug_rollout_data=DIR       DIR/{rollout_id}.pt per batch
    stepwell train … trainer.load_debug_rollout_data=DIR       the same batches, the same losses

The names are slime's (`--save-debug-rollout-data`, `--load-debug-rollout-data`). A replay starts no
pool, engine, gateway or Ray. It changes nothing of the run: figures go to `run.dir`/replay.

A recording that does not begin at step 0 needs the checkpoint that it began from (`run.resume`).
Does not own the training on a recording (`trainer/replay.py`).
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, cast

from stepwell.backends.base import TrainingBackend
from stepwell.backends.critic import Critic
from stepwell.backends.weights import WeightStore
from stepwell.config import RunConfig
from stepwell.console import Display
from stepwell.datapool.client import DataPoolClient
from stepwell.datapool.lease_keeper import LeaseKeeper
from stepwell.datapool.types import TRAIN
from stepwell.trackers import build_trackers
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.data import PromptSource
from stepwell.trainer.memory import EngineMemory
from stepwell.trainer.metrics import MetricsWriter
from stepwell.trainer.publication import Publisher
from stepwell.trainer.recording import recordings
from stepwell.trainer.replay import NoPool, ReplayTrainer
from stepwell.trainer.rollout import Producer
from stepwell.trainer.sampling import GroupFilter
from stepwell.trainer.scoring import Scorer
from stepwell.trainer.validation import Validator

REPLAY = "replay"
"""Folder of a replay's metrics, in the run's folder."""


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
    pool = cast(DataPoolClient, NoPool())
    source = PromptSource(config.data.train, tokenizer_path=config.model.path)
    producer, scorer = Producer(config.rollout, source, pool, []), Scorer(None, config.model.path)
    trainer = ReplayTrainer(
        config.trainer.model_copy(update={"save_debug_rollout_data": None}),
        config.async_training,
        config.algorithm,
        pool=pool,
        keeper=LeaseKeeper(pool, TRAIN, config.pool.channel(TRAIN).lease_s),
        producer=producer,
        source=source,
        scorer=scorer,
        group_filter=GroupFilter(config.sampling),
        validator=Validator(
            config.validation,
            pool,
            producer,
            scorer,
            folder=folder,
            tokenizer_path=config.model.path,
        ),
        backend=backend,
        critic=critic,
        publisher=Publisher((), WeightStore(folder), EngineMemory((), lends=False)),
        checkpoints=CheckpointStore(folder),
        seed=config.run.seed,
        logs=folder,
    )
    store = CheckpointStore(config.run.dir / "checkpoints")
    asked = config.run.resume
    if asked not in ("auto", "never") and (path := store.find(asked)) is not None:
        state = store.load(path)
        backend.load_state_dict(state["backend"])
        if critic is not None and state["critic"] is not None:
            critic.load_state_dict(state["critic"])
        trainer.progress = state["progress"]
    start, until = trainer.progress.updates, config.trainer.total_steps
    batches = [batch for batch in batches if start <= batch[0] < until]
    display = Display(f"{config.run.name} replay", until, config.logging.console)
    try:
        with display, MetricsWriter(folder, build_trackers(folder, config)) as metrics:
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
