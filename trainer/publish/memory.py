"""Memory that engines lend to the trainer on the GPUs that they share (`engine.release_memory`).

    generating ──lend: pause(abort), release──► the trainer computes ──take_back──► generating
         ▲   the gateway keeps what was cut and resumes it │            resume, continue  │
         │             take_back_weights: resume(weights) ─► a publication ─► complete:   │
         └──────────────────────────────────────────────────  resume(kv_cache), continue ─┘

A lend holds the weight store's lock: a publication needs engines that have their memory, whoever
publishes, and an engine that restarts loads its weights when the GPU is free. Weights come back as
they were lent, so that nothing is sampled from garbage should the publication after it fail. A
publication that is due takes them back first: the cache's memory is free while it loads. One that
the publication leaves paused stays paused, with all its memory.

An engine that cannot be reached has no memory to lend: its supervisor brings it back. Should it
come back while the trainer computes, the two share the GPU for that long. So they do if an engine
fails at a lend, or does not answer in time: what it may have done is undone at once. One that does
so when it takes its memory back is continued all the same: it lives, so nobody else would.

Owns when memory changes hands, and that it comes back. Does not own the endpoints
(`backends/engines/client.py`) or what the trainer frees (`Updater.free_cache`).
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

WEIGHTS = ("weights",)
REST = ("kv_cache", "cuda_graph")
"""SGLang's names of the memory that an engine lends."""
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
        self._has_weights = False
        """Engines of `_lent` have their weights, and not their caches."""
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

    @property
    def is_lent(self) -> bool:
        return self._lent is not None

    @property
    def has_weights(self) -> bool:
        """Engines can load weights, and whoever holds the lock for the lend may publish."""
        return self._lent is not None and self._has_weights

    async def take_back_weights(self) -> None:
        """Returns once the engines have the memory of their weights; they stay paused."""
        if self._lent is None or self._has_weights:
            return
        have = await asyncio.gather(*(self._resume(e, WEIGHTS) for e in self._lent))
        self._lent = [engine for engine, has in zip(self._lent, have, strict=True) if has]
        self._has_weights = True

    async def complete(self, engine: Engine) -> None:
        """Give an engine that is to go on the rest of its memory. No-op if it has it.

        Raises:
            EngineError: it does not take it.
        """
        if self._lent is not None and self._has_weights and engine in self._lent:
            self._lent.remove(engine)
            await engine.resume_memory(REST)

    async def take_back(self, *, published: bool = False) -> None:
        """Returns once the engines have their memory and generate. Idempotent.

        Args:
            published: a publication has continued those that may go on.
        """
        if self._lent is None:
            return
        tags = REST if self._has_weights else ()
        try:
            await asyncio.gather(
                *(self._resume(e, tags, continues=not published) for e in self._lent)
            )
        finally:
            self._lent, self._has_weights = None, False
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

    async def _resume(
        self, engine: Engine, tags: Sequence[str], *, continues: bool = False
    ) -> bool:
        """Give an engine memory back. False if there is nothing to give: it is gone, or a new
        process. One that fails or does not answer in time may have taken it, and goes on."""
        try:
            await engine.resume_memory(tags)
        except (EngineTimeoutError, EngineInternalError) as e:
            log.warning("%s does not say that it took its memory back: %s", engine.url, e)
        except EngineError as e:
            log.warning("%s does not take its memory back: %s", engine.url, e)
            return False
        if continues:
            with suppress(EngineError):  # it has ended: its supervisor starts it
                await engine.continue_()
        return True
