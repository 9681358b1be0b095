"""Weight publication: versions on disk, and one transaction over all engine replicas.

A publication of version v+1::

    write v+1/ ─► pause all ─► load on all ─► verify /model_info on all ─► commit ─► continue all
                     │             │                │                        │
                     └─────────────┴── a failure ───┘                        └─ `current.json`
                                       roll back who took it, continue all,
                                       raise WeightUpdateError

The commit is the rename of `current.json`. An engine that crashes is restarted from what it names,
so before the commit it comes back with v, after it with v+1; it never serves what was replaced.

Worked example with replicas A and B: both paused at 4, A loads 5, B's disk is full. A goes back to
4, both continue, the error names B; version 5 was never served to a request that could finish.
With `mode="drain"` there is no pause: each replica finishes its running requests on the old weights
and starts the next on the new, so replicas may differ for a moment; every token says its version.

Does not decide when to publish, and writes no model: `save` does (`TrainingBackend.save_weights`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from backends.config import PublishMode
from backends.engines.client import EngineClient, version_number
from backends.errors import EngineError, WeightUpdateError

T = TypeVar("T")

CURRENT = "current.json"
CONVERGE_TIMEOUT_S = 60.0
"""After the commit: how long a replica may take to come back with the committed version."""
_VERSION_DIR = re.compile(r"^v(\d+)$")


@dataclass(frozen=True, slots=True)
class Published:
    """The committed version and where its weights are."""

    version: int
    path: str


class WeightStore:
    """Directory of weight versions: `v{n}/`, each complete or absent, and `current.json`."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        """`keep`: versions left on disk, the committed one always among them."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least the committed version (1)")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".tmp-*"):  # of a writer that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def versions(self) -> list[int]:
        """Complete versions on disk, oldest first."""
        found = (_VERSION_DIR.match(p.name) for p in self.folder.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def write(self, version: int, save: Callable[[Path], object]) -> Path:
        """Write version `version` with `save(folder)`; it appears under its name when complete.
        A version of that number that is already there (a run that resumed) is replaced."""
        if version < 0:
            raise ValueError(f"version is {version}; versions count from 0")
        target, temporary = self.path(version), self.folder / f".tmp-v{version}-{os.getpid()}"
        try:
            save(temporary)
            if not temporary.is_dir() or not any(temporary.iterdir()):
                raise ValueError(f"save wrote nothing to {temporary}; it must fill the folder")
            if target.exists():
                os.rename(target, self.folder / f".tmp-replaced-v{version}-{os.getpid()}")
            os.rename(temporary, target)
        finally:
            for leftover in self.folder.glob(f".tmp-*v{version}-{os.getpid()}"):
                shutil.rmtree(leftover, ignore_errors=True)
        return target

    def commit(self, version: int, path: str | os.PathLike[str] | None = None) -> None:
        """Make `version` what a (re)started engine serves, and prune old versions."""
        entry = {"version": version, "path": str(path or self.path(version))}
        temporary = self.folder / f".{CURRENT}-{os.getpid()}"
        temporary.write_text(json.dumps(entry))
        os.replace(temporary, self.folder / CURRENT)
        for old in self.versions()[: -self.keep]:
            if old != version:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def current(self) -> Published | None:
        return read_current(self.folder)


def read_current(folder: str | os.PathLike[str]) -> Published | None:
    """The committed version of a store; None before the first commit.

    Raises:
        ValueError: `current.json` is not what a store writes.
    """
    file = Path(folder) / CURRENT
    try:
        entry = json.loads(file.read_text())
        return Published(int(entry["version"]), str(entry["path"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{file} is damaged ({e!r}); delete it to start from the base model"
        ) from e


@dataclass(frozen=True, slots=True)
class Publication:
    """A committed publication."""

    version: int
    seconds: float
    """From the first pause to the last continue."""


@dataclass(slots=True)
class _Replica:
    engine: EngineClient
    old_path: str = ""
    old_version: str = ""
    paused: bool = False
    touched: bool = False
    """An update was sent, whatever came of it."""


async def publish(
    engines: Sequence[EngineClient],
    path: str | os.PathLike[str],
    version: int,
    mode: PublishMode = "abort",
    *,
    store: WeightStore | None = None,
    converge_timeout_s: float = CONVERGE_TIMEOUT_S,
) -> Publication:
    """Load the weights in `path` as `version` on every engine, or on none.

    `store` is committed between verification and continue; without one a crashed engine restarts
    from the weights it was launched with. The transaction is not interrupted by cancellation of
    the caller: an engine must not be left paused.

    Raises:
        WeightUpdateError: nothing was committed (`serving` tells what each replica has now), or,
            after the commit, a replica did not come back with the new version in time.
    """
    if not engines:
        raise ValueError("publish was given no engines")
    transaction = _Transaction(engines, str(path), version, mode, store, converge_timeout_s)
    return await asyncio.shield(asyncio.ensure_future(transaction.run()))


class _Transaction:
    def __init__(
        self,
        engines: Sequence[EngineClient],
        path: str,
        version: int,
        mode: PublishMode,
        store: WeightStore | None,
        converge_timeout_s: float,
    ) -> None:
        self.replicas = [_Replica(engine) for engine in engines]
        self.path = path
        self.version = version
        self.mode = mode
        self.store = store
        self.converge_timeout_s = converge_timeout_s

    async def run(self) -> Publication:
        start = time.perf_counter()
        try:
            await self._all("read the state of", self._remember)
            if self.mode != "drain":
                await self._all("pause", self._pause)
            await self._all("load the weights on", self._load)
            await self._all("verify the version of", self._verify)
            if self.store is not None:
                self.store.commit(self.version, self.path)
        except (WeightUpdateError, OSError) as e:
            serving = await self._roll_back()
            raise WeightUpdateError(
                f"version {self.version} was not published: {e}; replicas now serve {serving}",
                replica=getattr(e, "replica", None),
                serving=serving,
            ) from e
        await self._all("continue", self._converge)
        return Publication(self.version, time.perf_counter() - start)

    async def _all(self, what: str, act: Callable[[_Replica], Awaitable[T]]) -> list[T]:
        """`act` on every replica at once; the first failure, in order of replicas, is raised when
        all have ended: a rollback must not race an update that is still running."""
        results = await asyncio.gather(*(act(r) for r in self.replicas), return_exceptions=True)
        done: list[T] = []
        for replica, result in zip(self.replicas, results, strict=True):
            if isinstance(result, EngineError | ValueError):
                url = replica.engine.url
                raise WeightUpdateError(f"could not {what} {url}: {result}", replica=url)
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    async def _remember(self, replica: _Replica) -> None:
        info = await replica.engine.model_info()
        replica.old_path, replica.old_version = info["model_path"], info["weight_version"]

    async def _pause(self, replica: _Replica) -> None:
        replica.paused = True  # before the answer: a lost answer may still have paused it
        if self.mode != "drain":
            await replica.engine.pause(self.mode)

    async def _update(self, replica: _Replica, path: str, version: str) -> None:
        # With requests held in place SGLang cannot flush and would report a failure.
        flush = self.mode != "in_place"
        await replica.engine.update_weights_from_disk(path, version, flush_cache=flush)

    async def _load(self, replica: _Replica) -> None:
        replica.touched = True
        await self._update(replica, self.path, str(self.version))

    async def _verify(self, replica: _Replica) -> None:
        found = (await replica.engine.model_info())["weight_version"]
        if found != str(self.version):
            raise WeightUpdateError(
                f"it serves version {found!r} after loading {self.version}",
                replica=replica.engine.url,
            )

    async def _roll_back(self) -> dict[str, int | None]:
        """Put every replica back and continue it. One that cannot be put back stays paused: it
        must not serve weights that were never committed."""

        async def restore(replica: _Replica) -> int | None:
            try:
                info = await replica.engine.model_info()
                changed = (info["model_path"], info["weight_version"]) != (
                    replica.old_path,
                    replica.old_version,
                )
                if replica.touched and changed:
                    await self._update(replica, replica.old_path, replica.old_version)
                if replica.paused:
                    await replica.engine.continue_()
                return version_number((await replica.engine.model_info())["weight_version"])
            except (EngineError, ValueError):
                return None

        versions = await asyncio.gather(*(restore(r) for r in self.replicas))
        return {r.engine.url: v for r, v in zip(self.replicas, versions, strict=True)}

    async def _converge(self, replica: _Replica) -> None:
        """Continue a replica that has the committed version. One that crashed meanwhile restarts
        unpaused from `current.json`; if it read that before the commit it is updated here."""
        deadline = time.monotonic() + self.converge_timeout_s
        while True:
            try:
                if await replica.engine.weight_version() != self.version:
                    await self._update(replica, self.path, str(self.version))
                if replica.paused:
                    await replica.engine.continue_()
                await self._verify(replica)
                return
            except (EngineError, WeightUpdateError) as e:
                if time.monotonic() >= deadline:
                    raise WeightUpdateError(
                        f"version {self.version} is committed, but {replica.engine.url} did not "
                        f"come back with it within {self.converge_timeout_s:g} s: {e}",
                        replica=replica.engine.url,
                        serving={replica.engine.url: None},
                    ) from e
                await asyncio.sleep(0.1)
