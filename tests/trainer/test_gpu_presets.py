"""The presets for GPUs, on a machine without any: they parse, and the plan says who goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.cluster.placement import Node, Plan, plan
from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(preset: str, gpus: int) -> Plan:
    """On one node, which is the trainer's."""
    node = Node("10.0.0.1", "a", gpus, is_driver=True)
    return plan(load_config(preset, here=False), [node])


def test_sglang_qwen3_trains_on_half_of_a_node_and_serves_on_the_other() -> None:
    found = planned("sglang_qwen3", 8)
    assert found.mode == "disaggregated"
    assert found.ranks == tuple((i, 1) for i in range(4))
    assert found.engines == tuple((4 + i, 1) for i in range(4))


def test_colocate_shares_every_gpu() -> None:
    found = planned("colocate", 8)
    assert found.mode == "colocated"
    assert found.ranks == found.engines == tuple((i, 0.5) for i in range(8))


@pytest.mark.parametrize("preset", ["sglang_qwen3", "colocate"])
def test_too_small_a_cluster_is_refused_with_the_arithmetic(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .* has 4"):
        planned(preset, 4)


def test_a_configuration_is_looked_at_without_its_model_and_run_with_it() -> None:
    load_config("sglang_qwen3", here=False)
    with pytest.raises(
        ConfigError, match=r"model.path is 'models/Qwen3-8B', which is no folder here"
    ):
        load_config("sglang_qwen3")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("async_training.partial_rollout=false", "partial_rollout is false; set it to true"),
        ("cluster.placement=disaggregated", "set placement to 'colocated'"),
    ],
)
def test_lending_memory_needs_calls_that_may_be_cut_and_gpus_that_are_shared(
    override: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        load_config("colocate", [override], here=False)
