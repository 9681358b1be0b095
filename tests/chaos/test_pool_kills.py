"""The kills as they are run, with few kills; and that it would notice what it looks for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.checks import BenchResult
from stepwell.datapool.types import Group, Lease, Step, Trajectory
from tests.chaos.pool_kills import _Ledger, _unbalanced, run


@pytest.fixture(scope="module")
def quick() -> BenchResult:
    return asyncio.run(run(kills=5))


@pytest.mark.long
def test_five_kills_under_load_lose_nothing_and_serve_nothing_twice(quick: BenchResult) -> None:
    assert {name: check.value for name, check in quick.checks.items()} == {
        "kills": 5,
        "acknowledged_steps_lost": 0,
        "steps_accepted_twice": 0,
        "groups_served_changed": 0,
        "pictures_lost": 0,
        "pictures_left_behind": 0,
        "groups_served_after_their_ack": 0,
        "groups_never_served": 0,
        "groups_never_acked": 0,
        "unbalanced_sums": 0,
    }
    assert all(check.holds for check in quick.checks.values())


@pytest.mark.long
def test_the_kills_met_producers_and_consumers_at_work(quick: BenchResult) -> None:
    figures = quick.figures
    assert figures["groups"] > 12
    assert figures["steps"] > 24 * 12
    assert figures["submits_answered_duplicate"] > 0
    assert figures["deliveries"] >= figures["groups"]
    assert figures["pictures_read"] >= figures["steps"] > figures["pictures_sent"]


# -- the ledger ----------------------------------------------------------------------------------


STEPS = [
    Step(
        prompt_ids=[1, 2],  # type: ignore[arg-type]  # lists are normalised
        response_ids=[3],  # type: ignore[arg-type]
        trajectory_uid="t",
        prompt_uid="p",
        step_index=i,
        is_last=i == 1,
    )
    for i in range(2)
]


def ledger() -> _Ledger:
    """One group of one trajectory, all of it acknowledged."""
    return _Ledger(
        expected={"p": {"t": STEPS}}, acknowledged={("t", s.step_index): s for s in STEPS}
    )


def lease(*steps: Step) -> Lease:
    return Lease("lease-1", "train", (Group("p", (Trajectory("t", "p", steps),)),), 0.0)


def test_a_group_that_is_served_as_it_was_sent_leaves_no_complaint() -> None:
    seen = ledger()
    assert seen.lost == {("t", 0), ("t", 1)}
    seen.receive(lease(*STEPS))
    assert (seen.lost, seen.changed, seen.served_after_ack) == (set(), set(), set())


def test_a_step_that_does_not_come_back_is_lost() -> None:
    seen = ledger()
    seen.receive(lease(STEPS[1]))
    assert seen.lost == {("t", 0)}
    assert seen.changed == {"p"}


def test_a_step_that_comes_back_changed_is_lost() -> None:
    seen = ledger()
    seen.receive(lease(STEPS[0], replace(STEPS[1], response_ids=[4])))  # type: ignore[arg-type]
    assert seen.lost == {("t", 1)}
    assert seen.changed == {"p"}


def test_a_group_that_comes_again_after_its_ack_is_noticed() -> None:
    seen = ledger()
    seen.receive(lease(*STEPS))
    seen.receive(lease(*STEPS))
    assert not seen.served_after_ack, "a redelivery before the ack is none"
    seen.acked.add("p")
    seen.receive(lease(*STEPS))
    assert seen.served_after_ack == {"p"}
    assert seen.deliveries["p"] == 3


def test_sums_that_do_not_add_up_are_named() -> None:
    counts = {
        "groups": dict.fromkeys(("submitted", "open", "ready", "leased", "acked", "dropped"), 0),
        "trajectories": dict.fromkeys(
            ("submitted", "open", "complete", "acked", "dropped", "aborted"), 0
        ),
        "steps": {
            "submitted": 3,
            "accepted": 2,
            "duplicate": 1,
            "late": 0,
            "conflict": 0,
            "rejected": 0,
            "stored": 1,
            "acked": 0,
            "dropped": 0,
        },
    }
    (complaint,) = _unbalanced(counts)
    assert complaint.startswith("steps.accepted")
    counts["steps"]["stored"] = 2
    assert _unbalanced(counts) == []
