"""The pace of an event loop and the short way to calls, over real sockets."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from stepwell.gateway.config import Tuning
from stepwell.gateway.limits import FIRST, MOST, Deadline, Deadlines, Pace

# -- pace ------------------------------------------------------------------------------------


async def test_hundreds_go_on_in_several_turns_and_in_their_order() -> None:
    pace = Pace(turn_s=0)  # every turn took too long
    went: list[int] = []

    async def go(i: int) -> None:
        await pace.keep()
        went.append(i)

    tasks = [asyncio.create_task(go(i)) for i in range(50)]
    counts = [0]
    while len(went) < 50:
        await asyncio.sleep(0)
        counts.append(len(went))
    assert went == list(range(50))
    passed = [after - before for before, after in pairwise(counts)]
    assert max(passed) <= FIRST
    assert passed[-1] == 1
    await asyncio.gather(*tasks)


async def test_nobody_waits_while_a_turn_is_short() -> None:
    pace = Pace(turn_s=60)
    tasks = [asyncio.create_task(pace.keep()) for _ in range(400)]
    await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


async def test_more_of_those_that_wait_go_on_together_while_turns_are_short() -> None:
    pace = Pace(turn_s=0.1)
    went: list[int] = []

    def hold_up() -> None:
        time.sleep(0.1)  # so long that all others wait

    async def go(i: int) -> None:
        await pace.keep()
        if i == 0:
            hold_up()
        went.append(i)

    tasks = [asyncio.create_task(go(i)) for i in range(400)]
    counts = [0]
    while len(went) < 400:
        await asyncio.sleep(0)
        counts.append(len(went))
    assert max(after - before for before, after in pairwise(counts)) == MOST
    await asyncio.gather(*tasks)


async def test_calls_under_way_go_before_new_ones() -> None:
    pace = Pace(turn_s=0)
    went: list[str] = []

    async def go(name: str) -> None:
        await (pace.enter() if name.startswith("new") else pace.keep())
        went.append(name)

    names = [*(f"new {i}" for i in range(5)), *(f"begun {i}" for i in range(3))]
    await asyncio.gather(*(go(name) for name in names))
    assert went == [names[0], *names[-3:], *names[1:-3]]


async def test_who_waits_and_leaves_holds_nobody_up() -> None:
    pace = Pace(turn_s=0)
    tasks = [asyncio.create_task(pace.keep()) for _ in range(FIRST + 2)]
    await asyncio.sleep(0)
    assert not tasks[-2].done()
    tasks[-2].cancel()
    await asyncio.wait_for(tasks[-1], 5)
    await asyncio.wait_for(pace.keep(), 5)


# -- deadlines -------------------------------------------------------------------------------


async def test_a_deadline_ends_its_block_alone() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()

    async def wait(seconds: float) -> str:
        try:
            with Deadline(deadlines, loop.time() + seconds):
                await asyncio.Event().wait()
        except TimeoutError:
            return f"{seconds}"
        return "?"

    later = asyncio.create_task(wait(60.0))
    assert await asyncio.gather(wait(0.03), wait(0.01), wait(-1.0)) == ["0.03", "0.01", "-1.0"]
    assert not later.done()
    later.cancel()
    with pytest.raises(asyncio.CancelledError):  # a cancellation of somebody else's is no time-out
        await later


async def test_a_block_that_ends_in_time_is_not_cancelled_later() -> None:
    deadlines, loop = Deadlines(), asyncio.get_running_loop()
    with Deadline(deadlines, loop.time() + 0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)

    async def moved() -> None:
        with Deadline(deadlines, loop.time() + 60.0) as deadline:
            loop.call_later(0.01, deadline.reschedule, loop.time())
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await moved()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


# -- paths and prompts -----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/a/v1/chat/completions", "/a//v1/chat/completions", "/v1/chat"])
async def test_other_paths_begin_no_call(world: Any, path: str) -> None:
    async with httpx.AsyncClient(base_url=world.url) as http:
        assert (await http.post(path, json={})).status_code in (404, 405)
        assert (await http.get("/v1/chat/completions")).status_code == 405
    assert world.stored() == []


async def test_rollouts_that_begin_together_render_their_prompt_once(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await worlds(tuning=Tuning(offload_chars=10))
    renderer = world.gateway.calls.prompts.renderer
    rendered: list[Any] = []
    whole = renderer.whole
    monkeypatch.setattr(renderer, "whole", lambda *a: (rendered.append(a), whole(*a))[1])
    body = {"messages": [{"role": "user", "content": "a long story " * 50}]}
    async with httpx.AsyncClient(base_url=world.url) as http:
        answers = await asyncio.gather(
            *(http.post(f"/t{i}/p1/v1/chat/completions", json=body) for i in range(8))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert len(rendered) == 1
    world.check_exact()
