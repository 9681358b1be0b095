"""The Responses API through the unmodified OpenAI SDK, over HTTP, several turns with tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.gateway.contracts.dialogue import EXPRESSION, REPLIES, TOOL_NAMES, call, check_one_branch

TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "description": about,
        "parameters": {**EXPRESSION, "additionalProperties": False},
        "strict": True,
    }
    for name, about in TOOL_NAMES
]


def outputs(response: Response) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name} says 3"}
        for item in response.output
        if item.type == "function_call"
    ]


async def ask(client: openai.AsyncOpenAI, stream: bool, **body: Any) -> Response:
    if not stream:
        response: Response = await client.responses.create(model="m", **body)
        return response
    async with client.responses.stream(model="m", **body) as events:
        seen = ""
        async for event in events:
            if event.type == "response.output_text.delta":
                seen += event.delta
                assert event.snapshot == seen[-len(event.snapshot) :]
        final: Response = await events.get_final_response()
    assert seen == final.output_text
    return final


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["stateless", "previous_response_id"])
async def test_a_conversation_with_tools_is_one_branch(
    worlds: Any, mode: str, stream: bool
) -> None:
    world = await worlds("qwen3")
    client = await world.client()
    history: list[Any] = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": "What is it?"},
    ]
    new, previous = list(history), None
    for text in REPLIES:
        world.say(text)
        if mode == "stateless":
            asked: Any = {
                "input": history,
                "store": False,
                "include": ["reasoning.encrypted_content"],
            }
        else:
            asked = {"input": new, "previous_response_id": previous}
        response = await ask(client, stream, tools=TOOLS, **asked)
        assert response.output[0].type == "reasoning"
        previous = response.id
        new = outputs(response) or [{"role": "user", "content": "Thanks!"}]
        history += [*response.output, *new]
    assert response.output_text == "You are welcome 🙂"
    check_one_branch(world, 4)


async def test_structured_output_is_parsed(world: Any) -> None:
    class Answer(BaseModel):
        value: int
        why: str

    client = await world.client()
    world.say('{"value": 3, "why": "1 + 2"}')
    got = await client.responses.parse(model="m", input="1 + 2?", text_format=Answer)
    assert got.output_parsed == Answer(value=3, why="1 + 2")
    sent = world.engine.requests[0]["sampling_params"]["json_schema"]
    assert json.loads(sent)["required"] == ["value", "why"]
    world.say('{"value": 4, "why": "2 + 2"}')
    async with client.responses.stream(model="m", input="2 + 2?", text_format=Answer) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Answer(value=4, why="2 + 2")


async def test_arguments_of_strict_tools_are_parsed(world: Any) -> None:
    class Calculator(BaseModel):
        expression: str

    client = await world.client()
    world.say(call("Calculator", expression="1"))
    tool: Any = openai.pydantic_function_tool(Calculator)
    got = await client.responses.parse(model="m", input="1?", tools=[tool])
    assert got.output[0].parsed_arguments == Calculator(expression="1")


async def test_stored_responses_are_read_and_deleted(world: Any) -> None:
    client = await world.client()
    made = await client.responses.create(model="m", input="hi")
    got = await client.responses.retrieve(made.id)
    assert got == made
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as e:
        await client.responses.create(model="m", input="x", previous_response_id=made.id)
    assert e.value.code == "previous_response_not_found"


async def test_a_stream_that_fails_raises(worlds: Any) -> None:
    world = await worlds(engine_retries=0)
    client = await world.client()
    world.say("one two three four", drop_after=2)
    stream = await client.responses.create(model="m", input="hi", stream=True)
    with pytest.raises(openai.APIError) as e:
        [event async for event in stream]
    assert e.value.code in ("engine_unavailable", "engine_error")
    assert not world.stored()


async def test_what_cannot_be_honoured_is_a_bad_request(world: Any) -> None:
    client = await world.client()
    with pytest.raises(openai.BadRequestError) as e:
        await client.responses.create(model="m", input="hi", background=True)
    assert e.value.param == "background"
    raw = await client.responses.with_raw_response.create(
        model="m", input="hi", tools=[{"type": "web_search"}]
    )
    assert raw.headers["x-stepwell-ignored"] == "tools[0]=web_search"


async def test_a_conversation_goes_on_from_its_compaction(worlds: Any) -> None:
    """The output of `compact` is the input of the next response, as the SDK's own users do it."""
    world = await worlds("qwen3")
    client = await world.client()
    world.say("It is 3 lines long.")
    said: Any = [{"role": "user", "content": "How long is it?"}]
    compacted = await client.responses.compact(model="m", input=said)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.object == "response.compaction"
    world.say("3.")
    items: Any = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    last: Any = {"role": "user", "content": "Say it."}
    response = await client.responses.create(model="m", input=[*items, last])
    assert response.output_text == "3."
    prompt = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert "How long is it?" in prompt
    assert "It is 3 lines long." in prompt
    world.check_exact()
