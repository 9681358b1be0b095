"""Recent events of groups and trajectories: a bounded memory that readers follow by cursor.

    cursor ──get_events──► events after it, next cursor ──get_events──► …

Owns no state of the pool, and is not durable: after a restart a cursor of before is answered with
what there is, and `lost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from stepwell.datapool.ops import CURSOR, is_number

REMEMBERED = 20_000
KINDS = ("ready", "leased", "returned", "acked", "dropped", "aborted", "scored")


@dataclass(frozen=True, slots=True)
class Event:
    """A group became `ready`, was `leased`, `returned`, `acked` or `dropped`; or a trajectory was
    `scored` or `aborted`."""

    number: int
    time: float
    """Pool clock, seconds."""
    kind: str
    channel: str
    prompt_uid: str
    trajectory_uid: str | None = None
    data: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """`ready`: size, why. `leased`, `returned`: delivery. `dropped`: reason, complete, and
    `returned`, whether its source should issue the prompt again: then metadata is the group's, else
    empty. `aborted`: reason. `scored`, of a complete trajectory, and again if its reward changes:
    reward, and the oldest and newest policy version of its steps."""


@dataclass(frozen=True, slots=True)
class Events:
    """A page of events."""

    events: tuple[Event, ...]
    cursor: str
    """Cursor of the next page."""
    lost: bool = False
    """Events between the cursor asked for and these are forgotten."""


class EventLog:
    """The last `REMEMBERED` events.

    Args:
        epoch: tells cursors of this log from those of another.
    """

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._events: deque[Event] = deque(maxlen=REMEMBERED)
        self.n_events = 0

    def add(self, time: float, kind: str, channel: str, *uids: str, **data: Any) -> None:
        """
        Args:
            uids: of the group; and of the trajectory, if it is about one.
        """
        self.n_events += 1
        self._events.append(Event(self.n_events, time, kind, channel, *uids, data=data))

    def after(
        self,
        cursor: str | None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
    ) -> Events:
        """At most `limit` events after `cursor` (None: all that are remembered).

        Raises:
            InvalidRequestError: not a cursor.
        """
        oldest = self._events[0].number if self._events else self.n_events + 1
        seen, lost = self._parse(cursor)
        if seen < oldest - 1:
            lost = lost or cursor is not None
            seen = oldest - 1
        page: list[Event] = []
        # A page costs what it looks at, and looks at no more than it must.
        for event in islice(self._events, seen - oldest + 1, None):
            seen = event.number
            if channel not in (None, event.channel) or (kinds and event.kind not in kinds):
                continue
            page.append(event)
            if len(page) == limit:
                break
        return Events(tuple(page), f"{self._epoch}:{seen}", lost)

    def _parse(self, cursor: str | None) -> tuple[int, bool]:
        """The number of the last event seen, and whether events were lost on the way."""
        if cursor is None:
            return 0, False
        epoch, _, number = cursor.rpartition(":")
        if not is_number(number):
            CURSOR.refuse("cursor", cursor)
        if epoch != self._epoch:
            return 0, True
        return min(int(number), self.n_events), False
