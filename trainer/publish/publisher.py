"""Publishes what was trained, so that agents are served by the newest weights, tries versions out,
and trains on from what a roll-back served instead.

    due ──► write, in the compute thread ──► publish, beside training ──► every engine serves v+1
     │ an evaluation has pinned the version of now, one is on trial, or no checkpoint knows of the
     │ roll-back that training goes on from
     └──► overdue: published, with the weights of then, as soon as that has ended

    v+1 on the engines ──on trial──► stays: the next one may be published
              │                 └─falls below the version before─► v+2 with the weights of v
    or on one: canary ──stays──► on all

    `stepwell rollback`, or a trial ──► commits a version that training does not have
         └──► superseded: nothing is written ──► adopted before the next batch or checkpoint

The weight store says what is served, and its lock is the meeting point of everybody who publishes:
a transaction names the committed version that its publisher has seen, and commits nothing if
another one is there (`SupersededError`). So nobody publishes over a roll-back unawares. The batch
under way is trained to its end, on weights that were taken back, and forgotten with them: then the
backend loads what is served. The optimizer begins anew. Steps that bad versions sampled stay in the
pool: they are off-policy, with known log-probs (`Progress.roll_back`).

With two engines or more, a guard and no windows, a version is a *canary* first: one engine has it,
the others what is committed (`current.json`), and so has an engine that restarts. A trainer that
dies meanwhile leaves this to the next, which publishes its own version to all.

Where generation waits for publications (`async_training.mode` with windows) the trainer does too.
While the trainer computes on GPUs that it shares with the engines, they lend it their memory.

Owns when a version is due, its number, the windows around it, trials and adoption. Does not own the
transaction (`backends/weights/`), a roll-back's own steps (`rollback.py`), the test of a trial
(`guard.py`) or how memory changes hands (`memory.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stepwell.backends.config import PublishMode
from stepwell.backends.engines.api import Engine
from stepwell.backends.errors import (
    EngineError,
    SupersededError,
    UnsupportedByBackendError,
    VersionNotKeptError,
    WeightUpdateError,
)
from stepwell.backends.weights import Publication, Transport, WeightStore, publish
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN, Group
from stepwell.trainer.config import AsyncTrainingConfig, PublishConfig
from stepwell.trainer.group_producer import GroupProducer
from stepwell.trainer.metrics import Phases
from stepwell.trainer.publish.guard import Guard
from stepwell.trainer.publish.memory import EngineMemory
from stepwell.trainer.publish.rollback import roll_back
from stepwell.trainer.threads import ComputeThread
from stepwell.trainer.updater import Updater

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds between two tries of engines that are down."""
NO_LOADING = (
    "the training backend does not implement load_weights(): engines would serve the earlier "
    "version and training go on from the later one; implement it"
)


class Publisher:
    """Publications of a run; see the module's docstring.

    Args:
        updater: its backend's weights are published.
        compute: thread that the updater computes in.
        transport: sends versions to the engines; the publisher closes it.
        lends_memory: engines lend the trainer their memory while it computes.
        patience_s: seconds that the first engine may take to come back.
        phases: notes how long publications and hand-overs of memory took.
        notify: shows the user a line.
    """

    def __init__(
        self,
        config: PublishConfig,
        async_training: AsyncTrainingConfig,
        engines: Sequence[Engine],
        store: WeightStore,
        updater: Updater,
        compute: ComputeThread,
        *,
        pool: DataPoolClient,
        producer: GroupProducer,
        phases: Phases,
        transport: Transport,
        lends_memory: bool = False,
        patience_s: float = 600.0,
        notify: Callable[[str], None] = log.info,
    ) -> None:
        self.memory = EngineMemory(engines, store.lock, lends=lends_memory)
        self._async = async_training
        self._engines = list(engines)
        self._store = store
        self._updater = updater
        self._progress = updater.progress
        self._compute = compute
        self._pool = pool
        self._producer = producer
        self._phases = phases
        self._transport = transport
        self._patience_s = patience_s
        self._notify_user = notify
        self._mode: PublishMode = "retract" if async_training.partial_rollout else "drain"
        self._guard = Guard(config.guard, pool) if config.guard is not None else None
        self._tries_out = (
            self._guard is not None
            and config.canary_share is not None
            and not async_training.has_windows  # generation goes on under the version before
            and len(self._engines) > 1
        )
        self._is_running = False
        self._lock = asyncio.Lock()
        """Held while a version is written, rolled back or adopted."""
        self._publication: asyncio.Task[Publication | None] | None = None
        """The last publication; its result is None if it was superseded."""
        self._failure: Exception | None = None
        """Error of a trial, raised to whoever publishes or waits next."""
        self._overdue = False
        self._unsaved: int | None = None
        """Version of a roll-back that training goes on from and no checkpoint knows: published over
        it, it would be lost with a crash, and what it took back would be served again."""
        self._pins = 0
        self._unpinned = asyncio.Event()
        self._unpinned.set()
        self._canary: Path | None = None
        """Folder of the version on trial, if one engine alone has it."""
        self._trial: asyncio.Task[None] | None = None
        self._on_trial: int | None = None
        self._undecided = False
        """The trial waits for rewards."""
        self._rolled_back = self._unjudged = 0
        self._gather_s = 0.0
        """Seconds in which the last version was gathered and written."""

    # -- the loop's calls ---------------------------------------------------------------------

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Versions are judged inside the block."""
        following = asyncio.create_task(self._guard.follow()) if self._guard else None
        self._begin_trial(self._progress.version)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            await self.memory.take_back()  # who stops within a batch has it still
            if self._canary is not None:  # engines outlive an attached trainer: all of one version
                await self.judge()
            await self._transport.close()
            for task in (following, self._trial):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})

    async def resume(self, *, new: bool, save: Callable[[], Awaitable[None]]) -> None:
        """See to it that engines serve the weights that are trained.

        Args:
            new: the backend has the weights of the start, not a checkpoint's.
            save: writes a checkpoint. Awaited where the weights of a roll-back were loaded over
                those of the one before, from which the next process would go on.
        """
        progress, backend = self._progress, self._updater.backend
        refused = NO_LOADING if backend.lacks("load_weights") else None
        self._store.refuse_roll_backs(refused)
        versions = await self._serving()
        async with self._store.lock.held():  # a command that rolls back has not begun, or has ended
            current = self._store.current()
            before = (await self._pool.get_statistics(TRAIN))["policy_version"]
            committed = 0 if current is None else current.version
            known = progress.version
            if new and not any([*versions, before, committed]) and not self._transport.adapter:
                # Nothing is published: tell the pool that it has a consumer from now on.
                await self._pool.advance_version(0)
                return
            # A number that nobody has seen: steps of before must not pass for ours.
            newest = max([known, before, committed, *versions])
            progress.lose(newest, self._async.trigger_parameter_sync_step)
            taken_back = known < committed != self._store.weights_of(committed)
            if current is not None and taken_back:
                await self._compute(backend.load_weights, Path(current.path))
                progress.published[progress.version] = progress.updates
        if taken_back:
            await save()
        await self.publish()

    async def adopt(self) -> bool:
        """Train on from a version that was committed by a roll-back; False: there is none."""
        if not self.is_superseded:
            return False
        async with self._lock:
            self._end_trial()
            await self._wait_ended()
            async with self._store.lock.held():  # nobody prunes what is loaded
                current = self._store.current()
                if current is None:
                    return False
                of = self._store.weights_of(current.version)
                await self._compute(self._updater.backend.load_weights, Path(current.path))
            sync = self._async.trigger_parameter_sync_step
            self._progress.roll_back(current.version, of, sync)
            self._canary, self._overdue, self._unsaved = None, False, current.version
            self._rolled_back += 1
        self._notify_user(
            f"version {current.version} was served by a roll-back; training goes on from it, with "
            f"the weights of {of}"
        )
        return True

    async def saved(self, version: int) -> None:
        """A checkpoint of training at this version is durable."""
        if self._unsaved is not None and self._unsaved <= version:
            self._unsaved = None
            await self._publish_overdue()

    @property
    def is_superseded(self) -> bool:
        """The engines were given a version that training does not have."""
        current = self._store.current()
        return current is not None and current.version not in self._progress.published

    @property
    def is_publishing(self) -> bool:
        """Engines are given a version now."""
        return self._publication is not None and not self._publication.done()

    async def after_step(self, *, is_last: bool = True) -> None:
        """An optimizer step was taken: engines get the weights if they are due, and their memory
        then or when the batch ends.

        Args:
            is_last: engines are needed before the next step, whatever is due.
        """
        due = self._progress.updates % self._async.trigger_parameter_sync_step == 0
        if not (due or is_last) or (due and await self._publish_into_lent()):
            return
        await self.return_memory()
        if due:
            with self._phases("publish"):
                await self.publish()

    async def _publish_into_lent(self) -> bool:
        """Publish while the engines lend all but their weights' memory; False: it is not lent, or
        somebody needs engines that generate, or the store's lock, which the lend holds."""
        if not self.memory.lends or not self.memory.is_lent:
            return False
        if self._guard or self._async.has_windows or self._pins or self._unsaved is not None:
            return False
        async with self._lock:
            if self.is_publishing:
                return False
            if self.is_superseded:
                return False
            await self._wait_ended()  # raises what failed
            with self._phases("hand_over"):
                await self._compute(self._updater.free_cache)
                await self.memory.take_back_weights()
            with self._phases("publish"):
                try:
                    await self._publish_next()
                finally:
                    if self._publication is not None:
                        await asyncio.wait({self._publication})
                    await self.memory.take_back(published=True)
                await self._wait_ended()
        return True

    async def after_leaving_out(self) -> None:
        """A batch was not trained: what waits for a publication goes on under the same weights."""
        due = self._progress.updates % self._async.trigger_parameter_sync_step == 0
        if due and self._async.has_windows:
            await self._producer.close_window()
            self._producer.open_window()

    async def publish(self) -> None:
        """Give the engines the weights of now as the next policy version.

        Returns once they are written: training goes on while the engines load them, unless
        generation waits for them. What fails then is raised by the next `publish` or
        `wait_published`.
        """
        if self._unsaved is not None:
            self._overdue = True
            return
        windows = self._async.has_windows
        if windows:
            await self._unpinned.wait()
            await self._producer.close_window()
            await self.judge()
        if self._pins and not windows:
            self._overdue = True
        else:
            async with self._lock:
                await self._wait_ended()
                self._overdue = self._on_trial is not None
                if not self._overdue and not self.is_superseded:
                    await self._publish_next()
        if windows:
            await self.wait_published()
            self._producer.open_window()

    async def wait_published(self) -> None:
        """Return once every engine serves the version that was published last.

        Raises:
            WeightUpdateError: an engine does not.
        """
        if self._canary is not None:
            await self.wait_judged()
        await self._wait_ended()

    async def finish(self) -> None:
        """End: returns once the engines serve all that was trained."""
        await self.judge()
        await self._publish_overdue()
        await self.wait_published()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[None]:
        """Hold the version that the engines serve, for an evaluation: publications wait for the end
        of the block. A roll-back does not.

        Raises:
            WeightUpdateError: an engine does not serve the version.
        """
        self._pins += 1
        self._unpinned.clear()
        try:
            await self.wait_published()
            yield
        finally:
            self._pins -= 1
            if not self._pins:
                self._unpinned.set()
        await self._publish_overdue()

    async def borrow_memory(self) -> None:
        """The engines' memory is the backend's, until `return_memory`. Idempotent."""
        if self.memory.lends:
            with self._phases("hand_over"):
                await self.memory.lend()

    async def return_memory(self) -> None:
        """Engines generate again."""
        if self.memory.lends:
            with self._phases("hand_over"):
                await self._compute(self._updater.free_cache)
                await self.memory.take_back()

    def scored(self, groups: Sequence[Group]) -> None:
        """Count rewards that only the trainer knows."""
        if self._guard is not None:
            self._guard.scored(groups)

    def metrics(self) -> dict[str, float]:
        counts: dict[str, float] = {"publish/rolled_back": self._rolled_back}
        if self._guard is not None:
            counts["publish/unjudged"] = self._unjudged
        last = self._publication
        ended = last is not None and last.done() and not last.cancelled() and not last.exception()
        if last is not None and ended and (publication := last.result()) is not None:
            counts["publish/seconds"] = publication.seconds
            counts["publish/version"] = publication.version
            counts["publish/gather_seconds"] = self._gather_s
            counts["publish/transfer_seconds"] = publication.transfer_s
            counts["publish/load_seconds"] = publication.load_s
            counts["publish/pause_seconds"] = publication.pause_s
        return {name: float(n) for name, n in counts.items()}

    # -- publications -------------------------------------------------------------------------

    async def _publish_next(self) -> None:
        progress = self._progress
        path, updates = await self._compute(self._write)
        version = self._store.number(path)
        # Before the first engine has them: their steps must find their version in the table.
        progress.published[version] = updates
        progress.version = version
        await self._pool.advance_version(version)
        # The first of a trainer goes to all: whatever a former one left ends with it.
        self._begin(path, version, canary=self._tries_out and self._is_running)
        self._begin_trial(version)

    def _write(self) -> tuple[Path, int]:
        """Write the backend's weights of now; their folder, and how many updates they contain."""
        backend, progress = self._updater.backend, self._progress
        save = backend.save_adapters if self._transport.adapter else backend.save_weights
        begun = time.perf_counter()
        path = self._store.write(max(progress.published) + 1, save)
        self._transport.written(str(path))
        self._gather_s = time.perf_counter() - begun
        return path, progress.updates

    def _begin(self, path: Path, version: int, *, canary: bool = False) -> None:
        """Publish beside training; `_wait_ended` waits for it."""
        self._canary = path if canary else None
        self._publication = asyncio.create_task(self._publish(path, version))

    async def _publish(self, path: Path, version: int) -> Publication | None:
        try:
            if self._canary is not None:
                return await self._publish_to_one(path, version)
            done = await self._publish_to(self._engines, path, version)
            for url, why in done.fenced.items():
                log.warning("version %d is committed without %s, which %s", version, url, why)
            return done
        except SupersededError as e:
            log.warning("version %d is not published: %s", version, e)
            self._end_trial()
            self._canary = None
            await asyncio.to_thread(self._store.discard, path)
            return None

    async def _publish_to_one(self, path: Path, version: int) -> Publication:
        """Give a version to one engine alone, without committing it; the last that takes it. A
        crash of all is waited out.

        Raises:
            WeightUpdateError: none does.
        """
        if self._store.current() is None and self._store.base is not None:
            # What the others serve, and a canary goes back to.
            self._store.commit(0, self._store.base)
        give_up = time.monotonic() + self._patience_s
        while True:
            has_refused = False
            for engine in reversed(self._engines):
                try:
                    return await self._publish_to([engine], path, version, canary=True)
                except WeightUpdateError as e:
                    failure = e
                    has_refused |= e.replica is not None  # else it was lost, though it may be back
                    log.warning("version %d is tried out elsewhere: %s", version, e)
            if has_refused or time.monotonic() >= give_up:
                raise failure
            await asyncio.sleep(RETRY_S)

    async def _publish_to(
        self, engines: Sequence[Engine], path: Path, version: int, *, canary: bool = False
    ) -> Publication:
        if not engines:
            self._store.commit(version, path, adapter=self._transport.adapter)
            return Publication(version, seconds=0.0)
        how: dict[str, Any] = {
            "store": self._store,
            "transport": self._transport,
            "canary": canary,
            "seen": self._seen(),
        }
        if self.memory.lends and self.memory.has_weights:
            lent: dict[str, Any] = {"locked": True, "complete": self.memory.complete}
            try:
                return await publish(engines, path, version, self._mode, **how, **lent)
            except WeightUpdateError as e:
                log.warning("version %d is published again: %s", version, e)
            # Without the lock, which a supervisor needs to bring an engine back.
            await self.memory.take_back(published=True)
        patience_s = 0.0 if canary else self._patience_s
        return await publish(engines, path, version, self._mode, **how, patience_s=patience_s)

    def _seen(self) -> int:
        """The committed version.

        Raises:
            SupersededError: training does not have it.
        """
        current = self._store.current()
        if current is not None and current.version not in self._progress.published:
            raise SupersededError(current.version)
        return 0 if current is None else current.version

    async def _wait_ended(self) -> None:
        """Return once the last publication has ended.

        Raises:
            WeightUpdateError: an engine does not have it.
        """
        if self._failure is not None:
            raise self._failure
        if (publication := self._publication) is not None:
            await asyncio.shield(publication)

    async def _publish_overdue(self) -> None:
        """Publish now what an evaluation or a trial held up."""
        if self._overdue:
            await self.publish()

    async def _serving(self) -> list[int]:
        """The version that each engine serves; one that is down is waited for.

        Raises:
            EngineError: it does not come back in time.
        """
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                return [await engine.weight_version() for engine in self._engines]
            except EngineError as e:
                if time.monotonic() >= give_up:
                    raise
                log.warning("an engine is down: %s", e)
            await asyncio.sleep(RETRY_S)

    # -- trials -------------------------------------------------------------------------------

    async def judge(self) -> None:
        """End a trial by what has come: nobody waits for more."""
        if self._on_trial is not None and self._undecided:
            version = self._on_trial
            self._end_trial()
            await self._try_out(version, wait=False)

    async def wait_judged(self) -> None:
        """Return once no version is on trial."""
        while self._trial is not None and not self._trial.done():
            await asyncio.wait({self._trial})

    def _begin_trial(self, version: int) -> None:
        if self._guard is not None:
            self._end_trial()
            self._on_trial, self._undecided = version, True
            self._trial = asyncio.create_task(self._trial_of(version))

    def _end_trial(self) -> None:
        """End a trial that waits for rewards; what follows from a verdict is done to its end."""
        if self._undecided and self._trial is not None:
            self._trial.cancel()
            self._on_trial, self._undecided = None, False

    async def _try_out(self, version: int, *, wait: bool = True) -> None:
        """Wait for the verdict on `version`, and do what follows from it."""
        if self._guard is None:
            return
        await self._wait_ended()
        beside = self._canary is not None
        verdict = await self._guard.verdict(version, self._progress, wait=wait, beside=beside)
        log.info("%s: %s", verdict.outcome, verdict.why)
        self._unjudged += verdict.outcome == "unjudged"
        self._undecided = False
        try:
            if verdict.outcome == "falls_below":
                await self._roll_back(version, verdict.why)
            elif self._canary is not None:
                self._begin(self._canary, version)
                await self._wait_ended()
        except VersionNotKeptError as e:
            self._notify_user(f"{verdict.why}, but {e}")
        finally:
            self._on_trial = None
        if wait:
            await self._publish_overdue()

    async def _roll_back(self, bad: int, why: str) -> None:
        """Serve the weights of the version before `bad` as a new version, which is adopted."""
        if self._updater.backend.lacks("load_weights"):
            raise UnsupportedByBackendError(NO_LOADING)
        async with self._lock:
            await self._wait_ended()
            if self._progress.version != bad:  # another roll-back was adopted meanwhile
                return
            try:
                version = await roll_back(
                    self._engines,
                    self._store,
                    self._pool,
                    None,
                    before=bad,
                    seen=self._seen(),
                    transport=self._transport,
                    patience_s=self._patience_s,
                )
            except SupersededError as e:  # somebody has rolled back already
                log.warning("version %d is not rolled back: %s", bad, e)
                return
            self._canary = None
        of = self._store.weights_of(version)
        self._notify_user(
            f"version {bad} is rolled back, version {version} has the weights of {of}: {why}"
        )

    async def _trial_of(self, version: int) -> None:
        """Run `_try_out`; what makes it fail is raised by `wait_published`."""
        try:
            await self._try_out(version)
        except Exception as e:  # raised to whoever publishes next
            self._failure = e
            log.exception("a trial has failed")
