"""The torch backend against a plain forward pass, over every row form and micro-batch split."""

from __future__ import annotations

import functools
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Qwen3Config

from stepwell.backends.base import (
    LossOutput,
    TokenBatch,
    TrainingBackend,
)
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import (
    BackendConfigError,
    BatchError,
    NonFiniteUpdateError,
    UnsupportedByBackendError,
)
from stepwell.backends.rows import build_rows, micro_batches
from stepwell.backends.torch.backend import TorchBackend, TorchBatch
from stepwell.backends.torch.optimizer import MAX_SKIPPED
from stepwell.datapool.types import Step
from stepwell.trainer.algorithms.losses import coefficients, make_loss_fn
from stepwell.trainer.config import LossConfig
from tests.backends.models import SMALL, SMALL_GPT2, VOCAB, plain_forward, qwen3, save_model
from tests.builders import step

QWEN3 = qwen3(max_position_embeddings=256, pad_token_id=0, bos_token_id=None)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(QWEN3, tmp_path_factory.mktemp("model"))
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def backend(model_path: Path, **options: Any) -> TorchBackend:
    return TorchBackend(
        TorchBackendConfig.model_validate({"max_grad_norm": 1e9, "device": "cpu"} | options),
        model_path,
    )


def random_steps(seed: int, n_trajectories: int = 4) -> list[Step]:
    """Trajectories that go on, branch off an earlier step, or rewrite their history."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(low, high)).tolist()

    steps = []
    for t in range(n_trajectories):
        contexts = [tokens(3, 9)]
        for i in range(rng.integers(1, 5)):
            context = contexts[rng.integers(max(0, len(contexts) - 2), len(contexts))]
            if rng.random() < 0.2:
                context = [(context[0] + 1) % VOCAB, *context[1:]]
            response = tokens(1, 9)
            sampled = {"sampling_params": {"temperature": float(rng.choice([0.7, 1.0]))}}
            steps.append(step(context, response, f"t{t}", i, metadata=sampled))
            contexts.append(context + response + tokens(0, 4))
    return steps


def with_columns(batch: TorchBatch, seed: int = 0, config: LossConfig | None = None) -> TorchBatch:
    g = torch.Generator().manual_seed(seed)
    n = batch.n_tokens
    batch.columns["advantages"] = torch.randn(n, generator=g)
    batch.columns["weights"] = torch.rand(n, generator=g)
    batch.columns["prox_log_probs"] = -torch.rand(n, generator=g) * 4
    batch.columns["coef"] = coefficients(
        batch.lengths.tolist(), [s.trajectory_uid for s in batch.steps], config or LossConfig()
    )
    return batch


def gradients(trained: TorchBackend) -> list[Tensor]:
    """Gradients of the one update so far: AdamW's first moment is (1 - β1) times the gradient."""
    state = trained.state_dict()["optimizer"]["state"]
    return [state[i]["exp_avg"] / 0.1 for i in sorted(state)]


@functools.cache
def reference_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


# --- the interface


def test_a_plug_in_needs_convert_and_nothing_else() -> None:
    class MyBackend(TrainingBackend):
        def convert(self, steps: list[Step]):  # type: ignore[no-untyped-def]  # as documented
            return len(steps)

    mine = MyBackend()
    assert mine.convert([step([1], [2])]) == 1
    with pytest.raises(UnsupportedByBackendError, match=r"MyBackend does not implement train_step"):
        mine.train_step(None, make_loss_fn(LossConfig()))
    with pytest.raises(NotImplementedError, match=r"compute_log_probs\(\)"):
        mine.compute_log_probs(None)
    with pytest.raises(UnsupportedByBackendError, match=r"save_weights\(\)"):
        mine.save_weights("x")
    mine.close()


# --- columns and rows


def test_columns_follow_step_order_and_unknown_log_probs_are_nan() -> None:
    batch = TokenBatch.of(
        [
            step([1], [2, 3], rollout_log_probs=[-0.5, -1.0]),
            step([1, 2], [4], index=1, rollout_log_probs=None),
        ]
    )
    assert batch.offsets.tolist() == [0, 2, 3]
    assert batch.lengths.tolist() == [2, 1]
    torch.testing.assert_close(
        batch.columns["rollout_log_probs"], torch.tensor([-0.5, -1.0, torch.nan]), equal_nan=True
    )
    assert batch.expand([7.0, 8.0]).tolist() == [7.0, 7.0, 8.0]
    with pytest.raises(BatchError, match=r"shape \(3,\) for 2 steps"):
        batch.expand([1.0, 2.0, 3.0])
    with pytest.raises(BatchError, match="no steps"):
        TokenBatch.of([])


def test_a_two_step_trajectory_costs_one_row() -> None:
    steps = [step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6], index=1, parent_index=0)]
    (row,) = build_rows(steps, "merged")
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.steps == (0, 1)
    assert row.n_inputs == 5
    assert len(build_rows(steps, "step")) == 2


def test_branches_share_a_parent_that_is_trained_once() -> None:
    steps = [
        step([1], [2]),
        step([1, 2, 3], [4], index=1, parent_index=0),
        step([1, 2, 5], [6], index=2, parent_index=0),
        step([1, 2, 5, 6, 7], [8], index=3, parent_index=2),
    ]
    rows = build_rows(steps, "merged")
    assert [row.steps for row in rows] == [(0, 1), (2, 3)]


def test_a_rewritten_history_starts_a_row_of_its_own_whatever_parent_index_says() -> None:
    steps = [step([1, 2], [3]), step([9, 2, 3, 4], [5], index=1, parent_index=0)]
    assert len(build_rows(steps, "merged")) == 2


def test_only_steps_of_one_trajectory_are_merged() -> None:
    assert len(build_rows([step([1], [2], "a"), step([1, 2], [3], "b")], "merged")) == 2


@given(seed=st.integers(0, 10_000), budget=st.integers(1, 200))
def test_every_response_token_is_trained_exactly_once_within_the_budget(
    seed: int, budget: int
) -> None:
    steps = random_steps(seed)
    for form in ("step", "merged"):
        rows = build_rows(steps, form)
        chunks = list(micro_batches(rows, budget))
        assert sum(len(c) for c in chunks) == len(rows)
        trained = [i for c in chunks for row in c for i in row.steps]
        assert sorted(trained) == list(range(len(steps)))
        for chunk in chunks:
            assert len(chunk) == 1 or len(chunk) * max(r.n_inputs for r in chunk) <= budget
            for row in chunk:
                for i in row.steps:
                    assert row.ids[: steps[i].n_tokens].tolist() == steps[i].token_ids.tolist()


def test_a_token_outside_the_vocabulary_is_refused(model_path: Path) -> None:
    with pytest.raises(
        BatchError, match=rf"'t'\[0\] has token id {VOCAB}.*{VOCAB} tokens.*--trajectory 't' RUN"
    ):
        backend(model_path).convert([step([1, VOCAB], [2])])


def test_multi_modal_steps_are_refused(model_path: Path) -> None:
    with pytest.raises(BatchError, match="trains on text and on its pictures"):
        backend(model_path).convert([step([1], [2], multi_modal_data={"image": b"x"})])


# --- log-probs and gradients


# Each example runs a model.
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 300))
@pytest.mark.parametrize("form", ["step", "merged"])
def test_log_probs_equal_a_plain_forward_pass(
    model_path: Path, form: str, seed: int, budget: int
) -> None:
    steps = random_steps(seed)
    trained = backend(model_path, rows=form, micro_batch_tokens=budget)
    got = trained.compute_log_probs(trained.convert(steps))
    with torch.no_grad():
        expected, _ = plain_forward(reference_model(model_path), steps)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


# Each example runs a model.
@settings(max_examples=settings().max_examples // 2)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 300))
def test_loss_and_gradient_are_those_of_a_plain_forward_for_any_rows_and_split(
    model_path: Path, seed: int, budget: int
) -> None:
    steps = random_steps(seed)
    config = LossConfig(entropy_coeff=0.05, loss_agg_mode="trajectory-mean")
    loss_fn = make_loss_fn(config)

    model = reference_model(model_path)
    model.zero_grad()
    columns = with_columns(backend(model_path).convert(steps), seed, config).columns
    output = loss_fn(*plain_forward(model, steps), columns)
    output.loss.backward()
    # The optimizer holds matrices first, then norms.
    parameters = sorted(model.parameters(), key=lambda p: p.ndim < 2)

    for options in ({"rows": "step"}, {"rows": "merged"}, {"micro_batch_tokens": budget}):
        trained = backend(model_path, **options)
        metrics = trained.train_step(with_columns(trained.convert(steps), seed, config), loss_fn)
        assert metrics["loss"] == pytest.approx(output.loss.item(), abs=1e-5)
        assert metrics["tokens"] == sum(len(s.response_ids) for s in steps)
        for name, mean in output.metrics.items():
            assert metrics[name] == pytest.approx(float(mean.total / mean.count), abs=1e-4)
        for got, parameter in zip(gradients(trained), parameters, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(got, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["token-mean", "trajectory-mean", "trajectory-sum"])
def test_splitting_a_trajectory_into_more_steps_changes_nothing(
    model_path: Path, aggregation: str
) -> None:
    config = LossConfig.model_validate({"loss_agg_mode": aggregation})
    reply = [5, 6, 7, 8, 9, 10]
    other = step([4], [5, 5], "b")
    whole = [step([1, 2, 3], reply, "a"), other]
    split = [step([1, 2, 3], reply[:2], "a"), step([1, 2, 3, 5, 6], reply[2:], "a", 1), other]
    results = []
    for steps in (whole, split):
        trained = backend(model_path)
        batch = with_columns(trained.convert(steps), config=config)
        loss = trained.train_step(batch, make_loss_fn(config))["loss"]
        results.append((loss, gradients(trained)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["step", "merged"])
def test_indices_train_those_steps_alone(model_path: Path, form: str) -> None:
    steps = random_steps(11)
    keep = [0, 2, 5]
    loss_fn = make_loss_fn(LossConfig())
    subset = backend(model_path, rows=form)
    batch = with_columns(subset.convert(steps))
    metrics = subset.train_step(batch, loss_fn, indices=keep)

    masked = backend(model_path, rows=form)
    rest = with_columns(masked.convert(steps))
    on = torch.tensor([float(i in keep) for i in range(len(steps))])
    rest.columns["coef"] = rest.columns["coef"] * rest.expand(on)
    assert metrics["loss"] == pytest.approx(masked.train_step(rest, loss_fn)["loss"], abs=1e-6)
    assert metrics["tokens"] == sum(len(steps[i].response_ids) for i in keep)
    for a, b in zip(gradients(subset), gradients(masked), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("indices", [[], [-1], [99]])
def test_indices_outside_the_batch_are_refused(model_path: Path, indices: list[int]) -> None:
    trained = backend(model_path)
    batch = with_columns(trained.convert(random_steps(0)))
    with pytest.raises(BatchError, match="give some of the steps 0"):
        trained.train_step(batch, make_loss_fn(LossConfig()), indices=indices)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (
            Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5),
            {"attention": "eager"},
        ),
        (GPT2Config(**SMALL_GPT2, vocab_size=VOCAB), {}),
    ],
    ids=["gemma2-soft-cap", "gpt2-absolute-positions"],
)
def test_what_a_model_family_does_to_its_logits_is_part_of_the_policy(
    tmp_path: Path, config: Any, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    trained = backend(tmp_path, **options)
    steps = random_steps(5)
    got = trained.compute_log_probs(trained.convert(steps))
    with torch.no_grad():
        expected, _ = plain_forward(model.eval(), steps)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_only_response_positions_go_through_the_lm_head(model_path: Path) -> None:
    trained = backend(model_path)
    seen: list[int] = []
    head = trained._model.get_output_embeddings()
    head.register_forward_hook(lambda _, args, out: seen.append(out.shape[:-1].numel()))
    batch = trained.convert([step(range(1, 30), [3, 4]), step(range(1, 20), [5], "u")])
    trained.compute_log_probs(batch)
    assert sum(seen) == batch.n_tokens == 3


# --- updates


def test_training_raises_the_probability_of_rewarded_tokens(model_path: Path) -> None:
    trained = backend(model_path, lr=1e-3)
    batch = trained.convert([step([1, 2], [3, 4]), step([1, 2], [5, 6], "u")])
    before = trained.compute_log_probs(batch)
    batch.columns |= {
        "advantages": batch.expand([1.0, -1.0]),
        "weights": torch.ones(4),
        "prox_log_probs": before,
        "coef": torch.full((4,), 0.25),
    }
    metrics = trained.train_step(batch, make_loss_fn(LossConfig()))
    after = trained.compute_log_probs(batch)
    assert (after[:2] > before[:2]).all()
    assert (after[2:] < before[2:]).all()
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/entropy"] > 0
    assert trained.updates == 1


def test_the_rate_warms_up_and_stays(model_path: Path) -> None:
    trained = backend(model_path, lr=1e-3, warmup_steps=4)
    batch = with_columns(trained.convert(random_steps(1)))
    loss_fn = make_loss_fn(LossConfig())
    rates = [trained.train_step(batch, loss_fn)["lr"] for _ in range(6)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


def test_the_gradient_is_clipped_to_the_global_norm(model_path: Path) -> None:
    trained = backend(model_path, max_grad_norm=1e-3)
    metrics = trained.train_step(
        with_columns(trained.convert(random_steps(1))), make_loss_fn(LossConfig())
    )
    norm = torch.stack([g.norm() for g in gradients(trained)]).norm()
    assert metrics["grad_norm"] > 1e-2
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_a_non_finite_update_is_skipped_and_counted_and_leaves_the_weights_alone(
    model_path: Path,
) -> None:
    trained = backend(model_path, lr=1e-2)
    loss_fn = make_loss_fn(LossConfig())
    good = with_columns(trained.convert(random_steps(1)))
    bad = with_columns(trained.convert(random_steps(1)))
    bad.columns["advantages"][3] = torch.nan
    trained.train_step(good, loss_fn)
    before = trained.compute_log_probs(good)

    assert trained.train_step(bad, loss_fn)["skipped_updates"] == 1
    assert trained.updates == 1
    torch.testing.assert_close(trained.compute_log_probs(good), before, atol=0, rtol=0)
    assert trained.train_step(good, loss_fn)["skipped_updates"] == 1  # a good one starts anew
    for _ in range(MAX_SKIPPED):
        trained.train_step(bad, loss_fn)
    with pytest.raises(NonFiniteUpdateError, match=f"{MAX_SKIPPED + 1} in a row") as e:
        trained.train_step(bad, loss_fn)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert torch.isfinite(trained.compute_log_probs(good)).all()


def test_a_log_prob_that_the_engine_did_not_send_spoils_the_loss_loudly(model_path: Path) -> None:
    """`rollout_log_probs` taken for `prox_log_probs` by mistake: NaN, not 0.0."""
    trained = backend(model_path)
    steps = [replace(s, rollout_log_probs=None) for s in random_steps(1)]
    batch = with_columns(trained.convert(steps))
    batch.columns["prox_log_probs"] = batch.columns["rollout_log_probs"]
    for _ in range(MAX_SKIPPED):
        assert trained.train_step(batch, make_loss_fn(LossConfig()))["skipped"] == 1
    with pytest.raises(NonFiniteUpdateError, match="loss is nan"):
        trained.train_step(batch, make_loss_fn(LossConfig()))


def test_a_loss_function_of_ones_own_is_enough(model_path: Path) -> None:
    def sft(log_probs: Tensor, entropy: Tensor | None, columns: Any) -> LossOutput:
        assert entropy is None
        return LossOutput(-(columns["coef"] * log_probs).sum(), {})

    trained = backend(model_path, lr=1e-2)
    batch = with_columns(trained.convert(random_steps(1)))
    losses = [trained.train_step(batch, sft)["loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


# --- weights and checkpoints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_load_in_transformers_and_score_alike(
    model_path: Path, tmp_path: Path, dtype: str
) -> None:
    trained = backend(model_path, lr=1e-2, dtype=dtype)
    steps = random_steps(1)
    batch = with_columns(trained.convert(steps))
    trained.train_step(batch, make_loss_fn(LossConfig()))
    trained.save_weights(tmp_path / "v1")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert saved.dtype == getattr(torch, dtype)
    with torch.no_grad():
        got, _ = plain_forward(saved.float().eval(), steps)
    atol = 1e-5 if dtype == "float32" else 0.25
    torch.testing.assert_close(trained.compute_log_probs(batch), got, atol=atol, rtol=0)


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("float32", 4), ("bfloat16", 2)])
def test_saved_weights_bring_the_tokenizer_and_keep_tied_weights_tied(
    model_path: Path, tmp_path: Path, dtype: str, bytes_per_weight: int
) -> None:
    source = shutil.copytree(model_path, tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"stale weights")
    backend(source, dtype=dtype).save_weights(tmp_path / "v1")
    names = {p.name for p in (tmp_path / "v1").iterdir()}
    assert names >= {"tokenizer_config.json", "chat_template.jinja", "config.json"}
    assert "pytorch_model.bin" not in names
    with safe_open(tmp_path / "v1" / "model.safetensors", "pt") as saved:
        sizes = [saved.get_tensor(k).nbytes for k in saved.keys()]  # noqa: SIM118  # no mapping
    n_weights = sum(p.numel() for p in reference_model(model_path).parameters())
    assert sum(sizes) == n_weights * bytes_per_weight


def test_training_goes_on_bit_identically_from_a_checkpoint(
    model_path: Path, tmp_path: Path
) -> None:
    loss_fn = make_loss_fn(LossConfig())
    options = {"lr": 1e-2, "warmup_steps": 5, "max_grad_norm": 1.0}

    def updates(trained: TorchBackend, seeds: Sequence[int]) -> list[dict[str, float]]:
        rows = []
        for seed in seeds:
            batch = with_columns(trained.convert(random_steps(seed)), seed)
            metrics = trained.train_step(batch, loss_fn)
            rows.append({k: v for k, v in metrics.items() if k != "seconds"})
        return rows

    through = backend(model_path, **options)
    updates(through, [1, 2])
    torch.save(through.state_dict(), tmp_path / "state.pt")
    expected = updates(through, [3, 4])

    resumed = backend(model_path, **options, seed=77)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.updates == 2
    assert updates(resumed, [3, 4]) == expected
    for a, b in zip(
        through.state_dict()["model"].values(), resumed.state_dict()["model"].values(), strict=True
    ):
        assert torch.equal(a, b)


def test_a_resumed_run_takes_its_learning_rate_from_the_config(model_path: Path) -> None:
    loss_fn = make_loss_fn(LossConfig())
    first = backend(model_path, lr=1e-2)
    batch = with_columns(first.convert(random_steps(1)))
    first.train_step(batch, loss_fn)
    resumed = backend(model_path, lr=1e-4, weight_decay=0.1)
    resumed.load_state_dict(first.state_dict())
    assert resumed.train_step(batch, loss_fn)["lr"] == 1e-4
    assert resumed.state_dict()["optimizer"]["param_groups"][0]["weight_decay"] == 0.1


def test_a_run_is_bit_identical_to_itself(model_path: Path) -> None:
    def final_loss() -> float:
        trained = backend(model_path, lr=1e-2)
        batch = with_columns(trained.convert(random_steps(3)))
        return [trained.train_step(batch, make_loss_fn(LossConfig()))["loss"] for _ in range(3)][-1]

    assert final_loss() == final_loss()


# --- configuration


def test_a_path_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        BackendConfigError, match=r"model.path is '.*', which has no config.json"
    ) as e:
        backend(tmp_path / "nowhere")
    assert "\n" not in str(e.value)


def test_a_broken_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(BackendConfigError, match=r"cannot be loaded: .*no-such-model") as e:
        backend(tmp_path)
    assert "\n" not in str(e.value)


def test_an_attention_that_a_model_does_not_have_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = save_model(Gemma2Config(**SMALL, head_dim=8), tmp_path / "model")
    with pytest.raises(BackendConfigError, match=r"backend\.attention is 'sdpa'.*'eager'$"):
        TorchBackend(TorchBackendConfig(device="cpu"), path)
    TorchBackend(TorchBackendConfig(device="cpu", attention="eager"), path)


def test_a_checkpoint_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    other = Qwen3Config(**{**QWEN3.to_dict(), "hidden_size": 16})
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with pytest.raises(BackendConfigError, match="does not fit the model"):
        backend(model_path).load_state_dict(backend(tmp_path).state_dict())


def test_a_missing_gpu_is_named(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendConfigError, match="device is 'cuda', but torch sees no GPU"):
        backend(model_path, device="cuda")


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": 0.0},
        {"rows": "trie"},
        {"learning_rate": 1e-3},
        {"micro_batch_tokens": 0},
        {"betas": (0.9, 1.0)},
    ],
)
def test_a_config_out_of_bounds_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TorchBackendConfig.model_validate(bad)


# --- bfloat16


def published(
    path: Path, steps: Sequence[Step], dtype: torch.dtype, width: int | None = None
) -> Tensor:
    """log π of what `path` publishes, as an engine in `dtype` computes it: one step at a time, or
    all in one batch padded to `width`, which rounds elsewhere."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def float_logits(input_ids: Tensor) -> Any:
        padded = torch.nn.functional.pad(input_ids, (0, width - input_ids.shape[1] if width else 0))
        logits = model(input_ids=padded.expand(2 if width else 1, -1)).logits[:1]
        return SimpleNamespace(logits=logits[:, : input_ids.shape[1]].float())

    with torch.no_grad():
        return plain_forward(float_logits, steps)[0]


def in_bfloat16(path: Path, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
    """log π as an engine in bfloat16 computes it, and how far from it another one may be: as far as
    one that batches otherwise. A CPU without AVX-512 rounds almost alike in any batch: there, half
    as far as bfloat16 is from float32, if that is more."""
    engine = published(path, steps, torch.bfloat16)
    apart = (engine - published(path, steps, torch.bfloat16, width=160)).abs().mean()
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return engine, apart
    rounding = (engine - published(path, steps, torch.float32)).abs().mean()
    return engine, torch.maximum(apart, 0.45 * rounding)


@pytest.mark.parametrize("rows", ["step", "merged", "tree"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_in_bfloat16_the_policy_that_is_trained_is_the_one_that_engines_sample(
    tmp_path: Path, rows: str, lora: dict[str, Any] | None
) -> None:
    """Masters are float32, but every operation of the forward pass runs in bfloat16: the trained
    policy is as far from an engine's as two engines are that batch otherwise."""
    path = save_model(qwen3(max_position_embeddings=256, num_hidden_layers=4), tmp_path / "model")
    trained = backend(path, lr=1e-2, dtype="bfloat16", rows=rows, lora=lora)
    steps = random_steps(1, 8)
    trained.train_step(with_columns(trained.convert(steps)), make_loss_fn(LossConfig()))
    trained.save_weights(tmp_path / "v1")
    engine, apart = in_bfloat16(tmp_path / "v1", steps)
    gap = (trained.compute_log_probs(trained.convert(steps)) - engine).abs().mean()
    # LoRA: W·x + B·A·x rounds once more than the merged weights do.
    assert gap <= (2 if lora is None else 4) * apart


def test_bfloat16_masters_keep_what_one_update_alone_would_round_away(model_path: Path) -> None:
    trained = backend(model_path, lr=1e-5, dtype="bfloat16", optimizer="sgd", max_grad_norm=1e-3)
    batch = with_columns(trained.convert(random_steps(1)))
    before = {k: v.clone() for k, v in trained.state_dict()["model"].items()}
    for _ in range(3):
        trained.train_step(batch, make_loss_fn(LossConfig()))
    after = trained.state_dict()["model"]
    assert any((after[k] != before[k]).any() for k in before)
    assert all(v.dtype == torch.float32 for v in after.values() if v.is_floating_point())
