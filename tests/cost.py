"""This module runs a command and says what it cost, so that a slow part of `make check` is seen.

    python -m tests.cost NAME COMMAND...        ── NAME: 61 s wall, 58 s CPU

CPU seconds are user and system time of every process that the command started: children that were
waited for report theirs, and orphans are adopted and waited for here (Linux). A raylet ignores the
ends of its children, so their times are noted while they run, twice a second; what they use after
the last look is not seen.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

LOOK_EVERY_S = 0.5
ORPHANS_S = 10.0
"""Seconds in which processes that outlive the command may end by themselves."""
PR_SET_CHILD_SUBREAPER = 36


class Cost:
    """CPU seconds of a process tree, itself not among them."""

    def __init__(self) -> None:
        self.waited_for_s = 0.0
        self._noted: dict[int, float] = {}
        """By process id: of children of raylets."""

    def note(self) -> None:
        """Looks at the children of all raylets below this process."""
        try:
            below = psutil.Process().children(recursive=True)
        except psutil.Error:
            return  # a process ended while the tree was read: the next look finds the others
        for raylet in below:
            try:
                children = raylet.children() if raylet.name() == "raylet" else ()
            except psutil.Error:
                continue
            for child in children:
                try:
                    self._noted[child.pid] = sum(child.cpu_times()[:4])
                except psutil.Error:
                    continue

    def wait(self, options: int = 0) -> tuple[int, int]:
        """The next process that ended, and its status; (0, 0) if none has, with `WNOHANG`.

        Raises:
            ChildProcessError: there is none left.
        """
        pid, status, usage = os.wait4(-1, options)
        if pid:
            self.waited_for_s += usage.ru_utime + usage.ru_stime
            self._noted.pop(pid, None)  # its raylet ended first
        return pid, status

    @property
    def cpu_s(self) -> float:
        return self.waited_for_s + sum(self._noted.values())


def run(name: str, command: list[str]) -> int:
    """The exit status of the command; names what outlives it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    began, cost, ended = time.monotonic(), Cost(), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_EVERY_S):
            cost.note()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    child = subprocess.Popen(command)
    while child.returncode is None:
        try:
            pid, status = cost.wait()
        except KeyboardInterrupt:  # the command has it too, and ends by itself
            continue
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - began
    wait_for_orphans(cost)
    ended.set()
    looking.join()
    print(f"── {name}: {wall:.0f} s wall, {cost.cpu_s:.0f} s CPU", flush=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def wait_for_orphans(cost: Cost) -> None:
    until = time.monotonic() + ORPHANS_S
    try:
        while time.monotonic() < until:
            if not cost.wait(os.WNOHANG)[0]:
                time.sleep(0.1)
    except ChildProcessError:
        return  # the usual case: nothing outlived the command
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended now
            print(
                f"── still running: {process.pid} {' '.join(process.cmdline())[:100]}", flush=True
            )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
