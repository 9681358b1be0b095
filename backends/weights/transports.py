"""Ways of a version's weights to the engines: one class each, chosen by `engine.weight_transport`.

    disk     the engine reads the version's directory
    delta    it reads the tensors that changed since the version that it has (`delta.py`)
    nccl     flat buckets, broadcast by rank 0 (`sender.py`) in one process group that lasts: NCCL
             to GPUs, gloo to CPUs
    ipc      the same buckets in memory that rank 0 and the engines share: of one GPU that one
             engine has, else of the machine
    lora     only the adapter, which the engine adds to the base model

    prepare (engines generate) ─► send, to each (paused) ─► end

The version is on disk whatever the transport: from there a crashed engine restarts, a rollback
restores, and all engines load if a group breaks. So a replica that dies amid a broadcast takes no
other with it.

Worked example, nccl, 2 buckets, engines A and B in a group. `prepare` finds the group whole and
both buckets packed. An embedded engine takes both now and holds them; SGLang, which loads what it
receives, takes them in the pause. A dies at the first: B's request fails with the connection, the
group is left, B loads the version's directory; A is fenced. The next publication makes a new group.

Owns what is sent. Does not own order, verification or failure (`transaction.py`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from safetensors import SafetensorError

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import Bucket, Engine, EngineState
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import BackendError, EngineError, EngineRequestError
from stepwell.backends.weights.delta import write_delta
from stepwell.backends.weights.digest import checkpoint_hashes
from stepwell.backends.weights.store import Published, draft_name
from stepwell.datapool.types import CANARY

log = logging.getLogger(__name__)

ADAPTER_NAME = "policy"
"""The name of the adapter in the engines; requests carry it as `lora_path`."""
JOIN_TIMEOUT_S = 60.0
"""For engines to join the sender's process group, and for each broadcast: a bucket of 512 MB takes
that long at 70 Mbit/s. Then the version is read from disk."""
LEAVE_S = 5.0
"""For engines and the sender to leave what has failed."""
_FAILURES = (BackendError, OSError, RuntimeError, ValueError)
"""Errors of an engine, a group or the sender, after which the disk is left."""
Lead: TypeAlias = Callable[..., Any]
"""`TrainingBackend.lead`: calls a method of the `Sender` beside the weights, by its name."""


@dataclass(slots=True)
class Target:
    """A replica, and what it was before the publication."""

    engine: Engine
    before: EngineState = field(default_factory=EngineState)


@dataclass(frozen=True, slots=True)
class Update:
    """A version on its way to engines."""

    path: str
    version: int
    flush: bool = True
    """Drop the prefix cache. Not with requests held in place: a real SGLang cannot and would report
    a failure."""
    drains: bool = False
    """Engines are not paused: requests may run between two of ours."""
    canary: bool = False
    """True: some engines get it, and it is not committed."""

    @property
    def name(self) -> str:
        """The version as engines say it."""
        return f"{self.version}{CANARY}" if self.canary else str(self.version)


class Transport(ABC):
    """A way to the engines of a run, for all its publications, one after another."""

    adapter = False
    """True: an adapter is published, not a model."""
    transfer_s = 0.0
    """Seconds that bytes of this publication travelled, apart from loading."""

    def written(self, path: str) -> None:
        """The backend has just written the version in `path`, and not computed since."""
        return

    async def prepare(
        self, update: Update, targets: Sequence[Target], committed: Published | None
    ) -> None:
        """Do what can be done while engines generate."""
        return

    @abstractmethod
    async def send(self, update: Update, target: Target) -> None:
        """Returns when the engine has the weights under the new version.

        Raises:
            EngineError: it has not, or one cannot know.
        """

    async def restore(self, update: Update, target: Target, to: Published) -> None:
        """Bring a replica to a version that is on disk, whatever it has now."""
        await target.engine.update_weights_from_disk(
            to.path, str(to.version), flush_cache=update.flush
        )

    async def end(self) -> None:
        """The publication has ended: free what only it needed."""
        return

    async def close(self) -> None:
        """The run ends."""
        return


class Disk(Transport):
    async def send(self, update: Update, target: Target) -> None:
        await target.engine.update_weights_from_disk(
            update.path, update.name, flush_cache=update.flush
        )


class Delta(Disk):
    """Differences, for a replica that has the committed version. Others, which missed one, read the
    whole."""

    def __init__(self) -> None:
        self._hashes: tuple[str, dict[str, str]] = ("", {})
        """Path and tensors of the version that was published last."""
        self._since: int | None = None
        self._folder = Path()

    async def prepare(
        self, update: Update, targets: Sequence[Target], committed: Published | None
    ) -> None:
        if committed is not None:
            await asyncio.to_thread(self._compare, update, committed)

    def _compare(self, update: Update, committed: Published) -> None:
        path, before = self._hashes
        if path != committed.path:
            try:
                before = checkpoint_hashes(committed.path, "auto")
            except (OSError, SafetensorError) as e:
                log.warning("version %s goes whole: %s", update.name, e)
                before = {}
        now = checkpoint_hashes(update.path, "auto")
        self._hashes = update.path, now
        changed = [name for name, found in now.items() if before.get(name) != found]
        if before.keys() <= now.keys() and len(changed) < len(now):
            source = Path(update.path)
            self._folder = source.with_name(draft_name(f"delta{update.version}"))
            shutil.rmtree(self._folder, ignore_errors=True)
            some = changed or [next(iter(now))]
            try:
                write_delta(source, some, committed.version, self._folder)
            except (OSError, SafetensorError) as e:  # a full disk, on which the version is whole
                log.warning("version %s goes whole: %s", update.name, e)
                shutil.rmtree(self._folder, ignore_errors=True)
            else:
                self._since = committed.version

    async def send(self, update: Update, target: Target) -> None:
        has = target.before
        if self._since is None or has.is_canary or has.version != self._since:
            await super().send(update, target)
            return
        await target.engine.update_weights_from_disk(
            str(self._folder), update.name, flush_cache=update.flush
        )

    async def end(self) -> None:
        if self._since is not None:
            self._since = None
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class Buckets(Transport):
    """Flat buckets from the sender, taken by every replica in a session of its own."""

    def __init__(self, lead: Lead, config: EngineConfig) -> None:
        self._lead = lead
        self._limit = config.weight_bucket_mb << 20
        self._buckets: list[Bucket] = []
        self._stages = False
        """All engines hold what they take until their session ends."""
        self._staged: list[Target] = []
        """Replicas with such a session."""
        self._failure = ""
        """Reason why this publication goes on from disk."""
        self._once: dict[int, asyncio.Task[Any]] = {}
        """Work on each bucket that the sender does once for all replicas."""
        lead("use")

    def written(self, path: str) -> None:
        self._lead("held_as", path)

    async def prepare(
        self, update: Update, targets: Sequence[Target], committed: Published | None
    ) -> None:
        self._failure, self._once, self.transfer_s = "", {}, 0.0
        self._stages = all(t.before.is_embedded for t in targets)
        # An engine that is not paused and loads what it takes must take all of it at once.
        limit = None if update.drains and not self._stages else self._limit
        try:
            self._buckets = await self._ask("plan", update.path, limit)
            await self._meet(targets)
            if self._stages:
                self._staged = list(targets)
                await asyncio.gather(*(self._stage(update, target) for target in targets))
        except _FAILURES as e:
            await self._give_up(update, e)

    async def _stage(self, update: Update, target: Target) -> None:
        try:
            await self._take(update, target)
        except _FAILURES as e:  # at once: the others may wait for this one
            await self._give_up(update, e)

    async def send(self, update: Update, target: Target) -> None:
        if not self._failure:
            try:
                if not self._stages:
                    await self._take(update, target)
                await target.engine.end_weight_update(update.name)
                self._staged = [staged for staged in self._staged if staged is not target]
                return
            except _FAILURES as e:
                await self._give_up(update, e)
        await target.engine.update_weights_from_disk(
            update.path, update.name, flush_cache=update.flush
        )

    async def end(self) -> None:
        staged, self._staged = self._staged, []
        # Of a publication that came to nothing: what they hold is dropped.
        await _briefly(target.engine.end_weight_update() for target in staged)

    async def _take(self, update: Update, target: Target) -> None:
        """The replica takes every bucket."""
        engine, last = target.engine, len(self._buckets) - 1
        await engine.begin_weight_update()
        try:
            for number in range(last + 1):
                step = self._once.get(number)
                if step is None:
                    step = self._once[number] = asyncio.ensure_future(self._offer(number))
                    step.add_done_callback(_retrieve)
                version = update.name if number == last else None
                flush = update.flush and number == last
                await self._hand_over(number, step, target, version, flush)
        except BaseException:  # also a cancellation: its session must not stay open
            with suppress(EngineError):  # the first error is the reason
                await engine.end_weight_update()
            raise

    async def _give_up(self, update: Update, why: Exception) -> None:
        """Go on from disk; who waits for a bucket fails."""
        if not self._failure:
            self._failure = str(why) or repr(why)
            log.warning("version %s is read from disk: %s", update.name, self._failure)
        await self._leave()

    async def _ask(self, method: str, *args: Any) -> Any:
        return await in_thread(lambda: self._lead(method, *args))

    async def _meet(self, targets: Sequence[Target]) -> None:
        """Make sure that all can take buckets."""
        return

    async def _leave(self) -> None:
        """Make all that wait for a bucket fail."""
        return

    @abstractmethod
    async def _offer(self, number: int) -> Any:
        """Offer a bucket to all replicas."""

    @abstractmethod
    async def _hand_over(
        self,
        number: int,
        offer: asyncio.Task[Any],
        target: Target,
        version: str | None,
        flush: bool,
    ) -> None:
        """Returns when the replica has the bucket."""


class Nccl(Buckets):
    """Broadcast to all replicas at once."""

    def __init__(self, lead: Lead, config: EngineConfig) -> None:
        super().__init__(lead, config)
        self._name = ""
        self._members: dict[str, Engine] = {}

    async def _meet(self, targets: Sequence[Target]) -> None:
        members = {t.engine.url: t.engine for t in targets}
        if self._members.keys() == members.keys() and await self._ask("is_whole"):
            return
        await self.close()
        backend = targets[0].engine.group_backend
        if backend == "nccl" and all(t.before.device == "cpu" for t in targets):
            backend = "gloo"
        self._name, self._members = f"stepwell-{uuid.uuid4().hex[:8]}", members
        world = 1 + sum(t.before.ranks for t in targets)
        meeting = await self._ask("open", [*members], world, self._name, backend, JOIN_TIMEOUT_S)
        joining = [self._ask("join")]
        rank = 1
        for target in targets:
            joining.append(target.engine.init_weights_update_group(meeting, rank))
            rank += target.before.ranks
        await asyncio.gather(*joining)
        await self._ask("joined")

    async def _offer(self, number: int) -> None:
        begun = time.perf_counter()
        await self._ask("broadcast", number)
        self.transfer_s += time.perf_counter() - begun

    async def _hand_over(
        self,
        number: int,
        offer: asyncio.Task[Any],
        target: Target,
        version: str | None,
        flush: bool,
    ) -> None:
        taken = target.engine.update_weights_from_distributed(
            self._buckets[number], self._name, version=version, flush_cache=flush
        )
        await asyncio.gather(taken, asyncio.shield(offer))

    async def _leave(self) -> None:
        await _briefly([self._ask("leave")])  # it may wait for a peer that is gone

    async def close(self) -> None:
        if members := self._members:
            self._members = {}
            await self._leave()
            await _briefly(e.destroy_weights_update_group(self._name) for e in members.values())


class Ipc(Buckets):
    """Handles of memory that rank 0 and the engines' processes share.

    Args:
        on_host: the memory is the machine's, and each process of an engine copies its part to its
            own GPU; else that of the one GPU which all of them share.
    """

    def __init__(self, lead: Lead, config: EngineConfig, *, on_host: bool) -> None:
        super().__init__(lead, config)
        self._on_host = on_host
        self._readers = 1

    async def _meet(self, targets: Sequence[Target]) -> None:
        self._readers = sum(target.before.ranks for target in targets)

    async def _offer(self, number: int) -> str:
        return str(await self._ask("share", number, self._readers, self._on_host))

    async def _hand_over(
        self,
        number: int,
        offer: asyncio.Task[Any],
        target: Target,
        version: str | None,
        flush: bool,
    ) -> None:
        handles = [await asyncio.shield(offer)] * target.before.ranks
        await target.engine.update_weights_from_tensor(handles, version=version, flush_cache=flush)

    async def end(self) -> None:
        await super().end()
        await self._ask("release")


class Lora(Transport):
    adapter = True

    async def send(self, update: Update, target: Target) -> None:
        await self._replace(target.engine, update.path, update.name)

    async def restore(self, update: Update, target: Target, to: Published) -> None:
        path = to.path if to.adapter else None
        await self._replace(target.engine, path, str(to.version))

    async def _replace(self, engine: Engine, path: str | None, version: str) -> None:
        if not isinstance(engine, EngineClient):
            raise EngineRequestError(f"{engine} takes no adapters: set engine.weight_transport")
        try:
            await engine.unload_lora_adapter(ADAPTER_NAME)
        except EngineRequestError as e:
            log.debug("%s has no adapter to replace: %s", engine.url, e)
        if path is not None:
            loaded = await engine.load_lora_adapter(ADAPTER_NAME, path)
            if loaded.get(ADAPTER_NAME) != path:
                raise EngineRequestError(f"{engine.url} has adapters {loaded} after loading {path}")
        await engine.update_weight_version(version)


def build_transport(config: EngineConfig, lead: Lead, *, on_host: bool = True) -> Transport:
    """The transport of a run, `engine.weight_transport`; `on_host` is `Ipc`'s."""
    if config.weight_transport == "nccl":
        return Nccl(lead, config)
    if config.weight_transport == "ipc":
        return Ipc(lead, config, on_host=on_host)
    return Delta() if config.weight_transport == "delta" else stored_transport(config)


def stored_transport(config: EngineConfig) -> Transport:
    """The transport of a publisher that has no trainer: whole versions, as they are stored."""
    return Lora() if config.weight_transport == "lora" else Disk()


async def in_thread(work: Callable[[], Any]) -> Any:
    """`work()` on a thread that keeps no process alive: a collective call may hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(e)

    Thread(target=run, name="weight-transport", daemon=True).start()
    return await asyncio.wrap_future(future)


async def _briefly(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait a little for what may fail or hang without harm."""
    tasks = [asyncio.ensure_future(each) for each in work]
    for task in tasks:
        task.add_done_callback(_retrieve)
    if tasks:
        await asyncio.wait(tasks, timeout=LEAVE_S)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Replicas that waited for it have its error; if there are none, it is of no interest."""
    if not task.cancelled():
        task.exception()
