"""Claw-R1's documented calls of its DataPool, written anew from its `docs/components/datapool.md`
and `claw_r1/data_pool/` (github.com/AgentR1/Claw-R1 at 4e1dec6)."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import pytest
import ray

from stepwell.datapool import DataPoolClient, Step, VersionSpan, start_data_pool
from stepwell.datapool.errors import InvalidStepError


def their_step(trajectory_uid: str, **fields: Any) -> Step:
    """As their documentation writes one: lists, by keyword."""
    return Step(
        prompt_ids=[50, 60, 70],
        response_ids=[101, 202],
        trajectory_uid=trajectory_uid,
        prompt_uid="1",
        policy_version=42,
        **fields,
    )


# -- Step ------------------------------------------------------------------------------------


def test_token_ids_are_the_prompt_and_then_the_response():
    step = their_step("t")
    assert step.token_ids.tolist() == [50, 60, 70, 101, 202]
    assert (step.token_ids.dtype, len(step.token_ids)) == (np.int32, step.n_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reward": 0.0, "is_last": True, "metadata": {"data_source": "gsm8k", "extra": [1, None]}},
        {"rollout_log_probs": [-0.1, -1e-30], "finish_reason": "length"},
        {"step_index": 2, "parent_index": 0},
        {"version_spans": (VersionSpan(42, 0, 1), VersionSpan(43, 1, 2))},
        {"multi_modal_data": {"image": "https://example.com/a.png"}},
        {"routed_experts": np.arange(8).reshape(4, 2, 1)},
    ],
    ids=lambda fields: next(iter(fields), "plain"),
)
def test_a_step_goes_through_json_and_comes_back_the_same(fields):
    step = their_step("t", **fields)
    assert Step.from_dict(json.loads(json.dumps(step.to_dict()))) == step


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": [1]}, "'prompt'"),
        ({"trajectory_uid": None}, "trajectory_uid is None"),
        ({"version_spans": [{"version": 42}]}, "'start' and 'end'"),
        ({"version_spans": 7}, "'int' object is not iterable"),
        ({"routed_experts": [[1], [2, 3]]}, "inhomogeneous"),
    ],
)
def test_what_is_no_step_is_refused_by_name(fields, named):
    with pytest.raises(InvalidStepError, match=named):
        Step.from_dict({**their_step("t").to_dict(), **fields})


def test_a_step_that_lacks_a_field_is_refused_by_name():
    with pytest.raises(InvalidStepError, match="'prompt_uid'"):
        Step.from_dict({"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t"})


# -- producers and consumers -----------------------------------------------------------------


async def test_a_bare_handle_takes_the_documented_positions(cluster: Any) -> None:
    data_pool = start_data_pool(name=uuid.uuid4().hex)
    try:
        for i in range(5):
            data_pool.submit_step.remote(their_step(f"t{i}"), "val")
            data_pool.complete_trajectory.remote(f"t{i}", float(i), "val")
        assert await data_pool.fetch_batch.remote(5) is None, "nothing is in train"
        batch = await data_pool.fetch_batch.remote(5, "val")
    finally:
        ray.kill(data_pool)
    assert [(s.trajectory_uid, s.reward, s.is_last) for s in batch] == [
        (f"t{i}", float(i), True) for i in range(5)
    ]


async def test_a_client_takes_them_too() -> None:
    async with DataPoolClient.local() as pool:
        await pool.submit_steps([their_step("t"), their_step("t", step_index=1)], "val")
        assert await pool.complete_trajectory("t", 0.5, "val", {"by": "judge"}) == "complete"
        lease = await pool.lease_batch(1, "val")
    assert lease is not None
    [trajectory] = lease.groups[0].trajectories
    assert (trajectory.reward, trajectory.metadata) == (0.5, {"by": "judge"})


async def test_a_group_is_ready_once_all_that_began_have_ended() -> None:
    # 一个组在所有 trajectory 都收到 is_last step 后变为"就绪": a group is ready once all of its
    # trajectories have their last step.
    async with DataPoolClient.local() as pool:
        for i in range(3):
            await pool.submit_step(their_step(f"t{i}"))
        await pool.complete_trajectory("t0", 0.0)
        await pool.submit_step(their_step("t1", step_index=1, is_last=True))
        assert await pool.fetch_batch(n_rollouts=2) is None
        assert await pool.complete_trajectory("t2", 2.0) == "complete"
        batch = await pool.fetch_batch(n_rollouts=2)
    assert batch is not None
    assert [s.trajectory_uid for s in batch if s.is_last] == ["t0", "t1", "t2"]
