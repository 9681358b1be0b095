"""Settings of `backend.*`: optimizers, rates, LoRA, checkpointed layers, the reference."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, OPTConfig, Qwen3MoeConfig, get_scheduler

from stepwell.backends.base import LossOutput
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.optimizer import learning_rate
from stepwell.backends.weights import WeightStore
from stepwell.datapool.types import Step
from tests.backends.models import SMALL, qwen3, save_model
from tests.helpers import instances

VOCAB = 128
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "weight_decay": 0.1},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd", "momentum": 0.9},
]


EXPERTS = Qwen3MoeConfig(
    **SMALL | {"vocab_size": VOCAB},
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    larger = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    config = qwen3(vocab_size=VOCAB, initializer_range=0.1, **larger)
    return save_model(config, tmp_path_factory.mktemp("model"))


def config_of(**options: Any) -> TorchBackendConfig:
    return TorchBackendConfig.model_validate({"device": "cpu", "lr": 1e-2} | options)


def backend(model_path: Path, **options: Any) -> TorchBackend:
    return TorchBackend(config_of(**options), model_path)


def steps_of(seed: int) -> list[Step]:
    g = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=g).tolist()

    return [
        Step(
            prompt_ids=tokens(5 + t),
            response_ids=tokens(8 - t),
            trajectory_uid=f"t{t}",
            prompt_uid="p",
            step_index=0,
        )
        for t in range(4)
    ]


def loss_fn(log_probs: Tensor, entropy: Tensor | None, columns: Any) -> LossOutput:
    return LossOutput(-(columns["coef"] * log_probs).sum(), {})


def train(trained: TorchBackend, seeds: Sequence[int]) -> list[dict[str, float]]:
    rows = []
    for seed in seeds:
        batch = trained.convert(steps_of(seed))
        batch.columns["coef"] = torch.full((batch.n_tokens,), 1 / batch.n_tokens)
        metrics = trained.train_step(batch, loss_fn)
        rows.append({k: v for k, v in metrics.items() if k not in ("seconds", "mfu")})
    return rows


def log_probs(trained: TorchBackend, seed: int = 9) -> Tensor:
    return trained.compute_log_probs(trained.convert(steps_of(seed)))


def ref_log_probs(trained: TorchBackend, seed: int = 9) -> Tensor:
    return trained.compute_ref_log_probs(trained.convert(steps_of(seed)))


# --- optimizers and rates


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda o: o["optimizer"])
def test_every_optimizer_lowers_the_loss(model_path: Path, options: dict[str, Any]) -> None:
    losses = [m["loss"] for m in train(backend(model_path, **options), [1] * 6)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("adapters", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "options",
    [
        *({**o, "scheduler": "cosine", "scheduler_steps": 5} for o in OPTIMIZERS),
        {"scheduler": "linear", "scheduler_steps": 5, "min_lr_ratio": 0.1},
        {"scheduler": "constant", "gradient_checkpointing": True},
    ],
    ids=lambda o: f"{o.get('optimizer', 'adamw')}-{o['scheduler']}",
)
def test_every_optimizer_and_scheduler_goes_on_bit_identically(
    model_path: Path, tmp_path: Path, options: dict[str, Any], adapters: Any
) -> None:
    options = options | {"warmup_steps": 1, "lora": adapters}
    through = backend(model_path, **options)
    train(through, [1, 2])
    torch.save(through.state_dict(), tmp_path / "state.pt")
    expected = train(through, [3, 4])

    resumed = backend(model_path, **options, seed=77)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(resumed, [3, 4]) == expected
    for a, b in zip(
        through.state_dict()["model"].values(), resumed.state_dict()["model"].values(), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_after_the_warm_up_the_rate_is_that_of_transformers(scheduler: str) -> None:
    config = config_of(lr=2.0, scheduler=scheduler, warmup_steps=4, scheduler_steps=20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = get_scheduler(scheduler, optimizer, num_warmup_steps=4, num_training_steps=20)
    expected = []
    for _ in range(23):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    got = [learning_rate(config, u) for u in range(23)]
    assert got[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert got[4:20] == pytest.approx(expected[4:20])
    assert got[20:] == [0.0] * 3


def test_the_rate_ends_at_min_lr_ratio_and_every_update_of_the_run_has_one() -> None:
    config = config_of(scheduler="cosine", scheduler_steps=10, min_lr_ratio=0.25)
    rates = [learning_rate(config, u) for u in range(12)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-2
    assert rates[10] == rates[11] == pytest.approx(2.5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "linear"}, "scheduler_steps is not set"),
        ({"scheduler": "linear", "scheduler_steps": 3, "warmup_steps": 3}, "does not exceed"),
        ({"scheduler_steps": 3}, "scheduler_steps is 3 with scheduler 'constant'"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio is 0.1 with scheduler 'constant'"),
        ({"optimizer": "sgd", "betas": (0.5, 0.5)}, "betas is .* 'sgd' has no betas"),
        ({"optimizer": "adamw", "momentum": 0.5}, "'adamw' has no momentum"),
        ({"optimizer": "adafactor", "eps": 1e-6}, "'adafactor' has no eps"),
        ({"optimizer": "adamw_8bit", "ranks": 2}, "'adamw_8bit' does not work on weights sharded"),
        ({"optimizer": "adafactor", "ranks": 2}, "'adafactor' does not work on weights sharded"),
    ],
)
def test_combinations_that_do_not_work_are_refused_with_the_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config_of(**options)


def test_a_checkpoint_of_another_optimizer_is_refused(model_path: Path) -> None:
    trained = backend(model_path)
    train(trained, [1])
    with pytest.raises(BackendConfigError, match=r"'adamw'.*backend\.optimizer is 'sgd'"):
        backend(model_path, optimizer="sgd").load_state_dict(trained.state_dict())


# --- memory


def stored_bytes(trained: TorchBackend) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, weights not counted."""
    batch = trained.convert(steps_of(1))
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.data_ptr() for p in trained._model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        trained._policy(batch, batch.rows, entropy=False)
    return sum(size for pointer, size in seen.items() if pointer not in weights)


def test_checkpointed_layers_keep_less_and_change_no_update(model_path: Path) -> None:
    plain, checkpointed = (
        backend(model_path, gradient_checkpointing=on, optimizer="sgd") for on in (False, True)
    )
    assert stored_bytes(checkpointed) < stored_bytes(plain) / 2
    assert not checkpointed._model.model.layers[0].self_attn.training
    for a, b in zip(train(plain, [1, 2]), train(checkpointed, [1, 2]), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_a_checkpointed_layer_drops_nothing_out(tmp_path: Path) -> None:
    """OPT's does so itself, in training mode, which checkpointing needs."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    form = OPTConfig(vocab_size=VOCAB, num_attention_heads=4, dropout=0.5, **sizes)
    path = save_model(form, tmp_path / "model")
    plain, checkpointed = (backend(path, gradient_checkpointing=on) for on in (False, True))
    batch = plain.convert(steps_of(1))
    expected = plain.compute_log_probs(batch)
    assert torch.equal(checkpointed.compute_log_probs(checkpointed.convert(steps_of(1))), expected)
    for a, b in zip(train(plain, [1, 2]), train(checkpointed, [1, 2]), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("form", ["merged", "tree"])
def test_selective_checkpointing_keeps_the_output_of_attention(model_path: Path, form: str) -> None:
    whole, selective = (
        backend(model_path, gradient_checkpointing=on, optimizer="sgd", rows=form)
        for on in (True, "selective")
    )

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is FLASH
            return func(*args, **(kwargs or {}))

    with Counting() as twice:
        train(whole, [1])
    with Counting() as once:
        train(selective, [1])
    assert 0 < once.calls == twice.calls / 2
    for a, b in zip(train(whole, [2]), train(selective, [2]), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


@pytest.mark.long  # a C++ compiler works for a minute
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["merged", "tree"])
def test_compiled_layers_change_no_update(model_path: Path, form: str) -> None:
    options = {"optimizer": "sgd", "rows": form, "gradient_checkpointing": True}
    plain = train(backend(model_path, **options), [1, 2])
    compiled = train(backend(model_path, compile=True, **options), [1, 2])
    for a, b in zip(compiled, plain, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("form", ["step", "merged", "tree"])
def test_a_small_budget_of_logits_changes_no_update(
    model_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(backend(model_path, optimizer="sgd"), [1, 2])
    monkeypatch.setattr("stepwell.backends.torch.model.chunk_tokens", lambda limit_mb, vocab: 3)
    chunked = backend(model_path, optimizer="sgd", rows=form, gradient_checkpointing=True)
    assert chunked._policy._chunk == 3
    for a, b in zip(train(chunked, [1, 2]), expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


# --- LoRA


def test_the_size_of_the_update_is_that_of_the_merged_weights(
    model_path: Path, tmp_path: Path
) -> None:
    trained = backend(model_path, lora={"rank": 4, "rslora": True}, lr=1e-2)
    train(trained, [1, 2])
    metrics = train(trained, [1, 2])[-1]
    trained.save_weights(tmp_path / "v1")
    start = load_file(model_path / "model.safetensors")
    merged = load_file(tmp_path / "v1" / "model.safetensors")
    changed = [name for name in start if not torch.equal(start[name], merged[name])]
    sizes = torch.stack([(merged[n] - start[n]).norm() / start[n].norm() for n in changed])
    assert metrics["lora/relative_norm"] == pytest.approx(float(sizes.median()), rel=1e-3)


def test_adapters_alone_are_trained_and_checkpointed_and_engines_get_merged_weights(
    model_path: Path, tmp_path: Path
) -> None:
    trained = backend(model_path, lora={"rank": 4})
    start = load_file(model_path / "model.safetensors")
    before = log_probs(trained)
    torch.testing.assert_close(before, log_probs(backend(model_path)), atol=0, rtol=0)
    train(trained, [1, 2])
    assert (log_probs(trained) - before).abs().max() > 1e-2

    state = trained.state_dict()["model"]
    assert all(".lora_" in name for name in state)
    assert sum(t.numel() for t in state.values()) < sum(t.numel() for t in start.values()) / 2

    trained.save_weights(tmp_path / "v1")
    merged = load_file(tmp_path / "v1" / "model.safetensors")
    assert merged.keys() == start.keys()
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(merged[name], start[name])
    engine = backend(tmp_path / "v1")  # any Hugging Face loader
    torch.testing.assert_close(log_probs(engine), log_probs(trained), atol=1e-5, rtol=0)


def test_saved_adapters_load_in_peft(model_path: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trained = backend(model_path, lora={"rank": 4, "rslora": True, "target_modules": ["q_proj"]})
    train(trained, [1, 2])
    trained.save_adapters(tmp_path / "a")
    base = AutoModelForCausalLM.from_pretrained(model_path)
    loaded = PeftModel.from_pretrained(base, tmp_path / "a").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = trained._model(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=0)
    with pytest.raises(BackendConfigError, match=r"needs backend\.lora"):
        backend(model_path).save_adapters(tmp_path / "b")


def test_in_bfloat16_adapters_are_trained_in_float32(model_path: Path) -> None:
    trained = backend(model_path, lora={"rank": 4}, dtype="bfloat16")
    assert {p.dtype for p in trained.state_dict()["model"].values()} == {torch.float32}
    losses = [m["loss"] for m in train(trained, [1] * 6)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (["nope"], "target_modules is .*not found"),
        (["lm_head"], "adapts the LM head"),
        (["q_proj", "embed_tokens"], "or the embedding, but the model ties the two"),
    ],
)
def test_wrong_target_modules_are_named(model_path: Path, target: Any, message: str) -> None:
    with pytest.raises(BackendConfigError, match=message) as e:
        backend(model_path, lora={"target_modules": target})
    assert "\n" not in str(e.value)


def test_adapters_on_experts_are_refused_with_the_layers_to_name(tmp_path: Path) -> None:
    path = save_model(EXPERTS, tmp_path / "model")
    with pytest.raises(BackendConfigError, match=r"mlp\.experts\).* \[k_proj, o_proj, .*v_proj\]"):
        backend(path, lora={"rank": 4})
    layers = ["k_proj", "o_proj", "q_proj", "v_proj"]
    trained = backend(path, lora={"rank": 4, "target_modules": layers})
    train(trained, [1])
    trained.save_weights(tmp_path / "merged")
    got = trained.compute_log_probs(trained.convert(steps_of(9)))
    merged = backend(tmp_path / "merged")
    expected = merged.compute_log_probs(merged.convert(steps_of(9)))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_adapters_on_an_embedding_are_refused_with_the_layers_to_name(tmp_path: Path) -> None:
    path = save_model(qwen3(vocab_size=VOCAB, tie_word_embeddings=False), tmp_path / "model")
    with pytest.raises(BackendConfigError, match=r"embed_tokens\).* \[q_proj\]"):
        backend(path, lora={"rank": 4, "target_modules": ["q_proj", "embed_tokens"]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapters", [None, {"rank": 4}], ids=["full", "lora"])
def test_training_goes_on_from_weights_that_were_published_earlier(
    model_path: Path, tmp_path: Path, adapters: dict[str, int] | None, dtype: str
) -> None:
    trained = backend(model_path, lora=adapters, dtype=dtype)
    train(trained, [0, 1])
    trained.save_weights(tmp_path / "good")
    good = trained.compute_log_probs(trained.convert(steps_of(9)))
    train(trained, [2, 3])
    assert not torch.equal(good, trained.compute_log_probs(trained.convert(steps_of(9))))
    trained.load_weights(tmp_path / "good")
    assert torch.equal(good, trained.compute_log_probs(trained.convert(steps_of(9))))
    trained.save_weights(tmp_path / "again")
    name = "model.safetensors"
    assert (tmp_path / "good" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert not trained.state_dict()["optimizer"]["state"], "no moments of what was rolled back"
    row = train(trained, [4])[0]
    assert not row["skipped"]
    assert not torch.equal(good, trained.compute_log_probs(trained.convert(steps_of(9))))
    trained.load_weights(model_path)
    fresh = backend(model_path, lora=adapters, dtype=dtype)
    start = fresh.compute_log_probs(fresh.convert(steps_of(9)))
    assert torch.equal(start, trained.compute_log_probs(trained.convert(steps_of(9))))


def test_a_model_whose_experts_lie_one_by_one_in_its_files_goes_back_too(tmp_path: Path) -> None:
    """And to a start with the same weights beside them in another form, as Mistral's have."""
    start = save_model(EXPERTS, tmp_path / "start")
    save_file({"layers.0.wk.weight": torch.ones(2)}, start / "consolidated.safetensors")
    trained = backend(start)
    batch = trained.convert(steps_of(9))
    began_with = trained.compute_log_probs(batch)
    train(trained, [0])
    trained.save_weights(tmp_path / "good")
    good = trained.compute_log_probs(batch)
    train(trained, [1])
    for folder, expected in ((tmp_path / "good", good), (start, began_with)):
        trained.load_weights(folder)
        assert torch.equal(trained.compute_log_probs(batch), expected)


def test_a_run_may_begin_with_a_version_of_another_run(model_path: Path, tmp_path: Path) -> None:
    """Whose adapters, merged there already, it added once more as it went back to its start; and
    which was a roll-back, as its own versions then were."""
    store = WeightStore(tmp_path / "first")
    first = backend(model_path, lora={"rank": 4})
    train(first, [0, 1])
    store.write(1, first.save_weights)
    began_with = store.write_again(2, of=1)
    second = backend(began_with, lora={"rank": 4})
    start = second.compute_log_probs(second.convert(steps_of(9)))
    train(second, [2])
    store = WeightStore(tmp_path / "second", base=began_with)
    version = store.write(1, second.save_weights)
    assert store.weights_of(1) == 1
    own = second.compute_log_probs(second.convert(steps_of(9)))
    for folder in (began_with, store.write_again(2, of=0)):
        second.load_weights(folder)
        assert torch.equal(start, second.compute_log_probs(second.convert(steps_of(9))))
        second.load_weights(version)
        assert torch.equal(own, second.compute_log_probs(second.convert(steps_of(9))))
    with pytest.raises(BackendConfigError, match="on other weights than the run began with"):
        first.load_weights(version)


def test_adapters_that_were_published_alone_are_trained_on(
    model_path: Path, tmp_path: Path
) -> None:
    trained = backend(model_path, lora={"rank": 4})
    train(trained, [0])
    trained.save_adapters(tmp_path / "good")
    good = trained.compute_log_probs(trained.convert(steps_of(9)))
    train(trained, [1])
    trained.load_weights(tmp_path / "good")
    assert torch.equal(good, trained.compute_log_probs(trained.convert(steps_of(9))))


@pytest.mark.parametrize("adapters", [None, {"rank": 4}], ids=["full", "lora"])
def test_published_weights_of_another_model_are_refused(
    model_path: Path, tmp_path: Path, adapters: dict[str, int] | None
) -> None:
    other = save_model(qwen3(vocab_size=VOCAB), tmp_path / "other")
    backend(other, lora=adapters and {"rank": 2}).save_weights(tmp_path / "theirs")
    with pytest.raises(BackendConfigError, match=r"theirs do not fit the model in .*model"):
        backend(model_path, lora=adapters).load_weights(tmp_path / "theirs")


def test_adapters_of_another_rank_or_base_are_refused(model_path: Path, tmp_path: Path) -> None:
    state = backend(model_path, lora={"rank": 4}).state_dict()
    with pytest.raises(BackendConfigError, match="does not fit the model"):
        backend(model_path, lora={"rank": 8}).load_state_dict(state)
    with pytest.raises(BackendConfigError, match=r"not on the modules that backend\.lora"):
        backend(model_path, lora={"rank": 4, "target_modules": ["q_proj"]}).load_state_dict(state)
    with pytest.raises(BackendConfigError, match="does not fit the model"):
        backend(model_path).load_state_dict(state)
    other = backend(model_path)
    train(other, [1])
    other.save_weights(tmp_path / "other")
    with pytest.raises(BackendConfigError, match="adapters belong to other weights"):
        backend(tmp_path / "other", lora={"rank": 4}).load_state_dict(state)


# --- the reference policy


@pytest.mark.parametrize("adapters", [None, {"rank": 4}], ids=["frozen-copy", "adapters-off"])
def test_the_reference_stays_what_the_run_started_with_also_after_a_resume(
    model_path: Path, tmp_path: Path, adapters: Any
) -> None:
    trained = backend(model_path, lora=adapters)
    start = log_probs(trained)
    assert torch.equal(ref_log_probs(trained), start)
    train(trained, [1, 2])
    assert torch.equal(ref_log_probs(trained), start)
    assert not torch.equal(log_probs(trained), start)
    expected = train(trained, [3])

    torch.save(trained.state_dict(), tmp_path / "state.pt")
    resumed = backend(model_path, lora=adapters)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(ref_log_probs(resumed), start)
    assert torch.equal(log_probs(resumed), log_probs(trained))
    # Asking for the reference changed nothing that is trained.
    unasked = backend(model_path, lora=adapters)
    train(unasked, [1, 2])
    assert train(unasked, [3]) == expected


def test_another_reference_can_be_named_and_replaced_weights_are_noticed(
    model_path: Path, tmp_path: Path
) -> None:
    teacher = backend(model_path)
    train(teacher, [1])
    teacher.save_weights(tmp_path / "teacher")
    for adapters in (None, {"rank": 4}):
        student = backend(model_path, reference_path=tmp_path / "teacher", lora=adapters)
        assert torch.equal(ref_log_probs(student), log_probs(teacher))

    moved = shutil.copytree(model_path, tmp_path / "moved")
    state = backend(moved).state_dict()
    shutil.copyfile(tmp_path / "teacher" / "model.safetensors", moved / "model.safetensors")
    resumed = backend(moved)
    resumed.load_state_dict(state)
    with pytest.raises(BackendConfigError, match="not the one that the run started with"):
        ref_log_probs(resumed)
    with pytest.raises(BackendConfigError, match=r"backend\.reference_path is .*no config\.json"):
        backend(model_path, reference_path=tmp_path / "nowhere")


def test_a_backend_that_nobody_holds_leaves_no_weights_behind(model_path: Path) -> None:
    def alive() -> int:
        gc.collect()
        return len(instances(torch.nn.Parameter))

    before = alive()
    for dtype in ("float32", "bfloat16"):
        train(backend(model_path, dtype=dtype), [1])
        assert alive() == before, dtype


# --- with a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_deterministic_run_on_cuda_is_bit_identical_to_itself(model_path: Path) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    assert train(backend(model_path, **options), [1, 2, 3]) == train(
        backend(model_path, **options), [1, 2, 3]
    )
