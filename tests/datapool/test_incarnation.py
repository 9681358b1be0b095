"""A pool stays with its journal: on its node, and refused where its journal is gone or another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from datapool import (
    DataPoolActor,
    DataPoolClient,
    PoolConfig,
    PoolReplacedError,
    PoolUnavailableError,
    Step,
    start_data_pool,
)
from datapool.incarnation import Incarnation

MakeStep = Callable[..., Step]
NAMESPACE = f"incarnation-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def start(two_nodes: Cluster, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    actors: list[Any] = []

    def start_() -> Any:
        config = PoolConfig(journal_dir=tmp_path / "pool")
        actors.append(start_data_pool(config, name=uuid.uuid4().hex))
        return actors[-1]

    yield start_
    for actor in actors:
        ray.kill(actor)


async def kill(client: DataPoolClient) -> None:
    pid = (await client.describe())["pid"]
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid):  # noqa: ASYNC110 - it happens in another process
        await asyncio.sleep(0.01)


async def node_of(actor: Any) -> str:
    node: str = (await actor.open_line.remote())[0]
    return node


async def test_a_pool_comes_back_on_the_node_of_its_journal(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    actor = start()
    client = DataPoolClient(actor)
    here = ray.get_runtime_context().get_node_id()
    assert await node_of(actor) == here
    for i in range(4):
        await client.submit_step(make_step(f"t{i}", f"p{i}", is_last=True))
        await kill(client)
        assert (await client.get_statistics("train"))["groups"]["ready"] == i + 1
        assert await node_of(actor) == here


async def test_a_pool_whose_journal_is_gone_is_not_started_over_empty(
    start: Callable[[], Any], make_step: MakeStep, tmp_path: Path
) -> None:
    client = DataPoolClient(start())
    await client.submit_step(make_step("t", is_last=True))
    shutil.move(tmp_path / "pool", tmp_path / "elsewhere")
    await kill(client)
    with pytest.raises(
        PoolUnavailableError, match=r"had its journal in .*pool on .* there is none"
    ):
        await client.get_statistics()
    assert not (tmp_path / "pool").exists(), "no empty one was made in its place"
    shutil.move(tmp_path / "elsewhere", tmp_path / "pool")
    again = DataPoolClient(start())
    assert (await again.get_statistics("train"))["groups"]["ready"] == 1


async def test_a_pool_that_finds_another_journal_or_an_older_copy_is_not_started(
    start: Callable[[], Any], make_step: MakeStep, tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    client = DataPoolClient(start())
    before = Incarnation(*[(await client.describe())[k] for k in ("pool", "generation")])
    shutil.copytree(folder, tmp_path / "copy")
    await kill(client)
    await client.submit_step(make_step("t", is_last=True))
    shutil.move(folder, tmp_path / "newer")
    shutil.move(tmp_path / "copy", folder)
    await kill(client)
    with pytest.raises(PoolUnavailableError, match=rf"{before.pool} \(generation 2\) was here"):
        await client.get_statistics()

    shutil.rmtree(folder)
    other = DataPoolClient(start())
    assert (await other.describe())["pool"] != before.pool


async def test_a_client_refuses_a_pool_that_is_not_the_one_it_met(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    actor = start()
    client = DataPoolClient(actor)
    await client.submit_step(make_step("t", is_last=True))
    while client._pool.met is None:  # noqa: ASYNC110 - it is on its way
        await asyncio.sleep(0.01)
    met = client._pool.met
    assert pickle.loads(pickle.dumps(client))._pool.met == met

    newer = met._replace(generation=met.generation + 1)
    other = met._replace(pool="0" * 32)
    for known in (newer, other):
        strict = DataPoolClient(actor, known)
        with pytest.raises(PoolReplacedError) as error:
            await strict.submit_step(make_step("u", "q"))
        assert str(met) in str(error.value)
        assert str(known) in str(error.value)
        with pytest.raises(PoolReplacedError):
            await strict.lease_batch()
    await DataPoolClient(actor, met).get_statistics()
    older = DataPoolClient(actor, met._replace(generation=met.generation - 1))
    assert await older.submit_step(make_step("u", "q")) == "accepted"


async def test_a_client_knows_the_new_generation_after_a_restart(start: Callable[[], Any]) -> None:
    client = DataPoolClient(start())
    await client.get_statistics()
    with contextlib.suppress(PoolUnavailableError):
        await kill(client)
    while client._pool.met is None or client._pool.met.generation < 2:
        client._line.connection()
        await client.get_statistics()
        await asyncio.sleep(0.05)


def test_each_opening_of_a_journal_is_one_generation_more(tmp_path: Path) -> None:
    met = []
    for _ in range(3):
        actor = DataPoolActor(None, tmp_path)
        assert actor.incarnation is not None
        met.append(actor.incarnation)
        assert actor._journal is not None
        actor._journal.close()
    assert [m.generation for m in met] == [1, 2, 3]
    assert len({m.pool for m in met}) == 1
    assert DataPoolActor(PoolConfig(durability="none")).incarnation is None
