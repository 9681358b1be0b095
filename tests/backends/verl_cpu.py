"""verl's FSDP2 training worker on the CPU, through verl's own plug-in point for platforms.

verl ships CUDA, ROCm and Ascend; a platform is a class with a device name, torch's module for it
and its collective backend. With "cpu" and gloo registered, `TrainingWorker` runs as it is: real
weights, micro-batches, losses, gradients and optimizer, one rank in this process.

Owns: what verl lacks on a machine without accelerator. Does not own: anything that is tested.
"""

from __future__ import annotations

import contextlib
import os
import socket
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch

OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 1e9, "betas": (0.9, 0.95)}


def use_cpu() -> None:
    """Make verl's platform the CPU; before anything else of verl is imported."""
    # The engine is registered for "cuda"; nothing in it depends on that but its key.
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    module = types.ModuleType("cpu")
    module.__dict__.update(vars(torch.cpu))
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_: 0)
        setattr(module, f"max_{name}", lambda *_: 0)
    vars(module)["mem_get_info"] = lambda *_: (1, 1)
    vars(module)["get_device_name"] = lambda *_: "CPU"
    vars(module)["empty_cache"] = vars(module)["ipc_collect"] = lambda: None

    @PlatformRegistry.register(platform="cpu")
    class PlatformCPU(PlatformBase):  # type: ignore[misc]  # verl is untyped
        device_name = vendor_name = "cpu"
        device_module = module

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        manual_seed_all = manual_seed

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CPU_VISIBLE_DEVICES"

        def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def _nothing(self, *_: Any) -> None:
            return None

        set_device = synchronize = set_allocator_settings = empty_cache = _nothing
        profiler_start = profiler_stop = cudart = _nothing

    from verl.models.transformers import monkey_patch

    # It renames a method of a class that current releases of TRL no longer have.
    monkey_patch.is_trl_available = lambda: False


def training_worker(model_path: Path, **actor: Any) -> Any:
    """verl's actor over the model in `model_path`, float32, with `ppo_loss`.

    Args:
        actor: fields of verl's `ActorConfig`.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in (ranks | address).items()}
    torch.distributed.init_process_group("gloo")
    float32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(model_path),
                use_remove_padding=False,
                load_tokenizer=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "eager"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                model_dtype="fp32",
                mixed_precision=float32,
                use_dynamic_bsz=True,
                max_token_len_per_gpu=256,
                infer_max_token_len_per_gpu=512,
            ),
            optimizer_config=FSDPOptimizerConfig(**OPTIMIZER),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    config = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **actor)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker
