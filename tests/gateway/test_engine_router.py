"""Calls through a router: it picks the worker, so nothing is taken to be known of the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.engine import EngineClient
from stepwell.gateway.errors import EngineUnavailableError, GatewayConfigError, RequestError
from stepwell.gateway.wiring import Wiring
from tests.gateway.conftest import Sampled
from tests.gateway.test_engine import FAST, Machine, Rig, check_whole, running


class Router(Machine):
    """A router as far as the gateway asks one; its answers are scripted like an engine's."""

    async def other(self, request: web.Request) -> web.Response:
        if request.path == "/readiness":
            return web.Response(status=200 if self.urls and self.healthy else 503)
        if request.path in ("/model_info", "/v1/models"):  # as the real one: no, and without length
            return web.json_response({"data": [{"id": "m"}]}, status=404)
        return await super().other(request)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """`machines`: the router, then its worker."""
    async with (
        running(Machine()) as worker,
        running(Router(urls=[worker.url])) as router,
    ):
        wiring = Wiring((router.url,), via_router=True)
        client = EngineClient(GatewayConfig(**FAST), wiring)
        await client.start()
        try:
            yield Rig(client, [router, worker])
        finally:
            await client.close()


async def test_calls_go_through_the_router_and_questions_to_its_workers(rig: Rig) -> None:
    router, worker = rig.machines
    check_whole(await rig.generate(), [7, 8, 9])
    assert (len(router.requests), len(worker.requests)) == (1, 0)
    assert [e["url"] for e in rig.client.statistics()["engines"]] == [router.url]
    assert await rig.client.context_length() == 4096
    await rig.client.ready()


async def test_a_call_that_is_given_up_is_aborted_in_the_worker(rig: Rig) -> None:
    router, worker = rig.machines
    router.script = [Sampled([7, 8], gate=asyncio.Event())]
    call = asyncio.create_task(rig.generate())
    await rig.until(lambda: bool(router.requests))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await rig.until(lambda: worker.aborts == [router.requests[0]["rid"]])
    assert router.aborts == []


async def test_workers_of_different_versions_are_no_engine_that_went_back(rig: Rig) -> None:
    router, _ = rig.machines
    for version in ("5", "3", "5", "3"):
        router.script = [Sampled([7, 8], version=version)]
        assert (await rig.generate()).policy_version == int(version)
        assert rig.state(router) == "up"


async def test_a_broken_stream_is_not_kept_although_every_event_said_the_same_version(
    rig: Rig,
) -> None:
    router, _ = rig.machines
    await rig.generate()  # some worker said version 1; another one may have streamed this
    router.script = [Sampled([7, 8, 9, 10], drop_after=2, version="1")]
    with pytest.raises(EngineUnavailableError, match="not certain"):
        await rig.generate(stream=True)
    assert rig.client.recoveries == 0


async def test_without_a_healthy_worker_calls_wait_for_one(rig: Rig) -> None:
    router, _ = rig.machines
    router.healthy = False
    await rig.until(lambda: rig.state(router) == "ailing")
    router.script = [Sampled([], status=503)]
    router.healthy = True
    check_whole(await rig.generate(), [7, 8, 9])
    assert rig.client.retries == 1


async def test_what_a_router_would_silently_drop_is_refused(rig: Rig) -> None:
    with pytest.raises(RequestError, match="structural_tag does not get through"):
        await rig.generate(constraint=("structural_tag", "{}"))
    check_whole(await rig.generate(constraint=("regex", "a")), [7, 8, 9])


@pytest.mark.parametrize("urls", [(), ("http://router", "http://engine")])
def test_through_a_router_needs_the_router_and_nothing_beside_it(urls: tuple[str, ...]) -> None:
    with pytest.raises(GatewayConfigError, match="give its url"):
        Wiring(urls, via_router=True)
