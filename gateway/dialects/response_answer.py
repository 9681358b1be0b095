"""A Responses API answer as it grows: deltas in, events and the whole `Response` out.

    ReasoningDelta | ContentDelta | ToolCall ──feed──► events of the open item ──┐
    Reply ──finish──► events that close it                                       ├──► Response
                                                  finished items ────────────────┘

The events of a stream and the JSON answer come from here, so they agree. Owns: items and their ids,
events without their numbers, usage. Does not own: what the client asked for, or the memory of
answers (`openai_responses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from stepwell.gateway.dialects.base import Exchange, n_reasoning
from stepwell.gateway.dialects.computer import COMPUTER, computer_fields
from stepwell.gateway.dialects.response_items import Item, Toolbox, custom_input, seal
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import ContentDelta, Delta, ReasoningDelta
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.calls import LiveCall

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """Options that shape the answer and not the call."""

    echo: dict[str, Any]
    """Fields of the request that the answer repeats."""
    toolbox: Toolbox
    store: bool
    seals_reasoning: bool
    summarises: bool
    """Reasoning goes out as summary, where clients that ask for one look."""


class _Form(NamedTuple):
    """Names under which the text of an open item is sent."""

    part: str
    event: str
    part_event: str
    parts: str
    """Key of the item under which its parts are."""
    place: str


_MESSAGE = _Form("output_text", "output_text", "content_part", "content", "content_index")
_THOUGHT = _Form("reasoning_text", "reasoning_text", "content_part", "content", "content_index")
_SUMMARY = _Form(
    "summary_text",
    "reasoning_summary_text",
    "reasoning_summary_part",
    "summary",
    "summary_index",
)


class Answer:
    """A response as it grows: deltas in, events out.

    Output items follow one another and each is whole before the next begins. White space between
    items is markup; an answer without text or call has an empty message, so that a client that
    sends it back sends a turn.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._options: Options = exchange.parsed.options
        self._output: list[Item] = []
        """Finished items."""
        self._item: Item = {}
        """The open one, reasoning or message; its text is in `_texts`."""
        self._form: _Form | None = None
        """None: no item is open."""
        self._texts: list[str] = []
        self._blank = ""

    def feed(self, delta: Delta) -> list[Event]:
        """Events of a delta."""
        if isinstance(delta, ToolCall):
            self._blank = ""
            return [*self._close(), *self._call(delta)]
        if isinstance(delta, ReasoningDelta):
            form = _SUMMARY if self._options.summarises else _THOUGHT
            return [*self._begin(form), self._add(delta.text)]
        if self._form is _MESSAGE:
            return [self._add(delta.text)]
        self._blank += delta.text
        if not self._blank.strip():
            return []
        text, self._blank = self._blank, ""
        return [*self._begin(_MESSAGE), self._add(text)]

    def goes_on(self, delta: Delta) -> TypeGuard[ContentDelta | ReasoningDelta]:
        """Return true if `delta` is more text of the open item, of which `text` is the event; it
        counts as fed then."""
        if self._form is None or isinstance(delta, ToolCall):
            return False
        if isinstance(delta, ReasoningDelta) is (self._form is _MESSAGE):
            return False
        self._texts.append(delta.text)
        return True

    def text(self, text: str) -> Event:
        """More text of the open item."""
        return self._text_event(self._form or _MESSAGE, "delta", delta=text)

    def finish(self, reply: LiveCall) -> Iterator[Event]:
        """Events that end the output."""
        said = any(item["type"] != "reasoning" for item in self._output)
        if self._form is not _MESSAGE and not said:
            yield from self._begin(_MESSAGE)
            if self._blank:
                yield self._add(self._blank)
        yield from self._close("incomplete" if reply.finish_reason == "length" else "completed")

    def response(
        self, status: str, reply: LiveCall | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The whole `Response` as it is now."""
        exchange = self._exchange
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = {
            "id": f"resp_{exchange.uid}",
            "object": "response",
            "created_at": exchange.created,
            "status": status,
            "background": False,
            "completed_at": exchange.calls[0].call.completed if status == "completed" else None,
            "error": error,
            "incomplete_details": cut,
            "model": exchange.model,
            "output": list(self._output),
            "service_tier": "default",
            "truncation": "disabled",
            "usage": None,
            **self._options.echo,
        }
        if reply is not None:
            response["temperature"] = reply.request.sampling.temperature
            response["top_p"] = reply.request.sampling.top_p
            response["usage"] = usage_of(reply, exchange.tokenizer)
        return response

    def _place(self) -> Event:
        return {"item_id": self._item["id"], "output_index": len(self._output)}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._exchange.uid}{len(self._output):02x}"

    def _added(self, item: Item) -> Event:
        index = len(self._output)
        return {"type": "response.output_item.added", "output_index": index, "item": item}

    def _done(self, item: Item) -> Event:
        index = len(self._output)
        self._output.append(item)
        return {"type": "response.output_item.done", "output_index": index, "item": item}

    def _begin(self, form: _Form) -> Iterator[Event]:
        """Open an item of this form, unless it is the open one."""
        if form is self._form:
            return
        yield from self._close()
        self._form = form
        if form is _MESSAGE:
            role = {"role": "assistant", "status": "in_progress", "content": []}
            self._item = {"type": "message", "id": self._new_id("msg"), **role}
        else:
            self._item = {"type": "reasoning", "id": self._new_id("rs"), "summary": []}
        yield self._added(dict(self._item))
        yield self._part(form, "added", "")

    def _part(self, form: _Form, what: str, text: str) -> Event:
        part: Item = {"type": form.part, "text": text}
        if form is _MESSAGE:
            part |= {"annotations": [], "logprobs": []}
        name = f"response.{form.part_event}.{what}"
        return {"type": name, **self._place(), form.place: 0, "part": part}

    def _text_event(self, form: _Form, what: str, **text: str) -> Event:
        place = {"type": f"response.{form.event}.{what}", **self._place(), form.place: 0}
        return {**place, **({"logprobs": []} if form is _MESSAGE else {}), **text}

    def _add(self, text: str) -> Event:
        self._texts.append(text)
        return self.text(text)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if one is."""
        item, form = self._item, self._form
        if form is None:
            return
        text, self._texts = "".join(self._texts), []
        yield self._text_event(form, "done", text=text)
        done = self._part(form, "done", text)
        yield done
        item[form.parts] = [done["part"]]
        if form is not _MESSAGE and self._options.seals_reasoning:
            item["encrypted_content"] = seal(text)
        self._form = None
        item["status"] = status
        yield self._done(item)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """A call is known when it is whole."""
        tool = self._options.toolbox.client_name(call.name)
        if tool.computer is not None:
            self._item = {
                "type": "computer_call",
                "id": self._new_id("cu"),
                "call_id": call.id,
                **computer_fields(call.arguments, is_preview=tool.computer != COMPUTER),
                "status": "completed",
            }
            yield self._added({**self._item, "status": "in_progress"})
            yield self._done(self._item)
            return
        if tool.is_custom:
            kind, name, text = "custom_tool_call", "input", custom_input(call.arguments)
            events, prefix = "response.custom_tool_call_input", "ctc"
        else:
            kind, name, text = "function_call", "arguments", call.arguments
            events, prefix = "response.function_call_arguments", "fc"
        self._item = item = {
            "type": kind,
            "id": self._new_id(prefix),
            "call_id": call.id,
            "name": tool.name,
            name: text,
            "status": "completed",
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        yield self._added({**item, name: "", "status": "in_progress"})
        yield {"type": f"{events}.delta", **self._place(), "delta": text}
        end = {"type": f"{events}.done", **self._place(), name: text}
        yield end if tool.is_custom else {**end, "name": tool.name}
        yield self._done(item)


def usage_of(reply: LiveCall, tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {
        "input_tokens": reply.n_prompt,
        "input_tokens_details": {
            "cached_tokens": reply.generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": reply.n_response,
        "output_tokens_details": {"reasoning_tokens": n_reasoning(reply, tokenizer)},
        "total_tokens": reply.n_prompt + reply.n_response,
    }
