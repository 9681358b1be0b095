"""The quickstart's model served for a bench: the embedded engine as a process, a gateway before it
in this one, and the Steps that it stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port, python
from stepwell.backends.engines.client import EngineClient
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step
from stepwell.gateway.config import TUNING, GatewayConfig, Tuning, Wiring
from stepwell.gateway.server import HttpServer

MODEL = Path(__file__).parents[1] / "examples" / "quickstart" / "model"


@dataclass(frozen=True)
class RunningEngine:
    url: str
    process: asyncio.subprocess.Process


@asynccontextmanager
async def engine(model: Path, log: Path) -> AsyncIterator[RunningEngine]:
    """The embedded engine as a process of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ("-m", "stepwell.backends.engines.embedded", "--model-path", str(model))
    async with python(*command, "--port", str(port), output=log) as process:
        async with asyncio.timeout(60), EngineClient(url) as client:
            while process.returncode is None and not await client.health():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        if process.returncode is not None:
            raise RuntimeError(await asyncio.to_thread(log.read_text))
        yield RunningEngine(url, process)


@asynccontextmanager
async def gateway(
    pool: DataPoolClient,
    engine_urls: Sequence[str],
    tuning: Tuning = TUNING,
    *,
    canary_share: float = 0.0,
    **options: Any,
) -> AsyncIterator[str]:
    """The gateway on an event loop of its own; yields its origin."""
    config = GatewayConfig(
        port=0,
        tokenizer_path=str(MODEL),
        tool_parser="none",
        **options,
    )
    wiring = Wiring(tuple(engine_urls), canary_share=canary_share, tuning=tuning)
    server = HttpServer(config, wiring, pool)
    try:
        yield await asyncio.to_thread(server.start)
    finally:
        await asyncio.to_thread(server.stop)


async def steps_in(pool: DataPoolClient) -> list[Step]:
    """All that a gateway stored in its training channel, once nobody uses the pool any more."""
    steps: list[Step] = []
    cursor = None
    while True:
        page = await pool.read_trajectories(cursor=cursor)
        steps += [step for each in page.unpack() for step in each.trajectory.steps]
        cursor = page.cursor
        if cursor is None:
            return steps
