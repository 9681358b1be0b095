"""This module kills what a run leaves behind, so that no process of it outlives the driver.

    driver ── pipe ──► python -P process_guard.py MARK             in a session of its own
       │ lives: once a second the guard notes what descends from the run's raylet
       │ ends, or is killed: the pipe closes
       └──► what was noted, processes with MARK in their environment, and their children

Ray ends its own processes if all goes well. It does not when the driver is killed at a bad moment,
or when its GCS or raylet was: actors and agents are then left to init. Every process of a Ray that
the driver starts inherits MARK. Those that give themselves a title overwrite their environment;
they are known by their descent while the raylet lives.

Owns the guard's process. Does not own Ray (`cluster/ray.py`).
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable

import psutil

VARIABLE = "STEPWELL_RUN_MARK"
NOTE_EVERY_S = 1.0
GRACE_S = 2.0
"""For processes that are ending by themselves."""
KILL_S = 10.0


class ProcessGuard:
    """Guards this process; `close` when everything should have ended."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        """To be set as `VARIABLE` in the environment of what is guarded."""
        self._process = subprocess.Popen(
            # By its path, and -P: the folder that a run is started in may have a `trainer.py`.
            [sys.executable, "-P", __file__, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the driver
            bufsize=0,
        )

    def close(self) -> None:
        """Returns once nothing is left. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def left(mark: str, noted: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the guarded processes that still run."""
    found = {process.pid: process for process in noted if runs(process)}
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
        except (psutil.Error, OSError):  # it ended meanwhile, or is somebody else's
            continue
    return [process for process in found.values() if runs(process)]


def runs(process: psutil.Process) -> bool:
    """True if the process still does anything: a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main(mark: str) -> None:
    driver, noted = psutil.Process().parent(), set[psutil.Process]()
    while not select.select([sys.stdin], [], [], NOTE_EVERY_S)[0]:  # readable: the driver ended
        noted = {process for process in noted if runs(process)} | _descendants(driver, mark)
    psutil.wait_procs(left(mark, noted), timeout=GRACE_S)
    until = time.monotonic() + KILL_S
    while (processes := left(mark, noted)) and time.monotonic() < until:
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=1.0)


def _descendants(driver: psutil.Process | None, mark: str) -> set[psutil.Process]:
    """Return the descendants of the run's raylet. The driver may have another Ray."""
    found: set[psutil.Process] = set()
    try:
        for process in driver.children() if driver is not None else ():
            if process.name() == "raylet" and process.environ().get(VARIABLE) == mark:
                found.update(process.children(recursive=True))
    except psutil.Error:
        return found  # one ended meanwhile: the next look finds the others
    return found


if __name__ == "__main__":
    main(sys.argv[1])
