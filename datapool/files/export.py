"""This module writes trajectories to files, Parquet or JSONL, that `datasets.load_dataset` reads,
and reads them back.

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
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Literal,
    TypeAlias,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np
import orjson

from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.plain import check_text
from stepwell.datapool.files.rows import (
    COLUMNS,
    SCHEMA_VERSION,
    STEP_COLUMNS,
    TOKEN_COLUMNS,
    ExportedTrajectory,
    Provenance,
    Row,
    check_columns,
    from_rows,
    parse_row,
    to_rows,
)

ExportFormat: TypeAlias = Literal["parquet", "jsonl"]
Numbered: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
"""Columns of each row, and where it stands."""

_ROW_GROUP_BYTES = 16 << 20
_ROW_GROUP_ROWS = 2048
_HEAD_BYTES = 1 << 20
"""`load_dataset("json")` takes the types of a file from its first 10 MiB; see `_write_jsonl`."""


@dataclass(slots=True)
class ExportSummary:
    """What `write` wrote."""

    path: Path
    format: ExportFormat
    n_trajectories: int = 0
    n_without_steps: int = 0
    """Trajectories without a step have no branch, hence no row; they are not in the file."""
    n_rows: int = 0
    n_steps: int = 0
    n_tokens: int = 0
    """Length of all rows together."""
    n_trained_tokens: int = 0
    """Sum of `loss_mask`."""
    n_bytes: int = 0


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
    chosen = cast(ExportFormat, format or path.suffix[1:])
    if chosen not in get_args(ExportFormat):
        raise ExportError(
            f"{path}: no format {format or path.suffix!r}; pass 'parquet' or 'jsonl', or a path "
            "that ends in .parquet or .jsonl"
        )
    _refuse_existing(path, overwrite)
    if not path.parent.is_dir():
        raise ExportError(f"{path}: folder {path.parent} does not exist; create it first")
    check_text(source, "source")
    summary = ExportSummary(path, chosen)
    rows = _counted_rows(trajectories, source, summary)
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
    summary.n_bytes = path.stat().st_size
    return summary


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise ExportError(f"{path} is a folder; pass the path of a file")
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists; choose another path, or pass overwrite=True")


def _counted_rows(
    trajectories: Iterable[ExportedTrajectory], source: str, summary: ExportSummary
) -> Iterator[Row]:
    try:
        release = version("stepwell")
    except PackageNotFoundError:
        release = "unknown"
    provenance = Provenance(release, SCHEMA_VERSION, time.time(), source)
    for exported in trajectories:
        if not exported.trajectory.steps:
            summary.n_without_steps += 1
            continue
        for row in to_rows(exported, summary.n_trajectories, provenance):
            summary.n_rows += 1
            summary.n_tokens += len(row.input_ids)
            summary.n_trained_tokens += int(row.loss_mask.sum())
            yield row
        summary.n_trajectories += 1
        summary.n_steps += len(exported.trajectory.steps)


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
    return from_rows(parse_row(columns, where) for where, columns in read_rows(path))


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


# -- Parquet -----------------------------------------------------------------------------------


def schema() -> Any:
    """The columns as a `pyarrow.Schema`: the fields of `rows.Row`.

    `load_dataset("json", …, features=Features.from_arrow_schema(schema()))` gives a JSONL file the
    exact types of Parquet; without, JSON's integers are 64 bits wide and its floats double.
    """
    return _pyarrow().schema(list(_arrow_type(Row)))


def _arrow_type(kind: Any) -> Any:
    """What Arrow calls the type of a field."""
    pa = _pyarrow()
    inner = get_args(kind)
    if NoneType in inner:  # every column may be null
        return _arrow_type(inner[0])
    if get_origin(kind) is Annotated:
        note = kind.__metadata__[0]
        return pa.from_numpy_dtype(note) if isinstance(note, type) else _arrow_type(inner[0])
    if get_origin(kind) is np.ndarray:
        return pa.list_(pa.from_numpy_dtype(get_args(inner[1])[0]))
    if inner:
        return pa.list_(_arrow_type(inner[0]))
    plain = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    if kind in plain:
        return plain[kind]
    hints = get_type_hints(kind, include_extras=True)
    return pa.struct([(name, _arrow_type(hint)) for name, hint in hints.items()])


def _write_parquet(file: BinaryIO, rows: Iterator[Row]) -> None:
    pa = _pyarrow()
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    def column(batch: list[Row], field: Any) -> Any:
        values = [getattr(row, field.name) for row in batch]
        if field.name not in TOKEN_COLUMNS:  # Arrow reads NumPy's arrays
            values = msgspec.to_builtins(values)
        return pa.array(values, field.type)

    columns = schema()
    # Dictionaries of token ids and log-probs cost most of the time and save nothing over zstd.
    with pq.ParquetWriter(
        file, columns, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        for batch in _batches(rows):
            arrays = [column(batch, field) for field in columns]
            table = pa.RecordBatch.from_arrays(arrays, schema=columns)
            writer.write_batch(table, row_group_size=len(batch))


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    n_bytes = 0
    for row in rows:
        batch.append(row)
        n_bytes += 17 * len(row.input_ids)
        for step in row.steps:
            texts = (step.metadata, step.multi_modal_data or "", step.routed_experts or "")
            n_bytes += sum(map(len, texts))
        if n_bytes >= _ROW_GROUP_BYTES or len(batch) >= _ROW_GROUP_ROWS:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _read_parquet(path: Path) -> Numbered:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    others = [name for name in COLUMNS if name not in TOKEN_COLUMNS]
    number = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(file.schema_arrow.names, str(path))
            # One row group at a time: a batch over several would hold 64 rows however long.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(64, [group], list(COLUMNS)):
                    tokens = [batch.column(name) for name in TOKEN_COLUMNS]
                    for columns, *lists in zip(
                        batch.select(others).to_pylist(), *tokens, strict=True
                    ):
                        number += 1
                        # Copies, which do not hold the whole batch.
                        arrays = [None if a.values is None else np.array(a.values) for a in lists]
                        columns |= zip(TOKEN_COLUMNS, arrays, strict=True)
                        yield f"{path}: row {number}", columns
    except (pa.ArrowException, OSError) as e:
        raise ExportError(
            f"{path} is truncated, damaged or no Parquet ({e}); export it again"
        ) from e


def _pyarrow() -> Any:
    try:
        import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    except ImportError as e:
        raise ExportError("Parquet needs pyarrow; pip install pyarrow, or use .jsonl") from e
    return pa


# -- JSONL -------------------------------------------------------------------------------------


def _write_jsonl(file: BinaryIO, rows: Iterator[Row]) -> None:
    """One object per line. `load_dataset("json")` takes the types of a file from its first chunk
    and fails at a value in a column that was null or empty all through it. So the first row with a
    value in such a column goes to the front if it would come late: few rows ever, latest first, by
    which a reader tells them (`rows._in_order`)."""
    unseen = {*COLUMNS, *(f"steps.{name}" for name in STEP_COLUMNS)}
    late: list[bytes] = []
    for row in rows:
        columns = {name: getattr(row, name) for name in COLUMNS}
        columns["steps"] = msgspec.to_builtins(row.steps)
        if row.log_probs is not None:
            # Doubles hold a float32 exactly, so that both formats load as the same numbers.
            columns["log_probs"] = row.log_probs.astype(np.float64)
        line = orjson.dumps(columns, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        first = {name for name in unseen if _has_value(row, name)}
        unseen -= first
        if first and file.tell() > _HEAD_BYTES:
            late.append(line)
        else:
            file.write(line)
    if late:
        with tempfile.TemporaryFile(dir=Path(file.name).parent) as others:
            file.seek(0)
            shutil.copyfileobj(file, others, 1 << 20)
            file.seek(0)
            file.writelines(reversed(late))
            others.seek(0)
            shutil.copyfileobj(others, file, 1 << 20)


def _has_value(row: Row, name: str) -> bool:
    table, _, column = name.rpartition(".")
    values = [getattr(part, column) for part in (row.steps if table else [row])]
    return any(isinstance(value, np.ndarray) or value not in (None, ()) for value in values)


def _read_jsonl(path: Path) -> Numbered:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            if not line.strip():
                continue
            try:
                columns = orjson.loads(line)
            except orjson.JSONDecodeError as e:
                end = " (no line end: the file is truncated)" if line[-1:] != b"\n" else ""
                raise ExportError(f"{where} is no JSON{end}: {e}; export it again") from e
            if not isinstance(columns, dict):
                raise ExportError(f"{where} is no JSON object; pass an exported file")
            yield where, columns
