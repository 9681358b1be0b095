"""A configuration needs an agent and tasks; everything else has a default that suits them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.config.load import load_config
from stepwell.run.checks import training_prompts, validation_tasks
from stepwell.trainer.config import HuggingFaceSource, JsonlSource, ParquetSource
from stepwell.trainer.errors import ConfigError
from tests.stepwell.configuring import fails

AGENT = "stepwell.quickstart.agent:agent"


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of two lines beside its tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"rollout: {{ agent: {AGENT} }}\ndata: tasks.jsonl\n")
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "mine.yaml"


def test_an_agent_and_tasks_are_a_configuration(minimal: Path) -> None:
    config, quickstart = load_config("mine.yaml"), load_config("quickstart")
    assert config.rollout.agent == AGENT
    assert isinstance(config.data.train, JsonlSource)
    assert config.data.train.path == Path("tasks.jsonl")
    assert config.data.val is None
    assert (config.run.name, config.run.dir) == ("mine", Path("runs/mine"))
    assert config.model == quickstart.model
    assert config.backend == quickstart.backend


def test_they_may_be_given_on_the_command_line_alone(minimal: Path) -> None:
    config = load_config(None, [f"rollout.agent={AGENT}", "data=tasks.jsonl"])
    assert config.model == load_config("quickstart").model
    assert config.run.name == "agent"


def test_a_run_is_called_as_the_file_of_its_agent(minimal: Path) -> None:
    for path in ("deep/my_agent.py:run", "deep.my_agent:run", "deep.my_agent.run"):
        assert load_config(None, [f"rollout.agent={path}", "data=tasks.jsonl"]).run.name == (
            "my_agent"
        )


def test_what_the_quickstart_sets_is_told_where_its_model_is_taken(
    minimal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("mine.yaml", ["trainer.total_steps=3"])
    (told,) = caplog.messages
    assert told.startswith("model.path is not set, so the quickstart's model is taken")
    assert f"backend.lr={config.backend.lr}, " in told
    assert "validation.every=20" in told
    assert "total_steps" not in told
    caplog.clear()
    load_config("mine.yaml", [f"model.path={config.model.path}"])
    load_config("quickstart")
    assert not caplog.messages


def test_what_suits_the_quickstarts_model_is_not_asked_of_another(minimal: Path) -> None:
    model = load_config("quickstart").model.path
    config = load_config("mine.yaml", [f"model.path={model}", "backend.micro_batch_tokens=7"])
    assert config.backend.lr != load_config("quickstart").backend.lr
    assert config.backend.micro_batch_tokens == 7


def test_a_file_without_a_name_is_called_as_the_file_also_when_it_extends_another(
    minimal: Path, tmp_path: Path
) -> None:
    (tmp_path / "my first.yaml").write_text("extends: quickstart\n")
    assert load_config("my first.yaml").run.name == "my-first"
    assert load_config("quickstart").run.name == "quickstart"


def test_without_validation_data_a_tenth_of_the_tasks_is_held_out_of_training(
    minimal: Path,
) -> None:
    config = load_config("mine.yaml")
    source, held_out = training_prompts(config), validation_tasks(config)
    trained = {source.next()["question"] for _ in range(36)}
    assert len(held_out) == 4
    assert len(trained) == 36
    assert not trained & {task["question"] for task in held_out}
    assert validation_tasks(load_config("mine.yaml", ["run.seed=9"])) == held_out


def test_a_task_that_occurs_twice_is_held_out_or_trained_not_both(
    minimal: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(f"{tasks.read_text()}\n{tasks.read_text()}")
    config = load_config("mine.yaml")
    source, held_out = training_prompts(config), validation_tasks(config)
    trained = {source.next()["question"] for _ in range(72)}
    assert len({task["question"] for task in held_out}) == len(held_out) == 4
    assert len(trained) == 36


def test_one_task_is_too_few_to_hold_one_out(minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"data.train .*1 .*data.val"):
        training_prompts(load_config("mine.yaml"))


def test_validation_data_that_is_given_is_taken_whole(minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"question": "9 + 9?", "answer": "18"}\n')
    config = load_config("mine.yaml", ["data.val=val.jsonl"])
    source, held_out = training_prompts(config), validation_tasks(config)
    assert [task["question"] for task in held_out] == ["9 + 9?"]
    assert len({source.next()["question"] for _ in range(40)}) == 40


@pytest.mark.parametrize(
    ("text", "kind", "path"),
    [
        ("tasks.jsonl", JsonlSource, Path("tasks.jsonl")),
        ("data/*.jsonl", JsonlSource, Path("data/*.jsonl")),
        ("tasks.parquet", ParquetSource, Path("tasks.parquet")),
        ("openai/gsm8k", HuggingFaceSource, "openai/gsm8k"),
        ("tasks.csv", HuggingFaceSource, "tasks.csv"),
    ],
)
@pytest.mark.parametrize("key", ["data", "data.train", "data.val"])
def test_a_path_alone_is_a_source(
    minimal: Path, key: str, text: str, kind: type, path: str
) -> None:
    data = load_config("mine.yaml", [f"{key}={text}"]).data
    source = data.val if key == "data.val" else data.train
    assert isinstance(source, kind)
    assert source.path == path


def test_a_path_alone_takes_further_keys_and_replaces_what_a_preset_has(minimal: Path) -> None:
    (minimal.parent / "b.yaml").write_text("extends: quickstart\ndata: { train: tasks.jsonl }\n")
    overrides = ["data.train.prompt_key=q", "data.val=val.jsonl"]
    data = load_config("b.yaml", overrides).data
    assert isinstance(data.train, JsonlSource)
    assert isinstance(data.val, JsonlSource)
    assert (data.train.prompt_key, data.val.prompt_key) == ("q", "question")
    assert load_config("mine.yaml", ["data.train.prompt_key=q"]).data.train == data.train


def test_text_that_is_no_source_is_refused_with_what_is_one(minimal: Path) -> None:
    said = fails("data.train=tasks", config="mine.yaml")
    assert "data.train.kind is 'tasks'" in said
    assert len(said.splitlines()) == 1
