"""slime's filter functions as rules of a batch.

    slime                                              Stepwell
    --dynamic-sampling-filter-path F                   sampling.filters: [slime_filter(F)]
      check_reward_nonzero_std                         sampling.filters: [nonzero_std]
    --over-sampling-filter-path F                      sampling.over_sampling_filter: F
      sort_by_reward_std                               sort_by_reward_std
    --over-sampling-batch-size                         how far generation may run ahead: the
                                                       channel's `max_outstanding_groups`

F is a dotted path of a function `(args, samples)`, called with whole samples: tokens, texts,
rewards, label, status, mask and log-probs are those of the trajectories. So it is asked by the
trainer, once a group is leased and scored: the pool, which unpacks no tokens to select, refuses the
name. What a function writes to a sample is not trained. `check_reward_nonzero_std` and
`sort_by_reward_std` are slime's, for functions that call them.

Owns slime's signatures. Does not own samples (`samples.py`) or what a rule may see or answer
(`datapool/selection`). Needs no slime, loads no torch.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.datapool.dotted import resolve
from stepwell.datapool.selection import Drop, Filter, GroupInfo, Verdict
from stepwell.datapool.selection.built_in import ZERO_STD
from stepwell.trainer.slime.arguments import Arguments

RULE = "slime_filter"
"""Name of a filter of `sampling.filters`, with the path of a function in brackets."""


def filter_arguments(given: Mapping[str, Any] | None = None) -> Arguments:
    """slime's arguments as filters get them, of those `given` by slime's names."""
    known = {"reward_key": None, "eval_reward_key": None, **(given or {})}
    return Arguments(f"filters are given {', '.join(sorted(known))}", **known)


@dataclass(frozen=True, slots=True)
class ScoredGroup(GroupInfo):
    """A group that the trainer has scored, with its samples."""

    samples: Callable[[], list[Any]] = field(default=list, kw_only=True, compare=False, repr=False)
    """Makes one sample for each trajectory."""
    args: Any = field(default=None, kw_only=True, compare=False, repr=False)
    """For functions of slime's form."""


@dataclass(slots=True)
class DynamicFilterOutput:
    """Answer of a filter of slime's; true if the group is kept."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Keep a rejected group where dropping it would start another round of generation."""

    def __bool__(self) -> bool:
        return self.keep


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> Any:
    """Keep a group whose rewards differ: slime's `check_reward_nonzero_std`, of its signature.

    Returns:
        slime's `DynamicFilterOutput` where slime is installed, else ours. As there, the deviation
        is the unbiased one, and a group of one is not kept.
    """
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = _std(rewards) > ZERO_STD
    reason = None if keep else f"zero_std_{round(rewards[0], 1)}"
    try:
        return resolve("slime.rollout.filter_hub.base_types:DynamicFilterOutput")(keep, reason)
    except ImportError:
        return DynamicFilterOutput(keep, reason)


def sort_by_reward_std(args: Any, samples: list[list[Any]], **kwargs: Any) -> list[list[Any]]:
    """Groups whose rewards differ the most first; equal ones in their order."""
    rewards = [[sample.reward for sample in group] for group in samples]
    return [samples[i] for i in most_different_first(rewards)]


def most_different_first(rewards: Sequence[Sequence[Any]]) -> list[int]:
    """Groups by number, those whose rewards differ the most first."""
    stds = [0.0 if len(own) < 2 else _std(own) for own in rewards]
    return sorted(range(len(stds)), key=stds.__getitem__, reverse=True)


def preferred(
    function: Callable[..., Any], args: Any, groups: Sequence[Sequence[Any]]
) -> list[int]:
    """Return the groups, by number, that a function for slime's `--over-sampling-filter-path`
    keeps, the best first: `(args, list of groups of samples) -> list of groups`.

    Raises:
        ValueError: it returned something else.
    """
    answer = function(args, [list(group) for group in groups])
    number_of = {id(sample): number for number, group in enumerate(groups) for sample in group}
    try:
        kept = [number_of[id(group[0])] for group in answer]
    except (TypeError, IndexError, KeyError) as e:
        raise ValueError(
            f"{answer!r:.80} is no list of the groups of samples that it was given"
        ) from e
    if len(set(kept)) < len(kept):
        raise ValueError(f"it returned a group twice; groups by number: {kept}")
    return kept


def slime_filter(function: Callable[..., Any]) -> Filter:
    """A filter from a function for slime's `--dynamic-sampling-filter-path`:
    `(args, samples) -> bool | DynamicFilterOutput(keep, reason)`.

    Its rejects are dropped. One with `keep_when_insufficient` is kept: a batch is leased whole, so
    that dropping any group of it starts another round.

    Raises:
        ValueError: the function cannot be called so.
    """
    check_signature(function)

    def judge(info: GroupInfo) -> Verdict | None:
        if not isinstance(info, ScoredGroup):
            raise TypeError(f"{RULE} was given a {type(info).__name__}, which has no samples")
        output = function(info.args, info.samples())
        if getattr(output, "keep", output) or getattr(output, "keep_when_insufficient", False):
            return None
        name = getattr(function, "__name__", type(function).__name__)
        return Drop(getattr(output, "reason", None) or name)

    return judge


def check_signature(function: Callable[..., Any]) -> None:
    """Refuse a function that does not take slime's `(args, samples)`.

    Raises:
        ValueError: it takes others, or is async: its answer would be a coroutine, and true.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError("it is async, and slime's filters are plain functions; write it as def")
    try:
        signature = inspect.signature(function)
        signature.bind("args", "samples")
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"it cannot be called as slime's filters are, (args, samples): {e}; its parameters "
            f"are {signature}"
        ) from e


def _std(rewards: Sequence[Any]) -> float:
    """Return the unbiased deviation; NaN of fewer than two rewards, as torch does."""
    return statistics.stdev(rewards) if len(rewards) > 1 else math.nan
