"""This module finds a live run by its folder, or by the address of its Ray.

    runs/live               the folder: its `run.json`. Ray is not imported
    10.0.0.2:6379           the only run on that Ray, from its record there (`run/record.py`)
    10.0.0.2:6379/live      of several, the one of that name

Does not own what is known of a run (`run/folder.py`) or the connection to Ray (`cluster/ray.py`).
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from stepwell.errors import NoRunError, RunUnavailableError
from stepwell.run.folder import RunFile, live_run

_ADDRESS = re.compile(r"(?P<address>[^/\s]+:\d+)(?:/(?P<name>[^/\s]+))?")


def find_run(where: str | os.PathLike[str]) -> tuple[Path, RunFile]:
    """The folder and the file of the live run at `where`.

    Raises:
        NoRunError: there is none, or there are several.
        RunUnavailableError: it has ended, or is out of reach.
    """
    match = None if Path(where).exists() else _ADDRESS.fullmatch(os.fspath(where))
    if match is not None:
        run = _run_at(match["address"], match["name"])
        return run.folder / run.config["run"]["dir"], run
    folder = Path(where)
    run = live_run(folder)
    if run.ray is not None:
        _check_host(folder, run, run.ray.address)
    return folder.absolute(), run


def _run_at(address: str, name: str | None) -> RunFile:
    """The run called `name` (None: the only one) on the Ray at `address`."""
    from stepwell.cluster.ray import visited
    from stepwell.run.record import recorded_runs

    with visited(address):
        runs = {run.name: run for run in recorded_runs()}
    if not runs:
        raise NoRunError(
            f"the Ray at {address} has no run; start one there (`stepwell serve … "
            f"cluster.address={address}`), or name the folder of a run"
        )
    listed = ", ".join(f"{address}/{run} in {runs[run].folder}" for run in sorted(runs))
    if name is None and len(runs) > 1:
        raise NoRunError(f"the Ray at {address} has several runs; name one: {listed}")
    if name is not None and name not in runs:
        raise NoRunError(f"the Ray at {address} has no run {name!r}; it has {listed}")
    return runs[name] if name is not None else next(iter(runs.values()))


def _check_host(run_dir: Path, run: RunFile, address: str) -> None:
    here = socket.gethostname()
    if address.startswith("127.") and run.host != here:
        raise RunUnavailableError(
            f"the run in {run_dir} is on {run.host}, this process on {here}, and the run's Ray "
            "listens on loopback; connect from there, or start the run on a cluster that both "
            "reach (cluster.address)"
        )
