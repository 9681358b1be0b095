"""This module makes one pool of N shards so that its users see no shard: each group lives in the
shard that its `prompt_uid` names.

    submit, complete, … ──► crc32(prompt_uid) % N ──► shard k
    statistics, events, pages ◄── merged ◄── all that answer

With one shard the client asks that one, and nothing of this is used. Every question to several is
asked by `ask`, which does not wait for one that is down. A batch out of several is leased by
`batches.py`, credit for new groups is of the whole pool (`credit.py`). What is of a shard only: the
order of groups (a batch is the first ones of each), batch filters (each sees its shard's part) and
`drop_oldest`.

One `trajectory_uid` under two `prompt_uid`s of different shards is refused where both go through
one client, and otherwise not noticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar
from zlib import crc32

from msgspec.structs import replace

from stepwell.datapool.core.channel import N_OLDEST_OPEN
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.inspect.rows import ExportedPage, Page
from stepwell.datapool.ops import Op, R, Resumed
from stepwell.datapool.questions import Describe, DryRunOf, GetEvents, GetStatistics, Listing
from stepwell.datapool.remote.link import Port
from stepwell.datapool.selection import DryRun

T = TypeVar("T")
P = TypeVar("P", bound=Page[Any] | ExportedPage)

ANSWER_S: Final = 2.0
"""How long a shard that does not answer is waited for by those who can do without."""
MAX_HOMES: Final = 50_000
"""Trajectories whose shard a client remembers; for others it asks."""


def shard_of(prompt_uid: object, n_shards: int) -> int:
    """The shard of a group. Anything but a string is for the first one to refuse."""
    if not isinstance(prompt_uid, str):
        return 0
    return crc32(prompt_uid.encode(errors="surrogatepass")) % n_shards


class Shards:
    """The shards of a pool, as one.

    Args:
        ports: the ways to them, in their order.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self.ports = tuple(ports)
        self.n = len(self.ports)
        self._homes: dict[tuple[str, str], int] = {}
        """(channel, trajectory_uid) -> its shard"""
        self._statistics: dict[tuple[int, str | None], dict[str, Any]] = {}
        self._silent: set[int] = set()
        """Shards that owe an answer."""
        self._background: set[asyncio.Future[Any]] = set()

    # -- one shard ---------------------------------------------------------------------------

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """The answer of the shard of the group, or else of the trajectory, that `op` is about."""
        uid: str | None = getattr(op, "trajectory_uid", None)
        prompt_uid: str | None = getattr(op, "prompt_uid", None)
        channel: str = getattr(op, "channel", "")
        if uid is not None and prompt_uid is None:
            return await self._at_home(op, uid, channel)
        home = shard_of(prompt_uid, self.n) if uid is None else self.home(uid, prompt_uid, channel)
        answer = await self.ports[home].call(op, timeout_s)
        if isinstance(answer, Resumed) and uid is not None:
            self._homes[answer.channel, uid] = home
        return answer

    def home(self, trajectory_uid: str, prompt_uid: object, channel: str) -> int:
        """The shard of a trajectory, which is remembered.

        Raises:
            TrajectoryConflictError: it is in the shard of another prompt.
        """
        if self.n == 1:
            return 0
        home = shard_of(prompt_uid, self.n)
        if self._homes.setdefault((channel, trajectory_uid), home) != home:
            raise TrajectoryConflictError(
                f"trajectory {trajectory_uid!r} in channel {channel!r} belongs to another prompt; "
                "use a new trajectory_uid per rollout"
            )
        if len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        return home

    async def _at_home(self, op: Op[R], trajectory_uid: str, channel: str) -> R:
        """Ask the trajectory's shard. If it is not known here, all: those that do not have it
        refuse, and change nothing."""
        home = self._homes.get((channel, trajectory_uid))
        if home is not None:
            try:
                found: R = await self.ports[home].call(op)
                return found
            except UnknownTrajectoryError:
                self._homes.pop((channel, trajectory_uid), None)
        error: DataPoolError = UnknownTrajectoryError(f"trajectory {trajectory_uid!r} is unknown")
        for answer in asyncio.as_completed([self.later(port.call(op)) for port in self.ports]):
            try:
                return await answer
            except DataPoolError as e:
                # One that is gone may be the one that has it.
                if not isinstance(e, UnknownTrajectoryError) or type(error) is type(e):
                    error = e
        raise error

    # -- all, or those that answer -----------------------------------------------------------

    async def all(self, op: Op[R]) -> list[R]:
        """The answers of all shards, however long one is down; an error once all have answered."""
        return values(
            await asyncio.gather(*(port.call(op) for port in self.ports), return_exceptions=True)
        )

    async def ask(
        self,
        ops: Mapping[int, Op[R]],
        timeout_s: float | None = 0.0,
        enough: Callable[[R], bool] = lambda answer: False,
        grace_s: float | None = None,
    ) -> dict[int, R]:
        """The answers of these shards, or those there are once one is `enough`. A shard that is
        silent for `grace_s` (None: `ANSWER_S`) longer counts as down: it is left out, here and
        where nobody waits, until it has answered.

        Raises:
            PoolUnavailableError: a shard is gone for good.
        """
        grace_s = ANSWER_S if grace_s is None else grace_s

        async def call(k: int, op: Op[R]) -> R:  # not begun where its task is cancelled before
            return await self.ports[k].call(op, timeout_s)

        tasks = {
            k: self.later(call(k, op))
            for k, op in ops.items()
            if timeout_s != 0 or k not in self._silent
        }
        end = time.monotonic() + (math.inf if timeout_s is None else timeout_s + grace_s)
        pending = set(tasks.values())
        try:
            while pending:
                left = None if end == math.inf else end - time.monotonic()
                done, pending = await asyncio.wait(
                    pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    self._note_silent(k for k, task in tasks.items() if not task.done())
                if not done or any(enough(task.result()) for task in done):
                    break
            return {k: task.result() for k, task in tasks.items() if task.done()}
        except BaseException:  # also a cancellation: nobody hears of what was granted
            for k, task in tasks.items():
                if task.done() and task.exception() is None:
                    self.take_back(k, ops[k], task.result())
            raise
        finally:
            for task in pending:
                task.cancel()

    def take_back(self, k: int, op: Op[Any], answer: Any) -> None:
        """Undo what shard `k` granted."""
        if (undo := op.undone(answer)) is not None:
            self.later(self.ports[k].call(undo))

    def later(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Let it run to its end, also if nobody waits for it any more."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _note_silent(self, shards: Iterable[int]) -> None:
        for k in set(shards) - self._silent:
            self._silent.add(k)
            heard = self.later(self.ports[k].call(Describe()))
            heard.add_done_callback(lambda _, k=k: self._silent.discard(k))  # type: ignore[misc]

    # -- news, pages, statistics -------------------------------------------------------------

    async def events(self, op: GetEvents, timeout_s: float | None = 0.0) -> Events:
        """Events of all shards, by time; each numbers its own."""
        cursors = [""] * self.n if op.cursor is None else op.cursor.split(",")
        if len(cursors) != self.n:
            raise InvalidRequestError(
                f"cursor is {op.cursor!r:.80}; pass one that get_events of this pool of {self.n} "
                "shards returned, or None"
            )
        pages = await self.ask(
            {k: replace(op, cursor=cursor or None) for k, cursor in enumerate(cursors)},
            timeout_s,
            enough=lambda page: bool(timeout_s and page.events),
        )
        in_order = heapq.merge(
            *([(event.time, k, event) for event in page.events] for k, page in pages.items()),
            key=lambda item: item[0],
        )
        first = list(islice(in_order, op.limit))
        for k, page in pages.items():
            cursors[k] = _cursor(page, [event.number for _, at, event in first if at == k])
        lost = any(page.lost for page in pages.values())
        return Events(tuple(e for *_, e in first), ",".join(cursors), lost)

    async def page(self, op: Listing[P], timeout_s: float | None = 0.0) -> P:
        """A page of a listing, shard by shard."""
        one = op.filters.get("prompt_uid")
        k, at = 0 if one is None else shard_of(one, self.n), ""
        if op.cursor is not None:
            number, slash, at = str(op.cursor).partition("/")
            if not (slash and number.isascii() and number.isdigit() and int(number) < self.n):
                raise InvalidRequestError(
                    f"cursor is {op.cursor!r:.80}; pass one that the page before came with, or None"
                )
            k = int(number)
        while True:
            page = await self.ports[k].call(replace(op, cursor=at or None))
            if page.cursor is not None:
                return dataclasses.replace(page, cursor=f"{k}/{page.cursor}")
            if one is not None or k + 1 == self.n:
                return page
            k, at = k + 1, ""
            if page.items:
                return dataclasses.replace(page, cursor=f"{k}/")

    async def statistics(self, op: GetStatistics, timeout_s: float | None = 0.0) -> dict[str, Any]:
        """Of the whole pool. Of a shard that is down, what it answered last."""
        found = await self.ask(dict.fromkeys(range(self.n), op))
        down = sorted(set(range(self.n)) - found.keys())
        for k in down:
            before = self._statistics.get((k, op.channel))
            found[k] = before if before is not None else await self.ports[k].call(op)
        self._statistics |= {(k, op.channel): stats for k, stats in found.items()}
        shards = {"total": self.n, "down": down}
        if op.channel is not None:
            return _merged(list(found.values())) | {"shards": shards}
        names = dict.fromkeys(name for stats in found.values() for name in stats)
        return {
            name: _merged([stats[name] for stats in found.values() if name in stats])
            | {"shards": shards}
            for name in names
        }

    async def describe(self, op: Describe, timeout_s: float | None = 0.0) -> dict[str, Any]:
        found = await self.ask(dict.fromkeys(range(self.n), op))
        down = [{"shard": k, "down": True} for k in range(self.n)]
        return {"n_shards": self.n, "shards": [found.get(k, down[k]) for k in range(self.n)]}

    async def dry_run(self, op: DryRunOf, timeout_s: float | None = 0.0) -> DryRun:
        """Of one shard after the other: a fetch gets its part of the first ones of each."""
        runs = await self.all(op)
        return DryRun(op.batch_size, tuple(d for run in runs for d in run.decisions))


def values(answers: Iterable[T | BaseException]) -> list[T]:
    """The answers; the first error among them is raised."""
    found: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


def _cursor(page: Events, served: Sequence[int]) -> str:
    """Where the next page of a shard begins, of whose events only these numbers were served."""
    if len(served) == len(page.events):
        return page.cursor
    # The first ones of a shard are served, so that those left are all later.
    last = served[-1] if served else page.events[0].number - 1
    return f"{page.cursor.rpartition(':')[0]}:{last}"


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of one channel: counts are added, of the rest `_MERGE` says what."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key in _MERGE:
            result[key] = _MERGE[key](values)
        elif isinstance(values[0], Mapping):
            result[key] = _merged(values)
        else:
            result[key] = sum(values)
    return result


_MERGE: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "policy_version": max,
    "oldest_policy_version_ready": lambda found: min(
        (v for v in found if v is not None), default=None
    ),
    "oldest_open_age_s": max,
    "oldest_open": lambda lists: sorted(
        (group for groups in lists for group in groups), key=lambda g: -g["age_s"]
    )[:N_OLDEST_OPEN],
    "shut_down": all,
    # A consumer waits at every shard.
    "waiting": lambda counts: {k: max(c[k] for c in counts) for k in counts[0]},
}
