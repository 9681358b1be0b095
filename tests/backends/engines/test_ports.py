"""Ports of SGLang servers that are spread over nodes or share one."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.backends.engines.ports import BLOCK, Block, Host, PortsTakenError, node_launches


def flags(args: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(args[::2], args[1::2], strict=True))


def test_the_nodes_of_a_server_meet_at_its_first() -> None:
    head, other = node_launches([Host("10.0.0.2", 21000), Host("10.0.0.3", 24500)])
    assert (head.port, other.port) == (21000, 24500)
    assert flags(head.args) == {
        "--nccl-port": "21001",
        "--nnodes": "2",
        "--node-rank": "0",
        "--dist-init-addr": "10.0.0.2:21002",
    }
    assert flags(other.args) == flags(head.args) | {"--nccl-port": "24501", "--node-rank": "1"}


def test_an_ipv6_address_is_bracketed() -> None:
    (only,) = node_launches([Host("fd00::2", 21000)])
    assert flags(only.args)["--dist-init-addr"] == "[fd00::2]:21002"


def test_blocks_that_overlap_on_a_node_are_refused() -> None:
    node_launches([Host("10.0.0.2", 21000), Host("10.0.0.2", 21000 + BLOCK)])
    with pytest.raises(
        ValueError, match=r"10\.0\.0\.2: the blocks of 16 ports from 21015 and 21000"
    ):
        node_launches([Host("10.0.0.2", 21000), Host("10.0.0.2", 21000 + BLOCK - 1)])
    with pytest.raises(ValueError, match="at least one node"):
        node_launches([])


@given(st.integers(1, 8), st.integers(10_000, 30_000))
def test_all_ports_of_a_part_are_in_its_block(nodes: int, first: int) -> None:
    """SGLang 0.5.23 derives more ports: up to six above dist-init (`PortArgs.init_new`)."""
    hosts = [Host("10.0.0.2", first + BLOCK * i) for i in range(nodes)]
    for host, launch in zip(hosts, node_launches(hosts), strict=True):
        given_flags = flags(launch.args)
        own = {launch.port, int(given_flags["--nccl-port"])}
        if given_flags["--node-rank"] == "0":
            meeting = int(given_flags["--dist-init-addr"].rpartition(":")[2])
            own |= {meeting + i for i in range(7)}
            assert len(own) == 9
        assert own <= set(range(host.first_port, host.first_port + BLOCK))


def test_a_block_is_held_until_it_is_released() -> None:
    block = Block()
    with pytest.raises(PortsTakenError, match=f"ports {block.first_port} to"):
        Block(block.first_port)
    with socket.socket() as sock, pytest.raises(OSError, match="in use"):
        sock.bind(("127.0.0.1", block.first_port + BLOCK - 1))
    block.release()
    again = Block(block.first_port)
    again.release()


def test_ports_are_found_where_the_system_hands_nearly_all_of_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy servers are often set so: net.ipv4.ip_local_port_range = 1024 65535."""
    handed_out = tmp_path / "ip_local_port_range"
    handed_out.write_text("1024\t65535\n")
    monkeypatch.setattr("stepwell.backends.engines.ports.SYSTEMS_PORTS", handed_out)
    with Blocks() as blocks:
        assert 10_000 <= blocks.take().first_port <= 65_536 - BLOCK


def test_one_port_in_use_makes_the_search_go_on() -> None:
    with Blocks() as blocks:
        first = blocks.take().first_port
        choices = iter([first, first + BLOCK - 1, first + 4 * BLOCK])
        assert blocks.take(choose=lambda low, high: next(choices)).first_port == first + 4 * BLOCK


def test_servers_that_start_together_on_a_node_get_blocks_of_their_own() -> None:
    rng = random.Random(0)
    crowded = lambda low, high: rng.randint(15_000, 15_000 + 20 * BLOCK)  # noqa: E731
    with Blocks() as blocks, ThreadPoolExecutor(6) as threads:
        taken = list(threads.map(lambda _: blocks.take(choose=crowded), range(6)))
        firsts = sorted(block.first_port for block in taken)
        assert all(b - a >= BLOCK for a, b in pairwise(firsts))


class Blocks:
    """Takes blocks and releases them at the end."""

    def __init__(self) -> None:
        self._taken: list[Block] = []

    def take(self, **options: object) -> Block:
        block = Block(**options)  # type: ignore[arg-type]
        self._taken.append(block)
        return block

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *exception: object) -> None:
        for block in self._taken:
            block.release()
