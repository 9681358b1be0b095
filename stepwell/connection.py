"""This module connects any process to the pool of a live run, by the run's folder or its Ray.

    async with stepwell.connect("runs/quickstart") as pool:     a script
        print(await pool.get_statistics("train"))

    pool = await stepwell.connect("runs/quickstart")         a notebook: until the process ends
    pool = await stepwell.connect("10.0.0.2:6379")           where the folder cannot be read

`run.json` says which Ray it is: several may run on the machine. In that Ray a small actor, the
`RunRecord`, says the same. A process can be connected to one Ray at a time, and so to one run, or
to several on the same cluster; `host:port/NAME` says which of several.

Owns the way from a folder or an address to a client. Does not own the file (`run_file.py`), or Ray
(`ray_cluster.py`).
"""

from __future__ import annotations

import atexit
import os
import re
import socket
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from stepwell.datapool import DataPoolClient
from stepwell.datapool import connect as connect_pool
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.errors import RunUnavailableError
from stepwell.ray_cluster import attached, visited
from stepwell.run_file import RunFile, is_starting, live_run
from stepwell.run_record import recorded_runs


class Connection:
    """What `connect` returns: `async with` it, or await it."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = run
        self._stack = ExitStack()

    async def __aenter__(self) -> DataPoolClient:
        return self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __await__(self) -> Generator[Any, None, DataPoolClient]:
        atexit.register(self._stack.close)  # and nothing earlier: nobody else holds the connection
        return self.__aenter__().__await__()

    def _open(self) -> DataPoolClient:
        run_dir, run = find_run(self._run)
        if run.ray is None or run.pool is None:
            raise is_starting(run_dir)
        with ExitStack() as stack:
            stack.enter_context(attached(run.ray, str(run_dir)))
            try:
                pool = connect_pool(run.pool.name, run.ray.namespace)
            except PoolUnavailableError as e:
                raise RunUnavailableError(
                    f"the run in {run_dir} is alive, but its pool is not: {e}"
                ) from e
            self._stack.push(stack.pop_all())
        return pool


def connect(run: str | os.PathLike[str]) -> Connection:
    """A client of the pool of a run, named by its folder, e.g. "runs/quickstart", or by its Ray's
    host:port; to be entered with `async with`, or awaited. Entering it joins the run's Ray, which
    blocks for about a second; leaving it ends that, unless the process was connected to it before.

    Raises:
        RunUnavailableError: on entering. No run is alive there, or this process is connected to
            another Ray.
    """
    return Connection(run)


_ADDRESS = re.compile(r"(?P<address>[^/\s]+:\d+)(?:/(?P<name>[^/\s]+))?")


def find_run(where: str | os.PathLike[str]) -> tuple[Path, RunFile]:
    """The folder and the file of a live run.

    Args:
        where: its folder; or `host:port` of its Ray, with `/NAME` if that has several runs.

    Raises:
        RunUnavailableError: there is none, or there are several.
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
    with visited(address):
        runs = {run.name: run for run in recorded_runs()}
    if not runs:
        raise RunUnavailableError(
            f"the Ray at {address} has no run; start one there (`stepwell serve … "
            f"cluster.address={address}`), or name the folder of a run"
        )
    listed = ", ".join(f"{address}/{run} in {runs[run].folder}" for run in sorted(runs))
    if name is None and len(runs) > 1:
        raise RunUnavailableError(f"the Ray at {address} has several runs; name one: {listed}")
    if name is not None and name not in runs:
        raise RunUnavailableError(f"the Ray at {address} has no run {name!r}; it has {listed}")
    return runs[name] if name is not None else next(iter(runs.values()))


def _check_host(run_dir: Path, run: RunFile, address: str) -> None:
    here = socket.gethostname()
    if address.startswith("127.") and run.host != here:
        raise RunUnavailableError(
            f"the run in {run_dir} is on {run.host}, this process on {here}, and the run's Ray "
            "listens on loopback; connect from there, or start the run on a cluster that both "
            "reach (cluster.address)"
        )
