"""This module writes `runs/NAME/run.json` so that any process finds the parts of a live run.

    begin(config) ──► run.json: who runs what, since when         no parts yet
    parts are up  ──► run.json: and where they are                replaced whole, by rename
    the run ends, or is killed ──► the file stays; the kernel has let go of run.lock

`run.lock` says whether a run is alive; `run.json` alone does not. The file is the owner's alone
(0600) and holds no secrets: it names the files that do.

Owns both files. Does not own the connection (`run/connection.py`). Loads neither torch nor Ray.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import ProxyHandler, Request, build_opener

import psutil
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from stepwell.cluster.address import RayPart
from stepwell.config.run import RunConfig
from stepwell.config.secrets import without_secrets
from stepwell.datapool.files.copies import OLD, ROLLOUTS, VALIDATION
from stepwell.datapool.files.trained import TRAINED
from stepwell.datapool.sealed import read_sealed, sealed, write_durably
from stepwell.errors import NoRunError, RunUnavailableError
from stepwell.gateway.config import LAST_START
from stepwell.layout import (
    ARCHIVE,
    CHECKPOINTS,
    GATEWAY_KEY,
    LOGS,
    POOL,
    REPLAY,
    REWARD_PLOT,
    RUN_FILE,
    SUMMARY,
    WEIGHTS,
)
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.metrics import METRICS, PROFILE
from stepwell.version import versions

LOCK = "run.lock"
TRAINER_LOCK = "trainer.lock"
STARTED_OVER = (
    *(WEIGHTS, CHECKPOINTS, POOL, VALIDATION, LOGS, TRAINED, PROFILE, "wandb", "tensorboard"),
    *(METRICS, ROLLOUTS, OLD, LAST_START, SUMMARY, REWARD_PLOT, GATEWAY_KEY),
)
"""Folders and files that a run writes and `run.resume: never` removes, beside `run.json` and what a
replay of recorded batches wrote, which needs no run."""
LOCK_WAIT_S = 0.5
"""A reader that looks whether the run is alive holds the lock for a moment."""
REPAIR_S = 3.0
"""Seconds in which a killed trainer's leftovers are put right, mostly."""
PACKAGES = ("torch", "ray", "transformers", "sglang")
"""Packages on which a run's figures depend, beside Stepwell and Python."""
GIT_S = 10.0
ANSWER_S = 5.0
"""A gateway answers within this."""
DAMAGED_RUN = (
    "if a run wrote it, empty it and start the run again, which writes it anew: its journal and "
    "checkpoints are kept, and engines begin with the base model until the trainer publishes"
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class GatewayPart(_Part):
    urls: tuple[str, ...]
    """One per replica."""
    key_file: Path | None = None
    """Holds the run's own admin key, if its gateway has keys."""

    def key(self) -> SecretStr | None:
        """The admin key in `key_file`."""
        return None if self.key_file is None else SecretStr(self.key_file.read_text())

    def ask(
        self,
        url: str,
        path: str,
        method: str = "GET",
        timeout_s: float = ANSWER_S,
        headers: Mapping[str, str] = {},
    ) -> Any:
        """Ask the replica at `url` with the run's admin key; returns the answer's JSON.

        Raises:
            OSError: it does not answer, or refuses, or is no gateway.
        """
        key = self.key()
        bearer = "" if key is None else f"Bearer {key.get_secret_value().strip()}"
        every = {"Authorization": bearer, **headers} if bearer else {**headers}
        request = Request(f"{url}{path}", headers=every, method=method)
        direct = build_opener(ProxyHandler({}))  # as its rollouts ask it
        try:
            with direct.open(request, timeout=timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except (HTTPException, ValueError) as e:
            raise OSError(f"what answers there is no gateway ({e!r:.80})") from e


class EnginesPart(_Part):
    urls: tuple[str, ...]
    weights_dir: Path
    """Folder in which versions are published."""


class PoolPart(_Part):
    name: str
    """Name of the pool's first actor, in the namespace of `ray`."""


class RunFile(_Part):
    """Content of `run.json`. A part that was not up yet is None."""

    name: str
    pid: int
    host: str
    started_at: datetime
    folder: Path
    """In which the command was started."""
    versions: dict[str, str]
    git: str | None = None
    """Commit of `folder`, if it is in a repository; `-dirty` follows if its files were changed."""
    ray: RayPart | None = None
    pool: PoolPart | None = None
    gateway: GatewayPart | None = None
    engines: EnginesPart | None = None
    config: dict[str, Any]
    """Resolved, without secrets."""

    def found(self, path: str) -> str:
        """A folder that the configuration names, from wherever this process is; what is none, such
        as a model's id, stays as it is."""
        there = self.folder / path
        return str(there) if there.is_dir() else path

    def write(self, run_dir: Path) -> None:
        content = sealed(self.model_dump_json(indent=2, exclude_none=True).encode())
        write_durably(run_dir / RUN_FILE, content, private=True)


def begin(config: RunConfig) -> RunFile:
    """Write the file of a run that this process starts; its parts come later."""
    folder = Path.cwd()
    run = RunFile(
        name=config.run.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=datetime.now(UTC),
        folder=folder,
        versions=versions(PACKAGES),
        git=_git(folder),
        config=without_secrets(config),
    )
    run.write(config.run.dir)
    return run


def read_run(run_dir: Path) -> RunFile:
    """The file of the last run in `run_dir`, alive or not.

    Raises:
        NoRunError: there is none.
        RunUnavailableError: another release wrote it, or a user emptied it.
        DamagedFileError: it is not what was written.
    """
    check_folder(run_dir)
    path = run_dir / RUN_FILE
    if not path.is_file():
        raise NoRunError(f"{run_dir} is no run's folder: it has no {RUN_FILE}; {_NAME_ONE}")
    anew = "start the run again, which writes it anew"
    if not path.stat().st_size:
        raise RunUnavailableError(f"{path} is empty; {anew}")
    try:
        return RunFile.model_validate(read_sealed(path, DAMAGED_RUN))
    except (OSError, ValidationError) as e:
        raise RunUnavailableError(
            f"{path} cannot be read ({str(e).splitlines()[0]}); {anew}"
        ) from e


_NAME_ONE = (
    "name the folder that run.dir named, such as runs/quickstart, or start a run (`stepwell train` "
    "or `stepwell serve`)"
)


def check_folder(run_dir: Path) -> None:
    """Refuse a folder that does not exist.

    Raises:
        NoRunError: it does not.
    """
    if not run_dir.is_dir():
        what = "is a file, not a folder" if run_dir.exists() else "does not exist"
        raise NoRunError(f"{run_dir} {what}; {_NAME_ONE}")


def live_run(run_dir: Path) -> RunFile:
    """The file of the run that is alive in `run_dir`.

    Raises:
        RunUnavailableError: there is none.
    """
    run = read_run(run_dir)
    pid = holder(run_dir)
    if pid is None:
        raise RunUnavailableError(
            f"the run in {run_dir} is not alive: process {run.pid}, started "
            f"{run.started_at:%Y-%m-%d %H:%M} UTC on {run.host}, has ended; run its command again "
            "to go on (its journal and checkpoints are kept)"
        )
    if pid != run.pid:  # the file is of the run before
        raise is_starting(run_dir)
    return run


def journal_folder(run_dir: Path) -> Path:
    """Folder of the journal of the run in `run_dir`; `run_dir` itself if it is no run's folder.

    Raises:
        NoRunError: there is no such folder.
        DamagedFileError: its `run.json` is damaged.
    """
    check_folder(run_dir)
    if not (run_dir / RUN_FILE).is_file():
        return run_dir
    run = read_run(run_dir)
    chosen: str | None = run.config.get("pool", {}).get("journal_dir")
    return run_dir if chosen is None else run.folder / chosen


def archive_folder(run_dir: Path) -> Path:
    """Folder of the archive of the run in `run_dir`, whether there is one or not.

    Raises:
        NoRunError, RunUnavailableError, DamagedFileError: as `read_run`.
    """
    run = read_run(run_dir)
    chosen = run.config.get("pool", {}).get("archive", {}).get("dir")
    return run_dir / ARCHIVE if chosen is None else run.folder / chosen


def is_starting(run_dir: Path) -> RunUnavailableError:
    """The error of a run whose parts are not up yet."""
    return RunUnavailableError(
        f"the run in {run_dir} is still starting; connect again once it has printed its gateway's "
        "address"
    )


def holder(run_dir: Path, lock: str = LOCK) -> int | None:
    """The process that runs in `run_dir`; 0: one that has just begun; None: nobody does.

    Args:
        lock: TRAINER_LOCK asks who trains there.
    """
    try:
        with (run_dir / lock).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
            except OSError:  # a file system without locks, on which no run begins
                return None
    except FileNotFoundError:
        pass
    return None


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """No other process runs in the run's folder inside the block. The kernel ends the lock of a
    process that dies.

    Raises:
        ConfigError: one does already, or the folder cannot be written.
    """
    with _locked(folder, LOCK, LOCK_WAIT_S, _runs_in):
        yield


def refuse_second_run(folder: Path) -> None:
    """The error of `only_run_in`, at once, if a process runs there."""
    if (pid := holder(folder)) is not None:
        raise ConfigError(_runs_in(folder, pid))


def _runs_in(folder: Path, pid: int) -> str:
    return (
        f"another run is alive in {folder} (process {pid}); stop it first, or choose another "
        "run.name"
    )


def refuse_to_remove(config: RunConfig) -> None:
    """Refuse a first start where files are that it, or a later one, would write over or remove.

    Raises:
        ConfigError: there are some, or the start would remove a model that it names.
        DamagedFileError: `run.json` is not what a run wrote.
    """
    folder = config.run.dir
    starts_over = config.run.resume == "never"
    written = (*STARTED_OVER, REPLAY) if starts_over else STARTED_OVER
    foreign = [name for name in written if _has_content(folder / name)]
    if foreign and not _had_run(folder):
        raise ConfigError(
            f"run.dir is {str(folder)!r}, where no run was (it has no {RUN_FILE}), and "
            f"{', '.join(foreign)} would be written over or removed; name a new folder; if a run "
            f"wrote them, go on with: touch {shlex.quote(str(folder / RUN_FILE))}"
        )
    removed = written if starts_over else (WEIGHTS,)
    for link in (folder / name for name in removed if starts_over):
        if link.is_symlink() and link.is_dir() and any(link.iterdir()):
            raise ConfigError(
                f"run.resume is never, and {link} is a link to {link.resolve()}, which another run "
                "may have, too; empty that folder, remove the link, or choose another run.name"
            )
    tokenizer = config.gateway.tokenizer_path
    models = {
        "model.path": config.model.path,
        "backend.reference_path": config.backend.reference_path,
        "algorithm.critic.path": config.algorithm.critic.path,
        "engine.model_path": config.engine.model_path,
        "gateway.tokenizer_path": None if tokenizer is None else Path(tokenizer),
    }
    for key, path in models.items():
        for name in removed:
            if path is not None and path.resolve().is_relative_to((folder / name).resolve()):
                raise ConfigError(
                    f"{key} is {str(path)!r}, and the start of this run removes {folder / name}; "
                    "choose another run.name, or copy the model first"
                )


def _has_content(path: Path) -> bool:
    try:
        return (
            any(e.name != "lost+found" for e in path.iterdir()) if path.is_dir() else path.exists()
        )
    except PermissionError:  # it is somebody else's
        return True


def _had_run(folder: Path) -> bool:
    """True if a run wrote `run.json`, or a user emptied it. A lock would not do: a start that was
    refused or failed leaves one, too."""
    try:
        read_run(folder)
    except RunUnavailableError as e:
        return not isinstance(e, NoRunError)
    return True


@dataclass(slots=True)
class TrainerLock:
    """The lock of a run's trainer."""

    leaves_undone: bool = False
    """True while engines may be paused, or have what is not committed: should the trainer end so,
    `stepwell serve` puts that right, as after a kill."""


@contextmanager
def only_trainer_in(folder: Path) -> Iterator[TrainerLock]:
    """No other process trains in the run's folder inside the block.

    Raises:
        ConfigError: one does already.
    """
    with _locked(folder, TRAINER_LOCK, REPAIR_S, _trains_in) as file:
        lock = TrainerLock()
        try:
            yield lock
        finally:
            if not lock.leaves_undone:
                file.truncate(0)  # it ended by itself and left nothing to be put right


def refuse_second_trainer(folder: Path) -> None:
    """The error of `only_trainer_in`, at once, if a live process of this machine trains there."""
    pid = holder(folder, TRAINER_LOCK)
    if pid and psutil.pid_exists(pid):
        raise ConfigError(_trains_in(folder, pid))


def _trains_in(folder: Path, pid: int) -> str:
    if pid and not psutil.pid_exists(pid):
        return (
            f"process {pid}, which trained in {folder}, was killed, and what it left is being put "
            "right (`stepwell serve` publishes the committed weights again); run the same command "
            "again in a moment, or stop that process if it is on another machine"
        )
    return (
        f"process {pid} trains in {folder}, and a run has one trainer at a time; stop that one "
        f"first (kill -INT {pid})"
    )


@contextmanager
def left_by_trainer(folder: Path) -> Iterator[int | None]:
    """The process that trained here and was killed, or None. Nobody else begins to train inside the
    block, after which it is forgotten."""
    path = folder / TRAINER_LOCK
    pid = int(path.read_text() or 0) if path.is_file() else 0
    if not pid:
        yield None
        return
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None  # it lives
            return
        yield pid
        file.truncate(0)


@contextmanager
def _locked(
    folder: Path, name: str, wait_s: float, taken: Callable[[Path, int], str]
) -> Iterator[IO[str]]:
    """`taken` words the error if another process, by its pid, has the folder's lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # conversations are in it
        lock = (folder / name).open("a")
    except OSError as e:
        raise ConfigError(
            f"run.dir is {str(folder)!r}, which cannot be written ({e.strerror}: {e.filename}); "
            "name a folder that this user may make and write"
        ) from e
    give_up = time.monotonic() + wait_s
    with lock as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(0.02)
                    continue
                pid = int((folder / name).read_text() or 0)
                raise ConfigError(taken(folder, pid)) from None
            except OSError as e:
                raise ConfigError(
                    f"run.dir is {str(folder)!r}, on a file system without locks ({e.strerror}); "
                    "mount it with them (Lustre: flock), or name a folder on another one"
                ) from e
        file.truncate(0)  # an earlier run's `run.json` is not taken for this one's
        file.write(str(os.getpid()))
        file.flush()
        yield file


# -- what is in it -------------------------------------------------------------------------------


def _git(folder: Path) -> str | None:
    command = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-dirty")
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a slow disk
        return None
    return done.stdout.strip()
