"""What a dialect is: one wire format between HTTP and the gateway's own calls.

    body ──parse──► Parsed(ChatRequest, n, options) ──► Exchange ──answer──► JSON
                                                            └─────frames──► server-sent events

A dialect owns its field names, their validation, the shape of answers, events and errors. It does
not own calls, prompts, ids or tool-call parsing. A field it cannot honour is refused by name. An
`Exchange` merges the events of n samples into one stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import orjson
from starlette.datastructures import Headers

from stepwell.gateway.call import Call, Listener, Reply
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.trajectory import LiveTrajectory


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request's body, understood."""

    call: ChatRequest
    options: Any = None
    """What shapes the answer and not the call; the dialect's own."""
    n: int = 1
    """Samples asked for."""
    trajectory_uid: str | None = None
    """The trajectory that the body itself continues (`previous_response_id`)."""
    reads: frozenset[str] = frozenset()
    """The trajectories of stored items that the body refers to (`item_reference`)."""
    ignored: tuple[str, ...] = ()
    """What was left aside of what agents always send, as `path=value` in ASCII; the answer's
    `x-stepwell-ignored` header tells."""
    builtin_tools: tuple[str, ...] = ()
    """Those of `ignored` that are tools which the vendor's own servers would run; refused unless
    `gateway.ignore_builtin_tools`."""


class Event(NamedTuple):
    """Something new of one sample: a delta, or its reply (then nothing follows for it)."""

    sample: int
    item: Delta | Reply
    n_told: int
    """How many of the sample's tokens are told with it and before; see `Listener.n_told`."""


EventOrPause: TypeAlias = Event | None
"""None: nothing came for `keepalive_s`; send whatever keeps the connection alive."""


class Exchange:
    """A request and its calls, one per sample. Dialects answer from it."""

    def __init__(
        self,
        parsed: Parsed,
        trajectory: LiveTrajectory,
        listeners: Sequence[Listener],
        *,
        model: str,
        tokenizer: ChatTokenizer,
        keepalive_s: float,
    ) -> None:
        self.parsed = parsed
        self.trajectory = trajectory
        self.model = model
        self.tokenizer = tokenizer
        self._listeners = tuple(listeners)
        self._keepalive_s = keepalive_s
        self._first: EventOrPause = None
        self._begun = False
        self._closed = False
        self._queue: asyncio.Queue[Event | GatewayError] | None = None
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(listener.call for listener in self._listeners)

    @property
    def uid(self) -> str:
        """Of the first call; stable over retries."""
        return self._listeners[0].call.uid

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled of it so far; None: nothing is sampled yet."""
        return max((v for call in self.calls if (v := call.version) is not None), default=None)

    @property
    def created(self) -> int:
        """Unix seconds."""
        return self._listeners[0].call.created

    async def results(self) -> list[Reply]:
        """All replies, their Steps stored.

        Raises:
            GatewayError: a call failed.
        """
        if len(self._listeners) == 1:
            return [await self._listeners[0].result()]
        return list(await asyncio.gather(*(each.result() for each in self._listeners)))

    async def begin(self) -> None:
        """Wait for the first event (or for `keepalive_s`), while an error can still be a status.

        Raises:
            GatewayError: a call failed.
        """
        self._first = await self._next()
        self._begun = True

    async def events(self) -> AsyncIterator[EventOrPause]:
        """All events, from the first on; ends behind the last sample's reply.

        Raises:
            GatewayError: a call failed.
        """
        if not self._begun:
            await self.begin()
        left = len(self._listeners)
        event = self._first
        while True:
            yield event
            if event is not None and isinstance(event.item, Reply):
                left -= 1
                if left == 0:
                    return
            event = await self._next()

    def delivered(self) -> None:
        """The terminal event was handed to the client's connection, if that still stands."""
        if not self._closed:
            for call in self.calls:
                call.delivered = True

    def close(self) -> None:
        """The client is gone or served; calls nobody else listens to are aborted."""
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        for listener in self._listeners:
            listener.close()

    async def _next(self) -> EventOrPause:
        try:
            async with asyncio.timeout(self._keepalive_s):
                if len(self._listeners) == 1:
                    item = await self._listeners[0].next()
                    return Event(0, item, self._listeners[0].n_told)
                return await self._merged()
        except GatewayError:  # of which one is a TimeoutError, too
            raise
        except TimeoutError:
            return None

    async def _merged(self) -> Event:
        if self._queue is None:
            self._queue = asyncio.Queue()
            self._pumps = [
                asyncio.create_task(self._pump(i, listener, self._queue))
                for i, listener in enumerate(self._listeners)
            ]
        event = await self._queue.get()
        if isinstance(event, GatewayError):
            raise event
        return event

    @staticmethod
    async def _pump(
        index: int, listener: Listener, queue: asyncio.Queue[Event | GatewayError]
    ) -> None:
        try:
            while True:
                item = await listener.next()
                queue.put_nowait(Event(index, item, listener.n_told))
                if isinstance(item, Reply):
                    return
        except GatewayError as e:
            queue.put_nowait(e)


class Dialect(Protocol):
    @property
    def name(self) -> str:
        """Recorded in each Step's metadata; tells apart the retries of different endpoints."""

    def parse(self, body: dict[str, Any], headers: Headers) -> Parsed:
        """
        Raises:
            RequestError: names the field, its value and the remedy.
        """

    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """The JSON answer; `replies` are the exchange's samples, their Steps stored."""

    def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The server-sent events, terminal event included. Read `exchange.events()`; a failure of
        the call comes out of it as a GatewayError and becomes the dialect's error event."""

    def error(self, e: GatewayError) -> dict[str, Any]:
        """The body of an error answer; its status is `e.status`."""


def sse(payload: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + orjson.dumps(payload) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, proxies see traffic."""
