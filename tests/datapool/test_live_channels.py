"""Channels of live traffic: they wait for late rewards, never for room, and close what agents leave
open."""

from __future__ import annotations

import pytest

from stepwell.datapool import ChannelConfig
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import (
    InvalidRequestError,
    PoolFullError,
    UnknownTrajectoryError,
)
from tests.datapool.conftest import DAY, JournaledPool

# -- names ----------------------------------------------------------------------------------------


def test_a_channel_whose_name_fits_in_no_row_is_refused_and_changes_nothing(tmp_path):
    pool = JournaledPool(tmp_path)
    for name in ("c" * 70_000, "é" * 512):
        for method, *uids in (("open_group", "p", 1), ("open_trajectory", "t", "p")):
            with pytest.raises(InvalidRequestError, match="fewer than 1024 bytes"):
                pool(method, *uids, channel=name)
    longest = "é" * 511
    assert pool("open_group", "p", 1, channel=longest) == "accepted"
    pool = pool.restart()
    stats = pool("get_statistics")
    assert {name: each["groups"]["submitted"] for name, each in stats.items()} == {
        "train": 0,
        "val": 0,
        longest: 1,
    }


# -- late rewards ----------------------------------------------------------------------------------


def uids(lease):
    return [] if lease is None else [g.prompt_uid for g in lease.groups]


def test_a_group_waits_for_its_reward_and_is_served_with_it(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    assert pool.lease_batch() is None
    assert pool.stats()["groups"]["held"] == 1
    assert pool.set_reward("t", 0.5) == "accepted"
    assert pool.lease_batch().groups[0].trajectories[0].reward == 0.5


def test_a_group_whose_rewards_are_there_does_not_wait(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.submit_step(pool.step("t", "p"))
    pool.complete_trajectory("t", 1.0)
    assert uids(pool.lease_batch()) == ["p"]


def test_after_the_wait_a_group_is_served_without_its_reward(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    pool.advance(59)
    assert pool.lease_batch() is None
    assert pool.pool.next_deadline() == pool.now + 1
    pool.advance(1)
    assert pool.lease_batch().groups[0].trajectories[0].reward is None


def test_after_the_wait_a_group_is_dropped_where_only_scored_ones_are_served(make_pool):
    pool = make_pool(reward_wait_s=60, selection=SelectionConfig(filters=("scored",)))
    pool.finish("p", "t")
    pool.advance(60)
    assert pool.stats()["groups"]["drop_reasons"] == {"unscored": 1}


def test_why_a_trajectory_takes_no_reward_is_said(make_pool):
    pool = make_pool()
    for uid in ("trained", "dropped", "deleted", "aborted", "leased"):
        pool.submit_step(pool.step(uid, f"of-{uid}"))
        if uid == "aborted":
            pool.abort_trajectory(uid, "no tool")
        else:
            pool.complete_trajectory(uid, 1.0)
        if uid == "trained":
            pool.ack(pool.lease_batch().lease_id)
    pool.drop_group("of-dropped", "too long")
    pool.delete("deleted")
    assert uids(pool.lease_batch()) == ["of-leased"]
    said = {
        "trained": "its group was trained",
        "dropped": "its group was dropped (too long)",
        "deleted": "it was deleted",
        "leased": "its group was leased by a trainer before",
        "aborted": "it was aborted (no tool)",
    }
    assert {uid: pool.why_closed(uid) for uid in said} == said
    assert {uid: pool.set_reward(uid, 0.5) for uid in said} == dict.fromkeys(said, "late")
    pool.submit_step(pool.step("open", "p"))
    for uid in ("open", "never"):
        with pytest.raises(UnknownTrajectoryError):
            pool.why_closed(uid)


def test_a_reward_after_the_lease_is_late_and_counted_and_changes_nothing(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    pool.advance(60)
    lease = pool.lease_batch()
    assert pool.set_reward("t", 1.0) == "late"
    assert pool.stats()["trajectories"]["late"] == 1
    pool.nack(lease.lease_id)
    assert pool.lease_batch().groups[0].trajectories[0].reward is None, "a redelivery is the same"
    pool.ack(f"lease-{2}")
    assert pool.set_reward("t", 1.0) == "late"
    assert pool.stats()["trajectories"]["late"] == 2


def test_a_group_handed_back_does_not_wait_again(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    pool.advance(60)
    pool.nack(pool.lease_batch().lease_id)
    assert uids(pool.lease_batch()) == ["p"]


def test_a_group_that_waits_for_rewards_blocks_no_other(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    pool.submit_step(pool.step("u", "q"))
    pool.complete_trajectory("u", 1.0)
    assert uids(pool.lease_batch()) == ["q"]


def test_a_dry_run_says_who_waits_for_rewards(make_pool):
    pool = make_pool(reward_wait_s=60)
    pool.finish("p", "t")
    assert pool.dry_run().counts == {"hold": {"unscored": 1}}


@pytest.mark.parametrize("wait", ["reward_wait_s", "hold_s"])
def test_a_wait_counts_on_through_a_restart_and_is_not_begun_again(tmp_path, wait):
    live = {"default": ChannelConfig(**{wait: 100})}
    pool = JournaledPool(tmp_path, **live)
    pool.say("t", "p", "text")
    pool("complete_trajectory", "t")
    pool.later(60 / DAY)
    pool.say("u", "q", "another")  # so that the pool has seen this time
    pool = pool.restart(**live)
    pool.later(39 / DAY)
    assert pool("lease_batch") is None
    pool.later(1 / DAY)
    pool = pool.restart(**live)
    assert uids(pool("lease_batch")) == ["p"]


# -- a holding time --------------------------------------------------------------------------------


def test_a_scored_group_is_held_and_its_new_reward_is_what_is_served(make_pool):
    pool = make_pool(hold_s=30, selection=SelectionConfig(filters=("zero_variance",)))
    for uid in ("a", "b"):
        pool.submit_step(pool.step(uid, "p"))
    for uid in ("a", "b"):
        pool.complete_trajectory(uid, 1.0)
    assert pool.dry_run().counts == {"hold": {"holding_time": 1}}, "no filter judges it yet"
    pool.advance(29)
    assert pool.lease_batch() is None
    assert pool.set_reward("a", 0.0) == "accepted"
    pool.advance(1)
    rewards = [t.reward for t in pool.lease_batch().groups[0].trajectories]
    assert rewards == [0.0, 1.0]
    assert pool.set_reward("a", 1.0) == "late"


def test_after_the_holding_time_the_filters_judge_and_the_wait_for_rewards_begins(make_pool):
    pool = make_pool(hold_s=30, reward_wait_s=60, selection=SelectionConfig(filters=("scored",)))
    pool.finish("p", "t")
    pool.advance(30)
    assert pool.dry_run().counts == {"hold": {"unscored": 1}}
    pool.advance(59)
    assert pool.stats()["groups"]["held"] == 1
    pool.advance(1)
    assert pool.stats()["groups"]["drop_reasons"] == {"unscored": 1}


def test_a_consumer_of_fewer_rollouts_is_served_when_the_holding_time_is_over(make_pool):
    pool = make_pool(hold_s=30, n_rollouts=2)
    pool.finish("p", "t")
    pool.advance(29)
    assert pool.lease_batch(n_rollouts=1) is None
    pool.advance(1)
    assert uids(pool.lease_batch(n_rollouts=1)) == ["p"]


def test_a_group_handed_back_is_not_held_again(make_pool):
    pool = make_pool(hold_s=30)
    pool.finish("p", "t")
    pool.advance(30)
    pool.nack(pool.lease_batch().lease_id)
    assert uids(pool.lease_batch()) == ["p"]


# -- room ------------------------------------------------------------------------------------------


def conserved(stats):
    groups = stats["groups"]
    kept = sum(groups[state] for state in ("open", "ready", "leased", "acked", "dropped"))
    return groups["submitted"] == kept and groups["dropped"] == sum(groups["drop_reasons"].values())


@pytest.mark.parametrize("limits", [{"max_queue_size": 2}, {"max_bytes": 400}], ids=str)
def test_a_channel_that_drops_the_oldest_makes_no_producer_wait(make_pool, limits):
    pool = make_pool(overflow="drop_oldest", **limits)
    for i in range(20):
        pool.open_group(f"g{i}", 1)
        pool.open_trajectory(f"g{i}/t", f"g{i}")
        pool.finish(f"g{i}", f"g{i}/t")
        pool.finish(f"s{i}", f"s{i}/t")
        pool.submit_step(pool.step(f"o{i}/t", f"o{i}"))
    stats = pool.stats()
    assert conserved(stats)
    assert set(stats["groups"]["drop_reasons"]) == set(limits)


def test_bytes_of_open_groups_are_bounded_too_and_the_oldest_goes_first(make_pool):
    pool = make_pool(max_bytes=300)
    for i in range(10):
        assert pool.submit_step(pool.step(f"t{i}", f"p{i}")) == "accepted"
    stats = pool.stats()
    assert stats["memory_bytes"] <= 300
    assert stats["groups"]["drop_reasons"] == {"max_bytes": 10 - stats["groups"]["open"]}
    assert pool.submit_step(pool.step("t0", "p0", 1)) == "late"
    assert pool.submit_step(pool.step("t9", "p9", 1)) == "accepted"


def test_a_group_alone_may_hold_more_than_the_limit(make_pool):
    pool = make_pool(max_bytes=1)
    for i in range(3):
        assert pool.submit_step(pool.step("t", "p", i)) == "accepted"


def test_admission_waits_for_credit_where_a_channel_asks_for_it(make_pool):
    """`max_outstanding_groups` is the brake of a producer of ours; a live channel has none."""
    pool = make_pool(overflow="drop_oldest", max_outstanding_groups=1)
    pool.open_group("p", 1)
    with pytest.raises(PoolFullError, match="max_outstanding_groups=1"):
        pool.open_group("q", 1)
    assert pool.submit_step(pool.step("t", "r")) == "accepted", "traffic itself never waits"
    assert ChannelConfig().max_outstanding_groups is None


# -- what agents leave open ------------------------------------------------------------------------


def test_a_trajectory_without_a_step_for_long_is_closed(make_pool):
    pool = make_pool(group_idle_s=60)
    pool.submit_step(pool.step("t", "p"))
    pool.advance(50)
    pool.submit_step(pool.step("t", "p", 1))
    pool.advance(50)
    assert pool.stats()["groups"]["open"] == 1, "its last step is 50 s old"
    pool.advance(10)
    assert pool.stats()["groups"]["drop_reasons"] == {"idle": 1}
    assert pool.stats()["trajectories"]["abort_reasons"] == {"group_dropped": 1}
    assert pool.submit_step(pool.step("t", "p", 2)) == "late"


def test_an_idle_group_is_served_with_what_is_complete(make_pool):
    pool = make_pool(group_idle_s=60)
    pool.open_group("p", 2)
    pool.finish("p", "a")
    pool.submit_step(pool.step("b", "p"))
    pool.advance(60)
    assert [t.trajectory_uid for t in pool.lease_batch().groups[0].trajectories] == ["a"]


def test_a_declared_group_that_nobody_starts_is_closed(make_pool):
    pool = make_pool(group_idle_s=60)
    pool.open_group("p", 2)
    pool.advance(60)
    assert pool.stats()["groups"]["drop_reasons"] == {"idle": 1}
