"""This module kills what a run leaves behind, so that no process of it outlives the driver.

    driver ── pipe ──► python -P process_guard.py MARK             in a session of its own
       │ ends, or is killed: the pipe closes
       └──► processes with MARK in their environment, their children, and the agents it was told of

Ray ends its own processes if all goes well. It does not when the driver is killed at a bad moment,
or when its GCS was: the raylet's agents are then left to init. Every process of a Ray that the
driver starts inherits MARK; the agents overwrite their environment, so the driver names them.

Owns the guard's process. Does not own Ray (`ray_cluster.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress

import psutil

VARIABLE = "STEPWELL_RUN_MARK"
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

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Guard these, too, whatever their environment says."""
        lines = "".join(f"{process.pid} {process.create_time()!r}\n" for process in processes)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # without its guard a run goes on
                self._process.stdin.write(lines.encode())

    def close(self) -> None:
        """Returns once nothing is left. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def left(mark: str, told: Iterable[psutil.Process]) -> list[psutil.Process]:
    """What is guarded and still runs."""
    found = {process.pid: process for process in told if _runs(process)}
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
        except (psutil.Error, OSError):  # it ended meanwhile, or is somebody else's
            continue
    return [process for process in found.values() if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main(mark: str) -> None:
    told: list[psutil.Process] = []
    for line in sys.stdin:  # ends with the driver
        pid, created = line.split()
        try:
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                told.append(process)
        except psutil.Error:
            continue
    psutil.wait_procs(left(mark, told), timeout=GRACE_S)
    until = time.monotonic() + KILL_S
    while (processes := left(mark, told)) and time.monotonic() < until:
        for process in processes:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1])
