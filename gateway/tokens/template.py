"""This module renders a model's chat template, so that prompts are those that transformers writes,
in a process without transformers.

    {"default": source, "tool_use"?: source} ── compiled once ──► render(messages, tools) ──► text

The environment is the one of transformers' `apply_chat_template`: sandboxed, `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `{% generation %}`, loop controls. A test compares
both. Does not own: ids (`tokenizer.py`), which messages are rendered (`render.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import (
    Assign,
    Call,
    CallBlock,
    Compare,
    CondExpr,
    Const,
    Filter,
    For,
    Literal,
    Macro,
    Node,
    Test,
)
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from stepwell.gateway.errors import GatewayConfigError
from stepwell.gateway.tokens.messages import Message, Tool, ToolPart, Tools

MAX_TEXTS = 4
"""Ways of writing the JSON of a tool that are kept."""
MAX_TEMPLATES = 8
"""Templates that a process keeps compiled."""
_NAMES = frozenset(("system", "developer", "user", "assistant", "tool", "role", "content", "type"))


class ChatTemplate:
    """A model's chat template. Safe to use from threads."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: by name, where there are several: `default`, and `tool_use` for prompts with
                tools.
            special_tokens: text by name (`bos_token`, …), for the template to write.
        """
        named = {"default": source} if isinstance(source, str) else source
        if "default" not in named:
            raise GatewayConfigError(
                f"gateway.tokenizer_path holds the chat templates {sorted(named)}; name one of "
                "them default"
            )
        self.text = "\n".join(named.values())
        self._sources = tuple(named.values())
        self.special_tokens = dict(special_tokens)
        try:
            self._default = _compiled(named["default"])
            self._with_tools = _compiled(named.get("tool_use", named["default"]))
        except jinja2.TemplateSyntaxError as e:
            raise GatewayConfigError(
                f"gateway.tokenizer_path holds a chat template that is none ({e}, line {e.lineno})"
            ) from e

    def looks_for(self) -> frozenset[str]:
        """Texts that the template may look for in a message: what it compares, gives to methods and
        keeps in variables, but for names of roles and fields."""
        return frozenset().union(*map(_looked_for, self._sources))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """
        Raises:
            jinja2.TemplateError, TypeError, ValueError, KeyError: the template cannot show this.
        """
        if not messages:
            raise ValueError("there are no messages; send at least one")
        template = self._with_tools if tools else self._default
        return template.render(
            messages=[_shown(m) for m in messages],
            tools=(tools if isinstance(tools, Tools) else list(tools)) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **self.special_tokens, **variables},
        )


@lru_cache(MAX_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


@lru_cache(MAX_TEMPLATES)
def _looked_for(source: str) -> frozenset[str]:
    tree = _ENVIRONMENT.parse(source)
    nodes: list[Node] = [*tree.find_all((Call, Compare, Filter, Test))]
    named: list[Node] = [assign.node for assign in tree.find_all(Assign)]
    named += [loop.iter for loop in tree.find_all(For)]
    named += [default for macro in tree.find_all(Macro) for default in macro.defaults]
    nodes += [each for each in named if isinstance(each, (CondExpr, Literal))]
    consts = (each for node in nodes for each in (node, *node.find_all(Const)))
    texts = {each.value for each in consts if isinstance(each, Const)}
    return frozenset(text for text in texts - _NAMES if isinstance(text, str) and text)


def _shown(message: Message) -> Message:
    """Without fields that are null, and with a thought under each name that templates read."""
    shown = {k: v for k, v in message.items() if v is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((shown[name] for name in names if name in shown), None)
    if thought is None:
        return shown
    return {"thinking": thought, **shown, "reasoning_content": thought}


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` says what is trained on; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it of the class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """`dict`, of which a template reaches no other attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace`, of which a template sets no private attribute."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template sets {name!r} of a namespace")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    how = (ensure_ascii, indent, separators and tuple(separators), sort_keys)
    if isinstance(value, Tools | ToolPart) and (text := value.json_texts.get(how)) is not None:
        return text
    text = _encoder(*how).encode(value)
    if isinstance(value, Tools | ToolPart) and len(value.json_texts) < MAX_TEXTS:
        value.json_texts[how] = text
    return text


@lru_cache(maxsize=64)
def _encoder(
    ensure_ascii: bool,
    indent: int | str | None,
    separators: tuple[str, str] | None,
    sort_keys: bool,
) -> json.JSONEncoder:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


_ENVIRONMENT = _environment()
