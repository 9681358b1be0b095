"""The pool as its users meet it: a Ray actor, a bare handle, a client."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid

import psutil
import pytest
import ray

import stepwell.datapool.remote.client as client_module
from stepwell.datapool import (
    DataPoolClient,
    DataPoolError,
    InvalidRequestError,
    InvalidStepError,
    PoolConfig,
    PoolUnavailableError,
    StepConflictError,
    UnknownLeaseError,
    UnknownTrajectoryError,
    connect,
    start_data_pool,
)


@pytest.fixture(scope="module")
def shared_actor(cluster):
    return start_data_pool(PoolConfig(), name="shared")


@pytest.fixture
def channel():
    """A channel of this test's own, so that tests can share the actor."""
    return uuid.uuid4().hex


@pytest.fixture
def client(shared_actor):
    return DataPoolClient(shared_actor)


@pytest.fixture
def own_actor(cluster):
    """An actor that the test may kill."""
    name = uuid.uuid4().hex
    handle = start_data_pool(name=name)
    yield handle
    ray.kill(handle)


async def until(condition):
    """Wait for something that another process does; the test's timeout is the limit."""
    while not await condition():  # noqa: ASYNC110 - it happens elsewhere, no event tells of it
        await asyncio.sleep(0.02)


async def consumers(client, channel):
    return (await client.get_statistics(channel))["waiting"]["consumers"]


async def test_the_documented_lines_run_as_they_stand(own_actor, make_step):
    data_pool = own_actor
    for trajectory_uid in "abcde":
        step = make_step(trajectory_uid, "p")
        steps = [make_step(trajectory_uid, "p", i) for i in range(2)]
        data_pool.submit_step.remote(step, channel="train")
        data_pool.submit_steps.remote(steps, channel="val")
        data_pool.complete_trajectory.remote(trajectory_uid, reward=1.0, channel="train")
    batch = await data_pool.fetch_batch.remote(n_rollouts=5)
    stats = await data_pool.get_statistics.remote()
    assert [(s.trajectory_uid, s.reward, s.is_last) for s in batch] == [
        (uid, 1.0, True) for uid in "abcde"
    ]
    assert batch[0].prompt_ids.tolist() == [1, 2, 3]
    assert stats["train"]["groups"]["acked"] == 1
    assert stats["val"]["steps"]["accepted"] == 10


async def test_calls_fired_without_waiting_take_effect_in_order(own_actor, make_step):
    references = []
    for i in range(200):
        uid = f"t{i}"
        size = 60_000 if i % 20 == 0 else 3  # large arguments travel another way
        references += [
            own_actor.submit_step.remote(make_step(uid, f"p{i}", k, prompt_ids=[1] * size))
            for k in range(3)
        ]
        references.append(own_actor.complete_trajectory.remote(uid, reward=1.0))
    statistics = own_actor.get_statistics.remote("train")
    assert await asyncio.gather(*references) == (["accepted"] * 3 + ["complete"]) * 200
    assert (await statistics)["groups"]["ready"] == 200


async def test_errors_keep_their_type_through_a_bare_handle(shared_actor, channel, make_step):
    await shared_actor.submit_step.remote(make_step("t"), channel)
    with pytest.raises(StepConflictError):
        await shared_actor.submit_step.remote(make_step("t", response_ids=[9, 9]), channel)
    with pytest.raises(KeyError):
        ray.get(shared_actor.complete_trajectory.remote("unknown", channel=channel))


async def test_errors_through_the_client_are_one_plain_line(client, channel, make_step):
    await client.submit_step(make_step("t"), channel)
    with pytest.raises(StepConflictError) as conflict:
        await client.submit_step(make_step("t", response_ids=[9, 9]), channel)
    with pytest.raises(UnknownTrajectoryError) as unknown:
        await client.complete_trajectory("u", channel=channel)
    with pytest.raises(UnknownLeaseError) as lease:
        await client.ack("nobody's")
    for error in (conflict.value, unknown.value, lease.value):
        assert type(error).__module__ == "stepwell.datapool.errors"
        assert "\n" not in str(error)


async def test_every_method_of_the_client_reaches_the_pool(client, channel, make_step):
    where = {"channel": channel}
    assert await client.open_group("p", 2, 60.0, 1, {"k": 1}, **where) == "accepted"
    assert await client.open_trajectory("a", "p", 1, {"m": 2}, **where) == "accepted"
    steps = [make_step("a", index=i) for i in range(2)]
    assert await client.submit_steps(steps, **where) == ["accepted", "accepted"]
    assert await client.submit_steps([], **where) == []
    assert await client.complete_trajectory("a", 1.0, {"n": 3}, **where) == "complete"
    assert await client.submit_step(make_step("b"), **where) == "accepted"
    assert await client.abort_trajectory("b", "crash", True, **where) == "aborted"
    assert await client.abort_trajectory("b", "gave up", False, **where) == "aborted"
    lease = await client.lease_batch(channel=channel, lease_s=30)
    (group,) = lease.groups
    assert (group.n_rollouts, group.metadata) == (2, {"k": 1})
    assert group.trajectories[0].metadata == {"m": 2, "n": 3}
    assert await client.renew(lease.lease_id, 60) > lease.expires_at
    await client.nack(lease.lease_id, "test")
    lease = await client.lease_batch(channel=channel)
    await client.ack(lease.lease_id)
    await client.open_group("q", 1, **where)
    await client.drop_group("q", "test", **where)
    groups = (await client.get_statistics(channel))["groups"]
    assert (groups["submitted"], groups["acked"], groups["dropped"]) == (2, 1, 1)


async def test_a_waiting_consumer_is_woken_by_another_process(client, channel, make_step):
    @ray.remote(num_cpus=0)
    def produce(client, channel, step):
        async def run():
            await client.submit_step(step, channel)
            await client.complete_trajectory(step.trajectory_uid, channel=channel)

        asyncio.run(run())

    waiting = asyncio.create_task(client.fetch_batch(channel=channel, timeout_s=None))
    await until(lambda: is_true(consumers(client, channel)))
    produce.remote(client, channel, make_step("t"))
    assert [s.trajectory_uid for s in await waiting] == ["t"]


async def is_true(awaitable):
    return bool(await awaitable)


async def test_a_wait_is_as_long_as_asked_however_it_is_sliced(client, channel, monkeypatch):
    monkeypatch.setattr(client_module, "SLICE_S", 0.02)
    assert await client.fetch_batch(channel=channel, timeout_s=0.1) is None
    waiting = asyncio.create_task(client.lease_batch(channel=channel, timeout_s=None))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await client.shutdown(channel)
    assert await waiting is None


async def test_a_wait_goes_on_when_a_slice_of_it_ends_early(
    client, channel, monkeypatch, make_step
):
    """A clock that ticks in milliseconds ends a slice up to one too soon; here many are slices."""
    monkeypatch.setattr(client_module, "SLICE_S", 0.0015)
    endless = asyncio.create_task(client.lease_batch(channel=channel, timeout_s=None))
    limited = asyncio.create_task(client.lease_batch(channel=channel, timeout_s=60, batch_size=2))
    await asyncio.sleep(1)
    assert not endless.done()
    assert not limited.done()
    for uid in "abc":
        await client.submit_step(make_step(uid, f"p{uid}", is_last=True), channel)
    assert {len((await waiting).groups) for waiting in (endless, limited)} == {1, 2}


async def test_cancelled_callers_leave_the_queue(shared_actor, client, channel):
    reference = shared_actor.fetch_batch.remote(channel=channel, timeout_s=None)
    task = asyncio.create_task(client.lease_batch(channel=channel, timeout_s=None))

    async def both_wait():
        return await consumers(client, channel) == 2

    async def nobody_waits():
        return await consumers(client, channel) == 0

    await until(both_wait)
    ray.cancel(reference)
    task.cancel()
    await until(nobody_waits)


async def test_a_consumer_whose_process_died_leaves_the_queue(client, channel):
    @ray.remote(num_cpus=0)
    class Consumer:
        async def consume(self, client, channel):
            client_module.SLICE_S = 0.2
            return await client.fetch_batch(channel=channel, timeout_s=None)

    consumer = Consumer.remote()
    consumer.consume.remote(client, channel)
    await until(lambda: is_true(consumers(client, channel)))
    ray.kill(consumer)

    async def nobody_waits():
        # Twice, because a living consumer, too, is away between two slices.
        first = await consumers(client, channel)
        await asyncio.sleep(0.1)
        return first == 0 == await consumers(client, channel)

    await until(nobody_waits)


async def test_many_waiting_consumers_do_not_shut_out_producers(shared_actor, channel, make_step):
    waiting = [
        shared_actor.fetch_batch.remote(channel=channel, timeout_s=None) for _ in range(1100)
    ]
    assert await shared_actor.submit_step.remote(make_step("t"), channel) == "accepted"
    await shared_actor.shutdown.remote(channel)
    assert await asyncio.gather(*waiting) == [None] * 1100


class CountingHandle:
    """The real handle, counting the calls that carry operations."""

    def __init__(self, handle):
        self._handle = handle
        self.calls = 0

    def __getattr__(self, name):
        self.calls += name == "apply"
        return getattr(self._handle, name)


async def test_concurrent_submits_travel_together_and_each_gets_its_own_answer(
    shared_actor, channel, make_step
):
    handle = CountingHandle(shared_actor)
    client = DataPoolClient(handle)
    await client.submit_step(make_step("t"), channel)
    answers = await asyncio.gather(
        *(client.submit_step(make_step(f"u{i}", index=i), channel) for i in range(100)),
        client.submit_step(make_step("t"), channel),
        client.submit_step(make_step("t", response_ids=[9, 9]), channel),
        client.submit_steps([make_step("t", index=1), make_step("t", index=2)], channel),
        return_exceptions=True,
    )
    assert answers[:100] == ["accepted"] * 100
    assert answers[100] == "duplicate"
    assert isinstance(answers[101], StepConflictError)
    assert answers[102] == ["accepted", "accepted"]
    assert handle.calls <= 4


async def test_a_whole_trajectory_sent_at_once_travels_together_and_in_order(
    shared_actor, channel, make_step
):
    handle = CountingHandle(shared_actor)
    client = DataPoolClient(handle)

    async def trajectory(uid):
        return await asyncio.gather(
            client.open_trajectory(uid, "p", channel=channel),
            client.submit_step(make_step(uid), channel),
            client.complete_trajectory(uid, 1.0, channel=channel),
        )

    answers = await asyncio.gather(*(trajectory(f"t{i}") for i in range(100)))
    assert answers == [["accepted", "accepted", "complete"]] * 100
    assert handle.calls <= 4


async def test_an_operation_that_is_not_a_producers_is_refused(shared_actor):
    with pytest.raises(InvalidRequestError, match="operation is 'shutdown'"):
        await shared_actor.apply.remote([("shutdown", ())])


async def test_a_step_that_cannot_travel_fails_alone(client, channel, make_step):
    answers = await asyncio.gather(
        client.submit_step(make_step("good"), channel),
        client.submit_step(make_step("bad", metadata={"lock": threading.Lock()}), channel),
        client.submit_step(make_step("fine"), channel),
        return_exceptions=True,
    )
    assert isinstance(answers[1], InvalidStepError)
    assert {answers[0], answers[2]} <= {"accepted", "duplicate"}
    assert (await client.get_statistics(channel))["steps"]["stored"] == 2


async def test_a_producer_that_leaves_does_not_disturb_the_others(client, channel, make_step):
    leaving = asyncio.create_task(client.submit_step(make_step("a"), channel))
    staying = asyncio.create_task(client.submit_step(make_step("b"), channel))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == "accepted"


async def test_a_client_is_found_by_name_and_a_missing_pool_is_named(shared_actor, cluster):
    client = connect("shared", cluster)
    assert "train" in await client.get_statistics()
    with pytest.raises(PoolUnavailableError, match="no DataPool named 'missing'"):
        connect("missing")


async def test_a_dead_pool_is_a_connection_error_in_one_line(own_actor, make_step):
    client = DataPoolClient(own_actor)
    waiting = asyncio.create_task(client.fetch_batch(timeout_s=None))
    await until(lambda: is_true(consumers(client, "train")))
    pid = (await client.describe())["pid"]
    ray.kill(own_actor)
    while psutil.pid_exists(pid):  # noqa: ASYNC110 - until then it may well take a step
        await asyncio.sleep(0.01)
    for call in (waiting, client.submit_step(make_step("t")), client.get_statistics()):
        with pytest.raises(ConnectionError, match="the DataPool cannot be reached") as e:
            await call
        assert isinstance(e.value, DataPoolError)
        assert "\n" not in str(e.value)


def test_a_pool_that_finds_a_journal_of_another_release_says_which_and_what_to_do(
    cluster, tmp_path
):
    header = bytearray(b"SQLite format 3\0" + bytes(84))
    header[60:64] = (3).to_bytes(4, "big")  # what the release before wrote
    (tmp_path / "pool.sqlite3").write_bytes(header)
    refused = rf"^the DataPool did not start: {tmp_path}: .* has schema version 3, .*=never"
    with pytest.raises(PoolUnavailableError, match=refused):
        start_data_pool(PoolConfig(journal_dir=tmp_path), name=uuid.uuid4().hex)


@pytest.fixture
def memory_actor(cluster):
    """One without a journal."""
    handle = start_data_pool(PoolConfig(durability="none"), name=uuid.uuid4().hex)
    yield handle
    ray.kill(handle)


async def kill(handle):
    """`kill -9`; returns once the process is gone."""
    process = psutil.Process((await handle.describe.remote())["pid"])
    process.kill()
    await asyncio.to_thread(process.wait, 10)


async def test_a_killed_pool_still_has_what_it_acknowledged(own_actor, make_step):
    client = DataPoolClient(own_actor)
    steps = [make_step(t, f"p{t}", i, metadata={"i": i}) for t in "ab" for i in range(3)]
    await client.submit_steps(steps)
    await client.complete_trajectory("a", reward=1.0)
    await client.submit_step(make_step("c", "pc", is_last=True))
    first = await client.lease_batch()
    await kill(own_actor)

    assert await client.submit_steps(steps[3:]) == ["duplicate"] * 3
    stats = await client.get_statistics("train")
    assert [stats["groups"][k] for k in ("open", "ready", "leased")] == [1, 1, 1]
    await client.ack(first.lease_id)
    await client.ack(first.lease_id)
    assert await client.submit_step(steps[0]) == "late"
    assert await client.complete_trajectory("b", reward=0.5) == "complete"
    assert [g.prompt_uid for g in (await client.lease_batch(batch_size=2)).groups] == ["pc", "pb"]


async def test_a_lease_whose_answer_was_lost_is_given_again_to_the_same_call(own_actor, make_step):
    await DataPoolClient(own_actor).submit_step(make_step("t", is_last=True))
    lost = await own_actor.lease_batch.remote(request_id="r")
    await kill(own_actor)
    client = DataPoolClient(own_actor)
    await client.get_statistics()  # waits for the restart
    repeated = await own_actor.lease_batch.remote(request_id="r")
    assert repeated == lost
    assert await own_actor.lease_batch.remote(request_id="other") == "nothing_yet"


async def test_a_call_under_way_when_the_pool_is_killed_gets_its_answer(own_actor, make_step):
    client = DataPoolClient(own_actor)
    fetch = asyncio.create_task(client.fetch_batch(timeout_s=60))
    await until(lambda: is_true(consumers(client, "train")))
    await kill(own_actor)
    await client.submit_step(make_step("t", is_last=True))
    assert len(await fetch) == 1


async def test_a_pool_without_a_journal_knows_no_lease_of_its_former_life(memory_actor, make_step):
    client = DataPoolClient(memory_actor)
    child = {"prompt_ids": [1, 2, 3, 4, 5, 9], "parent_index": 0}

    await client.submit_step(make_step("t", is_last=True))
    before = await client.lease_batch()
    await client.submit_step(make_step("u"))
    await kill(memory_actor)

    # Sent relative to a step that the new pool never saw: it goes once more, whole.
    assert await client.submit_step(make_step("u", index=1, **child)) == "accepted"
    await client.submit_step(make_step("t", is_last=True))
    after = await client.lease_batch()
    assert after.lease_id != before.lease_id
    with pytest.raises(UnknownLeaseError, match="before a restart"):
        await client.ack(before.lease_id)
    await client.ack(after.lease_id)


# -- the direct line -----------------------------------------------------------------------


async def lined(client):
    """The client's connection, once it is up."""
    async with asyncio.timeout(10):
        while (connection := client._line.connection()) is None:  # noqa: ASYNC110 - it comes
            await asyncio.sleep(0.01)
    return connection


async def test_steps_and_leases_take_the_line(own_actor, make_step):
    client = DataPoolClient(own_actor)
    connection = await lined(client)
    uid = uuid.uuid4().hex
    assert await client.submit_step(make_step(uid)) == "accepted"
    await client.complete_trajectory(uid, reward=1.0)
    lease = await client.lease_batch(1, timeout_s=5)
    assert lease is not None
    assert [s.trajectory_uid for s in lease.steps] == [uid]
    assert connection._n_calls >= 3


async def test_a_refusal_is_the_pools_own_error(own_actor):
    client = DataPoolClient(own_actor)
    await lined(client)
    with pytest.raises(UnknownLeaseError):
        await client.ack("nothing")


async def test_a_consumer_that_leaves_is_not_served(own_actor, make_step):
    client = DataPoolClient(own_actor)
    await lined(client)
    leaving = asyncio.create_task(client.lease_batch(1, timeout_s=None))
    await asyncio.sleep(0.1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    uid = uuid.uuid4().hex
    await client.submit_step(make_step(uid))
    await client.complete_trajectory(uid, reward=1.0)
    assert await client.lease_batch(1, timeout_s=5) is not None


async def test_calls_outlive_the_line_and_get_a_new_one(own_actor, make_step):
    client = DataPoolClient(own_actor)
    first = await lined(client)
    waiting = asyncio.create_task(client.lease_batch(1, timeout_s=None))
    await asyncio.sleep(0.1)
    psutil.Process((await client.describe())["pid"]).kill()
    uid = uuid.uuid4().hex
    assert await client.submit_step(make_step(uid)) == "accepted"
    await client.complete_trajectory(uid, reward=1.0)
    lease = await waiting
    assert lease is not None
    assert lease.steps[0].trajectory_uid == uid
    second = await lined(client)
    assert second is not first
    await client.submit_step(make_step(uuid.uuid4().hex))
    assert second._n_calls >= 1


def test_each_event_loop_has_a_line_of_its_own(own_actor, make_step):
    client = DataPoolClient(own_actor)

    async def submit():
        connection = await lined(client)
        await client.submit_step(make_step(uuid.uuid4().hex))
        return connection._n_calls

    assert asyncio.run(submit()) == 1
    assert asyncio.run(submit()) == 1
    assert ray.is_initialized()


def test_a_client_whose_event_loop_ended_amid_its_calls_works_in_the_next_one(
    client, make_step, channel, caplog
):
    """A notebook that is interrupted, `asyncio.run` called twice."""

    async def leave_amid_calls(turns):
        # Of one trajectory: the next waits until the one before has come back.
        steps = [make_step("t", index=k) for k in range(20)]
        calls = [asyncio.create_task(client.submit_step(s, channel=channel)) for s in steps]
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not all(call.done() for call in calls)

    for turns in range(5):
        asyncio.run(leave_amid_calls(turns))
    gc.collect()
    assert "was destroyed" not in caplog.text

    async def go_on():
        return await asyncio.wait_for(client.submit_step(make_step("t"), channel=channel), 20)

    assert asyncio.run(go_on()) in ("accepted", "duplicate")
