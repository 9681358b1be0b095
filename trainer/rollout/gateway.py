"""This module asks the gateway for rollouts, again while it restarts and at another replica if one
is down, so that an outage is waited out.

Owns how long is waited, and what an answer means. Does not own what is asked (`worker.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
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
_UNBOUNDED = aiohttp.ClientTimeout(total=None)
RETRY_S = 0.25
_DOWN = frozenset({429, 500, 502, 503, 504})
"""The gateway answers, but has no room, is stopping, or its pool or engine is away."""


class ClosedError(RolloutError):
    """The trajectory has ended: completed, aborted, or closed by the pool with its group."""


class CompletedError(ClosedError):
    """Its agent has completed the trajectory, over HTTP: that counts."""


_ENDED = {"trajectory_closed": ClosedError, "trajectory_completed": CompletedError}
"""Errors by the codes of the gateway's answers."""


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
        await self.ask("/ready", None, patience_s)

    async def was_disturbed(self, since: float, replica: str = "") -> bool:
        """True if the gateway (or the one replica) was restarted, or lost engine or pool, after
        `since` (monotonic); or cannot be reached."""
        try:
            answer = await self.ask(f"{replica}/health", None)
        except UnreachableError:
            return True
        # The gateway's clock is not ours: both count seconds back from now.
        return float(answer["undisturbed_s"]) < time.monotonic() - since

    async def ask(
        self,
        where: str,
        body: dict[str, Any] | None,
        patience_s: float = PATIENCE_S,
        headers: Mapping[str, str] | None = None,
        *,
        is_generation: bool = False,
    ) -> dict[str, Any]:
        """The answer to a POST of `body`, or to a GET without one.

        Args:
            where: a URL; or a path, at the first replica that can be reached.
            is_generation: the gateway answers when the model has ended, and bounds that itself.

        Raises:
            CompletedError: the trajectory is complete.
            ClosedError: it has ended otherwise.
            UnreachableError: nobody answered within `patience_s`.
            RolloutError: the gateway refuses it.
        """
        urls = [f"{url}{where}" for url in self._urls] if where.startswith("/") else [where]
        method, give_up = "GET" if body is None else "POST", time.monotonic() + patience_s
        for url in cycle(urls):
            pause_s = RETRY_S
            try:
                async with self._connected().request(
                    method,
                    url,
                    json=body,
                    headers=headers,
                    timeout=_UNBOUNDED if is_generation else aiohttp.ClientTimeout(total=ANSWER_S),
                ) as response:
                    if response.status < 400:
                        return cast(dict[str, Any], await response.json())
                    text = await response.text()
                    why = f"{response.status}: {text:.300}"
                    if response.status not in _DOWN:
                        found = (e for code, e in _ENDED.items() if f'"{code}"' in text)
                        raise next(found, RolloutError)(f"{url} answered {why}")
                    after = response.headers.get("retry-after", "")
                    pause_s = max(pause_s, min(float(after), 5.0)) if after.isdecimal() else pause_s
            except (aiohttp.ClientError, TimeoutError) as e:
                why = str(e) or type(e).__name__
            if time.monotonic() + pause_s >= give_up:
                raise UnreachableError(f"{url} could not be reached for {patience_s:g} s ({why})")
            await asyncio.sleep(pause_s)
        raise RolloutError("there is no gateway to reach")

    async def transcript(self, base_url: str) -> list[dict[str, Any]]:
        """The calls so far of the trajectory at `base_url`, in order. Raises as `ask`."""
        origin, uid, _ = base_url.rsplit("/", 2)
        found = await self.ask(f"{origin}/ui/api/trajectory?whole=1&trajectory_uid={uid}", None)
        return cast(list[dict[str, Any]], found["steps"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {}
            if self._key is not None:
                headers["authorization"] = f"Bearer {self._key.get_secret_value()}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
            )
        return self._session
