"""The Anthropic Messages dialect over HTTP: wire format, exactness, errors. The SDK's own contract
is in `contracts/test_anthropic_sdk.py`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.datapool.codec import pack
from stepwell.gateway.dialects.anthropic_answer import BlockWriter, whole
from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import MOST_LEVELS, canonical, root_key
from tests.gateway.conftest import World, make_template

Block = dict[str, Any]
Body = dict[str, Any]

CALC = {
    "name": "calc",
    "description": "Calculates.",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
HI = [{"role": "user", "content": "hi"}]
MARK = {"cache_control": {"type": "ephemeral"}}


def call_text(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calc', 'arguments': arguments})}\n</tool_call>"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


def user(*content: Any) -> Block:
    return {"role": "user", "content": list(content)}


def assistant(content: Any) -> Block:
    return {"role": "assistant", "content": content}


def text(value: str, **more: Any) -> Block:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any = "3", **more: Any) -> Block:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


class Wire:
    """Posts bodies and reads whole messages, streamed or not."""

    def __init__(self, session: aiohttp.ClientSession, world: World) -> None:
        self.session = session
        self.world = world

    async def post(
        self, path: str = "/t1/p1/v1/messages", headers: Any = None, **body: Any
    ) -> tuple[int, Any, Any]:
        body = {"model": "m", "max_tokens": 500, "messages": HI, **body}
        body = {k: v for k, v in body.items() if v is not ...}
        async with self.session.post(
            self.world.url + path, json=body, headers=headers or {}
        ) as response:
            got = (
                await read_stream(response)
                if response.content_type == "text/event-stream"
                else await response.json()
            )
            return response.status, got, response.headers

    async def ask(self, **body: Any) -> Any:
        status, got, _ = await self.post(**body)
        assert status == 200, got
        return got

    async def refused(self, **body: Any) -> str:
        status, got, _ = await self.post(**body)
        assert status == 400, got
        assert got["type"] == "error"
        assert got["error"]["type"] == "invalid_request_error"
        assert got["request_id"].startswith("req_")
        message: str = got["error"]["message"]
        return message

    async def events(self, **body: Any) -> list[Block]:
        body = {"model": "m", "max_tokens": 500, "messages": HI, "stream": True, **body}
        url = f"{self.world.url}/t1/p1/v1/messages"
        async with self.session.post(url, json=body) as response:
            assert response.status == 200
            return await sse_events(response)


async def sse_events(response: aiohttp.ClientResponse) -> list[Block]:
    events = []
    for frame in (await response.text()).split("\n\n"):
        lines = dict(
            line.split(": ", 1) for line in frame.splitlines() if line[:1] not in ("", ":")
        )
        if lines:
            event = json.loads(lines["data"])
            assert event["type"] == lines["event"]
            events.append(event)
    return events


async def read_stream(response: aiohttp.ClientResponse) -> Block:
    """The message that clients make of the events; every rule of their order is checked."""
    events = [e for e in await sse_events(response) if e["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    message: Block = events[0]["message"]
    assert message["content"] == []
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    open_block: Block | None = None
    raw = ""
    for event in events[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block, raw = event["content_block"], ""
            message["content"].append(open_block)
            continue
        assert open_block is not None
        assert event["index"] == len(message["content"]) - 1
        if kind == "content_block_stop":
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(raw)
            open_block = None
            continue
        assert kind == "content_block_delta"
        delta = event["delta"]
        name = {
            "text_delta": "text",
            "thinking_delta": "thinking",
            "signature_delta": "signature",
            "input_json_delta": "partial_json",
        }[delta["type"]]
        if name == "partial_json":
            raw += delta[name]
        else:
            open_block[name] += delta[name]
    assert open_block is None
    message.update(events[-2]["delta"])
    message["usage"].update(events[-2]["usage"])
    message.update({k: events[-2][k] for k in ("context_management",) if k in events[-2]})
    return message


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def wire(world: World, session: aiohttp.ClientSession) -> Wire:
    return Wire(session, world)


@pytest.fixture
def wires(worlds: Callable[..., Any], session: aiohttp.ClientSession) -> Callable[..., Any]:
    async def make(**options: Any) -> Wire:
        return Wire(session, await worlds(**options))

    return make


def sent_prompt(world: World, at: int = -1) -> str:
    return world.tokenizer.decode(world.engine.requests[at]["input_ids"])


# -- exactness -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [None, "adaptive", "enabled", "omitted", "disabled"])
@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
async def test_a_linear_conversation_is_one_branch(
    wires: Any, family: str, thinking: str | None, stream: bool
) -> None:
    wire = await wires(family=family)
    world = wire.world
    options: Body = {"tools": [CALC], "stream": stream, "system": "Be kind."}
    if thinking == "omitted":
        options["thinking"] = {"type": "adaptive", "display": "omitted"}
    elif thinking == "enabled":
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    elif thinking is not None:
        options["thinking"] = {"type": thinking}
    thought = "<think>\nhm 東京\n</think>\n\n" if family == "qwen3" else ""
    world.say(thought + "Let me see.\n" + call_text(expression="1+2", b=1))
    world.say(thought + call_text(expression="3+4"))
    world.say(thought + "It is 7.")
    world.say("Bye.", close=False)
    messages: list[Block] = [*HI]
    for turn in range(4):
        reply = await wire.ask(messages=messages, **options)
        kinds = [b["type"] for b in reply["content"]]
        shows = thinking in ("adaptive", "enabled", "omitted") and thought and turn < 3
        assert ("thinking" in kinds) == bool(shows)
        if shows:
            block = reply["content"][0]
            assert block["signature"]
            assert block["thinking"] == ("" if thinking == "omitted" else "\nhm 東京\n")
        calls = [b for b in reply["content"] if b["type"] == "tool_use"]
        assert reply["stop_reason"] == ("tool_use" if calls else "end_turn")
        messages.append(assistant(reply["content"]))
        messages.append(user(*[result(b["id"]) for b in calls]) if calls else user(text("go on")))
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, 1, 2]
    assert all(s.metadata["dialect"] == "anthropic_messages" for s in steps)
    world.check_exact()


async def test_numbers_as_javascript_writes_them_again_are_the_same_numbers(wire: Wire) -> None:
    """JSON.stringify(JSON.parse(text)) of what the model wrote, as agents in TypeScript do."""
    world = wire.world
    numbers = '{"a": 1.0, "b": [1e3, -0.0], "c": 1152921504606846977, "d": {"e": 1e21, "f": 0.5}}'
    again = {"a": 1, "b": [1000, 0], "c": 1152921504606847000, "d": {"e": 1e21, "f": 0.5}}
    world.say(f'<tool_call>\n{{"name": "calc", "arguments": {numbers}}}\n</tool_call>')
    world.say("Done.")
    (call,) = (await wire.ask(tools=[CALC], messages=HI))["content"]
    sent = [*HI, assistant([{**call, "input": again}]), user(result(call["id"]))]
    await wire.ask(tools=[CALC], messages=sent)
    assert [s.parent_index for s in world.stored()] == [None, 0]
    assert numbers in sent_prompt(world)
    world.check_exact()


async def test_what_agents_change_on_the_way_does_not_break_the_branch(wires: Any) -> None:
    wire = await wires(
        normalize=({"role": "system", "pattern": r"(?m)^x-billing: .*\n?"},),
    )
    world = wire.world
    world.say("I call. " + call_text(expression="1", deep={"b": 2, "a": [1]}))
    first = await wire.ask(
        system=[text("x-billing: cch=1"), text("Be kind.", **MARK)],
        tools=[CALC],
        messages=[user(text("hi", **MARK))],
        cache_control={"type": "ephemeral"},
    )
    said, call = first["content"]
    call = {**call, "input": {"deep": {"a": [1], "b": 2}, "expression": "1"}, **MARK}
    results = ("3\n4", [text("3"), text("4", **MARK)], [text("3\n4"), text("")])
    for i, content in enumerate(results):
        await wire.ask(
            system=[text(f"x-billing: cch={i + 2}"), text("Be kind.")],
            tools=[{**CALC, "type": "custom", **MARK}],
            messages=[
                {"role": "user", "content": "hi"},
                assistant([{**said, "text": "I call."}, call]),
                user(result(call["id"], content, **MARK)),
            ],
            metadata={"user_id": f"u{i}"},
        )
    first_step, *rest = world.stored()
    assert "x-billing" not in sent_prompt(world, 0)
    assert [s.parent_index for s in rest] == [0, 0, 0]
    assert all(s.prompt_ids.tolist() == rest[0].prompt_ids.tolist() for s in rest)
    assert "branch" not in first_step.metadata
    world.check_exact()


async def test_a_document_is_read_with_its_title_and_context(wire: Wire) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {"type": "document", "source": source, "title": "Weather", "context": "Of today."}
    await wire.ask(messages=[user(document, text("And?"))])
    assert "Weather\nOf today.\nIt rains.\nAnd?" in sent_prompt(wire.world, 0)


async def test_text_between_tool_calls_comes_back_as_the_same_turn(wire: Wire) -> None:
    wire.world.say(f"A\n{call_text(expression='1')}\nB {call_text(expression='2')}")
    reply = await wire.ask(tools=[CALC])
    assert [b["type"] for b in reply["content"]] == ["text", "tool_use", "text", "tool_use"]
    ids = [b["id"] for b in reply["content"] if b["type"] == "tool_use"]
    results = user(*map(result, ids))
    await wire.ask(tools=[CALC], messages=[*HI, assistant(reply["content"]), results])
    # A framework may keep every block as a message of its own.
    pieces = [assistant([b]) for b in reply["content"]]
    await wire.ask(tools=[CALC], messages=[*HI, *pieces, results])
    assert [s.parent_index for s in wire.world.stored()] == [None, 0, 0]
    wire.world.check_exact()


async def test_a_reply_with_no_visible_text_goes_on(wires: Any) -> None:
    wire = await wires(family="qwen3")
    wire.world.say("<think>\nhm\n</think>\n\n\n")
    reply = await wire.ask()
    assert reply["content"] == []
    for i, empty in enumerate(([], "", [text("")], "\n")):
        await wire.ask(messages=[*HI, assistant(empty), user(text(f"go on {i}"))])
    assert [s.parent_index for s in wire.world.stored()] == [None, 0, 0, 0, 0]


async def test_tool_results_and_text_keep_their_order(wire: Wire) -> None:
    wire.world.say(call_text(expression="1") + call_text(expression="2"))
    reply = await wire.ask(tools=[CALC])
    a, b = (block["id"] for block in reply["content"])
    await wire.ask(
        tools=[CALC],
        messages=[
            *HI,
            assistant(reply["content"]),
            user(result(a, "one"), result(b, "two"), text("and"), text("more")),
        ],
    )
    added = sent_prompt(wire.world).split("</tool_call>")[-1]
    assert added == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand\nmore<|im_end|>\n<|im_start|>assistant\n"
    )
    wire.world.check_exact()


async def test_the_deepest_body_that_is_read_makes_a_step_that_a_pool_takes(wire: Wire) -> None:
    """Arguments that come as an object stand deeper in a Step than in the body."""
    wire.world.engine.context_length = 10**6
    deep: Block = {}
    for _ in range(MOST_LEVELS - 6):
        deep = {"in": deep}
    call = {"type": "tool_use", "id": "c1", "name": "calc", "input": deep}
    await wire.ask(messages=[*HI, assistant([call]), user(result("c1"))])
    (stored,) = wire.world.stored()
    pack(stored)
    call["input"] = {"in": deep}
    message = await wire.refused(messages=[*HI, assistant([call]), user(result("c1"))])
    assert f"nested more than {MOST_LEVELS} levels deep" in message


async def test_a_failed_tool_says_so(wire: Wire) -> None:
    for content, shown in (
        ("no such file", "Error: no such file"),
        ("ValueError: x", "ValueError: x"),
        (..., "Error"),
    ):
        block = result("c1", content, is_error=True)
        block = {k: v for k, v in block.items() if v is not ...}
        call = {"type": "tool_use", "id": "c1", "name": "calc", "input": {}}
        await wire.ask(messages=[*HI, assistant([call]), user(block)])
        assert f"<tool_response>\n{shown}\n</tool_response>" in sent_prompt(wire.world)


async def test_system_messages_may_come_anywhere(wire: Wire) -> None:
    opening = [{"role": "system", "content": [text("Later rules."), text("")]}, *HI]
    reply = await wire.ask(system="Be kind.", messages=opening)
    assert "Be kind.<|im_end|>\n<|im_start|>system\nLater rules.<" in sent_prompt(wire.world)
    more = [*opening, assistant(reply["content"]), {"role": "system", "content": "Hurry."}]
    await wire.ask(system="Be kind.", messages=[*more, user(text("go on"))])
    prompt = sent_prompt(wire.world)
    assert "<|im_start|>system\nHurry.<|im_end|>\n<|im_start|>user\ngo on<" in prompt
    assert [s.parent_index for s in wire.world.stored()] == [None, 0]
    wire.world.check_exact()


async def test_a_system_prompt_without_text_is_none(wire: Wire) -> None:
    for i, system in enumerate((..., None, "", [], [text("")])):
        await wire.post(f"/t{i}/p1/v1/messages", system=system)
    assert {sent_prompt(wire.world, i) for i in range(5)} == {sent_prompt(wire.world)}
    assert "system" not in sent_prompt(wire.world)


async def test_omitted_thinking_needs_not_come_back_where_its_turn_is_known(wires: Any) -> None:
    wire = await wires(family="qwen3")
    wire.world.say("<think>\na secret plan\n</think>\n\n" + call_text(expression="1"))
    reply = await wire.ask(tools=[CALC], thinking={"type": "adaptive", "display": "omitted"})
    thinking, call = reply["content"]
    assert thinking["thinking"] == ""
    redacted = {"type": "redacted_thinking", "data": "x"}
    for thought in ([thinking], [redacted], []):
        turn = assistant([*thought, call])
        await wire.ask(messages=[*HI, turn, user(result(call["id"]))], tools=[CALC])
        assert "a secret plan" in sent_prompt(wire.world)
    assert [s.parent_index for s in wire.world.stored()] == [None, 0, 0, 0]
    wire.world.check_exact()


# -- prefill ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefilled_reply_goes_on_and_its_turn_is_extended(wires: Any, stream: bool) -> None:
    wire = await wires(family="qwen3")
    world = wire.world
    world.say(' "title": 1}')
    messages = [*HI, assistant("{")]
    reply = await wire.ask(messages=messages, stream=stream)
    assert reply["content"] == [text(' "title": 1}')]
    assert sent_prompt(world).endswith("<|im_start|>assistant\n{")
    (step,) = world.stored()
    assert step.metadata["prefilled"] is True
    assert step.response_ids.tolist() == world.ids(' "title": 1}')
    merged = assistant('{ "title": 1}')
    await wire.ask(messages=[*HI, merged, user(text("go on"))], stream=stream)
    pieces = [assistant("{"), assistant(reply["content"])]
    await wire.ask(messages=[*HI, *pieces, user(text("go on"))], stream=stream)
    # The same prefill once more: another sample of the same prompt.
    await wire.ask(messages=messages, stream=stream, temperature=0.5)
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, 0, 0, None]
    assert steps[3].prompt_ids.tolist() == step.prompt_ids.tolist()
    world.check_exact()


async def test_a_truncated_reply_sent_back_last_goes_on(wire: Wire) -> None:
    wire.world.say("one two", close=False)
    reply = await wire.ask(max_tokens=4)
    assert reply["stop_reason"] == "max_tokens"
    wire.world.say(" and the end")
    more = await wire.ask(messages=[*HI, assistant(reply["content"])])
    assert more["content"] == [text(" and the end")]
    whole = reply["content"][0]["text"] + " and the end"
    await wire.ask(messages=[*HI, assistant(whole), user(text("thanks"))])
    assert [s.parent_index for s in wire.world.stored()] == [None, None, 1]
    wire.world.check_exact()


async def test_an_empty_last_assistant_message_begins_nothing(wire: Wire) -> None:
    for empty in ("", [], [text("")], None):
        await wire.ask(messages=[*HI, assistant(empty)])
        assert sent_prompt(wire.world).endswith("<|im_start|>assistant\n")


async def test_a_prefill_comes_behind_a_thought_that_the_template_opens(worlds: Any) -> None:
    world = await worlds(family="qwen3")
    template = world.tokenizer.template
    opened = template.text.replace(
        "if add_generation_prompt %}{{- '<|im_start|>assistant\\n'",
        "if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n'",
    )
    assert opened != template.text
    try:
        world.tokenizer.template = make_template("qwen3", opened)
        world.say(" 1}")
        async with aiohttp.ClientSession() as session:
            reply = await Wire(session, world).ask(
                messages=[*HI, assistant("{")], thinking={"type": "adaptive"}
            )
    finally:
        world.tokenizer.template = template
    assert sent_prompt(world).endswith("<think>\n</think>\n\n{")
    assert reply["content"] == [text(" 1}")]


async def test_only_text_can_be_continued(wire: Wire) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "calc", "input": {}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    assert "send its tool_result" in await wire.refused(messages=[*HI, assistant([call])])
    assert "only text" in await wire.refused(messages=[*HI, assistant([thinking])])
    assert "no message before" in await wire.refused(messages=[assistant("{")])
    forced = {"tools": [CALC], "tool_choice": {"type": "any"}}
    assert "tool_choice" in await wire.refused(messages=[*HI, assistant("{")], **forced)


# -- tools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_choice_forces_a_call(wire: Wire, stream: bool) -> None:
    other = {**CALC, "name": "other"}
    for choice, said in (
        ({"type": "any"}, 'calc", "arguments": {"expression": "1"}}\n</tool_call>'),
        ({"type": "tool", "name": "calc"}, '{"expression": "1"}}\n</tool_call>'),
    ):
        wire.world.say(said)
        reply = await wire.ask(tools=[other, CALC], tool_choice=choice, stream=stream)
        (call,) = reply["content"]
        assert (call["name"], call["input"]) == ("calc", {"expression": "1"})
        assert reply["stop_reason"] == "tool_use"
        assert wire.world.stored()[-1].metadata["forced_tool"] == choice.get("name", "")


async def test_one_tool_call_at_a_time_stops_behind_the_first(wire: Wire) -> None:
    wire.world.say(call_text(expression="1"), close=False, matched="</tool_call>")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    reply = await wire.ask(tools=[CALC], tool_choice=choice)
    assert reply["stop_reason"] == "tool_use"
    assert reply["stop_sequence"] is None
    assert wire.world.engine.requests[-1]["sampling_params"]["stop"] == ["</tool_call>"]


async def test_a_template_that_cannot_do_it_is_named_in_anthropics_words(wires: Any) -> None:
    wire = await wires(family="no_tools")
    assert "does not show tools" in await wire.refused(tools=[CALC])
    unread = await wires(tool_parser="none")
    message = await unread.refused(tools=[CALC], tool_choice={"type": "any"})
    assert message.startswith("tool_choice asks for a call")
    single = RequestError("parallel_tool_calls is false, but …", "parallel_tool_calls")
    worded = AnthropicMessages().error(single)["error"]["message"]
    assert worded == "tool_choice.disable_parallel_tool_use is true, but …"


async def test_without_choice_tools_stay_in_the_prompt_and_calls_are_text(wire: Wire) -> None:
    first = await wire.ask(tools=[CALC])
    wire.world.say(call_text(expression="1"))
    messages = [*HI, assistant(first["content"]), user(text("go on"))]
    reply = await wire.ask(tools=[CALC], messages=messages, tool_choice={"type": "none"})
    assert reply["content"] == [text(call_text(expression="1"))]
    assert reply["stop_reason"] == "end_turn"
    assert [s.parent_index for s in wire.world.stored()] == [None, 0]


async def test_server_tools_are_left_out_and_told(wires: Any) -> None:
    wire = await wires()
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "x"}
    for stream in (False, True):
        status, _, headers = await wire.post(tools=[CALC, search, toolset], stream=stream)
        assert status == 200
        told = "tools[1]=web_search_20250305, tools[2]=mcp_toolset"
        assert headers["x-stepwell-ignored"] == told
    assert "web_search" not in sent_prompt(wire.world)
    assert "calc" in sent_prompt(wire.world)


@pytest.mark.parametrize("together", [True, False])
async def test_tool_results_stand_in_the_order_of_their_calls(wire: Wire, together: bool) -> None:
    wire.world.say(call_text(expression="1") + call_text(expression="2"))
    reply = await wire.ask(tools=[CALC])
    first, second = [
        result(c["id"], said) for c, said in zip(reply["content"], ("one", "two"), strict=True)
    ]
    results = [user(second, first)] if together else [user(second), user(first)]
    await wire.ask(tools=[CALC], messages=[*HI, assistant(reply["content"]), *results])
    prompt = sent_prompt(wire.world)
    assert prompt.index("one") < prompt.index("two")
    assert [s.parent_index for s in wire.world.stored()] == [None, 0]


async def test_numbers_of_any_size_come_through_in_tool_inputs(wire: Wire) -> None:
    wire.world.say(call_text(n=123456789012345678901234567890))
    reply = await wire.ask(tools=[CALC])
    assert reply["content"][0]["input"] == {"n": 123456789012345678901234567890}


# -- sampling, thinking, fields --------------------------------------------------------------


async def test_sampling_parameters_reach_the_engine(wire: Wire) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for where in ("output_config", "output_format"):
        form = {"type": "json_schema", "schema": schema}
        await wire.ask(
            max_tokens=32000,
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            stop_sequences=["END"],
            **{where: form if where == "output_format" else {"format": form, "effort": "high"}},
        )
        sent = wire.world.engine.requests[-1]["sampling_params"]
        assert sent["temperature"] == 0.5
        assert sent["top_p"] == 0.9
        assert sent["top_k"] == 7
        assert sent["stop"] == ["END"]
        assert json.loads(sent["json_schema"]) == schema
        room = wire.world.engine.context_length - len(wire.world.engine.requests[-1]["input_ids"])
        assert sent["max_new_tokens"] == room - 1


@pytest.mark.parametrize("choice", ["auto", "any", "none"])
@pytest.mark.parametrize("field", ["output_config.format", "output_format"])
async def test_a_format_beside_tools_is_left_aside_and_told(
    field: str, choice: str, wire: Wire
) -> None:
    """The reply could not call a tool."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = (
        {"output_format": form} if field == "output_format" else {"output_config": {"format": form}}
    )
    status, _, headers = await wire.post(tools=[CALC], tool_choice={"type": choice}, **asked)
    assert status == 200
    is_sent = "json_schema" in wire.world.engine.requests[-1]["sampling_params"]
    told = headers.get("x-stepwell-ignored")
    assert (is_sent, told) == (
        (True, None) if choice == "none" else (False, f"{field} (beside tools)")
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_the_shape_of_the_api(wire: Wire, stream: bool) -> None:
    wire.world.say("naïve 東京 🦊")
    reply = await wire.ask(stream=stream)
    step = wire.world.stored()[0]
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "stepwell",
        "content": [text("naïve 東京 🦊")],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(step.prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(step.response_ids),
        },
    }


async def test_thinking_is_for_those_who_asked(wires: Any) -> None:
    wire = await wires(family="qwen3")
    said = "<think>\nhm\n</think>\n\nyes"
    for thinking, kinds in (
        (..., ["text"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
    ):
        for stream in (False, True):
            wire.world.say(said)
            reply = await wire.ask(thinking=thinking, stream=stream)
            assert [b["type"] for b in reply["content"]] == kinds
    # A thought without a word in it is none.
    wire.world.say("<think>\n\n</think>\n\nyes")
    reply = await wire.ask(thinking={"type": "adaptive"})
    assert [b["type"] for b in reply["content"]] == ["text"]


async def test_disabled_thinking_changes_only_templates_that_know_it(worlds: Any) -> None:
    world = await worlds(family="qwen3")
    template = world.tokenizer.template
    async with aiohttp.ClientSession() as session:
        wire = Wire(session, world)
        first = await wire.ask()
        more = [*HI, assistant(first["content"]), user(text("go on"))]
        await wire.ask(messages=more, thinking={"type": "disabled"})
        assert [s.parent_index for s in world.stored()] == [None, 0]
    switch = "{%- if enable_thinking is defined and not enable_thinking %}no thoughts{%- endif %}"
    try:
        world.tokenizer.template = make_template("qwen3", template.text + switch)
        knowing = await worlds(family="qwen3")
        async with aiohttp.ClientSession() as session:
            wire = Wire(session, knowing)
            await wire.ask(thinking={"type": "disabled"})
            assert sent_prompt(knowing).endswith("no thoughts")
            await wire.ask()
            assert not sent_prompt(knowing).endswith("no thoughts")
    finally:
        world.tokenizer.template = template


async def test_what_agents_always_send_is_accepted(wire: Wire) -> None:
    status, reply, headers = await wire.post(
        path="/t1/p1/v1/messages?beta=true",
        headers={
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
            "x-api-key": "anything",
        },
        thinking={"type": "enabled", "budget_tokens": 31999},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium", "format": None},
        metadata={"user_id": "u"},
        service_tier="auto",
        betas=["a"],
        mcp_servers=[],
        container=None,
        diagnostics={"previous_message_id": None},
        tool_choice={"type": "auto", "name": None, "disable_parallel_tool_use": None},
        tools=[
            {**CALC, "strict": True, "eager_input_streaming": True, "defer_loading": True},
            {**CALC, "name": "other", "strict": True, "input_examples": [{"expression": "1"}]},
        ],
    )
    assert status == 200, reply
    assert reply["context_management"] == {"applied_edits": []}
    told = headers["x-stepwell-ignored"].split(", ")
    assert sorted(told) == [
        "context_management",
        "output_config.effort",
        "thinking.budget_tokens",
        "tools.defer_loading",
        "tools.input_examples",
        "tools.strict",
    ]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": ...}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": ["x"]}, "messages[0] is 'x'"),
        ({"messages": [user({"type": "image", "source": {}})]}, "content[0].source.type is None"),
        ({"messages": [user(IMAGE)]}, "content[0].source.data is a picture, and only text"),
        (
            {"messages": [user(result("c", [IMAGE]))]},
            "content[0].content[0].source.data is a picture, and only text",
        ),
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id is None"),
        ({"messages": [*HI, assistant([{"type": "server_tool_use"}]), *HI]}, "server_tool_use"),
        ({"messages": [*HI, assistant([{"type": "tool_use"}]), *HI]}, "content[0].id is None"),
        ({"messages": [user(text(5))]}, "content[0].text is 5"),  # type: ignore[arg-type]
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is None"),
        ({"tools": [{"type": "function"}]}, "tools[0].type is 'function'"),
        ({"tools": [{"type": "bash_20２５0124"}]}, "tools[0].type is 'bash_20"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only Claude knows its schema"),
        ({"tools": [CALC], "tool_choice": {"type": "x"}}, "tool_choice.type is 'x'"),
        ({"tools": [CALC], "tool_choice": {"type": "tool", "name": "no"}}, "'no'"),
        ({"tools": [CALC], "tool_choice": {"type": "tool", "name": ""}}, "tool_choice.name is ''"),
        ({"tools": [CALC], "tool_choice": {"type": "tool"}}, "tool_choice.name is None"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a call"),
        ({"thinking": {"type": "x"}}, "thinking.type is 'x'"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display is 'x'"),
        ({"temperature": 3}, "temperature is 3"),
        ({"top_p": 0}, "top_p is 0"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is"),
        ({"container": "c"}, "container is 'c'"),
        ({"thread": {"type": "create"}}, "send the whole conversation"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type is"),
        ({"output_config": {"x": 1}}, "output_config.x"),
        ({"n": 2}, "n is 2"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(wire: Wire, body: Body, named: str) -> None:
    assert named in await wire.refused(**body)
    assert wire.world.engine.requests == []


# -- errors and streams ----------------------------------------------------------------------


async def test_errors_have_anthropics_types(wires: Any) -> None:
    wire = await wires(engine_retries=0, max_body_bytes=2000)
    world = wire.world
    world.say("x", status=500)
    status, got, _ = await wire.post()
    assert (status, got["error"]["type"]) == (502, "api_error")
    world.port.failures.append("before")
    status, got, _ = await wire.post()
    assert (status, got["error"]["type"]) == (503, "overloaded_error")
    status, got, _ = await wire.post(messages=[user(text("x" * 3000))])
    assert (status, got["error"]["type"]) == (413, "request_too_large")
    await wire.ask()
    status, got, headers = await wire.post(path="/t1/other/v1/messages")
    assert (status, got["error"]["type"]) == (409, "invalid_request_error")
    assert headers["x-should-retry"] == "false"
    async with wire.session.post(world.base_url() + "/v1/complete_trajectory", json={}) as done:
        assert done.status == 200
    status, got, _ = await wire.post()
    assert (status, got["error"]["type"]) == (410, "invalid_request_error")
    async with wire.session.get(world.base_url() + "/v1/messages") as response:
        assert response.status == 405
        assert (await response.json())["type"] == "error"


# -- count_tokens and probes -----------------------------------------------------------------


async def count(wire: Wire, path: str = "/t1/p1", **body: Any) -> int:
    status, got, _ = await wire.post(
        path=f"{path}/v1/messages/count_tokens", max_tokens=..., **body
    )
    assert status == 200, got
    assert got.keys() == {"input_tokens"}
    n: int = got["input_tokens"]
    return n


async def test_count_tokens_counts_what_a_call_would_have(wires: Any) -> None:
    wire = await wires(family="qwen3")
    world = wire.world
    options: Body = {"system": "Be kind.", "tools": [CALC]}
    assert world.gateway.trajectories.known("t1") is None
    counted = [await count(wire, **options)]
    assert world.gateway.trajectories.known("t1") is None
    world.say("<think>\na long long thought\n</think>\n\nyes")
    reply = await wire.ask(**options)
    options["messages"] = [*HI, assistant(reply["content"]), user(text("go on"))]
    counted.append(await count(wire, **options))
    # Elsewhere the hidden thought is not known, and does not count.
    assert await count(wire, "/t2/p2", **options) < counted[1]
    await wire.ask(**options)
    options["messages"] = [*HI, assistant("{")]
    counted.append(await count(wire, **options))
    await wire.ask(**options)
    steps = world.stored()
    assert [len(s.prompt_ids) for s in steps] == counted
    assert world.gateway.trajectories.known("t2") is None


async def test_count_tokens_without_a_url_finds_the_conversation(wires: Any) -> None:
    wire = await wires(family="qwen3")
    for headers in ({}, {"x-session-id": "s1"}, {"x-trajectory-uid": "t9"}):
        wire.world.say("<think>\na long long thought\n</think>\n\nyes")
        _, reply, _ = await wire.post(path="/v1/messages", headers=headers)
        more = [*HI, assistant(reply["content"]), user(text("go on"))]
        n = await count(wire, "", headers=headers, messages=more)
        await wire.post(path="/v1/messages", headers=headers, messages=more)
        assert len(wire.world.stored()[-1].prompt_ids) == n
    assert [s.parent_index for s in wire.world.stored()] == [None, 0] * 3


async def test_count_tokens_refuses_in_anthropics_shape(wire: Wire) -> None:
    for path in ("/t1/p1", ""):
        message = await wire.refused(path=f"{path}/v1/messages/count_tokens", messages=[])
        assert "messages is []" in message


async def test_base_urls_answer_a_probe_and_open_nothing(wire: Wire) -> None:
    for path in ("/", "/t1/p1"):
        async with wire.session.head(wire.world.url + path) as response:
            assert response.status == 200
        async with wire.session.get(wire.world.url + path) as response:
            assert response.status == 200
    assert len(wire.world.gateway.trajectories) == 0
    async with wire.session.get(f"{wire.world.url}/v1/models") as response:
        assert (await response.json())["object"] == "list"
    async with wire.session.get(f"{wire.world.url}/v1/messages") as response:
        assert response.status in (404, 405)


# -- properties ------------------------------------------------------------------------------

PIECES = st.sampled_from(["", " ", "\n\n", "a", "b c", "{", "東"])
DELTAS = st.lists(
    st.one_of(
        PIECES.map(ContentDelta),
        PIECES.map(ReasoningDelta),
        st.just(ToolCall("c", "calc", '{"a": 1}')),
    )
)


@given(DELTAS, st.sampled_from(["hidden", "shown", "omitted"]))
def test_no_block_is_blank_and_none_loses_visible_text(deltas: list[Delta], thinking: Any) -> None:
    blocks = whole(BlockWriter(thinking, "").events(deltas))
    texts = [b["text"] for b in blocks if b["type"] == "text"]
    assert all(t.strip() for t in texts)
    said = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    assert "".join("".join(texts).split()) == "".join(said.split())
    thoughts = [b for b in blocks if b["type"] == "thinking"]
    assert all(b["signature"] for b in thoughts)
    if thinking == "hidden":
        assert not thoughts
    if thinking == "shown":
        thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
        shown = "".join(b["thinking"] for b in thoughts)
        assert "".join(shown.split()) == "".join(thought.split())
    n_calls = sum(isinstance(d, ToolCall) for d in deltas)
    assert sum(b["type"] == "tool_use" for b in blocks) == n_calls


@given(st.text("a{ ", max_size=6), st.text("a{ b", max_size=6), st.integers(1, 4))
def test_a_prefill_is_taken_off_wherever_deltas_are_cut(prefill: str, rest: str, n: int) -> None:
    said = prefill + rest
    deltas = [ContentDelta(said[i : i + n]) for i in range(0, len(said), n)]
    blocks = whole(BlockWriter("hidden", prefill).events(deltas))
    assert "".join(b["text"] for b in blocks) == (rest if rest.strip() else "")


def spoiled(value: Any, path: list[int], junk: Any) -> Any:
    """`value` with something else in one place of it."""
    if not path or not isinstance(value, dict | list) or not value:
        return junk
    at, rest = path[0], path[1:]
    if isinstance(value, list):
        i = at % len(value)
        return [*value[:i], spoiled(value[i], rest, junk), *value[i + 1 :]]
    name = sorted(value)[at % len(value)]
    return {**value, name: spoiled(value[name], rest, junk)}


FULL: Body = {
    "model": "m",
    "max_tokens": 5,
    "system": [text("Be kind.", **MARK)],
    "tools": [CALC, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "tool", "name": "calc", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "messages": [
        {"role": "system", "content": "x"},
        user(text("hi"), {"type": "document", "source": {"type": "text", "data": "d"}}),
        assistant(
            [
                {"type": "thinking", "thinking": "", "signature": "stepwell:eA=="},
                {"type": "redacted_thinking", "data": "x"},
                text("yes"),
                {"type": "tool_use", "id": "c", "name": "calc", "input": {"a": 1}},
            ]
        ),
        user(result("c", [text("3")], is_error=True), text("go on")),
    ],
}
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1.5, 10**20, "", "x", [], ["x"], [None], {}, {"a": {}}]
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), JUNK)
def test_a_malformed_body_is_refused_and_nothing_else(path: list[int], junk: Any) -> None:
    body = spoiled(FULL, path, junk)
    try:
        parsed = AnthropicMessages().parse(body)
    except RequestError:
        return
    root_key(parsed.call.tools, parsed.call.template_args or {})
    for message in parsed.call.messages:
        canonical(message)
    ", ".join(parsed.ignored).encode("latin-1")
