"""One shard as a client has it: calls in order, again after a broken connection, and nothing held
for a caller that left. Pools are real: of this loop, or in a process that is killed."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from dataclasses import replace

import pytest

from stepwell.datapool import ChannelConfig, DataPoolClient, PoolConfig
from stepwell.datapool.errors import PoolFullError, PoolUnavailableError, StepConflictError
from stepwell.datapool.remote import shard as shard_module
from stepwell.datapool.remote.outbox import RecentSteps
from stepwell.datapool.remote.shard import AT_ONCE, LocalShard
from tests.builders import until
from tests.datapool.pools import (
    FoundShard,
    Proxy,
    groups_of,
    n_waiting,
    processes,
    serving,
    settle,
)


@pytest.fixture
async def pool(tmp_path):
    """A client through a line that the test breaks, one that is beside it, and the line."""
    limits = ChannelConfig(max_outstanding_groups=2)
    config = PoolConfig(default=ChannelConfig(), channels={"few": limits})
    async with (
        serving(config, tmp_path / "journal") as (service, address),
        Proxy(address, tmp_path / "line").running() as line,
    ):
        client = DataPoolClient([FoundShard(line.address)])
        client.near = DataPoolClient([LocalShard(service)])
        client.line = line
        yield client
        line.open.set()
        await client.close()


async def finish(client, make_step, *uids):
    for uid in uids:
        await client.submit_step(make_step(uid, f"p-{uid}", is_last=True))


async def all_back(client):
    return await groups_of(client, "leased") == [0] and await n_waiting(client) == 0


# -- order -----------------------------------------------------------------------------------------


async def test_what_is_called_without_waiting_takes_effect_in_order(pool, make_step):
    async def trajectory(uid):
        return await asyncio.gather(
            pool.open_trajectory(uid, "p"),
            pool.submit_step(make_step(uid, "p")),
            pool.submit_steps([make_step(uid, "p", i, prompt_ids=[1] * 50_000) for i in (1, 2)]),
            pool.complete_trajectory(uid, 1.0),
        )

    answers = await asyncio.gather(*(trajectory(f"t{i}") for i in range(30)))
    assert answers == [["accepted", "accepted", ["accepted"] * 2, "complete"]] * 30


async def test_concurrent_submits_travel_together_and_each_gets_its_own_answer(pool, make_step):
    await pool.submit_step(make_step("t"))
    line = pool.shards[0]._connection
    written = []

    class Transport:
        def write(self, data):
            written.append(data)
            transport.write(data)

    transport, line.transport = line.transport, Transport()
    answers = await asyncio.gather(
        *(pool.submit_step(make_step(f"u{i}", index=i)) for i in range(100)),
        pool.submit_step(make_step("t")),
        pool.submit_step(make_step("t", response_ids=[9, 9])),
        pool.submit_steps([make_step("t", index=1), make_step("t", index=2)]),
        return_exceptions=True,
    )
    assert answers[:101] == ["accepted"] * 100 + ["duplicate"]
    assert isinstance(answers[101], StepConflictError)
    assert answers[102] == ["accepted", "accepted"]
    assert len(written) == 2 + 102 // AT_ONCE, "the first one waits for nobody, others share one"
    line.transport = transport


async def test_a_caller_that_leaves_before_its_call_was_sent_disturbs_nobody(pool, make_step):
    leaving = asyncio.create_task(pool.submit_step(make_step("a")))
    staying = asyncio.create_task(pool.submit_step(make_step("b")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == "accepted"
    assert (await pool.get_statistics("train"))["trajectories"]["submitted"] == 1


# -- broken connections ----------------------------------------------------------------------------


async def trajectories(client, make_step):
    """Calls fired together, of which each needs the one before it."""
    calls = []
    for k in range(3):
        calls += [
            client.open_trajectory(f"t{k}", f"p{k}"),
            client.submit_step(make_step(f"t{k}", f"p{k}")),
            client.submit_step(make_step(f"t{k}", f"p{k}", 1, prompt_ids=[1, 2, 3, 4, 5, 6])),
            client.complete_trajectory(f"t{k}", 1.0),
        ]
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_line_cut_after_any_byte_is_no_loss_and_nothing_is_stored_twice(
    tmp_path, make_step, way
):
    async def run(cut):
        async with (
            serving() as (service, address),
            Proxy(address, tmp_path / f"{way}{cut}").running() as line,
        ):
            line.cut = {} if cut is None else {way: cut}
            client = DataPoolClient([FoundShard(line.address)])
            answers = await trajectories(client, make_step)
            n_connections, n_bytes = line.n_connections, line.n_bytes[way]
            near = DataPoolClient([LocalShard(service)])
            stats = await near.get_statistics("train")
            assert stats["steps"]["stored"] == stats["steps"]["accepted"] == 6
            assert stats["groups"]["ready"] == stats["groups"]["submitted"] == 3
            assert answers[3::4] == ["complete"] * 3
            assert {*answers[0::4], *answers[1::4], *answers[2::4]} <= {"accepted", "duplicate"}
            (lease,) = [await near.lease_batch(batch_size=3)]
            assert [s.step_index for s in lease.steps] == [0, 1] * 3
            await client.close()
            return n_connections, n_bytes

    n_connections, n_bytes = await run(None)
    assert n_connections == 1
    for cut in range(1, n_bytes, 1 if way == "down" else 7):
        n_connections, _ = await run(cut)
        assert n_connections == 2


async def test_a_killed_pool_gets_again_what_it_had_not_answered_in_order(tmp_path, make_step):
    async with processes(tmp_path) as (client, (process,)):
        await client.submit_step(make_step("first"))
        process.pause()
        calls = asyncio.create_task(trajectories(client, make_step))
        await settle()  # sent, and not read
        await process.kill()
        await asyncio.sleep(0.1)
        assert not calls.done()
        await process.start()
        assert await calls == ["accepted", "accepted", "accepted", "complete"] * 3
        stats = await client.get_statistics("train")
        assert (stats["steps"]["stored"], stats["groups"]["ready"]) == (7, 3)


async def test_a_killed_pool_still_has_what_it_acknowledged(tmp_path, make_step):
    async with processes(tmp_path) as (client, (process,)):
        acknowledged = []
        for i in range(20):
            if i % 5 == 4:
                await process.kill()
                await process.start()
            assert await client.submit_step(make_step(f"t{i}", f"p{i}", is_last=True)) == "accepted"
            acknowledged.append(f"t{i}")
        steps = await client.fetch_batch(batch_size=20)
        assert sorted(s.trajectory_uid for s in steps) == sorted(acknowledged)


async def test_a_waiting_call_waits_on_in_the_pool_that_comes_back(tmp_path, make_step):
    async with processes(tmp_path) as (client, (process,)):
        waiting = asyncio.create_task(client.lease_batch(timeout_s=60))
        await until(lambda: is_n(n_waiting(client), 1))
        await process.kill()
        await process.start()
        await finish(client, make_step, "t")
        assert (await waiting).steps[0].trajectory_uid == "t"


async def is_n(awaitable, n):
    return await awaitable == n


async def test_a_lease_whose_answer_was_lost_is_given_again_to_the_same_call(pool, make_step):
    await finish(pool.near, make_step, "a", "b")
    await pool.get_statistics()
    pool.line.open.clear()
    leasing = asyncio.create_task(pool.lease_batch(timeout_s=60))
    await until(lambda: is_n(groups_of(pool.near, "leased"), [1]))
    pool.line.break_()
    pool.line.open.set()
    lease = await leasing
    assert await groups_of(pool, "ready", "leased") == [1, 1]
    await pool.ack(lease.lease_id)
    assert await groups_of(pool, "leased", "acked") == [0, 1]


async def test_a_lost_answer_is_given_again_though_others_wait_in_line(pool, make_step):
    await finish(pool.near, make_step, "a")
    await pool.get_statistics()
    pool.line.open.clear()
    leasing = asyncio.create_task(pool.lease_batch(timeout_s=60))
    await until(lambda: is_n(groups_of(pool.near, "leased"), [1]))
    behind = asyncio.create_task(pool.near.lease_batch(timeout_s=None))
    await until(lambda: is_n(n_waiting(pool.near), 1))
    pool.line.break_()
    pool.line.open.set()
    assert (await leasing).groups[0].delivery == 1
    assert not behind.done()
    behind.cancel()


async def test_a_group_opened_before_the_line_broke_is_open_once(pool):
    where = {"channel": "few"}
    for uid in "ab":
        await pool.open_group(uid, 1, **where)
    opening = asyncio.create_task(pool.open_group("c", 1, **where))
    await settle()
    pool.line.open.clear()
    await pool.near.drop_group("a", "test", "few")

    async def is_open():
        return (await pool.near.get_statistics("few"))["groups"]["submitted"] == 3

    await until(is_open)
    pool.line.break_()
    pool.line.open.set()
    assert await opening in ("accepted", "duplicate")
    assert (await pool.get_statistics("few"))["groups"]["open"] == 2


async def test_a_pool_that_does_not_come_back_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(shard_module, "RESTART_S", 0.1)
    client = DataPoolClient([FoundShard(None)])
    with pytest.raises(ConnectionError, match=r"cannot be reached \(it is starting\)"):
        await client.get_statistics()
    await until(lambda: has_given_up(client.shards[0]))


async def has_given_up(link):
    """Nobody waits, so nobody tries."""
    return link._connecting is None


async def test_nobody_tries_to_reach_a_pool_that_nobody_asks(pool):
    await pool.get_statistics()
    link = pool.shards[0]
    pool.line.break_()
    await until(lambda: is_n(is_up(link), False))
    await settle()
    assert link.n_found == 1
    await pool.get_statistics()
    assert link.n_found == 2


async def is_up(link):
    return link.is_up


# -- callers that leave ----------------------------------------------------------------------------


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("n_turns", range(12))
async def test_a_consumer_that_leaves_in_any_moment_holds_nothing(pool, make_step, n_turns):
    """From before its request is sent until after its answer is here."""
    await finish(pool.near, make_step, "a")
    await pool.get_statistics()
    leaving = asyncio.create_task(pool.lease_batch(timeout_s=60))
    for _ in range(n_turns):
        await asyncio.sleep(0)
    leaving.cancel()
    (answer,) = await asyncio.gather(leaving, return_exceptions=True)
    if isinstance(answer, asyncio.CancelledError):
        await until(lambda: all_back(pool))
        lease = await pool.lease_batch()
        assert lease.groups[0].prompt_uid == "p-a"
    else:
        await pool.ack(answer.lease_id)


async def test_a_consumer_that_leaves_while_it_waits_is_not_served(pool, make_step):
    leaving = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await until(lambda: is_n(n_waiting(pool), 1))
    await cancelled(leaving)
    await until(lambda: is_n(n_waiting(pool), 0))
    await finish(pool, make_step, "t")
    assert (await pool.lease_batch()).groups[0].delivery == 1


async def test_a_lease_on_its_way_to_a_consumer_that_leaves_goes_back(pool, make_step):
    await pool.get_statistics()
    pool.line.open.clear()
    leaving = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await finish(pool.near, make_step, "t")
    await until(lambda: is_n(groups_of(pool.near, "leased"), [1]))
    await cancelled(leaving)
    pool.line.open.set()
    await until(lambda: is_n(groups_of(pool.near, "leased"), [0]))
    assert (await pool.near.lease_batch()).groups[0].delivery == 2


async def test_a_lease_that_came_in_the_moment_its_consumer_left_goes_back(pool, make_step):
    await finish(pool.near, make_step, "t")
    await pool.get_statistics()
    link = pool.shards[0]
    leaving = asyncio.create_task(pool.lease_batch(timeout_s=60))
    answered = link._answered

    def answered_and_left(frames):
        answered(frames)
        leaving.cancel()

    link._connection._answered = answered_and_left
    with pytest.raises(asyncio.CancelledError):
        await leaving
    link._connection._answered = answered
    await until(lambda: all_back(pool))


async def test_a_lease_of_a_consumer_that_left_while_the_line_was_down_expires(pool, make_step):
    await finish(pool.near, make_step, "t")
    await pool.get_statistics()
    pool.line.open.clear()
    leaving = asyncio.create_task(pool.lease_batch(timeout_s=60, lease_s=0.5))
    await until(lambda: is_n(groups_of(pool.near, "leased"), [1]))
    await cancelled(leaving)
    pool.line.break_()
    pool.line.open.set()
    assert (await pool.lease_batch(timeout_s=60)).groups[0].delivery == 2


@pytest.mark.parametrize("n_turns", range(12))
async def test_a_producer_that_leaves_in_any_moment_leaves_no_group_open(pool, n_turns):
    await pool.get_statistics()
    leaving = asyncio.create_task(pool.open_group("p", 1, channel="few"))
    for _ in range(n_turns):
        await asyncio.sleep(0)
    leaving.cancel()
    (answer,) = await asyncio.gather(leaving, return_exceptions=True)

    async def none_is_open():
        stats = await pool.get_statistics("few")
        return stats["groups"]["open"] == 0 and stats["waiting"]["producers"] == 0

    if isinstance(answer, asyncio.CancelledError):
        await until(none_is_open)
    else:
        assert answer == "accepted"


@pytest.mark.parametrize("n_turns", range(0, 60, 2))
async def test_a_producer_of_two_shards_that_leaves_in_any_moment_leaves_no_group_open(n_turns):
    limits = ChannelConfig(max_outstanding_groups=2)
    config = PoolConfig(default=limits, durability="none")
    async with serving(config) as (_, first), serving(config) as (_, second):
        client = DataPoolClient([FoundShard(first), FoundShard(second)])
        await client.get_statistics()
        leaving = [asyncio.create_task(client.open_group(f"p{i}", 1)) for i in range(3)]
        for _ in range(n_turns):
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        answers = await asyncio.gather(*leaving, return_exceptions=True)
        heard = [answer for answer in answers if answer == "accepted"]

        async def as_heard():
            return await groups_of(client, "open") == [len(heard)] and (
                await n_waiting(client, "producers") == 0
            )

        await until(as_heard)
        if len(heard) < 2:
            assert await client.open_group("fine", 1, timeout_s=5) == "accepted"
        await client.close()


async def test_a_group_on_its_way_to_a_producer_that_leaves_is_dropped(pool):
    where = {"channel": "few"}
    for uid in "ab":
        await pool.open_group(uid, 1, **where)
    pool.line.open.clear()
    leaving = asyncio.create_task(pool.open_group("c", 1, **where))
    await pool.near.drop_group("a", "test", "few")

    async def n_submitted():
        return (await pool.near.get_statistics("few"))["groups"]["submitted"] == 3

    await until(n_submitted)
    await cancelled(leaving)
    pool.line.open.set()

    async def dropped():
        reasons = (await pool.near.get_statistics("few"))["groups"]["drop_reasons"]
        return reasons == {"test": 1, "open_cancelled": 1}

    await until(dropped)
    assert await pool.open_group("d", 1, **where, timeout_s=5) == "accepted"


async def test_a_producer_that_leaves_the_line_lets_the_next_one_in(pool):
    where = {"channel": "few"}
    for uid in "ab":
        await pool.open_group(uid, 1, **where)
    leaving = asyncio.create_task(pool.open_group("c", 1, **where))
    staying = asyncio.create_task(pool.open_group("d", 1, **where))

    async def n_producers():
        return (await pool.get_statistics("few"))["waiting"]["producers"]

    await until(lambda: is_n(n_producers(), 2))
    await cancelled(leaving)
    await pool.drop_group("a", "test", "few")
    assert await staying == "accepted"
    assert (await pool.get_statistics("few"))["groups"]["open"] == 2


# -- long waits ------------------------------------------------------------------------------------


async def test_leases_that_wait_while_the_line_breaks_are_each_served_once(pool, make_step):
    waiting = [asyncio.create_task(pool.lease_batch(timeout_s=None)) for _ in range(3)]
    link, left = pool.shards[0], 3
    for uid in "abc":
        await until(lambda left=left: is_n(n_waiting(pool.near), left))
        address, link.address = link.address, None
        pool.line.break_()
        await until(lambda: is_n(n_waiting(pool.near), 0))
        link.address = address
        await until(lambda left=left: is_n(n_waiting(pool.near), left))
        await finish(pool.near, make_step, uid)
        left -= 1
    leases = await asyncio.gather(*waiting)
    assert sorted(lease.groups[0].prompt_uid for lease in leases) == ["p-a", "p-b", "p-c"]
    stats = await pool.get_statistics("train")
    assert (stats["leases"]["active"], stats["groups"]["leased"]) == (3, 3)
    assert all(lease.groups[0].delivery == 1 for lease in leases)


async def test_a_wait_is_as_long_as_asked_whatever_breaks_meanwhile(pool):
    limited = asyncio.create_task(pool.fetch_batch(timeout_s=0.1))
    waiting = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await until(lambda: is_n(n_waiting(pool), 2))
    pool.line.break_()
    assert await limited is None
    assert not waiting.done()
    await pool.shutdown("train")
    assert await waiting is None


async def test_a_producer_waits_across_a_broken_line_and_gives_up_in_its_own_time(pool):
    where = {"channel": "few"}
    for uid in "ab":
        await pool.open_group(uid, 1, **where)
    with pytest.raises(PoolFullError):
        await pool.open_group("c", 1, **where, timeout_s=0.05)
    waiting = asyncio.create_task(pool.open_group("c", 1, **where))
    await settle()
    pool.line.break_()
    await pool.drop_group("a", "test", "few")
    assert await waiting == "accepted"


# -- hanging up, and event loops -------------------------------------------------------------------


async def test_a_client_that_hung_up_stays_so_until_it_is_called_again(pool, make_step):
    link = pool.shards[0]
    await pool.get_statistics()
    await pool.close()
    await settle()
    assert (link.is_up, link.n_found) == (False, 1)
    assert await pool.submit_step(make_step("t")) == "accepted"
    assert (link.is_up, link.n_found) == (True, 2)


async def test_hanging_up_ends_calls_that_are_under_way(pool):
    waiting = asyncio.create_task(pool.lease_batch(timeout_s=None))
    await until(lambda: is_n(n_waiting(pool), 1))
    await pool.close()
    with pytest.raises(PoolUnavailableError, match="hung up"):
        await waiting
    await until(lambda: is_n(n_waiting(pool), 0))


async def test_a_call_made_while_an_earlier_connection_is_given_up_is_answered(pool):
    link = pool.shards[0]
    for n_turns in range(8):
        lost = asyncio.create_task(pool.get_statistics())
        for _ in range(n_turns):
            await asyncio.sleep(0)
        link.close()
        answer = await pool.get_statistics("train")
        assert answer["groups"]["open"] == 0
        await asyncio.gather(lost, return_exceptions=True)
        link.close()


@pytest.fixture
def in_pool_loop():
    """Runs something in an event loop that the pool has for itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_each_event_loop_has_a_connection_of_its_own(make_step, in_pool_loop):
    """A notebook that is interrupted, `asyncio.run` called twice."""
    served = serving()
    _, address = in_pool_loop(served.__aenter__())
    client = DataPoolClient([FoundShard(address)])

    async def leave_amid_calls(turns):
        steps = [make_step("t", index=k) for k in range(20)]
        calls = [asyncio.create_task(client.submit_step(s)) for s in steps]
        waiting = asyncio.create_task(client.lease_batch(timeout_s=None))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not waiting.done()
        return calls

    async def go_on():
        first = await client.submit_step(make_step("t"))
        assert first in ("accepted", "duplicate")
        await until(lambda: is_n(n_waiting(client), 0))

    for turns in range(6):
        asyncio.run(leave_amid_calls(turns))
        asyncio.run(go_on())
    gc.collect()
    in_pool_loop(served.__aexit__(None, None, None))


def test_producers_of_several_shards_wait_for_credit_in_each_event_loop_anew(in_pool_loop):
    limits = ChannelConfig(max_outstanding_groups=2)
    served = [serving(PoolConfig(default=limits, durability="none")) for _ in range(2)]
    addresses = [in_pool_loop(each.__aenter__())[1] for each in served]
    client = DataPoolClient([FoundShard(address) for address in addresses])

    async def leave_while_waiting():
        calls = [asyncio.create_task(client.open_group(f"p{i}", 1)) for i in range(6)]
        await until(lambda: sum(call.done() for call in calls) >= 2)
        return calls

    async def open_more():
        return await asyncio.gather(
            *(client.open_group(f"p{i}", 1, timeout_s=0.05) for i in range(6)),
            return_exceptions=True,
        )

    for _ in range(2):
        asyncio.run(leave_while_waiting())
        answers = asyncio.run(open_more())
        assert answers[:2] == ["duplicate"] * 2
        assert {type(answer) for answer in answers[2:]} == {PoolFullError}
    for each in served:
        in_pool_loop(each.__aexit__(None, None, None))


# -- what a client keeps of the steps it sent ------------------------------------------------------


@pytest.fixture
def long_step(make_step):
    def build(uid, index, n_prompt=4):
        prompt = list(range(n_prompt + 2 * index))
        response = [n_prompt + 2 * index, n_prompt + 2 * index + 1]
        return make_step(
            uid,
            index=index,
            prompt_ids=prompt,
            response_ids=response,
            parent_index=index - 1 if index else None,
        )

    return build


def test_a_step_is_sent_relative_to_the_parent_that_it_names(long_step):
    recent = RecentSteps()
    assert recent.pack(long_step("a", 0), "train").header.base is None
    assert recent.pack(long_step("a", 1), "train").header.base == 0
    assert recent.pack(long_step("b", 1), "train").header.base is None
    assert recent.pack(long_step("a", 2), "val").header.base is None
    unnamed = replace(long_step("a", 2), parent_index=None)
    assert recent.pack(unnamed, "train").header.base is None


def test_nothing_is_kept_of_a_trajectory_that_ended(long_step):
    recent = RecentSteps()
    for uid in ("a", "b"):
        for index in range(3):
            recent.pack(long_step(uid, index), "train")
    recent.remember()
    recent.end("a", "train")
    assert recent.pack(long_step("a", 3), "train").header.base is None
    assert recent.pack(long_step("b", 3), "train").header.base == 2
    for uid in ("a", "a", "b"):
        recent.end(uid, "train")
    assert len(recent) == 0


def test_the_longest_unused_go_first_when_there_are_too_many(long_step):
    recent = RecentSteps(limit=4)
    for uid in "abc":
        for index in range(2):
            recent.pack(long_step(uid, index), "train")
    recent.remember()
    assert len(recent) == 4
    bases = [recent.pack(long_step(uid, 2), "train").header.base for uid in "ba"]
    assert bases == [1, None]


def test_what_is_remembered_of_a_step_does_not_grow_with_its_tokens(long_step):
    recent = RecentSteps()
    for n in (4, 400_000):
        recent.pack(long_step(f"t{n}", 0, n), "train")
    recent.remember()
    short, long = (recent._steps[f"t{n}", "train"][0] for n in (4, 400_000))
    assert sum(map(sys.getsizeof, long)) <= sum(map(sys.getsizeof, short)) + 8
    assert recent.pack(long_step("t400000", 1, 400_000), "train").header.base == 0


def test_a_prompt_that_goes_on_otherwise_is_sent_whole(long_step, make_step):
    recent = RecentSteps()
    recent.pack(make_step("a", prompt_ids=[1, 2], response_ids=[3, 4]), "train")
    other = make_step("a", index=1, prompt_ids=[1, 2, 3, 5, 6], parent_index=0)
    shorter = make_step("a", index=1, prompt_ids=[1, 2, 3], parent_index=0)
    assert recent.pack(other, "train").header.base is None
    assert recent.pack(shorter, "train").header.base is None


async def test_a_client_keeps_nothing_of_what_it_completed_or_aborted(pool, long_step):
    for uid in ("a", "b"):
        await pool.submit_steps([long_step(uid, index) for index in range(3)])
    await pool.complete_trajectory("a")
    await pool.abort_trajectory("b", "test")
    assert len(pool._outbox.recent) == 0


async def test_a_step_relative_to_one_that_the_pool_lost_goes_once_more_whole(tmp_path, make_step):
    """A pool without a journal was killed between two turns of an agent."""
    async with serving() as (_, first), serving() as (_, second):
        link = FoundShard(first)
        client = DataPoolClient([link])
        await client.submit_step(make_step("t"))
        link.address = second
        link.close()
        child = make_step("t", index=1, prompt_ids=[1, 2, 3, 4, 5, 9], parent_index=0)
        assert await client.submit_step(child) == "accepted"
        assert (await client.get_statistics("train"))["steps"]["stored"] == 1
        await client.close()
