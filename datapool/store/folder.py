"""This module keeps a journal's folder for one process, and what was acknowledged in `pool.acked`,
so that a loss is noticed and no previous process writes beside its successor.

    lock on the folder       one process at a time; the kernel lets go of it when that one dies
    lock on `pool.acked`     one transaction at a time: whoever holds it looks whether the record is
                             still its own (`LastCommit.opening`), writes, records, lets go

A successor that takes the folder from a process that was declared dead, and may only stand still,
writes its own `opening` into the record while it holds the second lock. From then on the previous
process can write nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as xxh3

from stepwell.datapool.clock import boot_id
from stepwell.datapool.errors import JournalError, JournalLockedError, JournalVersionError
from stepwell.datapool.sealed import write_durably

logger = logging.getLogger(__name__)

ACKED_NAME = "pool.acked"
SCHEMA_VERSION = 7
"""Raised with every change that a journal of before would not survive; that one is refused."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_MAGIC = b"swpool-%d" % SCHEMA_VERSION
_FORMAT = struct.Struct("<8s16sqqqqqQ16s")
_OWNER_BYTES = 32
"""Up to `opening`."""
_SUM_BYTES = 8
BEFORE_NAME = "pool.sqlite3"
"""The file of version 3 and before."""
SYNCED = bytes(16)


class LastCommit(NamedTuple):
    """The content of `pool.acked`: the last transaction that was acknowledged, or found."""

    journal: bytes
    """16 random bytes, made with the journal."""
    opening: int
    """Number of times that the journal was opened."""
    pid: int = 0
    """Process that has, or had, the journal open."""
    sequence: int = 0
    """Number of the transaction; 0: none yet."""
    next_row: int = 0
    rows: int = 0
    """Live ones."""
    checksum: int = 0
    """Checksum of the transaction's block, which stands for all before it."""
    boot: bytes = SYNCED
    """`clock.boot_id` of the machine that must go on running lest the end of the log be lost.
    SYNCED: nothing of it can be missing, whatever the machine did."""

    def pack(self) -> bytes:
        body = _FORMAT.pack(_MAGIC, *self)
        return body + xxh3(body).to_bytes(_SUM_BYTES, "little")

    @property
    def owner(self) -> bytes:
        """First bytes of the record: one opening of the journal writes them, and no other."""
        return self.pack()[:_OWNER_BYTES]

    @property
    def is_promised(self) -> bool:
        """True if the machine has done nothing that may cost the end of the log."""
        return self.boot in (SYNCED, boot_id())


def read_last_commit(folder: Path) -> LastCommit | None:
    """Return the content of `pool.acked` in `folder`; None if there is none.

    Raises:
        ValueError: it is damaged.
        JournalVersionError: a journal of another version is there.
    """
    with contextlib.suppress(FileNotFoundError), (folder / BEFORE_NAME).open("rb") as file:
        raise _of_version(folder, int.from_bytes(file.read(100)[60:64], "big"))
    try:
        data = (folder / ACKED_NAME).read_bytes()
    except FileNotFoundError:
        return None
    body, checksum = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if checksum != xxh3(body).to_bytes(_SUM_BYTES, "little") or body[:7] != _MAGIC[:7]:
        raise ValueError(f"{folder / ACKED_NAME} is damaged")
    if body[7:8] != _MAGIC[7:8]:
        raise _of_version(folder, int(body[7:8], 36))
    return LastCommit._make(_FORMAT.unpack(body)[1:])


def write_last_commit(folder: Path, acked: LastCommit) -> None:
    """Begins a journal in `folder`."""
    write_durably(folder / ACKED_NAME, acked.pack(), private=True)


def _of_version(folder: Path, version: int) -> JournalVersionError:
    return JournalVersionError(
        f"{folder}: the journal has schema version {version}, this release reads and writes "
        f"{SCHEMA_VERSION}; start the release that wrote it, or begin anew: set run.resume=never, "
        f"or move {folder} aside"
    )


def lost_between(sequence: int, next_row: int, n_rows: int, acked: LastCommit) -> str:
    """Describe what was acknowledged and is not there: all after this transaction."""
    rows = f"rows {next_row} to {acked.next_row - 1}"
    if next_row == acked.next_row:
        rows = "no new rows"
    return (
        f"Acknowledged transactions {sequence + 1} to {acked.sequence} are lost: {rows}, and "
        f"deletions; {n_rows} rows were live before them, {acked.rows} after them."
    )


def journal_exists(folder: Path) -> bool:
    """True if there is a journal in `folder`, of whatever version."""
    return any((folder / name).exists() for name in (ACKED_NAME, BEFORE_NAME))


def make_folder(folder: Path) -> list[Path]:
    """Creates `folder`, for its owner only; returns the parents that got a new entry."""
    try:
        finish_salvages(folder.parent)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise JournalError(
            f"the journal's folder {folder} cannot be created ({e}); "
            "set pool.journal_dir to one that can be written"
        ) from e
    return [path.parent for path in missing]


SALVAGED = "salvaged"
"""Folder with a usable journal, in one of salvage's own beside the damaged journal: once it is
whole, that is moved aside, and it takes its place."""


def finish_salvages(parent: Path) -> None:
    """Put the journals in their places in `parent` whose salvage was killed in between."""
    for made in parent.glob(f".*-*/{SALVAGED}"):
        folder = parent / made.parent.name[1:].rpartition("-")[0]
        if not folder.exists():
            made.rename(folder)
            made.parent.rmdir()
            logger.warning(
                "%s: a salvage was killed before its journal was in place, where it is now; what "
                "was damaged is in the folder beside it",
                folder,
            )


# --- locks ---


def open_locked(path: Path, flags: int, timeout_s: float) -> tuple[int, bool]:
    """A descriptor of a file or folder, and whether that is locked by it until it is closed; not,
    if somebody else still has the lock after this time."""
    deadline = time.monotonic() + timeout_s
    while True:  # opened each time: `salvage` puts another folder in its place
        fd = private(path, flags)
        try:
            if lock(fd):
                return fd, True
            if time.monotonic() >= deadline:
                return fd, False
        except BaseException:  # whatever stops it, the descriptor is not kept
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.02)


def take_folder(folder: Path, timeout_s: float, take_over: int | None = None) -> tuple[int, bool]:
    """Lock the folder as `open_locked` does; not locked only if it is still with the process
    `take_over`. The lock is on the folder, not on a file in it, which somebody might remove.

    Raises:
        JournalLockedError: another process has it.
    """
    try:
        fd, is_ours = open_locked(folder, os.O_RDONLY | os.O_DIRECTORY, timeout_s)
    except OSError as e:
        raise JournalError(
            f"{folder} cannot be locked ({e}); set pool.journal_dir to a local disk"
        ) from e
    if is_ours:
        return fd, True
    used = f"{folder} is in use by process {pid_of_holder(folder)} (waited {timeout_s} s)"
    if pid_of_holder(folder) == str(take_over):
        logger.warning("%s; it was declared dead and can write nothing more from now on", used)
        return fd, False
    os.close(fd)
    raise JournalLockedError(
        f"{used}; stop that process, or set pool.journal_dir to another folder"
    )


def take_acked(folder: Path, timeout_s: float) -> int:
    """`pool.acked`, locked. Waits for the end of a transaction of the previous process.

    Raises:
        JournalLockedError: it stands still in the middle of one.
    """
    fd, is_ours = open_locked(folder / ACKED_NAME, os.O_RDWR, timeout_s)
    if is_ours:
        return fd
    os.close(fd)
    raise JournalLockedError(
        f"{folder}: process {pid_of_holder(folder)} is in the middle of a write; stop it"
    )


def holder(folder: Path) -> str | None:
    """The process that has the journal in `folder` open; None if nobody has."""
    try:
        fd, is_ours = open_locked(folder, os.O_RDONLY | os.O_DIRECTORY, timeout_s=0)
    except FileNotFoundError:
        return None
    os.close(fd)
    return None if is_ours else pid_of_holder(folder)


def lock(file: int) -> bool:
    """Locks a file or folder until it is closed; False: somebody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pid_of_holder(folder: Path) -> str:
    """Return the pid of the process that holds the journal, or "unknown", for a message."""
    with contextlib.suppress(OSError, ValueError):
        acked = read_last_commit(folder)
        if acked is not None:
            return str(acked.pid)
    return "unknown"


# --- files ---


def private(path: str | Path, flags: int) -> int:
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
