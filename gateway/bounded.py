"""This module bounds what a gateway remembers, so that no number of agents fills its memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(MutableMapping[K, V], Generic[K, V]):
    """A map whose values have a size of `most` together; those go first that were set or read
    longest ago. A value that is larger alone is not kept."""

    def __init__(self, most: int, size: Callable[[V], int] = lambda _: 1) -> None:
        self.total = 0
        self._most, self._size = most, size
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._values))  # reading them moves them

    def __getitem__(self, key: K) -> V:
        self._values.move_to_end(key)
        return self._values[key][0]

    def __setitem__(self, key: K, value: V) -> None:
        if key in self._values:
            del self[key]
        if (size := self._size(value)) <= self._most:
            self._values[key] = value, size
            self.total += size
        while self.total > self._most:
            _, (_, size) = self._values.popitem(last=False)
            self.total -= size

    def __delitem__(self, key: K) -> None:
        self.total -= self._values.pop(key)[1]

    def clear(self) -> None:
        self._values.clear()
        self.total = 0
