"""Sessions in `golden/`, played again: clients' requests and the answers to them, byte for byte.

    python -m tests.gateway.golden --record [NAME…]

plays the requests of the sessions and rewrites their answers. A session has its own gateway (real,
with the options in the file), a pool of this process and an engine that says what the file says.
Ids that are random and times of the clock have names (`<id1>`, `<time>`), by which later requests
of the session send them back.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Tuning, Wiring
from stepwell.gateway.server import http_protocol
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.gateway.conftest import (
    Sampled,
    ScriptedEngine,
    eos_id,
    local_pool,
    make_tokenizer,
    port_of,
    serving,
)

FOLDER = Path(__file__).parent / "golden"
OF_THE_SERVER = frozenset({"content-length", "date", "server"})
_RANDOM = re.compile(r"(?<=call_)[0-9a-f]{24}|[0-9a-f]{32}")
_CLOCK = re.compile(r'"(created|created_at|completed_at|undisturbed_s)":[0-9.]+')


def sessions() -> list[tuple[str, str]]:
    """(file, session) of all."""
    return [(p.stem, name) for p in sorted(FOLDER.glob("*.json")) for name in load(p.stem)]


def load(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{file}.json").read_text())
    return loaded


class Names:
    """Names of what differs each time, in the order of its appearance."""

    def __init__(self, origin: str) -> None:
        self._names = {origin: "<gateway>", origin.removeprefix("http://"): "<host>"}

    def put(self, text: str) -> str:
        """`text` with names in it."""
        for found in _RANDOM.findall(text):
            if found not in self._names:
                name = f"id{len(self._names) - 1}"
                self._names[found] = f"<{name}>"
        text = _CLOCK.sub(r'"\1":<time>', text)
        for value, name in self._names.items():
            text = text.replace(value, name)
            for about in ("", "prompt-"):  # in the key of a trajectory
                coded = urlsafe_b64encode(f"{about}{value}".encode()).decode().rstrip("=")
                text = text.replace(f".{coded}", f".<base64 {about}{name}>")
        return text

    def fill(self, text: str) -> str:
        """`text` with what the names stand for."""
        for value, name in self._names.items():
            text = text.replace(name, value)
        return text


async def play(session: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to the session's requests now."""
    tokenizer = make_tokenizer(session.get("model", "quickstart"))
    end = eos_id(tokenizer)
    engine = ScriptedEngine(
        default=lambda _: Sampled([*tokenizer.encode("fine").tolist(), end]), burst=3
    )
    engine.incremental = True  # its events then come one by one, however they travel
    engine.context_length = session.get("context_length", 4096)
    async with engine.running() as engine_url, local_pool() as pool:
        config = GatewayConfig(port=0, **{"engine_retries": 1, **session.get("gateway", {})})
        tuning = Tuning(**{"retry_backoff_s": 0.001, **session.get("tuning", {})})
        app = create_app(config, Wiring((engine_url,), tuning=tuning), pool, tokenizer)
        async with (
            serving(app, http=http_protocol(config, tuning)) as url,
            aiohttp.ClientSession() as http,
        ):
            names = Names(url)
            answers = []
            for exchange in session["exchanges"]:
                engine.script[:] = [_said(each, tokenizer, end) for each in exchange.get("say", ())]
                port_of(pool).is_away = exchange.get("pool") == "away"
                answers.append(await _ask(http, url, exchange["request"], names))
            return answers


def _said(wanted: Any, tokenizer: ChatTokenizer, end: int) -> Sampled:
    if isinstance(wanted, str):
        return Sampled([*tokenizer.encode(wanted).tolist(), end])
    text = wanted.pop("text", "")
    ids = wanted.pop("ids", None) or tokenizer.encode(text).tolist()
    hangs = asyncio.Event() if wanted.pop("hangs", False) else None
    return Sampled(ids, gate=hangs, **wanted)


async def _ask(
    http: aiohttp.ClientSession, url: str, request: dict[str, Any], names: Names
) -> dict[str, Any]:
    sent = json.loads(names.fill(json.dumps(request)))
    body = sent.get("text", json.dumps(sent["json"]) if "json" in sent else "")
    headers = {"content-type": "application/json"} if body else {}
    headers |= sent.get("headers", {})
    target = URL(f"{url}{sent['path']}", encoded=True)
    method = sent.get("method", "POST")
    async with http.request(
        method, target, data=body.encode() or None, headers=headers, allow_redirects=False
    ) as answer:
        text = names.put((await answer.read()).decode())
        lines = text.split("\n")
        if request.get("unordered"):  # samples that are streamed at once
            lines.sort()
        told = {k.lower(): names.put(v) for k, v in answer.headers.items()}
        kept = {k: told[k] for k in sorted(told) if k not in OF_THE_SERVER}
        if "allow" in kept:  # a set, in any order
            kept["allow"] = ", ".join(sorted(kept["allow"].split(", ")))
        return {"status": answer.status, "headers": kept, "body": lines}


async def record(files: list[str]) -> None:
    for file in files or [p.stem for p in sorted(FOLDER.glob("*.json"))]:
        recorded = load(file)
        for session in recorded.values():
            for exchange, answer in zip(
                session["exchanges"], await play(json.loads(json.dumps(session))), strict=True
            ):
                exchange["answer"] = answer
        text = json.dumps(recorded, indent=1, ensure_ascii=False)
        (FOLDER / f"{file}.json").write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"]:
        sys.exit(__doc__)
    asyncio.run(record(sys.argv[2:]))
