"""Fixtures of the gateway's tests: real tokenizers and templates, a scripted engine behind real
HTTP with SGLang's `/generate` shapes, a real pool in this process, and the gateway itself on a free
port."""

from __future__ import annotations

import asyncio
import json
import socket
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import uvicorn
from aiohttp import web
from openai import AsyncOpenAI
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EMBEDDED
from stepwell.backends.pictures import digest_of
from stepwell.datapool.codec import PackedTrajectory, unpack
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.datapool.ops import AppendStep, Op, R, SubmitSteps
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.shard import LocalShard, Shard
from stepwell.datapool.types import Step
from stepwell.gateway.address import bind
from stepwell.gateway.app import create_app
from stepwell.gateway.config import ChannelSampling, GatewayConfig, Tuning, Wiring
from stepwell.gateway.openapi_process import read_document
from stepwell.gateway.server import http_protocol
from stepwell.gateway.tokens.graph import Turn, TurnGraph
from stepwell.gateway.tokens.messages import Keys, extend_key
from stepwell.gateway.tokens.template import ChatTemplate
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.builders import until
from tests.helpers import reserved_port

# -- templates -------------------------------------------------------------------------------

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role=='system' %}{{- messages[0].content+'\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n<tools>\\n' }}{%- for t in tools %}{{- t|tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- '</tools><|im_end|>\\n' }}"
    "{%- elif messages[0].role=='system' %}"
    "{{- '<|im_start|>system\\n'+messages[0].content+'<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role=='user' or (m.role=='system' and not loop.first) %}"
    "{{- '<|im_start|>'+m.role+'\\n'+m.content+'<|im_end|>\\n' }}"
    "{%- elif m.role=='assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if m.content %}{{- m.content }}{%- endif %}"
    "{%- for tc in (m.tool_calls or []) %}{%- set f=tc.function if tc.function else tc %}"
    '{{- \'<tool_call>\\n{"name": "\'+f.name+\'", "arguments": \' }}'
    "{{- f.arguments if f.arguments is string else (f.arguments|tojson) }}"
    "{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role=='tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n'+m.content+'\\n</tool_response><|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The quickstart's."""

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Merges tool results, strips past thinking: the structure of Qwen3's."""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools %}
    {%- if messages|length == 0 or messages[0].role != 'user' %}
        {{- raise_exception("tools need a first user message") }}
    {%- endif %}
    {%- set first = messages[0].content|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Shows a tool call instead of the content, one at a time: the structure of Llama 3.1's."""

NO_TOOLS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Knows no tools; closes turns with the EOS token, as Zephyr's does."""

UNCLOSED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Ends turns with a line break only."""

DEEPSEEK = (
    "{% set ns = namespace(system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
"""The structure of DeepSeek-R1-Distill-Qwen's: opens the thought, shows none."""

GLM = (
    "[gMASK]<sop>{%- if tools %}{{- '<|system|>\n# Tools\n\n<tools>\n' }}"
    "{%- for t in tools %}{{- t | tojson + '\n' }}{%- endfor %}{{- '</tools>' }}{%- endif %}"
    "{%- set ns = namespace(last_user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}"
    "{%- endif %}{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n<think>' }}"
    "{%- if loop.index0 > ns.last_user %}{{- (m.reasoning_content or '').strip() }}{%- endif %}"
    "{{- '</think>' }}{%- if m.content.strip() %}{{- '\n' + m.content.strip() }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>' + c.function.name + '\n' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{- v if v is string else v | tojson }}"
    "{{- '</arg_value>\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""Ends a turn with the token that the next one begins with: the structure of GLM-4.5's."""

DEEPSEEK_V3 = (
    "{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
    "{%- if tools %}{{- '\n\n# Tools\n\n<tools>' }}{%- for t in tools %}{{- '\n' + t | tojson }}"
    "{%- endfor %}{{- '\n</tools>\n\n' }}{%- endif %}"
    "{%- set ns = namespace(is_tool=false) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.is_tool = false %}{{- '<｜User｜>' + m.content + '<｜Assistant｜>' }}"
    "{%- elif m.role == 'assistant' %}{{- '<｜tool▁outputs▁end｜>' if ns.is_tool }}"
    "{%- set ns.is_tool = false %}{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}{{- '<｜tool▁call▁begin｜>' + c.type }}"
    "{{- '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + c.function.arguments | tojson }}"
    "{{- '\n```<｜tool▁call▁end｜>' }}{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}"
    "{{- '<｜end▁of▁sentence｜>' }}{%- elif m.role == 'tool' %}"
    "{{- '\n' if ns.is_tool else '<｜tool▁outputs▁begin｜>' }}{%- set ns.is_tool = true %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}"
)
"""The structure of those that vLLM ships for DeepSeek-V3 and R1."""

DEEPSEEK_V31 = (
    "{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
    "{%- if tools %}{{- '\n\n## Tools\n' }}{%- for t in tools %}{{- t | tojson + '\n' }}"
    "{%- endfor %}{%- endif %}{%- set ns = namespace(is_user=false) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.is_user = true %}"
    "{{- '<｜User｜>' + m.content }}{%- elif m.role == 'assistant' %}"
    "{%- if ns.is_user %}{{- '<｜Assistant｜></think>' }}{%- endif %}{%- set ns.is_user = false %}"
    "{{- m.content.split('</think>')[-1] }}{%- for c in m.tool_calls or [] %}"
    "{{- '<｜tool▁calls▁begin｜>' if loop.first }}{{- '<｜tool▁call▁begin｜>' + c.function.name }}"
    "{{- '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}{{- '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'tool' %}{%- set ns.is_user = false %}"
    "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and ns.is_user %}"
    "{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}"
)
"""Wants the arguments of calls as text: the structure of DeepSeek-V3.1's."""

KIMI = (
    "{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson }}"
    "{{- '<|im_end|>' }}{%- endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'assistant' and not m.tool_calls %}{%- set ns.last = loop.index0 %}"
    "{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{{- '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + m.role }}"
    "{{- '<|im_middle|>' }}{%- if m.role == 'assistant' %}{{- '<think>' }}"
    "{%- if loop.index0 > ns.last %}{{- m.reasoning_content or '' }}{%- endif %}{{- '</think>' }}"
    "{%- elif m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\n' }}{%- endif %}"
    "{{- m.content }}{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}"
    "{%- for c in m.tool_calls %}{{- '<|tool_call_begin|>' + c.id }}"
    "{{- '<|tool_call_argument_begin|>' }}{%- if c.function.arguments is string %}"
    "{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}"
    "{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"
    "{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)
"""Shows the ids of calls and not their names: the structure of Kimi-K2-Thinking's."""

MISTRAL = (
    "{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}"
    "{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}{%- elif m.tool_calls is defined %}"
    "{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}{%- if c.id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{%- endif %}{{- (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}"
    "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{%- endif %}{{- \'[TOOL_RESULTS] {"content": \' + m.content + \', "call_id": "\' }}'
    "{{- m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)
"""Wants ids of nine characters: the structure of Mistral-7B-Instruct-v0.3's."""

MINISTRAL = (
    "{{- bos_token }}{%- for m in messages if m.role == 'system' %}"
    "{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- endfor %}"
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- m.content }}{%- for c in m.tool_calls or [] %}"
    "{%- set arguments = c.function.arguments %}"
    "{%- if arguments is not string %}{%- set arguments = arguments | tojson | safe %}{%- endif %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + arguments }}{%- endfor %}"
    "{{- eos_token }}{%- elif m.role == 'tool' %}"
    "{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
"""The structure of Ministral 3's and Devstral 2's."""

MINIMAX = (
    "{{- ']~!b[]~b]system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
    "{%- endif %}{%- if tools %}{{- '\n\n# Tools\n\n<tools>\n' }}{%- for t in tools %}"
    "{{- '<tool>' + t.function | tojson + '</tool>\n' }}{%- endfor %}{{- '</tools>' }}{%- endif %}"
    "{{- '[e~[\n' }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ']~b]ai\n' }}"
    "{%- if m.reasoning_content %}"
    "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}"
    "{%- if m.tool_calls %}{{- '\n<minimax:tool_call>\n' }}{%- for c in m.tool_calls %}"
    "{{- '<invoke name=\"' + c.function.name + '\">\n' }}"
    "{%- for k, v in c.function.arguments | items %}{{- '<parameter name=\"' + k + '\">' }}"
    "{{- v if v is string else v | tojson }}{{- '</parameter>\n' }}{%- endfor %}"
    "{{- '</invoke>\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}"
    "{%- elif m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}"
    "{{- ']~b]tool' }}{%- endif %}{{- '\n<response>' + m.content + '</response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '[e~[\n' }}{%- endif %}"
    "{%- elif m.role == 'user' %}{{- ']~b]user\n' + m.content + '[e~[\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"
)
"""Opens the thought in the generation prompt: the structure of MiniMax-M2's."""

_IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_THINK = ["<think>", "</think>"]
_HEADER = ["<|start_header_id|>", "<|end_header_id|>"]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
_DEEPSEEK_CALLS = [
    *(f"<｜tool▁{of}▁{at}｜>" for of in ("calls", "call") for at in ("begin", "end")),
    *(f"<｜tool▁{of}▁{at}｜>" for of in ("outputs", "output") for at in ("begin", "end")),
    "<｜tool▁sep｜>",
]
_ARGUMENT = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
_KIMI = [
    *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle", "end")),
    *(f"<|tool_{of}|>" for of in ("calls_section_begin", "calls_section_end", "call_begin")),
    *(f"<|tool_{of}|>" for of in ("call_end", "call_argument_begin")),
]
_MISTRAL = [
    *(f"[{at}{of}]" for of in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for at in ("", "/")),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
]
_MINIMAX = ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"]


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    special: tuple[str, ...]
    eos: str
    tools: bool
    pad: str = "<|endoftext|>"
    bos: str | None = None


FAMILIES = {
    f.name: f
    for f in (
        Family("chatml", CHATML, (*_IM, *_MARKUP), "<|im_end|>", True),
        Family("qwen3", QWEN3, (*_IM, *_MARKUP, *_THINK), "<|im_end|>", True),
        Family(
            "llama3",
            LLAMA3,
            ("<|endoftext|>", "<|begin_of_text|>", *_HEADER, "<|eot_id|>", "<|eom_id|>"),
            "<|eot_id|>",
            True,
            bos="<|begin_of_text|>",
        ),
        Family("no_tools", NO_TOOLS, ("<|endoftext|>", "</s>"), "</s>", False),
        Family(
            "deepseek",
            DEEPSEEK,
            tuple(_DEEPSEEK),
            _DEEPSEEK[1],
            tools=False,
            pad=_DEEPSEEK[1],
            bos=_DEEPSEEK[0],
        ),
        *(
            Family(
                name,
                template,
                (*_DEEPSEEK, *_DEEPSEEK_CALLS, *_THINK),
                _DEEPSEEK[1],
                tools=True,
                pad=_DEEPSEEK[1],
                bos=_DEEPSEEK[0],
            )
            for name, template in (("deepseekv3", DEEPSEEK_V3), ("deepseekv31", DEEPSEEK_V31))
        ),
        Family(
            "glm45",
            GLM,
            (
                *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
                *("<|observation|>", *_MARKUP, *_ARGUMENT, *_THINK),
            ),
            "<|user|>",
            True,
        ),
        Family("kimi_k2", KIMI, ("<|endoftext|>", *_KIMI, *_THINK), "<|im_end|>", True),
        *(
            Family(name, template, ("<s>", "</s>", *_MISTRAL), "</s>", True, "</s>", "<s>")
            for name, template in (("mistral", MISTRAL), ("ministral", MINISTRAL))
        ),
        Family("minimax-m2", MINIMAX, ("<|endoftext|>", *_MINIMAX, *_THINK), "[e~[", True),
        Family("unclosed", UNCLOSED, ("<|endoftext|>",), "<|endoftext|>", False),
    )
}


QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "model"


@lru_cache
def make_tokenizer(family: str) -> ChatTokenizer:
    """A family's, the quickstart's own, or that of a model's folder."""
    if family == "quickstart":
        return ChatTokenizer.load(str(QUICKSTART))
    if family not in FAMILIES:
        return ChatTokenizer.load(family)
    return ChatTokenizer(make_backend(family), make_template(family))


def make_backend(family: str) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["user assistant system tool what is the answer calculator expression arguments name"]
    bpe.train_from_iterator(
        corpus * 20,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(FAMILIES[family].special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return bpe


def make_template(family: str, source: str | None = None) -> ChatTemplate:
    """A family's chat template, or another one with its special tokens."""
    f = FAMILIES[family]
    special = {"eos_token": f.eos, "pad_token": f.pad}
    if f.bos is not None:
        special["bos_token"] = f.bos
    return ChatTemplate(source or f.template, special)


def hf_tokenizer(family: str) -> Any:
    """A family's as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    template = make_template(family)
    hf = PreTrainedTokenizerFast(tokenizer_object=make_backend(family), **template.special_tokens)
    hf.chat_template = template.text
    return hf


def eos_id(tokenizer: ChatTokenizer) -> int:
    return tokenizer.special[tokenizer.template.special_tokens["eos_token"]]


def save_tokenizer(folder: Path, family: str = "chatml") -> str:
    """A family's, as a model's folder holds it."""
    template = make_template(family)
    make_backend(family).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(template.special_tokens))
    (folder / "chat_template.jinja").write_text(template.text)
    return str(folder)


@pytest.fixture
def tokenizer_of() -> Callable[[str], ChatTokenizer]:
    return make_tokenizer


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return make_tokenizer("chatml")


# -- the turn graph -------------------------------------------------------------------------


def add_turn(
    graph: TurnGraph,
    root: bytes,
    messages: Sequence[dict[str, Any]],
    reply: dict[str, Any],
    *,
    new_prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    step_index: int | None,
) -> Turn:
    """Store the turn of a reply where its request attaches."""
    keys = Keys(root, messages)
    parent, _, _ = graph.attach(root, keys)
    functions = [(c["id"], c["function"]) for c in reply.get("tool_calls") or ()]
    return graph.add(
        (root, keys.prompt, extend_key(keys.prompt, reply), None),
        parent=parent,
        new_prompt_ids=np.asarray(new_prompt_ids, np.int32),
        response_ids=np.asarray(response_ids, np.int32),
        calls=tuple((uid, f["name"], f["arguments"]) for uid, f in functions),
        has_reasoning=False,
        step_index=step_index,
    )


# -- the scripted engine ---------------------------------------------------------------------


@dataclass
class Sampled:
    """The engine's answer to one request."""

    ids: list[int]
    finish: str = "stop"
    matched: int | str | None = None
    version: str = "0"
    versions: list[tuple[str, int, int]] | None = None
    status: int = 200
    words: str = "scripted"
    """Error message of an answer that is no 200."""
    gate: asyncio.Event | None = None
    """Awaited before the last token."""
    drop_after: int | None = None
    """Cut the connection after so many streamed tokens."""

    def chunk(self, n: int, *, final: bool, n_prompt: int) -> dict[str, Any]:
        ids = self.ids[:n]
        meta: dict[str, Any] = {
            "id": "x",
            "finish_reason": None,
            "prompt_tokens": n_prompt,
            "completion_tokens": n,
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[log_prob(i), i, None] for i in ids],
        }
        if final:
            meta["finish_reason"] = {
                "stop": {"type": "stop", "matched": self.matched or (ids[-1] if ids else None)},
                "length": {"type": "length", "length": n},
                "abort": {
                    "type": "abort",
                    "message": "Aborted",
                    "status_code": None,
                    "err_type": None,
                },
            }[self.finish]
            spans = self.versions or [(self.version, 0, n)]
            meta["weight_versions"] = [
                {"version": v, "start": s, "end": min(e, n)} for v, s, e in spans if s < n
            ]
        return {"text": "not used", "output_ids": ids, "meta_info": meta}


def log_prob(token_id: int) -> float:
    return -0.01 - (token_id % 97) / 64


@dataclass
class ScriptedEngine:
    """Engine that answers from `script`, then with `default`, and keeps what it was sent. It can be
    told to break off, to be silent, and be stopped and started again at its address."""

    default: Callable[[dict[str, Any]], Sampled] | None = None
    """None: three tokens, of `version`."""
    version: str | None = None
    """Version in the answer of `/model_info`; None: it has no such endpoint."""
    script: list[Sampled] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    context_length: int = 4096
    incremental: bool = False
    """Events of a stream bring what is new, not all since its beginning."""
    burst: int = 1
    """Tokens that a stream's events bring at once."""
    events_per_write: int = 1
    """Events of a stream that are sent, and read, together."""
    line_end: bytes = b"\n"
    """Line end of its server-sent events."""
    tops: int = 0
    """Most likely tokens that are sent with each."""
    drops_spans: bool = False
    """An answer names the version of now, and not which tokens are whose."""
    healthy: bool = True
    mute: asyncio.Event | None = None
    """Nothing but what is under way is answered until it is set."""
    cut: bool = False
    """Every `/generate` breaks off without an answer."""
    urls: list[str] | None = None
    """Workers of a router; None: it is none."""
    checks: int = 0
    """Questions for its version."""
    held_pictures: dict[str, str] | None = None
    """Pictures by digest, of an engine that keeps them as the embedded one does; None: SGLang."""
    held: socket.socket = field(default_factory=reserved_port)
    """Its port, also while it is stopped."""
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.held.getsockname()[1]}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve inside the block; yields the URL."""
        await self.start()
        try:
            yield self.url
        finally:
            await self.stop()
            self.held.close()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/{path:.*}", self.other)
        app.router.add_post("/{path:.*}", self.commanded)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        host, port = self.held.getsockname()
        await web.TCPSite(self._runner, host, port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.arrived.set()
        if self.cut:
            self._break(request)
        said = self._said(body)
        if said.status != 200:
            error = {"error": {"message": said.words}}
            return web.json_response(error, status=said.status, dumps=_compact)
        # One placeholder stands for each picture, of 28 x 28 pixels a token, and is expanded.
        pictures, held = body.get("image_data") or (), self.held_pictures
        if held is not None:
            missing = [p for p in pictures if p.startswith("sha256:") and p[7:] not in held]
            if missing:
                error = {"error": {"message": "not held", "missing": [p[7:] for p in missing]}}
                return web.json_response(error, status=409)
            pictures = [held.get(p[7:], p) for p in pictures]
            held |= {digest_of(Image.open(BytesIO(b64decode(p)))): p for p in pictures}
        sizes = [Image.open(BytesIO(b64decode(data))).size for data in pictures]
        n_prompt = len(body["input_ids"]) + sum(w // 28 * (h // 28) - 1 for w, h in sizes)
        if body.get("stream"):
            return await self._stream(request, said, n_prompt)
        if said.gate is not None:
            await said.gate.wait()
        if said.drop_after is not None:
            self._break(request)
        return web.json_response(self._chunk(said, len(said.ids), 0, n_prompt))

    def _said(self, body: dict[str, Any]) -> Sampled:
        if self.script:
            said = self.script.pop(0)
        elif self.default is not None:
            said = self.default(body)
        else:
            said = Sampled([7, 8, 9], version=self.version or "0")
        limit = body["sampling_params"]["max_new_tokens"]
        if len(said.ids) <= limit:
            return said
        return replace(said, ids=said.ids[:limit], finish="length", matched=None)

    async def _stream(
        self, request: web.Request, said: Sampled, n_prompt: int
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        total, before, held = len(said.ids), 0, b""
        events = [*range(self.burst, total, self.burst), max(total, 1)]
        for k, n in enumerate(events, 1):
            if said.drop_after is not None and n > said.drop_after:
                await asyncio.sleep(0.02)  # so that what was sent is read before the reset
                self._break(request)
            if n >= total and said.gate is not None:
                await said.gate.wait()
            chunk = self._chunk(said, min(n, total), before if self.incremental else 0, n_prompt)
            before = n
            held += b"data: " + json.dumps(chunk).encode() + self.line_end * 2
            if k % self.events_per_write == 0:
                await out.write(held)
                held = b""
                await asyncio.sleep(0)
        await out.write(held + b"data: [DONE]" + self.line_end * 2)
        return out

    def _chunk(self, said: Sampled, n: int, start: int, n_prompt: int) -> dict[str, Any]:
        chunk = said.chunk(n, final=n == len(said.ids), n_prompt=n_prompt)
        meta = chunk["meta_info"]
        if said.versions is not None and n:  # as of the moment, as SGLang reports it in a stream
            meta["weight_version"] = next(v for v, _, end in said.versions if n <= end)
        if self.tops:
            meta["output_top_logprobs"] = [tops(i, self.tops) for i in chunk["output_ids"]]
            meta["output_top_logprobs"] = meta["output_top_logprobs"][start:]
        if self.drops_spans:
            meta.pop("weight_versions", None)
        chunk["output_ids"] = chunk["output_ids"][start:]
        meta["output_token_logprobs"] = meta["output_token_logprobs"][start:]
        return chunk

    @staticmethod
    def _break(request: web.Request) -> NoReturn:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("scripted")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append((await request.json())["rid"])
        return web.Response()

    async def commanded(self, request: web.Request) -> web.Response:
        """Answer to a command of the trainer's: it has none."""
        return web.Response(status=404)

    async def other(self, request: web.Request) -> web.Response:
        if self.mute is not None:
            await self.mute.wait()
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/v1/models":
            model = {"id": "m", "object": "model", "max_model_len": self.context_length}
            return web.json_response({"object": "list", "data": [model]})
        if request.path == "/model_info" and self.version is not None:
            self.checks += 1
            return web.json_response({"weight_version": self.version})
        if request.path == "/server_info" and self.held_pictures is not None:
            return web.json_response({"version": EMBEDDED})
        if request.path == "/workers" and self.urls is not None:
            workers = [{"id": u, "url": u, "worker_type": "regular"} for u in self.urls]
            return web.json_response({"workers": workers, "total": len(workers)})
        return web.Response(status=404)


_compact = partial(json.dumps, separators=(",", ":"))


def tops(token_id: int, n: int) -> list[list[Any]]:
    return [[-0.1 * k, token_id + k, None] for k in range(n)]


OURS = http_protocol(GatewayConfig())
"""The protocol that `stepwell.gateway.server` runs."""


async def stop(server: uvicorn.Server, listening: socket.socket) -> None:
    """Shut down like `uvicorn.Server.shutdown`, but without its 0.1 s where no work is left."""
    state, patience_s = server.server_state, server.config.timeout_graceful_shutdown or 0
    for each in server.servers:
        each.close()
    listening.close()
    for connection in list(state.connections):
        connection.shutdown()
    try:
        await until(lambda: not (state.connections or state.tasks), patience_s)
    except TimeoutError:
        for task in state.tasks:
            task.cancel()
    await server.lifespan.shutdown()


@asynccontextmanager
async def serving(
    app: Any, *, graceful: bool = True, http: Any = None, port: int = 0
) -> AsyncIterator[str]:
    """`app` over HTTP, on a free port unless one is given, in this event loop. The protocol is the
    gateway's own, which hands calls to its app directly, or uvicorn's for another app."""
    listening = bind("127.0.0.1", port)
    config = uvicorn.Config(
        app,
        http=http or (OURS if hasattr(app, "find_call") else "httptools"),
        log_config=None,  # to configure it for each test costs more than a call
        log_level="critical",
        timeout_keep_alive=75,  # as the gateway's: a busy machine outlasts uvicorn's 5 s
        timeout_graceful_shutdown=5,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # `serve()` would look every 0.1 s whether it should stop; a fixture knows.
    await server.startup(sockets=[listening])
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        if graceful:
            await stop(server, listening)
        else:
            server.servers[0].close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            listening.close()


# -- the pool --------------------------------------------------------------------------------


class WatchedPort:
    """The way to a pool of this process, with a door to hold, a line to cut and a memory of what
    was asked."""

    def __init__(self, port: Shard) -> None:
        self._port = port
        self.met = port.met
        self.door = asyncio.Event()
        """Steps wait in front of it."""
        self.door.set()
        self.waiting = asyncio.Event()
        self.failures: list[str] = []
        """Failures of coming submits: "before" loses the request, "after" the answer."""
        self.is_away = self.is_silent = False
        """Nothing is answered: refused, or for ever."""
        self.asked: list[Op[Any]] = []
        """Operations that arrived here, those that `failures` then loses too."""
        self._stored: list[tuple[str, PackedTrajectory]] = []
        """(channel, one step), in the order they were accepted in."""

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.is_away:
            raise PoolUnavailableError("the pool is away")
        self.asked.append(op)
        if not isinstance(op, SubmitSteps | AppendStep):
            return await self._port.call(op, timeout_s)
        self.waiting.set()
        await self.door.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure == "before":
            raise ConnectionError("the request was lost")
        if isinstance(op, AppendStep):
            sent = [PackedTrajectory(op.trajectory_uid, op.prompt_uid, [copy(op.step)])]
        else:
            sent = [
                PackedTrajectory(t.trajectory_uid, t.prompt_uid, [copy(step)])
                for t in op.trajectories
                for step in t.steps
            ]
        outcomes: Any = await self._port.call(op, timeout_s)
        told = [outcomes] if isinstance(op, AppendStep) else outcomes
        for each, outcome in zip(sent, told, strict=True):
            if outcome == "accepted":
                self._stored.append((op.channel, each))
        if failure == "after":
            raise ConnectionError("the answer was lost")
        answer: R = outcomes
        return answer

    def close(self) -> None:
        self._port.close()

    @property
    def steps(self) -> list[tuple[Step, str]]:
        """Stored steps, each with its channel."""
        return self._unpacked(self._stored)

    def stored(self, uid: str | None = None) -> list[Step]:
        """Stored steps, or those of one trajectory."""
        wanted = [each for each in self._stored if uid in (None, each[1].trajectory_uid)]
        return [step for step, _ in self._unpacked(wanted)]

    def _unpacked(self, stored: list[tuple[str, PackedTrajectory]]) -> list[tuple[Step, str]]:
        whole: dict[tuple[str, str], PackedTrajectory] = {}
        for channel, t in stored:
            empty = PackedTrajectory(t.trajectory_uid, t.prompt_uid, [])
            whole.setdefault((channel, t.trajectory_uid), empty).steps.extend(t.steps)
        steps = {
            (channel, uid, step.step_index): step
            for (channel, uid), trajectory in whole.items()
            for step in unpack(trajectory)
        }
        return [
            (steps[channel, t.trajectory_uid, t.steps[0].step_index], channel)
            for channel, t in stored
        ]

    def pass_time(self, seconds: float) -> None:
        """Move the pool's clock forward; what is due by then is done."""
        service = cast(LocalShard, self._port).service
        clock = service._clock
        service._clock = replace(clock, offset=clock.offset + seconds)
        service._on_timer()


def port_of(pool: DataPoolClient) -> WatchedPort:
    return cast(WatchedPort, pool.shards[0])


@asynccontextmanager
async def local_pool(
    config: PoolConfig | None = None, folder: Path | None = None
) -> AsyncIterator[DataPoolClient]:
    """A pool of this process behind a `WatchedPort`; with the journal of `folder`, or none."""
    async with DataPoolClient.local(config, folder) as pool:
        yield DataPoolClient([WatchedPort(pool.shards[0])])


# -- the whole -------------------------------------------------------------------------------


@dataclass
class World:
    """A gateway with its engine and pool, all real but what the engine says."""

    url: str
    engine: ScriptedEngine
    pool: DataPoolClient
    tokenizer: ChatTokenizer
    app: Any
    clients: AsyncExitStack

    def say(self, text: str, *, close: bool = True, **how: Any) -> Sampled:
        """Queue an answer: `text` as the model would sample it."""
        said = Sampled(self.ids(text, close=close), **how)
        self.engine.script.append(said)
        return said

    def ids(self, text: str, *, close: bool = True) -> list[int]:
        ids = self.tokenizer.encode(text).tolist()
        return [*ids, eos_id(self.tokenizer)] if close else ids

    def base_url(self, uid: str = "t1", prompt_uid: str = "p1") -> str:
        return f"{self.url}/{uid}/{prompt_uid}"

    async def client(self, uid: str = "t1", prompt_uid: str = "p1", **options: Any) -> AsyncOpenAI:
        return await self.clients.enter_async_context(
            AsyncOpenAI(
                base_url=f"{self.base_url(uid, prompt_uid)}/v1",
                api_key="none",
                **{"max_retries": 0, **options},
            )
        )

    @property
    def gateway(self) -> Any:
        return self.app.state.services

    @property
    def port(self) -> WatchedPort:
        """The way from the gateway to its pool."""
        return port_of(self.pool)

    def stored(self, uid: str | None = None) -> list[Step]:
        """The Steps that the pool accepted, or those of a trajectory, in the order they came in."""
        return self.port.stored(uid)

    def check_exact(self, uid: str | None = None) -> None:
        """Every stored Step is what the engine was sent and what it sampled, and every child
        strictly extends its parent."""
        steps = self.stored(uid)
        sent = [r["input_ids"] for r in self.engine.requests]
        by_index = {(s.trajectory_uid, s.step_index): s for s in steps}
        for step in steps:
            assert step.prompt_ids.tolist() in sent
            assert step.rollout_log_probs is not None
            assert step.rollout_log_probs.tolist() == pytest.approx(
                [log_prob(i) for i in step.response_ids.tolist()], abs=1e-6
            )
            if step.parent_index is not None:
                parent = by_index[step.trajectory_uid, step.parent_index]
                before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
                assert step.prompt_ids.tolist()[: len(before)] == before
                assert len(step.prompt_ids) > len(before)


FAST = Tuning(retry_backoff_s=0.01)


@pytest.fixture
async def worlds() -> AsyncIterator[Callable[..., Any]]:
    """Makes worlds: `await worlds(family="chatml", engines=1, **gateway_options)`. `pool`: that of
    another world, or one of a `pool_config` and with the journal of `pool_folder` (None: with
    none); `engine_urls`: others than those of `engines` that run here. `sampling`: by channel."""
    async with AsyncExitStack() as stack:

        async def make(
            family: str = "chatml",
            engines: int = 1,
            pool: DataPoolClient | None = None,
            pool_config: PoolConfig | None = None,
            pool_folder: Path | None = None,
            engine_urls: tuple[str, ...] | None = None,
            sampling: dict[str, ChannelSampling] | None = None,
            tuning: Tuning = FAST,
            engine_kind: str = "embedded",
            run_dir: Path | None = None,
            **options: Any,
        ) -> World:
            tokenizer = make_tokenizer(family)
            eos = eos_id(tokenizer)
            made = []
            for _ in range(engines):
                engine = ScriptedEngine(
                    default=lambda _: Sampled([*tokenizer.encode("fine").tolist(), eos])
                )
                await stack.enter_async_context(engine.running())
                made.append(engine)
            if pool is None:
                pool = await stack.enter_async_context(local_pool(pool_config, pool_folder))
            config = GatewayConfig(port=0, **options)
            urls = tuple(e.url for e in made) if engine_urls is None else engine_urls
            kind = EngineConfig(kind=engine_kind, urls=urls if engine_kind == "vllm" else ())
            wiring = Wiring(urls, kind, sampling=sampling or {}, tuning=tuning, run_dir=run_dir)
            app = create_app(config, wiring, pool, tokenizer)
            url = await stack.enter_async_context(serving(app, http=http_protocol(config, tuning)))
            clients = await stack.enter_async_context(AsyncExitStack())
            world = World(url, made[0], pool, tokenizer, app, clients)
            world.engines = made  # type: ignore[attr-defined]  # only the failover tests look
            return world

        yield make


@pytest.fixture
async def world(worlds: Callable[..., Any]) -> World:
    made: World = await worlds()
    return made


_DOCUMENTS: list[bytes] = []


async def _read_document_once() -> bytes:
    """`/openapi.json` as the first gateway made it: it takes a process five seconds of CPU."""
    if not _DOCUMENTS:
        _DOCUMENTS.append(await read_document())
    return _DOCUMENTS[0]


@pytest.fixture(autouse=True)
def one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.gateway.app.read_document", _read_document_once)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
