"""This module judges Host and Origin headers, so that no web page reaches a gateway through the
browser of whoever runs one.

A page may post to any address, and its own name may resolve to a loopback address (DNS rebinding).
Its browser then says so: `Origin` names the page, and `Host` the name that it asked for.

    Host      ours: an IP address, localhost, a container's name for its host, the host of
              `public_url`, `allowed_hosts`
              another: refused on loopback; elsewhere keys protect, and no address follows it
    Origin    none, the same as the request's own, that of `public_url`, `allowed_origins`
              another: refused

Owns: these two headers, and the origin of addresses that are handed out. Does not own: keys
(`keys.py`), the answers to a browser's questions before a request (`app.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import Scope

from stepwell.gateway.config import GatewayConfig, is_loopback
from stepwell.gateway.errors import HostError, OriginError

LOCAL_NAMES = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
"""Names of this machine, here and in containers. No public name server may resolve `.internal`."""
REMEMBERED = 1024
"""Host headers whose judgement is kept."""


class Hosts:
    """Host and Origin headers as one gateway takes them."""

    def __init__(self, config: GatewayConfig, replica_urls: Iterable[str] = ()) -> None:
        self._is_loopback = is_loopback(config.host)
        self._public_url = config.public_url
        public = [
            (config.public_url or "").replace("{replica}", str(i)) for i in range(config.replicas)
        ]
        known = [urlsplit(url).hostname for url in (*public, *replica_urls)]
        self._names = {*LOCAL_NAMES, config.host, *config.allowed_hosts, *filter(None, known)}
        self._origins = {origin.encode() for origin in config.allowed_origins}
        self._origins |= {f"{p.scheme}://{p.netloc}".encode() for p in map(urlsplit, public)}
        self._is_ours = lru_cache(REMEMBERED)(self._judge)

    def check(self, scope: Scope, host: bytes | None, origin: bytes | None) -> None:
        """
        Raises:
            HostError, OriginError
        """
        if host is not None and self._is_loopback and not self._is_ours(host):
            raise HostError(
                f"the request is for {host.decode('latin-1')!r:.80}, which is no name of this "
                "gateway; add it to gateway.allowed_hosts"
            )
        if origin is None or origin in self._origins:
            return
        if host is None or origin.lower() != scope["scheme"].encode() + b"://" + host.lower():
            raise OriginError(
                f"the request comes from a page of {origin.decode('latin-1')!r:.80}; add that to "
                "gateway.allowed_origins"
            )

    def origin(self, scope: Scope) -> str:
        """Where the client of this request reaches the gateway: what it asked for if that is ours,
        else the address that its connection was made to."""
        host = next((value for name, value in scope["headers"] if name == b"host"), None)
        if host is not None and self._is_ours(host):
            return f"{scope['scheme']}://{host.decode('latin-1')}"
        address, port = scope["server"]
        return f"{scope['scheme']}://{f'[{address}]' if ':' in address else address}:{port}"

    def _judge(self, host: bytes) -> bool:
        try:
            parts = urlsplit(f"//{host.decode('ascii')}")
            name, _ = parts.hostname or "", parts.port
            if parts.username is not None or parts.path or parts.query or parts.fragment:
                return False
            if name.rstrip(".") in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
