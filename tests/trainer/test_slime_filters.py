"""slime's filter functions as rules of a channel."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

from stepwell.backends.slime.sample import SlimeSample
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.selection import (
    Drop,
    GroupInfo,
    Selection,
    TrajectoryInfo,
)
from stepwell.trainer.slime.filters import slime_filter


def group(uid, rewards, versions=None):
    versions = versions or [0] * len(rewards)
    trajectories = tuple(
        TrajectoryInfo(f"{uid}{i}", r, 2, 10, oldest_version=v, newest_version=v)
        for i, (r, v) in enumerate(zip(rewards, versions, strict=True))
    )
    return GroupInfo(uid, "train", len(rewards), trajectories, 0, 0.0)


def select(**config):
    return Selection(SelectionConfig(**config))


def here(function):
    """The dotted path of a function of this module."""
    return f"{__name__}:{function.__name__}"


def spread_of(args, samples, **kwargs):
    """As slime's check_reward_nonzero_std, without torch."""
    rewards = [s.get_reward_value(args) for s in samples]
    keep = statistics.stdev(rewards) > 1e-6
    return SimpleNamespace(keep=keep, reason=None if keep else f"zero_std_{rewards[0]}")


def any_correct(args, samples):
    return any(s.reward == 1.0 for s in samples)


def test_a_function_for_slimes_dynamic_sampling_is_a_filter():
    rules = select(filters=[f"slime_filter({here(spread_of)})"])
    assert rules.judge(group("p", [1.0, 1.0])) == Drop("zero_std_1.0")
    assert rules.judge(group("p", [1.0, 0.0])) is None
    assert rules.judge(group("p", [1.0, None])) is None
    older = select(filters=[f"slime_filter({here(any_correct)})"])
    assert older.judge(group("p", [0.0, 0.0])) == Drop("any_correct")
    assert older.judge(group("p", [0.0, 1.0])) is None


def test_slimes_functions_see_samples_and_the_arguments_they_are_given():
    seen = []

    def record(args, samples):
        seen.append((args, list(samples)))
        return True

    info = group("a", [1.0, 0.5], versions=[3, 4])
    assert slime_filter(record, args="mine")(info) is None
    assert seen == [
        (
            "mine",
            [
                SlimeSample(index=0, group_index=0, reward=1.0, weight_versions=["3", "3"]),
                SlimeSample(index=1, group_index=0, reward=0.5, weight_versions=["4", "4"]),
            ],
        )
    ]
