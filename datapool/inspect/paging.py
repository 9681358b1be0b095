"""This module bounds what one page of a listing looks at, and says where the next one begins.

    cursor ──► group 17, its 3rd trajectory, step 5 ──► looks_at, admits … ──► next cursor

Owns cursors, the cost of a page, and how filters are checked. Does not own which filters a listing
has, nor the walk through a channel (`listing.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.ops import Check
from stepwell.datapool.selection import Marks

MAX_LIMIT: Final = 1000
LOOKS_PER_ITEM: Final = 10
MIN_LOOKS: Final = 1000
STEPS_PER_LOOK: Final = 16
"""Steps summed up for a row that cost as much as looking at one more item."""
BYTES_PER_LOOK: Final = 1 << 14
"""The same for payload bytes, which may have to be read from the disk."""

_SEVERAL: Final = (list, tuple, set, frozenset)

# -- filters -----------------------------------------------------------------------------------

Filters: TypeAlias = Mapping[str, Check]
"""The filters of a listing. `min_x` and `max_x` bound the x of an item, and what has no x is in no
range; any other filter is what the item's own value of that name must be."""


def some_of(literal: object) -> Check:
    """One or several of a `Literal`'s values."""
    known = get_args(literal)

    def accepts(value: Any) -> bool:
        return all(v in known for v in (value if isinstance(value, _SEVERAL) else [value]))

    return Check(accepts, f"one or several of {', '.join(known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not (isinstance(value, bool) or math.isnan(value))


FLAG: Final = Check(lambda value: isinstance(value, bool), "True or False")
NUMBER: Final = Check(_is_number, "a number")


def _parsed(given: Mapping[str, Any], known: Filters) -> dict[str, Any]:
    """The filters that are given; None is none."""
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(str(name), known, 1, 0.0)[0]
            raise InvalidRequestError(
                f"there is no filter {name!r} (did you mean {near!r}?); there are "
                f"{', '.join(known)}"
            )
        if value is not None and not known[name].accepts(value):
            known[name].refuse(f"filter {name}", value)
    return {name: value for name, value in given.items() if value is not None}


def _check(name: str, wanted: Any) -> tuple[str, Callable[[Any], bool]]:
    """What a filter looks at, and whether it lets that pass."""
    bound, _, rest = name.partition("_")
    if bound == "min":
        return rest, lambda found: found is not None and found >= wanted
    if bound == "max":
        return rest, lambda found: found is not None and found <= wanted
    if isinstance(wanted, _SEVERAL):
        return name, lambda found: found in wanted
    return name, lambda found: wanted in found if isinstance(found, frozenset) else found == wanted


# -- pages -------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The first thing that a page has not looked at."""

    group: int
    """`GroupRecord.number`"""
    position: int = 0
    """of the trajectory in its group"""
    step: int = 0
    """`step_index`"""


class Pager:
    """What one page may look at.

    Args:
        kind: of the listing; a cursor of another one is refused.
        epoch: of the pool; cursors of a pool that has lost its content are refused.
        cursor: where to begin; None: at the beginning.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
    """

    def __init__(
        self,
        kind: str,
        known: Filters,
        epoch: str,
        cursor: str | None,
        limit: int,
        filters: Mapping[str, Any],
    ) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequestError(
                f"limit is {limit!r}; pass 1 to {MAX_LIMIT}, and go on with the page's cursor"
            )
        self.wanted = _parsed(filters, known)
        self._checks = [_check(name, wanted) for name, wanted in self.wanted.items()]
        self._name = f"{kind}:{epoch}"
        self.start = Place(0) if cursor is None else self._parse(cursor)
        self._next: Place | None = None
        self.left = limit
        """Items that the page may still hold."""
        self._looks: float = max(MIN_LOOKS, LOOKS_PER_ITEM * limit)

    def _parse(self, cursor: str) -> Place:
        name, *numbers = cursor.rsplit(":", 3) if isinstance(cursor, str) else [""]
        if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}; pass one that the page before came with, or None"
            )
        if name != self._name:
            same_kind = name.partition(":")[0] == self._name.partition(":")[0]
            raise InvalidRequestError(
                f"cursor {cursor!r:.80} is of another {'pool' if same_kind else 'listing'}, or of "
                "this one before it lost its content; begin again with cursor=None"
            )
        return Place(*map(int, numbers))

    @property
    def cursor(self) -> str | None:
        """Where the next page begins; None: there is nothing more."""
        return None if self._next is None else f"{self._name}:{':'.join(map(str, self._next))}"

    def looks_at(self, *place: int) -> bool:
        """Whether this page does; else the next one begins there."""
        if self.left > 0 and self._looks > 0:
            self._looks -= 1
            return True
        self._next = Place(*place)
        return False

    def spend(self, items: int = 0, steps: int = 0, n_bytes: int = 0) -> None:
        """A look cost more than one."""
        self._looks -= items + steps / STEPS_PER_LOOK + n_bytes / BYTES_PER_LOOK

    def admits(self, **found: Any) -> bool:
        """Whether the filters let an item pass that has these values."""
        return all(passes(found[name]) for name, passes in self._checks if name in found)

    def admits_marks(self, *marks: Marks) -> bool:
        """Those of an item and of what it belongs to."""
        if self.wanted.keys().isdisjoint(("tag", "trainable")):
            return True
        tags = frozenset(tag for m in marks for tag in m.tags)
        return self.admits(tag=tags, trainable=all(m.trainable is not False for m in marks))

    def admits_sums(self, reward: float | None, oldest: int | None, newest: int | None) -> bool:
        """Both versions must lie in the range."""
        passes = self.admits(reward=reward, scored=reward is not None, version=oldest)
        return passes and self.admits(version=newest)
