"""Limits of calls: how many run at once, how long a trajectory gets, and how many go on in one turn
of the event loop. No crowd of agents and no agent that runs wild takes all of an engine.

    call ──► room ──────────────────────────────► running ──► done
        └──► waiting, first come first served ──┘
                └──► queue_timeout_s over (429) │ cancelled

**Pace.** The loop runs everything that is ready before it looks at sockets and timers again. When
512 agents call at once, or the pool answers for a batch of them, that is half a second in which no
keep-alive is sent and nobody is accepted. `Pace` lets some of them go on in each turn, in their
order::

    turn 1    a b c d e f g h … 8 ms │ v w x …      turn 2    v w x y z │ …

Whoever comes passes at once, until the turn has taken long enough; others wait for the next one.
Calls that the engine or the pool has answered go before new ones: they have waited longest, and
what they hold is free when they are done. How many of those that wait go on in a turn is found out:
twice as many after one that was short, half as many after one that took too long.

Does not own: sizes and times of bodies (`access.py`); how an engine schedules what it was given.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable
from types import TracebackType
from typing import Any

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import RateLimitedError, TrajectoryLimitError


class CallLimits:
    """All of one event loop: a call runs between `enter` and `leave`. Owned by the app's
    lifespan."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.max_turns = config.max_turns
        most = config.max_concurrent_calls
        self._places = None if most is None else asyncio.Semaphore(most)
        self._running = self._waiting = self._refused = 0

    def enter(self) -> Awaitable[None] | None:
        """Begin a call. None: it runs; otherwise it runs when what is returned was awaited.

        Raises (awaited):
            RateLimitedError: no place became free within `gateway.queue_timeout_s`.
        """
        if self._places is not None:
            return self._take(self._places)
        self._running += 1
        return None

    def leave(self) -> None:
        self._running -= 1
        if self._places is not None:
            self._places.release()

    def check_turns(self, n: int, n_new: int) -> None:
        """Check that a trajectory which has made, or is making, `n` calls may make `n_new` more.

        Raises:
            TrajectoryLimitError: it is used up; trying again is of no use.
        """
        most = self.max_turns
        if most is not None and n_new and n + n_new > most:
            raise TrajectoryLimitError(
                f"this trajectory has {n + n_new - 1} turns and may have {most} "
                "(gateway.max_turns); complete it and start another",
                None,
            )

    def statistics(self) -> dict[str, int]:
        return {"running": self._running, "waiting": self._waiting, "refused": self._refused}

    async def _take(self, places: asyncio.Semaphore) -> None:
        if places.locked():
            await self._wait(places)
        else:  # without a turn of the event loop
            await places.acquire()
        self._running += 1

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


# -- deadlines -------------------------------------------------------------------------------

LEAST_PAUSE_S = 0.005
"""Between two looks at the clock."""


class Deadlines:
    """Deadlines of one event loop, with one timer for all: a timer for each call costs as much as
    to send what the call sends."""

    def __init__(self) -> None:
        self.open: set[Deadline] = set()
        """Deadlines of blocks that run; each enters and leaves by itself."""
        self.next_look = math.inf
        """Time of the event loop's clock at which expired ones are looked for."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """None: no deadline was begun yet."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, when: float) -> None:
        """See to it that the clock is looked at by this time."""
        if when < self.next_look:
            if self._timer is not None:
                self._timer.cancel()
            self.loop = loop = asyncio.get_running_loop()
            self.next_look = max(when, loop.time() + LEAST_PAUSE_S)
            self._timer = loop.call_at(self.next_look, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self.next_look = None, math.inf
        now, left = loop.time(), math.inf
        for deadline in tuple(self.open):
            if deadline.when <= now:
                self.open.discard(deadline)
                deadline.expire()
            else:
                left = min(left, deadline.when)
        if self.open:
            self.watch(left)


class Deadline:
    """`with Deadline(deadlines, when): …` raises TimeoutError at that time of the event loop's
    clock, which is `time.monotonic`, as `asyncio.timeout_at` does."""

    __slots__ = ("_cancelling", "_deadlines", "_task", "expired", "when")

    def __init__(self, deadlines: Deadlines, when: float) -> None:
        self.when, self.expired = when, False
        self._deadlines = deadlines
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0

    def __enter__(self) -> Deadline:
        deadlines = self._deadlines
        self._task = task = asyncio.current_task(deadlines.loop)
        if task is None:
            raise RuntimeError("a deadline is a task's")
        self._cancelling = task.cancelling()
        deadlines.open.add(self)
        if self.when < deadlines.next_look:
            deadlines.watch(self.when)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        self._deadlines.open.discard(self)
        if self.expired and task is not None:
            # As `asyncio.timeout`: somebody else's cancellation of the task stays one.
            is_its = task.uncancel() <= self._cancelling
            if is_its and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise TimeoutError from error

    def reschedule(self, when: float) -> None:
        """End the block at another time."""
        self.when = when
        self._deadlines.watch(when)

    def expire(self) -> None:
        if self._task is not None:
            self.expired = True
            self._task.cancel()


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
        """Waiting calls that go on in the next turn, at most."""
        self._began: float | None = None
        """Time when the first one passed in this turn; None: none has."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Begin, now or in a later turn in which nobody waits in `keep`."""
        if (turn := self.turn(is_new=True)) is not None:
            await turn

    async def keep(self) -> None:
        """Go on, now or in a later turn."""
        if (turn := self.turn()) is not None:
            await turn

    def turn(self, *, is_new: bool = False) -> asyncio.Future[None] | None:
        """Future to be awaited before one goes on; None: go on at once.

        Args:
            is_new: as `enter`, otherwise as `keep`.
        """
        if not self._waiting and not (is_new and self._new):
            now = time.perf_counter()
            if self._began is None:
                self._began = now
                loop = asyncio.get_running_loop()
                loop.call_soon(self._next, loop)  # behind all that passes in this turn
                return None
            if now - self._began < self._turn_s:
                return None
        turn = asyncio.get_running_loop().create_future()
        (self._new if is_new else self._waiting).append(turn)
        return turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        now, n = time.perf_counter(), 0
        took = now - (self._began or now)
        if took > self._turn_s:
            self._limit = max(self._limit // 2, 1)
        elif took < self._turn_s / 2 and (self._waiting or self._new):
            self._limit = min(self._limit * 2, MOST)
        while n < self._limit and (line := self._waiting or self._new):
            turn = line.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                n += 1
        self._began = now if n else None
        if n:
            loop.call_soon(self._next, loop)
