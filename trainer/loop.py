"""The trainer's loop, to be read as the algorithm.

    lease ─► reward ─► advantage ─► proximal log-probs ─► weights ─► loss + optimizer step
      ▲                                                                       │
      └──── ack ◄── checkpoint ◄── publish weights v+1 ◄──────────────────────┘

Generation goes on meanwhile: a producer (`producers.py`) keeps the pool fed, the backend computes
in its own thread. Owns the order of things, the version table and the lag. Does not own the
mathematics (`algorithms/`), the model (`backends/`) or any process
(`cluster.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stepwell.backends.base import TokenBatch, TrainingBackend
from stepwell.backends.critic import Critic
from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, by_lease
from stepwell.datapool.types import TRAIN, Group
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.advantages.greedy import baselined
from stepwell.trainer.algorithms.kl import kl_in_reward, next_coef
from stepwell.trainer.algorithms.losses import loss_columns, make_loss_fn, untruncated
from stepwell.trainer.algorithms.off_policy.correction import correct
from stepwell.trainer.algorithms.off_policy.lag import lags, proximal_log_probs
from stepwell.trainer.checkpoint import (
    CheckpointStore,
    Resume,
    checkpoint_due,
    rng_state,
    set_rng_state,
)
from stepwell.trainer.config import (
    AlgorithmConfig,
    AsyncTrainingConfig,
    PublishConfig,
    TrainerConfig,
)
from stepwell.trainer.data import Task
from stepwell.trainer.errors import INTERRUPTED, StarvedError
from stepwell.trainer.flat_rewards import FlatRewards
from stepwell.trainer.metrics import Phases
from stepwell.trainer.producers import GroupProducer
from stepwell.trainer.progress import Progress
from stepwell.trainer.publication import Publisher
from stepwell.trainer.recording import record_batch
from stepwell.trainer.releases import Releases
from stepwell.trainer.sampling import GroupFilter
from stepwell.trainer.scoring import Scorer, why_lost
from stepwell.trainer.validation import (
    Evaluation,
    Policy,
    Validator,
    samples_path,
    tool_use,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

IN_FLIGHT_S = 1.0
"""For the answer to a request that the pool has served before generation had no prompt left."""
TOLD_S = 15.0
"""A trainer that waits for traffic says so this often."""


class Trainer:
    """Drives a `TrainingBackend` over the pool's groups; see the module's docstring.

    Args:
        keeper: of leases on the channel that is trained.
        seed: of the draws that a loss makes, with the number of the update.
        folder: of the run.
        tell: shows the user a line.
    """

    def __init__(
        self,
        config: TrainerConfig,
        async_training: AsyncTrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        pool: DataPoolClient,
        keeper: LeaseKeeper,
        producer: GroupProducer,
        scorer: Scorer,
        group_filter: GroupFilter,
        validator: Validator,
        backend: TrainingBackend,
        publisher: Publisher,
        checkpoints: CheckpointStore,
        publish: PublishConfig,
        folder: Path,
        critic: Critic | None = None,
        seed: int = 0,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self.config = config
        self._async = async_training
        self._algorithm = algorithm
        self._seed = seed
        self._folder = folder
        self._tell = tell
        self.progress = Progress()
        self.pool = pool
        self.producer = producer
        self.ledger = producer.ledger
        self.scorer = scorer
        self._backend = backend
        self._critic = critic
        self._publisher = publisher
        self.memory = publisher.memory
        self.checkpoints = checkpoints
        self._loss_fn = make_loss_fn(algorithm.loss, algorithm.kl)
        self._filter = group_filter
        self._flat = FlatRewards(
            samples_path(folder, 0), within_group=algorithm.estimator.group_baseline
        )
        self.validator = validator
        self.keeper = keeper
        self._consumed: set[str] = set()
        """prompt_uids of the batches since the last checkpoint."""
        self._untrained = 0
        """Mini-batches of the batch that is trained that are still to come."""
        self._phases = Phases()
        self._overdue = False
        self._interrupted = False
        """By the user: the batch is trained to its end, and nothing more is begun."""
        self.releases = Releases(
            publisher,
            pool,
            publish,
            lambda: self.progress,
            folder=folder,
            mode="retract" if async_training.partial_rollout else "drain",
            updates_per_sync=async_training.trigger_parameter_sync_step,
            tries_out=not async_training.has_windows,
            overdue=self._publish_overdue,
            tell=tell,
        )
        self._mark = time.monotonic()
        # One thread: torch keeps its own pool per thread, and the model is not to be shared.
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="backend")

    async def train(self, until: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """Optimizer steps until there are `until` of them or no group comes any more, and a
        checkpoint; yields the metrics of each. Groups are brought meanwhile; if their producer
        fails, so does the training that waits for it.
        """
        self._mark = time.monotonic()
        async with (
            self.producer.running(),
            self.keeper,
            self.releases.running(),
            aclosing(self._batches(math.inf if until is None else until)) as batches,
        ):
            try:
                async for batch in batches:
                    groups = await self._worth_training(batch)
                    async with aclosing(self._to_its_end(self._train_on(groups))) as records:
                        async for record in records:
                            yield record
                            self._mark = time.monotonic()  # the consumer's time is not training
            except (asyncio.CancelledError, GeneratorExit) as e:
                if isinstance(e, GeneratorExit) or e.args == (INTERRUPTED,):
                    await self._save_interrupted()
                raise
            await self.releases.judge()
            await self._publish_overdue()
            await self.published()
            if self._consumed:
                await self.checkpoint()

    async def _to_its_end(
        self, records: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The records of a batch. A user's interruption waits until its optimizer steps are done,
        counted and in the ledger: half a batch can neither be saved nor taken back."""
        cancelled: asyncio.CancelledError | None = None
        async with aclosing(records):
            while True:
                coming = asyncio.ensure_future(anext(records, None))
                try:
                    record = await asyncio.shield(coming)
                except asyncio.CancelledError as e:
                    if cancelled is not None or coming.cancelled() or e.args != (INTERRUPTED,):
                        coming.cancel()
                        await asyncio.wait({coming})  # a generator that runs cannot be closed
                        raise
                    self._interrupted = True
                    cancelled, record = e, await coming
                if record is None:
                    break
                yield record
        if cancelled is not None:
            raise cancelled

    async def _save_interrupted(self) -> None:
        """A checkpoint of where an interrupted run stands, unless a batch is half trained."""
        if not (self.config.checkpoint_on_interrupt and self._consumed) or self._untrained:
            return
        try:
            await self.checkpoint()
        except DataPoolError as e:  # it is on disk: the next process acks what it was trained on
            log.warning("the pool does not hear of the last checkpoint: %s", e)
        self._tell(f"saved at optimizer step {self.progress.updates}; the same command goes on")

    async def _worth_training(self, batch: Sequence[Group]) -> list[Group]:
        """The scored groups of a batch; where a filter (or a missing score) took some out, others
        take their place, until it is whole or generation has ended."""
        groups: list[Group] = []
        consumed: set[str] = set()
        size, coming = len(batch), batch
        for refill in count():
            consumed |= {group.prompt_uid for group in coming}
            with self._phases("score"):
                scored = await self.scorer.score(coming, self.producer.min_n)
            self._flat.see(scored)
            self.releases.scored(scored)
            kept = self._filter.keep(baselined(scored, self._algorithm.estimator))
            groups += kept
            self.producer.refund(len(coming) - len(kept))
            if (missing := size - len(groups)) == 0:
                break
            self._filter.check_refills(refill)
            with self._phases("wait"):
                more = await self._arrived(asyncio.create_task(self._lease(missing)))
            if more is None:
                break
            coming = more
        self._consumed |= consumed
        return groups

    async def _train_on(self, groups: Sequence[Group]) -> AsyncGenerator[dict[str, Any], None]:
        """One batch: `require_batches` optimizer steps, with π_prox taken once before the first."""
        if not groups:
            return
        restored = await self._restore()
        where = self.config.save_debug_rollout_data
        await self._compute(record_batch, where, groups, self.progress)
        await self._borrow_memory()
        with self._phases("prepare"):
            batch, mini_batches, metrics = await self._compute(self._prepare, groups)
        before = self.progress.updates
        for self._untrained, indices in zip(
            reversed(range(len(mini_batches))), mini_batches, strict=True
        ):
            await self._borrow_memory()
            with self._phases("train"):
                update = await self._compute(self._optimize, batch, indices)
            await self._return_memory()
            if self.progress.updates % self._async.trigger_parameter_sync_step == 0:
                with self._phases("publish"):
                    await self.publish()
            times = self._phases.take(time.monotonic() - self._mark)
            self.progress.train_s += times["time/step_s"]
            uids = {batch.steps[i].prompt_uid for i in indices}
            trained_on = [g for g in groups if g.prompt_uid in uids]
            self.ledger.trained(self.progress.updates, uids)
            yield await self._record(metrics | update | times, trained_on)
        # Between batches only: a checkpoint acks whole leases, and this one is now trained whole.
        every, best = self.config.checkpoint_every, self.config.keep_best
        evaluated = self.validator.config.every
        due = checkpoint_due(before, self.progress.updates, every, evaluated, best)
        if due or restored:  # an older checkpoint may hold what was rolled back
            with self._phases("checkpoint"):
                await self.checkpoint()

    def _prepare(
        self, groups: Sequence[Group]
    ) -> tuple[TokenBatch, list[list[int]], dict[str, float]]:
        """Everything the loss needs, as columns of the batch; runs in the compute thread."""
        steps = [s for g in groups for s in g.steps]
        owner = [i for i, g in enumerate(groups) for _ in g.steps]
        parts = np.array_split(range(len(groups)), self._async.require_batches)
        mini_of_group = {int(g): m for m, part in enumerate(parts) for g in part}
        mini_of_step = [mini_of_group[g] for g in owner]

        batch: TokenBatch = self._backend.convert(steps)
        columns = batch.columns
        prox = proximal_log_probs(
            lambda: self._backend.compute_log_probs(batch),
            columns["rollout_log_probs"],
            self._algorithm.off_policy,
        )
        gap = self._log_prob_gap(batch, prox)
        if not self._async.use_rollout_log_probs:
            columns["rollout_log_probs"] = prox
        columns["prox_log_probs"] = prox
        token_rewards, metrics = self._hold_to_reference(groups, batch)
        if self._critic is not None:
            columns["values"] = self._critic.values(batch)
        advantages = compute_advantages(
            groups,
            self._algorithm,
            token_rewards=token_rewards,
            values=columns.get("values"),
            baselines=self.progress.baselines,
        )
        self.progress.baselines = advantages.baselines
        columns |= advantages.columns
        metrics |= advantages.metrics
        mask = None
        if self._algorithm.loss.mask_truncated:
            mask = untruncated(batch.steps, batch.lengths)
            metrics["policy/truncated_share"] = 1 - float(mask.mean())
        correction = correct(
            prox,
            columns["rollout_log_probs"],
            batch.lengths,
            lags(
                [s.policy_version for s in steps],
                # A copy: a publication may end meanwhile, in the event loop's thread.
                {v: self.progress.applied(u) for v, u in self.progress.published.copy().items()},
                updates_now=self.progress.applied(self.progress.updates),
                updates_per_sync=self._async.trigger_parameter_sync_step,
            ),
            staleness_threshold=self._async.staleness_threshold,
            config=self._algorithm.off_policy,
            advantages=columns["advantages"],
            mask=mask,
        )
        columns["weights"] = correction.weights
        metrics |= correction.metrics
        columns |= loss_columns(
            batch,
            self._algorithm.loss,
            mini_batches=mini_of_step,
            mask=mask,
            seed=self._seed + self.progress.updates,
        )
        if gap is not None:
            metrics["log_prob_gap"] = gap
        mini_batches = [
            [i for i, m in enumerate(mini_of_step) if m == number] for number in range(len(parts))
        ]
        return batch, [m for m in mini_batches if m], metrics

    def _optimize(self, batch: TokenBatch, indices: Sequence[int]) -> dict[str, float]:
        """One optimizer step, and its count. Runs in the compute thread, like everything that reads
        both: a publication may be written as soon as this returns."""
        update = self._update(batch, indices)
        self.progress.updates += 1
        if update.get("skipped"):
            self.progress.unapplied.append(self.progress.updates)
        return update

    def _update(self, batch: TokenBatch, indices: Sequence[int]) -> dict[str, float]:
        loss_fn = replace(self._loss_fn, kl_coef=self._kl_coef)
        update: dict[str, float] = {}
        if self._critic is not None:
            update |= self._critic.update(batch, indices)
            if not self._critic.warm:
                return update | {"skipped": 1.0}
        update |= self._backend.train_step(batch, loss_fn, indices)
        if self._algorithm.kl.place == "loss":
            update["kl/coef"] = self._kl_coef
            trajectories = {batch.steps[i].trajectory_uid for i in indices}
            self._adapt_kl(update.get("kl/ref", math.nan), len(trajectories))
        return update

    async def _borrow_memory(self) -> None:
        """The engines' memory is the backend's, until `_return_memory`. Idempotent."""
        if self.memory.lends:
            with self._phases("hand_over"):
                await self.memory.lend()

    async def _return_memory(self) -> None:
        if self.memory.lends:
            with self._phases("hand_over"):
                await self._compute(self._backend.free_cache)
                await self.memory.take_back()

    def _hold_to_reference(
        self, groups: Sequence[Group], batch: TokenBatch
    ) -> tuple[Tensor | None, dict[str, float]]:
        """The KL penalty as rewards of tokens, if that is its place, and its metrics."""
        kl, columns = self._algorithm.kl, batch.columns
        if kl.place == "none":
            return None, {}
        columns["ref_log_probs"] = self._backend.compute_ref_log_probs(batch)
        if kl.place == "loss":
            return None, {}
        coef, prox, ref = self._kl_coef, columns["prox_log_probs"], columns["ref_log_probs"]
        penalty, measured = kl_in_reward(groups, batch.lengths, prox, ref, kl, coef)
        self._adapt_kl(measured, sum(len(g.trajectories) for g in groups))
        return penalty, {"kl/ref": measured, "kl/coef": coef}

    @property
    def _kl_coef(self) -> float:
        adapted = self.progress.kl_coef
        return self._algorithm.kl.kl_coef if adapted is None else adapted

    def _adapt_kl(self, measured: float, trajectories: int) -> None:
        kl = self._algorithm.kl
        if kl.target_kl is not None:
            self.progress.kl_coef = next_coef(self._kl_coef, measured, trajectories, kl)

    def _log_prob_gap(self, batch: TokenBatch, prox: Tensor) -> float | None:
        """max |log π - log μ| over tokens that the very weights being trained sampled: how exactly
        engine and trainer agree, μ as the engine said. None if the batch has no such token."""
        progress = self.progress
        published = progress.published[progress.version]
        if progress.applied(published) != progress.applied(progress.updates):
            return None
        if self._algorithm.off_policy.proximal == "rollout":
            return None  # nothing was recomputed to compare with
        fresh = batch.expand(
            [
                float(s.policy_version == progress.version and not s.version_spans)
                for s in batch.steps
            ]
        ).bool()
        gap = (prox - batch.columns["rollout_log_probs"])[fresh].abs()
        gap = gap[torch.isfinite(gap)]
        return float(gap.max()) if len(gap) else None

    async def publish(self) -> None:
        """Give the engines the weights of now as the next policy version.

        Returns once they are written: training goes on while the engines load them, unless
        generation waits for them (`async_training.mode`). What fails then is raised by the next
        `publish` or `published`. An evaluation under way may hold it up (`validation.py`), and a
        version on trial (`releases.py`).
        """
        windows = self._async.has_windows
        if windows:
            await self.validator.released()
            await self.producer.close_window()
            await self.releases.judge()
        self._overdue = (self.validator.holds and not windows) or not await self.releases.give(
            lambda version: self._compute(self._write_weights, version)
        )
        if windows:
            await self.published()
            self.producer.open_window()

    async def _publish_overdue(self) -> None:
        if self._overdue:
            await self.publish()

    def _write_weights(self, version: int) -> tuple[Path, int]:
        """Where they are, and how many updates they contain; runs in the compute thread."""
        return self._publisher.write(version, self._backend), self.progress.updates

    async def published(self) -> None:
        """Returns once every engine serves the version that was published last.

        Raises:
            WeightUpdateError: an engine does not.
        """
        await self.releases.published()

    async def _restore(self) -> bool:
        """Train on from the weights that engines serve, if others were rolled back."""
        if (path := self.releases.to_restore) is None:
            return False
        await self._compute(self._backend.load_weights, path)
        self.releases.restored(path)
        return True

    async def checkpoint(self) -> None:
        """Make everything up to here durable, then ack the groups it was trained on."""
        while True:
            await self._restore()
            backend = await self._compute(self._backend.state_dict)
            critic = await self._compute(self._critic.state_dict) if self._critic else None
            if self.releases.to_restore is None:  # else they were rolled back meanwhile
                break
        # From here to the end of `state` nothing is awaited: it is of one moment.
        consumed = frozenset(self._consumed)
        self.ledger.leased(consumed)
        state = {
            "backend": backend,
            "critic": critic,
            "progress": deepcopy(self.progress),
            **self.producer.state_dict(consumed),
            "trained": by_lease(self.keeper.held, consumed.union(self.keeper.settled)),
            "ledger": self.ledger.offset,
            "rng": rng_state(),
        }
        about = {"version": self.progress.version}
        await self._compute(self.ledger.sync)
        await self._compute(self.checkpoints.save, self.progress.updates, state, about)
        await self.keeper.settle(consumed)
        self._consumed -= consumed
        self.producer.settle(consumed)

    async def resume(self, where: Resume = "auto") -> bool:
        """Go on from the newest checkpoint, or the one that `where` names, if there is one, and see
        to it that the engines serve the weights that are trained: those of the checkpoint, or of
        the start."""
        path = self.checkpoints.find(where)
        state = await self._compute(self.checkpoints.load, path) if path is not None else None
        if state is not None:
            await self._compute(self.load, state)
            set_rng_state(state["rng"])
            self.checkpoints.set_aside(after=self.progress.updates)
        offset = self.ledger.adopt(path.parent, state["ledger"]) if path and state else 0
        self.ledger.resume(self.progress.updates, offset)
        await self.producer.resume(state, self.progress.version)
        self.releases.adopt(self.progress)
        versions = await self._publisher.serving()
        before = (await self.pool.get_statistics(TRAIN))["policy_version"]
        bare = self._publisher.gives_adapters  # engines have none yet
        if state is not None or any(versions) or before or bare:
            # A number that nobody has seen: steps of before must not pass for ours.
            newest = max([self.progress.version, before, *versions])
            self.progress.lose(newest, self._async.trigger_parameter_sync_step)
            await self._restore()
            await self.publish()
        return state is not None

    def load(self, state: Mapping[str, Any]) -> None:
        """Model and progress of a checkpoint; runs in the compute thread."""
        self._backend.load_state_dict(state["backend"])
        if self._critic is not None and state["critic"] is not None:
            self._critic.load_state_dict(state["critic"])
        self.progress = state["progress"]

    async def evaluate(self, tasks: Sequence[Task]) -> list[Evaluation]:
        """Run the agent on `tasks` through the `"val"` channel, with the weights now published; or
        look at what agents left there."""
        await self.validator.join()
        await self.published()
        evaluations = await self.validator.run(tasks, self._policy())
        self.progress.evaluations += evaluations
        return evaluations

    def evaluation_due(self) -> bool:
        """Whether this optimizer step, between the first and the last, is to be evaluated and was
        not yet."""
        every, updates, total = (
            self.validator.config.every,
            self.progress.updates,
            self.config.total_steps,
        )
        if not every or updates % every or (total is not None and updates >= total):
            return False
        if self._interrupted:  # the run that goes on makes up for it
            return False
        return updates not in {e.step for e in self.progress.evaluations}

    async def begin_evaluation(self, tasks: Sequence[Task]) -> None:
        """`evaluate`, while training goes on; `validator.finished` has the result."""
        await self.validator.join()
        await self.published()
        self.validator.start(tasks, self._policy(), then=self._evaluated)

    async def _evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        self.progress.evaluations += evaluations
        await self._publish_overdue()

    def _policy(self) -> Policy:
        """What an evaluation that begins now is of."""
        progress = self.progress
        return Policy(progress.updates, progress.version, progress.known())

    def close(self) -> None:
        self._compute_thread.shutdown()
        self._backend.close()
        if self._critic is not None:
            self._critic.close()

    async def _batches(self, until: float) -> AsyncGenerator[Sequence[Group], None]:
        """The batches up to `until` updates; the next one is on its way while one is trained."""
        per_lease = self._async.require_batches
        coming: asyncio.Task[Sequence[Group] | None] | None = None
        try:
            while self.progress.updates < until:
                with self._phases("wait"):
                    batch = await self._arrived(coming or asyncio.create_task(self._lease()))
                if batch is None:
                    return
                more = self.progress.updates + per_lease < until
                if self._async.has_windows:
                    more = False  # a lease before the publication would be of the window before
                coming = asyncio.create_task(self._lease()) if more else None
                yield batch
        finally:
            if coming is not None:
                coming.cancel()

    async def _arrived(
        self, coming: asyncio.Task[Sequence[Group] | None]
    ) -> Sequence[Group] | None:
        """What `_lease` brings. Of traffic that stays away it is said what is waited for."""
        try:
            while self.producer.endless and not (await asyncio.wait({coming}, timeout=TOLD_S))[0]:
                self._tell(await self._why_waiting())
            return await coming
        finally:
            coming.cancel()

    async def _lease(self, size: int | None = None) -> Sequence[Group] | None:
        """The next `size` ready groups, by default `require_batches` × `train_batch_size`; None
        when generation has no prompt left (all epochs are done) and fewer are there."""
        size = size or self._lease_size
        patience_s = None if self.producer.endless else self.config.starvation_timeout_s
        request = asyncio.ensure_future(self.keeper.lease(size, timeout_s=patience_s))
        try:
            while not request.done():
                ended = asyncio.ensure_future(self.producer.ended())
                await asyncio.wait({request, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ended.result()  # raises what made the producer fail
                ended.cancel()
                # The last groups, or word of a drop whose prompt is issued again, may be on their
                # way here: to ask anew would not bring them.
                await self.pool.get_statistics(TRAIN)
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
        return self.config.train_batch_size * self._async.require_batches

    async def _why_waiting(self) -> str:
        """What a trainer that traffic keeps waiting waits for, and what the pool holds."""
        stats = await self.pool.get_statistics(TRAIN)
        groups, trajectories = stats["groups"], stats["trajectories"]
        return (
            f"waiting for {self._lease_size} groups of traffic: {groups['ready']} are ready, "
            f"{groups['open']} open with {trajectories['open']} open trajectories; the engines "
            f"serve version {self.progress.version}"
        )

    async def _why_starved(self) -> str:
        stats = await self.pool.get_statistics(TRAIN)
        return (
            f"no {self.config.train_batch_size} groups became ready within "
            f"trainer.starvation_timeout_s = {self.config.starvation_timeout_s:g} s; "
            f"groups: {stats['groups']}; oldest open: {stats['oldest_open']}; "
            f"filtered: {dict(self._filter.dropped)}; "
            f"{await why_lost(self.pool, TRAIN, self.scorer, self._folder)}"
        )

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
            **self.producer.metrics(),
            **self._flat.metrics(),
            **self._filter.metrics(),
            **self.releases.metrics(),
            **self.validator.metrics(),
            **self.scorer.metrics(groups),
            **metrics,
        }

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute_thread, work, *args)
