"""Memory of a live trajectory: its tokens once, and of a finished call what a retry needs."""

from __future__ import annotations

import gc
import json
import logging
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest

from benchmarks.gateway.size import bound, objects_of, trajectory_size
from stepwell.gateway import pool_access
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.dialects.base import Exchange
from stepwell.gateway.http_protocol import HttpProtocol
from tests.gateway.conftest import World, serving
from tests.gateway.raw import until
from tests.helpers import instances

RETRY = {"x-stainless-retry-count": "1"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Add. " * 40,
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'


@pytest.fixture(autouse=True, scope="module")
def only_what_is_made_here() -> None:
    """Collections walk through the objects of this file, and not of all files before."""
    gc.collect()
    gc.freeze()


def _text(world: World, turn: int, n_tokens: int) -> str:
    """Words that no other turn says."""
    said = f"turn {turn}: what is the answer to {turn}? "
    return said * max(1, n_tokens // len(world.ids(said, close=False)))


async def converse(
    world: World, turns: int, tokens: int, *, stream: bool, **options: Any
) -> tuple[int, int]:
    """One agent's whole conversation on `t1`; its tokens and the bytes of their text."""
    world.engine.context_length = 1_000_000
    world.engine.requests = []
    client = await world.client()
    messages: list[Any] = []
    for turn in range(turns):
        said = _text(world, turn, tokens // 8) + (CALL if "tools" in options else "")
        world.say(said)
        messages.append({"role": "user", "content": _text(world, turn, tokens * 7 // 8)})
        answer = await client.chat.completions.create(
            model="m", messages=messages, stream=stream, **options
        )
        if stream:
            [_ async for _ in answer]
            messages.append({"role": "assistant", "content": said})
        else:
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    last = world.stored("t1")[-1]
    assert (last.step_index, last.parent_index) == (turns - 1, turns - 2)
    ids = [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
    return len(ids), len(world.tokenizer.decode(ids).encode())


@pytest.mark.parametrize(
    ("turns", "tokens", "options"),
    [
        (16, 1_000, {}),
        (20, 3_200, {}),
        (64, 95, {}),
        (20, 800, {"tools": TOOLS}),
        (20, 800, {"logprobs": True, "top_logprobs": 5}),
    ],
    ids=["16k", "64k", "short turns", "tools", "log-probs"],
)
async def test_a_live_trajectory_holds_its_tokens_once_and_little_more(
    world: World, turns: int, tokens: int, options: dict[str, Any]
) -> None:
    n_tokens, n_text = await converse(world, turns, tokens, stream=False, **options)
    assert n_tokens >= turns * tokens * 0.9
    gc.collect()
    assert trajectory_size(world.gateway, "t1") <= bound(n_tokens, n_text)


async def test_streamed_calls_hold_no_more(world: World) -> None:
    n_tokens, n_text = await converse(world, 20, 400, stream=True)
    gc.collect()
    assert trajectory_size(world.gateway, "t1") <= bound(n_tokens, n_text)


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
async def test_turns_leave_nothing_that_the_garbage_collector_walks_through(
    worlds: Any, options: dict[str, Any]
) -> None:
    tracked = []
    for turns in (4, 24):
        world: World = await worlds()
        await converse(world, turns, 100, stream=False, **options)
        for _ in range(3):  # a tuple is let go of when a collection has looked at it
            gc.collect()
        tracked.append(sum(map(gc.is_tracked, objects_of(world.gateway, "t1"))))
    few, many = tracked
    assert many <= few + 2


# -- a finished call is recalled from its ids -------------------------------------------------


class Http:
    """A client that sends a body as it is, marked as a retry or not."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, url: str, body: dict[str, Any], *, retry: bool = False) -> Any:
        headers = RETRY if retry else {}
        async with self._session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            if answer.content_type == "application/json":
                return await answer.json()
            return _assembled(await answer.text())


def _assembled(stream: str) -> dict[str, str]:
    """Text by the path where it stands in the events; pieces may be cut anywhere."""
    said: defaultdict[str, str] = defaultdict(str)
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            sample = str(next((c["index"] for c in event.get("choices", ())), ""))
            for path, value in _leaves(event, sample):
                if isinstance(value, str) and path.endswith((".content", ".text", ".arguments")):
                    said[path] += value
                elif path.endswith((".id", ".finish_reason", ".stop_reason", ".partial_json")):
                    said[path] = str(value) if value is not None else said[path]
    return said


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from _leaves(inner, f"{path}.{key}")
        else:
            yield f"{path}.{key}", inner


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(session)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", CHAT),
    "chat with tools": ("v1/chat/completions", {**CHAT, "tools": TOOLS}),
    "chat with log-probs": ("v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat until a stop": ("v1/chat/completions", {**CHAT, "stop": ["stop here"]}),
    "chat, forced": (
        "v1/chat/completions",
        {**CHAT, "tools": TOOLS, "tool_choice": "required"},
    ),
    "two samples": ("v1/chat/completions", {**CHAT, "n": 2}),
    "text": ("v1/completions", {"model": "m", "prompt": "Once", "logprobs": 1}),
    "ids": ("v1/completions", {"model": "m", "prompt": [5, 6, 7]}),
    "messages": ("v1/messages", {**CHAT, "max_tokens": 99}),
    "responses": ("v1/responses", {"model": "m", "input": "hi", "temperature": 0.5}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ASKED)
async def test_a_retry_is_told_the_same_as_the_call_was(
    worlds: Any, http: Http, asked: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world: World = await worlds("qwen3")
    path, body = ASKED[asked]
    body = {**body, "stream": stream}
    for _ in range(body.get("n", 1)):
        world.say(f"<think>\nhm\n</think>\n\nso {CALL}{CALL} it is, stop here")
    url = f"{world.base_url()}/{path}"
    first = await http.post(url, body)
    more = await http.post(url, {**body, "temperature": 0.25})  # another call stands between
    n_stored = len(world.stored())
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 5)
    for _ in range(2):
        assert _known(await http.post(url, body, retry=True)) == _known(first)
    again = await http.post(url, {**body, "temperature": 0.25}, retry=True)
    assert _known(again) == _known(more)
    assert len(world.stored()) == len(world.engine.requests) == n_stored


async def test_a_retry_at_another_gateway_is_told_when_the_call_was_completed(
    world: World, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "input": "hi"}
    first = await http.post(f"{world.base_url()}/v1/responses", body)
    assert abs(first["completed_at"] - time.time()) < 60
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 300)
    config, wiring = GatewayConfig(port=0), Wiring((world.engine.url,))
    other = create_app(config, wiring, world.pool, world.tokenizer)
    async with serving(other) as url:
        again = await http.post(f"{url}/t1/p1/v1/responses", body, retry=True)
    assert _known(again) == _known(first)


def _known(answer: Any) -> Any:
    """An answer without ids that are made up whenever it is written (items of Responses)."""
    if isinstance(answer, dict) and "output" in answer:
        return {**answer, "output": [{**item, "id": ""} for item in answer["output"]]}
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asked", ASKED)
async def test_an_answered_call_does_not_wait_for_the_garbage_collector(
    worlds: Any, http: Http, asked: str, stream: bool
) -> None:
    world: World = await worlds("qwen3")
    path, body = ASKED[asked]
    gc.collect()
    before = len(instances(Exchange))
    gc.disable()
    try:
        for turn in range(3):
            await http.post(
                f"{world.base_url()}/{path}",
                {**body, "stream": stream, "temperature": turn / 8 + 0.25},
            )
        # The last one is told if its connection breaks.
        await until(lambda: len(instances(Exchange)) <= before + 1)
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["t1/p1/v1/chat/completions", "t1/p1/v1/complete_trajectory"])
async def test_a_closed_connection_does_not_wait_for_the_garbage_collector(
    world: World, path: str
) -> None:
    gc.collect()
    connections, exchanges = len(instances(HttpProtocol)), len(instances(Exchange))
    gc.disable()
    try:
        async with aiohttp.ClientSession() as session:
            await Http(session).post(f"{world.url}/{path}", CHAT if "chat" in path else {})
            assert len(instances(HttpProtocol)) > connections
        await until(
            lambda: (
                len(instances(HttpProtocol)) <= connections
                and len(instances(Exchange)) <= exchanges
            )
        )
    finally:
        gc.enable()


@pytest.mark.parametrize("prompt", [{"prompt_ids": [5, 6, 7]}, {"messages": CHAT["messages"]}])
async def test_a_white_box_retry_is_told_the_same_ids(
    world: World, http: Http, prompt: dict[str, Any]
) -> None:
    body = {"trajectory_uid": "t1", "prompt_uid": "p1", "max_tokens": 9, **prompt}
    first = await http.post(f"{world.url}/generate", body)
    assert first["prompt_ids"]
    assert len(first["rollout_log_probs"]) == len(first["response_ids"]) > 0
    assert await http.post(f"{world.url}/generate", body, retry=True) == first
    assert len(world.engine.requests) == 1


async def test_retries_of_every_turn_leave_no_more_in_memory(world: World, http: Http) -> None:
    url = f"{world.base_url()}/v1/chat/completions"
    bodies: list[dict[str, Any]] = []
    messages: list[Any] = []
    for turn in range(12):
        messages.append({"role": "user", "content": _text(world, turn, 200)})
        bodies.append({"model": "m", "messages": list(messages)})
        messages.append((await http.post(url, bodies[-1]))["choices"][0]["message"])
    gc.collect()
    before = trajectory_size(world.gateway, "t1")
    told = [await http.post(url, body, retry=True) for body in bodies]
    gc.collect()
    assert trajectory_size(world.gateway, "t1") <= before + 1024
    assert [a["choices"][0]["message"] for a in told] == messages[1::2]
    assert len(world.stored()) == 12


async def test_a_gateway_that_takes_a_trajectory_over_holds_no_more(worlds: Any) -> None:
    world: World = await worlds()
    n_tokens, n_text = await converse(world, 20, 800, stream=False)
    config = GatewayConfig(port=0)
    other = create_app(config, Wiring((world.engine.url,)), world.pool, world.tokenizer)
    async with serving(other) as url, aiohttp.ClientSession() as session:
        last = {"model": "m", "messages": [{"role": "user", "content": "a title"}]}
        await Http(session).post(f"{url}/t1/p1/v1/chat/completions", last)
        gc.collect()
        assert trajectory_size(other.state.services, "t1") <= bound(n_tokens, n_text)


async def test_a_call_that_waits_for_a_retry_goes_with_its_trajectory(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest keeps what is logged: the pool's error, which in Python 3.13 has the call's frames. Its
    # own logger is told: an earlier test may have given `stepwell` a level.
    caplog.set_level(logging.ERROR, logger=pool_access.__name__)
    client = await world.client()
    world.port.failures = ["before"]
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=messages)
    trajectory = world.gateway.trajectories.known("t1")
    (live,) = (c.live for calls in trajectory.calls._calls.values() for c in calls)
    assert live.state == "unstored"
    gone = weakref.ref(live)
    await trajectory.complete(1.0, None)
    del live, trajectory
    gc.collect()
    assert gone() is None


async def test_a_call_that_failed_keeps_nothing_of_its_request(world: World) -> None:
    world.engine.context_length = 1_000_000
    client = await world.client()
    for turn in range(8):
        world.say("", close=False)  # no token at all: the engine is at fault
        asked = {"role": "user", "content": _text(world, turn, 30_000)}
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=[asked])
    gc.collect()
    assert trajectory_size(world.gateway, "t1") <= bound(0, 0)
