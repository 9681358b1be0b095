"""What is in a channel, page by page: rows for people to read, whole trajectories for an export.

A page walks the channel's live groups in the order they were opened in, from its cursor, and looks
at a bounded number of them, whatever the filters are. So a page may be empty and still have a
cursor; only a page without one is the last. `prompt_uid` and `trajectory_uid` go straight to what
they name. What stays in the pool while somebody pages is seen exactly once, also across a restart;
what comes or goes meanwhile may be seen or not. Groups that were acked or dropped are gone from
here (`get_events`, `get_statistics` tell of them).

A page costs what it looks at, and what lies before its cursor inside one group or trajectory.

Owns the walk and what can be filtered. Does not own cursors and costs (`paging.py`), nor rows
(`rows.py`). Changes nothing, and makes no channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from stepwell.datapool import questions
from stepwell.datapool.codec import PackedTrajectory, read_extra, unpack
from stepwell.datapool.core.channel import Channel
from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord
from stepwell.datapool.files.rows import ExportedTrajectory
from stepwell.datapool.inspect.paging import FLAG, INTEGER, NUMBER, TEXT, Filters, Pager, some_of
from stepwell.datapool.inspect.rows import (
    ExportedPage,
    GroupRow,
    GroupState,
    Page,
    StepRow,
    TrajectoryRow,
    TrajectoryState,
)
from stepwell.datapool.selection import UNMARKED
from stepwell.datapool.types import FinishReason, Trajectory

PAGE_BYTES: Final = 8 << 20
"""Payload bytes of an export's page."""

T = TypeVar("T")

_EVERYWHERE: Final[Filters] = {
    "tag": TEXT,  # of a group's own marks; of a trajectory or step, also of its group's
    "trainable": FLAG,  # False: marked so, in the same places; True: not
    "min_reward": NUMBER,  # a group's mean, a trajectory's sum, a step's own as served
    "max_reward": NUMBER,
    "min_version": INTEGER,  # all of an item's steps lie in the range; a group's complete ones
    "max_version": INTEGER,
}
_GROUP_FILTERS: Final[Filters] = {
    "state": some_of(GroupState),
    "prompt_uid": TEXT,
    "min_age_s": NUMBER,
    **_EVERYWHERE,
}
_TRAJECTORY_FILTERS: Final[Filters] = {
    "state": some_of(TrajectoryState),
    "group_state": some_of(GroupState),
    "prompt_uid": TEXT,
    "trajectory_uid": TEXT,
    "reason": TEXT,  # of an abort
    "scored": FLAG,
    **_EVERYWHERE,
}
_STEP_FILTERS: Final[Filters] = {
    "state": some_of(TrajectoryState),  # of its trajectory
    "group_state": some_of(GroupState),
    "prompt_uid": TEXT,
    "trajectory_uid": TEXT,
    "step_index": INTEGER,
    "finish_reason": some_of(FinishReason),
    "scored": FLAG,
    **_EVERYWHERE,
}


class Listing(Generic[T]):
    """Pages of one kind of item.

    Args:
        items: those that pass the pager's filters, from its cursor on.
    """

    def __init__(
        self, kind: str, filters: Filters, items: Callable[[Channel, Pager], Iterator[T]]
    ) -> None:
        self._kind = kind
        self._filters = filters
        self._items = items

    def __call__(self, channel: Channel, epoch: str, asked: questions.Listing[Any]) -> Page[T]:
        """A page of a channel.

        Raises:
            InvalidRequestError: as `Pager`.
            JournalError: a payload cannot be read back.
        """
        about = asked.cursor, asked.limit, asked.filters
        pager = Pager(self._kind, self._filters, epoch, *about)
        items: list[T] = []
        for item in self._items(channel, pager):
            items.append(item)
            pager.count()
        return Page(tuple(items), pager.cursor)


# -- the walk ----------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A trajectory on the way."""

    group: GroupRecord
    group_state: GroupState
    record: TrajectoryRecord
    position: int
    """In its group."""


def _groups(channel: Channel, pager: Pager) -> Iterator[tuple[GroupRecord, GroupState]]:
    for group in _live_groups(channel, pager):
        position = pager.start.position if group.number == pager.start.group else 0
        if not pager.looks_at(group.number, position):
            return
        state = cast(GroupState, channel.state(group)[0])
        if pager.admits(group_state=state):
            yield group, state


def _live_groups(channel: Channel, pager: Pager) -> Iterator[GroupRecord]:
    """From the cursor on, or the one that the filters name."""
    first, prompt_uid = pager.start.group, pager.wanted.get("prompt_uid")
    if (trajectory_uid := pager.wanted.get("trajectory_uid")) is not None:
        record = channel.trajectory_index.get(trajectory_uid)
        if record is None or prompt_uid not in (None, record.prompt_uid):
            return
        prompt_uid = record.prompt_uid
    if prompt_uid is None:
        for number in channel.groups_by_number.irange(first):
            yield channel.groups_by_number[number]
    elif (group := channel.prompt_groups.get(prompt_uid)) and group.number >= first:
        yield group


def _trajectories(channel: Channel, pager: Pager) -> Iterator[_Found]:
    """As far as what is asked of them can be seen without their steps."""
    uid = pager.wanted.get("trajectory_uid")
    for group, group_state in _groups(channel, pager):
        first = pager.start.position if group.number == pager.start.group else 0
        named = [group.trajectories[uid]] if uid is not None else None
        records = named or islice(group.trajectories.values(), first, None)
        for position, record in enumerate(records, start=first):
            if not pager.looks_at(group.number, position):
                return
            passes = pager.admits(state=_state(record), reason=_reason(record))
            if passes and pager.admits_marks(record.marks, group.marks):
                yield _Found(group, group_state, record, position)


def _steps(channel: Channel, pager: Pager) -> Iterator[tuple[_Found, int]]:
    """By `step_index`."""
    only = pager.wanted.get("step_index")
    for found in _trajectories(channel, pager):
        here, stored = (found.group.number, found.position), found.record.steps
        first = pager.start.step if pager.start[:2] == here else 0
        for index in [step.step_index for step in stored]:
            if index < first or only not in (None, index):
                continue
            if not pager.looks_at(*here, index):
                return
            yield found, index


# -- rows --------------------------------------------------------------------------------------


def _state(record: TrajectoryRecord) -> TrajectoryState:
    if record.closing is None:
        return "open"
    return "complete" if record.is_complete else "aborted"


def _reason(record: TrajectoryRecord) -> str | None:
    return None if record.closing is None else record.closing.aborted


def _group_rows(channel: Channel, pager: Pager) -> Iterator[GroupRow]:
    for group, state in _groups(channel, pager):
        age_s = channel.now - group.opened_at
        if not (pager.admits(state=state, age_s=age_s) and pager.admits_marks(group.marks)):
            continue
        info = channel.info(group)
        steps = [step for record in group.trajectories.values() for step in record.steps]
        pager.spend(items=len(group.trajectories), steps=len(steps))
        if not pager.admits_sums(info.reward_mean, info.oldest_version, info.newest_version):
            continue
        yield GroupRow(
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


def _trajectory_rows(channel: Channel, pager: Pager) -> Iterator[tuple[TrajectoryRow, _Found]]:
    for found in _trajectories(channel, pager):
        record = found.record
        steps = record.steps
        pager.spend(steps=len(steps))
        reward = record.reward()
        oldest, newest = record.versions() if steps else (None, None)
        if not pager.admits_sums(reward, oldest, newest):
            continue
        row = TrajectoryRow(
            trajectory_uid=record.trajectory_uid,
            prompt_uid=record.prompt_uid,
            state=_state(record),
            group_state=found.group_state,
            reason=_reason(record),
            reward=reward,
            n_steps=len(steps),
            n_missing=record.max_index + 1 - len(steps),
            n_tokens=sum(step.n_tokens for step in steps),
            oldest_version=oldest,
            newest_version=newest,
            attempt=record.attempt,
            metadata=dict(record.metadata),
            marks=record.marks,
        )
        yield row, found


def _step_rows(channel: Channel, pager: Pager, include_tokens: bool) -> Iterator[StepRow]:
    for found, index in _steps(channel, pager):
        record = found.record
        chain, is_last = record.chain(index), index == record.max_index
        reward = record.last_reward() if is_last else record.step_reward(index)
        version = chain[0].policy_version
        if not pager.admits_sums(reward, version, version):
            continue
        packed = channel.payloads.read(chain if include_tokens else chain[:1])
        pager.spend(n_bytes=sum(len(step.payload) for step in packed))
        header, extra = packed[0].header, read_extra(packed[0])
        if not pager.admits(finish_reason=extra.finish_reason):
            continue
        columns: dict[str, Any] = {}
        if include_tokens:
            uids = record.trajectory_uid, record.prompt_uid
            step, *_ = unpack(PackedTrajectory(*uids, packed))
            for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
                columns[name] = _frozen(getattr(step, name))
        yield StepRow(
            trajectory_uid=record.trajectory_uid,
            prompt_uid=record.prompt_uid,
            step_index=index,
            state=_state(record),
            group_state=found.group_state,
            policy_version=version,
            version_spans=extra.version_spans,
            reward=reward,
            is_last=packed[0].is_last or (record.is_complete and is_last),
            parent_index=packed[0].parent_index,
            n_prompt=header.n_prompt,
            n_response=header.n_response,
            has_log_probs=header.has_log_probs,
            finish_reason=extra.finish_reason,
            metadata=extra.metadata,
            **columns,
        )


def _frozen(column: Any) -> Any:
    """A copy: a view would keep all of its buffer."""
    if column is not None:
        column = column.copy()
        column.flags.writeable = False
    return column


def _exported(
    channel: Channel, pager: Pager
) -> Iterator[tuple[ExportedTrajectory, PackedTrajectory]]:
    n_bytes = 0
    for row, found in _trajectory_rows(channel, pager):
        packed = _packed(channel, found.record)
        n_bytes += sum(len(step.payload) + len(step.prompt or b"") for step in packed.steps)
        if n_bytes >= PAGE_BYTES:
            pager.stop()
        group, is_open = found.group, row.state == "open"
        head = ExportedTrajectory(
            trajectory=Trajectory(
                row.trajectory_uid, row.prompt_uid, (), row.metadata, row.attempt
            ),
            channel=channel.name,
            state=row.state,
            reason=row.reason,
            group_state=row.group_state,
            outcome=found.record.outcome if is_open else None,
            n_rollouts=None if group.terms is None else group.terms.n_rollouts,
            marks=None if row.marks == UNMARKED else row.marks.as_dict(),
            group_metadata=dict(group.metadata),
            group_marks=None if group.marks == UNMARKED else group.marks.as_dict(),
        )
        yield head, packed


def _packed(channel: Channel, record: TrajectoryRecord) -> PackedTrajectory:
    if not record.steps:
        uids = record.trajectory_uid, record.prompt_uid
        return PackedTrajectory(*uids, [], dict(record.metadata), record.attempt)
    packed = channel.packed(record)
    if record.closing is None:
        # It came as if it were complete.
        packed.steps[-1].reward = record.step_reward(record.max_index)
        packed.steps[-1].is_last = record.last_index is not None
    return packed


# -- the listings ------------------------------------------------------------------------------

list_groups: Final = Listing("groups", _GROUP_FILTERS, _group_rows)
"""In the order they were opened in."""
list_trajectories: Final = Listing(
    "trajectories",
    _TRAJECTORY_FILTERS,
    lambda channel, pager: (row for row, _ in _trajectory_rows(channel, pager)),
)
"""Group by group, in the order they were opened in."""
_list_steps: Final = Listing(
    "steps", _STEP_FILTERS, lambda channel, pager: _step_rows(channel, pager, False)
)
_list_steps_with_tokens: Final = Listing(
    "steps", _STEP_FILTERS, lambda channel, pager: _step_rows(channel, pager, True)
)
_list_exported: Final = Listing("export", _TRAJECTORY_FILTERS, _exported)


def list_steps(channel: Channel, epoch: str, asked: questions.ListSteps) -> Page[StepRow]:
    """Trajectory by trajectory, by `step_index`."""
    listing = _list_steps_with_tokens if asked.include_tokens else _list_steps
    return listing(channel, epoch, asked)


def read_trajectories(
    channel: Channel, epoch: str, asked: questions.ReadTrajectories
) -> ExportedPage:
    """Whole trajectories with their tokens, at most about 8 MiB at a time; filters are those of
    `list_trajectories`.

    Complete ones as a consumer would get them. Of open ones the steps so far, with the rewards
    that were set since; one for the whole trajectory stands in `outcome`. Of aborted ones only the
    head, because the pool released their steps.
    """
    page = _list_exported(channel, epoch, asked)
    heads, packed = zip(*page.items, strict=True) if page.items else ((), ())
    return ExportedPage(heads, packed, page.cursor)
