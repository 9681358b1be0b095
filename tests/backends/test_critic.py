"""The critic: its loss against verl's, its values against a plain forward pass; it learns."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3Config

from stepwell.backends.base import TokenBatch
from stepwell.backends.config import CriticConfig, TorchBackendConfig, ValueAggregation
from stepwell.backends.errors import BackendConfigError, BatchError, UnsupportedByBackendError
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.critic import (
    Critic,
    ValueLoss,
    ValueModel,
    explained_variance,
    shares,
)
from stepwell.datapool.types import Group, Step, Trajectory
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.losses import loss_columns, make_loss_fn
from stepwell.trainer.config import AdvantageConfig, LossConfig
from tests.trainer.golden.advantages import (
    KINDS,
    RECORDED,
    VALUE_CLIP,
    Case,
    random_case,
    verl_results,
)

VOCAB = 40
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
TOY = Qwen3Config(**TINY | {"vocab_size": 16, "num_hidden_layers": 1}, tie_word_embeddings=True)
MODELS = {
    "toy": TOY,
    "tied": Qwen3Config(**TINY, tie_word_embeddings=True),
    "untied": Qwen3Config(**TINY, tie_word_embeddings=False),
    "soft-capped": Gemma2Config(**TINY, final_logit_softcapping=0.5, tie_word_embeddings=True),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def critic(path: Path, backend: dict[str, Any] | None = None, **options: Any) -> Critic:
    compute = TorchBackendConfig.model_validate({"device": "cpu"} | (backend or {}))
    return Critic(CriticConfig.model_validate({"lr": 3e-3} | options), compute, path)


def steps_of(uid: str, seed: int, n: int = 3) -> list[Step]:
    """A chain of `n` steps, each prompt extending the step before."""
    rng = np.random.default_rng(seed)
    steps: list[Step] = []
    prompt = rng.integers(2, VOCAB, rng.integers(1, 6)).tolist()
    for k in range(n):
        response = rng.integers(2, VOCAB, rng.integers(1, 6)).tolist()
        steps.append(
            Step(
                prompt_ids=prompt,
                response_ids=response,
                reward=float(rng.normal()),
                trajectory_uid=uid,
                prompt_uid=uid,
                step_index=k,
            )
        )
        prompt = [*prompt, *response, *rng.integers(2, VOCAB, 2).tolist()]
    return steps


def with_returns(batch: TokenBatch, values: Tensor, seed: int = 0) -> TokenBatch:
    torch.manual_seed(seed)
    batch.columns |= {"values": values, "returns": torch.randn(batch.n_tokens)}
    return batch


# --- loss -----------------------------------------------------------------------------------------


def assert_loss_agrees(case: Case, verl: dict[str, list[list[float]]]) -> None:
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    new, old = (torch.tensor(case[k], dtype=torch.float64) for k in ("new_values", "values"))
    returns = torch.tensor(verl["gae_returns"], dtype=torch.float64).masked_fill(~mask, torch.nan)
    rows, width = mask.shape
    batch = TokenBatch.of(
        [
            Step(prompt_ids=[1], response_ids=[2] * n, trajectory_uid=f"t{row}", prompt_uid="p")
            for row in range(rows)
            for n in (width - 1, 1)  # a trajectory is verl's row
        ]
    )
    for mode, name in (("token-mean", "value_loss"), ("trajectory-mean", "value_loss_by_row")):
        columns = {
            "values": old.flatten(),
            "returns": returns.flatten(),
            "value_coef": shares(batch, mask.flatten(), mode),
        }
        loss = ValueLoss(VALUE_CLIP)(new.flatten(), None, columns).loss
        assert float(loss) == pytest.approx(verl[name][0][0], rel=1e-6)


def test_the_value_loss_agrees_with_the_values_recorded_from_verl() -> None:
    for entry in json.loads(RECORDED.read_text()):
        assert_loss_agrees(entry["case"], entry["verl"])


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs the [verl] extra")
@pytest.mark.parametrize("kind", KINDS)
def test_the_value_loss_agrees_with_verl_run_live(kind: str) -> None:
    for seed in range(200, 205):
        case = random_case(kind, seed)
        assert_loss_agrees(case, verl_results(case))


def test_a_value_beyond_the_clip_gets_no_gradient_towards_the_return() -> None:
    values = torch.tensor([0.9, 0.9, -0.5], requires_grad=True)
    columns = {
        "values": torch.zeros(3),
        "returns": torch.tensor([2.0, -1.0, 2.0]),
        "value_coef": torch.full((3,), 1 / 3),
    }
    loss, metrics, _ = ValueLoss(0.5)(values, None, columns)
    loss.backward()  # type: ignore[no-untyped-call]
    # Moved far enough towards 2: clipped. Moved the wrong way: all of the gradient.
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 1.9 / 3, -2.5 / 3])
    assert float(metrics["critic/clip_frac"].total) == 1
    unclipped = ValueLoss(None)(values, None, columns).loss
    assert float(unclipped.detach()) == pytest.approx((1.1**2 + 1.9**2 + 2.5**2) / 6)


def test_explained_variance_is_one_when_exact_and_zero_for_a_constant() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((3,), 9.0), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(3)) is None


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        *((model, rows) for model in ("tied", "untied") for rows in ("step", "merged", "tree")),
        ("soft-capped", "merged"),
    ],
)
def test_values_are_the_heads_at_the_position_before_each_token(
    paths: dict[str, Path], model: str, rows: str
) -> None:
    value_model = ValueModel(
        TorchBackendConfig.model_validate(
            {"device": "cpu", "rows": rows, "micro_batch_tokens": 24}
            | ({"attention": "eager"} if model == "soft-capped" else {})
        ),
        paths[model],
    )
    steps = [s for uid in range(3) for s in steps_of(str(uid), seed=uid)]
    batch = value_model.convert(steps)
    assert not value_model.compute_log_probs(batch).any()  # it starts at 0
    head = torch.randn(32)
    state = value_model.state_dict()
    state["model"] = {k: v.clone() for k, v in state["model"].items()}
    (name,) = (k for k in state["model"] if k.endswith("lm_head.weight"))
    state["model"][name] = head[None]
    value_model.load_state_dict(state)

    plain = AutoModelForCausalLM.from_pretrained(
        paths[model], attn_implementation="eager"
    ).base_model.eval()
    expected = []
    with torch.no_grad():
        for s in steps:
            ids = torch.tensor([*s.prompt_ids.tolist(), *s.response_ids.tolist()])[None]
            hidden = plain(input_ids=ids).last_hidden_state[0]
            expected.append((hidden @ head)[len(s.prompt_ids) - 1 : -1])
    found = value_model.compute_log_probs(batch)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_an_update_is_the_same_for_any_split_and_row_form(paths: dict[str, Path]) -> None:
    steps = [s for uid in range(4) for s in steps_of(str(uid), seed=uid)]
    found = []
    for rows, budget in (("step", 4096), ("merged", 4096), ("merged", 16), ("tree", 64)):
        one = critic(paths["tied"], {"rows": rows, "micro_batch_tokens": budget}, lr=1e-2)
        batch = one._model.convert(steps)
        for _ in range(3):
            values = one.values(batch)
            metrics = one.update(with_returns(batch, values))
        found.append((one.values(batch), metrics))
    for values, metrics in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=1e-4, atol=1e-5)
        for name in ("loss", "value_mean", "explained_variance"):
            key = f"critic/{name}"
            assert metrics[key] == pytest.approx(found[0][1][key], rel=1e-4)


def test_the_batch_of_another_backend_is_given_rows(paths: dict[str, Path]) -> None:
    one = critic(paths["tied"])
    steps = steps_of("a", seed=1)
    flat = with_returns(TokenBatch.of(steps), torch.zeros(TokenBatch.of(steps).n_tokens))
    first = one.update(flat, [0, 2])
    again = critic(paths["tied"])
    own = with_returns(again._model.convert(steps), torch.zeros(flat.n_tokens))
    second = again.update(own, [0, 2])
    assert first["critic/loss"] == second["critic/loss"]
    assert one.values(flat).equal(again.values(own))


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token-mean", [1 / 5, 1 / 5, 1 / 5, 1 / 5, 0, 1 / 5]),
        ("sequence-mean-token-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 3, 0, 0]),
        ("trajectory-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2, 0, 0]),
    ],
)
def test_what_counts_alike_in_the_value_loss(mode: ValueAggregation, wanted: list[float]) -> None:
    batch = TokenBatch.of(
        [
            Step(prompt_ids=[1], response_ids=[2] * n, trajectory_uid=uid, prompt_uid="p")
            for uid, n in (("a", 2), ("a", 1), ("b", 2), ("b", 1))
        ]
    )
    trained = torch.tensor([1, 1, 1, 1, 0, mode == "token-mean"], dtype=torch.bool)
    assert shares(batch, trained, mode).tolist() == pytest.approx(wanted)


def test_only_tokens_with_a_return_are_trained(paths: dict[str, Path]) -> None:
    one = critic(paths["tied"])
    batch = with_returns(one._model.convert(steps_of("a", seed=1)), torch.tensor(0.0))
    batch.columns["values"] = one.values(batch)
    first = batch.offsets[:-1]
    returns = batch.columns["returns"].clone()
    batch.columns["returns"] = torch.full_like(returns, torch.nan)
    batch.columns["returns"][first] = returns[first]
    metrics = one.update(batch)
    assert metrics["critic/return_mean"] == pytest.approx(float(returns[first].mean()))
    assert metrics["critic/loss"] == pytest.approx(float(returns[first].square().mean()) / 2)
    batch.columns["returns"][:] = torch.nan
    with pytest.raises(BatchError, match="none of the steps has a return"):
        one.update(batch)
    del batch.columns["returns"]
    with pytest.raises(BatchError, match="no column returns"):
        one.update(batch)


# --- life -----------------------------------------------------------------------------------------


def test_warm_up_lasts_its_number_of_updates_and_survives_a_checkpoint(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    one = critic(paths["tied"], warmup_updates=2)
    batch = one._model.convert(steps_of("a", seed=1))
    warm = []
    for _ in range(2):
        one.update(with_returns(batch, one.values(batch)))
        warm.append(one.warm)
    resumed = critic(paths["tied"], warmup_updates=2)
    state = one.save_state(tmp_path / "critic")
    one.wait_saved()
    resumed.load_state(tmp_path / "critic", state)
    torch.testing.assert_close(resumed.values(batch), one.values(batch), rtol=0, atol=0)
    for again in (one, resumed):
        again.update(with_returns(batch, again.values(batch)))
    warm.append(resumed.warm)
    assert warm == [False, False, True]
    # The optimizer's moments came along: the next update is the same to the last bit.
    torch.testing.assert_close(resumed.values(batch), one.values(batch), rtol=0, atol=0)


def test_without_warm_up_the_first_update_already_trains_the_policy(paths: dict[str, Path]) -> None:
    one = critic(paths["tied"])
    batch = one._model.convert(steps_of("a", seed=1))
    one.update(with_returns(batch, one.values(batch)))
    assert one.warm


def test_a_critic_has_no_weights_to_serve_and_a_clear_error_without_a_model(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    model = ValueModel(TorchBackendConfig(device="cpu"), paths["tied"])
    with pytest.raises(UnsupportedByBackendError):
        model.save_weights(tmp_path)
    with pytest.raises(BackendConfigError, match=r"no config\.json"):
        Critic(CriticConfig(path=tmp_path), TorchBackendConfig(device="cpu"), paths["tied"])


def test_the_policys_lora_and_schedule_are_not_the_critics() -> None:
    backend = TorchBackendConfig.model_validate(
        {"lora": {}, "scheduler": "linear", "scheduler_steps": 9, "lr": 1e-6, "rows": "step"}
    )
    own = CriticConfig(lr=1e-4).model_config_of(backend)
    assert (own.lora, own.scheduler, own.lr, own.rows) == (None, "constant", 1e-4, "step")
    with pytest.raises(ValidationError, match="cliprange_value"):
        CriticConfig(cliprange_value=0.0)


@pytest.mark.timeout(600)  # two more processes import torch, on a machine that may be busy
@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_two_ranks_learn_what_one_does(paths: dict[str, Path], tmp_path: Path) -> None:
    steps = [s for uid in range(4) for s in steps_of(str(uid), seed=uid)]
    flat = TokenBatch.of(steps)
    alone, ranked = critic(paths["tied"]), critic(paths["tied"], {"ranks": 2})
    for _ in range(2):
        for one in (alone, ranked):
            metrics = one.update(with_returns(flat, one.values(flat)))
    torch.testing.assert_close(ranked.values(flat), alone.values(flat), rtol=1e-4, atol=1e-5)
    assert metrics["critic/skipped_updates"] == 0
    state = ranked.save_state(tmp_path / "critic")
    ranked.wait_saved()
    ranked.close()
    again = critic(paths["tied"])
    again.load_state(tmp_path / "critic", state)
    torch.testing.assert_close(again.values(flat), alone.values(flat), rtol=1e-4, atol=1e-5)


# --- learning -------------------------------------------------------------------------------------

QUESTIONS = range(2, 10)
ASK_AGAIN = 1


def right(question: int, answer: int) -> bool:
    return (answer >= TOY.vocab_size // 2) == (question % 2 == 0)


def reward(question: int, answer: int) -> float:
    """Questions above 5 pay 1 however they are answered: worth knowing, and not worth learning."""
    return float(right(question, answer)) + float(question > 5)


def distributions(policy: TorchBackend, prompts: Sequence[tuple[int, ...]]) -> np.ndarray:
    """π(token | prompt), [prompts, TOY.vocab_size]."""
    steps = [
        Step(prompt_ids=prompt, response_ids=[t], trajectory_uid=f"{i}.{t}", prompt_uid="p")
        for i, prompt in enumerate(prompts)
        for t in range(TOY.vocab_size)
    ]
    log_probs = policy.compute_log_probs(policy.convert(steps)).double().reshape(-1, TOY.vocab_size)
    return np.asarray(log_probs.softmax(-1).numpy())


def play(policy: TorchBackend, rng: np.random.Generator, n: int = 24) -> list[Group]:
    """`n` rollouts of two steps; the first answer decides the reward, which the second earns."""
    questions = rng.choice(list(QUESTIONS), n).tolist()
    prompts: list[tuple[int, ...]] = [(q,) for q in questions]
    answers: list[list[int]] = []
    for _ in range(2):
        distinct = sorted(set(prompts))
        table = dict(zip(distinct, distributions(policy, distinct), strict=True))
        answers.append([int(rng.choice(TOY.vocab_size, p=table[prompt])) for prompt in prompts])
        prompts = [(*p, a, ASK_AGAIN) for p, a in zip(prompts, answers[-1], strict=True)]
    groups = []
    for i, (q, a, b) in enumerate(zip(questions, *answers, strict=True)):
        uid = {"trajectory_uid": str(i), "prompt_uid": str(i)}
        first = Step(prompt_ids=[q], response_ids=[a], **uid)
        second = Step(
            prompt_ids=[q, a, ASK_AGAIN],
            response_ids=[b],
            reward=reward(q, a),
            step_index=1,
            **uid,
        )
        groups.append(Group(str(i), (Trajectory(str(i), str(i), (first, second)),)))
    return groups


def test_gae_with_a_critic_learns_both_the_value_and_the_task(
    paths: dict[str, Path],
) -> None:
    rng = np.random.default_rng(0)
    policy = TorchBackend(TorchBackendConfig(device="cpu", lr=8e-3, rows="step"), paths["toy"])
    one = critic(paths["toy"], lr=4e-3, warmup_updates=5)
    advantage = AdvantageConfig.model_validate({"adv_estimator": "gae", "lam": 0.95})
    loss_config = LossConfig()
    loss_fn = make_loss_fn(loss_config)
    history: list[dict[str, float]] = []
    for _ in range(40):
        groups = play(policy, rng)
        batch = policy.convert([s for g in groups for s in g.steps])
        values = one.values(batch)
        prox = policy.compute_log_probs(batch)
        batch.columns |= {"values": values, "prox_log_probs": prox}
        batch.columns["weights"] = torch.ones(batch.n_tokens)
        batch.columns |= compute_advantages(groups, advantage, values=values).columns
        batch.columns |= loss_columns(batch, loss_config, mini_batches=[0] * len(batch.steps))
        metrics = one.update(batch)
        metrics["right"] = float(
            np.mean([right(int(s.prompt_ids[0]), int(s.response_ids[0])) for s in batch.steps[::2]])
        )
        if one.warm:
            policy.train_step(batch, loss_fn)
        history.append(metrics)

    def mean(name: str, part: slice) -> float:
        return float(np.mean([metrics[name] for metrics in history[part]]))

    start, end = slice(0, 5), slice(-5, None)
    assert policy.updates == len(history) - 5  # the warm-up is the critic's alone
    assert mean("critic/loss", end) < 0.25 * mean("critic/loss", start)
    assert mean("critic/explained_variance", start) < 0.3
    assert mean("critic/explained_variance", end) > 0.6
    assert mean("right", start) < 0.7
    assert mean("right", end) > 0.9
