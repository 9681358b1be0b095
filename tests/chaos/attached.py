"""This module runs a service, clients with a log of their own, and a trainer that is attached to
it, under fire.

    stepwell serve        part `service`; pool, engine and gateway are its children
    tests.chaos.clients   agents that nobody of Stepwell starts; they live through all of it
    stepwell train --attach     the life of `Run`; part `driver`

A trainer whose service has died has lost its Ray: it may end, and both are started again, the
service first. Does not own the lives of the trainer (`lives.py`).
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool.store.picture_folder import PICTURES, SECRET
from stepwell.datapool.store.segments import segment_path, segments_in
from stepwell.layout import POOL
from tests.chaos.faults import Fault
from tests.chaos.lives import (
    EXCUSED_S,
    EXCUSES,
    LEFT_S,
    LOOK_S,
    PATIENCE_S,
    ROOT,
    Excuse,
    Run,
)

OF_THE_SERVICE = ("raylet", "gcs")
"""Parts that end the service when they end."""
SERVES = "Ctrl-C"
"""Text that a service prints when it is up."""
SERVICE = (
    "logging.wandb=disabled",
    "logging.console=plain",
    "run.name=chaos",
    "gateway.on_pool_failure=refuse",
    "gateway.holdout=0",
    "gateway.groups={form: declared, n: 4}",
    "async_training.max_queue_size=100000",
    "async_training.trigger_parameter_sync_step=1",
    "validation.every=0",
    "pool.channels.train.group_idle_s=300",
)
TRAINER = (
    "trainer.train_batch_size=2",
    "trainer.checkpoint_every=2",
    "trainer.keep_checkpoints=2",
    "trainer.keep_weights=20",
)
_UID = re.compile(r"q[0-9a-f]{12}")
"""A group of `clients.py`."""


class AttachedRun(Run):
    """See the module's docstring."""

    draws_prompts = False

    def __init__(self, folder: Path, service: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        super().__init__(folder, TRAINER)
        self._serve_options = (
            *SERVICE,
            *service,
            f"model.path={self.model}",
            f"gateway.port={self._port}",
            f"run.dir={self.folder}",
        )
        self._serve_log = folder / "serve.log"
        self._clients_log = folder / "clients.log"
        self._served: subprocess.Popen[bytes] | None = None
        self._clients: subprocess.Popen[bytes] | None = None
        self._serve_at = 0
        self._judged_service: subprocess.Popen[bytes] | None = None
        """The service whose end was judged."""
        self._service_excuse: Excuse | None = None
        """Survives the trainer's lives: the service goes on beneath them."""

    def config(self) -> RunConfig:
        return load_config("live", [*self._serve_options, *TRAINER])

    # -- the service -----------------------------------------------------------------------------

    def command(self, total_steps: int) -> list[str]:
        own = (*self._given, f"trainer.total_steps={total_steps}")
        return [
            sys.executable,
            "-m",
            "stepwell",
            "train",
            "--attach",
            str(self.folder),
            *own,
        ]

    def start(self, total_steps: int = 100_000) -> None:
        self.serve()
        super().start(total_steps)

    def serve(self) -> None:
        """Start the service and its clients, if they do not run; returns once it is up."""
        if self._served is None or self._served.poll() is not None:
            self._service_excuse = None
            command = [sys.executable, "-m", "stepwell", "serve", "--config", "live"]
            with self._serve_log.open("ab") as log:
                self._serve_at = log.tell()
                self._served = self._spawn([*command, *self._serve_options], log.fileno())
            give_up = time.monotonic() + PATIENCE_S
            while SERVES not in self.service_words():
                if self._served.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"the service is not up: …{self.service_words()[-3000:]}")
                time.sleep(LOOK_S)
        if self._clients is None:
            command = [sys.executable, "-m", "tests.chaos.clients"]
            with self._clients_log.open("ab") as log:
                url = f"http://127.0.0.1:{self._port}"
                self._clients = self._spawn([*command, url], log.fileno())

    def _spawn(self, command: list[str], log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdout=log, stderr=log, cwd=ROOT, env=self.environment, start_new_session=True
        )

    def service_words(self) -> str:
        """Output of the service since its last start."""
        with self._serve_log.open("rb") as log:
            log.seek(self._serve_at)
            return log.read().decode(errors="replace")

    def _daemons(self) -> list[psutil.Process]:
        found = []
        for child in (self._served, self._clients):
            if child is not None and child.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(child.pid))
        return found

    def find(self, part: str, pick: float = 0.0) -> psutil.Process | None:
        if part != "service":
            return super().find(part, pick)
        if self._served is None or self._served.poll() is not None:
            return None
        return psutil.Process(self._served.pid)

    def inject(self, fault: Fault) -> bool:
        was = self._served
        done = super().inject(fault)
        if done and fault.part in (*OF_THE_SERVICE, "service"):
            self._service_excuse = self._excuse
        if done and fault.part == "service" and fault.action == "kill" and was is not None:
            was.wait()
            self._note_restart(str(fault))
        return done

    def revive(self) -> None:
        if self._served is not None and (code := self._served.poll()) is not None:
            self._judge_service(code)
            if self.process.poll() is None:
                return  # it is about to see that its Ray is gone
        super().revive()

    def _judge_service(self, code: int) -> None:
        """The service has ended. Its trainer may end, too, whatever the reason was."""
        if self._served is self._judged_service:
            return
        self._judged_service, excuse = self._served, self._service_excuse
        was_killed = excuse is not None and excuse.fault == "kill service"
        now = (self.service_words(), code, self.trained(), time.monotonic())
        if not was_killed and (excuse is None or not excuse.covers(*now)):
            self.books.violations.append(
                f"the service ended by itself ({code}): …{self.service_words()[-1500:]}"
            )
        until = time.monotonic() + EXCUSED_S
        self._excuse = Excuse("its service ended", EXCUSES["service"], until, self.trained())

    # -- the end ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            try:
                yield
            finally:
                if self._clients is not None:
                    self._clients.kill()
                    self._clients.wait()
                await self._end_service()

    async def _end_service(self) -> None:
        if self._served is None or self._served.poll() is not None:
            return
        self._served.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(self._served.wait, PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.books.violations.append(f"Ctrl-C does not end the service in {PATIENCE_S:g} s")
            self._served.kill()
            self._served.wait()

    # -- salvage ---------------------------------------------------------------------------------

    async def crash(self) -> None:
        """Service and trainer are killed; nothing of them is left when this returns."""
        self._note_restart("a crash")
        children = [
            p for p in self.processes() if self._clients is None or p.pid != self._clients.pid
        ]
        for process in (self._served, self._process):
            if process is not None:
                process.kill()
                process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, LEFT_S)
        for process in alive:
            self.books.violations.append(f"left for {LEFT_S:g} s: {process}")
            process.kill()

    def damage(self, pick: random.Random) -> None:
        """Flip a bit in the last quarter of the journal's newest file with content, and one in a
        picture."""
        folder = self.folder / POOL
        path = next(
            p
            for n in reversed(segments_in(folder))
            if (p := segment_path(folder, n)).stat().st_size
        )
        used = len(path.read_bytes().rstrip(b"\0"))
        _flip(path, pick.randrange(used * 3 // 4, used), pick)
        if pictures := sorted(p for p in (folder / PICTURES).glob("*") if p.name != SECRET):
            picture = pick.choice(pictures)
            _flip(picture, pick.randrange(picture.stat().st_size), pick)

    async def salvage(self) -> None:
        """The command, as its user gives it; the groups that it names are lost by its own word."""
        code, said = await asyncio.to_thread(self.cli, "data", "salvage", str(self.folder))
        (self.folder.parent / "salvage.txt").write_text(said)
        if code:
            self.books.violations.append(f"salvage ended with {code}: {said[-1500:]}")
        self.named_lost |= set(_UID.findall(said))


def _flip(path: Path, at: int, pick: random.Random) -> None:
    """Flip a bit of the byte at `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << pick.randrange(8)
    path.write_bytes(data)
