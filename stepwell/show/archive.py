"""This module shows what a run has archived: lists, prompts, and where a uid leads.

    uid ──► the pool │ waiting to be archived │ the archive │ a sample of what was trained │ deleted

The archive is read where it is, also while its run is alive. What a finished run left waiting is
archived first. Owns which archive is a run's. Does not own its form (`datapool/files/archive`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepwell.datapool.files.archive.conversations import cut
from stepwell.datapool.files.archive.reader import ArchiveReader, fate
from stepwell.run.folder import RunFile, archive_folder, holder, journal_folder, read_run
from stepwell.show.run import limits_of, run_folder
from stepwell.track.console import all_safe, safe
from stepwell.trainer.errors import ConfigError

WIDE = 120
"""Characters of a text in a list."""


def open_archive(where: str | None) -> ArchiveReader:
    """The archive of the run at `where`, with all that it left.

    Raises:
        ConfigError: there is no such run, or it has no archive.
    """
    folder = run_folder(where)
    run = read_run(folder)
    path = archive_folder(folder)
    if holder(folder) is None:
        asyncio.run(archive_rest(folder, run))
    reader = ArchiveReader(path)
    if not reader.folder.exists():
        raise ConfigError(
            f"{folder} has no archive: nothing has left its pool yet, or pool.archive.enabled is "
            "false"
        )
    return reader


async def archive_rest(folder: Path, run: RunFile) -> None:
    """Archive what waited when a run ended; its journal stays as it is."""
    from stepwell.datapool.files.archive.archiver import archive_stopped
    from stepwell.datapool.remote.stopped import stopped_pool

    config = limits_of(run)
    archive = config.archive.model_copy(update={"dir": archive_folder(folder).absolute()})
    config = config.model_copy(update={"archive": archive})
    if config.archive_dir is None:
        return
    try:
        await archive_stopped(stopped_pool(journal_folder(folder), config), config)
    except OSError:  # no journal, a damaged one (others say so), or a folder that is only read
        return


# -- screens -----------------------------------------------------------------------------------


def rows_screen(items: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A list of trajectories: a line for the uid, one for what was said."""
    if not items:
        return Text("no trajectory passes")
    lines: list[RenderableType] = []
    for item in items:
        row = all_safe(item)
        lines.append(Text(row["uid"], "bold", overflow="fold"))
        lines.append(Text(f"  {outcome(row)}", overflow="fold"))
        if item["first"] or item["last"]:
            lines.append(Text(f"  {_short(item['first'])} → {_short(item['last'])}", "dim"))
    return Group(*lines)


def outcome(row: Mapping[str, Any]) -> str:
    """Describe the end of a trajectory in a line."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3g}"
    turns = "1 turn" if row["turns"] == 1 else f"{row['turns']} turns"
    said = [reward, turns, f"{row['tokens']:,} tokens"]
    if row["version"] is not None:
        said.append(f"v{row['version']}")
    if row["time"] is not None:
        said.append(datetime.fromtimestamp(row["time"]).strftime("%Y-%m-%d %H:%M:%S"))
    return " · ".join([*said, fate(row)])


def _short(text: str | None) -> str:
    """The text in one line, cut where it is long."""
    return cut(safe(" ".join((text or "–").split())), WIDE)


def prompts_screen(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table of prompts."""
    if not rows:
        return Text("no prompt passes")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("tries", "mean", "best", "rewarded", "solved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", overflow="fold")
    for each in rows:
        row = all_safe(each)
        name = row["instance"] if each["first"] is None else _short(each["first"])
        solved = "-" if row["solved_version"] is None else f"v{row['solved_version']}"
        numbers = [row["tries"], _number(row["mean"]), _number(row["best"]), row["kind"], solved]
        source = f"[{row['data_source']}] " if row["data_source"] else ""
        table.add_row(*map(str, numbers), Text(f"{source}{name}"))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
