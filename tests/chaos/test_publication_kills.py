"""The checks of the kills notice what they look for, and a few kills."""

from __future__ import annotations

import pytest

from stepwell.datapool.types import VersionSpan
from tests.chaos.publication_kills import Record, run, token_of


def checked(ids: list[int], *spans: VersionSpan, began: int = 0) -> list[str]:
    record = Record(value_of={0: 0, 1: 7, 2: 7})
    record.check("somebody", began, ids, spans)
    return record.violations


def test_a_token_counts_for_the_weights_of_its_version() -> None:
    old, new = token_of(0), token_of(7)
    assert checked([old, new], VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)) == []
    assert checked([new], VersionSpan(2, 0, 1)) == [], "a roll-back has the weights of another"
    assert "tokens {16} as version 0" in checked([new], VersionSpan(0, 0, 1))[0]
    assert "never written" in checked([new], VersionSpan(3, 0, 1))[0]
    assert "do not cover 2 tokens" in checked([old, old], VersionSpan(0, 0, 1))[0]
    assert "began when 1 was committed" in checked([old], VersionSpan(0, 0, 1), began=1)[0]


@pytest.mark.long
async def test_kills_leave_no_engine_behind_and_no_wrong_token() -> None:
    result = await run(kills=4, replicas=3, agents=3)
    assert {name: check.value for name, check in result.checks.items()} == {
        "violations": 0,
        "unanswered": 0,
    }
    assert result.figures["kills"] >= 4, "one that is under way when the last is counted comes too"
    assert result.figures["steps"] > 0
