"""One run from start to finish: `train(config)` and `serve(config)`, called by the command line.

Owns what surrounds the loop: starting the parts, evaluation before and after, the files left
behind.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.base import build_backend
from backends.weights import WeightStore
from trainer.checkpoint import CheckpointStore
from trainer.cluster import POOL, WEIGHTS, Cluster, start_cluster
from trainer.config import RunConfig
from trainer.data import PromptSource
from trainer.display import Display
from trainer.loop import Progress, Trainer
from trainer.metrics import MemoryMeter, MetricsWriter
from trainer.report import plot_reward, read_summary, write_summary
from trainer.rollout import Producer, load_agent
from trainer.scoring import Scorer

CHECKPOINTS = "checkpoints"


async def train(config: RunConfig) -> dict[str, Any]:
    """Train as configured; returns the summary, which is also written to `summary.json`."""
    folder = config.run.dir
    display = Display(config.run.name, config.trainer.total_steps, config.logging.console)
    if config.run.resume == "never":
        _start_over(folder)
    elif (done := _finished(config)) is not None:
        display.status("this run is complete; run.resume=never starts it over")
        display.summary(done, folder)
        return done
    load_agent(config.rollout.agent)  # a wrong path costs no start
    random.seed(config.run.seed)
    np.random.seed(config.run.seed)
    torch.manual_seed(config.run.seed)
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
        checkpoints=CheckpointStore(config.run.dir / CHECKPOINTS, config.trainer.keep_checkpoints),
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
    total, every = config.trainer.total_steps, config.trainer.eval_every

    async def evaluate() -> None:
        display.status(f"evaluating on {len(tasks)} prompts")
        evaluation = await trainer.evaluate(tasks)
        display.evaluation(evaluation.step, evaluation.score, evaluation.tool_use)

    if not trainer.progress.evaluations:
        await evaluate()
    async with (
        trainer.producer.running() as generation,
        aclosing(trainer.train(total, generation)) as steps,
    ):
        async for record in steps:
            metrics.write(record)
            display.step(record)
            if every and record["step"] % every == 0 and record["step"] < total:
                await evaluate()
    await evaluate()

    memory.sample()
    records = metrics.read()
    summary = summarise(config, records, trainer.progress, memory.peak)
    write_summary(config.run.dir, summary)
    plot_reward(config.run.dir, f"Stepwell · {config.run.name}", records, summary["evals"])
    display.summary(summary, config.run.dir)
    return summary


def summarise(
    config: RunConfig, records: Sequence[Mapping[str, Any]], progress: Progress, peak_bytes: int
) -> dict[str, Any]:
    """The figures of `summary.json`, over the whole run, from before a resume too.

    Args:
        peak_bytes: peak memory of all processes, of the last process of the run.
    """

    def mean(key: str) -> float | None:
        values = [r[key] for r in records if r.get(key) is not None]
        return float(np.mean(values)) if values else None

    before, *_, after = progress.evaluations
    gaps = [r["log_prob_gap"] for r in records if r.get("log_prob_gap") is not None]
    return {
        "name": config.run.name,
        "optimizer_steps": progress.updates,
        "eval_before": before.score,
        "eval_after": after.score,
        "tool_use_before": before.tool_use,
        "tool_use_after": after.tool_use,
        "wall_s": progress.train_s,
        "off_policy_share": mean("off_policy_share"),
        "staleness_mean": mean("staleness/mean"),
        "steps_per_trajectory_mean": mean("steps_per_trajectory"),
        "tokens_per_s_mean": mean("tokens_per_s"),
        "rewards": [r["reward/mean"] for r in records],
        "trajectories_trained": sum(r["trajectories"] for r in records),
        "groups_dropped": records[-1]["pool/dropped"] if records else 0,
        "eval_rollouts_failed": sum(e.failed for e in progress.evaluations),
        "log_prob_gap_max": max(gaps, default=None),
        "peak_memory_gb": peak_bytes / 1e9,
        "evals": [asdict(e) for e in progress.evaluations],
    }


def _start_over(folder: Path) -> None:
    """Remove what a run writes, and nothing else: `run.dir` may be any folder."""
    for name in (WEIGHTS, CHECKPOINTS, POOL, "logs", "wandb"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", "summary.json", "reward.png"):
        (folder / name).unlink(missing_ok=True)


def _finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run in `run.dir`, if it has done all its optimizer steps."""
    summary = read_summary(config.run.dir)
    if summary is None or summary["optimizer_steps"] < config.trainer.total_steps:
        return None
    return summary


async def serve(config: RunConfig) -> None:
    """Pool, engine and gateway without training, until interrupted."""
    async with start_cluster(config) as cluster:
        where = "\n           ".join(cluster.gateway_urls)
        print(f"gateway at {where}  (Ctrl-C stops it)", flush=True)
        await asyncio.Event().wait()
