"""Tool calls and reasoning, as SGLang's parsers answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stepwell.backends.engines.embedded.parsers import parse_tool_calls, separate_reasoning
from stepwell.backends.engines.embedded.request import InvalidRequestError

TOOLS = [{"type": "function", "function": {"name": n}} for n in ("add", "sub")]


def block(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_come_in_order_with_json_arguments_and_their_tools_index() -> None:
    parsed = parse_tool_calls("Hm. " + block("sub", a=1) + block("add"), TOOLS, "qwen25")
    assert parsed == {
        "normal_text": "Hm.",
        "calls": [
            {"tool_index": 1, "name": "sub", "parameters": '{"a": 1}'},
            {"tool_index": 0, "name": "add", "parameters": "{}"},
        ],
    }


def test_one_malformed_call_does_not_hide_the_others() -> None:
    text = (
        "<tool_call>\n{not json}\n</tool_call>"
        + block("add", a=1)
        + "<tool_call>[1, 2]</tool_call>"
    )
    assert [c["name"] for c in parse_tool_calls(text, TOOLS, "hermes")["calls"]] == ["add"]


@pytest.mark.parametrize(
    "text",
    ["just text ", block("rm"), block("add")[:-20], '<tool_call>{"name": "add", "arg', ""],
)
def test_without_a_valid_call_the_text_is_what_stands_before_the_first_block(text: str) -> None:
    before = "" if "<tool_call>" in text else text
    assert parse_tool_calls(text, TOOLS, "qwen25") == {"normal_text": before, "calls": []}


def test_the_tokenizers_own_template_is_used_when_no_parser_is_named(model_dirs: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(model_dirs.base))
    with pytest.raises(InvalidRequestError, match="tool_call_parser is None"):
        parse_tool_calls("x", TOOLS, None, tokenizer)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "tool_calls": {
                "open": "[CALL]",
                "close": "[/CALL]",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }
    text = 'So: [CALL]{"name": "add", "arguments": {"a": 2}}[/CALL]'
    parsed = parse_tool_calls(text, TOOLS, None, tokenizer)
    assert parsed["normal_text"] == "So:"
    assert parsed["calls"] == [{"tool_index": 0, "name": "add", "parameters": '{"a": 2}'}]
    cut = 'So: [CALL]{"name": "add", "argum'
    assert parse_tool_calls(cut, TOOLS, None, tokenizer) == {"normal_text": cut, "calls": []}


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "answer"),
    [
        ("qwen3", "<think>a</think>b", "a", "b"),
        ("qwen3", "<think>\na\n</think>\n\nb", "\na\n", "\n\nb"),
        ("qwen3", "b", "", "b"),
        ("qwen3", "<think>a", "a", ""),
        ("qwen3", "<think>a<tool_call>{}", "a", "<tool_call>{}"),
        ("deepseek-r1", "a</think>b", "a", "b"),
        ("deepseek-r1", "a", "a", ""),
    ],
)
def test_reasoning_is_what_stands_between_the_markers(
    parser: str, text: str, reasoning: str, answer: str
) -> None:
    assert separate_reasoning(text, parser) == {"reasoning_text": reasoning, "text": answer}


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="'llama9'; the embedded engine knows qwen25"):
        parse_tool_calls("x", TOOLS, "llama9")
    with pytest.raises(InvalidRequestError, match="reasoning_parser is None"):
        separate_reasoning("x", None)
