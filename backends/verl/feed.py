"""From the DataPool into a verl training loop, and back the news that it was trained.

    async with VerlFeed(connect(), VerlBackend(), groups=8) as feed:
        async for batch in feed:              # a DataProto of 8 groups
            train_on(batch)                   # your verl loop
            if save_now():
                save_checkpoint()
                await feed.ack()              # all batches so far: trained and durable

    lease ──► batch ──► ack()            gone from the pool
                └─────► left, or died    back to the pool, served again

A batch that is not acked when the loop is left goes back at once; after a crash it goes back when
its lease runs out. Leases are renewed while the event loop runs. A step that blocks it for longer
than `lease_s` loses them: a group that the pool then serves again is recognised and not yielded
twice, but another consumer of the channel may get it first. For a V1 trainer, `groups()` yields the
groups whose rows `verl/queue.put` takes: `put(backend.rows(trained_steps(groups)))`.

Owns: what a batch is. Does not own: leases (`datapool/remote/lease_keeper.py`), conversion
(`verl/backend.py`), the pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from torch import Tensor

from stepwell.backends.verl.backend import DataProto, VerlBackend, seen_groups
from stepwell.datapool.errors import DataPoolError, LeaseExpiredError
from stepwell.datapool.remote.lease_keeper import LeaseKeeper, LeasingPool
from stepwell.datapool.types import TRAIN, Group

Columns = Callable[[Sequence[Group]], Mapping[str, Tensor]]
"""Groups, without replies that nobody saw -> Stepwell's columns over `trained_steps(groups)`:
advantages of your own."""


class VerlFeed:
    """An async iterator of batches; see the module's docstring.

    Args:
        groups: prompts per batch, verl's `data.train_batch_size`.
        timeout_s: ends the iteration when no group is ready for so long; None: waits for ever.
        lease_s: how long a batch is held without a renewal.
        columns: advantages and the like of your own; None: verl's.
    """

    def __init__(
        self,
        pool: LeasingPool,
        backend: VerlBackend,
        *,
        groups: int,
        channel: str = TRAIN,
        timeout_s: float | None = None,
        lease_s: float = 600.0,
        columns: Columns | None = None,
    ) -> None:
        self._keeper = LeaseKeeper(pool, channel, lease_s)
        self._backend = backend
        self._n_groups = groups
        self._timeout_s = timeout_s
        self._columns = columns
        self._held: list[str] = []
        """prompt_uids handed out since the last `ack`."""

    async def __aenter__(self) -> VerlFeed:
        self._keeper.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._keeper.close()
        reason = f"verl feed: {kind.__name__}" if kind else "verl feed: closed without ack"
        held, self._held = self._held, []
        with suppress(DataPoolError):  # the pool is down: they go back by themselves
            await self._keeper.nack(held, reason)

    async def __aiter__(self) -> AsyncIterator[DataProto]:
        async for groups in self.groups():
            pictures = {k: v for g in groups for k, v in (await self._keeper.pictures(g)).items()}
            seen = seen_groups(groups)
            columns = self._columns(seen) if self._columns else None
            yield self._backend.convert_groups(seen, columns=columns, pictures=pictures)

    async def groups(self) -> AsyncIterator[tuple[Group, ...]]:
        """The leased groups themselves, batch by batch."""
        while groups := await self._keeper.lease(self._n_groups, timeout_s=self._timeout_s):
            self._held += [group.prompt_uid for group in groups]
            yield groups

    async def ack(self) -> None:
        """Everything handed out so far is trained and durable: the pool may forget it.

        Raises:
            LeaseExpiredError: a lease was lost before, and another consumer has its groups now. All
                other groups are acked, or dropped if no lease holds them.
        """
        refused = await self._keeper.settle(self._held)
        n, self._held = len(self._held), []
        if refused:
            raise LeaseExpiredError(
                f"the leases of {len(refused)} of {n} groups ran out, and another consumer "
                f"took them: {', '.join(refused[:8])}; raise lease_s above the longest time for "
                "which the event loop is blocked"
            )
