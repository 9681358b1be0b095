"""The unmodified `google-genai` SDK against the gateway over real HTTP: nothing but its base URL
says that this is not Google's API."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from stepwell.gateway.config import Tuning
from tests.gateway.conftest import World

HI = "What is 1 + 2 + 4?"
THOUGHT = "<think>\nhm 東京\n</think>\n\n"
CALC = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="calc",
            description="Calculates.",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={"expression": types.Schema(type=types.Type.STRING)},
            ),
        )
    ]
)
NO_AFC = types.AutomaticFunctionCallingConfig(disable=True)


@pytest.fixture
async def qwen(worlds: Callable[..., Any]) -> World:
    world: World = await worlds(family="qwen3")
    return world


def connect(world: World, url: str | None = None, key: str = "none", **options: Any) -> Any:
    made = types.HttpOptions(base_url=url or world.base_url(), **options)
    client = genai.Client(api_key=key, http_options=made)
    world.clients.push_async_callback(client.aio.aclose)
    return client


def call_text(expression: str) -> str:
    call = {"name": "calc", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def check_one_branch(world: World, n: int) -> None:
    steps = world.stored()
    assert [s.parent_index for s in steps] == [None, *range(n - 1)]
    world.check_exact()


async def generate(client: Any, way: str, contents: Any, **config: Any) -> list[Any]:
    """Responses of a call: one, or the chunks of a stream."""
    arguments: dict[str, Any] = {
        "model": "gemini-any",
        "contents": contents,
        "config": types.GenerateContentConfig(automatic_function_calling=NO_AFC, **config),
    }
    if way == "sync":
        return [await asyncio.to_thread(client.models.generate_content, **arguments)]
    if way == "sync stream":
        made = await asyncio.to_thread(
            lambda: list(client.models.generate_content_stream(**arguments))
        )
        return list(made)
    if way == "async":
        return [await client.aio.models.generate_content(**arguments)]
    return [chunk async for chunk in await client.aio.models.generate_content_stream(**arguments)]


WAYS = ("sync", "sync stream", "async", "async stream")


@pytest.mark.parametrize("way", WAYS)
async def test_generate_content(world: World, way: str) -> None:
    world.say("naïve 東京 🦊")
    got = await generate(
        connect(world), way, HI, system_instruction="Be kind.", temperature=0.7, top_k=40
    )
    assert "".join(chunk.text or "" for chunk in got) == "naïve 東京 🦊"
    (candidate,) = got[-1].candidates
    assert candidate.finish_reason == types.FinishReason.STOP
    (step,) = world.stored()
    usage = got[-1].usage_metadata
    assert usage.prompt_token_count == len(step.prompt_ids)
    assert usage.candidates_token_count == len(step.response_ids)
    assert usage.total_token_count == len(step.prompt_ids) + len(step.response_ids)
    params = step.metadata["sampling_params"]
    assert (params["temperature"], params["top_k"]) == (0.7, 40)
    assert step.metadata["dialect"] == "gemini"
    assert "Be kind." in world.tokenizer.decode(step.prompt_ids.tolist())


@pytest.mark.parametrize("include", [True, False])
async def test_stream_and_whole_agree(qwen: World, include: bool) -> None:
    config: dict[str, Any] = {
        "tools": [CALC],
        "thinking_config": types.ThinkingConfig(include_thoughts=include),
    }
    said = THOUGHT + "Let me see." + call_text("1 + 2") + call_text("4")
    seen = []
    for way in ("async", "async stream"):
        qwen.say(said)
        got = await generate(connect(qwen, qwen.base_url(way[:5] + way[6:])), way, HI, **config)
        parts = [p for c in got for p in c.candidates[0].content.parts]
        thoughts = "".join(p.text for p in parts if p.thought)
        text = "".join(p.text for p in parts if p.text and not p.thought)
        calls = [(c.id, c.name, c.args) for p in parts if (c := p.function_call) is not None]
        signed = [p.thought_signature for p in parts if p.thought_signature]
        seen.append((thoughts, text, calls, signed, got[-1].usage_metadata.model_dump()))
    assert seen[0] == seen[1]
    thoughts, text, calls, signed, usage = seen[0]
    assert thoughts == ("\nhm 東京\n" if include else "")
    assert text == "Let me see."
    assert [call[1:] for call in calls] == [
        ("calc", {"expression": "1 + 2"}),
        ("calc", {"expression": "4"}),
    ]
    assert len(signed) == 1
    assert usage["thoughts_token_count"] > 0


@pytest.mark.parametrize("ids", ["ids", "no ids", "own ids"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("way", WAYS)
async def test_a_tool_loop_of_three_turns_is_one_branch(
    qwen: World, way: str, ids: str, signed: bool
) -> None:
    client = connect(qwen)
    qwen.say(THOUGHT + call_text("1 + 2") + call_text("2"))
    qwen.say(THOUGHT + "And now. " + call_text("3 + 4"))
    qwen.say(THOUGHT + "It is 7.")
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=HI)])]
    n = 0
    for turn in range(3):
        got = await generate(
            client,
            way,
            contents,
            tools=[CALC],
            system_instruction="Be kind.",
            thinking_config=types.ThinkingConfig(include_thoughts=turn != 1),
        )
        said = [p for chunk in got for p in chunk.candidates[0].content.parts]
        answers = []
        for part in said:
            if not signed:
                part.thought_signature = None
            if (call := part.function_call) is not None:
                n += 1
                call.id = {"ids": call.id, "no ids": None, "own ids": f"mine-{n}"}[ids]
                answers.append(
                    types.Part(
                        function_response=types.FunctionResponse(
                            id=call.id, name=call.name, response={"output": f"{n}"}
                        )
                    )
                )
        contents.append(types.Content(role="model", parts=said))
        contents.append(types.Content(role="user", parts=answers))
    assert said[-1].text in ("It is 7.", "")
    check_one_branch(qwen, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_function_calling_in_a_chat_is_one_branch(
    qwen: World, stream: bool
) -> None:
    asked: list[str] = []

    async def calc(expression: str) -> str:
        """Calculates."""
        asked.append(expression)
        if expression == "bad":
            raise ValueError("no such thing")
        return "7"

    qwen.say(THOUGHT + call_text("1 + 2"))
    qwen.say(THOUGHT + call_text("bad") + call_text("4"))
    qwen.say(THOUGHT + "It is 7.")
    qwen.say("You are welcome.")
    config = types.GenerateContentConfig(
        tools=[calc], thinking_config=types.ThinkingConfig(include_thoughts=True)
    )
    chat = connect(qwen).aio.chats.create(model="m", config=config)
    texts = []
    for message in (HI, "Thank you."):
        if stream:
            chunks = [c async for c in await chat.send_message_stream(message)]
            texts.append("".join(chunk.text or "" for chunk in chunks))
        else:
            texts.append((await chat.send_message(message)).text)
    assert texts == ["It is 7.", "You are welcome."]
    assert asked == ["1 + 2", "bad", "4"]
    check_one_branch(qwen, 4)


async def test_structured_output(world: World) -> None:
    class Sum(BaseModel):
        total: int

    class Side(enum.Enum):
        LEFT = "left"
        RIGHT = "right, or so"

    client = connect(world)
    world.say('{"total": 7}')
    (got,) = await generate(
        client, "async", HI, response_mime_type="application/json", response_schema=Sum
    )
    assert got.parsed == Sum(total=7)
    schema = json.loads(world.engine.requests[-1]["sampling_params"]["json_schema"])
    assert schema["properties"]["total"]["type"] == "integer"
    world.say('{"total": 8}')
    (got,) = await generate(
        client,
        "async",
        "And 8?",
        response_mime_type="application/json",
        response_json_schema=Sum.model_json_schema(),
    )
    assert json.loads(got.text) == {"total": 8}
    world.say("left")
    (got,) = await generate(
        client, "async", "Where?", response_mime_type="text/x.enum", response_schema=Side
    )
    assert got.parsed == Side.LEFT
    assert world.engine.requests[-1]["sampling_params"]["regex"] == r"left|right,\ or\ so"


@pytest.mark.parametrize("way", ["async", "async stream"])
async def test_candidates_and_log_probs(world: World, way: str) -> None:
    world.say("a b")
    world.say("c d")
    got = await generate(
        connect(world), way, HI, candidate_count=2, response_logprobs=True, logprobs=2, seed=1
    )
    candidates = [c for chunk in got for c in chunk.candidates]
    for i in (0, 1):
        its = [c for c in candidates if c.index == i]
        assert its[-1].finish_reason == types.FinishReason.STOP
        chosen = [
            t.token_id
            for c in its
            if c.logprobs_result is not None
            for t in c.logprobs_result.chosen_candidates
        ]
        text = "".join(p.text for c in its for p in c.content.parts)
        (step,) = [
            s for s in world.stored() if text in world.tokenizer.decode(s.response_ids.tolist())
        ]
        assert chosen == step.response_ids.tolist()
    assert len(world.stored()) == 2


async def test_stop_sequences_and_limits(world: World) -> None:
    world.say("one, two", close=False, matched=",")
    client = connect(world)
    (got,) = await generate(client, "async", HI, stop_sequences=[","], max_output_tokens=50)
    assert (got.text, got.candidates[0].finish_reason) == ("one", types.FinishReason.STOP)
    world.say("cut", close=False, finish="length")
    (got,) = await generate(client, "async", "More.", max_output_tokens=1)
    assert got.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS


async def test_a_call_is_forced(qwen: World) -> None:
    qwen.say('{"expression": "1"}}\n</tool_call>')
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["calc"])
    (got,) = await generate(
        connect(qwen),
        "async",
        HI,
        tools=[CALC],
        tool_config=types.ToolConfig(function_calling_config=calling),
    )
    assert [c.args for c in got.function_calls] == [{"expression": "1"}]
    (step,) = qwen.stored()
    assert step.metadata["forced_tool"] == "calc"


async def test_count_tokens(world: World) -> None:
    client = connect(world)
    counted = await client.aio.models.count_tokens(model="m", contents=HI)
    assert world.stored() == []
    (got,) = await generate(client, "async", HI)
    assert got.usage_metadata.prompt_token_count == counted.total_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_urls_group_calls_by_conversation(world: World, stream: bool) -> None:
    chat = connect(world, world.url, key="k").aio.chats.create(model="m")
    for message in ("hi", "go on"):
        if stream:
            _ = [c async for c in await chat.send_message_stream(message)]
        else:
            await chat.send_message(message)
    await generate(connect(world, world.url, key="k"), "async", "A title, please.")
    a, b, c = world.stored()
    assert (a.trajectory_uid, b.parent_index) == (b.trajectory_uid, 0)
    assert c.trajectory_uid != a.trajectory_uid


@pytest.mark.parametrize("version", ["v1", "v1beta"])
@pytest.mark.parametrize("name", ["stepwell", "Qwen/Qwen3-4B"])
async def test_the_served_model_is_listed_and_found(
    worlds: Callable[..., Any], name: str, version: str
) -> None:
    world = await worlds(served_model_name=name)
    for url in (world.url, world.base_url()):
        client = connect(world, url, api_version=version)
        (listed,) = [model async for model in await client.aio.models.list()]
        assert (listed.name, listed.display_name) == (f"models/{name}", name)
        assert (listed.input_token_limit, listed.output_token_limit) == (4096, 4096)
        assert "generateContent" in listed.supported_actions
        for asked in (name, listed.name):
            assert await client.aio.models.get(model=asked) == listed
    assert world.stored() == []


# -- errors and keys -------------------------------------------------------------------------


async def test_errors_are_the_sdks_exceptions(world: World) -> None:
    client = connect(world)
    image = types.Part.from_bytes(data=b"x", mime_type="image/png")
    for way in WAYS:
        with pytest.raises(errors.ClientError, match=r"contents\[0\].parts\[0\].inlineData") as bad:
            await generate(client, way, [image])
        assert (bad.value.code, bad.value.status) == (400, "INVALID_ARGUMENT")
        field = bad.value.details["error"]["details"][0]["fieldViolations"][0]["field"]
        assert field == "contents[0].parts[0].inlineData.data"
    await generate(client, "async", HI)
    n = len(world.engine.requests)
    with pytest.raises(errors.ClientError) as conflict:
        await generate(connect(world, f"{world.url}/t1/other"), "async", HI)
    assert (conflict.value.code, conflict.value.status) == (409, "ALREADY_EXISTS")
    assert len(world.engine.requests) == n


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_models_and_paths_that_are_not_there_are_the_sdks_exceptions(
    world: World, version: str
) -> None:
    models = connect(world, api_version=version).aio.models
    for asked in (
        models.get(model="gemini-9"),
        models.list(config={"query_base": False}),
        models.embed_content(model="m", contents=HI),
    ):
        with pytest.raises(errors.ClientError) as missing:
            await asked
        assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
        assert missing.value.details["error"]["code"] == 404


@pytest.mark.parametrize("failure", ["before", "after"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_the_sdk_after_503_is_one_step(
    world: World, stream: bool, failure: str
) -> None:
    retries = types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.02)
    client = connect(world, retry_options=retries)
    world.say("the one and only")
    world.port.failures.append(failure)
    if stream:
        # Only the first event can still become a status; the failure comes behind it.
        with pytest.raises(errors.ServerError) as cut:
            await generate(client, "async stream", HI)
        assert (cut.value.code, cut.value.status) == (503, "UNAVAILABLE")
    got = await generate(client, "async stream" if stream else "async", HI)
    assert "".join(chunk.text or "" for chunk in got) == "the one and only"
    assert len(world.engine.requests) == 1
    assert len(world.stored()) == 1


@pytest.mark.parametrize("way", ["sync stream", "async stream"])
async def test_a_stream_that_nothing_comes_on_survives_what_keeps_it_alive(
    worlds: Callable[..., Any], way: str
) -> None:
    world: World = await worlds(tuning=Tuning(keepalive_s=0.01))
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    asking = asyncio.create_task(generate(connect(world), way, HI))
    await world.engine.arrived.wait()
    await asyncio.sleep(0.1)
    gate.set()
    assert "".join(chunk.text or "" for chunk in await asking) == "slow"


async def test_a_key_names_the_trajectory(worlds: Callable[..., Any]) -> None:
    world: World = await worlds(admin_keys=["an-admin-key-for-tests"])
    with pytest.raises(errors.ClientError, match="x-goog-api-key") as refused:
        await generate(connect(world, world.url, key=" "), "async", HI)
    assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
    key = world.gateway.keys.issue("t7", "p7")
    await generate(connect(world, world.url, key=key), "async", HI)
    (step,) = world.stored()
    assert (step.trajectory_uid, step.prompt_uid) == ("t7", "p7")
