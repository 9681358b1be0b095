"""This module starts a server's process with a log of its own, so that it ends with the thread that
started it, and with all its children when it is killed.

It does not own command lines (`commands.py`) or when a process runs (`supervisor.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_WRAPPER = Path(__file__).with_name("die_with_parent.py")
_LINES = 20


def launch(
    argv: Sequence[str], log_file: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run `argv`, to be killed when the calling thread ends; its output goes to `log_file`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as out:
        out.write(f"--- launch: {' '.join(argv)}\n".encode())
        out.flush()
        # Its own session: Ctrl-C in the terminal goes to the driver, which stops it in order.
        return subprocess.Popen(
            [sys.executable, "-IS", str(_WRAPPER), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal its session: SGLang's scheduler and detokenizer are its children."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS: the group leader is a zombie
        return


def kill(process: subprocess.Popen[bytes]) -> None:
    signal_all(process, signal.SIGKILL)
    process.wait()


def last_lines(log_file: Path) -> str:
    """The end of a log, for an error's message."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as e:
        return f"(unreadable: {e})"
    return "\n".join(lines[-_LINES:])
