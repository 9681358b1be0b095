"""This module reads sampled ids as a reply while they arrive, so that agents get text and calls.

    ids ──► control tokens hidden ──► text ──► StopCutter ──► ReplyParser ──► deltas
                                        └── no stop strings, no markup: a delta as it stands

Control tokens are no text: the turn close and other special tokens are hidden, except those that
the parser reads (<think>, and <tool_call> or what else marks the model's calls). How a model writes
tool calls is found out by example: the style is the one in which a call reads back as the chat
template wrote it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import CallStyle, GatewayConfig
from stepwell.gateway.reply.calls import CALL_FORMS, ToolCall
from stepwell.gateway.reply.parser import (
    PYTHON_TAG,
    THINK_CLOSE,
    THINK_OPEN,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyParser,
    StopCutter,
)
from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.tokens.render import CallExample, call_example
from stepwell.gateway.tokens.tokenizer import ChatTokenizer, TokenStream

_SHOWN = {THINK_OPEN, THINK_CLOSE, PYTHON_TAG, *CALL_FORMS["hermes"].markup}
"""Control tokens that are text in every reply."""
_TAIL = 64
"""Prompt tokens decoded to see what the generation prompt already opened."""


class ReplyFormat:
    """Format of the served model's replies. One per app."""

    def __init__(self, tokenizer: ChatTokenizer, config: GatewayConfig) -> None:
        self._tokenizer = tokenizer
        self._tools = config.tool_parser != "none"
        chat_template = tokenizer.template_text
        self._reasoning = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and THINK_OPEN in chat_template
        )
        self._special = frozenset(tokenizer.special.values())
        self._hidden = frozenset(i for t, i in tokenizer.special.items() if t not in _SHOWN)
        self._hidden_in_calls = self._hidden
        example = call_example(tokenizer)
        self.style: CallStyle = "hermes"
        """Form in which calls are read."""
        if config.tool_parser == "auto":
            self.style = next((s for s in CALL_FORMS if self._reads(example, s)), "hermes")
        elif config.tool_parser != "none":
            self.style = config.tool_parser
        self.reads_calls = self._reads(example, self.style)
        """A call as the chat template writes it is read as one."""
        form = CALL_FORMS[self.style]
        self._hidden_in_calls -= {i for t, i in tokenizer.special.items() if t in form.markup}
        self.calls_once = not form.opening
        """A reply holds one tool call at most."""
        closing = form.closing
        self.call_close = closing if closing and closing in chat_template else None
        """Text that ends a tool call; None: not known."""

    def reader(
        self,
        prompt_ids: TokenIds,
        *,
        tools: Sequence[Tool] | None,
        parse_tools: bool,
        stop: Sequence[str],
        raw: bool = False,
        style: CallStyle | None = None,
        counts: bool = False,
        first_call: int | None = None,
        constraint: tuple[str, str] | None = None,
    ) -> ReplyText:
        """
        Args:
            constraint: see `ChatRequest`.
            counts: see `ReplyText.told`.
            first_call: see `ReplyParser`.
            raw: the reply is plain text; nothing in it is a tool call or a thought.
            style: how tool calls are written; None: as the model does.
        """
        reads_calls = self._tools and parse_tools and not raw
        reads_thoughts = self._reasoning and not raw
        parser = None
        if reads_calls or reads_thoughts:
            tail = prompt_ids[-_TAIL:].tolist() if reads_thoughts else ()
            kind, grammar = constraint or ("", THINK_CLOSE)
            is_json = kind == "json_schema"
            opened = self._tokenizer.decode(tail).rstrip().endswith(THINK_OPEN)
            parser = ReplyParser(
                tools=reads_calls,
                reasoning=reads_thoughts,
                starts_in_reasoning=opened and (is_json or THINK_CLOSE in grammar),
                is_json=is_json,
                style=style or self.style,
                offered=tools,
                first_call=first_call,
            )
        hidden = self._hidden_in_calls if reads_calls else self._special if raw else self._hidden
        return ReplyText(self._tokenizer, hidden, parser, stop, counts=counts)

    def _reads(self, example: CallExample | None, style: CallStyle) -> bool:
        if example is None or not self._tools:
            return False
        prompt_ids = self._tokenizer.encode(example.prompt)
        tools = [example.tool]
        reader = self.reader(prompt_ids, tools=tools, parse_tools=True, stop=(), style=style)
        thought_open = example.prompt.rstrip().endswith(THINK_OPEN)
        reader.begin(f"{THINK_CLOSE}\n\n{example.text}" if thought_open else example.text)
        reader.finish()
        calls = [(c.name, json.loads(c.arguments)) for c in reader.tool_calls]
        return calls == [(example.name, example.arguments)]


class ReplyText:
    """One reply: text, thought and tool calls, and how they are read while its ids arrive. All of
    it is what the deltas so far add up to."""

    content = reasoning = ""
    has_reasoning = False
    stop_sequence: str | None = None
    """The stop string that ended the text."""
    _stream: TokenStream | None = None
    _decoded = ""
    _n_fed = _n_told = 0

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        hidden: frozenset[int],
        parser: ReplyParser | None,
        stop: Sequence[str],
        *,
        counts: bool = False,
    ) -> None:
        """
        Args:
            parser: None: the text holds no markup.
        """
        self.tool_calls: list[ToolCall] = []
        self.told: list[int] = []
        """Number of ids told up to and with each delta, if they are counted: a delta tells an id
        whose text is whole and not held back. Ids are read one by one then."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._parser = parser
        self._stops = stop
        self._stop = StopCutter(stop) if stop else None
        self._ids: list[int] = []
        self._counts = counts
        self._ends: deque[int] = deque()
        """Ends in the text of the ids that are not told yet; ids of half a character have none."""

    def message(self) -> Message:
        """The reply as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [c.entry() for c in self.tool_calls]
        return message

    def begin(self, text: str) -> list[Delta]:
        """Read the reply's text before the first sampled id."""
        return self._parse(text)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Read ids as they arrive."""
        if self._counts:
            return [delta for token_id in ids for delta in self._count(token_id)]
        return self._feed(ids)

    def finish(self, ids: Sequence[int] = ()) -> list[Delta]:
        """Read the end of the reply.

        Args:
            ids: all of it, of an answer that nobody follows: they are read in one piece.
        """
        deltas: list[Delta] = []
        self._ids += self._shown(ids)
        if self._stream is None and self._stop is None and self._parser is None:
            text = self._tokenizer.decode(self._ids)
            self.has_reasoning, self.content = THINK_CLOSE in text, self.content + text
            return [ContentDelta(text)] if text else []
        if self._stream is None or self._stream.is_within_character:
            # The stream keeps back bytes that are no character yet; now they show as U+FFFD.
            whole = self._tokenizer.decode(self._ids)
            if whole.startswith(self._decoded):
                deltas += self._read(whole[len(self._decoded) :])
        if self._stop is not None or self._parser is not None:
            held = "" if self._stop is None else self._stop.finish()
            deltas += self._parse(held, is_end=True)
        self.has_reasoning = bool(self.reasoning) or THINK_CLOSE in self._decoded
        if deltas and self._counts:
            self.told[-1] = self._n_fed
        return deltas

    def n_until_stop(self, ids: Sequence[int]) -> int:
        """Number of `ids` that complete the stop string that ended the text.

        The engine ends generation there itself, unless the string fell across a resumption: then it
        may even end at a later one.
        """
        if ids[-1] not in self._hidden and all(s not in self._decoded[:-1] for s in self._stops):
            return len(ids)  # nothing follows
        low, high = 0, len(ids)
        while low + 1 < high:
            middle = (low + high) // 2
            text = self._tokenizer.decode(self._shown(ids[:middle]))
            if any(s in text for s in self._stops):
                high = middle
            else:
                low = middle
        return high

    def _shown(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids that are not hidden."""
        if ids and ids[-1] in self._hidden:  # mostly the only one
            ids = ids[:-1]
        return ids if self._hidden.isdisjoint(ids) else [i for i in ids if i not in self._hidden]

    def _feed(self, ids: Sequence[int]) -> list[Delta]:
        shown = self._shown(ids)
        self._ids += shown
        if self._stream is None:
            self._stream = self._tokenizer.stream()
        return self._read(self._stream.feed(shown))

    def _count(self, token_id: int) -> list[Delta]:
        before = len(self._decoded)
        deltas = self._feed([token_id])
        self._n_fed += 1
        n_open = self._n_fed - self._n_told - len(self._ends)
        if len(self._decoded) > before or (token_id in self._hidden and n_open == 1):
            self._ends += [len(self._decoded)] * n_open
        n_held = 0 if self._parser is None else self._parser.n_held
        n_held += 0 if self._stop is None else self._stop.n_held
        told = len(self._decoded) - n_held
        while self._ends and self._ends[0] <= told:
            self._ends.popleft()
            self._n_told += 1
        if deltas:
            self.told[-1] = self._n_told
        return deltas

    def _read(self, text: str) -> list[Delta]:
        """Read decoded text."""
        self._decoded += text
        if self._stop is not None:
            text = self._stop.feed(text)
            self.stop_sequence = self._stop.matched
        return self._parse(text)

    def _parse(self, text: str, *, is_end: bool = False) -> list[Delta]:
        """Read text in which stop strings are no more."""
        deltas: list[Delta] = []
        if self._parser is not None:
            deltas = self._parser.feed(text) if text else []
            deltas += self._parser.finish() if is_end else ()
        elif text:
            deltas.append(ContentDelta(text))
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content += delta.text
            elif isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
            else:
                self.tool_calls.append(delta)
            self.told.append(self.told[-1] if self.told else 0)
        return deltas
