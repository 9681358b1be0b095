"""How much at once, and how much in one trajectory.

A call takes a permit before it goes to an engine and gives it back when it has been generated::

    admit ──► room, and nobody waits ──────────────────────────► running ──► done
        └──► waiting ──► its trajectory has room ──► the gateway has room ──┘
                └────────────┴──► queue_timeout_s over (429) │ cancelled

First come, first served among those that may run: a trajectory at its own limit holds up nobody
else. Worked example: `max_concurrent_calls` 2, per trajectory 1; a1 and b1 run, a2 waits for a1,
then c1 comes and waits for the gateway. b1 ends: c1 runs. a1 ends: a2 runs.

Owns: permits and the queue for them, and a trajectory's turns and tokens. Does not own: sizes and
times of bodies (`protection.py`); how an engine schedules what it was given.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from types import TracebackType

from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import RateLimitedError, TrajectoryLimitError

RETRY_AFTER_S = 1.0
"""Whoever is refused has waited already, and may queue again at once."""


class CallLimits:
    """Permits for calls, all of one event loop. Owned by the app's lifespan."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._total = config.max_concurrent_calls
        self._each = config.max_concurrent_calls_per_trajectory
        self._running = 0
        self._tickets = 0
        self._trajectories: dict[str, _Trajectory] = {}
        """Those with calls that run or wait."""
        self._ready: list[_Waiter] = []
        """By ticket: they hold a permit of their trajectory and wait for one of the gateway."""
        self._n_waiting = 0
        self._n_refused = 0

    def admit(self, trajectory_uid: str) -> _Permit:
        """A permit to run one call: `async with limits.admit(uid): …`. Use it once.

        Raises (on entering):
            RateLimitedError: none became free within `gateway.queue_timeout_s`.
        """
        return _Permit(self, trajectory_uid)

    def check_trajectory(self, n_turns: int, n_tokens: int) -> None:
        """May this trajectory have another call?

        Args:
            n_turns: calls that it has made or is making.
            n_tokens: what they added to it: new prompt tokens and response tokens.

        Raises:
            TrajectoryLimitError: it is used up; trying again is of no use.
        """
        config = self._config
        for limit, option, n, things in (
            (config.max_turns, "max_turns", n_turns, "turns"),
            (config.max_tokens_per_trajectory, "max_tokens_per_trajectory", n_tokens, "tokens"),
        ):
            if limit is not None and n >= limit:
                raise TrajectoryLimitError(
                    f"this trajectory has {n} {things} and may have {limit} (gateway.{option}); "
                    "complete it and start another",
                    None,
                )

    def statistics(self) -> dict[str, int]:
        return {
            "running": self._running,
            "waiting": self._n_waiting,
            "refused": self._n_refused,
        }

    def has_room(self, uid: str) -> bool:
        """A call of this trajectory would not wait."""
        trajectory = self._trajectories.get(uid)
        return self._has_room and (trajectory is None or self._may(trajectory))

    def take(self, uid: str) -> bool:
        """A permit, if there is room for this trajectory."""
        # As long as someone is ready, the gateway has no room; as long as someone waits for a
        # trajectory, that has none. So nobody is overtaken here.
        if not self.has_room(uid):
            return False
        trajectory = self._trajectories.get(uid)
        if trajectory is None:
            trajectory = self._trajectories[uid] = _Trajectory()
        trajectory.n_held += 1
        self._running += 1
        return True

    async def wait(self, uid: str) -> None:
        """Queue for a permit.

        Raises:
            RateLimitedError
        """
        trajectory = self._trajectories.get(uid)
        if trajectory is None:
            trajectory = self._trajectories[uid] = _Trajectory()
        loop = asyncio.get_running_loop()
        self._tickets += 1
        waiter = _Waiter(self._tickets, uid, loop.create_future())
        self._n_waiting += 1
        trajectory.waiting.append(waiter)
        self._promote(trajectory)
        timer = loop.call_later(self._config.queue_timeout_s, self._time_out, waiter)
        try:
            await waiter.granted
        except BaseException:  # a refusal or a cancellation: no permit may be lost
            if waiter.has_permit:  # cancelled in the turn of the loop in which it was granted
                self.release(uid)
            else:
                self._withdraw(waiter)
            raise
        finally:
            timer.cancel()
            self._n_waiting -= 1

    def release(self, uid: str) -> None:
        """Give a permit back; the first who may have it gets it."""
        self._running -= 1
        self._give_back(uid)
        while self._ready and self._has_room:
            waiter = self._ready.pop(0)
            waiter.is_ready = False
            if waiter.granted.done():  # timed out or cancelled; it has not run since
                waiter.has_left = True
                self._give_back(waiter.uid)
                continue
            self._running += 1
            waiter.has_permit = True
            waiter.granted.set_result(None)

    @property
    def _has_room(self) -> bool:
        return self._total is None or self._running < self._total

    def _may(self, trajectory: _Trajectory) -> bool:
        return self._each is None or trajectory.n_held < self._each

    def _promote(self, trajectory: _Trajectory) -> None:
        """Give free permits of a trajectory to its longest waiting calls."""
        while trajectory.waiting and self._may(trajectory):
            waiter = trajectory.waiting.pop(0)
            trajectory.n_held += 1
            waiter.is_ready = True
            insort(self._ready, waiter, key=_by_ticket)

    def _give_back(self, uid: str) -> None:
        trajectory = self._trajectories[uid]
        trajectory.n_held -= 1
        self._promote(trajectory)
        if not trajectory.n_held and not trajectory.waiting:
            del self._trajectories[uid]

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter.has_left:
            return
        if waiter.is_ready:
            _remove(self._ready, waiter)
            self._give_back(waiter.uid)
        else:
            trajectory = self._trajectories[waiter.uid]
            _remove(trajectory.waiting, waiter)

    def _time_out(self, waiter: _Waiter) -> None:
        if waiter.granted.done():
            return
        self._n_refused += 1
        if waiter.is_ready:
            full = f"the gateway runs {self._total} calls (gateway.max_concurrent_calls)"
        else:
            full = (
                f"trajectory {waiter.uid!r} has {self._each} calls running "
                "(gateway.max_concurrent_calls_per_trajectory)"
            )
        waiter.granted.set_exception(
            RateLimitedError(
                f"{full} and none ended within {self._config.queue_timeout_s:g} s "
                "(gateway.queue_timeout_s); try again",
                RETRY_AFTER_S,
            )
        )


class _Permit:
    """Entered without a turn of the event loop if there is room."""

    __slots__ = ("_limits", "_uid")

    def __init__(self, limits: CallLimits, uid: str) -> None:
        self._limits = limits
        self._uid = uid

    async def __aenter__(self) -> None:
        if not self._limits.take(self._uid):
            await self._limits.wait(self._uid)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._limits.release(self._uid)


class _Trajectory:
    __slots__ = ("n_held", "waiting")

    def __init__(self) -> None:
        self.n_held = 0
        """Permits of this trajectory: calls that run, and those that are ready to."""
        self.waiting: list[_Waiter] = []
        """By ticket."""


class _Waiter:
    __slots__ = ("granted", "has_left", "has_permit", "is_ready", "ticket", "uid")

    def __init__(self, ticket: int, uid: str, granted: asyncio.Future[None]) -> None:
        self.ticket = ticket
        self.uid = uid
        self.granted = granted
        self.is_ready = False
        self.has_permit = False
        self.has_left = False


def _by_ticket(waiter: _Waiter) -> int:
    return waiter.ticket


def _remove(queue: list[_Waiter], waiter: _Waiter) -> None:
    del queue[bisect_left(queue, waiter.ticket, key=_by_ticket)]
