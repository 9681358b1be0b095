"""Chat templates and tokenizers as transformers has them, in a process without transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.tokens.template import ChatTemplate
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.backends.test_masks import GENERATION
from tests.gateway.conftest import (
    DEEPSEEK,
    FAMILIES,
    QUICKSTART,
    hf_tokenizer,
    save_tokenizer,
)
from tests.gateway.test_chat import THINKER

EVERYTHING = """
{%- set ns = namespace(n=0, self=1) -%}
{{ bos_token }}{{ strftime_now('%Y-%m-%d') }}{{ dict(a=1) }}{{ dict.fromkeys(['k'], 2) }}
{% if tools %}{{ tools | tojson(indent=2) }}{{ tools|tojson(separators=(',',':'), sort_keys=true) }}
{{ tools | tojson(ensure_ascii=true) }}{% endif %}
{%- if documents is none %}no documents{% endif %}
{% for m in messages %}
    {% if m.role == 'tool' and m.content == '' %}{% continue %}{% endif %}
    {%- if ns.n > 8 %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    <{{ m.role }}>{% generation %}{% set inner = 1 %}{{ m.content }}{% endgeneration %}
    {{- inner is defined }}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m | tojson }}
    {{ m.items() | list }}
    {% if m.content == 'refuse' %}{{ raise_exception('no ' + m.role) }}{% endif %}
    {% if m.content == 'mutate' %}{% set _ = messages.append(1) %}{% endif %}
    {% if m.content == 'reach' %}{{ m.__class__.__mro__ }}{{ dict.__class__ }}{% endif %}
    {% if m.content == 'store' %}{% set ns.__init__ = 1 %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{{ '' if enable_thinking is false else '<think>' }}{% endif %}
"""
"""Template with everything that one may use of its environment."""

SOURCES: dict[str, Any] = {
    **{name: f.template for name, f in FAMILIES.items()},
    "thinker": THINKER,
    "deepseek": DEEPSEEK,
    "generation": GENERATION,
    "quickstart": (QUICKSTART / "chat_template.jinja").read_text(),
    "everything": EVERYTHING,
    "named": {"default": FAMILIES["chatml"].template, "tool_use": EVERYTHING},
}
if folder := os.environ.get("CHAT_TEMPLATES"):  # real ones, which are their publishers'
    SOURCES |= {str(file): file.read_text() for file in Path(folder).rglob("*.jinja")}

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "calc", "arguments": {"x": "ü<&>", "y": [1, None, 2.5], "z": {"é": True}}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Ünïcode <b>'quoted'</b>",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(
        [
            "",
            "\n",
            " x ",
            "<think>\nhm\n</think>\n\nyes",
            "<tool_call>",
            "{{ 1 }}",
            "refuse",
            "mutate",
            "reach",
            "store",
            "<tool_response>x</tool_response>",
        ]
    ),
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT | st.none()},
        optional={
            "reasoning_content": TEXT | st.none(),
            "reasoning": TEXT,
            "thinking": TEXT,
            "tool_calls": st.sampled_from([[CALL], [CALL, CALL], []]),
        },
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": TEXT, "tool_call_id": st.just("call00000")},
        optional={"name": st.just("calc")},
    ),
)
CONVERSATIONS = st.lists(MESSAGE, max_size=6) | st.lists(MESSAGE, max_size=4).map(
    lambda messages: [{"role": "user", "content": "hi"}, *messages]
)
VARIABLES = st.dictionaries(
    st.sampled_from(["enable_thinking", "bos_token", "custom"]), st.sampled_from([True, False, "x"])
)


@cache
def pair(name: str) -> tuple[ChatTemplate, Any]:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=hf_tokenizer("chatml").backend_tokenizer, **SPECIAL
    )
    theirs.chat_template = SOURCES[name]
    return ChatTemplate(SOURCES[name], SPECIAL), theirs


def outcome(render: Any) -> tuple[str, str]:
    try:
        return "text", render()
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as e:
        kind = next(k for k in (jinja2.TemplateError, TypeError, Exception) if isinstance(e, k))
        return kind.__name__, str(e) if type(e) is jinja2.TemplateError else ""


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", SOURCES)
@given(
    messages=CONVERSATIONS,
    tools=st.sampled_from([None, TOOLS, TOOLS * 2]),
    variables=VARIABLES,
    prompt=st.booleans(),
)
def test_a_template_writes_what_transformers_writes(
    name: str, messages: list[Any], tools: Any, variables: dict[str, Any], prompt: bool
) -> None:
    ours, theirs = pair(name)
    mine = outcome(lambda: ours.render(messages, tools, variables, add_generation_prompt=prompt))
    assert mine == outcome(
        lambda: theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **variables
        )
    )


def test_the_day_is_the_machines() -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = pair("everything")[0].render(messages, None, {}, add_generation_prompt=True)
    assert datetime.now().strftime("%Y-%m-%d") in text


@pytest.mark.parametrize(
    ("source", "wrong"), [("{% if %}", "line 1"), ({"tool_use": "x"}, "name one of them default")]
)
def test_what_is_no_template_is_refused_before_anything_is_served(source: Any, wrong: str) -> None:
    with pytest.raises(GatewayConfigError, match=wrong):
        ChatTemplate(source, {})


# -- folders -------------------------------------------------------------------------------------


def saved_by_transformers(folder: Path) -> None:
    hf_tokenizer("llama3").save_pretrained(folder)


def with_named_templates(folder: Path) -> None:
    hf = hf_tokenizer("chatml")
    hf.chat_template = {"default": FAMILIES["chatml"].template, "tool_use": EVERYTHING}
    hf.save_pretrained(folder)


def with_templates_in_the_config(folder: Path) -> None:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    rewrite(
        folder / "tokenizer_config.json",
        chat_template=[
            {"name": "default", "template": FAMILIES["chatml"].template},
            {"name": "tool_use", "template": EVERYTHING},
        ],
    )


def with_added_tokens_in_the_config(folder: Path) -> None:
    """Write a config like Qwen's: flags differ from tokenizer.json's, and there are more tokens."""
    save_tokenizer(folder, "qwen3")
    n = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    rewrite(
        folder / "tokenizer_config.json",
        added_tokens_decoder={
            "3": {"content": "<tool_call>", "special": False, **flags},
            str(n): {"content": "<|extra|>", "special": True, **flags},
        },
        additional_special_tokens=["<|im_start|>", "<|another|>"],
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True, **flags},
        bos_token=None,
        add_bos_token=False,
        image_token="<|image|>",
    )


def of_older_transformers(folder: Path) -> None:
    save_tokenizer(folder, "llama3")
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|endoftext|>"}')
    content = {"content": "<|eot_id|>", "lstrip": False, "normalized": False, "rstrip": False}
    special = {"bos_token": "<|begin_of_text|>", "eos_token": {**content, "single_word": False}}
    rewrite(folder / "special_tokens_map.json", **special)


def with_named_extra_tokens(folder: Path) -> None:
    save_tokenizer(folder)
    rewrite(folder / "tokenizer_config.json", extra_special_tokens={"image_token": "<|image|>"})


def of_the_quickstart(folder: Path) -> None:
    for file in QUICKSTART.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())


def rewrite(file: Path, **changes: Any) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}))


LAYOUTS = [
    saved_by_transformers,
    with_named_templates,
    with_templates_in_the_config,
    with_added_tokens_in_the_config,
    of_older_transformers,
    with_named_extra_tokens,
    of_the_quickstart,
]
WRITTEN = [
    "hello <|im_start|>user\n<tool_call>{}</tool_call> <|extra|><|another|><|image|> ü 東京 🦊",
    "<|begin_of_text|>a<|eot_id|> b  c\n\n",
    "",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_read_as_transformers_reads_it(layout: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    layout(tmp_path)
    ours = ChatTokenizer.load(str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.template.special_tokens == theirs.special_tokens_map
    added = theirs.added_tokens_decoder
    assert ours.special == {t.content: i for i, t in added.items() if t.special}
    assert ours.vocabulary == max(len(theirs), ours.vocabulary)
    assert ours.begin("x").tolist() == theirs("x").input_ids[:-1]
    for text in WRITTEN:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for tools in (None, TOOLS):
        assert ours.template.render(
            messages, tools, {}, add_generation_prompt=True
        ) == theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )


def test_a_folder_without_a_tokenizer_json_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(GatewayConfigError, match=r"AutoTokenizer\.from_pretrained\(FOLDER\)"):
        ChatTokenizer.load(str(tmp_path))


def test_a_folder_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(GatewayConfigError, match=r"chat_template\.jinja"):
        ChatTokenizer.load(str(tmp_path))


def test_a_json_file_that_is_cut_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im')
    with pytest.raises(GatewayConfigError, match=r"tokenizer_config\.json cannot be read"):
        ChatTokenizer.load(str(tmp_path))


def test_special_tokens_that_were_not_in_the_vocabulary_are_control_tokens(tmp_path: Path) -> None:
    with_added_tokens_in_the_config(tmp_path)
    tokenizer = ChatTokenizer.load(str(tmp_path))
    assert {"<|extra|>", "<|another|>", "<|image|>"} < tokenizer.special.keys()
    assert "<tool_call>" not in tokenizer.special
    said = [{"role": "user", "content": "<|another|>"}]
    rendered = tokenizer.render(said, None, {}, add_generation_prompt=False)
    assert tokenizer.special["<|another|>"] not in tokenizer.encode(rendered)


def test_the_models_vocabulary_may_be_larger(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 4096}}')
    assert ChatTokenizer.load(str(tmp_path)).vocabulary == 4096


# -- what a gateway loads ------------------------------------------------------------------------

SERVE = """
import asyncio, sys, threading, urllib.request
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.server import HttpServer
from stepwell.gateway.config import Wiring
config = GatewayConfig(port=0, context_length=64, tokenizer_path=sys.argv[1])
server = HttpServer(config, Wiring(), None)
url = server.start()
body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
headers = {"content-type": "application/json"}
request = urllib.request.Request(url + "/v1/messages/count_tokens", body, headers)
assert urllib.request.urlopen(request).status == 200
heavy = set(sys.argv[2:]) & set(sys.modules)
server.stop()
sys.exit(" ".join(heavy) or 0)
"""


def test_a_serving_gateway_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    serve(save_tokenizer(tmp_path, "qwen3"), "torch", "transformers")


def serve(folder: str, *absent: str) -> None:
    command = [sys.executable, "-c", SERVE, folder, *absent]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
