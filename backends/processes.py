"""Child processes that lead a session of their own, have limits, and end with this process, with
everything that they start.

    start, spawn ──► a new session, which the guard is told of ──► kill(): all of its group
                              │
    this process ends, or is killed ──► its pipe to the guard closes ──► the guard kills all groups

The guard is one small process beside this one, started with the first child. So no thread has to
live as long as a child does, any command will do, and what a child has started ends, too. What
leaves the group (`setsid`) is not followed: a namespace of its own ends that.

Time limits are the caller's: it waits as long as it likes, and kills. A child is not interrupted by
Ctrl-C in the terminal: whoever started it ends it in order.

Owns sessions, limits and the guard. Does not own what is run: engines (`engines/supervisor.py`),
rewards and programs of models (`trainer/`), rollout generators (`gateway/slime_buffer/`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

_HELPER = str(Path(__file__).with_name("child.py"))
_LINES = 20

Process = TypeVar("Process", subprocess.Popen[bytes], asyncio.subprocess.Process)


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of each process of a child, in bytes and seconds; None: as this process."""

    cpu_s: int | None = None
    memory: int | None = None
    """Address space."""
    file_size: int | None = None
    """Bytes of each file written."""
    files: int | None = None
    """Open files."""
    processes: int | None = None
    """Processes and threads of its user; in a user namespace, of that."""

    def command(self, *command: str) -> list[str]:
        """`command` under these limits; `-c` and a source instead: that, in Python."""
        limits = {
            "CPU": None if self.cpu_s is None else f"{self.cpu_s}:{self.cpu_s + 1}",
            "AS": self.memory,
            "FSIZE": self.file_size,
            "NOFILE": self.files,
            "NPROC": self.processes,
            "CORE": 0,
        }
        given = ",".join(f"{name}={value}" for name, value in limits.items() if value is not None)
        return [sys.executable, "-I", _HELPER, "limited", given, *command]


class Child(Generic[Process]):
    """A child and all that it starts in its session."""

    def __init__(self, process: Process) -> None:
        self.process: Process = process
        self.pid: int = process.pid
        try:
            _guard.follow(self.pid)
        except OSError:  # there is no memory for another process
            self.signal(signal.SIGKILL)
            raise

    def signal(self, number: int) -> None:
        """Signal all of its group, if there is anything left of it."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: the leader is a zombie
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill all of its group, also what it has left running. Does not wait. Call it when the
        process has ended by itself, too: from then on nobody follows it."""
        self.signal(signal.SIGKILL)
        _guard.forget(self.pid)


def start(argv: Sequence[str], **options: Any) -> Child[subprocess.Popen[bytes]]:
    """Run `argv`; `options` are `Popen`'s.

    Raises:
        OSError: it cannot be run.
    """
    return Child(subprocess.Popen(argv, start_new_session=True, **options))


async def spawn(argv: Sequence[str], **options: Any) -> Child[asyncio.subprocess.Process]:
    """Run `argv` for the running event loop; `options` are `create_subprocess_exec`'s."""
    return Child(await asyncio.create_subprocess_exec(*argv, start_new_session=True, **options))


def start_logged(
    argv: Sequence[str], log_file: Path, env: Mapping[str, str] | None = None
) -> Child[subprocess.Popen[bytes]]:
    """`start` without input, its output appended to `log_file`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as out:
        out.write(f"--- launch: {' '.join(argv)}\n".encode())
        out.flush()
        given, merged = subprocess.DEVNULL, subprocess.STDOUT
        return start(argv, stdin=given, stdout=out, stderr=merged, env=env)


def last_lines(log_file: Path) -> str:
    """The end of a log, for an error's message."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as e:
        return f"(unreadable: {e})"
    return "\n".join(lines[-_LINES:])


class _Guard:
    """This process's end of the guard. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def follow(self, group: int) -> None:
        with self._lock:
            if self._owner != os.getpid():  # a fork: it has no children yet
                self._owner, self._process, self._groups = os.getpid(), None, set()
            self._groups.add(group)
            if self._process is None or not self._write(f"+{group}\n"):
                self._start()

    def forget(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)
            self._write(f"-{group}\n")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-IS", _HELPER, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        for group in self._groups:
            self._write(f"+{group}\n")

    def _write(self, line: str) -> bool:
        """False: somebody has killed it."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return False
        return True


_guard = _Guard()
"""One for the whole process: what is started has to end with it, whoever started it."""
