"""Figures survive a kill, and tell who waits for whom."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from stepwell.datapool.sealed import sealed
from stepwell.trainer.metrics import Idle, MetricsWriter, Phases, waits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_records_are_json_lines_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "tokens": 3})
        assert metrics.read() == [{"step": 1, "loss": None, "tokens": 3}]
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("digest")
    assert line == metrics.read()[0]


def test_a_name_that_a_policy_wrote_may_hold_half_a_character(tmp_path: Path) -> None:
    """A reward whose further keys are those of a JSON reply, such as `{"\\ud83d": 1}`."""
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"step": 1, "reward_extra/\ud83d": 1.0})
        metrics.evaluation(1, {"val/tool_metrics/\ud83d/n": 2.0})
    assert metrics.read() == [{"step": 1, "reward_extra/?": 1.0, "val/tool_metrics/?/n": 2.0}]


def test_a_step_that_is_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    for life in ((1, 2, 3), (2, 3, 4)):
        with MetricsWriter(tmp_path) as metrics:
            for step in life:
                metrics.write({"step": step, "life": life[0]})
    assert [(r["step"], r["life"]) for r in metrics.read()] == [(1, 1), (2, 2), (3, 2), (4, 2)]


def test_a_line_that_was_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(sealed(b'{"step":1}') + b'{"step":2,"lo')
    with MetricsWriter(tmp_path) as metrics:
        metrics.write({"step": 2})
        assert metrics.read() == [{"step": 1}, {"step": 2}]


def test_an_evaluation_is_in_the_record_of_its_own_step(tmp_path: Path) -> None:
    told: list[tuple[int, dict[str, object]]] = []

    class Told:
        def write(self, step: int, record: Mapping[str, object]) -> None:
            told.append((step, dict(record)))

        def table(self, step: int, *_: object) -> None: ...

        def close(self, failed: bool) -> None: ...

    with MetricsWriter(tmp_path, [Told()]) as metrics:
        metrics.evaluation(0, {"val/score": 0.1})
        for step in (1, 2):
            metrics.write({"step": step, "loss": step})
        metrics.evaluation(1, {"val/score": 0.2, "val/pass@1": math.nan})  # ended during step 2
    with MetricsWriter(tmp_path, [Told()]) as metrics:  # a later life: the evaluation at the end
        metrics.evaluation(2, {"val/score": 0.3})
        assert metrics.read() == [
            {"step": 1, "loss": 1, "val/score": 0.2, "val/pass@1": None},
            {"step": 2, "loss": 2, "val/score": 0.3},
        ]
    last = {
        r["step"]: r | {"digest": ""} for r in map(json.loads, (tmp_path / "metrics.jsonl").open())
    }
    assert last[0] == {"step": 0, "val/score": 0.1, "digest": ""}
    assert [last[1], last[2]] == [r | {"digest": ""} for r in metrics.read()]
    assert [(step, sorted(r)) for step, r in told][-2:] == [
        (1, ["val/pass@1", "val/score"]),
        (2, ["val/score"]),
    ]


def test_phases_are_timed_and_the_wait_is_a_share_of_the_wall_time() -> None:
    clock = Clock()
    phases = Phases(clock)
    for name, seconds in (("wait", 3.0), ("train", 5.0), ("wait", 1.0)):
        with phases(name):
            clock.now += seconds
    taken = phases.take(10.0)
    assert taken == {
        "time/wait_s": 4.0,
        "time/train_s": 5.0,
        "time/step_s": 10.0,
        "wait/trainer_starved": 0.4,
    }
    assert phases.take(1.0)["wait/trainer_starved"] == 0.0


def test_a_phase_that_fails_is_timed_too() -> None:
    clock = Clock()
    phases = Phases(clock)

    def fails() -> None:
        with phases("train"):
            clock.now += 2.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert phases.take(4.0)["time/train_s"] == 2.0


def test_generation_is_saturated_by_what_it_could_run_and_may_not() -> None:
    clock = Clock()
    idle = Idle(capacity=16, now=clock)
    idle.running(16)
    with idle.blocked():
        clock.now += 2.0  # full and all of it running: nothing stands idle
        idle.running(4)
        clock.now += 4.0  # 12 of 16 idle
    idle.running(0)
    clock.now += 2.0  # admission is open: as fast as it can be
    assert idle.take() == pytest.approx((12 / 16) * 4 / 8)
    with idle.blocked():
        clock.now += 1.0
        assert idle.take() == 1.0  # in the middle of a wait
        clock.now += 1.0
        assert idle.take() == 1.0


def test_the_summary_weighs_the_steps_by_their_time() -> None:
    records = [
        {"time/step_s": 1.0, "wait/trainer_starved": 1.0, "wait/generation_saturated": 0.0},
        {"time/step_s": 3.0, "wait/trainer_starved": 0.0, "wait/generation_saturated": 0.5},
        {"time/step_s": 0.0},
    ]
    assert waits(records) == {"trainer_starved": 0.25, "generation_saturated": 0.375}
    assert waits([]) == {"trainer_starved": 0.0, "generation_saturated": 0.0}
