"""Losses: closed forms of the clipped surrogate, and coefficients that make the loss a sum."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from stepwell.trainer.algorithms.kl import KlConfig
from stepwell.trainer.algorithms.losses import coefficients, make_loss_fn
from stepwell.trainer.algorithms.policy_losses.base import PolicyTerms
from stepwell.trainer.algorithms.policy_losses.ppo import ppo
from stepwell.trainer.config import Aggregation, LossConfig
from stepwell.trainer.errors import ColumnError

AGGREGATIONS: list[Aggregation] = [  # those that see trajectories and no steps
    "token-mean",
    "token-sum",
    "trajectory-mean",
    "trajectory-sum",
    "trajectory-sum-norm",
]


def config(aggregation: Aggregation = "token-mean", **kwargs: float | bool | None) -> LossConfig:
    norm = 16.0 if aggregation.endswith("-norm") else None
    return LossConfig.model_validate(
        {"loss_agg_mode": aggregation, "loss_scale_factor": norm} | kwargs
    )


def ppo_clip(log_probs: Tensor, old: Tensor, advantages: Tensor, **keys: object) -> PolicyTerms:
    columns = {"prox_log_probs": old, "advantages": advantages}
    return ppo(log_probs, columns, LossConfig.model_validate(keys))


def columns(n: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "coef": torch.full((n,), 1 / n),
        "weights": torch.rand(n, generator=g),
        "advantages": torch.randn(n, generator=g),
        "prox_log_probs": -torch.rand(n, generator=g) * 3,
    }


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.27, 1.0, -1.27, -1.27),
        (1.5, 1.0, -1.28, 0.0),  # above 1 + clip_ratio_high
        (0.5, 1.0, -0.5, -0.5),  # too unlikely a good token is still pulled up
        (0.81, -1.0, 0.81, 0.81),
        (0.5, -1.0, 0.8, 0.0),  # below 1 - clip_ratio_low
        (2.0, -1.0, 2.0, 2.0),  # too likely a bad token is still pushed down …
        (5.0, -1.0, 3.0, 0.0),  # … up to the dual clip
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_clip_higher_and_dual_clip_bound_loss_and_gradient(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    terms = ppo_clip(log_probs, torch.zeros(1), torch.tensor([advantage]))
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert log_probs.grad is not None
    assert float(log_probs.grad) == pytest.approx(gradient, abs=1e-6)
    clipped = any(bool(flag) for flag in terms.flags.values())
    assert clipped == (gradient == 0 and advantage != 0)


def test_without_dual_clip_the_loss_of_a_bad_token_grows_with_the_ratio() -> None:
    terms = ppo_clip(
        torch.tensor([math.log(5.0)]), torch.zeros(1), torch.tensor([-1.0]), clip_ratio_c=None
    )
    assert float(terms.loss) == pytest.approx(5.0, rel=1e-6)
    assert "dual_clip_frac" not in terms.flags


def test_a_ratio_beyond_fp32_stays_finite() -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    terms = ppo_clip(log_probs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()


def test_token_mean_gives_every_token_the_same_share() -> None:
    coef = coefficients([3, 1, 4], ["a", "a", "b"], config())
    torch.testing.assert_close(coef, torch.full((8,), 1 / 8))


def test_trajectory_mean_gives_every_trajectory_the_same_share_whatever_its_steps() -> None:
    coef = coefficients([3, 1, 4], ["a", "a", "b"], config("trajectory-mean"))
    torch.testing.assert_close(coef, torch.full((8,), 1 / 2 / 4))
    coef = coefficients([3, 1, 2], ["a", "a", "b"], config("trajectory-mean"))
    torch.testing.assert_close(coef, torch.tensor([1 / 8] * 4 + [1 / 4] * 2))


def test_trajectory_sums_divide_by_trajectories_and_by_the_constant() -> None:
    torch.testing.assert_close(
        coefficients([3, 1], ["a", "b"], config("trajectory-sum")), torch.full((4,), 1 / 2)
    )
    torch.testing.assert_close(
        coefficients([3, 1], ["a", "b"], config("trajectory-sum-norm")), torch.full((4,), 1 / 32)
    )


def test_sequences_are_the_responses_of_single_steps() -> None:
    args = ([3, 1, 4], ["a", "a", "b"])
    mean = coefficients(*args, config("sequence-mean-token-mean"))
    torch.testing.assert_close(mean, torch.tensor([1 / 9] * 3 + [1 / 3] + [1 / 12] * 4))
    total = coefficients(*args, config("sequence-mean-token-sum"))
    torch.testing.assert_close(total, torch.full((8,), 1 / 3))
    norm = coefficients(*args, config("sequence-mean-token-sum-norm"))
    torch.testing.assert_close(norm, torch.full((8,), 1 / 48))
    mask = torch.tensor([1.0, 0, 1, 0, 1, 1, 1, 1])
    masked = coefficients(*args, config("sequence-mean-token-mean"), mask=mask)
    torch.testing.assert_close(masked, torch.tensor([0.25, 0, 0.25, 0] + [1 / 8] * 4))


def test_masked_tokens_and_trajectories_without_a_trained_token_count_nowhere() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    args = ([3, 2], ["a", "b"])
    for aggregation in ("token-mean", "trajectory-mean"):
        coef = coefficients(*args, config(aggregation), mask=mask)
        torch.testing.assert_close(coef, torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0]))
    nothing = coefficients(*args, config("trajectory-mean"), mask=torch.zeros(5))
    torch.testing.assert_close(nothing, torch.zeros(5))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(data=st.data())
def test_one_trajectory_is_one_sample_however_its_tokens_are_split_into_steps(
    aggregation: Aggregation, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    whole = coefficients(tokens, range(len(tokens)), config(aggregation))
    lengths: list[int] = []
    owners: list[int] = []
    for trajectory, n in enumerate(tokens):
        cuts = data.draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
        edges = [0, *sorted(cuts), n]
        lengths += [b - a for a, b in itertools.pairwise(edges)]
        owners += [trajectory] * (len(edges) - 1)
    torch.testing.assert_close(coefficients(lengths, owners, config(aggregation)), whole)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_mini_batch_is_normalised_by_its_own_counts(aggregation: Aggregation) -> None:
    c = config(aggregation)
    both = coefficients([3, 1, 4, 2], ["a", "a", "b", "c"], c, mini_batches=[0, 0, 1, 1])
    first = coefficients([3, 1], ["a", "a"], c)
    second = coefficients([4, 2], ["b", "c"], c)
    torch.testing.assert_close(both, torch.cat([first, second]))


def test_columns_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ColumnError, match="trajectories has 1 values for 2 steps"):
        coefficients([1, 2], ["a"], config())
    with pytest.raises(ColumnError, match=r"mask has shape \(4,\) for 3 response tokens"):
        coefficients([1, 2], ["a", "b"], config(), mask=torch.ones(4))


@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 15), max_size=4))
def test_loss_and_metrics_of_micro_batches_add_up_to_those_of_the_whole(
    seed: int, cuts: set[int]
) -> None:
    cols = columns(16, seed)
    cols["coef"][3] = 0.0
    torch.manual_seed(seed)
    log_probs = cols["prox_log_probs"] + 0.3 * torch.randn(16)
    entropy = torch.rand(16)
    loss_fn = make_loss_fn(config(entropy_coeff=0.01))
    whole = loss_fn(log_probs, entropy, cols)
    edges = [0, *sorted(cuts), 16]
    parts = [
        loss_fn(log_probs[a:b], entropy[a:b], {k: v[a:b] for k, v in cols.items()})
        for a, b in itertools.pairwise(edges)
    ]
    torch.testing.assert_close(torch.stack([p.loss for p in parts]).sum(), whole.loss)
    for name, mean in whole.metrics.items():
        combined = sum((p.metrics[name] for p in parts[1:]), parts[0].metrics[name])
        assert float(combined.total) == pytest.approx(float(mean.total), abs=1e-9)
        assert float(combined.count) == float(mean.count) == 15


def test_the_loss_is_the_weighted_sum_of_the_design() -> None:
    cols = columns(4)
    log_probs = cols["prox_log_probs"] + torch.tensor([0.1, -0.1, 0.05, 0.0])
    ratio = (log_probs - cols["prox_log_probs"]).exp()
    expected = (cols["coef"] * cols["weights"] * -cols["advantages"] * ratio).sum()
    output = make_loss_fn(config())(log_probs, None, cols)
    torch.testing.assert_close(output.loss, expected)
    assert "policy/entropy" not in output.metrics


def test_weights_carry_no_gradient_and_scale_the_gradient() -> None:
    cols = columns(6)
    log_probs = cols["prox_log_probs"].clone().requires_grad_()
    make_loss_fn(config())(log_probs, None, cols).loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, -cols["coef"] * cols["weights"] * cols["advantages"])


def test_a_masked_token_leaks_no_nan_into_loss_gradient_or_metrics() -> None:
    cols = columns(3)
    cols["coef"][1] = 0.0
    cols["weights"][1] = math.nan
    log_probs = torch.tensor([-1.0, math.nan, -1.0], requires_grad=True)
    output = make_loss_fn(config(entropy_coeff=0.1))(log_probs, torch.rand(3), cols)
    output.loss.backward()
    assert log_probs.grad is not None
    assert torch.isfinite(output.loss)
    assert torch.isfinite(log_probs.grad).all()
    assert all(math.isfinite(m.total) for m in output.metrics.values())


def test_an_entropy_bonus_raises_entropy_and_asks_for_its_gradient() -> None:
    cols = columns(3)
    log_probs, entropy = cols["prox_log_probs"], torch.rand(3, requires_grad=True)
    loss_fn = make_loss_fn(config(entropy_coeff=0.1))
    loss_fn(log_probs, entropy, cols).loss.backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, -0.1 * cols["coef"])
    wanted = [
        getattr(make_loss_fn(c), "entropy", None)
        for c in (config(entropy_coeff=0.1), config(), config(report_entropy=False))
    ]
    assert wanted == ["gradient", "value", "none"]


def test_kl_to_the_reference_is_added_at_its_coefficient_and_without_a_weight() -> None:
    cols = columns(4)
    cols["ref_log_probs"] = cols["prox_log_probs"] - 0.5
    log_probs = cols["prox_log_probs"].clone().requires_grad_()
    plain = make_loss_fn(config())(log_probs, None, cols).loss
    kl = KlConfig(place="loss", estimator="k2", kl_coef=0.1)
    output = make_loss_fn(config(), kl)(log_probs, None, cols)
    torch.testing.assert_close(output.loss - plain, torch.tensor(0.1 * 0.5 * 0.25))
    assert float(output.metrics["kl/ref"].total) == pytest.approx(4 * 0.125)
    (got,) = torch.autograd.grad(output.loss - plain, log_probs)
    torch.testing.assert_close(got, 0.1 * cols["coef"] * 0.5)
    adapted = make_loss_fn(config(), kl, 0.2)(log_probs, None, cols).loss
    torch.testing.assert_close(adapted - plain, 2 * (output.loss - plain))
    with pytest.raises(ColumnError, match="no column 'ref_log_probs'"):
        make_loss_fn(config(), kl)(log_probs, None, columns(4))


def test_a_missing_column_is_named() -> None:
    cols = columns(3)
    del cols["weights"], cols["coef"]
    with pytest.raises(ColumnError, match="no column 'coef', 'weights'"):
        make_loss_fn(config())(torch.zeros(3), None, cols)


def test_the_loss_function_survives_pickling() -> None:
    loss_fn = make_loss_fn(config())
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn


@pytest.mark.parametrize(
    "bad",
    [
        {"clip_ratio_low": 1.1},
        {"clip_ratio_c": 1.0},
        {"clip_hihg": 0.28},
        {"loss_agg_mode": "trajectory-sum-norm"},
        {"loss_scale_factor": 8.0},
    ],
)
def test_a_loss_config_out_of_bounds_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LossConfig.model_validate(bad)
