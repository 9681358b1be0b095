"""A pool stays with its journal: on its node, and refused where its journal is gone or another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepwell.datapool import DataPoolClient, PoolConfig, Step, connect, start_data_pool
from stepwell.datapool.errors import (
    JournalFencedError,
    JournalLockedError,
    PoolReplacedError,
    PoolUnavailableError,
)
from stepwell.datapool.remote import service as service_module
from stepwell.datapool.remote.incarnation import Incarnation, Previous
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.start import RayShard, client_of
from stepwell.datapool.store.folder import read_last_commit
from tests.builders import until
from tests.datapool.pools import pool_here, service_of
from tests.helpers import ray_nodes

MakeStep = Callable[..., Step]
NAMESPACE = f"incarnation-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with ray_nodes({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        ray.init(cluster.address, namespace=NAMESPACE, log_to_driver=False)
        yield cluster


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
    await until(lambda: not psutil.pid_exists(pid))


async def node_of(actor: Any) -> str:
    here = ray.get_runtime_context().get_node_id()
    node: str = (await actor.address.remote(here)).node
    return node


@pytest.mark.slow
async def test_a_pool_comes_back_on_the_node_of_its_journal(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    actor = start()
    client = client_of([actor])
    here = ray.get_runtime_context().get_node_id()
    assert await node_of(actor) == here
    for i in range(2):
        await client.submit_step(make_step(f"t{i}", f"p{i}", is_last=True))
        await kill(client)
        assert (await client.get_statistics("train"))["groups"]["ready"] == i + 1
        assert await node_of(actor) == here


@pytest.mark.slow
async def test_a_client_on_another_node_reaches_the_pool_by_tcp(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    actor = start()
    client = client_of([actor])
    await client.submit_step(make_step("here", "p"))
    (elsewhere,) = (
        node["NodeID"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["NodeID"] != ray.get_runtime_context().get_node_id()
    )

    @ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(elsewhere, False))
    def work(client: DataPoolClient, step: Step) -> tuple[str, str, Any]:
        async def run() -> tuple[str, Any]:
            outcome = await client.submit_step(step)
            await client.complete_trajectory(step.trajectory_uid, 1.0)
            await client.complete_trajectory("here", 0.5)
            lease = await client.lease_batch(batch_size=2, timeout_s=60)
            assert lease is not None
            await client.ack(lease.lease_id)
            (port,) = client.shards
            assert isinstance(port, RayShard)
            assert port._connection is not None
            peer = port._connection.transport.get_extra_info("peername")
            return outcome, peer

        return ray.get_runtime_context().get_node_id(), *asyncio.run(run())

    big = make_step("there", "q", metadata={"blob": b"x" * 3_000_000})
    node, outcome, peer = await work.remote(client, big)
    assert (node, outcome) == (elsewhere, "accepted")
    address = await actor.address.remote(elsewhere)
    assert (address.node, tuple(peer)) == (ray.get_runtime_context().get_node_id(), address.tcp)
    assert (await client.get_statistics("train"))["groups"]["acked"] == 2
    await client.close()


@pytest.mark.slow
async def test_a_pool_whose_journal_is_gone_is_not_started_over_empty(
    start: Callable[[], Any], make_step: MakeStep, tmp_path: Path
) -> None:
    client = client_of([start()])
    await client.submit_step(make_step("t", is_last=True))
    shutil.move(tmp_path / "pool", tmp_path / "elsewhere")
    await kill(client)
    with pytest.raises(
        PoolUnavailableError, match=r"had its journal in .*pool on .* there is none"
    ):
        await client.get_statistics()
    assert not (tmp_path / "pool").exists(), "no empty one was made in its place"
    shutil.move(tmp_path / "elsewhere", tmp_path / "pool")
    again = client_of([start()])
    assert (await again.get_statistics("train"))["groups"]["ready"] == 1


@pytest.mark.slow
async def test_a_pool_that_finds_another_journal_or_an_older_copy_is_not_started(
    start: Callable[[], Any], make_step: MakeStep, tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    client = client_of([start()])
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
    other = client_of([start()])
    assert (await other.describe())["pool"] != before.pool


async def test_a_client_refuses_a_pool_that_is_not_the_one_it_met(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    actor = start()
    client = client_of([actor])
    await client.submit_step(make_step("t", is_last=True))
    met = met_by(client)
    assert met is not None
    assert met_by(pickle.loads(pickle.dumps(client))) == met

    newer = met._replace(generation=met.generation + 1)
    other = met._replace(pool="0" * 32)
    for known in (newer, other):
        strict = DataPoolClient([RayShard(actor, known)])
        with pytest.raises(PoolReplacedError) as error:
            await strict.submit_step(make_step("u", "q"))
        assert str(met) in str(error.value)
        assert str(known) in str(error.value)
        with pytest.raises(PoolReplacedError):
            await strict.lease_batch()
    await DataPoolClient([RayShard(actor, met)]).get_statistics()
    older = DataPoolClient([RayShard(actor, met._replace(generation=met.generation - 1))])
    assert await older.submit_step(make_step("u", "q")) == "accepted"


def holding_first(actor: Any, held: Future[Any]) -> Any:
    """A handle of the pool as Ray has it while the actor restarts: it holds what it is given, and
    fails it after two seconds."""
    asked: list[Any] = []

    def ask(here: str) -> Any:
        asked.append(actor.address.remote(here) if asked else SimpleNamespace(future=lambda: held))
        return asked[-1]

    return SimpleNamespace(address=SimpleNamespace(remote=ask))


async def test_a_pool_that_came_back_is_found_though_ray_holds_an_earlier_question(
    start: Callable[[], Any],
) -> None:
    actor, held = start(), Future[Any]()
    async with asyncio.timeout(60):
        address, here = await RayShard(holding_first(actor, held)).find()
    assert address == await actor.address.remote(here)
    assert held.cancelled()


async def test_a_pool_that_came_back_is_connected_to_though_ray_holds_an_earlier_question(
    start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of an event loop, too, though `connect` blocks."""
    handle = holding_first(start(), held := Future[Any]())
    monkeypatch.setattr(ray, "get_actor", lambda *_: handle)
    (shard,) = connect("came back").shards
    assert isinstance(shard, RayShard)
    assert shard.handle is handle
    assert held.cancelled()


def met_by(client: DataPoolClient) -> Incarnation | None:
    (port,) = client.shards
    return port.met


@pytest.mark.slow
async def test_a_client_knows_the_new_generation_after_a_restart(start: Callable[[], Any]) -> None:
    client = client_of([start()])
    await client.get_statistics()
    first = met_by(client)
    assert first is not None
    await kill(client)
    await client.get_statistics()
    assert met_by(client) == first._replace(generation=first.generation + 1)


def test_each_opening_of_a_journal_is_one_generation_more(tmp_path: Path) -> None:
    met = []
    for _ in range(3):
        pool = PoolService(None, tmp_path)
        assert pool.incarnation is not None
        met.append(pool.incarnation)
        pool.close()
    assert [m.generation for m in met] == [1, 2, 3]
    assert len({m.pool for m in met}) == 1
    assert PoolService(PoolConfig(durability="none")).incarnation is None


def previous_of(folder: Path) -> dict[str, Any]:
    """The next pool is made as Ray makes it after it lost sight of the one that uses `folder`."""
    acked = read_last_commit(folder)
    assert acked is not None
    previous = Previous(Incarnation(acked.journal.hex(), 1), acked.pid)
    return {"restarted": True, "previous": previous}


async def test_a_restarted_pool_takes_nothing_over_from_another_one_than_its_former_process(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started a second time while its killed pool was not up again."""
    killed = subprocess.Popen(  # noqa: ASYNC220 - what it prints first is waited for anyway
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "accepted t0\n"
    declared_dead = previous_of(tmp_path)
    killed.kill()
    killed.communicate()
    other = pool_here(None, tmp_path)
    monkeypatch.setattr(service_module, "CUT_OFF_S", 0.05)
    with pytest.raises(JournalLockedError, match=f"in use by process {os.getpid()}"):
        PoolService(None, tmp_path, **declared_dead)
    assert await other.submit_step(make_step("b", "q", is_last=True)) == "accepted"
    service_of(other).close()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_process_that_was_declared_dead_acknowledges_nothing_when_it_comes_back(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch, durability: Any
) -> None:
    config = PoolConfig(durability=durability)
    ended: list[str] = []
    former = pool_here(config, tmp_path, fenced=lambda: ended.append("former"))
    assert await former.submit_step(make_step("a", "p", is_last=True)) == "accepted"
    monkeypatch.setattr(service_module, "CUT_OFF_S", 0.05)
    monkeypatch.setattr(service_module, "LOCK_S", 0.05)
    with pytest.raises(JournalLockedError):
        PoolService(config, tmp_path)
    successor = pool_here(config, tmp_path, **previous_of(tmp_path))

    with pytest.raises(JournalFencedError, match="another process has taken this journal over"):
        await former.submit_step(make_step("b", "q", is_last=True))
    assert ended, "its process ends, so that its clients go to the successor"
    for call in (former.lease_batch(), former.fetch_batch(), former.open_group("r", 1)):
        with pytest.raises(JournalFencedError):
            await call
    assert await successor.submit_step(make_step("b", "q", is_last=True)) == "accepted"
    before, after = service_of(former).incarnation, service_of(successor).incarnation
    assert before is not None
    assert after == before._replace(generation=before.generation + 1)
    for pool in (former, successor):
        with contextlib.suppress(JournalFencedError):
            service_of(pool).close()

    again = pool_here(config, tmp_path)
    batch = await again.fetch_batch(batch_size=2)
    assert batch is not None
    assert [step.trajectory_uid for step in batch] == ["a", "b"]


async def test_a_takeover_holds_against_a_former_process_that_never_stops_writing(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process, it acknowledges as fast as it can until it is fenced."""
    former = subprocess.Popen(  # noqa: ASYNC220 - what it prints first is waited for anyway
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert former.stdout is not None
    assert former.stdout.readline() == "accepted t0\n"
    monkeypatch.setattr(service_module, "CUT_OFF_S", 0.1)
    successor = pool_here(None, tmp_path, **previous_of(tmp_path))
    out, _ = former.communicate()
    *accepted, end = out.splitlines()
    assert end == "JournalFencedError"
    for line in accepted:
        uid = line.split()[1]
        step = make_step(uid, uid, is_last=True)
        assert await successor.submit_step(step) == "duplicate", "acknowledged, so it is here"


BUSY = """
import asyncio, itertools, sys
from pathlib import Path
from stepwell.datapool import DataPoolClient, DataPoolError, Step
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.service import PoolService

async def run():
    pool = DataPoolClient([LocalShard(PoolService(None, Path(sys.argv[1])))])
    for i in itertools.count():
        step = Step(
            prompt_ids=[1, 2, 3], response_ids=[4, 5], rollout_log_probs=[-0.5, -0.5],
            trajectory_uid=f"t{i}", prompt_uid=f"t{i}", step_index=0, is_last=True,
        )
        try:
            print(await pool.submit_step(step), f"t{i}", flush=True)
        except DataPoolError as e:
            print(type(e).__name__, flush=True)
            return

asyncio.run(run())
"""
