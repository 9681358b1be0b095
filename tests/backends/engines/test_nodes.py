"""A server over several nodes: its parts start, end and come back together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.nodes import EngineGroup, EngineNode, start_engine_group
from stepwell.backends.engines.ports import Host, NodeLaunch
from stepwell.backends.engines.server import wait_started
from stepwell.backends.errors import EngineStartError
from stepwell.backends.weights import WeightStore
from tests.builders import until
from tests.helpers import actor_processes


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """An SGLang whose interpreter is `fake_node.py`."""
    python = tmp_path / "python"
    script = Path(__file__).with_name("fake_node.py")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return EngineConfig(
        kind="sglang",
        model_path=model,
        python=str(python),
        startup_timeout_s=90,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )


@asynccontextmanager
async def engine_group(
    config: EngineConfig, folder: Path, n: int = 2, weights: Path | None = None
) -> AsyncIterator[EngineGroup]:
    nodes = [EngineNode(config, folder / f"node_{i}", weights, "127.0.0.1") for i in range(n)]
    made = EngineGroup(config, nodes, weights)
    try:
        yield made
    finally:
        await made.stop()


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def pids(of: EngineGroup) -> list[Any]:
    return [node["pid"] for node in (await of.status())["nodes"]]


async def test_a_part_that_ends_ends_all_and_all_come_back_at_the_same_url(
    config: EngineConfig, tmp_path: Path
) -> None:
    async with engine_group(config, tmp_path) as server:
        (url,) = await server.start()
        first = await pids(server)
        async with EngineClient(url) as client:
            assert await client.health()

            os.kill(first[1], signal.SIGKILL)  # not the one that answers

            async def is_back() -> bool:
                status = await server.status()
                up = [node["state"] == "up" for node in status["nodes"]]
                return status["restarts"] >= 1 and all(up) and await client.health()

            await until(is_back)
        assert (await server.status())["url"] == url
        assert not set(first) & set(await pids(server))
        left = await pids(server)
    assert not any(map(is_running, left))


async def test_all_parts_load_what_was_committed_when_the_first_looked(
    config: EngineConfig, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    for version in (1, 2):
        store.write(version, lambda folder: (folder.mkdir(), (folder / "w").touch()))
    store.commit(1)
    async with engine_group(config, tmp_path, weights=store.folder) as server:
        with store.lock.tried() as mine:  # a publication is under way
            assert mine
            starting = asyncio.create_task(server.start())
            await asyncio.sleep(0.5)
            assert await pids(server) == [None, None]
            store.commit(2)
        (url,) = await starting
        async with EngineClient(url) as client:
            assert (await client.model_info())["model_path"] == str(store.path(2))
        logs = [(tmp_path / f"node_{i}" / "engine.log").read_text() for i in range(2)]
        assert all(f"--model-path {store.path(2)}" in log for log in logs)


async def test_a_part_that_cannot_start_stops_the_others(
    config: EngineConfig, tmp_path: Path
) -> None:
    async with engine_group(config, tmp_path) as server:
        broken = config.model_copy(update={"model_path": tmp_path / "nowhere"})
        server._nodes[1] = EngineNode(broken, tmp_path / "broken", None, "127.0.0.1")
        with pytest.raises(EngineStartError, match=r"model_path is '.*nowhere'"):
            await server.start()
        assert await pids(server) == [None, None]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "victim", ["EngineGroupServer", pytest.param("EngineNode", marks=pytest.mark.long)]
)
async def test_a_server_outlasts_the_death_of_its_actors(
    config: EngineConfig, tmp_path: Path, victim: str
) -> None:
    server = start_engine_group(config, log_dir=tmp_path, options=[{}, {}])
    looked_at: list[str] = []

    async def accept(url: str) -> None:
        looked_at.append(url)

    (url,), _ = await wait_started(server, accept)
    assert looked_at == [url]
    before = [node["pid"] for node in (await server.status.remote())["nodes"]]
    async with EngineClient(url) as client:
        actor_processes(victim)[-1].kill()

        async def is_back() -> bool:
            status = await server.status.remote()
            up = [node["state"] == "up" for node in status["nodes"]]
            return all(up) and await client.health() and not any(map(is_running, before))

        await until(is_back, 120.0)
    status = await server.status.remote()
    assert status["url"] == url
    await server.stop.remote()
    assert not any(is_running(node["pid"]) for node in status["nodes"])


class Part:
    """A node's actor, which may be lost with its node."""

    def __init__(self, number: int) -> None:
        self.lost = False
        self._host = Host("127.0.0.1", 20_000 + 100 * number)
        self._up = False

    def _ask(self) -> None:
        if self.lost:
            raise ray.exceptions.RayActorError

    async def reserve(self, first_port: int | None = None) -> Host:
        self._ask()
        return self._host

    async def launch(self, launch: NodeLaunch) -> str:
        self._ask()
        self._up = True
        return f"http://127.0.0.1:{launch.port}"

    async def status(self) -> dict[str, Any]:
        self._ask()
        return {"state": "up", "pid": 1} if self._up else {"state": "new", "pid": None}

    async def stop(self) -> None:
        self._ask()
        self._up = False


async def test_a_server_whose_node_is_lost_is_given_up_and_says_so(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.backends.engines.nodes.LOOK_S", 0.01)
    parts = [Part(0), Part(1)]
    server = EngineGroup(config.model_copy(update={"max_restarts": 2}), parts)
    await server.start()
    parts[1].lost = True

    async def given_up() -> bool:
        return "ended 3 times in a row" in str((await server.status())["error"])

    await until(given_up)
    assert [node["state"] for node in (await server.status())["nodes"]] == ["new", "lost"]
    await server.stop()
