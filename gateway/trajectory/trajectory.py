"""The trajectories this gateway serves: order of commits, closing.

Life cycle (the pool has the last word; `late` from it closes a trajectory here too)::

    URL seen, init, register ──► new ──► open ──► complete
                                  │        └────► aborted | closed by the pool
                                  └► forgotten: refused before the pool heard of it

Commits of one trajectory run one at a time under its lock: a Step takes the next `step_index` only
when the pool has stored it, so a failed submit leaves no hole. Worked example: index 3 is submitted
and the pool's answer is lost. The call answers 503 and stays `unsure`. The next commit offers index
3 again. If the pool refuses it as a conflict, the trajectory is read: the lost Step was stored
after all and keeps index 3 (its client's retry is answered with it), and the new one takes 4.

A trajectory that another gateway began (a replica, or this one before it was restarted) is found in
the pool with its Steps when it is opened here, and goes on where it was. If both serve it at once,
whoever finds an index taken by the other reads its Steps. If one of these is the very call that was
to be stored, because its client tried again elsewhere, it is not stored a second time.

A trajectory of a conversation has no address that its agent knows, so its calls do not fail when it
is closed: what is in flight is answered and not stored, and what follows begins another trajectory.

Owns: the turn graph of each trajectory, the calls in flight, the memory that answers retries.
Does not own: generation (`call.py`), which call a retry is for (`retries.py`), storage (the pool).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from stepwell.datapool.errors import (
    ChannelShutDownError,
    GroupClosedError,
    GroupConflictError,
    StepConflictError,
    StepIndexError,
    UnknownTrajectoryError,
)
from stepwell.datapool.errors import TrajectoryClosedError as PoolTrajectoryClosedError
from stepwell.datapool.errors import TrajectoryConflictError as PoolTrajectoryConflictError
from stepwell.datapool.ops import Resumed, TrajectoryOutcome
from stepwell.datapool.types import GREEDY, OWNER, unseen_key
from stepwell.gateway.access import OPERATOR, Principal
from stepwell.gateway.errors import (
    PoolUnavailableError,
    RequestError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
from stepwell.gateway.tokens.graph import TurnGraph
from stepwell.gateway.trajectory.groups import Group, Identity
from stepwell.gateway.trajectory.note import FinishedCall, restore
from stepwell.gateway.trajectory.recording import POOL_FAILURE, Recording, Unrecorded
from stepwell.gateway.trajectory.retries import CallMemory, LiveCall

log = logging.getLogger(__name__)


class LiveTrajectory:
    """One open trajectory. Only `TrajectoryStore` makes them."""

    def __init__(
        self,
        recording: Recording,
        identity: Identity,
        on_left: Callable[[LiveTrajectory], None],
        *,
        closed: str | None = None,
        unrecorded: Unrecorded | None = None,
        is_elsewhere: bool = False,
    ) -> None:
        """
        Args:
            on_left: told when it was closed, or was refused before the pool heard of it.
            is_elsewhere: another gateway serves it, and alone can give it up.
        """
        self.uid, self.prompt_uid, self.channel = identity[:3]
        self.is_conversation, self.group = identity.is_conversation, identity.group
        self.owner = identity.owner
        """Who opened it (`keys.Principal.owner`); None: the operator. Provisional while new."""
        self.unrecorded = unrecorded
        """Why its calls are not stored; None: they are."""
        self.graph = TurnGraph()
        self.in_flight: set[LiveCall] = set()
        self.calls = CallMemory()
        self.closed = closed
        """How the trajectory was closed, in words; None while open."""
        self.last_used = time.monotonic()
        self.greedy = False
        """Sampled at temperature 0, whatever the agent asks for."""
        self.steps = 0
        """The next commit's `step_index`: behind all Steps that this gateway knows of."""
        self._recording = recording
        self._may_give_up = recording.serves_unrecorded and not is_elsewhere
        self._pool = recording.pool
        self._lock = asyncio.Lock()
        self._on_left = on_left
        self._users = 0
        """Requests that are about to open it, or to begin calls."""
        self._opened = closed is not None
        self._unsure: dict[str, LiveCall] = {}
        """Calls, by uid, whose commit at the next index had no answer: at most one was applied."""

    @property
    def is_new(self) -> bool:
        """The pool was not asked about it yet."""
        return not self._opened and self.unrecorded is None

    @property
    def is_for_one_request(self) -> bool:
        """Nothing of it is stored or kept, so its name leads to nothing."""
        return self.unrecorded in ("asked", "undeclared")

    def touch(self) -> None:
        self.last_used = time.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.forget_if_unused()

    def forget_if_unused(self) -> None:
        """What was refused before the pool heard of it leaves nothing here."""
        if not (self._opened or self._users or self.in_flight or self.closed is not None):
            self._on_left(self)

    def check_owner(self, caller: Principal) -> None:
        """Check the caller: against the names of a new one, whose owner the pool is asked for as it
        is opened, else against its owner.

        Raises:
            PermissionDeniedError: another key opened it, or it is named as another's.
        """
        if self.is_new:
            caller.check_names(self.uid, self.prompt_uid)
        else:
            caller.check_owner(self.uid, self.owner)

    async def open(
        self,
        caller: Principal = OPERATOR,
        *,
        channel: str | None = None,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Register with the pool, and wait for room in its channel as long as a call may queue.
        Registering again merges metadata. If the pool fails and calls are served without it, the
        trajectory is `unrecorded` from now on.

        Raises:
            TrajectoryConflictError: it is open in another channel.
            TrajectoryClosedError: the pool has closed it.
            ChannelFullError: there is no room for its group.
            PermissionDeniedError: another key opened it, or its group.
        """
        self.check_owner(caller)
        if self._opened and channel is None and metadata is None:
            return
        self.greedy |= bool(metadata and metadata.get(GREEDY))
        if self._is_unrecorded():
            return
        async with self._or_unrecorded(), self._alone():
            if not self._opened or channel is not None or metadata is not None:
                await self._read(channel, attempt, metadata, caller.opens_as(self.uid))
        self.check_owner(caller)

    async def catch_up(self) -> None:
        """Read what other gateways stored since.

        Raises:
            TrajectoryClosedError: closed meanwhile.
        """
        if self.unrecorded is None:
            async with self._or_unrecorded(), self._alone():
                await self._read()

    async def commit(self, call: LiveCall) -> None:
        """Store the Step of `call`, if it still makes one; its `stored` follows at once. Returns
        without, and counts why, if the call is to be answered although it is not stored.

        Raises:
            TrajectoryClosedError: closed meanwhile; no Step was stored.
            PoolUnavailableError: not acknowledged; `stored` may still be called, by a later commit.
        """
        why = self.unrecorded
        if why is None:
            try:
                async with self._or_unrecorded(), self._lock:
                    await self._commit(call)
                why = self.unrecorded
            except TrajectoryClosedError:
                if not self.is_conversation:
                    raise
                why = "closed"
        if why is not None:
            self._recording.unrecorded[why] += 1

    async def complete(
        self,
        reward: float | None,
        metadata: Mapping[str, Any] | None,
        step_rewards: Sequence[float | None] = (),
        caller: Principal = OPERATOR,
    ) -> TrajectoryOutcome:
        """Close with an outcome reward, and the steps' own. Calls in flight answer 410; repeating
        it is harmless."""
        return await self._end(
            f"completed with reward {reward}",
            lambda: self._recording.complete(
                self.uid, self.channel, reward, metadata or {}, step_rewards
            ),
            caller,
        )

    async def abort(
        self, reason: str, *, will_retry: bool, caller: Principal = OPERATOR
    ) -> TrajectoryOutcome:
        """Close without serving it. Calls in flight are aborted; repeating it is harmless."""
        return await self._end(
            f"aborted ({reason})",
            lambda: self._pool.abort_trajectory(
                self.uid, reason, will_retry=will_retry, channel=self.channel
            ),
            caller,
        )

    def forget(self) -> None:
        """Its data is being deleted: calls in flight end, later ones answer 410."""
        calls = tuple(self.in_flight)
        self._close("deleted")
        for call in calls:  # of a conversation, too: nobody is to get, or keep, what they say
            call.cancel(closed_error(self.uid, "deleted"))

    def note_steps(self, highest_index: int) -> None:
        """Steps were submitted from outside (white-box); later commits go behind them."""
        self.steps = max(self.steps, highest_index + 1)

    def set_unseen(self, call: FinishedCall, is_unseen: bool) -> None:
        """Note that no client got the end of this reply, or that one has it after all. The pool is
        told, too, so that other gateways know it."""
        if call.is_unseen == is_unseen:
            return
        call.is_unseen, index = is_unseen, call.turn.step_index
        if index is not None and self.closed is None and self.unrecorded is None:
            said = {unseen_key(index): is_unseen}
            self._recording.add_metadata(self.uid, self.prompt_uid, self.channel, said)

    def let_go(self) -> None:
        """Its calls belong to another trajectory from now on; the pool closes this one itself."""
        self._close("closed by the DataPool, or stored in another group")

    # -- without the pool --------------------------------------------------------------------

    def _is_unrecorded(self) -> bool:
        """Its calls are not stored, because they were given up or the pool is away as it begins."""
        if self._may_give_up and self.is_new and self._recording.is_away:
            self._give_up(PoolUnavailableError("the DataPool is away"))
        return self.unrecorded is not None

    @asynccontextmanager
    async def _or_unrecorded(self) -> AsyncIterator[None]:
        """Where calls are served without the pool: give the trajectory up if the body, which asks
        the pool for something, fails for it or takes long."""
        if not self._may_give_up:
            yield
            return
        try:
            async with self._recording.patience():
                yield
        except PoolUnavailableError as e:
            self._give_up(e)

    def _give_up(self, why: PoolUnavailableError) -> None:
        if self.unrecorded is None and self.closed is None:
            self.unrecorded = POOL_FAILURE
            self._opened = True
            self._unsure.clear()
            self._recording.give_up(self.channel, self.uid, why)

    # -- with the pool, one at a time --------------------------------------------------------

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        with self.in_use():
            async with self._lock:
                self._check_open()
                yield

    async def _commit(self, call: LiveCall) -> None:
        while True:
            self._check_open()
            index = self.steps
            if self.unrecorded is not None or (step := call.step(index)) is None:
                return  # given up meanwhile, or stored
            try:
                outcome = await self._recording.ask(
                    self._pool.submit_step(
                        step, channel=self.channel, timeout_s=self._recording.room_s
                    ),
                    room=True,
                )
            except StepConflictError:
                # The index is taken: by a call whose commit had no answer, or by another gateway
                # that serves this trajectory, too.
                await self._read()
                self.note_steps(index)
            except PoolTrajectoryConflictError as e:
                raise TrajectoryConflictError(str(e)) from e
            except PoolUnavailableError:
                self._unsure[call.uid] = call
                raise
            else:
                if outcome != "late":
                    self._unsure.clear()
                    self.note_steps(index)
                    call.stored(index)
                    return
                self._close("closed by the DataPool (deleted, or its group was served or dropped)")

    async def _read(self, *registration: Any) -> None:
        """Open it, or read the Steps that other gateways stored meanwhile."""
        if not await self._resume(*registration):
            self._close("completed before")
            self._check_open()

    async def _resume(
        self,
        channel: str | None = None,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
    ) -> bool:
        """Open it, or go on with it. Whether it is open: it may be complete already.

        Raises:
            TrajectoryClosedError: the pool takes nothing of it any more.
        """
        if channel is not None and self._opened and channel != self.channel:
            raise TrajectoryConflictError(
                f"trajectory {self.uid!r} is open in channel {self.channel!r}, not "
                f"{channel!r}; register it before its first call"
            )
        chosen = channel or self.channel
        room_s = self._recording.room_s
        about = dict(metadata or {})
        if owner is not None:
            about[OWNER] = owner
        if self.group is not None and not self._opened:
            await self._declare(self.group, owner)
        try:
            resumed = await self._recording.ask(
                self._pool.resume_trajectory(
                    self.uid,
                    self.prompt_uid,
                    attempt=attempt,
                    metadata=about,
                    channel=chosen,
                    elsewhere=channel is None and not self._opened,
                    timeout_s=room_s,
                ),
                room=True,
            )
        except PoolTrajectoryConflictError as e:
            raise TrajectoryConflictError(str(e)) from e
        self.channel = resumed.channel
        if resumed.outcome == "late":
            self._close("closed or deleted before in the DataPool, or its group was")
            self._check_open()
        if resumed.is_open:
            self._take_over(resumed)
        return resumed.is_open

    def _take_over(self, resumed: Resumed) -> None:
        self._opened = True
        self.channel = resumed.channel
        self.owner = resumed.metadata.get(OWNER)
        self.greedy |= bool(resumed.metadata.get(GREEDY))  # said to another gateway, or before
        steps = resumed.steps
        for step in steps:
            if (lost := self._unsure.pop(str(step.metadata.get("call_id")), None)) is not None:
                lost.stored(step.step_index)
        for call in restore(self.graph, steps):
            if not any(each.becomes(call) for each in self.in_flight):
                self.calls.add(call.note.retry, call)
        self.calls.read_unseen(resumed.metadata)
        if steps:
            self.note_steps(steps[-1].step_index)

    async def _declare(self, group: Group, owner: str | None) -> None:
        """Let the pool close the group of this conversation by itself."""
        try:
            await self._recording.ask(
                self._pool.open_group(
                    group.prompt_uid,
                    group.n,
                    group.deadline_s,
                    metadata={} if owner is None else {OWNER: owner},
                    channel=self.channel,
                    timeout_s=self._recording.room_s,
                ),
                room=True,
            )
        except GroupClosedError:
            self._close("begun when its group had been served or dropped")
            self._check_open()
        except (GroupConflictError, ChannelShutDownError) as e:
            # Its service declared it with terms of its own; or nobody consumes it.
            log.debug("group %s: %s", self.prompt_uid, e)

    async def _end(
        self, how: str, end: Callable[[], Awaitable[TrajectoryOutcome]], caller: Principal
    ) -> TrajectoryOutcome:
        self.check_owner(caller)
        with self.in_use():
            async with self._lock:
                if self.unrecorded is not None:
                    self._close(how)
                    return "aborted"
                if not self._opened:
                    await self._resume(owner=caller.opens_as(self.uid))
                self.check_owner(caller)
                try:
                    outcome = await self._recording.ask(end())
                except PoolTrajectoryClosedError as e:
                    self._close("closed before")
                    raise TrajectoryClosedError(str(e)) from e
                except UnknownTrajectoryError as e:
                    raise TrajectoryConflictError(str(e)) from e
                except StepIndexError as e:
                    raise more_rewards(e) from e
                self._close("closed by the DataPool" if outcome == "late" else how)
        return outcome

    def _close(self, how: str) -> None:
        if self.closed is not None:
            return
        self.closed = how
        self._on_left(self)
        for call in () if self.is_conversation else tuple(self.in_flight):
            call.cancel(closed_error(self.uid, how))
        # They refer to each other: without this, all of it waits for the garbage collector.
        self.calls.clear()

    def _check_open(self) -> None:
        if self.closed is not None:
            raise closed_error(self.uid, self.closed)


def closed_error(uid: str, how: str) -> TrajectoryClosedError:
    return TrajectoryClosedError(
        f"trajectory {uid!r} was {how} and takes no more calls; start another with "
        "POST /init_trajectory"
    )


def more_rewards(error: StepIndexError) -> RequestError:
    return RequestError(f"there are more rewards than steps: {error}", "step_rewards")
