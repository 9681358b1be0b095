"""This module brings batches of groups that are worth training, so that every update has a whole
batch, and settles them once a checkpoint holds them.

    lease ──► score ──► filter ──whole──► trained ──► checkpoint ──► settle: acked
      ▲                    │
      └─────── refill ─────┘ some were taken out

The next lease is on its way while a batch is trained; with windows (`sync`, `one_step_off`) a batch
is leased only after the publication. A group is *consumed* once it was scored, whatever a filter
says: its prompt has had its turn, and the checkpoint that holds it acks its lease.

Owns the leases and what was consumed since the last checkpoint. Does not own who brings groups
(`rollout/`, `live.py`), scores (`scoring.py`), the filters' rules (`sampling.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, by_lease
from stepwell.datapool.types import TRAIN, Group
from stepwell.trainer.algorithms.advantages.base import Estimator
from stepwell.trainer.algorithms.advantages.greedy import baselined
from stepwell.trainer.config import AsyncTrainingConfig, TrainerConfig
from stepwell.trainer.errors import StarvedError
from stepwell.trainer.flat_rewards import FlatRewards
from stepwell.trainer.live import GroupProducer
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.sampling import GroupFilter
from stepwell.trainer.scoring import Scorer, why_lost
from stepwell.trainer.validation import samples_path

log = logging.getLogger(__name__)

IN_FLIGHT_S = 1.0
"""For the answer to a request that the pool has served before generation had no prompt left."""
TOLD_S = 15.0
"""A trainer that waits for traffic says so this often."""


class Batches:
    """The batches of a run; see the module's docstring.

    Args:
        estimator: of advantages: says which rollouts are baselines and not trained.
        keeper: of leases on the channel that is trained.
        scored: hears of every group that was scored here.
        phases: told how long it took to wait and to score.
        folder: of the run.
        tell: shows the user a line.
    """

    def __init__(
        self,
        config: TrainerConfig,
        async_training: AsyncTrainingConfig,
        estimator: Estimator,
        *,
        pool: DataPoolClient,
        keeper: LeaseKeeper,
        producer: GroupProducer,
        scorer: Scorer,
        group_filter: GroupFilter,
        progress: Progress,
        phases: Phases,
        folder: Path,
        scored: Callable[[Sequence[Group]], None] = lambda groups: None,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self._config = config
        self._async = async_training
        self._estimator = estimator
        self._pool = pool
        self._keeper = keeper
        self._filter = group_filter
        self._progress = progress
        self._phases = phases
        self._folder = folder
        self._scored = scored
        self._tell = tell
        self._flat = FlatRewards(samples_path(folder, 0), within_group=estimator.group_baseline)
        self._consumed: set[str] = set()
        self.producer = producer
        self.scorer = scorer

    @property
    def consumed(self) -> frozenset[str]:
        """prompt_uids of the batches since the last checkpoint."""
        return frozenset(self._consumed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Groups are brought, and leases renewed, inside the block."""
        async with self.producer.running(), self._keeper:
            yield

    async def stream(self, until: float) -> AsyncGenerator[list[Group], None]:
        """The batches up to `until` updates; ends early when generation has no prompt left."""
        per_lease = self._async.require_batches
        coming: asyncio.Task[Sequence[Group] | None] | None = None
        try:
            while self._progress.updates < until:
                with self._phases("wait"):
                    leased = await self._arrived(coming or asyncio.create_task(self.lease()))
                if leased is None:
                    return
                more = self._progress.updates + per_lease < until
                # With windows, a lease before the publication would be of the window before.
                ahead = more and not self._async.has_windows
                coming = asyncio.create_task(self.lease()) if ahead else None
                yield await self._worth_training(leased)
        finally:
            if coming is not None:
                coming.cancel()

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """For a checkpoint that holds the groups `consumed`."""
        used = {*consumed, *self._keeper.settled}
        return {
            **self.producer.state_dict(consumed),
            "trained": by_lease(self._keeper.held, used),
        }

    async def settle(self, consumed: Set[str]) -> None:
        """The checkpoint that holds these groups is durable: ack them."""
        await self._keeper.settle(consumed)
        self._consumed -= consumed
        self.producer.settle(consumed)

    async def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """For the record of an optimizer step on `groups`."""
        states = (await self._pool.get_statistics(TRAIN))["groups"]
        return {
            **{f"pool/{s}": states[s] for s in ("ready", "open", "leased", "dropped")},
            **self.producer.metrics(),
            **self._flat.metrics(),
            **self._filter.metrics(),
            **self.scorer.metrics(groups),
        }

    async def _worth_training(self, leased: Sequence[Group]) -> list[Group]:
        """The scored groups of a batch; where a filter (or a missing score) took some out, others
        take their place, until it is whole or generation has ended."""
        groups: list[Group] = []
        consumed: set[str] = set()
        size, coming = len(leased), leased
        for refill in count():
            consumed |= {group.prompt_uid for group in coming}
            with self._phases("score"):
                scored = await self.scorer.score(coming, self.producer.min_n)
            self._flat.see(scored)
            self._scored(scored)
            kept = self._filter.keep(baselined(scored, self._estimator))
            groups += kept
            self.producer.refund(len(coming) - len(kept))
            if (missing := size - len(groups)) == 0:
                break
            self._filter.check_refills(refill)
            with self._phases("wait"):
                more = await self._arrived(asyncio.create_task(self.lease(missing)))
            if more is None:
                break
            coming = more
        self._consumed |= consumed
        return groups

    async def _arrived(
        self, coming: asyncio.Task[Sequence[Group] | None]
    ) -> Sequence[Group] | None:
        """What `lease` brings. Of traffic that stays away it is said what is waited for."""
        try:
            while self.producer.endless and not (await asyncio.wait({coming}, timeout=TOLD_S))[0]:
                self._tell(await self._why_waiting())
            return await coming
        finally:
            coming.cancel()

    async def lease(self, size: int | None = None) -> Sequence[Group] | None:
        """The next `size` ready groups, by default `require_batches` × `train_batch_size`; None
        when generation has no prompt left (all epochs are done) and fewer are there."""
        size = size or self._lease_size
        patience_s = None if self.producer.endless else self._config.starvation_timeout_s
        request = asyncio.ensure_future(self._keeper.lease(size, timeout_s=patience_s))
        try:
            while not request.done():
                ended = asyncio.ensure_future(self.producer.ended())
                await asyncio.wait({request, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()  # raises what made the producer fail
                ended.cancel()
                # The last groups, or word of a drop whose prompt is issued again, may be on their
                # way here: to ask anew would not bring them.
                await self._pool.get_statistics(TRAIN)
                await asyncio.wait({request}, timeout=IN_FLIGHT_S)
                if self.producer.has_ended and (not request.done() or request.result() is None):
                    return None
            if (groups := await request) is None:
                raise StarvedError(await self._why_starved())
        finally:
            request.cancel()
        self.producer.leased(group.prompt_uid for group in groups)
        return groups

    @property
    def _lease_size(self) -> int:
        return self._config.train_batch_size * self._async.require_batches

    async def _why_waiting(self) -> str:
        """What a trainer that traffic keeps waiting waits for, and what the pool holds."""
        stats = await self._pool.get_statistics(TRAIN)
        groups, trajectories = stats["groups"], stats["trajectories"]
        return (
            f"waiting for {self._lease_size} groups of traffic: {groups['ready']} are ready, "
            f"{groups['open']} open with {trajectories['open']} open trajectories; the engines "
            f"serve version {self._progress.version}"
        )

    async def _why_starved(self) -> str:
        stats = await self._pool.get_statistics(TRAIN)
        return (
            f"no {self._config.train_batch_size} groups became ready within "
            f"trainer.starvation_timeout_s = {self._config.starvation_timeout_s:g} s; "
            f"groups: {stats['groups']}; oldest open: {stats['oldest_open']}; "
            f"filtered: {dict(self._filter.dropped)}; "
            f"{await why_lost(self._pool, TRAIN, self.scorer, self._folder)}"
        )
