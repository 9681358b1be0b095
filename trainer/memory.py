"""Memory that engines lend to the trainer on the GPUs that they share (`engine.release_memory`).

    generating ──lend: pause(abort), release──► the trainer computes ──take_back──► generating
         ▲   the gateway keeps what was cut and resumes it              resume, continue  │
         └────────────────────────────────────────────────────────────────────────────────┘

A publication needs engines that have their memory, and waits for it (`at_home`); a lend waits for
a publication that runs. Weights come back as they were lent, so that nothing is sampled from
garbage should the publication after it fail.

An engine that cannot be reached has no memory to lend: its supervisor brings it back. Should it
come back while the trainer computes, the two share the GPU for that long.

Owns when memory changes hands, and that it comes back. Does not own the endpoints
(`backends/engines/client.py`) or what the trainer frees (`TrainingBackend.free_cache`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineTimeoutError,
    EngineUnavailableError,
)

log = logging.getLogger(__name__)

_GONE = (EngineUnavailableError, EngineTimeoutError, EngineInternalError)


class EngineMemory:
    """The memory of all engines, at home or lent. Without `lends` every method does nothing."""

    def __init__(self, engines: Sequence[EngineClient], *, lends: bool) -> None:
        self.lends = lends
        self._engines = list(engines)
        self._lent: list[EngineClient] | None = None
        self._free = asyncio.Lock()
        """Held by whoever needs the memory where it is now."""

    async def lend(self) -> None:
        """Returns once the engines are paused and have released their memory. Idempotent.

        Raises:
            EngineRequestError: an engine refuses; those that did not were given theirs back.
        """
        if not self.lends or self._lent is not None:
            return
        await self._free.acquire()
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
            self._free.release()

    @asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        """The engines have their memory in this block."""
        async with self._free:
            yield

    async def _release(self, engine: EngineClient, lent: list[EngineClient]) -> None:
        try:
            await engine.pause("abort")
            await engine.release_memory()
            lent.append(engine)
        except _GONE as e:
            log.warning("%s lends no memory: %s", engine.url, e)
        except BaseException:  # a cancellation, too: no engine may stay paused
            await engine.continue_()
            raise

    async def _resume(self, engine: EngineClient) -> None:
        try:
            await engine.resume_memory()
            await engine.continue_()
        except EngineError as e:  # a refusal, too: a new process has nothing to take back
            log.warning("%s does not take its memory back: %s", engine.url, e)
