"""What a body holds is bounded before objects are made of it: no request takes the event loop from
the others, whatever it is made of."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway import bodies

M = 1_000_000
USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/t/p/v1/chat/completions", "/t/p/v1/completions"
RESPONSES, MESSAGES = "/t/p/v1/responses", "/t/p/v1/messages"
REPLY = {"max_tokens": 9, "messages": USER}


def unknown(n: int) -> dict[str, Any]:
    return {f"k{i}": 1 for i in range(n)}


def schema(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {} for i in range(n)}}


def nested(n: int, begin: str = "[", end: str = "]") -> bytes:
    return b'{"messages": %s}' % (begin * n + end * n).encode()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]


TEXT = {"type": "text", "text": "a"}
HOSTILE: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        f"unknown keys, {path.rpartition('/')[2]}": (path, lambda: unknown(M))
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/generate", "/submit_steps")
    },
    **{
        f"unknown keys, {path}": (path, lambda: unknown(M))
        for path in (
            *("/init_trajectory", "/v1/groups", "/v1/rewards", "/v1/feedback", "/buffer/write"),
            *("/v1/complete_trajectory", "/t/p/v1/complete_trajectory"),
            *("/t/p/v1/register_trajectory", "/t/p/v1/abort_trajectory", "/t/p/v1/feedback"),
        )
    },
    "metadata": ("/init_trajectory", lambda: {"metadata": unknown(M)}),
    "metadata of a response": (RESPONSES, lambda: {"input": "a", "metadata": unknown(90_000)}),
    "some unknown keys": (CHAT, lambda: {"messages": USER, **unknown(90_000)}),
    "nested unknown keys": (CHAT, lambda: {"messages": USER, "stream_options": unknown(90_000)}),
    "some unknown keys, lifecycle": ("/init_trajectory", lambda: unknown(90_000)),
    "step_rewards": ("/t/p/v1/complete_trajectory", lambda: {"step_rewards": ["a"] * 3 * M}),
    "numbers": ("/t/p/v1/complete_trajectory", lambda: {"step_rewards": [1] * 900_000}),
    "step_rewards by name": (
        "/v1/complete_trajectory",
        lambda: {"trajectory_uid": "t", "step_rewards": [1e99] * 900_000},
    ),
    "tags": ("/init_trajectory", lambda: {"tags": [""] * 3 * M}),
    "some tags": ("/init_trajectory", lambda: {"tags": [1] * 90_000}),
    "tags of a group": ("/v1/groups", lambda: {"n": 1, "tags": ["a"] * 3 * M}),
    "description, chat": (
        CHAT,
        lambda: {"messages": USER, "tools": [function(description="word " * 600_000)]},
    ),
    "description, messages": (
        MESSAGES,
        lambda: {
            **REPLY,
            "tools": [{"name": "f", "description": "word " * 600_000, "input_schema": {}}],
        },
    ),
    "description, responses": (
        RESPONSES,
        lambda: {
            "input": "a",
            "tools": [{"type": "function", "name": "f", "description": "word " * 600_000}],
        },
    ),
    "arguments": (CHAT, lambda: {"messages": called(json.dumps(unknown(800_000)))}),
    "arguments as an object": (CHAT, lambda: {"messages": called(unknown(800_000))}),
    "arguments, responses": (
        RESPONSES,
        lambda: {
            "input": [
                *({"role": "user", "content": "a"},),
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "f",
                    "arguments": json.dumps(unknown(800_000)),
                },
            ]
        },
    ),
    "long text": (CHAT, lambda: {"messages": [{"role": "user", "content": "a b " * 4 * M}]}),
    "prompt": (COMPLETIONS, lambda: {"prompt": "a b " * 4 * M}),
    "schema": (
        CHAT,
        lambda: {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema(M)}},
        },
    ),
    "schema of a tool": (
        MESSAGES,
        lambda: {**REPLY, "tools": [{"name": "f", "input_schema": schema(M)}]},
    ),
    "parts, chat": (CHAT, lambda: {"messages": [{"role": "user", "content": [TEXT] * M}]}),
    "parts, messages": (
        MESSAGES,
        lambda: {"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT] * M}]},
    ),
    "items": (RESPONSES, lambda: {"input": [{"role": "user", "content": "a"}] * 900_000}),
    "messages": (CHAT, lambda: {"messages": [{}] * M}),
    "ids": (COMPLETIONS, lambda: {"prompt": [1] * 4 * M}),
    "steps": ("/submit_steps", lambda: {"steps": [{}] * M}),
    "lists": (CHAT, lambda: nested(M)),
    "lists within the bounds": (CHAT, lambda: nested(10_000)),
    "objects": (MESSAGES, lambda: nested(M, '{"a":', "}").replace(b":}", b":1}", 1)),
    "lists, lifecycle": ("/init_trajectory", lambda: nested(10_000)),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_is_refused_in_few_words_and_nothing_is_sampled(
    worlds: Any, name: str
) -> None:
    world = await worlds(tool_parser="hermes")
    path, make = HOSTILE[name]
    made = make()
    body = made if isinstance(made, bytes) else orjson.dumps(made)
    assert len(body) <= world.gateway.config.max_body_bytes
    kind = {"content-type": "application/json"}
    began = time.thread_time()
    async with (
        aiohttp.ClientSession() as http,
        http.post(world.url + path, data=body, headers=kind) as answer,
    ):
        text = await answer.text()
        assert 400 <= answer.status < 500, text[:1000]
    assert len(text) < 1000
    assert not world.engine.requests
    # Seconds before; the client and its 30 MB are in this thread, too.
    assert time.thread_time() - began < 1.0


async def test_a_long_tool_description_is_served_where_it_fits(worlds: Any) -> None:
    world = await worlds(context_length=8 * M)
    tool = function(description="word " * 600_000, parameters={"type": "object", "properties": {}})
    async with aiohttp.ClientSession() as http:
        body = {"model": "m", "messages": USER, "tools": [tool]}
        async with http.post(world.url + CHAT, json=body) as answer:
            assert answer.status == 200, await answer.text()
    assert len(world.engine.requests[0]["input_ids"]) > 600_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\,[{}]:\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,[')), inner),
)


def count(value: Any) -> tuple[int, int, int]:
    """Strings, containers and commas of a value, by the book."""
    if isinstance(value, str):
        return 1, 0, 0
    if isinstance(value, dict):
        members: Any = itertools.chain(value, value.values())
    elif isinstance(value, list):
        members = value
    else:
        return 0, 0, 0
    strings = containers = commas = 0
    for n, m, k in map(count, members):
        strings, containers, commas = strings + n, containers + m, commas + k
    return strings, containers + 1, commas + max(len(value) - 1, 0)


@given(values, st.integers(1, 9))
def test_the_scan_counts_what_stands_in_no_string_wherever_the_pieces_end(
    value: Any, size: int
) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BIG", size)
        patch.setattr(bodies, "_MOST", bodies.Holdings(-1, -1, -1))
        assert tuple(bodies.holdings(body)) == count(value)
