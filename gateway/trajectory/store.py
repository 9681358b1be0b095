"""This module keeps the trajectories of one gateway by their uid, so that a URL always means the
same one, also when it was closed, and a uid alone closes and scores one wherever it is::

    trajectory_uid ──known here──► its channel ──► the pool
        └──any other──► the channels, one after the other, until one knows it

Does not own: what happens to one of them (`trajectory.py`), which one a call is of (`identity.py`),
until when a reward counts (the pool).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

from cachetools import LRUCache

from stepwell.datapool.errors import (
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import OWNER, VAL
from stepwell.gateway.access import OPERATOR, Principal
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.errors import UNAVAILABLE, PermissionDeniedError, RequestError
from stepwell.gateway.trajectory.conversations import Conversations
from stepwell.gateway.trajectory.groups import Groups, Identity
from stepwell.gateway.trajectory.recording import Recording, Unrecorded
from stepwell.gateway.trajectory.trajectory import LiveTrajectory, closed_error

T = TypeVar("T")
NotKept: TypeAlias = Literal["late", "closed", "unrecorded"]
"""Why a reward or feedback is not kept: its group had left, its trajectory was closed otherwise
before, or no Step of it is stored."""


class TrajectoryStore:
    """Open trajectories by uid, and a bounded memory of closed ones."""

    def __init__(
        self,
        recording: Recording,
        groups: Groups,
    ) -> None:
        self.conversations = Conversations()
        self._recording = recording
        self._groups = groups
        self._open: dict[str, LiveTrajectory] = {}
        self._closed: LRUCache[str, tuple[Identity, str]] = LRUCache(REMEMBERED)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LiveTrajectory]:
        return iter(tuple(self._open.values()))

    def get(
        self,
        uid: str,
        prompt_uid: str,
        caller: Principal = OPERATOR,
        *,
        is_to_end: bool = False,
    ) -> LiveTrajectory:
        """The open trajectory of this URL; an unknown one begins here.

        Args:
            caller: in whose channel, and as whose, one begins.
            is_to_end: one that is closed is returned, too: closing it again is the pool's to judge.

        Raises:
            PermissionDeniedError: another key opened it.
            TrajectoryClosedError, TrajectoryConflictError
        """
        trajectory = self._open.get(uid)
        if trajectory is None and uid in self._closed:
            identity, how = self._closed[uid]
            trajectory = self._make(identity, self._leaves, closed=how)
        elif trajectory is None:
            caller.check_names(uid, prompt_uid)
            channel = self._groups.channel(prompt_uid, caller.channel)
            owner = caller.opens_as(uid)
            trajectory = self.begin(Identity(uid, prompt_uid, channel, owner=owner))
        trajectory.check_owner(caller)
        if trajectory.prompt_uid != prompt_uid:
            raise TrajectoryConflictError(
                f"trajectory {uid!r} belongs to prompt_uid {trajectory.prompt_uid!r}, not "
                f"{prompt_uid!r}; use the base_url as it was handed out"
            )
        if trajectory.closed is not None and not is_to_end:
            raise closed_error(uid, trajectory.closed)
        return trajectory

    def begin(self, identity: Identity, unrecorded: Unrecorded | None = None) -> LiveTrajectory:
        """A trajectory of this gateway that is not known yet. `unrecorded`: as the field."""
        trajectory = self._make(identity, self._leaves, unrecorded=unrecorded)
        self._open[identity.uid] = trajectory
        return trajectory

    def unrecorded(self, why: Unrecorded, caller: Principal) -> LiveTrajectory:
        """A trajectory for one request, of which nothing is stored or kept.

        Args:
            caller: in whose channel it is sampled.
        """
        uid = f"unrecorded-{uuid.uuid4().hex}"
        channel = self._groups.channel("", caller.channel)
        return self.begin(Identity(uid, f"prompt-{uid}", channel, owner=caller.owner), why)

    def elsewhere(self, uid: str, prompt_uid: str, caller: Principal = OPERATOR) -> LiveTrajectory:
        """A trajectory to open for another gateway: it is not kept here."""
        channel = self._groups.channel(prompt_uid, None)
        identity = Identity(uid, prompt_uid, channel, owner=caller.opens_as(uid))
        return self._make(identity, lambda _: None, is_elsewhere=True)

    def known(self, uid: str) -> LiveTrajectory | None:
        """The open trajectory of this id, if this gateway serves it."""
        return self._open.get(uid)

    def is_closed(self, uid: str) -> bool:
        return uid in self._closed

    def channel(self, uid: str) -> str | None:
        """The channel of a trajectory that is open here, or was closed here not long ago."""
        if (trajectory := self._open.get(uid)) is not None:
            return trajectory.channel
        return self._closed[uid][0].channel if uid in self._closed else None

    def note_step(self, uid: str, step_index: int) -> None:
        """A Step was submitted from outside (white-box)."""
        if (trajectory := self._open.get(uid)) is not None:
            trajectory.note_steps(step_index)

    def _make(
        self, identity: Identity, on_left: Callable[[LiveTrajectory], None], **how: Any
    ) -> LiveTrajectory:
        return LiveTrajectory(self._recording, identity, self.conversations, on_left, **how)

    def _leaves(self, trajectory: LiveTrajectory) -> None:
        """Keep what answers 410 if it was closed; nothing if the pool never heard of it."""
        self._open.pop(trajectory.uid, None)
        if trajectory.closed is not None:
            uids = trajectory.uid, trajectory.prompt_uid
            identity = Identity(*uids, trajectory.channel, owner=trajectory.owner)
            self._closed[trajectory.uid] = (identity, trajectory.closed)


class Outcomes:
    """Closes and scores trajectories by their uid alone, for agents that know no URL and rewards
    that come late. An agent key finds what it opened, and what the operator did in its channel, or
    held out. Owned by the app's lifespan."""

    def __init__(
        self, config: GatewayConfig, recording: Recording, trajectories: TrajectoryStore
    ) -> None:
        self._config = config
        self._recording = recording
        self._trajectories = trajectories
        self.not_kept: Counter[NotKept] = Counter()

    @contextmanager
    def counts_refusal(self, why: NotKept = "closed") -> Iterator[None]:
        """Count what the body refuses because its trajectory is closed."""
        try:
            yield
        except TrajectoryClosedError:
            self.not_kept[why] += 1
            raise

    async def why_late(self, uid: str, caller: Principal) -> str:
        """Return a clause: the end of a trajectory before its reward came."""
        try:
            return await self._first(
                uid, caller, lambda channel: self._recording.pool.why_closed(uid, channel)
            )
        except (UnknownTrajectoryError, *UNAVAILABLE):
            return "its group went on without it"

    async def complete(
        self,
        uid: str,
        reward: float | None,
        metadata: Mapping[str, Any],
        caller: Principal = OPERATOR,
        step_rewards: Sequence[float | None] = (),
    ) -> TrajectoryOutcome:
        """
        Args:
            step_rewards: of its steps, in order.
            caller: who asks; an agent key finds what it, or the operator, opened.

        Raises:
            UnknownTrajectoryError: no channel knows it.
            TrajectoryClosedError: it was closed otherwise.
            One of UNAVAILABLE
        """
        live = self._trajectories.known(uid)
        if live is not None:
            live.check_owner(caller)
            if caller.channel is None or live.channel in (caller.channel, VAL):
                return await live.complete(reward, metadata, step_rewards, caller)
        how, complete = (reward, metadata, step_rewards), self._recording.complete
        owner = caller.opens_as(uid)
        return await self._first(uid, caller, lambda channel: complete(uid, channel, *how, owner))

    async def score(
        self, uid: str, reward: float, caller: Principal = OPERATOR, step_index: int | None = None
    ) -> SubmitOutcome:
        """The reward of a trajectory, or of one step, from now on; `late` once its group was
        leased.

        Raises:
            RequestError: it has no such step.
            UnknownTrajectoryError: no channel knows it.
            One of UNAVAILABLE
        """
        set_reward, owner = self._recording.pool.set_reward, caller.opens_as(uid)
        try:
            return await self._first(
                uid, caller, lambda channel: set_reward(uid, reward, step_index, channel, owner)
            )
        except StepIndexError as e:
            raise RequestError(str(e), "step_index") from e

    async def feedback(
        self,
        uid: str,
        step_index: int | None,
        score: float | None,
        label: str | None,
        correction: str | None,
        caller: Principal = OPERATOR,
    ) -> SubmitOutcome:
        """Keep what a person says of a trajectory (`step_index` None), or of one step.

        Raises:
            TrajectoryClosedError: its group was leased or dropped.
            RequestError: it has no such step.
            UnknownTrajectoryError: no channel knows it.
            One of UNAVAILABLE
        """
        pool, owner = self._recording.pool, caller.opens_as(uid)
        marks: dict[str, Any] = {} if label is None else {"add_tags": [label]}
        if correction is not None:
            which = "last" if step_index is None else str(step_index)
            marks["corrections"] = {which: correction}

        async def keep(channel: str) -> SubmitOutcome:
            if step_index is not None:
                listed = await pool.list_trajectories(channel, trajectory_uid=uid)
                for row in listed.items:
                    caller.check_owner(uid, row.metadata.get(OWNER))
                    if step_index >= row.n_steps + row.n_missing:
                        raise StepIndexError(f"trajectory {uid!r} has no step {step_index}")
            if marks:
                await pool.mark(trajectory_uid=uid, channel=channel, owner=owner, **marks)
            if score is None:
                return "accepted"
            # Last: its group may be leased as soon as it has all its rewards.
            return await pool.set_reward(uid, score, step_index, channel, owner)

        late: Exception | None = None
        try:
            if await self._first(uid, caller, keep) == "accepted":
                return "accepted"
        except StepIndexError as e:
            raise RequestError(str(e), "step_index") from e
        except TrajectoryClosedError as e:
            late = e
        raise TrajectoryClosedError(
            f"trajectory {uid!r} takes no feedback any more: it was deleted, or its group was "
            "leased by a trainer or dropped; give it sooner, or set hold_s, for which groups are "
            "held, of its channel (pool.channels.NAME.hold_s; without such a section "
            "pool.default.hold_s)"
        ) from late

    async def _first(self, uid: str, caller: Principal, do: Callable[[str], Awaitable[T]]) -> T:
        """The answer of the first channel that knows a trajectory of this uid that the caller may
        use.

        Raises:
            PermissionDeniedError: there is none but another's.
            UnknownTrajectoryError: there is none.
        """
        caller.check_owner(uid, None)  # its name
        refused: PermissionDeniedError | None = None
        async for channel in self._channels(uid, caller):
            if not await self._may_look(uid, channel, caller):
                continue
            try:
                return await self._recording.ask(do(channel))
            except UnknownTrajectoryError:
                continue
            except PermissionDeniedError as e:
                refused = e
        raise refused or UnknownTrajectoryError(f"trajectory {uid!r} is unknown in every channel")

    async def _may_look(self, uid: str, channel: str, caller: Principal) -> bool:
        """True unless the channel is neither the caller's own nor `val` and the trajectory is the
        operator's: an agent key does not find those."""
        if caller.opens_as(uid) is None or channel == VAL or caller.channel in (None, channel):
            return True
        listed = self._recording.pool.list_trajectories(channel, trajectory_uid=uid)
        rows = (await self._recording.ask(listed)).items
        return any(OWNER in row.metadata for row in rows)

    async def _channels(self, uid: str, caller: Principal) -> AsyncIterator[str]:
        """The channels that it may be in, the likely ones first."""
        known = self._trajectories.channel(uid)
        first = [known] if known is not None else [*self._config.channels]
        if caller.channel is not None:
            first = [caller.channel, VAL, *first]
        likely = dict.fromkeys(first)
        for channel in likely:
            yield channel
        everywhere: dict[str, Any] = await self._recording.ask(
            self._recording.pool.get_statistics()
        )
        for channel in everywhere.keys() - likely:
            yield channel
