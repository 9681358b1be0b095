"""`stepwell init NAME` writes a folder that runs as it is."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.cli.main import main
from stepwell.config.load import load_config
from stepwell.run.checks import training_prompts, validation_tasks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-first"]) == 0
    monkeypatch.chdir("my-first")
    return tmp_path / "my-first"


def test_the_folder_has_what_is_needed_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-first"]) == 0
    files = {"agent.py", "reward.py", "tasks.jsonl", "config.yaml", "test_agent.py", "README.md"}
    assert {path.name for path in Path("my-first").iterdir()} == files
    told = capsys.readouterr().out
    assert "cd my-first && stepwell train --config config.yaml" in told
    for text in (told, Path("my-first/README.md").read_text()):
        assert "pip install pytest && python -m pytest" in text
    assert "NAME" not in Path("my-first/README.md").read_text()


def test_its_configuration_is_of_a_run_of_that_name_with_some_tasks_held_out(project: Path) -> None:
    config = load_config("config.yaml")
    assert config.run.dir == Path("runs/my-first")
    assert len(validation_tasks(config)) == len(training_prompts(config)) // 10


@pytest.mark.parametrize("name", ["2026", "007", "1e5", "on", "null", "my first", "été"])
def test_any_name_of_a_folder_is_that_of_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """And the next command can be copied."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert shlex.split(line)[1:4] == ["cd", name, "&&"]
    monkeypatch.chdir(name)
    assert load_config("config.yaml").run.name == re.sub("[^a-z0-9]+", "-", name)


@pytest.mark.slow
def test_its_own_tests_pass(project: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["my-first", "my-first/agent.py", "my-first/agent.py/below"])
def test_it_writes_over_nothing(
    project: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.parent)
    before = {path: path.read_bytes() for path in project.iterdir()}
    assert main(["init", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"stepwell: {name} ")
    assert len(told.splitlines()) == 1
    assert {path: path.read_bytes() for path in project.iterdir()} == before


@pytest.mark.e2e
@pytest.mark.long
def test_its_agent_learns_its_tasks(project: Path) -> None:
    argv = [sys.executable, "-m", "stepwell", "train", "--config", "config.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "runs" / "my-first" / "summary.json").read_text())
    assert summary["eval_after"] > summary["eval_before"] + 0.3


def test_readme_shows_the_files_as_they_are_written(project: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("agent.py", "reward.py"):
        assert f"```python\n{(project / name).read_text()}```" in readme
    assert (project / "tasks.jsonl").read_text().partition("\n")[0] in readme
