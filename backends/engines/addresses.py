"""Where engines listen and are reached."""

from __future__ import annotations

import socket


def reachable(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def node_ip() -> str:
    """This node's address as Ray's cluster knows it."""
    import ray

    ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # theirs
    return ip
