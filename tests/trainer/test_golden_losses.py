"""Losses, KL, aggregation and rollout correction agree with verl 0.9 on random ragged batches.

verl itself is asked where it is installed, and what it said is read from `golden/losses.json`
elsewhere. A verl row maps onto our columns in two ways:

    verl row     r r r . . r r .         r sampled, . written by a tool (masked) or padding
    one step     r r r . . r r           with a mask: what a row per LLM call looks like
    turns        r r r | r r             a trajectory of two steps, as Stepwell's pool has it

Differences on purpose, each with its test:

- SAPO honours the aggregation mode; verl always takes seq-mean-token-mean.
- `loss_scale_factor` has no default; verl divides by the padded width of the batch.
- `band` bounds π/μ, the weight; the k1 bounds of verl's rejection hold for μ/π.
- Tokens and trajectories that a mask rejects stay in N; in verl they leave the denominators.
- Ratios of a sequence (GSPO, `sequence` and `step` weights) belong to one call of the model; verl
  takes a row, and so a whole trajectory.
- `clip_cov` and `kl_cov` select once per mini-batch; verl selects in every micro-batch anew.
- The ratio of `clip_cov` and `kl_cov` is cut off at e^±20, as in PPO; verl cuts off PPO's only.
- `kl_coef` of `kl_cov` is the paper's 1; verl's configuration has 0.1.
- `geo_mean` honours the aggregation mode, and N are the steps with a trained token; verl always
  takes the mean over rows, empty ones too, and the geometric mean of a row's importance weights,
  which here is `off_policy.granularity: step`.
- `clip_ratio_c` of `dppo_tv` and `dppo_kl` is 20, as the paper says; verl's configuration has 3.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from stepwell.backends.base import TokenBatch
from stepwell.datapool.types import Step
from stepwell.trainer.algorithms.kl import KlConfig, next_coef
from stepwell.trainer.algorithms.losses import coefficients, loss_columns, make_loss_fn
from stepwell.trainer.algorithms.off_policy.correction import correct
from stepwell.trainer.config import LossConfig, OffPolicyConfig
from tests.trainer.golden.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    COV_HIGH,
    COV_LOW,
    COV_SHARE,
    DRAW_SEED,
    DRO_BETA,
    ESTIMATORS,
    KL_COV,
    N_CASES,
    NORM,
    OBSERVED_KL,
    POLICIES,
    RECORDED,
    new_log_probs,
    tensors,
    verl_outputs,
)

HAS_VERL = all(
    importlib.util.find_spec(m) for m in ("verl", "tensordict", "codetiming")
) and importlib.metadata.version("verl").split(".")[:2] == ["0", "9"]
CLOSE = {"atol": 1e-6, "rtol": 1e-6}

SEQUENCE = dict(
    zip(
        AGGREGATIONS,
        (
            "token-mean",
            "token-sum",
            "sequence-mean-token-mean",
            "sequence-mean-token-sum",
            "sequence-mean-token-sum-norm",
        ),
        strict=True,
    )
)
TRAJECTORY = dict(
    zip(
        AGGREGATIONS,
        ("token-mean", "token-sum", "trajectory-mean", "trajectory-sum", "trajectory-sum-norm"),
        strict=True,
    )
)
OURS = {name: "ppo" if name == "vanilla" else name for name in POLICIES}


@dataclass
class Golden:
    """A case as flat columns, and what verl makes of it."""

    batch: TokenBatch
    mask: Tensor
    verl: dict[str, Any]
    rows: int
    """Rows of verl's batch, those without a trained token too."""

    def column(self, name: str) -> Tensor:
        return self.batch.columns[name]


def steps_of(lengths: list[tuple[int, int]]) -> list[Step]:
    """(trajectory, response tokens) of each step -> steps with any ids."""
    return [
        Step(
            prompt_ids=[1],
            response_ids=[2] * n,
            trajectory_uid=f"t{row}",
            prompt_uid="p",
            step_index=i,
        )
        for i, (row, n) in enumerate(lengths)
    ]


def as_one_step_a_row(case: dict[str, Any], verl: dict[str, Any]) -> Golden:
    x = tensors(case)
    kept = [max(1, int(row.nonzero().max()) + 1) if row.any() else 2 for row in x["mask"]]
    batch = TokenBatch.of(steps_of(list(enumerate(kept))))
    flat = {k: torch.cat([r[:n] for r, n in zip(v, kept, strict=True)]) for k, v in x.items()}
    mask = flat.pop("mask")
    batch.columns.update(flat)
    return Golden(batch, mask, verl, len(kept))


def as_turns(case: dict[str, Any], verl: dict[str, Any]) -> Golden:
    x = tensors(case)
    mask = x.pop("mask")
    runs = []
    for i, row in enumerate(mask.tolist()):
        at = 0
        while at < len(row):
            end = at
            while end < len(row) and row[end]:
                end += 1
            if end > at:
                runs.append((i, at, end))
            at = max(end, at + 1)
    batch = TokenBatch.of(steps_of([(i, end - at) for i, at, end in runs]))
    batch.columns.update({k: torch.cat([v[i, a:b] for i, a, b in runs]) for k, v in x.items()})
    return Golden(batch, torch.ones(batch.n_tokens), verl, len(mask))


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    cases = json.loads(RECORDED.read_text())
    if HAS_VERL:  # the values of the verl that is here take the place of the recorded ones
        for entry in cases:
            entry["recorded"], entry["verl"] = entry["verl"], verl_outputs(entry["case"])
    return list(cases)


@pytest.fixture(params=range(N_CASES))
def entry(request: pytest.FixtureRequest, recorded: list[dict[str, Any]]) -> dict[str, Any]:
    return recorded[request.param]


OPTIONS_OF = {
    "clip_cov": {"share": COV_SHARE, "low": COV_LOW, "high": COV_HIGH},
    "kl_cov": {"share": COV_SHARE, "kl_coef": KL_COV},
    "dro": {"beta": DRO_BETA},
}


def loss_config(policy: str, aggregation: str) -> LossConfig:
    return LossConfig.model_validate(
        {
            "policy": OURS[policy],
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "clip_ratio_c": 3.0,
            "loss_agg_mode": aggregation,
            "loss_scale_factor": NORM if aggregation.endswith("-norm") else None,
            "options": OPTIONS_OF.get(policy, {}),
        }
    )


def loss_and_gradient(golden: Golden, policy: str, aggregation: str) -> tuple[Tensor, Tensor]:
    """Ours, over all tokens at once; the gradient at the trained tokens."""
    config = loss_config(policy, aggregation)
    batch = golden.batch
    # The covariance is taken at the π that verl takes it at: within its loss.
    batch.columns["prox_log_probs"] = golden.column(new_log_probs(policy))
    batch.columns |= loss_columns(
        batch, config, mini_batches=[0] * len(batch.steps), mask=golden.mask, seed=DRAW_SEED
    )
    batch.columns["prox_log_probs"] = golden.column("old")
    log_probs = golden.column(new_log_probs(policy)).clone().requires_grad_()
    output = make_loss_fn(config)(log_probs, None, batch.columns)
    output.loss.backward()
    assert log_probs.grad is not None
    return output.loss.detach(), log_probs.grad[golden.mask > 0]


def assert_agree(ours: tuple[Tensor, Tensor], verl: dict[str, Any]) -> None:
    assert float(ours[0]) == pytest.approx(verl["loss"], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(
        ours[1], torch.tensor(verl["gradient"], dtype=ours[1].dtype), **CLOSE
    )


def test_the_recorded_values_are_those_of_the_verl_that_is_installed(
    entry: dict[str, Any],
) -> None:
    def compare(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        else:
            assert a == pytest.approx(b, abs=1e-8, rel=1e-8)

    compare(entry["verl"], entry.get("recorded", entry["verl"]))
    assert {p.split()[0] for p in entry["verl"]["policies"]} == set(POLICIES)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("sapo", "geo_mean")])
def test_policy_losses_and_gradients_agree_where_a_row_is_a_step(
    entry: dict[str, Any], policy: str, aggregation: str
) -> None:
    golden = as_one_step_a_row(entry["case"], entry["verl"])
    ours = loss_and_gradient(golden, policy, SEQUENCE[aggregation])
    assert_agree(ours, golden.verl["policies"][f"{policy} {aggregation}"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("sapo", "gspo", "geo_mean")])
def test_policy_losses_and_gradients_agree_where_a_row_is_a_trajectory_of_turns(
    entry: dict[str, Any], policy: str, aggregation: str
) -> None:
    golden = as_turns(entry["case"], entry["verl"])
    ours = loss_and_gradient(golden, policy, TRAJECTORY[aggregation])
    assert_agree(ours, golden.verl["policies"][f"{policy} {aggregation}"])


def test_sapo_agrees_at_the_aggregation_that_verl_fixes_and_honours_others(
    entry: dict[str, Any],
) -> None:
    golden = as_one_step_a_row(entry["case"], entry["verl"])
    verl = golden.verl["policies"]
    ours = loss_and_gradient(golden, "sapo", "sequence-mean-token-mean")
    assert_agree(ours, verl["sapo seq-mean-token-mean"])
    assert verl["sapo token-mean"] == verl["sapo seq-mean-token-mean"]
    other, _ = loss_and_gradient(golden, "sapo", "token-mean")
    assert abs(float(other) - float(ours[0])) > 1e-4


def test_geo_mean_agrees_at_the_aggregation_that_verl_fixes(entry: dict[str, Any]) -> None:
    golden = as_one_step_a_row(entry["case"], entry["verl"])
    verl = golden.verl["policies"]["geo_mean token-mean"]
    # verl weighs a row by the geometric mean of its tokens' weights.
    step = torch.repeat_interleave(golden.batch.lengths)
    live = golden.mask > 0
    total = torch.zeros(golden.rows, dtype=torch.float64)
    total.index_add_(0, step[live], golden.column("weights")[live].log())
    tokens = step[live].bincount(minlength=golden.rows)
    golden.batch.columns["weights"] = (total / tokens.clamp(min=1)).exp()[step]
    loss, gradient = loss_and_gradient(golden, "geo_mean", "sequence-mean-token-mean")
    # … and divides by all rows, also those without a trained token.
    share = float((tokens > 0).sum()) / golden.rows
    assert_agree((loss * share, gradient * share), verl)


def test_gspo_takes_its_ratio_per_call_and_not_over_the_trajectory(recorded: list[Any]) -> None:
    golden = as_turns(recorded[1]["case"], recorded[1]["verl"])
    ours, _ = loss_and_gradient(golden, "gspo", "trajectory-mean")
    assert abs(float(ours) - golden.verl["policies"]["gspo seq-mean-token-mean"]["loss"]) > 1e-4


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_loss_agrees_in_value_and_gradient(entry: dict[str, Any], estimator: str) -> None:
    for golden, aggregation in (
        (as_one_step_a_row(entry["case"], entry["verl"]), "sequence-mean-token-mean"),
        (as_turns(entry["case"], entry["verl"]), "trajectory-mean"),
    ):
        config = loss_config("gpg", aggregation)
        kl = KlConfig.model_validate({"place": "loss", "estimator": estimator, "kl_coef": 1.0})
        columns = golden.batch.columns
        columns["ref_log_probs"] = golden.column("ref")
        columns["advantages"] = torch.zeros(golden.batch.n_tokens)
        columns |= loss_columns(
            golden.batch, config, mini_batches=[0] * len(golden.batch.steps), mask=golden.mask
        )
        log_probs = golden.column("new").clone().requires_grad_()
        output = make_loss_fn(config, kl)(log_probs, None, columns)
        output.loss.backward()
        assert log_probs.grad is not None
        ours = output.loss.detach(), log_probs.grad[golden.mask > 0]
        assert_agree(ours, golden.verl["kl"][estimator])


def test_the_adaptive_coefficient_follows_verls_controller(recorded: list[Any]) -> None:
    config = KlConfig(place="reward", target_kl=0.1, horizon=1000, kl_coef=0.1)
    coef, ours = config.kl_coef, []
    for kl, n in OBSERVED_KL:
        coef = next_coef(coef, kl, n, config)
        ours.append(coef)
    assert ours == pytest.approx(recorded[0]["verl"]["kl_coef"], abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_agrees_for_steps_and_for_trajectories(
    entry: dict[str, Any], aggregation: str
) -> None:
    for golden, names in (
        (as_one_step_a_row(entry["case"], entry["verl"]), SEQUENCE),
        (as_turns(entry["case"], entry["verl"]), TRAJECTORY),
    ):
        coef = coefficients(
            golden.batch.lengths.tolist(),
            [s.trajectory_uid for s in golden.batch.steps],
            loss_config("gpg", names[aggregation]),
            mask=golden.mask,
        )
        ours = float((coef * golden.column("entropy")).sum())
        assert ours == pytest.approx(entry["verl"]["entropy"][aggregation], abs=1e-6, rel=1e-6)


MASK_ONLY = {"granularity": "none", "mask_on_policy": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "tis": {"method": "tis"},
    "sequence_tis": {"method": "sequence_tis"},
    "icepop": {"method": "icepop"},
    "sequence_icepop": {"method": "icepop", "granularity": "sequence", "band": (0.5, 2.0)},
    # verl bounds μ/π by "low_high": 1/high and 1/low for π/μ.
    "token_k1": MASK_ONLY | {"band": (1 / 1.5, 1 / 0.8)},
    "seq_mean_k1": {"method": "geometric_mis", "band": (1 / 1.2, 1 / 0.95)},
    "seq_sum_k1": MASK_ONLY | {"band": (1 / 4.0, 1 / 0.5), "band_granularity": "sequence"},
    "sequence_tis_geometric_mask": {
        "method": "sequence_tis",
        "band": (1 / 1.2, 1 / 0.95),
        "band_granularity": "step",
        "mask_on_policy": True,
    },
}


def corrected(golden: Golden, options: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    return correct(
        golden.column("old"),
        golden.column("rollout"),
        golden.batch.lengths,
        [0.0] * len(golden.batch.steps),
        staleness_threshold=0.1,
        config=OffPolicyConfig.model_validate({"clip": None, **options}),  # verl has none
        mask=golden.mask,
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_rollout_correction_agrees_where_a_row_is_a_step(entry: dict[str, Any], name: str) -> None:
    golden = as_one_step_a_row(entry["case"], entry["verl"])
    verl = golden.verl["correction"][name]
    weights, metrics = corrected(golden, OPTIONS[name])
    torch.testing.assert_close(
        weights[golden.mask > 0], torch.tensor(verl["weights"], dtype=torch.float32), **CLOSE
    )
    expected = verl["metrics"]
    for key, theirs in (("kl_k1", "kl"), ("kl_k3", "k3_kl"), ("chi2", "chi2_token")):
        assert metrics[f"off_policy/{key}"] == pytest.approx(expected[theirs], abs=1e-6, rel=1e-6)
    # verl counts a row without a trained token as a reply whose ratio is 1.
    live = len({int(i) for i in torch.repeat_interleave(golden.batch.lengths)[golden.mask > 0]})
    chi2 = (metrics["off_policy/chi2_step"] + 1) * live / golden.rows + 1 - live / golden.rows - 1
    assert chi2 == pytest.approx(expected["chi2_seq"], abs=1e-6, rel=1e-5)
    if ess := expected.get("rollout_is_eff_sample_size"):
        masked = OPTIONS[name].get("band_granularity")  # verl's ESS is that before rejection
        if not masked:
            assert metrics["off_policy/ess"] == pytest.approx(ess, abs=1e-6, rel=1e-6)


def test_the_difference_of_probabilities_agrees(entry: dict[str, Any]) -> None:
    for golden in (
        as_one_step_a_row(entry["case"], entry["verl"]),
        as_turns(entry["case"], entry["verl"]),
    ):
        _, metrics = corrected(golden, {})
        ours = {name: metrics[f"rollout_probs_diff/{name}"] for name in ("mean", "max", "std")}
        assert ours == pytest.approx(entry["verl"]["probs_diff"], abs=1e-6)


@pytest.mark.parametrize("name", ["tis", "icepop", "token_k1"])
def test_token_level_correction_agrees_where_a_row_is_a_trajectory_of_turns(
    entry: dict[str, Any], name: str
) -> None:
    golden = as_turns(entry["case"], entry["verl"])
    expected = torch.tensor(golden.verl["correction"][name]["weights"], dtype=torch.float32)
    torch.testing.assert_close(corrected(golden, OPTIONS[name])[0], expected, **CLOSE)


def test_every_rule_strikes_somewhere_in_the_recorded_cases(recorded: list[Any]) -> None:
    """An agreement about rules that never act would say nothing."""
    masks = ("geo_mean", "dppo_tv", "dppo_kl")
    flags: dict[str, float] = {}
    for entry in recorded:
        golden = as_one_step_a_row(entry["case"], entry["verl"])
        for policy in ("vanilla", "clip_cov", "kl_cov", *masks):
            loss_and_gradient(golden, policy, "token-mean")
            log_probs = golden.column(new_log_probs(policy))
            output = make_loss_fn(loss_config(policy, "token-mean"))(
                log_probs, None, golden.batch.columns
            )
            for name, mean in output.metrics.items():
                flags[f"{policy} {name}"] = flags.get(f"{policy} {name}", 0) + float(mean.total)
    for rule in (
        "vanilla policy/clip_frac_high",
        "vanilla policy/clip_frac_low",
        "vanilla policy/dual_clip_frac",
        "clip_cov policy/cov_selected_frac",
        "kl_cov policy/cov_selected_frac",
        *(f"{p} policy/clip_frac_{s}" for p in masks for s in ("high", "low")),
    ):
        assert flags[rule] > 0, rule
    for name in CORRECTIONS:
        weights = [w for e in recorded for w in e["verl"]["correction"][name]["weights"]]
        assert any(w != 1 for w in weights), name


def test_what_a_mask_rejects_stays_in_the_denominators(entry: dict[str, Any]) -> None:
    golden = as_turns(entry["case"], entry["verl"])
    kept, _ = corrected(golden, OPTIONS["token_k1"])
    assert 0 < kept.sum() < len(kept)
    batch, config = golden.batch, loss_config("gpg", "token-mean")
    batch.columns |= loss_columns(batch, config, mini_batches=[0] * len(batch.steps))
    batch.columns["weights"] = kept
    ours = make_loss_fn(config)(golden.column("new"), None, batch.columns).loss
    per_token = -golden.column("new") * golden.column("advantages")
    verls = (per_token * kept).sum() / kept.sum()
    assert float(ours) == pytest.approx(float(verls * kept.sum() / len(kept)), rel=1e-6)
