"""Process groups in which rank 0 sends flat buckets to engines' ranks.

    Group       torch's, as SGLang's `init_custom_process_group` makes it: a TCP store under the
                group's name; gloo to CPUs, NCCL to GPUs. It lasts over many publications
    NcclGroup   a bare NCCL communicator from a unique id, for vLLM

A group is whole while every connection to its store is there that was there when all had joined:
the machine of a process that ends closes its connection. Who sends a collective to a group that
lost a member waits for that one's time-out, so this is looked at first.

Does not own who sends what when (`sender.py`, `transports.py`).
"""

from __future__ import annotations

import base64
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psutil
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

from stepwell.backends.engines.api import Meeting


class Group:
    """A process group of an engine's ranks and a sender, which is rank 0. Calls block."""

    def __init__(
        self, host: str, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Open the store where the others meet; `lead` waits for them."""
        self._store = TCPStore(
            host,
            0,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        self.meeting = Meeting(name, world_size, backend, host, self._store.port, timeout_s)
        self._group: Any = None
        self._joined: frozenset[Any] = frozenset()

    def lead(self) -> None:
        """Join as rank 0; returns when all have joined.

        Raises:
            RuntimeError: they did not in time.
        """
        self._group = _new_group(self._store, 0, self.meeting)

    def joined(self) -> None:
        """All members have said that they are in."""
        self._joined = self._connections()

    def send(self, flat: Tensor) -> None:
        """Broadcast bytes.

        Raises:
            RuntimeError: a rank is gone.
        """
        _broadcast(self._group, flat.to(_device(self.meeting.backend)))

    def is_whole(self) -> bool:
        """All that joined are connected still."""
        return bool(self._group and self._joined) and self._joined <= self._connections()

    def close(self) -> None:
        """Leave the group; what waits in it fails. Idempotent."""
        group, self._group = self._group, None
        _leave(group)

    def _connections(self) -> frozenset[Any]:
        """Ends of the connections to the store."""
        port = self._store.port
        return frozenset(
            c.raddr
            for c in psutil.Process().net_connections("tcp")
            if c.status == psutil.CONN_ESTABLISHED and c.laddr and c.laddr.port == port
        )


class Member:
    """Another rank of a group: an engine's."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """Join; returns when all have joined.

        Raises:
            RuntimeError: they did not in time.
        """
        store = TCPStore(
            meeting.host,
            meeting.port,
            meeting.world_size,
            is_master=False,
            timeout=timedelta(seconds=meeting.timeout_s),
            wait_for_workers=False,
        )
        self._device = _device(meeting.backend)
        self._group: Any = _new_group(store, rank, meeting)

    def receive(self, size: int) -> Tensor:
        """`size` bytes that rank 0 sends.

        Raises:
            RuntimeError: it is gone, or did not send in time.
        """
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        _broadcast(self._group, flat)
        return flat

    def close(self) -> None:
        """Leave the group. Idempotent."""
        group, self._group = self._group, None
        _leave(group)


class NcclGroup:
    """A bare communicator, which vLLM's workers join by its unique id. Nothing shows whether they
    still run, so it is made anew for each publication."""

    def __init__(
        self, host: str, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        self._id = bytes(torch.cuda.nccl.unique_id())  # type: ignore[no-untyped-call]  # theirs
        text = base64.b64encode(self._id).decode()
        self.meeting = Meeting(name, world_size, backend, host, 0, timeout_s, text)
        self._comm: Any = None

    def lead(self) -> None:
        """Join as rank 0; vLLM's side begins with a sum of one element."""
        nccl: Any = torch.cuda.nccl
        self._comm = nccl.init_rank(self.meeting.world_size, self._id, 0)
        nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[self._comm])
        torch.cuda.synchronize()

    def joined(self) -> None:
        """All members have said that they are in."""

    def send(self, flat: Tensor) -> None:
        """Broadcast bytes."""
        torch.cuda.nccl.broadcast([flat.cuda()], 0, None, [self._comm])
        torch.cuda.synchronize()

    def is_whole(self) -> bool:
        return False

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._comm = None


def _new_group(store: TCPStore, rank: int, meeting: Meeting) -> Any:
    timeout = timedelta(seconds=meeting.timeout_s)
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        meeting.world_size,
        rank,
        [],
        Backend(meeting.backend),
        PrefixStore(meeting.name, store),
        group_name=GroupName(meeting.name),
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(meeting.world_size)}
    return group


def _broadcast(group: Any, flat: Tensor) -> None:
    dist.broadcast(flat, src=0, group=group)
    if flat.is_cuda:  # it is only enqueued: the buffer must outlive it, and errors show here
        torch.cuda.synchronize()


def _leave(group: Any) -> None:
    if group is not None:
        # gloo's cannot be aborted: there a member that is gone ends the call.
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            group.abort()
        dist.destroy_process_group(group)


def _device(backend: str) -> str:
    return "cpu" if backend == "gloo" else "cuda"


def address_for(url: str) -> str:
    """The address of this machine at which the engine at `url` reaches it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
