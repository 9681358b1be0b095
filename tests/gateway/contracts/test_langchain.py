"""The gateway behind an unmodified langchain-openai `ChatOpenAI`, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.gateway.contracts.dialogue import REPLIES, check_one_branch


@tool
def calculator(expression: str) -> str:
    """Adds."""
    return f"calculator: {expression}"


@tool
def lookup(expression: str) -> str:
    """Looks it up."""
    return f"lookup: {expression}"


TOOLS = [calculator, lookup]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def model(world: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=f"{world.base_url()}/v1", api_key="none", max_retries=0, **options
    )


async def ask(agent: Any, messages: list[BaseMessage], stream: bool) -> AIMessage:
    if not stream:
        reply: AIMessage = await agent.ainvoke(messages)
        return reply
    whole: Any = None
    async for chunk in agent.astream(messages):
        whole = chunk if whole is None else whole + chunk
    made: AIMessage = whole
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True])
async def test_a_loop_of_bound_tools_is_one_branch(
    worlds: Any, responses: bool, stream: bool
) -> None:
    world = await worlds("qwen3")
    for text in REPLIES:
        world.say(text)
    agent = model(world, use_responses_api=responses).bind_tools(TOOLS)
    messages: list[BaseMessage] = [SystemMessage("Use tools."), HumanMessage("(1 + 2) * three?")]
    texts = []
    for question in (None, "Thanks!"):
        if question is not None:
            messages.append(HumanMessage(question))
        while True:
            reply = await ask(agent, messages, stream)
            texts.append(reply.text.strip())
            messages.append(reply)
            if not reply.tool_calls:
                break
            for made in reply.tool_calls:
                chosen = calculator if made["name"] == "calculator" else lookup
                messages.append(await chosen.ainvoke(made))
    assert texts == ["I need both.", "", "It is 9.", "You are welcome 🙂"]
    check_one_branch(world, 4)
    last = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    for result in ("calculator: 1 + 2", "lookup: three", "calculator: 3 * 3"):
        assert last.count(result) == 1


async def test_usage_stop_and_log_probs_arrive(world: Any) -> None:
    said = world.say("Think\nObservation:", close=False, matched="\nObservation:")
    agent = model(world, logprobs=True, stop_sequences=["\nObservation:"])
    reply = await agent.ainvoke("hi")
    assert reply.content == "Think"
    assert reply.usage_metadata["output_tokens"] == len(said.ids)
    assert len(reply.response_metadata["logprobs"]["content"]) == len(said.ids)
    world.say("fine")
    whole: Any = None
    async for chunk in model(world, stream_usage=True).astream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == "fine"
    assert whole.usage_metadata["output_tokens"] == 5
    world.check_exact()


class Answer(BaseModel):
    """An answer."""

    value: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output_is_asked_for_in_every_way(world: Any, method: str) -> None:
    world.say(' {"value": 3}}\n</tool_call>' if method == "function_calling" else '{"value": 3}')
    agent = model(world).with_structured_output(Answer, method=method)
    assert await agent.ainvoke("1 + 2, as JSON?") == Answer(value=3)
    [step] = world.stored()
    if method == "function_calling":
        assert step.metadata["forced_tool"] == "Answer"
    else:
        assert step.metadata["constraint"] == "json_schema"
    world.check_exact()


async def test_any_tool_can_be_required_and_calls_kept_single(world: Any) -> None:
    world.say('lookup", "arguments": {"expression": "x"}}\n</tool_call>', close=False)
    world.engine.script[-1].matched = "</tool_call>"
    agent = model(world).bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False)
    reply = await agent.ainvoke("hi")
    assert [c["name"] for c in reply.tool_calls] == ["lookup"]
    messages: list[Any] = [HumanMessage("hi"), reply, await lookup.ainvoke(reply.tool_calls[0])]
    await model(world).bind_tools(TOOLS).ainvoke(messages)
    check_one_branch(world, 2)
