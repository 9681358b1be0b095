"""Trajectories as Parquet or JSONL files that `datasets.load_dataset` reads, and back.

One row per *branch*. The steps of a trajectory form a tree: a step's parent is the longest other
step whose prompt + response its prompt extends. A branch is a path from a root to a leaf, and its
tokens are the leaf's prompt + response::

    steps        s0: P0 R0            s1: P0 R0 U1 R1         s2: P0 R0 U2 R2
    input_ids                         P0 R0 U1 R1             P0 R0 U2 R2
    loss_mask                         .. ## .. ##             .. .. .. ##      R0 is trained once
    log_probs    0 elsewhere             ## .. ##                ## .. ##      also where masked
    versions     -1 elsewhere            ## .. ##                ## .. ##

A step that is on several branches is trained in the first one, in order of the leaves'
`step_index`; so the sum of `loss_mask` over a trajectory is its number of response tokens. The
parent is read from the token ids, as the trainer does for its merged rows: a `parent_index` that
is missing or false changes nothing but its own column. (Steps with `multi_modal_data` are joined
only where `parent_index` says so too: other images have the same placeholder ids.) `loss_mask`
does not look at `state`: whoever trains on the rows filters out `aborted` ones if need be.

The columns are `schema()`. Unknown is null, never 0: `log_probs` is null as a whole unless all
responses of the row have theirs, so 0 stands only where nothing was sampled; if some have, they
are in `steps[].log_probs`. No list has nulls among its numbers: Arrow's JSON reader loses those
at its head (apache/arrow#51305), and a tensor has no place for them either. What has no fixed type
is text: `metadata`, `group_metadata`, `marks` and `multi_modal_data` as JSON, in which bytes,
arrays, tuples, NaN and keys that are no strings are `{"__stepwell__": kind, "value": …}`, arrays
in base64 of the `.npy` format; `routed_experts` as that base64. Nothing is ever pickled.

`read(write(x))` is x: rows carry the table of their steps with everything a Step has, and columns
that follow from it are compared with it on reading, so that an edit which would be lost is an
error instead. Rows may be removed by whole trajectories, and the file saved anew by `datasets`.

Owns: the row form, the two encodings, the file. Does not own: which trajectories, or where they
go (the pool). pyarrow is loaded on first use and only for Parquet.
"""

from __future__ import annotations

import base64
import heapq
import io
import json
import math
import os
import shutil
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from datapool.errors import DataPoolError
from datapool.types import TRAIN, Step, Trajectory, VersionSpan

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]

SCHEMA_VERSION = 1
"""Raised when a reader of the version before would misread the rows."""

_SUFFIXES: dict[str, ExportFormat] = {".parquet": "parquet", ".jsonl": "jsonl"}
_TAG = "__stepwell__"
_ROW_GROUP_BYTES = 16 << 20
_ROW_GROUP_ROWS = 2048
_HEAD_BYTES = 1 << 20
"""`load_dataset("json")` takes the types of a file from its first 10 MiB; see `_write_jsonl`."""
_MAX_MOVED = 16


class ExportError(DataPoolError, ValueError):
    """A trajectory that no row can carry, or a file that is not a whole export of ours."""


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
    """`open`, `complete`, `aborted`, or what became of its group (`acked`, …)."""
    reason: str | None = None
    """Why it was aborted or dropped."""
    n_rollouts: int | None = None
    """What its group was declared with; None if it was not."""
    marks: dict[str, Any] | None = None
    """Curation marks; JSON-like."""
    group_metadata: dict[str, Any] = field(default_factory=dict)
    provenance: Provenance | None = field(default=None, compare=False)
    """Of the file it was read from; `write` ignores it and states its own."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What `write` wrote."""

    path: Path
    format: ExportFormat
    n_trajectories: int
    n_without_steps: int
    """Trajectories without a step have no branch, hence no row; they are not in the file."""
    n_rows: int
    n_steps: int
    n_tokens: int
    """Length of all rows together."""
    n_trained_tokens: int
    """Sum of `loss_mask`."""
    n_bytes: int


def schema() -> Any:
    """The columns as a `pyarrow.Schema`.

    `load_dataset("json", …, features=Features.from_arrow_schema(schema()))` gives a JSONL file the
    exact types of Parquet; without, JSON's integers are 64 bits wide and its floats double.
    """
    pa = _pyarrow()
    span = pa.struct([(name, pa.int64()) for name in ("version", "start", "end")])
    step = pa.struct(
        [
            ("step_index", pa.int64()),
            ("parent_index", pa.int64()),  # as stored; null = a root
            ("prompt_start", pa.int32()),  # the prompt is input_ids[:response_start]; from here on
            ("response_start", pa.int32()),  # it is new. The response is
            ("response_end", pa.int32()),  # input_ids[response_start:response_end].
            ("trained", pa.bool_()),  # whether loss_mask is 1 there
            ("policy_version", pa.int64()),
            ("version_spans", pa.list_(span)),  # relative to the response
            ("finish_reason", pa.string()),
            ("reward", pa.float64()),
            ("log_probs", pa.list_(pa.float32())),  # only if the column is null: some lack them
            ("is_last", pa.bool_()),
            ("metadata", pa.string()),
            ("multi_modal_data", pa.string()),
            ("routed_experts", pa.string()),
        ]
    )
    provenance = pa.struct(
        [
            ("stepwell_version", pa.string()),
            ("schema_version", pa.int64()),
            ("exported_at", pa.float64()),
            ("source", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("channel", pa.string()),
            ("prompt_uid", pa.string()),
            ("trajectory_uid", pa.string()),
            ("attempt", pa.int64()),
            ("position", pa.int64()),  # of the trajectory in the file, from 0
            ("branch", pa.int64()),  # of the row in the trajectory, from 0
            ("n_branches", pa.int64()),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("log_probs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int64())),
            ("reward", pa.float64()),  # of the trajectory: sum over its steps, also those not here
            ("steps", pa.list_(step)),  # root to leaf
            ("state", pa.string()),
            ("reason", pa.string()),
            ("n_rollouts", pa.int64()),
            ("metadata", pa.string()),
            ("group_metadata", pa.string()),
            ("marks", pa.string()),
            ("provenance", provenance),
        ]
    )


_TOKEN_COLUMNS = ("input_ids", "loss_mask", "log_probs", "versions")
_TRAJECTORY_COLUMNS = (
    *("channel", "prompt_uid", "trajectory_uid", "attempt", "position", "n_branches", "reward"),
    *("state", "reason", "n_rollouts", "metadata", "group_metadata", "marks", "provenance"),
)
_COLUMNS = (*_TRAJECTORY_COLUMNS, "branch", "steps", *_TOKEN_COLUMNS)


def write(
    path: Path | str,
    trajectories: Iterable[ExportedTrajectory],
    format: ExportFormat | None = None,
    *,
    source: str = "",
    overwrite: bool = False,
) -> ExportSummary:
    """Write `trajectories` to `path`, one row per branch, in their order.

    Streams: holds one trajectory and one Parquet row group (about 16 MiB). The file appears under
    its name when it is whole and flushed to the disk; until then, and if anything raises, there is
    at most `PATH.….tmp`, which is removed.

    Raises:
        ExportError: unknown format; `path` exists; a value that no row can carry.
        OSError: the disk is full, the folder not writable, …
    """
    path = Path(path)
    chosen = _format_of(path, format)
    _refuse_existing(path, overwrite)
    if not path.parent.is_dir():
        raise ExportError(f"{path}: folder {path.parent} does not exist; create it first")
    provenance = Provenance(_stepwell_version(), SCHEMA_VERSION, time.time(), source)
    _check_text(source, "source")
    count = _Count()
    rows = _rows(trajectories, provenance, count)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb+") as file:
            (_write_parquet if chosen == "parquet" else _write_jsonl)(file, rows)
            file.flush()
            os.fsync(file.fileno())
        _refuse_existing(path, overwrite)  # it may have come into being meanwhile
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return ExportSummary(path, chosen, n_bytes=path.stat().st_size, **asdict(count))


def read(path: Path | str) -> Iterator[ExportedTrajectory]:
    """The trajectories of a file that `write` made, in order; the format is told by its content.

    Streams: holds one trajectory and one batch of rows. Steps of one row share its memory.

    Raises:
        ExportError: not a file of ours, a newer schema, a missing column, a truncated or damaged
            file, rows out of order or missing, columns edited in a way that no Step can carry.
            What lies before the damage is given back first.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        rows = _read_parquet(path)
    elif start[:1] == b"{" or (not start and path.suffix == ".jsonl"):
        rows = _read_jsonl(path)
    else:
        what = f"it starts with {start!r}" if start else "it is empty"
        raise ExportError(f"{path} is neither Parquet nor JSONL: {what}; pass an exported file")
    return _assemble(path, rows)


# ---------------------------------------------------------------------------- branches


@dataclass(slots=True)
class _Count:
    n_trajectories: int = 0
    n_without_steps: int = 0
    n_rows: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    n_trained_tokens: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class _Row:
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


def _rows(
    trajectories: Iterable[ExportedTrajectory], provenance: Provenance, count: _Count
) -> Iterator[_Row]:
    stated = asdict(provenance)
    for exported in trajectories:
        steps = exported.trajectory.steps
        if not steps:
            count.n_without_steps += 1
            continue
        fields = _trajectory_fields(exported, count.n_trajectories, stated)
        table = [_step_fields(step) for step in steps]
        branches = _branches(steps)
        count.n_trajectories += 1
        count.n_steps += len(steps)
        done: set[int] = set()
        for number, path in enumerate(branches):
            trained = [i not in done for i in path]
            done.update(path)
            row = _build_row(
                [steps[i] for i in path],
                trained,
                [table[i] for i in path],
                {**fields, "branch": number, "n_branches": len(branches)},
            )
            count.n_rows += 1
            count.n_tokens += len(row.input_ids)
            count.n_trained_tokens += int(row.loss_mask.sum())
            yield row


def _branches(steps: Sequence[Step]) -> list[list[int]]:
    """Root-to-leaf paths of positions in `steps`, in order of the leaves."""
    by_length = sorted(range(len(steps)), key=lambda i: (steps[i].n_tokens, -i))
    lengths = [steps[i].n_tokens for i in by_length]
    parents: list[int | None] = []
    for step in steps:
        # A response has a token, so a parent is shorter than its child: there is no cycle.
        shorter = by_length[: bisect_right(lengths, len(step.prompt_ids))]
        parents.append(next((i for i in reversed(shorter) if _continues(step, steps[i])), None))
    inner = set(parents)
    paths = []
    for leaf in range(len(steps)):
        if leaf in inner:
            continue
        path: list[int] = []
        node: int | None = leaf
        while node is not None:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    return paths


def _continues(child: Step, parent: Step) -> bool:
    """Whether the child's prompt, which is as long at least, starts with the parent's tokens."""
    n, p = parent.n_tokens, len(parent.prompt_ids)
    prompt = child.prompt_ids
    seen_images = child.multi_modal_data is not None or parent.multi_modal_data is not None
    if seen_images and child.parent_index != parent.step_index:
        return False
    # The response first: siblings share the prompt and differ there.
    return np.array_equal(prompt[p:n], parent.response_ids) and np.array_equal(
        prompt[:p], parent.prompt_ids
    )


def _build_row(
    path: list[Step], trained: list[bool], table: list[dict[str, Any]], fields: dict[str, Any]
) -> _Row:
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
    return _Row(input_ids, mask, log_probs, versions, fields | {"steps": entries})


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
    reward = trajectory.reward
    if reward is not None and not math.isfinite(reward):
        raise ExportError(f"{owner}: its rewards add up to {reward}; they must have a finite sum")
    fields: dict[str, Any] = {
        "channel": exported.channel,
        "prompt_uid": trajectory.prompt_uid,
        "trajectory_uid": trajectory.trajectory_uid,
        "attempt": trajectory.attempt,
        "position": position,
        "reward": reward,
        "state": exported.state,
        "reason": exported.reason,
        "n_rollouts": exported.n_rollouts,
    }
    for name in ("channel", "prompt_uid", "trajectory_uid", "state", "reason"):
        _check_text(fields[name], f"{owner}: {name}")
    for name in ("attempt", "n_rollouts"):
        _check_int(fields[name], f"{owner}: {name}")
    return fields | {
        "metadata": _dumps(trajectory.metadata, f"{owner}: metadata"),
        "group_metadata": _dumps(exported.group_metadata, f"{owner}: group_metadata"),
        "marks": None if exported.marks is None else _dumps(exported.marks, f"{owner}: marks"),
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
        "metadata": _dumps(step.metadata, f"{owner}: metadata"),
        "multi_modal_data": None
        if images is None
        else _dumps(images, f"{owner}: multi_modal_data"),
        "routed_experts": None if experts is None else _npy(experts, f"{owner}: routed_experts"),
    }
    _check_text(step.finish_reason, f"{owner}: finish_reason")
    for name in ("step_index", "policy_version"):
        _check_int(fields[name], f"{owner}: {name}")
    for span in step.version_spans:
        _check_int(span.version, f"{owner}: version_spans")
    return fields


# ---------------------------------------------------------------------------- values as text


def _dumps(value: Any, what: str) -> str:
    try:
        # ASCII, so that a lone surrogate in an agent's text cannot break the file's UTF-8.
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ExportError(
            f"{what} is {value!r:.120}, which no file can carry ({e}); use JSON values, bytes or "
            "NumPy arrays of numbers or strings"
        ) from e


def _plain(value: Any) -> Any:
    """`value` in JSON's types; what JSON has not, or would change, is tagged."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": str(float(value))}
    if isinstance(value, Mapping):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "mapping", "value": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [_plain(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {_TAG: "ndarray", "value": _npy(value, "array")}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not supported")


def _loads(text: str) -> Any:
    return json.loads(text, object_hook=_revive)


def _revive(found: dict[str, Any]) -> Any:
    if _TAG not in found:
        return found
    return _REVIVE[found[_TAG]](found["value"])


def _npy(value: Any, what: str) -> str:
    # A subclass may hold what .npy does not (the mask of a masked array).
    if type(value) is not np.ndarray:
        raise ExportError(f"{what} is a {type(value).__qualname__}; pass a plain NumPy array")
    buffer = io.BytesIO()
    try:
        np.save(buffer, value, allow_pickle=False)
    except ValueError as e:
        raise ExportError(f"{what} has dtype {value.dtype}; pass numbers or strings") from e
    return base64.b64encode(buffer.getbuffer()).decode()


def _from_npy(text: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


_REVIVE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "mapping": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "ndarray": _from_npy,
}


def _check_text(value: Any, what: str) -> None:
    if value is None:
        return
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as e:
        raise ExportError(f"{what} is {value!r}; pass text that UTF-8 can write") from e


def _check_int(value: int | None, what: str) -> None:
    if value is not None and not -(2**63) <= value < 2**63:
        raise ExportError(f"{what} is {value}; pass an integer of 64 bits")


# ---------------------------------------------------------------------------- writing


def _write_parquet(file: BinaryIO, rows: Iterator[_Row]) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    columns = schema()
    # Dictionaries of token ids and log-probs cost most of the time and save nothing over zstd.
    with pq.ParquetWriter(
        file, columns, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        for batch in _batches(rows):
            writer.write_batch(_record_batch(batch, columns), row_group_size=len(batch))


def _batches(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    n_bytes = 0
    for row in rows:
        batch.append(row)
        n_bytes += row.n_bytes
        if n_bytes >= _ROW_GROUP_BYTES or len(batch) >= _ROW_GROUP_ROWS:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _record_batch(rows: list[_Row], columns: Any) -> Any:
    pa = _pyarrow()
    arrays = []
    for column in columns:
        if column.name not in _TOKEN_COLUMNS:
            arrays.append(pa.array([row.fields[column.name] for row in rows], column.type))
            continue
        parts = [getattr(row, column.name) for row in rows]
        null = pa.array([part is None for part in parts])
        parts = [np.empty(0, np.float32) if part is None else part for part in parts]
        offsets = pa.array(np.cumsum([0, *map(len, parts)]), pa.int32())
        flat = pa.array(np.concatenate(parts), column.type.value_type)
        arrays.append(pa.ListArray.from_arrays(offsets, flat, type=column.type, mask=null))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _write_jsonl(file: BinaryIO, rows: Iterator[_Row]) -> None:
    """One object per line. `load_dataset("json")` takes the types of a file from its first chunk
    and fails at a value in a column that was null or empty all through it. So the first row with a
    value in such a column goes to the front if it would come late: few rows ever, latest first, by
    which a reader tells them (`_in_order`)."""
    seen: set[str] = set()
    late: list[tuple[int, int]] = []
    for row in rows:
        line = _json_line(row)
        valued = _valued(row)
        if not valued <= seen:
            seen |= valued
            if file.tell() > _HEAD_BYTES:
                late.append((file.tell(), len(line)))
        file.write(line)
    if late:
        _move_to_front(file, late)


def _json_line(row: _Row) -> bytes:
    values = {**row.fields, **{name: getattr(row, name) for name in _TOKEN_COLUMNS}}
    if row.log_probs is not None:
        # Doubles hold a float32 exactly, so that both formats load as the same numbers.
        values["log_probs"] = row.log_probs.astype(np.float64)
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _valued(row: _Row) -> set[str]:
    names = {name for name, value in row.fields.items() if value is not None}
    if row.log_probs is not None:
        names.add("log_probs")
    for step in row.fields["steps"]:
        names.update(f"steps.{name}" for name, v in step.items() if v is not None and v != [])
    return names


def _move_to_front(file: BinaryIO, parts: list[tuple[int, int]]) -> None:
    """Rewrite `file` with `parts` (offset, length; ascending) first, in reverse."""
    with tempfile.TemporaryFile(dir=Path(file.name).parent) as spare:
        for start, length in reversed(parts):
            _copy(file, start, length, spare)
        position = 0
        for start, length in parts:
            _copy(file, position, start - position, spare)
            position = start + length
        _copy(file, position, file.seek(0, os.SEEK_END) - position, spare)
        spare.seek(0)
        file.seek(0)
        shutil.copyfileobj(spare, file, 1 << 20)


def _copy(source: BinaryIO, start: int, length: int, target: Any) -> None:
    source.seek(start)
    while length:
        chunk = source.read(min(length, 1 << 20))
        target.write(chunk)
        length -= len(chunk)


# ---------------------------------------------------------------------------- reading


def _read_parquet(path: Path) -> Iterator[_Row]:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(file.schema_arrow.names, str(path))
            others = [name for name in _COLUMNS if name not in _TOKEN_COLUMNS]
            number = 0
            for batch in _parquet_batches(file):
                tokens = {name: _split(batch.column(name)) for name in _TOKEN_COLUMNS}
                for i, fields in enumerate(batch.select(others).to_pylist()):
                    number += 1
                    columns = {name: parts[i] for name, parts in tokens.items()}
                    yield _parse_row(columns, fields, f"{path}: row {number}")
    except (pa.ArrowException, OSError) as e:
        raise ExportError(
            f"{path} is truncated, damaged or no Parquet ({e}); export it again"
        ) from e


def _parquet_batches(file: Any) -> Iterator[Any]:
    # One row group at a time: a batch over several would hold 64 rows however long they are.
    for group in range(file.num_row_groups):
        yield from file.iter_batches(batch_size=64, row_groups=[group], columns=list(_COLUMNS))


def _split(column: Any) -> list[npt.NDArray[Any] | None]:
    """The rows of a list column as NumPy arrays."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    nulls = column.is_null().to_pylist()
    return [None if null else part for null, part in zip(nulls, parts, strict=True)]


def _read_jsonl(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                fields = orjson.loads(line)
            except orjson.JSONDecodeError as e:
                end = " (no line end: the file is truncated)" if line[-1:] != b"\n" else ""
                raise ExportError(f"{where} is no JSON{end}: {e}; export it again") from e
            if not isinstance(fields, dict):
                raise ExportError(f"{where} is no JSON object; pass an exported file")
            _check_columns(fields, where)
            columns = {name: fields.pop(name) for name in _TOKEN_COLUMNS}
            yield _parse_row(columns, fields, where)


def _check_columns(names: Iterable[str], where: str) -> None:
    missing = sorted(set(_COLUMNS) - set(names))
    if missing and "provenance" in missing:
        raise ExportError(
            f"{where} was not exported by Stepwell: no column {', '.join(missing)}; pass a file "
            "that `export` wrote"
        )
    if missing:
        raise ExportError(
            f"{where} lacks column {', '.join(missing)}; keep all columns, or export again"
        )


def _parse_row(columns: Mapping[str, Any], fields: dict[str, Any], where: str) -> _Row:
    """A row as it was written, its schema checked first: a newer one may have other columns."""
    try:
        written = fields["provenance"]["schema_version"]
        if written > SCHEMA_VERSION:
            raise ExportError(
                f"{where}: schema_version is {written}, this Stepwell reads up to "
                f"{SCHEMA_VERSION}; upgrade Stepwell"
            )
        for name in ("position", "branch"):
            if not isinstance(fields[name], int):
                raise TypeError(f"{name} is {fields[name]!r}, no integer")
        ids = _integers(columns["input_ids"], np.int32, "input_ids")
        ids.flags.writeable = False  # so that steps are views of it
        return _Row(
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


def _assemble(path: Path, rows: Iterator[_Row]) -> Iterator[ExportedTrajectory]:
    for _, branches in groupby(_in_order(path, rows), key=lambda row: row.key[0]):
        group = list(branches)
        try:
            trajectory = _trajectory(group)
        except (KeyError, TypeError, ValueError) as e:
            raise _malformed(group[0].where, e) from e
        yield trajectory


def _in_order(path: Path, rows: Iterator[_Row]) -> Iterator[_Row]:
    """By position and branch: rows that `_write_jsonl` moved to the front, in descending order,
    go back to their places; the others are in order."""
    moved: list[_Row] = []
    ordered = rows
    for row in rows:
        if moved and (row.key >= moved[-1].key or len(moved) > _MAX_MOVED):
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


def _trajectory(rows: list[_Row]) -> ExportedTrajectory:
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
        metadata=_loads(head["metadata"]),
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
        n_rollouts=head["n_rollouts"],
        marks=None if head["marks"] is None else _loads(head["marks"]),
        group_metadata=_loads(head["group_metadata"]),
        provenance=Provenance(**head["provenance"]),
    )


def _read_steps(row: _Row) -> list[tuple[Step, bool]]:
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
    for name, expected in zip(_TOKEN_COLUMNS[1:], columns, strict=True):
        found = getattr(row, name)
        same = found is None if expected is None else np.array_equal(found, expected)
        if not same:
            raise ExportError(
                f"{row.where}: {name} is not what its steps say; undo the edit, for which a Step "
                "has no place"
            )
    return list(zip(path, trained, strict=True))


def _read_step(row: _Row, entry: Mapping[str, Any]) -> Step:
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
        metadata=_loads(entry["metadata"]),
        rollout_log_probs=log_probs,
        finish_reason=entry["finish_reason"],
        parent_index=entry["parent_index"],
        version_spans=tuple(VersionSpan(**span) for span in entry["version_spans"]),
        multi_modal_data=None if images is None else _loads(images),
        routed_experts=None if experts is None else _from_npy(experts),
    )


# ---------------------------------------------------------------------------- surroundings


def _format_of(path: Path, format: str | None) -> ExportFormat:
    chosen = _SUFFIXES.get(path.suffix) if format is None else format
    if chosen == "parquet":
        _pyarrow()
        return "parquet"
    if chosen == "jsonl":
        return "jsonl"
    if format is not None:
        raise ExportError(f"format is {format!r}; pass 'parquet' or 'jsonl'")
    raise ExportError(
        f"{path}: suffix {path.suffix!r} names no format; use .parquet or .jsonl, or pass format"
    )


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; pass the path of a file")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists; choose another path, or pass overwrite=True")


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    except ImportError as e:
        raise ExportError("Parquet needs pyarrow; pip install pyarrow, or use .jsonl") from e
    return pa


def _stepwell_version() -> str:
    try:
        return version("stepwell")
    except PackageNotFoundError:
        return "unknown"
