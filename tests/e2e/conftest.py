"""The main job in small: real Ray, real engine, real gateway, the quickstart's agent and model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.engines.vllm import GENERATE
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from tests.backends.engines.embedded_here import embedded_here

ROOT = Path(__file__).parents[2]
KIND = os.environ.get("STEPWELL_TEST_ENGINES", "embedded")
ATTACHED = "vllm" if KIND == "vllm" else "attach"
"""`engine.kind` of a run that is attached to such an engine."""
SMALL = [
    "logging.wandb=disabled",
    "logging.console=plain",
    "trainer.train_batch_size=2",
    "rollout.n=4",
    "rollout.max_outstanding_groups=4",
    "data.val.size=8",
]
"""The quickstart with small batches."""


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def small_config(folder: Path, *overrides: str) -> RunConfig:
    return load_config("quickstart", [*SMALL, f"run.dir={folder}", *overrides])


@dataclass
class EngineRecorder:
    """A proxy in front of an engine that remembers every `/generate` and what it answered."""

    target: str
    url: str = ""
    answers: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self._session.request(
            request.method,
            self.target + request.path_qs,
            data=body or None,
            headers={"content-type": "application/json"},
        ) as reply:
            out = web.StreamResponse(
                status=reply.status,
                headers={"content-type": reply.headers.get("content-type", "text/plain")},
            )
            await out.prepare(request)
            received = b""
            async for chunk in reply.content.iter_any():
                received += chunk
                await out.write(chunk)
            await out.write_eof()
        if request.path in ("/generate", GENERATE):
            asked = json.loads(body)
            events = [
                json.loads(line.removeprefix(b"data: "))
                for line in (received.splitlines() if asked.get("stream") else [received])
                if line and line != b"data: [DONE]"
            ]
            if request.path == GENERATE:
                self.answers.append((asked["token_ids"], _of_vllm(events)))
            else:
                self.answers.append((asked["input_ids"], events[-1]))
        return out

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[EngineRecorder]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self.forward)
        runner = web.AppRunner(app)
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()


def _of_vllm(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The ids and log-probs of vLLM's answer, as SGLang words them."""
    choices = [choice for event in events for choice in event["choices"]]
    entries = [e for choice in choices for e in choice["logprobs"]["content"]]
    return {
        "output_ids": [i for choice in choices for i in choice["token_ids"]],
        "meta_info": {
            "output_token_logprobs": [(e["logprob"], e["token_id"], None) for e in entries]
        },
    }


@asynccontextmanager
async def engine(log_dir: Path) -> AsyncIterator[str]:
    """The embedded engine on a free port; yields its url. With `STEPWELL_TEST_ENGINES=sglang` a
    real SGLang, likewise a vLLM."""
    model = ROOT / "examples" / "quickstart" / "model"
    if KIND == "embedded":
        with embedded_here(model) as url:
            yield url
        return
    config = EngineConfig(kind=KIND, model_path=model)
    supervisor = Supervisor(config, log_dir)
    try:
        yield await asyncio.to_thread(supervisor.start)
    finally:
        await asyncio.to_thread(supervisor.stop)
