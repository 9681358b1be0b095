"""The figures of a run as it goes: `metrics.jsonl`, the trackers, and who waits for whom.

    the loop ──with phases("train")──► Phases ─► time/*_s, wait/trainer_starved     ┐
    producer ──blocked, running──────► Idle   ─► wait/generation_saturated          ├─► record
    backend, off-policy, pool … ─────────────────────────────────────────────────── ┘     │
                                     metrics.jsonl, wandb, TensorBoard ◄── MetricsWriter ─┤
                                                                   an evaluation's ───────┘

An evaluation stands under the optimizer step that it is of, which may be behind when it ends: the
line of that step is written anew, with the evaluation's figures. The last line of a step counts.

Owns the file, which the run reads again at its end, the clocks, and the traces of single steps.
Does not own the other destinations (a run gives them to the writer), or what the names mean
(docs/metrics.md).
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import orjson
import psutil

from stepwell.datapool.sealed import damaged, read_lines, sealed, unsealed
from stepwell.trainer.plain import plain_text

METRICS = "metrics.jsonl"
"""File of the metrics, in the run's folder."""
PROFILE = "profile"
"""Folder of the traces, in the run's folder."""

T = TypeVar("T")


class Tracker(Protocol):
    """A place that metrics are mirrored to, such as wandb. It gets clean records (finite numbers,
    None, text) and drops what it cannot show."""

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """The metrics of optimizer step `step`, or of an evaluation of it: then `step` may be
        smaller than before."""
        ...

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """A table that belongs to the step."""
        ...

    def close(self, failed: bool) -> None: ...


class MetricsWriter:
    """Appends records to `metrics.jsonl` and mirrors them to `trackers`, which it closes; a context
    manager."""

    def __init__(self, folder: Path, trackers: Sequence[Tracker] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        self._path.touch()
        self._trackers = trackers
        self._places = {int(record["step"]): at for at, record in _records(self._path)}
        """Optimizer step -> where its last line begins."""
        _drop_torn_line(self._path)
        self._file = self._path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as closing:  # each, whatever another one raises
            for tracker in self._trackers:
                closing.callback(tracker.close, failed=error is not None)
            self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """The record of an optimizer step. Non-finite numbers become null: the file stays JSON for
        every reader."""
        self._write(int(record["step"]), _clean(record), {})

    def evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add the figures of an evaluation to the record of optimizer step `step`; at step 0,
        before training, they are all there is."""
        known: dict[str, Any] = {}
        if step in self._places:
            with self._path.open("rb") as file:
                file.seek(self._places[step])
                known = orjson.loads(unsealed(file.readline()))
        self._write(step, _clean(figures), known)

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """A table for the trackers, which belongs to optimizer step `step`."""
        data = [[row.get(column) for column in columns] for row in rows]
        if data:
            for tracker in self._trackers:
                tracker.table(step, name, columns, data)

    def read(self, first: int = 1, last: float = math.inf) -> list[dict[str, Any]]:
        """The record of every optimizer step of the run, from before a resume too.

        Args:
            last: newest step that counts: a run that went back to a checkpoint left later ones.
        """
        return [record for record in read_metrics(self._path, first) if record["step"] <= last]

    def _write(self, step: int, clean: dict[str, Any], known: dict[str, Any]) -> None:
        line = orjson.dumps({"step": step, **known, **clean}, option=orjson.OPT_SERIALIZE_NUMPY)
        self._places[step] = self._file.tell()
        self._file.write(sealed(line))
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, clean)


def read_metrics(path: Path, first: int = 1) -> list[dict[str, Any]]:
    """Return the record of each optimizer step in a `metrics.jsonl`, from step `first` on, in
    order: the last line of a step counts, and step 0 is the evaluation before training. A line that
    is being written is left out.

    Raises:
        DamagedFileError: a line is not what was written.
    """
    last = {record["step"]: record for _, record in _records(path)}
    return [last[step] for step in sorted(last) if step >= first]


def _clean(record: Mapping[str, Any]) -> dict[str, Any]:
    """Names may hold what a policy wrote, as the keys of a reward's result."""
    return {
        plain_text(k): None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in record.items()
    }


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record and where its line begins."""
    for at, line in read_lines(path):
        if line is None:
            raise damaged(
                path,
                f"the line at byte {at} is not what was written",
                "delete that line, or move the file aside: training needs none of it",
            )
        yield at, orjson.loads(line)


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line that is not whole: the machine died while it was being written."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n") and content:
        with path.open("rb+") as file:
            file.truncate(content.rfind(b"\n") + 1)


class Phases:
    """Seconds that the loop spent in each phase since the last `take`. Phases do not nest."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time in the block counts as phase `name`, also if the block fails."""
        began = self._now()
        try:
            yield
        finally:
            self._spent[name] += self._now() - began

    def take(self, wall_s: float) -> dict[str, float]:
        """`time/{phase}_s` of each phase, `time/step_s` = `wall_s`, and `wait/trainer_starved`: the
        share of it in which the trainer waited for groups (phase `wait`). Begins anew."""
        spent, self._spent = self._spent, defaultdict(float)
        share = spent["wait"] / wall_s if wall_s > 0 else 0.0
        return {
            **{f"time/{name}_s": seconds for name, seconds in spent.items()},
            "time/step_s": wall_s,
            "wait/trainer_starved": min(1.0, share),
        }


def traced(
    name: str, number: int, wanted: Collection[int], folder: Path, work: Callable[[], T]
) -> T:
    """Run `work` and return its result, with a trace `profile/{name}_{number}.json.gz` if `number`
    is wanted (`trainer.profile_steps`), for Perfetto or chrome://tracing: the operators of the CPU
    and the kernels of the GPU, by PyTorch's profiler. Must be called in the thread that computes.

    Args:
        folder: of the run.
    """
    if number not in wanted:
        return work()
    import torch  # only here: to read metrics takes none
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as trace:
        result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path = folder / PROFILE / f"{name}_{number}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    return result


class Idle:
    """The share of generation's capacity that stands idle because admission is refused: what is
    ready waits for the trainer. An integral over time, moved by events alone.

    With room for 16 groups, admission refused, and 4 whose rollouts still run, 12/16 is idle. While
    admission is open nothing is: then generation is as fast as it can be.
    """

    def __init__(self, capacity: int, now: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._now = now
        self._blocked = False
        self._running = 0
        self._since = self._began = now()
        self._total = 0.0

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The block waits for admission."""
        self._advance()
        self._blocked = True
        try:
            yield
        finally:
            self._advance()
            self._blocked = False

    def running(self, groups: int) -> None:
        """So many groups have rollouts running now."""
        self._advance()
        self._running = groups

    def take(self) -> float:
        """The mean share since the last call, in [0, 1]; begins anew."""
        self._advance()
        wall = self._since - self._began
        share = self._total / wall if wall > 0 else 0.0
        self._began, self._total = self._since, 0.0
        return min(1.0, share)

    def _advance(self) -> None:
        now = self._now()
        if self._blocked:
            idle = max(0.0, 1 - self._running / self._capacity)
            self._total += idle * (now - self._since)
        self._since = now


def waits(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of a run's wall time in which trainer or generation waited, for the summary."""
    wall = sum(r["time/step_s"] for r in records)

    def share(key: str) -> float:
        total = sum((r.get(key) or 0.0) * r["time/step_s"] for r in records)
        return float(total / wall) if wall > 0 else 0.0

    return {
        "trainer_starved": share("wait/trainer_starved"),
        "generation_saturated": share("wait/generation_saturated"),
    }


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
