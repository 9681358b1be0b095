"""A run that goes on with a changed configuration says what applies, and refuses what cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import ray

from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.run.checks import check_attached, check_run
from stepwell.run.folder import begin
from stepwell.run.resume import origin, told
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import ConfigError
from tests.e2e.conftest import ROOT

MODEL = ROOT / "examples" / "quickstart" / "model"


def configured(folder: Path, *overrides: str) -> RunConfig:
    tasks = folder / "tasks.jsonl"
    if not tasks.exists():
        lines = [f'{{"question": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(8)]
        tasks.write_text("".join(lines))
        (folder / "val.jsonl").write_text('{"question": "1 + 9?", "answer": "10"}\n')
    data = [f"data.train.path={tasks}", "data.val.kind=jsonl", f"data.val.path={folder}/val.jsonl"]
    where = [f"run.dir={folder / 'run'}", "logging.wandb=disabled", "data.train.kind=jsonl"]
    return load_config("quickstart", [*where, *data, *overrides])


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The folder of a project whose run has a checkpoint of step 20."""
    config = configured(tmp_path)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 2, origin=origin(config, 8))
    store.save(20, {})
    begin(config)
    return tmp_path


def lines(project: Path, *overrides: str) -> list[str]:
    store = CheckpointStore(project / "run" / "checkpoints")
    path = store.find("auto")
    assert path is not None
    config = configured(project, *overrides)
    check_run(config)
    return told(store.about(path), config)


def refused(project: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run(configured(project, *overrides))
    assert not ray.is_initialized()
    (line,) = str(caught.value).splitlines()
    return line


def test_what_was_not_changed_needs_no_word(stopped: Path) -> None:
    assert lines(stopped) == []
    assert lines(stopped, "logging.console=quiet", "cluster.object_store_mb=200") == []


def test_lr_n_and_advantage_apply_from_now_on(stopped: Path) -> None:
    changes = ("backend.lr=1e-5", "rollout.n=4", "algorithm.adv_estimator=rloo")
    (line,) = lines(stopped, *changes)
    assert line.startswith("changed, and applies from now on: ")
    assert "backend.lr 0.0001 → 1e-05" in line
    assert "rollout.n 8 → 4" in line
    assert "algorithm.adv_estimator grpo → rloo" in line
    assert line.endswith("; groups that the pool holds keep theirs")


def test_the_seed_stays_as_the_checkpoint_has_it(stopped: Path) -> None:
    assert lines(stopped, "run.seed=7") == [
        "changed, but stays as the checkpoint has it: run.seed 0"
    ]


def test_prompts_go_on_in_the_order_of_the_checkpoint_whatever_the_seed(stopped: Path) -> None:
    def source(seed: int) -> PromptSource:
        config = configured(stopped, f"run.seed={seed}")
        assert config.data is not None
        return PromptSource(config.data.train)

    first, second = source(0), source(7)
    assert [first.next() for _ in range(3)] != [second.next() for _ in range(3)]
    second.load_state_dict(first.state_dict())
    assert [first.next() for _ in range(9)] == [second.next() for _ in range(9)]


def test_a_model_that_was_moved_is_the_same_one(stopped: Path) -> None:
    shutil.copytree(MODEL, stopped / "moved")
    assert lines(stopped, f"model.path={stopped / 'moved'}") == []


def test_another_model_is_refused_with_the_old_one_and_the_remedy(stopped: Path) -> None:
    shutil.copytree(MODEL, stopped / "other")
    weights = stopped / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    said = refused(stopped, f"model.path={stopped / 'other'}")
    checkpoint = stopped / "run" / "checkpoints" / "step_20"
    assert f"model.path is '{stopped / 'other'}', but the checkpoint {checkpoint} is of" in said
    assert str(MODEL.name) in said
    assert "run.resume=never, or another run.name" in said
    check_run(configured(stopped, f"model.path={stopped / 'other'}", "run.resume=never"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("backend.optimizer=sgd", "backend.optimizer was 'adamw' and is 'sgd'"),
        ("backend.lora={rank: 4}", "backend.lora.rank was None and is 4"),
        ("data.train.prompt_key=answer", "data.train.prompt_key was 'question' and is 'answer'"),
    ],
)
def test_what_its_state_is_of_no_use_to_is_refused(stopped: Path, change: str, named: str) -> None:
    said = refused(stopped, change)
    assert named in said
    assert "set it back, or start over: run.resume=never, or another run.name" in said


def test_a_model_that_was_trained_on_tasks_goes_on_with_live_traffic(stopped: Path) -> None:
    step = stopped / "run" / "checkpoints" / "step_20"
    config = load_config("live", [f"run.dir={stopped / 'live'}", f"run.resume={step}"])
    check_attached(config)


def test_data_that_has_other_rows_is_refused(stopped: Path) -> None:
    with (stopped / "tasks.jsonl").open("a") as file:
        file.write('{"question": "100 + 1?", "answer": "101"}\n')
    said = refused(stopped)
    assert f"data.train had 8 tasks when the checkpoint {stopped}/run/checkpoints/step_20" in said
    assert "and has 9" in said


def test_a_checkpoint_of_another_run_is_named_with_the_weights_to_begin_with(
    stopped: Path,
) -> None:
    theirs = stopped / "run" / "checkpoints" / "step_20"
    line = refused(
        stopped, f"run.dir={stopped / 'second'}", f"run.resume={theirs}", "backend.optimizer=sgd"
    )
    assert f"the checkpoint {theirs} cannot go on" in line
    assert f"model.path={stopped / 'run' / 'weights' / 'v'}" in line
    assert "start over" not in line
