"""Whatever takes longer than a lease lasts: no prompt is trained twice, none is lost, and the
ledger's audit says so."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import ray

from stepwell.backends.base import LossFn, TokenBatch
from stepwell.config.run import RunConfig
from stepwell.datapool import client_of, start_data_pool
from stepwell.datapool.types import TRAIN, VAL
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.data import Task
from stepwell.trainer.ledger import audit
from tests.trainer.small_run import (
    RecordingBackend,
    SmallRun,
    pool_config,
    small_config,
    small_run,
)

LEASE_S = 0.3
LONG_S = 3 * LEASE_S
UPDATES = 6
MODES: dict[str, tuple[str, ...]] = {
    "sync": ("async_training.mode=sync",),
    "one step off": ("async_training.mode=one_step_off",),
    "async": ("async_training.mode=async",),
    "on_stale: return": (
        "async_training.mode=async",
        "pool.channels.train.max_staleness=1",
        "pool.channels.train.on_stale=return",
    ),
}


class SlowBackend(RecordingBackend):
    """Its optimizer steps take `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def train_step(
        self, batch: TokenBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        time.sleep(self._seconds)
        return super().train_step(batch, loss_fn, indices)


def config_of(folder: Path, mode: str = "async", *overrides: str) -> RunConfig:
    return small_config(
        folder,
        f"pool.channels.train.lease_s={LEASE_S}",
        f"trainer.total_steps={UPDATES}",
        "trainer.checkpoint_every=2",
        *MODES[mode],
        *overrides,
        train=60,
        val=2,
    )


def prompts_trained(run: SmallRun) -> Counter[str]:
    """Count how often each prompt was trained, by what the backend was given."""
    return Counter(
        uid.rpartition("-")[0]
        for steps in run.backend.steps
        for uid in {step.prompt_uid for step in steps}
    )


async def assert_each_trained_once(run: SmallRun) -> None:
    trained = prompts_trained(run)
    assert trained.total() == 2 * UPDATES  # two groups a step
    assert set(trained.values()) == {1}
    found = audit(run.config.run.dir / "ledger.jsonl", [f"train{i}" for i in range(60)])
    assert found.doubled == found.skipped == ()
    assert found.trained == trained.total()
    assert found.returned == found.dropped.total()  # none is dropped for good
    in_flight = {uid.rpartition("-")[0] for uid in found.in_flight}
    assert {*trained, *found.waiting, *in_flight} == set(found.draws)
    # The pool serves none of them again.
    live = {row.prompt_uid.rpartition("-")[0] for row in (await run.pool.list_groups(TRAIN)).items}
    assert not live & trained.keys()


@pytest.mark.parametrize("mode", MODES)
async def test_a_step_longer_than_a_lease_trains_every_prompt_once(
    tmp_path: Path, mode: str
) -> None:
    async with small_run(config_of(tmp_path, mode), backend=SlowBackend(LONG_S)) as run:
        await run.train()
        await assert_each_trained_once(run)


async def test_an_evaluation_longer_than_a_lease_trains_every_prompt_once(tmp_path: Path) -> None:
    """It stops the trainer while a batch is on its way."""

    async def hold(seconds: float, event: asyncio.Event) -> None:
        await asyncio.sleep(seconds)
        event.set()

    def held(task: Task, channel: str) -> asyncio.Event | None:
        return ended if channel == VAL else None

    ended = asyncio.Event()
    async with small_run(config_of(tmp_path, "async"), hold=held) as run:
        async with aclosing(run.trainer.train(UPDATES)) as steps:
            async for _ in steps:
                ended.clear()
                holding = asyncio.create_task(hold(LONG_S, ended))
                await run.trainer.evaluate(run.val_tasks)
                await holding
        await assert_each_trained_once(run)


class SlowCheckpoints(CheckpointStore):
    def save(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(LONG_S)
        return super().save(*args, **kwargs)


@pytest.mark.parametrize("mode", MODES)
async def test_a_checkpoint_longer_than_a_lease_trains_every_prompt_once(
    tmp_path: Path, mode: str
) -> None:
    store = SlowCheckpoints(tmp_path / "checkpoints", 2)
    async with small_run(config_of(tmp_path, mode), checkpoints=store) as run:
        await run.train()
        await assert_each_trained_once(run)


# -- the process stands still ------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_process_that_stood_still_longer_than_a_lease_trains_every_prompt_once(
    cluster: str, tmp_path: Path, mode: str
) -> None:
    """Its event loop does not turn, as after a SIGSTOP; the pool, a process of its own, goes on,
    and serves what ran out to whoever waits."""
    config = config_of(tmp_path, mode)
    handle = start_data_pool(pool_config(config), name=uuid.uuid4().hex)
    try:
        async with small_run(config, pool=client_of([handle])) as run:
            async with aclosing(run.trainer.train(UPDATES)) as steps:
                async for _ in steps:
                    time.sleep(LONG_S)  # noqa: ASYNC251 - that is the point
            await assert_each_trained_once(run)
    finally:
        ray.kill(handle)
