"""A heap whose keys can be moved and withdrawn: deadlines, lease expiries, policy versions.

Withdrawn entries stay in the heap until they surface or outnumber the live ones, when the heap
is rebuilt; so every operation is O(log n) amortised and memory follows the live keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class KeyedHeap(Generic[K]):
    """Keys ordered by a number, smallest first; equal numbers in the order they were set."""

    __slots__ = ("_heap", "_live", "_ticket")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._live: dict[K, tuple[float, int, K]] = {}
        """The very entries of the heap that count."""
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def set(self, key: K, value: float) -> None:
        """Insert `key`, or move it to `value`."""
        held = self._live.get(key)
        if held is not None and held[0] == value:
            return
        self._ticket += 1
        self._live[key] = entry = (value, self._ticket, key)
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, key: K) -> None:
        """Withdraw `key`; unknown keys are fine."""
        if self._live.pop(key, None) is not None:
            self._compact()

    def first(self) -> tuple[float, K] | None:
        """The smallest (value, key), or None."""
        while self._heap:
            value, _, key = self._heap[0]
            if self._live.get(key) is self._heap[0]:
                return value, key
            heapq.heappop(self._heap)
        return None

    def pop_until(self, limit: float) -> K | None:
        """Remove and return the first key whose value is <= `limit`, or None."""
        first = self.first()
        if first is None or first[0] > limit:
            return None
        heapq.heappop(self._heap)
        del self._live[first[1]]
        return first[1]

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
