"""Environments of `verifiers` as data: what a run makes of the line, and errors. The package
itself, which pins others than ours, is in `make test-harness`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.trainer.config import VerifiersSource
from stepwell.trainer.data import verifiers
from stepwell.trainer.data.tasks import open_tasks
from stepwell.trainer.environments import verifiers_episode
from stepwell.trainer.errors import ConfigError, DataError
from tests.helpers import gone

LINE = "data.train={kind: verifiers, taskset: adds, python: vf/bin/python}"
PYTHON = str(Path("vf/bin/python").absolute())


def source(**changes: Any) -> VerifiersSource:
    given = {"kind": "verifiers", "taskset": "adds", "python": sys.executable}
    return VerifiersSource.model_validate({**given, **changes})


def loaded(*options: str) -> RunConfig:
    return load_config(None, [LINE, *options], here=False)


def test_one_line_is_a_run_whose_rollouts_are_episodes() -> None:
    rollout = loaded().rollout
    assert rollout.agent == "harness"
    assert rollout.harness is not None
    assert rollout.harness.command[:3] == (PYTHON, verifiers_episode.__file__, "episode")
    assert "--client" not in rollout.harness.command
    assert rollout.harness.infrastructure == (verifiers_episode.INFRASTRUCTURE,)
    assert rollout.harness.grade is not None
    assert rollout.timeout_s > rollout.harness.timeout_s


def test_the_train_client_renders_with_the_runs_model() -> None:
    run = loaded("data.train.client=train")
    assert run.rollout.harness is not None
    assert run.rollout.harness.command[-4:] == (
        "--client",
        "train",
        "--tokenizer",
        str(run.model.path.absolute()),
    )


def test_keys_of_the_harness_go_over_those_of_the_line() -> None:
    run = loaded("rollout.harness={timeout_s: 30, env: {A: b}}")
    assert run.rollout.harness is not None
    assert run.rollout.harness.timeout_s == 30
    assert run.rollout.harness.env == {"STEPWELL_API_KEY": "{api_key}", "A": "b"}
    assert run.rollout.harness.command[0] == PYTHON


def test_a_configuration_that_was_read_is_read_again_as_the_same() -> None:
    run = loaded()
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.agent=stepwell.quickstart.agent:agent", r"rollout\.agent is 'stepwell.*leave it"),
        ("rollout.harness=codex", r"rollout\.harness is 'codex'; leave it out"),
        ("data.val=tasks.jsonl", r"val of 'jsonl': episodes of verifiers need tasks of verifiers"),
        (
            "data.val={kind: verifiers, taskset: adds, python: other}",
            r"data\.train\.python is vf/bin/python \(eval\) and data\.val\.python other",
        ),
        ("rollout.harness={sandbox: docker}", "image is missing"),
    ],
)
def test_what_episodes_leave_no_room_for_is_refused(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(option)


def test_tasks_are_what_the_environments_own_python_lists(tmp_path: Path) -> None:
    python = tmp_path / "python"
    row = {"instance_id": "1", "data_source": "adds", "question": "2 + 2?", "answer": None}
    row["metadata"] = {"index": 1}
    lines = f"loading\n{json.dumps(row)}\n"
    python.write_text(f"#!/bin/sh\nprintf '%s' '{lines}'\necho \"$@\" >&2\n")
    python.chmod(0o755)
    config = {"agent": {"harness": {"id": "null"}}}
    (task,) = open_tasks(source(python=python, config=config))
    told = {"index": 1, "taskset": "adds", "env_config": json.dumps(config)}
    assert task == {**row, "metadata": told}


def test_what_a_package_leaves_running_neither_holds_the_list_up_nor_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers, "LIST_S", 20.0)
    python = tmp_path / "python"
    row = {"instance_id": "1", "data_source": "adds", "question": "?", "answer": None}
    line = json.dumps({**row, "metadata": {"index": 1}})
    left = tmp_path / "left"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {left}\necho '{line}'\n")
    python.chmod(0o755)
    assert len(open_tasks(source(python=python))) == 1
    assert asyncio.run(gone(int(left.read_text())))


def test_nobody_answers_what_a_package_asks(tmp_path: Path) -> None:
    """What stands at the terminal is the run's."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nread answer && echo "it read $answer" >&2\nexit 1\n')
    python.chmod(0o755)
    (tmp_path / "typed").write_text("yes\n")
    stdin = os.dup(0)
    typed = os.open(tmp_path / "typed", os.O_RDONLY)
    try:
        os.dup2(typed, 0)
        with pytest.raises(DataError, match="does not list: exit status 1;"):
            open_tasks(source(python=python))
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(typed)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", r"python is '/nowhere/python': No such file.*pip install verifiers"),
        (sys.executable, r"taskset is 'adds', which .* does not list: .*No module named 'verif"),
        ("/bin/true", r"taskset is 'adds', which has no task"),
    ],
)
def test_an_environment_that_cannot_be_listed_is_one_line(python: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_tasks(source(python=python))


def test_a_prompt_of_messages_is_their_text() -> None:
    messages = [SimpleNamespace(content="Add."), SimpleNamespace(content="1 and 2")]
    assert verifiers_episode.text_of(messages) == "Add.\n1 and 2"
    assert verifiers_episode.text_of("Add.") == "Add."
    assert verifiers_episode.text_of(None) == ""
