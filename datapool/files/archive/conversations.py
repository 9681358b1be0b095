"""Rows that a group left in the journal, made into its trajectories: also those that were aborted,
superseded or came too late, whose steps nobody is served.

    rows of a group, in order ──► Conversation per trajectory
    a row that came late      ──► Conversation with one step, or Feedback

The pool decided everything: how each trajectory ended is in `GroupLeft`. Text comes from the
messages that a gateway kept with each step (`metadata["messages"]`), never from decoded tokens, so
that what was redacted or not kept is not here either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from stepwell.datapool import ops
from stepwell.datapool.codec import PackedStep
from stepwell.datapool.core.log_rows import (
    GroupLeased,
    GroupLeft,
    PromptStored,
    RewardCameLate,
    StepCameLate,
    StepsStored,
    read,
)
from stepwell.datapool.core.pictures import keys_of
from stepwell.datapool.core.records import Closing
from stepwell.datapool.selection import UNMARKED, Marks
from stepwell.datapool.store.segments import Row

MESSAGES: Final = "messages"
"""Key of a step's metadata."""
LATE: Final = "late"
PREVIEW: Final = 240
"""Characters of the first and the last message in lists."""


_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class TimedStep(NamedTuple):
    """A step, and when the pool stored it."""

    packed: PackedStep
    at: float
    """Pool clock, seconds."""
    keys: Mapping[str, str] = _NONE
    """Key of each stored picture of its new tokens, by digest."""


@dataclass(slots=True)
class Conversation:
    """A trajectory that left the pool; or (`part` > 0) a step that came too late for it."""

    channel: str
    prompt_uid: str
    trajectory_uid: str
    part: int = 0
    """0: the trajectory with its group; else the journal's row of what came late."""
    attempt: int = 0
    state: str = "open"
    """`complete`, `aborted` or `late`; `open` or `complete` in a live group."""
    reason: str | None = None
    """Why it was aborted."""
    left: str = "live"
    """`acked` (a trainer took its group), `dropped` or `late`; `live`: its group has not left."""
    drop_reason: str | None = None
    outcome: float | None = None
    step_rewards: dict[int, float] = field(default_factory=dict)
    steps: list[TimedStep] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    group_metadata: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = UNMARKED
    group_marks: Marks = UNMARKED
    n_rollouts: int | None = None
    opened_at: float = 0.0
    closed_at: float | None = None
    leased_at: float | None = None
    left_at: float = 0.0

    @property
    def reward(self) -> float | None:
        """Sum over its steps and the outcome; None if nothing is scored."""
        own = [step.packed.score[1] for step in self.steps]
        if self.step_rewards:
            indexes = [step.packed.step_index for step in self.steps]
            own = [self.step_rewards.get(i, r) for i, r in zip(indexes, own, strict=True)]
        scored = [r for r in (*own, self.outcome) if r is not None]
        return sum(scored) if scored else None


class Feedback(NamedTuple):
    """A reward that came after its trajectory took none any more."""

    channel: str
    prompt_uid: str
    trajectory_uid: str
    row: int
    at: float
    reward: float | None
    step_index: int | None
    why: str
    """Fate of the trajectory before this came."""


def conversations(channel: str, rows: Sequence[Row]) -> list[Conversation | Feedback]:
    """The trajectories of a group that left, or the one thing that came late, without those that
    were deleted.

    Raises:
        LookupError, ValueError, msgspec.DecodeError: this release did not write the rows.
    """
    told = [(row, *read(row.kind, row.head)) for row in rows]
    last, now, _, record = told[-1]
    if isinstance(record, RewardCameLate):
        uids = record.prompt_uid, record.trajectory_uid
        late = Feedback(channel, *uids, last.row, now, record.reward, record.step_index, record.why)
        return [late]
    if isinstance(record, StepCameLate):
        return [_late_step(channel, last, now, record)]
    return list(_Group(channel, told).trajectories.values())


def _late_step(channel: str, row: Row, now: float, late: StepCameLate) -> Conversation:
    prompt = row.payload[: late.n_prompt_bytes] or None
    packed = PackedStep(prompt, row.payload[late.n_prompt_bytes :])
    step = TimedStep(packed, now, keys_of(late.pictures))
    return Conversation(
        channel,
        late.prompt_uid,
        late.trajectory_uid,
        row.row,
        state=LATE,
        reason="it came too late: its trajectory was closed",
        left=LATE,
        steps=[step],
        metadata=late.metadata,
        marks=Marks(tags=frozenset(late.tags)),
        opened_at=now,
        left_at=now,
    )


class _Group:
    """A group, from its rows."""

    def __init__(self, channel: str, told: Iterable[tuple[Row, float, int, Any]]) -> None:
        self.trajectories: dict[str, Conversation] = {}
        self._channel, self._prompt_uid = channel, ""
        self._prompts: dict[int, bytes] = {}
        self._marks = UNMARKED
        declared, leased_at = None, None
        for row, now, _, record in told:
            self._prompt_uid = getattr(record, "prompt_uid", None) or self._prompt_uid
            match record:
                case StepsStored():  # most rows
                    self._add_steps(record, row.payload, now)
                case PromptStored():
                    self._prompts[row.row] = row.payload
                case ops.OpenGroup():
                    declared = record
                case GroupLeased():
                    leased_at = now
                case GroupLeft():
                    self._end(record, now)
                case _:
                    self._change(record, now)
        for each in self.trajectories.values():
            each.group_marks, each.leased_at = self._marks, leased_at
            if declared is not None:
                each.n_rollouts, each.group_metadata = declared.n_rollouts, declared.metadata

    def _of(self, uid: str, now: float) -> Conversation:
        found = self.trajectories.get(uid)
        if found is None:
            found = Conversation(self._channel, self._prompt_uid, uid, opened_at=now)
            self.trajectories[uid] = found
        return found

    def _add_steps(self, stored: StepsStored, payload: bytes, now: float) -> None:
        at = 0
        for position, (uid, prompt_row, n_bytes) in enumerate(stored.steps):
            prompt = None if prompt_row is None else self._prompts[prompt_row]
            packed = PackedStep(prompt, payload[at : at + n_bytes])
            at += n_bytes
            if not packed.is_hollow:
                keys = keys_of(stored.pictures[position]) if position in stored.pictures else _NONE
                self._of(uid, now).steps.append(TimedStep(packed, now, keys))

    def _change(self, record: Any, now: float) -> None:
        match record:
            case ops.Mark(trajectory_uid=None):
                self._marks = self._marks.merged(record.marks)
            case ops.Mark(trajectory_uid=str()):
                marked = self._of(str(record.trajectory_uid), now)
                marked.marks = marked.marks.merged(record.marks)
            case ops.OpenTrajectory():
                opened = self._of(record.trajectory_uid, now)
                opened.attempt = max(opened.attempt, record.attempt)
                opened.metadata |= record.metadata
            case ops.CompleteTrajectory():
                ended = self._of(record.trajectory_uid, now)
                ended.metadata |= record.metadata
                ended.state, ended.closed_at = "complete", now
                ended.outcome = ended.outcome if record.reward is None else record.reward
            case ops.AbortTrajectory():
                aborted = self._of(record.trajectory_uid, now)
                aborted.state, aborted.reason, aborted.closed_at = "aborted", record.reason, now
            case ops.SetReward(step_index=None):
                self._of(record.trajectory_uid, now).outcome = record.reward
            case ops.SetReward(step_index=int() as index):
                scored = self._of(record.trajectory_uid, now)
                scored.step_rewards[index] = record.reward

    def _end(self, left: GroupLeft, now: float) -> None:
        how, _, reason = left.how.partition(" ")
        for uid, closing in left.closings.items():
            if closing.is_deleted:
                self.trajectories.pop(uid, None)
                continue
            each = self._of(uid, now)
            each.state, each.reason = _state(closing)
            each.left, each.drop_reason = how, reason.strip("()") or None
            each.left_at = now
            if each.closed_at is None:
                each.closed_at = each.steps[-1].at if each.steps else now
            each.steps.sort(key=lambda step: step.packed.step_index)


def _state(closing: Closing) -> tuple[str, str | None]:
    return ("complete", None) if closing.aborted is None else ("aborted", closing.aborted)


# -- text ------------------------------------------------------------------------------------


def text_of(message: Any) -> str:
    """The text of a message: its content, its reasoning, and the calls of tools in it."""
    if type(message) is dict and len(message) == 2 and "role" in message:  # as nearly always
        return _content(message.get("content"))
    if not isinstance(message, Mapping):
        return ""
    said = [_content(message.get(key)) for key in ("reasoning_content", "content")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            said.append(f"{function.get('name')}({function.get('arguments')})")
    return "\n".join(filter(None, said))


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (p.get("text") if isinstance(p, Mapping) else p for p in content)
        return "\n".join(p for p in parts if isinstance(p, str))
    return ""


def first_and_last(messages: Sequence[Any]) -> tuple[str | None, str | None]:
    """Texts of the first message of a user, and of the last one of the model."""
    first = next((text_of(m) for m in messages if _role(m) == "user"), None)
    last = next((text_of(m) for m in reversed(messages) if _role(m) == "assistant"), None)
    return first, last


def preview(text: str | None) -> str | None:
    """A text for lists."""
    return None if text is None else cut(text, PREVIEW)


def ends_texts(ends: Mapping[str, Sequence[PackedStep]]) -> dict[str, dict[str, str | None]]:
    """The first message of a user and the last reply, as far as messages were kept, by uid."""
    found: dict[str, dict[str, str | None]] = {}
    for uid, steps in ends.items():
        messages = []
        for step in steps:
            kept = step.extra[0].get("messages")
            messages += kept if isinstance(kept, list) else []
        first, last = first_and_last(messages)
        found[uid] = {"first": preview(first), "last": preview(last)}
    return found


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer: prompts of one kind begin alike."""
    if len(text) <= most:
        return text
    n_last = most // 3
    return f"{text[: most - n_last - 3]} … {text[-n_last:]}"


def _role(message: Any) -> Any:
    is_mapping = type(message) is dict or isinstance(message, Mapping)
    return message.get("role") if is_mapping else None
