"""Configuration, start and stop of the server, and its Ray actor."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError

from stepwell.datapool import errors as pool_errors
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.remote.start import client_of, start_data_pool
from stepwell.gateway import errors
from stepwell.gateway.address import bind
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from stepwell.gateway.errors import (
    GatewayConfigError,
    GatewayError,
    PortInUseError,
    RequestError,
)
from stepwell.gateway.server import HttpServer, start_replicas
from tests.builders import until
from tests.gateway.conftest import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_reading_the_configuration_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, stepwell.gateway.config, stepwell.gateway.server;"
        "sys.exit(' '.join(m for m in ('torch', 'transformers', 'ray') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"port": 70000}, "port"),
        ({"host": "0.0.0.0"}, "no keys yet"),
        ({"host": "not an address"}, "give an IP address"),
        ({"prot": 1}, "prot"),
    ],
)
def test_a_wrong_option_is_refused_with_its_remedy(options: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GatewayConfig(**options)


def test_urls_given_twice_are_one_engine() -> None:
    assert Wiring(("http://a", "http://a/", "http://b")).engine_urls == ("http://a", "http://b")


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError) as refusal:
            bind("127.0.0.1", port)
    line = str(refusal.value)
    assert f"gateway.port is {port}" in line
    assert "gateway.port=0" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("path", "named"), [(None, "tokenizer_path is null"), ("/nowhere", "'/nowhere'")]
)
def test_a_missing_tokenizer_is_named(path: Any, named: str) -> None:
    with pytest.raises(GatewayConfigError, match=named):
        create_app(GatewayConfig(tokenizer_path=path), Wiring(), pool=None)  # type: ignore[arg-type]  # not reached


@pytest.mark.parametrize("path", ["no.such.module:f", "math:no_such", "math:pi", "nodots"])
def test_a_wrong_reward_function_is_named(path: str, tokenizer: Any) -> None:
    with pytest.raises(GatewayConfigError, match=r"gateway\.reward_fn"):
        create_app(GatewayConfig(reward_fn=path), Wiring(), pool=None, tokenizer=tokenizer)  # type: ignore[arg-type]  # not reached


def test_errors_survive_pickling_with_their_fields() -> None:
    kinds = [
        e
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.GatewayError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        args = ("what is wrong", "field") if issubclass(kind, RequestError) else ("what is wrong",)
        again = pickle.loads(pickle.dumps(kind(*args)))
        assert type(again) is kind
        assert str(again) == "what is wrong"
        assert again.param == (args[1] if len(args) > 1 else None)
    told = errors.from_pool(pool_errors.TrajectoryClosedError("it is closed"))
    again = pickle.loads(pickle.dumps(told))
    assert (again.status, again.code, str(again)) == (410, "trajectory_closed", "it is closed")


def test_every_error_of_the_pool_has_one_answer() -> None:
    kinds = {
        name: kind
        for name, kind in {**vars(pool_errors), "PoolSilentError": errors.PoolSilentError}.items()
        if isinstance(kind, type) and issubclass(kind, pool_errors.DataPoolError)
    }
    told = {name: errors.from_pool(kind("{why} /a/file")) for name, kind in kinds.items()}
    statuses: dict[int, set[str]] = {}
    for name, answer in told.items():
        statuses.setdefault(answer.status, set()).add(name)
        assert ("/a/file" in str(answer)) == (
            answer.status != 503 or name in ("PoolFullError", "PoolSilentError")
        ), name
    assert statuses[403] == {"NotOwnerError"}
    closed = {"TrajectoryClosedError", "TrajectoryCompletedError", "GroupClosedError"}
    assert statuses[410] == closed
    assert {"StepConflictError", "StepIndexError", "TrajectoryConflictError"} < statuses[409]
    journal = {n for n, kind in kinds.items() if issubclass(kind, pool_errors.JournalError)}
    assert statuses[503] == {"PoolFullError", "PoolUnavailableError", "PoolSilentError", *journal}
    assert {"InvalidStepError", "UnknownTrajectoryError", "SelectionError"} < statuses[400]


async def test_a_server_thread_serves_and_leaves_nothing_behind(
    tokenizer: Any, tmp_path: Path
) -> None:
    config = GatewayConfig(port=0, tokenizer_path=save_tokenizer(tmp_path), context_length=64)
    server = HttpServer(config, Wiring(), pool=None)  # type: ignore[arg-type]  # /health asks no pool
    origin = await asyncio.to_thread(server.start)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{origin}/health") as response,
    ):
        assert response.status == 200
    await asyncio.to_thread(server.stop)
    assert not [t for t in threading.enumerate() if t.name == "gateway"]
    again = HttpServer(
        config.model_copy(update={"port": int(origin.rpartition(":")[2])}), Wiring(), None
    )  # type: ignore[arg-type]  # as above
    assert await asyncio.to_thread(again.start) == origin
    await asyncio.to_thread(again.stop)


async def test_a_start_that_fails_frees_its_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(GatewayError):
        HttpServer(GatewayConfig(port=port, tokenizer_path="/nowhere"), Wiring(), None).start()  # type: ignore[arg-type]  # not reached
    bind("127.0.0.1", port).close()


@pytest.mark.usefixtures("cluster")
async def test_the_ray_actor_serves_agents_and_stores_steps_in_the_pool_actor(
    worlds: Any, tokenizer: Any, tmp_path: Path
) -> None:
    world = await worlds()
    pool = client_of([start_data_pool(PoolConfig(), name="pool")])
    config = GatewayConfig(
        port=0,
        tokenizer_path=save_tokenizer(tmp_path),
    )
    (actor,) = start_replicas(config, Wiring((world.engine.url,)), "pool")
    origin = await actor.start.remote()
    async with AsyncOpenAI(base_url=f"{origin}/t/p/v1", api_key="x") as client:
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    assert reply.choices[0].message.content == "fine"
    async with aiohttp.ClientSession() as session:
        await session.post(f"{origin}/t/p/v1/complete_trajectory", json={"reward": 1.0})
    steps = await pool.fetch_batch(n_rollouts=1)
    assert steps is not None
    assert [(s.trajectory_uid, s.reward, s.is_last) for s in steps] == [("t", 1.0, True)]
    await actor.stop.remote()


async def test_stopping_aborts_what_is_being_generated(
    worlds: Any, tokenizer: Any, tmp_path: Path
) -> None:
    world = await worlds()
    gate = asyncio.Event()
    world.say("never", gate=gate)
    config = GatewayConfig(port=0, tokenizer_path=save_tokenizer(tmp_path))
    server = HttpServer(config, Wiring((world.engine.url,)), world.pool)
    origin = await asyncio.to_thread(server.start)
    async with AsyncOpenAI(base_url=f"{origin}/t/p/v1", api_key="x", max_retries=0) as client:
        call = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        )
        await world.engine.arrived.wait()
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await call
        await stopping
    gate.set()
    assert world.engine.aborts == [world.engine.requests[0]["rid"]]
    assert not [t for t in threading.enumerate() if t.name == "gateway"]


async def test_a_pool_that_does_not_answer_does_not_keep_a_gateway_from_stopping(
    worlds: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.server.STOP_TIMEOUT_S", 1.0)
    world = await worlds()
    world.port.door.clear()
    config = GatewayConfig(
        port=0,
        tokenizer_path=save_tokenizer(tmp_path),
        admin_keys=["an-admin-key-of-32-characters-00"],
    )
    wiring = Wiring((world.engine.url,), tuning=Tuning(pool_timeout_s=3.0))
    server = HttpServer(config, wiring, world.pool)
    origin = await asyncio.to_thread(server.start)
    headers = {"authorization": "Bearer an-admin-key-of-32-characters-00"}
    async with aiohttp.ClientSession() as http:
        # Nothing here speaks WebSocket: such a request is like any other.
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(f"{origin}/v1/responses")
        assert refused.value.status == 401
        body = {"messages": [{"role": "user", "content": "x"}]}
        url = f"{origin}/t/p/v1/chat/completions"
        call = asyncio.create_task(http.post(url, json=body, headers=headers))
        await world.port.waiting.wait()
        await asyncio.to_thread(server.stop)
        await asyncio.wait([call])
    await until(lambda: not [t for t in threading.enumerate() if t.name == "gateway"], 10)
