"""What a dialect is: one wire format between HTTP and the gateway's own calls.

    body ──parse──► Parsed(ChatRequests, n, options) ──► Exchange ──answer──► JSON
                                                            └─────frames──► server-sent events

A dialect owns its field names, their validation, the shape of answers, events and errors. It does
not own calls, prompts, ids or tool-call parsing. A field it cannot honour is refused by name. An
`Exchange` merges the events of n samples into one stream.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import orjson

from stepwell.gateway.access import Principal
from stepwell.gateway.call import Call, Listener
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import THINK_CLOSE, Delta
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.note import FinishedCall
from stepwell.gateway.trajectory.reply import Reply, SampledToken
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import error_body


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request's body, understood."""

    call: ChatRequest
    options: Any = None
    """What shapes the answer and not the call; the dialect's own."""
    n: int = 1
    """Samples asked for, of each prompt."""
    more: tuple[ChatRequest, ...] = ()
    """The calls of a request's other prompts."""
    trajectory_uid: str | None = None
    """The trajectory that the body itself continues (`previous_response_id`)."""
    ignored: tuple[str, ...] = ()
    """What was left aside of what agents always send, as `path=value` in ASCII; the answer's
    `x-stepwell-ignored` header tells."""

    @property
    def calls(self) -> tuple[ChatRequest, ...]:
        """One for each prompt."""
        return (self.call, *self.more)


class Event(NamedTuple):
    """Something new of one sample: a delta, or its reply (then nothing follows for it)."""

    sample: int
    item: Delta | Reply
    tokens: Sequence[SampledToken]
    """What it tells, if the request asks for log-probs."""


class Handed(NamedTuple):
    """A reply whose end was handed to a client's connection."""

    trajectory: LiveTrajectory
    call: FinishedCall

    def lose(self) -> None:
        """The connection broke before the client had it."""
        self.call.delivered = False
        self.trajectory.set_unseen(self.call, True)


class Exchange:
    """A request and its calls: one per sample, the samples of the first prompt before those of the
    next one. Dialects answer from it."""

    def __init__(
        self,
        parsed: Parsed,
        trajectories: Sequence[LiveTrajectory],
        listeners: Sequence[Listener],
        *,
        model: str,
        tokenizer: ChatTokenizer,
        keepalive_s: float,
    ) -> None:
        self.parsed = parsed
        self.trajectories = trajectories
        """One for each prompt."""
        self.model = model
        self.tokenizer = tokenizer
        self._listeners = tuple(listeners)
        self._keepalive_s = keepalive_s
        self._first: Event | None = None
        self._closed = False
        self._coming: dict[asyncio.Future[Delta | Reply], int] = {}
        """The next event of each of several samples."""

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
    def is_unrecorded(self) -> bool:
        """No Step of some sample is stored. Of a stream, as far as it is known as it begins."""
        return any(each.unrecorded is not None for each in self.trajectories) or any(
            call.finished is not None and call.finished.turn.step_index is None
            for call in self.calls
        )

    @property
    def created(self) -> int:
        """Unix seconds."""
        return self._listeners[0].call.created

    async def results(self) -> list[Reply]:
        """All replies, their Steps stored. Where one fails the others are waited for: their
        replies are those of a retry, which samples only what failed.

        Raises:
            GatewayError: a call failed.
        """
        if len(self._listeners) == 1:
            return [await self._listeners[0].result()]
        waiting = (each.result() for each in self._listeners)
        replies: list[Reply] = []
        for reply in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply
            replies.append(reply)
        return replies

    async def begin(self) -> None:
        """Wait for the first event (or for `keepalive_s`), while an error can still be a status.

        Raises:
            GatewayError: a call failed.
        """
        self._first = await self._next()

    async def events(self) -> AsyncIterator[Event | None]:
        """All events, from the one of `begin` on; ends behind the last sample's reply. None:
        nothing came for `keepalive_s`; send whatever keeps the connection alive.

        Raises:
            GatewayError: a call failed.
        """
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

    def handed(self) -> list[Handed]:
        """The replies, if their ends were handed to the client's connection."""
        return [
            Handed(c.trajectory, c.finished)
            for c in self.calls
            if c.delivered and c.finished is not None
        ]

    def close(self) -> None:
        """The client is gone or served; calls nobody else listens to are aborted."""
        self._closed = True
        for coming in self._coming:
            coming.cancel()
        for listener in self._listeners:
            listener.close()

    async def _next(self) -> Event | None:
        if len(self._listeners) > 1:
            return await self._next_of_several()
        listener = self._listeners[0]
        try:
            async with asyncio.timeout(self._keepalive_s) as patience:
                return Event(0, await listener.next(), listener.told)
        except TimeoutError:  # a call that took too long is one, too
            if not patience.expired():
                raise
            return None

    async def _next_of_several(self) -> Event | None:
        if not self._coming:
            self._coming = {
                asyncio.ensure_future(each.next()): i for i, each in enumerate(self._listeners)
            }
        await asyncio.wait(
            self._coming, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED
        )
        come = next((coming for coming in self._coming if coming.done()), None)
        if come is None:
            return None
        sample = self._coming.pop(come)
        listener, item = self._listeners[sample], come.result()
        event = Event(sample, item, listener.told)
        if not isinstance(item, Reply):
            self._coming[asyncio.ensure_future(listener.next())] = sample
        return event


class Dialect(ABC):
    name: ClassVar[str]
    """Recorded in each Step's metadata; tells apart the retries of different endpoints."""
    stream_type = "text/event-stream"
    """Media type of `frames`."""

    @abstractmethod
    def parse(self, body: dict[str, Any], reader: Principal | None = None) -> Parsed:
        """
        Args:
            reader: who asks; answers of others are not there for it. None: the operator.

        Raises:
            RequestError: names the field, its value and the remedy.
        """

    @abstractmethod
    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """The JSON answer; `replies` are the exchange's samples, their Steps stored."""

    @abstractmethod
    def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The stream, mostly server-sent events, terminal event included. Read `exchange.events()`;
        a failure of the call comes out of it as a GatewayError and becomes the dialect's error
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


def n_reasoning(reply: Reply, tokenizer: ChatTokenizer) -> int:
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


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, proxies see traffic."""
