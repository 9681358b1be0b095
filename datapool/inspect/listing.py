"""The content of a channel, page by page: rows for people to read, whole trajectories for an
export.

    cursor ──► group 17, its 3rd trajectory ──► looks_at, admits … ──► next cursor

A page walks the channel's live groups in the order they were opened in, or in its reverse
(`newest_first`), from its cursor, and looks at a bounded number of them, whatever the filters are.
So a page may be empty and still have a cursor; only a page without one is the last. `prompt_uid`
and `trajectory_uid` go straight to what they name. What stays in the pool while somebody pages is
seen exactly once, also across a restart; what comes or goes meanwhile may be seen or not. Groups
that were acked or dropped are gone from here (`get_events`, `get_statistics` tell of them).

A page costs what it looks at, and what lies before its cursor inside one group. Changes nothing,
and makes no channel. Does not own their items (`pages.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeAlias, cast, get_args

from stepwell.datapool import questions
from stepwell.datapool.codec import PackedStep, PackedTrajectory
from stepwell.datapool.core.channel import Channel
from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord
from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.inspect import pages
from stepwell.datapool.ops import CURSOR, NATURAL, POSITIVE, TEXT, Check, is_number
from stepwell.datapool.selection import UNMARKED, Marks
from stepwell.datapool.types import MAX_INT, Trajectory

MAX_LIMIT: Final = 1000
LOOKS_PER_ITEM: Final = 10
MIN_LOOKS: Final = 1000
STEPS_PER_LOOK: Final = 16
"""Steps summed up for a row that cost as much as looking at one more item."""
_SEVERAL: Final = (list, tuple, set, frozenset)
PAGE_BYTES: Final = 8 << 20
"""Payload bytes of an export's page."""


def listed(channel: Channel, epoch: str, asked: questions.Listing[Any]) -> Any:
    """A page of a channel; `read_trajectories`: of at most about 8 MiB.

    Raises:
        InvalidRequestError: as `Pager`.
        JournalError: a payload cannot be read back.
    """
    kind, filters, walk = _LISTINGS[type(asked)]
    pager = Pager(kind, filters, epoch, asked)
    items = []
    for item in walk(channel, pager):
        items.append(item)
        pager.left -= 1
    if not isinstance(asked, questions.ReadTrajectories):
        return pages.Page(tuple(items), pager.cursor)
    heads, packed = zip(*items, strict=True) if items else ((), ())
    return pages.ExportedPage(heads, packed, pager.cursor)


# -- filters -----------------------------------------------------------------------------------

Filters: TypeAlias = Mapping[str, Check]
"""The filters of a listing. `min_x` and `max_x` bound the x of an item, and what has no x is in no
range; any other filter is what the item's own value of that name must be. A filter that the walk
does not look at is one on a field of the row (a trajectory: of its record)."""


def some_of(literal: object) -> Check:
    """One or several of a `Literal`'s values."""
    known = get_args(literal)

    def accepts(value: Any) -> bool:
        return all(v in known for v in (value if isinstance(value, _SEVERAL) else [value]))

    return Check(accepts, f"one or several of {', '.join(known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not (isinstance(value, bool) or math.isnan(value))


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
    """Return the name of the value that a filter looks at, and the test that the value must
    pass."""
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


class Pager:
    """The walk of one page: its filters, its cursor, and how much it may still look at.

    Args:
        kind: of the listing; a cursor of another one is refused.
        epoch: of the pool; cursors of a pool that has lost its content are refused.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
    """

    def __init__(
        self, kind: str, known: Filters, epoch: str, asked: questions.Listing[Any]
    ) -> None:
        limit = asked.limit
        if not POSITIVE.accepts(limit) or limit > MAX_LIMIT:
            raise InvalidRequestError(
                f"limit is {limit!r}; pass 1 to {MAX_LIMIT}, and go on with the page's cursor"
            )
        self.wanted = _parsed(asked.filters, known)
        self._checks = [_check(name, wanted) for name, wanted in self.wanted.items()]
        self._asked = {"prompt_uid", "trajectory_uid"}
        """Values that filters have looked at; the walk itself goes to what these two name."""
        self.newest_first = asked.newest_first
        self._name = f"{kind}{'-newest' if asked.newest_first else ''}:{epoch}"
        first = Place(MAX_INT if asked.newest_first else 0)
        self.start = first if asked.cursor is None else self._parse(asked.cursor)
        self._next: Place | None = None
        self.left = limit
        """Items that the page may still hold."""
        self._looks: float = max(MIN_LOOKS, LOOKS_PER_ITEM * limit)

    def _parse(self, cursor: str) -> Place:
        name, *numbers = cursor.rsplit(":", 2) if isinstance(cursor, str) else [""]
        if len(numbers) != 2 or not all(map(is_number, numbers)):
            CURSOR.refuse("cursor", cursor)
        if name != self._name:
            same_kind = name.partition(":")[0] == self._name.partition(":")[0]
            raise InvalidRequestError(
                f"cursor {cursor!r:.80} is of another {'pool' if same_kind else 'listing'}, or of "
                "this one before it lost its content; begin again with cursor=None"
            )
        return Place(*map(int, numbers))

    @property
    def cursor(self) -> str | None:
        """Cursor of the next page; None: there is nothing more."""
        return None if self._next is None else f"{self._name}:{':'.join(map(str, self._next))}"

    def looks_at(self, *place: int) -> bool:
        """True if this page looks at this place; else the next one begins there."""
        if self.left > 0 and self._looks > 0:
            self._looks -= 1
            return True
        self._next = Place(*place)
        return False

    def spend(self, items: int = 0, steps: int = 0) -> None:
        """A look cost more than one."""
        self._looks -= items + steps / STEPS_PER_LOOK

    def admits(self, **found: Any) -> bool:
        """True if the filters let an item pass that has these values."""
        self._asked.update(found)
        return all(passes(found[name]) for name, passes in self._checks if name in found)

    def admits_rest(self, item: object) -> bool:
        """True if an item passes the filters that `admits` was not asked for: each is a field of
        the item."""
        rest = [check for check in self._checks if check[0] not in self._asked]
        return all(passes(getattr(item, name)) for name, passes in rest)

    def admits_sums(self, reward: float | None, oldest: int | None, newest: int | None) -> bool:
        """Both versions must lie in the range."""
        passes = self.admits(reward=reward, version=oldest)
        return passes and self.admits(version=newest)


# -- the walk ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A trajectory on the way."""

    group: GroupRecord
    group_state: pages.GroupState
    record: TrajectoryRecord
    state: pages.TrajectoryState
    versions: tuple[int | None, int | None]
    """The oldest and the newest of its steps."""


def _groups(channel: Channel, pager: Pager) -> Iterator[tuple[GroupRecord, pages.GroupState]]:
    for group in _live_groups(channel, pager):
        position = pager.start.position if group.number == pager.start.group else 0
        if not pager.looks_at(group.number, position):
            return
        yield group, cast(pages.GroupState, channel.state(group)[0])


def _live_groups(channel: Channel, pager: Pager) -> Iterator[GroupRecord]:
    """Live groups from the cursor on, or the one that the filters name."""
    first, prompt_uid = pager.start.group, pager.wanted.get("prompt_uid")
    if (trajectory_uid := pager.wanted.get("trajectory_uid")) is not None:
        record = channel.records.trajectories.get(trajectory_uid)
        if record is None or prompt_uid not in (None, record.prompt_uid):
            return
        prompt_uid = record.prompt_uid
    if prompt_uid is None:
        by_number = channel.records.by_number
        bounds = (None, first) if pager.newest_first else (first, None)
        for number in by_number.irange(*bounds, reverse=pager.newest_first):
            yield by_number[number]
    elif (group := channel.records.groups.get(prompt_uid)) and (
        group.number <= first if pager.newest_first else group.number >= first
    ):
        yield group


def _trajectories(channel: Channel, pager: Pager) -> Iterator[_Found]:
    """Trajectories that the filters let pass; their steps are looked at last."""
    uid = pager.wanted.get("trajectory_uid")
    for group, group_state in _groups(channel, pager):
        first = pager.start.position if group.number == pager.start.group else 0
        records = [channel.records.trajectories[uid]] if uid else group.trajectories[first:]
        for position, record in enumerate(records, start=first):
            if not pager.looks_at(group.number, position):
                return
            state: pages.TrajectoryState = "complete" if record.is_complete else "aborted"
            state = "open" if record.closing is None else state
            tags = record.marks.tags | group.marks.tags
            if not pager.admits(state=state, reason=_reason(record), tag=tags):
                continue
            pager.spend(steps=len(record.steps))
            versions = record.versions() if record.steps else (None, None)
            if pager.admits_sums(record.reward(), *versions) and pager.admits_rest(record):
                yield _Found(group, group_state, record, state, versions)


# -- rows --------------------------------------------------------------------------------------


def _reason(record: TrajectoryRecord) -> str | None:
    return None if record.closing is None else record.closing.aborted


def _group_rows(channel: Channel, pager: Pager) -> Iterator[pages.GroupRow]:
    for group, state in _groups(channel, pager):
        age_s = channel.now - group.opened_at
        if not pager.admits(state=state, age_s=age_s, tag=group.marks.tags):
            continue
        info = channel.info(group)
        steps = [step for record in group.trajectories for step in record.steps]
        pager.spend(items=len(group.trajectories), steps=len(steps))
        if not pager.admits_sums(info.reward_mean, info.oldest_version, info.newest_version):
            continue
        row = pages.GroupRow(
            prompt_uid=group.prompt_uid,
            state=state,
            reason=channel.describe(group)["why"] if state == "open" else channel.state(group)[1],
            n_rollouts=None if group.terms is None else group.terms.n_rollouts,
            n_complete=len(group.complete),
            n_running=group.n_open,
            n_aborted=group.n_aborted,
            n_steps=len(steps),
            n_tokens=sum(step.n_tokens for step in steps),
            reward_mean=info.reward_mean,
            reward_std=info.reward_std,
            oldest_version=info.oldest_version,
            newest_version=info.newest_version,
            opened_at=group.opened_at,
            deadline=group.deadline,
            delivery=group.delivery,
            metadata=dict(group.metadata),
            marks=group.marks,
        )
        if pager.admits_rest(row):
            yield row


def _trajectory_rows(channel: Channel, pager: Pager) -> Iterator[pages.TrajectoryRow]:
    for found in _trajectories(channel, pager):
        record, steps = found.record, found.record.steps
        oldest, newest = found.versions
        yield pages.TrajectoryRow(
            trajectory_uid=record.trajectory_uid,
            prompt_uid=record.prompt_uid,
            state=found.state,
            group_state=found.group_state,
            reason=_reason(record),
            reward=record.reward(),
            outcome=record.outcome,
            n_steps=len(steps),
            n_missing=record.max_index + 1 - len(steps),
            n_tokens=sum(step.n_tokens for step in steps),
            n_unique_tokens=sum(map(_own_tokens, steps)),
            oldest_version=oldest,
            newest_version=newest,
            attempt=record.attempt,
            opened_at=found.group.opened_at,
            closed_at=record.closed_at if record.is_complete else None,
            metadata=dict(record.metadata),
            marks=record.marks,
        )


def _own_tokens(step: PackedStep) -> int:
    """Tokens of a step that no step before it has."""
    header = step.header
    return header.n_response + (header.n_prompt if header.base_index < 0 else header.n_new)


def _index_rows(channel: Channel, pager: Pager) -> Iterator[pages.IndexRow]:
    for found in _trajectories(channel, pager):
        record = found.record
        uids = record.trajectory_uid, record.prompt_uid
        yield pages.IndexRow(*uids, record.is_complete, tuple(s.step_index for s in record.steps))


def _exported(
    channel: Channel, pager: Pager
) -> Iterator[tuple[pages.ExportedTrajectory, PackedTrajectory]]:
    """Complete ones as a consumer would get them. Of open ones the steps so far, with the rewards
    that were set since; one for the whole trajectory stands in `outcome`. Of aborted ones only the
    head, because the pool released their steps."""
    n_bytes = 0
    for found in _trajectories(channel, pager):
        record, group, is_open = found.record, found.group, found.state == "open"
        packed = channel.packed(record)
        if is_open and packed.steps:  # it came as if it were complete
            own = record.step_reward(record.max_index), record.last_index is not None
            packed.steps[-1] = packed.steps[-1].served(*own)
        n_bytes += sum(len(step.payload) + len(step.prompt or b"") for step in packed.steps)
        if n_bytes >= PAGE_BYTES:
            pager.left = 0
        uids = record.trajectory_uid, record.prompt_uid
        head = pages.ExportedTrajectory(
            trajectory=Trajectory(*uids, (), dict(record.metadata), record.attempt),
            channel=channel.name,
            state=found.state,
            reason=_reason(record),
            group_state=found.group_state,
            outcome=record.outcome if is_open else None,
            n_rollouts=None if group.terms is None else group.terms.n_rollouts,
            marks=_plain(record.marks),
            group_metadata=dict(group.metadata),
            group_marks=_plain(group.marks),
        )
        yield head, packed


def _plain(marks: Marks) -> dict[str, Any] | None:
    return None if marks == UNMARKED else marks.as_dict()


# -- the listings ------------------------------------------------------------------------------

_EVERYWHERE: Final[Filters] = {
    "prompt_uid": TEXT,
    "tag": TEXT,  # of its own marks; of a trajectory, also of its group's
    "min_reward": NUMBER,  # a group's mean, a trajectory's sum
    "max_reward": NUMBER,
    "min_version": NATURAL,  # all of its steps lie in the range; a group's complete ones
    "max_version": NATURAL,
}
_OF_GROUPS: Final[Filters] = {
    "state": some_of(pages.GroupState),
    "min_age_s": NUMBER,
    **_EVERYWHERE,
}
_OF_TRAJECTORIES: Final[Filters] = {
    "state": some_of(pages.TrajectoryState),
    "trajectory_uid": TEXT,
    "reason": TEXT,  # of an abort
    **_EVERYWHERE,
}
_Walk: TypeAlias = Callable[[Channel, Pager], Iterator[Any]]
_LISTINGS: Final[Mapping[type, tuple[str, Filters, _Walk]]] = {
    questions.ListGroups: ("groups", _OF_GROUPS, _group_rows),
    questions.ListTrajectories: ("trajectories", _OF_TRAJECTORIES, _trajectory_rows),
    questions.IndexTrajectories: ("index", _OF_TRAJECTORIES, _index_rows),
    questions.ReadTrajectories: ("export", _OF_TRAJECTORIES, _exported),
}
"""Name, filters and items of each: those that pass the pager's filters, from its cursor on. Groups
in the order they were opened in, trajectories group by group."""
