"""One client's request from bytes to answer, the same for all dialects.

    read ──► parse ──► identify ──► start n calls ──► JSON, or events as they come
               │ dialect   │ identity.py   │ calls.py      │ dialect

Owns: this sequence, the merging of n samples into one stream, and which dialect words the errors of
a path. Does not own: wire formats (`dialects/`), calls, or who may call (`keys.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from stepwell.gateway.calls import Call, Listener, Reply
from stepwell.gateway.dialects.base import Dialect, Parsed
from stepwell.gateway.errors import (
    GatewayError,
    PreviousResponseError,
    RequestError,
    UnknownItemError,
)
from stepwell.gateway.parsing import Delta
from stepwell.gateway.tokenization import ChatTokenizer
from stepwell.gateway.trajectories import LiveTrajectory
from stepwell.gateway.web import (
    EventStream,
    OrjsonResponse,
    aborts_on_disconnect,
    parse_object,
    read_body,
    retry_key,
)

if TYPE_CHECKING:
    from stepwell.gateway.app import Gateway


IGNORED_HEADER = "x-stepwell-ignored"
MAX_TOLD = 32


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


async def serve(
    gateway: Gateway,
    dialect: Dialect,
    request: Request,
    trajectory_uid: str | None = None,
    prompt_uid: str | None = None,
) -> Response:
    """Answer one LLM call.

    Args:
        trajectory_uid, prompt_uid: from the URL; None: found out by `Gateway.identities`.

    Raises:
        GatewayError: answered by the application in the dialect's shape.
    """
    config = gateway.config
    body = await read_body(request)
    parsed = dialect.parse(parse_object(body), request.headers)
    refuse_builtin_tools(gateway, parsed)
    _refuse_others_response(request, parsed)
    retry = retry_key(request.headers, body, dialect.name)
    call = gateway.calls.normalised(parsed.call)
    trajectory = gateway.identities.identify(
        request.headers,
        call,
        retry,
        trajectory_uid,
        prompt_uid,
        parsed.trajectory_uid,
        request.scope["client"],
    )
    listeners = await gateway.calls.start(trajectory, call, retry, dialect.name, parsed.n)
    exchange = Exchange(
        parsed,
        trajectory,
        listeners,
        model=config.served_model_name,
        tokenizer=gateway.tokenizer,
        keepalive_s=config.keepalive_s,
    )
    if call.stream:
        try:
            with aborts_on_disconnect(request.scope, request.receive, exchange):
                await exchange.begin()
        except BaseException:  # nobody reads what the other samples say
            exchange.close()
            raise
        return _told(EventStream(dialect.frames(exchange), exchange), gateway, parsed)
    try:
        with aborts_on_disconnect(request.scope, request.receive, exchange):
            replies = await exchange.results()
        await gateway.calls.pace.keep()  # the pool answers for many at once
        answer = OrjsonResponse(dialect.answer(exchange, replies))
        exchange.delivered()
    finally:
        exchange.close()
    return _told(answer, gateway, parsed)


def refuse_builtin_tools(gateway: Gateway, parsed: Parsed) -> None:
    """
    Raises:
        RequestError: there are some, and `gateway.ignore_builtin_tools` is false.
    """
    if parsed.builtin_tools and not gateway.config.ignore_builtin_tools:
        name, _, kind = parsed.builtin_tools[0].partition("=")
        raise RequestError(
            f"{name}.type is {kind!r:.80}, a built-in tool that this gateway cannot run; define a "
            "function tool instead",
            name,
        )


def _refuse_others_response(request: Request, parsed: Parsed) -> None:
    """A trajectory's key continues no response of another one, and reads nothing of it.

    Raises:
        PreviousResponseError, UnknownItemError: worded as if there were none.
    """
    holder = request.state.principal.trajectory
    if holder is None:
        return
    if parsed.trajectory_uid not in (None, holder[0]):
        raise PreviousResponseError(
            "Previous response not found; send the whole input instead", "previous_response_id"
        )
    if not parsed.reads <= {holder[0]}:
        raise UnknownItemError("Item not found; send the item itself", "input")


def _told(answer: Response, gateway: Gateway, parsed: Parsed) -> Response:
    """`answer` with a header that says what was left aside of the request."""
    if parsed.ignored:
        gateway.calls.counts["ignored_fields"] += len(parsed.ignored)
        shown, more = parsed.ignored[:MAX_TOLD], len(parsed.ignored) - MAX_TOLD
        answer.headers[IGNORED_HEADER] = ", ".join(shown) + (f", {more} more" * (more > 0))
    return answer
