"""A process that does what `stepwell rollback` does, and asks the bench, which has no Ray, for its
pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import VersionNotKeptError, WeightUpdateError
from stepwell.backends.weights import WeightStore
from stepwell.backends.weights.store import Keep
from stepwell.backends.weights.transports import Disk
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.trainer.publish.rollback import roll_back


class AskedPool:
    """The two calls that a roll-back has for the pool."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def get_statistics(self, channel: str) -> Any:
        return await self._ask("get_statistics", channel)

    async def advance_version(self, version: int) -> Any:
        return await self._ask("advance_version", version)

    async def _ask(self, name: str, argument: object) -> Any:
        self._pipe.send((name, argument))
        return await asyncio.to_thread(self._pipe.recv)


def command(pipe: Connection, folder: Path, base: Path, keep: Keep, urls: Sequence[str]) -> None:
    """Serve the version before again; the last word in `pipe` is its number, or the error."""
    try:
        pipe.send(("done", asyncio.run(_run(pipe, folder, base, keep, urls))))
    except (VersionNotKeptError, WeightUpdateError) as e:
        pipe.send(("done", e))


async def _run(pipe: Connection, folder: Path, base: Path, keep: Keep, urls: Sequence[str]) -> int:
    store = WeightStore(folder, keep=keep, base=base)
    pool = cast(DataPoolClient, AskedPool(pipe))
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(EngineClient(url)) for url in urls]
        return await roll_back(engines, store, pool, None, transport=Disk(), trains=True)
