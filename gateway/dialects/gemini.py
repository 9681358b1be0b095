"""Gemini's generateContent: request → `ChatRequest`, `Reply` → JSON, server-sent events, or a JSON
array that grows.

    contents, tools ──► messages, functions     `gemini_contents.py`
    deltas ──► parts ──► a `GenerateContentResponse`, or one for each delta

What Google's servers would do and an agent does not rely on is told in `x-stepwell-ignored`; what
the answer would have to be is refused by name where it cannot be that.

Owns the wire format, its validation and its error wording. Does not own: calls, prompts, tool-call
parsing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from stepwell.gateway.access import Principal
from stepwell.gateway.config import CallStyle
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
    signature_of,
)
from stepwell.gateway.dialects.gemini_contents import (
    Conversation,
    camel,
    json_schema,
    read_tools,
)
from stepwell.gateway.dialects.openai_chat import LEAST_LOGPROB
from stepwell.gateway.dialects.params import (
    OTHER_POLICY,
    MaxTokens,
    NoPenalty,
    Params,
    Temperature,
    Texts,
    TopLogprobs,
    TopP,
    effort_args,
    json_constraint,
    must_call,
    wrong,
)
from stepwell.gateway.errors import ContextLengthError, GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.calls import CALL_FORMS, ToolCall
from stepwell.gateway.reply.parser import Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import Tool, Tools
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.calls import LiveCall, SampledToken
from stepwell.gateway.web import JSON_HEADERS, STREAM_HEADERS

Part: TypeAlias = dict[str, Any]
Stream: TypeAlias = Literal["sse", "array"]


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""An integer that may come as 40.0, as Google's own SDK sends `topK`."""


class Fields(Params):
    """Fields of Google's API, in either form of their names."""

    model_config = ConfigDict(alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def in_camel_case(cls, sent: Any) -> Any:
        return camel(sent) if isinstance(sent, dict) else sent

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        return super().read(camel(body))


class ThinkingConfig(Fields):
    include_thoughts: bool = False
    thinking_budget: Annotated[int, Field(ge=-1, lt=2**31), Whole] | None = None
    thinking_level: (
        Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH", "XHIGH"] | None
    ) = None


class GenerationConfig(Fields):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31), Whole] | None = None
    max_output_tokens: Annotated[MaxTokens, Whole] | None = None
    stop_sequences: Annotated[Texts, Field(max_length=16)] = ()
    candidate_count: Annotated[int, Field(ge=1, le=16), Whole] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Whole] | None = None
    response_mime_type: Literal["text/plain", "application/json", "text/x.enum"] = "text/plain"
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_logprobs: bool = False
    logprobs: Annotated[TopLogprobs, Whole] | None = None
    thinking_config: ThinkingConfig = ThinkingConfig()
    response_modalities: Annotated[
        list[Literal["TEXT", "MODALITY_UNSPECIFIED"]] | None, Field(fail_fast=True)
    ] = None

    # Not supported, but 0 asks for nothing.
    frequency_penalty: NoPenalty = 0
    presence_penalty: NoPenalty = 0

    # Told: they say nothing of text.
    enable_enhanced_civic_answers: Any = None
    media_resolution: Any = None

    @property
    def schema_field(self) -> str:
        """The field that says what the reply has to be."""
        name = "responseMimeType"
        if self.response_schema is not None:
            name = "responseSchema"
        elif self.response_json_schema is not None:
            name = "responseJsonSchema"
        return f"generationConfig.{name}"

    def constraint(self) -> tuple[str, str] | None:
        """Return the engine's constraint: its kind and text.

        Raises:
            RequestError
        """
        where, schema = self.schema_field, self.response_json_schema
        if self.response_schema is not None:
            if schema is not None:
                raise RequestError(
                    f"{where} and responseJsonSchema are both there; send one", where
                )
            schema = self.response_schema
        kind = self.response_mime_type
        if kind == "text/plain":
            if schema is not None:
                raise wrong(where, schema, "send responseMimeType application/json with it")
            return None
        if schema is not None and not isinstance(schema, dict):
            raise wrong(where, schema, "send a JSON schema")
        schema = json_schema(schema)
        if kind == "application/json":
            return json_constraint(
                "json_object" if schema is None else "json_schema", schema, where
            )
        values = (schema or {}).get("enum")
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(v, str) for v in values)
        ):
            raise wrong(where, schema, "text/x.enum needs a schema with an enum of texts")
        return "regex", "|".join(map(re.escape, values))


class FunctionCallingConfig(Fields):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: Texts = ()
    stream_function_call_arguments: Any = None


class ToolConfig(Fields):
    function_calling_config: FunctionCallingConfig = FunctionCallingConfig()

    # Told: they are for tools that Google's servers run.
    retrieval_config: Any = None
    include_server_side_tool_invocations: Any = None

    def choice(self, tools: list[Tool]) -> str | None:
        """The function that the reply has to call ("": any; None: it need not).

        Raises:
            RequestError
        """
        calling, where = self.function_calling_config, _CALLING
        allowed, names = calling.allowed_function_names, {t["function"]["name"] for t in tools}
        if calling.mode in ("ANY", "VALIDATED") and allowed:
            for name in allowed:
                must_call(tools, name, f"{where}.allowedFunctionNames")
            if names - set(allowed) and (len(set(allowed)) > 1 or calling.mode != "ANY"):
                remedy = "this gateway can ask for one function or for any; send one or all of them"
                raise wrong(f"{where}.allowedFunctionNames", list(allowed), remedy)
        if calling.mode != "ANY":
            return None
        only = allowed[0] if len(set(allowed)) == 1 else None
        return must_call(tools, only, f"{where}.mode")


_CALLING = "toolConfig.functionCallingConfig"


class GenerateParams(Fields):
    # They say nothing about the reply.
    ignored = frozenset(("labels", "model", "serviceTier", "store"))
    remedies: ClassVar = {
        "contents": "send at least one content",
        "cachedContent": "send the whole conversation in contents",
        "generationConfig.frequencyPenalty": OTHER_POLICY,
        "generationConfig.presencePenalty": OTHER_POLICY,
        "generationConfig.responseFormat": "send responseMimeType and a schema",
    }
    contents: list[Any] = Field(min_length=1)
    system_instruction: Any = None
    tools: list[Any] | None = None
    tool_config: ToolConfig = ToolConfig()
    generation_config: GenerationConfig = GenerationConfig()
    safety_settings: Any = None

    def told(self) -> list[str]:
        """Fields that ask Google's servers for something that an agent does not rely on."""
        config, calling = self.generation_config, self.tool_config.function_calling_config
        asked = {
            "safetySettings": self.safety_settings,
            "generationConfig.enableEnhancedCivicAnswers": config.enable_enhanced_civic_answers,
            "generationConfig.mediaResolution": config.media_resolution,
            "toolConfig.retrievalConfig": self.tool_config.retrieval_config,
            "toolConfig.includeServerSideToolInvocations": (
                self.tool_config.include_server_side_tool_invocations
            ),
            f"{_CALLING}.streamFunctionCallArguments": calling.stream_function_call_arguments,
            f"{_CALLING}.mode=VALIDATED": calling.mode == "VALIDATED",
            "generationConfig.thinkingConfig.thinkingBudget": (
                (config.thinking_config.thinking_budget or -1) > 0
            ),
        }
        return [name for name, value in asked.items() if value not in (None, False, [])]


class CountParams(GenerateParams):
    contents: list[Any] = Field(default=[], min_length=0)
    generate_content_request: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Choices that shape the answer and not the call."""

    include_thoughts: bool


class Gemini(Dialect):
    """`POST /v1beta/models/{model}:generateContent` and `:streamGenerateContent`."""

    name = "gemini"
    list_name = "contents"

    def __init__(
        self,
        chat_template: str = "",
        stream: Stream | None = None,
        style: CallStyle = "hermes",
    ) -> None:
        """
        Args:
            chat_template: looked through for the switches that `thinkingLevel` can turn.
            stream: form of the stream that is answered; None: the answer comes whole.
            style: form of the model's calls.
        """
        self._chat_template = chat_template
        self._numbered = CALL_FORMS[style].numbered
        self._stream = stream
        if stream == "array":
            self.stream_headers = {**STREAM_HEADERS, **JSON_HEADERS}

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        return self._parsed(*known.read(GenerateParams, body, self.list_name), known)

    def parse_count(self, body: dict[str, Any], known: Known = NOTHING) -> Parsed:
        """Read a body of `POST …:countTokens`: contents, or all that a call would send.

        Raises:
            RequestError
        """
        params = CountParams.read(body)
        if (whole := params.generate_content_request) is None:
            if not params.contents:
                raise wrong("contents", params.contents, "send at least one content")
            return self._parsed(params, params.contents, known)
        if params.contents:
            raise RequestError(
                "contents and generateContentRequest are both there; send one", "contents"
            )
        return self.parse(whole, None, known)

    def _parsed(
        self, params: GenerateParams, contents: list[Any], known: Known = NOTHING
    ) -> Parsed:
        config, ignored = params.generation_config, params.told()
        if config.logprobs and not config.response_logprobs:
            where = "generationConfig.logprobs"
            raise wrong(where, config.logprobs, "send responseLogprobs: true with it")
        read: tuple[Tools, list[str]] = known.tools or read_tools(params.tools or [])
        tools = read[0]
        ignored += read[1]
        calling = params.tool_config.function_calling_config
        forced_tool = params.tool_config.choice(tools)
        # With NONE the tools stay in the prompt, so that it goes on from the turns before.
        parse_tools = bool(tools) and calling.mode != "NONE"
        constraint = config.constraint()
        if constraint is not None and parse_tools:
            # Constrained from its first token on, the reply could not call a tool.
            ignored.append(f"{config.schema_field} (beside tools)")
            constraint = None
        thinking = config.thinking_config
        level = thinking.thinking_level
        if level == "THINKING_LEVEL_UNSPECIFIED":
            level = None
        where = "generationConfig.thinkingConfig.thinkingLevel"
        effort = None if level is None else level.lower()
        template_args = effort_args(effort, self._chat_template, where, ignored)
        if thinking.thinking_budget == 0:
            template_args = {**template_args, "enable_thinking": False}
        system = params.system_instruction
        conversation = Conversation.read(system, contents, known, self._numbered)
        call = ChatRequest(
            messages=conversation.messages,
            tools=tools or None,
            template_args=template_args or None,
            max_tokens=config.max_output_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k or None,
            stop=config.stop_sequences,
            seed=config.seed,
            n_logprobs=(config.logprobs or 0) if config.response_logprobs else None,
            constraint=constraint,
            constraint_field=config.schema_field,
            forced_tool=forced_tool,
            stream=self._stream is not None,
            parse_tools=parse_tools,
            first_call=conversation.n_calls,
        )
        options = Options(thinking.include_thoughts)
        return Parsed(
            call,
            options,
            config.candidate_count,
            ignored=tuple(ignored),
            n_outside=conversation.n_outside,
            tools=read,
        )

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `GenerateContentResponse`."""
        options: Options = exchange.parsed.options
        candidates = []
        for i, (reply, call) in enumerate(zip(replies, exchange.calls, strict=True)):
            parts = PartWriter(options.include_thoughts).whole(call.deltas)
            tokens = call.tokens if call.request.n_logprobs is not None else ()
            candidates.append(_candidate(i, parts, tokens, exchange.tokenizer, reply))
        return _response(exchange, candidates, replies)

    def writer(self, exchange: Exchange) -> StreamWriter:
        """A `GenerateContentResponse` for each delta; the last one of each sample says why it
        ended, and the last one of all has the usage."""
        return _GeminiWriter(exchange, self, is_array=self._stream == "array")

    def error(self, e: GatewayError) -> dict[str, Any]:
        """Google's error object."""
        message = str(e)
        name = _FIELDS.get(e.param or "", e.param)
        if isinstance(e, ContextLengthError) and e.tokens is not None:
            # Agents look for these words before they compact their history.
            message = (
                "The input token count ({}) exceeds the maximum number of tokens allowed ({})."
            ).format(*e.tokens)
        elif e.param == "tool_choice":
            message = message.replace("tool_choice", f"{_CALLING}.mode").replace(
                "send 'auto' or 'none'", "send AUTO or NONE"
            )
        elif e.status == 401:
            message = message.replace("'x-api-key: KEY'", "'x-goog-api-key: KEY'")
        other = "INTERNAL" if e.status >= 500 else "INVALID_ARGUMENT"
        status = _STATUSES.get(e.status, other)
        details: list[dict[str, Any]] = []
        if name is not None:
            violation = {"field": name, "description": message}
            details.append({"@type": f"{_RPC}.BadRequest", "fieldViolations": [violation]})
        if e.code is not None:
            info = {"reason": e.code.upper(), "domain": "stepwell"}
            details.append({"@type": f"{_RPC}.ErrorInfo", **info})
        if (after := e.headers().get("retry-after")) is not None:
            details.append({"@type": f"{_RPC}.RetryInfo", "retryDelay": f"{after}s"})
        error = {"code": e.status, "message": message, "status": status}
        return {"error": {**error, "details": details} if details else error}


_RPC = "type.googleapis.com/google.rpc"
_FIELDS: Mapping[str, str] = {"messages": "contents", "tool_choice": f"{_CALLING}.mode"}
"""Fields of ours that other rooms name in their errors."""
_STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ALREADY_EXISTS",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


# -- answers ---------------------------------------------------------------------------------


class _GeminiWriter(StreamWriter):
    idle = b"\n"
    """A blank line: Google's SDK takes a comment for JSON."""

    def __init__(self, exchange: Exchange, dialect: Gemini, *, is_array: bool) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._is_array = is_array
        self._has_begun = False
        include = exchange.parsed.options.include_thoughts
        self._parts = [PartWriter(include) for _ in exchange.calls]
        self._replies: dict[int, LiveCall] = {}
        self._templates: dict[tuple[int, type[Delta]], Template] = {}

    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        parts = self._parts[sample].parts(delta)
        if not parts and not tokens:  # a thought that nobody asked for
            return self.idle
        if tokens or not parts or isinstance(delta, ToolCall):
            return self._frame(self._response(sample, parts or [{"text": ""}], tokens))
        kind = type(delta)
        if (template := self._templates.get((sample, kind))) is None:
            data = self._response(sample, [{**parts[0], "text": PLACE}], ())
            self._templates[sample, kind] = template = Template(data)
        return self._frame(template(delta.text))

    def reply(self, sample: int, reply: LiveCall, tokens: Sequence[SampledToken]) -> bytes:
        self._replies[sample] = reply
        return self._frame(self._response(sample, self._parts[sample].end(), tokens, reply))

    def end(self) -> bytes:
        return b"]" if self._is_array else b""

    def failed(self, e: GatewayError) -> bytes:
        return self._frame(orjson.dumps(self._dialect.error(e))) + self.end()

    def _response(
        self,
        sample: int,
        parts: list[Part],
        tokens: Sequence[SampledToken],
        reply: LiveCall | None = None,
    ) -> bytes:
        candidate = _candidate(sample, parts, tokens, self._exchange.tokenizer, reply)
        has_ended = len(self._replies) == len(self._parts)
        replies = [self._replies[i] for i in sorted(self._replies)] if has_ended else ()
        return orjson.dumps(_response(self._exchange, [candidate], replies))

    def _frame(self, response: bytes) -> bytes:
        if not self._is_array:
            return b"data: %b\n\n" % response
        is_first, self._has_begun = not self._has_begun, True
        return (b"[" if is_first else b",\r\n") + response


class PartWriter:
    """Deltas of one reply → parts.

    The signature of a thought stands on the first call behind it, else on the last part. None is
    needed back: a turn is found by its text and calls.
    """

    def __init__(self, include_thoughts: bool) -> None:
        self._include_thoughts = include_thoughts
        self._thought: list[str] = []
        """Text of the thought that is not signed yet."""

    def whole(self, deltas: Iterable[Delta]) -> list[Part]:
        """Parts of a whole reply; there is at least one."""
        parts: list[Part] = []
        for is_one, group in groupby(
            deltas, lambda d: None if isinstance(d, ToolCall) else type(d)
        ):
            pieces = [part for delta in group for part in self.parts(delta)]
            if is_one is not None and pieces:
                pieces = [{**pieces[0], "text": "".join(piece["text"] for piece in pieces)}]
            parts += pieces
        if not parts or parts[-1].get("thought") or "functionCall" in parts[-1]:
            return parts + (self.end() if self._thought or not parts else [])
        return [*parts[:-1], {**parts[-1], **self._signature()}]

    def parts(self, delta: Delta) -> list[Part]:
        """Parts of a delta; a thought that nobody asked for has none."""
        if isinstance(delta, ToolCall):
            # As text, so that numbers of any size come through.
            args = orjson.Fragment(delta.arguments)
            call = {"id": delta.id, "name": delta.name, "args": args}
            return [{"functionCall": call, **self._signature()}]
        if isinstance(delta, ReasoningDelta):
            self._thought.append(delta.text)
            return [{"text": delta.text, "thought": True}] if self._include_thoughts else []
        return [{"text": delta.text}]

    def end(self) -> list[Part]:
        """The part of the last chunk, as Google's API ends a stream."""
        return [{"text": "", **self._signature()}]

    def _signature(self) -> dict[str, str]:
        if not self._thought:
            return {}
        thought = "".join(self._thought)
        self._thought.clear()
        return {"thoughtSignature": signature_of(thought)}


def _candidate(
    index: int,
    parts: list[Part],
    tokens: Iterable[SampledToken],
    tokenizer: ChatTokenizer,
    reply: LiveCall | None,
) -> dict[str, Any]:
    """A candidate, or what is new of it. `reply`: it has ended."""
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": index}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish_reason == "length" else "STOP"
    if sampled := list(tokens):
        log_probs = [max(token.log_prob, LEAST_LOGPROB) for token in sampled]
        candidate["avgLogprobs"] = sum(log_probs) / len(log_probs)
        candidate["logprobsResult"] = {
            "chosenCandidates": [
                _token(t.token_id, p, tokenizer) for t, p in zip(sampled, log_probs, strict=True)
            ],
            "topCandidates": [
                {"candidates": [_token(*each, tokenizer) for each in t.alternatives]}
                for t in sampled
            ],
        }
    return candidate


def _token(token_id: int, log_prob: float, tokenizer: ChatTokenizer) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "tokenId": token_id, "logProbability": max(log_prob, LEAST_LOGPROB)}


def _response(
    exchange: Exchange, candidates: list[dict[str, Any]], replies: Sequence[LiveCall]
) -> dict[str, Any]:
    """`replies`: all of them, for the usage; none: some go on."""
    usage = {"usageMetadata": _usage(replies, exchange.tokenizer)} if replies else {}
    about = {"modelVersion": exchange.model, "responseId": exchange.uid}
    return {"candidates": candidates, **usage, **about}


def _usage(replies: Sequence[LiveCall], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The prompt counts once, however many samples it has."""
    n_prompt = max(reply.n_prompt for reply in replies)
    n_response = sum(reply.n_response for reply in replies)
    n_thoughts = sum(n_reasoning(reply, tokenizer) for reply in replies)
    counts = {
        "promptTokenCount": n_prompt,
        "candidatesTokenCount": n_response - n_thoughts,
        "totalTokenCount": n_prompt + n_response,
        "promptTokensDetails": prompt_tokens(
            n_prompt, max(sum(p.n_tokens for p in reply.request.pictures) for reply in replies)
        ),
    }
    if n_thoughts:
        counts["thoughtsTokenCount"] = n_thoughts
    if cached := max(reply.generation.cached_tokens for reply in replies):
        counts["cachedContentTokenCount"] = cached
    return counts


def prompt_tokens(n: int, n_of_pictures: int = 0) -> list[dict[str, Any]]:
    """Tokens of a prompt by what they are of."""
    details = [{"modality": "TEXT", "tokenCount": n - n_of_pictures}]
    if n_of_pictures:
        details.append({"modality": "IMAGE", "tokenCount": n_of_pictures})
    return details
