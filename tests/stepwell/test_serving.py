"""A served run: the message of `stepwell serve`, and when agents wait for a trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from stepwell.cluster.parts import Cluster
from stepwell.config.load import load_config
from stepwell.datapool.errors import PoolFullError
from stepwell.run.serve import where_to_call
from tests.gateway.conftest import local_pool, worlds

__all__ = ["worlds"]

RAY = SimpleNamespace(address="127.0.0.1:1", namespace="n")
CLUSTER: Any = SimpleNamespace(
    gateway_url="http://localhost:1", gateway_urls=("http://localhost:1",), key_file=None, ray=RAY
)


@pytest.mark.parametrize(("preset", "is_limited"), [("quickstart", True), ("live", False)])
def test_a_served_run_says_at_once_that_nobody_leases_and_what_bounds_it_then(
    preset: str, is_limited: bool, tmp_path: Path
) -> None:
    config = load_config(preset, [f"run.dir={tmp_path}"])
    told = where_to_call(config, cast(Cluster, CLUSTER))
    assert ("nobody leases what is recorded until a trainer is attached" in told) is is_limited
    assert ("16 groups open or ready (rollout.max_outstanding_groups)" in told) is is_limited
    assert ("agents go on" in told) is is_limited
    assert ("payloads beyond 1 GB (pool.memory_limit_bytes) are on disk only" in told) is is_limited


def test_the_command_that_trains_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path,
) -> None:
    config = load_config("live", [f"run.dir={tmp_path}/my run"])
    assert f"stepwell train --attach '{tmp_path}/my run'" in where_to_call(config, CLUSTER)


def test_a_pool_without_a_journal_holds_agents_back_from_the_start(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}", "pool.durability=none"])
    assert config.pool_of_served == config.pool_of_run
    told = where_to_call(config, cast(Cluster, CLUSTER))
    assert "until a trainer is attached; the limit is 16 groups open or ready" in told
    assert f"dashboard  {CLUSTER.gateway_url}/ui" in told.splitlines()


def test_what_is_recorded_without_a_trainer_leaves_memory(tmp_path: Path) -> None:
    for limit, kept in ((None, 1_000_000_000), (5_000_000, 5_000_000)):
        given = [] if limit is None else [f"pool.memory_limit_bytes={limit}"]
        config = load_config("quickstart", [f"run.dir={tmp_path}", *given])
        assert config.pool_of_served.memory_limit_bytes == kept
        assert config.pool_of_run.memory_limit_bytes == limit


async def test_agents_wait_for_a_trainer_only_once_there_was_one(
    worlds: Any, tmp_path: Path
) -> None:
    """`stepwell serve --config quickstart`, whose agents nobody here starts."""
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    served = {"pool_config": config.pool_of_served, "pool_folder": tmp_path / "pool"}
    world = await worlds(queue_timeout_s=0.2, **served)

    async def call(i: int) -> int:
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{world.url}/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
                headers={"x-prompt-uid": f"task-{i}"},
            ) as answer,
        ):
            return answer.status

    assert await asyncio.gather(*map(call, range(40))) == [200] * 40
    train = (await world.pool.get_statistics())["train"]
    assert (train["groups"]["open"], train["has_consumer"]) == (40, False)
    # A trainer was attached, and died before it leased.
    await world.pool.advance_version(0)
    assert (await world.pool.get_statistics())["train"]["has_consumer"]
    assert await call(40) == 503


async def test_a_trainer_that_died_holds_agents_back_in_a_pool_that_is_started_again(
    tmp_path: Path,
) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    async with local_pool(config.pool_of_served, tmp_path / "pool") as pool:
        await pool.advance_version(0)
    async with local_pool(config.pool_of_served, tmp_path / "pool") as pool:
        for i in range(16):
            await pool.open_group(f"p{i}", 1, timeout_s=0)
        with pytest.raises(PoolFullError, match="max_outstanding_groups=16"):
            await pool.open_group("another", 1, timeout_s=0)
