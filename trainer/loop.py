"""The trainer's loop, to be read as the algorithm.

    lease ─► reward ─► advantage ─► proximal log-probs ─► weights ─► loss + optimizer step
      ▲                                                                       │
      └──── ack ◄── checkpoint ◄── publish weights v+1 ◄──────────────────────┘

Generation goes on meanwhile: the producer keeps the pool fed, the backend computes in its own
thread. Owns the order of things, the version table and the lag. Does not own the mathematics
(`advantages.py`, `off_policy.py`, `losses.py`), the model (`backends/`) or any process
(`cluster.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from backends.base import TokenBatch, TrainingBackend
from backends.config import PublishMode
from backends.engines.client import EngineClient
from backends.weights import Publication, WeightStore, publish
from datapool.client import DataPoolClient
from datapool.types import TRAIN, VAL, Group, Lease
from trainer.advantages import estimator, step_advantages
from trainer.checkpoint import CheckpointStore
from trainer.config import RunConfig
from trainer.data import PromptSource, Task
from trainer.errors import StarvedError
from trainer.losses import coefficients, make_loss_fn
from trainer.off_policy import correct, lags
from trainer.reclaim import reclaim
from trainer.rollout import Producer
from trainer.scoring import Scorer

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`score`: mean reward of the finished rollouts; `failed`: rollouts that have none."""

    step: int
    score: float
    tool_use: float
    rollouts: int
    failed: int


@dataclass(slots=True)
class Progress:
    """What a checkpoint must carry besides the model and the prompt source."""

    updates: int = 0
    """Optimizer steps so far."""
    version: int = 0
    """The policy version that was published last."""
    published: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Version -> updates when it was published."""
    train_s: float = 0.0
    """Wall time of training, evaluations not counted."""
    evaluations: list[Evaluation] = field(default_factory=list)


class Trainer:
    """Drives a `TrainingBackend` over the pool's groups; see the module's docstring."""

    def __init__(
        self,
        config: RunConfig,
        *,
        pool: DataPoolClient,
        producer: Producer,
        source: PromptSource,
        scorer: Scorer,
        backend: TrainingBackend,
        engines: Sequence[EngineClient],
        weights: WeightStore,
        checkpoints: CheckpointStore,
    ) -> None:
        self.config = config
        self.progress = Progress()
        self.pool = pool
        self.producer = producer
        self._source = source
        self._scorer = scorer
        self._backend = backend
        self._engines = list(engines)
        self._weights = weights
        self._checkpoints = checkpoints
        self._estimator = estimator(config.algorithm.advantage)
        self._loss_fn = make_loss_fn(config.algorithm.loss)
        self._unacked: list[Lease] = []
        self._publication: asyncio.Task[Publication] | None = None
        self._mark = self._renewed = time.monotonic()
        # One thread: torch keeps its own pool per thread, and the model is not to be shared.
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="backend")

    async def train(
        self, until: int, generation: asyncio.Task[None] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Optimizer steps until there are `until` of them or the data is used up, and a checkpoint;
        yields the metrics of each.

        Args:
            generation: the running producer; if it fails, so does the training that waits for it.
        """
        self._mark = time.monotonic()
        async for lease in self._leases(until, generation):
            async for record in self._train_on(lease):
                yield record
                self._mark = time.monotonic()  # what the consumer did meanwhile is not training
        await self.published()
        if self._unacked:
            await self.checkpoint()

    async def _train_on(self, lease: Lease) -> AsyncGenerator[dict[str, Any], None]:
        """One batch: `require_batches` optimizer steps, with π_prox taken once before the first."""
        self._unacked.append(lease)
        groups = await self._scorer.score(lease.groups)
        if not groups:
            return
        leased = time.monotonic()
        batch, mini_batches, metrics = await self._compute(self._prepare, groups)
        before = self.progress.updates
        for indices in mini_batches:
            update = await self._compute(self._backend.train_step, batch, self._loss_fn, indices)
            trained = time.monotonic()
            self.progress.updates += 1
            if self.progress.updates % self.config.async_training.trigger_parameter_sync_step == 0:
                await self.publish()
            published = time.monotonic()
            times = {
                "time/wait_s": leased - self._mark,
                "time/train_s": trained - leased,
                "time/publish_s": published - trained,
                "time/step_s": published - self._mark,
            }
            self.progress.train_s += published - self._mark
            uids = {batch.steps[i].prompt_uid for i in indices}
            trained_on = [g for g in groups if g.prompt_uid in uids]
            yield await self._record(metrics | update | times, trained_on)
            leased = self._mark
        # Between batches only: a checkpoint acks whole leases, and this one is now trained whole.
        every = self.config.trainer.checkpoint_every
        if self.progress.updates // every > before // every:
            await self.checkpoint()

    def _prepare(
        self, groups: Sequence[Group]
    ) -> tuple[TokenBatch, list[list[int]], dict[str, float]]:
        """Everything the loss needs, as columns of the batch; runs in the compute thread."""
        steps = [s for g in groups for s in g.steps]
        owner = [i for i, g in enumerate(groups) for _ in g.steps]
        parts = np.array_split(range(len(groups)), self.config.async_training.require_batches)
        mini_of_group = {int(g): m for m, part in enumerate(parts) for g in part}
        mini_of_step = [mini_of_group[g] for g in owner]

        batch: TokenBatch = self._backend.convert(steps)
        prox = self._backend.compute_log_probs(batch)
        columns = batch.columns
        if not self.config.async_training.use_rollout_log_probs:
            columns["rollout_log_probs"] = prox
        columns["prox_log_probs"] = prox
        columns["advantages"] = batch.expand(step_advantages(groups, self._estimator))
        columns["coef"] = coefficients(
            batch.lengths.tolist(),
            [s.trajectory_uid for s in steps],
            self.config.algorithm.loss,
            mini_batches=mini_of_step,
        )
        correction = correct(
            prox,
            columns["rollout_log_probs"],
            batch.lengths,
            lags(
                [s.policy_version for s in steps],
                self.progress.published,
                updates_now=self.progress.updates,
                updates_per_sync=self.config.async_training.trigger_parameter_sync_step,
            ),
            staleness_threshold=self.config.async_training.staleness_threshold,
            config=self.config.algorithm.off_policy,
            advantages=columns["advantages"],
        )
        columns["weights"] = correction.weights
        metrics = dict(correction.metrics)
        if (gap := self._log_prob_gap(batch)) is not None:
            metrics["log_prob_gap"] = gap
        mini_batches = [
            [i for i, m in enumerate(mini_of_step) if m == number] for number in range(len(parts))
        ]
        return batch, [m for m in mini_batches if m], metrics

    def _log_prob_gap(self, batch: TokenBatch) -> float | None:
        """max |log π - log μ| over tokens that the very weights being trained sampled: how exactly
        engine and trainer agree. None if the batch has no such token."""
        progress = self.progress
        if progress.published[progress.version] != progress.updates:
            return None
        fresh = batch.expand(
            [
                float(s.policy_version == progress.version and not s.version_spans)
                for s in batch.steps
            ]
        ).bool()
        gap = (batch.columns["prox_log_probs"] - batch.columns["rollout_log_probs"])[fresh].abs()
        gap = gap[torch.isfinite(gap)]
        return float(gap.max()) if len(gap) else None

    async def publish(self) -> None:
        """Give the engines the weights of now as the next policy version.

        Returns once they are written: training goes on while the engines load them. What fails
        then is raised by the next `publish` or `published`.
        """
        await self.published()
        version = self.progress.version + 1
        path = await self._compute(self._weights.write, version, self._backend.save_weights)
        # Before the first engine has them: their steps must find their version in the table.
        self.progress.version = version
        self.progress.published[version] = self.progress.updates
        await self.pool.advance_version(version)
        mode: PublishMode = "retract" if self.config.async_training.partial_rollout else "drain"
        self._publication = asyncio.create_task(
            publish(self._engines, path, version, mode, store=self._weights)
        )

    async def published(self) -> None:
        """Returns once every engine serves the version that was published last.

        Raises:
            WeightUpdateError: an engine does not.
        """
        if self._publication is not None:
            publication, self._publication = self._publication, None
            await publication

    async def checkpoint(self) -> None:
        """Make everything up to here durable, then ack the groups it was trained on."""
        trained = {x.lease_id: [g.prompt_uid for g in x.groups] for x in self._unacked}
        acked = {uid for uids in trained.values() for uid in uids}
        pending = {uid: t for uid, t in self.producer.in_flight.items() if uid not in acked}
        state = {
            "backend": await self._compute(self._backend.state_dict),
            "progress": replace(self.progress),
            "source": self._source.state_dict(),
            "pending": pending,
            "trained": trained,
        }
        await self._compute(self._checkpoints.save, self.progress.updates, state)
        for lease in self._unacked:
            await self.pool.ack(lease.lease_id)
        self._unacked.clear()
        for prompt_uid in acked:
            self.producer.settle(prompt_uid)

    async def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one, and see to it that the engines serve
        the weights that are trained: those of the checkpoint, or of the start."""
        state = await self._compute(self._checkpoints.load_latest)
        if state is not None:
            await self._compute(self._backend.load_state_dict, state["backend"])
            self.progress = state["progress"]
            self._source.load_state_dict(state["source"])
        reclaimed = await reclaim(
            self.pool,
            trained=state["trained"] if state else {},
            pending=state["pending"] if state else {},
            version=self.progress.version,
        )
        if reclaimed.dropped:
            log.info("groups of the former process dropped: %s", dict(reclaimed.dropped))
        self.producer.in_flight.update(reclaimed.kept)
        self._source.put_back(reclaimed.again)
        serving = [await engine.weight_version() for engine in self._engines]
        before = (await self.pool.get_statistics(TRAIN))["policy_version"]
        if state is not None or any(serving) or before:
            # A number that nobody has seen: steps of before must not pass for ours.
            self.progress.version = max([self.progress.version, before, *serving])
            await self.publish()
        return state is not None

    async def evaluate(self, tasks: Sequence[Task]) -> Evaluation:
        """Run the agent on `tasks` through the `"val"` channel, with the weights now published."""
        await self.published()
        n = self.config.trainer.eval_rollouts
        await self.producer.evaluate(list(tasks), n, VAL)
        groups: list[Group] = []
        while (lease := await self.pool.lease_batch(channel=VAL)) is not None:
            groups += await self._scorer.score(lease.groups)
            await self.pool.ack(lease.lease_id)
        trajectories = [t for g in groups for t in g.trajectories]
        if not trajectories:
            raise StarvedError(
                f"none of {len(tasks) * n} evaluation rollouts finished; {await self._losses(VAL)}"
            )
        evaluation = Evaluation(
            step=self.progress.updates,
            score=float(np.mean([t.reward for t in trajectories])),
            tool_use=tool_use(groups),
            rollouts=len(trajectories),
            failed=len(tasks) * n - len(trajectories),
        )
        self.progress.evaluations.append(evaluation)
        return evaluation

    def close(self) -> None:
        self._compute_thread.shutdown()
        self._backend.close()

    async def _leases(
        self, until: int, generation: asyncio.Task[None] | None
    ) -> AsyncGenerator[Lease, None]:
        """The batches up to `until` updates; the next one is on its way while one is trained."""
        per_lease = self.config.async_training.require_batches
        coming: asyncio.Task[Lease | None] | None = None
        try:
            while self.progress.updates < until:
                lease = await (coming or self._lease(generation))
                if lease is None:
                    return
                more = self.progress.updates + per_lease < until
                coming = asyncio.create_task(self._lease(generation)) if more else None
                yield lease
        finally:
            if coming is not None:
                coming.cancel()

    async def _lease(self, generation: asyncio.Task[None] | None) -> Lease | None:
        """The next `require_batches` × `groups_per_step` ready groups; None when generation has
        ended (all epochs are done) and fewer are left."""
        trainer = self.config.trainer
        size = trainer.groups_per_step * self.config.async_training.require_batches
        await self._renew()
        request = asyncio.ensure_future(
            self.pool.lease_batch(
                channel=TRAIN,
                batch_size=size,
                timeout_s=trainer.starvation_timeout_s,
            )
        )
        try:
            await asyncio.wait(
                {request, generation} if generation else {request},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if generation is not None and generation.done() and not request.done():
                generation.result()  # raises what made it fail
                return await self.pool.lease_batch(channel=TRAIN, batch_size=size)
            lease = await request
        finally:
            request.cancel()
        if lease is None:
            raise StarvedError(await self._why_starved())
        return lease

    async def _renew(self) -> None:
        """Keep what is trained and not yet in a checkpoint, well before its lease runs out."""
        if time.monotonic() - self._renewed < self.config.pool.channel(TRAIN).lease_s / 4:
            return
        self._renewed = time.monotonic()
        await asyncio.gather(*(self.pool.renew(held.lease_id) for held in self._unacked))

    async def _why_starved(self) -> str:
        stats = await self.pool.get_statistics(TRAIN)
        return (
            f"no {self.config.trainer.groups_per_step} groups became ready within "
            f"trainer.starvation_timeout_s = {self.config.trainer.starvation_timeout_s:g} s; "
            f"groups: {stats['groups']}; oldest open: {stats['oldest_open']}; "
            f"{await self._losses(TRAIN)}"
        )

    async def _losses(self, channel: str) -> str:
        """Why rollouts were lost, the commonest reasons first, and where to look."""
        reasons = (await self.pool.get_statistics(channel))["trajectories"]["abort_reasons"]
        common = sorted(reasons.items(), key=lambda item: -item[1])[:3]
        said = "; ".join(f"{count} × {reason}" for reason, count in common) or "none was aborted"
        return f"aborted: {said}. Look into the agent and {self.config.run.dir / 'logs'}"

    async def _record(self, metrics: dict[str, float], groups: Sequence[Group]) -> dict[str, Any]:
        trajectories = [t for g in groups for t in g.trajectories]
        stats = await self.pool.get_statistics(TRAIN)
        tokens = sum(s.n_tokens for g in groups for s in g.steps)
        return {
            "step": self.progress.updates,
            "time_s": self.progress.train_s,
            "policy_version": self.progress.version,
            "reward/mean": float(np.mean([t.reward for t in trajectories])),
            "tool_use": tool_use(groups),
            "groups": len(groups),
            "trajectories": len(trajectories),
            "steps_per_trajectory": sum(len(t.steps) for t in trajectories) / len(trajectories),
            "tokens_per_s": tokens / metrics["time/step_s"],
            "pool/ready": stats["groups"]["ready"],
            "pool/open": stats["groups"]["open"],
            "pool/leased": stats["groups"]["leased"],
            "pool/dropped": stats["groups"]["dropped"],
            "rollouts/failed": sum(self.producer.ends.values()) - self.producer.ends["complete"],
            **metrics,
        }

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute_thread, work, *args)


def tool_use(groups: Sequence[Group]) -> float:
    """Share of trajectories in which the agent called a tool."""
    trajectories = [t for g in groups for t in g.trajectories]
    called = [any(s.metadata.get("tool_calls") for s in t.steps) for t in trajectories]
    return float(np.mean(called)) if called else 0.0
