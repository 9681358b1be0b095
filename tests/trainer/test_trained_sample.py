"""The sample that a run leaves of each optimizer step: its own tokens with its own columns."""

from __future__ import annotations

import json
import shutil
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.datapool.files.trained import (
    read_about,
    read_trained,
    trained_steps,
    with_rewards,
)
from stepwell.datapool.types import TRAIN
from stepwell.trainer import samples
from tests.trainer.small_run import small_config, small_run


async def test_a_run_keeps_what_each_step_was_trained_on_with_the_columns_of_its_loss(
    tmp_path: Path,
) -> None:
    async with small_run(small_config(tmp_path, "trainer.sample_groups=2")) as run:
        records = await run.train()
    folder = run.config.run.dir
    assert trained_steps(folder) == [r["step"] for r in records] == [1, 2, 3, 4]
    each = zip(trained_steps(folder), run.backend.steps, run.backend.columns, strict=True)
    for step, steps, columns_of in each:
        found = read_trained(folder, step)
        assert read_about(folder, step)["groups"] == 2
        kept = [s for t in found for s in t.trajectory.steps]
        assert kept == steps
        for name in ("advantages", "weights", "prox_log_probs"):
            columns = np.concatenate([c[name] for t in found for c in t.columns])
            np.testing.assert_allclose(columns, columns_of[name].numpy(), atol=1e-6)


async def test_what_stands_in_rollouts_is_among_the_tokens_of_its_step(tmp_path: Path) -> None:
    """One sample: whole groups, and the trajectories that are lines of `rollouts.jsonl`."""
    keys = ("trainer.sample_groups=1", "trainer.rollout_samples=2", "async_training.ppo_epochs=2")
    async with small_run(small_config(tmp_path, *keys, "trainer.train_batch_size=4")) as run:
        await run.train()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 3, 3]  # of the first epoch alone
    for step in trained_steps(tmp_path):
        kept = {t.trajectory.trajectory_uid: t for t in read_trained(tmp_path, step)}
        assert 2 <= len(kept) <= 4, "a group of two, and two lines"
        for line in (line for line in lines if line["step"] == step):
            own = kept[line["trajectory_uid"]]
            assert line["advantage"] == pytest.approx(own.mean("advantages"), abs=1e-5)


async def test_groups_that_the_trainer_scored_are_listed_with_their_rewards(tmp_path: Path) -> None:
    """The pool lists a leased group without: nobody tells it what the trainer gave."""
    mine = f"rollout.reward={__name__}:by_length"
    keys = (mine, "trainer.total_steps=1", "trainer.checkpoint_every=100")
    config = small_config(tmp_path, *keys)
    async with (
        small_run(config, reward=lambda task, index: None) as run,
        aclosing(run.trainer.train(1)) as records,
    ):
        await anext(records)
        listed = (await run.pool.list_groups(TRAIN)).items
        leased = [row for row in listed if row.state == "leased"]
        assert leased
        assert {row.reward_mean for row in leased} == {None}
        shown = with_rewards(tmp_path, listed)
    assert {(row.reward_mean, row.reward_std) for row in shown if row.state == "leased"} >= {
        (2.0, 0.0)
    }
    assert [row for row in shown if row.state != "leased"] == [
        row for row in listed if row.state != "leased"
    ]


@pytest.mark.parametrize(("saved", "left"), [(2, [1, 2]), (0, [])])
async def test_what_was_trained_and_not_acked_is_no_sample_after_a_resume(
    tmp_path: Path, saved: int, left: list[int]
) -> None:
    """Its groups come back, and stand in the file of the step that trains them at last."""
    config = small_config(tmp_path, "trainer.checkpoint_every=2")
    async with small_run(config) as run, aclosing(run.trainer.train()) as records:
        async for record in records:
            if record["step"] == saved + 1:
                break
    shutil.rmtree(tmp_path / "checkpoints" / f"step_{saved + 1}")  # killed before it was written
    assert trained_steps(tmp_path) == [*left, saved + 1]
    async with small_run(config) as again:
        assert await again.trainer.resume() == bool(saved)
    assert trained_steps(tmp_path) == left


def by_length(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(extra_info["response_length"])


async def test_none_is_kept_where_none_is_wanted_and_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with small_run(small_config(tmp_path, "trainer.sample_groups=0")) as run:
        await run.train(1)
    assert not trained_steps(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(samples, "write_trained", full)
    async with small_run(small_config(tmp_path)) as run:
        assert len(await run.train(2)) == 2
    assert "no space left on device" in caplog.text


def with_tests(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    return {"score": 1.0, "tests": {0: True, 1: False}}


def with_seed(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    return {"score": 1.0, "seed": 2**70}


async def test_what_a_reward_says_beside_the_score_is_kept_with_the_sample(tmp_path: Path) -> None:
    """Keys that are no text become text, and so do numbers that JSON has no word for."""
    found = []
    for function in (with_tests, with_seed):
        mine = f"rollout.reward={__name__}:{function.__name__}"
        (folder := tmp_path / function.__name__).mkdir()
        async with small_run(small_config(folder, mine), reward=lambda task, index: None) as run:
            assert len(await run.train(1)) == 1
        (first, *_) = read_trained(folder, 1)
        found.append(first.trajectory.metadata["reward_extra_info"])
    assert found == [{"tests": {"0": True, "1": False}}, {"seed": str(2**70)}]


HUGE = 10**30
TRUTHS: list[Any] = []


def noted(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    TRUTHS.append(ground_truth)
    return float(len(TRUTHS) % 2)


@pytest.mark.parametrize("answer", [str(HUGE), f'{{"n": [{HUGE}, NaN]}}', '"\\ud800"'])
async def test_an_answer_that_only_python_has_ends_no_run(tmp_path: Path, answer: str) -> None:
    """An integer beyond 64 bits, as of 2 to the 100th, or half a character."""
    keys = ("trainer.checkpoint_every=1", "validation.every=1", "trainer.rollout_samples=2")
    mine = f"rollout.reward={__name__}:noted"
    config = small_config(tmp_path, *keys, mine, "trainer.total_steps=2")
    for name in ("train", "val"):
        rows = (
            f'{{"question": "{name} {i}?", "answer": {answer}, "metadata": {{"a": {answer}}}}}'
            for i in range(20)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    TRUTHS.clear()
    async with small_run(config, reward=lambda task, index: None) as run:
        records = await run.train()
    assert [record["step"] for record in records] == [1, 2]
    assert TRUTHS[0] in (str(HUGE), "?") or TRUTHS[0]["n"][0] == str(HUGE)
