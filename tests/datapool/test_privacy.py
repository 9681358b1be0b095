"""Data that is too old, or that somebody wants gone, leaves memory, journal and exported files."""

from __future__ import annotations

import pytest

from stepwell.datapool import ChannelConfig, Step
from stepwell.datapool.errors import InvalidRequestError
from tests.datapool.conftest import DAY, JournaledPool


@pytest.fixture
def pool(tmp_path):
    pool = JournaledPool(tmp_path / "pool")
    yield pool
    pool.journal.close()


# -- what has left is erased -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["acked", "dropped", "deleted"])
def test_the_text_of_a_group_that_left_is_in_no_file_of_the_journal(pool, how):
    for i in range(40):  # so that the secret is not alone on its page
        pool.say(f"t{i}", f"p{i}", f"common text {i}")
    pool.say("secret", "ps", "a secret of somebody")
    pool("complete_trajectory", "secret", 1.0)
    assert pool.holds("a secret of somebody")
    if how == "acked":
        pool("ack", pool("lease_batch").lease_id)
    elif how == "dropped":
        pool("drop_group", "ps", "test")
    else:
        assert pool("delete", "secret").trajectories == ("secret",)
    if how == "deleted":
        pool.later(0)
    else:
        pool.erase()
    assert not pool.holds("a secret of somebody")
    assert pool.holds("common text 17")


def test_a_deletion_erases_what_was_acked_before_too(pool):
    pool.say("t", "p", "an acked one")
    pool("complete_trajectory", "t")
    pool("ack", pool("lease_batch").lease_id)
    pool.say("u", "q", "another one")
    assert pool("delete", "t").trajectories == ()
    pool.later(0)
    assert not pool.holds("an acked one")
    assert pool.holds("another one")


def test_a_file_that_shrinks_keeps_nothing_of_what_left(pool):
    for i in range(200):
        pool.say(f"t{i}", f"p{i}", f"secret {i} " * 2000)
    for i in range(200):
        pool("delete", f"t{i}")
    pool.later(0)
    assert not any(pool.holds(f"secret {i} ") for i in range(0, 200, 20))


# -- retention -------------------------------------------------------------------------------------


def test_groups_are_dropped_for_their_age_whatever_became_of_them(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7)
    pool.say("running", "open", "an open one")
    pool("open_group", "declared", 2)
    pool.say("done", "ready", "a ready one")
    pool("complete_trajectory", "done")
    pool.later(6)
    pool.say("young", "young", "a young one")
    assert pool.groups()["dropped"] == 0
    pool.later(1)
    assert pool.groups()["drop_reasons"] == {"retention": 3}
    assert pool.groups()["open"] == 1
    assert not pool.holds("an open one")
    assert not pool.holds("a ready one")
    assert pool.holds("a young one")
    assert pool.say("running", "open", "more", 1) == "late"


def test_a_leased_group_goes_for_its_age_when_it_is_handed_back(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7, default=ChannelConfig(lease_s=30 * DAY))
    pool.say("t", "p", "a leased one")
    pool("complete_trajectory", "t")
    lease = pool("lease_batch")
    pool.later(7)
    assert pool.groups()["leased"] == 1
    assert pool.holds("a leased one")
    pool("nack", lease.lease_id)
    pool.later(0)
    assert pool.groups()["drop_reasons"] == {"retention": 1}
    assert not pool.holds("a leased one")


def test_the_age_counts_on_through_a_restart(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=7)
    pool.say("t", "p", "an old one")
    pool.later(5)
    pool = pool.restart(retention_days=7)
    pool.later(2)
    assert pool.groups()["drop_reasons"] == {"retention": 1}
    assert not pool.holds("an old one")


def test_groups_of_one_age_go_a_few_at_a_time(tmp_path):
    pool = JournaledPool(tmp_path, retention_days=1)
    for i in range(400):
        pool.say(f"t{i}", f"p{i}", f"text {i}")
    pool.now += DAY
    pool("tick")
    assert 0 < pool.groups()["dropped"] < 200, "others are served between"
    assert pool.pool.next_deadline() <= pool.now, "and the rest is due at once"
    pool.later(0)
    assert pool.groups()["dropped"] == 400


# -- deletion --------------------------------------------------------------------------------------


def test_a_trajectory_goes_with_its_group_and_cannot_come_back(pool):
    pool("open_group", "p", 2)
    pool.say("a", "p", "of a")
    pool.say("b", "p", "of b")
    deleted = pool("delete", "a")
    assert (deleted.trajectories, deleted.leased) == (("a", "b"), ())
    assert pool.groups()["drop_reasons"] == {"deleted": 1}
    assert pool.say("a", "p", "of a", 1) == "late"
    assert pool("complete_trajectory", "a", 1.0) == "late"
    assert pool("delete", "a").trajectories == (), "twice is no error"
    assert pool("delete", "never seen").trajectories == ()


@pytest.mark.parametrize("end", ["ack", "nack", "expiry"])
def test_a_leased_group_is_never_served_again_and_goes_with_its_lease(pool, end):
    pool.say("t", "p", "a leased one")
    pool("complete_trajectory", "t")
    lease = pool("lease_batch", lease_s=60)
    deleted = pool("delete", "t")
    assert (deleted.trajectories, deleted.leased) == ((), ("t",))
    pool = pool.restart()
    assert pool.groups()["leased"] == 1, "its consumer may still ack it"
    if end == "expiry":
        pool.later(1)
    else:
        pool(end, lease.lease_id)
    assert pool("lease_batch") is None
    assert pool.groups()["acked" if end == "ack" else "dropped"] == 1
    pool.later(0)
    assert not pool.holds("a leased one")


def test_all_that_has_a_tag_goes_in_every_channel(pool):
    for channel in ("train", "val"):
        for uid in ("mine", "group", "other"):
            step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid=f"p-{uid}")
            pool("submit_step", step, channel)
        pool("mark", trajectory_uid="mine", channel=channel, tags=["ann"])
        pool("mark", prompt_uid="p-group", channel=channel, tags=["ann", "x"])
        pool("mark", trajectory_uid="other", channel=channel, tags=["ann"])
        pool("mark", trajectory_uid="other", channel=channel, tags=["bob"])
    pool = pool.restart()
    deleted = pool("delete", tag="ann")
    assert sorted(deleted.trajectories) == ["group", "group", "mine", "mine"]
    assert pool("delete", tag="ann").trajectories == ()
    assert pool.groups()["open"] == pool.groups("val")["open"] == 1


def test_many_with_a_tag_go_a_few_at_a_time(pool):
    for i in range(400):
        pool.say(f"t{i}", f"p{i}", "text")
        pool("mark", trajectory_uid=f"t{i}", tags=["ann"])
    first = pool("delete", tag="ann")
    assert first.more
    assert 0 < len(first.trajectories) < 200
    while first.more:
        first += pool("delete", tag="ann")
    assert len(first.trajectories) == 400


@pytest.mark.parametrize("asked", [{}, {"trajectory_uid": "t", "tag": "x"}, {"tag": ""}], ids=str)
def test_a_deletion_names_one_trajectory_or_one_tag(pool, asked):
    with pytest.raises(InvalidRequestError, match="pass"):
        pool("delete", **asked)
