"""The gateways that are compared, each behind the same few calls.

All take the same chat completions and pass them to the same engine; `Direct` is the engine itself.
What each does for that differs: Stepwell renders and tokenises, asks `/generate` and stores Steps
durably; rllm-model-gateway lets the engine tokenise and keeps traces in memory.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import ray

from benchmarks.gateway.client import Job
from benchmarks.gateway.process import Engine, program
from benchmarks.gateway.size import trajectory_size
from benchmarks.gateway.workload import CALLING, Workload
from benchmarks.pool.cluster import pid_of, running_pool
from benchmarks.processes import ask, free_port, python
from benchmarks.system import System
from stepwell.datapool.types import Step
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.server import GatewayReplica, start_replicas
from stepwell.gateway.tokens.graph import join

T = TypeVar("T")
START_S = 60.0


class Gateway(System):
    """A gateway before an engine, given as `running(engine, workload)`."""

    ports: tuple[int, ...]
    path = "/v1/chat/completions"
    complete_path: str | None = None
    pool_pid: int | None = None
    scale = 1
    """Multiple of the slowest system's load, so that all run for a second or more."""

    async def settle(self, job: Job) -> None:  # most keep nothing
        """Check what was stored by `job` and let go of it; outside the measured part.

        Raises:
            RuntimeError: it is not what was answered.
        """


class Direct(Gateway):
    """No gateway: the client asks the engine for chat completions."""

    name = "engine, direct"
    scale = 8

    @asynccontextmanager
    async def running(self, engine: Engine, workload: Workload) -> AsyncIterator[None]:
        self.ports = (engine.port,)
        yield


class BareProxy(Gateway):
    """`proxy.py`: passes bytes on and does nothing else."""

    name = "bare proxy, written by hand"
    file = "proxy.py"
    scale = 4

    @asynccontextmanager
    async def running(self, engine: Engine, workload: Workload) -> AsyncIterator[None]:
        async with program(self.file, engine.port) as process:
            self.ports, self.pids = (int(await ask(process)),), (process.pid,)
            yield


class LibraryProxy(BareProxy):
    """`library_proxy.py`: the same, written with uvicorn and aiohttp."""

    name = "bare proxy of uvicorn and aiohttp"
    file = "library_proxy.py"
    scale = 2


class WatchedGateway(GatewayReplica):
    """`stepwell train`'s gateway actor, whose event loop can be watched."""

    PERIOD_S = 0.005

    def __init__(self, config: GatewayConfig, wiring: Wiring, pool: str) -> None:
        super().__init__(config, wiring, pool)
        self._watching = False
        self._late_s: list[float] = []
        self._collections_s: list[float] = []
        self._collecting = 0.0

    async def watch(self) -> None:
        """Begin to record how late a task that sleeps 5 ms wakes up, and how long garbage
        collections take."""
        self._watching, self._late_s, self._collections_s = True, [], []
        gc.callbacks.append(self._collects)
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop())

    async def stalls(self) -> tuple[list[float], list[float]]:
        """End it; the seconds of each turn and of each collection."""
        self._watching = False
        gc.callbacks.remove(self._collects)
        return self._late_s, self._collections_s

    async def held(self) -> list[tuple[int, int, int]]:
        """Return for each open trajectory: bytes that it holds, its tokens, bytes of their text."""
        return await self._in_loop(self._held())

    async def load(self) -> tuple[int, int]:
        """Tokens of all open trajectories, and of those with a call in flight."""
        return await self._in_loop(self._load())

    async def complete_all(self) -> None:
        """Complete all open trajectories, as their agents would."""
        await self._in_loop(self._complete_all())

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._http._loop is None:
            raise RuntimeError("the gateway does not serve yet")
        return self._http._loop

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop()))

    @property
    def _gateway(self) -> Any:
        if self._http._app is None:
            raise RuntimeError("the gateway does not serve yet")
        return self._http._app.state.services

    async def _held(self) -> list[tuple[int, int, int]]:
        gateway = self._gateway
        gc.collect()
        held = []
        for trajectory in gateway.trajectories:
            last = trajectory.graph.steps[trajectory.steps - 1]
            text = gateway.tokenizer.decode(join(last.arrays()).tolist())
            size = trajectory_size(gateway, trajectory.uid)
            held.append((size, trajectory.graph.n_tokens, len(text.encode())))
        return held

    async def _load(self) -> tuple[int, int]:
        open_now = [(t.graph.n_tokens, bool(t.in_flight)) for t in self._gateway.trajectories]
        return sum(n for n, _ in open_now), sum(n for n, is_called in open_now if is_called)

    async def _complete_all(self) -> None:
        for trajectory in self._gateway.trajectories:
            await trajectory.complete(1.0, None)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self._collections_s.append(time.perf_counter() - self._collecting)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._watching:
            began = loop.time()
            await asyncio.sleep(self.PERIOD_S)
            self._late_s.append(loop.time() - began - self.PERIOD_S)


class Stepwell(Gateway):
    """This gateway before a DataPool with durability "process", as in `stepwell train`.

    Args:
        pool_options: further keys of the pool.
    """

    name = "Stepwell"
    path = "/{trajectory}/{prompt}/v1/chat/completions"
    responses_path = "/{trajectory}/{prompt}/v1/responses"
    complete_path = "/{trajectory}/{prompt}/v1/complete_trajectory"
    abort_path = "/{trajectory}/{prompt}/v1/abort_trajectory"
    scale = 2

    def __init__(self, **pool_options: Any) -> None:
        self._pool_options = pool_options

    @asynccontextmanager
    async def running(self, engine: Engine, workload: Workload) -> AsyncIterator[None]:
        self._workload = workload
        config = GatewayConfig(port=0, tokenizer_path=str(workload.tokenizer_path))
        async with running_pool(durability="process", **self._pool_options) as pool:
            self.pool, (self.pool_pid,) = pool.client, await pool.pids()
            self.actors = self._start(config, Wiring((engine.url,)), pool.name)
            urls: list[str] = await asyncio.gather(*(a.start.remote() for a in self.actors))
            self.ports = tuple(int(url.rpartition(":")[2]) for url in urls)
            self.pids = tuple([await pid_of(actor) for actor in self.actors])
            yield
            for actor in self.actors:
                await actor.stop.remote()
                ray.kill(actor)

    def _start(self, config: GatewayConfig, wiring: Wiring, pool_name: str) -> list[Any]:
        actor_class: Any = ray.remote(num_cpus=0)(WatchedGateway)
        return [actor_class.remote(config, wiring, pool_name)]

    async def settle(self, job: Job) -> None:
        if job.complete_path is None:
            await self.actors[0].complete_all.remote()
        for _ in range(job.prompts):
            steps = await self.pool.fetch_batch(n_rollouts=job.rollouts, timeout_s=30)
            if steps is None:
                raise RuntimeError(f"the pool has fewer groups than {job.name} completed")
            self._check(steps, job)

    def _check(self, steps: Sequence[Step], job: Job) -> None:
        """A group is whole, and every rollout one chain of exactly what the engine said."""
        if len(steps) != job.rollouts * job.turns:
            raise RuntimeError(
                f"a group of {job.rollouts * job.turns} calls has {len(steps)} steps"
            )
        workload, before = self._workload, None
        answer_ids = workload.call_ids if job.kind in CALLING else workload.answer_ids
        for step in steps:
            parent = step.step_index - 1 if step.step_index else None
            if step.parent_index != parent or step.response_ids.tolist() != answer_ids:
                raise RuntimeError(f"{step.trajectory_uid} holds another step {step.step_index}")
            if before is not None and parent is not None:
                known = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
                if step.prompt_ids[: len(known)].tolist() != known:
                    raise RuntimeError(f"{step.trajectory_uid} does not extend step {parent}")
            before = step


class StepwellReplicas(Stepwell):
    """The processes of `stepwell serve --replicas 2`: one for each core here."""

    name = "Stepwell, 2 replicas"

    def _start(self, config: GatewayConfig, wiring: Wiring, pool_name: str) -> list[Any]:
        return start_replicas(config.model_copy(update={"replicas": 2}), wiring, pool_name)


class Rllm(Gateway):
    """rllm-model-gateway as its documentation starts it, with traces in memory.

    By default it logs two lines a request, here to /dev/null; without them (`--log-level WARNING`)
    it was 1.04 to 1.2 times as fast.
    """

    name = "rllm-model-gateway 0.1.0"
    path = "/sessions/{trajectory}/v1/chat/completions"

    @asynccontextmanager
    async def running(self, engine: Engine, workload: Workload) -> AsyncIterator[None]:
        self.ports = (free_port(),)
        where = ("--host", "127.0.0.1", "--port", str(self.ports[0]))
        what = ("--store", "memory", "--worker", f"{engine.url}/v1")
        async with (
            python("-m", "rllm_model_gateway", *where, *what) as process,
            self._session() as session,
        ):
            self.pids = (process.pid,)
            async with asyncio.timeout(START_S):
                while not await self._is_up(session):  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.1)
            yield

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(f"http://127.0.0.1:{self.ports[0]}")

    @staticmethod
    async def _is_up(session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def settle(self, job: Job) -> None:
        """Delete the sessions, as a trainer does that has read them."""
        async with self._session() as session:
            for prompt, rollout in itertools.product(range(job.prompts), range(job.rollouts)):
                uid = f"{job.name}-{prompt}-{rollout}"
                async with session.delete(f"/sessions/{uid}") as response:
                    deleted = (await response.json())["deleted"]
                if deleted != job.turns:
                    raise RuntimeError(f"{uid} has {deleted} traces of {job.turns} calls")


INSTALL = "pip install --no-deps -c constraints.txt rllm-model-gateway aiosqlite setproctitle"
"""Command that installs rllm-model-gateway; its other imports are ours already."""


def is_installed() -> bool:
    """True if rllm-model-gateway is there to be compared with."""
    return importlib.util.find_spec("rllm_model_gateway") is not None
