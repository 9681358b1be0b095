"""The document of Claw-R1's DataPool: its Step, indices, calls, keys and backends as it has them.

Written anew from `docs/components/datapool.md` and `claw_r1/data_pool/` (github.com/AgentR1/Claw-R1
at 4e1dec6). The rows are those of docs/migration.md."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

from stepwell.backends.base import TrainingBackend
from stepwell.backends.config import VerlConfig
from stepwell.backends.verl.backend import VerlBackend, lay_out
from stepwell.config.load import load_config
from stepwell.datapool import (
    DataPoolClient,
    PoolConfig,
    Step,
    VersionSpan,
    client_of,
    start_data_pool,
)
from stepwell.datapool.errors import InvalidStepError
from stepwell.trainer.algorithms.off_policy.correction import correct, lags
from tests.builders import step_of
from tests.gateway.conftest import World, world, worlds

__all__ = ["world", "worlds"]
"""Fixtures: a gateway with a scripted engine."""


def their_step(trajectory_uid: str, **fields: Any) -> Step:
    """A step as their documentation writes one: lists, by keyword."""
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
        ({"prompt": [1]}, "a Step has no prompt;"),
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
    with pytest.raises(InvalidStepError, match="a Step needs prompt_uid"):
        Step.from_dict({"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t"})


def test_the_documented_fields_are_a_step() -> None:
    step = Step(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5],
        reward=1.0,
        trajectory_uid="conversation",
        prompt_uid="prompt",
        step_index=0,
        policy_version=7,
        is_last=True,
        metadata={"source": "gsm8k"},
    )
    assert [*step.prompt_ids, *step.response_ids] == [1, 2, 3, 4, 5]
    assert (step.reward, step.is_last, step.metadata) == (1.0, True, {"source": "gsm8k"})


# -- producers and consumers -----------------------------------------------------------------


@pytest.fixture
def data_pool(cluster: Any) -> Iterator[Any]:
    """A bare handle of the pool's actor, as a gateway and a trainer there have one."""
    actor = start_data_pool(name=uuid.uuid4().hex)
    yield actor
    ray.kill(actor)


async def test_a_bare_handle_takes_the_documented_positions(data_pool: Any) -> None:
    for i in range(5):
        data_pool.submit_step.remote(their_step(f"t{i}"), "val")
        data_pool.complete_trajectory.remote(f"t{i}", float(i), "val")
    assert await data_pool.fetch_batch.remote(5) is None, "nothing is in train"
    batch = await data_pool.fetch_batch.remote(5, "val")
    assert [(s.trajectory_uid, s.reward, s.is_last) for s in batch] == [
        (f"t{i}", float(i), True) for i in range(5)
    ]


async def test_the_documented_loop_trains_on_ready_groups_first_in_first_out(
    data_pool: Any,
) -> None:
    for prompt in ("first", "second"):
        steps = [
            Step(
                prompt_ids=[1],
                response_ids=[2],
                trajectory_uid=f"{prompt}{i}",
                prompt_uid=prompt,
                reward=float(i),
                is_last=True,
            )
            for i in range(5)
        ]
        data_pool.submit_steps.remote(steps[:3], channel="train")
        for step in steps[3:]:
            data_pool.submit_step.remote(step, channel="train")
    trained: list[str] = []
    while len(trained) < 2:
        batch = await data_pool.fetch_batch.remote(n_rollouts=5)
        if batch is not None:
            assert len(batch) == 5
            trained += {step.prompt_uid for step in batch}
    assert trained == ["first", "second"]
    assert await data_pool.fetch_batch.remote(n_rollouts=5) is None


async def test_channels_share_nothing(data_pool: Any) -> None:
    await data_pool.submit_step.remote(their_step("t", is_last=True), channel="train")
    await data_pool.submit_step.remote(their_step("v", is_last=True), channel="val")
    [step] = await data_pool.fetch_batch.remote(n_rollouts=1, channel="val")
    assert step.trajectory_uid == "v"
    counts = await data_pool.get_statistics.remote()
    assert (counts["train"]["groups"]["ready"], counts["val"]["groups"]["ready"]) == (1, 0)
    [step] = await data_pool.fetch_batch.remote(n_rollouts=1, channel="train")
    assert step.trajectory_uid == "t"


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


async def test_an_agent_completes_its_trajectory_at_the_gateway(world: World) -> None:
    """The black-box way: no code of the agent's knows the pool."""
    world.say("4")
    agent = await world.client("t", "p")
    await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "2 + 2?"}])
    assert await world.pool.trajectory_complete() == {"t": False}
    done: Any = await agent.post("/complete_trajectory", body={"reward": 1.0}, cast_to=object)
    assert done["outcome"] == "complete"
    batch = await world.pool.fetch_batch(n_rollouts=1)
    assert batch is not None
    assert [(step.trajectory_uid, step.reward, step.is_last) for step in batch] == [
        ("t", 1.0, True)
    ]


# -- indices ---------------------------------------------------------------------------------


async def fill(pool: DataPoolClient) -> None:
    for i in range(3):
        await pool.submit_step(their_step("a", step_index=i, is_last=i == 2))
    await pool.submit_step(their_step("b"))
    await pool.submit_step(their_step("c", step_index=4))
    await pool.submit_step(their_step("other"), "val")


async def test_the_three_indices_say_what_is_stored_and_what_is_complete() -> None:
    async with DataPoolClient.local(PoolConfig.model_validate({"default": {"n_rollouts": 3}})) as p:
        await fill(p)
        assert await p.trajectory_index() == {"a": [0, 1, 2], "b": [0], "c": [4]}
        assert await p.trajectory_complete() == {"a": True, "b": False, "c": False}
        [group] = (await p.prompt_groups()).values()
        assert (group.prompt_uid, group.trajectory_uids) == ("1", ("a", "b", "c"))
        assert group.complete_trajectories == {"a"}
        assert await p.trajectory_index("val") == {"other": [0]}
        await p.complete_trajectory("b")
        await p.abort_trajectory("c", "agent")
        assert await p.trajectory_complete() == {"a": True, "b": True, "c": False}
        assert (await p.trajectory_index())["c"] == []
        lease = await p.lease_batch(n_rollouts=2)
        assert lease is not None
        await p.ack(lease.lease_id)
        assert [await p.trajectory_index(), await p.prompt_groups()] == [{}, {}]


async def test_indices_of_many_pages_are_whole() -> None:
    uids = [f"t{i}" for i in range(2100)]
    async with DataPoolClient.local() as pool:
        await pool.submit_steps([their_step(uid) for uid in uids])
        assert [*await pool.trajectory_index()] == uids
        [group] = (await pool.prompt_groups()).values()
    assert group.trajectory_uids == tuple(uids)


async def test_indices_are_read_of_a_bare_handle_by_its_client(data_pool: Any) -> None:
    client = client_of([data_pool])
    await fill(client)
    assert await client.trajectory_index() == {"a": [0, 1, 2], "b": [0], "c": [4]}
    assert await client.trajectory_complete("val") == {"other": False}
    await client.close()


# -- capacity and freshness ------------------------------------------------------------------


async def test_beyond_max_queue_size_the_oldest_ready_groups_are_dropped() -> None:
    keys = ["async_training.max_queue_size=8"]
    assert load_config("quickstart").async_training.max_queue_size is None
    channels = load_config("quickstart", keys).pool_of_run.channels
    limited = channels["train"].model_copy(update={"max_outstanding_groups": None})
    async with DataPoolClient.local(PoolConfig(channels={"train": limited})) as pool:
        for i in range(10):
            step = Step(
                prompt_ids=[1],
                response_ids=[2],
                trajectory_uid=f"t{i}",
                prompt_uid=f"p{i}",
                is_last=True,
            )
            await pool.submit_step(step)
        assert [*await pool.prompt_groups()] == [f"p{i}" for i in range(2, 10)]


def test_a_step_behind_the_staleness_threshold_stays_in_the_batch_and_weighs_less() -> None:
    config = load_config("quickstart", ["async_training.staleness_threshold=0.1"])
    threshold = config.async_training.staleness_threshold
    published = {41: 0, 42: 4}
    lag = lags(
        [step_of(policy_version=v) for v in (42, 41)], published, updates_now=4, updates_per_sync=4
    )
    assert [bool(behind) for behind in lag > threshold] == [False, True]
    sampled = torch.full((4,), -1.0)  # log-probs of two steps of two tokens
    now = torch.tensor([-1.5, -1.5, -1.5, -0.5])
    weights, _ = correct(
        now,
        sampled,
        [2, 2],
        lag.tolist(),
        staleness_threshold=threshold,
        config=config.algorithm.off_policy.model_copy(update={"clip": None}),
    )
    half = float(np.exp(-0.5))
    assert weights.tolist() == pytest.approx([1.0, 1.0, half, 1.0])


# -- training backends -----------------------------------------------------------------------


class PaddedBackend(TrainingBackend):
    """A trainer of one's own: `convert` is all that it needs."""

    def __init__(self, prompt_length: int, response_length: int) -> None:
        self.lengths = (prompt_length, response_length)

    def convert(self, steps: list[Step], **_: Any) -> dict[str, torch.Tensor]:
        longest, longest_response = self.lengths
        rows = [
            [*[0] * (longest - len(s.prompt_ids)), *s.prompt_ids, *s.response_ids]
            + [0] * (longest_response - len(s.response_ids))
            for s in steps
        ]
        return {"input_ids": torch.tensor(rows)}


async def test_a_backend_of_ones_own_converts_what_was_fetched() -> None:
    async with DataPoolClient.local() as pool:
        await pool.submit_step(their_step("t", is_last=True))
        steps = await pool.fetch_batch(n_rollouts=1)
    assert steps is not None
    batch = PaddedBackend(4, 3).convert(steps)
    assert batch["input_ids"].tolist() == [[0, 50, 60, 70, 101, 202, 0]]


def test_verls_backend_pads_prompts_left_and_responses_right() -> None:
    """The layout is that of `VerlBackend.convert`; with verl itself: `make test-verl`."""
    backend = VerlBackend(VerlConfig(prompt_length=4, response_length=3))
    rows = backend.rows([their_step("t", reward=1.0, rollout_log_probs=[-1.0, -2.0])])
    x = {name: t.tolist() for name, t in lay_out(rows, backend.config).tensors.items()}
    assert (x["prompts"], x["responses"]) == ([[0, 50, 60, 70]], [[101, 202, 0]])
    assert x["input_ids"] == [[0, 50, 60, 70, 101, 202, 0]]
    assert (x["attention_mask"], x["response_mask"]) == ([[0, 1, 1, 1, 1, 1, 0]], [[1, 1, 0]])
    assert x["position_ids"][0][:6] == [0, 0, 1, 2, 3, 4]
    assert x["rm_scores"] == [[0, 1.0, 0]]
