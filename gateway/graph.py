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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from datapool.types import Step, TokenIds
from gateway.messages import Key, Message, extend_key, text_key, text_prefix_keys

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


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One generated turn. Arrays are read-only."""

    parent: Turn | None
    new_prompt_ids: TokenIds
    """What the prompt adds to the parent's prompt and response."""
    response_ids: TokenIds
    n_tokens: int
    """Prompt plus response."""
    prompt_key: Key
    """Key of the conversation the model was shown."""
    key: Key
    """Key of that conversation plus the reply."""
    reply: Message
    has_reasoning: bool
    """This turn, or one that its prompt holds token for token, has thinking in it."""
    step_index: int | None
    """None: white-box, its Step is submitted by the agent itself."""

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
        self._by_key: dict[Key, Turn] = {}
        self._prompts: set[Key] = set()
        self._by_step: dict[int, Turn] = {}
        self._roots: dict[Key, None] = {}
        self.n_tokens = 0
        """Of all turns; what turns share counts once."""
        self._text_lengths: set[int] = set()

    def attach(self, root: Key, messages: Sequence[Mapping[str, Any]]) -> Attachment:
        deepest, n_known = None, 0
        key = root
        for i, (key, role) in enumerate(_chain(root, messages)):
            if role == "assistant" and (turn := self._by_key.get(key)) is not None:
                deepest, n_known = turn, i + 1
        cause = None
        if deepest is None and self._prompts:
            cause = self._why(root, messages, key)
        return Attachment(deepest, n_known, key, cause)

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
        turn = Turn(
            parent=parent,
            new_prompt_ids=new_prompt_ids,
            response_ids=response_ids,
            n_tokens=before + len(new_prompt_ids) + len(response_ids),
            prompt_key=attachment.prompt_key,
            key=key or extend_key(attachment.prompt_key, reply),
            reply=reply,
            has_reasoning=has_reasoning or (parent is not None and parent.has_reasoning),
            step_index=step_index,
        )
        self._enter(root, turn, text_length)
        return turn

    def holds(self, step_index: int) -> bool:
        """The turn of this Step is here."""
        return step_index in self._by_step

    def restore(
        self,
        root: Key,
        prompt_key: Key,
        key: Key,
        step: Step,
        *,
        reply: Message,
        has_reasoning: bool,
        text_length: int | None,
    ) -> Turn:
        """Store the turn of a Step that another gateway stored; its parent's comes first.

        Args:
            has_reasoning: of the turn as it was, what its prompt holds included.
        """
        parent = None if step.parent_index is None else self._by_step.get(step.parent_index)
        if parent is not None and parent.n_tokens >= len(step.prompt_ids):
            parent = None
        turn = Turn(
            parent=parent,
            new_prompt_ids=step.prompt_ids[parent.n_tokens if parent is not None else 0 :],
            response_ids=step.response_ids,
            n_tokens=step.n_tokens,
            prompt_key=prompt_key,
            key=key,
            reply=reply,
            has_reasoning=has_reasoning,
            step_index=step.step_index,
        )
        self._enter(root, turn, text_length)
        return turn

    def attach_text(self, text: str | bytes) -> Attachment:
        """As `attach`, for a prompt that is plain text, or ids as bytes; `n_known` counts in
        characters or bytes."""
        deepest, n_known = None, 0
        for length, known in text_prefix_keys(text, self._text_lengths):
            if (turn := self._by_key.get(known)) is not None:
                deepest, n_known = turn, length
        key = text_key(text)
        cause: BranchCause | None = None
        if deepest is None and self._prompts:
            cause = "resampled" if key in self._prompts else "new_conversation"
        return Attachment(deepest, n_known, key, cause)

    def _enter(self, root: Key, turn: Turn, text_length: int | None) -> None:
        self.n_tokens += len(turn.new_prompt_ids) + len(turn.response_ids)
        self._by_key[turn.key] = turn
        self._prompts.add(turn.prompt_key)
        self._roots[root] = None
        if turn.step_index is not None:
            self._by_step[turn.step_index] = turn
        if text_length is not None:  # `attach_text` looks for it from now on
            self._text_lengths.add(text_length)

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
