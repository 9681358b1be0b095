"""The configuration of `stepwell try`."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient
from stepwell.show import attempt
from stepwell.show.attempt import config_of_try
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.data import Task
from stepwell.trainer.errors import ConfigError
from tests.e2e.conftest import ROOT


@pytest.mark.parametrize("name", ["quickstart", "harness_shell"])
@pytest.mark.parametrize("keys", [[], ["rollout.harness.timeout_s=900"]])
def test_a_preset_is_tried_on_the_model_of_any_configuration(
    name: str, keys: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its times are the harness's, not those of the agent that the configuration has."""
    program = tmp_path / "codex"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = f"model.path={ROOT / 'examples' / 'quickstart' / 'model'}"
    config, task = config_of_try("codex", "Write it.", name, [model, *keys])
    harness = HarnessConfig(preset="codex")
    assert config.rollout.harness == harness.model_copy(update={"timeout_s": 900.0} if keys else {})
    assert task["question"] == "Write it."


def test_a_configuration_without_a_harness_has_nothing_to_try(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: quickstart\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml has no rollout\.harness; name one, e\.g"):
        config_of_try(str(mine), "Write it.", None, [])


class Refused:
    """A worker none of whose rollouts begins."""

    def __init__(self, *args: Any, **keys: Any) -> None: ...

    async def run_group(self, *args: Any) -> dict[str, int]:
        return {"no_gateway": 1}

    async def close(self) -> None: ...


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunConfig, Task]:
    """A rollout to try that will not begin."""
    monkeypatch.setattr(attempt, "RolloutWorker", Refused)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "codex").write_text("#!/bin/sh\n")
    (tmp_path / "codex").chmod(0o755)
    return config_of_try("codex", "Write it.", "quickstart", [f"run.dir={tmp_path}"])


async def test_a_task_is_tried_whatever_its_data_set_says(refused: tuple[RunConfig, Task]) -> None:
    """The trainer makes a large integer, half a character and a date of Parquet plain, too."""
    config, task = refused
    metadata = {"seed": 1 << 70, "said": "half \ud800", "made": date(2026, 12, 1)}
    task = {**task, "metadata": metadata}
    async with DataPoolClient.local() as pool:
        tried = await attempt._rollout(config, task, pool, ["http://127.0.0.1:9"], None, None)
    assert tried.ended == "no_gateway"


async def test_a_rollout_without_a_log_is_not_shown_with_that_of_another(
    tmp_path: Path, refused: tuple[RunConfig, Task]
) -> None:
    config, task = refused
    logs = tmp_path / "logs" / "harness"
    logs.mkdir(parents=True)
    (logs / "of-an-earlier-one.log").write_text("another reason")
    async with DataPoolClient.local() as pool:
        tried = await attempt._rollout(config, task, pool, ["http://127.0.0.1:9"], None, None)
    assert (tried.ended, tried.log) == ("no_gateway", logs)
