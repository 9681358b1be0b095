"""One run from start to finish: `train`, or `serve` and `attach`, called by the command line.

    train(config)            pool, engines, gateway and trainer, in one process group
    serve(config)            all but the trainer, for agents to call
    attach(config, run)      the trainer of a run that is served: may stop, crash, be replaced

Owns what surrounds the loop: starting the parts, evaluation before and after, the files left
behind. Does not own how a trainer is put together (`training.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from stepwell.backends.base import build_backend
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import WeightUpdateError
from stepwell.backends.weights import Published, WeightStore, publish
from stepwell.checks import Checked, check_attached, check_run, validation_tasks
from stepwell.cluster import POOL_NAME, Cluster, Parts, start_cluster
from stepwell.config import RunConfig
from stepwell.console import Display
from stepwell.datapool import connect as connect_pool
from stepwell.datapool.files.trained import TRAINED
from stepwell.datapool.process import logging_to
from stepwell.datapool.store.folder import holder
from stepwell.errors import RunUnavailableError
from stepwell.layout import (
    CHECKPOINTS,
    GATEWAY_KEY,
    LOGS,
    POOL,
    SERVE_LOG,
    TRAINER_LOG,
    WEIGHTS,
)
from stepwell.placement import place
from stepwell.ray_cluster import attached, while_lives
from stepwell.replay import REPLAY, replay
from stepwell.report import SUMMARY, plot_reward, read_summary, summarise, write_summary
from stepwell.resuming import told
from stepwell.run_file import (
    RUN_FILE,
    EnginesPart,
    GatewayPart,
    PoolPart,
    RunFile,
    begin,
    is_starting,
    left_by_trainer,
    only_run_in,
    only_trainer_in,
    read_run,
    refuse_second_trainer,
)
from stepwell.run_file import (
    holder as run_holder,
)
from stepwell.run_record import record_run
from stepwell.trackers import build_trackers
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import TrainerConfig
from stepwell.trainer.errors import ConfigError, StarvedError
from stepwell.trainer.live import LOST
from stepwell.trainer.loop import Trainer
from stepwell.trainer.metrics import MemoryMeter, MetricsWriter
from stepwell.trainer.profiling import PROFILE
from stepwell.trainer.rollout.worker import WorkerHandle, start_workers
from stepwell.trainer.rollout_samples import OLD, ROLLOUTS
from stepwell.trainer.validation import COLUMNS, VALIDATION, read_samples, samples_path
from stepwell.training import build_trainer

log = logging.getLogger(__name__)

HELD_OUT = "looking at the rewards of held-out traffic"
PUBLISHED_S = 30.0
"""A trainer that is stopped while it publishes ends what it began, for so long."""
WATCH_S = 0.5
"""A killed trainer is noticed within this."""
SAMPLES = 64
"""Rows of an evaluation's sample table that trackers are given; its file has all of them."""
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
        _start_over(folder)
    elif not config.validation.only and (done := _finished(config)) is not None:
        display.status(
            "this run is complete; a larger trainer.total_steps goes on, run.resume=never restarts"
        )
        display.summary(done, folder)
        return done
    with only_trainer_in(folder), logged(folder):
        if (other := os.environ.get("RAY_ADDRESS")) and config.cluster.address is None:
            display.status(
                f"RAY_ADDRESS is {other!r}, which is not joined: cluster.address is null, so this "
                "run has a Ray of its own; cluster.address=auto joins it"
            )
        display.status(starting(config))
        async with start_run(config) as cluster:
            where = f"Ray at {cluster.ray.address}, namespace {cluster.ray.namespace}"
            gateway = f"gateway at {cluster.gateway_url}; " if config.serves else ""
            display.status(gateway + where)
            return await _train_on(cluster, config, checked, display)


async def _train_on(
    parts: Parts, config: RunConfig, checked: Checked, display: Display
) -> dict[str, Any]:
    folder = config.run.dir
    with (
        MemoryMeter() as memory,
        MetricsWriter(folder, build_trackers(folder, config)) as metrics,
        build_trainer(
            config, parts, checked.prompts, checked.conversations, tell=display.status
        ) as trainer,
    ):
        async with AsyncExitStack() as end:  # each of them, whatever the others end with
            end.push_async_callback(trainer.batches.scorer.aclose)
            end.push_async_callback(trainer.validator.stop)
            end.push_async_callback(trainer.publisher.memory.take_back)
            end.push_async_callback(_let_publish, trainer)
            return await _train(config, trainer, metrics, display, memory)


async def _let_publish(trainer: Trainer) -> None:
    """Engines outlive an attached trainer: what it began to publish, they get."""
    try:
        await asyncio.wait_for(trainer.publisher.published(), PUBLISHED_S)
    except Exception:  # the error that ended the run is told, not what follows from it
        log.info("the last publication did not end", exc_info=True)


@contextmanager
def logged(folder: Path, name: str = TRAINER_LOG) -> Iterator[None]:
    """The log of this process is a file in the run's folder, which the error of a run names."""
    path = folder / LOGS / name
    with logging_to(path):
        try:
            yield
        except Exception as e:
            log.info("the run has failed", exc_info=True)  # the console has one line of it
            e.add_note(f"see {path}, and the logs of the other parts beside it")
            raise


@asynccontextmanager
async def start_run(config: RunConfig, *, trains: bool = True) -> AsyncIterator[Cluster]:
    """The running parts, and a `run.json` that says where they are.

    Args:
        trains: see `start_cluster`.
    """
    forget_weights(config, trains=trains)
    run = begin(config)
    async with start_cluster(config, trains=trains) as cluster:
        parts: dict[str, Any] = {"ray": cluster.ray, "pool": PoolPart(name=POOL_NAME)}
        if config.serves:
            parts |= {
                "gateway": GatewayPart(urls=cluster.gateway_urls, key_file=cluster.key_file),
                "engines": EnginesPart(
                    urls=tuple(engine.url for engine in cluster.engines),
                    weights_dir=config.run.dir.absolute() / WEIGHTS,
                ),
            }
        run = run.model_copy(update=parts)
        run.write(config.run.dir)
        record = await record_run(run, cluster.ray.namespace)
        try:
            yield cluster
        finally:
            ray.kill(record)


def forget_weights(config: RunConfig, *, trains: bool) -> None:
    """Engines begin with the weights that were published last, so that agents that come back are
    served by what they had; not if those are of another model, or if nobody is served before the
    trainer has published its checkpoint's.
    """
    try:
        before = read_run(config.run.dir)
        model = (before.folder / before.config["model"]["path"]).resolve()
    except (RunUnavailableError, KeyError):
        model = None
    if model != config.model.path.resolve() or (trains and config.rollout.agent is not None):
        shutil.rmtree(config.run.dir / WEIGHTS, ignore_errors=True)


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
        for e in trainer.validator.finished():
            display.evaluation(e.step, e.score, e.tool_use)
            if e.weights_step != LOST:
                trainer.checkpoints.score(e.weights_step, e.score)
            metrics.evaluation(e.step, e.as_metrics())
            table = samples_path(config.run.dir, e.step)
            metrics.table(e.step, "val/samples", COLUMNS, read_samples(table, SAMPLES))

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
        records = metrics.read()
        summary = summarise(config.run.name, records, trainer.progress, memory.peak)
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
                display.step(record)
                report()
                if trainer.evaluation_due():
                    await evaluate(config.validation.mode)
        if not rollouts_only:
            await evaluate()
    except asyncio.CancelledError:
        if total is None and trainer.progress.updates:  # that is how it ends
            sum_up()
        raise
    return sum_up()


def resume_status(
    resumed: bool, updates: int, records: Sequence[object], config: TrainerConfig
) -> str | None:
    """Where a run goes on; None if it is a new one.

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


def _start_over(folder: Path) -> None:
    """Remove what a run writes, and nothing else: `run.dir` may be any folder.

    Raises:
        ConfigError: a live process uses the run's pool, or trains in it.
    """
    refuse_second_trainer(folder)
    for journal in (folder / POOL, *(folder / POOL).glob("shard-*")):
        if (pid := holder(journal)) is not None:
            raise ConfigError(
                f"run.resume is never, but process {pid} has the pool of {folder} open; stop that "
                "run first, or choose another run.name"
            )
    written = (WEIGHTS, CHECKPOINTS, POOL, VALIDATION, LOGS, TRAINED, PROFILE, REPLAY)
    for name in (*written, "wandb", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", ROLLOUTS, OLD, SUMMARY, "reward.png", GATEWAY_KEY, RUN_FILE):
        (folder / name).unlink(missing_ok=True)


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


async def serve(config: RunConfig) -> None:
    """Pool, engines and gateway, until interrupted."""
    folder = config.run.dir
    with only_run_in(folder):
        if config.run.resume == "never":
            _start_over(folder)
        with logged(folder, SERVE_LOG):
            # Programs read the address in the first line of the output.
            print(starting(config), file=sys.stderr, flush=True)
            async with start_run(config, trains=False) as cluster:
                print(where_to_call(config, cluster), flush=True)
                while True:
                    await asyncio.sleep(WATCH_S)
                    await _continue_engines(config, cluster)


def starting(config: RunConfig) -> str:
    """What is said first: a start takes from some seconds to minutes."""
    parts = "the pool, the gateway and an engine" if config.serves else "the pool"
    return f"starting Ray, {parts}; the model is {config.model.path}"


def where_to_call(config: RunConfig, cluster: Cluster) -> str:
    """What `stepwell serve` prints: where everything is, and what to do with it."""
    folder = config.run.dir
    needs = "" if cluster.key_file is None else f", admin key in {cluster.key_file}"
    lines = [
        f"gateway at {cluster.gateway_url}{needs}",
        *(f"           {url}" for url in cluster.gateway_urls[1:]),
        f"ray at     {cluster.ray.address}, namespace {cluster.ray.namespace}, pool {POOL_NAME}",
        f"run folder {folder}  (run.json says where everything is; logs are in {folder / LOGS})",
        f"call it    OPENAI_BASE_URL={cluster.gateway_url}/v1 any-agent",
        f"train      stepwell train --attach {folder}",
        "(Ctrl-C stops it)",
    ]
    return "\n".join(lines)


async def _continue_engines(config: RunConfig, cluster: Cluster) -> None:
    """A trainer that was killed may have been publishing: its engines are paused, or have what was
    never committed. What is committed is published to them again; agents only wait."""
    with left_by_trainer(config.run.dir) as pid:
        if pid is None:
            return
        store = WeightStore(config.run.dir / WEIGHTS, keep=config.trainer.keep_weights)
        committed = store.current() or Published(0, str(config.engine.model_path))
        log.warning("trainer %d was killed; version %d is served on", pid, committed.version)
        try:
            await publish(
                cluster.engines,
                committed.path,
                committed.version,
                "retract",
                store=store,
                transport="lora" if committed.adapter else "disk",
            )
        except WeightUpdateError as e:  # the next trainer publishes; supervisors restart engines
            log.warning("engines may stay paused until a trainer is attached: %s", e)


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
    if not (folder / RUN_FILE).is_file():  # found by the address of its Ray
        raise RunUnavailableError(
            f"the folder of the run, {folder} on {run.host}, is not on this machine, and weights, "
            "checkpoints and metrics go there; mount it here under that path, or train from there"
        )
    checked = checked or check_attached(config)
    display = Display(config.run.name, config.logging.console)
    with only_trainer_in(folder), logged(folder), attached(run.ray, str(folder)):
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
                    while_lives(lambda: run_holder(folder) == run.pid, ended)
                )
            pool = connect_pool(run.pool.name, run.ray.namespace)
            engines = [await stack.enter_async_context(EngineClient(u)) for u in run.engines.urls]
            placement = await asyncio.to_thread(place, config, serves=False)
            stack.callback(placement.release)
            workers: Sequence[WorkerHandle] = ()
            if config.rollout.agent is not None:
                workers = start_workers(
                    config.rollout, run.gateway.urls, run.gateway.key(), folder / LOGS
                )
            display.status(f"attached to {folder}: gateway at {run.gateway.urls[0]}")
            parts = Parts(pool=pool, engines=engines, workers=workers, placement=placement)
            return await _train_on(parts, config, checked, display)
