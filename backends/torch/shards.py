"""A backend's tensors on disk, in shards: every rank writes and checks its own files.

    begin     rank r ──copy to the CPU──► training goes on
                        └─ thread ──► __r_0.distcp, synced          (torch.distributed.checkpoint)
    wait      each rank's digests ──► rank 0: checksums.json        now the folder is whole
    read      rank r checks files r, r + n, …; then each reads the pieces that its shards need

A folder knows the names and shapes of tensors, not ranks: what four wrote, two or one read. One
process without others writes at once, in `begin`. The ranks agree in a group of their own, which
the collectives of training do not meet.

Does not own which tensors there are (`torch/backend.py`), nor when the folder becomes a checkpoint
(`trainer/checkpoint.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from stepwell.backends.errors import BackendError, checkpoint_remedy
from stepwell.backends.torch.fsdp import Ranks
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.sealed import CHECKSUMS, check, digests, fsync, read_sealed, write_sealed


class Stored(NamedTuple):
    """A tensor in a folder."""

    shape: torch.Size
    dtype: torch.dtype


class ShardWriter:
    """Writes one folder after the other; all ranks make the same calls."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: Any = None
        self._folder: Path | None = None
        self._writing: Future[Any] | None = None

    def begin(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Copy `tensors` and begin to write them into `folder`; they may change from now on.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # It syncs each file.
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        if self._ranks.size == 1:
            with _quiet(), _plain_errors():
                save(dict(tensors), storage_writer=writer, no_dist=True)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        self._writing = cast(
            "Future[Any]",
            async_save(dict(tensors), storage_writer=writer, process_group=self._group),
        )

    def wait(self) -> None:
        """Return when the folder is whole and synced. May be called in another thread than `begin`.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        folder, writing = self._folder, self._writing
        if folder is None:
            return
        self._folder = self._writing = None
        rank, size = self._ranks.rank, self._ranks.size
        if writing is not None:
            with _plain_errors():
                writing.result()
        mine = f"__{rank}_*" if size > 1 else "__*"
        files = sorted(folder.glob(mine)) + ([folder / ".metadata"] if rank == 0 else [])
        found: list[Any] = [None] * size
        if size > 1:
            dist.all_gather_object(found, digests(files), group=self._group)
        else:
            found = [digests(files)]
        if rank == 0:
            write_sealed(folder / CHECKSUMS, {k: v for part in found for k, v in part.items()})
            fsync(folder)


def stored_tensors(folder: Path, ranks: Ranks) -> dict[str, Stored]:
    """Names, shapes and types in `folder`, whose files are checked first, by all ranks together.

    Raises:
        DamagedFileError: a file is not what was written; on every rank.
    """
    remedy = checkpoint_remedy(folder.parent)
    error: str | None = None
    try:
        check(folder, remedy, ())
        listed = sorted(read_sealed(folder / CHECKSUMS, remedy))
        check(folder, remedy, listed[ranks.rank :: ranks.size])
    except (DamagedFileError, OSError) as e:
        error = str(e)
    if damage := [text for text in ranks.gather(error) if text is not None]:
        raise DamagedFileError(damage[0])
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: Stored(found.size, found.properties.dtype)
        for name, found in metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }


def read_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill `tensors`, which may be sharded, in place from `folder`.

    Raises:
        BackendError: a name or a shape is not there.
    """
    try:
        with _quiet(), torch.no_grad():
            load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=ranks.size == 1)
    except CheckpointException as e:
        raise BackendError(f"{folder} cannot be read ({e.failures})") from e


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch's error is a BaseException, which would pass by all that expect a full disk."""
    try:
        yield
    except CheckpointException as e:
        failure, _ = next(iter(e.failures.values()))
        if isinstance(failure, OSError):
            raise failure from e
        raise RuntimeError(str(failure) or repr(failure)) from e


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that one process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        yield
