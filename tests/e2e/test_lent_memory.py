"""A run whose engine lends its memory at every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.run.train import train
from stepwell.trainer.metrics import read_metrics
from tests.e2e.conftest import small_config

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize("transport", ["disk", "nccl"])
async def test_a_run_trains_while_its_engine_lends_its_memory(
    transport: str, tmp_path: Path
) -> None:
    config = small_config(
        tmp_path,
        "engine.release_memory=true",
        f"engine.weight_transport={transport}",
        "cluster.env={GLOO_SOCKET_IFNAME: lo}",
        "async_training.trigger_parameter_sync_step=1",
        "trainer.total_steps=3",
        "validation.every=0",
        "validation.n=1",
    )
    summary = await train(config)
    assert summary["optimizer_steps"] == 3
    assert summary["log_prob_gap_max"] < 1e-3  # what came back are the weights that were lent
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["policy_version"] for r in records] == [1, 2, 3]
    assert all(r["time/hand_over_s"] > 0 for r in records)
    sent_s = [r["publish/transfer_seconds"] for r in records if "publish/transfer_seconds" in r]
    assert sent_s
    assert all((seconds > 0) is (transport == "nccl") for seconds in sent_s)
