"""Agent and reward without a model: `pip install pytest && python -m pytest`."""

import asyncio

import pytest
from agent import agent
from aiohttp import web
from aiohttp.test_utils import TestServer
from reward import score


@pytest.mark.parametrize(
    ("reply", "reward"), [("150", 1.0), ("99", 0.0), ("About 150.", 0.0), ("", 0.0)]
)
def test_only_a_number_within_the_bounds_is_rewarded(reply, reward):
    assert score("tasks", reply, [100, 200], {}) == reward


def test_the_agent_asks_the_tasks_question():
    asked = []

    async def model(request):
        asked.append(await request.json())
        message = {"role": "assistant", "content": "150"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response({"object": "chat.completion", "choices": [choice]})

    async def rollout():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", model)
        async with TestServer(app) as server:
            return await agent({"question": "Which?"}, str(server.make_url("")), "key")

    assert asyncio.run(rollout()) is None  # the reward is reward.py's
    assert asked[0]["messages"] == [{"role": "user", "content": "Which?"}]
