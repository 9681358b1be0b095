"""The verifier's rules on small books: what it must find, and what explains itself."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell.datapool.remote.lease_keeper import USED
from stepwell.trainer.reclaim import PRODUCER_GONE
from stepwell.trainer.rollout.worker import INFRASTRUCTURE
from tests.chaos.lives import GOES_ON, Disturbance, Excuse
from tests.chaos.verify import (
    AFTER_S,
    Archived,
    PoolBooks,
    Rollout,
    Verdict,
    check_aborts,
    check_archive,
    check_drops,
)

AT = 1_000.0
QUIET: list[Disturbance] = []
A_KILL = [Disturbance(AT - 5, AT - 5, "kill gateway")]
LONG_AGO = [Disturbance(AT - AFTER_S - 5, AT - AFTER_S - 5, "kill gateway")]
A_RESTART = [Disturbance(AT + 1, AT + 1, "kill driver", is_restart=True)]
EXCUSE = Excuse("kill raylet", ("ray",), until=100.0, trained=7)
SAID = "stepwell: the raylet of this run's Ray has ended"


def finished(prompt: str = "p") -> Rollout:
    return Rollout(prompt, reward=0.5, ends=["returned"], began_at=AT - 2, last_at=AT)


def raised(prompt: str = "p") -> Rollout:
    return Rollout(prompt, ends=["raised"], began_at=AT - 2, last_at=AT)


def aborts(rollout: Rollout, reason: str, disturbances: list[Disturbance]) -> int:
    found = Verdict()
    check_aborts({"t": rollout}, PoolBooks(aborted={"t": reason}), disturbances, found)
    return found.figures["silent_aborts"]


def drops(
    reason: str,
    rollouts: list[Rollout],
    disturbances: list[Disturbance],
    trained: tuple[str, ...] = (),
) -> int:
    found = Verdict()
    books = PoolBooks(closed={"p": f"dropped ({reason})"})
    logs = {f"t{k}": rollout for k, rollout in enumerate(rollouts)}
    check_drops(logs, books, trained, disturbances, found, min_n=2)
    return found.figures["silent_drops"]


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "group_served", f"{INFRASTRUCTURE}: x"])
def test_a_finished_rollout_that_is_aborted_in_quiet_is_found_whatever_the_reason(
    reason: str,
) -> None:
    assert aborts(finished(), reason, QUIET) == 1
    assert aborts(finished(), reason, LONG_AGO) == 1


def test_a_disturbance_at_that_time_explains_the_abort_of_a_finished_rollout() -> None:
    assert aborts(finished(), "cancelled", A_KILL) == 0
    assert aborts(finished(), "cancelled", A_RESTART) == 0


def test_a_rollout_that_failed_on_purpose_may_be_aborted_in_quiet() -> None:
    assert aborts(raised(), "OnPurposeError: t", QUIET) == 0


@pytest.mark.parametrize("reason", [INFRASTRUCTURE, "deadline", "surplus", "stale", "", "operator"])
def test_a_group_dropped_in_quiet_for_a_reason_that_nobody_gave_is_found(reason: str) -> None:
    assert drops(reason, [finished(), finished()], QUIET) == 1


def test_an_outage_explains_a_group_lost_to_infrastructure_but_no_other_reason() -> None:
    assert drops(INFRASTRUCTURE, [finished()], A_KILL) == 0
    assert drops("open_cancelled", [], A_RESTART) == 0
    assert drops("open_cancelled", [], QUIET) == 1
    assert drops("open_cancelled", [finished()], A_RESTART) == 1
    assert drops("operator", [finished()], A_KILL) == 1


def test_too_few_rollouts_is_believed_only_if_too_few_agents_finished() -> None:
    assert drops("too_few_rollouts", [finished(), raised(), raised(), raised()], QUIET) == 0
    assert drops("too_few_rollouts", [finished(), finished(), raised(), raised()], QUIET) == 1


def test_a_restart_explains_what_only_a_restarted_trainer_says() -> None:
    assert drops(PRODUCER_GONE, [finished()], A_RESTART) == 0
    assert drops(PRODUCER_GONE, [finished()], A_KILL) == 1


def test_a_group_dropped_as_used_must_have_been_trained() -> None:
    assert drops(USED, [finished(), finished()], QUIET, trained=("p",)) == 0
    assert drops(USED, [finished(), finished()], QUIET) == 1


ANSWERED = Rollout("p", answered={"c": {"log_probs": [-0.5, -1.25]}})
KEPT = np.float32([-0.5, -1.25])


def not_archived(archived: Archived, books: PoolBooks) -> int:
    found = Verdict()
    check_archive({"t": ANSWERED}, archived, books, found)
    return found.figures["not_archived"]


@pytest.mark.parametrize("how", ["acked", "evaluated", "dropped (operator)"])
def test_an_answer_whose_group_has_left_is_in_the_archive_with_its_log_probs(how: str) -> None:
    left = PoolBooks(closed={"p": how})
    assert not_archived({"t": {"c": [KEPT]}}, left) == 0
    assert not_archived({"t": {"c": [KEPT + 1, KEPT]}}, left) == 0
    assert not_archived({"t": {"c": [KEPT + 1]}}, left) == 1
    assert not_archived({"t": {"d": [KEPT]}}, left) == 1
    assert not_archived({}, left) == 1


def test_an_answer_whose_group_is_live_or_named_by_a_salvage_need_not_be_archived() -> None:
    assert not_archived({}, PoolBooks(live={"p"})) == 0
    assert not_archived({}, PoolBooks(named_lost={"p"})) == 0


@pytest.mark.parametrize(
    ("words", "code", "trained", "now"),
    [
        ("stepwell: KeyError", 1, 7, 50.0),
        (f"rpc_client.h:204: {SAID}", 1, 7, 50.0),
        (SAID, -11, 7, 50.0),
        (SAID, 0, 7, 50.0),
        (SAID, 1, 7 + GOES_ON + 1, 50.0),
        (SAID, 1, 7, 101.0),
    ],
    ids=[
        "another cause",
        "not in its own words",
        "a crash",
        "no error",
        "it had gone on",
        "too late",
    ],
)
def test_a_life_that_ends_after_an_excusing_fault_is_not_excused_wholesale(
    words: str, code: int, trained: int, now: float
) -> None:
    assert EXCUSE.covers(SAID, 1, 7, 50.0)
    assert not EXCUSE.covers(words, code, trained, now)
