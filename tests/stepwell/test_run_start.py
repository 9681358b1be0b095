"""A run that cannot be is refused before it starts a process or removes a file."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import ray

from stepwell.config.load import load_config
from stepwell.run.folder import begin, holder, only_run_in
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


@pytest.mark.parametrize(
    ("resume", "named"), [("auto", "weights"), ("never", "weights, checkpoints, logs")]
)
async def test_what_no_run_wrote_is_not_removed(tmp_path: Path, resume: str, named: str) -> None:
    """Weights of somebody's own, in the folder that run.dir=. names."""
    for name in ("weights", "checkpoints", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    options = ["logging.console=quiet", f"run.resume={resume}", f"run.dir={tmp_path}"]
    with pytest.raises(ConfigError, match=rf"where no run was and {named} would be removed"):
        await train(load_config("quickstart", options))
    assert all((tmp_path / n / "mine").is_file() for n in ("weights", "checkpoints", "logs"))


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
