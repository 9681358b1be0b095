"""The pool's side of a slime run: groups leased for its rollouts, settled by its checkpoints.

    ready ──take(rollout 7)──► leased, renewed ──settle(7)──► acked       checkpoint 7 is durable
      ▲                          │
      └───────resume(6)──────────┘   killed, and restarted from checkpoint 6: served once more

A group is acked when a checkpoint contains its training, not when slime has it. Which rollout got
which groups is in `rollout/stepwell_groups.jsonl` beside slime's own state, written before slime
gets them, so that a restart knows of each lease whether the checkpoint it loads contains it. It
does not matter whether `settle` was reached after that checkpoint was written.

A lease that runs out all the same (the pool was down for long) brings its groups back while slime
has them: they are recognised, held under the new lease, and not handed out twice.

Owns: leases, their renewal, the file, the thread that an event loop runs in. Does not own: what a
group becomes (`backends/slime_samples.py`), when slime saves (`slime_rollout.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from backends.slime_samples import rollouts_of
from datapool.client import DataPoolClient
from datapool.errors import (
    DataPoolError,
    GroupClosedError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownGroupError,
    UnknownLeaseError,
)
from datapool.types import Group, Lease
from trainer.errors import StarvedError
from trainer.reclaim import TRAINED, settle

log = logging.getLogger(__name__)

T = TypeVar("T")

UNSCORED = "unscored"
GROUP_SIZE = "group_size"

WAIT_S = 60.0
"""Between two words in the log about groups that do not come."""
RENEWALS = 4
"""Within the time of a lease."""

FILE = "rollout/stepwell_groups.jsonl"


@dataclass(frozen=True, slots=True)
class Held:
    """A group that slime has and no settled checkpoint contains."""

    rollout_id: int
    lease_id: str


class SlimePool:
    """Groups of one channel for one slime run, which is the channel's only consumer.

    Args:
        client: made where it is called first; used in this object's own event loop only.
        save, load: the folders of slime's checkpoints; None: no file is written, or read.
    """

    def __init__(
        self,
        client: Callable[[], DataPoolClient],
        channel: str,
        lease_s: float,
        save: Path | None = None,
        load: Path | None = None,
    ) -> None:
        self._connect = client
        self._client: DataPoolClient | None = None
        self._channel = channel
        self._lease_s = lease_s
        self._file = None if save is None else save / FILE
        self._sources = {folder / FILE for folder in (save, load) if folder is not None}
        self._held: dict[str, Held] = {}
        self.dropped: Counter[str] = Counter()
        """Groups that were dropped here, by reason."""
        self.redelivered = 0
        self._loop = asyncio.new_event_loop()
        self._renewing: asyncio.Task[None] | None = None
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stepwell-slime", daemon=True
        )
        self._thread.start()

    @property
    def held(self) -> int:
        """Groups that slime has and no settled checkpoint contains."""
        return len(self._held)

    def take(self, rollout_id: int, n_groups: int, group_size: int) -> list[Group]:
        """Lease `n_groups` groups of up to `group_size` scored rollouts for a rollout; waits.

        Raises:
            StarvedError: the channel was shut down.
        """
        return self._call(self._take(rollout_id, n_groups, group_size))

    def settle(self, rollout_id: int) -> None:
        """A durable checkpoint contains the training of all rollouts up to this one: ack them."""
        self._call(self._settle(rollout_id))

    def resume(self, rollout_id: int) -> None:
        """The run starts from the checkpoint of this rollout (-1: from none). Groups that it
        contains are acked, all others that are leased go back to be served again."""
        self._call(self._resume(rollout_id))

    def look(self, n_groups: int | None, channel: str) -> list[Group]:
        """Take groups for good: `n_groups` of them, or if None those that are ready now."""
        return self._call(self._look(n_groups, channel))

    def close(self) -> None:
        """Stop renewing; what is held goes back when its leases run out. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the loop -------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._client is None:
            self._client = self._connect()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # interrupted while waiting: what was begun is undone
            future.cancel()
            raise

    @property
    def _pool(self) -> DataPoolClient:
        if self._client is None:
            raise RuntimeError("the pool is asked before `_call` connected to it; this is a bug")
        return self._client

    async def _take(self, rollout_id: int, n_groups: int, group_size: int) -> list[Group]:
        taken: list[Group] = []
        before = dict(self._held)
        leases: list[Lease] = []
        try:
            while len(taken) < n_groups:
                lease = await self._lease(group_size, n_groups - len(taken), rollout_id)
                refused = [(g, why) for g in lease.groups if (why := _unfit(g, group_size))]
                if refused:
                    await self._pool.nack(lease.lease_id, "holds groups that cannot be trained")
                    await self._drop(refused, self._channel)
                    continue
                leases.append(lease)
                for group in lease.groups:
                    known = self._held.get(group.prompt_uid)
                    if known is None:
                        taken.append(group)
                        known = Held(rollout_id, lease.lease_id)
                    else:
                        self.redelivered += 1
                    self._held[group.prompt_uid] = replace(known, lease_id=lease.lease_id)
            await asyncio.to_thread(self._write)
        except BaseException:  # an interruption, too: these groups were given to nobody
            self._held = before
            for lease in leases:
                with contextlib.suppress(DataPoolError):
                    await self._pool.nack(lease.lease_id, "the rollout was given up")
            raise
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
        return taken

    async def _lease(self, group_size: int, n: int, rollout_id: int) -> Lease:
        while True:
            began = time.monotonic()
            lease = await self._pool.lease_batch(
                group_size, self._channel, n, timeout_s=WAIT_S, lease_s=self._lease_s
            )
            if lease is not None:
                return lease
            counts = (await self._pool.get_statistics(self._channel))["groups"]
            have = f"{counts['ready']} are ready, {counts['open']} open"
            if time.monotonic() - began < WAIT_S / 2:
                raise StarvedError(
                    f"rollout {rollout_id} wants {n} groups of channel {self._channel!r}, which "
                    f"was shut down ({have})"
                )
            log.warning(
                "rollout %d waits for %d groups of channel %r; %s",
                *(rollout_id, n, self._channel, have),
            )

    async def _settle(self, rollout_id: int) -> None:
        if trained := self._leases_up_to(rollout_id):
            await settle(self._pool, trained)
            gone = {uid for uids in trained.values() for uid in uids}
            self._held = {uid: held for uid, held in self._held.items() if uid not in gone}
            await asyncio.to_thread(self._write)

    def _leases_up_to(self, rollout_id: int) -> dict[str, list[str]]:
        """Leases all of whose groups are of rollouts up to this one -> their prompt_uids."""
        found: dict[str, list[str]] = {}
        later = {h.lease_id for h in self._held.values() if h.rollout_id > rollout_id}
        for uid, held in self._held.items():
            if held.lease_id not in later:
                found.setdefault(held.lease_id, []).append(uid)
        return found

    async def _resume(self, rollout_id: int) -> None:
        self._held = await asyncio.to_thread(self._read)
        trained = {uid for uid, held in self._held.items() if held.rollout_id <= rollout_id}
        for lease_id, uids in self._leases_up_to(rollout_id).items():
            with contextlib.suppress(UnknownLeaseError, LeaseExpiredError, LeaseClosedError):
                await self._pool.ack(lease_id)
                trained.difference_update(uids)
        n = await self._pool.release_leases(self._channel, "slime restarted")
        # Once no lease holds them: a leased group cannot be dropped.
        await self._drop([(uid, TRAINED) for uid in trained], self._channel)
        log.info(
            "resumed after rollout %d: %d leases given back, %d trained groups dropped",
            *(rollout_id, n, len(trained)),
        )
        self._held = {}
        await asyncio.to_thread(self._write)

    async def _look(self, n_groups: int | None, channel: str) -> list[Group]:
        size, timeout_s = n_groups, None
        if size is None:
            size, timeout_s = int((await self._pool.get_statistics(channel))["ready"]), 0.0
        if not size:
            return []
        lease = await self._pool.lease_batch(None, channel, size, timeout_s=timeout_s)
        if lease is None:
            return []
        await self._pool.ack(lease.lease_id)
        return list(lease.groups)

    async def _drop(self, groups: Iterable[tuple[Group | str, str]], channel: str) -> None:
        for group, reason in groups:
            uid = group if isinstance(group, str) else group.prompt_uid
            try:
                await self._pool.drop_group(uid, reason, channel)
            except (UnknownGroupError, GroupClosedError):
                continue  # gone already
            self.dropped[reason] += 1
            if reason != TRAINED:
                log.warning("group %s is dropped: %s", uid, reason)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            for lease_id in {held.lease_id for held in self._held.values()}:
                try:
                    await self._pool.renew(lease_id, self._lease_s)
                except DataPoolError as e:  # taken out by settle, or served again to this run
                    log.warning("lease %s is not renewed: %s", lease_id, e)

    # -- the file ----------------------------------------------------------------------------

    def _write(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        rows = (
            {"prompt_uid": uid, "rollout_id": held.rollout_id, "lease_id": held.lease_id}
            for uid, held in self._held.items()
        )
        write_durably(self._file, b"".join(orjson.dumps(row) + b"\n" for row in rows))

    def _read(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for path in sorted(self._sources):
            if path.exists():
                rows = map(orjson.loads, path.read_bytes().splitlines())
                found |= {r["prompt_uid"]: Held(r["rollout_id"], r["lease_id"]) for r in rows}
        return found


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def write_durably(path: Path, content: bytes) -> None:
    """All of it or nothing, whenever the process or the machine dies."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unfit(group: Group, group_size: int) -> str | None:
    """Why slime cannot train it; None: it can."""
    rollouts = rollouts_of(group)
    if not 0 < len(rollouts) <= group_size:
        return GROUP_SIZE
    return UNSCORED if any(t.reward is None for t in rollouts) else None


def scored(groups: Sequence[Group]) -> list[Group]:
    """`groups` without rollouts that have no reward, and without those that have no other."""
    kept = [
        replace(g, trajectories=tuple(t for t in rollouts_of(g) if t.reward is not None))
        for g in groups
    ]
    return [g for g in kept if g.trajectories]
