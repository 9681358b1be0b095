"""Readiness and order of groups, declared and undeclared; deadlines, limits, memory."""

from __future__ import annotations

import pytest

from stepwell.datapool.errors import (
    ChannelShutDownError,
    GroupClosedError,
    GroupConflictError,
    InvalidRequestError,
    PoolFullError,
    UnknownGroupError,
)


def prompts(steps):
    return list(dict.fromkeys(s.prompt_uid for s in steps))


def drain(pool, **request):
    served = []
    while (batch := pool.fetch_batch(**request)) is not None:
        served += prompts(batch)
    return served


# -- readiness -------------------------------------------------------------------------------


def test_a_declared_group_is_ready_when_its_rollouts_are_complete(pool):
    pool.open_group("p", 2, metadata={"answer": 42})
    pool.finish("p", "a")
    assert pool.fetch_batch() is None
    pool.finish("p", "b")
    (group,) = pool.lease_batch().groups
    assert [t.trajectory_uid for t in group.trajectories] == ["a", "b"]
    assert (group.n_rollouts, group.metadata, group.delivery) == (2, {"answer": 42}, 1)


def test_a_declared_group_has_its_own_number_whatever_the_fetch_asks(pool):
    pool.open_group("p", 2)
    pool.finish("p", "a", "b")
    assert prompts(pool.fetch_batch(n_rollouts=5)) == ["p"]


def test_an_undeclared_group_is_ready_at_the_channels_number(make_pool):
    pool = make_pool(n_rollouts=3)
    pool.finish("p", "a", "b")
    assert pool.fetch_batch() is None
    pool.finish("p", "c")
    assert len(pool.fetch_batch()) == 3


def test_an_undeclared_group_is_ready_at_the_number_of_the_fetch(make_pool):
    pool = make_pool(n_rollouts=4)
    pool.finish("small", "a", "b")
    pool.finish("large", "c", "d", "e", "f", "g")
    assert pool.fetch_batch(n_rollouts=6) is None
    assert prompts(pool.fetch_batch(n_rollouts=5)) == ["large"]
    assert prompts(pool.fetch_batch(n_rollouts=2)) == ["small"]


def test_an_undeclared_group_waits_for_its_open_siblings(pool, make_step):
    for uid in "abc":
        pool.submit_step(make_step(uid))
    for uid in "ab":
        pool.complete_trajectory(uid)
        assert pool.fetch_batch(n_rollouts=1) is None
    assert pool.complete_trajectory("c") == "complete"
    assert [s.trajectory_uid for s in pool.fetch_batch(n_rollouts=3)] == ["a", "b", "c"]


def test_the_wait_ends_with_the_last_open_sibling_however_it_ends(pool, make_step):
    pool.submit_step(make_step("b"))
    pool.finish("p", "a")
    assert pool.fetch_batch() is None
    pool.abort_trajectory("b", "crash")
    assert [s.trajectory_uid for s in pool.fetch_batch()] == ["a"]


def test_siblings_are_waited_for_no_longer_than_configured(make_pool, make_step):
    pool = make_pool(siblings_wait_s=10)
    pool.submit_step(make_step("hung"))
    pool.finish("p", "a")
    pool.advance(4)
    pool.finish("p", "b")
    pool.advance(5.9)
    assert pool.fetch_batch() is None
    pool.advance(0.1)
    assert pool.fetch_batch(n_rollouts=2) is None, "b has waited for six seconds"
    assert pool.next_deadline() == pool.now + 4
    pool.advance(4)
    assert [s.trajectory_uid for s in pool.fetch_batch(n_rollouts=2)] == ["a", "b"]
    assert pool.complete_trajectory("hung") == "late"
    assert pool.next_deadline() is None


def test_siblings_that_begin_all_the_time_hold_no_group_back_for_ever(make_pool, make_step):
    pool = make_pool(siblings_wait_s=10)
    pool.submit_step(make_step("t0"))
    for i in range(1, 6):
        pool.submit_step(make_step(f"t{i}"))
        pool.complete_trajectory(f"t{i - 1}")
        if i < 5:
            assert pool.fetch_batch() is None
        pool.advance(2)
    assert len(pool.fetch_batch()) == 5


def test_a_group_that_is_declared_while_it_waits_goes_by_its_own_number(pool, make_step):
    pool.submit_step(make_step("b"))
    pool.finish("p", "a")
    pool.open_group("p", 1)
    assert pool.next_deadline() is None
    assert [s.trajectory_uid for s in pool.fetch_batch()] == ["a"]


def test_groups_are_served_in_the_order_they_became_ready(pool):
    for prompt_uid in "xyz":
        pool.open_group(prompt_uid, 2)
        pool.finish(prompt_uid, f"{prompt_uid}0")
    pool.finish("late starter, undeclared", "u")
    for prompt_uid in "zx":
        pool.finish(prompt_uid, f"{prompt_uid}1")
    assert drain(pool) == ["late starter, undeclared", "z", "x"]


def test_the_order_is_when_a_group_reached_what_the_fetch_asks_for(pool):
    pool.finish("first to one", "a")
    pool.finish("first to two", "b", "c")
    pool.finish("first to one", "d")
    assert drain(pool, n_rollouts=2) == ["first to two", "first to one"]


def test_everything_complete_at_the_time_of_the_lease_is_served(pool, make_step):
    pool.open_group("p", 1)
    pool.submit_step(make_step("slow"))
    pool.finish("p", "fast")
    pool.submit_step(make_step("slow", index=1))
    pool.complete_trajectory("slow")
    (group,) = pool.lease_batch().groups
    assert [t.trajectory_uid for t in group.trajectories] == ["fast", "slow"]


def test_aborted_rollouts_are_used_up(pool, make_step):
    pool.open_group("p", 3)
    pool.finish("p", "a", "b")
    pool.submit_step(make_step("c"))
    assert pool.fetch_batch() is None
    pool.abort_trajectory("c", "crash")
    (group,) = pool.lease_batch().groups
    assert (len(group.trajectories), group.n_rollouts) == (2, 3)


def test_an_abort_that_will_be_retried_is_not_used_up(pool, make_step):
    pool.open_group("p", 2)
    pool.finish("p", "a")
    pool.submit_step(make_step("b"))
    pool.abort_trajectory("b", "crash", will_retry=True)
    assert pool.fetch_batch() is None
    pool.open_trajectory("b2", "p", attempt=1)
    pool.finish("p", "b2")
    (group,) = pool.lease_batch().groups
    assert [(t.trajectory_uid, t.attempt) for t in group.trajectories] == [("a", 0), ("b2", 1)]


def test_giving_up_an_announced_retry_uses_the_rollout_up(pool, make_step):
    pool.open_group("p", 2)
    pool.finish("p", "a")
    pool.submit_step(make_step("b"))
    pool.abort_trajectory("b", "crash", will_retry=True)
    assert pool.abort_trajectory("b", "gave up", will_retry=False) == "aborted"
    assert len(pool.fetch_batch()) == 1


def test_a_group_waits_for_spare_rollouts_that_still_run(pool, make_step):
    pool.open_group("p", 2)
    for uid in "abc":
        pool.submit_step(make_step(uid))
    pool.abort_trajectory("a", "crash")
    pool.complete_trajectory("b")
    assert pool.fetch_batch() is None, "c can still make it two"
    pool.complete_trajectory("c")
    assert len(pool.fetch_batch()) == 2


def test_too_few_rollouts_drop_the_group_with_a_reason(pool, make_step):
    pool.open_group("p", 2, min_rollouts=2)
    pool.finish("p", "a")
    pool.submit_step(make_step("b"))
    pool.abort_trajectory("b", "crash")
    groups = pool.stats()["groups"]
    assert (groups["dropped"], groups["drop_reasons"]) == (1, {"too_few_rollouts": 1})
    assert pool.stats()["steps"]["stored"] == 0


# -- declaring -------------------------------------------------------------------------------


def test_declaring_a_group_twice_is_a_no_op_unless_the_numbers_differ(pool):
    assert pool.open_group("p", 2) == "accepted"
    assert pool.open_group("p", 2) == "duplicate"
    with pytest.raises(GroupConflictError, match=r"'n_rollouts': 2.*'n_rollouts': 3"):
        pool.open_group("p", 3)


def test_a_group_can_be_declared_after_its_first_steps(pool):
    pool.finish("p", "a")
    assert pool.open_group("p", 2, metadata={"k": "v"}) == "accepted"
    assert pool.fetch_batch() is None, "undeclared it was ready with one"
    pool.finish("p", "b")
    assert pool.lease_batch().groups[0].metadata == {"k": "v"}


def test_a_closed_group_cannot_be_declared_again(pool):
    pool.finish("p", "a")
    lease = pool.lease_batch()
    with pytest.raises(GroupClosedError, match="was served undeclared"):
        pool.open_group("p", 1)
    pool.ack(lease.lease_id)
    with pytest.raises(GroupClosedError, match="was acked"):
        pool.open_group("p", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_rollouts": 0}, "n_rollouts is 0; pass an integer >= 1"),
        ({"n_rollouts": 2, "min_rollouts": 3}, "min_rollouts is 3 but n_rollouts is 2"),
        ({"n_rollouts": 1, "deadline_s": -1}, "deadline_s is -1; pass seconds > 0"),
        ({"n_rollouts": 1, "metadata": 7}, "metadata is 7; pass a mapping"),
    ],
)
def test_bad_arguments_are_named(pool, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        pool.open_group("p", **arguments)
    assert pool.stats()["groups"]["submitted"] == 0


# -- deadlines -------------------------------------------------------------------------------


def test_a_deadline_serves_what_is_complete(pool, make_step):
    pool.open_group("p", 3, deadline_s=10)
    pool.finish("p", "a", "b")
    pool.submit_step(make_step("c"))
    assert pool.next_deadline() == pool.now + 10
    pool.advance(9.9)
    assert pool.fetch_batch() is None
    pool.advance(0.1)
    assert pool.next_deadline() is None
    assert len(pool.fetch_batch()) == 2
    assert pool.submit_step(make_step("c", index=1)) == "late"


def test_a_deadline_drops_a_group_with_too_little(pool, make_step):
    pool.open_group("p", 3, deadline_s=10, min_rollouts=2)
    pool.finish("p", "a")
    pool.submit_step(make_step("b"))
    pool.advance(10)
    assert pool.stats()["groups"]["drop_reasons"] == {"deadline": 1}
    assert pool.complete_trajectory("b") == "late"


def test_the_channels_deadline_covers_undeclared_groups(make_pool, make_step):
    pool = make_pool(n_rollouts=4, group_deadline_s=10)
    pool.finish("partly", "a", "b")
    pool.submit_step(make_step("c", "never"))
    pool.advance(10)
    assert prompts(pool.fetch_batch(n_rollouts=4)) == ["partly"]
    assert pool.stats()["groups"]["drop_reasons"] == {"deadline": 1}


def test_a_served_group_has_no_deadline_left(pool):
    pool.open_group("p", 1, deadline_s=10)
    pool.finish("p", "a")
    pool.fetch_batch()
    assert pool.next_deadline() is None


# -- limits ----------------------------------------------------------------------------------


def test_a_full_queue_drops_the_oldest_ready_group(make_pool):
    pool = make_pool(max_queue_size=2)
    for uid in "abc":
        pool.finish(f"p{uid}", uid)
    assert pool.stats()["groups"]["drop_reasons"] == {"max_queue_size": 1}
    assert drain(pool) == ["pb", "pc"]


def test_open_and_ready_groups_use_up_the_credit_and_a_lease_frees_it(make_pool):
    pool = make_pool(max_outstanding_groups=2)
    pool.open_group("a", 1)
    pool.open_group("b", 1)
    with pytest.raises(PoolFullError, match="max_outstanding_groups=2"):
        pool.open_group("c", 1)
    assert pool.open_group("a", 1) == "duplicate", "what is open needs no credit"
    pool.finish("a", "a0")
    with pytest.raises(PoolFullError):
        pool.open_group("c", 1)
    pool.lease_batch()
    assert pool.open_group("c", 1) == "accepted"


@pytest.mark.parametrize("consumes", ["lease", "version", "ack"])
def test_a_limit_may_hold_only_once_the_channel_has_had_a_consumer(make_pool, consumes):
    pool = make_pool(max_outstanding_groups=2, limit_without_consumer=False)
    for i in range(5):
        pool.open_group(f"p{i}", 1)
    assert not pool.stats()["has_consumer"]
    pool.finish("p0", "a")
    if consumes == "version":
        pool.pool.advance_version(0, now=pool.now)
    else:
        lease = pool.lease_batch()
        if consumes == "ack":
            pool.ack(lease.lease_id)
    assert pool.stats()["has_consumer"]
    with pytest.raises(PoolFullError, match="max_outstanding_groups=2"):
        pool.open_group("another", 1)


def test_a_shut_down_channel_opens_nothing_and_serves_what_is_left(pool, make_step):
    pool.submit_step(make_step("t"))
    pool.shutdown()
    with pytest.raises(ChannelShutDownError):
        pool.open_group("p2", 1)
    with pytest.raises(ChannelShutDownError):
        pool.open_group("p2", 1, channel="another")
    pool.complete_trajectory("t")
    assert len(pool.fetch_batch()) == 1


def test_shutting_down_one_channel_leaves_the_others_open(pool):
    pool.shutdown("val")
    assert pool.open_group("p", 1) == "accepted"
    assert pool.stats("val")["shut_down"]
    assert not pool.stats("train")["shut_down"]


# -- dropping and memory ---------------------------------------------------------------------


def test_dropping_a_group_releases_it_and_is_idempotent(pool):
    pool.open_group("p", 2)
    pool.finish("p", "a")
    pool.drop_group("p", "uninteresting")
    pool.drop_group("p", "again")
    assert pool.stats()["groups"]["drop_reasons"] == {"uninteresting": 1}
    assert pool.stats()["tokens"]["stored"] == 0


def test_only_open_and_ready_groups_can_be_dropped(pool):
    with pytest.raises(UnknownGroupError):
        pool.drop_group("p", "test")
    pool.finish("p", "a")
    lease = pool.lease_batch()
    with pytest.raises(GroupClosedError, match="leased; nack its lease first"):
        pool.drop_group("p", "test")
    pool.ack(lease.lease_id)
    with pytest.raises(GroupClosedError, match="was acked"):
        pool.drop_group("p", "test")


def test_closed_uids_are_remembered_up_to_the_limit(make_pool, make_step):
    pool = make_pool(remembered_uids=2)
    for uid in "abc":
        pool.finish(f"p{uid}", uid)
        pool.fetch_batch()
    assert pool.submit_step(make_step("c", "pc", 1)) == "late"
    assert pool.submit_step(make_step("b", "pb", 1)) == "late"
    assert pool.submit_step(make_step("a", "pa", 1)) == "accepted", "forgotten, so it is new"


def test_served_groups_leave_nothing_but_their_uids(pool, make_step):
    for i in range(300):
        pool.open_group(f"p{i}", 1, deadline_s=1000)
        pool.submit_step(make_step(f"s{i}", f"p{i}"))
        pool.finish(f"p{i}", f"t{i}")
        pool.fetch_batch()
    channel = pool.pool.channels["train"]
    assert not channel.records.trajectories
    assert pool.stats()["trajectories"]["complete"] == 0
    assert not channel.records.groups
    assert channel.next_alarm is None, "withdrawn alarms are released"


def test_reasons_do_not_grow_without_bound(pool):
    for i in range(500):
        pool.open_group(f"p{i}", 1)
        pool.drop_group(f"p{i}", f"failed after {i} s")
    reasons = pool.stats()["groups"]["drop_reasons"]
    assert len(reasons) < 100
    assert sum(reasons.values()) == 500


def test_a_group_that_its_deadline_made_ready_stays_so_when_it_is_declared_with_more(make_pool):
    pool = make_pool(n_rollouts=3, group_deadline_s=10)
    pool.finish("p", "a")
    pool.advance(10)
    assert pool.open_group("p", 2, min_rollouts=2) == "accepted"
    assert prompts(pool.fetch_batch()) == ["p"]


def test_a_group_that_idled_goes_by_its_own_terms_once_it_is_declared(make_pool):
    pool = make_pool(n_rollouts=4, group_idle_s=10)
    pool.finish("p", "a")
    pool.finish("q", "b")
    pool.advance(10)
    assert pool.stats()["ready"] == 2
    assert pool.open_group("p", 2) == pool.open_group("q", 1) == "accepted"
    pool.advance(9)
    assert drain(pool) == ["q"]
    pool.finish("p", "c")
    assert len(pool.lease_batch().groups[0].trajectories) == 2
