"""This module brings batches of groups that are worth training, so that every update has a whole
batch, and settles them once a checkpoint holds them.

    lease ──► score ──► filter ──whole──► trained ──► checkpoint ──► settle: acked
      ▲                    │
      └─────── refill ─────┘ some were taken out

The next batch is leased, and scored, while one is trained; with windows (`sync`, `one_step_off`) it
is leased only after the publication. A group is *consumed* once it was scored, whatever a filter
says: its prompt has had its turn, and the checkpoint that holds it acks its lease.

Rollouts and conversations (SFT) are mixed by `sampling.channels`: of the first k batches of B
groups ⌊k · B · share⌋ are conversations, so a share is exact on average and the same after a
resume. A batch waits for the channel that is late. Where the conversations are used up
(`data.sft.epochs`) their places go to rollouts; where the prompts are, the run ends. Conversations
are neither scored nor filtered.

Owns what a batch is made of, what was consumed of each channel since the last checkpoint, and the
wait for a producer that ends. Does not own the leases (`datapool/remote/lease_keeper.py`), who
brings groups (`rollout/`, `live.py`, `sft.py`), scores (`scoring.py`), the filters' rules
(`sampling.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from stepwell.backends.errors import BatchError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, by_lease
from stepwell.datapool.types import SFT, TRAIN, Group
from stepwell.trainer.config import AsyncTrainingConfig, TrainerConfig
from stepwell.trainer.errors import StarvedError
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.sampling import CHANNEL, GroupFilter, is_sft, sft_groups
from stepwell.trainer.scoring import Scorer, why_lost
from stepwell.trainer.threads import in_thread

log = logging.getLogger(__name__)

REPORT_S = 15.0
"""A trainer that waits for traffic says so this often."""
REPORT_REFILLS = 4
"""A batch that filters do not let become whole is told when it was filled up so often, and at twice
as many times each further time."""
IN_FLIGHT_S = 1.0
"""Wait for the answer to a request that the pool served before generation had no prompt left."""

MAX_PICTURE_BYTES = 4 * 2**30
"""Most bytes of PNGs that one batch holds in memory."""

_Coming: TypeAlias = tuple[asyncio.Task[Sequence[Group] | None], asyncio.Task[list[Group]]]
"""A batch that is on its way: its lease, and the scored ones of its rollouts (none where there is
no lease)."""


@dataclass(eq=False, slots=True)
class TrainedChannel:
    """A channel of the pool that batches are made of."""

    name: str
    producer: GroupProducer
    keeper: LeaseKeeper
    pool: DataPoolClient
    patience_s: float
    """Seconds in which a further group must become ready (`trainer.starvation_timeout_s`)."""
    consumed: set[str] = field(default_factory=set)
    """prompt_uids of the batches since the last checkpoint."""

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """State for a checkpoint that holds the groups `consumed`."""
        used = {*(self.consumed & consumed), *self.keeper.settled}
        trained = by_lease(self.keeper.held, used)
        return {**self.producer.state_dict(consumed), "trained": trained}

    async def take(self, size: int) -> Sequence[Group] | None:
        """The next `size` ready groups; None when the producer has ended and fewer are there. Of
        conversations the last batch may be smaller.

        Raises:
            StarvedError: they did not become ready in time.
            RolloutError: groups cannot be brought (so does any error of the infrastructure).
        """
        patience_s = None if self.producer.endless else self.patience_s
        request = asyncio.ensure_future(self.keeper.lease(size, timeout_s=patience_s))
        try:
            while not request.done():
                ended = asyncio.ensure_future(self.producer.wait_ended())
                try:
                    await asyncio.wait({request, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        ended.result()  # raises what made the producer fail
                finally:
                    ended.cancel()
                if request.done() and request.result() is not None:
                    break
                # The last groups, or word of a drop whose prompt is issued again, may be on their
                # way here: to ask anew would not bring them.
                await self.pool.get_statistics(self.name)
                await asyncio.wait({request}, timeout=IN_FLIGHT_S)
                if self.producer.has_ended and (not request.done() or request.result() is None):
                    request.cancel()
                    await asyncio.wait({request})  # else it would be served before the next one
                    return self._mark(await self._take_rest(size))
            if (groups := await request) is None:
                raise StarvedError(f"no {size} groups became ready")
        finally:
            request.cancel()
        return self._mark(groups)

    async def _take_rest(self, size: int) -> Sequence[Group] | None:
        """Conversations that are ready after the last was written, fewer than `size`."""
        if self.name != SFT:
            return None
        ready = (await self.pool.get_statistics(SFT))["groups"]["ready"]
        return await self.keeper.lease(min(ready, size), timeout_s=IN_FLIGHT_S) if ready else None

    def _mark(self, groups: Sequence[Group] | None) -> Sequence[Group] | None:
        """The groups as taken by training, with the channel that says by what loss."""
        if groups is None:
            return None
        self.producer.leased(group.prompt_uid for group in groups)
        return [
            replace(g, metadata={**g.metadata, CHANNEL: self.name})
            if self.name != TRAIN or CHANNEL in g.metadata  # by whoever opened it
            else g
            for g in groups
        ]


class Batches:
    """The batches of a run; see the module's docstring.

    Args:
        channels: those that are trained, rollouts first.
        sft_share: of the groups of a batch, those that are conversations.
        scored: called with every group that was scored here.
        phases: measures waiting and scoring.
        folder: of the run.
        notify: shows the user a line.
    """

    def __init__(
        self,
        config: TrainerConfig,
        async_training: AsyncTrainingConfig,
        channels: Sequence[TrainedChannel],
        scorer: Scorer,
        group_filter: GroupFilter,
        progress: Progress,
        phases: Phases,
        *,
        folder: Path,
        sft_share: float = 0.0,
        scored: Callable[[Sequence[Group]], None] = lambda groups: None,
        notify: Callable[[str], None] = log.info,
    ) -> None:
        self.channels = tuple(channels)
        self.scorer = scorer
        self._config = config
        self._async = async_training
        self._filter = group_filter
        self._progress = progress
        self._phases = phases
        self._folder = folder
        self._share = sft_share
        self._scored = scored
        self._notify_user = notify
        self._leased = 0
        """Batches that were asked for so far, those of before a resume included."""
        self._wanted = 0
        """Rollouts of the batch that was asked for last."""
        self._used_up = False
        """The conversations."""
        self._responses: tuple[float, int] | None = None
        """Time of the last record (monotonic, seconds), and the response tokens that had come by
        then."""

    @property
    def consumed(self) -> frozenset[str]:
        """prompt_uids of the batches since the last checkpoint."""
        return frozenset(uid for channel in self.channels for uid in channel.consumed)

    @property
    def producer(self) -> GroupProducer:
        """Brings rollouts; where none are trained, conversations."""
        return self.channels[0].producer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Groups are brought, and leases renewed, inside the block."""
        async with AsyncExitStack() as stack:
            for channel in self.channels:
                await stack.enter_async_context(channel.producer.running())
                await stack.enter_async_context(channel.keeper)
            yield

    async def stream(self, until: float) -> AsyncGenerator[list[Group], None]:
        """The batches up to `until` updates; ends early when generation has no prompt left."""
        per_lease = self._async.updates_per_batch
        coming: _Coming | None = None
        self._leased = self._progress.updates // self._async.ppo_epochs
        try:
            while self._progress.updates < until:
                coming = coming or self._begin()
                with self._phases("wait"):
                    leased = await self._wait_leased(coming[0])
                if leased is None:
                    return
                scored = coming[1]
                more = self._progress.updates + per_lease < until
                # With windows, a lease before the publication would be of the window before.
                ahead = more and not self._async.has_windows
                coming = self._begin() if ahead else None
                yield await self._worth_training(leased, scored)
        finally:
            for task in coming or ():
                task.cancel()

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """For a checkpoint that holds the groups `consumed`."""
        states = {channel.name: channel.state_dict(consumed) for channel in self.channels}
        return {**states.pop(TRAIN, {}), **states}

    async def resume(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Go on where `state_dict` was taken, also if there are other channels now."""
        for channel in self.channels:
            own = (state or {}).get(channel.name) if channel.name != TRAIN else state
            await channel.producer.resume(own if own and "trained" in own else None, version)

    async def settle(self, consumed: Set[str]) -> None:
        """The checkpoint that holds these groups is durable: ack them."""
        for channel in self.channels:
            await channel.keeper.settle(consumed)
            channel.consumed -= consumed
            channel.producer.settle(consumed)

    async def pictures(self, groups: Sequence[Group]) -> dict[str, bytes]:
        """Pictures that the steps of a batch name, PNG by digest.

        Raises:
            BatchError: they are too many bytes (`read_pictures`).
        """
        if not any(step.pictures for group in groups for step in group.steps):
            return {}
        keepers = {channel.name: channel.keeper for channel in self.channels}
        return await read_pictures((keepers[g.metadata.get(CHANNEL, TRAIN)], g) for g in groups)

    async def metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """For the record of an optimizer step on `groups`."""
        pool: dict[str, Any] = {}
        responses = 0
        for channel in reversed(self.channels):  # the first has the names without its channel's
            stats = await channel.pool.get_statistics(channel.name)
            prefix = "pool/" if channel is self.channels[0] else f"pool/{channel.name}/"
            states = stats["groups"]
            pool |= {prefix + s: states[s] for s in ("ready", "open", "leased", "dropped")}
            responses = stats["tokens"]["responses"]
        return {
            **pool,
            **self._generation(responses),
            **self.producer.metrics(),
            **self._filter.metrics(),
            **self.scorer.metrics(groups),
        }

    def _generation(self, n: int) -> dict[str, float]:
        """Response tokens per second into the pool since the last record; `n` came so far."""
        now = time.monotonic()
        (then, before), self._responses = self._responses or (now, n), (now, n)
        return {"tokens_per_s/generate": (n - before) / (now - then)} if now > then else {}

    def _begin(self) -> _Coming:
        """Begin to lease and score the next batch."""
        leased = asyncio.create_task(self.lease())
        scored = asyncio.create_task(self._first_scores(leased))
        scored.add_done_callback(lambda task: task.cancelled() or task.exception())  # was raised
        return leased, scored

    async def _first_scores(self, leased: asyncio.Task[Sequence[Group] | None]) -> list[Group]:
        groups = await asyncio.shield(leased)
        return await self._score([group for group in groups or () if not is_sft(group)])

    async def _score(self, groups: Sequence[Group]) -> list[Group]:
        return await self.scorer.score(groups, self.producer.min_n) if groups else []

    async def _worth_training(
        self, leased: Sequence[Group], first_scores: asyncio.Task[list[Group]]
    ) -> list[Group]:
        """The scored groups of a batch; where a filter (or a missing score) took some out, others
        take their place, until it is whole or generation has ended."""
        groups: list[Group] = []
        consumed: set[str] = set()
        conversations = [group for group in leased if is_sft(group)]
        coming: Sequence[Group] = [group for group in leased if not is_sft(group)]
        size = len(coming)
        for refill in count() if size else ():
            consumed |= {group.prompt_uid for group in coming}
            with self._phases("score"):
                scored = await (self._score(coming) if refill else first_scores)
            self.scorer.see(scored)
            self._scored(scored)
            kept = await self._ask_filter(self._filter.keep, scored)
            groups += kept
            self.producer.refund(len(coming) - len(kept))
            if (missing := size - len(groups)) == 0:
                break
            self._filter.check_refills(refill)
            if refill >= REPORT_REFILLS and not refill & (refill - 1):
                self._notify_user(self._why_refilled(refill, size, len(groups)))
            with self._phases("wait"):
                taking = asyncio.create_task(self._take(self.channels[0], missing))
                more = await self._wait_leased(taking, missing)
            if more is None:
                break
            coming = more
        if groups:
            size = self._batch_size - len(conversations)
            groups = await self._ask_filter(self._filter.best, groups, size)
        # After the last wait: a run that is interrupted in one has not trained this batch, and the
        # checkpoint that it saves acks what was consumed.
        self.channels[0].consumed |= consumed
        self.channels[-1].consumed |= {group.prompt_uid for group in conversations}
        return groups + conversations

    async def _ask_filter(self, ask: Callable[..., list[Group]], *args: Any) -> list[Group]:
        if self._filter.asks_functions:
            return await in_thread(ask, *args)
        return ask(*args)

    async def _wait_leased(
        self, coming: asyncio.Task[Sequence[Group] | None], wanted: int | None = None
    ) -> Sequence[Group] | None:
        """Return what `coming` brings; while traffic stays away, tell the user what is missing.

        Args:
            wanted: groups of traffic that it takes; None: those of the batch asked for last.
        """
        try:
            while self.producer.endless and not (await asyncio.wait({coming}, timeout=REPORT_S))[0]:
                self._notify_user(await self._why_waiting(wanted or self._wanted))
            return await coming
        finally:
            coming.cancel()

    async def lease(self) -> Sequence[Group] | None:
        """The groups of the next `require_batches` batches; None when generation has no prompt left
        (all epochs are done) and fewer are there."""
        size, before = self._config.train_batch_size, self._leased
        self._leased += self._async.require_batches
        share = self._share
        n_sft = sft_groups(self._leased, size, share) - sft_groups(before, size, share)
        if self._used_up:  # a window has credit for the rollouts beside them alone
            self.producer.refund(n_sft)
            n_sft = 0
        wanted = {SFT: n_sft, TRAIN: self._lease_size - n_sft}
        self._wanted = wanted[TRAIN]
        tasks = [
            asyncio.create_task(self._take(channel, n))
            for channel in self.channels
            if (n := wanted[channel.name])
        ]
        try:
            parts = await asyncio.gather(*tasks)
            groups = [group for part in parts for group in part or ()]
            if parts[0] is None and wanted[self.channels[0].name]:
                return None
            if self._share < 1 and (missing := self._lease_size - len(groups)):
                self._used_up = True
                self._notify_user("data.sft is used up: batches are of rollouts alone from now on")
                self.producer.refund(missing)
                tasks = [asyncio.create_task(self._take(self.channels[0], missing))]
                if (more := await tasks[0]) is None:
                    return None
                groups += more
            return groups
        finally:
            for task in tasks:
                task.cancel()

    async def _take(self, channel: TrainedChannel, size: int) -> Sequence[Group] | None:
        """`channel.take`, again while more groups become ready, whoever takes them; where it
        starves, with the causes and a table of where its groups are."""
        came = _came(await channel.pool.get_statistics(channel.name))
        while True:
            try:
                return await channel.take(size)
            except StarvedError as e:
                before, stats = came, await channel.pool.get_statistics(channel.name)
                if (came := _came(stats)) <= before:
                    raise StarvedError(await self._why_starved(channel, size, stats)) from e

    @property
    def _batch_size(self) -> int:
        """Groups that are trained at once."""
        return self._config.train_batch_size * self._async.require_batches

    @property
    def _lease_size(self) -> int:
        """Groups that a batch is made of."""
        return self._filter.taken or self._batch_size

    async def _why_waiting(self, wanted: int) -> str:
        """One line on what a trainer of traffic waits for, and what the pool holds."""
        stats = await self.channels[0].pool.get_statistics(TRAIN)
        groups, trajectories = stats["groups"], stats["trajectories"]
        still_open = trajectories["open"]
        remedy = " (each until POST /v1/complete_trajectory)" if still_open else ""
        return (
            f"waiting for {wanted} groups of traffic: {groups['ready']} are ready, "
            f"{groups['open']} open with {still_open} open trajectories{remedy}; the engines "
            f"serve version {self._progress.version}"
        )

    def _why_refilled(self, times: int, wanted: int, kept: int) -> str:
        """One line on a batch that has `kept` of the groups that it wants."""
        causes = [f"{n} × {reason}" for reason, n in self._filter.dropped.most_common(3)]
        if self.scorer.unscored:
            causes.append(f"trajectories without a score: {self.scorer.why_unscored()}")
        return (
            f"a batch was filled up {times} times and has {kept} of {wanted} groups; left out so "
            f"far: {', '.join(causes)}. Look into the reward, take other prompts or sampling."
            "filters, or let sampling.max_refills end the run"
        )

    async def _why_starved(
        self, channel: TrainedChannel, size: int, stats: Mapping[str, Any]
    ) -> str:
        """The causes, and a table of where the channel's groups are."""
        return (
            f"{await why_lost(channel.pool, channel.name, self.scorer, self._folder)}\n"
            f"no {size} groups became ready within "
            f"trainer.starvation_timeout_s = {channel.patience_s:g} s\n"
            + _states(stats, self._filter.dropped)
        )


async def read_pictures(leased: Iterable[tuple[LeaseKeeper, Group]]) -> dict[str, bytes]:
    """Pictures that the steps of groups name, each read by the keeper of its lease; PNG by digest.

    Raises:
        BatchError: they are more than `MAX_PICTURE_BYTES`.
    """
    found: dict[str, bytes] = {}
    for n, (keeper, group) in enumerate(leased, 1):
        found |= await keeper.pictures(group)
        if sum(map(len, found.values())) > MAX_PICTURE_BYTES:
            raise BatchError(
                f"the pictures of {n} groups of a batch have more than "
                f"{MAX_PICTURE_BYTES:,} bytes; train on fewer prompts in a batch, or send "
                "smaller pictures (max_pixels in the model's preprocessor_config.json)"
            )
    return found


def _came(stats: Mapping[str, Any]) -> int:
    """Groups of a channel that became ready and were not dropped."""
    return sum(stats["groups"][state] for state in ("ready", "leased", "acked"))


def _states(stats: Mapping[str, Any], filtered: Mapping[str, int]) -> str:
    """A table of the groups of a channel: state, how many, why they are there."""
    groups = stats["groups"]
    dropped = sorted(groups["drop_reasons"].items(), key=lambda item: -item[1])
    oldest = [f"{o['prompt_uid']} for {o['age_s']:.0f} s" for o in stats["oldest_open"][:1]]
    about = {
        "open": f"the oldest, {oldest[0]}" if oldest else "",
        "dropped": ", ".join(f"{n} × {reason}" for reason, n in dropped[:3]),
        "filtered": ", ".join(f"{n} × {reason}" for reason, n in filtered.items()),
    }
    rows = [(s, groups[s]) for s in ("submitted", "open", "ready", "leased", "acked", "dropped")]
    rows.append(("filtered", sum(filtered.values())))
    lines = [f"  {state:<9} {n:>8,}  {about.get(state, '')}".rstrip() for state, n in rows]
    return "\n".join(["  groups       number", *lines])
