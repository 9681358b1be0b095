"""One run from start to finish: `train(config)` and `serve(config)`, called by the command line.

Owns what surrounds the loop: starting the parts, evaluation before and after, the files left
behind.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from backends.base import build_backend
from backends.weights import WeightStore
from trainer.checkpoint import CheckpointStore
from trainer.cluster import WEIGHTS, Cluster, start_cluster
from trainer.config import RunConfig
from trainer.data import PromptSource
from trainer.display import Display
from trainer.loop import Evaluation, Trainer
from trainer.metrics import MemoryMeter, MetricsWriter
from trainer.report import plot_reward, write_summary
from trainer.rollout import Producer
from trainer.scoring import Scorer


async def train(config: RunConfig) -> dict[str, Any]:
    """Train as configured; returns the summary, which is also written to `summary.json`."""
    folder = config.run.dir
    # Weights of an earlier process are not ours: a resume publishes those of its checkpoint.
    for stale in (folder,) if config.run.resume == "never" else (folder / WEIGHTS,):
        shutil.rmtree(stale, ignore_errors=True)
    random.seed(config.run.seed)
    np.random.seed(config.run.seed)
    torch.manual_seed(config.run.seed)
    display = Display(config.run.name, config.trainer.total_steps, config.logging.console)
    with display, MemoryMeter() as memory:
        display.status("starting Ray, the pool, the engine and the gateway")
        async with start_cluster(config) as cluster:
            display.status(f"gateway at {cluster.gateway_url}")
            with (
                MetricsWriter(folder, config) as metrics,
                build_trainer(config, cluster) as trainer,
            ):
                return await _train(config, trainer, metrics, display, memory)


@contextmanager
def build_trainer(config: RunConfig, cluster: Cluster) -> Iterator[Trainer]:
    """A trainer over the running parts of `cluster`; closed on leaving."""
    source = PromptSource(config.data.train, exclude=PromptSource(config.data.val).prompts())
    trainer = Trainer(
        config,
        pool=cluster.pool,
        producer=Producer(config.rollout, source, cluster.pool, cluster.workers),
        source=source,
        scorer=Scorer(config.rollout.reward, config.model.path),
        backend=build_backend(config.trainer.backend, config.backend, config.model.path),
        engines=cluster.engines,
        weights=WeightStore(config.run.dir / WEIGHTS, keep=config.trainer.keep_weights),
        checkpoints=CheckpointStore(
            config.run.dir / "checkpoints", config.trainer.keep_checkpoints
        ),
    )
    try:
        yield trainer
    finally:
        trainer.close()


async def _train(
    config: RunConfig,
    trainer: Trainer,
    metrics: MetricsWriter,
    display: Display,
    memory: MemoryMeter,
) -> dict[str, Any]:
    if await trainer.resume():
        display.resume_at(trainer.progress.updates)
        display.status(f"resumed at optimizer step {trainer.progress.updates}")
    tasks = PromptSource(config.data.val).all()
    records: list[dict[str, Any]] = []
    evals: list[Evaluation] = []

    async def evaluate() -> None:
        display.status(f"evaluating on {len(tasks)} prompts")
        evals.append(await trainer.evaluate(tasks))
        display.evaluation(evals[-1].step, evals[-1].score, evals[-1].tool_use)

    await evaluate()
    began = time.monotonic()
    async with (
        trainer.producer.running() as generation,
        aclosing(trainer.train(config.trainer.total_steps, generation)) as steps,
    ):
        async for record in steps:
            records.append(record)
            metrics.write(record)
            display.step(record)
            every = config.trainer.eval_every
            if every and record["step"] % every == 0 < config.trainer.total_steps - record["step"]:
                await evaluate()
    wall_s = time.monotonic() - began
    await evaluate()

    memory.sample()
    summary = summarise(config, records, evals, wall_s, memory.peak)
    write_summary(config.run.dir, summary)
    plot_reward(config.run.dir, f"Stepwell · {config.run.name}", metrics.read(), summary["evals"])
    display.summary(summary, config.run.dir)
    return summary


def summarise(
    config: RunConfig,
    records: Sequence[Mapping[str, Any]],
    evals: Sequence[Evaluation],
    wall_s: float,
    peak_bytes: int,
) -> dict[str, Any]:
    """The figures of `summary.json`; shares and means over the trained steps of this process."""

    def mean(key: str) -> float | None:
        values = [r[key] for r in records if r.get(key) is not None]
        return float(np.mean(values)) if values else None

    gaps = [r["log_prob_gap"] for r in records if r.get("log_prob_gap") is not None]
    return {
        "name": config.run.name,
        "optimizer_steps": evals[-1].step,
        "eval_before": evals[0].score,
        "eval_after": evals[-1].score,
        "tool_use_before": evals[0].tool_use,
        "tool_use_after": evals[-1].tool_use,
        "wall_s": wall_s,
        "off_policy_share": mean("off_policy_share"),
        "staleness_mean": mean("staleness/mean"),
        "steps_per_trajectory_mean": mean("steps_per_trajectory"),
        "tokens_per_s_mean": mean("tokens_per_s"),
        "trajectories_trained": sum(r["trajectories"] for r in records),
        "groups_dropped": records[-1]["pool/dropped"] if records else 0,
        "eval_rollouts_failed": sum(e.failed for e in evals),
        "log_prob_gap_max": max(gaps, default=None),
        "peak_memory_gb": peak_bytes / 1e9,
        "evals": [asdict(e) for e in evals],
    }


async def serve(config: RunConfig) -> None:
    """Pool, engine and gateway without training, until interrupted."""
    async with start_cluster(config) as cluster:
        print(f"gateway at {cluster.gateway_url}  (Ctrl-C stops it)", flush=True)
        await asyncio.Event().wait()
