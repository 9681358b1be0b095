"""The turn graph in its Steps: what each carries for a gateway that goes on with its trajectory.

Ids say what the model saw and said. They do not say of which messages, and that is what requests
are matched by. So each Step carries a note, and a gateway that did not make the Steps (a replica
that takes over, a process that was restarted) has the graph that made them::

    call ──► Step(metadata["turn"] = note) ──► pool ──► restore ──► TurnGraph      calls go on there
                                                               └──► FinishedCall   retries find it

A note holds hashes, counts and the tool calls, which the next prompt shows; no other text. It is
84 characters long, tool calls apart. A Step without one (an agent submitted it itself) has a
`step_index` and nothing else to restore.

Owns: the note, and the way back. Does not own: when (`trajectory.py`), and what becomes of a
recorded call (`call.py`).
"""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from stepwell.datapool.types import Step
from stepwell.gateway.reply.calls import ToolCall
from stepwell.gateway.tokens.graph import TurnGraph
from stepwell.gateway.tokens.messages import Key, Message
from stepwell.gateway.trajectory.retries import FinishedCall

NOTE: Final = "turn"
"""Key of a Step's metadata."""

_HEAD = struct.Struct("<BI8s")
_TURN = struct.Struct("<16s16s16s")
_NUMBER = struct.Struct("<I")
_BODY = struct.Struct("<8s")
_HAS_TURN, _REASONING, _FORCED, _TEXT, _BODY_FLAG, _CALLS, _RETRY = (1 << b for b in range(7))
_KNOWN = 0x7F
"""The flags above. Another bit is a format that is not known here."""


class TurnKeys(NamedTuple):
    """Where a turn is in the graph."""

    root: Key
    prompt: Key
    whole: Key
    """Of the conversation with the reply."""


class TurnNote(NamedTuple):
    """What ids do not say of a call."""

    retry: bytes
    """`retry_digest` of the request's key."""
    created: int
    """Unix seconds."""
    keys: TurnKeys | None
    """None: the prompt came as ids and is no part of the graph."""
    has_reasoning: bool = False
    """As `Turn.has_reasoning`."""
    n_forced: int = 0
    """Ids at the end of the prompt that begin the reply itself (a forced tool call)."""
    text_length: int | None = None
    """Characters of prompt and reply, where the prompt was plain text."""
    body: bytes | None = None
    """`retry_digest` of the request's bytes' digest, where its key does not hold that."""
    tool_calls: tuple[ToolCall, ...] = ()
    is_retry: bool = False
    """The request was marked as a retry."""

    def text(self) -> str:
        """As a Step carries it: base64, because metadata is JSON-like."""
        flags = (
            _HAS_TURN * (self.keys is not None)
            | _REASONING * self.has_reasoning
            | _FORCED * (self.n_forced > 0)
            | _TEXT * (self.text_length is not None)
            | _BODY_FLAG * (self.body is not None)
            | _CALLS * bool(self.tool_calls)
            | _RETRY * self.is_retry
        )
        parts = [_HEAD.pack(flags, self.created, self.retry)]
        if self.keys is not None:
            parts.append(_TURN.pack(*self.keys))
        if self.n_forced:
            parts.append(_NUMBER.pack(self.n_forced))
        if self.text_length is not None:
            parts.append(_NUMBER.pack(self.text_length))
        if self.body is not None:
            parts.append(_BODY.pack(self.body))
        if self.tool_calls:
            calls = [[c.id, c.name, c.arguments] for c in self.tool_calls]
            parts.append(json.dumps(calls, separators=(",", ":")).encode())
        return binascii.b2a_base64(b"".join(parts), newline=False).decode()

    def reply(self) -> Message:
        """The turn's reply as the next prompt needs it: its tool calls. Its text is in its ids."""
        message: Message = {"role": "assistant", "content": ""}
        if self.tool_calls:
            message["tool_calls"] = [c.entry() for c in self.tool_calls]
        return message


def read_note(step: Step) -> TurnNote | None:
    """The note of a Step; None if it has none that can be read."""
    text = step.metadata.get(NOTE)
    if not isinstance(text, str):
        return None
    try:
        return _parse(binascii.a2b_base64(text, strict_mode=True))
    except (ValueError, TypeError, struct.error):  # somebody else's use of the same key
        return None


def restore(graph: TurnGraph, steps: Sequence[Step]) -> list[tuple[bytes, FinishedCall]]:
    """Add to `graph` the turns of those of `steps` that it does not hold; the calls behind them,
    each with the `retry_digest` of its request's key.

    Args:
        steps: all of the trajectory, by `step_index`.
    """
    extended = {step.parent_index for step in steps}
    turns = graph.steps()
    finished: list[tuple[bytes, FinishedCall]] = []
    for step in steps:
        if step.step_index in turns:
            continue
        note = read_note(step)
        if note is None or note.keys is None:
            continue
        parent = None if step.parent_index is None else turns.get(step.parent_index)
        turn = graph.restore(
            note.keys.root,
            note.keys.prompt,
            note.keys.whole,
            step,
            parent=None if parent is None else graph.turn(parent),
            reply=note.reply(),
            has_reasoning=note.has_reasoning,
            text_length=note.text_length,
        )
        turns[step.step_index] = turn.number
        call_id = step.metadata.get("call_id")
        if (
            isinstance(call_id, str)
            and step.rollout_log_probs is not None
            and (reason := step.finish_reason) in ("stop", "length")
        ):
            call = FinishedCall(
                call_id,
                note.created,
                note.body,
                note.is_retry,
                delivered=step.step_index in extended,
                step_index=step.step_index,
                turn=turn.number,
                response_ids=turn.response_ids,
                n_forced=note.n_forced,
                calls=turn.calls,
                finish_reason=reason,
                spans=tuple((s.version, s.start, s.end) for s in step.version_spans),
                version=step.policy_version,
                cached_tokens=0,
                log_probs=np.array(step.rollout_log_probs),
                alternatives=None,
            )
            finished.append((note.retry, call))
    return finished


def _parse(raw: bytes) -> TurnNote | None:
    flags, created, retry = _HEAD.unpack_from(raw)
    if flags & ~_KNOWN:
        return None
    at = _HEAD.size

    def take(form: struct.Struct) -> tuple[Any, ...]:
        nonlocal at
        at += form.size
        return form.unpack_from(raw, at - form.size)

    keys = TurnKeys(*take(_TURN)) if flags & _HAS_TURN else None
    n_forced = take(_NUMBER)[0] if flags & _FORCED else 0
    text_length = take(_NUMBER)[0] if flags & _TEXT else None
    body = take(_BODY)[0] if flags & _BODY_FLAG else None
    calls: list[list[str]] = json.loads(raw[at:]) if flags & _CALLS else []
    return TurnNote(
        retry,
        created,
        keys,
        bool(flags & _REASONING),
        n_forced,
        text_length,
        body,
        tuple(ToolCall(*call) for call in calls),
        bool(flags & _RETRY),
    )
