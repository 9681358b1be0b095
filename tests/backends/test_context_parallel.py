"""Ranks that share the tokens of a row (gloo, on this machine's CPU) against one process: the same
scores, loss and gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from stepwell.backends.base import LossOutput, Mean, TrainingBackend
from stepwell.backends.config import CriticConfig, TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.rows import build_rows, computed_tokens
from stepwell.backends.torch import model
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.context import Context
from stepwell.backends.torch.critic import ValueModel
from stepwell.backends.torch.fsdp import Ranks
from stepwell.datapool.types import Step
from tests.backends.models import qwen3, save_model
from tests.backends.processes_of_ranks import run_ranks
from tests.backends.test_ranks import config_of, steps_of
from tests.builders import step
from tests.vision_model import make_vision_model

CASES: dict[str, dict[str, Any]] = {
    "step": {"rows": "step"},
    "merged": {"rows": "merged"},
    "tree": {"rows": "tree"},
    "each": {"reduce": "each", "gradient_checkpointing": "selective"},
    "lora-tree-checkpointed": {
        "rows": "tree",
        "lora": {"rank": 4},
        "gradient_checkpointing": True,
        "logits_mb": 1,
    },
    "lora-merged": {"lora": {"rank": 4}, "micro_batch_tokens": 1},
}
"""Options of a backend; a chunked head where `logits_mb` is 1."""
SHARED = [(2, 2), (4, 2), (4, 4)]
"""Ranks, and how many of them share a row. The model has two key heads."""


@dataclass(frozen=True)
class ByResponse:
    """A loss of whole responses, which ranks have parts of, and of the entropy."""

    entropy: str = "gradient"

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        assert entropy is not None
        loss = log_probs.new_zeros(())
        for number in columns["step"].unique():
            own = columns["step"] == number
            loss = loss + (log_probs[own].mean().exp() * columns["advantages"][own]).mean()
        loss = loss - 0.001 * (entropy * columns["advantages"]).sum()
        count = torch.tensor(float(len(log_probs)))
        means = {"policy/log_prob": Mean(log_probs.detach().double().sum(), count)}
        return LossOutput(loss, means, {"found": log_probs.detach()})


def options_of(case: str, ranks: int, sharing: int) -> TorchBackendConfig:
    own = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e9, **CASES[case]}
    return config_of(ranks=ranks, context_parallel=sharing, **own)


def long_and_short() -> list[Step]:
    """Steps of which some are shorter than there are ranks, and one is a rank's budget many times
    over; two responses of it lie across ranks, one on the last alone."""
    prompt = [(7 * i) % 39 for i in range(150)]
    chain = [step(prompt, [5] * 90, "long", 0), step([*prompt, *[5] * 90, 3], [8] * 7, "long", 1)]
    return [*steps_of(3, 7), *chain, step([2], [3], "short", 0)]


def updated(backend: TrainingBackend, folder: Path) -> tuple[Tensor, dict[str, float], Tensor]:
    """Scores, metrics of an update, and what its loss saw; weights go to `folder`."""
    batch = backend.convert(long_and_short())
    g = torch.Generator().manual_seed(0)
    batch.columns["advantages"] = torch.randn(batch.n_tokens, generator=g)
    numbers = torch.arange(len(batch.steps))
    batch.columns["step"] = numbers.repeat_interleave(batch.lengths)
    scores = backend.compute_log_probs(batch)
    metrics = backend.train_step(batch, ByResponse())
    if not isinstance(backend, ValueModel):
        backend.save_weights(folder)
    return scores, metrics, batch.columns["found"]


def all_cases(rank: int, ranks: int, sharing: int, path: Path, to: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model.chunk_tokens = lambda limit_mb, vocab: 5 if limit_mb == 1 else 10**9
    found: dict[str, Any] = {}
    for case in CASES:
        backend = TorchBackend(options_of(case, ranks, sharing), path)
        found[case] = updated(backend, to / case)
    return found


def values(rank: int, ranks: int, sharing: int, path: Path) -> tuple[Tensor, Tensor]:
    """Values of a critic before and after an update, by which its head is no longer 0."""
    own = CriticConfig(lr=1e-2).model_config_of(config_of(ranks=ranks, context_parallel=sharing))
    critic = ValueModel(own, path)
    batch = critic.convert(long_and_short())
    for _ in range(3):
        critic.train_step(
            batch,
            lambda found, entropy, columns: LossOutput((found - 1).square().sum() / 100, {}),
        )
    return critic.compute_log_probs(batch), batch.offsets


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(qwen3(num_key_value_heads=2), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    to = tmp_path_factory.mktemp("alone")
    found = {}
    for case in CASES:
        plain = options_of(case, 1, 1).model_copy(update={"rows": "step"})
        found[case] = updated(TorchBackend(plain, model_path), to / case)
    return to, found


@pytest.fixture(scope="module", params=SHARED, ids=[f"{n}-of-{r}" for r, n in SHARED])
def together(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Sequence[Any]]:
    to = tmp_path_factory.mktemp("together")
    ranks, sharing = request.param
    return to, run_ranks(ranks, all_cases, ranks, sharing, model_path, to)


@pytest.mark.timeout(900)  # processes that import torch, on a machine that may be busy
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_rows_train_as_one_process(
    case: str, together: tuple[Path, Sequence[Any]], alone: tuple[Path, Any], model_path: Path
) -> None:
    to, by_rank = together
    folder, expected = alone
    for answer in by_rank:
        scores, metrics, found = answer[case]
        torch.testing.assert_close(scores, expected[case][0], atol=1e-5, rtol=0)
        torch.testing.assert_close(found, expected[case][0], atol=1e-5, rtol=0)
        for key in ("loss", "grad_norm", "policy/log_prob", "tokens"):
            assert metrics[key] == pytest.approx(expected[case][1][key], rel=1e-5, abs=1e-6), key
    start = load_file(model_path / "model.safetensors")
    ours, theirs = (load_file(f / case / "model.safetensors") for f in (to, folder))
    # A step of SGD at rate 1: the difference is the gradient (of LoRA, what it does to weights).
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    for name in start:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_critic_of_ranks_that_share_rows_learns_as_one_process(model_path: Path) -> None:
    expected, _ = values(0, 1, 1, model_path)
    assert expected.abs().max() > 0.05
    for found, _ in run_ranks(2, values, 2, 2, model_path):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_ranks_that_share_have_the_same_micro_batches_of_all_their_budgets() -> None:
    rows = build_rows(steps_of(5, 40), "merged")
    shares = [
        Ranks(rank, 8, context=Context(rank % 4, 4, None)).rounds(rows, 16, "packed")
        for rank in range(8)
    ]
    assert all(shares[rank] == shares[rank // 4 * 4] for rank in range(8))
    assert sorted(id(row) for share in shares[::4] for chunk in share for row in chunk) == sorted(
        map(id, rows)
    )
    longest = max(row.n_inputs for row in rows)
    sizes = [computed_tokens(chunk, "packed") for share in shares for chunk in share if chunk]
    assert max(sizes) <= max(4 * 16, longest)
    assert max(sizes) > 16
    assert [Ranks(r, 4, context=Context(r % 2, 2, None)).counts for r in range(4)] == [
        True,
        False,
        True,
        False,
    ]


def test_ranks_that_a_group_does_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"context_parallel is 3.*divide ranks \(4\)"):
        config_of(ranks=4, context_parallel=3)
    with pytest.raises(ValidationError, match=r"context_parallel is 2.*divide ranks \(1\)"):
        config_of(context_parallel=2)


def refused(rank: int, sharing: int, path: Path) -> str:
    with pytest.raises(BackendConfigError) as error:
        TorchBackend(config_of(ranks=3, context_parallel=sharing), path)
    return str(error.value)


@pytest.mark.timeout(900)
@pytest.mark.long
def test_what_ranks_cannot_share_is_refused_with_the_remedy(
    model_path: Path, tmp_path: Path
) -> None:
    for found in run_ranks(3, refused, 3, model_path):
        assert "context_parallel is 3, which does not divide the model's 4 attention heads" in found
        assert "take one of 1, 2, 4" in found
    vision = make_vision_model(tmp_path / "vision")
    for found in run_ranks(3, refused, 3, vision):
        assert "backend.context_parallel is 3" in found
        assert "reads pictures" in found
