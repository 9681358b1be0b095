"""This module leases batches out of several shards so that no consumer holds groups while it waits
for others: two consumers could wait for each other.

An even part of the batch is taken from each shard, by what it has now; parts that together are not
enough go back::

    look ──enough──► take ──all there──► Lease("0-17+1-9")
     ▲  │              └──short──► give back, pause ──┐
     │  └──too little──► wait for a shard to have more ┤
     └────────────────────────────────────────────────┘

Consumers are not served first come first.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from msgspec.structs import replace

from stepwell.datapool.codec import PackedLease
from stepwell.datapool.errors import DataPoolError, UnknownLeaseError
from stepwell.datapool.ops import Ack, LeaseBatch, Nack, Op, Renew, Unserved
from stepwell.datapool.questions import WaitAvailable
from stepwell.datapool.remote.link import Port
from stepwell.datapool.remote.shards import Shards, values

TAKE_S: Final = 30.0
"""How long a shard that does not answer is waited for with a part of a batch, which may be
large."""
PAUSE_S: Final = 0.01
"""After a batch that somebody else was faster to take; twice as long after each other."""
MAX_PAUSE_S: Final = 1.0
TRIES: Final = 3
"""Of a lease that does not wait."""
INCOMPLETE: Final = "incomplete_batch"
"""Why a part of a batch went back."""


class Batches(Shards):
    """Shards, and batches out of several."""

    def __init__(self, ports: Sequence[Port]) -> None:
        super().__init__(ports)
        self._turn = random.randrange(self.n)

    async def lease(self, op: LeaseBatch, timeout_s: float | None) -> PackedLease | Unserved:
        """A whole batch, or nothing."""
        shards = range(self.n)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for tries in count(1):
            look = WaitAvailable(op.n_rollouts, op.channel)
            found = await self.ask(dict.fromkeys(shards, look))
            while sum(a.n_groups for a in found.values()) < op.batch_size:
                if len(found) == len(shards) and all(a.shut_down for a in found.values()):
                    return "shut_down"
                if any(a.shut_down for a in found.values()):
                    await asyncio.sleep(PAUSE_S)  # it answers at once, and another one is away
                left = end - time.monotonic()
                if left <= 0:
                    return "nothing_yet"
                more = {
                    k: replace(look, more_than=found[k].n_groups if k in found else -1)
                    for k in shards
                }
                wait_s = None if left == math.inf else left
                found |= await self.ask(more, wait_s, enough=lambda answer: True)
            lease = await self._take(op, {k: a.n_groups for k, a in found.items()})
            if lease is not None:
                return lease
            if tries >= TRIES and time.monotonic() >= end:
                break
            # Somebody else was faster, or some groups had become too old. At random, so that two
            # consumers do not take from each other for ever.
            await asyncio.sleep(random.random() * min(MAX_PAUSE_S, PAUSE_S * 2**tries))
        return "nothing_yet"

    async def _take(self, op: LeaseBatch, available: Mapping[int, int]) -> PackedLease | None:
        """The whole batch, or nothing."""
        self._turn += 1
        ops = {
            k: replace(op, batch_size=n, request_id=uuid.uuid4().hex)
            for k, n in parts(available, op.batch_size, self._turn).items()
        }
        answers = await self.ask(ops, grace_s=TAKE_S)
        leases = [lease for lease in answers.values() if isinstance(lease, PackedLease)]
        if len(leases) == len(ops):
            return _whole(leases)
        for k, answer in answers.items():
            if isinstance(answer, PackedLease):
                self.later(self.ports[k].call(Nack(answer.lease_id, INCOMPLETE)))
        return None

    def each_part(self, op: Ack | Nack | Renew, timeout_s: float | None = 0.0) -> Awaitable[Any]:
        """Ask every shard that the lease is from, whatever becomes of the others. Begun now."""
        parts: list[tuple[int, Op[Any]]] = []
        for part in str(op.lease_id).split("+"):
            number = part.partition("-")[0].partition(".")[0]
            if not (number.isascii() and number.isdigit() and int(number) < self.n):
                raise UnknownLeaseError(
                    f"lease {op.lease_id!r} is unknown; it is not from this pool of {self.n} "
                    "shards: lease again"
                )
            parts.append((int(number), replace(op, lease_id=part)))
        return self._parted(op, [self.ports[k].call(each) for k, each in parts])

    async def _parted(
        self, op: Ack | Nack | Renew, began: Sequence[Awaitable[Any]]
    ) -> float | None:
        answers = await asyncio.gather(*began, return_exceptions=True)
        refused = [a for a in answers if isinstance(a, DataPoolError)]
        if refused and len(answers) > 1:
            raise type(refused[0])(
                f"{refused[0]} ({len(refused)} of {len(answers)} parts of lease {op.lease_id!r} "
                f"refuse {type(op).__name__}; the others are done)"
            )
        found = values(answers)
        return min(found) if isinstance(op, Renew) else None


def parts(available: Mapping[int, int], n_groups: int, turn: int) -> dict[int, int]:
    """How many of `n_groups` each shard gives: as even as they have them, and what remains from
    those whose turn it is."""
    order = sorted(available)
    order = order[turn % len(order) :] + order[: turn % len(order)] if order else []
    given: Counter[int] = Counter()
    while n_groups and (having := [k for k in order if given[k] < available[k]]):
        given.update(having[:n_groups])
        n_groups -= min(n_groups, len(having))
    return dict(given)


def _whole(leases: Sequence[PackedLease]) -> PackedLease:
    if len(leases) == 1:
        return leases[0]
    return replace(
        leases[0],
        lease_id="+".join(lease.lease_id for lease in leases),
        groups=[group for lease in leases for group in lease.groups],
        expires_at=min(lease.expires_at for lease in leases),
    )
