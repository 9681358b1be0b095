"""An OpenEnv server is an agent: each reply has the reward of its step, and a server that fails is
infrastructure. `make test-harness` has the package's own server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.config.environment import OpenEnvConfig
from stepwell.trainer.environments.openenv import OpenEnvAgent
from stepwell.trainer.errors import HarnessError, InfrastructureError
from stepwell.trainer.rollout.agents import load_agent
from tests.gateway.conftest import World, one_thread, worlds

__all__ = ["one_thread", "worlds"]

TASK = {"instance_id": "t", "question": "Guess.", "metadata": {"reset": {"seed": 4}}}


class Server:
    """A game in OpenEnv's messages: the word of the seed, in two guesses."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self.scores = True
        self.first = "two guesses"
        self.fails: dict[str, str] = {}
        """Code of the error that answers a message, by its type."""

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        left = 2
        async for message in socket:
            asked = message.json()
            self.asked.append(asked)
            if (code := self.fails.get(asked["type"])) is not None:
                await socket.send_json({"type": "error", "data": {"message": "no", "code": code}})
                continue
            if asked["type"] == "reset":
                answer = {"observation": {"text": self.first}, "reward": None, "done": False}
            elif "guess" not in asked["data"]:
                data = {"message": "guess is missing", "code": "VALIDATION_ERROR"}
                await socket.send_json({"type": "error", "data": data})
                continue
            else:
                left -= 1
                right = asked["data"]["guess"] == "four"
                text = "right" if right else f"{left} left"
                done = right or not left
                answer = {"observation": {"text": text}, "done": done}
                answer["reward"] = float(right) if self.scores else None
            await socket.send_json({"type": "observation", "data": answer})
        return socket


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/ws", made.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_each_reply_has_the_reward_of_its_step(
    server: Server, worlds: Callable[..., Any]
) -> None:
    world: World = await worlds()
    for text in ("three", "four"):
        world.say(text)
    agent = OpenEnvAgent(
        OpenEnvConfig(url=server.url, action_key="guess", observation_key="text", reset={"n": 1})
    )
    assert await agent(TASK, world.base_url(), "none") == [0.0, 1.0]
    assert server.asked[0] == {"type": "reset", "data": {"n": 1, "seed": 4}}
    assert server.asked[1] == {"type": "step", "data": {"guess": "three"}}
    world.check_exact()
    first, second = world.stored()
    assert second.parent_index == 0
    assert "Guess.\n\ntwo guesses" in world.tokenizer.decode(first.prompt_ids.tolist())
    assert "1 left" in world.tokenizer.decode(second.prompt_ids.tolist())


async def test_the_policy_is_told_first_what_its_operator_says(
    server: Server, worlds: Callable[..., Any]
) -> None:
    world: World = await worlds()
    world.say("four")
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, action_key="guess", system="Play well."))
    assert await agent(TASK, world.base_url(), "none") == [1.0]
    (first,) = world.stored()
    prompt = world.tokenizer.decode(first.prompt_ids.tolist())
    assert prompt.index("Play well.") < prompt.index("Guess.")


async def test_an_action_that_is_none_is_told_to_the_policy(
    server: Server, worlds: Callable[..., Any]
) -> None:
    world: World = await worlds()
    for text in ("four", '{"gess": "four"}', '{"guess": "four"}'):
        world.say(text)
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, max_turns=3))
    assert await agent(TASK, world.base_url(), "none") == [0.0, 0.0, 1.0]
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert "error: reply with a JSON object alone" in last
    assert "error: guess is missing (VALIDATION_ERROR)" in last


@pytest.mark.parametrize("action", ["[" * 3000, '["four"]'], ids=["brackets", "a list"])
async def test_an_action_of_brackets_is_told_to_the_policy_too(
    server: Server, worlds: Callable[..., Any], action: str
) -> None:
    world: World = await worlds()
    for text in (action, '{"guess": "four"}'):
        world.say(text)
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, max_turns=3))
    assert await agent(TASK, world.base_url(), "none") == [0.0, 1.0]


async def test_an_observation_with_half_a_character_is_shown_to_the_policy(
    server: Server, worlds: Callable[..., Any]
) -> None:
    world: World = await worlds()
    world.say("four")
    server.first = "two \ud83d guesses"
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, action_key="guess", observation_key="text"))
    assert await agent(TASK, world.base_url(), "none") == [1.0]
    (first,) = world.stored()
    assert "two ? guesses" in world.tokenizer.decode(first.prompt_ids.tolist())


async def test_a_policy_whose_every_action_is_refused_earns_nothing_and_is_scored(
    server: Server, worlds: Callable[..., Any]
) -> None:
    """Lost instead, its group would learn from those alone that did act."""
    world: World = await worlds()
    for text in ("four", '{"gess": "four"}'):
        world.say(text)
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, max_turns=2))
    assert await agent(TASK, world.base_url(), "none") == [0.0, 0.0]


@pytest.mark.parametrize(("max_turns", "rewards"), [(2, None), (1, [0.0])])
async def test_an_episode_that_ends_without_any_reward_is_not_scored(
    server: Server, worlds: Callable[..., Any], max_turns: int, rewards: list[float] | None
) -> None:
    """One that used up its turns did not get there: it has earned nothing."""
    world: World = await worlds()
    server.scores = False
    for text in ("three", "four"):
        world.say(text)
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, action_key="guess", max_turns=max_turns))
    assert await agent(TASK, world.base_url(), "none") == rewards


@pytest.mark.parametrize(
    ("message", "code", "error", "said"),
    [
        ("reset", "VALIDATION_ERROR", InfrastructureError, "refuses reset: no"),
        ("step", "EXECUTION_ERROR", HarnessError, r"no \(EXECUTION_ERROR\)"),
        ("step", "SESSION_ERROR", InfrastructureError, r"no \(SESSION_ERROR\)"),
    ],
)
async def test_an_error_that_is_not_the_actions_is_not_the_policys(
    server: Server,
    worlds: Callable[..., Any],
    message: str,
    code: str,
    error: type[Exception],
    said: str,
) -> None:
    world: World = await worlds()
    world.say("four")
    server.fails[message] = code
    agent = OpenEnvAgent(OpenEnvConfig(url=server.url, action_key="guess"))
    with pytest.raises(error, match=said):
        await agent(TASK, world.base_url(), "none")


async def test_a_server_that_is_not_there_is_infrastructure() -> None:
    agent = OpenEnvAgent(OpenEnvConfig(url="http://127.0.0.1:1"))
    with pytest.raises(InfrastructureError, match=r"http://127\.0\.0\.1:1: ClientConnector"):
        await agent(TASK, "http://127.0.0.1:9/u/p", "none")


def test_an_address_alone_is_the_section() -> None:
    config = RolloutConfig.model_validate({"environment": "http://localhost:8000"})
    assert config.agent == "environment"
    assert isinstance(load_agent("environment", environment=config.environment), OpenEnvAgent)
    with pytest.raises(ValidationError, match="agent is 'a:b', but environment is given, too"):
        RolloutConfig.model_validate({"environment": "http://localhost:8000", "agent": "a:b"})
    with pytest.raises(ValidationError, match="agent is 'environment', but environment is missing"):
        RolloutConfig(agent="environment")
