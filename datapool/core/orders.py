"""The orders that groups stand in: by a number (`KeyedOrder`: deadlines, lease expiries, policy
versions), and the one in which they are served (`ReadyOrder`).

Groups are served by readiness or by a key, never by arrival. A *due* group is ready whatever the
consumer asks (declared and full, past its deadline, or handed back). Any other, *undeclared*, group
is ready for a consumer that asks for n trajectories once n of its trajectories are complete; it
stands in one queue per count that it has reached::

    due          g7 ── g2
    reached[1]   g3 ── g1 ── g9
    reached[2]   g9 ── g3              g9 had its second trajectory before g3
    reached[5]   g9                    a fetch of 5 finds g9 at once

Within a queue the smallest key is first; equal keys (fifo: all of them) stand by readiness, in one
sequence that all queues share. What was handed back is before everything else: it has waited once.
Every operation is O(log n) per queue that the group stands in. A queue is made when somebody asks
for it first; until then a group only remembers when it reached which count (`places`).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from typing import Generic, TypeVar

import msgspec
from sortedcontainers import SortedList

from stepwell.datapool.core.records import NOWHERE, GroupRecord

K = TypeVar("K", bound=Hashable)

_DUE = 0
"""The queue of due groups; the others have the number of their count."""


class KeyedOrder(Generic[K]):
    """Keys ordered by a number, smallest first; equal numbers in the order they were set."""

    __slots__ = ("_entries", "_order", "_ticket")

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, int, K]] = {}
        self._order: SortedList[tuple[float, int, K]] = SortedList()
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: K, value: float) -> None:
        """Insert `key`, or move it to `value`."""
        held = self._entries.get(key)
        if held is not None and held[0] == value:
            return
        self.discard(key)
        self._ticket += 1
        self._entries[key] = entry = (value, self._ticket, key)
        self._order.add(entry)

    def discard(self, key: K) -> None:
        """Withdraw `key`; unknown keys are fine."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._order.remove(entry)

    def first(self) -> tuple[float, K] | None:
        """The smallest (value, key), or None."""
        if not self._order:
            return None
        value, _, key = self._order[0]
        return value, key

    def pop_until(self, limit: float) -> K | None:
        """Remove and return the first key whose value is <= `limit`, or None."""
        first = self.first()
        if first is None or first[0] > limit:
            return None
        self.discard(first[1])
        return first[1]


class _Place(msgspec.Struct, order=True, frozen=True, gc=False):
    """In a queue."""

    key: float
    sequence: int
    prompt_uid: str


class ReadyOrder:
    """Keeps `due`, `key`, `places` and `withheld` of the groups that it is told of.

    Args:
        groups: all that may stand in it.
    """

    __slots__ = ("_groups", "_next", "_queues", "_returned")

    def __init__(self, groups: Mapping[str, GroupRecord]) -> None:
        self._groups = groups
        self._queues: dict[int, SortedList[_Place]] = {}
        self._next = 0
        self._returned = 0

    def make_due(self, group: GroupRecord) -> None:
        """Ready for every consumer, last among its key."""
        self._next += 1
        self._put_due(group, 0.0, self._next)

    def make_due_in_place(self, group: GroupRecord, n_rollouts: int) -> None:
        """An undeclared group that such a consumer could have is ready for every one, and stands
        where it stood for that one."""
        if not group.due:
            self._put_due(group, group.key, group.places[n_rollouts - 1])

    def give_back(self, group: GroupRecord) -> None:
        """Ready for every consumer, before all others."""
        self._returned -= 1
        self._put_due(group, -math.inf, self._returned)

    def reach(self, group: GroupRecord) -> None:
        """An undeclared group got one more complete trajectory."""
        self._next += 1
        group.places = group.places or array("q")
        group.places.append(self._next)
        self._enter(group, [len(group.places)])

    def fall_back(self, group: GroupRecord) -> None:
        """An undeclared group has one complete trajectory fewer."""
        self._leave(group)
        group.places.pop()
        self._enter(group, self._queues)

    def rekey(self, group: GroupRecord, key: float) -> None:
        """Move a group to another key, unless it was handed back or is not here."""
        if group.places and group.key not in (key, -math.inf):
            self._leave(group)
            group.key = key
            self._enter(group, self._queues)

    def hold(self, group: GroupRecord) -> None:
        """No consumer gets it until `release`; its places are kept."""
        self._leave(group)
        group.withheld = True

    def release(self, group: GroupRecord) -> None:
        """Back to its places, if it was held."""
        if group.withheld:
            group.withheld = False
            self._enter(group, self._queues)

    def discard(self, group: GroupRecord) -> None:
        """The group is served, dropped, or declared after all; others are fine."""
        self._leave(group)
        group.places, group.key, group.withheld = NOWHERE, 0.0, False

    def count(self, n_rollouts: int) -> int:
        """How many groups a consumer asking for `n_rollouts` could have now."""
        return len(self._queue(_DUE)) + len(self._queue(n_rollouts))

    def first(self, n_rollouts: int, limit: int = 1) -> list[str]:
        """The groups that such a consumer gets next, at most `limit`."""
        queues = (self._queue(_DUE), self._queue(n_rollouts))
        heads = heapq.merge(*(islice(queue, limit) for queue in queues))
        return [place.prompt_uid for place in islice(heads, limit)]

    def _put_due(self, group: GroupRecord, key: float, sequence: int) -> None:
        self.discard(group)
        group.due, group.key, group.places = True, key, array("q", [sequence])
        self._enter(group, [_DUE])

    def _queue(self, number: int) -> SortedList[_Place]:
        queue = self._queues.get(number)
        if queue is None:
            places = (self._place(group, number) for group in self._groups.values())
            queue = self._queues[number] = SortedList(place for place in places if place)
        return queue

    def _place(self, group: GroupRecord, queue: int) -> _Place | None:
        """None: it does not stand there."""
        at = queue - 1 if queue != _DUE else 0
        if group.withheld or group.due is not (queue == _DUE) or at >= len(group.places):
            return None
        return _Place(group.key, group.places[at], group.prompt_uid)

    def _enter(self, group: GroupRecord, queues: Iterable[int]) -> None:
        for number in queues:
            if number in self._queues and (place := self._place(group, number)) is not None:
                self._queues[number].add(place)

    def _leave(self, group: GroupRecord) -> None:
        for number, queue in self._queues.items():
            if (place := self._place(group, number)) is not None:
                queue.remove(place)
