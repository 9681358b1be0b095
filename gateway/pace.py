"""A few calls per turn of the event loop, however many became ready in it.

The loop runs everything that is ready before it looks at sockets and timers again. When 512 agents
call at once, or the pool answers for a batch of them, that is half a second in which no keep-alive
is sent and nobody is accepted. `Pace` lets `per_turn` of them go on in each turn, in their order::

    turn 1    a b c d e f g h │ i j k …      turn 2    i j k l m n o p │ q …

Who finds the loop idle is not held up. Owns: this order. Does not own: how many calls there may be
(`limits.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """One place that many tasks pass; of one event loop.

    Args:
        per_turn: at half a millisecond each, 8 are a turn that nobody notices.
    """

    def __init__(self, per_turn: int = 64) -> None:
        self._per_turn = per_turn
        self._passed = 0
        """In this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def keep(self) -> None:
        """Go on, now or in a later turn."""
        if self._passed < self._per_turn and not self._waiting:
            if self._passed == 0:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._passed += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)
