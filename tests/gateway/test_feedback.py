"""Feedback of people on replies, while a group is held for it, and when it comes too late."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from stepwell.datapool.config import ChannelConfig, PoolConfig
from tests.gateway.test_traffic import TRAJECTORY, Agent, agents, user

__all__ = ["agents"]

HOLD_S = 0.4


async def rollout(agent: Agent, reward: float = 0.0) -> str:
    """A conversation of two turns that ends with this reward; its trajectory."""
    first = await agent.say(user("hi"))
    await agent.say(user("hi"), {"role": "assistant", "content": first}, user("sure?"))
    uid: str = agent.headers[TRAJECTORY]
    done = {"trajectory_uid": uid, "reward": reward}
    assert (await agent.post("/v1/complete_trajectory", done))[1]["outcome"] == "complete"
    return uid


async def test_what_people_say_while_a_group_is_held_is_what_is_trained(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(pool_config=PoolConfig(default=ChannelConfig(hold_s=HOLD_S)))
    agent = agents(world)
    uid = await rollout(agent)
    await world.pool.mark(trajectory_uid=uid, tags=["user-7"])
    assert (await world.pool.get_statistics("train"))["groups"]["held"] == 1
    assert await world.pool.lease_batch() is None, "it has all its rewards, and is held"

    said = {"trajectory_uid": uid, "score": 1.0, "label": "liked"}
    accepted = {"trajectory_uid": uid, "outcome": "accepted"}
    assert await agent.post("/v1/feedback", said) == (200, accepted)
    [row] = (await world.pool.list_trajectories(trajectory_uid=uid)).items
    below = f"/{uid}/{row.prompt_uid}/v1/feedback"
    of_step = {"step_index": 0, "score": -0.5, "correction": "hello"}
    assert await agent.post(below, of_step) == (200, accepted)
    assert (await agent.post(below, {"correction": "yes"}))[0] == 200

    [row] = (await world.pool.list_trajectories(trajectory_uid=uid)).items
    assert row.marks.tags == {"user-7", "liked"}
    assert row.marks.corrections == {"0": "hello", "last": "yes"}
    lease = await world.pool.lease_batch(timeout_s=20 * HOLD_S)
    [trajectory] = lease.groups[0].trajectories
    assert [step.reward for step in trajectory.steps] == [-0.5, 1.0]


@pytest.mark.parametrize("said", [{"score": 1.0}, {"label": "liked"}, {"correction": "no"}])
async def test_what_comes_after_the_lease_is_refused_and_changes_nothing(
    world: Any, agents: Any, said: Any
) -> None:
    agent = agents(world)
    uid = await rollout(agent, 0.25)
    lease = await world.pool.lease_batch()
    assert lease.groups[0].trajectories[0].reward == 0.25
    status, got = await agent.post("/v1/feedback", {"trajectory_uid": uid, **said})
    assert status == 410
    for words in ("takes no feedback any more", "leased by a trainer", "pool.default.hold_s"):
        assert words in got["error"]["message"]
    await world.pool.nack(lease.lease_id)
    again = await world.pool.lease_batch()
    assert again.groups == lease.groups or again.groups[0].trajectories[0].reward == 0.25


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ({}, 400, "the feedback is empty"),
        ({"score": 1, "step_index": 7}, 400, "has no step 7"),
        ({"score": 1, "step_index": -1}, 400, "step_index"),
        ({"score": 1, "step_index": 2**64}, 400, "step_index"),
        ({"correction": "no", "step_index": 7}, 400, "has no step 7"),
        ({"score": 2e9}, 400, "score"),
        ({"thumbs": "up"}, 400, "thumbs"),
        ({"label": "l" * 257}, 400, "label"),
        ({"correction": "c" * 65_537}, 400, "correction"),
        ({"trajectory_uid": "nobody", "score": 1}, 404, "'nobody', which no channel knows"),
    ],
)
async def test_feedback_that_says_nothing_usable_is_told_what_to_send(
    world: Any, agents: Any, said: Any, status: int, words: str
) -> None:
    agent = agents(world)
    uid = await rollout(agent)
    got = await agent.post("/v1/feedback", {"trajectory_uid": uid, **said})
    assert got[0] == status, got
    assert words in got[1]["error"]["message"]


async def test_a_trajectorys_key_speaks_of_that_one_alone(worlds: Any, agents: Any) -> None:
    world = await worlds(admin_keys=["an-admin-key-of-32-characters-00"])
    agent = agents(world)
    admin = {"authorization": "Bearer an-admin-key-of-32-characters-00"}
    _, got = await agent.post("/v1/groups", {"n": 2}, **admin)
    mine, other = got["trajectories"]
    key = {"authorization": f"Bearer {mine['api_key']}"}
    under = mine["base_url"].removeprefix(world.url)
    await agent.say(user("hi"), under=under, **key)
    assert (await agent.post(f"{under}/v1/feedback", {"score": 1}, **key))[0] == 200
    body = {"trajectory_uid": other["trajectory_uid"], "score": 1}
    assert (await agent.post("/v1/feedback", body, **key))[0] == 403
    assert (await agent.post("/v1/feedback", body))[0] == 401


async def test_a_score_with_a_label_is_taken_whole_by_a_group_that_waits_for_scores(
    worlds: Any, agents: Any
) -> None:
    """A consumer that waits leases the group as soon as it has its last reward."""
    world = await worlds(pool_config=PoolConfig(default=ChannelConfig(reward_wait_s=60)))
    agent = agents(world)
    await agent.say(user("hi"))
    uid = agent.headers[TRAJECTORY]
    await agent.post("/v1/complete_trajectory", {"trajectory_uid": uid})
    waiting = asyncio.create_task(world.pool.lease_batch(timeout_s=20))
    await asyncio.sleep(0.1)
    said = {"trajectory_uid": uid, "score": 1.0, "label": "liked"}
    status, got = await agent.post("/v1/feedback", said)
    assert status == 200, got
    [group] = (await waiting).groups
    assert group.trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    "path",
    ["feedback", "rewards", "groups", "complete_trajectory", "../init_trajectory"],
)
async def test_a_body_that_is_no_json_is_told_so(world: Any, path: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"content-type": "application/json"}) as http,
        http.post(f"{world.url}/v1/{path}", data=b'{"score": 1') as answer,
    ):
        told = (await answer.json())["error"]["message"]
    assert answer.status == 400
    assert told.startswith("the request's body is no JSON: ")
