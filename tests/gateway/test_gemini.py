"""The Gemini dialect over HTTP: wire format, exactness, errors. The SDK's own contract is in
`contracts/test_google_genai.py`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway.dialects.gemini import Gemini, PartWriter
from stepwell.gateway.dialects.gemini_contents import json_schema, response_text
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import canonical
from tests.gateway.conftest import World

Body = dict[str, Any]
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
CALC = {
    "name": "calc",
    "description": "Calculates.",
    "parameters": {"type": "OBJECT", "properties": {"expression": {"type": "STRING"}}},
}
TOOLS = [{"functionDeclarations": [CALC]}]
CALLING = "toolConfig.functionCallingConfig"
CONFIG = "generationConfig"


def user(*parts: Any) -> Body:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> Body:
    return {"role": "model", "parts": list(parts)}


def text(value: str, **more: Any) -> Body:
    return {"text": value, **more}


def call(args: Any = None, **more: Any) -> Body:
    return {"functionCall": {"name": "calc", "args": args or {}, **more}}


def result(response: Any, **more: Any) -> Body:
    return {"functionResponse": {"name": "calc", "response": response, **more}}


def call_text(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calc', 'arguments': arguments})}\n</tool_call>"


class Wire:
    """Posts bodies and reads answers."""

    def __init__(self, session: aiohttp.ClientSession, world: World) -> None:
        self.session = session
        self.world = world

    async def post(
        self, method: str = "generateContent", base: str = "/t1/p1/v1beta", **body: Any
    ) -> tuple[int, str, Any]:
        body = {"contents": HI, **body}
        url = f"{self.world.url}{base}/models/m:{method}"
        headers = body.pop("headers", {})
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers

    async def ask(self, **body: Any) -> Any:
        status, got, _ = await self.post(**body)
        assert status == 200, got
        return json.loads(got)

    async def refused(self, **body: Any) -> str:
        status, got, _ = await self.post(**body)
        assert status == 400, got
        error = json.loads(got)["error"]
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        message: str = error["message"]
        return message


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture
async def wire(session: aiohttp.ClientSession, world: World) -> Wire:
    return Wire(session, world)


def parsed(*contents: Any, **body: Any) -> list[Any]:
    return Gemini().parse({"contents": list(contents) or HI, **body}).call.messages


# -- the answer ------------------------------------------------------------------------------


async def test_an_answer_has_the_fields_of_googles_api(wire: Wire) -> None:
    wire.world.say("fine")
    status, got, headers = await wire.post()
    answer = json.loads(got)
    (step,) = wire.world.stored()
    assert status == 200
    assert answer.pop("responseId")
    n_prompt, n_response = len(step.prompt_ids), len(step.response_ids)
    assert answer == {
        "candidates": [
            {
                "content": {"parts": [{"text": "fine"}], "role": "model"},
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "modelVersion": "stepwell",
        "usageMetadata": {
            "promptTokenCount": n_prompt,
            "candidatesTokenCount": n_response,
            "totalTokenCount": n_prompt + n_response,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": n_prompt}],
        },
    }
    assert headers["x-stepwell-trajectory"] == "t1"


@pytest.mark.parametrize("base", ["/t1/p1/v1beta", "/t1/p1/v1", "/v1beta", "/v1"])
async def test_a_stream_is_events_with_alt_sse_and_an_array_without(wire: Wire, base: str) -> None:
    said = "one 東京 two " + call_text(x=1)
    for method in ("streamGenerateContent", "streamGenerateContent?alt=sse"):
        wire.world.say(said)
        status, got, headers = await wire.post(method, base, tools=TOOLS)
        assert status == 200
        if "sse" in method:
            assert headers["content-type"].startswith("text/event-stream")
            frames = [f.removeprefix("data: ") for f in got.split("\n\n") if f.strip()]
            chunks = [json.loads(frame) for frame in frames]
        else:
            assert headers["content-type"] == "application/json"
            chunks = json.loads(got)
        parts = [p for c in chunks for p in c["candidates"][0]["content"]["parts"]]
        assert "".join(p.get("text", "") for p in parts).strip() == "one 東京 two"
        assert [p["functionCall"] for p in parts if "functionCall" in p] == [
            {"id": "call_0", "name": "calc", "args": {"x": 1}}
        ]
        assert [c["candidates"][0].get("finishReason") for c in chunks][-1] == "STOP"
        assert "usageMetadata" in chunks[-1]
        assert not any("usageMetadata" in c for c in chunks[:-1])


async def test_a_key_in_the_url_is_one(worlds: Callable[..., Any], session: Any) -> None:
    world = await worlds(admin_keys=["an-admin-key&more"])
    wire = Wire(session, world)
    key = "key=an-admin-key%26more"
    for method in (f"generateContent?{key}", f"streamGenerateContent?alt=sse&{key}"):
        assert (await wire.post(method))[0] == 200
    assert (await wire.post(headers={"x-goog-api-key": "an-admin-key&more"}))[0] == 200
    status, got, _ = await wire.post("generateContent?key=wrong")
    assert (status, json.loads(got)["error"]["status"]) == (401, "UNAUTHENTICATED")
    own = world.gateway.keys.issue("t8", "p8")
    assert (await wire.post(f"generateContent?key={own}", "/v1beta"))[0] == 200
    assert world.stored()[-1].trajectory_uid == "t8"
    # Elsewhere a key in a URL, which logs and proxies keep, is none.
    async with session.get(f"{world.url}/v1/models?{key}") as answer:
        assert answer.status == 401


async def test_tokens_are_counted_as_the_call_would_have_them(wire: Wire) -> None:
    body = {"contents": HI, "systemInstruction": user(text("Be kind.")), "tools": TOOLS}
    for method in ("countTokens",):
        counted = json.loads((await wire.post(method, **body))[1])
        whole = {"generateContentRequest": {"model": "models/m", **body}, "contents": None}
        assert json.loads((await wire.post(method, **whole))[1]) == counted
    n = counted["totalTokens"]
    assert counted["promptTokensDetails"] == [{"modality": "TEXT", "tokenCount": n}]
    assert wire.world.stored() == []
    assert (await wire.ask(**body))["usageMetadata"]["promptTokenCount"] == n
    assert "send at least one content" in await wire.refused(method="countTokens", contents=[])


async def test_a_failure_says_when_to_try_again(wire: Wire) -> None:
    wire.world.port.is_away = True
    status, got, _ = await wire.post()
    error = json.loads(got)["error"]
    assert (status, error["code"], error["status"]) == (503, 503, "UNAVAILABLE")
    kinds = {each["@type"].rpartition(".")[2]: each for each in error["details"]}
    assert kinds["RetryInfo"]["retryDelay"] == "1s"
    assert kinds["ErrorInfo"]["reason"] == "POOL_UNAVAILABLE"


@pytest.mark.parametrize("method", ["streamGenerateContent", "streamGenerateContent?alt=sse"])
async def test_a_stream_that_fails_ends_with_the_error(wire: Wire, method: str) -> None:
    wire.world.port.failures.append("before")
    status, got, _ = await wire.post(method)
    assert status == 200
    last = json.loads(got)[-1] if "sse" not in method else json.loads(got.split("data: ")[-1])
    assert last["error"]["status"] == "UNAVAILABLE"


async def test_what_is_not_served_of_googles_api_is_refused_in_its_shape(wire: Wire) -> None:
    status, got, _ = await wire.post("embedContent")
    assert (status, json.loads(got)["error"]["status"]) == (404, "NOT_FOUND")
    async with wire.session.get(f"{wire.world.url}/v1beta/files") as answer:
        assert (answer.status, (await answer.json())["error"]["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("/t1/p1/v1beta/v1beta", "leave the version out of its base URL"),
        ("/t1/p1/v1/v1beta", "leave the version out of its base URL"),
        ("/t1/p1/v1/v1", "/v1 is there twice: leave it out of the client's base URL"),
        ("/t1/p1", "/v1beta is missing before /models"),
    ],
)
async def test_a_wrong_base_url_says_what_is_wrong_with_it(
    wire: Wire, base: str, words: str
) -> None:
    status, got, _ = await wire.post(base=base)
    error = json.loads(got)["error"]
    assert (status, error["status"]) == (404, "NOT_FOUND")
    assert error["message"].endswith(words)


# -- the conversation ------------------------------------------------------------------------


async def test_a_conversation_sent_back_in_any_form_is_one_branch(wire: Wire) -> None:
    wire.world.say("a " + call_text(x=1) + call_text(x=2))
    wire.world.say("b")
    wire.world.say("c")
    first = (await wire.ask(tools=TOOLS))["candidates"][0]["content"]
    back = [p["functionCall"] for p in first["parts"] if "functionCall" in p]
    assert [c["id"] for c in back] == ["call_0", "call_1"]
    # Without ids, in pieces, with a thought, the responses in the wrong order.
    turn = [
        model(text("never said", thought=True), text("a ")),
        model(call({"x": 1}, id="q"), call({"x": 2}), {"thoughtSignature": "eHg="}),
        user(result({"output": "two"}, id="other"), result({"output": "one"}, id="q")),
    ]
    contents = [*HI, *turn]
    second = (await wire.ask(tools=TOOLS, contents=contents))["candidates"][0]["content"]
    more = [*contents, second, user(text("go on"))]
    await wire.ask(tools=[{"function_declarations": [CALC]}], contents=more)
    assert [s.parent_index for s in wire.world.stored()] == [None, 0, 1]
    wire.world.check_exact()


def test_responses_are_those_of_their_calls() -> None:
    def ids(*parts: Any) -> list[str]:
        calls = model(call({"x": 1}), call({"x": 2}, id="b"), call({"x": 3}))
        said = parsed(*HI, calls, user(*parts))
        return [f"{m['tool_call_id']}={m['content']}" for m in said if m["role"] == "tool"]

    r = [result({"output": str(i)}) for i in range(4)]
    assert ids(r[0], r[1], r[2]) == ["call_0=0", "call_1=1", "call_2=2"]
    named = result({"output": "b"}, id="b")
    assert ids(r[0], named, r[2]) == ["call_0=0", "call_1=b", "call_2=2"]
    assert ids(named, r[0], r[2]) == ["call_0=0", "call_1=b", "call_2=2"]
    assert ids(r[0], r[1], r[2], r[3])[-1] == "calc=3"  # a call that the history does not have


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (None, ""),
        ({}, ""),
        ({"output": "plain"}, "plain"),
        ({"output": {"a": [1]}}, '{"a": [1]}'),
        ({"error": "no such file"}, "Error: no such file"),
        ({"error": "Error 3"}, "Error 3"),
        ({"result": "東京"}, '{"result": "東京"}'),
        ({"output": 1, "error": 2}, '{"output": 1, "error": 2}'),
    ],
)
def test_a_response_reads_as_googles_api_says(response: Any, said: str) -> None:
    assert response_text(response) == said


def test_system_and_user_texts_come_in_any_form() -> None:
    for system in ("Be kind.", [text("Be kind.")], {"parts": text("Be kind.")}):
        for name in ("systemInstruction", "system_instruction"):
            said = parsed({"parts": {"text": "hi"}}, **{name: system})
            assert said == [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "hi"},
            ]
    assert parsed(user(text("a"), text("b")))[0]["content"] == "a\nb"
    assert parsed({"role": "user"}) == [{"role": "user", "content": ""}]


def test_a_schema_of_googles_is_a_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "property_ordering": ["b", "a"],
        "properties": {
            "a": {"type": "STRING", "nullable": True, "enum": ["x"]},
            "b": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1", "example": [1]},
            "nullable": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True},
            "any_of": {"type": "TYPE_UNSPECIFIED"},
        },
    }
    made = json_schema(schema)
    assert made == {
        "type": "object",
        "properties": {
            "b": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "examples": [[1]]},
            "a": {"type": ["string", "null"], "enum": ["x", None]},
            "nullable": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
            "any_of": {},
        },
    }
    assert list(made["properties"]) == ["b", "a", "nullable", "any_of"]


def test_a_json_schema_stays_as_it_is_but_for_googles_types() -> None:
    inner = {"type": "string", "description": "OBJECT", "enum": ["STRING"]}
    schema = {
        "type": ["object", "null"],
        "$defs": {"type": inner},
        "properties": {"type": {"$ref": "#/$defs/type"}, "ref": {"oneOf": [inner]}},
        "additionalProperties": False,
        "required": ["type"],
    }
    assert json_schema(schema) == schema
    assert list(json_schema(schema)) == list(schema)
    assert json_schema({"allOf": [{"type": "OBJECT"}], "defs": {"a": {"ref": "#/defs/b"}}}) == {
        "allOf": [{"type": "object"}],
        "$defs": {"a": {"$ref": "#/$defs/b"}},
    }
    sent = {"responseMimeType": "application/json", "responseJsonSchema": {"type": "OBJECT"}}
    got = Gemini().parse({"contents": HI, CONFIG: sent})
    assert got.call.constraint == ("json_schema", '{"type": "object"}')


deltas = st.lists(
    st.one_of(
        st.text(min_size=1).map(ContentDelta),
        st.text(min_size=1).map(ReasoningDelta),
        st.integers().map(lambda i: ToolCall(f"call_{i}", "f", f'{{"x": {i}}}')),
    )
)


@given(deltas=deltas, include=st.booleans())
def test_what_is_answered_is_the_same_message_when_it_is_sent_back(
    deltas: list[Delta], include: bool
) -> None:
    """Whole, and as the chunks of a stream."""
    writer = PartWriter(include)
    chunks = [writer.parts(delta) for delta in deltas] + [writer.end()]
    told = [json.loads(json.dumps(p, default=lambda f: f)) for p in _plain(chunks)]
    (whole,) = [PartWriter(include).whole(deltas)]
    assert whole
    streamed = parsed(*HI, *(model(p) for p in told), *HI)
    at_once = parsed(*HI, model(*_plain([whole])), *HI)
    assert canonical(streamed[1]) == canonical(at_once[1])
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    assert at_once[1]["content"] == content
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    assert at_once[1].get("reasoning_content", "") == (thought if include else "")


def _plain(chunks: list[list[Body]]) -> list[Body]:
    parts = [part for chunk in chunks for part in chunk]
    for part in parts:
        if "functionCall" in part:
            part["functionCall"] = {**part["functionCall"], "args": {}}
    return parts


# -- fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"topP": 0.5}, {"top_p": 0.5}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"topK": 40.0}, {"top_k": 40}),
        ({"topK": 0}, {"top_k": None}),
        ({"maxOutputTokens": 7}, {"max_tokens": 7}),
        ({"stopSequences": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"seed": 3}, {"seed": 3}),
        ({"responseLogprobs": True}, {"n_logprobs": 0}),
        ({"responseLogprobs": True, "logprobs": 3}, {"n_logprobs": 3}),
        (
            {"responseMimeType": "application/json"},
            {"constraint": ("json_schema", '{"type": "object"}')},
        ),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}},
            {"constraint": ("json_schema", '{"type": "string"}')},
        ),
        (
            {"responseMimeType": "application/json", "response_json_schema": {"type": "string"}},
            {"constraint": ("json_schema", '{"type": "string"}')},
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["a", "b.c"]}},
            {"constraint": ("regex", r"a|b\.c")},
        ),
        ({"responseModalities": ["TEXT"], "presencePenalty": 0, "temperature": None}, {}),
        ({"thinkingConfig": {"thinkingBudget": 0}}, {"template_args": {"enable_thinking": False}}),
        ({"thinkingConfig": {"thinkingBudget": -1, "includeThoughts": None}}, {}),
        (
            {"thinkingConfig": {"thinkingLevel": "LOW"}},
            {"template_args": {"reasoning_effort": "low"}},
        ),
    ],
)
def test_a_field_is_asked_of_the_call(config: Any, asked: Any) -> None:
    got = Gemini("{{ reasoning_effort }}").parse({"contents": HI, "generation_config": config})
    assert {name: getattr(got.call, name) for name in asked} == asked
    assert got.ignored == ()


def test_candidates_are_samples() -> None:
    assert Gemini().parse({"contents": HI, CONFIG: {"candidateCount": 3}}).n == 3


@pytest.mark.parametrize(
    ("calling", "forced", "parses"),
    [
        ({}, None, True),
        ({"mode": "AUTO"}, None, True),
        ({"mode": "NONE"}, None, False),
        ({"mode": "ANY"}, "", True),
        ({"mode": "ANY", "allowedFunctionNames": ["calc"]}, "calc", True),
        ({"mode": "ANY", "allowed_function_names": ["calc", "other"]}, "", True),
        ({"mode": "VALIDATED"}, None, True),
    ],
)
def test_modes_of_function_calling(calling: Any, forced: str | None, parses: bool) -> None:
    tools = [*TOOLS, {"functionDeclarations": [{"name": "other"}]}]
    body = {"contents": HI, "tools": tools, "toolConfig": {"functionCallingConfig": calling}}
    got = Gemini().parse(body).call
    assert (got.forced_tool, got.parse_tools) == (forced, parses)
    assert got.tools is not None
    assert [t["function"]["name"] for t in got.tools] == ["calc", "other"]
    assert got.tools[0]["function"]["parameters"]["type"] == "object"
    assert got.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}


async def test_what_says_nothing_about_the_answer_is_told(wire: Wire) -> None:
    status, got, headers = await wire.post(
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        store=True,
        model="models/m",
        serviceTier="flex",
        tools=[
            {
                "googleSearch": {},
                "functionDeclarations": [{**CALC, "response": {"type": "STRING"}}],
            },
            {"codeExecution": {}},
        ],
        toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}, "retrievalConfig": {"x": 1}},
        generationConfig={
            "mediaResolution": "MEDIA_RESOLUTION_LOW",
            "thinkingConfig": {"thinkingBudget": 100, "thinkingLevel": "HIGH"},
            "responseMimeType": "application/json",
        },
    )
    assert status == 200, got
    assert headers["x-stepwell-ignored"].split(", ") == [
        "safetySettings",
        f"{CONFIG}.mediaResolution",
        "toolConfig.retrievalConfig",
        f"{CALLING}.mode=VALIDATED",
        f"{CONFIG}.thinkingConfig.thinkingBudget",
        "tools[0].googleSearch",
        "functionDeclarations.response",
        "tools[1].codeExecution",
        f"{CONFIG}.responseMimeType (beside tools)",
        f"{CONFIG}.thinkingConfig.thinkingLevel=high",
    ]


ONE = {"inlineData": {"mimeType": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"contents": []}, "contents is []; "),
        ({"contents": None}, "contents is missing; send at least one content"),
        ({"contents": "hi"}, "contents is 'hi'; it should be a list"),
        ({"contents": ["hi"]}, "contents[0] is 'hi'; send an object with role and parts"),
        ({"contents": [{"role": "system"}]}, "contents[0].role is 'system'; send user or model"),
        ({"contents": [{"parts": "hi"}]}, "contents[0].parts is 'hi'; send a list of parts"),
        ({"contents": [user("hi")]}, "contents[0].parts[0] is 'hi'; send an object with text"),
        ({"contents": [user({})]}, "contents[0].parts[0].text is None; send text"),
        ({"contents": [user(text("a", thought=True))]}, "contents[0].parts[0].thought is True"),
        (
            {"contents": [user(ONE)]},
            "contents[0].parts[0].inlineData.data is a picture, and only text is taken",
        ),
        (
            {"contents": [user({"inline_data": {}})]},
            "contents[0].parts[0].inlineData.mimeType is ''; send text",
        ),
        (
            {"contents": [user({"fileData": {"fileUri": "x"}})]},
            "parts[0].fileData.mimeType is ''; send text",
        ),
        ({"contents": [user(call())]}, "parts[0].functionCall is {'name': 'calc'"),
        ({"contents": [*HI, model(result({})), *HI]}, "contents[1].parts[0].functionResponse is"),
        (
            {"contents": [*HI, model({"executableCode": {"code": "1"}}), *HI]},
            "contents[1].parts[0].executableCode is",
        ),
        ({"contents": [*HI, model(text("a"))]}, "contents ends with the model's turn"),
        (
            {"contents": [*HI, model({"functionCall": {}}), *HI]},
            "contents[1].parts[0].functionCall.name is None; send text",
        ),
        (
            {"contents": [*HI, model({"functionCall": {"name": "f", "args": "{}"}}), *HI]},
            "contents[1].parts[0].functionCall.args is '{}'; send an object",
        ),
        (
            {"contents": [user(result("a"))]},
            "contents[0].parts[0].functionResponse.response is 'a'; send an object",
        ),
        (
            {"contents": [user(result({}, parts=[ONE]))]},
            "functionResponse.parts[0].inlineData.data is a picture, and only text",
        ),
        ({"systemInstruction": 3}, "systemInstruction is 3; send an object with parts of text"),
        ({"systemInstruction": user(ONE)}, "systemInstruction.parts[0].inlineData is"),
        ({"system_instruction": "a", "systemInstruction": "b"}, "are one field; send one of them"),
        ({"tools": {}}, "tools is {}; it should be a list"),
        ({"tools": ["x"]}, "tools[0] is 'x'; send an object with functionDeclarations"),
        (
            {"tools": [{"functionDeclarations": {}}]},
            "tools[0].functionDeclarations is {}; send a list",
        ),
        (
            {"tools": [{"functionDeclarations": [{}]}]},
            "tools[0].functionDeclarations[0].name is None",
        ),
        (
            {"tools": [{"functionDeclarations": [{**CALC, "parametersJsonSchema": {}}]}]},
            "functionDeclarations[0].parametersJsonSchema is {}; leave it out, or parameters",
        ),
        ({"tools": [{"computerUse": {}}]}, "tools[0].computerUse is {}; declare functions in"),
        ({"tools": [{"mcpServers": []}]}, "tools[0].mcpServers is []; connect the agent to them"),
        ({"tools": [{"unheard": 1}]}, "tools[0].unheard is 1; declare functions in"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            f"{CALLING}.mode is 'SOME'; ",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
            f"{CALLING}.mode asks for a call",
        ),
        (
            {
                "tools": TOOLS,
                "toolConfig": {
                    "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}
                },
            },
            f"{CALLING}.allowedFunctionNames is 'x'; name one of the tools",
        ),
        (
            {
                "tools": [{"functionDeclarations": [{"name": n} for n in "abc"]}],
                "toolConfig": {
                    "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["a", "b"]}
                },
            },
            f"{CALLING}.allowedFunctionNames is ['a', 'b']; this gateway can ask for one function",
        ),
        (
            {"cachedContent": "cachedContents/x"},
            "cachedContent is 'cachedContents/x', which this gate",
        ),
        ({"unheard": 1}, "unheard is 1, which this gateway does not support; leave it out"),
        ({CONFIG: {"temperature": 3}}, f"{CONFIG}.temperature is 3; "),
        ({CONFIG: {"topK": 1.5}}, f"{CONFIG}.topK is 1.5; "),
        ({CONFIG: {"max_output_tokens": 0}}, f"{CONFIG}.maxOutputTokens is 0; "),
        ({CONFIG: {"candidateCount": 17}}, f"{CONFIG}.candidateCount is 17; "),
        ({CONFIG: {"presencePenalty": 0.5}}, "the log-probs those of another policy"),
        ({CONFIG: {"responseModalities": ["AUDIO"]}}, f"{CONFIG}.responseModalities[0] is 'AUDIO'"),
        ({CONFIG: {"speechConfig": {}}}, f"{CONFIG}.speechConfig is {{}}, which this gateway does"),
        ({CONFIG: {"logprobs": 3}}, f"{CONFIG}.logprobs is 3; send responseLogprobs: true with it"),
        (
            {CONFIG: {"responseSchema": {"type": "STRING"}}},
            f"{CONFIG}.responseSchema is {{'type': ",
        ),
        (
            {CONFIG: {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING"}}},
            "text/x.enum needs a schema with an enum of texts",
        ),
        (
            {
                CONFIG: {
                    "responseMimeType": "application/json",
                    "responseSchema": {},
                    "responseJsonSchema": {},
                }
            },
            f"{CONFIG}.responseSchema and responseJsonSchema are both there; send one",
        ),
        (
            {CONFIG: {"responseMimeType": "application/json", "responseJsonSchema": 3}},
            f"{CONFIG}.responseJsonSchema is 3; send a JSON schema",
        ),
        ({CONFIG: {"thinkingConfig": {"x": 1}}}, f"{CONFIG}.thinkingConfig.x is 1, which this"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    wire: Wire, body: Any, words: str
) -> None:
    said = await wire.refused(**body)
    assert words in said
    assert not wire.world.engine.requests


async def test_the_form_of_a_stream_is_refused_by_name(wire: Wire) -> None:
    assert "alt is 'proto'; send sse" in await wire.refused(
        method="streamGenerateContent?alt=proto"
    )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
parts = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("text", "thought", "functionCall", "functionResponse", "inline_data", "x"), values
    ),
)


@given(
    body=st.fixed_dictionaries(
        {"contents": st.lists(st.fixed_dictionaries({"parts": st.lists(parts) | values}) | values)},
        optional=dict.fromkeys(
            ("tools", "system_instruction", "generationConfig", "toolConfig", "x"), values
        ),
    )
)
def test_any_body_is_parsed_or_refused(body: Any) -> None:
    with suppress(RequestError):
        Gemini().parse(body)
