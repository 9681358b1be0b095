"""`EngineServer`: the Ray actor that supervises one engine, or attaches to running ones.

    server = start_engine(config, log_dir=run_dir / "logs", weights_dir=run_dir / "weights")
    urls, _ = await wait_started(server, accept)    # healthy, and has what the run needs
    ...                                     # restarted at the committed weights after a crash or
                                            # hang, of the engine or of the actor
    await server.stop.remote()

The engine dies with the actor's process, however that ends. Ray restarts the actor and makes the
calls again that were under way: `serve` always is, so the new actor is told the urls of the old one
and starts the engine again there. A thin shell: `supervisor.py` has the logic. Requests and weight
updates go to the urls directly, never through the actor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.supervisor import PROBE_INTERVAL_S, Supervisor
from stepwell.backends.errors import EngineError, EngineStartError, EngineUnavailableError
from stepwell.datapool.log_files import log_to_file

KEPT: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
"""Ray's options of an actor that is restarted, and its calls made again, until it is killed by its
handle."""
SUPERVISOR_LOG = "supervisor.log"
"""Log file of the actor, beside its engine's own `engine.log`."""


class EngineServer:
    """Supervises the engine of one `EngineConfig`; run it as a Ray actor (`start_engine`)."""

    def __init__(
        self,
        config: EngineConfig,
        log_dir: str | os.PathLike[str],
        weights_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        log_to_file(Path(log_dir).absolute() / SUPERVISOR_LOG)
        self._config = config
        self._supervisor = None if config.is_attached else Supervisor(config, log_dir, weights_dir)
        self._urls = list(config.urls)
        """Return the urls of attached engines."""
        self._stopped = asyncio.Event()

    async def start(self) -> list[str]:
        """Urls of the healthy engine(s). Idempotent.

        Raises:
            EngineStartError: it did not come up in time; the message says why.
        """
        if self._supervisor is not None:
            url = await asyncio.to_thread(self._supervisor.start)
            if self._config.host == "0.0.0.0":  # others may be on other nodes
                ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # theirs
                url = f"http://{ip}:{self._supervisor.port}"
            return [url]
        if not self._urls:
            self._urls = await self._workers(str(self._config.router_url))
        await asyncio.gather(*(self._await_health(url) for url in self._urls))
        return self._urls

    async def serve(self, urls: Sequence[str]) -> None:
        """Keep the engine at `urls`, as `start` returned them, until `stop`."""
        self._urls = list(urls)
        if self._supervisor is not None:
            self._supervisor.go_on(int(urlsplit(urls[0]).port or 0))
        await self._stopped.wait()

    async def stop(self) -> None:
        """Stop the launched engine; attached ones are left alone. Idempotent."""
        self._stopped.set()
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)

    async def status(self) -> dict[str, Any]:
        """State, url, pid and restarts of a launched engine; the urls of attached ones."""
        if self._supervisor is not None:
            return self._supervisor.status()
        return {"state": "attached", "urls": self._urls}

    async def _workers(self, router_url: str) -> list[str]:
        """Urls of the workers that a router lists, once it lists some."""
        limit_s = self._config.startup_timeout_s
        deadline, why = time.monotonic() + limit_s, "it lists no worker"
        async with EngineClient(router_url, timeout_s=5.0) as router:
            while True:
                workers = []
                try:
                    workers = await router.workers()
                except EngineUnavailableError as e:
                    why = str(e)
                except EngineError as e:
                    raise EngineStartError(f"engine.router_url is {router_url!r}: {e}") from e
                for url, kind in workers:
                    if kind != "regular" or not url.startswith(("http://", "https://")):
                        raise EngineStartError(
                            f"engine.router_url is {router_url!r}, whose worker {url} is of the "
                            f"type {kind}; only whole engines over HTTP can be attached to: name "
                            "those in engine.urls"
                        )
                if workers:
                    return [worker.url for worker in workers]
                if time.monotonic() >= deadline:
                    raise EngineStartError(
                        f"engine.router_url is {router_url!r}, and within "
                        f"engine.startup_timeout_s={limit_s:g} {why}; start the engines and the "
                        "router before the run"
                    )
                await asyncio.sleep(PROBE_INTERVAL_S)

    async def _await_health(self, url: str) -> None:
        deadline = time.monotonic() + self._config.startup_timeout_s
        router = self._config.router_url
        whose = "engine.urls has" if router is None else f"the router {router} lists"
        async with connect(self._config, url, timeout_s=5.0) as engine:
            while not await engine.health():
                if time.monotonic() >= deadline:
                    raise EngineStartError(
                        f"{whose} {url!r}, which did not answer that it is well within "
                        f"engine.startup_timeout_s={self._config.startup_timeout_s:g}; "
                        "is a server running there?"
                    )
                await asyncio.sleep(PROBE_INTERVAL_S)


async def wait_started(
    server: Any, accept: Callable[[str], Awaitable[None]]
) -> tuple[list[str], Any]:
    """Urls of the engine of a new `EngineServer`, which is kept there, and the call that keeps it:
    it ends after `stop`.

    Args:
        accept: looks at a url; what it raises is raised, and nothing is kept.

    Raises:
        EngineStartError: it did not come up.
    """
    urls: list[str] = await server.start.remote()
    for url in urls:
        await accept(url)
    return urls, server.serve.remote(urls)


def start_engine(
    config: EngineConfig,
    *,
    log_dir: str | os.PathLike[str],
    weights_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> Any:
    """A handle of a new `EngineServer` actor; await `wait_started` next.

    `options` are Ray's (`num_gpus`, `scheduling_strategy`, …). It is given no CPU by default: the
    engine's threads are bounded by `config.threads`, not by Ray.
    """
    actor = ray.remote(EngineServer)
    if name is not None:
        options["name"] = name
    return actor.options(**{**KEPT, **options}).remote(config, log_dir, weights_dir)
