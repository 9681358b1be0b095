"""OpenAI Responses: request → `ChatRequest`, `Reply` → JSON or server-sent events.

    body ──► Toolbox, Conversation (`response_items.py`) ──► ChatRequest
    deltas ──► Answer (`response_answer.py`) ──► server-sent events
                  └──► the whole Response, remembered for `previous_response_id`

Owns the wire format, its validation and its error wording. What the model cannot have and agents
always send (hosted tools, `truncation: auto`) is left aside and told in `x-stepwell-ignored`; any
other field that cannot be honoured is refused by name. Does not own: what items mean, calls,
prompts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from typing import Any

import orjson
from starlette.datastructures import Headers

from stepwell.gateway.call import Reply
from stepwell.gateway.dialects.base import KEEP_ALIVE, Exchange, Parsed, sse
from stepwell.gateway.dialects.response_answer import Answer, Event, Options
from stepwell.gateway.dialects.response_items import (
    Conversation,
    Item,
    ResponseStore,
    StoredResponse,
    Toolbox,
    additional_tools,
    listed,
)
from stepwell.gateway.errors import (
    ContextLengthError,
    GatewayError,
    PreviousResponseError,
    RequestError,
    UnknownItemError,
)
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.web import error_body, field, number, top_p

_ECHOED = ("prompt_cache_key", "safety_identifier", "user")
_IGNORED = frozenset(
    {
        "client_metadata",
        "max_tool_calls",  # of hosted tools, of which there are none
        "model",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
    }
)
_KNOWN = frozenset(
    {
        *_ECHOED,
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "metadata",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
    }
)
_REMEDIES: Mapping[str, str] = {
    "background": "send false, and stream for long answers",
    "conversation": "send the whole input, or previous_response_id",
    "prompt": "send instructions and input",
}
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        _SEALED,
        _LOGPROBS,
        # Of items that this gateway never makes.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NO_THINKING = ("none", "minimal")
_SUMMARIES = ("auto", "concise", "detailed")
_PAGE_SIZES = frozenset(map(str, range(1, 101)))
MAX_TOP_LOGPROBS = 20
STORED_CHARS = 2**28
"""Default of `gateway.stored_response_chars`."""


class OpenAIResponses:
    """`POST /v1/responses`. Remembers its answers."""

    name = "openai_responses"

    def __init__(self, stored_chars: int = STORED_CHARS, chat_template: str = "") -> None:
        """
        Args:
            stored_chars: text of all remembered answers together.
            chat_template: looked through for the switches that `reasoning.effort` can turn.
        """
        self._store = ResponseStore(stored_chars)
        self._chat_template = chat_template

    def parse(self, body: dict[str, Any], headers: Headers) -> Parsed:
        """See `Dialect.parse`.

        Raises:
            PreviousResponseError, UnknownItemError: what is referred to is not stored.
        """
        _refuse_unsupported(body)
        ignored = _left_aside(body)
        previous = self._previous(body)
        items = _input(body, optional=previous is not None)
        toolbox = Toolbox()
        toolbox.add(field(body, "tools", list, "a list") or [], "tools")
        for where, tools in additional_tools(items):
            toolbox.add(tools, where)
        reads: set[str] = set()

        def find(item_id: str) -> Item | None:
            item, uid = self._store.item(item_id) or (None, None)
            if uid is not None:
                reads.add(uid)
            return item

        conversation = Conversation(
            previous.messages if previous is not None else (), toolbox, find
        )
        for i, item in enumerate(items):
            conversation.add(item, f"input[{i}]")
        messages = conversation.messages()
        instructions = field(body, "instructions", str, "text")
        if instructions:
            begin: list[Message] = [{"role": "system", "content": instructions}]
        else:
            begin = []
        if not messages:
            raise RequestError("input is empty; send text or a list of items", "input")
        shown, forced_tool = _tool_choice(body, toolbox)
        include = _include(body)
        n_logprobs = number(body, "top_logprobs", 0, MAX_TOP_LOGPROBS, integral=True)
        if n_logprobs is None and _LOGPROBS in include:
            n_logprobs = 0
        elif not n_logprobs and _LOGPROBS not in include:
            n_logprobs = None
        constraint, text = _text_format(body)
        may_call = bool(shown) and body.get("tool_choice") != "none"
        if constraint is not None and may_call:
            # Constrained from its first token on, the reply could not call a tool.
            ignored.append(f"text.format={text['format']['type']} (beside tools)")
            constraint = None
        template_args, reasoning = self._reasoning(body, ignored)
        call = ChatRequest(
            messages=[*begin, *messages],
            tools=shown or None,
            template_args=template_args,
            max_tokens=number(body, "max_output_tokens", 1, 2**31 - 1, integral=True),
            temperature=number(body, "temperature", 0, 2),
            top_p=top_p(body),
            n_logprobs=n_logprobs,
            constraint=constraint,
            constraint_field="text.format",
            forced_tool=forced_tool,
            parallel_tool_calls=_parallel(body),
            stream=bool(field(body, "stream", bool, "true or false")),
            parse_tools=may_call,
        )
        store = field(body, "store", bool, "true or false") is not False
        echo = {
            "instructions": instructions,
            "max_output_tokens": call.max_tokens,
            "metadata": _metadata(body),
            "parallel_tool_calls": call.parallel_tool_calls,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": reasoning,
            "store": store,
            "temperature": call.temperature,
            "text": text,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": toolbox.echo,
            "top_logprobs": n_logprobs or 0,
            "top_p": call.top_p,
            **{name: field(body, name, str, "text") for name in _ECHOED},
        }
        options = Options(
            echo,
            toolbox,
            tuple(items),
            messages,
            store,
            seals_reasoning=_SEALED in include,
            summarises=reasoning["summary"] is not None,
            logprobs=n_logprobs is not None,
        )
        return Parsed(
            call,
            options,
            trajectory_uid=previous.trajectory_uid if previous is not None else None,
            reads=frozenset(reads),
            ignored=(*toolbox.hosted, *toolbox.ignored, *conversation.ignored, *ignored),
            builtin_tools=tuple(toolbox.hosted),
        )

    def answer(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        """A `Response`."""
        answer = Answer(exchange)
        call = exchange.calls[0]
        for i, delta in enumerate(call.deltas, 1):
            answer.feed(delta, call.n_told(i))
        return self._finished(exchange, answer, replies[0])[1]

    async def frames(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """`ResponseStreamEvent`s, from `response.created` to `response.completed`,
        `response.incomplete`, or `error` and `response.failed`."""
        answer = Answer(exchange)
        numbers = count()

        def frame(event: Event) -> bytes:
            return sse({**event, "sequence_number": next(numbers)}, event["type"])

        for kind in ("response.created", "response.in_progress"):
            yield frame({"type": kind, "response": answer.response("in_progress")})
        try:
            async for step in exchange.events():
                if step is None:
                    yield KEEP_ALIVE
                elif isinstance(step.item, Reply):
                    events, response = self._finished(exchange, answer, step.item)
                    for event in events:
                        yield frame(event)
                    yield frame({"type": f"response.{response['status']}", "response": response})
                    exchange.delivered()
                else:
                    for event in answer.feed(step.item, step.n_told):
                        yield frame(event)
        except GatewayError as e:
            # OpenAI sends both: its SDK raises the first, Codex reads the second.
            error = self.error(e)["error"]
            flat = {name: error[name] for name in ("code", "message", "param")}
            yield frame({"type": "error", **flat, "error": error})
            failure = {"code": _failure_code(e), "message": str(e)}
            response = answer.response("failed", error=failure)
            yield frame({"type": "response.failed", "response": response})

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object; the conversation is called `input` here."""
        body = error_body(e)
        if e.param == "messages":
            body["error"]["param"] = "input"
        return body

    def stored(self, response_id: str, trajectory_uid: str | None = None) -> StoredResponse:
        """A remembered answer.

        Args:
            trajectory_uid: the one it must belong to.

        Raises:
            UnknownItemError
        """
        stored = self._store.get(response_id)
        if stored is None or trajectory_uid not in (None, stored.trajectory_uid):
            raise UnknownItemError(
                f"Response with id {response_id!r:.80} not found; it was answered with "
                "`store: false`, deleted, or is too old (gateway.stored_response_chars)",
                None,
            )
        return stored

    def input_items(self, stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of its input items, the latest first.

        Raises:
            RequestError: limit, order or after is malformed.
        """
        items = listed(stored)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order is {order!r:.80}; send 'asc' or 'desc'", "order")
        if order == "desc":
            items.reverse()
        limit = query.get("limit", "20")
        if limit not in _PAGE_SIZES:
            raise RequestError(f"limit is {limit!r:.80}; send an integer in [1, 100]", "limit")
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError(f"after is {after!r:.80}; send the id of an item", "after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }

    def delete(self, stored: StoredResponse) -> dict[str, Any]:
        """Forget an answer."""
        response_id = stored.response["id"]
        self._store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def forget(self, trajectory_uid: str) -> None:
        """Forget the answers of a trajectory."""
        self._store.forget(trajectory_uid)

    def _finished(
        self, exchange: Exchange, answer: Answer, reply: Reply
    ) -> tuple[list[Event], dict[str, Any]]:
        """The last events and the whole response, which is remembered from now on."""
        events = list(answer.finish(reply))
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        response = answer.response(status, reply)
        options: Options = exchange.parsed.options
        if options.store and exchange.calls[0].request.is_kept:
            messages = (*options.conversation, reply.text.message())
            uid = exchange.trajectory.uid
            self._store.put(StoredResponse(response, options.input, messages, uid))
        return events, response

    def _previous(self, body: Mapping[str, Any]) -> StoredResponse | None:
        previous_id = field(body, "previous_response_id", str, "the id of a response")
        if previous_id is None:
            return None
        previous = self._store.get(previous_id)
        if previous is None:
            raise PreviousResponseError(
                f"Previous response with id {previous_id!r:.80} not found; send the whole input "
                "instead",
                "previous_response_id",
            )
        return previous

    def _reasoning(
        self, body: Mapping[str, Any], ignored: list[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments for the chat template, and the echo."""
        reasoning = field(body, "reasoning", dict, "an object") or {}
        for name in reasoning:
            if name not in ("effort", "summary", "generate_summary", "context", "mode"):
                raise RequestError(f"reasoning.{name} is not supported", f"reasoning.{name}")
        effort = reasoning.get("effort")
        summary = reasoning.get("summary") or reasoning.get("generate_summary")
        for name, value, known in (
            ("effort", effort, _EFFORTS),
            ("summary", summary, _SUMMARIES),
        ):
            if value is not None and value not in known:
                raise RequestError(
                    f"reasoning.{name} is {value!r:.80}; send one of {', '.join(known)}",
                    f"reasoning.{name}",
                )
        for name, neutral in (("context", "auto"), ("mode", "standard")):
            if reasoning.get(name) not in (None, neutral):
                ignored.append(f"reasoning.{name}")
        args: dict[str, Any] = {}
        if effort is not None and "reasoning_effort" in self._chat_template:
            args["reasoning_effort"] = effort
        elif effort in _NO_THINKING and "enable_thinking" in self._chat_template:
            args["enable_thinking"] = False
        elif effort in _NO_THINKING:
            ignored.append(f"reasoning.effort={effort}")
        return args, {"effort": effort, "summary": summary}


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _KNOWN or name in _IGNORED or value is None:
            continue
        if name == "background" and value is False:
            continue
        if name in ("context_management", "truncation"):
            continue
        remedy = _REMEDIES.get(name, "leave it out")
        raise RequestError(f"{name} is not supported by this gateway; {remedy}", name)
    stream_options = field(body, "stream_options", dict, "an object") or {}
    for name in stream_options:
        if name != "include_obfuscation":
            raise RequestError(f"stream_options.{name} is not supported", f"stream_options.{name}")


def _left_aside(body: Mapping[str, Any]) -> list[str]:
    """Fields that agents send for long conversations. Nothing is ever dropped here: what does not
    fit fails with `context_length_exceeded`."""
    ignored = []
    if body.get("context_management"):
        ignored.append("context_management")
    truncation = body.get("truncation")
    if truncation == "auto":
        ignored.append("truncation=auto")
    elif truncation not in (None, "disabled"):
        raise RequestError(f"truncation is {truncation!r:.80}; send 'disabled'", "truncation")
    return ignored


def _input(body: Mapping[str, Any], *, optional: bool) -> list[Item]:
    given = field(body, "input", (str, list), "text or a list of items")
    if given is None:
        if not optional:
            raise RequestError("input is missing; send text or a list of items", "input")
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given)


def _include(body: Mapping[str, Any]) -> frozenset[str]:
    include = field(body, "include", list, "a list") or []
    for i, name in enumerate(include):
        if not isinstance(name, str) or name not in _INCLUDABLE:
            raise RequestError(
                f"include[{i}] is {name!r:.80}; this gateway supports {_SEALED} and {_LOGPROBS}",
                "include",
            )
    return frozenset(include)


def _tool_choice(body: Mapping[str, Any], toolbox: Toolbox) -> tuple[list[Tool], str | None]:
    """The tools shown to the model, and the one that it has to call ("" is any)."""
    choice = body.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        # With "none", too, they stay in the prompt: so it goes on from the turns before.
        return toolbox.shown, None
    if choice == "required":
        return _required(toolbox.shown)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return toolbox.shown, _chosen(choice, toolbox, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(choice, toolbox)
    raise RequestError(
        f"tool_choice is {choice!r:.80}; this gateway supports 'auto', 'none', 'required', a "
        "function or custom tool, and allowed_tools",
        "tool_choice",
    )


def _required(shown: list[Tool]) -> tuple[list[Tool], str]:
    if not shown:
        raise RequestError(
            "tool_choice asks for a call, but there is no tool that this gateway supports; send "
            "function tools, or 'auto'",
            "tool_choice",
        )
    return shown, ""


def _chosen(choice: Mapping[str, Any], toolbox: Toolbox, where: str) -> str:
    name, namespace = choice.get("name"), choice.get("namespace")
    flat = None
    if isinstance(name, str) and isinstance(namespace, str | None):
        flat = toolbox.flat_name(name, namespace)
    if flat is None or flat not in toolbox.names:
        raise RequestError(
            f"{where}.name is {name!r:.80}; send the name of one of the tools", f"{where}.name"
        )
    return flat


def _allowed(choice: Mapping[str, Any], toolbox: Toolbox) -> tuple[list[Tool], str | None]:
    """Only the allowed tools are shown: nothing else would keep the model from the others."""
    mode, tools = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(
            f"tool_choice.mode is {mode!r:.80}; send 'auto' or 'required'", "tool_choice.mode"
        )
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise RequestError(
            f"tool_choice.tools is {tools!r:.80}; send a list of tools", "tool_choice.tools"
        )
    allowed = {
        _chosen(tool, toolbox, f"tool_choice.tools[{i}]")
        for i, tool in enumerate(tools)
        if tool.get("type") in ("function", "custom")
    }
    shown = [tool for tool in toolbox.shown if tool["function"]["name"] in allowed]
    return _required(shown) if mode == "required" else (shown, None)


def _parallel(body: Mapping[str, Any]) -> bool:
    return field(body, "parallel_tool_calls", bool, "true or false") is not False


def _metadata(body: Mapping[str, Any]) -> dict[str, str]:
    metadata: dict[str, Any] = field(body, "metadata", dict, "an object of texts") or {}
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise RequestError(
                f"metadata.{name} is {value!r:.80}; send text", f"metadata.{name:.80}"
            )
    return metadata


def _text_format(body: Mapping[str, Any]) -> tuple[tuple[str, str] | None, dict[str, Any]]:
    """What the engine is to constrain the reply to, and the echo."""
    text = field(body, "text", dict, "an object") or {}
    for name in text:
        if name not in ("format", "verbosity"):
            raise RequestError(f"text.{name} is not supported", f"text.{name:.80}")
    echo = {"verbosity": text.get("verbosity"), "format": text.get("format") or {"type": "text"}}
    form = echo["format"]
    if not isinstance(form, dict):
        raise RequestError(f"text.format is {form!r:.80}; send an object", "text.format")
    kind = form.get("type")
    if kind == "text":
        return None, echo
    if kind == "json_object":
        return ("json_schema", '{"type": "object"}'), echo
    if kind != "json_schema":
        raise RequestError(
            f"text.format.type is {kind!r:.80}; send 'text', 'json_object' or 'json_schema'",
            "text.format.type",
        )
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(
            f"text.format.schema is {schema!r:.80}; send a JSON schema", "text.format.schema"
        )
    return ("json_schema", orjson.dumps(schema).decode()), echo


def _failure_code(e: GatewayError) -> str:
    """One of the codes that `Response.error` may have, and the one that agents look for."""
    if isinstance(e, ContextLengthError):
        return "context_length_exceeded"
    if isinstance(e, RequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if e.status == 429 else "server_error"
