"""Tables by index: where the rows of a data set lie, and how one is read.

    JsonlFile    the places of its lines; a line is parsed when its row is asked for
    ArrowRows    Parquet and Hugging Face data sets, memory-mapped by the `datasets` library; a row
                 becomes Python objects when it is asked for
    CustomRows   a class of the user's (`custom.py`)

Owns: files, formats, the place of a row for messages and ids. Does not own: what a row means
(`tasks.py`).
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import accumulate, chain, starmap
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.backends.errors import BackendConfigError
from stepwell.backends.hub import is_hub_id, offline_if_unreachable
from stepwell.backends.remote_files import fetch_files, is_remote
from stepwell.trainer.config import (
    CustomSource,
    HuggingFaceSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
    TableConfig,
    VerifiersSource,
)
from stepwell.trainer.data.columns import MEDIA, Columns, DataRow, holds_media
from stepwell.trainer.data.custom import CustomRows
from stepwell.trainer.data.prompt_length import load_tokenizer
from stepwell.trainer.errors import DataError


class TablePart(NamedTuple):
    name: str
    """Prefix of the ids of its rows."""
    rows: JsonlFile | ArrowRows | CustomRows


class Table:
    """Rows of several parts (files, a split), by index over all of them."""

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(len(part.rows) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> DataRow:
        part, at = self._place(index)
        return part.rows[at]

    def __iter__(self) -> Iterator[DataRow]:
        return chain.from_iterable(part.rows for part in self._parts)

    def name(self, index: int) -> tuple[str, int]:
        """The row's part, and its number there."""
        part, at = self._place(index)
        return part.name, part.rows.number(at)

    def where(self, index: int) -> str:
        """Names the row in messages."""
        part, at = self._place(index)
        return part.rows.where(at)

    def folder(self, index: int) -> Path | None:
        """Folder of the row's file, if it is one."""
        rows = self._place(index)[0].rows
        return rows.folder if isinstance(rows, JsonlFile) else None

    def _place(self, index: int) -> tuple[TablePart, int]:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]


def open_table(config: TableConfig, tokenizer_path: Path | None = None) -> Table:
    """
    Args:
        tokenizer_path: for a class of the user's, which is given the tokenizer.

    Raises:
        DataError: there is nothing, or it cannot be read.
    """
    if isinstance(config, HuggingFaceSource):
        parts = [_hugging_face(config)]
    elif isinstance(config, CustomSource):
        files = _files(config.path, "")
        tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path, "cls")
        rows = CustomRows(config, [file.path for file in files], tokenizer)
        parts = [TablePart(config.cls.rpartition(":")[2], rows)]
    elif isinstance(config, ParquetSource):
        files = _files(config.path, ".parquet")
        parts = [
            TablePart(name, ArrowRows(config, name, _load(config, "parquet", str(file.path))))
            for name, file in zip(_names(files), files, strict=True)
            if _has_rows(file)
        ]
    else:
        files = _files(config.path, ".jsonl")
        parts = [TablePart(n, JsonlFile(f)) for n, f in zip(_names(files), files, strict=True)]
    table = Table(parts)
    if not len(table):
        raise DataError(
            f"{describe(config)} has no tasks; write one JSON object per line, or a row"
        )
    return table


def describe(config: SourceConfig) -> str:
    """Return the name of the data for messages."""
    if isinstance(config, ReasoningGymSource):
        return f"data set {config.dataset!r}"
    if isinstance(config, HuggingFaceSource):
        return f"data set {config.path!r} ({config.split})"
    if isinstance(config, CustomSource):
        return f"data set {config.cls!r}"
    if isinstance(config, VerifiersSource):
        return f"taskset {config.taskset!r}"
    return ", ".join(map(str, config.path if isinstance(config.path, tuple) else (config.path,)))


class DataFile(NamedTuple):
    shown: str
    """Name in messages and ids: the file's path or, if it was fetched, its address."""
    path: Path
    """Path of the file on this machine."""


def _files(paths: Path | str | Sequence[Path | str], suffix: str) -> list[DataFile]:
    """The files that `path` names, in order; what is elsewhere is brought here."""
    found: list[DataFile] = []
    for path in [paths] if isinstance(paths, Path | str) else paths:
        if is_remote(path):
            try:
                found += starmap(DataFile, fetch_files(str(path), suffix, "path"))
            except BackendConfigError as e:
                raise DataError(str(e)) from e
            continue
        path = Path(path)
        if path.is_dir():
            matches = sorted(path.glob(f"*{suffix}"))
        elif path.exists():
            matches = [path]
        else:
            matches = [Path(p) for p in sorted(glob(str(path), recursive=True))]
        if not matches:
            raise DataError(
                f"path is {str(path)!r}, which cannot be read (no such file, or no *{suffix} in "
                f"that folder); name a {suffix} file, a folder of them or a glob pattern"
            )
        found += [DataFile(str(match), match) for match in matches]
    return found


def _names(files: Sequence[DataFile]) -> list[str]:
    """A name for each file that no other has, as short as may be: ids are made of it."""
    shown = [Path(file.shown.replace("://", "/")) for file in files]
    for depth in range(1, 1 + max(len(f.parts) for f in shown)):
        names = ["-".join(f.with_suffix("").parts[-depth:]) for f in shown]
        if len(set(names)) == len(names):
            return names
    raise DataError(f"path names {files[0].shown} twice; name each file once")


def _has_rows(file: DataFile) -> bool:
    """`datasets` cannot load a Parquet file without rows."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    try:
        return bool(pq.read_metadata(file.path).num_rows)
    except (OSError, pa.ArrowInvalid) as e:
        raise DataError(f"{file.shown} cannot be read ({e}); name Parquet files") from e


# ── JSONL ────────────────────────────────────────────────────────────────────────────────────────


class JsonlFile:
    """Lines of a file by index: their places are kept, their text stays on disk."""

    def __init__(self, file: DataFile) -> None:
        self._shown = file.shown
        self.folder = file.path.parent
        self._lines = array("Q")
        """Three numbers per row: its line's number, and the bytes at which the line begins and
        ends."""
        try:
            self._file = file.path.open("rb")
        except OSError as e:
            raise DataError(
                f"path is {file.shown!r}, which cannot be read ({e}); name a UTF-8 JSONL file"
            ) from e
        at = 0
        for number, line in enumerate(self._file, 1):
            mark = len(BOM_UTF8) if number == 1 and line.startswith(BOM_UTF8) else 0
            if line[mark:].strip():
                self._lines.extend((number, at + mark, at + len(line)))
            at += len(line)

    def __len__(self) -> int:
        return len(self._lines) // 3

    def __getitem__(self, index: int) -> DataRow:
        _, begin, end = self._lines[3 * index : 3 * index + 3]
        line = os.pread(self._file.fileno(), end - begin, begin).rstrip(b"\r\n")
        try:
            # Not orjson: it makes floats of integers beyond 64 bits.
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as e:  # no UTF-8, or thousands of brackets, too
            why = f"column {e.colno}: {e.msg}" if isinstance(e, json.JSONDecodeError) else e
            raise DataError(
                f"{self.where(index)} is no JSON (line {self.number(index)}, {why}); write one "
                "object per line, in UTF-8"
            ) from e
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(index)} holds a {type(row).__name__}; write one object per line"
            )
        return row

    def __iter__(self) -> Iterator[DataRow]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        """Names the row in messages."""
        return f"{self._shown}:{self.number(index)}"

    def number(self, index: int) -> int:
        """The row's line, for its id."""
        return self._lines[3 * index]


# ── Arrow ────────────────────────────────────────────────────────────────────────────────────────


class ArrowRows:
    """A `datasets.Dataset`, memory-mapped; only the columns that tasks are made of are read."""

    def __init__(self, config: TableConfig, name: str, dataset: Any) -> None:
        self._name = name
        self._columns = Columns(config)
        image = self._columns.image
        if image in dataset.column_names:
            dataset = dataset.cast_column(image, _undecoded(dataset.features[image]))
        columns = [c for c in dataset.column_names if c in self._columns or c == image]
        self._others = dict.fromkeys(c for c in dataset.column_names if c not in columns)
        """Read by nobody; a message may name them."""
        self._rows = dataset.select_columns(columns) if columns else dataset
        for column in dataset.column_names:
            if (
                column != image
                and column in MEDIA
                and (row := _first_held(dataset, column)) is not None
            ):
                raise holds_media(self.where(row), column)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> DataRow:
        return self._read(self._rows[index])

    def __iter__(self) -> Iterator[DataRow]:
        return map(self._read, self._rows)  # many at a time, where one by one costs ten times more

    def _read(self, stored: DataRow) -> DataRow:
        return {**self._others, **self._columns.read(stored)}

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"

    def number(self, index: int) -> int:
        return index


def _undecoded(feature: Any) -> Any:
    """Images as the bytes and paths that are stored."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    return feature


def _first_held(dataset: Any, column: str) -> int | None:
    """The first row with something in the column. Nothing is decoded or copied."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.compute as pc  # type: ignore[import-untyped,unused-ignore]

    stored = dataset.select_columns([column]).with_format("arrow")
    for begin in range(0, len(dataset), 1000):
        values = stored[begin : begin + 1000][column]
        held = values.is_valid()
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            held = pc.and_(held, pc.greater(pc.fill_null(pc.list_value_length(values), 0), 0))
        elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            held = pc.and_(held, pc.greater(pc.fill_null(pc.binary_length(values), 0), 0))
        if (row := held.index(pa.scalar(True)).as_py()) >= 0:
            return begin + int(row)
    return None


def _hugging_face(config: HuggingFaceSource) -> TablePart:
    folder = Path(config.path)
    if (
        is_remote(config.path)
        or (folder / "state.json").is_file()
        or (folder / "dataset_dict.json").is_file()
    ):
        dataset = _load_from_disk(config)
    elif folder.is_file():
        builder, options = _format_of(folder)
        dataset = _load(config, builder, str(folder), split=config.split, **options)
    else:
        dataset = _load_from_hub(config)
    stem = folder.stem if folder.exists() else config.path
    name = stem if config.split == "train" else f"{stem}-{config.split}"
    return TablePart(name, ArrowRows(config, name, dataset))


def _format_of(file: Path) -> tuple[str, dict[str, Any]]:
    """Builder of `datasets` for a file, and its options.

    Raises:
        DataError: there is none for such files, or the file has no header.
    """
    *_, kind = ["", *(s for s in file.suffixes if s not in _PACKED)]
    if kind not in _FORMATS:
        raise DataError(
            f"path is {str(file)!r}, and no {kind or 'file without an ending'} is read; name a "
            f"file that ends in {', '.join(_FORMATS)} (or such a file in {', '.join(_PACKED)})"
        )
    builder = _FORMATS[kind]
    return builder, _text_columns(file, "\t" if kind == ".tsv" else ",") if builder == "csv" else {}


def _text_columns(file: Path, separator: str) -> dict[str, Any]:
    """Options with which a cell of a CSV file is its text, or None if it is empty. A guess would
    make 7.0 of 7 where another cell of the column is empty, 7 of 007, and nothing of NA."""
    import datasets
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    try:
        first = pd.read_csv(file, sep=separator, nrows=1)
    except (OSError, ValueError) as e:
        raise DataError(
            f"{file} cannot be loaded: {type(e).__name__}: {e!s:.300}; write UTF-8, with the names "
            "of the columns in the first line"
        ) from e
    if not isinstance(first.index, pd.RangeIndex):  # the first cell would be no column's
        raise DataError(
            f"{file} has more cells in a row than names in its first line; quote a cell with a "
            f"{separator!r} in it, or end rows without it"
        )
    features = datasets.Features({name: datasets.Value("string") for name in first.columns})
    missing = {"keep_default_na": False, "na_values": [""]}
    return {"sep": separator, "features": features, **missing}


_FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_PACKED = (".gz", ".bz2", ".xz", ".zst")


def _load_from_hub(config: HuggingFaceSource) -> Any:
    where = {"name": config.name, "split": config.split, "revision": config.revision}
    if not is_hub_id(config.path):  # a folder of data, or a name of before there were owners
        return _load(config, config.path, **where)
    with offline_if_unreachable(config.path, config.revision) as reached:
        try:
            return _load(config, config.path, **where)
        except DataError as e:
            if reached:
                raise
            raise DataError(
                f"path is {config.path!r}, which is no folder here, and the hub cannot be reached: "
                "this machine is offline, or HF_HUB_OFFLINE is set; run `hf download --repo-type "
                f"dataset {config.path}` where there is a network and copy the folder here"
            ) from e


def _load_from_disk(config: HuggingFaceSource) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(config.path)
    except (OSError, ValueError, ImportError) as e:
        raise DataError(f"path is {config.path!r}, which cannot be loaded ({e!s:.300})") from e
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if config.split not in loaded:
        raise DataError(
            f"split is {config.split!r}; {config.path} was saved with {', '.join(loaded)}"
        )
    return loaded[config.split]


def _load(config: TableConfig, path: str, files: str | None = None, **options: Any) -> Any:
    import datasets

    if files is not None:
        options = {"data_files": files, "split": "train"} | options
    with _no_progress_bars(datasets):
        try:
            return datasets.load_dataset(path, **options)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as e:
            why = e.__cause__ or e  # DatasetGenerationError says nothing itself
            raise DataError(
                f"{files or describe(config)} cannot be loaded: {type(why).__name__}: "
                f"{why!s:.300}; check path, name, split and revision"
            ) from e


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    """They would be drawn into the trainer's own display."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
