"""slime's filter functions as rules of a channel's selection and of a batch.

    slime                                              Stepwell
    --dynamic-sampling-filter-path F                   filters: [slime_filter(F)]
      check_reward_nonzero_std                         filters: [zero_variance], same threshold
    --over-sampling-filter-path F                      sampling.over_sampling_filter: F
      sort_by_reward_std                               sort_by_reward_std
    --over-sampling-batch-size                         how far generation may run ahead: the
                                                       channel's `max_outstanding_groups`

F is a dotted path. The selection knows this module by its path and imports it where its name is
used, in the pool's process too: it needs no slime and loads no torch.

Owns slime's signatures. Does not own what a rule may see or answer (`datapool/selection`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from stepwell.backends.slime.sample import SlimeSample
from stepwell.datapool.selection import Drop, Filter, GroupInfo, Verdict

NO_ARGS = SimpleNamespace(reward_key=None, eval_reward_key=None)
"""Stands in for slime's arguments."""


def sort_by_reward_std(args: Any, samples: list[list[Any]], **kwargs: Any) -> list[list[Any]]:
    """Groups whose rewards differ the most first; equal ones in their order."""

    def spread(group: list[Any]) -> float:
        return statistics.stdev([s.reward for s in group]) if len(group) > 1 else 0.0

    return sorted(samples, key=spread, reverse=True)


def preferred(function: Callable[..., Any], groups: Sequence[GroupInfo]) -> list[int]:
    """Which of `groups` a function for slime's `--over-sampling-filter-path` keeps, the best first:
    `(args, list of groups of samples) -> list of groups`.

    Raises:
        ValueError: it returned something else.
    """
    answer = function(NO_ARGS, [_samples(info, number) for number, info in enumerate(groups)])
    try:
        kept = [int(group[0].group_index) for group in answer]
    except (TypeError, IndexError, AttributeError) as e:
        raise ValueError(
            f"{answer!r:.80} is no list of the groups of samples that it was given"
        ) from e
    if len(set(kept)) < len(kept):
        raise ValueError(f"it returned a group twice; groups by number: {kept}")
    return kept


def slime_filter(function: Callable[..., Any], args: Any = None) -> Filter:
    """A filter from a function for slime's `--dynamic-sampling-filter-path`:
    `(args, samples) -> bool | DynamicFilterOutput(keep, reason)`.

    Its rejects are dropped. A group with an unscored trajectory is served unasked: such functions
    expect rewards. `keep_when_insufficient` has no meaning in a stream and is not read.
    `args` stands in for slime's arguments; None has no more than `reward_key=None`.
    """
    args = NO_ARGS if args is None else args

    def judge(info: GroupInfo) -> Verdict | None:
        if not info.is_scored:
            return None
        output = function(args, _samples(info))
        if getattr(output, "keep", output):
            return None
        name = getattr(function, "__name__", type(function).__name__)
        return Drop(getattr(output, "reason", None) or name)

    return judge


def _samples(info: GroupInfo, number: int = 0) -> list[SlimeSample]:
    """Without tokens and texts, which the pool does not unpack to select. Writing to one changes
    nothing in the pool."""
    return [
        SlimeSample(
            group_index=number,
            index=index,
            reward=t.reward,
            weight_versions=[str(t.oldest_version), str(t.newest_version)],
            metadata=dict(t.metadata),
        )
        for index, t in enumerate(info.trajectories)
    ]
