"""Rank 0 sends what the ranks trained, to the last bit, whatever their number."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from stepwell.backends.base import TrainingBackend, build_backend
from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.weights import WeightStore, build_transport, publish
from tests.backends.engines.conftest import engine_config, save_qwen3
from tests.backends.test_ranks import config_of, train

KIND = os.environ.get("STEPWELL_TEST_ENGINES", "embedded")
BUCKETED = EngineConfig(weight_transport="nccl", weight_bucket_mb=1)


async def sent(backend: TrainingBackend, url: str, store: WeightStore, version: int) -> None:
    """Train, publish, and compare what the engine has with what was written."""
    transport = build_transport(BUCKETED, backend.lead)
    async with EngineClient(url) as engine:
        for number in (version, version + 1):  # the second one through the same group
            await asyncio.to_thread(train, backend, [number])
            path = await asyncio.to_thread(store.write, number, backend.save_weights)
            transport.written(str(path))
            # The next optimizer step runs beside the publication, and must not be in it.
            step = asyncio.ensure_future(asyncio.to_thread(train, backend, [number + 100]))
            done = await publish([engine], path, number, store=store, transport=transport)
            await step
            assert done.transfer_s > 0
            got = await engine.weight_hashes()
            if KIND == "embedded":
                assert done.verified == {url: "checksum"}
            await engine.update_weights_from_disk(str(path), number)
            assert got == await engine.weight_hashes()  # whatever layout it hashes
    await transport.close()


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    return save_qwen3(tmp_path / "model", 0)


async def run(model_path: Path, folder: Path, *sizes: int) -> None:
    store = WeightStore(folder / "weights")
    config = engine_config(KIND, model_path, max_running_requests=8)
    supervisor = Supervisor(config, folder / "logs", store.folder)
    url = await asyncio.to_thread(supervisor.start)
    try:
        for n, size in enumerate(sizes):
            backend = await asyncio.to_thread(
                build_backend, "torch", config_of(ranks=size), model_path
            )
            await sent(backend, url, store, 1 + 2 * n)
            backend.close()
    finally:
        await asyncio.to_thread(supervisor.stop)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_one_process_sends_what_it_trained(model_path: Path, tmp_path: Path) -> None:
    await run(model_path, tmp_path, 1)


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(900)  # six more processes import torch, on a machine that may be busy
@pytest.mark.long
async def test_rank_0_of_two_and_of_four_sends_what_they_trained(
    model_path: Path, tmp_path: Path
) -> None:
    await run(model_path, tmp_path, 2, 4)
