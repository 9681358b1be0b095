"""Machines of a Ray are counted in one order by all who deal parts out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from stepwell.cluster.placement import Node, in_turn
from stepwell.datapool.nodes import live_nodes
from stepwell.gateway.server import _nodes

ADDRESSES = {"b": "10.0.0.10", "e": "gpu-node", "c": "10.0.0.3", "a": "10.0.0.2", "d": "10.0.0.1"}


@pytest.fixture(autouse=True)
def _a_ray_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver on "c", and a machine that is gone."""
    nodes = [
        {"NodeID": n, "NodeManagerAddress": a, "Alive": n != "d"} for n, a in ADDRESSES.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "c")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def test_this_machine_is_first_and_the_others_follow_by_their_numbers() -> None:
    assert [node for node, _ in live_nodes()] == ["c", "a", "b", "e"]


def test_gateways_are_dealt_out_as_the_plan_says() -> None:
    live = [Node(a, n, 0, is_driver=n == "c") for n, a in ADDRESSES.items() if n != "d"]
    planned = [node.ip for node in in_turn(live, 4)]
    assert [host for _, host in _nodes("0.0.0.0")] == planned
    assert _nodes("127.0.0.1") == [("c", "127.0.0.1")]
