"""This module keeps the pool fed with groups of the prompt source, so that training never starves
and no prompt is lost, whatever fails.

`Producer` (in the trainer's process) draws prompts and hands groups to the workers; it waits for
the credit of its window (`Pace`, in the modes that have windows) and for the pool's admission
(`max_outstanding_groups`). A prompt's way::

    source ──credit, admission──► group open ──worker──► ended ─┬─ enough rollouts: it is served
       ▲                                                        ├─ too few: dropped for good
       └──────────────── put back ◄── dropped by the pool ◄─────┴─ lost to INFRASTRUCTURE

A group that came out too small because of INFRASTRUCTURE, or whose worker died, is dropped and its
prompt issued again, `LOSSES` times at most; no prompt is drawn until worker, gateway and engine
answer. An agent that loses `LOST_IN_A_ROW` groups by its own error ends the run. Does not own how
one rollout is run (`worker.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any

import ray

from stepwell.datapool.core.readiness import DEADLINE
from stepwell.datapool.errors import DataPoolError, GroupClosedError, UnknownGroupError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import GREEDY, SFT, TRAIN
from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.config.environment import ENVIRONMENT
from stepwell.trainer.config.harness import HARNESS
from stepwell.trainer.data import PromptSource, Task, slug
from stepwell.trainer.data.tasks import without_pictures
from stepwell.trainer.errors import DataExhaustedError, RolloutError
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.metrics import Idle
from stepwell.trainer.plain import plain
from stepwell.trainer.reclaim import ISSUED, PRODUCER_GONE, live_groups, reclaim
from stepwell.trainer.rollout.worker import (
    CLOSED,
    COMPLETE,
    INFRASTRUCTURE,
    NO_STEPS,
    TIMEOUT,
    WorkerHandle,
)
from stepwell.trainer.sampling import SURPLUS, Pace
from stepwell.trainer.scoring import MEANINGS

log = logging.getLogger(__name__)

LOSSES = 10
"""Groups of a prompt in a row that infrastructure lost, after which the prompt is given up: it is
then the agent that ends its worker, or the engine, whenever it is given that prompt."""
EVALUATION_ISSUES = 3
"""Times that a prompt of an evaluation is issued if its groups are lost to infrastructure."""
LOST_IN_A_ROW = 8
"""Groups in a row, by order of ending, of which the agent finished no rollout, that end the run."""
FAILED_IN_A_ROW = 32
"""Rollouts that those groups must have at least: with small groups chance loses eight in a row."""
LOST = "group lost by the agent"
"""Kind of what the user sees a line of once, as WORKER_DIED and each kind of a rollout's end."""
WORKER_DIED = "worker died"
TOO_FEW = "too few rollouts finished"
FORGOTTEN = "dropped_unseen"
"""Ledger's reason: the pool dropped the group and was restarted before it could say why."""


class Producer(GroupProducer):
    """Keeps the pool fed with groups of the prompt source until it is stopped.

    Args:
        pace: credit for beginning groups; without one only the pool's admission counts.
        drops_surplus: drop what a window leaves over (`sampling.drops_surplus`).
        n_greedy: greedy rollouts per group besides its `rollout.n` (ReMax's baseline).
        channel: Channel to feed.
        notify: Shows the user a line.
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
        channel: str = TRAIN,
        notify: Callable[[str], None] = log.warning,
    ) -> None:
        self._notify_user = notify
        self._config = config
        self._channel = channel
        super().__init__(pool, ledger or Ledger(), config.min_n)
        self._source = source
        self._workers = workers
        self._pace = pace or Pace(None)
        self._drops_surplus = drops_surplus
        self._n_greedy = n_greedy
        self._n, self._min_n = config.n + n_greedy, config.min_n + n_greedy
        self._running: dict[str, asyncio.Task[None]] = {}
        self._drop_reasons: dict[str, str] = {}
        """Drop reasons, by prompt_uid, of groups whose rollouts still run: how those end says whose
        failure it was."""
        self._failed: set[int] = set()
        """Workers that may have lost a group to infrastructure and were not asked since."""
        self._recovering = asyncio.Lock()
        self._opening: str | None = None
        self._admitting: str | None = None
        self.idle = Idle(config.max_outstanding_groups)
        self.ends: Counter[str] = Counter()
        """Rollouts that ended so far, by their end; failures by their kind."""
        self._shown: set[str] = set()
        """Kinds of failures that the user has seen a line of."""
        self._lost_in_a_row = 0
        """Groups that the agent lost since a rollout finished."""
        self._causes: Counter[str] = Counter()
        """Reasons of their rollouts."""
        self.in_flight: dict[str, Task] = {}
        """Prompts handed out and not yet settled, by prompt_uid: what a resume re-issues."""
        self._taken: set[str] = set()
        """Groups of `in_flight` that training took, by prompt_uid."""
        self._losses: Counter[str] = Counter()
        """Groups in a row that a prompt lost to infrastructure, by instance_id."""
        self._generation: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._returned = asyncio.Event()
        """A prompt came back to the source since the last look."""

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """Return the position of the source, and the prompts that a resume has to account for."""
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
            channel=self._channel,
        )
        if reclaimed.dropped:
            log.info("groups of the former process dropped: %s", dict(reclaimed.dropped))
        self.in_flight.update(reclaimed.kept)
        self._pace.adopt(reclaimed.kept)
        for prompt_uid in reclaimed.again:
            self.ledger.dropped(prompt_uid, PRODUCER_GONE, returned=True)
        self._source.put_back(reclaimed.again.values())

    def metrics(self) -> dict[str, float]:
        """`rollouts/failed` so far, passes over the data, and how long generation could not go
        on."""
        return {
            "data/epoch": self._source.epoch,
            "rollouts/failed": self.ends.total() - self.ends[COMPLETE],
            "wait/generation_saturated": self.idle.take(),
        }

    def leased(self, prompt_uids: Iterable[str]) -> None:
        uids = set(prompt_uids)
        self._taken |= uids
        self._pace.leased(uids)

    def refund(self, n: int) -> None:
        self._pace.refund(n)

    def settle(self, prompt_uids: Iterable[str]) -> None:
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
                await self._pool.drop_group(prompt_uid, SURPLUS, self._channel)
            except (UnknownGroupError, GroupClosedError) as gone:
                log.info("%s is no surplus any more: %s", prompt_uid, gone)
                continue
            self._dropped(prompt_uid, SURPLUS, returned=True)
            if (running := self._running.get(prompt_uid)) is not None:
                running.cancel()

    def open_window(self) -> None:
        self._pace.open_window()

    @asynccontextmanager
    async def running(self, limit: int | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """Generation goes on inside the block, for `limit` groups or to its end: what training does
        not take may come back when all prompts were drawn. The yielded task fails if generation
        does."""
        self._drained.clear()
        drops = asyncio.create_task(self._follow_drops(), name="drops")
        generation = self._run_beside(drops, limit)
        task = self._generation = asyncio.create_task(generation, name="generation")
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

    async def wait_ended(self) -> None:
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

        Raises:
            RolloutError: not one rollout finished, and all by the agent's own errors.
        """
        all_ends: Counter[str] = Counter()
        slots = len(self._workers) * self._config.concurrency
        places = asyncio.Semaphore(max(1, slots // (2 * n) if beside_training else len(tasks)))
        of_a_worker = math.ceil(len(tasks) / len(self._workers)) * n
        turns = math.ceil(of_a_worker / self._config.concurrency)

        async def run(number: int, task: Task) -> str:
            async with places:
                for _ in range(EVALUATION_ISSUES):
                    await self._wait_recovered()
                    prompt_uid = new_uid(task)
                    await self._start(prompt_uid, task, n, 1, channel, turns=turns)
                    ends = await self._run_group(number, task, prompt_uid, n, channel)
                    self._show_failures(prompt_uid, ends)
                    if INFRASTRUCTURE not in ends:
                        break
                    await self._drop_lost(prompt_uid, channel)
            all_ends.update(ends)
            return prompt_uid

        running = [asyncio.create_task(run(i, task)) for i, task in enumerate(tasks)]
        try:
            uids = list(await asyncio.gather(*running))
        finally:
            for each in running:  # after one that failed
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if own := _by_own_error(all_ends):
            raise RolloutError(
                f"{self._common_causes(own)}: {self._named} finished none of {all_ends.total()} "
                f"evaluation rollouts; {_remedy(own)}, and run the same command again"
            )
        return uids

    async def _run_beside(self, drops: asyncio.Task[None], limit: int | None) -> None:
        """Run as `_run` does; fail also if `drops` does, for then what the pool drops would keep
        its place and its prompt."""
        run = asyncio.create_task(self._run(limit), name="producer")
        try:
            await asyncio.wait({run, drops}, return_when=asyncio.FIRST_COMPLETED)
            if drops.done():
                drops.result()
            await run
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

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
                await self._wait_recovered()
                try:
                    task = self._source.next()
                except DataExhaustedError as e:
                    log.info("no prompt is left: %s", e)
                    break
                begun = True
                # Before the waits for credit and admission: a checkpoint meanwhile must know
                # of it.
                prompt_uid = new_uid(task)
                self._admitting = prompt_uid
                self.in_flight[prompt_uid] = task
                self.ledger.issued(prompt_uid, task["instance_id"], self._channel)
                with self.idle.blocked():
                    await self._pace.admit(prompt_uid)
                    self._opening = prompt_uid
                    await self._start(prompt_uid, task, self._n, self._min_n, self._channel)
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
        """Settle the groups that the pool drops, so that others may take their place, and issue
        again those that it returns to the source."""
        cursor: str | None = None
        while True:
            page = await self._pool.get_events(
                cursor, channel=self._channel, kinds=("dropped",), timeout_s=60
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
                del self._losses[task["instance_id"]]  # it has as many tries in the next epoch
                log.error(
                    "%s is given up: worker, gateway or engine failed each of its %d groups",
                    task["instance_id"],
                    LOSSES,
                )
        self.ledger.dropped(prompt_uid, reason, returned=returned and task is not None)
        if task is not None and returned:
            self._put_back(task)

    def _put_back(self, task: Task) -> None:
        self._source.put_back([task])
        self._drained.clear()
        self._returned.set()

    async def _find_dropped(self) -> None:
        """The pool was restarted and forgot its events: what it does not hold any more, and was
        not trained, it has dropped. Those prompts are issued again."""
        held_before = set(self.in_flight) - {self._admitting} - self._taken
        live = await live_groups(self._pool, self._channel)
        for prompt_uid in held_before - live:
            if prompt_uid not in self.ledger.open:
                continue  # trained; its lease was acked
            if (task := self.in_flight.pop(prompt_uid, None)) is not None:
                self.ledger.dropped(prompt_uid, FORGOTTEN, returned=True)
                self._put_back(task)
                self._pace.lost(prompt_uid)

    async def _start(
        self, prompt_uid: str, task: Task, n: int, min_n: int, channel: str, *, turns: int = 1
    ) -> None:
        """Open the group of a prompt.

        Args:
            turns: times that rollouts take all slots until the last of this group has had one.
        """
        if channel == SFT:  # a conversation is in its own steps
            task = {k: task[k] for k in ("instance_id", "data_source")}
        await self._pool.open_group(
            prompt_uid,
            n,
            deadline_s=turns * self._config.group_deadline_s,
            min_rollouts=min(min_n, n),
            metadata={"task": as_metadata(task), ISSUED: True}
            | ({GREEDY: True} if self._greedy_in(channel) else {}),
            channel=channel,
        )

    def _greedy_in(self, channel: str) -> int:
        return self._n_greedy if channel == self._channel else 0

    async def _train_group(self, number: int, task: Task, prompt_uid: str) -> None:
        ends = await self._run_group(number, task, prompt_uid, self._n, self._channel)
        await self._end_group(prompt_uid, ends)
        self._watch_agent(prompt_uid, ends)
        self._show_failures(prompt_uid, ends)

    async def _end_group(self, prompt_uid: str, ends: Mapping[str, int]) -> None:
        reason = self._drop_reasons.get(prompt_uid)
        if ends.get(COMPLETE, 0) >= self._min_n and reason is None:
            if (task := self.in_flight.get(prompt_uid)) is not None:
                self._losses.pop(task["instance_id"], None)
            return  # it is served, at the latest at its deadline
        if INFRASTRUCTURE in ends:
            if await self._drop_lost(prompt_uid, self._channel):
                self._dropped(prompt_uid, INFRASTRUCTURE, returned=True)
        else:
            self._dropped(prompt_uid, reason or TOO_FEW, returned=False)

    def _watch_agent(self, prompt_uid: str, ends: Mapping[str, int]) -> None:
        """Count the groups that the agent's own errors lose: an agent that never works would use up
        the data in silence.

        Raises:
            RolloutError: too many in a row.
        """
        if COMPLETE in ends:
            self._lost_in_a_row = 0
            self._causes.clear()
            return
        if not (own := _by_own_error(ends)):
            return
        self._lost_in_a_row += 1
        self._causes.update(own)
        agent, causes = self._named, self._common_causes(self._causes)
        if LOST not in self._shown:
            self._shown |= {LOST, *map(_kind, ends)}
            self._notify_user(
                f"{causes}: {agent} lost all rollouts of {prompt_uid}; {self._look(own)}; "
                f"{LOST_IN_A_ROW} such groups in a row end the run"
            )
        if self._lost_in_a_row >= LOST_IN_A_ROW and self._causes.total() >= FAILED_IN_A_ROW:
            raise RolloutError(
                f"{causes}: {agent} finished no rollout of {self._lost_in_a_row} "
                f"groups in a row; {_remedy(self._causes)}, and run the same command again"
            )

    def _show_failures(self, prompt_uid: str, ends: Mapping[str, int]) -> None:
        """Show the user the first failure of each kind; later ones are counted alone."""
        hidden = {COMPLETE, CLOSED, INFRASTRUCTURE}
        if self._drop_reasons.get(prompt_uid) == DEADLINE and INFRASTRUCTURE not in ends:
            hidden.remove(CLOSED)
        for end in ends:
            if end in hidden or _kind(end) in self._shown:
                continue
            self._shown.add(_kind(end))
            self._notify_user(
                f"{self._meaning(end)}: {ends[end]} of {sum(ends.values())} rollouts of "
                f"{prompt_uid} ended so ({self._named}); {self._look([end])}; later ones of this "
                "kind are only counted"
            )

    def _common_causes(self, causes: Counter[str]) -> str:
        """Return the commonest causes as people read them, the first first."""
        return ", ".join(f"{n} × {self._meaning(end)}" for end, n in causes.most_common(3))

    def _meaning(self, end: str) -> str:
        if end == CLOSED:
            return f"closed (rollout.group_deadline_s is {self._config.group_deadline_s:g})"
        if end != TIMEOUT:
            return MEANINGS.get(end, end)
        if (harness := self._config.harness) is not None:
            return f"timeout (rollout.harness.timeout_s is {harness.timeout_s:g})"
        return f"timeout (rollout.timeout_s is {self._config.timeout_s:g})"

    @property
    def _named(self) -> str:
        """The agent by its key in the configuration."""
        agent = self._config.agent
        return f"rollout.{agent}" if agent in (HARNESS, ENVIRONMENT) else f"rollout.agent = {agent}"

    def _look(self, own: Iterable[str]) -> str:
        """The place to look at, or the remedy: ends without an error have no traceback."""
        if {*own} <= {TIMEOUT, NO_STEPS, CLOSED}:
            return _remedy(own)
        if self._config.harness is not None:
            return "logs/harness has what it printed"
        return "the worker's log has the traceback"

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
            if WORKER_DIED not in self._shown:
                self._shown.add(WORKER_DIED)
                why = " ".join(str(e).split())[:200]
                self._notify_user(
                    f"rollout worker {index} died while it ran {prompt_uid} ({why}); Ray starts it "
                    "again, its groups are issued again, and later deaths are only logged"
                )
            ends = {INFRASTRUCTURE: n}
        if INFRASTRUCTURE in ends:
            self._failed.add(index)
        for end, times in ends.items():
            self.ends[_kind(end)] += times
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

    async def _wait_recovered(self) -> None:
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


def _kind(end: str) -> str:
    """Kind of a rollout's end: of an error its type."""
    return end.partition(":")[0]


def _by_own_error(ends: Mapping[str, int]) -> Counter[str]:
    """Return the agent's own errors, if no rollout finished and none was lost to the
    infrastructure."""
    if COMPLETE in ends or INFRASTRUCTURE in ends:
        return Counter()
    return Counter({end: n for end, n in ends.items() if end != CLOSED})


def _remedy(own: Iterable[str]) -> str:
    if {*own} == {CLOSED}:
        return "raise it, or rollout.concurrency, or have fewer rollout.max_outstanding_groups"
    return "raise it, or make the agent faster" if {*own} == {TIMEOUT} else "correct the agent"


def as_metadata(task: Task) -> Any:
    """`task` as the metadata of its group carry it, without the bytes of its pictures."""
    return plain(without_pictures(task) if "messages" in task else task)


def new_uid(task: Task) -> str:
    # Part of the gateway's URLs; an id may hold anything ("django/django-123").
    return f"{slug(task['instance_id'])}-{uuid.uuid4().hex[:8]}"
