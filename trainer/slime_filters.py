"""slime's filter functions as rules of a channel's selection.

    slime                                              Stepwell
    --dynamic-sampling-filter-path F                   filters: [slime_filter(F)]
      check_reward_nonzero_std                         filters: [zero_variance], same threshold
    --over-sampling-batch-size                         how far generation may run ahead: the
                                                       channel's `max_outstanding_groups`

F is a dotted path. The selection knows this module by its path and imports it where its name is
used, in the pool's process too: it needs no slime and loads no torch.

Owns slime's signatures. Does not own what a rule may see or answer (`datapool/selection`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from stepwell.backends.slime.samples import SlimeSample
from stepwell.datapool.selection import Drop, Filter, GroupInfo, Verdict


def slime_filter(function: Callable[..., Any], args: Any = None) -> Filter:
    """A filter from a function for slime's `--dynamic-sampling-filter-path`:
    `(args, samples) -> bool | DynamicFilterOutput(keep, reason)`.

    Its rejects are dropped. A group with an unscored trajectory is served unasked: such functions
    expect rewards. `keep_when_insufficient` has no meaning in a stream and is not read.
    `args` stands in for slime's arguments; None has no more than `reward_key=None`.
    """
    if args is None:
        args = SimpleNamespace(reward_key=None, eval_reward_key=None)

    def judge(info: GroupInfo) -> Verdict | None:
        if not info.is_scored:
            return None
        output = function(args, _samples(info))
        if getattr(output, "keep", output):
            return None
        name = getattr(function, "__name__", type(function).__name__)
        return Drop(getattr(output, "reason", None) or name)

    return judge


def _samples(info: GroupInfo) -> list[SlimeSample]:
    """Without tokens and texts, which the pool does not unpack to select. Writing to one changes
    nothing in the pool."""
    return [
        SlimeSample(
            group_index=0,
            index=index,
            reward=t.reward,
            weight_versions=[str(t.oldest_version), str(t.newest_version)],
            metadata=dict(t.metadata),
        )
        for index, t in enumerate(info.trajectories)
    ]
