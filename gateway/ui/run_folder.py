"""This module reads the files that a trainer leaves in its run's folder, so that the gateway shows
training without knowing a trainer.

    metrics.jsonl   one record per optimizer step; read to its end, from where it was read to before
    trained/        what a step was trained on (`datapool/files/trained.py`)
    run.json        who runs what, since when

All of them carry digests (`datapool/sealed.py`); what is damaged is an error that names the file.

A record is found by its place in the file: of a long run the places are kept and not the records.
Every method reads files; call it in a thread. Owns no file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    read_about,
    read_trained,
    trained_steps,
)
from stepwell.datapool.sealed import damaged, read_sealed, unsealed
from stepwell.datapool.types import Trajectory

METRICS: Final = "metrics.jsonl"
RUN: Final = "run.json"
MAX_POINTS: Final = 600
HEAD_BYTES: Final = 1024
"""First bytes of the metrics, by which a file of another start is told."""


class RunFolder:
    """The files of one run; all may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[int, tuple[int, int]] = {}
        """Optimizer step -> offset and length of its record; the last one of a step counts."""
        self._evaluated: set[int] = set()
        """Steps whose record has figures of an evaluation."""
        self._read_to = 0
        self._inode = 0
        self._head = b""
        """Its first bytes."""
        self._lock = threading.Lock()

    # -- metrics -----------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The optimizer steps that have a record, in order."""
        with self._lock:
            self._refresh()
            return sorted(self._places)

    def evaluated(self) -> list[int]:
        """The optimizer steps whose record has figures of an evaluation, in order."""
        with self._lock:
            self._refresh()
            return sorted(self._evaluated)

    def metrics_age_s(self) -> float | None:
        """Seconds since a trainer wrote its last record; None: there is none."""
        try:
            return max(0.0, time.time() - (self.path / METRICS).stat().st_mtime)
        except OSError:  # no trainer yet
            return None

    def record(self, step: int) -> dict[str, Any] | None:
        """The metrics of an optimizer step."""
        return next(iter(self.records([step])), None)

    def records(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """The metrics of these optimizer steps, without steps that have none."""
        with self._lock:
            self._refresh()
            places = [self._places[step] for step in steps if step in self._places]
        if not places:
            return []
        with (self.path / METRICS).open("rb") as file:
            found = []
            for at, size in places:
                file.seek(at)
                found.append(self._record(at, file.read(size)))
            return found

    def series(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Columns of these metrics and of `step`, at most about `MAX_POINTS` long; every evaluation
        is among them."""
        steps = self.steps()
        stride = -(-len(steps) // MAX_POINTS) or 1
        chosen = sorted({*steps[::-1][::stride], *self._evaluated})
        records = self.records(chosen)
        return {key: [record.get(key) for record in records] for key in ("step", *keys)}

    def _refresh(self) -> None:
        """Read what was appended. The file of a run that began anew is another one."""
        try:
            with (self.path / METRICS).open("rb") as file:
                status, head = os.fstat(file.fileno()), file.read(HEAD_BYTES)
                # A new file may have the number of the old one.
                is_same = status.st_ino == self._inode and head.startswith(self._head)
                if not is_same or status.st_size < self._read_to:
                    self._places, self._evaluated, self._read_to = {}, set(), 0
                self._inode, self._head = status.st_ino, head
                file.seek(self._read_to)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # it is being written
                    step = self._record(self._read_to, line)["step"]
                    self._places[step] = (self._read_to, len(line))
                    if b'"val/' in line:
                        self._evaluated.add(step)
                    self._read_to += len(line)
        except OSError:  # no trainer yet
            return

    def _record(self, at: int, line: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = orjson.loads(unsealed(line))
        except ValueError as e:
            raise damaged(
                self.path / METRICS,
                f"the line at byte {at} is not what was written",
                "delete that line, or move the file aside: training needs none of it",
            ) from e
        return record

    # -- what was trained on -----------------------------------------------------------------

    def sampled(self) -> list[int]:
        """The optimizer steps whose sample is kept, in order."""
        return trained_steps(self.path)

    def about(self, step: int) -> dict[str, Any] | None:
        """Description of a step's sample, with its trajectories; None: no sample was kept."""
        try:
            return read_about(self.path, step)
        except ExportError:  # none was kept
            return None

    def trained(self, uid: str, step: int | None = None) -> tuple[int, TrainedTrajectory] | None:
        """A trajectory as an optimizer step trained on it, with that step; `step` None: the last
        one that did."""
        for known in [step] if step is not None else reversed(self.sampled()):
            about = self.about(known) or {"trajectories": []}
            if all(t["trajectory_uid"] != uid for t in about["trajectories"]):
                continue
            for each in self._trained(known):
                if each.trajectory.trajectory_uid == uid:
                    return known, each
        return None

    def group(self, prompt_uid: str, step: int) -> list[Trajectory]:
        """Trajectories of this group that an optimizer step trained on."""
        found = (each.trajectory for each in self._trained(step))
        return [trajectory for trajectory in found if trajectory.prompt_uid == prompt_uid]

    def _trained(self, step: int) -> tuple[TrainedTrajectory, ...]:
        try:
            return read_trained(self.path, step)
        except ExportError:  # removed meanwhile
            return ()

    # -- the run -----------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Facts in run.json that may be shown."""
        try:
            said = read_sealed(self.path / RUN, "start the run again, which writes it anew")
            config = said["config"]
            shown = {name: said.get(name) for name in ("name", "started_at", "versions", "git")}
            keys = {"model": ("model", "path"), "backend": ("trainer", "backend")}
            return shown | {k: config.get(a, {}).get(b) for k, (a, b) in keys.items()}
        except OSError:  # the run is still starting
            return {"name": self.path.name}
