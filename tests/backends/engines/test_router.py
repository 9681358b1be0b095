"""The real SGLang router before engines: calls through it, and who is in its list of workers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from aiohttp import web
from pydantic import ValidationError

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.addresses import free_port
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.router import (
    RouterServer,
    router_argv,
    start_router,
    started_router,
)
from stepwell.backends.errors import EngineRequestError, EngineStartError, EngineUnavailableError
from stepwell.backends.weights import WeightStore
from tests.helpers import actor_processes, gone

PROMPT = [20, 21, 22, 23, 24, 25]
GREEDY = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

# aiohttp, which plays workers here, is loud about the HTTP/2 that the router tries first.
pytestmark = pytest.mark.filterwarnings("ignore")


def router_config(router: str = "launch", **fields: Any) -> EngineConfig:
    return EngineConfig(kind="attach", urls=("http://unused",), router=router, **fields)


@pytest.fixture(scope="module")
def theirs() -> Iterator[str]:
    """A router that somebody else runs."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(router_argv("127.0.0.1", port, free_port("127.0.0.1")))
    try:
        asyncio.run(_until_it_answers(url, process))
        yield url
    finally:
        process.kill()
        process.wait()


async def _until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    async with EngineClient(url) as router, asyncio.timeout(120):
        while True:
            assert process.poll() is None, f"the router ended with {process.returncode}"
            try:
                await router.workers()
            except EngineUnavailableError:
                await asyncio.sleep(0.1)
            else:
                return


@asynccontextmanager
async def running(
    urls: list[str], folder: Path, router: str, weights: Path | None = None
) -> AsyncIterator[tuple[RouterServer, EngineClient]]:
    server = RouterServer(router_config(router, startup_timeout_s=120), folder, weights)
    try:
        url = await server.start(urls)
        async with EngineClient(url, timeout_s=30) as client:
            yield server, client
    finally:
        await server.stop()


class Worker:
    """As much of an engine as a router and its keeper ask for; keeps what `/generate` gets."""

    def __init__(self) -> None:
        self.version = 0
        self.mute = False
        """Connections are made and nothing is answered."""
        self.bodies: list[dict[str, Any]] = []
        self._port = free_port("127.0.0.1")
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _answer(self, request: web.Request) -> web.Response:
        if self.mute and request.path == "/model_info":
            await asyncio.sleep(3600)
        if request.path == "/generate":
            self.bodies.append(await request.json())
        return web.json_response({"model_path": "m", "weight_version": str(self.version)})

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def die(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.die()


async def lists(router: EngineClient, *workers: Worker) -> bool:
    healthy = {worker.url for worker in await router.workers() if worker.is_healthy}
    return healthy == {worker.url for worker in workers}


def log_probs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


async def test_an_engine_behind_a_router_answers_as_it_does_directly(
    engine: Any, client: EngineClient, theirs: str, tmp_path: Path
) -> None:
    async with running([engine.url], tmp_path, theirs) as (_, router):
        fields = {"return_logprob": True, "rid": "mine"}
        through = await router.generate(PROMPT, GREEDY, **fields)
        straight = await client.generate(PROMPT, GREEDY, **fields)
        assert through["output_ids"] == straight["output_ids"]
        assert log_probs(through) == pytest.approx(log_probs(straight), abs=1e-4)
        assert through["meta_info"].keys() == straight["meta_info"].keys()
        for same in ("id", "weight_version", "finish_reason", "completion_tokens"):
            assert through["meta_info"][same] == straight["meta_info"][same]

        chunks = [c async for c in router.generate_stream(PROMPT, GREEDY, return_logprob=True)]
        assert chunks[-1]["output_ids"] == straight["output_ids"]
        assert log_probs(chunks[-1]) == pytest.approx(log_probs(straight), abs=1e-4)

        # what controls an engine is refused by the router, never silently ignored
        for refused in (router.pause, router.abort, router.model_info, router.release_memory):
            with pytest.raises(EngineRequestError, match="404"):
                await refused()


@pytest.mark.parametrize("stream", [False, True])
async def test_of_calls_that_are_left_a_router_ends_streams_only_at_their_next_token(
    engine: Any,
    client: EngineClient,
    theirs: str,
    tmp_path: Path,
    eventually: Eventually,
    stream: bool,
) -> None:
    """Which is why the gateway aborts at the workers."""

    async def requests() -> int:
        load = (await client.loads())["loads"][0]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    async def some() -> bool:
        return await requests() > 0

    async def none() -> bool:
        # SGLang looks at aborts in its next step, which a pause puts off: let it make a few.
        await client.continue_()
        await client.pause("in_place")
        return await requests() == 0

    async with running([engine.url], tmp_path, theirs) as (_, router):

        async def call() -> None:
            long = {"max_new_tokens": 400, "temperature": 1.0, "ignore_eos": True}
            if stream:
                async for _ in router.generate_stream(PROMPT, long, rid="left"):
                    pass
            else:
                await router.generate(PROMPT, long, rid="left")

        calling = asyncio.create_task(call())
        await eventually(some)
        await client.pause("in_place")  # it cannot end by itself
        assert await some()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        if stream:
            await asyncio.sleep(1.0)
            assert await some()
            await client.abort("left")
        for _ in range(20):  # far fewer steps than the call has tokens
            if await none():
                break
            await asyncio.sleep(0.5)  # SGLang looks every 4 s whether the client is there
        else:
            pytest.fail("the call that was left goes on")


async def test_the_list_holds_who_answers_and_has_the_committed_weights(
    tmp_path: Path, eventually: Eventually
) -> None:
    store = WeightStore(tmp_path / "weights")
    async with (
        Worker() as first,
        Worker() as second,
        running([first.url, second.url], tmp_path, "launch", store.folder) as (server, router),
    ):
        assert await lists(router, first, second)

        first.version = 1  # loaded, and then committed; the second came back before that
        assert await lists(router, first, second)
        store.path(1).mkdir()
        store.commit(1)
        await eventually(lambda: lists(router, first))
        second.version = 1
        await eventually(lambda: lists(router, first, second))

        await first.die()
        await eventually(lambda: lists(router, second))
        first.version = 0
        await first.start()
        await asyncio.sleep(1.5)  # three looks
        assert await lists(router, second)
        first.version = 1
        await eventually(lambda: lists(router, first, second))

        # a router that is killed comes back at its address, and is filled again
        os.kill((await server.status())["pid"], signal.SIGKILL)

        async def is_back() -> bool:
            return await router.health() and await lists(router, first, second)

        await eventually(lambda: _restarted(server))
        await eventually(is_back)


@pytest.mark.usefixtures("cluster")
async def test_a_router_whose_actor_is_killed_comes_back_at_its_address_and_is_filled_again(
    tmp_path: Path, eventually: Eventually
) -> None:
    async with Worker() as worker:
        server = start_router(router_config(startup_timeout_s=120), log_dir=tmp_path)
        url = await started_router(server, [worker.url])
        async with EngineClient(url, timeout_s=30) as router:
            before = (await server.status.remote())["pid"]
            actor_processes("RouterServer")[0].kill()
            assert await gone(before)

            async def is_back() -> bool:
                return await router.health() and await lists(router, worker)

            await eventually(is_back)
        await server.stop.remote()
        ray.kill(server)


async def _restarted(server: RouterServer) -> bool:
    return server.restarts == 1


async def test_one_late_answer_keeps_a_worker_in_the_list_and_two_do_not(tmp_path: Path) -> None:
    async with Worker() as worker, EngineClient(worker.url, timeout_s=0.05) as client:
        server = RouterServer(router_config(), tmp_path)
        worker.mute = True
        assert await server.may_serve(client)
        assert not await server.may_serve(client)
        worker.mute = False
        client.timeout_s = 30.0
        assert await server.may_serve(client)


# What `gateway/engine/client.py` may send; see "What the router drops" in docs/design/engines.md.
FIELDS: dict[str, Any] = {
    "rid": "r",
    "input_ids": [1, 2],
    "return_logprob": True,
    "stream": False,
    "top_logprobs_num": 2,
    "lora_path": "adapter",
    "return_routed_experts": True,
}
SAMPLING: dict[str, Any] = {
    "max_new_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "stop": ["x"],
    "sampling_seed": 3,
    "min_p": 0.1,
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "no_stop_trim": True,
}


async def test_an_attached_router_keeps_the_workers_of_others_and_drops_two_fields(
    theirs: str, tmp_path: Path, eventually: Eventually
) -> None:
    async with Worker() as ours, Worker() as other, EngineClient(theirs) as router:
        await router.add_worker(other.url)
        async with running([ours.url], tmp_path, theirs):
            await eventually(lambda: lists(router, ours, other))
            for _ in range(8):
                await router.generate(sampling_params=SAMPLING, **FIELDS)
        await eventually(lambda: lists(router, other))  # ours left when it was stopped
        for worker in await router.workers():
            await router.remove_worker(worker)
    assert len(ours.bodies) + len(other.bodies) == 8
    for body in (*ours.bodies, *other.bodies):
        params = body.pop("sampling_params")
        assert {name for name in FIELDS if body.get(name) != FIELDS[name]} == {
            "return_routed_experts"
        }
        unlike = {n for n in SAMPLING if n not in params or params[n] != _close(SAMPLING[n])}
        assert unlike == {"structural_tag"}


def _close(value: Any) -> Any:
    """The router carries floats in single precision."""
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


async def test_a_router_without_its_workers_says_so(theirs: str, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    for router, message in (
        (theirs, rf"engine\.router, the router at .* not ready .*: it does not list {nobody}"),
        (nobody, r"engine\.router, the router at .* not ready .* no engine answers"),
    ):
        server = RouterServer(router_config(router, startup_timeout_s=0.5), tmp_path)
        try:
            with pytest.raises(EngineStartError, match=message):
                await server.start([nobody])
        finally:
            await server.stop()


async def test_a_router_that_could_not_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr("stepwell.backends.engines.router.INTERVAL_S", 0.01)
    launches = 0

    def launch(server: RouterServer) -> None:
        nonlocal launches
        launches += 1
        if launches == 2:
            raise OSError("too many processes")
        command = ["true"] if launches == 1 else ["sleep", "60"]
        server._process = subprocess.Popen(command, start_new_session=True)

    monkeypatch.setattr(RouterServer, "_launch", launch)
    server = RouterServer(EngineConfig(router="launch", model_path=tmp_path), tmp_path)
    server._launch()
    following = asyncio.create_task(server._follow())

    async def runs() -> bool:
        return launches == 3

    await eventually(runs)
    following.cancel()
    await server.stop()


def test_a_router_is_none_launched_or_a_url() -> None:
    assert router_config("http://10.0.0.1:30000/").router == "http://10.0.0.1:30000"
    with pytest.raises(ValidationError, match="router is 'lunch'; use none, launch or the url"):
        router_config("lunch")
