"""The console: a line per step, and a summary with a sparkline of rewards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.datapool.log_files import logging_to
from stepwell.track.console import Display, all_safe, sparkline
from stepwell.trainer.validation import Evaluation

RECORD = {
    "step": 3,
    "reward/mean": 0.5,
    "tool_use": 0.25,
    "groups/no_signal": 0.375,
    "staleness/mean": 1.0,
    "staleness/max": 2.0,
    "off_policy_share": 0.5,
    "loss": -0.01,
    "pool/ready": 4,
    "pool/open": 2,
    "pool/leased": 1,
    "tokens_per_s": 1234.0,
    "time/step_s": 1.5,
    "time/wait_s": 0.25,
    "policy_version": 7,
}

SUMMARY = {
    "eval_before": 0.34,
    "eval_after": 0.95,
    "tool_use_before": 0.4,
    "tool_use_after": 0.99,
    "optimizer_steps": 5,
    "wall_s": 60.0,
    "rewards": [0.25, 1.0],
    "trajectories_trained": 320,
    "steps_per_trajectory_mean": None,
    "off_policy_share": None,
    "peak_memory_gb": 2.0,
}


def test_a_sparkline_spans_its_range_and_keeps_the_last_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0], width=2) == "▁█"


def test_values_outside_the_unit_interval_widen_the_range() -> None:
    assert sparkline([-1.0, 0.0, 1.0]) == "▁▅█"
    assert sparkline([0.0, 5.0, 10.0]) == "▁▅█"
    assert sparkline([-1.0, 0.0], width=1) == "▅"


def test_each_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Display("demo", "plain").step(RECORD)
    line = capsys.readouterr().out.replace("\n", " ")
    for part in ("step    3", "reward 0.500", "tool use 0.25", "lag 1.00", "ready 4", "v7"):
        assert part in line
    assert "no signal 38%" in line
    assert line.count("lag") == 1


def test_a_step_on_conversations_has_their_loss(capsys: pytest.CaptureFixture[str]) -> None:
    of_rollouts = ("reward/mean", "groups/no_signal", "staleness/mean")
    alone = {k: v for k, v in RECORD.items() if k not in of_rollouts}
    Display("demo", "plain").step(alone | {"tool_use": None, "loss": 0.03, "sft/loss": 0.03})
    Display("demo", "plain").step(RECORD | {"sft/loss": 0.04})
    first, second = capsys.readouterr().out.splitlines()
    assert "step    3  loss +0.0300  ready 4" in first
    assert "lag 1.00  loss -0.0100  sft loss 0.0400" in second


def test_without_tools_nothing_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("demo", "plain")
    display.step(RECORD | {"tool_use": None})
    display.evaluations([Evaluation(3, 0.5, None, 8, 0)])
    display.summary(SUMMARY | {"tool_use_before": None, "tool_use_after": None}, Path("runs"))
    shown = capsys.readouterr().out
    assert "evaluation score" in shown
    assert "tool" not in shown


def test_a_warning_is_shown_once_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path / "trainer.log"):
        Display("demo", "plain").step(RECORD | {"warning": "little to learn from"})
    shown = capsys.readouterr()
    assert shown.out.count("warning: little to learn from") == 1
    assert shown.err == ""
    assert "warning: little to learn from" in (tmp_path / "trainer.log").read_text()


def test_the_summary_shows_before_and_after_and_where_the_files_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Display("demo", "plain").summary(SUMMARY, Path("runs/demo"))
    shown = capsys.readouterr().out
    for part in ("0.34", "0.95", "0.99", "summary.json", "reward.png"):
        assert part in shown


def test_a_step_of_the_critics_warm_up_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    alone = {k: v for k, v in RECORD.items() if k != "loss"} | {"critic/loss": 0.25}
    Display("run", "plain").step(alone)
    assert "warm-up of the critic, loss 0.2500" in capsys.readouterr().out


def test_a_quiet_console_has_evaluations_and_the_summary_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display("demo", "quiet")
    display.status("starting")
    display.step(RECORD | {"warning": "little to learn from"})
    assert capsys.readouterr().out == ""
    display.evaluations([Evaluation(3, 0.5, None, 8, 0)])
    assert capsys.readouterr().out == (
        "[demo] evaluation at step 3: score 0.500, 8 rollouts of version 0\n"
    )


def test_of_overlapping_windows_of_one_look_the_newest_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    look = [Evaluation(10, score, None, 8, 0, version=n) for n, score in ((4, 0.25), (5, 0.5))]
    Display("demo", "plain").evaluations([Evaluation(9, 0.125, None, 8, 0), *look])
    said = capsys.readouterr().out
    assert said.count("evaluation at step") == 2
    assert "step 9: score 0.125" in said
    assert "step 10: score 0.500, 8 rollouts of version 5" in said


def test_rollouts_that_failed_stand_at_the_end_of_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display("demo", "plain")
    display.step(RECORD | {"rollouts/failed": 3})
    display.step(RECORD | {"rollouts/failed": 0})
    some, none = capsys.readouterr().out.splitlines()
    assert some.endswith("v7  (3 rollouts failed)")
    assert none.endswith("v7")


def test_a_batch_of_which_nothing_was_trained_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Display("demo", "plain").step({k: v for k, v in RECORD.items() if k != "loss"})
    assert "no signal 38%  not trained" in capsys.readouterr().out


def test_text_of_agents_moves_no_cursor_turns_no_line_around_and_begins_none() -> None:
    row = {"said": ["\x1b[2J", "a\nb\u2028c", ("\u202eabc",)], "n\x07": 3, "none": None}
    assert all_safe(row) == {
        "said": [r"\x1b[2J", r"a\nb\u2028c", [r"\u202eabc"]],
        r"n\x07": 3,
        "none": None,
    }


def test_a_run_goes_on_when_its_terminal_was_closed(tmp_path: Path) -> None:
    """It is so after `stepwell train &`, `disown` and `exit`."""
    script = """
from stepwell.track.console import Display
from stepwell.track.output import print_line
print_line("starting")
display = Display("mine", "plain")
for step in (1, 2):
    display.status(f"step {step}")
print_line("where to call")
open("done", "w").close()
"""
    ours, theirs = os.openpty()
    try:
        os.close(ours)
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, cwd=tmp_path, text=True, check=False
        )
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "done").exists()
