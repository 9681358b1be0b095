"""The turn graph of one trajectory: which stored turn a request extends, and with which ids.

One turn is one LLM call. Its prompt is its parent's tokens plus `new_prompt_ids`; nothing is stored
twice, and prompt(child) strictly extends prompt(parent) + response(parent) by construction::

    turn 0   [system, user]                      ──► reply 0        (root: rendered whole)
    turn 1     └─ + [tool result]                ──► reply 1        extends turn 0
    turn 2     └─ + [tool result']               ──► reply 2        a fork: extends turn 0 too
    turn 3   [system, summary of the above]      ──► reply 3        a branch: extends nothing

A request attaches to the deepest stored turn whose conversation (prompt messages and reply, in
canonical form, under the same tools and template arguments) it begins with. A request that attaches
to none starts a branch, and the cause says why. Pure: no I/O, no tokenizer, no lock.

A turn is kept as a row, a plain tuple of numbers, bytes and arrays. The garbage collector stops
tracking such a tuple after a look or two, so collections take no longer with many turns in memory.
With objects instead, a collection walked through all turns of all trajectories and stopped every
call in flight for 55 to 90 ms. `Turn` is a row as it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from stepwell.datapool.types import Step, TokenIds
from stepwell.gateway.tokens.messages import Key, Message, extend_key, text_key, text_prefix_keys

BranchCause: TypeAlias = Literal[
    "resampled",  # the same first prompt again
    "tools_changed",  # a known conversation under other tools or template arguments
    "history_edited",  # holds assistant turns, but none that was generated here
    "new_conversation",  # no assistant turn yet: a side call, a title, a sub-agent
    "thinking_stripped",  # the chat template drops past thinking (`thinking: template`)
    "no_turn_close",  # the template writes no token after an assistant turn to cut at
    "cut_failed",  # the template renders the turn otherwise in this conversation
    "continued",  # a plain prompt that is a first prompt with its reply, and nothing more
]


Calls: TypeAlias = tuple[tuple[str, str, str], ...]
"""Tool calls of a reply: their ids, names and arguments."""


class Turn(NamedTuple):
    """One generated turn. Arrays are read-only."""

    graph: TurnGraph
    number: int
    """Of its row in `graph`."""
    parent_number: int | None
    new_prompt_ids: TokenIds
    """What the prompt adds to the parent's prompt and response."""
    response_ids: TokenIds
    n_tokens: int
    """Prompt plus response."""
    prompt_key: Key
    """Key of the conversation the model was shown."""
    key: Key
    """Key of that conversation plus the reply."""
    calls: Calls
    """The reply's tool calls; its text is in its ids."""
    has_reasoning: bool
    """This turn, or one that its prompt holds token for token, has thinking in it."""
    step_index: int | None
    """None: white-box, its Step is submitted by the agent itself."""

    @property
    def parent(self) -> Turn | None:
        return None if self.parent_number is None else self.graph.turn(self.parent_number)

    def prompt(self) -> list[TokenIds]:
        """The prompt, from the root on, in pieces."""
        parent = self.parent
        return [*(parent.arrays() if parent is not None else ()), self.new_prompt_ids]

    def arrays(self) -> list[TokenIds]:
        """Prompt and response, from the root on, in pieces."""
        pieces: list[TokenIds] = []
        turn: Turn | None = self
        while turn is not None:
            pieces += (turn.response_ids, turn.new_prompt_ids)
            turn = turn.parent
        return pieces[::-1]

    def nearest_step(self) -> int | None:
        """The deepest Step that this turn's tokens extend or are."""
        turn: Turn | None = self
        while turn is not None:
            if turn.step_index is not None:
                return turn.step_index
            turn = turn.parent
        return None


@dataclass(frozen=True, slots=True)
class Attachment:
    """Where a request goes on. `turn` is None for the first call and for branches."""

    turn: Turn | None
    n_known: int
    """Messages that `turn` covers; the rest are new."""
    prompt_key: Key
    cause: BranchCause | None
    """Why nothing was extended; None for the first call and for extensions."""


class TurnGraph:
    """Turns of one trajectory by the key of their conversation; the latest of equal ones wins."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        """Fields of `Turn` behind its number."""
        self._by_key: dict[Key, int] = {}
        self._prompts: set[Key] = set()
        self._roots: dict[Key, None] = {}
        self.n_tokens = 0
        """Of all turns; what turns share counts once."""
        self._text_lengths: set[int] = set()

    def turn(self, number: int) -> Turn:
        return Turn(self, number, *self._rows[number])

    def attach(self, root: Key, messages: Sequence[Mapping[str, Any]]) -> Attachment:
        deepest, n_known = None, 0
        key = root
        for i, (key, role) in enumerate(_chain(root, messages)):
            if role == "assistant" and (number := self._by_key.get(key)) is not None:
                deepest, n_known = number, i + 1
        cause = None
        if deepest is None and self._prompts:
            cause = self._why(root, messages, key)
        return Attachment(self._or_none(deepest), n_known, key, cause)

    def add(
        self,
        root: Key,
        attachment: Attachment,
        *,
        parent: Turn | None,
        new_prompt_ids: TokenIds,
        response_ids: TokenIds,
        key: Key | None = None,
        reply: Message,
        has_reasoning: bool,
        step_index: int | None,
        text_length: int | None = None,
    ) -> Turn:
        """Store a finished call.

        Args:
            parent: `attachment.turn`, or None if it became a branch.
            key: of the conversation with the reply; None: as messages make it.
            text_length: characters of that conversation, where it is plain text.
        """
        before = parent.n_tokens if parent is not None else 0
        row = (
            parent.number if parent is not None else None,
            new_prompt_ids,
            response_ids,
            before + len(new_prompt_ids) + len(response_ids),
            attachment.prompt_key,
            key or extend_key(attachment.prompt_key, reply),
            _calls(reply),
            has_reasoning or (parent is not None and parent.has_reasoning),
            step_index,
        )
        return self._enter(root, row, text_length)

    def steps(self) -> dict[int, int]:
        """Numbers of the turns by the `step_index` of their Steps."""
        turns = map(self.turn, range(len(self._rows)))
        return {t.step_index: t.number for t in turns if t.step_index is not None}

    def restore(
        self,
        root: Key,
        prompt_key: Key,
        key: Key,
        step: Step,
        *,
        parent: Turn | None,
        reply: Message,
        has_reasoning: bool,
        text_length: int | None,
    ) -> Turn:
        """Store the turn of a Step that another gateway stored; its parent's comes first.

        Args:
            parent: the turn of the Step's `parent_index`, if it is here.
            has_reasoning: of the turn as it was, what its prompt holds included.
        """
        if parent is not None and parent.n_tokens >= len(step.prompt_ids):
            parent = None
        # Copies: a part of the Step's arrays would keep the whole of them.
        row = (
            parent.number if parent is not None else None,
            join([step.prompt_ids[parent.n_tokens if parent is not None else 0 :]]),
            join([step.response_ids]),
            step.n_tokens,
            prompt_key,
            key,
            _calls(reply),
            has_reasoning,
            step.step_index,
        )
        return self._enter(root, row, text_length)

    def attach_text(self, text: str | bytes) -> Attachment:
        """As `attach`, for a prompt that is plain text, or ids as bytes; `n_known` counts in
        characters or bytes."""
        deepest, n_known = None, 0
        for length, known in text_prefix_keys(text, self._text_lengths):
            if (number := self._by_key.get(known)) is not None:
                deepest, n_known = number, length
        key = text_key(text)
        cause: BranchCause | None = None
        if deepest is None and self._prompts:
            cause = "resampled" if key in self._prompts else "new_conversation"
        return Attachment(self._or_none(deepest), n_known, key, cause)

    def _or_none(self, number: int | None) -> Turn | None:
        return None if number is None else self.turn(number)

    def _enter(self, root: Key, row: tuple[Any, ...], text_length: int | None) -> Turn:
        number = len(self._rows)
        self._rows.append(row)
        turn = self.turn(number)
        self.n_tokens += len(turn.new_prompt_ids) + len(turn.response_ids)
        self._by_key[turn.key] = number
        self._prompts.add(turn.prompt_key)
        self._roots[root] = None
        if text_length is not None:  # `attach_text` looks for it from now on
            self._text_lengths.add(text_length)
        return turn

    def _why(
        self, root: Key, messages: Sequence[Mapping[str, Any]], prompt_key: Key
    ) -> BranchCause:
        if prompt_key in self._prompts:
            return "resampled"
        for other in self._roots:
            if other != root and any(
                key in self._by_key or key in self._prompts for key, _ in _chain(other, messages)
            ):
                return "tools_changed"
        if any(m["role"] == "assistant" for m in messages):
            return "history_edited"
        return "new_conversation"


def _calls(reply: Message) -> Calls:
    entries = reply.get("tool_calls") or ()
    return tuple((e["id"], e["function"]["name"], e["function"]["arguments"]) for e in entries)


def _chain(root: Key, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Key, str]]:
    key = root
    for message in messages:
        key = extend_key(key, message)
        yield key, message["role"]


def join(pieces: Sequence[TokenIds]) -> TokenIds:
    """Pieces as one read-only array."""
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    ids.flags.writeable = False
    return ids
