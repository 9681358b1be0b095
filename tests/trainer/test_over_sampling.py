"""`sampling.over_sampling_filter`: more groups are taken than a batch trains, and the best kept.

The functions have the form of slime's `--over-sampling-filter-path`, as its documentation of
`--over-sampling-batch-size` had it: `f(args, data) -> data`, of which the first are trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.errors import SelectionError
from stepwell.datapool.types import TRAIN
from stepwell.trainer.config import AsyncTrainingConfig, SamplingConfig
from stepwell.trainer.data import Task
from stepwell.trainer.ledger import NOT_TRAINED, audit
from stepwell.trainer.sampling import credit_limit
from tests.stepwell.configuring import fails
from tests.trainer.small_run import small_config, small_run

BEST = ("sampling.over_sampling_batch_size=4", "sampling.over_sampling_filter=sort_by_reward_std")


def number(task: Task) -> int:
    return int(task["instance_id"].removeprefix("train"))


def spread(task: Task, index: int) -> float:
    """The later of every four tasks in a row, the more its two rewards differ."""
    return float(index * (number(task) % 4))


def fewest_first(args: Any, data: list[list[Any]], **kwargs: Any) -> list[list[Any]]:
    return sorted(data, key=lambda group: sum(s.get_reward_value(args) for s in group))


def one_group(args: Any, data: list[list[Any]]) -> list[list[Any]]:
    return data[:1]


def nothing_of_use(args: Any, data: list[list[Any]]) -> Any:
    return [None]


@pytest.mark.parametrize("mode", ["async", "sync", "one_step_off"])
async def test_the_groups_whose_rewards_differ_the_most_are_trained_and_all_acked(
    tmp_path: Path, mode: str
) -> None:
    keys = (*BEST, f"async_training.mode={mode}", "trainer.total_steps=3")
    async with small_run(small_config(tmp_path, *keys), reward=spread) as run:
        records = await run.train()
        trained = [{s.prompt_uid for s in steps} for steps in run.backend.steps]
        groups = (await run.pool.get_statistics(TRAIN))["groups"]
    told = audit(tmp_path / "ledger.jsonl")
    names = {uid.rpartition("-")[0] for uids in trained for uid in uids}
    assert names == {f"train{4 * i + best}" for i in range(3) for best in (2, 3)}
    assert [r["groups"] for r in records] == [2, 2, 2]
    assert records[-1]["sampling/filtered/over_sampling"] == 6
    assert groups["acked"] == 12
    assert (told.trained, told.dropped[NOT_TRAINED], told.doubled) == (6, 6, ())


async def test_a_function_of_slimes_form_chooses(tmp_path: Path) -> None:
    mine = f"sampling.over_sampling_filter={__name__}:fewest_first"
    config = small_config(tmp_path, BEST[0], mine, "trainer.total_steps=1")
    async with small_run(config, reward=spread) as run:
        await run.train()
        (steps,) = run.backend.steps
        assert {s.prompt_uid.rpartition("-")[0] for s in steps} == {"train0", "train1"}


async def test_a_function_may_keep_fewer_than_a_batch(tmp_path: Path) -> None:
    mine = f"sampling.over_sampling_filter={__name__}:one_group"
    async with small_run(small_config(tmp_path, BEST[0], mine, "trainer.total_steps=1")) as run:
        assert [r["groups"] for r in await run.train()] == [1]


async def test_a_function_that_answers_nonsense_ends_the_run_by_name(tmp_path: Path) -> None:
    mine = f"sampling.over_sampling_filter={__name__}:nothing_of_use"
    async with small_run(small_config(tmp_path, BEST[0], mine)) as run:
        with pytest.raises(SelectionError, match=r"nothing_of_use' failed: .* list of the groups"):
            await run.train()


def test_a_filter_that_could_choose_nothing_is_refused() -> None:
    assert "set over_sampling_batch_size to" in fails(BEST[1])
    over = "sampling.over_sampling_batch_size=1"
    assert "chooses among more groups than a batch takes" in fails(BEST[1], over)
    assert "is 999, so it could never be ready" not in fails(BEST[1], over)
    too_many = "sampling.over_sampling_batch_size=999"
    assert "sampling.over_sampling_batch_size = 999 groups" in fails(BEST[1], too_many)


def test_a_window_begins_what_its_batches_take() -> None:
    sampling = SamplingConfig(over_sampling_batch_size=6, over_sampling_filter="sort_by_reward_std")
    sync = AsyncTrainingConfig(mode="sync", trigger_parameter_sync_step=2)
    assert credit_limit(sync, sampling, 4) == 12
    ahead = sync.model_copy(update={"mode": "one_step_off"})
    assert credit_limit(ahead, sampling, 4) == 24
