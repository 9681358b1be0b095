"""SFT through the loop gives TRL's losses on the same conversations, step by step.

What TRL says is recorded in `golden/sft.json`; where it is installed (`make test-trl`) it is asked
again. Both tokenise and mask by themselves, from the same messages and tools.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell.backends.torch.backend import TorchBackend
from stepwell.config.load import load_config
from tests.trainer.golden.sft import (
    BATCH,
    BETAS,
    LR,
    MAX_GRAD_NORM,
    RECORDED,
    STEPS,
    has_trl,
    rows,
    trl_steps,
)
from tests.trainer.small_run import SMALL, small_run


def recorded() -> list[dict[str, float]]:
    steps: list[dict[str, float]] = json.loads(RECORDED.read_text())["steps"]
    return steps


async def our_steps(folder: Path, form: str) -> list[dict[str, Any]]:
    """The records of a run over the same rows, in the same order."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    config = load_config(
        None,
        [
            *SMALL,
            "algorithm.kind=sft",
            f"data={path}",
            "data.sft.shuffle=false",
            f"run.dir={folder}",
            f"trainer.total_steps={STEPS}",
            f"trainer.train_batch_size={BATCH}",
            f"backend.rows={form}",
            f"backend.lr={LR}",
            f"backend.betas={list(BETAS)}",
            f"backend.max_grad_norm={MAX_GRAD_NORM}",
            "backend.dtype=float32",
            "async_training.trigger_parameter_sync_step=100",
        ],
    )
    torch.set_num_threads(1)
    backend: Any = TorchBackend(config.backend, config.model.path)
    async with small_run(config, backend=backend) as run:
        return await run.train()


@pytest.mark.parametrize("form", ["step", "merged", "tree"])
async def test_the_losses_are_those_of_trls_sft_trainer(tmp_path: Path, form: str) -> None:
    found, expected = await our_steps(tmp_path, form), recorded()
    assert len(found) == len(expected) == STEPS
    assert expected[0]["loss"] > 1.2 * expected[-1]["loss"]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["sft/loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.skipif(not has_trl(), reason="TRL is not installed")
def test_trl_says_what_is_recorded() -> None:
    for asked, known in zip(trl_steps(), recorded(), strict=True):
        # Processors sum in other orders: 4e-6 apart after five steps.
        assert asked["loss"] == pytest.approx(known["loss"], rel=1e-5)
        assert asked["grad_norm"] == pytest.approx(known["grad_norm"], rel=1e-4)
