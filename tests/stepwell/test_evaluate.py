"""`stepwell eval`: which configuration is run, and a whole evaluation of a run and of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell import load_config
from stepwell.cli.main import main
from stepwell.run.evaluate import evaluation_of
from stepwell.run.folder import begin, only_run_in, read_run
from stepwell.trainer.config.data import JsonlSource
from stepwell.trainer.errors import ConfigError
from tests.e2e.conftest import SMALL

MODEL = load_config("quickstart").model.path
Capture = pytest.CaptureFixture[str]


def run_of(folder: Path, *overrides: str) -> Path:
    """The folder of a run that has ended, without a checkpoint."""
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=mine", *overrides]))
    return folder


def checkpoint(run: Path, step: int) -> Path:
    """Make a checkpoint as far as `eval` reads it before anything is started."""
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text("{}")
    return folder


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are not read."""
    monkeypatch.setattr("stepwell.trainer.checkpoint.CheckpointStore.about", lambda self, path: {})


@pytest.mark.usefixtures("_unchecked")
def test_a_run_is_evaluated_beside_itself_and_only_evaluated(tmp_path: Path) -> None:
    own = ["validation.n=3", "gateway.port=8199", "engine.port=4711", r"rollout.stop=['\${HOME}']"]
    run = run_of(tmp_path / "mine", *own)
    checkpoint(run, 5)
    newest = checkpoint(run, 12)
    config = evaluation_of(str(run))
    assert (config.run.dir, config.run.name) == (run / "eval", "mine-eval")
    assert config.run.resume == newest
    assert (config.validation.only, config.validation.n) == (True, 3)
    assert (config.gateway.port, config.engine.port, config.logging.wandb) == (0, 0, "disabled")
    assert config.pool.journal_dir is None
    assert config.rollout.stop == ("${HOME}",)
    config = evaluation_of(str(run), 5, None, ["validation.n=8"])
    assert (config.run.resume, config.validation.n) == (run / "checkpoints" / "step_5", 8)
    assert read_run(run).name == "mine", "the run's own file is as it was"


@pytest.mark.usefixtures("_unchecked")
def test_engines_of_a_live_run_are_left_alone_and_others_are_taken(tmp_path: Path) -> None:
    run = run_of(tmp_path / "mine", "engine.kind=attach", "engine.urls=[http://a:1,http://b:1]")
    checkpoint(run, 5)
    assert evaluation_of(str(run)).engine.urls == ("http://a:1", "http://b:1")
    with only_run_in(run):
        with pytest.raises(ConfigError, match=r"is alive, and its engines \(http://b:1\)"):
            evaluation_of(str(run), "latest", None, ["engine.urls=[http://b:1,http://c:1]"])
        others = evaluation_of(str(run), "latest", None, ["engine.urls=[http://c:1]"])
    assert others.engine.urls == ("http://c:1",)


@pytest.mark.usefixtures("_unchecked")
def test_what_is_named_beside_the_command_is_that_and_not_what_the_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, here = tmp_path / "started", tmp_path / "here"
    for folder in (started, here):
        folder.mkdir()
        for name in ("held.jsonl", "more.jsonl", "reward.py"):
            (folder / name).write_text("")
    (started / "theirs.jsonl").write_text("")
    (here / "a").write_text("")
    monkeypatch.chdir(started)
    run = run_of(tmp_path / "mine")
    checkpoint(run, 5)
    monkeypatch.chdir(here)
    typed = [
        "data.val=held.jsonl",
        "data.train={kind: jsonl, path: [more.jsonl, theirs.jsonl]}",
        "data.train.skip_instance_ids=[a]",
        "rollout.reward=reward.py:score",
    ]
    config = evaluation_of(str(run), "latest", None, typed)
    assert Path.cwd() == started
    assert config.data is not None
    assert isinstance(config.data.val, JsonlSource)
    assert isinstance(config.data.train, JsonlSource)
    assert config.data.val.path == here / "held.jsonl"
    assert config.data.train.path == (here / "more.jsonl", Path("theirs.jsonl"))
    assert config.data.train.skip_instance_ids == ("a",)
    assert config.rollout.reward is not None
    assert config.rollout.reward.function == f"{here}/reward.py:score"


@pytest.mark.usefixtures("_unchecked")
def test_the_key_of_each_rollout_of_a_harness_is_no_secret_of_the_run(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "x"}\n')
    folder = tmp_path / "mine"
    folder.mkdir()
    own = [f"run.dir={folder}", f"data={tasks}", "rollout.harness=claude_code"]
    began = load_config(None, [f"model.path={MODEL}", *own])
    begin(began)
    checkpoint(folder, 5)
    assert evaluation_of(str(folder)).rollout.harness == began.rollout.harness


def test_a_model_is_evaluated_on_the_tasks_of_a_preset(tmp_path: Path) -> None:
    config = evaluation_of(str(MODEL), "latest", "quickstart", ["validation.n=4"])
    assert (config.model.path, config.validation.only, config.validation.n) == (MODEL, True, 4)
    assert config.run.name == "eval-model"


def test_a_models_folder_may_have_any_name(tmp_path: Path) -> None:
    model = tmp_path / "my model: {2} #1"
    model.symlink_to(MODEL)
    config = evaluation_of(str(model), "latest", "quickstart")
    assert (config.model.path, config.run.name) == (model, "eval-my-model-2-1")


def said(capture: Capture, *argv: str, code: int) -> str:
    assert main(["eval", *argv]) == code
    err = capture.readouterr().err
    assert len(err.splitlines()) == 1, err
    return err


def test_a_mistake_is_one_line_with_its_remedy(tmp_path: Path, capsys: Capture) -> None:
    run = run_of(tmp_path / "mine")
    assert "has no checkpoint" in said(capsys, str(run), code=2)
    assert "--config is quickstart, but" in said(capsys, str(run), "--config", "quickstart", code=2)
    assert "--step is 'last'" in said(capsys, str(run), "--step", "last", code=2)
    assert "say on what" in said(capsys, str(MODEL), code=2)
    of_model = [str(MODEL), "--config", "quickstart", "--step", "5"]
    assert "--step is 5, of a run's checkpoints" in said(capsys, *of_model, code=2)
    live = tmp_path / "live"
    live.mkdir()
    begin(load_config("live", [f"run.dir={live}"]))
    assert "learns from live traffic and has no tasks" in said(capsys, str(live), code=2)


@pytest.mark.e2e
@pytest.mark.long
def test_a_run_and_its_model_are_evaluated(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "mine"
    own = [*SMALL, f"run.dir={folder}", "run.name=mine", "gateway.port=0", "trainer.total_steps=2"]
    assert main(["train", "--config", "quickstart", *own]) == 0
    capsys.readouterr()

    def told(*argv: str) -> Any:
        assert main(["eval", *argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    metrics = (folder / "metrics.jsonl").read_bytes()
    of_run = told(str(folder))
    assert (of_run["step"], of_run["failed"]) == (2, 0)
    assert 0 <= of_run["score"] <= 1
    assert (folder / "eval" / "validation" / "step_2.jsonl").is_file()
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    again = told(str(folder), "validation.n=1")
    assert again["rollouts"] * 2 == of_run["rollouts"]
    of_model = told(str(MODEL), "--config", "quickstart", *SMALL, f"run.dir={tmp_path / 'model'}")
    assert (of_model["step"], of_model["rollouts"] > 0) == (0, True)
