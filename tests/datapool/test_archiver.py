"""The archiver as a process of its own: beside a pool that runs, killed, and after the pool."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import time
from contextlib import closing, contextmanager, suppress

import msgspec
import pytest
import ray

from stepwell.datapool import PoolConfig, client_of, start_shards
from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock, boot_id
from stepwell.datapool.config import ArchiveConfig
from stepwell.datapool.files.archive.archiver import LATE_NICE, archive_stopped
from stepwell.datapool.files.archive.launch import Settings, start
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.datapool.store.journal import Journal
from tests.builders import step_of, until
from tests.datapool.pools import PoolProcess, serving


def config_of(tmp_path, **fields):
    return PoolConfig(archive=ArchiveConfig(dir=tmp_path / "archive"), **fields)


@contextmanager
def archiving(service, address, tmp_path, **changed):
    """The archiver of a pool of this process."""
    journal = tmp_path / "pool"
    settings = Settings.of(config_of(tmp_path), journal, service.incarnation.pool, 0)
    settings = msgspec.structs.replace(settings, **changed)
    process = start(settings, address)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(20)


async def train(pool, uid, text="said"):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": f"re: {text}"}]
    await pool.submit_step(step_of(uid, f"p-{uid}", metadata={"messages": messages}))
    await pool.complete_trajectory(uid, 1.0)
    lease = await pool.lease_batch(1, timeout_s=5)
    await pool.ack(lease.lease_id)


async def all_archived(service):
    await until(lambda: service._pool.backlog["waiting"] == 0, timeout_s=60)


async def test_an_archiver_that_is_killed_again_and_again_loses_nothing(tmp_path):
    reader = ArchiveReader(tmp_path / "archive")
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        pool = DataPoolClient([LocalShard(service)])
        for life in range(3):
            with archiving(service, address, tmp_path) as process:
                for i in range(10):
                    await train(pool, f"t{life}-{i}")
                if life < 2:
                    await asyncio.sleep(0.4 * life)
                    process.send_signal(signal.SIGKILL)
                else:
                    await all_archived(service)
    found = {row["uid"]: row for row in reader.rows().items}
    assert set(found) == {f"t{life}-{i}" for life in range(3) for i in range(10)}
    assert all(row["last"] == "re: said" for row in found.values())
    assert reader.check() == []


async def test_what_leaves_a_pool_whose_clock_is_behind_is_kept_its_time(tmp_path):
    """A pool does not count the time in which its machine was suspended."""
    journal = Journal(tmp_path / "pool", "process")
    journal.put_state(CLOCK, Clock(boot_id(), time.time() - 7200.0 - time.monotonic()).dump())
    journal.close()
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        with archiving(service, address, tmp_path, keep_s=3600.0):
            for uid in ("a", "b", "c"):  # each in a file of its own; then the oldest ones go
                await train(DataPoolClient([LocalShard(service)]), uid)
                await all_archived(service)
    found = ArchiveReader(tmp_path / "archive").rows().items
    assert {row["uid"] for row in found} == {"a", "b", "c"}


def priorities(pid):
    """Scheduling policy and niceness of each thread of a process."""
    found = []
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(ProcessLookupError):
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            found.append((os.sched_getscheduler(thread), nice))
    return found


async def test_an_archiver_is_idle_beside_its_pool(tmp_path):
    """In a session of its own its priority would count for nothing (sched(7), autogroup)."""
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        with archiving(service, address, tmp_path) as process:
            await train(DataPoolClient([LocalShard(service)]), "t")
            await all_archived(service)
            assert (os.SCHED_IDLE, 19) in priorities(process.pid)
            lowered = {policy for policy, nice in priorities(process.pid) if nice > os.nice(0)}
            assert lowered == {os.SCHED_IDLE}
            assert os.getsid(process.pid) == os.getsid(0)
            assert os.getpgid(process.pid) == process.pid  # Ctrl-C is for the pool


async def test_an_archiver_that_is_late_waits_for_no_idle_processor(tmp_path):
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        with archiving(service, address, tmp_path, patience_bytes=0) as process:
            await train(DataPoolClient([LocalShard(service)]), "t")
            await all_archived(service)
            assert (os.SCHED_OTHER, min(19, os.nice(0) + LATE_NICE)) in priorities(process.pid)


@pytest.mark.slow
async def test_nothing_acknowledged_is_missing_when_pool_and_archiver_are_killed(tmp_path):
    """Trajectories that are trained, dropped, aborted or open are in the pool or in the archive."""
    folder, draw = tmp_path / "pool", random.Random(7)
    process = PoolProcess(folder, archive=tmp_path / "archive")
    pool = DataPoolClient([process.link])
    expected: dict[str, str] = {}
    for life in range(4):
        await process.start()
        await pool.describe()  # the link learns which pool it is
        settings = Settings.of(config_of(tmp_path), folder, process.link.met.pool, 0)
        archiver = start(settings, process.link.address)
        for i in range(12):
            uid = f"t{life}-{i}"
            fate = draw.choice(["acked", "dropped", "aborted", "live"])
            messages = [{"role": "assistant", "content": f"said by {uid}"}]
            step = step_of(uid, f"p-{uid}", metadata={"messages": messages})
            await pool.submit_step(step)
            expected[uid] = fate
            if fate == "acked":
                await pool.complete_trajectory(uid, 1.0)
                lease = await pool.lease_batch(1, timeout_s=10)
                await pool.ack(lease.lease_id)
            elif fate == "aborted":
                await pool.abort_trajectory(uid, "timeout")
            if fate in ("dropped", "aborted"):
                await pool.drop_group(f"p-{uid}", "test")
        await asyncio.sleep(draw.uniform(0, 2.5))  # before, in or after what it does every 2 s
        archiver.kill()
        archiver.wait()
        archiver.stdin.close()
        await process.kill()
    await pool.close()
    stopped = stopped_pool(folder, config_of(tmp_path))
    await archive_stopped(stopped, config_of(tmp_path))
    reader = ArchiveReader(tmp_path / "archive")
    for uid, fate in expected.items():
        rows = reader.find(uid)
        if fate == "live":
            (live,) = [*(await stopped.read_trajectories(trajectory_uid=uid)).unpack()]
            assert live.trajectory.steps
            assert rows == []
            continue
        (row,) = rows
        assert row["last"] == f"said by {uid}"
        assert row["left"] == ("acked" if fate == "acked" else "dropped")
        assert row["state"] == ("complete" if fate == "acked" else "aborted")
    assert reader.counts()["trajectories"] == sum(fate != "live" for fate in expected.values())
    assert reader.check() == []


async def test_what_waited_when_the_pool_ended_is_archived_by_who_looks(tmp_path):
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, _):
        await train(DataPoolClient([LocalShard(service)]), "t")
    reader = ArchiveReader(tmp_path / "archive")
    for _ in range(2):  # who looks again does nothing
        stopped = stopped_pool(tmp_path / "pool", config_of(tmp_path))
        await archive_stopped(stopped, config_of(tmp_path))
        assert [row["uid"] for row in reader.rows().items] == ["t"]
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        with archiving(service, address, tmp_path):
            await all_archived(service)  # the file of before says that it is archived
    assert reader.counts()["trajectories"] == 1
    assert len(list((tmp_path / "archive" / "trajectories").iterdir())) == 1


@pytest.mark.parametrize("waits", [True, False])
async def test_a_catalogue_of_another_release_is_made_anew_by_who_looks(tmp_path, waits):
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, address):
        await train(DataPoolClient([LocalShard(service)]), "t0")
        with archiving(service, address, tmp_path):
            await all_archived(service)
        if waits:
            await train(DataPoolClient([LocalShard(service)]), "t1")
    reader = ArchiveReader(tmp_path / "archive")
    with closing(sqlite3.connect(reader.folder.catalogue(0))) as db:
        db.executescript("DROP INDEX by_last; DELETE FROM trajectories; PRAGMA user_version = 1")
    await archive_stopped(stopped_pool(tmp_path / "pool", config_of(tmp_path)), config_of(tmp_path))
    found = [row["uid"] for row in reader.rows(order="last").items]
    assert found == ["t1", "t0"][not waits :]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_a_pool_starts_its_archiver_and_starts_it_again(tmp_path):
    config = config_of(tmp_path, journal_dir=tmp_path / "pool", shards=2)
    actors = start_shards(config, "archived")
    pool = client_of(actors)
    try:

        async def pids():
            shards = (await pool.describe())["shards"]
            return [shard["archive"]["pid"] for shard in shards]

        async def are_up():
            return all(await pids())

        await until(are_up, timeout_s=30)
        first = await pids()
        os.kill(first[0], signal.SIGKILL)
        for i in range(8):
            await train(pool, f"t{i}")

        async def is_archived():
            shards = (await pool.describe())["shards"]
            return all(s["archive"]["waiting"] == 0 for s in shards) and first != await pids()

        await until(is_archived, timeout_s=60)
    finally:
        for actor in actors:
            ray.kill(actor)
    rows = ArchiveReader(tmp_path / "archive").rows().items
    assert {row["uid"] for row in rows} == {f"t{i}" for i in range(8)}
    assert {row["shard"] for row in rows} == {0, 1}
    await until(lambda: not any(map(_lives, first)), timeout_s=20)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
