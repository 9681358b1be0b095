"""OpenAI chat completions: request → `ChatRequest`, `Reply` → JSON or server-sent events.

Owns the wire format, its validation and its error wording, and what completions share with it. A
field the gateway cannot honour is refused by name. Ignored are fields that say nothing about the
completion, and hints to OpenAI's own models, of which `x-stepwell-ignored` tells. Does not own:
calls, prompts, tool-call parsing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, Field

from stepwell.gateway.access import Principal
from stepwell.gateway.dialects.base import (
    NOTHING,
    PLACE,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
    Template,
    n_reasoning,
    sse,
)
from stepwell.gateway.dialects.params import (
    OTHER_POLICY,
    Effort,
    MaxTokens,
    NoPenalty,
    Params,
    Part,
    Seed,
    StopIds,
    Temperature,
    Texts,
    TopK,
    TopLogprobs,
    TopP,
    effort_args,
    json_constraint,
    must_call,
    need,
    verbosity_args,
    wrong,
)
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import (
    NO_TOOLS,
    Message,
    Tool,
    Tools,
    content_of,
    in_call_order,
)
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.calls import LiveCall, SampledToken

_RESERVED_TEMPLATE_ARGS = frozenset(
    (
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
    )
)
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of thinking parts in an assistant's content, as other vendors' clients send them back."""
LEAST_LOGPROB = -9999.0
"""JSON knows no infinity."""


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "stream")
_sampling_of = attrgetter(*_SAMPLING)


class StreamOptions(Params):
    include_usage: bool = False
    include_obfuscation: Any = None


class CompletionParams(Params):
    """Fields that chat completions and completions have in common."""

    ignored = frozenset(
        (
            "metadata",
            "model",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        )
    )
    remedies: ClassVar = dict.fromkeys(
        (
            "frequency_penalty",
            "ignore_eos",
            "logit_bias",
            "min_tokens",
            "presence_penalty",
            "repetition_penalty",
        ),
        OTHER_POLICY,
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    max_tokens: MaxTokens | None = None
    stop: Annotated[Texts, Field(max_length=16)] = ()
    stop_token_ids: Annotated[StopIds, Field(max_length=16)] = ()
    seed: Seed | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    """SGLang's and vLLM's: the reply matches it, where the engine has grammars."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=16)

    # Not supported, but these values ask for nothing.
    frequency_penalty: NoPenalty = 0
    ignore_eos: Literal[False] = False
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=0)
    min_tokens: Literal[0] = 0
    presence_penalty: NoPenalty = 0
    repetition_penalty: Literal[1] = 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """Fields that a `ChatRequest` has under the same names."""
        found = dict(zip(_SAMPLING, _sampling_of(self), strict=True))
        if self.regex is not None:
            found |= {"constraint": ("regex", self.regex), "constraint_field": "regex"}
        return found


class _Schema(Part):
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    def constraint(self) -> tuple[str, str] | None:
        """Constraint that this format puts on the engine; None for plain text."""
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return json_constraint(self.type, schema, "response_format.json_schema")


def _not_reserved(args: dict[str, Any]) -> dict[str, Any]:
    if taken := args.keys() & _RESERVED_TEMPLATE_ARGS:
        raise ValueError(f"{min(taken)} is set by the gateway, leave it out")
    return args


class ChatParams(CompletionParams):
    remedies: ClassVar = {
        **CompletionParams.remedies,
        "function_call": "it is deprecated, use tool_choice",
        "functions": "it is deprecated, use tools",
        "messages": "send at least one message",
        "web_search_options": "define a function tool that searches",
    }
    messages: list[Any] = Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_not_reserved)] | None = None
    continue_final_message: bool = False
    """vLLM's and SGLang's: the reply goes on from the last message, the assistant's. DeepSeek and
    Mistral mark that message `prefix: true`, Moonshot and Qwen `partial: true`."""
    add_generation_prompt: bool | None = None
    """Not asked of the model twice: true, and false with `continue_final_message`."""
    prediction: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
    function_call: Literal["none"] = "none"
    functions: list[Any] | None = Field(default=None, max_length=0)
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None


_MaxTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _PlainChat(msgspec.Struct, forbid_unknown_fields=True):
    """`ChatParams` of a body with messages of text, the commonest sampling parameters, and nothing
    else."""

    messages: Annotated[list[dict[str, str | None]], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    stream: bool | None = None


_plain_chats = msgspec.json.Decoder(_PlainChat)
_PLAIN = ChatParams(messages=[{}])
"""Options of a body that has none."""
_TEXT_ROLES = frozenset(("system", "user", "assistant"))
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")


class OpenAIChat(Dialect):
    """`POST /v1/chat/completions`."""

    name = "openai_chat"
    list_name = "messages"

    def __init__(self, chat_template: str = "") -> None:
        """`chat_template`: looked through for the switches that `reasoning_effort` can turn."""
        self._chat_template = chat_template

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        params, items = known.read(ChatParams, body, self.list_name)
        if params.top_logprobs and not params.logprobs:
            raise wrong("top_logprobs", params.top_logprobs, "send logprobs: true with it")
        ignored = [hint for hint in ("prediction", "verbosity") if body.get(hint) is not None]
        tools: Tools = known.tools or NO_TOOLS
        if params.tools:
            tools = Tools(_tool(t, f"tools[{i}]") for i, t in enumerate(params.tools))
        forced_tool = None if params.tool_choice is None else _choice(params.tool_choice, tools)
        sampling = params.sampling()
        if params.response_format and (form := params.response_format.constraint()) is not None:
            if params.regex is not None:
                raise wrong("regex", params.regex, "send it or response_format, not both")
            sampling |= {"constraint": form, "constraint_field": "response_format"}
        parse_tools = bool(tools) and params.tool_choice != "none"
        if parse_tools and sampling.pop("constraint", None) is not None:
            # Constrained from its first token on, the reply could not call a tool.
            ignored.append(f"{sampling['constraint_field']} (beside tools)")
        template_args = params.chat_template_kwargs or {}
        if params.verbosity and (told := verbosity_args(params.verbosity, self._chat_template)):
            ignored.remove("verbosity")
            template_args = told | template_args
        if (effort := params.reasoning_effort) is not None:
            told = effort_args(effort, self._chat_template, "reasoning_effort", ignored)
            template_args = told | template_args
        messages = in_call_order([_message(m, known.place(i), known) for i, m in enumerate(items)])
        prefill, field = "", _goes_on(params, items, known)
        if field is not None or params.add_generation_prompt is not None:
            prefill = _continued(messages, params, known, forced_tool, field)
        if field is not None:
            messages.pop()
        if known.cuts is not None:
            _note_cuts(messages, known)
        call = ChatRequest(
            messages=messages,
            tools=tools or None,
            template_args=template_args,
            max_tokens=params.max_completion_tokens or params.max_tokens,
            n_logprobs=params.top_logprobs or 0 if params.logprobs else None,
            forced_tool=forced_tool,
            prefill=prefill,
            parallel_tool_calls=params.parallel_tool_calls,
            parse_tools=parse_tools,
            **sampling,
        )
        return Parsed(
            call,
            params,
            n=params.n,
            ignored=tuple(ignored),
            tools=tools,
        )

    def parse_plain(self, body: bytes) -> Parsed | None:
        try:
            sent = _plain_chats.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        messages: list[Message] = sent.messages
        try:  # without a step of Python for each message, of which most have two fields
            if not _TEXT_ROLES.issuperset(map(_ROLE, messages)) or None in map(_CONTENT, messages):
                return None
        except KeyError:
            return None
        if max(map(len, messages), default=0) > 2:
            for i, message in enumerate(messages):
                if len(message) - [*message.values()].count(None) > 2:
                    return None  # null asks for nothing; all else has a meaning
                messages[i] = {"role": message["role"], "content": message["content"]}
        call = ChatRequest(
            messages,
            template_args={},
            max_tokens=sent.max_completion_tokens or sent.max_tokens,
            temperature=sent.temperature,
            top_p=sent.top_p,
            stream=sent.stream or False,
            parse_tools=False,
        )
        return Parsed(call, _PLAIN, tools=NO_TOOLS)

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `ChatCompletion`."""
        wanted, prefill = exchange.parsed.options.logprobs, exchange.parsed.call.prefill
        choices: list[dict[str, Any]] = []
        for i, reply in enumerate(replies):
            choice = {
                "index": i,
                "message": _said(reply, prefill),
                "logprobs": logprobs(reply.tokens, exchange.tokenizer) if wanted else None,
                "finish_reason": reply.finish_reason,
            }
            choices.append(choice)
        answer = head(exchange, "chatcmpl", "chat.completion")
        answer["choices"], answer["usage"] = choices, usage(exchange, replies)
        return answer

    def writer(self, exchange: Exchange) -> StreamWriter:
        """`ChatCompletionChunk`s and `[DONE]`."""
        return _ChatWriter(exchange, head(exchange, "chatcmpl", "chat.completion.chunk"), self)


# -- what completions share ------------------------------------------------------------------


def head(exchange: Exchange, prefix: str, kind: str) -> dict[str, Any]:
    """Fields that an answer and each of its chunks begin with."""
    first = exchange.calls[0].call
    return {
        "id": f"{prefix}-{first.uid}",
        "object": kind,
        "created": first.created,
        "model": exchange.model,
    }


class CompletionWriter(StreamWriter):
    """`head` around each choice, then the usage if it was asked for, and `[DONE]`."""

    def __init__(self, exchange: Exchange, head: dict[str, Any], dialect: Dialect) -> None:
        self._exchange = exchange
        self._head = head
        self._dialect = dialect
        self._include_usage = exchange.parsed.options.include_usage
        self._replies: dict[int, LiveCall] = {}
        self._templates: dict[tuple[int, type[Delta]], Template] = {}

    @abstractmethod
    def choice(
        self, sample: int, item: Delta | LiveCall, tokens: Sequence[SampledToken]
    ) -> dict[str, Any]:
        """The choice that holds what is new of a sample."""

    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        if tokens or isinstance(delta, ToolCall):
            return self.chunk([self.choice(sample, delta, tokens)])
        kind = type(delta)
        if (template := self._templates.get((sample, kind))) is None:
            template = Template(self.chunk([self.choice(sample, kind(PLACE), ())]))
            self._templates[sample, kind] = template
        return template(delta.text)

    def reply(self, sample: int, reply: LiveCall, tokens: Sequence[SampledToken]) -> bytes:
        self._replies[sample] = reply
        return self.chunk([self.choice(sample, reply, tokens)])

    def end(self) -> bytes:
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        in_order = [self._replies[i] for i in sorted(self._replies)]
        figures = usage(self._exchange, in_order)
        return sse({**self._head, "choices": [], "usage": figures}) + b"data: [DONE]\n\n"

    def failed(self, e: GatewayError) -> bytes:
        return sse(self._dialect.error(e))

    def chunk(self, choices: list[dict[str, Any]]) -> bytes:
        no_usage = {"usage": None} if self._include_usage else {}
        return sse({**self._head, "choices": choices, **no_usage})


class _ChatWriter(CompletionWriter):
    def __init__(self, exchange: Exchange, head: dict[str, Any], dialect: Dialect) -> None:
        super().__init__(exchange, head, dialect)
        self._n_calls = [0] * len(exchange.calls)
        self._prefills = [exchange.parsed.call.prefill] * len(exchange.calls)
        """Rest of the text that the client sent itself, by sample: the core's text begins with
        it, and what is answered does not."""

    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        if isinstance(delta, ContentDelta) and (prefill := self._prefills[sample]):
            n = min(len(delta.text), len(prefill))
            if not prefill.startswith(delta.text[:n]):
                n, prefill = 0, ""
            self._prefills[sample], delta = prefill[n:], ContentDelta(delta.text[n:])
            if not delta.text and not tokens:
                return b""
        return super().delta(sample, delta, tokens)

    def begin(self) -> bytes:
        # Log-probs not beside the role: the SDK's accumulator would count them twice.
        role = {"role": "assistant", "content": ""}
        return b"".join(self.chunk([_delta(i, role)]) for i in range(len(self._n_calls)))

    def choice(
        self, sample: int, item: Delta | LiveCall, tokens: Sequence[SampledToken]
    ) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if isinstance(item, ToolCall):
            delta = {"tool_calls": [{"index": self._n_calls[sample], **item.entry()}]}
            self._n_calls[sample] += 1
        elif isinstance(item, ReasoningDelta):
            delta = {"reasoning_content": item.text}
        elif isinstance(item, ContentDelta):
            delta = {"content": item.text}
        entries = logprobs(tokens, self._exchange.tokenizer) if tokens else None
        finish_reason = item.finish_reason if isinstance(item, LiveCall) else None
        return _delta(sample, delta, entries, finish_reason)


def usage(exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
    """A prompt counts once, however many samples it has."""
    if len(replies) == 1:
        (reply,) = replies
        n_prompt, n_response = reply.n_prompt, reply.n_response
        cached = reply.generation.cached_tokens
    else:
        n_prompt = n_response = cached = 0
        n = exchange.parsed.n
        for i in range(0, len(replies), n):
            its = replies[i : i + n]
            n_prompt += max([reply.n_prompt for reply in its])
            n_response += sum([reply.n_response for reply in its])
            cached += max([reply.generation.cached_tokens for reply in its])
    figures: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if thought := [reply for reply in replies if reply.text.reasoning]:
        n_thought = sum(n_reasoning(reply, exchange.tokenizer) for reply in thought)
        figures["completion_tokens_details"] = {"reasoning_tokens": n_thought}
    return figures


def token_entry(token: SampledToken, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """A sampled token with its log-prob and the alternatives."""

    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(log_prob, LEAST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    tops = [entry(*alternative) for alternative in token.alternatives]
    return {**entry(token.token_id, token.log_prob), "top_logprobs": tops}


def logprobs(tokens: Iterable[SampledToken], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Sampled tokens with their log-probs, the turn close included."""
    return {"content": [token_entry(token, tokenizer) for token in tokens], "refusal": None}


def _said(reply: LiveCall, prefill: str = "") -> dict[str, Any]:
    text = reply.text
    content = text.content.removeprefix(prefill)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if text.reasoning:
        message["reasoning_content"] = text.reasoning
    if text.tool_calls:
        message["tool_calls"] = [c.entry() for c in text.tool_calls]
        if not content.strip():
            message["content"] = None
    return message


def _delta(
    index: int,
    delta: dict[str, Any],
    entries: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": entries, "finish_reason": finish_reason}


# -- the request -----------------------------------------------------------------------------


def _tool(tool: Any, where: str) -> Tool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return {**tool}
    raise wrong(where, tool, "send a function with a name")


def _choice(choice: Any, tools: list[Tool]) -> str | None:
    """The tool that the reply has to call ("": any; None: it need not). All are shown to the model,
    with "none", too: so it goes on from the turns before."""
    match choice:
        case "auto" | "none":
            return None
        case "required":
            return must_call(tools)
        case {"type": "function", "function": {"name": str(name)}}:
            return must_call(tools, name, "tool_choice.function.name")
    raise wrong("tool_choice", choice, "send 'auto', 'none', 'required' or a function")


def _goes_on(params: ChatParams, items: Sequence[Any], known: Known) -> str | None:
    """The field that asks for a reply that goes on from the last message; None: it begins anew."""
    if params.continue_final_message:
        return "continue_final_message"
    match items[-1:]:
        case [{"role": "assistant", "prefix": True}]:
            mark = "prefix"
        case [{"role": "assistant", "partial": True}]:
            mark = "partial"
        case _:
            return None
    return f"messages[{known.place(len(items) - 1)}].{mark}"


def _continued(
    messages: Sequence[Message],
    params: ChatParams,
    known: Known,
    forced_tool: str | None,
    field: str | None,
) -> str:
    """Text of the last message that the reply goes on from; "" if it begins anew.

    Args:
        field: the one that asks for it.

    Raises:
        RequestError: the last message cannot be continued, or the fields contradict one another.
    """
    if field is None:
        if params.add_generation_prompt is False:
            remedy = "leave it out: a reply begins behind it; or send continue_final_message: true"
            raise wrong("add_generation_prompt", False, remedy)
        return ""
    if params.add_generation_prompt:
        remedy = f"send false, or leave it out: {field} is true"
        raise wrong("add_generation_prompt", True, remedy)
    last, where = messages[-1], f"messages[{known.place(len(messages) - 1)}]"
    if last["role"] != "assistant" or len(messages) == 1:
        remedy = "end messages with the assistant's, behind another one"
        raise wrong(field, True, remedy)
    if last.get("tool_calls") or last.get("reasoning_content"):
        remedy = f"{where} has tool calls or thinking, and only text can be continued"
        raise wrong(field, True, remedy)
    if forced_tool is not None:
        raise wrong(field, True, "leave out tool_choice: text goes on")
    text: str = last["content"]
    return text


def _note_cuts(messages: Sequence[Message], known: Known) -> None:
    """Each item is one message."""
    is_after_another = False
    for i, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        if is_assistant and is_after_another:
            known.cut(i, i)
        is_after_another = not is_assistant
    if is_after_another:
        known.cut(len(messages), len(messages))


def _message(message: Any, i: int, known: Known) -> Message:
    where = f"messages[{i}]"
    if not isinstance(message, dict):
        raise wrong(where, message, "send an object")
    role, content = message.get("role"), message.get("content")
    if type(content) is not str:
        content = _content(content, where, role, known)
    if role in ("system", "developer", "user"):
        if content is None:
            raise wrong(f"{where}.content", content, "send text")
        neutral: Message = {"role": "user" if role == "user" else "system", "content": content}
        if isinstance(name := message.get("name"), str):
            neutral["name"] = name
        return neutral
    if role == "tool":
        call_id = need(message, "tool_call_id", str, where, "send the id of the call it answers")
        return {"role": "tool", "content": content or "", "tool_call_id": call_id}
    if role == "assistant":
        return _assistant(message, content, where)
    remedy = "send system, developer, user, assistant or tool"
    if role == "function":
        remedy = "it is deprecated; use role tool"
    raise wrong(f"{where}.role", role, remedy)


def _assistant(message: Mapping[str, Any], content: Any, where: str) -> Message:
    if (call := message.get("function_call")) is not None:
        raise wrong(f"{where}.function_call", call, "it is deprecated; use tool_calls")
    refusal = message.get("refusal")
    if not content and isinstance(refusal, str):
        content = refusal
    neutral: Message = {"role": "assistant", "content": content or ""}
    for name in _REASONING_FIELDS:
        if isinstance(reasoning := message.get(name), str) and reasoning:
            neutral["reasoning_content"] = reasoning
            break
    if message.get("tool_calls"):
        calls = need(message, "tool_calls", list, where, "send a list")
        neutral["tool_calls"] = [
            _tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)
        ]
    return neutral


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", function, "send the call's name and arguments")
    name, arguments = need(function, "name", str, f"{where}.function"), function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise wrong(f"{where}.function.arguments", arguments, "send JSON text or an object")
    call_id = call.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def _content(content: Any, where: str, role: Any, known: Known) -> str | list[Message] | None:
    """Content of a content field; several text parts become lines."""
    if content is None:
        return content
    if not isinstance(content, list):
        raise wrong(f"{where}.content", content, "send text or a list of parts")
    parts: list[str | Message] = []
    for i, part in enumerate(content):
        match part:
            case str(text) | {"type": "text", "text": str(text)}:
                parts.append(text)
            case {"type": "refusal", "refusal": str(text)} if role == "assistant":
                parts.append(text)
            case {"type": str(kind)} if role == "assistant" and kind in _THOUGHT_PARTS:
                pass
            case {"type": "image_url", "image_url": sent} if role in ("user", "tool"):
                at, about = f"{where}.content[{i}].image_url", {}
                if isinstance(sent, dict):
                    at, about, sent = f"{at}.url", sent, sent.get("url")
                parts.append(known.picture(sent, at, image_detail=about.get("detail")))
            case _:
                remedy = "send text parts, or pictures (image_url) in user and tool messages"
                raise wrong(f"{where}.content[{i}]", part, remedy)
    return content_of(parts)
