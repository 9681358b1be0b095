"""Weight versions on disk, which of them is committed, and the lock that says who may serve.

    weights/
      v6/  v7/            a Hugging Face directory each (with LoRA, an adapter's); whole or absent,
                          and sealed with checksums (`datapool/sealed.py`)
      current.json        {"version": 7, "path": "v7", "adapter": false} and its digest; its
                          rename commits
      v8/origin.json      {"weights_of": 6}: a roll-back; version 8 has the weights of 6
      refused.json        why the trainer cannot go on from a roll-back; absent: it can
    .lock               held by a publication until it has committed or rolled back, by the
                          supervisor of a restarted engine that brings it to the committed version,
                          and while the engines' memory is lent to the trainer

The lock is `flock`: of a process that dies it is freed by the kernel. What it buys: an engine that
came up while a publication was under way starts to serve only after that, at what was committed.

Owns the folder. Writes no model: `save` does (`TrainingBackend.save_weights`).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from safetensors import SafetensorError

from stepwell.backends.errors import VersionNotKeptError, WeightsNotWrittenError
from stepwell.datapool.sealed import (
    CHECKSUMS,
    check,
    damaged,
    read_sealed,
    seal,
    sealed_json,
    this_writer,
    was_killed,
    write_sealed,
)

log = logging.getLogger(__name__)

CURRENT = "current.json"
LOCK = ".lock"
ORIGIN = "origin.json"
OWN_FILES = frozenset((CHECKSUMS, ORIGIN))
"""Files of a version's folder that are the store's, and no model's."""
REFUSED = "refused.json"
LOCK_RETRY_S = 0.005
LATEST = 10
"""Newest versions that `history` keeps whatever their age."""
HISTORY = ((3600, 86_400), (86_400, 7 * 86_400))
"""Beyond those: the last one of each of so many seconds, for versions younger than so many: one an
hour for a day, one a day for a week."""
Keep: TypeAlias = int | Literal["history"]
_VERSION_DIR = re.compile(r"^v(\d+)$")
_DRAFT = re.compile(r"^\.tmp-(\d+@.+)-[^-]+$")


@dataclass(frozen=True, slots=True)
class Published:
    """The committed version and where its weights are."""

    version: int
    path: str
    adapter: bool = False
    """`path` is a LoRA adapter, for an engine that runs the base model."""


class StoreLock:
    """The exclusive lock of a store's folder, across processes. Not reentrant."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    @contextmanager
    def tried(self) -> Iterator[bool]:
        """Holds the lock if the value is True; somebody else has it if False."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True  # closing the file unlocks

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock. A supervisor has it while it brings one engine up to date, which takes as
        long as loading the weights; a trainer while it has the engines' memory."""
        while True:
            with self.tried() as mine:
                if mine:
                    yield
                    return
            await asyncio.sleep(LOCK_RETRY_S)


class WeightStore:
    """Directory of weight versions; see the module's docstring."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: Keep = 2,
        base: str | os.PathLike[str] | None = None,
        *,
        prunes: bool = True,
    ) -> None:
        """`keep`: versions left on disk, the committed one always among them. `base`: the weights
        of version 0, which engines start with and nobody writes. `prunes`: false for whoever
        commits beside a trainer, whose own `keep` may be larger: its next commit prunes."""
        if keep != "history" and keep < 1:
            raise ValueError(f"keep is {keep}; keep at least the committed version (1)")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._prunes = prunes
        self.base = None if base is None else Path(base).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = StoreLock(self.folder)
        for draft in self.folder.glob(".tmp-*"):
            if _is_left(draft):
                shutil.rmtree(draft, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def number(self, path: Path) -> int:
        """The version that `write` put into `path`."""
        return int(path.name[1:])

    def versions(self) -> list[int]:
        """Complete versions on disk, oldest first."""
        found = (_VERSION_DIR.match(p.name) for p in self.folder.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def kept(self) -> dict[int, Path]:
        """The versions that can be served again, oldest first, and where they are."""
        base = {} if self.base is None else {0: self.base}
        return base | {version: self.path(version) for version in self.versions()}

    def weights_of(self, version: int) -> int:
        """The version whose weights `version` has: its own, unless it was a roll-back.

        Raises:
            DamagedFileError: what says so is damaged.
        """
        path = self.path(version)
        try:
            return int(
                read_sealed(path / ORIGIN, _damaged_version(self.folder, path))["weights_of"]
            )
        except FileNotFoundError:
            return version

    def find(self, version: int | None, now: int) -> int:
        """`version`, if it is kept; None: the one before that whose weights are served `now`, of
        those that were not taken back.

        Raises:
            VersionNotKeptError: it is not.
        """
        kept = self.kept()
        if version is None:
            of = {v: self.weights_of(v) for v in {*kept, now} if v <= now}
            taken_back = {v for v in kept for new, old in of.items() if old < v < new}
            earlier = [v for v in kept if v < now and v not in taken_back and of[v] < of[now]]
            if earlier:
                return earlier[-1]
        if version is not None and version in kept:
            return version
        what = f"version {version}" if version is not None else f"a version before {now}"
        raise VersionNotKeptError(
            f"{what} is not kept; kept are {', '.join(map(str, kept)) or 'none'} "
            f"(trainer.keep_weights={self.keep}), name one of them, or keep more from now on"
        )

    def write_again(self, version: int, of: int) -> Path:
        """Write the weights of a version that is kept again, as `write`; the disk holds them once.

        Raises:
            VersionNotKeptError: it is not.
            DamagedFileError: a file of it is damaged.
        """
        source = self.kept()[self.find(of, version)]
        check_version(self.folder, source)

        def save(folder: Path) -> None:
            folder.mkdir()
            for file in source.iterdir():
                if file.is_file() and file.name not in OWN_FILES:
                    _link(file, folder / file.name)
            (folder / ORIGIN).write_bytes(sealed_json({"weights_of": self.weights_of(of)}))

        return self.write(version, save)

    def write(self, version: int, save: Callable[[Path], object]) -> Path:
        """Write a version with `save(folder)`; its folder, whose name has its number: `version`, or
        the next one if others have written up to there. It appears when it is complete.

        Raises:
            WeightsNotWrittenError: the disk is full, or the folder cannot be written.
        """
        if version < 0:
            raise ValueError(f"version is {version}; versions count from 0")
        draft = self.folder / draft_name(uuid.uuid4().hex[:8])
        try:
            save(draft)
            if not draft.is_dir() or not any(draft.iterdir()):
                raise ValueError(f"save wrote nothing to {draft}; it must fill the folder")
            seal(draft)
            while not _renamed(draft, self.path(version)):
                version = max(version, *self.versions()) + 1
        except (OSError, SafetensorError) as e:  # the latter of a full disk
            raise WeightsNotWrittenError(
                f"weights {self.path(version)} cannot be written ({e}); free space or fix run.dir, "
                "and run the same command again: it goes on from the last checkpoint"
            ) from e
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return self.path(version)

    def discard(self, path: Path) -> None:
        """Remove a version that is not to be served; at once none is at `path`. No-op if it was
        removed before."""
        doomed = path.with_name(draft_name(path.name))
        with suppress(FileNotFoundError):
            path.rename(doomed)  # half removed it must not pass for a version
        shutil.rmtree(doomed, ignore_errors=True)

    def refuse_roll_backs(self, why: str | None) -> None:
        """Note why the trainer cannot go on from an earlier version; None: it can."""
        if why is None:
            (self.folder / REFUSED).unlink(missing_ok=True)
        else:
            write_sealed(self.folder / REFUSED, {"why": why})

    def why_refused(self) -> str | None:
        """Reason that `refuse_roll_backs` noted; None: there is none.

        Raises:
            DamagedFileError: it is not what was noted.
        """
        try:
            return str(read_sealed(self.folder / REFUSED, "restart the trainer")["why"])
        except FileNotFoundError:
            return None

    def commit(
        self,
        version: int,
        path: str | os.PathLike[str] | None = None,
        *,
        adapter: bool = False,
    ) -> None:
        """Make `version` what a (re)started engine serves, and prune old versions. A roll-back
        between it and the one before, which no engine took or whose process was killed, goes: it
        would say that versions were taken back."""
        before = self.current()
        low = version if before is None else before.version
        place = Path(path or self.path(version)).absolute()
        if _is_own(self.folder, place):
            place = Path(place.name)  # the folder may be moved, or copied
        entry = {"version": version, "path": str(place), "adapter": adapter}
        write_sealed(self.folder / CURRENT, entry)
        try:
            for other in self.versions():
                if low < other < version and (self.path(other) / ORIGIN).exists():
                    self.discard(self.path(other))
            if not self._prunes:
                return
            written = {old: self.path(old).stat().st_mtime for old in self.versions()}
            for old in written.keys() - kept_versions(written, self.keep, time.time()) - {version}:
                self.discard(self.path(old))
        except OSError as e:  # it is committed, whatever stays: the next commit prunes again
            log.warning("old versions in %s are not pruned: %s", self.folder, e)

    def current(self) -> Published | None:
        return read_current(self.folder)


def kept_versions(written: Mapping[int, float], keep: Keep, now: float) -> set[int]:
    """Versions that stay on disk.

    Args:
        written: when each was written, in Unix seconds.
        keep: how many of the newest; or `history`.
    """
    if keep != "history":
        return set(sorted(written)[-keep:])
    kept = set(sorted(written)[-LATEST:])
    for every_s, for_s in HISTORY:
        newest: dict[float, int] = {}
        for version in sorted(written):
            if now - written[version] < for_s:
                newest[written[version] // every_s] = version
        kept.update(newest.values())
    return kept


def draft_name(what: str) -> str:
    """Name of a folder in a store that this process writes, or removes: no version.

    Args:
        what: without "-".
    """
    return f".tmp-{this_writer()}-{what}"


def _is_left(draft: Path) -> bool:
    """Return true if the writer of a draft was killed, as far as it can be told."""
    writer = _DRAFT.match(draft.name)
    return was_killed("" if writer is None else writer[1], draft)


def _renamed(draft: Path, target: Path) -> bool:
    """Rename a folder; False: one of that name is there."""
    try:
        os.rename(draft, target)  # of a folder that has files none is replaced
    except OSError as e:
        if e.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system
        shutil.copyfile(file, target)


def check_version(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Hold the version in `path` against its checksums, if the store in `folder` wrote it.

    Raises:
        DamagedFileError: a file is damaged or missing; the message names it.
    """
    if _is_own(folder, path):  # else a model that somebody else made
        check(Path(path), _damaged_version(folder, path))


def _is_own(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    return Path(path).absolute().parent == Path(folder).absolute()


def _damaged_version(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    return (
        f"delete {path} and {Path(folder) / CURRENT} to start from the base model: a resumed "
        "trainer publishes the weights of its checkpoint again"
    )


def read_current(folder: str | os.PathLike[str]) -> Published | None:
    """The committed version of a store; None before the first commit.

    Raises:
        DamagedFileError: `current.json` is not what a store wrote, or names another version than
            its folder has.
    """
    file = Path(folder) / CURRENT
    remedy = (
        "delete it to start from the base model: a resumed trainer publishes the weights of its "
        "checkpoint again"
    )
    try:
        entry = read_sealed(file, remedy)
        path = str(Path(folder).absolute() / str(entry["path"]))
        found = Published(int(entry["version"]), path, bool(entry["adapter"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as e:
        raise damaged(file, f"it is no version: {e!r}", remedy) from e
    if _is_own(folder, found.path) and Path(found.path).name != f"v{found.version}":
        why = f"version {found.version} is in {Path(found.path).name}"
        raise damaged(file, why, remedy)
    return found
