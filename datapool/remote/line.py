"""A direct line to a pool on the same machine: calls over a Unix socket, past Ray.

One call of a Ray actor takes 1.3 to 6 ms and a millisecond of CPU on either side, most of it Ray's;
the same call over a socket takes a tenth. Ray still says where the pool is, whether it lives, and
starts it again; what travels, and what an answer means, is the same on both ways::

    begin ──► connected ──frame──► the actor's method ──frame──► answer
        │          └─ the line breaks (the actor died) ─┐
        └─ not yet, another machine ────────────────────┴──► the same call through Ray, which waits
                                                             until the actor is back

All that goes this way may be repeated: after a broken line it is not known whether the call was
applied. Calls on one line begin in the order they were made. Frames are a length (8 bytes) and a
pickle. The socket's name is abstract (Linux), so that nothing is left of a killed process, and each
side hangs up on another user's process. Elsewhere than on Linux there is no line.

Does not own: what may be called (`DataPoolActor.open_line`), order between calls (`outbox.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import ray
from ray import cloudpickle

from stepwell.datapool.remote.incarnation import Known, KnownPool

logger = logging.getLogger(__name__)

Methods: TypeAlias = Mapping[str, Callable[..., Awaitable[Any]]]

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid: unix(7)"""
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 1.0
"""Between attempts to get a line."""


def _frame(*content: Any) -> bytes:
    data: bytes = cloudpickle.dumps(content, protocol=5)  # type: ignore[no-untyped-call]
    return _LENGTH.pack(len(data)) + data


def _failure(number: int, e: Exception) -> bytes:
    try:
        return _frame(number, False, e)
    except Exception:  # noqa: BLE001 - foreign: it holds something that cannot be pickled
        return _frame(number, False, RuntimeError(f"{type(e).__name__}: {e}"))


def _is_of_this_user(transport: Any) -> bool:
    # A socket of its own around a copy: what uvloop gives out answers no getsockopt.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as peer:
        data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return bool(uid == os.geteuid())


class _Frames(asyncio.Protocol, ABC):
    """Bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # uvloop's is no asyncio.Transport
        try:
            known = _is_of_this_user(transport)
        except OSError:  # no file descriptor left to ask with
            known = False
        if not known:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            self.received(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]

    @abstractmethod
    def received(self, frame: bytes) -> None: ...

    def send(self, frame: bytes) -> None:
        self.transport.write(frame)


class LineServer:
    """The actor's side. Serves on the loop that `open` was called on, until the process ends."""

    def __init__(self, methods: Methods) -> None:
        self._methods = methods
        self._server: asyncio.Server | None = None
        self._name = f"\0stepwell-pool-{uuid.uuid4().hex}"
        self._lock = asyncio.Lock()

    async def open(self) -> str:
        """Name of the socket."""
        async with self._lock:
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_unix_server(
                    lambda: _Served(self._methods), self._name
                )
        return self._name


class _Served(_Frames):
    """One client's line."""

    def __init__(self, methods: Methods) -> None:
        super().__init__()
        self._methods = methods
        self._running: dict[int, asyncio.Task[None]] = {}

    def received(self, frame: bytes) -> None:
        number, name, arguments = cloudpickle.loads(frame)
        if name is None:  # its caller left, so must what waits for it here
            if (task := self._running.get(number)) is not None:
                task.cancel()
            return
        self._running[number] = asyncio.create_task(self._run(number, name, arguments))

    async def _run(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = _frame(number, True, await self._methods[name](*arguments))
        except Exception as e:  # noqa: BLE001 - whatever it is, its caller is told
            answer = _failure(number, e)
        finally:
            del self._running[number]
        self.send(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in tuple(self._running.values()):
            task.cancel()


class _Connection(_Frames):
    """The client's side of a line that is up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.is_up = False
        self.met: Known = None
        """The pool at the other end."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._n_calls = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_up = True

    def begin(self, name: str, arguments: tuple[Any, ...]) -> tuple[int, asyncio.Future[Any]]:
        """Send a call; its number and its answer to come (ConnectionError if the line breaks)."""
        self._n_calls += 1
        frame = _frame(self._n_calls, name, arguments)
        answer = self._answers[self._n_calls] = self.loop.create_future()
        self.send(frame)
        return self._n_calls, answer

    def leave(self, number: int) -> None:
        self._answers.pop(number, None)
        if self.is_up:
            self.send(_frame(number, None, None))

    def received(self, frame: bytes) -> None:
        number, is_value, value = cloudpickle.loads(frame)
        answer = self._answers.pop(number, None)
        if answer is None or answer.done():
            return
        if is_value:
            answer.set_result(value)
        else:
            answer.set_exception(value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_up = False
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the pool's line broke"))


async def connect(name: str) -> _Connection:
    """A line to the `LineServer` of this name; up, unless the server is another user's."""
    loop = asyncio.get_running_loop()
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.setblocking(False)
        await loop.sock_connect(peer, name)  # uvloop's create_unix_connection takes paths only
        _, connection = await loop.create_unix_connection(lambda: _Connection(loop), sock=peer)
    except BaseException:  # also a cancellation: nobody else knows of the socket yet
        peer.close()
        raise
    return connection


class LineCall:
    """A call that is under way; `answer` once."""

    def __init__(
        self, connection: _Connection, name: str, arguments: tuple[Any, ...], by_ray: Any
    ) -> None:
        self._connection = connection
        self._by_ray = by_ray
        self._number, self._answer = connection.begin(name, arguments)

    async def answer(self) -> Any:
        """As `outbox.Call.answer`."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self._connection.leave(self._number)
            raise
        except ConnectionResetError:
            return await self._by_ray().answer()


class Line:
    """The client's end. Gets a line when it is first wanted, and again when it broke."""

    def __init__(self, pool: KnownPool) -> None:
        self._pool = pool
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._again_at = 0.0

    def connection(self) -> _Connection | None:
        """The line of this event loop, if it is up; otherwise it is on its way."""
        loop = asyncio.get_running_loop()
        here = self._connection
        if here is not None and here.is_up and here.loop is loop:
            if here.met == self._pool.met:
                return here
            here.transport.close()  # to a former process, which somebody else has followed
        task = self._connecting
        busy = task is not None and task.get_loop() is loop and not task.done()
        if not busy and loop.time() >= self._again_at:
            self._again_at = loop.time() + RECONNECT_S
            self._connecting = loop.create_task(self._connect(loop))
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                node, name = await self._pool.greet()
                met = self._pool.met
                if node != ray.get_runtime_context().get_node_id():
                    self._again_at = float("inf")
                    return
                connection = await connect(name)
                connection.met = met
                self._connection = connection
        except Exception as e:  # noqa: BLE001 - without a line all goes through Ray, at no loss
            logger.debug("no line to the pool: %s", e)
