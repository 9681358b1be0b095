"""A process of its own for a function that may hang, or take all of the interpreter: it can be
killed.

::

    FunctionProcess.call ──pickle──► a Python process: main() ──► function
            ▲                            │ own session: killed with all that it started
            └── its answer, its error, or the limit: SIGKILL; the next call starts another

Owns the process, and the limits of its start and its calls. The function is named, not sent. The
process ends when this one does, however that dies. Does not own what is called: rewards
(`trainer/rewards/`, `gateway/scoring.py`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from stepwell.backends.processes import Child, start
from stepwell.datapool.dotted import resolve

START_S = 120.0
"""Seconds for the imports of the function's module; not counted as the function's own time."""


class StartTimeoutError(TimeoutError):
    """The function was not made within `START_S`."""


class FunctionProcess:
    """Runs calls of one function, one at a time; threads may share it. It is started by the first
    call.

    Args:
        make: dotted path of what makes the function in the process.
        given: arguments of that.
    """

    def __init__(self, make: str, *given: Any) -> None:
        self._make, self._given = make, given
        self._lock = threading.Lock()
        self._child: Child[subprocess.Popen[bytes]] | None = None
        self._killed: Child[subprocess.Popen[bytes]] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process that runs at the moment."""
        return self._child.pid if self._child is not None else None

    def call(self, timeout_s: float, *args: Any) -> Any:
        """Return what the function returns for `args`; blocks.

        Raises:
            StartTimeoutError
            TimeoutError: there is no answer after `timeout_s` seconds.
            EOFError, OSError: the process died.
            Exception: raised in the process, or `args` cannot be pickled.
        """
        with self._lock:
            if self._child is self._killed:  # between two calls
                self._end()
            try:
                connection = self._connection or self._start()
                connection.send(args)
                if not connection.poll(timeout_s):
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                is_error, answer = connection.recv()
            except (EOFError, OSError):
                self._end()
                raise
        if is_error:
            raise answer
        return answer

    def kill(self) -> None:
        """End what runs now, from any thread: the call under way fails, the next starts anew."""
        if (child := self._child) is not None:
            self._killed = child
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
        ours.send((self._make, self._given))
        if not ours.poll(START_S):
            raise StartTimeoutError(f"it was not loaded within {START_S:g} s")
        is_error, answer = ours.recv()
        if is_error:
            self._end()
            raise answer
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
    """Answer calls until the other end is closed."""
    connection = Connection(connection_fd)
    make, given = connection.recv()
    try:
        function = resolve(make)(*given)
    except Exception as e:  # noqa: BLE001 - raised where the call was made
        connection.send((True, e))
        return
    connection.send((False, None))
    with contextlib.suppress(EOFError):
        while True:
            args = connection.recv()
            try:  # in the main thread: some libraries use signals
                answer = (False, function(*args))
            except Exception as e:  # noqa: BLE001 - raised where the call was made
                answer = (True, e)
            try:
                connection.send(answer)
            except Exception as e:  # noqa: BLE001 - what cannot be pickled fails in many ways
                connection.send((True, e))
