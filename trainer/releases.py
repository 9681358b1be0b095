"""This module publishes versions of the weights, tries them out and takes them back, so that
engines serve no version that is worse than the one before.

    give ──► v+1 on the engines ──on trial──► stays: the next one may be published
                    │                  └─falls below the version before─┐
       or on one: canary ──stays──► on all                              │
    `stepwell rollback` ────────────────────────────────────────────────┴─► roll back to k:
             v+2 with the weights of k, at once ─► the backend loads them before its next batch

With two engines or more, a guard and no windows, a version is a *canary* first: one engine has it,
the others what is committed (`current.json`), and so has an engine that restarts. A trainer that
dies meanwhile leaves this to the next, which publishes its own version to all.

A roll-back publishes what is on disk, as a new version through the same transaction: numbers never
go back, and nothing waits for a batch under way. That batch is trained to its end on the weights
that were taken back, and forgotten with them; until the backend has loaded the others nothing is
published. The optimizer begins anew. Steps that bad versions sampled stay in the pool: they are
off-policy, with known log-probs (`Progress.roll_back`).

Owns: the number of the next version, trials, roll-backs and requests for them. Does not own: how
weights get to engines (`publication.py`), the test (`guard.py`), when to publish (`publisher.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from stepwell.backends.config import PublishMode
from stepwell.backends.errors import (
    BackendError,
    UnsupportedByBackendError,
    VersionNotKeptError,
    WeightUpdateError,
)
from stepwell.backends.weights import Publication
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Group
from stepwell.trainer.config import PublishConfig
from stepwell.trainer.guard import Guard
from stepwell.trainer.progress import Progress
from stepwell.trainer.publication import EngineWeights
from stepwell.trainer.rollback_file import RollBackFile

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks for a request."""


class Releases:
    """The versions of a run; see the module's docstring.

    Args:
        progress: of the trainer.
        folder: of the run, where roll-backs are asked for.
        updates_per_sync: optimizer steps between two publications.
        tries_out: on one engine first: generation goes on under the version before.
        can_restore: the backend can load the weights of an earlier version.
        overdue: publishes what was held while a version was on trial.
        tell: shows the user a line.
    """

    def __init__(
        self,
        weights: EngineWeights,
        pool: DataPoolClient,
        config: PublishConfig,
        progress: Progress,
        *,
        folder: Path,
        mode: PublishMode,
        updates_per_sync: int,
        tries_out: bool,
        can_restore: bool,
        overdue: Callable[[], Awaitable[None]],
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self._weights = weights
        self._pool = pool
        self._progress = progress
        self._requests = RollBackFile(folder)
        self._mode: PublishMode = mode
        self._updates_per_sync = updates_per_sync
        self._can_restore = can_restore
        self._publish_overdue = overdue
        self._tell = tell
        self._guard = Guard(config.guard, pool) if config.guard is not None else None
        self._tries_out = (
            self._guard is not None and tries_out and config.canary_share is not None
        ) and weights.has_canaries
        self._canary: Path | None = None
        """Where the version on trial is, if one engine alone has it."""
        self._lock = asyncio.Lock()
        self._publication: asyncio.Task[Publication] | None = None
        self._trial: asyncio.Task[None] | None = None
        self._on_trial: int | None = None
        self._undecided = False
        """It waits for rewards."""
        self._is_running = False
        self._failure: Exception | None = None
        self.to_restore: Path | None = None
        """Weights that the backend has to load: the engines serve them, training had others."""
        self.rolled_back = self.unjudged = 0

    @property
    def holds(self) -> bool:
        """Nothing may be published now: a version is on trial, or the backend's weights were taken
        back."""
        return self._on_trial is not None or self.to_restore is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Requests are heard and versions judged inside the block."""
        tending = asyncio.create_task(self._noticed(self._tend()))
        following = asyncio.create_task(self._guard.follow()) if self._guard else None
        self._begin_trial(self._progress.version)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            if self._canary is not None:
                await self.judge()  # engines outlive an attached trainer: all of one version
            for task in (tending, following, self._trial):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})

    async def give(self, write: Callable[[int], Awaitable[tuple[Path, int]]]) -> bool:
        """Publish the next version, unless that is held; returns once it is written.

        Args:
            write: makes the version of that number; its folder, and the updates it contains.
        """
        async with self._lock:
            await self._arrived()
            if self.holds:
                return False
            progress = self._progress
            version = progress.version + 1
            path, updates = await write(version)
            # Before the first engine has them: their steps must find their version in the table.
            progress.version = version
            progress.published[version] = updates
            # The first of a trainer goes to all: whatever a former one left ends with it.
            await self._publish(path, version, canary=self._tries_out and self._is_running)
            self._begin_trial(version)
        return True

    async def published(self) -> None:
        """Returns once every engine serves the version that was published last.

        Raises:
            WeightUpdateError: an engine does not.
        """
        if self._canary is not None:
            await self.judged()
        await self._arrived()

    async def judged(self) -> None:
        """Returns once no version is on trial."""
        while self._trial is not None and not self._trial.done():
            await asyncio.wait({self._trial})

    async def roll_back(self, to: int | None, why: str) -> int:
        """Serve the weights of version `to` (None: the one before) as a new version; its number.

        Raises:
            UnsupportedByBackendError: training could not go on from them.
            VersionNotKeptError: they are not on disk.
            WeightUpdateError: no engine takes them.
        """
        if not self._can_restore:
            raise UnsupportedByBackendError(
                "the training backend does not implement load_weights(): engines would serve the "
                "earlier version and training go on from the later one; implement it"
            )
        async with self._lock:
            await self._arrived()
            progress, store = self._progress, self._weights.store
            bad = progress.version
            to = store.find(to, bad)
            path = await asyncio.to_thread(store.write_again, bad + 1, to)
            version = progress.roll_back(to, self._updates_per_sync)
            self.to_restore = path
            await self._publish(path, version)
            await self._arrived()
        self.rolled_back += 1
        self._tell(
            f"version {bad} is rolled back, version {version} has the weights of "
            f"{progress.weights_of(version)}: {why}"
        )
        return version

    def restored(self, path: Path) -> None:
        """The backend has loaded `path`, which was to be restored."""
        if path != self.to_restore:  # rolled back once more meanwhile
            return
        progress = self._progress
        self.to_restore = None
        progress.published[progress.version] = progress.updates

    def adopt(self, progress: Progress) -> None:
        """Of a run that goes on from a checkpoint: a roll-back since then holds."""
        current = self._weights.store.current()
        if current is None or current.version <= progress.version:
            return
        if self._weights.store.weights_of(current.version) != current.version:
            self.to_restore = Path(current.path)

    def scored(self, groups: Sequence[Group]) -> None:
        """Rewards that only the trainer knows."""
        if self._guard is not None:
            self._guard.scored(groups)

    def metrics(self) -> dict[str, float]:
        counts: dict[str, float] = {"publish/rolled_back": self.rolled_back}
        if self._guard is not None:
            counts["publish/unjudged"] = self.unjudged
        last = self._publication
        if last is not None and last.done() and not last.cancelled() and not last.exception():
            counts["publish/seconds"] = last.result().seconds
            counts["publish/version"] = last.result().version
        return {name: float(n) for name, n in counts.items()}

    async def judge(self) -> None:
        """End a trial by what has come: nobody waits for more."""
        if self._on_trial is not None and self._undecided:
            version = self._on_trial
            self._end_trial()
            await self._try_out(version, wait=False)

    # -- inside -------------------------------------------------------------------------------

    async def _publish(self, path: Path, version: int, *, canary: bool = False) -> None:
        await self._pool.advance_version(version)
        self._canary = path if canary else None
        if canary:
            self._publication = asyncio.create_task(
                self._weights.try_out(path, version, self._mode)
            )
            return
        self._publication = asyncio.create_task(self._weights.publish(path, version, self._mode))

    def _begin_trial(self, version: int) -> None:
        if self._guard is not None:
            self._end_trial()
            self._on_trial, self._undecided = version, True
            self._trial = asyncio.create_task(self._noticed(self._try_out(version)))

    def _end_trial(self) -> None:
        """Only while it waits for rewards: what follows from them is done to its end."""
        if self._undecided and self._trial is not None:
            self._trial.cancel()
            self._on_trial, self._undecided = None, False

    async def _try_out(self, version: int, *, wait: bool = True) -> None:
        """Until the rewards of `version` say whether it stays."""
        if self._guard is None:
            return
        await self._arrived()
        beside = self._canary is not None
        verdict = await self._guard.verdict(version, self._progress, wait=wait, beside=beside)
        log.info("%s: %s", verdict.outcome, verdict.why)
        self.unjudged += verdict.outcome == "unjudged"
        self._undecided = False
        try:
            if verdict.outcome == "falls_below":
                await self.roll_back(None, verdict.why)
            elif self._canary is not None:
                await self._publish(self._canary, version)
                await self._arrived()
        except VersionNotKeptError as e:
            self._tell(f"{verdict.why}, but {e}")
        finally:
            self._on_trial = None
        if wait:
            await self._publish_overdue()

    async def _arrived(self) -> None:
        """The last publication has ended.

        Raises:
            WeightUpdateError: an engine does not have it.
        """
        if self._failure is not None:  # of a roll-back, or of what a trial had held up
            raise self._failure
        if (publication := self._publication) is not None:
            await asyncio.shield(publication)

    async def _tend(self) -> None:
        """Do what `stepwell rollback` asks for."""
        while True:
            await asyncio.sleep(LOOK_S)
            if (request := self._requests.taken()) is None:
                continue
            self._end_trial()
            try:
                version = await self.roll_back(request.to, "asked for by `stepwell rollback`")
            except BackendError as e:
                self._requests.answer(request, error=str(e))
                if isinstance(e, WeightUpdateError):
                    raise
            else:
                weights_of = self._progress.weights_of(version)
                self._requests.answer(request, version=version, weights_of=weights_of)

    async def _noticed(self, work: Coroutine[None, None, None]) -> None:
        """`work`; what makes it fail is raised by `published`."""
        try:
            await work
        except Exception as e:  # raised to whoever publishes next
            self._failure = e
            log.exception("a release has failed")
