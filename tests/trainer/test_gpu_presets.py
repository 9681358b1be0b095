"""The presets for GPUs, on a machine without any: they parse, and a dry run says who goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.cli import main
from stepwell.presets import load_config
from stepwell.trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def dry_run(capsys: pytest.CaptureFixture[str], preset: str, *arguments: str) -> list[str]:
    assert main(["train", "--config", preset, "--dry-run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_sglang_qwen3_trains_on_half_of_a_node_and_serves_on_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dry_run(capsys, "sglang_qwen3", "--gpus", "8") == [
        "placement: disaggregated",
        "  node 10.0.0.1 (assumed 0): 8 GPUs, the trainer's process runs here",
        *(f"  trainer rank {i}: node 10.0.0.1, GPU {i}" for i in range(4)),
        *(f"  engine {i}: node 10.0.0.1, GPU {4 + i}" for i in range(4)),
    ]


def test_an_engine_of_two_nodes_is_planned_part_by_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ("cluster.engines=1", "cluster.gpus_per_engine=16")
    said = dry_run(capsys, "sglang_qwen3", "--gpus", "8,8,8", *overrides)
    assert said[-2:] == [
        "  engine 0, node 1 of 2: node 10.0.0.2, GPU 0, 1, 2, 3, 4, 5, 6, 7",
        "  engine 0, node 2 of 2: node 10.0.0.3, GPU 0, 1, 2, 3, 4, 5, 6, 7",
    ]


def test_colocate_shares_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "colocate", "--gpus", "8") == [
        "placement: colocated",
        "  node 10.0.0.1 (assumed 0): 8 GPUs, the trainer's process runs here",
        *(f"  trainer rank {i}: node 10.0.0.1, GPU {i}, 0.5 of it" for i in range(8)),
        *(f"  engine {i}: node 10.0.0.1, GPU {i}, 0.5 of it" for i in range(8)),
    ]


@pytest.mark.parametrize(("preset", "needs"), [("sglang_qwen3", 8), ("colocate", 8)])
def test_too_small_a_cluster_is_refused_with_the_arithmetic(
    preset: str, needs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--config", preset, "--dry-run", "--gpus", "4"]) == 2
    assert f"needs {needs} GPUs" in capsys.readouterr().err


def test_a_dry_run_needs_no_model_and_a_run_does() -> None:
    load_config("sglang_qwen3", paths_exist=False)
    with pytest.raises(
        ConfigError, match=r"model.path is 'models/Qwen3-8B', which is no folder here"
    ):
        load_config("sglang_qwen3")


def test_assumed_gpus_are_for_dry_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "quickstart", "--gpus", "8"]) == 2
    assert "--gpus plans for nodes that need not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--config", "quickstart", "--dry-run", "--gpus", "eight"])
    assert "argument --gpus: 'eight' is no list of numbers" in capsys.readouterr().err


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
        load_config("colocate", [override], paths_exist=False)
