"""Response text → deltas: whatever the pieces it comes in, the same message, nothing taken back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from stepwell.gateway.config import CallStyle
from stepwell.gateway.reply.calls import (
    CALL_FORMS,
    ToolCall,
    parse_call,
    parse_xml_call,
)
from stepwell.gateway.reply.parser import (
    ContentDelta,
    ReasoningDelta,
    ReplyParser,
    StopCutter,
    held_back,
)
from stepwell.gateway.tokens.tokenizer import TokenStream

COMMON = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": "f"',
    "<think>",
    "</think>",
    "\n",
    " ",
    "<",
    "<tool",
    "<|python_tag|>",
    '{"name": "g", "parameters": {"y": "}\\""}}',
    "<function=f>",
    "<parameter=x>",
    "</parameter>",
    "</function>",
]
CALLS: dict[CallStyle, str] = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseekv3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": "1"}\n```'
    "<｜tool▁call▁end｜>",
    "deepseekv31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": "1"}<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "1"}'
    "<|tool_call_end|>",
    "minimax-m2": '<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": "1"}',
    "llama3_json": '{"name": "f", "parameters": {"x": "1"}}',
}
"""A call in each form."""


def _pieces(style: CallStyle) -> list[str]:
    form, call = CALL_FORMS[style], CALLS[style]
    markup = {*form.markup, form.opening[:5], *form.section, form.section[1][:-2]} - {""}
    pieces = [*sorted(markup), call, call[:-1], call[len(form.opening) :]]
    if style == "mistral":
        pieces += ['[{"name": "f", "arguments": {}}, {"name": "g"}]', "[", "f[ARGS]", ', "]"]']
    return pieces


CASES = st.sampled_from(get_args(CallStyle)).flatmap(
    lambda style: st.tuples(
        st.just(style),
        st.lists(
            st.one_of(
                st.text(max_size=6), st.sampled_from(COMMON), st.sampled_from(_pieces(style))
            ),
            max_size=12,
        ),
    )
)
"""A form and pieces of a reply."""


@dataclass
class Text:
    """Text and tool calls that the deltas of a reply add up to."""

    content: str
    reasoning: str
    tool_calls: list[ToolCall]


def read(pieces: list[str], **options: Any) -> Text:
    parser = ReplyParser(**{"tools": True, "reasoning": True, **options})
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish()
    return Text(
        "".join(d.text for d in deltas if isinstance(d, ContentDelta)),
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        [d for d in deltas if isinstance(d, ToolCall)],
    )


def told(text: Text) -> Any:
    return text.content, text.reasoning, [(c.name, c.arguments) for c in text.tool_calls]


@given(CASES, st.booleans(), st.booleans(), st.booleans())
def test_how_text_is_cut_into_pieces_does_not_matter(
    case: tuple[str, list[str]], tools: bool, reasoning: bool, inside: bool
) -> None:
    style, pieces = case
    options = {
        "tools": tools,
        "reasoning": reasoning,
        "starts_in_reasoning": inside,
        "style": style,
    }
    whole = "".join(pieces)
    assert told(read(pieces, **options)) == told(read([whole], **options))
    assert told(read(list(whole), **options)) == told(read([whole], **options))


@given(CASES)
def test_without_markup_wanted_text_passes_unchanged(case: tuple[str, list[str]]) -> None:
    style, pieces = case
    text = read(pieces, tools=False, reasoning=False, style=style)
    assert told(text) == ("".join(pieces), "", [])


@given(CASES)
def test_what_makes_no_call_passes_unchanged(case: tuple[str, list[str]]) -> None:
    style, pieces = case
    text = read(pieces, reasoning=False, style=style)
    if not text.tool_calls:
        assert text.content == "".join(pieces)


def test_thoughts_content_and_calls_are_told_apart() -> None:
    text = read(
        [
            "<think>\nhm\n</think>\n\nLook: ",
            '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n',
            '<tool_call>{"name": "g", "arguments": "{\\"b\\": 2}"}</tool_call>\n',
        ]
    )
    assert text.reasoning == "\nhm\n"
    assert text.content == "Look: "
    assert [(c.name, json.loads(c.arguments)) for c in text.tool_calls] == [
        ("f", {"a": "ü"}),
        ("g", {"b": 2}),
    ]
    assert len({c.id for c in text.tool_calls}) == 2


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '"x"',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": "\\ud800"}}',
        "[" * 100_000,
        '{"name": "f", "arguments": ' + '{"a":' * 240 + "1" + "}" * 241,
        '{"name": "f", "arguments": {"a": ' + "[" * 700 + "]" * 700 + "}}",
    ],
)
def test_what_is_no_call_stays_content(body: str) -> None:
    assert parse_call(body) is None
    marked = f"<tool_call>{body}</tool_call>"
    assert told(read([marked])) == (marked, "", [])


def test_numbers_beyond_64_bits_survive_in_a_call() -> None:
    call = parse_call('{"name": "f", "arguments": {"x": 123456789012345678901234567890}}')
    assert call is not None
    assert call.arguments == '{"x": 123456789012345678901234567890}'


def test_a_bare_json_object_is_a_call_if_the_reply_begins_with_it() -> None:
    call = '{"name": "f", "parameters": {"x": "{\\"a}", "y": [1]}}'
    expected = [("f", '{"x": "{\\"a}", "y": [1]}')]
    for text in (call, f"\n {call}\n", f"<|python_tag|>{call}", f" <|python_tag|> {call}"):
        assert told(read([text], style="llama3_json")) == ("", "", expected)
    arguments = call.replace("parameters", "arguments")
    assert told(read([arguments], style="llama3_json")) == ("", "", expected)
    thought = f"<think>hm</think>\n\n{call}"
    assert told(read([thought], style="llama3_json")) == ("", "hm", expected)
    # One call; the template could not show two.
    assert told(read([f"{call}; {call}"], style="llama3_json")) == (f"; {call}", "", expected)


@pytest.mark.parametrize(
    "text",
    [
        'See: {"name": "f", "parameters": {}}',
        '{"name": "Ada", "age": 36}',
        '{"name": "f", "parameters": {"x": 1}',
        '{"name": "f", "parameters": [1]}',
        "{not json}",
        '<|python_tag|>print("hi")',
        "<|python",
        " {",
    ],
)
def test_other_text_is_no_bare_call(text: str) -> None:
    assert told(read([*text], style="llama3_json")) == (text, "", [])


TYPED = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array"},
                    "maybe": {"type": ["string", "null"]},
                    "any": {"anyOf": [{"type": "string"}, {"type": "object"}]},
                    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                    "one": {"enum": ["1", "2"]},
                    "odd": {"type": 5},
                },
            },
        },
    }
]


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "3", "3"),
        ("text", "a\n\n b ", "a\n\n b "),
        ("text", "", ""),
        ("text", "</function> <b>", "</function> <b>"),
        ("count", "3", 3),
        ("count", "three", "three"),
        ("count", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("items", '["a", 1]', ["a", 1]),
        ("items", "['a', None]", ["a", None]),
        ("items", "{1, 2}", "{1, 2}"),
        ("maybe", "null", None),
        ("maybe", "text", "text"),
        ("maybe", '"quoted"', '"quoted"'),
        ("any", '{"x": 1}', {"x": 1}),
        ("any", "plain", "plain"),
        ("any", "3", "3"),
        ("maybe", "3", "3"),
        ("maybe", '{"x": 1}', '{"x": 1}'),
        ("optional", "true", "true"),
        ("optional", '["a"]', '["a"]'),
        ("optional", "null", None),
        ("either", "3", 3),
        ("either", "3.5", "3.5"),
        ("one", "1", "1"),
        ("odd", "3", 3),
        ("unknown", "3", "3"),
    ],
)
def test_values_of_an_xml_call_are_what_the_schema_says(
    name: str, written: str, value: Any
) -> None:
    body = f"\n<function=f>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n"
    call = parse_xml_call(body, TYPED)
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == ("f", {name: value})


@pytest.mark.parametrize(
    "body",
    [
        "",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "<function=>\n</function>",
        "<function=f><parameter=x>1</function>",
        "<function=f>1</function>",
        "<function=f></function> more",
    ],
)
def test_what_is_no_xml_call_stays_content(body: str) -> None:
    marked = f"<tool_call>{body}</tool_call>"
    assert told(read([marked], style="qwen3_coder")) == (marked, "", [])


def test_white_space_is_markup_only_between_a_call_and_what_follows() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for pieces in ([call, "\n", call, "\n"], [call + "\n" + call + "\n"]):
        assert read(pieces).content == ""
    for pieces in ([call, " a", "\n", call, "\n"], [call + " a\n" + call + "\n"]):
        assert read(pieces).content == " a\n"


def test_white_space_before_the_first_call_is_markup_if_nothing_else_is_there() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for lead, content in (("\n", ""), (" \n\n", ""), ("\nso\n", "\nso\n")):
        for pieces in ([lead + call], [*lead, *call]):
            assert told(read(pieces)) == (content, "", [("f", "{}")])
    for text in ("\n", "\nso", "\n<tool_call>no</tool_call>", " <tool_"):
        assert told(read([*text])) == (text, "", [])


def test_several_xml_calls_with_several_values_are_read() -> None:
    one = "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>2</parameter>\n</function>"
    text = read([f"So:\n<tool_call>\n{one}\n</tool_call>\n" * 2], style="qwen3_coder")
    assert [c.arguments for c in text.tool_calls] == ['{"a": "1", "b": "2"}'] * 2


def test_a_call_that_is_cut_off_is_content() -> None:
    cut = '<tool_call>\n{"name": "f", "argu'
    assert told(read([cut])) == (cut, "", [])


def test_a_thought_that_never_ends_is_reasoning() -> None:
    assert told(read(["<think>on and", " on"])) == ("", "on and on", [])


def test_nothing_is_held_back_longer_than_needed() -> None:
    parser = ReplyParser(tools=True, reasoning=False)
    assert parser.feed("a < b") == [ContentDelta("a < b")]
    assert parser.feed(" <tool") == [ContentDelta(" ")]
    assert parser.feed("box>") == [ContentDelta("<toolbox>")]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_across_pieces(text: str, stops: list[str]) -> None:
    cutter = StopCutter(stops)
    out = "".join(cutter.feed(c) for c in text) + cutter.finish()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert out == text
    else:
        # Piece by piece, the stop string that is complete first wins.
        first = min(ends)
        assert out == min(
            (text[: first - len(s)] for s in stops if text[:first].endswith(s)), key=len
        )


def test_only_a_possible_marker_start_is_held_back() -> None:
    assert held_back("abc<", ("<x>",)) == 1
    assert held_back("abc<x", ("<x>",)) == 2
    assert held_back("abc<x>", ("<x>",)) == 0
    assert held_back("", ("<x>",)) == 0


@given(st.lists(st.sampled_from(["a", "▁b", *(f"<0x{b:02X}>" for b in range(128, 256))])))
def test_bytes_that_are_no_text_do_not_end_a_stream(tokens: list[str]) -> None:
    """Llama 2's and Gemma's vocabularies have byte tokens; an untrained policy samples them."""
    words = ["a", "▁b", *(f"<0x{b:02X}>" for b in range(256))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    stream = TokenStream(tokenizer)
    text = "".join(stream.feed([vocabulary[token]]) for token in tokens)
    last = max((i for i, token in enumerate(tokens) if len(token) < 4), default=-1)
    letters = [c for c in text if c in "ab"]
    assert letters == [token[-1] for token in tokens[: last + 1] if len(token) < 4]


FORMED = [style for style in CALLS if style != "llama3_json"]


@pytest.mark.parametrize("style", FORMED)
@pytest.mark.parametrize("in_section", [False, True])
@pytest.mark.parametrize("between", ["", "\n", " \n"])
def test_calls_in_every_form_are_told_from_the_text_before_them(
    style: CallStyle, in_section: bool, between: str
) -> None:
    begin, end = CALL_FORMS[style].section if in_section else ("", "")
    calls = between.join([begin, CALLS[style], CALLS[style], end])
    reply = f"<think>hm</think>\n\nSo: {calls}"
    for pieces in ([reply], [*reply]):
        text = read(pieces, style=style)
        lead = between if not begin else ""
        assert told(text) == (f"So: {lead}", "hm", [("f", '{"x": "1"}')] * 2)
        ids = {call.id for call in text.tool_calls}
        assert ids == {"functions.f:0", "functions.f:1"} if style == "kimi_k2" else len(ids) == 2
    # What follows is text again.
    assert read([f"{reply}\nso"], style=style).content == f"So: {lead}{between}\nso"


@pytest.mark.parametrize("style", FORMED)
def test_a_call_in_any_form_that_is_cut_off_or_none_is_content(style: CallStyle) -> None:
    form, call = CALL_FORMS[style], CALLS[style]
    section = form.section[0]
    wrong = [call[:-1], form.opening, section, f"{section} no", f"{section}{form.opening}"]
    if form.closing:
        wrong += [f"{form.opening}{form.closing}", f"{section}{form.opening}so what{form.closing}"]
        wrong += [f"{form.opening}no call{form.closing}{form.section[1]}"]
    else:
        wrong += [
            "[TOOL_CALLS] [1]",
            "[TOOL_CALLS]f[ARGS]{1}",
            "[TOOL_CALLS] []",
            "[TOOL_CALLS] so",
        ]
    for text in wrong:
        for pieces in ([text], [*text]):
            assert told(read(pieces, style=style)) == (text, "", []), text


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45", "minimax-m2"])
def test_values_without_quotes_are_what_the_schema_says_in_every_form(style: CallStyle) -> None:
    for name, written, value in (
        ("count", "3", 3),
        ("flag", "true", True),
        ("items", '["a", 1]', ["a", 1]),
        ("text", "3", "3"),
        ("text", " a\n b ", " a\n b "),
        ("text", "", ""),
        ("unknown", "3", "3"),
    ):
        call = CALLS[style].replace("x", name).replace("1", written)
        calls = [call, call.replace("\n<", "<")]  # GLM-4.7 writes no line breaks
        text = read(calls if style == "glm45" else [call], style=style, offered=TYPED)
        assert text.content == ""
        assert {c.arguments for c in text.tool_calls} == {json.dumps({name: value})}, call


def test_a_mistral_model_calls_several_tools_at_once_and_names_its_calls() -> None:
    first = '{"name": "f", "arguments": {"x": "]"}, "id": "abcDEF123"}'
    second = '{"name": "g", "arguments": {}, "id": "too-short"}'
    text = read([*f"[TOOL_CALLS] [{first}, {second}]\n"], style="mistral")
    assert told(text) == ("", "", [("f", '{"x": "]"}'), ("g", "{}")])
    given, made = (call.id for call in text.tool_calls)
    assert given == "abcDEF123"
    assert (len(made), made.isalnum()) == (9, True)
    named = read(["[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g[ARGS] {}"], style="mistral")
    assert told(named) == ("", "", [("f", "{}"), ("g", "{}")])
    assert named.tool_calls[0].id == "abcDEF123"


@pytest.mark.parametrize("said", [" is a marker", "look it up: [ARGS]{}", "x" * 129, "f[ARGZ]{}"])
def test_mistrals_marker_that_no_call_follows_is_told_at_once(said: str) -> None:
    pieces = ["I see. ", "[TOOL_CALLS]", *said, "; more. "]
    parser = ReplyParser(tools=True, reasoning=False, style="mistral")
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)) == "".join(pieces)
    # A call behind it is one.
    for call in (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS]f[ARGS]{"x": 1}',
    ):
        for sent in (["".join(pieces) + call], ["".join(pieces), *call]):
            text = read(sent, style="mistral")
            assert text.content == "".join(pieces)
            assert [(c.name, c.arguments) for c in text.tool_calls] == [("f", '{"x": 1}')]
