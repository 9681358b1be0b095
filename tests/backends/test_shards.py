"""Two ranks and one go on from what four wrote: gloo, on this machine's CPU."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.errors import DamagedFileError
from tests.backends.models import qwen3, save_model
from tests.backends.processes_of_ranks import run_ranks
from tests.backends.test_ranks import assert_same_updates, config_of, steps_of, train
from tests.helpers import full_disk


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(qwen3(), tmp_path_factory.mktemp("model"))


def log_probs(backend: TorchBackend) -> Tensor:
    return backend.compute_log_probs(backend.convert(steps_of(9)))


def write(
    rank: int, ranks: int, model_path: Path, folder: Path, options: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, float]], Tensor]:
    """Train, save, and go on while it is written."""
    backend = TorchBackend(config_of(ranks=ranks, **options), model_path)
    train(backend, [0, 1])
    state = backend.save_state(folder)
    before = log_probs(backend)
    after = train(backend, [2, 3])
    backend.wait_saved()
    return state, after, before


def go_on(
    rank: int,
    ranks: int,
    model_path: Path,
    folder: Path,
    state: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, list[dict[str, float]]]:
    backend = TorchBackend(config_of(ranks=ranks, **options), model_path)
    backend.load_state(folder, state)
    return log_probs(backend), train(backend, [2, 3])


@pytest.mark.timeout(900)  # processes that import torch, on a machine that may be busy
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"dtype": "bfloat16", "lora": {"rank": 4}, "rows": "tree", "gradient_checkpointing": True},
        {"optimizer": "sgd", "momentum": 0.9, "reduce": "each"},
    ],
    ids=["adamw", "lora-bfloat16", "sgd"],
)
def test_shards_of_four_ranks_resume_on_two_and_one_with_an_equal_next_update(
    options: dict[str, Any], model_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_2" / "backend"
    state, expected, before = run_ranks(4, write, 4, model_path, folder, options)[0]
    assert {f"__{rank}_0.distcp" for rank in range(4)} < {p.name for p in folder.iterdir()}
    two, also_two = run_ranks(2, go_on, 2, model_path, folder, state, options)
    one = go_on(0, 1, model_path, folder, state, options)
    close = 3e-2 if "dtype" in options else 1e-5
    for found, updates in (two, one):
        torch.testing.assert_close(found, before, atol=close, rtol=0)
        if "dtype" not in options:
            assert_same_updates(updates, expected)
    torch.testing.assert_close(two[0], also_two[0], atol=0, rtol=0)


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("reduce", ["each", "last"])
def test_ranks_go_on_from_one_process_whenever_they_sum(
    reduce: str, model_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_2" / "backend"
    state, expected, before = write(0, 1, model_path, folder, {})
    options = {"reduce": reduce, "micro_batch_tokens": 16}
    for found, updates in run_ranks(3, go_on, 3, model_path, folder, state, options):
        torch.testing.assert_close(found, before, atol=1e-5, rtol=0)
        assert_same_updates(updates, expected)


def test_one_process_goes_on_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_2" / "backend"
    options = {"dtype": "bfloat16"}
    state, expected, before = write(0, 1, model_path, folder, options)
    found, updates = go_on(0, 1, model_path, folder, state, options)
    assert torch.equal(found, before)
    for a, b in zip(updates, expected, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def test_a_damaged_shard_is_named_before_anything_is_read(model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step_2" / "backend"
    state, _, _ = write(0, 1, model_path, folder, {})
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        with pytest.raises(DamagedFileError, match=re.escape(f"{file}")):
            go_on(0, 1, model_path, folder, state, {})
        file.unlink()
        with pytest.raises(DamagedFileError, match=re.escape(f"{file}")):
            go_on(0, 1, model_path, folder, state, {})
        file.write_bytes(data)
    go_on(0, 1, model_path, folder, state, {})


@pytest.mark.filterwarnings("ignore:.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_an_error_that_its_callers_expect(model_path: Path, tmp_path: Path) -> None:
    """torch's own is a BaseException. A writer of torch's that is left then flushes a file that is
    closed, of which Python tells from 3.13 on: here, and not in a later test."""
    backend = TorchBackend(config_of(ranks=1), model_path)
    with full_disk(), pytest.raises((OSError, RuntimeError)):
        backend.save_state(tmp_path / "step_2" / "backend")
    gc.collect()
