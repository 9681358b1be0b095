"""What a trainer that starts again does with the groups its pool still holds.

    trained, their ack lost        acked now, or dropped: never trained twice
    leased, open, of a lost policy dropped; the prompts of the checkpoint are issued again
    ready, of the checkpoint       kept: generation is not repeated

The resumed history is that of the checkpoint. Prompts drawn after it are drawn again by the source,
so groups that were made of them since must go; and tokens of a policy version published after it
belong to weights that no longer exist. Groups that were not opened by a `Producer` (a black-box
agent's) stay unless they hold such tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from datapool.client import DataPoolClient
from datapool.errors import (
    GroupClosedError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownGroupError,
    UnknownLeaseError,
)
from datapool.listing import GroupRow
from datapool.types import TRAIN, VAL
from trainer.data import Task

LOST_POLICY = "lost_policy_version"
AFTER_CHECKPOINT = "after_checkpoint"
PRODUCER_GONE = "producer_restarted"
TRAINED = "trained_before_restart"


@dataclass(slots=True)
class Reclaimed:
    """What became of the prompts that were handed out when the checkpoint was written."""

    kept: dict[str, Task] = field(default_factory=dict)
    """Their groups are ready in the pool, by prompt_uid."""
    again: dict[str, Task] = field(default_factory=dict)
    """To be issued again; by the prompt_uid that they had."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups dropped here, by reason."""


async def reclaim(
    pool: DataPoolClient,
    *,
    trained: Mapping[str, Sequence[str]],
    pending: Mapping[str, Task],
    version: int,
) -> Reclaimed:
    """Bring the pool to what the checkpoint says.

    Args:
        trained: lease_id -> prompt_uids of the leases whose groups the checkpoint contains.
        pending: prompt_uid -> task of the prompts that it does not.
        version: the newest policy version that it knows.
    """
    result = Reclaimed()
    unacked = [
        uid for lease, uids in trained.items() if not await _ack(pool, lease) for uid in uids
    ]
    for channel in (TRAIN, VAL):
        await pool.release_leases(channel, "trainer restarted")
    for prompt_uid in unacked:  # once no lease holds them: a leased group cannot be dropped
        await _drop(pool, prompt_uid, TRAINED, TRAIN, result)
    async for group in _groups(pool, TRAIN):
        ours = "task" in group.metadata
        uid = group.prompt_uid
        if group.newest_version is not None and group.newest_version > version:
            await _drop(pool, uid, LOST_POLICY, TRAIN, result)
        elif ours and uid not in pending:
            await _drop(pool, uid, AFTER_CHECKPOINT, TRAIN, result)
        elif ours and group.state == "open":
            await _drop(pool, uid, PRODUCER_GONE, TRAIN, result)
        elif ours:
            result.kept[uid] = pending[uid]
    async for group in _groups(pool, VAL):
        await _drop(pool, group.prompt_uid, PRODUCER_GONE, VAL, result)
    result.again = {uid: task for uid, task in pending.items() if uid not in result.kept}
    return result


async def settle(pool: DataPoolClient, trained: Mapping[str, Sequence[str]]) -> None:
    """Ack the leases of a checkpoint. Groups of one that ran out meanwhile are dropped; any that is
    leased once more by then is acked with that lease."""
    for lease_id, prompt_uids in trained.items():
        if not await _ack(pool, lease_id):
            for prompt_uid in prompt_uids:
                await _drop(pool, prompt_uid, TRAINED, TRAIN, Reclaimed())


async def renew(pool: DataPoolClient, lease_id: str) -> None:
    """Keep a lease. One that ran out while the pool was down is no loss: the trainer knows what it
    has trained, and `settle` takes those groups out."""
    with suppress(UnknownLeaseError, LeaseExpiredError, LeaseClosedError):
        await pool.renew(lease_id)


async def _ack(pool: DataPoolClient, lease_id: str) -> bool:
    """False: there is no such lease any more."""
    try:
        await pool.ack(lease_id)
    except (UnknownLeaseError, LeaseExpiredError, LeaseClosedError):
        return False
    return True


async def live_groups(pool: DataPoolClient) -> set[str]:
    """prompt_uids of the open, ready and leased groups of the train channel."""
    return {group.prompt_uid async for group in _groups(pool, TRAIN)}


async def _groups(pool: DataPoolClient, channel: str) -> AsyncIterator[GroupRow]:
    cursor: str | None = None
    while True:
        page = await pool.list_groups(channel, cursor)
        for group in page.items:
            yield group
        cursor = page.cursor
        if cursor is None:
            return


async def _drop(
    pool: DataPoolClient, prompt_uid: str, reason: str, channel: str, result: Reclaimed
) -> None:
    try:
        await pool.drop_group(prompt_uid, reason, channel)
    except (UnknownGroupError, GroupClosedError):
        return  # gone already
    result.dropped[reason] += 1
