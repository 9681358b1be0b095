"""Ranks as plain processes of this machine that meet over gloo: no Ray, a call and its answers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` in `size` processes that share a process group; answers by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, Path(folder), function, args), nprocs=size)
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(size)]


def _rank(rank: int, size: int, folder: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        torch.save(function(rank, *args), folder / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
