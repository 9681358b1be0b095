"""This module asks the gateway for rollouts, again while it restarts and at another replica if one
is down, so that an outage is waited out.

Owns how long is waited, and what an answer means. Does not own what is asked (`worker.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any, cast

import aiohttp
from pydantic import SecretStr

from stepwell.trainer.errors import RolloutError

PATIENCE_S = 300.0
"""A gateway that died is back in seconds, on a busy machine and with its pool or engine down too in
minutes."""
ANSWER_S = 120.0
"""The gateway answers within this, or is asked again; it waits for the pool for a minute itself."""
RETRY_S = 0.25
_DOWN = frozenset({429, 500, 502, 503, 504})
"""The gateway answers, but has no room, is stopping, or its pool or engine is away."""


class _UnavailableError(Exception):
    """To be asked again, after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class ClosedError(RolloutError):
    """The trajectory has ended: completed, aborted, or closed by the pool with its group."""


class UnreachableError(RolloutError):
    """No gateway answered for as long as it was waited for."""


class GatewayClient:
    """Asks the replicas of one gateway. All that is sent may be sent again.

    Args:
        urls: of the replicas.
        key: the gateway's admin key; None: it has no keys.
    """

    def __init__(self, urls: Sequence[str], key: SecretStr | None = None) -> None:
        self._urls = tuple(urls)
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def ready(self, patience_s: float) -> None:
        """Returns once the gateway answers and has an engine. Raises as `ask`."""
        await self.ask_any("/ready", None, patience_s)

    async def was_disturbed(self, since: float, replica: str | None = None) -> bool:
        """Whether the gateway (or the one replica) was restarted, or lost engine or pool, after
        `since` (monotonic)."""
        try:
            urls = self._urls if replica is None else (replica,)
            answer = await self._ask([f"{url}/health" for url in urls], None, PATIENCE_S)
        except UnreachableError:
            return True
        # The gateway's clock is not ours: both count seconds back from now.
        return float(answer["undisturbed_s"]) < time.monotonic() - since

    async def ask(
        self, url: str, body: dict[str, Any] | None, patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The answer to a POST of `body`, or to a GET without one.

        Raises:
            ClosedError: the trajectory has ended.
            UnreachableError: nobody answered within `patience_s`.
            RolloutError: the gateway refuses it.
        """
        return await self._ask([url], body, patience_s)

    async def ask_any(
        self, path: str, body: dict[str, Any] | None, patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The answer of the first replica that can be reached. Raises as `ask`."""
        return await self._ask([f"{url}{path}" for url in self._urls], body, patience_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self, urls: Sequence[str], body: dict[str, Any] | None, patience_s: float
    ) -> dict[str, Any]:
        if self._session is None:
            headers = {}
            if self._key is not None:
                headers["authorization"] = f"Bearer {self._key.get_secret_value()}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            )
        give_up = time.monotonic() + patience_s
        for url in cycle(urls):
            pause_s = RETRY_S
            try:
                return await self._ask_once(self._session, url, body)
            except (aiohttp.ClientError, TimeoutError, _UnavailableError) as e:
                if isinstance(e, _UnavailableError):
                    pause_s = max(pause_s, e.seconds)
                if time.monotonic() + pause_s >= give_up:
                    raise UnreachableError(
                        f"{url} could not be reached for {patience_s:g} s ({e or type(e).__name__})"
                    ) from e
            await asyncio.sleep(pause_s)
        raise RolloutError("there is no gateway to reach")

    @staticmethod
    async def _ask_once(
        session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        async with session.request(method, url, json=body) as response:
            if response.status in _DOWN:
                text = await response.text()
                after = response.headers.get("retry-after", "")
                seconds = min(float(after), 5.0) if after.isdecimal() else 0.0
                raise _UnavailableError(f"{response.status}: {text:.300}", seconds)
            if response.status >= 400:
                text = await response.text()
                error = ClosedError if '"trajectory_closed"' in text else RolloutError
                raise error(f"{url} answered {response.status}: {text:.300}")
            return cast(dict[str, Any], await response.json())
