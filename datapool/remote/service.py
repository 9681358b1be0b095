"""This module runs a pool so that it can be called: waiting, waking up, time and durability around
the pure `DataPool`.

    op ──► try_: DataPool.apply ──► _follow: serve who waits, set the timer
                   ▲                    │
                   └── timer (tick) ◄───┤
                                        └─► `settle`: one commit for all of this turn of the loop,
                                            then the answers

An operation that cannot be answered yet is tried again by the change that may help it; nothing
polls. Those who wait for the same stand in line, first come first served: consumers per
`n_rollouts` (a group that only a consumer of fewer can use is not kept from it), producers for
credit, trajectories for room. Consumers first: what they take is credit for producers.

Runs on one event loop, with or without Ray: `actor.py` puts it into a process of its own, a
`DataPoolClient.local` calls it where it is. Does not own what an operation does (`core/`), nor what
is written where (`store/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock
from stepwell.datapool.codec import PackedLease
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.pictures import GRACE_S
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import (
    DataPoolError,
    JournalError,
    JournalFencedError,
    JournalFullError,
    LeaseClosedError,
    LeaseExpiredError,
)
from stepwell.datapool.heap import growing_heap
from stepwell.datapool.ops import Change, LeaseBatch, Op, Shutdown, SubmitSteps
from stepwell.datapool.questions import (
    Describe,
    GetEvents,
    GetStatistics,
    WaitAvailable,
    WaitCredit,
)
from stepwell.datapool.remote.incarnation import Incarnation, Known, Previous
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.store.replay import restore

logger = logging.getLogger(__name__)

R = TypeVar("R")
Settled: TypeAlias = Callable[[Sequence["Applied"]], None]

LOCK_S = 5.0
"""Seconds that another pool over the same journal may take to end."""
CUT_OFF_S = 90.0
"""The same for the previous process of this one: longer than Ray's
`gcs_rpc_server_reconnect_timeout_s` (60 s), after which a node that is cut off ends what runs on
it. Then the journal is taken over."""
TIMER_RETRY_S = 1.0
SWEEP_PAUSE_S = 0.01
SWEEP_RETRY_S = 60.0
Applied: TypeAlias = tuple[int, Op[Any] | None, Any]
"""A number of its caller's, an operation, and what `try_` answered."""


class _Place(NamedTuple):
    """A line of those who wait for the same."""

    channel: str | None
    role: str
    """`consumers`, `producers`, `watchers`: served in this order."""
    wanted: object


@dataclass(eq=False, slots=True)
class _Waiter:
    """A call that waits for its answer."""

    ticket: int
    op: Op[Any]
    answer: asyncio.Future[Any]

    def place(self) -> _Place:
        """Queue key. Read-only waiters get a queue of their own."""
        op = self.op
        if isinstance(op, LeaseBatch):
            return _Place(op.channel, "consumers", op.n_rollouts)
        if isinstance(op, GetEvents):
            return _Place(None, "watchers", self)
        channel: str = op.channel  # type: ignore[attr-defined]
        if isinstance(op, WaitAvailable):
            return _Place(channel, "consumers", self)
        return _Place(channel, "producers", self if isinstance(op, WaitCredit) else type(op))


class PoolService:
    """A pool that can be called.

    Args:
        folder: of its journal; None: nothing survives the process.
        previous: what this pool was before its process was started again.
        fenced: is called when another process has taken the journal over.

    Raises:
        JournalError: the journal cannot be opened; the message says why.
        ReplayError: its rows contradict each other.
        PoolReplacedError: it is not the journal of `previous`.
    """

    def __init__(
        self,
        config: PoolConfig | None = None,
        folder: Path | None = None,
        shard: int = 0,
        *,
        restarted: bool = False,
        previous: Previous | None = None,
        fenced: Callable[[], None] = lambda: None,
    ) -> None:
        config = config or PoolConfig()
        life = f"{shard}.{uuid.uuid4().hex[:12]}"
        # Without a journal a fresh epoch: leases of a lost predecessor must not name leases of
        # this one.
        self._pool = DataPool(config, epoch=life if folder is None else str(shard), life=life)
        self.n_shards = config.shards
        self._shard = shard
        self._fenced = fenced
        self._clock = Clock.start()
        self.incarnation: Known = None
        self.archiver_pid: int | None = None
        """Process that archives what leaves; None: there is none, or it is only starting."""
        self._journal: Journal | None = None
        if folder is not None:
            self._journal = self._recover(folder, restarted, previous)
            if not restarted:
                self._pool.reopen()
        elif restarted:
            logger.warning("DataPool restarted without a journal: what it held is gone")
        self._lines: dict[_Place, dict[_Waiter, None]] = {}
        """Waiting calls by queue key, in the order they came."""
        self._tickets = count()
        self._n_events = 0
        """Number of the last event that watchers were told of."""
        self._settling: list[tuple[Sequence[Applied], Settled]] = []
        """Operations that are applied and not durable, and the callbacks that get their answers."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._has_committed = False
        """True if this turn of the loop has had a commit of its own."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf

    def _recover(self, folder: Path, restarted: bool, previous: Previous | None) -> Journal:
        """Open the journal and make the pool what it says."""
        began = time.monotonic()
        journal = Journal(
            folder,
            "power" if self._pool.config.durability == "power" else "process",
            # Ray declared the previous process dead. If only its node was cut off, that one ends as
            # soon as it learns so, or cannot reach the cluster for a minute.
            lock_timeout_s=CUT_OFF_S if restarted else LOCK_S,
            take_over=None if previous is None else previous.pid,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(journal.close)
            self.incarnation = here = Incarnation(journal.identity, journal.opening)
            if previous is not None:
                here._replace(generation=here.generation - 1).check_follows(previous.incarnation)
            power = self._pool.config.durability == "power"
            pictures = self._pool.pictures
            pictures.store = PictureFolder(folder / PICTURES, power=power)
            with growing_heap():
                n_rows = restore(self._pool, journal)
            last = max(channel.now for channel in self._pool.channels.values())
            self._clock = Clock.resume(journal.states().get(CLOCK), last)
            pictures.find_orphans(self._clock.now())
            self._pool.next_tick.no_later_than(self._clock.now() + GRACE_S)
            journal.put_state(CLOCK, self._clock.dump())
            # On a full disk it goes with the first transaction, so before the first answer.
            with contextlib.suppress(JournalFullError):
                journal.flush()
            # A commit takes along what others have applied and not settled yet.
            journal.about_to_commit = self._pool.write_counts
            undo.pop_all()
        self._recovery_s = time.monotonic() - began
        if lost := pictures.lost():
            logger.error(
                "DataPool: %d pictures that steps refer to are not in %s; `stepwell data salvage "
                "%s`, with the pool stopped, drops the groups that need them",
                len(lost),
                folder / PICTURES,
                folder,
            )
        if n_rows:
            logger.warning(
                "DataPool: %d rows of %s replayed in %.2f s", n_rows, folder, self._recovery_s
            )
        return journal

    # -- calls -------------------------------------------------------------------------------

    def call(self, op: Op[R], timeout_s: float | None = 0.0) -> Awaitable[R]:
        """The answer to `op`, once it is durable; waited for up to `timeout_s` (None: for ever) if
        there is none yet. `op` is applied now, whenever it is awaited.

        Raises:
            DataPoolError: its refusal.
            JournalError: it could not be made durable.
        """
        return self._answered(op, self.try_(op), timeout_s)

    async def _answered(self, op: Op[R], answer: Any, timeout_s: float | None) -> R:
        if timeout_s != 0 and op.is_unanswered(answer):
            answer = await self.wait(op, timeout_s)
        settled: asyncio.Future[Sequence[Applied]] = asyncio.get_running_loop().create_future()
        self.settle([(0, op, answer)], partial(_tell, settled))
        try:
            ((*_, answer),) = await settled
        except asyncio.CancelledError:
            self.take_back(op, answer)
            raise
        if isinstance(answer, Exception):
            raise answer
        result: R = answer
        return result

    def try_(self, op: Op[R]) -> R | Exception:
        """Return the answer to `op`, or its refusal; a change is applied, and not durable yet:
        `settle` it."""
        is_change, journal = isinstance(op, Change), self._journal
        answer: Any
        try:
            if is_change and journal is not None and journal.error is not None:
                journal.flush()  # nothing is changed that cannot be written down
        except JournalError as e:
            return self._ended(e)
        try:
            if isinstance(op, LeaseBatch) and self._stands_behind(op):
                answer = "shut_down" if self._pool.is_shut_down(op.channel) else "nothing_yet"
            elif isinstance(op, Describe):
                answer = self._describe()
            else:
                answer = self._pool.apply(op, self._clock.now())
                if isinstance(op, GetStatistics):
                    for name, counts in [(op.channel, answer)] if op.channel else answer.items():
                        counts["waiting"] = self._waiting(name)
        except Exception as e:  # noqa: BLE001 - a foreign one too (a selection): its caller is told
            answer = e
        if is_change:
            self._follow(getattr(op, "channel", None))
        return answer  # type: ignore[no-any-return]

    def try_submits(self, ops: Sequence[SubmitSteps]) -> Sequence[Any]:
        """Answers to submits to one channel that came together, as `try_`. They are one change:
        one row of the journal for what is of one group, and one look at who waits."""
        if len(ops) > 1:
            together = SubmitSteps([t for op in ops for t in op.trajectories], ops[0].channel)
            answer = self.try_(together)
            if not isinstance(answer, Exception):
                each = iter(answer)
                return [list(islice(each, op.n_steps)) for op in ops]
        return [self.try_(op) for op in ops]

    def settle(self, applied: Sequence[Applied], then: Settled) -> None:
        """Call `then` with operations that `try_` has applied, and their answers or errors, once
        they are durable. The first of a turn of the loop are committed at once: mostly they are
        the only ones. What else comes in this turn shares a second transaction at its end. Where
        each waits for the disk, there is that one alone."""
        if self._journal is None:
            then(applied)
            if self._pool.pictures.doomed:
                self._pool.pictures.sweep()
            return
        self._settling.append((applied, then))
        if self._has_committed:
            return
        self._has_committed = True
        asyncio.get_running_loop().call_soon(self._end_turn)
        if self._journal.durability != "power":
            self._commit()

    def _end_turn(self) -> None:
        self._has_committed = False
        if self._settling:
            self._commit()

    def _commit(self) -> None:
        settling, self._settling = self._settling, []
        error = None
        try:
            if self._journal is not None:
                self._journal.flush()
            if self._pool.may_spill:
                self._pool.spill()
            if self._pool.pictures.doomed and self._sweeping is None:
                self._sweep()
        except JournalError as e:
            error = self._ended(e)
        for applied, then in settling:
            if error is not None:
                applied = [(n, op, self._not_written(op, a, error)) for n, op, a in applied]
            then(applied)

    def _sweep(self) -> None:
        """Remove pictures that nothing refers to, a slice at a time: that is durable now."""
        self._sweeping, pictures = None, self._pool.pictures
        if self._journal is None or self._journal.pending:
            return  # with the next commit
        pause_s = SWEEP_PAUSE_S
        try:
            with self._journal.owned():
                pictures.sweep()
        except OSError as e:  # not with each commit: a disk may stay like this for hours
            logger.error("DataPool: a picture that nobody needs stays on disk (%s)", e)
            pause_s = SWEEP_RETRY_S
        if pictures.doomed:
            self._sweeping = asyncio.get_running_loop().call_later(pause_s, self._sweep)

    def _not_written(self, op: Op[Any] | None, answer: Any, error: JournalError) -> Any:
        if isinstance(answer, PackedLease):  # a group is there when it is opened again
            self.take_back(op, answer)
        return error if isinstance(op, Change) else answer

    def take_back(self, op: Op[Any] | None, answer: Any) -> None:
        """Undo what was granted to a caller that will not hear of it. Also while the journal takes
        nothing: it keeps the change and its end together, until it can write both."""
        undo = None if op is None else op.undone(answer)
        if undo is None:
            return
        with contextlib.suppress(LeaseClosedError, LeaseExpiredError):
            self._pool.apply(undo, self._clock.now())
        self._follow(getattr(op, "channel", None))
        self._write_soon()

    # -- waiting -----------------------------------------------------------------------------

    async def wait(self, op: Op[Any], timeout_s: float | None) -> Any:
        """The answer, or refusal, to an operation that has none yet; as `try_`."""
        waiter = _Waiter(next(self._tickets), op, asyncio.get_running_loop().create_future())
        place = waiter.place()
        self._lines.setdefault(place, {})[waiter] = None
        self._n_events = -1
        try:
            self._follow(place.channel)  # what came since it was tried
            if not waiter.answer.done():
                await asyncio.wait([waiter.answer], timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.answer.done():
                self.take_back(op, waiter.answer.result())
            raise
        finally:
            line = self._lines.get(place, {})
            line.pop(waiter, None)
            if not line:
                self._lines.pop(place, None)
            # One who leaves may have held up a smaller request behind.
            self._follow(place.channel)
        return waiter.answer.result() if waiter.answer.done() else self.try_(waiter.op)

    def _stands_behind(self, op: LeaseBatch) -> bool:
        """True if others, who ask for the same, came before; and it has no lease already."""
        line = self._lines.get(_Place(op.channel, "consumers", op.n_rollouts))
        return bool(line) and self._pool.leases.answer_to(op.request_id) is None

    def _wake(self, channel: str | None) -> None:
        """Try the first of each line again, in the order they came, until none gets an answer."""
        has_news = self._pool.events.n_events != self._n_events
        self._n_events = self._pool.events.n_events
        lines = {
            place: line
            for place, line in self._lines.items()
            if line and (has_news if place.channel is None else channel in (None, place.channel))
        }
        while lines:
            place = min(lines, key=lambda place: (place.role, next(iter(lines[place])).ticket))
            line = lines[place]
            waiter = next(iter(line))
            if waiter.answer.done() or self._answer(waiter):
                del line[waiter]
                if line:
                    continue
            del lines[place]

    def _answer(self, waiter: _Waiter) -> bool:
        """Answer the call if there is an answer now; true if there was."""
        answer: Any
        try:
            answer = self._pool.apply(waiter.op, self._clock.now())
        except Exception as e:  # noqa: BLE001 - as in `try_`
            answer = e
        if waiter.op.is_unanswered(answer):
            if isinstance(waiter.op, GetEvents):  # what was looked at is not again
                waiter.op = replace(waiter.op, cursor=answer.cursor)
            return False
        waiter.answer.set_result(answer)
        return True

    def _waiting(self, channel: str) -> dict[str, int]:
        return {
            role: sum(
                len(line)
                for place, line in self._lines.items()
                if (place.channel, place.role) == (channel, role)
            )
            for role in ("consumers", "producers")
        }

    # -- inside ------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {
            "shard": self._shard,
            "n_shards": self.n_shards,
            "pid": os.getpid(),
            "durability": self._pool.config.durability,
            "memory_bytes": self._pool.memory_bytes,
        }
        if self._journal is not None and self.incarnation is not None:
            described["pool"], described["generation"] = self.incarnation
            described["journal"] = {
                "folder": str(self._journal.folder),
                "recovery_s": self._recovery_s,
                **self._journal.statistics(),
            }
            if self._pool.config.archive_dir is not None:
                described["archive"] = {"pid": self.archiver_pid, **self._pool.backlog}
        return described

    def _follow(self, channel: str | None) -> None:
        """Do what follows from a change. `channel` is the only one that it can help; None: all."""
        if self._lines:
            self._wake(channel)
        if self._pool.next_tick.at < self._timer_due:
            self._set_timer()

    def _ended(self, e: JournalError) -> JournalError:
        """A process that has a successor ends, so that its clients go there."""
        if isinstance(e, JournalFencedError):
            logger.critical("DataPool: %s", e)
            self._fenced()
        return e

    def _write_soon(self) -> None:
        """Make durable what nobody waits for."""

        def written(applied: Sequence[Applied]) -> None:
            if (error := applied[0][2]) is not None:
                logger.error("DataPool: %s", error)

        # `Shutdown` stands for any change: it is not applied.
        self.settle([(0, Shutdown(), None)], written)

    def _set_timer(self) -> None:
        """Have the timer ring earlier. One that has become too early is not moved: it rings, and is
        set anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._pool.next_tick.at
        delay = max(0.0, self._timer_due - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_due = None, math.inf
        try:
            if self._journal is not None and self._journal.error is not None:
                self._journal.flush()
            self._pool.tick(self._clock.now())
            self._follow(None)
        except DataPoolError as e:
            if isinstance(e, JournalError):
                self._ended(e)
            logger.error("DataPool: %s", e)
            # What is due stays due: it may be all that a waiting consumer waits for.
            self._timer = asyncio.get_running_loop().call_later(TIMER_RETRY_S, self._on_timer)
        self._write_soon()

    def close(self) -> None:
        """Let go of the journal. Harmless when repeated."""
        for timer in (self._timer, self._sweeping):
            if timer is not None:
                timer.cancel()
        if self._journal is not None:
            self._journal.close()


def _tell(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():  # its caller left
        answer.set_result(value)
