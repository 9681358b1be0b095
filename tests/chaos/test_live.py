"""The live journey in two minutes; and that the bench would notice what it looks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chaos.live import _compare, run

BEGAN, ENDED = 1000.0, 1100.0


def row(at: float, score: float, version: int = 0) -> dict[str, Any]:
    return {"at": BEGAN + at, "score": score, "version": version, "seconds": 0.1}


@pytest.mark.long
@pytest.mark.e2e
def test_a_services_traffic_trains_its_model_though_the_trainer_is_killed() -> None:
    result = asyncio.run(run(minutes=2, seed=1))
    broken = {name: check for name, check in result.checks.items() if not check.holds}
    assert not broken, result.figures
    assert result.figures["optimizer_steps_at_the_kill"] > 0


def test_the_score_is_that_of_the_first_and_of_the_last_part() -> None:
    rows = [row(1, 0.0), row(2, 1.0), row(50, 1.0), row(95, 1.0, version=3)]
    result = _compare(rows, BEGAN, ENDED, at_the_kill=1)
    assert (result.figures["score_before"], result.figures["score_after"]) == (0.5, 1.0)
    assert all(check.holds for check in result.checks.values())


def test_a_call_that_failed_a_score_that_fell_and_weights_that_stood_still_are_noticed() -> None:
    rows = [row(1, 1.0), {"at": BEGAN + 50, "failed": "timeout"}, row(95, 0.0, version=3)]
    result = _compare(rows, BEGAN, ENDED, at_the_kill=3)
    assert {name: check.value for name, check in result.checks.items()} == {
        "calls_failed": 1,
        "score_gained": -1.0,
        "versions_served_after_the_kill": 0,
    }
    assert not any(check.holds for check in result.checks.values())
