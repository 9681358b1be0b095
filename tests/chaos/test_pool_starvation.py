"""The hanging rollouts as they are run, with few groups."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.pool_starvation import run


@pytest.mark.slow
def test_hanging_rollouts_cost_no_other_group_anything() -> None:
    result = asyncio.run(run(quick=True))
    figures = result.figures
    assert all(check.holds for check in result.checks.values())
    assert result.checks["full_groups_not_served"].holds
    assert figures["rollouts_hung"] > 0
    assert figures["served_with_fewer"] > 0
    assert figures["drop_reasons"].keys() == {"deadline"}
    ends = figures["served_full"] + figures["served_with_fewer"]
    assert ends + figures["drop_reasons"]["deadline"] == figures["groups"]
