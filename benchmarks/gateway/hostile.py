"""Harm that one request may do to the others: hostile bodies while agents work.

hostile   64 agents, 40 hostile bodies a minute, and a second client whose longest call is measured

The engine takes 50 ms, and an agent 500 ms between two turns, for its tools: at full speed the
calls of 64 agents wait for each other, and there is no other cause to be seen.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from benchmarks.gateway.client import Connection
from benchmarks.gateway.measure import DELAY_S, GatewayBench
from benchmarks.gateway.process import Client, running_client
from benchmarks.gateway.workload import TURNS

AGENTS = 64
A_MINUTE = 40
PAUSE_S, SECOND_PAUSE_S = 0.5, 0.02
ABORT = '{"reason":"hostile"}'

M = 1_000_000
USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/t/p/v1/chat/completions", "/t/p/v1/completions"
RESPONSES, MESSAGES = "/t/p/v1/responses", "/t/p/v1/messages"
GEMINI = "/t/p/v1beta/models/m:generateContent"
REPLY = {"max_tokens": 9, "messages": USER}


@functools.cache
def keys(n: int) -> tuple[str, ...]:
    """Names of `n` fields that nothing knows."""
    return tuple(f"k{i}" for i in range(n))


def unknown(n: int) -> dict[str, Any]:
    return dict.fromkeys(keys(n), 1)


@functools.cache
def many_unknown() -> bytes:
    """The body of a million unknown keys, for many paths."""
    return orjson.dumps(unknown(M))


def schema(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {} for key in keys(n)}}


def nested(n: int, begin: str = "[", end: str = "]") -> bytes:
    return b'{"messages": %s}' % (begin * n + end * n).encode()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]


def contents(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "parts": list(parts)}]


def declared(**fields: Any) -> list[dict[str, Any]]:
    return [{"functionDeclarations": [{"name": "f", **fields}]}]


LONGEST = "a b " * 3_145_000
"""Text as long as a body of text may be."""
LONGER = "a b " * 8_388_000
"""Text as long as any body may be by `gateway.max_body_bytes`."""
TEXT = {"type": "text", "text": "a"}
A = {"text": "a"}
HOSTILE: dict[str, tuple[str, Callable[[], Any]]] = {
    **{
        f"unknown keys, {path.rpartition('/')[2]}": (path, many_unknown)
        for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GEMINI, "/generate", "/submit_steps")
    },
    **{
        f"unknown keys, {path}": (path, many_unknown)
        for path in (
            "/init_trajectory",
            "/v1/groups",
            "/v1/rewards",
            "/v1/feedback",
            "/buffer/write",
            "/v1/complete_trajectory",
            "/t/p/v1/complete_trajectory",
            "/t/p/v1/register_trajectory",
            "/t/p/v1/abort_trajectory",
            "/t/p/v1/feedback",
        )
    },
    "metadata": ("/init_trajectory", lambda: b'{"metadata":%b}' % many_unknown()),
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
    "arguments": (CHAT, lambda: {"messages": called(json.dumps(unknown(700_000)))}),
    "arguments as an object": (CHAT, lambda: {"messages": called(unknown(700_000))}),
    "arguments, responses": (
        RESPONSES,
        lambda: {
            "input": [
                {"role": "user", "content": "a"},
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "f",
                    "arguments": json.dumps(unknown(700_000)),
                },
            ]
        },
    ),
    "nested unknown keys, Gemini": (
        GEMINI,
        lambda: {"contents": contents(A), "generationConfig": unknown(90_000)},
    ),
    "pieces of a turn": (
        GEMINI,
        lambda: {
            "contents": [
                *contents(A),
                {"role": "model", "parts": [{"text": "a" * 600}] * 19_000},
                {"role": "model", "parts": [{"text": "b"}]},
            ]
        },
    ),
    "pieces of a turn, responses": (
        RESPONSES,
        lambda: {
            "input": [
                *[{"role": "assistant", "content": "a" * 600}] * 19_000,
                {"role": "user", "content": [{"type": "input_image"}]},
            ]
        },
    ),
    "pieces of a turn, messages": (
        MESSAGES,
        lambda: {
            "max_tokens": 9,
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "text", "text": "a" * 600}] * 19_000},
                {"role": "assistant", "content": [{"type": "image"}]},
            ],
        },
    ),
    "description, Gemini": (
        GEMINI,
        lambda: {"contents": contents(A), "tools": declared(description="word " * 600_000)},
    ),
    "args": (
        GEMINI,
        lambda: {
            "contents": [
                *contents(A),
                {"role": "model", "parts": [{"functionCall": {"name": "f", "args": unknown(M)}}]},
                *contents(A),
            ]
        },
    ),
    "response of a function": (
        GEMINI,
        lambda: {
            "contents": contents(
                {"functionResponse": {"name": "f", "response": {"output": LONGEST}}}
            )
        },
    ),
    "parts, Gemini": (GEMINI, lambda: {"contents": contents(*[A] * M)}),
    "contents": (GEMINI, lambda: {"contents": [{}] * M}),
    "some empty contents": (GEMINI, lambda: {"contents": [{"role": "model"}] * 19_000}),
    "calls without a response": (
        GEMINI,
        lambda: {
            "contents": [
                {"role": "model", "parts": [{"functionCall": {"name": "f"}}] * 6_000},
                *contents(*[{"functionResponse": {"name": "f", "id": "x"}}] * 3_000, {"a": 1}),
            ]
        },
    ),
    "schema of a function": (
        GEMINI,
        lambda: {"contents": contents(A), "tools": declared(parameters=schema(M))},
    ),
    "order of a schema": (
        GEMINI,
        lambda: {
            "contents": contents(A),
            "tools": declared(
                parameters={**schema(9_000), "propertyOrdering": ["k1"] * 80_000, "type": 3}
            ),
            "cachedContent": "x",
        },
    ),
    "objects, Gemini": (
        GEMINI,
        lambda: nested(M, '{"a":', "}").replace(b":}", b":1}", 1).replace(b"messages", b"contents"),
    ),
    "longest text": (CHAT, lambda: {"messages": [{"role": "user", "content": LONGEST}]}),
    "wide text": (
        CHAT,
        lambda: {"messages": [{"role": "user", "content": "\U0001f600" + LONGEST}]},
    ),
    "longer text": (CHAT, lambda: {"messages": [{"role": "user", "content": LONGER}]}),
    "longer text, lifecycle": ("/init_trajectory", lambda: {"prompt_uid": LONGER}),
    "longer text of a step": ("/submit_steps", lambda: {"steps": [{"messages": LONGER}]}),
    "wide text of a step": (
        "/submit_steps",
        lambda: {"steps": [{"messages": "\U0001f600" + LONGER}]},
    ),
    "prompt": (COMPLETIONS, lambda: {"prompt": LONGEST}),
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
    "parts, chat": (CHAT, lambda: {"messages": [{"role": "user", "content": [TEXT] * 450_000}]}),
    "parts, messages": (
        MESSAGES,
        lambda: {"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT] * 450_000}]},
    ),
    "items": (RESPONSES, lambda: {"input": [{"role": "user", "content": "a"}] * 400_000}),
    "messages": (CHAT, lambda: {"messages": [{}] * M}),
    "ids": (COMPLETIONS, lambda: {"prompt": [1] * 4 * M}),
    "steps": ("/submit_steps", lambda: {"steps": [{}] * M}),
    "lists": (CHAT, lambda: nested(M)),
    "lists within the bounds": (CHAT, lambda: nested(10_000)),
    "objects": (MESSAGES, lambda: nested(M, '{"a":', "}").replace(b":}", b":1}", 1)),
    "lists, lifecycle": ("/init_trajectory", lambda: nested(10_000)),
}


def hostile_body(name: str) -> tuple[str, bytes]:
    """Path and bytes of one."""
    path, make = HOSTILE[name]
    made = make()
    return path, made if isinstance(made, bytes) else orjson.dumps(made)


async def hostile(bench: GatewayBench) -> None:
    """The load for a fifth of the time without hostile bodies, then with them."""
    report, seconds = bench.report, 60.0 * bench.minutes
    made = {name: await asyncio.to_thread(hostile_body, name) for name in HOSTILE}
    await bench.engine.control(delay_s=DELAY_S)
    try:
        async with running_client(bench.workload) as second:
            calm, errors, _ = await _loaded(bench, second, {}, seconds / 5)
            under, more, answers = await _loaded(bench, second, made, seconds)
    finally:
        await bench.engine.control()
    errors += more
    report.figures["hostile_bodies"] = {
        "minutes": bench.minutes,
        "calm": calm,
        "hostile": under,
        "answers": answers,
    }
    if errors:
        report.figures["first_error"] = errors[0]
    report.zero(hostile_errors=len(errors))
    report.at_most("longest_call_added_ms", under["added_max_ms"], 100.0)


async def _loaded(
    bench: GatewayBench, second: Client, made: dict[str, tuple[str, bytes]], seconds: float
) -> tuple[dict[str, float], list[str], dict[str, str]]:
    """Agents and a second client for so long: what the latter saw, errors, and how hostile bodies
    were answered."""
    ours = bench.ours
    shared: dict[str, Any] = {
        "prompts": 1_000_000,
        "turns": TURNS,
        "complete_path": ours.abort_path,
        "complete_body": ABORT,
        "duration_s": seconds,
        "limit_s": seconds + 120.0,
    }
    many = {"connections": AGENTS, "pause_s": PAUSE_S, "stagger_s": PAUSE_S / AGENTS}
    one = {"connections": 1, "pause_s": SECOND_PAUSE_S}
    await ours.actors[0].watch.remote()
    load = asyncio.gather(
        bench.client.attempt(bench.job(ours, "chat", **shared, **many)),
        second.attempt(bench.job(ours, "chat", **shared, **one)),
    )
    answers = await _attack(ours.ports[0], made, load, seconds)
    of_agents, of_second = await load
    late_s, _ = await ours.actors[0].stalls.remote()
    added_ms = 1e3 * (np.asarray(of_second.latencies_s) - DELAY_S)
    p50, p99, longest = np.percentile(added_ms, (50, 99, 100)).round(1).tolist()
    figures = {
        "calls_of_agents": len(of_agents.latencies_s),
        "calls_of_second_client": len(added_ms),
        "added_p50_ms": p50,
        "added_p99_ms": p99,
        "added_max_ms": longest,
        "loop_delay_max_ms": round(1e3 * max(late_s), 1),
    }
    return figures, [*of_agents.errors, *of_second.errors], answers


async def _attack(
    port: int, made: dict[str, tuple[str, bytes]], load: asyncio.Future[Any], seconds: float
) -> dict[str, str]:
    """Send one hostile body after the other while the load lasts; how each was answered last."""
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    answers: dict[str, str] = {}
    for number, name in enumerate(itertools.cycle(made)):
        at = began + number * 60.0 / A_MINUTE
        if at > began + seconds:
            break
        await asyncio.wait([load], timeout=max(at - time.perf_counter(), 0.0))
        if load.done():
            break
        path, body = made[name]
        sent = time.perf_counter()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        try:
            await connection.post(path, body)
            answer = "200"
        except (ConnectionError, ValueError) as e:
            answer = str(e)[:100]
        finally:
            connection.close()
        answers[name] = f"{1e3 * (time.perf_counter() - sent):.0f} ms, {len(body)} bytes: {answer}"
    return answers
