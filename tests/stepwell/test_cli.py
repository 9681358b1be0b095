"""Answers of the command line to somebody who does not know it yet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

import stepwell
from stepwell import DataPoolClient, load_config
from stepwell.cli.main import InterruptedWhileError, interruptible, main
from stepwell.run.folder import begin
from stepwell.trainer.errors import INTERRUPTED


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Error output of a command line that cannot be read."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_help_says_what_stepwell_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Point any agent's base_url at it" in capsys.readouterr().out


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"stepwell {stepwell.__version__}\n"


@pytest.mark.parametrize("option", [["--resume"], ["--learning_rate", "1e-5"], ["--seed=1"]])
def test_an_option_of_another_framework_is_told_to_be_an_override(
    capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    if option == ["--seed=1"]:  # a whole KEY=VALUE: the configuration answers
        assert main(["config", "--config", "quickstart", *option]) == 2
        assert "is malformed; write seed=1" in capsys.readouterr().err
    else:
        told = _refused(capsys, "train", "--config", "quickstart", *option)
        assert f"unrecognized arguments: {option[0]}" in told
        assert "keys are given as KEY=VALUE, without dashes" in told


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollout.agent=nowhere:agent", "rollout.agent is 'nowhere:agent'"),
        ("rollout.reward=nowhere.py:score", "rollout.reward: reward is 'nowhere.py:score'"),
        ("data.train.path=nowhere.jsonl", "data.train: path is 'nowhere.jsonl'"),
    ],
)
def test_what_a_run_names_and_nobody_has_is_a_configuration_error_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, named: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        "data.train.kind=jsonl",
        f"data.train.path={tmp_path / 'rows.jsonl'}",
        override,
    ]
    assert main(["train", "--config", "quickstart", *overrides]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert len(told.splitlines()) == 1
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "stepwell config --keys *",
        "stepwell config --config quickstart",
        pytest.param("stepwell backends --json", marks=pytest.mark.slow),
        pytest.param("stepwell backends", marks=pytest.mark.slow),
        "stepwell top --json RUN",
        "stepwell status RUN",
    ],
)
async def test_a_reader_that_has_seen_enough_of_the_output_is_no_error(
    command: str, tmp_path: Path
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}"]))
    async with DataPoolClient.local(folder=tmp_path / "pool") as pool:
        await pool.open_group("sums", 1)
    argv = [sys.executable, "-m", *command.replace("RUN", str(tmp_path)).split()]
    assert _unread(argv) == (0, "")


def test_an_output_that_takes_few_characters_gets_the_others_spelt_out() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "doctor", "--engine", "http://127.0.0.1:9"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(r"\u2717 engine")


def test_a_working_folder_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["config"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "stepwell: the working folder was removed; cd to one that is there"
    ]


def test_a_run_goes_on_when_the_reader_of_its_lines_has_gone() -> None:
    """A `tee` has had the same Ctrl-C."""
    code = (
        "import sys; from stepwell.track.console import Display; d = Display('mine', 'plain')\n"
        "for step in range(3): d.status(f'step {step}')\n"
        "sys.exit('it went on')"
    )
    assert _unread([sys.executable, "-c", code]) == (1, "it went on\n")


def _unread(argv: list[str]) -> tuple[int, str]:
    """Exit code and error output of a command whose output nobody reads."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does
        said = process.stderr.read()
    return process.returncode, said


def test_the_presets_are_listed_with_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("# Our own.\nextends: quickstart\n")
    monkeypatch.chdir(tmp_path)
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)
    assert any(line.startswith("quickstart ") and "calculator" in line for line in lines)
    assert any(line.split(maxsplit=1) == ["mine", "Our own."] for line in lines)


def test_what_is_listed_is_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*argv: str) -> Any:
        assert main([*argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert "calculator" in told("config")["quickstart"]
    assert told("config", "--config", "quickstart")["trainer"]["total_steps"] == 40
    [key] = [k for k in told("config", "--keys", "rollout.n") if k["name"] == "rollout.n"]
    assert key["default"] == "8"
    assert {b["name"] for b in told("backends")["Training backends"]} >= {"torch", "verl"}


def test_training_nothing_in_particular_is_told_what_to_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train"]) == 2
    told = capsys.readouterr().err
    assert "--config is missing" in told
    assert len(told.splitlines()) == 1


async def test_a_command_that_fails_while_it_is_interrupted_says_so_in_one_line() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("Ray has ended, too\nand more")

    with pytest.raises(InterruptedWhileError, match=r"^stopping failed \(RuntimeError: .*too\)$"):
        await interruptible(work())


@pytest.fixture
def closes_with_its_terminal() -> Iterator[None]:
    """SIGHUP is not ignored, as it is by tests under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_a_terminal_that_closes_interrupts_a_command_that_goes_on_to_its_end(
    closes_with_its_terminal: None,
) -> None:
    """The kernel sends one SIGHUP, and the terminal's shell another."""
    saved = list[tuple[object, ...]]()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as e:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0)
            saved.append(e.args)
            raise

    with pytest.raises(asyncio.CancelledError):
        await interruptible(work())
    assert saved == [(INTERRUPTED,)]


async def test_a_command_whose_user_ignores_sighup_goes_on_without_its_terminal() -> None:
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert await interruptible(work()) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "a" * 300],
        ["train", "--attach", "a" * 300],
        ["config", "--config", "a" * 300],
        ["data", "delete", "file", "--user", "u"],
        ["serve", "--config", "live", "run.dir=runs/" + "a" * 300],
        ["plan", "--config", "quickstart", "cluster.address=a..b:6379"],
    ],
)
def test_a_name_that_can_be_none_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "can be no file" in line or "where nothing answers" in line


def test_the_tilde_of_an_option_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: quickstart\nrun: { name: from-home }\n")
    (tmp_path / "other.yaml").write_text("extends: ~/mine.yaml\n")
    assert main(["config", "--config=~/other.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["name"] == "from-home"
    assert main(["train", "--attach=~/gone"]) == 2
    assert f"{tmp_path}/gone does not exist" in capsys.readouterr().err


def test_a_run_whose_folder_is_named_after_a_key_is_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lr=1e-5").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "lr=1e-5"]) == 2
    assert "lr=1e-5 is no run's folder" in capsys.readouterr().err


@contextmanager
def _error_output_that_nobody_reads() -> Iterator[int]:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        yield writes
    finally:
        os.close(writes)


async def test_an_interruption_that_ends_tee_too_is_one_of_the_users() -> None:
    """The checkpoint of an interrupted run is saved by its cause."""
    causes = list[tuple[object, ...]]()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as e:
            causes.append(e.args)
            raise

    own = os.dup(2)
    with _error_output_that_nobody_reads() as broken:
        os.dup2(broken, 2)
        try:
            with pytest.raises(asyncio.CancelledError):
                await interruptible(work())
        finally:
            os.dup2(own, 2)
            os.close(own)
    assert causes == [(INTERRUPTED,)]


def test_a_mistake_has_its_exit_code_where_nobody_reads_the_line(tmp_path: Path) -> None:
    with _error_output_that_nobody_reads() as broken:
        command = [sys.executable, "-m", "stepwell", "config", "--config", "nowhere"]
        done = subprocess.run(command, stderr=broken, cwd=tmp_path, check=False)
    assert done.returncode == 2


def test_a_full_disk_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "stepwell", "config", "--config", "quickstart"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 1
    said = "a disk is full (No space left on device); free space and run the same command again"
    assert done.stderr == f"stepwell: {said}\n"
