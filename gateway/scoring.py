"""This module calls `gateway.reward_fn` where a call that never ends holds up nobody else: symbolic
mathematics takes for ever on 9^(9^(9^9)), and lets no other thread run meanwhile.

    score ──► a reward of Stepwell's own ──► a process that is idle, or another one ──► the answer
                  │                             └── SCORE_S over, or nobody waits: killed
                  └── one of the user's: called here, as it may hold a model or a connection

Owns these processes. Does not own what a function may return (`reward.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import orjson

from stepwell.backends.processes import start
from stepwell.datapool.dotted import resolve
from stepwell.gateway.reward import RewardError, compute_reward

SCORE_S = 60.0
"""Seconds of one call, as those of `rollout.reward` by default."""
START_S = 120.0
"""Seconds for the imports of the function's module, which do not count as a call's."""
MOST = min(32, (os.cpu_count() or 1) + 4)
"""Processes at once: as many as an event loop has threads."""
OWN = "stepwell."
"""Package of the functions that are called in processes."""


class Scoring:
    """Calls the function that `path` leads to. Used in one event loop."""

    def __init__(self, path: str, function: Callable[..., Any]) -> None:
        self._path, self._function = path, function
        module = str(getattr(function, "__module__", ""))
        self._in_process = module.startswith(OWN) and not inspect.iscoroutinefunction(function)
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(MOST)

    async def score(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """`compute_reward`'s answer.

        Raises:
            RequestError: the fields do not fit the function.
            RewardError: it failed, or took too long.
        """
        if not self._in_process:
            return await compute_reward(self._function, fields)
        async with self._places:
            process = self._idle.pop() if self._idle else _Process(self._path)
            self._all.add(process)
            try:
                answer = await asyncio.to_thread(process.call, fields)
            except BaseException:  # cancelled, too: nobody waits for the call any more
                self._all.discard(process)
                process.end()
                raise
            self._idle.append(process)
        if isinstance(answer, Exception):
            raise answer
        scored: dict[str, Any] = orjson.loads(answer)
        return scored

    def close(self) -> None:
        """End the processes, and with them the calls under way."""
        for process in self._all:
            process.end()


class _Process:
    """A process that calls the function, one call at a time."""

    def __init__(self, path: str) -> None:
        self._connection, theirs = Pipe()
        fd = theirs.fileno()
        try:
            self._child = start(
                [sys.executable, "-c", f"from {__name__} import main; main({fd})"],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        finally:
            theirs.close()
        self._connection.send(path)
        self._is_ready = self._is_ended = False

    def call(self, fields: Mapping[str, Any]) -> Any:
        """`compute_reward`'s answer as JSON, or the exception that it raised; blocks.

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
        if not self._is_ended:  # its number may be another's by now
            self._is_ended = True
            self._child.kill()
            self._child.process.wait()


def main(connection_fd: int) -> None:
    """Answer calls until the other end is closed."""
    connection = Connection(connection_fd)
    function = resolve(connection.recv())
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            fields = connection.recv()
            try:
                answer: Any = orjson.dumps(asyncio.run(compute_reward(function, fields)))
            except Exception as e:  # noqa: BLE001 - raised where the call was made
                answer = e
            connection.send(answer)
