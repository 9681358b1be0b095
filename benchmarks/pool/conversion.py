"""128 leased steps of workload A to the tensors that a forward pass takes.

    Lease ──TorchBackend.convert──► TorchBatch (rows, columns) ──pad──► ids, positions, targets

Through the real torch backend; the model is never run. Imported only when it is measured: the
bench's actors load this package, and without torch they start in a tenth of the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.pool.latency import lease_128
from benchmarks.pool.systems import Stepwell
from benchmarks.pool.workload import GROUPS_PER_FETCH, VOCABULARY, chunks, workload_a
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.rows import micro_batches
from stepwell.backends.torch.backend import TorchBackend, TorchBatch
from stepwell.datapool.process import settle_heap


async def conversion(batches: int) -> tuple[float, float, float]:
    """Median milliseconds for 128 leased steps of workload A: backend batch, padded tensors, both.
    Every batch is converted once, fresh from its lease."""
    system = Stepwell("none")
    timings: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        backend = _backend(Path(folder))
        budget = TorchBackendConfig().micro_batch_tokens
        await system.start()
        try:
            # One more than is measured: the first pays for allocations.
            for chunk in chunks(workload_a((batches + 1) * GROUPS_PER_FETCH, "c"), 64):
                await system.submit(chunk)
            settle_heap()
            for _ in range(batches + 1):
                lease_id, steps = await lease_128(system.client)
                began = time.perf_counter()
                batch = backend.convert(steps)
                converted = time.perf_counter()
                padded = list(_padded(batch, budget))
                ended = time.perf_counter()
                timings.append((converted - began, ended - converted, ended - began))
                trained = sorted(int(i) for _, _, targets in padded for i in targets)
                if trained != sorted(int(i) for step in steps for i in step.response_ids):
                    raise RuntimeError("the padded tensors do not hold every response token once")
                await system.client.ack(lease_id)
        finally:
            backend.close()
            await system.stop()
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


def _padded(batch: TorchBatch, budget: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every micro-batch as `TorchBackend._forward` builds it before it runs the model: ids [rows,
    width], zeros on the right; where in the flattened ids each response token is predicted [n];
    the response tokens [n]. All int64."""
    for rows in micro_batches(batch.rows, budget):
        width = max(row.n_inputs for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for r, row in enumerate(rows):
            ids[r, : row.n_inputs] = row.ids[: row.n_inputs]
        segments = [(r, s) for r, row in enumerate(rows) for s in row.segments]
        positions = [np.arange(r * width + s.start - 1, r * width + s.end - 1) for r, s in segments]
        targets = [rows[r].ids[s.start : s.end] for r, s in segments]
        yield (
            torch.from_numpy(ids),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        )
