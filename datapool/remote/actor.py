"""The DataPool as a Ray actor: waiting, waking up and time, around the pure `DataPool`.

    submit ─► _change(pool op) ─► _wake: serve waiting consumers, admit waiting groups, set timer
                    ▲                          │
                    └───── timer (tick) ◄──────┤
                                               └─► journal: everybody's answer waits for its commit

Waiters sleep on futures and are woken by the change that satisfies them; nothing polls. It owns
the event loop's side only: what a call means is decided in `pool.py`, what is written where in
`journal.py`, and `client.py` is what most callers use. Methods mirror `DataPool`, so
`handle.submit_step.remote(step)` reads the same; leases travel packed and arrive as `Lease`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import logging
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepwell.datapool.clock import STATE as CLOCK
from stepwell.datapool.clock import Clock
from stepwell.datapool.codec import PackedLease, PackedStep, PackedSteps
from stepwell.datapool.config import PoolConfig, SelectionConfig
from stepwell.datapool.core.pool import Credit, DataPool, check_lease_request
from stepwell.datapool.core.records import Deleted, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    JournalError,
    JournalFencedError,
    JournalFullError,
    LeaseClosedError,
    LeaseExpiredError,
    PoolFullError,
    PoolReplacedError,
    PoolUnavailableError,
)
from stepwell.datapool.inspect.events import Events
from stepwell.datapool.inspect.rows import ExportedPage, GroupRow, Page, StepRow, TrajectoryRow
from stepwell.datapool.process import growing_heap, log_to_file, return_large_blocks, settle_heap
from stepwell.datapool.remote.incarnation import STATE as GENERATION
from stepwell.datapool.remote.incarnation import Incarnation, Known, former_of, record
from stepwell.datapool.remote.line import LineServer
from stepwell.datapool.remote.turns import Numbering, Order, Turns
from stepwell.datapool.selection import DryRun, Marks
from stepwell.datapool.store.folder import journal_exists
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.types import TRAIN, Step

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_NAME = "data_pool"
SHARDS_FILE = "shards"
"""In a journal_dir that several shards share: how many, and `STARTED` once each has a journal."""
STARTED = "started"
Operation: TypeAlias = tuple[str, tuple[Any, ...]]
"""(method, its positional arguments)"""
APPLY_STEPS = "apply_steps"
BATCHED = frozenset(
    {
        *("open_trajectory", "resume_trajectory", "complete_trajectory", "abort_trajectory"),
        *(APPLY_STEPS, "ack", "nack"),
    }
)
"""Operations that `apply` carries: none of them waits, and repeating one is harmless."""

DataPoolHandle: TypeAlias = Any
"""A Ray handle of `DataPoolActor`. Any, because Ray types a handle's methods as Never."""

# Every waiting consumer and every waiting `open_group` occupies a slot of the actor. Ray's default
# of 1000 would let them shut out the very submits they wait for.
MAX_CONCURRENCY = 100_000

TIMER_RETRY_S = 1.0
LOCK_S = 5.0
"""How long another pool over the same journal may take to end."""
CUT_OFF_S = 90.0
"""The same for the former process of this one: longer than Ray's
`gcs_rpc_server_reconnect_timeout_s` (60 s), after which a node that is cut off ends what runs on
it. Then the journal is taken over."""
NOT_IN_ORDER = (None, None)
"""A call that was not made through a handle."""


Unserved: TypeAlias = Literal["nothing_yet", "shut_down"]
"""Why `lease_batch` gave no lease: too few groups in its time, or too few and no more to come."""


class _Request(NamedTuple):
    """Arguments of `DataPool.lease_packed`."""

    n_rollouts: int | None
    channel: str
    batch_size: int
    lease_s: float | None
    request_id: str | None
    at_most: bool


@dataclass(eq=False, slots=True)
class _Consumer:
    """A `lease_batch` call that waits."""

    ticket: int
    request: _Request
    answer: asyncio.Future[PackedLease | Unserved]


@dataclass(eq=False, slots=True)
class _Producer:
    """An `open_group` call that waits for credit, or steps that wait for room."""

    attempt: Callable[[], SubmitOutcome]
    answer: asyncio.Future[SubmitOutcome]


@dataclass(eq=False, slots=True)
class _Watch:
    """A caller that wants to know when something is so."""

    is_met: Callable[[], bool]
    answer: asyncio.Future[None]
    is_consumer: bool


class Available(NamedTuple):
    """What a shard has for a consumer."""

    n_groups: int
    shut_down: bool


@dataclass(slots=True)
class _Waiting:
    """Who waits on one channel, first come first.

    Consumers queue per `n_rollouts`: those who ask for the same wait for each other, while a
    group that only a consumer of fewer can use is not kept from it.
    """

    consumers: dict[int | None, OrderedDict[int, _Consumer]] = field(default_factory=dict)
    producers: OrderedDict[int, _Producer] = field(default_factory=OrderedDict)
    """Those who open groups, and wait for credit."""
    rooms: OrderedDict[int, _Producer] = field(default_factory=OrderedDict)
    """Those whose steps wait for room; they need not wait behind somebody who lacks credit."""
    watches: dict[str, _Watch] = field(default_factory=dict)
    """Those who look at several shards, by a name of their own."""

    def __bool__(self) -> bool:
        return bool(self.consumers or self.producers or self.rooms or self.watches)


class DataPoolActor:
    """Async actor around one `DataPool`. Start it with `start_data_pool`."""

    def __init__(
        self,
        config: PoolConfig | None = None,
        folder: Path | None = None,
        shard: int = 0,
        has_journal: bool = False,
        log_file: Path | None = None,
    ) -> None:
        """
        Args:
            has_journal: there is one in `folder` already; none is made.
            log_file: what the process logs goes there, too.
        """
        log_to_file(log_file)
        config = config or PoolConfig()
        restarted = _was_restarted()
        self._shard = shard
        self._journal: Journal | None = None
        self.incarnation: Known = None
        self._clock = Clock.start()
        if folder is None:
            # A fresh epoch: leases of a lost predecessor must not name leases of this one.
            self._pool = DataPool(config, epoch=f"{shard}.{uuid.uuid4().hex[:12]}")
            if restarted:
                logger.warning("DataPool restarted without a journal: what it held is gone")
        else:
            self._pool = DataPool(config, epoch=str(shard), life=f"{shard}.{uuid.uuid4().hex[:12]}")
            if has_journal and not journal_exists(folder):
                raise PoolReplacedError(
                    f"shard {shard} had its journal in {folder}, and on {socket.gethostname()} "
                    "there is none: what it acknowledged would be missing. Put the folder back, or "
                    f"make it reachable from this node; or remove {folder.parent / SHARDS_FILE} "
                    "to start this shard empty"
                )
            self._journal = self._recover(folder, restarted)
            if not restarted:
                self._pool.reopen()
        self._waiting: dict[str, _Waiting] = {}
        self._watchers: set[asyncio.Future[None]] = set()
        self._n_events_seen = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self.turns = Turns(resumed=restarted)
        self._line = LineServer({"apply": self.apply, "lease_batch": self.lease_batch})
        if ray.is_initialized():
            settle_heap()
            return_large_blocks(1 << 18)

    def _recover(self, folder: Path, restarted: bool) -> Journal:
        """Open the journal and make the pool what it says."""
        began = time.monotonic()
        former = former_of(folder, journal_exists(folder))
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
            journal.put_state(GENERATION, self.incarnation.dump())
            # On a full disk it goes with the first transaction, so before the first answer.
            with contextlib.suppress(JournalFullError):
                journal.flush()
                record(here)
            undo.pop_all()
        self._recovery_s = time.monotonic() - began
        if n_rows:
            logger.warning(
                "DataPool: %d rows of %s replayed in %.2f s", n_rows, folder, self._recovery_s
            )
        return journal

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
        """`DataPool.open_group`, waiting up to `timeout_s` (None: for ever) for credit.

        Raises:
            PoolFullError: no credit within `timeout_s`.
            ChannelShutDownError: the channel was shut down, perhaps while waiting.
        """

        def attempt() -> SubmitOutcome:
            return self._pool.open_group(
                prompt_uid,
                n_rollouts,
                deadline_s,
                min_rollouts,
                metadata,
                channel,
                now=self._now(),
            )

        def undo() -> None:
            # Admitted while being cancelled: nobody would ever start its rollouts.
            self._pool.drop_group(prompt_uid, "open_cancelled", channel, now=self._now())

        return await self._admitted(attempt, channel, timeout_s, undo, "producers")

    async def wait_for_room(self, channel: str = TRAIN, timeout_s: float | None = None) -> None:
        """Return once a step of a new group would be admitted.

        Raises:
            PoolFullError: the channel still blocks after `timeout_s`.
        """

        def attempt() -> SubmitOutcome:
            self._pool.channel(channel).check_room()
            return "accepted"

        await self._admitted(attempt, channel, timeout_s, lambda: None, "rooms")

    async def _admitted(
        self,
        attempt: Callable[[], SubmitOutcome],
        channel: str,
        timeout_s: float | None,
        undo: Callable[[], None],
        line: Literal["producers", "rooms"],
    ) -> SubmitOutcome:
        """The attempt's outcome; while the channel is full it waits in line."""
        # Whoever waits is admitted by the change that frees credit, so credit found here is
        # nobody else's, and arriving late cannot mean passing the queue.
        try:
            return await self._commit(attempt, channel)
        except PoolFullError:
            if timeout_s is not None and timeout_s <= 0:
                raise
        waiter = _Producer(attempt, asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(channel, _Waiting())
        queue: OrderedDict[int, _Producer] = getattr(waiting, line)
        ticket = self._ticket()
        queue[ticket] = waiter
        try:
            await asyncio.wait([waiter.answer], timeout=timeout_s)
            if waiter.answer.done():
                await self._durable()
                return waiter.answer.result()
        except asyncio.CancelledError:
            if _answered(waiter.answer) == "accepted":
                self._undo(undo, channel)
            raise
        finally:
            queue.pop(ticket, None)
            self._forget_idle(channel)
        return await self._commit(attempt, channel)

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.open_trajectory`."""
        return await self._commit(
            lambda: self._pool.open_trajectory(
                trajectory_uid, prompt_uid, attempt, metadata, channel, now=self._now()
            ),
            channel,
        )

    async def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """`DataPool.submit_step`."""
        return await self._commit(
            lambda: self._pool.submit_step(step, channel, now=self._now()), channel
        )

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`."""
        return await self._commit(
            lambda: self._pool.submit_steps(steps, channel, now=self._now()), channel
        )

    async def apply_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome | DataPoolError]:
        """`DataPool.apply_steps`: `submit_steps` with the refusals among the results."""
        return await self._commit(
            lambda: self._pool.apply_steps(steps, channel, now=self._now()), channel
        )

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.complete_trajectory`."""
        return await self._commit(
            lambda: self._pool.complete_trajectory(
                trajectory_uid, reward, metadata, channel, now=self._now()
            ),
            channel,
        )

    async def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.abort_trajectory`."""
        return await self._commit(
            lambda: self._pool.abort_trajectory(
                trajectory_uid, reason, will_retry, channel, now=self._now()
            ),
            channel,
        )

    async def apply(self, *parts: Sequence[Operation]) -> list[Any]:
        """Operations in one trip, in order: each one's result or, as a value, refusal.

        `apply_steps` takes packed steps as plain tuples. In several parts, because Ray sends an
        argument of less than 100 kB along with the call, and a larger one through its object
        store, which takes longer than many small ones.

        Raises:
            InvalidRequestError: an operation that is not in `BATCHED`; none is applied.
            JournalError: it could not be made durable.
        """
        operations = [operation for part in parts for operation in part]
        for name, _ in operations:
            if name not in BATCHED:
                raise InvalidRequestError(
                    f"operation is {name!r}; apply takes {', '.join(sorted(BATCHED))}"
                )
        return await self._commit(lambda: self._apply(operations))

    def _apply(self, operations: Sequence[Operation]) -> list[Any]:
        now = self._now()
        results: list[Any] = []
        refused: set[str] = set()
        for name, arguments in operations:
            try:
                if name == APPLY_STEPS:
                    tuples, channel = arguments
                    steps = list(map(PackedStep._make, tuples))
                    results.append(self._pool.apply_steps(steps, channel, refused, now=now))
                else:
                    results.append(getattr(self._pool, name)(*arguments, now=now))
            except DataPoolError as e:
                results.append(e)
        return results

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        """`DataPool.drop_group`."""
        await self._commit(
            lambda: self._pool.drop_group(prompt_uid, reason, channel, now=self._now()), channel
        )

    # -- consumers ---------------------------------------------------------------------------

    async def lease_parts(self, parts: int, *arguments: Any) -> tuple[PackedLease | Unserved, ...]:
        """`lease_batch` as `parts` (> 1) leases of one id, each with some of the groups: for the
        same reason as the parts of `apply`, the other way round."""
        lease = await self.lease_batch(*arguments)
        return lease.split(parts) if isinstance(lease, PackedLease) else (lease,) * parts

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
        request_id: str | None = None,
        at_most: bool = False,
    ) -> PackedLease | Unserved:
        """`DataPool.lease_batch`, waiting up to `timeout_s` (None: for ever) for the groups.

        "nothing_yet" after the timeout; "shut_down" as soon as the channel is shut down without
        enough of them. Consumers that ask for the same `n_rollouts` are served first come, first
        served. A call that is repeated with its `request_id` gets the lease that it was given
        before. `at_most`: fewer groups will do.

        Raises:
            JournalError: the lease could not be made durable; its groups are ready again.
        """
        check_lease_request(n_rollouts, batch_size, lease_s)
        consumer = _Consumer(
            self._ticket(),
            _Request(n_rollouts, channel, batch_size, lease_s, request_id, at_most),
            asyncio.get_running_loop().create_future(),
        )
        try:
            if self._pool.leases.answer_to(request_id) is None:
                await self._queue(consumer, timeout_s)
            else:
                self._serve_one(consumer)
            # The consumer has left the queue: its lease, if it got one, is among what is awaited.
            await self._durable()
        except (asyncio.CancelledError, JournalError):
            # Nobody was told of the lease, so its groups go back, unless it has ended meanwhile.
            lease = _answered(consumer.answer)
            if isinstance(lease, PackedLease):
                with contextlib.suppress(LeaseClosedError, LeaseExpiredError):
                    self._give_back(lease, "consumer_left")
            raise
        return consumer.answer.result()

    async def _queue(self, consumer: _Consumer, timeout_s: float | None) -> None:
        """Let a consumer wait for its turn. It has an answer and has left the queue afterwards."""
        channel, answer = consumer.request.channel, consumer.answer
        queues = self._waiting.setdefault(channel, _Waiting()).consumers
        queue = queues.setdefault(consumer.request.n_rollouts, OrderedDict())
        queue[consumer.ticket] = consumer
        try:
            self._change(lambda: None, channel)
            waits = timeout_s is None or timeout_s > 0
            if not answer.done() and waits and not self._pool.is_shut_down(channel):
                await asyncio.wait([answer], timeout=timeout_s)
            if not answer.done():
                answer.set_result(
                    "shut_down" if self._pool.is_shut_down(channel) else "nothing_yet"
                )
        finally:
            queue.pop(consumer.ticket, None)
            if not queue and queues.get(consumer.request.n_rollouts) is queue:
                del queues[consumer.request.n_rollouts]
            self._forget_idle(channel)
            # A head of the queue that left may have held back a smaller request behind it. If the
            # journal takes nothing, that one waits for the next change, as everybody does.
            with contextlib.suppress(JournalError):
                self._change(lambda: None, channel)

    def _give_back(self, lease: PackedLease, reason: str) -> None:
        """Nack a lease that its consumer does not get."""
        self._undo(lambda: self._pool.nack(lease.lease_id, reason, now=self._now()), lease.channel)

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> PackedSteps | None:
        """Lease and ack: the steps of the next ready groups, or None.

        Nothing takes them back if the consumer dies on the way; who cannot afford that leases.
        """
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if not isinstance(lease, PackedLease):
            return None
        try:
            await self.ack(lease.lease_id)
        except JournalError as e:
            try:
                self._give_back(lease, "fetch_failed")
            except LeaseClosedError:
                # The ack was applied and is written with the next transaction; the steps are
                # nowhere but here.
                logger.error("DataPool: the ack of a fetched batch is not durable yet: %s", e)
            else:
                raise
        return lease.steps()

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        await self._commit(lambda: self._pool.ack(lease_id, now=self._now()))

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        await self._commit(lambda: self._pool.nack(lease_id, reason, now=self._now()))

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        return await self._commit(lambda: self._pool.renew(lease_id, lease_s, now=self._now()))

    async def release_request(self, request_id: str, reason: str) -> None:
        """Nack the lease that the `lease_batch` of this id was given, if it was."""
        lease = self._pool.leases.answer_to(request_id)
        if lease is not None:
            await self.nack(lease.lease_id, reason)

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        """`DataPool.release_leases`: what a consumer that starts over calls."""
        return await self._commit(
            lambda: self._pool.release_leases(channel, reason, now=self._now()), channel
        )

    # -- several shards ----------------------------------------------------------------------

    async def wait_available(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        more_than: int = -1,
        timeout_s: float = 0,
        watcher: str = "",
    ) -> Available:
        """`DataPool.n_available`, once it is more than that, the channel is shut down, or
        `timeout_s` is over; or as soon as the same `watcher` waits for something else."""

        def now() -> Available:
            return Available(
                self._pool.n_available(n_rollouts, channel), self._pool.is_shut_down(channel)
            )

        def is_met() -> bool:
            available = now()
            return available.n_groups > more_than or available.shut_down

        await self._watch(watcher, channel, timeout_s, is_met, is_consumer=True)
        return now()

    async def wait_credit(
        self,
        prompt_uid: str | None = None,
        channel: str = TRAIN,
        before: Mapping[str, tuple[int, int]] | None = None,
        timeout_s: float = 0,
        watcher: str = "",
    ) -> Credit:
        """`DataPool.credit`, once it is freer than `before`; else as `wait_available`."""

        def is_met() -> bool:
            credit = self._pool.credit(prompt_uid, channel)
            return before is None or credit.is_freer(before) or credit.shut_down

        await self._watch(watcher, channel, timeout_s, is_met, is_consumer=False)
        return self._pool.credit(prompt_uid, channel)

    async def _watch(
        self,
        watcher: str,
        channel: str,
        timeout_s: float,
        is_met: Callable[[], bool],
        *,
        is_consumer: bool,
    ) -> None:
        waiting = self._waiting.setdefault(channel, _Waiting())
        former = waiting.watches.pop(watcher, None)
        if former is not None and not former.answer.done():
            former.answer.set_result(None)
        watch = _Watch(is_met, asyncio.get_running_loop().create_future(), is_consumer)
        try:
            self._set_timer()  # after a restart nobody else may call, and what is due may be it
            if timeout_s > 0 and not is_met():
                waiting.watches[watcher] = watch
                await asyncio.wait([watch.answer], timeout=timeout_s)
        finally:
            if waiting.watches.get(watcher) is watch:
                del waiting.watches[watcher]
            self._forget_idle(channel)

    # -- people and sources ------------------------------------------------------------------

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.set_reward`."""
        return await self._commit(
            lambda: self._pool.set_reward(
                trajectory_uid, reward, step_index, channel, now=self._now()
            ),
            channel,
        )

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        marks: Mapping[str, Any] | None = None,
    ) -> Marks:
        """`DataPool.mark`."""
        return await self._commit(
            lambda: self._pool.mark(
                prompt_uid, trajectory_uid, channel, now=self._now(), **(marks or {})
            ),
            channel,
        )

    async def delete(self, trajectory_uid: str | None = None, tag: str | None = None) -> Deleted:
        """`DataPool.delete`."""
        return await self._commit(lambda: self._pool.delete(trajectory_uid, tag, now=self._now()))

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        """`DataPool.advance_version`."""
        await self._commit(
            lambda: self._pool.advance_version(version, channel, now=self._now()), channel
        )

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """`DataPool.dry_run`."""
        return self._pool.dry_run(selection, channel, batch_size, now=self._now())

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """`EventLog.after`, waiting up to `timeout_s` for the first one."""
        end = time.monotonic() + timeout_s
        lost = False
        self._set_timer()  # after a restart nobody else may call, and what is due is an event
        while True:
            page = self._pool.events.after(cursor, channel, kinds, limit)
            lost = lost or page.lost
            left = end - time.monotonic()
            if page.events or left <= 0:
                return replace(page, lost=lost)
            cursor = page.cursor
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.add(watcher)
            try:
                await asyncio.wait([watcher], timeout=left)
            finally:
                self._watchers.discard(watcher)

    # -- reading -----------------------------------------------------------------------------

    async def list_groups(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        filters: Mapping[str, Any] | None = None,
    ) -> Page[GroupRow]:
        """`DataPool.list_groups`."""
        return self._pool.list_groups(channel, cursor, limit, now=self._now(), **(filters or {}))

    async def list_trajectories(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        filters: Mapping[str, Any] | None = None,
    ) -> Page[TrajectoryRow]:
        """`DataPool.list_trajectories`."""
        return self._pool.list_trajectories(
            channel, cursor, limit, now=self._now(), **(filters or {})
        )

    async def list_steps(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        include_tokens: bool = False,
        filters: Mapping[str, Any] | None = None,
    ) -> Page[StepRow]:
        """`DataPool.list_steps`."""
        return self._pool.list_steps(
            channel, cursor, limit, include_tokens, now=self._now(), **(filters or {})
        )

    async def read_trajectories(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        filters: Mapping[str, Any] | None = None,
    ) -> ExportedPage:
        """`DataPool.read_trajectories`."""
        return self._pool.read_trajectories(
            channel, cursor, limit, now=self._now(), **(filters or {})
        )

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`, with the waiting callers of each channel."""
        self._set_timer()  # after a restart nobody else may call
        stats = self._pool.get_statistics(channel, now=self._now())
        for name, counts in stats.items() if channel is None else [(channel, stats)]:
            waiting = self._waiting.get(name, _Waiting())
            watching = sum(watch.is_consumer for watch in waiting.watches.values())
            counts["waiting"] = {
                "consumers": sum(map(len, waiting.consumers.values())) + watching,
                "producers": len(waiting.producers)
                + len(waiting.rooms)
                + len(waiting.watches)
                - watching,
            }
        return stats

    async def describe(self) -> dict[str, Any]:
        """This shard: process, durability, memory and journal."""
        described: dict[str, Any] = {
            "shard": self._shard,
            "n_shards": self._pool.config.shards,
            "pid": os.getpid(),
            "durability": self._pool.config.durability,
            "memory_bytes": sum(c.memory_bytes for c in self._pool.channels.values()),
        }
        if self._journal is not None and self.incarnation is not None:
            described["pool"], described["generation"] = self.incarnation
            described["journal"] = {
                "folder": str(self._journal.folder),
                "recovery_s": self._recovery_s,
                **self._journal.statistics(),
            }
        return described

    async def open_line(self) -> tuple[str, str, Known]:
        """(id of the node, name of a socket there) for clients on the same machine: see `line`.
        And which pool this is."""
        return ray.get_runtime_context().get_node_id(), await self._line.open(), self.incarnation

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPool.shutdown`; consumers wake up with None, `open_group` with an error."""
        await self._commit(lambda: self._pool.shutdown(channel, now=self._now()), channel)
        for name in list(self._waiting) if channel is None else [channel]:
            waiting = self._waiting.get(name)
            for queue in list(waiting.consumers.values()) if waiting else ():
                for consumer in queue.values():
                    if not consumer.answer.done():
                        consumer.answer.set_result("shut_down")

    # -- inside ------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._clock.now()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    async def _commit(self, operation: Callable[[], T], channel: str | None = None) -> T:
        """Do it, and answer once that is durable. `channel` is the only one that the change can
        help; None wakes all."""
        try:
            return self._change(operation, channel)
        finally:
            # Also after an error: the other steps of a refused batch were applied.
            await self._durable()

    def _change(self, operation: Callable[[], T], channel: str | None = None) -> T:
        """Every state change passes here, and what follows from it is done at once."""
        if self._journal is not None:
            try:
                self._journal.check()  # nothing is changed that cannot be written down
            except JournalFencedError as e:
                raise _end(e) from None
        try:
            return operation()
        finally:
            self._follow(channel)

    def _undo(self, operation: Callable[[], None], channel: str) -> None:
        """Take back a change that its caller will not hear of. Also while the journal takes
        nothing: it keeps the change and its end together, until it can write both."""
        try:
            operation()
        finally:
            self._follow(channel)
        self._write_soon()

    def _follow(self, channel: str | None) -> None:
        """Do what follows from a change."""
        self._wake(channel)
        self._pool.write_counts()

    async def _durable(self) -> None:
        """Return once everything done so far is."""
        if self._journal is not None:
            try:
                await self._journal.committed()
            except JournalFencedError as e:
                raise _end(e) from None
            self._pool.written()

    def _write_soon(self) -> None:
        """Make durable what nobody waits for."""
        if self._journal is None:
            return
        task = asyncio.create_task(self._durable())
        self._writing.add(task)
        task.add_done_callback(self._wrote)

    def _wrote(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("DataPool: %s", error)

    def _wake(self, channel: str | None = None) -> None:
        for name in list(self._waiting) if channel is None else [channel]:
            waiting = self._waiting.get(name)
            if waiting is not None:
                # Consumers first: what they take is credit for producers.
                self._serve(waiting)
                self._admit(waiting)
                for watch in waiting.watches.values():
                    if not watch.answer.done() and watch.is_met():
                        watch.answer.set_result(None)
        if self._watchers and self._pool.events.n_events != self._n_events_seen:
            self._n_events_seen = self._pool.events.n_events
            for watcher in self._watchers:
                if not watcher.done():
                    watcher.set_result(None)
        self._set_timer()

    def _serve(self, waiting: _Waiting) -> None:
        heads = {n: queue for n, queue in waiting.consumers.items() if queue}
        while heads:
            n_rollouts = min(heads, key=lambda n: next(iter(heads[n])))
            queue = heads[n_rollouts]
            ticket, consumer = next(iter(queue.items()))
            if not consumer.answer.done() and not self._serve_one(consumer):
                del heads[n_rollouts]
                continue
            del queue[ticket]
            if not queue:
                del heads[n_rollouts]

    def _serve_one(self, consumer: _Consumer) -> bool:
        """Whether it got an answer: its groups, or what went wrong with choosing them."""
        try:
            lease = self._pool.lease_packed(*consumer.request, now=self._now())
        except DataPoolError as e:
            consumer.answer.set_exception(e)
            return True
        if lease is not None:
            consumer.answer.set_result(lease)
        return lease is not None

    def _admit(self, waiting: _Waiting) -> None:
        for queue in (waiting.producers, waiting.rooms):
            while queue:
                ticket, producer = next(iter(queue.items()))
                if not producer.answer.done():
                    try:
                        producer.answer.set_result(producer.attempt())
                    except PoolFullError:
                        break
                    except DataPoolError as e:
                        producer.answer.set_exception(e)
                del queue[ticket]

    def _forget_idle(self, channel: str) -> None:
        if not self._waiting.get(channel, True):
            del self._waiting[channel]

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
            self._change(lambda: self._pool.tick(self._now()))
        except DataPoolError as e:
            logger.error("DataPool: %s", e)
            # What is due stays due: it may be all that a waiting consumer waits for.
            self._timer = asyncio.get_running_loop().call_later(TIMER_RETRY_S, self._on_timer)
        self._write_soon()


def start_data_pool(
    config: PoolConfig | None = None,
    name: str = DEFAULT_NAME,
    namespace: str | None = None,
    **options: Any,
) -> DataPoolHandle:
    """Start the pool's actor and wait until it answers. Needs an initialised Ray.

    Args:
        name, namespace: under which `connect` finds it.
        options: further Ray actor options (`lifetime="detached"`, `resources`, …).

    Raises:
        PoolUnavailableError: it cannot start; the message says why (a journal that is damaged, or
            that another pool has open, …).
    """
    config = config or PoolConfig()
    if config.shards > 1:
        raise InvalidRequestError(
            f"pool.shards is {config.shards}, and start_data_pool starts one actor; use "
            "start_shards, and connect(name)"
        )
    handle = create_actor(config, journal_folder(config), 0, name, namespace, **options)
    try:
        ray.get(handle.get_statistics.remote())
    except RayActorError as e:
        raise unavailable(e) from e
    return handle


def create_actor(
    config: PoolConfig,
    folder: Path | None,
    shard: int,
    name: str,
    namespace: str | None,
    has_journal: bool = False,
    log_file: Path | None = None,
    **options: Any,
) -> DataPoolHandle:
    """The handle of a new actor, which need not be up yet.

    With a journal it stays on one node, because a restart elsewhere would not find its journal:
    the first shard here, the others on the next nodes. Only if the node is gone Ray tries others,
    which may see the folder, too.
    """
    if folder is not None and "scheduling_strategy" not in options:
        nodes = _nodes()
        node = nodes[shard % len(nodes)]
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        # Ray puts an actor that needs nothing on a random node, whatever its affinity.
        options.setdefault("memory", 1)
    settings: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "max_restarts": -1,
        "max_concurrency": MAX_CONCURRENCY,
        "num_cpus": 0,
        **options,
    }
    # Any: Ray's own types do not cover `.options`.
    actor_class: Any = ray.remote(_in_order(DataPoolActor))
    return actor_class.options(**settings).remote(config, folder, shard, has_journal, log_file)


def _nodes() -> list[str]:
    """Ids of the nodes that are up, this one first, the others by address."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    return [node["NodeID"] for node in nodes]


def journal_folder(config: PoolConfig) -> Path | None:
    """Where the journal is; the same for every restart of the actor.

    Raises:
        JournalError: it holds what another number of shards wrote.
    """
    if config.durability == "none":
        return None
    if config.journal_dir is not None:
        folder = config.journal_dir.absolute()
        _check_shards(folder, config.shards)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="stepwell-pool-"))
    # The pool goes with this process, unless it is detached; then so does its memory.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _check_shards(folder: Path, n_shards: int) -> None:
    """A group lives in the shard that its prompt_uid and the number of shards name: with another
    number it would be looked for elsewhere."""
    note = folder / SHARDS_FILE
    try:
        if note.exists():
            before = next(iter(note.read_text().split()), "unknown")
        elif journal_exists(folder):
            before = "1"
        else:
            before = str(n_shards)
            if n_shards > 1:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _write_note(folder, before)
    except OSError as e:
        raise JournalError(
            f"{folder}: the number of shards cannot be read or written there ({e}); set "
            "pool.journal_dir to a folder that can be written"
        ) from e
    if before != str(n_shards):
        raise JournalError(
            f"pool.shards is {n_shards}, but {folder} was written by {before} "
            f"shard(s); start with pool.shards={before}, or export, and import into a pool "
            "with another journal_dir"
        )


def have_started(folder: Path) -> bool:
    """Whether all shards of `folder` have a journal since an earlier start."""
    note = folder / SHARDS_FILE
    return note.exists() and STARTED in note.read_text().split()


def note_started(folder: Path, n_shards: int) -> None:
    """From now on a shard without a journal has lost it."""
    if not have_started(folder):
        _write_note(folder, f"{n_shards} {STARTED}")


def _write_note(folder: Path, text: str) -> None:
    note = folder / SHARDS_FILE
    draft = note.with_suffix(".new")  # a full disk, or a kill, leaves no empty note
    draft.write_text(f"{text}\n")
    draft.replace(note)


def unavailable(error: RayActorError) -> PoolUnavailableError:
    """Ray's error as ours, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "creation task" in lines[0]:
        # It says why in the last line of a traceback. Names of our own exceptions say no more.
        reason = re.sub(r"^stepwell\.\S+: ", "", lines[-1])
        return PoolUnavailableError(f"the DataPool did not start: {reason}")
    return PoolUnavailableError(
        f"the DataPool cannot be reached ({lines[0]}); "
        "what was not acknowledged may be submitted again"
    )


def _in_order(cls: type[DataPoolActor]) -> type[DataPoolActor]:
    """`cls` with calls that begin in the order they were made (see `turns.py`).

    A class of its own for every pool, because Ray takes the numbering from the class: two pools
    that shared one would each miss the other's numbers.
    """
    numbering = Numbering()

    def wrap(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def in_turn(
            self: DataPoolActor,
            *args: Any,
            order: tuple[Order | None, Known] = NOT_IN_ORDER,
            **kwargs: Any,
        ) -> Any:
            turn, known = order
            await self.turns.take(turn)
            if known is not None and self.incarnation is not None:
                self.incarnation.check_follows(known)
            return await method(self, *args, **kwargs)

        # Ray unwraps methods and would look at the inner one; and it checks calls against the
        # signature before it sends them.
        del in_turn.__dict__["__wrapped__"]
        signature = inspect.signature(method)
        keyword = inspect.Parameter("order", inspect.Parameter.KEYWORD_ONLY, default=NOT_IN_ORDER)
        extra = {
            "__signature__": signature.replace(
                parameters=[*signature.parameters.values(), keyword]
            ),
            "__ray_invocation_decorator__": numbering,
        }
        in_turn.__dict__.update(extra)
        return in_turn

    methods = {
        name: wrap(method)
        for name, method in vars(cls).items()
        if not name.startswith("_") and inspect.iscoroutinefunction(method)
    }
    return type(cls.__name__, (cls,), {**methods, "__doc__": cls.__doc__})


def _end(e: JournalFencedError) -> JournalFencedError:
    """A process that has a successor ends, so that its clients go there."""
    logger.critical("DataPool: %s", e)
    if _is_actor():
        os._exit(1)
    return e


def _is_actor() -> bool:
    """Whether this process is an actor's."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _was_restarted() -> bool:
    if not _is_actor():
        return False
    with warnings.catch_warnings():
        # The property itself is current; its body uses a deprecated one.
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _answered(answer: asyncio.Future[T]) -> T | None:
    """The result of a future that has one."""
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        return answer.result()
    return None
