"""`make test-gpu`: the torch backend on one GPU, against this machine's CPU, without Ray.

Figures (tokens/s, MFU, measured and estimated memory) are printed, and written to
`$OUT/gpu.json` if OUT is set. Without a GPU each test is skipped by name.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from stepwell.backends.base import LossOutput
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.flops import peak_of
from stepwell.backends.torch.memory import CUDA_CONTEXT, ModelShape, estimate
from stepwell.backends.weights.buckets import pack
from stepwell.backends.weights.ipc import shared_tensors
from stepwell.datapool.types import Step
from tests.backends.models import save_model
from tests.builders import step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.timeout(600),
]
SMALL = Qwen3Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    initializer_range=0.05,
)
QWEN3_06B = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(SMALL, tmp_path_factory.mktemp("small"))


QWEN3_4B = Qwen3Config(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)


@pytest.fixture(scope="module")
def expected(small: Path) -> tuple[torch.Tensor, dict[str, float]]:
    """Scores before, and metrics of, one update on the CPU: the reference of all forms."""
    steps = groups(SMALL.vocab_size, 2, 4, 150, 60)
    return update(backend_of(small, "cpu", dtype="float32", rows="step"), steps)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(QWEN3_06B, tmp_path_factory.mktemp("large"))


@pytest.fixture(autouse=True)
def exact() -> None:
    """No TF32, and what an earlier test held is gone."""
    torch.backends.cuda.matmul.allow_tf32 = False
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def groups(vocab: int, prompts: int, rollouts: int, prompt: int, turn: int) -> list[Step]:
    """Rollouts of two turns, of lengths that differ, whose prompts are shared."""
    draw = np.random.default_rng(0)
    steps = []
    for g in range(prompts):
        start = draw.integers(0, vocab, prompt).tolist()
        for r in range(rollouts):
            context = start
            for i in range(2):
                said = draw.integers(0, vocab, draw.integers(turn // 2, turn)).tolist()
                steps.append(step(context, said, f"g{g}r{r}", i))
                context = [*context, *said, *draw.integers(0, vocab, 9).tolist()]
    return steps


def loss_fn(log_probs: torch.Tensor, entropy: Any, columns: Any) -> LossOutput:
    return LossOutput(-(columns["coef"] * log_probs).sum(), {}, {"found": log_probs.detach()})


def backend_of(path: Path, device: str, **options: Any) -> TorchBackend:
    given = {"device": device, "lr": 1e-4, "micro_batch_tokens": 2048} | options
    return TorchBackend(TorchBackendConfig.model_validate(given), path)


def update(backend: TorchBackend, steps: list[Step]) -> tuple[torch.Tensor, dict[str, float]]:
    """log π, and the metrics of one update."""
    batch = backend.convert(steps)
    before = backend.compute_log_probs(batch)
    batch.columns["coef"] = torch.full((batch.n_tokens,), 1 / batch.n_tokens)
    return before, backend.train_step(batch, loss_fn)


def check(
    expected: tuple[torch.Tensor, dict[str, float]],
    path: Path,
    device: str,
    tolerance: float,
    **options: Any,
) -> None:
    before, plain = expected
    steps = groups(SMALL.vocab_size, 2, 4, 150, 60)
    found, metrics = update(backend_of(path, device, **options), steps)
    torch.testing.assert_close(found, before, atol=tolerance, rtol=tolerance)
    assert metrics["loss"] == pytest.approx(plain["loss"], rel=tolerance)
    assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=20 * tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("rows", ["step", "merged", "tree"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gpu_scores_and_updates_as_the_cpu_does(
    rows: str,
    dtype: str,
    tolerance: float,
    compiled: bool,
    small: Path,
    expected: tuple[torch.Tensor, dict[str, float]],
) -> None:
    """Varlen rows (bf16), FlexAttention (tree, and fp32 rows), padded rows: one reference."""
    check(expected, small, "cuda", tolerance, rows=rows, dtype=dtype, compile=compiled)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_checkpointed_layers_do_too(
    checkpointing: bool | str, small: Path, expected: tuple[torch.Tensor, dict[str, float]]
) -> None:
    options = {"gradient_checkpointing": checkpointing, "rows": "merged", "dtype": "bfloat16"}
    check(expected, small, "cuda", 5e-2, **options)


def test_adapters_do_too(small: Path) -> None:
    check_against_cpu_lora(small, "cuda")


def check_against_cpu_lora(path: Path, device: str) -> None:
    steps = groups(SMALL.vocab_size, 2, 4, 150, 60)
    cpu, other = (backend_of(path, at, dtype="float32", lora={"rank": 8}) for at in ("cpu", device))
    for _ in range(2):
        (expected, plain), (found, metrics) = update(cpu, steps), update(other, steps)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert metrics["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)


def test_a_rows_form_of_a_06b_model_reports_its_speed_and_its_memory_is_as_estimated(
    large: Path,
) -> None:
    figures = {}
    for rows in ("step", "merged", "tree"):
        figures[rows] = measure(large, "cuda", rows, groups(151_936, 4, 8, 1024, 512), 16_384)
        gc.collect()
        torch.cuda.empty_cache()
    keep("qwen3_06b", figures)
    for rows, found in figures.items():
        assert found["measured_gb"] == pytest.approx(found["estimated_gb"], rel=0.25), rows


def measure(
    path: Path,
    device: str,
    rows: str,
    steps: list[Step],
    budget: int,
    updates: int = 3,
    **more: Any,
) -> dict[str, float]:
    """Figures of the last update; the first ones compile."""
    options = {"rows": rows, "micro_batch_tokens": budget} | more
    backend = backend_of(path, device, **options)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(updates):
        _, metrics = update(backend, steps)
    longest = max(s.n_tokens for s in steps)
    config = TorchBackendConfig.model_validate({"device": device, **options})
    on_cuda = device == "cuda"
    said = estimate(ModelShape.read(path), config, 1, longest, on_cuda=on_cuda)
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    return {
        "tokens_per_s": metrics["padded_tokens"] / metrics["seconds"],
        "trained_tokens_per_s": metrics["tokens"] / metrics["seconds"],
        "mfu": metrics.get("mfu", 0.0),
        "measured_gb": peak / 1e9,
        "estimated_gb": (said.total - CUDA_CONTEXT * on_cuda) / 1e9,
    }


def test_a_4b_with_adapters_trains_a_row_of_16_k_tokens_within_its_estimate(
    tmp_path: Path,
) -> None:
    """Its full fine-tuning, 72 GB of state, is estimated not to fit into 80 GB."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(QWEN3_4B, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # theirs
        model.save_pretrained(tmp_path)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    steps = groups(QWEN3_4B.vocab_size, 1, 1, 13_000, 3_000)
    figures = measure(tmp_path, "cuda", "step", steps, 16_384, updates=2, lora={"rank": 16})
    keep("qwen3_4b_lora", figures)
    assert figures["measured_gb"] == pytest.approx(figures["estimated_gb"], rel=0.25)
    config = TorchBackendConfig.model_validate({"device": "cuda"})
    full = estimate(ModelShape.read(tmp_path), config, 1, 16_000, on_cuda=True)
    assert full.total > 80e9 > 4 * figures["estimated_gb"] * 1e9


def keep(name: str, figures: dict[str, Any]) -> None:
    """Figures of a model, printed, and under its name in `$OUT/gpu.json`."""
    print(name, json.dumps(figures, indent=2))
    if (out := os.environ.get("OUT")) is not None:
        path = Path(out) / "gpu.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known |= {"device": torch.cuda.get_device_name(), name: figures}
        path.write_text(json.dumps(known, indent=2) + "\n")


def test_a_known_gpu_has_a_peak() -> None:
    name = torch.cuda.get_device_name()
    assert peak_of(torch.device("cuda")) is not None, f"add the peak of {name!r} to flops.PEAK"


READER = """
import sys
import torch
from stepwell.backends.weights.ipc import read_shared
torch.save({n: t.cpu() for n, t in read_shared(sys.stdin.read()).items()}, sys.argv[1])
"""


def test_another_process_reads_weights_by_their_handle_bit_for_bit(tmp_path: Path) -> None:
    check_ipc(tmp_path)


def check_ipc(folder: Path) -> None:
    g = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(300, 70, generator=g).bfloat16(), torch.randn(5000, generator=g)
    weights = {"matrix": matrix, "vector": vector}
    buckets = [shared_tensors(bucket, flat) for bucket, flat in pack(dict(weights), None)]
    for number, (_, text) in enumerate(buckets):  # the buffers live until they are read
        command = [sys.executable, "-c", READER, str(folder / f"{number}.pt")]
        subprocess.run(command, input=text, text=True, check=True)
    found: dict[str, torch.Tensor] = {}
    for number in range(len(buckets)):
        found |= torch.load(folder / f"{number}.pt")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
