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
import io
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson

from stepwell.datapool.sealed import damaged, fsync, read_lines, sealed, write_durably
from stepwell.datapool.store.picture_folder import read_picture

TRAJECTORIES: Final = "trajectories"
FEEDBACK: Final = "feedback"
PICTURES: Final = "pictures"
DELETED: Final = "deleted.jsonl"
RESERVE_BYTES: Final = 512 << 20
"""Bytes that the archive leaves free on its disk: the journal needs them."""
Kind: TypeAlias = Literal["trajectory", "user", "tag"]
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


class Tombstone(NamedTuple):
    """A deletion: of one trajectory, of all of a user, of all with a tag."""

    kind: Kind
    value: str
    at: float
    """Time of the deletion, seconds since 1970. Of a user or a tag, what was opened later stays."""


class Deletions:
    """All deletions, by what they name: a row costs the same with many of them."""

    def __init__(self, tombstones: Iterable[Tombstone]) -> None:
        self._times: dict[tuple[Kind, str], float] = {}
        for kind, value, at in tombstones:
            self._times[kind, value] = max(at, self._times.get((kind, value), at))

    def __bool__(self) -> bool:
        return bool(self._times)

    @property
    def uids(self) -> set[str]:
        """Trajectories that were deleted by their uids."""
        return {value for kind, value in self._times if kind == "trajectory"}

    def meets(self, row: Mapping[str, Any]) -> bool:
        """Return whether a trajectory with these columns is deleted. Without `opened_at`, only by
        its uid."""
        if ("trajectory", row["trajectory_uid"]) in self._times:
            return True
        names: list[tuple[Kind, str]] = [("tag", tag) for tag in row.get("tags") or ()]
        if row.get("user") is not None:
            names.append(("user", row["user"]))
        times = [self._times[name] for name in names if name in self._times]
        return bool(times) and row["opened_at"].timestamp() <= max(times)


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

    def add_tombstones(self, tombstones: list[Tombstone]) -> None:
        """Append tombstones, durably: what they name is filtered from now on.

        Raises:
            OSError: they cannot be written; none of them is there.
            DamagedFileError: the file of tombstones is not what was written.
        """
        lines = b"".join(sealed(orjson.dumps(each._asdict())) for each in tombstones)
        path = self.path / DELETED
        with open(path, "a+b", 0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.tombstones()  # a damaged end is not cut off as half a line
            end = _end_of_lines(file)
            file.truncate(end)  # half a line of one who died would spoil the next
            try:
                while lines:
                    lines = lines[file.write(lines) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        fsync(path.parent)

    def deletions(self) -> Deletions:
        """All deletions, to look rows up in.

        Raises:
            DamagedFileError: the file of tombstones is not what was written.
        """
        return Deletions(self.tombstones())

    def tombstones(self) -> list[Tombstone]:
        """All deletions.

        Raises:
            DamagedFileError: the file of tombstones is not what was written.
        """
        path = self.path / DELETED
        if not path.is_file():
            return []
        found = []
        for offset, line in read_lines(path):
            if line is None:
                raise damaged(
                    path,
                    f"the line at byte {offset} is not what was written",
                    "restore it from a copy; without it what was deleted could come back",
                )
            each = orjson.loads(line)
            found.append(Tombstone(each["kind"], each["value"], each["at"]))
        return found


def tombstone(kind: Kind, value: str) -> Tombstone:
    return Tombstone(kind, value, time.time())


def _end_of_lines(file: io.FileIO) -> int:
    """Bytes up to the end of the last whole line."""
    end = at = file.seek(0, os.SEEK_END)
    while at:
        start = max(0, at - 4096)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return min(end, start + found + 1)
        at = start
    return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
