"""Serves the weights of an earlier version again, as a new version: numbers never go back.

The weight store's lock is held from the choice of the version to its commit: nobody prunes it or
publishes meanwhile. A trainer finds the new version in the store and trains on from it
(`Publisher.adopt`). Used by a trial's verdict and by `stepwell rollback`. Loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stepwell.backends.engines.api import Engine
from stepwell.backends.errors import (
    EngineError,
    SupersededError,
    UnsupportedByBackendError,
    WeightUpdateError,
)
from stepwell.backends.weights import Transport, WeightStore, publish
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN


async def roll_back(
    engines: Sequence[Engine],
    store: WeightStore,
    pool: DataPoolClient,
    to: int | None,
    *,
    transport: Transport,
    before: int | None = None,
    seen: int | None = None,
    trains: bool = False,
    patience_s: float = 0.0,
) -> int:
    """Give all engines the weights of an earlier version; returns the number of the new one.

    Args:
        to: version whose weights are served; None: the one before `before`.
        before: None: the version that is served now, or that a canary has.
        seen: committed version that the caller knows of, 0 for none; None: any may be replaced.
        trains: a trainer is attached, which has to go on from it.
        patience_s: seconds that the first engine may take to come back.

    Raises:
        UnsupportedByBackendError: the trainer cannot go on from it.
        SupersededError: another version than `seen` is committed.
        VersionNotKeptError: the weights are not on disk.
        WeightUpdateError: no engine takes them.
    """
    if trains and (why := store.why_refused()) is not None:
        raise UnsupportedByBackendError(why)
    how: dict[str, Any] = {"mode": "retract", "store": store, "transport": transport}
    async with store.lock.held():
        current = store.current()
        committed = 0 if current is None else current.version
        if seen is not None and committed != seen:
            raise SupersededError(committed)
        if before is None:
            before = committed
            for engine in engines:
                with suppress(EngineError):  # it is down: its supervisor brings it back
                    before = max(before, await engine.weight_version())
        newest = max(committed, (await pool.get_statistics(TRAIN))["policy_version"])
        of = store.find(to, before)
        path = await asyncio.to_thread(store.write_again, newest + 1, of)
        version = store.number(path)
        await pool.advance_version(version)
        try:
            await publish(engines, path, version, **how, locked=True)
            return version
        except WeightUpdateError:
            if not patience_s:
                raise
    # Without the lock, which a supervisor needs to bring an engine back.
    await publish(engines, path, version, **how, seen=committed, patience_s=patience_s)
    return version
