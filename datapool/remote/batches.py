"""Batches out of several shards, leased without ever holding some groups while waiting for others:
two consumers could wait for each other.

A part of the batch is asked of every shard, by what it had last; parts that together are not enough
go back::

    take ──all there──► Lease("0-17+1-9")
     ▲ └──short──► give back, look ──too little──► wait for a shard to have more ─┐
     └────────────────────────────────────────────────────────────────────────────┘

Consumers are not served first come first.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from stepwell.datapool.codec import PackedLease
from stepwell.datapool.errors import DataPoolError, UnknownLeaseError
from stepwell.datapool.ops import Ack, LeaseBatch, Nack, Op, ReleaseRequest, Renew, Unserved
from stepwell.datapool.questions import Available, WaitAvailable
from stepwell.datapool.remote.fanout import ANSWER_S, Shards, if_there, values

T = TypeVar("T")

TAKE_S: Final = 30.0
"""How long a shard that does not answer is waited for with a part of a batch, which may be
large."""
PAUSE_S: Final = 0.01
"""After a first batch that somebody else was faster to take; twice as long after each other."""
MAX_PAUSE_S: Final = 1.0
TRIES: Final = 3
"""Of a lease that does not wait."""
INCOMPLETE: Final = "incomplete_batch"
"""Why a part of a batch went back."""


class Batches:
    """Leases of a pool, whatever its number of shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._ports = shards.ports
        self._n = shards.n
        self._available: dict[tuple[str, int | None], dict[int, int]] = {}
        """Ready groups of each shard as last heard, by channel and n_rollouts."""
        self._n_leases = random.randrange(shards.n)

    async def lease(self, op: LeaseBatch, timeout_s: float) -> PackedLease | Unserved:
        """A whole batch, or nothing."""
        if self._n == 1:
            return await self._ports[0].call(op, timeout_s)
        end = time.monotonic() + timeout_s
        key = op.channel, op.n_rollouts
        available = dict(self._available.get(key, {}))  # others lease meanwhile
        shut_down = False
        tries = 0
        while True:
            if sum(available.values()) >= op.batch_size:
                lease = await self._take(op, available)
                self._available[key] = available
                if lease is not None:
                    return lease
                tries += 1
                if tries > 1:
                    if tries > TRIES and time.monotonic() >= end:
                        return "nothing_yet"
                    # Somebody else was faster, or some groups had become too old. At random, so
                    # that two consumers do not take from each other for ever.
                    await asyncio.sleep(random.random() * min(MAX_PAUSE_S, PAUSE_S * 2**tries))
            shut_down = await self._look(op, available)
            if sum(available.values()) >= op.batch_size:
                continue
            left = end - time.monotonic()
            if shut_down:
                return "shut_down"
            if left <= 0:
                return "nothing_yet"
            await self._changed(op, available, left)

    async def _look(self, op: LeaseBatch, available: dict[int, int]) -> bool:
        """Learn what every shard has; whether all are shut down."""
        answers = await self._shards.each(WaitAvailable(op.n_rollouts, op.channel))
        available.clear()
        available.update({k: a.n_groups for k, a in enumerate(answers) if a is not None})
        return all(a is not None and a.shut_down for a in answers)

    async def _changed(self, op: LeaseBatch, available: dict[int, int], timeout_s: float) -> None:
        """Return once a shard has more than it had, or after `timeout_s`."""

        def ask(k: int) -> Awaitable[Available]:
            question = WaitAvailable(op.n_rollouts, op.channel, available.get(k, -1))
            return self._ports[k].call(question, timeout_s)

        tasks = [self._shards.later(ask(k)) for k in range(self._n)]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def _take(self, op: LeaseBatch, available: dict[int, int]) -> PackedLease | None:
        """The whole batch, or nothing."""
        self._n_leases += 1
        held: dict[str, int] = {}
        lost: dict[str, int] = {}  # a shard that went down may have leased, or not
        leases: list[PackedLease] = []
        missing = op.batch_size
        try:
            while missing and (plan := parts(available, missing, self._n_leases)):
                requests = {uuid.uuid4().hex: k for k in plan}
                lost |= requests
                tasks = [
                    self._shards.later(
                        self._ports[k].call(
                            replace(op, batch_size=plan[k], request_id=request_id, at_most=True),
                            once=True,
                        )
                    )
                    for request_id, k in requests.items()
                ]
                await asyncio.wait(tasks, timeout=TAKE_S)
                for (request_id, k), task in zip(requests.items(), tasks, strict=True):
                    answer = if_there(task)
                    n = len(answer.groups) if isinstance(answer, PackedLease) else 0
                    available[k] = available[k] - n if n == plan[k] else 0
                    missing -= n
                    if isinstance(answer, PackedLease):
                        leases.append(answer)
                        held[request_id] = lost.pop(request_id)
                    elif answer is not None:
                        lost.pop(request_id)  # it has none
        except BaseException:  # also a cancellation: what was taken goes back
            self._return(held | lost)
            raise
        if missing == 0:
            self._return(lost)
            return _whole(leases)
        if back := self._return(held | lost):
            await asyncio.wait(back, timeout=ANSWER_S)
        return None

    def _return(self, held: Mapping[str, int]) -> list[asyncio.Task[Any]]:
        """Nack the leases that were given for these requests, also if the answer was lost."""
        return [
            self._shards.later(self._ports[k].call(ReleaseRequest(request_id, INCOMPLETE)))
            for request_id, k in held.items()
        ]

    def ack(self, lease_id: str) -> Awaitable[list[None]]:
        return self._each_part(lease_id, "acked", Ack)

    def nack(self, lease_id: str, reason: str) -> Awaitable[list[None]]:
        return self._each_part(lease_id, "nacked", lambda part: Nack(part, reason))

    async def renew(self, lease_id: str, lease_s: float | None) -> float:
        return min(await self._each_part(lease_id, "renewed", lambda part: Renew(part, lease_s)))

    def _each_part(
        self, lease_id: str, wanted: str, make: Callable[[str], Op[T]]
    ) -> Awaitable[list[T]]:
        """Ask every shard that the lease is from, whatever becomes of the others. Begun now."""
        found = [(0, lease_id)] if self._n == 1 else self._parts(lease_id, wanted)
        return self._parted(
            lease_id, wanted, [self._ports[k].begin(make(part)) for k, part in found]
        )

    async def _parted(self, lease_id: str, wanted: str, began: Sequence[Awaitable[T]]) -> list[T]:
        answers = await asyncio.gather(*began, return_exceptions=True)
        refused = [a for a in answers if isinstance(a, DataPoolError)]
        if refused and len(answers) > 1:
            raise type(refused[0])(
                f"{refused[0]} ({len(refused)} of {len(answers)} parts of lease {lease_id!r} were "
                f"not {wanted}; the others are)"
            )
        return values(answers)

    def _parts(self, lease_id: str, wanted: str) -> list[tuple[int, str]]:
        """The leases that a lease consists of, and their shards, which their ids begin with."""
        found = []
        for part in str(lease_id).split("+"):
            number = part.partition("-")[0].partition(".")[0]
            if not (number.isascii() and number.isdigit() and int(number) < self._n):
                raise UnknownLeaseError(
                    f"lease {lease_id!r} is unknown and cannot be {wanted}; it is not from this "
                    f"pool of {self._n} shards: lease again"
                )
            found.append((int(number), part))
        return found


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
