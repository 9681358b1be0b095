"""This module plays a newcomer's shell, so that every step of the first hour is a command in an
empty folder, with nothing of this checkout but the built wheel.

Owns: the environment, running commands in it, and the report of steps. Does not own what the steps
are (`__main__.py`).
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
"""Without it pip resolves to what nobody tested, and torch to its CUDA build."""
INSTALLATION = ("python -m venv env", "pip install -c constraints.txt stepwell-….whl")
START_S = 120.0
"""A serving run says where it is within this."""
STOP_S = 90.0


class WentWrongError(Exception):
    """A step did not do what README says."""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    seconds: float
    cpu_s: float

    @property
    def last_line(self) -> str:
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    why_not: str = ""
    """Empty: it went well."""
    limit_s: float | None = None
    note: str = ""


@dataclass
class User:
    """Somebody with a folder and an environment."""

    folder: Path
    environment: Path
    steps: list[Step] = field(default_factory=list)

    def install(self) -> None:
        """Build the wheel, make the environment, install."""
        dist = self.folder / "dist"
        argv = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist))
        subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = dist.iterdir()
        with self.step(INSTALLATION[0]):
            self.run(sys.executable, "-m", "venv", self.environment)
        with self.step(INSTALLATION[1]):
            self.run("pip", "install", "--quiet", "-c", CONSTRAINTS, wheel, within_s=1200)

    def run(
        self,
        *argv: str | Path,
        cwd: Path | None = None,
        within_s: float = 300,
        fails: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command of the environment.

        Raises:
            WentWrongError: it failed (unless it `fails` on purpose), or is still running.
        """
        began, cpu_s = time.monotonic(), _children_cpu_s()
        command = [self._found(argv[0]), *map(str, argv[1:])]
        try:
            done = subprocess.run(
                command,
                cwd=cwd or self.folder,
                env=_outside(environment),
                capture_output=True,
                text=True,
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise WentWrongError(f"still running after {within_s:g} s") from None
        seconds = time.monotonic() - began
        cpu_s = _children_cpu_s() - cpu_s
        answer = Done(done.returncode, done.stdout, done.stderr, seconds, cpu_s)
        if done.returncode and not fails:
            raise WentWrongError(f"exit code {done.returncode}: {answer.last_line}")
        return answer

    @contextmanager
    def background(
        self, *argv: str | Path, cwd: Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on until the block ends, and then is interrupted as by Ctrl-C."""
        with log.open("w") as out:
            process = subprocess.Popen(
                [self._found(argv[0]), *map(str, argv[1:])],
                cwd=cwd,
                env=_outside(environment),
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise WentWrongError(f"{argv[1]} did not stop within {STOP_S:g} s") from None

    def _found(self, program: str | Path) -> str:
        ours = self.environment / "bin" / str(program)
        return str(ours if ours.exists() else program)

    @property
    def failed(self) -> bool:
        return any(step.why_not for step in self.steps)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One row of the report."""
        began = time.monotonic()
        why = ""
        try:
            yield
        except WentWrongError as e:
            why = str(e)
        self.add(Step(name, time.monotonic() - began, why))

    def add(self, step: Step) -> None:
        self.steps.append(step)
        result = f"FAILED: {step.why_not}" if step.why_not else f"ok{step.note}"
        print(f"[newcomer] {step.seconds:6.1f} s  {step.name}: {result}", flush=True)

    def show(self) -> None:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("step")
        table.add_column("seconds", justify="right")
        table.add_column("", overflow="fold")
        for step in self.steps:
            limit = "" if step.limit_s is None else f" of {step.limit_s:g}"
            table.add_row(step.name, f"{step.seconds:.1f}{limit}", step.why_not or f"ok{step.note}")
        Console(width=150).print(table)


def where(run_dir: Path, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """`run.json` of a run that has started.

    Raises:
        WentWrongError: it ended, or has no gateway after `START_S`.
    """
    until = time.monotonic() + START_S
    path = run_dir / "run.json"
    while time.monotonic() < until:
        if process.poll() is not None:
            raise WentWrongError(f"it ended: {log.read_text()[-300:].strip()}")
        if path.exists() and (run := json.loads(path.read_text())).get("gateway"):
            found: dict[str, Any] = run
            return found
        time.sleep(0.2)
    raise WentWrongError(f"no gateway after {START_S:g} s")


def documented(file: str, page: str = "README.md") -> str:
    """The code block of a page that begins with the comment `file`."""
    text = (ROOT / page).read_text()
    found = re.search(
        rf"^```(?:python|js)\n((?:#|//) {re.escape(file)}\n.*?)^```", text, re.M | re.S
    )
    if found is None:
        raise WentWrongError(f"{page} has no {file}")
    return found[1]


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def busy() -> bool:
    """More processes want to run than there are cores: a wall time says little of the program."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def _children_cpu_s() -> float:
    """CPU seconds of commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _outside(more: Mapping[str, str] | None) -> dict[str, str]:
    """The environment variables of somebody who has no checkout, and `more`."""
    ours = ("PYTHON", "VIRTUAL_ENV", "OMP_", "RAY_", "STEPWELL")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | dict(more or {})
