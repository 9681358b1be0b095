"""What is in a channel, page by page: rows for people to read, whole trajectories for an export.

    cursor ──► group 17, its 3rd trajectory, step 5 ──► items that match … ──► next cursor

A page walks the channel's live groups in the order they were opened in, from its cursor, and looks
at a bounded number of them, whatever the filters are. So a page may be empty and still have a
cursor; only a page without one is the last. `prompt_uid` and `trajectory_uid` go straight to what
they name. What stays in the pool while somebody pages is seen exactly once, also across a restart;
what comes or goes meanwhile may be seen or not. Groups that were acked or dropped are gone from
here (`get_events`, `get_statistics` tell of them).

A page costs what it looks at, and what lies before its cursor inside one group or trajectory.

Owns rows, filters and cursors. Changes nothing, and makes no channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast, get_args

from stepwell.datapool.codec import PackedTrajectory, unpack
from stepwell.datapool.core.channel import Channel
from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord
from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.files.rows import ExportedTrajectory
from stepwell.datapool.inspect.rows import (
    ExportedPage,
    GroupRow,
    GroupState,
    Page,
    StepRow,
    TrajectoryRow,
    TrajectoryState,
)
from stepwell.datapool.selection import UNMARKED, GroupInfo, Marks
from stepwell.datapool.types import FinishReason, Step, Trajectory

MAX_LIMIT: Final = 1000
LOOKS_PER_ITEM: Final = 10
MIN_LOOKS: Final = 1000
STEPS_PER_LOOK: Final = 16
"""Steps summed up for a row that cost as much as looking at one more item."""
BYTES_PER_LOOK: Final = 1 << 14
"""The same for payload bytes, which may have to be read from the disk."""
PAGE_BYTES: Final = 8 << 20
"""Payload bytes of an export's page."""

T = TypeVar("T")


# -- filters -----------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("True or False")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("an integer >= 0")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ValueError("a number")
    return float(value)


def _some_of(*known: str) -> Callable[[Any], frozenset[str]]:
    def parse(value: Any) -> frozenset[str]:
        chosen = {value} if isinstance(value, str) else value
        if not isinstance(chosen, list | tuple | set | frozenset) or not {*chosen} <= {*known}:
            raise ValueError(f"one or several of {', '.join(known)}")
        return frozenset(chosen)

    return parse


_Parsers: TypeAlias = Mapping[str, Callable[[Any], Any]]

_RANGES: Final[_Parsers] = {
    "min_reward": _number,
    "max_reward": _number,
    "min_version": _integer,
    "max_version": _integer,
}
_GROUP_FILTERS: Final[_Parsers] = {
    "state": _some_of(*get_args(GroupState)),
    "prompt_uid": _text,
    "tag": _text,
    "trainable": _flag,
    "min_age_s": _number,
    **_RANGES,
}
_TRAJECTORY_FILTERS: Final[_Parsers] = {
    "state": _some_of(*get_args(TrajectoryState)),
    "group_state": _some_of(*get_args(GroupState)),
    "prompt_uid": _text,
    "trajectory_uid": _text,
    "reason": _text,
    "tag": _text,
    "trainable": _flag,
    "scored": _flag,
    **_RANGES,
}
_STEP_FILTERS: Final[_Parsers] = {
    "state": _some_of(*get_args(TrajectoryState)),
    "group_state": _some_of(*get_args(GroupState)),
    "prompt_uid": _text,
    "trajectory_uid": _text,
    "step_index": _integer,
    "tag": _text,
    "trainable": _flag,
    "scored": _flag,
    "finish_reason": _some_of(*get_args(FinishReason)),
    **_RANGES,
}


@dataclass(frozen=True, slots=True)
class _Filters:
    """What an item must have to be listed; None: anything."""

    state: frozenset[str] | None = None
    group_state: frozenset[str] | None = None
    prompt_uid: str | None = None
    trajectory_uid: str | None = None
    step_index: int | None = None
    reason: str | None = None
    tag: str | None = None
    trainable: bool | None = None
    scored: bool | None = None
    finish_reason: frozenset[str] | None = None
    min_age_s: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    max_version: int | None = None

    def admit_marks(self, *marks: Marks) -> bool:
        """Whether marks, of a trajectory those of its group too, are what is asked for."""
        if self.tag is not None and not any(self.tag in m.tags for m in marks):
            return False
        refused = any(m.trainable is False for m in marks)
        return self.trainable is None or self.trainable is not refused

    def admit_reward(self, reward: float | None) -> bool:
        if self.scored is not None and self.scored is (reward is None):
            return False
        if reward is None:
            return self.min_reward is None and self.max_reward is None
        return (self.min_reward is None or reward >= self.min_reward) and (
            self.max_reward is None or reward <= self.max_reward
        )

    def admit_versions(self, oldest: int | None, newest: int | None) -> bool:
        """All of an item must lie in the range."""
        if oldest is None or newest is None:
            return self.min_version is None and self.max_version is None
        return (self.min_version is None or oldest >= self.min_version) and (
            self.max_version is None or newest <= self.max_version
        )


def _filters(given: Mapping[str, Any], known: _Parsers) -> _Filters:
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(str(name), known, 1, 0.0)[0]
            raise InvalidRequestError(
                f"there is no filter {name!r} (did you mean {near!r}?); there are "
                f"{', '.join(known)}"
            )
        try:
            parsed[name] = None if value is None else known[name](value)
        except ValueError as e:
            raise InvalidRequestError(f"filter {name} is {value!r:.80}; pass {e}") from e
    return _Filters(**parsed)


# -- pages -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The first thing that a page has not looked at."""

    group: int
    """`GroupRecord.number`"""
    position: int = 0
    """of the trajectory in its group"""
    step: int = 0
    """`step_index`"""


class _Scan(Generic[T]):
    """A page in the making.

    Args:
        kind: of the listing; a cursor of another one is refused.
        epoch: of the pool; cursors of a pool that has lost its content are refused.
    """

    def __init__(self, kind: str, epoch: str, cursor: str | None, limit: int) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequestError(
                f"limit is {limit!r}; pass 1 to {MAX_LIMIT}, and go on with the page's cursor"
            )
        self._name = f"{kind}:{epoch}"
        self._limit = limit
        self._left: float = max(MIN_LOOKS, LOOKS_PER_ITEM * limit)
        self._next: _Place | None = None
        self.start = self._parse(kind, cursor)
        self.items: list[T] = []

    def _parse(self, kind: str, cursor: str | None) -> _Place:
        if cursor is None:
            return _Place(0)
        name, *numbers = cursor.rsplit(":", 3) if isinstance(cursor, str) else [""]
        if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}; pass one that the page before came with, or None"
            )
        if name != self._name:
            what = "another listing" if not name.startswith(f"{kind}:") else "another pool"
            raise InvalidRequestError(
                f"cursor {cursor!r:.80} is of {what}, or of this one before it lost its content; "
                "begin again with cursor=None"
            )
        return _Place(*map(int, numbers))

    def spend(self, items: int = 0, steps: int = 0, n_bytes: int = 0) -> None:
        self._left -= items + steps / STEPS_PER_LOOK + n_bytes / BYTES_PER_LOOK

    def stop(self) -> None:
        """The page is full."""
        self._left = 0

    def is_over(self, *place: int) -> bool:
        """Whether the page ends before `place`, where the next one begins."""
        if self._left > 0 and len(self.items) < self._limit:
            return False
        self._next = _Place(*place)
        return True

    @property
    def cursor(self) -> str | None:
        return None if self._next is None else f"{self._name}:{':'.join(map(str, self._next))}"

    def page(self) -> Page[T]:
        return Page(tuple(self.items), self.cursor)


def list_groups(
    channel: Channel, epoch: str, cursor: str | None, limit: int, filters: Mapping[str, Any]
) -> Page[GroupRow]:
    """Live groups.

    Args:
        filters: `state` (one or several), `prompt_uid`, `tag`, `trainable` (False: marked so; True:
            not), `min_age_s`; `min_reward`, `max_reward` of the mean; `min_version`,
            `max_version`, between which all its complete trajectories lie.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
    """
    wanted = _filters(filters, _GROUP_FILTERS)
    scan: _Scan[GroupRow] = _Scan("groups", epoch, cursor, limit)
    for group in _groups(channel, scan, wanted):
        if scan.is_over(group.number):
            break
        scan.spend(items=1)
        if not wanted.admit_marks(group.marks):
            continue
        if wanted.min_age_s is not None and channel.now - group.opened_at < wanted.min_age_s:
            continue
        state, reason = _group_state(channel, group)
        if wanted.state is not None and state not in wanted.state:
            continue
        row = _group_row(channel, group, state, reason)
        scan.spend(items=len(group.trajectories), steps=row.n_steps)
        if wanted.admit_reward(row.reward_mean) and wanted.admit_versions(
            row.oldest_version, row.newest_version
        ):
            scan.items.append(row)
    return scan.page()


def list_trajectories(
    channel: Channel, epoch: str, cursor: str | None, limit: int, filters: Mapping[str, Any]
) -> Page[TrajectoryRow]:
    """Trajectories of live groups, group by group, in the order they were opened in.

    Args:
        filters: `state`, `group_state` (one or several), `prompt_uid`, `trajectory_uid`, `reason`
            (of an abort), `tag`, `trainable` (its own or its group's), `scored`, `min_reward`,
            `max_reward`; `min_version`, `max_version`, between which all its steps lie.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
    """
    wanted = _filters(filters, _TRAJECTORY_FILTERS)
    scan: _Scan[TrajectoryRow] = _Scan("trajectories", epoch, cursor, limit)
    for _, _, row in _trajectories(channel, scan, wanted):
        scan.items.append(row)
    return scan.page()


def list_steps(
    channel: Channel,
    epoch: str,
    cursor: str | None,
    limit: int,
    filters: Mapping[str, Any],
    include_tokens: bool = False,
) -> Page[StepRow]:
    """Stored steps, trajectory by trajectory, by `step_index`.

    Args:
        filters: `state` (of the trajectory), `group_state` (one or several), `prompt_uid`,
            `trajectory_uid`, `step_index`, `tag`, `trainable` (the trajectory's or its group's),
            `scored`, `finish_reason` (one or several), `min_reward`, `max_reward`, `min_version`,
            `max_version`.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
        JournalError: a payload cannot be read back.
    """
    wanted = _filters(filters, _STEP_FILTERS)
    scan: _Scan[StepRow] = _Scan("steps", epoch, cursor, limit)
    for group, record, position, group_state in _records(channel, scan, wanted):
        here = (group.number, position)
        first = scan.start.step if scan.start[:2] == here else 0
        for index in _indices(record, first, wanted.step_index):
            if scan.is_over(*here, index):
                return scan.page()
            scan.spend(items=1)
            chain, reward = record.chain(index), record.step_reward(index)
            if index == record.max_index:
                reward = record.last_reward()
            version = chain[0].policy_version
            if not wanted.admit_reward(reward) or not wanted.admit_versions(version, version):
                continue
            packed = channel.payloads.read(chain)
            scan.spend(n_bytes=sum(len(step.payload) for step in packed))
            step, *_ = unpack(PackedTrajectory(record.trajectory_uid, record.prompt_uid, packed))
            if wanted.finish_reason is not None and step.finish_reason not in wanted.finish_reason:
                continue
            scan.items.append(_step_row(record, step, reward, group_state, include_tokens))
    return scan.page()


def read_trajectories(
    channel: Channel, epoch: str, cursor: str | None, limit: int, filters: Mapping[str, Any]
) -> ExportedPage:
    """Whole trajectories with their tokens, at most about 8 MiB at a time.

    Complete ones as a consumer would get them. Of open ones the steps so far, with the rewards
    that were set since; one for the whole trajectory stands in `outcome`. Of aborted ones only the
    head, because the pool released their steps.

    Args:
        filters: as `list_trajectories`.

    Raises:
        InvalidRequestError: an unknown filter, a malformed value, limit or cursor.
        JournalError: a payload cannot be read back.
    """
    wanted = _filters(filters, _TRAJECTORY_FILTERS)
    scan: _Scan[tuple[ExportedTrajectory, PackedTrajectory]] = _Scan("export", epoch, cursor, limit)
    n_bytes = 0
    for group, record, row in _trajectories(channel, scan, wanted):
        packed = PackedTrajectory(record.trajectory_uid, record.prompt_uid, [])
        packed.metadata, packed.attempt = row.metadata, row.attempt
        if record.steps:
            packed = channel.packed(record)
            if row.state == "open":
                # They came as if it were complete.
                packed.steps[-1].reward = record.step_reward(record.max_index)
                packed.steps[-1].is_last = record.last_index is not None
        scan.items.append((_head(channel, group, record, row), packed))
        n_bytes += sum(len(step.payload) + len(step.prompt or b"") for step in packed.steps)
        if n_bytes >= PAGE_BYTES:
            scan.stop()
    return ExportedPage(
        tuple(head for head, _ in scan.items), tuple(p for _, p in scan.items), scan.cursor
    )


# -- inside: the walk --------------------------------------------------------------------------


def _groups(channel: Channel, scan: _Scan[Any], wanted: _Filters) -> Iterator[GroupRecord]:
    """Live groups from the scan's start, or the one that the filters name."""
    prompt_uid = wanted.prompt_uid
    if wanted.trajectory_uid is not None:
        record = channel.trajectory_index.get(wanted.trajectory_uid)
        if record is None or prompt_uid not in (None, record.prompt_uid):
            return
        prompt_uid = record.prompt_uid
    if prompt_uid is None:
        for number in channel.groups_by_number.irange(scan.start.group):
            yield channel.groups_by_number[number]
        return
    group = channel.prompt_groups.get(prompt_uid)
    if group is not None and group.number >= scan.start.group:
        yield group


def _records(
    channel: Channel, scan: _Scan[Any], wanted: _Filters
) -> Iterator[tuple[GroupRecord, TrajectoryRecord, int, GroupState]]:
    """Trajectories, as far as what is asked of them can be seen without their steps; and their
    positions in their groups."""
    for group in _groups(channel, scan, wanted):
        here = scan.start.position if group.number == scan.start.group else 0
        if scan.is_over(group.number, here):
            return
        scan.spend(items=1)
        group_state, _ = _group_state(channel, group)
        if wanted.group_state is not None and group_state not in wanted.group_state:
            continue
        if wanted.trajectory_uid is not None:
            records = iter([group.trajectories[wanted.trajectory_uid]])
        else:
            records = islice(group.trajectories.values(), here, None)
        for position, record in enumerate(records, start=here):
            if scan.is_over(group.number, position):
                return
            scan.spend(items=1)
            if wanted.state is not None and _state(record) not in wanted.state:
                continue
            if wanted.reason is not None and wanted.reason != _reason(record):
                continue
            if wanted.admit_marks(record.marks, group.marks):
                yield group, record, position, group_state


def _trajectories(
    channel: Channel, scan: _Scan[Any], wanted: _Filters
) -> Iterator[tuple[GroupRecord, TrajectoryRecord, TrajectoryRow]]:
    """Trajectories with all that is asked of them."""
    for group, record, _, group_state in _records(channel, scan, wanted):
        row = _trajectory_row(record, group_state)
        scan.spend(steps=row.n_steps)
        if wanted.admit_reward(row.reward) and wanted.admit_versions(
            row.oldest_version, row.newest_version
        ):
            yield group, record, row


def _indices(record: TrajectoryRecord, first: int, only: int | None) -> Iterator[int]:
    """Indices of stored steps from `first` on, ascending."""
    if only is not None:
        return iter([only] if only >= first and record.step(only) is not None else [])
    return iter([step.step_index for step in record.steps if step.step_index >= first])


# -- inside: rows ------------------------------------------------------------------------------


def _group_state(channel: Channel, group: GroupRecord) -> tuple[GroupState, str | None]:
    state, reason = channel.state(group)
    return cast(GroupState, state), reason


def _state(record: TrajectoryRecord) -> TrajectoryState:
    if record.closing is None:
        return "open"
    return "complete" if record.is_complete else "aborted"


def _reason(record: TrajectoryRecord) -> str | None:
    return None if record.closing is None else record.closing.aborted


def _group_row(
    channel: Channel, group: GroupRecord, state: GroupState, reason: str | None
) -> GroupRow:
    complete = [record.info() for record in group.complete]
    info = GroupInfo(
        prompt_uid=group.prompt_uid,
        channel=channel.name,
        n_rollouts=None if group.terms is None else group.terms.n_rollouts,
        trajectories=tuple(complete),
        sequence=0,
        opened_at=group.opened_at,
    )
    steps = [step for record in group.trajectories.values() for step in record.steps]
    return GroupRow(
        prompt_uid=group.prompt_uid,
        state=state,
        reason=channel.describe(group)["why"] if state == "open" else reason,
        n_rollouts=info.n_rollouts,
        n_complete=len(complete),
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


def _trajectory_row(record: TrajectoryRecord, group_state: GroupState) -> TrajectoryRow:
    oldest, newest = record.versions() if record.steps else (None, None)
    return TrajectoryRow(
        trajectory_uid=record.trajectory_uid,
        prompt_uid=record.prompt_uid,
        state=_state(record),
        group_state=group_state,
        reason=_reason(record),
        reward=record.reward(),
        n_steps=len(record.steps),
        n_missing=record.max_index + 1 - len(record.steps),
        n_tokens=sum(step.n_tokens for step in record.steps),
        oldest_version=oldest,
        newest_version=newest,
        attempt=record.attempt,
        metadata=dict(record.metadata),
        marks=record.marks,
    )


def _step_row(
    record: TrajectoryRecord,
    step: Step,
    reward: float | None,
    group_state: GroupState,
    include_tokens: bool,
) -> StepRow:
    # Copies: a view would travel with all of its buffer.
    return StepRow(
        trajectory_uid=record.trajectory_uid,
        prompt_uid=record.prompt_uid,
        step_index=step.step_index,
        state=_state(record),
        group_state=group_state,
        policy_version=step.policy_version,
        version_spans=step.version_spans,
        reward=reward,
        is_last=step.is_last or (record.is_complete and step.step_index == record.max_index),
        parent_index=step.parent_index,
        n_prompt=len(step.prompt_ids),
        n_response=len(step.response_ids),
        has_log_probs=step.rollout_log_probs is not None,
        finish_reason=step.finish_reason,
        metadata=step.metadata,
        prompt_ids=_frozen(step.prompt_ids) if include_tokens else None,
        response_ids=_frozen(step.response_ids) if include_tokens else None,
        rollout_log_probs=_frozen(step.rollout_log_probs) if include_tokens else None,
    )


def _frozen(array: Any) -> Any:
    if array is None:
        return None
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _head(
    channel: Channel, group: GroupRecord, record: TrajectoryRecord, row: TrajectoryRow
) -> ExportedTrajectory:
    return ExportedTrajectory(
        trajectory=Trajectory(row.trajectory_uid, row.prompt_uid, (), row.metadata, row.attempt),
        channel=channel.name,
        state=row.state,
        reason=row.reason,
        group_state=row.group_state,
        outcome=record.outcome if row.state == "open" else None,
        n_rollouts=None if group.terms is None else group.terms.n_rollouts,
        marks=None if row.marks == UNMARKED else row.marks.as_dict(),
        group_metadata=dict(group.metadata),
        group_marks=None if group.marks == UNMARKED else group.marks.as_dict(),
    )
