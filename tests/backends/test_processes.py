"""Children end with what they started, by a kill, or when whoever started them ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stepwell.backends.child import contents
from stepwell.backends.processes import (
    Bounds,
    Job,
    Limits,
    last_lines,
    run_job,
    spawn,
    start,
    start_logged,
)

FAMILY = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("rest", ["time.sleep(600)", "pass"])
def test_a_kill_ends_what_a_child_started_also_when_the_child_has_ended(rest: str) -> None:
    child = start([sys.executable, "-c", FAMILY + rest], stdout=subprocess.PIPE)
    assert child.process.stdout is not None
    sleeper = int(child.process.stdout.readline())
    if rest == "pass":
        assert child.process.wait() == 0
        assert psutil.pid_exists(sleeper)
    child.kill()
    child.process.wait()
    assert gone(sleeper)
    child.process.stdout.close()
    child.kill()  # there is nothing left


@pytest.mark.parametrize("killed", ["child", "guard"])
def test_children_end_with_whoever_started_them_however_that_ends(killed: str) -> None:
    """Another child was killed before, or the guard was."""
    code = f"""
        import subprocess, sys, psutil, time
        from stepwell.backends.processes import start
        family = {FAMILY + "time.sleep(600)"!r}
        first = start(["sleep", "600"])
        if {killed!r} == "child":
            first.kill()
        else:
            [guard] = [p for p in psutil.Process().children() if p.pid != first.pid]
            guard.kill()
            guard.wait()
        child = start([sys.executable, "-c", family], stdout=subprocess.PIPE)
        print(first.pid, child.pid, child.process.stdout.readline().decode(), flush=True)
        time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    pids += [p.pid for p in psutil.Process(owner.pid).children(recursive=True)]  # the guard, too
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert all(gone(pid) for pid in pids)


async def test_limits_hold_for_a_command_and_for_a_source_in_python(tmp_path: Path) -> None:
    limits = Limits(cpu_s=1, memory=512 << 20, file_size=100, files=16)
    show = "import resource as r; print(r.getrlimit(r.RLIMIT_AS)[0], r.getrlimit(r.RLIMIT_CPU))"
    for command in (["-c", show], [sys.executable, "-c", show]):
        child = await spawn(limits.command(*command), stdout=asyncio.subprocess.PIPE)
        output, _ = await child.process.communicate()
        child.kill()
        assert output.decode().split() == [str(512 << 20), "(1,", "2)"]
    child = await spawn(limits.command("-c", "while True: pass"))
    assert await child.process.wait() < 0, "more than 1 s of CPU time"
    child.kill()
    unlimited = await spawn(Limits().command("true"))
    assert await unlimited.process.wait() == 0
    unlimited.kill()


@pytest.mark.parametrize(
    ("after", "why"),
    [(["sh", "-c", "sleep 600 & sleep 601"], "TimeoutExpired"), (["no-such-command"], "FileNot")],
)
async def test_a_job_ends_although_what_runs_after_it_does_not(
    tmp_path: Path, after: list[str], why: str
) -> None:
    log = tmp_path / "log"
    env = {"PATH": os.environ["PATH"], "MARK": str(tmp_path)}
    argv = ["sh", "-c", "exit 3"]
    job = Job(argv, tmp_path, env, log, timeout_s=60, after=after, after_s=0.5)
    ended = await asyncio.wait_for(run_job(job), 60)
    assert (ended.how, ended.code) == ("exited", 3)
    assert why in log.read_text()
    for process in psutil.process_iter():
        try:
            assert process.environ().get("MARK") != str(tmp_path)
        except psutil.Error:
            continue


NAMED = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
ctypes.CDLL(None).prctl(15, (8 * "ü").encode())
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names are among the numbers in /proc")
async def test_a_job_is_ended_whatever_its_processes_are_called(tmp_path: Path) -> None:
    """A name is cut after 15 bytes; half a character ended the reaper, and not the job."""
    log = tmp_path / "log"
    env = {"PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", NAMED]
    job = Job(argv, tmp_path, env, log, timeout_s=60, bounds=Bounds(processes=1))
    ended = await run_job(job)
    assert (ended.how, ended.detail) == ("bound", "processes: 2 of 1")
    assert gone(int(log.read_text()))


LOOKS = """
import builtins, json, os, subprocess, sys
from stepwell.backends import child
grandchild = "import subprocess; subprocess.Popen(['sleep', '600']); print(flush=True); input()"
argv = [sys.executable, "-c", grandchild]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
parent = subprocess.Popen(argv, start_new_session=True, **pipes)
parent.stdout.readline()
read, plain = [], open
def opened(path, *args):
    if sys.argv[1] == "no lists" and str(path).endswith("/children"):
        raise FileNotFoundError(path)
    read.append(str(path))
    return plain(path, *args)
builtins.open = opened
found = child.descendants()
print(json.dumps([os.getpid(), *found]))
print(json.dumps([path.split("/")[2] for path in read]))
builtins.open = plain
child.subreaper()
child.end_descendants(parent.pid)
"""


@pytest.mark.parametrize("lists", ["lists", "no lists"])
def test_a_look_at_a_jobs_processes_finds_all_and_reads_of_no_others_if_the_kernel_lists_them(
    lists: str,
) -> None:
    """With 16 rollouts and twice a second, reading all of /proc is what a look costs."""
    argv = [sys.executable, "-c", LOOKS, lists]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    own, read = (set(map(int, json.loads(line))) for line in done.stdout.splitlines())
    assert len(own) == 3
    assert read >= own
    if lists == "lists" and Path(f"/proc/self/task/{os.getpid()}/children").exists():
        assert read == own


def test_a_file_that_goes_during_a_look_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that makes and removes files all the time has a bound on its disk all the same."""
    (tmp_path / "a").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "large").write_bytes(bytes(100_000))
    scandir = os.scandir

    @contextmanager
    def listed_first(folder: str) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        (tmp_path / "a").unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", listed_first)
    size, _ = contents([str(tmp_path)], None)
    assert size >= 100_000


def test_a_command_that_cannot_be_run_is_the_callers_error() -> None:
    with pytest.raises(OSError, match="no/such"):
        start(["/no/such/command"])


def test_a_log_begins_with_the_command_and_is_appended_to(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    for word in ("one", "two"):
        child = start_logged(["sh", "-c", f"echo $SAID {word}"], log, {**os.environ, "SAID": "it"})
        child.process.wait()
        child.kill()
    first, said, *_ = log.read_text().splitlines()
    assert first == "--- launch: sh -c echo $SAID one"
    assert said == "it one"
    assert last_lines(log).endswith("it two")
    assert "unreadable" in last_lines(tmp_path / "none")
