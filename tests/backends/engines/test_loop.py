"""The generation thread: commands between steps, and an honest end when a step fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from stepwell.backends.engines.embedded.loop import EngineStoppedError, GenerationLoop
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.request import Request, SamplingParams
from stepwell.backends.engines.embedded.scheduler import Scheduler


@pytest.fixture
def loop(model_dirs: Any) -> GenerationLoop:
    runner = ModelRunner(str(model_dirs.base), max_running=2, n_retained=2)
    return GenerationLoop(Scheduler(runner, stop_strings=StopStrings(None)))


def request(n: int, done: asyncio.Event) -> Request:
    params = SamplingParams(max_new_tokens=n, ignore_eos=True)
    return Request(f"r{n}", [20, 30, 40], params, on_update=done.set)


async def test_a_request_is_generated_and_announced(loop: GenerationLoop) -> None:
    loop.start(asyncio.get_running_loop())
    done = asyncio.Event()
    mine = request(5, done)
    loop.scheduler.validate(mine)
    loop.submit(mine)
    await asyncio.wait_for(done.wait(), 20)
    assert mine.finish_reason == {"type": "length", "length": 5}
    assert await loop.call(lambda s: s.generated_tokens) == 5
    loop.stop()
    loop.stop()
    assert not loop.alive


async def test_stopping_aborts_what_is_in_flight(loop: GenerationLoop) -> None:
    loop.start(asyncio.get_running_loop())
    done = asyncio.Event()
    mine = request(500, done)
    loop.scheduler.validate(mine)
    loop.submit(mine)
    await asyncio.to_thread(loop.stop)
    await asyncio.wait_for(done.wait(), 20)
    assert mine.finish_reason is not None
    assert mine.finish_reason["type"] == "abort"
    with pytest.raises(EngineStoppedError):
        await loop.call(lambda s: s.paused)


async def test_a_failing_step_ends_the_loop_and_tells_everybody(
    loop: GenerationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, admit: bool = True) -> None:
        raise FloatingPointError("the model broke")

    monkeypatch.setattr(loop.scheduler, "step", fail)
    ended, done = asyncio.Event(), asyncio.Event()
    loop.start(asyncio.get_running_loop(), on_failure=ended.set)
    mine = request(5, done)
    loop.scheduler.validate(mine)
    loop.submit(mine)
    await asyncio.wait_for(done.wait(), 20)
    await asyncio.wait_for(ended.wait(), 20)
    assert mine.finish_reason is not None
    assert "the model broke" in mine.finish_reason["message"]
    assert isinstance(loop.failure, FloatingPointError)
    with pytest.raises(EngineStoppedError, match="the model broke"):
        loop.submit(request(6, done))


async def test_an_error_of_a_command_reaches_its_caller_and_the_loop_goes_on(
    loop: GenerationLoop,
) -> None:
    loop.start(asyncio.get_running_loop())
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda s: 1 // 0)
    assert loop.alive
    loop.stop()


@pytest.mark.parametrize("is_update", [False, True])
async def test_a_command_whose_caller_has_left_is_not_run_and_the_loop_goes_on(
    loop: GenerationLoop, is_update: bool
) -> None:
    loop.start(asyncio.get_running_loop())
    entered, leave, ran = threading.Event(), threading.Event(), []

    def long_step(scheduler: Scheduler) -> None:
        entered.set()
        leave.wait(10)

    step = asyncio.create_task(loop.call(long_step))
    await asyncio.to_thread(entered.wait, 10)
    left = asyncio.create_task(loop.call(lambda s: ran.append(s), is_update=is_update))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    leave.set()
    await step
    assert await loop.call(lambda s: 7, is_update=is_update) == 7
    assert loop.alive
    assert not ran
    loop.stop()


async def test_an_update_that_comes_during_the_step_that_fails_is_told(
    loop: GenerationLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def fail(*, admit: bool = True) -> None:
        entered.set()
        leave.wait(10)
        raise FloatingPointError("the model broke")

    monkeypatch.setattr(loop.scheduler, "step", fail)
    loop.start(asyncio.get_running_loop())
    mine = request(5, asyncio.Event())
    loop.scheduler.validate(mine)
    loop.submit(mine)
    await asyncio.to_thread(entered.wait, 10)
    update = asyncio.create_task(loop.call(lambda s: None, is_update=True))
    await asyncio.sleep(0)
    leave.set()
    with pytest.raises(EngineStoppedError, match="the model broke"):
        await asyncio.wait_for(update, 10)
