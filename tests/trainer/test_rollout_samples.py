"""Files of a run for people who look: samples of what it trained, traces; rollouts alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.datapool.types import TRAIN, VAL, Group, Step, Trajectory
from stepwell.run.train import _train
from stepwell.track.console import Display
from stepwell.trainer import samples
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.metrics import MemoryMeter, MetricsWriter, Tracker
from stepwell.trainer.recording import recordings, replay
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.updater import Updater
from tests.trainer.small_run import RecordingBackend, SmallRun, small_config, small_run


class Tables:
    """A tracker that keeps tables."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, str, Sequence[str], Sequence[Sequence[Any]]]] = []

    def write(self, step: int, record: Mapping[str, Any]) -> None: ...

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        self.tables.append((step, name, columns, rows))

    def close(self, failed: bool) -> None: ...


async def whole_run(run: SmallRun, *trackers: Tracker) -> dict[str, Any]:
    """Train as `stepwell train` does, but with the parts of `run`."""
    with MemoryMeter() as memory, MetricsWriter(run.config.run.dir, trackers) as metrics:
        return await _train(run.config, run.trainer, metrics, Display("small", "quiet"), memory)


def rows(folder: Path, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


# --- samples --------------------------------------------------------------------------------------


async def test_what_is_trained_can_be_read(tmp_path: Path) -> None:
    ids = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "rollout_log_probs": [-0.5] * 3}
    config = small_config(tmp_path, "trainer.rollout_samples=3", "trainer.total_steps=2")
    async with small_run(config, step=lambda task, index: ids) as run:
        await run.train()
        decode = tokenizer_at(config.model.path).decode
    found = rows(tmp_path)
    assert [r["step"] for r in found] == [1, 1, 1, 2, 2, 2]
    first = found[0]
    assert (first["prompt"], first["response"]) == (decode([5, 6]), decode([7, 8, 9]))
    assert (first["reward"], first["version"], first["answer"]) == (0.0, 0, "0")
    assert first["instance_id"] == "train0"
    assert first["advantage"] < 0 < found[1]["advantage"]
    assert {r["prompt_uid"] for r in found[:3]} == {s.prompt_uid for s in run.backend.steps[0]}, (
        "spread over the groups"
    )


def lines_alone(folder: Path, rollout_samples: int | None) -> samples.Trained:
    model = small_config(folder).model.path
    bounds: dict[str, Any] = {"sample_groups": 0, "sample_mb": 1}
    return samples.Trained(folder, model, rollout_samples=rollout_samples, **bounds)


def graded(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """A dict, as verl's reward functions return one."""
    return {"score": 0.5, "accuracy": 1.0, "detailed_feedback": f"wanted {ground_truth}"}


async def test_what_a_reward_says_beside_the_score_is_dumped_with_the_rollout(
    tmp_path: Path,
) -> None:
    """verl's `reward_extra_infos_dict` in `rollout_data_dir` and `validation_data_dir`."""
    config = small_config(
        tmp_path,
        "trainer.rollout_samples=null",
        "trainer.total_steps=1",
        f"rollout.reward={__name__}:graded",
    )
    async with small_run(config, reward=lambda task, index: None) as run:
        await run.train()
        await run.trainer.evaluate(run.val_tasks)
    for row in (*rows(tmp_path), *rows(tmp_path / "validation", "step_1.jsonl")):
        assert row["reward"] == 0.5
        assert row["reward_extra_info"] == {
            "accuracy": 1.0,
            "detailed_feedback": f"wanted {row['answer']}",
        }


async def test_trackers_get_a_bounded_table_of_what_is_trained_under_one_key(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "trainer.rollout_samples=null", "trainer.total_steps=2")
    ids = {"response_ids": [7] * 9000, "rollout_log_probs": [-0.5] * 9000}
    kept = Tables()
    async with small_run(config, step=lambda task, index: ids) as run:
        await whole_run(run, kept)
    tables = [table for table in kept.tables if table[1] == "train/samples"]
    assert [step for step, *_ in tables] == [1, 2]
    for step, _, columns, lines in tables:
        assert 1 <= len(lines) <= 8
        assert {line[columns.index("step")] for line in lines} == {step}
        assert all(len(str(cell)) < 2_100 for line in lines for cell in line)


@pytest.mark.parametrize(("per_batch", "lines"), [("0", 0), ("null", 4)])
async def test_none_or_all_of_a_batch_are_written(
    tmp_path: Path, per_batch: str, lines: int
) -> None:
    keys = (f"trainer.rollout_samples={per_batch}", "trainer.total_steps=1")
    async with small_run(small_config(tmp_path, *keys)) as run:
        await run.train()
    found = rows(tmp_path) if (tmp_path / "rollouts.jsonl").exists() else []
    assert len(found) == lines


async def test_the_file_is_bounded_in_its_texts_and_in_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MAX_CHARS", 20)
    monkeypatch.setattr(samples, "MAX_BYTES", 500)
    n = 40
    ids = {"response_ids": [7, 8] * (n // 2), "rollout_log_probs": [-0.5] * n}
    async with small_run(
        small_config(tmp_path, "trainer.rollout_samples=2"), step=lambda task, index: ids
    ) as run:
        await run.train()
    assert [r["step"] for r in rows(tmp_path)] == [4, 4]
    assert [r["step"] for r in rows(tmp_path, "rollouts.old.jsonl")] == [3, 3]
    assert " characters …\n" in rows(tmp_path)[0]["response"]


async def test_all_is_whole_and_for_ever_with_what_the_reward_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's `rollout_data_dir`."""
    monkeypatch.setattr(samples, "MAX_CHARS", 20)
    monkeypatch.setattr(samples, "MAX_BYTES", 500)
    written = lines_alone(tmp_path, None)
    ids = np.array([5] * 40, np.int32)
    extra = {"accuracy": 1.0, "detailed_feedback": "y" * 60}
    step = Step(prompt_ids=ids, response_ids=ids, trajectory_uid="t", prompt_uid="p", reward=1.0)
    trajectory = Trajectory("t", "p", (step,), metadata={"reward_extra_info": extra})
    group = Group("p", (trajectory,), metadata={"task": {"answer": "x" * 60}})
    for n in range(1, 11):
        written.write(n, [group])
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [*range(1, 11)]
    assert not (tmp_path / "rollouts.old.jsonl").exists()
    assert all(row["reward_extra_info"] == extra for row in found)
    assert {row["answer"] for row in found} == {"x" * 60}
    assert all(" characters …" not in row["prompt"] + row["response"] for row in found)


@pytest.mark.parametrize("answer", ["x" * 60, {"inputs": ["y" * 60]}])
def test_an_answer_of_many_tests_is_cut_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(samples, "MAX_CHARS", 20)
    written = lines_alone(tmp_path, 1)
    ids = np.array([5], np.int32)
    step = Step(prompt_ids=ids, response_ids=ids, trajectory_uid="t", prompt_uid="p", reward=1.0)
    group = Group("p", (Trajectory("t", "p", (step,)),), metadata={"task": {"answer": answer}})
    written.write(1, [group])
    assert " characters …\n" in rows(tmp_path)[0]["answer"]


async def test_a_full_disk_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rollouts.jsonl").mkdir()
    async with small_run(small_config(tmp_path, "trainer.rollout_samples=1")) as run:
        assert len(await run.train(1)) == 1
    assert "the rollouts of optimizer step 1 are not written" in caplog.text


# --- traces ---------------------------------------------------------------------------------------


class AddingBackend(RecordingBackend):
    def train_step(self, *args: Any) -> dict[str, float]:
        torch.ones(8) @ torch.ones(8, 8)
        return super().train_step(*args)


async def test_named_steps_leave_a_trace(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.profile_steps=[2]")
    async with small_run(config, backend=AddingBackend()) as run:
        await run.train()
    traces = sorted((tmp_path / "profile").iterdir())
    assert [t.name for t in traces] == ["prepare_2.json.gz", "step_2.json.gz"]
    events = json.loads(gzip.decompress(traces[1].read_bytes()))["traceEvents"]
    assert "aten::matmul" in {e["name"] for e in events}


def test_a_trace_of_ranks_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend.ranks is 2: the trainer's process"):
        small_config(tmp_path, "trainer.profile_steps=[2]", "backend.ranks=2")


# --- what is left out -----------------------------------------------------------------------------


async def test_a_run_may_begin_without_an_evaluation(tmp_path: Path) -> None:
    keys = ("validation.before_train=false", "validation.every=2", "trainer.total_steps=4")
    async with small_run(small_config(tmp_path, *keys)) as run:
        summary = await whole_run(run)
    assert [e["step"] for e in summary["evals"]] == [2, 4]
    assert summary["eval_before"] is None
    assert summary["eval_after"] == 0.5


@pytest.mark.parametrize("mode", ["blocking", "concurrent"])
async def test_a_run_whose_data_ends_with_an_evaluated_step_is_not_evaluated_twice(
    tmp_path: Path, mode: str
) -> None:
    keys = ("validation.every=2", f"validation.mode={mode}", "trainer.total_steps=null")
    async with small_run(small_config(tmp_path, *keys, train=8)) as run:
        summary = await whole_run(run)
    assert summary["optimizer_steps"] == 4
    assert [e["step"] for e in summary["evals"]] == [0, 2, 4]


async def test_a_run_may_only_evaluate_what_was_trained_before(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path)) as run:
        await whole_run(run)
    only = small_config(tmp_path, "validation.only=true", "validation.n=4")
    async with small_run(only, pool=run.pool) as again:
        summary = await whole_run(again)
        assert again.rollouts.begun_tasks == []
        assert again.backend.steps == []
        assert (await again.pool.get_statistics(VAL))["groups"]["acked"] == 9
    assert [e["step"] for e in summary["evals"]] == [0, 4], "the last one is of no checkpoint"
    assert summary["evals"][-1]["rollouts"] == 12
    assert summary["eval_after"] == 1.5
    assert summary["optimizer_steps"] == 4


@pytest.mark.parametrize("mode", ["async", "sync", "one_step_off"])
async def test_rollouts_alone_are_recorded_and_train_another_run(tmp_path: Path, mode: str) -> None:
    """slime's `--debug-rollout-only`, then its `--debug-train-only`."""
    recorded = tmp_path / "batches"
    config = small_config(
        tmp_path,
        "trainer.debug_rollout_only=true",
        "trainer.rollout_samples=2",
        f"trainer.save_debug_rollout_data={recorded}",
        f"async_training.mode={mode}",
    )
    async with small_run(config) as run:
        summary = await whole_run(run)
        assert run.backend.updates == run.backend.scored == 0
        assert (await run.pool.get_statistics(TRAIN))["groups"]["acked"] == 8
        assert run.engine.version == 0
        assert run.trainer.checkpoints.steps() == []
    assert (summary["optimizer_steps"], summary["evals"]) == (4, [])
    assert [r["step"] for r in rows(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert rows(tmp_path)[0]["advantage"] is None
    backend = RecordingBackend()
    updater = Updater(AlgorithmConfig(), AsyncTrainingConfig(), backend)
    assert len(list(replay(updater, recordings(str(recorded)), 1))) == 4
    assert backend.updates == 4


async def test_rollouts_alone_of_a_run_with_a_checkpoint_are_refused(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path)) as run:
        await run.train()
    only = small_config(tmp_path, "trainer.debug_rollout_only=true", "trainer.total_steps=8")
    async with small_run(only, pool=run.pool) as again:
        with pytest.raises(ConfigError, match=r"has a checkpoint: .* set another run\.name"):
            await whole_run(again)
        assert again.rollouts.begun_tasks == []


async def test_rollouts_alone_that_all_lack_a_score_leave_no_checkpoint(tmp_path: Path) -> None:
    """A later run would go on from it, with weights that nothing has trained."""
    keys = ("trainer.debug_rollout_only=true", "trainer.total_steps=null")
    config = small_config(tmp_path, *keys, train=4)
    async with small_run(
        config, reward=lambda task, i: 1.0 if task["answer"] < "2" else None
    ) as run:
        assert len(await run.train()) == 1
    assert not run.trainer.checkpoints.steps()
