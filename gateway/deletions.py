"""This module deletes trajectories from a run's files, which are the archive of what left the pool
and the trainer's copies, in a process beside the gateway: they are written anew, which takes
seconds of a processor.

    DELETE, DELETE, … ──► those that wait ──► one process for all of them ──► each is answered

Owns how many processes there are: one. Does not own the files (`datapool/files`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

from stepwell.gateway.errors import FileDeletionError

log = logging.getLogger(__name__)


class FileDeletions:
    """The deletions that this gateway has asked for.

    Args:
        archive: folder of the archive; None: there is none.
        run: folder of the run, with the trainer's copies; None: there is none.
    """

    def __init__(self, archive: Path | None, run: Path | None) -> None:
        self._archive, self._run_dir = archive, run
        self._lock = asyncio.Lock()
        self._waiting: dict[str, bool] = {}
        """Trajectories that the next process deletes, and whether with their groups."""
        self._next: asyncio.Task[list[str]] | None = None

    async def delete(self, uids: Iterable[str], *, with_groups: bool) -> list[str]:
        """Delete trajectories; all that went from files with this process: also what others asked
        for at the same time.

        Args:
            with_groups: also all others of their groups.

        Raises:
            FileDeletionError: it failed.
        """
        if self._archive is None and self._run_dir is None:
            return []
        for uid in uids:
            self._waiting[uid] = with_groups or self._waiting.get(uid, False)
        if self._next is None:
            self._next = asyncio.create_task(self._run())
        # Others wait for it, too: who hangs up does not end it.
        return await asyncio.shield(self._next)

    async def _run(self) -> list[str]:
        async with self._lock:
            waiting, self._waiting, self._next = self._waiting, {}, None
            command = (sys.executable, "-m", "stepwell.datapool.files.deletion_process")
            folders = {"archive": self._archive, "run": self._run_dir}
            asked = {"uids": waiting} | {k: path and str(path) for k, path in folders.items()}
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
            except OSError as e:  # no memory, or no more processes
                raise _failed(len(waiting), str(e)) from e
            told, error = await process.communicate(json.dumps(asked).encode())
        if process.returncode:
            said = error.decode(errors="replace").strip().splitlines()
            last = said[-1] if said else f"it ended with {process.returncode}"
            raise _failed(len(waiting), last)
        gone: list[str] = json.loads(told)
        return gone


def _failed(n: int, why: str) -> FileDeletionError:
    log.error("%d trajectories are not deleted from files: %s", n, why)
    return FileDeletionError(
        "deleted from the DataPool, but the archive may still hold it, or the trainer's files, as "
        "the gateway's log says; repeat the DELETE once what it names is mended"
    )
