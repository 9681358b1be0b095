"""Publishing weights to several real engines is all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import WeightUpdateError
from stepwell.backends.weights import WeightStore, publish
from tests.backends.engines.embedded_here import embedded_here
from tests.builders import until

PROMPT = [40, 41, 42, 43]
pytestmark = pytest.mark.parametrize("_running", ["embedded"], indirect=True)


@pytest.fixture(scope="module")
def _misfit(model_dirs: Any) -> Iterator[str]:
    """A second engine with another architecture: it refuses the first one's weights."""
    with embedded_here(model_dirs.wide, "float32") as url:
        yield url


@pytest.fixture
async def misfit(_misfit: str) -> AsyncIterator[EngineClient]:
    async with EngineClient(_misfit) as client:
        yield client


async def short(client: EngineClient) -> dict[str, Any]:
    answer: dict[str, Any] = await client.generate(
        PROMPT, {"max_new_tokens": 2, "ignore_eos": True}
    )
    return answer


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "drain"])
async def test_a_publication_commits_and_generation_goes_on(
    mode: Any,
    client: EngineClient,
    model_dirs: Any,
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path)
    long = {"max_new_tokens": 300, "ignore_eos": True}
    flight = asyncio.create_task(client.generate(PROMPT, long))

    async def runs() -> bool:
        return bool((await client.loads())["loads"][0]["num_running_reqs"])

    await until(runs)
    done = await publish([client], model_dirs.new, 1, mode, store=store)
    assert done.version == 1
    assert await client.weight_version() == 1
    current = store.current()
    assert current is not None
    assert (current.version, current.path) == (1, str(model_dirs.new))
    answer = await flight
    spans = [s["version"] for s in answer["meta_info"]["weight_versions"]]
    reason = answer["meta_info"]["finish_reason"]["type"]
    assert (spans, reason) == {
        "abort": (["0"], "abort"),
        "retract": (["0", "1"], "length"),
        "in_place": (["0", "1"], "length"),
        "drain": (["0"], "length"),
    }[mode]
    assert (await short(client))["meta_info"]["weight_version"] == "1"


@pytest.mark.parametrize("mode", ["abort", "drain"])
async def test_a_replica_that_refuses_rolls_the_others_back(
    mode: Any, client: EngineClient, misfit: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path)
    with pytest.raises(WeightUpdateError, match="version 4 was not published") as e:
        await publish([client, misfit], model_dirs.new, 4, mode, store=store)
    assert e.value.replica == misfit.url
    assert e.value.serving == {client.url: 0, misfit.url: 0}
    assert store.current() is None
    info = await client.model_info()
    assert (info["weight_version"], info["model_path"]) == ("0", str(model_dirs.base))
    for engine in (client, misfit):  # neither is left paused
        assert (await short(engine))["meta_info"]["weight_version"] == "0"


async def test_a_dead_replica_is_fenced_and_the_others_go_on(
    client: EngineClient, model_dirs: Any
) -> None:
    async with EngineClient("http://127.0.0.1:9") as dead:
        done = await publish([client, dead], model_dirs.new, 4, "abort")
    assert list(done.fenced) == [dead.url]
    assert list(done.verified) == [client.url]
    assert (await short(client))["meta_info"]["weight_version"] == "4"


async def test_a_cancelled_publication_still_ends_and_leaves_no_engine_paused(
    client: EngineClient, model_dirs: Any
) -> None:
    task = asyncio.create_task(publish([client], model_dirs.new, 2, "abort"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def published() -> bool:
        return await client.weight_version() == 2

    await until(published)
    assert (await short(client))["meta_info"]["weight_version"] == "2"


async def test_publishing_to_nobody_is_refused(client: EngineClient) -> None:
    with pytest.raises(ValueError, match="no engines"):
        await publish([], "/w", 1)
