"""Rank 0's end of a transport: one version's weights as flat buckets, and the group they go to.

    hold(weights) ─► held_as(path) ─► plan(path) ─► open ─► join ─► broadcast(0), broadcast(1), …
     as gathered       their version     buckets       the group         or share(0), share(1), …

It lives in the process that has the weights: the trainer's, or rank 0's actor
(`TrainingBackend.lead`). Of a version that it does not hold (a roll-back) it reads the folder.

Methods block. Does not own buckets (`buckets.py`), or who is asked to receive (`transports.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepwell.backends.engines.api import Bucket, Meeting
from stepwell.backends.errors import UnsupportedByBackendError
from stepwell.backends.weights.buckets import pack
from stepwell.backends.weights.collective import Group, NcclGroup, address_for
from stepwell.backends.weights.digest import read_tensors, tensor_names
from stepwell.backends.weights.ipc import free_memory, memory_name, shared_tensors


class Sender:
    """The weights of the newest version, and the group that receives them."""

    def __init__(self) -> None:
        self.is_used = False
        """Weights that are saved are held for the next publication."""
        self._held: dict[str, Tensor] = {}
        self._path = ""
        self._planned: tuple[str, int | None] | None = None
        self._buckets: list[Bucket] = []
        self._flat: list[Tensor] = []
        self._group: Group | NcclGroup | None = None
        self._shared: list[Tensor] = []
        self._released: list[str] = []
        """Names of memory that was shared for the publication before."""

    def call(self, method: str, *args: Any) -> Any:
        """A method by its name, for a caller in another process."""
        return getattr(self, method)(*args)

    def use(self) -> None:
        """From now on weights are held."""
        self.is_used = True

    # -- weights ------------------------------------------------------------------------------

    def hold(self, weights: Mapping[str, Tensor], *, is_live: bool) -> None:
        """Keep whole weights, on the host, until the next ones.

        Args:
            weights: names of one tensor (tied weights) are sent once.
            is_live: the next optimizer step changes them: they are copied.
        """
        self._forget()
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in weights.items():
            key = tensor.data_ptr(), tensor.shape
            if key not in seen:
                seen.add(key)
                self._held[name] = _on_host(tensor.detach(), copies=is_live)

    def held_as(self, path: str) -> None:
        """Note that the weights that are held are those of the version in `path`. A model whose
        names were changed as it was saved is read from there: engines know the checkpoint's."""
        self._path = path if self._held.keys() <= tensor_names(path) else ""

    def plan(self, path: str, limit: int | None) -> list[Bucket]:
        """Pack the version in `path` into buckets of `limit` bytes; None: into one."""
        if self._planned == (path, limit):
            return self._buckets
        held = self._held if self._path == path and self._held else dict(read_tensors(path))
        self._forget()  # packing empties what is held: if it fails, the folder has all of it
        buckets, flat = [], []
        for bucket, whole in pack(held, limit):
            buckets.append(bucket)
            flat.append(whole.pin_memory() if torch.cuda.is_available() else whole)
        self._planned, self._buckets, self._flat = (path, limit), buckets, flat
        return buckets

    def _forget(self) -> None:
        self._held, self._path, self._planned = {}, "", None
        self._buckets, self._flat = [], []

    # -- a process group ----------------------------------------------------------------------

    def open(
        self, urls: Sequence[str], world_size: int, name: str, backend: str, timeout_s: float
    ) -> Meeting:
        """Close the group before, and open one that engines at `urls` can join.

        Args:
            backend: `gloo`, `nccl`, or `raw_nccl`: a communicator without a torch group (vLLM).

        Raises:
            UnsupportedByBackendError: this process has no GPU to send from.
        """
        self.leave()
        if backend != "gloo" and not torch.cuda.is_available():
            raise UnsupportedByBackendError(
                "engine.weight_transport is 'nccl', and the trainer has no GPU to send from; set "
                "it to disk or delta, or train on a GPU"
            )
        host = next((a for u in urls if not (a := address_for(u)).startswith("127.")), "127.0.0.1")
        kind = NcclGroup if backend == "raw_nccl" else Group
        self._group = kind(host, world_size, name, backend, timeout_s)
        return self._group.meeting

    def join(self) -> None:
        """Join it; returns when all have, but for NCCL, which waits at the first bucket.

        Raises:
            RuntimeError: they did not in time.
        """
        if self._group is None:
            raise RuntimeError("no group is open; open one first")
        self._group.lead()

    def joined(self) -> None:
        """All members have said that they are in."""
        if self._group is not None:
            self._group.joined()

    def is_whole(self) -> bool:
        """All members of the group still run, as far as their machines say."""
        return self._group is not None and self._group.is_whole()

    def broadcast(self, number: int) -> None:
        """Send a bucket to all members.

        Raises:
            RuntimeError: one is gone, or the group was left.
        """
        if self._group is None:
            raise RuntimeError("the group was left")
        self._group.send(self._flat[number])

    def leave(self) -> None:
        """Close the group; who waits in it fails. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # -- shared memory ------------------------------------------------------------------------

    def share(self, number: int, readers: int, on_host: bool) -> str:
        """Handles of a bucket's tensors for `readers` processes that share this one's machine
        (`on_host`) or GPU, as text. The buffer is never used again: a receiver answers before its
        copy is done."""
        bucket, flat = self._buckets[number], self._flat[number]
        buffer, text = shared_tensors(bucket, flat, readers=readers, on_host=on_host)
        self._shared.append(buffer)
        return text

    def release(self) -> None:
        """Free what was shared: all that live have copied it. What one that died was to read stays
        until the next time, when nobody can be reading it."""
        released, self._released = (
            self._released,
            [name for buffer in self._shared if (name := memory_name(buffer)) is not None],
        )
        self._shared = []
        for name in released:
            free_memory(name)


def _on_host(tensor: Tensor, *, copies: bool) -> Tensor:
    return tensor.clone() if copies and tensor.device.type == "cpu" else tensor.cpu()
