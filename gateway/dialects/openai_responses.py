"""OpenAI Responses: request → `ChatRequest`, `Reply` → JSON or server-sent events.

    body ──► Toolbox, Conversation (`response_items.py`) ──► ChatRequest
    deltas ──► Answer (`response_answer.py`) ──► server-sent events
                  └──► the whole Response, remembered for `previous_response_id`

Owns the wire format, its validation and its error wording, and the bounded memory of answers. What
the model cannot have and agents always send (hosted tools, `truncation: auto`) is left aside and
told in `x-stepwell-ignored`; any other field that cannot be honoured is refused by name. Does not
own: what items mean, calls, prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import orjson
from cachetools import LRUCache
from pydantic import Field

from stepwell.gateway.access import Principal, other_owner
from stepwell.gateway.dialects.base import (
    NOTHING,
    PLACE,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
    sse,
)
from stepwell.gateway.dialects.params import (
    OTHER_POLICY,
    Effort,
    MaxTokens,
    Metadata,
    NoPenalty,
    Params,
    Part,
    Seed,
    Temperature,
    TopK,
    TopP,
    effort_args,
    json_constraint,
    must_call,
    need,
    optional,
    verbosity_args,
    wrong,
)
from stepwell.gateway.dialects.response_answer import Answer, Event, Options
from stepwell.gateway.dialects.response_items import Conversation, Item, Toolbox
from stepwell.gateway.errors import (
    ContextLengthError,
    GatewayError,
    PreviousResponseError,
    RequestError,
    UnknownItemError,
)
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.tokens.messages import KnownMessages, Message, continued, dumps, n_chars_of
from stepwell.gateway.trajectory.calls import LiveCall, SampledToken
from stepwell.gateway.web import error_body

_SEALED = "reasoning.encrypted_content"
Includable = Literal[
    "reasoning.encrypted_content",
    # Of items that this gateway never makes.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "prompt_cache_key",
    "safety_identifier",
    "user",
    "presence_penalty",
    "frequency_penalty",
    "max_tool_calls",
)
"""Fields of a request that its answer repeats, in OpenAI's order; then those that Open Responses
wants in every answer."""
_echoed = attrgetter(*_ECHOED)
Summary = Literal["auto", "concise", "detailed"]
STORED_CHARS = 2**28
"""Default of `gateway.stored_response_chars`."""


class Reasoning(Params):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Any = None
    mode: Any = None

    def told(self) -> list[str]:
        neutral = {"context": "auto", "mode": "standard"}
        return [
            f"reasoning.{name}"
            for name, value in neutral.items()
            if getattr(self, name) not in (None, value)
        ]


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class Text(Params):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None

    def constraint(self) -> tuple[str, str] | None:
        """Constraint that this format puts on the engine; None for plain text."""
        return json_constraint(self.format.type, self.format.json_schema, "text.format.schema")


class StreamOptions(Params):
    include_obfuscation: Any = None


class ResponsesParams(Params):
    ignored = frozenset(
        (
            "client_metadata",
            "model",
            "prompt_cache_options",
            "prompt_cache_retention",
            "service_tier",
        )
    )
    remedies: ClassVar = {
        "background": "send false, and stream for long answers",
        "conversation": "send the whole input, or previous_response_id",
        "frequency_penalty": OTHER_POLICY,
        "presence_penalty": OTHER_POLICY,
        "repetition_penalty": OTHER_POLICY,
        "prompt": "send instructions and input",
        "top_logprobs": "chat completions have log-probs",
    }
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    reasoning: Reasoning = Reasoning()
    text: Text = Text()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    store: bool = True
    background: Literal[False] = False
    top_logprobs: Literal[0] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    context_management: Any = None

    # Not supported, but this value asks for nothing.
    frequency_penalty: NoPenalty = 0
    presence_penalty: NoPenalty = 0
    repetition_penalty: Literal[1] = 1

    # Echoed.
    max_tool_calls: int | None = Field(default=None, ge=1)
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def told(self) -> list[str]:
        """Fields that agents send for long conversations. Nothing is ever dropped here: what does
        not fit fails with `context_length_exceeded`."""
        told = [] if self.context_management is None else ["context_management"]
        return [*told, "truncation=auto"] if self.truncation == "auto" else told


def _items(sent: Any) -> list[Item]:
    """Items of an `input`."""
    if isinstance(sent, str):
        return [{"type": "message", "role": "user", "content": sent}]
    if not isinstance(sent, list | None):
        raise wrong("input", sent, "send text or a list of items")
    return sent or []


class OpenAIResponses(Dialect):
    """`POST /v1/responses`. Remembers its answers."""

    name = "openai_responses"
    list_name = "input"

    def __init__(self, stored_chars: int = STORED_CHARS, chat_template: str = "") -> None:
        """
        Args:
            stored_chars: text of all remembered answers together.
            chat_template: looked through for the switches that `reasoning.effort` can turn.
        """
        self.store = ResponseStore(stored_chars)
        self._chat_template = chat_template

    def parse(
        self, body: dict[str, Any], reader: Principal | None = None, known: Known = NOTHING
    ) -> Parsed:
        """See `Dialect.parse`.

        Raises:
            PreviousResponseError, UnknownItemError: what is referred to is not stored.
        """
        params, sent = known.read(ResponsesParams, body, self.list_name)
        ignored, items = params.told(), _items(sent)
        previous = self._previous(params.previous_response_id, reader)
        toolbox: Toolbox = known.tools or Toolbox.read(params.tools or ())
        instructions = params.instructions
        begin: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        conversation = Conversation(
            previous.messages if previous is not None else (),
            toolbox,
            partial(self.store.item, reader=reader),
            known=known,
        )
        for item in items:
            conversation.add(item)
        messages = conversation.messages()
        if previous is not None or conversation.looks_up:
            known.no_cuts()
        if not messages:
            raise RequestError("input is missing; send text or a list of items", "input")
        forced_tool = _choice(params.tool_choice, toolbox)
        constraint = params.text.constraint()
        parse_tools = bool(toolbox.shown) and params.tool_choice != "none"
        if constraint is not None and parse_tools:
            # Constrained from its first token on, the reply could not call a tool.
            ignored.append(f"text.format={params.text.format.type} (beside tools)")
            constraint = None
        ignored += params.reasoning.told()
        effort = params.reasoning.effort
        # Codex sends one with every request.
        told = ignored if effort in ("none", "minimal") else []
        call = ChatRequest(
            messages=[*begin, *messages],
            tools=toolbox.shown or None,
            template_args=effort_args(effort, self._chat_template, "reasoning.effort", told)
            | verbosity_args(params.text.verbosity, self._chat_template),
            max_tokens=params.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            constraint=constraint,
            constraint_field="text.format",
            forced_tool=forced_tool,
            parallel_tool_calls=params.parallel_tool_calls,
            stream=params.stream,
            parse_tools=parse_tools,
        )
        summary = params.reasoning.summary or params.reasoning.generate_summary
        form = (body.get("text") or {}).get("format") or {"type": "text"}
        changed = {
            "metadata": params.metadata or {},
            "reasoning": {"effort": effort, "summary": summary},
            "text": {"verbosity": params.text.verbosity, "format": form},
            "tool_choice": params.tool_choice or "auto",
            "tools": toolbox.echo,
        }
        echo = dict(zip(_ECHOED, _echoed(params), strict=True)) | changed
        options = Options(
            echo,
            toolbox,
            params.store,
            seals_reasoning=_SEALED in (params.include or ()),
            summarises=summary is not None,
        )
        return Parsed(
            call,
            options,
            trajectory_uid=previous.trajectory_uid if previous is not None else None,
            ignored=(*toolbox.ignored, *conversation.ignored, *ignored),
            n_outside=len(begin),
            tools=toolbox,
        )

    def answer(self, exchange: Exchange, replies: Sequence[LiveCall]) -> dict[str, Any]:
        """A `Response`."""
        answer = Answer(exchange)
        for delta in exchange.calls[0].deltas:
            answer.feed(delta)
        return self.finished(exchange, answer, replies[0])[1]

    def writer(self, exchange: Exchange) -> StreamWriter:
        """`ResponseStreamEvent`s, from `response.created` to `response.completed`,
        `response.incomplete`, or `error` and `response.failed`."""
        return _ResponseWriter(exchange, self)

    def error(self, e: GatewayError) -> dict[str, Any]:
        """OpenAI's error object; the conversation is called `input` here."""
        return error_body(e, "input" if e.param == "messages" else e.param)

    def stored(self, response_id: str, reader: Principal | None = None) -> StoredResponse:
        """A remembered answer; `reader` as of `parse`.

        Raises:
            UnknownItemError
        """
        stored = self.store.read(response_id, reader)
        if stored is None:
            raise UnknownItemError(
                f"Response with id {response_id!r:.80} not found; it was answered with "
                "`store: false`, deleted, is too old (gateway.stored_response_chars), or another "
                "gateway, or this one before a restart, answered it",
                None,
            )
        return stored

    def finished(
        self, exchange: Exchange, answer: Answer, reply: LiveCall
    ) -> tuple[list[Event], dict[str, Any]]:
        """The last events and the whole response, which is remembered from now on."""
        events = list(answer.finish(reply))
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        response = answer.response(status, reply)
        options: Options = exchange.parsed.options
        (trajectory,) = exchange.trajectories
        is_kept = exchange.calls[0].request.is_kept and not trajectory.is_deleted
        if options.store and is_kept:
            # Instructions are not carried over.
            parsed = exchange.parsed
            messages = continued(parsed.call.messages, parsed.n_outside, reply.text.message())
            whose = trajectory.uid, trajectory.owner
            self.store.keep(StoredResponse(response, messages, *whose))
        return events, response

    def _previous(self, previous_id: str | None, reader: Principal | None) -> StoredResponse | None:
        if previous_id is None:
            return None
        previous = self.store.read(previous_id, reader)
        if previous is None:
            raise PreviousResponseError(
                f"Previous response with id {previous_id!r:.80} not found; send the whole input "
                "instead",
                "previous_response_id",
            )
        return previous


def _choice(choice: Any, toolbox: Toolbox) -> str | None:
    """The tool that the reply has to call ("": any; None: it need not). All are shown to the model,
    with "none", too: so it goes on from the turns before."""
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return must_call(toolbox.shown)
        case {"type": "function" | "custom"}:
            name = need(choice, "name", str, "tool_choice")
            flat = toolbox.flat_name(name, optional(choice, "namespace", "tool_choice"))
            return must_call(toolbox.shown, flat, "tool_choice.name")
    raise wrong(
        "tool_choice",
        choice,
        "this gateway supports 'auto', 'none', 'required', and a function or custom tool",
    )


def _failure_code(e: GatewayError) -> str:
    """One of the codes that `Response.error` may have, and the one that agents look for."""
    if isinstance(e, ContextLengthError):
        return "context_length_exceeded"
    if isinstance(e, RequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if e.status == 429 else "server_error"


class _ResponseWriter(StreamWriter):
    def __init__(self, exchange: Exchange, dialect: OpenAIResponses) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._answer = Answer(exchange)
        self._n = 0
        """Events written."""
        self._before = b""
        """A text event of the open item up to its text; empty: not made yet."""

    def begin(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._frames(
            {"type": kind, "response": self._answer.response("in_progress")} for kind in kinds
        )

    def delta(self, sample: int, delta: Delta, tokens: Sequence[SampledToken]) -> bytes:
        if not self._answer.goes_on(delta):
            self._before = b""
            return self._frames(self._answer.feed(delta))
        if not self._before:
            event = self._answer.text(PLACE)
            self._before, _, _ = sse(event, event["type"]).partition(orjson.dumps(PLACE))
        n, self._n = self._n, self._n + 1
        text = orjson.dumps(delta.text)
        return b'%b%b,"sequence_number":%d}\n\n' % (self._before, text, n)

    def reply(self, sample: int, reply: LiveCall, tokens: Sequence[SampledToken]) -> bytes:
        events, response = self._dialect.finished(self._exchange, self._answer, reply)
        last = {"type": f"response.{response['status']}", "response": response}
        return self._frames((*events, last))

    def failed(self, e: GatewayError) -> bytes:
        # OpenAI sends both: its SDK raises the first, Codex reads the second.
        error = self._dialect.error(e)["error"]
        flat = {name: error[name] for name in ("code", "message", "param")}
        failure = {"code": _failure_code(e), "message": str(e)}
        response = self._answer.response("failed", error=failure)
        return self._frames(
            (
                {"type": "error", **flat, "error": error},
                {"type": "response.failed", "response": response},
            )
        )

    def _frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            frames.append(sse({**event, "sequence_number": self._n}, event["type"]))
            self._n += 1
        return b"".join(frames)


# -- what was answered -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer that a client may refer to."""

    response: dict[str, Any]
    """The response as it was sent."""
    messages: Sequence[Message]
    """The conversation up to and with the answer; instructions are not carried over."""
    trajectory_uid: str
    owner: str | None = None
    """Owner of the response's trajectory."""

    def n_chars(self) -> int:
        # What an answer takes besides its texts; it repeats the tools.
        n = 2_000 + len(dumps(self.response))
        if isinstance(self.messages, KnownMessages):
            return n + self.messages.n_chars
        for message in self.messages:
            n += n_chars_of(message["content"]) + len(message.get("reasoning_content") or "")
            n += len(str(message.get("tool_calls") or ""))
        return n


class ResponseStore(LRUCache[str, StoredResponse]):
    """Answers by their ids, up to a number of characters."""

    def __init__(self, max_chars: int) -> None:
        super().__init__(max_chars, StoredResponse.n_chars)

    def keep(self, stored: StoredResponse) -> None:
        """Unless it is larger alone than all that is kept."""
        with suppress(ValueError):
            self[stored.response["id"]] = stored

    def read(self, response_id: str, reader: Principal | None = None) -> StoredResponse | None:
        """`reader`: of a trajectory's key or URL, it must be that trajectory's; of an agent key,
        one that it, or the operator, opened; None: any.

        Raises:
            PermissionDeniedError: another key opened its trajectory.
        """
        stored = self.get(response_id)
        if stored is None or reader is None:
            return stored
        # Below a URL the trajectory is named without its key.
        is_of_it = reader.trajectory is None or reader.trajectory[0] == stored.trajectory_uid
        if not reader.may_read(stored.trajectory_uid, stored.owner) or (
            reader.is_bound and not is_of_it
        ):
            raise other_owner("response", response_id)
        return stored if is_of_it else None

    def item(self, item_id: str, reader: Principal | None = None) -> Item | None:
        """An item of a stored answer, whose id begins with that of the answer."""
        stored = self.read(f"resp_{item_id.partition('_')[2][:32]}", reader)
        output = stored.response["output"] if stored is not None else ()
        return next((item for item in output if item["id"] == item_id), None)

    def forget(self, trajectory_uids: Collection[str]) -> None:
        """Delete the answers of these trajectories."""
        for response_id, stored in list(self.items()):
            if stored.trajectory_uid in trajectory_uids:
                del self[response_id]
