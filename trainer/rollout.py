"""Runs agents against the gateway: n rollouts per prompt, bounded, timed, never scored by failure.

`RolloutWorker` (a Ray actor) runs the rollouts of whole groups on its own event loop and talks to
the gateway by HTTP only, like any agent. `Producer` (in the trainer's process) draws prompts and
hands groups to the workers; it waits for the credit of its window (`Pace`, in the modes that have
windows) and for the pool's admission (`max_outstanding_groups`).

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count, cycle
from typing import Any, Protocol, TypeAlias, cast

import aiohttp
import ray
from pydantic import SecretStr

from datapool.client import DataPoolClient
from datapool.dotted import resolve
from datapool.errors import DataPoolError, GroupClosedError, UnknownGroupError
from datapool.process import settle_heap
from datapool.types import GREEDY, TRAIN
from trainer.config import RolloutConfig
from trainer.data import DataExhaustedError, PromptSource, Task, slug
from trainer.errors import RolloutError
from trainer.ledger import Ledger
from trainer.metrics import Idle
from trainer.reclaim import live_groups
from trainer.sampling import SURPLUS, Pace

log = logging.getLogger(__name__)

GATEWAY_RESTART_S = 300.0
"""A gateway that died is back in seconds, on a busy machine and with its pool or engine down too in
minutes. The run ends if it is not: no rollout can be run any more."""
_DOWN = frozenset({502, 503, 504})
"""The gateway answers, but its pool or engine does not at the moment."""
GATEWAY_RETRY_S = 0.25
FORGOTTEN = "dropped_unseen"
"""Ledger's reason: the pool dropped the group and was restarted before it could say why."""

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


class _UnavailableError(Exception):
    """To be asked again."""


class _ClosedError(RolloutError):
    """The trajectory has ended: completed, aborted, or closed by the pool with its group."""


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
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        """Run `n` rollouts of `task`, the last `n_greedy` of them as greedy baselines; returns how
        they ended: {"complete": 7, "timeout": 1}."""
        marks: list[dict[str, Any]] = [{"rollout_index": index} for index in range(n)]
        for mark in marks[n - n_greedy :]:
            mark[GREEDY] = True
        ends = await asyncio.gather(
            *(self._rollout(task, prompt_uid, mark, channel) for mark in marks)
        )
        return dict(Counter(ends))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _rollout(
        self, task: Task, prompt_uid: str, mark: dict[str, Any], channel: str
    ) -> str:
        reason = "not started"
        for attempt in range(self._config.max_attempts):
            async with self._slots:
                final = attempt + 1 == self._config.max_attempts
                reason = await self._attempt(task, prompt_uid, mark, attempt, final, channel)
            if reason == "complete":
                break
        return reason

    async def _attempt(
        self,
        task: Task,
        prompt_uid: str,
        mark: dict[str, Any],
        attempt: int,
        final: bool,
        channel: str,
    ) -> str:
        started = await self._post(
            [f"{gateway}/init_trajectory" for gateway in self._gateways],
            {
                # Chosen here, so that asking again opens no second one.
                "trajectory_uid": uuid.uuid4().hex,
                "prompt_uid": prompt_uid,
                "channel": channel,
                "attempt": attempt,
                "metadata": mark,
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
                "rollout %d of %s failed (attempt %d): %s",
                mark["rollout_index"],
                prompt_uid,
                attempt,
                reason,
            )
        else:
            return "complete"
        try:
            await self._post(
                [f"{base_url}/v1/abort_trajectory"], {"reason": reason, "will_retry": not final}
            )
        except _ClosedError as gone:
            log.info("a rollout of %s had ended already: %s", prompt_uid, gone)
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
            except (aiohttp.ClientConnectionError, _UnavailableError) as e:
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
            if response.status in _DOWN:
                raise _UnavailableError(f"{response.status}: {await response.text():.300}")
            if response.status >= 400:
                text = await response.text()
                error = _ClosedError if '"trajectory_closed"' in text else RolloutError
                raise error(f"{url} answered {response.status}: {text:.300}")
            return cast(dict[str, Any], await response.json())


class WorkerHandle(Protocol):
    """What `Producer` needs of a worker: a Ray handle from `start_workers`, or a local one."""

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]: ...


class _RemoteWorker:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        running = self._actor.run_group.remote(task, prompt_uid, n, channel, n_greedy)
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
    """Keeps the pool fed with groups of the prompt source until it is stopped.

    Args:
        pace: credit for beginning groups; without one only the pool's admission counts.
        drops_surplus: drop what a window leaves over (`sampling.drops_surplus`).
        n_greedy: greedy rollouts per group besides its `rollout.n` (ReMax's baseline).
    """

    def __init__(
        self,
        config: RolloutConfig,
        source: PromptSource,
        pool: DataPoolClient,
        workers: list[WorkerHandle],
        ledger: Ledger | None = None,
        *,
        pace: Pace | None = None,
        drops_surplus: bool = False,
        n_greedy: int = 0,
    ) -> None:
        self._config = config
        self._source = source
        self._pool = pool
        self._workers = workers
        self._pace = pace or Pace(None)
        self._drops_surplus = drops_surplus
        self._n_greedy = n_greedy
        self._n, self._min_n = config.n + n_greedy, config.min_n + n_greedy
        self._running: dict[str, asyncio.Task[None]] = {}
        self._opening: str | None = None
        self.ledger = ledger or Ledger()
        self._admitting: str | None = None
        self.idle = Idle(config.max_outstanding_groups)
        self.ends: Counter[str] = Counter()
        """How rollouts ended so far."""
        self.in_flight: dict[str, Task] = {}
        """Prompts handed out and not yet settled, by prompt_uid: what a resume re-issues."""

    def adopt(self, groups: Mapping[str, Task]) -> None:
        """These groups of a former process are ready in the pool, by prompt_uid."""
        self.in_flight.update(groups)
        self._pace.adopt(groups)

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Training took these groups."""
        self._pace.leased(prompt_uids)

    def refund(self, n: int) -> None:
        """`n` of the groups that training took are not trained: others take their place."""
        self._pace.refund(n)

    def settle(self, prompt_uid: str) -> None:
        """The group is trained (and its checkpoint durable), or dropped for good."""
        self.in_flight.pop(prompt_uid, None)

    async def close_window(self) -> None:
        """Before weights are published: with `drops_surplus`, what this window did not use is
        dropped and its prompts are issued again, in their order."""
        if not self._drops_surplus:
            return
        for prompt_uid in self._pace.left:
            if prompt_uid == self._opening:
                continue  # it waits for admission, and will be begun under the next weights
            # First, for the pool's event may be here before its answer: a surplus earns no credit.
            self._pace.leased([prompt_uid])
            try:
                await self._pool.drop_group(prompt_uid, SURPLUS)
            except (UnknownGroupError, GroupClosedError) as gone:
                log.info("%s is no surplus any more: %s", prompt_uid, gone)
                continue
            self._dropped(prompt_uid, SURPLUS, returned=True)
            if (running := self._running.get(prompt_uid)) is not None:
                running.cancel()

    def open_window(self) -> None:
        """The engines serve the weights that the next groups are to be begun under."""
        self._pace.open_window()

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

    async def evaluate(
        self, tasks: Sequence[Task], n: int, channel: str, *, beside_training: bool = False
    ) -> list[str]:
        """Run every task n times into `channel`; returns the prompt_uids, once all have ended.

        Args:
            beside_training: take no more than half of the workers' slots, so that training
            rollouts go on.
        """
        half = len(self._workers) * self._config.concurrency // (2 * n)
        places = asyncio.Semaphore(max(1, half if beside_training else len(tasks)))

        async def run(number: int, task: Task) -> str:
            prompt_uid = _new_uid(task)
            async with places:
                await self._start(prompt_uid, task, n, 1, channel)
                await self._run_group(number, task, prompt_uid, n, channel)
            return prompt_uid

        return list(await asyncio.gather(*(run(i, task) for i, task in enumerate(tasks))))

    async def _run(self, limit: int | None) -> None:
        numbers = iter(count() if limit is None else range(limit))
        begun = True
        while begun:
            begun = False
            async with asyncio.TaskGroup() as groups:
                for number in numbers:
                    try:
                        task = self._source.next()
                    except DataExhaustedError as e:
                        log.info("generation ends: %s", e)
                        break
                    begun = True
                    # Before the waits for credit and admission: a checkpoint meanwhile must know
                    # of it.
                    prompt_uid = _new_uid(task)
                    self._admitting = prompt_uid
                    self.in_flight[prompt_uid] = task
                    self.ledger.issued(prompt_uid, task["instance_id"])
                    with self.idle.blocked():
                        await self._pace.admit(prompt_uid)
                        self._opening = prompt_uid
                        await self._start(prompt_uid, task, self._n, self._min_n, TRAIN)
                        self._opening = None
                    self._admitting = None
                    running = groups.create_task(
                        self._run_group(number, task, prompt_uid, self._n, TRAIN)
                    )
                    self._running[prompt_uid] = running
                    self.idle.running(len(self._running))
                    running.add_done_callback(partial(self._ended, prompt_uid))
            # Once more: while the last groups ran some may have come back to the source.

    def _ended(self, prompt_uid: str, _: asyncio.Task[None]) -> None:
        self._running.pop(prompt_uid, None)
        self.idle.running(len(self._running))

    async def _follow_drops(self) -> None:
        """What the pool drops is settled, and another group may take its place; what it returns to
        the source is issued again."""
        cursor: str | None = None
        while True:
            page = await self._pool.get_events(
                cursor, channel=TRAIN, kinds=("dropped",), timeout_s=60
            )
            cursor = page.cursor
            if page.lost:
                await self._find_dropped()
            for event in page.events:
                reason = event.data["reason"]
                returned = event.data["returned"] or reason == SURPLUS
                self._dropped(event.prompt_uid, reason, returned=returned)
                self._pace.lost(event.prompt_uid)

    def _dropped(self, prompt_uid: str, reason: str, *, returned: bool) -> None:
        task = self.in_flight.pop(prompt_uid, None)
        self.ledger.dropped(prompt_uid, reason, returned=returned and task is not None)
        if task is not None and returned:
            self._source.put_back([task], reason)

    async def _find_dropped(self) -> None:
        """The pool was restarted and forgot its events: what it does not hold any more, and was
        not trained, it has dropped. Those prompts are issued again."""
        held_before = set(self.in_flight) - {self._admitting}
        live = await live_groups(self._pool)
        for prompt_uid in held_before - live:
            if prompt_uid not in self.ledger.open:
                continue  # trained; its lease was acked
            if (task := self.in_flight.pop(prompt_uid, None)) is not None:
                self.ledger.dropped(prompt_uid, FORGOTTEN, returned=True)
                self._source.put_back([task], FORGOTTEN)
                self._pace.lost(prompt_uid)

    async def _start(self, prompt_uid: str, task: Task, n: int, min_n: int, channel: str) -> None:
        await self._pool.open_group(
            prompt_uid,
            n,
            deadline_s=self._config.group_deadline_s,
            min_rollouts=min(min_n, n),
            metadata={"task": task} | ({GREEDY: True} if self._greedy_in(channel) else {}),
            channel=channel,
        )

    def _greedy_in(self, channel: str) -> int:
        return self._n_greedy if channel == TRAIN else 0

    async def _run_group(
        self, number: int, task: Task, prompt_uid: str, n: int, channel: str
    ) -> None:
        worker = self._workers[number % len(self._workers)]
        try:
            ends = await worker.run_group(task, prompt_uid, n, channel, self._greedy_in(channel))
        except ray.exceptions.RayActorError as e:
            # The worker died: its rollouts cannot finish, and the group must not wait for them.
            log.warning("rollout worker died while running %s: %s", prompt_uid, e)
            try:
                await self._pool.drop_group(prompt_uid, "rollout worker died", channel=channel)
            except DataPoolError as gone:
                log.info("%s was already closed: %s", prompt_uid, gone)
            ends = {"worker died": n}
        self.ends.update(ends)
        if channel == TRAIN and ends.get("complete", 0) < self._min_n:
            self.settle(prompt_uid)  # the pool drops it, counted there
            self.ledger.dropped(prompt_uid, "too few rollouts finished")


def _new_uid(task: Task) -> str:
    # Part of the gateway's URLs; an id may hold anything ("django/django-123").
    return f"{slug(task['instance_id'])}-{uuid.uuid4().hex[:8]}"
