"""Some hundred generated requests; `make test-long` sends thousands, `make fuzz` over 10,000."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.gateway.fuzz import fuzz


@pytest.mark.slow
@pytest.mark.hypothesis
async def test_no_generated_request_makes_the_gateway_fail() -> None:
    status, report = await fuzz(settings().max_examples // 10, seed=1)
    assert status == 0, report
    assert "generated" in report
