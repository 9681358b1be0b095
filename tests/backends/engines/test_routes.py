"""One line names the routes that an older server lacks when a run connects to it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from starlette.applications import Starlette

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.routes import TESTED, check_routes
from stepwell.backends.errors import EngineStartError
from stepwell.cli.main import main
from tests.backends.engines.doctor_answers import given_again, read
from tests.backends.engines.dynamo_server import in_a_thread
from tests.gateway.conftest import serving

LATER = {
    "0.5.9": ("/begin_weight_update", "/end_weight_update", "/v1/loads"),
    "0.5.2": (
        "/model_info",
        "/server_info",
        "/weights_checker",
        "/destroy_weights_update_group",
        "/begin_weight_update",
        "/end_weight_update",
        "/v1/loads",
    ),
}
"""Version -> routes that its `sglang/srt/entrypoints/http_server.py` does not declare yet."""
CONNECT = EngineConfig(kind="attach", urls=("http://127.0.0.1:1",))


def older(version: str, lacks: Collection[str] = ()) -> Starlette:
    """SGLang's recorded answers without what came after `version`."""
    lacks = lacks or LATER[version]
    found = [answer for answer in read("sglang") if answer.path not in lacks]
    return given_again([a._replace(text=a.text.replace(TESTED, version)) for a in found])


async def check(app: Starlette, *, publishes: bool = True, **settings: object) -> None:
    config = CONNECT.model_copy(update=settings)
    async with serving(app) as url, EngineClient(url) as engine:
        await check_routes(engine, config, publishes=publishes)


@pytest.mark.parametrize("transport", ["disk", "delta", "nccl", "ipc", "lora"])
async def test_of_the_tested_sglang_nothing_is_said(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    await check(given_again(read("sglang")), weight_transport=transport, release_memory=True)
    assert not caplog.records


async def test_what_this_run_does_not_need_is_a_warning_of_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await check(older("0.5.9"))
    [line] = caplog.messages
    assert "(sglang 0.5.9) lacks /v1/loads (`stepwell top` shows no load); " in line
    assert "/begin_weight_update, /end_weight_update (no engine.weight_transport=nccl)" in line
    assert line.endswith("; tested is SGLang 0.5.23")


async def test_what_this_run_needs_is_refused_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(EngineStartError) as e:
        await check(older("0.5.9"), weight_transport="nccl")
    assert "/begin_weight_update, /end_weight_update (no engine.weight_transport=nccl)" in str(
        e.value
    )
    assert "start SGLang 0.5.23 or newer there" in str(e.value)
    assert "/v1/loads" not in str(e.value)
    with pytest.raises(EngineStartError, match=r"\(sglang\) lacks /model_info, /server_info \(wei"):
        await check(older("0.5.2"))
    with pytest.raises(EngineStartError, match="/release_memory_occupation"):
        await check(older("0.5.9", ["/release_memory_occupation"]), release_memory=True)
    assert not caplog.records


async def test_a_run_that_publishes_nothing_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    await check(older("0.5.2"), publishes=False)
    assert len(caplog.messages) == 1


@pytest.mark.slow
@pytest.mark.e2e
def test_a_training_run_on_a_server_with_another_api_ends_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answers of a real vLLM."""
    settings = ["logging.wandb=disabled", "logging.console=plain", f"run.dir={tmp_path / 'run'}"]
    with in_a_thread(serving(given_again(read("vllm")))) as url:
        attached = ["engine.kind=attach", f"engine.urls=[{url}]"]
        assert main(["train", "--config", "quickstart", *settings, *attached]) == 1
    told = capfd.readouterr()
    lines = [*told.out.splitlines(), *told.err.splitlines()]
    said = [line for line in lines if line.startswith("stepwell: the engine")]
    assert len(said) == 1
    assert not [line for line in lines if "EngineServer.serve" in line], "Ray's own words"
    assert f"the engine at {url} (vllm) is vLLM, which has an API of its own" in said[0]
    assert "set engine.kind=vllm" in said[0]
