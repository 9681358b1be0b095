"""One logical pool out of N shards: each group lives in the shard that its `prompt_uid` names.

    submit, complete, … ──► crc32(prompt_uid) % N ──► shard k
    statistics, events, pages ◄── merged ◄── all

With one shard everything goes there and comes back as it is. A batch out of several is leased by
`batches.py`; what is of a shard only is the order of groups (a batch is the first ones of each),
batch filters (each sees its shard's part) and `drop_oldest`. What is of the whole pool is credit
for new groups: `credit.py`.

One `trajectory_uid` under two `prompt_uid`s of different shards is refused where both go through
one client, and otherwise not noticed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import time
from collections import OrderedDict
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar
from zlib import crc32

from msgspec.structs import replace

from stepwell.datapool.codec import PackedStep
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    PoolUnavailableError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.inspect.events import Event, Events
from stepwell.datapool.inspect.rows import ExportedPage, Page
from stepwell.datapool.ops import Op, R, Refusal, Resumed, SubmitOutcome, SubmitSteps
from stepwell.datapool.questions import Describe, GetEvents, GetStatistics, Listing
from stepwell.datapool.remote.link import AwayError, Port
from stepwell.datapool.remote.merge import merged
from stepwell.datapool.types import Step

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
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()
        """(channel, trajectory_uid) -> its shard"""
        self._statistics: dict[tuple[int, str | None], dict[str, Any]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._silent: set[int] = set()
        """Shards that owe an answer."""

    # -- by what an operation is about -------------------------------------------------------

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """The answer of the shard that `op` is about."""
        if self.n == 1:
            return await self.ports[0].call(op, timeout_s)
        uid: str | None = getattr(op, "trajectory_uid", None)
        prompt_uid: str | None = getattr(op, "prompt_uid", None)
        channel: str = getattr(op, "channel", "")
        if prompt_uid is None and uid is not None:
            return await self._at_home(op, uid, channel)
        home = shard_of(prompt_uid, self.n)
        if uid is None:
            return await self.ports[home].call(op, timeout_s)
        is_new = self._move_in(uid, home, channel)
        try:
            answer = await self.ports[home].call(op, timeout_s)
        except DataPoolError:
            if is_new:
                self._homes.pop((channel, uid), None)
            raise
        if isinstance(answer, Resumed) and answer.channel != channel:
            self._homes.pop((channel, uid), None)
            self._move_in(uid, home, answer.channel)
        return answer

    def by_home(
        self, steps: Iterable[tuple[int, Step, PackedStep]]
    ) -> dict[int, list[tuple[int, Step, PackedStep]]]:
        """Steps by the shard of their group, in order."""
        parts: dict[int, list[tuple[int, Step, PackedStep]]] = {}
        for each in steps:
            parts.setdefault(shard_of(each[1].prompt_uid, self.n), []).append(each)
        return parts

    async def submit(
        self, parts: Mapping[int, SubmitSteps]
    ) -> dict[int, list[SubmitOutcome | Refusal]]:
        """Each shard's answer. An error of a shard is a refusal of each of its steps."""
        # All are begun now: what is called next, of whatever group, comes after them.
        began = [self._submit(home, op) for home, op in parts.items()]
        if len(parts) == 1:
            return {home: await began[0] for home in parts}
        answers = await asyncio.gather(*began, return_exceptions=True)
        results: dict[int, list[SubmitOutcome | Refusal]] = {}
        for (home, op), answer in zip(parts.items(), answers, strict=True):
            if isinstance(answer, DataPoolError):  # of the call: none of these was acknowledged
                n_steps = sum(len(t.steps) for t in op.trajectories)
                results[home] = [Refusal.of(answer)] * n_steps
            elif isinstance(answer, BaseException):
                raise answer
            else:
                results[home] = answer
        return results

    def _submit(self, home: int, op: SubmitSteps) -> Awaitable[list[SubmitOutcome | Refusal]]:
        if self.n == 1:
            return self.ports[0].begin(op)
        refused: dict[int, Refusal] = {}
        new: set[str] = set()
        for i, t in enumerate(op.trajectories):
            try:
                if self._move_in(t.trajectory_uid, home, op.channel):
                    new.add(t.trajectory_uid)
            except TrajectoryConflictError as e:
                refused[i] = Refusal.of(e)
        kept = [t for i, t in enumerate(op.trajectories) if i not in refused]
        rest: SubmitSteps = replace(op, trajectories=kept)
        return self._outcomes(op, refused, new, self.ports[home].begin(rest))

    async def _outcomes(
        self,
        op: SubmitSteps,
        refused: Mapping[int, Refusal],
        new: Collection[str],
        answer: Awaitable[list[SubmitOutcome | Refusal]],
    ) -> list[SubmitOutcome | Refusal]:
        """Of all steps of `op`, from the shard's answer to those that were not refused here."""
        answers = iter(await answer)
        results: list[SubmitOutcome | Refusal] = []
        for i, t in enumerate(op.trajectories):
            if i in refused:
                results += [refused[i]] * len(t.steps)
                continue
            own = list(islice(answers, len(t.steps)))
            results += own
            if t.trajectory_uid in new and all(isinstance(r, Refusal) for r in own):
                self._homes.pop((op.channel, t.trajectory_uid), None)
        return results

    async def _at_home(self, op: Op[R], trajectory_uid: str, channel: str) -> R:
        """Ask the trajectory's shard. If it is not known here, all: those that do not have it
        refuse, and change nothing."""
        home = self._homes.get((channel, trajectory_uid))
        if home is not None:
            try:
                return await self.ports[home].call(op)
            except UnknownTrajectoryError:
                self._homes.pop((channel, trajectory_uid), None)
        tasks = [self.later(port.call(op)) for port in self.ports]
        unknown: DataPoolError | None = None
        gone: DataPoolError | None = None
        for answer in asyncio.as_completed(tasks):
            try:
                return await answer
            except UnknownTrajectoryError as e:
                unknown = e
            except PoolUnavailableError as e:
                gone = e  # which may be the one that has it
        raise gone or unknown or UnknownTrajectoryError(f"trajectory {trajectory_uid!r} is unknown")

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

    # -- all, or any -------------------------------------------------------------------------

    async def all(self, op: Op[R]) -> list[R]:
        """The answers of all shards; an error once all have answered."""
        answers = await asyncio.gather(
            *(port.call(op) for port in self.ports), return_exceptions=True
        )
        return values(answers)

    async def any(self, op: Op[R], prompt_uids: Iterable[str], timeout_s: float) -> R:
        """The first answer of any shard of these groups; an error if none has one."""
        homes = {shard_of(prompt_uid, self.n) for prompt_uid in prompt_uids}
        tasks = [self.later(self.ports[k].call(op, timeout_s)) for k in homes]
        error: BaseException = PoolUnavailableError("no shard of the DataPool answered")
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    return await answer
                except DataPoolError as e:
                    error = e
            raise error
        finally:
            for task in tasks:
                task.cancel()

    async def each(self, op: Op[R], timeout_s: float = 0.0) -> list[R | None]:
        """The answers of all shards; None of one that is down. One that is silent for `ANSWER_S`
        counts as down, and is not waited for again, until it has answered."""
        if self.n == 1:
            only: R = await self.ports[0].call(op, timeout_s)
            return [only]
        tasks = {
            k: self.later(port.call(op, timeout_s, once=True))
            for k, port in enumerate(self.ports)
            if k not in self._silent
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s + ANSWER_S)
        for k, task in tasks.items():
            if not task.done():
                self._silent.add(k)
                task.add_done_callback(partial(self._heard, k))
        return [if_there(tasks.get(k)) for k in range(self.n)]

    def _heard(self, k: int, _: asyncio.Task[Any]) -> None:
        self._silent.discard(k)

    def later(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Let it run to its end, also if nobody waits for it any more."""

        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    # -- news, pages, statistics -------------------------------------------------------------

    async def events(self, op: GetEvents, timeout_s: float) -> Events:
        """Events of all shards, by time; each numbers its own."""
        if self.n == 1:
            return await self.ports[0].call(op, timeout_s)
        cursors = self._cursors(op.cursor)
        tasks = {
            k: self.later(port.call(replace(op, cursor=cursors[k]), timeout_s, once=True))
            for k, port in enumerate(self.ports)
        }
        pending = set(tasks.values())
        end = time.monotonic() + timeout_s + ANSWER_S
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=max(0.0, end - time.monotonic()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                found = [page for task in done if (page := if_there(task)) is not None]
                if not done or (timeout_s and any(page.events for page in found)):
                    break
        finally:
            for task in pending:
                task.cancel()
        pages = [if_there(tasks[k]) for k in range(self.n)]
        in_order = heapq.merge(
            *(
                [(event.time, k, event) for event in page.events]
                for k, page in enumerate(pages)
                if page is not None
            ),
            key=lambda item: item[0],
        )
        first = list(islice(in_order, op.limit))
        cursors = [
            before if page is None else _cursor(k, page, first)
            for k, (before, page) in enumerate(zip(cursors, pages, strict=True))
        ]
        lost = any(page is not None and page.lost for page in pages)
        return Events(tuple(e for *_, e in first), ",".join(c or "" for c in cursors), lost)

    def _cursors(self, cursor: str | None) -> list[str | None]:
        if cursor is None:
            return [None] * self.n
        cursors = cursor.split(",")
        if len(cursors) != self.n:
            raise InvalidRequestError(
                f"cursor is {cursor!r:.80}; pass one that get_events of this pool of {self.n} "
                "shards returned, or None"
            )
        return [each or None for each in cursors]

    async def page(self, op: Listing[P]) -> P:
        """A page of a listing, shard by shard."""
        if self.n == 1:
            return await self.ports[0].call(op)
        one = op.filters.get("prompt_uid")
        if op.cursor is None:
            k, at = 0 if one is None else shard_of(one, self.n), None
        else:
            number, slash, rest = str(op.cursor).partition("/")
            if not (slash and number.isascii() and number.isdigit() and int(number) < self.n):
                raise InvalidRequestError(
                    f"cursor is {op.cursor!r:.80}; pass one that the page before came with, or None"
                )
            k, at = int(number), rest or None
        while True:
            page = await self.ports[k].call(replace(op, cursor=at))
            if page.cursor is not None:
                return dataclasses.replace(page, cursor=f"{k}/{page.cursor}")
            if one is not None or k + 1 == self.n:
                return page
            k, at = k + 1, None
            if page.items:
                return dataclasses.replace(page, cursor=f"{k}/")

    async def statistics(self, op: GetStatistics) -> dict[str, Any]:
        """Of the whole pool. Of a shard that is down, what it answered last."""
        if self.n == 1:
            return await self.ports[0].call(op)
        answers = await self.each(op)
        down = [k for k, stats in enumerate(answers) if stats is None]
        for k in down:
            before = self._statistics.get((k, op.channel))
            if before is None:
                before = await self.ports[k].call(op)
            answers[k] = before
        found = [stats for stats in answers if stats is not None]
        self._statistics |= {(k, op.channel): stats for k, stats in enumerate(found)}
        shards = {"total": self.n, "down": down}
        if op.channel is not None:
            return merged(found) | {"shards": shards}
        names = dict.fromkeys(name for stats in found for name in stats)
        return {
            name: merged([stats[name] for stats in found if name in stats]) | {"shards": shards}
            for name in names
        }

    async def describe(self, op: Describe) -> dict[str, Any]:
        if self.n == 1:
            return await self.ports[0].call(op)
        answers = await self.each(op)
        return {
            "n_shards": self.n,
            "shards": [answer or {"shard": k, "down": True} for k, answer in enumerate(answers)],
        }


def if_there(task: asyncio.Task[T] | None) -> T | None:
    """The answer of a shard; None if it was not asked, is not back, or the shard is down. One that
    is gone for good is an error."""
    try:
        return task.result() if task is not None and task.done() else None
    except AwayError:
        return None


def values(answers: Sequence[T | BaseException]) -> list[T]:
    """The answers; the first error among them is raised."""
    found: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


def _cursor(k: int, page: Events, served: Sequence[tuple[float, int, Event]]) -> str:
    """Where the next page of shard `k` begins, of whose events only some were served."""
    numbers = [event.number for _, shard, event in served if shard == k]
    if len(numbers) == len(page.events):
        return page.cursor
    # The first ones of a shard are served, so that those left are all later.
    last = numbers[-1] if numbers else page.events[0].number - 1
    return f"{page.cursor.rpartition(':')[0]}:{last}"
