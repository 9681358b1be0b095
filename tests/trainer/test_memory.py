"""Memory changes hands: who is asked what, in which order, and that it always comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import (
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.backends.weights import StoreLock
from stepwell.trainer.publish.memory import EngineMemory
from tests.engines import FakeEngine

LENT = ["pause abort", "release"]
BACK = ["resume", "continue"]


@pytest.fixture
def lock(tmp_path: Path) -> StoreLock:
    return StoreLock(tmp_path)


def memory(lock: StoreLock, *engines: FakeEngine, lends: bool = True) -> EngineMemory:
    return EngineMemory(cast("list[EngineClient]", list(engines)), lock, lends=lends)


async def test_engines_are_paused_before_they_release_and_whole_before_they_go_on(
    lock: StoreLock,
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    lent = memory(lock, *engines)
    await lent.lend()
    assert [e.calls for e in engines] == [LENT, LENT]
    await lent.lend()  # it is lent already
    await lent.take_back()
    await lent.take_back()
    assert [e.calls for e in engines] == [LENT + BACK, LENT + BACK]


async def test_engines_that_lend_nothing_are_asked_nothing(lock: StoreLock) -> None:
    engine = FakeEngine()
    lent = memory(lock, engine, lends=False)
    await lent.lend()
    await lent.take_back()
    async with lock.held():
        assert engine.calls == []


async def test_a_publication_waits_until_the_memory_is_back_and_a_lend_for_the_publication(
    lock: StoreLock,
) -> None:
    engine = FakeEngine()
    lent = memory(lock, engine)
    order: list[str] = []
    await lent.lend()

    async def publish() -> None:
        async with lock.held():
            order.append(f"published after {engine.calls[-1]}")
            await asyncio.sleep(0.05)
            order.append("commit")

    publishing = asyncio.create_task(publish())
    await asyncio.sleep(0.05)
    assert order == []
    await lent.take_back()
    await asyncio.sleep(0)
    await lent.lend()
    order.append("lent")
    await publishing
    assert order == ["published after continue", "commit", "lent"]
    await lent.take_back()


async def test_an_engine_that_is_down_is_left_to_its_supervisor(lock: StoreLock) -> None:
    dead, alive = FakeEngine(pause=EngineUnavailableError("nobody answers")), FakeEngine()
    lent = memory(lock, dead, alive)
    await lent.lend()
    await lent.take_back()
    assert dead.calls == ["pause abort"]
    assert alive.calls == LENT + BACK
    dies_meanwhile = FakeEngine(resume=EngineUnavailableError("gone"))
    lent = memory(lock, dies_meanwhile, alive)
    await lent.lend()
    await lent.take_back()
    assert alive.calls == 2 * (LENT + BACK)
    async with asyncio.timeout(1), lock.held():
        pass


@pytest.mark.parametrize("error", [EngineTimeoutError("no answer"), EngineInternalError("failed")])
@pytest.mark.parametrize("point", ["pause", "release"])
async def test_an_engine_that_fails_at_a_lend_is_not_left_paused(
    lock: StoreLock, point: str, error: Exception
) -> None:
    """It lives, so no supervisor starts it anew; a publication without pauses continues nobody."""
    failing, other = FakeEngine(**{point: error}), FakeEngine()
    lent = memory(lock, failing, other)
    await lent.lend()
    back = BACK if point == "release" else ["continue"]
    assert failing.calls == [*LENT[: 1 + (point == "release")], *back]
    await lent.take_back()
    assert other.calls == LENT + BACK
    async with asyncio.timeout(1), lock.held():
        pass


@pytest.mark.parametrize("error", [EngineTimeoutError("no answer"), EngineInternalError("failed")])
async def test_an_engine_that_fails_to_take_its_memory_back_is_not_left_paused(
    lock: StoreLock, error: Exception
) -> None:
    """It may have taken it, and is asked for no token that a supervisor could miss."""
    failing = FakeEngine(resume=error)
    lent = memory(lock, failing)
    await lent.lend()
    await lent.take_back()
    assert failing.calls == LENT + BACK
    await lent.lend()
    await lent.take_back_weights()
    await lent.take_back()
    rest = ["resume weights", "resume kv_cache cuda_graph", "continue"]
    assert failing.calls == LENT + BACK + LENT + rest
    async with asyncio.timeout(1), lock.held():
        pass


async def test_a_lend_given_up_continues_an_engine_that_does_not_answer_for_its_memory(
    lock: StoreLock,
) -> None:
    class Slow(FakeEngine):
        async def request(self, *words: str) -> None:
            await super().request(*words)
            if words[0] == "release":
                reached.set()
                await asyncio.Event().wait()

    reached = asyncio.Event()
    slow = Slow(resume=EngineTimeoutError("no answer"))
    lending = asyncio.create_task(memory(lock, slow).lend())
    await reached.wait()
    lending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lending
    assert slow.calls == LENT + BACK


async def test_an_engine_that_came_back_meanwhile_has_nothing_to_take_back(lock: StoreLock) -> None:
    new = FakeEngine(resume=EngineRequestError("has not been released"))
    other = FakeEngine()
    lent = memory(lock, new, other)
    await lent.lend()
    await lent.take_back()
    assert new.calls == [*LENT, "resume"]  # its supervisor lets it go on
    assert other.calls == LENT + BACK


@pytest.mark.parametrize("point", ["pause abort", "release"])
async def test_a_lend_that_is_given_up_leaves_every_engine_whole_and_generating(
    lock: StoreLock, point: str
) -> None:
    """The engine may have carried out what it has not answered."""

    class Slow(FakeEngine):
        async def request(self, *words: str) -> None:
            await super().request(*words)
            if " ".join(words) == point:
                reached.set()
                await asyncio.Event().wait()

    reached = asyncio.Event()
    slow = Slow()
    lent = memory(lock, slow, FakeEngine())
    lending = asyncio.create_task(lent.lend())
    await reached.wait()
    lending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lending
    back = BACK if point == "release" else ["continue"]
    assert slow.calls == [*LENT[: 1 + LENT.index(point)], *back]
    async with asyncio.timeout(1), lock.held():
        pass


async def test_a_refusal_is_an_error_and_leaves_every_engine_generating(lock: StoreLock) -> None:
    refuses = FakeEngine(release=EngineRequestError("not launched for it"))
    willing = FakeEngine()
    lent = memory(lock, refuses, willing)
    with pytest.raises(EngineRequestError, match="not launched for it"):
        await lent.lend()
    assert refuses.calls == [*LENT, "continue"]
    assert willing.calls == LENT + BACK
    async with asyncio.timeout(1), lock.held():
        pass


async def test_weights_come_back_before_a_publication_and_the_cache_when_an_engine_goes_on(
    lock: StoreLock,
) -> None:
    goes_on, stays_paused = FakeEngine(), FakeEngine()
    lent = memory(lock, goes_on, stays_paused)
    await lent.lend()
    await lent.take_back_weights()
    assert lent.has_weights
    assert goes_on.calls == stays_paused.calls == [*LENT, "resume weights"]
    await lent.complete(cast("EngineClient", goes_on))
    await lent.complete(cast("EngineClient", goes_on))  # once
    await lent.take_back(published=True)
    rest = "resume kv_cache cuda_graph"
    assert goes_on.calls == [*LENT, "resume weights", rest]  # the publication continues it
    assert stays_paused.calls == [*LENT, "resume weights", rest]  # and leaves this one paused
    async with asyncio.timeout(1), lock.held():
        pass
    assert not lent.is_lent
