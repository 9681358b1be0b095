"""Answers of servers to `stepwell doctor --engine`, recorded from real ones and given again.

    doctor ──► recording(url, answers) ──► the engine      writes doctor_{sglang,vllm}.json
    doctor ──► given_again(answers)                        `test_doctor_engine.py` reads them

`make record-sglang` records SGLang, and a server that runs is recorded by

    python -m tests.backends.engines.doctor_answers URL "vllm 0.32.0" --model DIR

An answer is found by method, path and whether it is streamed. Of `/server_info`, which holds every
option of the server, only the fields that are read are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.backends.engines.exchanges import MODEL
from tests.gateway.conftest import serving

READ = ("device", "dtype", "tp_size", "pp_size", "version")
METHODS = ["GET", "POST", "OPTIONS"]


class Answer(NamedTuple):
    method: str
    path: str
    stream: bool
    status: int
    kind: str
    """Its content type."""
    text: str


async def run_doctor(url: str) -> tuple[int | None, dict[str, Any]]:
    """The exit code, and the findings by name."""
    command = ("-m", "stepwell", "doctor", "--engine", url, "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return process.returncode, {f["name"]: f for f in json.loads(out)}


def recording(url: str, answers: list[Answer], model: str) -> Starlette:
    """Hands requests on to the engine at `url`, which serves `model`, and keeps its answers."""

    async def hand_on(request: Request) -> Response:
        body, path = await request.body(), request.url.path
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method,
                url + path,
                data=body or None,
                headers={"content-type": "application/json"} if body else {},
            ) as answer,
        ):
            text, kind = await answer.text(), answer.content_type
        kept = text.replace(model, "MODEL_DIR")
        if path == "/server_info" and answer.status == 200:
            whole = json.loads(text)
            kept = json.dumps({name: whole[name] for name in READ if name in whole})
        answers.append(Answer(request.method, path, _streams(body), answer.status, kind, kept))
        return Response(text, answer.status, media_type=kind)

    return Starlette(routes=[Route("/{path:path}", hand_on, methods=METHODS)])


def given_again(answers: list[Answer]) -> Starlette:
    """Answers as was recorded; what was not asked then is 404."""

    async def answer(request: Request) -> Response:
        asked = request.method, request.url.path, _streams(await request.body())
        found = next((each for each in answers if each[:3] == asked), None)
        if found is None:
            return Response(status_code=404)
        if not found.stream:
            return Response(found.text, found.status, media_type=found.kind)

        async def events() -> AsyncIterator[str]:
            for event in found.text.split("\n\n"):
                yield event + "\n\n"

        return StreamingResponse(events(), found.status, media_type=found.kind)

    return Starlette(routes=[Route("/{path:path}", answer, methods=METHODS)])


def _streams(body: bytes) -> bool:
    return bool(body) and bool(json.loads(body).get("stream"))


async def record(url: str, engine: str, model: str = str(MODEL)) -> None:
    """Write what the engine at `url` answers.

    Args:
        engine: kind and version, e.g. "vllm 0.32.0".
        model: as the server was told it.
    """
    answers: list[Answer] = []
    async with serving(recording(url, answers, model)) as between:
        code, found = await run_doctor(between)
    whole = {"engine": engine, "answers": [each._asdict() for each in answers]}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    _file(engine.partition(" ")[0]).write_text(text + "\n")
    print(f"doctor: {code}", *(f["text"] for f in found.values() if f["state"] != "ok"), flush=True)


def read(kind: str) -> list[Answer]:
    """The answers of a server of this kind, `sglang` or `vllm`."""
    return [Answer(**each) for each in json.loads(_file(kind).read_text())["answers"]]


def _file(kind: str) -> Path:
    return Path(__file__).parent / f"doctor_{kind}.json"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("engine")
    parser.add_argument("--model", default=str(MODEL))
    given = parser.parse_args()
    asyncio.run(record(given.url, given.engine, given.model))
