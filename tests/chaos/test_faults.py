"""The plan of faults: the same for one seed, and no part is left out."""

from __future__ import annotations

from tests.chaos.faults import LONG_STOP_S, plan
from tests.chaos.scenarios import KINDS, SCENARIOS


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert plan("7/machine", 30, KINDS) == plan("7/machine", 30, KINDS)
    assert plan("7/machine", 30, KINDS) != plan("8/machine", 30, KINDS)


def test_every_part_is_killed_and_stopped_and_the_long_stops_are_among_them() -> None:
    faults = plan("7/machine", len(KINDS) + 2, KINDS, long_stops=("pool", "driver"))
    assert {(f.action, f.part) for f in faults} == set(KINDS)
    assert sorted(f.part for f in faults if f.seconds == LONG_STOP_S) == ["driver", "pool"]


def test_all_scenarios_together_have_at_least_60_faults() -> None:
    assert sum(share for _, share in SCENARIOS.values()) >= 60
