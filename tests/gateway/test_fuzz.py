"""A few hundred generated requests; `make fuzz` sends more than 10,000."""

from __future__ import annotations

from tests.gateway.fuzz import fuzz


async def test_no_generated_request_makes_the_gateway_fail() -> None:
    status, report = await fuzz(8, seed=1)
    assert status == 0, report
    assert "generated" in report
