"""Submitting steps: what is stored, what is a duplicate, what is late, what contradicts."""

from __future__ import annotations

import asyncio
from dataclasses import replace as changed

import numpy as np
import pytest
from msgspec.structs import replace

from stepwell.datapool import ChannelConfig, PoolConfig, ops
from stepwell.datapool.codec import Base, pack
from stepwell.datapool.core import steps as steps_module
from stepwell.datapool.errors import (
    InvalidStepError,
    PoolFullError,
    StepConflictError,
    StepIndexError,
    TrajectoryConflictError,
    UnknownBaseError,
)
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.shards import shard_of


def test_a_step_comes_back_as_it_was_submitted(pool, make_step):
    step = make_step("t", reward=0.5, metadata={"a": [1]}, finish_reason="stop", policy_version=3)
    assert pool.submit_step(step) == "accepted"
    pool.complete_trajectory("t")
    (served,) = pool.fetch_batch()
    assert served.is_last
    for name in ("prompt_ids", "response_ids", "rollout_log_probs"):
        np.testing.assert_array_equal(getattr(served, name), getattr(step, name))
    assert (served.reward, served.metadata, served.finish_reason) == (0.5, {"a": [1]}, "stop")
    assert served.policy_version == 3


async def test_what_is_no_step_is_refused_by_its_type_and_nothing_of_the_call_is_stored(make_step):
    async with DataPoolClient.local() as pool:
        with pytest.raises(InvalidStepError, match=r"of type dict; pass datapool\.Step"):
            await pool.submit_steps([make_step("t"), make_step("t", index=1).to_dict()])
        assert await pool.submit_steps([]) == []
        assert await pool.submit_step(make_step("t")) == "accepted"


def test_steps_are_served_by_index_whatever_order_they_arrived_in(pool, make_step):
    pool.submit_steps([make_step("t", index=i) for i in (2, 0, 1)])
    pool.complete_trajectory("t")
    served = pool.fetch_batch()
    assert [s.step_index for s in served] == [0, 1, 2]
    assert [s.is_last for s in served] == [False, False, True]


def test_the_same_step_twice_is_stored_once(pool, make_step):
    assert pool.submit_step(make_step("t")) == "accepted"
    assert pool.submit_step(make_step("t")) == "duplicate"
    pool.complete_trajectory("t")
    assert pool.submit_step(make_step("t")) == "duplicate", "also while its group is ready"
    lease = pool.lease_batch()
    assert pool.submit_step(make_step("t")) == "duplicate", "also while its group is leased"
    assert len(lease.steps) == 1


def test_the_same_index_with_other_content_is_a_conflict_and_changes_nothing(pool, make_step):
    pool.submit_step(make_step("t"))
    with pytest.raises(
        StepConflictError, match=r"step 't'\[0\] is already stored .* other content"
    ):
        pool.submit_step(make_step("t", response_ids=[9, 9]))
    pool.complete_trajectory("t")
    (served,) = pool.fetch_batch()
    assert served.response_ids.tolist() == [4, 5]


def test_content_is_compared_inside_nested_arrays_too(pool, make_step):
    def image(pixel):
        return {"images": [{"pixels": np.array([pixel, 2])}]}

    pool.submit_step(make_step("t", multi_modal_data=image(1)))
    assert pool.submit_step(make_step("t", multi_modal_data=image(1))) == "duplicate"
    with pytest.raises(StepConflictError):
        pool.submit_step(make_step("t", multi_modal_data=image(7)))


def test_a_conflict_does_not_keep_the_rest_of_its_batch_from_being_stored(pool, make_step):
    pool.submit_step(make_step("t"))
    batch = [
        make_step("t", response_ids=[9, 9]),
        make_step("t", index=1),
        make_step("u", index=0),
        make_step("t", prompt_uid="other", index=5),
    ]
    with pytest.raises(StepConflictError, match="2 of 4 steps refused; the others are applied"):
        pool.submit_steps(batch)
    assert pool.stats()["steps"] == {
        "submitted": 5,
        "accepted": 3,
        "duplicate": 0,
        "late": 0,
        "conflict": 1,
        "rejected": 1,
        "stored": 3,
        "acked": 0,
        "dropped": 0,
        "missing": 0,
    }


def test_apply_steps_tells_each_step_its_own_answer(pool, make_step):
    pool.submit_step(make_step("t"))
    results = pool.apply_steps(
        [make_step("t", response_ids=[9, 9]), make_step("t"), make_step("t", index=1)]
    )
    assert isinstance(results[0], StepConflictError)
    assert results[1:] == ["duplicate", "accepted"]


def test_a_step_without_its_bytes_is_refused(pool, make_step):
    sent = pack(make_step("t"))
    beginning = make_step("t", prompt_ids=[1], response_ids=[2], rollout_log_probs=None)
    based = pack(make_step("t"), Base.of(beginning, 0))
    assert based.header.base == 0
    for broken in (
        replace(sent, payload=b""),
        replace(sent, payload=sent.payload[:24]),
        replace(sent, prompt=None),
        replace(based, prompt=sent.prompt),
    ):
        (answer,) = pool.apply_steps([("t", "p", broken)])
        assert isinstance(answer, InvalidStepError)
    assert pool.submit_step(make_step("t")) == "accepted"


def test_a_step_that_is_too_large_is_refused(pool, make_step, monkeypatch):
    sent = make_step("t", metadata={"text": "x" * 1000})
    monkeypatch.setattr(steps_module, "MAX_STEP_BYTES", 1000)
    with pytest.raises(InvalidStepError, match=r"step 't'\[0\] .* has 10\d\d bytes; at most 1000"):
        pool.submit_step(sent)
    assert pool.submit_step(make_step("t")) == "accepted"


def test_a_step_relative_to_other_tokens_than_the_stored_ones_is_asked_for_whole(pool, make_step):
    pool.submit_step(make_step("t"))
    other = make_step("t", response_ids=[4, 6])
    base = Base.of(other, pack(other).header.crc)
    (answer,) = pool.apply_steps(
        [("t", "p", pack(make_step("t", index=1, prompt_ids=[1, 2, 3, 4, 6]), base))]
    )
    assert isinstance(answer, UnknownBaseError)
    assert pool.stats()["steps"]["submitted"] == 1, "it comes again"


def test_nothing_that_the_pool_keeps_is_in_an_answer_or_in_what_was_sent(pool, make_step):
    sent = pack(make_step("t", reward=0.5, is_last=True))
    pool.apply_steps([("t", "p", sent)])
    sent.payload = b""
    lease = pool.lease_packed()
    lease.groups[0].trajectories[0].steps[0].payload = b""
    pool.nack(lease.lease_id)
    assert pool.fetch_batch() == [make_step("t", reward=0.5, is_last=True)]


def test_steps_after_the_group_was_served_or_dropped_are_late(pool, make_step):
    pool.finish("served", "a")
    pool.fetch_batch()
    pool.submit_step(make_step("b", "dropped"))
    pool.drop_group("dropped", "test")
    for uid, prompt_uid in (("a", "served"), ("b", "dropped"), ("new", "served")):
        assert pool.submit_step(make_step(uid, prompt_uid, 1)) == "late"
    assert pool.stats()["groups"]["open"] == 0
    assert pool.stats()["steps"]["stored"] == 0


def test_steps_after_their_trajectory_was_closed_are_late(pool, make_step):
    pool.open_group("p", 3)
    pool.finish("p", "done")
    pool.submit_step(make_step("aborted"))
    pool.abort_trajectory("aborted", "crash")
    assert pool.submit_step(make_step("done", index=1)) == "late"
    assert pool.submit_step(make_step("aborted", index=0)) == "late"
    assert pool.stats()["steps"]["late"] == 2


def test_is_last_completes_once_every_step_before_it_has_arrived(pool, make_step):
    pool.submit_step(make_step("t", index=2, is_last=True))
    pool.submit_step(make_step("t", index=0))
    assert pool.fetch_batch() is None
    pool.submit_step(make_step("t", index=1))
    assert [s.step_index for s in pool.fetch_batch()] == [0, 1, 2]


def test_a_step_beyond_is_last_is_refused(pool, make_step):
    pool.submit_step(make_step("t", index=1, is_last=True))
    with pytest.raises(StepIndexError, match="beyond the step marked is_last, 1"):
        pool.submit_step(make_step("t", index=2))


def test_a_second_is_last_is_refused(pool, make_step):
    pool.submit_step(make_step("t", index=2, is_last=True))
    with pytest.raises(StepIndexError, match="and so is step 2; mark one"):
        pool.submit_step(make_step("t", index=1, is_last=True))


def test_is_last_below_a_stored_step_is_refused(pool, make_step):
    pool.submit_step(make_step("t", index=3))
    with pytest.raises(StepIndexError, match="but step 3 is stored"):
        pool.submit_step(make_step("t", index=1, is_last=True))


def test_a_trajectory_uid_belongs_to_one_prompt_for_good(pool, make_step):
    pool.finish("p", "t")
    with pytest.raises(TrajectoryConflictError, match="belongs to prompt 'p', not 'q'"):
        pool.submit_step(make_step("t", "q"))
    pool.fetch_batch()
    with pytest.raises(TrajectoryConflictError):
        pool.submit_step(make_step("t", "q"))
    assert pool.stats()["groups"]["submitted"] == 1, "a refused step opens no group"


def test_channels_do_not_know_each_other(pool, make_step):
    pool.submit_step(make_step("t", "p"), "train")
    pool.submit_step(make_step("t", "q"), "val")
    pool.complete_trajectory("t", channel="val")
    assert pool.fetch_batch(channel="train") is None
    assert [s.prompt_uid for s in pool.fetch_batch(channel="val")] == ["q"]
    assert pool.fetch_batch(channel="never seen") is None


def test_a_bad_channel_name_is_refused(pool, make_step):
    with pytest.raises(ValueError, match="channel is ''; pass a non-empty string"):
        pool.submit_step(make_step("t"), "")


# -- the next step of a trajectory that several producers go on with ---------------------------


async def test_the_next_step_is_stored_and_is_the_base_of_those_that_extend_it(make_step):
    first = make_step("t", prompt_ids=[1, 2], response_ids=[3, 4])
    second = make_step(
        "t", index=1, prompt_ids=[1, 2, 3, 4, 5], response_ids=[6, 7], parent_index=0
    )
    async with DataPoolClient.local() as client:
        base = await client.append_step(first)
        assert isinstance(base, Base)
        assert await client.append_step(first) == base, "again"
        assert isinstance(await client.append_step(second, base), Base)
        found = await client.resume_trajectory("t", "p")
    assert [packed.header.base for packed in found.packed.steps] == [None, 0]
    assert [s.prompt_ids.tolist() for s in found.steps] == [[1, 2], [1, 2, 3, 4, 5]]


async def test_a_step_whose_index_another_one_has_is_answered_with_all_that_is_there(make_step):
    theirs = [
        make_step("t", metadata={"call_id": "a"}),
        make_step("t", index=1, prompt_ids=[7], response_ids=[8, 8]),
    ]
    ours = make_step("t", response_ids=[9, 9])
    async with DataPoolClient.local() as client:
        await client.open_trajectory("t", "p", metadata={"m": 1})
        await client.submit_steps(theirs)
        behind = await client.append_step(ours)
        assert isinstance(behind, ops.Resumed)
        assert (behind.is_open, behind.metadata) == (True, {"m": 1})
        assert [(s.step_index, s.response_ids.tolist()) for s in behind.steps] == [
            (0, [4, 5]),
            (1, [8, 8]),
        ]
        assert isinstance(await client.append_step(changed(ours, step_index=2)), Base)
        with pytest.raises(StepConflictError):
            await client.submit_step(ours)
        counted = (await client.get_statistics("train"))["steps"]
        assert (counted["submitted"], counted["conflict"], counted["stored"]) == (5, 2, 3)


async def test_the_next_step_of_a_closed_trajectory_is_late(make_step):
    async with DataPoolClient.local() as client:
        await client.append_step(make_step("t"))
        await client.complete_trajectory("t")
        assert await client.append_step(make_step("t", response_ids=[9, 9])) == "late"
        assert await client.append_step(make_step("t", index=1)) == "late"


async def test_a_next_step_relative_to_tokens_that_the_pool_lacks_goes_once_more_whole(make_step):
    lost = Base(0, 4 * 4, crc=1)
    step = make_step("t", index=1, prompt_ids=[1, 2, 3, 4, 5], response_ids=[6, 7])
    async with DataPoolClient.local() as client:
        await client.append_step(make_step("t"))
        assert isinstance(await client.append_step(step, lost), Base)
        found = await client.resume_trajectory("t", "p")
        assert found.steps[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]
        counted = (await client.get_statistics("train"))["steps"]
        assert (counted["submitted"], counted["accepted"]) == (2, 2)


async def test_a_next_step_that_would_begin_a_group_waits_for_room(make_step):
    config = PoolConfig(default=ChannelConfig(n_rollouts=1, max_queue_size=1, overflow="block"))
    async with DataPoolClient.local(config) as client:
        await client.append_step(make_step("t"))
        await client.complete_trajectory("t")
        with pytest.raises(PoolFullError):
            await client.append_step(make_step("u", prompt_uid="q"), timeout_s=0.01)
        waiting = asyncio.create_task(client.append_step(make_step("u", prompt_uid="q")))
        assert len((await client.lease_batch(1)).groups) == 1
        assert isinstance(await waiting, Base)


async def test_a_next_step_goes_to_the_shard_of_its_group(make_step):
    services = [PoolService(PoolConfig(shards=2), shard=k) for k in range(2)]
    client = DataPoolClient([LocalShard(service) for service in services])
    uids = [f"p{i}" for i in range(8)]
    for uid in uids:
        assert isinstance(await client.append_step(make_step(f"t-{uid}", uid)), Base)
    stored = [(await DataPoolClient([p]).get_statistics("train"))["steps"] for p in client.shards]
    assert [each["stored"] for each in stored] == [
        sum(shard_of(uid, 2) == k for uid in uids) for k in range(2)
    ]
    other = next(uid for uid in uids if shard_of(uid, 2) != shard_of("p0", 2))
    with pytest.raises(TrajectoryConflictError):
        await client.append_step(make_step("t-p0", other, 1))
    for service in services:
        service.close()
