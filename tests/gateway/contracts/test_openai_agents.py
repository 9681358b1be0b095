"""The unmodified `openai-agents` framework over HTTP: tools, several turns, both its models."""

from __future__ import annotations

from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    handoff,
)
from openai.types.shared import Reasoning

from tests.gateway.contracts.dialogue import THOUGHT, call, check_one_branch

QUIET = RunConfig(tracing_disabled=True)
MODELS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}


@function_tool
def calculator(expression: str) -> str:
    """Adds.

    Args:
        expression: what to add
    """
    return f"{expression} is 3"


@function_tool
async def lookup(word: str) -> str:
    """Looks a word up."""
    return f"{word} is a word"


FIRST = [
    "Both.\n" + call("calculator", expression="1 + 2") + "\n" + call("lookup", word="three"),
    call("calculator", expression="3"),
    "It is 3.",
]
SECOND = [call("lookup", word="bye"), "Bye 🙂"]


async def make_agent(world: Any, api: str, **options: Any) -> Agent[Any]:
    model = MODELS[api](model="m", openai_client=await world.client())
    return Agent(
        **{
            "name": "Helper",
            "instructions": "Use tools.",
            "model": model,
            "tools": [calculator, lookup],
            **options,
        }
    )


async def run(agent: Agent[Any], given: Any, stream: bool, **options: Any) -> Any:
    if not stream:
        return await Runner.run(agent, given, run_config=QUIET, **options)
    result = Runner.run_streamed(agent, given, run_config=QUIET, **options)
    seen = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            seen += event.data.delta
    assert seen.endswith(str(result.final_output))
    return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("family", ["chatml", "qwen3"])
async def test_a_run_with_tools_and_the_next_one_are_one_branch(
    worlds: Any, family: str, api: str, stream: bool
) -> None:
    world = await worlds(family)
    thought = THOUGHT if family == "qwen3" else ""
    for text in (*FIRST, *SECOND):
        world.say(thought + text)
    agent = await make_agent(world, api)
    result = await run(agent, "What is 1 + 2?", stream)
    assert result.final_output == "It is 3."
    again = [*result.to_input_list(), {"role": "user", "content": "Thanks!"}]
    result = await run(agent, again, stream)
    assert result.final_output == "Bye 🙂"
    check_one_branch(world, 5)
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert "1 + 2 is 3" in last
    assert "bye is a word" in last


@pytest.mark.parametrize("stream", [False, True])
async def test_runs_on_stored_responses_are_one_branch(worlds: Any, stream: bool) -> None:
    world = await worlds("qwen3")
    for text in (*FIRST, *SECOND):
        world.say(THOUGHT + text)
    agent = await make_agent(world, "responses")
    result = await run(agent, "What is 1 + 2?", stream, auto_previous_response_id=True)
    result = await run(agent, "Thanks!", stream, previous_response_id=result.last_response_id)
    assert result.final_output == "Bye 🙂"
    check_one_branch(world, 5)


async def test_encrypted_reasoning_comes_back(worlds: Any) -> None:
    world = await worlds("qwen3")
    for text in FIRST:
        world.say(THOUGHT + text)
    settings = ModelSettings(
        store=False,
        reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    agent = await make_agent(world, "responses", model_settings=settings)
    result = await run(agent, "What is 1 + 2?", False)
    thoughts = [item for item in result.to_input_list() if item.get("type") == "reasoning"]
    assert len(thoughts) == 3
    assert all(t["encrypted_content"] and t["summary"] for t in thoughts)
    check_one_branch(world, 3)


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_a_handoff_is_a_branch_with_a_cause_and_both_sides_are_exact(
    world: Any, api: str
) -> None:
    expert = await make_agent(world, api, name="Expert", instructions="Know it all.", tools=[])
    agent = await make_agent(world, api, handoffs=[handoff(expert)])
    world.say(call("transfer_to_expert"))
    world.say("I know.")
    result = await run(agent, "Who knows?", False)
    assert result.final_output == "I know."
    assert result.last_agent is expert
    first, second = world.stored()
    assert first.parent_index is second.parent_index is None
    assert second.metadata["branch"] in ("history_edited", "tools_changed")
    world.check_exact()


@pytest.mark.parametrize("with_tools", [False, True])
async def test_typed_output_is_parsed_and_does_not_keep_the_agent_from_its_tools(
    world: Any, with_tools: bool
) -> None:
    tools = [calculator] if with_tools else []
    agent = await make_agent(world, "responses", tools=tools, output_type=list[int])
    if with_tools:
        world.say(call("calculator", expression="1 + 2"))
    world.say('{"response": [3]}')
    result = await run(agent, "1 + 2?", False)
    assert result.final_output == [3]
    constrained = ["json_schema" in r["sampling_params"] for r in world.engine.requests]
    assert constrained == ([False, False] if with_tools else [True])
    check_one_branch(world, 2 if with_tools else 1)
