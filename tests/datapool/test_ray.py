"""The pool as its users meet it: a Ray actor, a bare handle, a client."""

from __future__ import annotations

import asyncio
import gc
import uuid

import psutil
import pytest
import ray

from stepwell.datapool import DataPoolError, PoolConfig, client_of, connect, start_data_pool
from stepwell.datapool.errors import (
    PoolUnavailableError,
    StepConflictError,
    UnknownLeaseError,
    UnknownPictureError,
    UnknownTrajectoryError,
)
from stepwell.datapool.ops import LeaseBatch
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.actor import N_WAITING
from tests.builders import until


@pytest.fixture(scope="module")
def shared_actor(cluster):
    return start_data_pool(PoolConfig(), name="shared")


@pytest.fixture
def channel():
    """A channel of this test's own, so that tests can share the actor."""
    return uuid.uuid4().hex


@pytest.fixture
def client(shared_actor):
    return client_of([shared_actor])


@pytest.fixture(scope="module")
def mortal_actor(cluster):
    """An actor whose process tests may kill: Ray starts it again."""
    return start_data_pool(name="mortal")


@pytest.fixture
def mortal(mortal_actor):
    return client_of([mortal_actor])


async def consumers(client, channel):
    return (await client.get_statistics(channel))["waiting"]["consumers"]


async def test_a_bare_handle_stores_and_reads_pictures(shared_actor, channel, make_step):
    pictures = {"a" * 64: b"red", "b" * 64: b"blue"}
    shown = tuple(Picture(digest, 28, 28, i, 1) for i, digest in enumerate(pictures))
    step = make_step(channel, prompt_ids=[9, 9], pictures=shown)
    with pytest.raises(UnknownPictureError) as error:
        await shared_actor.submit_step.remote(step, channel)
    assert error.value.digests == tuple(pictures)
    await shared_actor.put_pictures.remote(channel, pictures, channel, "p")
    assert await shared_actor.submit_step.remote(step, channel) == "accepted"
    assert await shared_actor.read_pictures.remote(channel, list(pictures), channel) == pictures


async def test_the_documented_lines_run_as_they_stand(shared_actor, make_step):
    """No other test has steps in `train` and `val` of the shared actor."""
    data_pool = shared_actor
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


async def test_calls_fired_without_waiting_take_effect_in_order(shared_actor, channel, make_step):
    references = []
    for i in range(200):
        uid = f"t{i}"
        size = 60_000 if i % 20 == 0 else 3  # large arguments travel another way
        references += [
            shared_actor.submit_step.remote(
                make_step(uid, f"p{i}", k, prompt_ids=[1] * size), channel
            )
            for k in range(3)
        ]
        references.append(shared_actor.complete_trajectory.remote(uid, reward=1.0, channel=channel))
    statistics = shared_actor.get_statistics.remote(channel)
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
    assert await client.complete_trajectory("a", 1.0, channel, {"n": 3}) == "complete"
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


async def test_a_consumer_that_leaves_leaves_the_queue(client, channel, make_step):
    leaving = asyncio.create_task(client.lease_batch(channel=channel, timeout_s=None))
    await until(lambda: is_true(consumers(client, channel)))
    leaving.cancel()

    async def nobody_waits():
        return await consumers(client, channel) == 0

    await until(nobody_waits)
    await client.submit_step(make_step("t", is_last=True), channel)
    assert (await client.lease_batch(channel=channel)).groups[0].delivery == 1


async def test_a_consumer_whose_process_died_leaves_the_queue(client, channel):
    @ray.remote(num_cpus=0)
    class Consumer:
        async def consume(self, client, channel):
            return await client.fetch_batch(channel=channel, timeout_s=None)

    consumer = Consumer.remote()
    consumer.consume.remote(client, channel)
    await until(lambda: is_true(consumers(client, channel)))
    ray.kill(consumer)

    async def nobody_waits():
        return await consumers(client, channel) == 0

    await until(nobody_waits)


async def test_a_bare_fetch_that_waits_holds_nobody_up(shared_actor, client, channel, make_step):
    """Nor do more of them than may wait at a time."""
    n = 3 * N_WAITING
    waiting = [shared_actor.fetch_batch.remote(channel=channel, timeout_s=None) for _ in range(n)]
    await until(lambda: is_n(consumers(client, channel), N_WAITING))
    assert await shared_actor.submit_step.remote(make_step("t"), channel) == "accepted"
    assert await shared_actor.complete_trajectory.remote("t", channel=channel) == "complete"
    await until(lambda: is_n(acked(shared_actor, channel), 1))
    newcomer = client_of([shared_actor])
    assert await newcomer.submit_step(make_step("u", "q"), channel) == "accepted"
    await client.shutdown(channel)
    batches = await asyncio.gather(*waiting)
    assert sorted(len(batch or ()) for batch in batches) == [0] * (n - 1) + [1]


async def is_n(awaitable, n):
    return await awaitable == n


async def acked(actor, channel):
    return (await actor.get_statistics.remote(channel))["groups"]["acked"]


async def test_a_bare_fetch_sees_what_was_submitted_before_it(shared_actor, channel, make_step):
    """Though it runs beside the others, and they were not waited for."""
    for i in range(50):
        steps = [make_step(f"t{i}", f"p{i}", k, prompt_ids=[1] * 40_000) for k in range(3)]
        shared_actor.submit_steps.remote(steps, channel)
        shared_actor.complete_trajectory.remote(f"t{i}", channel=channel)
        batch = await shared_actor.fetch_batch.remote(channel=channel)
        assert [step.trajectory_uid for step in batch] == [f"t{i}"] * 3


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


async def test_a_dead_pool_is_a_connection_error_in_one_line(cluster, make_step):
    actor = start_data_pool(name=uuid.uuid4().hex)
    client = client_of([actor])
    waiting = asyncio.create_task(client.fetch_batch(timeout_s=None))
    await until(lambda: is_true(consumers(client, "train")))
    pid = (await client.describe())["pid"]
    ray.kill(actor)
    await until(lambda: not psutil.pid_exists(pid))
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


async def kill(client):
    """`kill -9`; returns once the process is gone."""
    process = psutil.Process((await client.describe())["pid"])
    process.kill()
    await asyncio.to_thread(process.wait, 10)


async def test_a_killed_pool_still_has_what_it_acknowledged(mortal, channel, make_step):
    where = {"channel": channel}
    steps = [make_step(t, f"p{t}", i, metadata={"i": i}) for t in "ab" for i in range(3)]
    await mortal.submit_steps(steps, **where)
    await mortal.complete_trajectory("a", reward=1.0, **where)
    await mortal.submit_step(make_step("c", "pc", is_last=True), **where)
    first = await mortal.lease_batch(**where)
    await kill(mortal)

    assert await mortal.submit_steps(steps[3:], **where) == ["duplicate"] * 3
    stats = await mortal.get_statistics(channel)
    assert [stats["groups"][k] for k in ("open", "ready", "leased")] == [1, 1, 1]
    await mortal.ack(first.lease_id)
    await mortal.ack(first.lease_id)
    assert await mortal.submit_step(steps[0], **where) == "late"
    assert await mortal.complete_trajectory("b", reward=0.5, **where) == "complete"
    rest = await mortal.lease_batch(batch_size=2, **where)
    assert [g.prompt_uid for g in rest.groups] == ["pc", "pb"]


async def test_a_lease_whose_answer_was_lost_is_given_again_to_the_same_call(
    mortal, channel, make_step
):
    await mortal.submit_step(make_step("t", is_last=True), channel)
    lost = await mortal.call(LeaseBatch(channel=channel, request_id="r"))
    await kill(mortal)
    assert await mortal.call(LeaseBatch(channel=channel, request_id="r")) == lost
    assert await mortal.call(LeaseBatch(channel=channel, request_id="other")) == "nothing_yet"


@pytest.mark.slow
async def test_a_call_under_way_when_the_pool_is_killed_gets_its_answer(mortal, channel, make_step):
    fetch = asyncio.create_task(mortal.fetch_batch(channel=channel, timeout_s=60))
    await until(lambda: is_true(consumers(mortal, channel)))
    await kill(mortal)
    await mortal.submit_step(make_step("t", is_last=True), channel)
    assert len(await fetch) == 1


async def test_a_pool_without_a_journal_knows_no_lease_of_its_former_life(memory_actor, make_step):
    client = client_of([memory_actor])
    child = {"prompt_ids": [1, 2, 3, 4, 5, 9], "parent_index": 0}

    await client.submit_step(make_step("t", is_last=True))
    before = await client.lease_batch()
    await client.submit_step(make_step("u", "q"))
    await kill(client)

    # Sent relative to a step that the new pool never saw: it goes once more, whole.
    assert await client.submit_step(make_step("u", "q", index=1, **child)) == "accepted"
    await client.submit_step(make_step("t", is_last=True))
    after = await client.lease_batch()
    assert after.lease_id != before.lease_id
    with pytest.raises(UnknownLeaseError, match="before a restart"):
        await client.ack(before.lease_id)
    await client.ack(after.lease_id)


async def test_a_client_connects_again_to_the_pool_that_comes_back(mortal, channel, make_step):
    waiting = asyncio.create_task(mortal.lease_batch(1, channel=channel, timeout_s=None))
    await until(lambda: is_true(consumers(mortal, channel)))
    psutil.Process((await mortal.describe())["pid"]).kill()
    assert await mortal.submit_step(make_step("t"), channel) == "accepted"
    await mortal.complete_trajectory("t", reward=1.0, channel=channel)
    lease = await waiting
    assert lease is not None
    assert lease.steps[0].trajectory_uid == "t"


async def test_a_new_client_finds_a_pool_that_is_busy_with_a_bare_handles_calls(
    shared_actor, channel, make_step
):
    calls = [shared_actor.submit_step.remote(make_step("t", index=i), channel) for i in range(1500)]
    newcomer = client_of([shared_actor])
    assert await newcomer.submit_step(make_step("u", "q"), channel) == "accepted"
    assert ray.wait(calls[-1:], timeout=0)[1], "its calls are not through yet"
    assert set(await asyncio.gather(*calls)) == {"accepted"}


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
