"""`stepwell doctor --engine`: an engine that answers all, and some that lack something."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stepwell.backends.engines.routes import NEEDED, OPTIONAL, READ
from stepwell.backends.engines.vllm import GENERATE, ROUTES
from stepwell.cli.main import main
from stepwell.show.engine import check_engine
from tests.backends.engines import table
from tests.backends.engines.doctor_answers import Answer, given_again, read, run_doctor
from tests.backends.engines.dynamo_server import in_a_thread
from tests.gateway.conftest import serving


def doctor_here(
    server: Starlette, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    """The same as `run_doctor`, of an app, in this process, which has imported all of it."""
    with in_a_thread(serving(server)) as url:
        code = main(["doctor", "--engine", url, "--json"])
    return code, {f["name"]: f for f in json.loads(capsys.readouterr().out)}


async def test_an_engine_of_ours_lacks_nothing_and_is_left_as_it_was(
    engine: Any, client: Any
) -> None:
    before = await client.model_info()
    code, told = await run_doctor(engine.url)
    assert {name: f["text"] for name, f in told.items() if f["state"] != "ok"} == {}
    assert code == 0
    assert told.keys() >= {*NEEDED, *OPTIONAL, "/generate", "/generate (stream)"}
    assert await client.model_info() == before


def test_a_real_sglang_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = doctor_here(given_again(read("sglang")), capsys)
    assert {name: f["text"] for name, f in told.items() if f["state"] != "ok"} == {}
    assert code == 0
    assert told["engine"]["text"] == "sglang 0.5.23"
    assert told["/server_info"]["text"] == "device cpu, dtype float32"
    assert told["/v1/models"]["text"] == "2048 tokens fit"


@pytest.mark.parametrize("path", [*NEEDED, *OPTIONAL, *READ])
async def test_what_is_taken_from_a_real_sglang_is_missed(path: str) -> None:
    """Each row of the table: the same answers, without this route."""
    async with serving(given_again([a for a in read("sglang") if a.path != path])) as url:
        found = await asyncio.to_thread(lambda: [*check_engine(url)])
    told = {each.name: each for each in found}
    names = {path, f"{path} (stream)"} & told.keys()
    if path == "/generate":
        names.add("engine")  # it has another API
    assert {name for name, f in told.items() if f.state != "ok"} == names
    state = "warning" if path in OPTIONAL else "problem"
    for name in names - {"engine"}:
        assert told[name].state == state
        assert (told[name].remedy or "").startswith("without it: ")


def test_a_real_vllm_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = doctor_here(given_again(read("vllm")), capsys)
    assert {name: f["text"] for name, f in told.items() if f["state"] != "ok"} == {}
    assert code == 0
    assert told["engine"]["text"] == "vllm 0.32.0"
    assert told["/v1/models"]["text"] == "2048 tokens fit"
    assert told.keys() >= {*ROUTES.read, *ROUTES.needed, *ROUTES.optional}


@pytest.mark.parametrize("path", [*ROUTES.read, *ROUTES.needed, *ROUTES.optional])
async def test_what_is_taken_from_a_real_vllm_is_missed(path: str) -> None:
    async with serving(given_again([a for a in read("vllm") if a.path != path])) as url:
        found = await asyncio.to_thread(lambda: [*check_engine(url, "vllm")])
    told = {each.name: each for each in found}
    names = {path, f"{path} (stream)"} & told.keys()
    if path == GENERATE:
        names.add("engine")
        assert "has no /inference/v1/generate" in told["engine"].text
    assert {name for name, f in told.items() if f.state != "ok"} == names
    state = "warning" if path in ROUTES.optional else "problem"
    for name in names - {"engine"}:
        assert told[name].state == state
        assert (told[name].remedy or "").startswith("without it: ")


def test_a_server_that_gives_text_without_ids_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answers of a real vLLM of which only OpenAI's routes are left."""
    answers = [a for a in read("vllm") if a.path in ("/health", "/v1/models")]
    answers = [a._replace(text=a.text.replace('"vllm"', '"somebody"')) for a in answers]
    chat = Answer("OPTIONS", "/v1/chat/completions", False, 405, "application/json", "{}")
    code, told = doctor_here(given_again([*answers, chat]), capsys)
    assert code == 1
    assert told["engine"]["state"] == "problem"
    assert "somebody has no /generate: it speaks OpenAI's API" in told["engine"]["text"]
    assert "Token ids and their log-probs are lost" in told["engine"]["text"]
    assert "start SGLang 0.5.23" in told["engine"]["remedy"]


def test_an_older_sglang_is_told_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    later = ("/begin_weight_update", "/end_weight_update", "/v1/loads")  # as 0.5.9
    answers = [a for a in read("sglang") if a.path not in later]
    answers = [a._replace(text=a.text.replace("0.5.23", "0.5.9")) for a in answers]
    code, told = doctor_here(given_again(answers), capsys)
    assert code == 0
    assert {name for name, f in told.items() if f["state"] == "warning"} == {"engine", *later}
    assert told["engine"]["text"] == "sglang 0.5.9; tested is 0.5.23"
    assert "pip install 'sglang>=0.5.23'" in told["engine"]["remedy"]


@pytest.mark.parametrize("version", ["dev", "0.32.0-our-fork"])
def test_a_version_that_is_no_number_is_told_as_it_is(
    capsys: pytest.CaptureFixture[str], version: str
) -> None:
    """vLLM's of a checkout is `dev`."""
    answers = [a._replace(text=a.text.replace("0.32.0", version)) for a in read("vllm")]
    code, told = doctor_here(given_again(answers), capsys)
    assert code == 0
    assert (told["engine"]["state"], told["engine"]["text"]) == ("ok", f"vllm {version}")


def test_the_names_of_routes_are_whole_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with in_a_thread(serving(given_again(read("sglang")))) as url:
        main(["doctor", "--engine", url])
    out = capsys.readouterr().out
    assert "/update_weights_from_distributed is there" in out
    assert "/health                          is well" in out


def incomplete(**changes: Any) -> Starlette:
    """A server that samples, and has neither updates nor a device."""

    async def info(request: Request) -> Response:
        return JSONResponse({"model_path": "m", "weight_version": "0"})

    async def server_info(request: Request) -> Response:
        return JSONResponse({"dtype": "float32"})

    async def generate(request: Request) -> Response:
        body = await request.json()
        meta = {
            "finish_reason": {"type": "length", "length": 1},
            "weight_version": "0",
            "completion_tokens": 1,
            "output_token_logprobs": [[-0.5, changes.get("logprob_of", 7), None]],
        }
        whole = json.dumps({"output_ids": [7], "meta_info": meta}).encode()
        if not body["stream"]:
            return Response(whole, media_type="application/json")

        async def stream() -> AsyncIterator[bytes]:
            yield b"data: " + whole + b"\r\n\r\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/model_info", info),
            Route("/server_info", server_info),
            Route("/generate", generate, methods=["POST"]),
            Route("/abort_request", health, methods=["POST"]),
        ]
    )


def test_each_thing_that_an_engine_lacks_is_named_with_what_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, told = doctor_here(incomplete(), capsys)
    assert code == 1
    states = {name: f["state"] for name, f in told.items()}
    assert states["/generate"] == states["/generate (stream)"] == "warning"
    assert "meta_info has no weight_versions" in told["/generate"]["text"]
    assert "get the older version" in told["/generate (stream)"]["remedy"]
    assert states["/abort_request"] == "ok"
    assert states["/v1/models"] == "problem"
    assert states["/server_info"] == "warning"
    assert "device is missing, taken as cuda" in told["/server_info"]["text"]
    assert states["/update_weights_from_disk"] == "problem"
    assert "weights cannot be published" in told["/update_weights_from_disk"]["remedy"]
    assert states["/load_lora_adapter"] == "warning"
    assert "weight_transport=lora" in told["/load_lora_adapter"]["remedy"]


def test_log_probs_of_other_tokens_are_found_before_they_are_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, told = doctor_here(incomplete(logprob_of=8), capsys)
    assert told["/generate"]["state"] == "problem"
    assert "log-probs of other tokens than output_ids" in told["/generate"]["text"]


def test_an_engine_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "http://127.0.0.1:9"]) == 1
    assert "no engine answers at http://127.0.0.1:9" in capsys.readouterr().out


def test_the_table_of_the_docs_names_every_route_that_is_looked_for() -> None:
    page = (Path(__file__).parents[3] / "docs/design/engines.md").read_text()
    table = page.split("## What an engine has to answer")[1].split("\n## ")[0]
    named = set(re.findall(r"(/[\w/]+)`", table))
    vllm = {*ROUTES.read, *ROUTES.needed, *ROUTES.optional}
    assert named == {*NEEDED, *OPTIONAL, *READ, *vllm}


def test_the_table_of_the_contract_is_what_the_suite_found() -> None:
    """`python -m tests.backends.engines.table` writes it."""
    assert table.PAGE.read_text() == table.page()
    for kind in table.COLUMNS:
        tests = json.loads(table.RESULTS.read_text())[kind]["tests"]
        assert tests == dict.fromkeys(table.rows(), "passed"), kind
