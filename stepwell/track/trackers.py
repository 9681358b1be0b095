"""This module mirrors a run's metrics to wandb, TensorBoard and Prometheus.

`build_trackers` is the registry. A destination that fails, as wandb's service does that is killed,
is said once and ends no run. Does not own `metrics.jsonl`, which the run itself reads again
(`trainer/metrics.py`), or the console (`track/console.py`).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stepwell.config.run import RunConfig
from stepwell.config.secrets import without_secrets
from stepwell.datapool.sealed import read_sealed, write_sealed
from stepwell.track.prometheus import PrometheusTracker
from stepwell.track.verl_names import VerlNames
from stepwell.trainer.errors import TrainerError
from stepwell.trainer.metrics import Tracker

log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
"""Folder of the event files, in the run's folder: `tensorboard --logdir runs`."""


def build_trackers(folder: Path, config: RunConfig) -> list[Tracker]:
    """Build the trackers that `logging` asks for. Where one cannot be built, those before it are
    closed."""
    trackers: list[Tracker] = []

    def close() -> None:
        for tracker in trackers:
            Mirror(tracker).close(failed=True)

    with ExitStack() as undo:
        undo.callback(close)  # wandb takes a run that nobody ends for a live one
        if config.logging.wandb != "disabled":
            trackers.append(WandbTracker(folder, config))
        if config.logging.tensorboard:
            trackers.append(TensorBoardTracker(folder / TENSORBOARD))
        if config.logging.names == "verl":
            trackers = [VerlNames(tracker, config) for tracker in trackers]
        if config.logging.prometheus_port is not None:
            trackers.append(PrometheusTracker(config.gateway.host, config.logging.prometheus_port))
        undo.pop_all()
    return [Mirror(tracker) for tracker in trackers]


class Mirror:
    """A tracker whose failures are said, the first in a warning, and raised to nobody."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._has_failed = False

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        with self._failures_told():
            self._tracker.write(step, record)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        with self._failures_told():
            self._tracker.table(step, name, columns, rows)

    def close(self, failed: bool) -> None:
        with self._failures_told():
            self._tracker.close(failed)

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # noqa: BLE001 - of whichever package shows the figures
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
            what = f"{self._tracker} got not all figures ({type(e).__name__}: {e})"
            log.log(level, "%s; the run goes on, and metrics.jsonl has them all", what)


class WandbTracker:
    """wandb, offline unless there is a key or `logging.wandb` says otherwise. Every life of a run
    is the same wandb run."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        # The settings alone leave its advertisements.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        mode = config.logging.wandb
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=config.logging.project,
                name=config.run.name,
                id=_run_id(folder / "wandb" / "stepwell_run_id"),
                resume="allow",
                dir=folder,
                mode=mode,
                config=without_secrets(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as e:  # out of reach, or a key that is none
            raise TrainerError(
                f"logging.wandb is {mode!r}, and wandb cannot begin a run ({e}); set it to "
                "offline, and `wandb sync` what it wrote later"
            ) from e
        # wandb's own step cannot go back, and an evaluation ends after the step that it is of.
        self._run.define_metric("val/step", hidden=True)
        self._run.define_metric("val/*", step_metric="val/step")
        self._run.define_metric("val-core/*", step_metric="val/step")
        self._newest = 0

    def __str__(self) -> str:
        return "wandb"

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        self._newest = max(self._newest, step)
        shown = {k: v for k, v in record.items() if isinstance(v, int | float)}
        self._run.log(shown, step=self._newest)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        cells = [_of_one_type(column) for column in zip(*rows, strict=True)]
        data = [list(row) for row in zip(*cells, strict=True)]
        table = self._wandb.Table(columns=list(columns), data=data)
        self._run.log({name: table}, commit=False)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _of_one_type(column: Sequence[Any]) -> Sequence[Any]:
    """A column as wandb takes it: as text, unless all of it are numbers, or text. The answers of a
    data set may be of several types."""
    kinds = {type(cell) for cell in column if cell is not None}
    if kinds <= {int, float} or kinds in ({str}, {bool}):
        return column
    return [None if cell is None else str(cell) for cell in column]


class TensorBoardTracker:
    """Scalars and tables as event files in `folder`, by tensorboardX: no TensorFlow, no server."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter  # `run/checks.py` has asked whether it is there

        self._writer = SummaryWriter(logdir=str(folder), flush_secs=10)

    def __str__(self) -> str:
        return "TensorBoard"

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, step)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]
        self._writer.add_text(name, "\n".join(lines), step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _row(cells: Sequence[Any]) -> str:
    """A line of a Markdown table."""
    clean = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(clean)} |"


def _run_id(file: Path) -> str:
    """The same for every life of the run."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file, {"id": uuid.uuid4().hex[:8]})
    remedy = "delete it to go on as another run in wandb"
    return str(read_sealed(file, remedy)["id"])
