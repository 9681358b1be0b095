"""Waiting and waking up, in a pool of this process: one event loop, no Ray, no socket.

Nothing here sleeps to let time pass: `settle` runs the loop until it has nothing to do, and the
waits that end by timeout or timer are a few hundredths of a second.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from stepwell.datapool import ChannelConfig, DataPoolClient, PoolConfig
from stepwell.datapool.errors import ChannelShutDownError, PoolFullError
from stepwell.datapool.ops import LeaseBatch
from stepwell.datapool.questions import Available, WaitAvailable


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def pool():
    limits = ChannelConfig(max_outstanding_groups=2)
    async with DataPoolClient.local(PoolConfig(default=limits)) as client:
        yield client


@pytest.fixture
def finish(make_step):
    async def finish(pool, prompt_uid, *trajectory_uids, channel="train"):
        for uid in trajectory_uids:
            await pool.submit_step(make_step(uid, prompt_uid), channel)
            await pool.complete_trajectory(uid, channel=channel)

    return finish


async def waiting(pool, channel="train"):
    counts = (await pool.get_statistics(channel))["waiting"]
    return counts["consumers"], counts["producers"]


# -- consumers -------------------------------------------------------------------------------


async def test_a_fetch_without_timeout_answers_at_once(pool, finish):
    assert await pool.fetch_batch() is None
    await finish(pool, "p", "t")
    assert len(await pool.fetch_batch()) == 1


async def test_a_waiting_consumer_is_woken_by_the_completion_that_serves_it(pool, finish):
    fetch = asyncio.create_task(pool.fetch_batch(n_rollouts=2, timeout_s=None))
    await settle()
    await finish(pool, "p", "a")
    await settle()
    assert not fetch.done()
    await finish(pool, "p", "b")
    assert len(await fetch) == 2
    assert await waiting(pool) == (0, 0)


async def test_a_wait_ends_with_none_at_its_timeout(pool):
    assert await pool.fetch_batch(timeout_s=0.02) is None
    assert await waiting(pool) == (0, 0)


async def test_consumers_are_served_first_come_first_served(pool, finish):
    fetches = [asyncio.create_task(pool.fetch_batch(timeout_s=None)) for _ in range(3)]
    await settle()
    for uid in "abc":
        await finish(pool, f"p{uid}", uid)
    assert [(await f)[0].trajectory_uid for f in fetches] == ["a", "b", "c"]


async def test_a_big_request_is_not_starved_by_small_ones_behind_it(pool, finish):
    big = asyncio.create_task(pool.fetch_batch(batch_size=2, timeout_s=None))
    await settle()
    small = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    await finish(pool, "p1", "a")
    assert await pool.fetch_batch() is None, "nor by one that does not wait"
    await finish(pool, "p2", "b")
    assert [s.trajectory_uid for s in await big] == ["a", "b"]
    await finish(pool, "p3", "c")
    assert [s.trajectory_uid for s in await small] == ["c"]


async def test_a_consumer_of_more_rollouts_does_not_block_one_of_fewer(pool, finish):
    five = asyncio.create_task(pool.fetch_batch(n_rollouts=5, timeout_s=None))
    await settle()
    two = asyncio.create_task(pool.fetch_batch(n_rollouts=2, timeout_s=None))
    await finish(pool, "p", "a", "b")
    assert len(await two) == 2
    await finish(pool, "q", *"cdefg")
    assert len(await five) == 5


async def test_a_cancelled_consumer_leaves_the_queue(pool, finish):
    first = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    second = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    await settle()
    first.cancel()
    await settle()
    assert await waiting(pool) == (1, 0)
    await finish(pool, "p", "a")
    assert len(await second) == 1


async def test_a_cancelled_big_request_lets_the_small_one_behind_it_go(pool, finish):
    big = asyncio.create_task(pool.fetch_batch(batch_size=9, timeout_s=None))
    await settle()
    small = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    await finish(pool, "p", "a")
    await settle()
    assert not small.done()
    big.cancel()
    assert len(await small) == 1


async def test_what_was_served_to_a_consumer_that_is_leaving_goes_back(pool, make_step):
    fetch = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await settle()
    await pool.submit_step(make_step("t"))
    # Served by the completion, then cancelled before its task has run: both in one loop turn.
    completion = pool.complete_trajectory("t")
    with pytest.raises(StopIteration):
        completion.send(None)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    lease = await pool.lease_batch()
    assert lease.groups[0].delivery == 2
    stats = await pool.get_statistics("train")
    assert stats["leases"]["nack_reasons"] == {"consumer_left": 1}


async def test_an_expired_lease_wakes_the_next_consumer(pool, finish):
    await finish(pool, "p", "t")
    await pool.lease_batch(lease_s=0.05)
    again = await pool.lease_batch(timeout_s=None)
    assert again.groups[0].delivery == 2


async def test_a_nack_wakes_the_next_consumer(pool, finish):
    await finish(pool, "p", "t")
    lease = await pool.lease_batch()
    fetch = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    await settle()
    await pool.nack(lease.lease_id, "test")
    assert len(await fetch) == 1


async def test_a_deadline_wakes_a_consumer_with_what_is_complete(pool, finish):
    await pool.open_group("p", 4, deadline_s=0.05)
    await finish(pool, "p", "a", "b")
    assert len(await pool.fetch_batch(timeout_s=None)) == 2


async def test_a_shutdown_wakes_consumers_of_its_channel_with_none(pool, finish):
    train = asyncio.create_task(pool.fetch_batch(timeout_s=None))
    val = asyncio.create_task(pool.fetch_batch(channel="val", timeout_s=None))
    await settle()
    await pool.shutdown("train")
    assert await train is None
    await settle()
    assert not val.done()
    await finish(pool, "p", "t")
    assert len(await pool.fetch_batch(timeout_s=None)) == 1, "what is ready is still served"
    assert await pool.fetch_batch(timeout_s=None) is None, "nobody waits any more"
    await pool.shutdown()
    assert await val is None


async def test_a_watcher_of_a_shard_waits_in_no_consumers_line(pool, finish):
    """Nor do two of them in each other's: each is told of what it does not know yet."""
    (port,) = pool.shards
    await finish(pool, "p", "t")
    knows = asyncio.create_task(port.call(WaitAvailable(more_than=1), None))
    new = asyncio.create_task(port.call(WaitAvailable(more_than=0), None))
    assert (await new).n_groups == 1
    assert len(await pool.fetch_batch(timeout_s=None)) == 1
    assert not knows.done()
    await pool.shutdown("train")
    assert await knows == Available(0, True)


async def test_what_a_consumer_is_given_is_its_own(pool, finish):
    await pool.open_group("p", 1, metadata={"k": 1})
    await finish(pool, "p", "t")
    lease = await pool.lease_batch()
    lease.groups[0].metadata["k"] = 2
    lease.groups[0].trajectories[0].metadata["m"] = 3
    lease.steps[0].metadata["s"] = 4
    await pool.nack(lease.lease_id)
    (group,) = (await pool.lease_batch()).groups
    (trajectory,) = group.trajectories
    assert (group.metadata, trajectory.metadata) == ({"k": 1}, {})
    assert trajectory.steps[0].metadata == {}


async def test_a_repeated_request_is_answered_with_its_lease_whoever_waits(pool, finish):
    await finish(pool, "p", "t")
    (port,) = pool.shards
    first = await port.call(LeaseBatch(request_id="r"))
    behind = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await settle()
    for timeout_s in (0.0, 60.0, None):
        assert await port.call(LeaseBatch(request_id="r"), timeout_s) == first
    assert await port.call(LeaseBatch(request_id="other")) == "nothing_yet"
    await pool.nack(first.lease_id)
    assert (await behind).groups[0].delivery == 2


async def test_a_bad_request_does_not_enter_the_queue(pool):
    with pytest.raises(ValueError, match="batch_size is 0"):
        await pool.fetch_batch(batch_size=0, timeout_s=None)
    assert await waiting(pool) == (0, 0)


async def test_a_consumer_that_leaves_at_any_moment_leaves_no_group_leased(pool, finish):
    for uid in "abcd":
        await finish(pool, f"p{uid}", uid)
    n_left = 0
    for turns in range(30):
        leasing = asyncio.create_task(pool.lease_batch(batch_size=4))
        for _ in range(turns):
            await asyncio.sleep(0)
        leasing.cancel()
        try:
            await pool.nack((await leasing).lease_id, "late")
        except asyncio.CancelledError:
            n_left += 1
        await settle()
        groups = (await pool.get_statistics("train"))["groups"]
        assert (groups["ready"], groups["leased"]) == (4, 0)
    assert n_left > 5, "some of them while the lease was unpacked"


async def test_others_go_on_between_the_groups_of_a_lease(pool, finish):
    for uid in "abcd":
        await finish(pool, f"p{uid}", uid)
    leasing = asyncio.create_task(pool.lease_batch(batch_size=4))
    n_turns = 0
    while not leasing.done():
        await asyncio.sleep(0)
        n_turns += 1
    assert [g.prompt_uid for g in (await leasing).groups] == ["pa", "pb", "pc", "pd"]
    assert n_turns > 6, "two after each: one to read what came, one to go on with that"


# -- producers -------------------------------------------------------------------------------


async def test_open_group_waits_for_credit_in_order(pool, finish):
    for uid in "ab":
        await pool.open_group(uid, 1)
    opening = [asyncio.create_task(pool.open_group(uid, 1)) for uid in "cd"]
    await settle()
    assert await waiting(pool) == (0, 2)
    await finish(pool, "a", "a0")
    await settle()
    assert not opening[0].done(), "a ready group still counts"
    assert len(await pool.fetch_batch()) == 1
    assert await opening[0] == "accepted"
    await settle()
    assert not opening[1].done()
    await pool.drop_group("b", "test")
    assert await opening[1] == "accepted"


async def test_open_group_gives_up_at_its_timeout(pool):
    for uid in "ab":
        await pool.open_group(uid, 1)
    for timeout_s in (0, 0.02):
        with pytest.raises(PoolFullError, match="group 'c' waits until one is leased"):
            await pool.open_group("c", 1, timeout_s=timeout_s)
    assert await waiting(pool) == (0, 0)


async def test_a_group_that_is_open_already_does_not_stand_in_line_for_credit(pool):
    for uid in "ab":
        await pool.open_group(uid, 1)
    opening = asyncio.create_task(pool.open_group("c", 1))
    await settle()
    assert await pool.open_group("a", 1, timeout_s=None) == "duplicate"
    assert not opening.done()
    opening.cancel()


async def test_a_deadline_frees_credit(pool):
    await pool.open_group("a", 1, deadline_s=0.05)
    await pool.open_group("b", 1)
    assert await pool.open_group("c", 1) == "accepted"


async def test_a_cancelled_open_group_takes_no_credit(pool):
    for uid in "ab":
        await pool.open_group(uid, 1)
    leaving = asyncio.create_task(pool.open_group("c", 1))
    staying = asyncio.create_task(pool.open_group("d", 1))
    await settle()
    leaving.cancel()
    await pool.drop_group("a", "test")
    assert await staying == "accepted"
    assert (await pool.get_statistics("train"))["groups"]["open"] == 2


async def test_a_shutdown_wakes_waiting_producers_with_an_error(pool):
    for uid in "ab":
        await pool.open_group(uid, 1)
    opening = asyncio.create_task(pool.open_group("c", 1))
    await settle()
    await pool.shutdown()
    with pytest.raises(ChannelShutDownError):
        await opening


# -- events ---------------------------------------------------------------------------------


async def test_a_watcher_is_woken_by_its_event_and_by_no_other(pool, finish):
    cursor = (await pool.get_events()).cursor
    watching = asyncio.create_task(pool.get_events(cursor, kinds=["dropped"], timeout_s=60))
    await finish(pool, "p", "t")
    await settle()
    assert not watching.done()
    await pool.drop_group("p", "test")
    assert [e.kind for e in (await watching).events] == ["dropped"]
    assert not (await pool.get_events(cursor, kinds=["scored"], timeout_s=0.01)).events


async def test_a_watcher_whose_events_are_gone_waits_for_the_next_and_is_told(pool, finish):
    """In as many slices as it takes; told once, for its next cursor is one of this pool."""
    assert (await pool.get_events("another:17", timeout_s=0.01)).lost
    watching = asyncio.create_task(pool.get_events("another:17", timeout_s=60))
    await settle()
    assert not watching.done()
    await finish(pool, "p", "t")
    page = await watching
    assert ([e.kind for e in page.events], page.lost) == (["ready"], True)
    assert not (await pool.get_events(page.cursor)).lost


# -- payload ---------------------------------------------------------------------------------


async def test_a_stored_step_does_not_keep_its_message_alive(pool, make_step):
    message = np.arange(1000, dtype=np.int32)
    message.flags.writeable = False
    step = replace(make_step("t"), prompt_ids=message[:10])
    assert step.prompt_ids.base is message
    await pool.submit_step(step)
    await pool.complete_trajectory("t")
    (served,) = await pool.fetch_batch()
    assert not np.shares_memory(served.prompt_ids, message)
    assert served.prompt_ids.tolist() == list(range(10))
    assert not served.prompt_ids.flags.writeable
