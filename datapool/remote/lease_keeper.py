"""This module holds the leases of one consumer so that every group it is given is used once.

    ready ──lease──► delivered, renewed ──settle──► acked     its use is durable
      ▲                │          └──────nack─────► ready     somebody else may have it
      │                └── its lease is lost: the pool was down, this process stood still
      │                      │
      └──────────────────────┘   the pool serves the group again: it is recognised and not
                                 delivered again, but held, and acked, with its new lease

A task renews every lease each third of its time, also those whose groups nobody has looked at yet.
A lease can run out all the same. Its groups stay the consumer's: it uses what it has, and `settle`
acks them with the lease that holds them by then, or drops them from the pool if none does.

Worked example: lease L1 of groups a and b is delivered; the process is stopped for longer than
`lease_s`; the pool gives a, b and c to the request that was waiting, as L2. `lease` delivers c
alone. `settle([a, b])` can ack neither lease: L1 is lost and L2 holds c. `settle([c])` acks L2.

Owns which groups were delivered and which lease holds each. Does not own what is done with them,
nor what a restarted consumer does with the leases of its predecessor (`trainer/reclaim.py`).
Not thread-safe: one keeper per consumer and event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from stepwell.datapool.errors import (
    GroupClosedError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownGroupError,
    UnknownLeaseError,
)
from stepwell.datapool.types import Group, Lease

if TYPE_CHECKING:  # made where it is used: a consumer need not load what starts pools
    from stepwell.datapool.remote.client import DataPoolClient
    from stepwell.datapool.remote.picture_cache import PictureCache

log = logging.getLogger(__name__)

LeasingPool: TypeAlias = "DataPoolClient"
"""The pool, for rooms that see nothing else of it."""

LOST = (UnknownLeaseError, LeaseExpiredError, LeaseClosedError)
"""Answers to a lease that its consumer has no more."""

RENEWALS = 3
"""Within the time of a lease."""

USED = "used_after_its_lease"
"""Drop reason of a group that was used and that no lease held when its use was durable."""


@dataclass(slots=True)
class _Held:
    """A lease."""

    prompt_uids: set[str]
    """Its groups, without those that a later lease holds."""
    valid_at: float
    """Time at which it, or its last renewal, was asked for: the pool's time began later."""
    lost: bool = False


class LeaseKeeper:
    """Leases groups, keeps them, and knows which it has delivered; see the module's docstring.

    Used as `async with`, or between `start` and `close`; without either nothing is renewed.

    Args:
        lease_s: how long the pool holds a lease that is not renewed.
    """

    def __init__(self, pool: LeasingPool, channel: str, lease_s: float) -> None:
        self._pool = pool
        self._channel = channel
        self._pictures: PictureCache | None = None
        self._lease_s = lease_s
        self._leases: dict[str, _Held] = {}
        self._lease_of: dict[str, str] = {}
        self._waiting: dict[str, Group] = {}
        """Leased and not delivered yet, by prompt_uid."""
        self._delivered: set[str] = set()
        self._settled: set[str] = set()
        """Groups of `_delivered` whose use is durable, and that the pool may still serve."""
        self._refused: set[str] = set()
        """Groups of `_delivered` whose use is durable, too, and that the pool would not drop."""
        self._renewing: asyncio.Task[None] | None = None
        self.redelivered = 0
        """Groups that the pool served again and that were not delivered again."""
        self.lost = 0
        """Leases that ran out."""

    @property
    def held(self) -> Mapping[str, str]:
        """prompt_uid -> lease_id of every group under a lease, delivered or not."""
        return dict(self._lease_of)

    @property
    def settled(self) -> Collection[str]:
        """prompt_uids that were settled and that the pool may still serve."""
        return self._settled | self._refused

    def start(self) -> None:
        """Begin to renew. Idempotent."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_all(), name="lease keeper")

    async def close(self) -> None:
        """Stop renewing: what is not settled or nacked goes back when its lease runs out.
        Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None

    async def __aenter__(self) -> LeaseKeeper:
        self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def lease(
        self, batch_size: int = 1, *, n_rollouts: int | None = None, timeout_s: float | None = 0
    ) -> tuple[Group, ...] | None:
        """The next `batch_size` groups that were not delivered before; None if they are not there
        within `timeout_s` (None: for ever)."""
        now = asyncio.get_running_loop().time
        end = None if timeout_s is None else now() + timeout_s
        while True:
            while (missing := batch_size - len(self._waiting)) > 0:
                asked = now()
                left = None if end is None else max(0.0, end - asked)
                lease = await self._pool.lease_batch(
                    n_rollouts, self._channel, missing, left, self._lease_s
                )
                if lease is None:
                    return None
                self._receive(lease, asked)
                await self._ack_whole()
            chosen = list(islice(self._waiting, batch_size))
            # An answer may have come late (the process stood still): its groups are delivered only
            # if nobody else can have them by now.
            oldest = now() - self._lease_s / RENEWALS
            doubtful = {
                lease_id
                for uid in chosen
                if self._leases[lease_id := self._lease_of[uid]].valid_at < oldest
            }
            if not doubtful:
                self._delivered.update(chosen)
                return tuple(self._waiting.pop(uid) for uid in chosen)
            await asyncio.gather(*map(self._renew, doubtful))

    async def pictures(self, group: Group) -> dict[str, bytes]:
        """PNG by digest of the pictures that the steps of a leased group name.

        Raises:
            TrajectoryClosedError, UnknownTrajectoryError: it left the pool.
            DamagedFileError: a picture is not what was stored.
        """
        if not any(step.pictures for step in group.steps):
            return {}
        if self._pictures is None:
            from stepwell.datapool.remote.picture_cache import PictureCache

            self._pictures = PictureCache(self._pool, self._channel)
        return await self._pictures.of_all(group.steps)

    async def settle(self, prompt_uids: Iterable[str]) -> list[str]:
        """The use of these groups is durable: the pool may forget them. Each is acked with its
        lease once all groups of that lease are settled, or dropped if no lease holds it.

        Returns:
            Those that the pool refuses to drop: another consumer has leased or acked them.
        """
        self._settled.update(self._delivered.intersection(prompt_uids))
        await self._ack_whole()
        refused = []
        for uid in sorted(self._settled - self._lease_of.keys()):
            try:
                await self._pool.drop_group(uid, USED, self._channel)
            except UnknownGroupError:
                pass  # gone already
            except GroupClosedError as e:
                if uid in self._lease_of or uid not in self._settled:
                    continue  # its new lease came before this refusal, and will be acked, or is
                # Perhaps with a lease that is on its way here: `lease` will recognise it.
                log.warning("group %s was used, but not by its last consumer: %s", uid, e)
                refused.append(uid)
                self._settled.discard(uid)
                self._refused.add(uid)
                continue
            self._forget([uid])
        return refused

    async def nack(self, prompt_uids: Iterable[str], reason: str) -> None:
        """These groups were not used: the pool may serve them again, here too. So may it the other
        groups of their leases, but not here."""
        given_up = list(prompt_uids)
        leases = {self._lease_of[uid] for uid in given_up if uid in self._lease_of}
        self._forget(given_up)
        for lease_id in leases:
            await self._give_back(lease_id, reason)

    # -- inside ------------------------------------------------------------------------------

    def _receive(self, lease: Lease, asked: float) -> None:
        uids = {group.prompt_uid for group in lease.groups}
        for uid in uids & self._lease_of.keys():
            # A group has one lease at a time: the one of before is lost, if only in part.
            before = self._leases[self._lease_of[uid]]
            before.prompt_uids.discard(uid)
            if not before.prompt_uids:
                del self._leases[self._lease_of[uid]]
        self._leases[lease.lease_id] = _Held(uids, asked)
        self._lease_of.update(dict.fromkeys(uids, lease.lease_id))
        for group in lease.groups:
            if group.prompt_uid not in self._delivered:
                self._waiting[group.prompt_uid] = group
                continue
            self.redelivered += 1
            if group.prompt_uid in self._refused:
                self._refused.discard(group.prompt_uid)
                self._settled.add(group.prompt_uid)

    async def _ack_whole(self) -> None:
        """Ack the leases all of whose groups are settled."""
        for lease_id, held in list(self._leases.items()):
            if not held.prompt_uids <= self._settled:
                continue
            if "+" in lease_id:
                await self._ack_parts(lease_id, held)
            else:
                await self._ack(lease_id, held, held.prompt_uids)
            self._end(lease_id)

    async def _ack_parts(self, lease_id: str, held: _Held) -> None:
        """Ack a lease over several shards, of which one part alone may be lost."""
        from stepwell.datapool.remote.shards import lease_parts

        parts = lease_parts(lease_id, held.prompt_uids, len(self._pool.shards))
        acks = (self._ack(part, held, of) for part, of in parts.items())
        for answer in await asyncio.gather(*acks, return_exceptions=True):
            if answer is not None:
                raise answer

    async def _ack(self, lease_id: str, held: _Held, of: Set[str]) -> None:
        """Ack a lease, or the part of one that holds these groups."""
        with suppress(*LOST):
            await self._pool.ack(lease_id)
            done = held.prompt_uids & of
            self._forget(done)
            held.prompt_uids -= done  # the rest is acked later, if its shard cannot be reached now
            for uid in done:
                del self._lease_of[uid]

    async def _renew_all(self) -> None:
        pause = self._lease_s / RENEWALS
        while True:
            await asyncio.gather(
                asyncio.sleep(pause), *(self._renew_within(pause, x) for x in list(self._leases))
            )

    async def _renew_within(self, seconds: float, lease_id: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._renew(lease_id)
        except Exception as e:  # noqa: BLE001 - whatever it is: a keeper that ends loses all leases
            log.warning("lease %s is not renewed, and will be tried again: %r", lease_id, e)

    async def _renew(self, lease_id: str) -> None:
        asked = asyncio.get_running_loop().time()
        try:
            await self._pool.renew(lease_id, self._lease_s)
        except LOST as e:
            held = self._leases.get(lease_id)
            if held is None or held.prompt_uids <= self._settled:
                return  # it was acked meanwhile
            if not held.lost:
                held.lost = True
                self.lost += 1
                log.warning("a lease of %d groups is lost: %s", len(held.prompt_uids), e)
            if held.prompt_uids & self._waiting.keys():
                # Nobody has seen those: they are the pool's. Of several shards one may still hold
                # its part of the lease.
                await self._give_back(lease_id, "another part of the lease is lost")
        else:
            if lease_id in self._leases:
                self._leases[lease_id].valid_at = asked

    async def _give_back(self, lease_id: str, reason: str) -> None:
        for uid in self._end(lease_id):
            self._waiting.pop(uid, None)
        with suppress(*LOST):
            await self._pool.nack(lease_id, reason)

    def _end(self, lease_id: str) -> Collection[str]:
        """The lease holds nothing any more; returns what it held."""
        held = self._leases.pop(lease_id, None)
        uids = held.prompt_uids if held is not None else set()
        for uid in uids:
            del self._lease_of[uid]
        return uids

    def _forget(self, prompt_uids: Collection[str]) -> None:
        for known in (self._delivered, self._settled, self._refused):
            known.difference_update(prompt_uids)


def by_lease(held: Mapping[str, str], used: Iterable[str]) -> dict[str, list[str]]:
    """lease_id -> its groups, for the leases that hold `used` groups only; "" -> all other used
    groups. For a checkpoint: whoever resumes from it may ack those leases.

    Args:
        held: prompt_uid -> lease_id.
    """
    known = set(used)
    partly = {lease_id for uid, lease_id in held.items() if uid not in known}
    found: dict[str, list[str]] = {}
    for uid in sorted(known):
        lease_id = held.get(uid, "")
        found.setdefault("" if lease_id in partly else lease_id, []).append(uid)
    return found
