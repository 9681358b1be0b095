"""This module writes trajectories to files, Parquet or JSONL, that `datasets.load_dataset` reads,
and reads them back.

    pool ──pages──► ExportedTrajectory ──write──► one row per branch ──► x.parquet | x.jsonl
                                       ◄──read───

One row per branch of a trajectory; `columns.py` says what is in it. `read(write(x))` is x. Rows may
be removed by whole trajectories, and the file saved anew by `datasets`. Both formats load to the
same values.

Pictures are files of their own, `x.parquet.pictures/<digest>.png`, or in the rows
(`pictures="embedded"`), as often as rows show them.

Beside a file is its digest, `x.parquet.sha256`, as `sha256sum` writes it: a file that has one is
held against it when it is read. Whoever saves a file anew deletes that of the old one.

Owns the file and its two formats, told by the suffix. Does not own which trajectories are in it,
nor where they go (`transfer.py`).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

from stepwell.datapool.errors import ExportError
from stepwell.datapool.files.columns import (
    COLUMNS,
    TOKEN_COLUMNS,
    PlacedRow,
    Row,
    check_row,
    from_rows,
    named_image,
    provenance,
    schema,
    to_rows,
)
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.sealed import (
    check_sidecar,
    sidecar_of,
    write_durably,
    write_sidecar,
    written_durably,
)

PICTURES_END: Final = ".pictures"
"""End of the folder's name with an exported file's pictures."""
_ROW_GROUP_BYTES = 16 << 20
_ROW_GROUP_ROWS = 2048
PictureForm: TypeAlias = Literal["files", "embedded"]


@dataclass(slots=True)
class ExportSummary:
    """Summary of an export: the rows that `write` wrote, and the trajectories that have none."""

    path: Path
    n_trajectories: int = 0
    n_without_steps: int = 0
    """Trajectories without a step have no branch, hence no row; they are not in the file."""
    n_rows: int = 0
    n_steps: int = 0


def write(
    path: Path | str,
    trajectories: Iterable[ExportedTrajectory],
    *,
    source: str = "",
    overwrite: bool = False,
    pictures: PictureForm = "files",
) -> ExportSummary:
    """Write `trajectories` to `path`, one row per branch, in their order, as `write_rows`.

    Args:
        pictures: `files` beside it, or `embedded` in its rows.

    Raises:
        ExportError, OSError: as `write_rows`; a value that no row can carry.
    """
    summary, origin = ExportSummary(Path(path)), provenance(source)
    folder = pictures_of(summary.path)
    named: set[str] = set()

    def image_of(exported: ExportedTrajectory, digest: str) -> dict[str, Any]:
        image, png = named_image(digest), exported.pictures.get(digest)
        if pictures == "embedded" or png is None:
            return image | {"bytes": png}
        name = image["path"]
        if name not in named:
            folder.mkdir(exist_ok=True)
            write_durably(folder / name, png)
            named.add(name)
        return {"bytes": None, "path": f"{folder.name}/{name}"}

    def rows() -> Iterator[Row]:
        for exported in trajectories:
            if not exported.trajectory.steps:
                summary.n_without_steps += 1
                continue
            images = partial(image_of, exported)
            for row in to_rows(exported, summary.n_trajectories, origin, images):
                summary.n_rows += 1
                yield row
            summary.n_trajectories += 1
            summary.n_steps += len(exported.trajectory.steps)

    before = {picture.name for picture in folder.glob("*.png")}
    try:
        write_rows(summary.path, rows(), overwrite=overwrite)
    except BaseException:  # also Ctrl-C: no pictures of a file that there is not
        remove_unnamed(summary.path, before)
        raise
    remove_unnamed(summary.path, named)
    return summary


def pictures_of(path: Path) -> Path:
    """The folder of an exported file's pictures."""
    return path.with_name(f"{path.name}{PICTURES_END}")


def remove_unnamed(path: Path, named: Collection[str]) -> None:
    """Remove pictures of an exported file that no row of it names any more."""
    folder = pictures_of(path)
    for picture in folder.glob("*.png"):
        if picture.name not in named:
            picture.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def write_rows(path: Path, rows: Iterable[Row], *, overwrite: bool) -> None:
    """Write a file of ours.

    Streams: holds one trajectory and one Parquet row group (about 16 MiB). The file appears under
    its name when it is whole and flushed to the disk; until then, and if anything raises, there is
    at most `PATH.….tmp`, which is removed.

    Raises:
        ExportError: unknown suffix; `path` exists; a value that no column can carry.
        OSError: the disk is full, the folder not writable, …
    """
    form = _format_of(path)
    if path.exists() and not overwrite:
        raise ExportError(f"{path} exists; choose another path, or pass overwrite=True")
    with written_durably(path) as file:
        try:
            form.write(file, rows)
        except (pa.ArrowException, TypeError, UnicodeEncodeError, OverflowError) as e:
            raise ExportError(f"{path}: a value that no column can carry ({e})") from e
        file.flush()
        os.fsync(file.fileno())  # what the disk has no room for leaves the old file its sidecar
        # A kill may leave a file with no sidecar, not with a wrong one.
        sidecar_of(path).unlink(missing_ok=True)
    write_sidecar(path)


def read(path: Path | str) -> Iterator[ExportedTrajectory]:
    """The trajectories of a file that `write` made, in order.

    Streams: holds one trajectory and one batch of rows. Steps of one row share its memory.

    Raises:
        ExportError: not a file of ours, another schema, a missing column, a truncated or damaged
            file, missing rows, values that no Step can have. What lies before the damage is given
            back first.
        DamagedFileError: it is not what the digest beside it was made of.
        OSError: the file cannot be read.
    """
    return from_rows(read_rows(Path(path)), Path(path).parent)


def read_rows(path: Path) -> Iterator[PlacedRow]:
    """The rows of a file; raises as `read`."""
    form = _format_of(path)
    check_sidecar(
        path,
        f"export it again; if you changed it yourself, delete {sidecar_of(path).name} beside it",
    )
    for where, row in form.read(path):
        check_row(row, where)
        yield where, row


# -- Parquet -----------------------------------------------------------------------------------


def _write_parquet(file: BinaryIO, rows: Iterable[Row]) -> None:
    columns = schema()
    # Dictionaries of token ids and log-probs cost most of the time and save nothing over zstd.
    with pq.ParquetWriter(
        file, columns, compression="zstd", use_dictionary=False, write_page_checksum=True
    ) as writer:
        for batch in _batches(rows):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=columns), len(batch))


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    n_bytes = 0
    for row in rows:
        batch.append(row)
        n_bytes += 17 * len(row["input_ids"])
        for step in row["steps"]:
            texts = step["metadata"], step["multi_modal_data"], step["routed_experts"]
            n_bytes += sum(len(text) for text in texts if text)
        n_bytes += sum(len(image["bytes"] or b"") for image in row["images"])
        if n_bytes >= _ROW_GROUP_BYTES or len(batch) >= _ROW_GROUP_ROWS:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    number = 0
    source = path.open("rb")  # whatever fails from here on is the file's content
    try:
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            names = [name for name in COLUMNS if name in file.schema_arrow.names]
            tokens = [name for name in TOKEN_COLUMNS if name in names]
            others = [name for name in names if name not in tokens]
            # One row group at a time: a batch over several would hold 64 rows however long.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(64, [group], names):
                    lists = [batch.column(name) for name in tokens]
                    for row, *values in zip(batch.select(others).to_pylist(), *lists, strict=True):
                        number += 1
                        # Copies, which do not hold the whole batch.
                        arrays = [None if v.values is None else np.array(v.values) for v in values]
                        yield f"{path}: row {number}", row | dict(zip(tokens, arrays, strict=True))
    except (pa.ArrowException, OSError) as e:
        raise ExportError(
            f"{path} is truncated, damaged or no Parquet ({e}); export it again"
        ) from e
    finally:
        source.close()


# -- JSONL -------------------------------------------------------------------------------------


def _write_jsonl(file: BinaryIO, rows: Iterable[Row]) -> None:
    for row in rows:
        columns = {name: row[name] for name in COLUMNS}
        if isinstance(row["log_probs"], np.ndarray):
            # Doubles hold a float32 exactly, so that both formats load as the same numbers.
            columns["log_probs"] = row["log_probs"].astype(np.float64)
        columns["images"] = [
            image | {"bytes": base64.b64encode(image["bytes"]).decode()}
            if isinstance(image["bytes"], bytes)
            else image
            for image in row["images"]
        ]
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        file.write(orjson.dumps(columns, option=options))


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}: line {number}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as e:
                end = " (no line end: the file is truncated)" if line[-1:] != b"\n" else ""
                raise ExportError(f"{where} is no JSON{end}: {e}; export it again") from e
            if not isinstance(row, dict):
                raise ExportError(f"{where} is no JSON object; pass an exported file")
            yield where, row


# -- formats -----------------------------------------------------------------------------------


class _Format(NamedTuple):
    write: Callable[[BinaryIO, Iterable[Row]], None]
    read: Callable[[Path], Iterator[PlacedRow]]


_FORMATS: Final[dict[str, _Format]] = {
    ".parquet": _Format(_write_parquet, _read_parquet),
    ".jsonl": _Format(_write_jsonl, _read_jsonl),
}


def _format_of(path: Path) -> _Format:
    if (form := _FORMATS.get(path.suffix)) is None:
        raise ExportError(f"{path} ends in {path.suffix!r}; pass a path in .parquet or .jsonl")
    return form
