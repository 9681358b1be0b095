"""This module runs the command under fire, one life after another, so that a fault may end a life
and the run goes on.

    start ──► a life ──fault──► goes on by itself
                │   └─(driver killed; raylet killed: it may end)──► the next life
                └─ ended although nothing allowed it to ──► a violation, and the next life

This process adopts whatever loses its parent (PR_SET_CHILD_SUBREAPER), so a process that a life
leaves behind is seen, however it was started: it has `LEFT_S` to end, then it is a violation.
A watcher keeps every published version of the weights and when it was committed.

Owns: the processes of the run, its books of lives. Does not own: what is done to it (`faults.py`,
`scenarios.py`) and what it trained (`verify.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool.store.folder import journal_exists
from stepwell.layout import POOL, WEIGHTS
from stepwell.trainer.ledger import LEDGER
from tests.chaos import agent
from tests.chaos.faults import Fault, attempt, find, part_of
from tests.chaos.machines import Machines, shell
from tests.chaos.plants import PLANT
from tests.vision_model import make_vision_model

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "site"
"""Folder of `sitecustomize.py`, for runs with a plant."""
PR_SET_CHILD_SUBREAPER = 36
UP = "gateway at "
"""Text that a life prints when all its parts have come up."""
PATIENCE_S = 240.0
"""The run must train again within it, or end."""
LEFT_S = 90.0
"""After its parent's death a process must end within it."""
EXCUSES = {
    **dict.fromkeys(("raylet", "gcs", "cable"), ("ray",)),
    "service": ("ray", "serve"),
    "disk": ("disk", "space"),
}
"""Parts whose fault may end a life -> words of which a line of its own must have one."""
OURS = "stepwell: "
"""Begins a line that the command says itself, when it ends."""
EXCUSED_S = 90.0
"""A life may still end so long after the fault that excuses it has ended: Ray's own time-outs."""
GOES_ON = 8
"""Optimizer steps after a fault; a run that has made more got over it. Fewer may be made with what
was leased before."""
PROGRESS = 3
"""Optimizer steps since the last kill before the next one: a checkpoint, and a step behind it."""
LOOK_S = 0.25
MAX_VIOLATIONS = 10
"""Then it is no use to go on."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault, or the end of a life: what may keep a rollout or a group from ending well."""

    began: float
    ended: float
    """By the clock of `time.time`."""
    what: str
    is_restart: bool = False
    """A life ended: another one follows over the same pool."""


@dataclass(slots=True)
class Books:
    """Record of the lives: faults, excuses, disturbances, violations."""

    faults: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    """Lives that ended because of a fault that is allowed to end one."""
    disturbances: list[Disturbance] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """From a fault's end to the next optimizer step."""


@dataclass(frozen=True, slots=True)
class Excuse:
    """A fault that may end the life that it meets: soon, in words that name the cause, and with an
    exit code of the command's own. Once the run has trained on, it is over."""

    fault: str
    causes: tuple[str, ...]
    """Words of which a line of the command's own must have one, in lower case."""
    until: float
    """By the clock of `time.monotonic`."""
    trained: int
    """Optimizer steps before it."""

    def covers(self, last_words: str, code: int, trained: int, now: float) -> bool:
        own = [line for line in last_words.lower().splitlines() if line.startswith(OURS)]
        names_it = any(cause in line for line in own for cause in self.causes)
        return code > 0 and now <= self.until and trained <= self.trained + GOES_ON and names_it


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights of a version, saved from being pruned."""

    version: int
    path: Path


class SmallDisk:
    """A file system of its own, of a few MB; needs root.

    Args:
        content: is there once the run has begun to write; before, nothing is filled.
    """

    def __init__(self, folder: Path, megabytes: int, content: str = POOL) -> None:
        self.folder = folder
        self.is_full = False
        self._content = content
        self._ballast = folder / "ballast"
        folder.mkdir(parents=True)
        shell("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "chaos", str(folder))

    def fill(self) -> bool:
        """Not a byte is left. False: it is so already, or there is no content yet."""
        content = self.folder / self._content
        if self.is_full or not content.is_dir() or not any(content.iterdir()):
            return False
        self.is_full = True
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (1 << 16, 1 << 8, 1):
                with suppress(OSError):
                    while ballast.write(b"\0" * size) == size:
                        pass
        return True

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)
        self.is_full = False

    def remove(self) -> None:
        shell("umount", "-l", str(self.folder))


class Run:
    """The run under fire. It trains a tiny random model that reads pictures.

    `draws_prompts`: the trainer issues them itself, in the order of its source.

    Args:
        folder: of everything that the runs of this scenario write.
        options: of the command, besides `run.dir` and `trainer.total_steps`.
        disk: what a fault `fill` fills.
        home: holds the journal's folder; None: the run's folder does.
        machines: whose cluster the run joins.
        plant: name of a deliberate fault of the product (`plants.py`).
    """

    draws_prompts = True

    def __init__(
        self,
        folder: Path,
        options: Sequence[str],
        *,
        disk: SmallDisk | None = None,
        home: Path | None = None,
        machines: Machines | None = None,
        plant: str | None = None,
    ) -> None:
        self.folder = folder / "run"
        self.model = make_vision_model(folder / "model")
        self.agents = folder / "agents"
        self.batches = folder / "batches"
        self.pool = folder / "pool"
        """Copy of the journal, once the run has ended."""
        self.kept: list[Kept] = []
        self.commits: list[tuple[float, int]] = []
        """(when it was seen, version)"""
        self.books = Books()
        self.named_lost: set[str] = set()
        """Groups of which a salvage said that they are lost or dropped."""
        self.disk = disk
        self._weights = folder / "weights"
        self._log = folder / "run.log"
        self._given = (*options, f"trainer.save_debug_rollout_data={self.batches}")
        self._home = home or self.folder
        self._machines = machines
        self._plant = plant
        self._process: subprocess.Popen[bytes] | None = None
        self._judged: subprocess.Popen[bytes] | None = None
        """The life whose end was judged."""
        self._life_at = 0
        self._hit = False
        self._excuse: Excuse | None = None
        self._orphans: dict[psutil.Process, float] = {}
        self._lasting: set[asyncio.Task[None]] = set()

    # -- a life ----------------------------------------------------------------------------------

    def options(self, total_steps: int) -> list[str]:
        own = f"model.path={self.model}", f"run.dir={self.folder}"
        return [*self._given, *own, f"trainer.total_steps={total_steps}"]

    @property
    def environment(self) -> dict[str, str]:
        site = [str(SITE)] if self._plant is not None else []
        paths = [*site, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {agent.FOLDER: str(self.agents), "PYTHONPATH": ":".join(paths)}
        if self._plant is not None:
            ours[PLANT] = self._plant
        return os.environ | ours | (self._machines.token if self._machines is not None else {})

    def config(self) -> RunConfig:
        return load_config("quickstart", self.options(1))

    def command(self, total_steps: int) -> list[str]:
        """Command line of a life."""
        train = [sys.executable, "-m", "stepwell", "train", "--config", "quickstart"]
        return [*train, *self.options(total_steps)]

    def start(self, total_steps: int = 100_000) -> None:
        command = self.command(total_steps)
        if self._machines is not None:
            self._machines.start(self.environment)
            command = [*self._machines.prefix, *command]
        with self._log.open("ab") as log:
            self._life_at = log.tell()
            log.write(f"--- life {self.books.lives}\n".encode())
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )
        self.books.lives += 1
        self._hit = False
        if self.disk is None or not self.disk.is_full:  # else it meets what its predecessor met
            self._excuse = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the run was not started")
        return self._process

    def _daemons(self) -> list[psutil.Process]:
        return self._machines.daemons() if self._machines is not None else []

    def processes(self) -> list[psutil.Process]:
        """Processes of this life, and of the cluster that it joined."""
        found: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            found += psutil.Process(self.process.pid).children(recursive=True)
        for daemon in self._daemons():
            with suppress(psutil.NoSuchProcess):
                found += [daemon, *daemon.children(recursive=True)]
        return found

    def find(self, part: str, pick: float = 0.0) -> psutil.Process | None:
        if part == "driver":
            return psutil.Process(self.process.pid) if self.process.poll() is None else None
        return find(part, self.processes(), pick)

    def last_words(self) -> str:
        """The end of this life's output, at most 6,000 characters."""
        with self._log.open("rb") as log:
            log.seek(self._life_at)
            return log.read().decode(errors="replace")[-6_000:]

    def trained(self) -> int:
        """Optimizer steps so far, those of lost histories counted too."""
        try:
            ledger = self.folder / "checkpoints" / LEDGER
            return ledger.read_bytes().count(b'"event":"trained"')
        except FileNotFoundError:
            return 0

    def trains(self, before: int) -> bool:
        return self.trained() > before

    def revive(self) -> None:
        """The next life, if this one has ended. It is a violation, if nothing excuses it."""
        if self.process.poll() is None:
            return
        if self._judged is not self.process:
            self._judged = self.process
            self._judge()
        if self.disk is None or not self.disk.is_full:  # who starts it again makes room first
            self.start()

    def _judge(self) -> None:
        """The life has ended: an excuse, or a violation."""
        self._note_restart("a life ended")
        words = self.last_words()
        if self._excuse is not None and self._excuse.covers(
            words, self.process.returncode, self.trained(), time.monotonic()
        ):
            self.books.excused[self._excuse.fault] += 1
        elif self._hit and UP not in words:
            self.books.excused["a fault met its start"] += 1
        else:
            self.books.violations.append(
                f"life {self.books.lives} ended by itself ({self.process.returncode}): "
                f"…{self.last_words()[-1500:]}"
            )
            if len(self.books.violations) >= MAX_VIOLATIONS:
                raise RuntimeError("\n".join(self.books.violations))

    def _note_restart(self, what: str) -> None:
        at = time.time()
        self.books.disturbances.append(Disturbance(at, at, what, is_restart=True))

    def cli(self, *arguments: str) -> tuple[int, str]:
        """Exit code of another command beside the run, and what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "stepwell", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    # -- faults ----------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> bool:
        """Do it; False: the part is not there at the moment. What lasts, ends by itself."""
        if fault.action == "fill":
            if self.disk is None:
                raise RuntimeError("this run has no disk to fill")
            if not self.disk.fill():
                return False
            self._last(fault.seconds, self.disk.free)
        elif fault.action == "cut":
            if self._machines is None:
                raise RuntimeError("this run has no cable to cut")
            self._machines.cut()
            self._last(fault.seconds, self._machines.mend)
        else:
            target = self.find(fault.part, fault.pick)
            if target is None or not attempt(
                target.kill if fault.action == "kill" else target.suspend
            ):
                return False
            if fault.action == "stop":
                self._last(fault.seconds, lambda: attempt(target.resume))
        self._hit = True
        at = time.time()
        self.books.disturbances.append(Disturbance(at, at + fault.seconds, str(fault)))
        if fault.part in EXCUSES:
            self._excuse = Excuse(
                f"{fault.action} {fault.part}",
                EXCUSES[fault.part],
                time.monotonic() + fault.seconds + EXCUSED_S,
                self.trained(),
            )
        if fault.part == "driver" and fault.action == "kill":
            self.process.wait()
            self._note_restart(str(fault))
            self.start()
        self.books.faults[f"{fault.action} {fault.part}"] += 1
        return True

    def _last(self, seconds: float, end: Callable[[], object]) -> None:
        async def wait() -> None:
            try:
                await asyncio.sleep(seconds)
            finally:
                end()

        task = asyncio.create_task(wait())
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    async def fire(self, faults: Sequence[Fault]) -> None:
        done = self.trained()
        for number, fault in enumerate(faults, 1):
            if number == 1 or fault.action == "kill":  # else it finds nothing that it could break
                needed = done + PROGRESS
                await self.until(partial(self.trains, needed - 1), f"{PROGRESS} steps to lose")
            if fault.action in ("kill", "stop"):  # it has to be there first
                await self.until(partial(self.find, fault.part), f"a {fault.part}")
            await asyncio.sleep(fault.delay_s)
            self.revive()
            before = self.trained()
            if not self.inject(fault):
                await self.until(partial(self.inject, fault), str(fault))
            print(
                f"{time.strftime('%H:%M:%S')} fault {number}/{len(faults)}: {fault}, "
                f"after {before} steps, life {self.books.lives}",
                file=sys.stderr,
                flush=True,
            )
            if fault.action == "kill":
                done = self.trained()
            if fault.settles:
                await asyncio.gather(*self._lasting)
                before, since = self.trained(), time.monotonic()
                if await self.until(partial(self.trains, before), f"after {fault}"):
                    self.books.recovery_s.append(time.monotonic() - since)
        await asyncio.gather(*self._lasting)

    async def until(self, happened: Callable[[], object], what: str) -> bool:
        """Until it happened; a run that does not come so far is a violation and started again."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            if self._machines is not None:
                self._machines.start(self.environment)
            self.revive()
            if happened():
                return True
            await asyncio.sleep(LOOK_S)
        self.books.violations.append(
            f"stuck for {PATIENCE_S:g} s ({what}), life {self.books.lives}: "
            f"…{self.last_words()[-1500:]}"
        )
        attempt(psutil.Process(self.process.pid).kill)
        self.process.wait()
        self.start()
        return False

    async def finish(self) -> None:
        """Two more optimizer steps in peace, a stop as by Ctrl-C, and the regular end."""
        from stepwell.trainer.checkpoint import CheckpointStore

        before = self.trained()
        await self.until(partial(self.trains, before + 1), "the end")
        await self.interrupt()
        done = CheckpointStore(self.folder / "checkpoints").steps()[-1]
        self.start(done + 2)
        if (code := await self._ended()) != 0:
            self.books.violations.append(
                f"the last life ended with {code}: …{self.last_words()[-1500:]}"
            )

    async def interrupt(self) -> None:
        """A stop as by Ctrl-C."""
        self._note_restart("Ctrl-C")
        os.killpg(self.process.pid, signal.SIGINT)
        if (code := await self._ended()) != 130:
            self.books.violations.append(
                f"Ctrl-C ended it with {code}: …{self.last_words()[-1500:]}"
            )

    async def _ended(self) -> int | None:
        try:
            return await asyncio.to_thread(self.process.wait, PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None

    # -- watching --------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The run is alive inside the block; after it, nothing of it is."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.start()
        watchers = [asyncio.create_task(self._watch_weights())]
        watchers.append(asyncio.create_task(self._watch_orphans()))
        try:
            yield
        finally:
            for task in self._lasting:
                task.cancel()
            await asyncio.gather(*self._lasting, return_exceptions=True)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            for _ in range(int(2 * LEFT_S / LOOK_S)):
                if not self._look_for_orphans() and not self._parts_left():
                    break
                await asyncio.sleep(LOOK_S)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        self._copy_pool()

    def _copy_pool(self) -> None:
        homes = [self._home]
        if self._machines is not None:
            homes = [m.own for m in self._machines.machines]
        first, *others = (home / POOL for home in homes if journal_exists(home / POOL))
        for other in others:
            self.books.violations.append(f"the pool has a second journal, {other}")
        shutil.copytree(first, self.pool)

    async def _watch_orphans(self) -> None:
        while True:
            self._look_for_orphans()
            await asyncio.sleep(LOOK_S)

    def _look_for_orphans(self) -> int:
        """Processes that lost their parent and have not ended; those that had their time are
        killed, and a violation."""
        ours = {self.process.pid, *(d.pid for d in self._daemons())}
        now = time.monotonic()
        here = [p for p in psutil.Process().children() if p.pid not in ours]
        for orphan in here:
            with suppress(psutil.NoSuchProcess):
                if orphan.status() == psutil.STATUS_ZOMBIE:
                    with suppress(ChildProcessError):
                        os.waitpid(orphan.pid, os.WNOHANG)
                    continue
                self._expect_end(orphan, now)
        self._orphans = {p: at for p, at in self._orphans.items() if p.is_running()}
        return len(here)

    def _parts_left(self) -> int:
        """In a cluster that others run, after the last life: parts of it that are still there."""
        left = [p for p in self.processes() if part_of(p) not in (None, "raylet", "gcs")]
        for process in left:
            self._expect_end(process, time.monotonic())
        return len(left)

    def _expect_end(self, process: psutil.Process, now: float) -> None:
        since = self._orphans.setdefault(process, now)
        if process.status() == psutil.STATUS_STOPPED:
            self._orphans[process] = now  # the fault is not over
        elif now - since > LEFT_S:
            line = " ".join(process.cmdline())[:200]
            self.books.violations.append(f"left for {LEFT_S:g} s: {process.pid} {line}")
            attempt(process.kill)
            self._orphans[process] = float("inf")

    async def _watch_weights(self) -> None:
        folder, seen = self.folder / WEIGHTS, set[tuple[int, int, int]]()
        while True:
            for path in folder.glob("v*[0-9]"):
                with suppress(OSError, ValueError):  # pruned meanwhile, or a delta
                    self._keep(path, int(path.name[1:]), seen)
            with suppress(OSError, ValueError):
                version = int(json.loads((folder / "current.json").read_bytes())["version"])
                if not self.commits or self.commits[-1][1] != version:
                    self.commits.append((time.time(), version))
            await asyncio.sleep(LOOK_S)

    def _keep(self, path: Path, version: int, seen: set[tuple[int, int, int]]) -> None:
        found = (path / "config.json").stat()  # the folder's own time changes as it is pruned
        which = version, found.st_ino, found.st_mtime_ns
        if which in seen:
            return
        target = self._weights / "-".join(map(str, which))
        target.mkdir(parents=True, exist_ok=True)
        for file in path.iterdir():
            with suppress(FileExistsError):
                try:
                    os.link(file, target / file.name)
                except OSError as e:
                    if e.errno != errno.EXDEV:
                        raise
                    shutil.copy2(file, target / file.name)  # the run has a disk of its own
        seen.add(which)
        self.kept.append(Kept(version, target))
