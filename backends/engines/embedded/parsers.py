"""Tool calls and reasoning out of generated text, with SGLang's answers.

Parsers are response templates (a declarative spec that transformers 5 executes): the tokenizer's
own where it has one, else the named one shipped here. Pure. Never touches token ids.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from stepwell.backends.engines.embedded.request import InvalidRequestError


@dataclass(frozen=True)
class ToolFormat:
    """Tool calls as JSON objects between two markers."""

    open: str
    close: str

    @functools.cached_property
    def template(self) -> Any:
        """The compiled response template of one marked block."""
        call = {"open": self.open, "close": self.close, "content": "json", "repeats": True}
        fields = {"tool_calls": call, "content": {}}
        return load_response_template({"start_anchor": "<|im_start|>assistant", "fields": fields})


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two markers, at the start of the text."""

    open: str
    close: str
    implied: bool = False
    """The text starts within the reasoning: the prompt already opened it."""
    tool_open: str | None = None
    """A tool call ends unclosed reasoning."""


_QWEN = ToolFormat("<tool_call>", "</tool_call>")
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {"qwen25": _QWEN, "qwen": _QWEN, "hermes": _QWEN}
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": ReasoningFormat("<think>", "</think>", tool_open="<tool_call>"),
        "qwen3-thinking": ReasoningFormat("<think>", "</think>", implied=True),
        "deepseek-r1": ReasoningFormat("<think>", "</think>", implied=True),
    }
)


def parse_tool_calls(
    text: str, tools: Sequence[Mapping[str, Any]], parser: str | None, tokenizer: Any = None
) -> dict[str, Any]:
    """SGLang's answer of `/parse_function_call`.

    A block that is no valid JSON, is cut off, or names a tool that was not offered is no call.
    `normal_text` is what stands before the first block, as SGLang has it: what comes later is lost.

    Raises:
        InvalidRequestError: no such parser, and the tokenizer has no response template.
    """
    if parser is None and getattr(tokenizer, "response_template", None) is not None:
        content, raw_calls = _by_tokenizer(text, tokenizer)
    else:
        content, raw_calls = _by_format(text, _lookup(TOOL_FORMATS, parser, "tool_call_parser"))
    offered: dict[str, int] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        offered.setdefault(str(function.get("name")), i)
    calls = [
        {
            "tool_index": offered[call["name"]],
            "name": call["name"],
            "parameters": json.dumps(
                call.get("parameters") or call.get("arguments", {}), ensure_ascii=False
            ),
        }
        for call in raw_calls
        if isinstance(call, Mapping) and call.get("name") in offered
    ]
    return {"normal_text": content, "calls": calls}


def _by_format(text: str, fmt: ToolFormat) -> tuple[str, list[Any]]:
    """Block by block, so that one malformed call does not hide the others."""
    calls: list[Any] = []
    template = fmt.template
    for block in re.findall(f"{re.escape(fmt.open)}.*?{re.escape(fmt.close)}", text, re.DOTALL):
        try:
            message = parse_response(block, template, prefix="")
        except ValueError:  # malformed JSON inside the block
            continue
        for call in message.get("tool_calls", []):
            calls.extend(call if isinstance(call, list) else [call])
    before, opened, _ = text.partition(fmt.open)
    return before.strip() if opened else text, calls


def _by_tokenizer(text: str, tokenizer: Any) -> tuple[str, list[Any]]:
    try:
        message = tokenizer.parse_response(text, prefix="")
    except ValueError:  # truncated or malformed: no call can be trusted
        return text, []
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return (message.get("content") or "") if calls else text, calls


def separate_reasoning(text: str, parser: str | None) -> dict[str, str]:
    """SGLang's answer of `/separate_reasoning`; unclosed reasoning is all reasoning.

    Raises:
        InvalidRequestError: no such parser.
    """
    fmt = _lookup(REASONING_FORMATS, parser, "reasoning_parser")
    if not fmt.implied and fmt.open not in text:
        return {"reasoning_text": "", "text": text}
    while text.startswith(fmt.open):
        text = text.removeprefix(fmt.open)
    if fmt.close in text:
        reasoning, _, normal = text.partition(fmt.close)
    elif fmt.tool_open is not None and (at := text.find(fmt.tool_open)) >= 0:
        reasoning, normal = text[:at], text[at:]
    else:
        reasoning, normal = text, ""
    return {"reasoning_text": reasoning, "text": normal}


def _lookup(formats: Mapping[str, Any], name: str | None, field: str) -> Any:
    try:
        return formats[name or ""]
    except KeyError:
        raise InvalidRequestError(
            f"{field} is {name!r}; the embedded engine knows {', '.join(formats)}"
        ) from None
