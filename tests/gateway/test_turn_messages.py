"""The messages that Steps keep: what each turn adds, bounded, redacted, or none."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from stepwell.gateway.config import GatewayConfig, Tuning
from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.tokens.messages import TurnMessages
from tests.helpers import PanicError

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "secret 42"},
]


async def converse(world: Any) -> list[Any]:
    """Three turns, of which the second begins another branch; what their Steps keep."""
    client = await world.client()
    messages = [*ASKED]
    world.say('Look<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>')
    done = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    reply = done.choices[0].message
    world.say("a title")
    await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "make a title"}]
    )
    result = {"role": "tool", "content": "saw 42", "tool_call_id": reply.tool_calls[0].id}
    messages = [*messages, reply.model_dump(exclude_none=True), result]
    world.say("done")
    await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    return [step.metadata.get("messages") for step in world.stored()]


async def test_each_step_keeps_what_its_turn_adds(world: Any) -> None:
    first, title, last = await converse(world)
    assert first[:2] == ASKED
    assert [c["function"]["arguments"] for c in first[2]["tool_calls"]] == ['{"at": "é"}']
    assert (first[2]["role"], first[2]["content"]) == ("assistant", "Look")
    assert [(m["role"], m["content"]) for m in title] == [
        ("user", "make a title"),
        ("assistant", "a title"),
    ]
    assert [(m["role"], m["content"]) for m in last] == [
        ("tool", "saw 42"),
        ("assistant", "done"),
    ]


async def test_keep_messages_false_keeps_none(worlds: Any) -> None:
    assert await converse(await worlds(keep_messages=False)) == [None, None, None]


async def test_a_turn_over_the_bound_keeps_none_and_others_keep_theirs(worlds: Any) -> None:
    first, title, last = await converse(await worlds(tuning=Tuning(max_message_bytes=200)))
    assert first is None
    assert (title, last) != (None, None)


async def test_completions_and_exact_prompts_keep_none(world: Any) -> None:
    client = await world.client()
    world.say("4")
    await client.completions.create(model="m", prompt="2 + 2 =")
    assert "messages" not in world.stored()[0].metadata


def redact(messages: list[Any]) -> list[Any]:
    for message in messages:  # its own copies
        message["content"] = message["content"].replace("42", "##")
    return messages


def redact_badly(messages: list[Any]) -> list[Any]:
    raise RuntimeError("no rules")


async def test_what_is_redacted_is_kept_nowhere_and_the_model_sees_it(worlds: Any) -> None:
    world = await worlds(redact_messages=f"{__name__}:redact")
    first, _, last = await converse(world)
    assert first[1]["content"] == "secret ##"
    assert last[0]["content"] == "saw ##"
    assert "42" in world.tokenizer.decode(world.engine.requests[-1]["input_ids"])


def redact_and_exit(messages: list[Any]) -> list[Any]:
    sys.exit("no list of names")


def redact_and_panic(messages: list[Any]) -> list[Any]:
    raise PanicError("called `Option::unwrap()` on a `None` value")


@pytest.mark.parametrize("redact", ["redact_badly", "redact_and_exit", "redact_and_panic"])
async def test_where_redaction_fails_nothing_is_kept_and_the_call_is_answered(
    worlds: Any, redact: str
) -> None:
    world = await worlds(redact_messages=f"{__name__}:{redact}")
    assert await converse(world) == [None, None, None]


def redact_with_a_seed(messages: list[Any]) -> list[Any]:
    random.seed(0)
    return messages


async def test_no_two_calls_have_one_id_whatever_a_function_of_the_user_does(worlds: Any) -> None:
    world = await worlds(redact_messages=f"{__name__}:redact_with_a_seed")
    client, state = await world.client(), random.getstate()
    ids: list[str] = []
    for n in range(3):
        world.say('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        messages: list[Any] = [{"role": "user", "content": f"look {n}"}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        [call] = answer.choices[0].message.tool_calls
        ids += [answer.id, call.id, world.engine.requests[-1]["rid"]]
    random.setstate(state)
    assert len({*ids}) == 9


@pytest.mark.parametrize("odd", [2**80, "\ud800"])
def test_what_no_step_can_carry_is_not_kept(odd: Any) -> None:
    reply = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x": odd}}]}
    assert TurnMessages(GatewayConfig()).of([], reply) is None


@pytest.mark.parametrize("path", ["no.such:thing", f"{__name__}:ASKED"])
def test_a_redaction_that_cannot_be_called_is_named(path: str) -> None:
    with pytest.raises(GatewayConfigError, match=r"gateway\.redact_messages"):
        TurnMessages(GatewayConfig(redact_messages=path))
