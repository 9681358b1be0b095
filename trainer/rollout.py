"""Runs agents against the gateway: n rollouts per prompt, bounded, timed, never scored by failure.

`RolloutWorker` (a Ray actor) runs the rollouts of whole groups on its own event loop and talks to
the gateway by HTTP only, like any agent. `Producer` (in the trainer's process) draws prompts and
hands groups to the workers; it waits for the credit of its window (`Pace`, in the modes that have
windows) and for the pool's admission (`max_outstanding_groups`).

One rollout::

    init_trajectory ──► agent(task, base_url, api_key) ──► complete_trajectory(reward)
        │                   │ raised, timed out
        │                   └──► abort_trajectory(reason) ──► next attempt, or the rollout is lost
        └──► "closed": the group's deadline came first

A failed rollout is aborted with its reason and never scored 0. Whose failure it was, the gateway
says (`GET /health`, `undisturbed_s`): an attempt during which the gateway was restarted, or lost
its engines or the pool, has failed through no fault of the agent's. It does not count against
`rollout.max_attempts`, and is made again as soon as an engine answers::

    attempt fails ──undisturbed──► the agent's: counted; the last one loses the rollout
        └──disturbed──► aborted, to be made again ──an engine answers──► next attempt
                            └──none within OUTAGE_S, or the group has closed──► INFRASTRUCTURE

A group that came out too small because of INFRASTRUCTURE, or whose worker died, is dropped and its
prompt issued again, `LOSSES` times at most; the producer draws no prompt until worker, gateway and
engine answer.

Does not own: scoring (an agent that returns None leaves its trajectory unscored, the trainer scores
it), group readiness (the pool).
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Protocol, cast

import aiohttp
import ray
from pydantic import SecretStr

from stepwell.datapool.errors import DataPoolError, GroupClosedError, UnknownGroupError
from stepwell.datapool.process import log_to_file, numbered_log, settle_heap
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import GREEDY, MAX_REWARD, TRAIN, is_reward
from stepwell.trainer.agents import load_agent
from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.data import DataExhaustedError, PromptSource, Task, slug
from stepwell.trainer.errors import RolloutError
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.metrics import Idle
from stepwell.trainer.reclaim import PRODUCER_GONE, live_groups, reclaim
from stepwell.trainer.sampling import SURPLUS, Pace

log = logging.getLogger(__name__)

GATEWAY_RESTART_S = 300.0
"""A gateway that died is back in seconds, on a busy machine and with its pool or engine down too in
minutes."""
OUTAGE_S = 60.0
"""A rollout that lost its engine waits for one so long, within its group."""
OUTAGES = 8
"""Attempts in a row that a rollout loses to infrastructure before its group is given up."""
OUTAGE_PAUSE_S = (0.25, 10.0)
"""Before the next attempt: doubles, from the first to the second."""
LOSSES = 10
"""Groups of a prompt that infrastructure lost, after which the prompt is given up: it is then the
agent that ends its worker, or the engine, whenever it is given that prompt."""
EVALUATION_ISSUES = 3
"""How often a prompt of an evaluation is issued whose groups are lost to infrastructure."""
RECOVERY_S = 900.0
"""The producer waits for workers, gateway and engine so long: an engine may load for ten minutes
(`engine.startup_timeout_s`). The run ends if they are not back: no rollout can be run any more."""
ANSWER_S = 120.0
"""The gateway answers within this, or is asked again; it waits for the pool for a minute itself."""
_DOWN = frozenset({429, 500, 502, 503, 504})
"""The gateway answers, but has no room, is stopping, or its pool or engine is away."""
GATEWAY_RETRY_S = 0.25
COMPLETE = "complete"
CLOSED = "closed"
"""How a rollout ended whose group was closed before it could."""
INFRASTRUCTURE = "infrastructure"
"""How a rollout ended that worker, gateway, engine or pool failed; and the reason under which its
group is dropped, to be issued again."""
TOO_FEW = "too few rollouts finished"
FORGOTTEN = "dropped_unseen"
"""Ledger's reason: the pool dropped the group and was restarted before it could say why."""


def read_reward(agent: str, returned: object) -> float | None:
    """What the agent at the path `agent` returned, as a reward.

    Raises:
        RolloutError: it is none. Nothing is converted: "347" would be a reward of 347.
    """
    if returned is None:
        return None
    if not is_reward(returned):
        named = returned if isinstance(returned, int | float) else f"a {type(returned).__name__}"
        raise RolloutError(
            f"{agent} returned {named}; return a number within ±{MAX_REWARD:g}, or None to leave "
            "the rollout unscored"
        )
    return float(returned)


class _UnavailableError(Exception):
    """To be asked again, after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class _ClosedError(RolloutError):
    """The trajectory has ended: completed, aborted, or closed by the pool with its group."""


class _UnreachableError(RolloutError):
    """No gateway answered for as long as it was waited for."""


class RolloutWorker:
    """Runs groups of rollouts; one per process (see `start_workers`).

    Args:
        gateway_urls: of the gateway's replicas.
        key: the gateway's admin key; None: it has no keys.
        log_file: what the process logs, and what agents print, goes there, too.
    """

    def __init__(
        self,
        config: RolloutConfig,
        gateway_urls: Sequence[str],
        key: SecretStr | None = None,
        log_file: Path | None = None,
    ) -> None:
        log_to_file(log_file)
        self._config = config
        self._gateways = tuple(gateway_urls)
        self._key = key
        self._agent = load_agent(config.agent or "")
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._traced: set[tuple[str, int | None]] = set()
        """Lines of code whose traceback is in the log: every rollout may fail at the same one."""
        settle_heap()

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        """Run `n` rollouts of `task`, the last `n_greedy` of them as greedy baselines; returns how
        they ended: {"complete": 7, "timeout": 1}.

        Raises:
            RolloutError: the gateway refuses to begin rollouts; none can be run.
        """
        marks: list[dict[str, Any]] = [{"rollout_index": index} for index in range(n)]
        for mark in marks[n - n_greedy :]:
            mark[GREEDY] = True
        ends = await asyncio.gather(
            *(self._rollout(task, prompt_uid, mark, channel) for mark in marks)
        )
        return dict(Counter(ends))

    async def ready(self, patience_s: float = RECOVERY_S) -> None:
        """Returns once the gateway answers and has an engine.

        Raises:
            RolloutError: not within `patience_s`; or it refuses this worker's key.
        """
        await self._ask([f"{gateway}/ready" for gateway in self._gateways], None, patience_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _rollout(
        self, task: Task, prompt_uid: str, mark: dict[str, Any], channel: str
    ) -> str:
        began, attempts = time.monotonic(), count()
        failures, outages, end = 0, 0, INFRASTRUCTURE
        while outages < OUTAGES:
            async with self._slots:
                final = failures + 1 == self._config.max_attempts
                attempt = next(attempts)
                end = await self._attempt(task, prompt_uid, mark, attempt, final, channel)
                if end == INFRASTRUCTURE:
                    if not await self._outlasts(outages, prompt_uid):
                        break
                    outages += 1
                    continue
            if end == CLOSED and await self._was_disturbed(self._gateways, began):
                return INFRASTRUCTURE
            failures, outages = failures + 1, 0
            if end in (COMPLETE, CLOSED) or failures == self._config.max_attempts:
                break
        return end

    async def _outlasts(self, outages: int, prompt_uid: str) -> bool:
        """Wait for gateway and engine; False: in vain."""
        shortest, longest = OUTAGE_PAUSE_S
        await asyncio.sleep(min(shortest * 2**outages, longest))
        try:
            await self.ready(OUTAGE_S)
        except _UnreachableError as e:
            log.warning("a rollout of %s waited in vain: %s", prompt_uid, e)
            return False
        return True

    async def _attempt(
        self,
        task: Task,
        prompt_uid: str,
        mark: dict[str, Any],
        attempt: int,
        final: bool,
        channel: str,
    ) -> str:
        """How it ended: COMPLETE, CLOSED, INFRASTRUCTURE, or what the agent failed with."""
        began = time.monotonic()
        try:
            started = await self._ask(
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
        except _ClosedError as closed:
            log.info("a rollout of %s comes too late: %s", prompt_uid, closed)
            return CLOSED
        except _UnreachableError as e:
            log.warning("a rollout of %s could not begin: %s", prompt_uid, e)
            return INFRASTRUCTURE
        base_url: str = started["base_url"]
        try:
            async with asyncio.timeout(self._config.timeout_s):
                returned = await self._agent(task, base_url, started.get("api_key", "none"))
            reward = read_reward(self._config.agent or "", returned)
            await self._ask([f"{base_url}/v1/complete_trajectory"], {"reward": reward})
        except TimeoutError:
            reason = "timeout"
        except asyncio.CancelledError:
            if (us := asyncio.current_task()) is None or us.cancelling():
                await self._abort(base_url, "cancelled", patience_s=0)
                raise
            reason = "CancelledError: the agent was cancelled from within"
        except _ClosedError as closed:
            log.info("a rollout of %s had ended already: %s", prompt_uid, closed)
            return CLOSED
        except (Exception, SystemExit) as e:  # an agent is foreign code
            reason = f"{type(e).__name__}: {e}"[:200]
            frame = traceback.extract_tb(e.__traceback__)[-1]
            if (place := (frame.filename, frame.lineno)) not in self._traced:
                self._traced.add(place)
                log.warning("the first rollout that failed there", exc_info=True)
        else:
            return COMPLETE
        origin = base_url.rsplit("/", 2)[0]
        disturbed = await self._was_disturbed([origin], began)
        log.warning(
            "rollout %d of %s failed (attempt %d%s): %s",
            mark["rollout_index"],
            prompt_uid,
            attempt,
            ", during an outage" if disturbed else "",
            reason,
        )
        if disturbed:
            reason = f"{INFRASTRUCTURE}: {reason}"
        if await self._abort(base_url, reason, will_retry=disturbed or not final):
            return reason.partition(":")[0]
        return CLOSED

    async def _abort(
        self,
        base_url: str,
        reason: str,
        *,
        will_retry: bool = False,
        patience_s: float = GATEWAY_RESTART_S,
    ) -> bool:
        """False: it had ended already, with its group. One that cannot be aborted stays open until
        its group's deadline."""
        body: dict[str, Any] = {"reason": reason}
        if patience_s:
            body["will_retry"] = will_retry
        try:
            answer = await self._ask([f"{base_url}/v1/abort_trajectory"], body, patience_s)
        except _ClosedError as closed:
            log.info("%s had ended already: %s", base_url, closed)
            return False
        except RolloutError as e:  # at the end of a run the gateway may be gone
            log.warning("%s could not be aborted (%s): %s", base_url, reason, e)
            return True
        return answer.get("outcome") != "late"

    async def _was_disturbed(self, gateways: Sequence[str], since: float) -> bool:
        """Whether a gateway was restarted, or lost engine or pool, after `since` (monotonic)."""
        try:
            answer = await self._ask([f"{gateway}/health" for gateway in gateways], None)
        except _UnreachableError:
            return True
        # The gateway's clock is not ours: both count seconds back from now.
        return float(answer["undisturbed_s"]) < time.monotonic() - since

    async def _ask(
        self,
        urls: Sequence[str],
        body: dict[str, Any] | None,
        patience_s: float = GATEWAY_RESTART_S,
    ) -> dict[str, Any]:
        """The answer of the first of `urls` that can be reached: to a POST of `body`, or to a GET
        without one. All that is sent here may be sent again.

        Raises:
            _ClosedError: the trajectory has ended.
            _UnreachableError: none answered within `patience_s`.
            RolloutError: the gateway refuses it.
        """
        if self._session is None:
            headers = {}
            if self._key is not None:
                headers["authorization"] = f"Bearer {self._key.get_secret_value()}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            )
        give_up = time.monotonic() + patience_s
        for url in cycle(urls):
            pause_s = GATEWAY_RETRY_S
            try:
                return await self._ask_once(self._session, url, body)
            except (aiohttp.ClientError, TimeoutError, _UnavailableError) as e:
                if isinstance(e, _UnavailableError):
                    pause_s = max(pause_s, e.seconds)
                if time.monotonic() + pause_s >= give_up:
                    raise _UnreachableError(
                        f"{url} could not be reached for {patience_s:g} s ({e or type(e).__name__})"
                    ) from e
            await asyncio.sleep(pause_s)
        raise RolloutError("there is no gateway to reach")

    @staticmethod
    async def _ask_once(
        session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None
    ) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        async with session.request(method, url, json=body) as response:
            if response.status in _DOWN:
                text = await response.text()
                after = response.headers.get("retry-after", "")
                seconds = min(float(after), 5.0) if after.isdecimal() else 0.0
                raise _UnavailableError(f"{response.status}: {text:.300}", seconds)
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

    async def ready(self) -> None: ...


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

    async def ready(self) -> None:
        give_up = time.monotonic() + RECOVERY_S
        while True:
            try:
                await self._actor.ready.remote()
                return
            except ray.exceptions.RayActorError as e:  # Ray is starting it again
                if time.monotonic() >= give_up:
                    raise RolloutError(
                        f"a rollout worker died and did not come back for {RECOVERY_S:g} s ({e})"
                    ) from e
            await asyncio.sleep(GATEWAY_RETRY_S)


def start_workers(
    config: RolloutConfig,
    gateway_urls: Sequence[str],
    key: SecretStr | None = None,
    log_dir: Path | None = None,
) -> list[WorkerHandle]:
    """`config.workers` actors; Ray restarts one that dies, and its groups are issued again.

    Args:
        log_dir: what they log and agents print goes to `rollout.log`, or `rollout_0.log`, …, there,
            too.
    """
    actor = ray.remote(RolloutWorker).options(
        num_cpus=0, max_restarts=-1, max_concurrency=1000, name=None
    )
    n = config.workers
    logs = [numbered_log(log_dir, "rollout", k, n) for k in range(n)]
    return [_RemoteWorker(actor.remote(config, gateway_urls, key, log)) for log in logs]


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
        self.min_n = config.min_n
        """Rollouts that a group is trained with at the least, `n_greedy` not counted."""
        self._n, self._min_n = config.n + n_greedy, config.min_n + n_greedy
        self._running: dict[str, asyncio.Task[None]] = {}
        self._drop_reasons: dict[str, str] = {}
        """Of groups that the pool dropped and whose rollouts still run: how those end says whose
        failure it was."""
        self._failed: set[int] = set()
        """Workers that may have lost a group to infrastructure and were not asked since."""
        self._recovering = asyncio.Lock()
        self._opening: str | None = None
        self.ledger = ledger or Ledger()
        self._admitting: str | None = None
        self.idle = Idle(config.max_outstanding_groups)
        self.ends: Counter[str] = Counter()
        """How rollouts ended so far."""
        self.in_flight: dict[str, Task] = {}
        """Prompts handed out and not yet settled, by prompt_uid: what a resume re-issues."""
        self._taken: set[str] = set()
        """Of `in_flight`, groups that training took."""
        self._losses: Counter[str] = Counter()
        """Groups lost to infrastructure, by instance_id."""
        self._generation: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._returned = asyncio.Event()
        """A prompt came back to the source since the last look."""

    endless = False

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """Where the source stands, and the prompts that a resume has to account for."""
        pending = {uid: task for uid, task in self.in_flight.items() if uid not in consumed}
        return {"source": deepcopy(self._source.state_dict()), "pending": pending}

    async def resume(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Go on where `state` was: what is ready is kept, other prompts of it are issued again."""
        if state is not None:
            self._source.load_state_dict(state["source"])
        reclaimed = await reclaim(
            self._pool,
            trained=state["trained"] if state else {},
            pending=state["pending"] if state else {},
            version=version,
        )
        if reclaimed.dropped:
            log.info("groups of the former process dropped: %s", dict(reclaimed.dropped))
        self.in_flight.update(reclaimed.kept)
        self._pace.adopt(reclaimed.kept)
        for prompt_uid in reclaimed.again:
            self.ledger.dropped(prompt_uid, PRODUCER_GONE, returned=True)
        self._source.put_back(reclaimed.again.values(), "resumed", counts=False)

    def metrics(self) -> dict[str, float]:
        """`rollouts/failed` so far, and how long generation could not go on."""
        return {
            "rollouts/failed": self.ends.total() - self.ends[COMPLETE],
            "wait/generation_saturated": self.idle.take(),
        }

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Training took these groups: whatever becomes of their leases, it has them."""
        uids = set(prompt_uids)
        self._taken |= uids
        self._pace.leased(uids)

    def refund(self, n: int) -> None:
        """`n` of the groups that training took are not trained: others take their place."""
        self._pace.refund(n)

    def settle(self, prompt_uids: Iterable[str]) -> None:
        """These groups are trained and their checkpoint is durable."""
        for prompt_uid in prompt_uids:
            self.in_flight.pop(prompt_uid, None)
            self._taken.discard(prompt_uid)

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
        """Generation goes on inside the block, for `limit` groups or to its end: what training does
        not take may come back when all prompts were drawn. The yielded task fails if generation
        does."""
        self._drained.clear()
        task = self._generation = asyncio.create_task(self._run(limit), name="producer")
        drops = asyncio.create_task(self._follow_drops(), name="drops")
        try:
            yield task
        finally:
            task.cancel()
            drops.cancel()
            await asyncio.gather(task, drops, return_exceptions=True)

    @property
    def has_ended(self) -> bool:
        """No prompt is left to draw, and no rollout runs."""
        return self._drained.is_set() or (self._generation is not None and self._generation.done())

    async def ended(self) -> None:
        """Returns once `has_ended`: until a prompt comes back there will be no more groups.

        Raises:
            RolloutError: generation failed (so does any error of its infrastructure).
        """
        drained = asyncio.ensure_future(self._drained.wait())
        try:
            watched = {drained} if self._generation is None else {drained, self._generation}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
        if self._generation is not None and self._generation.done():
            self._generation.result()

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
            async with places:
                for _ in range(EVALUATION_ISSUES):
                    await self._recovered()
                    prompt_uid = _new_uid(task)
                    await self._start(prompt_uid, task, n, 1, channel)
                    ends = await self._run_group(number, task, prompt_uid, n, channel)
                    if INFRASTRUCTURE not in ends:
                        break
                    await self._drop_lost(prompt_uid, channel)
            return prompt_uid

        return list(await asyncio.gather(*(run(i, task) for i, task in enumerate(tasks))))

    async def _run(self, limit: int | None) -> None:
        numbers = iter(count() if limit is None else range(limit))
        while True:
            self._returned.clear()
            if await self._draw_all(numbers):
                continue  # while the last groups ran some may have come back to the source
            if not self._returned.is_set():
                self._drained.set()
                if limit is not None:
                    return
            await self._returned.wait()

    async def _draw_all(self, numbers: Iterator[int]) -> bool:
        """Issue prompts until there is none, and wait for their rollouts; False: there was none."""
        begun = False
        async with asyncio.TaskGroup() as groups:
            for number in numbers:
                await self._recovered()
                try:
                    task = self._source.next()
                except DataExhaustedError as e:
                    log.info("no prompt is left: %s", e)
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
                running = groups.create_task(self._train_group(number, task, prompt_uid))
                self._running[prompt_uid] = running
                self.idle.running(len(self._running))
                running.add_done_callback(partial(self._ended, prompt_uid))
        return begun

    def _ended(self, prompt_uid: str, _: asyncio.Task[None]) -> None:
        self._running.pop(prompt_uid, None)
        self._drop_reasons.pop(prompt_uid, None)
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
                returned = event.data["returned"] or reason in (SURPLUS, INFRASTRUCTURE)
                running = self._running.get(event.prompt_uid)
                if running is not None and not running.done() and not returned:
                    self._drop_reasons[event.prompt_uid] = reason
                    # Its deadline may have passed for want of an engine.
                    self._failed.update(range(len(self._workers)))
                else:
                    self._dropped(event.prompt_uid, reason, returned=returned)
                self._pace.lost(event.prompt_uid)

    def _dropped(self, prompt_uid: str, reason: str, *, returned: bool) -> None:
        if prompt_uid in self._taken:
            return  # its lease ran out; it is trained from the copy that training has
        task = self.in_flight.pop(prompt_uid, None)
        if task is not None and reason == INFRASTRUCTURE:
            self._losses[task["instance_id"]] += 1
            if self._losses[task["instance_id"]] == LOSSES:
                returned = False
                log.error(
                    "%s is given up: worker, gateway or engine failed each of its %d groups",
                    *(task["instance_id"], LOSSES),
                )
        self.ledger.dropped(prompt_uid, reason, returned=returned and task is not None)
        if task is not None and returned:
            self._put_back(task, reason)

    def _put_back(self, task: Task, reason: str) -> None:
        of_its_own = reason not in (INFRASTRUCTURE, FORGOTTEN, SURPLUS)
        self._source.put_back([task], reason, counts=of_its_own)
        self._drained.clear()
        self._returned.set()

    async def _find_dropped(self) -> None:
        """The pool was restarted and forgot its events: what it does not hold any more, and was
        not trained, it has dropped. Those prompts are issued again."""
        held_before = set(self.in_flight) - {self._admitting} - self._taken
        live = await live_groups(self._pool)
        for prompt_uid in held_before - live:
            if prompt_uid not in self.ledger.open:
                continue  # trained; its lease was acked
            if (task := self.in_flight.pop(prompt_uid, None)) is not None:
                self.ledger.dropped(prompt_uid, FORGOTTEN, returned=True)
                self._put_back(task, FORGOTTEN)
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

    async def _train_group(self, number: int, task: Task, prompt_uid: str) -> None:
        ends = await self._run_group(number, task, prompt_uid, self._n, TRAIN)
        reason = self._drop_reasons.get(prompt_uid)
        if ends.get(COMPLETE, 0) >= self._min_n and reason is None:
            return  # it is served, at the latest at its deadline
        if INFRASTRUCTURE in ends:
            if await self._drop_lost(prompt_uid, TRAIN):
                self._dropped(prompt_uid, INFRASTRUCTURE, returned=True)
        else:
            self._dropped(prompt_uid, reason or TOO_FEW, returned=False)

    async def _run_group(
        self, number: int, task: Task, prompt_uid: str, n: int, channel: str
    ) -> dict[str, int]:
        index = number % len(self._workers)
        try:
            ends = await self._workers[index].run_group(
                task, prompt_uid, n, channel, self._greedy_in(channel)
            )
        except ray.exceptions.RayActorError as e:
            log.warning("rollout worker died while running %s: %s", prompt_uid, e)
            ends = {INFRASTRUCTURE: n}
        if INFRASTRUCTURE in ends:
            self._failed.add(index)
        self.ends.update(ends)
        return ends

    async def _drop_lost(self, prompt_uid: str, channel: str) -> bool:
        """Its rollouts cannot finish: nobody is to wait for the group. False: it was whole all the
        same (its worker died after the last rollout), and is with training."""
        try:
            await self._pool.drop_group(prompt_uid, INFRASTRUCTURE, channel=channel)
        except GroupClosedError as leased:
            log.info("%s is trained: %s", prompt_uid, leased)
            return False
        except DataPoolError as gone:
            log.info("%s was already closed: %s", prompt_uid, gone)
        return True

    async def _recovered(self) -> None:
        """Returns once the workers that lost a group are there again, with gateway and engine:
        prompts that are drawn meanwhile would be lost like the ones before.

        Raises:
            RolloutError: they are not, for too long.
        """
        async with self._recovering:
            while self._failed:
                index = min(self._failed)
                await self._workers[index].ready()
                self._failed.discard(index)


def _new_uid(task: Task) -> str:
    # Part of the gateway's URLs; an id may hold anything ("django/django-123").
    return f"{slug(task['instance_id'])}-{uuid.uuid4().hex[:8]}"
