"""A run that cannot be is refused before it starts a process or removes a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from stepwell.presets import load_config
from stepwell.run import train
from stepwell.run_file import only_run_in
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
