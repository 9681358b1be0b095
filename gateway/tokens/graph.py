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

The garbage collector does not look at turns (`gc=False`; they refer to their parents alone, so
there are no cycles). With plain objects a collection walked through all turns of all trajectories
and stopped every call in flight for 55 to 90 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import TokenIds
from stepwell.gateway.tokens.messages import Key, Keys, Message, text_key, text_prefix_keys

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
ToolCalls: TypeAlias = tuple[tuple[str, str, str], ...]
"""Tool calls of a reply: their ids, names and arguments."""
Said: TypeAlias = Keys | str | bytes
"""A conversation: keys of its messages; or a plain text, or ids as bytes, that is matched as it
stands."""
TurnKeys: TypeAlias = tuple[Key, Key, Key, int | None]
"""Place of a turn in the graph: key of its tools and template arguments; key of the conversation
that the model was shown; key of that conversation plus the reply; characters, or bytes, of a whole
conversation that is no messages."""


class Turn(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One generated turn. Arrays are read-only."""

    parent: Turn | None
    new_prompt_ids: TokenIds
    """Ids that the prompt adds to the parent's prompt and response."""
    response_ids: TokenIds
    n_tokens: int
    """Prompt plus response."""
    calls: ToolCalls
    """The reply's tool calls; its text is in its ids."""
    has_reasoning: bool
    """This turn, or one that its prompt holds token for token, has thinking in it."""
    step_index: int | None
    """None: white-box, its Step is submitted by the agent itself."""
    crc: int | None = None
    """CRC-32 of prompt and response, as the pool has it; None: not known."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of `new_prompt_ids`; their places are those in the whole prompt."""

    def arrays(self) -> list[TokenIds]:
        """Prompt and response, from the root on, in pieces; the last one is the response."""
        pieces: list[TokenIds] = []
        turn: Turn | None = self
        while turn is not None:
            pieces += (turn.response_ids, turn.new_prompt_ids)
            turn = turn.parent
        return pieces[::-1]

    def all_pictures(self) -> tuple[Picture, ...]:
        """Pictures from the root on, in order."""
        found: list[tuple[Picture, ...]] = []
        turn: Turn | None = self
        while turn is not None:
            found.append(turn.pictures)
            turn = turn.parent
        return tuple(picture for its in reversed(found) for picture in its)

    def nearest(self) -> Turn | None:
        """The deepest turn with a Step that this turn's tokens extend or are."""
        turn: Turn | None = self
        while turn is not None and turn.step_index is None:
            turn = turn.parent
        return turn


class TurnGraph:
    """Turns of one trajectory by the key of their conversation; the latest of equal ones wins."""

    def __init__(self) -> None:
        self.steps: dict[int, Turn] = {}
        """The turns by the `step_index` of their Steps."""
        self.n_tokens = 0
        """Tokens of all turns; what turns share counts once."""
        self._by_key: dict[Key, Turn] = {}
        self._prompts: set[Key] = set()
        self._roots: dict[Key, None] = {}
        self._lengths: set[int] = set()
        """Lengths of the conversations that are no messages."""
        self.keys: Keys | None = None
        """Keys of the last short conversation; the next one mostly goes on from it."""
        self.last: tuple[Turn, TokenIds] | None = None
        """The last turn and the whole of its prompt, if that is short: the next prompt is made of
        these, and not of all turns' arrays."""

    def ids_behind(self, turn: Turn, new_ids: TokenIds) -> TokenIds:
        """Tokens of `turn` and the ids that follow them, as one array."""
        if self.last is not None and self.last[0] is turn:
            return join((self.last[1], turn.response_ids, new_ids))
        return join([*turn.arrays(), new_ids])

    def attach(self, root: Key, said: Said) -> tuple[Turn | None, int, BranchCause | None]:
        """Find the deepest turn that a request extends.

        Returns:
            The turn, None for the first call and for branches; the messages (or characters, or
            bytes) that it covers; why nothing is extended, None for the first call and for
            extensions.
        """
        ends: Iterable[tuple[int, Key]]
        """Places where a turn may have ended, the longest first."""
        if isinstance(said, Keys):
            ends = said.ends()
        else:
            ends = reversed([*text_prefix_keys(said, self._lengths)])
        for n, key in ends:
            if (turn := self._by_key.get(key)) is not None:
                return turn, n, None
        return None, 0, self._why(root, said) if self._prompts else None

    def add(
        self,
        keys: TurnKeys,
        *,
        parent: Turn | None,
        new_prompt_ids: TokenIds,
        response_ids: TokenIds,
        calls: ToolCalls,
        has_reasoning: bool,
        step_index: int | None,
        crc: int | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Turn:
        """Store a finished call.

        Args:
            step_index, crc, pictures: as the turn's.
        """
        n_new = len(new_prompt_ids) + len(response_ids)
        turn = Turn(
            parent,
            new_prompt_ids,
            response_ids,
            n_new + (parent.n_tokens if parent is not None else 0),
            calls,
            has_reasoning or (parent is not None and parent.has_reasoning),
            step_index,
            crc,
            pictures,
        )
        root, prompt, whole, length = keys
        self.n_tokens += n_new
        self._by_key[whole] = turn
        self._prompts.add(prompt)
        self._roots[root] = None
        if length is not None:  # `attach` looks for it from now on
            self._lengths.add(length)
        if step_index is not None:
            self.steps[step_index] = turn
        return turn

    def continued(self) -> set[Turn]:
        """Turns that another one extends."""
        return {turn.parent for turn in self.steps.values() if turn.parent is not None}

    def _why(self, root: Key, said: Said) -> BranchCause:
        if (said.prompt if isinstance(said, Keys) else text_key(said)) in self._prompts:
            return "resampled"
        messages: Sequence[Message] = [*said.messages] if isinstance(said, Keys) else ()
        for other in self._roots:
            if other != root and any(
                key in self._by_key or key in self._prompts for key in Keys(other, messages)
            ):
                return "tools_changed"
        if any(m["role"] == "assistant" for m in messages):
            return "history_edited"
        return "new_conversation"


def join(pieces: Sequence[TokenIds]) -> TokenIds:
    """Pieces as one read-only array."""
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    ids.flags.writeable = False
    return ids
