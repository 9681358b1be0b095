"""The SGLang router (`sglang-router` 0.3) in front of the engines: its process and its workers.

                              ┌─ /generate ─► router ─► a worker that shares the longest prefix
    gateway ──────────────────┘                 ▲
    trainer ── pause, update, … ─► each worker  │ POST /workers, DELETE /workers/{id}
                                                │
    RouterServer, every half second:  a worker that answers and has the committed weights is in
                                      the router's list; one that died, or came back older, is not

The router forwards `/generate` and nothing that controls an engine, so a gateway cannot see which
worker it gets: the list of workers *is* the version gate. Worked example: workers A and B serve 7;
B is killed: out of the list. It restarts with 7 while A loads and the trainer commits 8: B answers,
but has 7 < 8, so it stays out until it has loaded 8. An answer says its version in any case.

The list is compared with what it should be, never remembered: a router that was restarted (ours,
or somebody else's) is filled again within a second. Workers that are not ours are left alone.

Owns the router's command line, process and list. Does not own engines (`supervisor.py`), weights,
or what the gateway does with the router's url (`gateway/engine/checks.py`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.addresses import free_port, reachable
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.engines.process import kill, last_lines, launch
from stepwell.backends.engines.server import KEPT
from stepwell.backends.errors import EngineError, EngineStartError, EngineTimeoutError
from stepwell.backends.weights import read_current
from stepwell.datapool.process import log_to_file

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Between two looks at the workers."""
ANSWER_S = 5.0
"""How long a router or worker may take to answer a look at it."""
LATE_ANSWERS = 2
"""In a row, before a worker that still listens is taken out."""
LONGEST_CALL_S = 86_400


def router_argv(host: str, port: int, metrics_port: int) -> list[str]:
    """The router's command line.

    Its own retries and circuit breakers are off: a call is retried by the gateway, which knows how
    much of it was streamed, and which workers there are is decided here. Its health check asks
    `/model_info`, which a paused engine answers and `/health` may not.
    """
    return [
        *(sys.executable, "-m", "sglang_router.launch_router"),
        *("--host", host, "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--policy", "cache_aware", "--disable-retries", "--disable-circuit-breaker"),
        *("--health-check-endpoint", "/model_info", "--health-check-interval-secs", "2"),
        *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
        *("--worker-startup-check-interval", "1"),
        *("--request-timeout-secs", str(LONGEST_CALL_S), "--log-level", "warn"),
    ]


class RouterServer:
    """Runs or attaches to a router and keeps its workers right; a Ray actor (`start_router`)."""

    def __init__(
        self,
        config: EngineConfig,
        log_dir: str | os.PathLike[str],
        weights_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`weights_dir`: the `WeightStore` whose committed version a worker must have."""
        log_to_file(Path(log_dir).absolute() / "router_supervisor.log")
        if config.router == "none":
            raise ValueError("engine.router is 'none'; set it to 'launch' or a router's url")
        self.restarts = 0
        self._config = config
        self._log_file = Path(log_dir).absolute() / "router.log"
        self._weights_dir = weights_dir
        self._url = config.router
        self._process: subprocess.Popen[bytes] | None = None
        self._workers: list[EngineClient] = []
        self._late: Counter[str] = Counter()
        self._connections = ConnectionPool()
        self._router = self._client(self._url)
        self._following: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    @property
    def _is_ours(self) -> bool:
        return self._config.router == "launch"

    async def start(self, worker_urls: Sequence[str]) -> str:
        """The router's url, once it serves and lists every worker as healthy.

        Raises:
            EngineStartError: it did not within `engine.startup_timeout_s`; the message says why.
        """
        if self._is_ours:
            self._check()
            port = free_port(self._config.host)
            self._url = f"http://{reachable(self._config.host)}:{port}"
        self._look_after(self._url, worker_urls)
        if self._is_ours:
            self._launch()
        deadline, why = time.monotonic() + self._config.startup_timeout_s, "it does not answer"
        while True:
            try:
                await self.reconcile()
                missing = await self._missing()
            except EngineError as e:
                why = str(e)
            else:
                if not missing:
                    break
                why = f"it does not list {', '.join(missing)} as healthy"
            if self._process is not None and self._process.poll() is not None:
                raise self._failed(f"ended with exit code {self._process.returncode}")
            if time.monotonic() >= deadline:
                limit = self._config.startup_timeout_s
                raise self._failed(
                    f"was not ready within engine.startup_timeout_s={limit:g}: {why}"
                )
            await asyncio.sleep(0.1)
        self._following = asyncio.create_task(self._follow())
        return self._url

    async def serve(self, url: str, worker_urls: Sequence[str]) -> None:
        """Keep the router at `url`, as `start` returned it, until `stop`. An actor that Ray
        restarted launches it again there."""
        if self._following is None:
            self._look_after(url, worker_urls)
            self._following = asyncio.create_task(self._follow())
        await self._stopped.wait()

    def _look_after(self, url: str, worker_urls: Sequence[str]) -> None:
        self._url = url
        self._router = self._client(url)
        self._workers = [self._client(worker) for worker in worker_urls]

    def _client(self, url: str) -> EngineClient:
        return EngineClient(url, timeout_s=ANSWER_S, connections=self._connections)

    async def stop(self) -> None:
        """Stop a router that was launched; take the workers out of one that was not. Idempotent."""
        self._stopped.set()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._is_ours:
            await asyncio.to_thread(self._end)
        elif self._workers:
            try:
                ours = {client.url for client in self._workers}
                for worker in await self._router.workers():
                    if worker.url in ours:
                        await self._router.remove_worker(worker)
            except EngineError as e:
                log.warning("the router at %s keeps our workers: %s", self._url, e)
        self._connections.close()

    async def status(self) -> dict[str, Any]:
        pid = self._process.pid if self._process is not None else None
        return {"url": self._url, "pid": pid, "restarts": self.restarts}

    async def reconcile(self) -> None:
        """Make the router's list what it should be.

        Raises:
            EngineError: the router does not answer.
        """
        listed = {worker.url: worker for worker in await self._router.workers()}
        may_serve = await asyncio.gather(*(self.may_serve(client) for client in self._workers))
        for client, may in zip(self._workers, may_serve, strict=True):
            worker = listed.get(client.url)
            if may and worker is None:
                await self._router.add_worker(client.url)
            elif not may and worker is not None:
                log.warning("%s leaves the router's list", client.url)
                await self._router.remove_worker(worker)

    async def may_serve(self, client: EngineClient) -> bool:
        """Whether it answers and has the committed weights, or newer ones that are not committed
        yet."""
        committed = read_current(self._weights_dir) if self._weights_dir is not None else None
        try:
            version = await client.weight_version()
        except EngineTimeoutError:
            self._late[client.url] += 1
            return self._late[client.url] < LATE_ANSWERS
        except (EngineError, ValueError):
            return False
        self._late[client.url] = 0
        return committed is None or version >= committed.version

    async def _missing(self) -> list[str]:
        healthy = {worker.url for worker in await self._router.workers() if worker.is_healthy}
        return [client.url for client in self._workers if client.url not in healthy]

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                if self._is_ours and (self._process is None or self._process.poll() is not None):
                    code = self._process.returncode if self._process is not None else None
                    self._end()
                    self.restarts += 1
                    log.warning("the router ended with %s; restart %d", code, self.restarts)
                    self._launch()
                await self.reconcile()
            except EngineError as e:
                log.warning("the router at %s does not answer: %s", self._url, e)
            except Exception:  # a task that ended would leave the list as it is for good
                log.exception("looking after the router at %s failed", self._url)

    # -- its process --------------------------------------------------------------------------

    def _check(self) -> None:
        if importlib.util.find_spec("sglang_router") is None:
            raise EngineStartError(
                "engine.router is 'launch', but the package sglang-router is not installed; "
                "pip install 'sglang-router>=0.3', or set engine.router to the url of a running one"
            )

    def _launch(self) -> None:
        port = int(self._url.rpartition(":")[2])
        argv = router_argv(self._config.host, port, free_port("127.0.0.1"))
        # From the actor's event loop thread, which lives as long as the actor: it dies with it.
        self._process = launch(argv, self._log_file)

    def _end(self) -> None:
        """The router has no state worth a graceful end: its calls are retried or over."""
        process, self._process = self._process, None
        if process is not None:
            kill(process)

    def _failed(self, what: str) -> EngineStartError:
        who = "the router" if self._is_ours else f"engine.router, the router at {self._url},"
        where = ""
        if self._is_ours and self._log_file.exists():
            where = f". Last lines of {self._log_file}:\n{last_lines(self._log_file)}"
        return EngineStartError(f"{who} {what}{where}")


async def started_router(router: Any, worker_urls: Sequence[str]) -> str:
    """The url of a new `RouterServer`'s router, which is kept there.

    Raises:
        EngineStartError: it did not come up.
    """
    url: str = await router.start.remote(worker_urls)
    router.serve.remote(url, worker_urls)
    return url


def start_router(
    config: EngineConfig,
    *,
    log_dir: str | os.PathLike[str],
    weights_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """A handle of a new `RouterServer` actor; await `started_router` next. `options` are Ray's."""
    actor = ray.remote(RouterServer)
    return actor.options(**{**KEPT, **options}).remote(config, log_dir, weights_dir)
