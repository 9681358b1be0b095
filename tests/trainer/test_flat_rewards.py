"""A run whose rewards teach nothing says so once, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepwell.trainer.data import Task
from tests.trainer.small_run import Reward, small_config, small_run


def replies(**fields: Any) -> Any:
    """Rollouts of which no two say the same."""
    return lambda task, index: {"response_ids": [3, index], **fields}


async def records_of(
    folder: Path, reward: Reward, step: Any = None, *options: str
) -> list[dict[str, Any]]:
    config = small_config(folder, "trainer.total_steps=12", *options)
    async with small_run(config, reward=reward, step=step or replies()) as run:
        return await run.train()


def number(task: Task) -> int:
    return int(task["answer"])


@pytest.mark.parametrize(
    ("reward", "step", "cause"),
    [
        (0.0, replies(), "were 0. Either the reward accepts no reply"),
        (1.0, replies(), "were 1. The tasks are solved"),
        (0.0, replies(finish_reason="length"), "100% of the replies were cut off at max_tokens"),
        (0.0, replies(metadata={"tool_calls": 0}), "The model calls its tools in 0% of"),
        (0.0, replies(metadata={"tool_calls": 2}), "were 0. Either"),
        (0.0, lambda task, index: {}, "the same, token for token"),
    ],
)
async def test_a_run_without_a_signal_is_warned_of_once_with_the_cause(
    tmp_path: Path, reward: float, step: Any, cause: str
) -> None:
    records = await records_of(tmp_path, lambda task, index: reward, step)
    warnings = [r["warning"] for r in records if "warning" in r]
    assert len(warnings) == 1
    assert "in 20 of 20 groups of the last 10 steps all rewards were" in warnings[0]
    assert cause in warnings[0]
    assert str(tmp_path / "validation" / "step_0.jsonl") in warnings[0]
    assert [r["groups/no_signal"] for r in records] == [1.0] * 12


async def test_tasks_that_are_always_right_or_always_wrong_are_told_apart(tmp_path: Path) -> None:
    records = await records_of(tmp_path, lambda task, index: float(number(task) % 2))
    assert any("either always right or always wrong" in r.get("warning", "") for r in records)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_running"])
async def test_tasks_that_differ_teach_where_the_baseline_is_not_the_group(
    tmp_path: Path, estimator: str
) -> None:
    options = (f"algorithm.adv_estimator={estimator}",)
    records = await records_of(tmp_path, lambda t, i: float(number(t) % 2), None, *options)
    assert not [r for r in records if "warning" in r]
    assert {r["groups/no_signal"] for r in records} == {0.0}


async def test_batches_of_one_rollout_are_compared_with_those_before(tmp_path: Path) -> None:
    options = (
        "algorithm.adv_estimator=reinforce_running",
        "rollout.n=1",
        "rollout.min_n=1",
        "trainer.train_batch_size=1",
    )
    records = await records_of(tmp_path, lambda t, i: float(number(t) % 2), None, *options)
    assert not [r for r in records if "warning" in r]
    assert [r["groups/no_signal"] for r in records] == [1.0, *[0.0] * 11]


@pytest.mark.parametrize(("usual", "warned"), [(0.0, True), (1.0, False)])
async def test_a_difference_in_a_group_of_ten_is_little_where_all_else_fails(
    tmp_path: Path, usual: float, warned: bool
) -> None:
    records = await records_of(
        tmp_path, lambda t, i: abs(usual - float(number(t) % 10 == 0 and i == 0))
    )
    assert any("in 18 of 20 groups" in r.get("warning", "") for r in records) == warned
    assert {r["groups/no_signal"] for r in records} == {0.5, 1.0}


async def test_a_difference_in_a_group_of_five_is_no_reason_to_warn(tmp_path: Path) -> None:
    records = await records_of(
        tmp_path, lambda task, index: float(number(task) % 5 == 0 and index == 0)
    )
    assert not [r for r in records if "warning" in r]


def odd_ones(source: str, said: str, answer: str, extra_info: dict[str, Any]) -> float:
    """Return 1.0 for the short reply to an odd task; no reply to an even one is right."""
    return float(int(answer) % 2 and extra_info["response_length"] == 1)


async def test_groups_that_the_trainer_scores_and_a_filter_drops_count(tmp_path: Path) -> None:
    def longer(task: Task, index: int) -> dict[str, Any]:
        return {"response_ids": [3] * (1 + index), "rollout_log_probs": [-0.5] * (1 + index)}

    options = (f"rollout.reward={__name__}:odd_ones", "sampling.filters=[all_wrong(0.0)]")
    records = await records_of(tmp_path, lambda task, index: None, longer, *options)
    assert [r["reward/mean"] for r in records] == [0.5] * 12
    assert all(0 < r["groups/no_signal"] < 1 for r in records)


@pytest.mark.parametrize(
    ("calls", "share"), [({}, None), ({"tool_calls": 0}, 0.0), ({"tool_calls": 2}, 1.0)]
)
async def test_tool_use_is_told_only_where_the_model_was_offered_tools(
    tmp_path: Path, calls: dict[str, int], share: float | None
) -> None:
    step = replies(metadata=calls)
    (record,) = await records_of(tmp_path, lambda task, index: 1.0, step, "trainer.total_steps=1")
    assert record["tool_use"] == share
