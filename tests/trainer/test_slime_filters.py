"""slime's filter functions as rules of a channel."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest

from stepwell.backends.slime_samples import SlimeSample
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.selection import (
    Choice,
    Drop,
    GroupInfo,
    Selection,
    TrajectoryInfo,
)
from stepwell.trainer.slime_filters import slime_buffer_filter, slime_filter


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


def pop_first(args, rollout_id, buffer, num_samples):
    """slime's default buffer filter."""
    n = min(len(buffer), num_samples)
    taken = buffer[:n]
    del buffer[:n]
    return taken


def best_and_no_failures(args, rollout_id, buffer, num_samples):
    buffer[:] = [g for g in buffer if any(s.reward > 0 for s in g)]
    return sorted(buffer, key=lambda g: -sum(s.reward for s in g))[:num_samples]


def copies(args, rollout_id, buffer, num_samples):
    return [list(g) for g in buffer[:num_samples]]


def test_a_function_for_slimes_buffer_is_a_batch_filter():
    infos = [group(uid, r) for uid, r in zip("abcd", [[0.0], [0.5], [0.0], [1.0]], strict=True)]
    first = select(batch_filter=f"slime_buffer_filter({here(pop_first)})")
    assert first.choose(infos, 3) == Choice(("a", "b", "c"), {})
    assert first.choose(infos[:2], 3) == Choice((), {})
    best = select(batch_filter=f"slime_buffer_filter({here(best_and_no_failures)})")
    assert best.choose(infos, 2) == Choice(("d", "b"), {"a": "buffer_filter", "c": "buffer_filter"})
    with pytest.raises(SelectionError, match="returned a group that is not one of the buffer's"):
        select(batch_filter=f"slime_buffer_filter({here(copies)})").choose(infos, 2)


def test_slimes_functions_see_samples_and_the_arguments_they_are_given():
    seen = []

    def record(args, rollout_id, buffer, num_samples):
        seen.append((args, rollout_id, num_samples, [list(g) for g in buffer]))
        return []

    infos = [group("a", [1.0, None], versions=[3, 4]), group("b", [0.0])]
    assert slime_buffer_filter(record, args="mine")(infos, 2) == Choice()
    [(args, rollout_id, n, buffer)] = seen
    assert (args, rollout_id, n) == ("mine", None, 2)
    assert buffer[0] == [
        SlimeSample(index=0, group_index=0, reward=1.0, weight_versions=["3", "3"]),
        SlimeSample(index=1, group_index=0, reward=None, weight_versions=["4", "4"]),
    ]
    assert buffer[1] == [
        SlimeSample(index=2, group_index=1, reward=0.0, weight_versions=["0", "0"])
    ]
    assert slime_filter(lambda args, samples: args == "mine", args="mine")(infos[1]) is None
