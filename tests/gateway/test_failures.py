"""Failures of agents, engines and the pool: a Step is never lost or doubled by them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from stepwell.gateway.access import OPERATOR
from stepwell.gateway.config import Tuning
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.trajectory.calls import RetryKey
from stepwell.gateway.web import RequestHeaders, retry_key
from tests.builders import until
from tests.gateway.conftest import Sampled, log_prob

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


# -- the Step comes before the reply's end ---------------------------------------------------


async def test_a_json_reply_waits_for_its_step(world: Any) -> None:
    client = await world.client()
    world.port.door.clear()
    call = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.port.waiting.wait()
    done, _ = await asyncio.wait([call], timeout=0.1)
    assert not done
    assert world.stored() == []
    world.port.door.set()
    await call
    assert len(world.stored()) == 1


async def test_the_terminal_event_of_a_stream_waits_for_its_step(world: Any) -> None:
    client = await world.client()
    world.port.door.clear()
    world.say("all of it")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk)

    reading = asyncio.create_task(read())
    await until(lambda: "".join(c.choices[0].delta.content or "" for c in chunks) == "all of it")
    await world.port.waiting.wait()
    assert all(c.choices[0].finish_reason is None for c in chunks)
    assert not reading.done()
    world.port.door.set()
    await reading
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(world.stored()) == 1


# -- the pool --------------------------------------------------------------------------------


async def test_an_unreachable_pool_answers_503_and_leaves_no_hole(world: Any) -> None:
    client = await world.client()
    world.port.failures = ["before"]
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert failure.value.status_code == 503
    assert failure.value.code == "pool_unavailable"
    assert world.stored() == []
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "another"}]
    )
    assert [s.step_index for s in world.stored()] == [0]


async def test_a_lost_answer_of_the_pool_makes_neither_hole_nor_duplicate(world: Any) -> None:
    client = await world.client()
    world.port.failures = ["after"]
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "another"}]
    )
    assert [s.step_index for s in world.stored()] == [0, 1]
    world.check_exact()


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_after_a_pool_failure_stores_the_very_same_step(
    world: Any, failure: str, stream: bool
) -> None:
    client = await world.client(max_retries=2)
    world.port.failures = [failure]
    said = world.say("sampled once")
    if stream:
        # A stream has begun when the pool fails, so the client has to repeat it itself.
        broken = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError):
            _ = [c async for c in broken]
        again = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            stream=True,
            extra_headers={"x-stainless-retry-count": "1"},
        )
        text = "".join([c.choices[0].delta.content or "" async for c in again])
    else:
        reply = await client.chat.completions.create(model="m", messages=MESSAGES)
        text = reply.choices[0].message.content
    assert text == "sampled once"
    assert len(world.engine.requests) == 1
    assert [s.response_ids.tolist() for s in world.stored()] == [said.ids]


@pytest.mark.parametrize(
    ("count", "is_retry"),
    [("0", False), ("00", False), ("1", True), ("²", False), ("x", False), ("9" * 5000, True)],
    ids=lambda value: str(value)[:9],
)
def test_a_count_of_retries_may_be_any_text(count: str, is_retry: bool) -> None:
    headers = RequestHeaders([(b"x-stainless-retry-count", count.encode("latin-1"))])
    assert retry_key(headers, "", "chat").is_retry is is_retry


async def test_a_conversation_goes_on_after_a_gateway_forgot_it(world: Any) -> None:
    client = await world.client()
    for text in ("a", "b"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}]
        )
    world.gateway.trajectories._open.clear()  # as after a restart
    await client.chat.completions.create(model="m", messages=MESSAGES)
    assert [s.step_index for s in world.stored()] == [0, 1, 2]


async def test_a_trajectory_whose_group_was_dropped_answers_410(world: Any) -> None:
    client = await world.client()
    await client.chat.completions.create(model="m", messages=MESSAGES)
    await world.pool.drop_group("p1", "deadline")
    for _ in range(2):
        with pytest.raises(openai.APIStatusError) as closed:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert closed.value.status_code == 410
    assert len(world.stored()) == 1


# -- retries ---------------------------------------------------------------------------------


async def test_a_retry_joins_the_call_in_flight(world: Any) -> None:
    client = await world.client()
    gate = asyncio.Event()
    world.say("once", gate=gate)
    first = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.engine.arrived.wait()
    retry = asyncio.create_task(
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
        )
    )
    await until(lambda: world.gateway.calls.counts["retries"] == 1)
    gate.set()
    one, two = await asyncio.gather(first, retry)
    assert one.id == two.id
    assert len(world.engine.requests) == len(world.stored()) == 1


async def test_a_retry_outlives_the_client_that_asked_first(world: Any) -> None:
    client = await world.client()
    gate = asyncio.Event()
    world.say("once", gate=gate)
    first = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.engine.arrived.wait()
    retry = asyncio.create_task(
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
        )
    )
    await until(lambda: world.gateway.calls.counts["retries"] == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    assert (await retry).choices[0].message.content == "once"
    assert world.engine.aborts == []
    assert len(world.stored()) == 1


async def test_a_call_in_flight_is_not_forgotten_however_many_others_are(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.trajectory.calls.REMEMBERED", 2)
    client = await world.client()
    gate = asyncio.Event()
    world.engine.default = lambda _: Sampled(world.ids("once"), gate=gate)

    def ask(i: int, retry: str = "0") -> asyncio.Task[Any]:
        messages: Any = [{"role": "user", "content": f"question {i}"}]
        headers = {"x-stainless-retry-count": retry}
        asking = client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
        return asyncio.create_task(asking)

    calls = []
    for i in range(4):
        calls.append(ask(i))
        await until(lambda n=i + 1: len(world.engine.requests) == n)
    calls.append(ask(0, retry="1"))
    await until(lambda: world.gateway.calls.counts["retries"] == 1)
    gate.set()
    replies = await asyncio.gather(*calls)
    assert replies[0].id == replies[-1].id
    assert len(world.engine.requests) == len(world.stored()) == 4


async def test_a_call_that_is_stored_is_not_forgotten_for_later_ones_of_its_request(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.gateway.trajectory.calls.REMEMBERED", 2)
    client = await world.client()

    def ask(retry: str = "0") -> asyncio.Task[Any]:
        headers = {"x-stainless-retry-count": retry}
        asking = client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=headers)
        return asyncio.create_task(asking)

    world.port.door.clear()
    world.say("once")
    first = ask()
    await world.port.waiting.wait()
    gate = asyncio.Event()
    world.engine.default = lambda _: Sampled(world.ids("another"), gate=gate)
    others = [ask(), ask()]
    await until(lambda: len(world.engine.requests) == 3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    world.port.door.set()
    await until(lambda: len(world.stored()) == 1)
    async with asyncio.timeout(5):
        assert (await ask(retry="1")).choices[0].message.content == "once"
    gate.set()
    await asyncio.gather(*others)


async def whole(stream: Any) -> Any:
    """Ids, text and finish reason of a stream as a client reads it; pieces may be cut anywhere."""
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    return {c.id for c in chunks}, text, chunks[-1].choices[0].finish_reason


async def test_a_retry_of_a_finished_call_gets_its_recorded_reply(world: Any) -> None:
    client = await world.client()
    for stream in (False, True):
        replies = []
        for retry in (0, 1):
            answer = await client.chat.completions.create(
                model="m",
                messages=MESSAGES,
                stream=stream,
                extra_headers={"x-stainless-retry-count": str(retry)},
            )
            replies.append(await whole(answer) if stream else answer)
        assert replies[0] == replies[1]
    assert len(world.engine.requests) == len(world.stored()) == 2


async def test_the_same_request_without_a_retry_mark_is_another_sample(world: Any) -> None:
    client = await world.client()
    for _ in range(3):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert len(world.stored()) == 3
    assert len({s.prompt_ids.tobytes() for s in world.stored()}) == 1


async def test_an_idempotency_key_names_one_call(world: Any) -> None:
    client = await world.client()
    key = {"Idempotency-Key": "k1"}
    one = await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=key)
    two = await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=key)
    assert one.id == two.id
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "else"}], extra_headers=key
        )
    assert len(world.stored()) == 1


async def test_a_retry_of_a_call_that_failed_samples_anew(world: Any) -> None:
    client = await world.client(max_retries=1)
    world.say("", close=False, finish="stop")  # no token at all: the engine is at fault
    world.say("now")
    reply = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert reply.choices[0].message.content == "now"
    assert [s.step_index for s in world.stored()] == [0]


# -- clients that go away --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_generation(worlds: Any, stream: bool) -> None:
    world = await worlds()
    gate = asyncio.Event()
    world.say("never finished", gate=gate)
    body = {"model": "m", "messages": MESSAGES, "stream": stream}
    async with aiohttp.ClientSession() as session:
        url = f"{world.base_url()}/v1/chat/completions"
        if stream:
            async with session.post(url, json=body) as response:
                await response.content.readany()
                response.close()
        else:
            asking = asyncio.create_task(session.post(url, json=body))
            await world.engine.arrived.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: len(world.engine.aborts) == 1)
    assert world.engine.aborts == [world.engine.requests[0]["rid"]]
    gate.set()
    await until(lambda: not any(t.in_flight for t in world.gateway.trajectories))
    assert world.stored() == []
    assert world.gateway.calls.counts["disconnected"] == 1


async def test_a_client_that_goes_away_during_the_commit_loses_nothing(world: Any) -> None:
    client = await world.client()
    world.port.door.clear()
    call = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.port.waiting.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    retry = asyncio.create_task(
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
        )
    )
    await until(lambda: world.gateway.calls.counts["retries"] == 1)
    world.port.door.set()
    await retry
    assert len(world.engine.requests) == len(world.stored()) == 1


# -- the engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_weight_update_in_the_middle_is_invisible_and_recorded(
    world: Any, stream: bool
) -> None:
    client = await world.client()
    whole = world.ids("one two three four")
    parts = [whole[:2], [], whole[2:5], whole[5:]]
    for i, part in enumerate(parts):
        finish = "stop" if i == 3 else "abort"
        said = world.say("", close=False, finish=finish, version=str(3 + i))
        said.ids = part
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=stream, max_tokens=50
    )
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in answer])
    else:
        text = answer.choices[0].message.content
    assert text == "one two three four"
    [step] = world.stored()
    assert step.response_ids.tolist() == whole
    assert [(s.version, s.start, s.end) for s in step.version_spans] == [
        (3, 0, 2),
        (5, 2, 5),
        (6, 5, len(whole)),
    ]
    assert step.policy_version == 3
    prompts = [r["input_ids"] for r in world.engine.requests]
    assert [len(p) - len(prompts[0]) for p in prompts] == [0, 2, 2, 5]
    assert prompts[3] == prompts[0] + whole[:5]
    limits = [r["sampling_params"]["max_new_tokens"] for r in world.engine.requests]
    assert limits == [50, 48, 48, 45]
    world.check_exact()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_a_weight_update_still_ends_the_response(
    world: Any, stream: bool
) -> None:
    client = await world.client()
    before, after = world.ids("act\nObser", close=False), world.ids("vation: made up", close=False)
    world.say("", close=False, finish="abort", version="1").ids = before
    world.say("", close=False, finish="length", version="2").ids = after
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, stop=["Observation:"], stream=stream, max_tokens=200
    )
    if stream:
        chunks = [c async for c in answer]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("act\n", "stop")
    [step] = world.stored()
    assert world.tokenizer.decode(step.response_ids.tolist()) == "act\nObservation:"
    n = len(step.response_ids)
    assert [(s.version, s.start, s.end) for s in step.version_spans] == [
        (1, 0, len(before)),
        (2, len(before), n),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_ends_at_the_first_stop_string_though_the_engine_met_a_later_one(
    world: Any, stream: bool
) -> None:
    world.say("act\nObser", close=False, finish="abort")
    world.say("vation: made up\nObservation:", close=False, matched="Observation:")
    client = await world.client()
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, stop=["Observation:"], stream=stream
    )
    text = (await whole(answer))[1] if stream else answer.choices[0].message.content
    assert text == "act\n"
    [step] = world.stored()
    assert world.tokenizer.decode(step.response_ids.tolist()) == "act\nObservation:"


async def test_streamed_log_probs_end_where_the_step_does(world: Any) -> None:
    said = '<tool_call>\n{"name": "calc", "arguments": {"x": "Obser'
    world.say(said, close=False, finish="abort")
    world.say("vation: made up")
    client = await world.client()
    stream = await client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        tools=[TOOL],
        stop=["Observation:"],
        stream=True,
        logprobs=True,
    )
    told = [c.choices[0].logprobs async for c in stream]
    [step] = world.stored()
    assert sum(len(each.content) for each in told if each) == len(step.response_ids)


async def test_an_abort_at_the_token_limit_ends_with_length(world: Any) -> None:
    client = await world.client()
    said = world.say("", close=False, finish="abort")
    said.ids = world.ids("abcd", close=False)[:3]
    reply = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert len(world.engine.requests) == 1


async def test_version_spans_of_an_update_in_place_are_kept(world: Any) -> None:
    client = await world.client()
    said = world.say("some words here", version="8")
    n = len(said.ids)
    said.versions = [("default", 0, 2), ("8", 2, n)]
    await client.chat.completions.create(model="m", messages=MESSAGES)
    [step] = world.stored()
    assert [(s.version, s.start, s.end) for s in step.version_spans] == [(0, 0, 2), (8, 2, n)]
    assert step.policy_version == 0


async def test_a_single_version_needs_no_spans(world: Any) -> None:
    client = await world.client()
    world.say("fine", version="12")
    await client.chat.completions.create(model="m", messages=MESSAGES)
    [step] = world.stored()
    assert (step.policy_version, step.version_spans) == (12, ())


async def test_an_engine_that_is_busy_for_a_moment_is_asked_again(world: Any) -> None:
    client = await world.client()
    world.say("", status=503)
    world.say("", status=502)
    world.say("there")
    reply = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert reply.choices[0].message.content == "there"
    assert world.gateway.engine.retries == 2


async def test_an_engine_that_stays_away_answers_503(worlds: Any) -> None:
    world = await worlds(engine_retries=1, engine_urls=("http://127.0.0.1:9",), context_length=100)
    client = await world.client()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as failure:
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
        assert failure.value.status_code == 503
        assert "gateway.engine_retries" in failure.value.message
    assert world.stored() == []


LONG = "word " * 20_000


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"context_length": 100}, {"messages": [{"role": "user", "content": LONG}]}),
        ({"context_length": 100}, {"messages": [{"role": "user", "content": "word " * 100}]}),
        ({"context_length": 100}, {"messages": [{"role": "user", "content": LONG}], "n": 3}),
        (
            {"context_length": 100},
            {"messages": [{"role": "user", "content": LONG}], "stream": True},
        ),
        ({"context_length": 100}, {"prompt": LONG}),
        (
            {"context_length": 100},
            {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "content": "of another model"},
                    {"role": "user", "content": LONG},
                ]
            },
        ),
        ({"engine_urls": ("http://127.0.0.1:9",)}, {"messages": MESSAGES}),
        ({"family": "no_tools"}, {"messages": MESSAGES, "tools": [TOOL]}),
        ({"pool": "away"}, {"messages": MESSAGES}),
        ({"pool": "away"}, {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}),
    ],
)
@pytest.mark.parametrize("under", ["/t/p", ""])
async def test_a_call_that_is_refused_opens_nothing(
    worlds: Any, options: dict[str, Any], body: dict[str, Any], under: str
) -> None:
    world = await worlds(**{k: v for k, v in options.items() if k != "pool"})
    resume = world.pool.resume_trajectory
    if "pool" in options:

        async def away(*_: Any, **__: Any) -> Any:
            raise ConnectionError("away")

        world.pool.resume_trajectory = away
    url = f"{world.url}{under}/v1/{'completions' if 'prompt' in body else 'chat/completions'}"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as response:
            assert response.status in (400, 503)
        async with session.get(f"{world.url}/statistics") as response:
            assert (await response.json())["open_trajectories"] == 0
        assert not (await world.pool.list_trajectories("train")).items
        # What was refused took nothing away.
        world.pool.resume_trajectory = resume
        if "engine_urls" not in options:
            ok = {"messages": MESSAGES}
            async with session.post(f"{world.url}/t/p/v1/chat/completions", json=ok) as response:
                assert response.status == 200


async def test_a_refused_call_leaves_the_trajectory_to_the_calls_beside_it(worlds: Any) -> None:
    world = await worlds(context_length=100)
    gate = asyncio.Event()
    world.say("first", gate=gate)
    client = await world.client()
    first = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.engine.arrived.wait()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": LONG}]
        )
    gate.set()
    assert (await first).choices[0].message.content == "first"
    await client.chat.completions.create(model="m", messages=MESSAGES)
    assert [s.step_index for s in world.stored("t1")] == [0, 1]


WHERE = "http://10.1.2.3:30000 (10.1.2.3:30000) died in /usr/lib/python3/sglang/server.py, line 7"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, {"status": 400}),
        ({}, {"status": 500}),
        ({"engine_retries": 0}, {"status": 503}),
        ({}, {"version": WHERE}),
        (
            {"engine_retries": 0, "context_length": 100, "engine_urls": ("http://127.0.0.1:9",)},
            None,
        ),
        ({"engine_urls": ("http://127.0.0.1:9",)}, None),
        ({"pool": "away"}, None),
    ],
)
async def test_an_error_tells_agents_no_address_and_no_path_but_the_log_all(
    worlds: Any,
    options: dict[str, Any],
    answer: dict[str, Any] | None,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool_is_away = options.get("pool") == "away"
    world = await worlds(**{k: v for k, v in options.items() if k != "pool"})
    if answer is not None:
        world.say("one two three", **({"words": WHERE} | answer))
    if pool_is_away:

        async def away(*_: Any, **__: Any) -> Any:
            raise ConnectionError(WHERE)

        world.pool.resume_trajectory = away
    client = await world.client()

    async def ask() -> None:
        got = await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
        _ = [c async for c in got] if stream else []

    with pytest.raises(openai.APIError) as failure:
        await ask()
    told = failure.value.message
    for secret in ("127.0.0.1", "10.1.2.3", "30000", "/usr/lib", "http://", "localhost"):
        assert secret not in told
    if answer is None or answer.get("status") != 400:
        assert "10.1.2.3" in caplog.text or "127.0.0.1" in caplog.text


async def test_another_engine_takes_over_and_trajectories_are_sticky(worlds: Any) -> None:
    world = await worlds(engines=3)
    homes: list[list[int]] = []
    # Ports are random, and so is the engine that a name's hash picks: names come until two differ.
    for i in range(200):
        client = await world.client(f"t{i}")
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        homes.append([len(e.requests) for e in world.engines])
        for e in world.engines:
            e.requests.clear()
        assert sorted(homes[-1]) == [0, 0, 2]
        if homes[-1] != homes[0]:
            break
    assert homes[-1] != homes[0]
    client = await world.client("t0")
    home = world.engines[homes[0].index(2)]
    home.script.append(home.default({}))
    home.script[0].status = 503
    await client.chat.completions.create(model="m", messages=MESSAGES)
    assert sum(len(e.requests) for e in world.engines if e is not home) == 1


async def test_a_stream_that_breaks_off_is_an_error_and_no_step(world: Any) -> None:
    client = await world.client()
    world.say("one two three four", drop_after=2)
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="broke off") as failure:
        _ = [c async for c in stream]
    assert "http://" not in failure.value.message
    assert world.stored() == []


async def test_an_engine_that_streams_increments_is_understood(world: Any) -> None:
    world.engine.incremental = True
    client = await world.client()
    said = world.say("one two three four five")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == "one two three four five"
    assert world.stored()[0].response_ids.tolist() == said.ids
    world.check_exact()


async def test_an_engine_that_ends_its_lines_with_crlf_is_understood(world: Any) -> None:
    world.engine.line_end = b"\r\n"
    client = await world.client()
    said = world.say("one two three four five")
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == "one two three four five"
    assert world.stored()[0].response_ids.tolist() == said.ids
    world.check_exact()


async def test_a_call_that_takes_too_long_answers_504_and_is_aborted(worlds: Any) -> None:
    world = await worlds(request_timeout_s=0.1)
    client = await world.client()
    gate = asyncio.Event()
    world.say("late", gate=gate)
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert failure.value.status_code == 504
    await until(lambda: len(world.engine.aborts) == 1)
    gate.set()


async def test_a_version_that_is_no_number_is_an_error_that_says_so(world: Any) -> None:
    client = await world.client()
    world.say("x", version="v1.2-beta")
    with pytest.raises(openai.InternalServerError, match="publish decimal integers"):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert world.stored() == []


async def test_a_version_that_no_step_can_hold_is_the_engines_error(world: Any) -> None:
    client = await world.client()
    world.say("x", version=str(2**63))
    with pytest.raises(openai.InternalServerError, match="publish decimal integers") as failure:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert failure.value.status_code == 502
    assert world.stored() == []


async def test_a_request_that_the_server_gives_up_while_its_step_is_stored_loses_nothing(
    world: Any,
) -> None:
    client = await world.client()
    world.port.door.clear()
    call = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.port.waiting.wait()
    (trajectory,) = world.gateway.trajectories
    (live,) = trajectory.in_flight
    live.task.cancel()  # as uvicorn does with what outlasts its grace
    with pytest.raises(openai.APIError):
        await call
    world.port.door.set()
    await until(lambda: not trajectory.in_flight)
    assert [s.step_index for s in world.stored()] == [0]
    again = await client.chat.completions.create(
        model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
    )
    assert again.choices[0].message.content == "fine"
    assert len(world.engine.requests) == len(world.stored()) == 1


async def test_a_call_that_is_cut_off_before_it_began_is_made_again(world: Any) -> None:
    """A stream's client leaves in the moment in which the call's own task would begin."""
    client = await world.client()
    await client.chat.completions.create(model="m", messages=MESSAGES)
    trajectory = world.gateway.trajectories.known("t1")
    calls, retry = world.gateway.calls, RetryKey("test/k", "k", False)
    request = ChatRequest([{"role": "user", "content": "go"}], stream=True)
    for begins in (False, True):
        begun = await calls.start([request], [trajectory], retry, "test", caller=OPERATOR)
        if begins:
            calls.go_on(trajectory, *begun)
        calls.leave(trajectory, *begun, "its client")
        await begun[0].wait()
        assert begun[0].state == "failed"
        assert not trajectory.in_flight
    (live,) = await calls.start([request], [trajectory], retry, "test", caller=OPERATOR)
    assert (await calls.result(trajectory, live)).text.content == "fine"
    calls.leave(trajectory, live, "its client")
    assert len(world.stored()) == 2


async def test_an_idle_stream_is_kept_alive(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(keepalive_s=0.05))
    gate = asyncio.Event()
    world.say("x", close=False, gate=gate, finish="length")
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.base_url()}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200
        seen = b""
        while seen.count(b": keep-alive") < 2:
            seen += await response.content.readany()
        gate.set()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    frames = [f for f in (seen + rest).split(b"\n\n") if f.startswith(b"data: {")]
    assert json.loads(frames[-1][6:])["choices"][0]["finish_reason"] == "length"


async def test_a_body_that_is_too_large_answers_413(worlds: Any) -> None:
    world = await worlds(max_body_bytes=2000)
    client = await world.client()
    with pytest.raises(openai.APIStatusError) as refusal:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 3000}]
        )
    assert refusal.value.status_code == 413
    assert "gateway.max_body_bytes" in refusal.value.message


async def test_a_retry_that_waits_while_its_step_is_found_in_the_pool_stores_no_second(
    world: Any,
) -> None:
    client = await world.client()
    world.port.failures = ["after"]
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    world.port.door.clear()
    world.port.waiting.clear()
    other: list[Any] = [{"role": "user", "content": "another"}]
    commit = asyncio.create_task(client.chat.completions.create(model="m", messages=other))
    await world.port.waiting.wait()
    retry = asyncio.create_task(
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
        )
    )
    (trajectory,) = world.gateway.trajectories
    await until(lambda: [c.state for c in trajectory.in_flight] == ["committing"] * 2)
    world.port.door.set()
    assert (await retry).choices[0].message.content == "fine"
    await commit
    assert [s.step_index for s in world.stored()] == [0, 1]
    assert len(world.engine.requests) == 2
    world.check_exact()


async def test_of_several_commits_lost_at_one_index_the_stored_one_is_found(world: Any) -> None:
    client = await world.client()
    world.port.failures = ["before", "after", "before"]
    for text in ("a", "b", "c"):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}]
            )
    await client.chat.completions.create(model="m", messages=MESSAGES)
    assert [s.step_index for s in world.stored()] == [0, 1]
    replies = {}
    for text in ("a", "b", "c"):
        replies[text] = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": text}],
            extra_headers={"x-stainless-retry-count": "1"},
        )
    assert [s.step_index for s in world.stored()] == [0, 1, 2, 3]
    assert len(world.engine.requests) == 4  # nothing was sampled twice
    # "b" was the one in the pool already, and the graph knows it under its index.
    content = replies["b"].choices[0].message.content
    await client.chat.completions.create(
        model="m",
        messages=[
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "more"},
        ],
    )
    assert world.stored()[-1].parent_index == 0
    world.check_exact()


async def test_a_retry_of_one_failed_sample_is_not_given_another_sample(world: Any) -> None:
    client = await world.client()
    world.say("kept")
    await client.chat.completions.create(model="m", messages=MESSAGES)
    world.say("", status=500)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    world.say("another")
    reply = await client.chat.completions.create(
        model="m", messages=MESSAGES, extra_headers={"x-stainless-retry-count": "1"}
    )
    assert reply.choices[0].message.content == "another"
    assert len(world.stored()) == 2


async def test_a_retry_gets_the_reply_that_nobody_got_though_a_try_before_it_had_failed(
    world: Any,
) -> None:
    client = await world.client()
    world.say("", status=500)
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=MESSAGES)
    world.say("one")
    world.port.door.clear()
    call = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
    await world.port.waiting.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    world.port.door.set()
    await until(lambda: len(world.stored()) == 1)
    retry = {"x-stainless-retry-count": "1"}
    reply = await client.chat.completions.create(model="m", messages=MESSAGES, extra_headers=retry)
    assert reply.choices[0].message.content == "one"
    assert len(world.stored()) == 1


async def test_log_probs_of_other_tokens_are_refused(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await world.client()
    said = world.say("fine")
    honest = said.chunk

    def lying(n: int, **how: Any) -> Any:
        chunk = honest(n, **how)
        chunk["meta_info"]["output_token_logprobs"][0][1] += 1
        return chunk

    said.chunk = lying
    for stream in (False, True):
        world.engine.script[:] = [said]
        with pytest.raises(openai.APIError, match="other tokens than output_ids"):
            await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
    assert world.stored() == []


# -- an engine that answers nonsense -----------------------------------------------------------


@dataclass
class Nonsense(Sampled):
    """An answer with one thing changed, by its place."""

    place: str = ""
    value: Any = None

    def chunk(self, n: int, *, final: bool, n_prompt: int) -> dict[str, Any]:
        chunk = super().chunk(n, final=final, n_prompt=n_prompt)
        meta, ids = chunk["meta_info"], chunk["output_ids"]
        if self.place == "id":
            ids[-1] = meta["output_token_logprobs"][-1][1] = self.value
        elif self.place == "log_prob":
            meta["output_token_logprobs"][-1][0] = self.value
        elif self.place == "version":
            meta.pop("weight_versions", None)
            meta["weight_version"] = self.value
        elif self.place == "span" and final:
            meta["weight_versions"][-1]["end"] = self.value
        elif self.place == "length":
            chunk["output_ids"] = [*ids, *[5] * self.value]
            meta["output_token_logprobs"] += [[log_prob(5), 5, None]] * self.value
            meta["completion_tokens"] += self.value
        return chunk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("id", 10**6, "token id"),
        ("id", 2**40, "token id"),
        ("id", -1, "token id"),
        ("id", 3.5, "output_ids"),
        ("id", 3.0, "output_ids"),
        ("id", True, "output_ids"),
        ("id", "3", "output_ids"),
        ("id", None, "output_ids"),
        ("log_prob", "-0.5", "output_token_logprobs"),
        ("log_prob", None, "output_token_logprobs"),
        ("log_prob", 0.7, "log-prob"),
        ("log_prob", -1e300, "log-prob"),
        ("version", 3.5, "weight_version"),
        ("version", "-1", "weight_version"),
        ("version", True, "weight_version"),
        ("span", 3.0, "weight_versions"),
        ("length", 3800, "for max_new_tokens 30"),
    ],
)
async def test_what_is_no_sample_of_the_model_is_refused_and_nothing_is_stored(
    world: Any, stream: bool, place: str, value: Any, words: str
) -> None:
    nonsense = Nonsense([5, 6, 7], place=place, value=value)
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 30, "logprobs": True}
    world.engine.script.append(nonsense)
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{world.base_url()}/v1/chat/completions", json={**body, "stream": stream}
        ) as answer,
    ):
        said = await answer.text()
        assert answer.status == 502 or (stream and place == "span"), said
    assert '"code":"engine_error"' in said
    assert words in said
    assert world.stored() == []
    client = await world.client()
    got = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert got.choices[0].message.content == "fine"
    assert len(world.stored()) == 1


async def test_a_bug_is_logged_and_told_in_the_dialects_shape(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(world.gateway.identities, "identify", broken)
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES}
    url = f"{world.url}/v1/messages"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 500
        error = (await answer.json())["error"]
    assert error["type"] == "api_error"
    assert error["message"] == "the gateway failed (ZeroDivisionError); see its log"
    assert any(r.exc_info and "/v1/messages failed" in r.message for r in caplog.records)
