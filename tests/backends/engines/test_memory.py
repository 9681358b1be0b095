"""Memory that an engine lends out: what it keeps, refuses and comes back with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineInternalError, EngineRequestError
from tests.builders import until

PROMPT = [20, 21, 22, 23, 24, 25]
GREEDY = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LONG = {"max_new_tokens": 300, "temperature": 1.0, "ignore_eos": True}


async def requests(client: EngineClient) -> int:
    load = (await client.loads())["loads"][0]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


async def test_an_engine_comes_back_with_its_weights_and_an_empty_cache(
    client: EngineClient,
) -> None:
    before = await client.generate(PROMPT, GREEDY)
    running = asyncio.create_task(client.generate([30, 31, 32], LONG))
    await until(lambda: _more_than(client, 0))
    await client.pause("abort")
    await client.release_memory()
    cut = await running
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    # it answers questions, and calls wait until it is whole and continued
    assert (await client.model_info())["weight_version"] == before["meta_info"]["weight_version"]
    waiting = asyncio.create_task(client.generate(PROMPT, GREEDY))
    await asyncio.sleep(0.2)
    await client.resume_memory()
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await client.continue_()
    after = await waiting
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0


# -- where a real SGLang dies, the embedded engine refuses ---------------------------------------


@pytest.fixture
async def embedded(engine: Any, client: EngineClient) -> EngineClient:
    if engine.kind != "embedded":
        pytest.skip("a real SGLang's scheduler dies of this")
    return client


async def test_an_engine_that_generates_lends_nothing(embedded: EngineClient) -> None:
    running = asyncio.create_task(embedded.generate(PROMPT, LONG))
    await until(lambda: _more_than(embedded, 0))
    await embedded.pause("in_place")
    with pytest.raises(EngineRequestError, match=r"1 requests run .* pause it with mode abort"):
        await embedded.release_memory()
    await embedded.abort()
    await running


async def test_while_its_memory_is_lent_it_neither_generates_nor_loads(
    embedded: EngineClient, model_dirs: Any
) -> None:
    await embedded.release_memory()
    with pytest.raises(EngineInternalError, match=r"503: .*memory is released") as refused:
        await embedded.generate(PROMPT, GREEDY)
    assert refused.value.status == 503  # which the gateway takes for busy
    with pytest.raises(EngineRequestError, match="released; resume_memory_occupation comes first"):
        await embedded.update_weights_from_disk(str(model_dirs.new), 3)
    await embedded.resume_memory()
    assert (await embedded.generate(PROMPT, GREEDY))["meta_info"]["weight_version"] == "0"


async def test_nothing_is_released_or_resumed_twice(embedded: EngineClient) -> None:
    with pytest.raises(EngineRequestError, match="has not been released"):
        await embedded.resume_memory()
    await embedded.release_memory()
    with pytest.raises(EngineRequestError, match="has been released already"):
        await embedded.release_memory()
    await embedded.resume_memory()


async def _more_than(client: EngineClient, n: int) -> bool:
    return await requests(client) > n
