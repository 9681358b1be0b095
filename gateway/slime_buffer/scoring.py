"""This module calls a reward function in processes of its own, so that a call that never ends holds
up no other rollout: symbolic mathematics takes for ever on 9^(9^(9^9)), and lets no thread run.

    score ──► a process that is idle, or another one ──► reward, or its error
                 └── SCORE_S over, or nobody waits any more: killed

What is async is called here: it waits, and others go on. Owns these processes. Does not own what a
function may return (`gateway/reward.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from stepwell.datapool.dotted import resolve
from stepwell.gateway.reward import RewardError, compute_reward

SCORE_S = 60.0
"""Seconds of one call, as those of `rollout.reward` by default."""
START_S = 120.0
"""Seconds for the imports of the function's module, which do not count as a call's."""
MOST = min(32, (os.cpu_count() or 1) + 4)
"""Processes at once: as many as an event loop has threads."""
_SPAWN = multiprocessing.get_context("spawn")


class Scoring:
    """Calls the function at `path`; a context manager, which ends its processes. Used in one event
    loop.

    Raises:
        ImportError: there is no such function.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = resolve(path)
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(MOST)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._idle:
            process.end()

    async def score(self, fields: Mapping[str, Any]) -> float | None:
        """The reward; None: not scored.

        Raises:
            RequestError: the fields do not fit the function.
            RewardError: it failed, or took too long.
        """
        if inspect.iscoroutinefunction(self._function):
            return _reward(await compute_reward(self._function, fields))
        async with self._places:
            process = self._idle.pop() if self._idle else _Process(self._path)
            try:
                answer = await asyncio.to_thread(process.call, fields)
            except BaseException:  # cancelled, too: nobody waits for the call any more
                process.end()
                raise
            self._idle.append(process)
        if isinstance(answer, Exception):
            raise answer
        return _reward(answer)


def _reward(answer: Mapping[str, Any]) -> float | None:
    found: float | None = answer["reward"]
    return found


class _Process:
    """A process that calls the function, one call at a time."""

    def __init__(self, path: str) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(path, theirs))
        self._process.start()
        theirs.close()
        self._is_ready = False

    def call(self, fields: Mapping[str, Any]) -> Any:
        """`compute_reward`'s answer, or the exception that it raised; blocks.

        Raises:
            RewardError: the process has to be ended, or has died.
        """
        try:
            if not self._is_ready:
                self._receive(START_S, "was not loaded")
                self._is_ready = True
            self._connection.send(fields)
            return self._receive(SCORE_S, "gave no reward")
        except (EOFError, OSError) as e:
            raise RewardError("the process of gateway.reward_fn died") from e

    def _receive(self, seconds: float, what: str) -> Any:
        if not self._connection.poll(seconds):
            raise RewardError(f"gateway.reward_fn {what} within {seconds:g} s")
        return self._connection.recv()

    def end(self) -> None:
        """End it; a thread that waits for its answer learns of it by the end of the connection."""
        self._process.kill()
        self._process.join()


def _serve(path: str, connection: Connection) -> None:
    """Answer calls until the other end is closed."""
    function = resolve(path)
    connection.send(None)
    while True:
        try:
            fields = connection.recv()
        except EOFError:
            return
        try:
            answer: Any = asyncio.run(compute_reward(function, fields))
        except Exception as e:  # noqa: BLE001 - raised where the call was made
            answer = e
        connection.send(answer)
