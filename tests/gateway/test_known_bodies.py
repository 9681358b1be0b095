"""Parts of a body that an earlier body had are not read again, and no result depends on that.

Random conversations in every dialect, edited as agents (and others) edit them, are read with and
without the memory of earlier bodies: calls, prompts' keys, left-out fields and errors are the same.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from msgspec import structs

from stepwell.gateway import bodies, known_bodies
from stepwell.gateway.access import OPERATOR
from stepwell.gateway.config import NormalizeRule
from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages
from stepwell.gateway.dialects.base import Dialect, Parsed
from stepwell.gateway.dialects.gemini import Gemini
from stepwell.gateway.dialects.openai_chat import ChatParams, OpenAIChat
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.known_bodies import KnownBodies
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.graph import TurnGraph
from stepwell.gateway.tokens.messages import (
    Keys,
    KnownMessages,
    Normalizer,
    extend_key,
    root_key,
    system_of,
)
from stepwell.gateway.web import body_digest, parse_object

Body = dict[str, Any]
URL = ("t", "p")
PATH = "/v1/messages"
WORDS = ("read", 'the "file"', "a\\b", "né", "日本", "😀", "\n", "</think>", "  ", "{}", "1,2", "[")
NORMALIZE = Normalizer([NormalizeRule(role="system", pattern=r"clock \d+", replacement="clock")])


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))


class Chat:
    """Bodies of chat completions, turn by turn."""

    name = "messages"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def dialect(self) -> Dialect:
        return OpenAIChat("reasoning_effort")

    def begin(self) -> Body:
        rng = self.rng
        system = [{"role": rng.choice(["system", "developer"]), "content": text(rng)}]
        return {
            "model": "m",
            "messages": [*(system if rng.random() < 0.7 else []), self.user()],
            **({"tools": self.tools()} if rng.random() < 0.5 else {}),
            "max_tokens": 7,
            **({"verbosity": "low"} if rng.random() < 0.2 else {}),
        }

    def tools(self) -> list[Any]:
        return [
            {"type": "function", "function": self.function(i)}
            for i in range(self.rng.randint(0, 3))
        ]

    def function(self, i: int) -> Body:
        properties = {"messages": {"type": "string"}, "n": {"enum": [2**70, 1.5, None]}}
        parameters = {"type": "object", "properties": properties}
        return {"name": f"f{i}", "description": text(self.rng), "parameters": parameters}

    def user(self) -> Body:
        said: Any = text(self.rng)
        return {
            "role": "user",
            "content": self.rng.choice([said, [{"type": "text", "text": said}]]),
        }

    def reply(self) -> list[Any]:
        rng = self.rng
        if rng.random() < 0.5:
            thought = {"reasoning_content": text(rng)} if rng.random() < 0.3 else {}
            return [{"role": "assistant", "content": text(rng), **thought}, self.user()]
        calls = [
            {"id": f"c{i}", "function": {"name": "f0", "arguments": json.dumps({"a": text(rng)})}}
            for i in range(rng.randint(1, 3))
        ]
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": text(rng)} for call in calls
        ]
        rng.shuffle(outputs)
        return [{"role": "assistant", "content": None, "tool_calls": calls}, *outputs]


class Anthropic(Chat):
    def dialect(self) -> Dialect:
        return AnthropicMessages()

    def begin(self) -> Body:
        rng = self.rng
        body: Body = {"max_tokens": 5, "messages": [self.user()], "tools": self.tools()}
        if rng.random() < 0.7:
            body["system"] = [{"type": "text", "text": text(rng)}]
        elif rng.random() < 0.5:
            body["messages"].insert(0, {"role": "system", "content": text(rng)})
        if rng.random() < 0.3:
            body["context_management"] = {}
        return body

    def tools(self) -> list[Any]:
        made: list[Any] = [
            {"name": f"f{i}", "input_schema": self.function(i)["parameters"], "strict": True}
            for i in range(self.rng.randint(0, 3))
        ]
        return [*made, {"type": "web_search_20250305"}] if self.rng.random() < 0.3 else made

    def user(self) -> Body:
        return {"role": "user", "content": [{"type": "text", "text": text(self.rng)}]}

    def reply(self) -> list[Any]:
        rng = self.rng
        said = {"role": "assistant", "content": [{"type": "text", "text": text(rng)}]}
        if rng.random() < 0.5:
            return [said, self.user()]
        uses = [
            {"type": "tool_use", "id": f"u{i}", "name": "f0", "input": {"a": text(rng)}}
            for i in range(rng.randint(1, 3))
        ]
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": text(rng)} for use in uses
        ]
        pieces = [said, {"role": "assistant", "content": uses}]
        return [*pieces, {"role": "user", "content": [*results, {"type": "text", "text": "x"}]}]


class Responses(Chat):
    name = "input"

    def dialect(self) -> Dialect:
        return OpenAIResponses()

    def begin(self) -> Body:
        rng = self.rng
        body: Body = {"input": [self.user()], "tools": self.tools(), "truncation": "auto"}
        if rng.random() < 0.5:
            body["instructions"] = text(rng)
        if rng.random() < 0.3:
            body["input"].insert(0, {"role": "developer", "content": text(rng)})
        return body

    def tools(self) -> list[Any]:
        rng = self.rng
        made: list[Any] = [
            {"type": "function", **self.function(i)} for i in range(rng.randint(0, 3))
        ]
        if rng.random() < 0.3:
            made.append(
                {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "c"}]}
            )
        return [*made, {"type": "web_search"}] if rng.random() < 0.3 else made

    def user(self) -> Body:
        return {"role": "user", "content": [{"type": "input_text", "text": text(self.rng)}]}

    def reply(self) -> list[Any]:
        rng = self.rng
        items: list[Any] = []
        if rng.random() < 0.4:
            thought = {"summary": [{"type": "summary_text", "text": text(rng)}]}
            items.append({"type": "reasoning", "encrypted_content": "foreign", **thought})
        items.append({"role": "assistant", "content": [{"type": "output_text", "text": text(rng)}]})
        if rng.random() < 0.5:
            return [*items, self.user()]
        ids = [f"c{i}" for i in range(rng.randint(1, 3))]
        call = {"type": "function_call", "name": "f0", "arguments": "{}"}
        items += [{**call, "call_id": each} for each in ids]
        rng.shuffle(ids)
        done = {"type": "function_call_output", "output": text(rng)}
        return [*items, *({**done, "call_id": each} for each in ids)]


class GeminiBodies(Chat):
    name = "contents"

    def dialect(self) -> Dialect:
        return Gemini("reasoning_effort")

    def begin(self) -> Body:
        rng = self.rng
        body: Body = {"contents": [self.user()], "tools": self.tools()}
        if rng.random() < 0.6:
            body["systemInstruction"] = {"parts": [{"text": text(rng)}]}
        if rng.random() < 0.3:
            body["safetySettings"] = [{}]
        return body

    def tools(self) -> list[Any]:
        made = [self.function(i) for i in range(self.rng.randint(0, 3))]
        return [{"functionDeclarations": made}, {"googleSearch": {}}]

    def user(self) -> Body:
        return {"role": "user", "parts": [{"text": text(self.rng)}]}

    def reply(self) -> list[Any]:
        rng = self.rng
        parts: list[Any] = [{"text": text(rng)}]
        if rng.random() < 0.5:
            return [{"role": "model", "parts": parts}, self.user()]
        names = [f"f{i}" for i in range(rng.randint(1, 3))]
        parts += [{"functionCall": {"name": name, "args": {"a": text(rng)}}} for name in names]
        rng.shuffle(names)
        done = [{"functionResponse": {"name": name, "response": {"output": "x"}}} for name in names]
        return [{"role": "model", "parts": parts}, {"role": "user", "parts": done}]


def edited(body: Body, name: str, kind: Chat) -> Body:
    """Change a request as agents and others do."""
    rng, items = kind.rng, [*body[name]] or [kind.user()]
    i = rng.randrange(len(items))
    match rng.randrange(16):
        case 0:
            items[i] = kind.user()
        case 1:
            del items[i]
        case 2:
            items.insert(i, kind.user())
        case 3:
            items.append(kind.user())
        case 4:
            items = items[: i + 1]
        case 5:
            return {**body, "tools": kind.tools()}
        case 6:
            return {**kind.begin(), name: items}
        case 7:
            items[i] = rng.choice([3, None, {}, {"role": "nobody"}, "x"])
        case 8:
            return {**body, rng.choice(["unknown", "top_p"]): 7}
        case 9:
            return dict(reversed(body.items()))
        case 10 if isinstance(items[i], dict):
            items[i] = {**items[i], "cache_control": {"type": "ephemeral"}}
        case 11:
            return {**body, "previous_response_id": "resp_none"}
        case 12:
            return {**body, "system": "other", "instructions": "other"}
        case 13:
            return {**body, "tools": [{"name": 5}]}
        case 14:
            items.append({"type": "item_reference", "id": "x"})
        case _:
            items += kind.reply()[:1]
    return {**body, name: items}


def written(body: Body, name: str, rng: random.Random, style: int) -> bytes:
    """A body as clients write it, and sometimes broken."""
    styles: list[Body] = [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}]
    made = json.dumps(body, **styles[style])
    if rng.random() < 0.04:
        at = rng.randrange(len(made))
        made = rng.choice([made[:at], made[:at] + rng.choice('"]},:') + made[at:]])
    elif rng.random() < 0.04:
        made = made[:-1] + f', "{name}": ' + rng.choice(["[]", "[1]", "null"]) + "}"
    elif rng.random() < 0.02:
        made = made.replace(f'"{name}"', f'"\\u{ord(name[0]):04x}{name[1:]}"', 1)
    return made.encode()


def outcome(parse: Callable[[], Parsed]) -> Any:
    try:
        return parse()
    except GatewayError as e:
        return type(e), str(e), e.param


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, tuple):
        assert got == wanted
        return
    for each in structs.fields(Parsed):
        if each.name not in ("call", "options", "digest", "remember"):
            assert getattr(got, each.name) == getattr(wanted, each.name), each.name
    assert options_of(got) == options_of(wanted)
    same_call(got.call, wanted.call)


def same_call(got: ChatRequest, wanted: ChatRequest) -> None:
    for field in structs.fields(ChatRequest):
        if field.name not in ("messages", "began_at", "_keys"):
            assert getattr(got, field.name) == getattr(wanted, field.name), field.name


def options_of(parsed: Parsed) -> Any:
    options = parsed.options
    return (
        options.model_dump(exclude={"messages", "tools"})
        if isinstance(options, ChatParams)
        else options
    )


@pytest.fixture(autouse=True)
def short_bodies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bodies, "LEAST_BYTES", 0)


@pytest.mark.slow
@pytest.mark.hypothesis  # `make test-long` tries more
@pytest.mark.parametrize("kind", [Chat, Anthropic, Responses, GeminiBodies])
def test_bodies_say_the_same_whether_their_beginning_is_known_or_not(kind: type[Chat]) -> None:
    n_known = n_framed = n_attached = 0
    n_conversations = 4 * settings().max_examples
    for seed in range(n_conversations):
        rng = random.Random(seed)
        bodies = KnownBodies()
        made, graph = kind(rng), TurnGraph()
        dialect, plain = made.dialect(), made.dialect()
        body, style = made.begin(), rng.randrange(4)
        for _ in range(10):
            sent = written(body, made.name, rng, style)
            n, framed = bodies.n_known, bodies.n_framed

            def read(sent: bytes = sent, dialect: Dialect = dialect) -> Parsed:
                asked = dialect, sent, PATH, OPERATOR, URL
                parsed = bodies.read(*asked) or bodies.read_new(*asked)  # noqa: B023
                return parsed or dialect.parse(parse_object(sent), OPERATOR)

            def whole(sent: bytes = sent, plain: Dialect = plain) -> Parsed:
                return plain.parse(parse_object(sent), OPERATOR)

            got, wanted = outcome(read), outcome(whole)
            same(got, wanted)
            if isinstance(got, Parsed):
                assert got.remember is not None
                assert got.digest == body_digest(sent)
                if rng.random() < 0.8:
                    add_echoes(graph, wanted.call)
                n_attached += check_call(got.call, wanted.call, graph, got.remember)
                n_known += bodies.n_known - n
                n_framed += bodies.n_framed - framed
            if rng.random() < 0.25:
                body = edited(body, made.name, made)
            elif isinstance(got, Parsed):
                body = {**body, made.name: [*body[made.name], *made.reply()]}
            else:
                body = made.begin()
    assert n_known > 1.6 * n_conversations
    assert n_framed > n_conversations
    assert n_attached > n_conversations


class Plain(Chat):
    """Bodies of text alone."""

    def begin(self) -> Body:
        rng = self.rng
        system = [{"role": "system", "content": text(rng)}] if rng.random() < 0.7 else []
        return {"model": "m", "messages": [*system, self.user()], "temperature": 0.5}

    def user(self) -> Body:
        return {"role": "user", "content": text(self.rng)}

    def reply(self) -> list[Any]:
        said = {"role": "assistant", "content": text(self.rng)}
        null = {"refusal": None} if self.rng.random() < 0.3 else {}
        return [{**said, **null}, self.user()]


@pytest.mark.hypothesis  # `make test-long` tries more
def test_a_body_of_text_alone_says_what_it_says_field_by_field() -> None:
    n_plain = 0
    n_conversations = 4 * settings().max_examples
    for seed in range(n_conversations):
        rng = random.Random(seed)
        made = Plain(rng)
        dialect, body, style = made.dialect(), made.begin(), rng.randrange(4)
        for _ in range(10):
            sent = written(body, made.name, rng, style)
            if (got := dialect.parse_plain(sent)) is not None:
                wanted = dialect.parse(parse_object(sent), OPERATOR)
                assert [*got.call.messages] == [*wanted.call.messages]
                same_call(got.call, wanted.call)
                n_plain += 1
            if rng.random() < 0.25:
                body = edited(body, made.name, made)
            elif got is not None:
                body = {**body, made.name: [*body[made.name], *made.reply()]}
            else:
                body = made.begin()
    assert n_plain > 5 * n_conversations


def check_call(
    got: ChatRequest, wanted: ChatRequest, graph: TurnGraph, remember: Callable[..., None]
) -> bool:
    """Compare a call with the one of the whole body as the graph sees it. Return true if it extends
    a turn and its beginning was not read."""
    got = got.changed(messages=NORMALIZE(got.messages))
    wanted = wanted.changed(messages=NORMALIZE(wanted.messages))
    key = root = root_key([*wanted.tools] if wanted.tools else None, wanted.template_args or {})
    for message in wanted.messages:
        key = extend_key(key, message)
    keys = Keys(root, got.messages)
    attached = graph.attach(root, keys)
    remember(got)
    is_known = isinstance(got.messages, KnownMessages) and got.messages._read is not None
    assert attached == graph.attach(root, Keys(root, [*wanted.messages]))
    assert (got.keys.root, got.keys.prompt) == (root, key)
    assert [*system_of(got.messages)] == [*system_of(wanted.messages)]
    turn, n, _ = attached
    if turn is not None:
        assert [*got.messages[n:]] == [*wanted.messages[n:]]
        if isinstance(got.messages, KnownMessages) and n > got.messages.prefix.n_messages:
            assert is_known is (got.messages._read is not None)  # nothing of it read the rest
    assert len(got.messages) == len(wanted.messages)
    is_known = is_known and turn is not None
    assert [*got.messages] == [*wanted.messages]
    return is_known


def add_echoes(graph: TurnGraph, call: ChatRequest) -> None:
    """Store a turn for each reply in the conversation, as if it had been sampled here."""
    key = root = root_key(call.tools, call.template_args or {})
    ids = np.array([1], np.int32)
    for message in NORMALIZE(call.messages):
        before, key = key, extend_key(key, message)
        if message["role"] == "assistant":
            graph.add(
                (root, before, key, None),
                parent=None,
                new_prompt_ids=ids,
                response_ids=ids,
                calls=(),
                has_reasoning=False,
                step_index=None,
            )


def test_the_digest_of_a_body_is_the_one_of_its_bytes() -> None:
    assert body_digest(b"{}") == hashlib.sha256(b"{}").hexdigest()


def test_marks_serve_only_the_trajectory_or_the_caller_that_left_them() -> None:
    bodies, dialect = KnownBodies(), OpenAIChat()
    first = [{"role": "user", "content": "hi"}]
    longer = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

    def read(messages: list[Any], url: Any, caller: Any = OPERATOR) -> bool:
        n = bodies.n_known
        body = json.dumps({"messages": messages}).encode()
        asked = dialect, body, PATH, caller, url
        parsed = bodies.read(*asked) or bodies.read_new(*asked)
        assert parsed is not None
        assert parsed.remember is not None
        parsed.remember(parsed.call)
        return bodies.n_known > n

    assert not read(first, URL)
    assert not read(longer, ("other", "p"))
    assert not read(longer, None)
    assert read(longer, URL)
    assert not read(first, None)
    assert read(longer, None)
    assert not read(longer, None, OPERATOR._replace(owner="a"))


def test_deletion_leaves_no_text() -> None:
    bodies, dialect = KnownBodies(), OpenAIChat()
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    parsed = bodies.read_new(dialect, json.dumps(body).encode(), PATH, OPERATOR, URL)
    assert parsed is not None
    assert parsed.remember is not None
    parsed.remember(parsed.call)
    assert bodies._tools
    assert bodies._frames
    bodies.forget()
    assert not bodies._tools
    assert not bodies._frames


def test_a_short_body_is_worth_comparing_if_it_brings_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_bodies, "LEAST_BYTES", 8192)
    said = [{"role": "user", "content": 'he said "tools"'}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert not known_bodies.is_worth_comparing(json.dumps({"messages": said}).encode())
    assert known_bodies.is_worth_comparing(json.dumps({"messages": said, "tools": tools}).encode())


def test_signs_of_a_text_are_the_same_however_long_it_is() -> None:
    part = b'{"a": [1, 2], "b": [{}, "x,y"]},'
    n = 2 * bodies.FEW // len(part)
    few, many = bodies.signs_in(part), bodies.signs_in(part * n)
    assert few == (6, 4, 5)
    assert many == tuple(n * each for each in few)
