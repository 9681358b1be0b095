"""Settings said once in a configuration hold for every part: model, seed, the run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError


def test_engine_and_gateway_take_the_model_of_the_run_unless_told_otherwise() -> None:
    config = load_config("quickstart", ["model.path=/m"], here=False)
    assert (config.engine.model_path, config.gateway.tokenizer_path) == (Path("/m"), "/m")
    own = ["model.path=/m", "engine.model_path=/e", "gateway.tokenizer_path=/t"]
    config = load_config("quickstart", own, here=False)
    assert (config.engine.model_path, config.gateway.tokenizer_path) == (Path("/e"), "/t")


def test_the_seed_of_the_run_is_that_of_every_part_unless_told_otherwise() -> None:
    config = load_config("quickstart", ["run.seed=7", "backend.seed=8"])
    data = config.data
    seeds = (config.engine.seed, data.train.shuffle_seed, data.val.shuffle_seed)
    assert seeds == (7, 7, 7)
    assert config.backend.seed == 8


def test_a_run_is_in_runs_under_its_name() -> None:
    assert load_config("quickstart", ["run.name=mine"]).run.dir == Path("runs/mine")
    assert load_config("quickstart", ["run.dir=/elsewhere"]).run.dir == Path("/elsewhere")


def test_a_resolved_configuration_reads_as_itself() -> None:
    config = load_config("quickstart", ["run.seed=7"])
    assert type(config).model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_queue_size", "async_training.max_queue_size"),
        ("max_outstanding_groups", "rollout.max_outstanding_groups"),
        ("group_deadline_s", "rollout.group_deadline_s"),
    ],
)
def test_a_limit_of_the_train_channel_has_one_key(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"pool.channels.train.{name} is .*; set {key}=30"):
        load_config("quickstart", [f"pool.channels.train.{name}=30"])
