"""One run from start to finish, called by the command line.

    train(config)            pool, engines, gateway and trainer, in one process group
    attach(config, run)      the trainer of a run that is served: may stop, crash, be replaced

Owns what surrounds the loop: evaluation before and after, the files left behind. Does not own how
the parts are started and served (`run/serve.py`), or how a trainer is put together
(`run/trainer.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepwell.backends.base import build_backend
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.routes import check_routes
from stepwell.cluster.nodes import check_nodes, runtime_env
from stepwell.cluster.parts import Parts, generate_needs
from stepwell.cluster.placement import place
from stepwell.cluster.ray import attached, environment, while_lives
from stepwell.config.run import RunConfig
from stepwell.datapool import connect as connect_pool
from stepwell.errors import RunUnavailableError
from stepwell.layout import CHECKPOINTS, LOGS, SUMMARY
from stepwell.run.checks import Checked, check_attached, check_run, validation_tasks
from stepwell.run.folder import (
    RunFile,
    TrainerLock,
    holder,
    is_starting,
    only_run_in,
    only_trainer_in,
    read_run,
)
from stepwell.run.replay import replay
from stepwell.run.resume import told
from stepwell.run.serve import logged, start_over, start_run, starting, take_folder
from stepwell.run.trainer import build_trainer
from stepwell.track.collapse import find_collapse
from stepwell.track.console import Display
from stepwell.track.summary import plot_reward, read_summary, summarise, write_summary
from stepwell.track.trackers import build_trackers
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import TrainerConfig
from stepwell.trainer.errors import ConfigError, StarvedError
from stepwell.trainer.loop import Trainer
from stepwell.trainer.metrics import MemoryMeter, MetricsWriter
from stepwell.trainer.rollout.worker import WorkerHandle, start_workers
from stepwell.trainer.samples import (
    TRAIN_TABLE,
    TRAIN_TABLE_COLUMNS,
    VALIDATION_TABLE_COLUMNS,
    evaluation_table,
)

log = logging.getLogger(__name__)

HELD_OUT = "looking at the rewards of held-out traffic"
PUBLISHED_S = 30.0
"""A trainer that is stopped while it publishes ends what it began, for so long."""
EVALUATION_ATTEMPTS = 3
"""Evaluations of which not one rollout finished, in a row, that end the run."""


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


async def train(config: RunConfig, checked: Checked | None = None) -> dict[str, Any]:
    """Train as configured; returns the summary, which is also written to `summary.json`.

    Args:
        checked: by `check_run`; None: it is called here.

    Raises:
        ConfigError: as `check_run`, before anything is started or removed.
    """
    checked = checked or check_run(config)
    seed_everything(config.run.seed)
    if config.trainer.load_debug_rollout_data is not None:
        backend = build_backend(config.trainer.backend, config.backend, config.model.path)
        return replay(config, backend)
    with only_run_in(config.run.dir):
        return await _run(config, checked)


async def _run(config: RunConfig, checked: Checked) -> dict[str, Any]:
    folder = config.run.dir
    display = Display(config.run.name, config.logging.console)
    if config.run.resume == "never":
        start_over(folder)
    elif not config.validation.only and (done := _finished(config)) is not None:
        display.status(
            "this run is complete; a larger trainer.total_steps goes on, run.resume=never restarts"
        )
        display.summary(done, folder)
        return done
    with only_trainer_in(folder) as lock:
        run = take_folder(config)
        with logged(folder):
            if (other := os.environ.get("RAY_ADDRESS")) and config.cluster.address is None:
                display.status(
                    f"RAY_ADDRESS is {other!r}, which is not joined: cluster.address is null, so "
                    "this run has a Ray of its own; cluster.address=auto joins it"
                )
            display.status(starting(config))
            async with start_run(config, run) as cluster:
                where = f"Ray at {cluster.ray.address}, namespace {cluster.ray.namespace}"
                if config.serves:
                    url = cluster.gateway_url
                    where = f"gateway at {url}; dashboard {url}/ui; {where}"
                display.status(where)
                if placed := cluster.placement.text():
                    display.status(placed)
                return await _train_on(cluster, config, checked, display, lock)


async def _train_on(
    parts: Parts, config: RunConfig, checked: Checked, display: Display, lock: TrainerLock
) -> dict[str, Any]:
    folder = config.run.dir
    with (
        MemoryMeter() as memory,
        MetricsWriter(folder, build_trackers(folder, config)) as metrics,
        build_trainer(
            config, parts, checked.prompts, checked.conversations, notify=display.status
        ) as trainer,
    ):
        async with AsyncExitStack() as end:  # each of them, whatever the others end with
            end.push_async_callback(trainer.batches.scorer.aclose)
            end.push_async_callback(trainer.validator.stop)
            end.push_async_callback(let_publish, trainer, lock)
            end.push_async_callback(trainer.publisher.memory.take_back)
            return await _train(config, trainer, metrics, display, memory)


async def let_publish(trainer: Trainer, lock: TrainerLock) -> None:
    """Engines outlive an attached trainer: what it began to publish, they get."""
    lock.leaves_undone = True  # also if this is cancelled
    try:
        await asyncio.wait_for(trainer.publisher.wait_published(), PUBLISHED_S)
    except Exception:  # the error that ended the run is told, not what follows from it
        log.info("the last publication did not end", exc_info=True)
    lock.leaves_undone = trainer.publisher.is_publishing


async def _train(
    config: RunConfig,
    trainer: Trainer,
    metrics: MetricsWriter,
    display: Display,
    memory: MemoryMeter,
) -> dict[str, Any]:
    path = trainer.checkpoints.find(config.run.resume)
    changes = [] if path is None else told(trainer.checkpoints.about(path), config)
    resumed = await trainer.resume(config.run.resume)
    if status := resume_status(resumed, trainer.progress.updates, metrics.read(), config.trainer):
        display.status(status)
    for line in changes:
        display.status(line)
    # Of a run that was complete and goes back: it is not any more, also if it is killed now.
    (config.run.dir / SUMMARY).unlink(missing_ok=True)
    tasks = validation_tasks(config) if config.has_tasks else []
    total = config.trainer.total_steps

    def report() -> None:
        finished = trainer.validator.finished()
        display.evaluations(finished)
        trainer.rank(finished)
        for e in finished:
            metrics.evaluation(e.step, e.as_metrics())
            table = evaluation_table(config.run.dir, e.step)
            metrics.table(e.step, "val/samples", VALIDATION_TABLE_COLUMNS, table)

    async def evaluate(mode: str = "blocking") -> None:
        if not config.serves:
            return
        display.status(f"evaluating on {len(tasks)} prompts" if tasks else HELD_OUT)
        begin = trainer.evaluate if mode == "blocking" else trainer.begin_evaluation
        for remaining in reversed(range(EVALUATION_ATTEMPTS)):
            try:
                await begin(tasks)
                break
            except StarvedError as e:  # every rollout failed: a part was down
                if not remaining:
                    raise
                display.status(f"evaluating again: {e}")
        report()

    def sum_up() -> dict[str, Any]:
        memory.sample()
        last = trainer.progress.updates
        records = metrics.read(last=last)
        summary = summarise(config.run.name, records, trainer.progress, memory.peak)
        if finding := find_collapse(metrics.read(first=0, last=last)):
            summary["finding"] = finding
        write_summary(config.run.dir, summary)
        plot_reward(config.run.dir, f"Stepwell · {config.run.name}", records, summary["evals"])
        display.summary(summary, config.run.dir)
        return summary

    rollouts_only = config.trainer.debug_rollout_only
    if rollouts_only and trainer.checkpoints.steps():
        raise ConfigError(
            f"trainer.debug_rollout_only is true, but {config.run.dir} has a checkpoint: groups "
            "that are only recorded would be missing when it is trained on; set another run.name, "
            "and run.resume to the checkpoint whose rollouts are wanted"
        )
    if config.validation.only:
        await evaluate()
        return sum_up()
    begun = trainer.progress.updates > 0
    if rollouts_only:
        display.status("rollouts are recorded and not trained: trainer.debug_rollout_only")
    elif not trainer.progress.evaluations and config.validation.before_train:
        await evaluate()
    elif begun and trainer.evaluation_due():  # of a process that was killed meanwhile
        await evaluate(config.validation.mode)
    try:
        async with aclosing(trainer.train(total)) as steps:
            async for record in steps:
                metrics.write(record)
                metrics.table(
                    record["step"], TRAIN_TABLE, TRAIN_TABLE_COLUMNS, trainer.trained.take()
                )
                display.step(record)
                report()
                if trainer.evaluation_due():
                    await evaluate(config.validation.mode)
        if not rollouts_only and not await trainer.is_evaluated():
            await evaluate()
        report()
    except asyncio.CancelledError:
        if total is None and trainer.progress.updates:  # that is how it ends
            sum_up()
        raise
    return sum_up()


def resume_status(
    resumed: bool, updates: int, records: Sequence[object], config: TrainerConfig
) -> str | None:
    """Text on where the run goes on; None if it is a new one.

    Args:
        records: of the optimizer steps of the run before.
    """
    if resumed:
        return f"resumed at optimizer step {updates}"
    if records:
        return (
            "begins at optimizer step 1 again: the run before ended before its first checkpoint "
            f"(trainer.checkpoint_every is {config.checkpoint_every})"
        )
    return None


def _finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run in `run.dir`, if it has done all its optimizer steps and is not told
    to go back to an earlier one."""
    summary, total = read_summary(config.run.dir), config.trainer.total_steps
    if summary is None or total is None or summary["optimizer_steps"] < total:
        return None
    if config.run.resume != "auto":
        checkpoints = CheckpointStore(config.run.dir / CHECKPOINTS)
        path = checkpoints.find(config.run.resume)
        if path is not None and checkpoints.about(path)["step"] < total:
            return None
    return summary


async def attach(config: RunConfig, run: RunFile, checked: Checked | None = None) -> dict[str, Any]:
    """Train on the pool of a run that is served, and publish to its engines.

    Args:
        config: `attached_config`'s.
        checked: by `check_attached`; None: it is called here.

    Raises:
        ConfigError: it cannot be trained from here.
        RunUnavailableError: its parts cannot be reached.
    """
    folder = config.run.dir
    seed_everything(config.run.seed)
    if config.engine.release_memory:
        raise ConfigError(
            "engine.release_memory is true: engines would lend their memory to a trainer that may "
            "be killed with it; set it to false for `stepwell serve`, or use `stepwell train`"
        )
    if run.ray is None or run.pool is None or run.engines is None or run.gateway is None:
        raise is_starting(folder)
    if not _is_folder_of(folder, run):  # found by the address of its Ray
        raise RunUnavailableError(
            f"the folder of the run, {folder} on {run.host}, is not on this machine, and weights, "
            "checkpoints and metrics go there; mount it here under that path, or train from there"
        )
    checked = checked or check_attached(config)
    display = Display(config.run.name, config.logging.console)
    variables = config.cluster.env
    with (
        only_trainer_in(folder) as lock,
        logged(folder),
        environment(**variables),
        attached(run.ray, str(folder), runtime_env=runtime_env(None, variables)),
    ):
        if (done := _finished(config)) is not None:
            display.status("this run has done its optimizer steps; raise trainer.total_steps")
            display.summary(done, folder)
            return done
        async with AsyncExitStack() as stack:
            if run.host == socket.gethostname():
                ended = RunUnavailableError(
                    f"the run in {folder} has ended (process {run.pid}); start it again "
                    "(`stepwell serve`) and attach again: training goes on from its last checkpoint"
                )
                await stack.enter_async_context(
                    while_lives(lambda: holder(folder) == run.pid, lambda: ended)
                )
            pool = connect_pool(run.pool.name, run.ray.namespace)
            engines = [
                await stack.enter_async_context(connect(config.engine, url))
                for url in run.engines.urls
            ]
            for engine in engines:
                await check_routes(engine, config.engine, publishes=True)
            placement = await asyncio.to_thread(place, config, serves=False)
            stack.callback(placement.release)
            await asyncio.to_thread(check_nodes, config, placement.parts_by_node())
            workers: Sequence[WorkerHandle] = ()
            if config.rollout.agent is not None:
                workers = start_workers(
                    config.rollout,
                    run.gateway.urls,
                    run.gateway.key(),
                    folder / LOGS,
                    **generate_needs(config),
                )
            url = run.gateway.urls[0]
            display.status(f"attached to {folder}: gateway at {url}; dashboard {url}/ui")
            parts = Parts(pool=pool, engines=engines, workers=workers, placement=placement)
            return await _train_on(parts, config, checked, display, lock)


def _is_folder_of(folder: Path, run: RunFile) -> bool:
    """True if `run` began in the folder, and not another one under that path on this machine."""
    try:
        here = read_run(folder)
    except RunUnavailableError:
        return False
    return (here.host, here.pid, here.started_at) == (run.host, run.pid, run.started_at)
