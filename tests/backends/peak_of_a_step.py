"""`python -m tests.backends.peak_of_a_step OPTIONS MODEL TOKENS [RANK STORE]`: a step's peak.

Resident bytes that a backend adds up to the peak of its second optimizer step. A process of its
own: a peak never falls, and what glibc keeps of one backend the next would find.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # what is imported later would count
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from stepwell.backends.base import LossOutput
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.torch.backend import TorchBackend
from tests.builders import step


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main(options: str, folder: str, tokens: str, rank: str = "0", store: str = "") -> None:
    """Print the bytes."""
    torch.set_num_threads(1)
    if "lora" in options:
        import peft.tuners.lora  # noqa: F401  # a second of CPU
    n, config = int(tokens), TorchBackendConfig.model_validate(json.loads(options))
    if store:
        meeting = dist.FileStore(store, config.ranks)
        dist.init_process_group("gloo", store=meeting, rank=int(rank), world_size=config.ranks)
    before = resident("VmRSS")
    backend = TorchBackend(config, folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    rows = [step([t + 1], [1 + (7 * i + t) % 90 for i in range(n - 1)], f"t{t}") for t in range(2)]
    batch = backend.convert(rows)
    for _ in range(2):  # the optimizer makes its state in the first
        backend.train_step(
            batch, lambda log_probs, entropy, columns: LossOutput(-log_probs.sum(), {})
        )
    print(resident("VmHWM") - before)
    if store:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
