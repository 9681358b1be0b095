"""The files of debug rollout data: every batch as it came to the advantages, and training on them.

    trainer.save_debug_rollout_data=DIR     DIR/{rollout_id}.pt, or a file name with {rollout_id}

`rollout_id` is the number of optimizer steps before the batch: a batch that a resumed run does
again replaces the one that was lost.

A replay gives the updater what the recorded run gave it, with the versions and counters of then, so
on the CPU its losses are equal bit for bit. It publishes nothing and leaves no checkpoint. Does not
own the mathematics (`updater.py`).
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepwell.datapool.sealed import damaged, sealed, unsealed
from stepwell.datapool.types import Group
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.updater import Updater, record_of

FORMAT = 4
"""Raised with every change that a recording of before would not survive; that one is refused."""

_FIELD = "{rollout_id}"


class Recording(NamedTuple):
    """One batch, as it came to the advantages."""

    groups: tuple[Group, ...]
    """Scored and filtered, in order."""
    progress: Progress
    """Before the batch."""


def recording_path(where: str, rollout_id: int | str) -> Path:
    """The file of a batch: `where` with {rollout_id} filled in, or a folder."""
    template = where if _FIELD in where else str(Path(where) / f"{_FIELD}.pt")
    return Path(template.replace(_FIELD, str(rollout_id)))


def record_batch(where: str | None, groups: Sequence[Group], progress: Progress) -> None:
    """Write the batch that is about to be trained; None: nothing is recorded.

    Raises:
        CheckpointError: the file cannot be written.
    """
    if where is None:
        return
    path = recording_path(where, progress.updates)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "groups": tuple(groups), "progress": progress}
        file = io.BytesIO()
        torch.save(content, file)
        draft.write_bytes(sealed(file.getvalue()))
        draft.replace(path)
    except OSError as e:
        raise CheckpointError(
            f"trainer.save_debug_rollout_data is {where!r}, and {path} cannot be written ({e})"
        ) from e


def recordings(where: str) -> list[tuple[int, Path]]:
    """(rollout_id, file) of what was recorded there, in the order of training.

    Raises:
        CheckpointError: there is nothing.
    """
    template = recording_path(where, _FIELD)
    name = re.compile(re.escape(template.name).replace(re.escape(_FIELD), r"(\d+)"))
    found = [(int(m[1]), p) for p in template.parent.glob("*") if (m := name.fullmatch(p.name))]
    if not found:
        raise CheckpointError(
            f"trainer.load_debug_rollout_data is {where!r}, where no batch is recorded; name what "
            "trainer.save_debug_rollout_data named in the recorded run"
        )
    return sorted(found)


def load_recording(path: Path) -> Recording:
    """
    Raises:
        CheckpointError: it cannot be read, or another release wrote it.
        DamagedFileError: it is not what was written.
    """
    try:
        content = io.BytesIO(unsealed(path.read_bytes()))
    except ValueError as e:
        raise damaged(path, str(e), "record the run again") from e
    try:
        raw = torch.load(content, map_location="cpu", weights_only=False)
    except Exception as e:  # what is damaged, or of classes that are gone, fails in many ways
        raise CheckpointError(f"{path} cannot be read ({e}); record the run again") from e
    found = raw.get("format", 1)
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, and this release reads {FORMAT} only; replay it with the "
            "release that wrote it, or record the run again"
        )
    return Recording(raw["groups"], raw["progress"])


def replay(
    updater: Updater, batches: Sequence[tuple[int, Path]], updates_per_sync: int
) -> Iterator[dict[str, Any]]:
    """Train on the recorded batches; yields the metrics of each optimizer step.

    Args:
        updates_per_sync: optimizer steps between two publications of the recorded run.

    Raises:
        CheckpointError: a batch is missing: it does not begin where the one before ended.
    """
    progress, phases = updater.progress, Phases()
    for rollout_id, path in batches:
        if rollout_id != progress.updates:
            raise CheckpointError(
                f"{path} begins after optimizer step {rollout_id}, but the model is at "
                f"{progress.updates}; set run.resume to the checkpoint step_{rollout_id}, "
                "or restore the missing recordings"
            )
        recording = load_recording(path)
        progress.become(recording.progress)
        mark = time.monotonic()
        with phases("prepare"):
            prepared = updater.prepare(recording.groups)
        for steps, groups, _ in prepared.mini_batches:
            with phases("train"):
                update = updater.step(prepared.batch, steps)
            if progress.updates % updates_per_sync == 0:  # the table moves as it did
                progress.version += 1
                progress.published[progress.version] = progress.updates
            times = phases.take(time.monotonic() - mark)
            progress.train_s += times["time/step_s"]
            told = record_of(progress, groups, times, recording.groups)
            yield {**told, **prepared.metrics, **update, **times}
            mark = time.monotonic()
