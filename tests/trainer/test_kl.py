"""KL to the reference: what the estimators estimate, the penalty in rewards, the coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.kl import (
    KlConfig,
    KlEstimator,
    kl_estimate,
    kl_in_reward,
    next_coef,
)
from stepwell.trainer.config import AdvantageConfig
from stepwell.trainer.errors import ColumnError, RewardError
from tests.builders import group

LOGITS = torch.tensor([0.5, -1.0, 0.2, 1.0])
REF = torch.tensor([0.1, 0.3, -0.2, 0.4]).log_softmax(0)


def expectation(estimator: KlEstimator) -> tuple[Tensor, Tensor]:
    """E_π[estimate] and E_π[∇ estimate] with respect to the logits, exactly."""
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    pi = log_pi.detach().exp()  # where the samples came from has no gradient
    value = (pi * kl_estimate(log_pi, REF, estimator)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def true_kl() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    log_pi = logits.log_softmax(0)
    value = (log_pi.exp() * (log_pi - REF)).sum()
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased(estimator: KlEstimator) -> None:
    torch.testing.assert_close(expectation(estimator)[0], true_kl()[0])


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+", "abs+"])
def test_k2_and_the_plus_variants_have_the_gradient_of_the_kl(estimator: KlEstimator) -> None:
    torch.testing.assert_close(expectation(estimator)[1], true_kl()[1])


def test_k1_has_no_gradient_at_all_in_expectation() -> None:
    torch.testing.assert_close(expectation("k1")[1], torch.zeros(4), atol=1e-6, rtol=0)


def test_k3_is_never_negative_and_cut_off_at_ten() -> None:
    log_probs = torch.tensor([0.0, -30.0, -1.0, 0.0])
    ref = torch.tensor([0.0, 0.0, -1.5, -400.0])
    got = kl_estimate(log_probs, ref, "k3")
    assert got.tolist() == pytest.approx([0.0, 10.0, math.exp(-0.5) - 0.5, 10.0])


def test_the_penalty_is_earned_token_by_token_and_measured_per_trajectory() -> None:
    groups = [group([None, 1.0], [0.5])]
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0])
    ref = log_probs - torch.tensor([0.1, 0.3, 0.0, 0.0, 1.0, 1.0])
    config = KlConfig(place="reward", estimator="k1", kl_coef=0.5)
    earned, measured = kl_in_reward(groups, torch.tensor([2, 2, 2]), log_probs, ref, config, 0.5)
    assert earned.tolist() == pytest.approx([-0.05, -0.15, 0.0, 0.0, -0.5, -0.5])
    assert measured == pytest.approx((0.4 / 4 + 2.0 / 2) / 2)


@pytest.mark.parametrize("given", [{"kl_coef": 0.01}, {"target_kl": 0.1}, {"estimator": "k1"}])
def test_a_penalty_that_is_given_no_place_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(given))} is .*, but place is not set"):
        KlConfig.model_validate(given)
    for place in ("loss", "none"):  # `none` over a file that has a penalty turns it off
        KlConfig.model_validate(given | {"place": place})
    KlConfig.model_validate(KlConfig().model_dump())


def test_a_penalty_does_not_stand_in_for_a_missing_reward() -> None:
    groups, config = [group([None, None])], KlConfig(place="reward", kl_coef=1.0)
    lengths = torch.tensor([2, 2])
    earned, _ = kl_in_reward(groups, lengths, torch.zeros(4), torch.ones(4), config, 1.0)
    with pytest.raises(RewardError, match="has reward None"):
        compute_advantages(groups, AdvantageConfig(), token_rewards=earned)


def test_columns_of_other_groups_are_refused() -> None:
    config = KlConfig(place="reward")
    with pytest.raises(ColumnError, match="4 log-probs and 2 lengths for 1 steps"):
        kl_in_reward(
            [group([1.0])], torch.tensor([2, 2]), torch.zeros(4), torch.zeros(4), config, 1.0
        )


def test_the_coefficient_follows_the_measured_kl_by_at_most_a_fifth_per_horizon() -> None:
    config = KlConfig(place="loss", kl_coef=0.1, target_kl=0.05, horizon=100)
    assert next_coef(0.1, 0.05, 100, config) == pytest.approx(0.1)
    assert next_coef(0.1, 9.0, 100, config) == pytest.approx(0.12)
    assert next_coef(0.1, 0.0, 50, config) == pytest.approx(0.09)
    assert next_coef(0.1, 0.0505, 100, config) == pytest.approx(0.101)


def test_a_kl_that_is_not_finite_moves_nothing_and_a_fixed_coefficient_stays() -> None:
    adaptive = KlConfig(place="loss", kl_coef=0.1, target_kl=0.05)
    assert next_coef(0.3, math.nan, 64, adaptive) == 0.3
    assert next_coef(0.3, 9.0, 64, KlConfig(place="loss", kl_coef=0.1)) == 0.1


def test_a_gradient_estimator_in_the_reward_is_refused() -> None:
    with pytest.raises(ValidationError, match="write 'k3'"):
        KlConfig(place="reward", estimator="k3+")
