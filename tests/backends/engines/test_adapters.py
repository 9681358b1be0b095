"""A LoRA adapter alone is published: the engine adds it to the base model, never to another."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stepwell.backends.engines.api import GenerateRequest, Output, Sampling
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.embedded.adapters import Adapters, WeightLoadError
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineRequestError, WeightUpdateError
from stepwell.backends.weights import WeightStore, publish
from stepwell.backends.weights.transports import ADAPTER_NAME, Lora
from stepwell.datapool.sealed import seal
from tests.builders import until

PROMPT = [40, 41, 42, 43]
MODULE = "model.layers.1.self_attn.o_proj"


def save_adapter(base: Path, folder: Path, seed: int, *, rslora: bool = False) -> Path:
    """An adapter of one module as peft writes it; returns the folder of the model it makes."""
    rank, alpha = 4, 8
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    weight = weights[f"{MODULE}.weight"]
    a = torch.randn(rank, weight.shape[1], generator=generator)
    b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
    folder.mkdir(parents=True)
    prefix = f"base_model.model.{MODULE}"
    save_file(
        {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b},
        folder / "adapter_model.safetensors",
    )
    about = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    seal(folder)
    merged = folder.parent / f"{folder.name}-merged"
    shutil.copytree(base, merged)
    weights[f"{MODULE}.weight"] = weight + alpha / (rank**0.5 if rslora else rank) * (b @ a)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged


def merged_weight(path: Path) -> torch.Tensor:
    return load_file(path / "model.safetensors")[f"{MODULE}.weight"]


@pytest.mark.slow
def test_adapters_replace_each_other_and_leave_no_trace(model_dirs: Any, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dirs.base, dtype=torch.float32)
    own = dict(model.named_parameters())[f"{MODULE}.weight"]
    before = own.detach().clone()
    adapters = Adapters(model)
    first = save_adapter(model_dirs.base, tmp_path / "a", 1)
    second = save_adapter(model_dirs.base, tmp_path / "b", 2, rslora=True)
    adapters.load("policy", str(tmp_path / "a"))
    torch.testing.assert_close(own, merged_weight(first))
    adapters.load("policy", str(tmp_path / "b"))
    torch.testing.assert_close(own, merged_weight(second))
    with pytest.raises(WeightLoadError, match="'other' is not loaded"):
        adapters.unload("other")
    adapters.unload("policy")
    assert torch.equal(own, before)


@pytest.mark.parametrize("broken", ["absent", "module", "rank", "ranks", "nan"])
def test_an_adapter_that_does_not_fit_changes_nothing(
    broken: str, model_dirs: Any, tmp_path: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dirs.base, dtype=torch.float32)
    adapters = Adapters(model)
    good = save_adapter(model_dirs.base, tmp_path / "good", 1)
    adapters.load("policy", str(tmp_path / "good"))
    bad = tmp_path / "bad"
    if broken != "absent":
        save_adapter(model_dirs.base, bad, 2)
        file = bad / "adapter_model.safetensors"
        tensors = load_file(file)
        if broken == "module":
            tensors = {k.replace("o_proj", "no_proj"): t for k, t in tensors.items()}
        if broken == "rank":
            tensors = {k: t[:-1] if "lora_B" in k else t for k, t in tensors.items()}
        if broken == "ranks":
            tensors = {k: t[:-1] if "lora_A" in k else t for k, t in tensors.items()}
        if broken == "nan":
            tensors = {k: t * float("nan") for k, t in tensors.items()}
        save_file({k: t.contiguous() for k, t in tensors.items()}, file)
    with pytest.raises(WeightLoadError):
        adapters.load("policy", str(bad))
    torch.testing.assert_close(
        dict(model.named_parameters())[f"{MODULE}.weight"], merged_weight(good)
    )
    assert adapters.path == str(tmp_path / "good")


@pytest.mark.long
async def test_a_published_adapter_generates_and_survives_a_crash(
    model_dirs: Any,
    make_engine_config: Callable[..., Any],
    reference: Callable[..., Any],
    tmp_path: Path,
) -> None:
    store = WeightStore(tmp_path / "weights")
    merged = [save_adapter(model_dirs.base, store.path(v), v) for v in (1, 2)]
    config = make_engine_config("embedded", model_dirs.base)
    supervisor = Supervisor(config, tmp_path / "logs", store.folder)
    try:
        async with EngineClient(supervisor.start()) as client:

            async def agrees(path: Path) -> bool:
                params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
                answer = await client.generate(
                    PROMPT, params, return_logprob=True, lora_path=ADAPTER_NAME
                )
                scored = answer["meta_info"]["output_token_logprobs"]
                wanted = reference(path).log_probs(PROMPT, answer["output_ids"])
                return torch.allclose(torch.tensor([s[0] for s in scored]), wanted, atol=1e-4)

            with pytest.raises(EngineRequestError, match="'policy', which is not loaded"):
                await agrees(model_dirs.base)
            for version in (1, 2):
                done = await publish(
                    [client],
                    str(store.path(version)),
                    version,
                    "retract",
                    store=store,
                    transport=Lora(),
                )
                assert done.fenced == {}
                assert await client.weight_version() == version
                assert await agrees(merged[version - 1])
            assert supervisor.pid is not None
            os.killpg(supervisor.pid, signal.SIGKILL)

            async def back() -> bool:
                return supervisor.restarts == 1 and supervisor.state == "up"

            await until(back, 240.0)
            assert await client.weight_version() == 2
            assert await agrees(merged[1])
    finally:
        supervisor.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_comes_between_two_adapters_waits_for_the_next_one(
    stream: bool, client: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    for version in (1, 2):
        save_adapter(model_dirs.base, tmp_path / f"v{version}", version)
    outputs: list[Output] = []

    def call() -> asyncio.Task[None]:
        prompt = np.asarray(PROMPT, np.int32)
        request = GenerateRequest("one", prompt, Sampling(2, 1.0), 2, stream, ADAPTER_NAME)
        return asyncio.create_task(client.sample(request, outputs.append))

    async def waits() -> bool:
        return bool((await client.loads())["loads"][0]["num_waiting_reqs"])

    await client.load_lora_adapter(ADAPTER_NAME, str(tmp_path / "v1"))
    await client.pause("abort")
    await client.unload_lora_adapter(ADAPTER_NAME)
    asked = call()
    await until(waits)
    await client.load_lora_adapter(ADAPTER_NAME, str(tmp_path / "v2"))
    await client.update_weight_version(2)
    await client.continue_()
    await asked
    assert (outputs[-1].finish, outputs[-1].version) in [("length", 2), ("stop", 2)]
    await client.unload_lora_adapter(ADAPTER_NAME)
    with pytest.raises(EngineRequestError, match="'policy', which is not loaded") as e:
        await call()
    assert e.value.status == 400


@pytest.mark.parametrize("config", ["[]", "{}", '{"r": 0, "lora_alpha": 8}', '{"r": null}', "\0"])
async def test_an_adapter_with_a_damaged_configuration_is_refused(
    config: str, client: EngineClient, model_dirs: Any, tmp_path: Path
) -> None:
    save_adapter(model_dirs.base, tmp_path / "v1", 1)
    (tmp_path / "v1" / "adapter_config.json").write_text(config)
    with pytest.raises(EngineRequestError, match="Failed to load LoRA adapter"):
        await client.load_lora_adapter(ADAPTER_NAME, str(tmp_path / "v1"))


async def test_an_engine_that_refuses_the_first_adapter_generates_on_without_one(
    client: EngineClient, tmp_path: Path
) -> None:
    store = WeightStore(tmp_path / "weights")
    nothing = store.write(1, lambda folder: (folder.mkdir(), (folder / "empty").touch()))
    with pytest.raises(WeightUpdateError, match="Failed to load LoRA adapter") as e:
        await publish([client], nothing, 1, "retract", store=store, transport=Lora())
    assert e.value.serving == {client.url: 0}
    answer = await client.generate(PROMPT, {"max_new_tokens": 2, "ignore_eos": True}, timeout_s=60)
    assert answer["meta_info"]["weight_version"] == "0"
