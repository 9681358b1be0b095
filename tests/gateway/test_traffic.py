"""Agents that nobody wrote for training: what a reply says of itself, groups, rewards."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

VERSION, TRAJECTORY = "x-stepwell-version", "x-stepwell-trajectory"


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
        """Of the last answer."""

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
    [step] = world.pool.stored()
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
    assert world.pool.stored()[0].policy_version == 7


async def test_a_trajectory_is_named_as_urls_name_it(world: Any, agents: Any) -> None:
    agent = agents(world)
    await agent.say(user("hi"), **{"x-trajectory-uid": "caf%C3%A9%2F1"})
    assert world.pool.stored()[0].trajectory_uid == "café/1"
    assert agent.headers[TRAJECTORY] == "caf%C3%A9%2F1"
