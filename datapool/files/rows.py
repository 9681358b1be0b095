"""A trajectory as rows of columns, and back exactly.

One row per *branch* (`branches.py`) of the tree that its steps form::

    steps        s0: P0 R0            s1: P0 R0 U1 R1         s2: P0 R0 U2 R2
    input_ids                         P0 R0 U1 R1             P0 R0 U2 R2
    loss_mask                         .. ## .. ##             .. .. .. ##      R0 is trained once
    log_probs    0 elsewhere             ## .. ##                ## .. ##      also where masked
    versions     -1 elsewhere            ## .. ##                ## .. ##

A step that is on several branches is trained in the first one, in order of the leaves'
`step_index`; so the sum of `loss_mask` over a trajectory is its number of response tokens.
`loss_mask` does not look at `state`: whoever trains on the rows filters out `open` ones if need be.

Unknown is null, never 0: `log_probs` is null as a whole unless all responses of the row have
theirs, so 0 stands only where nothing was sampled; if some have, they are in `steps[].log_probs`.
No list has nulls among its numbers: Arrow's JSON reader loses those at its head
(apache/arrow#51305), and a tensor has no place for them either. What has no fixed type is text
(`plain.py`).

Rows carry the table of their steps with everything a Step has; columns that follow from it are
compared with it on reading, so that an edit which would be lost is an error instead.

Owns the row form. Does not own the file (`export.py`), nor its types (`export.schema`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import branches
from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.plain import check_int, check_text, dumps, from_npy, loads, npy
from stepwell.datapool.types import MAX_REWARD, TRAIN, Step, Trajectory, VersionSpan, is_reward

SCHEMA_VERSION = 1
"""Raised when a reader of the version before would misread the rows."""

MAX_MOVED = 16
"""Rows that a writer may have moved to the front (`export.py`)."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a file comes from."""

    stepwell_version: str
    schema_version: int
    exported_at: float
    """Unix time, seconds."""
    source: str
    """What the writer called itself, for instance the pool and the query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTrajectory:
    """A trajectory in a file: written by `write`, given back by `read`."""

    trajectory: Trajectory
    channel: str = TRAIN
    state: str = "complete"
    """`complete`; `open` (its steps so far); or `aborted`, which has no steps, hence no row."""
    reason: str | None = None
    """Why it was aborted."""
    group_state: str | None = None
    """`open`, `ready`, `held` or `leased` at that moment; None if it is not from a pool."""
    outcome: float | None = None
    """Outcome reward of an open trajectory, which no step has yet; that of a complete one is in
    the reward of its last step."""
    n_rollouts: int | None = None
    """What its group was declared with; None if it was not."""
    marks: dict[str, Any] | None = None
    """Curation marks (`selection.Marks.as_dict`); None: nobody has marked it."""
    group_metadata: dict[str, Any] = field(default_factory=dict)
    group_marks: dict[str, Any] | None = None
    provenance: Provenance | None = field(default=None, compare=False)
    """Of the file it was read from; `write` ignores it and states its own."""


TOKEN_COLUMNS = ("input_ids", "loss_mask", "log_probs", "versions")
_TRAJECTORY_COLUMNS = (
    *("channel", "prompt_uid", "trajectory_uid", "attempt", "position", "n_branches", "reward"),
    *("state", "reason", "group_state", "outcome", "n_rollouts", "metadata", "marks"),
    *("group_metadata", "group_marks", "provenance"),
)
COLUMNS = (*_TRAJECTORY_COLUMNS, "branch", "steps", *TOKEN_COLUMNS)


@dataclass(slots=True)
class RowCount:
    n_trajectories: int = 0
    n_without_steps: int = 0
    n_rows: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    n_trained_tokens: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """One row: its token columns, shape [L] each, and the other columns by name."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    log_probs: npt.NDArray[np.float32] | None
    versions: npt.NDArray[np.int64]
    fields: dict[str, Any]
    where: str = ""
    """File and row, for messages."""

    @property
    def key(self) -> tuple[int, int]:
        return self.fields["position"], self.fields["branch"]

    @property
    def n_bytes(self) -> int:
        tokens = 17 * len(self.input_ids)
        texts = (v for s in self.fields["steps"] for v in s.values() if isinstance(v, str))
        return int(tokens + sum(map(len, texts)))


def to_rows(
    trajectories: Iterable[ExportedTrajectory], provenance: Provenance, count: RowCount
) -> Iterator[Row]:
    stated = asdict(provenance)
    for exported in trajectories:
        steps = exported.trajectory.steps
        if not steps:
            count.n_without_steps += 1
            continue
        fields = _trajectory_fields(exported, count.n_trajectories, stated)
        table = [_step_fields(step) for step in steps]
        paths = branches(steps)
        count.n_trajectories += 1
        count.n_steps += len(steps)
        done: set[int] = set()
        for number, path in enumerate(paths):
            trained = [i not in done for i in path]
            done.update(path)
            row = _build_row(
                [steps[i] for i in path],
                trained,
                [table[i] for i in path],
                {**fields, "branch": number, "n_branches": len(paths)},
            )
            count.n_rows += 1
            count.n_tokens += len(row.input_ids)
            count.n_trained_tokens += int(row.loss_mask.sum())
            yield row


def _build_row(
    path: list[Step], trained: list[bool], table: list[dict[str, Any]], fields: dict[str, Any]
) -> Row:
    entries: list[dict[str, Any]] = []
    end = 0
    for step, is_trained, stored in zip(path, trained, table, strict=True):
        starts = {"prompt_start": end, "response_start": len(step.prompt_ids)}
        end = step.n_tokens
        entries.append({**stored, **starts, "response_end": end, "trained": is_trained})
    input_ids = np.concatenate([path[-1].prompt_ids, path[-1].response_ids])
    mask, log_probs, versions = _response_columns(path, trained)
    for step, entry in zip(path, entries, strict=True):
        known = step.rollout_log_probs if log_probs is None else None
        entry["log_probs"] = None if known is None else known.tolist()
    return Row(input_ids, mask, log_probs, versions, fields | {"steps": entries})


def _response_columns(
    path: Sequence[Step], trained: Sequence[bool]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32] | None, npt.NDArray[np.int64]]:
    """`loss_mask`, `log_probs` and `versions` of a branch."""
    n = path[-1].n_tokens
    mask = np.zeros(n, np.int8)
    known = all(step.rollout_log_probs is not None for step in path)
    log_probs = np.zeros(n, np.float32) if known else None
    versions = np.full(n, -1, np.int64)
    for step, is_trained in zip(path, trained, strict=True):
        start, end = len(step.prompt_ids), step.n_tokens
        mask[start:end] = is_trained
        if log_probs is not None and step.rollout_log_probs is not None:
            log_probs[start:end] = step.rollout_log_probs
        versions[start:end] = step.policy_version
        for span in step.version_spans:
            versions[start + span.start : start + span.end] = span.version
    return mask, log_probs, versions


def _trajectory_fields(
    exported: ExportedTrajectory, position: int, provenance: dict[str, Any]
) -> dict[str, Any]:
    trajectory = exported.trajectory
    owner = f"trajectory {trajectory.trajectory_uid!r}"
    indices = [step.step_index for step in trajectory.steps]
    if indices != sorted(set(indices)):
        raise ExportError(f"{owner}: step_index runs {indices}; pass each step once, by step_index")
    for step in trajectory.steps:
        for name in ("trajectory_uid", "prompt_uid"):
            if getattr(step, name) != getattr(trajectory, name):
                raise ExportError(
                    f"{owner}: its step {step.step_index} has {name} {getattr(step, name)!r}, the "
                    f"trajectory {getattr(trajectory, name)!r}; a trajectory holds its own steps"
                )
    fields: dict[str, Any] = {
        "channel": exported.channel,
        "prompt_uid": trajectory.prompt_uid,
        "trajectory_uid": trajectory.trajectory_uid,
        "attempt": trajectory.attempt,
        "position": position,
        "reward": trajectory.reward,
        "state": exported.state,
        "reason": exported.reason,
        "group_state": exported.group_state,
        "outcome": exported.outcome,
        "n_rollouts": exported.n_rollouts,
    }
    for name in ("channel", "prompt_uid", "trajectory_uid", "state", "reason", "group_state"):
        check_text(fields[name], f"{owner}: {name}")
    for name in ("attempt", "n_rollouts"):
        check_int(fields[name], f"{owner}: {name}")
    if exported.outcome is not None and not is_reward(exported.outcome):
        raise ExportError(
            f"{owner}: outcome is {exported.outcome}; pass a number within ±{MAX_REWARD:g} or None"
        )
    for name in ("marks", "group_marks"):
        marks = getattr(exported, name)
        fields[name] = None if marks is None else dumps(marks, f"{owner}: {name}")
    return fields | {
        "metadata": dumps(trajectory.metadata, f"{owner}: metadata"),
        "group_metadata": dumps(exported.group_metadata, f"{owner}: group_metadata"),
        "provenance": provenance,
    }


def _step_fields(step: Step) -> dict[str, Any]:
    """The entry of `steps` for `step`, without what depends on the row."""
    owner = f"step {step.trajectory_uid!r}[{step.step_index}]"
    images, experts = step.multi_modal_data, step.routed_experts
    fields: dict[str, Any] = {
        "step_index": step.step_index,
        "parent_index": step.parent_index,
        "policy_version": step.policy_version,
        "version_spans": [asdict(span) for span in step.version_spans],
        "finish_reason": step.finish_reason,
        "reward": step.reward,
        "is_last": bool(step.is_last),
        "metadata": dumps(step.metadata, f"{owner}: metadata"),
        "multi_modal_data": None if images is None else dumps(images, f"{owner}: multi_modal_data"),
        "routed_experts": None if experts is None else npy(experts, f"{owner}: routed_experts"),
    }
    return fields


def check_columns(names: Iterable[str], where: str) -> None:
    missing = sorted(set(COLUMNS) - set(names))
    if missing and "provenance" in missing:
        raise ExportError(
            f"{where} was not exported by Stepwell: no column {', '.join(missing)}; pass a file "
            "that `export` wrote"
        )
    if missing:
        raise ExportError(
            f"{where} lacks column {', '.join(missing)}; keep all columns, or export again"
        )


def parse_row(columns: Mapping[str, Any], fields: dict[str, Any], where: str) -> Row:
    """A row as it was written, its schema checked first: another may have other columns."""
    try:
        written = fields["provenance"]["schema_version"]
        if written != SCHEMA_VERSION:
            raise ExportError(
                f"{where}: schema_version is {written}, this release reads {SCHEMA_VERSION} only; "
                f"use Stepwell {fields['provenance']['stepwell_version']}, which wrote it"
            )
        for name in ("position", "branch"):
            if not isinstance(fields[name], int):
                raise TypeError(f"{name} is {fields[name]!r}, no integer")
        ids = _integers(columns["input_ids"], np.int32, "input_ids")
        ids.flags.writeable = False  # so that steps are views of it
        return Row(
            ids,
            _integers(columns["loss_mask"], np.int8, "loss_mask"),
            _floats(columns["log_probs"]),
            _integers(columns["versions"], np.int64, "versions"),
            fields,
            where,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise _malformed(where, e) from e


def _integers(values: Any, dtype: type[np.signedinteger[Any]], name: str) -> npt.NDArray[Any]:
    raw = np.asarray(values)
    if raw.dtype.kind != "i" or raw.ndim != 1:
        raise TypeError(f"{name} holds {raw.dtype} values of shape {raw.shape}, not integers")
    limits = np.iinfo(dtype)
    if raw.min() < limits.min or raw.max() > limits.max:
        raise ValueError(f"{name} spans [{raw.min()}, {raw.max()}]")
    return raw.astype(dtype)


def _floats(values: Any) -> npt.NDArray[np.float32] | None:
    if values is None:
        return None
    raw = np.asarray(values)
    if raw.dtype.kind not in "if" or raw.ndim != 1:
        raise TypeError(f"log_probs holds {raw.dtype} values of shape {raw.shape}, not numbers")
    return raw.astype(np.float32)


def _malformed(where: str, error: Exception) -> ExportError:
    if isinstance(error, ExportError):
        return error
    what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
    return ExportError(f"{where} is malformed: {what}; export it again")


def assemble(path: Path, rows: Iterator[Row]) -> Iterator[ExportedTrajectory]:
    for _, found in groupby(_in_order(path, rows), key=lambda row: row.key[0]):
        group = list(found)
        try:
            trajectory = _trajectory(group)
        except (KeyError, TypeError, ValueError) as e:
            raise _malformed(group[0].where, e) from e
        yield trajectory


def _in_order(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """By position and branch: rows that `_write_jsonl` moved to the front, in descending order,
    go back to their places; the others are in order."""
    moved: list[Row] = []
    ordered = rows
    for row in rows:
        if moved and (row.key >= moved[-1].key or len(moved) > MAX_MOVED):
            ordered = chain([moved.pop(), row], rows)
            break
        moved.append(row)
    last = (-1, -1)
    for row in heapq.merge(reversed(moved), ordered, key=attrgetter("key")):
        if row.key <= last:
            raise ExportError(
                f"{row.where}: position and branch are {row.key} after {last}; keep the rows in "
                "order (sort by position, branch) and each export in a file of its own"
            )
        last = row.key
        yield row


def _trajectory(rows: list[Row]) -> ExportedTrajectory:
    head = {name: rows[0].fields[name] for name in _TRAJECTORY_COLUMNS}
    steps: dict[int, Step] = {}
    trained: set[int] = set()
    for row in rows:
        differing = [name for name, value in head.items() if row.fields[name] != value]
        if differing:
            raise ExportError(f"{row.where}: {differing[0]} is not that of {rows[0].where}")
        for step, is_trained in _read_steps(row):
            index = step.step_index
            known = steps.setdefault(index, step)
            if known is not step and known != step:
                raise ExportError(f"{row.where}: step {index} is not that of the rows before it")
            if is_trained and index in trained:
                raise ExportError(f"{row.where}: step {index} is in loss_mask of two rows")
            trained |= {index} if is_trained else set()
    if len(rows) != head["n_branches"] or trained != steps.keys():
        raise ExportError(
            f"{rows[0].where}: {len(rows)} of the {head['n_branches']} rows of trajectory "
            f"{head['trajectory_uid']!r} are here; the file was cut off or filtered by rows: "
            "keep all rows of a trajectory or none"
        )
    trajectory = Trajectory(
        trajectory_uid=head["trajectory_uid"],
        prompt_uid=head["prompt_uid"],
        steps=tuple(steps[index] for index in sorted(steps)),
        metadata=loads(head["metadata"]),
        attempt=head["attempt"],
    )
    if trajectory.reward != head["reward"]:
        raise ExportError(
            f"{rows[0].where}: reward is {head['reward']}, its steps' rewards add up to "
            f"{trajectory.reward}; edit steps[].reward and reward alike"
        )
    return ExportedTrajectory(
        trajectory=trajectory,
        channel=head["channel"],
        state=head["state"],
        reason=head["reason"],
        group_state=head["group_state"],
        outcome=head["outcome"],
        n_rollouts=head["n_rollouts"],
        marks=None if head["marks"] is None else loads(head["marks"]),
        group_metadata=loads(head["group_metadata"]),
        group_marks=None if head["group_marks"] is None else loads(head["group_marks"]),
        provenance=Provenance(**head["provenance"]),
    )


def _read_steps(row: Row) -> list[tuple[Step, bool]]:
    """The steps of a branch, root to leaf, and whether they are trained here."""
    table = row.fields["steps"]
    path = [_read_step(row, entry) for entry in table]
    trained = [entry["trained"] for entry in table]
    if not path or path[-1].n_tokens != len(row.input_ids):
        raise ExportError(
            f"{row.where}: the last of its {len(path)} steps does not end where input_ids "
            f"({len(row.input_ids)} tokens) ends"
        )
    columns = _response_columns(path, trained)
    for name, expected in zip(TOKEN_COLUMNS[1:], columns, strict=True):
        found = getattr(row, name)
        same = found is None if expected is None else np.array_equal(found, expected)
        if not same:
            raise ExportError(
                f"{row.where}: {name} is not what its steps say; undo the edit, for which a Step "
                "has no place"
            )
    return list(zip(path, trained, strict=True))


def _read_step(row: Row, entry: Mapping[str, Any]) -> Step:
    start, end = entry["response_start"], entry["response_end"]
    if not 0 < start < end <= len(row.input_ids):
        raise ExportError(
            f"{row.where}: step {entry['step_index']} has its response at [{start}, {end}) of "
            f"{len(row.input_ids)} tokens"
        )
    own = _floats(entry["log_probs"])
    log_probs = own if row.log_probs is None else row.log_probs[start:end]
    images, experts = entry["multi_modal_data"], entry["routed_experts"]
    return Step(
        prompt_ids=row.input_ids[:start],
        response_ids=row.input_ids[start:end],
        reward=entry["reward"],
        trajectory_uid=row.fields["trajectory_uid"],
        prompt_uid=row.fields["prompt_uid"],
        step_index=entry["step_index"],
        policy_version=entry["policy_version"],
        is_last=entry["is_last"],
        metadata=loads(entry["metadata"]),
        rollout_log_probs=log_probs,
        finish_reason=entry["finish_reason"],
        parent_index=entry["parent_index"],
        version_spans=tuple(VersionSpan(**span) for span in entry["version_spans"]),
        multi_modal_data=None if images is None else loads(images),
        routed_experts=None if experts is None else from_npy(experts),
    )
