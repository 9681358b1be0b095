"""Scoring of the built-in rollout generator: a call that never ends is ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepwell.gateway.errors import RequestError
from stepwell.gateway.reward import RewardError
from stepwell.gateway.slime_buffer import scoring
from stepwell.gateway.slime_buffer.scoring import Scoring

NEVER_ENDS = "9 ** 9 ** 9 ** 9"


def fields(said: str, truth: Any = 4) -> dict[str, Any]:
    known = {"data_source": "math", "extra_info": {}}
    return {**known, "solution_str": said, "ground_truth": truth}


async def test_a_call_that_never_ends_is_ended_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
):
    with Scoring("tests.gateway.scripted_reward:symbolic") as scored:
        assert await scored.score(fields("2 + 2")) == 1.0
        monkeypatch.setattr(scoring, "SCORE_S", 0.1)
        with pytest.raises(RewardError, match=r"gave no reward within 0\.1 s"):
            await scored.score(fields(NEVER_ENDS))
        monkeypatch.undo()
        stuck = asyncio.create_task(scored.score(fields(NEVER_ENDS)))
        found = await asyncio.gather(*(scored.score(fields("5")) for _ in range(3)))
        assert found == [0.0] * 3
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck


async def test_an_error_of_the_function_is_raised_where_it_was_called():
    with Scoring("tests.gateway.scripted_reward:symbolic") as scored:
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            await scored.score(fields("1 / 0"))
        with pytest.raises(RequestError, match="does not fit"):
            await scored.score({"solution_str": "4"})
        assert await scored.score(fields("4")) == 1.0


async def test_a_function_that_is_not_there_is_an_error_before_any_call():
    with pytest.raises(ImportError):
        Scoring("tests.gateway.scripted_reward:absent")
