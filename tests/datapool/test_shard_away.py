"""A shard that dies while something is asked of it: nothing is lost and nothing is held; the pool
is away until it is back, but for the groups of the others. Real processes, without Ray; with it:
`test_shards.py`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from stepwell.datapool import DataPoolClient, PoolConfig
from stepwell.datapool.errors import ChannelShutDownError, PoolUnavailableError
from stepwell.datapool.ops import Ack, LeaseBatch, OpenGroup, Renew, Shutdown
from stepwell.datapool.questions import GetStatistics
from stepwell.datapool.remote.shards import shard_of
from tests.builders import until
from tests.datapool.pools import (
    FoundShard,
    answers_lease,
    groups_of,
    n_waiting,
    processes,
    serving,
    settle,
)

N = 2


@pytest.fixture
async def pool(tmp_path):
    async with processes(tmp_path, N) as (client, started):
        client.processes = started
        yield client


def uids(shard, n):
    """`n` prompts of one shard."""
    found = (f"p{i}" for i in range(10_000) if shard_of(f"p{i}", N) == shard)
    return [next(found) for _ in range(n)]


async def fill(client, prompts, make_step):
    steps = [make_step(f"t-{uid}", uid, is_last=True) for uid in prompts]
    return await client.submit_steps(steps)


def prompts_of(lease):
    return sorted(group.prompt_uid for group in lease.groups)


async def is_n(awaitable, n):
    return await awaitable == n


async def test_a_batch_is_gathered_from_shards_none_of_which_has_enough(make_step):
    async with AsyncExitStack() as stack:
        addresses = [
            (
                await stack.enter_async_context(
                    serving(PoolConfig(durability="none", shards=4), shard=k)
                )
            )
            for k in range(4)
        ]
        client = DataPoolClient([FoundShard(address) for _, address in addresses])
        prompts = [f"p{i}" for i in range(1000)]
        chosen = [[p for p in prompts if shard_of(p, 4) == k][:2] for k in range(4)]
        waiting = asyncio.create_task(client.lease_batch(batch_size=8, timeout_s=60))
        for part in chosen:
            await fill(client, part, make_step)
        assert prompts_of(await waiting) == sorted(uid for part in chosen for uid in part)
        await client.close()


async def test_what_is_asked_of_all_waits_for_the_shard_that_is_away(pool, make_step):
    await fill(pool, uids(0, 1) + uids(1, 2), make_step)
    before = await pool.get_statistics("train")
    await pool.processes[1].kill()
    asking = asyncio.gather(
        pool.get_statistics("train"), pool.describe(), pool.get_events(), pool.lease_batch(1)
    )
    assert await fill(pool, uids(0, 2), make_step) == ["duplicate", "accepted"]
    assert not asking.done()
    await pool.processes[1].start()
    stats, described, events, lease = await asking
    assert stats["groups"]["submitted"] == before["groups"]["submitted"] + 1
    assert [shard["shard"] for shard in described["shards"]] == [0, 1]
    assert len(events.events) >= 2
    assert len(lease.groups) == 1


class GoneShard(FoundShard):
    """The way to a shard that nobody starts again."""

    async def find(self):
        raise PoolUnavailableError("it is gone")


@pytest.mark.parametrize("gone", range(N))
async def test_a_trajectory_of_a_shard_that_lives_is_ended_where_another_one_is_gone(
    gone, make_step
):
    (prompt,) = uids(1 - gone, 1)
    async with serving(PoolConfig(shards=N), shard=1 - gone) as (_, address):
        shards = [GoneShard(None), FoundShard(address)]
        knows, other = (DataPoolClient(shards if gone == 0 else shards[::-1]) for _ in range(2))
        await knows.submit_step(make_step("t", prompt))
        assert await other.complete_trajectory("t", 1.0) == "complete"
        with pytest.raises(PoolUnavailableError, match="it is gone"):
            await other.complete_trajectory("perhaps there", 1.0)
        await knows.close()
        await other.close()


async def test_steps_of_a_shard_that_is_killed_while_they_are_sent_are_stored_once(pool, make_step):
    mine, theirs = uids(0, 20), uids(1, 20)
    both = [uid for pair in zip(mine, theirs, strict=True) for uid in pair]
    await pool.get_statistics()
    pool.processes[1].pause()
    submitting = asyncio.create_task(fill(pool, both, make_step))
    await settle()
    await pool.processes[1].kill()
    assert await fill(pool, ["more"] if shard_of("more", N) == 0 else ["mo"], make_step)
    assert not submitting.done()
    await pool.processes[1].start()
    assert await submitting == ["accepted"] * 40
    stats = await pool.get_statistics("train")
    assert (stats["steps"]["stored"], stats["groups"]["ready"]) == (41, 41)
    served = set()
    while lease := await pool.lease_batch(batch_size=2):
        served |= set(prompts_of(lease))
        await pool.ack(lease.lease_id)
    assert served >= set(both[:40])


@pytest.fixture
def stopped(pool, monkeypatch):
    """A lease that asks both shards, of which the second one stands still by then."""

    async def lease(batch_size):
        take, taking = pool._pool._take, asyncio.Event()

        async def stop_before_it_takes(*args):
            pool.processes[1].pause()
            taking.set()
            return await take(*args)

        monkeypatch.setattr(pool._pool, "_take", stop_before_it_takes)
        leasing = asyncio.create_task(pool.lease_batch(batch_size=batch_size, timeout_s=60))
        await taking.wait()
        monkeypatch.setattr(pool._pool, "_take", take)
        await asyncio.sleep(0.1)
        return leasing

    return lease


async def test_a_batch_of_a_shard_that_is_killed_while_it_leases_is_neither_lost_nor_held(
    pool, make_step, stopped
):
    """It stands still with the request in its socket; whether it granted it nobody knows."""
    both = uids(0, 2) + uids(1, 2)
    await fill(pool, both, make_step)
    leasing = await stopped(4)
    await pool.processes[1].kill()
    assert not leasing.done()
    await pool.processes[1].start()
    lease = await leasing
    assert prompts_of(lease) == sorted(both)
    assert await groups_of(pool, "ready", "leased") == [0, 4]
    await pool.ack(lease.lease_id)
    assert await groups_of(pool, "leased", "acked") == [0, 4]


async def test_a_part_that_was_granted_before_its_shard_was_killed_is_given_again(pool, make_step):
    both = uids(0, 1) + uids(1, 1)
    await fill(pool, both, make_step)
    link = pool.shards[1]
    answered = link._connection._answered

    def lose_leases(frames):
        # The answer never arrives: the shard has granted it, and is killed.
        answered([frame for frame in frames if not answers_lease(link, frame)])

    link._connection._answered = lose_leases
    leasing = asyncio.create_task(pool.lease_batch(batch_size=2, timeout_s=60))
    await until(lambda: is_n(groups_of(DataPoolClient([link]), "leased"), [1]))
    await pool.processes[1].kill()
    await pool.processes[1].start()
    lease = await leasing
    assert prompts_of(lease) == sorted(both)
    assert [group.delivery for group in lease.groups] == [1, 1]
    assert await groups_of(pool, "ready", "leased") == [0, 2]


async def test_a_consumer_that_leaves_while_a_shard_is_away_holds_nothing_when_it_is_back(
    pool, make_step, stopped
):
    mine, theirs = uids(0, 1), uids(1, 1)
    await fill(pool, mine + theirs, make_step)
    leaving = await stopped(2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await pool.processes[1].kill()
    await pool.processes[1].start()

    async def all_back():
        stats = await pool.get_statistics("train")
        return [stats["groups"][k] for k in ("ready", "leased")] == [2, 0]

    await until(all_back)


async def test_a_consumer_that_waits_is_served_by_the_shard_that_is_left(pool, make_step):
    waiting = asyncio.create_task(pool.lease_batch(batch_size=2, timeout_s=60))
    await until(lambda: is_n(n_waiting(pool), 1))
    await pool.processes[1].kill()
    assert await fill(pool, uids(0, 2), make_step) == ["accepted"] * 2
    assert prompts_of(await waiting) == sorted(uids(0, 2))


async def test_a_consumer_that_waits_is_served_by_the_shard_that_comes_back(pool, make_step):
    waiting = asyncio.create_task(pool.lease_batch(batch_size=2, timeout_s=60))
    await until(lambda: is_n(n_waiting(pool), 1))
    await pool.processes[1].kill()
    filling = asyncio.create_task(fill(pool, uids(1, 2), make_step))
    await asyncio.sleep(0.1)
    assert not filling.done()
    assert not waiting.done()
    await pool.processes[1].start()
    assert await filling == ["accepted"] * 2
    assert prompts_of(await waiting) == sorted(uids(1, 2))


async def test_an_ack_waits_for_the_shard_that_is_away_and_the_other_part_does_not(pool, make_step):
    await fill(pool, uids(0, 1) + uids(1, 1), make_step)
    lease = await pool.lease_batch(batch_size=2)
    await pool.get_statistics("train")
    await pool.processes[1].kill()
    acking = asyncio.create_task(pool.ack(lease.lease_id))

    await until(lambda: is_n(groups_of(DataPoolClient(pool.shards[:1]), "acked"), [1]))
    assert not acking.done()
    await pool.processes[1].start()
    await acking
    assert await groups_of(pool, "leased", "acked") == [0, 2]


@pytest.mark.parametrize("n_turns", range(0, 60, 3))
async def test_a_consumer_that_leaves_in_any_moment_holds_no_part_of_a_batch(make_step, n_turns):
    async with serving(shard=0) as (_, first), serving(shard=1) as (_, second):
        client = DataPoolClient([FoundShard(first), FoundShard(second)])
        await fill(client, uids(0, 2) + uids(1, 2), make_step)
        leaving = asyncio.create_task(client.lease_batch(batch_size=4, timeout_s=60))
        for _ in range(n_turns):
            await asyncio.sleep(0)
        leaving.cancel()
        (lease,) = await asyncio.gather(leaving, return_exceptions=True)
        if not isinstance(lease, asyncio.CancelledError):
            await client.nack(lease.lease_id)

        async def all_back():
            return await groups_of(client, "ready", "leased") == [4, 0] and not await n_waiting(
                client
            )

        await until(all_back)
        await client.close()


async def test_any_operation_is_called_in_one_way_whatever_the_number_of_shards(make_step):
    async with serving(shard=0) as (_, first), serving(shard=1) as (_, second):
        client = DataPoolClient([FoundShard(first), FoundShard(second)])
        await fill(client, uids(0, 2) + uids(1, 2), make_step)
        lease = await client.call(LeaseBatch(batch_size=4))
        assert len(lease.groups) == 4
        assert await client.call(Renew(lease.lease_id, 60)) < await client.renew(lease.lease_id, 90)
        assert await client.call(Ack(lease.lease_id)) is None
        assert (await client.call(GetStatistics("train")))["groups"]["acked"] == 4
        assert await client.call(Shutdown("train")) is None
        assert await client.call(LeaseBatch(), None) == "shut_down"
        with pytest.raises(ChannelShutDownError):
            await client.call(OpenGroup("new", 1), None)
        await client.close()
