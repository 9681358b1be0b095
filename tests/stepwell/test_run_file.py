"""`run.json` says what runs and where, to its owner alone, and the lock says whether it does."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell import RunUnavailableError, load_config
from stepwell.cli.main import main
from stepwell.cluster.address import RayPart
from stepwell.config.run import RunConfig
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.store.journal import Journal
from stepwell.layout import RUN_FILE
from stepwell.run.find import find_run
from stepwell.run.folder import begin, holder, live_run, only_run_in

ROOT = Path(__file__).parents[2]
SECRETIVE = (
    "rollout.reward={function: remote, kwargs: {url: 'http://me:s3cret-of-sixteen@r', "
    "headers: {Authorization: Bearer s3cret-of-sixteen}}}",
    "engine.env.AWS_SECRET_ACCESS_KEY=s3cret-of-sixteen",
    "cluster.env={OPENAI_KEY: s3cret-of-sixteen, PGPASSWORD: s3cret-of-sixteen, PWD: /shown}",
    "gateway.admin_keys=[s3cret-of-sixteen]",
)
OWNER = """
import sys, time
from pathlib import Path
from stepwell.run.folder import only_run_in, begin
from stepwell import load_config
with only_run_in(Path(sys.argv[1])):
    begin(load_config("quickstart", ["run.dir=" + sys.argv[1]]))
    print("begun", flush=True)
    time.sleep(600)
"""


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config("quickstart", [f"run.dir={folder}", *overrides])


def test_it_says_who_runs_what_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    (repository / "agent.py").write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.chdir(repository)
    folder = tmp_path / "run"
    with only_run_in(folder):
        written = begin(config(folder))
        assert live_run(folder) == written
        (repository / "agent.py").write_text("2")
        assert begin(config(folder)).git == f"{written.git}-dirty"
    assert written.pid == os.getpid()
    assert written.git is not None
    assert re.fullmatch("[0-9a-f]{40}", written.git)
    assert written.folder == repository
    assert written.versions.keys() >= {"stepwell", "python", "torch", "ray", "transformers"}
    assert written.config["rollout"]["n"] == config(folder).rollout.n
    assert (written.ray, written.pool, written.gateway) == (None, None, None)


def test_outside_a_repository_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with only_run_in(tmp_path):
        assert begin(config(tmp_path)).git is None


def test_it_is_the_owners_alone_and_holds_no_secret(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("of an earlier run")
    begin(config(tmp_path, *SECRETIVE))
    path = tmp_path / RUN_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert "s3cret-of-sixteen" not in path.read_text()
    assert "Authorization" in path.read_text()
    assert "/shown" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [RUN_FILE]


def test_the_folder_that_a_run_makes_is_its_owners_and_one_that_is_there_keeps_its_mode(
    tmp_path: Path,
) -> None:
    """Conversations are in it."""
    made, shared = tmp_path / "runs" / "mine", tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for folder, mode in ((made, 0o700), (shared, 0o755)):
        with only_run_in(folder):
            assert folder.stat().st_mode & 0o777 == mode


def test_a_killed_run_is_seen_not_to_be_alive_and_the_next_one_is(tmp_path: Path) -> None:
    with pytest.raises(
        RunUnavailableError, match=rf"{tmp_path} is no run's folder.*stepwell train"
    ):
        live_run(tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        assert live_run(tmp_path).pid == run.pid == holder(tmp_path)
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    assert holder(tmp_path) is None
    why = rf"the run in {tmp_path} is not alive: process {run.pid}, .* run its command again"
    with pytest.raises(RunUnavailableError, match=why):
        live_run(tmp_path)
    with only_run_in(tmp_path):  # the file is still the dead one's
        with pytest.raises(RunUnavailableError, match="is still starting"):
            live_run(tmp_path)
        begin(config(tmp_path))
        assert live_run(tmp_path).pid == os.getpid()


@pytest.mark.parametrize(
    ("host", "address", "reaches"),
    [
        ("elsewhere", "127.0.0.1:6379", False),
        ("elsewhere", "10.0.0.2:6379", True),
        (socket.gethostname(), "127.0.0.1:6379", True),
    ],
)
def test_a_run_whose_ray_listens_on_another_machines_loopback_is_out_of_reach(
    tmp_path: Path, host: str, address: str, reaches: bool
) -> None:
    with only_run_in(tmp_path):
        part = RayPart(address=address, namespace="stepwell-x", auth_mode="token")
        run = begin(config(tmp_path)).model_copy(update={"host": host, "ray": part})
        run.write(tmp_path)
        if reaches:
            assert find_run(tmp_path) == (tmp_path, run)
        else:
            with pytest.raises(RunUnavailableError, match=r"is on elsewhere, .*\(cluster\.address"):
                find_run(tmp_path)


def test_a_file_that_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text('{"name": "a", "pid":')
    with only_run_in(tmp_path), pytest.raises(DamagedFileError, match=r"run\.json is damaged"):
        live_run(tmp_path)


def test_whoever_looks_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    with only_run_in(tmp_path):
        pass
    for _ in range(3):
        with (tmp_path / "run.lock").open("rb") as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            looker = subprocess.Popen(["sleep", "0.1"], pass_fds=[reader.fileno()])
        with only_run_in(tmp_path):
            looker.wait()


def test_salvage_finds_the_journal_where_the_run_was_told_to_keep_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, run_dir = tmp_path / "disk", tmp_path / "run"
    run_dir.mkdir()
    Journal(elsewhere, "process").close()
    begin(config(run_dir, f"pool.journal_dir={elsewhere}"))
    assert main(["data", "salvage", str(run_dir)]) == 0
    assert str(elsewhere) in capsys.readouterr().out
