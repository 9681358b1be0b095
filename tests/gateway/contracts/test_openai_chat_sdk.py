"""Chat completions through the unmodified OpenAI SDK, over HTTP, several turns with tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.conftest import Sampled
from tests.gateway.contracts.dialogue import (
    EXPRESSION,
    REPLIES,
    THOUGHT,
    TOOL_NAMES,
    check_one_branch,
)

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {**EXPRESSION, "additionalProperties": False},
            "strict": True,
        },
    }
    for name, about in TOOL_NAMES
]


async def ask(client: openai.AsyncOpenAI, mode: str, **body: Any) -> Any:
    if mode == "create":
        return (await client.chat.completions.create(model="m", **body)).choices[0].message
    if mode == "parse":
        return (await client.chat.completions.parse(model="m", **body)).choices[0].message
    seen = ""
    async with client.chat.completions.stream(model="m", **body) as events:
        async for event in events:
            if event.type == "content.delta":
                seen += event.delta
                assert event.snapshot == seen
        final = await events.get_final_completion()
    assert seen == (final.choices[0].message.content or "")
    return final.choices[0].message


@pytest.mark.parametrize("family", ["qwen3", "chatml"])
@pytest.mark.parametrize("mode", ["create", "parse", "stream"])
async def test_a_conversation_with_parallel_tool_calls_is_one_branch(
    worlds: Any, mode: str, family: str
) -> None:
    world = await worlds(family)
    client = await world.client()
    thought = THOUGHT if family == "qwen3" else ""
    for text in REPLIES:
        world.say(text.replace(THOUGHT, thought))
    messages: list[Any] = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "text", "text": "What is (1 + 2) * three?"}]},
    ]
    contents = []
    for question in (None, "Thanks!"):
        if question is not None:
            messages.append({"role": "user", "content": question})
        while True:
            message = await ask(client, mode, messages=messages, tools=TOOLS)
            contents.append(message.content)
            messages.append(message if mode == "create" else message.model_dump())
            if not message.tool_calls:
                break
            for made in message.tool_calls:
                name, arguments = made.function.name, json.loads(made.function.arguments)
                result = f"{name}: {arguments['expression']}"
                messages.append({"role": "tool", "tool_call_id": made.id, "content": result})
    assert [(c or "").strip() for c in contents] == [
        "I need both.",
        "",
        "It is 9.",
        "You are welcome 🙂",
    ]
    check_one_branch(world, 4)
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert last.count("<tool_response>") == 3
    assert last.count("Which one?") == (3 if thought else 0)


class Answer(BaseModel):
    value: int
    why: str


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pydantic_response_format_is_enforced_and_parsed(world: Any, stream: bool) -> None:
    client = await world.client()
    messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    for value in (3, 4):
        world.say(json.dumps({"value": value, "why": "so"}))
        if stream:
            async with client.chat.completions.stream(
                model="m", messages=messages, response_format=Answer
            ) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            reply = await client.chat.completions.parse(
                model="m", messages=messages, response_format=Answer
            )
            message = reply.choices[0].message
        assert message.parsed == Answer(value=value, why="so")
        schema = json.loads(world.engine.requests[-1]["sampling_params"]["json_schema"])
        assert set(schema["properties"]) == {"value", "why"}
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": "And one more?"},
        ]
    check_one_branch(world, 2)


async def test_a_required_call_is_parsed_into_its_model(world: Any) -> None:
    client = await world.client()
    world.say(' {"value": 3, "why": "so"}}\n</tool_call>')
    reply = await client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "1 + 2?"}],
        tools=[openai.pydantic_function_tool(Answer)],
        tool_choice={"type": "function", "function": {"name": "Answer"}},
    )
    [made] = reply.choices[0].message.tool_calls
    assert made.function.parsed_arguments == Answer(value=3, why="so")
    world.check_exact()


async def test_samples_with_log_probs_stream_into_the_sdks_accumulator(world: Any) -> None:
    client = await world.client()
    texts = ["one", "two 🦊", "three and more"]
    for text in texts:
        world.say(text)
    async with client.chat.completions.stream(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        n=3,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as events:
        final = await events.get_final_completion()
    assert sorted(c.message.content for c in final.choices) == sorted(texts)
    for choice in final.choices:
        raw = b"".join(bytes(e.bytes) for e in choice.logprobs.content)
        assert raw.decode() == choice.message.content + "<|im_end|>"
    n_sampled = sum(len(s.response_ids) for s in world.stored())
    assert final.usage.completion_tokens == n_sampled
    world.check_exact()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_sdk_retry_is_one_step(worlds: Any, stream: bool) -> None:
    """The first try ends in a 503: no engine, or a pool whose answer was lost."""
    world = await worlds(engine_retries=0)
    for i, broken in enumerate(("engine", "pool")):
        client = await world.client(f"t-{broken}", max_retries=2)
        if broken == "engine":
            world.engine.script.append(Sampled([], status=503))
        elif stream:
            continue  # the stream has begun by then; what a client does is its own affair
        else:
            world.port.failures = ["after"]
        world.say(f"answer {i}")
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(**body, stream=True)]
            content = "".join(c.choices[0].delta.content or "" for c in chunks)
        else:
            content = (await client.chat.completions.create(**body)).choices[0].message.content
        assert content == f"answer {i}"
        [step] = world.stored(f"t-{broken}")
        assert world.tokenizer.decode(step.response_ids.tolist()) == f"answer {i}<|im_end|>"
    world.check_exact()


async def test_a_client_that_gives_up_on_a_stream_aborts_its_generation(world: Any) -> None:
    client = await world.client()
    gate = asyncio.Event()
    world.say("one two three", gate=gate)
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    for _ in range(200):
        if world.engine.aborts:
            break
        await asyncio.sleep(0.01)
    assert len(world.engine.aborts) == 1
    assert world.stored() == []


async def test_errors_are_the_sdks_own(world: Any) -> None:
    client = await world.client()
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], logit_bias={"1": 2}
        )
    assert (bad.value.param, bad.value.type) == ("logit_bias", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="m", input="x")
