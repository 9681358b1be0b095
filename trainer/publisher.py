"""This module gives the engines what was trained, so that agents are served by the newest weights.

    due ──► write, in the compute thread ──► publish, beside training ──► every engine serves v+1
     │ an evaluation is pinned to the version of now, or one is on trial
     └──► overdue: published, with the weights of then, as soon as that has ended

Where generation waits for publications (`async_training.mode` with windows) the trainer does too.
While the trainer computes on GPUs that it shares with the engines, they lend it their memory.

Owns when a version is due, the windows around it, the loan of memory, and that after a roll-back
the backend trains the weights that engines serve. Does not own trials and roll-backs
(`releases.py`) or how weights get to engines (`publication.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN
from stepwell.trainer.config import AsyncTrainingConfig, PublishConfig
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.metrics import Phases
from stepwell.trainer.publication import EngineWeights
from stepwell.trainer.releases import Releases
from stepwell.trainer.threads import ComputeThread
from stepwell.trainer.updater import Updater
from stepwell.trainer.validation import Validator

log = logging.getLogger(__name__)


class Publisher:
    """The publications of a run; see the module's docstring.

    Args:
        compute: the thread that the updater computes in.
        phases: told how long publications and hand-overs of memory took.
        folder: of the run.
        tell: shows the user a line.
    """

    def __init__(
        self,
        config: PublishConfig,
        async_training: AsyncTrainingConfig,
        weights: EngineWeights,
        updater: Updater,
        compute: ComputeThread,
        *,
        pool: DataPoolClient,
        producer: GroupProducer,
        validator: Validator,
        phases: Phases,
        folder: Path,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self._async = async_training
        self._weights = weights
        self._updater = updater
        self._compute = compute
        self._pool = pool
        self._producer = producer
        self._validator = validator
        self._phases = phases
        self._overdue = False
        self.memory = weights.memory
        self.releases = Releases(
            weights,
            pool,
            config,
            updater.progress,
            folder=folder,
            mode="retract" if async_training.partial_rollout else "drain",
            updates_per_sync=async_training.trigger_parameter_sync_step,
            tries_out=not async_training.has_windows,
            can_restore=not updater.backend.lacks("load_weights"),
            overdue=self.publish_overdue,
            tell=tell,
        )

    def running(self) -> AbstractAsyncContextManager[None]:
        """Versions are judged, and requests for roll-backs heard, inside the block."""
        return self.releases.running()

    async def stepped(self) -> None:
        """An optimizer step was taken: engines get their memory back, and the weights if due."""
        await self.return_memory()
        if self._updater.progress.updates % self._async.trigger_parameter_sync_step == 0:
            with self._phases("publish"):
                await self.publish()

    async def left_out(self) -> None:
        """A batch was not trained: what waits for a publication goes on under the same weights."""
        due = self._updater.progress.updates % self._async.trigger_parameter_sync_step == 0
        if due and self._async.has_windows:
            await self._producer.close_window()
            self._producer.open_window()

    async def publish(self) -> None:
        """Give the engines the weights of now as the next policy version.

        Returns once they are written: training goes on while the engines load them, unless
        generation waits for them. What fails then is raised by the next `publish` or `published`.
        """
        windows = self._async.has_windows
        if windows:
            await self._validator.released()
            await self._producer.close_window()
            await self.releases.judge()
        self._overdue = (self._validator.holds and not windows) or not await self.releases.give(
            lambda version: self._compute(self._write, version)
        )
        if windows:
            await self.published()
            self._producer.open_window()

    async def publish_overdue(self) -> None:
        """Publish now what an evaluation or a trial held up."""
        if self._overdue:
            await self.publish()

    async def published(self) -> None:
        """Returns once every engine serves the version that was published last.

        Raises:
            WeightUpdateError: an engine does not.
        """
        await self.releases.published()

    async def finish(self) -> None:
        """Training has ended: returns once the engines serve all of it."""
        await self.releases.judge()
        await self.publish_overdue()
        await self.published()

    async def resume(self, *, new: bool) -> None:
        """See to it that engines serve the weights that are trained.

        Args:
            new: the backend has those of the start, not a checkpoint's.
        """
        progress = self._updater.progress
        self.releases.adopt(progress)
        versions = await self._weights.serving()
        before = (await self._pool.get_statistics(TRAIN))["policy_version"]
        bare = self._weights.gives_adapters  # engines have none yet
        if not new or any(versions) or before or bare:
            # A number that nobody has seen: steps of before must not pass for ours.
            newest = max([progress.version, before, *versions])
            progress.lose(newest, self._async.trigger_parameter_sync_step)
            await self.restore()
            await self.publish()
        else:  # nothing is published: tell the pool that it has a consumer from now on
            await self._pool.advance_version(0)

    async def restore(self) -> bool:
        """Train on from the weights that engines serve, if others were rolled back."""
        if (path := self.releases.to_restore) is None:
            return False
        await self._compute(self._updater.backend.load_weights, path)
        self.releases.restored(path)
        return True

    async def borrow_memory(self) -> None:
        """The engines' memory is the backend's, until `return_memory`. Idempotent."""
        if self.memory.lends:
            with self._phases("hand_over"):
                await self.memory.lend()

    async def return_memory(self) -> None:
        """Engines generate again."""
        if self.memory.lends:
            with self._phases("hand_over"):
                await self._compute(self._updater.backend.free_cache)
                await self.memory.take_back()

    def _write(self, version: int) -> tuple[Path, int]:
        """Where the weights are, and how many updates they contain."""
        path = self._weights.write(version, self._updater.backend)
        return path, self._updater.progress.updates
