"""This module keeps what an optimizer step was trained on in a file, so that people can look at it
while the run goes on and after it.

    trainer ──write──► RUN/trained/000000000012.jsonl ──read──► dashboard, `stepwell view`
                       {"step": 12, "groups": 8, "rewards": {…}, …}          the step
                       {"trajectory_uid": …, "steps": [{…, "columns": {…}}]}  a trajectory each
                       each line with its `digest` (`datapool/sealed.py`)

A prompt is stored without the tokens of the step that it extends. Columns have one number for each
response token, with six decimals: `advantages`, `weights`, `mask`, `prox_log_probs`, …; their names
are the trainer's. Owns the format and the folder's bound. Does not own which trajectories are in it
(`trainer/samples.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import orjson

from stepwell.datapool.branches import parents
from stepwell.datapool.errors import ExportError
from stepwell.datapool.sealed import damaged, read_lines, sealed, write_durably
from stepwell.datapool.types import Step, Trajectory

if TYPE_CHECKING:
    from stepwell.datapool.inspect.pages import GroupRow

TRAINED: Final = "trained"
"""The folder's name in a run's folder."""
DECIMALS: Final = 6
LOOKED_BACK: Final = 64
"""Optimizer steps whose files are asked for the rewards of leased groups."""
Columns: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainedTrajectory:
    """A trajectory as it was trained on."""

    trajectory: Trajectory
    columns: tuple[Columns, ...]
    """Columns of each of its steps: name to one number per response token; NaN where there is
    none."""
    user: str | None = None
    """The user that it is of (`user_of`), by whom it is deleted."""

    def mean(self, name: str) -> float | None:
        """Return the mean of a column over the tokens that have a number; None if none has."""
        values = [np.asarray(c[name], np.float64) for c in self.columns if name in c]
        joined = np.concatenate(values) if values else np.empty(0)
        finite = joined[np.isfinite(joined)]
        return float(finite.mean()) if len(finite) else None


def trained_path(folder: Path, step: int) -> Path:
    """The file of optimizer step `step` in the run's folder."""
    return folder / TRAINED / f"{step:012d}.jsonl"


def trained_steps(folder: Path) -> list[int]:
    """The optimizer steps that have a file in the run's folder, in order."""
    files = (folder / TRAINED).glob("*.jsonl")
    return sorted(int(path.stem) for path in files if path.stem.isdecimal())


def write_trained(
    folder: Path, step: int, about: Mapping[str, Any], of: Iterable[TrainedTrajectory], most: int
) -> None:
    """Write the file of an optimizer step, and remove the oldest ones of more than `most` bytes.

    Raises:
        OSError: it cannot be written.
        TypeError: metadata hold what JSON cannot, as an integer of more than 64 bits.
    """
    trajectories = list(of)
    head = {"step": step, **about, "trajectories": [_head(each) for each in trajectories]}
    said = (head, *map(_line, trajectories))
    lines = [sealed(orjson.dumps(o, default=_plain, option=orjson.OPT_NON_STR_KEYS)) for o in said]
    path = trained_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, b"".join(lines))
    with os.scandir(path.parent) as entries:  # once a step, and there may be ten thousand
        sizes = {e.name: e.stat().st_size for e in entries if e.name.endswith(path.suffix)}
    left = most
    for name in sorted(sizes, reverse=True):
        left -= sizes[name]
        if left < 0 and name != path.name:
            path.with_name(name).unlink()


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """Return the first line of an optimizer step's file: `step`, what else the trainer says of it,
    and a list of the trajectories.

    Raises:
        ExportError: there is no such file.
        DamagedFileError: it is damaged.
    """
    return next(_objects(trained_path(folder, step)))


def read_trained(folder: Path, step: int) -> tuple[TrainedTrajectory, ...]:
    """The trajectories in the file of an optimizer step. Raises as `read_about`."""
    path = trained_path(folder, step)
    about, *lines = _objects(path)
    if len(lines) != len(about["trajectories"]):
        raise damaged(path, "lines are missing", _REMEDY)
    return tuple(map(_trajectory, lines))


def with_rewards(folder: Path, rows: Sequence[GroupRow]) -> list[GroupRow]:
    """Return `rows` with the rewards that the trainer gave itself: the pool hears of none of a
    leased group. Looks into the files of the last `LOOKED_BACK` optimizer steps.

    Raises:
        DamagedFileError: one is damaged.
    """
    wanted = {row.prompt_uid for row in rows if row.state == "leased" and row.reward_mean is None}
    found: dict[str, list[float]] = {}
    for step in reversed(trained_steps(folder)[-LOOKED_BACK:] if wanted else []):
        try:
            rewards = read_about(folder, step).get("rewards", {})
        except ExportError:  # removed meanwhile
            continue
        found |= {uid: rewards[uid] for uid in wanted & rewards.keys() if rewards[uid]}
        wanted -= found.keys()
        if not wanted:
            break
    return [
        replace(row, reward_mean=float(np.mean(own)), reward_std=_spread(own))
        if (own := found.get(row.prompt_uid))
        else row
        for row in rows
    ]


def _spread(rewards: Sequence[float]) -> float | None:
    """Population standard deviation, as the pool takes it; None of fewer than two."""
    return float(np.std(rewards)) if len(rewards) > 1 else None


_REMEDY = "delete it: it is for people alone"


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, the first one in any case."""
    found = 0
    try:
        for at, line in read_lines(path):
            if line is None:
                raise damaged(path, f"the line at byte {at} is not what was written", _REMEDY)
            found += 1
            yield orjson.loads(line)
    except OSError as e:
        raise ExportError(
            f"{path} cannot be read ({e}); the trainer keeps the newest files only "
            "(trainer.sample_mb), and none where trainer.sample_groups is 0"
        ) from e
    if not found:
        raise damaged(path, "it is empty", _REMEDY)


# -- lines -------------------------------------------------------------------------------------


def _head(trained: TrainedTrajectory) -> dict[str, Any]:
    trajectory = trained.trajectory
    return {
        "trajectory_uid": trajectory.trajectory_uid,
        "prompt_uid": trajectory.prompt_uid,
        "reward": trajectory.reward,
        "n_steps": len(trajectory.steps),
        "n_tokens": sum(len(step.response_ids) for step in trajectory.steps),
        "oldest_version": min((step.policy_version for step in trajectory.steps), default=None),
        "newest_version": max((step.policy_version for step in trajectory.steps), default=None),
        "advantage": trained.mean("advantages"),
        "weight": trained.mean("weights"),
    }


def _line(trained: TrainedTrajectory) -> dict[str, Any]:
    trajectory = trained.trajectory
    # Each after the one that it extends, which is shorter.
    pairs = zip(trajectory.steps, trained.columns, strict=True)
    in_order = sorted(pairs, key=lambda each: each[0].n_tokens)
    of = parents([step for step, _ in in_order])
    steps = []
    for (step, columns), parent in zip(in_order, of, strict=True):
        known = 0 if parent is None else in_order[parent][0].n_tokens
        values = step.to_dict() | {"prompt_ids": step.prompt_ids[known:].tolist()}
        if step.pictures:
            values["pictures"] = [p._asdict() for p in step.pictures if p.at >= known]
        rounded = {name: _rounded(column) for name, column in columns.items()}
        steps.append(values | {"extends": parent, "columns": rounded})
    return {
        "trajectory_uid": trajectory.trajectory_uid,
        "prompt_uid": trajectory.prompt_uid,
        "user": trained.user,
        "metadata": trajectory.metadata,
        "attempt": trajectory.attempt,
        "steps": steps,
    }


def _rounded(column: Any) -> list[float]:
    """NaN and infinity are null in JSON."""
    rounded: list[float] = np.round(np.asarray(column, np.float64), DECIMALS).tolist()
    return rounded


def _trajectory(line: dict[str, Any]) -> TrainedTrajectory:
    found: list[tuple[Step, Columns]] = []
    for values in line.pop("steps"):
        if (parent := values.pop("extends")) is not None:
            own = np.asarray(values["prompt_ids"], np.int32)
            before = found[parent][0]
            values["prompt_ids"] = np.concatenate([before.token_ids, own])
            known = [picture._asdict() for picture in before.pictures]
            values["pictures"] = [*known, *values.get("pictures", ())]
        read = {n: np.asarray(c, np.float32) for n, c in values.pop("columns").items()}
        found.append((Step.from_dict(values), read))
    found.sort(key=lambda each: each[0].step_index)
    steps = tuple(step for step, _ in found)
    user = line.pop("user", None)
    columns = tuple(each for _, each in found)
    return TrainedTrajectory(Trajectory(**line, steps=steps), columns, user)


def _plain(value: Any) -> Any:
    """Convert a metadata value for which JSON has no word: NumPy's and sets to JSON's, others to
    text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else repr(value)
