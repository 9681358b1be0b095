"""Pictures in files beside a journal.

    FOLDER/pictures/secret       what keys are made with
    FOLDER/pictures/<key>        PNG │ XXH3-128 of it

A file appears under its name when it is whole; the draft that a killed process leaves is removed as
a picture that no row refers to. The name of each is known in memory, with its size,
so that asking for one that is not here touches no disk. A picture that is damaged, or that the
machine lost (`durability: process`), is one typed error; sent again, it is there again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from xxhash import xxh3_128_digest

from stepwell.datapool.core.pictures import SECRET_BYTES, PictureStore
from stepwell.datapool.errors import DamagedFileError, JournalError, JournalFullError
from stepwell.datapool.sealed import damaged
from stepwell.datapool.store.folder import NO_SPACE, fsync, private

PICTURES: Final = "pictures"
"""Name of the folder, beside the journal's segments."""
SECRET: Final = "secret"
SUM_BYTES: Final = 16
_DRAFT: Final = ".tmp"


class PictureFolder(PictureStore):
    """The pictures in `folder`, which is made with the first one.

    Args:
        power: a stored picture survives a power failure.
    """

    in_memory = False

    def __init__(self, folder: Path, *, power: bool) -> None:
        super().__init__()
        self.folder = folder
        self._power = power
        self._sizes: dict[str, int] = {}
        self._is_made = False
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                n_bytes = entry.stat().st_size - SUM_BYTES
                if entry.name == SECRET:
                    # A lost one only makes keys anew: what rows refer to, they name by key.
                    if n_bytes == SECRET_BYTES - SUM_BYTES:
                        self._secret = (folder / SECRET).read_bytes()
                        self._is_made = True
                elif n_bytes > 0 or entry.name.endswith(_DRAFT):
                    # A draft is of a process that was killed: no row refers to it.
                    self._sizes[entry.name] = n_bytes

    def size(self, key: str) -> int:
        return self._sizes.get(key, 0)

    def keys(self) -> Collection[str]:
        return self._sizes.keys()

    def put(self, key: str, data: bytes) -> None:
        try:
            if not self._is_made:
                self._make()
            self._write(key, data, xxh3_128_digest(data))
        except OSError as e:
            kind = JournalFullError if e.errno in NO_SPACE else JournalError
            raise kind(
                f"{self.folder}: a picture of {len(data)} bytes cannot be stored ({e}); free space "
                "on the disk of pool.journal_dir, or set it to a folder that can be written"
            ) from e
        self._sizes[key] = len(data)

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._write(SECRET, self._secret)
        if self._power:
            fsync(self.folder.parent)
        self._is_made = True

    def _write(self, name: str, *pieces: bytes) -> None:
        draft = self.folder / f"{name}{_DRAFT}"
        try:
            file = private(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                for piece in pieces:
                    left = memoryview(piece)
                    while left:
                        left = left[os.write(file, left) :]
                if self._power:
                    os.fsync(file)
            finally:
                os.close(file)
            draft.rename(self.folder / name)
        except BaseException:  # also an interrupt: no draft stays
            with contextlib.suppress(OSError):  # the first error is the reason
                draft.unlink(missing_ok=True)
            raise
        if self._power:
            fsync(self.folder)

    def read(self, key: str) -> bytes:
        remedy = (
            f"stop the pool and run `stepwell data salvage {self.folder.parent}`, which drops the "
            "groups that need it"
        )
        try:
            return read_picture(self.folder / key, remedy)
        except DamagedFileError:
            self._sizes.pop(key, None)  # it is asked for again by the next Step that shows it
            raise

    def remove(self, key: str) -> None:
        (self.folder / key).unlink(missing_ok=True)
        self._sizes.pop(key, None)


def read_picture(path: Path, remedy: str = "delete its trajectory") -> bytes:
    """The bytes of a picture's file.

    Raises:
        DamagedFileError: it is not what was written, or gone.
    """
    try:
        content = path.read_bytes()
    except OSError as e:
        raise damaged(path, str(e), remedy) from e
    data = content[:-SUM_BYTES]
    if not data or xxh3_128_digest(data) != content[-SUM_BYTES:]:
        raise damaged(path, "it is not what was written", remedy)
    return data
