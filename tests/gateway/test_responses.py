"""The Responses dialect over HTTP: what is accepted, refused, answered, streamed and remembered."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.openai_responses import (
    OpenAIResponses,
    ResponseStore,
    StoredResponse,
)
from stepwell.gateway.dialects.response_items import seal, unseal
from stepwell.gateway.errors import GatewayError, PermissionDeniedError, RequestError
from tests.gateway.conftest import Sampled

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALC = {
    "type": "function",
    "name": "calc",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    "strict": True,
}


def call_text(expression: str, name: str = "calc", key: str = "expression") -> str:
    call = json.dumps({"name": name, "arguments": {key: expression}})
    return f"<tool_call>\n{call}\n</tool_call>"


class Http:
    """A client without an SDK: what it sends is what the gateway reads."""

    def __init__(self, world: Any, session: aiohttp.ClientSession, base: str) -> None:
        self.world, self.session, self.base = world, session, base
        self.headers: Any = {}

    async def send(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        async with self.session.request(method, f"{self.base}/v1/{path}", json=body) as answer:
            self.headers = answer.headers
            got = await answer.json()
            assert answer.status == status, got
            return got

    async def create(self, input: Any = None, **body: Any) -> Any:
        """An answer, checked against the SDK's types to the letter."""
        if input is not None:
            body["input"] = input
        got = await self.send("POST", "responses", body)
        Response.model_validate_json(json.dumps(got), strict=True)
        return got

    async def refused(self, status: int = 400, **body: Any) -> Any:
        return (await self.send("POST", "responses", body, status))["error"]

    async def stream(self, input: Any, **body: Any) -> list[dict[str, Any]]:
        """Events, each checked against the SDK's types."""
        body |= {"input": input, "stream": True}
        async with self.session.post(f"{self.base}/v1/responses", json=body) as answer:
            self.headers = answer.headers
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        return read_events(text)


def read_events(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_json(json.dumps(event), strict=True)
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output items out of deltas alone, checked against every `done` event."""
    items: list[dict[str, Any]] = []
    for e in events:
        kind = e["type"]
        if kind == "response.output_item.added":
            assert e["output_index"] == len(items)
            items.append({"id": e["item"]["id"], "text": ""})
        elif "item_id" in e:
            assert e["output_index"] == len(items) - 1, "items do not overlap"
            assert e["item_id"] == items[-1]["id"]
            if kind.endswith(".delta"):
                items[-1]["text"] += e["delta"]
            elif kind.endswith(".done") and "part" not in kind:
                whole = next(e[k] for k in ("text", "arguments", "input") if k in e)
                assert whole == items[-1]["text"]
        elif kind == "response.output_item.done":
            assert e["item"]["id"] == items[-1]["id"]
            items[-1]["item"] = e["item"]
    return [i["item"] for i in items]


@pytest.fixture
async def http(world: Any) -> Http:
    session = await world.clients.enter_async_context(aiohttp.ClientSession())
    return Http(world, session, world.base_url())


async def connect(world: Any, base: str | None = None) -> Http:
    session = await world.clients.enter_async_context(aiohttp.ClientSession())
    return Http(world, session, base or world.base_url())


def chain(world: Any, uid: str | None = "t1") -> list[int | None]:
    world.check_exact(uid)
    return [s.parent_index for s in world.stored(uid)]


def prompt(world: Any, index: int = -1) -> str:
    return str(world.tokenizer.decode(world.engine.requests[index]["input_ids"]))


# -- answers ---------------------------------------------------------------------------------


async def test_an_answer_is_a_whole_response(http: Http) -> None:
    said = http.world.say("Hello, wörld 🙂")
    got = await http.create(
        "hi",
        instructions="Be kind.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"run": "7"},
        user="me",
        prompt_cache_key="k",
        client_metadata={"any": 1},
    )
    [message] = got["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "Hello, wörld 🙂", "annotations": [], "logprobs": []}
    ]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert got["status"] == "completed"
    assert got["completed_at"] >= got["created_at"]
    assert got["incomplete_details"] is got["error"] is None
    for name, value in {
        "instructions": "Be kind.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 100,
        "metadata": {"run": "7"},
        "user": "me",
        "prompt_cache_key": "k",
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": None},
    }.items():
        assert got[name] == value
    [step] = http.world.stored("t1")
    assert got["usage"]["output_tokens"] == len(said.ids)
    assert got["usage"]["input_tokens"] == len(step.prompt_ids)
    assert got["usage"]["total_tokens"] == len(said.ids) + len(step.prompt_ids)
    assert step.metadata["dialect"] == "openai_responses"
    assert prompt(http.world).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    http.world.check_exact()


async def test_every_response_has_the_penalties_and_the_most_tool_calls(http: Http) -> None:
    got = await http.create("hi")
    asked = [got[name] for name in ("presence_penalty", "frequency_penalty", "max_tool_calls")]
    assert asked == [0, 0, None]
    got = await http.create("hi", max_tool_calls=3, presence_penalty=0.0, frequency_penalty=None)
    asked = [got[name] for name in ("presence_penalty", "frequency_penalty", "max_tool_calls")]
    assert asked == [0, 0, 3]


async def test_top_k_reaches_the_engine_and_the_step(http: Http) -> None:
    await http.create("hi", top_k=7)
    assert http.world.engine.requests[-1]["sampling_params"]["top_k"] == 7
    assert http.world.stored("t1")[-1].metadata["sampling_params"]["top_k"] == 7
    await http.create("hi", top_k=0)  # no limit, as vLLM's clients say it
    assert http.world.engine.requests[-1]["sampling_params"]["top_k"] == -1
    assert http.world.stored("t1")[-1].metadata["sampling_params"]["top_k"] == -1


async def test_a_stream_says_what_the_answer_says(worlds: Any) -> None:
    world = await worlds("qwen3")
    http = await connect(world)
    text = (
        "<think>\nLet me see.\n</think>\n\nFirst: "
        + call_text("1 + 2")
        + "\n"
        + call_text("3")
        + "\nand then"
    )
    for extra in ({}, {"reasoning": {"summary": "auto"}}):
        options = {"tools": [CALC], "include": ["reasoning.encrypted_content"], **extra}
        world.say(text)
        whole = await http.create("go", **options)
        world.say(text)
        events = await http.stream("go", **options)
        final = events[-1]["response"]
        assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0]["response"]["output"] == []
        assert events[-1]["type"] == "response.completed"
        assert {e["response"]["id"] for e in events if "response" in e} == {final["id"]}
        assert rebuilt(events) == final["output"]

        def bare(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{k: v for k, v in i.items() if k not in ("id", "call_id")} for i in output]

        assert bare(whole["output"]) == bare(final["output"])
        assert [i["type"] for i in final["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "message",
        ]
        assert final["usage"] == whole["usage"]
        assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


async def test_reasoning_is_content_or_the_summary_that_was_asked_for(worlds: Any) -> None:
    world = await worlds("qwen3")
    http = await connect(world)
    world.say("<think>hm</think>yes")
    thought, message = (await http.create("a"))["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert thought["summary"] == []
    assert "encrypted_content" not in thought
    assert message["content"][0]["text"] == "yes"
    world.say("<think>hm</think>yes")
    thought, _ = (await http.create("b", reasoning={"effort": "low", "summary": "detailed"}))[
        "output"
    ]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in thought


async def test_a_truncated_answer_is_incomplete_and_goes_on(http: Http) -> None:
    for stream in (False, True):
        items: list[Any] = [{"role": "user", "content": f"count {stream}"}]
        http.world.say("one two three four five six", close=False)
        if stream:
            events = await http.stream(items, max_output_tokens=3)
            assert events[-1]["type"] == "response.incomplete"
            got = events[-1]["response"]
        else:
            got = await http.create(items, max_output_tokens=3)
        assert got["status"] == "incomplete"
        assert got["incomplete_details"] == {"reason": "max_output_tokens"}
        assert got["output"][-1]["status"] == "incomplete"
        await http.create([*items, *got["output"], {"role": "user", "content": "go on"}])
    assert chain(http.world) == [None, 0, None, 2]


async def test_an_answer_cut_inside_its_thought_goes_on_without_the_thought(worlds: Any) -> None:
    world = await worlds("qwen3")
    http = await connect(world)
    items: list[Any] = [{"role": "user", "content": "think"}]
    world.say("<think>\nfor a long time", close=False, finish="length")
    got = await http.create(items)
    assert [i["type"] for i in got["output"]] == ["reasoning", "message"]
    kept = [i for i in got["output"] if i["type"] == "message"]
    await http.create([*items, *kept, {"role": "user", "content": "and?"}])
    assert chain(world) == [None, 0]


async def test_the_engine_is_constrained_to_the_format_unless_tools_can_be_called(
    http: Http,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    http.world.say('{"a": 1}')
    got = await http.create("json please", text={"format": form, "verbosity": "low"})
    assert got["text"] == {"format": form, "verbosity": "low"}
    sent = http.world.engine.requests[-1]["sampling_params"]
    assert json.loads(sent["json_schema"]) == schema
    await http.create("again", text={"format": {"type": "json_object"}})
    sent = http.world.engine.requests[-1]["sampling_params"]
    assert json.loads(sent["json_schema"]) == {"type": "object"}
    await http.create("with tools", text={"format": form}, tools=[CALC])
    assert "json_schema" not in http.world.engine.requests[-1]["sampling_params"]
    assert "text.format=json_schema" in http.headers["x-stepwell-ignored"]


# -- conversations ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["replay", "previous", "no ids", "no thoughts"])
@pytest.mark.parametrize("family", ["chatml", "qwen3"])
async def test_a_tool_conversation_is_one_branch(
    worlds: Any, family: str, mode: str, stream: bool
) -> None:
    world = await worlds(family)
    http = await connect(world)
    thought = "<think>\nhm\n</think>\n\n" if family == "qwen3" else ""
    options: Any = {"tools": [CALC], "include": ["reasoning.encrypted_content"]}
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2 and 3?"}]},
    ]
    new = items
    previous = None
    replies = [
        f"{thought}Both. " + call_text("1 + 2") + "\n" + call_text("3"),
        f"{thought}" + call_text("4"),
        f"{thought}It is 3, 3 and 4.",
        f"{thought}Bye.",
    ]
    for i, text in enumerate(replies):
        world.say(text)
        if mode == "previous":
            asked = {"previous_response_id": previous, **options}
            given = new
        else:
            asked, given = {"store": False, **options}, items
        if stream:
            got = (await http.stream(given, **asked))[-1]["response"]
        else:
            got = await http.create(given, **asked)
        previous = got["id"]
        output = got["output"]
        if mode == "no ids":
            output = [{k: v for k, v in o.items() if k not in ("id", "status")} for o in output]
        elif mode == "no thoughts":
            output = [o for o in output if o["type"] != "reasoning"]
        calls = [o for o in output if o["type"] == "function_call"]
        new = [
            {"type": "function_call_output", "call_id": c["call_id"], "output": f"result {n}"}
            for n, c in enumerate(calls)
        ][::-1]
        if i == 2:
            new = [{"role": "user", "content": "Thanks!"}]
        items = [*items, *output, *new]
    assert chain(world) == [None, 0, 1, 2]
    assert all("branch" not in s.metadata for s in world.stored())
    assert prompt(world, 1).index("result 0") < prompt(world, 1).index("result 1")


async def test_instructions_are_not_carried_over(http: Http) -> None:
    first = await http.create("hi", instructions="Be kind.")
    second = await http.create(
        "and?", previous_response_id=first["id"], instructions="Be kind.", store=True
    )
    assert second["previous_response_id"] == first["id"]
    await http.create("now?", previous_response_id=second["id"], instructions="Be brief.")
    assert "Be kind." not in prompt(http.world)
    assert prompt(http.world).startswith("<|im_start|>system\nBe brief.")
    assert chain(http.world) == [None, 0, None]
    assert http.world.stored()[2].metadata["branch"] == "history_edited"


async def test_one_response_can_be_continued_twice(http: Http) -> None:
    first = await http.create("hi")
    for word in ("a", "b"):
        await http.create(word, previous_response_id=first["id"])
    assert chain(http.world) == [None, 0, 0]


async def test_previous_response_id_names_the_trajectory_where_nothing_else_does(
    world: Any,
) -> None:
    http = await connect(world, world.url)
    world.say("one")
    world.say("two")
    first = await http.create("hi")
    second = await http.create("hi")
    for got in (first, second):
        await http.create("go on", previous_response_id=got["id"])
    a, b, c, d = (s.trajectory_uid for s in world.stored())
    assert a != b
    assert [c, d] == [a, b]
    assert chain(world, None) == [None, None, 0, 0]


async def test_continuing_a_response_leaves_a_trajectory_to_whoever_opened_it(world: Any) -> None:
    first = await (await connect(world)).create("hi")
    await (await connect(world, world.url)).create("go on", previous_response_id=first["id"])
    assert chain(world) == [None, 0]
    assert await world.gateway.identities.close_idle(time.monotonic() + 1) == 0


async def test_what_is_not_stored_is_refused_by_name(worlds: Any) -> None:
    world = await worlds(stored_response_chars=8_000)
    http = await connect(world)
    kept = await http.create("hi", store=False)
    error = await http.refused(input="and?", previous_response_id=kept["id"])
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"
    assert kept["id"] in error["message"]
    first = await http.create("hi")
    for i in range(2):
        last = await http.create(f"{i}")
    await http.refused(input="and?", previous_response_id=first["id"])
    await http.create("and?", previous_response_id=last["id"])
    reference = {"type": "item_reference", "id": "msg_nowhere"}
    error = await http.refused(404, input=[reference])
    assert "msg_nowhere" in error["message"]
    assert error["param"] == "input"
    assert len(world.gateway.responses.store) == 2


async def test_item_references_are_resolved(worlds: Any) -> None:
    world = await worlds("qwen3")
    http = await connect(world)
    world.say("<think>hm</think>first " + call_text("1"))
    got = await http.create("hi", tools=[CALC])
    call = got["output"][-1]
    items = [
        {"role": "user", "content": "hi"},
        *({"type": "item_reference", "id": i["id"]} for i in got["output"][:2]),
        {"id": call["id"]},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "2"},
    ]
    await http.create(items, tools=[CALC])
    assert chain(world) == [None, 0]


async def test_stored_responses_can_be_read_and_deleted(http: Http) -> None:
    got = await http.create([{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}])
    path = f"responses/{got['id']}"
    assert await http.send("GET", path) == got
    other = await connect(http.world, http.world.base_url("t2"))
    await other.send("GET", path, status=404)
    plain = await connect(http.world, http.world.url)
    assert await plain.send("GET", path) == got
    assert await http.send("DELETE", path) == {
        "id": got["id"],
        "object": "response",
        "deleted": True,
    }
    for method in ("GET", "DELETE"):
        error = (await http.send(method, path, status=404))["error"]
        assert got["id"] in error["message"]
    await http.refused(input="x", previous_response_id=got["id"])


async def test_a_retry_is_answered_with_the_same_response(http: Http) -> None:
    headers = {"x-stainless-retry-count": "1"}
    url = f"{http.base}/v1/responses"
    for body in ({"input": "hi"}, {"input": "hi", "stream": True}):
        seen = []
        for extra in ({}, headers):
            async with http.session.post(url, json=body, headers=extra) as answer:
                text = await answer.text()
                last = read_events(text)[-1]["response"] if body.get("stream") else None
                seen.append(last or json.loads(text))
        assert seen[0]["id"] == seen[1]["id"]
        assert seen[0]["output"] == seen[1]["output"]
        follow = await http.create("and?", previous_response_id=seen[1]["id"])
        assert follow["status"] == "completed"
    assert chain(http.world) == [None, 0, None, 2]


# -- items -----------------------------------------------------------------------------------


def parsed(input: Any, **body: Any) -> Any:
    return OpenAIResponses().parse({"input": input, **body})


def test_what_stands_together_is_one_assistant_message() -> None:
    def call(n: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{n}", "name": "calc", "arguments": "{}"}

    def said(text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }

    def output(n: int) -> dict[str, Any]:
        return {
            "type": "function_call_output",
            "call_id": f"c{n}",
            "output": [{"type": "input_text", "text": f"r{n}"}],
        }

    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal("hm")}
    items = [
        {"role": "user", "content": "go"},
        thought,
        said("one "),
        call(1),
        call(2),
        said("two"),
        output(2),
        output(1),
        said("done"),
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
    ]
    first, turn, a, b, last, again = parsed(items, tools=[CALC]).call.messages
    assert first == {"role": "user", "content": "go"}
    assert (turn["content"], turn["reasoning_content"]) == ("one two", "hm")
    assert [c["id"] for c in turn["tool_calls"]] == ["c1", "c2"]
    assert [a["content"], b["content"]] == ["r1", "r2"]
    assert last == {"role": "assistant", "content": "done"}
    assert again["content"] == "a\nb"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_sealed_reasoning_can_be_restored(text: str) -> None:
    assert unseal(seal(text)) == text
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal(text)}
    message = parsed([{"role": "user", "content": "x"}, item]).call.messages[1]
    assert message.get("reasoning_content", "") == text


@pytest.mark.parametrize("sealed", ["gAAAA", "stepwell1.é", seal("a thought")[:-1]])
def test_sealed_reasoning_of_others_and_damaged_is_told(sealed: str) -> None:
    foreign = {
        "type": "reasoning",
        "encrypted_content": sealed,
        "summary": [{"type": "summary_text", "text": "short"}],
    }
    got = parsed([{"role": "user", "content": "x"}, foreign])
    assert got.ignored == ("input[1].encrypted_content=foreign",)
    assert got.call.messages[1]["reasoning_content"] == "short"


@pytest.mark.parametrize(
    ("item", "param", "words"),
    [
        ({"type": "local_shell_call"}, "input[0].type", "'local_shell_call'"),
        ({"type": ["message"]}, "input[0].type", "supports message"),
        ("hi", "input[0]", "send an object"),
        ({}, "input[0].type", "None"),
        ({"role": "tool", "content": "x"}, "input[0].role", "'tool'"),
        ({"role": "user"}, "input[0].content", "None"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].image_url",
            "is a picture, and only text is taken here",
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "x"}]},
            "input[0].content[0]",
            "'input_file'",
        ),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id", "call_id"),
        ({"type": "function_call", "call_id": "c"}, "input[0].name", "send a name"),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": 3},
            "input[0].arguments",
            "3",
        ),
        ({"type": "function_call_output", "call_id": "c", "output": 3}, "input[0].output", "3"),
        ({"type": "reasoning", "summary": [3]}, "input[0].summary[0]", "summary_text"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input", "text"),
    ],
)
def test_malformed_items_are_refused_by_name(item: Any, param: str, words: str) -> None:
    with pytest.raises(RequestError) as e:
        parsed([item])
    assert e.value.param == param
    assert words in str(e.value)


async def test_an_unsupported_item_is_refused_in_openais_shape(http: Http) -> None:
    error = await http.refused(input=[{"type": "web_search_call", "id": "ws_1"}])
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "input[0].type"
    assert "'web_search_call'" in error["message"]
    assert not http.world.stored()


# -- tools -----------------------------------------------------------------------------------

AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [
        {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False},
        {"type": "function", "name": "wait", "parameters": {"type": "object"}, "strict": False},
    ],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


@pytest.mark.parametrize("with_namespace", [True, False])
async def test_tools_of_a_namespace_are_flat_for_the_model_and_not_for_the_agent(
    http: Http, with_namespace: bool
) -> None:
    http.world.say(call_text("x", "agents__spawn", "task"))
    items: list[Any] = [{"role": "user", "content": "go"}]
    tools = [CALC, AGENTS, {"type": "web_search", "external_web_access": False}]
    got = await http.create(items, tools=tools, store=False)
    [call] = got["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")
    assert got["tools"][1]["name"] == "agents"
    assert [t["type"] for t in got["tools"]] == ["function", "namespace"]
    assert http.headers["x-stepwell-ignored"] == "tools[2]=web_search"
    assert http.world.gateway.calls.counts["ignored_fields"] == 1
    assert '"agents__wait"' in prompt(http.world)
    assert "Sub-agents." in prompt(http.world)
    assert "web_search" not in prompt(http.world)
    if not with_namespace:
        del call["namespace"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    await http.create([*items, call, output], tools=tools, store=False)
    assert chain(http.world) == [None, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_take_and_give_plain_text(http: Http, stream: bool) -> None:
    text = '*** Begin Patch\n"é" 🙂\n'
    http.world.say(call_text(text, "apply_patch", "input"))
    items: list[Any] = [{"role": "user", "content": "go"}]
    if stream:
        events = await http.stream(items, tools=[PATCH])
        [call] = rebuilt(events)
    else:
        [call] = (await http.create(items, tools=[PATCH]))["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", text)
    assert http.headers["x-stepwell-ignored"] == "tools[0].format=grammar"
    assert "start: /.+/" in prompt(http.world)
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    await http.create([*items, call, output], tools=[PATCH])
    assert chain(http.world) == [None, 0]


@pytest.mark.parametrize("argument", ["patch", "input"])
async def test_whatever_a_custom_tool_is_called_with_goes_on(http: Http, argument: str) -> None:
    said = '{"a": 1}'
    http.world.say(call_text(said, "apply_patch", argument))
    items: list[Any] = [{"role": "user", "content": "go"}]
    [call] = (await http.create(items, tools=[PATCH]))["output"]
    if argument == "input":
        assert call["input"] == said
    else:
        assert json.loads(call["input"]) == {"patch": said}
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "bad"}
    await http.create([*items, call, output], tools=[PATCH])
    assert chain(http.world) == [None, 0]


async def test_an_action_of_a_computer_may_have_null_fields(http: Http) -> None:
    arguments = '{"type": "click", "x": 1, "y": 2, "text": null}'
    http.world.say(f'<tool_call>{{"name": "computer", "arguments": {arguments}}}</tool_call>')
    tools = [{"type": "computer_use_preview", "display_width": 9, "display_height": 9}]
    items: list[Any] = [{"role": "user", "content": "click"}]
    items += (await http.send("POST", "responses", {"input": items, "tools": tools}))["output"]
    items.append({"role": "user", "content": "on"})
    await http.send("POST", "responses", {"input": items, "tools": tools})
    assert chain(http.world) == [None, 0]


async def test_a_response_outlives_the_items_that_its_request_referred_to(http: Http) -> None:
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    first = await http.create(asked, tools=[CALC])
    said = {"type": "item_reference", "id": first["output"][0]["id"]}
    # Of a request with tools the known beginning is not read again.
    asked += [said, {"role": "user", "content": "and?"}]
    second = await http.create(asked, tools=[CALC])
    await http.send("DELETE", f"responses/{first['id']}")
    await http.create("go on", tools=[CALC], previous_response_id=second["id"])
    assert chain(http.world) == [None, 0, 1]


@pytest.mark.parametrize("number", [10**30, -(2**63) - 1])
async def test_an_action_of_a_computer_may_have_a_number_of_any_size(
    http: Http, number: int
) -> None:
    arguments = f'{{"type": "scroll", "x": {number}}}'
    http.world.say(f'<tool_call>{{"name": "computer", "arguments": {arguments}}}</tool_call>')
    tools = [{"type": "computer_use_preview", "display_width": 9, "display_height": 9}]
    got = await http.send("POST", "responses", {"input": "scroll", "tools": tools})
    assert got["output"][0]["action"] == {"type": "scroll", "x": pytest.approx(number)}


async def test_a_call_that_nests_deeper_than_an_answer_can_is_text(http: Http) -> None:
    deep = "[" * 260 + "]" * 260
    said = f'<tool_call>{{"name": "computer", "arguments": {{"x": {deep}}}}}</tool_call>'
    http.world.say(said)
    tools = [{"type": "computer_use_preview", "display_width": 9, "display_height": 9}]
    asked: list[Any] = [{"role": "user", "content": "scroll"}]
    got = await http.send("POST", "responses", {"input": asked, "tools": tools})
    (item,) = got["output"]
    assert item["content"][0]["text"] == said
    asked += [item, {"role": "user", "content": "on"}]
    await http.send("POST", "responses", {"input": asked, "tools": tools})
    assert chain(http.world) == [None, 0]


async def test_tool_choice_is_honoured(http: Http) -> None:
    beta = {**CALC, "name": "beta"}
    both = [CALC, beta]
    http.world.say(call_text("x", "calc"))
    got = await http.create("a", tools=both, tool_choice="none")
    assert "calc" in prompt(http.world)
    assert [item["type"] for item in got["output"]] == ["message"]
    http.world.say(' "calc", "arguments": {}}\n</tool_call>')
    await http.create("b", tools=both, tool_choice="required")
    assert prompt(http.world).rstrip().endswith('<tool_call>\n{"name": "')
    http.world.engine.script.clear()
    http.world.say("{}}\n</tool_call>")
    got = await http.create("c", tools=both, tool_choice={"type": "function", "name": "beta"})
    assert prompt(http.world).rstrip().endswith('{"name": "beta", "arguments":')
    assert got["output"][0]["name"] == "beta"
    assert got["tool_choice"] == {"type": "function", "name": "beta"}
    await http.create("f", tools=[CALC], parallel_tool_calls=False)
    assert http.world.engine.requests[-1]["sampling_params"]["stop"] == ["</tool_call>"]
    http.world.check_exact()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("maybe", "'maybe'"),
        ({"type": "web_search_preview"}, "web_search_preview"),
        ({"type": "function", "name": "other"}, "tool_choice.name is 'other'"),
        ({"type": "function", "name": ""}, "tool_choice.name is ''"),
        ({"type": "function", "name": ["x"]}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "allowed_tools"),
    ],
)
def test_impossible_tool_choices_are_refused(choice: Any, words: str) -> None:
    with pytest.raises(RequestError, match="tool_choice") as e:
        parsed("x", tools=[CALC], tool_choice=choice)
    assert words in str(e.value)


def test_a_call_cannot_be_required_of_tools_that_were_left_out() -> None:
    with pytest.raises(RequestError, match="no tool that the model can call"):
        parsed("x", tools=[{"type": "web_search"}], tool_choice="required")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "no name"}], "tools[0].type"),
        (["web_search"], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{**CALC, "parameters": 3}], "tools[0].parameters"),
        ([{**CALC, "description": 3}], "tools[0].description"),
        ([CALC, {**CALC, "description": "Another."}], "tools[1].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        (
            [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}],
            "tools[0].tools[0].type",
        ),
        ([{"type": "custom", "name": "c", "format": {"type": "x"}}], "tools[0].format"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as e:
        parsed("x", tools=tools)
    assert e.value.param == param


# -- other fields ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_k": -2}, "top_k"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"seed": "x"}, "seed"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"truncation": "some"}, "truncation"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": "text"}}, "text.format"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"instructions": ["x"]}, "instructions"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
    ],
)
def test_unsupported_fields_are_refused_by_name(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as e:
        parsed(**{"input": "x", **body})
    assert e.value.param == param
    assert param.split(".")[0] in str(e.value)


@pytest.mark.parametrize(
    "body",
    [
        {"background": False, "conversation": None, "truncation": "disabled"},
        {"max_tool_calls": 3, "service_tier": "flex", "stream_options": {"include_obfuscation": 1}},
        {"include": ["web_search_call.action.sources"], "safety_identifier": "me"},
        {"reasoning": {"effort": "high", "context": "auto"}, "text": {"verbosity": "high"}},
        {"model": "gpt-5", "prompt_cache_retention": "24h"},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1},
        {"text": {"format": None, "verbosity": None}, "stream_options": {"include_usage": None}},
        {"text": {"format": {"type": None, "schema": None}}, "reasoning": {"effort": None}},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted_in_silence(body: Any) -> None:
    assert parsed("x", **body).ignored == ()


def test_a_seed_is_the_engines() -> None:
    assert parsed("x", seed=7).call.seed == 7
    assert parsed("x").call.seed is None


def test_nothing_is_ignored_in_silence() -> None:
    got = parsed(
        "x",
        truncation="auto",
        context_management=[{"type": "compaction"}],
        reasoning={"effort": "none", "context": "all_turns"},
    )
    assert got.ignored == (
        "context_management",
        "truncation=auto",
        "reasoning.context",
        "reasoning.effort=none",
    )


def test_verbosity_is_told_to_a_template_that_takes_it() -> None:
    def args(template: str) -> Any:
        dialect = OpenAIResponses(chat_template=template)
        return dialect.parse({"input": "x", "text": {"verbosity": "low"}}).call.template_args

    assert args("{{ verbosity }}") == {"verbosity": "low"}
    assert args("") == {}


# -- compaction ------------------------------------------------------------------------------


async def test_a_compaction_is_the_policys_summary_and_the_conversation_goes_on_from_it(
    http: Http,
) -> None:
    world = http.world
    said = [
        {"role": "user", "content": "Count the lines."},
        {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"role": "user", "content": "And the words."},
    ]
    world.say("I count.")
    await http.create(said, tools=[CALC])
    world.say("There are 3 lines. The words are to be counted.")
    got = await http.send(
        "POST", "responses/compact", {"model": "m", "input": said, "tools": [CALC]}
    )
    *users, last = got["output"]
    # The SDK has no type for the user messages that OpenAI puts there.
    CompactedResponse.model_validate_json(json.dumps({**got, "output": [last]}), strict=True)
    assert [item["content"][0]["text"] for item in users] == ["Count the lines.", "And the words."]
    assert last["type"] == "compaction"
    assert got["usage"]["output_tokens"] > 0
    first, compaction = world.stored()
    asked = world.tokenizer.decode(compaction.prompt_ids.tolist())
    assert "Write a summary of this conversation" in asked
    n = len(first.prompt_ids) - len(world.tokenizer.encode("<|im_start|>assistant\n"))
    assert compaction.prompt_ids.tolist()[:n] == first.prompt_ids.tolist()[:n]  # its tools, too

    world.say("Seven words.")
    await http.create(got["output"], tools=[CALC])
    prompt = world.tokenizer.decode(world.stored()[-1].prompt_ids.tolist())
    assert "And the words." in prompt
    assert "Summary of the conversation before this message:\n\nThere are 3 lines." in prompt
    world.check_exact()

    world.say("Again.")
    again = await http.send("POST", "responses/compact", {"input": got["output"]})
    assert len(again["output"]) == 3  # the summary before is in the new one, and is no user's
    assert unseal(again["output"][-1]["encrypted_content"]) == "Again."


async def test_a_stored_conversation_is_compacted_by_its_id(http: Http) -> None:
    http.world.say("Yes.")
    first = await http.create("Is it?", store=True)
    http.world.say("It is.")
    got = await http.send("POST", "responses/compact", {"previous_response_id": first["id"]})
    assert [item["type"] for item in got["output"]] == ["message", "compaction"]
    assert unseal(got["output"][-1]["encrypted_content"]) == "It is."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "stream": True}, "stream"),
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "encrypted_content"),
        ({"input": "x", "background": True}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_a_compaction_that_is_not_understood_is_refused_by_name(
    http: Http, body: Any, param: str
) -> None:
    error = (await http.send("POST", "responses/compact", body, 400))["error"]
    assert param in error["param"]


def test_effort_turns_the_switch_that_the_template_has() -> None:
    def args(template: str, effort: str) -> Any:
        dialect = OpenAIResponses(chat_template=template)
        return dialect.parse({"input": "x", "reasoning": {"effort": effort}}).call.template_args

    switch = "{% if enable_thinking is defined %}"
    assert args(switch, "none") == args(switch, "minimal") == {"enable_thinking": False}
    assert args(switch, "high") == args("", "none") == {}
    assert args("{{ reasoning_effort }}", "low") == {"reasoning_effort": "low"}


NAMES = [
    "type",
    "role",
    "content",
    "id",
    "name",
    "call_id",
    "output",
    "input",
    "arguments",
    "summary",
    "tools",
    "text",
    "format",
    "schema",
    "mode",
    "namespace",
    "encrypted_content",
    "description",
    "parameters",
    "effort",
]
FIELDS = [
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "include",
    "instructions",
    "metadata",
    "store",
    "stream",
    "previous_response_id",
    "truncation",
    "context_management",
    "top_logprobs",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "message", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner | st.sampled_from(["function", "namespace", "reasoning", "function_call"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries(
        {"input": JSON | st.lists(JSON, max_size=4)},
        optional=dict.fromkeys(FIELDS, JSON),
    )
)
def test_any_body_is_understood_or_refused_in_words(body: Any) -> None:
    dialect = OpenAIResponses()
    try:
        got = dialect.parse(body)
    except GatewayError as refused:
        status, error = refused.status, dialect.error(refused)["error"]
    else:
        status, error = 200, {"message": "none"}
        assert all(isinstance(m["content"], str) for m in got.call.messages)
    assert status in (200, 400, 404)
    assert error["message"]


# -- streams that fail or pause --------------------------------------------------------------


async def test_a_failure_before_the_first_token_is_a_status(worlds: Any) -> None:
    world = await worlds(engine_retries=0)
    http = await connect(world)
    world.engine.script.append(Sampled([], status=400))
    error = await http.refused(input="hi", stream=True)
    assert "the engine refuses" in error["message"]
    error = await http.refused(input="x " * 9000)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input"


# -- the memory ------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9_000)), max_size=30))
def test_the_memory_is_bounded_and_keeps_the_latest(answers: list[tuple[int, int]]) -> None:
    store = ResponseStore(20_000)
    for number, n_chars in answers:
        name = f"{number:032x}"
        item = {"id": f"msg_{name}00", "type": "message"}
        response = {"id": f"resp_{name}", "output": [item]}
        message = {"role": "user", "content": "x" * n_chars}
        store.keep(StoredResponse(response, (message,), "t"))
        assert store.read(f"resp_{name}") is not None
        assert store.item(f"msg_{name}00") == item
        another = Principal("agent", ("another", "p"), is_bound=True)
        with pytest.raises(PermissionDeniedError, match="has another owner"):
            store.item(f"msg_{name}00", reader=another)
        kept = [store.read(f"resp_{i:032x}") for i in range(6)]
        assert sum(s.n_chars() for s in kept if s is not None) <= 20_000
    for i in range(6):
        store.pop(f"resp_{i:032x}", None)
    assert (len(store), store.currsize) == (0, 0)


def test_an_answer_larger_than_the_memory_is_not_kept_and_displaces_no_other() -> None:
    store = ResponseStore(20_000)
    for name, n_chars in (("a", 9_000), ("b", 21_000)):
        message = {"role": "user", "content": "x" * n_chars}
        store.keep(StoredResponse({"id": name, "output": []}, (message,), "t"))
    assert list(store) == ["a"]


def test_what_an_answer_repeats_of_its_request_takes_memory_too() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "y" * 700}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    response = {"id": "resp_1", "output": [], "tools": [{"description": "x" * 5_000}]}
    assert StoredResponse(response, (message,), "t").n_chars() > 5_700


async def test_no_memory_at_all_is_possible(worlds: Any) -> None:
    world = await worlds(stored_response_chars=0)
    http = await connect(world)
    got = await http.create("hi")
    await http.refused(input="and?", previous_response_id=got["id"])
