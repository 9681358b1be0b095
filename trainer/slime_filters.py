"""slime's filter functions as rules of a channel's selection.

    slime                                              Stepwell
    --dynamic-sampling-filter-path F                   filters: [slime_filter(F)]
      check_reward_nonzero_std                         filters: [zero_variance], same threshold
    --over-sampling-batch-size                         how far generation may run ahead: the
                                                       channel's `max_outstanding_groups`
    --over-sampling-filter-path                        batch_filter: over_sampling(r), with
      sort_by_reward_std (to 2025-09)                  r = over_sampling_batch_size /
                                                       rollout_batch_size; losers are dropped, too
    --buffer-filter-path F                             batch_filter: slime_buffer_filter(F)

F is a dotted path. The selection knows this module by its path and imports it where one of its two
names is used, in the pool's process too: it needs no slime and loads no torch.

Owns slime's signatures. Does not own what a rule may see or answer (`datapool/selection`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

from stepwell.backends.slime_samples import SlimeSample
from stepwell.datapool.selection import BatchFilter, Choice, Drop, Filter, GroupInfo, Verdict

BUFFER_FILTER = "buffer_filter"


def slime_filter(function: Callable[..., Any], args: Any = None) -> Filter:
    """A filter from a function for slime's `--dynamic-sampling-filter-path`:
    `(args, samples) -> bool | DynamicFilterOutput(keep, reason)`.

    Its rejects are dropped. A group with an unscored trajectory is served unasked: such functions
    expect rewards. `keep_when_insufficient` has no meaning in a stream and is not read.
    `args` stands in for slime's arguments; None has no more than `reward_key=None`.
    """
    args = _stand_in() if args is None else args

    def judge(info: GroupInfo) -> Verdict | None:
        if not info.is_scored:
            return None
        output = function(args, _buffer([info])[0])
        if getattr(output, "keep", output):
            return None
        name = getattr(function, "__name__", type(function).__name__)
        return Drop(getattr(output, "reason", None) or name)

    return judge


def slime_buffer_filter(function: Callable[..., Any], args: Any = None) -> BatchFilter:
    """A batch filter from a function for slime's `--buffer-filter-path`:
    `(args, rollout_id, buffer: list[list[Sample]], num_samples) -> list[list[Sample]]`.

    The buffer holds the window's groups in order, `rollout_id` is None as in slime. What it
    returns is served; what it only takes out of `buffer` is dropped; the rest stays. slime fills
    a short answer up with new prompts; here the batch waits, and what was returned stays ready.
    `args` as in `slime_filter`.
    """
    args = _stand_in() if args is None else args

    def choose(infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        groups = _buffer(infos)
        # By identity: groups with the same rewards are equal.
        uid_of = {id(g): i.prompt_uid for g, i in zip(groups, infos, strict=True)}
        buffer = list(groups)
        returned = []
        for group in function(args, None, buffer, batch_size):
            if id(group) not in uid_of:
                raise ValueError("it returned a group that is not one of the buffer's list objects")
            returned.append(uid_of[id(group)])
        kept = {uid_of.get(id(g)) for g in buffer} | set(returned)
        return Choice(
            serve=returned if len(returned) >= batch_size else (),
            drop={uid: BUFFER_FILTER for uid in uid_of.values() if uid not in kept},
        )

    return choose


def _stand_in() -> SimpleNamespace:
    """For slime's arguments; a function that reads others needs a wrapper."""
    return SimpleNamespace(reward_key=None, eval_reward_key=None)


def _buffer(infos: Iterable[GroupInfo]) -> list[list[SlimeSample]]:
    """Samples without tokens and texts, which the pool does not unpack to select; counted over all
    groups. Writing to one changes nothing in the pool."""
    index = count()
    return [
        [
            SlimeSample(
                group_index=group_index,
                index=next(index),
                reward=t.reward,
                weight_versions=[str(t.oldest_version), str(t.newest_version)],
                metadata=dict(t.metadata),
            )
            for t in info.trajectories
        ]
        for group_index, info in enumerate(infos)
    ]
