"""Limits of calls: how many run at once, how long a trajectory gets, and how many go on in one turn
of the event loop. No crowd of agents and no agent that runs wild takes all of an engine.

    call ──► room ──────────────────────────────► running ──► done
        └──► waiting, first come first served ──┘
                └──► queue_timeout_s over (429) │ cancelled

**Pace.** The loop runs everything that is ready before it looks at sockets and timers again. When
512 agents call at once, or the pool answers for a batch of them, that is half a second in which no
keep-alive is sent and nobody is accepted. `Pace` lets some of them go on in each turn, in their
order::

    turn 1    a b c d e f g h │ i j k …      turn 2    i j k l m n o p │ q …

Calls that the engine or the pool has answered go before new ones: they have waited longest, and
what they hold is free when they are done. How many go on is found out: twice as many after a turn
that was short, half as many after one that took too long. So a few dozen go on together, as the
pool's batches like it, and hundreds one after the other.

Does not own: sizes and times of bodies (`access.py`); how an engine schedules what it was given.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

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
        """Check that a trajectory which has made, or is making, `n` calls may make `n_new` more.

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


# -- pace ------------------------------------------------------------------------------------

FIRST, MOST = 8, 32


class Pace:
    """One place that many tasks pass; of one event loop.

    Args:
        turn_s: what passes in one turn should take no longer together.
    """

    def __init__(self, turn_s: float = 0.008) -> None:
        self._turn_s = turn_s
        self._limit = FIRST
        self._passed = 0
        """In this turn."""
        self._began = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Begin, now or in a later turn in which nobody waits in `keep`."""
        await self.keep(self._new)

    async def keep(self, line: deque[asyncio.Future[None]] | None = None) -> None:
        """Go on, now or in a later turn."""
        line = self._waiting if line is None else line
        loop = asyncio.get_running_loop()
        if self._passed >= self._limit or self._waiting or line:
            turn = loop.create_future()
            line.append(turn)
            await turn
            return
        if self._passed == 0:
            self._begin(loop)
        self._passed += 1

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._began = time.perf_counter()
        loop.call_soon(self._next, loop)  # behind all that passes in this turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        took = time.perf_counter() - self._began
        if took > self._turn_s:
            self._limit = max(self._limit // 2, 1)
        elif took < self._turn_s / 2 and (self._waiting or self._new):
            self._limit = min(self._limit * 2, MOST)
        self._passed = 0
        while self._passed < self._limit and (line := self._waiting or self._new):
            turn = line.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            self._begin(loop)
