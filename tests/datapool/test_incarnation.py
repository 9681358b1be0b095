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
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from stepwell.datapool import (
    DataPoolActor,
    DataPoolClient,
    JournalFencedError,
    JournalLockedError,
    PoolConfig,
    PoolReplacedError,
    PoolUnavailableError,
    Step,
    start_data_pool,
)
from stepwell.datapool.remote import actor as actor_module
from stepwell.datapool.remote.incarnation import Former, Incarnation
from stepwell.datapool.store.folder import read_acked

MakeStep = Callable[..., Step]
NAMESPACE = f"incarnation-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
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


def declare_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pool is made as Ray makes it after it lost sight of the one that uses `folder`."""
    acked = read_acked(folder)
    assert acked is not None
    former = Former(Incarnation(acked.journal.hex(), 1), acked.pid)
    monkeypatch.setattr(actor_module, "_was_restarted", lambda: True)
    monkeypatch.setattr(actor_module, "former_of", lambda *_: former)


async def test_a_restarted_pool_takes_nothing_over_from_another_one_than_its_former_process(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was started a second time while its killed pool was not up again."""
    killed = subprocess.Popen(  # noqa: ASYNC220 - what it prints first is waited for anyway
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "accepted t0\n"
    declare_dead(tmp_path, monkeypatch)
    killed.kill()
    killed.communicate()
    with monkeypatch.context() as once:
        once.setattr(actor_module, "_was_restarted", lambda: False)
        other = DataPoolActor(None, tmp_path)
    monkeypatch.setattr(actor_module, "CUT_OFF_S", 0.05)
    with pytest.raises(JournalLockedError, match=f"in use by process {os.getpid()}"):
        DataPoolActor(None, tmp_path)
    assert await other.submit_step(make_step("b", "q", is_last=True)) == "accepted"
    assert other._journal is not None
    other._journal.close()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_process_that_was_declared_dead_acknowledges_nothing_when_it_comes_back(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch, durability: Any
) -> None:
    config = PoolConfig(durability=durability)
    former = DataPoolActor(config, tmp_path)
    assert await former.submit_step(make_step("a", "p", is_last=True)) == "accepted"
    monkeypatch.setattr(actor_module, "CUT_OFF_S", 0.05)
    monkeypatch.setattr(actor_module, "LOCK_S", 0.05)
    with pytest.raises(JournalLockedError):
        DataPoolActor(config, tmp_path)
    declare_dead(tmp_path, monkeypatch)
    successor = DataPoolActor(config, tmp_path)

    with pytest.raises(JournalFencedError, match="another process has taken this journal over"):
        await former.submit_step(make_step("b", "q", is_last=True))
    for call in (former.lease_batch(), former.fetch_batch(), former.open_group("r", 1)):
        with pytest.raises(JournalFencedError):
            await call
    assert await successor.submit_step(make_step("b", "q", is_last=True)) == "accepted"
    assert former.incarnation is not None
    assert successor.incarnation is not None
    assert successor.incarnation.generation == former.incarnation.generation + 1
    for actor in (former, successor):
        assert actor._journal is not None
        with contextlib.suppress(JournalFencedError):
            actor._journal.close()

    again = DataPoolActor(config, tmp_path)
    batch = await again.fetch_batch(batch_size=2)
    assert batch is not None
    assert [step.trajectory_uid for step in batch.unpack()] == ["a", "b"]


async def test_a_takeover_holds_against_a_former_process_that_never_stops_writing(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process, it acknowledges as fast as it can until it is fenced."""
    former = subprocess.Popen(  # noqa: ASYNC220 - what it prints first is waited for anyway
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert former.stdout is not None
    assert former.stdout.readline() == "accepted t0\n"
    monkeypatch.setattr(actor_module, "CUT_OFF_S", 0.1)
    declare_dead(tmp_path, monkeypatch)
    successor = DataPoolActor(None, tmp_path)
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
from stepwell.datapool import DataPoolActor, DataPoolError, Step

async def run():
    actor = DataPoolActor(None, Path(sys.argv[1]))
    for i in itertools.count():
        step = Step(
            prompt_ids=[1, 2, 3], response_ids=[4, 5], rollout_log_probs=[-0.5, -0.25],
            trajectory_uid=f"t{i}", prompt_uid=f"t{i}", step_index=0, is_last=True,
        )
        try:
            print(await actor.submit_step(step), f"t{i}", flush=True)
        except DataPoolError as e:
            print(type(e).__name__, flush=True)
            return

asyncio.run(run())
"""
