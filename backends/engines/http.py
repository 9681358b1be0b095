"""This module asks an engine over HTTP, with typed errors: the part of an `api.Engine` that all
HTTP servers have in common.

    class Mine(HttpEngine):                     one file, one engine
        async def check(self): await self._ask("/health")

A 2xx answer is returned, parsed if it is JSON; anything else is an `EngineError`. It does not own
what is asked (`client.py`, `vllm.py`), the connections (`connections.py`), or retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from stepwell.backends.engines.api import Engine
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)

NOT_THERE = frozenset({404, 405, 501})
"""Statuses by which a server says that it has no such endpoint."""
_NO_ROUTE = frozenset({403, 404, 501})
"""The same to `OPTIONS`, which few endpoints take; vLLM forbids what it was not started for."""


def is_missing(error: EngineError) -> bool:
    """The server has no such endpoint."""
    return getattr(error, "status", None) in NOT_THERE


class HttpEngine(Engine):
    """An engine that is an HTTP server at `url`."""

    async def has_route(self, path: str) -> bool:
        """Return true if the server has the endpoint `path`. Asks by `OPTIONS`: nothing happens."""
        try:
            await self._ask(path, method="OPTIONS")
        except (EngineRequestError, EngineInternalError) as e:
            return e.status not in _NO_ROUTE
        return True

    async def served_model(self) -> dict[str, Any]:
        """The first entry of `/v1/models`: `id`, `owned_by` (the server's kind), `max_model_len`;
        empty if there is none."""
        try:
            entry = (await self._ask("/v1/models"))["data"][0]
        except (LookupError, TypeError):
            return {}
        return entry if isinstance(entry, dict) else {}

    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""
        length = (await self.served_model()).get("max_model_len")
        if type(length) is not int or length < 2:
            raise EngineInternalError(f"{self.url}/v1/models names no max_model_len")
        return length

    async def _object(
        self, path: str, body: Any = None, *, has: Sequence[str] = (), **how: Any
    ) -> dict[str, Any]:
        answer = await self._ask(path, body, **how)
        if not isinstance(answer, dict) or not answer.keys() >= set(has):
            wanted = f"object with {', '.join(has)}" if has else "object"
            raise EngineInternalError(f"{self.url}{path} answered no {wanted}, but {answer!r:.200}")
        return answer

    async def _ask(
        self, path: str, body: Any = None, *, method: str = "", timeout_s: float | None = -1.0
    ) -> Any:
        """The answer, parsed if it is JSON; POST if there is a body. `timeout_s`: None waits
        without limit, negative is the client's default."""
        limit = self.timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        method, url = method or ("GET" if body is None else "POST"), self.url + path
        data = b"" if body is None else orjson.dumps(body)
        try:
            async with asyncio.timeout(limit):
                status, content = await self.connections.request(method, url, data)
        except TimeoutError as e:
            raise EngineTimeoutError(f"{url} did not answer within {limit:g} s") from e
        except ConnectionError as e:
            raise unavailable(url, e) from e
        if status >= 400:
            raise refusal(url, status, f"answered {status}", words_of(content))
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content


def unavailable(url: str, e: ConnectionError) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"no engine answers at {url} ({e}); is it running, is the url right?",
        refused=isinstance(e, ConnectionRefusedError),
    )


def refusal(url: str, status: int, what: str, words: str) -> EngineError:
    """
    Args:
        what: the engine did.
        words: its own about that.
    """
    kind = EngineRequestError if status < 500 else EngineInternalError
    what, message = f"the engine {what}", f"{url} {what}: {words}"
    return kind(message, status=status, what=what, words=words)


def words_of(content: bytes) -> str:
    """The human part of an error's body."""
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace").strip()
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
