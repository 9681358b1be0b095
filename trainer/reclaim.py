"""Cleanup by a restarted trainer of the groups that its pool still holds.

    trained, their ack lost        acked now, or dropped: never trained twice
    leased, open, of a lost policy dropped; the prompts of the checkpoint are issued again
    ready, of the checkpoint       kept: generation is not repeated

The resumed history is that of the checkpoint. Prompts drawn after it are drawn again by the source,
so groups that were made of them since must go; and prompts whose tokens are of a policy version
published after it are better issued again: those weights no longer exist. Groups that were not
opened by a `Producer` (an agent's that came by itself) stay: nobody can issue them again, and their
log-probs say by what they were sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from stepwell.datapool.errors import GroupClosedError, UnknownGroupError
from stepwell.datapool.inspect.pages import GroupRow
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LOST
from stepwell.datapool.selection import DOUBTFUL
from stepwell.datapool.types import TRAIN, VAL
from stepwell.trainer.data import Task

LOST_POLICY = "lost_policy_version"
AFTER_CHECKPOINT = "after_checkpoint"
PRODUCER_GONE = "producer_restarted"
TRAINED = "trained_before_restart"
RESTARTED = "trainer restarted"
"""Why leases go back."""
ISSUED = "stepwell_issued"
"""Key of a group's metadata: true where a `Producer` opened it. Agents name theirs as they like."""


@dataclass(slots=True)
class Reclaimed:
    """Outcome of the prompts that were handed out when the checkpoint was written."""

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
    channel: str = TRAIN,
) -> Reclaimed:
    """Bring the pool to what the checkpoint says.

    Args:
        trained: lease_id -> prompt_uids of the groups that the checkpoint contains
            (`lease_keeper.by_lease`): those leases are acked, the groups of "" are dropped.
        pending: prompt_uid -> task of the prompts that it does not.
        version: the newest policy version that it knows.
    """
    result = Reclaimed()
    n_dropped = len(await settle_former(pool, trained, channel))
    if n_dropped:
        result.dropped[TRAINED] = n_dropped
    await pool.release_leases(VAL, RESTARTED)
    async for group in _groups(pool, channel):
        uid = group.prompt_uid
        ours = ISSUED in group.metadata
        reason = None
        if ours and group.newest_version is not None and group.newest_version > version:
            reason = LOST_POLICY
        elif ours and uid not in pending:
            reason = AFTER_CHECKPOINT
        elif ours and DOUBTFUL in group.marks.tags and group.marks.trainable is False:
            reason = DOUBTFUL  # held for a person; the prompt can be issued again
        elif ours and group.state == "open":
            reason = PRODUCER_GONE
        elif ours:
            result.kept[uid] = pending[uid]
        if reason is not None:
            result.dropped[reason] += await _drop(pool, uid, reason, channel)
    async for group in _groups(pool, VAL):
        result.dropped[PRODUCER_GONE] += await _drop(pool, group.prompt_uid, PRODUCER_GONE, VAL)
    result.again = {uid: task for uid, task in pending.items() if uid not in result.kept}
    return result


async def settle_former(
    pool: DataPoolClient, trained: Mapping[str, Sequence[str]], channel: str
) -> list[str]:
    """Take the groups that a checkpoint contains out of the pool, and return all others that the
    former process of the channel's only consumer had leased.

    Args:
        trained: as `reclaim`.

    Returns:
        prompt_uids of the groups that had to be dropped, for their leases had run out.
    """
    live = await live_groups(pool, channel) if trained else set()
    unacked = [
        uid
        for lease, uids in trained.items()
        # Leases of two pools may have one number: `run.resume` may name another run's checkpoint.
        if not lease or not live.issuperset(uids) or not await _ack(pool, lease)
        for uid in uids
    ]
    await pool.release_leases(channel, RESTARTED)
    # Once no lease holds them: a leased group cannot be dropped.
    back = [uid for uid in unacked if uid in live]
    return [uid for uid in back if await _drop(pool, uid, TRAINED, channel)]


async def drop_ended(pool: DataPoolClient, ended: Set[str], channel: str) -> list[str]:
    """Drop live groups that the ledger says were trained or dropped before; their prompt_uids."""
    back = sorted(ended & await live_groups(pool, channel)) if ended else []
    return [uid for uid in back if await _drop(pool, uid, TRAINED, channel)]


async def _ack(pool: DataPoolClient, lease_id: str) -> bool:
    """False: there is no such lease any more."""
    try:
        await pool.ack(lease_id)
    except LOST:
        return False
    return True


async def live_groups(pool: DataPoolClient, channel: str = TRAIN) -> set[str]:
    """prompt_uids of the open, ready and leased groups of the channel."""
    return {group.prompt_uid async for group in _groups(pool, channel)}


async def _groups(pool: DataPoolClient, channel: str) -> AsyncIterator[GroupRow]:
    cursor: str | None = None
    while True:
        page = await pool.list_groups(channel, cursor)
        for group in page.items:
            yield group
        cursor = page.cursor
        if cursor is None:
            return


async def _drop(pool: DataPoolClient, prompt_uid: str, reason: str, channel: str) -> bool:
    """False: it was gone already."""
    try:
        await pool.drop_group(prompt_uid, reason, channel)
    except (UnknownGroupError, GroupClosedError):
        return False
    return True
