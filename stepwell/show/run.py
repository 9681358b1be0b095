"""This module opens a run for looking at, so that no command needs to know whether it is alive.

    runs/NAME alive    ──► its pool, through its Ray; its gateways and engines answer
    runs/NAME ended    ──► its journal, read-only; its files
    no name            ──► this folder, else the only run alive in ./runs, else the last one there

Owns which run is meant, and what is read of its files. Does not own what is shown
(`show/status.py`, `show/trajectory.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepwell.backends.hub import RUNS
from stepwell.config.load import recorded_config
from stepwell.datapool import DataPoolClient
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.errors import NoJournalError
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.gateway.ui.run_folder import RunFolder
from stepwell.layout import RUN_FILE, WEIGHTS
from stepwell.run.connection import connect
from stepwell.run.find import find_run
from stepwell.run.folder import (
    TRAINER_LOCK,
    RunFile,
    holder,
    journal_folder,
    read_run,
)
from stepwell.trainer.errors import ConfigError

RECENT = 300
"""Optimizer steps that are shown."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, to be looked at."""

    folder: Path
    run: RunFile
    is_alive: bool
    pool: DataPoolClient
    files: RunFolder
    """Files that the run's trainer writes."""

    def lives(self) -> bool:
        """True if the run is still alive."""
        return self.is_alive and (not self.folder.is_dir() or holder(self.folder) is not None)

    @property
    def trainer_pid(self) -> int | None:
        """The process that trains; None: nobody does."""
        return holder(self.folder, TRAINER_LOCK)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the last optimizer steps in metrics.jsonl, in order."""
        return self.files.records([step for step in self.files.steps() if step > 0][-RECENT:])

    def tokenizer_path(self) -> str | None:
        """Path of the served model's tokenizer, from wherever this process is; where the model is
        not there, of the same one beside published weights."""
        config = self.run.config
        model = config["model"]["path"]
        path = config.get("gateway", {}).get("tokenizer_path") or model
        found = self.run.found(path)
        if path != model or Path(found).is_dir():
            return found
        published = (self.folder / WEIGHTS).glob("v*/tokenizer.json")
        return next((str(file.parent) for file in published), found)


def choose_run(where: str | None) -> Path | str:
    """The folder of the run that is meant, or `where` if it is no folder's name.

    Args:
        where: as the user named it; None: not at all.

    Raises:
        ConfigError: nothing was named, and there is no run here, or several are alive.
    """
    if where is not None:
        return where
    if Path(RUN_FILE).is_file():
        return Path()
    found = sorted(file.parent for file in Path(RUNS).glob(f"*/{RUN_FILE}"))
    alive = [folder for folder in found if holder(folder) is not None]
    if len(alive) > 1:
        raise ConfigError(f"several runs are alive; name one: {', '.join(map(str, alive))}")
    if not found:
        raise ConfigError(
            f"there is no run in {Path(RUNS).absolute()}; name the folder of one, such as "
            "runs/quickstart, or start one (`stepwell train`, `stepwell serve`)"
        )
    return alive[0] if alive else max(found, key=lambda folder: (folder / RUN_FILE).stat().st_mtime)


def run_folder(where: str | None) -> Path:
    """The folder of the run at `where`: itself, or that of the run on this Ray; None: see
    `choose_run`.

    Raises:
        ConfigError, NoRunError: there is no such run.
        RunUnavailableError: its Ray is out of reach.
    """
    place = choose_run(where)
    return Path(place) if Path(place).exists() else find_run(place)[0]


@asynccontextmanager
async def open_run(where: str | None) -> AsyncIterator[RunView]:
    """The run at `where`: a folder, or host:port of its Ray; None: see `choose_run`.

    Raises:
        ConfigError, NoRunError: there is no run, or it has ended and has no journal.
        RunUnavailableError: it is alive, and its pool is out of reach.
        JournalError: it has ended, and its journal is damaged.
    """
    place = choose_run(where)
    folder, run, is_alive = _found(place)
    files = RunFolder(folder)
    if is_alive:
        async with connect(place) as pool:
            yield RunView(folder, run, True, pool, files)
    else:
        limits = limits_of(run)
        try:
            pool = stopped_pool(journal_folder(folder), limits)
        except NoJournalError as e:
            why = "has no journal: it ended before its pool was up, or that was removed"
            if limits.durability == "none":
                why = "has pool.durability none, which keeps nothing of its pool"
            raise ConfigError(
                f"the run in {folder} {why}; there is nothing to look at: start it again, and look "
                "at it while it is alive"
            ) from e
        yield RunView(folder, run, False, pool, files)


def _found(place: Path | str) -> tuple[Path, RunFile, bool]:
    """Folder and file of a run, and whether it is alive."""
    folder = Path(place)
    if not folder.is_dir():
        return *find_run(place), True
    return folder, read_run(folder), holder(folder) is not None


def limits_of(run: RunFile) -> PoolConfig:
    """Return the limits by which groups were held or dropped."""
    try:
        return recorded_config(run.folder, run.config).pool_of_run
    except ConfigError:  # another release's keys
        return PoolConfig()
