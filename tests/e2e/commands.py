"""The `stepwell` command in processes of their own, which fork from one that has imported torch,
transformers and Ray: to import them takes each five seconds of CPU, as long as what it then does.

They get a session of their own, as from `Popen(start_new_session=True)`; what they print is in a
file. Tests that are marked `long`, that of the wheel among them, start the command as users do.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from stepwell.cli.main import main
from tests.e2e.conftest import ROOT

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["stepwell.run.train"])


def start(*arguments: str, log: Path) -> ForkServerProcess:
    """Start the command in the repository's root."""
    log.write_text("")
    process = FORKED.Process(target=_run, args=(arguments, str(log)))
    process.start()
    return process


def _run(arguments: Sequence[str], log: str) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored
    os.chdir(ROOT)
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # until it ends
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["stepwell", *arguments]
    try:
        sys.exit(main(arguments))
    finally:
        atexit._run_exitfuncs()  # what multiprocessing leaves out
