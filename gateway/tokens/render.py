"""Conversation → prompt ids: whole, or only what a stored turn does not hold yet (the cut).

The cut, for a stored turn T and new messages N::

    render   [system?, user, assistant(content=NONCE, T's tool calls)] + N + generation prompt
    text     …<|im_start|>assistant\\nNONCE<|im_end|>\\n<|im_start|>user\\n…<|im_start|>assistant\\n
    cut                                   └─────────┴─ the new text: tokenise this ──────────────►
    ids      T.prompt + T.response + [turn close, if T ended without it] + ids of the new text

T's own text is never rendered or tokenised: its ids are the engine's. The turn-close token is found
by rendering a nonce. What stands between nonce and close must be what it was then, else the cut is
refused (`CutError`) and the caller renders the conversation whole, as a branch.

Owns: the cut and the cache of whole prompts. Does not own: which turn is extended (`graph.py`).
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2

from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import Thinking
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.reply.parser import THINK_CLOSE, THINK_OPEN
from stepwell.gateway.tokens.graph import BranchCause, Turn
from stepwell.gateway.tokens.messages import Key, Message, Tool, parse_arguments
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError)
"""What a chat template raises on a conversation that it cannot show."""
_REASONING_FIELD = re.compile(r"\b(reasoning_content|reasoning|thinking)\b")


class CutError(Exception):
    """The turn cannot be extended; `cause` says why the call becomes a branch."""

    def __init__(self, cause: BranchCause) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class TurnClose:
    """How the template ends an assistant turn: `middle` after the content, then the token."""

    middle: str
    text: str
    token_id: int


@dataclass(frozen=True, slots=True)
class CallExample:
    """A tool call as the chat template writes it into an assistant's turn."""

    tool: Tool
    arguments: Mapping[str, Any]
    prompt: str
    """What the turn follows, the tool included."""
    text: str
    """The turn, without a thought."""
    before: str
    """Of `text`: what precedes the tool's name."""
    after: str
    """Of `text`: what follows the name whatever the arguments are."""

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


def call_example(tokenizer: ChatTokenizer) -> CallExample | None:
    """None: the chat template shows no calls, or not where a turn begins."""
    secret = secrets.token_hex(6)
    name, key = f"f{secret}", f"x{secret}"
    tool = _example_tool(name, key)
    user: Message = {"role": "user", "content": "."}

    def render(*arguments: Mapping[str, Any]) -> str:
        messages = [user]
        for each in arguments:
            function = {"name": name, "arguments": each}
            call = {"id": "call00000", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return tokenizer.render(messages, [tool], {}, add_generation_prompt=not arguments)

    try:
        prompt, text, empty = render(), render({key: "."}), render({})
    except _REFUSALS:
        return None
    begin = prompt.rstrip().removesuffix(THINK_OPEN).rstrip()
    if not text.startswith(begin):
        return None
    said = text[len(begin) :].lstrip("\n")
    if said.startswith(THINK_OPEN):  # an empty thought, as some templates show one
        said = said.partition(THINK_CLOSE)[2].lstrip("\n")
    before, found, rest = said.partition(name)
    if not found:
        return None
    # What begins the arguments, and white space before it, is left to the model.
    pairs = takewhile(lambda cs: cs[0] == cs[1], zip(rest, empty.rpartition(name)[2], strict=False))
    after = "".join(c for c, _ in pairs).rstrip("{< \n")
    return CallExample(tool, {key: "."}, prompt, said, before, after)


def _example_tool(name: str, key: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": "."}},
        "required": [key],
    }
    function = {"name": name, "description": ".", "parameters": parameters}
    return {"type": "function", "function": function}


class ChatRenderer:
    """Thread-safe after construction: the prompt cache is only touched from the event loop."""

    def __init__(
        self, tokenizer: ChatTokenizer, *, thinking: Thinking = "preserve", cache_tokens: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self._thinking = thinking
        secret = secrets.token_hex(6)
        self._nonce, self._thought = f"nonce{secret}", f"thought{secret}"
        # Templates take past thinking from a field of its own, or out of the content.
        self._reads_reasoning = bool(_REASONING_FIELD.search(tokenizer.template_text))
        self._cache: OrderedDict[Key, TokenIds] = OrderedDict()
        self._cache_limit, self._cached_tokens = cache_tokens, 0
        self._system_anywhere = True
        self._close = self._discover(with_tool_calls=False, close=None)
        self._tool_close = self._discover(with_tool_calls=True, close=self._close)
        self._system_anywhere = self._renders_later_system()
        self._call = call_example(tokenizer)
        self.shows_tools = self._renders_tools()
        """False: the chat template leaves tools out of the prompt."""

    @property
    def turn_close_id(self) -> int | None:
        """Id that ends an assistant turn; None if the template writes no special token there."""
        return self._close.token_id if self._close is not None else None

    def whole(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        context: int | None = None,
    ) -> TokenIds:
        """Ids of a whole prompt.

        Raises:
            RequestError: the chat template refuses the conversation.
            ContextLengthError: it certainly has more tokens than `context`.
        """
        text = self._render(messages, tools, template_args)
        ids = self.tokenizer.encode(text, context)
        if len(ids) == 0:
            raise RequestError("messages render to an empty prompt; send some text", "messages")
        return ids

    def suffix(
        self,
        turn: Turn,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        context: int | None = None,
    ) -> TokenIds:
        """Ids that extend `turn` to the prompt of `known + new`.

        Raises:
            CutError: the template gives no safe place to cut.
            RequestError: the chat template refuses the conversation.
            ContextLengthError: the new ones certainly have more tokens than `context`.
        """
        calls = [ToolCall(*call).entry() for call in turn.calls]
        close = self._tool_close if calls else self._close
        if close is None:
            raise CutError("no_turn_close")
        stub: list[Message] = [m for m in known[:1] if m["role"] == "system"]
        stub += [{"role": "user", "content": "."}, self._stub_reply(calls, thought=False)]
        text = self._render([*stub, *new], tools, template_args)
        start = text.rfind(self._nonce)
        if start < 0 or not text.startswith(close.middle + close.text, start + len(self._nonce)):
            raise CutError("cut_failed")
        if (
            self._thinking == "template"
            and turn.has_reasoning
            and not self._keeps_thinking(stub[:-1], calls, new, tools, template_args)
        ):
            raise CutError("thinking_stripped")
        # Encoded together with the close token, so that what follows it is split as it always is.
        ids = self.tokenizer.encode(text[start + len(self._nonce) + len(close.middle) :], context)
        if len(ids) < 2 or ids[0] != close.token_id:
            raise CutError("cut_failed")
        return ids[1:] if turn.response_ids[-1] == close.token_id else ids

    def call_opening(self, name: str | None, prompt_ids: TokenIds | None = None) -> str | None:
        """How a reply begins that calls a tool: `name`, or any for None.

        Args:
            prompt_ids: end with what the reply follows; a thought begun there is closed first.

        None: the chat template does not show where a call begins.
        """
        if self._call is None or (name is not None and not self._call.after):
            return None
        opening = self._call.before
        if name is not None:
            opening += name + self._call.after
        if prompt_ids is not None:
            tail = self.tokenizer.decode(prompt_ids[-16:].tolist())
            if tail.rstrip().endswith(THINK_OPEN):
                return f"{THINK_CLOSE}\n\n{opening}"
        return opening

    def cached(self, key: Key) -> TokenIds | None:
        """The whole prompt of this `exact_key`, if it is remembered."""
        ids = self._cache.get(key)
        if ids is not None:
            self._cache.move_to_end(key)
        return ids

    def remember(self, key: Key, ids: TokenIds) -> None:
        """Keep a whole prompt for the other rollouts of its group; the least used ones go."""
        if key in self._cache or len(ids) > self._cache_limit:
            return
        self._cache[key] = ids
        self._cached_tokens += len(ids)
        while self._cached_tokens > self._cache_limit:
            _, old = self._cache.popitem(last=False)
            self._cached_tokens -= len(old)

    def forget(self) -> None:
        """All whole prompts: they are somebody's text."""
        self._cache.clear()
        self._cached_tokens = 0

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        shown = [_for_template(m) for m in messages]
        if not self._system_anywhere:
            shown[1:] = [{**m, "role": "user"} if m["role"] == "system" else m for m in shown[1:]]
        try:
            return self.tokenizer.render(
                shown, tools, template_args, add_generation_prompt=add_generation_prompt
            )
        except _REFUSALS as e:
            raise RequestError(
                f"the model's chat template refuses these messages: {e!s:.300}", "messages"
            ) from e

    def _stub_reply(self, calls: Sequence[Mapping[str, Any]] | None, *, thought: bool) -> Message:
        """An assistant message whose last rendered word before the turn close is the nonce."""
        reply: Message = {"role": "assistant", "content": self._nonce}
        if thought and self._reads_reasoning:
            reply["reasoning_content"] = self._thought
        elif thought:
            reply["content"] = f"<think>\n{self._thought}\n</think>\n\n{self._nonce}"
        if calls:
            *first, last = calls
            function = {"name": last["function"]["name"], "arguments": {"nonce": self._nonce}}
            reply["tool_calls"] = [*first, {**last, "function": function}]
        return reply

    def _keeps_thinking(
        self,
        stub: Sequence[Message],
        calls: Sequence[Mapping[str, Any]] | None,
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
    ) -> bool:
        reply = self._stub_reply(calls, thought=True)
        return self._thought in self._render([*stub, reply, *new], tools, template_args)

    def _renders_later_system(self) -> bool:
        """Templates may refuse or drop a system message that is not the first; agents send them
        all the same, and then it is shown as a user's."""
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "."},
            {"role": "system", "content": self._nonce},
        ]
        try:
            return self._nonce in self._render(messages, None, {})
        except RequestError:
            return False

    def _renders_tools(self) -> bool:
        tool = _example_tool(self._nonce, self._thought)
        try:
            return self._nonce in self._render([{"role": "user", "content": "."}], [tool], {})
        except RequestError:
            return False

    def _discover(self, *, with_tool_calls: bool, close: TurnClose | None) -> TurnClose | None:
        """How the template closes a turn, from what follows the nonce when nothing comes after."""
        calls = None
        if with_tool_calls:
            if close is None:
                return None
            calls = [
                {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
            ]
        messages = [{"role": "user", "content": "."}, self._stub_reply(calls, thought=False)]
        try:
            text = self._render(messages, None, {}, add_generation_prompt=False)
        except RequestError:
            return None
        _, found, tail = text.rpartition(self._nonce)
        if not found:
            return None
        if close is not None:
            middle, found, _ = tail.partition(close.text)
            return TurnClose(middle, close.text, close.token_id) if found else None
        places = [(tail.find(t), -len(t), t) for t in self.tokenizer.special if t and t in tail]
        if not places:
            return None
        at, _, token = min(places)
        return TurnClose(tail[:at], token, self.tokenizer.special[token])


def _for_template(message: Message) -> Message:
    """A message as templates expect it: arguments as values, no empty `tool_calls`."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [
            {
                **c,
                "function": {
                    **c["function"],
                    "arguments": parse_arguments(c["function"]["arguments"]),
                },
            }
            for c in calls
        ],
    }
