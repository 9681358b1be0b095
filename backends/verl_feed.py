"""From the DataPool into a verl training loop, and back the news that it was trained.

    async with VerlFeed(DataPoolClient.connect(), VerlBackend(), groups=8) as feed:
        async for batch in feed:              # a DataProto of 8 groups
            train_on(batch)                   # your verl loop
            if save_now():
                save_checkpoint()
                await feed.ack()              # all batches so far: trained and durable

    lease ──► batch ──► ack()            gone from the pool
                └─────► left, or died    back to the pool, served again

A batch that is not acked when the loop is left goes back at once; after a crash it goes back when
its lease runs out. Leases are renewed while the event loop runs, so a step that blocks it must take
less than `lease_s`. For a V1 trainer, `groups()` yields what `verl_queue.put` takes.

Owns: leases in flight. Does not own: conversion (`verl_backend.py`), the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from backends.verl_backend import DataProto, VerlBackend
from datapool.errors import (
    DataPoolError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownLeaseError,
)
from datapool.types import TRAIN, Group, Lease

log = logging.getLogger(__name__)

LOST = (UnknownLeaseError, LeaseExpiredError, LeaseClosedError)

Columns = Callable[[Sequence[Group]], Mapping[str, Tensor]]
"""Groups -> Stepwell's columns over `trained_steps(groups)`: advantages of your own."""


class LeasingPool(Protocol):
    """What a feed needs of the pool; `datapool.DataPoolClient` has it."""

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None: ...

    async def ack(self, lease_id: str) -> None: ...

    async def nack(self, lease_id: str, reason: str = "") -> None: ...

    async def renew(self, lease_id: str, lease_s: float | None = None) -> Any: ...


class VerlFeed:
    """An async iterator of batches; see the module's docstring.

    Args:
        groups: prompts per batch, verl's `data.train_batch_size`.
        timeout_s: ends the iteration when no group is ready for so long; None: waits for ever.
        lease_s: how long a batch is held without a renewal.
        columns: advantages and the like of your own; None: verl's.
    """

    def __init__(
        self,
        pool: LeasingPool,
        backend: VerlBackend,
        *,
        groups: int,
        channel: str = TRAIN,
        timeout_s: float | None = None,
        lease_s: float = 600.0,
        columns: Columns | None = None,
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._n_groups = groups
        self._channel = channel
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._columns = columns
        self._held: list[str] = []
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> VerlFeed:
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        reason = f"verl feed: {kind.__name__}" if kind else "verl feed: closed without ack"
        held, self._held = self._held, []
        for lease_id in held:
            with suppress(DataPoolError):  # lost, or the pool is down: it goes back by itself
                await self._pool.nack(lease_id, reason)

    async def __aiter__(self) -> AsyncIterator[DataProto]:
        async for groups in self.groups():
            columns = self._columns(groups) if self._columns else None
            yield self._backend.convert_groups(groups, columns=columns)

    async def groups(self) -> AsyncIterator[tuple[Group, ...]]:
        """The leased groups themselves, batch by batch."""
        while True:
            lease = await self._pool.lease_batch(
                None, self._channel, self._n_groups, self._timeout_s, self._lease_s
            )
            if lease is None:
                return
            self._held.append(lease.lease_id)
            yield lease.groups

    async def ack(self) -> None:
        """Everything handed out so far is trained and durable: the pool may forget it.

        Raises:
            LeaseExpiredError, LeaseClosedError, UnknownLeaseError: a lease was lost before; its
                groups are served again, those of all others are acked.
        """
        lost: DataPoolError | None = None
        while self._held:
            try:
                await self._pool.ack(self._held[0])
            except LOST as e:
                lost = lost or e
            del self._held[0]
        if lost is not None:
            raise lost

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            for lease_id in list(self._held):
                try:
                    await self._pool.renew(lease_id, self._lease_s)
                except DataPoolError as e:  # lost, which `ack` will say; or the pool is down
                    log.warning("lease %s is not renewed: %s", lease_id, e)
