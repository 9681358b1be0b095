"""`python -m benchmarks publication`: how long a publication pauses the engine, by transport.

A random model of Qwen3-0.6B's shapes in bfloat16, in the memory of one embedded engine on the CPU.
Two versions of it are published in turn, `rounds` times by each transport, interleaved, all with
the checks of a run: files, version, tensors. The pause is the time between the engine's pause and
its going on; load, transfer and what came before the pause are beside it.

Needs 8 GB of memory and of disk.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from benchmarks.checks import BenchResult
from benchmarks.served import MODEL
from stepwell.backends.config import EngineConfig, WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.weights import WeightStore, build_transport, publish
from stepwell.backends.weights.sender import Sender
from stepwell.backends.weights.transaction import Phase, When

QWEN3_600M: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SHARE = 0.5
"""Bound: the pause by a pause that has in it what is done before it, by `nccl`."""


def save_model(folder: Path, layers: int, change: float = 0.0) -> None:
    """A random model; those of one shape differ in every tensor by `change`."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**QWEN3_600M, "num_hidden_layers": layers})
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += change
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)


async def run(*, rounds: int = 4, layers: int = 28) -> BenchResult:
    """Publish by each transport in turn, after one publication by each that is not counted."""
    names = [n for n in get_args(WeightTransport) if n != "lora"]
    seconds: dict[str, dict[str, list[float]]] = {n: defaultdict(list) for n in names}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, change in (("0", 0.0), ("1", 2**-7)):
            await asyncio.to_thread(save_model, folder / name, layers, change)
        store = WeightStore(folder / "weights", keep=2, base=folder / "0")
        config = EngineConfig(model_path=folder / "0", context_length=1024, max_running_requests=4)
        supervisor = Supervisor(config, folder / "logs", store.folder)
        ways = {
            name: build_transport(EngineConfig(weight_transport=name), Sender().call)
            for name in names
        }
        url = await asyncio.to_thread(supervisor.start)
        try:
            async with EngineClient(url) as engine:
                version = 0
                for number in range(rounds + 1):
                    for name in names:
                        version += 1
                        path = await asyncio.to_thread(
                            store.write, version, _linked(folder / str(version % 2))
                        )
                        marks: dict[tuple[Phase, When], float] = {}

                        async def hook(
                            phase: Phase, when: When, marks: dict[Any, float] = marks
                        ) -> None:
                            marks[phase, when] = time.perf_counter()

                        done = await publish(
                            [engine],
                            path,
                            version,
                            "retract",
                            store=store,
                            transport=ways[name],
                            hook=hook,
                        )
                        if number:
                            spent = seconds[name]
                            ended = marks["continue", "after"]
                            spent["pause"].append(ended - marks["pause", "before"])
                            spent["load"].append(done.load_s)
                            spent["transfer"].append(done.transfer_s)
                            spent["before"].append(
                                marks["prepare", "after"] - marks["prepare", "before"]
                            )
        finally:
            for way in ways.values():
                await way.close()
            await asyncio.to_thread(supervisor.stop)
    median = {n: {k: statistics.median(v) for k, v in s.items()} for n, s in seconds.items()}
    result = BenchResult()
    pause, before = (median["nccl"][name] for name in ("pause", "before"))
    result.at_most("share of the pause, nccl", pause / (pause + before), SHARE)
    result.figures["seconds by transport"] = [
        {"transport": name, **{k: round(v, 3) for k, v in spent.items()}}
        for name, spent in median.items()
    ]
    return result


def _linked(source: Path) -> Any:
    def save(folder: Path) -> None:
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).hardlink_to(file)

    return save
