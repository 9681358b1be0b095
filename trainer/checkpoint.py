"""Checkpoints: everything a run needs to go on, published by one atomic rename.

    runs/NAME/checkpoints/step_20/state.pt     backend, prompt source, versions, counters

A folder named `step_N` is complete by construction: it is written as `.tmp` and renamed last.
Groups are acked only after the rename, so a crash never skips one; `pending` prompts (handed out,
not in a checkpoint) are issued again on resume. Does not own what the state means.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from trainer.errors import CheckpointError

_NAME = re.compile(r"step_(\d+)")


class CheckpointStore:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write `state` durably as `step_{step}`; prune the oldest beyond `keep`.

        Raises:
            CheckpointError: the folder cannot be written; nothing that was there is touched.
        """
        final = self._folder / f"step_{step}"
        draft = self._folder / f"step_{step}.tmp"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            with (draft / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if final.exists():
                shutil.rmtree(final)
            draft.rename(final)
            _fsync_folder(self._folder)
        except OSError as e:
            raise CheckpointError(
                f"checkpoint {final} cannot be written ({e}); free space or fix run.dir"
            ) from e
        for _, old in self._complete()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_latest(self) -> dict[str, Any] | None:
        """The newest complete checkpoint's state, or None if there is none.

        Raises:
            CheckpointError: it is there but cannot be read.
        """
        complete = self._complete()
        if not complete:
            return None
        _, path = complete[-1]
        try:
            # Our own file: it holds RNG states and task dicts, which the weights-only reader
            # refuses.
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=False)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as e:
            raise CheckpointError(
                f"checkpoint {path} cannot be read ({e}); delete that folder to resume from an "
                "older one, or set run.resume=never to start over"
            ) from e
        return dict(state)

    def _complete(self) -> list[tuple[int, Path]]:
        found = [
            (int(match[1]), path)
            for path in self._folder.glob("step_*")
            if (match := _NAME.fullmatch(path.name))
        ]
        return sorted(found)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
