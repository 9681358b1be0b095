"""This module connects any process to the pool of a live run, by the run's folder alone.

    async with stepwell.connect("runs/quickstart") as pool:     a script
        print(await pool.get_statistics("train"))

    pool = await stepwell.connect("runs/quickstart")         a notebook: until the process ends

`run.json` says which Ray it is: several may run on the machine. A process can be connected to one
Ray at a time, and so to one run, or to several on the same cluster.

Owns the way from a folder to a client. Does not own the file (`run_file.py`), or Ray
(`ray_cluster.py`).
"""

from __future__ import annotations

import atexit
import os
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
from stepwell.ray_cluster import attached
from stepwell.run_file import RunFile, is_starting, live_run


class Connection:
    """What `connect` returns: `async with` it, or await it."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._run_dir = Path(run_dir)
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
        run = live_run(self._run_dir)
        if run.ray is None or run.pool is None:
            raise is_starting(self._run_dir)
        _check_host(self._run_dir, run, run.ray.address)
        with ExitStack() as stack:
            stack.enter_context(attached(run.ray, str(self._run_dir)))
            try:
                pool = connect_pool(run.pool.name, run.ray.namespace)
            except PoolUnavailableError as e:
                raise RunUnavailableError(
                    f"the run in {self._run_dir} is alive, but its pool is not: {e}"
                ) from e
            self._stack.push(stack.pop_all())
        return pool


def connect(run_dir: str | os.PathLike[str]) -> Connection:
    """A client of the pool of the run in `run_dir`, e.g. "runs/quickstart"; to be entered with
    `async with`, or awaited. Entering it joins the run's Ray, which blocks for about a second;
    leaving it ends that, unless the process was connected to it before.

    Raises:
        RunUnavailableError: on entering. No run is alive there, or this process is connected to
            another Ray.
    """
    return Connection(run_dir)


def _check_host(run_dir: Path, run: RunFile, address: str) -> None:
    here = socket.gethostname()
    if address.startswith("127.") and run.host != here:
        raise RunUnavailableError(
            f"the run in {run_dir} is on {run.host}, this process on {here}, and the run's Ray "
            "listens on loopback; connect from there, or start the run on a cluster that both "
            "reach (cluster.address)"
        )
