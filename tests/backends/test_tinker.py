"""A real Tinker SDK (`make test-tinker`) against a local server of its API: what it trains is what
our own backend trains. Without the SDK only the name is known."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stepwell.backends.base import BACKENDS, LossOutput, Mean, loop_backend
from stepwell.backends.config import LoraConfig, TorchBackendConfig
from stepwell.backends.errors import (
    BackendConfigError,
    BatchError,
    NonFiniteUpdateError,
    UnsupportedByBackendError,
)
from stepwell.backends.tinker.backend import TinkerBackend
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.optimizer import MAX_SKIPPED
from stepwell.backends.weights import WeightStore
from stepwell.trainer.metrics import read_metrics
from tests.backends.engines.conftest import save_qwen3
from tests.backends.test_trl import linear_groups, steps_of
from tests.backends.tinker_server import TinkerServer
from tests.e2e.conftest import ROOT, SMALL

HAS_TINKER = importlib.util.find_spec("tinker") is not None
needs_tinker = pytest.mark.skipif(not HAS_TINKER, reason="make test-tinker has the SDK")
LR = 0.01
QUICKSTART = ROOT / "examples" / "quickstart" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model"), 0)


@contextmanager
def serving(made: TinkerServer) -> Iterator[TinkerServer]:
    """In a thread of its own: the SDK waits in this one."""
    loop, stop, began = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with made.running():
            began.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert began.wait(30)
    yield made
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)


@pytest.fixture(params=[None])
def server(folder: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TinkerServer]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    with serving(TinkerServer(folder, request.param)) as made:
        yield made


def config(server: TinkerServer | None = None, **keys: Any) -> TorchBackendConfig:
    options = {} if server is None else {"base_model": "m", "rank": 4, "base_url": server.url}
    own = {"lr": LR, "max_grad_norm": 0.05, "rows": "merged", "options": options}
    return TorchBackendConfig.model_validate(own | keys)


def loss(log_probs: torch.Tensor, entropy: Any, columns: Any) -> LossOutput:
    ratio = (log_probs - columns["rollout_log_probs"]).clamp(-2, 2).exp()
    value = -(ratio * columns["advantages"]).sum() / 100
    mean = Mean(ratio.detach().sum(), torch.tensor(float(len(ratio))))
    return LossOutput(value, {"ratio": mean}, {"seen": ratio.detach()})


def batch_of(backend: Any) -> Any:
    steps = steps_of(linear_groups())[:24]
    batch = backend.convert(steps)
    draw = torch.Generator().manual_seed(3)
    batch.columns["advantages"] = batch.expand(torch.randn(len(steps), generator=draw))
    return batch


def weights_of(backend: Any, to: Path) -> dict[str, torch.Tensor]:
    to.mkdir()
    backend.save_weights(to)
    assert (to / "tokenizer.json").is_file()
    return load_file(to / "model.safetensors")


def test_it_is_found_by_its_name() -> None:
    assert BACKENDS.load("tinker") is TinkerBackend
    assert TinkerBackend.loop_lacks() == []
    with pytest.raises(BackendConfigError, match=r"base_model|tinker not installed"):
        loop_backend("tinker", {})


@needs_tinker
def test_steps_of_ours_at_tinker_are_those_of_our_own_backend(
    server: TinkerServer, folder: Path, tmp_path: Path
) -> None:
    ours, theirs = TorchBackend(config(), folder), TinkerBackend(config(server), folder)
    mine, sent = batch_of(ours), batch_of(theirs)
    torch.testing.assert_close(
        theirs.compute_log_probs(sent), ours.compute_log_probs(mine), atol=1e-5, rtol=0
    )
    for indices in (None, [0, 3, 5]):
        a, b = ours.train_step(mine, loss, indices), theirs.train_step(sent, loss, indices)
        for name in ("loss", "lr", "tokens", "rows", "ratio", "grad_norm"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
        assert b["skipped"] == 0.0
        torch.testing.assert_close(
            sent.columns["seen"], mine.columns["seen"], atol=1e-4, rtol=0, equal_nan=True
        )
    found, wanted = weights_of(theirs, tmp_path / "b"), weights_of(ours, tmp_path / "a")
    start = load_file(folder / "model.safetensors")
    far = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    gap = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    print(f"largest difference {gap:.2g} of a step of {far:.2g}")
    assert far > LR
    assert gap < 1e-4
    assert [p["grad_clip_norm"] for p in server.params] == [0.05, 0.05]


@needs_tinker
@pytest.mark.parametrize("server", [4], indirect=True)
def test_adapters_are_merged_for_engines_and_written_alone(
    server: TinkerServer, folder: Path, tmp_path: Path
) -> None:
    backend = TinkerBackend(config(server), folder)
    batch = batch_of(backend)
    reference = backend.compute_ref_log_probs(batch)
    backend.train_step(batch, loss)
    after = backend.compute_log_probs(batch)
    assert not torch.allclose(after, reference, atol=1e-3)
    weights_of(backend, tmp_path / "merged")
    merged = TorchBackend(config(), tmp_path / "merged")
    torch.testing.assert_close(merged.compute_log_probs(batch_of(merged)), after, atol=1e-4, rtol=0)
    backend.save_adapters(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@needs_tinker
def test_it_goes_on_from_its_state_and_back_to_saved_weights(
    server: TinkerServer, folder: Path, tmp_path: Path
) -> None:
    backend = TinkerBackend(config(server, warmup_steps=4), folder)
    batch = batch_of(backend)
    backend.train_step(batch, loss)
    state = backend.state_dict()
    weights_of(backend, tmp_path / "saved")
    first = backend.compute_log_probs(batch)
    rate = backend.train_step(batch, loss)["lr"]
    second = backend.compute_log_probs(batch)

    again = TinkerBackend(config(server, warmup_steps=4), folder)
    again.load_state_dict(state)
    assert again.train_step(batch, loss)["lr"] == rate
    torch.testing.assert_close(again.compute_log_probs(batch), second, atol=1e-5, rtol=0)
    again.load_weights(tmp_path / "saved")
    torch.testing.assert_close(again.compute_log_probs(batch), first, atol=1e-5, rtol=0)


@needs_tinker
def test_a_loss_that_is_not_finite_changes_nothing(server: TinkerServer, folder: Path) -> None:
    def spoilt(log_probs: torch.Tensor, entropy: Any, columns: Any) -> LossOutput:
        return LossOutput(log_probs.sum() * float("nan"), {})

    backend = TinkerBackend(config(server), folder)
    batch = batch_of(backend)
    before = backend.compute_log_probs(batch)
    for _ in range(MAX_SKIPPED):
        assert backend.train_step(batch, spoilt)["skipped"] == 1.0
    with pytest.raises(NonFiniteUpdateError, match=f"{MAX_SKIPPED + 1} in a row"):
        backend.train_step(batch, spoilt)
    torch.testing.assert_close(backend.compute_log_probs(batch), before)
    assert server.params == []


@needs_tinker
def test_what_tinker_cannot_do_is_refused_by_name(server: TinkerServer, folder: Path) -> None:
    def curious(log_probs: torch.Tensor, entropy: Any, columns: Any) -> LossOutput:
        raise AssertionError

    curious.entropy = "gradient"  # type: ignore[attr-defined]
    backend = TinkerBackend(config(server), folder)
    with pytest.raises(UnsupportedByBackendError, match="sends no entropy"):
        backend.train_step(batch_of(backend), curious)
    steps = steps_of(linear_groups())[:2]
    hot = [replace(s, metadata={"sampling_params": {"temperature": 0.7}}) for s in steps]
    with pytest.raises(BatchError, match=r"at temperature 0\.7, and Tinker scores at 1"):
        backend.convert(hot)
    with pytest.raises(BackendConfigError, match=r"backend\.ranks is 2, which is Tinker's own"):
        TinkerBackend(config(server, ranks=2), folder)
    with pytest.raises(BackendConfigError, match=r"backend\.lora is .* is Tinker's own"):
        TinkerBackend(config(server, lora=LoraConfig(rank=2)), folder)
    with pytest.raises(BackendConfigError, match=r"backend\.reference_path is '/ref', and at"):
        TinkerBackend(config(server, reference_path="/ref"), folder)


AGENT = """
import random
from stepwell.quickstart import agent as quickstart

async def agent(task, base_url, api_key):
    await quickstart.agent(task, base_url, api_key)
    return random.random()  # no group has one reward alone, so that each step learns
"""


@needs_tinker
@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["disk", "lora"])
def test_a_run_trains_there_and_samples_with_the_weights_that_it_fetches(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    (tmp_path / "mine.py").write_text(AGENT)
    with serving(TinkerServer(QUICKSTART, 8)) as server:
        options = {"base_model": "quickstart", "rank": 8, "base_url": server.url}
        argv = [sys.executable, "-m", "stepwell", "train", "--config", "quickstart", *SMALL]
        argv += [f"run.dir={tmp_path / 'run'}", "trainer.total_steps=2", "trainer.backend=tinker"]
        argv += [f"backend.options={json.dumps(options)}", "validation.every=0"]
        argv += [f"engine.weight_transport={transport}", f"rollout.agent={tmp_path}/mine.py:agent"]
        argv += ["validation.before_train=false", "async_training.trigger_parameter_sync_step=1"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["grad_norm"] > 0 for record in records), records
    assert len(server.params) == 2
    assert server.calls.count("save_weights_external") >= 2
    published = WeightStore(tmp_path / "run" / "weights").current()
    assert published is not None
    assert published.adapter == (transport == "lora")
