"""What a consumer is told of a lease holds: it is durable, or its groups are ready for the next."""

from __future__ import annotations

import asyncio
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool import ChannelConfig, DataPoolActor, PoolConfig, Step
from stepwell.datapool.errors import JournalFullError

MakeStep = Callable[..., Step]


@contextmanager
def full_disk(file_bytes: int = 0) -> Iterator[None]:
    """No file of this process can grow beyond `file_bytes`, or be written beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def counts(actor: DataPoolActor, *names: str) -> list[int]:
    groups = (await actor.get_statistics("train"))["groups"]
    return [groups[name] for name in names]


@pytest.mark.parametrize("iteration", range(1, 9))
async def test_a_lease_given_at_the_end_of_a_wait_survives_a_kill(
    tmp_path: Path, make_step: MakeStep, iteration: int
) -> None:
    """The wait ends while a commit is under way, and a group becomes ready before that is over."""
    actor = DataPoolActor(None, tmp_path / "live")
    answers: list[Any] = []

    async def consume() -> None:
        answer = await actor.lease_batch(timeout_s=0.005)
        answers.append(answer)
        # A kill at this moment leaves these files.
        shutil.copytree(tmp_path / "live", tmp_path / "killed")

    consumer = asyncio.create_task(consume())
    await settle()
    time.sleep(0.006)  # noqa: ASYNC251 - so that its time is over when the loop goes on
    others = []
    for turn in range(12):
        if turn == iteration:
            others.append(asyncio.create_task(actor.submit_step(make_step("t", is_last=True))))
        # Others keep the journal busy in each iteration of the loop.
        others.append(asyncio.create_task(actor.open_trajectory(f"x{turn}", f"q{turn}")))
        await asyncio.sleep(0)
    await consumer
    await asyncio.gather(*others)
    if answers != ["nothing_yet"]:
        again = DataPoolActor(None, tmp_path / "killed")
        await again.ack(answers[0].lease_id)
    ended = await actor.lease_batch()
    assert (ended == "nothing_yet") == (answers != ["nothing_yet"]), "the group is with one of them"


async def test_a_lease_that_the_full_disk_refused_leaves_its_group_to_the_next_consumer(
    tmp_path: Path, make_step: MakeStep
) -> None:
    actor = DataPoolActor(None, tmp_path)
    await actor.submit_step(make_step("t", is_last=True))
    with full_disk():
        with pytest.raises(JournalFullError):
            await actor.lease_batch()
        assert await counts(actor, "ready", "leased") == [1, 0]
    lease = await actor.lease_batch()
    assert lease.groups[0].delivery == 2
    await actor.ack(lease.lease_id)
    assert await counts(actor, "ready", "leased", "acked") == [0, 0, 1]


async def test_consumers_that_wait_on_a_full_disk_hold_no_group(
    tmp_path: Path, make_step: MakeStep
) -> None:
    actor = DataPoolActor(None, tmp_path)
    waiting = [asyncio.create_task(actor.lease_batch(timeout_s=None)) for _ in range(3)]
    await settle()
    with full_disk():
        with pytest.raises(JournalFullError):
            await actor.submit_step(make_step("t", is_last=True))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [JournalFullError] * 3
        assert await counts(actor, "ready", "leased") == [1, 0]
    assert (await actor.lease_batch()).groups[0].prompt_uid == "p"


async def test_a_fetch_that_the_full_disk_refused_loses_no_step(
    tmp_path: Path, make_step: MakeStep
) -> None:
    actor = DataPoolActor(None, tmp_path)
    await actor.submit_step(make_step("t", is_last=True))
    with full_disk(), pytest.raises(JournalFullError):
        await actor.fetch_batch()
    (step,) = (await actor.fetch_batch()).unpack()
    assert step.trajectory_uid == "t"
    assert await actor.fetch_batch() is None


async def test_a_consumer_that_leaves_on_a_full_disk_gives_its_group_back(
    tmp_path: Path, make_step: MakeStep
) -> None:
    actor = DataPoolActor(None, tmp_path)
    await actor.submit_step(make_step("t", is_last=True))
    with full_disk():
        with pytest.raises(JournalFullError):
            await actor.submit_step(make_step("u", "q"))
        leaving = asyncio.create_task(actor.lease_batch())
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await counts(actor, "ready", "leased") == [1, 0]
    assert (await actor.lease_batch()).groups[0].prompt_uid == "p"


async def test_a_lease_says_whether_more_may_come(tmp_path: Path, make_step: MakeStep) -> None:
    actor = DataPoolActor(PoolConfig(default=ChannelConfig(n_rollouts=2)), tmp_path)
    assert await actor.lease_batch() == "nothing_yet"
    assert await actor.lease_batch(timeout_s=0.01) == "nothing_yet"
    waiting = asyncio.create_task(actor.lease_batch(timeout_s=None))
    await settle()
    await actor.shutdown("train")
    assert await waiting == "shut_down"
    assert await actor.lease_batch(timeout_s=None) == "shut_down"
    assert await actor.lease_batch(channel="val") == "nothing_yet"


async def test_a_pool_that_ran_out_of_space_goes_on_with_all_it_acknowledged(
    tmp_path: Path, make_step: MakeStep
) -> None:
    def trajectory(i: int) -> list[Step]:
        return [
            make_step(f"t{i}", f"p{i}", k, prompt_ids=[k] * 4000, is_last=k == 1) for k in (0, 1)
        ]

    actor = DataPoolActor(None, tmp_path / "live")
    acknowledged: list[str] = []
    refused: list[int] = []
    with full_disk(320_000):
        for i in range(40):
            try:
                await actor.submit_steps(trajectory(i))
                acknowledged.append(f"t{i}")
            except JournalFullError:
                refused.append(i)
    assert acknowledged
    assert refused
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    killed = DataPoolActor(None, tmp_path / "killed")
    groups = (await killed.get_statistics("train"))["groups"]
    assert groups["ready"] == groups["submitted"] == len(acknowledged), "nothing half, nothing less"

    for i in refused:
        assert set(await actor.submit_steps(trajectory(i))) <= {"accepted", "duplicate"}
    steps = (await actor.fetch_batch(batch_size=40)).unpack()
    assert sorted({step.trajectory_uid for step in steps}) == sorted(f"t{i}" for i in range(40))
    assert len(steps) == 80
