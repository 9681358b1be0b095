"""One run from start to finish: `train(config)` and `serve(config)`, called by the command line.

Owns what surrounds the loop: starting the parts, evaluation before and after, the files left
behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepwell.backends.base import build_backend, loop_backend
from stepwell.backends.critic import Critic
from stepwell.backends.errors import BackendError
from stepwell.backends.weights import WeightStore
from stepwell.cluster import GATEWAY_KEY, LOGS, POOL, POOL_NAME, WEIGHTS, Cluster, start_cluster
from stepwell.config import RunConfig
from stepwell.console import Display
from stepwell.datapool.journal import holder
from stepwell.datapool.lease_keeper import LeaseKeeper
from stepwell.datapool.process import logging_to
from stepwell.datapool.types import TRAIN
from stepwell.replay import REPLAY, replay
from stepwell.report import SUMMARY, plot_reward, read_summary, summarise, write_summary
from stepwell.run_file import RUN_FILE, GatewayPart, PoolPart, begin, only_run_in
from stepwell.trackers import build_trackers
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import TrainerConfig
from stepwell.trainer.data import PromptSource, Task
from stepwell.trainer.errors import ConfigError, StarvedError, TrainerError
from stepwell.trainer.ledger import LEDGER, Ledger
from stepwell.trainer.loop import Trainer
from stepwell.trainer.memory import EngineMemory
from stepwell.trainer.metrics import MemoryMeter, MetricsWriter
from stepwell.trainer.publication import Publisher
from stepwell.trainer.rewards import build_manager
from stepwell.trainer.rollout import Producer, load_agent
from stepwell.trainer.sampling import GroupFilter, Pace, credit_limit, drops_surplus
from stepwell.trainer.scoring import Scorer
from stepwell.trainer.validation import (
    COLUMNS,
    VALIDATION,
    Validator,
    read_samples,
    samples_path,
)

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
TRAINER_LOG = "trainer.log"
EVALUATION_ATTEMPTS = 3
"""Evaluations of which not one rollout finished, in a row, that end the run."""


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


async def train(config: RunConfig) -> dict[str, Any]:
    """Train as configured; returns the summary, which is also written to `summary.json`."""
    seed_everything(config.run.seed)
    if config.trainer.load_debug_rollout_data is not None:
        backend = build_backend(config.trainer.backend, config.backend, config.model.path)
        return await replay(config, backend, build_critic(config))
    with configured():
        source = training_prompts(config)  # a mistake costs no start, and removes no run
    with only_run_in(config.run.dir):
        return await _run(config, source)


async def _run(config: RunConfig, source: PromptSource) -> dict[str, Any]:
    folder = config.run.dir
    display = Display(config.run.name, config.trainer.total_steps, config.logging.console)
    if config.run.resume == "never":
        _start_over(folder)
    elif (done := _finished(config)) is not None:
        display.status("this run is complete; run.resume=never starts it over")
        display.summary(done, folder)
        return done
    with configured():
        load_agent(config.rollout.agent)
        loop_backend(config.trainer.backend)
        if config.rollout.reward is not None:
            with configured("rollout.reward"):
                build_manager(config.rollout.reward)
    CheckpointStore(folder / CHECKPOINTS).find(config.run.resume)  # a wrong one costs no start
    with logged(folder), display, MemoryMeter() as memory:
        display.status("starting Ray, the pool, the engine and the gateway")
        async with start_run(config) as cluster:
            display.status(f"gateway at {cluster.gateway_url}")
            with (
                MetricsWriter(folder, build_trackers(folder, config)) as metrics,
                build_trainer(config, cluster, source) as trainer,
            ):
                try:
                    return await _train(config, trainer, metrics, display, memory)
                finally:
                    await trainer.memory.take_back()
                    await trainer.validator.stop()
                    await trainer.scorer.aclose()


@contextmanager
def configured(key: str = "") -> Iterator[None]:
    """What cannot be loaded here was named by the configuration: an error is the configuration's.

    Args:
        key: of what is loaded; not every message names it.
    """
    try:
        yield
    except ConfigError:
        raise
    except (TrainerError, BackendError) as e:
        raise ConfigError(str(e) if str(e).startswith(key) else f"{key}: {e}") from e


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """The log of this process is a file in the run's folder, which the error of a run names."""
    path = folder / LOGS / TRAINER_LOG
    with logging_to(path):
        try:
            yield
        except Exception as e:
            log.info("the run has failed", exc_info=True)  # the console has one line of it
            e.add_note(f"see {path}, and the logs of the other parts beside it")
            raise


@asynccontextmanager
async def start_run(config: RunConfig) -> AsyncIterator[Cluster]:
    """The running parts, and a `run.json` that says where they are."""
    run = begin(config)
    async with start_cluster(config) as cluster:
        run.model_copy(
            update={
                "ray": cluster.ray,
                "pool": PoolPart(name=POOL_NAME),
                "gateway": GatewayPart(urls=cluster.gateway_urls, key_file=cluster.key_file),
            }
        ).write(config.run.dir)
        yield cluster


def training_prompts(config: RunConfig) -> PromptSource:
    """The prompts of `data.train` that are not held out for validation.

    Raises:
        ConfigError: they cannot be read, or there is none.
    """
    held_out: frozenset[str] = frozenset()
    if config.data.val is not None:
        with configured("data.val"):
            held_out = PromptSource(config.data.val, tokenizer_path=config.model.path).prompts()
    with configured("data.train"):
        source = PromptSource(config.data.train, held_out, tokenizer_path=config.model.path)
        if config.data.val is None:
            source.hold_out()
        return source


def validation_tasks(config: RunConfig) -> list[Task]:
    """The tasks of `data.val`, or those of `data.train` that are held out for it."""
    source = PromptSource(config.data.val or config.data.train, tokenizer_path=config.model.path)
    return source.hold_out() if config.data.val is None else source.all()


@contextmanager
def build_trainer(config: RunConfig, cluster: Cluster, source: PromptSource) -> Iterator[Trainer]:
    """A trainer on `source` over the running parts of `cluster`; closed on leaving."""
    folder = config.run.dir / CHECKPOINTS
    ledger = Ledger(folder / LEDGER)
    producer = Producer(
        config.rollout,
        source,
        cluster.pool,
        cluster.workers,
        ledger,
        pace=Pace(
            credit_limit(config.async_training, config.sampling, config.trainer.train_batch_size)
        ),
        drops_surplus=drops_surplus(config.async_training),
        n_greedy=int(config.algorithm.adv_estimator == "remax"),
    )
    scorer = Scorer(config.rollout.reward, config.model.path)
    trainer = Trainer(
        config.trainer,
        config.async_training,
        config.algorithm,
        pool=cluster.pool,
        keeper=LeaseKeeper(cluster.pool, TRAIN, config.pool.channel(TRAIN).lease_s),
        producer=producer,
        source=source,
        scorer=scorer,
        group_filter=GroupFilter(config.sampling),
        validator=Validator(
            config.validation,
            cluster.pool,
            producer,
            scorer,
            folder=config.run.dir,
            tokenizer_path=config.model.path,
        ),
        backend=build_backend(
            config.trainer.backend,
            config.backend,
            config.model.path,
            **cluster.placement.backend_options(),
        ),
        critic=build_critic(config, **cluster.placement.critic_options()),
        publisher=Publisher(
            cluster.engines,
            WeightStore(config.run.dir / WEIGHTS, keep=config.trainer.keep_weights),
            EngineMemory(cluster.engines, lends=config.engine.release_memory),
            transport=config.engine.weight_transport,
            patience_s=config.trainer.starvation_timeout_s,
        ),
        checkpoints=CheckpointStore(
            folder,
            config.trainer.keep_checkpoints,
            config.trainer.keep_best,
            origin={
                "model_path": str(config.model.path.absolute()),
                "backend": config.trainer.backend,
                "backend_config": config.backend.model_dump(mode="json"),
            },
        ),
        seed=config.run.seed,
        logs=config.run.dir / LOGS,
    )
    try:
        yield trainer
    finally:
        trainer.close()
        ledger.close()


def build_critic(config: RunConfig, **options: Any) -> Critic | None:
    """The value model of `adv_estimator: gae`; None with any other. `options` are `Critic`'s."""
    if config.algorithm.adv_estimator != "gae":
        return None
    return Critic(config.algorithm.critic, config.backend, config.model.path, **options)


async def _train(
    config: RunConfig,
    trainer: Trainer,
    metrics: MetricsWriter,
    display: Display,
    memory: MemoryMeter,
) -> dict[str, Any]:
    resumed = await trainer.resume(config.run.resume)
    display.resume_at(trainer.progress.updates)
    if status := resume_status(resumed, trainer.progress.updates, metrics.read(), config.trainer):
        display.status(status)
    # Of a run that was complete and goes back: it is not any more, also if it is killed now.
    (config.run.dir / SUMMARY).unlink(missing_ok=True)
    tasks = validation_tasks(config)
    total = config.trainer.total_steps

    def report() -> None:
        for e in trainer.validator.finished():
            display.evaluation(e.step, e.score, e.tool_use)
            trainer.checkpoints.score(e.weights_step, e.value(config.validation.metric))
            table = samples_path(config.run.dir, e.step)
            metrics.table("val/samples", COLUMNS, read_samples(table, config.validation.samples))

    async def evaluate(mode: str = "blocking") -> None:
        display.status(f"evaluating on {len(tasks)} prompts")
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

    if not trainer.progress.evaluations:
        await evaluate()
    async with (
        trainer.producer.running() as generation,
        aclosing(trainer.train(total, generation)) as steps,
    ):
        if trainer.evaluation_due():  # of a process that was killed meanwhile
            await evaluate(config.validation.mode)
        async for record in steps:
            metrics.write(record)
            display.step(record)
            report()
            if trainer.evaluation_due():
                await evaluate(config.validation.mode)
    await evaluate()

    memory.sample()
    records = metrics.read()
    summary = summarise(config.run.name, records, trainer.progress, memory.peak)
    write_summary(config.run.dir, summary)
    plot_reward(config.run.dir, f"Stepwell · {config.run.name}", records, summary["evals"])
    display.summary(summary, config.run.dir)
    return summary


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
        ConfigError: a live process uses the run's pool.
    """
    for journal in (folder / POOL, *(folder / POOL).glob("shard-*")):
        if (pid := holder(journal)) is not None:
            raise ConfigError(
                f"run.resume is never, but process {pid} has the pool of {folder} open; stop that "
                "run first, or choose another run.name"
            )
    for name in (WEIGHTS, CHECKPOINTS, POOL, VALIDATION, LOGS, "wandb", "tensorboard", REPLAY):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", SUMMARY, "reward.png", GATEWAY_KEY, RUN_FILE):
        (folder / name).unlink(missing_ok=True)


def _finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run in `run.dir`, if it has done all its optimizer steps and is not told
    to go back to an earlier one."""
    summary, total = read_summary(config.run.dir), config.trainer.total_steps
    if summary is None or summary["optimizer_steps"] < total:
        return None
    if config.run.resume != "auto":
        checkpoints = CheckpointStore(config.run.dir / CHECKPOINTS)
        path = checkpoints.find(config.run.resume)
        if path is not None and checkpoints.about(path)["step"] < total:
            return None
    return summary


async def serve(config: RunConfig) -> None:
    """Pool, engine and gateway without training, until interrupted."""
    with only_run_in(config.run.dir), logged(config.run.dir):
        async with start_run(config) as cluster:
            where = "\n           ".join(cluster.gateway_urls)
            needs = "" if cluster.key_file is None else f", admin key in {cluster.key_file}"
            print(f"gateway at {where}{needs}  (Ctrl-C stops it)", flush=True)
            await asyncio.Event().wait()
