"""Agents that nobody wrote for training: what a reply says of itself, groups, rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import aiohttp
import pytest

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.ops import AbortTrajectory
from stepwell.gateway.config import Tuning
from stepwell.gateway.pool_access import ABORTS_AT_ONCE
from tests.builders import until
from tests.gateway.conftest import Sampled

VERSION, TRAJECTORY = "x-stepwell-version", "x-stepwell-trajectory"
RECORDED = "x-stepwell-recorded"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALLS: dict[str, Any] = {
    "chat/completions": {"messages": [user("hi")]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"max_tokens": 9, "messages": [user("hi")]},
}


class Agent:
    """Calls over HTTP, with nothing but an address."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.headers: Any = {}
        """Headers of the last answer."""

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        url = path if path.startswith("http") else f"{self.url}{path}"
        async with self.session.post(url, json=body, headers=headers) as answer:
            self.headers = answer.headers
            if answer.content_type == "text/event-stream":
                return answer.status, (await answer.read()).decode()
            return answer.status, await answer.json()

    async def say(self, *messages: Any, under: str = "", **headers: str) -> str:
        """One chat completion; the reply's text."""
        body = {"model": "m", "messages": list(messages)}
        status, got = await self.post(f"{under}/v1/chat/completions", body, **headers)
        assert status == 200, got
        text: str = got["choices"][0]["message"]["content"]
        return text


@pytest.fixture
async def agents() -> Any:
    """Makes agents: `agents(world)`."""
    async with aiohttp.ClientSession() as session:
        yield lambda world: Agent(session, world.url)


# -- what a reply tells of itself ------------------------------------------------------------


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_every_reply_names_its_version_and_its_trajectory(
    world: Any, agents: Any, path: str, stream: bool
) -> None:
    agent = agents(world)
    world.say("fine", version="3")
    status, _ = await agent.post(f"/v1/{path}", {"model": "m", "stream": stream, **CALLS[path]})
    assert status == 200
    [step] = world.stored()
    assert agent.headers[VERSION] == "3" == str(step.policy_version)
    assert agent.headers[TRAJECTORY] == step.trajectory_uid


async def test_a_white_box_reply_names_them_too(world: Any, agents: Any) -> None:
    agent = agents(world)
    world.say("fine", version="3")
    _, got = await agent.post("/generate", {"prompt_ids": [1, 2]})
    assert agent.headers[VERSION] == "3"
    assert agent.headers[TRAJECTORY] == got["trajectory_uid"]


async def test_a_reply_that_several_versions_sampled_names_the_newest(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    world.say("one, ", close=False, finish="abort", version="7")
    world.say("two", version="8")
    await agent.say(user("hi"))
    assert agent.headers[VERSION] == "8"
    assert world.stored()[0].policy_version == 7


async def test_a_trajectory_is_named_as_urls_name_it(world: Any, agents: Any) -> None:
    agent = agents(world)
    await agent.say(user("hi"), **{"x-trajectory-uid": "caf%C3%A9%2F1"})
    assert world.stored()[0].trajectory_uid == "café/1"
    assert agent.headers[TRAJECTORY] == "caf%C3%A9%2F1"


# -- groups ----------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORMED = {"form": "first_prompt", "n": 2, "within_s": 60.0}


def groups(world: Any) -> list[str]:
    """Group of each Step, in the order they came in."""
    return [step.prompt_uid for step in world.stored()]


async def listed_group(world: Any, prompt_uid: str, channel: str = "train") -> Any:
    page = await world.pool.list_groups(channel, prompt_uid=prompt_uid)
    return page.items[0]


async def test_conversations_with_one_first_prompt_form_groups_of_n(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    for _ in range(5):
        await agents(world).say(SYSTEM, user("hi"))
    first, _, second, _, third = groups(world)
    assert groups(world) == [first, first, second, second, third]
    assert len({first, second, third}) == 3
    row = await listed_group(world, first)
    assert row.n_rollouts == 2
    assert row.deadline - row.opened_at == pytest.approx(60.0)


async def test_a_first_prompt_is_what_is_said_first_and_the_tools(worlds: Any, agents: Any) -> None:
    world = await worlds(groups={**FORMED, "n": 9})
    agent = agents(world)
    hi = {"messages": [SYSTEM, user("hi")]}
    for body in (
        hi,
        {**hi, "temperature": 0.1, "max_tokens": 5, "seed": 3},
        {"messages": [SYSTEM, user("hello")]},
        {"messages": [user("hi")]},
        {**hi, "tools": [TOOL]},
    ):
        status, _ = await agent.post("/v1/chat/completions", {"model": "m", **body})
        assert status == 200
    same, again, *others = groups(world)
    assert same == again
    assert len({same, *others}) == 4


async def test_turns_of_a_conversation_stay_in_its_group(worlds: Any, agents: Any) -> None:
    world = await worlds(groups={**FORMED, "n": 9})
    for name in ("one", "two"):
        world.say(name)
        said = {"role": "assistant", "content": await agents(world).say(user("hi"))}
        await agents(world).say(user("hi"), said, user("and now?"))
    steps = world.stored()
    assert len({s.prompt_uid for s in steps}) == 1
    assert [s.step_index for s in steps] == [0, 1, 0, 1]


async def test_a_group_that_stays_small_is_served_at_its_deadline(worlds: Any, agents: Any) -> None:
    world = await worlds(groups=FORMED)
    agent = agents(world)
    await agent.say(user("hi"))
    await agent.post("/v1/complete_trajectory", {"trajectory_uid": agent.headers[TRAJECTORY]})
    world.port.pass_time(59.0)
    assert await world.pool.lease_batch(8, "train") is None
    world.port.pass_time(2.0)
    lease = await world.pool.lease_batch(8, "train")
    assert [len(g.trajectories) for g in lease.groups] == [1]


async def test_after_its_time_a_first_prompt_begins_another_group(worlds: Any, agents: Any) -> None:
    world = await worlds(groups={**FORMED, "n": 9, "within_s": 0.05})
    await agents(world).say(user("hi"))
    await asyncio.sleep(0.1)
    await agents(world).say(user("hi"))
    assert len(set(groups(world))) == 2


async def test_a_conversation_that_began_elsewhere_is_a_group_of_its_own(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    history = [user("hi"), {"role": "assistant", "content": "said by another"}, user("go on")]
    for _ in range(2):
        await agents(world).say(*history)
    assert len(set(groups(world))) == 2
    assert (await listed_group(world, groups(world)[0])).n_rollouts == 1


async def test_a_call_that_is_refused_takes_no_place_in_a_group(worlds: Any, agents: Any) -> None:
    world = await worlds(family="llama3", tool_parser="hermes", groups=FORMED)
    body = {"model": "m", "messages": [user("hi")], "tools": [TOOL]}
    for parallel, wanted in ((True, 200), (False, 400), (True, 200)):
        asked = {**body, "parallel_tool_calls": parallel}
        status, _ = await agents(world).post("/v1/chat/completions", asked)
        assert status == wanted
    assert len(groups(world)) == 2
    assert len(set(groups(world))) == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_a_first_call_that_fails_takes_no_place_in_a_group(
    worlds: Any, agents: Any, status: int
) -> None:
    world = await worlds(groups=FORMED)
    body = {"model": "m", "messages": [user("hi")], "regex": "a|b"}
    world.engine.script.append(Sampled([], status=status))
    assert (await agents(world).post("/v1/chat/completions", body))[0] != 200
    for _ in range(2):
        assert (await agents(world).post("/v1/chat/completions", body))[0] == 200
    assert len(set(groups(world))) == 1


async def test_a_conversation_whose_first_call_failed_takes_its_place_again_with_a_retry(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    world.engine.script.append(Sampled([], status=500))
    for retry in ("0", "1", "0", "0"):
        body, headers = {"messages": [user("hi")]}, {"x-stainless-retry-count": retry}
        await agents(world).post("/v1/chat/completions", body, **headers)
    first, second, third = groups(world)
    assert first == second != third


async def test_a_declared_group_waits_for_no_conversation_that_ended_without_a_step(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    world.engine.script.append(Sampled([], status=500))
    declared = {"x-prompt-uid": "declared"}
    await agents(world).post("/v1/chat/completions", {"messages": [user("a")]}, **declared)
    await agents(world).say(user("b"), **declared)
    assert await world.gateway.identities.close_idle(time.monotonic() + 1) == 2
    lease = await world.pool.lease_batch(8, "train")
    assert [len(g.trajectories) for g in lease.groups] == [1]


async def test_a_group_waits_for_others_when_a_conversation_of_it_ends_without_a_step(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    world.engine.script.append(Sampled([], status=500))
    await agents(world).post("/v1/chat/completions", {"messages": [user("hi")]})
    await agents(world).say(user("hi"))
    assert await world.gateway.identities.close_idle(time.monotonic() + 1) == 2
    assert await world.pool.lease_batch(8, "train") is None
    await agents(world).say(user("hi"))
    await world.gateway.identities.close_idle(time.monotonic() + 1)
    lease = await world.pool.lease_batch(8, "train")
    assert [len(g.trajectories) for g in lease.groups] == [2]


@pytest.mark.parametrize("form", ["single", "first_prompt", "declared"])
async def test_conversations_that_name_one_group_are_one_whatever_they_say(
    worlds: Any, agents: Any, form: str
) -> None:
    world = await worlds(groups={**FORMED, "form": form})
    for text in ("hi", "hello", "good day"):
        await agents(world).say(user(text), **{"x-prompt-uid": "task%2F1"})
    assert groups(world) == ["task/1"] * 3
    assert len({s.trajectory_uid for s in world.stored()}) == 3
    assert (await listed_group(world, "task/1")).n_rollouts == 2


async def test_a_name_whose_group_was_served_names_another_one(worlds: Any, agents: Any) -> None:
    world = await worlds(groups={**FORMED, "n": 1})
    agent = agents(world)
    for _ in range(2):
        await agent.say(user("hi"), **{"x-prompt-uid": "task"})
        by_name = {"trajectory_uid": agent.headers[TRAJECTORY], "reward": 1.0}
        assert (await agent.post("/v1/complete_trajectory", by_name))[1]["outcome"] == "complete"
        assert await world.pool.lease_batch(8, "train") is not None
    first, second = groups(world)
    assert (first, second.startswith("task~")) == ("task", True)


@pytest.mark.parametrize("ends", ["complete", "hung"])
async def test_trajectories_opened_for_one_prompt_wait_for_each_other(
    world: Any, agents: Any, ends: str
) -> None:
    # Claw-R1's black-box agents (docs/api/gateway.md): each has a base_url of its own, and nobody
    # says how many of a prompt there are.
    agent = agents(world)
    paths = []
    for _ in range(3):
        _, got = await agent.post("/init_trajectory", {"prompt_uid": "1"})
        paths.append(got["base_url"].removeprefix(world.url))
    for under in paths:
        await agent.say(user("What is 2+2?"), under=under)
    for under in paths[:2]:
        assert (await agent.post(f"{under}/v1/complete_trajectory", None))[0] == 200
    assert await world.pool.lease_batch(2, "train") is None
    if ends == "hung":
        world.port.pass_time(60.0)
    else:
        _, got = await agent.post(f"{paths[2]}/v1/complete_trajectory", None)
        assert got["outcome"] == "complete"
    lease = await world.pool.lease_batch(2, "train")
    assert len(lease.groups[0].trajectories) == (2 if ends == "hung" else 3)


async def test_what_nobody_declared_is_answered_and_not_stored_if_so_wanted(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups={"form": "declared"})
    agent = agents(world)
    assert await agent.say(user("hi")) == "fine"
    assert TRAJECTORY not in agent.headers
    assert await agent.say(user("hi"), under="/t1/p1") == "fine"
    assert groups(world) == ["p1"]
    async with agent.session.get(f"{world.url}/statistics") as answer:
        recording = (await answer.json())["recording"]
    assert recording["unrecorded"] == {"undeclared": 1}
    assert recording["unrecorded_share"] == 0.5


async def test_a_service_declares_a_group_and_gets_its_addresses(world: Any, agents: Any) -> None:
    agent = agents(world)
    declared = {"n": 2, "prompt_uid": "task 1", "deadline_s": 9, "metadata": {"level": 3}}
    status, got = await agent.post("/v1/groups", declared)
    assert status == 200
    assert got["prompt_uid"] == "task 1"
    assert len({t["trajectory_uid"] for t in got["trajectories"]}) == 2
    assert await agent.post("/v1/groups", declared) == (200, got), "repeating is harmless"
    for reward, trajectory in enumerate(got["trajectories"]):
        await agent.say(user(f"hi {reward}"), under=trajectory["base_url"].removeprefix(world.url))
        at = f"{trajectory['base_url']}/v1/complete_trajectory"
        assert (await agent.post(at, {"reward": reward}))[0] == 200
    lease = await world.pool.lease_batch(8, "train")
    assert [t.reward for t in lease.groups[0].trajectories] == [0, 1]
    assert lease.groups[0].metadata == {"level": 3}
    await world.pool.ack(lease.lease_id)
    status, got = await agent.post("/v1/groups", declared)
    assert status == 410
    assert "open a new prompt_uid" in got["error"]["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "deadline_s": -1}, "deadline_s"),
        ({"n": 2, "deadline_s": True}, "deadline_s"),
        ({"n": 2, "deadline_s": "9"}, "deadline_s"),
        ({"n": 2, "prompt_uid": ".."}, "prompt_uid"),
        ({"n": 2, "size": 3}, "size"),
    ],
)
async def test_a_malformed_declaration_is_refused_by_name(
    world: Any, agents: Any, body: Any, named: str
) -> None:
    status, got = await agents(world).post("/v1/groups", body)
    assert (status, got["error"]["param"]) == (400, named)


# -- rewards ---------------------------------------------------------------------------------


async def test_an_agent_completes_what_a_replys_header_names(world: Any, agents: Any) -> None:
    agent = agents(world)
    await agent.say(user("hi"))
    done = {"trajectory_uid": agent.headers[TRAJECTORY], "reward": 0.5, "metadata": {"by": "user"}}
    for _ in range(2):
        status, got = await agent.post("/v1/complete_trajectory", done)
        assert (status, got["outcome"]) == (200, "complete")
    [trajectory] = (await world.pool.lease_batch(1, "train")).groups[0].trajectories
    assert trajectory.reward == 0.5
    assert trajectory.metadata["by"] == "user"
    await agent.say(user("hi"))
    assert agent.headers[TRAJECTORY] != done["trajectory_uid"]


async def test_a_reward_may_come_before_completion_or_after_but_not_after_the_lease(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    await agent.say(user("hi"), under="/caf%C3%A9/p1")
    uid = agent.headers[TRAJECTORY]
    assert uid == "caf%C3%A9"
    reward = {"trajectory_uid": uid, "reward": 0.25}
    assert await agent.post("/v1/rewards", reward) == (
        200,
        {"trajectory_uid": "café", "outcome": "accepted"},
    )
    await agent.post("/v1/complete_trajectory", {"trajectory_uid": "café"})
    assert (await agent.post("/v1/rewards", {**reward, "reward": 0.75}))[1]["outcome"] == "accepted"
    own = {**reward, "reward": 0.5, "step_index": 0}
    assert (await agent.post("/v1/rewards", own))[1]["outcome"] == "accepted"
    status, refused = await agent.post("/v1/rewards", {**own, "step_index": 1})
    assert (status, refused["error"]["param"]) == (400, "step_index")
    [trajectory] = (await world.pool.lease_batch(1, "train")).groups[0].trajectories
    assert trajectory.reward == 1.25
    late = {"trajectory_uid": "café", "outcome": "late", "accepted": False}
    leased = {**late, "reason": "its group was leased by a trainer before"}
    assert await agent.post("/v1/rewards", reward) == (200, leased)


async def test_an_agent_without_a_path_rewards_its_steps(world: Any, agents: Any) -> None:
    """Claw-R1's way: `/complete_trajectory` by the trajectory's name, here with a reward per
    step."""
    agent = agents(world)
    await agent.say(user("hi"), under="/t/p")
    done = {"trajectory_uid": "t", "step_rewards": [0.5]}
    assert (await agent.post("/v1/complete_trajectory", done))[1]["outcome"] == "complete"
    [trajectory] = (await world.pool.lease_batch(1, "train")).groups[0].trajectories
    assert [s.reward for s in trajectory.steps] == [0.5]


async def test_a_reward_finds_its_trajectory_whatever_channel_it_is_in(
    world: Any, worlds: Any, agents: Any
) -> None:
    agent = agents(world)
    init = {"trajectory_uid": "t1", "channel": "games"}
    _, got = await agent.post("/init_trajectory", init)
    await agent.say(user("hi"), under=got["base_url"].removeprefix(world.url))
    restarted = await worlds(pool=world.pool)
    agent = agents(restarted)
    reward = {"trajectory_uid": "t1", "reward": 1}
    assert (await agent.post("/v1/rewards", reward))[1]["outcome"] == "accepted"
    assert (await agent.post("/v1/complete_trajectory", reward))[1]["outcome"] == "complete"
    [trajectory] = (await world.pool.lease_batch(1, "games")).groups[0].trajectories
    assert trajectory.reward == 1


@pytest.mark.parametrize("path", ["/v1/complete_trajectory", "/v1/rewards"])
async def test_a_trajectory_that_nobody_knows_is_404(world: Any, agents: Any, path: str) -> None:
    status, got = await agents(world).post(path, {"trajectory_uid": "what", "reward": 1})
    assert status == 404
    assert got["error"]["param"] == "trajectory_uid"


# -- channels --------------------------------------------------------------------------------

ADMIN, SUPPORT, OTHER = (
    "an-admin-key-of-32-characters-00",
    "support-key-of-this",
    "other-key-of-this",
)
KEYS: Any = {
    "admin_keys": [ADMIN],
    "agent_keys": {"support": {"key": SUPPORT, "channel": "support"}, "other": {"key": OTHER}},
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def channels(world: Any) -> list[str]:
    return [channel for _, channel in world.port.steps]


async def test_a_key_has_a_channel_of_its_own(worlds: Any, agents: Any) -> None:
    world = await worlds(**KEYS)
    agent = agents(world)
    await agent.say(user("hi"), **bearer(SUPPORT))
    await agent.say(user("hi"), **bearer(OTHER))
    await agent.say(user("hi"), under="/t1/p1", **bearer(SUPPORT))
    await agent.say(user("hi"), **bearer(SUPPORT), **{"x-session-id": "s1"})
    _, got = await agent.post("/v1/groups", {"n": 1}, **bearer(SUPPORT))
    [opened] = got["trajectories"]
    await agent.say(user("hi"), **bearer(opened["api_key"]))
    assert channels(world) == ["support", "train", "support", "support", "support"]
    status, got = await agent.post("/v1/groups", {"n": 1, "channel": "train"}, **bearer(SUPPORT))
    assert status == 403
    assert "this API key is for channel 'support'" in got["error"]["message"]
    register = {"channel": "train"}
    status, _ = await agent.post("/t2/p2/v1/register_trajectory", register, **bearer(SUPPORT))
    assert status == 403


async def test_sessions_of_two_channels_may_have_one_name(worlds: Any, agents: Any) -> None:
    world = await worlds(**KEYS)
    agent = agents(world)
    for key in (SUPPORT, OTHER, SUPPORT):
        await agent.say(user("hi"), **bearer(key), **{"x-session-id": "1"})
    assert channels(world) == ["support", "train", "support"]
    first, second, third = (step.trajectory_uid for step in world.stored())
    assert first == third != second


async def test_first_prompts_of_two_channels_form_no_group_together(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED, **KEYS)
    for key in (SUPPORT, OTHER, SUPPORT):
        await agents(world).say(user("hi"), **bearer(key))
    first, second, third = groups(world)
    assert first == third != second


async def test_a_trajectorys_key_closes_and_scores_no_other_one(worlds: Any, agents: Any) -> None:
    world = await worlds(**KEYS)
    agent = agents(world)
    _, got = await agent.post("/v1/groups", {"n": 2}, **bearer(OTHER))
    mine, other = got["trajectories"]
    for path in ("/v1/complete_trajectory", "/v1/rewards"):
        body = {"trajectory_uid": other["trajectory_uid"], "reward": 1}
        assert (await agent.post(path, body, **bearer(mine["api_key"])))[0] == 403
    assert (await agent.post("/v1/groups", {"n": 1}, **bearer(mine["api_key"])))[0] == 403


async def test_a_share_of_the_groups_is_held_out_whole(worlds: Any, agents: Any) -> None:
    world = await worlds(groups=FORMED, holdout=0.5)
    agent = agents(world)
    for i in range(24):
        await agent.say(user(f"hi {i // 2}"))
    by_group: dict[str, set[str]] = {}
    for step, channel in world.port.steps:
        by_group.setdefault(step.prompt_uid, set()).add(channel)
    assert len(by_group) == 12
    assert all(len(each) == 1 for each in by_group.values())
    assert {channel for each in by_group.values() for channel in each} == {"train", "val"}


async def test_who_chose_a_channel_gets_it_whatever_is_held_out(worlds: Any, agents: Any) -> None:
    world = await worlds(holdout=0.99)
    agent = agents(world)
    for i in range(4):
        opening = {"trajectory_uid": f"t{i}", "prompt_uid": f"p{i}", "channel": "train"}
        await agent.post("/init_trajectory", opening)
        await agent.say(user("hi"), under=f"/t{i}/p{i}")
    assert set(channels(world)) == {"train"}


async def test_two_channels_may_name_their_groups_alike(worlds: Any, agents: Any) -> None:
    world = await worlds(groups={**FORMED, "n": 1}, **KEYS)
    agent = agents(world)
    for _ in range(3):
        for key in (SUPPORT, OTHER):
            await agent.say(user("hi"), **bearer(key), **{"x-prompt-uid": "p1"})
            done = {"trajectory_uid": agent.headers[TRAJECTORY]}
            await agent.post("/v1/complete_trajectory", done, **bearer(key))
        for channel in ("support", "train"):
            assert await world.pool.lease_batch(1, channel) is not None
    assert channels(world) == ["support", "train"] * 3


@pytest.mark.parametrize("path", ["/v1/complete_trajectory", "/v1/rewards"])
async def test_a_key_with_a_channel_closes_and_scores_nothing_in_another_one(
    worlds: Any, agents: Any, path: str
) -> None:
    world = await worlds(**KEYS)
    agent = agents(world)
    await agent.say(user("hi"), **bearer(OTHER))
    body = {"trajectory_uid": agent.headers[TRAJECTORY], "reward": 1}
    for each in (world, await worlds(pool=world.pool, **KEYS)):  # it is known there, or not
        status, refused = await agents(each).post(path, body, **bearer(SUPPORT))
        assert (status, "has another owner" in str(refused)) == (403, True)
    assert (await agent.post(path, body, **bearer(OTHER)))[0] == 200


async def test_a_trajectorys_key_scores_it_by_the_name_that_the_header_says(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(**KEYS)
    agent = agents(world)
    _, got = await agent.post("/init_trajectory", {"trajectory_uid": "café"}, **bearer(ADMIN))
    await agent.say(user("hi"), **bearer(got["api_key"]))
    reward = {"trajectory_uid": agent.headers[TRAJECTORY], "reward": 1}
    status, got = await agent.post("/v1/rewards", reward, **bearer(got["api_key"]))
    assert (status, got) == (200, {"trajectory_uid": "café", "outcome": "accepted"})


@pytest.mark.parametrize("locked", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("body", [{"reward": 1}, None], ids=["scored", "no body"])
async def test_a_trajectorys_key_completes_it_without_a_path_or_a_name(
    worlds: Any, agents: Any, locked: bool, body: Any
) -> None:
    # Claw-R1 (docs/api/gateway.md) completes under {base_url}/v1; an agent whose base URL takes no
    # path says the same with the key that `/init_trajectory` gave.
    world = await worlds(**(KEYS if locked else {}))
    agent = agents(world)
    _, opened = await agent.post("/init_trajectory", {"channel": "val"}, **bearer(ADMIN))
    mine = bearer(opened["api_key"])
    await agent.say(user("hi"), **mine)
    for _ in range(2):
        status, got = await agent.post("/v1/complete_trajectory", body, **mine)
        named = opened["trajectory_uid"]
        assert (status, got) == (200, {"trajectory_uid": named, "outcome": "complete"})
    [trajectory] = (await world.pool.lease_batch(1, "val")).groups[0].trajectories
    assert trajectory.reward == (body and body["reward"])


async def test_completing_nothing_by_name_is_refused_by_name(world: Any, agents: Any) -> None:
    status, got = await agents(world).post("/v1/complete_trajectory", {"reward": 1})
    assert (status, got["error"]["param"]) == (400, "trajectory_uid")
    assert "api_key" in got["error"]["message"]


# -- tags --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CALLS)
async def test_what_a_deleted_conversation_is_about_to_say_is_neither_told_nor_kept(
    world: Any, agents: Any, path: str
) -> None:
    agent = agents(world)
    gate = asyncio.Event()
    world.say("unspeakable", gate=gate)
    call = asyncio.create_task(agent.post(f"/v1/{path}", {"model": "m", **CALLS[path]}))
    await world.engine.arrived.wait()
    [trajectory] = world.gateway.trajectories
    await trajectory.open()
    async with agent.session.delete(f"{world.url}/v1/trajectories/{trajectory.uid}") as answer:
        assert (await answer.json())["deleted"] == [trajectory.uid]
    gate.set()
    status, got = await call
    assert status == 410
    assert "unspeakable" not in json.dumps(got)


async def test_what_is_deleted_while_it_is_stored_is_neither_told_nor_kept(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    world.say("unspeakable")
    world.port.door.clear()
    call = asyncio.create_task(
        agent.post("/v1/responses", {"model": "m", "input": "hi", "store": True})
    )
    await world.port.waiting.wait()
    [trajectory] = world.gateway.trajectories
    async with agent.session.delete(f"{world.url}/v1/trajectories/{trajectory.uid}") as answer:
        assert (await answer.json())["deleted"] == [trajectory.uid]
    world.port.door.set()
    status, got = await call
    assert status == 410
    assert "unspeakable" not in json.dumps(got)
    assert not world.gateway.responses.store


async def test_what_is_tagged_as_it_is_opened_is_deleted_by_its_tag(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    await agent.post("/init_trajectory", {"trajectory_uid": "t1", "tags": ["user-7"]})
    await agent.post("/init_trajectory", {"trajectory_uid": "t2"})
    body = {"n": 2, "prompt_uid": "p3", "tags": ["user-7", "beta"]}
    for _ in range(2):
        assert (await agent.post("/v1/groups", body))[0] == 200
    deleted = await world.pool.delete(tag="user-7")
    assert deleted.trajectories == ("t1", "p3-0", "p3-1")
    status, got = await agent.post("/init_trajectory", {"tags": [""]})
    assert (status, got["error"]["param"]) == (400, "tags[0]")


# -- calls that are not recorded -------------------------------------------------------------

SILENT = Tuning(pool_timeout_s=0.3, pool_patience_s=0.2)
SERVES: Any = {"on_pool_failure": "serve_unrecorded", "tuning": Tuning(pool_patience_s=0.2)}


async def recording(agent: Agent) -> Any:
    async with agent.session.get(f"{agent.url}/statistics") as answer:
        return (await answer.json())["recording"]


async def until_settled(agent: Agent) -> None:
    async def is_settled() -> bool:
        return not (await recording(agent))["owed_aborts"]

    await until(is_settled, 10)


@pytest.mark.parametrize("how", ["is_away", "is_silent"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("path", CALLS)
async def test_without_the_pool_an_agent_gets_its_answer_all_the_same(
    worlds: Any, agents: Any, how: str, stream: bool, path: str
) -> None:
    world = await worlds(**SERVES)
    agent = agents(world)
    setattr(world.port, how, True)
    ends = dict(zip(CALLS, ["[DONE]", "[DONE]", "response.completed", "message_stop"], strict=True))
    body = {"model": "m", "stream": stream, **CALLS[path]}
    status, got = await agent.post(f"/v1/{path}", body)
    assert status == 200
    assert not stream or ends[path] in got
    assert stream or "fine" in json.dumps(got)
    assert agent.headers[RECORDED] == "false"
    assert (await recording(agent))["unrecorded"] == {"pool_failure": 1}
    setattr(world.port, how, False)
    await until_settled(agent)
    status, _ = await agent.post(f"/v1/{path}", body)
    assert status == 200
    assert RECORDED not in agent.headers
    [step] = world.stored()
    assert step.trajectory_uid == agent.headers[TRAJECTORY]
    assert (await recording(agent))["unrecorded_share"] == 0.5


@pytest.mark.parametrize("how", ["is_away", "is_silent", "before", "after"])
@pytest.mark.parametrize("under", ["", "/t1/p1"], ids=["conversation", "url"])
async def test_a_trajectory_with_a_hole_is_aborted_and_its_agent_hears_nothing_of_it(
    worlds: Any, agents: Any, how: str, under: str
) -> None:
    world = await worlds(**SERVES)
    agent = agents(world)
    said = [user("hi")]
    for turn in range(4):
        if how in ("before", "after"):
            world.port.failures = [how] if turn == 1 else []
        else:
            setattr(world.port, how, turn == 1)
        reply = await agent.say(*said, under=under)
        said += [{"role": "assistant", "content": reply}, user(f"and {turn}?")]
    uid = agent.headers[TRAJECTORY]
    await until_settled(agent)
    aborts = [op for op in world.port.asked if isinstance(op, AbortTrajectory)]
    assert [op.trajectory_uid for op in aborts] == [uid]
    done = {"trajectory_uid": uid, "reward": 1}
    _, got = await agent.post("/v1/complete_trajectory", done)
    reason = "no step of it is stored: it made no call, or its calls were not recorded"
    answer = {"trajectory_uid": uid, "outcome": "aborted", "recorded": False}
    assert got == {**answer, "accepted": False, "reason": reason}
    assert agent.headers[RECORDED] == "false"
    assert await world.pool.lease_batch(1, "train") is None
    assert (await recording(agent))["unrecorded"] == {"pool_failure": 3}
    # Each turn went on from what was said before, token for token.
    sent = [r["input_ids"] for r in world.engine.requests]
    for before, after in itertools.pairwise(sent):
        assert after[: len(before)] == before
    await agent.say(user("something new"))
    assert world.stored()[-1].trajectory_uid == agent.headers[TRAJECTORY] != uid


async def test_what_waited_behind_a_lost_commit_is_not_stored_either(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(on_pool_failure="serve_unrecorded", tuning=Tuning(pool_patience_s=0.5))
    agent = agents(world)
    await agent.say(user("hi"), under="/t1/p1")
    world.port.door.clear()
    lost = asyncio.create_task(agent.say(user("one"), under="/t1/p1"))
    await world.port.waiting.wait()
    await asyncio.sleep(0.25)
    behind = asyncio.create_task(agent.say(user("two"), under="/t1/p1"))
    await lost
    world.port.door.set()
    await behind
    assert (await recording(agent))["unrecorded"] == {"pool_failure": 2}
    assert len(world.stored()) == 1


@pytest.mark.parametrize("how", ["is_away", "is_silent"])
async def test_an_idle_trajectory_is_not_given_up_because_the_pool_is_away_as_it_is_asked_about(
    worlds: Any, agents: Any, how: str
) -> None:
    world = await worlds(on_pool_failure="serve_unrecorded", queue_timeout_s=0.1, tuning=SILENT)
    agent = agents(world)
    await agent.say(user("hi"), under="/t1/p1")
    setattr(world.port, how, True)
    await world.gateway.identities.close_idle(time.monotonic() + 1)
    setattr(world.port, how, False)
    await agent.say(user("and now?"), under="/t1/p1")
    assert len(world.stored("t1")) == 2
    assert (await recording(agent))["owed_aborts"] == 0


async def test_a_pool_that_is_away_is_asked_for_few_of_the_aborts_it_is_owed_at_once(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(**SERVES)
    agent = agents(world)
    abort, n_asked, gate = world.pool.abort_trajectory, [0, 0], asyncio.Event()

    async def hold(*arguments: Any, **options: Any) -> Any:
        n_asked[0] += 1
        n_asked[1] = max(n_asked)
        try:
            await gate.wait()
            return await abort(*arguments, **options)
        finally:
            n_asked[0] -= 1

    world.pool.abort_trajectory = hold
    world.port.is_away = True
    await asyncio.gather(*(agent.say(user(f"hi {i}")) for i in range(3 * ABORTS_AT_ONCE)))
    assert (await recording(agent))["owed_aborts"] == 3 * ABORTS_AT_ONCE
    world.port.is_away = False
    gate.set()
    await until_settled(agent)
    assert n_asked == [0, ABORTS_AT_ONCE]
    await agent.say(user("hi again"))
    assert len(world.stored()) == 1


async def test_by_default_a_pool_that_is_away_refuses(worlds: Any, agents: Any) -> None:
    world = await worlds()
    world.port.is_away = True
    status, got = await agents(world).post("/v1/chat/completions", {"messages": [user("hi")]})
    assert (status, got["error"]["code"]) == (503, "pool_unavailable")


async def test_a_full_channel_delays_no_agent(worlds: Any, agents: Any) -> None:
    full = ChannelConfig(max_queue_size=1, overflow="block")
    world = await worlds(pool_config=PoolConfig(default=full), **SERVES)
    agent = agents(world)
    for _ in range(3):
        assert await agent.say(user("hi")) == "fine"
        await agent.post("/v1/complete_trajectory", {"trajectory_uid": agent.headers[TRAJECTORY]})
    assert len(world.stored()) == 1
    assert (await recording(agent))["unrecorded"] == {"pool_failure": 2}
    assert await world.pool.lease_batch(1, "train") is not None
    await agent.say(user("hi"))
    assert len(world.stored()) == 2


async def test_a_full_channel_that_says_so_in_time_is_no_pool_that_is_away(
    worlds: Any, agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    full = ChannelConfig(max_queue_size=1, overflow="block")
    config = PoolConfig(default=full)
    world = await worlds(
        pool_config=config, on_pool_failure="serve_unrecorded", queue_timeout_s=0.05
    )
    agent = agents(world)
    for _ in range(2):
        assert await agent.say(user("hi")) == "fine"
        await agent.post("/v1/complete_trajectory", {"trajectory_uid": agent.headers[TRAJECTORY]})
    assert (await recording(agent))["unrecorded"] == {"pool_failure": 1}
    assert not any(isinstance(op, AbortTrajectory) for op in world.port.asked)
    assert "max_queue_size" in caplog.text


async def test_a_conversation_whose_group_was_served_is_answered_and_goes_on_in_another(
    worlds: Any, agents: Any
) -> None:
    world = await worlds(groups=FORMED)
    agent, other = agents(world), agents(world)
    world.say("what my agent hears")
    said = [user("hi"), {"role": "assistant", "content": await agent.say(user("hi"))}]
    first = agent.headers[TRAJECTORY]
    await other.say(user("hi"))
    await other.post("/v1/complete_trajectory", {"trajectory_uid": other.headers[TRAJECTORY]})
    world.port.pass_time(61.0)
    assert await world.pool.lease_batch(8, "train") is not None
    for turn in range(2):
        said += [user(f"and {turn}?")]
        said += [{"role": "assistant", "content": await agent.say(*said)}]
        assert agent.headers.get(RECORDED) == ("false" if turn == 0 else None)
    assert (await recording(agent))["unrecorded"] == {"closed": 1}
    assert world.stored()[-1].trajectory_uid == agent.headers[TRAJECTORY] != first


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("under", ["", "/t1/p1"], ids=["conversation", "url"])
async def test_a_call_that_is_not_to_be_recorded_leaves_nothing(
    world: Any, agents: Any, path: str, under: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    agent = agents(world)
    secret = json.loads(json.dumps(CALLS[path]).replace('"hi"', '"unspeakable"'))
    for stream in (False, True):
        body = {"model": "m", "stream": stream, **secret}
        status, got = await agent.post(f"{under}/v1/{path}", body, **{"x-stepwell-record": "false"})
        assert status == 200
        assert VERSION in agent.headers
        assert TRAJECTORY not in agent.headers
        assert agent.headers[RECORDED] == "false"
    assert "unspeakable" in world.tokenizer.decode(world.engine.requests[0]["input_ids"])
    assert world.stored() == []
    counts = await world.pool.get_statistics("train")
    assert (counts["groups"]["submitted"], counts["trajectories"]["submitted"]) == (0, 0)
    assert len(world.gateway.trajectories) == 0
    assert "unspeakable" not in caplog.text
    assert (await recording(agent))["unrecorded"] == {"asked": 2}
    if path == "responses":
        response_id = json.loads(got.split("data: ")[-1].split("\n")[0])["response"]["id"]
        async with agent.session.get(f"{world.url}/v1/responses/{response_id}") as answer:
            assert answer.status in (400, 404)


async def test_a_conversation_goes_on_exactly_around_a_call_that_is_not_recorded(
    world: Any, agents: Any
) -> None:
    agent = agents(world)
    said = [user("hi")]
    for turn in range(3):
        headers = {"x-stepwell-record": "false"} if turn == 1 else {}
        world.say(f"reply {turn}")
        reply = await agent.say(*said, **headers)
        said += [{"role": "assistant", "content": reply}, user(f"and {turn}?")]
    first, last = world.stored()
    assert (last.trajectory_uid, last.parent_index) == (first.trajectory_uid, 0)
    world.check_exact()


async def test_a_header_that_says_neither_is_refused(world: Any, agents: Any) -> None:
    body = {"messages": [user("hi")]}
    status, got = await agents(world).post(
        "/v1/chat/completions", body, **{"x-stepwell-record": "maybe"}
    )
    assert (status, got["error"]["param"]) == (400, "x-stepwell-record")


async def test_statistics_tell_the_latency_that_the_gateway_adds(world: Any, agents: Any) -> None:
    agent = agents(world)
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    calls = asyncio.create_task(agent.say(user("hi")))
    await world.engine.arrived.wait()
    await asyncio.sleep(1.0)  # longer than a busy machine takes for the rest
    gate.set()
    await calls
    async with agent.session.get(f"{world.url}/statistics") as answer:
        added = (await answer.json())["added_latency"]
    assert added["calls"] == 1
    assert 0 < added["p50_ms"] == added["p99_ms"] < 1000, "the engine's time is not the gateway's"
