"""The gateway behind an unmodified pydantic-ai `Agent`, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.gateway.contracts.dialogue import REPLIES as DIALOGUE
from tests.gateway.contracts.dialogue import THOUGHT, call, check_one_branch

REPLIES = [*DIALOGUE[:3], THOUGHT + call("lookup", expression="thanks"), DIALOGUE[3]]


def agent(world: Any, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=f"{world.base_url()}/v1", api_key="none")
    made: Agent[None, Any] = Agent(OpenAIChatModel("m", provider=provider), **options)
    return made


def with_tools(made: Agent[None, Any]) -> Agent[None, Any]:
    @made.tool_plain
    def calculator(expression: str) -> str:
        """Adds."""
        return f"calculator: {expression}"

    @made.tool_plain
    def lookup(expression: str) -> str:
        """Looks it up."""
        return f"lookup: {expression}"

    return made


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_tools_over_two_runs_is_one_branch(worlds: Any, stream: bool) -> None:
    world = await worlds("qwen3")
    for text in REPLIES:
        world.say(text)
    made = with_tools(agent(world, instructions="Use tools."))
    history: Any = None
    outputs = []
    heard: list[Any] = []

    async def listen(context: Any, events: Any) -> None:
        heard.extend([event async for event in events])

    for question in ("(1 + 2) * three?", "Thanks!"):
        result = await made.run(
            question, message_history=history, event_stream_handler=listen if stream else None
        )
        outputs.append(result.output)
        history = result.all_messages()
    assert [o.strip() for o in outputs] == ["It is 9.", "You are welcome 🙂"]
    check_one_branch(world, 5)
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert last.count("<tool_response>") == 4
    assert last.count("Which one?") == 4
    assert len([e for e in heard if e.event_kind == "part_delta"]) >= 10 * stream


async def test_streamed_text_adds_up_to_the_output(world: Any) -> None:
    world.say("one two three 🦊")
    async with agent(world).run_stream("hi") as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == await run.get_output() == "one two three 🦊"
        history = run.all_messages()
    await agent(world).run("more", message_history=history)
    check_one_branch(world, 2)


class Answer(BaseModel):
    value: int


@pytest.mark.parametrize("how", ["tool", "native"])
async def test_structured_output_is_a_required_call_or_a_format(world: Any, how: str) -> None:
    if how == "tool":
        world.say('final_result", "arguments": {"value": 3}}\n</tool_call>')
        made = agent(world, output_type=ToolOutput(Answer))
    else:
        world.say('{"value": 3}')
        made = agent(world, output_type=NativeOutput(Answer))
    result = await made.run("1 + 2?")
    assert result.output == Answer(value=3)
    [step] = world.stored()
    assert step.metadata.get("forced_tool") == ("" if how == "tool" else None)
    assert step.metadata.get("constraint") == (None if how == "tool" else "json_schema")
    world.check_exact()


async def test_a_reply_that_fails_validation_is_asked_for_again_in_the_same_branch(
    world: Any,
) -> None:
    world.say('final_result", "arguments": {"value": "many"}}\n</tool_call>')
    world.say('final_result", "arguments": {"value": 3}}\n</tool_call>')
    result = await agent(world, output_type=ToolOutput(Answer)).run("1 + 2?")
    assert result.output == Answer(value=3)
    check_one_branch(world, 2)


async def test_usage_is_that_of_the_steps(world: Any) -> None:
    world.say("fine")
    result = await agent(world).run("hi")
    [step] = world.stored()
    assert (result.usage.input_tokens, result.usage.output_tokens) == (
        len(step.prompt_ids),
        len(step.response_ids),
    )
