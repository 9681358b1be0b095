"""OpenAI chat completions: request → `ChatRequest`, `Reply` → JSON or server-sent events.

Owns the wire format, its validation and its error wording. A field the gateway cannot honour is
refused by name; only fields that say nothing about the completion are ignored. Does not own: calls,
prompts, tool-call parsing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from gateway.calls import ChatRequest, Reply
from gateway.dialects.base import KEEP_ALIVE, Parsed, sse
from gateway.errors import GatewayError, RequestError
from gateway.messages import Message, Tool
from gateway.parsing import ReasoningDelta, ToolCall
from gateway.tokenization import ChatTokenizer
from gateway.web import error_body, field, number

if TYPE_CHECKING:
    from gateway.exchange import Exchange

_IGNORED = frozenset(
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
_KNOWN = frozenset(
    {
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "functions": ([],),
}
"""Not supported, but these values ask for nothing. (Penalties and biases would make the log-probs
those of another policy.)"""
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
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes the answer and not the call."""

    stream: bool
    include_usage: bool
    logprobs: bool


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    name = "openai_chat"

    def parse(self, body: dict[str, Any], headers: Headers) -> Parsed:
        """See `Dialect.parse`."""
        request, options = parse(body)
        return Parsed(request, options)

    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """A `ChatCompletion`."""
        options: Options = exchange.parsed.options
        return {
            "id": f"chatcmpl-{exchange.uid}",
            "object": "chat.completion",
            "created": exchange.created,
            "model": exchange.model,
            "choices": [
                _choice(i, reply, options, exchange.tokenizer) for i, reply in enumerate(replies)
            ],
            "usage": _usage(replies),
        }

    async def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """`ChatCompletionChunk`s and `[DONE]`."""
        options: Options = exchange.parsed.options
        head = {
            "id": f"chatcmpl-{exchange.uid}",
            "object": "chat.completion.chunk",
            "created": exchange.created,
            "model": exchange.model,
        }
        usage = {"usage": None} if options.include_usage else {}

        def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": None,
                "finish_reason": finish_reason,
            }
            return sse({**head, "choices": [choice], **usage})

        replies: dict[int, Reply] = {}
        n_calls = [0] * exchange.parsed.n
        for i in range(exchange.parsed.n):
            yield chunk(i, {"role": "assistant", "content": ""})
        try:
            async for event in exchange.events():
                if event is None:
                    yield KEEP_ALIVE
                    continue
                i, item = event
                if isinstance(item, Reply):
                    replies[i] = item
                    yield chunk(i, {}, item.finish_reason)
                elif isinstance(item, ToolCall):
                    yield chunk(i, {"tool_calls": [{"index": n_calls[i], **_call(item)}]})
                    n_calls[i] += 1
                elif isinstance(item, ReasoningDelta):
                    yield chunk(i, {"reasoning_content": item.text})
                else:
                    yield chunk(i, {"content": item.text})
        except GatewayError as e:
            yield sse(self.error(e))
            return
        if options.include_usage:
            yield sse({**head, "choices": [], "usage": _usage([*replies.values()])})
        yield b"data: [DONE]\n\n"
        exchange.delivered()

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(e)


def parse(body: Mapping[str, Any]) -> tuple[ChatRequest, Options]:
    """A request's body.

    Raises:
        RequestError: names the field, its value and the remedy.
    """
    _refuse_unsupported(body)
    stream = bool(field(body, "stream", bool, "true or false"))
    stream_options = field(body, "stream_options", dict, "an object") or {}
    for name in stream_options:
        if name not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"stream_options.{name} is not supported", f"stream_options.{name}")
    logprobs = bool(field(body, "logprobs", bool, "true or false"))
    if logprobs and stream:
        raise RequestError("logprobs is not supported with stream; send one of them", "logprobs")
    tools, parse_tools = _tools(body)
    limit = number(body, "max_completion_tokens", 1, 2**31 - 1, integral=True)
    request = ChatRequest(
        messages=_messages(body),
        tools=tools,
        template_args=_template_args(body),
        max_tokens=limit or number(body, "max_tokens", 1, 2**31 - 1, integral=True),
        temperature=number(body, "temperature", 0, 2),
        top_p=_top_p(body),
        top_k=number(body, "top_k", -1, 2**31 - 1, integral=True),
        stop=_stop(body),
        seed=number(body, "seed", -(2**63), 2**63 - 1, integral=True),
        stream=stream,
        parse_tools=parse_tools,
    )
    return request, Options(
        stream, bool(field(stream_options, "include_usage", bool, "true or false")), logprobs
    )


def _choice(index: int, reply: Reply, options: Options, tokenizer: ChatTokenizer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.text.content,
        "refusal": None,
    }
    if reply.text.reasoning:
        message["reasoning_content"] = reply.text.reasoning
    if reply.text.tool_calls:
        message["tool_calls"] = [_call(c) for c in reply.text.tool_calls]
        if not reply.text.content.strip():
            message["content"] = None
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(reply, tokenizer) if options.logprobs else None,
        "finish_reason": reply.finish_reason,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
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


def _logprobs(reply: Reply, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Every sampled token with its log-prob, the turn close included."""
    entries = []
    generation = reply.generation
    for token_id, log_prob in zip(
        generation.response_ids.tolist(), generation.log_probs.tolist(), strict=True
    ):
        token = tokenizer.decode([token_id])
        entries.append(
            {
                "token": token,
                "logprob": log_prob,
                "bytes": list(token.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": entries, "refusal": None}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _KNOWN or name in _IGNORED or value is None:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"{name} is not supported by this gateway; leave it out", name)
        if value not in _NEUTRAL[name]:
            neutral = " or ".join(repr(v) for v in _NEUTRAL[name])
            raise RequestError(
                f"{name} is {value!r:.80}, which this gateway does not support; "
                f"leave it out or send {neutral}",
                name,
            )


def _top_p(body: Mapping[str, Any]) -> float | None:
    top_p: float | None = number(body, "top_p", 0, 1)
    if top_p == 0:
        raise RequestError("top_p is 0; send a number in (0, 1]", "top_p")
    return top_p


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


def _tools(body: Mapping[str, Any]) -> tuple[list[Tool] | None, bool]:
    """The tools shown to the model, and whether its calls are read."""
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
    if choice not in (None, "auto", "none"):
        raise RequestError(
            f"tool_choice is {choice!r:.80}; this gateway supports 'auto' and 'none'",
            "tool_choice",
        )
    if choice == "none" or not tools:
        return None, False
    return tools, True


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = field(body, "messages", list, "a list of messages")
    if not messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is {message!r:.80}; send an object", where)
    role = message.get("role")
    content = _content(message.get("content"), f"{where}.content")
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
    raise RequestError(
        f"{where}.role is {role!r:.80}; send system, developer, user, assistant or tool",
        f"{where}.role",
    )


def _assistant(message: Mapping[str, Any], content: str | None, where: str) -> Message:
    if message.get("function_call") is not None:
        raise RequestError(
            f"{where}.function_call is deprecated and not supported; use tool_calls",
            f"{where}.function_call",
        )
    neutral: Message = {"role": "assistant", "content": content or ""}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        neutral["reasoning_content"] = reasoning
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


def _content(content: Any, where: str) -> str | None:
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
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}[{i}].type is {kind!r:.80}; this gateway supports text parts",
                f"{where}[{i}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)
