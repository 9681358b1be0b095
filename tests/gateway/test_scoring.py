"""`gateway.reward_fn`: a call that never ends is ended, and holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import aiohttp
import pytest

from stepwell.datapool.dotted import resolve
from stepwell.gateway import scoring
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reward import RewardError
from stepwell.gateway.scoring import Scoring

DEEPSCALER = "stepwell.trainer.rewards.maths:deepscaler"
NEVER_ENDS = "9^{9^{9^9}}"


def fields(boxed: str, truth: str | None = "4") -> dict[str, Any]:
    said = f"hm</think>It is \\boxed{{{boxed}}}."
    known = {"data_source": "math", "extra_info": {}}
    return {**known, "solution_str": said, "ground_truth": truth}


def deepscaler() -> Scoring:
    return Scoring(DEEPSCALER, resolve(DEEPSCALER))


async def test_a_call_that_never_ends_is_ended_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
):
    with closing(deepscaler()) as scored:
        assert await scored.score(fields("2 + 2")) == {"reward": 1.0, "details": {}}
        monkeypatch.setattr(scoring, "SCORE_S", 0.1)
        with pytest.raises(RewardError, match=r"gave no reward within 0\.1 s"):
            await scored.score(fields(NEVER_ENDS))
        monkeypatch.undo()
        stuck, other = (asyncio.create_task(scored.score(fields(NEVER_ENDS))) for _ in range(2))
        found = await asyncio.gather(*(scored.score(fields("5")) for _ in range(2)))
        assert [answer["reward"] for answer in found] == [0.0, 0.0]
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
    with pytest.raises(RewardError, match="died"):
        await other


async def test_a_call_that_never_ends_takes_no_thread_from_others(
    monkeypatch: pytest.MonkeyPatch,
):
    """On two cores six of them stopped the dashboard and the rollout buffer for a minute."""
    monkeypatch.setattr(scoring, "SCORE_S", 2.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with closing(deepscaler()) as scored:
        stuck = asyncio.create_task(scored.score(fields(NEVER_ENDS)))
        await asyncio.sleep(0)  # it waits for its process now
        assert await asyncio.to_thread(lambda: 1) == 1
        assert not stuck.done()
    with pytest.raises(RewardError):
        await stuck


async def test_an_error_of_the_function_is_raised_where_it_was_called():
    with closing(deepscaler()) as scored:
        with pytest.raises(RewardError, match="set the data section's label_key"):
            await scored.score(fields("4", truth=None))
        with pytest.raises(RequestError, match="does not fit"):
            await scored.score({"solution_str": "4"})
        assert (await scored.score(fields("4")))["reward"] == 1.0


async def test_a_gateway_answers_while_a_reward_is_computed_for_ever(worlds: Callable[..., Any]):
    world = await worlds(reward_fn=DEEPSCALER)
    async with aiohttp.ClientSession() as http:

        async def reward(boxed: str) -> Any:
            url = f"{world.url}/compute_reward"
            async with http.post(url, json=fields(boxed)) as answer:
                return await answer.json()

        stuck = asyncio.create_task(reward(NEVER_ENDS))
        for _ in range(2):
            assert await reward("4") == {"reward": 1.0, "details": {}}
        async with http.get(f"{world.url}/health") as answer:
            assert answer.status == 200
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
