"""Processes that serve: a gateway in a thread of this one, and Ray actors with one each.

    bind ──► start ──► serving ──► stop

The socket is bound before anything else starts, so that a taken port is one clear line, before a
run starts as when the gateway does, and port 0 is known. uvicorn runs in a thread with an event
loop of its own.

Several gateways share the work as replicas, each on a port of its own::

    POST /init_trajectory  at any of them ──► base_url of one of them: every call goes there

    replica dies ──► its trajectories go on at the others (same path, another origin)
        ├──► Ray starts it again on the same machine and port ──► or there, as before
        └──► its machine is gone: on another one, whose address the others hand out from then on

The address is the routing, so there is no front door. What a replica acknowledged is in the pool,
and one that takes over rebuilds the turn graph from there: replicas share nothing else. One that
was started again, or elsewhere than planned, tells the others where it is and is told where they
are.

Does not own: the application (`app.py`), a connection (`http_protocol.py`), which replica is handed
out (`replicas.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
import uvloop

from stepwell.datapool.heap import (
    return_free_pages,
    return_large_blocks,
    settle_heap,
    use_huge_pages,
    use_one_heap,
)
from stepwell.datapool.log_files import log_to_file, numbered_log
from stepwell.datapool.nodes import live_nodes
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.address import bind
from stepwell.gateway.config import TUNING, GatewayConfig, Tuning, Wiring
from stepwell.gateway.errors import GatewayError, PortInUseError
from stepwell.gateway.http_protocol import ConnectionLimits, HttpProtocol

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
RESTART_BIND_S = 30.0
TOLD_S = 5.0
"""A replica that was started again waits so long for the others to say where they are. One that has
not said so by then is asked by nobody until it is started again itself."""
LARGE_BODY_BYTES = 1 << 20
"""Request bodies from this size on go back to the system when they are answered. Smaller ones come
from the heap, whose free pages go back every ten seconds: new pages for each cost 0.5 of 1.8 ms a
call at 32,000 tokens of context (64 agents), and saved 18 of 250 MB while they ran."""
BETWEEN_COLLECTIONS = (5_000, 2, 200)
"""As `heap.BETWEEN_COLLECTIONS`: no call goes on while a collection walks, 0.5 µs an object. One
takes 3 ms with these; with the pool's, which holds more that stays, 10 and 36."""
PORTS = range(20000, 32768)
"""Ports from which a free one is taken: below those that outgoing connections get, one of which
could otherwise have a replica's port when it starts again."""


def http_protocol(config: GatewayConfig, tuning: Tuning = TUNING) -> Any:
    """Factory of the protocol that uvicorn makes for each connection: `Config(http=…)`."""
    return partial(HttpProtocol, limits=ConnectionLimits(config, tuning))


class _Server(uvicorn.Server):
    """Tells when it serves; uvicorn has no hook for that."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        finally:
            self.settled.set()


class HttpServer:
    """One gateway on its own event loop in a thread. `start` and `stop` are called once each."""

    def __init__(self, config: GatewayConfig, wiring: Wiring, pool: DataPoolClient) -> None:
        self._config = config
        self._wiring = wiring
        self._pool = pool
        self._app: FastAPI | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    def start(self) -> str:
        """Serve; returns the origin, e.g. `http://127.0.0.1:8100`.

        Raises:
            PortInUseError, GatewayConfigError, GatewayError
        """
        # Loads FastAPI and the tokenizer, which importing this module does not.
        from stepwell.gateway.app import create_app

        config = self._config
        listening = bind(config.host, config.port)
        try:
            self._app = create_app(config, self._wiring, self._pool)
        except BaseException:  # an interruption, too: the port must be free again
            listening.close()
            raise
        port = listening.getsockname()[1]
        self._server = server = _Server(
            uvicorn.Config(
                self._app,
                log_level=self._wiring.tuning.log_level,
                log_config=None,  # as the rest of the process
                access_log=False,
                http=http_protocol(config, self._wiring.tuning),
                ws="none",
                lifespan="on",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                server_header=False,
                date_header=False,
            )
        )
        self._thread = threading.Thread(
            target=self._serve, args=(server, listening), name="gateway", daemon=True
        )
        self._thread.start()
        if not server.settled.wait(START_TIMEOUT_S) or not server.started:
            raise GatewayError(f"the gateway did not start: {self._failure or 'see its log'}")
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Abort generations, let commits finish, stop serving, end the thread."""
        if self._app is None or self._server is None or self._thread is None:
            return
        if self._server.started and self._loop is not None and self._thread.is_alive():
            # uvicorn waits for open answers before it tells the application to shut down.
            closing = asyncio.run_coroutine_threadsafe(self._app.state.services.close(), self._loop)
            try:
                closing.result(STOP_TIMEOUT_S)
            except TimeoutError:  # a pool that does not answer keeps no server alive
                log.warning("calls were still being committed when the gateway stopped")
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(STOP_TIMEOUT_S)

    def move(self, replica: int, origin: str) -> None:
        """Another replica serves at `origin` now."""
        urls = list(self._wiring.replica_urls)
        urls[replica] = origin
        self._wiring = replace(self._wiring, replica_urls=tuple(urls))
        if self._app is not None:
            self._app.state.services.replicas.urls = self._wiring.replica_urls

    def _serve(self, server: _Server, listening: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(server.serve(sockets=[listening]))
        except BaseException as e:  # noqa: BLE001 - a thread has nobody else to tell
            self._failure = e
            server.settled.set()
        finally:
            listening.close()


# -- replicas --------------------------------------------------------------------------------


class GatewayReplica:
    """A gateway as a Ray actor, which serves again by itself when Ray has restarted it. Methods are
    async so that Ray's own loop stays free while the server's thread starts and stops.

    Args:
        pool: the name of the pool's actor in the current namespace.
        names: of the replicas' actors, this one's too; none: it is alone.
    """

    def __init__(
        self,
        config: GatewayConfig,
        wiring: Wiring,
        pool: str,
        names: Sequence[str] = (),
        log_file: Path | None = None,
    ) -> None:
        import ray

        from stepwell.datapool.remote.start import connect

        log_to_file(log_file)
        planned = wiring.replica_urls
        config, wiring = _where_it_is(config, wiring)
        self._http = HttpServer(config, wiring, connect(pool))
        self._own = wiring.replica_urls[wiring.replica] if wiring.replica_urls else ""
        """Origin; the host that is configured may be an address to listen on only."""
        self._serves = False
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        if is_again:
            self._serve_again()
        if is_again or wiring.replica_urls != planned:
            self._find_others(wiring.replica, names)

    async def start(self) -> str:
        """Serve; returns the origin. Repeating it is harmless."""
        if not self._serves:
            await asyncio.to_thread(self._begin)
        return self._own

    async def stop(self) -> None:
        await asyncio.to_thread(self._http.stop)

    async def note_move(self, replica: int, origin: str) -> str:
        """Another replica was started again, at `origin`; returns where this one is."""
        self._http.move(replica, origin)
        return self._own

    def _begin(self) -> None:
        bound = self._http.start()
        self._own = self._own or bound
        settle_heap(BETWEEN_COLLECTIONS)
        use_one_heap()
        return_large_blocks(LARGE_BODY_BYTES)
        return_free_pages()
        threading.Thread(target=use_huge_pages, name="huge-pages", daemon=True).start()
        self._serves = True

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

    def _find_others(self, own: int, names: Sequence[str]) -> None:
        """Tell the other replicas where this one is, and learn where they are."""
        import ray

        asked: dict[Any, int] = {}
        for i, name in enumerate(names):
            if i != own:
                with suppress(ValueError):  # it has ended for good
                    actor = ray.get_actor(name)
                    asked[actor.note_move.remote(own, self._own)] = i
        answers = ray.wait([*asked], num_returns=len(asked), timeout=TOLD_S)[0] if asked else []
        for answer in answers:
            with suppress(ray.exceptions.RayError):  # it is down; it tells when it is started again
                self._http.move(asked[answer], ray.get(answer))


def start_replicas(
    config: GatewayConfig,
    wiring: Wiring,
    pool: str,
    log_dir: Path | None = None,
    **ray_options: Any,
) -> list[Any]:
    """Handles of `config.replicas` new actors; each serves after `await handle.start.remote()`,
    which returns its origin, and is restarted by Ray until it is killed by its handle.

    Those that listen on all addresses are spread over the machines that Ray has, others are on this
    one. One that is restarted comes back where it was; if that machine is gone, on another one.
    Needs an initialised Ray.

    Args:
        pool: the name of the pool's actor in the current namespace.
        log_dir: what they log goes to `gateway.log`, or `gateway_0.log`, …, there, too.
        ray_options: over the defaults `num_cpus=0`, `max_restarts=-1`, `max_task_retries=-1`.
    """
    import ray

    config = _absolute_paths(config)
    nodes = _nodes(config.host)
    ports = _ports(config)
    homes = [nodes[i % len(nodes)] for i in range(config.replicas)]
    urls = tuple(f"http://{host}:{port}" for (_, host), port in zip(homes, ports, strict=True))
    # Tasks, too: a machine may be lost while its replica starts.
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, **ray_options}
    actor = ray.remote(GatewayReplica)
    mark = secrets.token_hex(4)  # a name belongs to one actor in a namespace
    names = [f"gateway-{mark}-{i}" for i in range(config.replicas)]
    # Labels: to a soft affinity Ray 2.60 does not keep where both nodes would do.
    elsewhere: list[dict[str, Any]] | None = None
    if _is_everywhere(config.host):
        elsewhere = [{"label_selector": {}}]
    return [
        actor.options(
            name=names[i],
            label_selector={"ray.io/node-id": node},
            fallback_strategy=elsewhere,
            **options,
        ).remote(
            config.model_copy(update={"port": port}),
            replace(wiring, replica=i, replica_urls=urls),
            pool,
            names,
            numbered_log(log_dir, "gateway", i, config.replicas),
        )
        for i, ((node, _), port) in enumerate(zip(homes, ports, strict=True))
    ]


def _is_everywhere(host: str) -> bool:
    """It stands for all addresses of a machine."""
    return host != "localhost" and ipaddress.ip_address(host).is_unspecified


def _where_it_is(config: GatewayConfig, wiring: Wiring) -> tuple[GatewayConfig, Wiring]:
    """Return what a replica serves with where Ray has started it: elsewhere than planned at that
    machine's address, and at another port if its own is taken there."""
    import ray

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # theirs
    is_spread = wiring.replica_urls and _is_everywhere(config.host)
    if not is_spread or host == urlsplit(wiring.replica_urls[wiring.replica]).hostname:
        return config, wiring
    try:
        bind(config.host, config.port).close()
    except PortInUseError:
        (port,) = _ports(config.model_copy(update={"port": 0, "replicas": 1}))
        config = config.model_copy(update={"port": port})
    urls = list(wiring.replica_urls)
    urls[wiring.replica] = f"http://{host}:{config.port}"
    return config, replace(wiring, replica_urls=tuple(urls))


def _nodes(host: str) -> list[tuple[str, str]]:
    """(Ray's node id, the host of its URLs) of every machine that can listen on `host`."""
    nodes = live_nodes()
    if not _is_everywhere(host):
        return [(nodes[0][0], f"[{host}]" if ":" in host else host)]
    return nodes


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
