"""A trainer that is interrupted: what is saved, what is not begun any more, and what is raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.types import VAL
from stepwell.trainer.batches import TrainedChannel
from stepwell.trainer.errors import (
    INTERRUPTED,
    CheckpointError,
    RolloutError,
    StarvedError,
    TrainerError,
)
from tests.trainer.small_run import RecordingBackend, SmallRun, small_config, small_run


class HeldBackend(RecordingBackend):
    """Its second update, if it is `held`, waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def train_step(self, *args: Any) -> dict[str, float]:
        if self.updates == 1:
            self.begun.set()
            self.go.wait()
        return super().train_step(*args)


@asynccontextmanager
async def in_its_second_update(
    folder: Path, *overrides: str
) -> AsyncIterator[tuple[SmallRun, asyncio.Task[Any]]]:
    """A run, and its training, that goes on on leaving."""
    backend = HeldBackend()
    async with small_run(small_config(folder, *overrides), backend=backend) as run:
        try:
            training = asyncio.create_task(run.train())
            await asyncio.to_thread(backend.begun.wait)
            yield run, training
        finally:
            backend.go.set()


async def test_training_that_is_cancelled_within_a_batch_is_cancelled(tmp_path: Path) -> None:
    """And fails with nothing else: whoever cancels it, as when Ray ends, says what happened."""
    async with in_its_second_update(tmp_path) as (_, training):
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training


async def test_an_interrupted_run_saves_the_batch_that_it_trains(tmp_path: Path) -> None:
    async with in_its_second_update(tmp_path) as (run, training):
        training.cancel(INTERRUPTED)
        await asyncio.sleep(0)
        run.backend.go.set()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.trainer.checkpoints.steps() == [2]


async def test_a_run_that_is_interrupted_twice_saves_nothing_of_the_step_that_it_takes(
    tmp_path: Path,
) -> None:
    """The model may be before it or behind it, and the ledger does not have it."""
    async with in_its_second_update(tmp_path) as (run, training):
        for _ in range(2):
            training.cancel(INTERRUPTED)
            await asyncio.sleep(0)
        run.backend.go.set()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.trainer.checkpoints.steps() == []
        assert (await run.pool.get_statistics("train"))["groups"]["acked"] == 0


def end_after_two_batches(monkeypatch: pytest.MonkeyPatch, error: TrainerError) -> None:
    take, taken = TrainedChannel.take, 0

    async def ends(channel: TrainedChannel, size: int) -> Any:
        nonlocal taken
        taken += 1
        if taken > 2:
            raise error
        return await take(channel, size)

    monkeypatch.setattr(TrainedChannel, "take", ends)


@pytest.mark.parametrize("error", [StarvedError, RolloutError])
async def test_a_run_for_which_no_groups_come_any_more_saves_what_it_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[TrainerError]
) -> None:
    end_after_two_batches(monkeypatch, error("the agent fails"))
    async with small_run(small_config(tmp_path)) as run:
        with pytest.raises(error):
            await run.train()
        assert run.trainer.checkpoints.steps() == [2]
        assert (await run.pool.get_statistics("train"))["groups"]["acked"] == 4


async def test_a_checkpoint_that_cannot_be_written_hides_not_why_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_after_two_batches(monkeypatch, RolloutError("the agent fails"))

    def full(*_: Any) -> None:
        raise CheckpointError("the disk is full")

    told: list[str] = []
    async with small_run(small_config(tmp_path), notify=told.append) as run:
        monkeypatch.setattr(run.trainer.checkpoints, "save", full)
        with pytest.raises(RolloutError, match="the agent fails"):
            await run.train()
    assert any("the disk is full" in line for line in told)


async def test_an_interrupted_run_begins_no_evaluation(tmp_path: Path) -> None:
    async with in_its_second_update(tmp_path, "validation.every=2") as (run, training):
        training.cancel(INTERRUPTED)
        await asyncio.sleep(0)
        run.backend.go.set()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.rollouts.most_running[VAL] == 0
        assert run.trainer.checkpoints.steps() == [2]
    async with small_run(small_config(tmp_path, "validation.every=2"), pool=run.pool) as again:
        assert await again.trainer.resume()
        assert again.trainer.evaluation_due(), "the resumed run makes up for it"


@pytest.mark.parametrize("how", ["evaluate", "begin_evaluation"])
async def test_a_run_that_is_interrupted_by_an_evaluation_within_a_batch_saves_the_batch(
    tmp_path: Path, how: str
) -> None:
    """The one waits for its rollouts, the other for the evaluation before it to end."""
    held, go = asyncio.Event(), asyncio.Event()

    def hold(task: Any, channel: str) -> asyncio.Event | None:
        if channel == VAL:
            held.set()
            return go
        return None

    async def train(run: SmallRun) -> None:
        async with aclosing(run.trainer.train(6)) as steps:
            async for record in steps:
                run.records.append(record)
                run.recorded.set()
                if run.trainer.evaluation_due():
                    await getattr(run.trainer, how)(run.val_tasks)

    keys = ("async_training.require_batches=3", "validation.every=1", "trainer.total_steps=6")
    async with small_run(small_config(tmp_path, *keys), hold=hold) as run:
        training = asyncio.create_task(train(run))
        await held.wait()
        await run.trained(1 if how == "evaluate" else 2)
        training.cancel(INTERRUPTED)
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert [r["step"] for r in run.records] == [1, 2, 3]
        assert run.trainer.checkpoints.steps() == [3]
        assert (await run.pool.get_statistics("train"))["groups"]["acked"] == 6


asked, may_answer = threading.Event(), threading.Event()


def thinks_long(args: Any, samples: list[Any]) -> list[Any]:
    """The two groups to train on, in its time."""
    asked.set()
    may_answer.wait()
    return samples[:2]


async def test_a_batch_that_a_filter_still_looks_at_is_not_acked_by_an_interruption(
    tmp_path: Path,
) -> None:
    picks = (
        "sampling.over_sampling_batch_size=4",
        f"sampling.over_sampling_filter={__name__}:thinks_long",
    )
    async with small_run(small_config(tmp_path, *picks)) as run:
        try:
            training = asyncio.create_task(run.train())
            await asyncio.to_thread(asked.wait)
            training.cancel(INTERRUPTED)
            with pytest.raises(asyncio.CancelledError):
                await training
        finally:
            may_answer.set()
        assert (await run.pool.get_statistics("train"))["groups"]["acked"] == 0
        assert run.trainer.checkpoints.steps() == []


class SlowDisk(RecordingBackend):
    """Writes beside training, for as long as `go` is not set."""

    saves_beside = True

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def wait_saved(self) -> None:
        self.begun.set()
        self.go.wait()


@pytest.mark.parametrize("reason", [(), (INTERRUPTED,)], ids=["cancelled", "interrupted"])
async def test_a_checkpoint_that_is_being_written_is_finished_whoever_ends_the_run(
    tmp_path: Path, reason: tuple[str, ...]
) -> None:
    backend = SlowDisk()
    async with small_run(small_config(tmp_path), backend=backend) as run:
        training = asyncio.create_task(run.train(1))
        await asyncio.to_thread(backend.begun.wait)
        training.cancel(*reason)
        await asyncio.sleep(0)
        backend.go.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.trainer.checkpoints.steps() == [1]
        assert not run.trainer.batches.consumed, "its groups are acked"


async def test_a_run_that_is_interrupted_while_engines_load_what_it_trained_last_saves_it(
    tmp_path: Path,
) -> None:
    async with (
        small_run(small_config(tmp_path)) as run,
        run.engine.loading() as load,
    ):
        training = asyncio.create_task(run.train(1))
        await run.trained(1)
        await load.begun.wait()
        training.cancel(INTERRUPTED)
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.trainer.checkpoints.steps() == [1]


class SlowCopy(RecordingBackend):
    """Writes its state for as long as `go` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def save_state(self, folder: Path) -> dict[str, Any]:
        self.begun.set()
        self.go.wait()
        return super().save_state(folder)


async def test_the_last_checkpoint_is_written_also_if_the_run_is_interrupted_in_it(
    tmp_path: Path,
) -> None:
    backend = SlowCopy()
    async with small_run(small_config(tmp_path), backend=backend) as run:
        training = asyncio.create_task(run.train(1))
        await asyncio.to_thread(backend.begun.wait)
        training.cancel(INTERRUPTED)
        await asyncio.sleep(0)
        backend.go.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert run.trainer.checkpoints.steps() == [1]
        assert not run.trainer.batches.consumed, "its groups are acked"
