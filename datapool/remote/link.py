"""One shard as a client has it: operations out in order, answers back, again if the pool restarts.

    call ──► unanswered ──one write for all of this turn──► connection ──► answer
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
from collections.abc import Awaitable
from typing import Any, Generic, Protocol, TypeVar

from stepwell.datapool.codec import PackedLease
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    PoolUnavailableError,
)
from stepwell.datapool.ops import DropGroup, LeaseBatch, Nack, Op, OpenGroup, ReleaseRequest
from stepwell.datapool.remote.incarnation import Known
from stepwell.datapool.remote.service import CUT_OFF_S, PoolService
from stepwell.datapool.remote.wire import Connection, Door, Request, Sent, connect

log = logging.getLogger(__name__)

R = TypeVar("R")

RESTART_S = CUT_OFF_S + 90.0
"""How long a pool that restarts is waited for: until it may take its journal over, and has read
it."""
CONNECT_S = 5.0
RETRY_S = 0.05
"""Between two tries to connect."""


class AwayError(PoolUnavailableError):
    """The pool went away, or is starting: it may come back."""


class Port(Protocol):
    """A way to one shard."""

    met: Known

    async def call(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> R:
        """The answer to `op`, waited for up to `timeout_s` where it waits (None: for ever).

        Args:
            once: not again if the pool dies meanwhile.

        Raises:
            DataPoolError: its refusal.
            PoolUnavailableError: the pool is gone, or does not come back in time.
            AwayError: `once`, and it is not there now.
        """

    def begin(self, op: Op[R]) -> Awaitable[R]:
        """As `call`, and takes effect before all that is called later, whenever it is awaited."""

    def close(self) -> None:
        """Hang up. A later call connects again."""


class LocalPort:
    """A pool of this process. Cheap: nothing is copied."""

    def __init__(self, service: PoolService) -> None:
        self.service = service
        self.met = service.incarnation

    async def call(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> R:
        return await self.service.call(op, timeout_s)

    def begin(self, op: Op[R]) -> Awaitable[R]:
        return self.service.begin(op)

    def close(self) -> None:
        """As `Port.close`: the pool itself goes on."""


class _Call(Generic[R]):
    __slots__ = ("again", "answer", "give_up", "number", "op", "sent", "timeout_s", "was_sent")

    def __init__(self, number: int, op: Op[R], timeout_s: float | None, again: bool) -> None:
        self.number, self.op, self.timeout_s, self.again = number, op, timeout_s, again
        self.answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.sent = False
        """Through the connection that is up."""
        self.was_sent = False
        """Through an earlier one: perhaps it was applied."""
        self.give_up = time.monotonic() + RESTART_S


class Link(ABC):
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
        self._number = 0
        self._is_flushing = False

    @abstractmethod
    async def find(self) -> tuple[Door, str]:
        """Where it is, asked again after each loss of the connection; and this node of the cluster.

        Raises:
            PoolUnavailableError: it is gone for good.
            ConnectionError: it is starting.
        """

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None and self._connection.is_up

    async def call(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> R:
        """As `Port.call`."""
        return await self._answer(self._start(op, timeout_s, once))

    def begin(self, op: Op[R]) -> Awaitable[R]:
        """As `Port.begin`."""
        return self._answer(self._start(op))

    def close(self) -> None:
        """Hang up, also on calls that are under way. A later call connects again."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.transport.close()
            self._connection = None
        self._fail_all(PoolUnavailableError("this client hung up meanwhile"))

    # -- inside ------------------------------------------------------------------------------

    def _start(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> _Call[R]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._follow(loop)
        self._number += 1
        call = _Call(self._number, op, timeout_s, not once)
        self._unanswered[call.number] = call
        if self.is_up:
            self._flush_soon(loop)
        elif self._connecting is None:
            self._connecting = loop.create_task(self._connect())
        return call

    async def _answer(self, call: _Call[R]) -> R:
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """What an event loop of before left behind gets no answer, and must hold up nobody."""
        if self._connection is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._connection.transport.abort()
        self._connection = self._connecting = None
        self._unanswered.clear()
        self._is_flushing = False
        self._loop = loop

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            # Behind those who are about to send something, too.
            loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if not self.is_up or self._connection is None:
            return
        requests: list[Request] = []
        for call in reversed(self._unanswered.values()):
            if call.sent:
                break  # so is everything before it
            if call.answer.cancelled():
                continue
            call.sent = True
            requests.append((call.number, call.op, call.timeout_s))
        if requests:
            try:
                self._connection.send(requests[::-1])
            except Exception:  # noqa: BLE001 - whose it is, and what, is found out one by one
                for number, *rest in reversed(requests):
                    self._send_one(number, *rest)

    def _send_one(self, number: int, op: Op[Any], timeout_s: float | None) -> None:
        """One of those that did not travel together: one caller's must not take others down."""
        try:
            if self._connection is not None:
                self._connection.send([(number, op, timeout_s)])
        except Exception as e:  # noqa: BLE001 - whatever it is, its caller is told
            why = f"{type(op).__name__} cannot be sent ({e}); pass JSON values, bytes or arrays"
            self._fail(self._unanswered.pop(number), InvalidRequestError(why))

    def _answered(self, sent: Sent) -> None:
        call = self._unanswered.pop(sent.number, None)
        if call is None:
            return
        try:
            answer = sent.to(call.op)
        except Exception as e:  # noqa: BLE001 - a refusal, or an answer that cannot be read
            self._fail(call, e)
            return
        if call.answer.done():
            self._undo(call.op, answer)
        else:
            call.answer.set_result(answer)

    def _leave(self, call: _Call[Any]) -> None:
        """Its caller left; so must its waiter in the pool, or it would be served."""
        if call.number not in self._unanswered:
            if not call.answer.cancelled() and call.answer.exception() is None:
                self._undo(call.op, call.answer.result())  # it came in the same moment
        elif call.sent and self._connection is not None:
            self._connection.send([(call.number, None, 0.0)])
        else:
            del self._unanswered[call.number]
            self._forget(call)

    def _undo(self, op: Op[Any], answer: Any) -> None:
        """Give back what was granted to a caller that has left."""
        if isinstance(answer, PackedLease):
            self._tell(Nack(answer.lease_id, "consumer_left"))
        elif isinstance(op, OpenGroup) and answer == "accepted":
            # Nobody would ever start its rollouts.
            self._tell(DropGroup(op.prompt_uid, "open_cancelled", op.channel))

    def _forget(self, call: _Call[Any]) -> None:
        """Its caller left, and the connection broke before the pool could say what it granted."""
        if call.was_sent and isinstance(call.op, LeaseBatch) and call.op.request_id is not None:
            self._tell(ReleaseRequest(call.op.request_id, "consumer_left"))

    def _tell(self, op: Op[None]) -> None:
        """Make a call whose answer nobody needs."""
        self._start(op).answer.add_done_callback(lambda a: a.cancelled() or a.exception())

    def _lost(self, connection: Connection) -> None:
        if connection is not self._connection or self._loop is None:
            return
        self._connection = None
        give_up = time.monotonic() + RESTART_S
        for call in list(self._unanswered.values()):
            call.was_sent, call.sent, call.give_up = call.was_sent or call.sent, False, give_up
            if call.answer.done():
                del self._unanswered[call.number]
                self._forget(call)
            elif not call.again:
                del self._unanswered[call.number]
                self._fail(call, AwayError("the DataPool went away meanwhile"))
        if self._unanswered and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        """Connect, and send what has no answer yet."""
        try:
            while self._unanswered:
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await self._try_to_connect()
                    break
                except (OSError, TimeoutError) as e:  # ConnectionError: it is starting
                    if isinstance(e, DataPoolError):
                        raise
                    self._give_up(e)
                    await asyncio.sleep(RETRY_S)
        except Exception as e:  # noqa: BLE001 - whatever it is, those who wait are told
            self._fail_all(e)
        finally:
            if self._connecting is asyncio.current_task():  # or it was hung up, and called again
                self._connecting = None
        self._flush()

    async def _try_to_connect(self) -> None:
        door, here = await self.find()
        connection = await connect(door, here, lambda: Connection(self._answered, self._lost))
        try:
            known = await connection.greet(door.secret, self.met)
            if known is not None and self.met is not None:
                known.check_follows(self.met)
        except BaseException:  # also a cancellation
            connection.transport.abort()
            raise
        self.met = known or self.met
        self._connection = connection

    def _give_up(self, why: Exception) -> None:
        """Tell those who have waited too long."""
        now = time.monotonic()
        for call in [c for c in self._unanswered.values() if now > c.give_up or not c.again]:
            del self._unanswered[call.number]
            kind = PoolUnavailableError if call.again else AwayError
            gone = f"the DataPool cannot be reached ({why}); what was not acknowledged may be "
            self._fail(call, kind(f"{gone}submitted again"))

    def _fail_all(self, error: Exception) -> None:
        calls, self._unanswered = self._unanswered, {}
        for call in calls.values():
            self._fail(call, error)

    @staticmethod
    def _fail(call: _Call[Any], error: Exception) -> None:
        if not call.answer.done():
            call.answer.set_exception(error)
