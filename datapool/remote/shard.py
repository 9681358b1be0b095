"""This module holds one shard for a client so that its calls arrive in order, and once: operations
out, answers back, again if the pool restarts.

    call ──► unanswered ──a write for a few of this turn──► connection ──► answer
                 │                                              │ breaks (the pool died)
                 └───────── all again, in order ◄── connected ◄─┘

Every operation may be made twice without harm (a second submit is a duplicate, a lease request
carries an id): after a broken connection it is not known whether a call was applied.

Owns the way there. Which operations there are, and which shard is asked, is the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from stepwell.datapool.errors import DataPoolError, PoolUnavailableError
from stepwell.datapool.ops import LeaseBatch, Op, SubmitSteps, check_carried, uncarried
from stepwell.datapool.remote.incarnation import Known
from stepwell.datapool.remote.service import CUT_OFF_S, PoolService
from stepwell.datapool.remote.wire import (
    Connection,
    PoolAddress,
    add_frame,
    answers_to,
    connect,
    frame,
    read_answer,
    refusal,
)

log = logging.getLogger(__name__)

R = TypeVar("R")

RESTART_S = CUT_OFF_S + 90.0
"""Seconds to wait for a pool that restarts: until it may take its journal over, and has read it."""
CONNECT_S = 5.0
RETRY_S = 0.05
"""Seconds between two tries to connect."""
AT_ONCE = 16
"""Calls of one turn of the loop, or steps of one call, that are sent before it ends: with all at
its end, callers that wait for each other's answers and the pool would take turns, each with one
core idle. Fewer go out together: each write wakes the pool, which takes the core where cores are
few, so that a gateway of many calls would find its caches cold again and again."""


class Caller(Protocol):
    """A way to a pool, or to one shard of it."""

    def call(self, op: Op[R], timeout_s: float | None = 0.0) -> Awaitable[R]:
        """The answer to `op`, waited for up to `timeout_s` (None: for ever) if there is none yet.
        Takes effect before all that is called later, whenever it is awaited.

        Raises:
            DataPoolError: its refusal.
            PoolUnavailableError: the pool is gone, or does not come back in time.
        """


class Shard(Caller, Protocol):
    """A way to one shard."""

    met: Known

    def close(self) -> None:
        """Hang up. A later call connects again."""


class LocalShard:
    """A pool of this process. Cheap: no step is copied."""

    def __init__(self, service: PoolService) -> None:
        self.service = service
        self.met = service.incarnation

    def call(self, op: Op[R], timeout_s: float | None = 0.0) -> Awaitable[R]:
        check_carried(op)
        return self.service.call(op, timeout_s)

    def close(self) -> None:
        """Do nothing: the pool itself goes on."""


class _Call(Generic[R]):
    """An operation on its way: await it for the answer."""

    __slots__ = ("answer", "end", "number", "op", "sent", "shard")

    def __init__(
        self,
        shard: RemoteShard,
        number: int,
        op: Op[R],
        timeout_s: float | None,
        answer: asyncio.Future[R],
    ) -> None:
        self.shard, self.number, self.op, self.answer = shard, number, op, answer
        self.end = timeout_s and time.monotonic() + timeout_s
        """Time until which it waits; 0: it does not wait; None: for ever."""
        self.sent: Connection | None = None
        """The connection that it went through last: perhaps it was applied."""

    def __await__(self) -> Generator[Any, None, R]:
        try:
            return (yield from self.answer)
        except asyncio.CancelledError:
            self.shard.leave(self)
            raise

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class RemoteShard(ABC):
    """A shard in another process.

    Args:
        met: the pool that is meant, if it is known; any other one is refused
            (`PoolReplacedError`), and an earlier opening of its journal.
    """

    def __init__(self, met: Known = None) -> None:
        self.met = met
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._unanswered: dict[int, _Call[Any]] = {}
        self._unsent: list[_Call[Any]] = []
        """Calls of `_unanswered` that the next write takes."""
        self._number = 0

    @abstractmethod
    async def find(self) -> tuple[PoolAddress, str]:
        """Return the shard's address, looked up after each loss of the connection, and this node of
        the cluster.

        Raises:
            PoolUnavailableError: it is gone for good.
            ConnectionError: it is starting.
        """

    @property
    def is_up(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    def close(self) -> None:
        """Hang up, also on calls that are under way. A later call connects again."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.transport.close()
            self._connection = None
        self._fail_all(PoolUnavailableError("this client hung up meanwhile"))

    # -- a call ------------------------------------------------------------------------------

    def call(self, op: Op[R], timeout_s: float | None = 0.0) -> _Call[R]:
        """Send an operation to the shard; see `Caller.call`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        is_alone = self._only_consumers_wait()
        is_large = isinstance(op, SubmitSteps) and op.n_steps >= AT_ONCE
        self._number += 1
        call = _Call(self, self._number, op, timeout_s, loop.create_future())
        self._unanswered[call.number] = call
        self._unsent.append(call)
        if self._connection is None:
            self._reach(loop)
        elif is_alone or len(self._unsent) == AT_ONCE or is_large:
            self._flush()  # the pool works while the turn goes on
        elif len(self._unsent) == 1:
            loop.call_soon(self._flush)
        return call

    def _only_consumers_wait(self) -> bool:
        """True if nobody else is about to send something."""
        for call in reversed(self._unanswered.values()):  # noqa: SIM110 - `all` takes longer
            if type(call.op) is not LeaseBatch:
                return False
        return True

    def _flush(self) -> None:
        if self._connection is None:
            return
        calls, self._unsent = self._unsent, []
        written = bytearray()
        for call in calls:
            if call.answer.done():
                continue  # its caller left
            left = call.end and max(0.0, call.end - time.monotonic())
            try:
                add_frame(written, (call.number, call.op, left))
            except Exception as e:  # noqa: BLE001 - whatever it is, its caller alone is told
                del self._unanswered[call.number]
                call.fail(uncarried(call.op, e))
            else:
                call.sent = self._connection
        if written:
            self._connection.transport.write(written)

    def _answered(self, frames: Sequence[memoryview]) -> None:
        for data in frames:
            number, is_value, answer = read_answer(data)
            call = self._unanswered.pop(number, None)
            if call is None:
                continue
            try:
                if not is_value:
                    raise refusal(answer)
                value = answers_to(type(call.op)).decode(answer)
            except Exception as e:  # noqa: BLE001 - a refusal, or an answer that cannot be read
                call.fail(e)
                continue
            if call.answer.done():
                self._tell(call.op.undone(value))
            else:
                call.answer.set_result(value)

    # -- a caller that leaves ----------------------------------------------------------------

    def leave(self, call: _Call[Any]) -> None:
        """Nothing may be held for a caller that left. What waits for it in the pool leaves, too."""
        if call.number not in self._unanswered:
            if not call.answer.cancelled() and call.answer.exception() is None:
                self._tell(call.op.undone(call.answer.result()))  # it came in the same moment
        elif call.sent is not None and call.sent is self._connection:
            self._connection.transport.write(frame((call.number, None, 0.0)))
        else:  # a lease that the connection took with it expires
            del self._unanswered[call.number]

    def _tell(self, op: Op[None] | None) -> None:
        """Make a call whose answer nobody needs."""
        if op is not None:
            self.call(op).answer.add_done_callback(lambda a: a.cancelled() or a.exception())

    # -- the connection ----------------------------------------------------------------------

    def _reach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._connecting is None:
            self._connecting = loop.create_task(self._connect())

    async def _connect(self) -> None:
        """Connect, and send what has no answer yet; for as long as somebody waits for one."""
        give_up = time.monotonic() + RESTART_S
        try:
            while self._unanswered and self._connection is None:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await self._try_to_connect()
                except (OSError, TimeoutError) as e:  # ConnectionError: it is starting
                    if isinstance(e, DataPoolError):
                        raise
                    if time.monotonic() > give_up:
                        gone = f"the DataPool cannot be reached ({e}); what was not acknowledged "
                        raise PoolUnavailableError(f"{gone}may be submitted again") from e
                    await asyncio.sleep(RETRY_S)
        except Exception as e:  # noqa: BLE001 - whatever it is, those who wait are told
            self._fail_all(e)
        finally:
            if self._connecting is asyncio.current_task():  # or it was hung up, and called again
                self._connecting = None
        self._flush()

    async def _try_to_connect(self) -> None:
        address, here = await self.find()
        connection, known = await connect(address, here, self._answered, self._lost)
        try:
            if known is not None and self.met is not None:
                known.check_follows(self.met)
            if connection.transport.is_closing():
                raise ConnectionResetError("the pool hung up")
        except BaseException:  # cancelled, too: nobody has this connection yet
            connection.transport.abort()
            raise
        self.met = known or self.met
        self._connection = connection

    def _lost(self, connection: Connection) -> None:
        if connection is not self._connection or self._loop is None:
            return
        self._connection = None
        waited_for = [call for call in self._unanswered.values() if not call.answer.done()]
        self._unanswered = {call.number: call for call in waited_for}
        self._unsent = waited_for
        if self._unsent:
            self._reach(self._loop)

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget the calls that an earlier event loop left behind: they get no answer, and must
        hold up nobody."""
        if self._connection is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._connection.transport.abort()
        self._connection = self._connecting = None
        self._unanswered.clear()
        self._unsent.clear()
        self._loop = loop

    def _fail_all(self, error: Exception) -> None:
        calls = list(self._unanswered.values())
        self._unanswered.clear()
        self._unsent.clear()
        for call in calls:
            call.fail(error)
