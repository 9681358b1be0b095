"""`async_training.ppo_epochs`: a batch is gone over several times, and stays one batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.datapool.types import TRAIN
from stepwell.trainer.config import AsyncTrainingConfig, SamplingConfig
from stepwell.trainer.ledger import audit
from stepwell.trainer.sampling import credit_limit
from tests.stepwell.configuring import fails
from tests.trainer.small_run import RecordingBackend, SmallRun, small_config, small_run

THRICE = (
    "async_training.require_batches=2",
    "async_training.ppo_epochs=3",
    "trainer.total_steps=12",
    "trainer.checkpoint_every=6",
)
"""Two batches of four groups, in two mini-batches each: six optimizer steps a batch."""


def groups_of(backend: RecordingBackend) -> list[frozenset[str]]:
    """prompt_uids of each optimizer step."""
    return [frozenset(s.prompt_uid for s in steps) for steps in backend.steps]


async def acked(run: SmallRun) -> int:
    return int((await run.pool.get_statistics(TRAIN))["groups"]["acked"])


async def test_a_batch_is_gone_over_with_its_columns_of_before_and_acked_once(
    tmp_path: Path,
) -> None:
    async with small_run(small_config(tmp_path, *THRICE)) as run:
        records = await run.train()
        assert [r["step"] for r in records] == list(range(1, 13))
        assert run.backend.scored == 2, "π_prox is taken once a batch"
        for batch in (run.backend.columns[:6], run.backend.columns[6:]):
            assert all(c["prox_log_probs"].equal(batch[0]["prox_log_probs"]) for c in batch)
        trained = groups_of(run.backend)
        for batch in (trained[:6], trained[6:]):
            first, second = batch[:2]
            assert len(first | second) == 4
            for epoch in (batch[2:4], batch[4:]):
                assert set(epoch) == {first, second}
        assert await acked(run) == 8
        told = audit(tmp_path / "ledger.jsonl")
    assert not told.doubled
    assert told.trained == 8
    assert told.updates == {1: 2, 2: 2, 7: 2, 8: 2}


async def test_the_order_of_later_epochs_is_drawn_from_the_seed(tmp_path: Path) -> None:
    async def order(seed: int, name: str) -> list[bool]:
        """For each later epoch: True if it begins with the mini-batch that came first."""
        folder = tmp_path / name
        folder.mkdir()
        many = ("async_training.ppo_epochs=9", "trainer.total_steps=18", f"run.seed={seed}")
        async with small_run(small_config(folder, *THRICE[:1], *many)) as run:
            await run.train()
            trained = groups_of(run.backend)
        return [epoch == trained[0] for epoch in trained[2::2]]

    one = await order(1, "one")
    assert one == await order(1, "again")
    assert set(one) == {True, False}
    assert one != await order(2, "two")


async def test_a_resumed_run_goes_over_the_next_batch_and_none_twice(tmp_path: Path) -> None:
    config = small_config(tmp_path, *THRICE)
    async with small_run(config) as run:
        await run.train(until=6)
        assert await acked(run) == 4
    async with small_run(config, pool=run.pool) as again:
        assert await again.trainer.resume()
        await again.train()
        assert again.trainer.progress.updates == 12
        assert await acked(again) == 8
        assert not set().union(*groups_of(run.backend)) & set().union(*groups_of(again.backend))
    told = audit(tmp_path / "ledger.jsonl")
    assert (told.trained, told.doubled) == (8, ())


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
async def test_a_window_holds_what_is_gone_over_before_its_publication(
    tmp_path: Path, mode: str
) -> None:
    keys = (f"async_training.mode={mode}", "async_training.trigger_parameter_sync_step=6", *THRICE)
    async with small_run(small_config(tmp_path, *keys)) as run:
        await run.train()
        assert run.backend.updates == 12
        lag = 0 if mode == "sync" else 1
        assert run.rollouts.begun[0] == 4 * (1 + lag)
        assert run.versions[6:] == [[1 - lag]] * 6


def test_a_window_that_ends_within_a_batch_is_refused(tmp_path: Path) -> None:
    training = AsyncTrainingConfig(mode="sync", trigger_parameter_sync_step=6, ppo_epochs=3)
    assert credit_limit(training, SamplingConfig(), 8) == 16
    assert "a multiple of require_batches × ppo_epochs = 3" in fails(
        "async_training.mode=sync", "async_training.ppo_epochs=3"
    )


async def test_a_record_tells_passes_over_the_data_and_over_the_batch_apart(
    tmp_path: Path,
) -> None:
    """verl's `training/epoch` is the first; the second is its `ppo_epochs`."""
    keys = ("async_training.ppo_epochs=2", "trainer.total_steps=12")
    config = small_config(tmp_path, *keys, "async_training.trigger_parameter_sync_step=2", train=6)
    assert config.data is not None
    assert config.data.train is not None
    train = config.data.train.model_copy(update={"epochs": 2})
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": train})})
    async with small_run(config) as run:
        records = await run.train()
    assert [r.get("ppo_epoch", 0) for r in records] == [0, 1] * 6
    epochs = [r["data/epoch"] for r in records]
    assert epochs == sorted(epochs)
    assert set(epochs) <= {0, 1, 2}
    assert epochs[-1] >= 1
