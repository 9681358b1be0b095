"""Questions to a pool, which change nothing: one frozen record each, as in `ops.py`.

Those whose docstring says "once" may be waited for: the time to wait is the call's, not the
question's. Waiting holds nothing.
"""

from __future__ import annotations

from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.inspect.events import KINDS, Events
from stepwell.datapool.inspect.pages import ExportedPage, GroupRow, IndexRow, Page, TrajectoryRow
from stepwell.datapool.ops import Op, Positive, Text
from stepwell.datapool.selection import DryRun
from stepwell.datapool.types import TRAIN

R = TypeVar("R")


class Available(NamedTuple):
    """Ready groups that a shard has for a consumer."""

    n_groups: int
    shut_down: bool


class Credit(NamedTuple):
    """State of the limits of a channel that a new group waits for."""

    used: dict[str, tuple[int, int]]
    """Limit by name: how much of it is used, and what it is."""
    is_known: bool
    """The group asked about is in the channel, and needs no credit."""
    shut_down: bool


class GetStatistics(Op[dict[str, Any]], frozen=True, array_like=True):
    """Counts of one channel, or `{channel: counts}`: docs/design/datapool.md says which there are,
    `core/accounting.py` how they add up."""

    channel: Text | None = None


class Describe(Op[dict[str, Any]], frozen=True, array_like=True):
    """A shard: process, durability, memory and journal."""


class DryRunOf(Op[DryRun], frozen=True, array_like=True):
    """Dry run of a fetch: what it would be given, with this selection (None: the channel's own),
    out of what is ready now; and why. Looks at every ready group.

    Raises:
        SelectionError: as the selection itself.
    """

    selection: dict[str, Any] | None = None
    """Fields of a `SelectionConfig`."""
    channel: Text = TRAIN
    batch_size: Positive = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection is not None:
            SelectionConfig(**self.selection)


class Listing(Op[R], Generic[R], frozen=True, array_like=True):
    channel: Text = TRAIN
    cursor: str | None = None
    limit: int = 100
    filters: dict[str, Any] = msgspec.field(default_factory=dict)
    newest_first: bool = False
    """Groups come in the reverse of the order they were opened in."""


class ListGroups(Listing[Page[GroupRow]], frozen=True, array_like=True):
    """Live groups in the order they were opened in; filters and errors: `inspect/listing.py`."""


class ListTrajectories(Listing[Page[TrajectoryRow]], frozen=True, array_like=True):
    """Trajectories of live groups; filters and errors: `inspect/listing.py`."""


class ReadEnds(Op[dict[str, list[PackedStep]]], frozen=True, array_like=True):
    """The first and the last step of live trajectories, without prompts, by the uids asked for; of
    a group those of its first trajectory that has some. For lists that show what was said: it is
    in the steps' metadata, and a trajectory may have thousands of steps.

    Raises:
        JournalError: a payload cannot be read back.
    """

    uids: tuple[Text, ...]
    channel: Text = TRAIN


class IndexTrajectories(Listing[Page[IndexRow]], frozen=True, array_like=True):
    """Stored steps of the trajectories of live groups; filters and errors: `inspect/listing.py`."""


class ReadTrajectories(Listing[ExportedPage], frozen=True, array_like=True):
    """Whole trajectories with their tokens; filters and errors: `inspect/listing.py`."""


class WhyClosed(Op[str], frozen=True, array_like=True):
    """Why a closed trajectory takes no reward any more, as a clause for people: "its group was
    trained".

    Raises:
        UnknownTrajectoryError: it is not closed, or unknown.
    """

    trajectory_uid: Text
    channel: Text = TRAIN


class ReadPictures(Op[dict[str, bytes]], frozen=True, array_like=True):
    """Pictures of a live trajectory by digest, as PNG: as many of the first ones as `max_bytes`
    holds, and one at least.

    Raises:
        UnknownTrajectoryError, TrajectoryClosedError: never seen; its group has left the pool.
        NotOwnerError: it has another owner than `owner`.
        UnknownPictureError: no step of it refers to one of them, whether it is stored or not.
        DamagedFileError: one is not what was stored.
    """

    trajectory_uid: Text
    digests: tuple[str, ...]
    channel: Text = TRAIN
    owner: str | None = None
    """Owner that asks, as in `ops.CompleteTrajectory`."""
    max_bytes: Positive = 8 << 20


class GetEvents(Op[Events], frozen=True, array_like=True):
    """Events after `cursor`, once there are some.

    Raises:
        InvalidRequestError: not a cursor, or an unknown kind.
    """

    cursor: str | None = None
    channel: Text | None = None
    kinds: tuple[str, ...] | None = None
    limit: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.kinds or ()) - set(KINDS):
            raise InvalidRequestError(
                f"kinds holds {sorted(unknown)}; there are {', '.join(KINDS)}"
            )

    def is_unanswered(self, answer: Any) -> bool:
        return isinstance(answer, Events) and not answer.events and not answer.lost


class WaitAvailable(Op[Available], frozen=True, array_like=True):
    """Number of ready groups that a consumer asking for `n_rollouts` could have at most (those that
    are stale or that a filter objects to are dropped when somebody takes them), once it is more
    than `more_than`, or the channel is shut down."""

    n_rollouts: Positive | None = None
    channel: Text = TRAIN
    more_than: int = -1

    def is_unanswered(self, answer: Any) -> bool:
        return (
            isinstance(answer, Available)
            and answer.n_groups <= self.more_than
            and not answer.shut_down
        )


class WaitCredit(Op[Credit], frozen=True, array_like=True):
    """Use of each limit that `OpenGroup` waits for, once it is freer than `before`, or the channel
    is shut down."""

    prompt_uid: str | None = None
    channel: Text = TRAIN
    before: dict[str, tuple[int, int]] | None = None

    def is_unanswered(self, answer: Any) -> bool:
        if self.before is None or not isinstance(answer, Credit) or answer.shut_down:
            return False
        pairs = [(now, self.before[k]) for k, now in answer.used.items() if k in self.before]
        return all(now[0] >= before[0] and now[1] <= before[1] for now, before in pairs)


class Departed(NamedTuple):
    """A group that left the pool and waits to be archived, or one row that came late for one."""

    row: int
    channel: str
    places: list[tuple[int, int, int, int]]
    """Places of its rows in the journal's files: row, segment, offset, size. They move; what is
    read there is checked."""


class DepartedPage(NamedTuple):
    """Some of what waits to be archived, the oldest first."""

    items: list[Departed]
    n_waiting: int
    """All that waits."""
    n_bytes: int
    """About the bytes of all that waits."""


class DepartedRows(NamedTuple):
    """The rows of a group in the journal."""

    channel: str
    rows: list[tuple[int, str, bytes, bytes]]
    """Number, kind, head and payload."""


class ListDeparted(Op[DepartedPage], frozen=True, array_like=True):
    """Groups that left the pool and wait to be archived, as far as their leaving is durable."""

    after: int = 0
    """Only what left after this row."""
    max_bytes: int = 8 << 20
    """About the bytes of rows that one page names."""


class ReadDeparted(Op[list[DepartedRows]], frozen=True, array_like=True):
    """Content of what waits to be archived of a trajectory or a group; or of the live group of a
    trajectory that was aborted, whose steps nobody is served.

    Raises:
        JournalError: a row cannot be read.
    """

    uid: Text


class FoundUid(NamedTuple):
    """A trajectory, or a group, by its uid."""

    channel: str
    prompt_uid: str
    trajectory_uid: str | None
    """None: the group itself."""


FOUND: Final = 20
"""Uids that are listed of those that begin alike."""


class FindUids(Op[list[FoundUid]], frozen=True, array_like=True):
    """Groups and trajectories that are live or wait to be archived, whose uids begin so. Looks at
    every uid: for people who type the beginning of one."""

    start: Text
    limit: Positive = FOUND


QUESTIONS: tuple[type[Op[Any]], ...] = (
    GetStatistics,
    Describe,
    DryRunOf,
    ListGroups,
    ListTrajectories,
    IndexTrajectories,
    ReadTrajectories,
    ReadEnds,
    WhyClosed,
    ReadPictures,
    ListDeparted,
    ReadDeparted,
    FindUids,
    GetEvents,
    WaitAvailable,
    WaitCredit,
)
