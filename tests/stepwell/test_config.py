"""Configurations: every preset parses, every mistake gets one line with key, value and remedy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stepwell.config.keys import keys
from stepwell.config.load import find_config, load_config
from stepwell.trainer.config.data import HuggingFaceSource, JsonlSource
from stepwell.trainer.errors import ConfigError
from tests.stepwell.configuring import fails

PRESETS = sorted(Path(__file__).parents[2].glob("configs/*.yaml"))


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_shipped_preset_parses(path: Path) -> None:
    config = load_config(path.stem, ["model.path=examples/quickstart/model"])
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_a_preset_says_only_what_differs_from_the_defaults(path: Path) -> None:
    """Or from the preset that it extends."""

    def leaves(section: object, name: str) -> Iterator[tuple[str, object]]:
        for key, value in section.items() if isinstance(section, dict) else ():
            yield f"{name}{key}", value
            yield from leaves(value, f"{name}{key}.")

    given = yaml.safe_load(path.read_text())
    if (base := given.pop("extends", None)) is not None:
        below = dict(leaves(load_config(base, here=False).model_dump(mode="json"), ""))
    else:
        below = {key.name: key.default for key in keys()}
    missing = object()
    assert not [(k, v) for k, v in leaves(given, "") if below.get(k, missing) == v]


def test_overrides_go_over_the_file() -> None:
    config = load_config("quickstart", ["trainer.total_steps=5", "run.name=mine"])
    assert config.trainer.total_steps == 5
    assert config.run.dir == Path("runs/mine")


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces the ~ in KEY=VALUE, and a folder of that name is a trap."""
    model = load_config("quickstart").model.path.absolute()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(model)
    paths = ("run.dir=~/x", "model.path=~/model", "data=~/tasks.jsonl", "run.resume=~/step_1")
    config = load_config("quickstart", paths)
    assert (config.run.dir, config.run.resume) == (tmp_path / "x", tmp_path / "step_1")
    assert config.model.path == config.engine.model_path == tmp_path / "model"
    assert config.gateway.tokenizer_path == str(tmp_path / "model")
    assert config.data is not None
    assert isinstance(config.data.train, JsonlSource)
    assert config.data.train.path == tmp_path / "tasks.jsonl"
    texts = (
        "trainer.save_debug_rollout_data=~/batches",
        "trainer.load_debug_rollout_data=~/{rollout_id}.pt",
        "gateway.tokenizer_path=~/model",
        "engine.python=~/venv/bin/python",
        "data=~/rows",
    )
    config = load_config("quickstart", texts)
    assert config.trainer.save_debug_rollout_data == f"{tmp_path}/batches"
    assert config.trainer.load_debug_rollout_data == f"{tmp_path}/{{rollout_id}}.pt"
    assert config.gateway.tokenizer_path == f"{tmp_path}/model"
    assert config.engine.python == f"{tmp_path}/venv/bin/python"
    assert config.data is not None
    assert isinstance(config.data.train, HuggingFaceSource)
    assert config.data.train.path == f"{tmp_path}/rows"


def test_an_engine_is_chosen_by_its_kind_alone_and_keeps_its_other_keys() -> None:
    chosen = load_config("quickstart", ["engine=sglang", "engine.port=31000"]).engine
    usual = load_config("quickstart", ["engine.port=31000"]).engine
    assert (chosen.kind, usual.kind) == ("sglang", "embedded")
    assert chosen.model_dump(exclude={"kind"}) == usual.model_dump(exclude={"kind"})
    assert fails("engine=sglnag").startswith("engine.kind is 'sglnag'; did you mean sglang?")


def test_the_missions_keys_are_read_as_they_stand() -> None:
    config = load_config(
        "quickstart",
        [
            "async_training.staleness_threshold=0.1",
            "async_training.trigger_parameter_sync_step=4",
            "async_training.require_batches=1",
            "async_training.partial_rollout=false",
            "async_training.use_rollout_log_probs=true",
            "async_training.max_queue_size=null",
        ],
    )
    assert config.async_training.trigger_parameter_sync_step == 4
    assert config.async_training.max_queue_size is None


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    message = fails("async_training.stalenes_threshold=0.1")
    assert "async_training.stalenes_threshold is not a known key" in message
    assert "did you mean 'staleness_threshold'?" in message


def test_an_unknown_section_is_refused_with_the_nearest_known_one() -> None:
    assert "did you mean 'trainer'?" in fails("trainr.total_steps=3")


def test_a_key_inside_a_union_is_named_as_the_file_spells_it() -> None:
    message = fails("data.train.sise=3")
    assert "data.train.sise is not a known key; did you mean 'size'?" in message
    assert "data.val.kind is 'csv'" in fails("data.val.kind=csv")


def test_a_wrong_type_names_key_value_and_what_it_should_be() -> None:
    message = fails("trainer.total_steps=many")
    assert "trainer.total_steps is 'many'; it should be a valid integer" in message
    message = fails("algorithm.off_policy.clip=0.2")
    assert "algorithm.off_policy.clip is 0.2; it should be a list, [a, b, …]" in message


def test_a_value_out_of_bounds_names_the_bound() -> None:
    message = fails("rollout.n=0")
    assert "rollout.n is 0" in message
    assert "greater than or equal to 1" in message


def test_every_problem_gets_a_line_of_its_own() -> None:
    assert len(fails("trainer.total_steps=many", "rollout.n=0").splitlines()) == 2


def test_a_missing_model_path_names_the_folder_and_the_remedy() -> None:
    message = fails("model.path=/nowhere")
    assert len(message.splitlines()) == 1
    assert "model.path is '/nowhere', which has no config.json" in message


def test_limits_that_contradict_each_other_show_the_arithmetic() -> None:
    message = fails(
        "rollout.timeout_s=100", "rollout.max_attempts=3", "rollout.group_deadline_s=200"
    )
    assert "100 × 3" in message
    assert "200" in message


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart'\? .*presets: .*quickstart"):
        find_config("quikstart")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("pool.channels.train.max_queue_size=8", "set async_training.max_queue_size=8"),
        ("pool.channels.train.max_outstanding_groups=8", "set rollout.max_outstanding_groups=8"),
        ("pool.default.max_queue_size=8", "set async_training.max_queue_size=8"),
    ],
)
def test_a_limit_that_the_run_sets_elsewhere_is_refused_and_not_overwritten(
    override: str, remedy: str
) -> None:
    key, _, value = override.partition("=")
    said = fails(override)
    assert f"{key} is {value}" in said
    assert remedy in said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.keep_weights=1"], "trainer.keep_weights is 1: .* set trainer.keep_weights=2"),
        (["async_training.mode=sync", "publish.guard.n=1000"], "publish.guard.n is 1000, but with"),
    ],
)
def test_a_guard_that_could_not_do_its_work_is_refused(overrides: list[str], message: str) -> None:
    load_config("quickstart", ["publish.guard.n=16", "trainer.keep_weights=2"])
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", ["publish.guard.n=16", *overrides])
