"""Policy losses: closed forms, and the same loss however the batch is cut."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from stepwell.backends.base import TokenBatch
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.types import Step
from stepwell.trainer.algorithms.kl import KlConfig
from stepwell.trainer.algorithms.losses import loss_columns, make_loss_fn
from stepwell.trainer.algorithms.policy_losses.base import BatchTokens, PolicyTerms
from stepwell.trainer.algorithms.policy_losses.covariance import select
from stepwell.trainer.algorithms.policy_losses.gspo import step_mean
from stepwell.trainer.algorithms.registry import POLICY_LOSSES
from stepwell.trainer.config import LossConfig
from stepwell.trainer.errors import ColumnError

POLICIES = tuple(POLICY_LOSSES.names.built_in)
LENGTHS = [3, 1, 4, 2, 5]
TRAJECTORIES = ["a", "a", "b", "c", "c"]
N = sum(LENGTHS)


def gradient(terms: PolicyTerms, log_probs: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(terms.loss.sum(), log_probs)
    return grad


def batch(seed: int = 0) -> TokenBatch:
    """Five steps of three trajectories, with every column a loss may read but `loss_columns`'."""
    g = torch.Generator().manual_seed(seed)
    out = TokenBatch.of(
        [
            Step(prompt_ids=[1], response_ids=[2] * n, trajectory_uid=t, prompt_uid="p")
            for n, t in zip(LENGTHS, TRAJECTORIES, strict=True)
        ]
    )
    out.columns |= {
        "prox_log_probs": -torch.rand(N, generator=g) * 3,
        "ref_log_probs": -torch.rand(N, generator=g) * 3,
        "advantages": torch.randn(N, generator=g),
        "weights": torch.rand(N, generator=g),
    }
    return out


def steps_of(tokens: TokenBatch, indices: list[int]) -> Tensor:
    """Positions of the tokens of these steps, in this order."""
    edges = tokens.offsets.tolist()
    return torch.cat([torch.arange(edges[i], edges[i + 1]) for i in indices])


def config_of(policy: str, **fields: object) -> LossConfig:
    many = {"kl_cov": {"share": 0.3}, "clip_cov": {"share": 0.3, "low": -9}}
    return LossConfig.model_validate({"policy": policy, "options": many.get(policy, {})} | fields)


def terms_of(policy: str, log_probs: Tensor, config: dict[str, object], **x: Tensor) -> PolicyTerms:
    """Terms of the loss for tokens with the columns `x`; π_prox is 1 where none is given."""
    columns = {"prox_log_probs": torch.zeros(len(log_probs))} | x
    keys = LossConfig.model_validate({"policy": policy, **config})
    return keys.chosen.compute(log_probs, columns, keys)


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 1000), order=st.permutations(range(5)), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_of_whole_steps_add_up_to_the_whole_for_every_loss(
    policy: str, seed: int, order: list[int], cuts: set[int]
) -> None:
    config = config_of(policy, entropy_coeff=0.01, loss_agg_mode="trajectory-mean")
    tokens = batch(seed)
    mask = torch.ones(N)
    mask[5] = 0.0
    columns = tokens.columns | loss_columns(tokens, config, mini_batches=[0] * 5, mask=mask)
    torch.manual_seed(seed)
    log_probs = (columns["prox_log_probs"] + 0.3 * torch.randn(N)).requires_grad_()
    entropy = torch.rand(N)
    loss_fn = make_loss_fn(config, KlConfig(place="loss", kl_coef=0.1))

    def run(positions: Tensor) -> tuple[Tensor, dict[str, float]]:
        x = {k: v[positions] for k, v in columns.items()}
        output = loss_fn(log_probs[positions], entropy[positions], x)
        return output.loss, {k: float(m.total) for k, m in output.metrics.items()}

    whole, metrics = run(torch.arange(N))
    parts = [
        run(steps_of(tokens, order[a:b])) for a, b in itertools.pairwise([0, *sorted(cuts), 5])
    ]
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, whole)
    for name, value in metrics.items():
        assert sum(m[name] for _, m in parts) == pytest.approx(value, abs=1e-5)
    got, expected = (
        torch.autograd.grad(x, log_probs, retain_graph=True)[0] for x in (total, whole)
    )
    torch.testing.assert_close(got, expected)
    assert got[5] == 0


def test_gspo_shares_the_geometric_mean_ratio_of_a_step_and_clips_it_as_one() -> None:
    log_ratio = torch.tensor([0.3, -0.1, 0.1, 0.0, 0.2])
    columns = {
        "step": torch.tensor([7.0, 7.0, 7.0, 2.0, 2.0]),
        "step_tokens": torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0]),
    }
    log_probs = log_ratio.clone().requires_grad_()
    advantages = torch.tensor([-1.0, -1.0, -1.0, 2.0, 2.0])
    bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    terms = terms_of("gspo", log_probs, bounds, advantages=advantages, **columns)
    s = math.exp(0.1)
    assert terms.ratio is not None
    torch.testing.assert_close(terms.ratio, torch.full((5,), s))
    torch.testing.assert_close(terms.loss, torch.tensor([s, s, s, -2.1, -2.1]))
    # A < 0 above the clip is still pushed down, token by token with the same strength.
    torch.testing.assert_close(
        gradient(terms, log_probs), torch.tensor([s, s, s, 0.0, 0.0]), atol=1e-6, rtol=1e-6
    )
    assert terms.flags["clip_frac_high"].tolist() == [False] * 3 + [True] * 2


def test_gspo_at_the_proximal_policy_is_the_plain_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {"step": torch.zeros(2), "step_tokens": torch.full((2,), 2.0)}
    columns |= {"prox_log_probs": log_probs.detach(), "advantages": torch.tensor([3.0, 3.0])}
    terms = terms_of("gspo", log_probs, {}, **columns)
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-3.0, -3.0]))


def test_a_step_cut_over_two_micro_batches_is_refused_by_sequence_losses() -> None:
    tokens = batch()
    config = config_of("gspo")
    columns = tokens.columns | loss_columns(tokens, config, mini_batches=[0] * 5)
    part = {k: v[:6] for k, v in columns.items()}
    with pytest.raises(ColumnError, match="holds 2 of the 4 tokens of step 2") as e:
        make_loss_fn(config)(torch.zeros(6), None, part)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    ppo = config_of("ppo")
    make_loss_fn(ppo)(torch.zeros(6), None, part)  # a loss per token does not mind


def test_the_mean_of_a_step_leaves_out_masked_tokens() -> None:
    tokens = batch()
    mask = torch.ones(N)
    mask[4] = mask[6] = 0
    columns = loss_columns(tokens, config_of("gspo"), mini_batches=[0] * 5, mask=mask)
    live = columns["coef"] != 0
    x = {k: v[live] for k, v in columns.items()}
    values = torch.arange(float(N))[live]
    got = step_mean(values, x)
    assert got.tolist()[:6] == [1.0, 1.0, 1.0, 3.0, 6.0, 6.0]  # steps of 3, 1 and (5, 7)
    assert x["step_tokens"].tolist()[:6] == [3, 3, 3, 1, 2, 2]


def test_geo_mean_clips_each_token_and_gives_the_step_the_mean_of_what_is_left() -> None:
    log_probs = torch.tensor([0.9, -0.1, -0.2], requires_grad=True)
    columns = {"step": torch.zeros(3), "step_tokens": torch.full((3,), 3.0)}
    terms = terms_of("geo_mean", log_probs, {}, advantages=torch.full((3,), 2.0), **columns)
    s = math.exp((0.4 - 0.1 - 0.2) / 3)
    torch.testing.assert_close(terms.loss, torch.full((3,), -2 * s))
    # The outlier has no gradient of its own; the others share the step's.
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([0.0, -2 * s, -2 * s]))
    assert terms.flags["clip_frac_high"].tolist() == [True, False, False]
    log_probs = torch.tensor([0.9, -0.9], requires_grad=True)
    columns = {"step": torch.zeros(2), "step_tokens": torch.full((2,), 2.0)}
    terms = terms_of("geo_mean", log_probs, {}, advantages=torch.full((2,), -1.0), **columns)
    s = math.exp((0.9 - 0.4) / 2)
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([s, 0.0]))


@pytest.mark.parametrize("policy", ["dppo_tv", "dppo_kl"])
def test_dppo_stops_a_token_whose_probability_has_moved_far_and_no_rare_one(policy: str) -> None:
    old, new = torch.tensor([1e-4, 0.5, 0.5, 0.5]), torch.tensor([1e-3, 0.9, 0.9, 0.1])
    log_probs = new.log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    x = {"prox_log_probs": old.log(), "advantages": advantages}
    terms = terms_of(policy, log_probs, {}, **x)
    # 10 times as likely, and still rare: goes on. Far along A: stops. Against A: comes back.
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-10.0, 0.0, 1.8, 0.0]))
    assert terms.flags["clip_frac_high"].tolist() == [False, True, False, False]
    assert terms.flags["clip_frac_low"].tolist() == [False, False, False, True]
    bounded = terms_of(policy, log_probs, {"clip_ratio_c": 2.0}, **x)
    assert gradient(bounded, log_probs)[0] == -2


def test_dro_adds_the_square_of_the_log_ratio() -> None:
    log_probs = torch.tensor([0.5], requires_grad=True)
    config = {"options": {"beta": 0.4}}
    terms = terms_of("dro", log_probs, config, advantages=torch.tensor([2.0]))
    torch.testing.assert_close(terms.loss, torch.tensor([-1.0 + 0.2 * 0.25]))
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-2.0 + 0.4 * 0.5]))


@pytest.mark.parametrize(("ratio", "weight"), [(1.0, 1.0), (0.1, 0.1), (3.0, 3.0), (9.0, 5.0)])
def test_cispo_clips_the_weight_and_never_the_gradient(ratio: float, weight: float) -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    old = log_probs.detach() - math.log(ratio)
    terms = terms_of("cispo", log_probs, {}, prox_log_probs=old, advantages=torch.tensor([2.0]))
    torch.testing.assert_close(terms.loss, torch.tensor([2.0 * weight]))
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-2.0 * weight]))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_sapo_starts_at_the_policy_gradient_and_fades_on_both_sides(advantage: float) -> None:
    def slope(ratio: float) -> float:
        log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
        terms = terms_of("sapo", log_probs, {}, advantages=torch.tensor([advantage]))
        return float(gradient(terms, log_probs)) / ratio  # per unit of the ratio

    assert slope(1.0) == pytest.approx(-advantage)
    for near, far in ((1.2, 2.0), (0.8, 0.3)):
        assert abs(slope(far)) < abs(slope(near)) < abs(advantage)


def test_sapo_narrows_the_trust_region_where_the_advantage_is_negative() -> None:
    log_probs = torch.tensor([0.5, 0.5], requires_grad=True)
    narrow = {"options": {"tau_negative": 4.0}}
    terms = terms_of("sapo", log_probs, narrow, advantages=torch.tensor([1.0, -1.0]))
    up, down = gradient(terms, log_probs)
    assert abs(down) < abs(up)


def test_clip_cov_takes_the_loss_and_the_gradient_off_selected_tokens() -> None:
    log_probs = torch.tensor([0.1, 0.1], requires_grad=True)
    columns = {"advantages": torch.tensor([1.0, 1.0]), "selected": torch.tensor([0.0, 1.0])}
    terms = terms_of("clip_cov", log_probs, {}, **columns)
    r = math.exp(0.1)
    torch.testing.assert_close(terms.loss, torch.tensor([-r, 0.0]))
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-r, 0.0]))


def test_kl_cov_pulls_a_selected_token_back_however_far_it_is() -> None:
    log_probs = torch.tensor([-30.0], requires_grad=True)
    columns = {"advantages": torch.zeros(1), "selected": torch.ones(1)}
    terms = terms_of("kl_cov", log_probs, {"options": {"kl_coef": 0.5}}, **columns)
    torch.testing.assert_close(terms.loss, torch.tensor([15.0]))
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-0.5]))


def test_kl_cov_pulls_selected_tokens_back_to_the_proximal_policy() -> None:
    log_probs = torch.tensor([0.1, 0.1, -0.1], requires_grad=True)
    columns = {"advantages": torch.ones(3), "selected": torch.tensor([0.0, 1.0, 1.0])}
    terms = terms_of("kl_cov", log_probs, {"options": {"kl_coef": 0.5}}, **columns)
    plain = -torch.exp(torch.tensor([0.1, 0.1, -0.1]))
    torch.testing.assert_close(terms.loss, plain + 0.5 * torch.tensor([0.0, 0.1, 0.1]))
    torch.testing.assert_close(
        gradient(terms, log_probs), plain + 0.5 * torch.tensor([0.0, 1.0, -1.0])
    )


def test_gpg_and_sft_are_plain_log_likelihoods() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = terms_of("gpg", log_probs, {}, advantages=torch.tensor([2.0, -1.0]))
    assert terms.loss.tolist() == [2.0, -2.0]
    torch.testing.assert_close(gradient(terms, log_probs), torch.tensor([-2.0, 1.0]))
    assert terms_of("sft", log_probs, {}).loss.tolist() == [1.0, 2.0]


def test_sft_asks_for_no_advantage_and_no_proximal_policy() -> None:
    columns = {"coef": torch.full((2,), 0.5), "weights": torch.ones(2)}
    output = make_loss_fn(LossConfig(policy="sft"))(torch.tensor([-1.0, -2.0]), None, columns)
    assert float(output.loss) == 1.5
    assert not output.metrics


def selected(
    config: LossConfig,
    log_probs: Tensor,
    advantages: Tensor,
    mini_batch: Tensor,
    trained: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    n = len(log_probs)
    draw = torch.Generator().manual_seed(seed)
    tokens = BatchTokens(
        {"prox_log_probs": log_probs, "advantages": advantages},
        step=torch.zeros(n, dtype=torch.int64),
        mini_batch=mini_batch,
        trained=torch.ones(n, dtype=torch.bool) if trained is None else trained,
        shuffled=lambda n: torch.randperm(n, generator=draw),
    )
    return select(tokens, config)["selected"]


def test_the_highest_covariances_are_selected_within_each_mini_batch() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0, -5.0])
    advantages = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0, -5.0])
    config = config_of("kl_cov", options={"share": 1 / 3})
    halves = torch.tensor([0, 0, 0, 1, 1, 1])
    assert selected(config, log_probs, advantages, halves).tolist() == [1, 0, 0, 0, 0, 1]
    trained = torch.tensor([False] + [True] * 5)
    one_batch = selected(config, log_probs, advantages, torch.zeros(6), trained)
    assert one_batch.tolist() == [0, 0, 0, 0, 0, 1]


def test_clip_cov_draws_between_its_bounds_and_the_same_for_the_same_seed() -> None:
    torch.manual_seed(0)
    log_probs, advantages = -torch.rand(400) * 4, torch.randn(400)
    config = config_of("clip_cov", options={"share": 0.05, "low": 0.2, "high": 1.0})

    def draw(seed: int) -> Tensor:
        return selected(config, log_probs, advantages, torch.zeros(400), seed=seed)

    cov = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    chosen = draw(3) > 0
    assert chosen.sum() == 20
    assert ((cov[chosen] > 0.2) & (cov[chosen] < 1.0)).all()
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_tokens_without_weight_are_not_selected() -> None:
    tokens = batch()
    config = config_of("kl_cov", options={"share": 1.0})
    tokens.columns["weights"][2] = 0.0
    columns = loss_columns(tokens, config, mini_batches=[0] * 5)
    assert columns["selected"].tolist() == [1, 1, 0] + [1] * (N - 3)


def test_a_loss_gets_the_columns_it_reads_and_no_others() -> None:
    expected = {
        "ppo": {"coef"},
        "gspo": {"coef", "step", "step_tokens"},
        "kl_cov": {"coef", "selected"},
    }
    for policy, names in expected.items():
        assert set(loss_columns(batch(), config_of(policy), mini_batches=[0] * 5)) == names


def test_clip_bounds_default_to_those_of_the_policy_loss() -> None:
    got = {
        p: (LossConfig(policy=p).clip_ratio_low, LossConfig(policy=p).clip_ratio_high)
        for p in POLICIES
    }
    assert got["ppo"] == got["clip_cov"] == (0.2, 0.28)
    assert LossConfig() == LossConfig(policy="ppo")
    assert got["gspo"] == (3e-4, 4e-4)
    assert got["cispo"] == (1.0, 4.0)
    assert got["geo_mean"] == (0.4, 0.4)
    assert (got["dppo_tv"], got["dppo_kl"]) == ((0.15, 0.15), (0.05, 0.05))
    assert (LossConfig().clip_ratio_c, LossConfig(policy="dppo_kl").clip_ratio_c) == (3.0, 20.0)
    mine = LossConfig(policy="gspo", clip_ratio_high=0.1)
    assert (mine.clip_ratio_low, mine.clip_ratio_high) == (3e-4, 0.1)
    assert LossConfig.model_validate(mine.model_dump()) == mine


def test_the_help_of_the_clip_names_the_bounds_that_the_losses_have() -> None:
    properties = LossConfig.model_json_schema()["properties"]
    for side, field in enumerate(("clip_ratio_low", "clip_ratio_high")):
        text = properties[field]["description"]
        named = re.findall(r"`(\w+)` (\d[\de.-]*)", text)
        assert {"gspo", "cispo"} <= {name for name, _ in named}
        for name, bound in named:
            assert float(bound) == POLICY_LOSSES.load(name).clip[side], (field, name)
    low = properties["clip_ratio_low"]["description"]
    names = ("geo_mean", "dppo_tv", "dppo_kl")
    apart = [float(n) for n in re.findall(r"(?<=[( ])0\.\d+", low)]
    assert apart == [POLICY_LOSSES.load(name).clip[0] for name in names]


def test_the_default_policys_own_bounds_hold_where_no_policy_is_given() -> None:
    class Gspo(LossConfig):
        policy: str = "gspo"

    for keys in ({}, {"entropy_coeff": 0.1}):
        config = Gspo.model_validate(keys)
        assert (config.clip_ratio_low, config.clip_ratio_high) == (3e-4, 4e-4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"policy": "gsop"}, "did you mean gspo.* choose ppo, gspo"),
        ({"policy": "clip_cov", "options": {"low": 2.0, "high": 1.0}}, "low is the smaller"),
        ({"policy": "kl_cov", "options": {"share": 0.0}}, "greater than 0"),
        ({"policy": "sapo", "options": {"tau_positive": 0.0}}, "greater than 0"),
        ({"policy": "sapo", "options": {"tau": 1.0}}, "tau is unknown to 'sapo'.*it has tau_pos"),
        ({"options": {"tau_positive": 1.0}}, "tau_positive is unknown to 'ppo'; it has none"),
        ({"loss_agg_mode": "sequence-mean-token-sum-norm"}, "loss_scale_factor is None"),
    ],
)
def test_a_loss_config_that_cannot_work_is_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossConfig.model_validate(bad)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.mark.parametrize("policy", ["gspo", "kl_cov", "cispo"])
def test_the_backend_gives_the_same_loss_and_gradient_norm_for_any_rows_and_budget(
    model_path: Path, policy: str
) -> None:
    """A sequence-level ratio needs a step's tokens to come in one micro-batch."""
    torch.set_num_threads(1)
    steps = []
    for t in range(3):
        context = [3 + t, 5, 7]
        for i in range(3):
            response = [(2 * i + 3 * t + j) % 24 for j in range(2 + i)]
            steps.append(
                Step(
                    prompt_ids=context,
                    response_ids=response,
                    trajectory_uid=f"t{t}",
                    prompt_uid="p",
                    step_index=i,
                )
            )
            context = [*context, *response, 9]
    config = config_of(
        policy, loss_agg_mode="sequence-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.1
    )
    results = []
    for rows, budget in (
        ("step", 1),
        ("step", 1000),
        ("merged", 1),
        ("merged", 30),
        ("tree", 1),
        ("tree", 1000),
    ):
        options = {"rows": rows, "micro_batch_tokens": budget, "device": "cpu"}
        trained = TorchBackend(TorchBackendConfig.model_validate(options), model_path)
        tokens = trained.convert(steps)
        g = torch.Generator().manual_seed(1)
        noise = 0.1 * torch.randn(tokens.n_tokens, generator=g)
        tokens.columns["prox_log_probs"] = trained.compute_log_probs(tokens) + noise
        tokens.columns["advantages"] = tokens.expand(torch.randn(len(steps), generator=g))
        tokens.columns["weights"] = torch.rand(tokens.n_tokens, generator=g)
        tokens.columns |= loss_columns(tokens, config, mini_batches=[0] * len(steps))
        metrics = trained.train_step(tokens, make_loss_fn(config))
        results.append((metrics["loss"], metrics["grad_norm"]))
    for loss, norm in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-5)
        assert norm == pytest.approx(results[0][1], abs=1e-5)
