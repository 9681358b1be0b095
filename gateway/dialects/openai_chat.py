"""OpenAI chat completions: request → `ChatRequest`, `Reply` → JSON or server-sent events.

Owns the wire format, its validation and its error wording, and what completions share with it. A
field the gateway cannot honour is refused by name. Ignored are fields that say nothing about the
completion, and hints to OpenAI's own models, of which `x-stepwell-ignored` tells. Does not own:
calls, prompts, tool-call parsing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers

from stepwell.gateway.call import Reply, SampledToken
from stepwell.gateway.dialects.base import KEEP_ALIVE, Event, Exchange, Parsed, sse
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, ReasoningDelta
from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.web import error_body, field, number, top_p

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_HINTS = frozenset({"prediction", "verbosity"})
_KNOWN = frozenset(
    {
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "model",
        "n",
        "parallel_tool_calls",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Not supported, but these values ask for nothing. Penalties, biases and a forbidden end would make
the log-probs those of another policy."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
}
_REMEDIES: Mapping[str, str] = {
    "function_call": "it is deprecated; use tool_choice",
    "functions": "it is deprecated; use tools",
    "web_search_options": "define a function tool that searches",
}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NO_THINKING = ("none", "minimal")
_RESERVED_TEMPLATE_ARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
        "truncation",
    }
)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
"""Of an assistant's content, as other vendors' clients send them back."""
MAX_STOPS = 16
MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
LEAST_LOGPROB = -9999.0
"""JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes the answer and not the call."""

    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: tuple[str, ...] = ()


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    name = "openai_chat"

    def __init__(self, chat_template: str) -> None:
        """`chat_template`: looked through for the switches that `reasoning_effort` can turn."""
        self._chat_template = chat_template

    def parse(self, body: dict[str, Any], headers: Headers) -> Parsed:
        """See `Dialect.parse`."""
        request, options = parse(body, self._chat_template)
        return Parsed(request, options, n=options.n, ignored=options.ignored)

    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """A `ChatCompletion`."""
        options: Options = exchange.parsed.options
        return {
            "id": f"chatcmpl-{exchange.uid}",
            "object": "chat.completion",
            "created": exchange.created,
            "model": exchange.model,
            "choices": [
                _choice(
                    i,
                    reply,
                    logprobs(call.tokens, exchange.tokenizer) if options.logprobs else None,
                )
                for i, (reply, call) in enumerate(zip(replies, exchange.calls, strict=True))
            ],
            "usage": usage(replies),
        }

    def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """`ChatCompletionChunk`s and `[DONE]`."""
        options: Options = exchange.parsed.options
        head = {
            "id": f"chatcmpl-{exchange.uid}",
            "object": "chat.completion.chunk",
            "created": exchange.created,
            "model": exchange.model,
        }
        new_tokens = NewTokens(exchange)
        n_calls = [0] * exchange.parsed.n

        def choice(event: Event) -> dict[str, Any]:
            index, item, _ = event
            delta: dict[str, Any] = {}
            if isinstance(item, ToolCall):
                delta = {"tool_calls": [{"index": n_calls[index], **item.entry()}]}
                n_calls[index] += 1
            elif isinstance(item, ReasoningDelta):
                delta = {"reasoning_content": item.text}
            elif isinstance(item, ContentDelta):
                delta = {"content": item.text}
            entries = None
            if options.logprobs and (tokens := new_tokens.of(event)):
                entries = logprobs(tokens, exchange.tokenizer)
            finish_reason = item.finish_reason if isinstance(item, Reply) else None
            return _delta(index, delta, entries, finish_reason)

        # Log-probs not beside the role: the SDK's accumulator would count them twice.
        roles = [_delta(i, {"role": "assistant", "content": ""}) for i in range(exchange.parsed.n)]
        return completion_frames(exchange, head, choice, self.error, roles)

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(e)


def parse(body: Mapping[str, Any], chat_template: str = "") -> tuple[ChatRequest, Options]:
    """A request's body.

    Raises:
        RequestError: names the field, its value and the remedy.
    """
    refuse_unsupported(body, _KNOWN | _HINTS, _NEUTRAL)
    ignored = [name for name in sorted(_HINTS) if body.get(name) is not None]
    want_logprobs = bool(field(body, "logprobs", bool, "true or false"))
    top_logprobs = number(body, "top_logprobs", 0, MAX_TOP_LOGPROBS, integral=True)
    if top_logprobs and not want_logprobs:
        raise RequestError(
            f"top_logprobs is {top_logprobs}, but logprobs is not true; send both", "top_logprobs"
        )
    tools, forced_tool = _tools(body)
    constraint = _constraint(body)
    may_call = bool(tools) and body.get("tool_choice") != "none"
    if constraint is not None and may_call:
        # Constrained from its first token on, the reply could not call a tool.
        ignored.append("response_format (beside tools)")
        constraint = None
    parallel = field(body, "parallel_tool_calls", bool, "true or false")
    limit = number(body, "max_completion_tokens", 1, 2**31 - 1, integral=True)
    request = ChatRequest(
        messages=_messages(body),
        tools=tools,
        template_args={**_effort(body, chat_template, ignored), **_template_args(body)},
        max_tokens=limit or number(body, "max_tokens", 1, 2**31 - 1, integral=True),
        n_logprobs=(top_logprobs or 0) if want_logprobs else None,
        constraint=constraint,
        forced_tool=forced_tool,
        parallel_tool_calls=parallel is not False,
        parse_tools=may_call,
        **sampling_fields(body),
    )
    return request, options(body, want_logprobs, ignored)


def sampling_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `ChatRequest` that are fields of all of OpenAI's completions."""
    return {
        "temperature": number(body, "temperature", 0, 2),
        "top_p": top_p(body),
        "top_k": number(body, "top_k", -1, 2**31 - 1, integral=True),
        "min_p": number(body, "min_p", 0, 1),
        "stop": _stop(body),
        "seed": number(body, "seed", -(2**63), 2**63 - 1, integral=True),
        "stream": bool(field(body, "stream", bool, "true or false")),
    }


def options(body: Mapping[str, Any], want_logprobs: bool, ignored: Iterable[str] = ()) -> Options:
    """
    Raises:
        RequestError: n or stream_options is malformed.
    """
    stream_options = field(body, "stream_options", dict, "an object") or {}
    for name in stream_options:
        if name not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"stream_options.{name} is not supported", f"stream_options.{name}")
    return Options(
        n=number(body, "n", 1, MAX_SAMPLES, integral=True) or 1,
        stream=bool(body.get("stream")),
        include_usage=bool(field(stream_options, "include_usage", bool, "true or false")),
        logprobs=want_logprobs,
        ignored=tuple(ignored),
    )


async def completion_frames(
    exchange: Exchange,
    head: Mapping[str, Any],
    choice: Callable[[Event], dict[str, Any]],
    error: Callable[[GatewayError], dict[str, Any]],
    first: Iterable[dict[str, Any]] = (),
) -> AsyncIterator[bytes]:
    """`head` around each choice of `first` and of every event, then the usage if it was asked for,
    and `[DONE]`."""
    options: Options = exchange.parsed.options
    no_usage = {"usage": None} if options.include_usage else {}
    replies: dict[int, Reply] = {}
    for opening in first:
        yield sse({**head, "choices": [opening], **no_usage})
    try:
        async for event in exchange.events():
            if event is None:
                yield KEEP_ALIVE
                continue
            if isinstance(event.item, Reply):
                replies[event.sample] = event.item
            yield sse({**head, "choices": [choice(event)], **no_usage})
    except GatewayError as e:
        yield sse(error(e))
        return
    if options.include_usage:
        yield sse({**head, "choices": [], "usage": usage([*replies.values()])})
    yield b"data: [DONE]\n\n"
    exchange.delivered()


class NewTokens:
    """The sampled tokens that an event tells, for each sample."""

    def __init__(self, exchange: Exchange) -> None:
        self._calls = exchange.calls
        self._shown = [0] * len(self._calls)

    def of(self, event: Event) -> list[SampledToken]:
        shown = self._shown[event.sample]
        self._shown[event.sample] = max(shown, event.n_told)
        return self._calls[event.sample].tokens[shown : event.n_told]


def _choice(index: int, reply: Reply, entries: dict[str, Any] | None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text.content,
        "refusal": None,
    }
    if reply.text.reasoning:
        message["reasoning_content"] = reply.text.reasoning
    if reply.text.tool_calls:
        message["tool_calls"] = [c.entry() for c in reply.text.tool_calls]
        if not reply.text.content.strip():
            message["content"] = None
    return {
        "index": index,
        "message": message,
        "logprobs": entries,
        "finish_reason": reply.finish_reason,
    }


def _delta(
    index: int,
    delta: dict[str, Any],
    entries: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": entries, "finish_reason": finish_reason}


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """The prompt counts once, however many samples it has."""
    n_prompt = max((reply.n_prompt for reply in replies), default=0)
    n_response = sum(reply.n_response for reply in replies)
    cached = max((reply.generation.cached_tokens for reply in replies), default=0)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def logprobs(tokens: Iterable[SampledToken], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Sampled tokens with their log-probs, the turn close included."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(log_prob, LEAST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    entries = [
        {
            **entry(token.token_id, token.log_prob),
            "top_logprobs": [entry(*alternative) for alternative in token.alternatives],
        }
        for token in tokens
    ]
    return {"content": entries, "refusal": None}


def refuse_unsupported(
    body: Mapping[str, Any], known: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """
    Raises:
        RequestError: a field is neither known, nor ignored, nor has a value that asks for nothing.
    """
    for name, value in body.items():
        if name in known or name in IGNORED or value is None:
            continue
        remedy = _REMEDIES.get(name)
        if name not in neutral:
            raise RequestError(
                f"{name} is not supported by this gateway; {remedy or 'leave it out'}", name
            )
        if value not in neutral[name]:
            harmless = " or ".join(repr(v) for v in neutral[name])
            raise RequestError(
                f"{name} is {value!r:.80}, which this gateway does not support; "
                f"{remedy or f'leave it out or send {harmless}'}",
                name,
            )


def _constraint(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """What `response_format` asks of the engine."""
    wanted = field(body, "response_format", dict, "an object")
    kind = wanted.get("type") if wanted is not None else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_schema", '{"type": "object"}'
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {kind!r:.80}; send 'text', 'json_object' or 'json_schema'",
            "response_format",
        )
    schema = field(wanted, "json_schema", dict, "an object") or {}
    if not isinstance(schema.get("schema"), dict):
        raise RequestError(
            f"response_format.json_schema.schema is {schema.get('schema')!r:.80}; send a schema",
            "response_format.json_schema.schema",
        )
    return "json_schema", json.dumps(schema["schema"])


def _effort(body: Mapping[str, Any], chat_template: str, ignored: list[str]) -> dict[str, Any]:
    """What `reasoning_effort` says to the chat template, if that listens."""
    effort = field(body, "reasoning_effort", str, "a string")
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort!r:.80}; send one of {', '.join(_EFFORTS)}",
            "reasoning_effort",
        )
    if "reasoning_effort" in chat_template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in chat_template and effort in _NO_THINKING:
        return {"enable_thinking": False}
    ignored.append(f"reasoning_effort={effort}")
    return {}


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = field(body, "stop", (str, list), "a string or a list of strings") or []
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(
            f"stop is {stop!r:.80}; send up to {MAX_STOPS} non-empty strings", "stop"
        )
    return tuple(stops)


def _template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = field(body, "chat_template_kwargs", dict, "an object") or {}
    for name in args:
        if name in _RESERVED_TEMPLATE_ARGS:
            raise RequestError(
                f"chat_template_kwargs.{name} is set by the gateway; leave it out",
                f"chat_template_kwargs.{name}",
            )
    return args


def _tools(body: Mapping[str, Any]) -> tuple[list[Tool] | None, str | None]:
    """The tools shown to the model, and which one it has to call ("": any; None: it need not)."""
    tools: list[Any] = field(body, "tools", list, "a list") or []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(f"{where}.type is {kind!r:.80}; only 'function' is supported", where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.function needs a name", f"{where}.function")
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        # With "none", too, they stay in the prompt: so it goes on from the turns before.
        return tools or None, None
    if choice == "required":
        forced: str | None = ""
    elif isinstance(choice, dict) and choice.get("type") == "function":
        forced = _chosen(choice, tools, "tool_choice")
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, forced = _allowed(choice, tools)
    else:
        raise RequestError(
            f"tool_choice is {choice!r:.80}; send 'auto', 'none', 'required', a function or "
            "allowed_tools",
            "tool_choice",
        )
    if not tools:
        raise RequestError(
            f"tool_choice is {choice!r:.80}, but there are no tools; send some", "tool_choice"
        )
    return tools, forced


def _allowed(choice: Mapping[str, Any], tools: list[Tool]) -> tuple[list[Tool], str | None]:
    """Only the allowed tools are shown: nothing else would keep the model from the others."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(listed, list) or not listed:
        raise RequestError(f"{where} is {allowed!r:.80}; send mode and tools", where)
    names = [_chosen(tool, tools, f"{where}.tools[{i}]") for i, tool in enumerate(listed)]
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise RequestError(f"{where}.mode is {mode!r:.80}; send 'auto' or 'required'", where)
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    only = names[0] if len(shown) == 1 else ""
    return shown, only if mode == "required" else None


def _chosen(choice: Any, tools: Sequence[Tool], where: str) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or all(t["function"]["name"] != name for t in tools):
        raise RequestError(f"{where}.function.name is {name!r:.80}; name one of the tools", where)
    return name


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = field(body, "messages", list, "a list of messages")
    if not messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {message!r:.80}; send an object", where)
    role = message.get("role")
    content = _content(message.get("content"), f"{where}.content", role == "assistant")
    if role in ("system", "developer", "user"):
        if content is None:
            raise RequestError(f"{where}.content is null; send text", f"{where}.content")
        neutral: Message = {"role": "user" if role == "user" else "system", "content": content}
        if isinstance(name := message.get("name"), str):
            neutral["name"] = name
        return neutral
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise RequestError(
                f"{where}.tool_call_id is {call_id!r:.80}; send the id of the call it answers",
                f"{where}.tool_call_id",
            )
        return {"role": "tool", "content": content or "", "tool_call_id": call_id}
    if role == "assistant":
        return _assistant(message, content, where)
    remedy = "send system, developer, user, assistant or tool"
    if role == "function":
        remedy = "it is deprecated; use role tool"
    raise RequestError(f"{where}.role is {role!r:.80}; {remedy}", f"{where}.role")


def _assistant(message: Mapping[str, Any], content: str | None, where: str) -> Message:
    if message.get("function_call") is not None:
        raise RequestError(
            f"{where}.function_call is deprecated and not supported; use tool_calls",
            f"{where}.function_call",
        )
    refusal = message.get("refusal")
    if not content and isinstance(refusal, str):
        content = refusal
    neutral: Message = {"role": "assistant", "content": content or ""}
    for name in _REASONING_FIELDS:
        if isinstance(reasoning := message.get(name), str) and reasoning:
            neutral["reasoning_content"] = reasoning
            break
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls is no list", f"{where}.tool_calls")
        neutral["tool_calls"] = [
            _tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)
        ]
    return neutral


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function needs a name", f"{where}.function")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise RequestError(
            f"{where}.function.arguments is {arguments!r:.80}; send JSON text or an object",
            f"{where}.function.arguments",
        )
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _content(content: Any, where: str, is_assistant: bool) -> str | None:
    """Text of a content field; several text parts become lines."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} is {content!r:.80}; send text or a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if is_assistant and kind in _THOUGHT_PARTS:
            continue
        text = part.get("refusal" if is_assistant and kind == "refusal" else "text") if kind else ""
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise RequestError(
                f"{where}[{i}].type is {kind!r:.80}; this gateway serves a text model, send text "
                "parts",
                f"{where}[{i}]",
            )
        texts.append(text)
    return "\n".join(texts)
