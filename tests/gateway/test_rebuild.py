"""A trajectory goes on at another gateway (a replica, or the same one after a restart) as if it had
never moved: same branch, same retries, same channel."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from pydantic import ValidationError

from stepwell.config.load import load_config
from stepwell.datapool.files.copies import ROLLOUTS
from stepwell.datapool.files.export import read, write
from stepwell.datapool.ops import AppendStep, Delete, ResumeTrajectory
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import DUPLICATE_OF, Step, superseded
from stepwell.gateway.access import OPERATOR
from stepwell.gateway.app import create_app
from stepwell.gateway.config import ChannelSampling, GatewayConfig, Wiring
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.replicas import Replicas
from stepwell.gateway.tokens.graph import Turn, TurnGraph
from stepwell.gateway.trajectory.calls import NOTE, RetryKey, TurnNote, read_note, restore
from stepwell.run import deletion
from stepwell.run.deletion import _forget
from stepwell.run.folder import GatewayPart
from stepwell.run.folder import begin as begin_run
from tests.builders import until
from tests.gateway.conftest import World, serving
from tests.gateway.raw import Raw
from tests.helpers import reserved_port

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Fleet:
    """Gateways over one pool and one engine, begun one after the other."""

    world: World
    stack: AsyncExitStack
    options: dict[str, Any]

    async def another(self, port: int = 0, **wiring: Any) -> World:
        config = GatewayConfig(port=port, **self.options)
        wired = Wiring((self.world.engine.url,), **wiring)
        app = create_app(config, wired, self.world.pool, self.world.tokenizer)
        url = await self.stack.enter_async_context(serving(app, port=port))
        return replace(self.world, url=url, app=app)

    @property
    def pool(self) -> DataPoolClient:
        return self.world.pool


@pytest.fixture
async def fleets(worlds: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def make(family: str = "chatml", **options: Any) -> Fleet:
            return Fleet(await worlds(family=family, **options), stack, options)

        yield make


@pytest.fixture
async def fleet(fleets: Callable[..., Any]) -> Fleet:
    made: Fleet = await fleets()
    return made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    """One call; the conversation with its reply is left in `messages`."""
    reply = await client.chat.completions.create(model="m", messages=messages, **options)
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    return reply


def check_one_branch(steps: list[Step]) -> None:
    assert [s.step_index for s in steps] == list(range(len(steps)))
    assert [s.parent_index for s in steps] == [None, *range(len(steps) - 1)]


def turns(graph: TurnGraph) -> dict[bytes, Any]:
    """Content of a graph, by key, in values that compare."""

    def shown(turn: Turn) -> Any:
        return (
            turn.parent.step_index if turn.parent is not None else None,
            turn.new_prompt_ids.tolist(),
            turn.response_ids.tolist(),
            turn.n_tokens,
            turn.calls,
            turn.has_reasoning,
            turn.step_index,
        )

    return {
        **{key: shown(turn) for key, turn in graph._by_key.items()},
        b"prompts": sorted(graph._prompts),
        b"roots": sorted(graph._roots),
        b"lengths": sorted(graph._lengths),
    }


# -- a conversation goes on ------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "no_tools"])
async def test_a_conversation_that_moves_before_every_turn_is_one_branch(
    fleets: Callable[..., Any], family: str
) -> None:
    fleet = await fleets(family)
    with_tools = {"tools": TOOLS} if family in ("chatml", "qwen3") else {}
    messages: list[Any] = [{"role": "system", "content": "be exact"}, user("1 + 2?")]
    for turn in range(4):
        here = await fleet.another()
        if with_tools and turn == 0:
            here.say(CALL)
        reply = await ask(await here.client(), messages, **with_tools)
        if calls := reply.choices[0].message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "3"})
        else:
            messages.append(user(f"and {turn}?"))
    check_one_branch(fleet.world.stored("t1"))
    fleet.world.check_exact()
    assert not any("branch" in s.metadata for s in fleet.world.stored())


async def test_a_truncated_turn_and_one_with_a_thought_are_extended_elsewhere(
    fleets: Callable[..., Any],
) -> None:
    fleet = await fleets("qwen3")
    messages: list[Any] = [user("hi")]
    here = await fleet.another()
    here.say("<think>\nhm\n</think>\n\nwell")
    await ask(await here.client(), messages)
    messages.append(user("go on"))
    here = await fleet.another()
    here.say("this is cut", close=False, finish="length")
    await ask(await here.client(), messages, max_tokens=100)
    messages.append(user("and then"))
    await ask(await (await fleet.another()).client(), messages)
    check_one_branch(fleet.world.stored("t1"))
    fleet.world.check_exact()


async def test_the_rebuilt_graph_is_the_one_that_made_the_steps(
    fleets: Callable[..., Any],
) -> None:
    fleet = await fleets("qwen3")
    client = await fleet.world.client()
    say = fleet.world.say
    main: list[Any] = [user("hi")]
    say(CALL)
    await ask(client, main, tools=TOOLS)
    say("<think>\nso\n</think>\n\n" + CALL + "\n" + CALL)
    main.append({"role": "tool", "tool_call_id": main[-1]["tool_calls"][0]["id"], "content": "3"})
    fork = list(main)
    await ask(client, main, tools=TOOLS)
    await ask(client, fork, tools=TOOLS)  # the same prompt again
    await ask(client, [user("a title, please")])
    await ask(client, [*fork[:-1], user("edited")])
    say('{"expression": "2"}}\n</tool_call>')
    await begin(fleet.world, ChatRequest([user("now")], tools=TOOLS, forced_tool=""))
    for prompt in ("Once upon", "Once upona time<|im_end|> there"):
        say("a time")
        await begin(fleet.world, ChatRequest([], prompt_text=prompt))
    assert fleet.world.stored()[-1].parent_index == 6
    made = fleet.world.gateway.trajectories.known("t1").graph
    rebuilt = TurnGraph()
    resumed = await fleet.pool.resume_trajectory("t1", "p1")
    finished = restore(rebuilt, resumed.steps)
    assert turns(rebuilt) == turns(made)
    assert len(finished) == len(fleet.world.stored("t1")) == 8
    assert [call.delivered for call in finished] == [i in (0, 6) for i in range(8)]


async def test_steps_of_a_white_box_agent_are_only_counted(fleet: Fleet) -> None:
    step = {"prompt_ids": [5, 6], "response_ids": [7], "trajectory_uid": "t1", "prompt_uid": "p1"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{fleet.world.url}/submit_steps", json={"steps": [step]}) as response,
    ):
        assert response.status == 200
    await ask(await (await fleet.another()).client(), [user("hi")])
    assert [s.step_index for s in fleet.world.stored("t1")] == [0, 1]
    assert fleet.world.stored("t1")[1].parent_index is None


async def test_a_gateway_catches_up_with_what_another_one_stored_meanwhile(
    fleets: Callable[..., Any],
) -> None:
    fleet = await fleets(replicas=2)
    a, b = await fleet.another(), await fleet.another()
    messages: list[Any] = [user("hi")]
    for here in (a, b, b, a, b):
        await ask(await here.client(), messages)
        messages.append(user("more"))
    check_one_branch(fleet.world.stored("t1"))
    fleet.world.check_exact()


async def test_steps_of_two_gateways_at_once_get_their_own_indices_and_both_know_them(
    fleet: Fleet,
) -> None:
    a, b = await fleet.another(), await fleet.another()
    messages: list[Any] = [user("hi")]
    await ask(await a.client(), messages)
    messages.append(user("more"))
    at_a, at_b = list(messages), list(messages)
    gate = asyncio.Event()
    a.say("slow", gate=gate)
    a.engine.arrived.clear()
    slow = asyncio.create_task(ask(await a.client(), at_a))
    await a.engine.arrived.wait()
    for _ in range(2):
        await ask(await b.client(), at_b)
        at_b.append(user("again"))
    gate.set()
    await slow
    steps = fleet.world.stored("t1")
    assert [(s.step_index, s.parent_index) for s in steps] == [(0, None), (1, 0), (2, 1), (3, 0)]
    # `a` met the conflict: it read what `b` had stored, and goes on from there.
    graph = a.gateway.trajectories.known("t1").graph
    assert graph.steps.keys() == {0, 1, 2, 3}
    await ask(await a.client(), at_b)
    assert fleet.world.stored("t1")[4].parent_index == 2
    fleet.world.check_exact()


async def test_what_another_gateway_stored_comes_with_the_answer_to_a_commit(fleet: Fleet) -> None:
    a, b = await fleet.another(), await fleet.another()
    messages: list[Any] = [user("hi")]
    await ask(await a.client(), messages)
    messages.append(user("more"))
    at_a, at_b = list(messages), list(messages)
    await ask(await b.client(), at_b)
    at_b.append(user("again"))
    await ask(await b.client(), at_b)
    fleet.world.port.asked.clear()
    await ask(await a.client(), at_a)
    # Index 1 is taken: the answer brings Steps 1 and 2, and 3 is offered.
    assert [type(op) for op in fleet.world.port.asked] == [AppendStep, AppendStep]
    assert [s.parent_index for s in fleet.world.stored("t1")] == [None, 0, 1, 0]
    at_a.append(user("and"))
    await ask(await a.client(), at_a)
    assert fleet.world.stored("t1")[-1].parent_index == 3
    # What was read is the base of what extends it: it travels no second time.
    await ask(await a.client(), at_b)
    assert fleet.world.port.asked[-1].step.header.base == 2
    fleet.world.check_exact()


# -- retries ---------------------------------------------------------------------------------


def shown(reply: Any) -> Any:
    """A reply without what is told of the cache only."""
    whole = reply.model_dump()
    whole["usage"].pop("prompt_tokens_details", None)
    return whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS},
        {"logprobs": True},
        {"stop": ["stop here"]},
    ],
    ids=str,
)
async def test_a_retry_elsewhere_gets_the_recorded_reply(
    fleet: Fleet, options: dict[str, Any]
) -> None:
    messages: Any = [user("hi")]
    fleet.world.say(f"so {CALL}{CALL} it is, stop here")
    client = await fleet.world.client()
    first = await client.chat.completions.create(model="m", messages=messages, **options)
    asked, stored = len(fleet.world.engine.requests), len(fleet.world.stored())
    other = await (await fleet.another()).client()
    for _ in range(2):
        again = await other.chat.completions.create(
            model="m", messages=messages, extra_headers=RETRY, **options
        )
        assert shown(again) == shown(first)
    assert (len(fleet.world.engine.requests), len(fleet.world.stored())) == (asked, stored)


@pytest.mark.parametrize(
    ("options", "n"),
    [({}, 2), ({"forced_tool": "calculator"}, 1), ({"prefill": "I say"}, 1)],
    ids=str,
)
async def test_a_recalled_call_is_the_one_that_was_made(
    fleet: Fleet, options: dict[str, Any], n: int
) -> None:
    rest = '{"expression": "2"}}\n</tool_call>' if "forced_tool" in options else " so"
    for _ in range(n):
        fleet.world.say(rest)
    request = ChatRequest([user("hi")], tools=TOOLS, **options)
    made = await begin(fleet.world, request, n)
    again = await begin(await fleet.another(), request, n, is_retry=True)
    for one, other in zip(made, again, strict=True):
        assert (one.call.uid, one.call.created) == (other.call.uid, other.call.created)
        assert one.call.turn.step_index == other.call.turn.step_index
        assert other.text.message() == one.text.message()
        assert other.finish_reason == one.finish_reason
        assert other.n_prompt == one.n_prompt
    assert len({live.call.uid for live in again}) == n
    assert len(fleet.world.stored()) == len(fleet.world.engine.requests) == n


async def begin(
    world: World, request: ChatRequest, n: int = 1, *, is_retry: bool = False
) -> list[Any]:
    """Calls without a dialect, finished."""
    retry = RetryKey("test/key", "body", is_retry, is_named=True)
    trajectory, calls = world.gateway.trajectories.get("t1", "p1"), world.gateway.calls
    begun = await calls.start([request], [trajectory], retry, "test", n=n, caller=OPERATOR)
    for live in begun:
        live.readers.add("its client")
    return [await calls.result(trajectory, live) for live in begun]


async def test_a_streamed_retry_elsewhere_says_the_same(fleet: Fleet) -> None:
    fleet.world.say("it is " + CALL)
    options: Any = {"model": "m", "messages": [user("hi")], "tools": TOOLS, "stream": True}

    async def read_all(world: World, **more: Any) -> tuple[str, list[str], str]:
        client = await world.client()
        text, calls, chunk = "", [], None
        async for chunk in await client.chat.completions.create(**options, **more):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or ():
                calls.append(call.model_dump_json())
        return text, calls, chunk.id if chunk is not None else ""

    first = await read_all(fleet.world)
    assert await read_all(await fleet.another(), extra_headers=RETRY) == first
    assert len(fleet.world.stored()) == 1


BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [user("hi")]},
    "completions": {"prompt": "hi", "max_tokens": 9},
    "responses": {"input": "hi"},
    "messages": {"messages": [user("hi")], "max_tokens": 9},
    "models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
}


async def say_again(
    world: World, path: str, body: Any, begun: asyncio.Event | None = None, **headers: str
) -> tuple[str, str]:
    """(id, whole answer) of a call on t1.

    Args:
        begun: set once some of the answer's body is there.
    """
    sent = {"model": "m", **body}
    if ":" in path and sent.pop("stream", False):
        path = path.replace(":generate", ":streamGenerate") + "?alt=sse"
    url = f"{world.base_url()}/v1/{path}"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=sent, headers=headers) as answer,
    ):
        first = await answer.content.readany()
        if begun is not None:
            begun.set()
        text = (first + await answer.read()).decode()
        assert answer.status == 200, text
    found = re.search(r'"(?:id|responseId)": ?"([^"]+)"', text)
    return (found[1] if found else ""), text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mark", [RETRY, {"idempotency-key": "k"}], ids=["count", "key"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_retry_at_a_gateway_that_serves_the_trajectory_too_is_answered_from_the_pool(
    fleets: Callable[..., Any], path: str, mark: dict[str, str], stream: bool
) -> None:
    fleet = await fleets(replicas=2)
    a, b = await fleet.another(), await fleet.another()
    for here in (a, b):
        await ask(await here.client(), [user(f"before {here.url}")])
    body = {**BODIES[path], "stream": stream}
    first_mark = {} if mark is RETRY else mark
    fleet.world.say("the one")
    first = await say_again(a, path, body, **first_mark)
    asked, stored = len(fleet.world.engine.requests), len(fleet.world.stored())
    for _ in range(2):
        again = await say_again(b, path, body, **mark)
        assert again[0] == first[0]
        assert "the one" in again[1].replace('"the', "the") or stream
    assert (len(fleet.world.engine.requests), len(fleet.world.stored())) == (asked, stored)


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
async def test_a_first_try_that_hangs_becomes_the_retry_that_another_gateway_stored(
    fleet: Fleet, known: bool
) -> None:
    a, b = await fleet.another(), await fleet.another()
    if known:
        for here in (a, b):
            await ask(await here.client(), [user(f"before {here.url}")])
    before = len(fleet.world.stored())
    gate = asyncio.Event()
    a.say("the first", gate=gate)
    a.engine.arrived.clear()
    hanging = asyncio.create_task(say_again(a, "chat/completions", BODIES["chat/completions"]))
    await a.engine.arrived.wait()
    b.say("the retry")
    retried = await say_again(b, "chat/completions", BODIES["chat/completions"], **RETRY)
    gate.set()
    assert (await hanging)[0] == retried[0]
    assert "the retry" in (await hanging)[1]
    assert len(fleet.world.stored()) == before + 1
    messages: list[Any] = [user("hi"), {"role": "assistant", "content": "the retry"}, user("on")]
    await ask(await a.client(), messages)
    assert fleet.world.stored()[-1].parent_index == before


async def test_a_retry_becomes_the_first_try_that_was_stored_while_it_was_generated(
    fleet: Fleet,
) -> None:
    a, b = await fleet.another(), await fleet.another()
    for here in (a, b):
        await ask(await here.client(), [user(f"before {here.url}")])
    gates = [asyncio.Event(), asyncio.Event()]
    tries = []
    for here, gate, mark in zip((a, b), gates, ({}, RETRY), strict=True):
        here.say(f"by {here.url}", gate=gate)
        here.engine.arrived.clear()
        body = BODIES["chat/completions"]
        tries.append(asyncio.create_task(say_again(here, "chat/completions", body, **mark)))
        await here.engine.arrived.wait()
    for gate, each in zip(gates, tries, strict=True):
        gate.set()
        await each
    assert tries[0].result()[0] == tries[1].result()[0]
    assert a.url in tries[1].result()[1]
    assert len(fleet.world.stored()) == 3
    # Not a retry, and both have clients: two samples.
    await say_again(b, "chat/completions", BODIES["chat/completions"])
    assert len(fleet.world.stored()) == 4


@pytest.mark.parametrize("goes_on", [None, 0, 1], ids=["never", "first", "later"])
async def test_of_two_streams_with_one_key_at_two_gateways_the_later_is_not_trained(
    fleet: Fleet, goes_on: int | None
) -> None:
    a, b = await fleet.another(), await fleet.another()
    for here in (a, b):
        await ask(await here.client(), [user(f"before {here.url}")])
    gates, texts = [asyncio.Event(), asyncio.Event()], ["says a", "says b"]
    body, tries = {"messages": [user("hi")], "stream": True}, []
    for here, gate, text in zip((a, b), gates, texts, strict=True):
        here.say(text, gate=gate)
        key = {"idempotency-key": "k"}
        begun = asyncio.Event()
        told = say_again(here, "chat/completions", body, begun, **key)
        tries.append(asyncio.create_task(told))
        await begun.wait()  # both have told their client some of it
    for gate, each in zip(gates, tries, strict=True):
        gate.set()
        await each
    first, later = fleet.world.stored()[-2:]
    assert DUPLICATE_OF not in first.metadata
    assert later.metadata[DUPLICATE_OF] == first.step_index == 2
    if goes_on is not None:
        said = [user("hi"), {"role": "assistant", "content": texts[goes_on]}, user("on")]
        await ask(await fleet.world.client(), said)
    steps = fleet.world.stored()
    assert superseded(steps) == {2 if goes_on == 1 else 3}


async def lose(call: Raw, end: bytes) -> None:
    """Break the connection when the answer has come, as one that is lost on its way does."""
    await call.read(end)
    call.reset()


STREAMS = [
    ({"messages": [user("hi")]}, b"}]"),
    ({"messages": [user("hi")], "stream": True}, b"DONE"),
]


@pytest.mark.parametrize(("body", "end"), STREAMS, ids=["whole", "stream"])
async def test_a_repetition_after_a_broken_connection_gets_the_reply_that_was_lost(
    fleet: Fleet, body: Any, end: bytes
) -> None:
    world = await fleet.another()
    world.say("the lost one")
    await lose(await Raw.send(world, **body), end)
    _, told = await say_again(world, "chat/completions", body)
    assert "the lost one" in told.replace('"the', "the") or "lost" in told
    assert len(world.stored()) == 1
    await say_again(world, "chat/completions", body)  # it has arrived: another sample
    assert len(world.stored()) == 2
    assert superseded(world.stored()) == frozenset()


@pytest.mark.parametrize(("body", "end"), STREAMS, ids=["whole", "stream"])
async def test_a_lost_reply_whose_request_came_again_before_it_is_superseded(
    fleet: Fleet, body: Any, end: bytes
) -> None:
    world, gate = await fleet.another(), asyncio.Event()
    world.say("lost", gate=gate)
    world.engine.arrived.clear()
    connection = await Raw.send(world, **body)
    await world.engine.arrived.wait()
    world.say("read")
    await say_again(world, "chat/completions", body)
    gate.set()
    await lose(connection, end)
    read, lost = world.stored()
    assert lost.metadata["branch"] == "resampled"
    assert superseded(world.stored()) == frozenset(), "nothing goes on from its sibling yet"
    said = [user("hi"), {"role": "assistant", "content": "read"}, user("on")]
    await ask(await world.client(), said)
    assert world.stored()[-1].parent_index == read.step_index
    assert superseded(world.stored()) == {lost.step_index}
    # The mark is in the pool: a gateway that begins later goes on with it.
    await ask(await (await fleet.another()).client(), [*said, {"role": "user", "content": "and"}])
    assert superseded(world.stored()) == {lost.step_index}


@pytest.mark.parametrize("n", [1, 3])
async def test_siblings_that_were_all_delivered_are_the_agents_choice(fleet: Fleet, n: int) -> None:
    world = await fleet.another()
    client = await world.client()
    for text in ("one", "two", "three"):
        world.say(text)
    for _ in range(3 // n):
        await client.chat.completions.create(model="m", messages=[user("hi")], n=n)
    said: list[Any] = [user("hi"), {"role": "assistant", "content": "two"}, user("on")]
    await ask(client, said)
    assert len(world.stored()) == 4
    assert superseded(world.stored()) == frozenset()


async def test_a_reply_that_may_not_have_arrived_is_given_once_without_a_retry_mark(
    fleet: Fleet,
) -> None:
    messages: list[Any] = [user("hi")]
    client = await fleet.world.client()
    await ask(client, messages)
    second: list[Any] = [*messages, user("more")]
    fleet.world.say("the second")
    await ask(client, second)
    other = await (await fleet.another()).client()
    assert (await ask(other, second[:-1])).choices[0].message.content == "the second"
    assert len(fleet.world.stored()) == 2
    # The first has been gone on from: it has arrived, so this is another sample.
    await ask(other, messages[:1])
    await ask(other, second[:-1])
    assert len(fleet.world.stored()) == 4


async def test_an_idempotency_key_with_another_body_is_refused_elsewhere_too(fleet: Fleet) -> None:
    key = {"Idempotency-Key": "k"}
    first = await ask(await fleet.world.client(), [user("hi")], extra_headers=key)
    other = await (await fleet.another()).client()
    with pytest.raises(openai.BadRequestError, match="another request body"):
        await ask(other, [user("not that")], extra_headers=key)
    again = await ask(other, [user("hi")], extra_headers=key)
    assert again.id == first.id
    assert len(fleet.world.stored()) == 1


# -- the pool --------------------------------------------------------------------------------


async def post(url: str, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        return response.status, await response.json()


async def test_a_new_trajectory_costs_one_question_to_the_pool_beside_its_steps(
    fleet: Fleet,
) -> None:
    messages: list[Any] = [user("hi")]
    client = await fleet.world.client()
    for _ in range(3):
        await ask(client, messages)
        messages.append(user("more"))
    assert [type(op) for op in fleet.world.port.asked] == [ResumeTrajectory, *[AppendStep] * 3]


async def test_a_trajectory_stays_in_the_channel_that_it_was_opened_in(fleet: Fleet) -> None:
    _, begun = await post(
        f"{fleet.world.url}/init_trajectory",
        trajectory_uid="t1",
        prompt_uid="p1",
        channel="val",
        metadata={"a": 1},
    )
    assert begun["base_url"].endswith("/t1/p1")
    messages: list[Any] = [user("hi")]
    await ask(await fleet.world.client(), messages)
    await ask(await (await fleet.another()).client(), [*messages, user("more")])
    assert [channel for _, channel in fleet.world.port.steps] == ["val", "val"]
    last = await fleet.another()
    url = f"{last.base_url()}/v1/complete_trajectory"
    assert await post(url, reward=1.0) == (200, {"trajectory_uid": "t1", "outcome": "complete"})
    (trajectory,) = (await fleet.pool.list_trajectories("val")).items
    assert (trajectory.state, trajectory.reward, trajectory.n_steps) == ("complete", 1.0, 2)
    assert trajectory.metadata == {"a": 1}
    assert (await fleet.pool.list_trajectories("train")).items == ()


async def test_a_greedy_baseline_is_sampled_at_temperature_0_wherever_it_is_served(
    fleet: Fleet,
) -> None:
    url = f"{fleet.world.url}/init_trajectory"
    metadata = {"greedy_baseline": True}
    await post(url, trajectory_uid="t1", prompt_uid="p1", metadata=metadata)
    await ask(await (await fleet.another()).client(), [user("hi")], temperature=0.5)
    (request,) = fleet.world.engine.requests
    assert request["sampling_params"]["temperature"] == 0.0


async def test_a_trajectory_that_is_complete_takes_no_call_elsewhere(fleet: Fleet) -> None:
    await ask(await fleet.world.client(), [user("hi")])
    await post(f"{fleet.world.base_url()}/v1/complete_trajectory", reward=1.0)
    other = await fleet.another()
    again = await post(f"{other.base_url()}/v1/complete_trajectory", reward=1.0)
    assert again == (200, {"trajectory_uid": "t1", "outcome": "complete"})
    other = await fleet.another()
    with pytest.raises(openai.APIStatusError) as closed:
        await ask(await other.client(), [user("more")])
    assert closed.value.status_code == 410
    assert len(fleet.world.engine.requests) == 1


# -- the first call of a trajectory that another gateway knows ---------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_answered_with_what_another_gateway_recorded_and_nothing_is_sampled(
    fleet: Fleet, stream: bool, n: int
) -> None:
    async def told(world: World, **options: Any) -> list[str]:
        client = await world.client()
        options |= {"model": "m", "messages": [user("hi")], "n": n}
        if not stream:
            reply = await client.chat.completions.create(**options)
            return [c.message.content for c in reply.choices]
        texts = [""] * n
        async for chunk in await client.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return texts

    for i in range(n):
        fleet.world.say(f"said {i}")
    first = await told(fleet.world)
    assert await told(await fleet.another(), extra_headers=RETRY) == first
    assert len(fleet.world.stored()) == len(fleet.world.engine.requests) == n


async def test_a_baseline_that_another_gateway_was_told_of_is_greedy_from_its_first_call(
    fleet: Fleet,
) -> None:
    url = f"{fleet.world.url}/init_trajectory"
    metadata = {"greedy_baseline": True}
    await post(url, trajectory_uid="t1", prompt_uid="p1", metadata=metadata)
    other = await fleet.another()
    fleet.world.say("the likeliest")
    await ask(await other.client(), [user("hi")], temperature=0.5)
    (step,) = fleet.world.stored()
    assert step.metadata["sampling_params"]["temperature"] == 0.0
    assert other.tokenizer.decode(step.response_ids.tolist()).startswith("the likeliest")


async def test_a_trajectory_that_another_gateway_put_into_a_channel_is_sampled_as_that_one(
    fleet: Fleet,
) -> None:
    url = f"{fleet.world.url}/init_trajectory"
    await post(url, trajectory_uid="t1", prompt_uid="p1", channel="val")
    sampling = {"train": ChannelSampling(1.0), "val": ChannelSampling(0.2)}
    other = await fleet.another(sampling=sampling)
    await ask(await other.client(), [user("hi")])
    (step,) = fleet.world.stored()
    assert step.metadata["sampling_params"]["temperature"] == 0.2


async def test_a_first_call_on_a_trajectory_that_is_closed_elsewhere_answers_410(
    fleet: Fleet,
) -> None:
    await ask(await fleet.world.client(), [user("hi")])
    await post(f"{fleet.world.base_url()}/v1/complete_trajectory", reward=1.0)
    other = await fleet.another()
    with pytest.raises(openai.APIStatusError) as closed:
        await ask(await other.client(), [user("another")])
    assert closed.value.status_code == 410
    assert len(fleet.world.stored()) == 1
    assert other.gateway.statistics()["calls"].get("disconnected", 0) == 0


async def test_a_first_call_that_the_pool_did_not_answer_is_made_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(*args: Any, **options: Any) -> Any:
        raise ConnectionError("the line is cut")

    client = await fleet.world.client()
    with monkeypatch.context() as broken:
        broken.setattr(fleet.pool, "resume_trajectory", cut)
        with pytest.raises(openai.InternalServerError, match="did not answer"):
            await ask(client, [user("hi")])
    assert fleet.world.stored() == []
    await ask(client, [user("hi")], extra_headers=RETRY)
    assert len(fleet.world.stored()) == len(fleet.world.engine.requests) == 1


async def test_a_retry_of_a_first_call_goes_on_when_the_pool_answers_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool fails the first of two questions about the trajectory, while both wait."""
    resume = fleet.pool.resume_trajectory
    asked = 0

    async def fails_once(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            began.set()
            await both_wait.wait()
            raise ConnectionError("the line is cut")
        return await resume(*args, **options)

    began, both_wait = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(fleet.pool, "resume_trajectory", fails_once)
    client = await fleet.world.client()
    first = asyncio.create_task(ask(client, [user("hi")]))
    await began.wait()
    again = asyncio.create_task(ask(client, [user("hi")], extra_headers=RETRY))
    (trajectory,) = fleet.world.gateway.trajectories
    await until(lambda: trajectory.users >= 2, 10)
    both_wait.set()
    with pytest.raises(openai.InternalServerError, match="did not answer"):
        await first
    assert (await again).choices[0].message.content == "fine"
    assert len(fleet.world.stored()) == len(fleet.world.engine.requests) == 1


# -- the pool's part ---------------------------------------------------------------------------


async def test_a_pool_finds_a_trajectory_in_the_channel_where_it_is_open() -> None:
    async with DataPoolClient.local() as pool:
        await pool.open_trajectory("t", "p", 1, {"m": 1}, "val")
        step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid="p")
        await pool.submit_step(step, "val")
        found = await pool.resume_trajectory("t", "p", elsewhere=True)
        assert (found.outcome, found.channel, found.is_open) == ("duplicate", "val", True)
        assert found.steps == [replace(step, is_last=True)]
        new = await pool.resume_trajectory("t", "p")
        assert (new.outcome, new.channel, new.steps) == ("accepted", "train", [])
        assert (await pool.resume_trajectory("t", "p", elsewhere=True)).channel == "train"
        await pool.complete_trajectory("t", 0.0, channel="val")
        await pool.abort_trajectory("t", "gone")
        closed = await pool.resume_trajectory("t", "p", elsewhere=True)
        assert (closed.outcome, closed.channel, closed.is_open) == ("late", "train", False)
        complete = await pool.resume_trajectory("t", "p", channel="val")
        assert (complete.outcome, complete.is_open, complete.steps) == ("duplicate", False, [])


# -- the note --------------------------------------------------------------------------------


def noted(text: Any) -> Step:
    return Step(
        prompt_ids=[1],
        response_ids=[2],
        trajectory_uid="t",
        prompt_uid="p",
        metadata={NOTE: text, "call_id": "c"},
    )


_key = st.binary(min_size=16, max_size=16)
_digest = st.binary(min_size=8, max_size=8)
_notes = st.builds(
    TurnNote,
    keys=st.tuples(_key, _key, _key, st.none() | st.integers(0, 2**40)),
    retry=_digest,
    created=st.integers(0, 2**32 - 1),
    body=st.none() | _digest,
    is_retry=st.booleans(),
    n_forced=st.integers(0, 2**32 - 1),
    calls=st.lists(st.tuples(st.text(), st.text(), st.text())).map(tuple),
    has_reasoning=st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_notes)
def test_a_note_reads_back_as_it_was(note: TurnNote) -> None:
    value = note.as_json()
    assert json.loads(json.dumps(value)) == value
    assert read_note(noted(value)) == note


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["keys", "retry"]), inner),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_json | st.binary() | _notes.map(lambda n: {**n.as_json(), "keys": ["", "", 1]}))
def test_what_is_no_note_is_ignored(value: Any) -> None:
    graph = TurnGraph()
    assert restore(graph, [noted(value)]) == []
    assert not graph.steps


def timing_of(seconds: Any) -> dict[str, Any]:
    return {"began": 1_700_000_000.5, "waited_s": 1.0, "engine_s": seconds}


@pytest.mark.parametrize(
    ("timing", "completed"),
    [(timing_of(2.25), 1_700_000_003)]
    + [(bad, 1_700_000_000) for bad in (None, "x", {}, timing_of("2"), timing_of(float("inf")))],
)
def test_a_reply_was_sampled_when_its_timing_says_or_else_when_it_was_asked_for(
    timing: Any, completed: int
) -> None:
    note = TurnNote(keys=(b"r", b"p", b"k", None), retry=b"12345678", created=1_700_000_000)
    step = noted(note.as_json())
    metadata = {**step.metadata, "timing": timing}
    stored = replace(
        step, metadata=metadata, rollout_log_probs=np.array([-0.5]), finish_reason="stop"
    )
    (call,) = restore(TurnGraph(), [stored])
    assert call.completed == completed


def test_a_note_takes_few_bytes() -> None:
    keys = b"r" * 16, b"p" * 16, b"k" * 16, None
    note = TurnNote(keys=keys, retry=b"12345678", created=1_700_000_000)
    assert len(json.dumps(note.as_json(), separators=(",", ":"))) <= 160


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
async def test_notes_survive_an_export(fleet: Fleet, tmp_path: Path, suffix: str) -> None:
    fleet.world.say(CALL)
    await ask(await fleet.world.client(), [user("hi")], tools=TOOLS)
    path = tmp_path / f"x.{suffix}"
    write(path, (await fleet.pool.read_trajectories()).unpack())
    (back,) = read(path)
    (step,) = back.trajectory.steps
    made, again = TurnGraph(), TurnGraph()
    restore(made, fleet.world.stored())
    restore(again, [step])
    assert turns(again) == turns(made)
    assert np.array_equal(step.prompt_ids, fleet.world.stored()[0].prompt_ids)


# -- whose address is handed out -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "public_url": "https://gateway.example"}, "write {replica}"),
        ({"replicas": 3, "port": 65534}, "would end at 65536"),
    ],
)
def test_replicas_without_an_address_each_are_refused(options: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        GatewayConfig(**options)


async def test_public_addresses_of_replicas_hold_their_number() -> None:
    wiring = Wiring(replica_urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))
    addresses = Replicas(wiring, "https://g{replica}.example")
    assert addresses.origin(1) == "https://g1.example"


async def test_any_replica_hands_out_the_addresses_of_all_that_answer(
    fleets: Callable[..., Any],
) -> None:
    fleet, ports = await fleets(replicas=3), []
    for _ in range(2):
        fleet.stack.enter_context(held := reserved_port())
        ports.append(held.getsockname()[1])
    urls = (*(f"http://127.0.0.1:{port}" for port in ports), "http://127.0.0.1:9")
    a, b = [await fleet.another(port, replica=i, replica_urls=urls) for i, port in enumerate(ports)]
    handed = [await post(f"{a.url}/init_trajectory") for _ in range(12)]
    origins = [body["base_url"].rpartition("/")[0].rpartition("/")[0] for _, body in handed]
    assert {origin: origins.count(origin) > 2 for origin in origins} == {a.url: True, b.url: True}
    # One that the client named is at the same place, whoever is asked, and keeps its channel.
    for uid in ("x", "y", "z"):
        named = {"trajectory_uid": uid, "prompt_uid": "p", "channel": "val"}
        answers = [await post(f"{w.url}/init_trajectory", **named) for w in (a, b)]
        assert answers[0] == answers[1]
        base_url = answers[0][1]["base_url"]
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x") as client:
            await ask(client, [user("hi")])
    assert [channel for _, channel in fleet.world.port.steps] == ["val"] * 3
    # Who hands an address out does not keep what is served elsewhere.
    assert len(a.gateway.trajectories) + len(b.gateway.trajectories) <= 12 + 3
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{b.url}/statistics") as statistics,
        http.get(f"{b.url}/ready") as ready,
    ):
        told = await statistics.json()
        assert (await ready.json())["replica"] == 1
    assert told["replica"] == 1
    assert [r["up"] for r in told["replicas"]] == [True, True, False]


async def test_a_replica_whose_machine_is_silent_is_waited_for_once_and_not_for_each_of_a_group(
    fleets: Callable[..., Any],
) -> None:
    fleet, gone, asked = await fleets(replicas=2), asyncio.Event(), []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        await gone.wait()
        writer.close()

    async with await asyncio.start_server(hear, "127.0.0.1", 0) as silent:
        with reserved_port() as held:
            port, other = held.getsockname()[1], silent.sockets[0].getsockname()[1]
            urls = (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}")
            one = await fleet.another(port, replica=0, replica_urls=urls)
            status, group = await post(f"{one.url}/v1/groups", n=8)
        gone.set()
    assert status == 200
    assert all(each["base_url"].startswith(one.url) for each in group["trajectories"])
    assert len(asked) == 1


async def test_a_replica_that_does_not_answer_is_told_though_no_address_is_handed_out(
    fleets: Callable[..., Any],
) -> None:
    fleet = await fleets(replicas=2)
    with reserved_port() as held:
        port = held.getsockname()[1]
        urls = (f"http://127.0.0.1:{port}", "http://127.0.0.1:9")
        one = await fleet.another(port, replica=0, replica_urls=urls)
        async with aiohttp.ClientSession() as http, http.get(f"{one.url}/metrics") as answer:
            page = await answer.text()
    told = [line for line in page.splitlines() if line.startswith("stepwell_gateway_replica_up{")]
    assert [float(line.rpartition(" ")[2]) for line in told] == [1.0, 0.0]


ADMIN = "an-admin-key-for-tests"


@pytest.mark.parametrize("who", ["its own key", "an admin key", "a page"])
async def test_what_is_deleted_at_one_replica_is_forgotten_by_all(
    fleets: Callable[..., Any], who: str
) -> None:
    """With its group, the others of it, too."""
    fleet, ports = await fleets(replicas=3, admin_keys=ADMIN), []
    for _ in range(2):
        fleet.stack.enter_context(held := reserved_port())
        ports.append(held.getsockname()[1])
    urls = (*(f"http://127.0.0.1:{port}" for port in ports), "http://127.0.0.1:9")
    a, b = [await fleet.another(port, replica=i, replica_urls=urls) for i, port in enumerate(ports)]
    alone = who == "its own key"
    async with aiohttp.ClientSession() as http:

        async def send(
            at: World, method: str, path: str, key: str, body: Any = None
        ) -> tuple[int, Any]:
            bearer = {"authorization": f"Bearer {key}"}
            async with http.request(method, at.url + path, json=body, headers=bearer) as answer:
                return answer.status, await answer.json()

        declared = {"n": 2, "prompt_uid": "g"}
        _, opened = await send(a, "POST", "/v1/groups", ADMIN, declared)
        own, sibling = (each["api_key"] for each in opened["trajectories"])
        kept = []
        for world in (a, b):
            for key in (own, sibling):
                status, said = await send(world, "POST", "/v1/responses", key, {"input": "hi"})
                assert status == 200
                kept.append((world, key, f"/v1/responses/{said['id']}"))
        if who == "a page":
            page = {"trajectory_uid": "g-0"}
            status, gone = await send(a, "POST", "/ui/api/delete", ADMIN, page)
        else:
            key = own if alone else ADMIN
            status, gone = await send(a, "DELETE", "/v1/trajectories/g-0", key)
        assert (status, sorted(gone["deleted"])) == (200, ["g-0"] if alone else ["g-0", "g-1"])
        for world, key, path in kept:
            status, _ = await send(world, "GET", path, key)
            assert status == (200 if alone and key == sibling else 404), (world.url, path)
        for world in (a, b):  # their turns and finished calls are gone, too
            known = [each.uid for each in world.gateway.trajectories]
            assert known == (["g-1"] if alone else [])


async def test_a_replica_that_may_still_know_what_was_deleted_is_told_of(
    fleets: Callable[..., Any],
) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    fleet = await fleets(replicas=2, admin_keys=ADMIN)
    fleet.stack.enter_context(held := reserved_port())
    other = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = held.getsockname()[1]
    urls = (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
    here = await fleet.another(port, replica=0, replica_urls=urls)
    bearer = {"authorization": f"Bearer {ADMIN}"}
    async with other, aiohttp.ClientSession(headers=bearer) as http:
        chat = {"messages": [user("hi")]}
        async with http.post(f"{here.url}/t/p/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200
        async with http.delete(f"{here.url}/v1/trajectories/t") as answer:
            assert answer.status == 503
            assert "retry-after" in answer.headers
            told = (await answer.json())["error"]["message"]
    assert "replica 1" in told
    assert "127.0.0.1" not in told
    assert not (await fleet.pool.list_trajectories()).items


async def test_the_command_has_all_gateways_forget_by_the_first_that_answers(fleet: Fleet) -> None:
    async with AsyncOpenAI(base_url=f"{fleet.world.url}/t/p/v1", api_key="x") as client:
        answer = await client.responses.create(model="m", input="hi")
        gone = "http://127.0.0.1:9"
        there = GatewayPart(urls=(gone, fleet.world.url))
        assert await asyncio.to_thread(lambda: list(_forget(there, ["t"]))) == []
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
    (told,) = await asyncio.to_thread(lambda: list(_forget(GatewayPart(urls=(gone,)), ["t"])))
    assert "may still know them" in told
    assert gone in told


async def test_the_command_has_gateways_forget_what_the_trainers_copies_alone_have(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(load_config("quickstart", [f"run.dir={tmp_path}", "pool.archive.enabled=false"]))
    gateway = GatewayPart(urls=(fleet.world.url,))
    monkeypatch.setattr(deletion, "holder", lambda _: os.getpid())
    monkeypatch.setattr(deletion, "live_run", lambda _: SimpleNamespace(gateway=gateway))
    monkeypatch.setattr(deletion, "connect", lambda _: DataPoolClient.local())
    async with AsyncOpenAI(base_url=f"{fleet.world.url}/t/p/v1", api_key="x") as client:
        answer = await client.responses.create(model="m", input="hi")
        await fleet.pool.drop_group("p", "trained")
        line = {"trajectory_uid": "t", "prompt_uid": "p", "user": "eve", "response": "hi"}
        (tmp_path / ROLLOUTS).write_text(json.dumps(line) + "\n")
        # In a thread: the gateway, which it asks, serves on this loop.
        told = await asyncio.to_thread(
            lambda: asyncio.run(deletion.delete(tmp_path, Delete(user="eve")))
        )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
    assert told[0] == f"{tmp_path}: deleted 0 trajectories"
    assert (tmp_path / ROLLOUTS).read_bytes() == b""
