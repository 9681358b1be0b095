"""A running pool: waiting, waking up, time and durability around the pure `DataPool`.

    op ──► try_: DataPool.apply ──► _follow: serve who waits, set the timer
                   ▲                    │
                   └── timer (tick) ◄───┤
                                        └─► journal: the answer waits for its commit (`settle`)

An operation that cannot be answered yet is tried again by the change that may help it; nothing
polls. Those who wait for the same stand in line, first come first served: consumers per
`n_rollouts` (a group that only a consumer of fewer can use is not kept from it), producers for
credit, steps for room. Consumers first: what they take is credit for producers.

Runs on one event loop, with or without Ray: `actor.py` puts it into a process of its own, a
`DataPoolClient.local` calls it where it is. Does not own what an operation does (`core/`), nor what
is written where (`store/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock
from stepwell.datapool.codec import PackedLease
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import (
    DataPoolError,
    JournalError,
    JournalFencedError,
    JournalFullError,
    LeaseClosedError,
    LeaseExpiredError,
    PoolFullError,
)
from stepwell.datapool.ops import Change, DropGroup, LeaseBatch, Nack, Op, OpenGroup, Shutdown
from stepwell.datapool.process import growing_heap
from stepwell.datapool.questions import (
    Describe,
    GetEvents,
    GetStatistics,
    WaitAvailable,
    WaitCredit,
    WaitForRoom,
)
from stepwell.datapool.remote.incarnation import STATE as GENERATION
from stepwell.datapool.remote.incarnation import Former, Incarnation, Known
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore

logger = logging.getLogger(__name__)

R = TypeVar("R")

LOCK_S = 5.0
"""How long another pool over the same journal may take to end."""
CUT_OFF_S = 90.0
"""The same for the former process of this one: longer than Ray's
`gcs_rpc_server_reconnect_timeout_s` (60 s), after which a node that is cut off ends what runs on
it. Then the journal is taken over."""
TIMER_RETRY_S = 1.0
WAITS: tuple[type[Op[Any]], ...] = (
    *(LeaseBatch, OpenGroup, WaitForRoom, WaitAvailable, WaitCredit, GetEvents),
)
_PRODUCERS: tuple[type[Op[Any]], ...] = (OpenGroup, WaitForRoom, WaitCredit)


@dataclass(eq=False, slots=True)
class _Waiter:
    """A call that waits for its answer."""

    op: Op[Any]
    answer: asyncio.Future[Any]


class PoolService:
    """A pool that can be called.

    Args:
        folder: of its journal; None: nothing survives the process.
        former: what this pool was before its process was started again.
        fenced: is called when another process has taken the journal over.

    Raises:
        JournalError: the journal cannot be opened; the message says why.
        ReplayError: its rows contradict each other.
        PoolReplacedError: it is not the journal of `former`.
    """

    def __init__(
        self,
        config: PoolConfig | None = None,
        folder: Path | None = None,
        shard: int = 0,
        *,
        restarted: bool = False,
        former: Former | None = None,
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
        self._journal: Journal | None = None
        if folder is not None:
            self._journal = self._recover(folder, restarted, former)
            if not restarted:
                self._pool.reopen()
        elif restarted:
            logger.warning("DataPool restarted without a journal: what it held is gone")
        self._lines: dict[str, dict[Hashable, OrderedDict[int, _Waiter]]] = {}
        """Who waits on a channel, by what for."""
        self._watching: set[_Waiter] = set()
        """Who waits for events."""
        self._n_events_seen = 0
        self._tickets = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None

    def _recover(self, folder: Path, restarted: bool, former: Former | None) -> Journal:
        """Open the journal and make the pool what it says."""
        began = time.monotonic()
        journal = Journal(
            folder,
            "power" if self._pool.config.durability == "power" else "process",
            # Ray declared the former process dead. If only its node was cut off, that one ends as
            # soon as it learns so, or cannot reach the cluster for a minute.
            lock_timeout_s=CUT_OFF_S if restarted else LOCK_S,
            take_over=None if former is None else former.pid,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(journal.close)
            states = journal.states()
            self.incarnation = here = Incarnation.after(journal.identity, states.get(GENERATION))
            if former is not None:
                here._replace(generation=here.generation - 1).check_follows(former.incarnation)
            with growing_heap():
                n_rows = restore(self._pool, journal, journal.rows(), states, journal.read)
            last = max(channel.now for channel in self._pool.channels.values())
            self._clock = Clock.resume(states.get(CLOCK), last)
            journal.put_state(CLOCK, self._clock.dump())
            journal.put_state(GENERATION, here.dump())
            # On a full disk it goes with the first transaction, so before the first answer.
            with contextlib.suppress(JournalFullError):
                journal.flush()
            # A commit takes along what others have applied and not settled yet.
            journal.about_to_commit = self._pool.write_counts
            undo.pop_all()
        self._recovery_s = time.monotonic() - began
        if n_rows:
            logger.warning(
                "DataPool: %d rows of %s replayed in %.2f s", n_rows, folder, self._recovery_s
            )
        return journal

    @property
    def waits_for_the_disk(self) -> bool:
        """Whether a transaction takes long: then those of many callers are one."""
        return self._pool.config.durability == "power"

    # -- calls -------------------------------------------------------------------------------

    def can_wait(self, op: Op[Any]) -> bool:
        """Whether a call may have to wait for its answer."""
        return isinstance(op, WAITS)

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """The answer to `op`, once it is durable; one that waits, after `timeout_s` (None: for
        ever) at the latest.

        Raises:
            DataPoolError: its refusal.
            JournalError: it could not be made durable.
        """
        if timeout_s == 0 or not self.can_wait(op):
            return await self.begin(op)
        return await self._answered(op, await self.wait(op, timeout_s))

    def begin(self, op: Op[R]) -> Awaitable[R]:
        """As `call` without waiting, and applied now, whenever it is awaited."""
        return self._answered(op, self.try_(op))

    async def _answered(self, op: Op[R], answer: Any) -> R:
        try:
            (answer,) = await self.settle([(op, answer)])
        except asyncio.CancelledError:
            self.take_back(op, answer)
            raise
        if isinstance(answer, Exception):
            raise answer
        result: R = answer
        return result

    def try_(self, op: Op[R]) -> R | Exception:
        """What `op` is answered now, or its refusal; a change is applied, and not durable yet:
        `settle` it."""
        if isinstance(op, Change) and self._journal is not None:
            try:
                self._journal.check()  # nothing is changed that cannot be written down
            except JournalError as e:
                return self._ended(e)
        try:
            if isinstance(op, LeaseBatch) and self._stands_behind(op):
                closed = self._pool.is_shut_down(op.channel)
                return "shut_down" if closed else "nothing_yet"  # type: ignore[return-value]
            return self._apply(op)
        except Exception as e:  # noqa: BLE001 - a foreign one too (a selection): its caller is told
            return e
        finally:
            self._follow(getattr(op, "channel", None))

    async def settle(self, applied: Sequence[tuple[Op[Any] | None, Any]]) -> list[Any]:
        """The answers, or errors, of operations that `try_` has applied, once they are durable."""
        error = None
        if self._journal is not None and any(isinstance(op, Change) for op, _ in applied):
            self._pool.write_counts()
            try:
                await self._journal.committed()
            except JournalError as e:
                error = e
        return self._settled(applied, error)

    def settle_now(self, applied: Sequence[tuple[Op[Any] | None, Any]]) -> list[Any]:
        """As `settle`, in a transaction of its own. Waits for the disk where the pool survives a
        power failure."""
        error = None
        if self._journal is not None and any(isinstance(op, Change) for op, _ in applied):
            self._pool.write_counts()
            try:
                self._journal.flush()
            except JournalError as e:
                error = e
        return self._settled(applied, error)

    def _settled(
        self, applied: Sequence[tuple[Op[Any] | None, Any]], error: JournalError | None
    ) -> list[Any]:
        if error is None:
            self._pool.written()
            return [answer for _, answer in applied]
        self._ended(error)
        for op, answer in applied:
            if isinstance(answer, PackedLease):  # a group is there when it is opened again
                self.take_back(op, answer)
        return [error if isinstance(op, Change) else answer for op, answer in applied]

    def _apply(self, op: Op[R]) -> R:
        answer: Any = (
            self._describe() if isinstance(op, Describe) else self._pool.apply(op, self._now())
        )
        if isinstance(op, GetStatistics):
            for name, counts in answer.items() if op.channel is None else [(op.channel, answer)]:
                counts["waiting"] = self._waiting(name)
        result: R = answer
        return result

    def take_back(self, op: Op[Any] | None, answer: Any) -> None:
        """Undo what was granted to a caller that will not hear of it. Also while the journal takes
        nothing: it keeps the change and its end together, until it can write both."""
        if isinstance(answer, PackedLease):
            undo: Op[None] = Nack(answer.lease_id, "consumer_left")
        elif isinstance(op, OpenGroup) and answer == "accepted":
            # Nobody would ever start its rollouts.
            undo = DropGroup(op.prompt_uid, "open_cancelled", op.channel)
        else:
            return
        with contextlib.suppress(LeaseClosedError, LeaseExpiredError):
            self._pool.apply(undo, self._now())
        self._follow(getattr(op, "channel", None))
        self._write_soon()

    # -- waiting -----------------------------------------------------------------------------

    async def wait(self, op: Op[Any], timeout_s: float | None) -> Any:
        """The answer, or refusal, to an operation that may not have one yet; as `try_`."""
        if self._is_repeated(op):
            return self.try_(op)
        if isinstance(op, OpenGroup):
            # Credit found here is nobody else's: the change that freed it served whoever waited.
            answer = self.try_(op)
            if not isinstance(answer, PoolFullError):
                return answer
        waiter = _Waiter(op, asyncio.get_running_loop().create_future())
        self._tickets += 1
        ticket = self._tickets
        if isinstance(op, GetEvents):
            self._watching.add(waiter)
            self._n_events_seen = -1
            channel, line = None, None
        else:
            channel = getattr(op, "channel", "")
            lines = self._lines.setdefault(channel, {})
            line = lines.setdefault(self._line_of(op, ticket), OrderedDict())
            line[ticket] = waiter
        try:
            self._follow(channel)
            if not waiter.answer.done():
                await asyncio.wait([waiter.answer], timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.answer.done():
                self.take_back(op, waiter.answer.result())
            raise
        finally:
            self._watching.discard(waiter)
            if line is not None:
                line.pop(ticket, None)
                self._forget_idle(str(channel))
                # One who leaves may have held up a smaller request behind.
                self._follow(channel)
        return waiter.answer.result() if waiter.answer.done() else self.try_(waiter.op)

    def _stands_behind(self, op: LeaseBatch) -> bool:
        """Whether others, who ask for the same, came before."""
        return not self._is_repeated(op) and bool(
            self._lines.get(op.channel, {}).get(self._line_of(op, 0))
        )

    def _is_repeated(self, op: Op[Any]) -> bool:
        """Whether it has a lease already."""
        return isinstance(op, LeaseBatch) and self._pool.leases.answer_to(op.request_id) is not None

    @staticmethod
    def _line_of(op: Op[Any], ticket: int) -> Hashable:
        """Those of one line wait for each other. Who watches waits for nobody."""
        if isinstance(op, LeaseBatch):
            return (0, op.n_rollouts)
        return (1, type(op).__name__, ticket if isinstance(op, WaitAvailable | WaitCredit) else 0)

    def _wake(self, channel: str | None) -> None:
        """Try the first of each line again, in the order they came, until none gets an answer."""
        for name in list(self._lines) if channel is None else [channel]:
            heads = {k: line for k, line in self._lines.get(name, {}).items() if line}
            while heads:
                key = min(heads, key=lambda k: (k[0], next(iter(heads[k]))))  # type: ignore[index]
                line = heads[key]
                ticket, waiter = next(iter(line.items()))
                if not waiter.answer.done() and not self._answer(waiter):
                    del heads[key]
                    continue
                del line[ticket]
                if not line:
                    del heads[key]
        if self._watching and self._pool.events.n_events != self._n_events_seen:
            self._n_events_seen = self._pool.events.n_events
            for waiter in self._watching:
                if not waiter.answer.done():
                    self._answer(waiter)

    def _answer(self, waiter: _Waiter) -> bool:
        """Whether it has an answer now."""
        op = waiter.op
        try:
            answer = self._pool.apply(op, self._now())
        except PoolFullError:
            return False
        except Exception as e:  # noqa: BLE001 - as in `try_`
            answer = e
        if answer == "nothing_yet" or (
            isinstance(op, WaitAvailable)
            and not answer.shut_down
            and answer.n_groups <= op.more_than
        ):
            return False
        if (
            isinstance(op, WaitCredit)
            and op.before is not None
            and not answer.shut_down
            and not answer.is_freer(op.before)
        ):
            return False
        if isinstance(op, GetEvents) and not answer.events and not answer.lost:
            waiter.op = replace(op, cursor=answer.cursor)  # what was looked at is not again
            return False
        waiter.answer.set_result(answer)
        return True

    def _waiting(self, channel: str) -> dict[str, int]:
        waiting = [w.op for line in self._lines.get(channel, {}).values() for w in line.values()]
        producers = sum(isinstance(op, _PRODUCERS) for op in waiting)
        return {"consumers": len(waiting) - producers, "producers": producers}

    def _forget_idle(self, channel: str) -> None:
        lines = self._lines.get(channel, {})
        for key in [key for key, line in lines.items() if not line]:
            del lines[key]
        if not lines:
            self._lines.pop(channel, None)

    # -- inside ------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now()

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
        return described

    def _follow(self, channel: str | None) -> None:
        """Do what follows from a change. `channel` is the only one that it can help; None: all."""
        self._wake(channel)
        self._set_timer()

    def _ended(self, e: JournalError) -> JournalError:
        """A process that has a successor ends, so that its clients go there."""
        if isinstance(e, JournalFencedError):
            logger.critical("DataPool: %s", e)
            self._fenced()
        return e

    def _write_soon(self) -> None:
        """Make durable what nobody waits for."""
        if self._journal is not None:
            task = asyncio.create_task(self._write())
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self) -> None:
        (error,) = await self.settle([(Shutdown(), None)])
        if error is not None:
            logger.error("DataPool: %s", error)

    def _set_timer(self) -> None:
        due = self._pool.next_deadline()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self._now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_due = None
        try:
            if self._journal is not None:
                self._journal.check()
            self._pool.tick(self._now())
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
        if self._timer is not None:
            self._timer.cancel()
        if self._journal is not None:
            self._journal.close()
