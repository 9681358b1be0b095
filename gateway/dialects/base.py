"""What a dialect is: one wire format between HTTP and the gateway's own calls.

    body ──parse──► Parsed(ChatRequest, n, options) ──► Exchange ──answer──► JSON
                                                            └─────frames──► server-sent events

A dialect owns its field names, their validation, the shape of answers, events and errors. It does
not own calls, prompts, ids or tool-call parsing. A field it cannot honour is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from starlette.datastructures import Headers

from stepwell.gateway.calls import ChatRequest, Reply
from stepwell.gateway.errors import GatewayError

if TYPE_CHECKING:
    from stepwell.gateway.exchange import Exchange


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
