"""The trajectories this gateway serves: order of commits, closing.

Life cycle (the pool has the last word; `late` from it closes a trajectory here too)::

    URL seen, init, register ──► new ──► open ──► complete
                                  │        └────► aborted | closed by the pool
                                  └► forgotten: refused before the pool heard of it

Commits of one trajectory run one at a time under its lock. A Step is offered to the pool with the
index behind all that are known here::

    append ──offers index 3──► stored            the call is turn 3
                          └──► behind (Steps)    they become turns and calls here; 4 is offered next

Worked example: index 3 is offered and the pool's answer is lost. The call answers 503 and stays
`unstored`. The next commit offers index 3 again. If the lost Step was stored after all, it is among
the Steps that the pool answers with: the call that made it keeps index 3 (its client's retry is
answered with it), and the new one takes 4. A Step of another gateway (a replica, or this one before
it was restarted) may be the very call that was to be stored, because its client tried again
elsewhere: then it is not stored a second time.

A trajectory of a conversation has no address that its agent knows, so its calls do not fail when it
is closed: what is in flight is answered and not stored, and what follows begins another trajectory.

Owns: the turn graph of each trajectory, the calls in flight, the memory that answers retries, the
places where its conversation is found. Does not own: generation (`call.py`), which call a retry is
for (`calls.py`), storage (the pool).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from stepwell.datapool.codec import Base
from stepwell.datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    GroupClosedError,
    GroupConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.ops import Resumed, TrajectoryOutcome
from stepwell.datapool.remote.outbox import PictureSource
from stepwell.datapool.types import GREEDY, OWNER, Step, unseen_key
from stepwell.gateway.access import OPERATOR, Principal
from stepwell.gateway.errors import UNAVAILABLE, PoolSilentError, RequestError
from stepwell.gateway.pool_access import POOL_FAILURE, PoolAccess, Unrecorded
from stepwell.gateway.prompt import WHOLE_TOKENS
from stepwell.gateway.tokens.graph import Turn, TurnGraph
from stepwell.gateway.tokens.messages import Key, text_key
from stepwell.gateway.trajectory.calls import Call, CallMemory, LiveCall, restore
from stepwell.gateway.trajectory.conversations import Caller, Conversations, Peer, Place
from stepwell.gateway.trajectory.groups import Group, Identity

log = logging.getLogger(__name__)

T = TypeVar("T")

_DELETED: Final = "deleted"
"""Way of closing: its data is deleted."""


class LiveTrajectory:
    """One open trajectory. Only `TrajectoryStore` makes them."""

    def __init__(
        self,
        pool_access: PoolAccess,
        identity: Identity,
        conversations: Conversations,
        on_left: Callable[[LiveTrajectory], None],
        *,
        closed: str | None = None,
        unrecorded: Unrecorded | None = None,
        is_elsewhere: bool = False,
    ) -> None:
        """
        Args:
            on_left: called when it was closed, or was refused before the pool heard of it.
            is_elsewhere: another gateway serves it, and alone can give it up.
        """
        self.uid, self.prompt_uid, self.channel = identity[:3]
        self.is_conversation, self.group = identity.is_conversation, identity.group
        self.owner = identity.owner
        """The owner that opened it (`access.Principal.owner`); None: the operator. Provisional
        while new."""
        self.unrecorded = unrecorded
        """Why its calls are not stored; None: they are."""
        self.graph = TurnGraph()
        self.in_flight: set[LiveCall] = set()
        self.calls = CallMemory()
        self.closed = closed
        """The way in which it was closed, in words; None while open."""
        self.last_used = time.monotonic()
        self.greedy = False
        """Sampled at temperature 0, whatever the agent asks for."""
        self.steps = 0
        """The next commit's `step_index`: behind all Steps that this gateway knows of."""
        self.caller: Caller | None = None
        """Its last caller, if it was made for an agent that names none: it is found by what is said
        in it, and closed when it has had no call for long."""
        self.peer: Peer = None
        """The connection that its last first request came over."""
        self.is_session = False
        """It has the name of its session, which may have ended at another gateway, or before."""
        self.places: list[Place] = []
        """Its own in `Conversations`."""
        self._conversations = conversations
        self._pool_access = pool_access
        self._may_give_up = pool_access.serves_unrecorded and not is_elsewhere
        self._pool = pool_access.pool
        self._lock = asyncio.Lock()
        self._on_left = on_left
        self.users = 0
        """Requests that are about to open it, or to begin calls: it is kept for them, though the
        pool may not have heard of it. They end with `forget_if_unused`."""
        self.n_ending = 0
        """Requests that are about to close it: calls that begin wait for what comes of it."""
        self._opened = closed is not None

    @property
    def is_new(self) -> bool:
        """The pool was not asked about it yet."""
        return not self._opened and self.unrecorded is None

    @property
    def is_for_one_request(self) -> bool:
        """Nothing of it is stored or kept, so its name leads to nothing."""
        return self.unrecorded in ("asked", "undeclared")

    @property
    def is_deleted(self) -> bool:
        """Nobody is to get, or keep, what its calls say."""
        return self.closed == _DELETED

    def is_idle(self, before: float) -> bool:
        """No call is in flight or about to begin, and none ended since (monotonic seconds)."""
        return not (self.in_flight or self.users or self.last_used >= before)

    def forget_if_unused(self) -> None:
        """Drop it if it was refused before the pool heard of it. While no call of it has made a
        Step, its place in its group is free for others."""
        if self.users or self.in_flight:
            return
        if self.group is not None and not self.steps:
            self.group.joined.discard(self.uid)
        if not self._opened and self.closed is None:
            self._leave()

    def check_open(self) -> None:
        """
        Raises:
            TrajectoryClosedError
        """
        if self.closed is not None:
            raise closed_error(self.uid, self.closed)

    def check_owner(self, caller: Principal) -> None:
        """Check the caller: against the names of a new one, whose owner the pool is asked for as it
        is opened, else against its owner.

        Raises:
            PermissionDeniedError: another key opened it, or it is named as another's.
        """
        if caller.owner is None:  # it may use what anybody opened
            return
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
        """Register with the pool, and wait for room in its channel as long as a call may queue; or
        for its end, where that is under way. Registering again merges metadata. If the pool fails
        and calls are served without it, the trajectory is `unrecorded` from now on.

        Raises:
            TrajectoryConflictError: it is open in another channel.
            TrajectoryClosedError: the pool has closed it.
            ChannelFullError: there is no room for its group.
            PermissionDeniedError: another key opened it, or its group.
        """
        self.check_owner(caller)
        if self._opened and channel is None and metadata is None and not self.n_ending:
            return
        self.greedy |= bool(metadata and metadata.get(GREEDY))
        if self._is_unrecorded():
            return
        again = channel is not None or metadata is not None
        owner = caller.opens_as(self.uid)
        asking = self._open(channel, attempt, metadata, owner, again=again)
        await (self._unless_given_up(asking) if self._may_give_up else asking)
        self.check_owner(caller)

    async def catch_up(self) -> None:
        """Read what other gateways stored since, for a call; if the pool fails, as `open`.

        Raises:
            TrajectoryClosedError: closed meanwhile.
        """
        if self.unrecorded is None:
            asking = self.refresh()
            await (self._unless_given_up(asking) if self._may_give_up else asking)

    async def refresh(self) -> None:
        """Read what other gateways stored since, if the pool answers: no call needs it.

        Raises:
            TrajectoryClosedError: closed meanwhile.
            One of UNAVAILABLE
        """
        await self._open(again=True)

    async def went_on_elsewhere(self) -> bool:
        """Return true if another gateway stored Steps of it since, which are read then.

        Raises:
            TrajectoryClosedError: closed meanwhile.
        """
        if self.unrecorded is not None or not self._opened:
            return False
        listing = self._pool.list_trajectories(self.channel, trajectory_uid=self.uid)
        listed = await self._pool_access.ask(listing)
        if all(row.n_steps + row.n_missing <= self.steps for row in listed.items):
            return False
        await self.refresh()
        return True

    def append(
        self,
        live: LiveCall,
        make_step: Callable[[int], Step],
        pictures: PictureSource | None = None,
    ) -> Coroutine[Any, Any, Turn | Call | None]:
        """Store the Step of a generated call. Runs on in the same turn of the loop as the pool's
        answer comes.

        Args:
            make_step: makes its Step with this index.
            pictures: gives those of its pictures that the pool has not; None: it has none.

        Returns:
            Its turn in the graph; or the call of another gateway that turned out to be a try of the
            same request, and was stored first; or None, counted with why, if the call is to be
            answered although it is not stored.

        Raises:
            TrajectoryClosedError: closed meanwhile; no Step was stored.
            UNAVAILABLE: not acknowledged; a later commit may find that it was stored.
        """
        if self._may_give_up or self.is_conversation or self.unrecorded is not None:
            return self._append_or_count(live, make_step, pictures)
        return self._append(live, make_step, pictures)

    async def _append_or_count(
        self, live: LiveCall, make_step: Callable[[int], Step], pictures: PictureSource | None
    ) -> Turn | Call | None:
        why = self.unrecorded
        if why is None:
            try:
                asking = self._append(live, make_step, pictures)
                found = await (self._unless_given_up(asking) if self._may_give_up else asking)
                if found is not None:
                    return found
                why = self.unrecorded
            except TrajectoryClosedError:
                if self.is_deleted or not self.is_conversation:
                    raise
                why = "closed"
        if why is not None:
            self._pool_access.unrecorded[why] += 1
        return None

    async def read_pictures(self, digests: Collection[str]) -> dict[str, bytes]:
        """Pictures of its stored Steps, by digest; none where the pool has given it up."""
        if self.unrecorded is not None or not self._opened:
            return {}
        return await self._pool_access.ask(
            self._pool.read_pictures(self.uid, digests, self.channel, self.owner)
        )

    def add_turn(self, live: LiveCall, index: int | None = None, crc: int | None = None) -> Turn:
        """Make a generated call a turn of the graph.

        Args:
            index: of its Step; None: it has none here.
            crc: as `Turn.crc`.
        """
        request, generation = live.request, live.generation
        turn = self.graph.add(
            live.keys,
            parent=request.parent,
            new_prompt_ids=request.new_ids,
            response_ids=generation.response_ids,
            calls=live.tool_calls,
            has_reasoning=live.has_reasoning,
            step_index=index,
            crc=crc,
            pictures=request.new_pictures,
        )
        is_whole = len(live.prompt_ids) <= WHOLE_TOKENS
        self.graph.last = (turn, live.prompt_ids) if is_whole else None
        if self.caller is not None:
            _, _, whole, length = live.keys
            self._found_by(whole, length)
            if request.prompt_text is not None:
                # The client goes on from what it was told, without the token that ended it.
                told = request.prompt_text + live.text.content
                self._found_by(text_key(told), len(told))
        return turn

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
            lambda: self._pool_access.complete(
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
        self._close(_DELETED)
        for call in calls:  # of a conversation, too
            call.cancel(closed_error(self.uid, _DELETED))

    def note_steps(self, highest_index: int) -> None:
        """Steps were submitted from outside (white-box); later commits go behind them."""
        self.steps = max(self.steps, highest_index + 1)

    def begun_by(self, first: bytes, peer: Peer) -> None:
        """Note the first request of its conversation, and the connection that it came over."""
        self.peer = peer
        if self.caller is not None and self._conversations.at(self.caller + first) != self.uid:
            self._add_place(Place(self.caller + first))

    def set_unseen(self, call: Call, is_unseen: bool) -> None:
        """Note that no client got the end of this reply, or that one has it after all. The pool is
        told, too, so that other gateways know it."""
        if call.is_unseen == is_unseen:
            return
        call.is_unseen = is_unseen
        index = None if call.turn is None else call.turn.step_index
        if index is not None and self.closed is None and self.unrecorded is None:
            said = {unseen_key(index): is_unseen}
            self._pool_access.add_metadata(self.uid, self.prompt_uid, self.channel, said)

    def detach(self) -> None:
        """Its calls belong to another trajectory from now on; the pool closes this one itself."""
        self._close("closed by the DataPool, or stored in another group")

    # -- without the pool --------------------------------------------------------------------

    def _is_unrecorded(self) -> bool:
        """Its calls are not stored, because they were given up or the pool is away as it begins."""
        if self._may_give_up and self.is_new and self._pool_access.is_away:
            self._give_up(PoolSilentError("the DataPool is away"))
        return self.unrecorded is not None

    async def _unless_given_up(self, asking: Awaitable[T]) -> T | None:
        """The pool's answer, where calls may be served without the pool: the trajectory is given up
        if it fails or takes long. Then None."""
        try:
            async with self._pool_access.patience():
                return await asking
        except UNAVAILABLE as e:
            self._give_up(e)
            return None

    def _give_up(self, why: DataPoolError) -> None:
        if self.unrecorded is None and self.closed is None:
            self.unrecorded = POOL_FAILURE
            self._opened = True
            self._pool_access.give_up(self.channel, self.uid, why)

    # -- with the pool, one at a time --------------------------------------------------------

    async def _append(
        self, live: LiveCall, make_step: Callable[[int], Step], pictures: PictureSource | None
    ) -> Turn | Call | None:
        pool_access, parent = self._pool_access, live.request.parent
        base, extended = None, None if parent is None else parent.nearest()
        if extended is not None and extended.step_index is not None and extended.crc is not None:
            base = Base(extended.step_index, 4 * extended.n_tokens, extended.crc)
        async with self._lock:
            while True:
                self.check_open()
                if self.unrecorded is not None or live.call.turn is not None:
                    return live.call.turn  # given up, or found in the pool, meanwhile
                if (other := live.elsewhere) is not None and self._is_same(live, other):
                    return other
                index = self.steps
                stored = self._pool.append_step(
                    make_step(index),
                    base,
                    self.channel,
                    pool_access.room_s,
                    pictures,
                    is_json=True,
                )
                answer = await pool_access.ask(stored, room=True)
                if isinstance(answer, Base):
                    self.steps = max(self.steps, index + 1)
                    return self.add_turn(live, index, answer.crc)
                if answer == "late":
                    self._close(
                        "closed by the DataPool (deleted, or its group was served or dropped)"
                    )
                else:
                    self._take_over(answer)
                    self.note_steps(index)

    def _is_same(self, live: LiveCall, other: Call) -> bool:
        """True if a call and one that another gateway stored meanwhile, of the same request, are
        two tries of one client."""
        if not (live.call.is_retry or other.is_retry or not live.readers):
            return False
        if live.request.stream and live.readers and live.deltas:  # it was told otherwise
            live.duplicate_of = None if other.turn is None else other.turn.step_index
            return False
        return True

    async def _open(self, *registration: Any, again: bool = False) -> None:
        """Open it, if that was not done before, or read the Steps that other gateways stored
        meanwhile."""
        self.users += 1
        try:
            async with self._lock:
                self.check_open()
                if self._opened and not again:
                    return
                if not await self._resume(*registration):
                    self._close("completed before")
                    self.check_open()
        finally:
            self.users -= 1
            self.forget_if_unused()

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
        room_s = self._pool_access.room_s
        about = dict(metadata or {})
        if owner is not None:
            about[OWNER] = owner
        if self.group is not None and self.is_session and not self._opened:
            await self._find_session(self.group)
        chosen = channel or self.channel
        if self.group is not None and not self._opened:
            await self._declare(self.group, owner)
        resumed = await self._pool_access.ask(
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
        self.channel = resumed.channel
        if resumed.outcome == "late":
            self._close("closed or deleted before in the DataPool, or its group was")
            self.check_open()
        if resumed.is_open:
            self._take_over(resumed)
        return resumed.is_open

    def _take_over(self, resumed: Resumed) -> None:
        self._opened = True
        self.channel = resumed.channel
        self.owner = resumed.metadata.get(OWNER)
        self.greedy |= bool(resumed.metadata.get(GREEDY))  # said to another gateway, or before
        steps = resumed.steps
        packed = () if resumed.packed is None else resumed.packed.steps
        for call in restore(self.graph, steps, {step.step_index: step.crc for step in packed}):
            if (own := self.calls.with_uid(call.uid)) is not None:
                self._settle(own, call)
                continue
            for live in self.in_flight:
                if (live.call.retry, live.call.body) == (call.retry, call.body):
                    live.elsewhere = live.elsewhere or call
            self.calls.add(call)
        self.calls.read_unseen(resumed.metadata)
        if steps:
            self.note_steps(steps[-1].step_index)

    def _settle(self, own: Call, found: Call) -> None:
        """The pool has the Step of a call whose commit had no answer."""
        own.turn, own.finish_reason = found.turn, found.finish_reason
        own.spans, own.log_probs = found.spans, found.log_probs
        if (live := own.live) is not None and self.caller is not None:
            self._found_by(*live.keys[2:])
        if live is not None and live.task is None:
            own.live = None

    def _found_by(self, key: Key, length: int | None) -> None:
        """Calls that extend this conversation belong here."""
        self.last_used = time.monotonic()  # it is idle from the end of a call on
        self._add_place(Place((self.caller or b"") + key, length))

    def _add_place(self, place: Place) -> None:
        self._conversations.add(place, self.uid)
        self.places.append(place)

    async def _find_session(self, group: Group) -> None:
        """Look for the session where it may have begun, at another gateway or before a restart. If
        the pool knows it, it goes on in its own group and leaves `group` to others.

        Raises:
            TrajectoryClosedError: it has ended.
        """
        ask, pool = self._pool_access.ask, self._pool
        for channel in dict.fromkeys((self.channel, *group.channels)):
            listed = await ask(pool.list_trajectories(channel, trajectory_uid=self.uid))
            found = next((row for row in listed.items if row.state == "open"), None)
            if found is None:
                try:
                    await ask(pool.why_closed(self.uid, channel))
                except UnknownTrajectoryError:
                    continue
            group.joined.discard(self.uid)
            self.group = None
            if found is None:
                self._close("closed before in the DataPool")
                self.check_open()
            else:
                self.prompt_uid, self.channel = found.prompt_uid, channel
            return

    async def _declare(self, group: Group, owner: str | None) -> None:
        """Let the pool close the group of this conversation by itself."""
        try:
            await self._pool_access.ask(
                self._pool.open_group(
                    group.prompt_uid,
                    group.n,
                    group.deadline_s,
                    metadata={} if owner is None else {OWNER: owner},
                    channel=self.channel,
                    timeout_s=self._pool_access.room_s,
                ),
                room=True,
            )
        except GroupClosedError:
            self._close("begun when its group had been served or dropped")
            self.check_open()
        except (GroupConflictError, ChannelShutDownError) as e:
            # Its service declared it with terms of its own; or nobody consumes it.
            log.debug("group %s: %s", self.prompt_uid, e)

    async def _end(
        self, how: str, end: Callable[[], Awaitable[TrajectoryOutcome]], caller: Principal
    ) -> TrajectoryOutcome:
        self.check_owner(caller)
        self.users += 1
        self.n_ending += 1
        try:
            async with self._lock:
                if self.unrecorded is not None:
                    self._close(how)
                    return "aborted"
                if not self._opened:
                    await self._resume(owner=caller.opens_as(self.uid))
                self.check_owner(caller)
                try:
                    outcome = await self._pool_access.ask(end())
                except TrajectoryClosedError:
                    self._close("closed before")
                    raise
                except UnknownTrajectoryError as e:
                    raise TrajectoryConflictError(str(e)) from e
                except StepIndexError as e:
                    raise more_rewards(e) from e
                self._close("closed by the DataPool" if outcome == "late" else how)
                return outcome
        finally:
            self.users -= 1
            self.n_ending -= 1
            self.forget_if_unused()

    def _close(self, how: str) -> None:
        if self.closed is not None:
            return
        self.closed = how
        self._leave()
        for call in () if self.is_conversation else tuple(self.in_flight):
            call.cancel(closed_error(self.uid, how))
        # They refer to each other: without this, all of it waits for the garbage collector.
        self.calls.clear()

    def _leave(self) -> None:
        self._conversations.remove(self.places, self.uid)
        self.places.clear()
        self.caller = None  # what is answered from now on leads nobody here
        self._on_left(self)


def closed_error(uid: str, how: str) -> TrajectoryClosedError:
    return TrajectoryClosedError(
        f"trajectory {uid!r} was {how} and takes no more calls; start another with "
        "POST /init_trajectory"
    )


def more_rewards(error: StepIndexError) -> RequestError:
    return RequestError(f"there are more rewards than steps: {error}", "step_rewards")
