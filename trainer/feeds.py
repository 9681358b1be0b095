"""This module leases the groups of one channel for the trainer and keeps account of them, so that
a batch may be made of several channels and each is settled by itself.

    producer ──► channel ──lease──► consumed ──checkpoint──► settle: acked
                    └── the producer has ended and no more will come: None

Owns what was consumed of a channel since the last checkpoint, and the wait for a producer that
ends. Does not own who brings groups (`rollout/`, `live.py`), how many are taken (`batches.py`), the
leases (`datapool/remote/lease_keeper.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, by_lease
from stepwell.datapool.types import TRAIN, Group
from stepwell.trainer.live import GroupProducer
from stepwell.trainer.sampling import CHANNEL

IN_FLIGHT_S = 1.0
"""For the answer to a request that the pool has served before generation had no prompt left."""


class Feed:
    """The groups of `channel`; see the module's docstring.

    Args:
        keeper: of leases on the channel.
        takes_rest: fewer groups than were asked for are given when no more will come.
    """

    def __init__(
        self,
        channel: str,
        pool: DataPoolClient,
        keeper: LeaseKeeper,
        producer: GroupProducer,
        *,
        takes_rest: bool = False,
    ) -> None:
        self.channel = channel
        self.keeper = keeper
        self.producer = producer
        self.consumed: set[str] = set()
        """prompt_uids of the batches since the last checkpoint."""
        self._pool = pool
        self._takes_rest = takes_rest

    async def lease(self, size: int, timeout_s: float) -> Sequence[Group] | None:
        """The next `size` ready groups; None when the producer has ended and fewer are there.

        Raises:
            TimeoutError: they were not there within `timeout_s`.
        """
        patience_s = None if self.producer.endless else timeout_s
        request = asyncio.ensure_future(self.keeper.lease(size, timeout_s=patience_s))
        try:
            while not request.done():
                ended = asyncio.ensure_future(self.producer.ended())
                await asyncio.wait({request, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()  # raises what made the producer fail
                ended.cancel()
                # The last groups, or word of a drop whose prompt is issued again, may be on their
                # way here: to ask anew would not bring them.
                await self._pool.get_statistics(self.channel)
                await asyncio.wait({request}, timeout=IN_FLIGHT_S)
                if self.producer.has_ended and (not request.done() or request.result() is None):
                    request.cancel()
                    await asyncio.wait({request})  # else it would be served before the next one
                    return self._given(await self._rest(size))
            if (groups := await request) is None:
                raise TimeoutError
        finally:
            request.cancel()
        return self._given(groups)

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """For a checkpoint that holds the groups `consumed`."""
        used = {*(self.consumed & consumed), *self.keeper.settled}
        return {
            **self.producer.state_dict(consumed),
            "trained": by_lease(self.keeper.held, used),
        }

    async def settle(self, consumed: Set[str]) -> None:
        """The checkpoint that holds these groups is durable: ack them."""
        await self.keeper.settle(consumed)
        self.consumed -= consumed
        self.producer.settle(consumed)

    async def _rest(self, size: int) -> Sequence[Group] | None:
        if not self._takes_rest:
            return None
        ready = (await self._pool.get_statistics(self.channel))["groups"]["ready"]
        return await self.keeper.lease(min(ready, size), timeout_s=IN_FLIGHT_S) if ready else None

    def _given(self, groups: Sequence[Group] | None) -> Sequence[Group] | None:
        if groups is None:
            return None
        self.producer.leased(group.prompt_uid for group in groups)
        if self.channel == TRAIN:
            return groups
        return [replace(g, metadata={**g.metadata, CHANNEL: self.channel}) for g in groups]
