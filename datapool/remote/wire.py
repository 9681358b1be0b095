"""This module carries operations between processes so that a pool is called past Ray: frames over
one connection, answered in any order.

Ray says where a pool is, whether it lives, and starts it again; what is asked of it and answered
goes over a Unix socket on the same machine and TCP between machines::

    client                                        pool
      │ ◄──────────── challenge: 32 bytes ────────── │
      │ ────────── HMAC of it with the secret ─────► │
      │ ◄───────── which pool this is ────────────── │   another one than was met: the client leaves
      │ ── number, operation, seconds to wait ─────► │   applied in the order of arrival
      │ ── number, operation, seconds ─────────────► │
      │ ◄──────── number, answer or error ────────── │   once it is durable
      │ ── number, nothing ────────────────────────► │   its caller left

A frame is a length (4 bytes) and msgpack; nothing is pickled, so a peer can send data and no code.
The secret comes through Ray. The Unix socket's name is abstract on Linux, so that nothing is left
of a killed process; elsewhere it is a path in a folder of this user's. TCP listens once somebody on
another machine asks for it.

Does not own: what an operation means (`ops.py`), when an answer is due (`service.py`), what becomes
of calls whose connection broke (`shard.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import platform
import secrets
import socket
import struct
import tempfile
import uuid
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union, get_args

import msgspec

from stepwell.datapool.codec import decoder, encoder
from stepwell.datapool.errors import DataPoolError, InvalidRequestError, PoolUnavailableError
from stepwell.datapool.ops import CHANGES, Op, Refusal, SubmitSteps
from stepwell.datapool.questions import QUESTIONS
from stepwell.datapool.remote.incarnation import Incarnation, Known
from stepwell.datapool.remote.service import Applied, PoolService

log = logging.getLogger(__name__)

R = TypeVar("R")

_LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 31
HELLO_S = 10.0
"""Seconds that a peer may take to say who it is."""
MAX_HELLO = 4096
"""Bytes of a peer that has not said so yet."""

Answered: TypeAlias = Callable[[Sequence[memoryview]], None]


class PoolAddress(NamedTuple):
    """The address of a pool."""

    node: str
    """Node of the cluster that it is on."""
    n_shards: int
    """Number of shards of the pool, of which this is one."""
    unix: str
    tcp: tuple[str, int] | None
    secret: bytes


_AnyOp: Any = Union[CHANGES + QUESTIONS]  # noqa: UP007 - a union of what a table lists
_requests = decoder(tuple[int, _AnyOp | None, float | None])
_unread = decoder(tuple[int, msgspec.Raw, msgspec.Raw])
_proof = decoder(bytes)
_welcome = decoder(Incarnation | None)
read_answer = decoder(tuple[int, bool, msgspec.Raw]).decode
"""The number of the request, whether it was not refused, and the answer or refusal."""
_refusal = decoder(Refusal)


def refusal(answer: msgspec.Raw) -> DataPoolError:
    """Return the error that a refusal stands for."""
    found: Refusal = _refusal.decode(answer)
    return found.error()


@cache
def answers_to(kind: type[Op[Any]]) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of the answers to operations of a kind."""
    (answer,) = next(filter(None, map(get_args, kind.__orig_bases__)))  # type: ignore[attr-defined]
    return decoder(answer)


def add_frame(written: bytearray, content: Any) -> None:
    """Append a frame to what is to be written. It is encoded in place: a lease has 200 kB, and each
    copy of it costs as much as making it.

    Raises:
        TypeError, ValueError, OverflowError: the content cannot be encoded; nothing is appended.
        InvalidRequestError: it is too long; the same.
    """
    at = len(written)
    written += bytes(_LENGTH.size)
    try:
        encoder.encode_into(content, written, -1)
        n_bytes = len(written) - at - _LENGTH.size
        if n_bytes >= MAX_FRAME:
            raise InvalidRequestError(
                f"a message of {n_bytes} bytes is longer than {MAX_FRAME}; send fewer steps at once"
            )
    except BaseException:  # whatever it is goes on; half a frame would spoil those after it
        del written[at:]
        raise
    _LENGTH.pack_into(written, at, n_bytes)


def frame(content: Any) -> bytearray:
    """A frame alone."""
    written = bytearray()
    add_frame(written, content)
    return written


def _proven(secret: bytes, challenge: bytes) -> bytes:
    """Proof that one knows the secret, without telling it."""
    return hmac.digest(secret, challenge, "sha256")


class _Frames(asyncio.Protocol):
    """One end of a connection: bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._longest = MAX_HELLO
        self.transport: Any = None  # uvloop's is no asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            _keep_alive(peer)

    def data_received(self, data: bytes) -> None:
        try:
            if frames := self._whole(data):
                self.received(frames)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            log.warning("a peer of the DataPool sent what is none of its messages (%s)", e)
            self._buffer = bytearray()
            self.transport.abort()

    def _whole(self, data: bytes) -> list[memoryview]:
        """Return the frames that end with this data, as views of it and of what came before."""
        if self._buffer:
            self._buffer += data
        whole: bytes | bytearray = self._buffer or data
        view, n_bytes, begin = memoryview(whole), len(whole), _LENGTH.size
        frames: list[memoryview] = []
        at = 0
        while n_bytes - at >= begin:
            (length,) = _LENGTH.unpack_from(whole, at)
            if length > self._longest:
                raise msgspec.DecodeError(f"a frame of {length} bytes")
            end = at + begin + length
            if n_bytes < end:
                break
            frames.append(view[at + begin : end])
            at = end
        if at or whole is data:  # what is viewed is left to its viewers
            self._buffer = bytearray(view[at:])
        return frames

    def received(self, frames: Sequence[memoryview]) -> None:
        """Take the frames that came together."""
        raise NotImplementedError


def _keep_alive(peer: Any) -> None:
    """A machine that is gone says nothing: within half a minute its connections end, whether
    something is on its way or nobody has a call."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    for name, value in options.items():
        if hasattr(socket, name):  # macOS has its own
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- the pool's side ---------------------------------------------------------------------------


class Server:
    """Serves a pool, on the loop that `listen` was called on, until the process ends."""

    def __init__(self, service: PoolService, node: str = "") -> None:
        self._service = service
        self._secret = secrets.token_bytes(32)
        self._address = PoolAddress(node, service.n_shards, "", None, self._secret)
        self._servers: list[asyncio.Server] = []
        self._lock = asyncio.Lock()

    async def address(self, tcp_host: str | None = None) -> PoolAddress:
        """Return the address of this pool; by TCP, too, if that of this machine is given."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if not self._address.unix:
                name = _socket_name()
                self._servers.append(await loop.create_unix_server(self._connected, name))
                self._address = self._address._replace(unix=name)
            if tcp_host is not None and self._address.tcp is None:
                server = await loop.create_server(self._connected, tcp_host, 0)
                self._servers.append(server)
                port = server.sockets[0].getsockname()[1]
                self._address = self._address._replace(tcp=(tcp_host, port))
        return self._address

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _connected(self) -> _Served:
        return _Served(self._service, self._secret)


def _socket_name() -> str:
    if platform.system() == "Linux":
        return f"\0stepwell-pool-{uuid.uuid4().hex}"
    return str(Path(tempfile.mkdtemp(prefix="stepwell-")) / "pool")


class _Served(_Frames):
    """One client's connection."""

    def __init__(self, service: PoolService, secret: bytes) -> None:
        super().__init__()
        self._service = service
        self._challenge = secrets.token_bytes(32)
        self._proof = _proven(secret, self._challenge)
        self._is_known = False
        self._waiting: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(frame(self._challenge))
        asyncio.get_running_loop().call_later(HELLO_S, self._check_known)

    def _check_known(self) -> None:
        if not self._is_known:
            self.transport.abort()

    def received(self, frames: Sequence[memoryview]) -> None:
        """Apply the requests that came together; one write answers them, once they are durable."""
        if not self._is_known:
            self._greet(_proof.decode(frames[0]))
            return
        applied: list[Applied] = []
        for channel, requests in groupby(map(_request, frames), _submits_to):
            if channel is not None:
                numbers, submits, _ = zip(*requests, strict=True)
                answers = self._service.try_submits(submits)
                applied += zip(numbers, submits, answers, strict=True)
                continue
            for number, op, timeout_s in requests:
                if isinstance(op, InvalidRequestError):
                    applied.append((number, None, op))
                    continue
                if op is None:  # its caller left, so must what waits for it here
                    if (task := self._waiting.get(number)) is not None:
                        task.cancel()
                    continue
                answer = self._service.try_(op)
                if timeout_s != 0 and op.is_unanswered(answer):
                    task = asyncio.create_task(self._wait(number, op, timeout_s))
                    self._waiting[number] = task
                    task.add_done_callback(partial(self._waited, number))
                else:
                    applied.append((number, op, answer))
        if applied:
            self._service.settle(applied, self._send)

    def _greet(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof):
            log.warning("somebody without the secret was refused")
            self.transport.abort()
            return
        self.transport.write(frame(self._service.incarnation))
        self._is_known = True
        self._longest = MAX_FRAME

    async def _wait(self, number: int, op: Op[Any], timeout_s: float | None) -> None:
        answer = await self._service.wait(op, timeout_s)
        del self._waiting[number]
        # What was granted stays granted, whatever becomes of the connection: the call is repeated
        # through the next one, and a caller that left gives it back when it hears of it.
        self._service.settle([(number, op, answer)], self._send)

    def _waited(self, number: int, task: asyncio.Task[None]) -> None:
        if self._waiting.get(number) is task:  # it was cancelled, perhaps before it began
            del self._waiting[number]
            # Its caller left, and need not be told, but counts.
            self._send([(number, None, PoolUnavailableError("its caller left"))])

    def _send(self, applied: Sequence[Applied]) -> None:
        if self.transport.is_closing():
            return
        written = bytearray()
        for number, op, answer in applied:
            try:
                add_frame(written, _answer(number, answer))
            except Exception as e:  # noqa: BLE001 - whatever it is, the others' answers travel
                self._service.take_back(op, answer)
                error = DataPoolError(f"the answer cannot travel: {e}")
                add_frame(written, _answer(number, error))
        self.transport.write(written)

    def connection_lost(self, exc: Exception | None) -> None:
        for task in tuple(self._waiting.values()):
            task.cancel()


def _request(data: memoryview) -> tuple[int, Op[Any] | InvalidRequestError | None, float | None]:
    """The content of a request's frame: its number, operation and seconds to wait."""
    try:
        request: tuple[int, Op[Any] | None, float | None] = _requests.decode(data)
    except Exception as e:  # noqa: BLE001 - whatever does not fit: its caller alone is told
        number, *_ = _unread.decode(data)  # or nobody: the peer speaks another language
        return number, InvalidRequestError(f"not understood: {e}"), None
    return request


def _submits_to(request: tuple[int, Any, float | None]) -> str | None:
    """The channel that a request submits steps to; None: it does something else."""
    op = request[1]
    return op.channel if type(op) is SubmitSteps else None


def _answer(number: int, answer: Any) -> tuple[int, bool, Any]:
    """The content of an answer's frame."""
    if isinstance(answer, DataPoolError):
        return number, False, Refusal.of(answer)
    if isinstance(answer, Exception):  # a foreign one, as it is: in somebody's selection
        return number, False, Refusal(type(answer).__name__, repr(answer))
    return number, True, answer


# -- the client's side -------------------------------------------------------------------------


class Connection(_Frames):
    """A client's connection, made by `connect`.

    Args:
        answered: takes the frames of answers that came together.
        lost: is called when the connection ends.
    """

    def __init__(
        self,
        secret: bytes,
        answered: Answered,
        lost: Callable[[Connection], None],
    ) -> None:
        super().__init__()
        self._secret: bytes | None = secret
        """Until it was proven."""
        self._answered = answered
        self._lost = lost
        self.known: asyncio.Future[Known] = asyncio.get_running_loop().create_future()
        """Identity of the pool; done once it has let the client in."""

    def received(self, frames: Sequence[memoryview]) -> None:
        if self.known.done():
            self._answered(frames)
        elif self._secret is not None:
            self.transport.write(frame(_proven(self._secret, _proof.decode(frames[0]))))
            self._secret = None
        else:
            self._longest = MAX_FRAME
            self.known.set_result(_welcome.decode(frames[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.known.done():
            self.known.set_exception(ConnectionResetError("the pool hung up"))
        self._lost(self)


async def connect(
    address: PoolAddress,
    here: str,
    answered: Answered,
    lost: Callable[[Connection], None],
) -> tuple[Connection, Known]:
    """A connection to the pool at `address`, by its Unix socket if `here` is the pool's node; and
    which pool it is.

    Raises:
        OSError: nobody listens there, or hangs up, or no pool.
    """
    loop = asyncio.get_running_loop()
    target: Any = address.unix if address.node == here else address.tcp
    if target is None:
        raise ConnectionError(
            f"the DataPool on node {address.node} does not listen for {os.uname()[1]}"
        )

    def make() -> Connection:
        return Connection(address.secret, answered, lost)

    with contextlib.ExitStack() as undo:  # also of a cancellation: nobody else knows it yet
        if address.node == here:
            peer = socket.socket(socket.AF_UNIX)
            undo.callback(peer.close)
            peer.setblocking(False)
            await loop.sock_connect(peer, target)  # uvloop would cut an abstract name off
            _, connection = await loop.create_unix_connection(make, sock=peer)
        else:
            _, connection = await loop.create_connection(make, *target)
        undo.pop_all()
        undo.callback(connection.transport.abort)
        known = await connection.known
        undo.pop_all()
    return connection, known
