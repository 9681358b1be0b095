"""Publishing to engines that may be down: a crash of one is waited out, not the end of the run.

    publish ──some engine has it──► published; a fenced one is brought to it by its supervisor
       │ none has: all are down, or one cannot be shown to be
       └──► again, until `patience_s`; refused by engines that all answer: REFUSALS times at most

Owns the patience. Does not own the transaction (`backends/weights/`) or the restart
(`backends/engines/supervisor.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from stepwell.backends.config import PublishMode, WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineError, WeightUpdateError
from stepwell.backends.weights import Publication, WeightStore, publish

log = logging.getLogger(__name__)

REFUSALS = 3
"""An engine that crashed and came back within a publication answers, and the next one succeeds."""
RETRY_S = 0.5


async def publish_patiently(
    engines: Sequence[EngineClient],
    path: Path,
    version: int,
    mode: PublishMode,
    *,
    store: WeightStore,
    transport: WeightTransport,
    patience_s: float,
) -> Publication:
    """`stepwell.backends.weights.publish`, again while every engine is down.

    Args:
        patience_s: how long the first may take to come back.

    Raises:
        WeightUpdateError: it did not; or the engines answer and refuse.
    """
    give_up, refusals = time.monotonic() + patience_s, 0
    while True:
        try:
            done = await publish(
                engines, str(path), version, mode, store=store, transport=transport
            )
            for url, why in done.fenced.items():
                log.warning("version %d is committed without %s, which %s", version, url, why)
            return done
        except WeightUpdateError as e:
            refusals += None not in (e.serving or {}).values()
            if refusals >= REFUSALS or time.monotonic() >= give_up:
                raise
            log.warning("version %d is published again: %s", version, e)
        await asyncio.sleep(RETRY_S)


async def serving(engines: Sequence[EngineClient], patience_s: float) -> list[int]:
    """The version that each engine serves; one that is down is waited for.

    Raises:
        EngineError: it does not come back within `patience_s`.
    """
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return [await engine.weight_version() for engine in engines]
        except EngineError as e:
            if time.monotonic() >= give_up:
                raise
            log.warning("an engine is down: %s", e)
        await asyncio.sleep(RETRY_S)
