"""Leases: exactly one consumer at a time, and nothing lost when it fails."""

from __future__ import annotations

import pytest

from stepwell.datapool.errors import (
    InvalidRequestError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownLeaseError,
)


def groups(lease):
    return [(g.prompt_uid, g.delivery) for g in lease.groups]


@pytest.fixture
def filled(make_pool):
    pool = make_pool(lease_s=60)
    for uid in "abcd":
        pool.finish(f"p{uid}", uid)
    return pool


def test_a_leased_group_is_with_one_consumer_only(filled):
    assert groups(filled.lease_batch(batch_size=2)) == [("pa", 1), ("pb", 1)]
    assert groups(filled.lease_batch(batch_size=2)) == [("pc", 1), ("pd", 1)]
    assert filled.lease_batch() is None


def test_a_batch_is_whole_or_not_there(filled):
    assert filled.lease_batch(batch_size=5) is None
    assert filled.stats()["groups"]["ready"] == 4
    assert len(filled.fetch_batch(batch_size=4)) == 4


def test_acked_groups_are_gone_and_acking_again_is_a_no_op(filled):
    lease = filled.lease_batch(batch_size=4)
    filled.ack(lease.lease_id)
    filled.ack(lease.lease_id)
    assert filled.lease_batch() is None
    stats = filled.stats()
    assert stats["groups"]["acked"] == stats["trajectories"]["acked"] == 4
    assert stats["steps"]["acked"] == 4
    assert stats["tokens"]["stored"] == 0


def test_nacked_groups_come_first_again_in_their_order(filled):
    lease = filled.lease_batch(batch_size=2)
    filled.nack(lease.lease_id, "out of memory")
    filled.nack(lease.lease_id)
    again = filled.lease_batch(batch_size=3)
    assert groups(again) == [("pa", 2), ("pb", 2), ("pc", 1)]
    assert again.lease_id != lease.lease_id
    assert filled.stats()["leases"]["nack_reasons"] == {"out of memory": 1}


def test_a_redelivery_has_the_same_content(filled, make_step):
    lease = filled.lease_batch()
    filled.nack(lease.lease_id)
    assert filled.submit_step(make_step("new", "pa")) == "late"
    assert filled.lease_batch().groups[0].trajectories == lease.groups[0].trajectories


def test_an_expired_lease_is_delivered_again(filled):
    lease = filled.lease_batch(batch_size=2)
    assert lease.expires_at == filled.now + 60 == filled.next_deadline()
    filled.advance(60)
    assert groups(filled.lease_batch(batch_size=4)) == [("pa", 2), ("pb", 2), ("pc", 1), ("pd", 1)]
    for call in (filled.ack, filled.nack, filled.renew):
        with pytest.raises(LeaseExpiredError, match="raise lease_s, or renew"):
            call(lease.lease_id)
    assert filled.stats()["leases"]["expired"] == 1


def test_an_ack_that_is_faster_than_the_expiry_counts(filled):
    lease = filled.lease_batch()
    filled.now += 100
    filled.ack(lease.lease_id)
    filled.advance(0)
    assert filled.stats()["leases"]["expired"] == 0


def test_a_renewed_lease_lives_longer(filled):
    lease = filled.lease_batch(lease_s=10)
    filled.advance(9)
    assert filled.renew(lease.lease_id, 20) == filled.now + 20
    filled.advance(19)
    filled.ack(lease.lease_id)
    assert filled.stats()["groups"]["acked"] == 1


def test_contradictions_and_unknown_leases_are_refused(filled):
    acked, nacked = filled.lease_batch().lease_id, filled.lease_batch().lease_id
    filled.ack(acked)
    filled.nack(nacked)
    with pytest.raises(LeaseClosedError, match="was acked and cannot be nacked"):
        filled.nack(acked)
    with pytest.raises(LeaseClosedError, match="was nacked and cannot be acked"):
        filled.ack(nacked)
    with pytest.raises(UnknownLeaseError, match="from before a restart"):
        filled.ack("lease-99")


@pytest.mark.parametrize(
    "arguments", [{"n_rollouts": 0}, {"batch_size": 0}, {"lease_s": 0}, {"batch_size": True}]
)
def test_bad_requests_are_refused(filled, arguments):
    with pytest.raises(InvalidRequestError, match=next(iter(arguments))):
        filled.lease_batch(**arguments)


def test_a_returned_group_of_a_full_queue_is_the_oldest_and_goes_first(make_pool):
    pool = make_pool(max_queue_size=1)
    pool.finish("p1", "a")
    lease = pool.lease_batch()
    pool.finish("p2", "b")
    pool.nack(lease.lease_id)
    assert groups(pool.lease_batch()) == [("p2", 1)]
    assert pool.stats()["groups"]["drop_reasons"] == {"max_queue_size": 1}


def test_giving_up_a_retry_of_a_leased_group_does_not_make_it_ready(pool, make_step):
    pool.open_group("p", 1)
    pool.submit_step(make_step("b"))
    pool.abort_trajectory("b", "crash", will_retry=True)
    pool.finish("p", "a")
    pool.lease_batch()
    assert pool.abort_trajectory("b", "gave up", will_retry=False) == "aborted"
    stats = pool.stats()
    assert (stats["ready"], stats["oldest_policy_version_ready"]) == (0, None)
