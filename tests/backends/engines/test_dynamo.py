"""Dynamo's two halves as one engine, on a scripted Dynamo (`dynamo_server.py`). What it samples
and how it takes weights is in the contract of the seam (`test_seam.py`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import Engine, GenerateRequest, Output, PromptPictures, Sampling
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.dynamo import ROUTES
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.routes import check_routes
from stepwell.backends.errors import BackendConfigError, EngineRequestError, EngineStartError
from stepwell.backends.weights import WeightStore, publish
from stepwell.config.load import load_config
from stepwell.run.checks import engine as check_engine_of
from stepwell.trainer.errors import ConfigError
from tests.backends.engines.conftest import Models
from tests.backends.engines.dynamo_server import dynamo

ATTACHED = ["engine.kind=dynamo", "engine.urls=[http://a:8081,http://b:8081]"]
FRONTEND = "engine.options={frontend: 'http://f:8000'}"


def attached(frontend: str, worker: str) -> EngineConfig:
    return EngineConfig(kind="dynamo", urls=(worker,), options={"frontend": frontend})


async def sampled(engine: Engine, **changes: Any) -> Output:
    outputs: list[Output] = []
    request = GenerateRequest("me", np.array([40, 41], np.int32), Sampling(4, 1.0), 4)
    await engine.sample(request._replace(**changes), outputs.append)
    [output] = outputs
    return output


async def test_weights_go_to_the_worker_and_calls_to_the_frontend(
    engine: Any, model_dirs: Models, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    async with (
        dynamo(engine.url) as (frontend, worker),
        connect(attached(frontend, worker), worker) as asked,
    ):
        assert (await sampled(asked)).version == 0
        done = await publish([asked], model_dirs.new, 5, "retract", store=store)
        assert done.verified == {worker: "version"}
        output = await sampled(asked)
        assert output.version == 5
        assert 1 <= len(output.ids) == len(output.log_probs) <= 4
        assert (await asked.about()).model_path != str(model_dirs.base)


async def test_a_call_that_is_aborted_again_while_its_connection_is_closed_ends_once(
    engine: Any,
) -> None:
    async with (
        dynamo(engine.url) as (frontend, worker),
        connect(attached(frontend, worker), worker) as asked,
        EngineClient(engine.url) as server,
    ):
        outputs: list[Output] = []
        request = GenerateRequest("me", np.array([40, 41], np.int32), Sampling(4, 1.0), 4)
        await server.pause("retract")  # it has no end
        call = asyncio.create_task(asked.sample(request, outputs.append))
        await asyncio.sleep(0)
        for _ in range(20):
            await asked.abort("me")
            await asyncio.sleep(0)
        await call
        assert [output.finish for output in outputs] == ["abort"]
        await server.continue_()


async def test_its_routes_are_looked_for_and_none_is_called(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker pauses whatever the method that asks it to."""
    async with dynamo(engine.url) as (frontend, worker):
        config = attached(frontend, worker)
        async with connect(config, worker) as asked:
            await check_routes(asked, config, publishes=True)
            assert (await sampled(asked)).finish in ("length", "stop")
    assert not caplog.records


async def test_a_worker_that_does_not_expose_what_a_run_needs_is_refused(engine: Any) -> None:
    async with dynamo(engine.url, "server_info=get_server_info") as (frontend, worker):
        config = attached(frontend, worker)
        async with connect(config, worker) as asked:
            with pytest.raises(EngineStartError) as e:
                await check_routes(asked, config, publishes=True)
    assert f"lacks /model_info ({ROUTES.read['/model_info']})" in str(e.value)
    assert "DYN_SGLANG_ENGINE_ROUTES" in str(e.value)
    assert "Dynamo 1.6.1" in str(e.value)


async def test_a_frontend_that_is_taken_for_sglang_names_the_remedy(engine: Any) -> None:
    async with dynamo(engine.url) as (frontend, _), EngineClient(frontend) as asked:
        with pytest.raises(EngineStartError, match=r"NVIDIA Dynamo's frontend.* engine\.kind=dyn"):
            await check_routes(asked, EngineConfig(kind="attach", urls=(frontend,)), publishes=True)


async def test_pictures_are_refused() -> None:
    pictures = PromptPictures([], dict, 1)  # type: ignore[arg-type]  # never read
    engine = connect(attached("http://f", "http://w"), "http://w")
    with pytest.raises(EngineRequestError, match="takes no pictures: it is Dynamo"):
        await sampled(engine, pictures=pictures)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["engine.options={}"], r"engine\.options\.frontend is .*Field required.* are frontend"),
        (["engine.options={frontend: 'f:8000'}"], r"engine\.options\.frontend is 'f:8000'"),
        ([FRONTEND, "engine.weight_transport=nccl"], r"engine\.kind 'dynamo' takes disk"),
        ([FRONTEND, "engine.release_memory=true"], "'dynamo' lends no memory"),
        ([FRONTEND, "publish.guard={}"], r"publish\.canary_share is 0\.2, and .* 'dynamo'.* null"),
    ],
)
def test_a_configuration_that_asks_it_for_what_it_has_not_is_refused(
    settings: list[str], words: str
) -> None:
    with pytest.raises((ConfigError, BackendConfigError), match=words):
        check_engine_of(load_config("quickstart", [*ATTACHED, *settings]))


def test_the_one_that_has_all_it_needs_is_taken() -> None:
    check_engine_of(load_config("quickstart", [*ATTACHED, FRONTEND, "publish.canary_share=null"]))
