"""The turn graph without HTTP: what counts as the same conversation, and which turn is extended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway.tokens.graph import TurnGraph, join
from stepwell.gateway.tokens.messages import Keys, canonical, parse_arguments, root_key
from tests.gateway.conftest import add_turn

ROOT = root_key(None, {})


def say(role: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, call_id: str = "c1", name: str = "f") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def add(graph: TurnGraph, messages: list[Any], reply: Any, index: int, root: bytes = ROOT) -> Any:
    return add_turn(
        graph,
        root,
        messages,
        reply,
        new_prompt_ids=[index, 100],
        response_ids=[200 + index],
        step_index=index,
    )


def attach(graph: TurnGraph, messages: list[Any]) -> Any:
    return graph.attach(ROOT, Keys(ROOT, messages))


def test_the_deepest_stored_turn_is_extended() -> None:
    graph = TurnGraph()
    one = [say("user", "a")]
    first = add(graph, one, say("assistant", "b"), 0)
    two = [*one, say("assistant", "b"), say("user", "c")]
    second = add(graph, two, say("assistant", "d"), 1)
    assert second.parent == first
    assert attach(graph, [*two, say("assistant", "d"), say("user", "e")]) == (second, 4, None)
    assert attach(graph, [*two, say("assistant", "other"), say("user", "e")]) == (first, 2, None)
    assert join(second.arrays()).tolist() == [0, 100, 200, 1, 100, 201]
    assert second.n_tokens == 6


@pytest.mark.parametrize(
    "echo",
    [
        say("assistant", "b"),
        say("assistant", " b\n"),
        say("assistant", "b", tool_calls=[call('{"x": 1}')]),
        say("assistant", "b", reasoning_content="because"),
        say("assistant", "c"),
        say("user", "b"),
    ],
)
def test_keys_that_go_on_from_a_reply_are_those_of_the_messages(echo: Any) -> None:
    first = [say("system", "s"), say("user", "a")]
    before = Keys(ROOT, first)
    assert before.reply(say("assistant", "b")) == Keys(ROOT, [*first, say("assistant", "b")]).prompt
    for messages in ([*first, echo, say("user", "c")], [*first, echo], first, first[:1]):
        assert [*Keys(ROOT, messages, before)] == [*Keys(ROOT, messages)]


def test_forks_of_one_turn_share_its_tokens() -> None:
    graph = TurnGraph()
    one = [say("user", "a")]
    first = add(graph, one, say("assistant", "b"), 0)
    forks = [
        add(graph, [*one, say("assistant", "b"), say("user", x)], say("assistant", x), i + 1)
        for i, x in enumerate("xyz")
    ]
    assert all(f.parent == first for f in forks)


def test_the_same_prompt_again_is_attached_as_before() -> None:
    graph = TurnGraph()
    one = [say("user", "a")]
    first = add(graph, one, say("assistant", "b"), 0)
    assert attach(graph, one) == (None, 0, "resampled")
    two = [*one, say("assistant", "b"), say("user", "c")]
    add(graph, two, say("assistant", "d"), 1)
    assert attach(graph, two) == (first, 2, None)


def test_a_turn_knows_the_nearest_step_above_white_box_turns() -> None:
    graph = TurnGraph()
    one = [say("user", "a")]
    first = add(graph, one, say("assistant", "b"), 0)
    two = [*one, say("assistant", "b"), say("user", "c")]
    white = add_turn(
        graph,
        ROOT,
        two,
        say("assistant", "d"),
        new_prompt_ids=[1],
        response_ids=[2],
        step_index=None,
    )
    assert white.nearest() is first


def test_empty_contents_are_one() -> None:
    calls = [call('{"a": 1}')]
    forms = [
        say("assistant", None, tool_calls=calls),
        say("assistant", "", tool_calls=calls),
        say("assistant", "\n", tool_calls=calls),
        {"role": "assistant", "tool_calls": calls},
    ]
    assert len({canonical(f) for f in forms}) == 1


def test_arguments_compare_as_values_and_calls_by_id() -> None:
    same = [call('{"a": 1, "b": [2]}'), call('{"b":[2],"a":1}'), call({"b": [2], "a": 1})]
    assert len({canonical(say("assistant", tool_calls=[c])) for c in same}) == 1
    other = [call('{"a": 1}', "c2"), call('{"a": 2}'), call('{"a": 1}', name="g"), call("{a: 1}")]
    forms = [canonical(say("assistant", tool_calls=[c])) for c in [same[0], *other]]
    assert len(set(forms)) == 5


def test_reasoning_kept_or_dropped_is_the_same_reply() -> None:
    forms = [
        say("assistant", "<think>\nhm\n</think>\n\nyes"),
        say("assistant", "yes", reasoning_content="hm"),
        say("assistant", " yes\n"),
    ]
    assert len({canonical(f) for f in forms}) == 1


def test_user_and_tool_text_must_be_equal_to_the_letter() -> None:
    forms = [say("user", "a"), say("user", "a "), say("system", "a"), say("tool", "a")]
    assert len({canonical(f) for f in forms}) == 4
    answers = [say("tool", "a", tool_call_id=i) for i in ("c1", "c2")]
    assert canonical(answers[0]) != canonical(answers[1])


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ('{"x": 1}', {"x": 1}),
        ("[1]", "[1]"),
        ("{bad", "{bad"),
        ('{"x": NaN}', '{"x": NaN}'),
        ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (" \n", {}),
        ('{"x": 123456789012345678901}', {"x": 123456789012345678901}),
    ],
)
def test_only_json_objects_and_blanks_are_arguments(sent: Any, value: Any) -> None:
    assert parse_arguments(sent) == value
    canonical(say("assistant", tool_calls=[call(sent)]))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=8), st.data())
def test_a_request_attaches_exactly_as_deep_as_it_agrees(
    history: list[tuple[str, str]], data: Any
) -> None:
    graph = TurnGraph()
    messages: list[Any] = []
    for i, (asked, said) in enumerate(history):
        messages = [*messages, say("user", asked)]
        add(graph, messages, say("assistant", said), i)
        messages = [*messages, say("assistant", said)]
    edit = data.draw(st.integers(0, len(messages)))
    changed = [*messages[:edit], say("user", "CHANGED")] if edit < len(messages) else messages
    turn, n_known, _ = attach(graph, [*changed, say("user", "next")])
    assert n_known == min(edit, len(messages)) // 2 * 2
    assert (turn is None) == (n_known == 0)


def test_other_tools_or_template_arguments_are_another_conversation() -> None:
    keys = [
        root_key(tools, args)
        for tools, args in itertools.product((None, [{"a": 1}], [{"a": 2}]), ({}, {"x": 1}))
    ]
    assert len(set(keys)) == 6
    assert root_key([], {}) == root_key(None, {})
