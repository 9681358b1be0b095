"""Behaviour of a real vLLM that Stepwell has to live with, and its supervision. Not collected by
itself: `make test-vllm` names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import GenerateRequest, Output, Sampling
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineError
from stepwell.backends.weights import WeightStore, publish
from tests.backends.engines.conftest import Reference, save_qwen3
from tests.builders import until

PROMPT = list(range(40, 50))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return tuple(save_qwen3(root / n, s, head_dim=32) for s, n in enumerate(("base", "new")))  # type: ignore[return-value]  # two


async def exact(engine: Any, folder: Path, version: int) -> None:
    """Tokens are of `version`, and have the log-probs of a plain forward of the weights."""
    outputs: list[Output] = []
    request = GenerateRequest("r", np.array(PROMPT, np.int32), Sampling(12, 1.0), 12)
    await engine.sample(request, outputs.append)
    ids = [i for o in outputs for i in o.ids]
    log_probs = torch.tensor([p for o in outputs for p in o.log_probs])
    assert outputs[-1].version == version
    torch.testing.assert_close(
        log_probs, Reference(folder).log_probs(PROMPT, ids), atol=1e-4, rtol=0
    )


async def test_it_is_published_to_killed_and_spoiled_and_comes_back_with_the_committed_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """One server in all its lives: a publication; its process killed; weights that end its core."""
    base, new = folders
    store = WeightStore(tmp_path / "weights", keep=10)
    config = EngineConfig(kind="vllm", model_path=base, max_running_requests=8)
    supervisor = Supervisor(config, tmp_path / "logs", store.folder)

    async def is_back(restarts: int) -> Callable[[], Any]:
        async def back() -> bool:
            return supervisor.restarts == restarts and supervisor.state == "up"

        return back

    try:
        async with connect(config, supervisor.start()) as engine:
            await exact(engine, base, 0)
            done = await publish([engine], new, 5, "retract", store=store)
            assert done.verified == {engine.url: "version"}
            assert not done.fenced
            await exact(engine, new, 5)

            assert supervisor.pid is not None
            psutil.Process(supervisor.pid).kill()
            await until(await is_back(1), 300.0)
            await exact(engine, new, 5)

            # Past the check of the client: as if the file had changed under it.
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{engine.url}/collective_rpc",
                    json={"method": "reload_weights", "kwargs": {"weights_path": "/nonexistent"}},
                ) as answer,
            ):
                assert answer.status == 500
            with pytest.raises(EngineError):
                await exact(engine, new, 5)
            await until(await is_back(2), 300.0)
            await exact(engine, new, 5)
    finally:
        supervisor.stop()
