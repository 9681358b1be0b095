"""What is kept of a finished call: here for its client's retries, in its Step for other gateways.

Ids say what the model saw and said. They do not say of which messages, and that is what requests
are matched by. So each Step carries a note, and a gateway that did not make the Steps (a replica
that takes over, a process that was restarted) has the graph that made them::

    call ──► Step(metadata["turn"] = note) ──► pool ──► restore ──► TurnGraph      calls go on there
      └─────────────────────────────────────────────────────┴─────► FinishedCall   retries find it

A note is a JSON object of hashes, counts and the tool calls, which the next prompt shows; no other
text. A Step without one (an agent submitted it itself) has a `step_index` and nothing else to
restore. A reply is read again from the sampled ids (`Call.recall`).

Owns: the note, and the way back. Does not own: when (`trajectory.py`), which call a retry is for
(`retries.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from stepwell.backends.engines.api import TopLogProbs
from stepwell.datapool.types import UNSEEN, LogProbs, Step
from stepwell.gateway.tokens.graph import Calls, Turn, TurnGraph, TurnKeys, join

NOTE: Final = "turn"
"""Key of a Step's metadata."""


class TurnNote(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What ids do not say of a call. Bytes are base64 in JSON."""

    keys: TurnKeys
    retry: bytes
    """`RetryKey.digest` of the request."""
    created: int
    """Unix seconds."""
    body: bytes | None = None
    """`RetryKey.body_digest` of the request."""
    is_retry: bool = False
    """The request was marked as a retry."""
    n_forced: int = 0
    """Ids at the end of the prompt that begin the reply itself (a forced tool call)."""
    calls: Calls = ()
    has_reasoning: bool = False
    """As `Turn.has_reasoning`."""

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return value


class FinishedCall(msgspec.Struct, eq=False, gc=False):
    """A call whose reply is a turn of the graph. The garbage collector does not look at it, for the
    reason that it does not look at turns (`tokens/graph.py`)."""

    uid: str
    note: TurnNote
    turn: Turn
    finish_reason: Literal["stop", "length"]
    spans: tuple[tuple[int, int, int], ...]
    """Version spans: version, start, end."""
    log_probs: LogProbs | None
    """None: the reply shows none."""
    alternatives: Sequence[TopLogProbs] = ()
    delivered: bool = False
    """The terminal event was handed to some client's connection, which did not break then."""
    is_unseen: bool = False
    """No client got the end, or the one that did had sent the request again before."""

    @property
    def created(self) -> int:
        """Unix seconds."""
        return self.note.created

    @property
    def has_failed(self) -> bool:
        return False

    @property
    def is_unclaimed(self) -> bool:
        return not self.delivered


def read_note(step: Step) -> TurnNote | None:
    """The note of a Step; None if it has none that can be read."""
    try:
        return msgspec.convert(step.metadata.get(NOTE), TurnNote)
    except msgspec.ValidationError:  # somebody else's use of the same key
        return None


def restore(graph: TurnGraph, steps: Sequence[Step]) -> list[FinishedCall]:
    """Add to `graph` the turns of those of `steps` that it does not hold; the calls behind them.

    Args:
        steps: all of the trajectory, by `step_index`.
    """
    extended = {step.parent_index for step in steps}
    finished = []
    for step in steps:
        note = None if step.step_index in graph.steps else read_note(step)
        if note is None:
            continue
        parent = None if step.parent_index is None else graph.steps.get(step.parent_index)
        if parent is not None and parent.n_tokens >= len(step.prompt_ids):
            parent = None
        # Copies: a part of the Step's arrays would keep the whole of them.
        turn = graph.add(
            note.keys,
            parent=parent,
            new_prompt_ids=join([step.prompt_ids[0 if parent is None else parent.n_tokens :]]),
            response_ids=join([step.response_ids]),
            calls=note.calls,
            has_reasoning=note.has_reasoning,
            step_index=step.step_index,
        )
        uid, reason, log_probs = step.metadata.get("call_id"), step.finish_reason, None
        if step.rollout_log_probs is not None:
            log_probs = np.array(step.rollout_log_probs)
        if isinstance(uid, str) and reason in ("stop", "length") and log_probs is not None:
            spans = tuple((s.version, s.start, s.end) for s in step.version_spans)
            spans = spans or ((step.policy_version, 0, len(step.response_ids)),)
            call = FinishedCall(uid, note, turn, reason, spans, log_probs)
            call.delivered = step.step_index in extended
            call.is_unseen = step.metadata.get(UNSEEN) is True
            finished.append(call)
    return finished
