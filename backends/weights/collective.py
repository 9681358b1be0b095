"""Tensors on their way between processes: broadcast in a process group, as SGLang takes them.

A group is made like SGLang's `init_custom_process_group`: a TCP store under the group's name, rank
0 sends. Does not own who sends what when (`transports.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _new_process_group_helper,
    _world,
)


class Group:
    """A process group in which rank 0 sends weights to an engine's ranks. Calls block."""

    def __init__(self, group: Any, store: TCPStore, device: str) -> None:
        self._group = group
        self._store = store
        self._device = device

    @staticmethod
    def listen(address: str, world_size: int, timeout_s: float) -> TCPStore:
        """The store that the others meet at; its `port` is free."""
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(
            address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )

    @classmethod
    def lead(
        cls, store: TCPStore, *, world_size: int, name: str, backend: str, timeout_s: float
    ) -> Self:
        """Rank 0 of the group `name`; returns when all have joined.

        Raises:
            RuntimeError: they did not in time.
        """
        return cls._new(store, 0, world_size, name, backend, timeout_s)

    @classmethod
    def join(
        cls,
        address: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float,
    ) -> Self:
        """Another rank of it; likewise."""
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(
            address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )
        return cls._new(store, rank, world_size, name, backend, timeout_s)

    @classmethod
    def _new(
        cls, store: TCPStore, rank: int, size: int, name: str, backend: str, timeout_s: float
    ) -> Self:
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        return cls(group, store, "cuda" if backend == "nccl" else "cpu")

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast them in order.

        Raises:
            RuntimeError: a rank is gone.
        """
        for tensor in tensors:
            dist.broadcast(tensor.contiguous().to(self._device), src=0, group=self._group)

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Tensors that rank 0 sends, in this order.

        Raises:
            RuntimeError: it is gone, or did not send in time.
        """
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            empty = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)
            tensors[name] = empty
            dist.broadcast(tensors[name], src=0, group=self._group)
        return tensors

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
