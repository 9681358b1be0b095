"""The counts of a channel. Every group, trajectory and step that came in is in exactly one place::

    groups.submitted       = open + ready + leased + acked + dropped
    trajectories.submitted = open + complete + acked + dropped + aborted
    steps.submitted        = accepted + duplicate + late + conflict + rejected
    steps.accepted         = stored + acked + dropped

One `Counts` is one value: as bytes, it is how the counts survive a restart.
"""

from __future__ import annotations

import msgspec

from stepwell.datapool.core.records import short

OTHER_REASONS = "other"
MAX_REASONS = 64


def count_reason(reasons: dict[str, int], reason: str) -> None:
    """Count by reason. Producers choose the words, so number and length of them are bounded."""
    reason = short(reason)
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = OTHER_REASONS
    reasons[reason] = reasons.get(reason, 0) + 1


class GroupCounts(msgspec.Struct):
    submitted: int = 0
    acked: int = 0
    dropped: int = 0
    returned: int = 0
    """Dropped, and flagged so that the prompt's source issues them again."""
    drop_reasons: dict[str, int] = {}


class TrajectoryCounts(msgspec.Struct):
    submitted: int = 0
    open: int = 0
    complete: int = 0
    acked: int = 0
    dropped: int = 0
    aborted: int = 0
    late: int = 0
    abort_reasons: dict[str, int] = {}


class StepCounts(msgspec.Struct):
    submitted: int = 0
    accepted: int = 0
    duplicate: int = 0
    late: int = 0
    conflict: int = 0
    rejected: int = 0
    stored: int = 0
    acked: int = 0
    dropped: int = 0
    missing: int = 0


class Counts(msgspec.Struct):
    """Everything a channel counts, and the little else that no row tells."""

    groups: GroupCounts = msgspec.field(default_factory=GroupCounts)
    trajectories: TrajectoryCounts = msgspec.field(default_factory=TrajectoryCounts)
    steps: StepCounts = msgspec.field(default_factory=StepCounts)
    tokens: int = 0
    """Prompt and response tokens stored, a shared prefix counted each time."""
    response_tokens: int = 0
    """Response tokens of all steps that were ever accepted."""
    version: int = 0
    """The policy version that generation uses now."""
    first_version: int | None = None
    """The one it began with."""
    shut_down: bool = False
    numbered: int = 0
    """Groups that were ever begun."""
