"""What `stepwell serve` says when everything is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepwell.cluster import Cluster
from stepwell.presets import load_config
from stepwell.serving import where_to_call

RAY = SimpleNamespace(address="127.0.0.1:1", namespace="n")
CLUSTER: Any = SimpleNamespace(
    gateway_url="http://localhost:1", gateway_urls=("http://localhost:1",), key_file=None, ray=RAY
)


@pytest.mark.parametrize(("preset", "is_limited"), [("quickstart", True), ("live", False)])
def test_a_served_run_says_at_once_at_how_many_groups_its_agents_wait_for_a_trainer(
    preset: str, is_limited: bool, tmp_path: Path
) -> None:
    config = load_config(preset, [f"run.dir={tmp_path}"])
    told = where_to_call(config, cast(Cluster, CLUSTER))
    assert ("nobody leases what is recorded until a trainer is attached" in told) is is_limited
    assert ("16 groups open or ready (rollout.max_outstanding_groups)" in told) is is_limited
