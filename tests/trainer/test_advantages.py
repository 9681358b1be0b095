"""Advantages: closed forms, and what holds for every group."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapool.types import Group, Step, Trajectory
from trainer.advantages import ESTIMATORS, dr_grpo, estimator, grpo, rloo, step_advantages
from trainer.errors import RewardError, UnknownNameError

rewards = st.lists(st.floats(-10, 10).map(lambda r: round(r, 3)), min_size=2, max_size=12)


def trajectory(uid: str, *step_rewards: float | None, prompt_uid: str = "p") -> Trajectory:
    steps = tuple(
        Step(
            prompt_ids=[1],
            response_ids=[2],
            reward=r,
            trajectory_uid=uid,
            prompt_uid=prompt_uid,
            step_index=i,
        )
        for i, r in enumerate(step_rewards)
    )
    return Trajectory(uid, prompt_uid, steps)


def test_grpo_divides_by_the_unbiased_std_of_the_group() -> None:
    a = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx([a, -a, -a, a], abs=1e-12)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    assert rloo([3.0, 0.0, 6.0]) == pytest.approx([0.0, -4.5, 4.5])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_keeps_its_raw_score(name: str) -> None:
    assert estimator(name)([0.7]) == [0.7]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(name: str, reward: float) -> None:
    assert estimator(name)([reward] * 7) == [0.0] * 7


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards=rewards, shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(
    name: str, rewards: list[float], shift: float
) -> None:
    advantages = estimator(name)(rewards)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    shifted = estimator(name)([r + shift for r in rewards])
    assert shifted == pytest.approx(advantages, abs=1e-5)


@given(rewards=rewards)
def test_grpo_ignores_the_scale_of_the_rewards(rewards: list[float]) -> None:
    scaled = [1000 * r for r in rewards]
    assert grpo(scaled, epsilon=0.0) == pytest.approx(grpo(rewards, epsilon=0.0), abs=1e-6)


def test_an_unknown_estimator_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownNameError, match=r"'gpro'.*grpo, dr_grpo, rloo"):
        estimator("gpro")


def test_a_trajectory_is_worth_the_sum_of_its_steps_and_all_its_steps_get_that_advantage() -> None:
    groups = [
        Group("p", (trajectory("a", None, 1.0), trajectory("b", 0.5, 0.25, -0.75))),
        Group("q", (trajectory("c", 2.0), trajectory("d", 1.0), trajectory("e", None, 0.0))),
    ]
    # p: rewards 1 and 0; q: 2, 1 and 0, normalised by itself.
    h = 0.5
    assert step_advantages(groups, dr_grpo) == pytest.approx([h, h, -h, -h, -h, 1, 0, -1, -1])
    assert len(step_advantages(groups)) == sum(len(g.steps) for g in groups)


def test_a_trajectory_without_a_reward_is_an_error_not_a_zero() -> None:
    group = Group("p", (trajectory("a", 1.0), trajectory("b", None, None)))
    with pytest.raises(RewardError, match=r"'b' of prompt 'p' has reward None") as e:
        step_advantages([group])
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert isinstance(e.value, ValueError)
