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
Every operation is O(log n) per queue that the group stands in.
"""

from __future__ import annotations

import heapq
import math
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedList


class _Place(NamedTuple):
    key: float
    sequence: int
    prompt_uid: str


class ReadyOrder:
    """Prompt uids in order. Holds no group."""

    __slots__ = ("_deferred", "_due", "_held", "_next", "_places", "_reached", "_returned")

    def __init__(self) -> None:
        self._due: SortedList[_Place] = SortedList()
        self._reached: dict[int, SortedList[_Place]] = {}
        self._places: dict[str, _Place | list[_Place]] = {}
        """A due group's only place, or an undeclared one's: `[n - 1]` is that in `reached[n]`."""
        self._held: set[str] = set()
        """Groups that keep their places and stand in no queue."""
        self._next = 0
        self._returned = 0
        self._deferred = False

    def defer(self) -> None:
        """Give out places only; nobody asks who is first until `settle`."""
        self._deferred = True

    def settle(self) -> None:
        """All take their places: in one go, which is many times faster than one by one."""
        self._deferred = False
        due: list[_Place] = []
        reached: dict[int, list[_Place]] = {}
        for prompt_uid, places in self._places.items():
            if prompt_uid in self._held:
                continue
            if not isinstance(places, list):
                due.append(places)
                continue
            for n, place in enumerate(places, start=1):
                reached.setdefault(n, []).append(place)
        self._due = SortedList(due)
        self._reached = {n: SortedList(queue) for n, queue in reached.items()}

    def make_due(self, prompt_uid: str, key: float = 0.0) -> None:
        """Ready for every consumer, last among its key."""
        self._next += 1
        self._put_due(_Place(key, self._next, prompt_uid))

    def make_due_in_place(self, prompt_uid: str, n_rollouts: int) -> None:
        """An undeclared group that such a consumer could have is ready for every one, and stands
        where it stood for that one."""
        places = self._places[prompt_uid]
        if isinstance(places, list):
            self._put_due(places[n_rollouts - 1])

    def give_back(self, prompt_uid: str) -> None:
        """Ready for every consumer, before all others."""
        self._returned -= 1
        self._put_due(_Place(-math.inf, self._returned, prompt_uid))

    def reach(self, prompt_uid: str, key: float = 0.0) -> None:
        """An undeclared group got one more complete trajectory."""
        self._next += 1
        places = self._places.setdefault(prompt_uid, [])
        if isinstance(places, list):
            places.append(_Place(key, self._next, prompt_uid))
            if not self._deferred and prompt_uid not in self._held:
                self._reached.setdefault(len(places), SortedList()).add(places[-1])

    def rekey(self, prompt_uid: str, key: float) -> None:
        """Move a group to another key, unless it was handed back or is not here."""
        places = self._places.get(prompt_uid)
        if places is None or all(
            place.key in (key, -math.inf)
            for place in (places if isinstance(places, list) else (places,))
        ):
            return
        self._leave(prompt_uid)
        if isinstance(places, list):
            self._places[prompt_uid] = [place._replace(key=key) for place in places]
        else:
            self._places[prompt_uid] = places._replace(key=key)
        self._enter(prompt_uid)

    def hold(self, prompt_uid: str) -> None:
        """No consumer gets it until `release`; its places are kept."""
        self._leave(prompt_uid)
        self._held.add(prompt_uid)

    def release(self, prompt_uid: str) -> None:
        """Back to its places, if it was held."""
        if prompt_uid in self._held:
            self._held.discard(prompt_uid)
            self._enter(prompt_uid)

    def discard(self, prompt_uid: str) -> None:
        """The group is served, dropped, or declared after all; unknown ones are fine."""
        if prompt_uid in self._places:
            self._leave(prompt_uid)
            self._held.discard(prompt_uid)
            del self._places[prompt_uid]

    def count(self, n_rollouts: int) -> int:
        """How many groups a consumer asking for `n_rollouts` could have now."""
        return len(self._due) + len(self._reached.get(n_rollouts, ()))

    def first(self, n_rollouts: int, limit: int = 1) -> list[str]:
        """The groups that such a consumer gets next, at most `limit`."""
        queues = (self._due, self._reached.get(n_rollouts, ()))
        heads = heapq.merge(*(islice(queue, limit) for queue in queues))
        return [place.prompt_uid for place in islice(heads, limit)]

    def holds(self, prompt_uid: str, n_rollouts: int) -> bool:
        """Whether such a consumer could have this group now, were it not held."""
        places = self._places.get(prompt_uid)
        return len(places) >= n_rollouts if isinstance(places, list) else places is not None

    def sequence(self, prompt_uid: str, n_rollouts: int) -> int:
        """Its number in the order of readiness for such a consumer, or for one of fewer if it is
        not ready for that; negative if it was handed back."""
        places = self._places[prompt_uid]
        if isinstance(places, list):
            return places[min(n_rollouts, len(places)) - 1].sequence
        return places.sequence

    def _put_due(self, place: _Place) -> None:
        self.discard(place.prompt_uid)
        self._places[place.prompt_uid] = place
        if not self._deferred:
            self._due.add(place)

    def _enter(self, prompt_uid: str) -> None:
        if self._deferred or prompt_uid in self._held:
            return
        places = self._places[prompt_uid]
        if isinstance(places, list):
            for n, place in enumerate(places, start=1):
                self._reached.setdefault(n, SortedList()).add(place)
        else:
            self._due.add(places)

    def _leave(self, prompt_uid: str) -> None:
        if self._deferred or prompt_uid in self._held:
            return
        places = self._places[prompt_uid]
        if isinstance(places, list):
            for n, place in enumerate(places, start=1):
                queue = self._reached[n]
                queue.remove(place)
                if not queue:
                    del self._reached[n]
        else:
            self._due.remove(places)
