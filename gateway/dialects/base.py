"""A dialect: one wire format between HTTP and the gateway's own calls.

    body ──parse──► Parsed(ChatRequests, n, options) ──► Exchange ──answer──► JSON
                                                            └─frames, StreamWriter──► bytes

A dialect owns its field names, their validation, the shape of answers, events and errors. It does
not own calls, prompts, ids or tool-call parsing. A field it cannot honour is refused by name. An
`Exchange` merges n samples into one stream: it reads each call's list of deltas, and a dialect's
`StreamWriter` makes bytes of them. What is there at once goes out in one piece.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import orjson

from stepwell.gateway.access import Principal
from stepwell.gateway.call import Calls
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.errors import GatewayError, PictureFoundError
from stepwell.gateway.pictures import RequestPictures
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import THINK_CLOSE, Delta
from stepwell.gateway.tokens.messages import Message
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.calls import LiveCall, SampledToken
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import STREAM_HEADERS, Connection, error_body

P = TypeVar("P", bound=Params)

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, proxies see traffic."""


class Cut(NamedTuple):
    """A place in the list that holds a request's conversation. What precedes it is read without
    what follows, which begins with an assistant's turn or is not there yet."""

    n_items: int = 0
    n_messages: int = 0
    """Messages of the list before it."""
    n_calls: int = 0
    """Tool calls before it, where they are numbered."""
    ignored: tuple[str, ...] = ()
    """`Parsed.ignored`, as far as items before it are left aside."""


_BEGIN = Cut()
KEPT_CUTS = 4
"""The last ones of each request. Claude Code marks its last two messages as cached, so in its next
request the conversation is the same up to the third turn before the end."""


@dataclass(slots=True)
class Known:
    """The known part of a body, which itself holds only the rest; and the cuts found in that."""

    start: Cut = _BEGIN
    """Cut at which the items of the body's list begin."""
    n_kept: int = 0
    """Items before `start` that its list has all the same: a system message, or none."""
    tools: Any = None
    """`Parsed.tools` of a request with the same tools, which the body does not have."""
    params: Any = None
    """Fields of a request that differs from this one in nothing but its list, as `read` gave them,
    without list and tools. Set by `read` otherwise, if somebody asks for cuts."""
    cuts: deque[Cut] | None = None
    """The last ones; None: nobody asks for them."""
    pictures: RequestPictures | None = None
    """Pictures that were taken out of the body; None: none were."""

    def read(self, kind: type[P], body: Mapping[str, Any], list_name: str) -> tuple[P, Any]:
        """The fields of a body, checked, and its list; the other fields may be known.

        Raises:
            RequestError: names the first field that is wrong.
        """
        if self.params is not None:
            return self.params, body[list_name]
        params = kind.read(body)
        if self.cuts is not None:
            self.params = params
        return params, getattr(params, list_name)

    def place(self, i: int) -> int:
        """The place of the body's item `i` in the list of the whole request."""
        return i if i < self.n_kept else i - self.n_kept + self.start.n_items

    def cut(self, i: int, n_read: int, n_calls: int = 0, ignored: Sequence[str] = ()) -> None:
        """Note that an assistant's turn begins with the body's item `i`, or that all are read.

        Args:
            n_read: messages of the items before it.
        """
        if self.cuts is not None:
            n = n_read - self.n_kept + self.start.n_messages
            self.cuts.append(Cut(self.place(i), n, n_calls, tuple(ignored)))

    def picture(self, source: Any, where: str, **left_aside: Any) -> Message:
        """The part of a message that stands for a picture.

        Args:
            source: what the body has in its place.
            where: the path of `source`.
            left_aside: fields beside it that ask for what is not done here, such as a resolution.

        Raises:
            PictureFoundError: no pictures were taken out of the body.
            RequestError: it is no picture, or is refused.
        """
        if self.pictures is None:
            raise PictureFoundError.at(where)
        for name, value in left_aside.items():
            if value is not None and value != "auto":
                told = f"{name}={value!s:.40}"  # in a header
                is_plain = told.isascii() and told.isprintable()
                self.pictures.ignored.append(told if is_plain else name)
        return self.pictures.part(source, where)

    def no_cuts(self) -> None:
        """The list is not all that the conversation was read from."""
        if self.cuts is not None:
            self.cuts.clear()


NOTHING = Known()


class Parsed(msgspec.Struct, eq=False):
    """A request's body, understood."""

    call: ChatRequest
    options: Any = None
    """The dialect's options that shape the answer and not the call."""
    n: int = 1
    """Samples asked for, of each prompt."""
    more: tuple[ChatRequest, ...] = ()
    """The calls of a request's other prompts."""
    trajectory_uid: str | None = None
    """The trajectory that the body itself continues (`previous_response_id`)."""
    ignored: tuple[str, ...] = ()
    """Names of sent fields that were left aside, some with `=value`, in ASCII; the answer's
    `x-stepwell-ignored` header lists them."""
    n_outside: int = 0
    """Messages of the call that are not of the list: a system message, or none."""
    tools: Any = None
    """The request's tools as the dialect has read them, for another body with the same tools."""
    digest: str = ""
    """`body_digest` of the body."""
    remember: Callable[[ChatRequest], None] | None = None
    """Keeps what later requests may bring again, under the keys of this call as it is rendered. It
    refers to the body."""


class Exchange:
    """A request and its calls: one per sample, the samples of the first prompt before those of the
    next one. Dialects answer from it. It reads the calls until it is closed."""

    _closed = False
    _begin: Callable[[], StreamWriter] | None = None
    _writer: StreamWriter | None = None
    """None: the stream has not begun."""
    _connection: Connection | None = None
    _failure: GatewayError | None = None
    """Told when what preceded it has been written."""
    _ended: asyncio.Future[None] | None = None
    """Set when the calls have ended, or one has failed: `write` writes the rest."""
    _draining: asyncio.Task[None] | None = None
    """Waits for a client that reads too slowly."""
    _timer: asyncio.TimerHandle | None = None
    _silent_since = 0.0

    def __init__(
        self,
        service: Calls,
        parsed: Parsed,
        trajectories: Sequence[LiveTrajectory],
        calls: Sequence[LiveCall],
        *,
        model: str,
        tokenizer: ChatTokenizer,
        keepalive_s: float,
    ) -> None:
        self.parsed = parsed
        self.trajectories = trajectories
        """One for each prompt."""
        self.calls = calls
        self.model = model
        self.tokenizer = tokenizer
        self._service = service
        self._keepalive_s = keepalive_s
        if parsed.call.stream:
            self._left = len(calls)
            """Samples whose reply is not written yet."""
            self._read = [_Read() for _ in calls]
        for live in calls:
            live.readers.add(self)

    @property
    def uid(self) -> str:
        """Id of the first call; stable over retries."""
        return self.calls[0].call.uid

    @property
    def created(self) -> int:
        """Unix seconds."""
        return self.calls[0].call.created

    def outcome(self) -> tuple[int | None, bool]:
        """The newest policy version that sampled of it so far (None: nothing is sampled yet); and
        true if a Step of each sample is stored. Of a stream, as far as it is known as it begins."""
        newest, is_recorded = None, True
        for trajectory in self.trajectories:
            is_recorded = is_recorded and trajectory.unrecorded is None
        for live in self.calls:
            version, turn = live.version, live.call.turn
            if version is not None and (newest is None or version > newest):
                newest = version
            if turn is not None and turn.step_index is None:
                is_recorded = False
        return newest, is_recorded

    def _each(self) -> Iterator[tuple[LiveTrajectory, LiveCall]]:
        """Yield the calls with their trajectories."""
        for i, live in enumerate(self.calls):
            yield self.trajectories[i // self.parsed.n], live

    async def results(self) -> Sequence[LiveCall]:
        """The calls, their Steps stored. Where one fails the others are waited for: their replies
        are those of a retry, which samples only what failed.

        Raises:
            GatewayError: a call failed.
        """
        if len(self.calls) == 1:
            trajectory, live = self.trajectories[0], self.calls[0]
            if live.is_due:
                await self._service.run(trajectory, live)
            if live.state != "done":  # it failed, or goes on elsewhere
                await self._service.result(trajectory, live)
            return self.calls
        waiting = [self._service.result(*each) for each in self._each()]
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        return self.calls

    async def write(self, begin: Callable[[], StreamWriter], connection: Connection) -> bytes:
        """Write the stream: what its writer makes of the deltas, as they come, and of the replies.
        Return its last piece, with the terminal event, for the caller to write. What is there at
        once goes out in one piece, of about `PIECE_BYTES` at most: what a client that reads slowly
        does not take stays in the calls.

        A single call is generated here, as one that is not streamed; `_on_change` writes.

        Args:
            begin: begins the answer and makes its writer, once there is something to write, or
                there was nothing for `keepalive_s`.

        Raises:
            GatewayError: a call failed before the answer had begun: its status can tell.
        """
        loop = asyncio.get_running_loop()
        self._begin, self._connection = begin, connection
        self._ended = ended = loop.create_future()
        self._silent_since = loop.time()
        self._timer = loop.call_later(self._keepalive_s, self._look_at_the_clock, loop)
        for live in self.calls:
            live.watchers.append(self._on_change)
        piece = b""
        try:
            if len(self.calls) == 1 and self.calls[0].is_due:
                await self._service.run(self.trajectories[0], self.calls[0])
            else:
                for each in self._each():
                    self._service.go_on(*each)
            self._on_change()
            await ended
            while True:
                await connection.drain()
                piece += self._piece()
                if not self._left:
                    self.delivered()
                    return piece
                if piece:
                    connection.write_piece(piece)
                    piece = b""
        except GatewayError as e:
            if self._writer is None:
                raise
            return piece + self._writer.failed(e)
        finally:
            for live in self.calls:
                live.watchers.remove(self._on_change)
            # They refer to this, and nobody else does: the garbage collector would have to come.
            self._begin = self._writer = None

    def _started(self) -> tuple[StreamWriter, bytes]:
        """Return the writer, and what precedes all that it writes if the answer begins now."""
        if self._writer is not None:
            return self._writer, b""
        if self._begin is None:
            raise RuntimeError("nobody writes the stream")
        self._writer = writer = self._begin()
        return writer, writer.begin()

    def _piece(self) -> bytes:
        """Return what is there and not written yet, as much as goes out in one piece.

        Raises:
            GatewayError: a call failed, and nothing is to be written before that is told.
        """
        if self._failure is not None:
            raise self._failure
        pieces, size = list[bytes](), 0
        for sample, live in enumerate(self.calls):
            read = self._read[sample]
            while size < PIECE_BYTES:
                has_delta, tokens = read.n < len(live.deltas), live.tokens
                if not has_delta and live.error is not None:
                    self._failure = live.error
                    break
                if not has_delta and (live.state != "done" or read.has_reply):
                    break
                writer, piece = self._started()
                if has_delta:
                    if tokens:
                        n_told = max(read.n_told, live.text.told[read.n])
                        tokens = tokens[read.n_told : n_told]
                        read.n_told = n_told
                    piece += writer.delta(sample, live.deltas[read.n], tokens)
                    read.n += 1
                else:
                    piece += writer.reply(sample, live, tokens[read.n_told :])
                    read.has_reply = True
                    self._left -= 1
                pieces.append(piece)
                size += len(piece)
            if self._failure is not None:
                break
        if self._failure is not None and not size:
            raise self._failure
        if not self._left and self._writer is not None:
            pieces.append(self._writer.end())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _on_change(self) -> None:
        """Write what is new while a call goes on; else let `write` go on."""
        ended, connection, goes_on = self._ended, self._connection, False
        if ended is None or connection is None or ended.done():
            return
        for live in self.calls:
            if live.error is not None:
                goes_on = False
                break
            goes_on = goes_on or live.state != "done"
        if not goes_on:
            ended.set_result(None)
        elif not connection.is_full:
            self._write_out(connection, ended)
        elif self._draining is None and not connection.is_lost:
            self._draining = asyncio.create_task(self._when_drained(connection))

    def _write_out(
        self, connection: Connection, ended: asyncio.Future[None], *, is_silent: bool = False
    ) -> None:
        try:
            if is_silent:
                writer, piece = self._started()
                piece = piece or writer.idle
            else:
                piece = self._piece()
            connection.write_piece(piece)
        except Exception as e:  # noqa: BLE001 - raised where the stream is written
            ended.set_exception(e)
            self.close()  # what nobody can write is not generated to its end
        self._silent_since = ended.get_loop().time()

    async def _when_drained(self, connection: Connection) -> None:
        await connection.drain()
        self._draining = None
        self._on_change()

    def delivered(self) -> None:
        """The terminal event was handed to the client's connection, if that still stands."""
        if not self._closed:
            for live in self.calls:
                live.call.delivered = True

    def lose(self) -> None:
        """The connection broke before the client had the ends of the replies."""
        for trajectory, live in self._each():
            if live.call.delivered and live.call.turn is not None:
                live.call.delivered = False
                trajectory.set_unseen(live.call, True)

    def close(self) -> None:
        """The client is gone or served; calls nobody else listens to are aborted."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._draining is not None:
            self._draining.cancel()
        for i, live in enumerate(self.calls):
            self._service.leave(self.trajectories[i // self.parsed.n], live, self)

    def _look_at_the_clock(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell a client that has seen nothing for long that its answer comes."""
        # It runs on: a timer for each event would cost as much as the event.
        ended, connection = self._ended, self._connection
        if ended is None or connection is None or ended.done():
            return
        left = self._silent_since + self._keepalive_s - loop.time()
        if left <= 0:
            if not connection.is_full:
                self._write_out(connection, ended, is_silent=True)
            left = self._keepalive_s
        self._timer = loop.call_later(left, self._look_at_the_clock, loop)


@dataclass(slots=True)
class _Read:
    """Part of a call that a stream has written."""

    n: int = 0
    """Deltas."""
    n_told: int = 0
    """Tokens told with them."""
    has_reply: bool = False
    """The end of it."""


PIECE_BYTES: Final = 2**16
"""A stream writes no more at once, but for what a single delta becomes."""


class StreamWriter(ABC):
    """One streamed answer as bytes, mostly server-sent events, each made as its delta comes.

    Most deltas are text, and all that differs between their events is that text: they are written
    with a `Template`.
    """

    idle = KEEP_ALIVE
    """Keeps the connection alive while nothing comes."""

    def begin(self) -> bytes:
        """The stream's first bytes, before any delta."""
        return b""

    @abstractmethod
    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        """
        Args:
            tokens: those that the delta tells, if the request asks for log-probs.
        """

    @abstractmethod
    def reply(self, sample: int, reply: LiveCall, tokens: Sequence[SampledToken]) -> bytes:
        """The end of a sample, whose Step is stored; `tokens` are those not told yet."""

    def end(self) -> bytes:
        """The terminal event, behind the last sample's reply."""
        return b""

    @abstractmethod
    def failed(self, e: GatewayError) -> bytes:
        """The terminal event instead of the rest."""


class Template:
    """An event of a stream but for a text of its JSON.

    >>> Template(sse({"text": PLACE}))("a")
    b'data: {"text":"a"}\\n\\n'
    """

    def __init__(self, event: bytes) -> None:
        """`event`: with the text `PLACE`."""
        self._before, _, self._after = event.partition(_PLACE)

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._after)


PLACE: Final = uuid.uuid4().hex
"""Stands for the text in a `Template`. Nobody can say it."""
_PLACE = orjson.dumps(PLACE)


class Dialect(ABC):
    name: ClassVar[str]
    """Recorded in each Step's metadata; tells apart the retries of different endpoints."""
    list_name: ClassVar[str | None] = None
    """The field that holds the conversation as a list; None: there is none."""
    stream_headers: Mapping[str, str] = STREAM_HEADERS

    @abstractmethod
    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        """
        Args:
            reader: who asks; answers of others are not there for it. None: the operator.
            known: of the request, when `body` is the rest of it. The call's messages are then what
                is outside the list, what is kept, and what follows `known.start`.

        Raises:
            RequestError: names the field, its value and the remedy.
        """

    def parse_plain(self, body: bytes) -> Parsed | None:
        """`parse` of a body that holds text alone, without an object for each of its fields; None:
        `parse` is to read it, and to say what is wrong with it."""
        return None

    @abstractmethod
    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """The JSON answer; `replies` are the exchange's samples, their Steps stored."""

    @abstractmethod
    def writer(self, exchange: Exchange) -> StreamWriter:
        """The writer of the exchange's stream; a failure of a call becomes the dialect's error
        event."""

    def error(self, e: GatewayError) -> dict[str, Any]:
        """The body of an error answer; its status is `e.status`."""
        return error_body(e, e.param)


def sse(payload: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + orjson.dumps(payload) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


def signature_of(thought: str) -> str:
    """A signature of a thought, for clients that expect one. Nobody has to send it back."""
    data = thought.encode(errors="replace")
    return base64.b64encode(hashlib.blake2b(data, digest_size=24).digest()).decode()


def n_reasoning(reply: LiveCall, tokenizer: ChatTokenizer) -> int:
    """Tokens up to the end of the thought; about as many where that is no token of its own."""
    if not reply.text.reasoning:
        return 0
    close = tokenizer.special.get(THINK_CLOSE)
    if close is not None:
        ends = np.flatnonzero(reply.generation.response_ids == close)
        return int(ends[0]) + 1 if len(ends) else reply.n_response
    if not reply.text.content and not reply.text.tool_calls:
        return reply.n_response
    return min(reply.n_response, len(tokenizer.encode(reply.text.reasoning)))
