"""The folder of an archive: names of its files, who may write, what was deleted, what is too old.

    trajectories/0-1f3a5b7c-000000000012-000000000980.parquet     shard, journal, first and last row
    feedback/     the same for rewards that came late
    pictures/0-1f3a5b7c-000000000012-000000000980/KEY     of that file's rows, as the pool's
    catalogue-0.sqlite     of shard 0        lock-0     whoever writes files of shard 0 holds it
    deleted.jsonl          tombstones, a sealed line each

A name says which rows of which journal are in the file. After a crash the same rows get the same
name again, or a longer range: rows that are in two files are the same.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from stepwell.datapool.files.tombstones import (
    DELETED,
    Deletions,
    Tombstone,
    add_tombstones,
    read_tombstones,
)
from stepwell.datapool.sealed import fsync, write_durably
from stepwell.datapool.store.picture_folder import read_picture

TRAJECTORIES: Final = "trajectories"
FEEDBACK: Final = "feedback"
PICTURES: Final = "pictures"
RESERVE_BYTES: Final = 512 << 20
"""Bytes that the archive leaves free on its disk: the journal needs them."""
IMPORTED: Final = "imported"
"""In place of a journal in the names of files that are no pool's."""
_NAME: Final = re.compile(r"(\d+)-([0-9a-f]{8}|imported)-(\d{12})-(\d{12})\.parquet")


class FileName(NamedTuple):
    """A file's name, taken apart."""

    shard: int
    journal: str
    first: int
    last: int

    @property
    def text(self) -> str:
        return f"{self.shard}-{self.journal}-{self.first:012d}-{self.last:012d}.parquet"

    @classmethod
    def of(cls, name: str) -> FileName | None:
        if (match := _NAME.fullmatch(name)) is None:
            return None
        shard, journal, first, last = match.groups()
        return cls(int(shard), journal, int(first), int(last))

    def covers(self, other: FileName) -> bool:
        """Return whether all rows of the other file are in the range of this one."""
        is_same = (other.shard, other.journal) == (self.shard, self.journal)
        return is_same and self.first <= other.first and other.last <= self.last


class PictureFiles(Mapping[str, bytes]):
    """PNG of pictures beside files by digest, each read when it is asked for.

    Args:
        paths: their files, by digest.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def __getitem__(self, digest: str) -> bytes:
        return read_picture(self._paths[digest])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class ArchiveFolder:
    """The files of an archive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def exists(self) -> bool:
        return (self.path / TRAJECTORIES).is_dir()

    def make(self) -> None:
        for folder in (self.path, self.path / TRAJECTORIES, self.path / FEEDBACK):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def catalogue(self, shard: int) -> Path:
        return self.path / f"catalogue-{shard}.sqlite"

    def remove_catalogue(self, shard: int) -> None:
        """Remove a catalogue, which is made anew of the files. For who holds the lock."""
        for end in ("", "-wal", "-shm"):
            Path(f"{self.catalogue(shard)}{end}").unlink(missing_ok=True)

    def shards(self) -> list[int]:
        """Numbers of the shards that have files or a catalogue here."""
        named = {name.shard for kind in (TRAJECTORIES, FEEDBACK) for name in self.names(kind)}
        found = self.path.glob("catalogue-*.sqlite")
        return sorted(named | {int(path.stem.removeprefix("catalogue-")) for path in found})

    def names(self, kind: str, shard: int | None = None) -> list[FileName]:
        """Names of the files of a kind, by journal and first row."""
        folder = self.path / kind
        entries = os.listdir(folder) if folder.is_dir() else ()
        found = (name for entry in entries if (name := FileName.of(entry)) is not None)
        return sorted(name for name in found if shard in (None, name.shard))

    def file(self, kind: str, name: FileName | str) -> Path:
        return self.path / kind / (name if isinstance(name, str) else name.text)

    def remove_drafts(self, shard: int) -> None:
        """Remove what writers of this shard's files left half written when they were killed. For
        who holds the lock: there is no other writer."""
        for kind in (TRAJECTORIES, FEEDBACK):
            for draft in (self.path / kind).glob(f"{shard}-*.tmp"):
                draft.unlink(missing_ok=True)

    def write(self, kind: str, name: FileName, content: bytes) -> None:
        """Write a file durably, in place of one of this name."""
        write_durably(self.file(kind, name), content, private=True)

    @contextmanager
    def locked(self, shard: int) -> Iterator[None]:
        """Nobody else writes files of this shard inside the block."""
        with open(self.path / f"lock-{shard}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- pictures ----------------------------------------------------------------------------

    def pictures(self, name: FileName | str) -> Path:
        """The folder of the pictures of a file's rows."""
        text = name if isinstance(name, str) else name.text
        return self.path / PICTURES / text.removesuffix(".parquet")

    def names_of_pictures(self, shard: int) -> list[str]:
        """Names of the files of a shard that have pictures, whether they are there or not."""
        folders = (self.path / PICTURES).glob(f"{shard}-*")
        return [f"{folder.name}.parquet" for folder in folders]

    def add_pictures(self, name: FileName, source: Path, keys: Iterable[str]) -> list[str]:
        """Put pictures beside a file, durably, before it is written: linked where that can be, else
        copied. Returns the keys of those that are not in `source`.

        Raises:
            OSError: one cannot be written.
        """
        folder = self.pictures(name)
        missing = []
        for key in keys:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (target := folder / key).exists():
                continue
            try:
                os.link(source / key, target)
            except FileNotFoundError:
                missing.append(key)
                continue
            except OSError:  # another disk
                write_durably(target, (source / key).read_bytes(), private=True)
            fsync(target)
        if folder.is_dir():
            fsync(folder)
        return missing

    def keep_pictures(self, name: FileName | str, keys: Collection[str]) -> None:
        """Remove the pictures beside a file that its rows do not name."""
        folder = self.pictures(name)
        if not folder.is_dir():
            return
        for picture in list(folder.iterdir()):
            if picture.name not in keys:
                picture.unlink(missing_ok=True)
        if not keys:
            folder.rmdir()

    def picture_bytes(self, name: FileName | str) -> int:
        """Bytes of the pictures beside a file."""
        folder = self.pictures(name)
        return sum(_size(path) for path in folder.iterdir()) if folder.is_dir() else 0

    # -- bounds ------------------------------------------------------------------------------

    def n_bytes(self, shard: int | None = None) -> int:
        """Bytes of files and catalogues."""
        total = 0
        for kind in (TRAJECTORIES, FEEDBACK):
            total += sum(_size(self.file(kind, name)) for name in self.names(kind, shard))
        total += sum(self.picture_bytes(name) for name in self.names(TRAJECTORIES, shard))
        for each in self.shards() if shard is None else [shard]:
            total += sum(_size(Path(f"{self.catalogue(each)}{end}")) for end in ("", "-wal"))
        return total

    def has_space(self, n_bytes: int) -> bool:
        """Return whether so many bytes can be written without taking the journal's reserve."""
        return shutil.disk_usage(self.path).free - n_bytes > RESERVE_BYTES

    # -- tombstones --------------------------------------------------------------------------

    def add_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Append tombstones, durably: what they name is filtered from now on. Raises as
        `tombstones.add_tombstones`."""
        add_tombstones(self.path / DELETED, tombstones)

    def tombstones(self) -> list[Tombstone]:
        """All deletions.

        Raises:
            DamagedFileError: the file of tombstones is not what was written.
        """
        return read_tombstones(self.path / DELETED)

    def deletions(self) -> Deletions:
        """All deletions, to look rows up in. Raises as `tombstones`."""
        return Deletions(self.tombstones())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
