"""This module turns a trajectory into rows of columns, and back exactly.

    ExportedTrajectory ──to_rows──► Row, Row, …  (one per branch) ──from_rows──► ExportedTrajectory

One row per *branch* (`datapool/branches.py`) of the tree that its steps form::

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

`Row` and `StepColumns` are the schema: their fields name and type the columns of both formats, and
msgspec checks values against them on the way in and out. A row carries the table of its steps with
everything a Step has. On reading, the rows are made again of the steps found and compared, so that
an edit which would be lost is an error instead.

Owns the row form. Does not own the file (`export.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, groupby, product
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import branches
from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.plain import check_text, dumps, from_npy, loads, npy
from stepwell.datapool.types import MAX_REWARD, TRAIN, Step, Trajectory, VersionSpan

SCHEMA_VERSION = 1
"""Raised when a reader of the version before would misread the rows."""

MAX_MOVED = 16
"""Rows that a writer may have moved to the front (`export.py`)."""

Int32: TypeAlias = Annotated[int, np.int32]
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Float32: TypeAlias = Annotated[float, np.float32]
Reward: TypeAlias = Annotated[float, msgspec.Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


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


# -- columns -----------------------------------------------------------------------------------


class StepColumns(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step in the table of its row. Fields that a `Step` has too are that field."""

    step_index: int
    parent_index: int | None
    """As stored; null: a root."""
    prompt_start: Int32
    """The prompt is `input_ids[:response_start]`; from here on it is new."""
    response_start: Int32
    response_end: Int32
    """The response is `input_ids[response_start:response_end]`."""
    trained: bool
    """Whether `loss_mask` is 1 there."""
    policy_version: int
    version_spans: tuple[VersionSpan, ...]
    """Relative to the response."""
    finish_reason: str | None
    reward: float | None
    log_probs: list[Float32] | None
    """Only if the row's `log_probs` are null, because other steps lack theirs."""
    is_last: bool
    metadata: str
    multi_modal_data: str | None
    routed_experts: str | None


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A row. Fields that a `Trajectory` or `ExportedTrajectory` has too are that field. Arrays have
    shape [L]."""

    channel: str
    prompt_uid: str
    trajectory_uid: str
    attempt: Int64
    position: int
    """Of the trajectory in the file, from 0."""
    branch: int
    """Of the row in the trajectory, from 0."""
    n_branches: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    log_probs: npt.NDArray[np.float32] | None
    versions: npt.NDArray[np.int64]
    reward: float | None
    """Of the trajectory: the sum over its steps, also those that are not in this row."""
    steps: Annotated[tuple[StepColumns, ...], msgspec.Meta(min_length=1)]
    """Root to leaf."""
    state: str
    reason: str | None
    group_state: str | None
    outcome: Reward | None
    n_rollouts: Int64 | None
    metadata: str
    marks: str | None
    group_metadata: str
    group_marks: str | None
    provenance: Provenance

    @property
    def key(self) -> tuple[int, int]:
        return self.position, self.branch


PlacedRow: TypeAlias = tuple[str, Row]
"""File and line or row, for messages; and what stands there."""

COLUMNS = Row.__struct_fields__
STEP_COLUMNS = StepColumns.__struct_fields__
TOKEN_COLUMNS = ("input_ids", "loss_mask", "log_probs", "versions")

_JSON = ("metadata", "multi_modal_data", "marks", "group_metadata", "group_marks")
_FORMS = dict.fromkeys(_JSON, (dumps, loads)) | {"routed_experts": (npy, from_npy)}
"""Columns of text for values of no fixed type: how it is written, and read."""


@cache
def _common(target: type, source: type[Any]) -> list[tuple[str, Any]]:
    """Fields that both have, each with its form if it is text."""
    return [(name, _FORMS.get(name)) for name in target.__annotations__ if hasattr(source, name)]


def _columns_of(source: Any, columns: type, owner: str) -> dict[str, Any]:
    """The fields of `source` that are columns, as they stand in the file."""
    values = {}
    for name, form in _common(columns, source.__class__):
        value = getattr(source, name)
        values[name] = (
            value if form is None or value is None else form[0](value, f"{owner}: {name}")
        )
    return values


def _fields_of(columns: Any, target: type) -> dict[str, Any]:
    """The columns that are fields of `target`, as `_columns_of` was given them."""
    values = {}
    for name, form in _common(target, columns.__class__):
        value = getattr(columns, name)
        values[name] = value if form is None or value is None else form[1](value)
    return values


@cache
def _number_type(column: Any) -> Any:
    """Of a column of type `NDArray[…]`."""
    return np.dtype(get_args(get_args(column)[1])[0])


def _array(column: Any, value: Any) -> npt.NDArray[Any]:
    """The numbers of a column as a read-only array of its type, so that steps are views of it."""
    array = raw = np.asarray(value)
    if raw.dtype != (dtype := _number_type(column)):
        array = raw.astype(dtype, casting="same_kind")
    if raw.ndim != 1 or (array is not raw and raw.dtype.kind == "i" and (array != raw).any()):
        raise ValueError(f"Expected a list of {array.dtype}, got {value!r:.80}")
    array.flags.writeable = False
    return array


# -- writing -----------------------------------------------------------------------------------


def to_rows(exported: ExportedTrajectory, position: int, provenance: Provenance) -> Iterator[Row]:
    """The branches of a trajectory, which is the `position`-th of the file.

    Raises:
        ExportError: it contradicts itself, or has a value that no row can carry.
    """
    trajectory, steps = exported.trajectory, exported.trajectory.steps
    owner = f"trajectory {trajectory.trajectory_uid!r}"
    _check_steps(trajectory, owner)
    head = _columns_of(trajectory, Row, owner) | _columns_of(exported, Row, owner)
    for name, value in head.items():
        if isinstance(value, str):
            check_text(value, f"{owner}: {name}")
        elif isinstance(value, np.generic):
            head[name] = value.item()
    table = [
        _columns_of(s, StepColumns, f"step {s.trajectory_uid!r}[{s.step_index}]") for s in steps
    ]
    paths = branches(steps)
    head |= {"position": position, "n_branches": len(paths), "provenance": provenance}
    done: set[int] = set()
    for branch, path in enumerate(paths):
        tokens, places = _along(steps, path, done)
        done.update(path)
        entries = [StepColumns(**table[i], **place) for i, place in zip(path, places, strict=True)]
        row = head | tokens | {"branch": branch, "steps": entries}
        try:
            yield msgspec.convert(row, Row, dec_hook=_array)
        except msgspec.ValidationError as e:
            name = str(e).rpartition("$.")[2].rstrip("`")
            raise ExportError(f"{owner}: {name} is {row.get(name)!r:.120} ({e})") from e


def _check_steps(trajectory: Trajectory, owner: str) -> None:
    indices = [step.step_index for step in trajectory.steps]
    if indices != sorted(set(indices)):
        raise ExportError(f"{owner}: step_index runs {indices}; pass each step once, by step_index")
    for name, step in product(("trajectory_uid", "prompt_uid"), trajectory.steps):
        if getattr(step, name) != getattr(trajectory, name):
            raise ExportError(
                f"{owner}: its step {step.step_index} has {name} {getattr(step, name)!r}, the "
                f"trajectory {getattr(trajectory, name)!r}; a trajectory holds its own steps"
            )


def _along(
    steps: Sequence[Step], path: Sequence[int], done: Collection[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What follows from the steps of a branch: columns of its row, and of each of its steps."""
    leaf = steps[path[-1]]
    mask = np.zeros(leaf.n_tokens, np.int8)
    log_probs = np.zeros(leaf.n_tokens, np.float32)
    versions = np.full(leaf.n_tokens, -1, np.int64)
    is_known = all(steps[i].rollout_log_probs is not None for i in path)
    places: list[dict[str, Any]] = []
    end = 0
    for i in path:
        step, prompt_start, known = steps[i], end, steps[i].rollout_log_probs
        start, end = len(step.prompt_ids), step.n_tokens
        mask[start:end] = i not in done
        versions[start:end] = step.policy_version
        for span in step.version_spans:
            versions[start + span.start : start + span.end] = span.version
        if known is not None:
            log_probs[start:end] = known
        place = {"prompt_start": prompt_start, "response_start": start, "response_end": end}
        own = None if is_known or known is None else known.tolist()
        places.append({**place, "trained": i not in done, "log_probs": own})
    tokens = {
        "input_ids": np.concatenate([leaf.prompt_ids, leaf.response_ids]),
        "loss_mask": mask,
        "log_probs": log_probs if is_known else None,
        "versions": versions,
    }
    return tokens, places


# -- reading -----------------------------------------------------------------------------------


def parse_row(columns: Mapping[str, Any], where: str) -> PlacedRow:
    """A row as it was written.

    Raises:
        ExportError: another schema, a missing column, a value of another type.
    """
    check_columns(columns, where)
    with _named(where):
        written = columns["provenance"]["schema_version"]
        if written != SCHEMA_VERSION:  # first, because another may have other types
            raise ExportError(
                f"{where}: schema_version is {written}, this release reads {SCHEMA_VERSION} only; "
                f"use Stepwell {columns['provenance']['stepwell_version']}, which wrote it"
            )
        return where, msgspec.convert(columns, Row, dec_hook=_array)


def check_columns(names: Iterable[str], where: str) -> None:
    """Raises ExportError if one is missing."""
    if missing := sorted(set(COLUMNS).difference(names)):
        foreign = "was not exported by Stepwell: it " if "provenance" in missing else ""
        raise ExportError(
            f"{where} {foreign}lacks column {', '.join(missing)}; pass a file that `export` wrote, "
            "with all of its columns"
        )


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except (KeyError, TypeError, ValueError) as e:
        raise ExportError(f"{where} is malformed ({type(e).__name__}: {e}); export it again") from e


def from_rows(rows: Iterator[PlacedRow]) -> Iterator[ExportedTrajectory]:
    """The trajectories that `to_rows` was given.

    Raises:
        ExportError: rows out of order or missing, columns that contradict each other.
    """
    for _, placed in groupby(_in_order(rows), key=lambda placed: placed[1].position):
        branches_of_one = list(placed)
        with _named(branches_of_one[0][0]):
            exported = _trajectory(branches_of_one)
        yield exported


def _in_order(rows: Iterator[PlacedRow]) -> Iterator[PlacedRow]:
    """By position and branch: rows that the JSONL writer moved to the front, in descending order,
    go back to their places; the others are in order."""
    moved: list[PlacedRow] = []
    ordered = rows
    for placed in rows:
        if moved and (placed[1].key >= moved[-1][1].key or len(moved) > MAX_MOVED):
            ordered = chain([moved.pop(), placed], rows)
            break
        moved.append(placed)
    last = (-1, -1)
    for where, row in heapq.merge(reversed(moved), ordered, key=lambda placed: placed[1].key):
        if row.key <= last:
            raise ExportError(
                f"{where}: position and branch are {row.key} after {last}; keep the rows in "
                "order (sort by position, branch) and each export in a file of its own"
            )
        last = row.key
        yield where, row


def _trajectory(rows: list[PlacedRow]) -> ExportedTrajectory:
    beginning, head = rows[0]
    if len(rows) != head.n_branches:
        raise ExportError(
            f"{beginning}: {len(rows)} of the {head.n_branches} rows of trajectory "
            f"{head.trajectory_uid!r} are here; the file was cut off or filtered by rows: "
            "keep all rows of a trajectory or none"
        )
    found: dict[int, Step] = {}
    for where, row in rows:
        for step in (_step(row, entry) for entry in row.steps):
            known = found.setdefault(step.step_index, step)
            if known is not step and known != step:
                raise ExportError(
                    f"{where}: step {step.step_index} is not that of the rows before it"
                )
    steps = tuple(found[index] for index in sorted(found))
    trajectory = Trajectory(**_fields_of(head, Trajectory) | {"steps": steps})
    exported = ExportedTrajectory(trajectory=trajectory, **_fields_of(head, ExportedTrajectory))
    made_again = to_rows(exported, head.position, head.provenance)
    for (where, row), made in zip(rows, made_again, strict=False):  # n_branches tells
        # Text may be written another way, but is the same in all rows.
        wrong = [
            name
            for name in COLUMNS
            if name != "steps" and not _same(row, head if name in _FORMS else made, name)
        ]
        wrong += [
            f"steps[].{name}"
            for name in STEP_COLUMNS
            if name not in (*_FORMS, "log_probs")
            and [getattr(e, name) for e in row.steps] != [getattr(e, name) for e in made.steps]
        ]
        if wrong:
            raise ExportError(
                f"{where}: {', '.join(wrong)}: not what the steps and other rows of the trajectory "
                "say; edit all alike, or undo the edit, for which a Step may have no place"
            )
    return exported


def _same(row: Row, made: Row, column: str) -> bool:
    a, b = getattr(row, column), getattr(made, column)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _step(row: Row, entry: StepColumns) -> Step:
    start, end = entry.response_start, entry.response_end
    known = entry.log_probs if row.log_probs is None else row.log_probs[start:end]
    return Step(
        trajectory_uid=row.trajectory_uid,
        prompt_uid=row.prompt_uid,
        prompt_ids=row.input_ids[:start],
        response_ids=row.input_ids[start:end],
        rollout_log_probs=known,  # type: ignore[arg-type]  # a list is normalised
        **_fields_of(entry, Step),
    )
