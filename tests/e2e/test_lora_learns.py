"""Adapters of rank 16 learn the quickstart's task at ten times the rate of full fine-tuning, and
stay far from that with rewards that say nothing. The base has been taught the format of the task:
on a random one with tied embeddings no adapter can pass 0.62.

The control is not the base: the base answers right where it calls its tool, in a third of its
rollouts, and one decision early in the reply is all that the score depends on. Random rewards move
it at random: 0.28 to 0.58 within the 40 steps of seed 2, scores of 0.52, 0.56 and 0.36 after them
(seeds 0 to 2, 24 November 2026, 256 rollouts each; the base 0.33, 0.32, 0.41, and 0.69 with
`validation.temperature=0`). The bound lies between those and what real rewards must reach.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LEARNT = 0.85
UNTAUGHT = 0.7
"""The most that the control may score."""


def trained(folder: Path, *overrides: str) -> float:
    """Run `stepwell train --config quickstart`; return the score of its last evaluation."""
    argv = [sys.executable, "-m", "stepwell", "train", "--config", "quickstart"]
    argv += [f"run.dir={folder}", "logging.wandb=disabled", *overrides]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(json.loads((folder / "summary.json").read_bytes())["eval_after"])


ADAPTERS = ("backend.lora.rank=16", "backend.lr=1e-3", "validation.every=0")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_adapters_learn_at_ten_times_the_rate(tmp_path: Path, seed: int) -> None:
    assert trained(tmp_path / "run", *ADAPTERS, f"run.seed={seed}") >= LEARNT


@pytest.mark.timeout(1200)
def test_rewards_that_say_nothing_do_not_teach_the_task(tmp_path: Path) -> None:
    shuffled = "rollout.agent=tests.e2e.shuffled_agent:agent"
    only = ("validation.before_train=false", "run.seed=2")
    trained(tmp_path / "control", *ADAPTERS, shuffled, *only)
    versions = (tmp_path / "control" / "weights").glob("v*")
    newest = max(versions, key=lambda folder: int(folder.name[1:]))
    looked_at = ("validation.only=true", f"model.path={newest}")
    assert trained(tmp_path / "evaluated", *looked_at) <= UNTAUGHT
