"""This module connects any process to the pool of a live run, by the run's folder or its Ray.

    async with stepwell.connect("runs/quickstart") as pool:     a script
        print(await pool.get_statistics("train"))

    pool = await stepwell.connect("runs/quickstart")         a notebook: until the process ends
    pool = await stepwell.connect("10.0.0.2:6379")           where the folder cannot be read

`run.json` says which Ray it is: several may run on the machine. That Ray's key-value store holds
the same (`run/record.py`). A process can be connected to one Ray at a time, and so to one run, or
to several on the same cluster; `host:port/NAME` says which of several.

Owns the way from a run to a client. Does not own where a run is (`run/find.py`), or Ray
(`cluster/ray.py`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Generator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from stepwell.datapool import DataPoolClient
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.errors import RunUnavailableError
from stepwell.run.find import find_run
from stepwell.run.folder import is_starting


class Connection:
    """Result of `connect`: `async with` it, or await it."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = run
        self._stack = ExitStack()
        self._pool: DataPoolClient | None = None

    async def __aenter__(self) -> DataPoolClient:
        self._pool = self._open()
        return self._pool

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._pool is not None:
                await self._pool.close()
        finally:
            self._stack.close()

    def __await__(self) -> Generator[Any, None, DataPoolClient]:
        atexit.register(self._stack.close)  # and nothing earlier: nobody else holds the connection
        return self.__aenter__().__await__()

    def _open(self) -> DataPoolClient:
        run_dir, run = find_run(self._run)
        if run.ray is None or run.pool is None:
            raise is_starting(run_dir)
        # They import Ray, half a second of CPU, which nobody needs to look at a run that has ended.
        from stepwell.cluster.ray import attached
        from stepwell.datapool import connect as connect_pool

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
