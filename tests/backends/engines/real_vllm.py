"""Behaviour of a real vLLM that Stepwell has to live with, and its supervision. Not collected by
itself: `make test-vllm` names it."""

from __future__ import annotations

import json
import subprocess
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
from stepwell.backends.engines.commands import interpreter
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.engines.vllm import PROCESSED, VllmEngine
from stepwell.backends.errors import EngineError
from stepwell.backends.weights import WeightStore, publish
from stepwell.backends.weights.buckets import pack
from stepwell.backends.weights.digest import read_tensors
from tests.backends.engines.conftest import Reference, save_qwen3
from tests.backends.engines.test_vllm import INIT_INFO
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
            assert isinstance(engine, VllmEngine)
            told = await engine._object("/server_info?config_format=json")
            assert told["vllm_config"]["model_config"]["logprobs_mode"] == PROCESSED
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


WIRE = """
import json, sys
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from vllm.distributed.weight_transfer import nccl_common, nccl_engine, packed_tensor

init, update, path = json.loads(sys.argv[1])
nccl_common.NCCLWeightTransferInitInfo(**init)
flats = list(torch.load(path))
loaded = {}

class Group:
    def broadcast(self, tensor, src):
        assert src == 0
        tensor.copy_(flats.pop(0))

# Its streams are a GPU's; what is cut and unpacked is not.
packed_tensor._get_streams = lambda device, n: [SimpleNamespace(synchronize=lambda: None)] * n
torch.cuda.stream = lambda stream: nullcontext()
torch.accelerator.current_device_index = lambda: 0
for one in update:
    info = nccl_engine.NCCLWeightTransferUpdateInfo(**one)
    described = zip(info.names, zip(info.shapes, (getattr(torch, d) for d in info.dtype_names)))
    packed_tensor.packed_nccl_broadcast_consumer(
        described, Group(), 0, loaded.update, init["packed_buffer_size_bytes"],
        init["packed_num_buffers"], "cpu",
    )
torch.save({name: tensor.clone() for name, tensor in loaded.items()}, path)
"""


def test_its_own_reader_of_the_native_wire_takes_our_buckets(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its dataclasses and its consumer, without the broadcast, which needs a GPU."""
    weights = dict(read_tensors(folders[1]))
    packed = list(pack(dict(weights), 10_000))
    assert len(packed) > 3
    update = [{"names": b.names, "dtype_names": b.dtypes, "shapes": b.shapes} for b, _ in packed]
    path = tmp_path / "buckets"
    torch.save([flat for _, flat in packed], path)
    python = interpreter(EngineConfig(kind="vllm", model_path=folders[0]), "vllm", "install it")
    told = json.dumps([INIT_INFO, update, str(path)])
    subprocess.run([python, "-c", WIRE, told], check=True)
    found = torch.load(path)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
