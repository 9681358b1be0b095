"""The backlog of the archive: groups that left the pool, whose rows stay in the log until they are
in a file.

    group leaves ──add──► waiting ──archived──► its rows are deleted
                   │         └──deleted, or no space for files──► the same, unarchived
                   └─ no room (or no archive) ──► its rows are deleted at once, unarchived

Memory: the numbers of the rows, no content. Owns the bound. Does not own the files
(`files/archive/`), nor how rows are written (`group_log.py`).
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)


class Departure(NamedTuple):
    """A group that left, or one late row about a group that had left before."""

    row: int
    """Last of its rows, which says how it left: what files and the archiver count by."""
    channel: str
    prompt_uid: str
    trajectory_uids: tuple[str, ...]
    rows: array[int]
    """All of its rows in the log, in the order they were written in."""
    n_bytes: int
    """About the bytes that they take there."""
    tags: frozenset[str] = frozenset()
    """Tags of the group and its trajectories."""


class Departures:
    """Groups that left and wait to be archived, the oldest first.

    Args:
        limit_bytes: most bytes of rows that wait; 0: there is no archive.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.n_bytes = 0
        self.n_unarchived = 0
        """Groups and late rows that left without being archived, since the pool was started."""
        self._waiting: OrderedDict[int, Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Departure]:
        return iter(self._waiting.values())

    @property
    def has_archive(self) -> bool:
        return self.limit_bytes > 0

    def has_room(self, n_bytes: int) -> bool:
        """Return whether rows of so many bytes may wait; counts them as unarchived if not."""
        if self.n_bytes + n_bytes <= self.limit_bytes:
            return True
        if self.has_archive:
            self._count(1, f"{self.n_bytes:,} bytes wait for the archiver, which is the most")
        return False

    def add(self, departure: Departure) -> None:
        self._waiting[departure.row] = departure
        self.n_bytes += departure.n_bytes

    def release(self, through: int, *, unarchived: str | None = None) -> list[int]:
        """Forget all departures up to a row; return the rows of the log that may be deleted.

        Args:
            unarchived: why they are in no file; None: they are.
        """
        gone = []
        while self._waiting and next(iter(self._waiting)) <= through:
            gone.append(self._waiting.popitem(last=False)[1])
        if unarchived is not None and gone:
            self._count(len(gone), unarchived)
        return self._let_go(gone)

    def delete(self, uid: str | None, tag: str | None = None) -> tuple[list[str], list[int]]:
        """Forget the departures of a trajectory, or with a tag, which somebody wants gone; the
        trajectories of their groups, of which the others are not archived either, and the rows to
        be deleted."""
        gone = [d for d in self if uid in d.trajectory_uids or tag in d.tags]
        for departure in gone:
            del self._waiting[departure.row]
        uids = dict.fromkeys(each for d in gone for each in d.trajectory_uids)
        return list(uids), self._let_go(gone)

    def of(self, uid: str) -> list[Departure]:
        """The departures of a trajectory or a group."""
        return [d for d in self if uid == d.prompt_uid or uid in d.trajectory_uids]

    def _let_go(self, gone: list[Departure]) -> list[int]:
        self.n_bytes -= sum(d.n_bytes for d in gone)
        return [row for d in gone for row in d.rows]

    def _count(self, n: int, why: str) -> None:
        if not self.n_unarchived:
            logger.warning(
                "DataPool: what leaves the pool is not archived for now: %s; it is counted as "
                "`unarchived` in the pool's description",
                why,
            )
        self.n_unarchived += n
