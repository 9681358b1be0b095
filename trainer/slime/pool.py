"""The pool's side of a slime run: groups leased for its rollouts, settled by its checkpoints.

    ready ──take(rollout 7)──► leased, renewed ──settle(7)──► acked       checkpoint 7 is durable
      ▲                          │
      └───────resume(6)──────────┘   killed, and restarted from checkpoint 6: served once more

A group is acked when a checkpoint contains its training, not when slime has it. Which rollout got
which groups is in `rollout/stepwell_groups.jsonl` beside slime's own state, written before slime
gets them, so that a restart knows of each lease whether the checkpoint it loads contains it. It
does not matter whether `settle` was reached after that checkpoint was written.

Owns: which rollout has which groups, the file, the thread that an event loop runs in. Does not own:
the leases (`datapool/remote/lease_keeper.py`), what a group becomes (`backends/slime/samples.py`),
when slime saves (`rollout.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson

from stepwell.backends.slime.samples import rollouts_of
from stepwell.datapool.errors import DataPoolError, GroupClosedError, UnknownGroupError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, by_lease
from stepwell.datapool.sealed import damaged, read_lines, sealed, write_durably
from stepwell.datapool.types import Group
from stepwell.trainer.errors import StarvedError
from stepwell.trainer.pictures import read_pictures
from stepwell.trainer.reclaim import TRAINED, settle_former

log = logging.getLogger(__name__)

T = TypeVar("T")

UNSCORED = "unscored"
GROUP_SIZE = "group_size"

WAIT_S = 60.0
"""Between two words in the log about groups that do not come."""

FILE = "rollout/stepwell_groups.jsonl"


class SlimePool:
    """Groups of one channel for one slime run, which is the channel's only consumer.

    Args:
        pool: used in this object's own event loop only.
        save, load: the folders of slime's checkpoints; None: no file is written, or read.
    """

    def __init__(
        self,
        pool: DataPoolClient,
        channel: str,
        lease_s: float,
        save: Path | None = None,
        load: Path | None = None,
    ) -> None:
        self._pool = pool
        self._channel = channel
        self._leases = LeaseKeeper(pool, channel, lease_s)
        self._file = None if save is None else save / FILE
        self._sources = {folder / FILE for folder in (save, load) if folder is not None}
        self._rollout_of: dict[str, int] = {}
        """prompt_uid -> rollout, of the groups that slime has and that the pool still holds."""
        self.dropped: Counter[str] = Counter()
        """Groups that were dropped here, by reason."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stepwell-slime", daemon=True
        )
        self._thread.start()

    @property
    def held(self) -> int:
        """Groups that slime has and no settled checkpoint contains."""
        return len(self._rollout_of)

    @property
    def redelivered(self) -> int:
        """Groups that the pool served again after their lease ran out, and slime did not get."""
        return self._leases.redelivered

    def take(self, rollout_id: int, n_groups: int, group_size: int) -> list[Group]:
        """Lease `n_groups` groups of up to `group_size` scored rollouts for a rollout; waits.

        Raises:
            StarvedError: the channel was shut down.
        """
        return self._call(self._take(rollout_id, n_groups, group_size))

    def pictures(self, groups: Sequence[Group]) -> dict[str, bytes]:
        """Pictures that the steps of taken groups name, PNG by digest.

        Raises:
            BatchError: they are too many bytes (`read_pictures`).
        """
        return self._call(read_pictures((self._leases, group) for group in groups))

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
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # interrupted while waiting: what was begun is undone
            future.cancel()
            raise

    async def _take(self, rollout_id: int, n_groups: int, group_size: int) -> list[Group]:
        self._leases.start()
        taken: list[Group] = []
        try:
            while len(taken) < n_groups:
                groups = await self._lease(group_size, n_groups - len(taken), rollout_id)
                taken += groups
                if refused := [(g, why) for g in groups if (why := _unfit(g, group_size))]:
                    uids = [group.prompt_uid for group in groups]
                    await self._leases.nack(uids, "holds groups that cannot be trained")
                    await self._drop(refused)
                    taken = taken[: -len(groups)]
            self._rollout_of |= {group.prompt_uid: rollout_id for group in taken}
            await asyncio.to_thread(self._write)
        except BaseException:  # an interruption, too: these groups were given to nobody
            uids = [group.prompt_uid for group in taken]
            for uid in uids:
                self._rollout_of.pop(uid, None)
            with contextlib.suppress(DataPoolError):
                await self._leases.nack(uids, "the rollout was given up")
            raise
        return taken

    async def _lease(self, group_size: int, n: int, rollout_id: int) -> Sequence[Group]:
        while True:
            groups = await self._leases.lease(n, n_rollouts=group_size, timeout_s=WAIT_S)
            if groups is not None:
                return groups
            stats = await self._pool.get_statistics(self._channel)
            have = f"{stats['groups']['ready']} are ready, {stats['groups']['open']} open"
            if stats["shut_down"]:
                raise StarvedError(
                    f"rollout {rollout_id} wants {n} groups of channel {self._channel!r}, which "
                    f"was shut down ({have})"
                )
            log.warning(
                "rollout %d waits for %d groups of channel %r; %s",
                rollout_id,
                n,
                self._channel,
                have,
            )

    async def _settle(self, rollout_id: int) -> None:
        trained = [uid for uid, rollout in self._rollout_of.items() if rollout <= rollout_id]
        if trained:
            await self._leases.settle(trained)
            # What shares a lease with a later rollout's groups is acked with them.
            gone = set(trained).difference(self._leases.settled)
            self._rollout_of = {u: r for u, r in self._rollout_of.items() if u not in gone}
            await asyncio.to_thread(self._write)

    async def _resume(self, rollout_id: int) -> None:
        found = await asyncio.to_thread(self._read)
        held = {uid: lease_id for uid, (_, lease_id) in found.items() if lease_id}
        trained = [uid for uid, (rollout, _) in found.items() if rollout <= rollout_id]
        dropped = await settle_former(self._pool, by_lease(held, trained), self._channel)
        if dropped:
            self.dropped[TRAINED] += len(dropped)
        log.info(
            "resumed after rollout %d: %d of %d trained groups had no lease any more",
            rollout_id,
            len(dropped),
            len(trained),
        )
        self._rollout_of = {}
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

    async def _drop(self, groups: Iterable[tuple[Group, str]]) -> None:
        for group, reason in groups:
            with contextlib.suppress(UnknownGroupError, GroupClosedError):  # gone already
                await self._pool.drop_group(group.prompt_uid, reason, self._channel)
                self.dropped[reason] += 1
                log.warning("group %s is dropped: %s", group.prompt_uid, reason)

    # -- the file ----------------------------------------------------------------------------

    def _write(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        leases = self._leases.held
        rows = (
            {"prompt_uid": uid, "rollout_id": rollout_id, "lease_id": leases.get(uid, "")}
            for uid, rollout_id in self._rollout_of.items()
        )
        write_durably(self._file, b"".join(sealed(orjson.dumps(row)) for row in rows))

    def _read(self) -> dict[str, tuple[int, str]]:
        """prompt_uid -> rollout_id, lease_id."""
        found: dict[str, tuple[int, str]] = {}
        for path in sorted(self._sources):
            for at, line in read_lines(path) if path.exists() else ():
                if line is None:
                    raise damaged(
                        path,
                        f"the line at byte {at} is not what was written",
                        "delete it to have every leased group served again, trained ones too",
                    )
                row = orjson.loads(line)
                found[row["prompt_uid"]] = row["rollout_id"], row["lease_id"]
        return found


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


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
