"""The estimate of a rank's memory against peaks of CPU models, and what it says of real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.torch.memory import (
    MemoryEstimate,
    ModelShape,
    choose_reduce,
    estimate,
)
from stepwell.backends.torch.model import device_bytes
from tests.backends.models import qwen3, save_model

GB = 1e9
QWEN3_4B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_4B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def config_of(**options: Any) -> TorchBackendConfig:
    return TorchBackendConfig.model_validate(options)


def on_gpu(ranks: int = 1, row: int = 16_384, **options: Any) -> MemoryEstimate:
    return estimate(ModelShape.of(QWEN3_4B), config_of(**options), ranks, row, on_cuda=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 64}
    return save_model(qwen3(vocab_size=4000, **sizes), tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")
@pytest.mark.timeout(300)  # the processes share two cores with others
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "logits_mb": 2},
        pytest.param({"lora": {"rank": 8}}, marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "logits_mb": 2}, marks=pytest.mark.long),
        pytest.param({"optimizer": "sgd", "rows": "tree"}, marks=pytest.mark.long),
    ],
    ids=["plain", "checkpointed", "lora", "bfloat16", "sgd-tree"],
)
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(
    options: dict[str, Any], model_path: Path
) -> None:
    tokens, given = 640, {"device": "cpu", "micro_batch_tokens": 512, **options}
    command = (sys.executable, "-m", "tests.backends.peak_of_a_step", json.dumps(given))
    # glibc then gives back what is freed, as CUDA's cache would reuse it.
    mapped = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*command, str(model_path), str(tokens)],
        env={**os.environ, **mapped},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    said = estimate(ModelShape.read(model_path), config_of(**given), 1, tokens, on_cuda=False)
    assert int(done.stdout) == pytest.approx(said.total, rel=0.25), str(said)


def test_the_parameters_of_a_config_are_those_of_the_model(model_path: Path) -> None:
    config = json.loads((model_path / "config.json").read_text())
    assert ModelShape.of(config) == ModelShape.read(model_path)
    assert ModelShape.of(QWEN3_4B).parameters == pytest.approx(4.02e9, rel=0.005)
    assert ModelShape.of(QWEN3_30B_A3B).parameters == pytest.approx(30.5e9, rel=0.01)


def test_full_fine_tuning_of_4b_does_not_fit_80_gb_and_lora_fits_beside_an_engine() -> None:
    full = on_gpu()
    states = full.weights + full.gradients + full.optimizer
    assert states == pytest.approx(72 * GB, rel=0.02)
    assert full.total > 80 * GB
    lora = on_gpu(lora={"rank": 16})
    assert 10 * GB < lora.total < 20 * GB
    assert lora.total + 0.4 * 80 * GB < 80 * GB


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_critic_of_the_policys_size_has_states_as_large(ranks: int) -> None:
    shape, config = ModelShape.of(QWEN3_4B), config_of()
    both = estimate(shape, config, ranks, 16_384, on_cuda=True, critic=shape)
    assert both.critic == pytest.approx(both.weights + both.gradients + both.optimizer)


def test_checkpointing_is_what_lets_a_long_row_fit() -> None:
    plain = on_gpu(gradient_checkpointing=False).activations
    assert plain > 70 * GB
    assert on_gpu().activations < 10 * GB  # `auto` is on on CUDA


def test_ranks_share_states_and_not_activations() -> None:
    one, eight = on_gpu(), on_gpu(8)
    assert eight.optimizer == pytest.approx(one.optimizer / 8)
    assert eight.activations == one.activations
    assert eight.total < 40 * GB


def test_gradients_are_summed_once_a_step_where_they_fit_whole() -> None:
    last = estimate(ModelShape.of(QWEN3_4B), config_of(), 8, 16_384, on_cuda=True, reduce="last")
    assert last.total - on_gpu(8).total == pytest.approx(16 * GB, rel=0.02)
    assert choose_reduce(last, 80 * GB, "auto") == "last"
    assert choose_reduce(last, 40 * GB, "auto") == "each"
    assert choose_reduce(last, 40 * GB, "last") == "last"


def test_a_size_that_differs_by_layer_is_taken_at_its_largest() -> None:
    """gemma3n's MLPs are such. Every torch backend asks for its model's shape."""
    by_layer = {**QWEN3_4B, "intermediate_size": [4096, 9728]}
    assert ModelShape.of(by_layer) == ModelShape.of(QWEN3_4B)


def test_a_rank_has_a_gpu_of_its_own_and_a_share_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(total_memory=80 * GB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert device_bytes(torch.device("cuda"), 8) == 80 * GB
    cpu = torch.device("cpu")
    assert device_bytes(cpu, 8) == device_bytes(cpu, 1) / 8


def test_auto_is_bfloat16_and_checkpointed_on_cuda_alone() -> None:
    gpu, cpu = (config_of().resolved(on_cuda) for on_cuda in (True, False))
    assert (gpu.dtype, gpu.gradient_checkpointing) == ("bfloat16", True)
    assert (cpu.dtype, cpu.gradient_checkpointing) == ("float32", False)
    given = config_of(dtype="float32", gradient_checkpointing=False).resolved(True)
    assert (given.dtype, given.gradient_checkpointing) == ("float32", False)


def test_the_text_of_an_estimate_names_its_parts() -> None:
    assert str(on_gpu(lora={"rank": 16})).startswith("1")
    assert " GB (weights 8." in str(on_gpu(lora={"rank": 16}))


def test_ranks_that_share_a_row_share_its_activations() -> None:
    row = 131_072
    alone = on_gpu(8, row)
    shape = ModelShape.of(QWEN3_4B)
    shared = {
        n: estimate(shape, config_of(ranks=8, context_parallel=n), 8, row, on_cuda=True)
        for n in (2, 4, 8)
    }
    assert alone.activations > 50 * GB
    for n, found in shared.items():
        # Attention's output is kept twice.
        assert found.activations == pytest.approx(alone.activations / n, rel=0.05)
        assert found.optimizer == alone.optimizer
    assert shared[8].total < 25 * GB
