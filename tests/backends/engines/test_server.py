"""`EngineServer` as a Ray actor: starts, attaches, stops; nothing outlives it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.server import start_engine, wait_started
from stepwell.backends.errors import EngineStartError
from stepwell.backends.weights import WeightStore
from tests.builders import until
from tests.helpers import actor_processes


def gone(pid: int, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_the_actor_starts_an_engine_and_killing_it_leaves_none(
    model_dirs: Any, make_engine_config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    config = make_engine_config("embedded", model_dirs.base)
    server = start_engine(config, log_dir=tmp_path)
    [url] = await server.start.remote()
    async with EngineClient(url) as client:
        assert (await client.generate([40, 41], {"max_new_tokens": 1}))["output_ids"]
    attached = start_engine(EngineConfig(kind="attach", urls=(url,)), log_dir=tmp_path)
    assert await attached.start.remote() == [url]
    await attached.stop.remote()
    ray.kill(attached)
    status = await server.status.remote()
    assert status["state"] == "up"
    ray.kill(server)
    assert gone(status["pid"])


@pytest.mark.usefixtures("cluster")
@pytest.mark.long
async def test_a_killed_actor_comes_back_with_its_engine_at_its_url_and_the_committed_weights(
    model_dirs: Any,
    make_engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path / "weights")
    config = make_engine_config("embedded", model_dirs.base)
    server = start_engine(config, log_dir=tmp_path, weights_dir=store.folder)
    accepted = []

    async def accept(url: str) -> None:
        accepted.append(url)

    [url], _ = await wait_started(server, accept)
    assert accepted == [url]
    before = (await server.status.remote())["pid"]
    store.commit(5, model_dirs.new)
    async with EngineClient(url) as client:
        assert await client.weight_version() == 0
        [actor] = actor_processes("EngineServer")
        actor.kill()
        assert gone(before)

        async def is_back() -> bool:
            return await client.health()

        await until(is_back, 120.0)
        answer = await client.generate([40, 41], {"max_new_tokens": 1})
    assert answer["meta_info"]["weight_version"] == "5"
    status = await server.status.remote()
    assert status["state"] == "up"
    assert status["url"] == url
    await server.stop.remote()
    ray.kill(server)
    assert gone(status["pid"])


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_a_failed_start_reaches_the_caller_as_itself(tmp_path: Path) -> None:
    server = start_engine(EngineConfig(model_path=tmp_path / "absent"), log_dir=tmp_path)
    with pytest.raises(EngineStartError, match=r"engine\.model_path"):
        await server.start.remote()
    ray.kill(server)
    config = EngineConfig(kind="attach", urls=("http://127.0.0.1:9",), startup_timeout_s=0.1)
    server = start_engine(config, log_dir=tmp_path)
    with pytest.raises(EngineStartError, match=r"engine\.urls has 'http://127\.0\.0\.1:9'"):
        await server.start.remote()
    ray.kill(server)
