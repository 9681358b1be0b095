"""The archiver as a process of its own: beside a pool that runs, killed, and after the pool."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager

import pytest
import ray

from stepwell.datapool import PoolConfig, client_of, start_shards
from stepwell.datapool.config import ArchiveConfig
from stepwell.datapool.files.archive.archiver import archive_stopped
from stepwell.datapool.files.archive.launch import Settings, start
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.link import LocalPort
from stepwell.datapool.remote.stopped import stopped_pool
from tests.builders import step_of, until
from tests.datapool.pools import serving


def config_of(tmp_path, **fields):
    return PoolConfig(archive=ArchiveConfig(dir=tmp_path / "archive"), **fields)


@contextmanager
def archiving(service, door, tmp_path):
    """The archiver of a pool of this process."""
    journal = tmp_path / "pool"
    settings = Settings.of(config_of(tmp_path), journal, service.incarnation.pool, 0)
    process = start(settings, door)
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
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, door):
        pool = DataPoolClient([LocalPort(service)])
        for life in range(3):
            with archiving(service, door, tmp_path) as process:
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


async def test_what_waited_when_the_pool_ended_is_archived_by_who_looks(tmp_path):
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, _):
        await train(DataPoolClient([LocalPort(service)]), "t")
    reader = ArchiveReader(tmp_path / "archive")
    for _ in range(2):  # who looks again does nothing
        stopped = stopped_pool(tmp_path / "pool", config_of(tmp_path))
        await archive_stopped(stopped, config_of(tmp_path))
        assert [row["uid"] for row in reader.rows().items] == ["t"]
    async with serving(config_of(tmp_path), tmp_path / "pool") as (service, door):
        with archiving(service, door, tmp_path):
            await all_archived(service)  # the file of before says that it is archived
    assert reader.counts()["trajectories"] == 1
    assert len(list((tmp_path / "archive" / "trajectories").iterdir())) == 1


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
