"""What a channel counts. Every group, trajectory and step that came in is in exactly one place::

    groups.submitted       = open + ready + leased + acked + dropped
    trajectories.submitted = open + complete + acked + dropped + aborted
    steps.submitted        = accepted + duplicate + late + conflict + rejected
    steps.accepted         = stored + acked + dropped

One `Counts` is one value: pickled, it is how the counts survive a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stepwell.datapool.core.records import Reasons


@dataclass(slots=True)
class GroupCounts:
    submitted: int = 0
    acked: int = 0
    dropped: int = 0
    returned: int = 0
    """Dropped, and flagged so that the prompt's source issues them again."""


@dataclass(slots=True)
class TrajectoryCounts:
    submitted: int = 0
    open: int = 0
    acked: int = 0
    dropped: int = 0
    aborted: int = 0
    late: int = 0


@dataclass(slots=True)
class StepCounts:
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


@dataclass(slots=True)
class Counts:
    """Everything a channel counts."""

    groups: GroupCounts = field(default_factory=GroupCounts)
    trajectories: TrajectoryCounts = field(default_factory=TrajectoryCounts)
    steps: StepCounts = field(default_factory=StepCounts)
    tokens: int = 0
    """Prompt and response tokens stored, a shared prefix counted each time."""
    drop_reasons: Reasons = field(default_factory=Reasons)
    abort_reasons: Reasons = field(default_factory=Reasons)
