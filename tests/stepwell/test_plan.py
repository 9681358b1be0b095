"""`stepwell plan`: presets for GPUs are placed and checked for memory, on machines made up here.

The facts of the models are those of their config.json on the hub, which is not asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.errors import BackendConfigError
from stepwell.backends.torch.memory import ModelShape
from stepwell.cli.main import main
from stepwell.cluster.placement import Node
from stepwell.config.load import load_config
from stepwell.run.checks import rank_memory
from stepwell.run.plan import Machines, RunPlan, machines_of, plan_run, shape_of
from stepwell.trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "30b": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Folder of a model that has its config.json alone, by its size."""

    def made(size: str) -> Path:
        folder = tmp_path / f"Qwen3-{size}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[size]))
        return folder

    return made


def planned(preset: str, path: Path, gpus: int, nodes: int = 1, *overrides: str) -> RunPlan:
    given = [f"model.path={path}", *overrides]
    config = load_config(preset, given, here=False)
    machines = machines_of(config, gpus, nodes, None)
    return plan_run(config, shape_of(config), machines, ["--config", preset, *given])


@pytest.mark.parametrize(
    ("preset", "size", "gpus", "nodes", "per_rank_gb"),
    [
        ("qwen3_4b_one_gpu", "4b", 1, 1, 60),
        ("qwen3_4b", "4b", 8, 1, 35),
        ("qwen3_4b_colocate", "4b", 8, 1, 30),
        ("qwen3_4b_nodes", "4b", 8, 4, 30),
        ("sglang_qwen3", "8b", 8, 1, 60),
        ("colocate", "8b", 8, 1, 45),
    ],
)
def test_each_preset_for_gpus_is_placed_and_fits_80_gb(
    model: Any, preset: str, size: str, gpus: int, nodes: int, per_rank_gb: float
) -> None:
    found = planned(preset, model(size), gpus, nodes)
    assert found.problems == ()
    config = load_config(preset, [f"model.path={model(size)}"], here=False)
    assert rank_memory(config, shape_of(config), 80e9).total < per_rank_gb * 1e9
    used = {(p.node, p.gpus.split(" (")[0]) for p in found.parts if p.gpus}
    assert len(used) == gpus * nodes, "every GPU has a part"
    names = [p.name for p in found.parts]
    assert [n for n in names if n.startswith("rank")] == [
        f"rank {i}" for i in range(config.backend.ranks)
    ]
    assert names.count("driver") == names.count("pool 0") == names.count("gateway 0") == 1


def test_facts_of_the_models_are_those_that_their_names_say(model: Any) -> None:
    shapes = {size: ModelShape.of(facts).parameters / 1e9 for size, facts in MODELS.items()}
    assert shapes["4b"] == pytest.approx(4.02, rel=0.01)
    assert shapes["8b"] == pytest.approx(8.19, rel=0.01)
    assert shapes["30b"] == pytest.approx(30.5, rel=0.01)


def test_one_gpu_is_shared_and_the_engine_has_flags_that_follow_from_the_keys(model: Any) -> None:
    found = planned("qwen3_4b_one_gpu", model("4b"), 1)
    rank, engine = found.parts[:2]
    assert (rank.gpus, engine.gpus) == ("GPU 0 (1/2)", "GPU 0 (1/2)")
    assert "engine 32.0" in rank.memory
    assert engine.memory.startswith("32.0 GB of each GPU (weights 8.0, KV cache 22")
    train, launch = found.commands
    assert train.startswith("on node-1: stepwell train --config qwen3_4b_one_gpu model.path=")
    flags = "--enable-lora --max-lora-rank 16 --lora-target-modules all --mem-fraction-static 0.4"
    assert launch.endswith(flags)
    assert " -m sglang.launch_server --model-path " in launch
    assert "--device cpu" not in launch, "as on a machine with GPUs"


def test_what_a_rank_keeps_while_its_engine_serves_has_to_fit_beside_it(model: Any) -> None:
    """Its weights, moments, reference and critic; gradients are freed when memory goes back."""
    larger = 'engine.extra_args=[--mem-fraction-static,"0.65"]'
    assert planned("colocate", model("8b"), 8, 1, larger).problems == ()
    critic = planned("colocate", model("8b"), 8, 1, larger, "algorithm.adv_estimator=gae")
    (problem,) = critic.problems
    assert problem.startswith("rank 0 to rank 7: keeps 29.9 GB while the engine has 52.0 GB")
    assert problem.endswith("engine.extra_args=[--mem-fraction-static=0.62] leaves that")


def test_engines_of_several_gpus_and_nodes_have_their_split_and_their_places(model: Any) -> None:
    large = ("cluster.gpus_per_engine=4", "cluster.engines=6", "backend.ranks=8")
    found = planned("qwen3_4b_nodes", model("4b"), 8, 4, *large)
    assert found.problems == ()
    engine = next(p for p in found.parts if p.name == "engine 1")
    assert (engine.node, engine.gpus) == ("node-2", "GPU 4–7")
    assert "--tp-size 4" in found.commands[-1]
    assert found.commands[:3] == (
        "on node-1: ray start --head --port=6379 --num-gpus=8",
        "on node-2 … node-4: ray start --address=node-1:6379 --num-gpus=8",
        "on node-1: stepwell train --config qwen3_4b_nodes model.path="
        f"{model('4b')} {' '.join(large)} cluster.address=node-1:6379",
    )
    wide = ("cluster.gpus_per_engine=16", "cluster.engines=1", "backend.ranks=8")
    found = planned("qwen3_4b_nodes", model("4b"), 8, 4, *wide)
    assert [p.node for p in found.parts if p.name == "engine 0"] == ["node-2", "node-3"]
    first, second = found.commands[-2:]
    assert "--tp-size 16" in first
    assert "--nnodes 2 --node-rank 0 --dist-init-addr" in first
    assert "--node-rank 1" in second


def test_a_rank_that_does_not_fit_is_one_line_with_what_would(model: Any) -> None:
    whole = ("backend.lora=null", "engine.weight_transport=disk")
    found = planned("qwen3_4b_one_gpu", model("4b"), 1, 1, *whole)
    (line,) = found.problems
    assert line.startswith("rank 0: needs ")
    assert "a GPU has 80 GB; backend.lora={rank: 16} takes " in line
    assert found.text().splitlines()[-2:] == ["does not fit", f"  {line}"]
    lends = "engine.extra_args=[--mem-fraction-static=0.9]"
    (line, *_) = planned("colocate", model("8b"), 8, 1, lends).problems
    assert "rank 7: keeps 13.5 GB while the engine has 72.0 GB" in line
    assert "--mem-fraction-static=0.83" in line
    apart = planned("sglang_qwen3", model("8b"), 8, 1, "backend.ranks=1", "cluster.engines=1")
    assert "backend.ranks=4 takes " in apart.problems[0]


def test_an_engine_without_room_for_a_row_is_one_line_for_all_of_them(model: Any) -> None:
    small = ("backend.lora.rank=8", 'engine.extra_args=[--mem-fraction-static,"0.8"]')
    found = planned("qwen3_4b", model("30b"), 8, 1, *small)
    (line,) = [p for p in found.problems if p.startswith("engine")]
    assert line.startswith("engine 0 to engine 3: 64 GB of a GPU leave room for ")
    assert "cluster.gpus_per_engine=2" in line


def test_engines_that_slime_runs_are_shown_as_its_own(model: Any) -> None:
    found = planned("qwen3_30b_slime", model("30b"), 8)
    assert "30.5e9 parameters" in found.model
    assert found.problems == ()
    assert found.parts[0].name == "trainer", "and no rank"
    assert found.commands[0].startswith("on node-1: stepwell serve --config qwen3_30b_slime ")
    (engine,) = [p for p in found.parts if p.name == "engine"]
    assert (engine.node, engine.memory) == ("http://127.0.0.1:30000", "somebody else's")
    assert not [c for c in found.commands if "launch_server" in c]


def test_without_gpus_parts_are_dealt_out_over_the_nodes() -> None:
    config = load_config("quickstart", ["cluster.engines=3", "pool.shards=2"])
    nodes = [Node(f"10.0.0.{k}", str(k), 0, k == 1) for k in (3, 1, 2)]
    found = plan_run(config, shape_of(config), Machines(nodes, 80e9), ["--config", "quickstart"])
    where = {p.name: p.node for p in found.parts}
    assert [where[f"engine {i}"] for i in range(3)] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert (where["rank 0"], where["pool 1"], where["gateway 0"]) == (
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1",
    )
    assert "number i without a GPU is on node i modulo" in found.strategy


def test_the_command_says_by_its_exit_code_whether_the_run_fits(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", "--config", "qwen3_4b", "--gpus", "8", f"model.path={model('4b')}"]
    assert main(given) == 0
    told = capsys.readouterr().out
    assert "placement disaggregated: ranks and engines on GPUs of their own" in told
    assert main([*given, "--gpu-gb", "24"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["name"] == "rank 0"
    assert main([*given, "--gpus", "4"]) == 2
    assert "needs 8 GPUs" in capsys.readouterr().err
    assert main(["plan", "--config", "qwen3_4b", "--nodes", "2", f"model.path={model('4b')}"]) == 2
    assert "--gpus is missing" in capsys.readouterr().err
    for wrong, why in (
        (["--gpu-gb", "0"], "--gpu-gb is 0.0"),
        (["--gpu-gb", "nan"], "--gpu-gb is nan"),
        (["--gpus", "-1"], "--gpus is -1"),
        (["engine.extra_args=[--mem-fraction-static=most]"], "--mem-fraction-static is 'most'"),
        (
            ["engine.extra_args=[--gpu-memory-utilization, '80']"],
            "--gpu-memory-utilization is '80'",
        ),
    ):
        assert main([*given, *wrong]) == 2
        assert why in capsys.readouterr().err


def test_a_model_whose_configuration_is_no_json_is_told(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model("4b")
    (folder / "config.json").write_text('{"model_type": "qwen3"')
    assert main(["plan", "--config", "qwen3_4b", "--gpus", "8", f"model.path={folder}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.json cannot be read" in line


def test_one_gpu_is_told_as_one(model: Any) -> None:
    config = load_config("qwen3_4b_one_gpu", [f"model.path={model('4b')}"], here=False)
    planned = plan_run(config, shape_of(config), machines_of(config, 1, 1, None), [])
    assert planned.machines == "1 node, 1 GPU of 80 GB each"


def test_a_model_of_the_hub_that_cannot_be_reached_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = load_config("qwen3_4b", here=False)
    with pytest.raises(BackendConfigError, match=r"hub cannot be reached.* `hf download Qwen"):
        shape_of(config)
    gone = load_config("qwen3_4b", ["model.path=models/none/at/all"], here=False)
    with pytest.raises(ConfigError, match=r"its config\.json alone is enough"):
        shape_of(gone)


def test_a_model_that_a_service_trains_has_no_rank_and_no_gpu(model: Any) -> None:
    at_tinker = ("trainer.backend=tinker", "backend.options={base_model: Qwen/Qwen3-4B}")
    own = ("backend.lora=null", "cluster.placement=auto")
    found = planned("qwen3_4b_one_gpu", model("4b"), 1, 1, *at_tinker, *own)
    assert found.problems == ()
    trainer, engine = found.parts[:2]
    assert (trainer.name, trainer.node, trainer.gpus) == ("trainer", "tinker's service", "")
    assert (engine.name, engine.gpus) == ("engine 0", "GPU 0")
    assert found.strategy.startswith("placement disaggregated")
    (driver,) = (part for part in found.parts if part.name == "driver")
    assert driver.memory == "trainer's loop, run.json"
    assert "--max-lora-rank 32 --lora-target-modules all" in found.commands[-1]


def test_a_row_too_long_for_a_rank_is_shared_by_ranks(model: Any) -> None:
    long = ("engine.context_length=262144", "cluster.gpus_per_engine=4", "cluster.engines=1")
    found = planned("qwen3_4b", model("4b"), 8, 1, *long)
    assert "backend.ranks=4 backend.context_parallel=2 takes" in found.problems[0]
    found = planned("qwen3_4b", model("4b"), 8, 1, *long, "backend.context_parallel=2")
    assert found.problems == ()
    with pytest.raises(BackendConfigError, match=r"divide the model's 32 attention heads"):
        planned(
            "qwen3_4b", model("4b"), 8, 1, *long, "backend.ranks=3", "backend.context_parallel=3"
        )


def test_no_row_with_pictures_is_shared_by_ranks(model: Any) -> None:
    path = model("4b")
    reads = MODELS["4b"] | {"model_type": "qwen2_vl", "vision_config": {}}
    (path / "config.json").write_text(json.dumps(reads))
    long = ("engine.context_length=262144", "cluster.gpus_per_engine=4", "cluster.engines=1")
    (problem, *_) = planned("qwen3_4b", path, 8, 1, *long).problems
    assert "context_parallel" not in problem
    with pytest.raises(BackendConfigError, match="the model reads pictures"):
        planned("qwen3_4b", path, 8, 1, *long, "backend.ranks=2", "backend.context_parallel=2")


def test_a_remedy_keeps_ranks_in_whole_groups_that_share_rows(model: Any) -> None:
    path = model("8b")
    large = MODELS["8b"] | {"num_attention_heads": 20, "num_hidden_layers": 120}
    (path / "config.json").write_text(json.dumps(large))
    shared = ("backend.ranks=5", "backend.context_parallel=5")
    (problem, *_) = planned("sglang_qwen3", path, 16, 1, *shared).problems
    assert "backend.ranks=10 takes" in problem


def test_an_engine_of_several_gpus_shares_those_of_as_many_ranks(model: Any) -> None:
    wide = ("cluster.gpus_per_engine=4", "cluster.engines=2")
    found = planned("qwen3_4b_colocate", model("4b"), 8, 1, *wide)
    assert found.problems == ()
    engines = [p for p in found.parts if p.name.startswith("engine")]
    assert [p.gpus for p in engines] == ["GPU 0–3 (1/2)", "GPU 4–7 (1/2)"]
    assert found.strategy == "placement colocated: each engine shares the GPUs of 4 ranks"
    assert "--tp-size 4 " in found.commands[-1]
    odd = ("cluster.gpus_per_engine=3", "cluster.engines=2")
    with pytest.raises(ConfigError, match=r"gpus_per_engine 3, which does not divide the 8 GPUs"):
        planned("qwen3_4b_colocate", model("4b"), 8, 1, *odd)
