"""Rendering and the sentinel cut: strict prefixes over random conversations, templates and ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.tokens.graph import TurnGraph, join
from stepwell.gateway.tokens.messages import Keys, root_key
from stepwell.gateway.tokens.render import ChatRenderer, CutError
from stepwell.gateway.tokens.template import ChatTemplate
from tests.gateway.conftest import add_turn, make_template

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TRICKY = st.sampled_from(
    ["", " ", "\n", "<|im_end|>", "a<|eot_id|>b", "</s>", "<tool_call>", "<think>x", "nonce"]
)
WORDS = st.one_of(TEXT, TRICKY, st.builds(lambda a, b: a + b, TEXT, TRICKY))


@st.composite
def turns(draw: Any) -> list[dict[str, Any]]:
    """Turns of a script: the model's text, how it ends, and the agent's answer."""
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "said": WORDS,
                    "calls": st.integers(0, 2),
                    "closed": st.booleans(),
                    "then": st.lists(WORDS, min_size=0, max_size=2),
                }
            ),
            min_size=2,
            max_size=5,
        )
    )


OTHERS = ["deepseekv3", "deepseekv31", "kimi_k2", "ministral", "minimax-m2"]
"""Families with further forms of calls."""


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    "family", ["chatml", "qwen3", "llama3", "no_tools", "kimi_k2", "minimax-m2"]
)
def test_every_continued_turn_strictly_extends_what_was_sampled(
    family: str, tokenizer_of: Callable[[str], Any]
) -> None:
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer)
    n_cut = 0

    # Fewer would not always cut often enough.
    @settings(max_examples=max(60, settings().max_examples))
    @given(turns(), st.booleans(), WORDS, st.booleans())
    def check(script: list[dict[str, Any]], system: bool, question: str, tools: bool) -> None:
        nonlocal n_cut
        offered = TOOLS if tools and family != "no_tools" else None
        graph, root = TurnGraph(), root_key(offered, {})
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": "be kind"})
        messages.append({"role": "user", "content": question})
        for i, turn in enumerate(script):
            parent, n_known, _ = graph.attach(root, Keys(root, messages))
            if parent is None:
                assert i == 0
                new_ids = renderer.whole(messages, offered, {})
                prompt = new_ids
            else:
                known, new = messages[:n_known], messages[n_known:]
                new_ids = renderer.suffix(parent, known, new, offered, {})
                n_cut += 1
                before = join(parent.arrays())
                prompt = join([before, new_ids])
                # The prompt extends what was sampled, and closes the turn exactly once.
                assert prompt[: len(before)].tolist() == before.tolist()
                ended = parent.response_ids[-1] == renderer.turn_close_id
                assert (new_ids[0] == renderer.turn_close_id) != ended
                assert tokenizer.decode(new_ids.tolist()).endswith(
                    renderer.text(messages, offered, {})[-12:]
                )
            said = [*tokenizer.encode(turn["said"]).tolist()] or [int(prompt[-1])]
            if turn["closed"]:
                said.append(renderer.turn_close_id)
            reply: dict[str, Any] = {"role": "assistant", "content": turn["said"]}
            n_calls = min(turn["calls"], 1 if family == "llama3" else 2)
            if offered and n_calls:
                reply["tool_calls"] = [
                    {
                        "id": f"c{i}{j}",
                        "type": "function",
                        "function": {"name": "calc", "arguments": '{"x": "<|im_end|>"}'},
                    }
                    for j in range(n_calls)
                ]
            add_turn(
                graph,
                root,
                messages,
                reply,
                new_prompt_ids=new_ids,
                response_ids=said,
                step_index=i,
            )
            messages = [*messages, reply]
            for call in reply.get("tool_calls", []):
                messages.append(
                    {"role": "tool", "content": turn["said"], "tool_call_id": call["id"]}
                )
            for text in turn["then"]:
                messages.append({"role": "user", "content": text})

    check()
    assert n_cut >= 60


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3", "no_tools", *OTHERS])
def test_the_cut_yields_what_the_whole_template_writes_there(
    family: str, tokenizer_of: Callable[[str], Any]
) -> None:
    tokenizer = tokenizer_of(family)
    renderer = ChatRenderer(tokenizer)
    for calls in (0, 1) if family in ("llama3", "no_tools") else (0, 1, 2):
        if family == "no_tools" and calls:
            continue
        reply: dict[str, Any] = {"role": "assistant", "content": "" if calls else "said"}
        if calls:
            reply["tool_calls"] = [
                {
                    "id": f"c{i}",
                    "type": "function",
                    "function": {"name": "calc", "arguments": {"x": i}},
                }
                for i in range(calls)
            ]
        known = [{"role": "user", "content": "question"}, reply]
        new: list[Any] = [
            {"role": "tool", "content": f"result {i}", "tool_call_id": f"c{i}"}
            for i in range(calls)
        ]
        new.append({"role": "user", "content": "and then?"})
        tools = TOOLS if calls else None
        graph = TurnGraph()
        root = root_key(tools, {})
        turn = add_turn(
            graph,
            root,
            known[:1],
            reply,
            new_prompt_ids=renderer.whole(known[:1], tools, {}),
            response_ids=[renderer.turn_close_id],
            step_index=0,
        )
        suffix = tokenizer.decode(renderer.suffix(turn, known, new, tools, {}).tolist())
        whole = renderer.text([*known, *new], tools, {})
        close = next(t for t, i in tokenizer.special.items() if i == renderer.turn_close_id)
        assert whole.endswith(close + suffix)
        assert suffix.count("and then?") == 1
        assert suffix.count("result") == calls


def test_a_template_that_renders_the_turn_otherwise_is_not_cut(
    tokenizer_of: Callable[[str], Any],
) -> None:
    tokenizer = tokenizer_of("chatml")
    renderer = ChatRenderer(tokenizer)
    turn = _first_turn()
    plain = tokenizer.template
    try:
        shown = "{{- m.content + (' (old)' if not loop.last else '') }}"
        tokenizer.template = make_template("chatml", plain.text.replace("{{- m.content }}", shown))
        with pytest.raises(CutError, match="cut_failed"):
            renderer.suffix(
                turn,
                [{"role": "user", "content": "q"}],
                [{"role": "user", "content": "n"}],
                None,
                {},
            )
    finally:
        tokenizer.template = plain


def test_a_template_without_turn_close_is_never_cut(tokenizer_of: Callable[[str], Any]) -> None:
    renderer = ChatRenderer(tokenizer_of("unclosed"))
    assert renderer.turn_close_id is None
    with pytest.raises(CutError, match="no_turn_close"):
        renderer.suffix(_first_turn(), [], [{"role": "user", "content": "n"}], None, {})


def test_what_a_template_refuses_is_the_request_at_fault(
    tokenizer_of: Callable[[str], Any],
) -> None:
    renderer = ChatRenderer(tokenizer_of("llama3"))
    with pytest.raises(RequestError, match="tools need a first user message"):
        renderer.whole([{"role": "assistant", "content": "x"}], TOOLS, {})


@pytest.mark.hypothesis
def test_user_text_round_trips_without_control_tokens(tokenizer: Any) -> None:
    parts = st.lists(st.one_of(TEXT, st.sampled_from(["<|im_end|>", "<|im_start|>"])), max_size=6)

    @given(parts.map("".join))
    def check(text: str) -> None:
        rendered = tokenizer.render(
            [{"role": "user", "content": text}], None, {}, add_generation_prompt=False
        )
        ids = tokenizer.encode(rendered).tolist()
        assert ids.count(tokenizer.special["<|im_start|>"]) == 1
        assert ids.count(tokenizer.special["<|im_end|>"]) == 1
        assert tokenizer.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n"

    check()


def _first_turn(calls: Any = ()) -> Any:
    graph, root = TurnGraph(), root_key(None, {})
    entries = [ToolCall(*call).entry() for call in calls]
    return add_turn(
        graph,
        root,
        [{"role": "user", "content": "q"}],
        {"role": "assistant", "content": "a", "tool_calls": entries},
        new_prompt_ids=[1],
        response_ids=[2],
        step_index=0,
    )


PIECES = ["a", " ", "\n", "\t", "\r", "é😀", "{}", "[", "0", ".", "\\", "user", "system"]
PIECES += ["<think>", "</think>", "<tool_response>", "</tool_response>", "<|im_", "end|>"]


@pytest.mark.parametrize(
    "family", ["chatml", "qwen3", "llama3", "no_tools", "deepseek", "glm45", "mistral", *OTHERS]
)
def test_a_plain_message_is_put_where_the_template_puts_it(
    family: str, tokenizer_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(family)
    renderer, rendered = ChatRenderer(tokenizer), ChatRenderer(tokenizer)
    monkeypatch.setattr(rendered, "_plain", lambda *given: None)
    turn, rng = _first_turn(), random.Random(0)
    pieces = [*PIECES, *tokenizer.special]
    systems = [[], *([{"role": "system", "content": text}] for text in ("be kind", "be brief"))]
    for _ in range(1500):
        content = "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        known, tools = rng.choice(systems), rng.choice([None, TOOLS])
        tools = None if family == "no_tools" else tools
        asked = turn, known, [{"role": "user", "content": content}], tools, {}
        assert _suffix(renderer, *asked) == _suffix(rendered, *asked), content
    assert any(renderer._around.values()) is (family != "llama3")  # Llama's strips messages


SHOWS_IDS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function | tojson + call.id }}{%- endfor %}"
    "{{- m.tool_call_id or '' }}{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    "family", ["chatml", "qwen3", "llama3", "deepseek", "shows_ids", "glm45", *OTHERS]
)
def test_a_plain_result_of_a_tool_is_put_where_the_template_puts_it(
    family: str, tokenizer_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("chatml" if family == "shows_ids" else family)
    if family == "shows_ids":
        monkeypatch.setattr(tokenizer, "template", ChatTemplate(SHOWS_IDS, {}))
    renderer, rendered = ChatRenderer(tokenizer), ChatRenderer(tokenizer)
    monkeypatch.setattr(rendered, "_plain", lambda *given: None)
    rng, pieces = random.Random(0), [*PIECES, *tokenizer.special]
    ids = ["call_01", "call_92", "call_333", "c", ""]
    for _ in range(1500):
        calls = [(rng.choice(ids), rng.choice("fg"), "{}") for _ in range(rng.choice([1, 1, 1, 2]))]
        content = "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        result = {"role": "tool", "content": content, "tool_call_id": rng.choice(ids)}
        if rng.random() < 0.7:
            result["tool_call_id"] = calls[0][0]
        known = rng.choice([[], [{"role": "system", "content": "be kind"}]])
        new = [result, *([{"role": "user", "content": "?"}] * (rng.random() < 0.1))]
        asked = _first_turn(tuple(calls)), known, new, TOOLS, {}
        assert _suffix(renderer, *asked) == _suffix(rendered, *asked), (calls, new)
    assert any(renderer._around.values()) is (family not in ("deepseek", "shows_ids", "kimi_k2"))


SHOWS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}SHOWN{{- '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LOOKED_FOR = {
    "line ends": ("{{- m.content.replace('\\r\\n', '\\n') }}", "a\r\nb"),
    "white space": ("{{- m.content | replace('  ', ' ') }}", "a  b"),
    "a beginning": ("{{- m.content[1:] if m.content.startswith('\t') else m.content }}", "\ta"),
    "an end": ("{{- m.content + ('' if m.content.endswith('\n\n') else '.') }}", "a\n\n"),
    "a name": ("{%- set mark = '/quick' %}{{- m.content.replace(mark, '') }}", "a /quick"),
    "each of some": (
        "{%- set ns = namespace(text=m.content) %}{%- for mark in ['/slow', '/quick'] %}"
        "{%- set ns.text = ns.text.replace(mark, '') %}{%- endfor %}{{- ns.text }}",
        "a /quick",
    ),
    "a default": (
        "{%- macro shown(text, mark='/quick') %}{{- text.replace(mark, '') }}{%- endmacro %}"
        "{{- shown(m.content) }}",
        "a /quick",
    ),
    "any case": (
        "{{- m.content }}{%- if '/quick' in m.content.lower() %}{{- '!' }}{%- endif %}",
        "a /Quick",
    ),
}


@pytest.mark.parametrize("kind", LOOKED_FOR)
def test_a_message_with_what_a_template_looks_for_is_shown_as_the_template_shows_it(
    kind: str, tokenizer_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of("chatml")
    shown, content = LOOKED_FOR[kind]
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(SHOWS.replace("SHOWN", shown), {}))
    renderer = ChatRenderer(tokenizer)

    def behind(said: str) -> str:
        new = [{"role": "user", "content": said}]
        return tokenizer.decode(renderer.suffix(_first_turn(), [], new, None, {}).tolist())

    rendered = behind(content)  # nothing is known of other messages yet
    for other in ("hello", "and then?"):
        assert f"user\n{other}" in behind(other)
    assert behind(content) == rendered


def _suffix(renderer: ChatRenderer, *given: Any) -> list[int] | str:
    try:
        return renderer.suffix(*given).tolist()
    except (CutError, RequestError) as e:
        return str(e)
