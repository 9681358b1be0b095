"""The trainer's loop, to be read as the algorithm.

    batches ─► prepare: advantage, proximal log-probs, weights ─► step: loss, gradient, optimizer
      ▲                                                                     │
      └──── settle ◄── checkpoint ◄── publish weights v+1 ◄─────────────────┘

Generation goes on meanwhile: a producer (`rollout/`) keeps the pool fed, and the updater
computes in a thread of its own. Owns the order of things, and what a checkpoint holds. Does not own
batches (`batches.py`), the mathematics (`updater.py`), publications (`publish/`), any process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.types import Group
from stepwell.trainer.batches import Batches
from stepwell.trainer.checkpoint import (
    CheckpointStore,
    Resume,
    rng_state,
    set_rng_state,
)
from stepwell.trainer.config import TrainerConfig
from stepwell.trainer.data import Task
from stepwell.trainer.errors import INTERRUPTED, CheckpointError, RolloutError, StarvedError
from stepwell.trainer.live import LOST
from stepwell.trainer.metrics import Phases, traced
from stepwell.trainer.publish.publisher import Publisher
from stepwell.trainer.recording import Recorder
from stepwell.trainer.samples import Trained
from stepwell.trainer.threads import ComputeThread
from stepwell.trainer.updater import Updater, record_of
from stepwell.trainer.validation import Evaluation, Policy, Validator

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trainer:
    """Trains the updater's model on batches; see the module's docstring.

    Args:
        phases: shared with the parts: how long each of them took.
        trained: keeps what each optimizer step was on, for people.
        recorder: of the batches; None: they are not recorded.
        folder: of the run.
        notify: shows the user a line.
    """

    def __init__(
        self,
        config: TrainerConfig,
        batches: Batches,
        updater: Updater,
        publisher: Publisher,
        validator: Validator,
        checkpoints: CheckpointStore,
        compute: ComputeThread,
        phases: Phases,
        trained: Trained,
        recorder: Recorder | None = None,
        *,
        folder: Path,
        notify: Callable[[str], None] = log.info,
    ) -> None:
        self.batches = batches
        self.updater = updater
        self.publisher = publisher
        self.validator = validator
        self.checkpoints = checkpoints
        self.trained = trained
        self.progress = updater.progress
        self._ledger = batches.producer.ledger
        self._config = config
        self._compute = compute
        self._phases = phases
        self._recorder = recorder
        self._folder = folder
        self._notify_user = notify
        self._mark = time.monotonic()
        self._untrained = 0
        """Mini-batches of the batch that is trained that are still to come."""
        self._interruption: asyncio.CancelledError | None = None
        """By the user: the batch is trained to its end, and nothing more is begun."""
        self._saving: asyncio.Task[None] | None = None
        """The checkpoint that is being written beside training."""

    async def train(self, until: int | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """Optimizer steps until there are `until` of them or no group comes any more, and a
        checkpoint; yields the metrics of each. Groups are brought meanwhile; if their producer
        fails, so does the training that waits for it.
        """
        self._mark = time.monotonic()
        async with (
            self.batches.running(),
            self.publisher.running(),
            aclosing(self.batches.stream(math.inf if until is None else until)) as batches,
        ):
            try:
                async for groups in batches:
                    async with aclosing(self._train_on(groups)) as records:
                        while (record := await self._to_its_end(anext(records, None))) is not None:
                            yield record
                            self._mark = time.monotonic()  # the consumer's time is not training
                    self._raise_interruption()
                await self.publisher.finish()
            except (asyncio.CancelledError, GeneratorExit) as e:
                if isinstance(e, GeneratorExit) or e.args == (INTERRUPTED,):
                    await self._save_ended()
                raise
            except (StarvedError, RolloutError):
                try:
                    await self._save_ended()
                except CheckpointError as e:  # the error that ended the run is told
                    self._notify_user(str(e))
                raise
            else:
                if self.batches.consumed and not self._config.debug_rollout_only:
                    await self._to_its_end(self.checkpoint())
                await self._wait_saved()
                self._raise_interruption()
            finally:
                if self._saving is not None:  # whatever ended the training, it is worth its acks
                    await asyncio.wait({self._saving})

    async def _train_on(self, groups: Sequence[Group]) -> AsyncGenerator[dict[str, Any], None]:
        """One batch: `require_batches` optimizer steps in each of `ppo_epochs`, with the policy
        before the first as π_prox."""
        if not groups:
            return
        if self._saving is not None and self._saving.done():
            await self._wait_saved()  # its error, if it has one, is this run's
        adopted = await self.publisher.adopt()
        with self._phases("prepare"):
            pictures = await self.batches.pictures(groups)
        if self._recorder is not None:
            await self._compute(self._recorder.write, groups, self.progress, pictures)
        if self._config.debug_rollout_only:
            yield await self._leave_out(groups)
            return
        await self.publisher.borrow_memory()
        with self._phases("prepare"):
            prepare = partial(self.updater.prepare, groups, pictures)
            prepared = await self._traced("prepare", prepare)
        before = self.progress.updates
        for number, (steps, trained_on, epoch) in enumerate(prepared.mini_batches, 1):
            self._untrained = len(prepared.mini_batches) - number
            await self.publisher.borrow_memory()
            with self._phases("train"):
                step = partial(self.updater.step, prepared, steps)
                update = await self._traced("step", step)
            is_last = number == len(prepared.mini_batches) or self.evaluation_due()
            await self.publisher.after_step(is_last=is_last)
            with self._phases("sample"):
                write = partial(self.trained.write, version=self.progress.version, again=epoch > 0)
                await self._compute(write, self.progress.updates, trained_on, prepared.batch)
            times = self._phases.take(time.monotonic() - self._mark)
            self.progress.train_s += times["time/step_s"]
            if epoch == 0:  # a group is trained once, however often it is gone over
                self._ledger.trained(self.progress.updates, [g.prompt_uid for g in trained_on])
            yield {
                **record_of(self.progress, trained_on, times, groups),
                **({"ppo_epoch": epoch} if epoch else {}),
                **await self.batches.metrics(trained_on),
                **self.publisher.metrics(),
                **prepared.metrics,
                **update,
                **times,
            }
        # Between batches only: a checkpoint acks whole leases, and this one is now trained whole.
        every, best = self._config.checkpoint_every, self._config.keep_best
        evaluated = self.validator.config.every
        due = checkpoint_due(before, self.progress.updates, every, evaluated, best)
        if due or adopted:  # an older checkpoint may hold what was rolled back
            with self._phases("checkpoint"):
                await self.checkpoint()
                if adopted:  # nothing is published before: where windows wait for that, no group
                    await self._wait_saved()  # comes whose training would raise its error

    async def _leave_out(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The record of a batch that is recorded, acked and not trained."""
        await self._compute(self.trained.write, self.progress.updates + 1, groups)
        self.updater.leave_out()
        consumed = self.batches.consumed
        self._ledger.leased(consumed)
        await self.batches.settle(consumed)
        await self.publisher.after_leaving_out()
        times = self._phases.take(time.monotonic() - self._mark)
        record = record_of(self.progress, groups, times, groups)
        return {**record, **await self.batches.metrics(groups), **times}

    async def _traced(self, name: str, work: Callable[[], T]) -> T:
        """`work` in the thread that computes, with a trace if the next optimizer step's is
        wanted."""
        number, wanted = self.progress.updates + 1, self._config.profile_steps
        return await self._compute(traced, name, number, wanted, self._folder, work)

    async def checkpoint(self) -> None:
        """Make everything up to here durable, then ack the groups it was trained on. Where the
        backend writes beside training, this returns when its models are copied (`_wait_saved`)."""
        await self._wait_saved()
        step = self.progress.updates
        while True:
            await self.publisher.adopt()
            draft = await self._compute(self.checkpoints.draft, step)
            models = await self._compute(self._begin_save, step, draft)
            if not self.publisher.is_superseded:
                break
            await asyncio.to_thread(self.updater.wait_saved)  # of what was rolled back meanwhile
        # From here to the end of `state` nothing is awaited: it is of one moment.
        consumed = self.batches.consumed
        self._ledger.leased(consumed)
        state = {
            **models,
            **self.batches.state_dict(consumed),
            "progress": deepcopy(self.progress),
            "ledger": self._ledger.offset,
            "rng": rng_state(),
        }
        about = {"version": self.progress.version}
        await self._compute(self._ledger.sync)
        finish = self._finish_checkpoint(step, state, about, draft, consumed)
        self._saving = asyncio.create_task(finish)
        if not self.updater.saves_beside:
            await self._wait_saved()

    def _begin_save(self, step: int, draft: Path) -> dict[str, Any]:
        try:
            return self.updater.save_state(draft)
        except (OSError, RuntimeError) as e:  # torch makes the latter of a full disk
            raise self.checkpoints.unwritable(step, e) from e

    async def _finish_checkpoint(
        self,
        step: int,
        state: dict[str, Any],
        about: dict[str, Any],
        draft: Path,
        consumed: frozenset[str],
    ) -> None:
        """The models are on disk ► the rename ► the acks."""
        try:
            await asyncio.to_thread(self.updater.wait_saved)
        except (OSError, RuntimeError) as e:
            raise self.checkpoints.unwritable(step, e) from e
        await asyncio.to_thread(self.checkpoints.save, step, state, about, draft)
        await self.batches.settle(consumed)
        await self.publisher.saved(about["version"])

    async def _wait_saved(self) -> None:
        """Return when the checkpoint that was begun last is durable and its groups are acked.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._saving is not None:
            await asyncio.wait({self._saving})  # it goes on if whoever waits is cancelled
            saving, self._saving = self._saving, None
            await saving

    async def resume(self, where: Resume = "auto") -> bool:
        """Go on from the newest checkpoint, or the one that `where` names, if there is one, and see
        to it that the engines serve the weights that are trained: those of the checkpoint, or of
        the start."""
        path = self.checkpoints.find(where)
        await self._compute(self.trained.resume, max(self.checkpoints.steps(), default=0))
        state = await self._compute(self.checkpoints.load, path) if path is not None else None
        offset = 0
        if path is not None and state is not None:
            await self._compute(self.updater.load_state, path, state)
            set_rng_state(state["rng"])
            self.checkpoints.set_aside(after=self.progress.updates)
            offset = state["ledger"]
            if path.parent != self.checkpoints.folder:
                offset = self._ledger.adopt(path.parent, offset)
        self._ledger.resume(self.progress.updates, offset)
        await self.batches.resume(state, self.progress.version)
        await self.publisher.resume(new=state is None, save=self._save_taken_back)
        return state is not None

    async def _save_taken_back(self) -> None:
        """A checkpoint of weights that were served by a roll-back, in place of that of the weights
        which it took back."""
        await self.checkpoint()
        await self._wait_saved()
        self.checkpoints.unscore(self.progress.updates)

    async def evaluate(self, tasks: Sequence[Task]) -> list[Evaluation]:
        """Run the agent on `tasks` through the `"val"` channel, with the weights now published; or
        look at what agents left there. A user's interruption ends it; within a batch nothing is
        evaluated then, and `train` raises it when the batch is trained."""
        return await self._unless_interrupted(self._evaluate(tasks)) or []

    async def begin_evaluation(self, tasks: Sequence[Task]) -> None:
        """`evaluate`, while training goes on; `validator.finished` has the result."""
        await self._unless_interrupted(self._begin_evaluation(tasks))

    def evaluation_due(self) -> bool:
        """True if this optimizer step, between the first and the last, is to be evaluated and was
        not yet."""
        every, updates, total = (
            self.validator.config.every,
            self.progress.updates,
            self._config.total_steps,
        )
        if not every or updates % every or (total is not None and updates >= total):
            return False
        if self._interruption is not None or self._config.debug_rollout_only:
            return False  # an interrupted run evaluates after it resumes
        return updates not in {e.step for e in self.progress.evaluations}

    async def is_evaluated(self) -> bool:
        """Return whether the policy of now was evaluated on its tasks, once no evaluation is under
        way: where the data ended with a step that was due. Traffic is always looked at again."""
        with suppress(StarvedError):  # then it was not
            await self.validator.join()
        now = self._policy()
        found = [(e.step, e.version) for e in self.progress.evaluations]
        return self.validator.pins and (now.step, now.version) in found

    def rank(self, evaluations: Iterable[Evaluation]) -> None:
        """Score the checkpoints of the weights that were evaluated, but for those whose score is of
        too little traffic to be compared."""
        for evaluation in evaluations:
            score = evaluation.comparable_score
            if score is not None and evaluation.weights_step != LOST:
                self.checkpoints.score(evaluation.weights_step, score)

    def close(self) -> None:
        self._compute.close()
        self.updater.close()

    async def _to_its_end(self, work: Awaitable[T]) -> T:
        """The result of `work`. A user's interruption waits for `_raise_interruption`: half a batch
        can neither be saved nor taken back. A second one ends the work, and nothing is saved."""
        coming = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError as e:
            if self._interruption is not None or coming.cancelled() or e.args != (INTERRUPTED,):
                coming.cancel()
                await asyncio.wait({coming})  # a generator that runs cannot be closed
                raise asyncio.CancelledError from e  # as of nobody who may save
            self._interruption = e
            return await self._to_its_end(coming)

    def _raise_interruption(self) -> None:
        """Let a user's interruption end the run that it came to, if there was one: the optimizer
        steps of the batch are done, counted and in the ledger."""
        if self._interruption is not None:
            raise self._interruption

    async def _save_ended(self) -> None:
        """A checkpoint of where a run stands that was interrupted, or for which no groups come any
        more, unless a batch is half trained."""
        if not self.batches.consumed or self._untrained:
            return
        try:
            await self.checkpoint()
            await self._wait_saved()
        except DataPoolError as e:  # it is on disk: the next process acks what it was trained on
            log.warning("the pool does not hear of the last checkpoint: %s", e)
        self._notify_user(
            f"saved at optimizer step {self.progress.updates}; the same command goes on"
        )

    async def _unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if the user interrupts it within a batch, which goes on to its
        end: `_raise_interruption` is still to come."""
        try:
            return await work
        except asyncio.CancelledError as e:
            if not self._untrained or e.args != (INTERRUPTED,):
                raise
            self._interruption = e
            return None

    async def _evaluate(self, tasks: Sequence[Task]) -> list[Evaluation]:
        await self.validator.join()
        await self.publisher.wait_published()
        evaluations = await self.validator.run(tasks, self._policy())
        self.progress.evaluations += evaluations
        return evaluations

    async def _begin_evaluation(self, tasks: Sequence[Task]) -> None:
        await self.validator.join()
        async with AsyncExitStack() as pinned:
            if self.validator.pins:
                await pinned.enter_async_context(self.publisher.pinned())
            else:
                await self.publisher.wait_published()
            self.validator.start(self._evaluate_beside(tasks, self._policy(), pinned.pop_all()))

    async def _evaluate_beside(
        self, tasks: Sequence[Task], policy: Policy, pinned: AsyncExitStack
    ) -> None:
        async with pinned:
            self.progress.evaluations += await self.validator.persistently(tasks, policy)

    def _policy(self) -> Policy:
        """The policy that an evaluation beginning now would evaluate."""
        progress = self.progress
        return Policy(progress.updates, progress.version, progress.known())


def checkpoint_due(before: int, now: int, every: int, eval_every: int, keep_best: int) -> bool:
    """True if one of the optimizer steps (before, now] asks for a checkpoint: a multiple of
    `every`, or, where the best are to be kept, one that is evaluated."""
    due = now // every > before // every
    return due or bool(keep_best and eval_every and now // eval_every > before // eval_every)
