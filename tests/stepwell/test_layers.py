"""A configuration is put together from a preset, the files that extend it, and overrides."""

from pathlib import Path

import pytest

from stepwell.config.load import load_config
from stepwell.trainer.config.data import ParquetSource
from stepwell.trainer.config.harness import HarnessConfig
from tests.stepwell.configuring import fails

# --- another kind of a section ---------------------------------------------------------------


def parquet(*more: str) -> list[str]:
    return ["data.train.kind=parquet", "data.train.path=mine.parquet", *more]


def test_another_kind_replaces_the_section_and_leaves_no_key_of_the_old_one() -> None:
    train = load_config("quickstart", parquet()).data.train
    assert isinstance(train, ParquetSource)
    assert train.path == Path("mine.parquet")


def test_the_kind_alone_may_stand_for_the_section() -> None:
    train = load_config("quickstart", ["data.train=parquet", "data.train.path=a.parquet"]).data
    assert isinstance(train.train, ParquetSource)


def test_a_key_that_is_given_with_the_new_kind_is_checked_against_it() -> None:
    assert "data.train.size is not a known key" in fails(*parquet("data.train.size=3"))


def test_what_every_kind_has_is_kept_and_what_only_sounds_the_same_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(
        "extends: quickstart\n"
        "data: {train: {kind: jsonl, path: a.jsonl, shuffle: false, prompt_key: q}}\n"
    )
    train = load_config(str(path), parquet()).data.train
    assert isinstance(train, ParquetSource)
    assert (train.shuffle, train.prompt_key) == (False, "q")
    said = fails("data.train.kind=parquet", config=str(path))
    assert "data.train.path is missing" in said
    assert len(said.splitlines()) == 1


def test_an_engine_of_another_kind_keeps_what_both_have() -> None:
    for choice in ("engine.kind=sglang", "engine=sglang"):
        engine = load_config("quickstart", [choice]).engine
        assert (engine.kind, engine.max_running_requests) == ("sglang", 128)


def test_the_same_kind_again_replaces_nothing() -> None:
    mine = load_config("quickstart", ["data.train.kind=reasoning_gym", "data.train.size=7"])
    usual = load_config("quickstart")
    assert mine.data.train == usual.data.train.model_copy(update={"size": 7})


def test_a_name_that_stands_for_a_section_takes_further_keys(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: quickstart\nrollout: {reward: reasoning_gym}\n")
    reward = load_config(str(path), ["rollout.reward.timeout_s=5"]).rollout.reward
    assert reward is not None
    assert (reward.function, reward.timeout_s) == ("reasoning_gym", 5)


# --- a file that extends another -------------------------------------------------------------


def test_three_lines_on_top_of_a_preset_are_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "mine.yaml").write_text(
        "extends: quickstart\nrun: {name: mine}\ntrainer: {total_steps: 3}\n"
    )
    config = load_config("../mine.yaml", ["rollout.n=4"])
    assert (config.run.name, config.trainer.total_steps, config.rollout.n) == ("mine", 3, 4)
    assert config.run.dir == Path("runs/mine")
    assert config.model.path.is_dir()


def test_a_preset_of_the_working_folder_may_extend_ours_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("extends: quickstart\nrun: {name: own}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart")
    assert config.run.name == "own"
    assert config.trainer.total_steps == 40


def test_a_file_extends_a_path_beside_it_through_several_steps(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: quickstart\nrun: {name: a}\nrollout: {n: 3}\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.yaml").write_text("extends: ../a.yaml\nrun: {name: b}\n")
    config = load_config(str(tmp_path / "deep" / "b.yaml"))
    assert (config.run.name, config.rollout.n) == ("b", 3)


def test_files_that_extend_each_other_are_an_error_that_shows_the_cycle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    said = fails(config=str(tmp_path / "a.yaml"))
    assert len(said.splitlines()) == 1
    assert "a.yaml extends" in said
    assert said.count("a.yaml") >= 2
    assert "b.yaml" in said


def test_extending_what_is_not_there_names_the_file_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: quikstart\n")
    said = fails(config=str(tmp_path / "a.yaml"))
    assert f"{tmp_path / 'a.yaml'}: extends is 'quikstart'" in said
    assert "did you mean 'quickstart'?" in said
    (tmp_path / "a.yaml").write_text("extends: [quickstart]\n")
    assert "extends is ['quickstart']; write the name of one preset" in fails(
        config=str(tmp_path / "a.yaml")
    )
    assert "extends is given in a file" in fails("extends=quickstart")


def test_an_error_names_the_file_it_is_in_and_the_command_line_none(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: quickstart\nrollout: {n: 0}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\ntrainer: {total_steps: 0}\n")
    a, b, c = fails("gateway.port=-1", config=str(tmp_path / "b.yaml")).splitlines()
    assert a.startswith(f"{tmp_path / 'a.yaml'}: rollout.n is 0")
    assert b.startswith(f"{tmp_path / 'b.yaml'}: trainer.total_steps is 0")
    assert c.startswith("gateway.port is -1")


@pytest.mark.parametrize(
    ("overrides", "kwargs"),
    [
        (["rollout.reward=gsm8k"], {}),
        (["rollout.reward=gsm8k", "rollout.reward.kwargs={y: 2}"], {"y": 2}),
        (["rollout.reward.kwargs={y: 2}", "rollout.reward=gsm8k"], {"y": 2}),
        (["rollout.reward.function=gsm8k"], {"x": 1}),
    ],
)
def test_a_name_alone_on_the_command_line_is_the_whole_section_as_in_a_file(
    tmp_path: Path, overrides: list[str], kwargs: dict[str, int]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: quickstart\nrollout: { reward: { function: math, kwargs: { x: 1 } } }\n"
    )
    reward = load_config(str(file), overrides, here=False).rollout.reward
    assert reward is not None
    assert (reward.function, reward.kwargs) == ("gsm8k", kwargs)


def test_another_preset_of_a_harness_does_not_keep_the_command_of_the_one_beneath(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: quickstart\nrollout: { harness: { command: [mine], workdir: w } }\n")
    own = ["rollout.harness=codex", "rollout.agent=null", "rollout.timeout_s=700"]
    own += ["rollout.group_deadline_s=2000"]
    config = load_config(str(file), own, here=False)
    assert config.rollout.harness == HarnessConfig(preset="codex")
