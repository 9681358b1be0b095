"""Tombstones of trajectories: a file of deletions, which filter what they name from the moment at
which they are on disk.

    deleted.jsonl     {"kind": "user", "value": "ann", "at": 1764200000.0}   a sealed line each

Owns the file's format. Does not own what is deleted by them (`archive/`, `copies.py`).
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson

from stepwell.datapool.sealed import damaged, end_of_lines, fsync, read_lines, sealed

DELETED: Final = "deleted.jsonl"
Kind: TypeAlias = Literal["trajectory", "user", "tag"]
"""Things that a deletion names."""


class Tombstone(NamedTuple):
    """A deletion: of one trajectory, of all of a user, of all with a tag. That of a group only says
    that its last trajectory went."""

    kind: Kind | Literal["group"]
    value: str
    at: float
    """Time of the deletion, seconds since 1970; of a user or a tag by the pool's clock: what was
    opened later stays."""


class Deletions:
    """All deletions, by what they name: a row costs the same with many of them."""

    def __init__(self, tombstones: Iterable[Tombstone]) -> None:
        self._times: dict[tuple[str, str], float] = {}
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
        names: list[tuple[str, str]] = [("tag", tag) for tag in row.get("tags") or ()]
        if row.get("user") is not None:
            names.append(("user", row["user"]))
        times = [self._times[name] for name in names if name in self._times]
        return bool(times) and row["opened_at"].timestamp() <= max(times)


def tombstone(kind: Kind | Literal["group"], value: str, at: float | None = None) -> Tombstone:
    """A deletion as of `at`; None: of now."""
    return Tombstone(kind, value, time.time() if at is None else at)


def add_tombstones(path: Path, tombstones: Sequence[Tombstone]) -> None:
    """Append tombstones to a file of them, durably.

    Raises:
        OSError: they cannot be written; none of them is there.
        DamagedFileError: the file is not what was written.
    """
    lines = b"".join(sealed(orjson.dumps(each._asdict())) for each in tombstones)
    with open(path, "a+b", 0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        read_tombstones(path)  # a damaged end is not cut off as half a line
        end = end_of_lines(file)
        file.truncate(end)  # half a line of one who died would spoil the next
        try:
            while lines:
                lines = lines[file.write(lines) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
    fsync(path.parent)


def read_tombstones(path: Path) -> list[Tombstone]:
    """The tombstones in a file; none if there is no file.

    Raises:
        DamagedFileError: it is not what was written.
    """
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
