"""What the rules would serve now, and why everything else would not be served.

A dry run asks the `Selection` that serves, and hands it a copy of what is ready: drops leave the
copy only. Owns the account of it; decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, TypeAlias

from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.selection.groups import Drop, GroupInfo, Hold, Verdict
from stepwell.datapool.selection.rules import Selection

Outcome: TypeAlias = Literal["serve", "wait", "hold", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What would become of one group. Rewards, versions and counts are of what would be served."""

    prompt_uid: str
    decision: Outcome
    reason: str
    rank: int | None = None
    """Place in the order, from 1; None if the group is held, or dropped before it got one."""
    key: float | None = None
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    newest_version: int | None
    n_trajectories: int
    n_withheld: int
    """Complete trajectories that marks take out of what is served."""
    n_steps: int
    n_tokens: int


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

    def table(self, limit: int | None = None) -> str:
        """A table for a terminal: the first `limit` groups (None: all) and the counts."""
        rows = [tuple(_TABLE), *(tuple(c(d) for c in _TABLE.values()) for d in self.decisions)]
        shown = rows if limit is None else rows[: limit + 1]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if name in ("decision", "group", "reason") else cell.rjust(width)
                for name, cell, width in zip(_TABLE, row, widths, strict=True)
            ).rstrip()
            for row in shown
        ]
        lines += [f"… and {hidden} more"] if (hidden := len(rows) - len(shown)) else []
        summary = "; ".join(
            f"{decision} {sum(reasons.values())} "
            f"({', '.join(f'{reason} {n}' for reason, n in reasons.items())})"
            for decision, reasons in self.counts.items()
        )
        lines.append(f"batch of {self.batch_size}: {summary or 'no group is ready'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table(limit=50)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


_TABLE: Final[Mapping[str, Callable[[Decision], str]]] = {
    "rank": lambda d: _number(d.rank),
    "decision": lambda d: d.decision,
    "group": lambda d: d.prompt_uid,
    "reason": lambda d: d.reason,
    "key": lambda d: _number(d.key),
    "reward": lambda d: _number(d.reward_mean),
    "std": lambda d: _number(d.reward_std),
    "versions": lambda d: (
        "-" if d.oldest_version is None else f"{d.oldest_version}..{d.newest_version}"
    ),
    "size": lambda d: f"{d.n_trajectories}" + (f" (-{d.n_withheld})" if d.n_withheld else ""),
    "steps": lambda d: str(d.n_steps),
    "tokens": lambda d: str(d.n_tokens),
}
"""Columns of the table."""

Judge: TypeAlias = Callable[[GroupInfo], tuple[Verdict | None, float]]
"""The verdict and the key of a group."""


class _Copy:
    """Ready groups as a channel would have them with these rules; what is dropped leaves nothing
    but this copy."""

    def __init__(
        self, infos: Iterable[GroupInfo], judge: Judge, more_may_come: Callable[[int], bool]
    ) -> None:
        self._more_may_come = more_may_come
        self.infos = {info.prompt_uid: info for info in sorted(infos, key=lambda i: i.sequence)}
        judged = {uid: judge(info) for uid, info in self.infos.items()}
        self.refused = {uid: v for uid, (v, _) in judged.items() if v is not None}
        self.keys = {uid: key for uid, (v, key) in judged.items() if v is None}
        # What was handed back is before everything else. Stable: equals stand by readiness.
        places = {u: k if self.infos[u].sequence >= 0 else -math.inf for u, k in self.keys.items()}
        self.left = dict.fromkeys(sorted(places, key=places.__getitem__))
        self.ranks = {uid: rank for rank, uid in enumerate(self.left, start=1)}
        self.seen: list[str] = []
        """By the rules, when they were last asked."""

    def __len__(self) -> int:
        return len(self.left)

    def first(self, limit: int) -> list[str]:
        self.seen = list(islice(self.left, limit))
        return self.seen

    def info(self, prompt_uid: str) -> GroupInfo:
        return self.infos[prompt_uid]

    def drop(self, prompt_uid: str, reason: str) -> None:
        del self.left[prompt_uid]
        self.refused[prompt_uid] = Drop(reason)

    def more_may_come(self) -> bool:
        return self._more_may_come(len(self.reasons(Drop)))

    def reasons(self, kind: type[Verdict]) -> dict[str, str]:
        return {uid: v.reason for uid, v in self.refused.items() if isinstance(v, kind)}


def dry_run(
    rules: Selection,
    infos: Iterable[GroupInfo],
    batch_size: int,
    *,
    judge: Judge | None = None,
    more_may_come: Callable[[int], bool] = lambda n_dropped: True,
) -> DryRun:
    """What a fetch of `batch_size` groups would do with these ready ones. Changes nothing.

    Args:
        judge: where a group is up to more than the rules.
        more_may_come: whether it may, after so many drops.

    Raises:
        InvalidRequestError: `batch_size` < 1.
        SelectionError: as the rules themselves do.
    """
    if batch_size < 1:
        raise InvalidRequestError(f"batch_size is {batch_size}; ask for at least 1 group")
    ready = _Copy(infos, judge or (lambda i: (rules.judge(i), rules.key(i))), more_may_come)
    served = rules.next_batch(ready, batch_size)
    filtered = rules.config.batch_filter is not None

    def why_it_waits(prompt_uid: str) -> str:
        if filtered and prompt_uid not in ready.seen:
            return "beyond_window"
        if served:
            return "not_chosen" if filtered else "later_batch"
        return "not_enough_groups" if len(ready.left) < batch_size else "batch_filter_waits"

    def decided(prompt_uid: str, decision: Outcome, reason: str) -> Decision:
        info = ready.infos[prompt_uid]
        shown, _ = rules.gate(info)
        return Decision(
            prompt_uid=prompt_uid,
            decision=decision,
            reason=reason,
            rank=ready.ranks.get(prompt_uid),
            key=ready.keys.get(prompt_uid),
            reward_mean=shown.reward_mean,
            reward_std=shown.reward_std,
            oldest_version=shown.oldest_version,
            newest_version=shown.newest_version,
            n_trajectories=len(shown.trajectories),
            n_withheld=len(info.trajectories) - len(shown.trajectories),
            n_steps=shown.n_steps,
            n_tokens=shown.n_tokens,
        )

    reasons: dict[Outcome, dict[str, str]] = {
        "serve": dict.fromkeys(served, "chosen" if filtered else "in_order"),
        "wait": {uid: why_it_waits(uid) for uid in ready.left if uid not in served},
        "hold": ready.reasons(Hold),
        "drop": ready.reasons(Drop),
    }
    decisions = (decided(u, what, why) for what, of in reasons.items() for u, why in of.items())
    return DryRun(batch_size, tuple(decisions))
