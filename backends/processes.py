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

    run_job ──► a reaper, one small process ──► the command in a session of its own, bounded
                  │                                └── ended, or exceeded a bound: all that it
                  │                                    started is killed, in whatever session
                  └── its stdin closes: this process ended, or wants it to: the same

A job is foreign code that may fork, hang and fill the disk: an agent's harness. Its reaper adopts
orphans, so what leaves the group ends, too (on Linux).

Owns sessions, limits, bounds, the guard and the reaper. Does not own what is run: engines
(`engines/supervisor.py`), rewards, programs of models and agents' harnesses (`trainer/`), rollout
generators (`gateway/slime_buffer/`).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

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

    def as_text(self) -> str:
        limits = {
            "CPU": None if self.cpu_s is None else f"{self.cpu_s}:{self.cpu_s + 1}",
            "AS": self.memory,
            "FSIZE": self.file_size,
            "NOFILE": self.files,
            "NPROC": self.processes,
            "CORE": 0,
        }
        return ",".join(f"{name}={value}" for name, value in limits.items() if value is not None)

    def command(self, *command: str) -> list[str]:
        """`command` under these limits; `-c` and a source instead: that, in Python."""
        return [sys.executable, "-I", _HELPER, "limited", self.as_text(), *command]


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


@dataclass(frozen=True, slots=True)
class Bounds:
    """Most that all processes of a job use together; None: anything. They are looked at twice a
    second, so a little more may be used."""

    cpu_s: int | None = None
    memory: int | None = None
    """Resident bytes."""
    processes: int | None = None
    disk: int | None = None
    """Bytes in the job's folders."""
    files: int | None = None
    """Files and folders in them."""
    output: int | None = None
    """Bytes in its log."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command that is run to its end, with all that it starts."""

    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str]
    log: Path
    """File that its output is appended to."""
    timeout_s: float
    bounds: Bounds = Bounds()
    limits: Limits = field(default_factory=Limits)
    folders: Sequence[Path] = ()
    """Folders that `bounds` is about."""
    after: Sequence[str] = ()
    """Command that is run at its end, however it ends: to stop what runs elsewhere."""
    after_s: float = 60.0
    """Seconds that `after` may take: whoever runs the job waits for it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job."""

    how: Literal["exited", "signal", "bound", "stopped", "timeout", "unstarted", "lost"]
    """`bound`: it exceeded one. `unstarted`: it cannot be run. `lost`: its reaper was killed."""
    code: int = 0
    """Exit status, or number of the signal."""
    detail: str = ""
    """Name of the bound, or why it cannot be run."""


async def run_job(job: Job) -> Ended:
    """Run `job`; when this returns or raises (the caller may be cancelled), all that it started
    has been killed.

    Raises:
        OSError: the reaper cannot be started.
    """
    asked = {
        "log": str(job.log),
        "limits": job.limits.as_text(),
        "bounds": {name: most for name, most in asdict(job.bounds).items() if most is not None},
        "folders": [str(folder) for folder in job.folders],
        "after": list(job.after),
        "after_s": job.after_s,
    }
    reaper = await asyncio.create_subprocess_exec(
        sys.executable,
        "-IS",
        _HELPER,
        "reaper",
        json.dumps(asked),
        *job.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=job.cwd,
        env=job.env,
        start_new_session=True,
    )
    end = asyncio.create_task(_read_end(reaper))
    try:
        async with asyncio.timeout(job.timeout_s) as limit:
            return await asyncio.shield(end)
    except TimeoutError:
        if not limit.expired():
            raise
        return Ended("timeout")
    finally:
        if reaper.stdin is not None:
            reaper.stdin.close()
        await _wait_ended(end)


async def _read_end(reaper: asyncio.subprocess.Process) -> Ended:
    written = b"" if reaper.stdout is None else await reaper.stdout.read()
    await reaper.wait()
    return Ended(**json.loads(written)) if written else Ended("lost")


async def _wait_ended(end: asyncio.Task[Ended]) -> None:
    """Returns when the task has, also if the caller is cancelled again meanwhile."""
    cancelled = False
    while not end.done():
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


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
