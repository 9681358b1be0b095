"""Checkpoints: everything a run needs to go on, published by one atomic rename.

    runs/NAME/checkpoints/
      step_20/backend/      model and optimizer, as the backend writes them: torch's in shards, each
                            rank its own, with checksums of their own; critic/ likewise
      step_20/state.pt      RNG and counters of backend and critic
                            progress: updates, versions with the update of each, roll-backs,
                            training time, KL coefficient, running baselines, evaluations
                            prompt source, prompts in flight, groups trained by lease
                            length of the ledger; Python's and numpy's RNG
      step_20/about.json    format, step, version; model path and fingerprint; backend and its
                            section; number of tasks; configuration without secrets
      step_20/checksums.json  SHA-256 of both: what is read is what was written, or an error
      scores.json           evaluation score by step: what `keep_best` goes by
      ledger.jsonl          what became of every prompt (`ledger.py`)

A folder named `step_N` is complete by construction: it is written as `step_N.tmp`, synced and
renamed last. The name is the marker; there is no second one that could disagree::

    step_20.tmp ──fsync, rename──► step_20 ──► pruned, unless among the last k or the best b
                                      └──────► step_20.aside: a resume went back behind it

Groups are acked only after the rename, so a crash never skips one; `pending` prompts (handed out,
not in a checkpoint) are issued again on resume. Does not own what the state means (`loop.py`).
"""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from safetensors import SafetensorError

from stepwell.backends.errors import checkpoint_remedy
from stepwell.datapool.sealed import check, fsync, read_sealed, seal, write_sealed
from stepwell.trainer.errors import CheckpointError, NoCheckpointError

Resume: TypeAlias = Literal["auto", "never"] | int | Path

FORMAT = 5
"""Format of a checkpoint, and of the scores and the ledger beside it. Raised with every change that
earlier ones would not survive; they are refused."""

BACKEND, CRITIC = "backend", "critic"
"""Folders of the models in a checkpoint."""

_NAME = re.compile(r"step_(\d+)")


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        keep: newest ones that stay; None: all, and the store is only read.
        keep_best: of all scored ones (`score`), those that stay besides; the later of equals.
        origin: goes into every `about.json`: `model_path`, `backend` and `backend_config`.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        keep_best: int = 0,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self._origin = dict(origin or {})
        self._keep = keep
        self._keep_best = keep_best
        # An evaluation may be scored while another thread saves.
        self._changing = threading.Lock()
        if keep is not None:
            for old in folder.glob("step_*.old"):  # killed between two renames, see `save`
                if not old.with_suffix("").exists():
                    old.rename(old.with_suffix(""))
                else:  # or behind them: once the new one is pruned, this would take its place
                    shutil.rmtree(old, ignore_errors=True)

    def draft(self, step: int) -> Path:
        """The empty folder that becomes `step_{step}`: models write theirs into it first.

        Raises:
            CheckpointError: it cannot be made.
        """
        draft = self._path(step).with_suffix(".tmp")
        try:
            for leftover in self.folder.glob("step_*.tmp"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            draft.mkdir(parents=True)
        except OSError as e:
            raise self.unwritable(step, e) from e
        return draft

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        draft: Path | None = None,
    ) -> Path:
        """Write `state` durably as `step_{step}`; prune what is not to be kept.

        Args:
            about: JSON-like, for readers that must not load the state.
            draft: of `draft`, with what models wrote there, all of it synced.

        Raises:
            CheckpointError: the folder cannot be written; nothing that was there is touched.
        """
        import torch  # only here and in `load`: to look at checkpoints takes none

        final = self._path(step)
        draft = draft or self.draft(step)
        try:
            with self._changing:
                if not self.steps() and not (self.folder / "scores.json").exists():
                    self._write_scores({})  # from now on it is missed
            about = {**self._origin, **(about or {}), "step": step, "format": FORMAT}
            (draft / "about.json").write_text(json.dumps(about) + "\n")
            torch.save(dict(state), draft / "state.pt")
            fsync(draft / "state.pt")
            fsync(draft / "about.json")
            seal(draft)
            fsync(draft)
            # An older one of the same step makes way only when the new one is whole, and comes
            # back (`__init__`) if the process dies between these two renames.
            old = final.with_suffix(".old")
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            draft.rename(final)
            fsync(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, RuntimeError) as e:  # torch's zip writer makes the latter of a full disk
            raise self.unwritable(step, e) from e
        with self._changing:
            self._prune()
        return final

    def find(self, resume: Resume) -> Path | None:
        """The checkpoint that a run with this `run.resume` goes on from; None: it starts anew.

        `auto`: the newest. A step: that one of this run. A path: a checkpoint of another run, until
        this run has one of its own; then the newest.

        Raises:
            NoCheckpointError: there is no such checkpoint.
            CheckpointError: it is of another format.
            DamagedFileError: it is damaged.
        """
        path = self._find(resume)
        if path is not None:
            self.about(path)
        return path

    def _find(self, resume: Resume) -> Path | None:
        steps = self.steps()
        newest = self._path(steps[-1]) if steps else None
        if resume == "never":
            return None
        if resume == "auto":
            return newest
        has = f"it has {', '.join(map(str, steps)) or 'none'}"
        if isinstance(resume, int):
            if resume not in steps:
                raise NoCheckpointError(
                    f"run.resume is {resume}, but {self.folder} has no step_{resume}; {has}"
                )
            return self._path(resume)
        if resume.absolute().parent == self.folder.absolute():
            if (number := _NAME.fullmatch(resume.name)) is None:
                raise NoCheckpointError(
                    f"run.resume is {str(resume)!r}, which is no checkpoint of this run: {has}; "
                    "one that was set aside is one again once it is renamed to step_N"
                )
            return self._find(int(number[1]))
        if newest is not None:
            return newest
        if not (resume / "state.pt").is_file():
            raise NoCheckpointError(
                f"run.resume is {str(resume)!r}, which has no state.pt; give auto, never, a step, "
                "or the folder of a checkpoint (runs/NAME/checkpoints/step_N)"
            )
        return resume

    def load(self, path: Path) -> dict[str, Any]:
        """The state in the checkpoint `path`; models read theirs themselves.

        Raises:
            CheckpointError: it cannot be read, or is of another format.
            DamagedFileError: it is not what was written.
        """
        import torch

        self.about(path)
        self._check(path)
        # Our own file, and what was written: it holds RNG states and task dicts, which the
        # weights-only reader refuses.
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=False)
        return dict(state)

    def about(self, path: Path) -> dict[str, Any]:
        """Return what `save` was told about the checkpoint `path`.

        Raises:
            CheckpointError: it cannot be read, or is of another format.
            DamagedFileError: it is not what was written.
        """
        self._check(path, "about.json")
        about = dict(json.loads((path / "about.json").read_text()))
        found = about.get("format", 1)
        if found != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {found}, and this release reads and writes {FORMAT} "
                "only; start the release that wrote it, or set run.resume=never to start over"
            )
        return about

    def set_aside(self, after: int) -> None:
        """The run goes back to step `after`: later checkpoints are of a history that it leaves.
        They stay on disk as `step_N.aside`, and are no checkpoints of this run any more."""
        for step in self.steps():
            if step > after:
                aside = self._path(step).with_suffix(".aside")
                shutil.rmtree(aside, ignore_errors=True)
                self._path(step).rename(aside)
        scores = self.scores()
        if any(step > after for step in scores):
            self._write_scores({step: x for step, x in scores.items() if step <= after})

    def score(self, step: int, value: float) -> None:
        """The policy after optimizer step `step` was evaluated; higher is better."""
        if self.folder.is_dir():  # else nothing was saved yet
            with self._changing:
                self._write_scores({**self.scores(), step: value})
                self._prune()

    def unscore(self, step: int) -> None:
        """The checkpoint of `step` has other weights than those that were scored."""
        with self._changing:
            scores = self.scores()
            if scores.pop(step, None) is not None:
                self._write_scores(scores)

    def scores(self) -> dict[int, float]:
        """Evaluation score by step, of checkpoints that are gone too.

        Raises:
            DamagedFileError: the file is not what was written.
            CheckpointError: it is missing, or cannot be read.
        """
        path = self.folder / "scores.json"
        if not path.exists() and not self.steps():
            return {}
        remedy = (
            "which checkpoints are the best is not known: put it back, or write {} into it to go "
            "on without the scores"
        )
        try:
            if path.read_bytes().strip() == b"{}":
                return {}
            scores = read_sealed(path, remedy)
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read ({e}); {remedy}") from e
        return {int(step): float(value) for step, value in scores.items()}

    def best(self) -> int | None:
        """The step of the checkpoint with the highest score; None if none is scored."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def chosen(self, step: int | Literal["latest", "best"]) -> Path:
        """The checkpoint of a step, the newest one, or that with the highest score.

        Raises:
            NoCheckpointError: there is none.
            CheckpointError, DamagedFileError: it is of another format, or damaged.
        """
        wanted = self.best() if step == "best" else step
        if isinstance(wanted, int) and wanted not in self.steps():
            steps = self.steps() or "none"
            raise NoCheckpointError(f"{self.folder} has no step_{wanted}; steps: {steps}")
        path = self.find("auto" if wanted == "latest" or wanted is None else wanted)
        if path is None or wanted is None:
            scored = "scored " if step == "best" and path is not None else ""
            steps = self.steps() or "none"
            raise NoCheckpointError(f"{self.folder} has no {scored}checkpoint; steps: {steps}")
        return path

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("step_*"))
        return sorted(int(name[1]) for name in names if name)

    def _check(self, path: Path, *names: str) -> None:
        """Raises DamagedFileError if a file of the checkpoint, or one of `names`, is damaged."""
        remedy = checkpoint_remedy(path)
        try:
            check(path, remedy, names or None)
        except OSError as e:
            raise CheckpointError(f"checkpoint {path} cannot be read ({e}); {remedy}") from e

    def unwritable(self, step: int, error: Exception) -> CheckpointError:
        """The error of a checkpoint whose disk is full, or gone."""
        return CheckpointError(
            f"checkpoint {self._path(step)} cannot be written ({error}); free space or fix run.dir"
        )

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _ranked(self) -> list[int]:
        scores = self.scores()
        return sorted(
            (step for step in self.steps() if step in scores),
            key=lambda step: (scores[step], step),
            reverse=True,
        )

    def _prune(self) -> None:
        if self._keep is None:
            return
        steps = self.steps()
        kept = {*steps[-self._keep :], *self._ranked()[: self._keep_best]}
        for step in steps:
            if step not in kept:
                # Renamed first: a folder half removed must not pass for a checkpoint.
                doomed = self._path(step).with_suffix(".tmp")
                with suppress(FileNotFoundError):  # a score prunes beside a save of ranks
                    self._path(step).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _write_scores(self, scores: Mapping[int, float]) -> None:
        write_sealed(self.folder / "scores.json", {step: scores[step] for step in sorted(scores)})


def rng_state() -> dict[str, Any]:
    """Python's and numpy's generators; torch's is in the backend's state."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def export_checkpoint(run_dir: Path, step: int | Literal["latest", "best"], target: Path) -> Path:
    """Write the policy of a checkpoint as a Hugging Face directory, tokenizer included; it appears
    under its name when complete.

    Raises:
        CheckpointError: no such checkpoint, or `target` is there already.
    """
    from stepwell.backends.base import build_backend
    from stepwell.backends.config import TorchBackendConfig

    store = CheckpointStore(run_dir / "checkpoints")
    path = store.chosen(step)
    if target.exists():
        raise CheckpointError(f"{target} exists; remove it, or export to another folder")
    about = store.about(path)
    model = Path(about["model_path"])
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{path} is of the model in {model}, which is gone; put it back: config and tokenizer "
            "are taken from there"
        )
    # Weights alone are read and written here: what computes with them need not be on this machine.
    here = {"device": "cpu", "ranks": 1, "context_parallel": 1, "reference_path": None}
    here |= {"attention": "eager", "rows": "merged"}
    config = TorchBackendConfig.model_validate({**about["backend_config"], **here})
    backend = build_backend(about["backend"], config, model)
    draft = target.parent / f".{target.name}.tmp"
    try:
        backend.load_state(path / BACKEND, store.load(path)["backend"], weights_only=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        backend.save_weights(draft)
        draft.rename(target)
    except (OSError, SafetensorError) as e:  # the latter of a full disk
        raise CheckpointError(f"{target} cannot be written ({e})") from e
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        backend.close()
    return target
