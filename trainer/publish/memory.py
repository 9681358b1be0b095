"""Memory that engines lend to the trainer on the GPUs that they share (`engine.release_memory`).

    generating ──lend: pause(abort), release──► the trainer computes ──take_back──► generating
         ▲   the gateway keeps what was cut and resumes it              resume, continue  │
         └────────────────────────────────────────────────────────────────────────────────┘

A lend holds the weight store's lock: a publication needs engines that have their memory, whoever
publishes, and an engine that restarts loads its weights when the GPU is free. Weights come back as
they were lent, so that nothing is sampled from garbage should the publication after it fail.

An engine that cannot be reached has no memory to lend: its supervisor brings it back. Should it
come back while the trainer computes, the two share the GPU for that long. So they do if an engine
fails at a lend, or does not answer in time: what it may have done is undone at once.

Owns when memory changes hands, and that it comes back. Does not own the endpoints
(`backends/engines/client.py`) or what the trainer frees (`TrainingBackend.free_cache`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from stepwell.backends.engines.api import Engine
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.backends.weights import StoreLock

log = logging.getLogger(__name__)

GAP_S = 0.1
"""Seconds between two lends, in which whoever waits for the store's lock gets it."""


class EngineMemory:
    """The memory of all engines, at home or lent. Without `lends` every method does nothing.

    Args:
        lock: of the weight store.
    """

    def __init__(self, engines: Sequence[Engine], lock: StoreLock, *, lends: bool) -> None:
        self.lends = lends
        self._engines = list(engines)
        self._lock = lock
        self._lent: list[Engine] | None = None
        self._held = AsyncExitStack()
        """Holds the lock while memory is lent."""
        self._returned = -GAP_S
        """Monotonic time at which memory came back last."""

    async def lend(self) -> None:
        """Returns once the engines are paused and have released their memory. Idempotent.

        Raises:
            EngineRequestError: an engine refuses; those that did not were given theirs back.
        """
        if not self.lends or self._lent is not None:
            return
        await asyncio.sleep(max(0.0, self._returned + GAP_S - time.monotonic()))
        await self._held.enter_async_context(self._lock.held())
        self._lent = []
        try:
            results = await asyncio.gather(
                *(self._release(engine, self._lent) for engine in self._engines),
                return_exceptions=True,
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:  # a cancellation, too: no engine may stay without its memory
            await self.take_back()
            raise

    async def take_back(self) -> None:
        """Returns once the engines have their memory and generate. Idempotent."""
        if self._lent is None:
            return
        try:
            await asyncio.gather(*(self._resume(engine) for engine in self._lent))
        finally:
            self._lent = None
            await self._held.aclose()
            self._returned = time.monotonic()

    async def _release(self, engine: Engine, lent: list[Engine]) -> None:
        asked = False
        try:
            await engine.pause("abort")
            asked = True
            await engine.release_memory()
            lent.append(engine)
        except EngineUnavailableError as e:
            log.warning("%s lends no memory: %s", engine.url, e)
        except (EngineTimeoutError, EngineInternalError) as e:
            log.warning("%s lends no memory: %s", engine.url, e)
            await self._undo(engine, released=asked)
        except EngineError:
            await engine.continue_()
            raise
        except BaseException:  # a cancellation
            await self._undo(engine, released=asked)
            raise

    async def _undo(self, engine: Engine, *, released: bool) -> None:
        """Leave an engine whole and generating that may have carried out what it did not answer."""
        if released:
            with suppress(EngineError):  # it had released nothing, or does not answer now either
                await engine.resume_memory()
        with suppress(EngineError):  # it has ended: its supervisor starts it
            await engine.continue_()

    async def _resume(self, engine: Engine) -> None:
        try:
            await engine.resume_memory()
            await engine.continue_()
        except EngineError as e:  # a refusal, too: a new process has nothing to take back
            log.warning("%s does not take its memory back: %s", engine.url, e)
