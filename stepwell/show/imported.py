"""This module imports what a run without an archive left behind, so that one reader shows old runs
and new ones.

    RUN/trained/*.jsonl      with tokens, exactly                ──► archive/trajectories/
    RUN/rollouts*.jsonl      as text, of what `trained/` lacks         0-imported-….parquet

A trajectory that the archive has already is left out, so an import that is repeated changes
nothing. Text of `rollouts.jsonl` is decoded tokens, as the trainer wrote it: of these trajectories
there is nothing to train on. Owns neither file: `datapool/files/trained.py`, `trainer/samples.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from stepwell.datapool.branches import parents
from stepwell.datapool.codec import Base, pack
from stepwell.datapool.files.archive.archiver import Archive, open_sound
from stepwell.datapool.files.archive.conversations import Conversation, TimedStep
from stepwell.datapool.files.archive.folder import IMPORTED
from stepwell.datapool.files.archive.launch import Settings
from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.files.copies import OLD, ROLLOUTS
from stepwell.datapool.files.trained import read_trained, trained_path, trained_steps
from stepwell.datapool.types import TRAIN, UNKNOWN, Step, Trajectory, without_tokens
from stepwell.run.folder import archive_folder
from stepwell.trainer.errors import ConfigError

BATCH: Final = 500
"""Trajectories of one file."""


class Imported(NamedTuple):
    """Counts of an import, in trajectories."""

    with_tokens: int
    as_text: int
    known: int
    """Trajectories that were in the archive already."""


def import_run(folder: Path) -> Imported:
    """Import what the run in `folder` left in `trained/` and `rollouts.jsonl`.

    Raises:
        ConfigError: it left neither, or a line is none.
        DamagedFileError: a file of `trained/` is damaged.
        NoSpaceError: the disk is nearly full.
    """
    rollouts = [folder / name for name in (OLD, ROLLOUTS) if (folder / name).is_file()]
    if not rollouts and not trained_steps(folder):
        raise ConfigError(
            f"{folder} has neither {ROLLOUTS} nor trained/, of which an import is made; name the "
            "folder of a run that trained"
        )
    settings = Settings(str(archive_folder(folder)), "", IMPORTED, 0, float("inf"), 1 << 62)
    archive = open_sound(settings)
    try:
        seen: set[str] = set()
        tokens = _write(archive, _trained(folder), seen)
        text = _write(archive, _rollouts(rollouts), seen)
    finally:
        archive.close()
    return Imported(tokens[0], text[0], tokens[1] + text[1])


def _write(archive: Archive, found: Iterator[Conversation], seen: set[str]) -> tuple[int, int]:
    """Write what is not there; how many that were, and how many were there before.

    Args:
        seen: uids of this import.
    """
    reader = ArchiveReader(archive.folder.path)
    n, known, batch = 0, 0, dict[str, Conversation]()

    def write() -> None:
        with archive.folder.locked(archive.settings.shard):
            first = archive.archived_through() + 1
            archive.write(first, first + len(batch) - 1, list(batch.values()))

    for each in found:
        uid = each.trajectory_uid
        if uid in seen and uid not in batch:
            continue
        if uid not in seen and reader.find_exact(uid):
            known += 1
        else:
            n += uid not in seen
            batch[uid] = each
        seen.add(uid)
        if len(batch) >= BATCH:
            write()
            batch.clear()
    if batch:
        write()
    return n, known


def _trained(folder: Path) -> Iterator[Conversation]:
    for step in trained_steps(folder):
        at = trained_path(folder, step).stat().st_mtime
        for each in read_trained(folder, step):
            yield _conversation(each.trajectory, each.user, at)


def _conversation(trajectory: Trajectory, user: str | None, at: float) -> Conversation:
    packed: list[TimedStep] = []
    steps = trajectory.steps
    for step, parent in zip(steps, parents(steps), strict=True):
        base = None
        if parent is not None:
            base = Base.of(steps[parent], packed[parent].packed.crc)
        packed.append(TimedStep(pack(step, base), at))
    return Conversation(
        TRAIN,
        trajectory.prompt_uid,
        trajectory.trajectory_uid,
        attempt=trajectory.attempt,
        state="complete",
        left="acked",
        steps=packed,
        metadata=trajectory.metadata,
        group_metadata={} if user is None else {"user": user},
        opened_at=at,
        closed_at=at,
        left_at=at,
    )


def _rollouts(paths: list[Path]) -> Iterator[Conversation]:
    """The lines of the files; of a trajectory that was trained twice the later one counts."""
    last: dict[str, tuple[int, int]] = {}
    for which, path in enumerate(paths):
        for number, row in _lines(path):
            last[row["trajectory_uid"]] = which, number
    for which, path in enumerate(paths):
        at = path.stat().st_mtime
        for number, row in _lines(path):
            if last[row["trajectory_uid"]] == (which, number):
                yield _told(row, at)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # a trainer was killed while it wrote it
            try:
                row = orjson.loads(line)
                row["trajectory_uid"], row["prompt"], row["response"]
            except (ValueError, LookupError, TypeError) as e:
                raise ConfigError(
                    f"{path}: line {number} is no rollout ({e!r:.80}); remove the line"
                ) from e
            yield number, row


def _told(row: Mapping[str, Any], at: float) -> Conversation:
    uid, prompt_uid = row["trajectory_uid"], row.get("prompt_uid") or row["trajectory_uid"]
    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["response"]},
    ]
    step = Step(
        prompt_ids=UNKNOWN,
        response_ids=UNKNOWN,
        trajectory_uid=uid,
        prompt_uid=prompt_uid,
        policy_version=row.get("version") or 0,
        reward=row.get("reward"),
        is_last=True,
        finish_reason=row.get("finish_reason"),
        metadata={"messages": messages},
    )
    about = ("answer", "step", "advantage", "reward_extra_info")
    task = {name: row.get(name) for name in ("data_source", "instance_id", "user")}
    return Conversation(
        TRAIN,
        prompt_uid,
        uid,
        state="complete",
        left="acked",
        steps=[TimedStep(pack(without_tokens(step)), at)],
        metadata={ROLLOUTS: {name: row[name] for name in about if row.get(name) is not None}},
        group_metadata={name: value for name, value in task.items() if value is not None},
        opened_at=at,
        closed_at=at,
        left_at=at,
    )
