"""Requests in flight while real engines are given new weights, or die: agents notice nothing, and
every Step says which version sampled each of its tokens.

The full size (200 requests, 20 updates a mode) is `python -m tests.chaos weight-updates`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.served import RunningEngine, engine, gateway, steps_in
from stepwell.backends.config import PauseMode
from stepwell.backends.engines.client import EngineClient
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step
from tests.builders import until
from tests.chaos.weight_updates import (
    MODES,
    Clients,
    Updates,
    endless_model,
    update_under_load,
    wrong_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REQUESTS = 16
UPDATES = 4  # one by each transport
LAST = len(MODES) * UPDATES


@dataclass
class Killed:
    """Views of a gateway and its clients when one of two engines was killed in mid-generation."""

    clients: Clients
    steps: list[Step]
    before: Any
    after: Any


@dataclass
class Seen:
    updates: dict[str, dict[str, Any]]
    killed: Killed


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Engines take long to start, so that the same two serve all tests here."""

    async def measure(folder: Path) -> Seen:
        model, updates = endless_model(folder), {}
        async with AsyncExitStack() as stack:
            published = await stack.enter_async_context(Updates.to(model, folder))
            starting = [engine(model, folder / f"engine-{i}.log") for i in range(2)]
            engines = await asyncio.gather(*map(stack.enter_async_context, starting))
            for i, mode in enumerate(MODES):
                updates[mode] = await update_under_load(
                    engines[0].url,
                    published,
                    mode,
                    n_requests=REQUESTS,
                    n_updates=UPDATES,
                    first_version=1 + i * UPDATES,
                )
            async with EngineClient(engines[1].url) as control:
                await control.update_weights_from_disk(str(model), LAST)
            return Seen(updates, await kill_one(engines))

    return asyncio.run(measure(tmp_path_factory.mktemp("updates")))


async def kill_one(engines: Sequence[RunningEngine]) -> Killed:
    doomed = engines[0]
    async with DataPoolClient.local() as pool:
        async with (
            gateway(pool, [e.url for e in engines]) as origin,
            aiohttp.ClientSession() as session,
            EngineClient(doomed.url) as control,
        ):

            async def statistics() -> Any:
                async with session.get(f"{origin}/statistics") as response:
                    return (await response.json())["engine"]

            async def generated() -> int:
                loads: list[dict[str, int]] = (await control.loads())["loads"]
                return loads[0]["total_generated_tokens"]

            clients, enough = Clients(origin, session), await generated() + 200

            async def is_under_way() -> bool:
                return await generated() >= enough

            clients.stop.set()  # one request each
            running = clients.start(REQUESTS)
            await until(is_under_way)
            await control.pause("in_place")  # so that none finishes while we look
            before = await statistics()
            doomed.process.kill()
            await asyncio.gather(*running)
            after = await statistics()
        return Killed(clients, await steps_in(pool), before, after)


@pytest.mark.parametrize("mode", MODES)
def test_no_request_fails_or_hangs_and_spans_add_up_under_weight_updates(
    seen: Seen, mode: PauseMode
) -> None:
    figures = seen.updates[mode]
    assert figures["problems"] == []
    assert figures["in_flight_at_each_update"] == REQUESTS
    assert figures["steps"] == figures["requests"] >= REQUESTS
    assert figures["last_version"] == (1 + MODES.index(mode)) * UPDATES
    assert figures["steps_over_several_versions"] > 0


def test_only_aborted_requests_are_resumed_by_the_gateway(seen: Seen) -> None:
    resumes = {mode: figures["resumes"] for mode, figures in seen.updates.items()}
    assert resumes.pop("abort") > 0
    assert resumes == {"retract": 0, "in_place": 0}


def test_agents_do_not_notice_that_an_engine_is_killed(seen: Seen) -> None:
    killed = seen.killed
    assert killed.clients.failures == []
    assert killed.clients.answered == REQUESTS
    assert wrong_steps(killed.steps, killed.clients.tokens, {LAST}) == []
    had = killed.before["engines"][0]["in_flight"]
    assert had > 0
    assert killed.after["retries"] == had
    assert killed.after["recoveries"] > 0
    assert [e["state"] for e in killed.after["engines"]] == ["down", "up"]
