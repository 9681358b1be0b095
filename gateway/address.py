"""The address that a gateway listens on. A command that only checks it loads no server."""

from __future__ import annotations

import errno
import socket

from stepwell.gateway.errors import GatewayError, PortInUseError


def bind(host: str, port: int) -> socket.socket:
    """A listening address.

    Raises:
        PortInUseError: names `gateway.port`, its value and the remedy.
        GatewayError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; without it, every answer
    # on a kept connection waits 40 ms for a delayed ACK.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as e:
        listening.close()
        if e.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"gateway.port is {port}, which another process uses on {host}; "
                "stop it, choose another port, or set gateway.port=0 for a free one"
            ) from e
        raise GatewayError(
            f"gateway.host is {host!r} and gateway.port is {port}: {e.strerror}; use an address of "
            "this machine, and a port that you may open"
        ) from e
    return listening
