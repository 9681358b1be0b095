"""The order in which groups are served: by readiness, never by arrival.

A *due* group is ready whatever the consumer asks (declared and full, past its deadline, or
handed back). Any other, *undeclared*, group is ready for a consumer that asks for n trajectories
once n of its trajectories are complete; it stands in one queue per count that it has reached::

    due          g7 ── g2
    reached[1]   g3 ── g1 ── g9
    reached[2]   g9 ── g3              g9 had its second trajectory before g3
    reached[5]   g9                    a fetch of 5 finds g9 at once

All queues share one sequence, so the first of two heads is the one that became ready first.
Every operation is O(1), or O(trajectories of the group) when a group leaves.
"""

from __future__ import annotations

from collections import OrderedDict


class ReadyOrder:
    """Prompt uids by readiness. Holds no group, only their order."""

    __slots__ = ("_due", "_next", "_reached", "_reached_count", "_returned")

    def __init__(self) -> None:
        self._due: OrderedDict[str, int] = OrderedDict()
        self._reached: dict[int, OrderedDict[str, int]] = {}
        self._reached_count: dict[str, int] = {}
        self._next = 0
        self._returned = 0

    def make_due(self, prompt_uid: str) -> None:
        """Ready for every consumer, last in order."""
        self.discard(prompt_uid)
        self._next += 1
        self._due[prompt_uid] = self._next

    def give_back(self, prompt_uid: str) -> None:
        """Ready for every consumer, first in order: it has waited once already."""
        self.discard(prompt_uid)
        self._returned -= 1
        self._due[prompt_uid] = self._returned
        self._due.move_to_end(prompt_uid, last=False)

    def reach(self, prompt_uid: str, n_complete: int) -> None:
        """An undeclared group got its `n_complete`-th complete trajectory."""
        self._next += 1
        self._reached.setdefault(n_complete, OrderedDict())[prompt_uid] = self._next
        self._reached_count[prompt_uid] = n_complete

    def discard(self, prompt_uid: str) -> None:
        """The group is served, dropped, or declared after all."""
        self._due.pop(prompt_uid, None)
        for n in range(1, self._reached_count.pop(prompt_uid, 0) + 1):
            queue = self._reached[n]
            del queue[prompt_uid]
            if not queue:
                del self._reached[n]

    def count(self, n_rollouts: int) -> int:
        """How many groups a consumer asking for `n_rollouts` could have now."""
        return len(self._due) + len(self._reached.get(n_rollouts, ()))

    def first(self, n_rollouts: int) -> str | None:
        """The group that such a consumer gets next."""
        heads = [
            (queue[uid], uid)
            for queue in (self._due, self._reached.get(n_rollouts))
            if queue
            for uid in (next(iter(queue)),)
        ]
        return min(heads)[1] if heads else None

    def holds(self, prompt_uid: str, n_rollouts: int) -> bool:
        """Whether such a consumer could have this group now."""
        return prompt_uid in self._due or prompt_uid in self._reached.get(n_rollouts, ())
