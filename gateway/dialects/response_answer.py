"""A Responses API answer as it grows: deltas in, events and the whole `Response` out.

    ReasoningDelta | ContentDelta | ToolCall ──feed──► events of the open item ──┐
    Reply ──finish──► events that close it                                       ├──► Response
                                                  finished items ────────────────┘

The events of a stream and the JSON answer come from here, so they agree. Owns: items and their ids,
events without their numbers, usage. Does not own: what the client asked for, or the memory of
answers (`openai_responses.py`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stepwell.gateway.call import Reply, SampledToken
from stepwell.gateway.dialects.base import Exchange
from stepwell.gateway.dialects.response_items import Item, Toolbox, custom_input, seal
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import THINK_CLOSE, Delta, ReasoningDelta
from stepwell.gateway.tokens.messages import Message
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What shapes the answer and not the call."""

    echo: dict[str, Any]
    """Fields of the request that the answer repeats."""
    toolbox: Toolbox
    input: tuple[Item, ...]
    conversation: list[Message]
    """What a response that continues this one begins with, without the answer."""
    store: bool
    seals_reasoning: bool
    summarises: bool
    """Reasoning goes out as summary, where clients that ask for one look."""
    logprobs: bool


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
        self._item: Item | None = None
        """The open one, reasoning or message; its text is in `_texts`."""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._blank = ""
        self._tokens = TokenReader(exchange.tokenizer)
        self._n_told = 0

    def feed(self, delta: Delta, n_told: int) -> list[Event]:
        """Events of a delta; `n_told` as of `exchange.Event`."""
        self._n_told = n_told
        events: list[Event] = []
        if isinstance(delta, ToolCall):
            self._blank = ""
            events += self._close()
            events += self._call(delta)
        elif isinstance(delta, ReasoningDelta):
            if self._kind != "reasoning":
                events += self._close()
                events += self._begin_reasoning()
            events += self._add(delta.text)
        elif self._kind == "message":
            events += self._add(delta.text)
        else:
            self._blank += delta.text
            if self._blank.strip():
                events += self._close()
                events += self._begin_message()
                events += self._add(self._blank)
                self._blank = ""
        return events

    def finish(self, reply: Reply) -> Iterator[Event]:
        """Events that end the output."""
        kinds = [item["type"] for item in self._output]
        if self._kind != "message" and not any(kind != "reasoning" for kind in kinds):
            yield from self._close()
            yield from self._begin_message()
            if self._blank:
                yield from self._add(self._blank)
        yield from self._close("incomplete" if reply.finish_reason == "length" else "completed")

    def response(
        self, status: str, reply: Reply | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The whole `Response` as it is now."""
        exchange = self._exchange
        response = {
            "id": f"resp_{exchange.uid}",
            "object": "response",
            "created_at": exchange.created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": exchange.model,
            "output": list(self._output),
            "service_tier": "default",
            "truncation": "disabled",
            "usage": None,
            **self._options.echo,
        }
        if reply is not None:
            response["temperature"] = reply.sampling.temperature
            response["top_p"] = reply.sampling.top_p
            response["usage"] = _usage(reply, exchange.tokenizer)
        return response

    @property
    def _kind(self) -> str | None:
        return self._item["type"] if self._item is not None else None

    def _place(self, item: Item) -> Event:
        return {"item_id": item["id"], "output_index": len(self._output)}

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._exchange.uid}{len(self._output):02x}"

    def _added(self, item: Item) -> Event:
        index = len(self._output)
        return {"type": "response.output_item.added", "output_index": index, "item": item}

    def _done(self, item: Item) -> Event:
        index = len(self._output)
        self._output.append(item)
        return {"type": "response.output_item.done", "output_index": index, "item": item}

    def _begin_reasoning(self) -> Iterator[Event]:
        item = {"type": "reasoning", "id": self._new_id("rs"), "summary": []}
        self._item = item
        yield self._added(dict(item))
        if self._options.summarises:
            yield {
                "type": "response.reasoning_summary_part.added",
                **self._place(item),
                "summary_index": 0,
                "part": {"type": "summary_text", "text": ""},
            }
        else:
            yield self._part("added", {"type": "reasoning_text", "text": ""})

    def _begin_message(self) -> Iterator[Event]:
        self._item = {
            "type": "message",
            "id": self._new_id("msg"),
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._added({**self._item, "content": []})
        yield self._part("added", _text_part("", []))

    def _part(self, what: str, part: Item) -> Event:
        if self._item is None:
            raise RuntimeError("a part belongs to an open item")
        return {
            "type": f"response.content_part.{what}",
            **self._place(self._item),
            "content_index": 0,
            "part": part,
        }

    def _text_event(self, what: str, **text: Any) -> Event:
        """A delta of the open item, or its end."""
        if self._item is None:
            raise RuntimeError("text belongs to an open item")
        place = self._place(self._item)
        if self._kind == "message":
            return {
                "type": f"response.output_text.{what}",
                **place,
                "content_index": 0,
                "logprobs": [],
                **text,
            }
        text.pop("logprobs", None)
        if self._options.summarises:
            kind, index = "reasoning_summary_text", "summary_index"
        else:
            kind, index = "reasoning_text", "content_index"
        return {"type": f"response.{kind}.{what}", **place, index: 0, **text}

    def _add(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        logprobs: list[dict[str, Any]] = []
        if self._options.logprobs:
            tokens = self._tokens.take(self._exchange.calls[0].tokens[: self._n_told], text)
            if self._kind == "message":
                logprobs = [_logprob(t, self._exchange.tokenizer) for t in tokens]
                self._logprobs += logprobs
        yield self._text_event("delta", delta=text, logprobs=logprobs)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, if one is."""
        item = self._item
        if item is None:
            return
        text, logprobs = "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        yield self._text_event("done", text=text, logprobs=logprobs)
        if item["type"] == "message":
            part = _text_part(text, logprobs)
            yield self._part("done", part)
            item["content"] = [part]
        else:
            yield from self._close_reasoning(item, text)
        self._item = None
        item["status"] = status
        yield self._done(item)

    def _close_reasoning(self, item: Item, text: str) -> Iterator[Event]:
        if self._options.summarises:
            part = {"type": "summary_text", "text": text}
            yield {
                "type": "response.reasoning_summary_part.done",
                **self._place(item),
                "summary_index": 0,
                "part": part,
            }
            item["summary"] = [part]
        else:
            part = {"type": "reasoning_text", "text": text}
            yield self._part("done", part)
            item["content"] = [part]
        if self._options.seals_reasoning:
            item["encrypted_content"] = seal(text)

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """A call is known when it is whole."""
        tool = self._options.toolbox.client_name(call.name)
        if tool.is_custom:
            kind, name, text = "custom_tool_call", "input", custom_input(call.arguments)
            events = "response.custom_tool_call_input"
        else:
            kind, name, text = "function_call", "arguments", call.arguments
            events = "response.function_call_arguments"
        item = {
            "type": kind,
            "id": self._new_id("ctc" if tool.is_custom else "fc"),
            "call_id": call.id,
            "name": tool.name,
            name: text,
            "status": "completed",
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        yield self._added({**item, name: "", "status": "in_progress"})
        yield {"type": f"{events}.delta", **self._place(item), "delta": text}
        end = {"type": f"{events}.done", **self._place(item), name: text}
        yield end if tool.is_custom else {**end, "name": tool.name}
        yield self._done(item)


class TokenReader:
    """Finds the tokens of successive pieces of the text that they spell."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._stream = tokenizer.stream()
        self._control = frozenset(tokenizer.special.values())
        self._text = ""
        self._plain = ""
        """The same without the letters of control tokens, of which one ends the reply."""
        self._ends: list[int] = []
        """Where in the text each token ends."""
        self._at = 0
        self._taken = 0

    def take(self, tokens: Sequence[SampledToken], text: str) -> list[SampledToken]:
        """The tokens of `text`, which comes behind what was taken before; markup is passed over.

        Args:
            tokens: all up to the end of `text`. What stands before it may hold its letters, too
                (the `h` of `<think>`), so it is looked for from the end on.
        """
        for token in tokens[len(self._ends) :]:
            new = self._stream.feed([token.token_id])
            self._text += new
            self._plain += "\0" * len(new) if token.token_id in self._control else new
            self._ends.append(len(self._text))
        start = self._plain.rfind(text, self._at)
        if start < 0:  # markup that no parser could read is text
            start = self._text.rfind(text, self._at)
        if start < 0:  # bytes that are no character show in the text only at its end
            start = self._at
        end = min(start + len(text), len(self._text))
        # A token begins where the one before ends: those of a character's first bytes have no text.
        at = bisect_left(self._ends, start)
        if start and self._ends[at : at + 1] == [start]:
            at += 1
        first = max(self._taken, at)
        self._taken = max(first, bisect_left(self._ends, end) + 1)
        self._at = end
        return list(tokens[first : self._taken])


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprob(token: SampledToken, tokenizer: ChatTokenizer) -> dict[str, Any]:
    def entry(token_id: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": log_prob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        **entry(token.token_id, token.log_prob),
        "top_logprobs": [entry(*alternative) for alternative in token.alternatives],
    }


def _usage(reply: Reply, tokenizer: ChatTokenizer) -> dict[str, Any]:
    return {
        "input_tokens": reply.n_prompt,
        "input_tokens_details": {
            "cached_tokens": reply.generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": reply.n_response,
        "output_tokens_details": {"reasoning_tokens": _n_reasoning(reply, tokenizer)},
        "total_tokens": reply.n_prompt + reply.n_response,
    }


def _n_reasoning(reply: Reply, tokenizer: ChatTokenizer) -> int:
    """Tokens up to the end of the thought; about as many where that is no token of its own."""
    if not reply.text.reasoning:
        return 0
    close = tokenizer.special.get(THINK_CLOSE)
    if close is not None:
        ends = np.flatnonzero(reply.generation.response_ids == close)
        return int(ends[0]) + 1 if len(ends) else reply.n_response
    if not reply.text.content and not reply.text.tool_calls:
        return reply.n_response
    return min(reply.n_response, len(tokenizer.encode(reply.text.reasoning)))
