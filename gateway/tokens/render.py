"""This module makes the ids of a prompt, whole or only what a stored turn does not hold yet (the
cut), so that every prompt extends what was sampled before it, token for token.

The cut, for a stored turn T and new messages N::

    render   [system?, user, assistant(content=NONCE, T's tool calls)] + N + generation prompt
    text     …<|im_start|>assistant\\nNONCE<|im_end|>\\n<|im_start|>user\\n…<|im_start|>assistant\\n
    cut                                   └─────────┴─ the new text: tokenise this ──────────────►
    ids      T.prompt + T.response + [turn close, if T ended without it] + ids of the new text

T's own text is never rendered or tokenised: its ids are the engine's. The turn-close token is found
by rendering a nonce. What stands between nonce and close must be what it was then, else the cut is
refused (`CutError`) and the caller renders the conversation whole, as a branch.

Owns: the cut. Does not own: which turn is extended (`graph.py`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2
import numpy as np

from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import Thinking
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import CALL_FORMS, ToolCall
from stepwell.gateway.reply.parser import THINK_CLOSE, THINK_OPEN
from stepwell.gateway.tokens.graph import BranchCause, ToolCalls, Turn, join
from stepwell.gateway.tokens.messages import (
    Key,
    Message,
    Tool,
    extend_key,
    parse_arguments,
    pictures_in,
    root_key,
    system_of,
)
from stepwell.gateway.tokens.tokenizer import ChatTokenizer

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError)
"""Errors that a chat template raises on a conversation that it cannot show."""
_REASONING_FIELD = re.compile(r"\b(reasoning_content|reasoning|thinking)\b")
_CASE = re.compile(r"[.|]\s*(lower|upper|casefold|capitalize|title|swapcase)\b")
_EXAMPLE_IDS = "call00000", "9other999"
"""Mistral's templates take nine letters and digits."""
_USER: Message = {"role": "user", "content": "."}
MAX_AROUND = 1024
_TAIL = 16
"""Ids decoded to see what they end with."""
_UNSEEN = ("unseen",)
_PROBES = (" a ", "\n\nb: 1\n- c\n\n", "\t{'d': [2, \"é\"]} <e>f</e> # 😀\t", "g " * 2000)
"""Messages that templates change, if they change any in which they look for nothing but white space
of these."""


class CutError(Exception):
    """The turn cannot be extended; `cause` says why the call becomes a branch."""

    def __init__(self, cause: BranchCause) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class TurnClose:
    """The template's end of an assistant turn: `middle` after the content, then the token."""

    middle: str
    text: str
    token_id: int
    is_next: bool = False
    """The token begins the next message: the template writes no other end, and the model samples
    this one (GLM)."""


@dataclass(frozen=True, slots=True)
class CallExample:
    """A tool call as the chat template writes it into an assistant's turn."""

    name: str
    arguments: Mapping[str, Any]
    tool: Tool
    prompt: str
    """Text that the turn follows, the tool included."""
    text: str
    """The turn, without a thought; with its beginning, if the prompt begins it otherwise."""
    before: str
    """Part of `text` that precedes the tool's name; "": it is not known where the turn begins."""
    after: str
    """Part of `text` that follows the name whatever the arguments are; "": not known."""
    before_argument: str
    """Part of `text` that follows the name if there are arguments, up to the first one's name."""


def call_example(tokenizer: ChatTokenizer) -> CallExample | None:
    """None: the chat template shows no calls."""
    name = f"f{secrets.token_hex(6)}"
    # Kimi-K2's shows the id of a call, which has the name in it.
    for ids in (_EXAMPLE_IDS, (f"functions.{name}:0", f"functions.{name}:1")):
        if (example := _call_example(tokenizer, name, *ids)) is not None:
            return example
    return None


def _call_example(
    tokenizer: ChatTokenizer, name: str, uid: str, other_uid: str
) -> CallExample | None:
    key = f"x{secrets.token_hex(6)}"
    tool = _example_tool(name, key)

    def render(*calls: Mapping[str, Any]) -> str:
        replies = [_for_template(_reply("", [call])) for call in calls]
        return tokenizer.render([_USER, *replies], [tool], {}, add_generation_prompt=not replies)

    try:
        prompt, text = render(), render(_example_call(name, {key: "."}, uid))
        empty = render(_example_call(name, {}, other_uid))
    except _REFUSALS:
        return None
    begin = prompt.rstrip().removesuffix(THINK_OPEN).rstrip()
    is_known = text.startswith(begin)
    said = text[len(begin if is_known else _shared(prompt, text)) :].lstrip("\n")
    if said.startswith(THINK_OPEN):  # an empty thought, as some templates show one
        said = said.partition(THINK_CLOSE)[2].lstrip("\n")
    before, found, rest = said.partition(name)
    if not found:
        return None
    # The id, what begins the arguments and white space before it are left to the model, unless
    # white space is all that ends the name.
    shared = _shared(rest, empty.rpartition(name)[2])
    after = shared.rstrip("{< \n") or shared.rstrip("{<")
    before, after = (before, after) if is_known else ("", "")
    before_argument = rest.partition(key)[0]
    return CallExample(name, {key: "."}, tool, prompt, said, before, after, before_argument)


def _shared(first: str, second: str) -> str:
    """The beginning that both have."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(c for c, _ in pairs)


class ChatRenderer:
    """Thread-safe after construction."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        thinking: Thinking = "preserve",
        placeholder: int | None = None,
    ) -> None:
        """`placeholder`: id that stands for a piece of a picture; None: the model takes none."""
        self.tokenizer = tokenizer
        self._placeholder = placeholder
        self._thinking = thinking
        secret = secrets.token_hex(6)
        self._nonce, self._thought = f"nonce{secret}", f"thought{secret}"
        # Templates take past thinking from a field of its own, or out of the content.
        self._reads_reasoning = bool(_REASONING_FIELD.search(tokenizer.template_text))
        # What templates do to a message depends on what they find in it.
        found = [*filter(_is_unprobed, tokenizer.template.looks_for()), *tokenizer.special]
        any_of = "|".join(map(re.escape, sorted(found, key=len))) or "(?!)"
        ignores_case = _CASE.search(tokenizer.template_text) is not None
        self._looked_for = re.compile(any_of, re.IGNORECASE if ignores_case else 0)
        self._around: dict[tuple[Key, str, int], tuple[str, ...] | None] = {}
        """Texts around a plain message, by the key of root and system message, and name and length
        of the id of the call that it answers; None: not found yet."""
        self._system_anywhere = True
        self._close = self._find_close()
        self._tool_close = self._find_tool_close(self._close)
        self._section_end = self._find_section_end(self._tool_close)
        # Templates may refuse or drop a system message that is not the first; agents send them all
        # the same, and then it is shown as a user's.
        later = [_USER, _reply("."), {"role": "system", "content": self._nonce}]
        self._system_anywhere = self._shows(self._nonce, later)
        self._call = call_example(tokenizer)
        self.shows_tools = self._shows(self._nonce, [_USER], [_example_tool(self._nonce, "x")])
        """False: the chat template leaves tools out of the prompt."""

    @property
    def turn_close_id(self) -> int | None:
        """Id that ends an assistant turn; None if the template writes no special token there."""
        return self._close.token_id if self._close is not None else None

    @property
    def closes_turns(self) -> bool:
        """The template ends an assistant turn that no message follows, too."""
        return self._close is not None and not self._close.is_next

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
        text = self.text(messages, tools, template_args)
        ids = self.tokenizer.encode(text, context)
        if len(ids) == 0:
            raise RequestError("messages render to an empty prompt; send some text", "messages")
        return ids if self._placeholder is None else self._expanded(ids, messages)

    def suffix(
        self,
        turn: Turn,
        known: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        context: int | None = None,
        key: Key | None = None,
    ) -> TokenIds:
        """Ids that extend `turn` to the prompt of `known + new`.

        Args:
            key: of the system message that `known` begins with, under the root of the others;
                None: it is made here.

        Raises:
            CutError: the template gives no safe place to cut.
            RequestError: the chat template refuses the conversation.
            ContextLengthError: the new ones certainly have more tokens than `context`.
        """
        close = self._tool_close if turn.calls else self._close
        if close is None:
            raise CutError("no_turn_close")
        system = system_of(known)
        text = self._plain(turn.calls, system, new, tools, template_args, key)
        calls = _entries(turn.calls) if text is None or self._thinking == "template" else []
        before = [*system, _USER]
        if text is None:
            text = self._behind_nonce([*before, self._stub(calls), *new], tools, template_args)
        middle = close.middle
        if turn.calls:
            middle = middle.replace(_EXAMPLE_IDS[0], turn.calls[-1][0])
        last = turn.response_ids[-1]
        users = self._close  # GLM's differs from the tool's, which the turn may have ended with
        if users and last != close.token_id and text.startswith(middle + users.text):
            close = users
        if not text.startswith(middle + close.text):
            raise CutError("cut_failed")
        if self._thinking == "template" and turn.has_reasoning:
            stub = self._stub(calls, thought=True)
            if self._thought not in self.text([*before, stub, *new], tools, template_args):
                raise CutError("thinking_stripped")
        # Encoded together with the close token, so that what follows it is split as it always is.
        ids = self.tokenizer.encode(text[len(middle) :], context)
        if len(ids) < 2 or ids[0] != close.token_id:
            raise CutError("cut_failed")
        ids = ids[1:] if last == close.token_id else ids
        if turn.calls and self._section_end is not None:
            closing, end = self._section_end
            if self.tokenizer.decode(turn.response_ids[-_TAIL:].tolist()).endswith(closing):
                ids = join([end, ids])
        return ids if self._placeholder is None else self._expanded(ids, new)

    def _expanded(self, ids: TokenIds, messages: Sequence[Message]) -> TokenIds:
        """Ids in which each picture of `messages` has as many placeholders as it has tokens, and
        not the one that templates write.

        Raises:
            RequestError: the text shows another number of pictures.
        """
        sizes = [part["n_tokens"] for part in pictures_in(messages)]
        at = np.flatnonzero(ids == self._placeholder)
        if len(at) != len(sizes):
            raise RequestError(
                f"messages hold {len(sizes)} pictures and the model's chat template shows "
                f"{len(at)}; leave the text of its placeholder out, and send pictures where it "
                "shows them",
                "messages",
            )
        if not sizes:
            return ids
        counts = np.ones(len(ids), np.int64)
        counts[at] = sizes
        expanded = np.repeat(ids, counts)
        expanded.flags.writeable = False
        return expanded

    def call_opening(
        self,
        name: str | None,
        tools: Sequence[Tool] | None,
        prompt_ids: TokenIds | None = None,
    ) -> str | None:
        """Beginning of a reply that calls a tool: `name`, or any for None.

        Args:
            tools: whose parameters say if a call has arguments.
            prompt_ids: end with what the reply follows; a thought begun there is closed first.

        None: the chat template does not show where a call begins, or where the name ends.
        """
        if self._call is None or not self._call.before:
            return None
        opening = self._call.before
        if name is not None:
            after = self._call.after
            if not after and _requires_arguments(name, tools or ()):
                after = self._call.before_argument
            if not after:
                return None
            opening += name + after
        if prompt_ids is not None:
            tail = self.tokenizer.decode(prompt_ids[-_TAIL:].tolist())
            if tail.rstrip().endswith(THINK_OPEN):
                return f"{THINK_CLOSE}\n\n{opening}"
        return opening

    # -- a plain message ---------------------------------------------------------------------

    def _plain(
        self,
        calls: ToolCalls,
        system: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        key: Key | None,
    ) -> str | None:
        """`_behind_nonce` of a turn that one message follows, in which the template looks for
        nothing: what stands around it is known from other messages. The turn has no calls and the
        message is a user's, or it has one call and the message is the tool's. None: it is to be
        rendered."""
        if len(new) != 1:
            return None
        (message,), name, call_id = new, "", ""
        if calls:
            _, name, _ = calls[0]
            call_id = message.get("tool_call_id") or ""
            if len(calls) > 1 or call_id != calls[0][0] or call_id == call_id[::-1]:
                return None
        if len(message) != (3 if calls else 2) or message["role"] != ("tool" if calls else "user"):
            return None
        content: str = message["content"]
        if type(content) is not str or not content or content.isspace():
            return None
        if self._looked_for.search(content) is not None:
            return None
        if key is None:
            key = root_key(tools, template_args)
            for each in system:
                key = extend_key(key, each)
        place = key, name, len(call_id)
        around = self._around.get(place, _UNSEEN)
        if around is _UNSEEN:  # to find it costs some renderings: the first one tells nothing
            if len(self._around) >= MAX_AROUND:
                self._around.clear()
            self._around[place] = None
            return None
        if around is None:
            before = [*system, _USER]
            around = self._find_around(before, _entries(calls), message, tools, template_args)
            self._around[place] = around
        return content.join(around) if around else None

    def _find_around(
        self,
        before: Sequence[Message],
        calls: Sequence[Mapping[str, Any]],
        message: Message,
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
    ) -> tuple[str, ...]:
        """Texts before and behind a message like this; empty: they depend on what it says, or on
        the id of its call."""

        def rendered(content: str, *, reverse_id: bool = False) -> str:
            asked, answer = calls, {**message, "content": content}
            if reverse_id:
                asked = [{**call, "id": call["id"][::-1]} for call in calls]
                answer["tool_call_id"] = message["tool_call_id"][::-1]
            messages = [*before, self._stub(asked), answer]
            return self._behind_nonce(messages, tools, template_args)

        try:
            around = tuple(rendered(self._thought).split(self._thought))
            is_same = all(rendered(probe) == probe.join(around) for probe in _PROBES)
            if calls:
                said = self._thought.join(around)
                is_same = is_same and rendered(self._thought, reverse_id=True) == said
        except (CutError, RequestError):
            return ()
        return around if is_same and len(around) == 2 else ()

    # -- the template ------------------------------------------------------------------------

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat template's text.

        Raises:
            RequestError: it refuses the conversation.
        """
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

    def _behind_nonce(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
    ) -> str:
        """The template's text behind the last nonce.

        Raises:
            CutError: it shows none.
            RequestError: as of `text`.
        """
        _, found, behind = self.text(messages, tools, template_args).rpartition(self._nonce)
        if not found:
            raise CutError("cut_failed")
        return behind

    def _stub(self, calls: Sequence[Mapping[str, Any]] = (), *, thought: bool = False) -> Message:
        """An assistant message whose last rendered word before the turn close is the nonce."""
        calls = list(calls)
        if calls:
            last = calls[-1]
            arguments = {"nonce": self._nonce}
            calls[-1] = _example_call(last["function"]["name"], arguments, last["id"])
        reply = _reply(self._nonce, calls)
        if thought and self._reads_reasoning:
            reply["reasoning_content"] = self._thought
        elif thought:
            reply["content"] = f"<think>\n{self._thought}\n</think>\n\n{self._nonce}"
        return reply

    def _shows(self, text: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        try:
            return text in self.text(messages, tools, {})
        except RequestError:
            return False

    def _find_close(self) -> TurnClose | None:
        """Find the end of a turn: in what follows the nonce when nothing comes after the turn."""
        tail = self._after_nonce(self._stub())
        special = self.tokenizer.special
        places = [(tail.find(t), -len(t), t) for t in special if t and t in tail]
        if not places:
            close = self._find_next(tail, self._stub(), _USER)
            return close if close is not None and self._shows(close.text, [_USER]) else None
        at, _, token = min(places)
        return TurnClose(tail[:at], token, special[token])

    def _find_tool_close(self, close: TurnClose | None) -> TurnClose | None:
        """Find the end of a turn that ends with a tool call: it has the same token as `close`, or
        that of the tool's message."""
        if close is None:
            return None
        call = _example_call("f", {})
        reply = self._stub([call])
        tail = self._after_nonce(reply)
        if close.is_next:
            answer = {"role": "tool", "content": ".", "tool_call_id": call["id"]}
            return self._find_next(tail, reply, answer)
        middle, found, _ = tail.partition(close.text)
        return TurnClose(middle, close.text, close.token_id) if found else None

    def _find_section_end(self, close: TurnClose | None) -> tuple[str, TokenIds] | None:
        """Find the ids that end the section of a turn's calls, and the text before them: a turn
        that was stopped behind its first call lacks them."""
        for form in CALL_FORMS.values():
            if close is not None and (end := form.section[1]):
                _, found, after = close.middle.rpartition(form.closing)
                if found and after.strip() == end:
                    return form.closing, self.tokenizer.encode(after)
        return None

    def _find_next(self, tail: str, reply: Message, following: Message) -> TurnClose | None:
        """Find the token that a message behind `reply` begins with, if no other one does."""
        behind = self._after_nonce(reply, following, add_generation_prompt=True)
        if not behind.startswith(tail):
            return None
        begin, special = behind[len(tail) :], self.tokenizer.special
        token = max((t for t in special if t and begin.startswith(t)), key=len, default=None)
        if token is None or begin.count(token) > 1:  # it says nothing of whose turn it is
            return None
        return TurnClose(tail, token, special[token], is_next=True)

    def _after_nonce(self, *replies: Message, add_generation_prompt: bool = False) -> str:
        messages = [_USER, *replies]
        try:
            text = self.text(messages, None, {}, add_generation_prompt=add_generation_prompt)
        except RequestError:
            return ""
        _, found, tail = text.rpartition(self._nonce)
        return tail if found else ""


def _is_unprobed(text: str) -> bool:
    """True unless `_PROBES` show what a template does where it finds this text."""
    return bool(text.strip()) or not any(text in probe for probe in _PROBES)


def _entries(calls: ToolCalls) -> list[dict[str, Any]]:
    """Calls as entries of a message."""
    return [ToolCall(*call).entry() for call in calls]


def _requires_arguments(name: str, tools: Sequence[Tool]) -> bool:
    functions = (tool.get("function", {}) for tool in tools)
    parameters = next((f.get("parameters") for f in functions if f.get("name") == name), None)
    return isinstance(parameters, dict) and bool(parameters.get("required"))


def _example_tool(name: str, key: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": "."}},
        "required": [key],
    }
    function = {"name": name, "description": ".", "parameters": parameters}
    return {"type": "function", "function": function}


def _example_call(
    name: str, arguments: Mapping[str, Any], uid: str = _EXAMPLE_IDS[0]
) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": uid, "type": "function", "function": function}


def _reply(content: str, calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    reply: Message = {"role": "assistant", "content": content}
    return {**reply, "tool_calls": list(calls)} if calls else reply


class _Arguments(dict[str, Any]):
    """A call's arguments: an object, and its JSON where a template joins it to text (DeepSeek)."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _for_template(message: Message) -> Message:
    """A message as templates expect it: arguments as values, no empty `tool_calls`."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_with_values, calls)]} if calls else message


def _with_values(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parse_arguments(function["arguments"])
    if isinstance(arguments, dict):
        arguments = _Arguments(arguments)
    # The name first, as models write it: Mistral's templates show the object as it is.
    function = {"name": function["name"], **function, "arguments": arguments}
    return {**call, "function": function}
