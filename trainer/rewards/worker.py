"""A process of its own for reward functions, so that one that hangs can be killed.

::

    RewardProcess.call ──pickle──► a Python process: main() ──► function
            ▲                         │ own session: killed with all that it started
            └── result, error, or the limit: SIGKILL to the group; the next call starts another

Owns the process and its limits; `manager.py` decides what is called. The function is named, not
sent: the process imports it as the trainer did. It ends when the trainer does, however that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from stepwell.backends.processes import Child, start
from stepwell.trainer.errors import RewardCrashError, RewardError, RewardLoadError
from stepwell.trainer.rewards.base import RewardFn, crashed, timed_out
from stepwell.trainer.rewards.loading import load_reward

START_S = 120.0
"""Seconds for the imports of the function's module; not counted as the function's own time."""


class RewardProcess:
    """Runs calls of one reward function, one at a time; threads may share it.

    Args:
        path: as for `load_reward`, and so is `kwargs`.
    """

    def __init__(self, path: str, kwargs: Mapping[str, Any]) -> None:
        self._path = path
        self._kwargs = dict(kwargs)
        self._lock = threading.Lock()
        self._child: Child[subprocess.Popen[bytes]] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process that runs at the moment."""
        return self._child.pid if self._child is not None else None

    def call(self, timeout_s: float, call: str, *args: Any) -> Any:
        """Return what the function returns for `args`; blocks.

        Raises:
            RewardLoadError, RewardCrashError, RewardTimeoutError
        """
        with self._lock:
            try:
                connection = self._connection or self._start()
                connection.send((call, args))
                if not connection.poll(timeout_s):
                    self._end()
                    raise timed_out(call, timeout_s)
                result = connection.recv()
            except RewardError:
                raise
            except (EOFError, OSError) as e:
                self._end()
                raise RewardCrashError(f"{call}: its process died") from e
            except Exception as e:  # what cannot be pickled fails in many ways
                raise crashed(call, e) from e
        if isinstance(result, RewardError):
            raise result
        return result

    def kill(self) -> None:
        """End what runs now, from any thread: the call under way fails, the next starts anew."""
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """End the process for good, if one runs."""
        self.kill()
        with self._lock:
            self._end()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        fd = theirs.fileno()
        try:
            self._child = start(
                [sys.executable, "-c", f"from {__name__} import main; main({fd})"],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the function prints is no result
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        finally:
            theirs.close()
        self._connection = ours
        ours.send((self._path, self._kwargs))
        if not ours.poll(START_S):
            self._end()
            raise RewardLoadError(f"reward {self._path!r} was not loaded within {START_S:g} s")
        failure = ours.recv()
        if failure is not None:
            self._end()
            raise failure
        return ours

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.process.wait()
            self._child = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# ── in the process ───────────────────────────────────────────────────────────────────────────────


def main(connection_fd: int) -> None:
    """Answer calls until the trainer closes the connection."""
    connection = Connection(connection_fd)
    path, kwargs = connection.recv()
    try:
        reward = load_reward(path, kwargs)
    except RewardError as e:
        connection.send(e)
        return
    connection.send(None)
    with asyncio.Runner() as loop, contextlib.suppress(EOFError):
        loop.get_loop()  # a sync function may run it, too
        while True:
            call, args = connection.recv()
            result = _answer(loop, reward, call, args)
            try:
                connection.send(result)
            except Exception as e:  # noqa: BLE001 - what cannot be pickled fails in many ways
                connection.send(crashed(call, e))


def _answer(loop: asyncio.Runner, reward: RewardFn, call: str, args: tuple[Any, ...]) -> Any:
    # Sync functions run in the main thread: some libraries use signals.
    try:
        result = reward(*args)
        return loop.run(_wait(result)) if inspect.isawaitable(result) else result
    except Exception as e:  # noqa: BLE001 - foreign code: any failure is a missing score
        return crashed(call, e)


async def _wait(result: Any) -> Any:
    return await result
