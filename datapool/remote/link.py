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
from typing import Any, Generic, Protocol, TypeVar

from stepwell.datapool.codec import PackedLease
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    PoolUnavailableError,
)
from stepwell.datapool.ops import DropGroup, Nack, Op, OpenGroup
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


class Port(Protocol):
    """A way to one shard."""

    met: Known

    async def call(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> R:
        """The answer to `op`, waited for up to `timeout_s` where it waits (None: for ever).

        Args:
            once: not again if the pool dies meanwhile.

        Raises:
            DataPoolError: its refusal.
            PoolUnavailableError: the pool is gone, or does not come back in time; or `once`.
        """

    def close(self) -> None:
        """Hang up. A later call connects again."""


class LocalPort:
    """A pool of this process. Cheap: nothing is copied."""

    def __init__(self, service: PoolService) -> None:
        self.service = service
        self.met = service.incarnation

    async def call(self, op: Op[R], timeout_s: float | None = 0.0, once: bool = False) -> R:
        return await self.service.call(op, timeout_s)

    def close(self) -> None:
        """As `Port.close`: the pool itself goes on."""


class _Call(Generic[R]):
    __slots__ = ("again", "answer", "give_up", "number", "op", "sent", "timeout_s")

    def __init__(self, number: int, op: Op[R], timeout_s: float | None, again: bool) -> None:
        self.number, self.op, self.timeout_s, self.again = number, op, timeout_s, again
        self.answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.sent = False
        self.give_up = time.monotonic() + RESTART_S + (timeout_s or 0.0)


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
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def close(self) -> None:
        """Hang up. A later call connects again."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._connection is not None:
            self._connection.transport.close()

    # -- inside ------------------------------------------------------------------------------

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
            except (TypeError, ValueError, OverflowError, DataPoolError):
                for number, *rest in reversed(requests):
                    self._send_one(number, *rest)

    def _send_one(self, number: int, op: Op[Any], timeout_s: float | None) -> None:
        """One of those that did not travel together: one caller's must not take others down."""
        try:
            if self._connection is not None:
                self._connection.send([(number, op, timeout_s)])
        except (TypeError, ValueError, OverflowError, DataPoolError) as e:
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
        if not call.answer.done():
            call.answer.set_result(answer)
        elif isinstance(answer, PackedLease):
            self._forget(Nack(answer.lease_id, "consumer_left"))
        elif isinstance(call.op, OpenGroup) and answer == "accepted":
            # Nobody would ever start its rollouts.
            self._forget(DropGroup(call.op.prompt_uid, "open_cancelled", call.op.channel))

    def _leave(self, call: _Call[Any]) -> None:
        """Its caller left; so must its waiter in the pool, or it would be served."""
        if not call.sent:
            self._unanswered.pop(call.number, None)
        elif self.is_up and self._connection is not None and call.number in self._unanswered:
            self._connection.send([(call.number, None, 0.0)])

    def _forget(self, op: Op[None]) -> None:
        """Undo what was granted to a caller that has left."""
        task = asyncio.ensure_future(self.call(op))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _lost(self, connection: Connection) -> None:
        if connection is not self._connection or self._loop is None:
            return
        self._connection = None
        for call in [c for c in self._unanswered.values() if c.answer.done() or not c.again]:
            del self._unanswered[call.number]
            self._fail(call, PoolUnavailableError("the DataPool went away meanwhile"))
        for call in self._unanswered.values():
            call.sent = False
        if self._unanswered and self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        """Connect, and send what has no answer yet."""
        try:
            while True:
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
            calls, self._unanswered = self._unanswered, {}
            for call in calls.values():
                self._fail(call, e)
        finally:
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
            gone = f"the DataPool cannot be reached ({why}); what was not acknowledged may be "
            self._fail(call, PoolUnavailableError(f"{gone}submitted again"))

    @staticmethod
    def _fail(call: _Call[Any], error: Exception) -> None:
        if not call.answer.done():
            call.answer.set_exception(error)
