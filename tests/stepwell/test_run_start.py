"""A run that cannot be is refused before it starts a process or removes a file."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import ray

from stepwell.config.load import load_config
from stepwell.run.checks import check_run
from stepwell.run.folder import begin, holder, only_run_in, read_run
from stepwell.run.serve import start_over
from stepwell.run.train import resume_status, train
from stepwell.trainer.errors import ConfigError


async def test_training_prompts_that_are_all_held_out_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    options = ["logging.console=quiet", "run.resume=never", f"run.dir={folder}"]
    config = load_config("quickstart", options)
    shared = config.data.model_copy(update={"val": config.data.train})
    folder.mkdir()
    begin(config)
    (folder / "metrics.jsonl").write_text("of the run before\n")
    with pytest.raises(ConfigError, match=r"data\.train .* also in data\.val .* name other data"):
        await train(config.model_copy(update={"data": shared}))
    assert not ray.is_initialized()
    assert (folder / "metrics.jsonl").exists()


async def test_a_folder_that_cannot_be_written_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["logging.console=quiet", f"run.dir={tmp_path / 'file' / 'run'}"]
    with pytest.raises(ConfigError, match=r"run\.dir is '.*file/run', .* \(Not a directory"):
        await train(load_config("quickstart", options))
    assert not ray.is_initialized()


def test_a_file_system_without_locks_is_told_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre is one, unless it was mounted with `flock`."""

    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(
            ConfigError, match=r"run\.dir is .* without locks \(Function not impl.*flock"
        ),
        only_run_in(tmp_path),
    ):
        pass
    assert holder(tmp_path) is None, "what only looks goes on"


@pytest.mark.parametrize("resume", ["never", "auto"])
async def test_the_folder_of_a_live_run_is_refused_whatever_its_pool_keeps_on_disk(
    tmp_path: Path, resume: str
) -> None:
    options = [
        "logging.console=quiet",
        f"run.resume={resume}",
        f"run.dir={tmp_path}",
        "pool.durability=none",
    ]
    (tmp_path / "metrics.jsonl").write_text("of the live run\n")
    with (
        only_run_in(tmp_path),
        pytest.raises(ConfigError, match=r"another run is alive in .* run\.name"),
    ):
        await train(load_config("quickstart", options))
    assert not ray.is_initialized()
    assert (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("resume", ["auto", "never"])
async def test_a_first_start_is_refused_where_files_are_that_no_run_wrote(
    tmp_path: Path, resume: str
) -> None:
    """Such as a project's own, in the folder that run.dir=. names."""
    names = ("weights", "checkpoints", "logs", "metrics.jsonl", "summary.json", "rollouts.jsonl")
    for name in names:
        path = tmp_path / name if "." in name else tmp_path / name / "mine"
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    options = ["logging.console=quiet", f"run.resume={resume}", f"run.dir={tmp_path}"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="where no run was") as refused:
            await train(load_config("quickstart", options))
        assert all(f"{name}" in str(refused.value) for name in names)
        with only_run_in(tmp_path):  # and after a start that failed
            pass
    assert [n for n in names if (tmp_path / n / "mine").exists() or "." in n] == list(names)
    (tmp_path / "run.json").touch()  # the remedy, where a run wrote them
    check_run(load_config("quickstart", options))


def test_a_disk_of_its_own_is_no_reason_to_refuse_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "pool" / "lost+found").mkdir(parents=True)
    check_run(load_config("quickstart", ["logging.console=quiet", f"run.dir={tmp_path}"]))


def test_what_a_replay_wrote_is_started_over_but_no_files_of_others(tmp_path: Path) -> None:
    replayed = tmp_path / "replay" / "metrics.jsonl"
    replayed.parent.mkdir()
    replayed.touch()
    options = ["logging.console=quiet", f"run.dir={tmp_path}"]
    check_run(load_config("quickstart", options))  # a replay comes before any run
    over = load_config("quickstart", [*options, "run.resume=never"])
    with pytest.raises(ConfigError, match=r"where no run was .* replay would be"):
        check_run(over)
    begin(over)
    check_run(over)
    start_over(tmp_path)
    assert not replayed.parent.exists()


async def test_a_start_that_fails_early_does_not_keep_the_next_one_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise ConnectionError("no Ray")

    monkeypatch.setattr("stepwell.run.train.start_run", fails)
    options = ["logging.console=quiet", f"run.dir={tmp_path / 'run'}"]
    for resume in ("auto", "never", "never"):
        with pytest.raises(ConnectionError, match="no Ray"):
            await train(load_config("quickstart", [*options, f"run.resume={resume}"]))
    assert (tmp_path / "run" / "logs").is_dir()


@pytest.mark.parametrize("resume", ["auto", "never"])
async def test_a_damaged_run_file_is_refused_and_an_empty_one_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    def fails(*_: object) -> NoReturn:
        raise ConnectionError("no Ray")

    monkeypatch.setattr("stepwell.run.train.start_run", fails)
    config = load_config("quickstart", [f"run.resume={resume}", f"run.dir={tmp_path}"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine").touch()
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"run\.json is damaged .*; if a run wrote it, empty it"):
        await train(config)
    assert (tmp_path / "run.json").read_text() == '{"mine": 1}'
    (tmp_path / "run.json").write_text("")
    with pytest.raises(ConnectionError, match="no Ray"):
        await train(config)
    assert read_run(tmp_path).pid == os.getpid()


async def test_what_is_on_another_disk_is_not_gone_on_from_by_a_start_over(tmp_path: Path) -> None:
    """Links are not followed to remove: the folder of a run may be a copy, with its links."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    (disk / "step_100").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    options = ["logging.console=quiet", f"run.dir={run}"]
    begin(load_config("quickstart", options))
    with pytest.raises(ConfigError, match=rf"checkpoints is a link to {disk}, .*; empty that fo"):
        await train(load_config("quickstart", [*options, "run.resume=never"]))
    assert (disk / "step_100").is_dir()


@pytest.mark.parametrize("resume", ["auto", "never"])
async def test_the_model_that_a_run_begins_with_is_not_removed_by_its_start(
    tmp_path: Path, resume: str
) -> None:
    """One of its own versions, to begin anew from under the same name."""
    options = ["logging.console=quiet", f"run.dir={tmp_path}"]
    config = load_config("quickstart", options)
    begin(config)
    model = tmp_path / "weights" / "v3"
    shutil.copytree(config.model.path, model)
    options += [f"model.path={model}", f"run.resume={resume}"]
    with pytest.raises(ConfigError, match=r"model\.path is .*v3', and the start of this run remov"):
        await train(load_config("quickstart", options))
    assert (model / "config.json").is_file()


def test_a_run_that_ended_before_its_first_checkpoint_says_that_it_begins_again() -> None:
    trainer = load_config("quickstart", ["trainer.checkpoint_every=7"]).trainer
    told = resume_status(False, 0, [{"step": 1}], trainer)
    assert told is not None
    assert "begins at optimizer step 1 again" in told
    assert "trainer.checkpoint_every is 7" in told
    assert resume_status(True, 14, [{"step": 1}], trainer) == "resumed at optimizer step 14"
    assert resume_status(False, 0, [], trainer) is None
