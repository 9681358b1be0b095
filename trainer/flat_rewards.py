"""This module notices groups whose rewards are all equal, so that a run that learns nothing says so
and says why.

    scored groups ──see──► share of this optimizer step ─► metric `groups/no_signal`
                                   └─ the last STEPS of them ─► one warning, with its cause

A group without a difference between its rewards has advantage 0 for every token: nothing is learnt
from it, whatever it cost. A group of one rollout, or any where the baseline is not the group
(`advantages.py`), is compared with the others of its batch; a batch of one rollout with the batches
before. Groups are seen before `sampling.filters` drops any; those that the pool drops are not seen.

Owns the causes that can be told from the rollouts. Does not own rewards or filters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stepwell.datapool.types import Group

STEPS = 10
"""Optimizer steps that are looked at together: the first may be flat for a good reason."""
NEARLY_ALL = 0.95
"""Share of groups without a signal from which the user is warned."""
MOSTLY_WRONG = 0.85
"""The same where they fail: what a few lucky guesses earn teaches next to nothing."""
MOST = 0.9
"""Share of rollouts, or of groups without a signal, from which something counts as the cause."""


@dataclass(frozen=True, slots=True)
class _GroupSummary:
    """Figures of a scored group that may be the cause; shares are of its rollouts."""

    rollouts: int
    lowest: float
    highest: float
    reward: float
    """The mean."""
    same: bool
    """Every rollout has the very tokens of the first."""
    cut: float
    """The last reply ended at max_tokens."""
    has_tools: bool
    calls_tools: float
    flat: bool = False
    """Known once the others of its batch are."""


class FlatRewards:
    """Watches the groups of a run.

    Args:
        samples: where replies can be read with their rewards, for the warning.
        within_group: a group's own rewards are the baseline.
    """

    def __init__(self, samples: Path, *, within_group: bool) -> None:
        self._samples = samples
        self._within_group = within_group
        self._batch: list[_GroupSummary] = []
        self._steps: deque[list[_GroupSummary]] = deque(maxlen=STEPS)
        self._warned = False

    def see(self, groups: Sequence[Group]) -> None:
        """These were scored for the optimizer step that is recorded next."""
        self._batch += map(_seen, groups)

    def metrics(self) -> dict[str, float | str]:
        """Figures of an optimizer step: `groups/no_signal`, the share of its groups whose rewards
        are all equal; and once in a run `warning`, when that was nearly all for `STEPS` steps."""
        if self._batch:
            self._steps.append(self._judged(self._batch))
            self._batch = []
        if not self._steps:
            return {}
        metrics: dict[str, float | str] = {
            "groups/no_signal": _share(s.flat for s in self._steps[-1])
        }
        seen = [s for step in self._steps for s in step]
        if not self._warned and len(self._steps) == STEPS and (found := _warning(seen)):
            self._warned = True
            metrics["warning"] = f"{found} (replies and rewards: {self._samples})"
        return metrics

    def _judged(self, batch: Sequence[_GroupSummary]) -> list[_GroupSummary]:
        """Copies of the batch with `flat` filled in."""
        others = list(batch)
        if sum(s.rollouts for s in batch) == 1:
            others += [s for step in self._steps for s in step]
        all_equal = min(s.lowest for s in others) == max(s.highest for s in others)
        return [
            replace(
                s,
                flat=s.lowest == s.highest if self._within_group and s.rollouts > 1 else all_equal,
            )
            for s in batch
        ]


def _seen(group: Group) -> _GroupSummary:
    rollouts = group.trajectories
    rewards = [t.reward or 0.0 for t in rollouts]
    replies = {tuple(s.response_ids.tobytes() for s in t.steps) for t in rollouts}
    return _GroupSummary(
        rollouts=len(rollouts),
        lowest=min(rewards),
        highest=max(rewards),
        reward=float(np.mean(rewards)),
        same=len(rollouts) > 1 and len(replies) == 1,
        cut=_share(t.steps[-1].finish_reason == "length" for t in rollouts),
        has_tools=any("tool_calls" in s.metadata for t in rollouts for s in t.steps),
        calls_tools=_share(any(s.metadata.get("tool_calls") for s in t.steps) for t in rollouts),
    )


def _warning(seen: Sequence[_GroupSummary]) -> str | None:
    """Warning about the groups; None: there is enough to learn from."""
    flat = [s for s in seen if s.flat]
    if len(flat) < MOSTLY_WRONG * len(seen):
        return None
    (reward, n_of_it), *_ = Counter(s.reward for s in flat).most_common(1)
    alike = n_of_it >= MOST * len(flat)
    if len(flat) < NEARLY_ALL * len(seen) and not (alike and reward <= 0):
        return None
    n, what = (n_of_it, f"{reward:g}") if alike else (len(flat), "equal")
    return (
        f"little to learn from: in {n} of {len(seen)} groups of the last {STEPS} steps all rewards "
        f"were {what}. {_cause(flat, reward if alike else None)}"
    )


def _cause(flat: Sequence[_GroupSummary], reward: float | None) -> str:
    """Cause that groups without a signal have in common, and what to do about it.

    Args:
        reward: of nearly all of them; None: they differ.
    """
    if _share(s.same for s in flat) >= MOST:
        return (
            "The rollouts of a group are the same, token for token: let the agent, or "
            "rollout.temperature, ask for temperature 1"
        )
    if reward is None:
        return (
            "Each task is either always right or always wrong: take tasks in between, or raise "
            "rollout.n"
        )
    if reward > 0:
        return (
            "The tasks are solved, or the reward accepts any reply: take harder tasks, or look at "
            "the reward"
        )
    if (cut := float(np.mean([s.cut for s in flat]))) >= MOST:
        return (
            f"{cut:.0%} of the replies were cut off at max_tokens: raise it in the agent (and in "
            "rollout.max_tokens, if that is set)"
        )
    tools = [s.calls_tools for s in flat if s.has_tools]
    if tools and (calls := float(np.mean(tools))) <= 1 - MOST:
        return (
            f"The model calls its tools in {calls:.0%} of the rollouts: tell it to in the prompt, "
            "or begin with a model that knows how"
        )
    return (
        "Either the reward accepts no reply, or the tasks are too hard for the model: try easier "
        "ones, or give some reward for a part of the way"
    )


def _share(values: Iterable[bool]) -> float:
    return float(np.mean(list(values)))
