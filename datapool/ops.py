"""Every change of a pool as one frozen record.

    client ──op──► socket ──op──► DataPool.apply(op, now) ──op──► journal ──op──► replay

The same record is what a client makes, what travels, what the state machine applies and what the
journal keeps. A change is validated where it is made, so a bad argument is an error of its caller
before anything is sent. `Op[R]` is answered with an `R`.

To add an operation, file by file: docs/design/datapool.md.

Owns names, arguments and what each may be, which stands in its type (`Text`, `Seconds`, …) and is
looked at when an operation is made. Does not own what an operation does to groups (`core/`), how
it travels (`remote/wire.py`), the layout of a step (`codec.py`), nor what changes nothing
(`questions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec.structs import force_setattr

from stepwell.datapool import errors
from stepwell.datapool.codec import (
    CARRIED,
    PackedLease,
    PackedStep,
    PackedTrajectory,
    encode_any,
    encoder,
    unpack,
)
from stepwell.datapool.errors import DataPoolError, InvalidRequestError, PoolFullError
from stepwell.datapool.pictures import DIGEST
from stepwell.datapool.selection import UNMARKED, Marks
from stepwell.datapool.types import MAX_INT, MAX_REWARD, TRAIN, Step, is_reward

R = TypeVar("R")

SubmitOutcome: TypeAlias = Literal["accepted", "duplicate", "late"]
"""Outcome of a submitted step: stored; known already (a no-op); or too late to be served."""
TrajectoryOutcome: TypeAlias = Literal["complete", "aborted", "late"]
"""Outcome of a trajectory; "late": the pool had closed it before the producer did."""
NoLease: TypeAlias = Literal["nothing_yet", "shut_down"]
"""Why `LeaseBatch` gave no lease: too few groups in its time, or too few and no more to come."""
MAX_PICTURE_BYTES = 64 << 20
LEFT = "consumer_left"
"""Why a lease goes back that nobody waits for any more."""


# -- arguments ---------------------------------------------------------------------------------


class Check(NamedTuple):
    """A test of one value, and the words for what it has to be."""

    accepts: Callable[[Any], bool]
    wanted: str

    def refuse(self, name: str, value: object) -> NoReturn:
        raise InvalidRequestError(f"{name} is {value!r:.80}; pass {self.wanted}")


def is_number(text: str) -> bool:
    """True if a part of a cursor is a number that one of ours can hold."""
    return text.isascii() and text.isdigit() and len(text) < 20


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < MAX_INT


TEXT: Final = Check(lambda value: isinstance(value, str) and value != "", "a non-empty string")
CURSOR: Final = Check(TEXT.accepts, "one that the page before came with, or None")
NATURAL: Final = Check(lambda value: _is_int(value, 0), "an integer >= 0")
POSITIVE: Final = Check(lambda value: _is_int(value, 1), "an integer >= 1")
_SECONDS: Final = Check(_is_seconds, "seconds > 0, or None for the default")
_REWARD: Final = Check(is_reward, f"a number within ±{MAX_REWARD:g}, or None if not scored")

_ONLY_TEXT = {str}

Text: TypeAlias = Annotated[str, TEXT]
Natural: TypeAlias = Annotated[int, NATURAL]
Positive: TypeAlias = Annotated[int, POSITIVE]
Seconds: TypeAlias = Annotated[float, _SECONDS]
Reward: TypeAlias = Annotated[float, _REWARD]


_Checks: TypeAlias = list[tuple[str, Check, bool]]
"""Fields, what they have to be, and whether None will do, too."""


@cache
def _checks(kind: type) -> tuple[attrgetter[Any] | None, _Checks, _Checks]:
    """A getter of an operation's texts, if it has several that are always there; all its fields
    that are looked at; and those that are none of these texts."""
    found: _Checks = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        optional = NoneType in get_args(hint)
        inner = next(iter(get_args(hint))) if optional else hint
        checks = [c for c in getattr(inner, "__metadata__", ()) if isinstance(c, Check)]
        found += [(name, check, optional) for check in checks]
    texts = [name for name, check, optional in found if check is TEXT and not optional]
    if len(texts) < 2:
        return None, found, found
    return attrgetter(*texts), found, [each for each in found if each[0] not in texts]


# -- answers -----------------------------------------------------------------------------------


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """A `DataPoolError` on its way."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: DataPoolError) -> Refusal:
        return cls(type(error).__name__, str(error))

    def error(self) -> DataPoolError:
        found = getattr(errors, self.kind, None)
        if isinstance(found, type) and issubclass(found, DataPoolError):
            return found(self.message)
        return DataPoolError(self.message)


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory as a producer finds it that goes on with it."""

    outcome: SubmitOutcome
    """Outcome that `OpenTrajectory` has; "duplicate" in an answer to `AppendStep`."""
    channel: str
    """Channel that the trajectory is in."""
    packed: PackedTrajectory | None = None
    """An open one, with its steps so far; None: it is closed."""

    @property
    def is_open(self) -> bool:
        return self.packed is not None

    @property
    def steps(self) -> list[Step]:
        """The steps so far of an open trajectory, by `step_index`. Unpacked anew each time."""
        return [] if self.packed is None else unpack(self.packed)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of an open trajectory; {} for a closed one."""
        return {} if self.packed is None else self.packed.metadata


class Deleted(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of `Delete` or `DeleteTrajectory`."""

    trajectories: tuple[str, ...] = ()
    """Gone; with `Delete` all of their groups."""
    leased: tuple[str, ...] = ()
    """Trajectories in groups that a consumer has: nobody else gets them, and they go at its ack or
    nack."""
    more: bool = False
    """Others are left: call it again."""

    def __add__(self, later: Deleted) -> Deleted:
        leased = dict.fromkeys(self.leased + later.leased)
        return Deleted(self.trajectories + later.trajectories, tuple(leased), later.more)


# -- operations --------------------------------------------------------------------------------


class Op(msgspec.Struct, Generic[R], frozen=True, array_like=True, tag=True):
    """Something asked of the pool, answered with an `R`."""

    def __post_init__(self) -> None:
        texts, checks, others = _checks(type(self))
        if texts is not None:  # looked at together: most operations have three of them
            values = texts(self)
            if set(map(type, values)) == _ONLY_TEXT and all(values):
                checks = others
        for name, check, optional in checks:
            value = getattr(self, name)
            if not (check.accepts(value) or (optional and value is None)):
                uid = getattr(self, "trajectory_uid", None)
                check.refuse(f"trajectory {uid!r}: {name}" if check is _REWARD else name, value)
            if check is _REWARD and value is not None:  # NumPy's too
                force_setattr(self, name, float(value))

    def is_unanswered(self, answer: Any) -> bool:
        """True if a caller that has time should wait for another answer, or refusal, than this."""
        return isinstance(answer, PoolFullError)

    def undone(self, answer: Any) -> Op[None] | None:
        """The operation that takes back what was granted to a caller that has left."""
        return None


class Change(Op[R], Generic[R], frozen=True, array_like=True):
    """An operation that may be made twice without harm; answered once it is durable."""


class OpenGroup(Change[SubmitOutcome], frozen=True, array_like=True):
    """Declare a group before its rollouts start. "duplicate" if it is so declared already.

    Raises:
        PoolFullError: no admission credit; try again after a lease or a drop.
        NotOwnerError: `metadata` names another owner than the group has.
        GroupConflictError, GroupClosedError: the prompt_uid is taken.
        ChannelShutDownError: no more groups.
    """

    prompt_uid: Text
    n_rollouts: Positive
    min_rollouts: Positive = 1
    deadline_s: Seconds | None = None
    metadata: dict[str, Any] = {}
    channel: Text = TRAIN
    everywhere: bool = False
    """Refused (NotOwnerError) also if another owner declared a group of this name in another
    channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_rollouts > self.n_rollouts:
            raise InvalidRequestError(
                f"min_rollouts is {self.min_rollouts} but n_rollouts is {self.n_rollouts}; "
                "a group cannot need more trajectories than it asks for"
            )

    def undone(self, answer: Any) -> Op[None] | None:
        if answer != "accepted":
            return None
        # Nobody would ever start its rollouts.
        return DropGroup(self.prompt_uid, "open_cancelled", self.channel)


class OpenTrajectory(Change[SubmitOutcome], frozen=True, array_like=True):
    """Register a trajectory before its first step. Again: metadata is merged, "duplicate".

    Raises:
        TrajectoryConflictError: the uid belongs to another prompt.
        PoolFullError: the channel blocks, and the trajectory would begin a new group.
    """

    trajectory_uid: Text
    prompt_uid: Text
    attempt: Natural = 0
    metadata: dict[str, Any] = {}
    channel: Text = TRAIN


class ResumeTrajectory(Change[Resumed], frozen=True, array_like=True):
    """`OpenTrajectory` for a producer that may go on with what another one began.

    Raises:
        TrajectoryConflictError: the uid belongs to another prompt.
        JournalError: a payload cannot be read back.
    """

    trajectory_uid: Text
    prompt_uid: Text
    attempt: Natural = 0
    metadata: dict[str, Any] = {}
    channel: Text = TRAIN
    elsewhere: bool = False
    """If another channel knows the trajectory and `channel` does not, or it is open only there,
    that one is meant."""


class SubmitSteps(Change[list[SubmitOutcome | Refusal]], frozen=True, array_like=True):
    """Store steps, in order; each one's outcome or refusal (StepConflictError, StepIndexError,
    TrajectoryConflictError, InvalidStepError; UnknownBaseError: send it whole; UnknownPictureError:
    put its pictures and send it again; PoolFullError: the channel blocks, and the step would begin
    a new group)."""

    trajectories: list[PackedTrajectory]
    """Steps of each, in order. A trajectory may come several times. Without metadata."""
    channel: Text = TRAIN

    @property
    def n_steps(self) -> int:
        return sum([len(trajectory.steps) for trajectory in self.trajectories])


class AppendStep(Change[SubmitOutcome | Resumed], frozen=True, array_like=True):
    """Store the next step of a trajectory that several producers may go on with. Answered with the
    trajectory as it is, all its steps included, if another step has this step's index.

    Raises:
        TrajectoryConflictError, StepIndexError, InvalidStepError: it cannot be stored.
        UnknownBaseError: send it whole.
        UnknownPictureError: put its pictures and send it again.
        PoolFullError: the channel blocks, and the step would begin a new group.
        JournalError: a payload cannot be read back.
    """

    trajectory_uid: Text
    prompt_uid: Text
    step: PackedStep
    channel: Text = TRAIN


class PutPictures(Change[None], frozen=True, array_like=True):
    """Store pictures for steps that are about to come. Each is kept once for all trajectories of
    one owner in a channel, and for some minutes if no step refers to it. Again: no-op.

    Raises:
        UnknownTrajectoryError: never seen in this channel, and no `prompt_uid`.
        NotOwnerError: it has another owner than `owner`.
        JournalFullError, JournalError: they cannot be written.
    """

    trajectory_uid: Text
    pictures: dict[str, bytes]
    """PNG by digest (`pictures.Picture`)."""
    channel: Text = TRAIN
    prompt_uid: str | None = None
    """Prompt of a trajectory that may not have begun."""
    owner: str | None = None
    """Owner that asks, as in `CompleteTrajectory`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for digest, data in self.pictures.items():
            if not DIGEST.fullmatch(digest):
                raise InvalidRequestError(
                    f"pictures holds {digest!r:.80}; pass digests of 64 hex digits in lower case"
                )
            if not data or len(data) > MAX_PICTURE_BYTES:
                raise InvalidRequestError(
                    f"picture {digest} has {len(data)} bytes; pass 1 to {MAX_PICTURE_BYTES}"
                )


class CompleteTrajectory(Change[TrajectoryOutcome], frozen=True, array_like=True):
    """Close a trajectory with what has arrived; `reward` is added to its last step's own.
    "complete"; "aborted" if it has no step; "late" if its group went on without it.

    Raises:
        UnknownTrajectoryError: never seen in this channel.
        TrajectoryClosedError: aborted before, or completed with another reward.
        NotOwnerError: it has another owner than `owner`.
    """

    trajectory_uid: Text
    reward: Reward | None = None
    metadata: dict[str, Any] = {}
    channel: Text = TRAIN
    owner: str | None = None
    """Owner that asks (`types.OWNER`); None: one who may do everything."""


class AbortTrajectory(Change[TrajectoryOutcome], frozen=True, array_like=True):
    """Close a trajectory without serving it. With `will_retry` its rollout is not used up.
    "aborted", or "late" if its group went on without it.

    Raises:
        UnknownTrajectoryError: never seen in this channel.
        TrajectoryClosedError: completed before, or aborted for good and now `will_retry`.
    """

    trajectory_uid: Text
    reason: Text
    will_retry: bool = False
    channel: Text = TRAIN


class DropGroup(Change[None], frozen=True, array_like=True):
    """Take an open or ready group out of the pool. Dropping twice is a no-op.

    Raises:
        UnknownGroupError, GroupClosedError: never seen; acked, or leased at the moment.
    """

    prompt_uid: Text
    reason: Text
    channel: Text = TRAIN


class SetReward(Change[SubmitOutcome], frozen=True, array_like=True):
    """Set the outcome reward of a trajectory, or one step's own, until its group is leased.
    "accepted", or "late" if it was leased, or will not be served.

    Raises:
        UnknownTrajectoryError, StepIndexError: no such trajectory, no such step.
        NotOwnerError: it has another owner than `owner`.
    """

    trajectory_uid: Text
    reward: Reward
    step_index: Natural | None = None
    channel: Text = TRAIN
    owner: str | None = None
    """Owner that asks, as in `CompleteTrajectory`."""


class Mark(Change[Marks], frozen=True, array_like=True):
    """Mark a group or one trajectory with what people say of it: `trainable`, `quality`, `tags`,
    `note`, `corrections`. Marks given replace the ones before, None clears; answered with all.
    `selection/` obeys them.

    Raises:
        UnknownGroupError, UnknownTrajectoryError: never seen.
        GroupClosedError, TrajectoryClosedError: served or dropped already.
        NotOwnerError: the trajectory has another owner than `owner`.
    """

    prompt_uid: str | None = None
    trajectory_uid: str | None = None
    marks: dict[str, Any] = {}
    channel: Text = TRAIN
    owner: str | None = None
    """Owner that asks, as in `CompleteTrajectory`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt_uid is None) == (self.trajectory_uid is None):
            raise InvalidRequestError(
                f"prompt_uid is {self.prompt_uid!r} and trajectory_uid is "
                f"{self.trajectory_uid!r}; pass one of them: what is to be marked"
            )
        named = {k: list(v) if isinstance(v, set | frozenset) else v for k, v in self.marks.items()}
        UNMARKED.merged(named)  # refuses what is malformed
        force_setattr(self, "marks", named)


class Delete(Change[Deleted], frozen=True, array_like=True):
    """Take the data of one trajectory, all that is marked with `tag`, or all of a user, out of
    every channel: each goes with its group, uncounted for training. What is unknown, or gone, is no
    error."""

    trajectory_uid: Text | None = None
    tag: Text | None = None
    user: Text | None = None
    """User, as `user_of` finds it in the metadata."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if [self.trajectory_uid, self.tag, self.user].count(None) != 2:
            raise InvalidRequestError(
                f"trajectory_uid is {self.trajectory_uid!r}, tag is {self.tag!r} and user is "
                f"{self.user!r}; pass one of them: what is to be deleted"
            )


class DeleteTrajectory(Change[Deleted], frozen=True, array_like=True):
    """Take the data of one trajectory out of every channel. Its group goes on without it, as if it
    had been aborted for good with the reason `deleted`; where nothing else of the group is left or
    to come, the group goes, too. What is unknown, or gone, is no error.

    Raises:
        JournalError: its rows cannot be read, so that nothing of them could be taken out.
    """

    trajectory_uid: Text


class AdvanceVersion(Change[None], frozen=True, array_like=True):
    """Generation uses policy `version` from now on: gives credit for the groups of one version more
    (`max_ahead_versions`), and ages those that wait (`max_staleness`)."""

    version: Natural
    channel: Text = TRAIN


class LeaseBatch(Change[PackedLease | NoLease], frozen=True, array_like=True):
    """The `batch_size` groups that are first in the channel's order, once there are as many.

    Consumers that ask for the same `n_rollouts` are served first come, first served. A call that
    is repeated with its `request_id` gets the lease that it was given before.

    Raises:
        JournalError: the lease could not be made durable; its groups are ready again.
    """

    n_rollouts: Positive | None = None
    """Complete trajectories that an undeclared group needs (None: the channel's number); declared
    groups have their own."""
    channel: Text = TRAIN
    batch_size: Positive = 1
    lease_s: Seconds | None = None
    """None: the channel's."""
    request_id: str | None = None

    def is_unanswered(self, answer: Any) -> bool:
        return bool(answer == "nothing_yet")

    def undone(self, answer: Any) -> Op[None] | None:
        return Nack(answer.lease_id, LEFT) if isinstance(answer, PackedLease) else None


class Ack(Change[None], frozen=True, array_like=True):
    """The groups are consumed for good. Acking twice is a no-op.

    Raises:
        UnknownLeaseError, LeaseExpiredError, LeaseClosedError
    """

    lease_id: str


class Nack(Change[None], frozen=True, array_like=True):
    """The groups go back, first in order, to be delivered again. Twice is a no-op. Raises as
    `Ack`."""

    lease_id: str
    reason: str = ""


class Renew(Change[float], frozen=True, array_like=True):
    """Hold the lease for `lease_s` (None: the channel's) from now; the new `expires_at`. Raises as
    `Ack`."""

    lease_id: str
    lease_s: Seconds | None = None


class ReleaseLeases(Change[int], frozen=True, array_like=True):
    """Nack every lease of the channel; how many. For the only consumer, when it starts over: what
    it was working on is forgotten, and should not wait for its leases to expire."""

    channel: Text = TRAIN
    reason: str = "released"


class Shutdown(Change[None], frozen=True, array_like=True):
    """No group is opened any more (None: in any channel). The rest still works, so that what is in
    flight can be finished, served and acked. Waiting consumers are answered "shut_down"."""

    channel: Text | None = None


class ReleaseDeparted(Change[None], frozen=True, array_like=True):
    """Delete the rows of all that left the pool, up to one of `ListDeparted`: they are archived."""

    through: int
    """`Departed.row` of the last one."""
    unarchived: str | None = None
    """Why they are not archived after all; None: they are, durably."""


CHANGES: Final = tuple(Change.__subclasses__())


def check_carried(op: Op[Any]) -> None:
    """Look whether an operation can be written down, where it does not travel as bytes. Those of
    steps and pictures can: only names are looked at beside them.

    Raises:
        InvalidRequestError: it holds half a character, or an integer beyond 64 bits.
    """
    names: Any = op
    match op:
        case SubmitSteps():
            names = op.channel, [(each.trajectory_uid, each.prompt_uid) for each in op.trajectories]
        case AppendStep():
            names = op.channel, op.trajectory_uid, op.prompt_uid
        case PutPictures():
            names = op.channel, op.trajectory_uid, op.prompt_uid, op.owner
    try:
        encoder.encode(names)
    except Exception as e:  # whatever it is: what cannot be written down must change nothing
        raise uncarried(op, e) from e


def uncarried(op: Op[Any], why: Exception) -> InvalidRequestError:
    return InvalidRequestError(
        f"{type(op).__name__} cannot be sent ({why}); pass JSON values, bytes or arrays"
    )


def outcomes_or_raise(results: Sequence[SubmitOutcome | Refusal]) -> list[SubmitOutcome]:
    """The outcomes of a batch, or its first refusal raised."""
    if Refusal not in map(type, results):  # as nearly always
        outcomes: Any = results
        return list(outcomes)
    refused = [result for result in results if isinstance(result, Refusal)]
    first = refused[0].error()
    if len(results) == 1:
        raise first
    raise type(first)(
        f"{first} ({len(refused)} of {len(results)} steps refused; the others are applied)"
    )


def metadata_of(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the caller's metadata, which can be sent and kept."""
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequestError(f"metadata is {value!r:.80}; pass a mapping or None")
    metadata = dict(value or {})
    try:
        encode_any(metadata)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidRequestError(
            f"metadata of {list(metadata)!r:.80} cannot be carried ({e}); pass {CARRIED}"
        ) from e
    return metadata
