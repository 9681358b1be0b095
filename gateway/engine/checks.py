"""This module asks each engine how it is, in the background, so that calls go to those that can
serve them.

Every `Tuning.engine_health_interval_s`, and at once when a call broke on it:

    state   it answers, and has this weight version
    check   it can generate

The first decides whether the engine is there, because a real SGLang generates a token for a check
and so fails it while it is paused. An engine that does not say its version is not held to one: the
calls' own answers are refused with a clear error.

It owns these tasks, and not what follows from an answer (`fleet.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from stepwell.backends.engines.api import Engine as Asked
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.engines.kinds import connect
from stepwell.backends.errors import EngineError as AskingError
from stepwell.backends.errors import EngineUnavailableError as NotThereError
from stepwell.gateway.config import Wiring
from stepwell.gateway.engine.fleet import Engine, Fleet

log = logging.getLogger(__name__)

_RECHECK_S = 1.0
"""Between checks of an engine that is not up."""
_AT_ONCE_S = 0.01


class EngineChecks:
    """The checks of one fleet, over connections of their own. Owned by the client."""

    def __init__(self, wiring: Wiring, fleet: Fleet) -> None:
        self._connections = ConnectionPool()
        self._tuning = wiring.tuning
        self._kind = wiring.engine
        self._fleet = fleet
        self._watchers: dict[Engine, asyncio.Task[None]] = {}
        self._wake: dict[Engine, asyncio.Event] = {}
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Begin; each engine has been asked once. Idempotent."""
        if self._watchers:
            return
        await asyncio.gather(*(self._check(engine) for engine in self._fleet))
        for engine in self._fleet:
            self._wake[engine] = asyncio.Event()
            self._watchers[engine] = asyncio.create_task(self._watch(engine))

    async def close(self) -> None:
        """Idempotent."""
        tasks = tuple(self._watchers.values())
        self._watchers.clear()
        self._wake.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._connections.close()

    def look_at(self, engine: Engine) -> None:
        """Check `engine` now."""
        if engine in self._wake:
            self._wake[engine].set()

    async def wait_for_candidate(self, seconds: float) -> None:
        """Until some engine may be used, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._fleet.has_candidate(time.monotonic()):
                    await self._news.wait()

    def asking(self, url: str, timeout_s: float | None = None) -> Asked:
        timeout_s = timeout_s or self._tuning.engine_health_timeout_s
        return connect(self._kind, url, timeout_s=timeout_s, connections=self._connections)

    async def context_length(self) -> int:
        """Tokens that fit in prompt and response, as the first engine says that says it.

        Raises:
            backends.errors.EngineError: none does.
        """
        why: AskingError = NotThereError(self._fleet.why_none())
        for url in (engine.url for engine in self._fleet):
            try:
                return await self.asking(url).max_model_len()
            except AskingError as e:
                why = e
        raise why

    # -- engines ------------------------------------------------------------------------------

    async def _watch(self, engine: Engine) -> None:
        wake = self._wake[engine]
        while True:
            interval = self._tuning.engine_health_interval_s
            if self._fleet.state(engine) != "up":
                probe_in = max(self._fleet.probe_in(engine, time.monotonic()), _AT_ONCE_S)
                interval = min(interval, _RECHECK_S, probe_in)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await wake.wait()
            wake.clear()
            try:
                await self._check(engine)
            except Exception:  # a task that ended would leave the engine as it is for good
                log.exception("checking %s failed", engine.url)

    async def _check(self, engine: Engine) -> None:
        fleet, client = self._fleet, self.asking(engine.url)
        asked, state = engine.asked(), fleet.state(engine)
        try:
            found = await client.state()
        except AskingError as e:
            refused = isinstance(e, NotThereError) and e.refused
            fleet.check_failed(engine, time.monotonic(), str(e), refused=refused)
        else:
            version, canary = found.version, found.is_canary
            if not fleet.check_passed(
                engine, time.monotonic(), asked=asked, version=version, canary=canary
            ):
                return
            self._tell()
            why = ""
            try:
                await client.check()
            except AskingError as e:
                why = str(e)
            fleet.health(engine, time.monotonic(), well=not why, why=why)
            self._tell()
        after = fleet.state(engine)
        if after != state:
            why = engine.why if after != "up" else ""
            log.warning("engine %s is %s (was %s) %s", engine.url, after, state, why)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
