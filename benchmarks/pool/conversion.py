"""128 leased steps of workload A to the tensors that a forward pass takes.

    Lease ──TorchBackend.convert──► TorchBatch (rows, columns) ──prepare──► ids, positions, targets

Through the real torch backend; the model is never run. Imported only when it is measured: the
bench's actors load this package, and without torch they start in a tenth of the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pool.latency import lease_128
from benchmarks.pool.systems import Stepwell
from benchmarks.pool.workload import GROUPS_PER_FETCH, VOCABULARY, chunks, workload_a
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.rows import micro_batches
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.model import prepare
from stepwell.datapool.heap import settle_heap


async def conversion(batches: int) -> tuple[float, float, float]:
    """Median milliseconds for 128 leased steps of workload A: backend batch, padded tensors, both.
    Every batch is converted once, fresh from its lease."""
    system, cpu = Stepwell("none"), torch.device("cpu")
    timings: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        budget = TorchBackendConfig().micro_batch_tokens
        async with system.running():
            with closing(_backend(Path(folder))) as backend:
                # One more than is measured: the first pays for allocations.
                for chunk in chunks(workload_a((batches + 1) * GROUPS_PER_FETCH, "c"), 64):
                    await system.submit(chunk)
                settle_heap()
                for _ in range(batches + 1):
                    lease_id, steps = await lease_128(system.client)
                    began = time.perf_counter()
                    batch = backend.convert(steps)
                    converted = time.perf_counter()
                    padded = [
                        prepare(batch, rows, cpu) for rows in micro_batches(batch.rows, budget)
                    ]
                    ended = time.perf_counter()
                    timings.append((converted - began, ended - converted, ended - began))
                    trained = sorted(int(i) for inputs in padded for i in inputs.targets)
                    if trained != sorted(int(i) for step in steps for i in step.response_ids):
                        raise RuntimeError("the tensors do not hold every response token once")
                    await system.client.ack(lease_id)
    convert, pad, total = (1e3 * statistics.median(t) for t in zip(*timings[1:], strict=True))
    return convert, pad, total


def _backend(folder: Path) -> TorchBackend:
    """The real backend around a model that is as small as its vocabulary lets it be."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]  # theirs
    return TorchBackend(TorchBackendConfig(device="cpu"), folder)
