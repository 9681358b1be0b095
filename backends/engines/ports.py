"""Ports of an SGLang server over several nodes, and the address at which its nodes meet.

One server may be spread over several nodes (more tensor-parallel ranks than a node has GPUs), and
several servers may share a node. Each part gets a block of `BLOCK` ports of its own on its node::

    first + 0      --port            HTTP on node 0; a dummy /health on the others
    first + 1      --nccl-port
    first + 2      --dist-init-addr  on node 0 alone: where all nodes meet
    first + 3 …    SGLang's own, counted from dist-init: + 1 … + 6 with DP attention (tokenizer,
                   detokenizer, rpc, metrics, scheduler, load); the rest of the block is slack

Worked example: one server on nodes 10.0.0.2 and 10.0.0.3, blocks from 21000 and 24500:

    node 0   --port 21000 --nccl-port 21001 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.2:21002
    node 1   --port 24500 --nccl-port 24501 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.2:21002

Read off SGLang 0.5.23 (`PortArgs.init_new`): without these flags it derives port + 233 … + 239 (DP
attention) and a random NCCL port, which another server on the node may hold.

Owns the numbers and the search for free ones below the range from which the system hands ports out
(in it, where that begins too low to leave room).
Only another search could take them between the search and the launch, so a `Block` holds its
sockets until then. Does not own launching (`nodes.py`).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

BLOCK = 16
_LOWEST = 10_000
_ATTEMPTS = 200
ROOM = 1_000
"""Ports that are too few to search below those that the system hands out."""
SYSTEMS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Host(NamedTuple):
    """Place of a part of a server: its node's address and the first port of its block."""

    ip: str
    first_port: int


class NodeLaunch(NamedTuple):
    """Port and further flags of a part of a server."""

    port: int
    args: tuple[str, ...]


def node_launches(hosts: Sequence[Host]) -> list[NodeLaunch]:
    """Port and flags of each part of one server, in the order of its nodes.

    Raises:
        ValueError: there is no node, or two blocks of a node overlap.
    """
    if not hosts:
        raise ValueError("a server has at least one node")
    for i, one in enumerate(hosts):
        for other in hosts[:i]:
            if one.ip == other.ip and abs(one.first_port - other.first_port) < BLOCK:
                raise ValueError(
                    f"{one.ip}: the blocks of {BLOCK} ports from {one.first_port} and "
                    f"{other.first_port} overlap"
                )
    head = hosts[0]
    address = f"[{head.ip}]" if ":" in head.ip else head.ip
    meeting = f"{address}:{head.first_port + 2}"
    return [
        NodeLaunch(
            host.first_port,
            (
                "--nccl-port",
                str(host.first_port + 1),
                "--nnodes",
                str(len(hosts)),
                "--node-rank",
                str(rank),
                "--dist-init-addr",
                meeting,
            ),
        )
        for rank, host in enumerate(hosts)
    ]


class PortsTakenError(OSError):
    """The ports that were asked for are in use on this node."""


class Block:
    """`BLOCK` free ports in a row, held until `release`."""

    def __init__(
        self,
        first_port: int | None = None,
        *,
        choose: Callable[[int, int], int] = random.randint,
    ) -> None:
        """`first_port`: these and no others (of a server that keeps its address).

        Raises:
            PortsTakenError: they are in use; or no block is free.
        """
        self._sockets = ExitStack()
        if first_port is not None:
            if not self._hold(first_port):
                raise PortsTakenError(f"ports {first_port} to {first_port + BLOCK - 1} are in use")
            self.first_port = first_port
            return
        highest = _end_of_search() - BLOCK
        for _ in range(_ATTEMPTS):
            self.first_port = choose(_LOWEST, highest)
            if self._hold(self.first_port):
                return
        raise PortsTakenError(
            f"no {BLOCK} ports in a row are free from {_LOWEST} to {highest + BLOCK} "
            f"in {_ATTEMPTS} tries"
        )

    def _hold(self, first: int) -> bool:
        with ExitStack() as held:
            for port in range(first, first + BLOCK):
                sock = held.enter_context(socket.socket())
                # Not the connections of a server that has just ended, only one that is there.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    sock.bind(("0.0.0.0", port))
                    sock.listen()
                except OSError:
                    return False
            self._sockets = held.pop_all()
        return True

    def release(self) -> None:
        """Let the server have them. Idempotent."""
        self._sockets.close()


def _end_of_search() -> int:
    """The first port that the system hands out; the last there is, where those leave no room."""
    try:
        first = int(SYSTEMS_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + ROOM else 65_536
