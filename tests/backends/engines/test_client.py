"""The control client's errors say what happened, and survive pickling."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from stepwell.backends.engines.api import version_number
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import (
    BackendError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
    WeightUpdateError,
)


async def test_nobody_at_the_url_is_unavailable() -> None:
    async with EngineClient("http://127.0.0.1:9/") as client:
        assert not await client.health()
        with pytest.raises(EngineUnavailableError, match=r"no engine answers at .*:9/model_info"):
            await client.model_info()
        with pytest.raises(ConnectionError):
            await client.generate([1])


async def test_no_answer_in_time_is_a_timeout(client: EngineClient) -> None:
    await client.pause("in_place")
    with pytest.raises(EngineTimeoutError, match=r"did not answer within 0\.05 s"):
        await client.generate([40], {"max_new_tokens": 1}, timeout_s=0.05)


async def test_an_answer_without_what_was_asked_for_is_the_engines_error() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asks: list[tuple[str, Callable[[EngineClient], Awaitable[object]]]] = [
        ("success, message", lambda engine: engine.update_weights_from_disk("v1", 1)),
        ("loaded_adapters", lambda engine: engine.load_lora_adapter("a", "v1")),
        ("ranks", EngineClient.weight_hashes),
        ("weight_version", EngineClient.weight_version),
    ]
    try:
        async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            for missing, ask in asks:
                with pytest.raises(EngineInternalError, match=f"no object with {missing}, but"):
                    await ask(client)
    finally:
        await runner.cleanup()


async def test_a_redirect_is_no_answer() -> None:
    """A login page in front of the engine, for instance: it says nothing about its health."""

    async def answer(_: web.Request) -> web.Response:
        raise web.HTTPFound("/login")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            with pytest.raises(EngineRequestError, match="answered 302"):
                await client.check()
    finally:
        await runner.cleanup()


def test_versions_are_integers_and_default_is_zero() -> None:
    assert (version_number("default"), version_number("12")) == (0, 12)
    with pytest.raises(ValueError, match="'step-3'"):
        version_number("step-3")


def test_a_client_pickles_as_its_url() -> None:
    assert pickle.loads(pickle.dumps(EngineClient("http://h:1"))).url == "http://h:1"


@pytest.mark.parametrize(
    "error",
    [
        EngineRequestError("refused", status=422),
        WeightUpdateError("no", replica="http://a", serving={"http://a": None}),
    ],
)
def test_errors_survive_pickling_with_their_fields(error: BackendError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
