"""This module brings groups and figures of agents that nobody here starts, so that live traffic
trains and is evaluated as rollouts of our own are.

    agents ──gateway──► "train" ──► leased, trained, acked with the checkpoint    Traffic
                   └──► "val", held out (`gateway.holdout`) ──► reward by version  TrafficValidator

A group of traffic comes once: nothing can be issued again, so nothing is dropped because a trainer
crashed. What was leased and is in no checkpoint is leased again; what a lost policy version sampled
is trained as off-policy data, by the log-probs that were recorded with it.

Owns: the account of such groups, and the evaluation of held-out traffic. Does not own how calls
become groups, or which are held out (the gateway), or what the pool keeps of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.types import TRAIN, VAL, Group
from stepwell.trainer.data import Task
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.reclaim import RESTARTED, drop_ended, settle_former
from stepwell.trainer.samples import write_evaluation
from stepwell.trainer.trajectory_metrics import versions_of
from stepwell.trainer.validation import (
    ENOUGH,
    Evaluation,
    Policy,
    Pooled,
    Validator,
    interval,
    only_of,
    rewards_by_prompt,
)

log = logging.getLogger(__name__)

LOST = -1
"""`weights_step` of a version that a crashed trainer published: no checkpoint has its weights."""


class Traffic(GroupProducer):
    """Account of groups that come by themselves. Prompts can be issued again, traffic cannot; tasks
    end, traffic does not."""

    endless = True

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """The ledger hears of a group when training takes it."""
        for uid in prompt_uids:
            if uid not in self.ledger.open:
                self.ledger.issued(uid, uid)

    async def resume(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Take out of the pool what the checkpoint, or the ledger before it, contains; all else
        that the former trainer had leased is ready again."""
        trained = state["trained"] if state is not None else {}
        dropped = await settle_former(self._pool, trained, TRAIN)
        # Of a salvaged journal: what was acked may be back.
        ended = await asyncio.to_thread(self.ledger.ended)
        dropped += await drop_ended(self._pool, ended, TRAIN)
        if dropped:
            log.info("%d groups that the checkpoint contains were dropped", len(dropped))
        await self._pool.release_leases(VAL, RESTARTED)


class TrafficValidator(Validator):
    """Evaluates by the rewards of held-out traffic: of what was completed in channel "val" since
    the last look, the mean per policy version; and of the last versions together, so many that
    the score says something. No task is run, and no publication waits.

    Args:
        lease_s: how long the pool holds a lease of channel "val" that is not renewed.
    """

    pins = False

    def __init__(self, *args: Any, lease_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lease_s = lease_s
        self._recent: deque[tuple[int, list[list[float]]]] = deque()
        """Versions that were evaluated last, with the rewards of each prompt: `ENOUGH` rollouts
        and those of one version more at most."""

    async def run(
        self, tasks: Sequence[Task], policy: Policy, *, beside_training: bool = False
    ) -> list[Evaluation]:
        """An evaluation for each version that answered held-out traffic since the last look, the
        oldest first; one sample table for all of them, and for all looks at one step."""
        async with LeaseKeeper(self._pool, VAL, self._lease_s) as keeper:
            groups = list[Group]()
            while (leased := await keeper.lease()) is not None:
                groups += leased
            evaluations = await self._evaluate(groups, policy)
            await keeper.settle(group.prompt_uid for group in groups)
        self._done += evaluations
        return evaluations

    async def _evaluate(self, groups: Sequence[Group], policy: Policy) -> list[Evaluation]:
        began = time.monotonic()
        scored = await self._scorer.score(groups)
        kept = [t for g in scored for t in g.trajectories]
        mixed = Counter(max(v) for t in kept if len(v := versions_of(t)) > 1)
        failed = Counter(max(versions_of(t)) for g in groups for t in g.trajectories)
        failed -= Counter(max(versions_of(t)) for t in kept)
        evaluations, rows = list[Evaluation](), list[dict[str, Any]]()
        for version in sorted({min(v) for t in kept if len(v := versions_of(t)) == 1}):
            pinned = [g for group in scored if (g := only_of(group, version)).trajectories]
            of = policy._replace(version=version)
            pooled = self._pool_with_former(version, rewards_by_prompt(pinned))
            evaluations.append(
                self._evaluation(
                    pinned,
                    of,
                    failed=failed[version],
                    weights_step=policy.published.get(version, LOST),
                    mixed=mixed[version],
                    seconds=time.monotonic() - began,
                    pooled=pooled,
                )
            )
            rows += await asyncio.to_thread(self._samples, pinned, of)
        if rows:
            # With what an earlier look at this step found, last: its traffic does not come again,
            # but for groups that were written and not acked.
            await asyncio.to_thread(write_evaluation, self._folder, policy.step, rows, add=True)
        return evaluations

    def _pool_with_former(self, version: int, prompts: list[list[float]]) -> Pooled:
        """The score of this version with those before it, as few as make `ENOUGH` rollouts."""
        self._recent.append((version, prompts))

        def rollouts(of: Iterable[tuple[int, list[list[float]]]]) -> int:
            return sum(len(rewards) for _, prompts in of for rewards in prompts)

        while rollouts(islice(self._recent, 1, None)) >= ENOUGH:
            self._recent.popleft()
        every = [rewards for _, prompts in self._recent for rewards in prompts]
        n = rollouts(self._recent)
        low, high = interval(every) or (None, None)
        return Pooled(sum(map(sum, every)) / n, low, high, n, self._recent[0][0])
