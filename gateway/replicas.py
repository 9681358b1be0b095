"""Several gateways that share the work: Ray actors, each on a port of its own.

    POST /init_trajectory  at any of them ──► base_url of one of them: every call goes there

    replica dies ──► its trajectories go on at the others (same path, another origin)
        └──► Ray starts it again on the same machine and port ──► or there, as before

The address is the routing, so there is no front door. What a replica acknowledged is in the pool,
and one that takes over rebuilds the turn graph from there (`trajectory/calls.py`): replicas share
nothing else, and need not find each other for that.

Owns: starting replicas, and their ports. Does not own: serving (`server.py`), which address is
handed out (`addresses.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell.datapool.heap import return_free_pages, return_large_blocks, use_one_heap
from stepwell.datapool.process import log_to_file, numbered_log, settle_heap
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import PortInUseError
from stepwell.gateway.listening import bind
from stepwell.gateway.server import HttpServer
from stepwell.gateway.wiring import Wiring

RESTART_BIND_S = 30.0
LARGE_BODY_BYTES = 1 << 20
"""Request bodies from this size on go back to the system when they are answered. Smaller ones come
from the heap, whose free pages go back every ten seconds: new pages for each cost 0.5 of 1.8 ms a
call at 32,000 tokens of context (64 agents), and saved 18 of 250 MB while they ran."""
PORTS = range(20000, 32768)
"""Where free ports are taken: below those that outgoing connections get, one of which could
otherwise have a replica's port when it starts again."""


class GatewayReplica:
    """A gateway as a Ray actor, which serves again by itself when Ray has restarted it. Methods are
    async so that Ray's own loop stays free while the server's thread starts and stops."""

    def __init__(
        self,
        config: GatewayConfig,
        wiring: Wiring,
        pool: str,
        log_file: Path | None = None,
    ) -> None:
        import ray

        from stepwell.datapool.remote.start import connect

        log_to_file(log_file)
        self._http = HttpServer(config, wiring, connect(pool))
        self._wiring = wiring
        self._origin: str | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._serve_again()

    async def start(self) -> str:
        """Serve; returns the origin. Repeating it is harmless."""
        if self._origin is None:
            return await asyncio.to_thread(self._begin)
        return self._origin

    async def stop(self) -> None:
        await asyncio.to_thread(self._http.stop)

    def _begin(self) -> str:
        origin = self._http.start()
        if self._wiring.replica_urls:  # the host may be an address to listen on only
            origin = self._wiring.replica_urls[self._wiring.replica]
        settle_heap()
        use_one_heap()
        return_large_blocks(LARGE_BODY_BYTES)
        return_free_pages()
        self._origin = origin
        return origin

    def _serve_again(self) -> None:
        end = time.monotonic() + RESTART_BIND_S
        while True:
            try:
                self._begin()
                return
            except PortInUseError:  # the process before this one may not be quite gone
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


def start_replicas(
    config: GatewayConfig,
    wiring: Wiring,
    pool: str,
    log_dir: Path | None = None,
    **ray_options: Any,
) -> list[Any]:
    """Handles of `config.replicas` new actors; each serves after `await handle.start.remote()`,
    which returns its origin, and is restarted by Ray until it is killed by its handle.

    On a loopback address all are on this machine, otherwise spread over those that Ray has. One
    that is restarted comes back where it was. Needs an initialised Ray.

    Args:
        pool: the name of the pool's actor in the current namespace.
        log_dir: what they log goes to `gateway.log`, or `gateway_0.log`, …, there, too.
        ray_options: over the default `num_cpus=0`, `max_restarts=-1`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    config = _absolute_paths(config)
    nodes = _nodes(config.host)
    ports = _ports(config)
    homes = [nodes[i % len(nodes)] for i in range(config.replicas)]
    urls = tuple(f"http://{host}:{port}" for (_, host), port in zip(homes, ports, strict=True))
    options = {"num_cpus": 0, "max_restarts": -1, **ray_options}
    actor = ray.remote(GatewayReplica)
    return [
        actor.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options
        ).remote(
            config.model_copy(update={"port": port}),
            replace(wiring, replica=i, replica_urls=urls),
            pool,
            numbered_log(log_dir, "gateway", i, config.replicas),
        )
        for i, ((node, _), port) in enumerate(zip(homes, ports, strict=True))
    ]


def _nodes(host: str) -> list[tuple[str, str]]:
    """(Ray's node id, the host of its URLs) of every machine that can listen on `host`."""
    import ray

    here: str = ray.get_runtime_context().get_node_id()
    if host == "localhost" or not ipaddress.ip_address(host).is_unspecified:
        return [(here, f"[{host}]" if ":" in host else host)]
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [(n["NodeID"], n["NodeManagerAddress"]) for n in nodes if n["Alive"]]
    return sorted(alive, key=lambda node: node[0] != here)


def _ports(config: GatewayConfig) -> Sequence[int]:
    """A port for each replica, known before it starts, so that it can have it again."""
    if config.port:
        return range(config.port, config.port + config.replicas)
    found: list[int] = []
    with ExitStack() as taken:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            try:
                taken.enter_context(bind(config.host, port))
            except PortInUseError:
                continue
            found.append(port)
            if len(found) == config.replicas:
                return found
    raise PortInUseError(f"no port of {PORTS} is free on {config.host}; set gateway.port")


def _absolute_paths(config: GatewayConfig) -> GatewayConfig:
    """`config` for an actor, which may run with another working directory."""
    if config.tokenizer_path is None or not os.path.isdir(config.tokenizer_path):
        return config
    return config.model_copy(update={"tokenizer_path": os.path.abspath(config.tokenizer_path)})
