"""The orders of a pool: by a number (`KeyedOrder`: lease expiries, policy versions), and the one in
which groups are served (`ReadyQueue`).

Groups are served by readiness or by a key, never by arrival. A *due* group is ready whatever the
consumer asks (declared and full, past its deadline, or handed back). Any other, *undeclared*, group
is ready for a consumer that asks for n trajectories once n of its trajectories count; it stands in
one queue per count that it has reached::

    due          g7 ── g2
    reached[1]   g3 ── g1 ── g9
    reached[2]   g9 ── g3              g9 had its second trajectory before g3
    reached[5]   g9                    a fetch of 5 finds g9 at once

Within a queue the smallest key is first; equal keys (fifo: all of them) stand by readiness, in one
sequence that all queues share. What was handed back is before everything else: it has waited once.
Every operation is O(log n) per queue that the group stands in. A queue is made when somebody asks
for it first; until then a group only remembers when it reached which count.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

import msgspec
from sortedcontainers import SortedList

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
        """Withdraw `key`. No-op if it is not there."""
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


class NextTick:
    """The time at which `DataPool.tick` next has something to do, or an earlier one."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = math.inf

    def no_later_than(self, at: float) -> None:
        """Something is to be done then."""
        if at < self.at:
            self.at = at


class _Place(msgspec.Struct, order=True, frozen=True, gc=False):
    """Position in a queue."""

    key: float
    sequence: int
    prompt_uid: str


class _Entry(msgspec.Struct, gc=False):
    """A ready group."""

    prompt_uid: str
    key: float = 0.0
    sequences: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """Numbers in the order of readiness. A due group has one; an undeclared group has one per n,
    at index n - 1."""
    is_due: bool = False
    is_held: bool = False

    def place(self, queue: int) -> _Place | None:
        """Return its place in a queue; None if it does not stand there."""
        at = queue - 1 if queue != _DUE else 0
        if self.is_held or self.is_due is not (queue == _DUE) or at >= len(self.sequences):
            return None
        return _Place(self.key, self.sequences[at], self.prompt_uid)


class ReadyQueue:
    """Ready groups by prompt uid, in the order in which consumers get them."""

    __slots__ = ("_entries", "_next", "_queues", "_returned")

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[int, SortedList[_Place]] = {}
        self._next = 0
        self._returned = 0

    def make_due(self, prompt_uid: str, n_rollouts: int) -> None:
        """Make a group ready for every consumer: where it stood for one of so many, else last among
        its key. No-op if it is due."""
        entry = self._entries.get(prompt_uid)
        if entry is not None and entry.is_due:
            return
        if entry is not None and len(entry.sequences) >= n_rollouts:
            self._put_due(prompt_uid, entry.key, entry.sequences[n_rollouts - 1])
        else:
            self._next += 1
            self._put_due(prompt_uid, 0.0, self._next)

    def give_back(self, prompt_uid: str) -> None:
        """Make a group ready for every consumer, before all others."""
        self._returned -= 1
        self._put_due(prompt_uid, -math.inf, self._returned)

    def reach(self, prompt_uid: str, n_rollouts: int) -> None:
        """Make an undeclared group ready for consumers of up to so many, and of no more."""
        if n_rollouts == 0:
            self.discard(prompt_uid)
            return
        entry = self._entries.setdefault(prompt_uid, _Entry(prompt_uid))
        sequences = entry.sequences
        if n_rollouts < len(sequences):
            self._leave(entry)
            del sequences[n_rollouts:]
            self._enter(entry, self._queues)
        while len(sequences) < n_rollouts:
            self._next += 1
            sequences.append(self._next)
            self._enter(entry, [len(sequences)])

    def judged(self, prompt_uid: str, key: float, is_held: bool) -> None:
        """Move a group to another key, unless it was handed back; no consumer gets it while it is
        held. No-op if it is not ready."""
        entry = self._entries.get(prompt_uid)
        if entry is None:
            return
        if is_held or entry.key == -math.inf:
            key = entry.key
        if (key, is_held) != (entry.key, entry.is_held):
            self._leave(entry)
            entry.key, entry.is_held = key, is_held
            self._enter(entry, self._queues)

    def discard(self, prompt_uid: str) -> None:
        """Withdraw a group that is served, dropped or open again. No-op if it is not ready."""
        entry = self._entries.pop(prompt_uid, None)
        if entry is not None:
            self._leave(entry)

    def sequence(self, prompt_uid: str, n_rollouts: int) -> int:
        """Return a group's number in the order of readiness for a consumer of so many, or for one
        of fewer if it is not ready for that; negative if it was handed back. A group that is not
        ready has the next number."""
        entry = self._entries.get(prompt_uid)
        if entry is None:
            return self._next + 1
        return entry.sequences[min(n_rollouts, len(entry.sequences)) - 1]

    def count(self, n_rollouts: int) -> int:
        """Return how many groups a consumer asking for `n_rollouts` could have now."""
        return len(self._queue(_DUE)) + len(self._queue(n_rollouts))

    def first(self, n_rollouts: int, limit: int = 1) -> list[str]:
        """Return the groups that such a consumer gets next, at most `limit`."""
        queues = (self._queue(_DUE), self._queue(n_rollouts))
        heads = heapq.merge(*(islice(queue, limit) for queue in queues))
        return [place.prompt_uid for place in islice(heads, limit)]

    def _put_due(self, prompt_uid: str, key: float, sequence: int) -> None:
        self.discard(prompt_uid)
        entry = _Entry(prompt_uid, key, array("q", [sequence]), is_due=True)
        self._entries[prompt_uid] = entry
        self._enter(entry, [_DUE])

    def _queue(self, number: int) -> SortedList[_Place]:
        queue = self._queues.get(number)
        if queue is None:
            places = (entry.place(number) for entry in self._entries.values())
            queue = self._queues[number] = SortedList(place for place in places if place)
        return queue

    def _enter(self, entry: _Entry, queues: Iterable[int]) -> None:
        for number in queues:
            if number in self._queues and (place := entry.place(number)) is not None:
                self._queues[number].add(place)

    def _leave(self, entry: _Entry) -> None:
        for number, queue in self._queues.items():
            if (place := entry.place(number)) is not None:
                queue.remove(place)
