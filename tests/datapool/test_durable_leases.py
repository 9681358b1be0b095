"""A lease holds as its consumer was told: it is durable, or its groups are ready for the next."""

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

from stepwell.datapool import ChannelConfig, DataPoolClient, PoolConfig, Step
from stepwell.datapool.errors import JournalFullError
from stepwell.datapool.ops import Ack, DropGroup, LeaseBatch
from tests.datapool.pools import pool_here, service_of, settle

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


async def counts(pool: DataPoolClient, *names: str) -> list[int]:
    groups = (await pool.get_statistics("train"))["groups"]
    return [groups[name] for name in names]


async def commits(pool: DataPoolClient) -> int:
    return (await pool.describe())["journal"]["commits"]


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_calls_of_one_turn_of_the_loop_share_a_transaction(
    tmp_path: Path, make_step: MakeStep, durability: Any
) -> None:
    pool = pool_here(PoolConfig(durability=durability), tmp_path)
    await pool.submit_step(make_step("first"))
    before = await commits(pool)
    calls = [asyncio.create_task(pool.submit_step(make_step(f"t{i}"))) for i in range(64)]
    await asyncio.sleep(0)
    calls[0].cancel()
    assert await asyncio.gather(*calls[1:]) == ["accepted"] * 63
    # The first one need not wait for the others; each of two syncs of a disk would be waited for.
    assert await commits(pool) - before == (1 if durability == "power" else 2)
    assert await pool.submit_step(make_step("t0")) == "duplicate"


@pytest.mark.parametrize("iteration", range(1, 9))
async def test_a_lease_given_at_the_end_of_a_wait_survives_a_kill(
    tmp_path: Path, make_step: MakeStep, iteration: int
) -> None:
    """The wait ends while a commit is under way, and a group becomes ready before that is over."""
    pool = pool_here(None, tmp_path / "live")
    answers: list[Any] = []

    async def consume() -> None:
        answer = await pool.call(LeaseBatch(), 0.005)
        answers.append(answer)
        # A kill at this moment leaves these files.
        shutil.copytree(tmp_path / "live", tmp_path / "killed")

    consumer = asyncio.create_task(consume())
    await settle()
    time.sleep(0.006)  # noqa: ASYNC251 - so that its time is over when the loop goes on
    others = []
    for turn in range(12):
        if turn == iteration:
            others.append(asyncio.create_task(pool.submit_step(make_step("t", is_last=True))))
        # Others keep the journal busy in each iteration of the loop.
        others.append(asyncio.create_task(pool.open_trajectory(f"x{turn}", f"q{turn}")))
        await asyncio.sleep(0)
    await consumer
    await asyncio.gather(*others)
    if answers != ["nothing_yet"]:
        again = pool_here(None, tmp_path / "killed")
        await again.ack(answers[0].lease_id)
    ended = await pool.call(LeaseBatch())
    assert (ended == "nothing_yet") == (answers != ["nothing_yet"]), "the group is with one of them"


async def test_a_lease_that_the_full_disk_refused_leaves_its_group_to_the_next_consumer(
    tmp_path: Path, make_step: MakeStep
) -> None:
    pool = pool_here(None, tmp_path)
    await pool.submit_step(make_step("t", is_last=True))
    with full_disk():
        with pytest.raises(JournalFullError):
            await pool.lease_batch()
        assert await counts(pool, "ready", "leased") == [1, 0]
    lease = await pool.lease_batch()
    assert lease.groups[0].delivery == 2
    await pool.ack(lease.lease_id)
    assert await counts(pool, "ready", "leased", "acked") == [0, 0, 1]


async def test_consumers_that_wait_on_a_full_disk_hold_no_group(
    tmp_path: Path, make_step: MakeStep
) -> None:
    pool = pool_here(None, tmp_path)
    waiting = [asyncio.create_task(pool.call(LeaseBatch(), None)) for _ in range(3)]
    await settle()
    with full_disk():
        with pytest.raises(JournalFullError):
            await pool.submit_step(make_step("t", is_last=True))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [JournalFullError] * 3
        assert await counts(pool, "ready", "leased") == [1, 0]
    assert (await pool.lease_batch()).groups[0].prompt_uid == "p"


async def test_a_fetch_that_the_full_disk_refused_loses_no_step(
    tmp_path: Path, make_step: MakeStep
) -> None:
    pool = pool_here(None, tmp_path)
    await pool.submit_step(make_step("t", is_last=True))
    with full_disk(), pytest.raises(JournalFullError):
        await pool.fetch_batch()
    (step,) = await pool.fetch_batch()
    assert step.trajectory_uid == "t"
    assert await pool.fetch_batch() is None


async def test_a_consumer_that_leaves_on_a_full_disk_gives_its_group_back(
    tmp_path: Path, make_step: MakeStep
) -> None:
    pool = pool_here(None, tmp_path)
    await pool.submit_step(make_step("t", is_last=True))
    with full_disk():
        with pytest.raises(JournalFullError):
            await pool.submit_step(make_step("u", "q"))
        leaving = asyncio.create_task(pool.lease_batch())
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await counts(pool, "ready", "leased") == [1, 0]
    assert (await pool.lease_batch()).groups[0].prompt_uid == "p"


async def test_a_lease_says_whether_more_may_come(tmp_path: Path, make_step: MakeStep) -> None:
    pool = pool_here(PoolConfig(default=ChannelConfig(n_rollouts=2)), tmp_path)
    assert await pool.call(LeaseBatch()) == "nothing_yet"
    assert await pool.call(LeaseBatch(), 0.01) == "nothing_yet"
    waiting = asyncio.create_task(pool.call(LeaseBatch(), None))
    await settle()
    await pool.shutdown("train")
    assert await waiting == "shut_down"
    assert await pool.call(LeaseBatch(), None) == "shut_down"
    assert await pool.call(LeaseBatch(channel="val")) == "nothing_yet"


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_kill_between_two_callers_leaves_counts_that_match_the_steps(
    tmp_path: Path, make_step: MakeStep, durability: Any
) -> None:
    """A caller's commit takes along what another one has applied and not waited for yet."""
    config = PoolConfig(durability=durability)
    pool = pool_here(config, tmp_path / "live")
    for uid in "abc":
        await pool.submit_step(make_step(uid, f"p{uid}", is_last=True))
    lease = await pool.lease_batch()
    assert lease is not None
    submits = [pool.submit_step(make_step(uid, f"p{uid}", is_last=True)) for uid in "de"]
    submitting = asyncio.gather(*submits)
    await asyncio.sleep(0)  # the commit of the second one comes at the end of this turn
    service = service_of(pool)
    service.try_(Ack(lease.lease_id))
    service.try_(DropGroup("pc", "test"))
    await submitting
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    killed = pool_here(config, tmp_path / "killed")
    assert await counts(killed, "submitted", "ready", "acked", "dropped") == [5, 3, 1, 1]
    stats = await killed.get_statistics("train")
    assert (stats["steps"]["accepted"], stats["leases"]["acked"]) == (5, 1)


async def test_a_group_that_the_full_disk_refused_can_be_opened_again(tmp_path: Path) -> None:
    pool = pool_here(PoolConfig(default=ChannelConfig(max_outstanding_groups=1)), tmp_path)
    with full_disk(), pytest.raises(JournalFullError):
        await pool.open_group("p", 1)
    assert await pool.open_group("p", 1) in ("accepted", "duplicate")
    assert await counts(pool, "open", "dropped") == [1, 0]


async def test_a_pool_that_ran_out_of_space_goes_on_with_all_it_acknowledged(
    tmp_path: Path, make_step: MakeStep
) -> None:
    def trajectory(i: int) -> list[Step]:
        return [
            make_step(f"t{i}", f"p{i}", k, prompt_ids=[k] * 4000, is_last=k == 1) for k in (0, 1)
        ]

    pool = pool_here(None, tmp_path / "live")
    acknowledged: list[str] = []
    refused: list[int] = []
    with full_disk(320_000):
        for i in range(40):
            try:
                await pool.submit_steps(trajectory(i))
                acknowledged.append(f"t{i}")
            except JournalFullError:
                refused.append(i)
    assert acknowledged
    assert refused
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    killed = pool_here(None, tmp_path / "killed")
    groups = (await killed.get_statistics("train"))["groups"]
    assert groups["ready"] == groups["submitted"] == len(acknowledged), "nothing half, nothing less"

    for i in refused:
        assert set(await pool.submit_steps(trajectory(i))) <= {"accepted", "duplicate"}
    steps = await pool.fetch_batch(batch_size=40)
    assert sorted({step.trajectory_uid for step in steps}) == sorted(f"t{i}" for i in range(40))
    assert len(steps) == 80
