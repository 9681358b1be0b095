"""The files of debug rollout data: every batch as it came to the advantages, and training on them.

    trainer.save_debug_rollout_data=DIR     DIR/{rollout_id}.pt, or a file name with {rollout_id};
                                            one that ends in .slime.pt is of slime's form
                                            DIR/pictures/{digest}.png, each once for all batches

`rollout_id` is the number of optimizer steps before the batch: a batch that a resumed run does
again replaces the one that was lost. In slime's form it is the number of the batch.

A replay gives the updater what the recorded run gave it, with the versions and counters of then, so
on the CPU its losses are equal bit for bit; files of slime's form (`slime/debug_data.py`), slime's
own too, are trained from where the model stands. It publishes nothing and leaves no checkpoint.
Does not own the mathematics (`updater.py`).
"""

from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepwell.backends.base import NO_PICTURES
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.copies import FIELD, PICTURES, TrainerCopies
from stepwell.datapool.sealed import damaged, sealed, unsealed, write_durably
from stepwell.datapool.types import Group
from stepwell.trainer.config import SLIME_FORM
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.slime import debug_data
from stepwell.trainer.slime.debug_data import SlimeForm
from stepwell.trainer.slime.samples import WholeSamples
from stepwell.trainer.updater import Updater, record_of

log = logging.getLogger(__name__)

FORMAT = 4
"""Raised with every change that a recording of before would not survive; that one is refused."""


class Recording(NamedTuple):
    """One batch, as it came to the advantages."""

    groups: tuple[Group, ...]
    """Scored and filtered, in order."""
    progress: Progress
    """Before the batch."""
    pictures: Mapping[str, bytes] = NO_PICTURES
    """PNG by digest, of those that the steps name."""


def recording_path(where: str, rollout_id: int | str) -> Path:
    """The file of a batch: `where` with {rollout_id} filled in, or a folder."""
    template = where if FIELD in where else str(Path(where) / f"{FIELD}.pt")
    return Path(template.replace(FIELD, str(rollout_id)))


class Recorder:
    """Records the batches of a run.

    Args:
        where: `trainer.save_debug_rollout_data`.
        tokenizer_path: makes the texts of slime's form.
        updates_per_batch: optimizer steps that a batch is trained by.
        copies: of the run. A batch of which something is deleted is not recorded.

    Raises:
        CheckpointError: the run's folder cannot be written.
    """

    def __init__(
        self, where: str, tokenizer_path: Path, updates_per_batch: int, copies: TrainerCopies
    ) -> None:
        self._where = where
        self._copies = copies
        try:
            copies.note_recordings(recording_path(where, FIELD))
        except (OSError, DamagedFileError) as e:
            raise CheckpointError(f"trainer.save_debug_rollout_data is {where!r}: {e}") from e
        self._whole = WholeSamples(tokenizer_path)
        self._updates_per_batch = updates_per_batch

    def write(
        self,
        groups: Sequence[Group],
        progress: Progress,
        pictures: Mapping[str, bytes] = NO_PICTURES,
    ) -> None:
        """Write the batch that is about to be trained.

        Args:
            pictures: PNG by digest, of those that the steps name.

        Raises:
            CheckpointError: the file cannot be written.
            BatchError: slime's form cannot hold it.
        """
        try:
            with self._copies.writing() as deleted:
                self._write(groups, progress, pictures, deleted)
        except (OSError, DamagedFileError) as e:
            raise CheckpointError(f"trainer.save_debug_rollout_data is {self._where!r}: {e}") from e

    def _write(
        self,
        groups: Sequence[Group],
        progress: Progress,
        pictures: Mapping[str, bytes],
        deleted: Collection[str],
    ) -> None:
        uids = {t.trajectory_uid for group in groups for t in group.trajectories}
        if n := len(uids.intersection(deleted)):
            step = progress.updates + 1
            log.warning(
                "the batch of optimizer step %d is not recorded: %d of it are deleted", step, n
            )
            return
        if not self._where.endswith(SLIME_FORM):
            record_batch(self._where, groups, progress, pictures)
            return
        rollout_id = progress.updates // self._updates_per_batch
        content = debug_data.dump(groups, rollout_id, self._whole)
        _write(self._where, recording_path(self._where, rollout_id), content)


def record_batch(
    where: str,
    groups: Sequence[Group],
    progress: Progress,
    pictures: Mapping[str, bytes] = NO_PICTURES,
) -> None:
    """Write the batch that is about to be trained: first its pictures that no batch had before.

    Raises:
        CheckpointError: a file cannot be written.
    """
    path = recording_path(where, progress.updates)
    for digest, png in pictures.items():
        file = _picture_path(path, digest)
        if not file.exists():
            _write(where, file, sealed(png))
    batch = io.BytesIO()
    torch.save({"format": FORMAT, "groups": tuple(groups), "progress": progress}, batch)
    _write(where, path, sealed(batch.getvalue()))


def _picture_path(recording: Path, digest: str) -> Path:
    """The file of a picture: a PNG, with a digest of its bytes behind it."""
    return recording.parent / PICTURES / f"{digest}.png"


def _write(where: str, path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
    except OSError as e:
        raise CheckpointError(
            f"trainer.save_debug_rollout_data is {where!r}, and {path} cannot be written ({e})"
        ) from e


def recordings(where: str, updates_per_rollout: int = 1) -> list[tuple[int, Path]]:
    """(optimizer steps before it, file) of what was recorded there, in the order of training.

    Args:
        updates_per_rollout: optimizer steps on a file of slime's form, which says its own number.

    Raises:
        CheckpointError: there is nothing.
    """
    template = recording_path(where, FIELD)
    name = re.compile(re.escape(template.name).replace(re.escape(FIELD), r"(\d+)"))
    found = [(int(m[1]), p) for p in template.parent.glob("*") if (m := name.fullmatch(p.name))]
    if not found:
        raise CheckpointError(
            f"trainer.load_debug_rollout_data is {where!r}, where no batch is recorded; name what "
            "trainer.save_debug_rollout_data named in the recorded run"
        )
    return sorted(
        (number * updates_per_rollout if debug_data.is_slimes(path) else number, path)
        for number, path in found
    )


def load_recording(path: Path) -> Recording:
    """A batch of ours, with its pictures.

    Raises:
        CheckpointError: it cannot be read, another release wrote it, or a picture is missing.
        DamagedFileError: it, or a picture, is not what was written.
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
    groups: tuple[Group, ...] = raw["groups"]
    digests = {p.digest for group in groups for step in group.steps for p in step.pictures}
    pictures = {digest: _read_picture(path, digest) for digest in sorted(digests)}
    return Recording(groups, raw["progress"], pictures)


def _read_picture(recording: Path, digest: str) -> bytes:
    path = _picture_path(recording, digest)
    try:
        return unsealed(path.read_bytes())
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{recording} has a picture that is not in {path}; copy the folder {path.parent} with "
            "the recording, or record the run again"
        ) from e
    except ValueError as e:
        raise damaged(path, str(e), "record the run again") from e


def replay(
    updater: Updater,
    batches: Sequence[tuple[int, Path]],
    updates_per_sync: int,
    form: SlimeForm | None = None,
) -> Iterator[dict[str, Any]]:
    """Train on the recorded batches; yields the metrics of each optimizer step.

    Args:
        updates_per_sync: optimizer steps between two publications of the recorded run.
        form: of the run that files of slime's form are of; None: its defaults.

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
        if debug_data.is_slimes(path):
            recording = Recording(
                tuple(debug_data.load(path, form or SlimeForm(), progress)), progress
            )
        else:
            recording = load_recording(path)
            progress.become(recording.progress)
        groups = recording.groups
        mark = time.monotonic()
        with phases("prepare"):
            prepared = updater.prepare(groups, recording.pictures)
        for steps, trained_on, _ in prepared.mini_batches:
            with phases("train"):
                update = updater.step(prepared, steps)
            if progress.updates % updates_per_sync == 0:  # the table moves as it did
                progress.version += 1
                progress.published[progress.version] = progress.updates
            times = phases.take(time.monotonic() - mark)
            progress.train_s += times["time/step_s"]
            record = record_of(progress, trained_on, times, groups)
            yield {**record, **prepared.metrics, **update, **times}
            mark = time.monotonic()
