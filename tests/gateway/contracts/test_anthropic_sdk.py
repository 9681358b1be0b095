"""The unmodified `anthropic` SDK against the gateway over real HTTP: nothing but its base URL says
that this is not Anthropic's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import ToolParam
from pydantic import BaseModel

from stepwell.gateway.config import Tuning
from tests.gateway.conftest import World

CALC: ToolParam = {
    "name": "calc",
    "description": "Calculates.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
HI: list[Any] = [{"role": "user", "content": "What is 1 + 2 + 4?"}]
THOUGHT = "<think>\nhm 東京\n</think>\n\n"

Connect = Callable[..., Awaitable[AsyncAnthropic]]


@pytest.fixture
async def qwen(worlds: Callable[..., Any]) -> World:
    world: World = await worlds(family="qwen3")
    return world


async def connect(world: World, uid: str = "t1", **options: Any) -> AsyncAnthropic:
    return await world.clients.enter_async_context(
        AsyncAnthropic(
            base_url=options.pop("base_url", world.base_url(uid)),
            **{"api_key": "none", "max_retries": 0, **options},
        )
    )


def call_text(expression: str) -> str:
    call = {"name": "calc", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def check_one_branch(world: World, n: int) -> None:
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, *range(n - 1)]
    world.check_exact()


async def test_create(world: World) -> None:
    client = await connect(world)
    world.say("naïve 東京 🦊")
    message = await client.messages.create(
        model="claude-any",
        max_tokens=100,
        messages=HI,
        system="Be kind.",
        extra_body={"temperature": 0.7},
    )
    assert message.content[0].type == "text"
    assert message.content[0].text == "naïve 東京 🦊"
    assert message.stop_reason == "end_turn"
    (step,) = world.stored()
    assert message.usage.input_tokens == len(step.prompt_ids)
    assert message.usage.output_tokens == len(step.response_ids)
    assert step.metadata["sampling_params"]["temperature"] == 0.7


async def test_stream_and_create_agree(qwen: World) -> None:
    client = await connect(qwen)
    options: dict[str, Any] = {
        "model": "m",
        "max_tokens": 500,
        "messages": HI,
        "tools": [CALC],
        "thinking": {"type": "adaptive"},
    }
    said = THOUGHT + "Let me see." + call_text("1 + 2") + call_text("4")
    qwen.say(said)
    whole = await client.messages.create(**options)
    qwen.say(said)
    texts, thoughts, partial = "", "", ""
    async with client.messages.stream(**options) as stream:
        async for event in stream:
            if event.type == "text":
                texts += event.text
            elif event.type == "thinking":
                thoughts += event.thinking
            elif event.type == "input_json":
                partial += event.partial_json
        streamed = await stream.get_final_message()
    assert texts == "Let me see."
    assert thoughts == "\nhm 東京\n"
    assert partial == '{"expression": "1 + 2"}{"expression": "4"}'

    def shown(message: Any) -> Any:
        blocks = [b.model_dump(exclude={"id"}, exclude_none=True) for b in message.content]
        return blocks, message.stop_reason, message.usage.model_dump()

    assert shown(streamed) == shown(whole)
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", ["adaptive", "disabled"])
@pytest.mark.parametrize("beta", [False, True])
async def test_a_tool_loop_of_three_turns_is_one_branch(
    qwen: World, stream: bool, thinking: str, beta: bool
) -> None:
    client = await connect(qwen)
    qwen.say(THOUGHT + call_text("1 + 2"))
    qwen.say(THOUGHT + "And now. " + call_text("3 + 4"))
    qwen.say(THOUGHT + "It is 7.")
    messages = list(HI)
    resource: Any = client.beta.messages if beta else client.messages
    options: dict[str, Any] = {"betas": ["interleaved-thinking-2025-05-14"]} if beta else {}
    if beta:
        options["context_management"] = {
            "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
        }
    for turn in range(3):
        arguments: dict[str, Any] = {
            "model": "m",
            # The SDK itself refuses more without a stream.
            "max_tokens": 32000 if stream else 8000,
            "messages": messages,
            "tools": [CALC],
            "system": [
                {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
            ],
            "thinking": {"type": thinking},
            **options,
        }
        if stream:
            async with resource.stream(**arguments) as events:
                message = await events.get_final_message()
        else:
            message = await resource.create(**arguments)
        calls = [b for b in message.content if b.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if turn < 2 else "end_turn")
        messages.append({"role": "assistant", "content": message.content})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "7"} for c in calls]
        messages.append({"role": "user", "content": results})
    assert message.content[-1].text == "It is 7."
    check_one_branch(qwen, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_tool_runner_is_one_branch(qwen: World, stream: bool) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def calc(expression: str) -> str:
        """Calculates."""
        asked.append(expression)
        if expression == "bad":
            raise ValueError("no such thing")
        return "7"

    client = await connect(qwen)
    qwen.say(THOUGHT + call_text("1 + 2"))
    qwen.say(THOUGHT + call_text("bad") + call_text("4"))
    qwen.say(THOUGHT + "It is 7.")
    runner: Any = client.beta.messages.tool_runner(
        model="m",
        max_tokens=500,
        messages=HI,
        tools=[calc],
        thinking={"type": "adaptive"},
        stream=stream,
    )
    if stream:
        async for events in runner:
            final = await events.get_final_message()
    else:
        final = await runner.until_done()
    assert final.content[-1].text == "It is 7."
    assert asked == ["1 + 2", "bad", "4"]
    check_one_branch(qwen, 3)


async def test_structured_output(world: World) -> None:
    class Sum(BaseModel):
        total: int

    client = await connect(world)
    world.say('{"total": 7}')
    parsed = await client.messages.parse(model="m", max_tokens=100, messages=HI, output_format=Sum)
    assert parsed.parsed_output == Sum(total=7)
    schema = json.loads(world.engine.requests[-1]["sampling_params"]["json_schema"])
    assert schema["properties"]["total"]["type"] == "integer"


async def test_stop_sequence_and_prefill(world: World) -> None:
    client = await connect(world)
    world.say(" B)", close=False, matched=")")
    message = await client.messages.create(
        model="m",
        max_tokens=10,
        messages=[*HI, {"role": "assistant", "content": "The answer is ("}],
        stop_sequences=[")"],
    )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == ")"
    assert message.content[0].type == "text"
    assert message.content[0].text == " B"


async def test_count_tokens(world: World) -> None:
    client = await connect(world)
    counted = await client.messages.count_tokens(
        model="m", messages=HI, tools=[CALC], system="Be kind."
    )
    beta = await client.beta.messages.count_tokens(
        model="m", messages=HI, tools=[CALC], system="Be kind.", betas=["x"]
    )
    assert beta.input_tokens == counted.input_tokens
    assert world.stored() == []
    message = await client.messages.create(
        model="m", max_tokens=100, messages=HI, tools=[CALC], system="Be kind."
    )
    assert message.usage.input_tokens == counted.input_tokens


async def test_the_served_model_has_what_the_sdk_says_of_one(worlds: Callable[..., Any]) -> None:
    client = await connect(await worlds(served_model_name="Qwen/Qwen3-4B"))
    page = await client.models.list()
    assert [m async for m in client.models.list()] == page.data
    (model,) = page.data
    assert (model.id, model.display_name, model.type) == ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", "model")
    assert model.created_at.year == 1970
    assert model.max_input_tokens == 4096
    assert (page.has_more, page.first_id, page.last_id) == (False, model.id, model.id)
    assert await client.models.retrieve(model.id) == model
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.models.retrieve("claude-9")
    assert missing.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("credentials", [{"api_key": "k"}, {"api_key": None, "auth_token": "k"}])
async def test_plain_urls_group_calls_by_conversation(world: World, credentials: Any) -> None:
    client = await connect(world, base_url=world.url, **credentials)
    first = await client.messages.create(model="m", max_tokens=100, messages=HI)
    more: list[Any] = [
        *HI,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "go on"},
    ]
    await client.messages.create(model="m", max_tokens=100, messages=more)
    await client.messages.create(
        model="m", max_tokens=100, messages=[{"role": "user", "content": "A title, please."}]
    )
    a, b, c = world.stored()
    assert (a.trajectory_uid, b.parent_index) == (b.trajectory_uid, 0)
    assert c.trajectory_uid != a.trajectory_uid


# -- errors and retries ----------------------------------------------------------------------


async def test_errors_are_the_sdks_exceptions(world: World) -> None:
    client = await connect(world, max_retries=3)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"
    ) as bad:
        await client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}]
        )
    assert bad.value.type == "invalid_request_error"
    await client.messages.create(model="m", max_tokens=9, messages=HI)
    n = len(world.engine.requests)
    elsewhere = await connect(world, base_url=f"{world.url}/t1/other", max_retries=3)
    with pytest.raises(anthropic.ConflictError):
        await elsewhere.messages.create(model="m", max_tokens=9, messages=HI)
    await client.post("/v1/complete_trajectory", body={}, cast_to=object)
    with pytest.raises(anthropic.APIStatusError) as gone:
        await client.messages.create(model="m", max_tokens=9, messages=HI)
    assert gone.value.status_code == 410
    with pytest.raises(anthropic.NotFoundError):
        await client.post("/v1/messages/batches", body={}, cast_to=object)
    assert len(world.engine.requests) == n


async def test_final_refusals_are_not_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await connect(world)).messages.create(model="m", max_tokens=9, messages=HI)
    client = await connect(world, base_url=f"{world.url}/t1/other", max_retries=3)
    slept: list[Any] = []

    async def note(*args: Any, **kwargs: Any) -> None:
        slept.append(args)

    monkeypatch.setattr(client, "_sleep_for_retry", note)
    with pytest.raises(anthropic.ConflictError):
        await client.messages.create(model="m", max_tokens=9, messages=HI)
    assert slept == []


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_the_sdk_after_503_is_one_step(
    world: World, stream: bool, failure: str
) -> None:
    client = await connect(world, max_retries=2)
    world.say("the one and only")
    world.port.failures.append(failure)
    options: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": HI}
    if stream:
        # Only the first event can still become a status; the failure comes behind it.
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with client.messages.stream(**options) as events:
                await events.get_final_message()
        assert cut.value.type == "overloaded_error"
        async with client.messages.stream(**options) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**options)
    assert message.content[0].type == "text"
    assert message.content[0].text == "the one and only"
    assert len(world.engine.requests) == 1
    (step,) = world.stored()
    assert step.metadata["dialect"] == "anthropic_messages"


async def test_an_engine_that_fails_before_the_stream_begins_is_tried_again(
    worlds: Callable[..., Any],
) -> None:
    world: World = await worlds(engine_retries=0)
    client = await connect(world, max_retries=2)
    world.say("x", status=500)
    world.say("yes")
    async with client.messages.stream(model="m", max_tokens=100, messages=HI) as events:
        message = await events.get_final_message()
    assert message.content[0].type == "text"
    assert message.content[0].text == "yes"
    assert len(world.stored()) == 1


async def test_a_stream_that_nothing_comes_on_survives_its_pings(
    worlds: Callable[..., Any],
) -> None:
    world: World = await worlds(tuning=Tuning(keepalive_s=0.01))
    client = await connect(world)
    gate = asyncio.Event()
    world.say("slow", gate=gate)

    async def ask() -> Any:
        async with client.messages.stream(model="m", max_tokens=100, messages=HI) as events:
            return await events.get_final_message()

    asking = asyncio.create_task(ask())
    await world.engine.arrived.wait()
    await asyncio.sleep(0.1)
    gate.set()
    assert (await asking).content[0].text == "slow"
