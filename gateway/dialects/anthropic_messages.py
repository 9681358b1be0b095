"""Anthropic Messages: request → `ChatRequest`, `Reply` → JSON or server-sent events.

    system, messages ──► neutral messages     a tool_result becomes a tool message, in call order
    last assistant message ──► prefill        the reply goes on from its text
    deltas ──► content blocks (`anthropic_answer.py`) ──► events, or a whole `Message`

What agents always send and what says nothing about the completion (cache marks, betas, billing) is
ignored; what asks for something this gateway does not do is told in `x-stepwell-ignored`, or
refused by name where the answer would not be what was asked for.

Owns the wire format, its validation and its error wording. Does not own: calls, prompts, tool-call
parsing.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.anthropic_answer import (
    BlockWriter,
    Event,
    Thinking,
    whole,
)
from stepwell.gateway.dialects.base import (
    NOTHING,
    PLACE,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
    Template,
    sse,
)
from stepwell.gateway.dialects.computer import anthropic_computer
from stepwell.gateway.dialects.params import (
    MaxTokens,
    Params,
    Part,
    Temperature,
    Texts,
    TopP,
    json_constraint,
    must_call,
    need,
    optional,
    wrong,
)
from stepwell.gateway.errors import ContextLengthError, GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.tokens.messages import (
    AssistantTurn,
    Message,
    Tool,
    Tools,
    content_of,
    in_call_order,
)
from stepwell.gateway.trajectory.calls import LiveCall, SampledToken

_BUILTIN = re.compile(r"[a-z0-9_]+_20[0-9]{6}|mcp_toolset")
_COMPUTER = re.compile(r"computer_20[0-9]{6}")
_AGENT_RUN = ("bash_", "text_editor_", "memory_")
"""Built-in tools whose calls the agent answers itself: it would wait for them in vain."""
_TOLD_OF_TOOLS = ("strict", "input_examples", "defer_loading")
"""Fields of a tool that are left aside: it is shown at once, with its schema alone."""


class ThinkingConfig(Part):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Any = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Part):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Params):
    format: OutputFormat | None = None
    effort: Any = None
    task_budget: Any = None


class MessagesParams(Params):
    # They say nothing about the completion.
    ignored = frozenset(
        (
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "billing_policy",
            "cache_control",
            "diagnostics",
            "fallback_credit_token",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        )
    )
    remedies: ClassVar = {
        "compaction": "let the agent summarise with a call of its own",
        "container": "this gateway runs no containers",
        "max_tokens": "send the most tokens to sample",
        "mcp_servers": "connect the agent to them and send their tools as tools",
        "messages": "send at least one message",
        "thread": "send the whole conversation in messages",
    }
    max_tokens: MaxTokens
    messages: list[Any] = Field(min_length=1)
    model: str = ""
    system: Any = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int = Field(default=0, ge=0, lt=2**31)
    stop_sequences: Annotated[Texts, Field(max_length=64)] = ()
    stream: bool = False
    thinking: ThinkingConfig | None = None
    tools: list[Any] | None = None
    mcp_servers: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: ToolChoice = ToolChoice()
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None

    # Told: they ask the vendor's servers to do something that an agent does not rely on.
    context_management: Any = None
    fallbacks: Any = None
    speed: Any = None

    def told(self) -> list[str]:
        asked = ("context_management", "fallbacks", "speed")
        sent = [f for f in asked if getattr(self, f) is not None]
        config = ("effort", "task_budget")
        sent += [f"output_config.{f}" for f in config if getattr(self.output_config, f) is not None]
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            sent.append("thinking.budget_tokens")
        return sent

    @property
    def format_field(self) -> str:
        return "output_config.format" if self.output_config.format else "output_format"

    def constraint(self) -> tuple[str, str] | None:
        form = self.output_config.format or self.output_format
        if form is None:
            return None
        return json_constraint(form.type, form.json_schema, self.format_field)


class CountParams(MessagesParams):
    max_tokens: MaxTokens | None = None  # type: ignore[assignment]  # the one difference


@dataclass(frozen=True, slots=True)
class Options:
    """Options that shape the answer and not the call."""

    thinking: Thinking
    prefill: str
    edits_context: bool
    """`context_management` was sent; the answer says that nothing was done."""
    stops: tuple[str, ...]
    """Stop sequences of the request; its channel may have others."""


class AnthropicMessages(Dialect):
    """`POST /v1/messages`."""

    name = "anthropic_messages"
    list_name = "messages"

    def parse(
        self,
        body: dict[str, Any],
        reader: Principal | None = None,
        known: Known = NOTHING,
        kind: type[MessagesParams] = MessagesParams,
    ) -> Parsed:
        """`kind`: `CountParams` for `POST /v1/messages/count_tokens`."""
        params, items = known.read(kind, body, self.list_name)
        ignored = params.told()
        read: ReadTools = known.tools or ReadTools.of(params.tools or [])
        tools = read.tools
        ignored += read.ignored
        choice, forced_tool = params.tool_choice, None
        if choice.type == "any":
            forced_tool = must_call(tools)
        elif choice.type == "tool":
            if not isinstance(choice.name, str):
                raise wrong("tool_choice.name", choice.name, "send the name of a tool")
            forced_tool = must_call(tools, choice.name, "tool_choice.name")
        about = "" if params.system is None else _plain_text(params.system, "system")
        system: list[Message] = [{"role": "system", "content": about}] if about else []
        messages, prefill = _messages(items, known)
        if prefill and forced_tool is not None:
            raise RequestError(
                "tool_choice asks for a tool call, but the last message begins the reply; "
                "send one of them",
                "tool_choice",
            )
        # With "none" the tools stay in the prompt, so that it goes on from the turns before.
        parse_tools = bool(tools) and choice.type != "none"
        constraint = params.constraint()
        if constraint is not None and parse_tools:
            # Constrained from its first token on, the reply could not call a tool.
            ignored.append(f"{params.format_field} (beside tools)")
            constraint = None
        thinking: Thinking = "hidden"
        if params.thinking is not None and params.thinking.type != "disabled":
            thinking = "omitted" if params.thinking.display == "omitted" else "shown"
        call = ChatRequest(
            messages=[*system, *messages],
            tools=tools or None,
            template_args={"enable_thinking": False}
            if params.thinking is not None and params.thinking.type == "disabled"
            else None,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or None,
            stop=params.stop_sequences,
            constraint=constraint,
            constraint_field=params.format_field,
            forced_tool=forced_tool,
            prefill=prefill,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            stream=params.stream,
            parse_tools=parse_tools,
        )
        edits = params.context_management is not None
        options = Options(thinking, prefill, edits, params.stop_sequences)
        return Parsed(
            call,
            options,
            ignored=(*read.builtin, *ignored),
            n_outside=len(system),
            tools=read,
        )

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `Message`."""
        options: Options = exchange.parsed.options
        reply, writer = replies[0], BlockWriter(options.thinking, options.prefill)
        return {
            **_message_head(exchange, reply.n_prompt),
            "content": whole(writer.events(exchange.calls[0].deltas)),
            **_stop(reply, options),
            "usage": _usage(reply.n_prompt, reply.n_response),
            **_applied_edits(options),
        }

    def writer(self, exchange: Exchange) -> StreamWriter:
        """`message_start`, blocks, `message_delta`, `message_stop`; `ping` while nothing comes."""
        return _MessageWriter(exchange, self)

    def error(self, e: GatewayError) -> dict[str, Any]:
        """Anthropic's error object."""
        message = str(e)
        if isinstance(e, ContextLengthError) and e.tokens is not None:
            # Agents look for these words before they compact their history.
            message = "prompt is too long: {} tokens > {} maximum".format(*e.tokens)
        elif e.param == "parallel_tool_calls":
            ours = "tool_choice.disable_parallel_tool_use is true"
            message = message.replace("parallel_tool_calls is false", ours)
        other = "api_error" if e.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": _ERROR_TYPES.get(e.status, other), "message": message}
        if e.param == "thread":
            # The SDK then goes on by itself, with the whole conversation in each request.
            error["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex}"}


class _MessageWriter(StreamWriter):
    idle = sse({"type": "ping"}, "ping")

    def __init__(self, exchange: Exchange, dialect: AnthropicMessages) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._options: Options = exchange.parsed.options
        self._blocks = BlockWriter(self._options.thinking, self._options.prefill)
        self._template: Template | None = None
        """Template of the open block's deltas."""

    def begin(self) -> bytes:
        message = _message_head(self._exchange, self._exchange.calls[0].n_prompt)
        return _frame({"type": "message_start", "message": message})

    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        if not self._blocks.goes_on(delta):
            self._template = None
            return b"".join(map(_frame, self._blocks.write(delta)))
        if self._template is None:
            self._template = Template(_frame(self._blocks.text(PLACE)))
        return self._template(delta.text)

    def reply(self, sample: int, reply: LiveCall, tokens: Sequence[SampledToken]) -> bytes:
        delta = {"type": "message_delta", "delta": _stop(reply, self._options)}
        usage = _usage(reply.n_prompt, reply.n_response)
        ended = {**delta, **_applied_edits(self._options), "usage": usage}
        return b"".join(map(_frame, (*self._blocks.finish(), ended)))

    def end(self) -> bytes:
        return _frame({"type": "message_stop"})

    def failed(self, e: GatewayError) -> bytes:
        return _frame(self._dialect.error(e))


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _frame(event: Event) -> bytes:
    return sse(event, event["type"])


def _message_head(exchange: Exchange, n_prompt: int) -> dict[str, Any]:
    return {
        "id": f"msg_{exchange.uid}",
        "type": "message",
        "role": "assistant",
        "model": exchange.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(n_prompt, 0),
    }


def _usage(n_prompt: int, n_response: int) -> dict[str, Any]:
    """All of the prompt counts as input: what the engine has cached costs nobody anything."""
    return {
        "input_tokens": n_prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": n_response,
    }


def _stop(reply: LiveCall, options: Options) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    sequence = reply.text.stop_sequence
    if reply.finish_reason == "stop" and sequence in options.stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": reason[reply.finish_reason], "stop_sequence": None}


def _applied_edits(options: Options) -> dict[str, Any]:
    return {"context_management": {"applied_edits": []}} if options.edits_context else {}


# -- tools -----------------------------------------------------------------------------------


class ReadTools(NamedTuple):
    tools: Tools
    """Tools that are shown to the model."""
    builtin: tuple[str, ...]
    """Built-in ones that are not, as `path=type`."""
    ignored: tuple[str, ...]
    """Fields of tools that are left aside."""

    @classmethod
    def of(cls, sent: Sequence[Any]) -> ReadTools:
        """
        Raises:
            RequestError
        """
        tools: list[Tool] = []
        builtin: list[str] = []
        ignored: dict[str, None] = {}
        for i, tool in enumerate(sent):
            where = f"tools[{i}]"
            if not isinstance(tool, dict):
                raise wrong(where, tool, "send an object")
            kind = tool.get("type")
            if kind is None or kind == "custom":
                schema = need(tool, "input_schema", dict, where, "send a JSON schema")
                name = need(tool, "name", str, where)
                about = optional(tool, "description", where)
                described = {} if about is None else {"description": about}
                function = {"name": name, **described, "parameters": schema}
                tools.append({"type": "function", "function": function})
                ignored |= {f"tools.{f}": None for f in _TOLD_OF_TOOLS if tool.get(f)}
            elif isinstance(kind, str) and _COMPUTER.fullmatch(kind):
                tools.append(anthropic_computer(tool, where))
            elif not isinstance(kind, str) or not _BUILTIN.fullmatch(kind):
                raise wrong(f"{where}.type", kind, "send 'custom' and an input_schema")
            elif kind.startswith(_AGENT_RUN):
                remedy = "only Claude knows its schema, send 'custom' and an input_schema"
                raise wrong(f"{where}.type", kind, remedy)
            else:
                builtin.append(f"{where}={kind}")
        return cls(Tools(tools), tuple(builtin), (*ignored,))


# -- messages --------------------------------------------------------------------------------


def _messages(sent: list[Any], known: Known) -> tuple[list[Message], str]:
    """The conversation, and the beginning of the reply if the last message is the assistant's."""
    messages: list[Message] = []
    turn: AssistantTurn | None = None
    for i, message in enumerate(sent):
        where = f"messages[{known.place(i)}]"
        if not isinstance(message, dict):
            raise wrong(where, message, "send an object")
        role, content = message.get("role"), message.get("content")
        if turn is not None and role != "assistant":
            turn.end()
            turn = None
        if role == "system":
            said = _plain_text(content, f"{where}.content")
            messages.append({"role": "system", "content": said})
        elif role == "user":
            messages += _user(content, f"{where}.content", known)
        elif role == "assistant":
            if turn is None:
                known.cut(i, len(messages))
                turn = AssistantTurn()
                messages.append(turn.message)
            _add(turn, content, f"{where}.content")  # one turn may come in pieces
        else:
            raise wrong(f"{where}.role", role, "send user, assistant or system")
    if turn is None:
        known.cut(len(sent), len(messages))
        return in_call_order(messages), ""
    turn.end()
    messages = in_call_order(messages)
    return messages[:-1], _prefill(messages, f"messages[{known.place(len(sent) - 1)}]")


def _prefill(messages: Sequence[Message], where: str) -> str:
    last = messages[-1]
    if len(messages) == 1:
        raise RequestError("messages holds no message before the assistant's", "messages")
    if last.get("tool_calls"):
        raise RequestError(f"{where} ends with a tool call; send its tool_result", where)
    if last.get("reasoning_content"):
        raise RequestError(f"{where} ends with thinking; only text can be continued", where)
    text: str = last["content"]
    return text


def _user(content: Any, where: str, known: Known) -> list[Message]:
    """Tool results become messages of their own, in wire order; what is between them, users'."""
    messages: list[Message] = []
    parts: list[str | Message] = []

    def flush() -> None:
        if parts:
            messages.append({"role": "user", "content": content_of(parts)})
            parts.clear()

    for block, at in _blocks(content, where):
        if block.get("type") == "tool_result":
            flush()
            messages.append(_tool_result(block, at, known))
        elif part := _shown(block, at, "text, image, document and tool_result", known):
            parts.append(part)
    flush()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Mapping[str, Any], where: str, known: Known) -> Message:
    remedy = "send the id of the tool_use it answers"
    call_id, sent = need(block, "tool_use_id", str, where, remedy), block.get("content")
    blocks = () if sent is None else _blocks(sent, f"{where}.content")
    content = content_of([p for b, at in blocks if (p := _shown(b, at, "text and image", known))])
    if block.get("is_error") and "error" not in str(content).lower():
        # templates know no other sign
        if isinstance(content, list):
            content = [{"type": "text", "text": "Error"}, *content]
        else:
            content = f"Error: {content}" if content else "Error"
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _shown(block: Mapping[str, Any], where: str, supported: str, known: Known) -> str | Message:
    """A text, or the part that stands for a picture."""
    if block.get("type") != "image":
        return _block_text(block, where, supported)
    at, source = f"{where}.source", need(block, "source", dict, where, "send a base64 source")
    match source.get("type"):
        case "base64":
            return known.picture(source.get("data"), f"{at}.data")
        case "url" | "file" as kind:
            return known.picture(f"{kind}:{source.get('url') or source.get('file_id')}", at)
    raise wrong(f"{at}.type", source.get("type"), "send base64, with the picture as data")


def _add(turn: AssistantTurn, content: Any, where: str) -> None:
    """Add content to an assistant's turn. Our blocks are parts of one text; nothing was between
    them."""
    for block, at in _blocks("" if content is None else content, where):
        kind = block.get("type")
        if kind == "tool_use":
            turn.add_call(_tool_use(block, at))
        elif kind == "thinking":
            turn.add("reasoning_content", need(block, "thinking", str, at))
        elif kind != "redacted_thinking":
            turn.add("content", _block_text(block, at, "text, thinking and tool_use"))


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id, name = need(block, "id", str, where), need(block, "name", str, where)
    arguments = block.get("input")
    if not isinstance(arguments, dict | str | None):
        raise wrong(f"{where}.input", arguments, "send an object")
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _plain_text(content: Any, where: str) -> str:
    """Text of a field that holds text or text blocks; several become lines."""
    blocks = _blocks(content, where)
    return "\n".join(t for block, at in blocks if (t := _block_text(block, at, "text")))


def _blocks(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Content blocks, each with its place; a string is one block of text."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        raise wrong(where, content, "send text or a list of blocks")
    for i, block in enumerate(content):
        if not isinstance(block, str | dict):
            raise wrong(f"{where}[{i}]", block, "send an object")
        yield {"type": "text", "text": block} if isinstance(block, str) else block, f"{where}[{i}]"


def _block_text(block: Mapping[str, Any], where: str, supported: str) -> str:
    match block:
        case {"type": "text"}:
            return need(block, "text", str, where)
        case {"type": "document", "source": {"type": "text"}}:
            about = (optional(block, name, where) for name in ("title", "context"))
            text = need(block["source"], "data", str, f"{where}.source")
            return "\n".join([*filter(None, about), text])
    remedy = f"this gateway supports {supported} here (documents as text only)"
    raise wrong(f"{where}.type", block.get("type"), remedy)
