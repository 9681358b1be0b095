"""Calls of tools in the forms of models that write them otherwise than Qwen, in every dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import openai
import pytest

from stepwell.gateway.tokens.render import ChatRenderer
from tests.gateway.conftest import Sampled, World, save_tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "depth": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
ARGUMENTS = [{"at": 'é ]}> "<b>"', "depth": 3}, {"at": "7"}]
USER = {"role": "user", "content": "Look."}

IDS = {
    "kimi_k2": ["functions.look:0", "functions.look:1"],
    "mistral": ["Given0001", "Given0002"],
}
"""Ids that models write."""
FAMILIES = [
    *("qwen3", "glm45", "deepseekv3", "deepseekv31", "kimi_k2", "minimax-m2"),
    *("mistral", "ministral"),
]


def chosen(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def calls_of(ids: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"id": uid, "type": "function", "function": {"name": "look", "arguments": json.dumps(each)}}
        for uid, each in zip(ids, ARGUMENTS, strict=True)
    ]


def sampled(world: World, family: str, ids: Sequence[str]) -> list[int]:
    """A turn with a thought, if the model has any, a text and two calls, as the template has it."""
    renderer, special = ChatRenderer(world.tokenizer), world.tokenizer.template.special_tokens
    reply = {"role": "assistant", "content": "I see.", "tool_calls": calls_of(ids)}
    prompt = renderer.text([USER], TOOLS, {})
    opened = prompt.endswith("<think>\n")
    turn = renderer.text([USER, reply], TOOLS, {}, add_generation_prompt=False)
    text = turn.removeprefix(prompt.removesuffix("<think>\n"))
    assert text != turn
    text, _, _ = text.partition(special["eos_token"])
    text = f"hm\n</think>\n\n{text}" if opened else text
    text = text.replace("<think></think>", "<think>hm</think>")
    end = "<|observation|>" if family == "glm45" else special["eos_token"]
    return world.tokenizer.encode(text + end).tolist()


class Chat:
    path = "v1/chat/completions"
    body: ClassVar = {"model": "m", "messages": [USER], "tools": TOOLS}

    def streamed(self, path: str, body: Any) -> tuple[str, Any]:
        return path, {**body, "stream": True}

    def read(self, answer: Any) -> tuple[str, list[Any]]:
        """Text of an answer, and its calls with their ids."""
        message = answer["choices"][0]["message"]
        functions = [(c["id"], c["function"]) for c in message["tool_calls"]]
        calls = [(uid, f["name"], json.loads(f["arguments"])) for uid, f in functions]
        return message["content"] or "", calls

    def read_events(self, events: list[Any]) -> tuple[str, list[Any]]:
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
        calls: dict[int, dict[str, Any]] = {}
        for part in (part for delta in deltas for part in delta.get("tool_calls") or ()):
            call = calls.setdefault(part["index"], {"id": "", "function": {"arguments": ""}})
            call["id"] += part.get("id") or ""
            arguments = call["function"]["arguments"] + part["function"]["arguments"]
            call["function"] |= {**part["function"], "arguments": arguments}
        content = "".join(delta.get("content") or "" for delta in deltas)
        message = {"content": content, "tool_calls": [*calls.values()]}
        return self.read({"choices": [{"message": message}]})


class Anthropic(Chat):
    path = "v1/messages"
    body: ClassVar = {
        "model": "m",
        "max_tokens": 500,
        "messages": [USER],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    }

    def read(self, answer: Any) -> tuple[str, list[Any]]:
        blocks = answer["content"]
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return "".join(b["text"] for b in blocks if b["type"] == "text"), calls

    def read_events(self, events: list[Any]) -> tuple[str, list[Any]]:
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[-1]["json"] += delta.get("partial_json", "")
                if "text" in delta:
                    blocks[-1]["text"] += delta["text"]
        shown = [{**b, "input": json.loads(b["json"] or "{}")} for b in blocks]
        return self.read({"content": shown})


class Responses(Chat):
    path = "v1/responses"
    body: ClassVar = {
        "model": "m",
        "input": [USER],
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
    }

    def read(self, answer: Any) -> tuple[str, list[Any]]:
        items = answer["output"]
        found = [item for item in items if item["type"] == "function_call"]
        calls = [(c["call_id"], c["name"], json.loads(c["arguments"])) for c in found]
        messages = [item for item in items if item["type"] == "message"]
        return "".join(p["text"] for m in messages for p in m["content"]), calls

    def read_events(self, events: list[Any]) -> tuple[str, list[Any]]:
        return self.read(events[-1]["response"])


class Gemini(Chat):
    path = "v1beta/models/m:generateContent"
    body: ClassVar = {
        "contents": [{"role": "user", "parts": [{"text": "Look."}]}],
        "tools": [{"functionDeclarations": [{"name": "look", "parameters": PARAMETERS}]}],
    }

    def streamed(self, path: str, body: Any) -> tuple[str, Any]:
        return path.replace("generateContent", "streamGenerateContent?alt=sse"), body

    def read(self, answer: Any) -> tuple[str, list[Any]]:
        return self.read_events([answer])

    def read_events(self, events: list[Any]) -> tuple[str, list[Any]]:
        parts = [p for e in events for p in e["candidates"][0]["content"].get("parts", ())]
        found = [part["functionCall"] for part in parts if "functionCall" in part]
        text = "".join(part["text"] for part in parts if "text" in part)
        return text, [(c["id"], c["name"], c["args"]) for c in found]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dialect", [Chat(), Anthropic(), Responses(), Gemini()])
async def test_whole_and_streamed_answers_have_the_calls_and_none_of_their_markup(
    worlds: Any, family: str, dialect: Chat
) -> None:
    world: World = await worlds(family)
    world.engine.incremental = True
    given = IDS.get(family)
    ids = sampled(world, family, given or ["callid001", "callid002"])
    markup = [text for text in world.tokenizer.special if len(text) > 3]
    async with aiohttp.ClientSession() as session:
        for streams, burst in ((False, 1), (True, 1), (True, 7)):
            world.engine.burst = burst
            world.engine.script.append(Sampled(ids))
            path, body = dialect.path, dialect.body
            if streams:
                path, body = dialect.streamed(path, body)
            url = f"{world.base_url(f'{streams}{burst}')}/{path}"
            async with session.post(url, json=body) as response:
                seen = await response.text()
                assert response.status == 200, seen
            assert not [text for text in markup if json.dumps(text)[1:-1] in seen or text in seen]
            if streams:
                lines = [line for line in seen.splitlines() if line.startswith("data: {")]
                text, calls = dialect.read_events([json.loads(line[6:]) for line in lines])
            else:
                text, calls = dialect.read(json.loads(seen))
            assert text.strip() == ("" if family == "mistral" else "I see.")
            assert [call[1:] for call in calls] == [("look", each) for each in ARGUMENTS]
            made = [call[0] for call in calls]
            assert len({*made}) == 2
            if given and not isinstance(dialect, Gemini):  # which numbers calls
                assert made == given
    world.check_exact()


async def the_calls(world: World, client: Any, sampled: Sampled) -> Any:
    """The message that answers the first question, to which the model says `sampled`."""
    world.engine.script.append(sampled)
    answer = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
    return answer.choices[0].message.model_dump(exclude_none=True)


@pytest.mark.parametrize("family", FAMILIES)
async def test_results_of_parallel_calls_follow_the_turn_as_the_template_writes_them(
    worlds: Any, family: str
) -> None:
    world: World = await worlds(family)
    client = await world.client()
    ids = sampled(world, family, IDS.get(family, ["callid001", "callid002"]))
    reply = await the_calls(world, client, Sampled(ids))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"}
        for i, call in enumerate(reply["tool_calls"])
    ]
    messages = [USER, reply, *results]
    world.say("It is there.")
    answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    last = answer.choices[0].message.model_dump(exclude_none=True)
    messages += [last, {"role": "user", "content": "And there?"}]
    await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert [step.parent_index for step in world.stored()] == [None, 0, 1]
    prompt = world.tokenizer.decode(world.stored()[1].prompt_ids.tolist())
    shown = [{**m, "content": m.get("content", "")} for m in messages[:4]]
    whole = ChatRenderer(world.tokenizer).text(shown, TOOLS, {})
    assert prompt[-200:] == whole[-200:]
    world.check_exact()


@pytest.mark.parametrize(
    ("family", "given", "second"),
    [
        ("kimi_k2", "functions.look:0", "functions.look:1"),
        ("mistral", "Given0001", "[0-9a-f]{9}"),
    ],
)
async def test_calls_to_which_the_model_gave_one_id_are_told_apart_and_extended(
    worlds: Any, family: str, given: str, second: str
) -> None:
    world: World = await worlds(family)
    client = await world.client()
    reply = await the_calls(world, client, Sampled(sampled(world, family, [given, given])))
    first, other = (call["id"] for call in reply["tool_calls"])
    assert first == given
    assert re.fullmatch(second, other)
    results = [
        {"role": "tool", "tool_call_id": uid, "content": f"of {uid}"} for uid in (other, first)
    ]
    world.say("It is there.")
    await client.chat.completions.create(model="m", messages=[USER, reply, *results], tools=TOOLS)
    assert [step.parent_index for step in world.stored()] == [None, 0]
    prompt = world.tokenizer.decode(world.stored()[1].prompt_ids.tolist())
    assert prompt.index(f"of {first}") < prompt.index(f"of {other}")
    world.check_exact()


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_of_gemini_have_ids_that_the_chat_template_takes(
    worlds: Any, family: str
) -> None:
    world: World = await worlds(family)
    own = {"kimi_k2": "functions.look:{}", "mistral": "call{:05}", "ministral": "call{:05}"}
    dialect, ids = Gemini(), [own.get(family, "call_{}").format(i) for i in range(2)]
    world.engine.script.append(Sampled(sampled(world, family, IDS.get(family, ids))))
    contents = [*dialect.body["contents"]]
    results = [
        {"functionResponse": {"name": "look", "response": {"output": f"result {i}"}}}
        for i in range(2)
    ]
    shown = [USER, {"role": "assistant", "content": "I see.", "tool_calls": calls_of(ids)}]
    shown += [{"role": "tool", "tool_call_id": ids[i], "content": f"result {i}"} for i in range(2)]
    whole = ChatRenderer(world.tokenizer).text(shown, TOOLS, {})
    async with aiohttp.ClientSession() as session:
        url = f"{world.base_url()}/{dialect.path}"
        async with session.post(url, json={**dialect.body, "contents": contents}) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert [uid for uid, *_ in dialect.read(answer)[1]] == ids
        contents += [answer["candidates"][0]["content"], {"role": "user", "parts": results}]
        for trajectory in ("", "t2"):  # the turn is extended, and rendered whole
            url = f"{world.base_url(trajectory) if trajectory else world.base_url()}/{dialect.path}"
            async with session.post(url, json={**dialect.body, "contents": contents}) as response:
                assert response.status == 200, await response.text()
    _, extended, rendered = world.stored()
    assert (extended.parent_index, rendered.parent_index) == (0, None)
    for step in (extended, rendered):
        assert world.tokenizer.decode(step.prompt_ids.tolist())[-150:] == whole[-150:]
    world.check_exact()


async def test_a_call_is_forced_by_name_where_the_first_argument_ends_the_name(
    worlds: Any, tmp_path: Path
) -> None:
    """GLM-4.7 writes nothing between them, and a call without arguments ends behind the name."""
    save_tokenizer(tmp_path, "glm45")
    template = tmp_path / "chat_template.jinja"
    other = template.read_text()
    for written in ("<tool_call>' + c.function.name + '", "</arg_key>", "</arg_value>"):
        assert f"{written}\n" in other
        other = other.replace(f"\n{written}", written).replace(f"{written}\n", written)
    template.write_text(other)
    world: World = await worlds(str(tmp_path))
    client = await world.client()
    needs = {**PARAMETERS, "required": ["at"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("look", needs), ("look_up", needs), ("stop", PARAMETERS))
    ]
    world.say("at</arg_key><arg_value>here</arg_value></tool_call>", close=False)
    answer = await client.chat.completions.create(
        model="m", messages=[USER], tools=tools, tool_choice=chosen("look")
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "here"}')
    prompt = world.tokenizer.decode(world.stored()[0].prompt_ids.tolist())
    assert prompt.endswith("<tool_call>look<arg_key>")
    with pytest.raises(openai.BadRequestError, match="does not show how a call begins"):
        await client.chat.completions.create(
            model="m", messages=[USER], tools=tools, tool_choice=chosen("stop")
        )
    world.check_exact()


async def test_a_call_that_only_a_user_follows_is_extended_unless_it_ended_for_a_tool(
    worlds: Any,
) -> None:
    """GLM's turn ends with the token of the message behind it, which the model samples."""
    world: World = await worlds("glm45")
    client = await world.client()
    ids = sampled(world, "glm45", ["callid001", "callid002"])
    for uid, reply in (("cut", Sampled(ids[:-1], finish="length")), ("ended", Sampled(ids))):
        client = await world.client(uid)
        said = await the_calls(world, client, reply)
        messages = [USER, said, {"role": "user", "content": "Stop, look there."}]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    cut, extended, _, branch = world.stored()
    assert (extended.parent_index, branch.parent_index) == (0, None)
    new = extended.prompt_ids[len(cut.prompt_ids) + len(cut.response_ids) :].tolist()
    assert world.tokenizer.decode(new) == "<|user|>\nStop, look there.<|assistant|>"
    world.check_exact()


async def test_calls_are_read_where_the_template_begins_shown_turns_in_another_way(
    worlds: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path, "deepseekv31")
    template = tmp_path / "chat_template.jinja"
    text = template.read_text()
    other = text.replace("{{- '<｜Assistant｜>' + (", "{{- ' <｜Assistant｜>' + (")
    assert other != text
    template.write_text(other)  # vLLM's has spaces there
    world: World = await worlds(str(tmp_path))
    client = await world.client()
    world.say('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "x"}<｜tool▁call▁end｜>')
    answer = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "x"}')
    with pytest.raises(openai.BadRequestError, match="does not show how a call begins"):
        await client.chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, tool_choice="required"
        )
