"""Off-policy weights: exact identities on small distributions, and each rule by itself."""

from __future__ import annotations

import math
import pickle
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from stepwell.datapool.types import Step
from stepwell.trainer.algorithms.losses import make_loss_fn
from stepwell.trainer.algorithms.off_policy.correction import correct, lags
from stepwell.trainer.algorithms.off_policy.proximal import proximal_log_probs
from stepwell.trainer.config import LossConfig, OffPolicyConfig
from stepwell.trainer.errors import ColumnError, VersionError
from stepwell.trainer.progress import Progress
from tests.builders import step

logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


class Corrected(NamedTuple):
    weights: Tensor
    metrics: dict[str, float]


def of(*versions: int) -> list[Step]:
    """Steps that these versions sampled."""
    return [step(uid=f"t{i}", policy_version=v) for i, v in enumerate(versions)]


def run(
    log_ratio: Tensor,
    lengths: list[int],
    step_lags: list[float],
    mu: Tensor | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    **options: object,
) -> Corrected:
    mu = torch.full_like(log_ratio, -1.0) if mu is None else mu
    if advantages is None:  # the default's clip needs them
        options = {"clip": None, **options}
    return Corrected(
        *correct(
            torch.nan_to_num(mu, nan=-1.0) + log_ratio,
            mu,
            lengths,
            step_lags,
            staleness_threshold=0.1,
            config=OffPolicyConfig.model_validate(options),
            advantages=advantages,
            mask=mask,
        )
    )


def test_lag_counts_updates_since_publication_in_units_of_a_sync() -> None:
    published = {0: 0, 1: 4, 2: 8}
    got = lags(of(2, 1, 0), published, updates_now=9, updates_per_sync=4)
    assert got.tolist() == [0.25, 1.25, 2.25]
    assert lags(of(2), published, updates_now=8, updates_per_sync=4).tolist() == [0.0]


def test_a_version_published_before_the_record_began_counts_one_sync_each() -> None:
    assert lags(of(5), {7: 28}, updates_now=28, updates_per_sync=4).tolist() == [2.0]


def test_what_a_lost_version_sampled_is_a_publication_old_though_updates_were_not_applied() -> None:
    progress = Progress(updates=10, version=5, published={0: 0, 5: 10}, unapplied=[7, 8, 9, 10])
    progress.lose(6, updates_per_sync=2)
    applied = {v: progress.applied(u) for v, u in progress.published.items()}
    now = progress.applied(progress.updates)
    assert lags(of(6), applied, updates_now=now, updates_per_sync=2).tolist() == [1.0]
    progress.roll_back(7, 5, updates_per_sync=2)
    applied = {v: progress.applied(u) for v, u in progress.published.items()}
    assert lags(of(6, 7), applied, updates_now=now, updates_per_sync=2).tolist() == [1.0, 0.0]


def test_a_version_that_was_never_published_is_an_error() -> None:
    with pytest.raises(
        VersionError,
        match=r"step 't1'\[0\] has policy_version 9, but the versions published are 0..1;"
        r" .*--trajectory 't1' RUN",
    ):
        lags(of(1, 9), {0: 0, 1: 4}, updates_now=5, updates_per_sync=4)
    with pytest.raises(VersionError, match="published_at is empty") as e:
        lags(of(0), {}, updates_now=0, updates_per_sync=4)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


@given(mu=logits, pi=logits)
def test_the_mean_weight_under_mu_is_one_minus_the_total_variation(
    mu: list[float], pi: list[float]
) -> None:
    """Each token of the vocabulary is one step, so the expectation can be taken exactly."""
    log_mu, log_pi = torch.tensor(mu).log_softmax(0), torch.tensor(pi).log_softmax(0)
    weights = run(log_pi - log_mu, [1] * 4, [1.0] * 4, mu=log_mu).weights
    total_variation = 0.5 * (log_mu.exp() - log_pi.exp()).abs().sum()
    torch.testing.assert_close((log_mu.exp() * weights).sum(), 1 - total_variation)


@given(mu=logits, pi=logits)
def test_without_a_cap_the_weighted_mean_under_mu_is_the_mean_under_pi(
    mu: list[float], pi: list[float]
) -> None:
    log_mu, log_pi = torch.tensor(mu).log_softmax(0), torch.tensor(pi).log_softmax(0)
    weights = run(log_pi - log_mu, [1] * 4, [1.0] * 4, mu=log_mu, cap=None).weights
    f = torch.arange(4.0)
    torch.testing.assert_close((log_mu.exp() * weights * f).sum(), (log_pi.exp() * f).sum())


def test_at_the_same_version_weights_are_one_and_the_loss_is_plain_ppo() -> None:
    torch.manual_seed(0)
    mu = -torch.rand(6)
    result = run(torch.zeros(6), [2, 4], [0.0, 0.05], mu=mu)
    assert result.weights.tolist() == [1.0] * 6
    assert result.metrics["off_policy_share"] == 0.0
    assert result.metrics["rollout_probs_diff/max"] == 0.0

    columns = {
        "coef": torch.full((6,), 1 / 6),
        "advantages": torch.randn(6),
        "prox_log_probs": mu,
    }
    log_probs = mu + 0.1 * torch.randn(6)
    loss_fn = make_loss_fn(LossConfig())
    got = loss_fn(log_probs, None, columns | {"weights": result.weights}).loss
    ratio = (log_probs - mu).exp()
    a = columns["advantages"]
    plain = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28)).mean()
    torch.testing.assert_close(got, plain)


def test_only_steps_beyond_the_threshold_are_weighed_down() -> None:
    result = run(torch.full((4,), math.log(0.5)), [1, 1, 1, 1], [0.0, 0.1, 0.11, 3.0])
    torch.testing.assert_close(result.weights, torch.tensor([1.0, 1.0, 0.5, 0.5]))
    assert result.metrics["off_policy_share"] == 0.5


def test_the_cap_makes_the_weight_a_down_weight_unless_it_is_raised() -> None:
    log_ratio = torch.tensor([math.log(4.0)])
    assert run(log_ratio, [1], [1.0]).weights.item() == 1.0
    assert run(log_ratio, [1], [1.0], cap=2.0).weights.item() == 2.0
    assert run(log_ratio, [1], [1.0], cap=None).weights.item() == pytest.approx(4.0)


def test_on_policy_truncation_is_opt_in() -> None:
    log_ratio = torch.tensor([math.log(0.5), math.log(4.0)])
    weights = run(log_ratio, [2], [0.0], cap=2.0, weigh_on_policy=True).weights
    torch.testing.assert_close(weights, torch.tensor([0.5, 2.0]))


def test_granularity_decides_which_tokens_share_a_ratio() -> None:
    log_ratio = torch.tensor([math.log(0.5), math.log(0.125), math.log(0.9)])
    args = (log_ratio, [2, 1], [1.0, 1.0])
    torch.testing.assert_close(run(*args).weights, torch.tensor([0.5, 0.125, 0.9]))
    step = run(*args, granularity="step").weights
    torch.testing.assert_close(step, torch.tensor([0.25, 0.25, 0.9]))
    sequence = run(*args, granularity="sequence").weights
    torch.testing.assert_close(sequence, torch.tensor([0.0625, 0.0625, 0.9]))


def test_a_band_masks_what_lies_outside_and_spares_on_policy_steps() -> None:
    log_ratio = torch.log(torch.tensor([0.4, 0.9, 5.5, 0.4]))
    args = (log_ratio, [3, 1], [1.0, 0.0])
    weights = run(*args, band=(0.5, 5.0)).weights
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.9, 0.0, 1.0]))
    everywhere = run(*args, band=(0.5, 5.0), mask_on_policy=True).weights
    torch.testing.assert_close(everywhere, torch.tensor([0.0, 0.9, 0.0, 0.0]))


def test_one_hopeless_token_vetoes_its_whole_step() -> None:
    log_ratio = torch.log(torch.tensor([0.9, 1e-5, 0.9]))
    result = run(log_ratio, [2, 1], [1.0, 1.0], veto=1e-4)
    torch.testing.assert_close(result.weights, torch.tensor([0.0, 0.0, 0.9]))
    assert result.metrics["off_policy/dropped_steps"] == 1.0


def test_decay_shrinks_the_weight_with_every_version_beyond_the_threshold() -> None:
    weights = run(torch.zeros(3), [1, 1, 1], [0.0, 1.1, 2.1], decay=0.5).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.5, 0.25]))


def test_a_step_without_log_probs_is_dropped_or_decayed_never_taken_for_certain() -> None:
    mu = torch.tensor([math.nan, math.nan, -1.0, math.nan])
    args = (torch.tensor([0.0, 0.0, math.log(0.5), 0.0]), [2, 1, 1], [1.1, 1.1, 0.0])
    dropped = run(*args, mu=mu)
    torch.testing.assert_close(dropped.weights, torch.tensor([0.0, 0.0, 0.5, 1.0]))
    assert dropped.metrics["off_policy/missing_steps"] == 2.0
    assert dropped.metrics["off_policy/dropped_steps"] == 1.0
    decayed = run(*args, mu=mu, missing="decay")
    torch.testing.assert_close(decayed.weights, torch.tensor([0.5, 0.5, 0.5, 1.0]))
    assert decayed.metrics["off_policy/missing_steps"] == 2.0


def test_one_unknown_token_makes_the_whole_step_unknown() -> None:
    mu = torch.tensor([-1.0, math.nan])
    result = run(torch.zeros(2), [2], [1.0], mu=mu)
    assert result.weights.tolist() == [0.0, 0.0]
    assert not any("kl_k1" in k or "rollout_probs_diff" in k for k in result.metrics)


def test_ratios_beyond_fp32_stay_finite() -> None:
    mu = torch.tensor([-200.0, 0.0])
    result = run(torch.tensor([200.0, -200.0]), [1, 1], [1.0, 1.0], mu=mu, cap=None)
    assert torch.isfinite(result.weights).all()
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_weights_are_constants_to_autograd() -> None:
    prox = torch.zeros(2, requires_grad=True)
    weights, _ = correct(
        prox,
        torch.full((2,), -0.5),
        [2],
        [1.0],
        staleness_threshold=0.1,
        config=OffPolicyConfig(cap=None, clip=None),
    )
    assert not weights.requires_grad


def test_metrics_are_told_per_lag_bucket() -> None:
    log_ratio = torch.log(torch.tensor([1.0, 0.5, 2.0, 0.25]))
    result = run(
        log_ratio,
        [1, 2, 1],
        [0.0, 1.0, 9.0],
        advantages=torch.tensor([1.0, -1.0, 1.0, 2.0]),
        clip=None,
    )
    m = result.metrics
    assert m["staleness/mean"] == pytest.approx(10 / 3)
    assert m["staleness/max"] == 9.0
    assert m["off_policy_share"] == pytest.approx(2 / 3)
    assert m["off_policy/advantage_share"] == pytest.approx(4 / 5)
    assert m["off_policy/lag_0/weight_mean"] == 1.0
    bucket = "off_policy/lag_0-1"
    assert (m[f"{bucket}/steps"], m[f"{bucket}/tokens"]) == (1.0, 2.0)
    assert m[f"{bucket}/weight_mean"] == pytest.approx(0.75)  # min(1, 0.5) and min(1, 2)
    assert m[f"{bucket}/ess"] == pytest.approx(1.5**2 / (2 * 1.25))
    assert m[f"{bucket}/kl_k1"] == pytest.approx(0.0, abs=1e-6)
    assert m[f"{bucket}/kl_k3"] == pytest.approx((0.5 + 2) / 2 - 1)
    assert m[f"{bucket}/chi2"] == pytest.approx((0.25 + 4) / 2 - 1)
    assert m[f"{bucket}/advantage_share"] == pytest.approx(2 / 5)
    assert m["off_policy/lag_over-4/steps"] == 1.0
    assert not any(k.startswith("off_policy/lag_1-2") for k in m)


@given(mu=logits, pi=logits)
def test_the_bucket_metrics_estimate_the_true_divergences(mu: list[float], pi: list[float]) -> None:
    """Averaged over μ exactly (one batch per token), k1, k3 and χ² are the divergences."""
    log_mu, log_pi = torch.tensor(mu).log_softmax(0), torch.tensor(pi).log_softmax(0)
    expected = {
        "kl_k1": float((log_mu.exp() * (log_mu - log_pi)).sum()),
        "kl_k3": float((log_mu.exp() * (log_mu - log_pi)).sum()),
        "chi2": float(((log_pi.exp() - log_mu.exp()) ** 2 / log_mu.exp()).sum()),
    }
    for name, value in expected.items():
        mean = sum(
            float(log_mu[i].exp())
            * run((log_pi - log_mu)[i : i + 1], [1], [1.0]).metrics[f"off_policy/lag_0-1/{name}"]
            for i in range(4)
        )
        assert mean == pytest.approx(value, abs=1e-4, rel=1e-4)


# --- methods of the field as presets

RATIOS = torch.log(torch.tensor([0.4, 1.5, 3.0, 0.9]))
"""One stale step of three tokens, product 1.8, and a fresh step of one."""


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("staleness_aware", [0.0, 1.0, 1.0, 1.0]),  # A < 0, and gone below 0.8 already
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("bypass", [1.0, 1.0, 1.0, 1.0]),
        ("decoupled", [0.4, 1.5, 3.0, 0.9]),
        ("tis", [0.4, 1.5, 2.0, 0.9]),
        ("geometric_tis", [1.8 ** (1 / 3)] * 3 + [0.9]),
        ("sequence_tis", [1.8] * 3 + [0.9]),
        ("mis", [0.4, 1.5, 0.0, 0.9]),
        ("sequence_mis", [1.8] * 3 + [0.9]),
        ("geometric_mis", [0.0, 0.0, 0.0, 0.0]),
        ("icepop", [0.0, 1.5, 3.0, 0.9]),
        ("opsm", [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_every_method_is_a_preset_of_the_same_options(method: str, weights: list[float]) -> None:
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    result = run(RATIOS, [3, 1], [1.0, 0.0], advantages=advantages, method=method)
    torch.testing.assert_close(result.weights, torch.tensor(weights))


def test_the_presets_are_the_methods_and_what_is_given_beside_one_wins() -> None:
    assert OffPolicyConfig(method="staleness_aware") == OffPolicyConfig()
    mine = OffPolicyConfig(method="icepop", band=(0.1, 10.0))
    assert mine.band == (0.1, 10.0)
    assert mine.cap is None
    assert OffPolicyConfig.model_validate(mine.model_dump()) == mine
    assert OffPolicyConfig(method="tis", granularity="sequence") == OffPolicyConfig(
        method="sequence_tis"
    ).model_copy(update={"method": "tis"})


def test_the_clip_masks_what_has_gone_on_since_where_its_advantage_sends_it() -> None:
    ratios = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.2, 0.9]))
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    stale = run(ratios, [2, 2, 2], [1.0, 8.0, 1.0], advantages=advantages)
    torch.testing.assert_close(stale.weights, torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.9]))
    assert stale.metrics["off_policy/clip_share"] == pytest.approx(2 / 6)
    fresh = run(ratios, [2, 2, 2], [0.0] * 3, advantages=advantages)
    assert fresh.weights.tolist() == [1.0] * 6
    wide = run(ratios, [2, 2, 2], [1.0] * 3, advantages=advantages, clip=(0.6, 0.6))
    torch.testing.assert_close(wide.weights, torch.tensor([1.0, 1.0, 0.5, 0.5, 1.0, 0.9]))
    with pytest.raises(ColumnError, match=r"off_policy.clip .* pass advantages"):
        run(ratios, [2, 2, 2], [1.0] * 3, clip=(0.2, 0.2))


def test_opsm_masks_bad_steps_that_the_policy_has_left_and_no_good_ones() -> None:
    left = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5, 2.0]))
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0])
    args = (left, [2, 2, 1], [1.0, 1.0, 1.0])
    result = run(*args, advantages=advantages, method="opsm", opsm=0.1)
    assert result.weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert result.metrics["off_policy/opsm_share"] == pytest.approx(2 / 5)
    lenient = run(*args, advantages=advantages, method="opsm", opsm=0.7)
    assert lenient.weights.tolist() == [1.0] * 5
    with pytest.raises(ColumnError, match="pass advantages"):
        run(*args, method="opsm")


def test_the_band_may_look_at_another_granularity_than_the_weight() -> None:
    result = run(
        torch.log(torch.tensor([0.5, 2.2, 0.5, 0.5])),
        [2, 2],
        [1.0, 1.0],
        cap=None,
        band=(0.9, 1.2),
        band_granularity="step",
    )
    torch.testing.assert_close(result.weights, torch.tensor([0.5, 2.2, 0.0, 0.0]))
    assert result.metrics["off_policy/band_share"] == 0.5


def test_on_policy_steps_are_weighed_likewise_on_request() -> None:
    log_ratio = torch.log(torch.tensor([3.0, 3.0]))
    args = (log_ratio, [1, 1], [0.0, 1.0])
    assert run(*args, cap=2.0).weights.tolist() == [1.0, 2.0]
    assert run(*args, cap=2.0, weigh_on_policy=True).weights.tolist() == [2.0, 2.0]


def test_a_kept_step_without_log_probs_weighs_one_and_is_counted() -> None:
    mu = torch.tensor([math.nan, -1.0])
    result = run(torch.zeros(2), [1, 1], [1.0, 1.0], mu=mu, method="none")
    assert result.weights.tolist() == [1.0, 1.0]
    assert result.metrics["off_policy/missing_steps"] == 1.0


def test_a_mask_does_not_strike_where_the_ratio_is_unknown() -> None:
    mu = torch.tensor([math.nan, -1.0])
    log_ratio = torch.tensor([0.0, math.log(0.5)])
    result = run(log_ratio, [1, 1], [1.0, 1.0], mu=mu, band=(0.1, 0.9), missing="keep")
    assert result.weights.tolist() == [1.0, 0.5]
    assert result.metrics["off_policy/band_share"] == 0.0


def test_untrained_tokens_count_in_no_ratio_and_no_metric() -> None:
    log_ratio = torch.log(torch.tensor([0.5, 1e-6, 0.5, 0.25]))
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    args = (log_ratio, [3, 1], [1.0, 1.0])
    masked = run(*args, mask=mask, granularity="step", veto=1e-3)
    torch.testing.assert_close(masked.weights[[0, 2, 3]], torch.tensor([0.5, 0.5, 0.25]))
    kept = run(log_ratio[[0, 2, 3]], [2, 1], [1.0, 1.0], granularity="step", veto=1e-3)
    for name, value in kept.metrics.items():
        assert masked.metrics[name] == pytest.approx(value), name
    nothing = run(*args, mask=torch.zeros(4))
    assert nothing.metrics["off_policy/dropped_steps"] == 0, "no step was to be trained"
    assert not any(k.startswith("off_policy/lag") for k in nothing.metrics)


def test_bypass_takes_the_behaviour_policy_and_recomputes_only_for_want_of_it() -> None:
    calls = []

    def recompute() -> Tensor:
        calls.append(1)
        return torch.tensor([-1.0, -2.0])

    known, partly = torch.tensor([-0.5, -0.6]), torch.tensor([-0.5, math.nan])
    config = OffPolicyConfig(method="bypass")
    assert proximal_log_probs(recompute, known, config).tolist() == known.tolist()
    assert not calls
    assert proximal_log_probs(recompute, partly, config).tolist() == [-0.5, -2.0]
    assert proximal_log_probs(recompute, known, OffPolicyConfig()).tolist() == [-1.0, -2.0]
    assert len(calls) == 2


def test_the_whole_batch_has_its_divergences_too() -> None:
    log_ratio = torch.log(torch.tensor([2.0, 0.5, 0.5]))
    m = run(log_ratio, [2, 1], [1.0, 0.0]).metrics
    assert m["off_policy/kl_k1"] == pytest.approx(math.log(2) / 3)
    assert m["off_policy/chi2"] == pytest.approx(4.5 / 3 - 1)
    assert m["off_policy/chi2_step"] == pytest.approx((1 + 0.25) / 2 - 1)
    assert m["off_policy/ess"] == pytest.approx(2.5**2 / (3 * 2.25))


def test_columns_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ColumnError, match=r"rollout_log_probs has shape \(3,\) for 2 response"):
        correct(
            torch.zeros(2),
            torch.zeros(3),
            [2],
            [0.0],
            staleness_threshold=0.1,
            config=OffPolicyConfig(),
        )
    with pytest.raises(ColumnError, match="step_lags has 2 values for 1 steps"):
        run(torch.zeros(2), [2], [0.0, 1.0])


@pytest.mark.parametrize(
    "bad",
    [
        {"band": (2.0, 1.0)},
        {"veto": 1.0},
        {"clip": (1.5, 0.2)},
        {"clip": (0.2, -0.1)},
        {"cap": 0.0},
        {"decay": 1.5},
        {"capp": 1.0},
        {"method": "ties"},
    ],
)
def test_an_off_policy_config_out_of_bounds_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OffPolicyConfig.model_validate(bad)
