"""The order in which groups are served: by readiness or by a key, never by arrival.

A *due* group is ready whatever the consumer asks (declared and full, past its deadline, or
handed back). Any other, *undeclared*, group is ready for a consumer that asks for n trajectories
once n of its trajectories are complete; it stands in one queue per count that it has reached::

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
from itertools import islice

import msgspec
from sortedcontainers import SortedList

_DUE = 0
"""The queue of due groups; the others have the number of their count."""


class _Place(msgspec.Struct, order=True, frozen=True, gc=False):
    """In a queue."""

    key: float
    sequence: int
    prompt_uid: str


class _Entry(msgspec.Struct, gc=False):
    """A group."""

    key: float
    sequences: array[int]
    """A due group's only one, or an undeclared one's: `[n - 1]` is that in the queue of n."""
    is_due: bool
    is_held: bool = False
    """It stands in no queue."""

    def sequence_in(self, queue: int) -> int | None:
        """None: it does not stand there."""
        if self.is_held or self.is_due is not (queue == _DUE):
            return None
        return self.sequences[queue - 1] if queue <= len(self.sequences) else None

    @property
    def queues(self) -> range:
        return range(1) if self.is_due else range(1, len(self.sequences) + 1)


class ReadyOrder:
    """Prompt uids in order. Holds no group."""

    __slots__ = ("_entries", "_next", "_queues", "_returned")

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[int, SortedList[_Place]] = {}
        self._next = 0
        self._returned = 0

    def make_due(self, prompt_uid: str, key: float = 0.0) -> None:
        """Ready for every consumer, last among its key."""
        self._next += 1
        self._put_due(prompt_uid, key, self._next)

    def make_due_in_place(self, prompt_uid: str, n_rollouts: int) -> None:
        """An undeclared group that such a consumer could have is ready for every one, and stands
        where it stood for that one."""
        entry = self._entries[prompt_uid]
        if not entry.is_due:
            self._put_due(prompt_uid, entry.key, entry.sequences[n_rollouts - 1])

    def give_back(self, prompt_uid: str) -> None:
        """Ready for every consumer, before all others."""
        self._returned -= 1
        self._put_due(prompt_uid, -math.inf, self._returned)

    def reach(self, prompt_uid: str) -> None:
        """An undeclared group got one more complete trajectory."""
        self._next += 1
        entry = self._entries.get(prompt_uid)
        if entry is None:
            entry = self._entries[prompt_uid] = _Entry(0.0, array("q"), is_due=False)
        if not entry.is_due:
            entry.sequences.append(self._next)
            self._enter(prompt_uid, entry, len(entry.sequences))

    def rekey(self, prompt_uid: str, key: float) -> None:
        """Move a group to another key, unless it was handed back or is not here."""
        entry = self._entries.get(prompt_uid)
        if entry is not None and entry.key not in (key, -math.inf):
            self._leave(prompt_uid, entry)
            entry.key = key
            self._enter(prompt_uid, entry, *entry.queues)

    def hold(self, prompt_uid: str) -> None:
        """No consumer gets it until `release`; its places are kept."""
        entry = self._entries[prompt_uid]
        self._leave(prompt_uid, entry)
        entry.is_held = True

    def release(self, prompt_uid: str) -> None:
        """Back to its places, if it was held."""
        entry = self._entries.get(prompt_uid)
        if entry is not None and entry.is_held:
            entry.is_held = False
            self._enter(prompt_uid, entry, *entry.queues)

    def discard(self, prompt_uid: str) -> None:
        """The group is served, dropped, or declared after all; unknown ones are fine."""
        entry = self._entries.pop(prompt_uid, None)
        if entry is not None:
            self._leave(prompt_uid, entry)

    def count(self, n_rollouts: int) -> int:
        """How many groups a consumer asking for `n_rollouts` could have now."""
        return len(self._queue(_DUE)) + len(self._queue(n_rollouts))

    def first(self, n_rollouts: int, limit: int = 1) -> list[str]:
        """The groups that such a consumer gets next, at most `limit`."""
        queues = (self._queue(_DUE), self._queue(n_rollouts))
        heads = heapq.merge(*(islice(queue, limit) for queue in queues))
        return [place.prompt_uid for place in islice(heads, limit)]

    def holds(self, prompt_uid: str, n_rollouts: int) -> bool:
        """Whether such a consumer could have this group now, were it not held."""
        entry = self._entries.get(prompt_uid)
        return entry is not None and (entry.is_due or len(entry.sequences) >= n_rollouts)

    def sequence(self, prompt_uid: str, n_rollouts: int) -> int:
        """Its number in the order of readiness for such a consumer, or for one of fewer if it is
        not ready for that; negative if it was handed back, 0 if it is in no order."""
        entry = self._entries.get(prompt_uid)
        return 0 if entry is None else entry.sequences[min(n_rollouts, len(entry.sequences)) - 1]

    def _put_due(self, prompt_uid: str, key: float, sequence: int) -> None:
        self.discard(prompt_uid)
        entry = self._entries[prompt_uid] = _Entry(key, array("q", [sequence]), is_due=True)
        self._enter(prompt_uid, entry, _DUE)

    def _queue(self, number: int) -> SortedList[_Place]:
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = SortedList(
                _Place(entry.key, sequence, uid)
                for uid, entry in self._entries.items()
                if (sequence := entry.sequence_in(number)) is not None
            )
        return queue

    def _enter(self, prompt_uid: str, entry: _Entry, *queues: int) -> None:
        for number in queues:
            sequence = entry.sequence_in(number)
            if sequence is not None and number in self._queues:
                self._queues[number].add(_Place(entry.key, sequence, prompt_uid))

    def _leave(self, prompt_uid: str, entry: _Entry) -> None:
        for number in entry.queues:
            sequence = entry.sequence_in(number)
            if sequence is not None and number in self._queues:
                self._queues[number].remove(_Place(entry.key, sequence, prompt_uid))
