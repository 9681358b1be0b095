"""Order of a Ray's machines, in which parts without a GPU are dealt out: this one first, the others
by address, 10.0.0.2 before 10.0.0.10. Every room counts so, as `stepwell plan` prints it.

Importing it loads no Ray.
"""

from __future__ import annotations

import ipaddress


def address_order(host: str) -> tuple[int, int, str]:
    """Sort key of a machine's address; names come after numbers."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return (9, 0, host)
    return (address.version, int(address), "")


def live_nodes() -> list[tuple[str, str]]:
    """(Ray's node id, address) of every live machine of the Ray that this process has joined."""
    import ray

    here: str = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # theirs
    alive = [(str(n["NodeID"]), str(n["NodeManagerAddress"])) for n in nodes if n["Alive"]]
    return sorted(alive, key=lambda node: (node[0] != here, address_order(node[1]), node[0]))
