"""Two ranks on this machine's CPU (gloo) against one process: same losses, same weights."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from stepwell.backends.base import LossOutput, Mean, TrainingBackend, build_backend
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError, RankError, WeightsNotWrittenError
from stepwell.backends.rows import build_rows, computed_tokens
from stepwell.backends.torch import backend, model, ranks
from stepwell.backends.torch.fsdp import Ranks
from stepwell.backends.torch.ranks import Rank, RankedBackend, RayRanks
from stepwell.backends.weights import WeightStore
from stepwell.datapool.types import Step
from tests.backends.models import VOCAB, qwen3, save_model
from tests.backends.processes_of_ranks import run_ranks
from tests.backends.test_torch_backend import in_bfloat16 as engine_in_bfloat16
from tests.builders import step

ROOT = Path(__file__).resolve().parents[2]


def steps_of(seed: int, n: int = 6) -> list[Step]:
    rng = np.random.default_rng(seed)
    steps = []
    for t in range(n):
        prompt = rng.integers(0, VOCAB, rng.integers(3, 20)).tolist()
        for i in range(rng.integers(1, 3)):
            response = rng.integers(0, VOCAB, rng.integers(1, 12)).tolist()
            steps.append(step(prompt, response, f"t{t}", i))
            prompt = prompt + response + [1, 2]
    return steps


def loss_fn(log_probs: Tensor, entropy: Tensor | None, columns: Any) -> LossOutput:
    loss = -(columns["coef"] * columns["advantages"] * log_probs).sum()
    n = torch.tensor(float(len(log_probs)))
    means = {"policy/log_prob": Mean(log_probs.detach().double().sum(), n)}
    return LossOutput(loss, means, {"found": log_probs.detach()})


def bad_on_one_rank(log_probs: Tensor, entropy: Tensor | None, columns: Any) -> LossOutput:
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("only here")
    return loss_fn(log_probs, entropy, columns)


def config_of(**options: Any) -> TorchBackendConfig:
    defaults = {"device": "cpu", "lr": 1e-3, "micro_batch_tokens": 64, "num_threads": 1}
    return TorchBackendConfig.model_validate(defaults | options)


def train(backend: TrainingBackend, seeds: Sequence[int]) -> list[dict[str, float]]:
    rows = []
    for seed in seeds:
        batch = backend.convert(steps_of(seed))
        g = torch.Generator().manual_seed(seed)
        batch.columns["advantages"] = torch.randn(batch.n_tokens, generator=g)
        batch.columns["coef"] = torch.full((batch.n_tokens,), 1 / batch.n_tokens)
        before = backend.compute_log_probs(batch)
        rows.append(backend.train_step(batch, loss_fn))
        torch.testing.assert_close(batch.columns["found"], before, atol=1e-6, rtol=0)
    return rows


def assert_same_updates(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for a, b in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm", "policy/log_prob", "tokens", "rows", "lr"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


def assert_same_weights(got: Path, expected: Path) -> None:
    a, b = (load_file(path / "model.safetensors") for path in (got, expected))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=0, msg=name)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(qwen3(), tmp_path_factory.mktemp("model"))


def with_a_chunked_head(config: TorchBackendConfig, path: Path) -> TrainingBackend:
    model.chunk_tokens = lambda limit_mb, vocab: 5
    return backend.TorchBackend(config, path)


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(600)  # two more processes import torch, on a machine that may be busy
@pytest.mark.long
def test_two_ranks_with_every_saving_on_train_as_one_plain_process(
    model_path: Path, tmp_path: Path
) -> None:
    """LoRA, gradient checkpointing, tree rows and a chunked head, all at once."""
    options = {"lora": {"rank": 4}, "rows": "tree", "gradient_checkpointing": True}
    two = ranks.start(with_a_chunked_head, config_of(ranks=2, **options), model_path)
    got = train(two, [0, 1])
    reference = two.compute_ref_log_probs(two.convert(steps_of(7)))
    two.save_weights(tmp_path / "two")
    two.save_adapters(tmp_path / "adapters")
    two.close()
    alone = build_backend("torch", config_of(lora={"rank": 4}), model_path)
    assert_same_updates(got, train(alone, [0, 1]))
    alone.save_weights(tmp_path / "alone")
    assert_same_weights(tmp_path / "two", tmp_path / "alone")
    torch.testing.assert_close(
        reference, alone.compute_ref_log_probs(alone.convert(steps_of(7))), atol=1e-5, rtol=0
    )
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("form", ["merged", "tree"])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("budget", [1, 70, 10_000])
def test_every_row_is_computed_by_one_rank_and_rounds_are_balanced(
    form: Any, size: int, budget: int
) -> None:
    rows = build_rows(steps_of(5, 40), "merged")
    shares = [Ranks(rank, size).rounds(rows, budget, form) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1  # as many rounds on each, or they hang
    computed = [id(row) for share in shares for chunk in share for row in chunk]
    assert sorted(computed) == sorted(map(id, rows))
    limit = max(budget, max(row.n_inputs for row in rows))
    for chunk in itertools.chain(*shares):
        assert not chunk or computed_tokens(chunk, form) <= limit
    if budget == 10_000:
        # One round; without balancing a single rank would do all of it.
        loads = [sum(computed_tokens(c, form) for c in share if c) for share in shares]
        assert max(loads) <= 1.5 * sum(loads) / size


def reading(rank: int, folders: Sequence[Path], ranks: int) -> list[Tensor]:
    """Log-probabilities under the model in this rank's folder, and under its reference."""
    found = backend.TorchBackend(config_of(ranks=ranks), folders[rank])
    batch = found.convert(steps_of(3))
    return [found.compute_log_probs(batch), found.compute_ref_log_probs(batch)]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_only_the_first_rank_reads_weights(model_path: Path, tmp_path: Path) -> None:
    """The other finds none in its folder, and computes with those that it is sent."""
    without = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(model_path, tmp_path / "empty", ignore=without)
    alone = reading(0, [model_path], 1)
    for found in run_ranks(2, reading, [model_path, tmp_path / "empty"], 2):
        for got, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def in_bfloat16(rank: int, ranks: int, model_path: Path, folder: Path) -> Tensor:
    """log π after an update, whose weights are published."""
    found = backend.TorchBackend(
        config_of(ranks=ranks, dtype="bfloat16", optimizer="sgd", lr=0.1), model_path
    )
    train(found, [0])
    found.save_weights(folder / f"of {ranks}")
    return found.compute_log_probs(found.convert(steps_of(3)))


@pytest.mark.timeout(600)
@pytest.mark.long
def test_in_bfloat16_ranks_one_process_and_an_engine_are_one_rounding_apart(
    model_path: Path, tmp_path: Path
) -> None:
    two, also_two = run_ranks(2, in_bfloat16, 2, model_path, tmp_path)
    one = in_bfloat16(0, 1, model_path, tmp_path)
    assert torch.equal(two, also_two)
    start, ranked, alone = (
        load_file(folder / "model.safetensors")
        for folder in (model_path, tmp_path / "of 2", tmp_path / "of 1")
    )
    for name, weight in ranked.items():
        torch.testing.assert_close(weight, alone[name], rtol=2**-7, atol=1e-5, msg=name)
    assert any(not torch.equal(weight, start[name].bfloat16()) for name, weight in ranked.items())
    steps = steps_of(3)
    for published, scored in (("of 2", two), ("of 1", one)):
        engine, apart = engine_in_bfloat16(tmp_path / published, steps)
        assert (scored - engine).abs().mean() <= apart


def test_more_ranks_than_processes_are_refused_with_the_remedy(model_path: Path) -> None:
    from stepwell.backends.torch.backend import TorchBackend

    with pytest.raises(BackendConfigError, match=r"ranks is 2, but 1 process share"):
        TorchBackend(config_of(ranks=2), model_path)


def test_ranks_without_ray_are_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(BackendConfigError, match=r"ranks is 2, but Ray is not running"):
        build_backend("torch", config_of(ranks=2), model_path)


def test_ranks_find_their_models_from_whatever_folder_they_run_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On several nodes it is a copy of the project, without `runs/`."""
    given: list[Path | None] = []

    def started(build: Any, config: TorchBackendConfig, model: Path, options: Any) -> Any:
        given.extend([model, config.reference_path])

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "RayRanks", started)
    config = config_of(ranks=2, reference_path="runs/sft/model")
    build_backend("torch", config, Path("runs/start"))
    assert given == [Path.cwd() / "runs/start", Path.cwd() / "runs/sft/model"]


def answered(monkeypatch: pytest.MonkeyPatch, **causes: Exception) -> RayRanks:
    """Ranks `a` and `b` that have answered a call, those in `causes` with an error."""

    class FailedError(ray.exceptions.RayError):
        def __init__(self, cause: Exception) -> None:
            self.cause = cause

    def get(ref: str) -> str:
        if ref in causes:
            raise FailedError(causes[ref])
        return ref

    monkeypatch.setattr(ranks.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ranks.ray, "get", get)
    monkeypatch.setattr(ranks.ray, "kill", lambda actor: None)
    group = RayRanks.__new__(RayRanks)
    group._actors = ["a", "b"]
    return group


def test_an_error_without_words_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    group = answered(monkeypatch, b=MemoryError())
    with pytest.raises(RankError, match=r"rank 1 .* in convert: MemoryError\(\)"):
        group._wait(["a", "b"], "convert")


def test_a_full_disk_is_the_error_of_the_rank_that_writes_and_stops_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others have answered: none waits for a sum."""
    full = OSError(errno.ENOSPC, "No space left on device")
    group = answered(monkeypatch, a=full)
    with pytest.raises(
        WeightsNotWrittenError, match=r"No space left.*; free space or fix run\.dir"
    ):
        WeightStore(tmp_path).write(1, lambda path: group._wait(["a", "b"], "save_weights"))
    assert len(group._actors) == 2


class RanksHere:
    """One rank in this process."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._rank = Rank(lambda config, path: backend, config_of(), Path())

    def call(self, method: str, *args: Any) -> Any:
        return self._rank.call(method, *args)


def test_ranks_load_what_one_process_would() -> None:
    loaded: list[tuple[Any, ...]] = []

    class Loads:
        def load_state(self, folder: Path, state: Any, *, weights_only: bool = False) -> None:
            loaded.append((folder, state, weights_only))

    several = RankedBackend(cast("RayRanks", RanksHere(cast("TrainingBackend", Loads()))))
    for weights_only in (False, True):
        several.load_state(Path("/step_1"), {"step": 1}, weights_only=weights_only)
    assert loaded == [(Path("/step_1"), {"step": 1}, each) for each in (False, True)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(600)
@pytest.mark.long
def test_nothing_above_64_mb_goes_through_the_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 100 MB, whose optimizer's state is twice that, is written beside training, and one
    process goes on from it."""
    form = qwen3(hidden_size=512, intermediate_size=2048, vocab_size=4096, num_hidden_layers=5)
    path = save_model(form, tmp_path / "model")
    largest = 0

    def size(value: Any) -> None:
        nonlocal largest
        largest = max(largest, len(ray.cloudpickle.dumps(value)))

    put, get, folder = ray.put, ray.get, tmp_path / "step_1" / "backend"
    monkeypatch.setattr(ranks.ray, "put", lambda value: (size(value), put(value))[1])

    def measured(ref: Any) -> Any:
        value = get(ref)
        size(value)
        return value

    monkeypatch.setattr(ranks.ray, "get", measured)
    two = build_backend("torch", config_of(ranks=2), path)
    train(two, [0])
    state = two.save_state(folder)
    expected = train(two, [1])  # before it is waited for
    two.wait_saved()
    two.load_state(folder, state)
    two.save_weights(tmp_path / "two")
    two.close()
    assert 0 < largest < 64e6
    assert sum(file.stat().st_size for file in folder.iterdir()) > 3 * 64e6
    alone = build_backend("torch", config_of(), path)
    alone.load_state(folder, state)
    assert_same_updates(train(alone, [1]), expected)
