"""Files of trajectories, Parquet or JSONL, that `datasets.load_dataset` reads; and back.

    pool ──pages──► ExportedTrajectory ──write──► one row per branch ──► x.parquet | x.jsonl
                                       ◄──read───

One row per branch of a trajectory (`rows.py` says what is in it; the columns are `schema()`).
`read(write(x))` is x. Rows may be removed by whole trajectories, and the file saved anew by
`datasets`. Both formats load to the same values.

Owns the file and its two formats. Does not own which trajectories are in it, nor where they go
(`transfer.py`). pyarrow is loaded on first use and only for Parquet.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.plain import check_text
from stepwell.datapool.files.rows import (
    COLUMNS,
    SCHEMA_VERSION,
    TOKEN_COLUMNS,
    ExportedTrajectory,
    Provenance,
    Row,
    RowCount,
    assemble,
    check_columns,
    parse_row,
    to_rows,
)

__all__ = [
    "SCHEMA_VERSION",
    "ExportError",
    "ExportFormat",
    "ExportSummary",
    "ExportedTrajectory",
    "Provenance",
    "read",
    "schema",
    "write",
]

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]

_SUFFIXES: dict[str, ExportFormat] = {".parquet": "parquet", ".jsonl": "jsonl"}
_ROW_GROUP_BYTES = 16 << 20
_ROW_GROUP_ROWS = 2048
_HEAD_BYTES = 1 << 20
"""`load_dataset("json")` takes the types of a file from its first 10 MiB; see `_write_jsonl`."""


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
            ("group_state", pa.string()),
            ("outcome", pa.float64()),  # of an open trajectory; else it is in steps[].reward
            ("n_rollouts", pa.int64()),
            ("metadata", pa.string()),
            ("marks", pa.string()),
            ("group_metadata", pa.string()),
            ("group_marks", pa.string()),
            ("provenance", provenance),
        ]
    )


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
    check_text(source, "source")
    count = RowCount()
    rows = to_rows(trajectories, provenance, count)
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
        ExportError: not a file of ours, another schema, a missing column, a truncated or damaged
            file, rows out of order or missing, columns edited in a way that no Step can carry.
            What lies before the damage is given back first.
        OSError: the file cannot be read.
    """
    path = Path(path)
    read_rows = _read_parquet if format_of_content(path) == "parquet" else _read_jsonl
    return assemble(path, read_rows(path))


def format_of_content(path: Path) -> ExportFormat:
    """
    Raises:
        ExportError: the file is of neither format.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        return "parquet"
    if start[:1] == b"{" or (not start and path.suffix == ".jsonl"):
        return "jsonl"
    what = f"it starts with {start!r}" if start else "it is empty"
    raise ExportError(f"{path} is neither Parquet nor JSONL: {what}; pass an exported file")


# ---------------------------------------------------------------------------- writing


def _write_parquet(file: BinaryIO, rows: Iterator[Row]) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    columns = schema()
    # Dictionaries of token ids and log-probs cost most of the time and save nothing over zstd.
    with pq.ParquetWriter(
        file, columns, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        for batch in _batches(rows):
            writer.write_batch(_record_batch(batch, columns), row_group_size=len(batch))


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    n_bytes = 0
    for row in rows:
        batch.append(row)
        n_bytes += row.n_bytes
        if n_bytes >= _ROW_GROUP_BYTES or len(batch) >= _ROW_GROUP_ROWS:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _record_batch(rows: list[Row], columns: Any) -> Any:
    pa = _pyarrow()
    arrays = []
    for column in columns:
        if column.name not in TOKEN_COLUMNS:
            arrays.append(pa.array([row.fields[column.name] for row in rows], column.type))
            continue
        parts = [getattr(row, column.name) for row in rows]
        null = pa.array([part is None for part in parts])
        parts = [np.empty(0, np.float32) if part is None else part for part in parts]
        offsets = pa.array(np.cumsum([0, *map(len, parts)]), pa.int32())
        flat = pa.array(np.concatenate(parts), column.type.value_type)
        arrays.append(pa.ListArray.from_arrays(offsets, flat, type=column.type, mask=null))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _write_jsonl(file: BinaryIO, rows: Iterator[Row]) -> None:
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


def _json_line(row: Row) -> bytes:
    values = {**row.fields, **{name: getattr(row, name) for name in TOKEN_COLUMNS}}
    if row.log_probs is not None:
        # Doubles hold a float32 exactly, so that both formats load as the same numbers.
        values["log_probs"] = row.log_probs.astype(np.float64)
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _valued(row: Row) -> set[str]:
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


def _read_parquet(path: Path) -> Iterator[Row]:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(file.schema_arrow.names, str(path))
            others = [name for name in COLUMNS if name not in TOKEN_COLUMNS]
            number = 0
            for batch in _parquet_batches(file):
                tokens = {name: _split(batch.column(name)) for name in TOKEN_COLUMNS}
                for i, fields in enumerate(batch.select(others).to_pylist()):
                    number += 1
                    columns = {name: parts[i] for name, parts in tokens.items()}
                    yield parse_row(columns, fields, f"{path}: row {number}")
    except (pa.ArrowException, OSError) as e:
        raise ExportError(
            f"{path} is truncated, damaged or no Parquet ({e}); export it again"
        ) from e


def _parquet_batches(file: Any) -> Iterator[Any]:
    # One row group at a time: a batch over several would hold 64 rows however long they are.
    for group in range(file.num_row_groups):
        yield from file.iter_batches(batch_size=64, row_groups=[group], columns=list(COLUMNS))


def _split(column: Any) -> list[npt.NDArray[Any] | None]:
    """The rows of a list column as NumPy arrays."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    nulls = column.is_null().to_pylist()
    return [None if null else part for null, part in zip(nulls, parts, strict=True)]


def _read_jsonl(path: Path) -> Iterator[Row]:
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
            check_columns(fields, where)
            columns = {name: fields.pop(name) for name in TOKEN_COLUMNS}
            yield parse_row(columns, fields, where)


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
