"""Sampling control: how many groups are begun, and which of them are trained.

A window is what is trained between two publications. In the modes with windows (`sync`,
`one_step_off`) generation has credit for so many groups, and gets new credit at a publication::

    publication ─► open_window ─► admit ─► group begun ─┬─► leased, scored ─┬─► trained
         ▲                          ▲                   │                   └─ filtered: refund ─┐
         │                          └───────────────────┴── dropped by the pool: refund ─────────┤
         │                                              │                                        │
         └── close_window: what is left over is dropped or kept ◄──── another takes its place ◄──┘

Worked example, `one_step_off` with 8 groups a window: 16 are begun under version 0; 8 are trained;
version 1 is published, 8 are left, so 8 more are begun, under version 1, while the 8 of version 0
are trained: one publication behind. In `async` mode there is no credit to run out of and the
pool's `max_outstanding_groups` is the brake.

Owns the credit, the channel's settings that follow from the mode, and the filter of scored groups.
Does not own: issuing groups (`rollout/`), scoring (`scoring.py`), the rules themselves
(`datapool/selection`). Pure but for `Pace`'s event. Loads no torch.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stepwell.datapool.config import ChannelConfig, SelectionConfig
from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.selection import Selection, TrajectoryInfo
from stepwell.datapool.selection.built_in import FILTERS
from stepwell.datapool.types import SFT, TRAIN, Group, Trajectory
from stepwell.trainer.algorithms.advantages.base import Estimator, baselined
from stepwell.trainer.config import LAG_LIMIT, AsyncTrainingConfig, SamplingConfig
from stepwell.trainer.errors import ConfigError, StarvedError
from stepwell.trainer.slime.filters import (
    RULE,
    ScoredGroup,
    check_signature,
    filter_arguments,
    most_different_first,
    preferred,
)
from stepwell.trainer.slime.samples import WholeSamples

NONZERO_STD = "nonzero_std"
"""Name that verl and slime give the filter `zero_variance`: the pool names it by what it drops."""
SCORED = "scored"
"""The pool's filter of groups that lack a reward."""
OVER_SAMPLING = "over_sampling"
"""The reason under which groups are dropped that `sampling.over_sampling_filter` left out."""
SORT_BY_REWARD_STD = "sort_by_reward_std"
_FILTERS = {**FILTERS, RULE: "stepwell.trainer.slime.filters:slime_filter"}
"""Filters that `sampling.filters` may name."""
SURPLUS = "surplus"
"""The reason under which groups begun beyond what a window trains are dropped."""


class Pace:
    """Credit for beginning groups; see the module's docstring.

    Args:
        limit: groups begun and not yet leased that a window starts with; None: no windows, `admit`
        never waits.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._credit = limit or 0
        self._left: dict[str, None] = {}
        self._credited = asyncio.Event()

    @property
    def left(self) -> list[str]:
        """Groups begun and neither leased nor dropped, the oldest first."""
        return list(self._left)

    async def admit(self, prompt_uid: str) -> None:
        """Returns once the group may be begun, and counts it as begun."""
        while self._limit is not None and self._credit <= 0:
            self._credited.clear()
            await self._credited.wait()
        self._credit -= 1
        self._left[prompt_uid] = None

    def adopt(self, prompt_uids: Iterable[str]) -> None:
        """These were begun by a former process and are still there."""
        for prompt_uid in prompt_uids:
            self._left[prompt_uid] = None
            self._credit -= 1

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Training has taken these: they no longer count as left at the next window."""
        for prompt_uid in prompt_uids:
            self._left.pop(prompt_uid, None)

    def lost(self, prompt_uid: str) -> bool:
        """The pool dropped a group: another may take its place. False if it is none of ours, or was
        counted before."""
        if prompt_uid not in self._left:
            return False
        del self._left[prompt_uid]
        self.refund(1)
        return True

    def refund(self, n: int) -> None:
        """`n` leased groups turned out not to be trained: as many more may be begun."""
        self._credit += n
        self._credited.set()

    def open_window(self) -> None:
        """The weights of a new window are on the engines."""
        if self._limit is not None:
            self._credit = self._limit - len(self._left)
            self._credited.set()


def credit_limit(
    training: AsyncTrainingConfig,
    sampling: SamplingConfig,
    train_batch_size: int,
    sft_share: float = 0.0,
) -> int | None:
    """Groups begun and not yet leased when a window opens: the window's own (or
    `over_sampling_batch_size`) plus those of the windows that generation runs ahead; None: the mode
    has no windows."""
    if (ahead := LAG_LIMIT.get(training.mode)) is None:
        return None
    window = training.window(train_batch_size)
    batches = window // (train_batch_size * training.require_batches)
    window -= sft_groups(1, window, sft_share)
    over = sampling.over_sampling_batch_size
    if sampling.over_sampling_filter is not None and over is not None:  # of each of its batches
        over = window = over * batches
    return ahead * window + (over or window)


def drops_surplus(training: AsyncTrainingConfig) -> bool:
    """True if groups that a window did not use are dropped with it: on-policy data admits none, and
    `partial_rollout` is the permission to go on with them under the next weights."""
    return training.mode == "sync" and not training.partial_rollout


def train_channel(
    channel: ChannelConfig,
    training: AsyncTrainingConfig,
    sampling: SamplingConfig,
    max_outstanding_groups: int | None,
    *,
    only_scored: bool = False,
) -> ChannelConfig:
    """The pool's `train` channel as the run needs it: limits, filters and, in modes with windows,
    the age from which a group is not trained but its prompt issued again.

    Args:
        channel: as it is configured.
        max_outstanding_groups: None: nobody who opens a group waits.
        only_scored: nobody but the agents gives rewards: a group without one is of no use.

    Raises:
        ConfigError: `sampling.filters` names no filter.
    """
    # The pool has no samples to ask a function of slime's form about: `GroupFilter` does.
    for_pool = tuple(f for f in _pool_names(sampling.filters) if not f.strip().startswith(RULE))
    filters = (*channel.selection.filters, *for_pool)
    if only_scored and SCORED not in filters:
        filters = (SCORED, *filters)
    update: dict[str, object] = {
        "max_queue_size": training.max_queue_size,
        "max_outstanding_groups": max_outstanding_groups,
        "selection": channel.selection.model_copy(update={"filters": filters}),
    }
    mixed = training.mode == "sync" and training.partial_rollout
    limit = LAG_LIMIT.get(training.mode)
    if limit is not None and not mixed:
        own = channel.max_staleness
        update["max_staleness"] = limit if own is None else min(own, limit)
        update["on_stale"] = "return"
    GroupFilter(sampling)  # a wrong name is an error here, not in an actor
    return channel.model_copy(update=update)


def sft_channel(channel: ChannelConfig, groups: int) -> ChannelConfig:
    """The pool's `sft` channel as the run needs it: conversations wait there for two batches, go
    in the order in which they came, and no age and no filter of rewards takes one out.

    Args:
        channel: as it is configured.
        groups: of a batch.
    """
    return channel.model_copy(
        update={
            "max_outstanding_groups": 2 * groups,
            "max_queue_size": None,
            "max_staleness": None,
            "max_ahead_versions": None,
            "group_deadline_s": None,
            "group_idle_s": None,
            "reward_wait_s": None,
            "selection": SelectionConfig(),
        }
    )


class GroupFilter:
    """`sampling.filters` over groups that the trainer has scored.

    The pool judges a group as soon as it is ready, if its agents scored it; one that the trainer
    scores (`rollout.reward`) can only be judged here, after the lease. Functions of slime's form
    (`slime_filter(path)`, `over_sampling_filter`) are only asked here, with whole samples.

    Args:
        tokenizer_path: makes the texts of samples; None: names are checked, and no function of
            slime's form is called.
        arguments: of a run, by slime's names, for functions of slime's form.
        estimator: of advantages, which knows what rollouts are baselines and not trained; None:
            groups come without such.

    Raises:
        ConfigError: a name that is not known, or a function that cannot be called.
    """

    def __init__(
        self,
        config: SamplingConfig,
        tokenizer_path: Path | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        estimator: Estimator | None = None,
    ) -> None:
        self._estimator = estimator
        self._max_refills = config.max_refills
        self._args = filter_arguments(arguments)
        self._whole = None if tokenizer_path is None else WholeSamples(tokenizer_path)
        try:
            self._names = SelectionConfig(filters=_pool_names(config.filters))
            self._selection = Selection(self._names, _FILTERS)
        except SelectionError as e:
            raise ConfigError(f"sampling.filters: {e}") from e
        self._over = config.over_sampling_filter
        self._prefer: Callable[..., Any] | None = None
        if self._over not in (None, SORT_BY_REWARD_STD):
            try:
                self._prefer = resolve(self._over)
                check_signature(self._prefer)
            except (ImportError, ValueError) as e:
                raise ConfigError(
                    f"sampling.over_sampling_filter is {self._over!r} ({e}); name "
                    f"{SORT_BY_REWARD_STD}, or a function (args, samples) by a dotted path that "
                    "Python can import"
                ) from e
        self.asks_functions = self._prefer is not None or any(RULE in f for f in config.filters)
        """True if functions of slime's form are asked, which takes time: not on an event loop."""
        self.taken = config.over_sampling_batch_size if self._over else None
        """Groups of which `best` keeps a batch; None: as many as a batch has."""
        self.dropped: Counter[str] = Counter()
        """Groups dropped here so far, by reason."""

    def keep(self, groups: Iterable[Group]) -> list[Group]:
        """Return the groups to train on, without their baselines (`baselined`): those that no
        filter objects to, in order.

        Raises:
            stepwell.datapool.errors.SelectionError: a filter failed.
            RewardError: a baseline was to be run for a group and was not.
        """
        judged = list(groups)
        if self._estimator is not None:
            judged = baselined(judged, self._estimator)
        if not self._names.filters:
            return judged
        kept = []
        for group in judged:
            if (verdict := self._selection.judge(self._info(group))) is None:
                kept.append(group)
            else:
                self.dropped[verdict.reason] += 1
        return kept

    def best(self, groups: list[Group], size: int) -> list[Group]:
        """The `size` of `groups` that `sampling.over_sampling_filter` puts first; what is left out
        is counted.

        Raises:
            SelectionError: the function failed.
        """
        if self._over is None:
            return groups
        try:
            if self._prefer is None:
                order = most_different_first([_rewards(group) for group in groups])
            else:
                order = preferred(self._prefer, self._args, self._samples(groups))
        except ENDS:
            raise
        except BaseException as e:  # foreign code: whatever it raises is reported with its name
            raise SelectionError(
                f"sampling.over_sampling_filter {self._over!r} failed: {type(e).__name__}: {e}"
            ) from e
        kept = [groups[number] for number in order[:size]]
        self.dropped[OVER_SAMPLING] += len(groups) - len(kept)
        return kept

    def _info(self, group: Group) -> ScoredGroup:
        """The group as filters of the pool's form, and of slime's, see it."""
        return ScoredGroup(
            prompt_uid=group.prompt_uid,
            channel=TRAIN,
            n_rollouts=group.n_rollouts,
            trajectories=tuple(_trajectory_info(t) for t in group.trajectories),
            sequence=0,
            opened_at=0.0,
            delivery=group.delivery,
            metadata=group.metadata,
            samples=cache(lambda: self._samples([group])[0]),  # several filters see the same ones
            args=self._args,
        )

    def _samples(self, groups: list[Group]) -> list[list[Any]]:
        if self._whole is None:
            raise ValueError("there is no tokenizer to make the texts of samples with")
        return self._whole.by_trajectory(groups)

    def check_refills(self, done: int) -> None:
        """A batch is to be filled up again, after `done` times.

        Raises:
            StarvedError: that is as often as it may be.
        """
        limit = self._max_refills
        if limit is not None and done >= limit:
            raise StarvedError(
                f"a batch was filled up sampling.max_refills = {limit} times and is not whole yet; "
                f"groups filtered so far: {dict(self.dropped)}. Take other prompts or filters, or "
                "raise the limit"
            )

    def metrics(self) -> dict[str, float]:
        """`sampling/filtered`: groups dropped here so far, and the same by reason."""
        counts = {f"sampling/filtered/{r}": float(n) for r, n in sorted(self.dropped.items())}
        return {"sampling/filtered": float(self.dropped.total()), **counts}


CHANNEL = "channel"
"""Key of a group's metadata: the channel it was leased from, which says by what loss it is trained.
Absent: `train`."""


def sft_groups(batches: int, size: int, share: float) -> int:
    """Conversations among the groups of the first `batches` batches of `size`."""
    return math.floor(batches * size * share + 1e-9)


def is_sft(group: Group) -> bool:
    """True if the group is a conversation, trained by its likelihood."""
    return bool(group.metadata.get(CHANNEL) == SFT)


def _rewards(group: Group) -> list[float]:
    return [t.reward for t in group.trajectories if t.reward is not None]


def _trajectory_info(trajectory: Trajectory) -> TrajectoryInfo:
    versions = [s.policy_version for s in trajectory.steps]
    newest = [max((v.version for v in s.version_spans), default=0) for s in trajectory.steps]
    return TrajectoryInfo(
        trajectory_uid=trajectory.trajectory_uid,
        reward=trajectory.reward,
        n_steps=len(trajectory.steps),
        n_tokens=sum(s.n_tokens for s in trajectory.steps),
        oldest_version=min(versions),
        newest_version=max(versions + newest),
        attempt=trajectory.attempt,
        metadata=trajectory.metadata,
    )


def _pool_names(filters: Iterable[str]) -> tuple[str, ...]:
    return tuple("zero_variance" if f.strip() == NONZERO_STD else f for f in filters)
