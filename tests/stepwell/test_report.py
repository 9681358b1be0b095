"""What a run leaves for people."""

import json
from pathlib import Path

from stepwell.report import plot_reward, write_summary


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    records = [
        {"step": i, "reward/mean": i / 10, "tool_use": 0.5, "staleness/mean": 1.0}
        for i in range(10)
    ]
    evals = [{"step": 0, "score": 0.3, "tool_use": 0.4}, {"step": 9, "score": 0.9, "tool_use": 1.0}]
    path = plot_reward(tmp_path, "demo", records, evals)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_ended_before_its_first_step_has_a_plot_too(tmp_path: Path) -> None:
    assert plot_reward(tmp_path, "demo", [], []).is_file()


def test_the_summary_is_json(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"eval_after": 0.9, "log_prob_gap_max": None})
    assert json.loads(path.read_text()) == {"eval_after": 0.9, "log_prob_gap_max": None}
