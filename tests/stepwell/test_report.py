"""The plot and the summary that a run leaves for people."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from stepwell.track.summary import plot_reward, read_summary, summarise, write_summary
from stepwell.trainer.progress import Progress


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    records = [
        {"step": i, "reward/mean": i / 10, "tool_use": 0.5, "staleness/mean": 1.0}
        for i in range(10)
    ]
    evals = [{"step": 0, "score": 0.3, "tool_use": 0.4}, {"step": 9, "score": 0.9, "tool_use": 1.0}]
    path = plot_reward(tmp_path, "demo", records, evals)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scale", [1.0, -1.0, 40.0])
def test_rewards_of_any_size_are_in_the_picture(tmp_path: Path, scale: float) -> None:
    def picture(*rewards: float) -> bytes:
        records = [
            {"step": i, "reward/mean": scale * r, "tool_use": None, "staleness/mean": 0.0}
            for i, r in enumerate(rewards)
        ]
        return plot_reward(tmp_path, "demo", records, []).read_bytes()

    assert picture(0.5, 0.7, 0.9) != picture(0.5, 0.9, 0.7)


def test_a_run_that_ended_before_its_first_step_has_a_plot_too(tmp_path: Path) -> None:
    assert plot_reward(tmp_path, "demo", [], []).is_file()


def test_an_evaluation_alone_has_a_summary_without_trained_trajectories() -> None:
    summary = summarise("demo", [{"step": 120, "val/score": 0.5}], Progress(updates=120), 0)
    assert (summary["optimizer_steps"], summary["trajectories_trained"]) == (120, 0)


def test_the_summary_is_json(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"eval_after": 0.9, "log_prob_gap_max": None})
    summary = {"eval_after": 0.9, "log_prob_gap_max": None}
    assert read_summary(tmp_path) == summary
    assert json.loads(path.read_text()) == summary | {"digest": ANY}
