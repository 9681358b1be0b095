"""This module puts the curves of several runs side by side: the run whose gateway this is, and runs
whose folders lie beside its own.

    runs/this  runs/that  runs/…  ──metrics.jsonl──► curves by optimizer step, tokens or seconds
                                                └──► one table, as CSV

A page names a run by the name of its folder, out of those that are listed: never a path. Files are
read; call it in a thread. Does not own the metrics (`run_folder.py`).
"""

from __future__ import annotations

import csv
import io
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stepwell.gateway.errors import RequestError, UnknownItemError
from stepwell.gateway.ui.run_folder import MAX_POINTS, METRICS, RunFolder

MOST_RUNS: Final = 8
"""Runs on one page."""
MOST_LISTED: Final = 500
AXES: Final = ("step", "tokens", "seconds")


class Comparison:
    """The runs beside `folder`, that one included."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, RunFolder] = {}

    def names(self) -> list[str]:
        """Folders that have metrics; those that a trainer wrote to last come first."""
        found = []
        for path in self.folder.parent.iterdir():
            try:
                status = (path / METRICS).stat()
            except OSError:  # none, or a folder of somebody else, as lost+found
                continue
            if stat.S_ISREG(status.st_mode) and not path.is_symlink():
                found.append((status.st_mtime, path.name))
        return [name for _, name in sorted(found, reverse=True)[:MOST_LISTED]]

    def curves(self, names: Sequence[str], keys: Sequence[str]) -> list[dict[str, Any]]:
        """Each run's curves: key -> `{"step", "tokens", "seconds", "value"}`, columns of the same
        length, at most `MAX_POINTS`.

        Raises:
            UnknownItemError: there is no such run.
            RequestError: too many are named.
        """
        return [
            {"name": name, "curves": {key: _curve(rows, key) for key in keys}}
            for name, rows in self._rows(names).items()
        ]

    def keys(self, names: Sequence[str]) -> list[str]:
        """Figures that the last record of one of these runs has, or its last one of an
        evaluation."""
        last = [rows[-1] for rows in self._rows(names).values() if rows]
        for name in dict.fromkeys(names):
            run = self._runs[name]
            last += run.records(run.evaluated()[-1:])
        return sorted({k for row in last for k, v in row.items() if isinstance(v, int | float)})

    def as_csv(self, names: Sequence[str], keys: Sequence[str]) -> str:
        """A row for each optimizer step of each run."""
        text = io.StringIO()
        columns = list(dict.fromkeys((*AXES, *keys)))
        out = csv.writer(text)
        out.writerow(["run", *map(_cell, columns)])
        for name, rows in self._rows(names).items():
            out.writerows([_cell(name), *(row.get(key) for key in columns)] for row in rows)
        return text.getvalue()

    def _rows(self, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Records of these runs, each with what was trained and how long it took until then."""
        if len(names) > MOST_RUNS:
            raise RequestError(f"run names {len(names)} runs; send at most {MOST_RUNS}", "run")
        known = set(self.names())
        for name in names:
            if name not in known:
                raise UnknownItemError(
                    f"run is {name!r:.200}, which is no folder with {METRICS} beside this run's",
                    "run",
                )
        found = {}
        for name in dict.fromkeys(names):
            run = self._runs.setdefault(name, RunFolder(self.folder.parent / name))
            tokens, seconds, rows = 0.0, 0.0, []
            for record in run.records(run.steps()):
                tokens += record.get("tokens") or 0
                seconds += record.get("time/step_s") or 0
                rows.append(record | {"tokens": tokens, "seconds": seconds})
            found[name] = rows
        return found


def _curve(rows: Sequence[dict[str, Any]], key: str) -> dict[str, list[Any]]:
    """An evaluation is at the step whose weights it is of, not at the one that it ended beside."""
    by_step = {row["step"]: row for row in rows}
    points = []
    for row in rows:
        if isinstance(value := row.get(key), int | float):
            of = row.get("val/step") if key.startswith("val/") else None
            at = by_step.get(of, row)
            points.append([at[axis] for axis in AXES] + [value])
    stride = -(-len(points) // MAX_POINTS) or 1
    columns = list(zip(*points[::-1][::stride][::-1], strict=True)) or [()] * 4
    return dict(zip((*AXES, "value"), map(list, columns), strict=True))


def _cell(name: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name
