"""The rows of a pool's log: which there are, as bytes, and back.

    kind   head                              payload
    ────   ────                              ───────
    Op     [now, number, op]                             what a caller asked for, as in `ops.py`
    here   [now, number, record]                         what the pool did by itself
    StepsStored, PromptStored, StepCameLate  their bytes

A row's kind is the name of the record's class. `now` is when it was written, `number` that of its
group (0: of none). A row stands for one change of one group and goes with it, or stays until the
group is archived (`group_log.py`); `GroupClosed` and `LeaseEnded` are what is left, as long as
uids are remembered.

Owns the form of rows. Does not decide when they are written (`core/`), read (`store/replay.py`) or
where they are kept (`store/journal.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from stepwell.datapool import ops
from stepwell.datapool.codec import decoder
from stepwell.datapool.core.records import Closing, Readiness

POOL = ""
"""Channel of the rows that belong to none."""

Place: TypeAlias = tuple[int, int, int, int]
"""Row, number of its segment, offset and size in that."""
LeaseEnd: TypeAlias = Literal["acked", "nacked", "expired"]


class Log(Protocol):
    """Log to which a pool writes what it did; `store.journal.Journal` is one."""

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        """Write a row, with a payload in pieces; its number."""

    def delete(self, rows: Iterable[int]) -> None:
        """Forget rows."""

    def put_state(self, key: str, value: bytes) -> None:
        """Remember the last value of `key`."""

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None:
        """Write a row anew: in its place, with other content."""

    def heads(self, rows: Sequence[int]) -> Sequence[tuple[str, bytes]]:
        """Kinds and heads of rows."""

    def read(self, rows: Sequence[int]) -> Sequence[bytes]:
        """The payloads of rows."""

    def places(self, rows: Iterable[int]) -> list[Place] | None:
        """Places of stored rows in the files; None if one of them is not stored yet."""

    def scrub(self) -> None:
        """Erase the rows that were forgotten, so that nobody can read them any more."""


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row that no operation is."""


class PromptStored(_Record, frozen=True, array_like=True, gc=False):
    """The payload is the prompt of a root, for all steps of the group that begin with it."""

    prompt_uid: str


class StepsStored(_Record, frozen=True, array_like=True, gc=False):
    """Steps of a group were accepted in one call; the payload is theirs, one after the other."""

    prompt_uid: str
    steps: list[tuple[str, int | None, int]]
    """The trajectory_uid of each step, the row of its prompt if it is a root, and its bytes."""
    pictures: dict[int, tuple[str, ...]] = {}
    """Pictures of the new tokens of each step that has some (`core/pictures.py`: `references`), by
    position in `steps`."""


class GroupDecided(_Record, frozen=True, array_like=True, gc=False):
    """The decision on a group changed (`core/readiness.py`). A replay takes it as it is."""

    prompt_uid: str
    readiness: Readiness


class TrajectoryDeleted(_Record, frozen=True, array_like=True, gc=False):
    """Its group goes on without it; if a consumer has the group, once that is handed back."""

    prompt_uid: str
    trajectory_uid: str


class GroupLeased(_Record, frozen=True, array_like=True, gc=False):
    """A consumer got it, without the trajectories that are excluded."""

    prompt_uid: str
    excluded: tuple[str, ...]
    n_asked: int


class GroupReturned(_Record, frozen=True, array_like=True, gc=False):
    """Its consumer handed it back, or its lease expired."""

    prompt_uid: str


class GroupLeft(_Record, frozen=True, array_like=True, gc=False):
    """A group left, and its rows stay until they are archived."""

    prompt_uid: str
    how: str
    """`acked`, or `dropped (reason)`."""
    closings: dict[str, Closing]
    """Ends of its trajectories, by uid."""


class StepCameLate(_Record, frozen=True, array_like=True, gc=False):
    """A step came for a trajectory that takes none any more; kept for the archive alone. The
    payload is its prompt, if it has one, and its own."""

    prompt_uid: str
    trajectory_uid: str
    n_prompt_bytes: int
    metadata: dict[str, Any] = {}
    """Metadata of its trajectory and group; empty once that has left, since nothing knows it."""
    tags: tuple[str, ...] = ()
    """Tags of both."""
    pictures: tuple[str, ...] = ()
    """Its pictures that were stored already."""


class RewardCameLate(_Record, frozen=True, array_like=True, gc=False):
    """A reward came for a trajectory that takes none any more; kept for the archive alone."""

    prompt_uid: str
    trajectory_uid: str
    reward: float | None
    step_index: int | None
    why: str
    """Fate of the trajectory before this came."""


class GroupClosed(_Record, frozen=True, array_like=True, gc=False):
    """Tombstone of a group; or (`how` is None) of trajectories that came too late for it."""

    prompt_uid: str
    how: str | None
    closings: dict[str, Closing]


class LeaseRecord(_Record, frozen=True, array_like=True, gc=False):
    """A lease that somebody holds. In channel `POOL`."""

    lease_id: str
    channel: str
    prompt_uids: tuple[str, ...]
    expires_at: float
    request_id: str | None = None
    """Id of the call that the lease answers; repeated, the call gets the same lease."""
    row: int = 0
    """Row of the lease in the log."""


class LeaseEnded(_Record, frozen=True, array_like=True, gc=False):
    """A lease is over. In channel `POOL`."""

    lease_id: str
    how: LeaseEnd


_OPS: Final[tuple[type[msgspec.Struct], ...]] = (
    ops.OpenGroup,
    ops.OpenTrajectory,
    ops.CompleteTrajectory,
    ops.AbortTrajectory,
    ops.SetReward,
    ops.Mark,
)
_KINDS: Final[tuple[type[msgspec.Struct], ...]] = (*_OPS, *_Record.__subclasses__())
_tuple: Any = tuple
KIND_NAMES: Final = tuple(kind.__name__ for kind in _KINDS)
_DECODERS: Final = {kind.__name__: decoder(_tuple[float, int, kind]) for kind in _KINDS}


def read(kind: str, head: bytes) -> tuple[float, int, Any]:
    """Return the time at which a row was written, the number of its group, and its record.

    Raises:
        LookupError, msgspec.DecodeError: this release did not write it.
    """
    found: tuple[float, int, Any] = _DECODERS[kind].decode(head)
    return found
