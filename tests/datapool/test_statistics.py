"""Statistics: where everything is, and why open groups are open."""

from __future__ import annotations

from tests.datapool.conftest import JournaledPool


def test_statistics_come_per_channel_and_asking_makes_none(pool):
    assert set(pool.get_statistics()) == {"train", "val"}
    assert pool.get_statistics("test")["groups"]["submitted"] == 0
    assert set(pool.get_statistics()) == {"train", "val"}


def test_the_oldest_open_groups_are_named_with_the_reason(pool, make_step):
    pool.open_group("running", 3, deadline_s=60)
    pool.finish("running", "a")
    pool.submit_step(make_step("b", "running"))
    pool.open_group("not started", 2)
    pool.submit_step(make_step("c", "aborted"))
    pool.abort_trajectory("c", "crash")
    pool.now += 10
    running, not_started, aborted = pool.stats()["oldest_open"]
    assert running == {
        "prompt_uid": "running",
        "age_s": 10,
        "declared": True,
        "n_rollouts": 3,
        "complete": 1,
        "running": 1,
        "aborted": 0,
        "deadline_in_s": 50,
        "why": "1 of 3 complete; 1 still open",
    }
    assert not_started["why"] == "0 of 2 complete; 2 trajectories were not started"
    assert aborted["why"] == "0 of 1 complete; all trajectories were aborted"


def test_a_group_that_opens_again_is_as_old_as_it_was(pool):
    pool.finish("old", "a")
    pool.now += 100
    pool.open_group("young", 2)
    pool.open_group("old", 2)
    pool.now += 100
    stats = pool.stats()
    assert [group["prompt_uid"] for group in stats["oldest_open"]] == ["old", "young"]
    assert stats["oldest_open_age_s"] == 200


def test_the_oldest_version_among_ready_groups_is_known(pool, make_step):
    for uid, version in (("a", 7), ("b", 3), ("c", 5)):
        pool.submit_step(make_step(uid, f"p{uid}", policy_version=version))
        pool.complete_trajectory(uid)
    oldest = []
    while (stats := pool.stats())["ready"]:
        oldest.append(stats["oldest_policy_version_ready"])
        pool.fetch_batch()
    assert oldest == [3, 3, 5]
    assert pool.stats()["oldest_policy_version_ready"] is None


def test_stored_tokens_follow_the_stored_steps(pool, make_step):
    pool.submit_steps([make_step("a"), make_step("b")])
    assert pool.stats()["tokens"]["stored"] == 10
    pool.abort_trajectory("a", "crash")
    assert pool.stats()["tokens"]["stored"] == 5


def test_response_tokens_are_counted_once_and_for_good(pool, make_step):
    steps = [make_step("a"), make_step("b")]
    pool.submit_steps([*steps, steps[0]])  # sent again: a duplicate
    n = sum(len(s.response_ids) for s in steps)
    assert pool.stats()["tokens"]["responses"] == n > 0
    pool.abort_trajectory("a", "crash")
    assert pool.stats()["tokens"]["responses"] == n


def test_a_long_reason_is_counted_by_its_beginning_and_is_not_in_every_transaction(tmp_path):
    """An agent sends what it likes, and counts are written with every change."""
    pool = JournaledPool(tmp_path)
    reason = "crash: " + "x" * 1_000_000
    pool("open_trajectory", "t", "p")
    pool("abort_trajectory", "t", reason)
    for i in range(20):
        pool("open_trajectory", f"t{i}", "p")
    (counted,) = pool("get_statistics", "train")["trajectories"]["abort_reasons"]
    assert reason.startswith(counted.removesuffix("…"))
    assert len(counted) <= 300
    assert pool("list_trajectories", trajectory_uid="t").items[0].reason == reason
    assert pool.journal.statistics()["file_bytes"] < 2_000_000
    pool("drop_group", "p", "why: " + reason)
    pool.later(0)
    pool.erase()
    assert not pool.holds("x" * 1000), "what is remembered of it is short, too"
    events = pool.pool.events.after(None).events
    assert all(len(event.data["reason"]) <= 300 for event in events)
    assert pool("why_closed", "t").startswith("it was aborted (crash: xxx")
    pool.journal.close()
