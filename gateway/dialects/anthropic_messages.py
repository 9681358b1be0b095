"""Anthropic Messages: request → `ChatRequest`, deltas → content blocks, as JSON or events.

    system, messages ──► neutral messages     a tool_result becomes a tool message, in wire order
    last assistant message ──► prefill        the reply goes on from its text
    deltas ──► content_block_* events ──► the blocks of a whole `Message`: both always agree

Thinking is shown to those who asked for it (`thinking` enabled or adaptive). Its signature is
nothing secret: with `display: omitted` it is the text itself, so that it can be sent back. What
agents always send and what says nothing about the completion (cache marks, betas, billing) is
ignored; what asks for something this gateway does not do is told in `x-stepwell-ignored`, or
refused by name where the answer would not be what was asked for.

Owns the wire format, its validation and its error wording. Does not own: calls, prompts, tool-call
parsing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from starlette.datastructures import Headers

from stepwell.gateway.call import Reply
from stepwell.gateway.dialects.base import KEEP_ALIVE, Exchange, Parsed, sse
from stepwell.gateway.errors import ContextLengthError, GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.web import field, number, top_p

Event = dict[str, Any]

_SILENT = frozenset(
    {
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
    }
)
"""They say nothing about the completion."""
_TOLD = frozenset({"context_management", "fallbacks", "speed"})
"""They ask the vendor's servers to do something that an agent does not rely on."""
_KNOWN = frozenset(
    {
        "max_tokens",
        "messages",
        "model",
        "output_config",
        "output_format",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_REFUSED: Mapping[str, str] = {
    "compaction": "let the agent summarise with a call of its own",
    "container": "this gateway runs no containers",
    "mcp_servers": "connect the agent to them and send their tools as tools",
    "thread": "send the whole conversation in messages",
}
MAX_STOPS = 64
_BUILTIN = re.compile(r"[a-z0-9_]+_20[0-9]{6}|mcp_toolset")
_OMITTED = "stepwell:"
"""Begins the signature that holds the text of its omitted thinking."""


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(about: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": about, **more}


def _edits(*commands: str, **more: Any) -> dict[str, Any]:
    lines = {"type": "array", "items": {"type": "integer"}}
    return _object(
        ["command"],
        command=_text("What to do.", enum=["view", "create", "str_replace", "insert", *commands]),
        path=_text("Of the file or directory."),
        file_text=_text("create: the file's whole content."),
        old_str=_text("str_replace: text that occurs exactly once."),
        new_str=_text("str_replace: what takes its place."),
        insert_line={"type": "integer", "description": "insert: the line to insert after; 0: top."},
        insert_text=_text("insert: the new text."),
        view_range={**lines, "description": "view: first and last line; -1: the end."},
        **more,
    )


_AGENT_RUN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a persistent shell.",
        _object(
            [],
            command=_text("The command."),
            restart={"type": "boolean", "description": "Restart the shell instead."},
        ),
    ),
    "text_editor": ("Views, creates and edits text files.", _edits()),
    "memory": (
        "Views, creates and edits the memory files below /memories.",
        _edits("delete", "rename", old_path=_text("rename: from."), new_path=_text("rename: to.")),
    ),
}
"""Built-in tools whose calls the agent answers itself; their schema is known to Claude only, so the
model gets one here."""


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes the answer and not the call."""

    thinking: Literal["hidden", "shown", "omitted"]
    prefill: str
    edits_context: bool
    """`context_management` was sent; the answer says that nothing was done."""


class AnthropicMessages:
    """`POST /v1/messages`."""

    name = "anthropic_messages"

    def parse(self, body: dict[str, Any], headers: Headers) -> Parsed:
        """See `Dialect.parse`."""
        if body.get("max_tokens") is None:
            raise RequestError(
                "max_tokens is missing; send the most tokens to sample", "max_tokens"
            )
        return parse(body)

    def parse_count(self, body: dict[str, Any]) -> Parsed:
        """A body of `POST /v1/messages/count_tokens`.

        Raises:
            RequestError: names the field, its value and the remedy.
        """
        return parse(body)

    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """A `Message`."""
        options: Options = exchange.parsed.options
        reply, call = replies[0], exchange.calls[0]
        message = _message_head(exchange, reply.n_prompt)
        message["content"] = _whole(_events(call.deltas, options))
        message.update(_stop(reply))
        message["usage"] = _usage(reply.n_prompt, reply.n_response)
        if options.edits_context:
            message["context_management"] = {"applied_edits": []}
        return message

    async def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """`message_start`, blocks, `message_delta`, `message_stop`; `ping` while nothing comes."""
        options: Options = exchange.parsed.options
        blocks = BlockWriter(options)
        call = exchange.calls[0]
        began = False
        try:
            async for event in exchange.events():
                if not began and (n_prompt := call.n_prompt) is not None:
                    began = True
                    head = {"type": "message_start", "message": _message_head(exchange, n_prompt)}
                    yield _frame(head)
                if event is None:
                    # Before message_start clients expect no event at all.
                    yield _frame({"type": "ping"}) if began else KEEP_ALIVE
                elif isinstance(event.item, Reply):
                    reply = event.item
                    for each in blocks.finish():
                        yield _frame(each)
                    delta: Event = {"type": "message_delta", "delta": _stop(reply)}
                    if options.edits_context:
                        delta["context_management"] = {"applied_edits": []}
                    yield _frame({**delta, "usage": _usage(reply.n_prompt, reply.n_response)})
                else:
                    for each in blocks.write(event.item):
                        yield _frame(each)
        except GatewayError as e:
            yield _frame(self.error(e))
            return
        yield _frame({"type": "message_stop"})
        exchange.delivered()

    def error(self, e: GatewayError) -> dict[str, Any]:
        """Anthropic's error object."""
        message = str(e)
        if isinstance(e, ContextLengthError) and e.tokens is not None:
            # Agents look for these words before they compact their history.
            message = "prompt is too long: {} tokens > {} maximum".format(*e.tokens)
        elif e.param == "parallel_tool_calls":
            ours = "tool_choice.disable_parallel_tool_use is true"
            message = message.replace("parallel_tool_calls is false", ours)
        kind = _ERROR_TYPES.get(e.status)
        if kind is None:
            kind = "api_error" if e.status >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": kind, "message": message}
        if e.param == "thread":
            # The SDK then goes on by itself, with the whole conversation in each request.
            error["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex}"}


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


# -- the answer ------------------------------------------------------------------------------


class BlockWriter:
    """Deltas of one reply → `content_block_*` events.

    A block of text or thinking begins with its first visible character: the API has no blank
    blocks, and some clients fail on them.
    """

    def __init__(self, options: Options) -> None:
        self._thinking = options.thinking
        self._prefill = options.prefill
        self._index = -1
        self._open: Literal["text", "thinking"] | None = None
        self._kind: Literal["text", "thinking"] | None = None
        """Of the text that comes; `_open` follows when some of it is visible."""
        self._blank = ""
        self._thought: list[str] = []
        """Text of the open thinking block, for its signature."""

    def write(self, delta: Delta) -> Iterator[Event]:
        if isinstance(delta, ToolCall):
            yield from self._shut()
            yield self._start({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
            yield self._stop()
        elif isinstance(delta, ReasoningDelta):
            if self._thinking != "hidden":
                yield from self._say("thinking", delta.text)
        else:
            yield from self._say("text", self._without_prefill(delta).text)

    def finish(self) -> Iterator[Event]:
        yield from self._shut()

    def _say(self, kind: Literal["text", "thinking"], text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._shut()
            self._kind = kind
        if self._open is None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._blank, self._open = "", kind
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            yield self._start({"type": kind, **empty})
        if kind == "text":
            if text:
                yield self._delta({"type": "text_delta", "text": text})
            return
        self._thought.append(text)
        if self._thinking == "shown":
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _shut(self) -> Iterator[Event]:
        if self._open == "thinking":
            signature = _signature("".join(self._thought), omitted=self._thinking == "omitted")
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield self._stop()
        self._open = self._kind = None
        self._blank = ""
        self._thought.clear()

    def _without_prefill(self, delta: ContentDelta) -> ContentDelta:
        """The core's text begins with what was prefilled; the API's does not."""
        if not self._prefill:
            return delta
        n = min(len(delta.text), len(self._prefill))
        if not self._prefill.startswith(delta.text[:n]):  # read as something else than text
            self._prefill = ""
            return delta
        self._prefill = self._prefill[n:]
        return ContentDelta(delta.text[n:])

    def _start(self, block: dict[str, Any]) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._index}


def _events(deltas: Iterable[Delta], options: Options) -> Iterator[Event]:
    blocks = BlockWriter(options)
    for delta in deltas:
        yield from blocks.write(delta)
    yield from blocks.finish()


def _whole(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content blocks that the events of a reply add up to."""
    blocks: list[dict[str, Any]] = []
    pieces: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            pieces = {}
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                if name != "type":
                    pieces.setdefault(name, []).append(text)
        else:
            block = blocks[-1]
            for name, parts in pieces.items():
                if name == "partial_json":
                    # As text, so that numbers of any size come through.
                    block["input"] = orjson.Fragment("".join(parts))
                else:
                    block[name] = "".join(parts)
    return blocks


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


def _stop(reply: Reply) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    sequence = reply.stop_sequence if reply.finish_reason == "stop" else None
    return {
        "stop_reason": reason[reply.finish_reason] if sequence is None else "stop_sequence",
        "stop_sequence": sequence,
    }


def _signature(thought: str, *, omitted: bool) -> str:
    data = thought.encode(errors="replace")
    if omitted:
        return _OMITTED + base64.b64encode(data).decode()
    return base64.b64encode(hashlib.blake2b(data, digest_size=24).digest()).decode()


def _omitted_thought(signature: Any) -> str:
    """The thinking that a signature of ours holds; nothing for any other."""
    if not isinstance(signature, str) or not signature.startswith(_OMITTED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_OMITTED), validate=True).decode()
    except (binascii.Error, ValueError):  # changed on the way; thoughts sent back are no input
        return ""


def _frame(event: Event) -> bytes:
    return sse(event, event["type"])


# -- the request -----------------------------------------------------------------------------


def parse(body: Mapping[str, Any]) -> Parsed:
    """A request's body.

    Raises:
        RequestError: names the field, its value and the remedy.
    """
    ignored = _check_fields(body)
    field(body, "model", str, "a string")
    tools, builtin = _tools(body, ignored)
    forced_tool, parallel, parse_tools = _tool_choice(body, tools)
    system = _system(body.get("system"))
    messages, prefill = _messages(body)
    if prefill and forced_tool is not None:
        raise RequestError(
            "tool_choice asks for a tool call, but the last message begins the reply; "
            "send one of them",
            "tool_choice",
        )
    thinking, template_args = _thinking(body, ignored)
    call = ChatRequest(
        messages=[*system, *messages],
        tools=tools or None,
        template_args=template_args,
        max_tokens=number(body, "max_tokens", 1, 2**31 - 1, integral=True),
        temperature=number(body, "temperature", 0, 2),
        top_p=top_p(body),
        top_k=number(body, "top_k", 0, 2**31 - 1, integral=True) or None,
        stop=_stop_sequences(body),
        constraint=_constraint(body, ignored),
        constraint_field="output_config.format",
        forced_tool=forced_tool,
        prefill=prefill,
        parallel_tool_calls=parallel,
        stream=bool(field(body, "stream", bool, "true or false")),
        parse_tools=parse_tools,
    )
    options = Options(thinking, prefill, body.get("context_management") is not None)
    return Parsed(call, options, ignored=(*builtin, *ignored), builtin_tools=builtin)


def _check_fields(body: Mapping[str, Any]) -> list[str]:
    """The fields that are passed over but told.

    Raises:
        RequestError: a field is not supported.
    """
    ignored: list[str] = []
    for name, value in body.items():
        if name in _KNOWN or name in _SILENT or value is None or value == []:
            continue
        if name in _TOLD:
            ignored.append(name)
            continue
        remedy = _REFUSED.get(name, "leave it out")
        raise RequestError(
            f"{name} is {value!r:.80}, which this gateway does not support; {remedy}", name
        )
    return ignored


def _stop_sequences(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = field(body, "stop_sequences", list, "a list of strings") or []
    if len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(
            f"stop_sequences is {stops!r:.80}; send up to {MAX_STOPS} non-empty strings",
            "stop_sequences",
        )
    return tuple(stops)


def _constraint(body: Mapping[str, Any], ignored: list[str]) -> tuple[str, str] | None:
    config = field(body, "output_config", dict, "an object") or {}
    for name, value in config.items():
        if name in ("effort", "task_budget"):
            if value is not None:
                ignored.append(f"output_config.{name}")
        elif name != "format" and value is not None:
            raise RequestError(
                f"output_config.{name} is not supported; leave it out", f"output_config.{name}"
            )
    where, output = "output_config.format", field(config, "format", dict, "an object")
    if output is None:
        where, output = "output_format", field(body, "output_format", dict, "an object")
    if output is None:
        return None
    schema = output.get("schema")
    if output.get("type") != "json_schema" or not isinstance(schema, dict):
        raise RequestError(
            f"{where} is {output!r:.80}; send {{'type': 'json_schema', 'schema': {{…}}}}", where
        )
    return "json_schema", orjson.dumps(schema).decode()


def _thinking(
    body: Mapping[str, Any], ignored: list[str]
) -> tuple[Literal["hidden", "shown", "omitted"], dict[str, Any] | None]:
    """How thinking is shown, and what the chat template is told."""
    config = field(body, "thinking", dict, "an object")
    if config is None:
        return "hidden", None
    kind = config.get("type")
    if kind == "disabled":
        return "hidden", {"enable_thinking": False}
    if kind not in ("enabled", "adaptive", "between_tools"):
        raise RequestError(
            f"thinking.type is {kind!r:.80}; send enabled, adaptive or disabled", "thinking.type"
        )
    if number(config, "budget_tokens", 0, 2**31 - 1, integral=True) is not None:
        ignored.append("thinking.budget_tokens")
    display = field(config, "display", str, "summarized or omitted")
    if display not in (None, "summarized", "omitted"):
        raise RequestError(
            f"thinking.display is {display!r:.80}; send summarized or omitted", "thinking.display"
        )
    return ("omitted" if display == "omitted" else "shown"), None


# -- tools -----------------------------------------------------------------------------------


def _tools(body: Mapping[str, Any], ignored: list[str]) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools shown to the model, and the built-in ones that are not."""
    tools: list[Tool] = []
    builtin: list[str] = []
    for i, tool in enumerate(field(body, "tools", list, "a list") or []):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise RequestError(f"{where} is {tool!r:.80}; send an object", where)
        kind = tool.get("type")
        if kind is None or kind == "custom":
            tools.append(_tool(tool, where))
            if tool.get("strict") is True and "tools.strict" not in ignored:
                ignored.append("tools.strict")
            continue
        if not isinstance(kind, str) or not _BUILTIN.fullmatch(kind):
            raise RequestError(
                f"{where}.type is {kind!r:.80}; send 'custom' and an input_schema", f"{where}.type"
            )
        known = _AGENT_RUN.get(kind.rpartition("_")[0])
        if known is None:
            builtin.append(f"{where}={kind}")
        else:
            about, schema = known
            tools.append(_function(_name(tool, where), about, schema))
    return tools, tuple(builtin)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(
            f"{where}.input_schema is {schema!r:.80}; send a JSON schema", f"{where}.input_schema"
        )
    about = tool.get("description")
    if about is not None and not isinstance(about, str):
        raise RequestError(
            f"{where}.description is {about!r:.80}; send text", f"{where}.description"
        )
    return _function(_name(tool, where), about, schema)


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name is {name!r:.80}; send the tool's name", f"{where}.name")
    return name


def _function(name: str, about: str | None, schema: dict[str, Any]) -> Tool:
    description = {} if about is None else {"description": about}
    return {"type": "function", "function": {"name": name, **description, "parameters": schema}}


def _tool_choice(body: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str | None, bool, bool]:
    """Which tool must be called ("": any), whether several may be, and whether calls are read."""
    choice = field(body, "tool_choice", dict, "an object with a type") or {"type": "auto"}
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError(
            f"tool_choice.type is {kind!r:.80}; send auto, any, tool or none", "tool_choice.type"
        )
    single = field(choice, "disable_parallel_tool_use", bool, "true or false")
    forced: str | None = None
    if kind in ("any", "tool"):
        names = [t["function"]["name"] for t in tools]
        forced = "" if kind == "any" else choice.get("name")
        if not names or (kind == "tool" and forced not in names):
            wanted = "any" if kind == "any" else forced
            raise RequestError(
                f"tool_choice asks for {wanted!r:.80}, but the tools of this request are {names}",
                "tool_choice",
            )
    # With "none" the tools stay in the prompt, so that it goes on from the turns before.
    return forced, not single, bool(tools) and kind != "none"


# -- messages --------------------------------------------------------------------------------


def _system(system: Any) -> list[Message]:
    if system is None or system == []:
        return []
    return [{"role": "system", "content": _plain_text(system, "system")}]


def _messages(body: Mapping[str, Any]) -> tuple[list[Message], str]:
    """The conversation, and the beginning of the reply if the last message is the assistant's."""
    raw = field(body, "messages", list, "a list of messages")
    if not raw:
        raise RequestError("messages is empty; send at least one message", "messages")
    messages: list[Message] = []
    before: Any = None
    for i, message in enumerate(raw):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} is {message!r:.80}; send an object", where)
        role, content = message.get("role"), message.get("content")
        if role == "system":
            text = _plain_text(content, f"{where}.content")
            messages.append({"role": "system", "content": text})
        elif role == "user":
            messages += _user(content, f"{where}.content")
        elif role == "assistant":
            said = _assistant(content, f"{where}.content")
            if before == "assistant":  # one turn in pieces
                messages[-1] = _merged(messages[-1], said)
            else:
                messages.append(said)
        else:
            raise RequestError(
                f"{where}.role is {role!r:.80}; send user, assistant or system", f"{where}.role"
            )
        before = role
    if before != "assistant":
        return messages, ""
    return messages[:-1], _prefill(messages, f"messages[{len(raw) - 1}]")


def _prefill(messages: Sequence[Message], where: str) -> str:
    if len(messages) == 1:
        raise RequestError("messages holds no message before the assistant's", "messages")
    last = messages[-1]
    if last.get("tool_calls"):
        raise RequestError(
            f"{where} ends the conversation with a tool call; send its tool_result", where
        )
    if last.get("reasoning_content"):
        raise RequestError(
            f"{where} begins the reply with thinking; only text can be continued", where
        )
    text: str = last["content"]
    return text


def _merged(first: Message, second: Message) -> Message:
    merged: Message = {"role": "assistant", "content": first["content"] + second["content"]}
    thought = first.get("reasoning_content", "") + second.get("reasoning_content", "")
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if thought:
        merged["reasoning_content"] = thought
    if calls:
        merged["tool_calls"] = calls
    return merged


def _user(content: Any, where: str) -> list[Message]:
    """Tool results become messages of their own, in wire order; the text between them, users'."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block, at in _blocks(content, where):
        if block.get("type") == "tool_result":
            flush()
            messages.append(_tool_result(block, at))
        elif text := _block_text(block, at, "text, document and tool_result"):
            texts.append(text)
    flush()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise RequestError(
            f"{where}.tool_use_id is {call_id!r:.80}; send the id of the tool_use it answers",
            f"{where}.tool_use_id",
        )
    content = block.get("content")
    text = "" if content is None else _plain_text(content, f"{where}.content")
    if field(block, "is_error", bool, "true or false") and "error" not in text.lower():
        text = f"Error: {text}" if text else "Error"  # templates know no other sign
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _assistant(content: Any, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, at in _blocks("" if content is None else content, where):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_tool_use(block, at))
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise RequestError(f"{at}.thinking is {thought!r:.80}; send text", f"{at}.thinking")
            thoughts.append(thought or _omitted_thought(block.get("signature")))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, at, "text, thinking and tool_use"))
    # Our blocks are parts of one text; nothing was between them.
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id = block.get("id")
    if not isinstance(call_id, str):
        raise RequestError(f"{where}.id is {call_id!r:.80}; send the call's id", f"{where}.id")
    arguments = block.get("input")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict | str):
        raise RequestError(f"{where}.input is {arguments!r:.80}; send an object", f"{where}.input")
    name = _name(block, where)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


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
        raise RequestError(f"{where} is {content!r:.80}; send text or a list of blocks", where)
    for i, block in enumerate(content):
        at = f"{where}[{i}]"
        if isinstance(block, str):
            yield {"type": "text", "text": block}, at
        elif isinstance(block, dict):
            yield block, at
        else:
            raise RequestError(f"{at} is {block!r:.80}; send an object", at)


def _block_text(block: Mapping[str, Any], where: str, supported: str) -> str:
    kind = block.get("type")
    source = block.get("source")
    if kind == "text":
        text, at = block.get("text"), f"{where}.text"
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        text, at = source.get("data"), f"{where}.source.data"
    else:
        raise RequestError(
            f"{where}.type is {kind!r:.80}; this gateway supports {supported} here (documents as "
            "text only)",
            f"{where}.type",
        )
    if not isinstance(text, str):
        raise RequestError(f"{at} is {text!r:.80}; send text", at)
    return text
