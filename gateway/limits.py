"""This module bounds how many calls run at once and how long a trajectory gets, so that no crowd of
agents and no agent that runs wild takes all of an engine.

    call ──► room ──────────────────────────────► running ──► done
        └──► waiting, first come first served ──┘
                └──► queue_timeout_s over (429) │ cancelled

Does not own: sizes and times of bodies (`access.py`); how an engine schedules what it was
given.
"""

from __future__ import annotations

import asyncio

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import RateLimitedError, TrajectoryLimitError


class CallLimits:
    """All of one event loop: `async with limits: …` runs one call. Owned by the app's lifespan.

    Raises (on entering):
        RateLimitedError: no place became free within `gateway.queue_timeout_s`.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        most = config.max_concurrent_calls
        self._places = None if most is None else asyncio.Semaphore(most)
        self._running = self._waiting = self._refused = 0

    async def __aenter__(self) -> None:
        if self._places is not None:
            if self._places.locked():
                await self._wait(self._places)
            else:  # without a turn of the event loop
                await self._places.acquire()
        self._running += 1

    async def __aexit__(self, *_: object) -> None:
        self._running -= 1
        if self._places is not None:
            self._places.release()

    def check_turns(self, n: int, n_new: int) -> None:
        """May a trajectory that has made `n` calls, or is making them, have `n_new` more?

        Raises:
            TrajectoryLimitError: it is used up; trying again is of no use.
        """
        most = self._config.max_turns
        if most is not None and n_new and n + n_new > most:
            raise TrajectoryLimitError(
                f"this trajectory has {n + n_new - 1} turns and may have {most} "
                "(gateway.max_turns); complete it and start another",
                None,
            )

    def statistics(self) -> dict[str, int]:
        return {"running": self._running, "waiting": self._waiting, "refused": self._refused}

    async def _wait(self, places: asyncio.Semaphore) -> None:
        config = self._config
        self._waiting += 1
        try:
            async with asyncio.timeout(config.queue_timeout_s):
                await places.acquire()
        except TimeoutError as e:
            self._refused += 1
            raise RateLimitedError(
                f"the gateway runs {config.max_concurrent_calls} calls "
                "(gateway.max_concurrent_calls) and none ended within "
                f"{config.queue_timeout_s:g} s (gateway.queue_timeout_s); try again"
            ) from e
        finally:
            self._waiting -= 1
