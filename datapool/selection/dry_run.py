"""This module says what the rules would serve now, and why everything else would not be served.

A dry run asks the `Selection` that serves, and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.datapool.selection.info import Drop, GroupInfo, Verdict
from stepwell.datapool.selection.rules import Selection

Outcome: TypeAlias = Literal["serve", "wait", "hold", "drop"]
Judge: TypeAlias = Callable[[GroupInfo], tuple[Verdict | None, float]]
"""The verdict and the key of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fate of one group. Rewards, versions and counts are of what would be served."""

    prompt_uid: str
    decision: Outcome
    reason: str
    rank: int | None
    """Place in the order, from 1; None if the group is held or dropped."""
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    newest_version: int | None
    n_trajectories: int
    n_withheld: int
    """Complete trajectories that marks take out of what is served."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The next batch as it would be served now, and why everything else would not be."""

    batch_size: int
    decisions: tuple[Decision, ...]
    """Served (in that order), waiting (by rank), held, dropped."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Groups by decision and reason."""
        counts: dict[str, dict[str, int]] = {}
        for d in self.decisions:
            counts.setdefault(d.decision, Counter())[d.reason] += 1
        return counts


def dry_run(rules: Selection, infos: Iterable[GroupInfo], batch_size: int, judge: Judge) -> DryRun:
    """Return what a fetch of `batch_size` groups would do with these ready ones, judged by
    `judge`."""
    judged = [(info, *judge(info)) for info in sorted(infos, key=lambda i: i.sequence)]
    servable = [(info, key) for info, verdict, key in judged if verdict is None]
    # What was handed back is before everything else. Stable: equals stand by readiness.
    servable.sort(key=lambda pair: pair[1] if pair[0].sequence >= 0 else -math.inf)
    n_served = batch_size if len(servable) >= batch_size else 0
    why_it_waits = "later_batch" if n_served else "not_enough_groups"

    def decided(info: GroupInfo, what: Outcome, why: str, rank: int | None = None) -> Decision:
        shown, _ = rules.gate(info)
        return Decision(
            prompt_uid=info.prompt_uid,
            decision=what,
            reason=why,
            rank=rank,
            reward_mean=shown.reward_mean,
            reward_std=shown.reward_std,
            oldest_version=shown.oldest_version,
            newest_version=shown.newest_version,
            n_trajectories=len(shown.trajectories),
            n_withheld=len(info.trajectories) - len(shown.trajectories),
        )

    decisions = [
        decided(info, "serve", "in_order", rank)
        if rank <= n_served
        else decided(info, "wait", why_it_waits, rank)
        for rank, (info, _) in enumerate(servable, start=1)
    ]
    refused = [(info, verdict) for info, verdict, _ in judged if verdict is not None]
    refused.sort(key=lambda pair: isinstance(pair[1], Drop))  # those that are held first
    decisions += [
        decided(info, "drop" if isinstance(verdict, Drop) else "hold", verdict.reason)
        for info, verdict in refused
    ]
    return DryRun(batch_size, tuple(decisions))
