"""Closing trajectories: rewards, aborts, repeats and contradictions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stepwell.datapool.errors import (
    InvalidRequestError,
    NotOwnerError,
    TrajectoryClosedError,
    UnknownTrajectoryError,
)
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import OWNER


@pytest.mark.parametrize(
    ("step_reward", "outcome", "served"),
    [(None, None, None), (0.5, None, 0.5), (None, 1.0, 1.0), (0.5, 1.0, 1.5), (0.5, 0.0, 0.5)],
)
def test_the_outcome_reward_is_added_to_the_last_steps_own(
    pool, make_step, step_reward, outcome, served
):
    pool.submit_steps([make_step("t", reward=0.25), make_step("t", index=1, reward=step_reward)])
    pool.complete_trajectory("t", reward=outcome)
    first, last = pool.fetch_batch()
    assert (first.reward, last.reward) == (0.25, served)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e308, 10**400, -2e9, "1"])
def test_a_numpy_scalar_is_a_reward_and_what_would_make_its_group_nan_is_not(
    pool, make_step, wrong
):
    pool.submit_step(make_step("t"))
    with pytest.raises(InvalidRequestError, match=r"'t': reward is .*; pass a number within"):
        pool.complete_trajectory("t", reward=wrong)
    with pytest.raises(InvalidRequestError, match=r"'t': reward is"):
        pool.set_reward("t", wrong, now=0.0)
    assert pool.complete_trajectory("t", reward=np.float32(0.5)) == "complete"


def test_completing_twice_is_a_no_op_even_after_the_ack(pool, make_step):
    pool.submit_step(make_step("t"))
    assert pool.complete_trajectory("t", reward=1.0) == "complete"
    assert pool.complete_trajectory("t", reward=1.0) == "complete"
    assert len(pool.fetch_batch()) == 1
    assert pool.complete_trajectory("t", reward=1.0) == "complete"
    assert pool.stats()["trajectories"]["acked"] == 1


def test_completing_again_with_another_reward_is_refused(pool, make_step):
    pool.submit_step(make_step("t"))
    pool.complete_trajectory("t", reward=1.0)
    with pytest.raises(TrajectoryClosedError, match=r"completed with outcome reward 1.0"):
        pool.complete_trajectory("t", reward=0.0)


def test_an_is_last_trajectory_takes_no_outcome_reward_afterwards(pool, make_step):
    pool.submit_step(make_step("t", is_last=True, reward=1.0))
    assert pool.complete_trajectory("t") == "complete"
    with pytest.raises(
        TrajectoryClosedError, match="set_reward changes its reward until it is leased"
    ):
        pool.complete_trajectory("t", reward=1.0)


def test_completing_an_aborted_trajectory_is_refused(pool, make_step):
    pool.submit_step(make_step("t"))
    assert pool.abort_trajectory("t", "timeout") == "aborted"
    with pytest.raises(TrajectoryClosedError, match=r"aborted \(timeout\)"):
        pool.complete_trajectory("t", reward=1.0)


def test_aborting_a_complete_trajectory_is_refused(pool, make_step):
    pool.finish("p", "t")
    with pytest.raises(TrajectoryClosedError, match="cannot be aborted"):
        pool.abort_trajectory("t", "late thought")


def test_aborting_twice_is_a_no_op_and_the_first_reason_counts(pool, make_step):
    pool.submit_step(make_step("t"))
    pool.abort_trajectory("t", "timeout")
    assert pool.abort_trajectory("t", "other") == "aborted"
    assert pool.stats()["trajectories"]["abort_reasons"] == {"timeout": 1}
    with pytest.raises(TrajectoryClosedError, match="will_retry=True"):
        pool.abort_trajectory("t", "timeout", will_retry=True)


def test_a_registered_trajectory_without_steps_is_aborted_when_completed(pool):
    pool.open_trajectory("t", "p")
    assert pool.complete_trajectory("t", reward=1.0) == "aborted"
    assert pool.complete_trajectory("t", reward=1.0) == "aborted"
    assert pool.stats()["trajectories"]["abort_reasons"] == {"no_steps": 1}
    assert pool.fetch_batch() is None


@pytest.mark.parametrize("call", ["complete_trajectory", "abort_trajectory"])
def test_an_unknown_trajectory_is_a_key_error_that_reads_as_a_sentence(pool, call):
    arguments = ("t", "crash") if call == "abort_trajectory" else ("t",)
    with pytest.raises(UnknownTrajectoryError) as e:
        getattr(pool, call)(*arguments)
    assert isinstance(e.value, KeyError)
    assert str(e.value).startswith("trajectory 't' is unknown in channel 'train'; ")


def test_registering_merges_metadata_and_keeps_the_highest_attempt(pool, make_step):
    assert pool.open_trajectory("t", "p", attempt=2, metadata={"a": 1}) == "accepted"
    assert pool.open_trajectory("t", "p", metadata={"b": 2}) == "duplicate"
    pool.submit_step(make_step("t"))
    pool.complete_trajectory("t", metadata={"c": 3})
    (trajectory,) = pool.lease_batch().groups[0].trajectories
    assert trajectory.metadata == {"a": 1, "b": 2, "c": 3}
    assert trajectory.attempt == 2


def test_a_hole_in_the_steps_is_served_and_counted(pool, make_step):
    pool.submit_steps([make_step("t", index=0), make_step("t", index=3)])
    pool.complete_trajectory("t")
    assert [s.step_index for s in pool.fetch_batch()] == [0, 3]
    assert pool.stats()["steps"]["missing"] == 2


def test_a_trajectory_still_running_when_its_group_is_served_ends_late(pool, make_step):
    pool.finish("p", *"abcde")
    pool.submit_step(make_step("f"))
    batch = pool.fetch_batch(n_rollouts=5)
    assert {s.trajectory_uid for s in batch} == set("abcde")
    assert pool.submit_step(make_step("f", index=1)) == "late"
    assert pool.complete_trajectory("f", reward=1.0) == "late"
    assert pool.abort_trajectory("f", "crash") == "late"
    assert pool.stats()["trajectories"]["abort_reasons"] == {"group_served": 1}


def test_a_trajectory_that_starts_after_its_group_closed_ends_late(pool, make_step):
    pool.open_group("p", 1)
    pool.drop_group("p", "stop")
    assert pool.open_trajectory("t", "p") == "late"
    assert pool.submit_step(make_step("t")) == "late"
    assert pool.complete_trajectory("t") == "late"
    assert pool.stats()["groups"]["submitted"] == 1


async def test_whoever_is_not_its_owner_neither_completes_nor_scores_nor_marks_a_trajectory(
    tmp_path, make_step
):
    async with DataPoolClient.local(folder=tmp_path) as pool:
        for uid, owner in (("of-a", {OWNER: "a"}), ("everybodys", {})):
            await pool.open_trajectory(uid, "p", metadata=owner)
            await pool.submit_step(make_step(uid, "p"))
        before = (await pool.list_trajectories()).items
        for refused in (
            pool.set_reward("of-a", 1.0, owner="b"),
            pool.set_reward("of-a", 1.0, 7, owner="b"),
            pool.mark(trajectory_uid="of-a", owner="b", tags=["x"]),
            pool.complete_trajectory("of-a", 1.0, owner="b"),
        ):
            with pytest.raises(NotOwnerError, match="trajectory 'of-a' has another owner"):
                await refused
        assert (await pool.list_trajectories()).items == before
        for uid, owner in (("of-a", "a"), ("everybodys", "b"), ("of-a", None)):
            assert await pool.set_reward(uid, 0.5, 0, owner=owner) == "accepted"
            assert (await pool.mark(trajectory_uid=uid, owner=owner, tags=["x"])).tags == {"x"}
        assert await pool.complete_trajectory("of-a", 0.5, owner="a") == "complete"
        assert await pool.complete_trajectory("everybodys", 0.5, owner="b") == "complete"
        with pytest.raises(UnknownTrajectoryError):
            await pool.set_reward("nobodys", 1.0, owner="b")
        after = (await pool.list_trajectories()).items
    async with DataPoolClient.local(folder=tmp_path) as pool:
        assert (await pool.list_trajectories()).items == after
        (group,) = (await pool.lease_batch(n_rollouts=2)).groups
        assert {t.reward for t in group.trajectories} == {1.0}
        assert await pool.set_reward("of-a", 0.5, owner="a") == "late"
