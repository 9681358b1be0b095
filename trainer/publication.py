"""Publishing to engines that may be down: a crash of one is waited out, not the end of the run.

    publish ──some engine has it──► published; a fenced one is brought to it by its supervisor
       │ none has: all are down, or one cannot be shown to be
       └──► again, until `patience_s`; refused by engines that all answer: REFUSALS times at most

Owns the patience, and what a run publishes: whole weights, or the adapter alone. Does not own the
transaction (`backends/weights/`) or the restart (`backends/engines/supervisor.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from stepwell.backends.base import TrainingBackend
from stepwell.backends.config import PublishMode, WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineError, WeightUpdateError
from stepwell.backends.weights import Publication, WeightStore, publish
from stepwell.trainer.memory import EngineMemory

log = logging.getLogger(__name__)

REFUSALS = 3
"""An engine that crashed and came back within a publication answers, and the next one succeeds."""
RETRY_S = 0.5


class EngineWeights:
    """The weights of a run's engines.

    Args:
        store: where versions are on disk.
        memory: of the engines; a publication waits until they have it.
        patience_s: how long the first engine may take to come back.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        store: WeightStore,
        memory: EngineMemory,
        *,
        transport: WeightTransport = "disk",
        patience_s: float = 600.0,
    ) -> None:
        self.memory = memory
        self.store = store
        self._engines = list(engines)
        self._transport = transport
        self._patience_s = patience_s

    @property
    def gives_adapters(self) -> bool:
        """Whether a version is a LoRA adapter, beside weights that engines keep."""
        return self._transport == "lora"

    @property
    def has_canaries(self) -> bool:
        """Whether one engine can try a version out while others serve."""
        return len(self._engines) > 1

    def write(self, version: int, backend: TrainingBackend) -> Path:
        """Write the backend's weights of now as `version`; the folder."""
        save = backend.save_adapters if self.gives_adapters else backend.save_weights
        return self.store.write(version, save)

    async def publish(self, path: Path, version: int, mode: PublishMode) -> Publication:
        """Give a version to all engines, and commit it; again while every engine is down.

        Raises:
            WeightUpdateError: none came back in time; or the engines answer and refuse.
        """
        if not self._engines:
            self.store.commit(version, path, adapter=self.gives_adapters)
            return Publication(version, seconds=0.0)
        async with self.memory.at_home():
            give_up, refusals = time.monotonic() + self._patience_s, 0
            while True:
                try:
                    done = await self._publish(self._engines, path, version, mode)
                    for url, why in done.fenced.items():
                        log.warning(
                            "version %d is committed without %s, which %s", version, url, why
                        )
                    return done
                except WeightUpdateError as e:
                    refusals += None not in (e.serving or {}).values()
                    if refusals >= REFUSALS or time.monotonic() >= give_up:
                        raise
                    log.warning("version %d is published again: %s", version, e)
                await asyncio.sleep(RETRY_S)

    async def try_out(self, path: Path, version: int, mode: PublishMode) -> Publication:
        """Give a version to one engine alone, without committing it; the last that takes it.

        Raises:
            WeightUpdateError: none does.
        """
        if self.store.current() is None and self.store.base is not None:
            # What the others serve, and a canary goes back to.
            self.store.commit(0, self.store.base)
        async with self.memory.at_home():
            for engine in reversed(self._engines):
                try:
                    return await self._publish([engine], path, version, mode, canary=True)
                except WeightUpdateError as e:
                    failure = e
                    log.warning("version %d is tried out elsewhere: %s", version, e)
        raise failure

    async def serving(self) -> list[int]:
        """The version that each engine serves; one that is down is waited for.

        Raises:
            EngineError: it does not come back in time.
        """
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                return [await engine.weight_version() for engine in self._engines]
            except EngineError as e:
                if time.monotonic() >= give_up:
                    raise
                log.warning("an engine is down: %s", e)
            await asyncio.sleep(RETRY_S)

    async def _publish(
        self,
        engines: Sequence[EngineClient],
        path: Path,
        version: int,
        mode: PublishMode,
        *,
        canary: bool = False,
    ) -> Publication:
        store, transport = self.store, self._transport
        return await publish(
            engines, str(path), version, mode, store=store, transport=transport, canary=canary
        )
