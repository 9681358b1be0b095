"""One logical pool out of N actors: each group lives in the shard that its `prompt_uid` names.

    submit, complete, … ──► crc32(prompt_uid) % N ──► shard 0   journal_dir/shard-0
    lease_batch ◄── a part of each ── "0-17+1-9" ◄──► shard 1   journal_dir/shard-1
    ack, nack, renew ──► the shards that the id names ⋯

A shard is a `DataPoolActor` like any other and knows nothing of the rest. So a shard that dies
takes its own groups out of reach until Ray has restarted it, and nothing else: consumers are served
what the others have, and producers of its groups wait.

A batch of several shards is leased without ever holding some groups while waiting for others, or
two consumers could wait for each other. Shards are asked how much they have; once that is enough,
every shard is asked for a part; parts that together are not enough after all, because somebody else
was faster, go back::

    look ──enough──► take ──all there──► Lease("0-17+1-9")
     ▲ └─too little─► wait for a shard to have more (long polls, woken exactly)
     └──── give back, pause a random moment ◄──short──┘

What is of a shard only: the order of groups (a batch is the first ones of each), batch filters
(each sees its shard's part), `drop_oldest`. What is of the whole pool: credit for `open_group`.
Dividing that among the shards would let one that happens to get many groups stop a producer while
the consumer waits for groups that the others were to have; so shards are asked, and it is exact for
the groups that one client opens. Steps of groups that nobody opened are blocked by their own shard.

Owns asking and merging, and `connect`, which gives the client of a pool whatever its number of
shards. Where shards live and how they start: `shards.py`; what a call means: `pool.py`.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from ray import ObjectRef
from ray.exceptions import ActorUnavailableError

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.core.channel import N_OLDEST_OPEN
from stepwell.datapool.core.pool import Credit, check_lease_request
from stepwell.datapool.core.records import Deleted, Resumed, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    JournalFullError,
    PoolFullError,
    TrajectoryConflictError,
    UnknownLeaseError,
    UnknownTrajectoryError,
)
from stepwell.datapool.inspect.events import Event, Events
from stepwell.datapool.inspect.rows import ExportedPage, GroupRow, Page, StepRow, TrajectoryRow
from stepwell.datapool.remote.actor import (
    DEFAULT_NAME,
    Available,
    DataPoolHandle,
    unavailable,
)
from stepwell.datapool.remote.client import FULL_S, SLICE_S, DataPoolClient, Results
from stepwell.datapool.remote.incarnation import Known, KnownPool
from stepwell.datapool.remote.outbox import RESTART_S, call, received
from stepwell.datapool.remote.shards import DOWN_S, find_shards, shard_of
from stepwell.datapool.selection import DryRun, Marks
from stepwell.datapool.types import TRAIN, Lease, Step

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S: Final = 2.0
"""How long a shard that does not answer is waited for by those who can do without."""
TAKE_S: Final = 30.0
"""The same for a part of a batch, which may be large."""
EVENTS_SLICE_S: Final = 1.0
PAUSE_S: Final = 0.01
"""After a first batch that somebody else was faster to take; twice as long after each other."""
MAX_PAUSE_S: Final = 1.0
MAX_HOMES: Final = 50_000
"""Trajectories whose shard a client remembers; for others it asks."""
TRIES: Final = 3
"""Of a lease that does not wait."""
INCOMPLETE: Final = "incomplete_batch"
"""Why a part of a batch went back."""


# -- looking at all shards -----------------------------------------------------------------------


async def once(method: Any, *arguments: Any) -> Any:
    """`outbox.call` for those who can do without the answer.

    Raises:
        ActorUnavailableError: the shard is down; the call may have been applied.
    """
    return await received(method.remote(*arguments))


class _Answer(Protocol):
    @property
    def shut_down(self) -> bool: ...


A = TypeVar("A", bound=_Answer)


class _Watch(Generic[A]):
    """What every shard answers to one question, kept up to date while somebody waits.

    Args:
        ask: a call to a shard: the last answer (None: answer at once), seconds to wait for another
            one, the name of this watch. A call with the same name ends the one before.
    """

    def __init__(
        self,
        client: ShardedDataPoolClient,
        ask: Callable[[KnownPool, A | None, float, str], ObjectRef[A]],
    ) -> None:
        self.latest: dict[int, A] = {}
        """Without the shards that are down."""
        self._client = client
        self._pools = client.pools
        self._ask = ask
        self._name = uuid.uuid4().hex
        self._followers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._answered_at = time.monotonic()

    async def look(self) -> None:
        """Ask every shard."""
        self._stop()
        answers = await self._client._each(self._look_at)
        self.latest = {k: answer for k, answer in enumerate(answers) if answer is not None}

    async def changed(self, timeout_s: float, others: Iterable[asyncio.Future[Any]] = ()) -> None:
        """Return once an answer is another, one of `others` is done, or after `timeout_s`.

        Raises:
            PoolUnavailableError: a shard has ended for good, or none can be reached for long.
        """
        if not self._followers:
            self._answered_at = time.monotonic()
            self._followers = [
                asyncio.create_task(self._follow(k)) for k in range(len(self._pools))
            ]
        self._changed.clear()
        change = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                (*self._followers, *others, change),
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            change.cancel()
        for follower in self._followers:
            if follower.done():
                follower.result()  # it ends by an error only

    def close(self) -> None:
        """Leave no long poll behind."""
        if self._followers:
            self._stop()
            for pool in self._pools:
                self._ask(pool, None, 0, self._name)

    async def _look_at(self, k: int) -> A:
        answer: A = await received(self._ask(self._pools[k], None, 0, self._name))
        return answer

    async def _follow(self, k: int) -> None:
        while True:
            seen = self.latest.get(k)
            if seen is None or seen.shut_down:
                await asyncio.sleep(DOWN_S)  # it would answer at once
            try:
                answer = await received(self._ask(self._pools[k], seen, SLICE_S, self._name))
            except ActorUnavailableError as e:
                self.latest.pop(k, None)
                if not self.latest and time.monotonic() - self._answered_at > RESTART_S:
                    raise unavailable(e) from e
                continue
            self._answered_at = time.monotonic()
            if answer != seen:
                self.latest[k] = answer
                self._changed.set()

    def _stop(self) -> None:
        for follower in self._followers:
            if not follower.cancel() and not follower.cancelled():
                follower.exception()
        self._followers = []


def _end(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


# -- the client ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    """Those who open groups in one channel, first come first."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opening: set[asyncio.Task[SubmitOutcome]] = field(default_factory=set)
    """Admitted, and perhaps not in their shard yet."""
    credits: dict[int, Credit] = field(default_factory=dict)
    """What each shard answered last; what is in one that is down still counts."""
    full: str | None = None
    """Why the first one waits."""
    is_unlimited: bool = False


class ShardedDataPoolClient(DataPoolClient):
    """`DataPoolClient` of a pool of several shards: the same methods, one logical pool.

    Two calls for the same trajectory or group keep their order. One `trajectory_uid` under two
    `prompt_uid`s of different shards is refused where both go through one client, and otherwise
    not noticed.

    Args:
        actors: what `start_shards` returned, in that order.
        met: as of `DataPoolClient`, for each.
    """

    def __init__(
        self, actors: Sequence[DataPoolHandle], met: Sequence[Known] | None = None
    ) -> None:
        # Not the base's: there is no actor for a method that is not overridden to go to.
        self.actors = tuple(actors)
        known = [None] * len(self.actors) if met is None else met
        self.shards = [DataPoolClient(*each) for each in zip(self.actors, known, strict=True)]
        self.pools = [shard._pool for shard in self.shards]
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()
        """(channel, trajectory_uid) -> its shard"""
        self._lines: dict[str, _Line] = {}
        self._statistics: dict[tuple[int, str | None], dict[str, Any]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._silent: set[int] = set()
        """Shards that owe an answer. A call to an actor that Ray restarts waits until it is up."""
        self._n_leases = random.randrange(len(self.shards))

    def __reduce__(self) -> tuple[type[ShardedDataPoolClient], tuple[Any, ...]]:
        return (type(self), (self.actors, [pool.met for pool in self.pools]))

    def shard_of(self, prompt_uid: str) -> int:
        """Number of the shard that holds this group."""
        return shard_of(prompt_uid, len(self.shards))

    # -- producers ---------------------------------------------------------------------------

    async def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        end = _end(timeout_s)
        home = self.shard_of(prompt_uid)

        async def open_() -> SubmitOutcome:
            return await self.shards[home].open_group(
                prompt_uid,
                n_rollouts,
                deadline_s,
                min_rollouts,
                metadata,
                channel,
                None if timeout_s is None else _left(end),
            )

        line = self._lines.setdefault(channel, _Line())
        if line.is_unlimited:
            return await open_()
        if line.full is not None:
            credit: Credit = await call(self.pools[home].wait_credit, prompt_uid, channel)
            if credit.is_known:
                return await open_()
        try:
            # A moment at least: who is before us may be just about to be admitted.
            wait = ANSWER_S if line.full is None else 0.0
            async with asyncio.timeout(None if timeout_s is None else max(_left(end), wait)):
                await line.lock.acquire()
        except TimeoutError:
            raise PoolFullError(
                f"channel {channel!r} {line.full or 'is busy'}; group {prompt_uid!r} waits behind "
                "others: raise the limit or timeout_s"
            ) from None
        try:
            await self._wait_for_credit(line, home, prompt_uid, channel, end)
            opening = asyncio.create_task(open_())
            line.opening.add(opening)
            opening.add_done_callback(line.opening.discard)
        finally:
            line.lock.release()
        # Outside the line: the shard may be down, and the next group of another one.
        return await opening

    async def _wait_for_credit(
        self, line: _Line, home: int, prompt_uid: str, channel: str, end: float
    ) -> None:
        """Return once the whole pool has credit for one group more."""

        def ask(
            pool: KnownPool, before: Credit | None, timeout_s: float, name: str
        ) -> ObjectRef[Credit]:
            used = None if before is None else before.used
            return cast(
                "ObjectRef[Credit]",
                pool.wait_credit.remote(prompt_uid, channel, used, timeout_s, name),
            )

        watch = _Watch(self, ask)
        try:
            while True:
                # From before asking: whoever of these was not there yet when its shard answered
                # is counted, and who was is counted twice, until it is done.
                earlier = tuple(line.opening)
                await watch.look()
                line.credits |= watch.latest
                credits = line.credits.values()
                if home in watch.latest and watch.latest[home].is_known:
                    return
                if any(credit.shut_down for credit in credits):
                    return  # which is for the shard to say
                if len(credits) == len(self.shards) and not any(c.used for c in credits):
                    line.is_unlimited = True
                    return
                line.full = _no_credit(credits, len(earlier))
                if line.full is None:
                    return
                if not _left(end):
                    raise PoolFullError(
                        f"channel {channel!r} {line.full}; group {prompt_uid!r} waits until one "
                        "is leased: raise the limit or timeout_s"
                    )
                await watch.changed(_left(end), earlier)
        finally:
            line.full = None
            watch.close()

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        home = self.shard_of(prompt_uid)
        is_new = self._move_in(trajectory_uid, home, channel)
        await asyncio.sleep(0)  # see `_submit`
        try:
            return await self.shards[home].open_trajectory(
                trajectory_uid, prompt_uid, attempt, metadata, channel, timeout_s
            )
        except DataPoolError:
            if is_new:
                self._move_out(trajectory_uid, channel)
            raise

    async def resume_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> Resumed:
        home = self.shard_of(prompt_uid)
        is_new = self._move_in(trajectory_uid, home, channel)
        await asyncio.sleep(0)  # see `_submit`
        try:
            resumed = await self.shards[home].resume_trajectory(
                trajectory_uid, prompt_uid, attempt, metadata, channel, elsewhere, timeout_s
            )
        except DataPoolError:
            if is_new:
                self._move_out(trajectory_uid, channel)
            raise
        if resumed.channel != channel:
            self._move_out(trajectory_uid, channel)
            self._move_in(trajectory_uid, home, resumed.channel)
        return resumed

    async def _submit(
        self, steps: Sequence[Step], channel: str, timeout_s: float | None
    ) -> Results:
        results: dict[int, SubmitOutcome | DataPoolError] = {}
        parts: dict[int, list[int]] = {}
        new: set[str] = set()
        for i, step in enumerate(steps):
            home = self.shard_of(step.prompt_uid)
            try:
                if self._move_in(step.trajectory_uid, home, channel):
                    new.add(step.trajectory_uid)
                parts.setdefault(home, []).append(i)
            except DataPoolError as e:
                results[i] = e
        # Each part is sent one turn of the event loop from now. So is all else about trajectories:
        # what was called first goes first.
        answers = await asyncio.gather(
            *(
                self.shards[k]._submit([steps[i] for i in part], channel, timeout_s)
                for k, part in parts.items()
            ),
            return_exceptions=True,
        )
        for part, answer in zip(parts.values(), answers, strict=True):
            if isinstance(answer, DataPoolError):  # of the call: none of these was acknowledged
                answer = [answer] * len(part)
            elif isinstance(answer, BaseException):
                raise answer
            results.update(zip(part, answer, strict=True))
        accepted = {s.trajectory_uid for i, s in enumerate(steps) if isinstance(results[i], str)}
        for trajectory_uid in new - accepted:
            self._move_out(trajectory_uid, channel)
        return [results[i] for i in range(len(steps))]

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        return await self._at_home(
            trajectory_uid,
            channel,
            lambda shard: shard.complete_trajectory(trajectory_uid, reward, metadata, channel),
        )

    async def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        return await self._at_home(
            trajectory_uid,
            channel,
            lambda shard: shard.abort_trajectory(trajectory_uid, reason, will_retry, channel),
        )

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        await self.shards[self.shard_of(prompt_uid)].drop_group(prompt_uid, reason, channel)

    # -- consumers ---------------------------------------------------------------------------

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if lease is None:
            return None
        for k, part in self._parts(lease.lease_id, "acked"):
            self.shards[k]._outbox.post("ack", part, subjects=[part])
        return lease.steps

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """`DataPoolClient.lease_batch`. The groups of a batch stand shard by shard. Consumers are
        not served first come first."""
        check_lease_request(n_rollouts, batch_size, lease_s)
        end = _end(timeout_s)
        tries = 0

        def ask(
            pool: KnownPool, before: Available | None, timeout_s: float, name: str
        ) -> ObjectRef[Available]:
            more_than = -1 if before is None else before.n_groups
            return cast(
                "ObjectRef[Available]",
                pool.wait_available.remote(n_rollouts, channel, more_than, timeout_s, name),
            )

        watch = _Watch(self, ask)
        try:
            await watch.look()
            while True:
                available = {k: answer.n_groups for k, answer in watch.latest.items()}
                if sum(available.values()) >= batch_size:
                    try:
                        lease = await self._take(
                            available, n_rollouts, channel, batch_size, lease_s
                        )
                    except JournalFullError as e:
                        if not _left(end):
                            raise
                        log.warning("no lease yet: %s", e)
                        await asyncio.sleep(min(FULL_S, _left(end)))
                        await watch.look()
                        continue
                    if lease is not None:
                        return lease
                    tries += 1
                    if not _left(end) and tries >= TRIES:
                        return None
                    # Somebody else was faster, or some groups had become too old. At random, so
                    # that two consumers do not take from each other for ever.
                    await asyncio.sleep(random.random() * min(MAX_PAUSE_S, PAUSE_S * 2**tries))
                    await watch.look()
                    continue
                if not _left(end) or (
                    len(watch.latest) == len(self.shards)
                    and all(answer.shut_down for answer in watch.latest.values())
                ):
                    return None
                await watch.changed(_left(end))
        finally:
            watch.close()

    async def _take(
        self,
        available: dict[int, int],
        n_rollouts: int | None,
        channel: str,
        batch_size: int,
        lease_s: float | None,
    ) -> Lease | None:
        """The whole batch, or nothing."""
        self._n_leases += 1
        held: dict[str, int] = {}
        lost: dict[str, int] = {}  # a shard that went down may have leased, or not
        leases: list[Lease] = []
        missing = batch_size
        try:
            while missing and (plan := parts(available, missing, self._n_leases)):
                requests = {uuid.uuid4().hex: k for k in plan}
                lost |= requests
                tasks = [
                    self._later(
                        self.shards[k]._lease(
                            n_rollouts, channel, plan[k], 0, lease_s, request_id, True, ask=once
                        )
                    )
                    for request_id, k in requests.items()
                ]
                await asyncio.wait(tasks, timeout=TAKE_S)
                for (request_id, k), task in zip(requests.items(), tasks, strict=True):
                    answer = _result(task)  # None: the shard went down
                    n = len(answer.groups) if isinstance(answer, Lease) else 0
                    available[k] = available[k] - n if n == plan[k] else 0
                    missing -= n
                    if isinstance(answer, Lease):
                        leases.append(answer)
                        held[request_id] = lost.pop(request_id)
        except BaseException:  # also a cancellation: what was taken goes back
            self._return(held | lost)
            raise
        if missing == 0:
            self._return(lost)
            return _whole(leases)
        await asyncio.wait(self._return(held | lost), timeout=ANSWER_S)
        return None

    def _return(self, held: Mapping[str, int]) -> list[asyncio.Task[Any]]:
        """Nack the leases that were given for these requests, also if the answer was lost."""
        return [
            self._later(call(self.pools[k].release_request, request_id, INCOMPLETE))
            for request_id, k in held.items()
        ]

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`, in every shard that the lease is from, whatever becomes of the others."""
        await self._each_part(lease_id, "acked", lambda shard, part: shard.ack(part))

    async def nack(self, lease_id: str, reason: str = "") -> None:
        await self._each_part(lease_id, "nacked", lambda shard, part: shard.nack(part, reason))

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        return min(
            await self._each_part(
                lease_id, "renewed", lambda shard, part: shard.renew(part, lease_s)
            )
        )

    async def _each_part(
        self,
        lease_id: str,
        wanted: str,
        ask: Callable[[DataPoolClient, str], Awaitable[T]],
    ) -> list[T]:
        parts = self._parts(lease_id, wanted)
        answers = await asyncio.gather(
            *(ask(self.shards[k], part) for k, part in parts), return_exceptions=True
        )
        refused = [a for a in answers if isinstance(a, DataPoolError)]
        if refused and len(parts) > 1:
            raise type(refused[0])(
                f"{refused[0]} ({len(refused)} of {len(parts)} parts of lease {lease_id!r} were "
                f"not {wanted}; the others are)"
            )
        return _results(answers)

    def _parts(self, lease_id: str, wanted: str) -> list[tuple[int, str]]:
        """The leases that a lease consists of, and their shards, which their ids begin with."""
        parts = []
        for part in str(lease_id).split("+"):
            number = part.partition("-")[0].partition(".")[0]
            if not (number.isascii() and number.isdigit() and int(number) < len(self.shards)):
                raise UnknownLeaseError(
                    f"lease {lease_id!r} is unknown and cannot be {wanted}; it is not from this "
                    f"pool of {len(self.shards)} shards: lease again"
                )
            parts.append((int(number), part))
        return parts

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        return sum(await self._all(lambda shard: shard.release_leases(channel, reason)))

    # -- people and sources ------------------------------------------------------------------

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        return await self._at_home(
            trajectory_uid,
            channel,
            lambda shard: shard.set_reward(trajectory_uid, reward, step_index, channel),
        )

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        **marks: Any,
    ) -> Marks:
        if trajectory_uid is not None and prompt_uid is None:
            return await self._at_home(
                trajectory_uid,
                channel,
                lambda shard: shard.mark(None, trajectory_uid, channel, **marks),
            )
        home = self.shards[shard_of(prompt_uid, len(self.shards))]
        return await home.mark(prompt_uid, trajectory_uid, channel, **marks)

    async def delete(self, trajectory_uid: str | None = None, tag: str | None = None) -> Deleted:
        found = await self._all(lambda shard: shard.delete(trajectory_uid, tag))
        return sum(found, Deleted())

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        await self._all(lambda shard: shard.advance_version(version, channel))

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """`DataPool.dry_run` of each shard for the whole batch, one after the other: a fetch gets
        its part of the first ones of each."""
        runs = await self._all(lambda shard: shard.dry_run(selection, channel, batch_size))
        return DryRun(batch_size, tuple(d for run in runs for d in run.decisions))

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """`DataPoolActor.get_events` of all shards, by time; each numbers its own. A shard that is
        down is left out until it is back."""
        end = _end(timeout_s)
        cursors = self._cursors(cursor)
        lost = False
        wait = 0.0

        async def ask(k: int) -> Events:
            page: Events = await once(
                self.pools[k].get_events, cursors[k], channel, kinds, limit, wait
            )
            return page

        while True:
            pages = await (self._first_events(ask, wait) if wait else self._each(ask))
            lost = lost or any(page is not None and page.lost for page in pages)
            in_order = heapq.merge(
                *(
                    [(event.time, k, event) for event in page.events]
                    for k, page in enumerate(pages)
                    if page is not None
                ),
                key=lambda item: item[0],
            )
            found = list(islice(in_order, limit))
            cursors = [
                before if page is None else _cursor(k, page, found)
                for k, (before, page) in enumerate(zip(cursors, pages, strict=True))
            ]
            if found or not _left(end):
                return Events(
                    tuple(event for *_, event in found),
                    ",".join(each or "" for each in cursors),
                    lost,
                )
            wait = min(_left(end), EVENTS_SLICE_S)
            if all(page is None for page in pages):
                await asyncio.sleep(min(wait, DOWN_S))

    async def _first_events(
        self, ask: Callable[[int], Awaitable[Events]], wait_s: float
    ) -> list[Events | None]:
        """What there is as soon as a shard has some."""
        tasks = {k: self._later(ask(k)) for k in range(len(self.shards)) if k not in self._silent}
        pending = set(tasks.values())
        end = _end(wait_s)
        while pending and _left(end):
            done, pending = await asyncio.wait(
                pending, timeout=_left(end), return_when=asyncio.FIRST_COMPLETED
            )
            if any(task.exception() is not None or task.result().events for task in done):
                break
        return [_result(tasks.get(k)) for k in range(len(self.shards))]

    def _cursors(self, cursor: str | None) -> list[str | None]:
        n = len(self.shards)
        if cursor is None:
            return [None] * n
        cursors = cursor.split(",")
        if len(cursors) != n:
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}; pass one that get_events of this pool of {n} shards "
                "returned, or None"
            )
        return [each or None for each in cursors]

    # -- reading -----------------------------------------------------------------------------

    async def list_groups(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[GroupRow]:
        """`DataPool.list_groups`, shard by shard."""
        return await self._page(
            cursor, filters, lambda shard, at: shard.list_groups(channel, at, limit, **filters)
        )

    async def list_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[TrajectoryRow]:
        """`DataPool.list_trajectories`, shard by shard."""
        return await self._page(
            cursor,
            filters,
            lambda shard, at: shard.list_trajectories(channel, at, limit, **filters),
        )

    async def list_steps(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        include_tokens: bool = False,
        **filters: Any,
    ) -> Page[StepRow]:
        """`DataPool.list_steps`, shard by shard."""
        return await self._page(
            cursor,
            filters,
            lambda shard, at: shard.list_steps(channel, at, limit, include_tokens, **filters),
        )

    async def read_trajectories(
        self, channel: str = TRAIN, cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> ExportedPage:
        """`DataPool.read_trajectories`, shard by shard."""
        k, at = self._place(cursor, filters)
        page = await self.shards[k].read_trajectories(channel, at, limit, **filters)
        return replace(page, cursor=self._next(k, page.cursor, filters))

    async def _page(
        self,
        cursor: str | None,
        filters: Mapping[str, Any],
        read: Callable[[DataPoolClient, str | None], Awaitable[Page[T]]],
    ) -> Page[T]:
        k, at = self._place(cursor, filters)
        while True:
            page = await read(self.shards[k], at)
            following = self._next(k, page.cursor, filters)
            if page.items or page.cursor is not None or following is None:
                return Page(page.items, following)
            k, at = k + 1, None

    def _place(self, cursor: str | None, filters: Mapping[str, Any]) -> tuple[int, str | None]:
        """The shard to read, and its own cursor."""
        if cursor is None:
            return (self.shard_of(filters["prompt_uid"]) if "prompt_uid" in filters else 0), None
        number, slash, at = cursor.partition("/") if isinstance(cursor, str) else ("", "", "")
        if not (slash and number.isascii() and number.isdigit() and int(number) < len(self.shards)):
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}; pass one that the page before came with, or None"
            )
        return int(number), at or None

    def _next(self, k: int, at: str | None, filters: Mapping[str, Any]) -> str | None:
        """Where the next page begins."""
        if at is not None:
            return f"{k}/{at}"
        if "prompt_uid" in filters or k + 1 == len(self.shards):
            return None
        return f"{k + 1}/"

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics` of the whole pool. Of a shard that is down, what it answered
        last; `shards` says which those are. `waiting` is that of the busiest shard."""
        answers = await self._each(partial(self._statistics_of, channel))
        down = [k for k, stats in enumerate(answers) if stats is None]
        for k in down:
            answers[k] = self._statistics.get((k, channel)) or await self._statistics_of(channel, k)
        parts = [stats for stats in answers if stats is not None]
        self._statistics |= {(k, channel): stats for k, stats in enumerate(parts)}
        shards = {"total": len(self.shards), "down": down}
        if channel is not None:
            return _merged(parts) | {"shards": shards}
        names = dict.fromkeys(name for stats in parts for name in stats)
        return {
            name: _merged([stats[name] for stats in parts if name in stats]) | {"shards": shards}
            for name in names
        }

    async def _statistics_of(self, channel: str | None, k: int) -> dict[str, Any]:
        return await self.shards[k].get_statistics(channel)

    async def describe(self) -> dict[str, Any]:
        """`DataPoolActor.describe` of each shard, or `{"shard": k, "down": True}`."""
        answers = await self._each(lambda k: self.shards[k].describe())
        return {
            "n_shards": len(self.shards),
            "shards": [answer or {"shard": k, "down": True} for k, answer in enumerate(answers)],
        }

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPoolActor.shutdown` of every shard; waits for one that is down."""
        await self._all(lambda shard: shard.shutdown(channel))

    # -- inside ------------------------------------------------------------------------------

    async def _each(self, ask: Callable[[int], Awaitable[T]]) -> list[T | None]:
        """The answers of all shards; None of one that is down. One that is silent for `ANSWER_S`
        counts as down, and is not waited for again, until it has answered."""
        tasks = {k: self._later(ask(k)) for k in range(len(self.shards)) if k not in self._silent}
        if tasks:
            await asyncio.wait(tasks.values(), timeout=ANSWER_S)
        for k, task in tasks.items():
            if not task.done():
                self._silent.add(k)
                task.add_done_callback(partial(self._heard, k))
        return [_result(tasks.get(k)) for k in range(len(self.shards))]

    def _heard(self, k: int, _: asyncio.Task[Any]) -> None:
        self._silent.discard(k)

    async def _all(self, ask: Callable[[DataPoolClient], Awaitable[T]]) -> list[T]:
        """The answers of all shards; an error once all have answered."""
        return _results(await asyncio.gather(*map(ask, self.shards), return_exceptions=True))

    def _move_in(self, trajectory_uid: str, home: int, channel: str) -> bool:
        """Remember the trajectory's shard; whether it was not known."""
        key = channel, trajectory_uid
        known = self._homes.get(key)
        if known is None:
            self._homes[key] = home
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)
            return True
        if known != home:
            raise TrajectoryConflictError(
                f"trajectory {trajectory_uid!r} in channel {channel!r} belongs to another prompt; "
                "use a new trajectory_uid per rollout"
            )
        self._homes.move_to_end(key)
        return False

    def _move_out(self, trajectory_uid: str, channel: str) -> None:
        self._homes.pop((channel, trajectory_uid), None)

    async def _at_home(
        self, trajectory_uid: str, channel: str, ask: Callable[[DataPoolClient], Awaitable[T]]
    ) -> T:
        """Ask the trajectory's shard. If it is not known here, all: those that do not have it
        refuse, and change nothing."""
        home = self._homes.get((channel, trajectory_uid))
        await asyncio.sleep(0)  # see `_submit`
        if home is not None:
            try:
                return await ask(self.shards[home])
            except UnknownTrajectoryError:
                self._move_out(trajectory_uid, channel)
        tasks = [self._later(ask(shard)) for shard in self.shards]
        unknown = UnknownTrajectoryError(f"trajectory {trajectory_uid!r} is unknown to all shards")
        for answer in asyncio.as_completed(tasks):
            try:
                return await answer
            except UnknownTrajectoryError as e:
                unknown = e  # as the shard words it, with the remedy
        raise unknown

    def _later(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Let it run to its end, also if nobody waits for it any more."""

        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a call to a shard failed: %s", error)


def client_of(actors: Sequence[DataPoolHandle]) -> DataPoolClient:
    """A client of the pool that `start_shards` started."""
    return DataPoolClient(actors[0]) if len(actors) == 1 else ShardedDataPoolClient(actors)


def connect(name: str = DEFAULT_NAME, namespace: str | None = None) -> DataPoolClient:
    """A client of the pool that was started under this name, whatever its number of shards.
    Blocks for a call.

    Raises:
        PoolUnavailableError: there is none, or one of its shards is gone.
    """
    return client_of(find_shards(name, namespace))


# -- merging -------------------------------------------------------------------------------------


def parts(available: Mapping[int, int], n_groups: int, turn: int) -> dict[int, int]:
    """How many of `n_groups` each shard gives: as even as they have them, and what remains from
    those whose turn it is."""
    order = sorted(available)
    order = order[turn % len(order) :] + order[: turn % len(order)] if order else []
    given: Counter[int] = Counter()
    while n_groups and (having := [k for k in order if given[k] < available[k]]):
        given.update(having[:n_groups])
        n_groups -= min(n_groups, len(having))
    return dict(given)


def _result(task: asyncio.Task[T] | None) -> T | None:
    """Of a call to a shard; None if it was not made, is not back, or the shard is down."""
    try:
        return task.result() if task is not None and task.done() else None
    except ActorUnavailableError:
        return None


def _results(answers: Sequence[T | BaseException]) -> list[T]:
    results: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.append(answer)
    return results


def _whole(leases: Sequence[Lease]) -> Lease:
    if len(leases) == 1:
        return leases[0]
    return replace(
        leases[0],
        lease_id="+".join(lease.lease_id for lease in leases),
        groups=tuple(group for lease in leases for group in lease.groups),
        expires_at=min(lease.expires_at for lease in leases),
    )


def _no_credit(credits: Collection[Credit], n_more: int) -> str | None:
    """Why a group has to wait; None if it would be admitted by all limits together."""
    for name in dict.fromkeys(name for credit in credits for name in credit.used):
        pairs = [credit.used[name] for credit in credits if name in credit.used]
        used = sum(used for used, _ in pairs) + (n_more if name in _GROUP_LIMITS else 0)
        limit = max(limit for _, limit in pairs)
        if used >= limit:
            return f"has used {used} of {limit} ({name}) in {len(pairs)} shards"
    return None


_GROUP_LIMITS: Final = ("max_outstanding_groups", "max_ahead_versions")
"""Limits that count the groups that are being opened."""


def _cursor(k: int, page: Events, served: Sequence[tuple[float, int, Event]]) -> str:
    """Where the next page of shard `k` begins, of whose events only some were served."""
    numbers = [event.number for _, shard, event in served if shard == k]
    if len(numbers) == len(page.events):
        return page.cursor
    # The first ones of a shard are served, so that those left are all later.
    last = numbers[-1] if numbers else page.events[0].number - 1
    return f"{page.cursor.rpartition(':')[0]}:{last}"


_MERGE: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "policy_version": max,
    "oldest_policy_version_ready": lambda versions: min(
        (v for v in versions if v is not None), default=None
    ),
    "oldest_open_age_s": max,
    "oldest_open": lambda lists: sorted(
        (group for groups in lists for group in groups), key=lambda g: -g["age_s"]
    )[:N_OLDEST_OPEN],
    "shut_down": all,
    # A consumer waits at every shard.
    "waiting": lambda counts: {k: max(c[k] for c in counts) for k in counts[0]},
}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of one channel: counts are added, of the rest `_MERGE` says what."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key in _MERGE:
            merged[key] = _MERGE[key](values)
        elif isinstance(values[0], Mapping):
            merged[key] = _merged(values)
        else:
            merged[key] = sum(values)
    return merged
