"""This module lists the tasks of a `verifiers` environment: its own Python does
(`environments/verifiers_episode.py`). Does not own how they are played: `rollout.harness`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Final

from stepwell.backends.processes import start
from stepwell.trainer.config import VerifiersSource
from stepwell.trainer.data.listed import ListedTasks
from stepwell.trainer.errors import DataError

LIST_S: Final = 600.0
"""Seconds in which the tasks must be listed; a data set may have to be fetched."""


class VerifiersTasks(ListedTasks):
    """The tasks, in their own order.

    Raises:
        DataError: the Python, verifiers or the package is not there, or it has no task.
    """

    def __init__(self, config: VerifiersSource) -> None:
        argv = [*config.argv, "tasks", config.taskset, "--config", json.dumps(config.config)]
        if config.size is not None:
            argv += ["--size", str(config.size)]
        try:
            status, said, errors = _run(argv)
        except OSError as e:
            raise DataError(
                f"python is {str(config.python)!r}: {e.strerror}; make an environment for "
                "verifiers (python -m venv vf && vf/bin/pip install verifiers uv), and name its "
                "Python"
            ) from e
        except subprocess.TimeoutExpired as e:
            raise DataError(
                f"taskset is {config.taskset!r}, whose tasks were not listed within {LIST_S:g} s; "
                f"see what it waits for: {' '.join(argv)}"
            ) from e
        if status:
            why = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
            raise DataError(
                f"taskset is {config.taskset!r}, which {config.python} does not list: "
                f"{why[:500]}; install verifiers (0.4) and the package of the tasks there"
            )
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        if not rows:
            raise DataError(f"taskset is {config.taskset!r}, which has no task")
        super().__init__([{**r, "metadata": r["metadata"] | config.metadata} for r in rows])


def _run(argv: Sequence[str]) -> tuple[int, str, str]:
    """Status and outputs of a command, with which all ends that it has started: a server of the
    package's, say. Nobody is there to answer what it asks.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it takes more than `LIST_S`.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = start(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            status = child.process.wait(LIST_S)
        finally:
            child.kill()
            child.process.wait()
        for file in (out, err):
            file.seek(0)
        return status, out.read().decode(errors="replace"), err.read().decode(errors="replace")
