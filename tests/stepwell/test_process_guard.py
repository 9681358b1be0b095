"""The guard ends what is of its run, from whatever folder the run was started, and nothing else."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stepwell.cluster.guard import NOTE_EVERY_S, VARIABLE, ProcessGuard, runs

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


@pytest.mark.slow
def test_what_another_run_started_is_left_alone(start: Start) -> None:
    guard, other = ProcessGuard(), ProcessGuard()
    mine, theirs = start(guard.mark), start(other.mark)
    guard.close()
    assert mine.wait(timeout=30) == -9
    assert theirs.is_running()
    assert theirs.status() != psutil.STATUS_ZOMBIE
    theirs.kill()
    other.close()


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_descends_from_a_raylet_ends_with_the_run_if_the_run_has_started_it(
    tmp_path: Path, is_ours: bool
) -> None:
    """A program that trains may have a Ray of its own: nothing of that is the run's."""
    raylet = tmp_path / "raylet"
    shutil.copy("/bin/bash", raylet)
    guard = ProcessGuard()
    env = os.environ | ({VARIABLE: guard.mark} if is_ours else {})
    # Its child has another environment, as one that gives itself a title.
    process = psutil.Popen([str(raylet), "-c", "env -i sleep 600 & wait"], env=env)
    maps = Path(f"/proc/{guard._process.pid}/maps")
    while "_psutil" not in maps.read_text():  # it has not begun to look
        time.sleep(0.05)
    time.sleep(2 * NOTE_EVERY_S)
    (child,) = process.children()
    guard.close()
    assert runs(child) is not is_ours
    for each in (child, process):
        if each.is_running():
            each.kill()
    process.wait()


def test_a_run_ends_as_ever_whose_guard_was_killed() -> None:
    before = {p.pid for p in psutil.Process().children()}
    guard = ProcessGuard()
    # Not by its command line, which is empty for a moment while a process begins.
    [process] = [p for p in psutil.Process().children() if p.pid not in before]
    process.kill()
    process.wait()
    guard.close()
