"""This module chooses rows to be written anew, so that dead ones beside them leave the disk::

    erasing was asked for ─┐ segments with dead rows, the deadest first: their live rows,
    too much is dead      ─┘ some with each transaction ──► no live row is left

When nothing is left to be moved, a segment begins, and those without a live row are gone with it.
Groups that live a short time are never moved: their segments get empty by themselves. Reads and
writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from stepwell.datapool.store.index import Index, Segment

SLICE_BYTES = 256 << 10
"""Moved in a transaction that is made for it: 1 to 2 ms."""
SLICE_ROWS = 4096
"""Looked at in one transaction."""
MOST_SLICES = 8
"""Moved in a transaction that has much else."""


class Cleaner:
    """Chooses from what the index knows."""

    def __init__(self, index: Index) -> None:
        self.unreadable: set[int] = set()
        """Segments that stay, dead rows and all."""
        self._index = index
        self.erase_to = 0
        """No segment up to this one shall have a dead row."""
        self._victim = 0
        self._rows: Iterator[int] = iter(())
        """Rows of the segment `_victim` that were not looked at."""

    @property
    def is_erasing(self) -> bool:
        return any(segment.number <= self.erase_to for segment in self.left())

    def left(self) -> list[Segment]:
        """Segments whose dead rows shall go now."""
        is_much = self._index.is_mostly_dead
        if not is_much and not self.erase_to:
            return []
        left = [s for s in self._index.segments.values() if len(s.ids) > s.live_rows]
        left = [s for s in left if s.number not in self.unreadable]
        to_erase = [s for s in left if s.number <= self.erase_to]
        if not to_erase:
            self.erase_to = 0
        return left if is_much else to_erase

    def next_rows(self, newest: int, deleted: Collection[int], n_bytes: int) -> list[int] | None:
        """Return the rows that are to be moved next; None: nothing.

        Args:
            newest: segment that is written to, so that nothing can be moved out of it.
            deleted: rows that the transaction deletes, or writes with other content.
            n_bytes: how much it writes and deletes. As much is moved, so that the cleaning keeps
                up. 0: it is made for the cleaning.
        """
        movable = {s.number: s for s in self.left() if s.live_rows and s.number != newest}
        if not movable:
            return None
        if self._victim not in movable:
            # By its share, not its bytes: rows that were moved are not moved with every choice.
            victim = min(movable.values(), key=lambda s: s.live_bytes / s.end)
            self._victim, self._rows = victim.number, iter(victim.ids)
        most = min(n_bytes or SLICE_BYTES, MOST_SLICES * SLICE_BYTES)
        chosen: list[int] = []
        for row in islice(self._rows, SLICE_ROWS):
            place = self._index.find(row)
            if place is not None and place[0] == self._victim and row not in deleted:
                chosen.append(row)
                most -= place[2]
                if most <= 0:
                    break
        return chosen

    def again(self, failed: bool = False) -> None:
        """Choose anew, as the rows chosen last were not moved; `failed`: their segment cannot be
        read."""
        if failed:
            self.unreadable.add(self._victim)
        self._victim = 0
