"""Some hundred generated requests; `make test-long` sends thousands, `make fuzz` over 10,000."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.gateway.fuzz import fuzz, given_up


@pytest.mark.slow
@pytest.mark.hypothesis
async def test_no_generated_request_makes_the_gateway_fail() -> None:
    status, report = await fuzz(settings().max_examples // 10, seed=1)
    assert status == 0, report
    assert "generated" in report


GAVE_UP = """
==================================== ERRORS ====================================
______________________________ POST /v1/responses ______________________________
Schema Error

Failed to generate test cases for this API operation. Schemathesis does not support a `not` …

=================================== SUMMARY ====================================

Errors:
  🚫 Schema Error: 1
"""


@pytest.mark.parametrize(
    ("report", "operations"),
    [
        (GAVE_UP, ["POST /v1/responses"]),
        ("=================================== FAILURES ===\n" + GAVE_UP, []),
        (GAVE_UP + "  🚫 Network Error: 1\n", []),
        ("Test cases:\n  9 generated, 9 passed\n", []),
    ],
)
def test_only_operations_on_which_the_generator_gave_up_are_tried_again(
    report: str, operations: list[str]
) -> None:
    assert given_up(report) == operations
