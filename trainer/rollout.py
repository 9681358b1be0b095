"""Runs agents against the gateway: n rollouts per prompt, bounded, timed, never scored by failure.

`RolloutWorker` (a Ray actor) runs the rollouts of whole groups on its own event loop and talks to
the gateway by HTTP only, like any agent. `Producer` (in the trainer's process) draws prompts,
waits for the pool's admission and hands groups to the workers; the pool's `max_outstanding_groups`
is the only brake.

One rollout::

    init_trajectory ──► agent(task, base_url, api_key) ──► complete_trajectory(reward)
                            │ raised, timed out
                            └──► abort_trajectory(reason) ──► next attempt, or the rollout is lost

A failed rollout is aborted with its reason and never scored 0. Does not own: scoring (an agent that
returns None leaves its trajectory unscored, the trainer scores it), group readiness (the pool).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count, cycle
from typing import Any, Protocol, TypeAlias, cast

import aiohttp
import ray
from pydantic import SecretStr

from datapool.client import DataPoolClient
from datapool.dotted import resolve
from datapool.errors import DataPoolError
from datapool.process import settle_heap
from datapool.types import TRAIN
from trainer.config import RolloutConfig
from trainer.data import DataExhaustedError, PromptSource, Task
from trainer.errors import RolloutError

log = logging.getLogger(__name__)

GATEWAY_RESTART_S = 30.0
GATEWAY_RETRY_S = 0.25

Agent: TypeAlias = Callable[[Mapping[str, Any], str, str], Awaitable[float | None]]


def load_agent(path: str) -> Agent:
    """The coroutine function at `package.module:name` (or `package.module.name`).

    Raises:
        RolloutError: it cannot be imported, or is no `async def agent(task, base_url, api_key)`.
    """
    try:
        agent = resolve(path)
    except ImportError as e:
        raise RolloutError(
            f"rollout.agent is {path!r}, which cannot be imported ({e}); "
            "name an async function as package.module:function"
        ) from e
    if not inspect.iscoroutinefunction(agent):
        raise RolloutError(
            f"rollout.agent is {path!r}, which is no coroutine function; "
            "write it as async def agent(task, base_url, api_key) -> float | None"
        )
    return cast(Agent, agent)


class RolloutWorker:
    """Runs groups of rollouts; one per process (see `start_workers`).

    Args:
        gateway_urls: of the gateway's replicas.
        key: the gateway's admin key; None: it has no keys.
    """

    def __init__(
        self, config: RolloutConfig, gateway_urls: Sequence[str], key: SecretStr | None = None
    ) -> None:
        self._config = config
        self._gateways = tuple(gateway_urls)
        self._key = key
        self._agent = load_agent(config.agent)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        settle_heap()

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN
    ) -> dict[str, int]:
        """Run `n` rollouts of `task`; returns how they ended: {"complete": 7, "timeout": 1}."""
        ends = await asyncio.gather(
            *(self._rollout(task, prompt_uid, index, channel) for index in range(n))
        )
        return dict(Counter(ends))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _rollout(self, task: Task, prompt_uid: str, index: int, channel: str) -> str:
        reason = "not started"
        for attempt in range(self._config.max_attempts):
            async with self._slots:
                final = attempt + 1 == self._config.max_attempts
                reason = await self._attempt(task, prompt_uid, index, attempt, final, channel)
            if reason == "complete":
                break
        return reason

    async def _attempt(
        self, task: Task, prompt_uid: str, index: int, attempt: int, final: bool, channel: str
    ) -> str:
        started = await self._post(
            [f"{gateway}/init_trajectory" for gateway in self._gateways],
            {
                # Chosen here, so that asking again opens no second one.
                "trajectory_uid": uuid.uuid4().hex,
                "prompt_uid": prompt_uid,
                "channel": channel,
                "attempt": attempt,
                "metadata": {"rollout_index": index},
            },
        )
        base_url = started["base_url"]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                reward = await self._agent(task, base_url, started.get("api_key", "none"))
            await self._post([f"{base_url}/v1/complete_trajectory"], {"reward": reward})
        except TimeoutError:
            reason = "timeout"
        except asyncio.CancelledError:
            # At the end of a run the gateway may be gone already.
            await self._post([f"{base_url}/v1/abort_trajectory"], {"reason": "cancelled"}, 0)
            raise
        except Exception as e:  # noqa: BLE001 - an agent is foreign code: any failure ends its rollout
            reason = f"{type(e).__name__}: {e}"[:200]
            log.warning(
                "rollout %d of %s failed (attempt %d): %s", index, prompt_uid, attempt, reason
            )
        else:
            return "complete"
        await self._post(
            [f"{base_url}/v1/abort_trajectory"], {"reason": reason, "will_retry": not final}
        )
        return reason.partition(":")[0]

    async def _post(
        self, urls: Sequence[str], body: dict[str, Any], patience_s: float = GATEWAY_RESTART_S
    ) -> dict[str, Any]:
        """The answer of the first of `urls` that can be reached; a gateway that died is back on
        its port in seconds. All that is sent here may be sent again."""
        if self._session is None:
            headers = {}
            if self._key is not None:
                headers["authorization"] = f"Bearer {self._key.get_secret_value()}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=headers
            )
        give_up = time.monotonic() + patience_s
        for url in cycle(urls):
            try:
                return await self._post_once(self._session, url, body)
            except aiohttp.ClientConnectionError as e:
                if time.monotonic() >= give_up:
                    raise RolloutError(
                        f"{url} could not be reached for {patience_s:g} s ({e})"
                    ) from e
            await asyncio.sleep(GATEWAY_RETRY_S)
        raise RolloutError("there is no gateway to reach")

    @staticmethod
    async def _post_once(
        session: aiohttp.ClientSession, url: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        async with session.post(url, json=body) as response:
            if response.status >= 400:
                raise RolloutError(
                    f"{url} answered {response.status}: {await response.text():.300}"
                )
            return cast(dict[str, Any], await response.json())


class WorkerHandle(Protocol):
    """What `Producer` needs of a worker: a Ray handle from `start_workers`, or a local one."""

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN
    ) -> dict[str, int]: ...


class _RemoteWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN
    ) -> dict[str, int]:
        running = self._actor.run_group.remote(task, prompt_uid, n, channel)
        try:
            return cast(dict[str, int], await running)
        except asyncio.CancelledError:
            ray.cancel(running)  # giving up the reference alone would leave the agents running
            raise


def start_workers(
    config: RolloutConfig, gateway_urls: Sequence[str], key: SecretStr | None = None
) -> list[WorkerHandle]:
    """`config.workers` actors; Ray restarts one that dies, and its groups are dropped."""
    actor = ray.remote(RolloutWorker).options(
        num_cpus=0, max_restarts=-1, max_concurrency=1000, name=None
    )
    return [_RemoteWorker(actor.remote(config, gateway_urls, key)) for _ in range(config.workers)]


class Producer:
    """Keeps the pool fed with groups of the prompt source until it is stopped."""

    def __init__(
        self,
        config: RolloutConfig,
        source: PromptSource,
        pool: DataPoolClient,
        workers: list[WorkerHandle],
    ) -> None:
        self._config = config
        self._source = source
        self._pool = pool
        self._workers = workers
        self.ends: Counter[str] = Counter()
        """How rollouts ended so far."""
        self.in_flight: dict[str, Task] = {}
        """Prompts handed out and not yet settled, by prompt_uid: what a resume re-issues."""

    def settle(self, prompt_uid: str) -> None:
        """The group is trained (and its checkpoint durable), or dropped for good."""
        self.in_flight.pop(prompt_uid, None)

    @asynccontextmanager
    async def running(self, limit: int | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """Generation goes on inside the block, for `limit` groups or as long as there is data; the
        yielded task fails if generation does."""
        task = asyncio.create_task(self._run(limit), name="producer")
        drops = asyncio.create_task(self._follow_drops(), name="drops")
        try:
            yield task
        finally:
            task.cancel()
            drops.cancel()
            await asyncio.gather(task, drops, return_exceptions=True)

    async def evaluate(self, tasks: list[Task], n: int, channel: str) -> list[str]:
        """Run every task n times into `channel`; returns the prompt_uids, once all have ended."""
        runs = [self._start(task, n, 1, channel) for task in tasks]
        uids = await asyncio.gather(*runs)
        await asyncio.gather(
            *(
                self._run_group(i, task, uid, n, channel)
                for i, (task, uid) in enumerate(zip(tasks, uids, strict=True))
            )
        )
        return list(uids)

    async def _run(self, limit: int | None) -> None:
        async with asyncio.TaskGroup() as groups:
            for number in count() if limit is None else range(limit):
                try:
                    task = self._source.next()
                except DataExhaustedError as e:
                    log.info("generation ends: %s", e)
                    break
                prompt_uid = await self._start(task, self._config.n, self._config.min_n, TRAIN)
                self.in_flight[prompt_uid] = task
                groups.create_task(self._run_group(number, task, prompt_uid, self._config.n, TRAIN))

    async def _follow_drops(self) -> None:
        """What the pool drops is settled; what it returns to the source is issued again. Its place
        is taken by the next prompt anyway: a drop frees admission."""
        cursor: str | None = None
        while True:
            page = await self._pool.get_events(
                cursor, channel=TRAIN, kinds=("dropped",), timeout_s=60
            )
            cursor = page.cursor
            for event in page.events:
                task = self.in_flight.pop(event.prompt_uid, None)
                if task is not None and event.data["returned"]:
                    self._source.put_back([task])

    async def _start(self, task: Task, n: int, min_n: int, channel: str) -> str:
        prompt_uid = f"{task['instance_id']}-{uuid.uuid4().hex[:8]}"
        await self._pool.open_group(
            prompt_uid,
            n,
            deadline_s=self._config.group_deadline_s,
            min_rollouts=min(min_n, n),
            metadata={"task": task},
            channel=channel,
        )
        return prompt_uid

    async def _run_group(
        self, number: int, task: Task, prompt_uid: str, n: int, channel: str
    ) -> None:
        worker = self._workers[number % len(self._workers)]
        try:
            ends = await worker.run_group(task, prompt_uid, n, channel)
        except ray.exceptions.RayActorError as e:
            # The worker died: its rollouts cannot finish, and the group must not wait for them.
            log.warning("rollout worker died while running %s: %s", prompt_uid, e)
            try:
                await self._pool.drop_group(prompt_uid, "rollout worker died", channel=channel)
            except DataPoolError as gone:
                log.info("%s was already closed: %s", prompt_uid, gone)
            ends = {"worker died": n}
        self.ends.update(ends)
        if channel == TRAIN and ends.get("complete", 0) < self._config.min_n:
            self.settle(prompt_uid)  # the pool drops it, counted there
