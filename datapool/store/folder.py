"""This module keeps a journal's folder for one process, and what was acknowledged in `pool.acked`,
so that a loss is noticed and no former process writes beside its successor.

    lock on the folder       one process at a time; the kernel lets go of it when that one dies
    lock on `pool.acked`     one transaction at a time: whoever holds it looks whether the record is
                             still its own (`Acked.opening`), writes, records, lets go

A successor that takes the folder from a process that was declared dead, and may only stand still,
writes its own `opening` into the record while it holds the second lock. From then on the former one
can write nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from stepwell.datapool.errors import JournalError, JournalLockedError, JournalVersionError

logger = logging.getLogger(__name__)

ACKED_NAME = "pool.acked"
SCHEMA_VERSION = 4
"""Raised with every change that a journal of before would not survive; that one is refused."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MAGIC = b"swpool-%d" % SCHEMA_VERSION
_FORMAT = struct.Struct("<8s16sqqqqqqI16s??q")
_CRC = struct.Struct("<I")
_BEFORE = "pool.sqlite3"
"""The file of version 3 and before."""

_T = TypeVar("_T")


class Acked(NamedTuple):
    """What `pool.acked` says of the last transaction that was acknowledged, or found."""

    journal: bytes
    """16 random bytes, made with the journal."""
    opening: int
    """How often the journal was opened."""
    sequence: int = 0
    """Number of the transaction; 0: none yet, and no segment."""
    next_row: int = 0
    rows: int = 0
    """Live ones."""
    segment: int = 0
    end: int = 0
    """Length of this segment."""
    crc: int = 0
    """Of its last block, which stands for all before it."""
    boot: bytes = bytes(16)
    """`process.boot_id` when it was written; zeros where there is none."""
    power: bool = False
    """Durability `power`."""
    closed: bool = False
    """The journal was closed and synced; nothing can be missing, whatever the machine did."""
    pid: int = 0
    """Who has, or had, the journal open."""

    def pack(self) -> bytes:
        body = _FORMAT.pack(_MAGIC, *self)
        return body + _CRC.pack(crc32(body))

    def owns(self, file: int) -> bool:
        """Whether the record in `file` was written by the same opening of the journal."""
        return os.pread(file, 32, 0) == _FORMAT.pack(_MAGIC, *self)[:32]


def read_acked(folder: Path) -> Acked | None:
    """What `pool.acked` in `folder` says; None if there is none.

    Raises:
        ValueError: it is damaged.
        JournalVersionError: a journal of another version is there.
    """
    try:
        with (folder / _BEFORE).open("rb") as file:
            raise _of_version(folder, int.from_bytes(file.read(100)[60:64], "big"))
    except FileNotFoundError:
        pass  # as it should be
    try:
        data = (folder / ACKED_NAME).read_bytes()
    except FileNotFoundError:
        return None
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    if crc != _CRC.pack(crc32(body)) or body[:7] != _MAGIC[:7]:
        raise ValueError(f"{folder / ACKED_NAME} is damaged")
    if body[7:8] != _MAGIC[7:8]:
        raise _of_version(folder, int(body[7:8], 36))
    return Acked._make(_FORMAT.unpack(body)[1:])


def _of_version(folder: Path, version: int) -> JournalVersionError:
    return JournalVersionError(
        f"{folder}: the journal has schema version {version}, this release reads and writes "
        f"{SCHEMA_VERSION}; start the release that wrote it, or begin anew: set run.resume=never, "
        f"or move {folder} aside"
    )


def lost_between(sequence: int, next_row: int, n_rows: int, acked: Acked) -> str:
    """What was acknowledged and is not there: all after this transaction."""
    rows = f"rows {next_row} to {acked.next_row - 1}"
    if next_row == acked.next_row:
        rows = "no new rows"
    return (
        f"Acknowledged transactions {sequence + 1} to {acked.sequence} are lost: {rows}, and "
        f"deletions; {n_rows} rows are there, {acked.rows} should be."
    )


def journal_exists(folder: Path) -> bool:
    """Whether there is a journal in `folder`, of whatever version."""
    return any((folder / name).exists() for name in (ACKED_NAME, _BEFORE))


def make_folder(folder: Path) -> list[Path]:
    """Creates `folder`, for its owner only; returns the parents that got a new entry."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise JournalError(
            f"the journal's folder {folder} cannot be created ({e}); "
            "set pool.journal_dir to one that can be written"
        ) from e
    return [path.parent for path in missing]


def holder(folder: Path) -> str | None:
    """The process that has the journal in `folder` open; None if nobody has."""
    try:
        os.close(_take(folder))
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return pid_of_holder(folder)
    return None


def lock_folder(folder: Path, timeout_s: float) -> int:
    """Takes the folder for this process. The lock is on the folder, not on a file in it, which
    somebody might remove.

    Raises:
        JournalLockedError: another process has it.
    """
    try:
        return _patiently(lambda: _take(folder), timeout_s)
    except BlockingIOError:
        raise JournalLockedError(
            f"{folder} is in use by process {pid_of_holder(folder)} (waited {timeout_s} s); "
            "stop that process, or set pool.journal_dir to another folder"
        ) from None
    except OSError as e:
        raise JournalError(
            f"{folder} cannot be locked ({e}); set pool.journal_dir to a local disk"
        ) from e


def take_folder(folder: Path, timeout_s: float, take_over: int | None) -> tuple[int, bool]:
    """A descriptor of the folder, and whether the folder is locked by it; not, if that is still
    with the process `take_over`.

    Raises:
        JournalLockedError: as `lock_folder`.
    """
    try:
        return lock_folder(folder, timeout_s), True
    except JournalLockedError as e:
        if pid_of_holder(folder) != str(take_over):
            raise
        logger.warning("%s; it was declared dead and can write nothing more from now on", e)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), False


def lock_acked(file: int, folder: Path, timeout_s: float) -> None:
    """Waits for the end of a transaction of the former process.

    Raises:
        JournalLockedError: it stands still in the middle of one.
    """
    try:
        _patiently(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), timeout_s)
    except BlockingIOError:
        raise JournalLockedError(
            f"{folder}: process {pid_of_holder(folder)} is in the middle of a write; stop it"
        ) from None


def pid_of_holder(folder: Path) -> str:
    """For a message."""
    with contextlib.suppress(OSError, ValueError):
        acked = read_acked(folder)
        if acked is not None:
            return str(acked.pid)
    return "unknown"


def private(path: str, flags: int) -> int:
    """Opens a file; a new one is its owner's only."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def fsync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power failure."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise JournalError(
            f"{path} cannot be synced ({e}), so what is in it might not survive a power "
            "failure; set pool.journal_dir to a local disk, or durability to 'process'"
        ) from e


def _take(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:  # whatever stops it, the descriptor is not kept
        os.close(fd)
        raise
    return fd


def _patiently(action: Callable[[], _T], timeout_s: float) -> _T:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return action()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
