"""The trajectories this gateway serves: identity, order of commits, closing.

Life cycle (the pool has the last word; `late` from it closes a trajectory here too)::

    URL seen, init, register ──► new ──► open ──► complete
                                  │        └────► aborted | closed by the pool
                                  └► forgotten: refused before the pool heard of it

Commits of one trajectory run one at a time under its lock: a Step takes the next `step_index` only
when the pool has stored it, so a failed submit leaves no hole. Worked example: index 3 is submitted
and the pool's answer is lost. The call answers 503 and stays `uncertain`. The next commit offers
index 3 again; if the pool refuses it as a conflict, the lost Step was stored after all: it keeps
index 3 (its client's retry is answered with it), and the new one takes 4.

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
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

from stepwell.datapool.errors import (
    ChannelShutDownError,
    GroupClosedError,
    GroupConflictError,
    StepConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.errors import TrajectoryClosedError as PoolTrajectoryClosedError
from stepwell.datapool.errors import TrajectoryConflictError as PoolTrajectoryConflictError
from stepwell.datapool.inspect.rows import TrajectoryRow
from stepwell.datapool.ops import Resumed, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import GREEDY, Step
from stepwell.gateway.config import REMEMBERED
from stepwell.gateway.errors import (
    PoolUnavailableError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
from stepwell.gateway.tokens.graph import TurnGraph
from stepwell.gateway.trajectory.note import restore
from stepwell.gateway.trajectory.recording import POOL_FAILURE, Recording, Unrecorded, ask
from stepwell.gateway.trajectory.retries import CallMemory, LiveCall, RetryKey, retry_digest

log = logging.getLogger(__name__)


class Terms(NamedTuple):
    """How a group is declared."""

    n: int
    deadline_s: float


class Identity(NamedTuple):
    uid: str
    prompt_uid: str
    channel: str
    terms: Terms | None = None
    """Its group is declared with them when it is opened."""
    is_conversation: bool = False
    """Found by what is said in it: no agent knows its address."""
    of_key: str | None = None
    """The channel of its caller's key."""


class Commit(NamedTuple):
    """A Step to be stored, at whatever index it gets."""

    make_step: Callable[[int], Step | None]
    """None: it is not to be stored any more, for it is stored already."""
    stored: Callable[[int], None]


class LiveTrajectory:
    """One open trajectory. Only `TrajectoryStore` makes them."""

    def __init__(
        self,
        recording: Recording,
        identity: Identity,
        *,
        on_closed: Callable[[LiveTrajectory], None],
        on_unused: Callable[[LiveTrajectory], None],
        closed: str | None = None,
        unrecorded: Unrecorded | None = None,
        is_elsewhere: bool = False,
    ) -> None:
        """
        Args:
            is_elsewhere: another gateway serves it, and alone can give it up.
        """
        self.uid, self.prompt_uid, self.channel = identity[:3]
        self._terms, self.is_conversation, self.of_key = identity[3:]
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
        self._timeout_s = recording.timeout_s
        self._room_s = recording.room_s
        self._lock = asyncio.Lock()
        self._on_closed = on_closed
        self._on_unused = on_unused
        self._users = 0
        """Requests that are about to open it, or to begin calls."""
        self._opened = closed is not None
        self._uncertain: list[Commit] = []
        """Commits at the next index whose answer was lost: at most one of them was applied."""

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

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[None]:
        """`in_use`, and alone."""
        with self.in_use():
            async with self._lock:
                yield

    def forget_if_unused(self) -> None:
        """What was refused before the pool heard of it leaves nothing here."""
        if not (self._opened or self._users or self.in_flight or self.closed is not None):
            self._on_unused(self)

    def awaits_retry(self, retry: RetryKey) -> bool:
        """A call of this key has a reply that no client has got; or has failed, and this is marked
        as a retry."""
        return self.calls.awaits_retry(retry_digest(retry.key), retry)

    async def open(
        self,
        *,
        channel: str | None = None,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        waits: bool = True,
    ) -> None:
        """Register with the pool. Registering again merges metadata. If the pool fails and calls
        are served without it, the trajectory is `unrecorded` from now on.

        Args:
            waits: for room in a full channel, as long as a call may queue.

        Raises:
            TrajectoryConflictError: it is open in another channel.
            TrajectoryClosedError: the pool has closed it.
            ChannelFullError: there is no room for its group.
        """
        if self._opened and channel is None and metadata is None:
            return
        self.greedy |= bool(metadata and metadata.get(GREEDY))
        if self._is_unrecorded():
            return
        async with self._or_unrecorded(), self._use():
            self._check_open()
            if not self._opened:
                await self._begin(channel, attempt, metadata, self._room_s if waits else 0.0)
                if not self._opened:
                    self._close("completed before")
            elif channel is not None or metadata is not None:
                await self._register_again(channel, attempt, metadata)
            self._check_open()

    async def is_stored(self) -> bool:
        """The pool has it in its channel. Opens nothing.

        Raises:
            PoolUnavailableError
        """
        if self._is_unrecorded():
            return False
        rows: Sequence[TrajectoryRow] = ()
        async with self._or_unrecorded():
            page = await ask(
                self._pool.list_trajectories(
                    self.channel, limit=1, prompt_uid=self.prompt_uid, trajectory_uid=self.uid
                ),
                self._timeout_s,
            )
            rows = page.items
        return bool(rows)

    async def catch_up(self) -> bool:
        """Read what other gateways stored since; whether that was anything.

        Raises:
            TrajectoryClosedError: closed meanwhile.
        """
        before = self.steps
        if self._is_unrecorded():
            return False
        async with self._or_unrecorded(), self._lock:
            self._check_open()
            if not self._opened or self._uncertain:
                # To read would open it, or find what could be ours; the next commit settles that.
                return False
            before = self.steps
            await self._read()
            self._check_open()
        return self.steps > before

    async def record(self, commit: Commit) -> Unrecorded | None:
        """As `commit`; or why the call is to be answered although it is not stored."""
        if self.unrecorded is not None:
            return self.unrecorded
        try:
            async with self._or_unrecorded():
                await self.commit(commit)
        except TrajectoryClosedError:
            if not self.is_conversation:
                raise
            return "closed"
        return self.unrecorded

    async def commit(self, commit: Commit) -> None:
        """Store the Step that `commit` makes, if it still makes one; its `stored(step_index)`
        follows at once.

        Raises:
            TrajectoryClosedError: closed meanwhile; no Step was stored.
            PoolUnavailableError: not acknowledged; `stored` may still be called, by a later commit.
        """
        async with self._lock:
            while True:
                self._check_open()
                index = self.steps
                # Given up meanwhile, or stored.
                if self.unrecorded is not None or (step := commit.make_step(index)) is None:
                    return
                try:
                    outcome = await self._submit(step)
                except StepConflictError:
                    # The index is taken: by the commit whose answer was lost, or by another
                    # gateway that serves this trajectory, too.
                    is_ours = await self._settle(index)
                    self.steps = max(self.steps, index + 1)
                    if not is_ours:
                        await self._read()
                    continue
                except PoolTrajectoryConflictError as e:
                    raise TrajectoryConflictError(str(e)) from e
                except PoolUnavailableError:
                    if commit not in self._uncertain:
                        self._uncertain.append(commit)
                    raise
                if outcome == "late":
                    self._close("closed by the DataPool (its group was served or dropped)")
                    continue
                self._uncertain.clear()
                self.steps = index + 1
                commit.stored(index)
                return

    async def complete(
        self, reward: float | None, metadata: Mapping[str, Any] | None
    ) -> TrajectoryOutcome:
        """Close with an outcome reward. Calls in flight answer 410; repeating it is harmless."""
        return await self._end(
            f"completed with reward {reward}",
            lambda: self._pool.complete_trajectory(
                self.uid, reward=reward, metadata=dict(metadata or {}), channel=self.channel
            ),
        )

    async def abort(self, reason: str, *, will_retry: bool) -> TrajectoryOutcome:
        """Close without serving it. Calls in flight are aborted; repeating it is harmless."""
        return await self._end(
            f"aborted ({reason})",
            lambda: self._pool.abort_trajectory(
                self.uid, reason, will_retry=will_retry, channel=self.channel
            ),
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

    def let_go(self) -> None:
        """Its calls belong to another trajectory from now on; the pool closes this one itself."""
        self._close("closed by the DataPool, or stored in another group")

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
            self._uncertain.clear()
            self._recording.give_up(self.channel, self.uid, why)

    async def _submit(self, step: Step) -> SubmitOutcome:
        room_s = self._room_s
        return await ask(
            self._pool.submit_step(step, channel=self.channel, timeout_s=room_s),
            self._timeout_s + room_s,
        )

    async def _begin(
        self,
        channel: str | None,
        attempt: int,
        metadata: Mapping[str, Any] | None,
        room_s: float,
    ) -> None:
        """Open the trajectory, or go on with it; `_opened` unless it is complete already."""
        if channel is not None:
            self.channel = channel
        if self._terms is not None:
            await self._declare(self._terms, room_s)
        resumed = await self._resume(attempt, metadata, room_s, elsewhere=channel is None)
        if resumed.outcome == "late":
            self._close("closed before in the DataPool, or its group was")
            self._check_open()
        self.channel = resumed.channel
        self.greedy |= bool(resumed.metadata.get(GREEDY))  # said to another gateway, or before
        self._take_over(resumed)
        self._opened = resumed.is_open

    async def _declare(self, terms: Terms, room_s: float) -> None:
        """Let the pool close the group of this conversation by itself."""
        try:
            await ask(
                self._pool.open_group(
                    self.prompt_uid, *terms, channel=self.channel, timeout_s=room_s
                ),
                self._timeout_s + room_s,
            )
        except GroupClosedError:
            self._close("begun when its group had been served or dropped")
            self._check_open()
        except (GroupConflictError, ChannelShutDownError) as e:
            # Its service declared it with terms of its own; or nobody consumes it.
            log.debug("group %s: %s", self.prompt_uid, e)

    async def _register_again(
        self, channel: str | None, attempt: int, metadata: Mapping[str, Any] | None
    ) -> None:
        if channel is not None and channel != self.channel:
            raise TrajectoryConflictError(
                f"trajectory {self.uid!r} is open in channel {self.channel!r}, not "
                f"{channel!r}; register it before its first call"
            )
        outcome = await ask(
            self._pool.open_trajectory(
                self.uid,
                self.prompt_uid,
                attempt=attempt,
                metadata=dict(metadata or {}),
                channel=self.channel,
                timeout_s=self._room_s,
            ),
            self._timeout_s + self._room_s,
        )
        if outcome == "late":
            self._close("closed before in the DataPool, or its group was")

    async def _read(self) -> None:
        """The Steps that other gateways stored meanwhile."""
        resumed = await self._resume(0, None, self._room_s, elsewhere=False)
        if resumed.is_open:
            self._take_over(resumed)
        else:
            self._close("closed by the DataPool, or through another gateway")

    async def _resume(
        self,
        attempt: int,
        metadata: Mapping[str, Any] | None,
        room_s: float,
        *,
        elsewhere: bool,
    ) -> Resumed:
        try:
            return await ask(
                self._pool.resume_trajectory(
                    self.uid,
                    self.prompt_uid,
                    attempt=attempt,
                    metadata=dict(metadata or {}),
                    channel=self.channel,
                    elsewhere=elsewhere,
                    timeout_s=room_s,
                ),
                self._timeout_s + room_s,
            )
        except PoolTrajectoryConflictError as e:
            raise TrajectoryConflictError(str(e)) from e

    def _take_over(self, resumed: Resumed) -> None:
        steps = resumed.steps
        if not steps:
            return
        for key, call in restore(self.graph, steps):
            if not any(each.was_stored_elsewhere(key, call) for each in self.in_flight):
                self.calls.restore(key, call)
        self.note_steps(steps[-1].step_index)

    async def _settle(self, index: int) -> bool:
        """Find the lost commit that holds `index`: submitted again, it is a duplicate. Whether
        there is one."""
        while self._uncertain:
            lost = self._uncertain[0]
            outcome: SubmitOutcome = "late"
            if (step := lost.make_step(index)) is not None:
                with suppress(StepConflictError):  # the index is another gateway's
                    outcome = await self._submit(step)
            self._uncertain.pop(0)
            if outcome == "duplicate":
                lost.stored(index)
                self._uncertain.clear()
                return True
        return False

    async def _end(
        self, how: str, end: Callable[[], Awaitable[TrajectoryOutcome]]
    ) -> TrajectoryOutcome:
        async with self._use():
            if self.unrecorded is not None:
                self._close(how)
                return "aborted"
            if not self._opened:
                await self._begin(None, 0, None, self._room_s)
            try:
                outcome = await ask(end(), self._timeout_s)
            except PoolTrajectoryClosedError as e:
                self._close("closed before")
                raise TrajectoryClosedError(str(e)) from e
            except UnknownTrajectoryError as e:
                raise TrajectoryConflictError(str(e)) from e
            self._close("closed by the DataPool" if outcome == "late" else how)
        return outcome

    def _close(self, how: str) -> None:
        if self.closed is not None:
            return
        self.closed = how
        self._on_closed(self)
        for call in () if self.is_conversation else tuple(self.in_flight):
            call.cancel(closed_error(self.uid, how))
        # They refer to each other: without this, all of it waits for the garbage collector.
        self.calls.clear()

    def _check_open(self) -> None:
        if self.closed is not None:
            raise closed_error(self.uid, self.closed)


class TrajectoryStore:
    """Open trajectories by uid, and a bounded memory of closed ones."""

    def __init__(
        self,
        recording: Recording,
        *,
        channel_of: Callable[[str, str | None], str],
        on_closed: Callable[[LiveTrajectory], None],
        on_unused: Callable[[LiveTrajectory], None],
    ) -> None:
        """
        Args:
            channel_of: of a prompt_uid and the channel of a caller's key.
            on_closed: told of every trajectory that was closed.
            on_unused: told of every one that was refused before the pool heard of it.
        """
        self._recording = recording
        self._channel_of = channel_of
        self._open: dict[str, LiveTrajectory] = {}
        self._closed: OrderedDict[str, tuple[Identity, str]] = OrderedDict()
        self._on_closed = on_closed
        self._on_unused = on_unused

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LiveTrajectory]:
        return iter(tuple(self._open.values()))

    def get(self, uid: str, prompt_uid: str, of_key: str | None = None) -> LiveTrajectory:
        """The open trajectory of this URL; an unknown one begins here.

        Args:
            of_key: the channel of the caller's key, for one that begins.

        Raises:
            TrajectoryClosedError, TrajectoryConflictError
        """
        trajectory = self.find(uid, prompt_uid, of_key)
        if trajectory.closed is not None:
            raise closed_error(uid, trajectory.closed)
        return trajectory

    def find(self, uid: str, prompt_uid: str, of_key: str | None = None) -> LiveTrajectory:
        """As `get`, but closed ones are returned too: closing them again is the pool's to judge."""
        trajectory = self._open.get(uid)
        if trajectory is None and uid in self._closed:
            trajectory = self._make(*self._closed[uid])
        elif trajectory is None:
            channel = self._channel_of(prompt_uid, of_key)
            trajectory = self.begin(Identity(uid, prompt_uid, channel))
        if trajectory.prompt_uid != prompt_uid:
            raise TrajectoryConflictError(
                f"trajectory {uid!r} belongs to prompt_uid {trajectory.prompt_uid!r}, not "
                f"{prompt_uid!r}; use the base_url as it was handed out"
            )
        return trajectory

    def begin(self, identity: Identity) -> LiveTrajectory:
        """A trajectory of this gateway that is not known yet."""
        trajectory = self._open[identity.uid] = self._make(identity)
        return trajectory

    def unrecorded(self, why: Unrecorded, of_key: str | None) -> LiveTrajectory:
        """A trajectory for one request, of which nothing is stored or kept.

        Args:
            of_key: the channel of the caller's key, as which it is sampled.
        """
        uid = f"unrecorded-{uuid.uuid4().hex}"
        identity = Identity(uid, f"prompt-{uid}", self._channel_of("", of_key))
        trajectory = self._open[uid] = self._make(identity, unrecorded=why)
        return trajectory

    def elsewhere(self, uid: str, prompt_uid: str) -> LiveTrajectory:
        """A trajectory to open for another gateway: it is not kept here."""
        return LiveTrajectory(
            self._recording,
            Identity(uid, prompt_uid, self._channel_of(prompt_uid, None)),
            on_closed=lambda _: None,
            on_unused=lambda _: None,
            is_elsewhere=True,
        )

    def known(self, uid: str) -> LiveTrajectory | None:
        """The open trajectory of this id, if this gateway serves it."""
        return self._open.get(uid)

    def is_closed(self, uid: str) -> bool:
        return uid in self._closed

    def channel(self, uid: str) -> str | None:
        """Of a trajectory that is open here, or was closed here not long ago."""
        if (trajectory := self._open.get(uid)) is not None:
            return trajectory.channel
        return self._closed[uid][0].channel if uid in self._closed else None

    def note_step(self, uid: str, step_index: int) -> None:
        """A Step was submitted from outside (white-box)."""
        if (trajectory := self._open.get(uid)) is not None:
            trajectory.note_steps(step_index)

    def _make(
        self,
        identity: Identity,
        closed: str | None = None,
        unrecorded: Unrecorded | None = None,
    ) -> LiveTrajectory:
        return LiveTrajectory(
            self._recording,
            identity,
            on_closed=self._forget,
            on_unused=self._drop,
            closed=closed,
            unrecorded=unrecorded,
        )

    def _drop(self, trajectory: LiveTrajectory) -> None:
        """The pool never heard of it."""
        self._open.pop(trajectory.uid, None)
        self._on_unused(trajectory)

    def _forget(self, trajectory: LiveTrajectory) -> None:
        """A trajectory was closed: keep only what answers 410."""
        self._open.pop(trajectory.uid, None)
        self._on_closed(trajectory)
        identity = Identity(trajectory.uid, trajectory.prompt_uid, trajectory.channel)
        self._closed[trajectory.uid] = (identity, trajectory.closed or "closed")
        while len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)


def closed_error(uid: str, how: str) -> TrajectoryClosedError:
    return TrajectoryClosedError(
        f"trajectory {uid!r} was {how} and takes no more calls; start another with "
        "POST /init_trajectory"
    )
