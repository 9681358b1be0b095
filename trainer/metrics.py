"""Where metrics go: `metrics.jsonl` (one object per optimizer step) and wandb.

Owns the sinks; the console is `display.py`, the end-of-run files are `report.py`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import psutil
import wandb

from trainer.config import RunConfig


class MetricsWriter:
    """Appends records to `metrics.jsonl` and mirrors their numbers to wandb; a context manager."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._file = self._path.open("ab")
        mode = config.logging.wandb
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        # The setting alone leaves its advertisements.
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = wandb.init(
            project=config.logging.project,
            name=config.run.name,
            dir=folder,
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._wandb.finish(exit_code=0 if error is None else 1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Non-finite numbers become null: the file stays JSON for every reader."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._file.write(orjson.dumps(clean, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()
        self._wandb.log(
            {k: v for k, v in clean.items() if isinstance(v, int | float)}, step=clean["step"]
        )

    def read(self) -> list[dict[str, Any]]:
        """Every record of the run, from before a resume too; the last one of a step counts."""
        by_step = {r["step"]: r for r in map(orjson.loads, self._path.read_bytes().splitlines())}
        return [by_step[step] for step in sorted(by_step)]


class MemoryMeter:
    """Peak memory of this process and all its descendants, in bytes (proportional set size, so that
    pages shared between them count once); sampled by a thread every `interval_s`."""

    def __init__(self, interval_s: float = 2.0) -> None:
        self.peak = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> int:
        total = 0
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            try:
                info = process.memory_full_info()
            except psutil.Error:  # it ended meanwhile
                continue
            total += getattr(info, "pss", info.rss)
        self.peak = max(self.peak, total)
        return total

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.sample()
