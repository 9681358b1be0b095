"""The files of debug rollout data: every batch as it came to the advantages.

    trainer.save_debug_rollout_data=DIR     DIR/{rollout_id}.pt, or a file name with {rollout_id}

`rollout_id` is the number of optimizer steps before the batch: a batch that a resumed run does
again replaces the one that was lost. Does not own training on them (`replay.py`).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stepwell.datapool.types import Group
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.progress import Progress

FORMAT = 3
"""Raised with every change that a recording of before would not survive; that one is refused."""

_FIELD = "{rollout_id}"


_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    *(ImportError, AttributeError, TypeError),  # classes of another release
)


@dataclass(frozen=True, slots=True)
class Recording:
    """One batch, as it came to the advantages."""

    groups: tuple[Group, ...]
    """Scored and filtered, in order."""
    progress: Progress
    """Before the batch."""


def recording_path(where: str, rollout_id: int) -> Path:
    """The file of a batch: `where` with {rollout_id} filled in, or a folder."""
    if _FIELD in where:
        return Path(where.replace(_FIELD, str(rollout_id)))
    return Path(where) / f"{rollout_id}.pt"


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
        torch.save(content, draft)
        draft.replace(path)
    except (OSError, RuntimeError) as e:  # torch's zip writer makes the latter of a full disk
        raise CheckpointError(
            f"trainer.save_debug_rollout_data is {where!r}, and {path} cannot be written ({e})"
        ) from e


def recordings(where: str) -> list[tuple[int, Path]]:
    """(rollout_id, file) of what was recorded there, in the order of training.

    Raises:
        CheckpointError: there is nothing.
    """
    pattern = recording_path(where, 0).with_name(Path(where).name if _FIELD in where else "*.pt")
    before, _, after = (Path(where).name if _FIELD in where else f"{_FIELD}.pt").partition(_FIELD)
    found = []
    for path in pattern.parent.glob(f"{before}*{after}"):
        number = path.name.removeprefix(before).removesuffix(after)
        if number.isdecimal():
            found.append((int(number), path))
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
    """
    try:
        raw = torch.load(path, map_location="cpu", weights_only=False)
    except _UNREADABLE as e:
        raise CheckpointError(f"{path} cannot be read ({e}); record the run again") from e
    found = raw.get("format", 1)
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, and this release reads {FORMAT} only; replay it with the "
            "release that wrote it, or record the run again"
        )
    return Recording(raw["groups"], raw["progress"])
