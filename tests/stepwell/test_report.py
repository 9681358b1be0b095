"""The plot and the summary that a run leaves for people."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest

from stepwell.track.collapse import find_collapse
from stepwell.track.console import Display
from stepwell.track.summary import plot_reward, read_summary, summarise, write_summary
from stepwell.trainer.progress import Progress
from stepwell.trainer.validation import Evaluation


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


def test_a_batch_of_several_epochs_is_counted_once_and_what_is_not_known_is_no_zero() -> None:
    def record(step: int, **known: float) -> dict[str, float]:
        return {"step": step, "trajectories": 8, "pool/dropped": step, "time/step_s": 2.0} | known

    records = [
        record(1, **{"reward/mean": 0.25, "tokens_per_s": 100.0, "wait/trainer_starved": 0.5}),
        record(2, ppo_epoch=1, tokens_per_s=300.0),
        record(3, log_prob_gap=0.5),
    ]
    summary = summarise("demo", records, Progress(updates=3), 3 << 30)
    assert (summary["trajectories_trained"], summary["groups_dropped"]) == (16, 3)
    assert (summary["rewards"], summary["tokens_per_s_mean"]) == ([0.25], 200.0)
    assert (summary["log_prob_gap_max"], summary["staleness_mean"]) == (0.5, None)
    assert summary["trainer_starved"] == pytest.approx(0.5 / 3)
    assert (summary["eval_before"], summary["eval_after"]) == (None, None)


@pytest.mark.parametrize("key", ["reward/mean", "sft/loss", "staleness/mean", "tool_use"])
def test_a_figure_that_was_no_number_at_one_step_is_left_out_of_the_report(
    tmp_path: Path, key: str
) -> None:
    """One update that was not finite, of a run of hours: metrics.jsonl has null there."""
    known = {"trajectories": 8, "pool/dropped": 0, "time/step_s": 2.0}
    records = [{"step": i, **known, key: None if i in (1, 6) else 0.5} for i in range(1, 12)]
    summary = summarise("demo", records, Progress(updates=11), 0)
    assert {len(summary["rewards"]), len(summary["sft_loss"])} <= {0, 9}
    assert plot_reward(tmp_path, "demo", records, []).is_file()
    assert find_collapse(records) is None
    Display("demo", "plain").summary(summary, tmp_path)


def test_a_score_before_is_one_of_the_untrained_weights_alone() -> None:
    resumed = Progress(evaluations=[Evaluation(20, 0.5, None, 8, 1, weights_step=20)])
    summary = summarise("demo", [], resumed, 0)
    assert (summary["eval_before"], summary["eval_after"]) == (None, 0.5)
    assert summary["eval_rollouts_failed"] == 1
    fresh = Progress(evaluations=[Evaluation(0, 0.25, None, 8, 0), *resumed.evaluations])
    summary = summarise("demo", [], fresh, 0)
    assert (summary["eval_before"], summary["eval_after"]) == (0.25, 0.5)


def test_the_summary_is_json(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"eval_after": 0.9, "log_prob_gap_max": None})
    summary = {"eval_after": 0.9, "log_prob_gap_max": None}
    assert read_summary(tmp_path) == summary
    assert json.loads(path.read_text()) == summary | {"digest": ANY}
