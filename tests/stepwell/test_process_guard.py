"""The guard ends what is of its run, from whatever folder the run was started, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stepwell.process_guard import VARIABLE, ProcessGuard

Start = Callable[[str], psutil.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that has the mark."""
    started: list[psutil.Popen] = []

    def begin(mark: str) -> psutil.Popen:
        process = psutil.Popen(["sleep", "600"], env={**os.environ, VARIABLE: mark})
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.is_running():
            process.kill()
        process.wait()


def test_a_module_of_the_users_named_trainer_does_not_disarm_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    (tmp_path / "trainer.py").write_text("raise SystemExit('the user\\'s own script')\n")
    monkeypatch.chdir(tmp_path)
    guard = ProcessGuard()
    mine = start(guard.mark)
    guard.close()
    assert mine.wait(timeout=30) == -9


def test_what_another_run_started_is_left_alone(start: Start) -> None:
    guard, other = ProcessGuard(), ProcessGuard()
    mine, theirs = start(guard.mark), start(other.mark)
    guard.close()
    assert mine.wait(timeout=30) == -9
    assert theirs.is_running()
    assert theirs.status() != psutil.STATUS_ZOMBIE
    theirs.kill()
    other.close()


def test_a_run_ends_as_ever_whose_guard_was_killed() -> None:
    guard = ProcessGuard()
    [process] = [p for p in psutil.Process().children() if guard.mark in p.cmdline()]
    process.kill()
    process.wait()
    guard.close()
