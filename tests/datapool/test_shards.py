"""One logical pool of several actors: every call through real ones."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import random
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool import (
    ChannelConfig,
    DataPoolClient,
    PoolConfig,
    start_data_pool,
    start_shards,
)
from stepwell.datapool.errors import (
    DamagedFileError,
    InvalidRequestError,
    JournalError,
    LeaseClosedError,
    LeaseExpiredError,
    PoolFullError,
    PoolUnavailableError,
    StepConflictError,
    TrajectoryConflictError,
    UnknownGroupError,
    UnknownLeaseError,
    UnknownTrajectoryError,
)
from stepwell.datapool.files.transfer import export_channel, import_channel
from stepwell.datapool.questions import Credit, WaitCredit
from stepwell.datapool.remote.actor import SHARDS_FILE
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.shards import parts, shard_of
from stepwell.datapool.remote.start import client_of, connect, share
from stepwell.datapool.sealed import this_writer, write_sealed
from stepwell.datapool.store.folder import ACKED_NAME
from tests.builders import until
from tests.datapool.pools import answers_lease

N = 2


async def test_a_client_draws_nothing_from_the_generator_that_a_run_seeds() -> None:
    """Its draws are those of the run's own code, and the same in two consumers of one seed."""
    before = random.getstate()
    two = DataPoolClient([LocalShard(PoolService()), LocalShard(PoolService())])
    assert await two.lease_batch() is None
    assert random.getstate() == before


LIMITS = {
    "few": ChannelConfig(max_outstanding_groups=4),
    "versions": ChannelConfig(max_ahead_versions=0, groups_per_version=4),
    "picky": ChannelConfig(max_staleness=0),
    "blocks": ChannelConfig(max_queue_size=2, overflow="block"),
}


@pytest.fixture(scope="module")
def handles(cluster):
    return start_shards(PoolConfig(shards=N, channels=LIMITS), name="pool")


@pytest.fixture
def client(handles):
    return client_of(handles)


@pytest.fixture
def channel():
    """A channel of this test's own, so that tests can share the actors."""
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def mortal_handles(cluster):
    return start_shards(PoolConfig(shards=N), name="mortal")


@pytest.fixture
def mortal(mortal_handles):
    """A pool of whose shards tests may kill the processes: Ray starts them again."""
    return client_of(mortal_handles)


def shards_of(client):
    """A client of each shard alone."""
    return [DataPoolClient([port]) for port in client.shards]


def uids(shard, n, prefix="p"):
    """`n` prompts of one shard."""
    found = (f"{prefix}{i}" for i in range(10_000) if shard_of(f"{prefix}{i}", N) == shard)
    return [next(found) for _ in range(n)]


def both(n, prefix="p"):
    """`n` prompts of each shard, alternating."""
    return [
        uid for pair in zip(*(uids(k, n, prefix) for k in range(N)), strict=True) for uid in pair
    ]


async def fill(client, prompts, make_step, channel="train"):
    """One complete trajectory for each prompt."""
    steps = [make_step(f"t-{uid}", uid, is_last=True) for uid in prompts]
    assert await client.submit_steps(steps, channel) == ["accepted"] * len(steps)


async def pids(client):
    return [shard["pid"] for shard in (await client.describe())["shards"]]


async def kill(client, k):
    """`kill -9`; returns once the process is gone."""
    process = psutil.Process((await pids(client))[k])
    process.kill()
    await asyncio.to_thread(process.wait, 10)


async def waits_for(client, who, n, channel="train"):
    return (await client.get_statistics(channel))["waiting"][who] == n


def prompts_of(lease):
    return [group.prompt_uid for group in lease.groups]


def assert_conserved(stats):
    groups, trajectories, steps = stats["groups"], stats["trajectories"], stats["steps"]
    assert groups["submitted"] == sum(
        groups[k] for k in ("open", "ready", "leased", "acked", "dropped")
    )
    assert trajectories["submitted"] == sum(
        trajectories[k] for k in ("open", "complete", "acked", "dropped", "aborted")
    )
    assert steps["submitted"] == sum(
        steps[k] for k in ("accepted", "duplicate", "late", "conflict", "rejected")
    )
    assert steps["accepted"] == sum(steps[k] for k in ("stored", "acked", "dropped"))


# -- placement and start -------------------------------------------------------------------------


def test_a_shard_gets_its_part_of_what_drops_and_the_whole_of_what_makes_wait():
    limits = ChannelConfig(max_queue_size=5, max_bytes=1001, max_outstanding_groups=7, n_rollouts=3)
    config = PoolConfig(
        shards=2,
        default=limits,
        channels={"val": limits.model_copy(update={"overflow": "block"})},
        memory_limit_bytes=3,
    )
    part = share(config)
    assert part.shards == 2
    assert part.memory_limit_bytes == 2
    assert part.default == limits.model_copy(update={"max_queue_size": 3, "max_bytes": 501})
    assert part.channels["val"] == config.channels["val"]


@given(st.dictionaries(st.integers(0, 5), st.integers(0, 9)), st.integers(0, 30), st.integers(0, 9))
def test_a_batch_is_taken_evenly_and_never_more_than_there_is(available, n_groups, turn):
    given_ = parts(available, n_groups, turn)
    assert sum(given_.values()) == min(n_groups, sum(available.values()))
    most = max(given_.values(), default=0)
    for k, there in available.items():
        assert min(there, most - 1) <= given_.get(k, 0) <= there


def test_credit_tells_every_limit_that_makes_producers_wait(make_pool):
    limits = {
        "max_outstanding_groups": 4,
        "max_ahead_versions": 1,
        "groups_per_version": 3,
        "max_queue_size": 7,
        "overflow": "block",
    }
    pool = make_pool(**limits)

    def of(pool, *args):
        return pool.pool.apply(WaitCredit(*args), 0.0)

    pool.open_group("p", 1)
    before = of(pool, "p").used
    assert before == {
        "max_outstanding_groups": (1, 4),
        "max_ahead_versions": (1, 6),
        "max_queue_size": (0, 7),
    }
    assert (of(pool, "p").is_known, of(pool, "q").is_known) == (True, False)
    pool.advance_version(1, now=0.0)
    assert not WaitCredit("p", before=before).is_unanswered(of(pool, "p"))
    pool.finish("p", "t")
    assert of(pool).used["max_queue_size"] == (1, 7)
    assert of(make_pool(), None, "never used") == Credit({}, False, False)


def test_another_number_of_shards_than_before_is_a_clear_error(tmp_path):
    def start(n, folder):
        start_shards(PoolConfig(shards=n, journal_dir=folder), name="another number")

    (tmp_path / "two").mkdir()
    write_sealed(tmp_path / "two" / SHARDS_FILE, {"shards": 2})
    for n in (1, 3):
        with pytest.raises(JournalError, match=rf"shards is {n}, .* written by 2 shard.*=2"):
            start(n, tmp_path / "two")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ACKED_NAME).touch()
    with pytest.raises(JournalError, match=r"shards is 2, .* written by 1 shard"):
        start(2, tmp_path / "one")
    (tmp_path / "two" / SHARDS_FILE).write_text("")
    with pytest.raises(DamagedFileError, match=r"two/shards is damaged .* put it back"):
        start(2, tmp_path / "two")


@pytest.mark.slow
def test_a_number_of_shards_that_cannot_be_noted_starts_no_pool(cluster, tmp_path):
    (tmp_path / f"{SHARDS_FILE}.{this_writer()}-{threading.get_native_id()}.tmp").mkdir()
    config = PoolConfig(shards=2, journal_dir=tmp_path)
    with pytest.raises(OSError, match=SHARDS_FILE):
        start_shards(config, name="not noted")
    said = ""
    while "no DataPool named 'not noted'" not in said:  # Ray ends the actors in its own time
        with pytest.raises(PoolUnavailableError) as gone:
            connect("not noted")
        said = str(gone.value)


def test_one_handle_of_several_shards_is_refused(cluster):
    with pytest.raises(InvalidRequestError, match=r"shards is 2, .* use start_shards"):
        start_data_pool(PoolConfig(shards=2), name="wrong")


@pytest.mark.slow
def test_a_pool_that_cannot_start_leaves_no_shard_behind(cluster, tmp_path):
    (tmp_path / "shard-1").mkdir()
    (tmp_path / "shard-1" / ACKED_NAME).write_text("this is no database, and never was one" * 99)
    with pytest.raises(PoolUnavailableError, match=r"shard 1 of 2: .*start: .*data salvage"):
        start_shards(PoolConfig(shards=2, journal_dir=tmp_path), name="broken")
    with pytest.raises(PoolUnavailableError, match="no DataPool named 'broken'"):
        connect("broken")


@pytest.mark.slow
async def test_a_shard_whose_journal_is_gone_is_not_started_empty_in_the_next_run(
    cluster, tmp_path, make_step
):
    config = PoolConfig(shards=2, journal_dir=tmp_path)
    client = client_of(start_shards(config, name="first run"))
    await fill(client, both(1), make_step)
    for port in client.shards:
        ray.kill(port.handle)
    (tmp_path / "shard-1").rename(tmp_path / "elsewhere")
    with pytest.raises(PoolUnavailableError, match=r"shard 1 of 2: .*had its journal in .*shard-1"):
        start_shards(config, name="second run")
    assert not (tmp_path / "shard-1" / ACKED_NAME).exists()
    (tmp_path / "elsewhere").rename(tmp_path / "shard-1")
    again = client_of(start_shards(config, name="third run"))
    assert (await again.get_statistics("train"))["groups"]["ready"] == 2
    for port in again.shards:
        ray.kill(port.handle)


async def test_connect_finds_all_shards_and_the_client_travels(client, channel, make_step, cluster):
    found = connect("pool", cluster)
    assert len(found.shards) == N
    await fill(found, both(1), make_step, channel)

    @ray.remote(num_cpus=0)
    def fetch(client, channel):
        return asyncio.run(client.fetch_batch(channel=channel, batch_size=2))

    steps = await fetch.remote(pickle.loads(pickle.dumps(client)), channel)
    assert {step.prompt_uid for step in steps} == set(both(1))


async def test_one_shard_is_the_pool_as_it_always_was(cluster, tmp_path, make_step):
    (handle,) = start_shards(PoolConfig(journal_dir=tmp_path), name="single")
    client = connect("single")
    assert len(client.shards) == 1
    await fill(client, ["p"], make_step)
    assert (await client.lease_batch()).lease_id == "0-1"
    assert (tmp_path / ACKED_NAME).is_file()
    ray.kill(handle)


async def test_each_shard_has_a_number_and_a_journal_of_its_own(cluster, tmp_path, make_step):
    handles = start_shards(PoolConfig(shards=2, journal_dir=tmp_path), name="journals")
    client = client_of(handles)
    described = await client.describe()
    assert described["n_shards"] == 2
    assert [shard["shard"] for shard in described["shards"]] == [0, 1]
    assert [shard["journal"]["folder"] for shard in described["shards"]] == [
        str(tmp_path / f"shard-{k}") for k in range(2)
    ]
    assert len(set(await pids(client))) == 2
    await fill(client, both(1), make_step)
    lease = await client.lease_batch(batch_size=2)
    assert sorted(lease.lease_id.split("+")) == ["0-1", "1-1"]
    for handle in handles:
        ray.kill(handle)


# -- producers -----------------------------------------------------------------------------------


async def test_a_group_is_in_the_shard_of_its_prompt_and_nowhere_else(client, channel, make_step):
    prompts = both(3)
    await fill(client, prompts, make_step, channel)
    for k, shard in enumerate(shards_of(client)):
        page = await shard.list_groups(channel)
        assert [group.prompt_uid for group in page.items] == [
            uid for uid in prompts if shard_of(uid, N) == k
        ]


async def test_outcomes_come_in_the_order_of_the_steps(client, channel, make_step):
    a, b = both(1)
    await client.submit_step(make_step("ta", a), channel)
    steps = [
        make_step("tb", b),
        make_step("ta", a),
        make_step("tb", b, 1),
        make_step("ta", a, 1),
    ]
    outcomes = await client.submit_steps(steps, channel)
    assert outcomes == ["accepted", "duplicate", "accepted", "accepted"]
    with pytest.raises(StepConflictError, match=r"1 of 3 steps refused; the others are applied"):
        await client.submit_steps(
            [make_step("tb", b, 2), make_step("ta", a, response_ids=[9, 9]), make_step("tb", b, 3)],
            channel,
        )
    stats = await client.get_statistics(channel)
    assert (stats["steps"]["stored"], stats["steps"]["conflict"]) == (6, 1)
    assert_conserved(stats)


async def test_calls_that_are_made_at_once_take_effect_in_order(client, channel, make_step):
    prompts = both(20)

    def history():
        for a, b in zip(prompts[::2], prompts[1::2], strict=True):
            yield client.open_trajectory(f"t-{a}", a, metadata={"k": 1}, channel=channel)
            yield client.submit_steps([make_step(f"t-{uid}", uid) for uid in (a, b)], channel)
            yield client.submit_step(make_step(f"t-{b}", b, 1), channel)
            yield client.complete_trajectory(f"t-{a}", 1.0, channel=channel)
            yield client.complete_trajectory(f"t-{b}", 1.0, channel=channel)

    answers = await asyncio.gather(*history())
    one = ["accepted", ["accepted"] * 2, "accepted", "complete", "complete"]
    assert answers == one * 20


async def test_calls_for_a_trajectory_that_another_client_opened_find_its_shard(
    handles, channel, make_step
):
    first, other = client_of(handles), client_of(handles)
    where = {"channel": channel}
    for k in range(N):
        (uid,) = uids(k, 1)
        for name in ("a", "b"):
            await first.open_trajectory(f"{name}{k}", uid, **where)
            await first.submit_step(make_step(f"{name}{k}", uid), channel)
        assert await other.set_reward(f"a{k}", 0.5, **where) == "accepted"
        assert (await other.mark(trajectory_uid=f"a{k}", tags=["x"], **where)).tags == {"x"}
        assert (await other.mark(uid, note="seen", **where)).note == "seen"
        assert await other.complete_trajectory(f"a{k}", **where) == "complete"
        assert await other.abort_trajectory(f"b{k}", "crash", **where) == "aborted"
    with pytest.raises(UnknownTrajectoryError, match="'nobody' is unknown"):
        await other.complete_trajectory("nobody", channel=channel)
    with pytest.raises(UnknownGroupError):
        await other.drop_group("nobody", "test", channel)
    with pytest.raises(InvalidRequestError, match="pass one of"):
        await other.mark()
    for k in range(N):
        await other.drop_group(uids(k, 1)[0], "test", channel)
    assert (await other.get_statistics(channel))["groups"]["drop_reasons"] == {"test": 2}


async def test_one_trajectory_under_two_prompts_is_refused(client, channel, make_step):
    a, b = both(1)
    await client.submit_step(make_step("t", a), channel)
    with pytest.raises(TrajectoryConflictError):
        await client.submit_step(make_step("t", b, 1), channel)
    with pytest.raises(TrajectoryConflictError):
        await client.open_trajectory("t", b, channel=channel)
    assert await client.complete_trajectory("t", channel=channel) == "complete"


@pytest.mark.parametrize("begins", ["open_trajectory", "submit_step"])
async def test_a_trajectory_that_the_pool_refuses_does_not_settle_where_it_lives(
    client, make_step, begins
):
    *full, refused = uids(0, 3, begins)
    await fill(client, full, make_step, "blocks")
    t = f"t-{begins}"
    call = {
        "open_trajectory": lambda: client.open_trajectory(t, refused, 0, {}, "blocks", 0),
        "submit_step": lambda: client.submit_step(make_step(t, refused), "blocks", 0),
    }[begins]
    with pytest.raises(PoolFullError):
        await call()
    (uid,) = uids(1, 1, begins)
    assert await client.open_trajectory(t, uid, channel="blocks", timeout_s=0) == "accepted"
    assert await client.submit_step(make_step(t, uid), "blocks", timeout_s=0) == "accepted"
    with pytest.raises(TrajectoryConflictError):
        await client.open_trajectory(t, refused, channel="blocks", timeout_s=0)
    for each in (*full, uid):
        await client.drop_group(each, "test", "blocks")


async def test_a_refused_step_does_not_settle_where_its_trajectory_lives(
    client, channel, make_step
):
    a, b = both(1)
    bad = make_step("t", a, metadata={"f": lambda: None})
    with pytest.raises(ValueError, match="cannot be carried"):
        await client.submit_step(bad, channel)
    assert await client.submit_step(make_step("t", b), channel) == "accepted"


async def test_credit_is_of_the_whole_pool_and_no_shard_stops_a_producer_alone(client, make_step):
    # All of one shard: with half of the credit each, the third one would wait for a consumer that
    # waits for four.
    prompts = uids(0, 6, "credit")
    for uid in prompts[:4]:
        assert await client.open_group(uid, 1, channel="few", timeout_s=0) == "accepted"
    assert await client.open_group(prompts[0], 1, channel="few", timeout_s=0) == "duplicate"
    for uid in (prompts[4], *uids(1, 1, "credit")):
        with pytest.raises(PoolFullError, match=r"4 of 4 .max_outstanding_groups. in 2 shards"):
            await client.open_group(uid, 1, channel="few", timeout_s=0)
    other = uids(1, 1, "credit")
    first = asyncio.create_task(client.open_group(other[0], 1, channel="few"))
    second = asyncio.create_task(client.open_group(prompts[4], 1, channel="few"))

    await until(lambda: waits_for(client, "producers", 1, "few"))
    assert await client.open_group(prompts[1], 1, channel="few", timeout_s=0) == "duplicate"
    await fill(client, prompts[:1], make_step, "few")
    lease = await client.lease_batch(channel="few")
    assert await first == "accepted"
    assert not second.done()
    await client.drop_group(other[0], "test", "few")
    assert await second == "accepted"
    await client.ack(lease.lease_id)
    stats = await client.get_statistics("few")
    assert stats["groups"]["open"] + stats["groups"]["ready"] == 4
    assert stats["waiting"]["producers"] == 0


async def test_groups_opened_at_once_do_not_exceed_the_credit(client):
    prompts = both(4, "ahead")
    opened = await asyncio.gather(
        *(client.open_group(uid, 1, channel="versions", timeout_s=0.2) for uid in prompts),
        return_exceptions=True,
    )
    assert opened.count("accepted") == 4
    assert sum(isinstance(answer, PoolFullError) for answer in opened) == 4
    waiting = asyncio.create_task(client.open_group("more", 1, channel="versions"))
    await client.advance_version(1, "versions")
    assert await waiting == "accepted"
    assert (await client.get_statistics("versions"))["policy_version"] == 1


# -- consumers -----------------------------------------------------------------------------------


async def test_a_full_channel_is_told_within_the_time_that_a_producer_gives(cluster, make_step):
    limits = ChannelConfig(overflow="block", max_queue_size=1)
    config = PoolConfig(durability="none", shards=N, default=limits)
    handles = start_shards(config, name=uuid.uuid4().hex)
    client = client_of(handles)
    full, other = uids(0, 2), uids(1, 1)
    await client.submit_step(make_step("a", full[0], is_last=True))
    for timeout_s in (0, 0.05):
        with pytest.raises(PoolFullError, match="holds max_queue_size=1"):
            await client.open_trajectory("b", full[1], timeout_s=timeout_s)
        with pytest.raises(PoolFullError):
            await client.resume_trajectory("b", full[1], timeout_s=timeout_s)
        with pytest.raises(PoolFullError):
            await client.submit_step(make_step("b", full[1]), timeout_s=timeout_s)
    assert await client.submit_step(make_step("a2", full[0]), timeout_s=0) == "accepted"
    assert await client.open_trajectory("c", other[0], timeout_s=0) == "accepted"
    waiting = asyncio.create_task(client.open_trajectory("b", full[1], timeout_s=60))
    assert await client.fetch_batch(timeout_s=5) is not None
    assert await waiting == "accepted"
    for handle in handles:
        ray.kill(handle)


async def test_a_batch_is_filled_by_all_shards_and_acked_as_one(client, channel, make_step):
    prompts = both(2)
    await fill(client, prompts, make_step, channel)
    lease = await client.lease_batch(channel=channel, batch_size=4, lease_s=60)
    assert sorted(prompts_of(lease)) == sorted(prompts)
    assert lease.lease_id.count("+") == 1
    assert await client.renew(lease.lease_id, 600) > lease.expires_at
    await client.ack(lease.lease_id)
    await client.ack(lease.lease_id)
    with pytest.raises(LeaseClosedError, match="2 of 2 parts"):
        await client.nack(lease.lease_id)
    stats = await client.get_statistics(channel)
    assert (stats["groups"]["acked"], stats["leases"]["acked"]) == (4, 2)
    assert_conserved(stats)


async def test_an_unknown_lease_is_named_whatever_it_looks_like(client):
    for lease_id in ("nobody's", "9-1", "0-999999999", "", "0-1+7-1"):
        with pytest.raises(UnknownLeaseError):
            await client.ack(lease_id)


async def test_a_part_that_expired_does_not_keep_the_others_from_being_acked(
    client, channel, make_step
):
    await fill(client, both(1), make_step, channel)
    lease = await client.lease_batch(channel=channel, batch_size=2)
    (part,) = [p for p in lease.lease_id.split("+") if p.startswith("1")]
    await shards_of(client)[1].renew(part, 0.01)

    async def expired():
        return (await client.get_statistics(channel))["leases"]["expired"] == 1

    await until(expired)
    with pytest.raises(LeaseExpiredError, match=r"1 of 2 parts .* the others are"):
        await client.ack(lease.lease_id)
    stats = await client.get_statistics(channel)
    assert (stats["groups"]["acked"], stats["groups"]["ready"]) == (1, 1)
    assert (await client.lease_batch(channel=channel)).groups[0].delivery == 2


async def test_a_batch_waits_for_the_group_that_is_missing_in_whatever_shard(
    client, channel, make_step
):
    a, b, c = *uids(0, 2), *uids(1, 1)
    await fill(client, [a], make_step, channel)
    assert await client.lease_batch(channel=channel, batch_size=2) is None
    assert await client.lease_batch(channel=channel, batch_size=2, timeout_s=0.05) is None
    for late in (b, c):
        waiting = asyncio.create_task(
            client.lease_batch(channel=channel, batch_size=2, timeout_s=60)
        )
        await until(lambda: waits_for(client, "consumers", 1, channel))
        await fill(client, [late], make_step, channel)
        lease = await waiting
        assert set(prompts_of(lease)) == {a, late}
        await client.nack(lease.lease_id)
        await client.drop_group(late, "test", channel)
    assert (await client.get_statistics(channel))["waiting"]["consumers"] == 0


async def test_two_consumers_of_large_batches_do_not_wait_for_each_other(
    handles, channel, make_step
):
    clients = [client_of(handles) for _ in range(3)]
    consumers = [
        asyncio.create_task(c.lease_batch(channel=channel, batch_size=4, timeout_s=60))
        for c in clients
    ]
    for uid in both(6):  # one by one, so that every consumer sees each come
        await fill(clients[0], [uid], make_step, channel)
    leases = await asyncio.gather(*consumers)
    served = [uid for lease in leases for uid in prompts_of(lease)]
    assert sorted(served) == sorted(both(6))
    for lease in leases:
        await clients[0].ack(lease.lease_id)
    assert_conserved(await clients[0].get_statistics(channel))


async def test_shards_serve_in_turn(client, channel, make_step):
    await fill(client, both(4), make_step, channel)
    served = [prompts_of(await client.lease_batch(channel=channel))[0] for _ in range(8)]
    homes = [shard_of(uid, N) for uid in served]
    assert homes in ([0, 1] * 4, [1, 0] * 4)


async def test_a_batch_that_falls_short_goes_back_whole(client, make_step):
    # Two of the three are too old, which shows only when they are taken.
    prompts = [*uids(0, 2, "stale"), *uids(1, 1, "stale")]
    old = [make_step(f"t-{uid}", uid, is_last=True) for uid in prompts[1:]]
    await client.submit_steps(old, "picky")
    await client.advance_version(1, "picky")
    fresh = make_step("fresh", prompts[0], is_last=True, policy_version=1)
    await client.submit_step(fresh, "picky")
    assert await client.lease_batch(channel="picky", batch_size=3) is None
    stats = await client.get_statistics("picky")
    assert stats["groups"]["drop_reasons"] == {"stale": 2}
    assert (stats["groups"]["ready"], stats["groups"]["leased"]) == (1, 0)
    lease = await client.lease_batch(channel="picky")
    assert prompts_of(lease) == prompts[:1]
    await client.ack(lease.lease_id)


async def test_a_consumer_that_leaves_holds_nothing(client, channel, make_step, monkeypatch):
    await fill(client, both(2), make_step, channel)
    link = client.shards[1]
    answered = link._connection._answered
    late = []

    def held_up(frames):
        for frame in frames:
            (late.append if answers_lease(link, frame) else lambda f: answered([f]))(bytes(frame))

    monkeypatch.setattr(link._connection, "_answered", held_up)
    leaving = asyncio.create_task(client.lease_batch(channel=channel, batch_size=2))
    await until(lambda: late)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    monkeypatch.undo()
    answered(late)

    async def all_back():
        groups = (await client.get_statistics(channel))["groups"]
        return (groups["ready"], groups["leased"]) == (4, 0)

    await until(all_back)


@pytest.mark.parametrize("n_turns", range(0, 40, 3))
async def test_a_consumer_that_leaves_in_any_moment_holds_no_part_of_a_batch(
    client, channel, make_step, n_turns
):
    await fill(client, both(2), make_step, channel)
    leaving = asyncio.create_task(client.lease_batch(channel=channel, batch_size=4, timeout_s=60))
    for _ in range(n_turns):
        await asyncio.sleep(0.0002)
    leaving.cancel()
    (lease,) = await asyncio.gather(leaving, return_exceptions=True)
    if not isinstance(lease, asyncio.CancelledError):
        await client.nack(lease.lease_id)

    async def all_back():
        stats = await client.get_statistics(channel)
        counts = stats["groups"]["ready"], stats["groups"]["leased"], stats["waiting"]["consumers"]
        return counts == (4, 0, 0)

    await until(all_back)


async def test_shutting_down_ends_the_waiting_and_release_gives_all_back(
    client, channel, make_step
):
    await fill(client, both(2), make_step, channel)
    await client.lease_batch(channel=channel, batch_size=4)
    assert await client.release_leases(channel) == 2
    waiting = asyncio.create_task(client.lease_batch(channel=channel, batch_size=5, timeout_s=None))
    await until(lambda: waits_for(client, "consumers", 1, channel))
    await client.shutdown(channel)
    assert await waiting is None
    assert len((await client.lease_batch(channel=channel, batch_size=4)).groups) == 4
    assert (await client.get_statistics(channel))["shut_down"] is True


# -- reading -------------------------------------------------------------------------------------


async def test_statistics_are_of_the_whole_pool(client, channel, make_step):
    a, b = both(1)
    await client.open_group(a, 2, channel=channel)
    await client.submit_step(make_step("ta", a, policy_version=3), channel)
    await client.submit_step(make_step("tb", b, is_last=True, policy_version=5), channel)
    await client.abort_trajectory("ta", "crash", channel=channel)
    stats = await client.get_statistics(channel)
    assert [stats["groups"][k] for k in ("submitted", "open", "ready")] == [2, 1, 1]
    assert stats["trajectories"]["abort_reasons"] == {"crash": 1}
    assert stats["oldest_policy_version_ready"] == 5
    assert [group["prompt_uid"] for group in stats["oldest_open"]] == [a]
    assert stats["oldest_open_age_s"] > 0
    assert_conserved(stats)
    everything = await client.get_statistics()
    assert {"train", "val", channel} <= set(everything)
    assert everything[channel]["groups"] == stats["groups"]


async def test_events_of_all_shards_are_one_stream(client, channel, make_step):
    start = (await client.get_events(channel=channel)).cursor
    prompts = both(5)
    for uid in prompts:
        await fill(client, [uid], make_step, channel)
    seen, cursor = [], start
    while True:
        page = await client.get_events(cursor, channel, ["ready"], limit=3)
        assert not page.lost
        if not page.events:
            break
        assert len(page.events) <= 3
        seen += page.events
        cursor = page.cursor
    assert [event.prompt_uid for event in seen] == prompts
    waiting = asyncio.create_task(client.get_events(cursor, channel, timeout_s=60))
    await client.drop_group(prompts[0], "test", channel)
    (event,) = (await waiting).events
    assert (event.kind, event.prompt_uid) == ("dropped", prompts[0])
    assert (await client.get_events("elsewhere:7,elsewhere:9", channel)).lost
    for wrong in ("0:1", "elsewhere:²,elsewhere:9", f"elsewhere:{'9' * 5000},elsewhere:9"):
        with pytest.raises(InvalidRequestError, match="pass one that the page before"):
            await client.get_events(wrong)


async def test_listings_and_dry_runs_go_through_all_shards(client, channel, make_step):
    prompts = both(5)
    await fill(client, prompts, make_step, channel)
    for read in (client.list_groups, client.list_trajectories):
        found, cursor = [], None
        while True:
            page = await read(channel, cursor, 3)
            found += page.items
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(row.prompt_uid for row in found) == sorted(prompts)
        for uid in prompts[:2]:
            page = await read(channel, prompt_uid=uid)
            assert ([row.prompt_uid for row in page.items], page.cursor) == ([uid], None)
        for cursor in ("7/", "x", "0/x"):
            with pytest.raises(InvalidRequestError, match="cursor is"):
                await read(channel, cursor)
    for uid in prompts[:2]:
        page = await client.list_trajectories(channel, trajectory_uid=f"t-{uid}")
        assert [row.prompt_uid for row in page.items] == [uid]
    run = await client.dry_run(channel=channel, batch_size=2)
    assert sorted(d.prompt_uid for d in run.decisions) == sorted(prompts)
    assert run.counts["serve"]


async def test_what_is_exported_from_all_shards_is_imported_into_all(
    client, channel, make_step, tmp_path
):
    prompts = both(3)
    await fill(client, prompts, make_step, channel)
    summary = await export_channel(client, tmp_path / "x.jsonl", channel)
    assert summary.n_trajectories == 6
    copy = f"{channel}-copy"
    assert (await import_channel(client, tmp_path / "x.jsonl", copy)).n_groups == 6
    steps = await client.fetch_batch(channel=channel, batch_size=6)
    copies = await client.fetch_batch(channel=copy, batch_size=6)
    assert sorted(map(key, steps)) == sorted(map(key, copies))


def key(step):
    return step.trajectory_uid, step.step_index, step.response_ids.tolist()


# -- failure -------------------------------------------------------------------------------------


@contextmanager
def kept_from_restarting(folder):
    """Lock a journal's folder: meanwhile its shard cannot come back (`CUT_OFF_S` at most)."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@pytest.mark.slow
async def test_a_dead_shard_stops_nobody_but_its_own_groups(mortal, channel, make_step):
    mine, theirs = uids(0, 30), uids(1, 30)
    await fill(mortal, [*mine[:10], *theirs[:10]], make_step, channel)
    before = await mortal.lease_batch(channel=channel, batch_size=4)
    assert {shard_of(uid, N) for uid in prompts_of(before)} == {0, 1}
    waiting = asyncio.create_task(mortal.lease_batch(channel=channel, batch_size=50, timeout_s=60))
    await until(lambda: waits_for(mortal, "consumers", 1, channel))
    folder = Path((await mortal.describe())["shards"][1]["journal"]["folder"])
    await kill(mortal, 1)
    with kept_from_restarting(folder):
        # Of shard 1, or of both: they wait for it.
        ack = asyncio.create_task(mortal.ack(before.lease_id))
        late = asyncio.create_task(fill(mortal, theirs[10:], make_step, channel))
        merged = asyncio.create_task(mortal.get_statistics(channel))
        # Of shard 0: nothing happens to them.
        await mortal.open_trajectory("opened", mine[10], channel=channel)
        await mortal.submit_step(make_step("opened", mine[10]), channel)
        assert await mortal.complete_trajectory("opened", channel=channel) == "complete"
        await mortal.mark(mine[10], channel=channel, note="seen")
        await fill(mortal, mine[11:], make_step, channel)
        assert not any(call.done() for call in (ack, late, merged, waiting))
    await ack
    await late
    await merged
    served = prompts_of(await waiting)
    while len(served) < 60 - 4:
        lease = await mortal.lease_batch(channel=channel, timeout_s=60)
        served += prompts_of(lease)
        await mortal.ack(lease.lease_id)
    assert sorted([*served, *prompts_of(before)]) == sorted([*mine, *theirs])
    stats = await mortal.get_statistics(channel)
    assert stats["groups"]["submitted"] == 60
    assert_conserved(stats)


@pytest.mark.long
async def test_under_load_everything_acknowledged_is_served_once_across_kills(
    mortal, channel, make_step
):
    n = 100
    prompts = both(n, "load")
    served: list[str] = []

    async def produce(part):
        client = pickle.loads(pickle.dumps(mortal))
        for i, uid in enumerate(part):
            await client.submit_steps([make_step(f"t-{uid}", uid, j) for j in range(2)], channel)
            assert await client.complete_trajectory(f"t-{uid}", 1.0, channel=channel) == "complete"
            if i % 25 == 0:
                await asyncio.sleep(0.01)

    async def consume():
        client = pickle.loads(pickle.dumps(mortal))
        while len(served) < 2 * n:
            lease = await client.lease_batch(channel=channel, batch_size=2, timeout_s=0.5)
            if lease is not None:
                await client.ack(lease.lease_id)
                served.extend(prompts_of(lease))

    async def disturb():
        for k in (1, 0):
            await asyncio.sleep(0.2)
            await kill(mortal, k)

            async def is_back(k=k):
                return "pid" in (await mortal.describe())["shards"][k]

            await until(is_back)

    await asyncio.gather(
        *(produce(prompts[i::3]) for i in range(3)), consume(), consume(), disturb()
    )
    assert sorted(served) == sorted(prompts)
    stats = await mortal.get_statistics(channel)
    assert (stats["groups"]["acked"], stats["steps"]["acked"]) == (2 * n, 4 * n)
    assert_conserved(stats)


async def test_a_shard_that_is_gone_for_good_is_an_error_and_not_silence(cluster, make_step):
    own = client_of(start_shards(PoolConfig(shards=N), name=uuid.uuid4().hex))
    await fill(own, uids(1, 1), make_step)
    waiting = asyncio.create_task(own.lease_batch(batch_size=2, timeout_s=None))
    await until(lambda: waits_for(own, "consumers", 1))
    ray.kill(own.shards[0].handle)
    with pytest.raises(PoolUnavailableError, match="cannot be reached"):
        await waiting
    with pytest.raises(PoolUnavailableError):
        await own.lease_batch()
    assert await own.submit_step(make_step("t", uids(1, 2)[1])) == "accepted"
    ray.kill(own.shards[1].handle)


async def test_a_lease_whose_answer_was_lost_with_its_shard_is_given_again(
    mortal, channel, make_step, monkeypatch
):
    await fill(mortal, both(1), make_step, channel)
    await mortal.get_statistics()
    link = mortal.shards[1]
    heard = link._connection._answered
    is_granted = asyncio.Event()

    def lose_leases(frames):
        for frame in frames:
            if answers_lease(link, frame):
                is_granted.set()
            else:
                heard([frame])

    monkeypatch.setattr(link._connection, "_answered", lose_leases)
    leasing = asyncio.create_task(mortal.lease_batch(channel=channel, batch_size=2, timeout_s=60))
    await is_granted.wait()
    await kill(mortal, 1)
    lease = await leasing
    assert sorted(prompts_of(lease)) == sorted(both(1))
    assert (await mortal.get_statistics(channel))["leases"]["active"] == 2
    await mortal.ack(lease.lease_id)


async def test_what_has_a_tag_goes_from_all_shards_whatever_dies_meanwhile(
    mortal, channel, make_step
):
    prompts = both(2, "tagged")
    await fill(mortal, prompts, make_step, channel)
    for uid in prompts:
        await mortal.mark(uid, channel=channel, tags=["ann"])
    lease = await mortal.lease_batch(channel=channel, batch_size=2)
    deleted = await mortal.delete(tag="ann")
    assert sorted(deleted.leased) == sorted(f"t-{group.prompt_uid}" for group in lease.groups)
    assert sorted(deleted.trajectories + deleted.leased) == sorted(f"t-{uid}" for uid in prompts)
    await kill(mortal, 0)
    await mortal.nack(lease.lease_id)
    assert await mortal.lease_batch(channel=channel) is None
    assert (await mortal.get_statistics(channel))["groups"]["drop_reasons"] == {"deleted": 4}
    assert (await mortal.delete(trajectory_uid=f"t-{prompts[0]}")).trajectories == ()


async def test_one_trajectory_goes_from_its_shard_and_its_group_goes_on(mortal, channel, make_step):
    for uid in (prompts := both(1)):
        await mortal.open_group(uid, 2, channel=channel)
        for k in range(2):
            await mortal.submit_step(make_step(f"t{k}-{uid}", uid, is_last=True), channel)
    for uid in prompts:
        assert (await mortal.delete_trajectory(f"t0-{uid}")).trajectories == (f"t0-{uid}",)
        assert (await mortal.delete_trajectory(f"t0-{uid}")).trajectories == ()
    await kill(mortal, 0)
    lease = await mortal.lease_batch(channel=channel, batch_size=2)
    served = [t.trajectory_uid for group in lease.groups for t in group.trajectories]
    assert sorted(served) == sorted(f"t1-{uid}" for uid in prompts)
    late = [await mortal.submit_step(make_step(f"t0-{uid}", uid, 1), channel) for uid in prompts]
    assert late == ["late", "late"]
