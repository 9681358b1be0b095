"""One transaction over all engine replicas: all that live get a version, or none.

    lock ─► remember ─► prepare ─► pause ─► transfer ─► verify ─► commit ─► unlock ─► continue
               │           │         │         │          │         └─ rename of `current.json`
               │           │         │         │          └─ version and checksum
               └───────────┴─────────┴─────────┴──────────┴── gone ──► *fenced*, others go on
                                                          └── any other failure ──► roll back, raise

What needs no pause comes before it: the files are held against their checksums and hashed, and the
transport prepares (`transports.py`). The pause is for loading and checking.

A replica is fenced when it cannot serve before somebody has brought it to the committed version:
its process is gone (its machine refuses connections), and its supervisor starts the next one paused
and continues it under the store's lock only (`engines/supervisor.py`); or it has answered that it
is paused. One that can be neither reached nor shown to be gone (a machine that lost its network)
might go on serving: then nothing is committed. At least one replica must be verified.

Worked example, replicas A, B, C at 4. A and B load 5, C is killed at it and refuses connections: C
is fenced, A and B are verified, 5 is committed, A and B continue. C's supervisor, which has waited
for the lock since C came up paused at 4, loads 5, unlocks, continues it. Had B's disk been full, A
and B would have gone back to 4, both continued, and the error would name B.

A *canary* is the same for some of the replicas, without the commit: those that are verified go on
with the new version, which they call `7-canary`, and every other one serves what is committed. So
does a canary's next process, and one that could not be verified. A publication to all ends this.

With `mode="drain"` there is no pause: each replica finishes its running requests on the old weights
and starts the next on the new, so replicas may differ for a moment; every token says its version.

An adapter takes the place of the one before by three requests, between which there is none: SGLang
refuses calls then, and does not unload one that a held request uses. So `mode` is `abort` for it:
what runs ends with what it has, what comes waits, and the gateway goes on with both.

Two who publish at once (a trainer, `stepwell rollback`) meet at the lock: each names the committed
version that it has seen, and who comes second commits nothing (`SupersededError`).

A crash of all engines is waited out for `patience_s`; engines that answer and refuse are asked
REFUSALS times at most.

Does not decide when to publish (`trainer/publish/`), nor how weights go there (`transports.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stepwell.backends.config import PauseMode, PublishMode
from stepwell.backends.engines.api import Engine
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
    SupersededError,
    WeightUpdateError,
)
from stepwell.backends.weights.digest import RankHashes, checkpoint_hashes, compare
from stepwell.backends.weights.store import Published, WeightStore, check_version
from stepwell.backends.weights.transports import ADAPTER_NAME, Disk, Target, Transport, Update

log = logging.getLogger(__name__)

Phase: TypeAlias = Literal[
    "lock", "remember", "prepare", "pause", "transfer", "verify", "commit", "continue"
]
When: TypeAlias = Literal["before", "during", "after"]
Hook: TypeAlias = Callable[[Phase, When], Awaitable[None]]

PHASES: tuple[Phase, ...] = (
    "remember",
    "prepare",
    "pause",
    "transfer",
    "verify",
    "commit",
    "continue",
)
CONTINUE_TIMEOUT_S = 60.0
FENCE_TIMEOUT_S = 10.0
"""Seconds that a replica that failed may take to be shown gone or paused."""
REFUSALS = 3
"""An engine that crashed and came back within a publication answers, and the next one succeeds."""
RETRY_S = 0.5
_FENCE_RETRY_S = 0.05
_PAUSE_TIMEOUT_S = 5.0
_NOT_FLUSHED = "the cache was not flushed"
_LOST = (EngineUnavailableError, EngineTimeoutError, EngineInternalError)
"""Errors of a replica that may be gone."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A committed publication."""

    version: int
    seconds: float
    """From the lock to the last continue."""
    fenced: Mapping[str, str] = field(default_factory=dict)
    """Replicas that do not serve yet, and why: their supervisors, or the next publication, bring
    them to the committed version."""
    verified: Mapping[str, str] = field(default_factory=dict)
    """Verification of each replica: `checksum`, `agreement` (with the others) or `version`."""
    transfer_s: float = 0.0
    """Seconds that bytes travelled, where that is not part of loading."""
    load_s: float = 0.0
    """Seconds of the pause in which engines loaded."""
    pause_s: float = 0.0
    """Seconds in which nothing was generated: from the first pause to the last continue."""


@dataclass(slots=True)
class _Replica(Target):
    paused: bool = False
    touched: bool = False
    """An update was sent, whatever came of it."""
    fenced: str = ""
    """Why it is left out; empty: it is not."""
    gone: bool = False


async def publish(
    engines: Sequence[Engine],
    path: str | os.PathLike[str],
    version: int,
    mode: PublishMode = "abort",
    *,
    store: WeightStore | None = None,
    transport: Transport | None = None,
    canary: bool = False,
    seen: int | None = None,
    locked: bool = False,
    patience_s: float = 0.0,
    complete: Callable[[Engine], Awaitable[None]] | None = None,
    continue_timeout_s: float = CONTINUE_TIMEOUT_S,
    hook: Hook | None = None,
) -> Publication:
    """Load the weights in `path` as `version` on every engine that lives, or on none.

    `store` is committed between verification and continue; without one a crashed engine restarts
    from the weights it was launched with, at once. A caller that is cancelled waits for the end of
    the transaction: no engine must be left paused, as it would be by a process that ends, or be
    without the store's lock, which a caller may hold.

    Args:
        transport: None: the directory is read.
        canary: `engines` are not all there are, and nothing is committed.
        seen: committed version that the caller knows of, 0 for none; None: any may be replaced.
        locked: the caller holds the store's lock.
        patience_s: seconds that the first engine may take to come back.
        complete: awaited before an engine goes on: all are paused, and have lent memory that
            loading did not need.
        hook: awaited before, during (all replicas were just asked) and after each phase.

    Raises:
        SupersededError: another version than `seen` is committed; no engine was asked anything.
        WeightUpdateError: nothing was committed (`serving` tells what each replica has now).
    """
    if not engines:
        raise ValueError("publish was given no engines")
    give_up, refusals = time.monotonic() + patience_s, 0
    while True:
        transaction = _Transaction(
            engines,
            str(path),
            version,
            mode,
            store,
            transport or Disk(),
            canary,
            seen,
            locked,
            complete,
            continue_timeout_s,
            hook,
        )
        running = asyncio.ensure_future(transaction.run())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise
        except WeightUpdateError as e:
            refusals += None not in e.serving.values()
            if refusals >= REFUSALS or time.monotonic() >= give_up:
                raise
            log.warning("version %d is published again: %s", version, e)
        await asyncio.sleep(RETRY_S)


class _Transaction:
    def __init__(
        self,
        engines: Sequence[Engine],
        path: str,
        version: int,
        mode: PublishMode,
        store: WeightStore | None,
        transport: Transport,
        canary: bool,
        seen: int | None,
        locked: bool,
        complete: Callable[[Engine], Awaitable[None]] | None,
        continue_timeout_s: float,
        hook: Hook | None,
    ) -> None:
        # Who lent memory was paused for it, and goes on however this ends.
        self.replicas = [_Replica(engine, paused=complete is not None) for engine in engines]
        mode = "abort" if transport.adapter else mode
        self.update = Update(
            path, version, flush=mode != "in_place", drains=mode == "drain", canary=canary
        )
        self.mode = mode
        self.store = store
        self.transport = transport
        self.seen = seen
        self.locked = locked
        self.complete = complete
        self.continue_timeout_s = continue_timeout_s
        self.hook = hook
        self.committed: Published | None = None
        """Version that was committed before."""
        self.how: dict[str, str] = {}
        self.expected: dict[str, dict[str, str]] = {}
        """The hashes that embedded engines must have, by replica."""

    async def run(self) -> Publication:
        try:
            return await self._run()
        finally:
            await self.transport.end()

    async def _run(self) -> Publication:
        async with self._locked():
            start = time.perf_counter()
            self.committed = self.store.current() if self.store is not None else None
            found = 0 if self.committed is None else self.committed.version
            if self.seen is not None and found != self.seen:
                raise SupersededError(found)
            try:
                if self.update.canary and self.committed is None:
                    raise WeightUpdateError("a canary needs a committed version to go back to")
                await self._all("remember", "read the state of", self._remember)
                await self._prepare()
                paused = begun = time.perf_counter()
                if self.mode != "drain":
                    await self._all("pause", "pause", self._pause)
                    begun = time.perf_counter()
                moved_s = self.transport.transfer_s
                await self._all("transfer", "load the weights on", self._load)
                moved_s = self.transport.transfer_s - moved_s
                load_s = time.perf_counter() - begun - moved_s
                await self._verify()
                await self._commit()
            except Exception as e:  # whatever it is, no engine may be left paused
                serving = await self._roll_back()
                raise WeightUpdateError(
                    f"version {self.update.version} was not published: {e}; replicas now serve "
                    f"{serving}",
                    replica=getattr(e, "replica", None),
                    serving=serving,
                ) from e
        await self._all("continue", "continue", self._continue, committed=True)
        pause_s = 0.0 if self.mode == "drain" else time.perf_counter() - paused
        if not self.update.canary:  # else the next publication does
            fenced = [r for r in self.replicas if r.fenced and not r.gone]
            await asyncio.gather(*map(self._readmit, fenced))
        left_out = {r.engine.url: r.fenced for r in self.replicas if r.fenced}
        return Publication(
            self.update.version,
            time.perf_counter() - start,
            left_out,
            self.how,
            transfer_s=self.transport.transfer_s,
            load_s=load_s,
            pause_s=pause_s,
        )

    @property
    def _published(self) -> Published:
        return Published(self.update.version, self.update.path, self.transport.adapter)

    @property
    def _live(self) -> list[_Replica]:
        return [r for r in self.replicas if not r.fenced]

    def _locked(self) -> AbstractAsyncContextManager[None]:
        if self.store is None or self.locked:
            return nullcontext()
        return self.store.lock.held()

    # -- phases -------------------------------------------------------------------------------

    async def _all(
        self,
        phase: Phase,
        what: str,
        act: Callable[[_Replica], Awaitable[None]],
        *,
        committed: bool = False,
    ) -> None:
        """`act` on every live replica at once; the first failure, in order of replicas, is raised
        when all have ended: a rollback must not race an update that is still running."""
        await self._notify(phase, "before")
        replicas = self._live
        tasks = [asyncio.ensure_future(self._attempt(what, r, act)) for r in replicas]
        await self._notify(phase, "during")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, EngineError | ValueError):
                url = replica.engine.url
                raise WeightUpdateError(f"could not {what} {url}: {result}", replica=url)
            if isinstance(result, BaseException):
                raise result
        if not self._live and not committed:
            raise WeightUpdateError(
                f"could not {what} any replica: "
                + "; ".join(f"{r.engine.url} {r.fenced}" for r in self.replicas)
            )
        await self._notify(phase, "after")

    async def _attempt(
        self, what: str, replica: _Replica, act: Callable[[_Replica], Awaitable[None]]
    ) -> None:
        try:
            await act(replica)
        except _LOST as e:
            if not await self._fence(replica, e):
                raise
            log.warning("publication goes on without %s: %s", replica.engine.url, replica.fenced)

    async def _notify(self, phase: Phase, when: When) -> None:
        if self.hook is not None:
            await self.hook(phase, when)

    async def _remember(self, replica: _Replica) -> None:
        replica.before = await replica.engine.about()

    async def _prepare(self) -> None:
        """Do the work before the pause. A transport that fails goes on from disk; a replica that is
        lost meanwhile is met at its pause."""
        await self._notify("prepare", "before")
        tasks = [
            asyncio.ensure_future(asyncio.to_thread(self._read_files)),
            asyncio.ensure_future(self.transport.prepare(self.update, self._live, self.committed)),
        ]
        await self._notify("prepare", "during")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        await self._notify("prepare", "after")

    def _read_files(self) -> None:
        """Hold the files that engines load, and are held against, against their checksums, and
        hash their tensors."""
        if self.store is not None:
            check_version(self.store.folder, self.update.path)
        self.expected = self._expected()

    async def _pause(self, replica: _Replica) -> None:
        replica.paused = True  # before the answer: a lost answer may still have paused it
        if self.mode != "drain":
            await replica.engine.pause(self.mode)

    async def _load(self, replica: _Replica) -> None:
        replica.touched = True
        try:
            await self.transport.send(self.update, replica)
        except EngineRequestError as e:
            if self.mode != "drain" or _NOT_FLUSHED not in str(e):
                raise
            # A real SGLang that was not paused: it has the weights, does not say so, and keeps
            # prefixes of the old ones. Paused, it does all three.
            replica.paused = True
            await replica.engine.pause("retract")
            await self.transport.send(self.update, replica)

    async def _verify(self) -> None:
        """Version and bytes of every live replica."""
        answers: dict[str, Sequence[RankHashes] | None] = {}

        async def ask(replica: _Replica) -> None:
            await self._verify_version(replica)
            answers[replica.engine.url] = await self._hashes(replica)

        await self._all("verify", "verify the weights of", ask)
        self.how, wrong = compare(self._in_order(answers), self.expected)
        for url, what in wrong.items():
            raise WeightUpdateError(
                f"{url} says that it loaded version {self.update.version}, but {what}", replica=url
            )

    def _in_order(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        return {url: answers[url] for r in self._live if (url := r.engine.url) in answers}

    def _expected(self) -> dict[str, dict[str, str]]:
        """The hashes that live embedded engines must have, by replica. Reads the checkpoint."""
        dtypes = {r.engine.url: r.before.dtype for r in self._live if r.before.is_embedded}
        if self.transport.adapter:
            dtypes = dict.fromkeys(dtypes, "auto")
        prefix = f"{ADAPTER_NAME}:" if self.transport.adapter else ""
        path = self.update.path
        of = {d: checkpoint_hashes(path, d, prefix=prefix) for d in set(dtypes.values())}
        return {url: of[dtype] for url, dtype in dtypes.items()}

    async def _verify_version(self, replica: _Replica) -> None:
        found = await replica.engine.state()
        if (found.version, found.is_canary) != (self.update.version, self.update.canary):
            raise WeightUpdateError(
                f"{replica.engine.url} serves version {found.name} after loading "
                f"{self.update.name}",
                replica=replica.engine.url,
            )

    async def _hashes(self, replica: _Replica) -> Sequence[RankHashes] | None:
        ranks = await replica.engine.weight_hashes()
        if ranks is None:
            return None
        return [_rank_hashes(rank, replica) for rank in ranks]

    async def _commit(self) -> None:
        await self._notify("commit", "before")
        if self.store is not None and not self.update.canary:
            new = self._published
            self.store.commit(new.version, new.path, adapter=new.adapter)
        await self._notify("commit", "after")

    # -- failure ------------------------------------------------------------------------------

    async def _fence(self, replica: _Replica, error: EngineError) -> bool:
        """True if `replica`, which failed with `error`, cannot serve before it is brought to the
        committed version. Asks it to pause: a new process of it is paused already, an old one must
        be, and of one that is gone the machine says so."""
        replica.paused = True  # by what follows, whatever is answered: a rollback continues it
        until = time.monotonic() + FENCE_TIMEOUT_S
        mode: PauseMode = "abort" if self.transport.adapter else "retract"
        while time.monotonic() < until:
            try:
                await replica.engine.pause(mode, timeout_s=_PAUSE_TIMEOUT_S)
            except EngineUnavailableError as e:
                if e.refused:
                    replica.fenced, replica.gone = f"is gone ({error})", True
                    return True
            except EngineError:
                pass
            else:
                if isinstance(error, EngineInternalError):
                    return False  # it lives and failed: that is its answer
                replica.fenced = f"is paused ({error})"
                return True
            await asyncio.sleep(_FENCE_RETRY_S)
        return False

    async def _roll_back(self) -> dict[str, int | None]:
        """Put every replica back to what is committed and continue it. One that cannot be put back
        stays paused: it must not serve weights that were never committed."""

        async def restore(replica: _Replica) -> int | None:
            engine = replica.engine
            try:
                if replica.touched or await self._has_strayed(replica):
                    await self.transport.restore(self.update, replica, self._before(replica))
                if replica.paused:
                    await self._go_on(engine)
                return await engine.weight_version()
            except (EngineError, ValueError):
                return None

        left = [r for r in self.replicas if not r.gone]
        versions = await asyncio.gather(*(restore(r) for r in left))
        serving: dict[str, int | None] = {r.engine.url: None for r in self.replicas}
        return serving | {r.engine.url: v for r, v in zip(left, versions, strict=True)}

    async def _go_on(self, engine: Engine) -> None:
        if self.complete is not None:
            await self.complete(engine)
        await engine.continue_()

    async def _has_strayed(self, replica: _Replica) -> bool:
        """It is paused by us and has not the committed version: it came up during an earlier
        publication, and continuing it would serve what was replaced."""
        if self.committed is None or not replica.paused:
            return False
        return await replica.engine.weight_version() != self.committed.version

    def _before(self, replica: _Replica) -> Published:
        """Version a replica goes back to: the committed one, which need not be what it had."""
        if self.committed is not None:
            return self.committed
        if replica.before.version is None or not replica.before.model_path:
            raise ValueError(f"{replica.engine.url} does not say which weights it had")
        return Published(replica.before.version, replica.before.model_path)

    # -- after the commit ---------------------------------------------------------------------

    async def _continue(self, replica: _Replica) -> None:
        """Continue a replica that was verified. One that does not answer, or has another version,
        is a new process: its supervisor continues it. Nothing is raised: the version is
        committed."""
        until = time.monotonic() + self.continue_timeout_s
        while True:
            try:
                if await replica.engine.weight_version() != self.update.version:
                    replica.fenced = "was restarted"
                    return
                if replica.paused:
                    await self._go_on(replica.engine)
                return
            except EngineUnavailableError as e:
                replica.fenced = f"is gone ({e})"
                return
            except (EngineError, ValueError) as e:
                if time.monotonic() >= until:
                    replica.fenced = f"does not continue ({e})"
                    log.warning(
                        "%s has version %d, but %s",
                        replica.engine.url,
                        self.update.version,
                        replica.fenced,
                    )
                    return
                await asyncio.sleep(_FENCE_RETRY_S)

    async def _readmit(self, replica: _Replica) -> None:
        """Bring a replica that was fenced and answers again to the committed version. Its
        supervisor does so, too, if it is a new process: under the lock one after the other. So
        does who waited for the lock to publish another version, which is committed then."""
        async with self._locked():
            if not replica.paused:  # its supervisor's: it came up paused
                return
            current = self.store.current() if self.store is not None else None
            if current is not None and current.version != self.update.version:
                return
            try:
                engine = replica.engine
                if await engine.weight_version() != self.update.version or replica.touched:
                    # From disk: of one that did not answer it is not known what else it takes.
                    await self.transport.restore(self.update, replica, self._published)
                await self._verify_version(replica)
                await self._go_on(engine)
                replica.fenced = ""
            except (EngineError, WeightUpdateError, ValueError) as e:
                log.warning("%s stays paused at an old version: %s", replica.engine.url, e)


def _rank_hashes(rank: Mapping[str, Any], replica: _Replica) -> RankHashes:
    """One entry of `ranks` of `/weights_checker`."""
    places = [
        {k: v for k, v in place.items() if k not in ("dp_rank", "rank", "size")}
        for place in rank["parallelism_info"]
    ]
    layout = repr((replica.before.device, replica.before.dtype, sorted(map(repr, places))))
    return layout, dict(rank["checksums"])
