"""Tables by index: where the rows of a data set lie, and how one is read.

    JsonlTable   an index of line offsets; a line is parsed when its row is asked for
    ArrowTable   Parquet and Hugging Face data sets, memory-mapped by the `datasets` library; a row
                 becomes Python objects when it is asked for

Owns: files, formats, the place of a row for messages and ids. Does not own: what a row means
(`tasks.py`).
"""

from __future__ import annotations

import base64
import json
import mmap
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import accumulate
from pathlib import Path
from typing import Any

from stepwell.backends.hub import is_hub_id, offline_if_unreachable
from stepwell.trainer.config import (
    HuggingFaceSource,
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
    TableConfig,
)
from stepwell.trainer.errors import DataError

SCAN_ROWS = 1000

UNREAD = object()
"""What `scan` gives for a column of media: reading every image to check texts would take hours."""


class Table(ABC):
    """Rows of several parts (files, a split), by index over all of them.

    Args:
        files: what the rows depend on; None if that is not known.
        labels: of each part, for ids.
        sizes: rows of each part.
    """

    def __init__(
        self, files: Sequence[Path] | None, labels: Sequence[str], sizes: Iterable[int]
    ) -> None:
        self.files = files
        self._labels = labels
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def scan(self) -> Iterator[dict[str, Any]]:
        """Every row in order, columns of media `UNREAD` where that saves time."""
        return (self[i] for i in range(len(self)))

    def place(self, index: int) -> tuple[int, int]:
        """The row's part, and its place there."""
        part = bisect_right(self._starts, index) - 1
        return part, index - self._starts[part]

    def label(self, index: int) -> str:
        """Of the part that the row is in."""
        return self._labels[self.place(index)[0]]

    def number(self, index: int) -> int:
        """The row's, in its part."""
        return self.place(index)[1]

    def where(self, index: int) -> str:
        """Names the row in messages."""
        return f"{self.label(index)} row {self.number(index)}"


def lookup(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of `key`, or, reaching into objects, of `key.with.dots`."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


_MAGIC = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


def data_url(data: bytes) -> str:
    kind = next((k for magic, k in _MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
        kind = "image/webp" if webp else "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _files(paths: Path | Sequence[Path], suffix: str) -> list[Path]:
    """The files that `path` names, in order."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, Path) else paths:
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
        found += matches
    return found


def _labels(files: Sequence[Path]) -> list[str]:
    """A name for each file that no other has, as short as may be: ids are made of it."""
    for depth in range(1, 1 + max(len(f.parts) for f in files)):
        labels = ["-".join(f.with_suffix("").parts[-depth:]) for f in files]
        if len(set(labels)) == len(labels):
            return labels
    raise DataError(f"path names {files[0]} twice; name each file once")


def describe(config: SourceConfig) -> str:
    """How messages name the data."""
    if isinstance(config, ReasoningGymSource):
        return f"data set {config.dataset!r}"
    if isinstance(config, HuggingFaceSource):
        return f"data set {config.path!r} ({config.split})"
    return ", ".join(map(str, config.path if isinstance(config.path, tuple) else (config.path,)))


class JsonlTable(Table):
    """Lines of files by index: their offsets are kept, their text stays on disk."""

    def __init__(self, config: JsonlSource) -> None:
        self._paths = _files(config.path, ".jsonl")
        self._maps: list[mmap.mmap | bytes] = []
        self._offsets: list[array[int]] = []
        self._numbers: list[array[int]] = []
        for path in self._paths:
            try:
                self._index(path)
            except OSError as e:
                raise DataError(
                    f"path is {str(path)!r}, which cannot be read ({e}); name a UTF-8 JSONL file"
                ) from e
        super().__init__(self._paths, _labels(self._paths), map(len, self._offsets))
        if not len(self):
            raise DataError(f"{describe(config)} has no tasks; write one JSON object per line")

    def _index(self, path: Path) -> None:
        offsets, numbers = array("Q"), array("Q")
        with path.open("rb") as file:
            at = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    offsets.append(at)
                    numbers.append(number)
                at += len(line)
            # An empty file cannot be mapped.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if at else b""
        self._maps.append(content)
        self._offsets.append(offsets)
        self._numbers.append(numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, at = self.place(index)
        content, start = self._maps[file], self._offsets[file][at]
        end = content.find(b"\n", start)
        return self._parse(content[start : end if end >= 0 else len(content)], index)

    def where(self, index: int) -> str:
        return f"{self._paths[self.place(index)[0]]}:{self.number(index)}"

    def number(self, index: int) -> int:
        """The row's line."""
        file, at = self.place(index)
        return self._numbers[file][at]

    def _parse(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            # Not orjson: it makes floats of integers beyond 64 bits.
            row = json.loads(line.decode())
        except UnicodeDecodeError as e:
            raise DataError(
                f"{self.where(index)} cannot be read ({e}); name a UTF-8 JSONL file"
            ) from e
        except json.JSONDecodeError as e:
            raise DataError(
                f"{self.where(index)} is no JSON (line {self.number(index)}, column {e.colno}: "
                f"{e.msg}); write one object per line"
            ) from e
        if not isinstance(row, dict):
            raise DataError(
                f"{self.where(index)} holds a {type(row).__name__}; write one object per line"
            )
        return row


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


class ArrowTable(Table):
    """A `datasets.Dataset`, memory-mapped; media stay as they are stored."""

    def __init__(
        self,
        config: TableConfig,
        dataset: Any,
        *,
        files: Sequence[Path] | None,
        labels: Sequence[str],
        sizes: Sequence[int],
    ) -> None:
        if not len(dataset):
            raise DataError(f"{describe(config)} has no rows")
        super().__init__(files, labels, sizes)
        self._config = config
        self._features = _json_features(dataset.features)
        # Rows as they are stored: decoding images into pixels would cost, and tasks are JSON.
        self._rows = dataset.with_format("arrow")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(self._rows[index].to_pylist()[0])

    def scan(self) -> Iterator[dict[str, Any]]:
        media = {root_of(key) for key in self._config.multimodal_keys.values()}
        names = self._rows.column_names
        # Reading every image to check the texts would take hours; a bad one shows when it is used.
        checked = self._rows.select_columns([n for n in names if n not in media])
        for table in checked.iter(SCAN_ROWS):
            for row in table.to_pylist():
                yield self._read(row) | dict.fromkeys(media, UNREAD)

    def _read(self, row: dict[str, Any]) -> dict[str, Any]:
        if self._features is not None:
            row = self._features.decode_example(row)
        plain: dict[str, Any] = json_like(row)
        # A table gives every message and tool the fields of all; null is how it says "has none".
        for key in (self._config.prompt_key, self._config.tool_key):
            if key is not None and isinstance(value := lookup(plain, key), list):
                _put(plain, key, [_without_nulls(v, keep=("content",)) for v in value])
        return plain


def root_of(key: str) -> str:
    return key.partition(".")[0]


def _put(row: dict[str, Any], key: str, value: Any) -> None:
    if key not in row and "." in key:
        root, _, rest = key.partition(".")
        _put(row[root], rest, value)
    else:
        row[key] = value


def _without_nulls(value: Any, keep: Iterable[str] = ()) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in keep}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def json_like(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): json_like(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_like(v) for v in value]
    return data_url(value) if isinstance(value, bytes) else str(value)


def _json_features(features: Any) -> Any:
    """`features` with JSON columns to be decoded and media left as they are stored; None: there
    are no JSON columns."""
    import datasets

    json_type = getattr(datasets, "Json", ())  # datasets before 4.7 has none
    found = False

    def visit(feature: Any) -> Any:
        nonlocal found
        if isinstance(feature, dict):
            return {name: visit(inner) for name, inner in feature.items()}
        if isinstance(feature, list):
            return [visit(inner) for inner in feature]
        if hasattr(feature, "feature"):
            return type(feature)(visit(feature.feature))
        if isinstance(feature, json_type):
            found = True
        elif hasattr(feature, "decode_example"):
            return datasets.Value("null")  # of which decoding knows nothing to do
        return feature

    visited = datasets.Features({name: visit(feature) for name, feature in features.items()})
    return visited if found else None


def open_parquet(config: ParquetSource) -> ArrowTable:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    files = _files(config.path, ".parquet")
    try:
        sizes = [pq.read_metadata(f).num_rows for f in files]
    except (OSError, pa.ArrowInvalid) as e:
        raise DataError(
            f"path is {describe(config)!r}, which cannot be read ({e}); name Parquet files"
        ) from e
    filled = [str(f) for f, rows in zip(files, sizes, strict=True) if rows]
    if not filled:
        raise DataError(f"{describe(config)} has no rows")
    dataset = _load(config, "parquet", data_files=filled, split="train")
    return ArrowTable(config, dataset, files=files, labels=_labels(files), sizes=sizes)


def open_hugging_face(config: HuggingFaceSource) -> ArrowTable:
    folder = Path(config.path)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        dataset = _load_from_disk(config)
    elif folder.is_file():
        builder = {".jsonl": "json", ".txt": "text"}.get(folder.suffix, folder.suffix[1:])
        dataset = _load(config, builder, data_files=str(folder), split=config.split)
    else:
        dataset = _load_from_hub(config)
    name = folder.stem if folder.exists() else config.path
    label = name if config.split == "train" else f"{name}-{config.split}"
    stored = [Path(f["filename"]) for f in dataset.cache_files]
    return ArrowTable(config, dataset, files=stored or None, labels=[label], sizes=[len(dataset)])


def _load_from_hub(config: HuggingFaceSource) -> Any:
    where = {"split": config.split, "revision": config.revision}
    if not is_hub_id(config.path):  # a folder of data, or a name of before there were owners
        return _load(config, config.path, config.name, **where)
    with offline_if_unreachable(config.path, config.revision) as reached:
        try:
            return _load(config, config.path, config.name, **where)
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
    except (OSError, ValueError) as e:
        raise DataError(f"path is {config.path!r}, which cannot be loaded ({e!s:.300})") from e
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if config.split not in loaded:
        raise DataError(
            f"split is {config.split!r}; {config.path} was saved with {', '.join(loaded)}"
        )
    return loaded[config.split]


def _load(config: TableConfig, *args: Any, **kwargs: Any) -> Any:
    import datasets

    with _no_progress_bars(datasets):
        try:
            cache_dir = str(config.cache_dir) if config.cache_dir else None
            return datasets.load_dataset(*args, cache_dir=cache_dir, **kwargs)
        except (
            OSError,
            ValueError,
            RuntimeError,
            datasets.exceptions.DatasetsError,
        ) as e:
            why = e.__cause__ or e  # DatasetGenerationError says nothing itself
            raise DataError(
                f"{describe(config)} cannot be loaded: {type(why).__name__}: {why!s:.300}; check "
                "path, name, split and revision"
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
