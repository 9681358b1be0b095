"""What an engine answers to `stepwell doctor --engine`, recorded from a real one and given again.

    doctor ──► recording(url, answers) ──► the engine      `make record-sglang` writes the file
    doctor ──► given_again(answers)                        `test_doctor_engine.py` reads it

An answer is found by method, path and whether it is streamed. Of `/server_info`, which holds every
option of the server, only the fields that are read are kept.
"""

from __future__ import annotations

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

RECORDED = Path(__file__).parent / "doctor_sglang.json"
READ = ("device", "dtype", "tp_size", "pp_size")
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


def recording(url: str, answers: list[Answer]) -> Starlette:
    """Hands requests on to the engine at `url`, and keeps what it answers."""

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
        kept = text.replace(str(MODEL), "MODEL_DIR")
        if path == "/server_info" and answer.status == 200:
            kept = json.dumps({name: json.loads(text).get(name) for name in READ})
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


async def record(url: str, engine: str) -> None:
    """Write what the engine at `url` answers."""
    answers: list[Answer] = []
    async with serving(recording(url, answers)) as between:
        code, found = await run_doctor(between)
    whole = {"engine": engine, "answers": [each._asdict() for each in answers]}
    RECORDED.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    print(f"doctor: {code}", *(f["text"] for f in found.values() if f["state"] != "ok"), flush=True)


def read() -> list[Answer]:
    return [Answer(**each) for each in json.loads(RECORDED.read_text())["answers"]]
