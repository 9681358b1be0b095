"""HTTP pieces that all dialects share: bodies, errors, streams, and noticing that a client left."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.tokens.messages import MOST_LEVELS, is_deep
from stepwell.gateway.trajectory.calls import RetryKey


class Closing(Protocol):
    """A client's side of something: closed when it leaves, and when it has been served."""

    def close(self) -> None: ...


class Losing(Protocol):
    """Something that was handed to a connection."""

    def lose(self) -> None: ...


JSON_HEADERS = {"content-type": "application/json"}


class OrjsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_body(e: GatewayError, param: str | None) -> dict[str, Any]:
    """OpenAI's error shape, which the gateway's own endpoints use too."""
    return {"error": {"message": str(e), "type": e.kind, "param": param, "code": e.code}}


def parse_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object; an empty body, and null, are an empty object."""
    if not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the request's body is no JSON: {e}", None) from e
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(
            f"the request's body is a JSON {type(value).__name__}; send an object", None
        )
    if (len(body) > _SHORT or body.count(b"{") + body.count(b"[") > MOST_LEVELS) and (
        _has_many_levels(body) and is_deep(value)
    ):
        raise RequestError(
            f"the request's body is nested more than {MOST_LEVELS} levels deep; send a flatter one",
            None,
        )
    return value


_SHORT = 65_536
"""Bytes of a body whose containers are counted at once."""


def _has_many_levels(body: bytes) -> bool:
    """Return true if more containers may begin in `body` than the deepest value nests. The search
    ends at the first one too many: counting them all takes 16 ms of a text of 32 MB."""
    n = 0
    for sign in (b"{", b"["):
        at = body.find(sign)
        while at >= 0:
            n += 1
            if n > MOST_LEVELS:
                return True
            at = body.find(sign, at + 1)
    return False


def body_hash(body: bytes = b"") -> Any:
    """State of `body_digest`, to which the rest of a body may be added: SHA-256, which processors
    have instructions for (twice as fast as BLAKE2b)."""
    return hashlib.sha256(body)


def body_digest(body: bytes) -> str:
    """Digest by which a repeated request is known, in hexadecimal."""
    digest: str = body_hash(body).hexdigest()
    return digest


def retry_key(headers: RequestHeaders, digest: str, scope: str) -> RetryKey:
    """Key by which a repetition is known: OpenAI's SDKs count retries, others send a key.

    Args:
        digest: `body_digest` of the request.
    """
    if (key := headers.first.get(b"idempotency-key")) is not None:
        named = f"{scope}/key/{key.decode('latin-1')}"
        return RetryKey(named, digest, is_retry=True, is_named=True)
    count = headers.first.get(b"x-stainless-retry-count", b"")
    is_retry = count.isdigit() and count.strip(b"0") != b""
    return RetryKey(f"{scope}/body/{digest}", digest, is_retry)


class RequestHeaders(Headers):
    """Headers of a request, found by their name and not looked for among all."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        """`raw`: names in lower case."""
        self._list = raw
        self.first = dict(reversed(raw))
        """Values by name: of several headers of one name the first, as in `raw`."""

    def __getitem__(self, key: str) -> str:
        return self.first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self.first

    def get(self, key: str, default: Any = None) -> Any:
        value = self.first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")


class Connection(Protocol):
    """A client's connection, as the server tells of it in the scope's extension `CONNECTION`."""

    is_lost: bool

    listeners: set[Closing]
    """Closed when the connection is lost."""

    handed: Losing | None
    """Told if the connection breaks before the next request: the client may not have got the end of
    its last answer."""

    def authenticated(self) -> None:
        """A request on it was authorised."""

    @property
    def is_complete(self) -> bool:
        """The request has arrived whole."""

    @property
    def is_full(self) -> bool:
        """The client reads too slowly: what is written has to wait here."""

    def write_piece(self, data: bytes) -> None:
        """Write a piece of a body without a length, behind its head."""

    async def drain(self) -> None:
        """Return when it is not full."""


CONNECTION = "stepwell.connection"


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope["extensions"][CONNECTION]
    return connection


STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EventStream(Response):
    """Server-sent events that are written as they come, past the layers that an answer passes, and
    not buffered."""

    def __init__(self, pieces: AsyncIterator[bytes], listener: Closing) -> None:
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._pieces = pieces
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        connection.listeners.add(self._listener)
        if connection.is_lost:
            self._listener.close()
        try:
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            async for piece in self._pieces:
                await connection.drain()
                connection.write_piece(piece)
            await send({"type": "http.response.body", "body": b""})
        finally:
            connection.listeners.discard(self._listener)
            self._listener.close()
