"""The replay of a journal: its content is made into the state of a pool again.

    rows of live groups, in order ──► the methods that wrote them ──► Channel
    GroupLeft, rows that came late ──► what waits to be archived
    GroupClosed, LeaseEnded       ──► the memory of what is gone
    states                        ──► counts, as they were, over what the replay counted

While a channel replays it decides, drops and refuses nothing: what was dropped then has no rows any
more, what has rows was accepted, and decisions are rows. Afterwards the limits and filters of today
apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from stepwell.datapool.config import ArchiveConfig, ChannelConfig, PoolConfig
from stepwell.datapool.core import log_rows as kinds
from stepwell.datapool.core.channel import METHODS
from stepwell.datapool.core.pool import COUNTS, DataPool
from stepwell.datapool.errors import DataPoolError, ReplayError
from stepwell.datapool.store.segments import Row

DAMAGE = (DataPoolError, LookupError, TypeError, ValueError, AttributeError, msgspec.MsgspecError)
"""Errors of rows and states that this release did not write, or not in this order."""
ROWS_BETWEEN_SPILLS = 128
UNKNOWN: Final = PoolConfig(
    default=ChannelConfig(siblings_wait_s=1e12), archive=ArchiveConfig(dir=Path("archive"))
)
"""Configuration for tools over a journal whose own they do not know: nothing is decided by time,
and what waits to be archived goes on waiting, which a pool without an archive would delete."""

_STEPS, _PROMPT = kinds.StepsStored.__name__, kinds.PromptStored.__name__


class Stored(kinds.Log, Protocol):
    """A log with what a pool wrote there before."""

    def rows(self) -> Iterator[Row]: ...

    def states(self) -> dict[str, bytes]: ...


def restore(pool: DataPool, log: Stored) -> int:
    """Make an empty pool what the log says; from then on it writes there, and reads payloads back.
    Returns how many rows there were.

    Raises:
        ReplayError: a row cannot follow the ones before it.
    """
    states = log.states()
    for key in states:
        if key.startswith(COUNTS):
            pool.channel(key.removeprefix(COUNTS))
    for channel in pool.channels.values():
        channel.replaying = True
    prompts: dict[int, bytes] = {}
    n_rows = 0
    for n_rows, row in enumerate(log.rows(), start=1):
        try:
            _apply(pool, row, prompts)
        except DAMAGE as e:
            raise ReplayError(
                f"journal row {row.row} ({row.kind} in channel {row.channel!r}) does not follow "
                f"from those before it ({type(e).__name__}: {e}); keep the folder for analysis "
                "and start with an empty journal_dir"
            ) from e
        if n_rows % ROWS_BETWEEN_SPILLS == 0:
            pool.spill()
    pool.spill()
    _restore_states(pool, states)
    pool.attach(log)
    for channel in pool.channels.values():
        channel.end_replay()
    return n_rows


def _apply(pool: DataPool, row: Row, prompts: dict[int, bytes]) -> None:
    """Millions at a start, nearly all of them steps."""
    number, name, kind, head, payload = row
    now, group_number, record = kinds.read(kind, head)
    if name == kinds.POOL:
        if isinstance(record, kinds.LeaseRecord):
            pool.leases.restore(msgspec.structs.replace(record, row=number))
        else:
            pool.leases.restore_ended(record, number)
        return
    channel = pool.channels[name]
    channel.now, channel.counts.numbered = now, group_number - 1  # taken if it begins the group
    if kind == _STEPS:
        channel.adopt(record, prompts, payload, number)
    elif kind == _PROMPT:
        prompts[number] = payload
        channel.adopt_prompt(record, prompts[number], number)
    elif isinstance(record, kinds.GroupClosed):
        channel.recall(record, number)
    elif isinstance(record, kinds.GroupLeft):
        channel.leave(record, number)
    elif isinstance(record, kinds.StepCameLate | kinds.RewardCameLate):
        channel.log.depart_late(record, number, len(payload))
    else:
        METHODS[type(record)](channel, record)
        channel.records.group_of(record).rows.append(number)


def _restore_states(pool: DataPool, states: Mapping[str, bytes]) -> None:
    for key, state in states.items():
        try:
            pool.restore_counts(key, state)
        except DAMAGE as e:
            raise ReplayError(
                f"journal state {key!r} is not what this release writes "
                f"({type(e).__name__}: {e}); start the release that wrote it, or with an empty "
                "journal_dir"
            ) from e
