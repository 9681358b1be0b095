"""This module makes one pool of N shards so that its users see no shard: each group lives in the
shard that its `prompt_uid` names.

    submit, complete, … ──► crc32(prompt_uid) % N ──► shard k
    statistics, events, pages ◄── merged ◄── all shards
    lease    look at all ──enough──► take a part of each ──all there──► Lease("0-17+1-9")
              ▲  │                     └──short──► give back, pause ──┐
              │  └──too little──► wait for a shard to have more ──────┤
              └───────────────────────────────────────────────────────┘

A client of one shard has nothing of this. A pool is away while one of its shards is: what is asked
of all waits for that one, what is about one group asks its shard alone.

A consumer never holds groups while it waits for others: two consumers could wait for each other. So
consumers are not served first come first. Credit for new groups is of the whole pool: a share per
shard could be used up in one shard, whose producer then waits while the consumer waits for groups
that other shards were to have. It is exact for the groups that one client opens; m clients at once
may go m - 1 groups over. What is of a shard only: the order of groups (a batch is the first ones of
each) and `drop_oldest`. One `trajectory_uid` under two `prompt_uid`s of different shards is refused
where both go through one client, and otherwise not noticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any, Final, TypeVar, cast
from zlib import crc32

from msgspec.structs import replace

from stepwell.datapool import ops
from stepwell.datapool import questions as asked
from stepwell.datapool.codec import PackedLease
from stepwell.datapool.core.channel import N_OLDEST_OPEN
from stepwell.datapool.errors import (
    DataPoolError,
    PoolFullError,
    PoolUnavailableError,
    TrajectoryConflictError,
    UnknownLeaseError,
    UnknownTrajectoryError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.ops import CURSOR, Op, R, is_number
from stepwell.datapool.remote.shard import Shard
from stepwell.datapool.selection import DryRun

T = TypeVar("T")

MAX_HOMES: Final = 50_000
"""Trajectories whose shard a client remembers; for others it asks."""
PAUSE_S: Final = 0.01
"""Seconds to pause after a batch that somebody else was faster to take; twice as long after each
other."""
MAX_PAUSE_S: Final = 1.0
TRIES: Final = 3
"""Tries of a lease that does not wait."""
IN_LINE_S: Final = 2.0
"""Seconds that a group that does not wait for credit may stand behind others that are being
opened."""
_MAY_BE_THERE: Final = (PoolUnavailableError, TrajectoryConflictError)
"""Refusals of a trajectory that its shard may hold all the same."""
INCOMPLETE: Final = "incomplete_batch"
"""Why a part of a batch went back."""


def shard_of(prompt_uid: object, n_shards: int) -> int:
    """The shard of a group. Anything but a string is for the first one to refuse."""
    if not isinstance(prompt_uid, str):
        return 0
    return crc32(prompt_uid.encode(errors="surrogatepass")) % n_shards


def lease_parts(
    lease_id: str, prompt_uids: Collection[str], n_shards: int
) -> dict[str, frozenset[str]]:
    """The parts of a lease over several shards, with the groups that each of them holds."""
    found: dict[str, frozenset[str]] = {}
    for part in lease_id.split("+"):
        of = _shard_of_part(part)
        found[part] = frozenset(uid for uid in prompt_uids if shard_of(uid, n_shards) == of)
    return found


def _shard_of_part(lease_id: str) -> int | None:
    """The shard whose lease, or part of one, has this id; None: no shard gives such ids."""
    number = lease_id.partition("-")[0].partition(".")[0]
    return int(number) if is_number(number) else None


class Shards:
    """The shards of a pool, as one.

    Args:
        shards: in their order.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self.n = len(self.shards)
        self._homes: dict[tuple[str, str], int] = {}
        """(channel, trajectory_uid) -> its shard"""
        self._random = random.Random()
        """Own generator: a run seeds Python's, and two consumers of one seed would pause alike."""
        self._turn = self._random.randrange(self.n)
        self._opening: dict[tuple[str, asyncio.AbstractEventLoop], asyncio.Lock] = {}
        """Locks with which the groups of a channel are opened one after the other."""
        self._full: set[tuple[str, asyncio.AbstractEventLoop]] = set()
        """Keys of `_opening` whose first group waits for credit."""
        self._unlimited: set[str] = set()
        """Channels where no group waits for credit."""
        self._background: set[asyncio.Future[Any]] = set()

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """Answer an operation for all shards; see `DataPoolClient.call`."""
        return cast(R, await self._call(op, timeout_s))

    async def _call(self, op: Op[Any], timeout_s: float | None) -> Any:
        if (merge := _MERGE.get(type(op))) is not None:
            return merge(op, await self._all(op))
        match op:
            case ops.SubmitSteps():
                return await self._submit(op)
            case ops.OpenGroup():
                return await self._open_group(op, timeout_s)
            case ops.LeaseBatch():
                return await self._lease(op, timeout_s)
            case ops.Ack() | ops.Nack() | ops.Renew():
                return await self._each_part(op)
            case asked.GetEvents():
                return await self._events(op, timeout_s)
            case asked.Listing():
                return await self._page(op)
        uid: str | None = getattr(op, "trajectory_uid", None)
        prompt_uid: str | None = getattr(op, "prompt_uid", None)
        channel: str = getattr(op, "channel", "")
        if uid is None:
            return await self.shards[shard_of(prompt_uid, self.n)].call(op, timeout_s)
        if prompt_uid is None:
            return await self._at_home(op, uid, channel)
        is_new = (channel, uid) not in self._homes
        home = self.home(uid, prompt_uid, channel)
        try:
            answer = await self.shards[home].call(op, timeout_s)
        except DataPoolError as e:
            if is_new and not isinstance(e, _MAY_BE_THERE):
                self._homes.pop((channel, uid), None)
            raise
        if isinstance(answer, ops.Resumed):
            self._homes[answer.channel, uid] = home
        return answer

    # -- one shard ---------------------------------------------------------------------------

    def home(self, trajectory_uid: str, prompt_uid: object, channel: str) -> int:
        """The shard of a trajectory, which is remembered.

        Raises:
            TrajectoryConflictError: it is in the shard of another prompt.
        """
        home = shard_of(prompt_uid, self.n)
        if self._homes.setdefault((channel, trajectory_uid), home) != home:
            raise TrajectoryConflictError(
                f"trajectory {trajectory_uid!r} in channel {channel!r} belongs to another prompt; "
                "use a new trajectory_uid per rollout"
            )
        if len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return home

    async def _submit(self, op: ops.SubmitSteps) -> list[Any]:
        """Steps of one shard, as of one group, or of several, in one call of each."""
        outcomes: list[list[Any]] = [[] for _ in op.trajectories]
        parts: dict[int, list[int]] = {}
        new: set[int] = set()
        for i, packed in enumerate(op.trajectories):
            if (op.channel, packed.trajectory_uid) not in self._homes:
                new.add(i)
            try:
                home = self.home(packed.trajectory_uid, packed.prompt_uid, op.channel)
            except TrajectoryConflictError as e:
                outcomes[i] = [ops.Refusal.of(e)] * len(packed.steps)
            else:
                parts.setdefault(home, []).append(i)
        if [len(part) for part in parts.values()] == [len(op.trajectories)]:
            (home,) = parts
            results = await self.shards[home].call(op)
            if ops.Refusal in map(type, results):  # as hardly ever
                each = iter(results)
                for i, packed in enumerate(op.trajectories):
                    outcomes[i] = list(islice(each, len(packed.steps)))
                self._forget_refused(op, new, outcomes)
            return results
        # All are begun now: what is called next, of whatever group, comes after them.
        began = [
            self.shards[home].call(replace(op, trajectories=[op.trajectories[i] for i in part]))
            for home, part in parts.items()
        ]
        answers = await self._gather(began)
        for part, answer in zip(parts.values(), answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, DataPoolError):
                raise answer
            each = iter([] if isinstance(answer, DataPoolError) else answer)
            for i in part:
                steps = op.trajectories[i].steps
                if isinstance(answer, DataPoolError):  # of the call: none was acknowledged
                    outcomes[i] = [ops.Refusal.of(answer)] * len(steps)
                else:
                    outcomes[i] = list(islice(each, len(steps)))
        self._forget_refused(op, new, outcomes)
        return [outcome for of_one in outcomes for outcome in of_one]

    def _forget_refused(
        self, op: ops.SubmitSteps, new: Iterable[int], outcomes: Sequence[Sequence[Any]]
    ) -> None:
        """A trajectory of which every step was refused lives nowhere: its next try may name another
        prompt."""
        for i in new:
            if all(
                isinstance(outcome, ops.Refusal) and not isinstance(outcome.error(), _MAY_BE_THERE)
                for outcome in outcomes[i]
            ):
                self._homes.pop((op.channel, op.trajectories[i].trajectory_uid), None)

    async def _at_home(self, op: Op[R], trajectory_uid: str, channel: str) -> R:
        """Ask the trajectory's shard. If it is not known here, all: those that do not have it
        refuse, and change nothing."""
        home = self._homes.get((channel, trajectory_uid))
        if home is not None:
            try:
                return await self.shards[home].call(op)
            except UnknownTrajectoryError:
                del self._homes[channel, trajectory_uid]
        answers = await self._gather(shard.call(op) for shard in self.shards)
        known = [a for a in answers if not isinstance(a, UnknownTrajectoryError)]
        # Its shard answered, perhaps: then it is of no interest that another one is gone.
        answered = [a for a in known if not isinstance(a, BaseException)]
        return _values(answered or known or answers)[0]

    # -- all, or the first that answers ------------------------------------------------------

    async def _gather(self, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _all(self, op: Op[R]) -> list[R]:
        """The answers of all shards; an error once all have answered."""
        calls: list[Awaitable[R]] = [shard.call(op) for shard in self.shards]
        return _values(await self._gather(calls))

    async def _first(self, ops: Mapping[int, Op[R]], timeout_s: float | None) -> dict[int, R]:
        """The answers of the shards that are first, within their time; the others are left."""

        async def call(k: int, op: Op[R]) -> R:  # not begun where its task is cancelled before
            return await self.shards[k].call(op, timeout_s)

        tasks = {k: asyncio.create_task(call(k, op)) for k, op in ops.items()}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            return {k: task.result() for k, task in tasks.items() if task.done()}
        finally:
            for task in tasks.values():
                task.cancel()

    def _later(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Let it run to its end, also if nobody waits for it any more."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    # -- batches -----------------------------------------------------------------------------

    async def _lease(
        self, op: ops.LeaseBatch, timeout_s: float | None
    ) -> PackedLease | ops.NoLease:
        """A whole batch, or nothing."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        look = asked.WaitAvailable(op.n_rollouts, op.channel)
        for tries in count(1):
            found = await self._all(look)
            while sum(each.n_groups for each in found) < op.batch_size:
                more = {
                    k: replace(look, more_than=each.n_groups)
                    for k, each in enumerate(found)
                    if not each.shut_down
                }
                if not more:
                    return "shut_down"
                if (left := end - time.monotonic()) <= 0:
                    return "nothing_yet"
                first = await self._first(more, None if left == math.inf else left)
                found = [first.get(k, each) for k, each in enumerate(found)]
            taking = self._later(self._take(op, {k: a.n_groups for k, a in enumerate(found)}))
            try:
                lease = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(self._give_back)
                raise
            if lease is not None:
                return lease
            if tries >= TRIES and time.monotonic() >= end:
                break
            # Somebody else was faster, or some groups had become too old. At random, so that two
            # consumers do not take from each other for ever.
            pause_s = min(MAX_PAUSE_S, PAUSE_S * 2**tries)
            await asyncio.sleep(self._random.random() * pause_s)
        return "nothing_yet"

    async def _take(self, op: ops.LeaseBatch, available: Mapping[int, int]) -> PackedLease | None:
        """The whole batch, or nothing."""
        self._turn += 1
        answers = await self._gather(
            self.shards[k].call(replace(op, batch_size=n, request_id=uuid.uuid4().hex))
            for k, n in parts(available, op.batch_size, self._turn).items()
        )
        leases = [lease for lease in answers if isinstance(lease, PackedLease)]
        if len(leases) == len(answers):
            return _whole(leases)
        for lease in leases:
            self._later(self._each_part(ops.Nack(lease.lease_id, INCOMPLETE)))
        _values(answers)
        return None

    def _give_back(self, taking: asyncio.Future[PackedLease | None]) -> None:
        """Its consumer left."""
        if not taking.cancelled() and taking.exception() is None and taking.result() is not None:
            lease = cast(PackedLease, taking.result())
            self._later(self._each_part(ops.Nack(lease.lease_id, ops.LEFT)))

    async def _each_part(self, op: ops.Ack | ops.Nack | ops.Renew) -> float | None:
        """Ask every shard that the lease is from, whatever becomes of the others."""
        calls: list[tuple[int, Op[Any]]] = []
        for part in str(op.lease_id).split("+"):
            if (number := _shard_of_part(part)) is None or number >= self.n:
                raise UnknownLeaseError(
                    f"lease {op.lease_id!r} is unknown; it is not from this pool of {self.n} "
                    "shards: lease again"
                )
            calls.append((number, replace(op, lease_id=part)))
        answers = await self._gather(self.shards[k].call(each) for k, each in calls)
        refused = [a for a in answers if isinstance(a, DataPoolError)]
        if refused and len(answers) > 1:
            raise type(refused[0])(
                f"{refused[0]} ({len(refused)} of {len(answers)} parts of lease {op.lease_id!r} "
                f"refuse {type(op).__name__}; the others are done)"
            )
        found = _values(answers)
        return min(found) if isinstance(op, ops.Renew) else None

    # -- credit for new groups ---------------------------------------------------------------

    async def _open_group(self, op: ops.OpenGroup, timeout_s: float | None) -> ops.SubmitOutcome:
        """Open it once the whole pool has credit for one more."""
        home = shard_of(op.prompt_uid, self.n)
        shard, look = self.shards[home], asked.WaitCredit(op.prompt_uid, op.channel)
        line = op.channel, asyncio.get_running_loop()
        lock = self._opening.setdefault(line, asyncio.Lock())
        if op.channel in self._unlimited or (
            line in self._full and (await shard.call(look)).is_known  # it need not stand in line
        ):
            return await shard.call(op, timeout_s)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, IN_LINE_S)):
                await lock.acquire()
        except TimeoutError:
            raise PoolFullError(
                f"channel {op.channel!r} has no credit; group {op.prompt_uid!r} waits behind "
                "others: raise the limit or timeout_s"
            ) from None
        try:
            while True:
                credits = await self._all(look)
                if not any(credit.used for credit in credits):
                    self._unlimited.add(op.channel)
                full = _no_credit(credits)
                left = None if end == math.inf else max(0.0, end - time.monotonic())
                is_shut = any(credit.shut_down for credit in credits)
                if full is None or credits[home].is_known or is_shut:
                    return await shard.call(op, left)
                if left == 0:
                    raise PoolFullError(
                        f"channel {op.channel!r} {full}; group {op.prompt_uid!r} waits until one "
                        "is leased: raise the limit or timeout_s"
                    )
                freer = {k: replace(look, before=c.used) for k, c in enumerate(credits)}
                self._full.add(line)
                await self._first(freer, left)
        finally:
            self._full.discard(line)
            lock.release()

    # -- news and pages ----------------------------------------------------------------------

    async def _events(self, op: asked.GetEvents, timeout_s: float | None) -> Events:
        """Events of all shards, by time; each numbers its own."""
        cursors = [""] * self.n if op.cursor is None else op.cursor.split(",")
        if len(cursors) != self.n:
            CURSOR.refuse("cursor", op.cursor)
        each = {k: replace(op, cursor=cursor or None) for k, cursor in enumerate(cursors)}
        calls = (self.shards[k].call(mine) for k, mine in each.items())
        pages = dict(enumerate(_values(await self._gather(calls))))
        if timeout_s != 0 and not any(page.events for page in pages.values()):
            pages |= await self._first(each, timeout_s)
        in_order = heapq.merge(
            *([(event.time, k, event) for event in page.events] for k, page in pages.items()),
            key=lambda item: item[0],
        )
        first = list(islice(in_order, op.limit))
        for k, page in pages.items():
            cursors[k] = _cursor(page, [event.number for _, at, event in first if at == k])
        lost = any(page.lost for page in pages.values())
        return Events(tuple(e for *_, e in first), ",".join(cursors), lost)

    async def _page(self, op: asked.Listing[Any]) -> Any:
        """A page of a listing, shard by shard."""
        one = op.filters.get("prompt_uid")
        k, at = 0 if one is None else shard_of(one, self.n), ""
        if op.cursor is not None:
            number, slash, at = str(op.cursor).partition("/")
            if not (slash and is_number(number) and int(number) < self.n):
                CURSOR.refuse("cursor", op.cursor)
            k = int(number)
        while True:
            page = await self.shards[k].call(replace(op, cursor=at or None))
            if page.cursor is not None:
                return dataclasses.replace(page, cursor=f"{k}/{page.cursor}")
            if one is not None or k + 1 == self.n:
                return page
            k, at = k + 1, ""
            if page.items:
                return dataclasses.replace(page, cursor=f"{k}/")


def _values(answers: Iterable[T | BaseException]) -> list[T]:
    """The answers; the first error among them is raised."""
    found: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


def parts(available: Mapping[int, int], n_groups: int, turn: int) -> dict[int, int]:
    """Split `n_groups` over the shards, as evenly as they have them; what remains comes from those
    whose turn it is."""
    order = sorted(available)
    order = order[turn % len(order) :] + order[: turn % len(order)] if order else []
    given: Counter[int] = Counter()
    while n_groups and (having := [k for k in order if given[k] < available[k]]):
        given.update(having[:n_groups])
        n_groups -= min(n_groups, len(having))
    return dict(given)


def _whole(leases: Sequence[PackedLease]) -> PackedLease:
    return replace(
        leases[0],
        lease_id="+".join(lease.lease_id for lease in leases),
        groups=[group for lease in leases for group in lease.groups],
        expires_at=min(lease.expires_at for lease in leases),
    )


def _no_credit(credits: Collection[asked.Credit]) -> str | None:
    """Why a group has to wait; None if it would be admitted by all limits together."""
    for name in dict.fromkeys(name for credit in credits for name in credit.used):
        pairs = [credit.used[name] for credit in credits if name in credit.used]
        used, limit = sum(used for used, _ in pairs), max(limit for _, limit in pairs)
        if used >= limit:
            return f"has used {used} of {limit} ({name}) in {len(pairs)} shards"
    return None


def _cursor(page: Events, served: Sequence[int]) -> str:
    """Return the cursor of a shard's next page, if only these event numbers of `page` were
    served."""
    if len(served) == len(page.events):
        return page.cursor
    # The first ones of a shard are served, so that those left are all later.
    last = served[-1] if served else page.events[0].number - 1
    return f"{page.cursor.rpartition(':')[0]}:{last}"


# -- answers of all, as one --------------------------------------------------------------------


def _statistics(op: asked.GetStatistics, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if op.channel is not None:
        return _merged(found)
    names = dict.fromkeys(name for stats in found for name in stats)
    return {name: _merged([stats[name] for stats in found if name in stats]) for name in names}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of one channel: counts are added, of the rest `_STATISTICS` says what."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key in _STATISTICS:
            result[key] = _STATISTICS[key](values)
        elif isinstance(values[0], Mapping):
            result[key] = _merged(values)
        else:
            result[key] = sum(values)
    return result


_STATISTICS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "policy_version": max,
    "oldest_policy_version_ready": lambda found: min(
        (v for v in found if v is not None), default=None
    ),
    "oldest_open_age_s": max,
    "oldest_open": lambda lists: sorted(
        (group for groups in lists for group in groups), key=lambda g: -g["age_s"]
    )[:N_OLDEST_OPEN],
    "shut_down": all,
    "has_consumer": any,
    # A consumer waits at every shard.
    "waiting": lambda counts: {k: max(c[k] for c in counts) for k in counts[0]},
}


def _deleted(op: object, found: Sequence[ops.Deleted]) -> ops.Deleted:
    both = sum(found, ops.Deleted())
    return ops.Deleted(both.trajectories, both.leased, any(each.more for each in found))


_MERGE: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ops.ReleaseLeases: lambda op, found: sum(found),
    ops.AdvanceVersion: lambda op, found: None,
    ops.Shutdown: lambda op, found: None,
    ops.Delete: _deleted,
    ops.DeleteTrajectory: _deleted,
    asked.GetStatistics: _statistics,
    asked.ReadDeparted: lambda op, found: [group for groups in found for group in groups],
    asked.FindUids: lambda op, found: [uid for uids in found for uid in uids][: op.limit],
    asked.ReadEnds: lambda op, found: {uid: ends for each in found for uid, ends in each.items()},
    asked.Describe: lambda op, found: {"n_shards": len(found), "shards": found},
    # Of one shard after the other: a fetch gets its part of the first ones of each.
    asked.DryRunOf: lambda op, runs: DryRun(
        op.batch_size, tuple(d for run in runs for d in run.decisions)
    ),
}
"""Merge of the shards' answers, for each operation or question that all are asked."""
