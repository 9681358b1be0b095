"""SFT as a user runs it: the demo of the documents, and a run without agent that is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stepwell.datapool.types import SFT
from stepwell.quickstart.conversations import conversations
from stepwell.trainer.ledger import LEDGER, audit
from tests.e2e.test_command import kill_when_there_is, records_of, run, run_here

pytestmark = pytest.mark.e2e
WITHOUT_AGENT = "algorithm.kind=sft", "trainer.train_batch_size=4"


def command(folder: Path, n: int, *overrides: str) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in conversations(n)))
    return [
        sys.executable,
        "-m",
        "stepwell",
        "train",
        f"data.sft={rows}",
        f"run.dir={folder / 'run'}",
        "logging.wandb=disabled",
        *overrides,
    ]


@pytest.mark.long
def test_the_demos_loss_falls_and_its_score_rises(tmp_path: Path) -> None:
    """`stepwell train --config sft`, as docs/design/data.md shows it."""
    done = run(command(tmp_path, 960, "--config", "sft"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["sft_loss"][-1] < 0.5 * summary["sft_loss"][0]
    assert summary["eval_after"] > summary["eval_before"] + 0.3
    assert summary["tool_use_after"] > 0.9
    assert (tmp_path / "run/reward.png").is_file()


def test_a_run_without_agent_serves_nobody(tmp_path: Path) -> None:
    done = run_here(command(tmp_path, 8, *WITHOUT_AGENT, "trainer.total_steps=2"))
    assert done.returncode == 0, done.stderr
    assert "gateway" not in done.stdout
    assert not (tmp_path / "run/logs/engine.log").exists()
    assert [r["step"] for r in records_of(tmp_path / "run")] == [1, 2]


@pytest.mark.long
def test_a_killed_run_without_agent_trains_every_row_once(tmp_path: Path) -> None:
    argv = command(
        tmp_path,
        64,
        *WITHOUT_AGENT,
        "data.sft.epochs=2",
        "trainer.total_steps=null",
        "trainer.checkpoint_every=3",
    )
    checkpoints = tmp_path / "run/checkpoints"
    kill_when_there_is(checkpoints / "step_6", argv)
    done = run(argv)
    assert done.returncode == 0, done.stderr
    assert "resumed at optimizer step" in done.stdout
    found = audit(checkpoints / LEDGER, channel=SFT)
    assert (found.trained, found.doubled, found.in_flight) == (128, (), ())
    assert sorted(found.draws) == sorted([row["instance_id"] for row in conversations(64)] * 2)
    assert [r["step"] for r in records_of(tmp_path / "run")] == list(range(1, 33))
    assert (tmp_path / "run/weights/current.json").is_file()


def test_a_run_that_goes_back_sums_up_the_steps_that_it_kept(tmp_path: Path) -> None:
    argv = command(tmp_path, 32, *WITHOUT_AGENT, "trainer.checkpoint_every=2")
    done = run_here([*argv, "trainer.total_steps=4"])
    assert done.returncode == 0, done.stderr
    done = run_here([*argv, "run.resume=2", "trainer.total_steps=3"])
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["optimizer_steps"] == 3
    assert len(summary["sft_loss"]) == 3
    assert summary["trajectories_trained"] == 12
