"""The fake engine of all rooms' tests: it has the methods of `Engine` by which weights and
memory change hands, and neither process nor address. The one that is asked over HTTP is
`ScriptedEngine` in `tests/gateway/conftest.py`; the real one `tests/backends/engines/conftest.py`
starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from stepwell.backends.engines.api import EngineState, version_number
from stepwell.backends.errors import EngineError


class Load:
    """A load of weights that takes until it may end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()


class FakeEngine:
    """Engine that notes what it is told, and fails at what a test says."""

    def __init__(self, url: str = "http://fake", **fails: Exception) -> None:
        self.url = url
        self.name = "0"
        """The version as it says it."""
        self.path = ""
        self.calls: list[str] = []
        """Requests, in order: `pause MODE`, `load VERSION`, `continue`, `release`,
        `resume`."""
        self.fails: dict[str, Exception] = dict(fails)
        """Request, such as `pause` or `load 1` -> what it raises."""
        self.down = 0
        """Questions for its version that nobody answers."""
        self.changed = asyncio.Event()
        self.load: Load | None = None

    @property
    def version(self) -> int:
        return version_number(self.name)

    @version.setter
    def version(self, version: int | str) -> None:
        self.name = str(version)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[Load]:
        """Loads take until they may end, inside the block."""
        self.load = Load()
        yield self.load
        self.load.may_end.set()
        self.load = None

    async def serves(self, version: int) -> None:
        """Returns once it serves `version` or a later one."""
        while self.version < version:
            self.changed.clear()
            await self.changed.wait()

    async def request(self, *words: str) -> None:
        """Every request comes here first."""
        await asyncio.sleep(0)
        self.fail(*words)

    def fail(self, *words: str) -> None:
        for name in (words[0], " ".join(words)):
            if name in self.fails:
                raise self.fails[name]

    async def _tell(self, *words: str) -> None:
        self.calls.append(" ".join(words))
        await self.request(*words)

    # -- what a publication asks, and a trainer that borrows memory ------------------------------

    async def state(self) -> EngineState:
        await self.request("state")
        return EngineState.of(self.name)

    async def weight_version(self) -> int:
        if self.down:
            self.down -= 1
            raise EngineError("connection refused")
        return (await self.state()).version or 0

    async def about(self) -> EngineState:
        await self.request("about")
        return (await self.state())._replace(model_path=self.path, device="fake")

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        await self.request("weight_hashes")
        return None

    async def pause(self, mode: str, timeout_s: float | None = None) -> None:
        await self._tell("pause", mode)

    async def continue_(self) -> None:
        await self._tell("continue")

    async def release_memory(self) -> None:
        await self._tell("release")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        await self._tell("resume", *tags)

    async def update_weights_from_disk(self, path: str, version: str, flush_cache: bool) -> None:
        await self._tell("load", str(version))
        if self.load is not None:
            self.load.begun.set()
            await self.load.may_end.wait()
        self.path, self.name = path, str(version)
        self.changed.set()
