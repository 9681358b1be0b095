"""Serves the weights of an earlier version again, as a new version: numbers never go back.

    serve_earlier   `stepwell rollback`: the version before, or one that is named
    serve_again     one attempt, which a trial's verdict makes, too

A trainer finds the new version in the weight store and trains on from it (`Publisher.adopt`). Loads
no torch: a command uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from stepwell.backends.config import WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineError, SupersededError, UnsupportedByBackendError
from stepwell.backends.weights import WeightStore, publish
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN


async def serve_earlier(
    engines: Sequence[EngineClient],
    store: WeightStore,
    pool: DataPoolClient,
    to: int | None,
    *,
    transport: WeightTransport,
    trains: bool,
) -> int:
    """Give all engines the weights of version `to`, whatever is published meanwhile; returns the
    number of the new version.

    Args:
        to: None: the version before the one that is served now, or that a canary has.
        trains: a trainer is attached, which has to go on from them.

    Raises:
        UnsupportedByBackendError: the trainer cannot.
        VersionNotKeptError: the weights are not on disk.
        WeightUpdateError: no engine takes them.
    """
    if trains and (why := store.why_refused()) is not None:
        raise UnsupportedByBackendError(why)
    served = [_committed(store)]
    for engine in engines:
        with suppress(EngineError):  # it is down: its supervisor brings it back
            served.append(await engine.weight_version())
    to = store.find(to, max(served))
    while True:
        seen = _committed(store)
        try:
            return await serve_again(engines, store, pool, to, seen=seen, transport=transport)
        except SupersededError:  # the trainer has published: `to` is asked for all the same
            continue


def _committed(store: WeightStore) -> int:
    current = store.current()
    return 0 if current is None else current.version


async def serve_again(
    engines: Sequence[EngineClient],
    store: WeightStore,
    pool: DataPoolClient,
    to: int,
    *,
    seen: int,
    transport: WeightTransport,
    patience_s: float = 0.0,
) -> int:
    """Give all engines the weights of version `to`; returns the number of the new version.

    Args:
        seen: committed version that the caller knows of; 0: none is.
        patience_s: seconds that the first engine may take to come back.

    Raises:
        SupersededError: another version was committed meanwhile.
        VersionNotKeptError: the weights are not on disk.
        WeightUpdateError: no engine takes them.
    """
    async with store.lock.held():  # nobody prunes the version meanwhile
        if (committed := _committed(store)) != seen:
            raise SupersededError(committed)
        newest = max(seen, (await pool.get_statistics(TRAIN))["policy_version"])
        path = await asyncio.to_thread(store.write_again, newest + 1, to)
    version = store.number(path)
    try:
        await pool.advance_version(version)
        await publish(
            engines,
            path,
            version,
            "retract",
            store=store,
            transport=transport,
            seen=seen,
            patience_s=patience_s,
        )
    except SupersededError:
        await asyncio.to_thread(store.discard, path)
        raise
    return version
