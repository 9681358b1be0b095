"""One SGLang server over several nodes: a process on each, started, ended and restarted together.

    EngineGroup ──reserve──► each EngineNode      its address and a free block of ports
                ──launch───► all at once          flags of `ports.node_launches`
                ──status───► every second         one is not up: stop all, and again from the start

The parts of a server cannot go on without each other, so a part is never restarted alone. The
server keeps its url over restarts: its head takes the same ports again, the others take new ones.
`EngineNode` actors that die are restarted by Ray, an `EngineGroupServer` too: it makes new nodes
(the old ones die with their owner) and brings the server up at its url.

All parts must load the same version: the store's lock is held until the last has read it, so that
no publication commits in between.

Owns the group's life. Does not own ports (`ports.py`), one process (`supervisor.py`), or which
nodes these are (`stepwell/cluster/placement.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import ray

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.ports import (
    Block,
    Host,
    NodeLaunch,
    PortsTakenError,
    node_launches,
)
from stepwell.backends.engines.server import KEPT, SUPERVISOR_LOG
from stepwell.backends.engines.supervisor import HEALTHY_FOR_S, Supervisor
from stepwell.backends.errors import EngineStartError
from stepwell.backends.weights import StoreLock
from stepwell.datapool.log_files import log_to_file

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the parts."""
ANSWER_S = 60.0
"""Seconds that a part has to answer; that of a lost node never does."""
_KEPT_PORTS_S = 60.0
"""Seconds that the head of a server that ended waits until its own ports are free again."""


class Node(Protocol):
    """Interface of a part to its group."""

    async def reserve(self, first_port: int | None = None) -> Host: ...
    async def launch(self, launch: NodeLaunch) -> str: ...
    async def status(self) -> dict[str, Any]: ...
    async def stop(self) -> None: ...


class EngineNode:
    """The part of a server on one node; run it as a Ray actor there (`start_engine_group`)."""

    def __init__(
        self,
        config: EngineConfig,
        log_dir: str | os.PathLike[str],
        weights_dir: str | os.PathLike[str] | None = None,
        ip: str | None = None,
        log_file: Path | None = None,
    ) -> None:
        log_to_file(log_file)
        self._config = config
        self._log_dir = log_dir
        self._weights_dir = weights_dir
        self._ip = ip
        self._block: Block | None = None
        self._supervisor: Supervisor | None = None

    async def reserve(self, first_port: int | None = None) -> Host:
        """This node's address and a free block of ports, held for `launch`.

        Raises:
            PortsTakenError: those from `first_port` are in use.
        """
        if self._block is not None:
            self._block.release()
        self._block = Block(first_port)
        return Host(self._address(), self._block.first_port)

    async def launch(self, launch: NodeLaunch) -> str:
        """Start this part; returns its url when it is healthy, which it is when all parts are.

        Raises:
            EngineStartError: it did not come up.
        """
        config = self._config.model_copy(
            update={
                "host": self._address(),
                "port": launch.port,
                "max_restarts": 0,
                "extra_args": (*self._config.extra_args, *launch.args),
            }
        )
        self._supervisor = Supervisor(config, self._log_dir, self._weights_dir)
        if self._block is not None:
            self._block.release()
        await asyncio.to_thread(self._supervisor.start)
        return self._supervisor.url

    async def status(self) -> dict[str, Any]:
        """The supervisor's; `{"state": "new"}` before the first launch."""
        if self._supervisor is None:
            return {"state": "new", "pid": None}
        return self._supervisor.status()

    async def stop(self) -> None:
        """End this part. Idempotent."""
        if self._supervisor is not None:
            await asyncio.to_thread(self._supervisor.stop)
        if self._block is not None:
            self._block.release()

    def _address(self) -> str:
        """The one at which the other nodes reach this one; nobody else needs the server."""
        if self._ip is None:
            self._ip = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # theirs
        return self._ip


class EngineGroup:
    """The parts of one server as one engine, with the methods of `EngineServer`."""

    def __init__(
        self,
        config: EngineConfig,
        nodes: Sequence[Node],
        weights_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.restarts = 0
        self._config = config
        self._nodes = list(nodes)
        self._weights_dir = weights_dir
        self._head: Host | None = None
        self._url = ""
        self._error: EngineStartError | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> list[str]:
        """The server's url, once all its parts are healthy.

        Raises:
            EngineStartError: they did not come up in time, or at all.
        """
        if self._keeper is None:
            await self._launch()
            self._keeper = asyncio.create_task(self._keep())
        return [self._url]

    async def serve(self, urls: Sequence[str]) -> None:
        """Keep the server at its url, as `start` returned it, until `stop`."""
        if self._keeper is None:  # `start` was called in the actor before this one
            (self._url,) = urls
            url = urlsplit(self._url)
            self._head = Host(str(url.hostname), int(url.port or 0))
            self._keeper = asyncio.create_task(self._keep())
        await self._stopped.wait()

    async def stop(self) -> None:
        """End all parts. Idempotent."""
        self._stopped.set()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._stop_all()

    async def status(self) -> dict[str, Any]:
        nodes = [
            {"state": "lost", "pid": None, "error": str(s)} if isinstance(s, BaseException) else s
            for s in await self._states()
        ]
        error = None if self._error is None else str(self._error)
        return {"url": self._url, "restarts": self.restarts, "error": error, "nodes": nodes}

    async def _states(self) -> list[dict[str, Any] | BaseException]:
        """Return the status of each part, or the error that a lost node raises."""
        parts = (node.status() for node in self._nodes)
        return await asyncio.gather(*parts, return_exceptions=True)

    async def _launch(self) -> None:
        hosts = [await self._reserve_head()]
        hosts += await asyncio.gather(*(node.reserve() for node in self._nodes[1:]))
        self._head = hosts[0]
        starting: list[asyncio.Task[str]] = []
        try:
            async with self._nothing_committed():
                starting += [
                    asyncio.create_task(node.launch(launch))
                    for node, launch in zip(self._nodes, node_launches(hosts), strict=True)
                ]
                while not await self._are_all_launched():
                    if any(task.done() for task in starting):
                        break  # one failed
                    await asyncio.sleep(0.05)
            self._url, *_ = await asyncio.gather(*starting)
        except BaseException:  # a cancellation, too: no part may be left behind
            await self._stop_all()  # the others wait for the one that failed
            await asyncio.gather(*starting, return_exceptions=True)
            raise

    async def _reserve_head(self) -> Host:
        """New ports at the first start; afterwards the same, once they are free again."""
        if self._head is None:
            return await self._nodes[0].reserve()
        deadline = asyncio.get_running_loop().time() + _KEPT_PORTS_S
        while True:
            try:
                return await self._nodes[0].reserve(self._head.first_port)
            except PortsTakenError as e:
                if asyncio.get_running_loop().time() >= deadline:
                    raise EngineStartError(f"{self._url} cannot be kept: {e}") from e
                await asyncio.sleep(LOOK_S)

    async def _are_all_launched(self) -> bool:
        """Every part's process has been started, so that it is settled what it loads."""
        states = await asyncio.gather(*(node.status() for node in self._nodes))
        return all(state["pid"] is not None for state in states)

    @asynccontextmanager
    async def _nothing_committed(self) -> AsyncIterator[None]:
        if self._weights_dir is None:
            yield
            return
        lock = StoreLock(self._weights_dir)
        while True:
            with lock.tried() as mine:
                if mine:
                    yield
                    return
            await asyncio.sleep(0.05)

    async def _stop_all(self) -> None:
        await asyncio.gather(*(node.stop() for node in self._nodes), return_exceptions=True)

    async def _keep(self) -> None:
        clock, in_a_row = asyncio.get_running_loop().time, 0
        up_since = clock()
        while True:
            await asyncio.sleep(LOOK_S)
            states = await self._states()
            if all(isinstance(s, dict) and s["state"] == "up" for s in states):
                continue
            in_a_row = 1 if clock() - up_since > HEALTHY_FOR_S else in_a_row + 1
            if in_a_row > self._config.max_restarts:
                self._error = EngineStartError(
                    f"{self._url} ended {in_a_row} times in a row "
                    f"(engine.max_restarts={self._config.max_restarts}); see its nodes' logs"
                )
                log.error("%s", self._error)
                await self._stop_all()
                return
            self.restarts += 1
            log.warning("a node of %s ended; restart %d of all", self._url, self.restarts)
            await self._stop_all()
            try:
                await self._launch()
            except Exception as e:  # noqa: BLE001 - Ray's too, of a node that is lost
                log.warning("%s did not come up: %s", self._url, e)
            up_since = clock()


class _RemoteNode:
    """An `EngineNode` actor as a `Node`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def reserve(self, first_port: int | None = None) -> Host:
        host: Host = await asyncio.wait_for(self._actor.reserve.remote(first_port), ANSWER_S)
        return host

    async def launch(self, launch: NodeLaunch) -> str:
        url: str = await self._actor.launch.remote(launch)
        return url

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await asyncio.wait_for(self._actor.status.remote(), ANSWER_S)
        return status

    async def stop(self) -> None:
        await asyncio.wait_for(self._actor.stop.remote(), ANSWER_S)


class EngineGroupServer(EngineGroup):
    """The group as a Ray actor; it owns the actors of its nodes, which end with it."""

    def __init__(
        self,
        config: EngineConfig,
        log_dir: str | os.PathLike[str],
        weights_dir: str | os.PathLike[str] | None,
        options: Sequence[dict[str, Any]],
    ) -> None:
        folder = Path(log_dir).absolute()
        log_to_file(folder / SUPERVISOR_LOG)
        kind = ray.remote(EngineNode)
        nodes = [
            _RemoteNode(
                kind.options(**{**KEPT, **each}).remote(
                    config, folder / f"node_{rank}", weights_dir, None, folder / f"node_{rank}.log"
                )
            )
            for rank, each in enumerate(options)
        ]
        super().__init__(config, nodes, weights_dir)


def start_engine_group(
    config: EngineConfig,
    *,
    log_dir: str | os.PathLike[str],
    weights_dir: str | os.PathLike[str] | None = None,
    options: Sequence[dict[str, Any]],
) -> Any:
    """A handle of a new group, as of `start_engine`; `options` are Ray's, of each node's actor."""
    actor = ray.remote(EngineGroupServer).options(**KEPT)
    return actor.remote(config, log_dir, weights_dir, list(options))
